# SPDX-License-Identifier: Apache-2.0
"""What MSA's indexer wrappers refuse, with the classes and wording that their callers may match on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..checks import check_not_capturing
from ..errors import KernelNotInstalledError, UnsupportedArchError
from ..indexer import Indexer
from ..layout import BLOCK_TOKENS, HEAD_DIM, CacheLayout, page_stride_bytes

TOPK = 16
NUM_HEADS = (1, 2, 4)
MAX_PAGES = 8192
ALIGNMENT = 16  # of queries and keys; metadata and scratch need that of their elements only
CPU_BACKENDS = ("interpreter", "reference")


def check_tensor(
    tensor: torch.Tensor, name: str, dtype: torch.dtype, device: torch.device | None, contiguous: bool = True
) -> None:
    """Raise unless ``tensor`` is a tensor of ``dtype`` on ``device`` (on any if None)."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor")
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must have dtype {dtype}, got {tensor.dtype}")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")


def check_backend(tensor: torch.Tensor, name: str, backend: str) -> None:
    """Raise for a CPU tensor unless ``backend`` runs on CPU tensors."""
    if isinstance(tensor, torch.Tensor) and not tensor.is_cuda and backend not in CPU_BACKENDS:
        raise ValueError(f"{name} must be a CUDA tensor")


def check_num_heads(num_heads: int) -> int:
    """A supported number of index heads, given back."""
    if isinstance(num_heads, bool) or not isinstance(num_heads, int) or num_heads not in NUM_HEADS:
        raise ValueError(f"num_heads must be one of {NUM_HEADS}, got {num_heads!r}")
    return num_heads


def check_count(value: int, name: str) -> int:
    """A positive integer, given back."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer")
    if value <= 0:
        raise ValueError(f"{name} must be positive")
    return value


def check_scratch(buffer: torch.Tensor, name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """A one-dimensional buffer of one of ``dtypes``, aligned to 4 bytes."""
    dtype = buffer.dtype if isinstance(buffer, torch.Tensor) and buffer.dtype in dtypes else dtypes[0]
    check_tensor(buffer, name, dtype, None)
    if buffer.dim() != 1:
        raise ValueError(f"{name} must be one-dimensional")
    if buffer.data_ptr() % 4:
        raise ValueError(f"{name} must be 4-byte aligned")


def check_block_table(block_table: torch.Tensor, batch: int, device: torch.device) -> None:
    """int32 [batch, 1..8192]; unlike MSA's, rows may lie any distance apart."""
    check_tensor(block_table, "block_table", torch.int32, device, contiguous=False)
    if block_table.dim() != 2 or block_table.shape[0] != batch:
        raise ValueError(f"block_table must have shape [{batch}, max_blocks]")
    if not 0 < block_table.shape[1] <= MAX_PAGES:
        raise ValueError(f"block_table max_blocks must be in [1, {MAX_PAGES}]")
    if block_table.stride(1) != 1 and block_table.shape[1] > 1:
        raise ValueError("block_table must be contiguous")


def check_decode_metadata(block_table: torch.Tensor, seq_lens: torch.Tensor, backend: str) -> None:
    """A decode batch's table and lengths, int32 [B, W] and [B] on one device."""
    check_tensor(seq_lens, "seq_lens", torch.int32, None)
    check_backend(seq_lens, "seq_lens", backend)
    if seq_lens.dim() != 1 or seq_lens.shape[0] == 0:
        raise ValueError("seq_lens must have shape [batch]")
    check_block_table(block_table, seq_lens.shape[0], seq_lens.device)


def check_prefill_metadata(
    cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, bounds: tuple[int, int, int]
) -> None:
    """A prefill batch's metadata and its host bounds (total_q, max_seqlen_q, max_seqlen_k)."""
    if cu_seqlens_q.dim() != 1 or cu_seqlens_q.numel() < 2:
        raise ValueError("cu_seqlens_q must have shape [batch + 1]")
    batch, device = cu_seqlens_q.numel() - 1, cu_seqlens_q.device
    check_tensor(seq_lens, "seq_lens", torch.int32, device)
    if tuple(seq_lens.shape) != (batch,):
        raise ValueError(f"seq_lens must have shape [{batch}]")
    check_block_table(block_table, batch, device)
    _, max_seqlen_q, max_seqlen_k = bounds
    if min(bounds) <= 0:
        raise ValueError("total_q, max_seqlen_q, and max_seqlen_k must be positive")
    if max_seqlen_k < max_seqlen_q:
        raise ValueError("bottom-right causal alignment requires max_seqlen_k >= max_seqlen_q")
    if block_table.shape[1] * BLOCK_TOKENS < max_seqlen_k:
        raise ValueError("block_table max_blocks is smaller than ceil(max_seqlen_k / 128)")


def check_query(q: torch.Tensor, num_tokens: int, num_heads: int, device: torch.device) -> None:
    """e4m3fn [num_tokens, num_heads, 128], contiguous, 16-byte aligned."""
    check_tensor(q, "q", torch.float8_e4m3fn, device)
    expected = (num_tokens, num_heads, HEAD_DIM)
    if tuple(q.shape) != expected:
        raise ValueError(f"q must have shape {list(expected)}, got {tuple(q.shape)}")
    if q.data_ptr() % ALIGNMENT:
        raise ValueError(f"q data pointer must be {ALIGNMENT}-byte aligned")


def check_cache(k_cache: torch.Tensor, layout: CacheLayout, device: torch.device, name: str = "k_cache") -> None:
    """Whole pages of ``layout``, dense inside, any multiple of 16 bytes apart."""
    check_tensor(k_cache, name, layout.torch_dtype, device, contiguous=False)
    width = layout.row_elements
    if k_cache.dim() != 3 or k_cache.shape[0] == 0 or tuple(k_cache.shape[1:]) != (BLOCK_TOKENS, width):
        raise ValueError(f"{name} must have shape [num_blocks, {BLOCK_TOKENS}, {width}]")
    if k_cache.stride(2) != 1 or k_cache.stride(1) != width:
        raise ValueError(f"{name} pages must be contiguous")
    stride = page_stride_bytes(k_cache)
    if stride < layout.page_bytes or stride % ALIGNMENT:
        raise ValueError(
            f"{name} page stride must be at least {layout.page_bytes} bytes and {ALIGNMENT}-byte aligned, got {stride}"
        )
    if k_cache.data_ptr() % ALIGNMENT:
        raise ValueError(f"{name} data pointer must be {ALIGNMENT}-byte aligned")


def check_layer(
    q: torch.Tensor, k_cache: torch.Tensor, num_tokens: int, num_heads: int, layout: CacheLayout, device: torch.device,
    backend: str,
) -> None:  # fmt: skip
    """One layer's queries and keys for a planned step."""
    for name, tensor in (("q", q), ("k_cache", k_cache)):
        check_backend(tensor, name, backend)
    check_query(q, num_tokens, num_heads, device)
    check_cache(k_cache, layout, device)


def check_output(out: torch.Tensor, num_tokens: int, num_heads: int, device: torch.device) -> None:
    """int32 [num_tokens, num_heads, 16], contiguous."""
    check_tensor(out, "out", torch.int32, device)
    expected = (num_tokens, num_heads, TOPK)
    if tuple(out.shape) != expected:
        raise ValueError(f"out must have shape {list(expected)}, got {tuple(out.shape)}")


def check_outside_capture(device: torch.device, call: str) -> None:
    """Raise inside a graph capture."""
    try:
        check_not_capturing(device, call)
    except RuntimeError as error:
        raise RuntimeError(f"{call} must be called outside CUDA Graph capture") from error


def open_indexer(layout: CacheLayout, **options: Any) -> Indexer:
    """An indexer; a device without kernels is a ``RuntimeError``, as MSA's is."""
    construct: Callable[..., Indexer] = Indexer
    try:
        return construct(layout, **options)
    except (UnsupportedArchError, KernelNotInstalledError) as error:
        raise RuntimeError(f"Q8KV4/Q8KV8 indexers: {error}") from error

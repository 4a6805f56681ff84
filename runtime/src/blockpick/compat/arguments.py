# SPDX-License-Identifier: Apache-2.0
"""Arguments as vLLM's ops take them, checked and brought into the form that the kernels read.

Those ops read queries and metadata through any strides and integer types; what a kernel here can't read is copied, on
the device and without a synchronisation. A cache is never copied.
"""

from __future__ import annotations

import torch

from ..checks import check_distinct_elements, check_tensor
from ..layout import BLOCK_TOKENS, HEAD_DIM, CacheLayout

ALIGNMENT = 16  # bytes, of queries
INTEGERS = (torch.int32, torch.int64)
CACHES = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3fn", torch.uint8: "nvfp4"}
UNWRITTEN = -2  # no kernel writes it


def cache_layout(cache: torch.Tensor, device: torch.device) -> CacheLayout:
    """The layout of ``index_kv_cache`` [N, 128, 128 or, for NVFP4 bytes, 72]."""
    if not isinstance(cache, torch.Tensor):
        raise TypeError(f"index_kv_cache: must be a torch.Tensor, is {type(cache).__name__}")
    if cache.dtype not in CACHES:
        raise TypeError(
            f"index_kv_cache: dtype must be one of {', '.join(map(str, CACHES))} (uint8: NVFP4), is {cache.dtype}"
        )
    layout = CacheLayout(CACHES[cache.dtype])
    layout.check(cache, "index_kv_cache")
    if cache.device != device:
        raise ValueError(f"index_kv_cache: must be on {device} like idx_q, is on {cache.device}")
    return layout


def queries(idx_q: torch.Tensor, num_kv_heads: int, layout: CacheLayout) -> torch.Tensor:
    """``idx_q`` [T, H, 128] as the kernels read it: e4m3fn queries of a bf16 cache become bf16, which is exact."""
    dtypes = (torch.bfloat16, torch.float8_e4m3fn) if layout.dtype == "bf16" else (torch.float8_e4m3fn,)
    if idx_q.dtype not in dtypes:
        raise TypeError(
            f"idx_q: dtype must be {' or '.join(map(str, dtypes))} for a {layout.dtype} cache, is {idx_q.dtype}; "
            "keys are never widened to the queries' dtype"
        )
    if idx_q.shape[1] != num_kv_heads or idx_q.shape[2] != HEAD_DIM:
        raise ValueError(
            f"idx_q: must be [T, {num_kv_heads}, {HEAD_DIM}] (num_kv_heads={num_kv_heads}), has shape "
            f"{list(idx_q.shape)}"
        )
    q = idx_q.to(layout.query_dtype)
    size = q.element_size()
    strided = any(q.stride(dim) * size % ALIGNMENT for dim in (0, 1) if q.shape[dim] > 1)
    if q.stride(2) != 1 or strided or q.data_ptr() % ALIGNMENT:
        return q.clone(memory_format=torch.contiguous_format)
    return q


def check_queries_tensor(idx_q: torch.Tensor) -> None:
    """Raise unless ``idx_q`` is a tensor of three dimensions: its device and sizes say what the others must be."""
    if not isinstance(idx_q, torch.Tensor):
        raise TypeError(f"idx_q: must be a torch.Tensor [T, H, {HEAD_DIM}], is {type(idx_q).__name__}")
    if idx_q.dim() != 3:
        raise ValueError(f"idx_q: must be [T, H, {HEAD_DIM}], has shape {list(idx_q.shape)}")


def integers(name: str, tensor: torch.Tensor, size: int, device: torch.device) -> torch.Tensor:
    """Metadata of ``size`` entries as contiguous int32."""
    if isinstance(tensor, torch.Tensor) and tensor.dtype not in INTEGERS:
        raise TypeError(f"{name}: dtype must be torch.int32 or torch.int64, is {tensor.dtype}")
    check_tensor(
        name, tensor, tensor.dtype if isinstance(tensor, torch.Tensor) else torch.int32, 1, device, f"[{size}]"
    )
    if tensor.shape[0] != size:
        raise ValueError(f"{name}: must have {size} entries, has {tensor.shape[0]}")
    return tensor.to(torch.int32).contiguous()


def table(block_table: torch.Tensor, requests: int, max_seq_len: int, device: torch.device) -> torch.Tensor:
    """The columns of ``block_table`` [B, W] that tokens below ``max_seq_len`` have, as int32 with last stride 1."""
    if isinstance(block_table, torch.Tensor) and block_table.dtype not in INTEGERS:
        raise TypeError(f"block_table: dtype must be torch.int32 or torch.int64, is {block_table.dtype}")
    dtype = block_table.dtype if isinstance(block_table, torch.Tensor) else torch.int32
    check_tensor("block_table", block_table, dtype, 2, device, "[B, W]")
    if block_table.shape[0] != requests:
        raise ValueError(f"block_table: must have {requests} rows, one a request, has {block_table.shape[0]}")
    columns = block_table[:, : max_blocks(max_seq_len)].to(torch.int32)
    return columns if columns.stride(1) == 1 or columns.shape[1] <= 1 else columns.contiguous()


def max_blocks(max_seq_len: int) -> int:
    """Blocks of ``max_seq_len`` tokens."""
    if isinstance(max_seq_len, bool) or not isinstance(max_seq_len, int) or max_seq_len < 0:
        raise ValueError(f"max_seq_len: must be a number of tokens, is {max_seq_len!r}")
    return -(-max_seq_len // BLOCK_TOKENS)


def output(out: torch.Tensor | None, heads: int, tokens: int, topk: int, device: torch.device) -> torch.Tensor:
    """The ids' place [H, T, topk]: the first T tokens of ``out`` [H, >= T, topk], or a new int32 tensor."""
    if out is None:
        return torch.full((heads, tokens, topk), -1, dtype=torch.int32, device=device)
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out: must be a torch.Tensor, is {type(out).__name__}")
    if out.dtype not in INTEGERS:
        raise TypeError(f"out: dtype must be torch.int32 or torch.int64, is {out.dtype}")
    check_tensor("out", out, out.dtype, 3, device, "[H, >= T, topk]")
    if out.shape[0] != heads or out.shape[1] < tokens or out.shape[2] != topk:
        raise ValueError(f"out: must be [{heads}, >= {tokens}, {topk}], has shape {list(out.shape)}")
    view = out[:, :tokens]
    check_distinct_elements("out", view)
    return view


def stage(ids: torch.Tensor) -> torch.Tensor:
    """``ids`` where the kernels can write there, else a place of the same shape for :func:`unstage`."""
    if ids.dtype == torch.int32 and (ids.shape[2] == 1 or ids.stride(2) == 1):
        return ids
    return torch.full(ids.shape, UNWRITTEN, dtype=torch.int32, device=ids.device)


def unstage(ids: torch.Tensor, staged: torch.Tensor) -> None:
    """Copy what was written to ``staged`` into ``ids``; rows that were not keep what they hold."""
    if staged is not ids:
        ids.copy_(torch.where(staged == UNWRITTEN, ids, staged))


def check_scores(score_out: torch.Tensor, heads: int, tokens: int, blocks: int, device: torch.device) -> None:
    """Raise unless ``score_out`` is fp32 [H, T, >= blocks], any strides without overlap."""
    check_tensor("score_out", score_out, torch.float32, 3, device, "[H, T, >= blocks]")
    if score_out.shape[0] != heads or score_out.shape[1] < tokens or score_out.shape[2] < blocks:
        raise ValueError(f"score_out: must be [{heads}, {tokens}, >= {blocks}], has shape {list(score_out.shape)}")
    check_distinct_elements("score_out", score_out)

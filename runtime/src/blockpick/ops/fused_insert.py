# SPDX-License-Identifier: Apache-2.0
"""qk_norm_rope_insert: from fused QKV rows to index queries and stored index keys, in one launch."""

from __future__ import annotations

import torch

from ..checks import (
    check_aligned,
    check_apart,
    check_distinct_elements,
    check_finite,
    check_int,
    check_last_stride,
    check_tensor,
)
from ..config import NUM_HEADS
from ..device import current_stream, on_device
from ..layout import HEAD_DIM, CacheLayout, check_layout, page_stride_bytes
from .insert import check_backend, find_launch, runs_reference

ROPE_DIMS = 64


def qk_norm_rope_insert(
    layout: CacheLayout, cache: torch.Tensor, qkv: torch.Tensor, q_out: torch.Tensor, slot_mapping: torch.Tensor,
    positions: torch.Tensor, cos_sin: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, *, q_column: int,
    k_column: int, eps: float = 1e-6, shard: int = 0, backend: str = "auto", allow_jit: bool = False,
    arch: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """Normalise and rotate index queries and keys of fused QKV rows; write the queries, store the keys by slot.

    ``n = x rsqrt(mean(x^2) + eps) (1 + w)`` per head of 128 dims (RMSNorm in Gemma's form), then NeoX rotation of the
    first 64 dims: ``n[d] cos - n[d + 32] sin`` and ``n[d + 32] cos + n[d] sin`` for d < 32. All in fp32 (a sum of
    squares beyond its range is infinite, and the factor 0), rounded once to bf16, halfway to even; queries are then
    written in the dtype that scores this cache, keys stored as :func:`blockpick.insert` does.

    Parameters
    ----------
    layout : CacheLayout
        The cache's layout.
    cache : torch.Tensor
        The cache; written in place.
    qkv : torch.Tensor
        bf16 [T, N], last stride 1, row stride a multiple of 16 bytes. Only the index columns are read.
    q_out : torch.Tensor
        [T, H, 128], bf16 for a bf16 cache, else e4m3fn (NaN as 0x7F), last stride 1, others multiples of 16 bytes;
        H is 1, 2 or 4. Written for every token; shares no memory with ``qkv``.
    slot_mapping : torch.Tensor
        int64 [T], contiguous: as for :func:`blockpick.insert`. Tokens without a slot get queries and store nothing.
    positions : torch.Tensor
        int64 [T], contiguous; clamped into ``cos_sin``.
    cos_sin : torch.Tensor
        bf16 [P, 64], last stride 1: per position 32 cosines, then 32 sines.
    q_weight, k_weight : torch.Tensor
        bf16 [128], contiguous: w of the queries' and of the keys' norm.
    q_column, k_column : int
        First column of the H * 128 index query columns and of the 128 index key columns, multiples of 8; they don't
        overlap.
    eps : float
        Of the norm, finite and at least 0.
    shard : int
        This rank's shard, ``0 <= shard < layout.shards``.
    backend, allow_jit, arch
        As for :class:`blockpick.Indexer`.

    Returns
    -------
    torch.Tensor
        ``q_out``.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, before anything is launched or written.
    RuntimeError
        When a thread's first call of a configuration, which loads the kernel, falls into a graph capture.

    Notes
    -----
    Follows the fused insert of vLLM's MiniMax M3: an unfused chain rounds to bf16 in between and may differ by one unit
    in the last place of bf16, and so by one code behind it.
    """
    check_backend("qk_norm_rope_insert", backend)
    _check(layout, cache, qkv, q_out, slot_mapping, positions, cos_sin, q_weight, k_weight)
    num_tokens, num_heads = qkv.shape[0], q_out.shape[1]
    _check_columns(q_column, k_column, num_heads, qkv.shape[1])
    check_finite("eps", eps)
    check_int("shard", shard, 0, layout.shards - 1, f"layout.shards={layout.shards}")
    if num_tokens == 0:
        return q_out
    if runs_reference(backend, cache.device):
        on_reference(
            layout,
            cache,
            qkv,
            q_out,
            slot_mapping,
            positions,
            cos_sin,
            q_weight,
            k_weight,
            q_column,
            k_column,
            eps,
            shard,
        )
        return q_out
    launch, tokens = find_launch(
        "qk_norm_rope_insert", layout, shard, cache.device, backend, allow_jit, arch, num_heads=num_heads, eps=eps
    )
    size = q_out.element_size()
    with on_device(cache.device):
        launch(
            -(-num_tokens // tokens) * (num_heads + 1), current_stream(cache.device), qkv, q_weight, k_weight, cos_sin,
            positions, slot_mapping, cache, q_out, qkv.stride(0), cos_sin.stride(0), q_out.stride(0) * size,
            q_out.stride(1) * size, page_stride_bytes(cache), q_column, k_column, num_tokens, cos_sin.shape[0],
            cache.shape[0] * layout.page_size,
        )  # fmt: skip
    return q_out


def on_reference(
    layout: CacheLayout, cache: torch.Tensor, qkv: torch.Tensor, q_out: torch.Tensor, slot_mapping: torch.Tensor,
    positions: torch.Tensor, cos_sin: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, q_column: int,
    k_column: int, eps: float, shard: int,
) -> None:  # fmt: skip
    """The chain in torch; tensors are checked."""
    from ..testing.reference import e4m3_bytes, insert_reference, norm_rope_reference

    queries = qkv[:, q_column : q_column + q_out.shape[1] * HEAD_DIM]
    q = norm_rope_reference(queries, q_weight, positions, cos_sin, eps)
    if layout.query_dtype != torch.bfloat16:
        q = e4m3_bytes(q.float()).view(torch.float8_e4m3fn)
    q_out.copy_(q)
    k = norm_rope_reference(qkv[:, k_column : k_column + HEAD_DIM], k_weight, positions, cos_sin, eps)
    insert_reference(layout, cache, k[:, 0], slot_mapping, shard)


def _check(
    layout: CacheLayout, cache: torch.Tensor, qkv: torch.Tensor, q_out: torch.Tensor, slot_mapping: torch.Tensor,
    positions: torch.Tensor, cos_sin: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor,
) -> None:  # fmt: skip
    """Tensors of one call."""
    check_layout(layout)
    layout.check(cache)
    device = cache.device
    check_tensor("qkv", qkv, torch.bfloat16, 2, device, "[T, N]")
    check_tensor("q_out", q_out, layout.query_dtype, 3, device, f"[T, H, {HEAD_DIM}]")
    check_tensor("slot_mapping", slot_mapping, torch.int64, 1, device, "[T]")
    check_tensor("positions", positions, torch.int64, 1, device, "[T]")
    check_tensor("cos_sin", cos_sin, torch.bfloat16, 2, device, f"[P, {ROPE_DIMS}]")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        check_tensor(name, weight, torch.bfloat16, 1, device, f"[{HEAD_DIM}]")
        if weight.shape[0] != HEAD_DIM:
            raise ValueError(f"{name}: must be [{HEAD_DIM}], has shape {list(weight.shape)}")
    if q_out.shape[0] != qkv.shape[0] or q_out.shape[1] not in NUM_HEADS or q_out.shape[2] != HEAD_DIM:
        raise ValueError(
            f"q_out: must be [{qkv.shape[0]}, H, {HEAD_DIM}] with H in {', '.join(map(str, NUM_HEADS))}, has shape "
            f"{list(q_out.shape)}"
        )
    if cos_sin.shape[1] != ROPE_DIMS or cos_sin.shape[0] < 1:
        raise ValueError(f"cos_sin: must be [P, {ROPE_DIMS}] with P >= 1, has shape {list(cos_sin.shape)}")
    for name, tensor in (("slot_mapping", slot_mapping), ("positions", positions)):
        if tensor.shape[0] != qkv.shape[0]:
            raise ValueError(f"{name}: must have {qkv.shape[0]} entries like qkv, has {tensor.shape[0]}")
    named = {
        "qkv": qkv, "q_out": q_out, "slot_mapping": slot_mapping, "positions": positions, "cos_sin": cos_sin,
        "q_weight": q_weight, "k_weight": k_weight,
    }  # fmt: skip
    for name, tensor in named.items():
        check_last_stride(name, tensor)
        if tensor.element_size() < 8:
            check_aligned(name, tensor, 16)
    check_distinct_elements("q_out", q_out)
    check_apart("q_out", q_out, "qkv", qkv)


def _check_columns(q_column: int, k_column: int, num_heads: int, columns: int) -> None:
    """Index columns that qkv has, the key's apart from the queries'."""
    for name, column, count in (("q_column", q_column, num_heads), ("k_column", k_column, 1)):
        check_int(name, column, 0, columns - count * HEAD_DIM, f"qkv has {columns} columns")
        if column % 8:
            raise ValueError(f"{name}: must be a multiple of 8, is {column}")
    if q_column - HEAD_DIM < k_column < q_column + num_heads * HEAD_DIM:
        raise ValueError(
            f"k_column: the {HEAD_DIM} key columns from {k_column} on overlap the query columns "
            f"{q_column}..{q_column + num_heads * HEAD_DIM - 1}"
        )

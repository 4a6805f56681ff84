# SPDX-License-Identifier: Apache-2.0
"""Sparse block-table emission: picked blocks as the block table of an attention over pages of 16 tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

POINTERS = ("cu_seqlens_ptr", "attention_table_ptr", "table_ptr", "lens_ptr")
NUMBERS = ("stride_attention", "table_requests", "table_form")


@dataclass(frozen=True, eq=False)
class SparseTable:
    """What a decode or prefill writes besides its ids, and from what.

    Per (token, head) row 8 pages of 16 tokens for every picked block: page j of block b of request r is
    ``attention_block_table[r, b] * block_page_stride + j``. Full blocks come in selection order, the own block last;
    the unused tail is zero. An empty row is all zero with 0 tokens; rows of padding stay untouched.

    Parameters
    ----------
    attention_block_table : torch.Tensor
        int32 [B, W], last stride 1: one entry per 128-token block, whatever the index cache's page size; W at least
        ``ceil(max_seq_len / 128)``. Picked blocks beyond it, of requests longer than that, get page 0.
    block_page_stride : {8, 16}
        Pages of 16 tokens from one block to the next.
    table : torch.Tensor
        int32 [T * H, topk * 8], contiguous; row t * H + h.
    context_lens : torch.Tensor
        int32 [T * H], contiguous: tokens that a row's pages hold for its query: with the own block among them
        ``128 * full + position + 1 - 128 * own``, else ``min(128 * picked, position + 1)``.

    Notes
    -----
    The layout is that of the sparse paged attention with 16-token pages on ROCm.
    """

    attention_block_table: torch.Tensor
    block_page_stride: int
    table: torch.Tensor
    context_lens: torch.Tensor


def emission(
    sparse: SparseTable | None, cu_seqlens: torch.Tensor | None, num_requests: int
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...]]:
    """What comes with every launch that emits, by POINTERS and NUMBERS; nothing where there is no table. Decode's
    requests are found without ``cu_seqlens``.
    """
    if sparse is None:
        return (), ()
    attention = sparse.attention_block_table
    starts = attention if cu_seqlens is None else cu_seqlens
    pointers = (starts, attention, sparse.table, sparse.context_lens)
    return pointers, (attention.stride(0), num_requests, table_form(sparse))


def table_form(sparse: SparseTable) -> int:
    """Width of the attention table and pages from one block to the next, as the kernels take them."""
    return sparse.attention_block_table.shape[1] << 8 | sparse.block_page_stride

# SPDX-License-Identifier: Apache-2.0
"""Sparse block-table emission: picked blocks as the block table of an attention over pages of 16 tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..config import IndexerConfig
from ..device import current_stream
from ..dispatch import Choice, Need, select
from ..manifest import KernelPackage
from ..plan import DecodePlan, PrefillPlan
from .selection import Bind

ARGS = (
    "ids_ptr", "cu_seqlens_ptr", "attention_table_ptr", "table_ptr", "lens_ptr", "stride_ids_t", "stride_ids_h",
    "stride_attention", "batch", "num_requests", "query_len", "block_page_stride",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class SparseTable:
    """What a decode or prefill writes besides its ids, and from what.

    Per (token, head) row 8 pages of 16 tokens for every picked block: page j of block b of request r is
    ``attention_block_table[r, b] * block_page_stride + j``. Full blocks come in selection order, the own block last;
    the unused tail is zero. An empty row is all zero with 0 tokens; rows of padding stay untouched.

    Parameters
    ----------
    attention_block_table : torch.Tensor
        int32 [B, W], last stride 1: one entry per 128-token block, whatever the index cache's page size; W at least the
        blocks that the planned table addresses.
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


def select_emission(package: KernelPackage, config: IndexerConfig, route: str) -> Choice:
    """Choose the emission kernel of ``config`` from one package; needs no device.

    Raises
    ------
    KernelNotInstalledError
        When there is none; the message lists every candidate with its reason.
    """
    return select(package, "emit_sparse_table", [Need("topk", config.topk, at_least=True)], route)


class Emission:
    """The emission of one slot's decode and prefill."""

    def __init__(self, choice: Choice, config: IndexerConfig, buffers: Mapping[str, torch.Tensor], bind: Bind) -> None:
        self._rows, self._num_heads = int(choice.variant.launch["rows"]), config.num_heads
        fixed = {"num_heads": config.num_heads, "topk": config.topk}
        self._decode = bind(
            choice, {**fixed, "header_ptr": buffers["header"], "positions_ptr": buffers["positions"]}, ARGS
        )
        if config.max_prefill_tokens:
            own = {"header_ptr": buffers["prefill_header"], "positions_ptr": buffers["prefill_positions"]}
            self._prefill = bind(choice, {**fixed, **own}, ARGS)

    def _grid(self, tokens: int) -> int:
        return -(-tokens * self._num_heads // self._rows)

    def decode(self, plan: DecodePlan, sparse: SparseTable, out_thk: torch.Tensor) -> None:
        """Emit after a decode has written its ids."""
        attention = sparse.attention_block_table
        self._decode(
            self._grid(plan.num_requests * plan.query_len), current_stream(out_thk.device), out_thk, attention,
            attention, sparse.table, sparse.context_lens, out_thk.stride(0), out_thk.stride(1), attention.stride(0),
            plan.num_requests, plan.num_requests, plan.query_len, sparse.block_page_stride,
        )  # fmt: skip

    def prefill(self, plan: PrefillPlan, sparse: SparseTable, out_thk: torch.Tensor) -> None:
        """Emit after a prefill has written its ids."""
        attention = sparse.attention_block_table
        self._prefill(
            self._grid(plan.num_tokens), current_stream(out_thk.device), out_thk, plan.cu_seqlens_q, attention,
            sparse.table, sparse.context_lens, out_thk.stride(0), out_thk.stride(1), attention.stride(0),
            plan.num_tokens, plan.num_requests, 0, sparse.block_page_stride,
        )  # fmt: skip

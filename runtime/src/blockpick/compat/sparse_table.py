# SPDX-License-Identifier: Apache-2.0
"""Page tables and context lengths for ROCm's page-16 sparse attention, from picked block ids."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..checks import check_int, check_last_stride, check_tensor
from ..layout import BLOCK_TOKENS

PAGES_PER_BLOCK = 8  # kernel pages of 16 tokens
FULL, OWN, PAD = 0, 1, 2


@dataclass(frozen=True)
class SparseTable:
    """Where the tables go: all four arguments, checked.

    Raises
    ------
    TypeError, ValueError
        Naming the argument.
    """

    attention_block_table: torch.Tensor
    block_table_out: torch.Tensor
    context_lens_out: torch.Tensor
    block_page_stride: int

    @classmethod
    def of(
        cls, attention_block_table: torch.Tensor | None, sparse_block_table_out: torch.Tensor | None,
        sparse_context_lens_out: torch.Tensor | None, block_page_stride: int | None, *, requests: int, rows: int,
        topk: int, blocks: int, device: torch.device,
    ) -> SparseTable | None:  # fmt: skip
        """The arguments of one call; None when none is given."""
        given = {
            "attention_block_table": attention_block_table, "sparse_block_table_out": sparse_block_table_out,
            "sparse_context_lens_out": sparse_context_lens_out, "block_page_stride": block_page_stride,
        }  # fmt: skip
        missing = [name for name, value in given.items() if value is None]
        if len(missing) == len(given):
            return None
        if (
            attention_block_table is None or sparse_block_table_out is None or sparse_context_lens_out is None
            or block_page_stride is None
        ):  # fmt: skip
            raise ValueError(f"{missing[0]}: missing; {', '.join(given)} must be provided together or not at all")
        width = topk * PAGES_PER_BLOCK
        for name, tensor, dims, shape in (
            ("attention_block_table", attention_block_table, 2, f"[{requests}, >= {blocks}]"),
            ("sparse_block_table_out", sparse_block_table_out, 2, f"[{rows}, {width}]"),
            ("sparse_context_lens_out", sparse_context_lens_out, 1, f"[{rows}]"),
        ):
            check_tensor(name, tensor, torch.int32, dims, device, shape)
            check_last_stride(name, tensor)
            want = (
                (requests, max(tensor.shape[-1], blocks)) if name == "attention_block_table" else (rows, width)[:dims]
            )
            if tuple(tensor.shape) != want:
                raise ValueError(f"{name}: must be {shape}, has shape {list(tensor.shape)}")
        check_int("block_page_stride", block_page_stride, PAGES_PER_BLOCK, 2 * PAGES_PER_BLOCK, "8 or 16")
        if block_page_stride % PAGES_PER_BLOCK:
            raise ValueError(f"block_page_stride: must be 8 or 16, is {block_page_stride}")
        return cls(attention_block_table, sparse_block_table_out, sparse_context_lens_out, block_page_stride)

    def clear(self) -> None:
        """Write rows that hold nothing."""
        self.block_table_out.zero_()
        self.context_lens_out.zero_()

    def emit(self, ids: torch.Tensor, seq_lens: torch.Tensor, query_len: int, blocks: int) -> None:
        """Write both tables for ``ids`` int32 [H, T, topk]; row ``t * H + h`` is token t's and head h's.

        Eight pages per picked block, full blocks first in selection order, the own block last, then zeros; the context
        length is what these pages hold up to the query. Empty rows are zeros.
        """
        heads, tokens, topk = ids.shape
        positions = seq_lens.clamp(0, blocks * BLOCK_TOKENS + query_len)[:, None] + torch.arange(
            -query_len, 0, dtype=torch.int32, device=ids.device
        )
        causal = positions.clamp(-1, blocks * BLOCK_TOKENS - 1).reshape(tokens, 1, 1) + 1  # tokens that the query sees
        own = (causal - 1) // BLOCK_TOKENS
        rows = ids.transpose(0, 1)  # [T, H, topk]
        kind = torch.where(rows < 0, PAD, torch.where(rows == own, OWN, FULL))
        kind, order = kind.sort(dim=2, stable=True)
        picked = rows.gather(2, order).clamp(min=0).long().reshape(-1, query_len * heads * topk)  # [B, L * H * topk]
        pages = self.attention_block_table.gather(1, picked).view(tokens, heads, topk, 1) * self.block_page_stride
        pages = pages + torch.arange(PAGES_PER_BLOCK, dtype=torch.int32, device=ids.device)
        pages = torch.where(kind[..., None] == PAD, 0, pages)
        self.block_table_out.copy_(pages.reshape(tokens * heads, -1))
        full, last = (kind == FULL).sum(2), (kind == OWN).sum(2)
        tail = causal[:, :, 0] - own[:, :, 0] * BLOCK_TOKENS
        context = torch.where(last > 0, full * BLOCK_TOKENS + tail, (full * BLOCK_TOKENS).minimum(causal[:, :, 0]))
        self.context_lens_out.copy_(context.reshape(-1))

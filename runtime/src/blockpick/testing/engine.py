# SPDX-License-Identifier: Apache-2.0
"""The reference as an engine of :class:`blockpick.Indexer`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from ..config import IndexerConfig, Memory
from ..dispatch import Choice
from ..layout import BLOCK_TOKENS
from ..ops.sparse_table import SparseTable
from ..plan import DecodePlan, PrefillPlan, score_stride
from .reference import block_scores, query_positions, select_blocks, sparse_row


class ReferenceEngine:
    """decode_pick in torch on any device: slow, allocates, synchronises; the oracle of all other engines."""

    choices: tuple[Choice, ...] = ()

    def __init__(self, config: IndexerConfig, device: torch.device, default_rounding: str) -> None:
        self.config, self.device = config, device
        self.rounding = config.rounding(default_rounding)
        self.numerics = config.numerics(self.rounding, ())
        self._prefills: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._steps: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._scores: dict[int, torch.Tensor] = {}
        self._prefill_scores: dict[int, torch.Tensor] = {}

    def memory(self) -> Memory:
        """Nothing is held beyond the planned tables."""
        return Memory(())

    def allocate(self) -> None:
        """Nothing to allocate."""

    def close(self) -> None:
        """Nothing is shared."""

    def reopen(self) -> None:
        """Nothing is shared."""

    def telling(self) -> AbstractContextManager[None]:
        """There is nobody to tell."""
        return nullcontext()

    def plan_decode(self, slot: int, block_table: torch.Tensor, seq_lens: torch.Tensor, query_len: int) -> None:
        """Keep copies of the step's metadata."""
        self._steps[slot] = (block_table.clone(), seq_lens.clone())

    def score_decode(self, plan: DecodePlan, q: torch.Tensor, cache: torch.Tensor) -> None:
        """Score in float64, round to fp32."""
        step = (*self._steps[plan.slot], plan.query_len, self.rounding)
        self._scores[plan.slot] = block_scores(self.config.layout, cache, q, *step).float()

    def decode(
        self, plan: DecodePlan, q: torch.Tensor, cache: torch.Tensor, out_thk: torch.Tensor,
        sparse: SparseTable | None = None,
    ) -> None:  # fmt: skip
        """Score, then select row by row."""
        config = self.config
        table, lens = self._steps[plan.slot]
        self.score_decode(plan, q, cache)
        scores = self._scores[plan.slot]
        positions = query_positions(lens, plan.query_len, table.shape[1] * config.layout.page_size)
        rows = [
            select_blocks(
                scores[b, i, h], int(positions[b, i]), config.topk, config.init_blocks, config.local_blocks,
                config.order, config.empty_row,
            )
            for b in range(plan.num_requests) for i in range(plan.query_len) for h in range(config.num_heads)
        ]  # fmt: skip
        tokens = plan.num_requests * plan.query_len
        ids = torch.tensor(rows, dtype=torch.int32, device=out_thk.device)
        out_thk[:tokens] = ids.view(tokens, config.num_heads, config.topk)
        if sparse is not None:
            for b in range(plan.num_requests):
                emit(sparse, out_thk, b * plan.query_len, b, positions[b].tolist())

    def scores(self, plan: DecodePlan) -> torch.Tensor:
        """Scores of the last run as [B, L, H, blocks] fp32."""
        return self._scores[plan.slot]

    def prefill_geometry(self, blocks: int, num_tokens: int) -> tuple[int, int, int]:
        """One pass of any size."""
        return score_stride(blocks), num_tokens, 1

    def plan_prefill(self, plan: PrefillPlan, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Keep copies of the step's metadata."""
        self._prefills[plan.slot] = (cu_seqlens_q.clone(), seq_lens.clone())
        shape = (plan.num_tokens, self.config.num_heads, plan.blocks)
        self._prefill_scores[plan.slot] = torch.full(shape, float("nan"), device=seq_lens.device)

    def score_pass(self, plan: PrefillPlan, index: int, q: torch.Tensor, cache: torch.Tensor) -> None:
        """Score every request as a decode batch of one, with as many queries as it has."""
        layout = self.config.layout
        cu_seqlens, lens = self._prefills[plan.slot]
        table = plan.block_table[:, : plan.blocks // layout.blocks_per_page]
        for b in range(plan.num_requests):
            first, last, length = live_queries(plan, cu_seqlens, lens, b)
            if first < last:
                step = (table[b : b + 1], length, last - first, self.rounding)
                self._prefill_scores[plan.slot][first:last] = block_scores(layout, cache, q[first:last], *step)[0]

    def select_pass(self, plan: PrefillPlan, index: int, out_thk: torch.Tensor) -> None:
        """Select row by row."""
        config = self.config
        cu_seqlens, lens = self._prefills[plan.slot]
        options = (config.topk, config.init_blocks, config.local_blocks, config.order, config.empty_row)
        for b in range(plan.num_requests):
            first, last, length = live_queries(plan, cu_seqlens, lens, b)
            if first >= last:
                continue
            positions = query_positions(length, last - first, plan.blocks * BLOCK_TOKENS)[0]
            rows = [
                select_blocks(self._prefill_scores[plan.slot][first + i, h], int(positions[i]), *options)
                for i in range(last - first) for h in range(config.num_heads)
            ]  # fmt: skip
            ids = torch.tensor(rows, dtype=torch.int32, device=out_thk.device)
            out_thk[first:last] = ids.view(last - first, config.num_heads, config.topk)

    def prefill(
        self, plan: PrefillPlan, q: torch.Tensor, cache: torch.Tensor, out_thk: torch.Tensor,
        sparse: SparseTable | None = None,
    ) -> None:  # fmt: skip
        """Score, then select."""
        self.score_pass(plan, 0, q, cache)
        self.select_pass(plan, 0, out_thk)
        if sparse is not None:
            cu_seqlens, lens = self._prefills[plan.slot]
            for b in range(plan.num_requests):
                first, last, length = live_queries(plan, cu_seqlens, lens, b)
                if first >= last:
                    continue
                positions = query_positions(length, last - first, plan.blocks * BLOCK_TOKENS)[0]
                emit(sparse, out_thk, first, b, positions.tolist())

    def pass_scores(self, plan: PrefillPlan, index: int) -> torch.Tensor:
        """Scores of the one pass as [T, H, blocks] fp32."""
        return self._prefill_scores[plan.slot]

    def prefill_scores(self, plan: PrefillPlan) -> torch.Tensor:
        """A copy of the scores of the last prefill as [T, H, blocks] fp32."""
        return self._prefill_scores[plan.slot].clone()


def live_queries(
    plan: PrefillPlan, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, request: int
) -> tuple[int, int, torch.Tensor]:
    """First and last + 1 row of a request's queries among the plan's tokens, and the length [1] as of the last one.

    Queries from ``num_tokens`` on are no rows of q; the others keep their positions.
    """
    first, end = cu_seqlens_q[request : request + 2].tolist()
    last = min(end, plan.num_tokens)
    return first, last, seq_lens[request : request + 1] - (end - last)


def emit(sparse: SparseTable, out_thk: torch.Tensor, first: int, request: int, positions: list[int]) -> None:
    """The sparse table of one request's queries, which begin at token ``first``."""
    heads = out_thk.shape[1]
    for token, position in enumerate(positions, first):
        for head in range(heads):
            attention = sparse.attention_block_table[request]
            pages, tokens = sparse_row(out_thk[token, head].tolist(), position, attention, sparse.block_page_stride)
            sparse.table[token * heads + head] = torch.tensor(pages, dtype=torch.int32)
            sparse.context_lens[token * heads + head] = tokens

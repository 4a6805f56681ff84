# SPDX-License-Identifier: Apache-2.0
"""The reference as an engine of :class:`blockpick.Indexer`."""

from __future__ import annotations

import torch

from ..config import IndexerConfig, Memory
from ..dispatch import Choice
from ..layout import BLOCK_TOKENS
from ..plan import DecodePlan, PrefillPlan, score_stride
from .reference import block_scores, query_positions, select_blocks


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

    def memory(self) -> Memory:
        """Nothing is held beyond the planned tables."""
        return Memory(())

    def allocate(self) -> None:
        """Nothing to allocate."""

    def plan_decode(self, slot: int, block_table: torch.Tensor, seq_lens: torch.Tensor, query_len: int) -> None:
        """Keep copies of the step's metadata."""
        self._steps[slot] = (block_table.clone(), seq_lens.clone())

    def decode(self, plan: DecodePlan, q: torch.Tensor, cache: torch.Tensor, out_thk: torch.Tensor) -> None:
        """Score in float64, round to fp32, select row by row."""
        config = self.config
        table, lens = self._steps[plan.slot]
        scores = block_scores(config.layout, cache, q, table, lens, plan.query_len, self.rounding).float()
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
        self._scores[plan.slot] = scores

    def scores(self, plan: DecodePlan) -> torch.Tensor:
        """Scores of the last run as [B, L, H, blocks] fp32."""
        return self._scores[plan.slot]

    def prefill_geometry(self, blocks: int, num_tokens: int) -> tuple[int, int, int]:
        """One pass of any size."""
        return score_stride(blocks), num_tokens, 1

    def plan_prefill(self, plan: PrefillPlan, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Keep copies of the step's metadata."""
        self._prefills[plan.slot] = (cu_seqlens_q.clone(), seq_lens.clone())

    def prefill(self, plan: PrefillPlan, q: torch.Tensor, cache: torch.Tensor, out_thk: torch.Tensor) -> None:
        """Every request as a decode batch of one, with as many queries as it has."""
        config = self.config
        cu_seqlens, lens = self._prefills[plan.slot]
        tokens = plan.blocks * BLOCK_TOKENS
        shape = (plan.num_tokens, config.num_heads, plan.blocks)
        self._prefill_scores = torch.full(shape, float("nan"), device=out_thk.device)
        table = plan.block_table[:, : plan.blocks // config.layout.blocks_per_page]
        for b in range(plan.num_requests):
            first, last = int(cu_seqlens[b]), int(cu_seqlens[b + 1])
            if first == last:
                continue
            step = (table[b : b + 1], lens[b : b + 1], last - first)
            scores = block_scores(config.layout, cache, q[first:last], *step, self.rounding).float()
            self._prefill_scores[first:last] = scores[0]
            positions = query_positions(lens[b : b + 1], last - first, tokens)[0]
            options = (config.topk, config.init_blocks, config.local_blocks, config.order, config.empty_row)
            rows = [
                select_blocks(scores[0, i, h], int(positions[i]), *options)
                for i in range(last - first) for h in range(config.num_heads)
            ]  # fmt: skip
            ids = torch.tensor(rows, dtype=torch.int32, device=out_thk.device)
            out_thk[first:last] = ids.view(last - first, config.num_heads, config.topk)

    def prefill_scores(self, plan: PrefillPlan) -> torch.Tensor:
        """Scores of the last prefill as [T, H, blocks] fp32."""
        return self._prefill_scores

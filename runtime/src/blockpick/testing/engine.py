# SPDX-License-Identifier: Apache-2.0
"""The reference as an engine of :class:`blockpick.Indexer`."""

from __future__ import annotations

import torch

from ..config import IndexerConfig, Memory
from ..dispatch import Choice
from ..plan import DecodePlan
from .reference import block_scores, query_positions, select_blocks


class ReferenceEngine:
    """decode_pick in torch on any device: slow, allocates, synchronises; the oracle of all other engines."""

    choices: tuple[Choice, ...] = ()

    def __init__(self, config: IndexerConfig, device: torch.device, default_rounding: str) -> None:
        self.config, self.device = config, device
        self.rounding = config.nvfp4_rounding or default_rounding if config.layout.dtype == "nvfp4" else "none"
        self._steps: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._scores: dict[int, torch.Tensor] = {}

    def memory(self) -> Memory:
        """Nothing is held beyond the planned tables."""
        return Memory(())

    def plan(self, slot: int, block_table: torch.Tensor, seq_lens: torch.Tensor, query_len: int) -> None:
        """Keep copies of the step's metadata."""
        self._steps[slot] = (block_table.clone(), seq_lens.clone())

    def run(self, plan: DecodePlan, q: torch.Tensor, cache: torch.Tensor, out_thk: torch.Tensor) -> None:
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

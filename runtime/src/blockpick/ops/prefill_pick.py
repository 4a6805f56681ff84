# SPDX-License-Identifier: Apache-2.0
"""prefill_pick by generated kernels: plan (once per step), then per pass score, select, and merge for long rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..config import IndexerConfig
from ..device import current_stream
from ..dispatch import Choice, Need, select
from ..layout import page_stride_bytes
from ..manifest import KernelPackage
from ..plan import PrefillPlan
from .decode_pick import cache_needs
from .selection import Bind, Selection
from .sparse_table import SparseTable, emission

PLAN_ARGS = (
    "cu_seqlens_ptr", "seq_lens_ptr", "num_requests", "num_tokens", "num_passes", "pass_tokens", "table_tokens"
)  # fmt: skip
SCORE_ARGS = (
    "q_ptr", "cache_ptr", "block_table_ptr", "stride_q_t", "stride_q_h", "stride_page", "stride_table", "stride_scores",
    "pool_pages", "num_requests", "first_token", "pass_index",
)  # fmt: skip
SELECT_ARGS = ("stride_scores", "first_token", "num_requests", "num_splits")


@dataclass(frozen=True)
class PrefillKernels:
    """The chosen variants of one configuration."""

    plan: Choice
    score: Choice
    selection: Selection

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Every choice that decode does not make too."""
        return (self.plan, self.score, self.selection.pick)

    def tile_tokens(self, num_heads: int) -> int:
        """Tokens of one query tile, which holds all heads of each."""
        return int(self.score.variant.launch["columns"]) // num_heads


def select_prefill(package: KernelPackage, config: IndexerConfig, route: str) -> PrefillKernels:
    """Choose the prefill kernels of ``config`` from one package; needs no device.

    Raises
    ------
    KernelNotInstalledError
        When a role has no variant; the message lists every candidate with its reason.
    """
    rounding = config.rounding(package.nvfp4_rounding)
    numerics = Need("numerics", config.numerics(rounding, package.prefill_fp8))
    return PrefillKernels(
        plan=select(package, "prefill_plan", [], route),
        score=select(package, "prefill_score", [*cache_needs(config, rounding), numerics], route),
        selection=Selection.choose(package, config, route, many_rows=True),
    )


class PrefillPick:
    """prefill_pick over the buffers of one slot."""

    def __init__(
        self, kernels: PrefillKernels, config: IndexerConfig, compute_units: int, buffers: Mapping[str, torch.Tensor],
        bind: Bind,
    ) -> None:  # fmt: skip
        self._config, self._selection = config, kernels.selection
        self._chunk = int(kernels.plan.variant.launch["chunk"])
        self._units = compute_units * int(kernels.score.variant.launch["units_per_cu"])
        # positions and header of their own: a decode plan of the same step stays valid
        own = {**buffers, "positions": buffers["prefill_positions"], "header": buffers["prefill_header"]}
        plan = {
            "header_ptr": own["header"], "positions_ptr": own["positions"], "spans_ptr": own["spans"],
            "tile_tokens": kernels.tile_tokens(config.num_heads), "unscored_blocks": config.unscored_blocks,
            "num_units": self._units,
        }  # fmt: skip
        score = {
            "positions_ptr": own["positions"], "spans_ptr": own["spans"], "scores_ptr": own["scores"],
            "blocks_per_page": config.layout.blocks_per_page, "num_heads": config.num_heads,
        }  # fmt: skip
        self.launches = (
            bind(kernels.plan, plan, PLAN_ARGS),
            bind(kernels.score, score, SCORE_ARGS),
            *kernels.selection.bind(bind, config, own, {"query_len": 0}, SELECT_ARGS),
        )

    def plan(self, plan: PrefillPlan, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Launch the plan kernel."""
        programs = plan.num_passes + -(-plan.num_tokens // self._chunk)
        self.launches[0](
            programs, current_stream(seq_lens.device), cu_seqlens_q, seq_lens, plan.num_requests, plan.num_tokens,
            plan.num_passes, plan.pass_tokens, plan.blocks * 128,
        )  # fmt: skip

    def score(self, plan: PrefillPlan, index: int, q: torch.Tensor, cache: torch.Tensor) -> None:
        """Launch the scorer of one pass."""
        size, table = q.element_size(), plan.block_table
        strides = (q.stride(0) * size, q.stride(1) * size, page_stride_bytes(cache), table.stride(0), plan.score_stride)
        self.launches[1](
            self._units, current_stream(q.device), q, cache, table, *strides, cache.shape[0], plan.num_requests,
            index * plan.pass_tokens, index,
        )  # fmt: skip

    def select(self, plan: PrefillPlan, index: int, out_thk: torch.Tensor, sparse: SparseTable | None = None) -> None:
        """Launch the selection of one pass from its scores and, where a row can have several splits, the merge."""
        pick, merge = self.launches[2:4] if sparse is None else self.launches[4:6]
        pointers, numbers = emission(sparse, plan.cu_seqlens_q, plan.num_requests)
        stride_t, stride_h, _ = out_thk.stride()
        stream, splits = current_stream(out_thk.device), self._selection.num_splits(plan.blocks)
        first = index * plan.pass_tokens
        rows = min(plan.pass_tokens, plan.num_tokens - first) * self._config.num_heads
        pick(
            self._selection.grid(rows, splits), stream, out_thk, *pointers, stride_t, stride_h, plan.score_stride,
            first, plan.num_tokens, splits, *numbers,
        )  # fmt: skip
        if splits > 1:
            merge(rows, stream, out_thk, *pointers, stride_t, stride_h, first, plan.num_tokens, splits, *numbers)

    def run(
        self, plan: PrefillPlan, q: torch.Tensor, cache: torch.Tensor, out_thk: torch.Tensor,
        sparse: SparseTable | None = None,
    ) -> None:  # fmt: skip
        """Launch every pass: score, then select."""
        for index in range(plan.num_passes):
            self.score(plan, index, q, cache)
            self.select(plan, index, out_thk, sparse)

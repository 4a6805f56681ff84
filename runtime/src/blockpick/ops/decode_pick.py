# SPDX-License-Identifier: Apache-2.0
"""decode_pick by generated kernels: plan (once per step), score, select, and merge for rows of several splits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..backend_api import Launch
from ..config import IndexerConfig
from ..device import current_stream
from ..dispatch import Choice, Need, select
from ..layout import BLOCK_TOKENS, page_stride_bytes
from ..manifest import KernelPackage
from ..plan import DecodePlan
from .selection import Bind, Selection
from .sparse_table import SparseTable, emission

PLAN_ARGS = ("seq_lens_ptr", "block_table_ptr", "stride_table", "num_requests", "table_width")
SCORE_ARGS = ("q_ptr", "cache_ptr", "stride_q_t", "stride_q_h", "stride_page", "pool_pages", "num_requests")


@dataclass(frozen=True)
class DecodeKernels:
    """The chosen variants of one configuration; ``score`` holds one per query length, of one numeric family."""

    plan: Choice
    score: tuple[Choice, ...]
    selection: Selection

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Every distinct choice."""
        return (self.plan, *dict.fromkeys(self.score), self.selection.pick, self.selection.merge)


def cache_needs(config: IndexerConfig, rounding: str) -> list[Need]:
    """What a scorer of whole blocks must be built for."""
    return [Need("cache", config.layout.dtype), Need("rounding", rounding), Need("rows", BLOCK_TOKENS)]


def select_decode(package: KernelPackage, config: IndexerConfig, route: str) -> DecodeKernels:
    """Choose the decode kernels of ``config`` from one package; needs no device.

    Raises
    ------
    KernelNotInstalledError
        When a role has no variant; the message lists every candidate with its reason.
    """
    return DecodeKernels(
        plan=select(package, "decode_plan", [], route),
        score=select_scorers(package, config, config.num_heads, route),
        selection=Selection.choose(package, config, route),
    )


def select_scorers(package: KernelPackage, config: IndexerConfig, num_heads: int, route: str) -> tuple[Choice, ...]:
    """The scorer of every query length for ``num_heads`` heads, all of the op that serves the longest: one numeric
    family.

    Raises
    ------
    KernelNotInstalledError
        When there is none; the message lists every candidate with its reason.
    """
    cache = cache_needs(config, config.rounding(package.nvfp4_rounding))

    def columns(query_len: int) -> list[Need]:
        return [*cache, Need("columns", num_heads * query_len, at_least=True)]

    family = select(package, "decode_score", columns(config.max_query_len), route).variant.op
    lengths = range(1, config.max_query_len + 1)
    return tuple(select(package, "decode_score", columns(length), route, family) for length in lengths)


class DecodePick:
    """decode_pick over the buffers of one slot. Grids depend on maxima and on the planned batch shape only."""

    def __init__(
        self, kernels: DecodeKernels, config: IndexerConfig, compute_units: int, buffers: Mapping[str, torch.Tensor],
        bind: Bind,
    ) -> None:  # fmt: skip
        self._config, self._selection = config, kernels.selection
        self._plan_chunk = int(kernels.plan.variant.launch["chunk"])
        self._num_splits = kernels.selection.num_splits(config.max_blocks)
        self.units = units_per_length(kernels, compute_units)
        self.launches = [self._bind(kernels, length, buffers, bind) for length in range(1, config.max_query_len + 1)]

    def _bind(
        self, kernels: DecodeKernels, length: int, buffers: Mapping[str, torch.Tensor], bind: Bind
    ) -> tuple[Launch, ...]:
        """Launches (plan, score, select, merge, and both with a sparse table) for one query length."""
        config = self._config
        lists = ("header", "positions", "offsets", "unit_request", "blocks")
        shared = {f"{name}_ptr": buffers[name] for name in lists} | {
            "blocks_per_page": config.layout.blocks_per_page, "query_len": length,
        }  # fmt: skip
        whole = {  # one rank has all rows of all blocks
            "local_positions_ptr": buffers["positions"], "block_step": 1, "first_block": 0, "first_row": 0,
            "stored_blocks": config.layout.blocks_per_page, "block_rows": BLOCK_TOKENS,
        }  # fmt: skip
        plan = {"unscored_blocks": config.unscored_blocks, "num_units": self.units[length - 1], **whole}
        score = {
            "scores_ptr": buffers["scores"], "stride_scores": config.score_stride, "num_heads": config.num_heads
        }  # fmt: skip
        rows = {
            "stride_scores": config.score_stride, "query_len": length, "first_token": 0, "num_splits": self._num_splits
        }  # fmt: skip
        return (
            bind(kernels.plan, {**shared, **plan}, PLAN_ARGS),
            bind(kernels.score[length - 1], {**shared, **score}, SCORE_ARGS),
            *kernels.selection.bind(bind, config, buffers, rows, ("num_requests",)),
        )

    def plan(self, block_table: torch.Tensor, seq_lens: torch.Tensor, query_len: int) -> None:
        """Launch the plan kernel."""
        num_requests, width = block_table.shape
        chunks = -(-width * self._config.layout.blocks_per_page // self._plan_chunk)
        self.launches[query_len - 1][0](
            num_requests * chunks, current_stream(block_table.device), seq_lens, block_table, block_table.stride(0),
            num_requests, width,
        )  # fmt: skip

    def score(self, plan: DecodePlan, q: torch.Tensor, cache: torch.Tensor) -> None:
        """Launch the scorer."""
        size = q.element_size()
        strides = (q.stride(0) * size, q.stride(1) * size, page_stride_bytes(cache))
        self.launches[plan.query_len - 1][1](
            self.units[plan.query_len - 1], current_stream(q.device), q, cache, *strides, cache.shape[0],
            plan.num_requests,
        )  # fmt: skip

    def select(self, plan: DecodePlan, out_thk: torch.Tensor, sparse: SparseTable | None = None) -> None:
        """Launch the selection from what was scored and, where a row can have several splits, the merge."""
        launches = self.launches[plan.query_len - 1]
        pick, merge = launches[2:4] if sparse is None else launches[4:6]
        pointers, numbers = emission(sparse, None, plan.num_requests)
        stride_t, stride_h, _ = out_thk.stride()
        rows = plan.num_requests * plan.query_len * self._config.num_heads
        grid, stream = self._selection.grid(rows, self._num_splits), current_stream(out_thk.device)
        pick(grid, stream, out_thk, *pointers, stride_t, stride_h, plan.num_requests, *numbers)
        if self._num_splits > 1:
            merge(rows, stream, out_thk, *pointers, stride_t, stride_h, plan.num_requests, *numbers)

    def run(
        self, plan: DecodePlan, q: torch.Tensor, cache: torch.Tensor, out_thk: torch.Tensor,
        sparse: SparseTable | None = None,
    ) -> None:  # fmt: skip
        """Launch score, then select."""
        self.score(plan, q, cache)
        self.select(plan, out_thk, sparse)


def units_per_length(kernels: DecodeKernels, compute_units: int) -> list[int]:
    """Work units, which are the scorer's grid, for every query length."""
    return [compute_units * int(choice.variant.launch["units_per_cu"]) for choice in kernels.score]

# SPDX-License-Identifier: Apache-2.0
"""decode_pick by generated kernels: plan (once per step), score, select, and merge for rows of several splits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from ..backend_api import DeviceInfo, Launch
from ..config import ORDERS, IndexerConfig, Memory
from ..dispatch import Choice, Need, find_package, load, select
from ..layout import page_stride_bytes
from ..plan import DecodePlan, SlotSizes, num_splits

PLAN_ARGS = ("seq_lens_ptr", "block_table_ptr", "stride_table", "num_requests", "table_width")
SCORE_ARGS = ("q_ptr", "cache_ptr", "stride_q_t", "stride_q_h", "stride_page", "pool_blocks")
SELECT_ARGS = ("out_ptr", "stride_out_t", "stride_out_h")


class DecodeEngine(Protocol):
    """What runs a checked decode: generated kernels, or the reference."""

    choices: tuple[Choice, ...]

    def memory(self) -> Memory:
        """Bytes that the engine allocates."""

    def plan(self, slot: int, block_table: torch.Tensor, seq_lens: torch.Tensor, query_len: int) -> None:
        """Prepare the slot for a step; tensors are checked."""

    def run(self, plan: DecodePlan, q: torch.Tensor, cache: torch.Tensor, out_thk: torch.Tensor) -> None:
        """Write ids; tensors are checked, ``out_thk`` is a [T, H, topk] view."""

    def scores(self, plan: DecodePlan) -> torch.Tensor:
        """Scores of the last run as [B, L, H, blocks] fp32."""


class KernelEngine:
    """decode_pick through the kernels of one package, on one route.

    All buffers are allocated here, from maxima; grids depend on maxima and on the planned batch shape only.
    """

    def __init__(self, config: IndexerConfig, device: torch.device, info: DeviceInfo | None, arch: str, route: str) -> None:
        self.config, self.device, self.route = config, device, route
        package = find_package(arch)
        rounding = "none"
        if config.layout.dtype == "nvfp4":
            rounding = config.nvfp4_rounding or package.nvfp4_rounding
        cache_needs = [Need("cache", config.layout.dtype), Need("rounding", rounding), Need("rows", config.layout.segment_rows)]

        plan_choice = select(package, "decode_plan", [], route)
        widest = Need("columns", config.num_heads * config.max_query_len, at_least=True)
        family = select(package, "decode_score", [*cache_needs, widest], route).variant.op
        score_choices = [
            select(
                package, "decode_score",
                [*cache_needs, Need("columns", config.num_heads * length, at_least=True)], route, family,
            )
            for length in range(1, config.max_query_len + 1)
        ]  # fmt: skip
        topk = Need("topk", config.topk, at_least=True)
        select_choice = select(package, "decode_select", [topk], route)
        merge_choice = select(package, "decode_merge", [Need("topk", select_choice.variant.axes["topk"])], route)
        self.choices = (plan_choice, *dict.fromkeys(score_choices), select_choice, merge_choice)

        compute_units = info.compute_units if info is not None else 1
        self._num_units = compute_units * int(score_choices[-1].variant.launch["units_per_cu"])
        self._split_blocks = int(select_choice.variant.launch["split_blocks"])
        self._num_splits = num_splits(config, self._split_blocks)
        self._plan_chunk = int(plan_choice.variant.launch["chunk"])
        self._sizes = SlotSizes.of(config, self._num_units, self._split_blocks, int(select_choice.variant.axes["topk"]))
        self.buffers = [self._sizes.allocate(device) for _ in range(config.slots)]
        self._launches = [
            self._bind(buffers, info, plan_choice, score_choices, select_choice, merge_choice) for buffers in self.buffers
        ]

    def memory(self) -> Memory:
        """Bytes that the engine allocated, by purpose."""
        return self._sizes.memory(self.config.slots)

    def _bind(
        self, buffers: Mapping[str, torch.Tensor], info: DeviceInfo | None, plan: Choice, score: list[Choice],
        pick: Choice, merge: Choice,
    ) -> list[tuple[Launch, Launch, Launch, Launch]]:  # fmt: skip
        """Launches (plan, score, select, merge) of one slot for every query length."""
        config = self.config
        plan_ptrs = {f"{name}_ptr": buffers[name] for name in ("header", "lens", "offsets", "unit_request", "blocks")}
        row_ptrs = {f"{name}_ptr": buffers[name] for name in ("header", "lens", "partial")}
        bound = []
        for length in range(1, config.max_query_len + 1):
            rows: dict[str, Any] = {
                "num_heads": config.num_heads, "query_len": length, "topk": config.topk,
                "order": ORDERS.index(config.order), "empty_block_zero": int(config.empty_row == "block_zero"),
                "num_splits": self._num_splits,
            }  # fmt: skip
            plan_fixed = {
                "blocks_per_page": config.layout.blocks_per_page, "unscored_blocks": config.unscored_blocks,
                "num_units": self._num_units,
            }  # fmt: skip
            score_fixed = {
                "scores_ptr": buffers["scores"], "stride_scores": config.score_stride,
                "blocks_per_page": config.layout.blocks_per_page, "num_heads": config.num_heads, "query_len": length,
            }  # fmt: skip
            select_fixed = {
                "scores_ptr": buffers["scores"], "stride_scores": config.score_stride,
                "init_blocks": config.init_blocks, "local_blocks": config.local_blocks,
            }  # fmt: skip
            bound.append((
                load(plan.variant, self.route, info).bind({**plan_ptrs, **plan_fixed}, PLAN_ARGS),
                load(score[length - 1].variant, self.route, info).bind({**plan_ptrs, **score_fixed}, SCORE_ARGS),
                load(pick.variant, self.route, info).bind({**row_ptrs, **select_fixed, **rows}, SELECT_ARGS),
                load(merge.variant, self.route, info).bind(
                    {**row_ptrs, **rows, "split_blocks": self._split_blocks}, SELECT_ARGS
                ),
            ))  # fmt: skip
        return bound

    def _stream(self) -> int:
        return torch.cuda.current_stream(self.device).cuda_stream if self.device.type == "cuda" else 0

    def plan(self, slot: int, block_table: torch.Tensor, seq_lens: torch.Tensor, query_len: int) -> None:
        """Launch the plan kernel for one slot."""
        num_requests, width = block_table.shape
        chunks = -(-width * self.config.layout.blocks_per_page // self._plan_chunk)
        self._launches[slot][query_len - 1][0](
            num_requests * chunks, self._stream(), seq_lens, block_table, block_table.stride(0), num_requests, width
        )

    def run(self, plan: DecodePlan, q: torch.Tensor, cache: torch.Tensor, out_thk: torch.Tensor) -> None:
        """Launch score, select and, where a row can have several splits, merge."""
        _, score, pick, merge = self._launches[plan.slot][plan.query_len - 1]
        stream, size = self._stream(), q.element_size()
        stride_t, stride_h, _ = out_thk.stride()
        pool_blocks = cache.shape[0] * self.config.layout.blocks_per_page
        score(
            self._num_units, stream, q, cache, q.stride(0) * size, q.stride(1) * size, page_stride_bytes(cache), pool_blocks
        )
        rows = plan.num_requests * plan.query_len * self.config.num_heads
        pick(rows * self._num_splits, stream, out_thk, stride_t, stride_h)
        if self._num_splits > 1:
            merge(rows, stream, out_thk, stride_t, stride_h)

    def scores(self, plan: DecodePlan) -> torch.Tensor:
        """The slot's score scratch as [B, L, H, blocks] fp32; entries that no kernel scored are stale."""
        rows = plan.num_requests * plan.query_len * self.config.num_heads
        scores = self.buffers[plan.slot]["scores"][:rows, : plan.table_blocks]
        return scores.view(plan.num_requests, plan.query_len, self.config.num_heads, plan.table_blocks)

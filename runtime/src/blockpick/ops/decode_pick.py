# SPDX-License-Identifier: Apache-2.0
"""decode_pick by generated kernels: plan (once per step), score, select, and merge for rows of several splits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..backend_api import DeviceInfo, Launch
from ..config import ORDERS, IndexerConfig, Memory
from ..device import current_stream, on_device
from ..dispatch import Choice, Need, find_package, load, select
from ..layout import page_stride_bytes
from ..manifest import KernelPackage
from ..plan import DecodePlan, SlotSizes, num_splits

PLAN_ARGS = ("seq_lens_ptr", "block_table_ptr", "stride_table", "num_requests", "table_width")
SCORE_ARGS = ("q_ptr", "cache_ptr", "stride_q_t", "stride_q_h", "stride_page", "pool_pages", "num_requests")
SELECT_ARGS = ("out_ptr", "stride_out_t", "stride_out_h", "num_requests")


class DecodeEngine(Protocol):
    """What runs a checked decode: generated kernels, or the reference."""

    choices: tuple[Choice, ...]
    rounding: str

    def memory(self) -> Memory:
        """Bytes that the engine allocates."""

    def plan(self, slot: int, block_table: torch.Tensor, seq_lens: torch.Tensor, query_len: int) -> None:
        """Prepare the slot for a step; tensors are checked."""

    def run(self, plan: DecodePlan, q: torch.Tensor, cache: torch.Tensor, out_thk: torch.Tensor) -> None:
        """Write ids; tensors are checked, ``out_thk`` is a [T, H, topk] view."""

    def scores(self, plan: DecodePlan) -> torch.Tensor:
        """Scores of the last run as [B, L, H, blocks] fp32."""


@dataclass(frozen=True)
class DecodeKernels:
    """The chosen variants of one configuration; ``score`` holds one per query length, of one numeric family."""

    plan: Choice
    score: tuple[Choice, ...]
    select: Choice
    merge: Choice
    rounding: str

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Every distinct choice."""
        return (self.plan, *dict.fromkeys(self.score), self.select, self.merge)


def select_decode(package: KernelPackage, config: IndexerConfig, route: str) -> DecodeKernels:
    """Choose the decode kernels of ``config`` from one package; needs no device.

    Raises
    ------
    KernelNotInstalledError
        When a role has no variant; the message lists every candidate with its reason.
    """
    rounding = "none"
    if config.layout.dtype == "nvfp4":
        rounding = config.nvfp4_rounding or package.nvfp4_rounding
    cache = [Need("cache", config.layout.dtype), Need("rounding", rounding), Need("rows", config.layout.segment_rows)]

    def columns(query_len: int) -> list[Need]:
        return [*cache, Need("columns", config.num_heads * query_len, at_least=True)]

    family = select(package, "decode_score", columns(config.max_query_len), route).variant.op
    pick = select(package, "decode_select", [Need("topk", config.topk, at_least=True)], route)
    return DecodeKernels(
        plan=select(package, "decode_plan", [], route),
        score=tuple(
            select(package, "decode_score", columns(length), route, family)
            for length in range(1, config.max_query_len + 1)
        ),
        select=pick,
        merge=select(package, "decode_merge", [Need("topk", pick.variant.axes["topk"])], route),
        rounding=rounding,
    )


class KernelEngine:
    """decode_pick through the kernels of one package, on one route.

    All buffers are allocated here, from maxima; grids depend on maxima and on the planned batch shape only.
    """

    def __init__(
        self, config: IndexerConfig, device: torch.device, info: DeviceInfo | None, arch: str, route: str
    ) -> None:
        self.config, self.device, self.route = config, device, route
        self.kernels = kernels = select_decode(find_package(arch), config, route)
        self.choices, self.rounding = kernels.choices, kernels.rounding
        compute_units = info.compute_units if info is not None else 1
        self._max_units = compute_units * int(max(c.variant.launch["units_per_cu"] for c in kernels.score))
        self._units = [compute_units * int(choice.variant.launch["units_per_cu"]) for choice in kernels.score]
        self._split_blocks = int(kernels.select.variant.launch["split_blocks"])
        self._num_splits = num_splits(config, self._split_blocks)
        self._plan_chunk = int(kernels.plan.variant.launch["chunk"])
        self._sizes = SlotSizes.of(
            config, self._max_units, self._split_blocks, int(kernels.select.variant.axes["topk"])
        )
        self.buffers = [self._sizes.allocate(device) for _ in range(config.slots)]
        self._launches = [self._bind(buffers, info) for buffers in self.buffers]

    def memory(self) -> Memory:
        """Bytes that the engine allocated, by purpose."""
        return self._sizes.memory(self.config.slots)

    def _bind(self, buffers: Mapping[str, torch.Tensor], info: DeviceInfo | None) -> list[tuple[Launch, ...]]:
        """Launches (plan, score, select, merge) of one slot for every query length."""
        config, kernels = self.config, self.kernels
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
                "query_len": length, "num_units": self._units[length - 1],
            }  # fmt: skip
            score_fixed = {
                "scores_ptr": buffers["scores"], "stride_scores": config.score_stride,
                "blocks_per_page": config.layout.blocks_per_page, "num_heads": config.num_heads, "query_len": length,
            }  # fmt: skip
            select_fixed = {
                "scores_ptr": buffers["scores"], "stride_scores": config.score_stride,
                "init_blocks": config.init_blocks, "local_blocks": config.local_blocks,
            }  # fmt: skip
            merge_fixed = {"split_blocks": self._split_blocks}
            launches = (
                (kernels.plan, {**plan_ptrs, **plan_fixed}, PLAN_ARGS),
                (kernels.score[length - 1], {**plan_ptrs, **score_fixed}, SCORE_ARGS),
                (kernels.select, {**row_ptrs, **select_fixed, **rows}, SELECT_ARGS),
                (kernels.merge, {**row_ptrs, **merge_fixed, **rows}, SELECT_ARGS),
            )
            bound.append(
                tuple(load(choice.variant, self.route, info).bind(fixed, names) for choice, fixed, names in launches)
            )
        return bound

    def plan(self, slot: int, block_table: torch.Tensor, seq_lens: torch.Tensor, query_len: int) -> None:
        """Launch the plan kernel for one slot."""
        num_requests, width = block_table.shape
        chunks = -(-width * self.config.layout.blocks_per_page // self._plan_chunk)
        launch = self._launches[slot][query_len - 1][0]
        with on_device(self.device):
            launch(
                num_requests * chunks, current_stream(self.device), seq_lens, block_table, block_table.stride(0),
                num_requests, width,
            )  # fmt: skip

    def run(self, plan: DecodePlan, q: torch.Tensor, cache: torch.Tensor, out_thk: torch.Tensor) -> None:
        """Launch score, select and, where a row can have several splits, merge."""
        _, score, pick, merge = self._launches[plan.slot][plan.query_len - 1]
        units, size = self._units[plan.query_len - 1], q.element_size()
        stride_t, stride_h, _ = out_thk.stride()
        rows = plan.num_requests * plan.query_len * self.config.num_heads
        with on_device(self.device):
            stream = current_stream(self.device)
            strides = (q.stride(0) * size, q.stride(1) * size, page_stride_bytes(cache))
            score(units, stream, q, cache, *strides, cache.shape[0], plan.num_requests)
            pick(rows * self._num_splits, stream, out_thk, stride_t, stride_h, plan.num_requests)
            if self._num_splits > 1:
                merge(rows, stream, out_thk, stride_t, stride_h, plan.num_requests)

    def scores(self, plan: DecodePlan) -> torch.Tensor:
        """The slot's score scratch as [B, L, H, blocks] fp32; entries that no kernel scored are stale."""
        rows = plan.num_requests * plan.query_len * self.config.num_heads
        scores = self.buffers[plan.slot]["scores"][:rows, : plan.table_blocks]
        return scores.view(plan.num_requests, plan.query_len, self.config.num_heads, plan.table_blocks)

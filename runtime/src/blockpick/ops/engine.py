# SPDX-License-Identifier: Apache-2.0
"""What runs behind an Indexer: generated kernels of one package over buffers that are sized from maxima."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from ..backend_api import DeviceInfo, Launch
from ..config import IndexerConfig, Memory
from ..device import on_device
from ..dispatch import Choice, find_package, load
from ..plan import DecodePlan, PrefillPlan, SlotSizes
from .decode_pick import DecodePick, select_decode, units_per_length
from .prefill_pick import PrefillPick, select_prefill
from .selection import Selection
from .sparse_table import SparseTable

NOBODY = nullcontext()


class Engine(Protocol):
    """What runs checked calls of an Indexer: generated kernels, or the reference."""

    choices: tuple[Choice, ...]
    rounding: str
    numerics: str  # of prefill

    def memory(self) -> Memory:
        """Bytes that the engine allocates."""

    def allocate(self) -> None:
        """Allocate everything and bind the launches."""

    def close(self) -> None:
        """Let go of what is shared with other ranks."""

    def reopen(self) -> None:
        """Share it anew."""

    def telling(self) -> AbstractContextManager[None]:
        """Around a call that all ranks make: what this rank raises is told to the others."""

    def plan_decode(self, slot: int, block_table: torch.Tensor, seq_lens: torch.Tensor, query_len: int) -> None:
        """Prepare the slot for a decode step; tensors are checked."""

    def decode(
        self, plan: DecodePlan, q: torch.Tensor, cache: torch.Tensor, out_thk: torch.Tensor,
        sparse: SparseTable | None = None,
    ) -> None:  # fmt: skip
        """Write ids, and the sparse table if asked; tensors are checked, ``out_thk`` is a [T, H, topk] view."""

    def score_decode(self, plan: DecodePlan, q: torch.Tensor, cache: torch.Tensor) -> None:
        """Score without selecting; tensors are checked. :meth:`scores` shows the result."""

    def scores(self, plan: DecodePlan) -> torch.Tensor:
        """Scores of the last decode as [B, L, H, blocks] fp32."""

    def prefill_geometry(self, blocks: int, num_tokens: int) -> tuple[int, int, int]:
        """Score stride, tokens of a pass and number of passes for rows of ``blocks`` blocks."""

    def plan_prefill(self, plan: PrefillPlan, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Prepare the plan's slot for a prefill step; tensors are checked."""

    def prefill(
        self, plan: PrefillPlan, q: torch.Tensor, cache: torch.Tensor, out_thk: torch.Tensor,
        sparse: SparseTable | None = None,
    ) -> None:  # fmt: skip
        """Write ids, and the sparse table if asked; tensors are checked, ``out_thk`` is a [T, H, topk] view."""

    def score_pass(self, plan: PrefillPlan, index: int, q: torch.Tensor, cache: torch.Tensor) -> None:
        """Score one pass of a prefill without selecting; tensors are checked. :meth:`pass_scores` shows the result."""

    def select_pass(self, plan: PrefillPlan, index: int, out_thk: torch.Tensor) -> None:
        """Write the ids of one pass from what :meth:`pass_scores` holds."""

    def pass_scores(self, plan: PrefillPlan, index: int) -> torch.Tensor:
        """The scratch of one pass as [t, H, blocks] fp32, to read after scoring or to fill before selecting."""

    def prefill_scores(self, plan: PrefillPlan) -> torch.Tensor:
        """Scores of the last pass of the last prefill as [t, H, blocks] fp32."""


class KernelEngine:
    """decode_pick and prefill_pick through the kernels of one package, on one route."""

    def __init__(
        self, config: IndexerConfig, device: torch.device, info: DeviceInfo | None, arch: str, route: str,
        decodes: bool = True,
    ) -> None:  # fmt: skip
        self.config, self.device, self.route, self._info = config, device, route, info
        package = find_package(arch)
        self.rounding = config.rounding(package.nvfp4_rounding)
        self.numerics = config.numerics(self.rounding, package.prefill_fp8)
        self._compute_units = info.compute_units if info is not None else 1
        self.decode_kernels = select_decode(package, config, route) if decodes else None
        self.prefill_kernels = select_prefill(package, config, route) if config.max_prefill_tokens else None
        self.choices: tuple[Choice, ...] = ()
        units, tile_tokens = None, 1
        if self.decode_kernels is not None:
            self.choices += self.decode_kernels.choices
            units = max(units_per_length(self.decode_kernels, self._compute_units))
        if self.prefill_kernels is not None:
            self.choices += self.prefill_kernels.choices
            tile_tokens = self.prefill_kernels.tile_tokens(config.num_heads)
        selection = Selection.choose(package, config, route)
        self.sizes = SlotSizes.of(config, units, selection.split_blocks, selection.keys_per_split, tile_tokens)
        self.buffers: list[dict[str, torch.Tensor]] = []

    def memory(self) -> Memory:
        """Bytes that :meth:`allocate` takes, by purpose."""
        return self.sizes.memory(self.config.slots)

    def allocate(self) -> None:
        """Allocate the buffers of all slots and bind the launches."""
        self.buffers = [self.sizes.allocate(self.device) for _ in range(self.config.slots)]
        arguments = self.config, self._compute_units
        self.decodes: list[DecodePick] = []
        self.prefills: list[PrefillPick] = []
        if self.decode_kernels is not None:
            self.decodes = [DecodePick(self.decode_kernels, *arguments, slot, self._bind) for slot in self.buffers]
        if self.prefill_kernels is not None:
            self.prefills = [PrefillPick(self.prefill_kernels, *arguments, slot, self._bind) for slot in self.buffers]

    def close(self) -> None:
        """Nothing is shared."""

    def reopen(self) -> None:
        """Nothing is shared."""

    def telling(self) -> AbstractContextManager[None]:
        """There is nobody to tell."""
        return NOBODY

    def _bind(self, choice: Choice, fixed: Mapping[str, Any], dynamic: tuple[str, ...]) -> Launch:
        return load(choice.variant, self.route, self._info).bind(fixed, dynamic)

    def plan_decode(self, slot: int, block_table: torch.Tensor, seq_lens: torch.Tensor, query_len: int) -> None:
        """Launch the decode plan of one slot."""
        with on_device(self.device):
            self.decodes[slot].plan(block_table, seq_lens, query_len)

    def decode(
        self, plan: DecodePlan, q: torch.Tensor, cache: torch.Tensor, out_thk: torch.Tensor,
        sparse: SparseTable | None = None,
    ) -> None:  # fmt: skip
        """Launch one layer's decode."""
        with on_device(self.device):
            self.decodes[plan.slot].run(plan, q, cache, out_thk, sparse)

    def score_decode(self, plan: DecodePlan, q: torch.Tensor, cache: torch.Tensor) -> None:
        """Launch one layer's decode scorer only."""
        with on_device(self.device):
            self.decodes[plan.slot].score(plan, q, cache)

    def scores(self, plan: DecodePlan) -> torch.Tensor:
        """The slot's score scratch as [B, L, H, blocks] fp32; entries that no kernel scored are stale."""
        config = self.config
        rows = plan.num_requests * plan.query_len * config.num_heads
        scores = self.buffers[plan.slot]["scores"].view(-1)[: rows * config.score_stride].view(rows, -1)
        return scores[:, : plan.table_blocks].view(plan.num_requests, plan.query_len, config.num_heads, -1)

    def prefill_geometry(self, blocks: int, num_tokens: int) -> tuple[int, int, int]:
        """Score stride, tokens of a pass and number of passes for rows of ``blocks`` blocks."""
        return self.sizes.prefill_geometry(self.config, blocks, num_tokens)

    def plan_prefill(self, plan: PrefillPlan, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Launch the prefill plan of one slot."""
        with on_device(self.device):
            self.prefills[plan.slot].plan(plan, cu_seqlens_q, seq_lens)

    def prefill(
        self, plan: PrefillPlan, q: torch.Tensor, cache: torch.Tensor, out_thk: torch.Tensor,
        sparse: SparseTable | None = None,
    ) -> None:  # fmt: skip
        """Launch one layer's prefill."""
        with on_device(self.device):
            self.prefills[plan.slot].run(plan, q, cache, out_thk, sparse)

    def score_pass(self, plan: PrefillPlan, index: int, q: torch.Tensor, cache: torch.Tensor) -> None:
        """Launch the scorer of one pass of a prefill."""
        with on_device(self.device):
            self.prefills[plan.slot].score(plan, index, q, cache)

    def select_pass(self, plan: PrefillPlan, index: int, out_thk: torch.Tensor) -> None:
        """Launch the selection of one pass of a prefill."""
        with on_device(self.device):
            self.prefills[plan.slot].select(plan, index, out_thk)

    def pass_scores(self, plan: PrefillPlan, index: int) -> torch.Tensor:
        """The slot's score scratch as [t, H, blocks] fp32 of one pass; entries that no kernel scored are stale."""
        tokens = min(plan.pass_tokens, plan.num_tokens - index * plan.pass_tokens)
        shape = (tokens, self.config.num_heads, plan.score_stride)
        scores = self.buffers[plan.slot]["scores"][: math.prod(shape)]
        return scores.view(shape)[:, :, : plan.blocks]

    def prefill_scores(self, plan: PrefillPlan) -> torch.Tensor:
        """A copy of the last pass's scores as [t, H, blocks] fp32; entries that no kernel scored are stale."""
        return self.pass_scores(plan, plan.num_passes - 1).clone()

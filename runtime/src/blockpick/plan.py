# SPDX-License-Identifier: Apache-2.0
"""Buffers of a decode step: the work list that all layers share, and the scratch that they reuse."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .config import IndexerConfig, Memory


@dataclass(frozen=True, eq=False)
class DecodePlan:
    """One planned decode step. Valid until its slot is planned again; shared by all layers of the step.

    Attributes
    ----------
    slot : int
        The indexer's slot that holds the plan's buffers.
    generation : int
        Counts the plans of the slot; an older plan is refused.
    num_requests, query_len : int
        Shape of the batch: ``num_requests * query_len`` query rows.
    table_blocks : int
        Blocks that the planned block table can address.
    """

    slot: int
    generation: int
    num_requests: int
    query_len: int
    table_blocks: int


@dataclass(frozen=True)
class SlotSizes:
    """Shapes and dtypes of one slot's buffers, computed from maxima only."""

    shapes: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]

    @classmethod
    def of(cls, config: IndexerConfig, num_units: int, split_blocks: int, keys_per_split: int) -> SlotSizes:
        """Sizes for ``config`` with ``num_units`` work units and splits of ``split_blocks`` blocks."""
        splits = num_splits(config, split_blocks)
        partial = config.max_rows * splits * keys_per_split if splits > 1 else 16
        return cls((
            ("header", (16,), torch.int32),
            ("lens", (config.max_requests,), torch.int32),
            ("offsets", (config.max_requests + 1,), torch.int32),
            ("unit_request", (num_units,), torch.int32),
            ("blocks", (config.max_requests * config.max_blocks,), torch.int32),
            ("scores", (config.max_rows, config.score_stride), torch.float32),
            ("partial", (partial,), torch.int64),
        ))  # fmt: skip

    def memory(self, slots: int) -> Memory:
        """Bytes of ``slots`` slots by buffer."""
        return Memory(tuple((n, slots * math.prod(shape) * dtype.itemsize) for n, shape, dtype in self.shapes))

    def allocate(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The buffers of one slot; the plan is empty (no work) until the slot is planned."""
        return {n: torch.zeros(shape, dtype=dtype, device=device) for n, shape, dtype in self.shapes}


def num_splits(config: IndexerConfig, split_blocks: int) -> int:
    """Splits of the longest row."""
    return -(-config.max_blocks // split_blocks)

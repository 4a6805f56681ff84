# SPDX-License-Identifier: Apache-2.0
"""Ranks of one process: groups over buffers of one device, for tests and for timing one rank's chain alone."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..checks import resolve_device
from ..errors import PeerError
from ..indexer import Indexer
from ..ops.context_engine import ContextEngine
from ..ops.context_pick import PUSH, WAIT
from ..ops.sparse_table import SparseTable
from ..plan import DecodePlan

LIMIT_WORD = 1


class SimulatedBuffer:
    """One buffer per rank, all in this process."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self.addresses = [tensor.data_ptr() for tensor in tensors]


class SimulatedGroup:
    """One rank of a group whose ranks are objects of this process; see :class:`blockpick.parallel.group.Group`."""

    transport = "peer"

    def __init__(self, rank: int, size: int, device: torch.device, shared: list[SimulatedBuffer], limit_s: float):
        self.rank, self.size, self.device = rank, size, device
        self._shared, self._opened, self._limit_s = shared, 0, limit_s
        self.record = torch.zeros(1, dtype=torch.int64, device=device)

    def explain(self) -> str:
        """What it is."""
        return f"rank {self.rank} of {self.size}: simulated, all ranks in one process"

    def open_buffer(self, size: int) -> SimulatedBuffer:
        """The n-th buffer that a rank opens is the n-th of all ranks."""
        if self._opened == len(self._shared):
            tensors = [torch.zeros(-(-size // 8), dtype=torch.int64, device=self.device) for _ in range(self.size)]
            for tensor in tensors:
                tensor[LIMIT_WORD] = int(self._limit_s * 1e9)
            self._shared.append(SimulatedBuffer(tensors))
        self._opened += 1
        return self._shared[self._opened - 1]

    def close_buffer(self, buffer: SimulatedBuffer) -> None:
        """Freed with the group."""

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """There is no process group."""
        raise PeerError("simulated ranks have no process group")

    def together(self, act: Callable[[], Any], what: str) -> list[Any]:
        """The ranks of one process are made alike."""
        return [act()]

    def check(self) -> None:
        """Reads the record, which synchronises on a GPU: tests call it, not the hot path."""

    def failed(self) -> int:
        """The record of a failed wait, 0 if there is none."""
        return int(self.record)

    def abort(self, reason: str) -> None:
        """Set the flags of all ranks."""
        for buffer in self._shared:
            for tensor in buffer.tensors:
                tensor[0] = struct.unpack("<q", struct.pack("<q", 1))[0]


def simulated_groups(size: int, device: torch.device | str, limit_s: float = 5.0) -> list[SimulatedGroup]:
    """The ranks of a simulated group."""
    shared: list[SimulatedBuffer] = []
    where = resolve_device(device)
    return [SimulatedGroup(rank, size, where, shared, limit_s) for rank in range(size)]


def decode_in_phases(
    indexers: Sequence[Indexer], plans: Sequence[DecodePlan], queries: Sequence[torch.Tensor],
    cache: torch.Tensor | Sequence[torch.Tensor], outs: Sequence[torch.Tensor],
    sparse_tables: Sequence[SparseTable | None] | None = None,
) -> None:  # fmt: skip
    """One layer on all ranks of a process, phase by phase on one stream: nothing waits in vain, nothing spins.

    ``cache`` is that of all ranks, or one for each.
    """
    caches = [cache] * len(indexers) if isinstance(cache, torch.Tensor) else cache
    ranks = []
    for indexer, plan, q, out in zip(indexers, plans, queries, outs, strict=True):
        engine = indexer._engine
        if not isinstance(engine, ContextEngine):
            raise TypeError(f"the indexer decodes by {type(engine).__name__}, not over ranks")
        ranks.append((engine.context, plan, q, indexer._tokens_first(out)))
    for context, plan, q, _ in ranks:
        context.exchange(plan, q, PUSH)
    for context, plan, q, _ in ranks:
        context.exchange(plan, q, WAIT)
    for (context, plan, q, _), own in zip(ranks, caches, strict=True):
        context.score(plan, own)
        context.push(plan, q.device)
    for (context, plan, _, out), sparse in zip(ranks, sparse_tables or [None] * len(ranks), strict=True):
        context.merge(plan, out, sparse)

# SPDX-License-Identifier: Apache-2.0
"""An engine whose decode is spread over the ranks of a group; its prefill is that of one rank on its own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ..backend_api import DeviceInfo
from ..config import IndexerConfig, Memory
from ..device import on_device
from ..dispatch import find_package
from ..errors import PeerError, StalePlanError, UnsupportedConfigError
from ..parallel.heads import BlockShare, HeadShare
from ..plan import DecodePlan, PrefillPlan
from .context_kernels import ContextKernels
from .context_pick import ContextPick, ContextSizes
from .engine import KernelEngine
from .sparse_table import SparseTable

if TYPE_CHECKING:
    from ..parallel.buffer import PeerBuffer
    from ..parallel.group import Group


class ContextEngine(KernelEngine):
    """decode_pick over all ranks' shares of the blocks, and prefill_pick, through the kernels of one package."""

    def __init__(
        self, config: IndexerConfig, device: torch.device, info: DeviceInfo | None, arch: str, route: str,
        group: Group, total_heads: int | None, shard_scorer: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(config, device, info, arch, route, decodes=False)
        self.group, self.share = group, HeadShare.of(group.size, config.num_heads, total_heads)
        package, blocks = find_package(arch), BlockShare.of(config.layout, group.size)
        self.context_kernels = ContextKernels.choose(package, config, self.share, blocks, route, shard_scorer)
        self.choices = tuple(dict.fromkeys((*self.context_kernels.choices, *self.choices)))
        self.context_sizes = ContextSizes(config, self.share, blocks)
        per_unit = max(int(choice.variant.launch["units_per_cu"]) for choice in self.context_kernels.score)
        self._shapes = self.context_sizes.shapes(self._compute_units * per_unit, group.transport == "collective")
        self._exchange: PeerBuffer | None = None
        self._open = False

    def memory(self) -> Memory:
        """Bytes that :meth:`allocate` takes, by purpose; the exchange buffer is the driver's and shared with peers."""
        own = tuple((f"context_{n}", math.prod(shape) * dtype.itemsize) for n, shape, dtype in self._shapes)
        peers: tuple[tuple[str, int], ...] = ()
        if self.group.transport == "peer":
            from ..parallel.wire import GRANULE

            peers = (("exchange (peer memory)", -(-self.context_sizes.exchange_bytes // GRANULE) * GRANULE),)
        return Memory(super().memory().items + own + peers)

    def allocate(self) -> None:
        """Allocate everything, open the exchange buffer on all ranks, and bind the launches.

        Raises
        ------
        PeerError
            On all ranks, when memory is short on one, or ranks were configured differently.
        """

        def act() -> tuple[str, ...]:
            KernelEngine.allocate(self)
            self.context_buffers = {n: torch.zeros(s, dtype=d, device=self.device) for n, s, d in self._shapes}
            kernels = ", ".join(choice.variant.name for choice in self.context_kernels.choices)
            return str(self.config), str(self.share), self.rounding, kernels, f"{self._compute_units} compute units"

        answers = self.group.together(act, "Indexer: can't allocate")
        for rank, answer in enumerate(answers):
            for ours, theirs in zip(answers[0], answer, strict=True):
                if ours != theirs:
                    raise PeerError(
                        f"Indexer: rank 0 has {ours}, rank {rank} has {theirs}; they must be the same", rank
                    )
        self.reopen()

    def reopen(self) -> None:
        """Open the exchange buffer on all ranks and bind the launches to it."""
        if self._open:
            return
        addresses: list[int] = []
        if self.group.transport == "peer":
            self._exchange = self.group.open_buffer(self.context_sizes.exchange_bytes)
            addresses = self._exchange.addresses
        self.context = ContextPick(
            self.context_kernels, self.context_sizes, self._compute_units, self.context_buffers, self.group, addresses,
            self._bind,
        )  # fmt: skip
        self._open = True

    def close(self) -> None:
        """Close the exchange buffer on all ranks."""
        self._open = False
        if self._exchange is not None:
            self.group.close_buffer(self._exchange)
            self._exchange = None

    def plan_decode(self, slot: int, block_table: torch.Tensor, seq_lens: torch.Tensor, query_len: int) -> None:
        """Launch the plan of this rank's share of the blocks."""
        self._check("plan_decode")
        with on_device(self.device):
            self.context.plan(block_table, seq_lens, query_len)

    def plan_prefill(self, plan: PrefillPlan, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Launch the prefill plan; a failed rank is told here too."""
        self.group.check()
        super().plan_prefill(plan, cu_seqlens_q, seq_lens)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """What keeps this rank from a call that all ranks make is told to the peers, so that they don't wait for it."""
        try:
            yield
        except PeerError:
            raise
        except Exception as error:
            if self._open:  # nobody waits for a sleeping rank
                self.group.abort(f"{type(error).__name__}: {error}")
            raise

    def decode(
        self, plan: DecodePlan, q: torch.Tensor, cache: torch.Tensor, out_thk: torch.Tensor,
        sparse: SparseTable | None = None,
    ) -> None:  # fmt: skip
        """Launch one layer's chain."""
        self._check("decode")
        with on_device(self.device):
            self.context.run(plan, q, cache, out_thk, sparse)

    def _check(self, call: str) -> None:
        """Raise when a rank has failed, or the exchange buffer is not there."""
        if not self._open:
            raise StalePlanError(f"{call}: the indexer's exchange buffer is closed; call wake() on all ranks first")
        self.group.check()

    def score_decode(self, plan: DecodePlan, q: torch.Tensor, cache: torch.Tensor) -> None:
        """Scores alone belong to one rank.

        Raises
        ------
        UnsupportedConfigError
            Always: an exchange without its merge would leave the epoch where it is.
        """
        raise UnsupportedConfigError("scores alone: not with parallel; use an indexer of one rank")

    def scores(self, plan: DecodePlan) -> torch.Tensor:
        """Scores of this rank's blocks for all heads of the group as [B, L, heads, own blocks] fp32."""
        heads, stride = self.share.total_heads, self.context_sizes.score_stride
        rows = plan.num_requests * plan.query_len * heads
        blocks = self.context_sizes.blocks
        own = -(-(plan.table_blocks - blocks.first_block(self.group.rank)) // blocks.step)
        scores = self.context_buffers["scores"][: rows * stride].view(rows, stride)[:, :own]
        return scores.view(plan.num_requests, plan.query_len, heads, -1)

# SPDX-License-Identifier: Apache-2.0
"""Engines behind functions that have no indexer: one per configuration, sized by maxima that only grow, in a bounded
cache.

Such a function plans in every call, also inside a graph capture: its plan is device work on the caller's tensors, and
the graph that replays it replays the launches that read it right after. :meth:`blockpick.Indexer.plan_decode` refuses a
capture because there a plan belongs to the step, not to the graph.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from ..checks import is_capturing
from ..config import MAX_BLOCKS, MAX_PREFILL_TOKENS, IndexerConfig
from ..device import current_stream
from ..engines import make_engine
from ..layout import BLOCK_TOKENS, CacheLayout
from ..ops.engine import Engine

MAX_ENGINES = 16
WORKSPACE_BYTES = 1 << 27  # of prefill scores; one tile of the longest rows takes at most half
LEAST_REQUESTS, LEAST_BLOCKS, LEAST_TOKENS = 16, 2048, 4096


@dataclass(frozen=True)
class Demand:
    """What a call computes and how large its batch is. ``tokens``: queries of a prefill, 0 for decode."""

    layout: CacheLayout
    num_heads: int
    topk: int
    init_blocks: int
    local_blocks: int
    query_len: int
    requests: int
    blocks: int
    tokens: int = 0

    def config(self) -> IndexerConfig:
        """The configuration of an engine for batches up to this one."""
        return IndexerConfig(
            self.layout, self.num_heads, self.topk, self.init_blocks, self.local_blocks, self.requests, self.query_len,
            self.blocks * BLOCK_TOKENS, order="score", empty_row="minus_one", max_prefill_tokens=self.tokens,
            workspace_bytes=WORKSPACE_BYTES,
        )  # fmt: skip

    def covers(self, other: Demand) -> bool:
        """Whether an engine of this size serves a batch of the other's."""
        return self.requests >= other.requests and self.blocks >= other.blocks and self.tokens >= other.tokens

    def rounded(self, held: Demand | None) -> Demand:
        """Maxima to build for: powers of two, at least those of the engine that is replaced, so that growth ends."""
        tokens = 0
        if self.tokens:
            tokens = max(self.tokens, min(power_of_two(self.tokens, LEAST_TOKENS), MAX_PREFILL_TOKENS))
        blocks = max(self.blocks, min(power_of_two(self.blocks, LEAST_BLOCKS), MAX_BLOCKS))
        grown = replace(self, requests=power_of_two(self.requests, LEAST_REQUESTS), blocks=blocks, tokens=tokens)
        if held is None:
            return grown
        sizes = {name: max(getattr(grown, name), getattr(held, name)) for name in ("requests", "blocks", "tokens")}
        return replace(grown, **sizes)


def power_of_two(value: int, least: int) -> int:
    """The smallest power of two that is at least both."""
    return max(1 << (value - 1).bit_length(), least) if value > 0 else least


class SharedEngine:
    """One engine, what it is sized for, and the stream that used it last."""

    def __init__(self, demand: Demand, config: IndexerConfig, engine: Engine, device: torch.device) -> None:
        self.demand, self.config, self.engine, self.device = demand, config, engine, device
        self.captured = False  # a graph holds the addresses of its buffers
        self._stream: torch.cuda.Stream | None = None
        self._raw_stream = 0

    def enter(self) -> None:
        """Order this call behind the engine's last one. Inside a capture the graph's own order holds."""
        if self.device.type != "cuda":
            return
        if is_capturing(self.device):
            self.captured = True
            return
        raw = current_stream(self.device)
        if self._stream is None or raw != self._raw_stream:
            stream = torch.cuda.current_stream(self.device)
            if self._stream is not None:
                stream.wait_stream(self._stream)
            self._stream, self._raw_stream = stream, raw


class EngineCache:
    """The engines of a process. Those that a graph captured stay until :meth:`clear`; of the others the least recently
    used goes when there are more than ``capacity`` configurations.
    """

    def __init__(self, capacity: int = MAX_ENGINES) -> None:
        self.capacity = capacity
        self._lock = threading.RLock()  # held while a call launches: a launch packs its arguments in shared memory
        self._current: OrderedDict[tuple[object, ...], SharedEngine] = OrderedDict()
        self._captured: list[SharedEngine] = []  # replaced or evicted, but graphs still replay them
        self.built = 0

    def __len__(self) -> int:
        return len(self._current) + len(self._captured)

    def clear(self) -> None:
        """Drop every engine. Graphs that captured a call must not be replayed afterwards."""
        with self._lock:
            for shared in [*self._current.values(), *self._captured]:
                wait_for(shared.device)
            self._current.clear()
            self._captured.clear()

    @contextmanager
    def borrow(
        self, call: str, device: torch.device, backend: str, arch: str | None, demand: Demand
    ) -> Iterator[SharedEngine]:
        """The engine for a call, built if none is large enough.

        Raises
        ------
        RuntimeError
            When one has to be built inside a graph capture.
        UnsupportedConfigError, UnsupportedArchError, KernelNotInstalledError
            As from :class:`blockpick.Indexer`.
        """
        key = (
            device, backend, arch, demand.layout, demand.num_heads, demand.topk, demand.init_blocks,
            demand.local_blocks, demand.query_len, demand.tokens > 0,
        )  # fmt: skip
        with self._lock:
            shared = self._current.get(key)
            if shared is None or not shared.demand.covers(demand):
                shared = self._build(call, device, (backend, False, arch), demand, shared)
                self._replace(key, shared)
            self._current.move_to_end(key)
            shared.enter()
            yield shared

    def _build(
        self, call: str, device: torch.device, route: tuple[str, bool, str | None], demand: Demand,
        held: SharedEngine | None,
    ) -> SharedEngine:  # fmt: skip
        demand.config()  # refuse what was asked before what it is rounded to
        if is_capturing(device):
            had = "none was used before" if held is None else f"the largest batch before was {sizes(held.demand)}"
            raise RuntimeError(
                f"{call}: buffers can't be allocated inside a graph capture, and no earlier call made them large "
                f"enough: this batch has {sizes(demand)}, {had}. Warm up: call {call} once outside the capture on "
                f"{device} with a {demand.layout.dtype} cache, {demand.num_heads} heads, topk={demand.topk}, "
                f"init_blocks={demand.init_blocks}, local_blocks={demand.local_blocks}, the same largest query length "
                f"({demand.query_len}), and a batch at least as large."
            )
        grown = demand.rounded(held.demand if held is not None else None)
        config = grown.config()
        # buffers outlive this call: made under inference mode they could never be written outside of it
        with torch.inference_mode(False):
            engine: Engine = make_engine(config, device, *route)[0]
            engine.allocate()
        self.built += 1
        return SharedEngine(grown, config, engine, device)

    def _replace(self, key: tuple[object, ...], shared: SharedEngine) -> None:
        dropped: list[SharedEngine] = []
        if key in self._current:
            dropped.append(self._current.pop(key))
        while len(self._current) >= self.capacity:
            dropped.append(self._current.popitem(last=False)[1])
        self._captured += [old for old in dropped if old.captured]
        for old in dropped:
            if not old.captured:
                wait_for(old.device)  # its buffers may be in use on a stream that the allocator doesn't know of
        self._current[key] = shared


def sizes(demand: Demand) -> str:
    """A batch's sizes in words."""
    tokens = f", {demand.tokens} queries" if demand.tokens else ""
    return f"{demand.requests} requests, {demand.blocks} blocks{tokens}"


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has nothing to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

# SPDX-License-Identifier: Apache-2.0
"""Which engine runs a configuration on a device, by which route, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .backend_api import DeviceInfo
from .config import BACKENDS, IndexerConfig
from .device import binary_loader, describe, torch_vendor
from .dispatch import interpreted_arch, pick_route
from .errors import UnsupportedConfigError
from .manifest import installed_packages
from .ops.context_engine import ContextEngine
from .ops.engine import Engine, KernelEngine
from .parallel.heads import RANKS
from .policy import explain_shards, warn_once

if TYPE_CHECKING:
    from .parallel.group import Group

PARALLEL = (None, "context", "sharded")


@dataclass(frozen=True)
class Spread:
    """How decode is spread over ranks: asked for by ``parallel``, over ``group``; heads of all ranks together."""

    parallel: str | None = None
    group: Group | None = None
    total_heads: int | None = None
    shard_scorer: bool = False

    def check(self, config: IndexerConfig, device: torch.device) -> None:
        """Refuse what can't be spread.

        Raises
        ------
        UnsupportedConfigError
            Naming the argument; the same on all ranks.
        """
        if self.parallel not in PARALLEL:
            raise UnsupportedConfigError(
                f"Indexer: parallel={self.parallel!r} is not supported; supported: None, 'context', 'sharded'"
            )
        self._check_shards(config)
        if self.parallel is None:
            if self.group is not None or self.total_heads is not None:
                raise UnsupportedConfigError("Indexer: group and total_heads belong to parallel='context' or 'sharded'")
            return
        if self.group is None:
            raise UnsupportedConfigError(f"Indexer: parallel={self.parallel!r} needs a group, a blockpick.RankGroup")
        if config.slots != 1:
            raise UnsupportedConfigError(
                f"Indexer: slots={config.slots} with parallel={self.parallel!r}: exchanges of two batches in flight "
                "would wait for one another; supported: 1"
            )
        if self.group.size not in (1, *RANKS):
            raise UnsupportedConfigError(
                f"Indexer: {self.group.size} ranks can't share decode; supported: {', '.join(map(str, RANKS))}"
            )
        if self.group.device != device:
            raise UnsupportedConfigError(f"Indexer: device {device}, but the group was made for {self.group.device}")

    def _check_shards(self, config: IndexerConfig) -> None:
        """Refuse a cache that isn't stored as ``parallel`` reads it."""
        shards = config.layout.shards
        if self.parallel != "sharded":
            if shards != 1:
                raise UnsupportedConfigError(
                    f"Indexer: layout.shards={shards} with parallel={self.parallel!r}, which reads a replicated cache "
                    f"(shards=1); a sharded one needs parallel='sharded' and a group of {shards} ranks"
                )
            if self.shard_scorer:
                raise UnsupportedConfigError("Indexer: shard_scorer=True belongs to parallel='sharded'")
            return
        if self.group is not None and self.group.size != shards:
            raise UnsupportedConfigError(
                f"Indexer: layout.shards={shards} with a group of {self.group.size} rank(s); every rank stores one "
                "shard, so these must be equal"
            )
        if config.max_prefill_tokens:
            raise UnsupportedConfigError(
                f"Indexer: max_prefill_tokens={config.max_prefill_tokens} with parallel='sharded': prefill of a "
                "sharded cache is not supported; supported: 0"
            )

    @property
    def shard(self) -> int:
        """Of a sharded cache, the one that this rank stores; 0 of a replicated one."""
        return self.group.rank if self.parallel == "sharded" and self.group is not None else 0

    def obstacle(self) -> str | None:
        """Why decode stays on one rank although ``parallel`` asks for more; the same on all ranks."""
        if self.parallel and self.group is not None and self.group.size not in RANKS:
            return f"the group has {self.group.size} rank(s); decode is spread over {', '.join(map(str, RANKS))}"
        return None

    def explain(self, config: IndexerConfig) -> list[str]:
        """How decode is spread, and why not where it isn't though asked for."""
        if self.group is None:
            return []
        obstacle = self.obstacle()
        used = f"not used: {obstacle}; every rank decodes on its own" if obstacle else "asked for"
        shards = [explain_shards(config.layout, self.shard_scorer)] if config.layout.shards > 1 else []
        return [f"parallel {self.parallel}: {used}", *shards, *self.group.explain().splitlines()]


def make_engine(
    config: IndexerConfig, device: torch.device, backend: str, allow_jit: bool, arch: str | None,
    spread: Spread = Spread(),  # frozen
) -> tuple[Engine, str, str]:  # fmt: skip
    """The engine, not yet allocated, its route, and why."""
    spread.check(config, device)
    obstacle = spread.obstacle()
    if obstacle:
        warn_once(f"parallel={spread.parallel!r} is not used: {obstacle}; every rank decodes on its own")
    group = spread.group if spread.parallel and not obstacle else None
    if backend not in BACKENDS:
        raise UnsupportedConfigError(f"Indexer: backend={backend!r} is not supported; supported: {', '.join(BACKENDS)}")

    def kernels(info: DeviceInfo | None, arch: str, route: str) -> KernelEngine:
        if group is None:
            return KernelEngine(config, device, info, arch, route)
        return ContextEngine(config, device, info, arch, route, group, spread.total_heads, spread.shard_scorer)

    on_cpu = backend == "auto" and device.type == "cpu"
    if group is not None and backend == "reference":
        raise UnsupportedConfigError("Indexer: backend='reference' decodes on one rank; leave parallel away")
    if group is not None and on_cpu and config.layout.shards > 1:
        raise UnsupportedConfigError(
            "Indexer: backend='auto' on the CPU is the reference, which decodes on one rank and reads no shards; "
            "backend='interpreter' decodes over ranks there"
        )
    if backend == "reference" or on_cpu:
        from .testing.engine import ReferenceEngine

        reason = (
            "asked for"
            if backend == "reference"
            else "CPU tensors; generated kernels need a GPU or backend='interpreter'"
        )
        return ReferenceEngine(config, device, default_rounding(device, arch)), "reference", reason
    if backend == "interpreter":
        if device.type != "cpu":
            raise UnsupportedConfigError(f"Indexer: backend='interpreter' runs on CPU tensors, device is {device}")
        chosen = interpreted_arch(arch)
        return (
            kernels(None, chosen, "interpreter"),
            "interpreter",
            f"asked for, sources of {chosen}",
        )
    info = describe(device, f"Indexer: backend={backend!r}: ")
    route, reason = (backend, "asked for") if backend in ("aot", "jit") else pick_route(info, allow_jit)
    return kernels(info, info.arch, route), route, f"{info.name} is {info.arch}; {reason}"


def default_rounding(device: torch.device, arch: str | None) -> str:
    """The NVFP4 rounding that kernels for ``arch`` or the device have by default; exact where neither is known."""
    packages = installed_packages()
    if arch is None and device.type == "cuda" and binary_loader(torch_vendor()) is not None:
        arch = describe(device).arch
    return packages[arch].nvfp4_rounding if arch in packages else "exact"

# SPDX-License-Identifier: Apache-2.0
"""What every rank tells the others about itself, and the one answer that all of them draw from it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import PeerError, UnsupportedConfigError

TRANSPORTS = ("peer", "collective")


@dataclass(frozen=True)
class RankFacts:
    """One rank as it describes itself.

    Attributes
    ----------
    version : str
        Of blockpick.
    asked : tuple
        ``transport``, ``handle_kind`` and the limits of the constructor.
    node, user, process : str, int, int
        Boot of the kernel, user and process number.
    namespaces : tuple of str
        IPC and PID namespaces, and the file system of /dev/shm.
    vendor, device, driver : str
        Whose device, which, and its driver.
    compute_units : int
        Of the device; grids of kernels that wait for each other follow from it.
    kinds : tuple of str
        Kinds of handles that it can share.
    proven : bool
        Whether sharing was run on such hardware.
    """

    version: str
    asked: tuple[str | None, str | None, float, float]
    node: str
    user: int
    process: int
    namespaces: tuple[str, str, str]
    vendor: str
    device: str
    driver: str
    compute_units: int
    kinds: tuple[str, ...]
    proven: bool


@dataclass(frozen=True)
class Agreement:
    """The answer: by which transport, through which kind of handles, and why."""

    transport: str
    kind: str | None
    reason: str


def node_facts() -> tuple[str, tuple[str, str, str]]:
    """This boot, and the namespaces that decide what processes can share."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    shm = os.stat("/dev/shm")
    return boot, (os.readlink("/proc/self/ns/ipc"), os.readlink("/proc/self/ns/pid"), f"{shm.st_dev}:{shm.st_ino}")


def agree(facts: Sequence[RankFacts]) -> Agreement:
    """Draw the one answer from the facts of all ranks, in rank order; every rank gets the same.

    Raises
    ------
    PeerError
        When ranks run different releases, drivers or devices, or ask for different things.
    UnsupportedConfigError
        When ``transport="peer"`` is asked for and can't be.
    """
    for name in ("version", "asked", "vendor", "driver", "compute_units"):
        values = [getattr(fact, name) for fact in facts]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            told = f"{values[0]!r} on rank 0, {values[other]!r} on rank {other}"
            raise PeerError(f"ranks differ in {name}: {told}", other)
    transport, kind, *_ = facts[0].asked
    if transport == "collective":
        return Agreement("collective", None, "asked for")
    obstacle = common_node_obstacle(facts)
    kinds = [k for k in facts[0].kinds if all(k in fact.kinds for fact in facts) and k in _reachable_kinds(facts)]
    if kind is not None and kind not in kinds:
        obstacle = obstacle or f"handle_kind={kind!r} can't be shared; possible here: {', '.join(kinds) or 'none'}"
    if not obstacle and not kinds:
        obstacle = "no kind of handle can be shared by all ranks: " + "; ".join(
            f"rank {rank} {', '.join(fact.kinds) or 'none'}" for rank, fact in enumerate(facts)
        )
    if obstacle:
        if transport == "peer":
            raise UnsupportedConfigError(f"RankGroup: transport='peer': {obstacle}")
        return Agreement("collective", None, obstacle)
    if transport is None and not all(fact.proven for fact in facts):
        return Agreement(
            "collective", None, f"peer memory was never run on {facts[0].vendor} hardware; ask for transport='peer'"
        )
    shared = len({fact.device for fact in facts}) < len(facts) and facts[0].vendor != "cpu"
    reason = "asked for" if transport == "peer" else "all ranks can map each other's memory"
    return Agreement("peer", kind or kinds[0], reason + ("; ranks share a device and take turns" if shared else ""))


def common_node_obstacle(facts: Sequence[RankFacts]) -> str | None:
    """What keeps the ranks from sharing memory at all."""
    for what, values in (
        ("nodes", [fact.node for fact in facts]),
        ("users", [str(fact.user) for fact in facts]),
        ("/dev/shm", [fact.namespaces[2] for fact in facts]),
    ):
        if len(set(values)) > 1:
            return f"ranks have different {what}"
    return None


def _reachable_kinds(facts: Sequence[RankFacts]) -> set[str]:
    """Kinds whose handles reach every rank: legacy IPC and descriptors need common namespaces."""
    ipc, pid = (len({fact.namespaces[i] for fact in facts}) == 1 for i in (0, 1))
    return {"fabric"} | ({"posix_fd"} if pid else set()) | ({"ipc"} if ipc and pid else set())

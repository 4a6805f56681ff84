# SPDX-License-Identifier: Apache-2.0
"""A buffer that every rank of a group has, mapped by all the others."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..backend_api import MappedMemory, PeerMemory, SharedMemory
from ..errors import BlockpickError, PeerError, UnsupportedConfigError
from .descriptors import DescriptorServer, fetch_descriptor
from .wire import GRANULE, Handle

CONTROL_BYTES = 4096  # at the start of every buffer: 8-byte words FLAG and LIMIT_NS, as the kernels know them
FLAG_OFFSET, LIMIT_OFFSET = 0, 8
FETCH_LIMIT_S = 30.0

Gather = Callable[[Any], list[Any]]  # an object of every rank, in rank order


@dataclass(frozen=True)
class Membership:
    """What a buffer needs to know of its group."""

    rank: int
    token: bytes
    kind: str
    processes: Sequence[int]
    gather: Gather
    memory: PeerMemory


def together(gather: Gather, act: Callable[[], Any], what: str) -> list[Any]:
    """What ``act`` gives on every rank, in rank order.

    Raises
    ------
    PeerError
        On all ranks, if ``act`` raises on one: no rank goes on alone, and none waits for one that does not come.
    UnsupportedConfigError
        In its place on a rank where ``act`` raises that.
    """
    result, failure, cause = None, None, None
    try:
        result = act()
    except Exception as error:
        failure, cause = f"{type(error).__name__}: {error}", error
    answers = gather((failure, result))
    if isinstance(cause, UnsupportedConfigError):
        raise cause
    failed = [(rank, text) for rank, (text, _) in enumerate(answers) if text is not None]
    if failed:
        told = "; ".join(f"rank {rank}: {text}" for rank, text in failed)
        raise PeerError(f"{what}: {told}", failed[0][0]) from cause
    return [result for _, result in answers]


class PeerBuffer:
    """One buffer per rank; ``addresses[r]`` is rank r's as this process maps it. Opened and closed by all ranks.

    Raises
    ------
    PeerError
        On all ranks, when one of them can't allocate, export, check or map; nothing stays open.
    """

    def __init__(self, member: Membership, size: int) -> None:
        self.size = -(-size // GRANULE) * GRANULE
        self._member = member
        self._mapped: list[MappedMemory] = []
        self._own: SharedMemory | None = None
        self._own_address = 0
        self.addresses: list[int] = []
        server: DescriptorServer | None = None

        def export() -> tuple[bytes, str | None]:
            nonlocal server
            if member.kind == "posix_fd":
                server = DescriptorServer(member.token, member.rank, list(member.processes))
            return self._export(server)

        what = f"peer buffer of {self.size} bytes"
        try:
            offered = together(member.gather, export, f"{what}: can't allocate and export")
            together(member.gather, lambda: self._map(offered), f"{what}: can't map")
        except BaseException:
            self.unmap()
            with suppress(PeerError):  # all ranks are here: nobody frees what another still maps
                member.gather(None)
            self.free()
            raise
        finally:
            if server is not None:
                server.close()

    def _export(self, server: DescriptorServer | None) -> tuple[bytes, str | None]:
        member = self._member
        self._own = own = member.memory.allocate(self.size, member.kind)
        self._own_address = own.address
        if server is not None and own.descriptor is not None:
            server.serve(own.descriptor, FETCH_LIMIT_S)
        handle = Handle(member.kind, member.rank, self.size, member.token, own.payload)
        return handle.pack(), server.path if server is not None else None

    def _map(self, offered: list[tuple[bytes, str | None]]) -> None:
        member = self._member
        handles = [
            Handle.parse(data, rank, member.token, member.kind, self.size) for rank, (data, _) in enumerate(offered)
        ]
        for rank, handle in enumerate(handles):
            if rank == member.rank:
                self.addresses.append(self._own_address)
                continue
            descriptor = None
            if offered[rank][1] is not None:
                descriptor = fetch_descriptor(
                    str(offered[rank][1]), member.token, member.rank, rank, member.processes[rank], FETCH_LIMIT_S
                )
            try:
                mapped = member.memory.open(handle.kind, handle.payload, handle.size, descriptor)
            except (BlockpickError, OSError) as error:
                raise PeerError(f"buffer of rank {rank}: {error}", rank) from error
            finally:
                if descriptor is not None:
                    os.close(descriptor)
            self._mapped.append(mapped)
            self.addresses.append(mapped.address)

    def write(self, rank: int, offset: int, data: bytes) -> None:
        """Write into a rank's buffer beside running kernels."""
        self._member.memory.write(self.addresses[rank] + offset, data)

    def unmap(self) -> None:
        """Close the mappings of the peers' buffers, last first."""
        self.addresses = []
        while self._mapped:
            with suppress(BlockpickError):  # a device that failed unmaps with its process
                self._mapped.pop().close()

    def free(self) -> None:
        """Free the own buffer; every peer must have closed its mapping."""
        if self._own is not None:
            with suppress(BlockpickError):  # a device that failed frees with its process
                self._own.close()
            self._own = None

# SPDX-License-Identifier: Apache-2.0
"""A group of ranks that share index heads and blocks: how they reach each other, and what happens when one fails."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from typing import Any, Protocol

import torch

from ..backend_api import HostWord, PeerMemory, PeerMemoryProvider
from ..checks import check_not_capturing, resolve_device
from ..device import describe, installed_backends, torch_vendor
from ..errors import BlockpickError, PeerError, UnsupportedConfigError
from .board import Board
from .buffer import FLAG_OFFSET, LIMIT_OFFSET, Membership, PeerBuffer, together
from .facts import TRANSPORTS, Agreement, RankFacts, agree, common_node_obstacle, node_facts
from .host_memory import HostMemory
from .wire import GRANULE, KINDS, TOKEN_BYTES

STAGES = {1: "query exchange", 2: "candidate merge"}  # as the kernels number them
CLOSE_LIMIT_S = 10.0
_logger = logging.getLogger("blockpick")


class Group(Protocol):
    """What an indexer needs of a group; :class:`RankGroup` in engines, simulated ones in tests and benches."""

    rank: int
    size: int
    transport: str
    device: torch.device

    def explain(self) -> str:
        """How the ranks reach each other, and why."""

    def open_buffer(self, size: int) -> PeerBuffer:
        """Open a buffer on all ranks."""

    def close_buffer(self, buffer: PeerBuffer) -> None:
        """Close a buffer on all ranks."""

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """Concatenate a tensor of every rank, on the current stream."""

    @property
    def record(self) -> Any:
        """Kernel argument: the word in which a failed wait is told."""

    def together(self, act: Callable[[], Any], what: str) -> list[Any]:
        """What ``act`` gives on every rank; raises on all of them if it raises on one."""

    def check(self) -> None:
        """Raise :class:`PeerError` if a rank has failed."""

    def abort(self, reason: str) -> None:
        """Tell the peers that this rank has failed."""


class RankGroup:
    """Ranks of a ``torch.distributed`` process group, each with one device.

    Constructed by all ranks together; collective, like all its methods except ``check``, ``abort`` and ``explain``.

    Parameters
    ----------
    process_group : torch.distributed.ProcessGroup, optional
        NCCL, RCCL, or gloo; the default group if None. It carries the handles, and the data where peers can't be
        mapped.
    device : torch.device or str
        This rank's device.
    transport : {"peer", "collective"}, optional
        ``peer``: kernels store into the other ranks' memory. ``collective``: all-gathers of the process group. If
        None, what the facts of all ranks allow; ``explain()`` has the reason.
    handle_kind : {"ipc", "posix_fd", "fabric"}, optional
        How memory is shared; the best that works on all ranks if None.
    timeout_s : float
        How long a kernel waits for a peer once serving (see :meth:`started`).
    startup_timeout_s : float
        The same until then: ranks compile, capture and warm up at different speeds.

    Raises
    ------
    PeerError
        On all ranks, when they differ in release or arguments, or memory can't be shared as asked.
    UnsupportedConfigError
        On all ranks, when what is asked can't be.
    RuntimeError
        Inside a graph capture.

    Notes
    -----
    Handles travel only between the processes of the group. Who holds one can read and write the exported buffers, which
    hold index queries and block candidates only.
    """

    def __init__(
        self, process_group: Any = None, *, device: torch.device | str, transport: str | None = None,
        handle_kind: str | None = None, timeout_s: float = 5.0, startup_timeout_s: float = 120.0,
    ) -> None:  # fmt: skip
        self.device = resolve_device(device)
        check_not_capturing(self.device, "RankGroup")
        import torch.distributed as distributed

        self._group = process_group if process_group is not None else distributed.group.WORLD
        self.rank, self.size = distributed.get_rank(self._group), distributed.get_world_size(self._group)
        self._limits_s = startup_timeout_s, timeout_s
        self._serving = self._closed = False
        self._failure: PeerError | None = None
        self._buffers: list[PeerBuffer] = []
        self._closings = 0
        self._board: Board | None = None
        self._word: HostWord | None = None
        self._memory: PeerMemory | None = None
        asked = transport, handle_kind, timeout_s, startup_timeout_s
        self._facts: list[RankFacts] = self.together(lambda: self._own_facts(asked), "RankGroup")
        self._agreement = agree(self._facts)
        obstacle = common_node_obstacle(self._facts)
        token = self._gather(secrets.token_bytes(TOKEN_BYTES) if self.rank == 0 else None)[0]
        try:
            if obstacle is None:
                self._open_board(f"blockpick-{hashlib.sha256(token).hexdigest()[:24]}")
            if self._agreement.transport == "peer":
                self._connect(transport, token)
            if self._agreement.transport == "collective":
                self._try_collective()
        except BaseException:
            self._release()
            raise

    # ---- facts

    def _own_facts(self, asked: tuple[str | None, str | None, float, float]) -> RankFacts:
        transport, kind, *limits = asked
        for name, value, allowed in (("transport", transport, TRANSPORTS), ("handle_kind", kind, KINDS)):
            if value is not None and value not in allowed:
                raise UnsupportedConfigError(f"{name}={value!r} is not supported; {', '.join(allowed)}")
        for name, limit in zip(("timeout_s", "startup_timeout_s"), limits, strict=True):
            if not 0 < limit <= 86400:
                raise UnsupportedConfigError(f"{name}={limit!r} is not supported; over 0, up to 86400")
        self._memory = memory = _peer_memory(self.device)
        node, namespaces = node_facts()
        vendor, driver, units = "cpu", "none", 1
        if self.device.type == "cuda":
            info = describe(self.device, "RankGroup: ")
            vendor, driver, units = info.vendor, info.driver, info.compute_units
        return RankFacts(
            version("blockpick"), asked, node, os.getuid(), os.getpid(), namespaces, vendor,
            memory.identity if memory is not None else "", driver, units, memory.kinds() if memory is not None else (),
            memory is not None and memory.proven,
        )  # fmt: skip

    def _gather(self, value: Any) -> list[Any]:
        """An object of every rank."""
        import torch.distributed as distributed

        found: list[Any] = [None] * self.size
        try:
            distributed.all_gather_object(found, value, group=self._group)
        except RuntimeError as error:
            dead = self._dead()
            named = f"rank {dead[0]} is gone" if dead else "a rank does not answer"
            raise PeerError(f"{named}: {error}", dead[0] if dead else None) from error
        return found

    def together(self, act: Callable[[], Any], what: str) -> list[Any]:
        """What ``act`` gives on every rank, in rank order.

        Raises
        ------
        PeerError
            On all ranks, if ``act`` raises on one.
        """
        return together(self._gather, act, what)

    def _connect(self, asked: str | None, token: bytes) -> None:
        """Try the peers' memory; fall back together where ``peer`` was not asked for."""
        memory, kind = self._memory, self._agreement.kind
        if memory is None or kind is None:
            raise PeerError(f"rank {self.rank}: agreed on peer memory that it does not have")
        processes = [fact.process for fact in self._facts]
        self._member = Membership(self.rank, token, kind, processes, self._gather, memory)
        try:
            self.together(self._make_word, "RankGroup: no word of host memory")
            self._probe(memory)
        except PeerError as error:  # raised on all ranks, so all of them get here
            if asked == "peer":
                raise
            self._agreement = Agreement("collective", None, f"peer memory was tried and failed: {error}")

    def _make_word(self) -> None:
        if self._memory is not None:
            self._word = self._memory.host_word()

    def _try_collective(self) -> None:
        """One all-gather of what lies on the device: a process group may have no backend for it."""

        def act() -> None:
            own = torch.zeros(1, dtype=torch.int32, device=self.device)
            self.all_gather(torch.zeros(self.size, dtype=torch.int32, device=self.device), own)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        self.together(act, f"transport collective ({self._agreement.reason}): the process group can't gather")

    def _open_board(self, name: str) -> None:
        """Rank 0 makes the board, then the others open it; then its name goes."""
        common_pids = len({fact.namespaces[1] for fact in self._facts}) == 1

        def act(makes: bool) -> None:
            if (self.rank == 0) == makes:
                self._board = Board(name, self.size, self.rank, makes, common_pids)

        try:
            self.together(lambda: act(True), "RankGroup: can't make the group's board")
            self.together(lambda: act(False), "RankGroup: can't open the group's board")
        finally:
            if self.rank == 0 and self._board is not None:
                self._board.unlink()

    def _probe(self, memory: PeerMemory) -> None:
        """Every rank writes its number into every buffer; every rank finds all numbers in its own."""
        with self.buffer(GRANULE) as buffer:

            def write() -> None:
                for rank in range(self.size):
                    buffer.write(rank, 64 + 8 * self.rank, struct.pack("<q", self.rank + 1))

            def read() -> None:
                data = memory.read(buffer.addresses[self.rank] + 64, 8 * self.size)
                for rank, (number,) in enumerate(struct.iter_unpack("<q", data)):
                    if number != rank + 1:
                        raise PeerError(f"what rank {rank} wrote did not arrive", rank)

            self.together(write, "RankGroup: peer memory can't be written")
            self.together(read, "RankGroup: peer memory")

    # ---- what was decided

    @property
    def transport(self) -> str:
        """``peer`` or ``collective``, the same on all ranks."""
        return self._agreement.transport

    @property
    def handle_kind(self) -> str | None:
        """How memory is shared; None without ``peer``."""
        return self._agreement.kind

    @property
    def record(self) -> Any:
        """Kernel argument: the word in which a failed wait is told."""
        if self._word is None:
            raise PeerError(f"rank {self.rank}: the group has no peer memory (transport {self.transport})")
        return self._word.argument

    def explain(self) -> str:
        """How the ranks reach each other, and why."""
        kind = f" through {self.handle_kind} handles" if self.handle_kind else ""
        limit = self._limits_s[self._serving]
        lines = [f"rank {self.rank} of {self.size}: transport {self.transport}{kind}: {self._agreement.reason}"]
        if self.transport == "peer":
            lines.append(f"a wait ends after {limit:g} s ({'serving' if self._serving else 'start-up'})")
        lines += [
            f"  rank {rank}: {fact.vendor} {fact.device} ({fact.driver}), shares {', '.join(fact.kinds) or 'nothing'}"
            for rank, fact in enumerate(self._facts)
        ]
        return "\n".join(lines)

    # ---- buffers

    def open_buffer(self, size: int) -> PeerBuffer:
        """Open a zeroed buffer of at least ``size`` bytes on every rank, mapped by all of them.

        Raises
        ------
        PeerError
            On all ranks, when it fails on one, or the group has no peer memory.
        """
        check_not_capturing(self.device, "open_buffer")
        if self.transport != "peer":
            raise PeerError(f"rank {self.rank}: the group has no peer memory (transport {self.transport})")
        buffer = PeerBuffer(self._member, size)
        self._buffers.append(buffer)
        self._serving = False  # ranks warm up and capture again
        # nobody may store before every buffer is zeroed and has its limit
        self.together(lambda: self._write_limit(buffer), "open_buffer: can't write the limit of waits")
        return buffer

    @contextmanager
    def buffer(self, size: int) -> Iterator[PeerBuffer]:
        """A buffer of :meth:`open_buffer` for a while, closed on all ranks at the end."""
        opened = self.open_buffer(size)
        try:
            yield opened
        finally:
            self.close_buffer(opened)

    def _write_limit(self, buffer: PeerBuffer) -> None:
        limit_ns = int(self._limits_s[self._serving] * 1e9)
        buffer.write(self.rank, LIMIT_OFFSET, struct.pack("<q", limit_ns))

    def close_buffer(self, buffer: PeerBuffer) -> None:
        """Close a buffer on every rank: first all mappings, then what was exported. Dead ranks are not waited for.

        A rank that keeps its mapping for longer than 10 s keeps the others from freeing their buffers until they exit.
        """
        if buffer not in self._buffers:  # the group was closed before
            return
        if self.device.type == "cuda":
            with suppress(RuntimeError):  # a device error was reported where it happened
                torch.cuda.synchronize(self.device)
        self._buffers.remove(buffer)
        self._closings += 1
        buffer.unmap()
        if self._board is not None:
            self._board.let_go()
            late = self._board.wait_until_let_go(self._closings, CLOSE_LIMIT_S)
            if late:
                _logger.warning("rank %d: rank %d still maps a closed buffer; it is kept", self.rank, late[0])
                return
        buffer.free()

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """Concatenate a tensor of every rank over the process group, on the current stream."""
        import torch.distributed as distributed

        distributed.all_gather_into_tensor(out, tensor, group=self._group)

    # ---- failure

    def started(self) -> None:
        """End start-up: from now on waits end after ``timeout_s``. All ranks call it, after warm-up and captures.

        Opening a buffer (another indexer, waking one) begins start-up again.
        """
        self._serving = True

        def act() -> None:
            for buffer in self._buffers:
                self._write_limit(buffer)

        self.together(act, "started: can't write the limit of waits")

    def check(self) -> None:
        """Raise if a wait of this rank ended without its peer, or any rank has aborted. No synchronisation.

        Raises
        ------
        PeerError
            Naming the peer, the exchange and its epoch; the group can't be used any more.
        """
        if self._closed:
            raise PeerError(f"rank {self.rank}: the group is closed")
        if self._failure is None:
            aborted = self._board.aborted() if self._board is not None else None
            record = self._word.read() if self._word is not None else 0
            if record:
                self._failure = self._describe_record(record)
                self.abort(str(self._failure))  # the others need not wait for their own limits
            elif aborted is not None:
                self._failure = self._describe_abort(*aborted)
        if self._failure is not None:
            raise self._failure

    def _describe_abort(self, rank: int, reason: str) -> PeerError:
        dead = self._dead()
        gone = f"; rank {dead[0]}, whose process is gone, may be why" if dead else ""
        return PeerError(f"rank {rank} aborted: {reason}{gone}", dead[0] if dead else rank)

    def _dead(self) -> list[int]:
        return self._board.dead() if self._board is not None else []

    def _describe_record(self, record: int) -> PeerError:
        epoch, stage, peer = record >> 32 & 0xFFFFFFFF, STAGES[record >> 16 & 0xFF], (record >> 8 & 0xFF) - 1
        dead = self._dead()
        missed = f"the {stage} of epoch {epoch} waited in vain for rank {peer}"
        if dead and peer not in dead:  # who is waited for may itself wait for a dead one
            return PeerError(f"rank {self.rank}: {missed}; or for rank {dead[0]}, whose process is gone", dead[0])
        gone = ", whose process is gone" if peer in dead else ""
        return PeerError(f"rank {self.rank}: {missed}{gone}", peer)

    def abort(self, reason: str) -> None:
        """Tell all ranks that this one has failed: they raise at their next call, and waits in peer memory end.

        A collective of the process group that is under way ends by that group's own limits.
        """
        if self._board is None:
            return
        self._board.abort(reason)
        for buffer in self._buffers:
            for rank in range(self.size):
                with suppress(BlockpickError):  # our own device may be what failed; the board has it all the same
                    buffer.write(rank, FLAG_OFFSET, struct.pack("<q", 1))

    # ---- end

    def close(self) -> None:
        """Close all buffers, last first, on all ranks; dead ranks are not waited for. May be called twice."""
        if not self._closed:
            self._closed = True
            try:
                for buffer in reversed(self._buffers.copy()):
                    self.close_buffer(buffer)
            finally:
                self._release()

    def _release(self) -> None:
        for part in (self._word, self._board, self._memory):
            if part is not None:
                with suppress(BlockpickError):  # of a device that failed
                    part.close()
        self._word = self._board = self._memory = None

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and self._failure is None:
            self.abort(f"{type(error).__name__}: {error}")
        self.close()


def _peer_memory(device: torch.device) -> PeerMemory | None:
    """How the device shares memory; None where no backend knows."""
    if device.type == "cpu":
        return HostMemory()
    for backend in installed_backends().values():
        if isinstance(backend, PeerMemoryProvider) and backend.vendor == torch_vendor():
            return backend.peer_memory(device.index)
    return None

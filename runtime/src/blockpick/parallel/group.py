# SPDX-License-Identifier: Apache-2.0
"""A group of ranks that share index heads and blocks: how they reach each other, and what happens when one fails."""

from __future__ import annotations

import os
import secrets
import struct
from contextlib import suppress
from importlib.metadata import version
from typing import Any, Protocol

import torch

from ..backend_api import HostWord, PeerMemory, PeerMemoryProvider
from ..checks import check_not_capturing, resolve_device
from ..device import describe, installed_backends, torch_vendor
from ..errors import BlockpickError, PeerError, UnsupportedConfigError
from .board import Board
from .buffer import FLAG_OFFSET, LIMIT_OFFSET, Membership, PeerBuffer
from .facts import TRANSPORTS, Agreement, RankFacts, agree, node_facts
from .host_memory import HostMemory
from .wire import GRANULE, KINDS, TOKEN_BYTES

STAGES = {1: "query exchange", 2: "candidate merge"}  # as the kernels number them
CLOSE_LIMIT_S = 10.0


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
        for name, value, allowed in (
            ("transport", transport, TRANSPORTS), ("handle_kind", handle_kind, KINDS),
        ):  # fmt: skip
            if value is not None and value not in allowed:
                raise UnsupportedConfigError(f"RankGroup: {name}={value!r} is not supported; {', '.join(allowed)}")
        for name, limit in (("timeout_s", timeout_s), ("startup_timeout_s", startup_timeout_s)):
            if not 0 < limit <= 86400:
                raise UnsupportedConfigError(f"RankGroup: {name}={limit!r} is not supported; over 0, up to 86400")
        import torch.distributed as distributed

        self._group = process_group if process_group is not None else distributed.group.WORLD
        self.rank, self.size = distributed.get_rank(self._group), distributed.get_world_size(self._group)
        self._limits_s = startup_timeout_s, timeout_s
        self._serving = self._closed = False
        self._failure: PeerError | None = None
        self._buffers: list[PeerBuffer] = []
        self._opened = 0
        self._board: Board | None = None
        self._word: HostWord | None = None
        self._memory = _peer_memory(self.device)
        self._facts = self._gather(self._own_facts((transport, handle_kind, timeout_s, startup_timeout_s)))
        self._agreement = agree(self._facts)
        if self._agreement.transport == "peer":
            self._connect(transport)

    # ---- facts

    def _own_facts(self, asked: tuple[str | None, str | None, float, float]) -> RankFacts:
        node, namespaces = node_facts()
        vendor, driver, units = "cpu", "none", 1
        if self.device.type == "cuda":
            info = describe(self.device, "RankGroup: ")
            vendor, driver, units = info.vendor, info.driver, info.compute_units
        memory = self._memory
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
            dead = self._board.dead() if self._board is not None else []
            named = f"rank {dead[0]} is gone" if dead else "a rank does not answer"
            raise PeerError(f"{named}: {error}", dead[0] if dead else None) from error
        return found

    def _connect(self, asked: str | None) -> None:
        """Set up the board and try the peers' memory; fall back together where ``peer`` was not asked for."""
        token = self._gather(secrets.token_bytes(TOKEN_BYTES) if self.rank == 0 else None)[0]
        assert self._agreement.kind is not None and self._memory is not None  # agreed on ``peer``
        self._member = Membership(
            self.rank, token, self._agreement.kind, [fact.process for fact in self._facts], self._gather, self._memory
        )
        try:
            self._open_board(f"blockpick-{token.hex()}")
            self._word = self._memory.host_word()
            self._probe()
        except PeerError as error:  # raised on all ranks, so all of them get here
            self._release()
            if asked == "peer":
                raise
            self._agreement = Agreement("collective", None, f"peer memory was tried and failed: {error}")

    def _open_board(self, name: str) -> None:
        failures = []
        for turn in (True, False):  # rank 0 makes it, then the others open it
            failure = None
            try:
                if (self.rank == 0) == turn:
                    self._board = Board(name, self.size, self.rank, turn)
            except (OSError, BlockpickError) as error:
                failure = str(error)
            failures = [(rank, text) for rank, text in enumerate(self._gather(failure)) if text is not None]
            if failures:
                break
        if self.rank == 0 and self._board is not None:
            self._board.unlink()
        if failures:
            raise PeerError(f"rank {failures[0][0]} can't open the group's board: {failures[0][1]}", failures[0][0])

    def _probe(self) -> None:
        """Every rank writes its number into every buffer; every rank finds all numbers in its own."""
        buffer = self.open_buffer(GRANULE)
        try:
            for rank in range(self.size):
                buffer.write(rank, 64 + 8 * self.rank, struct.pack("<q", self.rank + 1))
            self._gather(None)
            assert self._memory is not None
            data = self._memory.read(buffer.addresses[self.rank] + 64, 8 * self.size)
            wrong = [rank for rank, (number,) in enumerate(struct.iter_unpack("<q", data)) if number != rank + 1]
            answers = self._gather(wrong)
        finally:
            self.close_buffer(buffer)
        for reader, ranks in enumerate(answers):
            if ranks:
                raise PeerError(f"what rank {ranks[0]} wrote into rank {reader}'s memory did not arrive", ranks[0])

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
        self._write_limit(buffer)
        self._buffers.append(buffer)
        self._gather(None)  # nobody may store before every buffer is zeroed and has its limit
        return buffer

    def _write_limit(self, buffer: PeerBuffer) -> None:
        limit_ns = int(self._limits_s[self._serving] * 1e9)
        buffer.write(self.rank, LIMIT_OFFSET, struct.pack("<q", limit_ns))

    def close_buffer(self, buffer: PeerBuffer) -> None:
        """Close a buffer on every rank: first all mappings, then what was exported. Dead ranks are not waited for.

        A rank that keeps its mapping for longer than 10 s keeps the others from freeing their buffers until they exit.
        """
        if self.device.type == "cuda":
            with suppress(RuntimeError):  # a device error was reported where it happened
                torch.cuda.synchronize(self.device)
        self._buffers.remove(buffer)
        self._opened += 1
        buffer.unmap()
        assert self._board is not None  # there are buffers
        self._board.let_go()
        if not self._board.wait_until_let_go(self._opened, CLOSE_LIMIT_S):
            buffer.free()

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        """Concatenate a tensor of every rank over the process group, on the current stream."""
        import torch.distributed as distributed

        distributed.all_gather_into_tensor(out, tensor, group=self._group)

    # ---- failure

    def started(self) -> None:
        """End start-up: from now on waits end after ``timeout_s``. All ranks call it, after warm-up and captures."""
        self._gather(None)
        self._serving = True
        for buffer in self._buffers:
            self._write_limit(buffer)

    def check(self) -> None:
        """Raise if a wait of this rank ended without its peer, or any rank has aborted. No synchronisation.

        Raises
        ------
        PeerError
            Naming the peer, the exchange and its epoch; the group can't be used any more.
        """
        if self._failure is None and self._board is not None and self._word is not None:
            aborted, record = self._board.aborted(), self._word.read()
            if aborted is not None:
                self._failure = PeerError(f"rank {aborted[0]} aborted: {aborted[1]}", aborted[0])
            elif record:
                self._failure = self._describe_record(record)
        if self._failure is not None:
            raise self._failure

    def _describe_record(self, record: int) -> PeerError:
        epoch, stage, peer = record >> 32 & 0xFFFFFFFF, STAGES[record >> 16 & 0xFF], (record >> 8 & 0xFF) - 1
        if peer < 0:
            return PeerError(f"rank {self.rank}: the {stage} of epoch {epoch} was ended by a peer's abort")
        gone = "" if self._board is None or self._board.alive(peer) else ", whose process is gone"
        return PeerError(
            f"rank {self.rank}: the {stage} of epoch {epoch} waited in vain for rank {peer}{gone} "
            f"({self._limits_s[self._serving]:g} s)", peer,
        )  # fmt: skip

    def abort(self, reason: str) -> None:
        """Tell all ranks that this one has failed: their waits end, and they raise at their next call."""
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
            for buffer in reversed(self._buffers.copy()):
                self.close_buffer(buffer)
            self._release()

    def _release(self) -> None:
        if self._word is not None:
            self._word.close()
        if self._board is not None:
            self._board.close()
        self._word = self._board = None

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, PeerError):
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

# SPDX-License-Identifier: Apache-2.0
"""The notice board of a group on one node: host memory in which every rank says that it aborts or has let go.

It needs no driver and no collective, so it also works when a peer is dead or its device is stuck.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from contextlib import suppress
from pathlib import Path

from ..errors import PeerError

FOLDER = Path("/dev/shm")
ROW_BYTES = 512
_ROW = struct.Struct("<qqqqH")  # process, its start time, lets go of how many buffers, aborted, bytes of the reason
_ABORTED = struct.calcsize("<qqq")  # where the flag lies in a row
_MAX_REASON = ROW_BYTES - _ROW.size
POLL_S = 0.002


def start_time(pid: int) -> int:
    """Clock ticks from boot to the start of a process; 0 if it is gone or a zombie. Tells a reused number apart."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


class Board:
    """One row per rank, written by that rank only.

    Parameters
    ----------
    name : str
        File below ``/dev/shm``; ``create`` makes it, the others open it, and :meth:`unlink` takes the name away once
        all have, so that nothing is left behind whatever happens later.
    size, rank : int
        Of the group.
    create : bool
        Whether this rank makes the file.
    common_pids : bool
        Whether process numbers mean the same on all ranks; if not, every rank counts as alive.
    """

    def __init__(self, name: str, size: int, rank: int, create: bool, common_pids: bool = True) -> None:
        self._path, self._size, self._rank, self._common_pids = FOLDER / name, size, rank, common_pids
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        descriptor = os.open(self._path, flags, 0o600)
        try:
            if os.fstat(descriptor).st_uid != os.getuid():
                raise PeerError(f"{name}: the group's board belongs to another user")
            if create:
                os.ftruncate(descriptor, size * ROW_BYTES)
            if os.fstat(descriptor).st_size != size * ROW_BYTES:
                raise PeerError(f"{name}: the group's board has another size than {size} ranks need")
            self._memory = mmap.mmap(descriptor, size * ROW_BYTES)
        finally:
            os.close(descriptor)
        self._write(os.getpid(), start_time(os.getpid()), 0, 0, b"")

    def _write(self, pid: int, started: int, released: int, aborted: int, reason: bytes) -> None:
        begin = self._rank * ROW_BYTES
        text = reason[:_MAX_REASON]
        self._memory[begin + _ROW.size : begin + _ROW.size + len(text)] = text
        _ROW.pack_into(self._memory, begin, pid, started, released, aborted, len(text))

    def _row(self, rank: int) -> tuple[int, int, int, int, str]:
        begin = rank * ROW_BYTES
        pid, started, released, aborted, length = _ROW.unpack_from(self._memory, begin)
        text = self._memory[begin + _ROW.size : begin + _ROW.size + length]
        return pid, started, released, aborted, text.decode(errors="replace")

    def unlink(self) -> None:
        """Take the name away."""
        with suppress(FileNotFoundError):
            self._path.unlink()

    def abort(self, reason: str) -> None:
        """Say that this rank has failed."""
        pid, started, released, *_ = self._row(self._rank)
        self._write(pid, started, released, 1, reason.encode())

    def aborted(self) -> tuple[int, str] | None:
        """The first rank that said it failed, and why."""
        for rank in range(self._size):  # asked at every call: one byte a rank
            if self._memory[rank * ROW_BYTES + _ABORTED]:
                return rank, self._row(rank)[4]
        return None

    def alive(self, rank: int) -> bool:
        """Whether a rank's process still runs."""
        pid, started, *_ = self._row(rank)
        return not self._common_pids or (pid != 0 and start_time(pid) == started)

    def dead(self) -> list[int]:
        """Ranks whose process is gone."""
        return [rank for rank in range(self._size) if not self.alive(rank)]

    def let_go(self) -> None:
        """Say that this rank has closed one more set of mappings of its peers."""
        pid, started, released, aborted, reason = self._row(self._rank)
        self._write(pid, started, released + 1, aborted, reason.encode())

    def wait_until_let_go(self, count: int, limit_s: float) -> list[int]:
        """Wait until every living rank has let go ``count`` times; the ranks that did not within ``limit_s``."""
        end = time.monotonic() + limit_s
        while True:
            late = [r for r in range(self._size) if self._row(r)[2] < count and self.alive(r)]
            if not late or time.monotonic() > end:
                return late
            time.sleep(POLL_S)

    def close(self) -> None:
        """Unmap it."""
        self._memory.close()

# SPDX-License-Identifier: Apache-2.0
"""File descriptors between the ranks of a group, over unix sockets whose peers are checked by their credentials."""

from __future__ import annotations

import os
import socket
import struct
import tempfile
import threading
from contextlib import suppress

from ..errors import PeerError

_HELLO = struct.Struct("<16sI")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class DescriptorServer:
    """Hands one descriptor to every other rank of the group that asks with the group's token.

    Parameters
    ----------
    token : bytes
        The group's 16 random bytes.
    rank : int
        This rank.
    processes : sequence of int
        Process of every rank, as the kernel must name the one that connects.
    """

    def __init__(self, token: bytes, rank: int, processes: list[int]) -> None:
        self._token, self._rank, self._processes = token, rank, processes
        self._folder = tempfile.mkdtemp(prefix="blockpick-")  # 0700
        self.path = os.path.join(self._folder, "fd")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._thread: threading.Thread | None = None
        try:
            self._socket.bind(self.path)
            self._socket.listen(len(processes))
        except OSError:
            self.close()
            raise
        self.refused: list[str] = []

    def serve(self, descriptor: int, limit_s: float) -> None:
        """Serve every other rank once, in the background; whoever is not of the group gets nothing."""
        self._socket.settimeout(limit_s)
        self._thread = threading.Thread(target=self._serve, args=(descriptor,), daemon=True)
        self._thread.start()

    def _serve(self, descriptor: int) -> None:
        served: set[int] = set()
        while len(served) < len(self._processes) - 1:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # timed out or closed: the rank that did not get it raises
                return
            with connection:
                connection.settimeout(self._socket.gettimeout())
                with suppress(OSError):
                    served |= self._answer(connection, descriptor)

    def _answer(self, connection: socket.socket, descriptor: int) -> set[int]:
        pid, uid, _ = credentials(connection)
        data = connection.recv(_HELLO.size + 1)
        if len(data) != _HELLO.size:
            self.refused.append(f"process {pid}: {len(data)} bytes instead of a greeting")
            return set()
        token, rank = _HELLO.unpack(data)
        member = token == self._token and rank < len(self._processes) and self._processes[rank] == pid
        if uid != os.getuid() or not member:
            self.refused.append(f"process {pid} of user {uid} is not rank {rank} of this group")
            return set()
        socket.send_fds(connection, [self._token], [descriptor])
        return {rank}

    def close(self) -> None:
        """Stop serving and remove the socket."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._thread is not None:
            self._thread.join()
        with suppress(OSError):
            os.unlink(self.path)
        with suppress(OSError):
            os.rmdir(self._folder)


def fetch_descriptor(path: str, token: bytes, rank: int, owner: int, process: int, limit_s: float) -> int:
    """The descriptor that rank ``owner`` serves at ``path``; the caller closes it.

    Raises
    ------
    PeerError
        When nothing answers, another process than ``process`` does, or it refuses.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(limit_s)
        try:
            connection.connect(path)
            pid, uid, _ = credentials(connection)
            if uid != os.getuid() or pid != process:
                raise PeerError(f"rank {owner}: process {pid} of user {uid} answers in its place", owner)
            connection.send(_HELLO.pack(token, rank))
            data, received, _, _ = socket.recv_fds(connection, len(token), 1)
        except OSError as error:
            raise PeerError(f"rank {owner}: its descriptor can't be fetched: {error}", owner) from error
    if data != token or len(received) != 1:
        for descriptor in received:
            os.close(descriptor)
        raise PeerError(f"rank {owner}: sent no descriptor", owner)
    return received[0]


def credentials(connection: socket.socket) -> tuple[int, int, int]:
    """Process, user and group of a socket's peer, as the kernel says."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(data)
    return pid, uid, gid

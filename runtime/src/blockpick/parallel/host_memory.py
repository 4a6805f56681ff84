# SPDX-License-Identifier: Apache-2.0
"""Shared memory of processes on the CPU: what the interpreter's ranks exchange through."""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

from ..errors import PeerError


class HostMapping:
    """A mapped memory file."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._map = mmap.mmap(descriptor, size)
        self.size = size
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def close(self) -> None:
        """Unmap it."""
        self._map.close()


class HostAllocation(HostMapping):
    """Memory of this process that others can map through its file descriptor."""

    payload = b""

    def __init__(self, size: int) -> None:
        self.descriptor: int | None = os.memfd_create("blockpick", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, size)
        super().__init__(self.descriptor, size)

    def close(self) -> None:
        """Unmap it and close its file."""
        super().close()
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class TensorWord:
    """A word that an interpreted kernel stores to."""

    def __init__(self) -> None:
        self.argument = torch.zeros(1, dtype=torch.int64)

    def read(self) -> int:
        """What the word holds."""
        return int(self.argument)

    def close(self) -> None:
        """Nothing to free."""


class HostMemory:
    """:class:`blockpick.backend_api.PeerMemory` of the CPU."""

    identity = "cpu"
    proven = True

    def kinds(self) -> tuple[str, ...]:
        """File descriptors only."""
        return ("posix_fd",)

    def allocate(self, size: int, kind: str) -> HostAllocation:
        """A memory file of ``size`` bytes, zeroed."""
        return HostAllocation(size)

    def open(self, kind: str, payload: bytes, size: int, descriptor: int | None) -> HostMapping:
        """Map another process's memory file.

        Raises
        ------
        PeerError
            When there is no descriptor, or its file is smaller than announced.
        """
        if descriptor is None:
            raise PeerError("no descriptor came with the handle")
        if os.fstat(descriptor).st_size < size:
            raise PeerError(f"the file has {os.fstat(descriptor).st_size} bytes, {size} were announced")
        return HostMapping(descriptor, size)

    def host_word(self) -> TensorWord:
        """A word, 0 at first."""
        return TensorWord()

    def read(self, address: int, size: int) -> bytes:
        """Copy ``size`` bytes from ``address``."""
        return ctypes.string_at(address, size)

    def write(self, address: int, data: bytes) -> None:
        """Copy ``data`` to ``address``."""
        ctypes.memmove(address, data, len(data))

    def close(self) -> None:
        """Nothing is held."""

# SPDX-License-Identifier: Apache-2.0
"""Memory with bounds checks: ranges of the process's address space, and the LDS of every resident workgroup."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import numpy as np

from .types import Trap
from .values import Array

UNITS = {8: np.uint64, 4: np.uint32, 2: np.uint16, 1: np.uint8}
ADDRESS_LIMIT = np.uint64(1 << 56)


class Bytes:
    """A byte array seen in units of 8, 4, 2 and 1 bytes."""

    def __init__(self, data: Array, base: int) -> None:
        self.base, self.size = base, len(data)
        self._units = {
            width: data[: len(data) // width * width].view(kind) for width, kind in UNITS.items() if base % width == 0
        }

    def _pieces(self, offsets: Array, nbytes: int) -> tuple[Array, Array]:
        """The widest view that all accesses fit, and the indexes [lanes, pieces] into it."""
        ends = int(np.bitwise_or.reduce(offsets)) | nbytes
        width = next(width for width in self._units if ends % width == 0)
        first = offsets // width
        count = nbytes // width
        return self._units[width], first[:, None] if count == 1 else first[:, None] + np.arange(count)

    def load(self, offsets: Array, nbytes: int) -> Array:
        """Bytes [lanes, nbytes] at ``offsets``, which were checked."""
        data, index = self._pieces(offsets, nbytes)
        return data[index].view(np.uint8)

    def store(self, offsets: Array, value: Array) -> None:
        """Write bytes [lanes, nbytes]; of lanes that write one place the last one wins."""
        data, index = self._pieces(offsets, value.shape[1])
        data[index] = np.ascontiguousarray(value).view(data.dtype)


class Memory:
    """Global memory: the ranges of this process's address space that a kernel may touch."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        spans = sorted((base, size) for base, size in ranges if size)
        self._bases = np.array([base for base, _ in spans], np.uint64)
        self._bytes = [
            Bytes(np.frombuffer((ctypes.c_ubyte * size).from_address(base), np.uint8), base) for base, size in spans
        ]

    def _find(self, address: Array, nbytes: int, what: str) -> Bytes | None:
        """The range that holds all accesses; None where several do."""
        if not len(self._bases) or address.max() >= ADDRESS_LIMIT:
            raise Trap(f"{what} at {int(address.max()):#x}: no such memory")
        owner = np.searchsorted(self._bases, address, side="right") - 1
        first = int(owner[0])
        if (owner != first).any():
            return None
        if first < 0:
            raise Trap(f"{what} at {int(address[0]):#x}: below all memory")
        found = self._bytes[first]
        end = int(address.max()) + nbytes - found.base
        if end > found.size:
            raise Trap(
                f"{what} of {nbytes} bytes at {int(address.max()):#x}: ends {end - found.size} bytes beyond a range of "
                f"{found.size}"
            )
        return found

    def load(self, address: Array, nbytes: int, what: str) -> Array:
        """Bytes [lanes, nbytes].

        Raises
        ------
        Trap
            When an access is not wholly inside one range.
        """
        found = self._find(address, nbytes, what)
        if found is None:
            return np.concatenate([self.load(address[i : i + 1], nbytes, what) for i in range(len(address))])
        return found.load((address - np.uint64(found.base)).astype(np.int64), nbytes)

    def store(self, address: Array, value: Array, what: str) -> None:
        """Write bytes [lanes, nbytes]; raises like :meth:`load`."""
        found = self._find(address, value.shape[1], what)
        if found is None:
            for i in range(len(address)):
                self.store(address[i : i + 1], value[i : i + 1], what)
        else:
            found.store((address - np.uint64(found.base)).astype(np.int64), value)


class Lds:
    """The LDS of ``workgroups`` resident workgroups, each poisoned and apart."""

    def __init__(self, workgroups: int, nbytes: int, random: np.random.Generator) -> None:
        self.nbytes = nbytes
        self._stride = -(-nbytes // 16) * 16
        data = random.integers(0, 256, workgroups * self._stride, np.uint8)
        self._bytes = Bytes(data, 0)

    def _offsets(self, address: Array, workgroup: Array, nbytes: int, what: str) -> Array:
        offset = address.astype(np.int64)
        if len(offset) and int(offset.max()) + nbytes > self.nbytes:
            raise Trap(f"{what} of {nbytes} bytes at LDS {int(offset.max()):#x}: the workgroup has {self.nbytes}")
        return offset + workgroup * self._stride

    def load(self, address: Array, workgroup: Array, nbytes: int, what: str) -> Array:
        """Bytes [lanes, nbytes] of each lane's workgroup; :class:`Trap` beyond its LDS."""
        return self._bytes.load(self._offsets(address, workgroup, nbytes, what), nbytes)

    def store(self, address: Array, workgroup: Array, value: Array, what: str) -> None:
        """Write bytes; :class:`Trap` beyond the LDS."""
        self._bytes.store(self._offsets(address, workgroup, value.shape[1], what), value)


def array_range(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    """Address and bytes of a contiguous array."""
    if not array.flags.c_contiguous:
        raise ValueError("a kernel argument must be contiguous")
    return array.ctypes.data, array.nbytes

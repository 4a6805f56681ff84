# SPDX-License-Identifier: Apache-2.0
"""Device memory that other processes map, by HIP: hipIpc handles of uncached memory."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from hip import hip

from blockpick.backend_api import Address, CountedMapping, CountedMappings
from blockpick.errors import DriverError, PeerError

from .driver_calls import check

UNCACHED = 3  # hipDeviceMallocUncached: what a peer stores is seen without cache maintenance
HANDLE_BYTES = 64
_mapped = CountedMappings()  # by device and payload


class RocmPeerMemory:
    """:class:`blockpick.backend_api.PeerMemory` of one device.

    Writes and reads go through a stream of their own that does not wait for others, so they pass kernels that spin.
    """

    proven = False  # executed against the stand-in only

    def __init__(self, device_index: int) -> None:
        self._index = device_index
        properties = check(hip.hipGetDeviceProperties(device_index), f"hipGetDeviceProperties({device_index})")
        where = properties.pciDomainID, properties.pciBusID, properties.pciDeviceID
        self.identity = "PCI-{:04x}:{:02x}:{:02x}".format(*where)
        self._kinds: tuple[str, ...] | None = None
        self._stream: Any = None

    @contextmanager
    def current(self) -> Iterator[None]:
        """The device is current for a while."""
        before = check(hip.hipGetDevice(), "hipGetDevice")
        check(hip.hipSetDevice(self._index), f"hipSetDevice({self._index})")
        try:
            yield
        finally:
            check(hip.hipSetDevice(before), f"hipSetDevice({before})")

    def kinds(self) -> tuple[str, ...]:
        """``ipc`` where a real allocation of uncached memory could be exported."""
        if self._kinds is None:
            found = []
            with suppress(DriverError):
                self.allocate(2 << 20, "ipc").close()
                found.append("ipc")
            self._kinds = tuple(found)
        return self._kinds

    def allocate(self, size: int, kind: str) -> IpcAllocation:
        """Allocate, zero and export ``size`` bytes of uncached memory."""
        with self.current():
            made = IpcAllocation(self, size)
            try:
                check(hip.hipMemset(made.address, 0, size), f"hipMemset({size} bytes)")
                check(hip.hipDeviceSynchronize(), "hipDeviceSynchronize")
                made.export()
            except DriverError:
                made.close()
                raise
        return made

    def open(self, kind: str, payload: bytes, size: int, descriptor: int | None) -> CountedMapping:
        """Map what another process exported; opening one export twice gives one mapping, counted.

        Raises
        ------
        PeerError
            When the handle has another length than HIP's.
        DriverError
            When HIP refuses it: dangling, of a device that can't be reached, or exported by this process.
        """
        if len(payload) != HANDLE_BYTES:
            raise PeerError(f"HIP's handle has {HANDLE_BYTES} bytes, got {len(payload)}")

        def make() -> IpcMapping:
            with self.current():
                return IpcMapping(self, payload)

        return _mapped.open((self._index, payload), make)

    def host_word(self) -> PinnedWord:
        """A word that kernels can store to, 0 at first."""
        with self.current():
            return PinnedWord(self)

    def read(self, address: int, size: int) -> bytes:
        """Read device memory beside kernels that run."""
        data = ctypes.create_string_buffer(size)
        self._copy(ctypes.addressof(data), address, size, hip.hipMemcpyKind.hipMemcpyDeviceToHost)
        return data.raw

    def write(self, address: int, data: bytes) -> None:
        """Write to device memory, also a peer's, beside kernels that run."""
        source = ctypes.create_string_buffer(data, len(data))
        self._copy(address, ctypes.addressof(source), len(data), hip.hipMemcpyKind.hipMemcpyHostToDevice)

    def close(self) -> None:
        """Destroy the own stream."""
        if self._stream is not None:
            with self.current():
                check(hip.hipStreamDestroy(self._stream), "hipStreamDestroy")
            self._stream = None

    def _copy(self, target: int, source: int, size: int, kind: Any) -> None:
        with self.current():
            if self._stream is None:
                self._stream = check(hip.hipStreamCreateWithFlags(hip.hipStreamNonBlocking), "hipStreamCreateWithFlags")
            check(hip.hipMemcpyAsync(target, source, size, kind, self._stream), f"hipMemcpyAsync({size} bytes)")
            check(hip.hipStreamSynchronize(self._stream), "hipStreamSynchronize")


class IpcAllocation:
    """An allocation of uncached memory with its IPC handle."""

    descriptor = None

    def __init__(self, owner: RocmPeerMemory, size: int) -> None:
        self._owner, self.size, self.payload = owner, size, b""
        self.address = _number(check(hip.hipExtMallocWithFlags(size, UNCACHED), f"hipExtMallocWithFlags({size})"))

    def export(self) -> None:
        """Make the handle."""
        self.payload = bytes(check(hip.hipIpcGetMemHandle(self.address), "hipIpcGetMemHandle").reserved)

    def close(self) -> None:
        """Free it."""
        with self._owner.current():
            check(hip.hipFree(self.address), "hipFree")


class IpcMapping:
    """Another process's allocation, opened by its handle."""

    def __init__(self, owner: RocmPeerMemory, payload: bytes) -> None:
        self._owner = owner
        call = hip.hipIpcOpenMemHandle(payload, hip.hipIpcMemLazyEnablePeerAccess)
        self.address = _number(check(call, "hipIpcOpenMemHandle"))

    def close(self) -> None:
        """Unmap it."""
        with self._owner.current():
            check(hip.hipIpcCloseMemHandle(self.address), "hipIpcCloseMemHandle")


class PinnedWord:
    """A word of pinned, coherent host memory, mapped for the device."""

    def __init__(self, owner: RocmPeerMemory) -> None:
        self._owner = owner
        flags = hip.hipHostMallocMapped | hip.hipHostMallocCoherent | hip.hipHostMallocPortable
        self._host = _number(check(hip.hipHostMalloc(8, flags), "hipHostMalloc(8)"))
        self._word = ctypes.c_int64.from_address(self._host)
        self._word.value = 0
        self.argument = Address(_number(check(hip.hipHostGetDevicePointer(self._host, 0), "hipHostGetDevicePointer")))

    def read(self) -> int:
        """What the word holds."""
        return self._word.value

    def close(self) -> None:
        """Free it."""
        with self._owner.current():
            check(hip.hipHostFree(self._host), "hipHostFree")


def _number(pointer: Any) -> int:
    """The address in a pointer object of hip-python."""
    return int(pointer.as_c_void_p().value)

# SPDX-License-Identifier: Apache-2.0
"""Device memory that other processes map, by the CUDA driver: legacy IPC, POSIX file descriptors, fabric handles."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from cuda.bindings import driver

from blockpick.backend_api import Address, CountedMapping, CountedMappings
from blockpick.errors import DriverError, PeerError

from .driver_calls import check

HANDLE_TYPES = {"posix_fd": "POSIX_FILE_DESCRIPTOR", "fabric": "FABRIC"}
HANDLE_BYTES = 64
_mapped = CountedMappings()  # by device, kind and payload


class CudaPeerMemory:
    """:class:`blockpick.backend_api.PeerMemory` of one device, in its primary context.

    Writes and reads go through a stream of their own that does not wait for others, so they pass kernels that spin.
    """

    proven = True

    def __init__(self, device_index: int) -> None:
        check(driver.cuInit(0), "cuInit")
        self._index = device_index
        self._device = check(driver.cuDeviceGet(device_index), f"cuDeviceGet({device_index})")
        self._context = check(
            driver.cuDevicePrimaryCtxRetain(self._device), f"cuDevicePrimaryCtxRetain({device_index})"
        )
        uuid = check(driver.cuDeviceGetUuid(self._device), "cuDeviceGetUuid")
        self.identity = f"GPU-{bytes(uuid.bytes)[:16].hex()}"
        self._kinds: tuple[str, ...] | None = None
        self._stream: Any = None

    @contextmanager
    def current(self) -> Iterator[None]:
        """The device's context is current for a while."""
        check(driver.cuCtxPushCurrent(self._context), "cuCtxPushCurrent")
        try:
            yield
        finally:
            check(driver.cuCtxPopCurrent(), "cuCtxPopCurrent")

    def kinds(self) -> tuple[str, ...]:
        """Kinds that a real allocation could export here; an attribute does not prove that fabric handles work."""
        if self._kinds is None:
            found = []
            for kind in ("ipc", "posix_fd", "fabric"):
                with suppress(DriverError):
                    self.allocate(2 << 20, kind).close()
                    found.append(kind)
            self._kinds = tuple(found)
        return self._kinds

    def allocate(self, size: int, kind: str) -> IpcAllocation | VirtualAllocation:
        """Allocate, zero and export ``size`` bytes."""
        with self.current():
            made: IpcAllocation | VirtualAllocation
            made = IpcAllocation(self, size) if kind == "ipc" else VirtualAllocation.create(self, size, kind)
            try:
                check(driver.cuMemsetD8(made.address, 0, size), f"cuMemsetD8({size} bytes)")
                check(driver.cuCtxSynchronize(), "cuCtxSynchronize")
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
            When the handle has another length than the driver's, or no descriptor came with it.
        DriverError
            When the driver refuses it: dangling, of a device that can't be reached, or exported by this process.
        """
        if kind != "posix_fd" and len(payload) != HANDLE_BYTES:
            raise PeerError(f"the driver's handle has {HANDLE_BYTES} bytes, got {len(payload)}")

        def make() -> IpcMapping | VirtualAllocation:
            with self.current():
                if kind == "ipc":
                    return IpcMapping(self, payload, size)
                return VirtualAllocation.imported(self, size, kind, payload, descriptor)

        # every descriptor that arrives is an export of its own
        return _mapped.open((self._index, kind, payload) if payload else object(), make)

    def host_word(self) -> PinnedWord:
        """A word that kernels can store to, 0 at first."""
        with self.current():
            return PinnedWord(self)

    def read(self, address: int, size: int) -> bytes:
        """Read device memory beside kernels that run."""
        data = ctypes.create_string_buffer(size)
        with self.current():
            stream = self._own_stream()
            check(driver.cuMemcpyDtoHAsync(ctypes.addressof(data), address, size, stream), "cuMemcpyDtoHAsync")
            check(driver.cuStreamSynchronize(stream), "cuStreamSynchronize")
        return data.raw

    def write(self, address: int, data: bytes) -> None:
        """Write to device memory, also a peer's, beside kernels that run."""
        source = ctypes.create_string_buffer(data, len(data))
        with self.current():
            stream = self._own_stream()
            check(driver.cuMemcpyHtoDAsync(address, ctypes.addressof(source), len(data), stream), "cuMemcpyHtoDAsync")
            check(driver.cuStreamSynchronize(stream), "cuStreamSynchronize")

    def close(self) -> None:
        """Destroy the own stream and let the primary context go."""
        if self._stream is not None:
            with self.current():
                check(driver.cuStreamDestroy(self._stream), "cuStreamDestroy")
            self._stream = None
        check(driver.cuDevicePrimaryCtxRelease(self._device), "cuDevicePrimaryCtxRelease")

    def _own_stream(self) -> Any:
        if self._stream is None:
            flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
            self._stream = check(driver.cuStreamCreate(flags), "cuStreamCreate")
        return self._stream


class IpcAllocation:
    """An allocation of its own with a legacy IPC handle."""

    descriptor = None

    def __init__(self, owner: CudaPeerMemory, size: int) -> None:
        self._owner, self.size, self.payload = owner, size, b""
        self.address = int(check(driver.cuMemAlloc(size), f"cuMemAlloc({size})"))

    def export(self) -> None:
        """Make the handle."""
        self.payload = bytes(check(driver.cuIpcGetMemHandle(self.address), "cuIpcGetMemHandle").reserved)

    def close(self) -> None:
        """Free it."""
        with self._owner.current():
            check(driver.cuMemFree(self.address), "cuMemFree")


class IpcMapping:
    """Another process's allocation, opened by its legacy handle."""

    def __init__(self, owner: CudaPeerMemory, payload: bytes, size: int) -> None:
        handle = driver.CUipcMemHandle()
        handle.reserved = payload
        flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        self._owner = owner
        self.address = int(check(driver.cuIpcOpenMemHandle(handle, flags.value), "cuIpcOpenMemHandle"))
        code, _, found = driver.cuMemGetAddressRange(self.address)
        if code != driver.CUresult.CUDA_SUCCESS or int(found) < size:
            self.close()
            raise PeerError(f"the mapped memory has {int(found)} bytes, {size} were announced")

    def close(self) -> None:
        """Unmap it."""
        with self._owner.current():
            check(driver.cuIpcCloseMemHandle(self.address), "cuIpcCloseMemHandle")


class VirtualAllocation:
    """Physical memory of the virtual memory API, mapped at an address of its own; ours or another process's."""

    def __init__(self, owner: CudaPeerMemory, size: int, kind: str, handle: Any) -> None:
        self._owner, self.size, self._kind, self._handle = owner, size, kind, handle
        self.payload, self.descriptor, self.address = b"", None, 0  # type: bytes, int | None, int
        try:
            self._map()
        except DriverError:
            self.close()
            raise

    @classmethod
    def create(cls, owner: CudaPeerMemory, size: int, kind: str) -> VirtualAllocation:
        """Memory of this device that ``kind`` can export."""
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location = _place(owner)
        properties.requestedHandleTypes = _handle_type(kind)
        return cls(owner, size, kind, check(driver.cuMemCreate(size, properties, 0), f"cuMemCreate({size}, {kind})"))

    @classmethod
    def imported(
        cls, owner: CudaPeerMemory, size: int, kind: str, payload: bytes, descriptor: int | None
    ) -> VirtualAllocation:
        """Another process's memory."""
        if kind == "fabric":
            shared: Any = driver.CUmemFabricHandle()
            shared.data = payload
        elif descriptor is None:
            raise PeerError("no descriptor came with the handle")
        else:
            shared = descriptor
        call = driver.cuMemImportFromShareableHandle(shared, _handle_type(kind))
        return cls(owner, size, kind, check(call, f"cuMemImportFromShareableHandle({kind})"))

    def _map(self) -> None:
        self.address = int(check(driver.cuMemAddressReserve(self.size, 0, 0, 0), "cuMemAddressReserve"))
        self._mapped = False
        check(driver.cuMemMap(self.address, self.size, 0, self._handle, 0), "cuMemMap")
        self._mapped = True
        access = driver.CUmemAccessDesc()
        access.location = _place(self._owner)
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        check(driver.cuMemSetAccess(self.address, self.size, [access], 1), "cuMemSetAccess")

    def export(self) -> None:
        """Make the handle."""
        call = driver.cuMemExportToShareableHandle(self._handle, _handle_type(self._kind), 0)
        shared = check(call, f"cuMemExportToShareableHandle({self._kind})")
        if self._kind == "fabric":
            self.payload = bytes(shared.data)
        else:
            self.descriptor = int(shared)

    def close(self) -> None:
        """Unmap it and let the physical memory go."""
        with self._owner.current():
            if self.address:
                if self._mapped:
                    check(driver.cuMemUnmap(self.address, self.size), "cuMemUnmap")
                check(driver.cuMemAddressFree(self.address, self.size), "cuMemAddressFree")
            check(driver.cuMemRelease(self._handle), "cuMemRelease")
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class PinnedWord:
    """A word of pinned host memory, mapped for the device."""

    def __init__(self, owner: CudaPeerMemory) -> None:
        self._owner = owner
        flags = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
        self._host = int(check(driver.cuMemHostAlloc(8, flags), "cuMemHostAlloc(8)"))
        self._word = ctypes.c_int64.from_address(self._host)
        self._word.value = 0
        self.argument = Address(
            int(check(driver.cuMemHostGetDevicePointer(self._host, 0), "cuMemHostGetDevicePointer"))
        )

    def read(self) -> int:
        """What the word holds."""
        return self._word.value

    def close(self) -> None:
        """Free it."""
        with self._owner.current():
            check(driver.cuMemFreeHost(self._host), "cuMemFreeHost")


def _place(owner: CudaPeerMemory) -> Any:
    place = driver.CUmemLocation()
    place.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    place.id = owner._index
    return place


def _handle_type(kind: str) -> Any:
    return getattr(driver.CUmemAllocationHandleType, f"CU_MEM_HANDLE_TYPE_{HANDLE_TYPES[kind]}")

# SPDX-License-Identifier: Apache-2.0
"""Find ROCm devices and load code objects through HIP. Importing this needs no ROCm."""

from __future__ import annotations

from hip import hip

from blockpick.backend_api import DeviceInfo, KernelBinary
from blockpick.errors import DriverError

from .driver_calls import check
from .kernel import RocmKernel
from .peer import RocmPeerMemory


class RocmBackend:
    """The vendor's loader behind :class:`blockpick.backend_api.BinaryLoader`."""

    vendor = "rocm"

    def devices(self) -> list[DeviceInfo]:
        """All visible ROCm devices; empty where there is no ROCm."""
        try:
            count = check(hip.hipGetDeviceCount(), "hipGetDeviceCount")
        except (DriverError, RuntimeError):  # no device, or no libamdhip64 to call
            return []
        version = check(hip.hipRuntimeGetVersion(), "hipRuntimeGetVersion")
        name = f"HIP {version // 10_000_000}.{version // 100_000 % 100}"
        return [_describe(index, name) for index in range(count)]

    def load(self, binary: KernelBinary, device_index: int) -> RocmKernel:
        """Load a code object on one device.

        Raises
        ------
        DriverError
            When HIP refuses the image, e.g. one for another architecture.
        """
        before = check(hip.hipGetDevice(), "hipGetDevice")
        check(hip.hipSetDevice(device_index), f"hipSetDevice({device_index})")
        try:
            module = check(hip.hipModuleLoadData(binary.image), f"hipModuleLoadData({binary.name})")
            function = check(
                hip.hipModuleGetFunction(module, binary.symbol.encode()), f"hipModuleGetFunction({binary.symbol})"
            )
        finally:
            check(hip.hipSetDevice(before), f"hipSetDevice({before})")
        return RocmKernel(binary, module, function)

    def peer_memory(self, device_index: int) -> RocmPeerMemory:
        """How one device shares memory with other processes."""
        return RocmPeerMemory(device_index)


def _describe(index: int, version: str) -> DeviceInfo:
    properties = check(hip.hipGetDeviceProperties(index), f"hipGetDeviceProperties({index})")
    arch = _text(properties.gcnArchName).split(":")[0]
    return DeviceInfo(
        "rocm",
        index,
        arch,
        _text(properties.name),
        properties.multiProcessorCount,
        properties.totalGlobalMem,
        version,
    )


def _text(value: str | bytes) -> str:
    """A C string of a property: hip-python gives ``str`` since its version 10, ``bytes`` before."""
    return value if isinstance(value, str) else value.decode()

# SPDX-License-Identifier: Apache-2.0
"""Find CUDA devices and load cubins through the driver API. Importing this needs no driver."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver

from blockpick.backend_api import DeviceInfo, KernelBinary
from blockpick.errors import DriverError, ManifestError

from .driver_calls import check
from .kernel import CudaKernel
from .peer import CudaPeerMemory

# One carve-out for all kernels: a multiprocessor changes it only when idle, so a kernel that starts beside the
# previous one (PDL) would otherwise find too little shared memory for its blocks and run in two waves.
MAX_SHARED_CARVEOUT = 100  # per cent
STATIC_SHARED_LIMIT = 48 * 1024  # a block gets more only when asked for


class CudaBackend:
    """The vendor's loader behind :class:`blockpick.backend_api.BinaryLoader`."""

    vendor = "cuda"

    def devices(self) -> list[DeviceInfo]:
        """All visible CUDA devices; empty where there is no driver."""
        try:
            check(driver.cuInit(0), "cuInit")
            count = check(driver.cuDeviceGetCount(), "cuDeviceGetCount")
        except (DriverError, RuntimeError):  # no device, or no libcuda to call
            return []
        version = check(driver.cuDriverGetVersion(), "cuDriverGetVersion")
        return [_describe(index, f"CUDA {version // 1000}.{version % 1000 // 10}") for index in range(count)]

    def load(self, binary: KernelBinary, device_index: int) -> CudaKernel:
        """Load a cubin into the device's primary context.

        Raises
        ------
        DriverError
            When the driver refuses the image, e.g. one for another architecture.
        ManifestError
            When the kernel's parameters are not the ones the manifest names.
        """
        check(driver.cuInit(0), "cuInit")
        device = check(driver.cuDeviceGet(device_index), f"cuDeviceGet({device_index})")
        context = check(driver.cuDevicePrimaryCtxRetain(device), f"cuDevicePrimaryCtxRetain({device_index})")
        check(driver.cuCtxPushCurrent(context), "cuCtxPushCurrent")
        try:
            module = check(driver.cuModuleLoadData(binary.image), f"cuModuleLoadData({binary.name})")
            function = check(
                driver.cuModuleGetFunction(module, binary.symbol.encode()), f"cuModuleGetFunction({binary.symbol})"
            )
            _check_parameters(function, binary)
            _set(function, binary, "PREFERRED_SHARED_MEMORY_CARVEOUT", MAX_SHARED_CARVEOUT)
            if binary.shared_bytes > STATIC_SHARED_LIMIT:
                _set(function, binary, "MAX_DYNAMIC_SHARED_SIZE_BYTES", binary.shared_bytes)
        finally:
            check(driver.cuCtxPopCurrent(), "cuCtxPopCurrent")
        return CudaKernel(binary, module, function)

    def peer_memory(self, device_index: int) -> CudaPeerMemory:
        """How one device shares memory with other processes."""
        return CudaPeerMemory(device_index)


def _set(function: Any, binary: KernelBinary, name: str, value: int) -> None:
    attribute = getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
    check(driver.cuFuncSetAttribute(function, attribute, value), f"cuFuncSetAttribute({binary.name}, {name}, {value})")


def _describe(index: int, version: str) -> DeviceInfo:
    device = check(driver.cuDeviceGet(index), f"cuDeviceGet({index})")

    def attribute(name: str) -> int:
        key = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(check(driver.cuDeviceGetAttribute(key, device), f"cuDeviceGetAttribute({name})"))

    name = check(driver.cuDeviceGetName(128, device), "cuDeviceGetName").split(b"\0")[0].decode()
    major, minor = attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")
    memory = int(check(driver.cuDeviceTotalMem(device), "cuDeviceTotalMem"))
    return DeviceInfo("cuda", index, f"sm{major}{minor}", name, attribute("MULTIPROCESSOR_COUNT"), memory, version)


def _check_parameters(function: Any, binary: KernelBinary) -> None:
    """Compare the image's parameters with the manifest's, one by one: 4 or 8 bytes each."""
    expected = [4 if a.type in ("i32", "fp32") else 8 for a in binary.arguments] + [8] * binary.trailing_pointers
    for index, size in enumerate(expected):
        code, *values = driver.cuFuncGetParamInfo(function, index)
        found = int(values[1]) if code == driver.CUresult.CUDA_SUCCESS else None
        if found != size:
            raise ManifestError(
                f"{binary.name}: parameter {index} of the image has {found} bytes, its manifest says {size}"
            )

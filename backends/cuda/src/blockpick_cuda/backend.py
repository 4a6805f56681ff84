# SPDX-License-Identifier: Apache-2.0
"""Find CUDA devices and load cubins through the driver API. Importing this needs no driver."""

from __future__ import annotations

from typing import Any

from blockpick.backend_api import DeviceInfo, KernelBinary
from blockpick.errors import DriverError, ManifestError
from cuda.bindings import driver

from .kernel import CudaKernel

STATIC_SHARED_LIMIT = 48 * 1024  # a block gets more only when asked for


def check(result: tuple[Any, ...], call: str) -> Any:
    """The value of a driver call, or :class:`DriverError`."""
    code, *values = result
    if code != driver.CUresult.CUDA_SUCCESS:
        raise DriverError(int(code), code.name, call)
    return values[0] if values else None


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
            if binary.shared_bytes > STATIC_SHARED_LIMIT:
                attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                check(
                    driver.cuFuncSetAttribute(function, attribute, binary.shared_bytes),
                    f"cuFuncSetAttribute({binary.name}, {binary.shared_bytes} bytes of shared memory)",
                )
        finally:
            check(driver.cuCtxPopCurrent(), "cuCtxPopCurrent")
        return CudaKernel(binary, module, function)


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
    """Compare the image's parameter list with the manifest's: count, and 4 or 8 bytes each."""
    sizes = []
    while True:
        code, *values = driver.cuFuncGetParamInfo(function, len(sizes))
        if code != driver.CUresult.CUDA_SUCCESS:
            break
        sizes.append(int(values[1]))
    expected = [4 if a.type in ("i32", "fp32") else 8 for a in binary.arguments] + [8] * binary.trailing_pointers
    if sizes != expected:
        raise ManifestError(f"{binary.name}: the image takes parameters of {sizes} bytes, its manifest says {expected}")

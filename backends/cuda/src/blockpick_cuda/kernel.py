# SPDX-License-Identifier: Apache-2.0
"""Launch a loaded kernel with packed, reused arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cuda.bindings import driver

from blockpick.backend_api import KernelBinary, Launch, PackedArguments, Value
from blockpick.errors import DriverError


class CudaKernel:
    """A function of a loaded module; keeps the module."""

    def __init__(self, binary: KernelBinary, module: Any, function: Any) -> None:
        self.binary = binary
        self._module = module
        self._function = function

    def bind(self, fixed: Mapping[str, Value], dynamic: Sequence[str]) -> Launch:
        """Fix some arguments; see :class:`blockpick.backend_api.Kernel`."""
        binary = self.binary
        packed = PackedArguments(binary.arguments, binary.trailing_pointers, fixed, dynamic)
        return CudaLaunch(binary, self._function, packed)


class CudaLaunch:
    """A launch configuration with its packed arguments."""

    def __init__(self, binary: KernelBinary, function: Any, packed: PackedArguments) -> None:
        self._name = binary.name
        self._function = function
        self._packed = packed
        self._grid, self._stream = 1, 0
        self._config = config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = 1, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = binary.threads, 1, 1
        config.sharedMemBytes = binary.shared_bytes
        if binary.pdl:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1

    def __call__(self, grid: int, stream: int, *dynamic: Value) -> None:
        """Launch ``grid`` blocks on ``stream``."""
        self._packed.fill(dynamic)
        if grid != self._grid:  # setting a field of the binding's struct costs as much as packing the arguments
            self._config.gridDimX = self._grid = grid
        if stream != self._stream:
            self._config.hStream = self._stream = stream
        self._call()

    def _call(self) -> None:
        code = driver.cuLaunchKernelEx(self._config, self._function, self._packed.address, 0)[0]
        if code:
            raise DriverError(int(code), code.name, f"cuLaunchKernelEx({self._name}, grid {self._grid})")

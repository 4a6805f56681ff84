# SPDX-License-Identifier: Apache-2.0
"""Launch a loaded kernel with packed, reused arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from hip import hip

from blockpick.backend_api import KernelBinary, Launch, PackedArguments, Value
from blockpick.errors import DriverError


class RocmKernel:
    """A function of a loaded module; keeps the module."""

    def __init__(self, binary: KernelBinary, module: Any, function: Any) -> None:
        self.binary = binary
        self._module = module
        self._function = function

    def bind(self, fixed: Mapping[str, Value], dynamic: Sequence[str]) -> Launch:
        """Fix some arguments; see :class:`blockpick.backend_api.Kernel`."""
        binary = self.binary
        packed = PackedArguments(binary.arguments, binary.trailing_pointers, fixed, dynamic)
        return RocmLaunch(binary, self._function, packed)


class RocmLaunch:
    """A launch configuration with its packed arguments. ROCm has no programmatic dependent launch."""

    def __init__(self, binary: KernelBinary, function: Any, packed: PackedArguments) -> None:
        self._name = binary.name
        self._function = function
        self._packed = packed
        self._parameters = ctypes.c_void_p(packed.address)
        self._threads = binary.threads
        self._shared_bytes = binary.shared_bytes

    def __call__(self, grid: int, stream: int, *dynamic: Value) -> None:
        """Launch ``grid`` workgroups on ``stream``."""
        self._packed.fill(dynamic)
        code = hip.hipModuleLaunchKernel(
            self._function, grid, 1, 1, self._threads, 1, 1, self._shared_bytes, ctypes.c_void_p(stream),
            self._parameters, None,
        )[0]  # fmt: skip
        if code != hip.hipError_t.hipSuccess:
            raise DriverError(int(code), code.name, f"hipModuleLaunchKernel({self._name}, grid {grid})")

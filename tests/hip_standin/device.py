# SPDX-License-Identifier: Apache-2.0
"""The stand-in's devices as tests use them: kernels are executed at LLVM-IR level, tensors become kernel-visible.

A code object holds no LLVM IR. The build keeps the IR of every binary by the binary's sha256; one without it is refused.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from llir import Program, Trap, launch

from blockpick.backend_api import Kernel, Launch, Value

from .build import build

SUCCESS, INVALID_HANDLE, NOT_FOUND, NO_BINARY = 0, 400, 500, 209
RUNNING, FINISHED, FAILED = 0, 1, 2
TURNS_PER_STEP = 256
DEVICES = "BLOCKPICK_STANDIN_DEVICES"


class Facts(ctypes.Structure):
    """``standin_function`` of standin.h."""

    _fields_ = [("id", ctypes.c_uint64), ("parameters", ctypes.c_uint), ("max_threads", ctypes.c_uint)]


class Callbacks(ctypes.Structure):
    """``standin_interpreter`` of standin.h."""

    _fields_ = [
        ("module_load", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int,
                                         ctypes.POINTER(ctypes.c_uint64))),
        ("module_unload", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)),
        ("module_function", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_char_p,
                                             ctypes.POINTER(Facts))),
        ("launch_begin", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.POINTER(ctypes.c_uint),
                                          ctypes.POINTER(ctypes.c_uint), ctypes.c_uint,
                                          ctypes.POINTER(ctypes.c_void_p), ctypes.c_int,
                                          ctypes.POINTER(ctypes.c_uint64))),
        ("launch_step", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)),
        ("launch_drop", ctypes.CFUNCTYPE(None, ctypes.c_uint64)),
    ]  # fmt: skip


class Range(ctypes.Structure):
    """``standin_range`` of standin.h."""

    _fields_ = [("base", ctypes.c_uint64), ("bytes", ctypes.c_uint64), ("kind", ctypes.c_int)]


@dataclass(frozen=True)
class Module:
    """The LLVM IR behind a loaded code object."""

    text: str
    arch: str


@functools.lru_cache(maxsize=256)
def program_of(text: str, name: str, arch: str) -> Program:
    """A kernel of an IR module, parsed once."""
    return Program(text, name, arch)


class Standin:
    """The stand-in loaded into this process as ``libamdhip64.so``, with the interpreter behind its launches.

    ``order`` and ``seed`` apply to the launches that follow, ``turn_limit`` bounds each; ``rewrite`` may change the IR
    of a module when it is loaded; ``trap`` is what the last failed kernel did. ``clock_ns`` is what kernels read as time;
    ``beside`` is called before every step of a launch, for what happens while kernels run.
    """

    def __init__(self, ir_folder: Path, build_folder: Path) -> None:
        self.order, self.seed = "lockstep", 0
        self.turn_limit = 1_000_000
        self.clock_ns: Callable[[], int] = time.monotonic_ns
        self.beside: Callable[[], None] | None = None
        self.rewrite: Callable[[str], str] | None = None
        self.trap: Exception | None = None
        self._ir_folder = ir_folder
        self._modules: dict[int, Module] = {}
        self._functions: dict[int, Program] = {}
        self._launches: dict[int, Iterator[bool]] = {}
        self._last_id = 0
        root = build(build_folder)
        with environment(ROCM_PATH=str(root)):  # hip-python looks for the library at its first call
            from hip import hip

            hip.hipGetDeviceCount()
        self.hip = hip
        self.library = ctypes.CDLL(str(root / "lib" / "libamdhip64.so"))
        self.library.standin_ranges.restype = ctypes.c_size_t
        self._callbacks = Callbacks(
            *[kind(getattr(self, f"_{name}")) for name, kind in Callbacks._fields_]  # type: ignore[call-arg,misc]
        )
        self.library.standin_install(ctypes.byref(self._callbacks))

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    # ---- callbacks

    def _module_load(self, image: int, size: int, device: int, result: Any) -> int:
        digest = hashlib.sha256(ctypes.string_at(image, size)).hexdigest()
        path = self._ir_folder / f"{digest}.ll"
        if not path.exists():
            return NO_BINARY
        text = path.read_text()
        if self.rewrite is not None:
            text = self.rewrite(text)
        arch = os.environ[DEVICES].split(",")[device].split(":")[0]
        result[0] = self._new_id()
        self._modules[self._last_id] = Module(text, arch)
        return SUCCESS

    def _module_unload(self, module: int) -> int:
        return SUCCESS if self._modules.pop(module, None) else INVALID_HANDLE

    def _module_function(self, module: int, name: bytes, result: Any) -> int:
        found = self._modules[module]
        if f"@{name.decode()}(" not in found.text:
            return NOT_FOUND
        try:
            program = program_of(found.text, name.decode(), found.arch)
        except Trap as trap:  # the text holds what the interpreter does not know
            self.trap = trap
            return NOT_FOUND
        kernel = program.function
        result[0] = Facts(self._new_id(), len(kernel.arguments), kernel.max_threads)
        self._functions[self._last_id] = program
        return SUCCESS

    def _launch_begin(
        self, function: int, grid: Any, block: Any, shared: int, parameters: Any, device: int, result: Any
    ) -> int:
        program = self._functions[function]
        values = []
        for place, (_, kind) in enumerate(program.function.arguments):
            raw = ctypes.string_at(parameters[place], kind.nbytes)
            values.append(int.from_bytes(raw, "little"))
        size = (grid[0], grid[1], grid[2])
        result[0] = self._new_id()
        self._launches[self._last_id] = self._start(program, values, size, block[0], shared)
        return SUCCESS

    def _start(
        self, program: Program, values: Sequence[int], grid: tuple[int, int, int], threads: int, shared: int
    ) -> Iterator[bool]:
        """The launch; memory is what is visible when it begins to run."""
        order, seed = self.order, self.seed
        self.seed += 1
        yield False
        turns = launch(program, self.ranges(), values, grid, threads, shared, order, seed, self.clock_ns)
        try:
            for _, polled in zip(range(self.turn_limit), turns, strict=False):
                yield polled
            if next(turns, None) is not None:
                raise Trap(f"did not end within {self.turn_limit} turns")
        except Trap as trap:
            raise Trap(f"{program.function.name}, order {order}, seed {seed}: {trap}") from None

    def _launch_step(self, number: int) -> int:
        running = self._launches[number]
        try:
            if self.beside is not None:
                self.beside()
            for _ in range(TURNS_PER_STEP):
                if next(running):
                    break  # the kernel may be waiting for another launch or process
        except StopIteration:
            del self._launches[number]
            return FINISHED
        except Trap as trap:
            self.trap = trap
        except Exception as error:  # an exception must not cross the library: it reads as "not finished"
            self.trap = error
        else:
            return RUNNING
        del self._launches[number]
        return FAILED

    def _launch_drop(self, number: int) -> None:
        self._launches.pop(number, None)

    # ---- for tests

    def ranges(self) -> list[tuple[int, int]]:
        """Kernel-visible memory as (address, bytes)."""
        count = self.library.standin_ranges(None, 0)
        found = (Range * max(count, 1))()
        count = self.library.standin_ranges(found, count)
        return [(found[i].base, found[i].bytes) for i in range(count)]

    def reset(self) -> None:
        """Forget a failed launch."""
        self.trap = None
        self.library.standin_reset()

    def check(self, result: tuple[Any, ...]) -> Any:
        """The value of a HIP call; the kernel's own trap where it failed."""
        code, *values = result
        if code != self.hip.hipError_t.hipSuccess:
            if self.trap is not None:
                trap, self.trap = self.trap, None
                self.library.standin_reset()
                raise trap
            raise RuntimeError(f"HIP call failed: {code.name}")
        return values[0] if values else None


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def spans(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Address and bytes from the first to the last element of every tensor; overlapping ones are joined."""
    found = []
    for tensor in tensors:
        if tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            found.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()))
    joined: list[tuple[int, int]] = []
    for start, end in sorted(found):
        if joined and start < joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return [(start, end - start) for start, end in joined]


class VisibleKernel:
    """A loaded kernel whose launches see exactly their tensor arguments: host memory, registered for the launch."""

    def __init__(self, standin: Standin, kernel: Kernel, order: str, devices: str) -> None:
        self._standin, self._kernel, self._order, self._devices = standin, kernel, order, devices

    def bind(self, fixed: Mapping[str, Value], dynamic: Sequence[str]) -> Launch:
        """Like :meth:`blockpick.backend_api.Kernel.bind`."""
        bound = self._kernel.bind(fixed, dynamic)
        standin, hip = self._standin, self._standin.hip

        def run(grid: int, stream: int, *given: Value) -> None:
            tensors = [value for value in (*fixed.values(), *given) if isinstance(value, torch.Tensor)]
            standin.order = self._order
            with visible(standin, self._devices, tensors):
                bound(grid, stream, *given)
                standin.check(hip.hipDeviceSynchronize())

        return run


@contextmanager
def visible(standin: Standin, devices: str, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Kernels may touch these tensors for a while: host memory, registered with the stand-in."""
    registered = []
    with environment(**{DEVICES: devices}):
        try:
            for start, size in spans(tensors):
                standin.check(standin.hip.hipHostRegister(start, size, 0))
                registered.append(start)
            yield
        finally:
            for start in registered:
                standin.hip.hipHostUnregister(start)

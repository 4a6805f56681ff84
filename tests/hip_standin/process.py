# SPDX-License-Identifier: Apache-2.0
"""What the scenarios share: hip-python over the stand-in, calls by ctypes, and an interpreter whose kernels are Python
generators. Importing it loads the library that ``ROCM_PATH`` names.
"""

from __future__ import annotations

import ctypes
import os
import threading
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path

from hip import hip

TESTS = Path(__file__).parents[1]
GENERATED = TESTS.parent / "backends" / "rocm" / "generated"
PATHS = [next((GENERATED / arch / "binaries").glob("decode_plan*.hsaco")) for arch in ("gfx942", "gfx950")]
IMAGE, OTHER_IMAGE = (path.read_bytes() for path in PATHS)
POISON = int.from_bytes(b"\xa5" * 8, "little", signed=True)
lib = ctypes.CDLL(os.path.join(os.environ["ROCM_PATH"], "lib", "libamdhip64.so"))


def ok(result):
    """The value of a hip-python call that must succeed."""
    assert result[0] == 0, result
    return result[1] if len(result) > 1 else None


def code(*results):
    """Error numbers of hip-python calls; one number when they are the same."""
    codes = [int(result[0]) for result in results]
    return codes[0] if len(set(codes)) == 1 else codes


def call(name, *values):
    """A function by ctypes: its error number."""
    return getattr(lib, name)(*(c_uint64(v) if isinstance(v, int) else v for v in values))


def malloc(size, function="hipMalloc", *more):
    return ok(getattr(hip, function)(size, *more)).as_c_void_p().value


def cell(where):
    return c_int64.from_address(where)


def cells(*where):
    return [cell(w).value for w in where]


def ranges():
    """What kernels may touch: (bytes, kind) by address."""
    lib.standin_ranges.restype = c_size_t
    found = (c_uint64 * (3 * lib.standin_ranges(None, c_size_t(0))))()
    lib.standin_ranges(found, c_size_t(len(found) // 3))
    return {found[i]: (found[i + 1], found[i + 2]) for i in range(0, len(found), 3)}


class Fake:
    """An interpreter whose kernels are generators of (address, number); one that divides by zero fails."""

    class Function(ctypes.Structure):
        """``standin_function`` of standin.h."""

        _fields_ = (("id", c_uint64), ("parameters", c_uint), ("max_threads", c_uint))

    SIGNATURES = (
        (c_int, c_void_p, c_size_t, c_int, POINTER(c_uint64)), (c_int, c_uint64),
        (c_int, c_uint64, c_char_p, POINTER(Function)),
        (c_int, c_uint64, POINTER(c_uint), POINTER(c_uint), c_uint, POINTER(c_void_p), c_int, POINTER(c_uint64)),
        (c_int, c_uint64), (None, c_uint64),
    )  # fmt: skip
    MAX_THREADS = 256  # as the kernels of IMAGE were compiled
    alive = []  # noqa: RUF012 # the library keeps only addresses of the callbacks

    def __init__(self, *kernels):
        self.kernels = {kernel.__name__.encode(): kernel for kernel in kernels}
        self.images, self.unloaded, self.launches, self.shapes, self.dropped = [], [], {}, [], []
        self.busy = threading.Lock()
        methods = self.load, self.unload, self.function, self.begin, self.step, self.dropped.append
        callbacks = [ctypes.CFUNCTYPE(*types)(method) for types, method in zip(self.SIGNATURES, methods, strict=True)]
        self.table = (c_void_p * 6)(*(ctypes.cast(callback, c_void_p).value for callback in callbacks))
        self.alive.append((self, callbacks))
        lib.standin_install(self.table)

    def load(self, image, size, device, module):
        self.images.append(ctypes.string_at(image, size))
        module[0] = len(self.images)
        return 0

    def unload(self, module):
        self.unloaded.append(module)
        return 0

    def function(self, module, name, function):
        if name not in self.kernels:
            return 500
        taken = self.kernels[name].__code__.co_argcount
        function[0] = self.Function(list(self.kernels).index(name) + 1, taken, self.MAX_THREADS)
        return 0

    def begin(self, function, grid, block, shared, parameters, device, launch):
        self.shapes.append((grid[:3], block[:3], shared, device))
        launch[0] = len(self.shapes)
        kernel = list(self.kernels.values())[function - 1]
        self.launches[launch[0]] = kernel(*cells(*(parameters[i] for i in range(kernel.__code__.co_argcount))))
        return 0

    def step(self, launch):
        assert self.busy.acquire(blocking=False), "two callbacks at once"
        try:
            return next(self.launches[launch], 1) or 0
        except ZeroDivisionError:
            return 2
        finally:
            self.busy.release()


def store(where, value):
    """Takes three turns; stores in the last one."""
    yield
    yield
    cell(where).value = value


def meet(where, side):
    """Waits for the kernel of the other side."""
    cell(where + 8 * side).value = 1
    while cell(where + 8 * (1 - side)).value != 1:
        yield
    cell(where + 16 + 8 * side).value = 1


def fail(where, value):
    yield
    yield where // 0


def function(name):
    return ok(hip.hipModuleGetFunction(ok(hip.hipModuleLoadData(IMAGE)), name.encode()))


def launch(function, where, value, stream=None, grid=1, block=64, shared=0, gy=1, gz=1, by=1):
    slots = (c_int64 * 2)(where, value)
    pointers = (c_void_p * 2)(ctypes.addressof(slots), ctypes.addressof(slots) + 8)
    parameters = c_void_p(ctypes.addressof(pointers))
    result = hip.hipModuleLaunchKernel(function, grid, gy, gz, block, by, 1, shared, stream, parameters, None)
    slots[:] = pointers[:] = [0, 0]  # they must have been copied
    return code(result)


def copy(dst, src, size=8, stream=None):
    return code(hip.hipMemcpyAsync(dst, src, size, hip.hipMemcpyKind.hipMemcpyDefault, stream))

# SPDX-License-Identifier: Apache-2.0
"""Packed arguments, and both loaders without their drivers."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest
import torch

from blockpick.backend_api import (
    Argument,
    BinaryLoader,
    KernelBinary,
    PackedArguments,
    SourceCompiler,
    SourceInterpreter,
)
from blockpick.device import installed_backends
from blockpick.errors import BlockpickError, DriverError

ARGUMENTS = (
    Argument("a_ptr", "*u8"), Argument("n", "i32"), Argument("b_ptr", "*i32"), Argument("stride", "i64"),
)  # fmt: skip


def read(packed, count):
    """What a driver reads: the 8-byte value behind every address."""
    addresses = (ctypes.c_void_p * count).from_address(packed.address)
    return [ctypes.c_int64.from_address(address).value for address in addresses]


def test_arguments_land_in_kernel_order():
    fixed, given = torch.empty(4, dtype=torch.int32), torch.empty(4, dtype=torch.uint8)
    packed = PackedArguments(ARGUMENTS, 2, {"b_ptr": fixed, "n": -3}, ("a_ptr", "stride"))
    packed.fill((given, 1 << 40))
    assert read(packed, 6) == [given.data_ptr(), -3, fixed.data_ptr(), 1 << 40, 0, 0]
    other = torch.empty(4, dtype=torch.uint8)
    packed.fill((other, -1))
    assert read(packed, 6) == [other.data_ptr(), -3, fixed.data_ptr(), -1, 0, 0]


def test_negative_int32_reads_as_itself():
    packed = PackedArguments((Argument("n", "i32"),), 0, {}, ("n",))
    packed.fill((-7,))
    address = (ctypes.c_void_p * 1).from_address(packed.address)[0]
    assert ctypes.c_int32.from_address(address).value == -7


@pytest.mark.parametrize(
    "fixed,dynamic,message",
    [
        ({"n": 1}, ("a_ptr", "b_ptr"), r"missing \['stride'\]"),
        ({"n": 1, "stride": 2, "extra": 3}, ("a_ptr", "b_ptr"), r"unknown \['extra'\]"),
        ({"n": 1, "stride": 2}, ("a_ptr", "b_ptr", "n"), "do not match"),
        ({}, ("n", "stride", "a_ptr", "b_ptr"), "pointers before"),
    ],
)
def test_wrong_argument_lists_are_refused(fixed, dynamic, message):
    with pytest.raises(TypeError, match=message):
        PackedArguments(ARGUMENTS, 0, fixed, dynamic)


def test_all_three_backends_are_found():
    backends = installed_backends()
    assert set(backends) >= {"cuda", "rocm", "triton"}
    assert {backends[name].vendor for name in ("cuda", "rocm")} == {"cuda", "rocm"}
    assert isinstance(backends["cuda"], BinaryLoader)
    assert isinstance(backends["rocm"], BinaryLoader)
    assert isinstance(backends["triton"], SourceCompiler)
    assert isinstance(backends["triton"], SourceInterpreter)


class Driver:
    """Records the calls of a loader and answers them; ``fail`` names the call that returns an error."""

    def __init__(self, success, error, fail=None):
        self.success, self.error, self.fail, self.calls = success, error, fail, []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, arguments))
            return (self.error,) if name == self.fail else (self.success, f"{name}()")

        return call


BINARY = KernelBinary("kernel__arch", "symbol", b"image", ARGUMENTS, 256, 1024, 2, False)


@pytest.fixture
def hip_driver(monkeypatch):
    """A stand-in for the hip module, in both places that call it."""
    from hip import hip

    import blockpick_rocm.backend
    import blockpick_rocm.kernel

    def install(fail=None):
        driver = Driver(hip.hipError_t.hipSuccess, hip.hipError_t.hipErrorInvalidImage, fail)
        driver.hipError_t = hip.hipError_t
        monkeypatch.setattr(blockpick_rocm.backend, "hip", driver)
        monkeypatch.setattr(blockpick_rocm.kernel, "hip", driver)
        return driver

    return install


def test_rocm_loads_and_launches_in_order(hip_driver):
    from blockpick_rocm import RocmBackend

    driver = hip_driver()
    kernel = RocmBackend().load(BINARY, 3)
    names = [name for name, _ in driver.calls]
    assert names == ["hipGetDevice", "hipSetDevice", "hipModuleLoadData", "hipModuleGetFunction", "hipSetDevice"]
    assert driver.calls[1][1] == (3,)
    assert driver.calls[-1][1] == ("hipGetDevice()",), "the caller's device is restored"
    tensor = torch.empty(16, dtype=torch.uint8)
    launch = kernel.bind({"n": 5, "b_ptr": tensor, "stride": 7}, ("a_ptr",))
    launch(42, 0x1234, tensor)
    name, arguments = driver.calls[-1]
    assert name == "hipModuleLaunchKernel"
    assert arguments[:8] == ("hipModuleGetFunction()", 42, 1, 1, 256, 1, 1, 1024)
    assert arguments[8].value == 0x1234
    values = [ctypes.c_int64.from_address(a).value for a in (ctypes.c_void_p * 6).from_address(arguments[9].value)]
    assert values == [tensor.data_ptr(), 5, tensor.data_ptr(), 7, 0, 0]


@pytest.mark.parametrize("fail", ["hipModuleLoadData", "hipModuleGetFunction", "hipModuleLaunchKernel"])
def test_rocm_errors_name_the_call(hip_driver, fail):
    from blockpick_rocm import RocmBackend

    driver = hip_driver(fail)
    with pytest.raises(DriverError, match=rf"{fail}\(.*hipErrorInvalidImage") as error:
        RocmBackend().load(BINARY, 0).bind({"n": 1, "stride": 1, "a_ptr": torch.empty(1), "b_ptr": torch.empty(1)}, ())(
            1, 0
        )
    assert error.value.name == "hipErrorInvalidImage"
    assert error.value.code != 0
    if fail != "hipModuleLaunchKernel":
        assert driver.calls[-1][0] == "hipSetDevice", "the device is restored on failure"


def run_python(code, **environment):
    """Standard output of a fresh interpreter."""
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, *code], capture_output=True, text=True, check=True, env=env).stdout


def test_no_visible_device_means_no_devices():
    code = "from blockpick.device import installed_backends as b; print([b()[n].devices() for n in ('cuda', 'rocm')])"
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    assert run_python(["-c", code], **hidden).strip() == "[[], []]"


def test_triton_mode_is_fixed_by_its_first_import():
    """Asking a process that has the interpreter for the compiler (or the reverse) is refused with the way out."""
    from blockpick_triton.backend import _import_triton

    interpreted = not torch.cuda.is_available()
    _import_triton(interpret=interpreted)
    with pytest.raises(BlockpickError, match="Set TRITON_INTERPRET="):
        _import_triton(interpret=not interpreted)


SORT_SCRIPT = """
import numpy as np, torch, triton, triton.language as tl
from blockpick_triton.interpreter import sort_with_numpy

@triton.jit
def kernel(x_ptr, top_ptr, up_ptr, down_ptr):
    x = tl.load(x_ptr + tl.arange(0, 64))
    tl.store(top_ptr + tl.arange(0, 16), tl.topk(x, 16))
    tl.store(up_ptr + tl.arange(0, 64), tl.sort(x))
    tl.store(down_ptr + tl.arange(0, 64), tl.sort(x, descending=True))

keys = torch.from_numpy(np.random.default_rng(0).integers(-(2**60), 2**60, 64)) // 7 * 7
keys[5] = keys[9]

def run():
    outs = [torch.zeros(n, dtype=torch.int64) for n in (16, 64, 64)]
    kernel[(1,)](keys, *outs)
    return outs

network = run()
sort_with_numpy()
print(all(map(torch.equal, network, run())), torch.equal(network[1], keys.sort().values))
"""


def test_sorting_with_numpy_equals_the_bitonic_network(tmp_path):
    """tl.sort and tl.topk of the interpreter before and after the replacement, on int64 keys with a duplicate."""
    script = tmp_path / "script.py"
    script.write_text(SORT_SCRIPT)
    assert run_python([str(script)], TRITON_INTERPRET="1").split() == ["True", "True"]


IDLE_SCRIPT = """
import torch, triton, triton.language as tl
from triton.language import core

@triton.jit
def twice(x):
    return core.full(x.shape, 2, tl.int32) * x  # replaces another module's functions than the kernel's first call

@triton.jit
def kernel(out_ptr, n):
    x = tl.zeros([16], tl.int32) + n
    tl.store(out_ptr + tl.arange(0, 16), twice(twice(x)) + tl.cdiv(n, 2))

def run(n):
    out = torch.zeros(16, dtype=torch.int32)
    kernel[(1,)](out, n)
    return out

before = [run(n) for n in (3, 2**30)]
from blockpick_triton.interpreter import leave_out_idle_work
leave_out_idle_work()
leave_out_idle_work()
after = [run(n) for n in (3, 2**30)]
try:
    kernel[(1,)](torch.zeros(16), "no number")
except Exception:
    failed = True
print(all(map(torch.equal, before, after)), before[0].tolist() == [14] * 16, failed, torch.equal(run(3), before[0]))
"""


def test_leaving_out_idle_work_changes_nothing(tmp_path):
    """Values with nested device functions and a sum that wraps, before and after, and after a kernel that failed."""
    script = tmp_path / "script.py"
    script.write_text(IDLE_SCRIPT)
    assert run_python([str(script)], TRITON_INTERPRET="1").split() == ["True"] * 4

# SPDX-License-Identifier: Apache-2.0
"""The ROCm loader, unmodified, over hip-python and the stand-in for libamdhip64: devices, errors, arguments, lifetime."""

from __future__ import annotations

import dataclasses
import gc
import json

import pytest
import torch
from executors import GPU, IR_ARCHS, ir_executor, standin
from hip_standin.device import DEVICES, environment, spans
from llir import Trap

from blockpick import CacheLayout
from blockpick.cli import main
from blockpick.errors import DriverError
from blockpick.manifest import installed_packages
from blockpick.testing.reference import insert_reference

pytestmark = [pytest.mark.skipif(GPU, reason="needs a process without a real HIP"), pytest.mark.requires(tool="cc")]


@pytest.fixture
def machine():
    """A machine with one device of each architecture: its stand-in and its loader."""
    from blockpick_rocm import RocmBackend

    with environment(**{DEVICES: "gfx942:4,gfx950:8"}):
        yield standin(), RocmBackend()
        standin().reset()


def binary(arch, name):
    (found,) = [v for v in installed_packages()[arch].variants if v.name == name.format(arch=arch)]
    return found.binary()


def test_devices_say_what_they_are(machine):
    _, loader = machine
    first, second = loader.devices()
    assert (first.arch, first.compute_units, first.index) == ("gfx942", 4, 0)
    assert (second.arch, second.compute_units, second.index) == ("gfx950", 8, 1)
    assert "interpreter, not a GPU" in first.name and "interpreter, not a GPU" in second.name


def test_doctor_shows_the_stand_in_for_what_it_is(machine, capsys):
    main(["doctor", "--json"])
    names = [device["name"] for device in json.loads(capsys.readouterr().out)["devices"]]
    assert len([name for name in names if "interpreter, not a GPU" in name]) == 2
    main(["doctor"])
    shown = " ".join(capsys.readouterr().out.split())
    assert all(shown.count(f"LLVM-IR interpreter, not a GPU ({arch})") >= 1 for arch in IR_ARCHS)


@pytest.mark.parametrize("arch", IR_ARCHS)
def test_explain_shows_the_stand_in_for_what_it_is(arch):
    """Whoever reads why a route was taken reads on what it ran."""
    indexer = ir_executor(arch, "lockstep").indexer(CacheLayout("bf16"), max_requests=1, max_seq_len=256)
    assert indexer.explain().startswith(f"route aot: LLVM-IR interpreter, not a GPU ({arch}) is {arch}; asked for\n")


def test_a_binary_of_another_architecture_is_refused(machine):
    _, loader = machine
    with pytest.raises(DriverError, match=r"hipModuleLoadData\(insert__gfx950__bf16\)") as error:
        loader.load(binary("gfx950", "insert__{arch}__bf16"), 0)
    assert error.value.name == "hipErrorNoBinaryForGpu"
    loader.load(binary("gfx950", "insert__{arch}__bf16"), 1)


def test_damaged_binaries_and_unknown_symbols_are_refused(machine):
    _, loader = machine
    good = binary("gfx942", "insert__{arch}__bf16")
    for image, name in ((b"\x7fELF", "hipErrorInvalidImage"), (flipped(good.image), "hipErrorNoBinaryForGpu")):
        with pytest.raises(DriverError) as error:  # of a code object that differs in one bit no IR is known
            loader.load(dataclasses.replace(good, image=image + bytes(64)), 0)
        assert error.value.name == name
    with pytest.raises(DriverError, match=r"hipModuleGetFunction\(inserted\)") as error:
        loader.load(dataclasses.replace(good, symbol="inserted"), 0)
    assert error.value.name == "hipErrorNotFound"


def flipped(image):
    return image[:-40] + bytes([image[-40] ^ 1]) + image[-39:]


class Inserts:
    """Four keys for a cache of two pages, visible to kernels while it is used."""

    def __init__(self, device, loader, arch="gfx942", index=0, **changes):
        self.device, self.layout = device, CacheLayout("bf16")
        self.cache, self.wanted = self.layout.empty(2, "cpu").zero_(), self.layout.empty(2, "cpu").zero_()
        self.keys = torch.randn(2, 4, 128, generator=torch.Generator().manual_seed(3)).bfloat16()
        self.slots = torch.tensor([[0, 5, 130, -1], [7, 200, 255, 5]])
        kernel = loader.load(dataclasses.replace(binary(arch, "insert__{arch}__bf16"), **changes), index)
        fixed = {"page_size": 128, "page_rows": 128, "segment_rows": 128, "shard": 0, "cache_ptr": self.cache}
        names = ("key_ptr", "slot_mapping_ptr", "stride_key", "stride_page", "num_tokens", "num_slots")
        self.bound = kernel.bind(fixed, names)

    def __enter__(self):
        for start, size in spans([self.cache, self.keys, self.slots]):
            self.device.check(self.device.hip.hipHostRegister(start, size, 0))
        return self

    def __exit__(self, *_):
        for start, _ in spans([self.cache, self.keys, self.slots]):
            self.device.hip.hipHostUnregister(start)

    def launch(self, which, keys=None, grid=1, stream=0):
        keys = self.keys[which] if keys is None else keys
        self.bound(grid, stream, keys, self.slots[which], 128, self.layout.page_bytes, 4, 256)

    def expect(self, *which):
        for one in which:
            insert_reference(self.layout, self.wanted, self.keys[one], self.slots[one])
        assert torch.equal(self.cache, self.wanted)


@pytest.mark.parametrize("arch,index", [("gfx942", 0), ("gfx950", 1)])
def test_queued_launches_keep_the_arguments_of_their_call(machine, arch, index):
    """The loader packs every launch's arguments into the same memory; nothing has run when it packs the next."""
    device, loader = machine
    device.check(device.hip.hipSetDevice(index))
    with Inserts(device, loader, arch, index) as inserts:
        inserts.launch(0)
        inserts.launch(1)
        assert not inserts.cache.any()
        device.check(device.hip.hipDeviceSynchronize())
        inserts.expect(0, 1)
    device.check(device.hip.hipSetDevice(0))


def test_streams_are_passed_on(machine):
    device, loader = machine
    hip = device.hip
    stream = device.check(hip.hipStreamCreate())
    with Inserts(device, loader) as inserts:
        inserts.launch(1, stream=int(stream))
        device.check(hip.hipStreamSynchronize(stream))
        inserts.expect(1)
    device.check(hip.hipStreamDestroy(stream))


def test_a_launch_outlives_what_made_it(machine):
    """Module, function and packed arguments live as long as the launch that uses them."""
    device, loader = machine
    with Inserts(device, loader) as inserts:
        gc.collect()
        inserts.launch(0)
        device.check(device.hip.hipDeviceSynchronize())
        inserts.expect(0)


def test_a_refused_launch_names_the_kernel_and_the_grid(machine):
    device, loader = machine
    with Inserts(device, loader) as inserts:
        with pytest.raises(DriverError, match=r"hipModuleLaunchKernel\(insert__gfx942__bf16, grid 0\)") as error:
            inserts.launch(0, grid=0)
        assert error.value.name == "hipErrorInvalidValue"
        inserts.launch(0)
        device.check(device.hip.hipDeviceSynchronize())
        inserts.expect(0)


def test_more_threads_than_a_kernel_was_compiled_for_are_refused(machine):
    """The bound comes from the IR; the launch is refused, the device goes on."""
    device, loader = machine
    with Inserts(device, loader, threads=2 * binary("gfx942", "insert__{arch}__bf16").threads) as inserts:
        with pytest.raises(DriverError, match=r"hipModuleLaunchKernel\(insert__gfx942__bf16, grid 1\)") as error:
            inserts.launch(0)
        assert error.value.name == "hipErrorLaunchFailure"
        device.check(device.hip.hipDeviceSynchronize())


def test_a_kernel_that_takes_parameters_must_get_some(machine):
    device, _ = machine
    good = binary("gfx942", "insert__{arch}__bf16")
    module = device.check(device.hip.hipModuleLoadData(good.image))
    kernel = device.check(device.hip.hipModuleGetFunction(module, good.symbol.encode()))
    launched = device.hip.hipModuleLaunchKernel(
        kernel, 1, 1, 1, good.threads, 1, 1, good.shared_bytes, None, None, None
    )
    assert int(launched[0]) == 1
    device.check(device.hip.hipModuleUnload(module))


def test_a_fault_fails_the_device_like_a_real_one(machine):
    """A key tensor that is not visible: the launch is accepted, its failure comes later and stays."""
    device, loader = machine
    with Inserts(device, loader) as inserts:
        inserts.launch(0, keys=inserts.keys[0].clone())
        assert int(device.hip.hipDeviceSynchronize()[0]) == 700
        with pytest.raises(DriverError, match="hipErrorIllegalAddress"):
            inserts.launch(0)
        # where the wild address lies among the visible tensors differs from run to run
        assert any(words in str(device.trap) for words in ("no such memory", "below all memory", "beyond a range"))
        device.reset()


def test_an_address_that_breaks_the_promised_alignment_traps(machine):
    """The argument's type promises 16 bytes to the compiler: a violated promise is a fault of the caller."""
    device, loader = machine
    with Inserts(device, loader) as inserts:
        inserts.launch(0, keys=inserts.keys.view(-1)[4:516].view(4, 128))
        with pytest.raises(Trap, match="not aligned to 16 bytes"):
            device.check(device.hip.hipDeviceSynchronize())

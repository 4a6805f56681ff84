# SPDX-License-Identifier: Apache-2.0
"""Devices, streams, events, modules and launches of the stand-in; a scenario is the argument of this script."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from ctypes import c_int64, c_void_p

from hip_standin.process import (
    IMAGE,
    OTHER_IMAGE,
    PATHS,
    POISON,
    Fake,
    call,
    cell,
    cells,
    code,
    copy,
    fail,
    function,
    hip,
    launch,
    lib,
    malloc,
    meet,
    ok,
    ranges,
    store,
)


def no_devices():
    assert code(hip.hipGetDeviceCount(), hip.hipMalloc(8), hip.hipInit(0), hip.hipSetDevice(0)) == 100
    assert code(hip.hipGetLastError(), hip.hipGetLastError()) == [100, 0]
    for wrong in ("gfx1100", "gfx942:0", "gfx942:x", "gfx942,", ",gfx942", "gfx942;gfx942"):
        os.environ["BLOCKPICK_STANDIN_DEVICES"] = wrong
        assert code(hip.hipGetDeviceCount(), hip.hipMalloc(8)) == 3, wrong
    os.environ["BLOCKPICK_STANDIN_DEVICES"] = "gfx950"
    assert ok(hip.hipGetDeviceCount()) == 1


def devices():
    assert ok(hip.hipGetDeviceCount()) == 2 and 7 * 10**7 <= ok(hip.hipRuntimeGetVersion()) < 8 * 10**7
    for index, (arch, units, shared) in enumerate((("gfx942", 4, 64 << 10), ("gfx950", 8, 160 << 10))):
        p = ok(hip.hipGetDeviceProperties(index))
        assert (p.name, p.gcnArchName) == (f"LLVM-IR interpreter, not a GPU ({arch})", f"{arch}:sramecc+:xnack-")
        assert (p.multiProcessorCount, p.sharedMemPerBlock, p.warpSize) == (units, shared, 64)
        assert (p.maxThreadsPerBlock, p.maxThreadsDim[0], p.totalGlobalMem) == (1024, 1024, 16 << 30)
        assert p.unifiedAddressing == p.concurrentKernels == p.hostRegisterSupported == p.isLargeBar == 1
        assert (p.maxThreadsPerMultiProcessor, p.sharedMemPerBlockOptin, p.pciBusID) == (2048, shared, index + 1)
        assert (p.major, p.minor, p.maxSharedMemoryPerMultiProcessor) == (9, int(arch[4]), shared)
        attributes = {"WarpSize": 64, "MultiprocessorCount": units, "MaxSharedMemoryPerBlock": shared,
                      "UnifiedAddressing": 1, "MaxThreadsPerBlock": 1024, "HostRegisterSupported": 1,
                      "VirtualMemoryManagementSupported": 1, "ComputeCapabilityMinor": int(arch[4]),
                      "FineGrainSupport": 1, "PhysicalMultiProcessorCount": units, "MaxGridDimY": 65536}  # fmt: skip
        for name, value in attributes.items():
            attribute = hip.hipDeviceAttribute_t["hipDeviceAttribute" + name]
            assert ok(hip.hipDeviceGetAttribute(attribute, index)) == value, name
    assert code(hip.hipSetDevice(2), hip.hipSetDevice(-1), hip.hipGetDeviceProperties(2)) == 101
    ok(hip.hipSetDevice(1))
    seen = []
    thread = threading.Thread(target=lambda: seen.append(ok(hip.hipGetDevice())))
    thread.start()
    thread.join()
    assert (seen, ok(hip.hipGetDevice())) == ([0], 1)
    os.environ["BLOCKPICK_STANDIN_DEVICES"] = "gfx950:2"
    assert ok(hip.hipGetDeviceCount()) == 1 and code(hip.hipGetDevice()) == 101
    for error in hip.hipError_t:
        assert str(ok(hip.hipGetErrorString(error))).startswith("stand-in: ")
        assert str(ok(hip.hipGetErrorName(error))) in (error.name, "hipErrorUnknown")


def peers():
    assert [ok(hip.hipDeviceCanAccessPeer(0, i)) for i in (0, 1)] == [0, 1]
    results = [hip.hipDeviceDisablePeerAccess(1), *(hip.hipDeviceEnablePeerAccess(1, 0) for _ in "12")]
    assert code(*results) == [705, 0, 704] and code(hip.hipDeviceDisablePeerAccess(1)) == 0
    assert code(hip.hipDeviceEnablePeerAccess(0, 0), hip.hipDeviceCanAccessPeer(0, 2)) == 101


def loader():
    from blockpick.backend_api import Argument, KernelBinary
    from blockpick_rocm import RocmBackend

    class Memory:
        def data_ptr(self):
            return where

    found = RocmBackend().devices()
    assert [(d.arch, d.compute_units) for d in found] == [("gfx942", 4), ("gfx950", 4)]
    assert "not a GPU" in found[0].name and found[0].memory_bytes == 16 << 30
    fake, arguments = Fake(store), (Argument("a_ptr", "*i64"), Argument("n", "i64"))
    kernel = RocmBackend().load(KernelBinary("store", "store", OTHER_IMAGE, arguments, 256, 512, 0, False), 1)
    assert fake.images == [OTHER_IMAGE] and ok(hip.hipGetDevice()) == 0
    ok(hip.hipSetDevice(1))
    where = malloc(8)
    kernel.bind({}, ("a_ptr", "n"))(3, 0, Memory(), 77)
    ok(hip.hipDeviceSynchronize())
    assert (cells(where), fake.shapes) == ([77], [([3, 1, 1], [256, 1, 1], 512, 1)])


def streams():
    Fake(store)
    stores, stream, where, other = function("store"), ok(hip.hipStreamCreate()), malloc(8), malloc(8)
    ok(hip.hipMemsetAsync(where, 0, 8, stream))
    data, back = bytearray(c_int64(42)), bytearray(8)
    assert launch(stores, where, 41, stream) == copy(other, where, 8, stream) == copy(where, data, 8, stream) == 0
    data[:] = bytes(8)  # a source that is not registered is read at the call
    assert cells(where, other) == [POISON] * 2  # nothing ran
    assert code(*(hip.hipStreamQuery(stream) for _ in range(5))) == [600, 600, 600, 0, 0]
    assert cells(where, other) == [42, 41]
    assert launch(stores, where, 43, stream) == copy(back, where, 8, stream) == 0
    assert back == bytes(c_int64(43))  # a destination that is not registered is written before the call returns
    assert launch(stores, where, 44, stream) == 0
    ok(hip.hipStreamDestroy(stream))  # drains
    assert cells(where) == [44] and launch(stores, where, 1, stream) == 709
    assert code(hip.hipStreamSynchronize(stream), hip.hipStreamDestroy(stream), hip.hipStreamQuery(c_void_p(9))) == 709
    assert code(hip.hipStreamCreateWithFlags(2), hip.hipStreamDestroy(None)) == [1, 400]
    ok(hip.hipStreamDestroy(ok(hip.hipStreamCreateWithPriority(1, -1))))
    ok(hip.hipHostRegister(data, 8, 0))
    assert launch(stores, where, 45) == copy(data, where) == 0 and data == bytes(8)
    ok(hip.hipHostUnregister(data))  # drains too
    assert data == bytes(c_int64(45))


def null_stream():
    Fake(store, meet)
    stores, meets, where, other = function("store"), function("meet"), malloc(32), malloc(8)
    blocking, free = ok(hip.hipStreamCreate()), ok(hip.hipStreamCreateWithFlags(1))
    assert launch(stores, other, 7, blocking) == copy(where, other) == 0  # the copy waits for the kernel,
    assert launch(stores, other, 8, blocking) == 0 and code(hip.hipStreamQuery(None)) == 600  # and this for the copy
    assert launch(stores, other, 9) == copy(where + 8, other, 8, blocking) == 0  # the same, the other way round
    ok(hip.hipStreamSynchronize(None))
    assert cells(where, where + 8) == [7, 9]
    ok(hip.hipMemset(where, 0, 32))
    assert launch(meets, where, 0) == launch(meets, where, 1, free) == 0  # not behind the null stream
    ok(hip.hipDeviceSynchronize())
    assert cells(where + 16, where + 24) == [1, 1]


def events():
    Fake(store)
    stores, where, other = function("store"), malloc(8), malloc(8)
    first, second = (ok(hip.hipStreamCreate()) for _ in "12")
    begin, end, quiet = (ok(hip.hipEventCreateWithFlags(flags)) for flags in (0, 0, 2))
    assert code(hip.hipEventQuery(begin), hip.hipEventSynchronize(begin)) == 0  # never recorded
    assert code(hip.hipEventElapsedTime(begin, end)) == 400
    ok(hip.hipEventRecord(begin, first))
    assert launch(stores, where, 5, first) == 0
    ok(hip.hipEventRecord(end, first))
    ok(hip.hipStreamWaitEvent(second, end, 0))
    assert launch(stores, where, 6, first) == 0
    ok(hip.hipEventRecord(end, first))  # later than the wait, which stays with the first record
    assert copy(other, where, 8, second) == 0
    assert code(hip.hipEventElapsedTime(begin, end), hip.hipEventQuery(end)) == 600
    ok(hip.hipStreamSynchronize(second))
    assert cells(other) == [5]
    ok(hip.hipEventSynchronize(end))
    assert cells(where) == [6] and ok(hip.hipEventElapsedTime(begin, end)) >= 0
    ok(hip.hipEventRecord(quiet, first))
    ok(hip.hipEventSynchronize(quiet))
    assert code(hip.hipEventElapsedTime(begin, quiet), hip.hipEventCreateWithFlags(8)) == [400, 1]
    ok(hip.hipSetDevice(1))
    assert code(hip.hipEventRecord(end, None)) == 400  # the event and the stream are of different devices
    assert code(hip.hipEventDestroy(end), hip.hipEventDestroy(end), hip.hipEventQuery(end)) == [0, 709, 400]


def mutual():
    Fake(meet)
    meets, where, one, two = function("meet"), malloc(32), ok(hip.hipStreamCreate()), ok(hip.hipStreamCreate())
    assert launch(meets, where, 0, one) == launch(meets, where, 1, two) == 0
    assert code(hip.hipStreamSynchronize(one), hip.hipStreamSynchronize(two)) == 0
    assert cells(where + 16, where + 24) == [1, 1]
    ok(hip.hipMemset(where, 0, 32))
    assert launch(meets, where, 0) == code(hip.hipSetDevice(1)) == launch(function("meet"), where, 1) == 0
    ok(hip.hipDeviceSynchronize())  # for one of the two devices
    assert cells(where + 24) == [1]


def threads():
    def long(where, turns):
        for _ in range(turns):
            yield time.sleep(0)  # lets the other threads try
        cell(where).value = turns

    def work(index):
        stream, where = ok(hip.hipStreamCreate()), malloc(8)
        for turns in range(1, 40):
            assert launch(longs, where, turns, stream) == code(hip.hipFree(malloc(64 + index))) == 0
            ok(hip.hipStreamSynchronize(stream))
            assert cells(where) == [turns]
        finished.append(code(hip.hipStreamDestroy(stream)))

    Fake(long)
    longs, finished = function("long"), []
    running = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(4)]
    for act in (threading.Thread.start, lambda thread: thread.join(120)):
        for thread in running:
            act(thread)
    assert finished == [0] * 4


def modules():
    assert code(hip.hipModuleLoadData(IMAGE)) == 801  # no interpreter
    fake, where = Fake(store), malloc(8)
    for offset, patch in {0: b"X", 4: b"\1", 18: b"\x3e", 58: b"\x20", 40: bytes(8)}.items():  # parts of the header
        assert code(hip.hipModuleLoadData(IMAGE[:offset] + patch + IMAGE[offset + len(patch) :])) == 200, offset
    assert code(hip.hipModuleLoadData(b"no code object"), hip.hipModuleLoadData(OTHER_IMAGE)) == [200, 209]
    module = ok(hip.hipModuleLoad(str(PATHS[0]).encode()))
    assert code(hip.hipModuleLoadData(IMAGE + bytes(9))) == 0 and fake.images == [IMAGE] * 2  # of the right size
    assert code(hip.hipModuleLoad(b"missing"), hip.hipModuleUnload(None)) == [301, 400]
    assert code(*(hip.hipModuleGetFunction(module, name) for name in (b"missing", b""))) == [500, 1]
    stores = ok(hip.hipModuleGetFunction(module, b"store"))
    assert launch(stores, where, 3) == 0
    ok(hip.hipModuleUnload(module))  # drains
    assert (cells(where), fake.unloaded, launch(stores, where, 4)) == ([3], [1], 400)
    assert code(hip.hipModuleUnload(module), hip.hipModuleGetFunction(module, b"store")) == 500


def launches():
    def bare():
        yield

    fake, where, stream, extra = Fake(store, bare), malloc(8), ok(hip.hipStreamCreate()), ctypes.addressof(c_void_p())
    stores = function("store")
    for bad in ({"grid": 0}, {"block": 0}, {"block": 1025}, {"grid": 1 << 30}, {"grid": 1 << 31, "block": 1},
                {"gy": 65537}, {"gz": 65537}, {"shared": (64 << 10) + 1}):  # fmt: skip
        assert launch(stores, where, 1, **bad) == 1, bad
    assert launch(None, where, 1) == launch(stream, where, 1) == launch(c_void_p(8), where, 1) == 400
    some = ("hipModuleLaunchKernel", stores.as_c_void_p(), 1, 1, 1, 1, 1, 1, 0, None)
    assert (call(*some, None, extra), call(*some, extra, extra), call(*some, None, None)) == (801, 1, 1)
    for many in ({"block": 257}, {"block": 128, "by": 3}):  # of more than Fake.MAX_THREADS; the device goes on
        assert launch(stores, where, 1, **many) == 719 and code(hip.hipDeviceSynchronize()) == 0, many
    assert launch(stores, where, 1, block=128, by=2) == 801 and fake.shapes == []
    bares = function("bare").as_c_void_p()
    assert call("hipModuleLaunchKernel", bares, 1, 1, 1, 1, 1, 1, 0, None, None, None) == 0
    assert launch(stores, where, 1, block=256, gy=65536, gz=65536) == code(hip.hipDeviceSynchronize()) == 0
    assert [shape[:2] for shape in fake.shapes] == [([1] * 3, [1] * 3), ([1, 65536, 65536], [256, 1, 1])]
    ok(hip.hipSetDevice(1))
    assert (launch(stores, where, 1), launch(stores, where, 1, stream), len(fake.shapes)) == (101, 400, 2)
    assert launch(stores, where, 1, block=257) == 101 and call(*some, None, None) == 1  # the order of the checks


def sticky():
    fake, stream, where, event = Fake(store, fail), ok(hip.hipStreamCreate()), malloc(8), ok(hip.hipEventCreate())
    stores, fails = function("store"), function("fail")
    assert launch(fails, where, 0, stream) == launch(stores, where, 1, stream) == launch(stores, where, 2) == 0
    ok(hip.hipEventRecord(event, stream))
    assert code(hip.hipStreamSynchronize(stream)) == 700
    assert (sorted(fake.dropped), cells(where)) == ([2, 3], [POISON])
    assert code(hip.hipMalloc(8), hip.hipFree(where), hip.hipDeviceSynchronize(), hip.hipStreamQuery(stream),
                hip.hipEventQuery(event), hip.hipStreamCreate(), hip.hipMemset(where, 0, 8), hip.hipGetLastError(),
                hip.hipGetLastError(), hip.hipModuleLoadData(IMAGE), hip.hipGetDevice()) == 700  # fmt: skip
    assert launch(stores, where, 3) == 700 and code(hip.hipSetDevice(1)) == 0  # the other device goes on
    assert code(hip.hipMemset(where, 0, 8)) == 0
    assert code(hip.hipStreamSynchronize(stream), hip.hipEventSynchronize(event)) == 700
    lib.standin_reset()
    assert code(hip.hipSetDevice(0), hip.hipGetLastError()) == launch(stores, where, 9, stream) == 0
    ok(hip.hipStreamSynchronize(stream))
    assert cells(where) == [9] and launch(stores, where, 10, stream) == launch(stores, where, 11) == 0
    lib.standin_reset()  # drops queued work
    ok(hip.hipDeviceSynchronize())
    assert cells(where) == [9] and len(fake.dropped) == 4 and launch(stores, where, 12, stream) == 0
    ok(hip.hipDeviceReset())
    assert ranges() == {} and len(fake.dropped) == 5 and code(hip.hipStreamSynchronize(stream)) == 709


def interpreters():
    """Callbacks that call what they may not, give no id or no error number, or are gone."""

    def curious(where, value):
        seen.append(len(ranges()))
        seen.append(code(hip.hipDeviceSynchronize(), hip.hipFree(where), hip.hipModuleLoadData(IMAGE)))
        yield seen.append(launch(curiosity, 0, 0))

    fake, seen, where = Fake(curious), [], malloc(8)
    curiosity = function("curious")
    assert launch(curiosity, where, 0) == code(hip.hipDeviceSynchronize()) == 0 and seen == [1, 401, 401]
    for answer in (0, 1234567, 209):
        load = ctypes.CFUNCTYPE(*Fake.SIGNATURES[0])(lambda *_: answer)
        fake.table[0] = ctypes.cast(load, c_void_p).value
        lib.standin_install(fake.table)
        assert code(hip.hipModuleLoadData(IMAGE)) == {209: 209}.get(answer, 999)
    assert launch(curiosity, where, 0) == 0
    lib.standin_install(None)
    assert code(hip.hipDeviceSynchronize()) == 700


if __name__ == "__main__":
    globals()[sys.argv[1]]()

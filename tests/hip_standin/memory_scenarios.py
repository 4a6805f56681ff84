# SPDX-License-Identifier: Apache-2.0
"""Memory of the stand-in, in one process and between two; a scenario is the argument of this script."""

from __future__ import annotations

import ast
import ctypes
import os
import socket
import subprocess
import sys
from ctypes import byref, c_int, c_int64, c_size_t, c_void_p

from hip_standin.counts import counts
from hip_standin.process import POISON, call, cell, cells, code, copy, hip, lib, malloc, ok, ranges


def memory():
    where, host = malloc(100), malloc(9, "hipHostMalloc", 0)
    assert ctypes.string_at(where, 100) == b"\xa5" * 100 and ctypes.string_at(host, 9) == b"\xa5" * 9
    assert ranges() == {where: (100, 1), host: (9, 3)}
    assert code(*(hip.hipExtMallocWithFlags(8, flags) for flags in (0, 1, 2, 3, 9))) == [0, 0, 1, 0, 1]
    assert code(hip.hipMalloc(1 << 40)) == 2 and call("hipMalloc", None, 8) == 1
    base, size = c_void_p(), c_size_t()
    assert call("hipMemGetAddressRange", byref(base), byref(size), where + 99) == 0
    assert (base.value, size.value) == (where, 100)
    assert call("hipMemGetAddressRange", None, None, where + 100) == 500
    kind, data, back = hip.hipMemcpyKind, bytearray(range(100)), bytearray(100)
    ok(hip.hipMemcpy(where, data, 100, kind.hipMemcpyHostToDevice))
    ok(hip.hipMemcpy(back, where, 100, kind.hipMemcpyDeviceToHost))
    assert back == data
    assert copy(where, bytes(101), 101) == copy(where + 1, where, 100) == 1  # beyond the exact size
    assert call("hipMemcpy", where, where, 1, 7) == 21
    ok(hip.hipMemset(where, 3, 99))
    assert ctypes.string_at(where, 100) == b"\3" * 99 + bytes([99])
    assert code(hip.hipMemset(where, 3, 101), hip.hipMemset(data, 3, 1)) == 1
    assert call("hipMemsetD32", where, 0x01020304, 2) == call("hipMemsetD8", where + 8, 5, 1) == 0
    assert ctypes.string_at(where, 9) == b"\4\3\2\1" * 2 + b"\5"
    assert code(hip.hipFree(where + 8), hip.hipFree(data)) == 1 and code(hip.hipFree(None), hip.hipFree(where)) == 0
    assert code(hip.hipFree(where)) == 1 and where not in ranges()


def registered():
    data = (c_int64 * 4)()
    where = ctypes.addressof(data)
    big = bytearray(33 << 20)
    assert code(hip.hipHostRegister(big, len(big), 0), hip.hipHostUnregister(big)) == 0
    assert code(hip.hipHostRegister(big, 1 << 46, 0)) == 1  # not all of it is mapped
    assert ok(hip.hipPointerGetAttributes(where)).device == -2
    assert code(hip.hipHostGetDevicePointer(where, 0), hip.hipHostRegister(16, 8, 0)) == 1
    ok(hip.hipHostRegister(where, 32, 0))
    assert ranges() == {where: (32, 2)}
    assert code(hip.hipHostRegister(where, 32, 0), hip.hipHostRegister(where + 8, 8, 0)) == 712
    assert ok(hip.hipHostGetDevicePointer(where + 8, 0)).as_c_void_p().value == where + 8
    attributes, version = ok(hip.hipPointerGetAttributes(where + 8)), lib.standin_ranges_version()
    assert (attributes.device, int(attributes.type)) == (0, 1)
    assert code(hip.hipHostUnregister(where + 8)) == 713 and lib.standin_ranges_version() == version
    assert code(hip.hipHostUnregister(where), hip.hipHostUnregister(where)) == [0, 713]
    assert lib.standin_ranges_version() != version


PROPERTIES = (c_int * 8)(1, 1, 1, 0)  # pinned, to be exported as a descriptor, on device 0
ACCESS, NO_ACCESS, STEP = (c_int * 3)(1, 0, 3), (c_int * 3)(1, 0, 0), 2 << 20


def made(name, *values):
    """What a function writes behind its first argument."""
    out = c_void_p()
    assert call(name, byref(out), *values) == 0
    return out.value


def reserve_and_map(handle):
    where = made("hipMemAddressReserve", 2 * STEP, 0, None, 0)
    assert call("hipMemMap", where, STEP, 0, handle, 0) == 0
    return where


def virtual_memory():
    assert made("hipMemGetAllocationGranularity", PROPERTIES, 0) == STEP
    assert call("hipMemCreate", byref(c_void_p()), 4096, PROPERTIES, 0) == 1
    handle = made("hipMemCreate", STEP, PROPERTIES, 0)
    where = reserve_and_map(handle)
    assert ranges() == {} and code(hip.hipMemset(where, 0, 8)) == 999  # mapped, without access
    assert call("hipMemMap", where, STEP, 0, handle, 0) == call("hipMemMap", where + 1, STEP, 0, handle, 0) == 1
    assert call("hipMemSetAccess", where, 2 * STEP, ACCESS, 1) == 1  # half of it is not mapped
    assert call("hipMemMap", where + STEP, STEP, 0, handle, 0) == 0
    assert call("hipMemSetAccess", where, 2 * STEP, ACCESS, 1) == 0
    assert ranges() == {where: (STEP, 5), where + STEP: (STEP, 5)} and cells(where) == [POISON]
    assert code(hip.hipMemset(where, 1, 2 * STEP), hip.hipMemset(where, 7, 1)) == 0  # over both mappings
    assert ctypes.string_at(where + STEP, 2) == b"\7\1"  # the same memory twice
    assert (call("hipMemRelease", handle), call("hipMemRelease", handle)) == (0, 1)
    assert call("hipMemMap", where, STEP, 0, handle, 0) == call("hipMemAddressFree", where, 2 * STEP) == 1
    assert call("hipMemSetAccess", where, STEP, NO_ACCESS, 1) == 0 and list(ranges()) == [where + STEP]
    assert [call("hipMemUnmap", where, 2 * STEP) for _ in "12"] == [0, 1]
    assert [call("hipMemAddressFree", where, 2 * STEP) for _ in "12"] == [0, 1] and counts() == [0, 0]


def export(where):
    return ok(hip.hipIpcGetMemHandle(where)).reserved


def attach(handle, flags=1):
    """Open an IPC handle: the address, or the error number negated."""
    error, where = hip.hipIpcOpenMemHandle(bytes(handle), flags)
    return -int(error) if error else where.as_c_void_p().value


def import_fd(link):
    """Receive a descriptor, map it, read 8 bytes and write the next 8."""
    with socket.socket(fileno=link) as connection:
        fd = socket.recv_fds(connection, 1, 1)[1][0]
    where = reserve_and_map(made("hipMemImportFromShareableHandle", fd, 1))
    os.close(fd)
    assert call("hipMemSetAccess", where, STEP, ACCESS, 1) == 0
    cell(where + 8).value = 22
    return cell(where).value


class Peer:
    """Another process with this file's functions, until the end of a with block."""

    def __init__(self, *descriptors):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "pass_fds": descriptors}
        self.process = subprocess.Popen([sys.executable, "-m", "hip_standin.memory_scenarios", "peer"], **pipes)

    def __call__(self, name, *values):
        print(f"{name}(*{values})", file=self.process.stdin, flush=True)
        return ast.literal_eval(self.process.stdout.readline())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.communicate()


def peer():
    for line in sys.stdin:
        print(repr(eval(line)), flush=True)


def ipc():
    with Peer() as other:
        theirs = other("malloc", 5000)
        handle = other("export", theirs)
        ours = attach(handle)
        assert ranges() == {ours: (5000, 4)} and cells(ours) == [POISON]
        assert other("call", "hipMemset", theirs, 1, 4096) == 0 and cells(ours) == [0x0101010101010101]
        cell(ours + 4992).value = 12
        assert other("cells", theirs + 4992) == [12] and attach(handle) == ours  # counted
        assert other("call", "hipFree", theirs) == 0 and cells(ours + 4992) == [12]  # our mapping keeps it
        assert code(hip.hipFree(ours), hip.hipIpcGetMemHandle(ours)) == 1
        assert code(*(hip.hipIpcCloseMemHandle(ours) for _ in "123")) == [0, 0, 1] and counts() == [0, 0]
        mine = malloc(64)
        there = other("attach", export(mine))
        assert other("call", "hipMemset", there, 0, 8) == other("call", "hipIpcCloseMemHandle", there) == 0
        assert cells(mine, mine + 8) == [0, POISON]


def ipc_refused():
    mine, host = malloc(64), malloc(64, "hipHostMalloc", 0)
    assert attach(export(mine)) == -201
    assert code(*(hip.hipIpcGetMemHandle(where) for where in (mine + 8, host, 8))) == 1
    with Peer() as other:
        theirs = other("malloc", 64)
        good = other("export", theirs)
        assert attach(good, flags=0) == -1
        for position in range(64):
            bad = bytes(byte ^ 64 * (i == position) for i, byte in enumerate(good))
            assert attach(bad) == attach(good[:position] + bytes(64 - position)) == -1, position
        assert other("call", "hipFree", theirs) == 0 and attach(good) == -400
        again = other("export", other("malloc", 64))
        assert again[12:16] == good[12:16]  # the same descriptor number for other memory
        assert attach(good) == -400 and attach(again) > 0
        living = other("export", other("malloc", 64))
    assert attach(living) == -400 and len(ranges()) == 3  # the exporter is gone; what was opened stays


def shared_fd():
    handle, fd, ends = made("hipMemCreate", STEP, PROPERTIES, 0), c_int(), socket.socketpair()
    where = reserve_and_map(handle)
    assert call("hipMemSetAccess", where, STEP, ACCESS, 1) == 0
    cell(where).value = 21
    assert [call("hipMemExportToShareableHandle", byref(fd), handle, kind, 0) for kind in (8, 1)] == [1, 0]
    with ends[0], ends[1], Peer(ends[1].fileno()) as other:
        socket.send_fds(ends[0], [b"x"], [fd.value])
        assert other("import_fd", ends[1].fileno()) == 21
    assert cells(where + 8) == [22]
    os.close(fd.value)
    for wrong in (fd.value, 0, 1, 1 << 31):  # closed, null, not a stand-in's, out of range
        assert call("hipMemImportFromShareableHandle", byref(c_void_p()), wrong, 1) == 1


def leaks():
    with Peer() as other:
        for _ in range(100):
            theirs = other("malloc", 4096)
            ours = attach(other("export", theirs))
            assert code(hip.hipIpcCloseMemHandle(ours)) == other("call", "hipFree", theirs) == 0
            handle, fd = made("hipMemCreate", STEP, PROPERTIES, 0), c_int()
            where = reserve_and_map(handle)
            assert call("hipMemExportToShareableHandle", byref(fd), handle, 1, 0) == 0
            imported = made("hipMemImportFromShareableHandle", fd.value, 1)
            os.close(fd.value)
            assert call("hipMemRelease", imported) == call("hipMemRelease", handle) == 0
            assert call("hipMemUnmap", where, STEP) == call("hipMemAddressFree", where, 2 * STEP) == 0
        assert counts() == other("counts") == [0, 0] and ranges() == {}


if __name__ == "__main__":
    globals()[sys.argv[1]]()

# SPDX-License-Identifier: Apache-2.0
"""Peer memory of the ROCm backend over the stand-in, in one process and between two; a scenario is the argument of this
script.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from contextlib import contextmanager

from hip_standin.counts import counts
from hip_standin.process import Fake, cell, code, function, hip, launch, ok, ranges, store

from blockpick.errors import DriverError, PeerError
from blockpick_rocm.peer import HANDLE_BYTES, RocmPeerMemory

SIZE = 2 << 20


@contextmanager
def refused(error, *parts):
    """Within, an error of this type is raised whose text has these parts."""
    try:
        yield
    except error as caught:
        assert all(part in str(caught) for part in parts), caught
    else:
        raise AssertionError(f"no {error.__name__}")


class Peer:
    """Another process with its own peer memory, until the end of a with block."""

    def __enter__(self):
        command = [sys.executable, "-m", "backends.rocm_peer_scenarios", "peer"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __call__(self, expression):
        print(expression, file=self.process.stdin, flush=True)
        return ast.literal_eval(self.process.stdout.readline())

    def __exit__(self, *_):
        self.process.communicate()


def peer():
    """Evaluate what comes in, with ``memory`` and a list of what is ``held``."""
    names = {"memory": RocmPeerMemory(0), "held": [], "counts": counts, "SIZE": SIZE}
    for line in sys.stdin:
        print(repr(eval(line, names)), flush=True)


def export(other):
    """The handle of a new allocation of the other process."""
    return other("held.append(memory.allocate(SIZE, 'ipc')) or held[-1].payload")


def allocation():
    memory = RocmPeerMemory(0)
    assert memory.identity == "PCI-0000:01:00" and RocmPeerMemory(1).identity == "PCI-0000:02:00" and not memory.proven
    assert memory.kinds() == ("ipc",) and counts() == [0, 0]
    made = memory.allocate(SIZE, "ipc")
    assert list(ranges().values()) == [(SIZE, 1)] and len(made.payload) == HANDLE_BYTES and made.descriptor is None
    assert memory.read(made.address, SIZE) == bytes(SIZE)  # new memory of the stand-in is poisoned
    memory.write(made.address + 8, b"words")
    assert memory.read(made.address + 7, 8) == b"\0words\0\0"
    made.close()
    with refused(DriverError, "hipFree", "hipErrorInvalidValue"):
        made.close()
    with refused(DriverError, "hipExtMallocWithFlags", "hipErrorOutOfMemory"):
        memory.allocate(1 << 40, "ipc")
    assert counts() == [0, 0] and ranges() == {}


def current_device():
    ok(hip.hipSetDevice(1))
    memory = RocmPeerMemory(0)
    made, word = memory.allocate(SIZE, "ipc"), memory.host_word()
    assert ok(hip.hipGetDevice()) == 1 and ok(hip.hipPointerGetAttributes(made.address)).device == 0
    with refused(DriverError, "hipFree"), memory.current():
        made.close()
        made.close()
    word.close()
    assert ok(hip.hipGetDevice()) == 1


def opened_twice():
    memory = RocmPeerMemory(0)
    with Peer() as other:
        payload = export(other)
        first, second = (memory.open("ipc", payload, SIZE, None) for _ in "12")
        assert first.address == second.address and len(ranges()) == 1 and counts()[1] == 1
        memory.write(first.address, b"12345678")
        assert other("memory.read(held[0].address, 8)") == b"12345678"
        assert other("memory.write(held[0].address + 8, b'87654321')") is None
        assert memory.read(second.address, 16) == b"1234567887654321"
        first.close()
        assert memory.read(second.address, 8) == b"12345678"  # counted: still mapped
        second.close()
        assert counts() == [0, 0] and ranges() == {}
        third = memory.open("ipc", payload, SIZE, None)
        third.close()
        assert other("held.pop().close() or counts()") == [0, 0] and counts() == [0, 0]


def bad_handles():
    memory = RocmPeerMemory(0)
    own = memory.allocate(SIZE, "ipc")
    for payload in (b"", own.payload[:-1], own.payload + b"\0"):
        with refused(PeerError, f"HIP's handle has 64 bytes, got {len(payload)}"):
            memory.open("ipc", payload, SIZE, None)
    with refused(DriverError, "hipIpcOpenMemHandle", "hipErrorInvalidContext"):
        memory.open("ipc", own.payload, SIZE, None)  # exported by this process
    with Peer() as other:
        payload = export(other)
        for place in range(0, HANDLE_BYTES, 7):
            changed = bytes(byte ^ (i == place) for i, byte in enumerate(payload))
            with refused(DriverError, "hipIpcOpenMemHandle", "hipErrorInvalidValue"):
                memory.open("ipc", changed, SIZE, None)
        assert other("held.pop().close()") is None
        with refused(DriverError, "hipIpcOpenMemHandle", "hipErrorInvalidHandle"):
            memory.open("ipc", payload, SIZE, None)
    own.close()
    assert counts() == [0, 0] and ranges() == {}


def spin(where, value):
    """Wait for a word, then store another behind it."""
    while cell(where).value != value:
        yield
    cell(where + 8).value = value + 1


def function_of(kernel):
    """A kernel of the stand-in's interpreter in Python."""
    Fake(kernel)
    return function(kernel.__name__)


def beside_a_kernel():
    memory = RocmPeerMemory(0)
    made, word = memory.allocate(SIZE, "ipc"), memory.host_word()
    assert launch(function_of(spin), made.address, 5) == 0
    assert code(hip.hipStreamQuery(None)) == 600  # it runs
    assert memory.read(made.address, 16) == bytes(16)  # and is not waited for
    memory.write(made.address, (5).to_bytes(8, "little"))
    ok(hip.hipDeviceSynchronize())
    assert memory.read(made.address + 8, 8) == (6).to_bytes(8, "little")
    assert word.read() == 0 and ranges()[word.argument.data_ptr()] == (8, 3)
    word.close()
    made.close()
    assert ranges() == {}


def host_word():
    word = RocmPeerMemory(0).host_word()
    assert word.read() == 0  # new memory of the stand-in is poisoned
    assert launch(function_of(store), word.argument.data_ptr(), 7 << 32 | 1) == 0
    ok(hip.hipDeviceSynchronize())
    assert word.read() == 7 << 32 | 1
    word.close()
    with refused(DriverError, "hipHostFree"):
        word.close()
    assert ranges() == {}


if __name__ == "__main__":
    globals()[sys.argv[1]]()

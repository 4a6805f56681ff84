# SPDX-License-Identifier: Apache-2.0
"""What a backend package offers the runtime: find devices, turn a binary into something that launches.

Backends are found through the entry point group ``blockpick.backends``; the runtime never imports one by name.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

ENTRY_POINT_GROUP = "blockpick.backends"
Value = Any  # a tensor (anything with ``data_ptr()``) for a pointer argument, a number for the others


@dataclass(frozen=True)
class DeviceInfo:
    """One accelerator as its driver describes it."""

    vendor: str
    index: int
    arch: str
    name: str
    compute_units: int
    memory_bytes: int
    driver: str


@dataclass(frozen=True)
class Argument:
    """One kernel argument: its name and Triton type (``*i32``, ``i32``, ``i64`` ...)."""

    name: str
    type: str

    @property
    def is_pointer(self) -> bool:
        """Whether the argument is an address."""
        return self.type.startswith("*")

    def word(self, value: Value) -> int:
        """The 8 bytes that a driver reads the argument from, as an integer."""
        if self.is_pointer:
            return int(value.data_ptr())
        return int(struct.unpack("<i", struct.pack("<f", value))[0]) if self.type == "fp32" else int(value)


@dataclass(frozen=True)
class KernelBinary:
    """A compiled kernel with everything a loader needs to launch it."""

    name: str
    symbol: str
    image: bytes
    arguments: tuple[Argument, ...]
    threads: int
    shared_bytes: int
    trailing_pointers: int
    pdl: bool


@dataclass(frozen=True)
class KernelSource:
    """A rendered kernel source with everything needed to compile or interpret it."""

    name: str
    symbol: str
    language: str
    text: str
    arguments: tuple[Argument, ...]
    divisible: Mapping[str, int]
    constexprs: Mapping[str, Any]
    options: Mapping[str, Any]
    warp_size: int


class Launch(Protocol):
    """A kernel with some arguments fixed. Owns its packed arguments: use it from one thread at a time."""

    def __call__(self, grid: int, stream: int, *dynamic: Value) -> None:
        """Launch ``grid`` programs on ``stream``; ``dynamic`` are the arguments named at ``bind``, in that order."""


class Kernel(Protocol):
    """A loaded kernel."""

    def bind(self, fixed: Mapping[str, Value], dynamic: Sequence[str]) -> Launch:
        """Fix some arguments and name the ones that come with every launch; together they must be all of them."""


@runtime_checkable
class BinaryLoader(Protocol):
    """A backend that loads compiled kernels through its vendor's driver."""

    vendor: str

    def devices(self) -> list[DeviceInfo]:
        """All visible devices; empty where there is no driver."""

    def load(self, binary: KernelBinary, device_index: int) -> Kernel:
        """Load ``binary`` on one device."""


@runtime_checkable
class SourceCompiler(Protocol):
    """A backend that compiles a rendered source for a present device."""

    def compile(self, source: KernelSource, arch: str, pdl: bool) -> KernelBinary:
        """Compile for ``arch``, the architecture of a present device."""


@runtime_checkable
class SourceInterpreter(Protocol):
    """A backend that executes rendered sources on CPU tensors."""

    def interpret(self, source: KernelSource) -> Kernel:
        """A kernel that interprets ``source``; streams are ignored."""


@dataclass(frozen=True)
class Address:
    """A kernel argument that is memory of a driver, not of torch."""

    value: int
    dtype: str = "int64"  # what the Triton interpreter takes it for

    def data_ptr(self) -> int:
        """The address."""
        return self.value


class SharedMemory(Protocol):
    """Device memory that other processes can map. Zeroed; its size is a whole multiple of 2 MiB."""

    address: int
    size: int
    payload: bytes  # what another process needs to open it
    descriptor: int | None  # for kinds whose handle is a file descriptor: passed beside the payload

    def close(self) -> None:
        """Free it; importers must have closed before."""


class MappedMemory(Protocol):
    """Another process's device memory, mapped here."""

    address: int

    def close(self) -> None:
        """Unmap it."""


class CountedMappings:
    """Mappings of a process by what they were opened from: opening one export twice gives one mapping, counted."""

    def __init__(self) -> None:
        self.entries: dict[Hashable, list[Any]] = {}  # key -> [mapping, times opened]

    def open(self, key: Hashable, make: Callable[[], MappedMemory]) -> CountedMapping:
        """The mapping under ``key``, made by ``make`` if there is none."""
        entry = self.entries.get(key)
        if entry is None:
            entry = self.entries[key] = [make(), 0]
        entry[1] += 1
        return CountedMapping(self.entries, key)


class CountedMapping:
    """One of the times that a mapping was opened; the last close unmaps it."""

    def __init__(self, entries: dict[Hashable, list[Any]], key: Hashable) -> None:
        self._entries, self._key = entries, key
        self.address: int = entries[key][0].address

    def close(self) -> None:
        """Close it once."""
        entry = self._entries[self._key]
        entry[1] -= 1
        if entry[1] == 0:
            del self._entries[self._key]
            entry[0].close()


class HostWord(Protocol):
    """One 8-byte word of host memory that a kernel stores to and the host reads without synchronisation."""

    argument: Value

    def read(self) -> int:
        """What the word holds."""

    def close(self) -> None:
        """Free it."""


class PeerMemory(Protocol):
    """How one device shares memory with other processes."""

    identity: str  # the physical device, the same string in every process of the node
    proven: bool  # whether sharing was run on such hardware; unproven kinds are used only when asked for

    def kinds(self) -> tuple[str, ...]:
        """Kinds of handles that work here, tried by a real allocation where an attribute does not prove it, best
        first.
        """

    def allocate(self, size: int, kind: str) -> SharedMemory:
        """Allocate, zero and export ``size`` bytes."""

    def open(self, kind: str, payload: bytes, size: int, descriptor: int | None) -> MappedMemory:
        """Map what another process exported; opening one export twice gives one mapping, counted."""

    def host_word(self) -> HostWord:
        """Allocate a word, 0 at first."""

    def read(self, address: int, size: int) -> bytes:
        """Read device memory beside kernels that run."""

    def write(self, address: int, data: bytes) -> None:
        """Write to device memory, also a peer's, beside kernels that run; returns when it is there."""

    def close(self) -> None:
        """Let the driver's objects go that reading and writing took."""


@runtime_checkable
class PeerMemoryProvider(Protocol):
    """A backend whose devices can share memory between processes."""

    vendor: str

    def peer_memory(self, device_index: int) -> PeerMemory:
        """The sharing of one device."""


class PackedArguments:
    """Argument memory of one launch: 8-byte slots, filled once, and the array of their addresses that drivers take.

    Parameters
    ----------
    arguments : sequence of Argument
        The kernel's arguments in order.
    trailing : int
        Null pointers after the arguments.
    fixed : mapping
        Values that stay; tensors are kept alive.
    dynamic : sequence of str
        Names of the arguments that come with every launch, pointers before numbers.

    Raises
    ------
    TypeError
        When ``fixed`` and ``dynamic`` are not exactly the kernel's arguments, or numbers come before pointers.
    """

    def __init__(
        self, arguments: Sequence[Argument], trailing: int, fixed: Mapping[str, Value], dynamic: Sequence[str]
    ) -> None:
        values, positions = ordered_arguments(arguments, fixed, dynamic)
        pointers = [arguments[position].is_pointer for position in positions]
        if any(arguments[position].type == "fp32" for position in positions):
            raise TypeError(f"fp32 arguments can only be fixed: {', '.join(dynamic)}")
        if pointers != sorted(pointers, reverse=True):
            raise TypeError(f"name dynamic pointers before dynamic numbers: {', '.join(dynamic)}")
        self._num_pointers = sum(pointers)
        self._keep = values
        # dynamic values first, in one run, so that a launch packs them with one call
        order = positions + [i for i in range(len(values) + trailing) if i not in positions]
        place = {argument: slot for slot, argument in enumerate(order)}
        self._slots = (ctypes.c_int64 * max(len(order), 1))()
        for position, value in enumerate(values):
            if value is not None:
                self._slots[place[position]] = arguments[position].word(value)
        base = ctypes.addressof(self._slots)
        self._addresses = (ctypes.c_void_p * max(len(order), 1))(*(base + 8 * place[i] for i in range(len(order))))
        self.address = ctypes.addressof(self._addresses)
        self._pack = struct.Struct(f"{len(positions)}q").pack_into

    def fill(self, dynamic: Sequence[Value]) -> None:
        """Write one launch's dynamic values into their slots."""
        count = self._num_pointers
        self._pack(self._slots, 0, *[tensor.data_ptr() for tensor in dynamic[:count]], *dynamic[count:])


def ordered_arguments(
    arguments: Sequence[Argument], fixed: Mapping[str, Value], dynamic: Sequence[str]
) -> tuple[list[Value], list[int]]:
    """Values in argument order (None where dynamic) and the position of every dynamic argument.

    Raises
    ------
    TypeError
        When ``fixed`` and ``dynamic`` are not exactly the kernel's arguments.
    """
    names = [argument.name for argument in arguments]
    given = sorted([*fixed, *dynamic])
    if given != sorted(names):
        missing, extra = sorted(set(names) - set(given)), sorted(set(given) - set(names))
        raise TypeError(f"kernel arguments do not match: missing {missing}, unknown {extra}")
    return [fixed.get(name) for name in names], [names.index(name) for name in dynamic]

# SPDX-License-Identifier: Apache-2.0
"""LLVM types, and how a value of each is held: one numpy array whose first axis is the lane."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOATS = {"half": np.float16, "bfloat": np.uint16, "float": np.float32, "double": np.float64}
FLOAT_BYTES = {"half": 2, "bfloat": 2, "float": 4, "double": 8}
NARROW_SPACES = (2, 3, 5, 6)  # 32-bit pointers: region, LDS, scratch, 32-bit constant
LDS, BUFFER = 3, 8


class Trap(Exception):
    """The kernel did, or the text says, something that this interpreter does not allow or does not know."""


@dataclass(frozen=True)
class Type:
    """``kind``: ``int`` (``size`` bits), ``ptr`` (``size`` is the address space), a float's name, ``vector`` / ``array``
    (``size`` elements), ``struct``, ``void``, ``label``, ``metadata``.
    """

    kind: str
    size: int = 0
    elements: tuple[Type, ...] = ()

    @functools.cached_property
    def element(self) -> Type:
        """Element type of a vector or array; a scalar is its own."""
        return self.elements[0] if self.kind in ("vector", "array") else self

    @functools.cached_property
    def is_aggregate(self) -> bool:
        """Held as a list of arrays instead of one."""
        return self.kind in ("struct", "array")

    @functools.cached_property
    def is_float(self) -> bool:
        return self.element.kind in FLOATS

    @functools.cached_property
    def bits(self) -> int:
        """Bits of an integer."""
        return self.element.size

    @functools.cached_property
    def storage_bits(self) -> int:
        """Bits of the numpy integer that holds an integer."""
        return max(8, 1 << (self.bits - 1).bit_length())

    @functools.cached_property
    def dtype(self) -> type:
        """The numpy element type: booleans for i1, bit patterns for bfloat, unsigned integers, 64 bits for pointers."""
        kind = self.element.kind
        if kind == "int":
            return np.bool_ if self.bits == 1 else UNSIGNED[self.storage_bits]
        if kind == "ptr":
            return np.uint64
        if kind in FLOATS:
            return FLOATS[kind]
        raise Trap(f"a value of type {self}")

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes in memory."""
        if self.kind == "int":
            return self.storage_bits // 8
        if self.kind == "ptr":
            return 4 if self.size in NARROW_SPACES else 16 if self.size == BUFFER else 8
        if self.kind in FLOATS:
            return FLOAT_BYTES[self.kind]
        if self.kind == "vector" and self.element == BOOL:
            return -(-self.size // 8)
        if self.kind in ("vector", "array"):
            return self.size * self.element.nbytes
        raise Trap(f"size of type {self}")

    def __str__(self) -> str:
        inner = " x ".join([str(self.size), *map(str, self.elements)]) if self.elements else self.size
        return f"{self.kind}({inner})"


BOOL = Type("int", 1)
I8, I16, I32, I64 = (Type("int", n) for n in (8, 16, 32, 64))
FLOAT = Type("float")


def vector(count: int, element: Type) -> Type:
    """A vector type."""
    return Type("vector", count, (element,))

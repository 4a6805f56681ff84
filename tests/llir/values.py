# SPDX-License-Identifier: Apache-2.0
"""Number formats: signed views, bfloat16 and fp8 as bit patterns, values as bytes and back."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from .types import BOOL, LDS, NARROW_SPACES, SIGNED, UNSIGNED, Trap, Type

Array = np.ndarray[Any, Any]


def signed(value: Array, kind: Type) -> Array:
    """Two's complement value of an integer array, sign-extended where fewer bits are used than stored."""
    if kind.element.kind != "int":
        return value
    if value.dtype == np.bool_:
        return -(value.astype(np.int8))
    bits = kind.storage_bits
    view = np.ascontiguousarray(value).view(SIGNED[bits])
    spare = bits - kind.bits
    return view if spare == 0 else (view << spare) >> spare


def wrap(value: Array, kind: Type) -> Array:
    """Any integer array as the unsigned array of ``kind``, high bits cut."""
    if kind.bits == 1:
        return (value & value.dtype.type(1)).astype(np.bool_) if value.dtype != np.bool_ else value
    cut = value.astype(kind.dtype, copy=False)
    return cut if kind.bits == kind.storage_bits else cut & kind.dtype((1 << kind.bits) - 1)


def bfloat_to_float(bits: Array) -> Array:
    """bfloat16 bit patterns as fp32; exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def float_to_bfloat(value: Array) -> Array:
    """fp32 rounded to bfloat16 bit patterns, nearest even, NaN quiet."""
    bits = np.ascontiguousarray(value, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(value), quiet, rounded).astype(np.uint16)


def to_float(value: Array, kind: Type) -> Array:
    """A float array as numpy computes with it: bfloat16 widened."""
    return bfloat_to_float(value) if kind.element.kind == "bfloat" else value


def from_float(value: Array, kind: Type) -> Array:
    """A computed array as a value of the float type ``kind``, rounded to nearest even."""
    if kind.element.kind != "bfloat":
        return value.astype(kind.dtype, copy=False)
    if value.dtype != np.float64:
        return float_to_bfloat(value.astype(np.float32, copy=False))
    narrow = value.astype(np.float32)  # to odd, so that the second rounding can't hit a false tie
    inexact = (narrow.astype(np.float64) != value) & np.isfinite(value)
    toward = np.where(np.abs(narrow.astype(np.float64)) > np.abs(value), np.nextafter(narrow, np.float32(0)), narrow)
    odd = (toward.view(np.uint32) | inexact.astype(np.uint32)).view(np.float32)
    return float_to_bfloat(np.where(inexact, odd, narrow))


@functools.cache
def fp8_table(name: str) -> Array:
    """Value of every byte in ``e4m3fn``, ``e5m2`` (OCP) or ``e4m3fnuz``, ``e5m2fnuz`` (CDNA3), as fp64."""
    exponent_bits = 4 if name.startswith("e4") else 5
    fraction_bits = 7 - exponent_bits
    fnuz = name.endswith("fnuz")
    bias = (1 << (exponent_bits - 1)) - (0 if fnuz else 1)
    byte = np.arange(256)
    exponent = (byte >> fraction_bits) & ((1 << exponent_bits) - 1)
    fraction = (byte & ((1 << fraction_bits) - 1)) / (1 << fraction_bits)
    size = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - float(bias)))
    value = np.where(byte >> 7, -size, size)
    if fnuz:
        value[0x80] = np.nan
    elif name == "e4m3fn":
        value[[0x7F, 0xFF]] = np.nan
    else:
        top = exponent == 31
        value = np.where(top & (fraction > 0), np.nan, np.where(top, np.copysign(np.inf, value), value))
    return value


def to_bytes(value: Any, kind: Type) -> Array:
    """A value as bytes [lanes, kind.nbytes], little endian."""
    element = kind.element
    if element == BOOL:
        if kind.kind == "vector":
            return np.packbits(value, axis=1, bitorder="little")
        return value.astype(np.uint8)[:, None]
    if kind.is_aggregate:
        raise Trap(f"bytes of {kind}")
    if element.kind == "ptr" and element.size in NARROW_SPACES:
        value = value.astype(np.uint32)
    data = np.ascontiguousarray(value)
    return data.reshape(len(data), -1).view(np.uint8)


def from_bytes(data: Array, kind: Type) -> Any:
    """The inverse of :func:`to_bytes`."""
    element = kind.element
    data = np.ascontiguousarray(data)
    if element == BOOL:
        if kind.kind == "vector":
            return np.unpackbits(data, axis=1, bitorder="little")[:, : kind.size].astype(np.bool_)
        return (data[:, 0] & 1).astype(np.bool_)
    if element.kind == "ptr" and element.size in NARROW_SPACES:
        value = data.view(np.uint32).astype(np.uint64)
    else:
        value = data.view(kind.dtype)
        if element.kind == "int":
            value = wrap(value, element)
    return value if kind.kind == "vector" else value[:, 0]


def bit_cast(value: Array, source: Type, target: Type) -> Array:
    """Reinterpret bits; numpy views where the layout allows it."""
    if source.element.kind == "int" and source.bits not in UNSIGNED and source != BOOL and source.element != BOOL:
        return _cast_odd_integers(value, source, target)
    if target.element.kind == "int" and target.bits not in UNSIGNED and target.element != BOOL:
        return _cast_odd_integers(value, source, target)
    return from_bytes(to_bytes(value, source), target)


def _cast_odd_integers(value: Array, source: Type, target: Type) -> Array:
    """Bit by bit: vectors of integers that are no whole bytes are packed without gaps."""
    bits = _to_bits(value, source)
    count = target.size if target.kind == "vector" else 1
    pieces = bits.reshape(len(bits), count, -1)
    if target.element.kind != "int":
        return from_bytes(np.packbits(bits, axis=1, bitorder="little"), target)
    weights = np.uint64(1) << np.arange(pieces.shape[2], dtype=np.uint64)
    whole = wrap((pieces.astype(np.uint64) * weights).sum(2, dtype=np.uint64), target)
    return whole if target.kind == "vector" else whole[:, 0]


def _to_bits(value: Array, kind: Type) -> Array:
    """Bits [lanes, n] of a value."""
    if kind.element.kind == "int":
        flat = value.reshape(len(value), -1).astype(np.uint64)
        places = np.arange(kind.bits, dtype=np.uint64)
        return ((flat[:, :, None] >> places) & np.uint64(1)).astype(np.uint8).reshape(len(value), -1)
    return np.unpackbits(to_bytes(value, kind), axis=1, bitorder="little")


def is_lds(kind: Type) -> bool:
    """Whether a pointer type is an LDS address."""
    return kind.element.kind == "ptr" and kind.element.size == LDS

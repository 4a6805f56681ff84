# SPDX-License-Identifier: Apache-2.0
"""MFMA: D = A B + C over the lanes of a wave, in the operand layouts of AMD's CDNA3 and CDNA4 documents."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .instructions import Operation
from .intrinsics import TABLE, fp8_names
from .syntax import Instruction
from .types import Trap, Type
from .values import Array, bfloat_to_float, fp8_table, to_bytes

if TYPE_CHECKING:
    from .machine import Machine

WAVE = 64
NAME = re.compile(r"amdgcn\.mfma\.f32\.(16x16|32x32)x(\d+)\.?(f16|bf16(?:\.1k)?|(?:fp8|bf8)\.(?:fp8|bf8))")
SCALED_NAME = re.compile(r"amdgcn\.mfma\.scale\.f32\.(16x16|32x32)x(\d+)\.f8f6f4")
Decode = Callable[[Array], Array]


def decoders(kind: str, operands: tuple[Type, Type], arch: str, text: str) -> tuple[Decode, Decode]:
    """Functions from the operands' values to numbers [lanes, elements]."""
    if kind == "f16":
        return lambda x: x, lambda x: x
    if kind.startswith("bf16"):
        bits: Decode = lambda x: bfloat_to_float(np.ascontiguousarray(x).view(np.uint16))  # noqa: E731
        return bits, bits
    tables = [fp8_table(fp8_names(arch)[name]) for name in kind.split(".")]
    first, second = (
        (lambda x, table=table, operand=operand: table[to_bytes(x, operand)])
        for table, operand in zip(tables, operands, strict=True)
    )
    return first, second


def build_mfma(instruction: Instruction, arch: str) -> Operation:
    """A of lane l holds row l % M, elements (l // M) * n ... + n - 1 of K; B the same of its columns; register r of D
    holds row 4 * (l // 16) + r (16x16) or 8 * (r // 4) + 4 * (l // 32) + r % 4 (32x32) of column l % M. The execution mask is ignored.
    """
    found = NAME.fullmatch(str(instruction.detail))
    if not found:
        raise Trap(f"unknown matrix instruction in `{instruction.text}`")
    if any(int(operand.constant[0]) for operand in instruction.operands[3:]):
        raise Trap(f"broadcast or permuted operands in `{instruction.text}`")
    return multiplication(instruction, arch, int(found[1][:2]), int(found[2]), found[3])


def build_scaled_mfma(instruction: Instruction, arch: str) -> Operation:
    """Without a scale (both zero) the 8, 6 or 4 bit product as it is; here of e4m3 (format 0) only."""
    found = SCALED_NAME.match(str(instruction.detail))
    if not found or any(int(operand.constant[0]) for operand in instruction.operands[3:]):
        raise Trap(f"scaled operands, or others than e4m3, in `{instruction.text}`")
    return multiplication(instruction, arch, int(found[1][:2]), int(found[2]), "fp8.fp8")


def multiplication(instruction: Instruction, arch: str, size: int, depth: int, kind: str) -> Operation:
    """The product of operands of one kind."""
    a_type, b_type = instruction.operands[0].type, instruction.operands[1].type
    decode_a, decode_b = decoders(kind, (a_type, b_type), arch, instruction.text)
    groups = WAVE // size
    lane, register = np.arange(WAVE)[:, None], np.arange(instruction.type.size)[None, :]
    row = 4 * (lane // 16) + register if size == 16 else 8 * (register // 4) + 4 * (lane // 32) + register % 4
    column = np.broadcast_to(lane % size, row.shape)

    def operand(m: Machine, value: Array, decode: Decode) -> Array:
        numbers = decode(m.full(value)).astype(np.float64).reshape(-1, groups, size, depth // groups)
        return numbers.transpose(0, 2, 1, 3).reshape(-1, size, depth)

    def run(m: Machine, a: Array, b: Array, c: Array, *flags: Array) -> Array:
        product = np.matmul(operand(m, a, decode_a), operand(m, b, decode_b).transpose(0, 2, 1))
        return (m.full(c) + product[:, row, column].reshape(m.lanes, -1)).astype(np.float32)

    return run


TABLE["amdgcn.mfma"] = build_mfma
TABLE["amdgcn.mfma.scale"] = build_scaled_mfma

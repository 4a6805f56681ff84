# SPDX-License-Identifier: Apache-2.0
"""MFMA: which lane and register hold which matrix element, and which formats the operands have.

Sources:
 - CDNA4 ISA guide, 7.1.4 "General input and output layout", and AMD Matrix Instruction Calculator (ROCm/amd_matrix_instruction_calculator), `--register-layout` for CDNA3:
   A[i][k] is in lane i + M * (k / E), element k % E, where E is the number of elements a lane holds; B[k][j] likewise
   in lane j + N * (k / E); D[i][j] of 16 x 16 in lane j + 16 * (i / 4), register i % 4; of 32 x 32 in lane
   j + 32 * (i / 4 % 2), register 4 * (i / 8) + i % 4. C has D's layout.
 - How k is spread over lanes and elements cannot be observed apart from rounding, as long as A and B agree; sums of
   products of small integers, as here, are exact in any order.
 - The formats FP8 and BF8: the *fnuz ones on gfx942 (CDNA3 ISA guide), OCP's on gfx950 (CDNA4 ISA guide, 7.3).

Open in these documents, so not tested: rounding inside a sum, the NaN's payload, the sign of a zero sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from llir_tests.ir_kernels import FLOAT8, float8, lanes, under

RANDOM = np.random.default_rng(11)


@dataclass(frozen=True)
class Instruction:
    """An MFMA intrinsic: D = A (size x depth) times B (depth x size) plus C."""

    name: str
    operand: str  # type of the A and B arguments in LLVM IR
    formats: tuple[str, str]  # of A's and B's elements
    size: int
    depth: int
    archs: tuple[str, ...] = ("gfx942", "gfx950")
    flags: int = 3  # trailing zeros: broadcasts and permutations, or formats (0 is e4m3) and scales (both 0: none)

    @property
    def arguments(self) -> str:
        """What follows C in a call."""
        return ", i32 0" * self.flags

    @property
    def prefix(self) -> str:
        """Of the name: the newer instructions can scale."""
        return "scale." if self.flags == 6 else ""


HALF, BFLOAT = ("half", "half"), ("bfloat", "bfloat")
NEW = ("gfx950",)
INSTRUCTIONS = [
    Instruction("16x16x16f16", "<4 x half>", HALF, 16, 16),
    Instruction("16x16x16bf16.1k", "<4 x i16>", BFLOAT, 16, 16),
    Instruction("32x32x8f16", "<4 x half>", HALF, 32, 8),
    Instruction("32x32x8bf16.1k", "<4 x i16>", BFLOAT, 32, 8),
    Instruction("16x16x32.f16", "<8 x half>", HALF, 16, 32, NEW),
    Instruction("16x16x32.bf16", "<8 x bfloat>", BFLOAT, 16, 32, NEW),
    Instruction("32x32x16.f16", "<8 x half>", HALF, 32, 16, NEW),
    Instruction("32x32x16.bf16", "<8 x bfloat>", BFLOAT, 32, 16, NEW),
    Instruction("16x16x32.fp8.fp8", "i64", ("fp8", "fp8"), 16, 32),
    Instruction("16x16x32.bf8.bf8", "i64", ("bf8", "bf8"), 16, 32),
    Instruction("16x16x32.fp8.bf8", "i64", ("fp8", "bf8"), 16, 32),
    Instruction("16x16x32.bf8.fp8", "i64", ("bf8", "fp8"), 16, 32),
    Instruction("32x32x16.fp8.fp8", "i64", ("fp8", "fp8"), 32, 16),
    Instruction("16x16x128.f8f6f4.v8i32.v8i32", "<8 x i32>", ("fp8", "fp8"), 16, 128, NEW, flags=6),
]
CASES = [
    pytest.param(instruction, arch, id=f"{instruction.name}-{arch}")
    for instruction in INSTRUCTIONS
    for arch in instruction.archs
]
SIXTEEN_BITS = [case for case in CASES if case.values[0].formats[0] in ("half", "bfloat")]
EIGHT_BITS = [case for case in CASES if case not in SIXTEEN_BITS]


def encode(values: np.ndarray, form: str, arch: str) -> np.ndarray:
    """The codes of values that the format has."""
    if form == "half":
        codes = values.astype(np.float16)
        assert np.array_equal(codes.astype(np.float64), values, equal_nan=True)
        return codes.view(np.uint16)
    if form == "bfloat":
        whole = values.astype(np.float32).view(np.uint32)
        assert not np.any(whole & 0xFFFF)
        return (whole >> 16).astype(np.uint16)
    kind = FLOAT8[arch][form == "bf8"]
    table = {float8(code, kind): code for code in reversed(range(256))}
    return np.vectorize(lambda value: table[float(value)], otypes=[np.uint8])(values)


def operand(codes: np.ndarray) -> np.ndarray:
    """A matrix's codes, the rows being rows of A or columns of B, as every lane holds them."""
    size, depth = codes.shape
    per_lane = size * depth // 64
    registers = np.empty((64, per_lane), codes.dtype)
    for outer in range(size):
        for k in range(depth):
            registers[outer + size * (k // per_lane), k % per_lane] = codes[outer, k]
    return registers


def place(size: int, row: int, column: int) -> tuple[int, int]:
    """Lane and register of an element of C or D."""
    if size == 16:
        return column + 16 * (row // 4), row % 4
    return column + 32 * (row // 4 % 2), 4 * (row // 8) + row % 4


def multiply(instruction: Instruction, arch: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """What the kernel computes from the operands' codes (b transposed) and C."""
    size = instruction.size
    accumulator = np.empty((64, size * size // 64), np.float32)
    for row in range(size):
        for column in range(size):
            accumulator[place(size, row, column)] = c[row, column]
    vector = f"<{accumulator.shape[1]} x float>"
    kind = instruction.operand
    arguments = f"{kind} %a, {kind} %b, {vector} %c{instruction.arguments}"
    body = f"  %r = call {vector} @llvm.amdgcn.mfma.{instruction.prefix}f32.{instruction.name}({arguments})"
    operands = [operand(codes) for codes in (a, b)]
    if not kind.endswith(("half>", "bfloat>", "i16>")):  # packed bytes
        operands = [registers.view(np.uint64 if kind == "i64" else np.uint32) for registers in operands]
    inputs = [(kind, operands[0]), (kind, operands[1]), (vector, accumulator)]
    got = lanes(body, inputs, (vector,), arch=arch)
    result = np.empty((size, size), np.float32)
    for row in range(size):
        for column in range(size):
            result[row, column] = got[place(size, row, column)]
    return result


def small(form: str, shape: tuple[int, int]) -> np.ndarray:
    """Random integers that every variant of the format has."""
    largest = {"half": 31, "bfloat": 31, "fp8": 16, "bf8": 8}[form]
    return RANDOM.integers(-largest, largest + 1, shape).astype(np.float64)


@pytest.mark.parametrize(("instruction", "arch"), CASES)
def test_integers(instruction: Instruction, arch: str) -> None:
    """D = A B + C for random integers, exactly: sums stay far below 2 ** 24."""
    size, depth = instruction.size, instruction.depth
    for _ in range(3):
        a, b = small(instruction.formats[0], (size, depth)), small(instruction.formats[1], (depth, size))
        c = RANDOM.integers(-1000, 1000, (size, size)).astype(np.float64)
        codes = encode(a, instruction.formats[0], arch), encode(b.T, instruction.formats[1], arch)
        got = multiply(instruction, arch, *codes, c)
        assert np.array_equal(got, a @ b + c)


@pytest.mark.parametrize(("instruction", "arch"), SIXTEEN_BITS)
def test_every_element_apart(instruction: Instruction, arch: str) -> None:
    """Each row of A picks one row of B, whose elements are all different: a swap of any two elements shows."""
    size, depth = instruction.size, instruction.depth
    for shift in range(0, depth, 5):
        a = np.zeros((size, depth))
        picks = [(7 * row + shift) % depth for row in range(size)]
        a[np.arange(size), picks] = 1
        b = np.arange(depth * size).reshape(depth, size)
        b = np.where(b % 2, -(b // 2 + 1), b // 2 + 1).astype(np.float64)  # +-1 ... +-256, exact in bfloat too
        codes = encode(a, instruction.formats[0], arch), encode(b.T, instruction.formats[1], arch)
        c = np.arange(size * size).reshape(size, size) * 1024.0
        assert np.array_equal(multiply(instruction, arch, *codes, c), b[picks] + c)
        codes = encode(b.T, instruction.formats[0], arch), encode(a, instruction.formats[1], arch)
        assert np.array_equal(multiply(instruction, arch, *codes, c), b[picks].T + c)


@pytest.mark.parametrize(("instruction", "arch"), SIXTEEN_BITS)
def test_not_a_number_and_infinity(instruction: Instruction, arch: str) -> None:
    """IEEE 754: NaN spreads along its row, infinity times zero is NaN, infinities of both signs sum to NaN."""
    size, depth = instruction.size, instruction.depth
    a, b = np.full((size, depth), 2.0), np.full((depth, size), 3.0)
    c = np.zeros((size, size))
    a[1, 3] = np.nan
    b[6, 4] = np.nan
    a[2, 5] = np.inf
    b[5, 7], b[5, 8] = 0, -1
    c[9, 9], c[10, 10], c[2, 11] = np.inf, np.nan, -np.inf
    with np.errstate(invalid="ignore"):
        expected = np.array([[sum(a[i] * b[:, j]) + c[i, j] for j in range(size)] for i in range(size)])
    assert np.isnan(expected[1]).all()
    assert np.isnan(expected[2, 7])
    assert expected[2, 8] == -np.inf
    assert np.isnan(expected[2, 11])
    codes = encode(a, instruction.formats[0], arch), encode(b.T, instruction.formats[1], arch)
    assert np.array_equal(multiply(instruction, arch, *codes, c), expected, equal_nan=True)


@pytest.mark.parametrize(("instruction", "arch"), EIGHT_BITS)
def test_every_code(instruction: Instruction, arch: str) -> None:
    """Every code of A's and of B's format times one: zeros, denormals, the largest, NaN (0x80 on gfx942), infinity."""
    size, depth = instruction.size, instruction.depth
    for first in range(0, 256, size):
        codes = np.arange(first, first + size, dtype=np.uint8)
        for which in (0, 1):
            kinds = [FLOAT8[arch][form == "bf8"] for form in instruction.formats]
            one = np.zeros((size, depth), np.uint8)
            one[:, 7] = encode(np.ones(size), instruction.formats[1 - which], arch)
            tested = np.zeros((size, depth), np.uint8)
            tested[:, 7] = codes
            operands = [tested, one] if which == 0 else [one, tested]
            got = multiply(instruction, arch, *operands, np.zeros((size, size)))
            meant = np.array([float8(int(code), kinds[which]) for code in codes], np.float32)
            expected = np.repeat(meant[:, None], size, 1) if which == 0 else np.repeat(meant[None], size, 0)
            assert np.array_equal(got, expected, equal_nan=True), first


def test_formats_differ_between_architectures() -> None:
    """The same bits mean another number: 0x40 is 2 in OCP's e4m3 and 1 in CDNA3's; 0x80 is zero, and NaN."""
    instruction = next(known for known in INSTRUCTIONS if known.name == "16x16x32.fp8.fp8")
    codes = np.full((16, 32), 0x40, np.uint8)
    results = {arch: multiply(instruction, arch, codes, codes, np.zeros((16, 16))) for arch in FLOAT8}
    assert np.array_equal(results["gfx950"], np.full((16, 16), 128.0))
    assert np.array_equal(results["gfx942"], np.full((16, 16), 32.0))
    codes = np.full((16, 32), 0x80, np.uint8)
    results = {arch: multiply(instruction, arch, codes, codes, np.zeros((16, 16))) for arch in FLOAT8}
    assert np.array_equal(results["gfx950"], np.zeros((16, 16)))
    assert np.isnan(results["gfx942"]).all()


@pytest.mark.parametrize(("instruction", "arch"), CASES)
def test_chain(instruction: Instruction, arch: str) -> None:
    """D of one instruction is C of the next, without rearranging."""
    size, depth = instruction.size, instruction.depth
    a, b = small(instruction.formats[0], (size, depth)), small(instruction.formats[1], (depth, size))
    codes = encode(a, instruction.formats[0], arch), encode(b.T, instruction.formats[1], arch)
    vector, kind = f"<{size * size // 64} x float>", instruction.operand
    name, flags = f"{instruction.prefix}f32.{instruction.name}", instruction.arguments
    call = f"call {vector} @llvm.amdgcn.mfma.{name}({kind} %a, {kind} %b, {vector} "
    body = f"  %d = {call}zeroinitializer{flags})\n  %r = {call}%d{flags})"
    operands = [operand(matrix) for matrix in codes]
    if not kind.endswith(("half>", "bfloat>", "i16>")):  # packed bytes
        operands = [registers.view(np.uint64 if kind == "i64" else np.uint32) for registers in operands]
    got = lanes(body, [(kind, operands[0]), (kind, operands[1])], (vector,), arch=arch)
    product = 2 * (a @ b)
    for row in range(size):
        for column in range(size):
            assert got[place(size, row, column)] == product[row, column]


@pytest.mark.parametrize(("instruction", "arch"), [case for case in SIXTEEN_BITS if case.values[1] == "gfx950"])
def test_denormals(instruction: Instruction, arch: str) -> None:
    """CDNA4, 7.1.2, rules for MFMA: denormals of the inputs and of the result are kept, whatever MODE says."""
    size, depth, form = instruction.size, instruction.depth, instruction.formats[0]
    smallest, factor, tiny = (2.0**-24, 1024.0, 2.0**-14) if form == "half" else (2.0**-133, 2.0**20, 2.0**-70)
    for left, right in ((smallest, factor), (factor, smallest), (tiny, tiny)):
        a, b, c = np.zeros((size, depth)), np.zeros((depth, size)), np.full((size, size), 2.0**-140)
        a[:, 5], b[5] = left, right
        codes = encode(a, form, arch), encode(b.T, form, arch)
        expected = np.full((size, size), left * right + 2.0**-140, np.float32)
        assert np.array_equal(multiply(instruction, arch, *codes, c), expected)


@pytest.mark.parametrize("arch", ["gfx950"])
def test_inactive_lanes_take_part(arch: str) -> None:
    """CDNA4, 7.1.2, rules for MFMA: the execution mask is ignored, so that the active lanes get the full product."""
    call = (
        "call <4 x float> @llvm.amdgcn.mfma.f32.16x16x16f16(<4 x half> %a, <4 x half> %b, <4 x float> zeroinitializer"
    )
    condition = "%low = and i32 %tid, 3\n  %cond = icmp eq i32 %low, 2"
    body = under(condition, f"  %v = {call}, i32 0, i32 0, i32 0)", "%v", "<4 x float>", "zeroinitializer")
    a, b = small("half", (16, 16)), small("half", (16, 16))
    inputs = [("<4 x half>", operand(encode(matrix, "half", arch))) for matrix in (a, b.T)]
    got = lanes(body, inputs, ("<4 x float>",), arch=arch)
    product = a @ b
    for row in range(16):
        for column in range(16):
            lane, register = place(16, row, column)
            assert got[lane, register] == (product[row, column] if lane % 4 == 2 else 0)

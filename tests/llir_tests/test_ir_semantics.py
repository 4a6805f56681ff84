# SPDX-License-Identifier: Apache-2.0
"""LLVM IR beneath the intrinsics: integers, floats, vectors, control flow, and that an unknown instruction traps.

Source: the LLVM Language Reference (LangRef), the entry of the instruction or intrinsic named; the traps are the
interpreter's own promise. Results that LangRef calls poison or undefined are not asserted: shifts by the width,
division by zero, fptosi out of range, a shuffle's poison lanes. Open in LangRef, so not asserted either: a NaN's
payload, maxnum and minnum of zeros of both signs and of signaling NaNs.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from llir import Kernel, Trap
from llir_tests.ir_kernels import bits32, cycle, lane_module, lanes, module, same_floats, under

EDGES = [0, 1, 2, 3, 5, 7, 31, 32, 63, 64, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000]
EDGES += [0x80000001, 0xFFFFFFFE, 0xFFFFFFFF, 0x12345678, 0xDEADBEEF]
RANDOM = np.random.default_rng(3)
A = cycle(EDGES, np.uint32)
B = np.concatenate([A[:8], RANDOM.permutation(A)[:40], RANDOM.integers(0, 2**32, 16, dtype=np.uint32)])
C = RANDOM.integers(0, 2**32, 64, dtype=np.uint32)


def signed(value: int, bits: int = 32) -> int:
    return value - (1 << bits) if value >> (bits - 1) & 1 else value


def toward_zero(dividend: int, divisor: int) -> int:
    quotient = abs(dividend) // abs(divisor)
    return quotient if (dividend < 0) == (divisor < 0) else -quotient


def narrow(bits: int) -> tuple[str, Callable[[int, int, int], int]]:
    body = f"%x = trunc i32 %a to i{bits}\n %y = call i{bits} @llvm.bitreverse.i{bits}(i{bits} %x)\n"
    text = f"{body} %r = zext i{bits} %y to i32"
    return text, lambda a, b, c: int(f"{a & (1 << bits) - 1:0{bits}b}"[::-1], 2)


def binary(name: str) -> str:
    return f"%r = call i32 @llvm.{name}.i32(i32 %a, i32 %b)"


INTEGERS: dict[str, tuple[str, Callable[[int, int, int], int]]] = {
    "bitreverse.i7": narrow(7),
    "bitreverse.i8": narrow(8),
    "bitreverse.i32": (
        "%r = call i32 @llvm.bitreverse.i32(i32 %a)",
        lambda a, b, c: int(f"{a:032b}"[::-1], 2),
    ),
    "ctpop": ("%r = call i32 @llvm.ctpop.i32(i32 %a)", lambda a, b, c: a.bit_count()),
    "ctlz": ("%r = call i32 @llvm.ctlz.i32(i32 %a, i1 false)", lambda a, b, c: 32 - a.bit_length()),
    "cttz": ("%r = call i32 @llvm.cttz.i32(i32 %a, i1 false)", lambda a, b, c: (a & -a).bit_length() - 1 if a else 32),
    "fshl": (
        "%r = call i32 @llvm.fshl.i32(i32 %a, i32 %b, i32 %c)",
        lambda a, b, c: ((a << 32 | b) << c % 32) >> 32,
    ),
    "fshr": ("%r = call i32 @llvm.fshr.i32(i32 %a, i32 %b, i32 %c)", lambda a, b, c: (a << 32 | b) >> c % 32),
    "umin": (binary("umin"), lambda a, b, c: min(a, b)),
    "umax": (binary("umax"), lambda a, b, c: max(a, b)),
    "smin": (binary("smin"), lambda a, b, c: min(signed(a), signed(b))),
    "smax": (binary("smax"), lambda a, b, c: max(signed(a), signed(b))),
    "usub.sat": (binary("usub.sat"), lambda a, b, c: max(a - b, 0)),
    "uadd.sat": (binary("uadd.sat"), lambda a, b, c: min(a + b, 0xFFFFFFFF)),
    "abs": ("%r = call i32 @llvm.abs.i32(i32 %a, i1 false)", lambda a, b, c: abs(signed(a))),
    "shl": ("%k = and i32 %b, 31\n %r = shl i32 %a, %k", lambda a, b, c: a << (b & 31)),
    "lshr": ("%k = and i32 %b, 31\n %r = lshr i32 %a, %k", lambda a, b, c: a >> (b & 31)),
    "ashr": ("%k = and i32 %b, 31\n %r = ashr i32 %a, %k", lambda a, b, c: signed(a) >> (b & 31)),
    "sdiv": ("%d = or i32 %b, 2\n %r = sdiv i32 %a, %d", lambda a, b, c: toward_zero(signed(a), signed(b | 2))),
    "srem": (
        "%d = or i32 %b, 2\n %r = srem i32 %a, %d",
        lambda a, b, c: signed(a) - signed(b | 2) * toward_zero(signed(a), signed(b | 2)),
    ),
    "udiv": ("%d = or i32 %b, 1\n %r = udiv i32 %a, %d", lambda a, b, c: a // (b | 1)),
    "urem": ("%d = or i32 %b, 1\n %r = urem i32 %a, %d", lambda a, b, c: a % (b | 1)),
    "mul": ("%r = mul i32 %a, %b", lambda a, b, c: a * b),
    "sub": ("%r = sub i32 %a, %b", lambda a, b, c: a - b),
    "sext": ("%x = trunc i32 %a to i8\n %r = sext i8 %x to i32", lambda a, b, c: signed(a & 255, 8)),
    "sext.i1": ("%x = trunc i32 %a to i1\n %r = sext i1 %x to i32", lambda a, b, c: -(a & 1)),
    "i64": (
        "%x = sext i32 %a to i64\n %y = zext i32 %b to i64\n %p = mul i64 %x, %y\n %q = ashr i64 %p, 32\n"
        " %r = trunc i64 %q to i32",
        lambda a, b, c: (signed(a) * b) >> 32,
    ),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integer(name: str) -> None:
    body, model = INTEGERS[name]
    got = lanes(body, [("i32", A), ("i32", B), ("i32", C)])
    assert got.tolist() == [model(int(a), int(b), int(c)) & 0xFFFFFFFF for a, b, c in zip(A, B, C, strict=True)]


@pytest.mark.parametrize("predicate", ["eq", "ne", "ugt", "uge", "ult", "ule", "sgt", "sge", "slt", "sle"])
def test_icmp(predicate: str) -> None:
    got = lanes(f"%p = icmp {predicate} i32 %a, %b\n %r = zext i1 %p to i32", [("i32", A), ("i32", B)])
    compare = {"e": int.__eq__, "n": int.__ne__, "gt": int.__gt__, "ge": int.__ge__, "lt": int.__lt__, "le": int.__le__}
    for a, b, result in zip(A, B, got, strict=True):
        pair = (signed(int(a)), signed(int(b))) if predicate[0] == "s" else (int(a), int(b))
        key = predicate[0] if predicate in ("eq", "ne") else predicate[1:]
        assert result == compare[key](*pair), (a, b)


FLOATS = [0.0, -0.0, 1.0, -1.0, 1.5, 2.5, -2.5, 0.5, -0.5, 3.0, 1e10, -1e-10, np.inf, -np.inf, np.nan, 16777217.0]
X = cycle(FLOATS, np.float32)
Y = np.concatenate([X[:16], np.roll(X, 3)[:16], np.roll(X, 7)[:16], RANDOM.normal(0, 5, 16).astype(np.float32)])


@pytest.mark.parametrize("predicate", ["oeq", "ogt", "oge", "olt", "ole", "one", "ord"])
def test_fcmp(predicate: str) -> None:
    """o...: false with a NaN; the opposite predicate is u... and true with a NaN."""
    opposite = {"oeq": "une", "ogt": "ule", "oge": "ult", "olt": "uge", "ole": "ugt", "one": "ueq", "ord": "uno"}
    body = f"""
  %p = fcmp {predicate} float %a, %b
  %q = fcmp {opposite[predicate]} float %a, %b
  %r = zext i1 %p to i32
  %s = zext i1 %q to i32"""
    got, negated = lanes(body, [("float", X), ("float", Y)], ("i32", "i32"))
    for a, b, result in zip(X.tolist(), Y.tolist(), got, strict=True):
        holds = {"oeq": a == b, "ogt": a > b, "oge": a >= b, "olt": a < b, "ole": a <= b, "one": a != b, "ord": True}
        assert result == (not math.isnan(a) and not math.isnan(b) and holds[predicate]), (a, b)
    assert (got + negated == 1).all()


def number_wins(pick: Callable[..., float]) -> Callable[[float, float], float]:
    return lambda a, b: b if math.isnan(a) else a if math.isnan(b) else pick(a, b)


def nan_wins(pick: Callable[..., float]) -> Callable[[float, float], float]:
    def model(a: float, b: float) -> float:
        if math.isnan(a) or math.isnan(b):
            return math.nan
        return pick(a, b, key=lambda value: (value, math.copysign(1, value)))  # -0 is less than +0

    return model


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("maxnum", number_wins(max)),
        ("minnum", number_wins(min)),
        ("maximum", nan_wins(max)),
        ("minimum", nan_wins(min)),
    ],
)
def test_float_extremes(name: str, model: Callable[[float, float], float]) -> None:
    keep = ~((X == 0) & (Y == 0)) if name.endswith("num") else np.ones(64, bool)
    got = lanes(f"%r = call float @llvm.{name}.f32(float %a, float %b)", [("float", X), ("float", Y)], ("float",))
    expected = np.array([model(a, b) for a, b in zip(X.tolist(), Y.tolist(), strict=True)], np.float32)
    assert same_floats(got[keep], expected[keep])


UNARY: dict[str, tuple[Callable[[float], float], float]] = {  # model, relative error allowed (CDNA3: 1 ulp)
    "fabs": (abs, 0),
    "floor": (lambda x: math.copysign(math.floor(x), x), 0),
    "rint": (lambda x: math.copysign(round(Fraction(x)), x), 0),  # a tie goes to the even integer
    "sqrt": (lambda x: math.sqrt(x) if x > 0 else x if x == 0 else math.nan, 0),
    "exp2": (lambda x: 2.0**x, 1.2e-7),
    "log2": (lambda x: math.log2(x) if x > 0 else -math.inf if x == 0 else math.nan, 1.2e-7),
}
SPECIAL = {  # of +inf and -inf
    "fabs": (np.inf, np.inf), "floor": (np.inf, -np.inf), "rint": (np.inf, -np.inf), "sqrt": (np.inf, np.nan),
    "exp2": (np.inf, 0.0), "log2": (np.inf, np.nan),
}  # fmt: skip


@pytest.mark.parametrize("name", UNARY)
def test_float_unary(name: str) -> None:
    model, tolerance = UNARY[name]
    values = np.concatenate([X[:12], RANDOM.normal(0, 20, 49).astype("f4"), np.array([np.inf, -np.inf, np.nan], "f4")])
    if name in ("exp2", "log2"):
        values[10] = 100.0
    got = lanes(f"%r = call float @llvm.{name}.f32(float %a)", [("float", values)], ("float",))
    expected = np.array([model(float(value)) for value in values[:61]] + [*SPECIAL[name], np.nan], np.float32)
    if tolerance:
        near = np.isfinite(expected)
        assert np.allclose(got[near], expected[near], rtol=tolerance, atol=1e-7 if name == "log2" else 0)
        got, expected = got[~near], expected[~near]
    assert same_floats(got, expected)


def test_fma_rounds_once() -> None:
    """llvm.fma rounds once; fmul and fadd without `contract` round twice."""
    a = np.concatenate([np.full(4, 1 + 2**-12), RANDOM.normal(0, 1, 60)]).astype(np.float32)
    c = (-(a.astype(np.float64) ** 2)).astype(np.float32)
    body = (
        "%r = call float @llvm.fma.f32(float %a, float %a, float %b)\n %p = fmul float %a, %a\n %s = fadd float %p, %b"
    )
    once, twice = lanes(body, [("float", a), ("float", c)], ("float", "float"))
    exact = [float(Fraction(float(x)) ** 2 + Fraction(float(z))) for x, z in zip(a, c, strict=True)]
    assert once.tolist() == np.array(exact, np.float32).tolist()
    assert once[0] == 2.0**-24
    assert twice.tolist() == (np.float32(a * a) + c).tolist()
    assert twice[0] == 0


@pytest.mark.parametrize("value", [1e-6, -0.0, 1.5, math.inf, 1e-45])
def test_a_float_argument_arrives_as_its_bits(value: float) -> None:
    """A launch passes 4 bytes, whatever they mean; a number in a register is the float that they are."""
    out = np.zeros(64, np.float32)
    body = "  %n = fneg float %x\n  store float %n, ptr addrspace(1) %out, align 4\n  ret void"
    Kernel(module("ptr addrspace(1) %out, float %x", body), "k").run(
        [out, struct.unpack("<I", struct.pack("<f", value))[0]]
    )
    assert bits32(out)[0] == bits32(np.array([-np.float32(value)], np.float32))[0]


def test_float_arithmetic() -> None:
    """fadd, fsub, fmul, fdiv: IEEE 754, nearest even; fneg flips the sign only, of zero and NaN too."""
    body = """
  %r = fdiv float %a, %b
  %s = fsub float %a, %b
  %t = fneg float %a"""
    divided, difference, negated = lanes(body, [("float", X), ("float", Y)], ("float", "float", "float"))
    with np.errstate(all="ignore"):
        assert same_floats(divided, X / Y)
        assert same_floats(difference, X - Y)
    assert bits32(negated).tolist() == (bits32(X) ^ 0x80000000).tolist()


def test_ldexp() -> None:
    cases = [
        (1.0, 3),
        (1.5, -2),
        (-1.0, 127),
        (1.0, 128),
        (1.25, 1000),
        (3.0, -100),
        (0.0, 50),
        (np.inf, -5),
        (2.0, -150),
    ]
    values, powers = (
        cycle(column, dtype) for column, dtype in zip(zip(*cases, strict=True), ("f4", "i4"), strict=True)
    )
    body = "%r = call float @llvm.ldexp.f32.i32(float %a, i32 %b)"
    got = lanes(body, [("float", values), ("i32", powers)], ("float",))
    expected = [8, 0.375, -(2.0**127), np.inf, np.inf, 3 * 2.0**-100, 0, np.inf, 2.0**-149]
    assert got[:9].tolist() == expected


def bfloat_bits(value: int) -> int:
    """Nearest even on a float's bits; NaN stays NaN."""
    if value & 0x7FFFFFFF > 0x7F800000:
        return 0x7FC0
    return (value + 0x7FFF + (value >> 16 & 1)) >> 16


def test_fptrunc() -> None:
    """Nearest even; beyond the largest by half a unit and more: infinity; tiny values: denormal or zero."""
    table = [  # float's bits, half's bits
        (0x3F800000, 0x3C00), (0x3F801000, 0x3C00), (0x3F801001, 0x3C01), (0x3F803000, 0x3C02), (0x3F802FFF, 0x3C01),
        (0x477FE000, 0x7BFF), (0x477FEFFF, 0x7BFF), (0x477FF000, 0x7C00), (0xC77FF000, 0xFC00), (0x7F800000, 0x7C00),
        (0x33000000, 0x0000), (0x33000001, 0x0001), (0x33C00000, 0x0002), (0xB3800000, 0x8001), (0x387FF000, 0x0400),
        (0x00000001, 0x0000), (0x80000001, 0x8000), (0xFF7FFFFF, 0xFC00),
    ]  # fmt: skip
    more = [0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x7F7FFFFF, 0x7F7F7FFF, 0xFF7F8000, 0x00008000, 0x00018000]
    words = cycle([bits for bits, _ in table] + more + [0x7F800001, 0xFFC00000, 0x7FFFFFFF], np.uint32)
    words[32:] = RANDOM.integers(0, 2**32, 32, dtype=np.uint32)
    body = "%r = fptrunc float %a to half\n %s = fptrunc float %a to bfloat"
    half, bfloat = lanes(body, [("float", words.view(np.float32))], ("half", "bfloat"))
    assert half.view(np.uint16)[: len(table)].tolist() == [bits for _, bits in table]
    nan = np.isnan(words.view(np.float32))
    assert nan[len(table) + len(more) : len(table) + len(more) + 3].all()
    assert np.isnan(half[nan]).all()
    assert all(bits & 0x7F80 == 0x7F80 and bits & 0x7F for bits in bfloat[nan].tolist())
    assert bfloat[~nan].tolist() == [bfloat_bits(int(word)) for word in words[~nan]]


def test_float_conversions() -> None:
    """uitofp, sitofp: nearest even; fptosi, fptoui: toward zero; fpext of half and bfloat: exact."""
    body = """
  %r = uitofp i32 %a to float
  %s = sitofp i32 %a to float
  %t = fptosi float %b to i32
  %d = call float @llvm.fabs.f32(float %b)
  %u = fptoui float %d to i32"""
    reals = np.concatenate([np.array([0.9, -0.9, 1.9, -1.9, 2147483520, -2147483648, 16777216.0], "f4"), B[:57] / 7])
    reals = np.where(np.abs(reals) > 2**31, 5.5, reals).astype(np.float32)
    kinds = ("float", "float", "i32", "i32")
    unsigned, with_sign, truncated, magnitude = lanes(body, [("i32", A), ("float", reals)], kinds)

    def nearest(value: int) -> float:  # the significand has 24 bits
        shift = max(abs(value).bit_length() - 24, 0)
        return math.copysign(round(Fraction(abs(value), 1 << shift)) << shift, value)

    assert unsigned.tolist() == [nearest(int(a)) for a in A]
    assert with_sign.tolist() == [nearest(signed(int(a))) for a in A]
    assert truncated.view(np.int32).tolist() == [math.trunc(value) for value in reals.tolist()]
    assert magnitude.tolist() == [math.trunc(abs(value)) for value in reals.tolist()]
    codes = RANDOM.permutation(65536)[:64].astype(np.uint16)
    half, bfloat = lanes(
        "%r = fpext half %a to float\n %s = fpext bfloat %b to float",
        [("half", codes.view(np.float16)), ("bfloat", codes)], ("float", "float"),
    )  # fmt: skip
    assert same_floats(half, [struct.unpack("<e", code.tobytes())[0] for code in codes])
    assert same_floats(bfloat, (codes.astype(np.uint32) << 16).view(np.float32))


@pytest.mark.parametrize(
    "line",
    [
        "call void @llvm.amdgcn.sched.barrier(i32 0)",
        "call void @llvm.amdgcn.s.setprio(i16 3)",
        "call void @llvm.amdgcn.wave.barrier()",
    ],
)
def test_hints_change_nothing(line: str) -> None:
    """AMDGPUUsage: scheduling only."""
    got = lanes(f"  {line}\n  %r = add i32 %a, 1\n  {line}", [("i32", np.arange(64))])
    assert got.tolist() == list(range(1, 65))


def test_assume() -> None:
    """LangRef, assume: undefined behaviour where the condition is false; lanes that do not run promise nothing."""
    body = under("%cond = icmp ult i32 %a, %n", "  call void @llvm.assume(i1 %cond)\n  %v = add i32 %a, 1", "%v")
    body = body.replace("i1 %cond)", "i1 %small)").replace("  call", "  %small = icmp ult i32 %a, %m\n  call")
    assert lanes(body, [("i32", np.arange(64))], ints=(16, 16))[:17].tolist() == [*range(1, 17), 2**32 - 1]
    with pytest.raises(Trap, match="an assumption does not hold"):
        lanes(body, [("i32", np.arange(64))], ints=(16, 15))


@pytest.mark.parametrize("break_at", [r"\0A", r"\0A                 "])
def test_real_time(break_at: str) -> None:
    """CDNA3 and CDNA4 ISA, S_MEMREALTIME: a 64-bit counter of a constant 100 MHz, scalar: one value for the wave."""
    body = f"""
  %r = tail call i64 asm sideeffect "s_memrealtime $0{break_at}s_waitcnt lgkmcnt(0)", "=s"() #1
  %s = tail call i64 asm sideeffect "s_memrealtime $0{break_at}s_waitcnt lgkmcnt(0)", "=s"() #1"""
    times = iter([12_345_678_909, 12_345_678_919])
    first, second = lanes(body, (), ("i64", "i64"), clock_ns=lambda: next(times))
    assert first.tolist() == [1_234_567_890] * 64 and second.tolist() == [1_234_567_891] * 64
    begin = time.monotonic_ns()
    (now, *_), _ = lanes(body, (), ("i64", "i64"))
    assert begin // 10 <= now <= time.monotonic_ns() // 10


def test_freeze_keeps_what_is_not_poison() -> None:
    """LLVM language reference: freeze is a no-op on anything but undef and poison; vectors element by element."""
    body = "  %r = freeze i32 %a\n  %s = freeze <2 x half> %b"
    words, halves = np.arange(64) * 77, np.arange(128).astype(np.float16).reshape(64, 2)
    got, pairs = lanes(body, [("i32", words), ("<2 x half>", halves)], ("i32", "<2 x half>"))
    assert got.tolist() == words.tolist()
    assert pairs.tolist() == halves.tolist()


def test_vectors() -> None:
    """select with a vector condition, shufflevector (poison lanes open), insert and extract at a variable index."""
    body = """
  %k = and i32 %c, 3
  %cond = icmp slt <4 x i32> %a, %b
  %r = select <4 x i1> %cond, <4 x i32> %a, <4 x i32> %b
  %s = shufflevector <4 x i32> %a, <4 x i32> %b, <4 x i32> <i32 6, i32 poison, i32 0, i32 3>
  %t = insertelement <4 x i32> %a, i32 %c, i32 %k
  %u = extractelement <4 x i32> %b, i32 %k
  %x = shufflevector <4 x i32> %a, <4 x i32> poison, <2 x i32> <i32 1, i32 2>
  %v = bitcast <2 x i32> %x to i64"""
    first, second = RANDOM.integers(0, 2**32, (2, 64, 4), dtype=np.uint32)
    kinds = ("<4 x i32>", "<4 x i32>", "<4 x i32>", "i32", "i64")
    inputs = [("<4 x i32>", first), ("<4 x i32>", second), ("i32", C)]
    selected, shuffled, inserted, extracted, pair = lanes(body, inputs, kinds)
    assert np.array_equal(selected, np.minimum(first.view(np.int32), second.view(np.int32)).view(np.uint32))
    assert np.array_equal(shuffled[:, [0, 2, 3]], np.stack([second[:, 2], first[:, 0], first[:, 3]], 1))
    lane, place = np.arange(64), C & 3
    expected = first.copy()
    expected[lane, place] = C
    assert np.array_equal(inserted, expected)
    assert np.array_equal(extracted, second[lane, place])
    assert pair.tolist() == [int(row[1]) | int(row[2]) << 32 for row in first]  # element 0 is lowest


def test_divergent_control_flow() -> None:
    """br, switch, phi: each lane takes its own way; phis of one block read their inputs at once (a swap)."""
    body = """
  %trips = and i32 %a, 15
  %many = icmp ugt i32 %trips, 9
  br i1 %many, label %big, label %small
big:
  switch i32 %trips, label %other [ i32 10, label %ten
                                    i32 11, label %ten
                                    i32 12, label %twelve ]
ten:
  br label %join
twelve:
  br label %join
other:
  br label %join
join:
  %w = phi i32 [ 1000, %ten ], [ 2000, %twelve ], [ 3000, %other ]
  br label %done
small:
  %none = icmp eq i32 %trips, 0
  br i1 %none, label %done, label %loop
loop:
  %i = phi i32 [ 0, %small ], [ %next, %latch ]
  %x = phi i32 [ 0, %small ], [ %y, %latch ]
  %y = phi i32 [ 1, %small ], [ %sum, %latch ]
  %sum = add i32 %x, %y
  %odd = trunc i32 %b to i1
  %five = icmp eq i32 %i, 5
  %leave = and i1 %odd, %five
  br i1 %leave, label %done, label %latch
latch:
  %next = add i32 %i, 1
  %more = icmp ult i32 %next, %trips
  br i1 %more, label %loop, label %done
done:
  %r = phi i32 [ %w, %join ], [ 7, %small ], [ 9999, %loop ], [ %sum, %latch ]"""
    trips = RANDOM.permutation(np.arange(64) % 16).astype(np.uint32)
    got = lanes(body, [("i32", trips), ("i32", C)])

    def model(count: int, leaves: int) -> int:
        if count > 9:
            return {10: 1000, 11: 1000, 12: 2000}.get(count, 3000)
        x, y, total = 0, 1, 7
        for i in range(count):
            total = x + y
            if leaves and i == 5:
                return 9999
            x, y = y, total
        return total

    assert got.tolist() == [model(int(count), int(other) & 1) for count, other in zip(trips, C, strict=True)]


@pytest.mark.parametrize(
    "line",
    [
        "%r = call i32 @llvm.amdgcn.sad.u8(i32 %a, i32 %a, i32 %a)",
        "%r = call i32 @llvm.amdgcn.no.such.thing(i32 %a)",
        "%r = frobnicate i32 %a, 3",
        '%r = call i32 asm "s_mov_b32 $0, 1", "=s"()',
        # a scalar load's result, used before it came: vmcnt counts vector memory only
        r'%r = tail call i64 asm sideeffect "s_memrealtime $0\0As_waitcnt vmcnt(0)", "=s"() #1',
        r'%r = tail call i64 asm sideeffect "s_memrealtime $0", "=s"() #1',
    ],
)
def test_unknown_instruction(line: str) -> None:
    with pytest.raises(Trap) as trap:
        Kernel(lane_module(f"  {line}", ["i32"], ["i32"]), "k", arch="gfx942")
    assert line.replace(" ", "") in str(trap.value).replace(" ", "")


def test_unknown_symbol() -> None:
    with pytest.raises((Trap, KeyError, ValueError)):
        Kernel(module("i32 %n", "  ret void"), "another", arch="gfx942")

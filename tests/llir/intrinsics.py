# SPDX-License-Identifier: Apache-2.0
"""The table of LLVM and AMDGPU intrinsics. Cross-lane operations follow AMD's CDNA3 and CDNA4 instruction documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .instructions import Operation, check_alignment, read
from .syntax import ASSEMBLY, Instruction
from .types import I32, LDS, SIGNED, Trap, Type, vector
from .values import Array, bit_cast, fp8_table, from_bytes, from_float, signed, to_bytes, to_float, wrap

if TYPE_CHECKING:
    from .machine import Machine

WAVE = 64
Factory = Callable[[Instruction, str], Operation]
TABLE: dict[str, Factory] = {}


def build_intrinsic(instruction: Instruction, arch: str) -> Operation:
    """The operation of a call; :class:`Trap` with the text when the intrinsic is not in the table."""
    name = str(instruction.detail)
    if name.startswith(ASSEMBLY):
        if name.removeprefix(ASSEMBLY) not in ASSEMBLER:
            raise Trap(f"unknown assembly in `{instruction.text}`")
        return ASSEMBLER[name.removeprefix(ASSEMBLY)]
    while name not in TABLE:
        name, _, suffix = name.rpartition(".")  # overloads end with the mangled types
        if not suffix or not name:
            raise Trap(f"unknown intrinsic {instruction.detail} in `{instruction.text}`")
    return TABLE[name](instruction, arch)


def factory(*names: str) -> Callable[[Factory], Factory]:
    """Register what builds the operation of ``names`` from the call."""

    def register(function: Factory) -> Factory:
        TABLE.update(dict.fromkeys(names, function))
        return function

    return register


def intrinsic(*names: str) -> Callable[[Operation], Operation]:
    """Register an operation that needs nothing of the call but its operands."""

    def register(operation: Operation) -> Operation:
        TABLE.update(dict.fromkeys(names, lambda instruction, arch: operation))
        return operation

    return register


def kind_of(instruction: Instruction) -> Type:
    """Element type of the result."""
    return instruction.type.element


@intrinsic("amdgcn.sched.barrier", "amdgcn.s.setprio", "amdgcn.wave.barrier")
def nothing(m: Machine, *operands: Array) -> None:
    """Hints for the compiler and the scheduler; a wave's lanes are always together between two of its instructions."""


@factory("assume")
def assume(instruction: Instruction, arch: str) -> Operation:
    """A promise to the compiler: it must hold in every lane that runs."""

    def run(m: Machine, promise: Array) -> None:
        if not m.active(promise).all():
            raise Trap(f"an assumption does not hold in `{instruction.text}`")

    return run


# ---- time


def real_time(m: Machine) -> Array:
    """The constant 100 MHz counter (CDNA3 and CDNA4 ISA, S_MEMREALTIME): it arrives like every scalar load, so only
    lgkmcnt tells when. Text that waits for another counter reads a register that nothing was written to yet.
    """
    return np.array([m.clock_ns() // TICK_NS], np.uint64)


TICK_NS = 10
ASSEMBLER: dict[str, Operation] = {'s_memrealtime $0; s_waitcnt lgkmcnt(0) "=s"': real_time}  # text, constraints


# ---- identity


@intrinsic("amdgcn.workitem.id.x")
def workitem(m: Machine) -> Array:
    return m.thread


for axis, letter in enumerate("xyz"):
    TABLE[f"amdgcn.workgroup.id.{letter}"] = lambda instruction, arch, axis=axis: lambda m: m.group_id[axis]  # type: ignore[misc]


@intrinsic("amdgcn.implicitarg.ptr")
def implicit_arguments(m: Machine) -> Array:
    return np.array([m.implicit_address], np.uint64)


# ---- across the lanes of a wave


@intrinsic("amdgcn.readfirstlane")
def read_first_lane(m: Machine, value: Array) -> Array:
    return m.full(value)[m.first_active()]


@intrinsic("amdgcn.readlane")
def read_lane(m: Machine, value: Array, lane: Array) -> Array:
    chosen = m.full(lane)[m.first_active()].astype(np.int64) % WAVE
    return m.full(value)[chosen + m.wave_start]


@intrinsic("amdgcn.writelane")
def write_lane(m: Machine, value: Array, lane: Array, old: Array) -> Array:
    first = m.first_active()
    here = m.lane == m.full(lane)[first].astype(np.int64) % WAVE
    return np.where(here, m.full(value)[first], m.full(old))


@factory("amdgcn.ballot")
def ballot(instruction: Instruction, arch: str) -> Operation:
    kind = kind_of(instruction)

    def run(m: Machine, predicate: Array) -> Array:
        votes = (m.full(predicate) & m.mask).reshape(-1, WAVE).astype(np.uint64)
        words = (votes << np.arange(WAVE, dtype=np.uint64)).sum(1, dtype=np.uint64)
        return wrap(np.repeat(words, WAVE), kind)

    return run


def lanes_below(m: Machine, first: int) -> Array:
    """Mask of the lanes below each lane, among the 32 lanes from ``first``."""
    count = np.clip(m.lane - first, 0, 32).astype(np.uint64)
    return ((np.uint64(1) << count) - np.uint64(1)).astype(np.uint32)


@intrinsic("amdgcn.mbcnt.lo")
def count_below_low(m: Machine, mask: Array, start: Array) -> Array:
    return np.bitwise_count(mask & lanes_below(m, 0)).astype(np.uint32) + start


@intrinsic("amdgcn.mbcnt.hi")
def count_below_high(m: Machine, mask: Array, start: Array) -> Array:
    return np.bitwise_count(mask & lanes_below(m, 32)).astype(np.uint32) + start


@intrinsic("amdgcn.ds.bpermute")
def pull(m: Machine, address: Array, value: Array) -> Array:
    """Each lane reads from the lane address / 4; a lane that does not run gives zero."""
    source = m.full(address).astype(np.int64) // 4 % WAVE + m.wave_start
    return np.where(m.mask[source], m.full(value)[source], np.uint32(0))


@intrinsic("amdgcn.ds.permute")
def push(m: Machine, address: Array, value: Array) -> Array:
    """Each running lane writes to the lane address / 4; of several the highest wins, of none zero."""
    target = m.full(address).astype(np.int64) // 4 % WAVE + m.wave_start
    result = np.zeros(m.lanes, np.uint32)
    result[target[m.mask]] = m.full(value)[m.mask]
    return result


@factory("amdgcn.ds.swizzle")
def swizzle(instruction: Instruction, arch: str) -> Operation:
    """A quad permutation (bit 15 set), or and, or and xor masks within 32 lanes; a lane that does not run gives zero."""
    pattern = int(instruction.operands[1].constant[0]) & 0xFFFF
    lane = np.arange(WAVE)
    if pattern & 0x8000:
        source = lane // 4 * 4 + ((pattern >> (2 * (lane % 4))) & 3)
    else:
        mixed = (((lane & 31) & pattern) | ((pattern >> 5) & 31)) ^ ((pattern >> 10) & 31)
        source = mixed & 31 | (lane & 32)

    def run(m: Machine, value: Array, offset: Array) -> Array:
        running = m.mask.reshape(-1, WAVE)[:, source]
        return np.where(running, m.full(value).reshape(-1, WAVE)[:, source], np.uint32(0)).reshape(-1)

    return run


def dpp_source(control: int, text: str) -> tuple[Array, Array]:
    """Source lane of every lane for a DPP control word, and whether it lies inside (CDNA3 ISA, DPP_CTRL)."""
    lane = np.arange(WAVE)
    row, place = lane // 16 * 16, lane % 16
    inside = np.ones(WAVE, np.bool_)
    if control < 0x100:  # quad_perm
        return lane // 4 * 4 + ((control >> (2 * (lane % 4))) & 3), inside
    amount = control & 15
    shifts = {0x100: place + amount, 0x110: place - amount}
    if control & 0xFF0 in shifts and amount:  # row_shl, row_shr
        moved = shifts[control & 0xFF0]
        return row + np.clip(moved, 0, 15), (moved >= 0) & (moved < 16)
    if control & 0xFF0 == 0x120 and amount:  # row_ror
        return row + (place - amount) % 16, inside
    if control & 0xFF0 == 0x150:  # row_newbcast
        return row + amount, inside
    table: dict[int, tuple[Array, Array]] = {
        0x130: (np.minimum(lane + 1, 63), lane < 63),  # wave_shl
        0x134: ((lane + 1) % WAVE, inside),  # wave_rol
        0x138: (np.maximum(lane - 1, 0), lane > 0),  # wave_shr
        0x13C: ((lane - 1) % WAVE, inside),  # wave_ror
        0x140: (row + 15 - place, inside),  # row_mirror
        0x141: (lane // 8 * 8 + 7 - lane % 8, inside),  # row_half_mirror
        0x142: (np.maximum(row - 1, 0), lane >= 16),  # row_bcast15
        0x143: (np.full(WAVE, 31), lane >= 32),  # row_bcast31
    }
    if control not in table:
        raise Trap(f"DPP control {control:#x} in `{text}`")
    return table[control]


@factory("amdgcn.update.dpp")
def data_parallel_move(instruction: Instruction, arch: str) -> Operation:
    """Where the source lane is outside or does not run: zero with bound_ctrl, else ``old``; masked rows and banks keep
    ``old``.
    """
    control, row_mask, bank_mask, bound = (int(operand.constant[0]) for operand in instruction.operands[2:])
    source, inside = dpp_source(control, instruction.text)
    lane = np.arange(WAVE)
    enabled = ((row_mask >> (lane // 16)) & (bank_mask >> (lane % 16 // 4)) & 1).astype(np.bool_)

    everywhere = bool(inside.all() and enabled.all())

    def run(m: Machine, old: Array, value: Array, *controls: Array) -> Array:
        value = m.full(value).reshape(-1, WAVE)
        moved = value.take(source, axis=1)
        if everywhere and m.whole_waves:
            return moved.reshape(-1)
        old = m.full(old).reshape(-1, WAVE)
        valid = inside if m.whole_waves else inside & m.mask.reshape(-1, WAVE).take(source, axis=1)
        moved = np.where(valid, moved, value.dtype.type(0) if bound else old)
        return np.where(enabled, moved, old).reshape(-1)

    return run


def swap_halves(distance: int) -> Operation:
    """Exchange the upper half-groups of the first operand with the lower ones of the second (CDNA4 ISA,
    V_PERMLANE16_SWAP and V_PERMLANE32_SWAP).
    """

    def run(m: Machine, first: Array, second: Array, *flags: Array) -> list[Array]:
        first, second = m.full(first), m.full(second)
        upper = m.lane % (2 * distance) >= distance
        below = np.where(upper, m.every_lane - distance, m.every_lane)
        above = np.where(upper, m.every_lane, m.every_lane + distance)
        return [np.where(upper, second[below], first), np.where(upper, second, first[above])]

    return run


for distance in (16, 32):
    intrinsic(f"amdgcn.permlane{distance}.swap")(swap_halves(distance))


# ---- LDS and buffers


def transposed_read(count: int) -> Factory:
    """Sixteen lanes read 8 bytes each, seen as a matrix of ``count`` elements a lane, and get it transposed (CDNA4 ISA,
    DS_READ_B64_TR_B16 and _B8).
    """

    def build(instruction: Instruction, arch: str) -> Operation:
        kind = instruction.type
        element = Type("int", 64 // count)

        def run(m: Machine, address: Array) -> Any:
            if not m.mask.reshape(-1, WAVE).all(1)[m.mask.reshape(-1, WAVE).any(1)].all():
                raise Trap(f"a transposed read needs all lanes of a wave in `{instruction.text}`")
            at = m.active(address)
            check_alignment(at, 8, instruction)
            data = np.zeros((m.lanes, 8), np.uint8)
            data[m.selected] = read(m, LDS, at, 8, instruction.text)
            rows = from_bytes(data, vector(count, element))
            group, place = m.every_lane // 16 * 16, m.every_lane % 16
            per_row = 16 // count
            columns = [rows[group + per_row * k + place // count, place % count] for k in range(count)]
            return bit_cast(np.stack(columns, axis=1), vector(count, element), kind)

        return run

    return build


TABLE["amdgcn.ds.read.tr16.b64"] = transposed_read(4)
TABLE["amdgcn.ds.read.tr8.b64"] = transposed_read(8)


@intrinsic("amdgcn.make.buffer.rsrc")
def make_resource(m: Machine, base: Array, stride: Array, records: Array, flags: Array) -> list[Array]:
    """A raw buffer: its base address and its size in bytes (32 bits count)."""
    if stride.any():
        raise Trap("a buffer resource with a stride")
    return [base, records.astype(np.uint64) & np.uint64(0xFFFFFFFF)]


def buffer_words(m: Machine, resource: list[Array], offset: Array, extra: Array, nbytes: int) -> Any:
    """For every word (at most 32 bits) of an access its place, the running lanes whose word is inside the buffer, and
    their addresses. Each word is checked apart, and the scalar offset ``extra`` does not take part (CDNA4 ISA 9.1.5.1).
    """
    base, records = m.full(resource[0]), m.full(resource[1]).astype(np.int64)
    place, extra = m.full(offset).astype(np.int64), m.full(extra).astype(np.uint64)
    width = min(nbytes, 4)
    for first in range(0, nbytes, width):
        lanes = m.every_lane[m.mask & (place + first + width <= records)]
        if len(lanes):
            yield first, width, lanes, base[lanes] + extra[lanes] + (place[lanes] + first).astype(np.uint64)


@factory("amdgcn.raw.ptr.buffer.load")
def buffer_load(instruction: Instruction, arch: str) -> Operation:
    kind = instruction.type

    def run(m: Machine, resource: list[Array], offset: Array, extra: Array, flags: Array) -> Any:
        value = np.zeros((m.lanes, kind.nbytes), np.uint8)  # a word outside reads zero
        for first, width, lanes, address in buffer_words(m, resource, offset, extra, kind.nbytes):
            value[lanes, first : first + width] = m.memory.load(address, width, instruction.text)
        return from_bytes(value, kind)

    return run


@factory("amdgcn.raw.ptr.buffer.store")
def buffer_store(instruction: Instruction, arch: str) -> Operation:
    kind = instruction.operands[0].type

    def run(m: Machine, value: Any, resource: list[Array], offset: Array, extra: Array, flags: Array) -> None:
        data = to_bytes(m.full(value), kind)
        for first, width, lanes, address in buffer_words(m, resource, offset, extra, kind.nbytes):
            m.memory.store(address, data[lanes, first : first + width], instruction.text)

    return run


def lds_place(m: Machine, base: Array, offset: Array, nbytes: int) -> Array:
    """Where a copy to LDS puts each lane's bytes: one base per wave (its first running lane's), lanes in a row."""
    start = m.full(base)[m.first_active()] + m.full(offset).astype(np.uint64)
    return start + (m.lane * nbytes).astype(np.uint64)


@factory("amdgcn.global.load.lds", "amdgcn.load.to.lds", "amdgcn.global.load.async.lds", "amdgcn.load.async.to.lds")
def copy_to_lds(instruction: Instruction, arch: str) -> Operation:
    nbytes = int(instruction.operands[2].constant[0])
    late = ".async." in str(instruction.detail)

    def run(m: Machine, source: Array, base: Array, size: Array, offset: Array, flags: Array) -> None:
        source = m.full(source) + m.full(offset).astype(np.uint64)
        target = lds_place(m, base, offset, nbytes)
        check_alignment(m.active(source), 4, instruction)
        data = np.zeros((m.lanes, nbytes), np.uint8)
        if m.mask.any():
            data[m.selected] = m.memory.load(m.active(source), nbytes, instruction.text)
        m.write_lds(target, data, instruction.text, late)

    return run


@factory("amdgcn.raw.ptr.buffer.load.lds", "amdgcn.raw.ptr.buffer.load.async.lds")
def buffer_copy_to_lds(instruction: Instruction, arch: str) -> Operation:
    nbytes = int(instruction.operands[2].constant[0])
    late = ".async." in str(instruction.detail)

    def run(
        m: Machine, resource: list[Array], base: Array, size: Array, offset: Array, extra: Array, fixed: Array,
        flags: Array,
    ) -> None:  # fmt: skip
        target = lds_place(m, base, fixed, nbytes)
        data = np.zeros((m.lanes, nbytes), np.uint8)
        for first, width, lanes, address in buffer_words(m, resource, offset + fixed, extra, nbytes):
            data[lanes, first : first + width] = m.memory.load(address, width, instruction.text)
        m.write_lds(target, data, instruction.text, late)

    return run


@intrinsic("amdgcn.asyncmark")
def mark(m: Machine) -> None:
    m.mark_copies()


@factory("amdgcn.wait.asyncmark")
def wait(instruction: Instruction, arch: str) -> Operation:
    outstanding = int(instruction.operands[0].constant[0])
    return lambda m, count: m.wait_copies(outstanding)


# ---- numbers


def by_element(compute: Callable[..., Array]) -> Factory:
    """A float function of one or more operands, computed in the result's type (bfloat in fp32)."""

    def build(instruction: Instruction, arch: str) -> Operation:
        kind = kind_of(instruction)
        return lambda m, *operands: from_float(compute(*[to_float(x, kind) for x in operands]), kind)

    return build


def fused(a: Array, b: Array, c: Array) -> Array:
    """a * b + c with one rounding (of fp32; exact product and a rounding to odd would be needed for fp64)."""
    return a.astype(np.float64) * b + c


FLOAT_FUNCTIONS: dict[str, Callable[..., Array]] = {
    "fabs": np.abs, "sqrt": np.sqrt, "floor": np.floor, "rint": np.rint, "exp2": np.exp2,
    "log2": np.log2, "maxnum": np.fmax, "minnum": np.fmin,
    "maximum": np.maximum, "minimum": np.minimum, "fma": fused, "amdgcn.exp2": np.exp2,
    "amdgcn.rcp": lambda x: np.divide(x.dtype.type(1), x), "amdgcn.sqrt": np.sqrt,
}  # fmt: skip
TABLE.update({name: by_element(compute) for name, compute in FLOAT_FUNCTIONS.items()})


@factory("ldexp")
def scale_by_power(instruction: Instruction, arch: str) -> Operation:
    kind, exponent_kind = kind_of(instruction), instruction.operands[1].type.element
    return lambda m, x, e: from_float(np.ldexp(to_float(x, kind), signed(e, exponent_kind)), kind)


def of_integers(compute: Callable[..., Array]) -> Factory:
    """An integer function of (operand values..., result type)."""

    def build(instruction: Instruction, arch: str) -> Operation:
        kind = kind_of(instruction)
        return lambda m, *operands: wrap(compute(*operands, kind), kind)

    return build


def bits_of(x: Array, kind: Type) -> Array:
    """Bits, lowest first, along a new last axis."""
    return ((x[..., None] >> np.arange(kind.bits).astype(kind.dtype)) & kind.dtype(1)).astype(np.bool_)


def reversed_bits(x: Array, kind: Type) -> Array:
    weights = np.uint64(1) << np.arange(kind.bits, dtype=np.uint64)[::-1]
    return (bits_of(x, kind).astype(np.uint64) * weights).sum(-1, dtype=np.uint64)


def zeros_from(top: bool) -> Callable[..., Array]:
    """Leading (``top``) or trailing zero bits; all of them for zero."""

    def count(x: Array, zero_is_poison: Array, kind: Type) -> Array:
        bits = bits_of(x, kind)
        ordered = bits[..., ::-1] if top else bits
        return np.where(bits.any(-1), ordered.argmax(-1), kind.bits).astype(np.uint64)

    return count


def funnel_left(a: Array, b: Array, amount: Array, kind: Type) -> Array:
    shift = amount % kind.dtype(kind.bits)
    return (a << shift) | np.where(shift == 0, kind.dtype(0), b >> (kind.dtype(kind.bits) - shift))


def funnel_right(a: Array, b: Array, amount: Array, kind: Type) -> Array:
    shift = amount % kind.dtype(kind.bits)
    return np.where(shift == 0, kind.dtype(0), a << (kind.dtype(kind.bits) - shift)) | (b >> shift)


INTEGER_FUNCTIONS: dict[str, Callable[..., Array]] = {
    "smax": lambda a, b, t: np.where(signed(a, t) > signed(b, t), a, b),
    "smin": lambda a, b, t: np.where(signed(a, t) < signed(b, t), a, b),
    "umax": lambda a, b, t: np.maximum(a, b),
    "umin": lambda a, b, t: np.minimum(a, b),
    "abs": lambda a, poison, t: np.abs(signed(a, t)).view(a.dtype),
    "usub.sat": lambda a, b, t: np.where(a > b, a - b, t.dtype(0)),
    "uadd.sat": lambda a, b, t: np.where(wrap(a + b, t) < a, t.dtype((1 << t.bits) - 1), a + b),
    "ctpop": lambda a, t: np.bitwise_count(a).astype(t.dtype),
    "bitreverse": reversed_bits,
    "ctlz": zeros_from(top=True),
    "cttz": zeros_from(top=False),
    "fshl": funnel_left,
    "fshr": funnel_right,
}
TABLE.update({name: of_integers(compute) for name, compute in INTEGER_FUNCTIONS.items()})


@intrinsic("amdgcn.perm")
def permute_bytes(m: Machine, high: Array, low: Array, selector: Array) -> Array:
    """Bytes picked from two words: 0-3 of the second, 4-7 of the first, 8-11 sign fills, 12 zero, above it 0xFF."""
    both = (high.astype(np.uint64) << np.uint64(32)) | low
    result = np.zeros(np.broadcast_shapes(both.shape, selector.shape), np.uint64)
    for k in range(4):
        pick = (selector >> np.uint32(8 * k)) & np.uint32(0xFF)
        byte = (both >> (np.minimum(pick, 7).astype(np.uint64) * np.uint64(8))) & np.uint64(0xFF)
        signs = np.clip(pick.astype(np.int64) - 8, 0, 3) * 16 + 15
        fill = ((both >> signs.astype(np.uint64)) & np.uint64(1)) * np.uint64(0xFF)
        special = np.where(pick >= 13, np.uint64(0xFF), np.where(pick == 12, np.uint64(0), fill))
        result |= np.where(pick < 8, byte, special) << np.uint64(8 * k)
    return result.astype(np.uint32)


@intrinsic("amdgcn.cvt.pkrtz")
def pack_halves(m: Machine, first: Array, second: Array) -> Array:
    """Two fp32 to half, rounded toward zero."""
    return np.stack([toward_zero(m.full(x)) for x in (first, second)], axis=1)


def toward_zero(value: Array) -> Array:
    nearest = value.astype(np.float16)
    too_large = np.abs(nearest.astype(np.float32)) > np.abs(value)
    return np.where(too_large, np.nextafter(nearest, np.float16(0)), nearest)


def fp8_names(arch: str) -> dict[str, str]:
    """What ``fp8`` and ``bf8`` mean: CDNA3 has its own formats, CDNA4 those of the OCP."""
    own = arch == "gfx942"
    return {"fp8": "e4m3fnuz" if own else "e4m3fn", "bf8": "e5m2fnuz" if own else "e5m2"}


@factory("amdgcn.cvt.pk.f32.fp8", "amdgcn.cvt.pk.f32.bf8")
def unpack_fp8(instruction: Instruction, arch: str) -> Operation:
    """Two bytes of a word, the upper ones when asked, to fp32."""
    table = fp8_table(fp8_names(arch)[str(instruction.detail).split(".")[-1]]).astype(np.float32)
    start = 2 if instruction.operands[1].constant[0] else 0
    return lambda m, word, upper: table[to_bytes(m.full(word), I32)[:, start : start + 2]]


__all__ = ["SIGNED", "TABLE", "build_intrinsic", "factory", "fp8_names", "intrinsic"]

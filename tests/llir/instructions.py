# SPDX-License-Identifier: Apache-2.0
"""LLVM instructions: each builder turns one instruction into a function of the machine and its operands' values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .syntax import Instruction
from .types import BOOL, LDS, NARROW_SPACES, SIGNED, Trap, Type
from .values import Array, bfloat_to_float, bit_cast, from_bytes, from_float, signed, to_bytes, to_float, wrap

if TYPE_CHECKING:
    from .machine import Machine

Operation = Callable[..., Any]  # (machine, *operand values) -> value
Builder = Callable[[Instruction], Operation]
BUILDERS: dict[str, Builder] = {}


def builder(*opcodes: str) -> Callable[[Builder], Builder]:
    """Register the builder of ``opcodes``."""

    def register(function: Builder) -> Builder:
        BUILDERS.update(dict.fromkeys(opcodes, function))
        return function

    return register


# ---- arithmetic


def divided(a: Array, b: Array, kind: Type) -> tuple[Array, Array]:
    """Signed quotient (towards zero) and remainder; by zero (undefined, so only in lanes that don't count) anything."""
    x, y = signed(a, kind).astype(np.int64), signed(b, kind).astype(np.int64)
    y = np.where(y == 0, 1, y)
    floor = x // y
    quotient = floor + ((x % y != 0) & ((x < 0) != (y < 0)))
    return quotient, x - quotient * y


INTEGER: dict[str, Callable[[Array, Array, Type], Array]] = {
    "add": lambda a, b, t: a ^ b if t.bits == 1 else wrap(a + b, t),
    "sub": lambda a, b, t: a ^ b if t.bits == 1 else wrap(a - b, t),
    "mul": lambda a, b, t: a & b if t.bits == 1 else wrap(a * b, t),
    "and": lambda a, b, t: a & b,
    "or": lambda a, b, t: a | b,
    "xor": lambda a, b, t: a ^ b,
    "shl": lambda a, b, t: wrap(np.left_shift(a, b), t),
    "lshr": lambda a, b, t: np.right_shift(a, b),
    "ashr": lambda a, b, t: wrap(np.right_shift(signed(a, t), b.astype(SIGNED[t.storage_bits])), t),
    "udiv": lambda a, b, t: a // np.maximum(b, t.dtype(1)),
    "urem": lambda a, b, t: a % np.maximum(b, t.dtype(1)),
    "sdiv": lambda a, b, t: wrap(divided(a, b, t)[0].view(np.uint64), t),
    "srem": lambda a, b, t: wrap(divided(a, b, t)[1].view(np.uint64), t),
}
FLOATING: dict[str, Callable[[Array, Array], Array]] = {
    "fadd": np.add, "fsub": np.subtract, "fmul": np.multiply, "fdiv": np.divide,
}  # fmt: skip


@builder(*INTEGER)
def integer_binary(instruction: Instruction) -> Operation:
    compute, kind = INTEGER[instruction.opcode], instruction.type.element
    return lambda m, a, b: compute(a, b, kind)


@builder(*FLOATING)
def float_binary(instruction: Instruction) -> Operation:
    compute, kind = FLOATING[instruction.opcode], instruction.type.element
    if kind.kind != "bfloat":
        return lambda m, a, b: compute(a, b)
    return lambda m, a, b: from_float(compute(to_float(a, kind), to_float(b, kind)), kind)


@builder("fneg")
def negate(instruction: Instruction) -> Operation:
    if instruction.type.element.kind == "bfloat":
        return lambda m, a: a ^ np.uint16(0x8000)
    return lambda m, a: -a


@builder("freeze")
def freeze(instruction: Instruction) -> Operation:
    return lambda m, a: a


RELATIONS = {"eq": np.equal, "ne": np.not_equal, "gt": np.greater, "ge": np.greater_equal, "lt": np.less,
             "le": np.less_equal}  # fmt: skip


@builder("icmp")
def compare_integers(instruction: Instruction) -> Operation:
    predicate, kind = instruction.detail, instruction.operands[0].type.element
    relation = RELATIONS[predicate[-2:]]
    if predicate[0] == "s":
        return lambda m, a, b: relation(signed(a, kind), signed(b, kind))
    return lambda m, a, b: relation(a, b)


@builder("fcmp")
def compare_floats(instruction: Instruction) -> Operation:
    predicate, kind = instruction.detail, instruction.operands[0].type.element
    relation = RELATIONS.get(predicate[1:])

    def compare(m: Machine, a: Array, b: Array) -> Array:
        x, y = to_float(a, kind), to_float(b, kind)
        if predicate in ("true", "false"):
            return np.full(np.broadcast_shapes(x.shape, y.shape), predicate == "true")
        unordered = np.isnan(x) | np.isnan(y)
        if relation is None:
            return unordered if predicate == "uno" else ~unordered
        return relation(x, y) | unordered if predicate[0] == "u" else relation(x, y) & ~unordered

    return compare


@builder("select")
def select(instruction: Instruction) -> Operation:
    if instruction.type.is_aggregate:
        return lambda m, c, a, b: [np.where(like(c, x), x, y) for x, y in zip(a, b, strict=True)]
    return lambda m, c, a, b: np.where(like(c, a), a, b)


def like(condition: Array, value: Array) -> Array:
    """A scalar condition with an axis for a vector's elements."""
    return condition[:, None] if value.ndim > condition.ndim else condition


# ---- conversions


@builder("trunc", "zext", "sext")
def convert_integer(instruction: Instruction) -> Operation:
    source, target = instruction.operands[0].type.element, instruction.type.element
    if instruction.opcode == "sext":
        return lambda m, a: wrap(signed(a, source).astype(SIGNED[target.storage_bits]), target)
    return lambda m, a: wrap(a, target) if target.bits < 64 or a.dtype != np.uint64 else a


@builder("fptrunc", "fpext")
def convert_float(instruction: Instruction) -> Operation:
    source, target = instruction.operands[0].type.element, instruction.type.element
    return lambda m, a: from_float(to_float(a, source), target)


@builder("uitofp", "sitofp")
def integer_to_float(instruction: Instruction) -> Operation:
    source, target = instruction.operands[0].type.element, instruction.type.element
    value = signed if instruction.opcode == "sitofp" else lambda a, kind: a
    if target.kind == "bfloat":
        return lambda m, a: from_float(value(a, source).astype(np.float64), target)
    return lambda m, a: value(a, source).astype(target.dtype)


@builder("fptoui", "fptosi")
def float_to_integer(instruction: Instruction) -> Operation:
    source, target = instruction.operands[0].type.element, instruction.type.element
    low, high = (-(2 ** (target.bits - 1)), 2 ** (target.bits - 1) - 1)
    if instruction.opcode == "fptoui":
        low, high = 0, 2**target.bits - 1
    limit = np.nextafter(np.float64(high), 0) if target.bits == 64 else np.float64(high)

    def convert(m: Machine, a: Array) -> Array:
        number = np.nan_to_num(np.trunc(to_float(a, source).astype(np.float64)), nan=0.0)
        clipped = np.clip(number, low, limit)  # beyond the range the result is poison: any value serves
        return wrap(clipped.astype(np.uint64 if low == 0 else np.int64), target)

    return convert


@builder("inttoptr", "ptrtoint")
def convert_address(instruction: Instruction) -> Operation:
    """The same number: zero-extended, or its high bits cut, where the sizes differ (LangRef, inttoptr and ptrtoint)."""
    source, target = instruction.operands[0].type.element, instruction.type.element
    address, number = (target, source) if target.kind == "ptr" else (source, target)
    check_space(address.size, instruction)
    if address.size in NARROW_SPACES or number.bits < 64:
        raise Trap(f"addresses of another size than 64 bits in `{instruction.text}`")
    return lambda m, a: a


@builder("bitcast")
def reinterpret(instruction: Instruction) -> Operation:
    source, target = instruction.operands[0].type, instruction.type
    if source.dtype is target.dtype and source.size == target.size and source.kind == target.kind:
        return lambda m, a: a
    return lambda m, a: bit_cast(a, source, target)


# ---- vectors and aggregates


@builder("extractelement")
def extract_element(instruction: Instruction) -> Operation:
    index = instruction.operands[1].constant
    if index is not None:
        place = int(index[0])
        return lambda m, a, i: a[:, place]
    return lambda m, a, i: np.broadcast_to(a, (m.lanes, a.shape[1]))[m.every_lane, m.full(i).astype(np.int64)]


@builder("insertelement")
def insert_element(instruction: Instruction) -> Operation:
    index = instruction.operands[2].constant

    def insert(m: Machine, a: Array, value: Array, i: Array) -> Array:
        rows = max(len(a), len(value), len(i))
        result = a.copy() if len(a) == rows else np.repeat(a, rows, axis=0)
        if index is not None:
            result[:, int(index[0])] = value
        else:
            result[np.arange(rows), np.broadcast_to(i, rows).astype(np.int64)] = value
        return result

    return insert


@builder("shufflevector")
def shuffle(instruction: Instruction) -> Operation:
    mask, count = instruction.detail, instruction.operands[0].type.size
    places = np.array([0 if place is None else place for place in mask])  # an element that is poison may be any
    if places.max() < count:
        if len(places) and (np.diff(places) == 1).all():
            first, last = int(places[0]), int(places[-1]) + 1
            return lambda m, a, b: a[:, first:last]
        return lambda m, a, b: a[:, places]

    def pick(m: Machine, a: Array, b: Array) -> Array:
        rows = max(len(a), len(b))
        both = [np.broadcast_to(x, (rows, x.shape[1])) for x in (a, b)]
        return np.concatenate(both, axis=1)[:, places]

    return pick


@builder("extractvalue")
def extract_value(instruction: Instruction) -> Operation:
    index = instruction.detail
    return lambda m, a: a[index]


# ---- memory


@builder("getelementptr")
def address(instruction: Instruction) -> Operation:
    kinds = [operand.type.element for operand in instruction.operands[1:]]
    scales = [np.int64(scale) for scale in instruction.detail]
    narrow = instruction.type.element.size in NARROW_SPACES

    def compute(m: Machine, base: Array, *indexes: Array) -> Array:
        for index, kind, scale in zip(indexes, kinds, scales, strict=True):
            base = base + (signed(index, kind).astype(np.int64) * scale).view(np.uint64)
        return base & np.uint64(0xFFFFFFFF) if narrow else base

    return compute


@builder("load")
def load(instruction: Instruction) -> Operation:
    kind, space = instruction.type, instruction.operands[0].type.size
    align, polls = instruction.detail
    check_space(space, instruction)

    def run(m: Machine, at: Array) -> Any:
        if polls:
            m.pause()
        at = m.active(at)
        value = np.zeros((m.lanes, kind.nbytes), np.uint8)
        if len(at):
            check_alignment(at, align, instruction)
            value[m.selected] = read(m, space, at, kind.nbytes, instruction.text)
        return from_bytes(value, kind)

    return run


@builder("store")
def store(instruction: Instruction) -> Operation:
    kind, space = instruction.type, instruction.operands[1].type.size
    align, _ = instruction.detail
    check_space(space, instruction)

    def run(m: Machine, value: Any, at: Array) -> None:
        at = m.active(at)
        if len(at):
            check_alignment(at, align, instruction)
            write(m, space, at, to_bytes(m.active(value), kind), instruction.text)

    return run


def check_space(space: int, instruction: Instruction) -> None:
    """Only flat, global, constant and LDS addresses are known here."""
    if space not in (0, 1, LDS, 4):
        raise Trap(f"address space {space} in `{instruction.text}`")


def check_alignment(at: Array, align: int, instruction: Instruction) -> None:
    """The text promises the compiler an alignment: the address must keep it."""
    if align > 1 and (at & np.uint64(align - 1)).any():
        bad = int(at[(at & np.uint64(align - 1)) != 0][0])
        raise Trap(f"address {bad:#x} is not aligned to {align} bytes in `{instruction.text}`")


def read(m: Machine, space: int, at: Array, nbytes: int, text: str) -> Array:
    """Bytes of the active lanes."""
    if space == LDS:
        return m.lds.load(at, m.workgroup[m.selected], nbytes, text)
    return m.memory.load(at, nbytes, text)


def write(m: Machine, space: int, at: Array, value: Array, text: str) -> None:
    """Write bytes of the active lanes."""
    if space == LDS:
        m.lds.store(at, m.workgroup[m.selected], value, text)
    else:
        m.memory.store(at, value, text)


UPDATES: dict[str, Callable[[Array, Array, Type], Array]] = {
    **{name: INTEGER[name] for name in ("add", "sub", "and", "or", "xor")},
    "xchg": lambda old, x, t: x,
    "max": lambda old, x, t: np.where(signed(old, t) > signed(x, t), old, x),
    "min": lambda old, x, t: np.where(signed(old, t) < signed(x, t), old, x),
    "umax": lambda old, x, t: np.maximum(old, x),
    "umin": lambda old, x, t: np.minimum(old, x),
    "fadd": lambda old, x, t: from_float(to_float(old, t) + to_float(x, t), t),
}


@builder("atomicrmw")
def atomic_update(instruction: Instruction) -> Operation:
    kind, space = instruction.type, instruction.operands[0].type.size
    align, name = instruction.detail
    check_space(space, instruction)
    if name not in UPDATES:
        raise Trap(f"unknown atomic operation {name} in `{instruction.text}`")
    update = UPDATES[name]

    def run(m: Machine, at: Array, value: Array) -> Array:
        m.pause()
        at, value, old = m.full(at), m.full(value), np.zeros(m.lanes, kind.dtype)
        for one in one_at_a_time(m):
            check_alignment(at[one], align, instruction)
            before = from_bytes(read(m, space, at[one], kind.nbytes, instruction.text), kind)
            old[one] = before
            write(m, space, at[one], to_bytes(update(before, value[one], kind), kind), instruction.text)
        return old

    return run


@builder("cmpxchg")
def compare_exchange(instruction: Instruction) -> Operation:
    kind, space, align = instruction.operands[1].type, instruction.operands[0].type.size, instruction.detail
    check_space(space, instruction)

    def run(m: Machine, at: Array, expected: Array, desired: Array) -> list[Array]:
        m.pause()
        at, expected, desired = m.full(at), m.full(expected), m.full(desired)
        old, same = np.zeros(m.lanes, kind.dtype), np.zeros(m.lanes, np.bool_)
        for one in one_at_a_time(m):
            check_alignment(at[one], align, instruction)
            before = from_bytes(read(m, space, at[one], kind.nbytes, instruction.text), kind)
            old[one], same[one] = before, before == expected[one]
            if same[one][0]:
                write(m, space, at[one], to_bytes(desired[one], kind), instruction.text)
        return [old, same]

    return run


def one_at_a_time(m: Machine) -> Any:
    """Active lanes one by one, as an index and as the machine's selection."""
    lanes = m.every_lane[m.mask]
    kept = m.selected
    for lane in lanes:
        m.selected = np.array([lane])
        yield m.selected
    m.selected = kept


__all__ = ["BOOL", "BUILDERS", "Builder", "Operation", "bfloat_to_float", "builder", "like", "read", "write"]

# SPDX-License-Identifier: Apache-2.0
"""Textual LLVM IR of one kernel -> blocks of instructions."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .types import FLOATS, I32, Trap, Type, vector
from .values import Array, float_to_bfloat

TOKEN = re.compile(
    r"""\s*(
      "[^"]*" | [%@](?:"[^"]*"|[-\w.$]+) | [!#][-\w.$]* |
      [-+](?:inf|s?nan|qnan)(?:\(0x[0-9A-Fa-f]+\))? | f?0x[HR]?[0-9A-Fa-f]+ |
      [-+]?\d+\.\d*(?:e[-+]?\d+)? | -?\d+ | \.\.\. | [A-Za-z_][\w.]* | [^\s]
    )""",
    re.VERBOSE,
)
# words that change nothing that this interpreter models; some carry an argument in parentheses
WORDS = frozenset(
    [
        "nuw",
        "nsw",
        "exact",
        "disjoint",
        "nneg",
        "inbounds",
        "nusw",
        "samesign",
        "fast",
        "nnan",
        "ninf",
        "nsz",
        "arcp",
        "contract",
        "afn",
        "reassoc",
        "tail",
        "musttail",
        "notail",
        "volatile",
        "sideeffect",
        "noundef",
        "zeroext",
        "signext",
        "inreg",
        "nonnull",
        "dereferenceable",
        "captures",
        "convergent",
        "atomic",
        "weak",
        "syncscope",
        "nofree",
        "readonly",
        "readnone",
        "writeonly",
        "range",
        "align",
        "monotonic",
        "acquire",
        "release",
        "acq_rel",
        "seq_cst",
        "noalias",
        "nocapture",
    ]
)
SMEM = "@global_smem"
MAX_THREADS = 1024  # of a workgroup whose kernel states no bound of its own
ASSEMBLY = "asm "  # begins the name of a call of inline assembly


@dataclass(frozen=True)
class Operand:
    """A register by name, or a constant."""

    type: Type
    name: str | None = None
    constant: Any = None


@dataclass(frozen=True)
class Instruction:
    """``type`` is the result's (for a store the value's); ``detail`` holds what the opcode needs beyond operands."""

    text: str
    opcode: str
    result: str | None
    type: Type
    operands: tuple[Operand, ...]
    detail: Any = None


@dataclass(frozen=True)
class Function:
    """A kernel: its arguments and its blocks in the order of the text."""

    name: str
    arguments: tuple[tuple[str, Type], ...]
    blocks: dict[str, list[Instruction]]
    max_threads: int = MAX_THREADS  # of a workgroup


class Reader:
    """Tokens of one line, read from the left."""

    def __init__(self, text: str) -> None:
        self.tokens = TOKEN.findall(text)
        self.place = 0
        self.align = 1

    def peek(self) -> str:
        return self.tokens[self.place] if self.place < len(self.tokens) else ""

    def take(self) -> str:
        self.place += 1
        return self.tokens[self.place - 1] if self.place <= len(self.tokens) else ""

    def accept(self, token: str) -> bool:
        if self.peek() == token:
            self.place += 1
            return True
        return False

    def expect(self, token: str) -> None:
        if not self.accept(token):
            raise Trap(f"expected {token}, found {self.peek() or 'the end'}")

    def words(self) -> None:
        """Pass over flags and attributes; an ``align`` is remembered."""
        while self.peek() in WORDS:
            word = self.take()
            if word == "align":
                self.align = int(self.take())
            elif self.peek() == "(" and word not in ("nuw", "nsw", "inbounds", "nneg", "exact", "disjoint"):
                self.group()
            elif word == "range":  # range(i32 0, 64): the group was taken above; without one it is no attribute
                raise Trap("range without bounds")

    def group(self) -> None:
        """Pass over a balanced group in parentheses."""
        depth = 0
        while True:
            token = self.take()
            depth += (token == "(") - (token == ")")
            if depth == 0:
                return
            if not token:
                raise Trap("parentheses do not close")

    def type(self) -> Type:
        token = self.take()
        if token in ("<", "["):
            if self.peek() == "{":
                raise Trap("packed structs")
            close = ">" if token == "<" else "]"
            count = int(self.take())
            self.expect("x")
            element = self.type()
            self.expect(close)
            return Type("vector" if close == ">" else "array", count, (element,))
        if token == "{":
            elements = []
            while not self.accept("}"):
                elements.append(self.type())
                self.accept(",")
            return Type("struct", len(elements), tuple(elements))
        if token == "ptr":
            if not self.accept("addrspace"):
                return Type("ptr", 0)
            self.expect("(")
            space = int(self.take())
            self.expect(")")
            return Type("ptr", space)
        if re.fullmatch(r"i\d+", token):
            return Type("int", int(token[1:]))
        if token in FLOATS or token in ("void", "label", "metadata"):
            return Type(token)
        raise Trap(f"type {token}")

    def typed(self) -> Operand:
        """A type and a value of it."""
        kind = self.type()
        self.words()
        return self.value(kind)

    def value(self, kind: Type) -> Operand:
        if self.peek()[:1] == "%":
            return Operand(kind, name=self.take())
        return Operand(kind, constant=self.constant(kind))

    def constant(self, kind: Type) -> Any:
        """A constant as arrays with one lane, which broadcast."""
        token = self.take()
        if token in ("zeroinitializer", "null", "none"):
            return filled(kind, 0)
        if token in ("poison", "undef"):
            return filled(kind, None)
        if token == "splat":
            self.expect("(")
            inner = self.typed()
            self.expect(")")
            return np.repeat(inner.constant[:, None], kind.size, axis=1)
        if token in ("<", "["):
            close = ">" if token == "<" else "]"
            items = []
            while not self.accept(close):
                items.append(self.typed().constant)
                self.accept(",")
            return items if close == "]" else np.stack(items, axis=1)
        if token == "{":
            items = []
            while not self.accept("}"):
                items.append(self.typed().constant)
                self.accept(",")
            return items
        if token == SMEM:
            return np.zeros(1, np.uint64)
        if token == "getelementptr":
            return self.constant_address()
        if kind.kind == "int":
            number = {"true": 1, "false": 0}.get(token)
            number = int(token) if number is None else number
            return np.array([number & ((1 << kind.bits) - 1)], np.uint64).astype(kind.dtype)
        if kind.kind in FLOATS:
            return float_constant(token, kind)
        raise Trap(f"constant {token} of {kind}")

    def constant_address(self) -> Array:
        """A constant ``getelementptr`` on the dynamic LDS."""
        self.words()
        self.expect("(")
        kind = self.type()
        self.expect(",")
        base = self.typed()
        offset = 0
        while self.accept(","):
            index = self.typed()
            offset += int(index.constant.astype(np.int64)[0]) * kind.nbytes
            kind = kind.element
        self.expect(")")
        return base.constant + np.uint64(offset)

    def label(self) -> str:
        self.expect("label")
        return self.take()


def filled(kind: Type, fill: int | None) -> Any:
    """Zeros, or (``None``) the poison pattern, of a type."""
    if kind.kind == "struct":
        return [filled(element, fill) for element in kind.elements]
    if kind.kind == "array":
        return [filled(kind.element, fill) for _ in range(kind.size)]
    shape = (1, kind.size) if kind.kind == "vector" else (1,)
    if fill == 0 or kind.dtype is np.bool_:
        return np.zeros(shape, kind.dtype)
    size = np.dtype(kind.dtype).itemsize
    return np.full((*shape, size), 0xAB, np.uint8).view(kind.dtype).reshape(shape)


def float_constant(token: str, kind: Type) -> Array:
    """A float literal: decimal, special, or bits (``0xH`` half, ``0xR`` bfloat, ``0x`` always a double's bits)."""
    bits = re.fullmatch(r"(f?)0x([HR]?)([0-9A-Fa-f]+)", token)
    if bits and (bits[1] or bits[2]):
        return np.array([int(bits[3], 16)], {2: np.uint16, 4: np.uint32, 8: np.uint64}[kind.nbytes]).view(kind.dtype)
    if bits:
        number = struct.unpack("<d", struct.pack("<Q", int(bits[3], 16)))[0]
    else:
        number = float(re.sub(r"[qs]nan.*|nan.*", "nan", token))
    if kind.kind == "bfloat":
        return float_to_bfloat(np.array([number], np.float32))
    return np.array([number]).astype(kind.dtype)


# ---- instructions

BINARY = frozenset(
    ["add", "sub", "mul", "and", "or", "xor", "shl", "lshr", "ashr", "udiv", "sdiv", "urem", "srem", "fadd", "fsub",
     "fmul", "fdiv"]
)  # fmt: skip
CASTS = frozenset(
    ["trunc", "zext", "sext", "fptrunc", "fpext", "fptoui", "fptosi", "uitofp", "sitofp", "bitcast",
     "inttoptr", "ptrtoint"]
)  # fmt: skip
VOID = Type("void")


def parse_instruction(text: str) -> Instruction:
    """One instruction; :class:`Trap` with the text when it is unknown."""
    reader = Reader(text)
    result = None
    if len(reader.tokens) > 1 and reader.tokens[1] == "=":
        result = reader.take()
        reader.take()
    reader.words()
    opcode = reader.take()
    try:
        if opcode in BINARY:
            reader.words()
            left = reader.typed()
            reader.expect(",")
            return Instruction(text, opcode, result, left.type, (left, reader.value(left.type)))
        if opcode in CASTS:
            reader.words()
            source = reader.typed()
            reader.expect("to")
            return Instruction(text, opcode, result, reader.type(), (source,))
        parse = globals().get(f"parse_{opcode}")
        if parse is None:
            raise Trap(f"unknown opcode {opcode}")
        kind, operands, detail = parse(reader)
    except Trap as trap:
        raise Trap(f"{trap} in `{text}`") from None
    return Instruction(text, opcode, result, kind, tuple(operands), detail)


Parts = tuple[Type, Sequence[Operand], Any]


def operand_list(reader: Reader) -> list[Operand]:
    """``type value`` pairs separated by commas, as many as there are."""
    operands = [reader.typed()]
    while reader.accept(","):
        if reader.peek() == "align":
            reader.words()
            break
        operands.append(reader.typed())
    return operands


def parse_ret(reader: Reader) -> Parts:
    return VOID, (), None


def parse_fence(reader: Reader) -> Parts:
    return VOID, (), None


def parse_br(reader: Reader) -> Parts:
    if reader.peek() == "label":
        return VOID, (), (reader.label(),)
    condition = reader.typed()
    reader.expect(",")
    yes = reader.label()
    reader.expect(",")
    return VOID, (condition,), (yes, reader.label())


def parse_switch(reader: Reader) -> Parts:
    value = reader.typed()
    reader.expect(",")
    labels, cases = [reader.label()], []
    reader.expect("[")
    while not reader.accept("]"):
        cases.append(reader.typed())
        reader.expect(",")
        labels.append(reader.label())
    return VOID, (value, *cases), tuple(labels)


def parse_phi(reader: Reader) -> Parts:
    reader.words()
    kind = reader.type()
    operands, labels = [], []
    while True:
        reader.expect("[")
        operands.append(reader.value(kind))
        reader.expect(",")
        labels.append(reader.take())
        reader.expect("]")
        if not reader.accept(","):
            return kind, operands, tuple(labels)


def parse_compare(reader: Reader) -> Parts:
    reader.words()
    predicate = reader.take()
    left = reader.typed()
    reader.expect(",")
    kind = vector(left.type.size, Type("int", 1)) if left.type.kind == "vector" else Type("int", 1)
    return kind, (left, reader.value(left.type)), predicate


parse_icmp = parse_fcmp = parse_compare


def parse_fneg(reader: Reader) -> Parts:
    reader.words()
    operand = reader.typed()
    return operand.type, (operand,), None


parse_freeze = parse_fneg


def parse_select(reader: Reader) -> Parts:
    reader.words()
    operands = operand_list(reader)
    return operands[1].type, operands, None


def parse_extractelement(reader: Reader) -> Parts:
    operands = operand_list(reader)
    return operands[0].type.element, operands, None


def parse_insertelement(reader: Reader) -> Parts:
    operands = operand_list(reader)
    return operands[0].type, operands, None


def parse_shufflevector(reader: Reader) -> Parts:
    left = reader.typed()
    reader.expect(",")
    right = reader.typed()
    reader.expect(",")
    mask_type = reader.type()
    if reader.peek() == "<":
        reader.take()
        mask = []
        while not reader.accept(">"):
            reader.expect("i32")
            token = reader.take()
            mask.append(None if token in ("poison", "undef") else int(token))
            reader.accept(",")
    else:
        mask = [int(x) for x in reader.constant(mask_type)[0]]
    return vector(mask_type.size, left.type.element), (left, right), mask


def parse_extractvalue(reader: Reader) -> Parts:
    operand = reader.typed()
    reader.expect(",")
    index = int(reader.take())
    return operand.type.elements[index if operand.type.kind == "struct" else 0], (operand,), index


def parse_getelementptr(reader: Reader) -> Parts:
    reader.words()
    kind = reader.type()
    reader.expect(",")
    operands = operand_list(reader)
    scales = []
    for _ in operands[1:]:
        scales.append(kind.nbytes)
        kind = kind.element
    return operands[0].type, operands, tuple(scales)


def parse_load(reader: Reader) -> Parts:
    polls = reader.peek() in ("atomic", "volatile")
    reader.words()
    kind = reader.type()
    reader.expect(",")
    address = reader.typed()
    alignment(reader)
    return kind, (address,), (reader.align, polls)


def parse_store(reader: Reader) -> Parts:
    reader.words()
    value = reader.typed()
    reader.expect(",")
    address = reader.typed()
    alignment(reader)
    return value.type, (value, address), (reader.align, False)


def alignment(reader: Reader) -> None:
    """What may follow a memory operand: memory order, scope, alignment."""
    reader.align = 1
    reader.words()
    while reader.accept(","):
        reader.words()


def parse_atomicrmw(reader: Reader) -> Parts:
    reader.words()
    operation = reader.take()
    address = reader.typed()
    reader.expect(",")
    value = reader.typed()
    alignment(reader)
    return value.type, (address, value), (reader.align, operation)


def parse_cmpxchg(reader: Reader) -> Parts:
    reader.words()
    address = reader.typed()
    reader.expect(",")
    expected = reader.typed()
    reader.expect(",")
    desired = reader.typed()
    alignment(reader)
    return Type("struct", 2, (desired.type, Type("int", 1))), (address, expected, desired), reader.align


def parse_call(reader: Reader) -> Parts:
    reader.words()
    kind = reader.type()
    callee = assembly(reader) if reader.accept("asm") else reader.take()
    if not callee.startswith(("@llvm.", ASSEMBLY)):
        raise Trap(f"call of {callee}")
    reader.expect("(")
    operands = []
    while not reader.accept(")"):
        argument = reader.type()
        reader.words()
        if argument.kind == "metadata":
            operands.append(Operand(I32, constant=metadata(reader)))
        else:
            operands.append(reader.value(argument))
        reader.accept(",")
    return kind, operands, callee.removeprefix("@llvm.")


def assembly(reader: Reader) -> str:
    """Inline assembly as the name of a call: its lines and its constraints."""
    reader.words()
    text = reader.take()[1:-1]
    reader.expect(",")
    lines = [" ".join(line.split()) for line in text.split(r"\0A")]
    return f"{ASSEMBLY}{'; '.join(lines)} {reader.take()}"


def metadata(reader: Reader) -> Array:
    """Metadata arguments mean nothing here."""
    while reader.peek() not in (",", ")"):
        reader.take()
    return np.zeros(1, np.uint32)


# ---- functions


def parse_function(text: str, name: str) -> Function:
    """The kernel ``name`` of an IR module.

    Raises
    ------
    Trap
        When the module does not define it, or holds an instruction that this interpreter does not know.
    """
    lines = iter(text.split("\n"))
    head = next((line for line in lines if line.startswith("define") and f"@{name}(" in line), None)
    if head is None:
        raise Trap(f"the module defines no kernel {name}")
    arguments = parse_arguments(head[head.index("(") :])
    unnamed = sum(argument[1:].isdigit() for argument, _ in arguments)
    blocks: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []  # the entry block, whose label may be given or the next number
    for line in lines:
        if line.startswith("}"):
            return Function(name, arguments, blocks, parse_max_threads(text, head))
        label = re.match(r'^("[^"]*"|[-\w.$]+):', line)
        if label:
            current = blocks.setdefault("%" + label[1], [])
            continue
        statement = re.sub(r"(, ![\w.]+ !\d+)+$", "", line.split(" ; ")[0].strip())
        if statement.startswith("switch"):
            while "]" not in statement:
                statement += " " + next(lines).strip()
        if not statement or statement.startswith((";", "#dbg")):
            continue
        if not blocks:
            current = blocks.setdefault(f"%{unnamed}", [])
        current.append(parse_instruction(statement))
    raise Trap(f"kernel {name} has no end")


def parse_max_threads(text: str, head: str) -> int:
    """The upper bound of ``amdgpu-flat-work-group-size`` at the kernel's first line, or in the group that it names."""
    group = re.search(r" (#\d+) \{$", head)
    attributes = re.search(rf"^attributes {group[1]} = .*$", text, re.MULTILINE) if group else None
    found = re.search(r'"amdgpu-flat-work-group-size"="\d+,(\d+)"', head + (attributes[0] if attributes else ""))
    return int(found[1]) if found else MAX_THREADS


def parse_arguments(text: str) -> tuple[tuple[str, Type], ...]:
    """Names and types of a kernel's parameters."""
    reader = Reader(text)
    reader.expect("(")
    arguments: list[tuple[str, Type]] = []
    unnamed = 0
    while not reader.accept(")"):
        kind = reader.type()
        name = ""
        while reader.peek() not in (",", ")"):
            token = reader.take()
            if token[0] == "%":
                name = token
            elif reader.peek() == "(":
                reader.group()
        reader.accept(",")
        if not name or name[1:].isdigit():
            name = f"%{unnamed}"
            unnamed += 1
        arguments.append((name, kind))
    return tuple(arguments)

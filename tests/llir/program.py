# SPDX-License-Identifier: Apache-2.0
"""A parsed kernel as numbered segments of operations on numbered registers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .instructions import BUILDERS
from .intrinsics import build_intrinsic
from .syntax import Function, Instruction, Operand, parse_function
from .types import Trap

RETURN, BARRIER, BRANCH = "return", "barrier", "branch"
NO_SLOT = -1
Step = tuple[int, Callable[[Any], Any], bool]  # register or NO_SLOT, operation, whether other segments read it


@dataclass
class Segment:
    """A block, or the part of one up to a barrier. ``successors`` are segment numbers; ``condition`` picks among them.
    Phis list (number of the segment that a lane comes from, register).
    """

    name: str
    steps: list[Step] = field(default_factory=list)
    phis: list[tuple[int, tuple[tuple[int, int], ...]]] = field(default_factory=list)
    exit: str = BRANCH
    successors: tuple[int, ...] = ()
    condition: Callable[[Any], Any] | None = None


class Program:
    """The executable form of one kernel."""

    def __init__(self, text: str, name: str, arch: str) -> None:
        self.function = function = parse_function(text, name)
        self.arch = arch
        self._slots: dict[str, int] = {}
        self._constants: list[tuple[int, Any]] = []
        self._arguments = [(self._slot(argument), kind) for argument, kind in function.arguments]
        order = block_order(function)
        pieces = {label: split_at_barriers(function.blocks[label]) for label in order}
        starts, number = {}, 0
        for label in order:
            starts[label] = number
            number += len(pieces[label])
        ends = {label: starts[label] + len(pieces[label]) - 1 for label in order}
        lasting = registers_read_elsewhere(pieces)
        self.segments = [
            self._segment(label, part, piece, starts, ends, lasting)
            for label in order
            for part, piece in enumerate(pieces[label])
        ]
        self.num_registers = len(self._slots) + len(self._constants)

    def initial_registers(self, values: Sequence[int]) -> list[Any]:
        """Registers with constants and arguments set, a float from its bits; arguments that are not given (scratch
        pointers) are zero.
        """
        registers: list[Any] = [None] * self.num_registers
        for slot, constant in self._constants:
            registers[slot] = constant
        for place, (slot, kind) in enumerate(self._arguments):
            value = values[place] if place < len(values) else 0
            bits = 8 * kind.nbytes if kind.is_float else 64 if kind.kind == "ptr" else kind.bits
            word = np.array([value & ((1 << bits) - 1)], "<u8")
            registers[slot] = word.view(kind.dtype)[:1].copy() if kind.is_float else word.astype(kind.dtype)
        return registers

    def _slot(self, name: str) -> int:
        return self._slots.setdefault(name, len(self._slots) + len(self._constants))

    def _operand(self, operand: Operand) -> int:
        if operand.name is not None:
            return self._slot(operand.name)
        slot = len(self._slots) + len(self._constants)
        self._constants.append((slot, operand.constant))
        return slot

    def _segment(
        self, label: str, part: int, piece: list[Instruction], starts: dict[str, int], ends: dict[str, int],
        lasting: set[str],
    ) -> Segment:  # fmt: skip
        segment = Segment(f"{label}.{part}" if part else label)
        for instruction in piece:
            opcode = instruction.opcode
            if opcode == "phi":
                sources = zip(instruction.detail, instruction.operands, strict=True)
                edges = tuple((ends[origin], self._operand(value)) for origin, value in sources if origin in ends)
                segment.phis.append((self._slot(str(instruction.result)), edges))
            elif opcode == "ret":
                segment.exit = RETURN
            elif is_barrier(instruction):
                segment.exit = BARRIER
            elif opcode in ("br", "switch"):
                segment.successors = tuple(starts[target] for target in instruction.detail)
                segment.condition = self._condition(instruction)
            elif opcode != "fence":  # memory is in order here; what a fence forbids can't happen
                segment.steps.append(self._step(instruction, lasting))
        return segment

    def _step(self, instruction: Instruction, lasting: set[str]) -> Step:
        if instruction.opcode == "call":
            operation = build_intrinsic(instruction, self.arch)
        else:
            operation = BUILDERS[instruction.opcode](instruction)
        slots = [self._operand(operand) for operand in instruction.operands]
        result = NO_SLOT if instruction.result is None else self._slot(instruction.result)
        return result, applied(operation, slots), instruction.result in lasting

    def _condition(self, instruction: Instruction) -> Callable[[Any], Any] | None:
        """Index of the successor: of a branch 0 (true) or 1, of a switch 0 (default) or the case's place plus one."""
        if not instruction.operands:
            return None
        slots = [self._operand(operand) for operand in instruction.operands]
        value = slots[0]
        if instruction.opcode == "br":
            return lambda m: (~m.r[value]).astype(np.int64)

        def place(m: Any) -> Any:
            result = np.zeros(len(m.r[value]), np.int64)
            for index, case in enumerate(slots[1:], 1):
                result[m.r[value] == m.r[case]] = index
            return result

        return place


def applied(operation: Callable[..., Any], slots: Sequence[int]) -> Callable[[Any], Any]:
    """``operation`` on the registers ``slots``."""
    if len(slots) == 1:
        (a,) = slots
        return lambda m: operation(m, m.r[a])
    if len(slots) == 2:
        a, b = slots
        return lambda m: operation(m, m.r[a], m.r[b])
    if len(slots) == 3:
        a, b, c = slots
        return lambda m: operation(m, m.r[a], m.r[b], m.r[c])
    return lambda m: operation(m, *[m.r[slot] for slot in slots])


def is_barrier(instruction: Instruction) -> bool:
    """Whether waves wait for one another here."""
    return instruction.opcode == "call" and instruction.detail == "amdgcn.s.barrier"


def split_at_barriers(block: list[Instruction]) -> list[list[Instruction]]:
    """Parts of a block; each but the last ends with a barrier."""
    parts: list[list[Instruction]] = [[]]
    for instruction in block:
        parts[-1].append(instruction)
        if is_barrier(instruction):
            parts.append([])
    return parts


def registers_read_elsewhere(pieces: dict[str, list[list[Instruction]]]) -> set[str]:
    """Results that another segment, or a phi, reads: lanes that are masked off must keep theirs."""
    lasting: set[str] = set()
    home: dict[str, tuple[str, int]] = {}
    for label, parts in pieces.items():
        for part, piece in enumerate(parts):
            for instruction in piece:
                if instruction.result is not None:
                    home[instruction.result] = (label, part)
    for label, parts in pieces.items():
        for part, piece in enumerate(parts):
            for instruction in piece:
                names = [operand.name for operand in instruction.operands if operand.name is not None]
                if instruction.opcode == "phi":
                    lasting.update(names)
                else:
                    lasting.update(name for name in names if home.get(name) != (label, part))
    return lasting


def block_order(function: Function) -> list[str]:
    """Reverse post-order in which the blocks of a loop come before those that leave it."""
    successors: dict[str, tuple[str, ...]] = {}
    for label, block in function.blocks.items():
        end = block[-1] if block else None
        if end is None or end.opcode not in ("br", "switch", "ret"):
            raise Trap(f"block {label} has no end")
        successors[label] = end.detail if end.opcode in ("br", "switch") else ()
    reach = {label: reachable(label, successors) for label in successors}
    place = {label: index for index, label in enumerate(function.blocks)}
    seen: set[str] = set()
    post: list[str] = []
    entry = next(iter(function.blocks))
    stack: list[tuple[str, list[str]]] = []

    def enter(label: str) -> None:
        seen.add(label)
        # visited last = first in the result: blocks from which there is a way back
        stack.append((label, sorted(set(successors[label]), key=lambda s: (label not in reach[s], place[s]))))

    enter(entry)
    while stack:
        label, todo = stack[-1]
        if not todo:
            post.append(label)
            stack.pop()
        else:
            child = todo.pop()
            if child not in seen:
                enter(child)
    return post[::-1]


def reachable(label: str, successors: dict[str, tuple[str, ...]]) -> set[str]:
    """Blocks that can be reached from ``label`` by at least one edge."""
    found: set[str] = set()
    todo = list(successors[label])
    while todo:
        block = todo.pop()
        if block not in found:
            found.add(block)
            todo.extend(successors[block])
    return found

# SPDX-License-Identifier: Apache-2.0
"""Executes a kernel: control flow per lane, waves and barriers, resident workgroups, late asynchronous copies.

Many workgroups run at once in one set of arrays. A lane carries the number of the segment that it is to run next (a
block, or the part of one between two barriers); segments are numbered so that those of a loop come before what follows
it. Each turn picks one segment and runs it for all lanes of the waves whose lowest segment it is, the others masked: so
lanes that parted meet again where their paths do. Waves never wait for another wave outside a barrier, and the wave that
made the fewest turns goes first, so that workgroups which wait for one another all advance.

``lockstep`` runs all waves of a workgroup together and delivers asynchronous copies as late as allowed; ``random`` runs
one wave of each workgroup at a time, in random order, and delivers copies in random order at random times.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .memory import Lds, Memory, array_range
from .program import BARRIER, RETURN, Program, Segment
from .types import Trap
from .values import Array

WAVE = 64
DONE = 1 << 30
RESIDENT_LANES = 8192
ORDERS = ("lockstep", "random")
SWITCH_CHANCE = 1 / 32  # of leaving a wave between two segments, in random order
DELIVERY_CHANCE = 1 / 4  # of each pending copy at each turn, in random order


@dataclass
class PendingCopy:
    """An asynchronous copy to LDS that not every lane has received."""

    lanes: Array
    group: Array
    target: Array
    data: Array
    text: str


class Kernel:
    """A kernel of an IR module, ready to run.

    Parameters
    ----------
    text : str
        Textual LLVM IR.
    name : str
        The kernel in it.
    arch : str
        The architecture that decides what fp8 means: ``gfx942`` or ``gfx950``.

    Raises
    ------
    Trap
        When the module does not define the kernel, or holds an instruction that is not known here.
    """

    def __init__(self, text: str, name: str, arch: str = "gfx942") -> None:
        self.program = Program(text, name, arch)

    def run(
        self,
        arguments: Sequence[Any],
        grid: int | tuple[int, ...] = 1,
        threads: int = WAVE,
        lds_bytes: int = 0,
        order: str = "lockstep",
        seed: int = 0,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Run with arrays (which the kernel reads and writes in place) and integers as arguments."""
        ranges, values = [], []
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                ranges.append(array_range(argument))
                values.append(ranges[-1][0])
            else:
                values.append(int(argument))
        size = (*((grid,) if isinstance(grid, int) else grid), 1, 1)[:3]
        for _ in launch(self.program, ranges, values, size, threads, lds_bytes, order, seed, clock_ns):
            pass


def launch(
    program: Program,
    ranges: Sequence[tuple[int, int]],
    values: Sequence[int],
    grid: tuple[int, int, int],
    threads: int,
    lds_bytes: int,
    order: str,
    seed: int,
    clock_ns: Callable[[], int] = time.monotonic_ns,
) -> Iterator[bool]:
    """Run a grid, yielding after every turn so that other launches can run in between: True when it touched memory in
    which the kernel may be waiting for them, or for other processes.

    Raises
    ------
    Trap
        When the kernel does something that it may not.
    """
    if order not in ORDERS or threads % WAVE or threads <= 0:
        raise ValueError(f"order {order}, {threads} threads: expected one of {ORDERS} and a multiple of {WAVE}")
    random = np.random.default_rng(seed)
    implicit = implicit_arguments(grid, threads)
    memory = Memory([*ranges, array_range(implicit)])
    total = grid[0] * grid[1] * grid[2]
    together = max(RESIDENT_LANES // threads, 1)
    for first in range(0, total, together):
        numbers = np.arange(first, min(first + together, total))
        if order == "random":  # among residents no workgroup is ahead, and none wins a conflict, by its number
            numbers = random.permutation(numbers)
        machine = Machine(program, memory, values, grid, threads, numbers, lds_bytes, order, random)
        machine.implicit_address, machine.clock_ns = implicit.ctypes.data, clock_ns
        while machine.turn():
            polled, machine.polled = machine.polled, False
            yield polled
    if total == 0:
        yield False


def implicit_arguments(grid: tuple[int, int, int], threads: int) -> Array:
    """What the runtime appends to a kernel's arguments (code object version 5): grid in workgroups, workgroup size."""
    block = np.zeros(256, np.uint8)
    block[0:12].view(np.uint32)[:] = grid
    block[12:18].view(np.uint16)[:] = (threads, 1, 1)
    block[64:66].view(np.uint16)[:] = 1
    return block


class Machine:
    """The resident workgroups of a launch. What instructions see: ``lanes``, ``mask`` (lanes that run), ``selected``
    (their index), ``whole_waves`` (no wave runs in part), ``r`` (registers), ``memory``, ``lds``, and the identity of every lane.
    """

    def __init__(
        self, program: Program, memory: Memory, values: Sequence[int], grid: tuple[int, int, int], threads: int,
        numbers: Array, lds_bytes: int, order: str, random: np.random.Generator,
    ) -> None:  # fmt: skip
        self.program, self.memory, self.grid, self.threads = program, memory, grid, threads
        self.random, self.order = random, order
        self.lanes = lanes = len(numbers) * threads
        self.every_lane = np.arange(lanes)
        self.lane = self.every_lane % WAVE
        self.wave_start = self.every_lane - self.lane
        self.wave = self.every_lane // WAVE
        self.workgroup = self.every_lane // threads
        self.thread = (self.every_lane % threads).astype(np.uint32)
        number = np.repeat(numbers, threads)
        self.group_id = [
            (number // stride % size).astype(np.uint32)
            for stride, size in zip((1, grid[0], grid[0] * grid[1]), grid, strict=True)
        ]
        self.lds = Lds(len(numbers), lds_bytes, random)
        self.implicit_address = 0
        self.clock_ns = time.monotonic_ns
        self.r: list[Any] = program.initial_registers(values)
        self.previous = np.full(lanes, -1)
        self.mask = np.ones(lanes, np.bool_)
        self.selected: Any = slice(None)
        self.full_mask = self.whole_waves = True
        waves = lanes // WAVE
        self._waves_per_group = threads // WAVE
        self._next = np.zeros((waves, WAVE), np.int64)
        self._turns = np.zeros(waves, np.int64)
        self._waiting = np.full(waves, -1)  # segment of the barrier that the wave waits at
        self._current = np.full(len(numbers), -1)  # random order: the wave that runs in each workgroup
        self._paused = self.polled = False
        self.marks = np.zeros(waves, np.int64)
        self._pending: list[PendingCopy] = []

    # ---- what instructions use

    def full(self, value: Array) -> Array:
        """A value with one element per lane."""
        return value if len(value) == self.lanes else np.repeat(value, self.lanes, axis=0)

    def active(self, value: Any) -> Array:
        """A value's elements in the lanes that run."""
        whole = self.full(value)
        return whole if self.full_mask else whole[self.selected]

    def pause(self) -> None:
        """Let other waves, and other launches and processes, run after this segment: it touched memory that they may be
        waiting for, or that it waits for.
        """
        self._paused = self.polled = True

    def first_active(self) -> Array:
        """For every lane the first running lane of its wave (its wave's first where none runs)."""
        per_wave = self.mask.reshape(-1, WAVE)
        return np.repeat(per_wave.argmax(1), WAVE) + self.wave_start

    def write_lds(self, target: Array, data: Array, text: str, late: bool) -> None:
        """Write every running lane's bytes to LDS, now or (``late``) at some time until its wave waits for them.

        The source of a late copy is read at once: nothing may change it before the wait, so when does not matter.
        """
        lanes = self.every_lane[self.mask]
        copy = PendingCopy(lanes, self.marks[self.wave[lanes]], target[lanes], data[lanes], text)
        if late:
            self._pending.append(copy)
        else:
            self._deliver(copy, np.ones(len(lanes), np.bool_))

    def mark_copies(self) -> None:
        """Close the group of copies that running waves issued."""
        self.marks[self._running_waves()] += 1

    def wait_copies(self, outstanding: int) -> None:
        """Deliver to running waves all but their ``outstanding`` newest closed groups."""
        running = np.zeros(len(self.marks), np.bool_)
        running[self._running_waves()] = True
        for copy in self._pending:
            wave = self.wave[copy.lanes]
            self._deliver(copy, running[wave] & (copy.group < self.marks[wave] - outstanding))
        self._pending = [copy for copy in self._pending if len(copy.lanes)]

    def _running_waves(self) -> Array:
        return np.flatnonzero(self.mask.reshape(-1, WAVE).any(1))

    def _deliver(self, copy: PendingCopy, chosen: Array) -> None:
        if chosen.any():
            self.lds.store(copy.target[chosen], self.workgroup[copy.lanes[chosen]], copy.data[chosen], copy.text)
            kept = ~chosen
            copy.lanes, copy.group = copy.lanes[kept], copy.group[kept]
            copy.target, copy.data = copy.target[kept], copy.data[kept]

    # ---- scheduling

    def turn(self) -> bool:
        """Run one segment; False when every wave has ended."""
        if not self.lanes:
            return False
        lowest = self._next.min(1)
        ended = lowest == DONE
        if ended.all():
            return False
        runnable = ~ended & (self._waiting < 0)
        if not runnable.reshape(-1, self._waves_per_group).any(1).all():
            self._release_barriers(ended, runnable)
            runnable = ~ended & (self._waiting < 0)
        if self.order == "random":
            self._deliver_some()
            runnable = self._one_wave_each(runnable)
        candidates = np.flatnonzero(runnable)
        number = int(lowest[candidates[np.lexsort((lowest[candidates], self._turns[candidates]))[0]]])
        waves = runnable & (lowest == number)
        self._turns[waves] += 1
        running = (self._next == number) & waves[:, None]
        self.mask = running.reshape(-1)
        self.full_mask = bool(self.mask.all())
        self.whole_waves = self.full_mask or bool(running[waves].all())
        self.selected = slice(None) if self.full_mask else self.every_lane[self.mask]
        self._run(self.program.segments[number], number)
        return True

    def _one_wave_each(self, runnable: Array) -> Array:
        """Of every workgroup the wave that it is running, or another one, chosen at random."""
        waves = runnable.reshape(-1, self._waves_per_group)
        luck = self.random.random(waves.shape)
        chosen = np.where(waves, luck, -1.0).argmax(1)
        rows = np.arange(len(waves))
        current = np.maximum(self._current, 0)
        keep = (self._current >= 0) & waves[rows, current]
        keep &= (not self._paused) & (self.random.random(len(waves)) >= SWITCH_CHANCE)
        self._paused = False
        self._current = np.where(keep, current, chosen)
        only = np.zeros_like(waves)
        only[rows, self._current] = waves[rows, self._current]
        return only.reshape(-1)

    def _release_barriers(self, ended: Array, runnable: Array) -> None:
        """Let the waves of every workgroup pass whose waves all wait."""
        shape = (-1, self._waves_per_group)
        waiting = self._waiting.reshape(shape)
        stuck = ~runnable.reshape(shape).any(1) & ~ended.reshape(shape).all(1)
        for group in np.flatnonzero(stuck):
            places = set(waiting[group].tolist())
            if len(places) > 1:  # -1: a wave ended
                texts = sorted(self.program.segments[p].name if p >= 0 else "the end" for p in places)
                raise Trap(f"waves of one workgroup wait at different barriers: {', '.join(texts)}")
        self._waiting.reshape(shape)[stuck] = -1

    def _deliver_some(self) -> None:
        """Random copies arrive, for random lanes."""
        for copy in [self._pending[i] for i in self.random.permutation(len(self._pending))]:
            self._deliver(copy, self.random.random(len(copy.lanes)) < DELIVERY_CHANCE)
        self._pending = [copy for copy in self._pending if len(copy.lanes)]

    def _run(self, segment: Segment, number: int) -> None:
        r, mask, full = self.r, self.mask, self.full_mask
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore", RuntimeWarning)
            if segment.phis:
                for slot, value in [(slot, self._phi(sources)) for slot, sources in segment.phis]:
                    self._set(slot, value, full)
            for slot, function, lasting in segment.steps:
                value = function(self)
                if slot < 0:
                    continue
                if lasting and not full:
                    self._set(slot, value, False)
                else:
                    r[slot] = value
            self._leave(segment, number, mask)

    def _set(self, slot: int, value: Any, full: bool) -> None:
        """Write a register of the running lanes."""
        old = self.r[slot]
        if full or old is None:
            self.r[slot] = value
        elif isinstance(value, list):
            self.r[slot] = [merged(self.mask, new, kept) for new, kept in zip(value, old, strict=True)]
        else:
            self.r[slot] = merged(self.mask, value, old)

    def _phi(self, sources: tuple[tuple[int, int], ...]) -> Any:
        """The value that every running lane brings from where it came."""
        result = None
        for origin, slot in sources:
            here = self.previous == origin
            if (here & self.mask).any():
                value = self.r[slot]
                if result is None:
                    result = value
                elif isinstance(value, list):
                    result = [merged(here, new, kept) for new, kept in zip(value, result, strict=True)]
                else:
                    result = merged(here, value, result)
        if result is None:
            raise Trap("a phi has no value for the edge that was taken")
        return result

    def _leave(self, segment: Segment, number: int, mask: Array) -> None:
        """Send the running lanes to their next segment."""
        target: Any
        if segment.exit == RETURN:
            target = DONE
            self.wait_copies(-1)  # nothing may arrive after a wave's end
        elif segment.exit == BARRIER:
            target = number + 1
            self._arrive(number)
        else:
            target = segment.successors[0]
            if segment.condition is not None:
                places = segment.condition(self)
                target = np.asarray(segment.successors)[self.full(places)]
        following = self._next.reshape(-1)
        following[mask] = target[mask] if isinstance(target, np.ndarray) else target
        if segment.exit != BARRIER:
            self.previous[mask] = number

    def _arrive(self, number: int) -> None:
        """Park running waves at a barrier; all their lanes must be there."""
        waves = self._running_waves()
        present = self.mask.reshape(-1, WAVE)[waves]
        if (~present & (self._next[waves] != DONE)).any():
            raise Trap(f"lanes of one wave part before the barrier in {self.program.segments[number].name}")
        self._waiting[waves] = number


def merged(mask: Array, new: Array, old: Array) -> Array:
    """``new`` in the lanes of ``mask``, else ``old``."""
    return np.where(mask[:, None] if max(new.ndim, old.ndim) == 2 else mask, new, old)

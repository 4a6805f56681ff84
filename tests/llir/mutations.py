# SPDX-License-Identifier: Apache-2.0
"""Faults planted into the LLVM IR of a kernel: the checks that execute it must notice every one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

BARRIER = re.compile(r"^.*call void @llvm\.amdgcn\.s\.barrier\(\).*\n", re.M)
WAIT = re.compile(r"^.*call void @llvm\.amdgcn\.wait\.asyncmark\(.*\n", re.M)
DPP = re.compile(r"(?<=@llvm\.amdgcn\.update\.dpp\.i32\()(.*, i32 )(177|78|27|296|321)(, i32 15, i32 15, i1 true\))")
BPERMUTE = re.compile(r"(@llvm\.amdgcn\.ds\.bpermute\()(i32 )(%[-\w.]+)")
LDS_STEP = re.compile(r"(getelementptr (?:inbounds )?(?:nuw )?i8, ptr addrspace\(3\) [%@][\w.]+, i32 )(\d+)")
XOR = re.compile(r"(= xor i32 %[\w.]+, )(8|16|32|64|128|256|512)$", re.M)
MFMA = re.compile(r"(%[\w.]+ = .*@llvm\.amdgcn\.mfma\.[^(]*\(<(\d) x (\w+)> )(%[\w.]+)(, .*<4 x float> )(%[\w.]+)(,.*)")
STEP = re.compile(MFMA.pattern.replace(r"<4 x float> )(%[\w.]+)(,.*)", r"<4 x float> )(%[\w.]+|zeroinitializer)(,.*)"))
STORE = re.compile(r"^  store <(\d+) x (\w+)> (%[\w.]+), (ptr addrspace\(1\) %[\w.]+)(, align \d+)", re.M)
BUFFER_STORE = re.compile(
    r"^(.*raw\.ptr\.buffer\.store\.(i32|i64)\(i\d+ %[\w.]+, ptr addrspace\(8\) %[\w.]+, i32 )(%[\w.]+)(,.*)", re.M
)
GUARD = re.compile(r"br i1 (%[\w.]+), (label (%[\w.]+), label %[\w.]+)")
NAN_MASK = re.compile(r"select (<\d x i1>|i1) (%[\w.]+), (<\d x float>|float) (splat \(float \+qnan\)|\+qnan), ")
ZERO_MASK = re.compile(r"select i1 %[\w.]+, i64 (%[\w.]+), i64 0$", re.M)
WORD_STORE = re.compile(r"^  store volatile <1 x i64> (%[\w.]+), (ptr addrspace\(1\) %[\w.]+)(, align \d+).*", re.M)
POLL_AGAIN = re.compile(r"(^  switch i32 %[\w.]+, label %[\w.]+ \[\s+i32 )1(, label %[\w.]+)", re.M)
EXPIRED = re.compile(r"(s_memrealtime [^\n]*\n(?:[^\n]*\n){1,3}?  %[\w.]+ = )icmp sgt i64 .*")
NONE = "zeroinitializer"
OUT_OF_RANGE = "-2147483648"


@dataclass(frozen=True)
class Mutant:
    """One planted fault: its kind, where, and the changed module."""

    kind: str
    place: str
    text: str


def mutants(text: str, sites: int = 2) -> Iterator[Mutant]:
    """Faults of every kind that the kernel has a place for, at up to ``sites`` places each."""
    for kind, plant in PLANTERS.items():
        for place, changed in list(plant(text))[:sites]:
            if changed != text:
                yield Mutant(kind, place, changed)


Planted = Iterator[tuple[str, str]]


def without(pattern: re.Pattern[str]) -> Callable[[str], Planted]:
    """Every match removed at once."""

    def plant(text: str) -> Planted:
        if pattern.search(text):
            yield "all", pattern.sub("", text)

    return plant


def edits(pattern: re.Pattern[str], change: Callable[[re.Match[str]], str]) -> Callable[[str], Planted]:
    """One match changed at a time: the first, the last, then those between."""

    def plant(text: str) -> Planted:
        found = list(pattern.finditer(text))
        for match in found[:1] + found[:0:-1]:
            line = text.count("\n", 0, match.start()) + 1
            yield f"line {line}", text[: match.start()] + change(match) + text[match.end() :]

    return plant


# for 27 no permutation: in a reduction's butterfly, behind the half mirror, any of them still reaches every lane
OTHER_LANES = {"177": "78", "78": "177", "27": "0", "296": "292", "321": "320"}


def twice(text: str) -> Planted:
    """A matrix step that takes another step's operand."""
    operands = [match[4] for match in STEP.finditer(text)]
    yield from edits(STEP, lambda m: f"{m[1]}{next((o for o in operands if o != m[4]), m[4])}{m[5]}{m[6]}{m[7]}")(text)


def thread_register(text: str) -> str:
    """The register that holds the thread's number."""
    match = re.search(r"(%[\w.]+) = .*@llvm\.amdgcn\.workitem\.id\.x\(\)", text)
    return match[1] if match else ""


def short_output(text: str) -> Planted:
    """One element not written: a vector's last, or of single elements thread 0's."""
    thread = thread_register(text)

    def keep(match: re.Match[str]) -> str:
        count, kind, value, pointer, align = match.groups()
        vector, last = f"<{count} x {kind}>", int(count) - 1
        old = f"  %mutant.old = load {vector}, {pointer}{align}\n"
        if last:
            return (
                f"{old}  %mutant.one = extractelement {vector} %mutant.old, i64 {last}\n"
                f"  %mutant.new = insertelement {vector} {value}, {kind} %mutant.one, i64 {last}\n"
                f"  store {vector} %mutant.new, {pointer}{align}"
            )
        return (
            f"{old}  %mutant.zero = icmp eq i32 {thread}, 0\n"
            f"  %mutant.new = select i1 %mutant.zero, {vector} %mutant.old, {vector} {value}\n"
            f"  store {vector} %mutant.new, {pointer}{align}"
        )

    def outside(match: re.Match[str]) -> str:
        return (
            f"  %mutant.zero = icmp eq i32 {thread}, 0\n"
            f"  %mutant.place = select i1 %mutant.zero, i32 {OUT_OF_RANGE}, i32 {match[3]}\n"
            f"{match[1]}%mutant.place{match[4]}"
        )

    yield from edits(STORE, keep)(text)
    yield from edits(BUFFER_STORE, outside)(text)


def all_at_once(pattern: re.Pattern[str], change: Callable[[re.Match[str]], str]) -> Callable[[str], Planted]:
    """Every match changed together."""

    def plant(text: str) -> Planted:
        if pattern.search(text):
            yield "all", pattern.sub(change, text)

    return plant


def unguarded_stores(text: str) -> Planted:
    """A store to global memory that every thread makes. Guards that depend on no loaded value only spare threads that
    would write the same.
    """
    for match in GUARD.finditer(text):
        block = re.search(rf"^{re.escape(match[3][1:])}:.*?(?=^\S|\Z)", text, re.M | re.S)
        if block and re.search(r"store .*addrspace\(1\)", block[0]) and depends_on_load(text, match[1]):
            yield f"guard {match[1]}", text[: match.start()] + f"br i1 true, {match[2]}" + text[match.end() :]


def changed_word(kind: str) -> Callable[[re.Match[str]], str]:
    """Thread 0 pushes no word, or every thread another one."""

    def change(match: re.Match[str]) -> str:
        value, pointer, align = match.groups()
        old = f"  %mutant.old = load <1 x i64>, {pointer}{align}\n  %mutant.zero = icmp eq i32 THREAD, 0\n"
        new = f"  %mutant.new = xor <1 x i64> {value}, splat (i64 1)\n"
        if kind == "short":
            new = f"{old}  %mutant.new = select i1 %mutant.zero, <1 x i64> %mutant.old, <1 x i64> {value}\n"
        return f"{new}  store volatile <1 x i64> %mutant.new, {pointer}{align}"

    return change


def words(kind: str) -> Callable[[str], Planted]:
    """A store of words that other ranks poll, changed."""

    def plant(text: str) -> Planted:
        for place, changed in edits(WORD_STORE, changed_word(kind))(text):
            yield place, changed.replace("THREAD", thread_register(text))

    return plant


def unguarded_words(text: str) -> Planted:
    """Words pushed by every thread: also beyond the row, and after a failure."""
    for match in GUARD.finditer(text):
        if pushes(text, match[3][1:]) and depends_on_load(text, match[1]):
            yield f"guard {match[1]}", text[: match.start()] + f"br i1 true, {match[2]}" + text[match.end() :]


def pushes(text: str, name: str, depth: int = 3) -> bool:
    """Whether a block stores words that others poll, or whatever follows it does."""
    block = re.search(rf"^{re.escape(name)}:.*?(?=^\S|\Z)", text, re.M | re.S)
    if block is None or WORD_STORE.search(block[0]):
        return block is not None
    following = re.findall(r"label %([\w.-]+)", "".join(re.findall(r"^  br .*", block[0], re.M)))
    return depth > 0 and bool(following) and all(pushes(text, block, depth - 1) for block in following)


def epochs(text: str) -> re.Pattern[str]:
    """Compares of the upper halves of polled words; in a kernel that polls none, nothing."""
    halves = re.findall(r"^  (%[\w.]+) = lshr i64 %[\w.]+, 32$", text, re.M) if POLL_AGAIN.search(text) else []
    return re.compile(rf"^  (%[\w.]+) = icmp ne i64 ({'|'.join(map(re.escape, halves)) or '(?!)'}), (%[\w.]+)$", re.M)


def words_by_parity(text: str) -> Planted:
    """A wait that takes words of the epoch two calls earlier for its own: one compare, at the first look or a later one."""

    def change(match: re.Match[str]) -> str:
        late, found, epoch = match.groups()
        return (
            f"  %mutant.found = and i64 {found}, 1\n  %mutant.epoch = and i64 {epoch}, 1\n"
            f"  {late} = icmp ne i64 %mutant.found, %mutant.epoch"
        )

    yield from edits(epochs(text), change)(text)


def masked_words_polled(text: str) -> Planted:
    """A wait for words that no rank sends."""
    late = "|".join(re.escape(match[1]) for match in epochs(text).finditer(text)) or "(?!)"
    yield from all_at_once(re.compile(rf"(= and i1 )%[\w.]+(, (?:{late}))$", re.M), lambda m: f"{m[1]}true{m[2]}")(text)


def depends_on_load(text: str, register: str) -> bool:
    """Whether a register is computed from something that the kernel loads."""
    todo, seen = [register], set()
    while todo:
        name = todo.pop()
        line = re.search(rf"^  {re.escape(name)} = (.*)", text, re.M)
        if name in seen or line is None:
            continue
        seen.add(name)
        if line[1].startswith("load "):
            return True
        todo += re.findall(r"%[\w.]+", line[1])
    return False


PLANTERS: dict[str, Callable[[str], Planted]] = {
    "barriers removed": without(BARRIER),
    "wait removed": without(WAIT),
    "moved from another lane": edits(DPP, lambda m: m[1] + OTHER_LANES[m[2]] + m[3]),
    "permuted by a fixed lane": edits(BPERMUTE, lambda m: f"{m[1]}{m[2]}4"),
    "swizzle altered": edits(XOR, lambda m: m[1] + str(int(m[2]) * 2)),
    "LDS address moved": edits(LDS_STEP, lambda m: m[1] + str(int(m[2]) + 16)),
    "matrix sum dropped": edits(MFMA, lambda m: f"{m[1]}{m[4]}{m[5]}{NONE}{m[7]}"),
    "matrix operand twice": twice,
    "output short": short_output,
    "token mask dropped": all_at_once(NAN_MASK, lambda m: m[0].replace(m[2], "false" if m[1] == "i1" else NONE, 1)),
    "zero mask dropped": all_at_once(ZERO_MASK, lambda m: f"select i1 true, i64 {m[1]}, i64 0"),
    "store unguarded": unguarded_stores,
    "pushed word short": words("short"),
    "pushed word altered": words("altered"),
    "push mask dropped": unguarded_words,
    "poll mask dropped": masked_words_polled,
    "poll left at once": edits(POLL_AGAIN, lambda m: f"{m[1]}7{m[2]}"),
    "epoch compared by parity": words_by_parity,
    "limit dropped": all_at_once(EXPIRED, lambda m: f"{m[1]}icmp eq i32 0, 1"),
}

# SPDX-License-Identifier: Apache-2.0
"""Memory: addresses, bounds, alignment, buffer resources, atomics.

Sources: the LLVM Language Reference (LangRef) for getelementptr, load, store and the atomics; LLVM's AMDGPUUsage
("Relaxed Buffer OOB Mode"), IntrinsicsAMDGPU.td (raw buffer intrinsics) and the CDNA4 ISA guide, 9.1.5.1 "Range
Checking" ("CDNA4") for buffers. Traps are the interpreter's own promise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from llir import Trap
from llir_tests.ir_kernels import BARRIER, GLOBAL, LDS, SENTINEL, lanes, shape, width

RANDOM = np.random.default_rng(8)
LANES = np.arange(64)
WORDS = RANDOM.integers(0, 2**32, 64, dtype=np.uint32)


@pytest.mark.parametrize(
    ("kind", "index", "offset"),
    [
        ("[5 x i32]", "i64 -1, i32 3", -20 + 12),
        ("<4 x half>", "i64 2, i32 3", 16 + 6),
        ("i64", "i32 -3", -24),  # narrower indices are sign-extended
        ("i8", "i32 %k", -2),
    ],
)
def test_addresses(kind: str, index: str, offset: int) -> None:
    """LangRef, getelementptr: padding, arrays, negative and variable indices."""
    body = f"""
  %k = add i32 %n, -7
  %base = getelementptr i8, {GLOBAL} %in_a, i64 128
  %p = getelementptr {kind}, {GLOBAL} %base, {index}
  %v = load i16, {GLOBAL} %p, align 1
  %r = zext i16 %v to i32"""
    data = WORDS.tobytes()
    got = lanes(body, [("i32", WORDS)], ints=(5, 0))
    assert got.tolist() == [int.from_bytes(data[128 + offset : 130 + offset], "little")] * 64


@pytest.mark.parametrize("kind", ["{ i8, i32 }", "<{ i8, i32 }>"])
def test_addresses_in_structs_are_refused(kind: str) -> None:
    """Nothing that Triton emits has them; what is not known must not be guessed."""
    with pytest.raises(Trap, match="getelementptr"):
        lanes(f"  %r = getelementptr {kind}, {GLOBAL} %in_a, i64 1, i32 1", [("i32", WORDS)])


def test_addresses_as_numbers() -> None:
    """LangRef, inttoptr and ptrtoint: the address as a number and back; AMDGPUUsage: global addresses have 64 bits."""
    body = f"""
  %p = getelementptr i32, {GLOBAL} %in_a, i64 %index
  %number = ptrtoint {GLOBAL} %p to i64
  %moved = xor i64 %number, 4
  %q = inttoptr i64 %moved to {GLOBAL}
  %r = load i32, {GLOBAL} %q, align 4
  %base = ptrtoint {GLOBAL} %in_a to i64
  %s = sub i64 %moved, %base"""
    got, offsets = lanes(body, [("i32", WORDS)], ("i32", "i64"))
    assert offsets.tolist() == [4 * (lane ^ 1) for lane in range(64)]
    assert got.tolist() == [WORDS[lane ^ 1] for lane in range(64)]


@pytest.mark.parametrize(
    "line",
    [
        f"%p = inttoptr i32 %n to {GLOBAL}",
        f"%q = ptrtoint {LDS} @global_smem to i32",
        "%p = inttoptr i64 0 to ptr addrspace(5)",
    ],
)
def test_addresses_of_other_sizes_are_refused(line: str) -> None:
    with pytest.raises(Trap, match=r"addresses of another size|address space 5"):
        lanes(f"  {line}\n  %r = add i32 0, 0")


def access(pointer: str, offset: int, kind: str, align: int, store: bool) -> str:
    base = "@global_smem" if pointer == LDS else "%in_a"
    text = f"  %p = getelementptr i8, {pointer} {base}, i32 {offset}\n  %r = add i32 0, 0\n"
    if store:
        return text + f"  store {kind} zeroinitializer, {pointer} %p, align {align}"
    return text + f"  %v = load {kind}, {pointer} %p, align {align}"


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize(
    ("pointer", "offset", "kind", "align", "fine"),
    [
        (LDS, 252, "i32", 4, True), (LDS, 256, "i32", 4, False), (LDS, -4, "i32", 4, False),
        (LDS, 248, "<4 x i32>", 8, False), (LDS, 240, "<4 x i32>", 16, True), (LDS, 2, "i32", 4, False),
        (LDS, 8, "<4 x i32>", 16, False), (LDS, 8, "<4 x i32>", 8, True), (LDS, 2, "i32", 2, True),
        (GLOBAL, 252, "i32", 4, True), (GLOBAL, 256, "i32", 4, False), (GLOBAL, -4, "i32", 4, False),
        (GLOBAL, 1 << 20, "i8", 1, False), (GLOBAL, 2, "i32", 4, False), (GLOBAL, 2, "i32", 2, True),
    ],
)  # fmt: skip
def test_bounds_and_alignment(pointer: str, offset: int, kind: str, align: int, fine: bool, store: bool) -> None:
    """256 bytes of LDS, an array of 256 bytes. LangRef, load and store: the stated alignment is a promise."""

    def run() -> Any:
        return lanes(access(pointer, offset, kind, align, store), [("i32", WORDS.copy())], lds_bytes=256)

    if fine:
        assert not run().any()
    else:
        with pytest.raises(Trap):
            run()


def test_one_lane_out_of_bounds() -> None:
    """One active lane beyond the end is enough; the same lane inactive is not."""
    body = f"""
  %cond = icmp ult i32 %tid, %n
  br i1 %cond, label %inside, label %end
inside:
  %p = getelementptr i32, {GLOBAL} %in_a, i32 %b
  %v = load i32, {GLOBAL} %p, align 4
  br label %end
end:
  %r = phi i32 [ 0, %entry ], [ %v, %inside ]"""
    index = np.where(LANES == 63, 64, LANES)
    assert lanes(body, [("i32", WORDS), ("i32", index)], ints=(63, 0)).tolist() == [*WORDS[:63].tolist(), 0]
    with pytest.raises(Trap):
        lanes(body, [("i32", WORDS), ("i32", index)], ints=(64, 0))


RESOURCE = f"""
  %records = zext i32 %m to i64
  %rsrc = call ptr addrspace(8) @llvm.amdgcn.make.buffer.rsrc.p8.p1({GLOBAL} %in_a, i16 0, i64 %records, i32 159744)
"""
SUFFIX = {"i32": "i32", "i64": "i64", "<2 x i32>": "v2i32", "<4 x i32>": "v4i32", "i16": "i16", "float": "f32"}
OUTSIDE = [256, 260, 0x7FFFFFFC, 0x80000000, 0x80000004, 0xFFFFFFFC]  # multiples of 4, in no case in range
RECORDS = 196  # bytes that the resource covers, of the array's 256


def words_in_range(offset: int, count: int) -> list[bool]:
    """CDNA4, raw buffer: out of range if inst_offset + vgpr_offset >= num_records, in bytes; its note 4: dwordx2 and
    dwordx4 are checked per component. AMDGPUUsage: the offset is unsigned, the addition saturates."""
    return [offset + 4 * word < RECORDS for word in range(count)]


def buffer_offsets(kind: str) -> np.ndarray:
    offsets = (RANDOM.integers(0, 250 // width(kind), 64) * width(kind)).astype(np.uint32)
    offsets[: len(OUTSIDE)] = OUTSIDE
    last = RECORDS - width(kind)
    offsets[10:14] = [last, RECORDS - 4, RECORDS, 0]  # the last whole one, one that is cut (if wide), one outside
    return offsets


@pytest.mark.parametrize("kind", ["i32", "i64", "<2 x i32>", "<4 x i32>", "float"])
@pytest.mark.parametrize("scalar", [0, 8])
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_buffer_load(kind: str, scalar: int, arch: str) -> None:
    """raw.ptr.buffer.load: the address is base + voffset + soffset; a word that is out of range reads 0.

    IntrinsicsAMDGPU.td and CDNA4 leave soffset out of the range check. Open: the Vega guide subtracts it from
    num_records, MLIR's document says "may or may not"; lanes where that matters are compared for gfx950 alone.
    """
    body = f"{RESOURCE}  %r = call {kind} @llvm.amdgcn.raw.ptr.buffer.load.{SUFFIX[kind]}(ptr addrspace(8) %rsrc, "
    body += "i32 %b, i32 %n, i32 0)"
    offsets = buffer_offsets(kind)
    got = lanes(body, [("i32", WORDS), ("i32", offsets)], (kind,), ints=(scalar, RECORDS), arch=arch)
    for lane, offset in enumerate(offsets.tolist()):
        count = width(kind) // 4
        for word, inside in enumerate(words_in_range(offset, count)):
            if inside and arch != "gfx950" and offset + scalar + 4 * word >= RECORDS:
                continue  # open
            expected = WORDS[(offset + scalar) // 4 + word] if inside else 0
            assert got[lane].reshape(-1).view(np.uint32)[word] == expected, (lane, offset, word)


@pytest.mark.parametrize("kind", ["i32", "i64", "<2 x i32>", "<4 x i32>", "float"])
def test_buffer_store(kind: str) -> None:
    """raw.ptr.buffer.store(value, resource, voffset, soffset): words out of range are dropped."""
    count = width(kind) // 4
    element, _ = shape(kind)
    body = f"{RESOURCE}  call void @llvm.amdgcn.raw.ptr.buffer.store.{SUFFIX[kind]}({kind} %c, ptr addrspace(8) %rsrc, "
    body += "i32 %b, i32 %n, i32 0)\n  %r = add i32 0, 0"
    values = RANDOM.integers(0, 2**32, (64, count), dtype=np.uint32)
    target = np.full(64, 0xA5A5A5A5, np.uint32)
    offsets = np.full(64, 0x80000000, np.uint32)  # what Triton gives a masked lane
    places = RANDOM.permutation(RECORDS // width(kind)) * width(kind)
    offsets[: len(OUTSIDE)] = OUTSIDE
    offsets[8 : 8 + len(places)] = places
    if count > 1:
        offsets[63] = RECORDS - 4  # its first word fits
    lanes(body, [("i32", target), ("i32", offsets), (kind, values.view(element))], ints=(0, RECORDS))
    expected = np.full(64, 0xA5A5A5A5, np.uint32)
    for lane, offset in enumerate(offsets.tolist()):
        for word, inside in enumerate(words_in_range(offset, count)):
            if inside:
                expected[offset // 4 + word] = values[lane, word]
    assert SENTINEL == 0xA5
    assert target.tolist() == expected.tolist()


def test_buffer_lane_inactive() -> None:
    """A lane that does not take part neither loads nor stores."""
    body = f"""{RESOURCE}
  %cond = trunc i32 %tid to i1
  br i1 %cond, label %inside, label %end
inside:
  %o = shl i32 %tid, 2
  %v = call i32 @llvm.amdgcn.raw.ptr.buffer.load.i32(ptr addrspace(8) %rsrc, i32 %o, i32 0, i32 0)
  %w = add i32 %v, 1
  call void @llvm.amdgcn.raw.ptr.buffer.store.i32(i32 %w, ptr addrspace(8) %rsrc, i32 %o, i32 0, i32 0)
  br label %end
end:
  %r = phi i32 [ 0, %entry ], [ %v, %inside ]"""
    target = WORDS.copy()
    got = lanes(body, [("i32", target)], ints=(0, 256))
    odd = LANES % 2 == 1
    assert got.tolist() == np.where(odd, WORDS, 0).tolist()
    assert target.tolist() == np.where(odd, WORDS + np.uint32(1), WORDS).tolist()


def signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


ATOMICS: dict[str, Callable[[int, int], int]] = {
    "add": lambda old, value: old + value & 0xFFFFFFFF,
    "sub": lambda old, value: old - value & 0xFFFFFFFF,
    "max": lambda old, value: max(old, value, key=signed),
    "min": lambda old, value: min(old, value, key=signed),
    "umax": max,
    "umin": min,
    "and": lambda old, value: old & value,
    "or": lambda old, value: old | value,
    "xor": lambda old, value: old ^ value,
    "xchg": lambda old, value: value,
}


def atomic_body(pointer: str, line: str) -> str:
    """256 work-items on four words; LDS is filled from, and copied back to, %out_s by four of them."""
    if pointer == GLOBAL:
        return f"  %slot = and i32 %tid, 3\n  %p = getelementptr i32, {GLOBAL} %in_b, i32 %slot\n{line}"
    return f"""
  %slot = and i32 %tid, 3
  %p = getelementptr i32, {LDS} @global_smem, i32 %slot
  %far = getelementptr i32, {GLOBAL} %in_b, i32 %slot
  %few = icmp ult i32 %tid, 4
  br i1 %few, label %fill, label %ready
fill:
  %first = load i32, {GLOBAL} %far, align 4
  store i32 %first, {LDS} %p, align 4
  br label %ready
ready:
{BARRIER}
{line}
{BARRIER}
  br i1 %few, label %back, label %end
back:
  %last = load i32, {LDS} %p, align 4
  store i32 %last, {GLOBAL} %far, align 4
  br label %end
end:"""


@pytest.mark.parametrize("order", ["lockstep", "random"])
@pytest.mark.parametrize("pointer", [GLOBAL, LDS])
@pytest.mark.parametrize("operation", ATOMICS)
def test_atomicrmw(operation: str, pointer: str, order: str) -> None:
    """LangRef, atomicrmw: some order of the four words' 64 operations each explains every old and the final value."""
    values = RANDOM.integers(0, 2**32, 256, dtype=np.uint32)
    initial = np.array([0x7FFFFFFF, 0x80000000, 5, 0xFFFFFFFF], np.uint32)
    memory = np.resize(initial, 256)
    line = f'  %r = atomicrmw {operation} {pointer} %p, i32 %a syncscope("workgroup") acq_rel, align 4'
    body = atomic_body(pointer, line)
    got = lanes(body, [("i32", values), ("i32", memory)], threads=256, order=order, seed=2, lds_bytes=16)
    assert memory[4:].tolist() == np.resize(initial, 252).tolist()
    for slot in range(4):
        pending: dict[int, list[int]] = {}
        for lane in range(slot, 256, 4):
            pending.setdefault(int(got[lane]), []).append(int(values[lane]))
        # each state was seen by the operations that left it unchanged, and then by one that changed it
        state = int(initial[slot])
        for _ in range(64):
            candidates = pending.get(state)
            assert candidates, (slot, state, pending)
            keeps = [value for value in candidates if ATOMICS[operation](state, value) == state]
            value = keeps[0] if keeps else candidates[0]
            candidates.remove(value)
            state = ATOMICS[operation](state, value)
        assert state == memory[slot]


@pytest.mark.parametrize("pointer", [GLOBAL, LDS])
def test_atomic_fadd(pointer: str) -> None:
    """LangRef, atomicrmw fadd; small integers, so that the order of the additions does not matter."""
    values = RANDOM.integers(-100, 100, 256).astype(np.float32)
    memory = np.resize(np.array([1, 2, 3, 4], np.float32), 256)
    line = f'  %old = atomicrmw fadd {pointer} %p, float %a syncscope("agent") monotonic, align 4\n'
    line += "  %r = bitcast float %old to i32"
    lanes(atomic_body(pointer, line), [("float", values), ("i32", memory)], threads=256, lds_bytes=16)
    assert memory[:4].tolist() == [slot + 1 + values[slot::4].sum() for slot in range(4)]


@pytest.mark.parametrize("order", ["lockstep", "random"])
@pytest.mark.parametrize("pointer", [GLOBAL, LDS])
def test_cmpxchg(pointer: str, order: str) -> None:
    """LangRef, cmpxchg: the old value and whether it was replaced; one of 64 work-items wins each word."""
    line = f"""
  %new = add i32 %a, 1000
  %pair = cmpxchg {pointer} %p, i32 7, i32 %new syncscope("workgroup") acq_rel monotonic, align 4
  %old = extractvalue {{ i32, i1 }} %pair, 0
  %won = extractvalue {{ i32, i1 }} %pair, 1
  %wide = zext i1 %won to i32
  %high = shl i32 %old, 1
  %r = or i32 %high, %wide"""
    memory = np.resize(np.array([7, 7, 8, 7], np.uint32), 256)
    got = lanes(
        atomic_body(pointer, line), [("i32", np.arange(256)), ("i32", memory)], threads=256, order=order, lds_bytes=16
    )
    for slot in (0, 1, 3):
        winners = [lane for lane in range(slot, 256, 4) if got[lane] & 1]
        assert len(winners) == 1
        assert got[winners[0]] >> 1 == 7
        assert memory[slot] == winners[0] + 1000
        assert all(got[lane] == memory[slot] << 1 for lane in range(slot, 256, 4) if lane != winners[0])
    assert memory[2] == 8
    assert got[2::4].tolist() == [16] * 64


@pytest.mark.parametrize("order", ["lockstep", "random"])
def test_cmpxchg_loop(order: str) -> None:
    """Every work-item adds to one counter with a compare-exchange loop that it leaves when it succeeds."""
    body = f"""
  %start = load atomic i32, {GLOBAL} %in_b syncscope("agent") monotonic, align 4
  br label %again
again:
  %seen = phi i32 [ %start, %entry ], [ %old, %again ]
  %new = add i32 %seen, %a
  %pair = cmpxchg {GLOBAL} %in_b, i32 %seen, i32 %new syncscope("agent") acq_rel monotonic, align 4
  %old = extractvalue {{ i32, i1 }} %pair, 0
  %won = extractvalue {{ i32, i1 }} %pair, 1
  br i1 %won, label %end, label %again
end:
  %r = phi i32 [ %new, %again ]"""
    memory = np.zeros(256, np.uint32)
    got = lanes(body, [("i32", np.arange(1, 257)), ("i32", memory)], threads=256, order=order, seed=4)
    assert memory[0] == 256 * 257 // 2
    assert len(set(got.tolist())) == 256

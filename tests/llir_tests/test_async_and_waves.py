# SPDX-License-Identifier: Apache-2.0
"""Loads that go to LDS directly, waiting for them, and waves and workgroups that meet.

Sources:
 - "DMA": LLVM's AMDGPUDMAOperations, "GFX9 DMA": lane l's data goes to the wave-uniform LDS base + the immediate offset +
   l * 4 for sizes up to 4 bytes and + l * 16 for 16 bytes (gfx950); the offset is added to the source address too;
   without `async` the compiler sees to it that the data is there when it is used. The CDNA4 ISA guide, 9.1.9 and
   10.3, has the same addresses.
 - "Async": LLVM's AMDGPUAsyncOperations: `asyncmark` appends to the wave's sequence, `wait.asyncmark(n)` shortens it to
   the newest n; an operation happens before the wait that removes a mark behind it, and otherwise at no known time.
   That `lockstep` delivers as late as this allows is the interpreter's promise.
 - LangRef: atomics, fence; AMDGPUUsage, s.barrier: all waves of the workgroup arrive before one leaves.
"""

from __future__ import annotations

import numpy as np
import pytest
from llir import Kernel, Program, launch
from llir.memory import array_range
from llir_tests.ir_kernels import BARRIER, GLOBAL, LDS, lanes, module

RANDOM = np.random.default_rng(21)
LANES = np.arange(64)
DATA = RANDOM.integers(0, 2**32, 512, dtype=np.uint32)  # the source array
SCHEDULES = [("lockstep", 0)] + [("random", seed) for seed in range(6)]
ASYNC = {  # name, whether it waits for an asyncmark
    "global.load.lds": False, "load.to.lds.p1": False, "global.load.async.lds": True, "load.async.to.lds.p1": True,
}  # fmt: skip
MARK = "  call void @llvm.amdgcn.asyncmark()\n"
KIND = {4: "i32", 16: "<4 x i32>"}
OLD = 0x11110000  # plus the word's number: what LDS holds before


def wait(count: int) -> str:
    return f"  call void @llvm.amdgcn.wait.asyncmark(i16 {count})\n"


def fill(words: int = 512) -> str:
    """Every work-item writes its share of LDS: OLD plus the word's number."""
    text = ""
    for part in range(words // 64):
        text += f"""
  %fill{part} = add i32 %tid, {64 * part}
  %fillv{part} = add i32 %fill{part}, {OLD}
  %fillp{part} = getelementptr i32, {LDS} @global_smem, i32 %fill{part}
  store i32 %fillv{part}, {LDS} %fillp{part}, align 4"""
    return f"{text}\n{BARRIER}"


def issue(name: str, size: int, source: str, target: str, offset: int = 0) -> str:
    return f"  call void @llvm.amdgcn.{name}({GLOBAL} {source}, {LDS} {target}, i32 {size}, i32 {offset}, i32 0)\n"


def read(result: str, size: int, base: str = "@global_smem") -> str:
    """This lane's own part of what one load brought."""
    kind = KIND[size]
    return f"""
  %at{result} = getelementptr {kind}, {LDS} {base}, i32 %tid
  %{result} = load {kind}, {LDS} %at{result}, align {size}
"""


def pointer(size: int, start: int = 0, index: str = "%b", name: str = "src") -> str:
    """This lane's source: in the array %in_a, `start` bytes in, its own element."""
    return f"""
  %base{name} = getelementptr i8, {GLOBAL} %in_a, i64 {start}
  %{name} = getelementptr {KIND[size]}, {GLOBAL} %base{name}, i32 {index}
"""


def loaded(name: str, body: str, outputs: list[str], index: np.ndarray = LANES, **run: object) -> list[np.ndarray]:
    """Runs the body with DATA behind %in_a; the results as words."""
    data = DATA.reshape(64, 8)
    inputs = [("<8 x i32>", data), ("i32", index)]
    got = lanes(body, inputs, outputs, arch="gfx950", lds_bytes=2048, **run)  # type: ignore[arg-type]
    got = got if isinstance(got, list) else [got]
    return [array.view(np.uint32).reshape(64, -1) for array in got]


@pytest.mark.parametrize("name", ASYNC)
@pytest.mark.parametrize(("size", "offset"), [(4, 0), (4, 64), (16, 0), (16, 32)])
def test_load_to_lds(name: str, size: int, offset: int) -> None:
    """DMA: where each lane's data comes from and goes; the words around it stay."""
    index = RANDOM.permutation(64)
    body = fill() + pointer(size) + f"  %to = getelementptr i8, {LDS} @global_smem, i32 128\n"
    body += issue(name, size, "%src", "%to", offset) + (MARK + wait(0) if ASYNC[name] else "")
    for part in range(8):  # all 512 words
        body += f"  %e{part} = add i32 %tid, {64 * part}\n"
        body += f"  %q{part} = getelementptr i32, {LDS} @global_smem, i32 %e{part}\n"
        body += f"  %x{part} = load i32, {LDS} %q{part}, align 4\n"
        before = f"%y{part - 1}" if part else "poison"
        body += f"  %y{part} = insertelement <8 x i32> {before}, i32 %x{part}, i32 {part}\n"
    body += "  %r = shufflevector <8 x i32> %y7, <8 x i32> poison, <8 x i32> <"
    body += ", ".join(f"i32 {part}" for part in range(8)) + ">"
    for order, seed in SCHEDULES[:3]:
        got = loaded(name, body, ["<8 x i32>"], index, order=order, seed=seed)[0].T.reshape(-1)
        expected = np.arange(512, dtype=np.uint32) + OLD
        words = size // 4
        for lane in range(64):
            to, source = (128 + offset) // 4 + words * lane, offset // 4 + words * int(index[lane])
            expected[to : to + words] = DATA[source : source + words]
        assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("name", ASYNC)
@pytest.mark.parametrize("size", [4, 16])
def test_load_to_lds_inactive_lanes(name: str, size: int) -> None:
    """CDNA4, 10.3: the LDS address goes by the lane's number, so that an inactive lane leaves a hole."""
    body = f"""{fill()}{pointer(size)}
  %low = and i32 %tid, 5
  %cond = icmp eq i32 %low, 4
  br i1 %cond, label %inside, label %end
inside:
{issue(name, size, "%src", "@global_smem")}
  br label %end
end:
{MARK + wait(0) if ASYNC[name] else ""}{read("r", size)}"""
    active = LANES & 5 == 4
    words = size // 4
    for order, seed in SCHEDULES:
        got = loaded(name, body, [KIND[size]], 63 - LANES, order=order, seed=seed)[0]
        before = (np.arange(64 * words, dtype=np.uint32) + OLD).reshape(64, words)
        moved = DATA[: 64 * words].reshape(64, words)[::-1]
        assert np.array_equal(got, np.where(active[:, None], moved, before))


@pytest.mark.parametrize("name", [name for name in ASYNC if ASYNC[name]])
def test_read_before_wait(name: str) -> None:
    """Async: nothing orders the read before the wait with the load. In lockstep it never sees the data; the read after
    the wait always does. A wait without a mark behind the load waits for nothing."""
    early = fill() + pointer(16) + issue(name, 16, "%src", "@global_smem")
    for middle, marked in [("", True), (wait(0), True), (MARK, True), (MARK + wait(1), True), (wait(0), False)]:
        body = early + middle + read("r", 16)
        if marked:
            body += ("" if MARK in middle else MARK) + wait(0) + read("s", 16)
        else:
            body += "  %s = add <4 x i32> %r, zeroinitializer"
        for order, seed in SCHEDULES:
            before, after = loaded(name, body, ["<4 x i32>"] * 2, order=order, seed=seed)
            data = DATA[:256].reshape(64, 4)
            if order == "lockstep":
                assert not (before == data).all(1).any(), middle
            if marked:
                assert np.array_equal(after, data)


def test_wait_leaves_the_newest() -> None:
    """Async, "Software pipeline": wait.asyncmark(1) completes all groups but the newest, wait.asyncmark(2) all but two.

    Three groups, the first of two loads; then the reads of every group after wait(2), wait(1) and wait(0).
    """
    body = fill(512)
    for group, start in enumerate((0, 256, 512, 768)):
        body += pointer(4, start, name=f"src{group}")
    for place in (1, 2, 3):
        body += f"  %to{place} = getelementptr i8, {LDS} @global_smem, i32 {256 * place}\n"
    name = "global.load.async.lds"
    body += issue(name, 4, "%src0", "@global_smem") + issue(name, 4, "%src1", "%to1") + MARK
    body += issue(name, 4, "%src2", "%to2") + MARK + issue(name, 4, "%src3", "%to3") + MARK
    vectors = []
    for remaining in (2, 1, 0):
        body += wait(remaining)
        vector = "poison"
        for place, base in enumerate(("@global_smem", "%to1", "%to2", "%to3")):
            label = f"g{remaining}x{place}"
            body += read(label, 4, base)
            body += f"  %v{label} = insertelement <4 x i32> {vector}, i32 %{label}, i32 {place}\n"
            vector = f"%v{label}"
        vectors.append(vector)
    for output, vector in zip("rst", vectors, strict=True):
        body += f"  %{output} = shufflevector <4 x i32> {vector}, <4 x i32> poison, <4 x i32> <i32 0, i32 1, i32 2, i32 3>\n"
    data = DATA[:256].reshape(4, 64).T
    for order, seed in SCHEDULES:
        results = loaded(name, body, ["<4 x i32>"] * 3, order=order, seed=seed)
        for got, complete in zip(results, (2, 3, 4), strict=True):
            assert np.array_equal(got[:, :complete], data[:, :complete])
            if order == "lockstep":
                assert not (got[:, complete:] == data[:, complete:]).any()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("size", [4, 16])
def test_buffer_load_to_lds(size: int, asynchronous: bool) -> None:
    """DMA, buffer addressing: as above, from base + voffset + soffset, out of range where voffset is. Such a lane brings
    zero: CDNA4, 9.1.9.1, clamps the memory address as in any other buffer fetch, and 9.1.5.1, reads return zero."""
    name = "raw.ptr.buffer.load.async.lds" if asynchronous else "raw.ptr.buffer.load.lds"
    body = f"""{fill()}
  %rsrc = call ptr addrspace(8) @llvm.amdgcn.make.buffer.rsrc.p8.p1({GLOBAL} %in_a, i16 0, i64 1536, i32 159744)
  %to = getelementptr i8, {LDS} @global_smem, i32 16
  call void @llvm.amdgcn.{name}(ptr addrspace(8) %rsrc, {LDS} %to, i32 {size}, i32 %b, i32 %n, i32 0, i32 0)
{MARK + wait(0) if asynchronous else ""}{read("r", size, "%to")}"""
    offsets = RANDOM.permutation(64) * size
    outside = LANES % 9 == 1
    offsets[outside] = np.resize([0x80000000, 1536, 0xFFFFFFF0], outside.sum())
    words = size // 4
    for order, seed in SCHEDULES:
        got = loaded(name, body, [KIND[size]], offsets, ints=(32, 0), order=order, seed=seed)[0]
        for lane in range(64):
            start = (int(offsets[lane]) + 32) // 4
            expected = [0] * words if outside[lane] else DATA[start : start + words].tolist()
            assert got[lane].tolist() == expected, (lane, offsets[lane])


def test_async_for_other_waves() -> None:
    """Each wave loads and waits for its own part, then a barrier: every wave sees every part, in any schedule."""
    body = f"""
  %wave = and i32 %tid, -64
  %uniform = call i32 @llvm.amdgcn.readfirstlane.i32(i32 %wave)
  %to = getelementptr i32, {LDS} @global_smem, i32 %uniform
  %src = getelementptr i32, {GLOBAL} %in_a, i32 %tid
{issue("global.load.async.lds", 4, "%src", "%to")}{MARK}{wait(0)}{BARRIER}
  %other = xor i32 %tid, 192
  %p = getelementptr i32, {LDS} @global_smem, i32 %other
  %r = load i32, {LDS} %p, align 4"""
    for order, seed in SCHEDULES:
        got = lanes(body, [("i32", DATA[:256])], threads=256, lds_bytes=1024, order=order, seed=seed)
        assert got.tolist() == DATA[np.arange(256) ^ 192].tolist()


def exchange(barrier: str) -> str:
    """Three rounds through LDS with the neighbouring wave; each round's slots are its own."""
    body = ""
    value = "%a"
    for step in range(3):
        body += f"""
  %own{step} = add i32 %tid, {256 * step}
  %to{step} = getelementptr i32, {LDS} @global_smem, i32 %own{step}
  store i32 {value}, {LDS} %to{step}, align 4
{barrier}
  %n{step} = add i32 %tid, {64 + step}
  %m{step} = and i32 %n{step}, 255
  %k{step} = add i32 %m{step}, {256 * step}
  %from{step} = getelementptr i32, {LDS} @global_smem, i32 %k{step}
  %v{step} = load i32, {LDS} %from{step}, align 4
  %w{step} = mul i32 %v{step}, 3
"""
        value = f"%w{step}"
    return body + "  %r = add i32 %w2, 0"


def test_barrier() -> None:
    """Four waves: with barriers right for every seed, without them wrong for some."""
    values = DATA[:256]
    expected = values
    for step in range(3):
        expected = expected[(np.arange(256) + 64 + step) & 255] * np.uint32(3)
    for order, seed in [("lockstep", 0)] + [("random", seed) for seed in range(16)]:
        got = lanes(exchange(BARRIER), [("i32", values)], threads=256, lds_bytes=3072, order=order, seed=seed)
        assert got.tolist() == expected.tolist(), seed
    wrong = 0
    for seed in range(8):
        got = lanes(exchange(""), [("i32", values)], threads=256, lds_bytes=3072, order="random", seed=seed)
        wrong += got.tolist() != expected.tolist()
    assert wrong


def test_seed_decides() -> None:
    """One seed, one schedule: the order in which waves draw tickets repeats, and differs between some seeds."""
    body = f'  %r = atomicrmw add {GLOBAL} %in_a, i32 1 syncscope("agent") monotonic, align 4'
    draws = [
        lanes(body, [("i32", np.zeros(256, np.uint32))], threads=256, order="random", seed=seed).tolist()
        for seed in [*range(8), 3]
    ]
    assert draws[3] == draws[8]
    assert len({tuple(draw) for draw in draws}) > 1
    assert all(sorted(draw) == list(range(256)) for draw in draws)


@pytest.mark.parametrize(("order", "seed"), SCHEDULES)
def test_workgroups_wait_for_each_other(order: str, seed: int) -> None:
    """LangRef, release and acquire: both workgroups raise a flag and spin on the other's; then the data is there."""
    parameters = f"{GLOBAL} %data, {GLOBAL} %flags, {GLOBAL} %out"
    body = f"""
  %tid = call i32 @llvm.amdgcn.workitem.id.x()
  %mine = call i32 @llvm.amdgcn.workgroup.id.x()
  %other = xor i32 %mine, 1
  %row = shl i32 %mine, 7
  %slot = add i32 %row, %tid
  %value = mul i32 %slot, 17
  %to = getelementptr i32, {GLOBAL} %data, i32 %slot
  store i32 %value, {GLOBAL} %to, align 4
  fence syncscope("workgroup") release
  call void @llvm.amdgcn.s.barrier()
  fence syncscope("workgroup") acquire
  %first = icmp eq i32 %tid, 0
  br i1 %first, label %signal, label %ready
signal:
  %my.flag = getelementptr i32, {GLOBAL} %flags, i32 %mine
  %their.flag = getelementptr i32, {GLOBAL} %flags, i32 %other
  store atomic i32 1, {GLOBAL} %my.flag syncscope("agent") release, align 4
  br label %spin
spin:
  %seen = load atomic i32, {GLOBAL} %their.flag syncscope("agent") acquire, align 4
  %up = icmp ne i32 %seen, 0
  br i1 %up, label %ready, label %spin
ready:
  fence syncscope("workgroup") release
  call void @llvm.amdgcn.s.barrier()
  fence syncscope("workgroup") acquire
  %other.row = shl i32 %other, 7
  %other.slot = add i32 %other.row, %tid
  %from = getelementptr i32, {GLOBAL} %data, i32 %other.slot
  %got = load i32, {GLOBAL} %from, align 4
  %result = getelementptr i32, {GLOBAL} %out, i32 %slot
  store i32 %got, {GLOBAL} %result, align 4
  ret void"""
    data, flags, out = np.zeros(256, np.uint32), np.zeros(2, np.uint32), np.zeros(256, np.uint32)
    kernel = Kernel(module(parameters, body), "k", arch="gfx942")
    kernel.run([data, flags, out], grid=2, threads=128, order=order, seed=seed)
    assert flags.tolist() == [1, 1]
    assert out.tolist() == [17 * (slot ^ 128) for slot in range(256)]


@pytest.mark.parametrize(("order", "seed"), SCHEDULES)
def test_volatile_words_carry_their_own_readiness(order: str, seed: int) -> None:
    """LangRef, volatile: every access happens, once, as written; workgroups spin on 8-byte words that hold epoch and data."""
    parameters = f"{GLOBAL} %words, {GLOBAL} %out"
    body = f"""
  %tid = call i32 @llvm.amdgcn.workitem.id.x()
  %mine = call i32 @llvm.amdgcn.workgroup.id.x()
  %row = shl i32 %mine, 7
  %slot = add i32 %row, %tid
  %other.slot = xor i32 %slot, 128
  %wide = zext i32 %slot to i64
  %data = mul i64 %wide, 17
  %word = or i64 %data, 12884901888
  %value = insertelement <1 x i64> poison, i64 %word, i64 0
  %to = getelementptr i64, {GLOBAL} %words, i32 %slot
  store volatile <1 x i64> %value, {GLOBAL} %to, align 8, !nontemporal !1
  %from = getelementptr i64, {GLOBAL} %words, i32 %other.slot
  br label %spin
spin:
  %seen = load volatile <1 x i64>, {GLOBAL} %from, align 8
  %bits = extractelement <1 x i64> %seen, i64 0
  %epoch = lshr i64 %bits, 32
  %ready = icmp eq i64 %epoch, 3
  br i1 %ready, label %done, label %spin
done:
  %result = getelementptr i64, {GLOBAL} %out, i32 %slot
  store i64 %bits, {GLOBAL} %result, align 8
  ret void"""
    words, out = np.full(256, 1 << 32, np.uint64), np.zeros(256, np.uint64)
    Kernel(module(parameters, body), "k").run([words, out], grid=2, threads=128, order=order, seed=seed)
    assert out.tolist() == [(3 << 32) + 17 * (slot ^ 128) for slot in range(256)]


def test_volatile_loads_let_others_run() -> None:
    """The interpreter's promise: a launch yields True after a look at a volatile word, so that who runs it can let other
    launches and processes on before the next look; plain loads are not looks.
    """
    body = f"""
  br label %spin
spin:
  %seen = load KIND i64, {GLOBAL} %word, align 8
  %ready = icmp ne i64 %seen, 0
  br i1 %ready, label %done, label %spin
done:
  ret void"""
    word = np.zeros(1, np.uint64)
    for kind, polls in (("volatile", True), ("", False)):
        word[0] = 0
        program = Program(module(f"{GLOBAL} %word", body.replace("KIND", kind)), "k", "gfx942")
        turns = launch(program, [array_range(word)], [word.ctypes.data], (1, 1, 1), 64, 0, "lockstep", 0)
        assert [next(turns) for _ in range(9)] == [False] + [polls] * 8
        word[0] = 1
        assert list(turns) == [polls, False]

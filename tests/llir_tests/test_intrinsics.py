# SPDX-License-Identifier: Apache-2.0
"""AMDGPU intrinsics within a wave: identifiers, lane exchange, byte and float conversion.

Expectations come from AMD's and LLVM's documents alone, as models over lanes written here:
 - "CDNA3": "AMD Instinct MI300" Instruction Set Architecture Reference Guide, the named instruction's pseudocode;
 - "CDNA4": AMD Instinct CDNA4 Instruction Set Architecture Reference Guide;
 - "AMDGPUUsage", "AMDGPUModifierSyntax", "IntrinsicsAMDGPU.td": LLVM's documents and intrinsic definitions.
"""

from __future__ import annotations

import numpy as np
import pytest
from llir import Kernel
from llir_tests.ir_kernels import (
    FLOAT8,
    GLOBAL,
    LDS,
    cycle,
    float8,
    lanes,
    module,
    same_floats,
    under,
)

LANES = np.arange(64)
RANDOM = np.random.default_rng(5)
WORDS = RANDOM.integers(0, 2**32, 64, dtype=np.uint32)
OTHER = RANDOM.integers(0, 2**32, 64, dtype=np.uint32)
SOME = np.isin(LANES, [3, 4, 7, 9, 14, 15, 16, 21, 31, 32, 33, 47, 48, 62])  # active lanes in a divergent region
ACTIVE = SOME.astype(np.uint32)
ACTIVE_CONDITION = "%cond = icmp ne i32 %b, 0"
NONE = 0xFFFFFFFF  # what `under` leaves in inactive lanes


def test_workitem_id() -> None:
    """AMDGPUUsage, LLVM IR intrinsics: the work-item's number in its workgroup, over all waves."""
    got = lanes("  %r = add i32 %tid, 0", threads=256)
    assert got.tolist() == list(range(256))


@pytest.mark.parametrize("order", ["lockstep", "random"])
def test_workgroup_ids(order: str) -> None:
    """AMDGPUUsage, LLVM IR intrinsics llvm.amdgcn.workgroup.id.*: each workgroup of a 3 x 2 x 4 grid once."""
    body = f"""
  %x = call i32 @llvm.amdgcn.workgroup.id.x()
  %y = call i32 @llvm.amdgcn.workgroup.id.y()
  %z = call i32 @llvm.amdgcn.workgroup.id.z()
  %z2 = mul i32 %z, 2
  %yz = add i32 %y, %z2
  %yz3 = mul i32 %yz, 3
  %linear = add i32 %yz3, %x
  %at = getelementptr i32, {GLOBAL} %out, i32 %linear
  %tid = call i32 @llvm.amdgcn.workitem.id.x()
  %old = atomicrmw add {GLOBAL} %at, i32 1 syncscope("agent") monotonic, align 4
  ret void"""
    out = np.zeros(25, np.uint32)
    Kernel(module(f"{GLOBAL} %out", body), "k", arch="gfx942").run([out], grid=(3, 2, 4), threads=64, order=order)
    assert out.tolist() == [64] * 24 + [0]


def test_implicit_arguments() -> None:
    """AMDGPUUsage, code object V5 hidden arguments: block counts x, y, z as i32, then group sizes as i16."""
    body = "  %p = call ptr addrspace(4) @llvm.amdgcn.implicitarg.ptr()\n"
    for slot, (offset, kind) in enumerate([(0, "i32"), (4, "i32"), (8, "i32"), (12, "i16"), (14, "i16"), (16, "i16")]):
        body += f"  %p{slot} = getelementptr i8, ptr addrspace(4) %p, i64 {offset}\n"
        body += f"  %v{slot} = load {kind}, ptr addrspace(4) %p{slot}, align {2 if kind == 'i16' else 4}\n"
        value = f"%v{slot}"
        if kind == "i16":
            body += f"  %w{slot} = zext i16 %v{slot} to i32\n"
            value = f"%w{slot}"
        body += f"  %q{slot} = getelementptr i32, {GLOBAL} %out, i64 {slot}\n"
        body += f"  store i32 {value}, {GLOBAL} %q{slot}, align 4\n"
    out = np.zeros(6, np.uint32)
    kernel = Kernel(module(f"{GLOBAL} %out", body + "  ret void"), "k", arch="gfx942")
    kernel.run([out], grid=(5, 3, 2), threads=128)
    assert out.tolist() == [5, 3, 2, 128, 1, 1]


@pytest.mark.parametrize("first", [0, 13, 63])
def test_readfirstlane(first: int) -> None:
    """CDNA3, V_READFIRSTLANE_B32: the value of the lowest active lane."""
    snippet = "  %v = call i32 @llvm.amdgcn.readfirstlane.i32(i32 %a)"
    active = (first <= LANES) & ((first == LANES) | (LANES % 3 == 0))
    got = lanes(under(ACTIVE_CONDITION, snippet, "%v"), [("i32", WORDS), ("i32", active.astype(np.uint32))])
    assert got.tolist() == np.where(active, WORDS[first], np.uint32(NONE)).tolist()


@pytest.mark.parametrize("lane", [0, 17, 63])
def test_readlane(lane: int) -> None:
    """IntrinsicsAMDGPU.td, readlane: the lane argument is uniform; every lane gets that lane's value."""
    got = lanes("  %r = call i32 @llvm.amdgcn.readlane.i32(i32 %a, i32 %n)", [("i32", WORDS)], ints=(lane, 0))
    assert got.tolist() == [WORDS[lane]] * 64


@pytest.mark.parametrize("lane", [0, 40, 63])
def test_writelane(lane: int) -> None:
    """IntrinsicsAMDGPU.td, writelane(value, lane, old): the value in that lane, old in all others."""
    snippet = "  %r = call i32 @llvm.amdgcn.writelane.i32(i32 %n, i32 %m, i32 %a)"
    got = lanes(snippet, [("i32", WORDS)], ints=(77, lane))
    assert got.tolist() == np.where(lane == LANES, 77, WORDS).tolist()


@pytest.mark.parametrize(("mask_low", "mask_high"), [(-1, -1), (0x0F0F1234, 0x76543211), (0, 0)])
def test_mbcnt(mask_low: int, mask_high: int) -> None:
    """CDNA3, V_MBCNT_LO/HI_U32_B32: bits of the mask below this lane, plus the second operand."""
    snippet = """
  %low = call i32 @llvm.amdgcn.mbcnt.lo(i32 %n, i32 1000)
  %r = call i32 @llvm.amdgcn.mbcnt.hi(i32 %m, i32 %low)
  %s = call i32 @llvm.amdgcn.mbcnt.lo(i32 %n, i32 0)"""
    both, low = lanes(snippet, [], ("i32", "i32"), ints=(mask_low, mask_high))
    mask = (mask_high & 0xFFFFFFFF) << 32 | mask_low & 0xFFFFFFFF
    assert both.tolist() == [1000 + (mask & ((1 << lane) - 1)).bit_count() for lane in range(64)]
    assert low.tolist() == [(mask & ((1 << min(lane, 32)) - 1)).bit_count() for lane in range(64)]


def test_ballot() -> None:
    """AMDGPUUsage, llvm.amdgcn.ballot: a bit for each active lane whose argument is true; inactive lanes give 0."""
    votes = RANDOM.integers(0, 2, 64).astype(np.uint32)
    condition = "%vote = icmp ne i32 %a, 0\n  %cond = icmp ne i32 %b, 0"
    snippet = "  %v = call i64 @llvm.amdgcn.ballot.i64(i1 %vote)\n  %w = call i64 @llvm.amdgcn.ballot.i64(i1 true)"
    body = under(condition, snippet, "%v", "i64") + "  %s = phi i64 [ -1, %entry ], [ %w, %inside ]"
    some, every = lanes(body, [("i32", votes), ("i32", ACTIVE)], ("i64", "i64"))
    expected = sum(1 << int(lane) for lane in LANES[SOME & (votes != 0)])
    assert some.tolist() == [expected if active else 2**64 - 1 for active in SOME]
    assert every.tolist() == [sum(1 << int(lane) for lane in LANES[SOME]) if active else 2**64 - 1 for active in SOME]


def dpp_source(control: int, lane: int) -> int | None:
    """The lane that DPP reads: CDNA4, 13.3.9, table 94, DPP_CTRL; None where it is out of the row or the wave."""
    row, place = lane & ~15, lane & 15
    if control < 0x100:
        return lane & ~3 | control >> 2 * (lane & 3) & 3
    if 0x101 <= control <= 0x10F:
        return lane + (control & 15) if place + (control & 15) < 16 else None
    if 0x111 <= control <= 0x11F:
        return lane - (control & 15) if place >= control & 15 else None
    if 0x121 <= control <= 0x12F:
        return row | (place - (control & 15)) % 16
    if 0x150 <= control <= 0x15F:
        return row | control & 15
    return {
        0x130: lane + 1 if lane < 63 else None,
        0x134: (lane + 1) % 64,
        0x138: lane - 1 if lane > 0 else None,
        0x13C: (lane - 1) % 64,
        0x140: row | 15 - place,
        0x141: lane & ~7 | 7 - (lane & 7),
        0x142: row - 1 if lane > 15 else None,
        0x143: 31 if lane > 31 else None,
    }[control]


def dpp(control: int, row_mask: int, bank_mask: int, bound: bool, active: np.ndarray) -> list[int]:
    """update.dpp(old=OTHER, source=WORDS): IntrinsicsAMDGPU.td calls it `mov dest, old; mov_dpp dest, source`.

    CDNA4, 13.3.9, table 93: lanes in rows or banks that the masks disable do not write; a source lane that is out of
    range or inactive (gfx9 has no FI bit: AMDGPUModifierSyntax, fi, leaves it to bound_ctrl) gives 0 with bound_ctrl,
    else the lane does not write.
    """
    result = []
    for lane in range(64):
        source = dpp_source(control, lane)
        if not (row_mask >> lane // 16 & 1 and bank_mask >> lane % 16 // 4 & 1):
            result.append(OTHER[lane])
        elif source is None or not active[source]:
            result.append(0 if bound else OTHER[lane])
        else:
            result.append(WORDS[source])
    return [int(value) if active[lane] else NONE for lane, value in enumerate(result)]


QUAD = [0, 27, 78, 177, 0xE4, 0x93, 0xFF, 0x55, 0xD8]
ROWS = [0x101, 0x102, 0x104, 0x108, 0x10F, 273, 274, 276, 280, 0x11F, 0x121, 0x124, 296, 0x12F]
WAVE = [0x130, 0x134, 0x138, 0x13C, 0x140, 321]
NEW_BROADCAST = [0x150, 0x153, 0x15F]  # gfx90a and later: AMDGPUModifierSyntax, dpp_ctrl, row_newbcast


def run_dpp(control: int, row_mask: int, bank_mask: int, bound: bool, active: np.ndarray, arch: str) -> list[int]:
    bound_text = "true" if bound else "false"
    arguments = f"i32 %c, i32 %a, i32 {control}, i32 {row_mask}, i32 {bank_mask}, i1 {bound_text}"
    body = under(ACTIVE_CONDITION, f"  %v = call i32 @llvm.amdgcn.update.dpp.i32({arguments})", "%v")
    inputs = [("i32", WORDS), ("i32", active.astype(np.uint32)), ("i32", OTHER)]
    return lanes(body, inputs, arch=arch).tolist()


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("control", QUAD + ROWS + WAVE + NEW_BROADCAST)
def test_dpp(control: int, bound: bool) -> None:
    everyone = np.ones(64, bool)
    assert run_dpp(control, 15, 15, bound, everyone, "gfx942") == dpp(control, 15, 15, bound, everyone)
    assert run_dpp(control, 15, 15, bound, SOME, "gfx950") == dpp(control, 15, 15, bound, SOME)


@pytest.mark.parametrize(("row_mask", "bank_mask"), [(10, 15), (15, 5), (6, 9), (0, 15), (15, 0)])
@pytest.mark.parametrize("control", [27, 273, 0x102, 296, 0x138, 0x140])
def test_dpp_masks(control: int, row_mask: int, bank_mask: int) -> None:
    for bound in (False, True):
        got = run_dpp(control, row_mask, bank_mask, bound, SOME | (LANES < 20), "gfx942")
        assert got == dpp(control, row_mask, bank_mask, bound, SOME | (LANES < 20))


@pytest.mark.parametrize(("control", "row_mask"), [(322, 10), (322, 14), (322, 15), (323, 12), (323, 15), (323, 8)])
def test_dpp_broadcast(control: int, row_mask: int) -> None:
    """CDNA4, table 94, DPP_ROW_BCAST15 and 31: lanes above 15 and above 31 only.

    Open: the lanes below in a row that the row mask enables (the table has no case for them); not compared.
    """
    defined = [lane for lane in range(64) if dpp_source(control, lane) is not None or not row_mask >> lane // 16 & 1]
    for active in (np.ones(64, bool), SOME):
        got, expected = (
            run_dpp(control, row_mask, 15, False, active, "gfx942"),
            dpp(control, row_mask, 15, False, active),
        )
        assert [got[lane] for lane in defined] == [expected[lane] for lane in defined]


@pytest.mark.parametrize("size", [16, 32])
def test_permlane_swap(size: int) -> None:
    """CDNA4, V_PERMLANE16_SWAP_B32: odd rows of the first operand trade places with even rows of the second;
    V_PERMLANE32_SWAP_B32: the first's upper half with the second's lower half. The results in operand order."""
    call = f"call {{ i32, i32 }} @llvm.amdgcn.permlane{size}.swap(i32 %a, i32 %b, i1 false, i1 false)"
    snippet = f"  %p = {call}\n  %r = extractvalue {{ i32, i32 }} %p, 0\n  %s = extractvalue {{ i32, i32 }} %p, 1"
    first, second = lanes(snippet, [("i32", WORDS), ("i32", OTHER)], ("i32", "i32"), arch="gfx950")
    a, b = WORDS.copy(), OTHER.copy()
    for lane in range(64):
        if lane & size:
            a[lane], b[lane - size] = b[lane - size], a[lane]
    assert first.tolist() == a.tolist()
    assert second.tolist() == b.tolist()


def test_bpermute() -> None:
    """CDNA3, DS_BPERMUTE_B32: lane (address / 4) mod 64; a disabled source lane gives 0."""
    address = RANDOM.integers(0, 2**32, 64, dtype=np.uint32)
    address[:8] = [0, 4, 5, 7, 252, 256, 0xFFFFFFFC, 0x80000010]
    snippet = "  %v = call i32 @llvm.amdgcn.ds.bpermute(i32 %c, i32 %a)"
    for active in (np.ones(64, bool), SOME):
        body = under(ACTIVE_CONDITION, snippet, "%v")
        got = lanes(body, [("i32", WORDS), ("i32", active.astype(np.uint32)), ("i32", address)])
        sources = [int(value) // 4 % 64 for value in address]
        assert got.tolist() == [(WORDS[s] if active[s] else 0) if active[i] else NONE for i, s in enumerate(sources)]


def test_permute() -> None:
    """CDNA3, DS_PERMUTE_B32: pushes to lane (address / 4) mod 64; the highest source wins; lanes not hit get 0."""
    address = (RANDOM.integers(0, 40, 64) * 4 + RANDOM.integers(0, 4, 64) + 256 * RANDOM.integers(0, 9, 64)).astype(
        "u4"
    )
    snippet = "  %v = call i32 @llvm.amdgcn.ds.permute(i32 %c, i32 %a)"
    for active in (np.ones(64, bool), SOME):
        got = lanes(
            under(ACTIVE_CONDITION, snippet, "%v"),
            [("i32", WORDS), ("i32", active.astype(np.uint32)), ("i32", address)],
        )
        expected = [0] * 64
        for lane in LANES[active]:
            expected[address[lane] // 4 % 64] = int(WORDS[lane])
        assert got.tolist() == [expected[lane] if active[lane] else NONE for lane in range(64)]


@pytest.mark.parametrize("offset", [0x041F, 0x401F, 0x001E, 0x0210, 0x7C1F, 0x801B, 0x80B1, 0x80FF])
def test_swizzle(offset: int) -> None:
    """CDNA3, DS_SWIZZLE_B32: and/or/xor masks within 32 lanes (bit 15 clear), or a quad's permutation."""
    got = lanes(f"  %r = call i32 @llvm.amdgcn.ds.swizzle(i32 %a, i32 {offset})", [("i32", WORDS)])
    expected = []
    for lane in range(64):
        if offset & 0x8000:
            source = lane & ~3 | offset >> 2 * (lane & 3) & 3
        else:
            source = (lane & 31 & offset | offset >> 5 & 31) ^ (offset >> 10 & 31) | lane & 32
        expected.append(WORDS[source])
    assert got.tolist() == expected


def transposed(snippet: str, kind: str, elements: np.ndarray, address: np.ndarray) -> np.ndarray:
    """Writes 64 times 8 bytes to LDS, then reads through the lanes' addresses."""
    body = f"""
  %to = getelementptr i8, {LDS} @global_smem, i32 %b
  %from = getelementptr i8, {LDS} @global_smem, i32 %c
  store i64 %a, {LDS} %to, align 8
  fence syncscope("workgroup") release
  call void @llvm.amdgcn.s.barrier()
  fence syncscope("workgroup") acquire
{snippet}"""
    inputs = [("i64", elements.reshape(-1).view(np.uint64)), ("i32", LANES * 8), ("i32", address)]
    return lanes(body, inputs, (kind,), arch="gfx950", lds_bytes=512)


@pytest.mark.parametrize(("bits", "kind"), [(16, "<4 x half>"), (16, "<4 x i16>"), (8, "<2 x i32>")])
@pytest.mark.parametrize("shuffled", [False, True])
def test_transpose_read(bits: int, kind: str, shuffled: bool) -> None:
    """DS_READ_B64_TR_B16 and _B8: 16 lanes read a matrix of 4 (or 8) rows by 16 columns, column i goes to lane i.

    CDNA4, 11.4 "MFMA Transpose Load from LDS" has the K values of each 16 lanes and no more. The lanes come from AMD's Composable Kernel,
    ck_tile/core/tensor/load_tile_transpose.hpp, Quad16 and Quad8: before, lane = row * 4 + quarter (row * 2 + half),
    each with 4 (8) neighbouring columns; after, lane = column, register = row. Triton's AMD back end assumes the same.
    Open: Modular's text has TR_B8 as two transpositions, of the even and of the odd lanes. AMD's own code contradicts it.
    """
    count = 64 // bits
    element = np.uint16 if bits == 16 else np.uint8
    tile = RANDOM.permutation(64 * count).astype(np.uint16)
    tile = tile if bits == 16 else tile.astype(np.uint8) ^ (tile >> 8).astype(np.uint8)
    address = (RANDOM.permutation(64) if shuffled else LANES) * 8
    suffix = {"<4 x half>": "v4f16", "<4 x i16>": "v4i16", "<2 x i32>": "v2i32"}[kind]
    snippet = f"  %r = call {kind} @llvm.amdgcn.ds.read.tr{bits}.b64.{suffix}({LDS} %from)"
    got = transposed(snippet, kind, tile, address).view(element).reshape(64, count)
    loaded = tile.reshape(64, count)[address // 8]  # what each lane's address holds
    per_row = 16 // count  # lanes that hold one row
    for lane in range(64):
        column, group = lane % 16, lane & ~15
        for row in range(count):
            assert got[lane, row] == loaded[group + row * per_row + column // count, column % count], (lane, row)


def test_perm() -> None:
    """CDNA3, V_PERM_B32: selectors 0-3 bytes of the second operand, 4-7 of the first, 8-11 the signs of bytes 1, 3, 5
    and 7, 12 zero, above 12 all ones."""
    selectors = RANDOM.integers(0, 16, (64, 4)).astype(np.uint8)
    selectors[:4] = np.arange(16).reshape(4, 4)
    selectors[4] = [13, 0x80, 0xFF, 12]
    snippet = "  %r = call i32 @llvm.amdgcn.perm(i32 %a, i32 %b, i32 %c)"
    got = lanes(snippet, [("i32", WORDS), ("i32", OTHER), ("i32", selectors.view(np.uint32).reshape(-1))])

    def byte(data: bytes, selector: int) -> int:
        if selector < 8:
            return data[selector]
        return 0xFF * (data[2 * selector - 15] >> 7) if selector < 12 else 0xFF * (selector > 12)

    for lane in range(64):
        data = OTHER[lane].tobytes() + WORDS[lane].tobytes()
        expected = [byte(data, int(selector)) for selector in selectors[lane]]
        assert list(int(got[lane]).to_bytes(4, "little")) == expected, (lane, selectors[lane])


def test_cvt_pkrtz() -> None:
    """CDNA3, V_CVT_PKRTZ_F16_F32: both operands to half, rounded toward zero; finite values never become infinite."""
    values = [1.0, 1.0009, 1.00098, 1.9999, -1.9999, 65504.0, 65519.0, 65520.0, 70000.0, -1e30, np.inf, -np.inf]
    values += [np.nan, 0.0, -0.0, 2.0**-14 * 0.9999, 2.0**-24 * 1.9, 2.0**-24 * 0.9, -(2.0**-24) * 0.9, 1e-30, 0.1]
    a = cycle(values, np.float32)
    b = RANDOM.normal(0, 100, 64).astype(np.float32)
    snippet = "  %r = call <2 x half> @llvm.amdgcn.cvt.pkrtz(float %a, float %b)"
    got = lanes(snippet, [("float", a), ("float", b)], ("<2 x half>",))

    def toward_zero(value: np.float32) -> np.float16:
        candidates = np.arange(0x7C00, dtype=np.uint16).view(np.float16)  # all finite ones that are not negative
        if not np.isfinite(value):
            return np.float16(value)
        place = np.searchsorted(candidates.astype(np.float64), abs(float(value)), "right") - 1
        return np.copysign(candidates[place], np.float16(np.sign(value) if value else np.copysign(1, value)))

    assert same_floats(got[:, 0].copy(), [toward_zero(value) for value in a])
    assert same_floats(got[:, 1].copy(), [toward_zero(value) for value in b])
    assert got[8, 0] == 65504


@pytest.mark.parametrize("arch", sorted(FLOAT8))
@pytest.mark.parametrize(("name", "which"), [("fp8", 0), ("bf8", 1)])
def test_cvt_float8(name: str, which: int, arch: str) -> None:
    """V_CVT_PK_F32_FP8 and _BF8: every code, both words. CDNA4, 7.3, table 30, has OCP's formats; CDNA3 its own."""
    snippet = f"""
  %r = call <2 x float> @llvm.amdgcn.cvt.pk.f32.{name}(i32 %a, i1 false)
  %s = call <2 x float> @llvm.amdgcn.cvt.pk.f32.{name}(i32 %a, i1 true)"""
    codes = RANDOM.permutation(256).astype(np.uint8).reshape(64, 4)
    words = codes.view(np.uint32).reshape(-1)
    low, high = lanes(snippet, [("i32", words)], ("<2 x float>", "<2 x float>"), arch=arch)
    expected = np.array([[float8(int(code), FLOAT8[arch][which]) for code in row] for row in codes], np.float32)
    assert same_floats(np.concatenate([low, high], 1), expected)


def test_rcp() -> None:
    """CDNA3, V_RCP_F32: 1 / x within 1 ulp; exact for zeros and infinities."""
    values = [1.0, 2.0, -4.0, 3.0, 0.1, 1e30, -7.25, 123456.7, 0.0, -0.0, np.inf, -np.inf, np.nan]
    got = lanes("  %r = call float @llvm.amdgcn.rcp.f32(float %a)", [("float", cycle(values, "f4"))], ("float",))
    with np.errstate(divide="ignore"):
        expected = np.float32(1) / np.array(values, np.float32)
    assert same_floats(got[8:13], expected[8:])
    assert np.allclose(got[:8], expected[:8], rtol=1.2e-7, atol=0)

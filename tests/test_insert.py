# SPDX-License-Identifier: Apache-2.0
"""What insert stores, where, and what it leaves alone: sections 1.2, 1.7 and 1.9 of the contract.

The formats are decoded here from their bit fields; neither torch's casts nor the reference serve as the expectation.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import blockpick
from blockpick.testing.reference import e4m3_bytes, insert_reference

SENTINEL = 0xA5
TOKEN_BYTES = {"bf16": 256, "e4m3fn": 128, "nvfp4": 72}
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
# E4M3 by its fields: 4 exponent bits with bias 7, 3 mantissa bits; 0x7F is NaN
E4M3 = [m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:127]
LAYOUTS = [
    pytest.param(dtype, page_size, shards, id=f"{dtype}-page{page_size}-shards{shards}")
    for dtype, page_size, shards in itertools.product(TOKEN_BYTES, (128, 256), (1, 2, 4, 8))
]


def to_e4m3(x: float) -> int:
    """Nearest even, saturating at 448, NaN as 0x7F."""
    if math.isnan(x):
        return 0x7F
    size = min(abs(x), 448.0)
    code = min(range(127), key=lambda c: (abs(E4M3[c] - size), c % 2))
    return code | (0x80 if math.copysign(1, x) < 0 else 0)


def all_bf16() -> torch.Tensor:
    """Every bit pattern once, [512, 128]."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(512, 128)


@functools.cache
def e4m3_of_all_bf16() -> np.ndarray:
    """Bytes [65536] by bf16 bit pattern, in exact float64 arithmetic."""
    bits = np.arange(65536, dtype=np.uint32) << 16
    with np.errstate(invalid="ignore"):
        values = bits.view(np.float32).astype(np.float64)
    size = np.minimum(np.abs(np.nan_to_num(values, nan=0.0, posinf=448, neginf=-448)), 448)
    grid = np.array(E4M3)
    middle = (grid[:-1] + grid[1:]) / 2
    below = np.searchsorted(middle, size, side="left")  # a midpoint counts as below ...
    tie = (below < 126) & (middle[np.minimum(below, 125)] == size)
    code = np.where(tie & (below % 2 == 1), below + 1, below)  # ... and moves up to the even code
    return np.where(np.isnan(values), 0x7F, code | ((bits >> 24) & 0x80)).astype(np.uint8)


def stored(
    layout: blockpick.CacheLayout, pages: int, stride: int | None, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache whose every byte is the sentinel, and its bytes, 64 of them beyond the last page."""
    stride = stride or layout.page_bytes
    raw = torch.full((pages * stride + 64,), SENTINEL, dtype=torch.uint8, device=device)
    size = torch.empty(0, dtype=layout.torch_dtype).element_size()
    shape = layout.shape(pages)
    typed = raw.view(layout.torch_dtype)
    return torch.as_strided(typed, shape, (stride // size, shape[2], 1)), raw


def writers(executor: Any) -> Iterator[tuple[str, Callable[..., None], str]]:
    """The executor's insert and the reference's: name, function of (layout, cache, keys, slots, shard=), device."""
    yield executor.name, executor.insert, executor.device
    yield (
        "reference",
        lambda layout, cache, keys, slots, shard=0: insert_reference(layout, cache, keys, slots, shard),
        "cpu",
    )


def encoded(dtype: str, tokens: int, seed: int = 0) -> tuple[torch.Tensor, list[bytes], list[bytes]]:
    """Keys that each format holds exactly, with the bytes they must become: keys, row or code bytes, scale bytes."""
    rng = np.random.default_rng(seed)
    if dtype == "bf16":
        keys = torch.from_numpy(rng.standard_normal((tokens, 128))).bfloat16()
        return keys, [k.view(torch.uint8).numpy().tobytes() for k in keys], [b""] * tokens
    if dtype == "e4m3fn":
        codes = rng.integers(0, 256, (tokens, 128))
        codes[codes % 128 == 127] = 0
        values = np.array(E4M3)[codes % 128] * np.where(codes > 127, -1, 1)
        return torch.from_numpy(values).bfloat16(), [c.astype(np.uint8).tobytes() for c in codes], [b""] * tokens
    codes = rng.integers(0, 16, (tokens, 8, 16))
    codes[codes == 8] = 0  # zero is stored as +0
    codes[..., 5] = 7 + 8 * rng.integers(0, 2, (tokens, 8))  # a 6 makes the scale amax / 6
    scales = rng.integers(1, 127, (tokens, 8))
    values = np.array(E2M1 + [-v for v in E2M1])[codes] * np.array(E4M3)[scales][..., None]
    keys = torch.from_numpy(values.reshape(tokens, 128)).bfloat16()
    flat = codes.reshape(tokens, 128)
    packed = (flat[:, 0::2] | flat[:, 1::2] << 4).astype(np.uint8)
    return keys, [p.tobytes() for p in packed], [s.astype(np.uint8).tobytes() for s in scales]


def expected_bytes(layout: blockpick.CacheLayout, raw: bytes, stride: int, slots: list[int], codes: list[bytes],
                   scales: list[bytes], shard: int) -> bytes:  # fmt: skip
    """``raw`` after the tokens were stored, by the byte formulas of 1.2 and 1.9."""
    image = bytearray(raw)
    rows = layout.page_size // layout.shards
    segment = min(rows, 128)
    pages = (len(raw) - 64) // stride
    for slot, code, scale in zip(slots, codes, scales, strict=True):
        page, u = slot // layout.page_size, slot % layout.page_size
        if slot < 0 or page >= pages or u // rows != shard:
            continue
        row = u % rows
        if layout.dtype == "nvfp4":
            base = page * stride + row // segment * segment * 72
            t = row % segment
            image[base + t * 64 : base + t * 64 + 64] = code
            image[base + segment * 64 + t * 8 : base + segment * 64 + t * 8 + 8] = scale
        else:
            start = page * stride + row * len(code)
            image[start : start + len(code)] = code
    return bytes(image)


def image(raw: torch.Tensor) -> bytes:
    return raw.cpu().numpy().tobytes()


def write(writer: Callable[..., None], device: str, dtype: str, keys: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Insert up to 128 * n keys into consecutive slots; row or code bytes [T, .] and scale bytes [T, 8]."""
    layout = blockpick.CacheLayout(dtype)
    pages = -(-len(keys) // 128)
    cache, raw = stored(layout, pages, None, device)
    writer(layout, cache, keys.to(device), torch.arange(len(keys), device=device))
    data = np.frombuffer(image(raw)[:-64], np.uint8).reshape(pages, -1)
    if dtype != "nvfp4":
        return data.reshape(pages * 128, -1)[: len(keys)], np.empty(0)
    return data[:, :8192].reshape(-1, 64)[: len(keys)], data[:, 8192:].reshape(-1, 8)[: len(keys)]


def groups(writer: Callable[..., None], device: str, values: list[list[float]]) -> list[tuple[int, list[int]]]:
    """NVFP4 scale byte and 16 codes of every group of up to 16 values (the rest zeros)."""
    keys = torch.zeros(-(-len(values) // 8), 8, 16)
    for j, group in enumerate(values):
        keys[j // 8, j % 8, : len(group)] = torch.tensor(group)
    codes, scales = write(writer, device, "nvfp4", keys.flatten(1).bfloat16())
    nibbles = np.stack((codes & 15, codes >> 4), -1).reshape(-1, 16)
    return [(int(s), c.tolist()) for s, c in zip(scales.reshape(-1), nibbles, strict=True)][: len(values)]


# ---- where ----


@pytest.mark.parametrize(("dtype", "page_size", "shards"), LAYOUTS)
def test_every_shard_stores_its_rows_and_nothing_else(executor: Any, dtype: str, page_size: int, shards: int) -> None:
    """Page edges, shard edges, negative slots and slots beyond the pool; dense pages, then padded ones."""
    layout = blockpick.CacheLayout(dtype, page_size, shards)
    total = 3 * page_size
    rows = page_size // shards
    chosen = {0, 1, rows - 1, rows % page_size, 127, 128 % page_size, page_size - 1, page_size // 2}
    slots = sorted(page_size + u for u in chosen) + [0, total - 1, total - page_size]
    slots += [-1, -2, -page_size, -(2**40), total, total + 5, 2**31, 2**32 + 3, 2**40 + 1, 2**62]
    order = torch.randperm(len(slots), generator=torch.Generator().manual_seed(rows)).tolist()
    slots = [slots[j] for j in order]
    keys, codes, scales = encoded(dtype, len(slots), seed=rows)
    for stride in (rows * TOKEN_BYTES[dtype], (rows * TOKEN_BYTES[dtype] + 16383) // 16384 * 16384 + 16):
        for shard in range(shards):
            for name, writer, device in writers(executor):
                cache, raw = stored(layout, 3, stride, device)
                before = image(raw)
                writer(layout, cache, keys.to(device), torch.tensor(slots, device=device), shard=shard)
                wanted = expected_bytes(layout, before, stride, slots, codes, scales, shard)
                assert image(raw) == wanted, f"{name}: shard {shard}, page stride {stride}"


@pytest.mark.parametrize("dtype", TOKEN_BYTES)
def test_whole_pages_and_an_odd_number_of_tokens(executor: Any, dtype: str) -> None:
    layout = blockpick.CacheLayout(dtype, 256)
    slots = torch.randperm(3 * 256, generator=torch.Generator().manual_seed(2))[:301]
    keys, codes, scales = encoded(dtype, len(slots))
    for name, writer, device in writers(executor):
        cache, raw = stored(layout, 3, None, device)
        before = image(raw)
        writer(layout, cache, keys.to(device), slots.to(device))
        assert image(raw) == expected_bytes(layout, before, layout.page_bytes, slots.tolist(), codes, scales, 0), name


@pytest.mark.parametrize("dtype", TOKEN_BYTES)
def test_stock_nvfp4_stride_and_rows_cut_from_fused_qkv(executor: Any, dtype: str) -> None:
    """Page stride 16384 x 2; the keys are a column slice of a wider row, whose other columns are NaN."""
    layout = blockpick.CacheLayout(dtype)
    keys, codes, scales = encoded(dtype, 9)
    fused = torch.full((9, 5 * 128 + 8), float("nan"), dtype=torch.bfloat16)
    fused[:, 3 * 128 + 8 : 4 * 128 + 8] = keys
    slots = [128 + 127, 0, 5, 383, 256, -1, 384, 130, 17]
    for name, writer, device in writers(executor):
        cache, raw = stored(layout, 3, 32768, device)
        before = image(raw)
        writer(layout, cache, fused.to(device)[:, 392:520], torch.tensor(slots, device=device))
        assert image(raw) == expected_bytes(layout, before, 32768, slots, codes, scales, 0), name


@pytest.mark.parametrize("dtype", TOKEN_BYTES)
def test_nothing_to_store_writes_nothing(executor: Any, dtype: str) -> None:
    layout = blockpick.CacheLayout(dtype)
    keys = encoded(dtype, 33)[0].to(executor.device)
    for tokens in (0, 1, 33):
        cache, raw = stored(layout, 1, None, executor.device)
        slots = torch.full((tokens,), -1, device=executor.device)
        executor.insert(layout, cache, keys[:tokens], slots)
        assert set(image(raw)) == {SENTINEL}


# ---- bf16 and e4m3fn ----


def test_bf16_keeps_every_bit_pattern(executor: Any) -> None:
    keys = all_bf16()
    for name, writer, device in writers(executor):
        got = torch.from_numpy(write(writer, device, "bf16", keys)[0].copy()).view(torch.bfloat16)
        number = ~keys.isnan()
        assert torch.equal(got.view(torch.int16)[number], keys.view(torch.int16)[number]), name
        assert torch.equal(got.isnan(), keys.isnan()), name


def test_e4m3fn_of_every_bf16(any_executor: Any) -> None:
    for name, writer, device in writers(any_executor):
        got = write(writer, device, "e4m3fn", all_bf16())[0].reshape(-1)
        wrong = np.flatnonzero(got != e4m3_of_all_bf16())
        first = [(hex(w), hex(got[w]), hex(e4m3_of_all_bf16()[w])) for w in wrong[:5]]
        assert not len(wrong), f"{name}: {len(wrong)} differ; bf16, got, wanted: {first}"


@pytest.mark.parametrize(
    ("value", "byte"),
    [
        (0.0, 0x00), (-0.0, 0x80), (448.0, 0x7E), (449.0, 0x7E), (464.0, 0x7E), (480.0, 0x7E), (1e30, 0x7E), (math.inf, 0x7E),
        (-448.0, 0xFE), (-1e30, 0xFE), (-math.inf, 0xFE), (math.nan, 0x7F), (-math.nan, 0x7F), (2**-9, 0x01), (2**-6, 0x08),
        (7 * 2**-9, 0x07), (2**-10, 0x00), (3 * 2**-10, 0x02), (5 * 2**-10, 0x02), (-(2**-10), 0x80), (1e-30, 0x00),
        (2**-10 * 1.0078125, 0x01), (1.0, 0x38), (1.0625, 0x38), (1.1875, 0x3A), (436.0, 0x7E), (432.0, 0x7E), (430.0, 0x7D),
    ],
)  # fmt: skip
def test_e4m3fn_by_hand(executor: Any, value: float, byte: int) -> None:
    assert to_e4m3(value) == byte
    bits = torch.full((1, 128), value, dtype=torch.bfloat16)
    if math.isnan(value) and math.copysign(1, value) < 0:
        bits = torch.full((1, 128), -1, dtype=torch.int16).view(torch.bfloat16)
    for name, writer, device in writers(executor):
        assert set(write(writer, device, "e4m3fn", bits)[0].reshape(-1).tolist()) == {byte}, name
    assert int(e4m3_bytes(bits[0, :1])) == byte


# ---- nvfp4 ----


def test_nvfp4_special_groups_by_hand(any_executor: Any) -> None:
    """amax from the smallest to inf, and NaN: contract 1.7 and case 28."""
    inf, nan = math.inf, math.nan
    cases = {
        "16 x 0.004": ([0.004] * 16, 0x01, [4] * 16),
        "16 x -0.004": ([-0.004] * 16, 0x01, [12] * 16),
        "amax 1e-6": ([1e-6, -1e-6], 0x01, [0] * 16),
        "amax 0.00586": ([0.00586, -0.00586], 0x01, [5, 13] + [0] * 14),
        "amax 2688": ([2688.0, -2688.0, 448.0], 0x7E, [7, 15, 2] + [0] * 13),
        "amax 1e38": ([1e38, -1e38, 1e3], 0x7E, [7, 15, 4] + [0] * 13),
        "zeros": ([0.0] * 16, 0x01, [0] * 16),
        "-0": ([-0.0] * 16, 0x01, [0] * 16),
        "inf": ([inf, -inf, 448.0, 1.0], 0x7E, [7, 15, 2, 0] + [0] * 12),
        "NaN": ([6.0] * 15 + [nan], 0x7F, [0] * 16),
        "NaN and inf": ([inf, nan, -inf], 0x7F, [0] * 16),
        "all NaN": ([nan] * 16, 0x7F, [0] * 16),
        "bf16 subnormals": ([2.0**-133, -(2.0**-130)], 0x01, [0] * 16),
        "negative underflow": ([6.0, -0.2, -0.25, -1e-30], 0x38, [7] + [0] * 15),
        "least code": ([2.0**-10, 2.0**-11, -(2.0**-10)], 0x01, [1, 0, 9] + [0] * 13),
    }
    for name, writer, device in writers(any_executor):
        got = groups(writer, device, [values for values, _, _ in cases.values()])
        for (label, (_, scale, codes)), (got_scale, got_codes) in zip(cases.items(), got, strict=True):
            assert (got_scale, got_codes) == (scale, codes), f"{name}: {label}"


def test_nan_spoils_its_own_group_only(executor: Any) -> None:
    values = [[6.0] * 16 for _ in range(8)]
    values[3][7] = math.nan
    for name, writer, device in writers(executor):
        got = groups(writer, device, values)
        assert got == [(0x7F, [0] * 16) if j == 3 else (0x38, [7] * 16) for j in range(8)], name


def test_nvfp4_midpoints_go_to_even_under_every_scale(executor: Any) -> None:
    """x = midpoint * s is exact in bf16, so a product with 1/s instead of a division shows; both signs."""
    middle = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    codes = [0, 2, 2, 4, 4, 6, 6]
    values = [[6 * s, *(m * s for m in middle), *(-m * s for m in middle)] for s in E4M3[1:]]
    wanted = [7, *codes, *(c + 8 if c else 0 for c in codes), 0]
    for name, writer, device in writers(executor):
        got = groups(writer, device, values)
        for scale, (got_scale, got_codes) in enumerate(got, 1):
            assert (got_scale, got_codes) == (scale, wanted), f"{name}: scale byte {scale:#x} = {E4M3[scale]}"


def test_nvfp4_neighbours_of_midpoints_round_away_from_them(executor: Any) -> None:
    """One bf16 step below and above every midpoint, under scale 1."""
    values, wanted = [], []
    for m, low, high in ((0.25, 0, 1), (0.75, 1, 2), (1.25, 2, 3), (1.75, 3, 4), (2.5, 4, 5), (3.5, 5, 6), (5.0, 6, 7)):
        step = 2.0 ** (math.floor(math.log2(m)) - 7)
        under = m - (step / 2 if m == 0.25 else step)  # 0.25 is a power of two: steps below are half as long
        values.append([6.0, under, m + step, -under, -m - step])
        wanted.append((0x38, [7, low, high, low + 8 if low else 0, high + 8] + [0] * 11))
    for name, writer, device in writers(executor):
        assert groups(writer, device, values) == wanted, name


def test_nvfp4_scale_is_nearest_even_for_every_positive_bf16_amax(executor: Any) -> None:
    """s = E4M3_RN(clamp(amax / 6, 2^-9, 448)) over all finite amax from 2^-12 to 2^13, exact in float64 arithmetic."""
    bits = torch.arange((127 - 12) << 7, (127 + 13) << 7, dtype=torch.int32).to(torch.int16)
    amax = bits.view(torch.bfloat16).double().tolist()
    wanted = [to_e4m3(min(max(a / 6, 2.0**-9), 448.0)) for a in amax]
    for name, writer, device in writers(executor):
        got = [scale for scale, _ in groups(writer, device, [[0.0, -a] for a in amax])]
        wrong = [(a, g, w) for a, g, w in zip(amax, got, wanted, strict=True) if g != w]
        assert not wrong, f"{name}: (amax, got, wanted) {wrong[:5]}"


# ---- int64 offsets ----


@pytest.mark.parametrize(("dtype", "pages"), [("nvfp4", (2065, 2066, 4130)), ("e4m3fn", (2065, 2066, 4130))])
def test_offsets_past_two_and_four_gib(executor: Any, dtype: str, pages: tuple[int, ...]) -> None:
    """Page stride 1,039,680 bytes: page 2066 starts past 2^31. The allocation is never touched elsewhere."""
    stride = 1_039_680
    layout = blockpick.CacheLayout(dtype)
    raw = torch.empty(4131 * stride, dtype=torch.uint8, device=executor.device)
    cache = torch.as_strided(raw.view(layout.torch_dtype), layout.shape(4131), (stride, layout.row_elements, 1))
    keys, codes, scales = encoded(dtype, len(pages))
    for page in pages:
        raw[page * stride : page * stride + layout.page_bytes + 64] = SENTINEL
        wrapped = (page * stride) % 2**31
        raw[wrapped : wrapped + layout.page_bytes] = SENTINEL
    slots = torch.tensor([page * 128 + 77 for page in pages], device=executor.device)
    executor.insert(layout, cache, keys.to(executor.device), slots)
    for j, page in enumerate(pages):
        got = image(raw[page * stride : page * stride + layout.page_bytes + 64])
        assert got == expected_bytes(layout, bytes([SENTINEL]) * len(got), layout.page_bytes, [77], codes[j : j + 1],
                                     scales[j : j + 1], 0), f"page {page}"  # fmt: skip
        wrapped = (page * stride) % 2**31
        if page > 2065:
            assert set(image(raw[wrapped : wrapped + layout.page_bytes])) == {SENTINEL}, f"page {page} wrapped"


def test_case_16_more_tokens_than_a_grid_dimension_of_65535(one_executor: Any) -> None:
    """70,000 tokens in one call, to slots in random order; the expected cache is plain indexing."""
    layout = blockpick.CacheLayout("bf16", 256)
    tokens = 70_000
    generator = torch.Generator().manual_seed(16)
    keys = torch.randn(tokens, 128, generator=generator).bfloat16()
    pages = 300
    slots = torch.randperm(pages * 256, generator=generator)[:tokens]
    expected = torch.zeros(layout.shape(pages), dtype=torch.bfloat16)
    expected.view(-1, 128)[slots] = keys
    cache = torch.zeros_like(expected).to(one_executor.device)
    one_executor.insert(layout, cache, keys.to(one_executor.device), slots.to(one_executor.device))
    assert torch.equal(cache.cpu(), expected)

# SPDX-License-Identifier: Apache-2.0
"""Faults that users of such indexers reported about caches, pages and number formats; test names carry the case."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fault_cases import DTYPES, INF, NAN, SENTINEL, Run, best, integers, maxima, place, queries

import blockpick
import blockpick.plan
from blockpick.testing.reference import insert_reference

# ---- 6, 8, 15, 24, 28: the cache ----


@pytest.mark.parametrize("dtype", ["e4m3fn", "nvfp4"])
def test_case_6_quantised_cache_scores_like_bf16_of_its_values(any_executor: Any, dtype: str) -> None:
    """Inserted on the executor, then decoded next to a bf16 cache of the dequantised values: equal bits and ids."""
    values = integers((20 * 128 + 5, 128), 4)
    values[:, ::16] = 2  # every NVFP4 group has amax 2: scale 0.34375, which is not 1/3
    page = torch.arange(21).int()[None]
    q = integers((1, 2, 128), 5)
    results = []
    for which in (dtype, "bf16"):
        layout = blockpick.CacheLayout(which)
        cache = layout.empty(21, any_executor.device).fill_(0x7F if which == "nvfp4" else NAN)
        keys = values
        if dtype == "nvfp4":  # 2 / 0.34375 = 5.8 -> 6, 1 / 0.34375 = 2.9 -> 3
            keys = values if which == "nvfp4" else values.sign() * 0.34375 * torch.where(values.abs() == 2, 6, 3)
        slots = torch.arange(len(keys), device=any_executor.device)
        any_executor.insert(layout, cache, keys.bfloat16().to(any_executor.device), slots)
        rounding = {"nvfp4_rounding": "exact"} if which == "nvfp4" else {}
        run = Run(any_executor, layout, page, num_heads=2, **rounding)
        results.append((run(cache, [len(keys)], queries(q, which)), run.scores()[0, 0, :, :21]))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stale", [6.0, -6.0, INF, NAN])
@pytest.mark.parametrize("page_size", [128, 256])
def test_case_8_stale_rows_and_pages_stay_out_of_the_maximum(
    executor: Any, dtype: str, stale: float, page_size: int
) -> None:
    """S = 3000: rows behind the end of the last page and the pages behind it hold garbage."""
    layout = blockpick.CacheLayout(dtype, page_size)
    pages = 24 * 128 // page_size
    keys = torch.ones(24 * 128, 128)
    keys += (torch.arange(24) % 3).repeat_interleave(128)[:, None]  # block 23 scores 3 x 128 like 2, 5, 8 ...
    keys[3000:] = stale
    cache, table = place(layout, [keys, torch.full((page_size, 128), stale)], extra=3)
    table[0, pages:] = table[1, 0]
    run = Run(executor, layout, table[:1], local_blocks=0)
    ids = run(cache, [3000], queries(torch.ones(1, 1, 128), dtype))
    twos = list(range(2, 24, 3))
    assert ids[0][0] == [*twos, *range(1, 24, 3)][:16]
    keys[:3000] *= torch.where(torch.arange(3000) < 23 * 128, 1.0, 0.5)[:, None]  # 1.5 in block 23: between 1 and 2
    cache, table = place(layout, [keys])
    ids = Run(executor, layout, table, local_blocks=0, topk=17)(cache, [3000], queries(torch.ones(1, 1, 128), dtype))
    assert ids[0][0] == [*range(2, 23, 3), *range(1, 23, 3), 23, 0]


@pytest.mark.parametrize("page_size", [128, 256])
def test_case_8_table_narrower_than_the_length(executor: Any, page_size: int) -> None:
    """Table width 4, S = 1000: p is clamped; what lies behind the table's last column is another request's."""
    layout = blockpick.CacheLayout("bf16", page_size)
    keys = integers((4 * page_size, 128))
    cache, table = place(layout, [keys, keys * 50], extra=0)
    q = integers((2, 1, 128), 1).bfloat16()
    ids = Run(executor, layout, table)(cache, [4 * page_size + 500, 1], q)
    assert ids[0][0] == best(maxima(keys, q[0, 0].float(), 4 * page_size - 1))


@pytest.mark.parametrize("page_size", [128, 256])
def test_garbage_page_ids_inside_the_visible_part_are_clamped_into_the_pool(executor: Any, page_size: int) -> None:
    """Section 1.2: -7 reads page 0, 2^31 - 1 and N read page N - 1; nothing faults."""
    layout = blockpick.CacheLayout("bf16", page_size)
    cache = torch.zeros(5, page_size, 128)
    cache[:, :, 0] = torch.tensor([10.0, 20, 30, 40, 50])[:, None]
    table = torch.tensor([[2, -7, 2**31 - 1, 5, -(2**31), 2**30 + 1, 1]], dtype=torch.int32)
    run = Run(executor, layout, table, topk=64, local_blocks=0)
    q = torch.zeros(1, 1, 128)
    q[..., 0] = 1
    ids = run(cache.bfloat16(), [7 * page_size], q.bfloat16())
    per_page = [30, 10, 50, 50, 10, 50, 20]
    scores = [float(s) for s in per_page for _ in range(page_size // 128)]
    assert ids[0][0] == best(scores, 64, local_blocks=0)


@pytest.mark.parametrize(("dtype", "stride"), [("nvfp4", 1_039_680), ("e4m3fn", 1_039_680), ("bf16", 2 * 1_039_680)])
def test_case_15_page_offsets_past_two_and_four_gib(executor: Any, dtype: str, stride: int) -> None:
    """Page stride 1,039,680 elements, pages 2065, 2066, 4130 of one large view that is touched nowhere else."""
    layout = blockpick.CacheLayout(dtype)
    raw = torch.empty(4131 * stride, dtype=torch.uint8, device=executor.device)
    typed = raw.view(layout.torch_dtype)
    cache = torch.as_strided(typed, layout.shape(4131), (stride // typed.element_size(), layout.row_elements, 1))
    table = torch.tensor([[2066, 0, 4130, 2065]], dtype=torch.int32)
    keys = integers((4 * 128, 128))
    keys[:, ::16] = 2
    for j, page in enumerate(table[0].tolist()):
        slots = page * 128 + torch.arange(128)
        part = keys[j * 128 : (j + 1) * 128].bfloat16()
        executor.insert(layout, cache, part.to(executor.device), slots.to(executor.device))
    q = queries(integers((1, 1, 128), 2), dtype)
    rounding = {"nvfp4_rounding": "exact"} if dtype == "nvfp4" else {}
    run = Run(executor, layout, table, local_blocks=0, topk=4, **rounding)
    lens = torch.tensor([512], dtype=torch.int32, device=executor.device)
    run.out = torch.full((1, 1, 4), SENTINEL, dtype=torch.int32, device=executor.device)
    run.plan = run.indexer.plan_decode(run.table, lens, query_len=1)
    ids = run.again(cache, q.to(executor.device))
    step = torch.where(keys.abs() == 2, 6, 3) * keys.sign() * 0.34375 if dtype == "nvfp4" else keys
    expected = maxima(step, q[0, 0].float(), 511)
    assert run.scores()[0, 0, 0, :4].tolist() == expected  # small multiples of 2^-5: every partial sum is exact
    assert ids == [[best(expected, 4, local_blocks=0)]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_24_page_stride_is_read_from_the_tensor(executor: Any, dtype: str) -> None:
    """One indexer and one plan over caches of two page strides; a stale stride reads poison."""
    layout = blockpick.CacheLayout(dtype)
    keys = integers((18 * 128, 128))
    keys[:, ::16] = 2
    dense, table = place(layout, [keys])
    run = Run(executor, layout, table)
    q = queries(integers((1, 1, 128), 1), dtype)
    first = run(dense, [len(keys)], q)
    padded = torch.full((len(dense) * 49152,), 0x7F, dtype=torch.uint8).view(layout.torch_dtype)
    stride = 49152 // dense.element_size()
    view = torch.as_strided(padded, dense.shape, (stride, layout.row_elements, 1))
    view.copy_(dense)
    view = torch.as_strided(padded.to(executor.device), dense.shape, (stride, layout.row_elements, 1))
    assert run.again(view, q.to(executor.device)) == first
    assert run.again(dense.to(executor.device), q.to(executor.device)) == first


@pytest.mark.parametrize("rows", [16, 32, 64, 192, 512])
def test_case_24_pages_of_another_size_are_refused(executor: Any, rows: int) -> None:
    with pytest.raises(blockpick.UnsupportedConfigError, match=rf"page_size={rows}\b.*128.*256"):
        blockpick.CacheLayout("nvfp4", rows)
    layout = blockpick.CacheLayout("nvfp4", 128)
    run = Run(executor, layout, torch.zeros(1, 4, dtype=torch.int32))
    cache = torch.zeros(8, rows, 72, dtype=torch.uint8)
    with pytest.raises(ValueError, match=rf"^cache: .*128.*{rows}"):
        run(cache, [300], queries(torch.ones(1, 1, 128), "nvfp4"))
    assert bool((run.out == SENTINEL).all())


@pytest.mark.parametrize("amax", [1e-6, 0.004, 0.00586, 2688.0, 1e38, 0.0, INF])
def test_case_28_groups_of_any_size_score_finitely(executor: Any, amax: float) -> None:
    """The score of one token whose first group holds ``amax``: code 6, 2, 3 ... times the scale, never inf or NaN."""
    layout = blockpick.CacheLayout("nvfp4")
    value = {1e-6: 0.0, 0.004: 2 * 2**-9, 0.00586: 3 * 2**-9, 2688.0: 2688.0, 1e38: 2688.0, 0.0: 0.0, INF: 2688.0}[amax]
    cache = torch.zeros(layout.shape(1), dtype=torch.uint8, device=executor.device)
    keys = torch.zeros(1, 128)
    keys[0, :16] = amax
    executor.insert(layout, cache, keys.bfloat16().to(executor.device), torch.tensor([0], device=executor.device))
    run = Run(executor, layout, torch.zeros(1, 1, dtype=torch.int32), nvfp4_rounding="exact", local_blocks=0)
    ids = run(cache, [1], queries(torch.ones(1, 1, 128), "nvfp4"))
    assert ids[0][0] == [0] + [-1] * 15
    assert run.scores()[0, 0, 0, 0].item() == 16 * value


@pytest.mark.parametrize("rounding", ["exact", "e4m3", None])
def test_case_28_rounding_of_code_times_scale(arch_executor: Any, rounding: str | None) -> None:
    """6 * 448 saturates at 448 with e4m3; 1.5 * 1.125 = 1.6875 is a tie to 1.75 -> even 1.75; 3 * 1.875 -> 5.5 or 5.625."""
    layout = blockpick.CacheLayout("nvfp4")
    cases = [  # (scale, code, exact, e4m3)
        (0x7E, 7, 2688.0, 448.0), (0x7E, 15, -2688.0, -448.0), (0x39, 3, 1.6875, 1.75), (0x3F, 5, 5.625, 5.5),
        (0x3B, 3, 2.0625, 2.0), (0x3D, 3, 2.4375, 2.5), (0x01, 1, 2**-10, 0.0), (0x03, 1, 3 * 2**-10, 2**-8), (0x38, 7, 6, 6),
    ]  # fmt: skip
    cache = torch.zeros(len(cases), 128 * 72, dtype=torch.uint8)
    for page, (scale, code, _, _) in enumerate(cases):
        cache[page, :8192] = code  # dims 0, 2, 4 ... of every token
        cache[page, 8192:] = scale
    run = Run(arch_executor, layout, torch.arange(len(cases)).int()[None], nvfp4_rounding=rounding, local_blocks=0)
    q = torch.zeros(1, 1, 128)
    q[..., 2] = 1
    run(cache.view(layout.shape(len(cases))), [len(cases) * 128], queries(q, "nvfp4"))
    arch = arch_executor.arch or blockpick.device.describe(torch.device(arch_executor.device)).arch
    used = rounding or ("e4m3" if arch in ("sm100", "sm103") else "exact")
    wanted = [case[3 if used == "e4m3" else 2] for case in cases]
    assert run.scores()[0, 0, 0, : len(cases)].tolist() == wanted


def test_case_23_e4m3fn_bytes_are_not_read_as_fnuz(any_executor: Any) -> None:
    """All 254 numbers of e4m3fn as keys, and as queries: 0x80 is -0, 0x7E is 448; 0x7F and 0xFF are NaN."""
    layout = blockpick.CacheLayout("e4m3fn")
    values = [m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:127] + [NAN]
    values += [-v for v in values]
    cache = torch.zeros(256, 128, 128, dtype=torch.uint8)
    cache[:, :, 3] = torch.arange(256)[:, None]
    q = torch.zeros(1, 1, 128)
    q[..., 3] = 1
    run = Run(any_executor, layout, torch.arange(256).int()[None])
    run(cache.view(torch.float8_e4m3fn), [256 * 128], queries(q, "e4m3fn"))
    got = run.scores()[0, 0, 0, :256]
    wanted = torch.tensor(values)
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.nan_to_num(0.0), wanted.nan_to_num(0.0))
    for byte in (0x80, 0x7E, 0xFE, 0x01, 0x7F):  # the same bytes in q against keys of 1
        ones = torch.zeros(1, 128, 128, dtype=torch.uint8)
        ones[:, :, 3] = 0x38
        probe = torch.zeros(1, 1, 128, dtype=torch.uint8)
        probe[..., 3] = byte
        run(ones.view(torch.float8_e4m3fn), [128], probe.view(torch.float8_e4m3fn))
        score = run.scores()[0, 0, 0, 0].item()
        assert score == values[byte] or (math.isnan(score) and byte == 0x7F), hex(byte)


@pytest.mark.parametrize("dtype", ["e4m3fn", "nvfp4"])
@pytest.mark.parametrize("where", ["q", "cache"])
def test_nan_bytes_make_the_score_nan(any_executor: Any, dtype: str, where: str) -> None:
    """0x7F in q, in an e4m3fn key, or as an NVFP4 scale; block 1 only when it is in the cache."""
    layout = blockpick.CacheLayout(dtype)
    keys = torch.full((2 * 128, 128), 6.0)
    cache, _ = place(layout, [keys])
    cache = cache[:2].clone()
    insert_reference(layout, cache, keys.bfloat16(), torch.arange(256))
    q = torch.ones(1, 1, 128)
    if where == "q":
        q[..., 77] = NAN
    elif dtype == "nvfp4":
        cache.view(2, -1)[1, 8192 + 4 :: 8] = 0x7F
    else:
        cache[1, :, 77] = NAN
    run = Run(any_executor, layout, torch.arange(2).int()[None], local_blocks=0, topk=2)
    ids = run(cache, [256], queries(q, dtype))
    assert run.scores()[0, 0, 0, :2].isnan().tolist() == [where == "q", True]
    assert ids == [[[0, 1]]]

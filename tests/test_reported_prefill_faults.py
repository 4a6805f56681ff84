# SPDX-License-Identifier: Apache-2.0
"""Faults that users of such indexers reported, for prefill, steps and the fused insert; test names carry the case."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fault_cases import DTYPES, INF, NAN, SENTINEL, best, guarded, intact, integers, maxima, place, queries
from fused_cases import PAGES, rows, run

import blockpick
from blockpick.testing.cases import SENTINEL as UNTOUCHED
from blockpick.testing.prefill_cases import PrefillCase, build_prefill

FUSED_TENSORS = ("slot_mapping", "positions", "cos_sin", "q_weight", "k_weight")


def options_of(dtype: str) -> dict[str, Any]:
    return {"nvfp4_rounding": "exact"} if dtype == "nvfp4" else {"prefill_numerics": "strict"}


def prefill(
    executor: Any, layout: blockpick.CacheLayout, cache: torch.Tensor, table: torch.Tensor,
    requests: list[tuple[int, int]], q: torch.Tensor, **options: Any,
) -> list[Any]:  # fmt: skip
    """Ids [T][topk] of head 0 of a prefill of (query_len, seq_len) requests."""
    device, topk = executor.device, options.get("topk", 16)
    indexer = executor.indexer(
        layout, max_requests=len(requests), max_seq_len=table.shape[1] * layout.page_size, max_prefill_tokens=len(q),
        **{**options_of(layout.dtype), **options},
    )  # fmt: skip
    starts = torch.tensor([0, *(n for n, _ in requests)]).cumsum(0).int().to(device)
    lens = torch.tensor([n for _, n in requests], dtype=torch.int32, device=device)
    out = torch.full((len(q), 1, topk), SENTINEL, dtype=torch.int32, device=device)
    plan = indexer.plan_prefill(starts, lens, table.to(device), num_tokens=len(q))
    indexer.prefill(plan, q.to(device), cache.to(device), out)
    return out[:, 0].tolist()


@pytest.mark.parametrize("kind", ["prefill", "step"])
def test_case_3_and_25_padded_batches_stay_inside_their_scratch(executor, monkeypatch, kind):
    """Rows and requests of padding, two replays, 4 KiB of guard behind every buffer, scores in several passes."""
    guards = guarded(monkeypatch)
    case = PrefillCase("padded", "e4m3fn", ((2, 300), (2, 129), (65, 64), (0, 0), (0, 0)), num_heads=4, topk=2,
                       data="integer", padding=10, workspace_bytes=256 * 32 * 4)  # fmt: skip
    batch = build_prefill(case).to(executor.device)
    indexer = executor.indexer(case.layout(), **{**case.options(), "max_query_len": 2})
    tokens = case.num_tokens
    if kind == "step":
        plan = indexer.plan_step(batch.cu_seqlens_q.cpu(), batch.seq_lens, batch.block_table, num_tokens=tokens)
        call = indexer.pick
    else:
        plan = indexer.plan_prefill(batch.cu_seqlens_q, batch.seq_lens, batch.block_table, num_tokens=tokens)
        call = indexer.prefill
    outs = [call(plan, batch.q, batch.cache, torch.full_like(batch.out, UNTOUCHED)) for _ in range(2)]
    intact(guards)
    assert torch.equal(*outs)
    assert bool((outs[0][-10:] == UNTOUCHED).all()) and bool((outs[0][:-10] != UNTOUCHED).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stale", [6.0, INF, NAN])
def test_case_8_stale_rows_and_pages_stay_out_of_the_maximum(executor, dtype, stale):
    """S = 3000 with three queries: rows behind the end of the last page, and pages behind it, hold garbage."""
    layout = blockpick.CacheLayout(dtype)
    keys = torch.ones(24 * 128, 128)
    keys += (torch.arange(24) % 3).repeat_interleave(128)[:, None]
    keys[3000:] = stale
    cache, table = place(layout, [keys, torch.full((128, 128), stale)], extra=3)
    table[0, 24:] = table[1, 0]
    ids = prefill(
        executor, layout, cache, table[:1], [(3, 3000)], queries(torch.ones(3, 1, 128), dtype), local_blocks=0
    )
    assert ids == [[*range(2, 24, 3), *range(1, 24, 3)][:16]] * 3


def test_case_8_table_narrower_than_the_length(executor):
    """Table width 4, S = 1000: positions are clamped; what lies behind the table's last column is another request's."""
    layout = blockpick.CacheLayout("bf16")
    keys = integers((4 * 128, 128))
    cache, table = place(layout, [keys, keys * 50], extra=0)
    q = integers((3, 1, 128), 1)
    ids = prefill(executor, layout, cache, table, [(2, 1000), (1, 1)], q.bfloat16())
    assert ids[:2] == [best(maxima(keys, q[t, 0], 511)) for t in range(2)]


@pytest.mark.parametrize("dtype", ["bf16", "nvfp4"])
def test_case_14_all_lengths_zero(executor, monkeypatch, dtype):
    """A dummy run of queries without a token, between two real batches whose scores and plans lie there."""
    guards = guarded(monkeypatch)
    layout, device = blockpick.CacheLayout(dtype), executor.device
    indexer = executor.indexer(
        layout, topk=4, max_requests=4, max_seq_len=768, max_prefill_tokens=8, empty_row="block_zero",
        **options_of(dtype),
    )  # fmt: skip
    cache = layout.empty(6, device)
    cache.view(torch.uint8).fill_(0x11)
    table = torch.arange(6, dtype=torch.int32, device=device).repeat(4, 1)
    starts = torch.arange(0, 9, 2, dtype=torch.int32, device=device)
    q = queries(torch.ones(8, 1, 128), dtype).to(device)
    for lens, first in ((700, 5), (0, 0), (700, 5)):
        lengths = torch.full((4,), lens, dtype=torch.int32, device=device)
        out = torch.full((8, 1, 4), SENTINEL, dtype=torch.int32, device=device)
        indexer.prefill(indexer.plan_prefill(starts, lengths, table, num_tokens=8), q, cache, out)
        assert out[:, 0, 0].tolist() == [first] * 8
        assert bool((out[:, 0, 1:] == -1).all()) == (lens == 0)
        step = indexer.plan_step([0, 1, 1, 1, 1], lengths, table, num_tokens=4)  # of a captured batch
        indexer.pick(step, q[:4], cache, out[:4].fill_(SENTINEL))
        assert out[:4, 0, 0].tolist() == [first] * 4
    intact(guards)


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_14_tokens_without_a_slot_store_nothing(executor, dtype):
    """The fused insert of a dummy run: queries for every token, not one byte of the cache."""
    call = rows(20, 1, executor.device)
    call["slot_mapping"].fill_(-1)
    cache, q = run(executor, blockpick.CacheLayout(dtype), call, 1)
    assert cache.view(torch.uint8).unique().tolist() == [0xA5]
    assert not q.float().isnan().any()


@pytest.mark.parametrize(("dtype", "stride"), [("nvfp4", 1_039_680), ("e4m3fn", 1_039_680), ("bf16", 2 * 1_039_680)])
def test_case_15_page_offsets_past_two_and_four_gib(executor, dtype, stride):
    """The fused insert stores into, and prefill reads, pages 2065, 2066 and 4130 of one large view."""
    layout, device = blockpick.CacheLayout(dtype), executor.device
    typed = torch.empty(4131 * stride, dtype=torch.uint8, device=device).view(layout.torch_dtype)
    far = torch.as_strided(typed, layout.shape(4131), (stride // typed.element_size(), layout.row_elements, 1))
    near = layout.empty(3, device)
    call = rows(48, 1, device, seed=4)
    token, pages, q = torch.arange(48, device=device), torch.tensor([2065, 2066, 4130], device=device), None
    for cache, places in ((near, torch.arange(3, device=device)), (far, pages)):
        cache[places] = torch.zeros(3, *cache.shape[1:], dtype=torch.uint8, device=device).to(cache.dtype)
        call["slot_mapping"] = places[token % 3] * 128 + token // 3
        q = torch.empty(48, 1, 128, dtype=torch.bfloat16, device=device).to(layout.query_dtype)
        arguments = [call[name] for name in FUSED_TENSORS]
        columns = {name: call[name] for name in ("q_column", "k_column", "eps")}
        executor.fused_insert(layout, cache, call["qkv"], q, *arguments, **columns)
    assert torch.equal(far[pages].contiguous().view(torch.uint8), near.view(torch.uint8))
    indexer = executor.indexer(
        layout, topk=3, local_blocks=0, max_requests=1, max_seq_len=384, max_prefill_tokens=4, **options_of(dtype)
    )
    metadata = [torch.tensor(v, dtype=torch.int32, device=device) for v in ([0, 4], [384])]
    ids = []
    for cache, places in ((near, [0, 1, 2]), (far, [2065, 2066, 4130])):
        table = torch.tensor([places], dtype=torch.int32, device=device)
        out = torch.full((4, 1, 3), SENTINEL, dtype=torch.int32, device=device)
        plan = indexer.plan_prefill(*metadata, table, num_tokens=4)
        ids.append(indexer.prefill(plan, q[:4], cache, out))
    assert torch.equal(*ids)


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_24_page_stride_is_read_from_the_tensor(executor, dtype):
    """One plan and one bound insert over caches of two page strides; a stale stride reads poison or writes it."""
    layout, device = blockpick.CacheLayout(dtype), executor.device
    case = PrefillCase("stride", dtype, ((3, 2290), (2, 130)), data="integer", **prefill_options(dtype))
    batch = build_prefill(case).to(device)
    indexer = executor.indexer(layout, **case.options())
    plan = indexer.plan_prefill(batch.cu_seqlens_q, batch.seq_lens, batch.block_table, num_tokens=5)
    wide = torch.full((len(batch.cache) * 49152,), 0x7F, dtype=torch.uint8, device=device).view(layout.torch_dtype)
    padded = torch.as_strided(wide, batch.cache.shape, (49152 // wide.element_size(), layout.row_elements, 1))
    padded.copy_(batch.cache)
    outs = [
        indexer.prefill(plan, batch.q, cache, torch.full_like(batch.out, SENTINEL))
        for cache in (batch.cache, padded, batch.cache)
    ]
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])

    call, stored = rows(20, 1, device, seed=6), []
    for stride in (layout.page_bytes, 49152, layout.page_bytes):
        whole = torch.full((PAGES, stride), 0xA5, dtype=torch.uint8, device=device)
        cache = torch.as_strided(
            whole.view(layout.torch_dtype), layout.shape(PAGES),
            (stride // layout.torch_dtype.itemsize, layout.row_elements, 1),
        )  # fmt: skip
        q = torch.empty(20, 1, 128, dtype=torch.bfloat16, device=device).to(layout.query_dtype)
        columns = {name: call[name] for name in ("q_column", "k_column", "eps")}
        executor.fused_insert(layout, cache, call["qkv"], q, *(call[name] for name in FUSED_TENSORS), **columns)
        stored.append(whole[:, : layout.page_bytes].cpu())
        assert bool((whole[:, layout.page_bytes :] == 0xA5).all()), "written between the pages"
    assert torch.equal(stored[0], stored[1]) and torch.equal(stored[0], stored[2])


def prefill_options(dtype: str) -> dict[str, Any]:
    return {"rounding": "exact"} if dtype == "nvfp4" else {"numerics": "strict"}


@pytest.mark.parametrize("rows_of_page", [16, 64, 256])
def test_case_24_pages_of_another_size_are_refused(executor, rows_of_page):
    """By prefill, by a step, and by the fused insert, before anything is written."""
    layout, device = blockpick.CacheLayout("nvfp4"), executor.device
    indexer = executor.indexer(layout, max_requests=1, max_seq_len=512, max_prefill_tokens=9)
    cache = torch.full((8, rows_of_page, 72), 0xA5, dtype=torch.uint8, device=device)
    table, lens = (
        torch.zeros(1, 4, dtype=torch.int32, device=device),
        torch.tensor([300], dtype=torch.int32, device=device),
    )
    starts = torch.tensor([0, 9], dtype=torch.int32, device=device)
    q = queries(torch.ones(9, 1, 128), "nvfp4").to(device)
    out = torch.full((9, 1, 16), SENTINEL, dtype=torch.int32, device=device)
    call = rows(9, 1, device)
    columns = {name: call[name] for name in ("q_column", "k_column", "eps")}
    plan = indexer.plan_prefill(starts, lens, table, num_tokens=9)
    calls = [
        lambda: indexer.prefill(plan, q, cache, out),
        lambda: indexer.pick(indexer.plan_step([0, 9], lens, table), q, cache, out),
        lambda: executor.fused_insert(layout, cache, call["qkv"], q, *(call[n] for n in FUSED_TENSORS), **columns),
    ]
    for refused in calls:
        with pytest.raises(ValueError, match=rf"^cache: .*128.*{rows_of_page}"):
            refused()
    assert out.unique().tolist() == [SENTINEL] and cache.unique().tolist() == [0xA5]
    assert math.prod(q.shape) == int((q.float() == 1).sum()), "queries are only read"

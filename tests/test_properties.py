# SPDX-License-Identifier: Apache-2.0
"""Random batches, invariances of a request's result, and properties of the oracle."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import blockpick
from blockpick.testing.cases import DecodeCase, run_case
from blockpick.testing.reference import block_scores, dequantise, insert_reference, query_positions, select_blocks

few = settings(max_examples=8, deadline=None, derandomize=True, database=None)
many = settings(max_examples=300, deadline=None, derandomize=True, database=None)


@st.composite
def cases(draw: st.DrawFn, dtype: str) -> DecodeCase:
    """A small batch with any legal options."""
    query_len = draw(st.integers(1, 8))
    heads = draw(st.sampled_from([1, 2, 4]))
    edges = st.sampled_from([0, 1, query_len - 1, 127, 128, 129, 255, 256, 257, 16 * 128, 17 * 128, 17 * 128 + 1])
    lens = draw(st.lists(edges | st.integers(0, 22 * 128), min_size=1, max_size=2))
    topk = draw(st.sampled_from([1, 2, 15, 16, 17, 33, 64]))
    order = draw(st.sampled_from(["score", "local_last", "ascending"]))
    local = 1 if order == "local_last" else draw(st.integers(0, min(topk, 3)))
    init = 0 if order == "local_last" else draw(st.integers(0, min(topk - local, 3)))
    return DecodeCase(
        "random", dtype, tuple(lens), draw(st.sampled_from([128, 256])), heads, query_len, topk, init, local, order,
        draw(st.sampled_from(["thk", "htk"])), draw(st.sampled_from(["minus_one", "block_zero"])),
        draw(st.sampled_from([None, "exact", "e4m3"])) if dtype == "nvfp4" else None,
        draw(st.sampled_from(["integer", "normal", "special"])),
        draw(st.integers(0, 3)) if max(lens) else 1, draw(st.sampled_from([0, 16, 4096])), draw(st.integers(0, 2**31 - 1)),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["bf16", "e4m3fn", "nvfp4"])
def test_random_batches_obey_the_contract(executor: Any, dtype: str) -> None:
    @few
    @given(cases(dtype))
    def check(case: DecodeCase) -> None:
        run_case(case, executor.indexer, executor.device)

    check()


# ---- a request's result depends on the request alone ----


def integers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def decode(executor: Any, dtype: str, keys: list[torch.Tensor], q: torch.Tensor, *, query_len: int = 1, page_size: int = 128,
           seed: int = 0, spare: int = 0, **options: Any) -> tuple[list[Any], list[torch.Tensor]]:  # fmt: skip
    """Ids [B][L][H][topk] and, per request, scores [L, H, visible blocks of the last query]."""
    layout = blockpick.CacheLayout(dtype, page_size)
    counts = [-(-len(k) // page_size) for k in keys]
    cache = layout.empty(sum(counts) + 1 + spare, "cpu").fill_(0x7F if dtype == "nvfp4" else math.nan)
    pages = torch.randperm(len(cache), generator=torch.Generator().manual_seed(seed))
    table = torch.full((len(keys), max(counts) + spare + 1), -1, dtype=torch.int32)
    for b, k in enumerate(keys):
        mine, pages = pages[: counts[b]], pages[counts[b] :]
        table[b, : counts[b]] = mine.int()
        token = torch.arange(len(k))
        insert_reference(layout, cache, k.bfloat16(), mine[token // page_size] * page_size + token % page_size)
    indexer = executor.indexer(
        layout, num_heads=q.shape[1], max_requests=len(keys) + spare, max_query_len=query_len + min(spare, 8 - query_len),
        max_seq_len=(table.shape[1] + spare) * page_size, **options,
    )  # fmt: skip
    device = executor.device
    lens = torch.tensor([len(k) for k in keys], dtype=torch.int32, device=device)
    plan = indexer.plan_decode(table.to(device), lens, query_len=query_len)
    out = torch.full((len(q), q.shape[1], options.get("topk", 16)), -77, dtype=torch.int32, device=device)
    indexer.decode(plan, q.to(layout.query_dtype).to(device), cache.to(device), out)
    scores = indexer.scores(plan).cpu()
    ids = out.view(len(keys), query_len, q.shape[1], -1).tolist()
    return ids, [scores[b, :, :, : -(-len(k) // 128)].clone() for b, k in enumerate(keys)]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


DTYPES = pytest.mark.parametrize("dtype", ["bf16", "e4m3fn", "nvfp4"])
LENGTH = 19 * 128 + 77


@DTYPES
def test_other_requests_of_the_batch_change_nothing(executor: Any, dtype: str) -> None:
    keys, q = integers(0, LENGTH, 128), integers(1, 1, 1, 128)
    alone = decode(executor, dtype, [keys], q)
    others = [integers(2, 30 * 128, 128), keys, integers(3, 5, 128), keys[:0]]
    crowd = torch.cat([integers(4, 1, 1, 128), q, integers(5, 2, 1, 128)])
    ids, scores = decode(executor, dtype, others, crowd, seed=3)
    assert ids[1] == alone[0][0]
    assert same_bits(scores[1], alone[1][0])


@DTYPES
def test_other_queries_and_heads_change_nothing(executor: Any, dtype: str) -> None:
    """The last query of L, and any head of H, equal the query alone."""
    keys, q = integers(6, LENGTH, 128), integers(7, 1, 1, 128)
    ids, scores = decode(executor, dtype, [keys], q)
    for query_len, heads, head in ((2, 1, 0), (8, 1, 0), (1, 2, 1), (1, 4, 3), (3, 4, 2)):
        wide = integers(8, query_len, heads, 128)
        wide[-1, head] = q[0, 0]
        more_ids, more_scores = decode(executor, dtype, [keys], wide, query_len=query_len)
        assert more_ids[0][-1][head] == ids[0][0][0], (query_len, heads)
        assert same_bits(more_scores[0][-1, head], scores[0][0, 0]), (query_len, heads)


@DTYPES
def test_page_size_page_order_and_maxima_change_nothing(executor: Any, dtype: str) -> None:
    keys, q = integers(9, LENGTH, 128), integers(10, 1, 2, 128)
    ids, scores = decode(executor, dtype, [keys], q)
    for options in ({"seed": 1}, {"page_size": 256}, {"page_size": 256, "seed": 2}, {"spare": 7}):
        other_ids, other_scores = decode(executor, dtype, [keys], q, **options)
        assert other_ids == ids, options
        assert same_bits(other_scores[0], scores[0]), options


@pytest.mark.parametrize("dtype", ["bf16"])
def test_order_and_topk_change_which_ids_only_as_they_say(executor: Any, dtype: str) -> None:
    """A smaller topk is a prefix; ascending is the sorted row; local_last moves the own block to the end."""
    keys, q = integers(11, LENGTH, 128), integers(12, 1, 1, 128)
    (((full,),),), _ = decode(executor, dtype, [keys], q, topk=20)
    assert sorted(full) == list(range(20))
    for topk in (1, 7, 16):
        (((row,),),), _ = decode(executor, dtype, [keys], q, topk=topk)
        (((up,),),), _ = decode(executor, dtype, [keys], q, topk=topk, order="ascending")
        (((last,),),), _ = decode(executor, dtype, [keys], q, topk=topk, order="local_last")
        assert row == full[:topk]
        assert up == sorted(row)
        assert last == row[1:] + row[:1]


# ---- the oracle ----

numbers = st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 1.0 + 2**-23, 3e38, -3e38, 2.0**-149])


@many
@given(st.data())
def test_reference_selection_is_the_total_order(data: st.DataObject) -> None:
    scores = data.draw(st.lists(numbers | st.floats(width=32), min_size=1, max_size=40))
    position = data.draw(st.integers(-3, len(scores) * 128 - 1))
    topk = data.draw(st.integers(1, 20))
    order = data.draw(st.sampled_from(["score", "ascending", "local_last"]))
    local = 1 if order == "local_last" else data.draw(st.integers(0, topk))
    init = 0 if order == "local_last" else data.draw(st.integers(0, topk - local))
    empty_row = data.draw(st.sampled_from(["minus_one", "block_zero"]))
    got = select_blocks(torch.tensor(scores), position, topk, init, local, order, empty_row)
    if position < 0:
        assert got == [-1 if empty_row == "minus_one" else 0] + [-1] * (topk - 1)
        return
    own = position // 128

    def rank(block: int) -> tuple[float, ...]:
        score = scores[block]
        if own - local < block <= own:
            return (1, 0, 0, block)
        if block < init:
            return (0, 0, 0, block)
        return (2, 1, 0, block) if math.isnan(score) else (2, 0, -score, block)

    want = sorted(range(own + 1), key=rank)[:topk]
    if order == "ascending" or (order == "local_last" and own + 1 <= topk):
        want.sort()
    elif order == "local_last":
        want.remove(own)
        want.append(own)
    assert got == want + [-1] * (topk - len(want))


@few
@given(st.integers(0, 400), st.integers(1, 8), st.sampled_from([128, 256]), st.integers(0, 2**31))
def test_reference_scores_are_the_maximum_over_visible_tokens(
    length: int, query_len: int, page_size: int, seed: int
) -> None:
    """Token by token in Python, with NaN and infinite tokens, and garbage behind the end."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(-3, 4, (512, 128), generator=generator).double()
    keys[torch.rand(512, generator=generator) < 0.3, 0] = math.nan
    keys[torch.rand(512, generator=generator) < 0.05, 1] = math.inf
    keys[:length][128:256, 0] = math.nan
    cache = keys.bfloat16().view(-1, page_size, 128)
    q = torch.randint(1, 3, (query_len, 1, 128), generator=generator).bfloat16()
    table = torch.arange(len(cache)).int()[None]
    scores = block_scores(
        blockpick.CacheLayout("bf16", page_size), cache, q, table, torch.tensor([length], dtype=torch.int32), query_len
    )
    assert scores.shape == (1, query_len, 1, 4)
    for i in range(query_len):
        position = length - query_len + i
        for block in range(position // 128 + 1 if position >= 0 else 0):
            tokens = range(block * 128, min(block * 128 + 128, position + 1))
            dots = [sum(a * b for a, b in zip(keys[t].tolist(), q[i, 0].tolist(), strict=True)) for t in tokens]
            numbers_only = [d for d in dots if d == d]
            got = float(scores[0, i, 0, block])
            assert got == max(numbers_only) if numbers_only else math.isnan(got), (i, block)


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 130, 511, 512, 513, 2**31 - 1])
def test_reference_positions_by_hand(length: int) -> None:
    got = query_positions(torch.tensor([length], dtype=torch.int32), 4, 512)[0].tolist()
    assert [p for p in got if p >= 0] == [min(length - 4 + i, 511) for i in range(4) if length - 4 + i >= 0]


def test_reference_dequantises_every_code_and_scale() -> None:
    """16 codes x 256 scales against the bit fields; 275 of the 1016 products of positive codes are inexact in e4m3."""
    e4m3 = [m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:127]
    e2m1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    layout = blockpick.CacheLayout("nvfp4")
    inexact = 0
    for scale in range(127):
        page = torch.zeros(128 * 72, dtype=torch.uint8)
        page[:8] = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE])
        page[8192] = scale
        exact = dequantise(layout, page.view(1, 128, 72))[0, 0, :16].tolist()
        assert exact == [v * e4m3[scale] for v in (*e2m1, *(-v for v in e2m1))]
        rounded = dequantise(layout, page.view(1, 128, 72), "e4m3")[0, 0, :16].tolist()
        for x, y in zip(exact, rounded, strict=True):
            size = min(abs(x), 448.0)
            code = min(range(127), key=lambda c: (abs(e4m3[c] - size), c % 2))
            assert y == math.copysign(e4m3[code], x) or (x == 0 and y == 0)
        inexact += sum(x != y for x, y in zip(exact[:8], rounded[:8], strict=True))
    assert inexact == 275

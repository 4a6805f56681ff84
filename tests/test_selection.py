# SPDX-License-Identifier: Apache-2.0
"""Which ids a decode returns, and in which order: sections 1.2 to 1.5 of the contract.

Expected ids come from ``sorted`` over a key written down here, never from the reference, which is checked against them too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import blockpick

INF, NAN = math.inf, math.nan
SENTINEL = -77
INT32_MAX = 2**31 - 1


def wanted_row(scores: list[float], position: int, topk: int = 16, init_blocks: int = 0, local_blocks: int = 1,
               order: str = "score", empty_row: str = "minus_one") -> list[int]:  # fmt: skip
    """One row by the rules of section 1.5."""
    if position < 0:
        return [0 if empty_row == "block_zero" else -1] + [-1] * (topk - 1)
    own = position // 128

    def key(block: int) -> tuple[float, ...]:
        if block > own - local_blocks:
            return (-1, 0, 0, block)
        if block < init_blocks:
            return (-2, 0, 0, block)
        score = scores[block]
        return (0, 1, 0, block) if math.isnan(score) else (0, 0, -score, block)

    ids = sorted(range(own + 1), key=key)[:topk]
    if order == "ascending" or (order == "local_last" and own < topk):
        ids.sort()
    elif order == "local_last":
        ids = [block for block in ids if block != own] + [own]
    return ids + [-1] * (topk - len(ids))


def block_maxima(keys: torch.Tensor, query: torch.Tensor, position: int) -> list[float]:
    """Scores of the visible blocks in float64: the maximum ignores NaN tokens."""
    dots = (keys[: position + 1].double() @ query.double()).tolist()
    blocks = [[d for d in dots[i : i + 128] if d == d] for i in range(0, len(dots), 128)]
    return [max(block, default=NAN) for block in blocks]


def wanted(keys: list[torch.Tensor], q: torch.Tensor, query_len: int = 1, **options: Any) -> list[list[list[int]]]:
    """Expected [T][H][topk] of a batch."""
    rows = []
    for b, i in itertools.product(range(len(keys)), range(query_len)):
        position = len(keys[b]) - query_len + i
        queries = q[b * query_len + i]
        rows.append([wanted_row(block_maxima(keys[b], query, position), position, **options) for query in queries])
    return rows


def place(keys: list[torch.Tensor], page_size: int = 128, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """A bf16 cache of shuffled pages, NaN wherever no key was put, its table with garbage tails, and the lengths."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-len(k) // page_size) for k in keys]
    cache = torch.full((sum(counts) + 2, page_size, 128), NAN, dtype=torch.bfloat16)
    pages = torch.randperm(sum(counts) + 2, generator=generator).int()
    table = torch.randint(-(2**31), INT32_MAX, (len(keys), max(counts) + 1), generator=generator).int()
    for b, k in enumerate(keys):
        mine, pages = pages[: counts[b]], pages[counts[b] :]
        table[b, : counts[b]] = mine
        for j, page in enumerate(mine.tolist()):
            rows = k[j * page_size : (j + 1) * page_size]
            cache[page, : len(rows)] = rows.bfloat16()
    return cache, table, torch.tensor([len(k) for k in keys], dtype=torch.int32)


def run(make: Callable[..., blockpick.Indexer], device: str, cache: torch.Tensor, table: torch.Tensor,
        lens: torch.Tensor, q: torch.Tensor, *, query_len: int = 1, out_layout: str = "thk", **options: Any) -> list[Any]:  # fmt: skip
    """Ids [T][H][topk] of one decode on a fresh indexer."""
    page_size, heads, topk = cache.shape[1], q.shape[1], options.get("topk", 16)
    indexer = make(
        blockpick.CacheLayout("bf16", page_size), num_heads=heads, max_requests=len(lens), max_query_len=query_len,
        max_seq_len=table.shape[1] * page_size, out_layout=out_layout, **options,
    )  # fmt: skip
    shape = (len(q), heads, topk) if out_layout == "thk" else (heads, len(q), topk)
    out = torch.full(shape, SENTINEL, dtype=torch.int32, device=device)
    plan = indexer.plan_decode(table.to(device), lens.to(device), query_len=query_len)
    indexer.decode(plan, q.to(device), cache.to(device), out)
    return (out if out_layout == "thk" else out.transpose(0, 1)).tolist()


def reference(layout: blockpick.CacheLayout, **options: Any) -> blockpick.Indexer:
    """The oracle as an indexer."""
    return blockpick.Indexer(layout, device="cpu", backend="reference", **options)


def check(executor: Any, keys: list[torch.Tensor], q: torch.Tensor, expected: list[Any] | None = None,
          page_size: int = 128, out_layout: str = "thk", **options: Any) -> None:  # fmt: skip
    """The executor and the reference must both return ``expected`` (default: worked out from the keys)."""
    if expected is None:
        expected = wanted(keys, q, **options)
    batch = place(keys, page_size)
    for name, make, device in ((executor.name, executor.indexer, executor.device), ("reference", reference, "cpu")):
        got = run(make, device, *batch, q, out_layout=out_layout, **options)
        assert got == expected, f"{name}: {got} instead of {expected}"


def integers(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Small integers: every dot product is exact in fp32 in any order, and ties abound."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def random_keys(lengths: list[int], seed: int = 1) -> list[torch.Tensor]:
    return [integers((length, 128), seed + b) for b, length in enumerate(lengths)]


def scored(scores: list[float], last_tokens: int = 128) -> list[torch.Tensor]:
    """Keys whose blocks score ``scores`` under :func:`unit`; a random token of each block carries the score."""
    generator = torch.Generator().manual_seed(len(scores))
    keys = torch.zeros(len(scores), 128, 128)
    for block, score in enumerate(scores):
        low = score if math.isinf(score) or math.isnan(score) else score - abs(score) - 1
        keys[block, :, 0] = -3e38 if score == INF else low
        tokens = last_tokens if block == len(scores) - 1 else 128
        keys[block, int(torch.randint(tokens, (1,), generator=generator)), 0] = score
    return [keys.flatten(0, 1)[: (len(scores) - 1) * 128 + last_tokens]]


def unit(tokens: int = 1, heads: int = 1) -> torch.Tensor:
    """Queries that read dim 0."""
    q = torch.zeros(tokens, heads, 128)
    q[..., 0] = 1
    return q.bfloat16()


# ---- options ----


@pytest.mark.parametrize("empty_row", ["minus_one", "block_zero"])
@pytest.mark.parametrize("out_layout", ["thk", "htk"])
@pytest.mark.parametrize("order", ["score", "local_last", "ascending"])
def test_every_order_layout_and_empty_row(executor: Any, order: str, out_layout: str, empty_row: str) -> None:
    keys = random_keys([0, 5, 16 * 128, 19 * 128 + 7])
    check(executor, keys, integers((4, 1, 128)), order=order, out_layout=out_layout, empty_row=empty_row)


@pytest.mark.parametrize("order", ["score", "local_last", "ascending"])
@pytest.mark.parametrize("topk", [1, 15, 16, 17, 64])
def test_rows_shorter_equal_and_longer_than_topk(executor: Any, topk: int, order: str) -> None:
    keys = random_keys([topk * 128, topk * 128 + 1, 1])
    check(executor, keys, integers((3, 1, 128)), topk=topk, order=order)


@pytest.mark.parametrize(
    ("init_blocks", "local_blocks", "topk"),
    [
        (0, 0, 16),
        (1, 0, 16),
        (0, 3, 16),
        (2, 2, 4),
        (1, 1, 16),
        (8, 8, 16),
        (16, 0, 16),
        (0, 16, 16),
        (1, 0, 1),
        (3, 60, 64),
    ],
)
@pytest.mark.parametrize("order", ["score", "ascending"])
def test_init_and_local_blocks_win_and_are_clipped_to_the_visible(
    one_executor: Any, init_blocks: int, local_blocks: int, topk: int, order: str
) -> None:
    keys = random_keys([0, 1, 2 * 128 + 1, 20 * 128])
    options = {"init_blocks": init_blocks, "local_blocks": local_blocks, "topk": topk, "order": order}
    check(one_executor, keys, integers((4, 1, 128)), **options)


@pytest.mark.parametrize(
    ("scores", "init_blocks", "local_blocks", "ids"),
    [
        ([9, 8, 7, 6, 5], 2, 2, [0, 1, 3, 4, 2]),
        ([5, 6, 7, 8, 9], 2, 2, [0, 1, 3, 4, 2]),  # never by score inside a class
        ([1, 2, 3], 2, 2, [0, 1, 2]),  # block 1 is both: local, so it stands in class 1
        ([1, 2, 3], 3, 1, [0, 1, 2]),
        ([1, 2, 3], 1, 3, [0, 1, 2]),  # all local
        ([1, 9, 3, 5], 0, 0, [1, 3, 2, 0]),
        ([1, 9, 3, 5], 1, 0, [0, 1, 3, 2]),
        ([1, 9, 3, 5], 0, 1, [3, 1, 2, 0]),
        ([-INF, 9, 3, NAN], 1, 1, [0, 3, 1, 2]),
        ([NAN, 9, 3, -INF], 1, 2, [0, 2, 3, 1]),
    ],
)
def test_class_order_init_local_history_by_hand(
    executor: Any, scores: list[float], init_blocks: int, local_blocks: int, ids: list[int]
) -> None:
    row = ids + [-1] * (16 - len(ids))
    check(executor, scored(scores), unit(), [[row]], init_blocks=init_blocks, local_blocks=local_blocks)


def test_block_that_is_init_and_local_loses_to_pure_init_when_topk_is_full(executor: Any) -> None:
    """n = 3, init 3, local 2, topk 5 would fit; with n = 4: init 0, 1 (2 is local too), local 2, 3."""
    check(executor, scored([1, 2, 3, 4]), unit(), [[[0, 1, 2, 3, -1]]], topk=5, init_blocks=3, local_blocks=2)


# ---- causal rule ----


@pytest.mark.parametrize("query_len", range(1, 9))
def test_queries_before_the_sequence_are_empty_and_blocks_open_one_by_one(executor: Any, query_len: int) -> None:
    keys = random_keys([0, query_len - 1, 17 * 128 + 2])
    q = integers((3 * query_len, 1, 128), seed=5)
    check(executor, keys, q, query_len=query_len, empty_row="block_zero" if query_len % 2 else "minus_one")


@pytest.mark.parametrize("empty_row", ["minus_one", "block_zero"])
def test_positions_across_a_block_edge_by_hand(executor: Any, empty_row: str) -> None:
    """S = 130, L = 4: positions 126..129 see 1, 1, 2, 2 blocks; S = 3: positions -1, 0, 1, 2."""
    keys = random_keys([130, 3])
    first = 0 if empty_row == "block_zero" else -1
    rows = [[0], [0], [1, 0], [1, 0], [first], [0], [0], [0]]
    expected = [[row + [-1] * (16 - len(row))] for row in rows]
    check(executor, keys, integers((8, 1, 128)), expected, query_len=4, empty_row=empty_row)


def test_tokens_after_the_position_never_count(executor: Any) -> None:
    """Every token scores more than all before it; query i may see tokens up to its own only, inside a block too."""
    keys = torch.zeros(2 * 128 + 3, 128)
    keys[:, 0] = torch.arange(len(keys)) // 2
    keys[256:, 0] = torch.tensor([-5.0, 1.0, 500.0])  # the last block scores -5, 1, 500 for the three queries
    check(executor, [keys], unit(3), [[[1, 0, 2]], [[1, 0, 2]], [[2, 1, 0]]], query_len=3, topk=3, local_blocks=0)


@pytest.mark.parametrize("page_size", [128, 256])
@pytest.mark.parametrize("length", [4 * 256 + 1, 2**20, INT32_MAX - 126, INT32_MAX])
def test_length_beyond_the_table_is_clamped_to_it(executor: Any, page_size: int, length: int) -> None:
    """p = min(p, W * page_size - 1): the own block, the mask and the number of blocks follow."""
    keys = random_keys([4 * 256])
    cache, table, _ = place(keys, page_size)
    table = table[:, : 4 * 256 // page_size]
    q = integers((2, 1, 128))
    for name, make, device in ((executor.name, executor.indexer, executor.device), ("reference", reference, "cpu")):
        got = run(make, device, cache, table, torch.tensor([length], dtype=torch.int32), q, query_len=2)
        last = 4 * 256 - 1 if length > 4 * 256 else 4 * 256 - 2
        rows = [wanted_row(block_maxima(keys[0], q[i, 0], p), p) for i, p in enumerate((last, 4 * 256 - 1))]
        assert got == [[row] for row in rows], name


@pytest.mark.parametrize("length", [-1, -128, -(2**31)])
def test_negative_length_is_an_empty_request(executor: Any, length: int) -> None:
    cache, table, _ = place(random_keys([300, 300]))
    lens = torch.tensor([length, 300], dtype=torch.int32)
    for make, device in ((executor.indexer, executor.device), (reference, "cpu")):
        got = run(make, device, cache, table, lens, unit(4), query_len=2)
        assert got[:2] == [[[-1] * 16]] * 2
        assert [sorted(row[0][:3]) for row in got[2:]] == [[0, 1, 2]] * 2


# ---- heads and layouts ----


@pytest.mark.parametrize("page_size", [128, 256])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_heads_score_with_their_own_query(executor: Any, heads: int, page_size: int) -> None:
    keys = random_keys([18 * 128 + 1, 129])
    check(executor, keys, integers((2, heads, 128), seed=heads), page_size=page_size)


@pytest.mark.parametrize("out_layout", ["thk", "htk"])
def test_layout_is_never_inferred_when_tokens_equal_heads(executor: Any, out_layout: str) -> None:
    check(executor, random_keys([20 * 128]), integers((4, 4, 128), seed=9), query_len=4, out_layout=out_layout)


# ---- scores that compare oddly ----


def test_nan_blocks_are_emitted_after_minus_infinity(executor: Any) -> None:
    scores = [NAN, -INF, 3, INF, NAN, -INF, -3, INF]
    row = [3, 7, 2, 6, 1, 5, 0, 4]
    check(executor, scored(scores), unit(), [[row + [-1] * 8]], local_blocks=0)
    check(executor, scored(scores), unit(), [[row[:7]]], local_blocks=0, topk=7)
    check(executor, scored(scores), unit(), [[[7, 3, 2, 6, 1, 5, 0, 4]]], topk=8)
    check(executor, scored(scores), unit(), [[list(range(8)) + [-1] * 8]], order="local_last")


def test_rows_of_only_nan_or_only_minus_infinity_yield_the_lowest_ids(executor: Any) -> None:
    for score in (NAN, -INF, INF):
        check(executor, scored([score] * 20), unit(), [[[19, *range(15)]]])
        check(executor, scored([score] * 20), unit(), [[[*range(16)]]], local_blocks=0)


def test_one_number_among_nan_tokens_gives_the_block_its_score(executor: Any) -> None:
    keys = torch.zeros(3 * 128 + 2, 128)
    keys[:, 0] = NAN
    keys[100, 0], keys[128, 0], keys[2 * 128, 0] = -5, -INF, -4
    keys[3 * 128 + 1, 0] = 7  # only the second query sees it: the first one's last block is NaN
    expected = [[[2, 0, 1, 3]], [[3, 2, 0, 1]]]
    check(executor, [keys], unit(2), expected, query_len=2, topk=4, local_blocks=0)


def test_zeros_of_either_sign_tie(executor: Any) -> None:
    """Products of -2^-200 and 2^-200 round to -0 and +0."""
    keys = torch.zeros(6, 128, 128)
    keys[:, :, 0] = torch.tensor([-1.0, 1, -1, 1, 1, -1])[:, None] * 2.0**-100
    check(
        executor, [keys.flatten(0, 1)], (unit() * 2.0**-100).bfloat16(), [[[0, 1, 2, 3, 4, 5]]], topk=6, local_blocks=0
    )


@pytest.mark.parametrize("order", ["score", "local_last", "ascending"])
def test_equal_scores_go_to_the_lower_id(executor: Any, order: str) -> None:
    row = {"score": [39, *range(15)], "local_last": [*range(15), 39], "ascending": [*range(15), 39]}[order]
    check(executor, scored([4.0] * 40), unit(), [[row]], order=order)


def test_neighbouring_floats_are_told_apart_at_every_magnitude(executor: Any) -> None:
    """Scores scale * (1 + k 2^-23) with k shuffled: any quantisation of the row loses the order."""
    order = torch.randperm(24, generator=torch.Generator().manual_seed(3))
    for scale, sign in ((1.0, 1), (2.0**60, 1), (2.0**-60, -1)):
        keys = torch.zeros(24, 128, 128)
        keys[..., 0], keys[..., 1] = sign * scale, (sign * scale * 2.0**-23 * order)[:, None]
        q = unit()
        q[..., 1] = 1
        best = sorted(range(24), key=lambda block: -sign * int(order[block]))
        check(executor, [keys.flatten(0, 1)], q, [[best]], topk=24, local_blocks=0)


# ---- rows that are split ----


def long_row(executor: Any, pages: dict[int, float], blocks: int, **options: Any) -> list[int]:
    """Ids of a row whose blocks all score 0 but for ``pages``: block -> score; equal blocks share a page of the pool."""
    values = [0.0, *pages.values()]
    cache = torch.zeros(len(values), 128, 128, dtype=torch.bfloat16)
    cache[:, :, 0] = torch.tensor(values)[:, None].bfloat16()
    table = torch.zeros(1, blocks, dtype=torch.int32)
    for page, block in enumerate(pages, 1):
        table[0, block] = page
    lens = torch.tensor([blocks * 128], dtype=torch.int32)
    (row,) = run(executor.indexer, executor.device, cache, table, lens, unit(), **options)
    return row[0]


def test_ties_across_splits_go_to_the_lower_id(one_executor: Any) -> None:
    assert long_row(one_executor, {}, 2049) == [2048, *range(15)]


def test_winners_on_both_sides_of_every_split_edge_are_merged(one_executor: Any) -> None:
    """4101 blocks: winners next to 2048 and 4096, a tie across splits, NaN and both infinities; block 0 pinned."""
    pages = {
        3: NAN, 1000: 5, 2047: 7, 2048: 7, 2049: 8, 4000: 5, 4095: 9, 4096: 9, 4097: -INF, 4098: 6, 4099: INF, 0: -INF,
    }  # fmt: skip
    row = long_row(one_executor, pages, 4101, init_blocks=1)
    assert row == [0, 4100, 4099, 4095, 4096, 2049, 2047, 2048, 4098, 1000, 4000, 1, 2, 4, 5, 6]


def test_all_winners_in_the_last_split_and_local_last(one_executor: Any) -> None:
    pages = {2050 + j: float(50 - j) for j in range(20)}
    row = long_row(one_executor, pages, 2100, order="local_last")
    assert row == [*range(2050, 2065), 2099]


# ---- what is read and written ----


@pytest.mark.parametrize("out_layout", ["thk", "htk"])
def test_padding_rows_stay_untouched_and_need_permission(executor: Any, out_layout: str) -> None:
    keys = random_keys([300, 17 * 128])
    cache, table, lens = (x.to(executor.device) for x in place(keys))
    q = integers((7, 2, 128)).to(executor.device)
    indexer = executor.indexer(
        blockpick.CacheLayout("bf16"), num_heads=2, max_requests=2, max_query_len=2, max_seq_len=table.shape[1] * 128,
        out_layout=out_layout,
    )  # fmt: skip
    out = torch.full(
        (7, 2, 16) if out_layout == "thk" else (2, 7, 16), SENTINEL, dtype=torch.int32, device=executor.device
    )
    plan = indexer.plan_decode(table, lens, query_len=2)
    with pytest.raises(ValueError, match=r"^q: .*\b4\b.*\b7\b.*allow_padding"):
        indexer.decode(plan, q, cache, out)
    assert bool((out == SENTINEL).all()), "written on refusal"
    assert indexer.decode(plan, q, cache, out, allow_padding=True) is out
    rows = (out if out_layout == "thk" else out.transpose(0, 1)).cpu()
    assert rows[:4].tolist() == wanted(keys, q[:4].cpu(), query_len=2)
    assert bool((rows[4:] == SENTINEL).all())


@pytest.mark.parametrize("order", ["local_last", "ascending", "score"])
def test_short_requests_never_read_scores_unless_ordered_by_them(executor: Any, order: str) -> None:
    """n <= topk: all blocks win. Stale scores of an earlier step are poisoned; ``score`` must compute its own."""
    keys = random_keys([16 * 128, 128 + 1, 17 * 128])
    cache, table, lens = (x.to(executor.device) for x in place(keys))
    q = integers((3, 1, 128))
    options = {"max_requests": 3, "max_seq_len": table.shape[1] * 128, "order": order}
    indexer = executor.indexer(blockpick.CacheLayout("bf16"), **options)
    out = torch.full((3, 1, 16), SENTINEL, dtype=torch.int32, device=executor.device)
    for poison in (NAN, INF, 0.0):
        indexer._engine.buffers[0]["scores"].fill_(poison)
        plan = indexer.plan_decode(table, lens, query_len=1)
        indexer.decode(plan, q.to(executor.device), cache, out)
        assert out.tolist() == wanted(keys, q, order=order), f"scores poisoned with {poison}"


@pytest.mark.parametrize("offset", [1, 2, 3])
def test_views_at_four_byte_alignment(executor: Any, offset: int) -> None:
    """seq_lens[1:], block_table[:, 1:], odd strides and offsets of out, heads and tokens cut from a wider q."""
    device = executor.device
    keys = random_keys([300, 18 * 128 + 5])
    cache, table, lens = place(keys)
    wide_lens = torch.cat([torch.full((offset,), INT32_MAX, dtype=torch.int32), lens]).to(device)
    wide_table = torch.full((2, table.shape[1] + offset + 2), -9, dtype=torch.int32)
    wide_table[:, offset:-2] = table
    wide_table = wide_table.to(device)
    wide_q = torch.full((6, 5, 136), NAN, dtype=torch.bfloat16)
    q = integers((2, 2, 128))
    wide_q[1:5:2, 1:5:2, 8:] = q
    storage = torch.full((200,), SENTINEL, dtype=torch.int32, device=device)
    out = torch.as_strided(storage, (2, 2, 16), (53, 19, 1), offset)
    indexer = executor.indexer(
        blockpick.CacheLayout("bf16"), num_heads=2, max_requests=2, max_seq_len=table.shape[1] * 128
    )
    plan = indexer.plan_decode(wide_table[:, offset:-2], wide_lens[offset:], query_len=1)
    indexer.decode(plan, wide_q.to(device)[1:5:2, 1:5:2, 8:], cache.to(device), out)
    assert out.tolist() == wanted(keys, q)
    out.fill_(SENTINEL)
    assert bool((storage == SENTINEL).all()), "written between or beyond the output's rows"

# SPDX-License-Identifier: Apache-2.0
"""Faults that users of such indexers reported about batches and selection; test names carry the case."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fault_cases import DTYPES, INF, NAN, SENTINEL, Run, best, guarded, intact, integers, maxima, place, queries

import blockpick
import blockpick.plan
from blockpick.manifest import installed_packages
from blockpick.testing.reference import insert_reference

# ---- 1, 5, 9: layouts and causal rule ----


@pytest.mark.parametrize("tokens", [7, 4])
def test_case_1_both_layouts_hold_the_same_ids(one_executor: Any, tokens: int) -> None:
    layout = blockpick.CacheLayout("bf16")
    generator = torch.Generator().manual_seed(tokens)
    cache, table = place(layout, [torch.randn(40 * 128, 128, generator=generator)])
    q = torch.randn(tokens, 4, 128, generator=generator).bfloat16()
    ids = {}
    for out_layout in ("thk", "htk"):
        run = Run(one_executor, layout, table, tokens, num_heads=4, out_layout=out_layout)
        run(cache, [40 * 128], q)
        ids[out_layout] = run.out.cpu()
    assert ids["thk"].shape == (tokens, 4, 16)
    assert ids["htk"].shape == (4, tokens, 16)
    for t in range(tokens):
        for h in range(4):
            assert ids["thk"][t, h].tolist() == ids["htk"][h, t].tolist()
    assert not torch.equal(ids["thk"][:4], ids["htk"][:, :4]), "the batch cannot tell the layouts apart"


@pytest.mark.parametrize("tokens", [1, 6, 7, 8])
def test_case_5_query_len_is_required_and_never_inferred(executor: Any, tokens: int) -> None:
    layout = blockpick.CacheLayout("bf16")
    cache, table = (x.to(executor.device) for x in place(layout, [integers((400, 128)), integers((300, 128), 1)]))
    indexer = executor.indexer(layout, max_requests=2, max_query_len=4, max_seq_len=1024)
    lens = torch.tensor([400, 300], dtype=torch.int32, device=executor.device)
    with pytest.raises(TypeError, match="query_len"):
        indexer.plan_decode(table, lens)
    plan = indexer.plan_decode(table, lens, query_len=2)
    out = torch.full((tokens, 1, 16), SENTINEL, dtype=torch.int32, device=executor.device)
    with pytest.raises(ValueError, match=rf"^q: .*\b4\b.*\b{tokens}\b"):
        indexer.decode(plan, torch.zeros(tokens, 1, 128, dtype=torch.bfloat16, device=executor.device), cache, out)
    assert bool((out == SENTINEL).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("length", "query_len", "visible"), [
    (130, 4, (1, 1, 2, 2)), (128, 3, (1, 1, 1)), (129, 2, (1, 2)), (2, 4, (0, 0, 1, 1)), (257, 8, (2,) * 7 + (3,)), (0, 5, (0,) * 5),
])  # fmt: skip
def test_case_9_every_query_has_its_own_causal_length(
    executor: Any, dtype: str, length: int, query_len: int, visible: tuple[int, ...]
) -> None:
    layout = blockpick.CacheLayout(dtype)
    cache, table = place(layout, [integers((length, 128))])
    run = Run(executor, layout, table, query_len, order="ascending")
    ids = run(cache, [length], queries(integers((query_len, 1, 128), 1), dtype))
    assert ids == [[[*range(n)] + [-1] * (16 - n)] for n in visible]


# ---- 3, 14, 25, 30: batches ----


@pytest.mark.parametrize("query_len", [1, 2])
@pytest.mark.parametrize("padding", ["rows of q", "empty requests"])
def test_case_3_and_25_padded_batch_stays_inside_its_scratch(
    executor: Any, monkeypatch: pytest.MonkeyPatch, padding: str, query_len: int
) -> None:
    """5 live requests padded to 8, three replays, 4 KiB of guard behind every buffer."""
    guards = guarded(monkeypatch)
    layout = blockpick.CacheLayout("bf16")
    keys = [integers((n, 128), n) for n in (1, 129, 17 * 128, 300, 128)]
    padded = padding == "empty requests"
    cache, table = place(layout, keys + [keys[0][:0]] * (3 if padded else 0))
    q = integers((8 * query_len, 1, 128)).bfloat16().to(executor.device)
    lens = torch.tensor([len(k) for k in keys] + [0] * (3 if padded else 0), dtype=torch.int32, device=executor.device)
    indexer = executor.indexer(
        layout, max_requests=8 if padded else 5, max_query_len=query_len, max_seq_len=table.shape[1] * 128
    )
    out = torch.full((8 * query_len, 1, 16), SENTINEL, dtype=torch.int32, device=executor.device)
    plan = indexer.plan_decode(table.to(executor.device), lens, query_len=query_len)
    for _ in range(3):
        indexer.decode(plan, q, cache.to(executor.device), out, allow_padding=True)
    intact(guards)
    for b, k in enumerate(keys):
        for i in range(query_len):
            row, position = b * query_len + i, len(k) - query_len + i
            expected = best(maxima(k, q[row, 0].cpu().float(), position)) if position >= 0 else [-1] * 16
            assert out[row, 0].tolist() == expected
    assert bool((out[5 * query_len :] == (-1 if padded else SENTINEL)).all())


@pytest.mark.parametrize("requests", [1, 32, 64])
def test_case_14_all_lengths_zero(one_executor: Any, monkeypatch: pytest.MonkeyPatch, requests: int) -> None:
    guards = guarded(monkeypatch)
    layout = blockpick.CacheLayout("nvfp4")
    empty_row = "block_zero" if requests == 32 else "minus_one"
    table = torch.full((requests, 3), 2**31 - 1, dtype=torch.int32)
    run = Run(one_executor, layout, table, empty_row=empty_row)
    cache = torch.full(layout.shape(1), 0x7F, dtype=torch.uint8)
    ids = run(cache, [0] * requests, queries(torch.ones(requests, 1, 128), "nvfp4"))
    assert ids == [[[0 if empty_row == "block_zero" else -1] + [-1] * 15]] * requests
    intact(guards)


def test_case_14_a_step_without_work_leaves_nothing_behind(executor: Any) -> None:
    """A dummy run of zero lengths between two real steps."""
    layout = blockpick.CacheLayout("bf16")
    keys = integers((20 * 128, 128))
    cache, table = place(layout, [keys, keys[:0]])
    run = Run(executor, layout, table)
    q = integers((2, 1, 128)).bfloat16()
    expected = [[best(maxima(keys, q[0, 0].float(), 20 * 128 - 1))], [[-1] * 16]]
    for lens, ids in (([20 * 128, 0], expected), ([0, 0], [[[-1] * 16]] * 2), ([20 * 128, 0], expected)):
        assert run(cache, lens, q) == ids


def test_case_30_one_long_request_among_63_short_ones(one_executor: Any) -> None:
    layout = blockpick.CacheLayout("bf16")
    keys = [integers((16 * 128 if b == 40 else 1 + 17 * b % 200, 128), b) for b in range(64)]
    keys[40] = integers((300 * 128, 128), 99)
    cache, table = place(layout, keys)
    q = integers((64, 1, 128), 3).bfloat16()
    ids = Run(one_executor, layout, table)(cache, [len(k) for k in keys], q)
    for b, k in enumerate(keys):
        assert ids[b][0] == best(maxima(k, q[b, 0].float(), len(k) - 1)), f"request {b}"


# ---- 11, 12, 13, 27: selectors ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poisoned", ["q", "cache"])
def test_case_11_all_scores_nan(executor: Any, dtype: str, poisoned: str) -> None:
    layout = blockpick.CacheLayout(dtype)
    q = torch.ones(1, 1, 128)
    cache = layout.empty(1, "cpu").fill_(0x7F if dtype == "nvfp4" else NAN)
    if poisoned == "q":
        q[..., 5] = NAN
        cache.fill_(0x11 if dtype == "nvfp4" else 1)
    ids = Run(executor, layout, torch.zeros(1, 200, dtype=torch.int32))(cache, [200 * 128], queries(q, dtype))
    assert ids[0][0] == [199, *range(15)]


def near_ties(dtype: str, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache of one page a block and q [1, 1, 128] whose exact scores are (1 + k 2^-23) times a power of two."""
    k = torch.arange(blocks)
    bits = (k[:, None] >> torch.arange(13)) & 1
    keys, q = torch.zeros(blocks, 128), torch.zeros(1, 1, 128)
    if dtype == "bf16":
        keys[:, 0], q[..., 0] = 1, 1
        keys[:, 16:29], q[..., 16:29] = bits * 2.0 ** torch.arange(-23, -10), 1
    else:  # 512 + k 2^-14 from factors inside the range of e4m3; for NVFP4 a 6 that q ignores fixes each group's scale
        keys[:, 0], keys[:, 1], q[..., 0] = 16, 96, 32
        keys[:, 16:29], keys[:, 31], q[..., 16:29] = bits * 2.0**-5, 6 * 2.0**-5, 2.0 ** torch.arange(-9, 4)
    layout = blockpick.CacheLayout(dtype)
    cache = layout.empty(blocks, "cpu").fill_(0)
    insert_reference(layout, cache, keys.bfloat16(), k * 128 + k * 37 % 128)
    return cache, queries(q, dtype)


@pytest.mark.parametrize(("dtype", "blocks"), [("bf16", 5000), ("e4m3fn", 2100), ("nvfp4", 2100)])
def test_case_12_scores_one_ulp_apart_keep_their_order(one_executor: Any, dtype: str, blocks: int) -> None:
    cache, q = near_ties(dtype, blocks)
    cache, q = cache.to(one_executor.device), q.to(one_executor.device)
    run = Run(one_executor, blockpick.CacheLayout(dtype), torch.arange(blocks).int()[None])
    expected = [blocks - 1, *range(blocks - 2, blocks - 17, -1)]
    assert run(cache, [blocks * 128], q)[0][0] == expected
    scale = 1 if dtype == "bf16" else 512
    exact = (1 + torch.arange(blocks).double() * 2.0**-23) * scale
    assert torch.equal(run.scores()[0, 0, 0, :blocks].double(), exact)
    for _ in range(0 if one_executor.device == "cpu" else 50):
        assert run.again(cache, q)[0][0] == expected


def edge(executor: Any, last: int) -> list[list[int]]:
    """Two queries on both sides of the edge behind block ``last - 1``: ``last`` and ``last + 1`` visible blocks.

    All blocks score 1 but every 5th from the end, which scores 2; the table repeats two pages.
    """
    layout = blockpick.CacheLayout("bf16")
    cache = torch.ones(2, 128, 128, dtype=torch.bfloat16)
    cache[1] = 2
    table = torch.zeros(1, last + 1, dtype=torch.int32)
    table[0, [last - 1 - 5 * j for j in range(10)]] = 1
    ids = Run(executor, layout, table, query_len=2)(
        cache, [last * 128 + 1], torch.ones(2, 1, 128, dtype=torch.bfloat16)
    )
    return [row[0] for row in ids]


@pytest.mark.parametrize("last", [255, 256, 1023, 1024, 2048, pytest.param(8191, marks=pytest.mark.slow),
                                  pytest.param(8192, marks=pytest.mark.slow)])  # fmt: skip
def test_case_13_lengths_at_every_internal_capacity(one_executor: Any, last: int) -> None:
    twos = sorted(last - 1 - 5 * j for j in range(10))
    assert edge(one_executor, last) == [
        [last - 1, *twos[:-1], *range(6)],
        [last, *twos, *range(5)],
    ]


@pytest.mark.slow
def test_case_13_the_longest_row(one_executor: Any) -> None:
    """65,534 blocks; the ids reach 0xFFFD and still tie towards the lower one."""
    last = 65533
    twos = sorted(last - 1 - 5 * j for j in range(10))
    assert edge(one_executor, last)[1] == [last, *twos, *range(5)]


@pytest.mark.parametrize("page_size", [128, 256])
def test_case_13_one_block_more_is_refused_at_construction(executor: Any, page_size: int) -> None:
    layout = blockpick.CacheLayout("bf16", page_size)
    limit = 65534 * 128
    for tokens in (limit + 1, limit + 128, 2**31 - 1, 2**40):
        with pytest.raises(blockpick.UnsupportedConfigError, match=rf"max_seq_len={tokens}\b.*65534"):
            executor.indexer(layout, max_requests=1, max_seq_len=tokens)
    assert executor.indexer(layout, max_requests=1, max_seq_len=limit).config.max_blocks == 65534


@pytest.mark.parametrize("score", [-INF, NAN, -1.0])
@pytest.mark.parametrize("dtype", ["bf16", "e4m3fn"])
def test_case_27_forced_blocks_survive_the_worst_score(executor: Any, dtype: str, score: float) -> None:
    layout = blockpick.CacheLayout(dtype)
    keys = torch.ones(100, 128)
    values = torch.arange(100).float() % 7 + 1
    if dtype == "e4m3fn" and score == -INF:
        score = -448.0  # e4m3fn has no infinity
    values[0] = values[99] = score
    q = torch.zeros(1, 1, 128)
    q[..., 0] = 1
    keys[:, 0] = values
    cache = keys[:, None].expand(100, 128, 128).to(layout.torch_dtype).contiguous()
    run = Run(executor, layout, torch.arange(100).int()[None], init_blocks=1, local_blocks=1)
    ids = run(cache, [100 * 128], queries(q, dtype))[0][0]
    assert ids == [0, 99, *range(6, 99, 7)]  # the 14 blocks of score 7
    assert ids.count(0) == ids.count(99) == 1


def test_case_22_arch_without_kernels_is_refused_with_the_installed_ones(executor: Any) -> None:
    layout = blockpick.CacheLayout("bf16")
    installed = ", ".join(sorted(installed_packages()))
    for arch in ("sm120", "sm89", "gfx90a", "sm", ""):
        if arch:
            with pytest.raises(blockpick.UnsupportedArchError, match=rf"{arch}\b.*{installed}"):
                blockpick.Indexer(layout, device="cpu", backend="interpreter", arch=arch)
            with pytest.raises(blockpick.UnsupportedArchError, match=rf"{arch}\b.*{installed}"):
                blockpick.insert(
                    layout, layout.empty(1, "cpu"), torch.zeros(1, 128, dtype=torch.bfloat16), torch.tensor([0]),
                    backend="interpreter", arch=arch,
                )  # fmt: skip

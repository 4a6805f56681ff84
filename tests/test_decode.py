# SPDX-License-Identifier: Apache-2.0
"""decode_pick against the oracle, on every executor: conformance of every architecture's sources, then each option."""

from __future__ import annotations

import pytest
import torch
from conformance import CACHES, CONFORMANCE, SELECTIONS, SPLITS, check_other_shape, check_plan, check_selection
from executors import GPU

from blockpick import CacheLayout
from blockpick.testing.cases import DecodeCase, build, run_case


@pytest.mark.parametrize("case", CONFORMANCE, ids=lambda c: c.name)
def test_conformance_of_every_target(any_executor, case):
    run_case(case, any_executor.indexer, any_executor.device)


@pytest.mark.parametrize("case", SPLITS, ids=lambda c: c.name)
def test_rows_of_several_splits(one_executor, case):
    run_case(case, one_executor.indexer, one_executor.device)


@pytest.mark.skipif(GPU, reason="gives scores in host memory; a GPU scores such rows in test_rows_of_several_splits")
@pytest.mark.parametrize("case", SELECTIONS, ids=lambda c: c.name)
def test_selection_of_every_target(any_executor, case):
    """Rows of up to ten splits on given scores, without a scorer."""
    check_selection(case, any_executor.indexer(case.layout(), **case.options()))


NUMERIC = [
    DecodeCase(f"{dtype}-{rounding}-{data}", dtype, (3000, 1, 640), num_heads=2, query_len=2, rounding=rounding,
               data=data)
    for dtype, rounding in CACHES for data in ("normal", "special")
]  # fmt: skip


@pytest.mark.parametrize("case", NUMERIC, ids=lambda c: c.name)
def test_scores_match_float64(executor, case):
    run_case(case, executor.indexer, executor.device)


@pytest.mark.slow
def test_large_skewed_batch(one_executor):
    """1030 requests, more than one load of the plan kernel: one of 40 blocks among short and empty ones."""
    lens = [3 * (b % 130) for b in range(1030)]
    lens[777] = 40 * 128 - 7
    case = DecodeCase("1030 requests", "e4m3fn", tuple(lens), data="integer", topk=4, order="local_last")
    run_case(case, one_executor.indexer, one_executor.device)


@pytest.mark.parametrize("padding", [16, 7168], ids=["16B", "to-16384B"])
@pytest.mark.parametrize("dtype", ["bf16", "e4m3fn", "nvfp4"])
def test_padded_page_stride(executor, dtype, padding):
    run_case(
        DecodeCase("padded", dtype, (2200,), page_padding=padding, data="integer"), executor.indexer, executor.device
    )


@pytest.mark.parametrize("heads,query_len", [(1, 8), (2, 8), (4, 8)])
def test_columns_share_one_numeric_family(one_executor, heads, query_len):
    """A (query, block) score has the same bits alone and beside other heads and query slots, whatever variant
    serves.
    """
    for dtype, rounding in CACHES:
        data = "integer" if one_executor.backend == "interpreter" else "normal"  # numpy's sums depend on the shape
        case = DecodeCase(
            "family", dtype, (2500, 1400), num_heads=heads, query_len=query_len, rounding=rounding, data=data
        )
        batch = build(case).to(one_executor.device)
        options = case.options()
        wide = one_executor.indexer(case.layout(), **options)
        plan = wide.plan_decode(batch.block_table, batch.seq_lens, query_len=query_len)
        wide.decode(plan, batch.q, batch.cache, batch.out)
        narrow = one_executor.indexer(case.layout(), **{**options, "num_heads": 1, "max_query_len": 1})
        plan1 = narrow.plan_decode(batch.block_table, batch.seq_lens, query_len=1)
        last = batch.q.view(2, query_len, heads, 128)[:, -1, heads - 1 :].contiguous()
        narrow.decode(plan1, last, batch.cache, torch.empty(2, 1, 16, dtype=torch.int32, device=one_executor.device))
        blocks = 11  # both requests have them, all visible
        a = wide.scores(plan)[:, -1, heads - 1, :blocks].cpu()
        b = narrow.scores(plan1)[:, 0, 0, :blocks].cpu()
        assert torch.equal(a.view(torch.int32), b.view(torch.int32)), f"{dtype} {rounding}"


def test_slots_hold_independent_steps(executor):
    """Two batches in flight on one indexer give what each gives alone."""
    cases = [
        DecodeCase("a", "nvfp4", (2500, 900), data="integer", seed=1),
        DecodeCase("b", "nvfp4", (2600, 400), data="integer", seed=2),
    ]
    options = {**cases[1].options(), "slots": 2}
    indexer = executor.indexer(cases[0].layout(), **options)
    batches = [build(case).to(executor.device) for case in cases]
    width = min(batch.block_table.shape[1] for batch in batches)
    plans = [
        indexer.plan_decode(b.block_table[:, :width], b.seq_lens, query_len=1, slot=slot)
        for slot, b in enumerate(batches)
    ]
    for plan, batch in zip(plans, batches, strict=True):
        indexer.decode(plan, batch.q, batch.cache, batch.out)
    for case, batch in zip(cases, batches, strict=True):
        alone = executor.indexer(case.layout(), **options)
        out = torch.empty_like(batch.out)
        alone.decode(
            alone.plan_decode(batch.block_table[:, :width], batch.seq_lens, query_len=1), batch.q, batch.cache, out
        )
        assert torch.equal(out, batch.out)


def test_unpopulated_table_is_safe(executor):
    """A table of garbage: ids are clamped into the pool, the right number of distinct blocks comes out."""
    layout = CacheLayout("nvfp4")
    cache = layout.empty(2, executor.device)
    cache.fill_(0x11)
    indexer = executor.indexer(layout, max_requests=2, max_seq_len=30 * 128)
    table = torch.randint(-(2**31), 2**31 - 1, (2, 30)).int().to(executor.device)
    lens = torch.tensor([3000, 128], dtype=torch.int32, device=executor.device)
    q = torch.zeros(2, 1, 128, device=executor.device).to(torch.float8_e4m3fn)
    out = torch.full((2, 1, 16), -7, dtype=torch.int32, device=executor.device)
    indexer.decode(indexer.plan_decode(table, lens, query_len=1), q, cache, out)
    assert out[0, 0].tolist() == [23, *range(15)]
    assert out[1, 0].tolist() == [0] + [-1] * 15


def test_memory_states_every_buffer(executor):
    """``memory()`` is what the buffers hold."""
    indexer = executor.indexer(CacheLayout("bf16"), max_requests=3, max_seq_len=5000, max_query_len=2, slots=2)
    tensors = [t for buffers in indexer._engine.buffers for t in buffers.values()]
    tensors += [t for staging in indexer._staging for t in (staging.starts, staging._ring)]
    assert indexer.memory().total_bytes == sum(t.numel() * t.element_size() for t in tensors)
    assert "scores" in str(indexer.memory())


def test_a_plan_of_another_batch_shape_gives_empty_rows(executor):
    case = DecodeCase("shape", "e4m3fn", (2500, 2304, 700, 300), query_len=2, data="integer")
    batch = build(case).to(executor.device)
    check_other_shape(executor.indexer(case.layout(), **case.options()), batch, case.query_len)


@pytest.mark.parametrize("page_size", [128, 256])
def test_plan_lists_every_visible_block_once(executor, page_size):
    """Work list, places, units and clamped lengths by their definition, over several chunks a request."""
    options = {"max_requests": 7, "max_seq_len": 640 * page_size}
    check_plan(executor.indexer(CacheLayout("e4m3fn", page_size), **options))

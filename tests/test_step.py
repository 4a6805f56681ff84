# SPDX-License-Identifier: Apache-2.0
"""Planning an engine's step: which requests decode, which prefill, and that all rows get the ids of a plain prefill."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blockpick import CacheLayout, Indexer, UnsupportedConfigError
from blockpick.config import IndexerConfig
from blockpick.step import STAGED_STEPS, StepSplit, split_step
from blockpick.testing.cases import SENTINEL
from blockpick.testing.prefill_cases import PrefillCase, build_prefill


def starts_of(lengths: list[int]) -> list[int]:
    return [sum(lengths[:b]) for b in range(len(lengths) + 1)]


@pytest.mark.parametrize(
    "lengths,num_tokens,expected",
    [
        ([1, 1, 1], None, (3, 1, 0, 0)),
        ([4, 4, 4], None, (3, 4, 0, 0)),
        ([4, 4, 0, 0], None, (2, 4, 0, 0)),  # q has rows for the live requests only
        ([4, 4, 0, 0], 16, (4, 4, 0, 0)),  # padding of a captured batch
        ([4, 4, 0, 0], 14, (3, 4, 0, 0)),  # rows for one of the two, and two that are nobody's
        ([4, 4, 0, 0], 50, (4, 4, 0, 0)),
        ([1, 1, 300, 7], None, (2, 1, 2, 307)),
        ([1, 1, 300, 7, 0], 310, (2, 1, 3, 308)),
        ([2, 2, 1, 300], None, (2, 2, 2, 301)),  # not uniform: the others are prefill
        ([1, 0, 300], None, (1, 1, 2, 300)),  # no padding: queries follow
        ([300, 1], None, (0, 0, 2, 301)),  # not decode-first: all is prefill
        ([9, 9], None, (0, 0, 2, 18)),  # longer than max_query_len
        ([0, 0], None, (0, 1, 0, 0)),  # a dummy run without rows
        ([0, 0], 2, (2, 1, 0, 0)),
        ([0, 3], None, (0, 0, 2, 3)),
        ([8], None, (1, 8, 0, 0)),
    ],
)
def test_who_decodes(lengths, num_tokens, expected):
    config = IndexerConfig(CacheLayout("bf16"), max_requests=8, max_query_len=8, max_prefill_tokens=512)
    assert split_step(starts_of(lengths), config, num_tokens) == StepSplit(*expected)


MIXES = [
    ((3, 2290), (3, 700), (3, 0), (20, 2300), (5, 100)),
    ((1, 2290), (1, 640)),
    ((11, 300), (1, 2000)),
    ((2, 2290), (0, 300), (9, 1000)),
]


@pytest.mark.parametrize("requests", MIXES)
@pytest.mark.parametrize("out_layout", ["thk", "htk"])
def test_a_step_gives_every_row_the_ids_of_a_prefill(executor, requests, out_layout):
    """On integer data decode and prefill agree to the bit, so the mixed step must equal one prefill of everything."""
    case = PrefillCase(
        "step", "e4m3fn", requests, num_heads=2, data="integer", numerics="strict", out_layout=out_layout
    )
    batch = build_prefill(case).to(executor.device)
    options = {**case.options(), "max_query_len": 8}
    indexer, plain = (executor.indexer(case.layout(), **options) for _ in range(2))
    plan = plain.plan_prefill(batch.cu_seqlens_q, batch.seq_lens, batch.block_table, num_tokens=case.num_tokens)
    wanted = plain.prefill(plan, batch.q, batch.cache, torch.full_like(batch.out, SENTINEL))
    starts = batch.cu_seqlens_q.cpu()
    step = indexer.plan_step(starts, batch.seq_lens, batch.block_table)
    assert step.num_decode_tokens + step.num_prefill_tokens == case.num_tokens
    for _ in range(2):  # two layers
        out = indexer.pick(step, batch.q, batch.cache, torch.full_like(batch.out, SENTINEL))
        assert torch.equal(out, wanted)


def test_padding_of_both_kinds_stays_untouched(executor):
    """Rows of q behind the last request of a mixed step; requests without queries behind those of a decode batch."""
    case = PrefillCase("pad", "bf16", ((1, 2290), (12, 300)), data="integer", padding=3)
    batch = build_prefill(case).to(executor.device)
    indexer = executor.indexer(case.layout(), **{**case.options(), "max_requests": 4, "empty_row": "block_zero"})
    step = indexer.plan_step([0, 1, 13], batch.seq_lens, batch.block_table, num_tokens=16)
    out = indexer.pick(step, batch.q, batch.cache, torch.full_like(batch.out, SENTINEL))
    assert (out[13:] == SENTINEL).all() and (out[:13] != SENTINEL).all()
    lens = torch.cat([batch.seq_lens[:1], torch.zeros(3, dtype=torch.int32, device=executor.device)])
    table = batch.block_table[:1].repeat(4, 1)
    step = indexer.plan_step([0, 1, 1, 1, 1], lens, table, num_tokens=4)
    assert (step.num_decodes, step.prefill) == (4, None)
    out = indexer.pick(step, batch.q[:6], batch.cache, torch.full_like(batch.out[:6], SENTINEL))
    assert out[1:4, 0, 0].tolist() == [0, 0, 0] and (out[4:] == SENTINEL).all()


@pytest.mark.parametrize("out_layout", ["thk", "htk"])
@pytest.mark.parametrize("num_tokens", [None, 2, 3, 4, 6])
def test_rows_of_q_decide_how_many_empty_requests_are_decoded(executor, num_tokens, out_layout):
    """One live request of two queries, then two without queries: an eager engine has rows for the first only."""
    case = PrefillCase("eager", "bf16", ((2, 2290),), data="integer", empty_row="block_zero", out_layout=out_layout)
    batch = build_prefill(case).to(executor.device)
    indexer = executor.indexer(case.layout(), **{**case.options(), "max_requests": 3, "max_query_len": 2})
    lens = torch.cat([batch.seq_lens, torch.zeros(2, dtype=torch.int32, device=executor.device)])
    table = batch.block_table.repeat(3, 1)
    step = indexer.plan_step([0, 2, 2, 2], lens, table, num_tokens=num_tokens)
    decoded = (num_tokens or 2) // 2
    assert (step.num_decodes, step.num_decode_tokens, step.num_prefills) == (decoded, decoded * 2, 0)
    rows = num_tokens or 2
    q, shape = batch.q[:2].repeat(3, 1, 1)[:rows], (rows, 1, 16) if out_layout == "thk" else (1, rows, 16)
    out = torch.full(shape, SENTINEL, dtype=torch.int32, device=executor.device)
    indexer.pick(step, q, batch.cache, out)
    rows_first = out if out_layout == "thk" else out.transpose(0, 1)
    plan = indexer.plan_decode(batch.block_table, batch.seq_lens, query_len=2)
    wanted = indexer.decode(plan, batch.q[:2], batch.cache, torch.empty_like(batch.out))
    assert torch.equal(rows_first[:2], wanted if out_layout == "thk" else wanted.transpose(0, 1))
    assert rows_first[2 : decoded * 2, 0].tolist() == [[0] + [-1] * 15] * (decoded * 2 - 2)
    assert bool((rows_first[decoded * 2 :] == SENTINEL).all())


def test_a_dummy_step_without_rows_does_nothing(one_executor):
    case = PrefillCase("dummy", "bf16", ((1, 300), (1, 100)))
    batch = build_prefill(case).to(one_executor.device)
    indexer = one_executor.indexer(case.layout(), **case.options())
    step = indexer.plan_step([0, 0, 0], torch.zeros_like(batch.seq_lens), batch.block_table)
    assert (step.decode, step.prefill) == (None, None)
    indexer.pick(step, batch.q[:0], batch.cache, batch.out[:0])
    assert indexer.stats()["plans"] == indexer.stats()["decode_calls"] == 0


def test_two_steps_in_flight(executor):
    """``slots=2``: two mixed steps are planned, then picked in turn; each gives what it gives alone."""
    cases = [
        PrefillCase("slots", "nvfp4", requests, data="integer", rounding="exact", seed=seed)
        for seed, requests in enumerate((((2, 2290), (9, 700)), ((2, 900), (11, 2300))))
    ]
    options = {**cases[0].options(), "max_query_len": 2, "max_prefill_tokens": 16, "max_seq_len": 20 * 128}
    batches = [build_prefill(case).to(executor.device) for case in cases]
    indexer, outs, steps = executor.indexer(cases[0].layout(), **options, slots=2), [], []
    for slot, batch in enumerate(batches):
        steps.append(indexer.plan_step(batch.cu_seqlens_q.cpu(), batch.seq_lens, batch.block_table[:, :19], slot=slot))
    for _ in range(2):
        outs = [
            indexer.pick(step, batch.q, batch.cache, torch.full_like(batch.out, SENTINEL))
            for step, batch in zip(steps, batches, strict=True)
        ]
    for batch, out in zip(batches, outs, strict=True):
        alone = executor.indexer(cases[0].layout(), **options)
        step = alone.plan_step(batch.cu_seqlens_q.cpu(), batch.seq_lens, batch.block_table[:, :19])
        assert torch.equal(out, alone.pick(step, batch.q, batch.cache, torch.full_like(out, SENTINEL)))


def test_an_unpopulated_table_is_safe(executor):
    """What a capture's warm-up plans: garbage page ids in decodes and prefills are clamped into the pool."""
    layout = CacheLayout("nvfp4")
    cache = layout.empty(2, executor.device)
    cache.fill_(0x11)
    indexer = executor.indexer(layout, max_requests=2, max_seq_len=30 * 128, max_prefill_tokens=5)
    table = torch.randint(-(2**31), 2**31 - 1, (2, 30), generator=torch.Generator().manual_seed(3)).int()
    lens = torch.tensor([3000, 130], dtype=torch.int32, device=executor.device)
    q = torch.zeros(5, 1, 128, device=executor.device).to(torch.float8_e4m3fn)
    out = torch.full((5, 1, 16), SENTINEL, dtype=torch.int32, device=executor.device)
    indexer.pick(indexer.plan_step([0, 1, 5], lens, table.to(executor.device)), q, cache, out)
    assert out[0, 0].tolist() == [23, *range(15)]
    assert out[1:3, 0].tolist() == [[0] + [-1] * 15] * 2
    assert out[3:, 0].tolist() == [[1, 0] + [-1] * 14] * 2


def test_buffers_of_a_slot_never_move_and_late_copies_are_whole(one_executor):
    """More steps than the staging ring has places: every plan sees its own starts, at one address."""
    case = PrefillCase("ring", "bf16", ((9, 300), (10, 300)), data="integer")
    batch = build_prefill(case).to(one_executor.device)
    indexer = one_executor.indexer(case.layout(), **case.options())
    places = set()
    for step in range(2 * STAGED_STEPS + 1):
        first = 9 + step % 2  # alternately 9 and 10 queries of the first request
        planned = indexer.plan_step([0, first, 19], batch.seq_lens, batch.block_table)
        places.add(planned.prefill.cu_seqlens_q.data_ptr())
        assert planned.prefill.cu_seqlens_q.tolist() == [0, first, 19]
    assert len(places) == 1


def reference_indexer(**options: Any) -> Indexer:
    options = {"max_requests": 2, "max_seq_len": 512, "max_prefill_tokens": 8, **options}
    return Indexer(CacheLayout("bf16"), device="cpu", backend="reference", **options)


@pytest.mark.parametrize("every,offset", [(1, 0), (3, 0), (4, 2), (2, 5)])
def test_which_layers_pick(every, offset):
    """Layer n reuses when max(n - offset, 0) % every is not 0; the first layer always picks."""
    indexer = reference_indexer(topk_every=every, topk_offset=offset)
    picking = [layer for layer in range(57) if indexer.picks(layer)]
    assert picking == [*range(min(offset, 57)), *range(offset, 57, every)]


@pytest.mark.parametrize("name,value", [("topk_every", 0), ("topk_every", 1.5), ("topk_offset", -1)])
def test_bad_sharing_is_refused(name, value):
    with pytest.raises(UnsupportedConfigError, match=name):
        reference_indexer(**{name: value})


@pytest.mark.requires(ngpus=1)
def test_planning_inside_a_capture_raises_at_once(executor):
    case = PrefillCase("capture", "bf16", ((1, 300), (9, 300)))
    batch = build_prefill(case).to(executor.device)
    indexer = executor.indexer(case.layout(), **case.options())
    indexer.plan_step([0, 1, 10], batch.seq_lens, batch.block_table)
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(RuntimeError, match="plan_step: not allowed inside"):
        indexer.plan_step([0, 1, 10], batch.seq_lens, batch.block_table)


@pytest.mark.requires(ngpus=1)
def test_planning_does_not_synchronise_and_graphs_follow(executor):
    """A captured mixed step replays with the lengths of the step that was planned last; nothing reads back."""
    case = PrefillCase("follow", "nvfp4", ((2, 2290), (2, 2000), (40, 1000)), data="integer", rounding="exact")
    batch = build_prefill(case).to(executor.device)
    indexer = executor.indexer(case.layout(), **{**case.options(), "max_query_len": 2})
    starts, out = [0, 2, 4, 44], torch.full_like(batch.out, SENTINEL)
    step = indexer.plan_step(starts, batch.seq_lens, batch.block_table)
    indexer.pick(step, batch.q, batch.cache, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        indexer.pick(step, batch.q, batch.cache, out)
    shorter = batch.seq_lens - torch.tensor([300, 5, 130], dtype=torch.int32, device=executor.device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step = indexer.plan_step(starts, shorter, batch.block_table)
        graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    replayed = out.clone()
    assert torch.equal(replayed, indexer.pick(step, batch.q, batch.cache, torch.full_like(out, SENTINEL)))

# SPDX-License-Identifier: Apache-2.0
"""Planning an engine's step: which requests decode, which prefill, and that all rows get the ids of a plain prefill."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blockpick import CacheLayout, Indexer, UnsupportedConfigError
from blockpick.step import STAGED_STEPS, split_step
from blockpick.testing.cases import SENTINEL
from blockpick.testing.prefill_cases import PrefillCase, build_prefill


def starts_of(lengths: list[int]) -> list[int]:
    return [sum(lengths[:b]) for b in range(len(lengths) + 1)]


@pytest.mark.parametrize(
    "lengths,decodes,query_len",
    [
        ([1, 1, 1], 3, 1),
        ([4, 4, 4], 3, 4),
        ([4, 4, 0, 0], 4, 4),  # padding of a captured batch
        ([1, 1, 300, 7], 2, 1),
        ([2, 2, 1, 300], 2, 2),  # not uniform: the others are prefill
        ([1, 0, 300], 1, 1),  # no padding: queries follow
        ([300, 1], 0, 0),  # not decode-first: all is prefill
        ([9, 9], 0, 0),  # longer than max_query_len
        ([0, 0], 2, 1),  # a dummy run
        ([0, 3], 0, 0),
        ([8], 1, 8),
    ],
)
def test_who_decodes(lengths, decodes, query_len):
    assert split_step(starts_of(lengths), 8) == (decodes, query_len)


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
    step = indexer.plan_step([0, 1, 1, 1, 1], lens, table)
    assert (step.num_decodes, step.prefill) == (4, None)
    out = indexer.pick(step, batch.q[:6], batch.cache, torch.full_like(batch.out[:6], SENTINEL))
    assert out[1:4, 0, 0].tolist() == [0, 0, 0] and (out[4:] == SENTINEL).all()


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


@pytest.mark.parametrize(
    "starts,error,message",
    [
        ([0, 3], ValueError, "query_start_loc: must have 3 entries"),
        ([1, 3, 5], ValueError, "query_start_loc: must ascend from 0"),
        ([0, 4, 3], ValueError, "query_start_loc: must ascend from 0"),
        (torch.tensor([0.0, 1.0, 2.0]), TypeError, "query_start_loc: must be int32 or int64"),
        (7, TypeError, "query_start_loc: must be a tensor or a list, is int"),
        ([0, 9, 18], ValueError, "num_tokens.*max_prefill_tokens=8"),
    ],
)
def test_bad_starts_are_refused(starts, error, message):
    with pytest.raises(error, match=message):
        reference_indexer().plan_step(
            starts, torch.tensor([9, 9], dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32)
        )


def test_a_decode_only_indexer_refuses_prefill_requests():
    with pytest.raises(UnsupportedConfigError, match="pass max_prefill_tokens"):
        reference_indexer(max_prefill_tokens=0).plan_step(
            [0, 1, 5], torch.tensor([9, 9], dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32)
        )


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

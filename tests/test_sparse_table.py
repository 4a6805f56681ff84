# SPDX-License-Identifier: Apache-2.0
"""Sparse block-table emission of decode and prefill (section 1.6 of the contract), on every executor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from sparse_cases import (
    CASES,
    GUARD,
    PREFILL,
    check_decode_emission,
    check_prefill_emission,
    check_rows,
    check_rows_of_several_splits,
    sparse_table,
)

from blockpick import CacheLayout, Indexer, SparseTable
from blockpick.testing.cases import DecodeCase, build
from blockpick.testing.prefill_cases import PrefillCase, build_prefill


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_decode_emission_of_every_target(any_executor, case):
    check_decode_emission(any_executor, case, 8)


@pytest.mark.parametrize("topk", [16, 40])
def test_prefill_emission_of_every_target(any_executor, topk):
    check_prefill_emission(any_executor, replace(PREFILL, topk=topk), 16)


@pytest.mark.parametrize("topk", [16, 40])
def test_rows_of_several_splits(any_executor, topk):
    """Selection emits rows of one split, the merge all others."""
    check_rows_of_several_splits(any_executor, topk)


def run_decode(executor: Any, case: DecodeCase, **changes: Any) -> SparseTable:
    """Emit for a case with page size 128, attention pages numbered by request and block."""
    batch = build(case).to(executor.device)
    indexer = executor.indexer(case.layout(), **case.options())
    sparse = sparse_table(indexer, len(case.seq_lens), len(batch.q), batch.block_table.shape[1], 8)
    plan = indexer.plan_decode(batch.block_table, batch.seq_lens, query_len=case.query_len)
    indexer.decode(plan, batch.q, batch.cache, batch.out, sparse_table=replace(sparse, **changes))
    return sparse


def test_case_2_tail_entries_are_no_pages(executor):
    """Sequence of 300 tokens: three blocks, then -1: context 300, a zero tail, nothing read in front of the table."""
    sparse = run_decode(executor, DecodeCase("case2", "bf16", (300,), order="local_last"))
    table = sparse.table.cpu()
    assert sparse.context_lens.tolist() == [300]
    attention = sparse.attention_block_table[0, :3].cpu()
    assert table[0, :24].view(3, 8).tolist() == [[int(page) * 8 + j for j in range(8)] for page in attention]
    assert not table[0, 24:].any()


def test_case_9_speculative_queries_have_their_own_context(executor):
    """L = 4, S = 130: positions 126..129 see 1, 1, 2, 2 blocks and 127, 128, 129, 130 tokens."""
    sparse = run_decode(executor, DecodeCase("case9", "bf16", (130,), query_len=4))
    assert sparse.context_lens.tolist() == [127, 128, 129, 130]
    assert (sparse.table.cpu()[:, 8:16].any(1)).tolist() == [False, False, True, True]


def test_a_replay_over_another_plan_emits_empty_rows(executor):
    """Like the ids: what was launched for one batch shape writes empty rows after a plan of another."""
    case = DecodeCase("other", "bf16", (2500, 700), topk=4)
    batch = build(case).to(executor.device)
    indexer = executor.indexer(case.layout(), **case.options())
    sparse = sparse_table(indexer, 2, 2, batch.block_table.shape[1], 8)
    plan = indexer.plan_decode(batch.block_table, batch.seq_lens, query_len=1)
    indexer.plan_decode(batch.block_table[:1], batch.seq_lens[:1], query_len=1)
    indexer._engine.decode(plan, batch.q, batch.cache, batch.out, sparse)
    assert sparse.context_lens.tolist() == [0, 0] and not sparse.table.any()


STEPS = [  # decodes and prefills; decodes with an empty request behind them; prefills only
    (((3, 2290), (3, 700), (20, 2300), (5, 100)), 2, 33, 2),
    (((3, 2290), (3, 700), (0, 0)), 1, 9, 3),
    (((3, 2290), (3, 700), (0, 0)), 1, 6, 2),
    (((12, 2300), (1, 500)), 1, 14, 0),
]


@pytest.mark.parametrize("out_layout", ["thk", "htk"])
@pytest.mark.parametrize("requests,padding,rows,decodes", STEPS)
def test_a_step_writes_the_tables_of_both_halves(executor, requests, padding, rows, decodes, out_layout):
    """One table over all rows of the step; rows of padding keep their guards, and so does what an eager call refuses."""
    case = PrefillCase(
        "step", "e4m3fn", requests, num_heads=2, topk=4, padding=padding, data="integer", out_layout=out_layout
    )
    batch = build_prefill(case).to(executor.device)
    indexer = executor.indexer(case.layout(), **{**case.options(), "max_query_len": 3, "max_prefill_tokens": 64})
    sparse = sparse_table(indexer, len(requests), rows, case.width, 8)
    step = indexer.plan_step(batch.cu_seqlens_q.cpu(), batch.seq_lens, batch.block_table, num_tokens=rows)
    assert step.num_decodes == decodes
    q = batch.q[:1].repeat(rows, 1, 1)
    q[: min(rows, len(batch.q))] = batch.q[:rows]
    shape = (rows, 2, 4) if out_layout == "thk" else (2, rows, 4)
    out = torch.full(shape, GUARD, dtype=torch.int32, device=executor.device)
    indexer.pick(step, q, batch.cache, out, sparse_table=sparse)
    ids, first = (out if out_layout == "thk" else out.transpose(0, 1)).cpu(), 0
    for b, (query_len, prefix) in enumerate(requests):
        if b < decodes and query_len == 0:  # of padding, decoded with rows of its own
            check_rows(sparse, ids, b, first, [-3, -2, -1])
            first += 3
            continue
        check_rows(sparse, ids, b, first, [prefix + i for i in range(query_len)])
        first += query_len
    assert sparse.table[first * 2 :].numel() == (rows - first) * 2 * 32
    for written in (sparse.table[first * 2 :], sparse.context_lens[first * 2 :], ids[first:]):
        assert bool((written == GUARD).all())


@pytest.mark.parametrize("page_size,max_seq_len,bound,least", [
    (256, 384, None, 3), (256, 1024, 384, 3), (256, 1024, None, 8), (128, 384, None, 3), (256, 130, None, 2), (256, 128, None, 1),
])  # fmt: skip
def test_the_least_width_is_that_of_the_longest_request(one_executor, page_size, max_seq_len, bound, least):
    """One entry for each of ceil(max_seq_len / 128) blocks, whatever the index cache's pages; one less is refused."""
    layout, device = CacheLayout("bf16", page_size), one_executor.device
    indexer = one_executor.indexer(layout, topk=4, max_requests=1, max_seq_len=max_seq_len, max_prefill_tokens=1)
    table = torch.arange(-(-max_seq_len // page_size), dtype=torch.int32, device=device)[None]
    length = bound or max_seq_len
    lens = torch.tensor([length], dtype=torch.int32, device=device)
    q, cache = torch.zeros(1, 1, 128, dtype=torch.bfloat16, device=device), layout.empty(8, device).zero_()
    starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
    prefill = (indexer.prefill, lambda: indexer.plan_prefill(starts, lens, table, num_tokens=1, max_seq_len=bound))
    decode = (indexer.decode, lambda: indexer.plan_decode(table, lens, query_len=1))
    step = (indexer.pick, lambda: indexer.plan_step([0, 1], lens, table))
    for call, make_plan in (prefill,) if bound else (prefill, decode, step):
        plan = make_plan()
        for width in (least, least - 1):
            fields = good(attention_block_table=torch.arange(max(width, 0), dtype=torch.int32)[None])
            sparse = SparseTable(**{n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in fields.items()})
            out = torch.full((1, 1, 4), GUARD, dtype=torch.int32, device=device)
            if width < least:
                with pytest.raises(ValueError, match=rf"attention_block_table: must be at least \[1, {least}\]"):
                    call(plan, q, cache, out, sparse_table=sparse)
                continue
            call(plan, q, cache, out, sparse_table=sparse)
            assert int(sparse.context_lens) == min(length, 4 * 128)


def good(**changes: Any) -> dict[str, Any]:
    """Fields of a good sparse table for one request, one token, one head and topk 4."""
    fields = {
        "attention_block_table": torch.zeros(1, 4, dtype=torch.int32), "block_page_stride": 8,
        "table": torch.full((1, 32), GUARD, dtype=torch.int32), "context_lens": torch.full((1,), GUARD, dtype=torch.int32),
    }  # fmt: skip
    return {**fields, **changes}


BAD = [
    ({"block_page_stride": 4}, ValueError, "block_page_stride: must be 8 or 16, is 4"),
    ({"attention_block_table": torch.zeros(1, 3, dtype=torch.int32)}, ValueError, r"at least \[1, 4\]"),
    ({"attention_block_table": torch.zeros(1, 4)}, TypeError, "attention_block_table: dtype must be torch.int32"),
    ({"table": torch.zeros(1, 31, dtype=torch.int32)}, ValueError, r"table: must be contiguous \[1, 32\]"),
    ({"table": torch.zeros(32, 1, dtype=torch.int32).t()[:, ::1].expand(1, 32)[:, :16]}, ValueError, "table: must be"),
    ({"context_lens": torch.zeros(2, dtype=torch.int32)}, ValueError, r"context_lens: must be contiguous \[1\]"),
    ({"context_lens": torch.zeros(1, dtype=torch.int64)}, TypeError, "context_lens: dtype must be torch.int32"),
]


@pytest.mark.parametrize("changes,error,message", BAD)
def test_bad_tables_are_refused_and_nothing_is_written(changes, error, message):
    indexer = Indexer(CacheLayout("bf16"), topk=4, max_requests=1, max_seq_len=512, device="cpu", backend="reference")
    plan = indexer.plan_decode(torch.zeros(1, 4, dtype=torch.int32), torch.tensor([3], dtype=torch.int32), query_len=1)
    q, cache = torch.zeros(1, 1, 128, dtype=torch.bfloat16), indexer.config.layout.empty(1, "cpu").zero_()
    out = torch.full((1, 1, 4), GUARD, dtype=torch.int32)
    with pytest.raises(error, match=message):
        indexer.decode(plan, q, cache, out, sparse_table=SparseTable(**good(**changes)))
    assert out.unique().tolist() == [GUARD]
    with pytest.raises(TypeError, match="sparse_table: must be a SparseTable, is dict"):
        indexer.decode(plan, q, cache, out, sparse_table=good())

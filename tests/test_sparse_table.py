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
    check_rows_of_several_splits,
    sparse_table,
)

from blockpick import CacheLayout, Indexer, SparseTable
from blockpick.testing.cases import DecodeCase, build


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

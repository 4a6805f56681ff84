# SPDX-License-Identifier: Apache-2.0
"""A refused step leaves everything as it was: no half is planned or picked before both are checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from blockpick import CacheLayout, Indexer, SparseTable, StalePlanError, UnsupportedConfigError
from blockpick.step import StepPlan
from blockpick.testing.cases import SENTINEL

LAYOUT = CacheLayout("bf16")
CACHE = torch.randn(8, 128, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
TABLE = torch.arange(8, dtype=torch.int32).repeat(4, 1)
LENS = torch.tensor([300, 400], dtype=torch.int32)


def indexer_of(**options: Any) -> Indexer:
    options = {"max_requests": 4, "max_seq_len": 1024, "max_prefill_tokens": 16, "max_query_len": 4, **options}
    return Indexer(LAYOUT, device="cpu", backend="reference", **options)


def queries(rows: int) -> torch.Tensor:
    return torch.ones(rows, 1, 128).bfloat16()


def refused(indexer: Indexer, call: Callable[[], object], error: type[Exception], message: str) -> None:
    """``call`` raises, launches nothing, and the slot's earlier plans stay valid."""
    before = indexer.stats(), list(indexer._plans), list(indexer._prefill_plans)
    with pytest.raises(error, match=message):
        call()
    assert (indexer.stats(), list(indexer._plans), list(indexer._prefill_plans)) == before


# ---- plan_step ----

STARTS = [
    ([0, 3], ValueError, "query_start_loc: must have 3 entries"),
    ([1, 3, 5], ValueError, "query_start_loc: must ascend from 0"),
    ([0, 4, 3], ValueError, "query_start_loc: must ascend from 0"),
    (torch.tensor([0.0, 1.0, 2.0]), TypeError, "query_start_loc: must be int32 or int64"),
    (torch.zeros(3, 1, dtype=torch.int32), TypeError, "query_start_loc: must be int32 or int64"),
    (7, TypeError, "query_start_loc: must be a tensor or a list, is int"),
    (None, TypeError, "query_start_loc: must be a tensor or a list, is NoneType"),
    ("012", TypeError, "query_start_loc: must be a tensor or a list, is str"),
    ([0, 1.7, 2.9], TypeError, r"query_start_loc: entries must be integers, one is 1\.7 \(float\)"),
    ([0, 1.0, 2.0], TypeError, "query_start_loc: entries must be integers"),
    (["0", "1", "2"], TypeError, r"query_start_loc: .*'0' \(str\)"),
    ([0, None, 2], TypeError, r"query_start_loc: .*None \(NoneType\)"),
    ([False, True, 2], TypeError, r"query_start_loc: .*False \(bool\)"),
    (np.array([0.0, 1.0, 2.0]), TypeError, "query_start_loc: entries must be integers"),
    (np.array([False, True, True]), TypeError, "query_start_loc: entries must be integers"),
    (np.zeros((3, 2), dtype=np.int64), TypeError, "query_start_loc: entries must be integers"),
    ([0, 1, 2**40], ValueError, f"query_start_loc: must end at 2147483647 at most, ends at {2**40}"),
    (torch.tensor([0, 1, 2**40]), ValueError, "query_start_loc: must end at 2147483647 at most"),
    ([0, 20, 40], ValueError, r"num_tokens: must be 1..16 \(0 rows of decodes, max_prefill_tokens=16\), is 40"),
    ([0, 1, 60], ValueError, r"num_tokens: must be 2..17 \(1 rows of decodes, max_prefill_tokens=16\), is 60"),
]


@pytest.mark.parametrize("starts,error,message", STARTS)
def test_bad_starts(starts, error, message):
    indexer = indexer_of()
    indexer.plan_decode(TABLE[:1], LENS[:1], query_len=1)
    refused(indexer, lambda: indexer.plan_step(starts, LENS, TABLE[:2]), error, message)


@pytest.mark.parametrize(
    "starts",
    [range(3), np.array([0, 1, 2]), np.array([0, 1, 2], dtype=np.uint8), [np.int64(0), np.int32(1), 2], (0, 1, 2),
     torch.tensor([0, 1, 2])],
)  # fmt: skip
def test_integers_of_every_kind_are_starts(starts):
    step = indexer_of().plan_step(starts, LENS, TABLE[:2])
    assert (step.num_decodes, step.num_decode_tokens, step.prefill) == (2, 2, None)


@pytest.mark.parametrize("num_tokens", [3, 5, 0, -5, True, 2.5, 6.0, "9", 10**9, 2**40])
@pytest.mark.parametrize("starts", [[0, 1, 6], [0, 3, 6]], ids=["mixed", "decodes"])
def test_bad_num_tokens(starts, num_tokens):
    """Fewer rows than queries would drop live rows; more than any step has are a mistake."""
    indexer = indexer_of()
    indexer.plan_decode(TABLE[:1], LENS[:1], query_len=1)
    call = lambda: indexer.plan_step(starts, LENS, TABLE[:2], num_tokens=num_tokens)  # noqa: E731
    refused(indexer, call, ValueError, "num_tokens: must be ")


@pytest.mark.parametrize("max_seq_len", [0, -3, 1025, 10**9, 2.5, True])
@pytest.mark.parametrize("starts", [[0, 1, 6], [0, 3, 6]], ids=["mixed", "decodes"])
def test_bad_max_seq_len(starts, max_seq_len):
    indexer = indexer_of()
    indexer.plan_decode(TABLE[:1], LENS[:1], query_len=1)
    call = lambda: indexer.plan_step(starts, LENS, TABLE[:2], max_seq_len=max_seq_len)  # noqa: E731
    refused(indexer, call, ValueError, "max_seq_len: must be 1..1024")


def test_a_decode_only_indexer_refuses_prefill_requests():
    indexer = indexer_of(max_prefill_tokens=0)
    plan = indexer.plan_decode(TABLE[:1], LENS[:1], query_len=1)
    call = lambda: indexer.plan_step([0, 1, 6], LENS, TABLE[:2])  # noqa: E731
    refused(indexer, call, UnsupportedConfigError, "pass max_prefill_tokens")
    indexer.decode(plan, queries(1), CACHE, torch.empty(1, 1, 16, dtype=torch.int32))


# ---- pick ----


def sparse_of(rows: int, **changes: Any) -> SparseTable:
    sparse = SparseTable(
        torch.arange(16, dtype=torch.int32).view(2, 8), 8, torch.full((rows, 128), SENTINEL, dtype=torch.int32),
        torch.full((rows,), SENTINEL, dtype=torch.int32),
    )  # fmt: skip
    return replace(sparse, **changes)


@pytest.mark.parametrize("out_layout", ["thk", "htk"])
@pytest.mark.parametrize("starts", [[0, 1, 6], [0, 3, 6], [0, 6, 12]], ids=["mixed", "decodes", "prefills"])
@pytest.mark.parametrize(
    "rows,out_rows,message",
    [(0, 0, "q: must have"), (-1, -1, "q: must have"), (-1, 0, "q: must have"), (0, -1, "out: must have shape"),
     (0, 3, "out: must have shape"), (3, 3, "q: must have"), (3, 0, "q: must have|out: must have")],
)  # fmt: skip
def test_wrong_numbers_of_rows(starts, out_layout, rows, out_rows, message):
    """Rows more or fewer than the step's, in q and in out; (0, 0) stands for no rows at all."""
    indexer = indexer_of(out_layout=out_layout)
    step = indexer.plan_step(starts, LENS, TABLE[:2])
    count, whole = (0, 0) if rows == out_rows == 0 else (starts[-1] + rows, starts[-1] + out_rows)
    out = torch.full((whole, 1, 16) if out_layout == "thk" else (1, whole, 16), SENTINEL, dtype=torch.int32)
    if rows == out_rows == 3 and step.prefill is None:  # rows of padding behind a step of decodes
        indexer.pick(step, queries(count), CACHE, out)
        written = (out != SENTINEL).any(2).flatten()
        assert written.tolist() == [True] * starts[-1] + [False] * 3
        return
    refused(indexer, lambda: indexer.pick(step, queries(count), CACHE, out), ValueError, message)
    assert bool((out == SENTINEL).all())


BAD = [
    ({"q": torch.ones(6, 1, 128)}, TypeError, "q: dtype"),
    ({"q": torch.ones(6, 2, 128).bfloat16()}, ValueError, "q: must be"),
    ({"cache": CACHE.float()}, TypeError, "cache: dtype"),
    ({"out": torch.full((6, 1, 16), SENTINEL)}, TypeError, "out: dtype"),
    ({"out": torch.full((6, 1, 15), SENTINEL, dtype=torch.int32)}, ValueError, "out: must have shape"),
    ({"sparse_table": sparse_of(5)}, ValueError, r"table: must be contiguous \[6, 128\]"),
    ({"sparse_table": sparse_of(6, context_lens=torch.zeros(5, dtype=torch.int32))}, ValueError, "context_lens: must"),
    ({"sparse_table": sparse_of(6, attention_block_table=torch.zeros(1, 8, dtype=torch.int32))}, ValueError,
     r"attention_block_table: must be at least \[2, 8\]"),
    ({"sparse_table": sparse_of(6, block_page_stride=4)}, ValueError, "block_page_stride: must be 8 or 16"),
    ({"sparse_table": {}}, TypeError, "sparse_table: must be a SparseTable, is dict"),
]  # fmt: skip


@pytest.mark.parametrize("changes,error,message", BAD, ids=[f"{next(iter(b[0]))}-{n}" for n, b in enumerate(BAD)])
@pytest.mark.parametrize("starts", [[0, 1, 6], [0, 3, 6]], ids=["mixed", "decodes"])
def test_bad_tensors(starts, changes, error, message):
    indexer = indexer_of()
    step = indexer.plan_step(starts, LENS, TABLE[:2])
    good = {"q": queries(6), "cache": CACHE, "out": torch.full((6, 1, 16), SENTINEL, dtype=torch.int32)}
    call = {**good, **changes}
    refused(indexer, lambda: indexer.pick(step, **call), error, message)
    assert bool((call["out"] == SENTINEL).all())
    sparse = changes.get("sparse_table")
    if isinstance(sparse, SparseTable):
        assert sparse.table.unique().tolist() == [SENTINEL]


def test_other_things_than_steps():
    indexer = indexer_of()
    decode = indexer.plan_decode(TABLE[:1], LENS[:1], query_len=1)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    prefill = indexer.plan_prefill(starts, LENS[:1], TABLE[:1], num_tokens=1)
    out = torch.full((1, 1, 16), SENTINEL, dtype=torch.int32)
    for thing in (decode, prefill, None, 3, (decode, None)):
        message = f"step: must be a StepPlan, is {type(thing).__name__}"
        refused(indexer, lambda thing=thing: indexer.pick(thing, queries(1), CACHE, out), TypeError, message)
    assert bool((out == SENTINEL).all())


def stale_steps(indexer: Indexer) -> dict[str, StepPlan]:
    """Steps of which one half or both were planned again, or that belong to another indexer."""
    both = indexer.plan_step([0, 1, 6], LENS, TABLE[:2])
    other = indexer_of().plan_step([0, 1, 6], LENS, TABLE[:2])
    prefill = indexer.plan_step([0, 6], LENS[1:], TABLE[:1])
    decode = indexer.plan_step([0, 1, 2], LENS, TABLE[:2])
    return {
        "both halves": both, "another indexer's": other,
        "stale prefill": replace(both, decode=decode.decode), "stale decode": replace(both, prefill=prefill.prefill),
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["both halves", "another indexer's", "stale prefill", "stale decode"])
def test_stale_steps(kind):
    indexer = indexer_of()
    step = stale_steps(indexer)[kind]
    out = torch.full((6, 1, 16), SENTINEL, dtype=torch.int32)
    refused(indexer, lambda: indexer.pick(step, queries(6), CACHE, out), StalePlanError, "plan: generation")
    assert bool((out == SENTINEL).all())

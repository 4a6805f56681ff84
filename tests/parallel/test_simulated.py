# SPDX-License-Identifier: Apache-2.0
"""Ranks of one process: phase by phase everywhere, and on streams of one GPU, where they really wait for each other."""

from __future__ import annotations

import pytest
import torch
from parallel.context_cases import CASES, SENTINEL, TOTAL_HEADS, ContextCase, heads_of

from blockpick.testing.simulated import decode_in_phases, simulated_groups


def indexers_of(executor, case, size):
    """An indexer per simulated rank."""
    heads = heads_of(0, size)
    return [
        executor.indexer(case.layout, num_heads=heads.stop, parallel="context", group=group, **case.options)
        for group in simulated_groups(size, executor.device)
    ]


def replicated_on(executor, case):
    """Ids of all heads on one rank."""
    cache, table, lens, q = (tensor.to(executor.device) for tensor in case.batch())
    options = {**case.options, "out_layout": "thk"}
    indexer = executor.indexer(case.layout, num_heads=TOTAL_HEADS, **options)
    out = torch.full((len(q), TOTAL_HEADS, case.topk), SENTINEL, dtype=torch.int32, device=executor.device)
    return indexer.decode(indexer.plan_decode(table, lens, query_len=case.query_len), q, cache, out)


def check_phases(executor, case, size):
    """Decode in phases twice; ids of every rank are those of replicated decode. Returns the ranks' indexers and plans."""
    expected = replicated_on(executor, case)
    cache, table, lens, q = (tensor.to(executor.device) for tensor in case.batch())
    indexers = indexers_of(executor, case, size)
    shares = [heads_of(rank, size) for rank in range(size)]
    queries = [q[:, share].contiguous() for share in shares]
    plans = [indexer.plan_decode(table, lens, query_len=case.query_len) for indexer in indexers]
    for _ in range(2):  # both parities
        outs = [torch.full_like(expected[:, share], SENTINEL).contiguous() for share in shares]
        given = outs if case.out_layout == "thk" else [out.transpose(0, 1).contiguous() for out in outs]
        with executor.sharing(indexers[0]._engine._exchange.tensors):
            decode_in_phases(indexers, plans, queries, cache, given)
        for rank, (share, out) in enumerate(zip(shares, given, strict=True)):
            found = out if case.out_layout == "thk" else out.transpose(0, 1)
            assert torch.equal(found, expected[:, share]), f"rank {rank}"
    return indexers, plans


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_phases(one_executor, case, size):
    check_phases(one_executor, case, size)


@pytest.mark.gpu
@pytest.mark.requires(ngpus=1)
@pytest.mark.parametrize("size,dtype,replays", [(2, "bf16", 10_000), (4, "nvfp4", 10_000), (8, "e4m3fn", 2_000)])
def test_replays_on_streams(size, dtype, replays):
    """Graphs of all ranks replayed with changing inputs, ranks held up in turn: no wrong id, no failed wait."""
    from parallel.simulated_soak import soak_streams

    case = ContextCase(f"streams-{dtype}", dtype, lens=(2500, 2304, 2559), query_len=2, order="score")
    wrong, records = soak_streams(case, size, replays)
    assert wrong == [] and records == [0] * size

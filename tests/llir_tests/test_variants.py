# SPDX-License-Identifier: Apache-2.0
"""Every compiled AMD binary, executed at LLVM-IR level through the ROCm loader, in both wave orders.

These runs are the ones that make a variant count as executed: at least three requests, more than topk blocks, a partial
last block, and a tie between blocks that different programs scored (of the ops that score or select; inserting knows no ties).
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from conformance import CACHES as DTYPES
from conformance import CONFORMANCE, SELECTIONS, SHORT_PREFILLS, check_selection
from executors import GPU, IR_ARCHS, IR_ORDERS, ir_executor
from fused_cases import check_fused_insert
from llir_tests.context_checks import part_score_checks
from parallel.context_cases import SHARD_SCORERS, TOTAL_HEADS, ContextCase
from parallel.test_simulated import check_phases
from sparse_cases import (
    CASES,
    PREFILL,
    check_decode_emission,
    check_prefill_emission,
    check_rows_of_several_splits,
)

from blockpick import CacheLayout
from blockpick.parallel.heads import BlockShare
from blockpick.testing.cases import DecodeCase, build, check_batch, poison
from blockpick.testing.prefill_cases import PrefillCase, run_prefill_case
from blockpick.testing.reference import insert_reference

pytestmark = pytest.mark.skipif(GPU, reason="executed on machines without a GPU")
EXECUTORS = [ir_executor(arch, order, counted=True) for arch, order in itertools.product(IR_ARCHS, IR_ORDERS)]
by_name = pytest.mark.parametrize("machine", EXECUTORS, ids=lambda machine: machine.name)


def ties_across_programs(case: DecodeCase, indexer: Any, plan: Any) -> int:
    """Pairs of one row's blocks with equal scores that different workgroups of the scorer computed."""
    blocks = [-(-length // 128) for length in case.seq_lens]
    units, total = indexer._engine.decodes[0].units[case.query_len - 1], sum(blocks)
    starts = torch.tensor([0, *itertools.accumulate(blocks)])
    edges = torch.tensor([unit * total // units for unit in range(1, units)])
    pairs = 0
    for b, count in enumerate(blocks):
        unit = torch.searchsorted(edges, starts[b] + torch.arange(count), right=True)
        row = indexer.scores(plan)[b, -1, 0, :count]
        equal = (row[:, None] == row[None, :]) & (unit[:, None] != unit[None, :])
        pairs += int(equal.sum()) // 2
    return pairs


@by_name
@pytest.mark.parametrize("case", CONFORMANCE, ids=lambda c: c.name)
def test_decode_variants(machine: Any, case: DecodeCase) -> None:
    lens = case.seq_lens
    assert len(lens) >= 3 and max(lens) > 128 * case.topk and max(lens) % 128 and case.data == "integer"
    indexer = machine.indexer(case.layout(), **case.options())
    batch = build(case)
    check_batch(case, indexer, batch)
    assert ties_across_programs(case, indexer, indexer._plans[0]) > 0


@by_name
@pytest.mark.parametrize("case", SELECTIONS, ids=lambda c: c.name)
def test_selection_variants(machine: Any, case: DecodeCase) -> None:
    """Rows of several splits: what scoring thousands of blocks would show of selection, in a hundredth of the time."""
    check_selection(case, machine.indexer(case.layout(), **case.options()))


@by_name
@pytest.mark.parametrize("case", SHORT_PREFILLS, ids=lambda case: case.name)
def test_prefill_variants(machine: Any, case: PrefillCase) -> None:
    assert prefill_ties_across_programs(run_prefill_case(case, machine.indexer, "cpu")) > 0


def prefill_ties_across_programs(indexer: Any) -> int:
    """Pairs of one row's blocks with equal scores that different workgroups of the prefill scorer computed."""
    engine, plan = indexer._engine, indexer._prefill_plans[0]
    slot, pick = engine.buffers[0], engine.prefills[0]
    spans = slot["spans"].reshape(-1)[: (plan.num_requests + 1) * 4].view(-1, 4).tolist()
    scores, (_, piece, *_) = indexer.prefill_scores(plan), spans.pop()
    pairs = 0
    for item, tiles, token, _ in spans:
        if tiles:
            count = int(slot["prefill_positions"][token]) // 128 + 1
            row, blocks = scores[token, 0, :count], torch.arange(count)
            program = (item + blocks // piece * tiles) % pick._units  # of the request's first tile
            pairs += int(((row[:, None] == row) & (program[:, None] != program)).sum()) // 2
    return pairs


CONTEXTS = [  # of both capacities, over 2 and 4 ranks
    (ContextCase("context-k16-score", lens=(2500, 2304, 641), query_len=1, seed=15), 2),
    (ContextCase("context-k17-local_last", "e4m3fn", lens=(2600, 2304, 641), query_len=1, topk=17, order="local_last",
                 page_size=256, seed=6), 4),
    *SHARD_SCORERS,
]  # fmt: skip


@by_name
@pytest.mark.parametrize("case,size", CONTEXTS, ids=lambda value: str(value))
def test_context_variants(machine: Any, case: ContextCase, size: int) -> None:
    """All kernels of decode over ranks, phase by phase."""
    lens = case.lens
    assert len(lens) >= 3 and max(lens) > 128 * case.topk and max(lens) % 128 and case.data in ("integer", "few")
    indexers, plans = check_phases(machine, case, size)
    scores = [indexer.scores(plan) for indexer, plan in zip(indexers, plans, strict=True)]
    assert ties_across_ranks(case, scores, indexers[0]._engine.context_sizes.blocks) > 0


def ties_across_ranks(case: ContextCase, scores: list[torch.Tensor], share: BlockShare) -> int:
    """Rows in which blocks of different ranks have the score of the last place, for more of them than there is room.
    Of a block of which several ranks score a part it is the rank of the best one.
    """
    found, room = 0, case.topk - case.local_blocks
    for b, length in enumerate(case.lens):
        blocks = -(-length // 128)
        if blocks <= case.topk:
            continue
        for head in range(TOTAL_HEADS):
            row, source = torch.full((blocks,), -float("inf")), torch.zeros(blocks)
            for rank, own in enumerate(scores):
                mine = torch.arange(share.first_block(rank), blocks, share.step)
                part = own[b, -1, head, : len(mine)]
                better = part > row[mine]
                row[mine], source[mine] = torch.where(better, part, row[mine]), torch.where(better, rank, source[mine])
            history = row[: blocks - case.local_blocks]
            last = history.sort(descending=True).values[room - 1]
            equal = (history == last).nonzero()[:, 0]
            more = int((history > last).sum()) + len(equal) > room
            found += more and len(source[equal].unique()) > 1
    return found


@pytest.mark.parametrize("machine", EXECUTORS[::2], ids=lambda machine: machine.name)
@pytest.mark.parametrize("queries", [4, 8])
@pytest.mark.parametrize("dtype,rounding", DTYPES)
def test_part_scores(machine: Any, dtype: str, rounding: str | None, queries: int) -> None:
    part_score_checks(dtype, rounding, queries)(machine)


def check_insert(machine: Any, dtype: str) -> None:
    """Three requests of 2500, 700 and 130 tokens, the last pages partial; bytes equal the oracle's, also around them."""
    layout, lens = CacheLayout(dtype), (2500, 700, 130)
    generator = torch.Generator().manual_seed(5)
    pages = torch.randperm(40, generator=generator)
    counts = [-(-length // 128) for length in lens]
    starts = [0, *itertools.accumulate(counts)]
    slots = torch.cat(
        [
            pages[start + torch.arange(n) // 128] * 128 + torch.arange(n) % 128
            for start, n in zip(starts, lens, strict=False)
        ]
    )
    slots[::97] = -1
    keys = torch.randn(len(slots), 128, generator=generator).bfloat16()
    keys[5, 7], keys[6, 9] = float("nan"), float("inf")
    keys[40:56] = 0
    caches = [layout.empty(40, "cpu") for _ in range(2)]
    for cache in caches:
        poison(cache, layout)
    machine.insert(layout, caches[0], keys, slots)
    insert_reference(layout, caches[1], keys, slots)
    assert torch.equal(caches[0].view(torch.uint8), caches[1].view(torch.uint8))


@by_name
def test_emission_variants(machine: Any) -> None:
    for case in CASES:
        check_decode_emission(machine, case, 8)
    check_prefill_emission(machine, PREFILL, 16)
    check_rows_of_several_splits(machine, 16)
    check_rows_of_several_splits(machine, 40)


@by_name
@pytest.mark.parametrize("dtype", ["bf16", "e4m3fn", "nvfp4"])
def test_fused_insert_variants(machine: Any, dtype: str) -> None:
    check_fused_insert(machine, dtype)


@by_name
@pytest.mark.parametrize("dtype", ["bf16", "e4m3fn", "nvfp4"])
def test_insert_variants(machine: Any, dtype: str) -> None:
    check_insert(machine, dtype)

# SPDX-License-Identifier: Apache-2.0
"""Ranks of one process: phase by phase everywhere, and on streams of one GPU, where they really wait for each other."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from executors import interpreted
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parallel.context_cases import CASES, SENTINEL, SHARD_SCORERS, SHARDED, TOTAL_HEADS, ContextCase, heads_of
from support import ROOT

from blockpick import CacheLayout, Indexer, UnsupportedConfigError, insert
from blockpick.testing.reference import select_blocks
from blockpick.testing.simulated import decode_in_phases, simulated_groups


def indexers_of(executor, case, size):
    """An indexer per simulated rank."""
    heads = heads_of(0, size)
    return [
        executor.indexer(num_heads=heads.stop, group=group, **case.rank_options(size), **case.options)
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
    if case.sharded:
        cache = [case.rank_cache(rank, size).to(executor.device) for rank in range(size)]
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


@pytest.mark.parametrize("case", [CASES[0], ContextCase("wide", lens=(2500, 300), topk=20, query_len=1)], ids=str)
def test_phases_of_every_target(any_executor, case):
    """Both capacities of every architecture's kernels."""
    check_phases(any_executor, case, 2)


@pytest.mark.parametrize("case,size", SHARD_SCORERS, ids=str)
def test_phases_of_parts_on_every_target(any_executor, case, size):
    check_phases(any_executor, case, size)


SPREAD = [(case, (2, 4, 8)[number % 3]) for number, case in enumerate(CASES)]  # rank processes run every case on each


@pytest.mark.parametrize("case,size", SPREAD, ids=str)
def test_phases(one_executor, case, size):
    check_phases(one_executor, case, size)


DTYPES = 8  # the first of the sharded cases: every dtype and page size
SHARDS = [(case, size) for case in SHARDED[:DTYPES] for size in (2, 4)]
SHARDS += [(case, (2, 4, 8)[number % 3]) for number, case in enumerate(SHARDED[DTYPES:])]


@pytest.mark.parametrize("case,size", SHARDS, ids=str)
def test_phases_of_shards(one_executor, case, size):
    """Ids of ranks that store 16, 32, 64 or 128 rows of a block are those of replicated decode."""
    check_phases(one_executor, case, size)


def test_a_scorer_of_fewer_rows_than_a_rank_stores_is_refused():
    """On sm90 32 columns of e4m3fn take tiles of 64 rows: only pages of 256 over two ranks, and only if asked for."""
    executor = interpreted("sm90")
    case = ContextCase("wide", "e4m3fn", lens=(300,), query_len=8, page_size=256, sharded=True, shard_scorer=True)
    with pytest.raises(
        UnsupportedConfigError, match=r"shard_scorer=True: decode_score_shards__sm90__e4m3fn_c32 scores 64"
    ):
        indexers_of(executor, case, 2)
    assert len(indexers_of(executor, case, 4)) == 4
    assert len(indexers_of(executor, replace(case, shard_scorer=False), 2)) == 2


@pytest.mark.gpu
@pytest.mark.requires(ngpus=1)
@pytest.mark.parametrize("size,dtype,replays", [(2, "bf16", 10_000), (4, "nvfp4", 10_000), (8, "e4m3fn", 2_000)])
def test_replays_on_streams(size, dtype, replays):
    """Graphs of all ranks replayed with changing inputs, ranks held up in turn: no wrong id, no failed wait."""
    from parallel.simulated_soak import soak_streams

    case = ContextCase(f"streams-{dtype}", dtype, lens=(2500, 2304, 2559), query_len=2, order="score")
    wrong, records = soak_streams(case, size, replays)
    assert wrong == [] and records == [0] * size


@pytest.mark.parametrize("epoch", [0xFFFFFFFD, 1])
def test_epochs_pass_their_end(one_executor, epoch):
    """2^32 - 1 is followed by 2: never 0, and the parity goes on changing."""
    case = ContextCase("epochs", lens=(2500, 300), query_len=1)
    expected = replicated_on(one_executor, case)
    cache, table, lens, q = (tensor.to(one_executor.device) for tensor in case.batch())
    indexers = indexers_of(one_executor, case, 2)
    shares = [heads_of(rank, 2) for rank in range(2)]
    seen = []
    for indexer in indexers:
        indexer._engine.context_buffers["epochs"].fill_(epoch)
    plans = [indexer.plan_decode(table, lens, query_len=1) for indexer in indexers]
    for _ in range(5):
        outs = [torch.full_like(expected[:, share], SENTINEL).contiguous() for share in shares]
        decode_in_phases(indexers, plans, [q[:, share].contiguous() for share in shares], cache, outs)
        assert all(torch.equal(out, expected[:, share]) for share, out in zip(shares, outs, strict=True))
        seen.append([int(value) for value in indexers[0]._engine.context_buffers["epochs"]])
    after = [0xFFFFFFFE, 0xFFFFFFFF, 2, 3, 4] if epoch > 9 else [2, 3, 4, 5, 6]
    assert [first for first, _ in seen] == after


def test_stale_words_of_an_earlier_call_are_not_taken(one_executor):
    """A rank whose words are two calls old is waited for in vain: the same place, the same parity, another epoch."""
    case = ContextCase("stale", lens=(2500, 300), query_len=1)
    cache, table, lens, q = (tensor.to(one_executor.device) for tensor in case.batch())
    heads = heads_of(0, 2)
    groups = simulated_groups(2, one_executor.device, limit_s=0.05)
    indexers = [
        one_executor.indexer(case.layout, num_heads=heads.stop, parallel="context", group=group, **case.options)
        for group in groups
    ]
    plans = [indexer.plan_decode(table, lens, query_len=1) for indexer in indexers]
    queries = [q[:, heads_of(rank, 2)].contiguous() for rank in range(2)]
    outs = [torch.empty(len(q), heads.stop, case.topk, dtype=torch.int32, device=q.device) for _ in range(2)]
    for _ in range(2):
        decode_in_phases(indexers, plans, queries, cache, outs)
    late = indexers[0]._engine.context
    late.exchange(plans[0], queries[0])
    record = groups[0].failed()
    assert record >> 32 == 3 and (record >> 16 & 0xFF, record >> 8 & 0xFF, record & 0xFF) == (1, 2, 1)


@pytest.mark.parametrize("stride", [8, 16])
def test_sparse_tables_of_ranks(one_executor, stride):
    """Every rank writes the table that its heads get from replicated decode."""
    from blockpick import SparseTable

    case = ContextCase("sparse", lens=(2500, 2304, 0, 130), query_len=2, order="local_last")
    cache, table, lens, q = (tensor.to(one_executor.device) for tensor in case.batch())
    generator = torch.Generator().manual_seed(3)
    attention = torch.randint(0, 1000, (4, case.width), generator=generator, dtype=torch.int32).to(q.device)

    def sparse_of(heads):
        rows = len(q) * heads
        filled = {"dtype": torch.int32, "device": q.device}
        return SparseTable(
            attention, stride, torch.full((rows, case.topk * 8), -9, **filled), torch.full((rows,), -9, **filled)
        )

    whole = sparse_of(TOTAL_HEADS)
    alone = one_executor.indexer(case.layout, num_heads=TOTAL_HEADS, **case.options)
    ids = torch.empty(len(q), TOTAL_HEADS, case.topk, dtype=torch.int32, device=q.device)
    alone.decode(alone.plan_decode(table, lens, query_len=2), q, cache, ids, sparse_table=whole)
    indexers = indexers_of(one_executor, case, 2)
    plans = [indexer.plan_decode(table, lens, query_len=2) for indexer in indexers]
    shares = [heads_of(rank, 2) for rank in range(2)]
    outs = [torch.empty_like(ids[:, share]).contiguous() for share in shares]
    sparse = [sparse_of(2) for _ in shares]
    decode_in_phases(indexers, plans, [q[:, share].contiguous() for share in shares], cache, outs, sparse)
    for share, found in zip(shares, sparse, strict=True):
        expected = whole.table.view(len(q), TOTAL_HEADS, -1)[:, share].reshape(found.table.shape)
        assert torch.equal(found.table, expected)
        assert torch.equal(found.context_lens, whole.context_lens.view(len(q), -1)[:, share].flatten())


def test_memory_is_what_is_held(one_executor):
    """Every buffer is stated, the exchanged one too, and decode's own buffers are not there twice."""
    case = ContextCase("memory", lens=(2500, 300), query_len=2)
    (indexer, _) = indexers_of(one_executor, case, 2)
    items = dict(indexer.memory().items)
    engine = indexer._engine
    held = sum(t.numel() * t.element_size() for slot in engine.buffers for t in slot.values())
    held += sum(t.numel() * t.element_size() for t in engine.context_buffers.values())
    exchange = items.pop("exchange (peer memory)")
    assert sum(items.values()) == held and exchange >= engine._exchange.tensors[0].numel() * 8
    assert "blocks" not in items and items["context_scores"] == 6 * TOTAL_HEADS * 32 * 4


def test_explain_says_how_decode_is_spread(one_executor):
    case = ContextCase("explain", lens=(300,))
    (indexer, _) = indexers_of(one_executor, case, 2)
    assert "parallel context: asked for" in indexer.explain()
    assert "rank 0 of 2: simulated" in indexer.explain()


def test_a_group_of_one_decodes_alone_and_says_why(one_executor, caplog):
    case = ContextCase("alone", lens=(300,))
    (group,) = simulated_groups(1, one_executor.device)
    for _ in range(2):
        indexer = one_executor.indexer(case.layout, num_heads=4, parallel="context", group=group, **case.options)
    assert "parallel context: not used: the group has 1 rank(s)" in indexer.explain()
    warnings = [record for record in caplog.records if "is not used" in record.getMessage()]
    assert len(warnings) <= 1  # one warning a process


@pytest.mark.parametrize(
    "options,told",
    [
        ({"parallel": "tensor"}, "parallel='tensor' is not supported"), ({"parallel": "context"}, "needs a group"),
        ({"group": "given"}, "belong to parallel='context'"), ({"total_heads": 4}, "belong to parallel='context'"),
        ({"parallel": "context", "group": "given", "slots": 2}, "slots=2 with parallel='context'"),
        ({"parallel": "context", "group": "given", "total_heads": 3}, "can't share total_heads=3"),
        ({"parallel": "sharded", "group": "given"}, "layout.shards=1 with a group of 2 rank(s)"),
        ({"parallel": "sharded", "group": "given", "shards": 4}, "layout.shards=4 with a group of 2 rank(s)"),
        ({"parallel": "sharded", "shards": 2}, "parallel='sharded' needs a group"),
        ({"parallel": "context", "group": "given", "shards": 2}, "reads a replicated cache (shards=1)"),
        ({"parallel": "sharded", "group": "given", "shards": 2, "slots": 2}, "slots=2 with parallel='sharded'"),
        ({"parallel": "sharded", "group": "given", "shards": 2, "max_prefill_tokens": 8}, "prefill of a sharded cache"),
        ({"parallel": "context", "group": "given", "shard_scorer": True}, "shard_scorer=True belongs to"),
        ({"parallel": "spread"}, "supported: None, 'context', 'sharded'"),
    ],
)  # fmt: skip
def test_refusals_at_construction(one_executor, options, told):
    if "group" in options:
        options = {**options, "group": simulated_groups(2, one_executor.device)[0]}
    layout = CacheLayout("bf16", shards=options.get("shards", 1))
    options = {name: value for name, value in options.items() if name != "shards"}
    with pytest.raises(UnsupportedConfigError, match=re.escape(told)):
        one_executor.indexer(layout, num_heads=2, max_requests=2, max_seq_len=1024, **options)


def test_shards_are_never_read_by_the_reference():
    """backend='auto' on CPU tensors is the reference of one rank: it would take a rank's rows for whole pages."""
    layout, group = CacheLayout("bf16", shards=2), simulated_groups(2, "cpu")[0]
    for make in (Indexer, Indexer.required_memory):
        with pytest.raises(
            UnsupportedConfigError, match="reads no shards; backend='interpreter' decodes over ranks there"
        ):
            make(layout, num_heads=2, parallel="sharded", group=group, device="cpu")
        with pytest.raises(UnsupportedConfigError, match="backend='reference' decodes on one rank"):
            make(layout, num_heads=2, parallel="sharded", group=group, device="cpu", backend="reference")


@pytest.mark.parametrize("page_size,size,blocks", [(128, 4, 20), (256, 2, 10), (256, 4, 10)])
def test_required_memory_of_shards_is_what_is_allocated(page_size, size, blocks):
    """Score and list buffers hold the blocks that a rank scores: all of them, or every second."""
    options = {
        "num_heads": 1, "total_heads": size, "parallel": "sharded", "group": simulated_groups(size, "cpu")[0],
        "device": "cpu", "backend": "interpreter", "arch": "sm90", "max_requests": 3, "max_seq_len": 2500,
    }  # fmt: skip
    layout = CacheLayout("nvfp4", page_size, size)
    indexer = Indexer(layout, **options)
    assert Indexer.required_memory(layout, **options).items == indexer.memory().items
    for name, tensor in indexer._engine.context_buffers.items():
        assert (f"context_{name}", tensor.numel() * tensor.itemsize) in indexer.memory().items
    assert indexer._engine.context_buffers["blocks"].numel() == 3 * blocks


def test_check_cache_looks_at_the_ranks_own_shard():
    """70 tokens of a page of 128 over two ranks: rank 1 stores 6, and what lies behind them is no fault."""
    layout, keys = CacheLayout("nvfp4", shards=2), torch.ones(70, 128).bfloat16()
    for rank, group in enumerate(simulated_groups(2, "cpu")):
        cache = layout.empty(1, "cpu").fill_(0)
        insert(layout, cache, keys, torch.arange(70), shard=rank, backend="reference")
        indexer = Indexer(layout, num_heads=2, parallel="sharded", group=group, device="cpu", backend="interpreter",
                          arch="sm90", max_requests=1, max_seq_len=128)  # fmt: skip
        table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([70], dtype=torch.int32)
        assert indexer.check_cache(cache, table, lens) == []
        assert bool(indexer.check_cache(cache, table, lens, shard=0)) == (rank == 1)


@pytest.mark.parametrize("page_size", [128, 256])
def test_a_row_of_a_million_tokens_over_shards(one_executor, page_size):
    """8,192 blocks on given scores: every rank's best of several chunks, the ids that many send once; ties everywhere."""
    case = ContextCase("million", lens=(1 << 20, 1), query_len=1, page_size=page_size, init_blocks=1, sharded=True)
    indexers = [
        one_executor.indexer(CacheLayout("bf16", page_size, 4), num_heads=1, parallel="sharded", group=group,
                             max_requests=2, max_seq_len=1 << 20, init_blocks=1)
        for group in simulated_groups(4, one_executor.device)
    ]  # fmt: skip
    table = torch.zeros(2, case.width, dtype=torch.int32, device=one_executor.device)
    lens = torch.tensor(case.lens, dtype=torch.int32, device=one_executor.device)
    plans = [indexer.plan_decode(table, lens, query_len=1) for indexer in indexers]
    best = torch.full((TOTAL_HEADS, 8192), -float("inf"))
    for rank, (indexer, plan) in enumerate(zip(indexers, plans, strict=True)):
        held = torch.arange(rank * (page_size // 128) // 4, 8192, page_size // 128)
        part = torch.randint(-500, 500, (TOTAL_HEADS, len(held)), generator=torch.Generator().manual_seed(rank)).float()
        best[:, held] = torch.maximum(best[:, held], part)
        target = indexer.scores(plan)
        indexer._engine.context.score = lambda *_, t=target, p=part: t[0, 0].copy_(p)
    queries = [torch.zeros(2, 1, 128, dtype=torch.bfloat16, device=one_executor.device)] * 4
    outs = [torch.empty(2, 1, 16, dtype=torch.int32, device=one_executor.device) for _ in indexers]
    decode_in_phases(indexers, plans, queries, indexers[0].config.layout.empty(1, one_executor.device), outs)
    for head, out in enumerate(outs):
        assert out[0, 0].tolist() == select_blocks(best[head], (1 << 20) - 1, 16, 1, 1, "score", "minus_one")
        assert out[1, 0].tolist() == [0] + [-1] * 15


LENGTHS = st.builds(
    lambda blocks, rows, off: max(blocks * 128 + rows + off, 0),
    st.integers(0, 4), st.sampled_from([0, 16, 32, 48, 64, 96, 112]), st.integers(-1, 1),
)  # fmt: skip


@settings(max_examples=14, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lens=st.lists(LENGTHS, min_size=1, max_size=3), size=st.sampled_from([2, 4, 8]), page=st.sampled_from([128, 256]),
    query_len=st.integers(1, 3), dtype=st.sampled_from(["bf16", "e4m3fn", "nvfp4"]), seed=st.integers(0, 99),
    local=st.integers(0, 1), topk=st.integers(1, 4), data=st.sampled_from(["few", "integer"]),
)  # fmt: skip
def test_shards_of_any_lengths(lens, size, page, query_len, dtype, seed, local, topk, data):
    """Lengths around the edges of every rank's rows, of blocks and of pages, more blocks than topk or fewer."""
    case = ContextCase(
        f"{lens} over {size}", dtype, lens=tuple(lens), query_len=query_len, topk=topk, local_blocks=local, data=data,
        page_size=page, rounding="exact" if dtype == "nvfp4" else None, seed=seed, sharded=True,
    )  # fmt: skip
    check_phases(interpreted("sm90"), case, size)


@pytest.mark.gpu
@pytest.mark.requires(ngpus=1, tool="compute-sanitizer")
def test_memcheck_of_phases_is_clean():
    """Ranks of one process phase by phase, where nothing spins, under memcheck: no invalid access."""
    command = [
        "compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9", sys.executable,
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/parallel/test_simulated.py", "-k", "every_target and aot",
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=300)
    assert result.returncode == 0, result.stdout[-2000:]
    assert "ERROR SUMMARY: 0 errors" in result.stdout
    assert "passed" in result.stdout

# SPDX-License-Identifier: Apache-2.0
"""CUDA/HIP graphs, streams and host cost, on a real GPU only."""

from __future__ import annotations

import time

import pytest
import torch

from blockpick import CacheLayout
from blockpick.testing.cases import DecodeCase, build, check_batch

pytestmark = [pytest.mark.gpu, pytest.mark.requires(ngpus=1)]
CACHES = [("bf16", None), ("e4m3fn", None), ("nvfp4", "exact"), ("nvfp4", "e4m3")]


def capture(run):
    """A graph of ``run``, warmed up on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


@pytest.mark.parametrize("dtype,rounding", CACHES)
def test_replay_with_changing_lengths(executor, dtype, rounding):
    """Capture once at the padded batch, replay with new lengths, tables and queries; no synchronisation is called."""
    case = DecodeCase(
        "graph", dtype, (2500, 1, 0, 700, 3000), num_heads=2, query_len=2, rounding=rounding, data="integer"
    )
    indexer = executor.indexer(case.layout(), **case.options())
    batch = build(case).to(executor.device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan = indexer.plan_decode(batch.block_table, batch.seq_lens, query_len=2)
        graph = capture(lambda: indexer.decode(plan, batch.q, batch.cache, batch.out))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for lens in ((2500, 1, 0, 700, 3000), (5, 0, 0, 0, 2999), (0, 0, 0, 0, 0), (2400, 1, 0, 650, 130)):
        batch.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        batch.q.copy_(batch.q.flip(0))
        indexer.plan_decode(batch.block_table, batch.seq_lens, query_len=2)
        batch.out.fill_(-5)
        graph.replay()
        replayed = batch.out.clone()
        eager = executor.indexer(case.layout(), **case.options())
        eager.decode(eager.plan_decode(batch.block_table, batch.seq_lens, query_len=2), batch.q, batch.cache, batch.out)
        assert torch.equal(replayed, batch.out), lens


def test_capture_of_a_plan_is_refused(executor):
    case = DecodeCase("capture", "bf16", (700,))
    indexer, batch = executor.indexer(case.layout(), **case.options()), build(case).to(executor.device)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="plan_decode: not allowed inside a graph capture"), torch.cuda.graph(graph):
        indexer.plan_decode(batch.block_table, batch.seq_lens, query_len=1)


def test_outputs_outlive_their_references(executor):
    """Capture, drop every reference but the persistent output, allocate 256 MiB, replay: right ids, nothing else
    written.
    """
    case = DecodeCase("persistent", "nvfp4", (2500, 3000), data="integer")
    indexer, batch = executor.indexer(case.layout(), **case.options()), build(case).to(executor.device)
    plan = indexer.plan_decode(batch.block_table, batch.seq_lens, query_len=1)
    graph = capture(lambda: indexer.decode(plan, batch.q, batch.cache, batch.out))
    expected = batch.out.clone()
    batch.out.fill_(-5)
    big = torch.full((256 << 20,), 0x5A, dtype=torch.uint8, device=executor.device)
    for _ in range(5):
        graph.replay()
    assert torch.equal(batch.out, expected)
    assert bool((big == 0x5A).all())


def test_padded_batch_stays_inside_its_scratch(executor):
    """5 live requests padded to 8: guard bytes behind every buffer survive three replays."""
    case = DecodeCase("padding", "e4m3fn", (2500, 300, 2000, 1, 900, 0, 0, 0), query_len=2, data="integer")
    indexer, batch = executor.indexer(case.layout(), **case.options()), build(case).to(executor.device)
    plan = indexer.plan_decode(batch.block_table, batch.seq_lens, query_len=2)
    graph = capture(lambda: indexer.decode(plan, batch.q, batch.cache, batch.out))
    for _ in range(3):
        graph.replay()
    check_batch(case, indexer, batch)


def test_the_next_writer_of_q_waits(executor):
    """1000 chained layers with q overwritten right after each decode, scores poisoned between: ids never change."""
    case = DecodeCase("pdl", "nvfp4", (2500, 1700, 2900), query_len=2, data="integer")
    indexer, batch = executor.indexer(case.layout(), **case.options()), build(case).to(executor.device)
    plan = indexer.plan_decode(batch.block_table, batch.seq_lens, query_len=2)
    indexer.decode(plan, batch.q, batch.cache, batch.out)
    expected, good, bad = batch.out.clone(), batch.q.clone(), torch.zeros_like(batch.q)
    scores = indexer._engine.buffers[0]["scores"]
    wrong = torch.zeros((), dtype=torch.int64, device=executor.device)
    for _ in range(1000):
        scores.fill_(float("nan"))
        batch.q.copy_(good)
        indexer.decode(plan, batch.q, batch.cache, batch.out)
        batch.q.copy_(bad)
        wrong += (batch.out != expected).sum()
    assert int(wrong) == 0


@pytest.mark.parametrize("dtype,rounding", CACHES)
def test_bits_repeat_over_shapes_of_the_batch(executor, dtype, rounding):
    """A request's scores have the same bits in every batch, and in every repeat."""
    case = DecodeCase("bits", dtype, (9000, 2500, 40000), num_heads=4, query_len=8, rounding=rounding)
    indexer, batch = executor.indexer(case.layout(), **case.options()), build(case).to(executor.device)
    plan = indexer.plan_decode(batch.block_table, batch.seq_lens, query_len=8)
    indexer.decode(plan, batch.q, batch.cache, batch.out)
    whole = indexer.scores(plan)[1, :, :, :18].clone()
    ids = batch.out[8:16].clone()
    single = indexer.plan_decode(batch.block_table[1:2], batch.seq_lens[1:2], query_len=8)
    out = torch.empty(8, 4, 16, dtype=torch.int32, device=executor.device)
    indexer.decode(single, batch.q[8:16], batch.cache, out)
    assert torch.equal(indexer.scores(single)[0, :, :, :18].view(torch.int32), whole.view(torch.int32))
    assert torch.equal(out, ids)


def test_nothing_is_compiled_for_new_shapes(executor, monkeypatch):
    """Batches 1..64 and lengths 100..100k: not one kernel is compiled or loaded after construction."""
    import blockpick.dispatch as dispatch

    layout = CacheLayout("nvfp4")
    indexer = executor.indexer(layout, max_requests=64, max_seq_len=100_096)
    cache = layout.empty(800, executor.device)
    before = dispatch.load.cache_info().misses
    for requests in (1, 3, 17, 64):
        for length in (100, 5000, 100_000):
            table = torch.randint(0, 800, (requests, -(-length // 128)), dtype=torch.int32, device=executor.device)
            lens = torch.full((requests,), length, dtype=torch.int32, device=executor.device)
            q = torch.zeros(requests, 1, 128, device=executor.device).to(torch.float8_e4m3fn)
            out = torch.empty(requests, 1, 16, dtype=torch.int32, device=executor.device)
            indexer.decode(indexer.plan_decode(table, lens, query_len=1), q, cache, out)
    assert dispatch.load.cache_info().misses == before


def test_host_time_per_launch(executor, record_property):
    """Packing and checking cost little more than the driver call itself; all host times are reported."""
    case = DecodeCase("host", "nvfp4", (2500,))
    indexer, batch = executor.indexer(case.layout(), **case.options()), build(case).to(executor.device)
    plan = indexer.plan_decode(batch.block_table, batch.seq_lens, query_len=1)
    launch, stream = indexer._engine._launches[0][0][2], torch.cuda.current_stream().cuda_stream
    handle, driver_call = indexer.handle(), launch._call
    launch(1, stream, batch.out, 16, 16)
    calls = {
        "driver call alone": driver_call,
        "one launch": lambda: launch(1, stream, batch.out, 16, 16),
        "decode": lambda: indexer.decode(plan, batch.q, batch.cache, batch.out),
        "torch op": lambda: torch.ops.blockpick.decode_pick(batch.q, batch.cache, batch.out, handle),
    }
    times = {name: host_us(call) for name, call in calls.items()}
    for name, microseconds in times.items():
        record_property(name, microseconds)
        print(f"host time, {name}: {microseconds:.2f} us")
    assert times["one launch"] <= times["driver call alone"] + 3.0


def host_us(call):
    """Least median over rounds of a call's host time: other processes only ever add to it."""
    medians = []
    for _ in range(5):
        samples = []
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(50):
                call()
            samples.append((time.perf_counter() - start) / 50)
        medians.append(sorted(samples)[len(samples) // 2])
    return min(medians) * 1e6

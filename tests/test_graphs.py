# SPDX-License-Identifier: Apache-2.0
"""CUDA/HIP graphs, streams and host cost, on a real GPU only."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest
import torch
from fused_cases import rows
from support import ROOT

from blockpick import CacheLayout, Indexer, insert
from blockpick.testing.cases import DecodeCase, build, check_batch
from blockpick.testing.prefill_cases import PrefillCase, build_prefill
from blockpick.testing.reference import block_scores, insert_reference, select_blocks

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


def test_a_first_insert_inside_a_capture_is_refused(executor):
    """Its kernel would be loaded there; a warm-up call outside makes it legal."""
    layout = CacheLayout("bf16", 256)
    cache, slots = layout.empty(1, executor.device), torch.tensor([3], device=executor.device)
    keys = torch.ones(1, 128, dtype=torch.bfloat16, device=executor.device)
    errors = []

    def first():  # a thread of its own has loaded nothing yet
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                executor.insert(layout, cache, keys, slots)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=first)
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert "not allowed inside a graph capture" in errors[0]
    executor.insert(layout, cache, keys, slots)
    cache.zero_()
    capture(lambda: executor.insert(layout, cache, keys, slots)).replay()
    assert cache[0, 3].eq(1).all()


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


def prefill_and_insert(executor, dtype):
    """One layer of a step (fused insert, then pick), its output, and what it must be: (run, out, expected)."""
    case = PrefillCase("layer", dtype, ((2, 2290), (2, 700), (40, 1000)), data="integer")
    batch = build_prefill(case).to(executor.device)
    indexer = executor.indexer(case.layout(), **{**case.options(), "max_query_len": 2})
    step = indexer.plan_step([0, 2, 4, 44], batch.seq_lens, batch.block_table)
    call = rows(40, 1, executor.device)
    call["slot_mapping"] = torch.full((40,), -1, device=executor.device)
    q_out = torch.empty(40, 1, 128, device=executor.device, dtype=torch.bfloat16).to(case.layout().query_dtype)
    tensors = [call[n] for n in ("slot_mapping", "positions", "cos_sin", "q_weight", "k_weight")]
    columns = {name: call[name] for name in ("q_column", "k_column", "eps")}

    def run():
        executor.fused_insert(case.layout(), batch.cache, call["qkv"], q_out, *tensors, **columns)
        indexer.pick(step, batch.q, batch.cache, batch.out)

    run()
    return run, (batch.out, q_out), (batch.out.clone(), q_out.clone())


@pytest.mark.parametrize("dtype", ["bf16", "e4m3fn", "nvfp4"])
def test_cases_4_and_10_a_captured_step_neither_synchronises_nor_loses_its_output(executor, dtype):
    """Prefill and fused insert: captured under the synchronisation alarm, replayed after everything but the outputs is
    gone and 256 MiB were allocated.
    """
    run, outs, expected = prefill_and_insert(executor, dtype)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = capture(run)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for out in outs:
        out.view(torch.uint8).fill_(0x33)
    big = torch.full((256 << 20,), 0x5A, dtype=torch.uint8, device=executor.device)
    for _ in range(5):
        graph.replay()
    for out, wanted in zip(outs, expected, strict=True):
        assert torch.equal(out.view(torch.uint8), wanted.view(torch.uint8))
    assert bool((big == 0x5A).all())


@pytest.mark.parametrize("kind", ["decode", "prefill", "pick"])
def test_compiled_code_is_captured(executor, kind):
    """A region of torch.compile over the ops, captured once, replayed with the lengths that were planned last."""
    case = PrefillCase("compiled", "bf16", ((1, 2290), (1, 900), (9, 1000)), data="integer")
    batch = build_prefill(case).to(executor.device)
    indexer = executor.indexer(case.layout(), **case.options())
    table = batch.block_table

    def plan(lens):
        if kind == "decode":
            return indexer.plan_decode(table, lens, query_len=1)
        if kind == "prefill":
            return indexer.plan_prefill(batch.cu_seqlens_q, lens, table, num_tokens=11)
        return indexer.plan_step([0, 1, 2, 11], lens, table)

    planned, call = plan(batch.seq_lens), getattr(indexer, kind)
    q, out = (batch.q[:3], batch.out[:3]) if kind == "decode" else (batch.q, batch.out)
    out = torch.full_like(out, -5)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(q, cache, out):
        call(planned, q, cache, out)

    graph = capture(lambda: layer(q, batch.cache, out))
    for shorter in (0, 130, 300):
        planned_now = plan(batch.seq_lens - shorter)
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, call(planned_now, q, batch.cache, torch.full_like(out, -5)))


def test_padded_batch_stays_inside_its_scratch(executor):
    """5 live requests padded to 8: guard bytes behind every buffer survive three replays."""
    case = DecodeCase("padding", "e4m3fn", (2500, 300, 2000, 1, 900, 0, 0, 0), query_len=2, data="integer")
    indexer, batch = executor.indexer(case.layout(), **case.options()), build(case).to(executor.device)
    plan = indexer.plan_decode(batch.block_table, batch.seq_lens, query_len=2)
    graph = capture(lambda: indexer.decode(plan, batch.q, batch.cache, batch.out))
    for _ in range(3):
        graph.replay()
    check_batch(case, indexer, batch)


def test_plain_writers_around_a_decode_keep_their_order(executor):
    """1000 decodes between plain kernels that poison the scores before and overwrite q after each: ids never change.

    Plain kernels have no PDL attribute; layers that do are chained in ``test_layers_in_a_row_do_not_disturb_each_other``.
    """
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


def wide_batch(dtype, page_size, heads=4, query_len=8):
    """300 blocks and more; keys over many magnitudes, so that another order of summation shows in the bits."""
    generator = torch.Generator().manual_seed(7)
    layout = CacheLayout(dtype, page_size)
    lens = [40_000, 9_000, 2_500]
    pages = [-(-length // page_size) for length in lens]
    cache, table = layout.empty(sum(pages), "cuda:0"), torch.zeros(3, max(pages), dtype=torch.int32)
    cache.view(torch.uint8).zero_()
    for b, length in enumerate(lens):
        mine = torch.arange(sum(pages[:b]), sum(pages[: b + 1]))
        table[b, : pages[b]] = mine
        scale = 2.0 ** torch.randint(-6, 6, (length, 128), generator=generator)
        keys = (torch.randn(length, 128, generator=generator) * scale).bfloat16()
        slots = mine.repeat_interleave(page_size)[:length] * page_size + torch.arange(length) % page_size
        insert(layout, cache, keys.cuda(), slots.cuda())
    q = torch.randn(3 * query_len, heads, 128, generator=generator) * 2.0 ** torch.randint(
        -4, 4, (128,), generator=generator
    )
    return layout, cache, table.cuda(), torch.tensor(lens, dtype=torch.int32).cuda(), q.cuda().to(layout.query_dtype)


@pytest.mark.parametrize("dtype,rounding", CACHES)
def test_bits_of_a_score_depend_on_query_and_block_only(executor, dtype, rounding):
    """32 columns, each alone in the narrowest variant, one request alone, pages of 128 and 256: the same bits throughout."""
    bits = {}
    for page_size in (128, 256):
        layout, cache, table, lens, q = wide_batch(dtype, page_size)

        def scores(num_heads, query_len, table, lens, q, layout=layout, cache=cache):
            indexer = executor.indexer(
                layout, num_heads=num_heads, max_query_len=query_len, max_requests=len(lens), max_seq_len=40_192,
                nvfp4_rounding=rounding,
            )  # fmt: skip
            plan = indexer.plan_decode(table, lens, query_len=query_len)
            out = torch.empty(len(q), num_heads, 16, dtype=torch.int32, device="cuda:0")
            indexer.decode(plan, q, cache, out)
            return indexer.scores(plan).view(torch.int32).clone()

        whole = scores(4, 8, table, lens, q)
        for b, seen in enumerate((310, 68, 18)):  # blocks that every query of the request sees in full
            bits[page_size, b] = whole[b, :, :, :seen]
            alone = scores(4, 8, table[b : b + 1], lens[b : b + 1], q[8 * b : 8 * b + 8])
            assert torch.equal(alone[0, :, :, :seen], whole[b, :, :, :seen]), "request alone"
            for head in range(4):
                for i in (0, 3, 7):
                    one = scores(
                        1, 1, table[b : b + 1], lens[b : b + 1] - 7 + i, q[8 * b + i : 8 * b + i + 1, head : head + 1]
                    )
                    assert torch.equal(one[0, 0, 0, :seen], whole[b, i, head, :seen]), f"head {head}, query {i} alone"
    for b in range(3):
        assert torch.equal(bits[128, b], bits[256, b]), "page size"


def test_layers_in_a_row_do_not_disturb_each_other(executor):
    """200 decodes of three alternating layers in one graph, each its own q, cache and output, over one scratch."""
    cases = [
        DecodeCase("layer", "nvfp4", (2500, 1700, 2900), query_len=4, num_heads=4, seed=seed) for seed in (1, 2, 3)
    ]
    indexer = executor.indexer(cases[0].layout(), **cases[0].options())
    batches = [build(case).to(executor.device) for case in cases]
    plan = indexer.plan_decode(batches[0].block_table, batches[0].seq_lens, query_len=4)
    expected = []
    for batch in batches:
        indexer.decode(plan, batch.q, batch.cache, batch.out)
        torch.cuda.synchronize()
        expected.append(batch.out.clone())
    assert not torch.equal(expected[0], expected[1])
    outs = [torch.full((12, 4, 16), -5, dtype=torch.int32, device=executor.device) for _ in range(200)]

    def layers():
        for index, out in enumerate(outs):
            batch = batches[index % 3]
            indexer.decode(plan, batch.q, batch.cache, out)

    graph = capture(layers)
    for _ in range(3):
        for out in outs:
            out.fill_(-5)
        graph.replay()
        assert all(torch.equal(out, expected[index % 3]) for index, out in enumerate(outs))


def test_decode_sees_the_insert_before_it(executor):
    """insert, then decode, in one graph: replays with other keys give the ids of those keys."""
    case = DecodeCase("insert", "nvfp4", (2500,), data="integer")
    batch = build(case).to(executor.device)
    indexer = executor.indexer(case.layout(), **case.options())
    plan = indexer.plan_decode(batch.block_table, batch.seq_lens, query_len=1)
    slots = (
        batch.block_table[0, :20].long().repeat_interleave(128) * 128 + torch.arange(2560, device=executor.device) % 128
    )
    slots = slots[:2500].contiguous()
    keys = torch.zeros(2500, 128, dtype=torch.bfloat16, device=executor.device)

    def step():
        executor.insert(case.layout(), batch.cache, keys, slots)
        indexer.decode(plan, batch.q, batch.cache, batch.out)

    step()
    graph = capture(step)
    seen = set()
    for seed in range(4):
        fresh = torch.randint(-2, 3, (2500, 128), generator=torch.Generator().manual_seed(seed)).bfloat16()
        keys.copy_(fresh)
        batch.out.fill_(-5)
        graph.replay()
        cpu = batch.to("cpu")
        insert_reference(case.layout(), cpu.cache, fresh, slots.cpu())
        assert torch.equal(cpu.cache.view(torch.uint8), batch.cache.cpu().view(torch.uint8))
        scores = block_scores(case.layout(), cpu.cache, cpu.q, cpu.block_table, cpu.seq_lens, 1)[0, 0, 0].float()
        assert batch.out[0, 0].tolist() == select_blocks(scores, 2499, 16, 0, 1, "score", "minus_one")
        seen.add(tuple(batch.out[0, 0].tolist()))
    assert len(seen) == 4


def test_a_replay_after_a_plan_of_another_shape_is_empty(executor):
    """More requests, fewer, or another query_len: no row is read or written outside the captured batch, all are empty."""
    layout = CacheLayout("nvfp4")
    cache = layout.empty(30, executor.device)
    cache.view(torch.uint8).fill_(0x11)
    indexer = executor.indexer(layout, max_requests=4, max_query_len=2, max_seq_len=3840)
    table = torch.arange(30, dtype=torch.int32, device=executor.device).repeat(4, 1)
    lens = torch.full((4,), 3000, dtype=torch.int32, device=executor.device)
    storage = torch.full((6, 1, 16), -7, dtype=torch.int32, device=executor.device)
    q = torch.ones(2, 1, 128, device=executor.device).to(torch.float8_e4m3fn)
    plan = indexer.plan_decode(table[:2], lens[:2], query_len=1)
    graph = capture(lambda: indexer.decode(plan, q, cache, storage[:2]))
    graph.replay()
    assert bool((storage[:2] >= 0).all())
    for requests, query_len in ((4, 1), (1, 1), (2, 2), (1, 2)):
        indexer.plan_decode(table[:requests], lens[:requests], query_len=query_len)
        graph.replay()
        assert bool((storage[:2] == -1).all()), (requests, query_len)
        assert bool((storage[2:] == -7).all())
    indexer.plan_decode(table[:2], lens[:2], query_len=1)
    graph.replay()
    assert bool((storage[:2] >= 0).all())


def test_a_new_thread_can_decode_and_insert(executor):
    """A thread that made no CUDA call before: its first launch finds a context, on the default stream."""
    case = DecodeCase("thread", "nvfp4", (2500,), data="integer")
    indexer, batch = executor.indexer(case.layout(), **case.options()), build(case).to(executor.device)
    plan = indexer.plan_decode(batch.block_table, batch.seq_lens, query_len=1)
    indexer.decode(plan, batch.q, batch.cache, batch.out)
    expected = batch.out.clone()
    keys = torch.ones(1, 128, dtype=torch.bfloat16, device=executor.device)
    slots = torch.tensor([-1], device=executor.device)
    torch.cuda.synchronize()
    errors = []

    def work():
        try:
            executor.insert(case.layout(), batch.cache, keys, slots)
            batch_out = outs.pop()
            indexer.decode(plan, batch.q, batch.cache, batch_out)
            torch.cuda.synchronize()
            done.append(batch_out)
        except Exception as error:
            errors.append(error)

    outs, done = [torch.full_like(expected, -5)], []
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []
    assert torch.equal(done[0], expected)


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


@pytest.mark.requires(tool="compute-sanitizer")
def test_memcheck_is_clean():
    """Decode and insert of every cache dtype under memcheck: no invalid access."""
    tests = [
        "tests/test_decode.py",
        "tests/test_insert.py",
        "-k",
        "aot and not triton and (conformance or padded or unpopulated or shard)",
    ]
    command = [
        "compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9",
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *tests,
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=300)
    assert result.returncode == 0, result.stdout[-2000:]
    assert "ERROR SUMMARY: 0 errors" in result.stdout
    assert "passed" in result.stdout


def test_host_time_per_launch(executor, record_property):
    """Packing and checking cost little more than the driver call itself; all host times are reported."""
    case = DecodeCase("host", "nvfp4", (2500,))
    indexer = Indexer(case.layout(), device=executor.device, backend=executor.backend, **case.options())
    batch = build(case).to(executor.device)
    plan = indexer.plan_decode(batch.block_table, batch.seq_lens, query_len=1)
    launch, stream = indexer._engine.decodes[0].launches[0][2], torch.cuda.current_stream().cuda_stream
    handle, driver_call = indexer.handle(), launch._call
    launch(1, stream, batch.out, 16, 16, 1)
    calls = {
        "driver call alone": driver_call,
        "one launch": lambda: launch(1, stream, batch.out, 16, 16, 1),
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

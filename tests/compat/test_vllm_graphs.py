# SPDX-License-Identifier: Apache-2.0
"""The drop-ins for vLLM's index ops inside CUDA/HIP graphs and on several streams, on a real GPU only."""

from __future__ import annotations

import pytest
import torch

from blockpick.compat import vllm_ops
from blockpick.testing.cases import DecodeCase, build
from blockpick.testing.prefill_cases import PrefillCase, build_prefill

pytestmark = [pytest.mark.gpu, pytest.mark.requires(ngpus=1)]
CASE = DecodeCase("graph", "bf16", (2500, 1, 0, 700, 3000), num_heads=2, query_len=2, data="integer")


@pytest.fixture(autouse=True)
def device(executor):
    with executor.active(), vllm_ops.use_backend(executor.backend, executor.arch):
        vllm_ops.release()
        yield executor.device
        vllm_ops.release()


def decode(batch, **options):
    """``minimax_m3_index_decode`` on a batch of ``CASE``."""
    return vllm_ops.minimax_m3_index_decode(
        batch.q, batch.cache, batch.block_table, batch.seq_lens, batch.block_table.shape[1] * 128, 16, 0, 1, 2, 2, 4,
        **options
    )  # fmt: skip


def test_replay_plans_for_the_lengths_of_the_moment(device):
    """No plan outside: two layers in one graph follow new lengths, scores and tables included; nothing synchronises."""
    batch = build(CASE).to(device)
    width, tokens = batch.block_table.shape[1], len(CASE.seq_lens) * 2
    out = torch.full((2, 2, tokens + 3, 16), -77, dtype=torch.int32, device=device)
    score = torch.full((2, tokens, width), -torch.inf, device=device)
    sparse = {
        "attention_block_table": torch.arange(5 * width, dtype=torch.int32, device=device).view(5, width),
        "sparse_block_table_out": torch.empty(tokens * 2, 128, dtype=torch.int32, device=device),
        "sparse_context_lens_out": torch.empty(tokens * 2, dtype=torch.int32, device=device), "block_page_stride": 8,
    }  # fmt: skip

    def step():
        decode(batch, out=out[0], score_out=score)
        decode(batch, out=out[1], **sparse)

    step()  # the warm-up
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for lens in ((2500, 1, 0, 700, 3000), (5, 0, 0, 0, 2999), (0, 0, 0, 0, 0), (2400, 1, 0, 650, 130)):
        batch.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        batch.q.copy_(batch.q.flip(0))
        out.fill_(-77)
        score.fill_(-torch.inf)
        graph.replay()
        replayed = [
            out.clone(),
            score.clone(),
            *(sparse[f"sparse_{name}_out"].clone() for name in ("block_table", "context_lens")),
        ]
        out.fill_(-77)
        score.fill_(-torch.inf)
        step()
        for kept, eager in zip(replayed, (out, score, *list(sparse.values())[1:3]), strict=True):
            assert torch.equal(kept, eager), lens
        assert bool((out[:, :, tokens:] == -77).all())


def test_graphs_outlive_larger_batches_and_other_configurations(device):
    """A captured engine stays when a larger batch makes another and when many configurations follow."""
    batch = build(CASE).to(device)
    out = torch.empty(2, 10, 16, dtype=torch.int32, device=device)
    wanted = decode(batch, out=out).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(batch, out=out)
    many = build(DecodeCase("many", "bf16", (300,) * 40, num_heads=2, query_len=2)).to(device)
    decode(many)
    for topk in range(1, 20):
        vllm_ops.minimax_m3_index_decode(many.q, many.cache, many.block_table, many.seq_lens, 300, topk, 0, 1, 2, 2, 4)
    junk = torch.full((64 << 20,), 0x5A, dtype=torch.uint8, device=device)
    out.fill_(-5)
    graph.replay()
    assert torch.equal(out, wanted)
    assert bool((junk == 0x5A).all())


def test_a_capture_without_a_warm_up_is_refused(device):
    batch = build(CASE).to(device)
    out = torch.full((2, 10, 16), -77, dtype=torch.int32, device=device)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match=r"minimax_m3_index_decode: .*Warm up"), torch.cuda.graph(graph):
        decode(batch, out=out)
    assert bool((out == -77).all())


def test_prefill_is_captured_with_its_plan(device):
    case = PrefillCase("graph", "bf16", ((5, 0), (9, 2400), (4, 700)), num_heads=2, data="integer")
    batch = build_prefill(case).to(device)
    prefix = torch.tensor([0, 2400, 700], dtype=torch.int32, device=device)
    out = torch.empty(2, 18, 16, dtype=torch.int32, device=device)

    def step():
        score = vllm_ops.minimax_m3_index_score(
            batch.q, batch.cache, batch.block_table, batch.cu_seqlens_q, batch.seq_lens, prefix, 9, case.width * 128, 2
        )
        vllm_ops.minimax_m3_index_topk(score, batch.cu_seqlens_q, prefix, 9, 16, 0, 1, out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lens in ((0, 2400, 700), (0, 130, 0)):
        prefix.copy_(torch.tensor(lens, dtype=torch.int32))
        out.fill_(-77)
        graph.replay()
        replayed = out.clone()
        step()
        assert torch.equal(replayed, out)


def test_calls_on_two_streams_wait_for_one_another(device):
    """One engine, two streams, different batches: every result is its own batch's."""
    batches = [build(DecodeCase("s", "bf16", CASE.seq_lens, num_heads=2, query_len=2, data="integer", seed=s)).to(device)
               for s in (1, 2)]  # fmt: skip
    wanted = [decode(batch).clone() for batch in batches]
    streams = [torch.cuda.Stream() for _ in batches]
    outs = [torch.empty(40, 2, 10, 16, dtype=torch.int32, device=device) for _ in batches]
    torch.cuda.synchronize()
    for turn in range(40):
        for stream, batch, out in zip(streams, batches, outs, strict=True):
            with torch.cuda.stream(stream):
                decode(batch, out=out[turn])
    torch.cuda.synchronize()
    for out, ids in zip(outs, wanted, strict=True):
        assert bool((out == ids).all())

# SPDX-License-Identifier: Apache-2.0
"""What the drop-ins for vLLM's index ops refuse, and how they keep their engines."""

from __future__ import annotations

import pytest
import torch

from blockpick import UnsupportedConfigError
from blockpick.compat import shared, vllm_ops
from blockpick.layout import CacheLayout

DEVICE = torch.device("cpu")


@pytest.fixture(autouse=True)
def reference():
    with vllm_ops.use_backend("reference"):
        vllm_ops.release()
        yield
        vllm_ops.release()


def decode_arguments(requests=2, query_len=2, heads=2, width=6, topk=4, dtype=torch.bfloat16):
    """Valid arguments of ``minimax_m3_index_decode`` by name."""
    cache = torch.zeros(4, 128, 128).to(dtype)
    return {
        "idx_q": torch.zeros(requests * query_len, heads, 128).to(dtype), "index_kv_cache": cache,
        "block_table": torch.zeros(requests, width, dtype=torch.int32),
        "seq_lens": torch.full((requests,), 700, dtype=torch.int32), "max_seq_len": width * 128, "topk": topk,
        "init_blocks": 0, "local_blocks": 1, "num_kv_heads": heads, "decode_query_len": query_len,
        "max_decode_query_len": query_len,
    }  # fmt: skip


def ints(*shape):
    return torch.zeros(shape, dtype=torch.int32)


REFUSED = [
    ("idx_q", {"idx_q": [1]}, TypeError),
    ("idx_q", {"idx_q": torch.zeros(4, 256, dtype=torch.bfloat16)}, ValueError),
    ("idx_q", {"idx_q": torch.zeros(4, 2, 64, dtype=torch.bfloat16)}, ValueError),
    ("idx_q", {"idx_q": torch.zeros(4, 2, 128)}, TypeError),
    ("idx_q", {"idx_q": torch.zeros(3, 2, 128, dtype=torch.bfloat16)}, ValueError),
    ("idx_q", {"num_kv_heads": 4}, ValueError),
    ("idx_q", {"index_kv_cache": torch.zeros(4, 128, 128).to(torch.float8_e4m3fn)}, TypeError),  # bf16 queries
    ("index_kv_cache", {"index_kv_cache": None}, TypeError),
    ("index_kv_cache", {"index_kv_cache": torch.zeros(4, 128, 128)}, TypeError),
    ("index_kv_cache", {"index_kv_cache": torch.zeros(4, 64, 128, dtype=torch.bfloat16)}, ValueError),
    ("index_kv_cache", {"index_kv_cache": torch.zeros(4, 128, 256, dtype=torch.bfloat16)[..., :128]}, ValueError),
    ("block_table", {"block_table": ints(3, 6)}, ValueError),
    ("block_table", {"block_table": torch.zeros(2, 6)}, TypeError),
    ("block_table", {"block_table": ints(2)}, ValueError),
    ("seq_lens", {"seq_lens": ints(3)}, ValueError),
    ("seq_lens", {"seq_lens": torch.zeros(2)}, TypeError),
    ("max_seq_len", {"max_seq_len": -1}, ValueError),
    ("topk", {"topk": 65}, ValueError),
    ("topk", {"topk": 0}, ValueError),
    ("init_blocks", {"init_blocks": -1}, ValueError),
    ("local_blocks=4", {"init_blocks": 1, "local_blocks": 4}, UnsupportedConfigError),
    ("decode_query_len", {"max_decode_query_len": 1}, ValueError),
    ("decode_query_len", {"decode_query_len": 9, "max_decode_query_len": 16}, ValueError),
    ("max_decode_query_len", {"max_decode_query_len": 0}, ValueError),
    ("out", {"out": ints(2, 3, 4)}, ValueError),
    ("out", {"out": ints(4, 2, 4)}, ValueError),
    ("out", {"out": ints(2, 4, 5)}, ValueError),
    ("out", {"out": torch.zeros(2, 4, 4)}, TypeError),
    ("out", {"out": ints(1, 4, 4).expand(2, 4, 4)}, ValueError),
    ("score_out", {"score_out": torch.zeros(2, 4, 5)}, ValueError),
    ("score_out", {"score_out": torch.zeros(2, 4, 6).half()}, TypeError),
    ("sparse_block_table_out", {"attention_block_table": ints(2, 6)}, ValueError),
    ("attention_block_table", {"block_page_stride": 8}, ValueError),
    ("completion_counter", {"completion_counter": ints(2, 3)}, ValueError),
    ("completion_counter", {"completion_counter": ints(4, 2).t()}, ValueError),
    ("completion_counter", {"completion_counter": torch.zeros(2, 4)}, TypeError),
]


@pytest.mark.parametrize("name,change,error", REFUSED, ids=[f"{i}-{row[0]}" for i, row in enumerate(REFUSED)])
def test_wrong_arguments_are_named_and_nothing_is_written(name, change, error):
    arguments = {**decode_arguments(), "out": torch.full((2, 4, 4), -77, dtype=torch.int32), **change}
    held = arguments["out"].clone()
    with pytest.raises(error, match=rf"\b{name}\b"):
        vllm_ops.minimax_m3_index_decode(**arguments)
    assert torch.equal(arguments["out"], held)


SPARSE = [
    ("attention_block_table", ints(2, 5)),
    ("attention_block_table", ints(1, 6)),
    ("attention_block_table", ints(6, 2).t()),
    ("attention_block_table", torch.zeros(2, 6)),
    ("sparse_block_table_out", ints(8, 31)),
    ("sparse_block_table_out", ints(4, 32)),
    ("sparse_context_lens_out", ints(4)),
    ("sparse_context_lens_out", ints(16)[::2]),
    ("block_page_stride", 12),
    ("block_page_stride", 32),
]


@pytest.mark.parametrize("name,value", SPARSE, ids=[f"{i}-{row[0]}" for i, row in enumerate(SPARSE)])
def test_wrong_sparse_table_arguments(name, value):
    sparse = {
        "attention_block_table": ints(2, 6), "sparse_block_table_out": ints(8, 32), "sparse_context_lens_out": ints(8),
        "block_page_stride": 8,
    }  # fmt: skip
    vllm_ops.minimax_m3_index_decode(**decode_arguments(), **sparse)
    with pytest.raises((ValueError, TypeError), match=name):
        vllm_ops.minimax_m3_index_decode(**decode_arguments(), **{**sparse, name: value})
    with pytest.raises(ValueError, match=f"{name}: missing"):
        vllm_ops.minimax_m3_index_decode(**decode_arguments(), **{**sparse, name: None})


@pytest.mark.parametrize(
    "name,change",
    [
        ("score", {"score": torch.zeros(2, 5)}),
        ("score", {"score": ints(2, 5, 6)}),
        ("score", {"score": None}),
        ("cu_seqlens_q", {"cu_seqlens_q": ints(2, 2)}),
        ("cu_seqlens_q", {"cu_seqlens_q": None}),
        ("cu_seqlens_q", {"cu_seqlens_q": torch.zeros(2)}),
        ("prefix_lens", {"prefix_lens": ints(2)}),
        ("out", {"out": ints(2, 4, 4)}),
        ("num_heads=3", {"score": torch.zeros(3, 5, 6)}),
    ],
)
def test_wrong_arguments_of_topk(name, change):
    arguments = {
        "score": torch.zeros(2, 5, 6), "cu_seqlens_q": torch.tensor([0, 5], dtype=torch.int32), "prefix_lens": ints(1),
        "max_query_len": 5, "topk": 4, "init_blocks": 0, "local_blocks": 1,
    }  # fmt: skip
    with pytest.raises((ValueError, TypeError), match=name):
        vllm_ops.minimax_m3_index_topk(**{**arguments, **change})


def test_unknown_backend_is_refused_and_the_old_one_stays():
    with pytest.raises(UnsupportedConfigError, match="backend='fast'"):
        vllm_ops.set_backend("fast")
    assert vllm_ops._route == ("reference", None)
    vllm_ops.minimax_m3_index_decode(**decode_arguments())


def test_engines_serve_batches_of_every_size_below_their_maxima():
    """Batches of all shapes leave one engine a configuration; one that is too small is replaced by a larger."""
    before = vllm_ops._ENGINES.built
    for requests in range(1, 17):
        for width in (1, 6, 40):
            vllm_ops.minimax_m3_index_decode(**decode_arguments(requests, 1, 1, width))
    assert (len(vllm_ops._ENGINES), vllm_ops._ENGINES.built - before) == (1, 1)
    vllm_ops.minimax_m3_index_decode(**decode_arguments(17, 1, 1))
    vllm_ops.minimax_m3_index_decode(**decode_arguments(3, 1, 1, 2049))
    assert (len(vllm_ops._ENGINES), vllm_ops._ENGINES.built - before) == (1, 3)
    vllm_ops.minimax_m3_index_decode(**decode_arguments(32, 1, 1, 6))
    assert vllm_ops._ENGINES.built - before == 3


def test_engines_are_bounded_and_least_recently_used_ones_go():
    for topk in range(1, 1 + 2 * shared.MAX_ENGINES):
        vllm_ops.minimax_m3_index_decode(**decode_arguments(topk=topk))
        vllm_ops.minimax_m3_index_decode(**decode_arguments(topk=1))
    assert len(vllm_ops._ENGINES) == shared.MAX_ENGINES
    before = vllm_ops._ENGINES.built
    vllm_ops.minimax_m3_index_decode(**decode_arguments(topk=1))
    assert vllm_ops._ENGINES.built == before


def borrow(cache, topk=4, requests=2, blocks=6, tokens=0):
    """One call's engine."""
    demand = shared.Demand(CacheLayout("bf16"), 1, topk, 0, 1, 1, requests, blocks, tokens)
    with cache.borrow("the op", DEVICE, "reference", None, demand) as engine:
        return engine


def test_a_capture_without_an_engine_says_what_to_warm_up(monkeypatch):
    cache = shared.EngineCache()
    borrow(cache)
    monkeypatch.setattr(shared, "is_capturing", lambda device: True)
    borrow(cache, requests=16)
    with pytest.raises(RuntimeError, match=r"the op: .* 2 requests, 6 blocks, none was used before\. .*topk=5"):
        borrow(cache, topk=5)
    with pytest.raises(RuntimeError, match=r"17 requests, 6 blocks, the largest batch before was 16 requests, 2048"):
        borrow(cache, requests=17)
    with pytest.raises(UnsupportedConfigError, match="topk=99"):
        borrow(cache, topk=99)


def test_captured_engines_outlive_eviction_and_growth():
    """A graph replays the addresses of its engine's buffers, so they must stay."""
    cache = shared.EngineCache(capacity=2)
    first = borrow(cache)
    first.captured = True
    larger = borrow(cache, requests=100)
    assert larger is not first
    borrow(cache, topk=5).captured = True
    borrow(cache, topk=6)
    borrow(cache, topk=7)
    assert len(cache) == 4  # two current ones, the replaced one, the evicted one; the larger one is gone
    assert first in cache._captured
    assert larger not in [*cache._captured, *cache._current.values()]
    cache.clear()
    assert len(cache) == 0


def test_maxima_are_rounded_within_what_is_supported():
    most = shared.Demand(CacheLayout("bf16"), 1, 4, 0, 1, 1, 5, 65534, 1 << 24).rounded(None)
    assert (most.requests, most.blocks, most.tokens) == (16, 65534, 1 << 24)
    most.config()
    grown = shared.Demand(CacheLayout("bf16"), 1, 4, 0, 1, 1, 100, 3000, 0).rounded(most)
    assert (grown.requests, grown.blocks) == (128, 65534)


def test_engines_made_in_inference_mode_serve_outside_of_it():
    scores = torch.zeros(1, 5, 6)
    rows = (torch.tensor([0, 5], dtype=torch.int32), ints(1), 5, 4, 0, 1)
    with vllm_ops.use_backend("interpreter", "sm90"):
        with torch.inference_mode():
            vllm_ops.minimax_m3_index_topk(scores, *rows)
        assert vllm_ops.minimax_m3_index_topk(scores, *rows).tolist() == [[[0, -1, -1, -1]] * 5]

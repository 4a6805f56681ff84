# SPDX-License-Identifier: Apache-2.0
"""What the wrappers of blockpick.compat.msa refuse: the classes and the wording that callers of MSA match on."""

from __future__ import annotations

import pytest
import torch

from blockpick.compat import msa
from blockpick.compat.msa import (
    BatchDecodeIndexerQ8KV4Wrapper,
    BatchDecodeIndexerQ8KV8Wrapper,
    BatchPrefillIndexerQ8KV8Wrapper,
)

DECODERS = [BatchDecodeIndexerQ8KV4Wrapper, BatchDecodeIndexerQ8KV8Wrapper]
E4M3 = torch.float8_e4m3fn
REFERENCE = {"backend": "reference"}


def table_of(batch=4, width=3, dtype=torch.int32):
    return torch.zeros(batch, width, dtype=dtype)


def lens_of(batch=4, dtype=torch.int32):
    return torch.full((batch,), 300, dtype=dtype)


def queries(tokens=32, heads=1, dtype=E4M3):
    return torch.zeros(tokens, heads, 128).to(dtype)


def keys(cls, pages=3):
    layout = msa.BatchDecodeIndexerQ8KV8Wrapper._layout if cls is BatchPrefillIndexerQ8KV8Wrapper else cls._layout
    return layout.empty(pages, "cpu").zero_()


def planned(cls):
    wrapper = cls(**REFERENCE)
    wrapper.plan(table_of(), lens_of())
    return wrapper


@pytest.mark.parametrize("cls", DECODERS)
@pytest.mark.parametrize(
    "options,error,message",
    [
        ({"num_heads": 0}, ValueError, r"num_heads must be one of \(1, 2, 4\), got 0"),
        ({"num_heads": 3}, ValueError, "num_heads must be one of"),
        ({"num_heads": 8}, ValueError, "num_heads must be one of"),
        ({"num_heads": 2.0}, ValueError, r"num_heads must be one of \(1, 2, 4\), got 2.0"),
        ({"use_cuda_graph": True}, ValueError, "CUDA Graph mode requires block_table_buffer and seq_lens_buffer"),
        ({"use_cuda_graph": True, "block_table_buffer": table_of()}, ValueError, "CUDA Graph mode requires"),
        ({"block_table_buffer": table_of()}, ValueError, "only valid with use_cuda_graph=True"),
        ({"seq_lens_buffer": lens_of()}, ValueError, "only valid with use_cuda_graph=True"),
        ({"use_cuda_graph": True, "block_table_buffer": table_of(3), "seq_lens_buffer": lens_of()}, ValueError,
         r"block_table must have shape \[4, max_blocks\]"),
        ({"workspace_buffer": [1]}, TypeError, "workspace_buffer must be a torch.Tensor"),
        ({"workspace_buffer": torch.zeros(99)}, TypeError, "workspace_buffer must have dtype torch.uint8"),
        ({"workspace_buffer": torch.zeros(9, 9, dtype=torch.uint8)}, ValueError, "workspace_buffer must be one-dim"),
        ({"workspace_buffer": torch.zeros(99, dtype=torch.uint8)[1:]}, ValueError, "must be 4-byte aligned"),
        ({"workspace_buffer": torch.zeros(99, dtype=torch.uint8)[::2]}, ValueError, "must be contiguous"),
        ({"score_buffer": torch.zeros(99).half()}, TypeError, "score_buffer must have dtype torch.float32"),
        ({"score_buffer": torch.zeros(9, 9)}, ValueError, "score_buffer must be one-dimensional"),
    ],
)  # fmt: skip
def test_constructors(cls, options, error, message):
    with pytest.raises(error, match=message):
        cls(**options, **REFERENCE)


@pytest.mark.parametrize("cls", DECODERS)
def test_sizes(cls):
    for size in (cls.workspace_size, lambda n, **k: cls.score_buffer_size(n, 5, **k)):
        for bad in (0, 3, 8, 2.0, True):
            with pytest.raises(ValueError, match="num_heads must be one of"):
                size(4, num_heads=bad)
        for count, error, message in (
            (0, ValueError, "positive"),
            (True, TypeError, "integer"),
            (1.5, TypeError, "int"),
        ):
            with pytest.raises(error, match=message):
                size(count)
    with pytest.raises(ValueError, match="max_pages must be positive"):
        cls.score_buffer_size(4, 0)
    assert cls.workspace_size(1) < cls.workspace_size(1025, num_heads=4)


@pytest.mark.parametrize("cls", DECODERS)
def test_cpu_tensors_need_a_backend_that_runs_on_them(cls):
    with pytest.raises(ValueError, match="seq_lens must be a CUDA tensor"):
        cls().plan(table_of(), lens_of())
    with pytest.raises(ValueError, match="workspace_buffer must be a CUDA tensor"):
        cls(torch.zeros(99, dtype=torch.uint8))
    with pytest.raises(ValueError, match="cu_seqlens_q must be a CUDA tensor"):
        BatchPrefillIndexerQ8KV8Wrapper().plan(
            torch.tensor([0, 4], dtype=torch.int32), lens_of(1), table_of(1), total_q=4, max_seqlen_q=4,
            max_seqlen_k=300,
        )  # fmt: skip


@pytest.mark.parametrize("cls", DECODERS)
@pytest.mark.parametrize(
    "table,lens,error,message",
    [
        (table_of(dtype=torch.int64), lens_of(), TypeError, "block_table must have dtype torch.int32, got torch.int64"),
        (table_of(), lens_of(dtype=torch.int64), TypeError, "seq_lens must have dtype torch.int32"),
        ("table", lens_of(), TypeError, "block_table must be a torch.Tensor"),
        (table_of(3), lens_of(), ValueError, r"block_table must have shape \[4, max_blocks\]"),
        (table_of()[0], lens_of(), ValueError, "block_table must have shape"),
        (table_of(width=0), lens_of(), ValueError, r"block_table max_blocks must be in \[1, 8192\]"),
        (table_of(width=8193), lens_of(), ValueError, "max_blocks"),
        (table_of(3, 4).t(), lens_of(), ValueError, "block_table must be contiguous"),
        (table_of(0), lens_of(0), ValueError, r"seq_lens must have shape \[batch\]"),
        (table_of(), lens_of()[None], ValueError, r"seq_lens must have shape \[batch\]"),
        (table_of(), lens_of(8)[::2], ValueError, "seq_lens must be contiguous"),
    ],
)
def test_plans_of_decode(cls, table, lens, error, message):
    with pytest.raises(error, match=message):
        cls(**REFERENCE).plan(table, lens)


def test_query_lengths():
    """1..8 on Q8KV4, 8 on Q8KV8; a refusal leaves the earlier plan in force."""
    for bad in (0, 9, True, -1, 2.0, "8"):
        wrapper = planned(BatchDecodeIndexerQ8KV4Wrapper)
        with pytest.raises(ValueError, match=r"BatchDecodeIndexerQ8KV4Wrapper supports query_len in \[1, 8\], got"):
            wrapper.plan(table_of(), lens_of(), query_len=bad)
        wrapper.run(queries(), keys(BatchDecodeIndexerQ8KV4Wrapper))
    for bad in (1, 7, 9, True):
        with pytest.raises(ValueError, match="BatchDecodeIndexerQ8KV8Wrapper supports query_len 8, got"):
            BatchDecodeIndexerQ8KV8Wrapper(**REFERENCE).plan(table_of(), lens_of(), query_len=bad)


@pytest.mark.parametrize("cls", DECODERS)
def test_buffers_too_small_for_a_batch(cls):
    size = cls.workspace_size(4)
    wrapper = cls(torch.zeros(size - 1, dtype=torch.uint8), **REFERENCE)
    with pytest.raises(ValueError, match=f"workspace_buffer must be on cpu with at least {size} bytes"):
        wrapper.plan(table_of(), lens_of())
    wrapper.plan(table_of(2), lens_of(2))
    size = cls.score_buffer_size(4, 3)
    with pytest.raises(ValueError, match=f"score_buffer must be on cpu with at least {size} float32 elements"):
        cls(score_buffer=torch.zeros(size - 1), **REFERENCE).plan(table_of(), lens_of())


def misaligned(tensor):
    """A copy one byte behind a multiple of 16."""
    storage = torch.zeros(tensor.numel() * tensor.element_size() + 16, dtype=torch.uint8)
    return storage[1 : 1 + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)


def strided(cls, page_bytes):
    """A cache of three pages that begin ``page_bytes`` apart."""
    like = keys(cls)
    return torch.as_strided(
        torch.zeros(4 * 16384, dtype=torch.uint8).view(like.dtype), like.shape, (page_bytes, like.stride(1), 1)
    )


@pytest.mark.parametrize("cls", DECODERS)
@pytest.mark.parametrize(
    "change,error,message",
    [
        ({"q": queries(4, 8)}, ValueError, r"q must have shape \[32, 1, 128\], got \(4, 8, 128\)"),
        ({"q": queries(32, 4)}, ValueError, "q must have shape"),
        ({"q": queries(31)}, ValueError, "q must have shape"),
        ({"q": queries(dtype=torch.bfloat16)}, TypeError, "q must have dtype torch.float8_e4m3fn, got torch.bfloat16"),
        ({"q": queries(64)[::2]}, ValueError, "q must be contiguous"),
        ({"q": None}, TypeError, "q must be a torch.Tensor"),
        ({"q": misaligned(queries())}, ValueError, "q data pointer must be 16-byte aligned"),
        ({"out": torch.zeros(32, 16, dtype=torch.int32)}, ValueError, r"out must have shape \[32, 1, 16\]"),
        ({"out": torch.zeros(32, 1, 16)}, TypeError, "out must have dtype torch.int32"),
        ({"out": torch.zeros(32, 2, 16, dtype=torch.int32)[:, :1]}, ValueError, "out must be contiguous"),
    ],
)
def test_queries_and_outputs(cls, change, error, message):
    arguments = {"q": queries(), "k_cache": keys(cls), "out": None, **change}
    with pytest.raises(error, match=message):
        planned(cls).run(**arguments)


@pytest.mark.parametrize("cls", DECODERS)
def test_caches(cls):
    wrapper, cache, payload = planned(cls), keys(cls), cls._layout.page_bytes
    swapped = cache.transpose(0, 1).contiguous().transpose(0, 1)
    others = [keys(other) for other in DECODERS if other is not cls]
    for bad, error, message in [
        (cache[:, :64], ValueError, r"k_cache must have shape \[num_blocks, 128, "),
        (cache[:0], ValueError, "k_cache must have shape"),
        (swapped, ValueError, "k_cache pages must be contiguous"),
        (strided(cls, payload + 8), ValueError, f"page stride must be at least {payload} bytes and 16-byte aligned"),
        (strided(cls, payload - 16), ValueError, f"page stride .* got {payload - 16}"),
        (misaligned(cache), ValueError, "k_cache data pointer must be 16-byte aligned"),
        *((other, TypeError, "k_cache must have dtype") for other in others),
    ]:
        for call in (wrapper.run, wrapper._run_scores):
            with pytest.raises(error, match=message):
                call(queries(), bad)
    wrapper.run(queries(), strided(cls, payload + 16))


@pytest.mark.parametrize("cls", [*DECODERS, BatchPrefillIndexerQ8KV8Wrapper])
def test_a_run_needs_a_plan(cls):
    for call in ("run", "_run_scores"):
        with pytest.raises(RuntimeError, match=r"plan\(\) must be called before run\(\)"):
            getattr(cls(**REFERENCE), call)(queries(), keys(cls))
    if cls is BatchPrefillIndexerQ8KV8Wrapper:
        with pytest.raises(RuntimeError, match=r"plan\(\) must be called before replan\(\)"):
            cls(**REFERENCE).replan()


@pytest.mark.parametrize("cls", [*DECODERS, BatchPrefillIndexerQ8KV8Wrapper])
def test_no_plan_inside_a_capture(cls, monkeypatch):
    """Whatever says that a capture is under way: the wrappers refuse in MSA's words."""

    def refuse(device, call):
        raise RuntimeError(f"{call}: not allowed inside a graph capture")

    monkeypatch.setattr("blockpick.compat.msa_checks.check_not_capturing", refuse)
    with pytest.raises(RuntimeError, match=r"plan\(\) must be called outside CUDA Graph capture"):
        plan_any(cls(**REFERENCE))


def plan_any(wrapper, **changes):
    if not isinstance(wrapper, BatchPrefillIndexerQ8KV8Wrapper):
        return wrapper.plan(table_of(), lens_of())
    good = {
        "cu_seqlens_q": torch.tensor([0, 10, 30], dtype=torch.int32), "seq_lens": torch.tensor([10, 120]).int(),
        "block_table": table_of(2, 1), "total_q": 30, "max_seqlen_q": 20, "max_seqlen_k": 120,
    }  # fmt: skip
    return wrapper.plan(**{**good, **changes})


@pytest.mark.parametrize("cls", [*DECODERS, BatchPrefillIndexerQ8KV8Wrapper])
def test_the_first_scores_are_not_captured(cls, monkeypatch):
    wrapper = cls(**REFERENCE)
    plan_any(wrapper)

    def refuse(device, call):
        raise RuntimeError(f"{call}: not allowed inside a graph capture")

    monkeypatch.setattr("blockpick.compat.msa_checks.check_not_capturing", refuse)
    q = queries(30) if cls is BatchPrefillIndexerQ8KV8Wrapper else queries()
    with pytest.raises(RuntimeError, match=r"the first _run_scores\(\) must be called outside CUDA Graph capture"):
        wrapper._run_scores(q, keys(cls))


def test_a_device_without_kernels_is_a_runtime_error(monkeypatch):
    """MSA raises RuntimeError on other architectures than its own; blockpick where no kernels are installed."""
    monkeypatch.setattr("blockpick.dispatch.installed_packages", dict)
    with pytest.raises(RuntimeError, match=r"^Q8KV4/Q8KV8 indexers: "):
        wrapper = BatchDecodeIndexerQ8KV4Wrapper(backend="interpreter", arch="sm90")
        wrapper.plan(table_of(), lens_of())


@pytest.mark.parametrize(
    "changes,error,message",
    [
        ({"max_seqlen_k": 10}, ValueError, "bottom-right causal alignment requires max_seqlen_k >= max_seqlen_q"),
        ({"max_seqlen_k": 10_000}, ValueError, r"max_blocks is smaller than ceil\(max_seqlen_k / 128\)"),
        ({"seq_lens": lens_of(1)}, ValueError, r"seq_lens must have shape \[2\]"),
        ({"seq_lens": lens_of(2, torch.int64)}, TypeError, "seq_lens must have dtype torch.int32"),
        ({"block_table": table_of(3, 1)}, ValueError, r"block_table must have shape \[2, max_blocks\]"),
        (
            {"cu_seqlens_q": torch.zeros(1, dtype=torch.int32)},
            ValueError,
            r"cu_seqlens_q must have shape \[batch \+ 1\]",
        ),
        ({"cu_seqlens_q": torch.zeros(3)}, TypeError, "cu_seqlens_q must have dtype torch.int32"),
        ({"total_q": 0}, ValueError, "total_q, max_seqlen_q, and max_seqlen_k must be positive"),
        ({"max_seqlen_q": -1}, ValueError, "must be positive"),
    ],
)
def test_plans_of_prefill(changes, error, message):
    with pytest.raises(error, match=message):
        plan_any(BatchPrefillIndexerQ8KV8Wrapper(**REFERENCE), **changes)


def test_tensors_of_prefill():
    for bad in (0, 3, 8, 2.0, True):
        with pytest.raises(ValueError, match="num_heads must be one of"):
            BatchPrefillIndexerQ8KV8Wrapper(num_heads=bad)
    wrapper = BatchPrefillIndexerQ8KV8Wrapper(**REFERENCE)
    plan_any(wrapper)
    cache = keys(BatchPrefillIndexerQ8KV8Wrapper)
    for arguments, error, message in [
        ((queries(29), cache), ValueError, "q must have shape"),
        ((queries(30, 2), cache), ValueError, "q must have shape"),
        ((queries(30), cache.view(torch.uint8)), TypeError, "k_cache must have dtype"),
    ]:
        with pytest.raises(error, match=message):
            wrapper.run(*arguments)
    with pytest.raises(ValueError, match="out must have shape"):
        wrapper.run(queries(30), cache, out=torch.zeros(30, 16, dtype=torch.int32))

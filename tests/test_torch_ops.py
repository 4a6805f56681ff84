# SPDX-License-Identifier: Apache-2.0
"""torch.ops.blockpick: opcheck, full-graph compilation, handles."""

from __future__ import annotations

import gc

import pytest
import torch
from fused_cases import rows
from sparse_cases import sparse_table

from blockpick import CacheLayout, SparseTable
from blockpick.testing.cases import DecodeCase, build
from blockpick.testing.prefill_cases import PrefillCase, build_prefill

DISPATCH_TESTS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def planned(executor, dtype):
    """An indexer with a plan, its batch, and the ids of a direct decode."""
    case = DecodeCase("ops", dtype, (2500, 700), data="integer")
    indexer, batch = executor.indexer(case.layout(), **case.options()), build(case).to(executor.device)
    plan = indexer.plan_decode(batch.block_table, batch.seq_lens, query_len=1)
    out = torch.full((2, 1, 16), -7, dtype=torch.int32, device=executor.device)
    indexer.decode(plan, batch.q, batch.cache, out)
    return indexer, plan, batch, out


@pytest.mark.parametrize("dtype", ["bf16", "nvfp4"])
def test_opcheck_decode_pick(one_executor, dtype):
    """All of opcheck for bf16; its schema test does arithmetic on the arguments, which torch lacks for float8."""
    indexer, _, batch, expected = planned(one_executor, dtype)
    out = torch.empty_like(expected)
    tests = ("test_schema", *DISPATCH_TESTS) if dtype == "bf16" else DISPATCH_TESTS
    torch.library.opcheck(
        torch.ops.blockpick.decode_pick, (batch.q, batch.cache, out, indexer.handle()), test_utils=tests
    )


@pytest.mark.parametrize("dtype", ["bf16", "nvfp4"])
def test_opcheck_insert(one_executor, dtype):
    layout = CacheLayout(dtype)
    cache = layout.empty(2, one_executor.device)
    cache.zero_()
    keys = torch.randn(5, 128, device=one_executor.device).bfloat16()
    slots = torch.tensor([0, 200, -1, 7, 255], device=one_executor.device)
    # auto is the reference on the CPU; the kernels' own path is covered by test_insert
    torch.library.opcheck(torch.ops.blockpick.insert, (keys, slots, cache, dtype, 128))


def test_full_graph(one_executor):
    """decode inside a compiled region becomes the op and needs no graph break."""
    indexer, plan, batch, expected = planned(one_executor, "nvfp4")

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q, cache, out):
        indexer.decode(plan, q + 0 if q.dtype == torch.bfloat16 else q, cache, out)
        return out * 1

    out = torch.empty_like(expected)
    assert torch.equal(step(batch.q, batch.cache, out), expected)


def test_handles(one_executor):
    """A handle works while its indexer lives and has a plan; afterwards it is refused by number."""
    indexer = one_executor.indexer(CacheLayout("bf16"), max_requests=1, max_seq_len=128)
    handle = indexer.handle()
    q = torch.zeros(1, 1, 128, dtype=torch.bfloat16, device=one_executor.device)
    cache, out = (
        CacheLayout("bf16").empty(1, one_executor.device),
        torch.empty(1, 1, 16, dtype=torch.int32, device=one_executor.device),
    )
    with pytest.raises(ValueError, match="no plan"):
        torch.ops.blockpick.decode_pick(q, cache, out, handle)
    del indexer
    gc.collect()
    with pytest.raises(ValueError, match=f"{handle} belongs to no live Indexer"):
        torch.ops.blockpick.decode_pick(q, cache, out, handle)


def planned_prefill(executor, dtype="bf16"):
    """An indexer with a prefill plan, its batch, and the ids of a direct prefill."""
    case = PrefillCase("ops", dtype, ((5, 2300), (3, 100)), data="integer")
    indexer, batch = executor.indexer(case.layout(), **case.options()), build_prefill(case).to(executor.device)
    plan = indexer.plan_prefill(batch.cu_seqlens_q, batch.seq_lens, batch.block_table, num_tokens=8)
    return indexer, plan, batch, indexer.prefill(plan, batch.q, batch.cache, torch.empty_like(batch.out))


@pytest.mark.parametrize("dtype", ["bf16", "e4m3fn", "nvfp4"])
def test_opcheck_prefill_pick(one_executor, dtype):
    """All of opcheck for bf16, as for decode_pick; the op writes what a direct prefill does."""
    indexer, _, batch, expected = planned_prefill(one_executor, dtype)
    out = torch.empty_like(expected)
    tests = ("test_schema", *DISPATCH_TESTS) if dtype == "bf16" else DISPATCH_TESTS
    arguments = (batch.q, batch.cache, out, indexer.handle())
    torch.library.opcheck(torch.ops.blockpick.prefill_pick, arguments, test_utils=tests)
    torch.ops.blockpick.prefill_pick(*arguments)
    assert torch.equal(out, expected)
    with pytest.raises(ValueError, match="slot 0 of the indexer has no plan"):
        torch.ops.blockpick.decode_pick(batch.q, batch.cache, out, indexer.handle())


@pytest.mark.parametrize("out_layout", ["thk", "htk"])
def test_a_step_in_a_full_graph(one_executor, out_layout):
    """pick becomes the ops of its halves; wrong rows and things that are no step are refused while tracing."""
    case = PrefillCase("ops", "bf16", ((1, 2290), (9, 300)), data="integer", out_layout=out_layout)
    indexer, batch = one_executor.indexer(case.layout(), **case.options()), build_prefill(case).to(one_executor.device)
    planned = indexer.plan_step([0, 1, 10], batch.seq_lens, batch.block_table)
    expected = indexer.pick(planned, batch.q, batch.cache, torch.empty_like(batch.out))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q, cache, out):
        indexer.pick(planned, q + 0, cache, out)
        return out * 1

    assert torch.equal(step(batch.q, batch.cache, torch.empty_like(expected)), expected)
    out = torch.full_like(expected, -7)
    with pytest.raises(Exception, match="q: must have 10 rows"):
        step(batch.q[:9], batch.cache, out)
    assert out.unique().tolist() == [-7]


def test_prefill_in_a_full_graph(one_executor):
    indexer, plan, batch, expected = planned_prefill(one_executor)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q, cache, out):
        indexer.prefill(plan, q + 0, cache, out)
        return out * 1

    assert torch.equal(step(batch.q, batch.cache, torch.empty_like(expected)), expected)


def with_table(executor, call):
    """A decode or a prefill, as (indexer, its method, plan, op, tensors), and the ids and table that it writes directly."""
    if call == "decode":
        indexer, plan, batch, out = planned(executor, "bf16")
        run, op, tokens = indexer.decode, torch.ops.blockpick.decode_pick_sparse, 2
    else:
        indexer, plan, batch, out = planned_prefill(executor)
        run, op, tokens = indexer.prefill, torch.ops.blockpick.prefill_pick_sparse, 8
    sparse = sparse_table(indexer, 2, tokens, batch.block_table.shape[1], 8)
    run(plan, batch.q, batch.cache, out, sparse_table=sparse)
    return indexer, run, plan, op, batch, out, sparse


def copies(sparse):
    """The same table with outputs of its own."""
    outputs = torch.empty_like(sparse.table), torch.empty_like(sparse.context_lens)
    return SparseTable(sparse.attention_block_table, sparse.block_page_stride, *outputs)


@pytest.mark.parametrize("call", ["decode", "prefill"])
def test_opcheck_with_a_sparse_table(one_executor, call):
    """The table and its lengths are declared as written."""
    indexer, _, _, op, batch, expected, sparse = with_table(one_executor, call)
    other = copies(sparse)
    fields = other.attention_block_table, other.table, other.context_lens, 8
    padding = (False,) if call == "decode" else ()
    arguments = batch.q, batch.cache, torch.empty_like(expected), indexer.handle(), *padding, *fields
    torch.library.opcheck(op, arguments)  # runs on copies
    op(*arguments)
    assert torch.equal(other.table, sparse.table) and torch.equal(other.context_lens, sparse.context_lens)
    written = {argument.name for argument in op.default._schema.arguments if argument.is_write}
    assert written == {"out", "table", "context_lens"}


@pytest.mark.parametrize("call", ["decode", "prefill"])
def test_a_sparse_table_in_a_full_graph(one_executor, call):
    """What the graph computes from a table, and from one that it makes itself, sees what the op wrote."""
    _, run, plan, _, batch, expected, sparse = with_table(one_executor, call)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q, cache, out, sparse):
        run(plan, q + 0, cache, out, sparse_table=sparse)
        made = SparseTable(sparse.attention_block_table, 16, sparse.table.clone(), sparse.context_lens.clone())
        run(plan, q + 0, cache, out, sparse_table=made)
        return out * 1, sparse.table * 1, made.table * 1, sparse.context_lens + made.context_lens

    def is_refused(q, cache, out):
        return run(plan, q, cache, out, sparse_table={})

    given = copies(sparse)
    ids, table, doubled, lens = step(batch.q, batch.cache, torch.empty_like(expected), given)
    assert torch.equal(ids, expected) and torch.equal(table, sparse.table) and torch.equal(given.table, sparse.table)
    assert torch.equal(doubled.view(-1, 8)[:, 0], 2 * sparse.table.view(-1, 8)[:, 0])
    assert torch.equal(lens, 2 * sparse.context_lens) and torch.equal(given.context_lens, sparse.context_lens)
    with pytest.raises(Exception, match="sparse_table: must be a SparseTable, is dict"):
        torch.compile(is_refused, fullgraph=True, backend="aot_eager")(batch.q, batch.cache, torch.empty_like(expected))


def test_opcheck_fused_insert(one_executor):
    """auto is the reference on the CPU; the kernels' own path is covered by test_fused_insert."""
    call = rows(6, 2, one_executor.device)
    cache = CacheLayout("bf16").empty(5, one_executor.device)
    cache.zero_()
    q_out = torch.zeros(6, 2, 128, dtype=torch.bfloat16, device=one_executor.device)
    columns = {"qkv": call["qkv"].nan_to_num(0.0)}  # the schema test compares arguments, NaN with NaN
    tensors = [{**call, **columns}[n] for n in ("slot_mapping", "positions", "cos_sin", "q_weight", "k_weight")]
    arguments = (cache, columns["qkv"], q_out, *tensors, call["q_column"], call["k_column"], 1e-6, "bf16", 128)
    torch.library.opcheck(torch.ops.blockpick.qk_norm_rope_insert, arguments)

# SPDX-License-Identifier: Apache-2.0
"""The decode wrappers of blockpick.compat.msa against the oracle, by the reference and by kernels."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from executors import Executor, executors

from blockpick.compat.msa import BatchDecodeIndexerQ8KV4Wrapper, BatchDecodeIndexerQ8KV8Wrapper
from blockpick.testing.cases import DecodeCase, build
from blockpick.testing.reference import block_scores, query_positions, select_blocks

POISON = 123.0
LENS = (2307, 1, 0, 5, 135)
WRAPPERS = {"e4m3fn": BatchDecodeIndexerQ8KV8Wrapper, "nvfp4": BatchDecodeIndexerQ8KV4Wrapper}
built = functools.lru_cache(build)  # of equal cases, for both ways; no test writes into it
WAYS = [pytest.param(Executor("reference", "reference", None, "cpu"), id="reference"), *executors("one_executor")]


@pytest.fixture(params=WAYS)
def way(request):
    with request.param.active():
        yield request.param


def wrapper_of(way, dtype, **options):
    return WRAPPERS[dtype](backend=way.backend, arch=way.arch, **options)


def batch_of(dtype, seq_lens, way=None, **options):
    """A batch whose table rows are wider than the table, unused pages poisoned, with the case that it was built from."""
    rounding = "e4m3" if dtype == "nvfp4" else None
    options = {"query_len": 8, "data": "integer", **options}
    case = DecodeCase("msa", dtype, tuple(seq_lens), rounding=rounding, **options)
    return case, built(case).to(way.device if way else "cpu")


def oracle_scores(case, batch):
    """float64 [B, L, H, W] of all visible pages, own page included."""
    cpu = batch.to("cpu")
    tensors = (cpu.cache, cpu.q, cpu.block_table, cpu.seq_lens, case.query_len)
    return block_scores(case.layout(), *tensors, case.rounding or "exact")


def rows_of(case, batch):
    """Every (request, query, head) with the query's position."""
    positions = query_positions(batch.seq_lens.cpu(), case.query_len, batch.block_table.shape[1] * 128)
    for b, i in itertools.product(range(len(case.seq_lens)), range(case.query_len)):
        for h in range(case.num_heads):
            yield b, i, h, int(positions[b, i])


def check_ids(case, batch, ids, scores):
    """``ids`` are what exact selection on ``scores`` [B, L, H, W] gives, in MSA's order."""
    assert ids.shape == (len(batch.q), case.num_heads, 16) and ids.dtype == torch.int32
    ids = ids.cpu().view(len(case.seq_lens), case.query_len, case.num_heads, 16)
    for b, i, h, position in rows_of(case, batch):
        wanted = select_blocks(scores[b, i, h].float(), position, 16, 0, 1, "local_last", "block_zero")
        assert ids[b, i, h].tolist() == wanted, (b, i, h, position)


def check_stored(case, batch, stored, oracle, tolerance=0.0):
    """The last L slots hold the scores below the own page, everything else is still poison."""
    batch_size, width = batch.block_table.shape
    assert stored.shape == (batch_size, 8 * case.num_heads, width) and stored.dtype == torch.float32
    stored = stored.cpu().view(batch_size, 8, case.num_heads, width)
    assert (stored[:, : 8 - case.query_len] == POISON).all()
    for b, i, h, position in rows_of(case, batch):
        own = max(position // 128, 0)
        row = stored[b, 8 - case.query_len + i, h]
        assert (row[own:] == POISON).all(), (b, i, h)
        torch.testing.assert_close(row[:own].double(), oracle[b, i, h, :own], atol=tolerance, rtol=tolerance)


CASES = [
    ("nvfp4", 1, 1, 0), ("nvfp4", 2, 3, 0), ("nvfp4", 4, 8, 256), ("nvfp4", 1, 8, 7168), ("nvfp4", 4, 2, 0),
    ("nvfp4", 1, 5, 0), ("e4m3fn", 1, 8, 0), ("e4m3fn", 2, 8, 512), ("e4m3fn", 4, 8, 0),
]  # fmt: skip


@pytest.mark.parametrize("dtype,heads,query_len,padding", CASES)
def test_ids_and_scores_match_the_oracle(way, dtype, heads, query_len, padding):
    """Full and partial pages, empty requests, fewer tokens than queries, ties; scores and ids of one plan agree."""
    case, batch = batch_of(dtype, LENS, way, num_heads=heads, query_len=query_len, page_padding=padding)
    wrapper = wrapper_of(way, dtype, num_heads=heads)
    wrapper.plan(batch.block_table, batch.seq_lens, query_len=query_len)
    oracle = oracle_scores(case, batch)
    check_ids(case, batch, wrapper.run(batch.q, batch.cache), oracle)
    wrapper._scores.fill_(POISON)
    check_stored(case, batch, wrapper._run_scores(batch.q, batch.cache), oracle)
    pages = [min(max(p // 128 + 1, 1), batch.block_table.shape[1]) for _, _, _, p in rows_of(case, batch)]
    assert wrapper._num_valid_pages.tolist() == pages
    first = wrapper.run(batch.q, batch.cache).clone()
    assert torch.equal(first, wrapper.run(batch.q, batch.cache)), "a repeat run gives other ids"


@pytest.mark.parametrize("dtype", WRAPPERS)
@pytest.mark.parametrize("data", ["normal", "special"])
def test_selection_is_exact_on_the_runs_own_scores(way, dtype, data):
    """No rounding of scores to ranks: full fp32 order, an infinite or NaN page disturbs no other."""
    case, batch = batch_of(dtype, (4000, 2500), way, num_heads=2, data=data)
    wrapper = wrapper_of(way, dtype, num_heads=2)
    wrapper.plan(batch.block_table, batch.seq_lens)
    ids = wrapper.run(batch.q, batch.cache).clone()
    stored = wrapper._run_scores(batch.q, batch.cache).cpu().view(2, 8, 2, -1)
    check_ids(case, batch, ids, stored)
    oracle = oracle_scores(case, batch)
    for b, i, h, position in rows_of(case, batch):
        own = position // 128
        got, wanted = stored[b, i, h, :own].double(), oracle[b, i, h, :own]
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("dtype", WRAPPERS)
def test_near_ties_are_told_apart(way, dtype):
    """A huge page leaves the others' order alone, where ranks of 16 bits would make them ties."""
    layout = WRAPPERS[dtype]._layout
    cache = layout.empty(40, way.device)
    flat = torch.as_strided(cache.view(torch.uint8), (40, layout.page_bytes), (layout.page_bytes, 1))
    flat.zero_()
    sizes = torch.arange(40)
    sizes[3] = 119  # e4m3 bytes are ordered as numbers: 1.0 and up for page 3, next to nothing for the rest
    if dtype == "e4m3fn":
        flat.view(40, 128, 128)[:, 7, 0] = sizes.to(flat)
    else:
        flat[:, 7 * 64] = 2  # the code of 1.0 at dim 0 of token 7, and its scale
        flat[:, 8192 + 7 * 8] = sizes.to(flat)
    table = torch.arange(40, dtype=torch.int32, device=way.device)[None]
    q = torch.zeros(8, 1, 128, device=way.device)
    q[:, 0, 0] = 1.0
    wrapper = wrapper_of(way, dtype)
    wrapper.plan(table, torch.tensor([40 * 128], dtype=torch.int32, device=way.device))
    ids = wrapper.run(q.to(torch.float8_e4m3fn), cache)
    assert ids[:, 0].tolist() == [[3, *range(38, 24, -1), 39]] * 8


@pytest.mark.parametrize("dtype", WRAPPERS)
def test_equal_scores_go_to_the_lower_page_and_products_saturate(way, dtype):
    layout = WRAPPERS[dtype]._layout
    cache = layout.empty(20, way.device)
    table = torch.arange(20, dtype=torch.int32, device=way.device).flip(0)[None]
    wrapper = wrapper_of(way, dtype)
    wrapper.plan(table, torch.tensor([20 * 128], dtype=torch.int32, device=way.device))
    raw = torch.as_strided(cache.view(torch.uint8), (20, layout.page_bytes), (layout.page_bytes, 1))
    if dtype == "e4m3fn":
        raw.fill_(0xFE)  # -448
    else:
        raw[:, :8192], raw[:, 8192:] = 0xFF, 0x7E  # -6 * 448 saturates at -448
    q = torch.full((8, 1, 128), 448.0, device=way.device).to(torch.float8_e4m3fn)
    assert wrapper.run(q, cache)[:, 0].tolist() == [[*range(15), 19]] * 8
    wrapper._scores.fill_(POISON)
    scores = wrapper._run_scores(q, cache)
    assert (scores[:, :, :19] == -448.0 * 448.0 * 128).all() and (scores[:, :, 19:] == POISON).all()


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("query_len", [1, 2, 7])
def test_few_queries_are_the_last_rows_of_eight(way, heads, query_len):
    """The same ids and score bits as the last slots of a full tile."""
    _, batch = batch_of("nvfp4", (2500, 700, 9), way, num_heads=heads)
    full = wrapper_of(way, "nvfp4", num_heads=heads)
    full.plan(batch.block_table, batch.seq_lens)
    wanted = full.run(batch.q, batch.cache).view(3, 8, heads, 16)[:, -query_len:].flatten(0, 1)
    full._scores.fill_(POISON)
    scores = full._run_scores(batch.q, batch.cache)[:, (8 - query_len) * heads :]
    few = wrapper_of(way, "nvfp4", num_heads=heads)
    few.plan(batch.block_table, batch.seq_lens, query_len=query_len)
    q = batch.q.view(3, 8, heads, 128)[:, -query_len:].flatten(0, 1).contiguous()
    few._scores.fill_(POISON)
    assert torch.equal(few._run_scores(q, batch.cache)[:, (8 - query_len) * heads :], scores)
    out = torch.full((3 * query_len, heads, 16), -777, dtype=torch.int32, device=way.device)
    assert few.run(q, batch.cache, out=out) is out
    assert torch.equal(out, wanted) and torch.equal(few.run(q, batch.cache), wanted)


@pytest.mark.parametrize("dtype", WRAPPERS)
def test_one_plan_serves_layers_and_a_wrapper_serves_steps(way, dtype):
    """Other lengths, other batch sizes and widths on one wrapper; two layers of each; scores were asked for before."""
    wrapper = wrapper_of(way, dtype, num_heads=2)
    for step, lens in enumerate([(2307, 300), (9, 200, 2200), (260,)]):
        case, batch = batch_of(dtype, lens, way, num_heads=2, seed=step)
        wrapper.plan(batch.block_table, batch.seq_lens)
        for layer in range(2):
            q = batch.q.view(torch.uint8).roll(layer, 0).view(batch.q.dtype)
            layered = type(batch)(batch.cache, q, batch.block_table, batch.seq_lens, batch.out, batch.out_storage)
            oracle = oracle_scores(case, layered)
            check_ids(case, layered, wrapper.run(q, batch.cache), oracle)
            wrapper._scores.fill_(POISON)
            check_stored(case, layered, wrapper._run_scores(q, batch.cache), oracle)


@pytest.mark.parametrize("dtype", WRAPPERS)
def test_graph_buffers_are_what_later_plans_fill(way, dtype):
    """Metadata is copied into the fixed buffers; ids and scores keep their addresses; shapes are fixed."""
    case, batch = batch_of(dtype, (2500, 300), way)
    buffers = torch.zeros_like(batch.block_table).contiguous(), torch.zeros_like(batch.seq_lens)
    wrapper = wrapper_of(
        way, dtype, use_cuda_graph=True, block_table_buffer=buffers[0], seq_lens_buffer=buffers[1]
    )  # fmt: skip
    wrapper.plan(batch.block_table, batch.seq_lens)
    ids, scores = wrapper.run(batch.q, batch.cache), wrapper._run_scores(batch.q, batch.cache)
    check_ids(case, batch, ids, oracle_scores(case, batch))
    assert torch.equal(buffers[0], batch.block_table) and torch.equal(buffers[1], batch.seq_lens)
    shorter = torch.tensor([129, 2200], dtype=torch.int32, device=way.device)
    with pytest.raises(ValueError, match="CUDA Graph mode fixes block_table shape and device"):
        wrapper.plan(batch.block_table[:, :-1], shorter)
    with pytest.raises(ValueError, match="block_table must have shape"):
        wrapper.plan(batch.block_table[:1], shorter)
    assert torch.equal(buffers[1], batch.seq_lens), "a refused plan wrote into the buffers"
    table = batch.block_table.flip(0).clone()
    table[0, 3:] = -1  # a request of two pages now, out of the second one's table
    wrapper.plan(table, shorter)
    assert torch.equal(buffers[1], shorter) and torch.equal(buffers[0], table)
    again = wrapper.run(batch.q, batch.cache), wrapper._run_scores(batch.q, batch.cache)
    assert [t.data_ptr() for t in again] == [ids.data_ptr(), scores.data_ptr()]
    assert again[0][:8, 0].tolist() == [[0] + [-1] * 15] * 7 + [[0, 1] + [-1] * 14]


def test_sizes_and_buffers_of_both_generations(way):
    case, batch = batch_of("nvfp4", (2500, 300), way, num_heads=2, query_len=3)
    cls, (requests, width) = BatchDecodeIndexerQ8KV4Wrapper, batch.block_table.shape
    workspace = torch.full((cls.workspace_size(2, num_heads=2),), 0x5A, dtype=torch.uint8, device=way.device)
    size = cls.score_buffer_size(requests + 1, width, num_heads=2)
    assert size == 3 * 8 * 2 * width
    oracle = oracle_scores(case, batch)
    for dtype, numel in ((torch.float32, size), (torch.uint8, 4 * size + 3)):
        scratch = torch.zeros(numel, dtype=dtype, device=way.device)
        scratch[: numel // 4 * 4].view(torch.float32).fill_(POISON)
        wrapper = wrapper_of(way, "nvfp4", workspace_buffer=workspace, score_buffer=scratch, num_heads=2)
        wrapper.plan(batch.block_table, batch.seq_lens, query_len=3)
        check_ids(case, batch, wrapper.run(batch.q, batch.cache), oracle)
        stored = wrapper._run_scores(batch.q, batch.cache)
        assert stored.data_ptr() == scratch.data_ptr()
        check_stored(case, batch, stored, oracle)
        rest = scratch[: numel // 4 * 4].view(torch.float32)[stored.numel() :]
        assert (rest == POISON).all(), "something behind the batch's scores was written"


def test_metadata_needs_the_alignment_of_int32_only(way):
    case, batch = batch_of("e4m3fn", (2500, 300, 2400), way)
    lens = torch.cat([batch.seq_lens[:1], batch.seq_lens])[1:]
    table = torch.cat([batch.block_table.flatten()[:1], batch.block_table.flatten()])[1:].view_as(batch.block_table)
    assert lens.data_ptr() % 16 == 4 == table.data_ptr() % 16
    wrapper = wrapper_of(way, "e4m3fn")
    wrapper.plan(table, lens)
    check_ids(case, batch, wrapper.run(batch.q, batch.cache), oracle_scores(case, batch))


def test_lengths_beyond_the_table_end_at_its_last_page(way):
    _, batch = batch_of("e4m3fn", (2304, 2304), way, extra_width=0)
    wrapper = wrapper_of(way, "e4m3fn")
    lens = torch.tensor([5000, 1 << 30], dtype=torch.int32, device=way.device)
    wrapper.plan(batch.block_table, lens)
    ids = wrapper.run(batch.q, batch.cache)
    assert (ids[:, 0, 15] == 17).all() and wrapper._num_valid_pages.unique().tolist() == [18]

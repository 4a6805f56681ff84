# SPDX-License-Identifier: Apache-2.0
"""The prefill wrapper and the NVFP4 gather of blockpick.compat.msa against the oracle."""

from __future__ import annotations

import pytest
import torch
from executors import GPU, Executor, executors

from blockpick import CacheLayout
from blockpick.compat.msa import (
    BatchDecodeIndexerQ8KV4Wrapper,
    BatchPrefillIndexerQ8KV8Wrapper,
    minimax_m3_gather_nvfp4_index_k_fp8,
)
from blockpick.testing.cases import DecodeCase, build
from blockpick.testing.prefill_cases import PrefillCase, build_prefill
from blockpick.testing.reference import block_scores, dequantise, query_positions, select_blocks

POISON = 123.0
WAYS = [pytest.param(Executor("reference", "reference", None, "cpu"), id="reference"), *executors("one_executor")]
DEVICE = "cuda" if GPU else "cpu"
NVFP4 = CacheLayout("nvfp4")


@pytest.fixture(params=WAYS)
def way(request):
    with request.param.active():
        yield request.param


def wrapper_of(way, **options):
    return BatchPrefillIndexerQ8KV8Wrapper(backend=way.backend, arch=way.arch, **options)


def batch_of(way, requests, **options):
    case = PrefillCase("msa", "e4m3fn", tuple(requests), **{"data": "integer", **options})
    return case, build_prefill(case).to(way.device)


def plan(wrapper, case, batch, lens=None):
    bound = max(query_len + prefix for query_len, prefix in case.requests)
    wrapper.plan(
        batch.cu_seqlens_q, batch.seq_lens if lens is None else lens, batch.block_table, total_q=case.num_tokens,
        max_seqlen_q=max(query_len for query_len, _ in case.requests), max_seqlen_k=bound,
    )  # fmt: skip
    return -(-bound // 128)


def rows_of(case, batch, lens=None):
    """Every (token, position, scores by the oracle [H, W])."""
    cpu, token = batch.to("cpu"), 0
    lens = cpu.seq_lens if lens is None else lens.cpu()
    for b, (query_len, _) in enumerate(case.requests):
        if not query_len:
            continue
        step = (cpu.block_table[b : b + 1], lens[b : b + 1], query_len)
        scores = block_scores(case.layout(), cpu.cache, cpu.q[token : token + query_len], *step)[0]
        positions = query_positions(lens[b : b + 1], query_len, cpu.block_table.shape[1] * 128)[0].tolist()
        for i, position in enumerate(positions):
            yield token + i, position, scores[i]
        token += query_len


def check_ids(case, batch, ids, lens=None):
    assert ids.shape == (case.num_tokens, case.num_heads, 16) and ids.dtype == torch.int32
    for token, position, scores in rows_of(case, batch, lens):
        for h in range(case.num_heads):
            wanted = select_blocks(scores[h].float(), position, 16, 0, 1, "local_last", "block_zero")
            assert ids[token, h].tolist() == wanted, (token, h, position)


def check_stored(case, batch, stored, pages, lens=None):
    """Scores below the own page, everything else still poison, padding too."""
    assert stored.shape == (case.num_tokens * case.num_heads, pages) and stored.dtype == torch.float32
    stored = stored.cpu().view(case.num_tokens, case.num_heads, pages)
    seen = 0
    for token, position, scores in rows_of(case, batch, lens):
        own, seen = max(position // 128, 0), token + 1
        assert (stored[token, :, own:] == POISON).all(), token
        assert torch.equal(stored[token, :, :own].double(), scores[:, :own]), token
    assert (stored[seen:] == POISON).all()


CASES = {
    "one request": {"requests": ((40, 0),)},
    "page edges": {"requests": ((3, 126), (2, 1), (3, 127), (1, 128), (1, 255), (4, 2046)), "num_heads": 2},
    "no queries": {"requests": ((5, 0), (0, 500), (9, 2400), (0, 3), (1, 2303)), "num_heads": 4, "page_padding": 256},
    "padding": {"requests": ((4, 2300), (2, 900)), "num_heads": 2, "padding": 5},
}


@pytest.mark.parametrize("name", CASES)
def test_ids_and_scores_match_the_oracle(way, name):
    case, batch = batch_of(way, **CASES[name])
    wrapper = wrapper_of(way, num_heads=case.num_heads)
    pages = plan(wrapper, case, batch)
    out = torch.full((case.num_tokens, case.num_heads, 16), -777, dtype=torch.int32, device=way.device)
    assert wrapper.run(batch.q, batch.cache, out=out) is out
    check_ids(case, batch, out)
    assert (out[case.num_tokens - case.padding :] == -777).all()
    wrapper._state.scores.fill_(POISON)
    check_stored(case, batch, wrapper._run_scores(batch.q, batch.cache), pages)
    valid = [p // 128 + 1 for _, p, _ in rows_of(case, batch) for _ in range(case.num_heads)]
    assert wrapper._state.num_valid_pages.tolist() == valid + [0] * case.padding * case.num_heads
    live = slice(0, case.num_tokens - case.padding)
    assert torch.equal(wrapper.run(batch.q, batch.cache)[live], out[live])


def test_replan_reads_the_planned_tensors_again(way):
    """Lengths changed in place, also to more queries than tokens: another plan of the same buffers."""
    case, batch = batch_of(way, ((6, 2300), (5, 900), (3, 126)), num_heads=2)
    wrapper = wrapper_of(way, num_heads=2)
    pages = plan(wrapper, case, batch)
    ids = wrapper.run(batch.q, batch.cache)
    check_ids(case, batch, ids)
    wrapper._run_scores(batch.q, batch.cache)
    shorter = torch.tensor([2100, 3, 0], dtype=torch.int32, device=way.device)
    batch.seq_lens.copy_(shorter)
    wrapper.replan()
    again = wrapper.run(batch.q, batch.cache)
    assert again.data_ptr() == ids.data_ptr()
    check_ids(case, batch, again)
    wrapper._state.scores.fill_(POISON)
    check_stored(case, batch, wrapper._run_scores(batch.q, batch.cache), pages)


def test_one_wrapper_serves_steps_of_any_shape(way):
    wrapper = wrapper_of(way)
    for requests in (((3, 2300),), ((9, 40), (2, 2200), (1, 1)), ((1, 0),), ((2, 3000), (20, 5))):
        case, batch = batch_of(way, requests)
        pages = plan(wrapper, case, batch)
        check_ids(case, batch, wrapper.run(batch.q, batch.cache))
        wrapper._state.scores.fill_(POISON)
        check_stored(case, batch, wrapper._run_scores(batch.q, batch.cache), pages)


def test_scores_of_random_keys_are_within_the_tolerance_of_msas_tests(way):
    case, batch = batch_of(way, ((3, 2300),), data="normal")
    wrapper = wrapper_of(way)
    plan(wrapper, case, batch)
    stored = wrapper._run_scores(batch.q, batch.cache).cpu()
    ids = wrapper.run(batch.q, batch.cache)
    for token, position, scores in rows_of(case, batch):
        torch.testing.assert_close(stored[token, :17].double(), scores[0, :17], atol=2e-4, rtol=2e-4)
        row = torch.cat([stored[token, : position // 128], torch.zeros(1)])
        assert ids[token, 0].tolist() == select_blocks(row, position, 16, 0, 1, "local_last", "block_zero")


# ---- gather ----


def every_product():
    """Two pages, uint8 [2, 128, 72], that hold all 16 codes with all 256 scales."""
    pages = torch.zeros(2, 9216, dtype=torch.uint8)
    index = torch.arange(2 * 1024)
    pages[:, 8192:] = (index % 256).to(torch.uint8).view(2, 1024)
    order = torch.arange(16).roll(3)
    codes = torch.stack((order[::2], order[1::2]), -1)
    pages[:, :8192] = (codes[:, 0] | codes[:, 1] << 4).to(torch.uint8).repeat(2, 1024)
    return pages.view(2, 128, 72)


def test_every_code_and_scale_rounds_as_the_oracle_says():
    """Nearest even, saturation, NaN scales, signed zeros, subnormals."""
    kv = every_product()
    out = torch.zeros(2, 128, 128, device=DEVICE).to(torch.float8_e4m3fn)
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    moved = [t.to(DEVICE) for t in (kv, table, torch.tensor([2]).int(), torch.tensor([0]).int())]
    minimax_m3_gather_nvfp4_index_k_fp8(*moved, 2, out)
    wanted = dequantise(NVFP4, kv.flip(0), "e4m3").to(torch.float32).to(torch.float8_e4m3fn).view(torch.uint8)
    got = out.cpu().view(torch.uint8)
    nan = (got & 0x7F) == 0x7F
    assert torch.equal(nan, (wanted & 0x7F) == 0x7F) and (got[nan] == 0x7F).all() and nan.any()
    assert torch.equal(got[~nan], wanted[~nan])
    assert (got[~nan] & 0x7F).max() == 0x7E and (got == 0x80).any()


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("capacity", [7, 40])
def test_pages_land_where_the_offsets_say_and_nowhere_else(capacity, wide):
    """Gaps between requests, a request without history, garbage behind it, a bound above and a pool of padded pages."""
    generator = torch.Generator().manual_seed(3)
    raw = torch.randint(0, 256, (9, 16384), generator=generator, dtype=torch.uint8)
    raw[:, 8192:9216] &= 0x77  # no NaN scales
    kv = torch.as_strided(raw.to(DEVICE), (9, 128, 72), (16384, 72, 1))
    table = torch.randint(-(2**31), 2**31 - 1, (4, 8), generator=generator).int()
    counts, offsets = [2, 0, 3, 1], [0, 2, 3, 6]
    ids = {(0, 0): 8, (0, 1): 1, (2, 0): 5, (2, 1): 5, (2, 2): 0, (3, 0): 3}
    for (b, j), page in ids.items():
        table[b, j] = page
    tensors = (
        table[:, :6],
        torch.tensor(counts).int(),
        torch.tensor(offsets + [7]).to(torch.int64 if wide else torch.int32),
    )
    out = torch.full((capacity, 128, 128), POISON, device=DEVICE).to(torch.float8_e4m3fn)
    untouched = out[0].clone().view(torch.uint8)
    minimax_m3_gather_nvfp4_index_k_fp8(kv, *(t.to(DEVICE) for t in tensors), 5, out)
    wanted = {offsets[b] + j: page for (b, j), page in ids.items()}
    exact = dequantise(NVFP4, kv.cpu(), "e4m3").float()
    for slot in range(capacity):
        if slot in wanted:
            assert torch.equal(out[slot].cpu().float(), exact[wanted[slot]]), slot
        else:
            assert torch.equal(out[slot].view(torch.uint8), untouched), slot


@pytest.mark.slow
@pytest.mark.parametrize("requests,width", [(2, 32_768), (70_000, 1)])
def test_case_16_gather_of_more_pages_than_a_grid_dimension_holds(requests, width):
    """65,536 pages of two requests, and 70,000 requests of one page: every page comes from its own entry.

    Page p of the pool holds scale 1 and code p everywhere. The gather is torch on every route, so one device will do.
    """
    pool = 7
    kv = torch.zeros(pool, 128 * 72, dtype=torch.uint8)
    kv[:, :8192], kv[:, 8192:] = torch.arange(pool, dtype=torch.uint8)[:, None] * 17, 0x38
    pages = torch.arange(requests * width) * 5 % pool
    out = torch.zeros(requests * width, 128, 128, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    minimax_m3_gather_nvfp4_index_k_fp8(
        kv.view(pool, 128, 72).to(DEVICE), pages.int().view(requests, width).to(DEVICE),
        torch.full((requests,), width, dtype=torch.int32, device=DEVICE),
        (torch.arange(requests) * width).to(DEVICE), width, out,
    )  # fmt: skip
    wanted = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0])[pages]
    for row, dim in ((0, 0), (127, 127)):
        assert torch.equal(out[:, row, dim].cpu().float(), wanted)


def test_gathered_prefill_picks_what_decode_picks(way):
    """The last queries of a prompt: NVFP4 pages by the decode wrapper, gathered e4m3 pages by the prefill wrapper."""
    lens = (2500, 2304, 300, 130)
    case = DecodeCase("gather", "nvfp4", lens, num_heads=2, query_len=8, rounding="e4m3", data="integer")
    batch = build(case).to(way.device)
    decode = BatchDecodeIndexerQ8KV4Wrapper(num_heads=2, backend=way.backend, arch=way.arch)
    decode.plan(batch.block_table, batch.seq_lens)
    wanted = decode.run(batch.q, batch.cache)
    counts = (batch.seq_lens - 1) // 128
    offsets = (counts.cumsum(0) - counts).int()
    workspace = torch.zeros(int(counts.sum()), 128, 128, device=way.device).to(torch.float8_e4m3fn)
    minimax_m3_gather_nvfp4_index_k_fp8(
        batch.cache, batch.block_table, counts, offsets, int(counts.max()), workspace
    )  # fmt: skip
    width = int(counts.max()) + 1
    table = (offsets[:, None] + torch.arange(width, device=way.device)).int().contiguous()
    prefill = wrapper_of(way, num_heads=2)
    cu_seqlens = torch.arange(0, 33, 8, dtype=torch.int32, device=way.device)
    prefill.plan(cu_seqlens, batch.seq_lens, table, total_q=32, max_seqlen_q=8, max_seqlen_k=2500)
    assert torch.equal(prefill.run(batch.q, workspace), wanted)


GOOD = {
    "kv": torch.zeros(3, 128, 72, dtype=torch.uint8), "block_table": torch.zeros(2, 4, dtype=torch.int32),
    "num_pages": torch.zeros(2, dtype=torch.int32), "page_offsets": torch.zeros(2, dtype=torch.int32), "max_pages": 4,
    "out": torch.zeros(5, 128, 128).to(torch.float8_e4m3fn),
}  # fmt: skip


@pytest.mark.parametrize(
    "changes,error,message",
    [
        ({"kv": GOOD["kv"].view(torch.int8)}, TypeError, "kv must have dtype torch.uint8"),
        ({"kv": GOOD["kv"][:, :64]}, ValueError, r"kv must have shape \[num_blocks, 128, 72\]"),
        ({"block_table": GOOD["block_table"].long()}, TypeError, "block_table must have dtype"),
        ({"block_table": GOOD["block_table"][0]}, ValueError, r"block_table must have shape \[batch, max_blocks\]"),
        ({"num_pages": torch.zeros(3, dtype=torch.int32)}, ValueError, r"num_pages must have shape \[2\]"),
        ({"page_offsets": torch.zeros(1, dtype=torch.int32)}, ValueError, r"page_offsets must have shape \[2\]"),
        ({"page_offsets": torch.zeros(2)}, TypeError, "page_offsets must have dtype torch.int32"),
        ({"max_pages": -1}, ValueError, "max_pages must be a non-negative integer"),
        ({"max_pages": 2.0}, ValueError, "max_pages must be a non-negative integer"),
        ({"out": GOOD["out"].float()}, TypeError, "out must have dtype torch.float8_e4m3fn"),
        ({"out": GOOD["out"].flatten(1)}, ValueError, r"out must have shape \[pages, 128, 128\]"),
        ({"out": GOOD["out"][::2]}, ValueError, "out must be contiguous"),
    ],
)
def test_bad_gathers_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        minimax_m3_gather_nvfp4_index_k_fp8(**{**GOOD, **changes})


def test_an_empty_gather_changes_nothing():
    out = GOOD["out"].clone()
    for changes in ({"max_pages": 0}, {"out": out[:0]}, {"out": out}):
        minimax_m3_gather_nvfp4_index_k_fp8(**{**GOOD, **changes})
    assert torch.equal(out.float(), GOOD["out"].float())

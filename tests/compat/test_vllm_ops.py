# SPDX-License-Identifier: Apache-2.0
"""The drop-ins for vLLM's decode ops against the oracle: layouts, forced blocks, empty rows, buffers; all signatures."""

from __future__ import annotations

import inspect

import pytest
import torch

from blockpick.compat import vllm_ops
from blockpick.testing.cases import SENTINEL, DecodeCase, build
from blockpick.testing.reference import block_scores, query_positions, select_blocks


def oracle_decode(case, batch):
    """Scores [B, L, H, n] and ids [H, T, topk] of a decode batch."""
    cpu = batch.to("cpu")
    scores = block_scores(case.layout(), cpu.cache, cpu.q, cpu.block_table, cpu.seq_lens, case.query_len).float()
    positions = query_positions(cpu.seq_lens, case.query_len, cpu.block_table.shape[1] * 128)
    options = (case.topk, case.init_blocks, case.local_blocks, "score", "minus_one")
    ids = [
        [
            select_blocks(scores[b, i, h], int(positions[b, i]), *options)
            for b in range(len(case.seq_lens))
            for i in range(case.query_len)
        ]
        for h in range(case.num_heads)
    ]
    return scores, torch.tensor(ids, dtype=torch.int32)


def decode(case, batch, longest=None, **options):
    """``minimax_m3_index_decode`` on a batch, arguments in vLLM's order."""
    return vllm_ops.minimax_m3_index_decode(
        batch.q, batch.cache, batch.block_table, batch.seq_lens, batch.block_table.shape[1] * 128, case.topk,
        case.init_blocks, case.local_blocks, case.num_heads, case.query_len, longest or case.query_len, **options
    )  # fmt: skip


def decode_score(case, batch, score_out=None):
    """``minimax_m3_index_decode_score`` on a batch."""
    return vllm_ops.minimax_m3_index_decode_score(
        batch.q, batch.cache, batch.block_table, batch.seq_lens, batch.block_table.shape[1] * 128, case.init_blocks,
        case.local_blocks, case.num_heads, case.query_len, case.query_len, score_out
    )  # fmt: skip


LENS = (1400, 640, 0, 3, 129)
DECODES = [
    DecodeCase("one-query", "bf16", LENS, topk=4, data="integer"),
    DecodeCase("speculative", "bf16", LENS, num_heads=2, query_len=4, topk=4, data="integer"),
    DecodeCase("widest", "e4m3fn", LENS, num_heads=4, query_len=8, topk=4, init_blocks=1, data="integer"),
    DecodeCase("odd-length", "e4m3fn", LENS, num_heads=4, query_len=3, topk=5, init_blocks=2, local_blocks=2,
               data="integer"),
    DecodeCase("nothing-forced", "bf16", (1408,), topk=4, local_blocks=0, data="integer"),
    DecodeCase("topk-16", "e4m3fn", (2500, 2304), topk=16, data="integer"),
    DecodeCase("padded-pages", "bf16", (1100, 300), topk=4, page_padding=7168, data="integer"),
    DecodeCase("padded-fp8-pages", "e4m3fn", (1100, 300), topk=4, page_padding=16, data="integer"),
    DecodeCase("nvfp4", "nvfp4", (1100, 300), topk=4, data="integer"),
    DecodeCase("all-empty", "bf16", (0, 0, 0), query_len=2, topk=4, data="integer"),
]  # fmt: skip


@pytest.mark.parametrize("case", DECODES, ids=lambda case: case.name)
def test_decode_matches_the_oracle(device, case):
    """Ids are the oracle's; tables are slices of wider ones, their tails and all that is unused poisoned."""
    batch = build(case).to(device)
    wide = torch.nn.functional.pad(batch.block_table, (0, 3), value=-7)
    batch.block_table = wide[:, :-3]
    _, wanted = oracle_decode(case, batch)
    got = decode(case, batch)
    assert got.dtype == torch.int32
    assert torch.equal(got.cpu(), wanted)


@pytest.mark.parametrize("layout", ["head-major", "token-major", "strided", "int64"])
def test_decode_writes_the_rows_of_a_persistent_buffer(device, layout):
    case = DecodeCase("buffer", "bf16", LENS[:4], num_heads=2, query_len=2, topk=4, data="integer")
    batch = build(case).to(device)
    buffer = {
        "head-major": lambda: torch.full((2, 11, 4), SENTINEL, dtype=torch.int32),
        "token-major": lambda: torch.full((11, 2, 4), SENTINEL, dtype=torch.int32).transpose(0, 1),
        "strided": lambda: torch.full((2, 11, 8), SENTINEL, dtype=torch.int32)[..., ::2],
        "int64": lambda: torch.full((2, 11, 4), SENTINEL, dtype=torch.int64),
    }[layout]()
    out = torch.empty_strided(buffer.shape, buffer.stride(), dtype=buffer.dtype, device=device).fill_(SENTINEL)
    got = decode(case, batch, longest=5, out=out)
    assert got.data_ptr() == out.data_ptr()
    assert got.shape == (2, 8, 4)
    assert torch.equal(out[:, :8].cpu().int(), oracle_decode(case, batch)[1])
    assert bool((out[:, 8:] == SENTINEL).all())


@pytest.mark.parametrize("fused", [False, True], ids=["score", "score-and-pick"])
def test_decode_scores_land_in_a_shared_buffer(device, fused):
    """A transposed slice of a token-major buffer: forced blocks 1e30 and 1e29, hidden ones -inf, tiles beyond untouched."""
    case = DecodeCase("scores", "bf16", (1400, 130, 0, 640), num_heads=2, query_len=4, topk=4, init_blocks=1,
                      data="integer")  # fmt: skip
    batch = build(case).to(device)
    scores, ids = oracle_decode(case, batch)
    unified = torch.full((20, 2, 40), float(SENTINEL), device=device)
    view = unified[:16].transpose(0, 1)
    if fused:
        assert torch.equal(decode(case, batch, score_out=view).cpu(), ids)
    else:
        assert decode_score(case, batch, view) is view
    wanted = torch.full((20, 2, 40), float(SENTINEL))
    for b, length in enumerate(case.seq_lens):
        for i in range(4):
            position, last = length - 4 + i, (length - 1) // 128
            for n in range(last + 1):
                value = scores[b, i, :, n] if position >= 0 and n <= position // 128 else torch.tensor(-torch.inf)
                if n == 0 and position >= 0:
                    value = torch.tensor(1e30)
                if n == position // 128:
                    value = torch.tensor(1e29)
                wanted[b * 4 + i, :, n] = value
    assert torch.equal(unified.cpu(), wanted)


def test_decode_scores_in_a_new_tensor(device):
    case = DecodeCase("new", "e4m3fn", (700, 0), topk=4, local_blocks=0, data="integer")
    batch = build(case).to(device)
    score = decode_score(case, batch)
    assert score.shape == (1, 2, 16)
    assert score.is_contiguous()
    assert torch.equal(score[0, 0, :6].cpu(), oracle_decode(case, batch)[0][0, 0, 0, :6])
    assert bool((score[0, 0, 6:] == -torch.inf).all())
    assert bool((score[0, 1] == -torch.inf).all())


@pytest.mark.parametrize("dtype", ["bf16", "e4m3fn"])
def test_decode_of_nan_and_infinite_keys(device, dtype):
    """Ids follow the total order on the scores that the call itself reports; a block of NaN is still picked, last."""
    case = DecodeCase("special", dtype, (1100, 1400), num_heads=2, query_len=2, topk=14, local_blocks=0, data="special")
    batch = build(case).to(device)
    score = torch.empty(2, 4, 16, device=device)
    ids = decode(case, batch, score_out=score)
    oracle, _ = oracle_decode(case, batch)
    for t in range(4):
        position = case.seq_lens[t // 2] - 2 + t % 2
        seen = position // 128 + 1
        got = score[:, t, :seen].cpu()
        assert torch.equal(got.isnan(), oracle[t // 2, t % 2, :, :seen].isnan())
        assert bool(got.isnan().any(1).all())
        for h in range(2):
            assert ids[h, t].tolist() == select_blocks(got[h], position, 14, 0, 0, "score", "minus_one")
            assert len(set(ids[h, t].tolist()) - {-1}) == seen


def test_lengths_beyond_max_seq_len_are_clamped(device):
    """Columns behind max_seq_len are not read, and no id beyond them appears."""
    case = DecodeCase("clamped", "bf16", (1400,), topk=4, data="integer")
    batch = build(case).to(device)
    got = vllm_ops.minimax_m3_index_decode(
        batch.q, batch.cache, batch.block_table, batch.seq_lens, 600, 4, 0, 1, 1, 1, 1
    )
    batch.block_table = batch.block_table[:, :5]
    assert torch.equal(got.cpu(), oracle_decode(case, batch)[1])
    assert got.max() == 4


def test_inputs_that_kernels_do_not_read_directly(device):
    """Misaligned and strided queries, e4m3fn queries of a bf16 cache, int64 metadata, a transposed table."""
    case = DecodeCase("inputs", "bf16", (700, 300), num_heads=2, topk=3, data="integer")
    batch = build(case).to(device)
    wanted = oracle_decode(case, batch)[1]
    shifted = torch.zeros(2, 2, 129, dtype=batch.q.dtype, device=device)
    shifted[..., 1:] = batch.q
    queries = [shifted[..., 1:], batch.q.transpose(1, 2).contiguous().transpose(1, 2), batch.q.to(torch.float8_e4m3fn)]
    for q in queries:
        batch.q = q
        assert torch.equal(decode(case, batch).cpu(), wanted)
    batch.seq_lens = batch.seq_lens.long()
    batch.block_table = batch.block_table.t().contiguous().t()
    assert torch.equal(decode(case, batch).cpu(), wanted)


def test_empty_batches(device):
    case = DecodeCase("empty", "bf16", (300,), topk=4)
    batch = build(case).to(device)
    batch.block_table = batch.block_table[:, :0]  # a profiling run: no block
    assert decode(case, batch).tolist() == [[[-1] * 4]]
    assert decode_score(case, batch).shape == (1, 1, 0)
    batch.q, batch.block_table, batch.seq_lens = batch.q[:0], batch.block_table[:0], batch.seq_lens[:0]
    assert decode(case, batch).shape == (1, 0, 4)


# ---- what the ROCm fork adds ----


@pytest.mark.parametrize("heads,stride,topk", [(1, 8, 4), (1, 16, 16), (2, 16, 4)])
def test_sparse_tables(device, heads, stride, topk):
    """Full blocks in selection order, the own block last, zeros behind; lengths across a page edge and empty rows."""
    case = DecodeCase("sparse", "bf16", (1025, 130, 3, 0), num_heads=heads, query_len=4, topk=topk, data="integer")
    batch = build(case).to(device)
    width = batch.block_table.shape[1] + 2
    attention = torch.randint(0, 1000, (4, width + 3), dtype=torch.int32, device=device)[:, :width]
    rows = 16 * heads
    pages = torch.full((rows, topk * 8 + 5), SENTINEL, dtype=torch.int32, device=device)
    context = torch.full((rows,), SENTINEL, dtype=torch.int32, device=device)
    counter = torch.zeros(heads, 20, dtype=torch.int32, device=device)
    ids = decode(
        case, batch, attention_block_table=attention, sparse_block_table_out=pages[:, : topk * 8],
        sparse_context_lens_out=context, block_page_stride=stride, completion_counter=counter,
    )  # fmt: skip
    assert torch.equal(ids.cpu(), oracle_decode(case, batch)[1])
    for t in range(16):
        position = case.seq_lens[t // 4] - 4 + t % 4
        for h in range(heads):
            picked = [block for block in ids[h, t].tolist() if block >= 0]
            own = position // 128
            picked = [block for block in picked if block != own] + ([own] if own in picked else [])
            firsts = [int(attention[t // 4, block]) * stride for block in picked]
            wanted = [first + j for first in firsts for j in range(8)]
            row = t * heads + h
            assert pages[row, : topk * 8].tolist() == wanted + [0] * (topk * 8 - len(wanted))
            full = len(picked) - (own in picked)
            assert int(context[row]) == (full * 128 + position + 1 - own * 128 if position >= 0 else 0)
    assert bool((pages[:, topk * 8 :] == SENTINEL).all())
    assert not counter.any()


def test_sparse_context_without_the_own_block(device):
    case = DecodeCase("no own", "bf16", (1100,), topk=2, local_blocks=0, init_blocks=2, data="integer")
    batch = build(case).to(device)
    attention = torch.arange(16, dtype=torch.int32, device=device)[None]
    pages = torch.empty((1, 16), dtype=torch.int32, device=device)
    context = torch.empty((1,), dtype=torch.int32, device=device)
    decode(
        case, batch, attention_block_table=attention, sparse_block_table_out=pages, sparse_context_lens_out=context,
        block_page_stride=8,
    )  # fmt: skip
    assert pages.tolist() == [list(range(16))]
    assert context.tolist() == [256]


# ---- signatures ----

# Read from vLLM 0.33.0, vllm/models/minimax_m3/common/ops/index_topk.py; those behind the star from the ROCm fork's
# amd/ops/index_topk.py of the same version.
SIGNATURES = {
    "minimax_m3_index_score": "idx_q index_kv_cache block_table cu_seqlens_q seq_lens prefix_lens max_query_len "
    "max_seq_len num_kv_heads",
    "minimax_m3_index_topk": "score cu_seqlens_q prefix_lens max_query_len topk init_blocks local_blocks out=",
    "minimax_m3_index_decode_score": "idx_q index_kv_cache block_table seq_lens max_seq_len init_blocks local_blocks "
    "num_kv_heads decode_query_len max_decode_query_len score_out=",
    "minimax_m3_index_decode": "idx_q index_kv_cache block_table seq_lens max_seq_len topk init_blocks local_blocks "
    "num_kv_heads decode_query_len max_decode_query_len out= score_out= * attention_block_table= "
    "sparse_block_table_out= sparse_context_lens_out= block_page_stride= completion_counter=",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_vllms(name):
    """Names, order and defaults; ``=`` marks a default of None."""
    found, starred = [], False
    for parameter in inspect.signature(getattr(vllm_ops, name)).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            found, starred = [*found, "*"], True
        assert parameter.default in (None, parameter.empty)
        found.append(parameter.name + ("=" if parameter.default is None else ""))
    assert found == SIGNATURES[name].split()

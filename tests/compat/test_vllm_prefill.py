# SPDX-License-Identifier: Apache-2.0
"""The drop-ins for vLLM's prefill ops against the oracle: scores, selection on given scores, ties, NaN, padding."""

from __future__ import annotations

import pytest
import torch

from blockpick.compat import vllm_ops
from blockpick.testing.cases import SENTINEL
from blockpick.testing.prefill_cases import PrefillCase, build_prefill
from blockpick.testing.reference import block_scores, select_blocks

PREFILLS = [
    PrefillCase("several", "bf16", ((5, 0), (9, 700), (0, 500), (1, 639), (4, 510)), num_heads=2, topk=4, padding=3,
                data="integer"),
    PrefillCase("forced", "e4m3fn", ((130, 0), (3, 1000)), num_heads=1, topk=5, init_blocks=1, local_blocks=2,
                data="integer"),
    PrefillCase("four-heads", "bf16", ((2, 1100), (3, 126)), num_heads=4, topk=4, local_blocks=0, page_padding=7168,
                data="integer"),
]  # fmt: skip


def prefill(case, batch, prefix, out=None):
    """Scores and ids of a prefill batch, as vLLM calls the two ops."""
    longest = max(query_len for query_len, _ in case.requests)
    score = vllm_ops.minimax_m3_index_score(
        batch.q, batch.cache, batch.block_table, batch.cu_seqlens_q, batch.seq_lens, prefix, longest,
        case.width * 128 - 100, case.num_heads
    )  # fmt: skip
    ids = vllm_ops.minimax_m3_index_topk(
        score, batch.cu_seqlens_q, prefix, longest, case.topk, case.init_blocks, case.local_blocks, out
    )
    return score, ids


@pytest.mark.parametrize("case", PREFILLS, ids=lambda case: case.name)
def test_prefill_matches_the_oracle(device, case):
    check_prefill(device, case)


def test_prefill_over_several_passes(device, monkeypatch):
    """A workspace of one or a few tiles: a request whose queries lie in two passes, one that is wholly in the second."""
    monkeypatch.setattr("blockpick.compat.shared.WORKSPACE_BYTES", 1 << 15)
    monkeypatch.setattr("blockpick.compat.shared.LEAST_BLOCKS", 32)
    monkeypatch.setattr("blockpick.compat.shared.LEAST_TOKENS", 16)
    check_prefill(device, PrefillCase("passes", "bf16", ((257, 300), (50, 500)), topk=3, data="integer"))


def check_prefill(device, case):
    """Scores and ids of a batch are the oracle's, its padding is untouched."""
    batch = build_prefill(case).to(device)
    prefix = torch.tensor([p for _, p in case.requests], dtype=torch.int32, device=device)
    out = torch.full((case.num_tokens + 2, case.num_heads, case.topk), SENTINEL, dtype=torch.int32, device=device)
    score, ids = prefill(case, batch, prefix, out.transpose(0, 1))
    assert ids.data_ptr() == out.data_ptr()
    assert score.shape == (case.num_heads, case.num_tokens, -(-case.width // 16) * 16)
    assert score.is_contiguous()
    cpu, token = batch.to("cpu"), 0
    options = (case.topk, case.init_blocks, case.local_blocks, "score", "minus_one")
    for b, (query_len, before) in enumerate(case.requests):
        if not query_len:
            continue
        step = (cpu.block_table[b : b + 1], cpu.seq_lens[b : b + 1], query_len)
        scores = block_scores(case.layout(), cpu.cache, cpu.q[token : token + query_len], *step)[0].float()
        for i in range(query_len):
            seen = (before + i) // 128 + 1
            got = score[:, token + i].cpu()
            assert torch.equal(got[:, :seen], scores[i, :, :seen])
            assert bool((got[:, seen:] == -torch.inf).all())
            wanted = [select_blocks(scores[i, h], before + i, *options) for h in range(case.num_heads)]
            assert ids[:, token + i].tolist() == wanted
        token += query_len
    assert bool((score[:, token:] == -torch.inf).all())
    assert bool((out[token:] == SENTINEL).all())


def test_prefill_queries_may_have_tokens_behind_them(device):
    """The prefix places the queries, not the length: later tokens of the request are not seen."""
    case = PrefillCase("behind", "bf16", ((140, 700),), topk=3, data="integer")
    batch = build_prefill(case).to(device)
    prefix = torch.tensor([700], dtype=torch.int32, device=device)
    wanted = prefill(case, batch, prefix)[1][:, :5]
    batch.q, batch.cu_seqlens_q = batch.q[:5], torch.tensor([0, 5], dtype=torch.int32, device=device)
    assert torch.equal(prefill(case, batch, prefix)[1], wanted)


def given_scores(heads, tokens, blocks, seed):
    """Scores with many ties, signed zeros, infinities, NaN, and numbers beyond vLLM's forced ones."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-3, 4, (heads, tokens, blocks), generator=generator).float()
    scores[scores == 0] *= torch.where(torch.rand(int((scores == 0).sum()), generator=generator) < 0.5, -1.0, 1.0)
    for share, value in ((0.1, float("nan")), (0.05, -torch.inf), (0.03, torch.inf), (0.03, 3e30)):
        scores[torch.rand(scores.shape, generator=generator) < share] = value
    return scores


@pytest.mark.parametrize("heads,topk,init,local", [(1, 16, 0, 1), (2, 4, 1, 1), (4, 3, 0, 0), (1, 40, 3, 2)])
def test_topk_of_given_scores(device, heads, topk, init, local):
    """Total order on ties, NaN and infinities; rows of fewer blocks than topk; scores of any layout."""
    queries, prefixes = (3, 0, 2, 1), (0, 9, 126, 128 * 37)
    cu_seqlens = torch.tensor([0, 3, 3, 5, 6], dtype=torch.int32, device=device)
    prefix = torch.tensor(prefixes, dtype=torch.int32, device=device)
    scores = given_scores(heads, 7, 48, topk)
    padded = torch.full((7, 48, heads + 1), 9.0, device=device)  # block-major, then sliced
    padded[..., :heads] = scores.permute(1, 2, 0).to(device)
    layouts = [scores.to(device), scores.to(device).transpose(0, 1).contiguous().transpose(0, 1),
               padded[..., :heads].permute(2, 0, 1)]  # fmt: skip
    positions = [p + i for n, p in zip(queries, prefixes, strict=True) for i in range(n)]
    wanted = [
        [select_blocks(scores[h, t], position, topk, init, local, "score", "minus_one")
         for t, position in enumerate(positions)]
        for h in range(heads)
    ]  # fmt: skip
    for given in layouts:
        ids = vllm_ops.minimax_m3_index_topk(given, cu_seqlens, prefix, 3, topk, init, local)
        assert ids.shape == (heads, 7, topk)
        assert ids[:, :6].tolist() == wanted
    half = scores.half().to(device)
    wider = torch.full((heads, 9, topk), SENTINEL, dtype=torch.int64, device=device)
    ids = vllm_ops.minimax_m3_index_topk(half, cu_seqlens, prefix, 3, topk, init, local, wider)
    assert ids[:, 5].tolist() == [
        select_blocks(half[h, 5].float().cpu(), positions[5], topk, init, local, "score", "minus_one")
        for h in range(heads)
    ]
    assert bool((wider[:, 6:] == SENTINEL).all())


def test_topk_of_rows_of_several_splits(device):
    """Rows longer than one split of the selection, across whose border ties lie."""
    tokens, blocks = 40, 2100
    scores = given_scores(1, tokens, blocks, 5)
    scores[:, :, :2040] = scores[:, :, :2040].clamp(max=1)
    cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    prefix = torch.tensor([128 * 2090], dtype=torch.int32, device=device)
    ids = vllm_ops.minimax_m3_index_topk(scores.to(device), cu_seqlens, prefix, tokens, 4, 0, 1)
    for t in range(tokens):
        assert ids[0, t].tolist() == select_blocks(scores[0, t], 128 * 2090 + t, 4, 0, 1, "score", "minus_one")

# SPDX-License-Identifier: Apache-2.0
"""Scores in the form that vLLM's ops leave them: head-major, forced blocks as large numbers, hidden blocks as -inf."""

from __future__ import annotations

import torch

from ..layout import BLOCK_TOKENS

INIT_SCORE, LOCAL_SCORE = 1e30, 1e29
COLUMNS = 16  # score rows are multiples of this


def empty_scores(heads: int, tokens: int, blocks: int, device: torch.device) -> torch.Tensor:
    """fp32 [H, T, blocks rounded up to 16], contiguous, all -inf."""
    width = -(-blocks // COLUMNS) * COLUMNS
    return torch.full((heads, tokens, width), float("-inf"), dtype=torch.float32, device=device)


def decode_own_blocks(seq_lens: torch.Tensor, query_len: int, blocks: int) -> torch.Tensor:
    """Own block of every query, int32 [B, L], of tables with ``blocks`` columns; negative = the row is empty."""
    offsets = torch.arange(-query_len, 0, dtype=torch.int32, device=seq_lens.device)
    positions = seq_lens.clamp(0, blocks * BLOCK_TOKENS + query_len)[:, None] + offsets
    return positions.clamp(max=blocks * BLOCK_TOKENS - 1) // BLOCK_TOKENS


def write_decode_scores(
    target: torch.Tensor, scores: torch.Tensor, seq_lens: torch.Tensor, init_blocks: int, local_blocks: int
) -> None:
    """Write ``scores`` [B, L, H, n] into the first B * L tokens and n blocks of ``target`` [H, T, >= n].

    A request's columns up to the own block of its last query are written: forced blocks as 1e30 (init) and 1e29
    (local), blocks that a query does not see as -inf. Other columns keep what they hold.
    """
    requests, query_len, _, blocks = scores.shape
    own = decode_own_blocks(seq_lens, query_len, blocks)[:, :, None, None]  # [B, L, 1, 1]
    ids = torch.arange(blocks, dtype=torch.int32, device=scores.device)
    values = torch.where(ids < init_blocks, INIT_SCORE, scores)
    values = torch.where(ids > own - local_blocks, LOCAL_SCORE, values)
    values = torch.where(ids > own, float("-inf"), values)
    place = target[:, : requests * query_len, :blocks].unflatten(1, (requests, query_len)).permute(1, 2, 0, 3)
    place.copy_(torch.where(ids <= own[:, -1:], values, place))


def prefill_own_blocks(cu_seqlens_q: torch.Tensor, prefix_lens: torch.Tensor, tokens: int) -> torch.Tensor:
    """Own block of every query of a prefill batch, int32 [T]; negative = padding."""
    token = torch.arange(tokens, dtype=torch.int32, device=cu_seqlens_q.device)
    request = torch.searchsorted(cu_seqlens_q[1:], token, right=True)
    live = request < prefix_lens.shape[0]
    request = request.clamp(max=prefix_lens.shape[0] - 1)
    own = (prefix_lens[request] + token - cu_seqlens_q[request]) // BLOCK_TOKENS
    return torch.where(live, own, -1)


def write_prefill_scores(target: torch.Tensor, scores: torch.Tensor, own: torch.Tensor) -> None:
    """Write ``scores`` [t, H, n] of queries with own blocks ``own`` [t] into [H, t, n], hidden ones as -inf."""
    ids = torch.arange(scores.shape[2], dtype=torch.int32, device=scores.device)
    hidden = ids > own[:, None, None]
    target.copy_(torch.where(hidden, float("-inf"), scores).transpose(0, 1))

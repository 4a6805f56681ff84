# SPDX-License-Identifier: Apache-2.0
"""The index ops of vLLM's MiniMax M3 model on blockpick's kernels, under vLLM's names and with its arguments.

Signatures are those of vLLM 0.33 with the extra keyword arguments of its ROCm fork. Assign the functions over those of
``vllm.models.minimax_m3.common.ops`` (or ``amd.ops``) and of the modules that imported them. Layouts, order of ids and
empty rows are vLLM's: head-major ``[H, T, topk]``, forced blocks first, then descending score, -1 where nothing is
left. What vLLM leaves open is decided: full fp32 comparison, the lower id wins a tie, NaN ranks lowest, and every
visible block is picked before any -1. Forced blocks win whatever the scores are.

Buffers are made by the first call of a configuration, or by one with a larger batch, and kept (see :func:`release`);
inside a graph capture they must be there already. Calls of one configuration on several streams wait for one another;
graphs that captured such calls must not be replayed at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..config import BACKENDS
from ..errors import UnsupportedConfigError
from ..layout import BLOCK_TOKENS, CacheLayout
from . import arguments
from .batch import DecodeBatch, PrefillBatch, check_forced, check_selection
from .scores import empty_scores, prefill_own_blocks, write_decode_scores, write_prefill_scores
from .shared import Demand, EngineCache
from .sparse_table import SparseOutputs

SPARSE_BLOCK_SIZE = BLOCK_TOKENS
_ENGINES = EngineCache()
_route: tuple[str, str | None] = ("auto", None)


def set_backend(backend: str = "auto", arch: str | None = None) -> None:
    """Choose what runs the functions of this module in this process.

    Parameters
    ----------
    backend, arch
        As for :class:`blockpick.Indexer`.

    Raises
    ------
    UnsupportedConfigError
        For an unknown backend; an unknown architecture is refused by the next call.
    """
    global _route
    if backend not in BACKENDS:
        raise UnsupportedConfigError(f"backend={backend!r} is not supported; supported: {', '.join(BACKENDS)}")
    _route = (backend, arch)


@contextmanager
def use_backend(backend: str = "auto", arch: str | None = None) -> Iterator[None]:
    """:func:`set_backend` for the length of a ``with`` block, for every thread."""
    before = _route
    set_backend(backend, arch)
    try:
        yield
    finally:
        set_backend(*before)


def release() -> None:
    """Free every buffer that this module holds. Graphs that captured a call must not be replayed afterwards."""
    _ENGINES.clear()


@torch.no_grad()
def minimax_m3_index_score(
    idx_q: torch.Tensor,
    index_kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    prefix_lens: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    num_kv_heads: int,
) -> torch.Tensor:
    """Score every visible block of every query of a prefill batch.

    ``score[h, t, b] = max over the visible tokens of block b of idx_q[t, h] . k``; query i of a request sits at
    position ``prefix_lens + i``.

    Parameters
    ----------
    idx_q : torch.Tensor
        [T, H, 128] bf16 or e4m3fn, the cache's dtype (e4m3fn queries of a bf16 cache are widened), any strides.
    index_kv_cache : torch.Tensor
        [N, 128, 128] bf16 or e4m3fn, or uint8 [N, 128, 72] NVFP4: dense pages, padded page stride allowed.
    block_table : torch.Tensor
        int32 [B, W]; columns from ``ceil(max_seq_len / 128)`` on are not read.
    cu_seqlens_q : torch.Tensor
        int32 [B + 1], ascending from 0. Tokens from its last entry on are padding.
    seq_lens, prefix_lens : torch.Tensor
        int32 [B]: tokens of a request, and those before its first query; the difference is the number of its queries.
    max_query_len, max_seq_len : int
        Upper bounds of the batch; the first is not used.
    num_kv_heads : {1, 2, 4}
        Must be H.

    Returns
    -------
    torch.Tensor
        fp32 [H, T, ceil(max_seq_len / 128) rounded up to 16], contiguous; -inf where a block is not visible.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, before anything is launched.
    RuntimeError
        Inside a graph capture without buffers of an earlier call.
    """
    arguments.check_queries_tensor(idx_q)
    device = idx_q.device
    layout = arguments.cache_layout(index_kv_cache, device)
    q = arguments.queries(idx_q, num_kv_heads, layout)
    batch = PrefillBatch(cu_seqlens_q, prefix_lens, q.shape[0], device)
    arguments.integers("seq_lens", seq_lens, batch.requests, device)
    table = arguments.table(block_table, batch.requests, max_seq_len, device)
    blocks = table.shape[1]
    score = empty_scores(num_kv_heads, batch.tokens, arguments.max_blocks(max_seq_len), device)
    if not (batch.tokens and batch.requests and blocks):
        return score
    demand = Demand(layout, num_kv_heads, 1, 0, 0, 1, batch.requests, blocks, batch.tokens)
    own = prefill_own_blocks(batch.cu_seqlens_q, batch.prefix_lens, batch.tokens)
    with _ENGINES.borrow("minimax_m3_index_score", device, *_route, demand) as shared:
        plan = batch.plan(shared, table, blocks)
        for index in range(plan.num_passes):
            shared.engine.score_pass(plan, index, q, index_kv_cache)
            rows = shared.engine.pass_scores(plan, index)
            first = index * plan.pass_tokens
            last = first + rows.shape[0]
            write_prefill_scores(score[:, first:last, :blocks], rows, own[first:last])
    return score


@torch.no_grad()
def minimax_m3_index_topk(
    score: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    prefix_lens: torch.Tensor,
    max_query_len: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Pick the blocks of every query of a prefill batch from given scores.

    Parameters
    ----------
    score : torch.Tensor
        [H, T, blocks] floating point, any strides, compared as fp32. What a query does not see may hold anything.
    cu_seqlens_q, prefix_lens, max_query_len
        As of :func:`minimax_m3_index_score`.
    topk, init_blocks, local_blocks : int
        Blocks to pick (1..64), and how many first and last visible blocks always win; together at most ``topk``.
    out : torch.Tensor, optional
        int32 or int64 [H, >= T, topk], any strides; rows of padding tokens stay untouched.

    Returns
    -------
    torch.Tensor
        ``out[:, :T]``, or a new int32 [H, T, topk]. A row has ``min(topk, visible blocks)`` distinct ids, then -1.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As :func:`minimax_m3_index_score`.
    """
    if not isinstance(score, torch.Tensor) or not score.is_floating_point():
        raise TypeError(f"score: must be a floating-point tensor, is {getattr(score, 'dtype', type(score).__name__)}")
    if score.dim() != 3:
        raise ValueError(f"score: must be [H, T, blocks], has shape {list(score.shape)}")
    check_selection(topk, init_blocks, local_blocks)
    (heads, tokens, blocks), device = score.shape, score.device
    batch = PrefillBatch(cu_seqlens_q, prefix_lens, tokens, device)
    ids = arguments.output(out, heads, tokens, topk, device)
    if not (tokens and batch.requests):
        return ids
    if not blocks:
        live = torch.arange(tokens, device=device) < batch.cu_seqlens_q[-1]
        return ids.masked_fill_(live[:, None], -1)
    demand = Demand(CacheLayout("bf16"), heads, topk, init_blocks, local_blocks, 1, batch.requests, blocks, tokens)
    staged = arguments.stage(ids)
    with _ENGINES.borrow("minimax_m3_index_topk", device, *_route, demand) as shared:
        plan = batch.plan(shared, torch.empty((0, 0), dtype=torch.int32, device=device), blocks)
        for index in range(plan.num_passes):
            first = index * plan.pass_tokens
            rows = shared.engine.pass_scores(plan, index)
            rows.copy_(score[:, first : first + rows.shape[0]].transpose(0, 1))
            shared.engine.select_pass(plan, index, staged.transpose(0, 1))
    arguments.unstage(ids, staged)
    return ids


@torch.no_grad()
def minimax_m3_index_decode_score(
    idx_q: torch.Tensor,
    index_kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    init_blocks: int,
    local_blocks: int,
    num_kv_heads: int,
    decode_query_len: int,
    max_decode_query_len: int,
    score_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score every visible block of every query of a decode batch.

    Parameters
    ----------
    idx_q, index_kv_cache, block_table, seq_lens, max_seq_len, num_kv_heads
        As of :func:`minimax_m3_index_score`; T is ``B * decode_query_len``, request-major. The queries are the last
        tokens of ``seq_lens``. Lengths beyond ``max_seq_len`` or the table are clamped.
    init_blocks, local_blocks : int
        First and last visible blocks, whose scores become 1e30 and 1e29 (local, where a block is both).
    decode_query_len, max_decode_query_len : int
        Queries of every request, 1..8, and the most that any call has.
    score_out : torch.Tensor, optional
        fp32 [H, T, >= blocks], any strides. Columns beyond the own block of a request's last query stay untouched.

    Returns
    -------
    torch.Tensor
        ``score_out``, or a new contiguous fp32 [H, T, ceil(max_seq_len / 128) rounded up to 16] with -inf elsewhere.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As :func:`minimax_m3_index_score`.
    """
    batch = DecodeBatch(
        idx_q, index_kv_cache, block_table, seq_lens, max_seq_len, num_kv_heads, decode_query_len, max_decode_query_len
    )
    check_forced(init_blocks, local_blocks)
    score = batch.score_target(score_out)
    if batch.is_empty:
        return score
    with _ENGINES.borrow("minimax_m3_index_decode_score", batch.device, *_route, batch.demand(1, 0, 0)) as shared:
        plan = batch.plan(shared)
        shared.engine.score_decode(plan, batch.q, index_kv_cache)
        write_decode_scores(score, shared.engine.scores(plan), batch.seq_lens, init_blocks, local_blocks)
    return score


@torch.no_grad()
def minimax_m3_index_decode(
    idx_q: torch.Tensor,
    index_kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    topk: int,
    init_blocks: int,
    local_blocks: int,
    num_kv_heads: int,
    decode_query_len: int,
    max_decode_query_len: int,
    out: torch.Tensor | None = None,
    score_out: torch.Tensor | None = None,
    *,
    attention_block_table: torch.Tensor | None = None,
    sparse_block_table_out: torch.Tensor | None = None,
    sparse_context_lens_out: torch.Tensor | None = None,
    block_page_stride: int | None = None,
    completion_counter: torch.Tensor | None = None,
) -> torch.Tensor:
    """Score the blocks of a decode batch and pick the best of every query.

    Parameters
    ----------
    idx_q, index_kv_cache, block_table, seq_lens, max_seq_len, num_kv_heads, decode_query_len, max_decode_query_len
        As of :func:`minimax_m3_index_decode_score`.
    topk, init_blocks, local_blocks, out
        As of :func:`minimax_m3_index_topk`; every row of ``out[:, :T]`` is written.
    score_out : torch.Tensor, optional
        Receives the scores as from :func:`minimax_m3_index_decode_score`; ids don't depend on what it can represent.
    attention_block_table : torch.Tensor, optional
        int32 [B, >= blocks]: the attention cache's page of every block. With the next three arguments or without all.
    sparse_block_table_out : torch.Tensor, optional
        int32 [T * H, topk * 8], rows contiguous: receives the 16-token pages of every row's blocks, row ``t * H + h``.
    sparse_context_lens_out : torch.Tensor, optional
        int32 [T * H]: receives the tokens that these pages hold for the query.
    block_page_stride : {8, 16}, optional
        Page ids of one block.
    completion_counter : torch.Tensor, optional
        int32 [H, >= T], contiguous; checked, neither read nor written.

    Returns
    -------
    torch.Tensor
        ``out[:, :T]``, or a new int32 [H, T, topk]. A row has ``min(topk, visible blocks)`` distinct ids, then -1.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As :func:`minimax_m3_index_score`.
    """
    batch = DecodeBatch(
        idx_q, index_kv_cache, block_table, seq_lens, max_seq_len, num_kv_heads, decode_query_len, max_decode_query_len
    )
    check_selection(topk, init_blocks, local_blocks)
    sparse = SparseOutputs.of(
        attention_block_table, sparse_block_table_out, sparse_context_lens_out, block_page_stride,
        requests=batch.requests, rows=batch.tokens * num_kv_heads, topk=topk,
        blocks=arguments.max_blocks(max_seq_len), device=batch.device,
    )  # fmt: skip
    if completion_counter is not None:
        batch.check_counter(completion_counter)
    score = batch.score_target(score_out) if score_out is not None else None
    ids = arguments.output(out, num_kv_heads, batch.tokens, topk, batch.device)
    if batch.is_empty:
        ids.fill_(-1)
        if sparse is not None:
            sparse.clear()
        return ids
    staged = arguments.stage(ids)
    demand = batch.demand(topk, init_blocks, local_blocks)
    with _ENGINES.borrow("minimax_m3_index_decode", batch.device, *_route, demand) as shared:
        plan = batch.plan(shared)
        emission = sparse.emission if sparse is not None else None
        shared.engine.decode(plan, batch.q, index_kv_cache, staged.transpose(0, 1), emission)
        if score is not None:
            write_decode_scores(score, shared.engine.scores(plan), batch.seq_lens, init_blocks, local_blocks)
    if sparse is not None:
        sparse.finish()
    arguments.unstage(ids, staged)
    return ids

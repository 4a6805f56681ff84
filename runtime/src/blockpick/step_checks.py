# SPDX-License-Identifier: Apache-2.0
"""Checks of a step's tensors against the indexer's configuration: refused before any launch, the argument named."""

from __future__ import annotations

import torch

from .checks import check_aligned, check_distinct_elements, check_int, check_last_stride, check_tensor
from .config import IndexerConfig
from .layout import BLOCK_TOKENS, HEAD_DIM
from .ops.sparse_table import SparseTable
from .plan import DecodePlan, PrefillPlan
from .step import StepPlan


def check_slot(config: IndexerConfig, slot: int) -> None:
    """A slot that the indexer has."""
    check_int("slot", slot, 0, config.slots - 1, f"slots={config.slots}")


def check_table(
    config: IndexerConfig, device: torch.device, block_table: torch.Tensor, seq_lens: torch.Tensor
) -> tuple[int, int]:
    """The batch's page table and lengths; returns requests and table width."""
    check_tensor("block_table", block_table, torch.int32, 2, device, "[B, W]")
    check_tensor("seq_lens", seq_lens, torch.int32, 1, device, "[B]")
    check_last_stride("block_table", block_table)
    check_last_stride("seq_lens", seq_lens)
    num_requests, width = block_table.shape
    if not 1 <= num_requests <= config.max_requests:
        raise ValueError(f"block_table: must have 1..{config.max_requests} rows (max_requests), has {num_requests}")
    max_width = config.max_blocks // config.layout.blocks_per_page
    if not 1 <= width <= max_width:
        raise ValueError(
            f"block_table: must have 1..{max_width} columns (max_seq_len={config.max_seq_len} in pages of "
            f"{config.layout.page_size}), has {width}"
        )
    if seq_lens.shape[0] != num_requests:
        raise ValueError(f"seq_lens: must have {num_requests} entries like block_table, has {seq_lens.shape[0]}")
    return num_requests, width


def check_tokens(
    config: IndexerConfig, device: torch.device, cu_seqlens_q: torch.Tensor, num_requests: int, num_tokens: int,
    max_seq_len: int | None,
) -> None:  # fmt: skip
    """A prefill batch's query layout and bounds."""
    check_tensor("cu_seqlens_q", cu_seqlens_q, torch.int32, 1, device, "[B + 1]")
    check_last_stride("cu_seqlens_q", cu_seqlens_q)
    if cu_seqlens_q.shape[0] != num_requests + 1:
        raise ValueError(
            f"cu_seqlens_q: must have {num_requests + 1} entries (block_table has {num_requests} rows), has "
            f"{cu_seqlens_q.shape[0]}"
        )
    limit = f"max_prefill_tokens={config.max_prefill_tokens}"
    check_int("num_tokens", num_tokens, 1, config.max_prefill_tokens, limit)
    if max_seq_len is not None:
        check_int("max_seq_len", max_seq_len, 1, config.max_seq_len, f"the indexer's max_seq_len={config.max_seq_len}")


def prefill_blocks(config: IndexerConfig, width: int, max_seq_len: int | None) -> int:
    """Blocks that a row can see at most, in whole pages of a table of ``width`` columns."""
    per_page = config.layout.blocks_per_page
    if max_seq_len is None:
        return width * per_page
    return min(width, -(-max_seq_len // config.layout.page_size)) * per_page


def check_decode(
    config: IndexerConfig, device: torch.device, plan: DecodePlan, q: torch.Tensor, cache: torch.Tensor,
    out: torch.Tensor, allow_padding: bool,
) -> None:  # fmt: skip
    """One layer's tensors of a decode step."""
    rows = plan.num_requests * plan.query_len
    check_queries(config, device, q)
    if q.shape[0] < rows or (q.shape[0] > rows and not allow_padding):
        raise ValueError(
            f"q: must have {rows} rows ({plan.num_requests} requests * query_len {plan.query_len}), has {q.shape[0]}"
            + ("" if allow_padding or q.shape[0] < rows else "; pass allow_padding=True for a padded batch")
        )
    check_cache_and_output(config, device, q, cache, out)


def check_prefill(
    config: IndexerConfig, device: torch.device, plan: PrefillPlan, q: torch.Tensor, cache: torch.Tensor,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """One layer's tensors of a prefill step."""
    check_queries(config, device, q)
    if q.shape[0] != plan.num_tokens:
        raise ValueError(f"q: must have {plan.num_tokens} rows (the plan's num_tokens), has {q.shape[0]}")
    check_cache_and_output(config, device, q, cache, out)


def check_step_rows(step: StepPlan, q: torch.Tensor) -> None:
    """Rows of q for both halves of a step, and of padding if there is no prefill."""
    rows = step.num_decode_tokens + step.num_prefill_tokens
    if q.shape[0] < rows or (q.shape[0] > rows and step.prefill is not None):
        raise ValueError(
            f"q: must have {rows} rows ({step.num_decode_tokens} of decodes, {step.num_prefill_tokens} of prefills), "
            f"has {q.shape[0]}" + ("" if q.shape[0] < rows else "; plan padding rows as num_tokens")
        )


def check_step(
    config: IndexerConfig, device: torch.device, step: StepPlan, q: torch.Tensor, cache: torch.Tensor,
    out: torch.Tensor, sparse: SparseTable | None,
) -> None:  # fmt: skip
    """One layer's tensors of both halves of a step."""
    check_queries(config, device, q)
    check_step_rows(step, q)
    check_cache_and_output(config, device, q, cache, out)
    if sparse is not None:
        blocks = max((attention_blocks(config, plan) for plan in (step.decode, step.prefill) if plan), default=0)
        check_sparse_table(config, device, sparse, step.num_decodes + step.num_prefills, q.shape[0], blocks)


def attention_blocks(config: IndexerConfig, plan: DecodePlan | PrefillPlan) -> int:
    """Blocks that a request of a planned batch can have: the least width of the attention's block table."""
    if isinstance(plan, DecodePlan):
        return min(plan.table_blocks, -(-config.max_seq_len // BLOCK_TOKENS))
    return min(plan.blocks, -(-(plan.max_seq_len or config.max_seq_len) // BLOCK_TOKENS))


def check_queries(config: IndexerConfig, device: torch.device, q: torch.Tensor) -> None:
    """Index queries of the indexer's heads and dtype."""
    check_tensor("q", q, config.layout.query_dtype, 3, device, f"[T, {config.num_heads}, {HEAD_DIM}]")
    if q.shape[1] != config.num_heads or q.shape[2] != HEAD_DIM:
        raise ValueError(f"q: must be [T, {config.num_heads}, {HEAD_DIM}], has shape {list(q.shape)}")
    check_last_stride("q", q)
    check_aligned("q", q, 16)


def check_cache_and_output(
    config: IndexerConfig, device: torch.device, q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor
) -> None:
    """The layer's cache, and an output for every row of q."""
    config.layout.check(cache)
    if cache.device != device:
        raise ValueError(f"cache: must be on {device}, is on {cache.device}")
    check_tensor("out", out, torch.int32, 3, device, config.out_layout)
    expected = (q.shape[0], config.num_heads, config.topk)
    if config.out_layout == "htk":
        expected = (config.num_heads, q.shape[0], config.topk)
    if tuple(out.shape) != expected:
        raise ValueError(f"out: must have shape {list(expected)} ({config.out_layout}), has {list(out.shape)}")
    check_last_stride("out", out)
    check_distinct_elements("out", out)


def check_sparse_table(
    config: IndexerConfig, device: torch.device, sparse: SparseTable, num_requests: int, num_tokens: int, blocks: int
) -> None:
    """What a sparse table is written to and from, for ``num_tokens`` rows of q that can pick from ``blocks`` blocks."""
    if not isinstance(sparse, SparseTable):
        raise TypeError(f"sparse_table: must be a SparseTable, is {type(sparse).__name__}")
    attention = sparse.attention_block_table
    check_tensor("attention_block_table", attention, torch.int32, 2, device, "[B, W]")
    check_last_stride("attention_block_table", attention)
    if attention.shape[0] < num_requests or attention.shape[1] < blocks:
        raise ValueError(
            f"attention_block_table: must be at least [{num_requests}, {blocks}], one entry per block of "
            f"{BLOCK_TOKENS} tokens, has shape {list(attention.shape)}"
        )
    if sparse.block_page_stride not in (8, 16):
        raise ValueError(f"block_page_stride: must be 8 or 16, is {sparse.block_page_stride!r}")
    rows = num_tokens * config.num_heads
    for name, tensor, shape in (
        ("table", sparse.table, (rows, config.topk * 8)), ("context_lens", sparse.context_lens, (rows,)),
    ):  # fmt: skip
        check_tensor(name, tensor, torch.int32, len(shape), device, str(list(shape)))
        if tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(f"{name}: must be contiguous {list(shape)}, has shape {list(tensor.shape)}")

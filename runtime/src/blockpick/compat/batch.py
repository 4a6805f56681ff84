# SPDX-License-Identifier: Apache-2.0
"""A call's batch: checked tensors, what an engine must be sized for, and the plan."""

from __future__ import annotations

import torch

from ..checks import check_int, check_tensor
from ..config import MAX_QUERY_LEN, MAX_TOPK
from ..plan import DecodePlan, PrefillPlan
from . import arguments
from .scores import empty_scores
from .shared import Demand, SharedEngine


class DecodeBatch:
    """A decode batch as vLLM's ops take it.

    Raises
    ------
    TypeError, ValueError
        Naming the argument.
    """

    def __init__(
        self, idx_q: torch.Tensor, index_kv_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor,
        max_seq_len: int, num_kv_heads: int, decode_query_len: int, max_decode_query_len: int,
    ) -> None:  # fmt: skip
        arguments.check_queries_tensor(idx_q)
        check_int("max_decode_query_len", max_decode_query_len, 1, 1 << 30, "queries of a request")
        self.longest = min(max_decode_query_len, MAX_QUERY_LEN)
        limit = f"max_decode_query_len={max_decode_query_len}, at most {MAX_QUERY_LEN}"
        check_int("decode_query_len", decode_query_len, 1, self.longest, limit)
        self.device, self.heads, self.query_len = idx_q.device, num_kv_heads, decode_query_len
        self.layout = arguments.cache_layout(index_kv_cache, self.device)
        self.q = arguments.queries(idx_q, num_kv_heads, self.layout)
        self.tokens = idx_q.shape[0]
        self.requests, rest = divmod(self.tokens, decode_query_len)
        if rest:
            raise ValueError(
                f"idx_q: must have a multiple of decode_query_len={decode_query_len} rows, has {self.tokens}"
            )
        self.seq_lens = arguments.integers("seq_lens", seq_lens, self.requests, self.device)
        self.table = arguments.table(block_table, self.requests, max_seq_len, self.device)
        self._columns = arguments.max_blocks(max_seq_len)

    @property
    def is_empty(self) -> bool:
        """Whether no query sees a block, whatever the lengths."""
        return not (self.tokens and self.table.shape[1])

    def demand(self, topk: int, init_blocks: int, local_blocks: int) -> Demand:
        """What an engine must be for this batch."""
        return Demand(
            self.layout, self.heads, topk, init_blocks, local_blocks, self.longest, self.requests, self.table.shape[1]
        )

    def plan(self, shared: SharedEngine) -> DecodePlan:
        """Plan the batch, also inside a graph capture (see :mod:`blockpick.compat.shared`)."""
        shared.engine.plan_decode(0, self.table, self.seq_lens, self.query_len)
        return DecodePlan(0, 0, self.requests, self.query_len, self.table.shape[1])

    def score_target(self, score_out: torch.Tensor | None) -> torch.Tensor:
        """``score_out``, checked, or a new tensor."""
        if score_out is None:
            return empty_scores(self.heads, self.tokens, self._columns, self.device)
        arguments.check_scores(score_out, self.heads, self.tokens, self.table.shape[1], self.device)
        return score_out

    def check_counter(self, counter: torch.Tensor) -> None:
        """The ROCm fork's ``completion_counter``: int32 [H, >= T], contiguous."""
        check_tensor("completion_counter", counter, torch.int32, 2, self.device, "[H, >= T]")
        if counter.shape[0] != self.heads or counter.shape[1] < self.tokens or not counter.is_contiguous():
            raise ValueError(
                f"completion_counter: must be contiguous [{self.heads}, >= {self.tokens}], has shape "
                f"{list(counter.shape)}, strides {list(counter.stride())}"
            )


class PrefillBatch:
    """How the queries of a prefill batch spread over requests.

    Raises
    ------
    TypeError, ValueError
        Naming the argument.
    """

    def __init__(
        self, cu_seqlens_q: torch.Tensor, prefix_lens: torch.Tensor, tokens: int, device: torch.device
    ) -> None:
        if not isinstance(cu_seqlens_q, torch.Tensor):
            raise TypeError(f"cu_seqlens_q: must be a torch.Tensor, is {type(cu_seqlens_q).__name__}")
        if cu_seqlens_q.dim() != 1 or cu_seqlens_q.shape[0] < 1:
            raise ValueError(f"cu_seqlens_q: must be [B + 1], has shape {list(cu_seqlens_q.shape)}")
        self.tokens, self.requests = tokens, cu_seqlens_q.shape[0] - 1
        self.cu_seqlens_q = arguments.integers("cu_seqlens_q", cu_seqlens_q, self.requests + 1, device)
        self.prefix_lens = arguments.integers("prefix_lens", prefix_lens, self.requests, device)

    def plan(self, shared: SharedEngine, table: torch.Tensor, blocks: int) -> PrefillPlan:
        """Plan the batch for rows of ``blocks`` blocks, also inside a graph capture.

        Lengths are made from the prefixes, which say where the queries sit also where a request has tokens behind them.
        """
        stride, pass_tokens, passes = shared.engine.prefill_geometry(blocks, self.tokens)
        plan = PrefillPlan(
            0, 0, self.requests, self.tokens, self.cu_seqlens_q, table, blocks, stride, pass_tokens, passes
        )
        shared.engine.plan_prefill(plan, self.cu_seqlens_q, self.prefix_lens + self.cu_seqlens_q.diff())
        return plan


def check_selection(topk: int, init_blocks: int, local_blocks: int) -> None:
    """Numbers of blocks that some engine serves; their sum is checked where one is built."""
    check_int("topk", topk, 1, MAX_TOPK, "what the kernels hold")
    check_forced(init_blocks, local_blocks)


def check_forced(init_blocks: int, local_blocks: int) -> None:
    """Numbers of forced blocks."""
    check_int("init_blocks", init_blocks, 0, MAX_TOPK, "forced blocks")
    check_int("local_blocks", local_blocks, 0, MAX_TOPK, "forced blocks")

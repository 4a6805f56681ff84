# SPDX-License-Identifier: Apache-2.0
"""Decode over ranks by generated kernels: every rank scores its own blocks, or its rows of them, for all heads.

Plan (once per step), exchange the queries, score, push the best of the own blocks to the ranks of their head, merge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..backend_api import Launch
from ..config import ORDERS, IndexerConfig
from ..device import current_stream
from ..layout import HEAD_DIM, page_stride_bytes
from ..plan import DecodePlan
from .context_kernels import SHARDS_ROLE, ContextKernels
from .decode_pick import PLAN_ARGS, SCORE_ARGS
from .selection import Bind
from .sparse_table import SparseTable, table_form

if TYPE_CHECKING:
    from ..parallel.group import Group
    from ..parallel.heads import BlockShare, HeadShare

PUSH, WAIT = 1, 2  # phases of the query exchange
EMPTY_BLOCK_ZERO, PARTS = 1, 2  # flags of the merge
CONTROL_BYTES = 4096  # before what kernels exchange: the flag and the limit of waits
WORD_BYTES = 8
PART_ROWS = 16  # of which decode_score_shards' parts of a block consist
CONTROL_WORDS = CONTROL_BYTES // WORD_BYTES
EXCHANGE_ARGS = ("q_ptr", "stride_q_t", "stride_q_h", "num_tokens", "phases")
MERGE_ARGS = ("stride_out_t", "stride_out_h", "stride_source", "num_requests")
TABLE_POINTERS = ("attention_table_ptr", "table_ptr", "lens_ptr")  # a sparse table's; requests are found without more
TABLE_NUMBERS = ("stride_attention", "table_form")


@dataclass(frozen=True)
class ContextSizes:
    """Where queries and candidates lie in the exchanged memory, and the shapes of a rank's own buffers."""

    config: IndexerConfig
    share: HeadShare
    blocks: BlockShare

    @property
    def max_tokens(self) -> int:
        """Queries of the largest batch."""
        return self.config.max_requests * self.config.max_query_len

    @property
    def row_words(self) -> int:
        """4-byte words of one query."""
        return HEAD_DIM * self.config.layout.query_dtype.itemsize // 4

    @property
    def own_blocks(self) -> int:
        """Blocks of the longest request that one rank scores at most."""
        return -(-self.config.max_blocks // self.blocks.step)

    @property
    def score_stride(self) -> int:
        """Scores between two rows."""
        return -(-self.own_blocks // 32) * 32

    @property
    def gathered_control_words(self) -> int:
        """Zeros before gathered candidates: a rank looks for control words at its first head, and must find none."""
        heads = -(-self.share.total_heads * self.config.topk * 2 // CONTROL_WORDS)
        return (1 + heads) * CONTROL_WORDS

    @property
    def query_bytes(self) -> int:
        """Of the words of all queries of one call."""
        return self.max_tokens * self.share.total_heads * self.row_words * WORD_BYTES

    @property
    def candidate_bytes(self) -> int:
        """Of the candidates of all ranks for a rank's rows of one call."""
        return self.max_tokens * self.share.num_heads * self.share.size * self.config.topk * 2 * WORD_BYTES

    @property
    def exchange_bytes(self) -> int:
        """Of a rank's exchange buffer: control words, then two of each by parity of the epoch."""
        return CONTROL_BYTES + 2 * (self.query_bytes + self.candidate_bytes)

    def shapes(self, num_units: int, collective: bool) -> tuple[tuple[str, tuple[int, ...], torch.dtype], ...]:
        """Buffers of a rank besides the exchange buffer."""
        config, tokens, heads = self.config, self.max_tokens, self.share.total_heads
        control = self.gathered_control_words
        own: tuple[tuple[str, tuple[int, ...], torch.dtype], ...] = (
            ("header", (16,), torch.int32),
            ("positions", (tokens,), torch.int32),
            ("local_positions", (tokens,), torch.int32),
            ("offsets", (config.max_requests + 1,), torch.int32),
            ("unit_request", (num_units,), torch.int32),
            ("blocks", (config.max_requests * self.own_blocks,), torch.int32),
            ("scores", (tokens * heads * self.score_stride,), torch.float32),
            ("queries", (tokens * heads * self.row_words,), torch.int32),
            ("peers", (16,), torch.int64),
            ("epochs", (2,), torch.int64),
        )
        if collective:
            own += (
                ("gathered_queries", (self.share.size * tokens * config.num_heads * self.row_words,), torch.int32),
                ("candidates", (control + tokens * heads * config.topk * 2,), torch.int64),
                ("gathered", (control + self.share.size * tokens * heads * config.topk * 2,), torch.int64),
            )  # fmt: skip
        return own


class ContextPick:
    """Context-parallel decode over the buffers of one rank. Grids depend on maxima and the planned batch shape only."""

    def __init__(
        self, kernels: ContextKernels, sizes: ContextSizes, compute_units: int, buffers: Mapping[str, torch.Tensor],
        group: Group, addresses: list[int], bind: Bind,
    ) -> None:  # fmt: skip
        self._kernels, self._sizes, self._buffers, self._group = kernels, sizes, buffers, group
        self._units = [compute_units * int(c.variant.launch["units_per_cu"]) for c in kernels.score]
        self._merge_programs = compute_units * int(kernels.merge.variant.launch["programs_per_cu"])
        self._exchange_programs = compute_units
        self._exchange_tile = int(kernels.exchange.variant.launch["tile"])
        self._plan_chunk = int(kernels.plan.variant.launch["chunk"])
        self._collective = group.transport == "collective"
        self._table(addresses)
        buffers["epochs"].fill_(1)
        lengths = range(1, sizes.config.max_query_len + 1)
        self._launches = [self._bind(length, bind) for length in lengths]
        self._exchange = None if self._collective else self._bind_exchange(bind)

    def _table(self, addresses: list[int]) -> None:
        """Addresses that kernels store to, by rank, then the one that the merge reads from in place of the own."""
        sizes, share, buffers = self._sizes, self._sizes.share, self._buffers
        table = addresses
        if self._collective:  # candidates of all heads lie in one tensor: the ranks of a head are places in it
            per_share = share.num_heads * sizes.config.topk * 2 * WORD_BYTES
            table = [
                buffers["candidates"].data_ptr() + rank // share.replicas * per_share for rank in range(share.size)
            ]
            gathered = buffers["gathered"].data_ptr() + self._first_head() * sizes.config.topk * 2 * WORD_BYTES
            table += [gathered] * (16 - share.size)
        self._buffers["peers"][: len(table)] = torch.tensor(table, dtype=torch.int64)

    def _first_head(self) -> int:
        return self._sizes.share.first_head(self._group.rank)

    def _peer_arguments(self) -> dict[str, Any]:
        return {"peers_ptr": self._buffers["peers"], "epochs_ptr": self._buffers["epochs"]}

    def _dealt_blocks(self) -> dict[str, int]:
        """Which blocks are this rank's."""
        return {
            "block_step": self._sizes.blocks.step, "first_block": self._sizes.blocks.first_block(self._group.rank)
        }  # fmt: skip

    def _bind_exchange(self, bind: Bind) -> Launch:
        share = self._sizes.share
        fixed = {
            "queries_ptr": self._buffers["queries"], "record_ptr": self._group.record, "region_bytes": CONTROL_BYTES,
            "parity_bytes": self._sizes.query_bytes, "num_heads": share.num_heads, "total_heads": share.total_heads,
            "replicas": share.replicas, "row_words": self._sizes.row_words, "cp_size": share.size,
            "cp_rank": self._group.rank, **self._peer_arguments(),
        }  # fmt: skip
        return bind(self._kernels.exchange, fixed, EXCHANGE_ARGS)

    def _bind(self, length: int, bind: Bind) -> tuple[Launch, ...]:
        """Launches (plan, score, push, merge, merge with a sparse table) for one query length."""
        config, share, buffers, kernels = self._sizes.config, self._sizes.share, self._buffers, self._kernels
        blocks, rank, scorer = self._sizes.blocks, self._group.rank, kernels.score[length - 1]
        units = self._units[length - 1]
        lists: dict[str, Any] = {
            f"{name}_ptr": buffers[name] for name in ("header", "offsets", "unit_request", "blocks")
        }
        lists |= {"query_len": length}
        plan = {
            **lists, "positions_ptr": buffers["positions"], "local_positions_ptr": buffers["local_positions"],
            "blocks_per_page": config.layout.blocks_per_page, "unscored_blocks": config.unscored_blocks,
            "num_units": units, "stored_blocks": blocks.stored_blocks, "block_rows": blocks.rows,
            "first_row": blocks.first_row(rank), **self._dealt_blocks(),
        }  # fmt: skip
        form = (
            {"block_parts": blocks.rows // PART_ROWS} if scorer.variant.role == SHARDS_ROLE
            else {"blocks_per_page": blocks.stored_blocks}
        )  # fmt: skip
        score = {
            **lists, **form, "q_ptr": buffers["queries"], "scores_ptr": buffers["scores"],
            "positions_ptr": buffers["local_positions"], "stride_scores": self._sizes.score_stride,
            "num_heads": share.total_heads, "stride_q_t": share.total_heads * self._sizes.row_words * 4,
            "stride_q_h": self._sizes.row_words * 4,
        }  # fmt: skip
        rows = {
            "header_ptr": buffers["header"], "positions_ptr": buffers["positions"], "query_len": length,
            "num_heads": share.num_heads, "topk": config.topk, "order": ORDERS.index(config.order), **self._regions(),
        }  # fmt: skip
        del rows["stride_source"]  # comes with every launch
        push = {
            **rows, **self._peer_arguments(), **self._dealt_blocks(), "rank": rank, "scores_ptr": buffers["scores"],
            "stride_scores": self._sizes.score_stride, "total_heads": share.total_heads, "replicas": share.replicas,
            "init_blocks": config.init_blocks, "local_blocks": config.local_blocks,
        }  # fmt: skip
        # what the merge reads: the own exchange buffer, or what was gathered
        own = buffers["peers"][share.size if self._collective else self._group.rank :]
        merge = {
            **rows, "epochs_ptr": buffers["epochs"], "cp_size": share.size,
            "own_buffer_ptr": own, "record_ptr": self._record(),
            "flags": EMPTY_BLOCK_ZERO * (config.empty_row == "block_zero") + PARTS * (blocks.copies > 1),
        }  # fmt: skip
        nothing = {**dict.fromkeys(TABLE_POINTERS, buffers["header"]), **dict.fromkeys(TABLE_NUMBERS, 0)}
        score_args = tuple(name for name in SCORE_ARGS if name not in ("q_ptr", "stride_q_t", "stride_q_h"))
        return (
            bind(kernels.plan, plan, PLAN_ARGS), bind(scorer, score, score_args),
            bind(kernels.push, push, ("stride_source", "num_requests")),
            bind(kernels.merge, merge | nothing, ("out_ptr", *MERGE_ARGS)),
            bind(kernels.merge, merge, ("out_ptr", *TABLE_POINTERS, *MERGE_ARGS, *TABLE_NUMBERS)),
        )  # fmt: skip

    def _record(self) -> Any:
        """Where a failed wait is told; gathered candidates are never waited for."""
        return self._buffers["epochs"] if self._collective else self._group.record

    def _regions(self) -> dict[str, int]:
        """Where candidates lie, in words: [token, head, rank, slot, word], or as gathered, the rank first."""
        sizes, share = self._sizes, self._sizes.share
        row = sizes.config.topk * 2
        if self._collective:
            return {
                "region_bytes": sizes.gathered_control_words * WORD_BYTES, "parity_bytes": 0,
                "stride_row_t": share.total_heads * row, "stride_row_h": row, "stride_source": 0,
            }  # fmt: skip
        return {
            "region_bytes": CONTROL_BYTES + 2 * sizes.query_bytes, "parity_bytes": sizes.candidate_bytes,
            "stride_row_t": share.num_heads * share.size * row, "stride_row_h": share.size * row, "stride_source": row,
        }  # fmt: skip

    # ---- launches

    def plan(self, block_table: torch.Tensor, seq_lens: torch.Tensor, query_len: int) -> None:
        """Launch the plan kernel: the blocks of this rank."""
        num_requests, width = block_table.shape
        blocks = -(-width * self._sizes.config.layout.blocks_per_page // self._sizes.blocks.step)
        chunks = -(-blocks // self._plan_chunk)
        self._launches[query_len - 1][0](
            num_requests * chunks, current_stream(block_table.device), seq_lens, block_table, block_table.stride(0),
            num_requests, width,
        )  # fmt: skip

    def exchange(self, plan: DecodePlan, q: torch.Tensor, phases: int = PUSH | WAIT) -> None:
        """Gather the queries of all ranks."""
        tokens = plan.num_requests * plan.query_len
        if self._exchange is None:
            self._gather_queries(q[:tokens])
            return
        size, share = q.element_size(), self._sizes.share
        words = tokens * share.num_heads * (self._sizes.row_words // share.replicas)
        grid = min(-(-words // self._exchange_tile), self._exchange_programs)
        self._exchange(
            grid, current_stream(q.device), q, q.stride(0) * size, q.stride(1) * size, tokens, phases
        )  # fmt: skip

    def _gather_queries(self, q: torch.Tensor) -> None:
        share, words = self._sizes.share, self._sizes.row_words
        tokens, heads = q.shape[0], share.num_heads
        own = q.contiguous().view(torch.int32)
        gathered = self._buffers["gathered_queries"][: share.size * own.numel()]
        self._group.all_gather(gathered, own.view(-1))
        ranks = gathered.view(share.size, tokens, heads, words)[:: share.replicas]
        target = self._buffers["queries"][: tokens * share.total_heads * words]
        target.view(tokens, share.size // share.replicas, heads, words).copy_(ranks.transpose(0, 1))

    def score(self, plan: DecodePlan, cache: torch.Tensor) -> None:
        """Score the own blocks for all heads."""
        self._launches[plan.query_len - 1][1](
            self._units[plan.query_len - 1], current_stream(cache.device), cache, page_stride_bytes(cache),
            cache.shape[0], plan.num_requests,
        )  # fmt: skip

    def push(self, plan: DecodePlan, device: torch.device) -> None:
        """Send the best of the own blocks to the ranks of their head."""
        rows = plan.num_requests * plan.query_len * self._sizes.share.total_heads
        stride = self._regions()["stride_source"]
        grid = -(-rows // int(self._kernels.push.variant.launch["rows_per_block"]))
        self._launches[plan.query_len - 1][2](grid, current_stream(device), stride, plan.num_requests)
        if self._collective:
            words = rows * self._sizes.config.topk * 2
            control = self._sizes.gathered_control_words
            gathered = self._buffers["gathered"][control:][: self._sizes.share.size * words]
            self._group.all_gather(gathered, self._buffers["candidates"][control:][:words])

    def merge(self, plan: DecodePlan, out_thk: torch.Tensor, sparse: SparseTable | None = None) -> None:
        """Merge the candidates of all ranks into the ids of the own heads."""
        share = self._sizes.share
        rows = plan.num_requests * plan.query_len * share.num_heads
        stride = self._regions()["stride_source"]
        if self._collective:
            stride = plan.num_requests * plan.query_len * share.total_heads * self._sizes.config.topk * 2
        grid, stream = min(rows, self._merge_programs), current_stream(out_thk.device)
        numbers = out_thk.stride(0), out_thk.stride(1), stride, plan.num_requests
        if sparse is None:
            self._launches[plan.query_len - 1][3](grid, stream, out_thk, *numbers)
            return
        attention = sparse.attention_block_table
        self._launches[plan.query_len - 1][4](
            grid, stream, out_thk, attention, sparse.table, sparse.context_lens, *numbers, attention.stride(0),
            table_form(sparse),
        )  # fmt: skip

    def run(
        self, plan: DecodePlan, q: torch.Tensor, cache: torch.Tensor, out_thk: torch.Tensor,
        sparse: SparseTable | None = None,
    ) -> None:  # fmt: skip
        """The whole chain of one layer."""
        self.exchange(plan, q)
        self.score(plan, cache)
        self.push(plan, q.device)
        self.merge(plan, out_thk, sparse)

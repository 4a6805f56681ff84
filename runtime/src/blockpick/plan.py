# SPDX-License-Identifier: Apache-2.0
"""Plans of a step, and the buffers of a slot: work lists that all layers share, and the scratch that they reuse."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .config import IndexerConfig, Memory
from .errors import UnsupportedConfigError

SCORE_BYTES = 4
STRIDE_BLOCKS = 32  # score rows are multiples of this


@dataclass(frozen=True, eq=False)
class DecodePlan:
    """One planned decode step. Valid until its slot is planned for decode again; shared by all layers of the step.

    Attributes
    ----------
    slot : int
        The indexer's slot that holds the plan's buffers.
    generation : int
        Counts the plans of the slot; an older plan is refused.
    num_requests, query_len : int
        Shape of the batch: ``num_requests * query_len`` query rows.
    table_blocks : int
        Blocks that the planned block table can address.
    """

    slot: int
    generation: int
    num_requests: int
    query_len: int
    table_blocks: int


@dataclass(frozen=True, eq=False)
class PrefillPlan:
    """One planned prefill step. Valid until its slot is planned for prefill again; shared by all layers of the step.

    Attributes
    ----------
    slot, generation : int
        As in :class:`DecodePlan`.
    num_requests, num_tokens : int
        Shape of the batch: ``num_tokens`` query rows of ``num_requests`` requests.
    cu_seqlens_q, block_table : torch.Tensor
        What was planned, kept for the launches of all layers.
    blocks : int
        Blocks that a row can see at most.
    score_stride : int
        Scores between two rows of the scratch.
    pass_tokens, num_passes : int
        The batch is scored and selected in passes of this many tokens, whose scores fit the workspace.
    max_seq_len : int, optional
        The bound on the lengths that was planned with.
    """

    slot: int
    generation: int
    num_requests: int
    num_tokens: int
    cu_seqlens_q: torch.Tensor
    block_table: torch.Tensor
    blocks: int
    score_stride: int
    pass_tokens: int
    num_passes: int
    max_seq_len: int | None = None


@dataclass(frozen=True)
class SlotSizes:
    """Shapes and dtypes of one slot's buffers, computed from maxima only."""

    shapes: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    tile_tokens: int
    workspace_bytes: int

    @classmethod
    def of(
        cls, config: IndexerConfig, num_units: int | None, split_blocks: int, keys_per_split: int, tile_tokens: int
    ) -> SlotSizes:
        """Sizes for ``config``: ``num_units`` decode work units (None: decode's buffers are elsewhere), splits of
        ``split_blocks`` blocks, prefill tiles of ``tile_tokens`` tokens.

        Raises
        ------
        UnsupportedConfigError
            When ``workspace_bytes`` does not hold the scores of one tile.
        """
        decode_rows = 0 if num_units is None else config.max_rows
        scores = decode_rows * config.score_stride
        partial = rows_of_splits(decode_rows, config.max_blocks, split_blocks) * keys_per_split
        prefill: tuple[tuple[str, tuple[int, ...], torch.dtype], ...] = ()
        workspace = 0
        if config.max_prefill_tokens:
            workspace = workspace_bytes(config, tile_tokens)
            scores = max(scores, workspace // SCORE_BYTES)
            # the most rows that have several splits are those of the shortest such rows
            rows = workspace // (SCORE_BYTES * min(score_stride(config.max_blocks), split_blocks + STRIDE_BLOCKS))
            rows = min(rows, config.max_prefill_tokens * config.num_heads)
            longest = rows_of_splits(rows, config.max_blocks, split_blocks)
            partial = max(partial, min(longest, 2 * workspace // (SCORE_BYTES * split_blocks)) * keys_per_split)
            passes = -(-config.max_prefill_tokens // tokens_of_pass(config, config.max_blocks, workspace, tile_tokens))
            prefill = (
                ("prefill_header", (16,), torch.int32),
                ("prefill_positions", (config.max_prefill_tokens,), torch.int32),
                ("spans", (passes, config.max_requests + 1, 4), torch.int32),
            )
        decode: tuple[tuple[str, tuple[int, ...], torch.dtype], ...] = ()
        if num_units is not None:
            decode = (
                ("header", (16,), torch.int32),
                ("positions", (config.max_requests * config.max_query_len,), torch.int32),
                ("offsets", (config.max_requests + 1,), torch.int32),
                ("unit_request", (num_units,), torch.int32),
                ("blocks", (config.max_requests * config.max_blocks,), torch.int32),
            )
        scratch = (("scores", (max(scores, 16),), torch.float32), ("partial", (max(partial, 16),), torch.int64))
        shapes = (*decode, *scratch, *prefill)
        return cls(shapes, tile_tokens, workspace)

    def memory(self, slots: int) -> Memory:
        """Bytes of ``slots`` slots by buffer."""
        return Memory(tuple((n, slots * math.prod(shape) * dtype.itemsize) for n, shape, dtype in self.shapes))

    def allocate(self, device: torch.device) -> dict[str, torch.Tensor]:
        """The buffers of one slot; the plans are empty (no work) until the slot is planned."""
        return {n: torch.zeros(shape, dtype=dtype, device=device) for n, shape, dtype in self.shapes}

    def prefill_geometry(self, config: IndexerConfig, blocks: int, num_tokens: int) -> tuple[int, int, int]:
        """Score stride, tokens of a pass and number of passes for rows of ``blocks`` blocks."""
        tokens = tokens_of_pass(config, blocks, self.workspace_bytes, self.tile_tokens)
        return score_stride(blocks), tokens, -(-num_tokens // tokens)


def score_stride(blocks: int) -> int:
    """Scores between two rows of ``blocks`` blocks."""
    return -(-blocks // STRIDE_BLOCKS) * STRIDE_BLOCKS


def rows_of_splits(rows: int, blocks: int, split_blocks: int) -> int:
    """Splits of ``rows`` rows that leave keys for a merge; rows of one split leave none."""
    splits = -(-blocks // split_blocks)
    return rows * splits if splits > 1 else 0


def workspace_bytes(config: IndexerConfig, tile_tokens: int) -> int:
    """Bytes of prefill scores that are held at once: what was asked, at most what the largest batch needs.

    Raises
    ------
    UnsupportedConfigError
        When the scores of one tile of queries do not fit.
    """
    row = config.num_heads * score_stride(config.max_blocks) * SCORE_BYTES
    least, most = tile_tokens * row, -(-config.max_prefill_tokens // tile_tokens) * tile_tokens * row
    if config.workspace_bytes < least:
        raise UnsupportedConfigError(
            f"Indexer: workspace_bytes={config.workspace_bytes} is less than one tile of prefill scores: {tile_tokens} "
            f"tokens * {config.num_heads} heads * {config.max_blocks} blocks need {least} bytes"
        )
    return min(config.workspace_bytes, most)


def tokens_of_pass(config: IndexerConfig, blocks: int, workspace: int, tile_tokens: int) -> int:
    """Tokens whose scores fit the workspace: whole tiles."""
    rows = workspace // (SCORE_BYTES * score_stride(blocks))
    return rows // config.num_heads // tile_tokens * tile_tokens

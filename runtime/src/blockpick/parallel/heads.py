# SPDX-License-Identifier: Apache-2.0
"""Which index heads and blocks belong to which rank."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UnsupportedConfigError
from ..layout import BLOCK_TOKENS, CacheLayout

RANKS = (2, 4, 8)
M3_HEADS = 4


@dataclass(frozen=True)
class HeadShare:
    """Heads over ranks: ``total_heads`` in all, ``num_heads`` a rank, every head on ``replicas`` neighbouring ranks.

    Raises
    ------
    UnsupportedConfigError
        When the heads can't be shared so.
    """

    size: int
    num_heads: int
    total_heads: int

    @classmethod
    def of(cls, size: int, num_heads: int, total_heads: int | None) -> HeadShare:
        """The share of a group; by default all heads of MiniMax M3, or fewer where the ranks hold fewer."""
        return cls(size, num_heads, min(M3_HEADS, size * num_heads) if total_heads is None else total_heads)

    def __post_init__(self) -> None:
        held, total = self.size * self.num_heads, self.total_heads
        if total < self.num_heads or total % self.num_heads or held % total:
            raise UnsupportedConfigError(
                f"Indexer: {self.size} ranks of num_heads={self.num_heads} can't share total_heads={total}: every head "
                "must be on the same number of ranks"
            )

    @property
    def replicas(self) -> int:
        """Ranks that hold the same heads."""
        return self.size * self.num_heads // self.total_heads

    def first_head(self, rank: int) -> int:
        """The first of a rank's heads."""
        return rank // self.replicas * self.num_heads


@dataclass(frozen=True)
class BlockShare:
    """Blocks over ranks: a rank scores every ``step``-th block, and of its 128 tokens those that it stores.

    Attributes
    ----------
    step : int
        Ranks between which blocks are dealt out.
    copies : int
        Neighbouring ranks that score parts of the same blocks.
    rows : int
        Tokens of a block that one rank stores.
    stored_blocks : int
        Blocks, or parts of one, in a stored page.
    """

    step: int
    copies: int
    rows: int
    stored_blocks: int

    @classmethod
    def of(cls, layout: CacheLayout, size: int) -> BlockShare:
        """Whole blocks of a replicated cache in turn; of a sharded one what each rank stores."""
        if layout.shards == 1:
            return cls(size, 1, BLOCK_TOKENS, layout.blocks_per_page)
        copies = max(1, BLOCK_TOKENS // layout.page_rows)
        return cls(size // copies, copies, layout.segment_rows, 1)

    def first_block(self, rank: int) -> int:
        """The first block that a rank scores."""
        return rank // self.copies

    def first_row(self, rank: int) -> int:
        """The first of its tokens that the rank stores."""
        return rank % self.copies * self.rows

# SPDX-License-Identifier: Apache-2.0
"""Which index heads and blocks belong to which rank."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UnsupportedConfigError

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

# SPDX-License-Identifier: Apache-2.0
"""Which kernels decode over ranks takes, and the scorer among them: of one numeric family with replicated decode's."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import IndexerConfig
from ..dispatch import Choice, Need, select
from ..errors import UnsupportedConfigError
from ..layout import BLOCK_TOKENS
from ..manifest import KernelPackage
from ..parallel.heads import BlockShare, HeadShare
from .decode_pick import cache_needs, select_scorers

SHARDS_ROLE = "decode_score_shards"


@dataclass(frozen=True)
class ContextKernels:
    """The chosen variants; ``score`` holds one per query length, of one numeric family with replicated decode."""

    plan: Choice
    exchange: Choice
    score: tuple[Choice, ...]
    push: Choice
    merge: Choice

    @classmethod
    def choose(
        cls, package: KernelPackage, config: IndexerConfig, share: HeadShare, blocks: BlockShare, route: str,
        shard_scorer: bool = False,
    ) -> ContextKernels:  # fmt: skip
        """Choose the kernels of ``config`` from one package; needs no device. ``shard_scorer``: take the scorer of
        parts of blocks also where ranks store whole ones.

        Raises
        ------
        KernelNotInstalledError
            When a role has no variant; the message lists every candidate with its reason.
        """
        topk = [Need("topk", config.topk, at_least=True)]
        return cls(
            plan=select(package, "decode_plan", [], route),
            exchange=select(package, "exchange_queries", [], route),
            score=select_rank_scorers(package, config, share.total_heads, blocks, route, shard_scorer),
            push=select(package, "push_candidates", topk, route),
            merge=select(package, "merge_ranks", topk, route),
        )

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Every distinct choice."""
        return (self.plan, self.exchange, *dict.fromkeys(self.score), self.push, self.merge)


def select_rank_scorers(
    package: KernelPackage, config: IndexerConfig, total_heads: int, blocks: BlockShare, route: str, shard_scorer: bool
) -> tuple[Choice, ...]:
    """The scorer of every query length for a rank's share of the blocks, of one numeric family with the scorer that a
    replicated cache would get: the same op where it has variants of so many rows.

    Raises
    ------
    KernelNotInstalledError
        When there is none; the message lists every candidate with its reason.
    UnsupportedConfigError
        When the scorer of parts is asked for and takes fewer rows than a rank stores.
    """
    whole = select_scorers(package, config, total_heads, route)
    family = whole[0].variant.op
    parts = any(v.op == family and v.axes["rows"] < BLOCK_TOKENS for v in package.variants)
    if blocks.rows == BLOCK_TOKENS and (parts or not shard_scorer):
        return whole
    cache = cache_needs(config, config.rounding(package.nvfp4_rounding))[:2]
    lengths = range(1, config.max_query_len + 1)
    columns = [Need("columns", total_heads * length, at_least=True) for length in lengths]
    if parts:
        rows = Need("rows", blocks.rows)
        return tuple(select(package, "decode_score", [*cache, rows, need], route, family) for need in columns)
    choices = tuple(select(package, SHARDS_ROLE, [*cache, need], route) for need in columns)
    for choice in choices:
        if blocks.rows > choice.variant.launch["tile"]:
            raise UnsupportedConfigError(
                f"Indexer: shard_scorer=True: {choice.variant.name} scores {choice.variant.launch['tile']} rows of a "
                f"block at most, every rank stores {blocks.rows}; leave shard_scorer away"
            )
    return choices

# SPDX-License-Identifier: Apache-2.0
"""How the index cache is stored and decode is spread over tensor-parallel ranks, decided before it is allocated."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import UnsupportedConfigError
from .layout import TOKEN_BYTES, CacheLayout
from .parallel.heads import RANKS, BlockShare

KV_DTYPES = {"bf16": "bf16", "fp8": "e4m3fn", "e4m3fn": "e4m3fn", "nvfp4": "nvfp4"}  # names in engines -> in layouts
PREFERENCES = ("context", "sharded")
_logger = logging.getLogger("blockpick")


@dataclass(frozen=True)
class Rule:
    """What is done where all facts of ``when`` hold (a fact's value is one of those listed), and why."""

    when: Mapping[str, tuple[Any, ...]]
    parallel: str | None  # "refused": nothing is
    reason: str
    warns: bool = False


ANY = ("context", "sharded", "both")
# the first rule whose facts hold decides; facts are the same on all ranks
RULES = (
    Rule({"asked": ("nothing",)}, None, "every rank stores and scores all keys for its own heads"),
    Rule(
        {"asked": ANY, "dcp": ("above 1",)}, "refused",
        "decode context parallelism of the engine spreads the tokens of a request over ranks already, so a rank lacks "
        "keys of the pages that it would share; leave it at 1, or ask for neither sharding nor context-parallel decode",
    ),
    Rule({"asked": ANY, "tp": (1,)}, None, "one rank has nobody to share with"),
    Rule({"asked": ANY, "tp": ("other",)}, "refused", f"supported tensor-parallel sizes: {', '.join(map(str, RANKS))}"),
    Rule(
        {"asked": ("both",), "prefer": ("context",)}, "context",
        "asked for sharding and for context-parallel decode, which exclude each other: context-parallel decode reads "
        "as few keys a rank and merges without doubles, but keeps the whole cache on every rank (prefer='sharded' for "
        "the other)",
        warns=True,
    ),
    Rule({"asked": ("both",), "prefer": ("sharded",)}, "sharded", "preferred to context-parallel decode"),
    Rule({"asked": ("context",)}, "context", "asked for"),
    Rule({"asked": ("sharded",)}, "sharded", "asked for"),
)  # fmt: skip


@dataclass(frozen=True)
class CacheDecision:
    """How one rank stores its index cache and decodes.

    Attributes
    ----------
    layout : CacheLayout
        Of every rank's cache.
    parallel : {None, "context", "sharded"}
        As in :class:`blockpick.Indexer`.
    shard_scorer : bool
        As in :class:`blockpick.Indexer`.
    reason : str
        Why.
    """

    layout: CacheLayout
    parallel: str | None
    shard_scorer: bool
    reason: str

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one layer's cache on one rank for one token of context."""
        return TOKEN_BYTES[self.layout.dtype] // self.layout.shards

    def options(self) -> dict[str, Any]:
        """Arguments of :class:`blockpick.Indexer`; a group comes with ``parallel``."""
        return {"layout": self.layout, "parallel": self.parallel, "shard_scorer": self.shard_scorer}

    def explain(self) -> str:
        """What was decided and why, in a line or two."""
        stored = "replicated" if self.layout.shards == 1 else f"sharded over {self.layout.shards} ranks"
        lines = [
            f"index cache {self.layout.dtype}, pages of {self.layout.page_size}: {stored}, {self.bytes_per_token} "
            "bytes a token and layer on every rank",
            f"parallel {self.parallel}: {self.reason}",
        ]
        if self.parallel == "sharded":
            lines.append(explain_shards(self.layout, self.shard_scorer))
        return "\n".join(lines)


def decide_cache(
    *, indexer_kv_dtype: str, page_size: int, tp_size: int, indexer_cache_sharding: bool = False,
    indexer_decode_cp: bool = False, dcp_size: int = 1, prefer: str = "context", shard_scorer: bool = False,
) -> CacheDecision:  # fmt: skip
    """Decide how the index cache is stored and decode is spread, from facts that are equal on all ranks.

    Parameters
    ----------
    indexer_kv_dtype : {"bf16", "fp8", "e4m3fn", "nvfp4"}
        What keys are stored as; ``fp8`` is e4m3fn.
    page_size : {128, 256}
        Tokens of a page.
    tp_size : int
        Tensor-parallel ranks.
    indexer_cache_sharding : bool
        Store 1/tp_size of every page on each rank.
    indexer_decode_cp : bool
        Context-parallel decode over a replicated cache.
    dcp_size : int
        The engine's own decode context parallelism.
    prefer : {"context", "sharded"}
        Which of the two holds where both are asked for; logged once.
    shard_scorer : bool
        With sharding: take the scorer of parts of blocks where ranks store whole ones (pages of 256 over two ranks).

    Returns
    -------
    CacheDecision
        To allocate the cache from, and to make the indexer with.

    Raises
    ------
    UnsupportedConfigError
        Naming the argument: what was asked, why not, what is supported.
    TypeError
        When a switch is no bool or a size no int.
    """
    check_request(
        {"indexer_cache_sharding": indexer_cache_sharding, "indexer_decode_cp": indexer_decode_cp,
         "shard_scorer": shard_scorer},
        {"tp_size": tp_size, "dcp_size": dcp_size}, indexer_kv_dtype, prefer,
    )  # fmt: skip
    asked = {(False, False): "nothing", (True, False): "sharded", (False, True): "context", (True, True): "both"}
    facts = {
        "asked": asked[indexer_cache_sharding, indexer_decode_cp],
        "tp": tp_size if tp_size in (1, *RANKS) else "other",
        "dcp": 1 if dcp_size == 1 else "above 1",
        "prefer": prefer,
    }
    rule = next(rule for rule in RULES if all(facts[name] in values for name, values in rule.when.items()))
    if rule.parallel == "refused":
        raise UnsupportedConfigError(f"decide_cache: tp_size={tp_size}, dcp_size={dcp_size}: {rule.reason}")
    if rule.warns:
        warn_once(rule.reason)
    shards = tp_size if rule.parallel == "sharded" else 1
    layout = CacheLayout(KV_DTYPES[indexer_kv_dtype], page_size, shards)
    return CacheDecision(layout, rule.parallel, shard_scorer and shards > 1, rule.reason)


def check_request(
    switches: Mapping[str, object], sizes: Mapping[str, object], indexer_kv_dtype: str, prefer: str
) -> None:
    """Refuse arguments of :func:`decide_cache` that no rule knows."""
    for name, switch in switches.items():
        if not isinstance(switch, bool):
            raise TypeError(f"decide_cache: {name} must be a bool, is {type(switch).__name__}")
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"decide_cache: {name} must be an int, is {type(size).__name__}")
        if size < 1:
            raise UnsupportedConfigError(f"decide_cache: {name}={size} is not supported; supported: 1 and above")
    for name, value, allowed in (("indexer_kv_dtype", indexer_kv_dtype, KV_DTYPES), ("prefer", prefer, PREFERENCES)):
        if value not in allowed:
            raise UnsupportedConfigError(
                f"decide_cache: {name}={value!r} is not supported; supported: {', '.join(allowed)}"
            )


def explain_shards(layout: CacheLayout, shard_scorer: bool) -> str:
    """What a rank stores of a block, and for what a scorer is chosen."""
    blocks = BlockShare.of(layout, layout.shards)
    if blocks.copies > 1:
        return f"shards: a rank stores {blocks.rows} of the 128 rows of a block"
    asked = "parts of blocks, where it is another (asked for)" if shard_scorer else "whole blocks"
    return f"shards: a rank stores whole blocks, every second; scored by the kernel for {asked}"


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning the first time that it is given."""
    _logger.warning(message)

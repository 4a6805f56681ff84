# SPDX-License-Identifier: Apache-2.0
"""Batches for decode over ranks, and the ids that replicated decode picks for them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from blockpick import CacheLayout, Indexer, insert
from blockpick.parallel.heads import HeadShare

TOTAL_HEADS = 4
SENTINEL = -77


@dataclass(frozen=True)
class ContextCase:
    """One decode batch of all ranks: the same table, lengths and cache on each, other heads."""

    name: str
    dtype: str = "bf16"
    lens: tuple[int, ...] = (2500, 2304, 641, 0, 5)
    query_len: int = 2
    order: str = "score"
    topk: int = 16
    init_blocks: int = 0
    local_blocks: int = 1
    page_size: int = 128
    rounding: str | None = None
    empty_row: str = "minus_one"
    out_layout: str = "thk"
    data: str = "integer"
    seed: int = 5
    sharded: bool = False  # every rank stores a shard of the cache, or all of it
    shard_scorer: bool = False
    spare_requests: int = 1  # that the indexer has room for besides

    def __str__(self) -> str:
        return self.name

    @property
    def layout(self) -> CacheLayout:
        """The cache."""
        return CacheLayout(self.dtype, self.page_size)

    def rank_options(self, size: int) -> dict[str, object]:
        """Layout and parallelism of the indexer of one of ``size`` ranks."""
        if not self.sharded:
            return {"layout": self.layout, "parallel": "context"}
        layout = CacheLayout(self.dtype, self.page_size, size)
        return {"layout": layout, "parallel": "sharded", "shard_scorer": self.shard_scorer}

    def rank_cache(self, rank: int, size: int) -> torch.Tensor:
        """What a rank stores."""
        cache, *_ = self.batch()
        if not self.sharded:
            return cache
        layout = CacheLayout(self.dtype, self.page_size, size)
        shard = layout.empty(len(cache), "cpu")
        insert(layout, shard, self.keys(), torch.arange(len(cache) * self.page_size), shard=rank, backend="reference")
        return shard

    @property
    def width(self) -> int:
        """Pages of the longest request."""
        return -(-max(*self.lens, 1) // self.page_size)

    @property
    def options(self) -> dict[str, object]:
        """Of an indexer that fits the case."""
        return {
            "topk": self.topk, "init_blocks": self.init_blocks, "local_blocks": self.local_blocks, "order": self.order,
            "empty_row": self.empty_row, "out_layout": self.out_layout, "nvfp4_rounding": self.rounding,
            "max_requests": len(self.lens) + self.spare_requests, "max_query_len": self.query_len,
            "max_seq_len": self.width * self.page_size,
        }  # fmt: skip

    def keys(self) -> torch.Tensor:
        """Index keys of all pages."""
        generator = torch.Generator().manual_seed(self.seed)
        tokens = len(self.lens) * self.width * self.page_size
        if self.data in ("integer", "few"):  # sums are exact in fp32, and ties are many: the more, the fewer dims
            keys = torch.randint(-2, 3, (tokens, 128), generator=generator).bfloat16()
            keys[:, 12 if self.data == "few" else 128 :] = 0
            return keys
        keys = torch.randn(tokens, 128, generator=generator).bfloat16()
        if self.data == "special":
            keys[torch.rand(tokens, generator=generator) < 0.3] = float("nan")
            keys[256:384] = float("nan")
            for first, last in ((640, 704), (784, 800), (928, 960)):  # all that one rank stores of a block
                keys[first:last] = float("nan")
            if self.dtype == "bf16":
                keys[384:512, 0] = float("inf")
                keys[512:640, 0] = float("-inf")
        return keys

    def batch(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Cache, block table, lengths and the queries of all heads."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        pages = len(self.lens) * self.width
        cache, keys = self.layout.empty(pages, "cpu"), self.keys()
        tokens = len(keys)
        if self.data in ("integer", "few"):
            q = torch.randint(-2, 3, (len(self.lens) * self.query_len, TOTAL_HEADS, 128), generator=generator).float()
        else:
            q = torch.randn(len(self.lens) * self.query_len, TOTAL_HEADS, 128, generator=generator)
        if self.data == "special":
            q[1::3] = float("nan")
            q[0, :, 0] = 1.0
        insert(self.layout, cache, keys, torch.arange(tokens), backend="reference")
        table = torch.randperm(pages, generator=generator).int().view(len(self.lens), self.width)
        q = q.to(self.layout.query_dtype)
        if self.dtype != "bf16" and self.data == "special":  # both NaN bytes of e4m3
            raw = q.view(torch.uint8)
            raw[1::6] = torch.where(raw[1::6] == 0x7F, 0xFF, raw[1::6])
        return cache, table, torch.tensor(self.lens, dtype=torch.int32), q


def turned(q: torch.Tensor, turn: int) -> torch.Tensor:
    """Queries with their tokens rolled by ``turn``; torch rolls no fp8."""
    return q.view(torch.uint8).roll(turn, 0).view(q.dtype)


@functools.lru_cache(maxsize=4)
def replicated(case: ContextCase, backend: str, arch: str | None, device: str) -> torch.Tensor:
    """Ids [T, all heads, topk] of replicated decode on the same kernels."""
    cache, table, lens, q = (tensor.to(device) for tensor in case.batch())
    indexer = Indexer(
        case.layout, num_heads=TOTAL_HEADS, device=device, backend=backend, arch=arch,
        **{**case.options, "out_layout": "thk"},
    )  # fmt: skip
    out = torch.full((len(q), TOTAL_HEADS, case.topk), SENTINEL, dtype=torch.int32, device=device)
    return indexer.decode(indexer.plan_decode(table, lens, query_len=case.query_len), q, cache, out).cpu()


def heads_of(rank: int, size: int) -> slice:
    """The heads of a rank: 4 over 2 and 4 ranks, 2 replicas of each over 8."""
    share = HeadShare.of(size, max(TOTAL_HEADS // size, 1), TOTAL_HEADS)
    return slice(share.first_head(rank), share.first_head(rank) + share.num_heads)


CACHES = (("bf16", None), ("e4m3fn", None), ("nvfp4", "exact"), ("nvfp4", "e4m3"))
CASES = [
    ContextCase(f"{dtype}-{rounding}-{order}", dtype, order=order, rounding=rounding)
    for dtype, rounding in CACHES for order in ("score", "local_last", "ascending")
] + [
    ContextCase("init-and-local", lens=(2500, 640, 130), init_blocks=2, local_blocks=3, query_len=1),
    ContextCase("topk-40-page-256", "e4m3fn", lens=(6000, 5377, 700), topk=40, page_size=256, query_len=1),
    ContextCase("topk-1", lens=(2500, 129), topk=1, query_len=1),
    ContextCase("block-zero-htk", lens=(0, 300, 2500), empty_row="block_zero", out_layout="htk", order="local_last"),
    ContextCase("q8", "nvfp4", lens=(2500, 7, 641), rounding="exact", query_len=8, order="local_last"),
    *[ContextCase(f"q{length}", lens=(700, 5), query_len=length) for length in (4, 5, 6, 7)],
    ContextCase("short", lens=(1, 128, 129, 640), query_len=1),  # ranks with no, one or two blocks
    ContextCase("special-bf16", data="special", query_len=3),
    ContextCase("special-e4m3fn", "e4m3fn", data="special", query_len=3),
    ContextCase("special-nvfp4", "nvfp4", data="special", rounding="exact", query_len=3),
]  # fmt: skip

# pages of both sizes, every number of rows that a rank stores; lengths around the edges of rows, blocks and pages
EDGES = (2500, 641, 0, 16, 33, 129, 193, 257)
SHARDED = [
    ContextCase(f"sharded-{dtype}-{rounding}-{order}-p{page}", dtype, lens=EDGES, order=order, rounding=rounding,
                page_size=page, local_blocks=local, sharded=True)
    # without a forced block the own one is scored by the ranks that store visible tokens of it
    for dtype, rounding in CACHES for order, page, local in (("score", 128, 0), ("local_last", 256, 1))
] + [
    ContextCase("sharded-init-and-local", lens=(2500, 640, 130, 257), init_blocks=2, local_blocks=3, query_len=1,
                sharded=True),
    ContextCase("sharded-no-local-4", "e4m3fn", lens=EDGES, local_blocks=0, query_len=1, page_size=256, sharded=True),
    ContextCase("sharded-no-local-8", "e4m3fn", lens=EDGES, local_blocks=0, query_len=1, page_size=256, sharded=True),
    ContextCase("sharded-no-local-2", "e4m3fn", lens=EDGES, local_blocks=0, query_len=1, page_size=256, sharded=True),
    ContextCase("sharded-topk-40", "e4m3fn", lens=(6000, 5377, 700), topk=40, page_size=256, query_len=1, sharded=True),
    ContextCase("sharded-topk-1", lens=(2500, 129), topk=1, query_len=1, sharded=True),
    ContextCase("sharded-block-zero-htk", lens=(0, 300, 2500), empty_row="block_zero", out_layout="htk",
                order="local_last", sharded=True),
    ContextCase("sharded-q8", "nvfp4", lens=(2500, 7, 641), rounding="exact", query_len=8, sharded=True),
    ContextCase("sharded-ascending-q5", "nvfp4", lens=(2500, 259), rounding="e4m3", query_len=5, order="ascending",
                page_size=256, sharded=True),
    ContextCase("sharded-length-1", lens=(1, 1, 1), query_len=1, sharded=True),
    ContextCase("sharded-special-bf16", data="special", query_len=3, sharded=True),
    ContextCase("sharded-special-e4m3fn", "e4m3fn", data="special", query_len=3, page_size=256, sharded=True),
    ContextCase("sharded-special-nvfp4", "nvfp4", data="special", rounding="exact", query_len=3, sharded=True),
    # the number of ranks is that of the place in the list
    ContextCase("sharded-by-parts-4", "bf16", lens=EDGES, page_size=256, sharded=True, shard_scorer=True),
    ContextCase("sharded-by-parts-8", "bf16", lens=EDGES, page_size=256, sharded=True, shard_scorer=True),
    ContextCase("sharded-by-parts-2", "bf16", lens=EDGES, page_size=256, sharded=True, shard_scorer=True),
]  # fmt: skip

# every variant of the scorer of parts of blocks, with the number of ranks: 16, 32, 64 and 128 rows a rank
SHARD_SCORERS = [
    (ContextCase(f"parts-{dtype}-{rounding}-c{columns}", dtype, lens=(900, 768, 641), query_len=queries, topk=6,
                 rounding=rounding, page_size=page, local_blocks=0, data="few", sharded=True, shard_scorer=True), size)
    for dtype, rounding in CACHES for columns, queries, page, size in ((16, 1, 128, 4), (32, 5, 256, 4))
] + [
    (ContextCase("parts-bf16-r16", lens=(900, 768, 641), query_len=1, topk=6, local_blocks=0, data="few",
                 sharded=True), 8),
    (ContextCase("parts-nvfp4-r64", "nvfp4", lens=(900, 768, 641), query_len=2, topk=6, rounding="exact",
                 local_blocks=0, data="few", sharded=True, seed=8), 2),
]  # fmt: skip

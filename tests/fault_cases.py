# SPDX-License-Identifier: Apache-2.0
"""Batches and expectations for the faults that users of such indexers reported, computed without the oracle."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import blockpick
import blockpick.plan
from blockpick.testing.reference import insert_reference

NAN, INF = math.nan, math.inf
SENTINEL = -77
DTYPES = ("bf16", "e4m3fn", "nvfp4")


def best(scores: list[float], topk: int = 16, local_blocks: int = 1) -> list[int]:
    """Ids of one row in order ``score`` without init blocks."""
    own = len(scores) - 1
    ids = sorted(
        range(own + 1),
        key=lambda j: (j <= own - local_blocks, 0, 0, j) if j > own - local_blocks
        else (True, math.isnan(scores[j]), 0 if math.isnan(scores[j]) else -scores[j], j),
    )[:topk]  # fmt: skip
    return ids + [-1] * (topk - len(ids))


def maxima(keys: torch.Tensor, query: torch.Tensor, position: int) -> list[float]:
    """Exact block scores up to ``position``, NaN tokens ignored."""
    dots = (keys[: position + 1].double() @ query.double()).tolist()
    return [max((d for d in dots[j : j + 128] if d == d), default=NAN) for j in range(0, len(dots), 128)]


def integers(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """-2..2: exact in every format here (NVFP4 too once a group holds a value of size 2)."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def queries(values: torch.Tensor, dtype: str) -> torch.Tensor:
    return values.to(torch.bfloat16 if dtype == "bf16" else torch.float8_e4m3fn)


def place(layout: blockpick.CacheLayout, keys: list[torch.Tensor], extra: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache with shuffled pages of ``keys``, poisoned elsewhere, and its table with garbage tails."""
    generator = torch.Generator().manual_seed(7)
    counts = [-(-len(k) // layout.page_size) for k in keys]
    cache = layout.empty(sum(counts) + 2, "cpu")
    cache.fill_(0x7F if layout.dtype == "nvfp4" else NAN)
    pages = torch.randperm(sum(counts) + 2, generator=generator)
    table = torch.randint(-(2**31), 2**31 - 1, (len(keys), max(counts) + extra), generator=generator).int()
    for b, k in enumerate(keys):
        mine, pages = pages[: counts[b]], pages[counts[b] :]
        table[b, : counts[b]] = mine.int()
        token = torch.arange(len(k))
        insert_reference(
            layout, cache, k.bfloat16(), mine[token // layout.page_size] * layout.page_size + token % layout.page_size
        )
    return cache, table


class Run:
    """An indexer over one cache: ids [T][H][topk] of a decode, and its scores."""

    def __init__(
        self, executor: Any, layout: blockpick.CacheLayout, table: torch.Tensor, query_len: int = 1, **options: Any
    ):
        self.executor, self.table, self.query_len = executor, table.to(executor.device), query_len
        self.layout_of_out = options.get("out_layout", "thk")
        defaults = {
            "max_requests": len(table),
            "max_query_len": query_len,
            "max_seq_len": table.shape[1] * layout.page_size,
        }
        self.indexer = executor.indexer(layout, **{**defaults, **options})
        self.topk = options.get("topk", 16)

    def __call__(self, cache: torch.Tensor, lens: list[int], q: torch.Tensor) -> list[Any]:
        tokens, heads = q.shape[:2]
        shape = (tokens, heads, self.topk) if self.layout_of_out == "thk" else (heads, tokens, self.topk)
        self.out = torch.full(shape, SENTINEL, dtype=torch.int32, device=self.executor.device)
        lengths = torch.tensor(lens, dtype=torch.int32, device=self.executor.device)
        self.plan = self.indexer.plan_decode(self.table, lengths, query_len=self.query_len)
        return self.again(cache.to(self.executor.device), q.to(self.executor.device))

    def again(self, cache: torch.Tensor, q: torch.Tensor) -> list[Any]:
        self.indexer.decode(self.plan, q, cache, self.out)
        return (self.out if self.layout_of_out == "thk" else self.out.transpose(0, 1)).tolist()

    def scores(self) -> torch.Tensor:
        return self.indexer.scores(self.plan).cpu()


def guarded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, int, str]]:
    """Make every buffer of indexers built from now on end in 4 KiB of 0x5A; returns (bytes, used, name) as they come."""
    guards: list[tuple[torch.Tensor, int, str]] = []

    def allocate(sizes: blockpick.plan.SlotSizes, device: torch.device) -> dict[str, torch.Tensor]:
        buffers = {}
        for name, shape, dtype in sizes.shapes:
            used = math.prod(shape) * dtype.itemsize
            raw = torch.zeros(-(-used // 16) * 16 + 4096, dtype=torch.uint8, device=device)
            raw[used:] = 0x5A
            buffers[name] = raw[:used].view(dtype).view(shape)
            guards.append((raw, used, name))
        return buffers

    monkeypatch.setattr(blockpick.plan.SlotSizes, "allocate", allocate)
    return guards


def intact(guards: list[tuple[torch.Tensor, int, str]]) -> None:
    for raw, used, name in guards:
        assert bool((raw[used:] == 0x5A).all()), f"written past the end of {name}"

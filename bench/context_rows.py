# SPDX-License-Identifier: Apache-2.0
"""Rows of context-parallel decode: one rank's chain, timed alone on one GPU beside the replicated op.

Ranks are simulated: the words of all peers are there before the chain starts, so a wait is one look. NVLink and the
skew of ranks are not in these times.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from measure import graph_us
from rows import POOL_BYTES, ROTATIONS, TOPK, filled_cache

import blockpick
from blockpick.ops.context_pick import ContextPick
from blockpick.testing.simulated import decode_in_phases, simulated_groups

TOTAL_HEADS = 4


def context_rows(cases: dict[str, Any], wanted: str, ceiling: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Every cache, group size, query length and batch of the case file."""
    spec = cases["context"]
    for dtype, rounding in spec["caches"]:
        layout, cache = blockpick.CacheLayout(dtype), None
        for size in spec["sizes"]:
            for query_len in spec["query_lens"]:
                for label, groups in spec["batches"].items():
                    name = f"context {dtype} {rounding} CP{size} L{query_len} {label}"
                    if wanted not in name:
                        continue
                    if cache is None:
                        cache = filled_cache(layout, POOL_BYTES // layout.page_bytes)
                    lens = [tokens for count, tokens in groups for _ in range(count)]
                    yield context_row(name, label, layout, cache, lens, size, query_len, rounding)
        del cache
        torch.cuda.empty_cache()


def batch_of(cache: torch.Tensor, lens: list[int]) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Block table, lengths, and shifted views of the cache that keep a small batch out of the L2."""
    blocks = -(-max(lens) // 128)
    half = len(cache) // 2
    small = blocks * len(lens) < half
    pages = torch.randperm(half if small else len(cache), device="cuda", dtype=torch.int32)
    table = pages[torch.arange(blocks * len(lens), device="cuda") % len(pages)].view(len(lens), blocks)
    views = [cache[shift * (half // ROTATIONS) :][:half] for shift in range(ROTATIONS)] if small else [cache]
    return table, torch.tensor(lens, dtype=torch.int32, device="cuda"), views


def context_row(
    name: str, label: str, layout: blockpick.CacheLayout, cache: torch.Tensor, lens: list[int], size: int,
    query_len: int, rounding: str,
) -> dict[str, Any]:  # fmt: skip
    """Time rank 0's chain and the replicated op of its heads, after a check of all ranks' ids."""
    options: dict[str, Any] = {
        "max_query_len": query_len, "max_requests": len(lens), "max_seq_len": max(lens), "order": "local_last",
        "nvfp4_rounding": None if rounding == "none" else rounding,
    }  # fmt: skip
    heads = max(TOTAL_HEADS // size, 1)
    table, seq_lens, views = batch_of(cache, lens)
    q = torch.randn(len(lens) * query_len, TOTAL_HEADS, 128, device="cuda").to(layout.query_dtype)
    indexers = [
        blockpick.Indexer(layout, num_heads=heads, parallel="context", group=group, **options)
        for group in simulated_groups(size, "cuda:0")
    ]
    plans = [indexer.plan_decode(table, seq_lens, query_len=query_len) for indexer in indexers]
    firsts = [indexer._engine.share.first_head(rank) for rank, indexer in enumerate(indexers)]
    queries = [q[:, first : first + heads].contiguous() for first in firsts]
    outs = [torch.empty(len(q), heads, TOPK, dtype=torch.int32, device="cuda") for _ in indexers]
    decode_in_phases(indexers, plans, queries, views[0], outs)
    alone = blockpick.Indexer(layout, num_heads=heads, **options)
    plan = alone.plan_decode(table, seq_lens, query_len=query_len)
    expected = torch.empty_like(outs[0])
    exact = all(
        torch.equal(out, alone.decode(plan, own, views[0], expected)) for out, own in zip(outs, queries, strict=True)
    )
    replicated, _ = graph_us([lambda v=v: alone.decode(plan, queries[0], v, expected) for v in views] * repeats(views))
    chain = frozen_chain(indexers[0], plans[0], queries[0], outs[0])
    median, p90 = graph_us([lambda v=v: chain(v) for v in views] * repeats(views))
    parts = parts_us(indexers[0], plans[0], queries[0], views)
    line = (
        f"context_{layout.dtype}_{rounding}_cp{size:<3d} {label:20s} H={heads} L={query_len} {median:8.1f} us "
        f"(p90 {p90:.0f})  {median / replicated:5.2f}x of replicated {replicated:.1f} us  "
        + "  ".join(f"{part} {us:.1f}" for part, us in parts.items())
        + f"  {'exact' if exact else 'WRONG'}"
    )
    return {
        "name": name, "us": median, "p90_us": p90, "replicated_us": replicated, "ratio": median / replicated,
        "parts_us": parts, "exact": exact, "line": line,
    }  # fmt: skip


def repeats(views: list[torch.Tensor]) -> int:
    """Rounds over the views that make a graph of eight calls or more."""
    return max(1, 8 // len(views))


def frozen_chain(indexer: blockpick.Indexer, plan: Any, q: torch.Tensor, out: torch.Tensor) -> Any:
    """The chain of one rank whose epoch stands still, so that the peers' words are always there."""
    engine = indexer._engine
    context = engine.context
    epochs = engine.context_buffers["epochs"]
    kept = epochs.clone()
    kept[0] = kept[1]
    ending = ContextPick(
        engine.context_kernels, engine.context_sizes, engine._compute_units,
        {**engine.context_buffers, "epochs": kept.clone()}, engine.group, engine._exchange.addresses, engine._bind,
    )  # fmt: skip
    ending._buffers["epochs"].copy_(kept)
    epochs.copy_(kept)

    def run(cache: torch.Tensor) -> None:
        context.exchange(plan, q)
        context.score(plan, cache)
        context.push(plan, q.device)
        ending.merge(plan, out)

    return run


def parts_us(indexer: blockpick.Indexer, plan: Any, q: torch.Tensor, views: list[torch.Tensor]) -> dict[str, float]:
    """Parts of the chain in graphs of their own; with their overlap gone they add up to more than the chain."""
    context = indexer._engine.context
    rounds = repeats(views)
    return {
        "exchange": graph_us([lambda: context.exchange(plan, q)] * 8)[0],
        "score": graph_us([lambda v=v: context.score(plan, v) for v in views] * rounds)[0],
        "push": graph_us([lambda: context.push(plan, q.device)] * 8)[0],
    }

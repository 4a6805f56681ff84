# SPDX-License-Identifier: Apache-2.0
"""How often decode and prefill pick other blocks for the same queries: they are two ops whose scores differ within the
tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from rows import TOPK

import blockpick

REQUESTS, QUERIES = 64, 8


def agreement_rows(cases: dict[str, Any], wanted: str, ceiling: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Every cache and arithmetic of prefill: rows that differ from decode's in their blocks or the blocks' order."""
    context = cases["agreement"]["context"]
    for dtype, rounding, numerics in cases["prefill"]["caches"]:
        name = f"agreement {dtype} {rounding} {numerics}"
        if wanted not in name:
            continue
        torch.manual_seed(11)
        layout = blockpick.CacheLayout(dtype)
        pages = context // 128
        cache = layout.empty(REQUESTS * pages, "cuda")
        keys = torch.randn(len(cache) * 128, 128, device="cuda").bfloat16()
        blockpick.insert(layout, cache, keys, torch.arange(len(keys), device="cuda"))
        table = torch.randperm(REQUESTS * pages, device="cuda").int().view(REQUESTS, pages)
        lens = torch.full((REQUESTS,), context, dtype=torch.int32, device="cuda")
        heads = 4
        q = torch.randn(REQUESTS * QUERIES, heads, 128, device="cuda").to(layout.query_dtype)
        indexer = blockpick.Indexer(
            layout, num_heads=heads, max_requests=REQUESTS, max_query_len=QUERIES, max_seq_len=context,
            max_prefill_tokens=len(q), nvfp4_rounding=None if rounding == "none" else rounding,
            prefill_numerics=numerics,
        )  # fmt: skip
        decoded, prefilled = (torch.empty(len(q), heads, TOPK, dtype=torch.int32, device="cuda") for _ in range(2))
        indexer.decode(indexer.plan_decode(table, lens, query_len=QUERIES), q, cache, decoded)
        starts = torch.arange(0, len(q) + 1, QUERIES, dtype=torch.int32, device="cuda")
        indexer.prefill(indexer.plan_prefill(starts, lens, table, num_tokens=len(q)), q, cache, prefilled)
        order = (decoded != prefilled).any(-1)
        sets = (decoded.sort(-1).values != prefilled.sort(-1).values).any(-1)
        rows, percent = order.numel(), 100 * float(sets.float().mean())
        line = (
            f"{name:48s} {rows} rows of {pages} blocks: {int(sets.sum())} ({percent:.2f}%) pick another set, "
            f"{int(order.sum())} another set or order"
        )
        yield {"name": name, "rows": rows, "other_set": int(sets.sum()), "other_order": int(order.sum()), "line": line}
        del cache, keys
        torch.cuda.empty_cache()

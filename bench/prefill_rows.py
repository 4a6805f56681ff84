# SPDX-License-Identifier: Apache-2.0
"""Rows of prefill_pick: scores and selection of one layer, checked first, then timed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from measure import graph_us
from rows import POOL_BYTES, TOPK, filled_cache

import blockpick
from blockpick.testing.reference import block_scores, select_blocks

SAMPLED = 3  # queries of every request that are compared with the reference
SCORED_BLOCKS = 64  # of their blocks in float64


def prefill_rows(cases: dict[str, Any], wanted: str, ceiling: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Every cache, arithmetic, number of heads and batch of the case file."""
    for dtype, rounding, numerics in cases["prefill"]["caches"]:
        layout, cache = blockpick.CacheLayout(dtype), None
        for heads, (label, requests) in itertools.product(
            cases["prefill"]["heads"], cases["prefill"]["batches"].items()
        ):
            name = f"prefill {dtype} {rounding} {numerics} H{heads} {label}"
            if wanted not in name:
                continue
            if cache is None:
                cache = filled_cache(layout, POOL_BYTES // layout.page_bytes)
            indexer = blockpick.Indexer(
                layout, num_heads=heads, max_requests=len(requests), max_seq_len=max(map(sum, requests)),
                max_prefill_tokens=sum(new for new, _ in requests), workspace_bytes=1 << 30, order="local_last",
                nvfp4_rounding=None if rounding == "none" else rounding, prefill_numerics=numerics,
            )  # fmt: skip
            yield prefill_row(name, label, indexer, cache, requests, ceiling)
        del cache
        torch.cuda.empty_cache()


def prefill_row(
    name: str, label: str, indexer: blockpick.Indexer, cache: torch.Tensor, requests: list[list[int]],
    ceiling: dict[str, float],
) -> dict[str, Any]:  # fmt: skip
    """Time one prefill configuration."""
    config, heads = indexer.config, indexer.config.num_heads
    blocks = [-(-(new + prefix) // 128) for new, prefix in requests]
    pages = torch.randperm(len(cache), dtype=torch.int32, device="cuda")
    table = torch.zeros(len(requests), max(blocks), dtype=torch.int32, device="cuda")
    first = 0
    for b, count in enumerate(blocks):
        table[b, :count] = pages[torch.arange(first, first + count, device="cuda") % len(pages)]
        first += count
    tokens = config.max_prefill_tokens
    q = torch.randn(tokens, heads, 128, device="cuda").to(config.layout.query_dtype)
    out = torch.empty(tokens, heads, TOPK, dtype=torch.int32, device="cuda")
    starts = torch.tensor([0, *(new for new, _ in requests)], device="cuda").cumsum(0).int()
    lens = torch.tensor([new + prefix for new, prefix in requests], dtype=torch.int32, device="cuda")
    plan = indexer.plan_prefill(starts, lens, table, num_tokens=tokens)
    indexer.prefill(plan, q, cache, out)
    exact = is_exact(indexer, plan, requests, starts.tolist(), table, cache, q, out)
    median, p90 = graph_us([lambda: indexer.prefill(plan, q, cache, out)] * 2)
    pairs = sum(new * prefix + new * (new + 1) // 2 for new, prefix in requests)
    tflops = 2 * 128 * heads * pairs / median / 1e6
    (variant,) = [c.variant for c in indexer.choices if c.role == "prefill_score"]
    line = (
        f"{variant.name:48s} {label:20s} H={heads}     {median:8.1f} us (p90 {p90:.0f})  {tflops:6.0f} TFLOP/s  "
        f"{plan.num_passes} passes  {'exact' if exact else 'WRONG'}"
    )
    return {"name": name, "us": median, "p90_us": p90, "tflop_s": tflops, "variant": variant.name, "exact": exact,
            "numerics": indexer.prefill_numerics, "line": line}  # fmt: skip


def is_exact(
    indexer: blockpick.Indexer, plan: blockpick.PrefillPlan, requests: list[list[int]], starts: list[int],
    table: torch.Tensor, cache: torch.Tensor, q: torch.Tensor, out: torch.Tensor,
) -> bool:  # fmt: skip
    """A sample: ids of some queries of every request on the run's own scores, their first scores against float64."""
    scores = indexer.prefill_scores(plan)  # of the last pass
    before = plan.num_tokens - len(scores)
    tolerance = 2e-3 if indexer.prefill_numerics == "fp8" else 1e-5
    for b, (new, prefix) in enumerate(requests):
        for i in sorted({0, new // 2, new - 1})[:SAMPLED]:
            token, position = starts[b] + i, prefix + i
            if token < before or position // 128 < TOPK:
                continue
            seen = min(position // 128, SCORED_BLOCKS)  # whole blocks
            lens = torch.tensor([seen * 128], dtype=torch.int32, device="cuda")
            oracle = block_scores(
                indexer.config.layout, cache, q[token : token + 1], table[b : b + 1, :seen], lens, 1,
                indexer.nvfp4_rounding,
            )[0, 0]  # fmt: skip
            mine = scores[token - before, :, :seen].double()
            if float((mine - oracle).abs().max()) > tolerance * float(oracle.abs().max()):
                return False
            for h in range(indexer.config.num_heads):
                expected = select_blocks(scores[token - before, h], position, TOPK, 0, 1, "local_last", "minus_one")
                if out[token, h].tolist() != expected:
                    return False
    return True

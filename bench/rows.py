# SPDX-License-Identifier: Apache-2.0
"""Rows of the benchmark: each is checked for correctness first, then timed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from measure import graph_us, host_us

import blockpick
from blockpick.testing.reference import block_scores, insert_reference, query_positions, select_blocks

POOL_BYTES = 4 << 30  # the page pool: many times the L2
TOPK = 16
ROTATIONS = 8


def filled_cache(layout: blockpick.CacheLayout, pages: int) -> torch.Tensor:
    """A pool of random finite keys, made on the GPU from 512 distinct pages."""
    distinct = min(pages, 512)
    cache = layout.empty(pages, "cuda")
    keys = torch.randn(distinct * layout.page_size, 128, device="cuda").bfloat16()
    blockpick.insert(layout, cache, keys, torch.arange(len(keys), device="cuda"))
    data = cache.view(torch.uint8).view(pages, -1)
    for first in range(distinct, pages, distinct):
        count = min(distinct, pages - first)
        data[first : first + count] = data[:count]
    return cache


def is_exact(indexer: blockpick.Indexer, plan: blockpick.DecodePlan, batch: dict[str, torch.Tensor]) -> bool:
    """Check a sample: ids of the first and last request on the run's own scores, scores against float64."""
    query_len, heads = plan.query_len, indexer.config.num_heads
    scores = indexer.scores(plan)
    out = batch["out"].view(plan.num_requests, query_len, heads, TOPK).cpu()
    for b in {0, plan.num_requests - 1}:
        table, lens = batch["table"][b : b + 1], batch["lens"][b : b + 1]
        positions = query_positions(lens, query_len, table.shape[1] * 128)
        last = min(int(lens[0]), 64 * 128)  # float64 over the first 64 blocks is enough for a sample
        q = batch["q"][b * query_len : (b + 1) * query_len]
        oracle = block_scores(
            indexer.config.layout, batch["cache"], q, table[:, :64], torch.full_like(lens, last), query_len,
            indexer.nvfp4_rounding,
        )  # fmt: skip
        blocks = max(last // 128 - 1, 1)
        want, got = oracle[0, :, :, :blocks], scores[b, :, :, :blocks].double()
        visible = ~want.isnan()
        if int(lens[0]) > TOPK * 128 and not torch.allclose(got[visible], want[visible], rtol=1e-5, atol=1e-3):
            return False
        for i in range(query_len):
            for h in range(heads):
                expected = select_blocks(scores[b, i, h], int(positions[0, i]), TOPK, 0, 1, "local_last", "minus_one")
                if int(lens[0]) > TOPK * 128 and out[b, i, h].tolist() != expected:
                    return False
    return True


def decode_rows(cases: dict[str, Any], wanted: str, ceiling: dict[str, float]) -> Iterator[dict[str, Any]]:
    """decode_pick: score and selection of one layer, in a graph chain over rotating page tables."""
    for dtype, rounding in cases["decode"]["caches"]:
        layout = blockpick.CacheLayout(dtype)
        pages = POOL_BYTES // layout.page_bytes
        cache = None
        for heads, query_len in cases["decode"]["heads_queries"]:
            for label, groups in cases["decode"]["batches"].items():
                name = f"decode {dtype} {rounding} H{heads} L{query_len} {label}"
                if wanted not in name:
                    continue
                if cache is None:
                    cache = filled_cache(layout, pages)
                lens = [tokens for count, tokens in groups for _ in range(count)]
                yield decode_row(name, layout, cache, lens, heads, query_len, rounding, label, ceiling)
        del cache
        torch.cuda.empty_cache()


def decode_row(
    name: str, layout: blockpick.CacheLayout, cache: torch.Tensor, lens: list[int], heads: int, query_len: int,
    rounding: str, label: str, ceiling: dict[str, float],
) -> dict[str, Any]:  # fmt: skip
    """Time one decode configuration."""
    indexer = blockpick.Indexer(
        layout, num_heads=heads, max_query_len=query_len, max_requests=len(lens), max_seq_len=max(lens),
        order="local_last", nvfp4_rounding=None if rounding == "none" else rounding,
    )  # fmt: skip
    blocks = [-(-length // 128) for length in lens]
    width = max(blocks)
    scored = sum(count for count in blocks if count > TOPK)
    q = torch.randn(len(lens) * query_len, heads, 128, device="cuda").to(layout.query_dtype)
    out = torch.empty(len(lens) * query_len, heads, TOPK, dtype=torch.int32, device="cuda")
    table = torch.zeros(len(lens), width, dtype=torch.int32, device="cuda")
    # a small batch would stay in the L2: rotate its pages over the pool by shifted views of the cache
    half = len(cache) // 2
    small = scored < half
    pages = torch.randperm(half if small else len(cache), device="cuda", dtype=torch.int32)
    first = 0
    for b, count in enumerate(blocks):
        table[b, :count] = pages[torch.arange(first, first + count, device="cuda") % len(pages)]
        first += count
    batch = {"cache": cache, "q": q, "table": table, "lens": torch.tensor(lens, dtype=torch.int32, device="cuda")}
    plan = indexer.plan_decode(table, batch["lens"], query_len=query_len)
    batch["out"] = indexer.decode(plan, q, cache, out)
    exact = is_exact(indexer, plan, batch)
    span = layout.page_bytes * scored
    views = [cache[shift * (half // ROTATIONS) :][:half] for shift in range(ROTATIONS)] if small else [cache]
    median, p90 = graph_us(
        [lambda view=view: indexer.decode(plan, q, view, out) for view in views] * max(1, 8 // len(views))
    )
    tb_s = span / median / 1e6
    scorers = [c.variant for c in indexer.choices if c.role == "decode_score"]
    wide_enough = [scorer for scorer in scorers if scorer.axes["columns"] >= heads * query_len]
    variant = min(wide_enough, key=lambda scorer: scorer.axes["columns"]).name
    share = f"{100 * tb_s / ceiling['read_tb_s']:3.0f}% of {ceiling['read_tb_s']:.2f} measured"
    line = (
        f"{variant:48s} {label:20s} H={heads} L={query_len} {median:8.1f} us (p90 {p90:.0f})  {tb_s:5.2f} TB/s  "
        f"{share}  {'exact' if exact else 'WRONG'}"
    )
    return {"name": name, "us": median, "p90_us": p90, "tb_s": tb_s, "variant": variant, "exact": exact, "line": line}


def insert_rows(cases: dict[str, Any], wanted: str, ceiling: dict[str, float]) -> Iterator[dict[str, Any]]:
    """insert: quantise and store."""
    for dtype in ("bf16", "e4m3fn", "nvfp4"):
        layout = blockpick.CacheLayout(dtype)
        for tokens in cases["insert"]["tokens"]:
            name = f"insert {dtype} T{tokens}"
            if wanted not in name:
                continue
            cache = layout.empty(tokens // 128 * 4, "cuda")
            keys = torch.randn(tokens, 128, device="cuda").bfloat16()
            slots = [torch.randperm(len(cache) * 128, device="cuda")[:tokens] for _ in range(4)]
            cache.view(torch.uint8).zero_()
            blockpick.insert(layout, cache, keys, slots[0])
            sample = slots[0][:64]
            expected = torch.zeros_like(cache)
            insert_reference(layout, expected, keys[:64], sample)
            only = torch.zeros_like(cache)
            blockpick.insert(layout, only, keys[:64], sample.contiguous())
            exact = torch.equal(only.view(torch.uint8), expected.view(torch.uint8))
            calls = [lambda s=s, k=keys, c=cache, y=layout: blockpick.insert(y, c, k, s) for s in slots]
            median, p90 = graph_us(calls)
            moved = tokens * (256 + layout.page_bytes // layout.page_rows + 8)
            tb_s = moved / median / 1e6
            share = f"{100 * tb_s / ceiling['copy_tb_s']:3.0f}% of {ceiling['copy_tb_s']:.2f} copy"
            line = (
                f"insert__{dtype:39s} {f'T={tokens}':20s} {'':7s} {median:8.1f} us (p90 {p90:.0f})  {tb_s:5.2f} TB/s  "
                f"{share}      {'exact' if exact else 'WRONG'}"
            )
            yield {"name": name, "us": median, "p90_us": p90, "tb_s": tb_s, "exact": exact, "line": line}


def host_rows(cases: dict[str, Any], wanted: str, ceiling: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Host time of one launch, of an eager decode (two launches), and of the torch op."""
    layout = blockpick.CacheLayout("nvfp4")
    indexer = blockpick.Indexer(layout, max_requests=1, max_seq_len=2560)
    cache = layout.empty(20, "cuda")
    cache.zero_()
    table = torch.arange(20, dtype=torch.int32, device="cuda").view(1, 20)
    plan = indexer.plan_decode(table, torch.tensor([2500], dtype=torch.int32, device="cuda"), query_len=1)
    q = torch.zeros(1, 1, 128, device="cuda").to(torch.float8_e4m3fn)
    out = torch.empty(1, 1, TOPK, dtype=torch.int32, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    launch = indexer._engine.decodes[0].launches[0][2]  # type: ignore[attr-defined]
    handle = indexer.handle()
    calls = {
        "one launch through the driver API": lambda: launch(1, stream, out, TOPK, TOPK, 1),
        "eager decode, two launches": lambda: indexer.decode(plan, q, cache, out),
        "torch.ops.blockpick.decode_pick": lambda: torch.ops.blockpick.decode_pick(q, cache, out, handle),
    }
    for label, call in calls.items():
        if wanted in f"host {label}":
            call()
            median = host_us(call)
            yield {"name": f"host {label}", "us": median, "line": f"host: {label:50s} {median:8.2f} us"}

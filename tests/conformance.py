# SPDX-License-Identifier: Apache-2.0
"""The decode cases that every variant of every architecture must pass, however it is executed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from sparse_cases import check_rows, sparse_table

from blockpick import Indexer
from blockpick.testing.cases import SENTINEL, DecodeBatch, DecodeCase, expect, sentinel_output
from blockpick.testing.prefill_cases import PrefillCase
from blockpick.testing.reference import select_blocks

CACHES = [("bf16", None), ("e4m3fn", None), ("nvfp4", "exact"), ("nvfp4", "e4m3")]
# three requests: more than topk blocks with a partial last block, exactly full pages, one token in the last block
LENS = (2500, 2304, 641)

ORDERS = ("score", "ascending", "local_last")
SHAPES = {"c16": (2, 3), "c32": (4, 5)}  # columns of the scorer: heads, queries

CONFORMANCE = [
    DecodeCase(f"{dtype}-{rounding}-{columns}-{order}", dtype, LENS, num_heads=heads, query_len=queries, order=order,
               page_size=256 if order == "local_last" else 128, rounding=rounding, data="integer")
    for dtype, rounding in CACHES for columns, (heads, queries) in SHAPES.items() for order in ORDERS
] + [
    # queries that see different blocks of short requests: the mask matters inside the scorer's loop
    DecodeCase(f"{dtype}-{rounding}-q8", dtype, (2500, 1, 7, 641, 135, 0), page_size=256, query_len=8, rounding=rounding,
               data="integer")
    for dtype, rounding in CACHES
]  # fmt: skip

# a row of two splits, scored: both capacities of select and merge (what is particular to these: SELECTIONS, on every target)
SPLITS = [
    DecodeCase(f"splits-k{topk}-{order}", "e4m3fn", (2050 * 128 - 5, 2304, 700), topk=topk, order=order, data="integer")
    for topk, order in ((16, "score"), (40, "local_last"))
]

# (queries, prefix): one block, many tiles' worth of keys, no query at all, a first query in an older block than the last
REQUESTS = ((5, 0), (9, 2400), (0, 500), (1, 2303), (4, 2430))
PREFILLS = [
    PrefillCase(f"prefill-{dtype}-{rounding}-{numerics}-{order}", dtype, REQUESTS, num_heads=heads, order=order,
                local_blocks=local, page_size=page, rounding=rounding, numerics=numerics, padding=3, data="integer")
    for dtype, rounding in CACHES
    for numerics in ((None, "strict") if dtype == "e4m3fn" or rounding == "e4m3" else (None,))  # the default, and both
    for order, heads, local, page in (("score", 2, 0, 256), ("local_last", 4, 1, 128))
]  # fmt: skip

# the same with half as many blocks and queries, for executors that are slow enough to make them count
SHORT_REQUESTS, SHORT_TOPK = ((2, 0), (3, 1120), (0, 500), (1, 1151), (2, 1151)), 7
SHORT_PREFILLS = [replace(case, requests=SHORT_REQUESTS, topk=SHORT_TOPK) for case in PREFILLS]

# more requests than one step of the plan's scan takes, some of them long, most without need of scores for topk 3
MANY_REQUESTS = ((300, 1140), (0, 5), (2, 2300), (3, 126), *[(2, 200)] * 290, (70, 1000))

# rows of one, two and three splits of 2048 blocks: what only selection and merge see, on scores given by the test
SELECTIONS = [
    DecodeCase(f"selection-k{topk}-{order}", "e4m3fn", lens, topk=topk, order=order, local_blocks=local, init_blocks=init)
    for topk, order, local, init, lens in (
        (16, "score", 1, 0, (20_000 * 128 - 5, 2304, 4097 * 128 - 1, 2200 * 128)),
        (12, "ascending", 2, 1, (2050 * 128 - 5, 700, 2304, 0, 3000 * 128)),
        (16, "local_last", 1, 0, (2300 * 128 - 1, 2304, 17 * 128, 641, 2100 * 128 + 1)),
        (3, "score", 0, 0, (2500, 2304, 130, 2060 * 128, 5000 * 128)),
        (64, "score", 0, 0, (2048 * 128, 2049 * 128 - 77, 9000 * 128)),
        (40, "local_last", 1, 0, (4100 * 128 - 9, 2304, 700)),
    )
]  # fmt: skip


def check_plan(indexer: Indexer) -> None:
    """The plan's work list for lengths of every kind, against the definition."""
    lens = [40_000, 0, 129, -5, 2304, 1 << 30, 70_001]
    width, bpp, units = 640, indexer.config.layout.blocks_per_page, indexer._engine.decodes[0].units[0]
    table = torch.arange(len(lens) * width, dtype=torch.int32).reshape(len(lens), width).flip(1)
    device = indexer.device
    indexer.plan_decode(table.to(device), torch.tensor(lens, dtype=torch.int32, device=device), query_len=1)
    buffers = indexer._engine.buffers[0]
    wanted, starts = [], []
    for request, length in enumerate(lens):
        starts.append(len(wanted))
        count = -(-min(max(length, 0), width * bpp * 128) // 128)
        wanted += [int(table[request, j // bpp]) * bpp + j % bpp for j in range(count)]
    starts.append(len(wanted))
    expect(buffers["header"][:3].tolist() == [len(wanted), len(lens), 1], "header")
    expect(buffers["offsets"][: len(starts)].tolist() == starts, "offsets")
    expect(buffers["blocks"][: len(wanted)].tolist() == wanted, "blocks")
    positions = [min(max(n, 0), width * bpp * 128) - 1 for n in lens]
    expect(buffers["positions"][: len(lens)].tolist() == positions, "positions")
    first = [max(r for r in range(len(lens)) if starts[r] <= u * len(wanted) // units) for u in range(units)]
    expect(buffers["unit_request"][:units].tolist() == first, "unit_request")


def check_prefill_plan(machine: Any, case: PrefillCase) -> None:
    """A prefill plan's positions and work items, against the definition: every (query, block) pair that needs a score
    lies in exactly one item, pieces are whole groups of four blocks, of the length whose items end first, and nothing
    but the plan is written.
    """
    indexer = machine.indexer(case.layout(), **case.options())
    query_lens = torch.tensor([0, *(query_len for query_len, _ in case.requests)])
    lens = torch.tensor([sum(request) for request in case.requests], dtype=torch.int32)
    table = torch.zeros(len(lens), case.width, dtype=torch.int32)
    metadata = [tensor.to(machine.device) for tensor in (query_lens.cumsum(0).int(), lens, table)]
    slot, num_tokens = indexer._engine.buffers[0], case.num_tokens
    for name in ("prefill_positions", "spans", "prefill_header"):
        slot[name].fill_(SENTINEL)
    plan = indexer.plan_prefill(*metadata, num_tokens=num_tokens)
    expect(slot["prefill_header"][1:3].tolist() == [num_tokens, 0], "header")
    positions = [prefix + i for query_len, prefix in case.requests for i in range(query_len)] + [-2] * case.padding
    expect(slot["prefill_positions"][:num_tokens].tolist() == positions, "positions")
    expect(bool((slot["prefill_positions"][num_tokens:] == SENTINEL).all()), "positions beyond the batch")
    entries = (len(case.requests) + 1) * 4
    spans = slot["spans"].reshape(-1)[: plan.num_passes * entries].view(plan.num_passes, -1, 4).tolist()
    expect(bool((slot["spans"].reshape(-1)[plan.num_passes * entries :] == SENTINEL).all()), "spans beyond the batch")
    kernels = indexer._engine.prefill_kernels
    tile, launch = kernels.tile_tokens(case.num_heads), kernels.plan.variant.launch
    for index, (*requests, (items, piece, *_)) in enumerate(spans):
        start, stop = index * plan.pass_tokens, min((index + 1) * plan.pass_tokens, num_tokens)
        item = begin = 0
        work = []
        for (query_len, prefix), span in zip(case.requests, requests, strict=True):
            first, last = (min(max(token, start), stop) for token in (begin, begin + query_len))
            begin += query_len
            visible = (prefix + query_len - (begin - last) + 127) // 128
            needed = last > first and visible > indexer.config.unscored_blocks
            tiles = -(-(last - first) // tile) if needed else 0
            expect(span == [item, tiles, first, last - first], f"pass {index}: span {span} at item {item}")
            item += tiles * -(-visible // piece)
            work.append((tiles, visible))
        expect(items == item, f"pass {index}: {items} items, wanted {item}")
        units, total = indexer._engine.prefills[0]._units, sum(tiles * visible for tiles, visible in work)
        lengths = [max(-(-total // (units * m * 4)), 1) * 4 for m in range(1, launch["rounds"] + 1)]
        ends = [-(-sum(t * -(-v // n) for t, v in work) // units) * (n + launch["item_blocks"]) for n in lengths]
        wanted = lengths[ends.index(min(ends))]
        expect(piece == wanted, f"pass {index}: pieces of {piece} blocks, those of {wanted} end first")


def check_other_shape(indexer: Indexer, batch: DecodeBatch, query_len: int) -> None:
    """What a graph replay does after a wrong plan: the old launch over the new plan reads nothing and emits pads."""
    heads, topk = indexer.config.num_heads, indexer.config.topk
    captured = indexer.plan_decode(batch.block_table[:1], batch.seq_lens[:1], query_len=query_len)
    for requests, other in ((3, query_len), (1, 1), (2, 1)):
        indexer.plan_decode(batch.block_table[:requests], batch.seq_lens[:requests], query_len=other)
        before = indexer._engine.buffers[0]["scores"].clone()
        out = torch.full((query_len + 2, heads, topk), SENTINEL, dtype=torch.int32, device=batch.out.device)
        indexer._engine.decode(captured, batch.q[:query_len], batch.cache, out)
        expect(out[:query_len].unique().tolist() == [-1], f"rows after a plan of {requests} requests, {other} queries")
        expect(out[query_len:].unique().tolist() == [SENTINEL], "rows beyond the launch")
        same = torch.equal(indexer._engine.buffers[0]["scores"].view(torch.int32), before.view(torch.int32))
        expect(same, "a scorer wrote over a plan of another shape")


def check_selection(case: DecodeCase, indexer: Indexer) -> None:
    """Select and merge without a scorer, on scores with NaN, all different in the first row and tying in the others: ids
    equal the oracle's, and a sparse table changes none and holds their pages.
    """
    engine, requests = indexer._engine, len(case.seq_lens)
    width = case.options()["max_seq_len"] // case.page_size  # type: ignore[operator]
    table = torch.zeros(requests, width, dtype=torch.int32)
    plan = indexer.plan_decode(table, torch.tensor(case.seq_lens, dtype=torch.int32), query_len=1)
    scores = indexer.scores(plan)
    generator = torch.Generator().manual_seed(case.seed)
    values = torch.randint(-40, 41, scores.shape, generator=generator).float()
    values[0] = torch.randn(values[0].shape, generator=generator)
    values[torch.rand(scores.shape, generator=generator) < 0.02] = float("nan")
    split, ties = engine.decode_kernels.selection.split_blocks, 0
    for row, length in enumerate(case.seq_lens):  # more best blocks than topk, in two splits: ids decide
        first, last = split - case.topk + 1, min(split + case.topk, -(-length // 128) - case.local_blocks)
        if last > split and (row > 0 or max(case.seq_lens[1:]) <= split * 128):  # the first row's scores all differ
            values[row, 0, 0, first:last] = 1000.0
            ties += last - first > case.topk - case.init_blocks - case.local_blocks
    expect(ties > 0, f"{case}: no tie across the programs of a row that ids must decide")
    scores.copy_(values)
    out, storage = sentinel_output(requests, case.num_heads, case.topk, case.out_layout)
    options = (case.topk, case.init_blocks, case.local_blocks, case.order, case.empty_row)
    wanted = [select_blocks(values[b, 0, 0], length - 1, *options) for b, length in enumerate(case.seq_lens)]
    sparse = sparse_table(indexer, requests, requests, width, 8)
    for emitted in (None, sparse):
        engine.decodes[0].select(plan, out, emitted)
        for b in range(requests):
            got = out[b, 0].tolist()
            expect(got == wanted[b], f"{case}: request {b}: ids {got}, oracle {wanted[b]}")
        if emitted is not None:
            for b, length in enumerate(case.seq_lens):
                check_rows(sparse, out, b, b, [length - 1])
        out.fill_(SENTINEL)
        expect(bool((storage == SENTINEL).all()), f"{case}: something beyond the output's rows was written")

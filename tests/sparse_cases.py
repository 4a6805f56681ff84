# SPDX-License-Identifier: Apache-2.0
"""Cases of sparse block-table emission, checked against the definition row by row."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from blockpick import CacheLayout, Indexer, SparseTable
from blockpick.testing.cases import DecodeCase, build, expect
from blockpick.testing.prefill_cases import PrefillCase, build_prefill
from blockpick.testing.reference import sparse_row

GUARD = -1234567
# empty, one block, a full page, more than topk blocks; own block among the picked ones and (local_blocks 0) not always
CASES = [
    DecodeCase("own-forced", "e4m3fn", (0, 5, 128, 2500, 2304), query_len=3, num_heads=2, page_size=256, order="local_last"),
    DecodeCase("own-scored", "e4m3fn", (2500, 641, 2304), topk=3, local_blocks=0, num_heads=4, data="integer"),
    DecodeCase("wide", "bf16", (5300, 300, 0), topk=40, init_blocks=1, order="ascending", empty_row="block_zero"),
]  # fmt: skip
PREFILL = PrefillCase("emission", "e4m3fn", ((5, 0), (9, 2400), (0, 7), (3, 300)), num_heads=2, padding=2, local_blocks=0,
                      data="integer")  # fmt: skip


def sparse_table(indexer: Indexer, requests: int, tokens: int, width: int, block_page_stride: int) -> SparseTable:
    """A table of guards; the attention's pages are all different."""
    config, device = indexer.config, indexer.device
    blocks = width * config.layout.blocks_per_page
    attention = torch.randperm(requests * (blocks + 3), generator=torch.Generator().manual_seed(7))
    attention = attention.int().view(requests, -1)[:, :blocks].to(device)  # rows wider than they are used
    rows = tokens * config.num_heads
    table = torch.full((rows, config.topk * 8), GUARD, dtype=torch.int32, device=device)
    lens = torch.full((rows,), GUARD, dtype=torch.int32, device=device)
    return SparseTable(attention, block_page_stride, table, lens)


def check_rows(sparse: SparseTable, ids: torch.Tensor, request: int, first: int, positions: list[int]) -> None:
    """The rows of one request's tokens, from ``first`` on, against the definition on the run's own ids."""
    heads = ids.shape[1]
    attention, table, lens = (t.cpu() for t in (sparse.attention_block_table, sparse.table, sparse.context_lens))
    for token, position in enumerate(positions, first):
        for head in range(heads):
            row_ids = ids[token, head].tolist()
            own = position // 128 if position >= 0 else 0
            expect(max(row_ids) <= own, f"token {token}, head {head}: ids {row_ids} behind block {own}")
            pages, tokens = sparse_row(row_ids, position, attention[request], sparse.block_page_stride)
            row = token * heads + head
            expect(
                table[row].tolist() == pages, f"token {token}, head {head}: pages {table[row].tolist()}, not {pages}"
            )
            expect(int(lens[row]) == tokens, f"token {token}, head {head}: {int(lens[row])} tokens, not {tokens}")


def check_decode_emission(executor: Any, case: DecodeCase, block_page_stride: int) -> None:
    """A decode with its table, two padding rows behind it."""
    batch = build(case).to(executor.device)
    indexer = executor.indexer(case.layout(), **case.options())
    requests, length = len(case.seq_lens), case.query_len
    tokens = requests * length
    sparse = sparse_table(indexer, requests, tokens, batch.block_table.shape[1], block_page_stride)
    plan = indexer.plan_decode(batch.block_table, batch.seq_lens, query_len=length)
    indexer.decode(plan, batch.q, batch.cache, batch.out, sparse_table=sparse)
    for b, seq_len in enumerate(case.seq_lens):
        check_rows(sparse, batch.out.cpu(), b, b * length, [seq_len - length + i for i in range(length)])


def check_prefill_emission(executor: Any, case: PrefillCase, block_page_stride: int) -> None:
    """A prefill with its table; rows of padding keep their guards."""
    batch = build_prefill(case).to(executor.device)
    indexer = executor.indexer(case.layout(), **case.options())
    sparse = sparse_table(indexer, len(case.requests), case.num_tokens, case.width, block_page_stride)
    plan = indexer.plan_prefill(batch.cu_seqlens_q, batch.seq_lens, batch.block_table, num_tokens=case.num_tokens)
    indexer.prefill(plan, batch.q, batch.cache, batch.out, sparse_table=sparse)
    first = 0
    for b, (query_len, prefix) in enumerate(case.requests):
        check_rows(sparse, batch.out.cpu(), b, first, [prefix + i for i in range(query_len)])
        first += query_len
    rows = first * case.num_heads
    expect(sparse.table[rows:].unique().tolist() == [GUARD], "rows of padding were written")
    expect(sparse.context_lens[rows:].unique().tolist() == [GUARD], "lengths of padding were written")


def check_rows_of_several_splits(executor: Any, topk: int) -> None:
    """Rows of one and of several splits, of decode and of prefill, on given scores: the table is that of the ids, which
    are those of a selection without a table.
    """
    lens, options = (2050 * 128 - 5, 700, 4100 * 128 + 1), {"num_heads": 2, "topk": topk, "max_requests": 3}
    indexer = executor.indexer(
        CacheLayout("bf16"), **options, max_seq_len=max(lens), local_blocks=0, max_prefill_tokens=6
    )
    engine, width, device = indexer._engine, -(-max(lens) // 128), indexer.device
    table = torch.zeros(3, width, dtype=torch.int32, device=device)
    seq_lens, starts = (torch.tensor(n, dtype=torch.int32, device=device) for n in (lens, (0, 1, 1, 5)))
    decode = indexer.plan_decode(table, seq_lens, query_len=1)
    prefill = indexer.plan_prefill(starts, seq_lens, table, num_tokens=6)
    decode_rows = [(0, lens[0] - 1), (1, lens[1] - 1), (2, lens[2] - 1)]
    prefill_rows = [(0, lens[0] - 1), *((2, lens[2] - 4 + i) for i in range(4))]
    for scores, select, rows, tokens in (
        (engine.scores(decode), partial(engine.decodes[0].select, decode), decode_rows, 3),
        (engine.pass_scores(prefill, 0), partial(engine.prefills[0].select, prefill, 0), prefill_rows, 6),
    ):
        values = torch.randint(-9, 10, scores.shape, generator=torch.Generator().manual_seed(topk)).to(scores)
        values[-1, ..., -2] = 100.0  # the own block of some rows
        scores.copy_(values)
        plain, ids = (torch.full((tokens, 2, topk), GUARD, dtype=torch.int32, device=device) for _ in range(2))
        sparse = sparse_table(indexer, 3, tokens, width, 16)
        select(plain)
        select(ids, sparse)
        expect(torch.equal(ids, plain), "ids differ from those of a selection without a table")
        for token, (request, position) in enumerate(rows):
            check_rows(sparse, ids.cpu(), request, token, [position])
        expect((sparse.table[len(rows) * 2 :] == GUARD).all().item() is True, "rows of padding were written")

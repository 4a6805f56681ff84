# SPDX-License-Identifier: Apache-2.0
"""Prefill cases, and the check that a run of one obeys the contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..indexer import Indexer
from ..layout import BLOCK_TOKENS, CacheLayout
from .cases import SENTINEL, build_cache, check_scores, expect, random_values, sentinel_output
from .reference import block_scores, query_positions, select_blocks


@dataclass(frozen=True)
class PrefillCase:
    """One prefill batch: (query_len, prefix) of every request, options, and what its keys and queries look like.

    ``padding`` tokens follow the last request. Other fields as in :class:`blockpick.testing.cases.DecodeCase`.
    """

    name: str
    dtype: str
    requests: tuple[tuple[int, int], ...]
    page_size: int = 128
    num_heads: int = 1
    topk: int = 16
    init_blocks: int = 0
    local_blocks: int = 1
    order: str = "score"
    out_layout: str = "thk"
    empty_row: str = "minus_one"
    rounding: str | None = None
    numerics: str | None = None
    data: str = "normal"
    extra_width: int = 1
    page_padding: int = 0
    padding: int = 0
    workspace_bytes: int = 1 << 26
    seed: int = 0

    def layout(self) -> CacheLayout:
        """The cache layout of the case."""
        return CacheLayout(self.dtype, self.page_size)

    @property
    def num_tokens(self) -> int:
        """Rows of q."""
        return sum(query_len for query_len, _ in self.requests) + self.padding

    @property
    def width(self) -> int:
        """Columns of the block table."""
        longest = max(query_len + prefix for query_len, prefix in self.requests)
        return max(-(-longest // self.page_size), 1) + self.extra_width

    def options(self) -> dict[str, object]:
        """Constructor options of an indexer for the case."""
        return {
            "num_heads": self.num_heads, "topk": self.topk, "init_blocks": self.init_blocks,
            "local_blocks": self.local_blocks, "order": self.order, "out_layout": self.out_layout,
            "empty_row": self.empty_row, "nvfp4_rounding": self.rounding, "max_requests": len(self.requests),
            "max_seq_len": self.width * self.page_size, "max_prefill_tokens": self.num_tokens,
            "workspace_bytes": self.workspace_bytes, "prefill_numerics": self.numerics,
        }  # fmt: skip


@dataclass
class PrefillBatch:
    """Tensors of a case. ``out`` is a view into ``out_storage``, which is all sentinel."""

    cache: torch.Tensor
    q: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    out: torch.Tensor
    out_storage: torch.Tensor

    def to(self, device: torch.device | str) -> PrefillBatch:
        """The batch on another device, with the same strides."""
        storage = self.out_storage.to(device)
        out = torch.as_strided(storage, self.out.shape, self.out.stride(), self.out.storage_offset())
        whole = torch.as_strided(self.cache, (self.cache.shape[0] * self.cache.stride(0),), (1,)).to(device)
        cache = torch.as_strided(whole, self.cache.shape, self.cache.stride())
        moved = [t.to(device) for t in (self.q, self.block_table, self.cu_seqlens_q, self.seq_lens)]
        return replace(self, cache=cache, q=moved[0], block_table=moved[1], cu_seqlens_q=moved[2], seq_lens=moved[3],
                       out=out, out_storage=storage)  # fmt: skip


def build_prefill(case: PrefillCase) -> PrefillBatch:
    """Tensors of ``case`` on the CPU: used tokens written, all else poisoned, table tails garbage."""
    generator = torch.Generator().manual_seed(case.seed)
    layout = case.layout()
    query_lens = [query_len for query_len, _ in case.requests]
    seq_lens = [query_len + prefix for query_len, prefix in case.requests]
    cache, table = build_cache(
        layout, query_lens, seq_lens, case.width, case.data, case.page_padding, generator
    )  # fmt: skip
    shape = (case.num_tokens, case.num_heads, 128)
    q = random_values(shape, "integer" if case.data == "integer" else "normal", generator)
    out, storage = sentinel_output(case.num_tokens, case.num_heads, case.topk, case.out_layout)
    cu_seqlens = torch.tensor([0, *query_lens]).cumsum(0).int()
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    return PrefillBatch(cache, q.to(layout.query_dtype), table, cu_seqlens, lens, out, storage)


def check_prefill_batch(case: PrefillCase, indexer: Indexer, batch: PrefillBatch) -> None:
    """Run ``batch`` and raise ``AssertionError`` unless everything holds.

    Selection must equal the oracle's on the run's own scores (of the last pass), scores must match float64, a repeat
    must give the same ids, padding rows and what lies beyond the output must not change. On integer data all ids must
    equal the oracle's outright.
    """
    label = f"{case} on {indexer.route}"
    plan = indexer.plan_prefill(batch.cu_seqlens_q, batch.seq_lens, batch.block_table, num_tokens=case.num_tokens)
    indexer.prefill(plan, batch.q, batch.cache, batch.out)
    first, scores = batch.out.clone(), indexer.prefill_scores(plan)
    indexer.prefill(plan, batch.q, batch.cache, batch.out)
    expect(torch.equal(first, batch.out), f"{label}: a repeat run gives other ids")
    ids = (batch.out if case.out_layout == "thk" else batch.out.transpose(0, 1)).cpu()
    on_hardware = indexer.device.type == "cuda"  # elsewhere fp8 products are summed like all others
    tolerance = "fp8 MMA" if indexer.prefill_numerics == "fp8" and on_hardware else case.dtype
    scored_from = case.num_tokens - scores.shape[0]
    scores, cpu = scores.cpu(), batch.to("cpu")
    options = (case.topk, case.init_blocks, case.local_blocks, case.order, case.empty_row)
    token = 0
    for b, (query_len, _) in enumerate(case.requests):
        if not query_len:
            continue
        step = (cpu.block_table[b : b + 1], cpu.seq_lens[b : b + 1], query_len, indexer.nvfp4_rounding)
        own = (case.layout(), cpu.cache, cpu.q[token : token + query_len], *step)
        oracle, sizes = block_scores(*own)[0], block_scores(*own, absolute=True)[0]
        positions = query_positions(cpu.seq_lens[b : b + 1], query_len, case.width * case.page_size)[0].tolist()
        for i, position in enumerate(positions):
            where, seen = f"{label}: request {b}, query {i}", position // BLOCK_TOKENS + 1
            scored = case.order == "score" or positions[-1] // BLOCK_TOKENS + 1 > case.topk
            row = token + i - scored_from
            for h in range(case.num_heads):
                got = ids[token + i, h].tolist()
                if case.data == "integer":
                    wanted = select_blocks(oracle[i, h].float(), position, *options)
                    expect(got == wanted, f"{where}, head {h}: ids {got}, oracle {wanted}")
                if row >= 0:
                    mine = scores[row, h] if scored else torch.zeros(scores.shape[-1])
                    wanted = select_blocks(mine, position, *options)
                    expect(got == wanted, f"{where}, head {h}: ids {got}, on its scores {wanted}")
            if scored and position >= 0 and row >= 0:
                check_scores(tolerance, scores[row, :, :seen], oracle[i, :, :seen], sizes[i, :, :seen], where)
        token += query_len
    expect(bool((ids[token:] == SENTINEL).all()), f"{label}: padding rows were written")
    batch.out.fill_(SENTINEL)
    expect(bool((batch.out_storage == SENTINEL).all()), f"{label}: something beyond the output's rows was written")


def run_prefill_case(case: PrefillCase, make_indexer: Callable[..., Indexer], device: torch.device | str) -> Indexer:
    """Build ``case``, make its indexer with ``make_indexer(layout, **options)``, check; returns the indexer."""
    indexer = make_indexer(case.layout(), **case.options())
    check_prefill_batch(case, indexer, build_prefill(case).to(device))
    return indexer

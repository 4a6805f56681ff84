# SPDX-License-Identifier: Apache-2.0
"""Decode cases with everything a kernel may not touch poisoned, and the check that a run of one obeys the contract."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..indexer import Indexer
from ..layout import BLOCK_TOKENS, CacheLayout
from .reference import block_scores, insert_reference, query_positions, select_blocks

SENTINEL = -77
# Largest error of a score relative to its block's largest sum of |q| * |k| over the dims: fp32 accumulation of 128
# exact products. 2^-24 is the unit roundoff; a matrix unit may lose a few of them.
# Hopper's fp8 MMA keeps 13 bits below the largest addend of an instruction and truncates the rest (published analyses
# of its accumulator): each of the 128 products, and the sum that is carried into each of the 4 instructions, loses
# less than 2^-13 of the largest. The largest loss measured is an eighth of that: 2.0e-3, where one dim dominates.
SCORE_TOLERANCE = {"bf16": 1e-6, "e4m3fn": 1e-6, "nvfp4": 1e-6, "fp8 MMA": (128 + 4) * 2.0**-13}


@dataclass(frozen=True)
class DecodeCase:
    """One decode batch: shapes, options, and what its keys and queries look like.

    ``data``: ``normal``; ``integer`` (small integers: every partial sum is exact, so ids must equal the oracle's, and
    ties abound); ``special`` (normal, with NaN, infinities and whole NaN blocks).
    """

    name: str
    dtype: str
    seq_lens: tuple[int, ...]
    page_size: int = 128
    num_heads: int = 1
    query_len: int = 1
    topk: int = 16
    init_blocks: int = 0
    local_blocks: int = 1
    order: str = "score"
    out_layout: str = "thk"
    empty_row: str = "minus_one"
    rounding: str | None = None
    data: str = "normal"
    extra_width: int = 1
    page_padding: int = 0
    seed: int = 0

    def layout(self) -> CacheLayout:
        """The cache layout of the case."""
        return CacheLayout(self.dtype, self.page_size)

    def options(self) -> dict[str, object]:
        """Constructor options of an indexer for the case."""
        width = max(-(-max(self.seq_lens) // self.page_size), 1) + self.extra_width
        return {
            "num_heads": self.num_heads, "topk": self.topk, "init_blocks": self.init_blocks,
            "local_blocks": self.local_blocks, "order": self.order, "out_layout": self.out_layout,
            "empty_row": self.empty_row, "nvfp4_rounding": self.rounding, "max_requests": len(self.seq_lens),
            "max_query_len": self.query_len, "max_seq_len": width * self.page_size,
        }  # fmt: skip


@dataclass
class DecodeBatch:
    """Tensors of a case. ``out`` is a view into ``out_storage``, which is all sentinel."""

    cache: torch.Tensor
    q: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    out: torch.Tensor
    out_storage: torch.Tensor

    def to(self, device: torch.device | str) -> DecodeBatch:
        """The batch on another device, with the same strides."""
        storage = self.out_storage.to(device)
        out = torch.as_strided(storage, self.out.shape, self.out.stride(), self.out.storage_offset())
        whole = torch.as_strided(self.cache, (self.cache.shape[0] * self.cache.stride(0),), (1,)).to(device)
        cache = torch.as_strided(whole, self.cache.shape, self.cache.stride())
        q, table, lens = self.q.to(device), self.block_table.to(device), self.seq_lens.to(device)
        return DecodeBatch(cache, q, table, lens, out, storage)


def poison(cache: torch.Tensor, layout: CacheLayout) -> None:
    """Fill a cache with bytes that make every score they enter NaN or huge."""
    fill = {"bf16": float("nan"), "e4m3fn": float("nan"), "nvfp4": 0x7F}[layout.dtype]
    cache.fill_(fill)


def poison_rows(layout: CacheLayout, page: torch.Tensor, rows: torch.Tensor, generator: torch.Generator) -> None:
    """Fill rows of one page with keys whose scores beat or (NaN) vanish beside any real one: they must not be seen."""
    lures = torch.where(torch.rand(len(rows), 128, generator=generator) < 0.5, -3e4, 3e4)
    lures[rows % 4 == 3] = float("nan")
    insert_reference(layout, page[None], lures.bfloat16(), rows)


def random_values(shape: tuple[int, ...], data: str, generator: torch.Generator) -> torch.Tensor:
    """Keys or queries as fp32."""
    if data == "integer":
        return torch.randint(-2, 3, shape, generator=generator).float()
    values = torch.randn(shape, generator=generator)
    if data == "special":
        mask = torch.rand(shape, generator=generator)
        values[mask < 2e-4] = float("nan")
        values[(mask >= 2e-4) & (mask < 4e-4)] = float("inf")
        values[(mask >= 4e-4) & (mask < 6e-4)] = -float("inf")
    return values


def build_cache(
    layout: CacheLayout, query_lens: Sequence[int], seq_lens: Sequence[int], width: int, data: str, page_padding: int,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """A cache of these requests and their table, ``width`` columns: used tokens written, all else poison or garbage."""
    counts = [-(-max(length, 0) // layout.page_size) for length in seq_lens]
    pool = sum(counts) + 3
    shape = layout.shape(pool)
    row = layout.row_elements * layout.page_rows
    stride = row + page_padding // layout.torch_dtype.itemsize
    whole = torch.empty(pool * stride, dtype=layout.torch_dtype)
    cache = torch.as_strided(whole, shape, (stride, layout.row_elements, 1))
    poison(whole, layout)
    order = torch.randperm(pool, generator=generator).tolist()
    table = torch.randint(-(2**31), 2**31 - 1, (len(counts), width + 2), generator=generator).int()
    for b, (count, length) in enumerate(zip(counts, seq_lens, strict=True)):
        pages, order = order[:count], order[count:]
        table[b, :count] = torch.tensor(pages, dtype=torch.int32)
        keys = random_values((max(length, 0), 128), data, generator)
        if data == "special" and length > 5 * BLOCK_TOKENS:
            keys[BLOCK_TOKENS : 2 * BLOCK_TOKENS] = float("nan")
        if data == "integer" and length > 4 * BLOCK_TOKENS:  # blocks 1 and 3 tie in every query
            keys[3 * BLOCK_TOKENS : 4 * BLOCK_TOKENS] = keys[BLOCK_TOKENS : 2 * BLOCK_TOKENS]
        if data == "integer" and query_lens[b] > 1:  # keys that only later queries see stand out
            keys[max(length - query_lens[b] + 1, 0) :] *= 3
        page = torch.tensor(pages, dtype=torch.int64).repeat_interleave(layout.page_size)[: len(keys)]
        slots = page * layout.page_size + torch.arange(len(keys)) % layout.page_size
        insert_reference(layout, cache, keys.bfloat16(), slots)
        if length % layout.page_size and length > 0:
            poison_rows(layout, cache[pages[-1]], torch.arange(length % layout.page_size, layout.page_size), generator)
    return cache, table[:, :width]


def build(case: DecodeCase) -> DecodeBatch:
    """Tensors of ``case`` on the CPU: used tokens written, all else poisoned, table tails garbage."""
    generator = torch.Generator().manual_seed(case.seed)
    layout = case.layout()
    width = case.options()["max_seq_len"] // case.page_size  # type: ignore[operator]
    query_lens = [case.query_len] * len(case.seq_lens)
    cache, table = build_cache(
        layout, query_lens, case.seq_lens, width, case.data, case.page_padding, generator
    )  # fmt: skip
    tokens = len(query_lens) * case.query_len
    q = random_values((tokens, case.num_heads, 128), "integer" if case.data == "integer" else "normal", generator)
    out, storage = sentinel_output(tokens, case.num_heads, case.topk, case.out_layout)
    lens = torch.tensor(case.seq_lens, dtype=torch.int32)
    return DecodeBatch(cache, q.to(layout.query_dtype), table, lens, out, storage)


def sentinel_output(tokens: int, num_heads: int, topk: int, out_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """An output view with gaps after every row, in a storage of sentinels."""
    outer, inner = (tokens, num_heads) if out_layout == "thk" else (num_heads, tokens)
    row = topk + 3
    storage = torch.full(((outer + 2) * (inner + 1) * row,), SENTINEL, dtype=torch.int32)
    return torch.as_strided(storage, (outer, inner, topk), ((inner + 1) * row, row, 1), (inner + 1) * row), storage


def expect(holds: bool, message: str) -> None:
    """Raise ``AssertionError`` unless ``holds``; unlike ``assert`` it also checks under ``python -O``."""
    if not holds:
        raise AssertionError(message)


def check_batch(case: DecodeCase, indexer: Indexer, batch: DecodeBatch) -> None:
    """Run ``batch`` and raise ``AssertionError`` with a reproducer unless everything holds.

    Selection must equal the oracle's on the run's own scores; scores must match float64; a repeat must give the same
    ids and score bits; nothing beyond the output's rows may change. On integer data ids must equal the oracle's
    outright.
    """
    label = f"{case} on {indexer.route}"
    plan = indexer.plan_decode(batch.block_table, batch.seq_lens, query_len=case.query_len)
    indexer.decode(plan, batch.q, batch.cache, batch.out)
    first, scores = batch.out.clone(), indexer.scores(plan).cpu().clone()
    indexer.decode(plan, batch.q, batch.cache, batch.out)
    expect(torch.equal(first, batch.out), f"{label}: a repeat run gives other ids")
    again = indexer.scores(plan).cpu()

    ids = batch.out if case.out_layout == "thk" else batch.out.transpose(0, 1)
    ids = ids.cpu().reshape(len(case.seq_lens), case.query_len, case.num_heads, case.topk)
    cpu = batch.to("cpu")
    arguments = (case.layout(), cpu.cache, cpu.q, cpu.block_table, cpu.seq_lens, case.query_len, indexer.nvfp4_rounding)
    oracle, sizes = block_scores(*arguments), block_scores(*arguments, absolute=True)
    positions = query_positions(cpu.seq_lens, case.query_len, cpu.block_table.shape[1] * case.page_size)
    options = (case.topk, case.init_blocks, case.local_blocks, case.order, case.empty_row)
    for b, i in itertools.product(range(len(case.seq_lens)), range(case.query_len)):
        scored = case.order == "score" or int(positions[b, -1]) // BLOCK_TOKENS + 1 > case.topk
        position, where = int(positions[b, i]), f"{label}: request {b}, query {i}"
        for h in range(case.num_heads):
            own = scores[b, i, h] if scored else torch.zeros(scores.shape[-1])
            got, wanted = ids[b, i, h].tolist(), select_blocks(own, position, *options)
            expect(got == wanted, f"{where}, head {h}: ids {got}, on its scores {wanted}")
            if case.data == "integer":
                wanted = select_blocks(oracle[b, i, h].float(), position, *options)
                expect(got == wanted, f"{where}, head {h}: ids {got}, oracle {wanted}")
        if scored and position >= 0:
            seen = position // BLOCK_TOKENS + 1
            bits, repeat = scores[b, i, :, :seen].view(torch.int32), again[b, i, :, :seen].view(torch.int32)
            expect(torch.equal(bits, repeat), f"{where}: a repeat run gives other score bits")
            check_scores(case.dtype, scores[b, i, :, :seen], oracle[b, i, :, :seen], sizes[b, i, :, :seen], where)
    batch.out.fill_(SENTINEL)
    expect(bool((batch.out_storage == SENTINEL).all()), f"{label}: something beyond the output's rows was written")


def check_scores(dtype: str, scores: torch.Tensor, oracle: torch.Tensor, sizes: torch.Tensor, where: str) -> None:
    """Compare fp32 scores with float64: NaN and infinities alike, numbers within the tolerance times ``sizes``."""
    got = scores.double()
    expect(torch.equal(got.isnan(), oracle.isnan()), f"{where}: NaN blocks differ: {got} against {oracle}")
    infinite = oracle.isinf()
    expect(torch.equal(got[infinite], oracle[infinite]), f"{where}: infinities differ")
    finite = oracle.isfinite() & sizes.isfinite()
    error = (got - oracle)[finite].abs() / sizes[finite].clamp(min=1e-30)
    worst = float(error.max()) if error.numel() else 0.0
    expect(worst <= SCORE_TOLERANCE[dtype], f"{where}: relative score error {worst:.2e} > {SCORE_TOLERANCE[dtype]:.0e}")


def run_case(case: DecodeCase, make_indexer: Callable[..., Indexer], device: torch.device | str) -> Indexer:
    """Build ``case``, make its indexer with ``make_indexer(layout, **options)``, check; returns the indexer."""
    indexer = make_indexer(case.layout(), **case.options())
    check_batch(case, indexer, build(case).to(device))
    return indexer

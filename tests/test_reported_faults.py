# SPDX-License-Identifier: Apache-2.0
"""Faults that users of such indexers reported (shared/cases.md); the test's name carries the case's number.

Each test takes the whole kind of fault. Expected ids are worked out here from exact float64 scores.
"""

from __future__ import annotations

import math
from typing import Any

import blockpick
import blockpick.plan
import pytest
import torch
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
        insert_reference(layout, cache, k.bfloat16(), mine[token // layout.page_size] * layout.page_size + token % layout.page_size)
    return cache, table


class Run:
    """An indexer over one cache: ids [T][H][topk] of a decode, and its scores."""

    def __init__(self, executor: Any, layout: blockpick.CacheLayout, table: torch.Tensor, query_len: int = 1, **options: Any):
        self.executor, self.table, self.query_len = executor, table.to(executor.device), query_len
        self.layout_of_out = options.get("out_layout", "thk")
        defaults = {"max_requests": len(table), "max_query_len": query_len, "max_seq_len": table.shape[1] * layout.page_size}
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


# ---- 1, 5, 9: layouts and causal rule ----


@pytest.mark.parametrize("tokens", [7, 4])
def test_case_1_both_layouts_hold_the_same_ids(one_executor: Any, tokens: int) -> None:
    layout = blockpick.CacheLayout("bf16")
    generator = torch.Generator().manual_seed(tokens)
    cache, table = place(layout, [torch.randn(40 * 128, 128, generator=generator)])
    q = torch.randn(tokens, 4, 128, generator=generator).bfloat16()
    ids = {}
    for out_layout in ("thk", "htk"):
        run = Run(one_executor, layout, table, tokens, num_heads=4, out_layout=out_layout)
        run(cache, [40 * 128], q)
        ids[out_layout] = run.out.cpu()
    assert ids["thk"].shape == (tokens, 4, 16)
    assert ids["htk"].shape == (4, tokens, 16)
    for t in range(tokens):
        for h in range(4):
            assert ids["thk"][t, h].tolist() == ids["htk"][h, t].tolist()
    assert not torch.equal(ids["thk"][:4], ids["htk"][:, :4]), "the batch cannot tell the layouts apart"


@pytest.mark.parametrize("tokens", [1, 6, 7, 8])
def test_case_5_query_len_is_required_and_never_inferred(executor: Any, tokens: int) -> None:
    layout = blockpick.CacheLayout("bf16")
    cache, table = (x.to(executor.device) for x in place(layout, [integers((400, 128)), integers((300, 128), 1)]))
    indexer = executor.indexer(layout, max_requests=2, max_query_len=4, max_seq_len=1024)
    lens = torch.tensor([400, 300], dtype=torch.int32, device=executor.device)
    with pytest.raises(TypeError, match="query_len"):
        indexer.plan_decode(table, lens)
    plan = indexer.plan_decode(table, lens, query_len=2)
    out = torch.full((tokens, 1, 16), SENTINEL, dtype=torch.int32, device=executor.device)
    with pytest.raises(ValueError, match=rf"^q: .*\b4\b.*\b{tokens}\b"):
        indexer.decode(plan, torch.zeros(tokens, 1, 128, dtype=torch.bfloat16, device=executor.device), cache, out)
    assert bool((out == SENTINEL).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("length", "query_len", "visible"), [
    (130, 4, (1, 1, 2, 2)), (128, 3, (1, 1, 1)), (129, 2, (1, 2)), (2, 4, (0, 0, 1, 1)), (257, 8, (2,) * 7 + (3,)), (0, 5, (0,) * 5),
])  # fmt: skip
def test_case_9_every_query_has_its_own_causal_length(
    executor: Any, dtype: str, length: int, query_len: int, visible: tuple[int, ...]
) -> None:
    layout = blockpick.CacheLayout(dtype)
    cache, table = place(layout, [integers((length, 128))])
    run = Run(executor, layout, table, query_len, order="ascending")
    ids = run(cache, [length], queries(integers((query_len, 1, 128), 1), dtype))
    assert ids == [[[*range(n)] + [-1] * (16 - n)] for n in visible]


# ---- 3, 14, 25, 30: batches ----


@pytest.mark.parametrize("query_len", [1, 2])
@pytest.mark.parametrize("padding", ["rows of q", "empty requests"])
def test_case_3_and_25_padded_batch_stays_inside_its_scratch(
    executor: Any, monkeypatch: pytest.MonkeyPatch, padding: str, query_len: int
) -> None:
    """5 live requests padded to 8, three replays, 4 KiB of guard behind every buffer."""
    guards = guarded(monkeypatch)
    layout = blockpick.CacheLayout("bf16")
    keys = [integers((n, 128), n) for n in (1, 129, 17 * 128, 300, 128)]
    padded = padding == "empty requests"
    cache, table = place(layout, keys + [keys[0][:0]] * (3 if padded else 0))
    q = integers((8 * query_len, 1, 128)).bfloat16().to(executor.device)
    lens = torch.tensor([len(k) for k in keys] + [0] * (3 if padded else 0), dtype=torch.int32, device=executor.device)
    indexer = executor.indexer(
        layout, max_requests=8 if padded else 5, max_query_len=query_len, max_seq_len=table.shape[1] * 128
    )
    out = torch.full((8 * query_len, 1, 16), SENTINEL, dtype=torch.int32, device=executor.device)
    plan = indexer.plan_decode(table.to(executor.device), lens, query_len=query_len)
    for _ in range(3):
        indexer.decode(plan, q, cache.to(executor.device), out, allow_padding=True)
    intact(guards)
    for b, k in enumerate(keys):
        for i in range(query_len):
            row, position = b * query_len + i, len(k) - query_len + i
            expected = best(maxima(k, q[row, 0].cpu().float(), position)) if position >= 0 else [-1] * 16
            assert out[row, 0].tolist() == expected
    assert bool((out[5 * query_len :] == (-1 if padded else SENTINEL)).all())


@pytest.mark.parametrize("requests", [1, 32, 64])
def test_case_14_all_lengths_zero(one_executor: Any, monkeypatch: pytest.MonkeyPatch, requests: int) -> None:
    guards = guarded(monkeypatch)
    layout = blockpick.CacheLayout("nvfp4")
    empty_row = "block_zero" if requests == 32 else "minus_one"
    table = torch.full((requests, 3), 2**31 - 1, dtype=torch.int32)
    run = Run(one_executor, layout, table, empty_row=empty_row)
    cache = torch.full(layout.shape(1), 0x7F, dtype=torch.uint8)
    ids = run(cache, [0] * requests, queries(torch.ones(requests, 1, 128), "nvfp4"))
    assert ids == [[[0 if empty_row == "block_zero" else -1] + [-1] * 15]] * requests
    intact(guards)


def test_case_14_a_step_without_work_leaves_nothing_behind(executor: Any) -> None:
    """A dummy run of zero lengths between two real steps."""
    layout = blockpick.CacheLayout("bf16")
    keys = integers((20 * 128, 128))
    cache, table = place(layout, [keys, keys[:0]])
    run = Run(executor, layout, table)
    q = integers((2, 1, 128)).bfloat16()
    expected = [[best(maxima(keys, q[0, 0].float(), 20 * 128 - 1))], [[-1] * 16]]
    for lens, ids in (([20 * 128, 0], expected), ([0, 0], [[[-1] * 16]] * 2), ([20 * 128, 0], expected)):
        assert run(cache, lens, q) == ids


def test_case_30_one_long_request_among_63_short_ones(one_executor: Any) -> None:
    layout = blockpick.CacheLayout("bf16")
    keys = [integers((16 * 128 if b == 40 else 1 + 17 * b % 200, 128), b) for b in range(64)]
    keys[40] = integers((300 * 128, 128), 99)
    cache, table = place(layout, keys)
    q = integers((64, 1, 128), 3).bfloat16()
    ids = Run(one_executor, layout, table)(cache, [len(k) for k in keys], q)
    for b, k in enumerate(keys):
        assert ids[b][0] == best(maxima(k, q[b, 0].float(), len(k) - 1)), f"request {b}"


# ---- 6, 8, 15, 24, 28: the cache ----


@pytest.mark.parametrize("dtype", ["e4m3fn", "nvfp4"])
def test_case_6_quantised_cache_scores_like_bf16_of_its_values(any_executor: Any, dtype: str) -> None:
    """Inserted on the executor, then decoded next to a bf16 cache of the dequantised values: equal bits and ids."""
    values = integers((20 * 128 + 5, 128), 4)
    values[:, ::16] = 2  # every NVFP4 group has amax 2: scale 0.34375, which is not 1/3
    page = torch.arange(21).int()[None]
    q = integers((1, 2, 128), 5)
    results = []
    for which in (dtype, "bf16"):
        layout = blockpick.CacheLayout(which)
        cache = layout.empty(21, any_executor.device).fill_(0x7F if which == "nvfp4" else NAN)
        keys = values
        if dtype == "nvfp4":  # 2 / 0.34375 = 5.8 -> 6, 1 / 0.34375 = 2.9 -> 3
            keys = values if which == "nvfp4" else values.sign() * 0.34375 * torch.where(values.abs() == 2, 6, 3)
        slots = torch.arange(len(keys), device=any_executor.device)
        any_executor.insert(layout, cache, keys.bfloat16().to(any_executor.device), slots)
        rounding = {"nvfp4_rounding": "exact"} if which == "nvfp4" else {}
        run = Run(any_executor, layout, page, num_heads=2, **rounding)
        results.append((run(cache, [len(keys)], queries(q, which)), run.scores()[0, 0, :, :21]))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stale", [6.0, -6.0, INF, NAN])
@pytest.mark.parametrize("page_size", [128, 256])
def test_case_8_stale_rows_and_pages_stay_out_of_the_maximum(executor: Any, dtype: str, stale: float, page_size: int) -> None:
    """S = 3000: rows behind the end of the last page and the pages behind it hold garbage."""
    layout = blockpick.CacheLayout(dtype, page_size)
    pages = 24 * 128 // page_size
    keys = torch.ones(24 * 128, 128)
    keys += (torch.arange(24) % 3).repeat_interleave(128)[:, None]  # block 23 scores 3 x 128 like 2, 5, 8 ...
    keys[3000:] = stale
    cache, table = place(layout, [keys, torch.full((page_size, 128), stale)], extra=3)
    table[0, pages:] = table[1, 0]
    run = Run(executor, layout, table[:1], local_blocks=0)
    ids = run(cache, [3000], queries(torch.ones(1, 1, 128), dtype))
    twos = list(range(2, 24, 3))
    assert ids[0][0] == [*twos, *range(1, 24, 3)][:16]
    keys[:3000] *= torch.where(torch.arange(3000) < 23 * 128, 1.0, 0.5)[:, None]  # 1.5 in block 23: between 1 and 2
    cache, table = place(layout, [keys])
    ids = Run(executor, layout, table, local_blocks=0, topk=17)(cache, [3000], queries(torch.ones(1, 1, 128), dtype))
    assert ids[0][0] == [*range(2, 23, 3), *range(1, 23, 3), 23, 0]


@pytest.mark.parametrize("page_size", [128, 256])
def test_case_8_table_narrower_than_the_length(executor: Any, page_size: int) -> None:
    """Table width 4, S = 1000: p is clamped; what lies behind the table's last column is another request's."""
    layout = blockpick.CacheLayout("bf16", page_size)
    keys = integers((4 * page_size, 128))
    cache, table = place(layout, [keys, keys * 50], extra=0)
    q = integers((2, 1, 128), 1).bfloat16()
    ids = Run(executor, layout, table)(cache, [4 * page_size + 500, 1], q)
    assert ids[0][0] == best(maxima(keys, q[0, 0].float(), 4 * page_size - 1))


@pytest.mark.parametrize("page_size", [128, 256])
def test_garbage_page_ids_inside_the_visible_part_are_clamped_into_the_pool(executor: Any, page_size: int) -> None:
    """Section 1.2: -7 reads page 0, 2^31 - 1 and N read page N - 1; nothing faults."""
    layout = blockpick.CacheLayout("bf16", page_size)
    cache = torch.zeros(5, page_size, 128)
    cache[:, :, 0] = torch.tensor([10.0, 20, 30, 40, 50])[:, None]
    table = torch.tensor([[2, -7, 2**31 - 1, 5, -(2**31), 2**30 + 1, 1]], dtype=torch.int32)
    run = Run(executor, layout, table, topk=64, local_blocks=0)
    q = torch.zeros(1, 1, 128)
    q[..., 0] = 1
    ids = run(cache.bfloat16(), [7 * page_size], q.bfloat16())
    per_page = [30, 10, 50, 50, 10, 50, 20]
    scores = [float(s) for s in per_page for _ in range(page_size // 128)]
    assert ids[0][0] == best(scores, 64, local_blocks=0)


@pytest.mark.parametrize(("dtype", "stride"), [("nvfp4", 1_039_680), ("e4m3fn", 1_039_680), ("bf16", 2 * 1_039_680)])
def test_case_15_page_offsets_past_two_and_four_gib(executor: Any, dtype: str, stride: int) -> None:
    """Page stride 1,039,680 elements, pages 2065, 2066, 4130 of one large view that is touched nowhere else."""
    layout = blockpick.CacheLayout(dtype)
    raw = torch.empty(4131 * stride, dtype=torch.uint8, device=executor.device)
    typed = raw.view(layout.torch_dtype)
    cache = torch.as_strided(typed, layout.shape(4131), (stride // typed.element_size(), layout.row_elements, 1))
    table = torch.tensor([[2066, 0, 4130, 2065]], dtype=torch.int32)
    keys = integers((4 * 128, 128))
    keys[:, ::16] = 2
    for j, page in enumerate(table[0].tolist()):
        slots = page * 128 + torch.arange(128)
        part = keys[j * 128 : (j + 1) * 128].bfloat16()
        executor.insert(layout, cache, part.to(executor.device), slots.to(executor.device))
    q = queries(integers((1, 1, 128), 2), dtype)
    run = Run(executor, layout, table, local_blocks=0, topk=4)
    lens = torch.tensor([512], dtype=torch.int32, device=executor.device)
    run.out = torch.full((1, 1, 4), SENTINEL, dtype=torch.int32, device=executor.device)
    run.plan = run.indexer.plan_decode(run.table, lens, query_len=1)
    ids = run.again(cache, q.to(executor.device))
    step = torch.where(keys.abs() == 2, 6, 3) * keys.sign() * 0.34375 if dtype == "nvfp4" else keys
    expected = maxima(step, q[0, 0].float(), 511)
    assert run.scores()[0, 0, 0, :4].tolist() == pytest.approx(expected, rel=1e-5 if dtype != "nvfp4" else 0.07)
    if dtype != "nvfp4":
        assert ids == [[best(expected, 4, local_blocks=0)]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_24_page_stride_is_read_from_the_tensor(executor: Any, dtype: str) -> None:
    """One indexer and one plan over caches of two page strides; a stale stride reads poison."""
    layout = blockpick.CacheLayout(dtype)
    keys = integers((18 * 128, 128))
    keys[:, ::16] = 2
    dense, table = place(layout, [keys])
    run = Run(executor, layout, table)
    q = queries(integers((1, 1, 128), 1), dtype)
    first = run(dense, [len(keys)], q)
    padded = torch.full((len(dense) * 49152,), 0x7F, dtype=torch.uint8).view(layout.torch_dtype)
    stride = 49152 // dense.element_size()
    view = torch.as_strided(padded, dense.shape, (stride, layout.row_elements, 1))
    view.copy_(dense)
    view = torch.as_strided(padded.to(executor.device), dense.shape, (stride, layout.row_elements, 1))
    assert run.again(view, q.to(executor.device)) == first
    assert run.again(dense.to(executor.device), q.to(executor.device)) == first


@pytest.mark.parametrize("rows", [16, 32, 64, 192, 512])
def test_case_24_pages_of_another_size_are_refused(executor: Any, rows: int) -> None:
    with pytest.raises(blockpick.UnsupportedConfigError, match=rf"page_size={rows}\b.*128.*256"):
        blockpick.CacheLayout("nvfp4", rows)
    layout = blockpick.CacheLayout("nvfp4", 128)
    run = Run(executor, layout, torch.zeros(1, 4, dtype=torch.int32))
    cache = torch.zeros(8, rows, 72, dtype=torch.uint8)
    with pytest.raises(ValueError, match=rf"^cache: .*128.*{rows}"):
        run(cache, [300], queries(torch.ones(1, 1, 128), "nvfp4"))
    assert bool((run.out == SENTINEL).all())


@pytest.mark.parametrize("amax", [1e-6, 0.004, 0.00586, 2688.0, 1e38, 0.0, INF])
def test_case_28_groups_of_any_size_score_finitely(executor: Any, amax: float) -> None:
    """The score of one token whose first group holds ``amax``: code 6, 2, 3 ... times the scale, never inf or NaN."""
    layout = blockpick.CacheLayout("nvfp4")
    value = {1e-6: 0.0, 0.004: 2 * 2**-9, 0.00586: 3 * 2**-9, 2688.0: 2688.0, 1e38: 2688.0, 0.0: 0.0, INF: 2688.0}[amax]
    cache = torch.zeros(layout.shape(1), dtype=torch.uint8, device=executor.device)
    keys = torch.zeros(1, 128)
    keys[0, :16] = amax
    executor.insert(layout, cache, keys.bfloat16().to(executor.device), torch.tensor([0], device=executor.device))
    run = Run(executor, layout, torch.zeros(1, 1, dtype=torch.int32), nvfp4_rounding="exact", local_blocks=0)
    ids = run(cache, [1], queries(torch.ones(1, 1, 128), "nvfp4"))
    assert ids[0][0] == [0] + [-1] * 15
    assert run.scores()[0, 0, 0, 0].item() == 16 * value


@pytest.mark.parametrize("rounding", ["exact", "e4m3", None])
def test_case_28_rounding_of_code_times_scale(any_executor: Any, rounding: str | None) -> None:
    """6 * 448 saturates at 448 with e4m3; 1.5 * 1.125 = 1.6875 is a tie to 1.75 -> even 1.75; 3 * 1.875 -> 5.5 or 5.625."""
    layout = blockpick.CacheLayout("nvfp4")
    cases = [  # (scale, code, exact, e4m3)
        (0x7E, 7, 2688.0, 448.0), (0x7E, 15, -2688.0, -448.0), (0x39, 3, 1.6875, 1.75), (0x3F, 5, 5.625, 5.5),
        (0x3B, 3, 2.0625, 2.0), (0x3D, 3, 2.4375, 2.5), (0x01, 1, 2**-10, 0.0), (0x03, 1, 3 * 2**-10, 2**-8), (0x38, 7, 6, 6),
    ]  # fmt: skip
    cache = torch.zeros(len(cases), 128 * 72, dtype=torch.uint8)
    for page, (scale, code, _, _) in enumerate(cases):
        cache[page, :8192] = code  # dims 0, 2, 4 ... of every token
        cache[page, 8192:] = scale
    run = Run(any_executor, layout, torch.arange(len(cases)).int()[None], nvfp4_rounding=rounding, local_blocks=0)
    q = torch.zeros(1, 1, 128)
    q[..., 2] = 1
    run(cache.view(layout.shape(len(cases))), [len(cases) * 128], queries(q, "nvfp4"))
    arch = any_executor.arch or blockpick.device.describe(torch.device(any_executor.device)).arch
    used = rounding or ("e4m3" if arch in ("sm100", "sm103") else "exact")
    wanted = [case[3 if used == "e4m3" else 2] for case in cases]
    assert run.scores()[0, 0, 0, : len(cases)].tolist() == wanted


def test_case_23_e4m3fn_bytes_are_not_read_as_fnuz(any_executor: Any) -> None:
    """All 254 numbers of e4m3fn as keys, and as queries: 0x80 is -0, 0x7E is 448; 0x7F and 0xFF are NaN."""
    layout = blockpick.CacheLayout("e4m3fn")
    values = [m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:127] + [NAN]
    values += [-v for v in values]
    cache = torch.zeros(256, 128, 128, dtype=torch.uint8)
    cache[:, :, 3] = torch.arange(256)[:, None]
    q = torch.zeros(1, 1, 128)
    q[..., 3] = 1
    run = Run(any_executor, layout, torch.arange(256).int()[None])
    run(cache.view(torch.float8_e4m3fn), [256 * 128], queries(q, "e4m3fn"))
    got = run.scores()[0, 0, 0, :256]
    wanted = torch.tensor(values)
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.nan_to_num(0.0), wanted.nan_to_num(0.0))
    for byte in (0x80, 0x7E, 0xFE, 0x01, 0x7F):  # the same bytes in q against keys of 1
        ones = torch.zeros(1, 128, 128, dtype=torch.uint8)
        ones[:, :, 3] = 0x38
        probe = torch.zeros(1, 1, 128, dtype=torch.uint8)
        probe[..., 3] = byte
        run(ones.view(torch.float8_e4m3fn), [128], probe.view(torch.float8_e4m3fn))
        score = run.scores()[0, 0, 0, 0].item()
        assert score == values[byte] or (math.isnan(score) and byte == 0x7F), hex(byte)


@pytest.mark.parametrize("dtype", ["e4m3fn", "nvfp4"])
@pytest.mark.parametrize("where", ["q", "cache"])
def test_nan_bytes_make_the_score_nan(any_executor: Any, dtype: str, where: str) -> None:
    """0x7F in q, in an e4m3fn key, or as an NVFP4 scale; block 1 only when it is in the cache."""
    layout = blockpick.CacheLayout(dtype)
    keys = torch.full((2 * 128, 128), 6.0)
    cache, _ = place(layout, [keys])
    cache = cache[:2].clone()
    insert_reference(layout, cache, keys.bfloat16(), torch.arange(256))
    q = torch.ones(1, 1, 128)
    if where == "q":
        q[..., 77] = NAN
    elif dtype == "nvfp4":
        cache.view(2, -1)[1, 8192 + 4 :: 8] = 0x7F
    else:
        cache[1, :, 77] = NAN
    run = Run(any_executor, layout, torch.arange(2).int()[None], local_blocks=0, topk=2)
    ids = run(cache, [256], queries(q, dtype))
    assert run.scores()[0, 0, 0, :2].isnan().tolist() == [where == "q", True]
    assert ids == [[[0, 1]]]


# ---- 11, 12, 13, 27: selectors ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poisoned", ["q", "cache"])
def test_case_11_all_scores_nan(executor: Any, dtype: str, poisoned: str) -> None:
    layout = blockpick.CacheLayout(dtype)
    q = torch.ones(1, 1, 128)
    cache = layout.empty(1, "cpu").fill_(0x7F if dtype == "nvfp4" else NAN)
    if poisoned == "q":
        q[..., 5] = NAN
        cache.fill_(0x11 if dtype == "nvfp4" else 1)
    ids = Run(executor, layout, torch.zeros(1, 200, dtype=torch.int32))(cache, [200 * 128], queries(q, dtype))
    assert ids[0][0] == [199, *range(15)]


def near_ties(dtype: str, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache of one page a block and q [1, 1, 128] whose exact scores are (1 + k 2^-23) times a power of two."""
    k = torch.arange(blocks)
    bits = (k[:, None] >> torch.arange(13)) & 1
    keys, q = torch.zeros(blocks, 128), torch.zeros(1, 1, 128)
    if dtype == "bf16":
        keys[:, 0], q[..., 0] = 1, 1
        keys[:, 16:29], q[..., 16:29] = bits * 2.0 ** torch.arange(-23, -10), 1
    else:  # 512 + k 2^-14 from factors inside the range of e4m3; for NVFP4 a 6 that q ignores fixes each group's scale
        keys[:, 0], keys[:, 1], q[..., 0] = 16, 96, 32
        keys[:, 16:29], keys[:, 31], q[..., 16:29] = bits * 2.0**-5, 6 * 2.0**-5, 2.0 ** torch.arange(-9, 4)
    layout = blockpick.CacheLayout(dtype)
    cache = layout.empty(blocks, "cpu").fill_(0x00 if dtype == "nvfp4" else 0)
    insert_reference(layout, cache, keys.bfloat16(), k * 128 + k * 37 % 128)
    return cache, queries(q, dtype)


@pytest.mark.parametrize(("dtype", "blocks"), [("bf16", 5000), ("e4m3fn", 2100), ("nvfp4", 2100)])
def test_case_12_scores_one_ulp_apart_keep_their_order(one_executor: Any, dtype: str, blocks: int) -> None:
    cache, q = near_ties(dtype, blocks)
    cache, q = cache.to(one_executor.device), q.to(one_executor.device)
    run = Run(one_executor, blockpick.CacheLayout(dtype), torch.arange(blocks).int()[None])
    expected = [blocks - 1, *range(blocks - 2, blocks - 17, -1)]
    assert run(cache, [blocks * 128], q)[0][0] == expected
    scale = 1 if dtype == "bf16" else 512
    exact = (1 + torch.arange(blocks).double() * 2.0**-23) * scale
    assert torch.equal(run.scores()[0, 0, 0, :blocks].double(), exact)
    for _ in range(0 if one_executor.device == "cpu" else 50):
        assert run.again(cache, q)[0][0] == expected


def edge(executor: Any, last: int) -> list[list[int]]:
    """Two queries on both sides of the edge behind block ``last - 1``: ``last`` and ``last + 1`` visible blocks.

    All blocks score 1 but every 5th from the end, which scores 2; the table repeats two pages.
    """
    layout = blockpick.CacheLayout("bf16")
    cache = torch.ones(2, 128, 128, dtype=torch.bfloat16)
    cache[1] = 2
    table = torch.zeros(1, last + 1, dtype=torch.int32)
    table[0, [last - 1 - 5 * j for j in range(10)]] = 1
    ids = Run(executor, layout, table, query_len=2)(cache, [last * 128 + 1], torch.ones(2, 1, 128, dtype=torch.bfloat16))
    return [row[0] for row in ids]


@pytest.mark.parametrize("last", [255, 256, 1023, 1024, 2048, pytest.param(8191, marks=pytest.mark.slow),
                                  pytest.param(8192, marks=pytest.mark.slow)])  # fmt: skip
def test_case_13_lengths_at_every_internal_capacity(one_executor: Any, last: int) -> None:
    twos = sorted(last - 1 - 5 * j for j in range(10))
    assert edge(one_executor, last) == [[last - 1, *twos[:-1], *range(6)], [last, *twos, *range(5)]]


@pytest.mark.slow
def test_case_13_the_longest_row(one_executor: Any) -> None:
    """65,534 blocks; the ids reach 0xFFFD and still tie towards the lower one."""
    last = 65533
    twos = sorted(last - 1 - 5 * j for j in range(10))
    assert edge(one_executor, last)[1] == [last, *twos, *range(5)]


@pytest.mark.parametrize("page_size", [128, 256])
def test_case_13_one_block_more_is_refused_at_construction(executor: Any, page_size: int) -> None:
    layout = blockpick.CacheLayout("bf16", page_size)
    limit = 65534 * 128
    for tokens in (limit + 1, limit + 128, 2**31 - 1, 2**40):
        with pytest.raises(blockpick.UnsupportedConfigError, match=rf"max_seq_len={tokens}\b.*65534"):
            executor.indexer(layout, max_requests=1, max_seq_len=tokens)
    assert executor.indexer(layout, max_requests=1, max_seq_len=limit).config.max_blocks == 65534


@pytest.mark.parametrize("score", [-INF, NAN, -1.0])
@pytest.mark.parametrize("dtype", ["bf16", "e4m3fn"])
def test_case_27_forced_blocks_survive_the_worst_score(executor: Any, dtype: str, score: float) -> None:
    layout = blockpick.CacheLayout(dtype)
    keys = torch.ones(100, 128)
    values = torch.arange(100).float() % 7 + 1
    if dtype == "e4m3fn" and score == -INF:
        score = -448.0  # e4m3fn has no infinity
    values[0] = values[99] = score
    q = torch.zeros(1, 1, 128)
    q[..., 0] = 1
    keys[:, 0] = values
    cache = keys[:, None].expand(100, 128, 128).to(layout.torch_dtype).contiguous()
    run = Run(executor, layout, torch.arange(100).int()[None], init_blocks=1, local_blocks=1)
    ids = run(cache, [100 * 128], queries(q, dtype))[0][0]
    assert ids == [0, 99, *range(6, 99, 7)]  # the 14 blocks of score 7
    assert ids.count(0) == ids.count(99) == 1


def test_case_22_arch_without_kernels_is_refused_with_the_installed_ones(executor: Any) -> None:
    layout = blockpick.CacheLayout("bf16")
    for arch in ("sm120", "sm89", "gfx90a", "sm", ""):
        if arch:
            with pytest.raises(blockpick.UnsupportedArchError, match=rf"{arch}\b.*gfx942.*sm90"):
                blockpick.Indexer(layout, device="cpu", backend="interpreter", arch=arch)
            with pytest.raises(blockpick.UnsupportedArchError, match=rf"{arch}\b.*gfx942.*sm90"):
                blockpick.insert(
                    layout, layout.empty(1, "cpu"), torch.zeros(1, 128, dtype=torch.bfloat16), torch.tensor([0]),
                    backend="interpreter", arch=arch,
                )  # fmt: skip

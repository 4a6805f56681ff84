# SPDX-License-Identifier: Apache-2.0
"""Converting caches between replicated and sharded: section 1.9 of the contract, byte by byte.

Where a token's bytes lie is spelled out here from the contract; what a shard holds is also what insert stores into it.
"""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import blockpick
from blockpick import CacheLayout, UnsupportedConfigError

DTYPES = ["bf16", "e4m3fn", "nvfp4"]
SHARDS = [1, 2, 4, 8]
SENTINEL = 0xA5
EVERY = list(itertools.product(DTYPES, (128, 256), SHARDS))
GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.requires(ngpus=1)])
SOURCE, TARGET = CacheLayout("nvfp4"), CacheLayout("nvfp4", 128, 2)
few = settings(max_examples=12, deadline=None, derandomize=True, database=None)  # inserts are slow
many = settings(max_examples=60, deadline=None, derandomize=True, database=None)


def blank(layout: CacheLayout, pages: int, padding: int = 0, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """A cache whose every byte is the sentinel, and all its bytes, those between and behind pages too."""
    stride = layout.page_bytes + padding
    raw = torch.full((pages * stride + 64,), SENTINEL, dtype=torch.uint8, device=device)
    typed = raw.view(layout.torch_dtype)
    strides = (stride // typed.element_size(), layout.row_elements, 1)
    return torch.as_strided(typed, layout.shape(pages), strides), raw


def token_places(layout: CacheLayout, shard: int, token: int) -> list[tuple[int, int]]:
    """Byte ranges of a page's token in the page that ``shard`` stores, none where another rank stores it."""
    rows = layout.page_size // layout.shards
    if token // rows != shard:
        return []
    row = token % rows
    if layout.dtype != "nvfp4":
        size = {"bf16": 256, "e4m3fn": 128}[layout.dtype]
        return [(row * size, size)]
    segment = min(rows, 128)
    base, row = row // segment * segment * 72, row % segment
    return [(base + row * 64, 64), (base + segment * 64 + row * 8, 8)]


def expected(source: CacheLayout, raws: dict[int, torch.Tensor], target: CacheLayout, shard: int, raw: torch.Tensor,
             pages: list[int], strides: tuple[int, int]) -> torch.Tensor:  # fmt: skip
    """All bytes of a target's shard after the conversion, token by token."""
    wanted = raw.clone()
    for page, token in itertools.product(pages, range(source.page_size)):
        for held, other in raws.items():
            for (start, size), (place, _) in zip(
                token_places(source, held, token), token_places(target, shard, token), strict=False
            ):
                at, to = page * strides[0] + start, page * strides[1] + place
                wanted[to : to + size] = other[at : at + size]
    return wanted


def inserted(layout: CacheLayout, keys: torch.Tensor, slots: torch.Tensor, pages: int, padding: int = 0) -> Any:
    """Every shard's cache and bytes, as insert leaves them."""
    caches, raws = {}, {}
    for shard in range(layout.shards):
        caches[shard], raws[shard] = blank(layout, pages, padding)
        blockpick.insert(layout, caches[shard], keys, slots, shard=shard, backend="reference")
    return caches, raws


def random_caches(layout: CacheLayout, pages: int, padding: int, seed: int, device: str = "cpu") -> Any:
    """Every shard's cache and bytes, any byte anywhere: NaN, infinities, scales and codes that no insert writes."""
    caches, raws = {}, {}
    generator = torch.Generator().manual_seed(seed)
    for shard in range(layout.shards):
        caches[shard], raws[shard] = blank(layout, pages, padding, device)
        raws[shard].copy_(torch.randint(0, 256, raws[shard].shape, generator=generator, dtype=torch.uint8))
    return caches, raws


def blanks(layout: CacheLayout, pages: int, padding: int = 0, device: str = "cpu") -> Any:
    """Every shard's cache and bytes, all sentinel."""
    pairs = [blank(layout, pages, padding, device) for _ in range(layout.shards)]
    return {r: cache for r, (cache, _) in enumerate(pairs)}, {r: raw for r, (_, raw) in enumerate(pairs)}


def same(raws: dict[int, torch.Tensor], wanted: dict[int, torch.Tensor]) -> bool:
    return all(torch.equal(raws[shard], wanted[shard]) for shard in wanted)


# ---- the layout's byte ranges ----


@pytest.mark.parametrize("page_size", [128, 256])
@pytest.mark.parametrize("shards,rows,size", [(2, 64, 36), (4, 32, 18), (8, 16, 9)])
def test_bytes_per_token_and_layer(page_size: int, shards: int, rows: int, size: int) -> None:
    """NVFP4: 36, 18 and 9 bytes of a token on each rank; R = 16, 32, 64 rows, 128 for P256 over two."""
    layout = CacheLayout("nvfp4", page_size, shards)
    assert layout.page_rows == rows * page_size // 128
    for dtype, tokens in (("nvfp4", size), ("e4m3fn", 128 // shards), ("bf16", 256 // shards)):
        layout = CacheLayout(dtype, page_size, shards)
        assert layout.page_bytes == tokens * page_size
        cache = layout.empty(3, "cpu")
        assert cache.numel() * cache.element_size() == 3 * page_size * tokens
        assert {sum(size for _, size in layout.shard_ranges(r)) for r in range(shards)} == {layout.page_bytes}


@pytest.mark.parametrize("dtype,page_size,shards", EVERY)
def test_ranges_of_all_ranks_are_the_page_once(dtype: str, page_size: int, shards: int) -> None:
    layout = CacheLayout(dtype, page_size, shards)
    tokens = [list(layout.stored_tokens(shard)) for shard in range(shards)]
    assert all(len(stored) == layout.page_rows for stored in tokens) and list(itertools.chain(*tokens)) == list(
        range(page_size)
    )
    ranges = [layout.shard_ranges(shard) for shard in range(shards)]
    places = [place for part in ranges for offset, size in part for place in range(offset, offset + size)]
    assert sorted(places) == list(range(CacheLayout(dtype, page_size).page_bytes))
    for part in ranges:
        assert all(sum(one) != two[0] for one, two in itertools.pairwise(part)), "adjacent ranges are one"
        assert len(part) == (2 if dtype == "nvfp4" and layout.page_rows < 128 else 1)


@pytest.mark.parametrize("layout,shard,ranges", [
    (CacheLayout("nvfp4", 256, 2), 1, [(9216, 9216)]), (CacheLayout("nvfp4", 256), 0, [(0, 18432)]),
    (CacheLayout("nvfp4", 128, 2), 1, [(4096, 4096), (8192 + 512, 512)]),
    (CacheLayout("nvfp4", 256, 4), 2, [(9216, 4096), (9216 + 8192, 512)]),
    (CacheLayout("nvfp4", 128, 8), 7, [(112 * 64, 1024), (8192 + 112 * 8, 128)]),
    (CacheLayout("e4m3fn", 128, 4), 3, [(96 * 128, 32 * 128)]), (CacheLayout("bf16", 256, 8), 5, [(160 * 256, 32 * 256)]),
])  # fmt: skip
def test_ranges_by_hand(layout: CacheLayout, shard: int, ranges: list[tuple[int, int]]) -> None:
    assert layout.shard_ranges(shard) == ranges


@pytest.mark.parametrize("dtype,page_size,shards", EVERY)
def test_ranges_are_what_insert_stores(dtype: str, page_size: int, shards: int) -> None:
    """The replicated page's ranges, one after the other, are the page that the rank's insert wrote."""
    generator = torch.Generator().manual_seed(shards)
    keys = torch.randn(page_size, 128, generator=generator).bfloat16()
    keys[5, 3] = float("nan")
    slots = page_size + torch.randperm(page_size, generator=generator)
    whole, layout = CacheLayout(dtype, page_size), CacheLayout(dtype, page_size, shards)
    cache, raw = inserted(whole, keys, slots, 3)
    first, size = whole.page_range(cache[0], 1)
    page = raw[0][first : first + size]
    caches, raws = inserted(layout, keys, slots, 3)
    for shard in range(shards):
        first, size = layout.page_range(caches[shard], 1)
        parts = [page[offset : offset + length] for offset, length in layout.shard_ranges(shard)]
        assert torch.equal(torch.cat(parts), raws[shard][first : first + size])


@pytest.mark.parametrize("method", ["stored_tokens", "shard_ranges"])
@pytest.mark.parametrize("shard,error,message", [
    (4, ValueError, r"^shard: must be 0\.\.3 \(shards=4\), is 4"), (-1, ValueError, r"^shard: must be 0\.\.3 .* is -1"),
    (True, TypeError, "^shard: must be an int, is bool"), (1.0, TypeError, "^shard: must be an int, is float"),
    (None, TypeError, "^shard: must be an int, is NoneType"), (torch.tensor(1), TypeError, "is Tensor"),
])  # fmt: skip
def test_shards_that_a_layout_lacks(method: str, shard: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        getattr(CacheLayout("nvfp4", 128, 4), method)(shard)


# ---- reshard ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_result_is_what_insert_writes(dtype: str) -> None:
    """Any shards to any: the target's caches are those that inserts of the same keys leave, and so is the way back."""

    @few
    @given(st.sampled_from([128, 256]), st.sampled_from(SHARDS), st.sampled_from(SHARDS),
           st.tuples(*[st.sampled_from([0, 16, 1008])] * 2), st.integers(0, 2**31 - 1))  # fmt: skip
    def check(page_size: int, shards: int, others: int, padding: tuple[int, int], seed: int) -> None:
        source, target = CacheLayout(dtype, page_size, shards), CacheLayout(dtype, page_size, others)
        generator = torch.Generator().manual_seed(seed)
        keys = torch.randn(2 * page_size, 128, generator=generator).bfloat16()
        keys[0, 0], keys[1, 1], keys[2] = float("nan"), -float("inf"), 0
        slots = torch.randperm(2 * page_size, generator=generator)
        caches, raws = inserted(source, keys, slots, 2, padding[0])
        outs, out_raws = blanks(target, 2, padding[1])
        blockpick.reshard(source, caches, target, outs)
        assert same(out_raws, inserted(target, keys, slots, 2, padding[1])[1])
        back, back_raws = blanks(source, 2, padding[0])
        blockpick.reshard(target, outs, source, back)
        assert same(back_raws, raws)

    check()


@st.composite
def conversions(draw: st.DrawFn) -> dict[str, Any]:
    """Layouts, the shards that are there and wanted, and the pages."""
    shards, others = draw(st.sampled_from(SHARDS)), draw(st.sampled_from(SHARDS))
    return {
        "page_size": draw(st.sampled_from([128, 256])), "shards": (shards, others),
        "there": draw(st.sets(st.integers(0, shards - 1), min_size=1)),
        "wanted": draw(st.sets(st.integers(0, others - 1), min_size=1)),
        "padding": draw(st.tuples(*[st.sampled_from([0, 16, 4096])] * 2)),
        "pages": draw(st.none() | st.lists(st.integers(0, 2), max_size=4)),
        "given_as": draw(st.sampled_from([list, tuple, torch.tensor, lambda p: torch.tensor(p, dtype=torch.int32)])),
        "chunk_bytes": draw(st.sampled_from([1, 9000, 32 << 20])), "seed": draw(st.integers(0, 2**31 - 1)),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_bytes_of_partial_sources_and_nothing_else(dtype: str) -> None:
    """All byte patterns, some ranks, some pages (also none, in any order, repeated), chunks of a page and of all."""

    @many
    @given(conversions())
    def check(case: dict[str, Any]) -> None:
        source, target = (CacheLayout(dtype, case["page_size"], shards) for shards in case["shards"])
        caches, raws = random_caches(source, 3, case["padding"][0], case["seed"])
        outs, out_raws = blanks(target, 3 + (case["pages"] is not None), case["padding"][1])
        raws = {shard: raws[shard] for shard in case["there"]}
        strides = source.page_bytes + case["padding"][0], target.page_bytes + case["padding"][1]
        numbers = range(3) if case["pages"] is None else case["pages"]
        wanted = {r: raw.clone() for r, raw in out_raws.items()} | {
            r: expected(source, raws, target, r, out_raws[r], list(set(numbers)), strides) for r in case["wanted"]
        }
        before = {shard: raw.clone() for shard, raw in raws.items()}
        pages = case["given_as"](case["pages"]) if case["pages"] else case["pages"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(importlib.import_module("blockpick.reshard"), "CHUNK_BYTES", case["chunk_bytes"])
            blockpick.reshard(
                source, {r: caches[r] for r in case["there"]}, target, {r: outs[r] for r in case["wanted"]}, pages
            )
        assert same(out_raws, wanted) and same(raws, before)

    check()


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("dtype,page_size,shards,others", [
    (dtype, page_size, *pair) for dtype, page_size in itertools.product(DTYPES, (128, 256))
    for pair in itertools.permutations(SHARDS, 2)
])  # fmt: skip
def test_there_and_back_is_the_same(device: str, dtype: str, page_size: int, shards: int, others: int) -> None:
    """Every pair of TP sizes, parts arriving one at a time, every payload byte random; on a GPU through host memory."""
    source, target = CacheLayout(dtype, page_size, shards), CacheLayout(dtype, page_size, others)
    caches, raws = random_caches(source, 3, 0, seed=shards * others, device=device)
    outs, _ = blanks(target, 3, 32)
    for shard, cache in caches.items():
        blockpick.reshard(source, {shard: cache}, target, outs, [2, 0, 1])
    back, back_raws = blanks(source, 3, 0, device)
    for shard, out in back.items():
        blockpick.reshard(target, outs, source, {shard: out}, torch.arange(3, device=device))
    assert all(torch.equal(back_raws[shard][:-64], raws[shard][:-64]) for shard in raws)


def test_the_even_and_odd_block_are_stock_pages() -> None:
    """256-token pages over two ranks: rank r's page is the stock page of block 2 * page + r, moved whole."""
    whole, layout, stock = CacheLayout("nvfp4", 256), CacheLayout("nvfp4", 256, 2), CacheLayout("nvfp4", 128)
    caches, raws = random_caches(whole, 3, 0, seed=1)
    outs, _ = blanks(layout, 3)
    blockpick.reshard(whole, caches, layout, outs)
    blocks = raws[0][:-64].view(stock.shape(6))
    assert torch.equal(outs[0], blocks[0::2]) and torch.equal(outs[1], blocks[1::2])


def test_shards_of_one_buffer_and_caches_of_inference_mode() -> None:
    """Parts whose pages interleave in one buffer are apart; tensors made in inference mode are written outside it."""
    whole, layout = CacheLayout("nvfp4"), CacheLayout("nvfp4", 128, 2)
    caches, _ = random_caches(whole, 3, 0, seed=2)
    apart, _ = blanks(layout, 3)
    blockpick.reshard(whole, caches, layout, apart)
    with torch.inference_mode():
        buffer = torch.zeros(3, 2, 64, 72, dtype=torch.uint8)
    blockpick.reshard(whole, caches, layout, {0: buffer[:, 0], 1: buffer[:, 1]}, [2])
    assert torch.equal(buffer[2, 1], apart[1][2]) and not buffer[:2].any()
    blockpick.reshard(whole, caches, layout, {0: buffer[:, 0], 1: buffer[:, 1]})
    assert torch.equal(buffer[:, 0], apart[0]) and torch.equal(buffer[:, 1], apart[1])


class Allocations(TorchDispatchMode):
    """Bytes of the largest tensor that an op made with memory of its own."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        shared = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in shared:
            self.largest = max(self.largest, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("pages", [None, list(range(40))])
def test_no_copy_of_a_cache_in_between(pages: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What conversions allocate is a chunk, however many pages there are."""
    monkeypatch.setattr(importlib.import_module("blockpick.reshard"), "CHUNK_BYTES", 9000)
    caches, outs = random_caches(SOURCE, 40, 16, 4)[0], blanks(TARGET, 40, 16)[0]
    with Allocations() as allocations:
        blockpick.reshard(SOURCE, caches, TARGET, outs, pages)
    assert allocations.largest <= 9000 and (pages is None or allocations.largest > 4000)


# ---- refusals ----


def part(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


SHARED = part(3, 128, 72)
BAD = [
    ({"source": "nvfp4"}, TypeError, "^source: must be a CacheLayout, is str"),
    ({"target": None}, TypeError, "^target: must be a CacheLayout, is NoneType"),
    ({"source": CacheLayout("e4m3fn")}, UnsupportedConfigError, "dtype=e4m3fn page_size=128, target has dtype=nvfp4"),
    ({"source": CacheLayout("nvfp4", 256)}, UnsupportedConfigError, "page_size=256, target has .* page_size=128"),
    ({"caches": [part(3, 128, 72)]}, TypeError, "^caches: must be a mapping from shard to cache, is list"),
    ({"outs": part(3, 64, 72)}, TypeError, "^outs: must be a mapping from shard to cache, is Tensor"),
    ({"caches": {}}, ValueError, "^caches: must hold the cache of at least one shard, is empty"),
    ({"outs": {}}, ValueError, "^outs: must hold"),
    ({"caches": {1: part(3, 128, 72)}}, ValueError, r"^caches: key: must be 0\.\.0 \(shards=1\), is 1"),
    ({"caches": {True: part(3, 128, 72)}}, TypeError, "^caches: key: must be an int, is bool"),
    ({"outs": {"0": part(3, 64, 72)}}, TypeError, "^outs: key: must be an int, is str"),
    ({"outs": {2: part(3, 64, 72)}}, ValueError, r"^outs: key: must be 0\.\.1 \(shards=2\), is 2"),
    ({"caches": {0: part(3, 64, 72)}}, ValueError, r"^caches\[0\]: shape must be \[pages, 128, 72\]"),
    ({"caches": {0: part(3, 128, 72, dtype=torch.int8)}}, TypeError, r"^caches\[0\]: dtype must be torch.uint8"),
    ({"outs": {1: part(3, 128, 72)}}, ValueError, r"^outs\[1\]: shape must be \[pages, 64, 72\]"),
    ({"outs": {1: part(3, 64, 144)[..., ::2]}}, ValueError, r"^outs\[1\]: a page's interior must be dense"),
    ({"outs": {1: part(64, 72).expand(3, 64, 72)}}, ValueError, r"^outs\[1\]: page stride must be"),
    ({"outs": {1: None}}, TypeError, r"^outs\[1\]: must be a torch.Tensor, is NoneType"),
    ({"outs": {1: part(4, 64, 72)}}, ValueError, r"^outs\[1\]: must have 3 pages like caches\[0\], has 4"),
    ({"outs": {0: SHARED.view(6, 64, 72)[:3], 1: SHARED.view(6, 64, 72)[2:5]}}, ValueError,
     r"^outs\[1\]: shares memory with outs\[0\]"),
    ({"caches": {0: SHARED}, "outs": {0: SHARED.view(6, 64, 72)[:3]}}, ValueError, r"^outs\[0\]: shares memory with caches"),
    ({"pages": [0, 3]}, ValueError, r"^pages: 3 is outside caches\[0\] of 3 pages"),
    ({"pages": [-1, 0]}, ValueError, r"^pages: -1 is outside caches\[0\]"),
    ({"pages": [2], "outs": {1: part(2, 64, 72)}}, ValueError, r"^pages: 2 is outside outs\[1\] of 2 pages"),
    ({"pages": torch.tensor([2**40])}, ValueError, r"^pages: 1099511627776 is outside"),
    ({"pages": torch.tensor([[0, 1]])}, ValueError, r"^pages: must be .* has shape \[1, 2\]"),
    ({"pages": torch.tensor([0.0])}, TypeError, "^pages: must be .* has dtype torch.float32"),
    ({"pages": torch.tensor([True])}, TypeError, "^pages: must be .* has dtype torch.bool"),
    ({"pages": [0, True]}, TypeError, "^pages: must be .* holds True"),
    ({"pages": [0, 1.0]}, TypeError, "^pages: must be .* holds 1.0"),
    ({"pages": "01"}, TypeError, "^pages: must be .* holds '0'"),
    ({"pages": 1}, TypeError, "^pages: must be .* is int"),
    ({"pages": {0, 1}}, TypeError, "^pages: must be .* is set"),
]  # fmt: skip


@pytest.mark.parametrize("changes,error,message", BAD, ids=[f"{next(iter(b[0]))}-{n}" for n, b in enumerate(BAD)])
def test_bad_conversions_are_refused_and_write_nothing(changes: Any, error: type[Exception], message: str) -> None:
    """Also where the first pair of shards could have been converted."""
    good = {
        "source": SOURCE,
        "caches": random_caches(SOURCE, 3, 0, 3)[0],
        "target": TARGET,
        "outs": blanks(TARGET, 3)[0],
    }
    call = {**good, **changes}
    if isinstance(call["outs"], dict) and "outs" in changes and 1 in changes["outs"] and 0 not in changes["outs"]:
        call["outs"] = {0: good["outs"][0], **changes["outs"]}
    SHARED.zero_()
    with pytest.raises(error, match=message):
        blockpick.reshard(**call)
    assert good["outs"][0].unique().tolist() == [SENTINEL] == good["outs"][1].unique().tolist()
    assert not SHARED.any()
    for out in changes["outs"].values() if isinstance(changes.get("outs"), dict) else ():
        assert out is None or not out.any()


@pytest.mark.gpu
@pytest.mark.requires(ngpus=1)
def test_not_inside_a_graph_capture() -> None:
    caches, outs = random_caches(SOURCE, 3, 0, 3, "cuda")[0], blanks(TARGET, 3, 0, "cuda")[0]
    with (
        pytest.raises(RuntimeError, match="reshard: not allowed inside a graph capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        blockpick.reshard(SOURCE, caches, TARGET, outs)

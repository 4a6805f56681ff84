# SPDX-License-Identifier: Apache-2.0
"""Moving an index cache with the main one, and the self-test that notices what was not moved."""

from __future__ import annotations

import itertools

import pytest
import torch

import blockpick
from blockpick import CacheFault, CacheLayout, UnsupportedConfigError
from blockpick.testing.cases import DecodeCase, build

DTYPES = ["bf16", "e4m3fn", "nvfp4"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_padding", [0, 64])
def test_a_round_trip_through_host_memory_keeps_every_id(executor, dtype, page_padding):
    """Pages are copied by the layout's byte ranges to the host and back to other page numbers of another pool."""
    case = DecodeCase("moved", dtype, (2500, 641, 130), query_len=2, page_padding=page_padding)
    batch = build(case).to(executor.device)
    layout = case.layout()
    indexer = executor.indexer(layout, **case.options())
    plan = indexer.plan_decode(batch.block_table, batch.seq_lens, query_len=2)
    before = indexer.decode(plan, batch.q, batch.cache, batch.out).clone()

    def flat(cache: torch.Tensor) -> torch.Tensor:
        return torch.as_strided(
            cache.view(torch.uint8), (cache.shape[0] * cache.stride(0) * cache.element_size(),), (1,)
        )

    pages = len(batch.cache)
    host = {}
    for page in range(pages):
        offset, size = layout.page_range(batch.cache, page)
        host[page] = flat(batch.cache)[offset : offset + size].cpu()
    other = layout.empty(pages + 5, executor.device)
    other.view(torch.uint8).fill_(0x7F)  # NaN wherever nothing is restored
    for page, data in host.items():
        offset, size = layout.page_range(other, pages + 4 - page)
        flat(other)[offset : offset + size] = data.to(executor.device)
    table = (pages + 4 - batch.block_table.clamp(0, pages - 1)).contiguous()
    plan = indexer.plan_decode(table, batch.seq_lens, query_len=2)
    assert torch.equal(indexer.decode(plan, batch.q, other, torch.empty_like(batch.out)), before)


def test_fingerprints_tell_layouts_apart():
    layouts = [CacheLayout(*fields) for fields in itertools.product(DTYPES, (128, 256), (1, 2, 4, 8))]
    prints = [layout.fingerprint() for layout in layouts]
    assert len(set(prints)) == len(layouts)
    assert CacheLayout("nvfp4", 128, 2).fingerprint() == (
        "blockpick-index-k/1 dtype=nvfp4 page_size=128 shards=2 page_rows=64 segment_rows=64 page_bytes=4608 "
        "quantiser=amax6-e4m3-floor2^-9-e2m1-rne"
    )


@pytest.mark.parametrize(
    "other,named",
    [
        (CacheLayout("nvfp4", 256), ["page_size=256 there, 128 here", "page_rows=256", "page_bytes=18432"]),
        (CacheLayout("nvfp4", 128, 2), ["shards=2 there, 1 here", "segment_rows=64 there, 128 here"]),
        (CacheLayout("e4m3fn"), ["dtype=e4m3fn there, nvfp4 here", "page_bytes=16384", "quantiser=cast-rne-sat448"]),
    ],
)
def test_fingerprints_are_compared_by_field(other, named):
    """Every field that differs is named with both values; fields that agree are not."""
    mine = CacheLayout("nvfp4")
    mine.check_fingerprint(CacheLayout("nvfp4").fingerprint())
    with pytest.raises(UnsupportedConfigError) as error:
        mine.check_fingerprint(other.fingerprint())
    fields = dict(pair.split("=", 1) for pair in mine.fingerprint().split(" ")[1:])
    theirs = dict(pair.split("=", 1) for pair in other.fingerprint().split(" ")[1:])
    assert all(text in str(error.value) for text in named)
    for name, value in fields.items():
        assert (f"{name}={theirs[name]} there, {value} here" in str(error.value)) == (theirs[name] != value)


@pytest.mark.parametrize(
    "other,message",
    [
        (CacheLayout("nvfp4").fingerprint().replace("k/1", "k/2"), "format=blockpick-index-k/2 there, .*k/1 here"),
        (CacheLayout("nvfp4").fingerprint() + " tp_size=4", "tp_size=4 there, missing here"),
        (CacheLayout("nvfp4").fingerprint().removesuffix(" quantiser=amax6-e4m3-floor2^-9-e2m1-rne"),
         "quantiser=missing there"),
        ("", "format= there"),
        ("another format", "format=another there"),
        (CacheLayout("nvfp4").fingerprint() + " more", "'blockpick-index-k/1 .* more'"),
    ],
)  # fmt: skip
def test_fingerprints_of_other_formats(other, message):
    with pytest.raises(UnsupportedConfigError, match=message):
        CacheLayout("nvfp4").check_fingerprint(other)


def test_fingerprints_are_texts():
    with pytest.raises(TypeError, match=r"other: must be a fingerprint \(str\), is CacheLayout"):
        CacheLayout("nvfp4").check_fingerprint(CacheLayout("nvfp4"))


@pytest.mark.parametrize("page", [True, 1.0, "0", None, torch.tensor(1)])
def test_pages_are_integers(page):
    layout = CacheLayout("bf16")
    with pytest.raises(TypeError, match=f"page: must be an int, is {type(page).__name__}"):
        layout.page_range(layout.empty(3, "cpu"), page)


def filled(dtype: str, page_size: int = 128) -> tuple[CacheLayout, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A cache of two requests as insert leaves it; what no request uses is NaN."""
    layout = CacheLayout(dtype, page_size)
    cache = layout.empty(6, "cpu")
    cache.view(torch.uint8).fill_(0x7F if dtype != "bf16" else 0xFF)
    table = torch.tensor([[4, 1, 0], [2, 5, 99]], dtype=torch.int32)
    lens = torch.tensor([2 * page_size + 30, page_size + 1], dtype=torch.int32)
    slots = [int(table[b, t // page_size]) * page_size + t % page_size for b in range(2) for t in range(int(lens[b]))]
    keys = torch.randn(len(slots), 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    keys[3] = 0
    blockpick.insert(layout, cache, keys, torch.tensor(slots))
    return layout, cache, table, lens


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [128, 256])
def test_what_was_inserted_is_found_whole(dtype, page_size):
    layout, cache, table, lens = filled(dtype, page_size)
    assert blockpick.cache_check.check_cache(layout, cache, table, lens) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_faults_are_reported_with_page_and_row(dtype):
    layout, cache, table, lens = filled(dtype)
    indexer = blockpick.Indexer(layout, max_requests=2, max_seq_len=384, device="cpu", backend="reference")
    bad = {"bf16": ("NaN keys", 0xFF), "e4m3fn": ("NaN keys", 0xFF), "nvfp4": ("NaN scale", 0x7F)}[dtype]
    data = cache.view(torch.uint8).view(6, -1)
    row_bytes = {"bf16": 256, "e4m3fn": 128, "nvfp4": 8}[dtype]
    base = 8192 if dtype == "nvfp4" else 0
    data[1, base + 17 * row_bytes : base + 18 * row_bytes] = bad[1]
    data[5, base + 1 * row_bytes : base + 2 * row_bytes] = bad[1]  # behind the request's last token: nobody's
    table[1, 0] = 6
    assert indexer.check_cache(cache, table, lens) == [
        CacheFault(0, 1, 17, bad[0]), CacheFault(1, 6, -1, "outside the pool of 6 pages"),
    ]  # fmt: skip


def test_a_page_of_zeros_is_no_nvfp4_page():
    """What an offload that forgot the index cache restores: all-zero scales, which no insert writes."""
    layout, cache, table, lens = filled("nvfp4")
    cache[4] = 0
    faults = blockpick.cache_check.check_cache(layout, cache, table, lens)
    assert faults[:2] == [CacheFault(0, 4, 0, "zero scale"), CacheFault(0, 4, 1, "zero scale")]
    assert len(faults) == 100, "the limit"
    assert len(blockpick.cache_check.check_cache(layout, cache, table, lens, limit=1000)) == 128
    cache.view(6, -1)[2, 8192 + 5] = 0x81
    assert CacheFault(1, 2, 0, "negative scale") in blockpick.cache_check.check_cache(layout, cache, table, lens, 1000)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size,shards", [(128, 2), (256, 2), (256, 4), (128, 8)])
def test_every_rank_checks_the_tokens_that_it_stores(dtype, page_size, shards):
    """A page of which 70 tokens exist: no alarm on any rank; a fault is found where the token exists, and only there."""
    layout, tokens = CacheLayout(dtype, page_size, shards), page_size + 70
    keys = torch.randn(tokens, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
    table, lens = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    slots = torch.where(torch.arange(tokens) < page_size, page_size, -page_size) + torch.arange(tokens)
    for shard in range(shards):
        cache = layout.empty(2, "cpu")
        cache.view(torch.uint8).fill_(0xFF if dtype == "bf16" else 0x7F)
        blockpick.insert(layout, cache, keys, slots, shard=shard)
        assert blockpick.cache_check.check_cache(layout, cache, table, lens, shard=shard) == []
        first, rows = shard * layout.page_rows, layout.page_rows
        poisoned = torch.arange(first, first + rows)
        broken = cache.clone()
        broken.view(torch.uint8).fill_(0xFF if dtype != "nvfp4" else 0x7F)
        faults = blockpick.cache_check.check_cache(layout, broken, table, lens, 1000, shard=shard)
        assert [f.row for f in faults if f.page == 1] == poisoned.tolist()
        assert [f.row for f in faults if f.page == 0] == poisoned[poisoned < 70].tolist()


def test_infinite_keys_are_reported_as_what_they_may_be():
    """Contract: bf16 stores an infinite key as it comes; e4m3fn and NVFP4 saturate and leave nothing to report."""
    keys = torch.randn(4, 128, generator=torch.Generator().manual_seed(3)).bfloat16()
    keys[2, 5], keys[3, 7] = float("inf"), -float("inf")
    table, lens = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    for dtype in DTYPES:
        layout = CacheLayout(dtype)
        cache = layout.empty(1, "cpu")
        blockpick.insert(layout, cache, keys, torch.arange(4))
        faults = blockpick.cache_check.check_cache(layout, cache, table, lens)
        reason = "infinite keys, as inserted or overwritten"
        assert faults == [CacheFault(0, 0, row, reason) for row in (2, 3)] * (dtype == "bf16")


@pytest.mark.parametrize("code", [0x08, 0x80, 0x88, 0x1F, 0xF1])
def test_a_negative_zero_code_is_reported(code):
    """An insert stores zeros as +0: nibble 8 is none of its codes, in either half of a byte."""
    layout, cache, table, lens = filled("nvfp4")
    cache.view(6, -1)[4, 9 * 64 + 3] = code
    wanted = [CacheFault(0, 4, 9, "negative zero code")] if 8 in (code & 15, code >> 4) else []
    assert blockpick.cache_check.check_cache(layout, cache, table, lens) == wanted


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


BAD = [
    ({"layout": "nvfp4"}, TypeError, "layout: must be a CacheLayout, is str"),
    ({"cache": torch.zeros(2, 128, 64, dtype=torch.uint8)}, ValueError, "cache: shape must be"),
    ({"block_table": integers(0, 1)}, ValueError, r"block_table: must be \[B, W\]"),
    ({"block_table": torch.zeros(1, 2)}, TypeError, "block_table: dtype must be torch.int32"),
    ({"block_table": [[0, 1]]}, TypeError, "block_table: must be a torch.Tensor"),
    ({"seq_lens": torch.tensor([100.5])}, TypeError, "seq_lens: dtype must be torch.int32"),
    ({"seq_lens": [100]}, TypeError, "seq_lens: must be a torch.Tensor"),
    ({"seq_lens": integers(100, 100)}, ValueError, "seq_lens: must have 1 entries like block_table, has 2"),
    ({"seq_lens": integers()}, ValueError, "seq_lens: must have 1 entries"),
    ({"limit": 0}, ValueError, "limit: must be 1"),
    ({"limit": -1}, ValueError, "limit: must be 1"),
    ({"limit": True}, ValueError, "limit: must be 1"),
    ({"shard": 1}, ValueError, r"shard: must be 0..0 \(layout.shards=1\), is 1"),
    ({"shard": -1}, ValueError, "shard: must be 0..0"),
]


@pytest.mark.parametrize("changes,error,message", BAD, ids=[f"{next(iter(b[0]))}-{n}" for n, b in enumerate(BAD)])
def test_bad_arguments_of_the_check_are_refused(changes, error, message):
    good = {"layout": CacheLayout("nvfp4"), "cache": torch.zeros(2, 128, 72, dtype=torch.uint8),
            "block_table": torch.zeros(1, 2, dtype=torch.int32), "seq_lens": integers(100)}  # fmt: skip
    with pytest.raises(error, match=message):
        blockpick.cache_check.check_cache(**{**good, **changes})
    indexer = blockpick.Indexer(CacheLayout("nvfp4"), max_requests=1, device="cpu", backend="reference")
    if "layout" not in changes:
        with pytest.raises(error, match=message):
            indexer.check_cache(**{name: value for name, value in {**good, **changes}.items() if name != "layout"})


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cache_of_a_layer_that_reuses_a_selection(dtype):
    """Its layout is that of all layers, so that pages move alike, but nothing was inserted: only layers that pick pass
    the check.
    """
    layout, cache, table, lens = filled(dtype)
    indexer = blockpick.Indexer(
        layout, max_requests=2, max_seq_len=384, topk_every=2, device="cpu", backend="reference"
    )
    reusing = layout.empty(6, "cpu")
    reusing.view(torch.uint8).fill_(0x7F if dtype != "bf16" else 0xFF)
    for layer, layers_cache in enumerate((cache, reusing, cache, reusing)):
        assert layout.page_range(layers_cache, 4) == layout.page_range(cache, 4)
        faults = indexer.check_cache(layers_cache, table, lens, 1000)
        assert len(faults) == (0 if indexer.picks(layer) else int(lens.sum()))

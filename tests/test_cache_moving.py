# SPDX-License-Identifier: Apache-2.0
"""Moving an index cache with the main one, and the self-test that notices what was not moved."""

from __future__ import annotations

import itertools

import pytest
import torch

import blockpick
from blockpick import CacheFault, CacheLayout
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

# SPDX-License-Identifier: Apache-2.0
"""A self-test of an index-K cache: what can't have been inserted, and where."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .checks import check_int, check_tensor
from .layout import CacheLayout, check_layout

NAN_BYTES = (0x7F, 0xFF)


@dataclass(frozen=True)
class CacheFault:
    """Something in a request's pages that no insert of finite keys writes.

    Attributes
    ----------
    request : int
        Row of the block table.
    page : int
        Entry of the block table.
    row : int
        Token of the page; -1 where the whole page is meant.
    reason : str
        What is wrong. An insert of NaN or infinite keys leaves ``NaN keys``, ``NaN scale`` and
        ``infinite keys, as inserted or overwritten``; what any other reason says no insert writes.
    """

    request: int
    page: int
    row: int
    reason: str


def check_cache(
    layout: CacheLayout, cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, limit: int = 100, *,
    shard: int = 0,
) -> list[CacheFault]:  # fmt: skip
    """Look for rows that can't be what was inserted, among those that requests read. Synchronises: not for serving.

    An NVFP4 scale is never below 2^-9, negative, or NaN without NaN keys, and no code is a negative zero. NaN and
    infinite keys are stored as they come and are reported too: one in a block is harmless, many mean a page that was
    never written or was moved wrongly. The cache of a layer that reuses another's selection holds nothing that was
    inserted; check the layers that pick.

    Parameters
    ----------
    layout : CacheLayout
        The cache's layout.
    cache : torch.Tensor
        The cache, one rank's part where the layout has shards.
    block_table : torch.Tensor
        int32 [B, W] page ids, on the cache's device.
    seq_lens : torch.Tensor
        int32 [B] tokens of every request, on the cache's device.
    limit : int
        Faults to report at most, at least 1.
    shard : int
        The rank whose part this is, ``0 <= shard < layout.shards``; the tokens that it stores are checked.

    Returns
    -------
    list of CacheFault
        Empty where nothing is wrong.

    Raises
    ------
    TypeError, ValueError
        Naming the argument.
    """
    check_layout(layout)
    layout.check(cache)
    check_tensor("block_table", block_table, torch.int32, 2, cache.device, "[B, W]")
    check_tensor("seq_lens", seq_lens, torch.int32, 1, cache.device, "[B]")
    if seq_lens.shape[0] != block_table.shape[0]:
        raise ValueError(
            f"seq_lens: must have {block_table.shape[0]} entries like block_table, has {seq_lens.shape[0]}"
        )
    check_int("limit", limit, 1, 2**31 - 1, "faults to report")
    check_int("shard", shard, 0, layout.shards - 1, f"layout.shards={layout.shards}")
    first = shard * layout.page_rows
    faults: list[CacheFault] = []
    for request, tokens in enumerate(seq_lens.tolist()):
        pages = block_table[request, : -(-max(tokens, 0) // layout.page_size)]
        for place, page in enumerate(pages.tolist()):
            if len(faults) >= limit:
                return faults
            if not 0 <= page < cache.shape[0]:
                faults.append(CacheFault(request, page, -1, f"outside the pool of {cache.shape[0]} pages"))
                continue
            rows = min(max(tokens - place * layout.page_size - first, 0), layout.page_rows)
            for reason, broken in broken_rows(layout, cache[page]).items():
                found = (first + torch.nonzero(broken[:rows]).flatten()).tolist()
                faults += [CacheFault(request, page, row, reason) for row in found[: limit - len(faults)]]
    return faults


def broken_rows(layout: CacheLayout, page: torch.Tensor) -> dict[str, torch.Tensor]:
    """By reason, which rows of one stored page no insert of finite keys writes: bool [page_rows]."""
    if layout.dtype == "bf16":
        infinite = "infinite keys, as inserted or overwritten"
        return {"NaN keys": page.isnan().any(1), infinite: page.isinf().any(1)}
    if layout.dtype == "e4m3fn":
        return {"NaN keys": is_nan_byte(page.view(torch.uint8)).any(1)}
    segments = page.reshape(-1, layout.segment_rows * 72)
    codes = segments[:, : layout.segment_rows * 64].reshape(layout.page_rows, 64)
    scales = segments[:, layout.segment_rows * 64 :].reshape(layout.page_rows, 8)
    return {
        "zero scale": (scales & 0x7F == 0).any(1),
        "NaN scale": is_nan_byte(scales).any(1),
        "negative scale": ((scales > 0x80) & ~is_nan_byte(scales)).any(1),
        "negative zero code": ((codes & 15 == 8) | (codes >> 4 == 8)).any(1),
    }


def is_nan_byte(values: torch.Tensor) -> torch.Tensor:
    """Which e4m3fn bytes are NaN."""
    return (values == NAN_BYTES[0]) | (values == NAN_BYTES[1])

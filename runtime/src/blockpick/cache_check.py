# SPDX-License-Identifier: Apache-2.0
"""A self-test of an index-K cache: what can't have been inserted, and where."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .layout import CacheLayout

NAN_BYTES = (0x7F, 0xFF)


@dataclass(frozen=True)
class CacheFault:
    """Something in a request's pages that no insert writes.

    Attributes
    ----------
    request : int
        Row of the block table.
    page : int
        Entry of the block table.
    row : int
        Token of the page; -1 where the whole page is meant.
    reason : str
        What is wrong.
    """

    request: int
    page: int
    row: int
    reason: str


def check_cache(
    layout: CacheLayout, cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, limit: int = 100
) -> list[CacheFault]:
    """Look for rows that can't be what was inserted, among those that requests read. Synchronises: not for serving.

    An NVFP4 scale is never below 2^-9, negative, or NaN without NaN keys; keys with NaN are reported too, since one NaN
    token in a block is harmless and many mean a page that was never written or was moved wrongly.

    Parameters
    ----------
    layout : CacheLayout
        The cache's layout, of one shard.
    cache : torch.Tensor
        The cache.
    block_table : torch.Tensor
        int32 [B, W] page ids.
    seq_lens : torch.Tensor
        int32 [B] tokens of every request.
    limit : int
        Faults to report at most.

    Returns
    -------
    list of CacheFault
        Empty where nothing is wrong.

    Raises
    ------
    TypeError, ValueError
        When the cache has not this layout.
    """
    layout.check(cache)
    faults: list[CacheFault] = []
    for request, tokens in enumerate(seq_lens.tolist()):
        pages = block_table[request, : -(-max(tokens, 0) // layout.page_size)]
        for place, page in enumerate(pages.tolist()):
            if len(faults) >= limit:
                return faults
            if not 0 <= page < cache.shape[0]:
                faults.append(CacheFault(request, page, -1, f"outside the pool of {cache.shape[0]} pages"))
                continue
            rows = min(tokens - place * layout.page_size, layout.page_size)
            for reason, broken in broken_rows(layout, cache[page]).items():
                found = torch.nonzero(broken[: min(rows, layout.page_rows)]).flatten().tolist()
                faults += [CacheFault(request, page, row, reason) for row in found[: limit - len(faults)]]
    return faults


def broken_rows(layout: CacheLayout, page: torch.Tensor) -> dict[str, torch.Tensor]:
    """By reason, which rows of one stored page no insert of finite keys writes: bool [page_rows]."""
    if layout.dtype == "bf16":
        return {"NaN keys": page.isnan().any(1), "infinite keys": page.isinf().any(1)}
    if layout.dtype == "e4m3fn":
        return {"NaN keys": is_nan_byte(page.view(torch.uint8)).any(1)}
    segments = page.reshape(-1, layout.segment_rows * 72)
    scales = segments[:, layout.segment_rows * 64 :].reshape(layout.page_rows, 8)
    return {
        "zero scale": (scales & 0x7F == 0).any(1),
        "NaN scale": is_nan_byte(scales).any(1),
        "negative scale": ((scales > 0x80) & ~is_nan_byte(scales)).any(1),
    }


def is_nan_byte(values: torch.Tensor) -> torch.Tensor:
    """Which e4m3fn bytes are NaN."""
    return (values == NAN_BYTES[0]) | (values == NAN_BYTES[1])

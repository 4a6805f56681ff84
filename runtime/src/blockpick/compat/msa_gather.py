# SPDX-License-Identifier: Apache-2.0
"""History pages of NVFP4 index keys, gathered and made e4m3 for a prefill indexer that reads e4m3 pages."""

from __future__ import annotations

import functools

import torch

from ..layout import BLOCK_TOKENS, HEAD_DIM, CacheLayout
from .msa_checks import check_cache, check_tensor

NVFP4 = CacheLayout("nvfp4")
CODE_BYTES = BLOCK_TOKENS * HEAD_DIM // 2
GROUP_BYTES = 8  # code bytes that share a scale
STEP_PAGES = 512  # pages converted at once: bounds what is held beside the output (about 28 MiB)
E4M3_NAN = 0x7F


def minimax_m3_gather_nvfp4_index_k_fp8(
    kv: torch.Tensor, block_table: torch.Tensor, num_pages: torch.Tensor, page_offsets: torch.Tensor, max_pages: int,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """Dequantise pages of a paged NVFP4 cache into e4m3 pages: ``out[page_offsets[b] + j] = kv[block_table[b, j]]``.

    For every request b and j < num_pages[b]. A product code * scale is rounded to e4m3, nearest even, saturating at
    448; a NaN scale gives 0x7F. Pages of ``out`` that nothing is gathered into stay as they are.

    Parameters
    ----------
    kv : torch.Tensor
        uint8 [pages, 128, 72], NVFP4 pages, dense inside, page stride a multiple of 16 bytes.
    block_table : torch.Tensor
        int32 [B, W], any row stride. Page ids; entries from ``num_pages[b]`` on are not used, ids are clamped into the
        pool.
    num_pages : torch.Tensor
        int32 [B] on the device of ``kv``. Pages to gather of every request, its history: ``(seq_len - 1) // 128``.
    page_offsets : torch.Tensor
        int32 or int64 [B] (longer ones are cut: the sums' total may follow). Where every request's pages begin in
        ``out``; ranges don't overlap.
    max_pages : int
        A bound of ``num_pages`` that the host knows; pages beyond it are not gathered.
    out : torch.Tensor
        e4m3fn [capacity, 128, 128] on the device of ``kv``, contiguous. Pages beyond the capacity are dropped.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, before anything is written.

    Notes
    -----
    Torch operators, without a host synchronisation: works on every device. Takes the time of the smaller of the
    capacity and ``B * max_pages``, so pass the part of a workspace that a chunk uses.
    """
    _check(kv, block_table, num_pages, page_offsets, max_pages, out)
    max_pages = min(max_pages, block_table.shape[1])
    if max_pages == 0 or out.shape[0] == 0:
        return
    source = _sources(block_table[:, :max_pages], num_pages, page_offsets, out.shape[0])
    slots = (source < 0).to(torch.uint8).argsort(stable=True)[: block_table.shape[0] * max_pages]  # used ones first
    table = _products(kv.device)
    flat, stored = (
        out.view(torch.uint8).flatten(1),
        torch.as_strided(kv, (kv.shape[0], NVFP4.page_bytes), (kv.stride(0), 1)),
    )
    for step in slots.split(STEP_PAGES):
        pages = source[step]
        values = _dequantise(stored[pages.clamp(0, kv.shape[0] - 1)], table)
        flat[step] = torch.where((pages >= 0)[:, None], values, flat[step])


def _check(
    kv: torch.Tensor, block_table: torch.Tensor, num_pages: torch.Tensor, page_offsets: torch.Tensor, max_pages: int,
    out: torch.Tensor,
) -> None:  # fmt: skip
    check_tensor(kv, "kv", torch.uint8, None, contiguous=False)
    check_cache(kv, NVFP4, kv.device, "kv")
    check_tensor(block_table, "block_table", torch.int32, kv.device, contiguous=False)
    if block_table.dim() != 2:
        raise ValueError("block_table must have shape [batch, max_blocks]")
    batch = block_table.shape[0]
    check_tensor(num_pages, "num_pages", torch.int32, kv.device, contiguous=False)
    if tuple(num_pages.shape) != (batch,):
        raise ValueError(f"num_pages must have shape [{batch}], got {tuple(num_pages.shape)}")
    wide = isinstance(page_offsets, torch.Tensor) and page_offsets.dtype == torch.int64
    check_tensor(page_offsets, "page_offsets", torch.int64 if wide else torch.int32, kv.device, contiguous=False)
    if page_offsets.dim() != 1 or page_offsets.shape[0] < batch:
        raise ValueError(f"page_offsets must have shape [{batch}], got {tuple(page_offsets.shape)}")
    if isinstance(max_pages, bool) or not isinstance(max_pages, int) or max_pages < 0:
        raise ValueError(f"max_pages must be a non-negative integer, got {max_pages!r}")
    check_tensor(out, "out", torch.float8_e4m3fn, kv.device)
    if out.dim() != 3 or tuple(out.shape[1:]) != (BLOCK_TOKENS, HEAD_DIM):
        raise ValueError(f"out must have shape [pages, {BLOCK_TOKENS}, {HEAD_DIM}], got {tuple(out.shape)}")


def _sources(
    block_table: torch.Tensor, num_pages: torch.Tensor, page_offsets: torch.Tensor, capacity: int
) -> torch.Tensor:
    """The page that goes into each page of the output, clamped at 0, or -1: int64 [capacity]."""
    batch, width = block_table.shape
    column = torch.arange(width, device=block_table.device)
    slot = page_offsets[:batch, None].long() + column
    wanted = (column < num_pages[:, None]) & (slot >= 0) & (slot < capacity)
    source = torch.full((capacity + 1,), -1, dtype=torch.int64, device=block_table.device)  # the last takes the rest
    source[torch.where(wanted, slot, capacity).flatten()] = block_table.long().clamp(min=0).flatten()
    return source[:capacity]


@functools.cache
def _products(device: torch.device) -> torch.Tensor:
    """e4m3 bytes of two codes times a scale, by ``scale * 256 + code byte``: int16 [65536], the low byte's dim first.

    A product has at most 6 significant bits: exact in fp32, so that one rounding happens.
    """
    positive = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=device)
    codes = torch.cat([positive, -positive])
    scales = torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()
    exact = scales[:, None] * codes
    rounded = exact.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    single = torch.where(exact.isnan(), E4M3_NAN, rounded)
    byte = torch.arange(256, device=device)
    pairs = torch.stack((single[:, byte & 15], single[:, byte >> 4]), -1)
    return pairs.view(torch.int16).flatten().clone()


def _dequantise(pages: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Stored pages, uint8 [N, 9216], to e4m3 bytes [N, 16384]."""
    codes = pages[:, :CODE_BYTES].unflatten(1, (-1, GROUP_BYTES))
    index = pages[:, CODE_BYTES:, None].int() * 256 + codes
    return table[index].view(torch.uint8).flatten(1)

# SPDX-License-Identifier: Apache-2.0
"""The oracle: the contract in torch, in float64 where it computes. Shares no code with the kernels it checks."""

from __future__ import annotations

import torch

from ..layout import BLOCK_TOKENS, CacheLayout

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3_MAX = 448.0
BF16_MAX = 3.3895313892515355e38


def e4m3_values() -> torch.Tensor:
    """All non-negative finite e4m3 values in byte order: float64 [127]."""
    return torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()


def round_to(grid: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """Index of the ``grid`` value nearest to each of ``size``; halfway goes to the even index.

    ``grid`` is ascending and starts at 0; a value's last mantissa bit is its index's, so even index = even mantissa.
    """
    high = torch.searchsorted(grid, size.contiguous()).clamp(1, len(grid) - 1)
    low = high - 1
    below, above = size - grid[low], grid[high] - size
    take_low = (below < above) | ((below == above) & (low % 2 == 0))
    return torch.where(take_low, low, high)


def e4m3_bytes(x: torch.Tensor) -> torch.Tensor:
    """Values to e4m3fn bytes: nearest even, saturating at 448, NaN as 0x7F."""
    x = x.double()
    code = round_to(e4m3_values().to(x.device), x.abs().nan_to_num(0.0, posinf=E4M3_MAX).clamp(max=E4M3_MAX))
    code = code + 128 * torch.signbit(x)
    return torch.where(x.isnan(), 0x7F, code).to(torch.uint8)


def quantise_nvfp4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 [..., 128] -> code bytes uint8 [..., 64] (low nibble = even dim) and scale bytes uint8 [..., 8]."""
    groups = x.float().unflatten(-1, (8, 16))
    broken = groups.isnan().any(-1)
    groups = groups.nan_to_num(0.0).clamp(-BF16_MAX, BF16_MAX)
    amax = groups.abs().amax(-1)
    wanted = (torch.maximum(amax, torch.tensor(1e-12)) / torch.tensor(6.0)).clamp(2.0**-9, E4M3_MAX)
    scale_code = round_to(e4m3_values().to(x.device), wanted.double())
    scale = e4m3_values().to(x.device)[scale_code].float()
    ratio = groups / scale[..., None]
    magnitude = round_to(torch.tensor(E2M1, dtype=torch.float64, device=x.device), ratio.abs().double().clamp(max=6.0))
    code = magnitude + 8 * ((ratio < 0) & (magnitude > 0))
    code = torch.where(broken[..., None], 0, code).flatten(-2)
    scale_code = torch.where(broken, 0x7F, scale_code)
    return (code[..., 0::2] | (code[..., 1::2] << 4)).to(torch.uint8), scale_code.to(torch.uint8)


def insert_reference(
    layout: CacheLayout, cache: torch.Tensor, index_k: torch.Tensor, slot_mapping: torch.Tensor, shard: int = 0
) -> None:
    """Store ``index_k`` [T, 128] by slot, token by token."""
    if layout.dtype == "nvfp4":
        codes, scales = quantise_nvfp4(index_k)
    elif layout.dtype == "e4m3fn":
        stored = e4m3_bytes(index_k).view(torch.float8_e4m3fn)
    else:
        stored = index_k
    for t, slot in enumerate(slot_mapping.tolist()):
        page, token = divmod(slot, layout.page_size)
        owner, row = divmod(token, layout.page_rows)
        if slot < 0 or page >= cache.shape[0] or owner != shard:
            continue
        if layout.dtype != "nvfp4":
            cache[page, row] = stored[t]
            continue
        segment, row = divmod(row, layout.segment_rows)
        whole = cache[page].view(-1)[segment * layout.segment_rows * 72 :]
        whole[row * 64 : row * 64 + 64] = codes[t]
        first = layout.segment_rows * 64 + row * 8
        whole[first : first + 8] = scales[t]


def sparse_row(
    ids: list[int], position: int, attention_row: torch.Tensor, block_page_stride: int
) -> tuple[list[int], int]:
    """Page entries and context length of one row of picked ids for a query at ``position``."""
    if position < 0:
        return [0] * (len(ids) * 8), 0
    own = position // BLOCK_TOKENS
    picked = [block for block in ids if block >= 0]
    full = [block for block in picked if block != own]
    pages = [
        int(attention_row[block]) * block_page_stride + j for block in full + [own] * (own in picked) for j in range(8)
    ]
    tokens = len(full) * 128 + position + 1 - own * 128 if own in picked else min(len(picked) * 128, position + 1)
    return pages + [0] * (len(ids) * 8 - len(pages)), tokens


def norm_rope_values(
    x: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 [T, H * 128] -> float64 [T, H, 128]: Gemma's RMSNorm, then NeoX rotation of the first 64 dims; and the sum
    of the magnitudes of each value's terms, which a rounding error is relative to.

    Squares are summed in fp32 by contract: a sum of 2^128 or more is infinite, and its row 0.
    """
    heads = x.double().unflatten(-1, (-1, 128))
    total = heads.square().sum(-1, keepdim=True)
    total = torch.where(total >= 2.0**128, float("inf"), total)
    normed = heads * (1 / (total / 128 + eps).sqrt()) * (1 + weight.double())
    cos, sin = cos_sin[positions.clamp(0, len(cos_sin) - 1)].double()[:, None].chunk(2, -1)
    first, second, rest = normed.split((32, 32, 64), -1)
    values = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
    first, second, rest, cos, sin = (t.abs() for t in (first, second, rest, cos, sin))
    return values, torch.cat((first * cos + second * sin, second * cos + first * sin, rest), -1)


def norm_rope_reference(
    x: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, eps: float
) -> torch.Tensor:
    """bf16 [T, H * 128] -> bf16 [T, H, 128]: :func:`norm_rope_values`, rounded once."""
    return nearest_bf16(norm_rope_values(x, weight, positions, cos_sin, eps)[0])


def nearest_bf16(x: torch.Tensor) -> torch.Tensor:
    """float64 to the nearest bf16, halfway to even; torch's own conversion rounds to fp32 first."""
    exponent = torch.frexp(x)[1].clamp(min=-125)  # subnormal numbers have the step of the smallest normal ones
    step = 2.0 ** (exponent - 8).double()
    return torch.where(x.isfinite(), (x / step).round() * step, x).bfloat16()


def dequantise(layout: CacheLayout, pages: torch.Tensor, rounding: str = "exact") -> torch.Tensor:
    """Stored pages [N, R, .] -> float64 [N, R, 128], NVFP4 products rounded as ``rounding`` says."""
    if layout.dtype != "nvfp4":
        return pages.double()
    segments = pages.reshape(len(pages), -1, layout.segment_rows * 72)
    code_bytes = segments[..., : layout.segment_rows * 64].unflatten(-1, (layout.segment_rows, 64))
    scale_bytes = segments[..., layout.segment_rows * 64 :].unflatten(-1, (layout.segment_rows, 8))
    codes = torch.stack((code_bytes & 15, code_bytes >> 4), -1).flatten(-2).long()
    values = torch.tensor(E2M1 + tuple(-v for v in E2M1), dtype=torch.float64, device=pages.device)[codes]
    products: torch.Tensor = values * scale_bytes.contiguous().view(torch.float8_e4m3fn).double().repeat_interleave(
        16, -1
    )
    if rounding == "e4m3":
        products = e4m3_bytes(products).view(torch.float8_e4m3fn).double()
    return products.flatten(1, 2)


def query_positions(seq_lens: torch.Tensor, query_len: int, table_tokens: int) -> torch.Tensor:
    """Position of every query, int64 [B, L]; negative = the row is empty. Lengths beyond the table are clamped."""
    position = seq_lens.long()[:, None] - query_len + torch.arange(query_len, device=seq_lens.device)
    return position.clamp(max=table_tokens - 1)


def block_scores(
    layout: CacheLayout, cache: torch.Tensor, q: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor,
    query_len: int, rounding: str = "exact", absolute: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Scores of all visible blocks, float64 [B, L, H, W * blocks_per_page]; NaN where a block is not visible or all
    NaN.

    With ``absolute`` the magnitudes of queries and keys are multiplied: the size that a rounding error is relative to.
    """
    requests, width = block_table.shape
    heads = q.shape[1]
    positions = query_positions(seq_lens, query_len, width * layout.page_size)
    queries = q[: requests * query_len].view(requests, query_len, heads, -1).double()
    if absolute:
        queries = queries.abs()
    blocks = width * layout.blocks_per_page
    scores = torch.full((requests, query_len, heads, blocks), float("nan"), dtype=torch.float64, device=q.device)
    for b in range(requests):
        tokens = int(positions[b, -1]) + 1
        if tokens <= 0:
            continue
        pages = block_table[b, : -(-tokens // layout.page_size)].long().clamp(0, cache.shape[0] - 1)
        keys = dequantise(layout, cache[pages], rounding).flatten(0, 1)[:tokens]
        if absolute:
            keys = keys.abs()
        for i in range(query_len):
            visible = int(positions[b, i]) + 1
            if visible <= 0:
                continue
            dots = keys[:visible] @ queries[b, i].T
            numbers = torch.where(dots.isnan(), float("-inf"), dots)
            count = -(-visible // BLOCK_TOKENS)
            padding = (0, 0, 0, count * BLOCK_TOKENS - visible)
            best = torch.nn.functional.pad(numbers, padding, value=float("-inf")).unflatten(0, (count, -1)).amax(1)
            all_nan = torch.nn.functional.pad(dots.isnan(), padding, value=True).unflatten(0, (count, -1)).all(1)
            scores[b, i, :, :count] = torch.where(all_nan, float("nan"), best).T
    return scores


def select_blocks(
    scores: torch.Tensor, position: int, topk: int, init_blocks: int, local_blocks: int, order: str, empty_row: str
) -> list[int]:
    """The ids of one row: ``scores`` [blocks] of one query and head at ``position``."""
    if position < 0:
        return [0 if empty_row == "block_zero" else -1] + [-1] * (topk - 1)
    own = position // BLOCK_TOKENS
    ids = torch.arange(own + 1, device=scores.device)
    local = ids > own - local_blocks
    init = (ids < init_blocks) & ~local
    forced = local | init
    # stable sorts, least significant criterion first; ids start ascending
    value = torch.where(forced | scores[: own + 1].isnan(), 0.0, scores[: own + 1].double())
    rank = value.sort(descending=True, stable=True).indices
    nan = (scores[: own + 1].isnan() & ~forced)[rank]
    rank = rank[nan.to(torch.int8).sort(stable=True).indices]
    kind = (2 * init + 1 * local)[rank]
    rank = rank[kind.sort(descending=True, stable=True).indices]
    picked = rank[:topk].tolist()
    if order == "ascending" or (order == "local_last" and own < topk):
        picked.sort()
    elif order == "local_last":
        picked = [block for block in picked if block != own] + [own]
    return picked + [-1] * (topk - len(picked))

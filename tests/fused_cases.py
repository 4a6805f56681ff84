# SPDX-License-Identifier: Apache-2.0
"""Fused QKV rows with their slots, positions and weights, and what every executor must make of them."""

from __future__ import annotations

from typing import Any

import torch

from blockpick import CacheLayout
from blockpick.testing.cases import expect
from blockpick.testing.reference import e4m3_bytes, insert_reference, nearest_bf16, norm_rope_values

EPS = 1e-6
PAGES = 5
SENTINEL = 0xA5


def rows(num_tokens: int, num_heads: int, device: str, seed: int = 0) -> dict[str, Any]:
    """Arguments of a call. Columns that are not the index queries' and key's are NaN; some tokens have no slot."""
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.full((num_tokens, 256 + num_heads * 128 + 64 + 128 + 24), float("nan"), dtype=torch.bfloat16)
    q_column, k_column = 256, 256 + num_heads * 128 + 64
    scale = torch.rand(num_tokens, 1, generator=generator) * 4
    qkv[:, q_column : q_column + num_heads * 128] = (
        torch.randn(num_tokens, num_heads * 128, generator=generator) * scale
    )
    qkv[:, k_column : k_column + 128] = torch.randn(num_tokens, 128, generator=generator) * scale
    slots = torch.randperm(PAGES * 128, generator=generator)[:num_tokens]
    slots[1::7] = -1
    angles = torch.rand(300, 32, generator=generator) * 6.3
    weights = torch.randn(2, 128, generator=generator) * 0.3
    positions = torch.randint(0, 300, (num_tokens,), generator=generator)
    positions[1::7] = 1 << 40  # of padding: never dereferenced
    tensors = {
        "qkv": qkv, "slot_mapping": slots, "positions": positions,
        "cos_sin": torch.cat((angles.cos(), angles.sin()), 1).bfloat16(), "q_weight": weights[0].bfloat16(),
        "k_weight": weights[1].bfloat16(),
    }  # fmt: skip
    moved = {name: tensor.to(device) for name, tensor in tensors.items()}
    return {**moved, "q_column": q_column, "k_column": k_column, "eps": EPS}


def run(executor: Any, layout: CacheLayout, call: dict[str, Any], num_heads: int, shard: int = 0) -> tuple[Any, Any]:
    """Cache (all sentinel before) and queries of a call on an executor."""
    device, tokens = call["qkv"].device, call["qkv"].shape[0]
    cache = layout.empty(PAGES * 128 // layout.page_size, device)
    cache.view(torch.uint8).fill_(SENTINEL)
    q = torch.empty(tokens, num_heads, 128, device=device, dtype=torch.bfloat16).to(layout.query_dtype)
    q.view(torch.uint8).fill_(SENTINEL)
    tensors = [call[n] for n in ("slot_mapping", "positions", "cos_sin", "q_weight", "k_weight")]
    options = {name: call[name] for name in ("q_column", "k_column", "eps")}
    executor.fused_insert(layout, cache, call["qkv"], q, *tensors, shard=shard, **options)
    return cache.cpu(), q.cpu()


def units_apart(got: torch.Tensor, wanted: torch.Tensor) -> int:
    """Largest distance of two bf16 tensors in units of the last place; NaN must meet NaN."""
    expect(torch.equal(got.isnan(), wanted.isnan()), "NaN where there should be none, or none where it should be")
    ordered = [t.nan_to_num(0.0).view(torch.int16).int() for t in (got, wanted)]
    ordered = [torch.where(t < 0, -(t & 0x7FFF), t) for t in ordered]
    return int((ordered[0] - ordered[1]).abs().max())


def check_rounded(got: torch.Tensor, values: torch.Tensor, sizes: torch.Tensor, what: str) -> None:
    """bf16 results are float64's values rounded to nearest even, to the bit, except where a value lies so near to the
    middle of two bf16 numbers that fp32's own error decides: 2^-18 of the magnitudes it is a sum of.
    """
    expect(torch.equal(got.isnan(), values.isnan()), f"{what}: NaN where there should be none, or none where it should")
    error = sizes.nan_to_num(0.0) * 2.0**-18
    numbers, got = values.nan_to_num(0.0), got.nan_to_num(0.0)
    least, most = nearest_bf16(numbers - error), nearest_bf16(numbers + error)
    wrong = (got < least) | (got > most)
    expect(
        not wrong.any(),
        f"{what}: {int(wrong.sum())} of {wrong.numel()} not rounded to nearest: {got[wrong][:4].tolist()} for "
        f"{values[wrong][:4].tolist()}",
    )
    decided = float((least == most).double().mean())
    expect(decided > 0.9, f"{what}: only {decided:.0%} of the values are decided")


def expected(call: dict[str, Any], name: str, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 values and sizes of a call's queries ("q") or keys ("k")."""
    first = call[f"{name}_column"]
    columns = call["qkv"][:, first : first + heads * 128]
    return norm_rope_values(columns, call[f"{name}_weight"], call["positions"], call["cos_sin"], call["eps"])


def check_fused_insert(
    executor: Any, dtype: str, num_heads: int = 2, num_tokens: int = 37, seed: int = 0,
    call: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """bf16 results are float64's, rounded; what is stored equals the quantiser's bytes of the executor's own bf16
    results, and nothing else is written.
    """
    call = call or rows(num_tokens, num_heads, executor.device, seed)
    cpu = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    plain = CacheLayout("bf16")
    keys, queries = run(executor, plain, call, num_heads)
    slots = cpu["slot_mapping"]
    stored = keys.view(-1, 128)[slots.clamp(min=0)]
    check_rounded(queries, *expected(cpu, "q", num_heads), "queries")
    values, sizes = (t[slots >= 0, 0] for t in expected(cpu, "k", 1))
    check_rounded(stored[slots >= 0], values, sizes, "keys")

    layout = CacheLayout(dtype)
    cache, q_out = run(executor, layout, call, num_heads)
    wanted = layout.empty(PAGES, "cpu")
    wanted.view(torch.uint8).fill_(SENTINEL)
    insert_reference(layout, wanted, stored, slots)
    expect(torch.equal(cache.view(torch.uint8), wanted.view(torch.uint8)), f"{dtype}: stored bytes")
    as_stored = queries if layout.query_dtype == torch.bfloat16 else e4m3_bytes(queries)
    expect(torch.equal(q_out.view(torch.uint8), as_stored.view(torch.uint8)), f"{dtype}: query bytes")

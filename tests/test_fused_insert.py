# SPDX-License-Identifier: Apache-2.0
"""qk_norm_rope_insert: section 1.7 of the contract, on every executor."""

from __future__ import annotations

import pytest
import torch
from fused_cases import EPS, PAGES, SENTINEL, check_fused_insert, rows, run, units_apart

import blockpick
from blockpick import CacheLayout
from blockpick.testing.reference import insert_reference

DTYPES = ["bf16", "e4m3fn", "nvfp4"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_conformance_of_every_target(any_executor, dtype):
    check_fused_insert(any_executor, dtype)


@pytest.mark.parametrize("num_heads,num_tokens", [(1, 1), (4, 16), (4, 33), (1, 200)])
def test_heads_and_partial_tiles(executor, num_heads, num_tokens):
    check_fused_insert(executor, "nvfp4", num_heads, num_tokens, seed=num_tokens)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size,shards", [(128, 4), (256, 1), (256, 2), (128, 8)])
def test_shards_store_their_own_rows_only(one_executor, dtype, page_size, shards):
    """Every rank stores its part of the page, and together they are the plain insert of the same bf16 keys."""
    call = rows(60, 1, one_executor.device, seed=3)
    keys, _ = run(one_executor, CacheLayout("bf16"), call, 1)
    slots = call["slot_mapping"].cpu()
    stored = keys.view(-1, 128)[slots.clamp(min=0)]
    layout = CacheLayout(dtype, page_size, shards)
    for shard in range(shards):
        cache, _ = run(one_executor, layout, call, 1, shard)
        wanted = layout.empty(len(cache), "cpu")
        wanted.view(torch.uint8).fill_(SENTINEL)
        insert_reference(layout, wanted, stored, slots, shard)
        assert torch.equal(cache.view(torch.uint8), wanted.view(torch.uint8))


def test_nan_and_infinity(executor):
    """A NaN spreads over its head (the norm's mean); an infinity leaves zeros, and NaN where it meets the zero factor:
    in its own dim and in the one that turns with it. Other heads and tokens keep their values.
    """
    call = rows(20, 2, executor.device, seed=5)
    whole, q_whole = run(executor, CacheLayout("bf16"), call, 2)
    call["qkv"][4, call["k_column"] + 3] = float("nan")
    call["qkv"][5, call["q_column"] + 130] = float("inf")
    for dtype, nan_byte in (("bf16", None), ("e4m3fn", 0x7F), ("nvfp4", 0x7F)):
        layout = CacheLayout(dtype)
        cache, q = run(executor, layout, call, 2)
        slot = int(call["slot_mapping"][4])
        page, token = divmod(slot, 128)
        if dtype == "bf16":
            rest = torch.ones(PAGES * 128, dtype=torch.bool)
            rest[slot] = False
            assert cache[page, token].isnan().all()
            assert torch.equal(cache.view(-1, 128)[rest].view(torch.int16), whole.view(-1, 128)[rest].view(torch.int16))
            assert torch.nonzero(q[5, 1].isnan()).flatten().tolist() == [2, 34]
            assert q[5, 1].nan_to_num(0.0).unique().tolist() == [0.0] and torch.equal(q[5, 0], q_whole[5, 0])
        elif dtype == "e4m3fn":
            assert cache.view(torch.uint8)[page, token].unique().tolist() == [nan_byte]
            assert q.view(torch.uint8)[5, 1, [2, 34]].tolist() == [0x7F, 0x7F], "NaN is never written as 0xFF"
        else:
            stored = cache[page].view(-1)
            assert stored[8192 + token * 8 : 8192 + token * 8 + 8].unique().tolist() == [nan_byte]
            assert stored[token * 64 : token * 64 + 64].unique().tolist() == [0]


def test_an_unfused_chain_differs_by_a_unit_at_most(one_executor):
    """The chain that engines run without the fused kernel: norm in fp32 rounded to bf16, then rotation in bf16 inputs."""
    call = rows(50, 1, "cpu", seed=7)
    x = call["qkv"][:, call["k_column"] : call["k_column"] + 128].float()
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * (1 + call["k_weight"].float())
    normed = normed.bfloat16().float()
    positions = call["positions"].clamp(max=len(call["cos_sin"]) - 1)
    cos, sin = call["cos_sin"][positions].float().chunk(2, -1)
    first, second = normed[:, :32], normed[:, 32:64]
    chain = torch.cat((first * cos - second * sin, second * cos + first * sin, normed[:, 64:]), -1).bfloat16()
    cache, _ = run(one_executor, CacheLayout("bf16"), {k: v.to(one_executor.device) if isinstance(v, torch.Tensor) else v
                                                       for k, v in call.items()}, 1)  # fmt: skip
    slots = call["slot_mapping"]
    got = cache.view(-1, 128)[slots.clamp(min=0)]
    kept = slots >= 0
    assert units_apart(got[kept, 64:], chain[kept, 64:]) <= 1, "not rotated"
    size = normed[kept, :64].abs().amax(-1, keepdim=True)
    error = (got[kept, :64].float() - chain[kept, :64].float()).abs() / size
    assert float(error.max()) <= 2.0**-7, "rotated: one unit of the larger of the two dims"


def good_call(**changes):
    """Arguments of a call on the reference, with changes."""
    call = rows(6, 2, "cpu")
    layout = CacheLayout("e4m3fn")
    call |= {"layout": layout, "cache": layout.empty(PAGES, "cpu"),
             "q_out": torch.empty(6, 2, 128, dtype=torch.float8_e4m3fn)}  # fmt: skip
    return {**call, **changes}


BAD = [
    ({"q_out": torch.empty(6, 2, 128, dtype=torch.bfloat16)}, TypeError, "q_out: dtype must be torch.float8_e4m3fn"),
    ({"q_out": torch.empty(6, 3, 128).to(torch.float8_e4m3fn)}, ValueError, "q_out: must be .*H in 1, 2, 4"),
    ({"q_out": torch.empty(5, 2, 128).to(torch.float8_e4m3fn)}, ValueError, r"q_out: must be \[6, H, 128\]"),
    ({"qkv": torch.zeros(6, 900)}, TypeError, "qkv: dtype must be torch.bfloat16"),
    ({"qkv": torch.zeros(900, 6, dtype=torch.bfloat16).t()}, ValueError, "qkv: the last stride must be 1"),
    ({"slot_mapping": torch.zeros(5, dtype=torch.int64)}, ValueError, "slot_mapping: must have 6 entries"),
    ({"slot_mapping": torch.zeros(6, dtype=torch.int32)}, TypeError, "slot_mapping: dtype must be torch.int64"),
    ({"positions": torch.zeros(7, dtype=torch.int64)}, ValueError, "positions: must have 6 entries"),
    ({"cos_sin": torch.zeros(4, 128, dtype=torch.bfloat16)}, ValueError, r"cos_sin: must be \[P, 64\]"),
    ({"q_weight": torch.zeros(64, dtype=torch.bfloat16)}, ValueError, r"q_weight: must be \[128\]"),
    ({"q_column": 700}, ValueError, "q_column: must be 0..472"),
    ({"q_column": 4}, ValueError, "q_column: must be a multiple of 8"),
    ({"k_column": -8}, ValueError, "k_column: must be 0..600"),
    ({"shard": 1}, ValueError, "shard: must be 0..0"),
    ({"backend": "magic"}, blockpick.UnsupportedConfigError, "backend='magic'"),
]  # fmt: skip


@pytest.mark.parametrize("changes,error,message", BAD, ids=[next(iter(bad[0])) + str(i) for i, bad in enumerate(BAD)])
def test_bad_calls_are_refused_and_write_nothing(changes, error, message):
    call = good_call(**changes)
    call["cache"].view(torch.uint8).fill_(SENTINEL)
    with pytest.raises(error, match=message):
        blockpick.qk_norm_rope_insert(**call)
    assert call["cache"].view(torch.uint8).unique().tolist() == [SENTINEL]


def test_no_tokens_are_no_launch(one_executor):
    cache, q = run(one_executor, CacheLayout("bf16"), rows(0, 1, one_executor.device), 1)
    assert cache.view(torch.uint8).unique().tolist() == [SENTINEL] and q.shape == (0, 1, 128)

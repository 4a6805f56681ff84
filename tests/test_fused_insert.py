# SPDX-License-Identifier: Apache-2.0
"""qk_norm_rope_insert: section 1.7 of the contract, on every executor."""

from __future__ import annotations

import pytest
import torch
from executors import RecordedKernel
from fused_cases import EPS, PAGES, SENTINEL, check_fused_insert, rows, run, units_apart

import blockpick
from blockpick import CacheLayout
from blockpick.ops import fused_insert
from blockpick.testing.reference import insert_reference, nearest_bf16

DTYPES = ["bf16", "e4m3fn", "nvfp4"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_conformance_of_every_target(any_executor, dtype):
    check_fused_insert(any_executor, dtype)


@pytest.mark.parametrize("num_heads,num_tokens", [(1, 1), (4, 16), (4, 33), (1, 200)])
def test_heads_and_partial_tiles(executor, num_heads, num_tokens):
    check_fused_insert(executor, "nvfp4", num_heads, num_tokens, seed=num_tokens)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size,shards", [(256, 1), (128, 2), (128, 4), (128, 8), (256, 2), (256, 4), (256, 8)])
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


EDGES = {  # magnitude of a row's numbers, and whether fp32's sum of their squares is infinite
    "2^59": (2.0**59, False), "2^61": (2.0**61, True), "2^63": (1.41015625 * 2.0**63, True), "2^64": (2.0**64, True),
    "2^70": (2.0**70, True), "largest": (3.3895313892515355e38, True), "2^-12": (2.0**-12, False),
    "2^-70": (2.0**-70, False), "subnormal": (1e-39, False),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_every_magnitude(executor, dtype):
    """Squares are fp32: from 2^64 on they are infinite, and so is the sum of 128 of 2^121; such a row is 0. One such
    number does it for its whole head, not for the others. Small rows stay small: eps counts.
    """
    tokens = len(EDGES) + 2
    call = rows(tokens, 2, executor.device, seed=11)
    signs = torch.randint(0, 2, call["qkv"].shape, generator=torch.Generator().manual_seed(1)) * 2 - 1
    for t, (size, _) in enumerate(EDGES.values()):
        call["qkv"][t] = (signs[t] * size).to(executor.device)
    call["qkv"][-1, [call["q_column"] + 5, call["k_column"] + 70]] = 2.0**64  # beside numbers of size 1
    call["slot_mapping"] = call["positions"] = torch.arange(tokens, device=executor.device)
    check_fused_insert(executor, dtype, call=call)
    keys, queries = run(executor, CacheLayout("bf16"), call, 2)
    zero = [infinite for _, infinite in EDGES.values()] + [False, True]
    assert (keys.view(-1, 128)[:tokens] == 0).all(1).tolist() == zero
    assert (queries[:, 0] == 0).all(1).tolist() == zero
    assert not (queries[-1, 1] == 0).any(), "another head of the row keeps its values"


@pytest.mark.parametrize("way", ["reference", "executor"])
def test_halfway_goes_to_the_even_bf16(one_executor, way):
    """x of all ones has norm 1 without eps, so (1 + w) is stored as it is; cos and sin make sums that lie halfway."""
    call = rows(4, 1, one_executor.device, seed=1)
    call["qkv"].fill_(1.0)
    call |= {"eps": 0.0, "positions": torch.zeros(4, dtype=torch.int64, device=one_executor.device)}
    call["slot_mapping"] = torch.arange(4, device=one_executor.device)
    steps = torch.arange(32) / 128  # (1 + s) + 2^-8 lies halfway between 1 + s and the next bf16
    call["q_weight"] = torch.cat((steps, torch.zeros(32), steps, steps)).bfloat16().to(one_executor.device)
    call["cos_sin"] = torch.tensor([1.0] * 32 + [-(2.0**-8)] * 32).bfloat16()[None].to(one_executor.device)
    layout = CacheLayout("bf16")
    if way == "executor":
        _, q = run(one_executor, layout, call, 1)
    else:
        q = torch.empty(4, 1, 128, dtype=torch.bfloat16, device=one_executor.device)
        blockpick.qk_norm_rope_insert(
            layout, layout.empty(PAGES, one_executor.device), q_out=q, backend="reference", **call
        )
    even = 1 + (torch.arange(32) + 1) // 2 * 2 / 128
    assert q[0, 0, :32].cpu().tolist() == even.tolist(), "first + 2^-8, to the even neighbour"
    assert torch.equal(q[0].cpu().float(), q[3].cpu().float())


@pytest.mark.parametrize("value,rounded", [
    (1 + 2.0**-8, 1.0), (1 + 3 * 2.0**-8, 1 + 2.0**-6), (1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-7), (-(1 + 2.0**-8), -1.0),
    (2.0**128 * (1 - 2.0**-10), float("inf")), (3 * 2.0**-134, 2.0**-132), (2.0**-134, 0.0), (0.0, 0.0),
])  # fmt: skip
def test_the_oracle_rounds_once(value, rounded):
    """float64 to bf16 without a stop at fp32: 1 + 2^-8 + 2^-40 is above the middle."""
    assert nearest_bf16(torch.tensor([value], dtype=torch.float64)).item() == rounded


def launches_of(monkeypatch, layout, num_tokens, num_heads):
    """Grids of the launches of one call over ``num_tokens`` tokens, without running them."""
    grids = []
    monkeypatch.setattr(fused_insert, "find_launch", lambda *_, **__: (lambda grid, *_: grids.append(grid), 16))
    call = rows(1, num_heads, "cpu")
    many = {name: call[name].expand(num_tokens, -1).contiguous() if name == "qkv" else call[name].expand(num_tokens)
            for name in ("qkv", "slot_mapping", "positions")}  # fmt: skip
    many = {name: tensor.contiguous() for name, tensor in many.items()}
    q_out = torch.empty(num_tokens, num_heads, 128, dtype=torch.uint8).view(layout.query_dtype)
    cache = layout.empty(PAGES, "cpu")
    blockpick.qk_norm_rope_insert(layout, cache, q_out=q_out, backend="interpreter", **{**call, **many})
    return grids


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 65_535, 65_536, 70_000])
@pytest.mark.parametrize("num_heads", [1, 4])
def test_one_launch_whatever_the_tokens(monkeypatch, num_tokens, num_heads):
    """Queries, keys and the store are one launch; its one grid dimension may go beyond 65,535."""
    grids = launches_of(monkeypatch, CacheLayout("e4m3fn"), num_tokens, num_heads)
    assert grids == [-(-num_tokens // 16) * (num_heads + 1)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_launch_on_every_executor(executor, dtype, monkeypatch):
    """What the executor's backend is asked to run, counted."""
    names, bind = [], RecordedKernel.bind

    def counted(kernel, *arguments):
        launch = bind(kernel, *arguments)
        return lambda *given: (names.append(kernel._entry[1]), launch(*given))[1]

    monkeypatch.setattr(RecordedKernel, "bind", counted)
    monkeypatch.setattr("executors.BOUND_INSERTS", {})
    run(executor, CacheLayout(dtype), rows(40, 2, executor.device), 2)
    assert len(names) == 1 and names[0].startswith("qk_norm_rope_insert__")


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [65_537])  # half a minute in the interpreter
def test_case_16_more_tokens_than_a_grid_dimension_holds(one_executor, num_tokens):
    """The last tiles of a long batch, on either side of 65,536 rows, are written like those of a short one."""
    last = 20 if one_executor.device == "cpu" else num_tokens
    call = rows(40, 1, one_executor.device, seed=2)
    short, q_short = run(one_executor, CacheLayout("e4m3fn"), call, 1)
    many = {name: tensor for name, tensor in call.items() if not isinstance(tensor, torch.Tensor)}
    index = torch.arange(num_tokens, device=one_executor.device) % 40
    many |= {name: call[name] for name in ("cos_sin", "q_weight", "k_weight")}
    many |= {name: call[name][index].contiguous() for name in ("qkv", "slot_mapping", "positions")}
    many["slot_mapping"][: num_tokens - 40] = -1  # only the last 40 store
    cache, q = run(one_executor, CacheLayout("e4m3fn"), many, 1)
    assert torch.equal(cache.view(torch.uint8), short.view(torch.uint8))
    assert torch.equal(q.view(torch.uint8)[-last:], q_short.view(torch.uint8)[index.cpu()][-last:])


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
    ({"k_column": 256}, ValueError, r"k_column: .*128 key columns from 256 on overlap the query columns 256..511"),
    ({"k_column": 136}, ValueError, "k_column: .*overlap the query columns"),
    ({"k_column": 504}, ValueError, "k_column: .*overlap the query columns"),
    ({"q_column": 472}, ValueError, "k_column: .*overlap the query columns 472..727"),
    ({"eps": -1e-6}, ValueError, "eps: must be finite and at least 0, is -1e-06"),
    ({"eps": float("nan")}, ValueError, "eps: must be finite"),
    ({"eps": float("inf")}, ValueError, "eps: must be finite"),
    ({"eps": "1e-6"}, TypeError, "eps: must be a number, is str"),
    ({"eps": None}, TypeError, "eps: must be a number, is NoneType"),
    ({"eps": True}, TypeError, "eps: must be a number, is bool"),
    ({"layout": "e4m3fn"}, TypeError, "layout: must be a CacheLayout, is str"),
    ({"q_out": torch.zeros(9999, dtype=torch.uint8).view(torch.float8_e4m3fn).as_strided((6, 2, 128), (128, 128, 1))},
     ValueError, r"q_out: elements overlap, shape \[6, 2, 128\] has strides \[128, 128, 1\]"),
    ({"q_out": torch.zeros(9999, dtype=torch.uint8).view(torch.float8_e4m3fn).as_strided((6, 2, 128), (256, 64, 1))},
     ValueError, "q_out: elements overlap"),
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


def test_columns_beside_one_another_are_taken():
    """The key's columns end where the queries' begin, and the other way round."""
    for columns in ({"q_column": 128, "k_column": 0}, {"q_column": 0, "k_column": 256}, {"eps": 0}):
        call = good_call(**columns)
        call["qkv"] = call["qkv"].nan_to_num(1.0)
        assert not blockpick.qk_norm_rope_insert(**call).float().isnan().any()


@pytest.mark.parametrize("place", ["on the queries", "on the values", "behind the rows", "beside"])
def test_queries_need_memory_of_their_own(place):
    """``q_out`` inside qkv's columns would change what later programs read; beside them it is apart."""
    call = good_call()
    layout, qkv = CacheLayout("bf16"), call["qkv"]
    tokens, columns = qkv.shape
    whole = torch.zeros(tokens + 1, columns + 8 + 256, dtype=torch.bfloat16)
    whole[:tokens, :columns] = qkv
    call |= {"layout": layout, "cache": layout.empty(PAGES, "cpu"), "qkv": whole[:tokens, :columns]}
    first = {"on the queries": 256, "on the values": 0, "behind the rows": columns - 128, "beside": columns + 8}[place]
    view = whole[:tokens, first : first + 256].unflatten(1, (2, 128))
    if place == "beside":
        own = torch.empty(tokens, 2, 128, dtype=torch.bfloat16)
        assert torch.equal(
            blockpick.qk_norm_rope_insert(**{**call, "q_out": view}),
            blockpick.qk_norm_rope_insert(**{**call, "q_out": own}),
        )
        return
    before = whole.clone()
    with pytest.raises(ValueError, match="q_out: shares memory with qkv"):
        blockpick.qk_norm_rope_insert(**{**call, "q_out": view})
    assert torch.equal(whole.view(torch.int16), before.view(torch.int16))


def test_no_tokens_are_no_launch(one_executor):
    cache, q = run(one_executor, CacheLayout("bf16"), rows(0, 1, one_executor.device), 1)
    assert cache.view(torch.uint8).unique().tolist() == [SENTINEL] and q.shape == (0, 1, 128)

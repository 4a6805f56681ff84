# SPDX-License-Identifier: Apache-2.0
"""What is refused, with which words, and that nothing is written: section 1.10 of the contract.

A message names the argument, what it is, and what it must be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import blockpick
from blockpick import CacheLayout, Indexer, StalePlanError, UnsupportedArchError, UnsupportedConfigError
from blockpick.checks import check_distinct_elements
from blockpick.manifest import installed_packages

SENTINEL = -77
BAD = (TypeError, ValueError)


def says(error: pytest.ExceptionInfo[BaseException], *words: str) -> None:
    """Every word stands in the message."""
    message = str(error.value)
    missing = [word for word in words if word not in message]
    assert not missing, f"{message!r} lacks {missing}"


# ---- configuration ----


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "fp8"}, ("dtype", "'fp8'", "bf16", "e4m3fn", "nvfp4")),
        ({"dtype": torch.bfloat16}, ("dtype", "torch.bfloat16", "bf16")),
        ({"dtype": None}, ("dtype", "None", "nvfp4")),
        ({"page_size": 64}, ("page_size", "64", "128", "256")),
        ({"page_size": 16}, ("page_size", "16", "128", "256")),
        ({"page_size": 0}, ("page_size", "0", "128", "256")),
        ({"page_size": -128}, ("page_size", "-128", "256")),
        ({"page_size": None}, ("page_size", "None", "256")),
        ({"shards": 3}, ("shards", "3", "1", "2", "4", "8")),
        ({"shards": 16}, ("shards", "16", "1", "2", "4", "8")),
        ({"shards": 0}, ("shards", "0", "8")),
    ],
)
def test_layout_outside_the_formats(options: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(UnsupportedConfigError) as error:
        CacheLayout(**{"dtype": "bf16", **options})
    says(error, "CacheLayout", *words)


CONFIG = [
    ({"num_heads": 3}, ("num_heads", "3", "1, 2, 4")),
    ({"num_heads": 8}, ("num_heads", "8", "1, 2, 4")),
    ({"num_heads": 0}, ("num_heads", "0", "1, 2, 4")),
    ({"topk": 0}, ("topk", "0", "1..64")),
    ({"topk": 65}, ("topk", "65", "1..64")),
    ({"topk": -1}, ("topk", "-1", "1..64")),
    ({"topk": 16.0}, ("topk", "16.0", "1..64")),
    ({"topk": True}, ("topk", "True", "1..64")),
    ({"topk": None}, ("topk", "None", "1..64")),
    ({"init_blocks": -1}, ("init_blocks", "-1", "0")),
    ({"local_blocks": -1}, ("local_blocks", "-1", "0")),
    ({"init_blocks": 16, "local_blocks": 1}, ("init_blocks", "local_blocks", "16", "topk")),
    ({"init_blocks": 2, "local_blocks": 3, "topk": 4}, ("init_blocks=2", "local_blocks=3", "topk=4")),
    ({"topk": 1, "init_blocks": 1}, ("init_blocks=1", "local_blocks=1", "topk=1")),
    ({"max_requests": 0}, ("max_requests", "0", "1..")),
    ({"max_query_len": 0}, ("max_query_len", "0", "1..8")),
    ({"max_query_len": 9}, ("max_query_len", "9", "1..8")),
    ({"max_seq_len": 0}, ("max_seq_len", "0", "1..")),
    ({"max_seq_len": 65534 * 128 + 1}, ("max_seq_len", str(65534 * 128 + 1), str(65534 * 128), "65534")),
    ({"max_seq_len": "1M"}, ("max_seq_len", "'1M'", "1..")),
    ({"order": "descending"}, ("order", "'descending'", "score", "local_last", "ascending")),
    ({"order": None}, ("order", "None", "score")),
    ({"order": "local_last", "init_blocks": 1}, ("local_last", "init_blocks=0", "local_blocks=1")),
    ({"order": "local_last", "local_blocks": 0}, ("local_last", "local_blocks=1", "0")),
    ({"order": "local_last", "local_blocks": 2}, ("local_last", "local_blocks=1", "2")),
    ({"out_layout": "hkt"}, ("out_layout", "'hkt'", "thk", "htk")),
    ({"empty_row": "zero"}, ("empty_row", "'zero'", "minus_one", "block_zero")),
    ({"nvfp4_rounding": "e4m3"}, ("nvfp4_rounding", "'e4m3'", "bf16", "nvfp4")),
    ({"nvfp4_rounding": "up"}, ("nvfp4_rounding", "'up'", "exact", "e4m3")),
    ({"slots": 0}, ("slots", "0", "1..")),
    ({"layout": CacheLayout("bf16", 128, 2)}, ("shards=2", "shards=1")),
]


@pytest.mark.parametrize(
    ("options", "words"), CONFIG, ids=lambda x: "-".join(map(str, x))[:60] if isinstance(x, dict) else ""
)
def test_configuration_outside_the_contract(executor: Any, options: dict[str, Any], words: tuple[str, ...]) -> None:
    layout = options.get("layout", CacheLayout("bf16"))
    rest = {key: value for key, value in options.items() if key != "layout"}
    with pytest.raises(UnsupportedConfigError) as error:
        executor.indexer(layout, **rest)
    says(error, "Indexer", *words)


@pytest.mark.parametrize("layout", [None, "bf16", 128])
def test_layout_of_another_type(executor: Any, layout: Any) -> None:
    with pytest.raises(BAD) as error:
        executor.indexer(layout)
    says(error, "layout", "CacheLayout")


@pytest.mark.parametrize("value", [True, 1.0, 2.0])
def test_number_of_heads_of_another_type(executor: Any, value: Any) -> None:
    with pytest.raises(UnsupportedConfigError) as error:
        executor.indexer(CacheLayout("bf16"), num_heads=value)
    says(error, "num_heads", repr(value))


def test_unknown_backend_and_arch() -> None:
    layout = CacheLayout("bf16")
    with pytest.raises(UnsupportedConfigError) as error:
        Indexer(layout, device="cpu", backend="triton")
    says(error, "backend", "'triton'", "auto", "aot", "jit", "interpreter", "reference")
    with pytest.raises(UnsupportedArchError) as error:
        Indexer(layout, device="cpu", backend="interpreter", arch="sm75")
    says(error, "sm75", *installed_packages())
    for backend in ("aot", "jit"):
        with pytest.raises((UnsupportedArchError, UnsupportedConfigError)) as error:
            Indexer(layout, device="cpu", backend=backend)
        says(error, backend, "cpu")
    cache, key, slot = layout.empty(1, "cpu").zero_(), torch.ones(1, 128, dtype=torch.bfloat16), torch.tensor([0])
    with pytest.raises(UnsupportedConfigError) as error:
        blockpick.insert(layout, cache, key, slot, backend="cuda")
    says(error, "backend", "'cuda'", "interpreter")
    with pytest.raises(UnsupportedArchError) as error:
        blockpick.insert(layout, cache, key, slot, backend="interpreter", arch="sm75")
    says(error, "sm75", *installed_packages())
    assert not cache.any()


@pytest.mark.parametrize("backend", ["aot", "jit"])
def test_insert_on_cpu_tensors_names_the_device(backend: str) -> None:
    layout = CacheLayout("bf16")
    cache = layout.empty(1, "cpu").zero_()
    with pytest.raises((UnsupportedArchError, *BAD)) as error:
        blockpick.insert(layout, cache, torch.ones(1, 128, dtype=torch.bfloat16), torch.tensor([0]), backend=backend)
    says(error, "cpu")
    assert not cache.any()


# ---- decode ----

LAYOUT = CacheLayout("bf16")


class Step:
    """A planned step of 2 requests x 2 queries x 2 heads that would succeed, and its sentinel output."""

    def __init__(self, executor: Any, layout: CacheLayout = LAYOUT, **options: Any) -> None:
        device = executor.device
        defaults = {"num_heads": 2, "max_requests": 3, "max_query_len": 2, "max_seq_len": 1024, "slots": 2}
        self.indexer = executor.indexer(layout, **{**defaults, **options})
        self.table = torch.zeros(2, 8 * 128 // layout.page_size, dtype=torch.int32, device=device)
        self.lens = torch.tensor([300, 5], dtype=torch.int32, device=device)
        self.q = torch.ones(4, 2, 128, device=device).to(layout.query_dtype)
        self.cache = torch.zeros(*layout.shape(4), device=device).to(layout.torch_dtype)
        self.out = torch.full((4, 2, 16), SENTINEL, dtype=torch.int32, device=device)
        self.plan = self.indexer.plan_decode(self.table, self.lens, query_len=2)

    def refuses(self, *words: str, error: Any = BAD, **changed: Any) -> None:
        tensors = {"plan": self.plan, "q": self.q, "cache": self.cache, "out": self.out, **changed}
        storages = [x for x in (self.out, changed.get("out")) if isinstance(x, torch.Tensor) and x.dtype == torch.int32]
        with pytest.raises(error) as raised:
            self.indexer.decode(**tensors)
        assert str(raised.value).startswith(f"{next(k for k in changed)}:"), raised.value
        says(raised, *words)
        assert all(bool((s == SENTINEL).all()) for s in storages), "written on refusal"


def off(x: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The same values, ``nbytes`` past a 16-byte boundary."""
    step = nbytes // x.element_size()
    whole = torch.zeros(x.numel() + step, dtype=x.dtype, device=x.device)
    view = torch.as_strided(whole, x.shape, x.stride(), step)
    assert view.data_ptr() % 16 == nbytes
    return view


def spread(x: torch.Tensor, dim: int) -> torch.Tensor:
    """A view of the same shape whose stride ``dim`` is doubled."""
    shape = list(x.shape)
    shape[dim] *= 2
    whole = torch.full(shape, SENTINEL, device=x.device).to(x.dtype)
    return whole[tuple(slice(None, None, 2) if d == dim else slice(None) for d in range(x.dim()))]


Q = [
    ("dtype", lambda q: q.float(), ("bfloat16", "float32")),
    ("fp16", lambda q: q.half(), ("bfloat16", "float16")),
    ("fp8 for a bf16 cache", lambda q: q.to(torch.float8_e4m3fn), ("bfloat16", "float8_e4m3fn")),
    ("two dims", lambda q: q.flatten(1), ("[4, 256]",)),
    ("heads", lambda q: q[:, :1], ("2", "[4, 1, 128]")),
    ("head_dim", lambda q: q[..., :64], ("128", "[4, 2, 64]")),
    ("too few rows", lambda q: q[:3], ("4", "3")),
    ("too many rows", lambda q: torch.cat([q, q]), ("4", "8", "allow_padding")),
    ("no rows", lambda q: q[:0], ("4", "0")),
    ("last stride", lambda q: spread(q, 2), ("stride", "1", "2")),
    ("transposed", lambda q: q.new_ones(4, 128, 2).transpose(1, 2), ("stride", "1")),
    ("row stride", lambda q: q.new_ones(4, 2, 132)[..., :128], ("16", "264")),
    ("base", lambda q: off(q, 8), ("16", "8")),
    ("other device", lambda q: q.to("meta"), ("meta",)),
    ("None", lambda q: None, ("Tensor", "NoneType")),
    ("list", lambda q: [1, 2], ("Tensor", "list")),
]


@pytest.mark.parametrize(("change", "words"), [pytest.param(c, w, id=n) for n, c, w in Q])
def test_q_is_refused(executor: Any, change: Callable[..., Any], words: tuple[str, ...]) -> None:
    step = Step(executor)
    step.refuses(*words, q=change(step.q))


CACHE = [
    ("dtype", lambda c: c.half(), ("bfloat16", "float16")),
    ("bytes", lambda c: torch.zeros(4, 128, 72, dtype=torch.uint8, device=c.device), ("bfloat16", "uint8")),
    ("two dims", lambda c: c.flatten(1), ("128", "[4, 16384]")),
    ("rows", lambda c: c[:, :64], ("128", "[4, 64, 128]")),
    ("page 256", lambda c: c.view(2, 256, 128), ("128", "[2, 256, 128]")),
    ("head_dim", lambda c: c[..., :64], ("128", "[4, 128, 64]")),
    ("no pages", lambda c: c[:0], ("page", "0")),
    ("inner stride", lambda c: spread(c, 2), ("dense", "256")),
    ("row stride", lambda c: spread(c, 1), ("dense", "256")),
    ("overlapping pages", lambda c: torch.as_strided(c, (4, 128, 128), (8192, 128, 1)), ("32768", "16384")),
    ("expanded", lambda c: c[:1].expand(4, 128, 128), ("32768", "0")),
    ("page stride", lambda c: torch.as_strided(c, (3, 128, 128), (16388, 128, 1)), ("16", "32776")),
    ("base", lambda c: off(c, 8), ("16", "8")),
    ("other device", lambda c: c.to("meta"), ("meta",)),
    ("None", lambda c: None, ("Tensor", "NoneType")),
]


@pytest.mark.parametrize(("change", "words"), [pytest.param(c, w, id=n) for n, c, w in CACHE])
def test_cache_is_refused(executor: Any, change: Callable[..., Any], words: tuple[str, ...]) -> None:
    step = Step(executor)
    step.refuses(*words, cache=change(step.cache))


@pytest.mark.parametrize("out_layout", ["thk", "htk"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(lambda o: o.long(), ("int32", "int64"), id="int64"),
        pytest.param(lambda o: o.float(), ("int32", "float32"), id="float"),
        pytest.param(lambda o: o.flatten(1), ("[4, 32]",), id="two dims"),
        pytest.param(lambda o: o[..., :15], ("16", "15"), id="topk"),
        pytest.param(lambda o: torch.cat([o, o], 2), ("16", "32"), id="wider"),
        pytest.param(lambda o: o[:3], ("4", "3"), id="rows"),
        pytest.param(lambda o: torch.cat([o, o]), ("4", "8"), id="more rows"),
        pytest.param(lambda o: o.transpose(0, 1), ("4", "2"), id="other layout"),
        pytest.param(lambda o: spread(o, 2), ("stride", "1", "2"), id="last stride"),
        pytest.param(lambda o: o.to("meta"), ("meta",), id="other device"),
        pytest.param(lambda o: None, ("Tensor", "NoneType"), id="None"),
    ],
)
def test_out_is_refused(executor: Any, out_layout: str, change: Callable[..., Any], words: tuple[str, ...]) -> None:
    step = Step(executor, out_layout=out_layout)
    bad = change(step.out)
    if out_layout == "htk" and isinstance(bad, torch.Tensor) and bad.dim() == 3:
        bad = bad.transpose(0, 1)
    if isinstance(bad, torch.Tensor) and bad.device.type == "meta":
        with pytest.raises(BAD) as error:
            step.indexer.decode(step.plan, step.q, step.cache, bad)
        says(error, "out", *words)
        return
    step.refuses(*words, out=bad)


def test_nothing_of_a_good_call_was_refused_above(executor: Any) -> None:
    step = Step(executor)
    assert step.indexer.decode(step.plan, step.q, step.cache, step.out) is step.out
    assert not bool((step.out == SENTINEL).any())


def test_a_good_call_does_not_open_the_door_to_bad_ones(executor: Any) -> None:
    """The same refusals after an accepted decode, on the same indexer and plan."""
    step = Step(executor)
    step.indexer.decode(step.plan, step.q, step.cache, step.out)
    step.out.fill_(SENTINEL)
    for _, change, _ in Q:
        step.refuses(q=change(step.q))
    for _, change, _ in CACHE:
        step.refuses(cache=change(step.cache))
    step.refuses(out=step.out[..., :15])
    step.refuses(out=step.out.transpose(0, 1))
    smaller = step.indexer.plan_decode(step.table[:1], step.lens[:1], query_len=1, slot=1)
    with pytest.raises(ValueError, match=r"^q: .*\b1\b.*\b4\b"):
        step.indexer.decode(smaller, step.q, step.cache, step.out)


# ---- plan ----

PLAN = [
    ("block_table", "int64", lambda t: t.long(), ("int32", "int64")),
    ("block_table", "one dim", lambda t: t[0], ("[8]",)),
    ("block_table", "too many rows", lambda t: t.repeat(2, 1), ("3", "4", "max_requests")),
    ("block_table", "no rows", lambda t: t[:0], ("1..3", "0")),
    ("block_table", "too wide", lambda t: t.repeat(1, 2), ("1..8", "16", "max_seq_len")),
    ("block_table", "no columns", lambda t: t[:, :0], ("1..8", "0")),
    ("block_table", "last stride", lambda t: spread(t, 1), ("stride", "1", "2")),
    ("block_table", "other device", lambda t: t.to("meta"), ("meta",)),
    ("block_table", "None", lambda t: None, ("Tensor", "NoneType")),
    ("seq_lens", "int64", lambda t: t.long(), ("int32", "int64")),
    ("seq_lens", "two dims", lambda t: t[None], ("[1, 2]",)),
    ("seq_lens", "too short", lambda t: t[:1], ("2", "1")),
    ("seq_lens", "too long", lambda t: t.repeat(2), ("2", "4")),
    ("seq_lens", "stride", lambda t: spread(t, 0), ("stride", "1", "2")),
    ("seq_lens", "other device", lambda t: t.to("meta"), ("meta",)),
    ("seq_lens", "None", lambda t: None, ("Tensor", "NoneType")),
    ("query_len", "zero", lambda _: 0, ("1..2", "0")),
    ("query_len", "above the maximum", lambda _: 3, ("1..2", "3")),
    ("query_len", "float", lambda _: 2.0, ("1..2", "2.0")),
    ("query_len", "bool", lambda _: True, ("1..2", "True")),
    ("query_len", "None", lambda _: None, ("1..2", "None")),
    ("slot", "negative", lambda _: -1, ("0..1", "-1")),
    ("slot", "too large", lambda _: 2, ("0..1", "2")),
    ("slot", "float", lambda _: 0.5, ("0..1", "0.5")),
    ("slot", "None", lambda _: None, ("0..1", "None")),
]


@pytest.mark.parametrize(("name", "change", "words"), [pytest.param(n, c, w, id=f"{n}-{i}") for n, i, c, w in PLAN])
def test_plan_is_refused_and_the_earlier_one_stays_valid(
    executor: Any, name: str, change: Callable[..., Any], words: tuple[str, ...]
) -> None:
    step = Step(executor)
    arguments = {"block_table": step.table, "seq_lens": step.lens, "query_len": 2, "slot": 0}
    arguments[name] = change(arguments[name])
    with pytest.raises(BAD) as error:
        step.indexer.plan_decode(**arguments)
    assert str(error.value).startswith(f"{name}:"), error.value
    says(error, *words)
    step.indexer.decode(step.plan, step.q, step.cache, step.out)
    assert sorted(step.out[0, 0].tolist()) == [-1] * 13 + [0, 1, 2]


def test_stale_plan_names_both_generations(executor: Any) -> None:
    step = Step(executor)
    other = step.indexer.plan_decode(step.table, step.lens, query_len=2, slot=1)
    newer = step.indexer.plan_decode(step.table, step.lens, query_len=2)
    with pytest.raises(StalePlanError) as error:
        step.indexer.decode(step.plan, step.q, step.cache, step.out)
    says(error, "plan", "generation 1", "generation 2", "slot 0", "slots=2")
    assert bool((step.out == SENTINEL).all()), "written on refusal"
    for plan in (other, newer):
        step.indexer.decode(plan, step.q, step.cache, step.out)


def test_plan_of_another_indexer_is_refused(executor: Any) -> None:
    step, other = Step(executor), Step(executor, slots=1)
    with pytest.raises(StalePlanError):
        step.indexer.decode(other.plan, step.q, step.cache, step.out)
    far = step.indexer.plan_decode(step.table, step.lens, query_len=2, slot=1)
    with pytest.raises((StalePlanError, *BAD)):  # a slot that the other indexer lacks
        other.indexer.decode(far, other.q, other.cache, other.out)
    assert bool((step.out == SENTINEL).all())
    assert bool((other.out == SENTINEL).all())


@pytest.mark.parametrize("plan", [None, 0, "plan"])
def test_plan_of_another_type_is_refused(executor: Any, plan: Any) -> None:
    step = Step(executor)
    step.refuses("DecodePlan", plan=plan)


@pytest.mark.parametrize("dtype", ["e4m3fn", "nvfp4"])
def test_bf16_queries_of_a_quantised_cache_are_refused(executor: Any, dtype: str) -> None:
    layout = CacheLayout(dtype)
    step = Step(executor, layout)
    step.refuses("float8_e4m3fn", "bfloat16", q=step.q.bfloat16())
    step.refuses("float8_e4m3fn", "float8_e4m3fnuz", q=step.q.float().to(torch.float8_e4m3fnuz))


# ---- insert ----

INSERT = [
    ("index_k", "dtype", lambda k: k.float(), ("bfloat16", "float32")),
    ("index_k", "three dims", lambda k: k[None], ("[1, 5, 128]",)),
    ("index_k", "one dim", lambda k: k[0], ("[128]",)),
    ("index_k", "head_dim", lambda k: k[:, :64], ("128", "[5, 64]")),
    ("index_k", "last stride", lambda k: spread(k, 1), ("stride", "1", "2")),
    ("index_k", "row stride", lambda k: k.new_ones(5, 132)[:, :128], ("16", "264")),
    ("index_k", "base", lambda k: off(k, 8), ("16", "8")),
    ("index_k", "other device", lambda k: k.to("meta"), ("meta",)),
    ("index_k", "None", lambda k: None, ("Tensor", "NoneType")),
    ("slot_mapping", "int32", lambda s: s.int(), ("int64", "int32")),
    ("slot_mapping", "two dims", lambda s: s[None], ("[1, 5]",)),
    ("slot_mapping", "too short", lambda s: s[:4], ("5", "4")),
    ("slot_mapping", "stride", lambda s: spread(s, 0), ("stride", "1", "2")),
    ("slot_mapping", "other device", lambda s: s.to("meta"), ("meta",)),
    ("slot_mapping", "None", lambda s: None, ("Tensor", "NoneType")),
    ("shard", "negative", lambda _: -1, ("0..1", "-1", "shards=2")),
    ("shard", "too large", lambda _: 2, ("0..1", "2", "shards=2")),
    ("shard", "float", lambda _: 0.5, ("0..1", "0.5")),
    ("shard", "None", lambda _: None, ("0..1", "None")),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["bf16", "nvfp4"])
@pytest.mark.parametrize(("name", "change", "words"), [pytest.param(n, c, w, id=f"{n}-{i}") for n, i, c, w in INSERT])
def test_insert_is_refused(
    executor: Any, dtype: str, name: str, change: Callable[..., Any], words: tuple[str, ...]
) -> None:
    layout = CacheLayout(dtype, 128, 2)
    device = executor.device
    cache = torch.full(layout.shape(2), 5, device=device).to(layout.torch_dtype)
    arguments: dict[str, Any] = {
        "index_k": torch.ones(5, 128, dtype=torch.bfloat16, device=device), "slot_mapping": torch.arange(5, device=device),
        "shard": 0,
    }  # fmt: skip
    arguments[name] = change(arguments[name])
    shard = arguments.pop("shard")
    with pytest.raises(BAD) as error:
        executor.insert(layout, cache, *arguments.values(), shard=shard)
    assert str(error.value).startswith(f"{name}:"), error.value
    says(error, *words)
    assert bool((cache.float() == 5).all()), "written on refusal"


@pytest.mark.parametrize(("change", "words"), [pytest.param(c, w, id=n) for n, c, w in CACHE if n != "other device"])
def test_insert_refuses_the_cache(executor: Any, change: Callable[..., Any], words: tuple[str, ...]) -> None:
    cache = torch.full(LAYOUT.shape(4), 5, device=executor.device).to(torch.bfloat16)
    keys = torch.ones(3, 128, dtype=torch.bfloat16, device=executor.device)
    bad = change(cache)
    with pytest.raises(BAD) as error:
        executor.insert(LAYOUT, bad, keys, torch.arange(3, device=executor.device))
    assert str(error.value).startswith("cache:"), error.value
    says(error, *words)
    assert bool((cache == 5).all()), "written on refusal"


@pytest.mark.parametrize("page", [-1, 4, 2**40])
def test_page_range_outside_the_cache(page: int) -> None:
    cache = LAYOUT.empty(4, "cpu")
    with pytest.raises(ValueError, match=rf"^page: {page}\b.*4 pages"):
        LAYOUT.page_range(cache, page)
    assert LAYOUT.page_range(cache, 3) == (3 * 32768, 32768)


def test_case_24_unsharded_cache_of_a_sharded_layout_and_back() -> None:
    """The page's rows differ although the bytes would fit."""
    whole, half = CacheLayout("nvfp4", 256), CacheLayout("nvfp4", 256, 2)
    for layout, other, rows in ((whole, half, 256), (half, whole, 128)):
        with pytest.raises(ValueError, match=rf"^cache: .*\b{rows}\b"):
            layout.check(other.empty(2, "cpu"))


def test_an_expanded_output_is_refused(executor: Any) -> None:
    """Rows that share memory would overwrite each other."""
    step = Step(executor)
    one = torch.full((1, *step.out.shape[1:]), SENTINEL, dtype=torch.int32, device=executor.device)
    step.refuses("out", "expanded", out=one.expand(step.out.shape))
    assert bool((one == SENTINEL).all())


@pytest.mark.parametrize("out_layout", ["thk", "htk"])
@pytest.mark.parametrize("short", [1, 8, 15])
def test_an_output_with_overlapping_rows_is_refused(executor: Any, out_layout: str, short: int) -> None:
    """A row stride below topk: every row would overwrite the end of the one before, in an order that nobody knows."""
    step = Step(executor, out_layout=out_layout)
    shape, strides = ((4, 2, 16), (32 - short, 16, 1)) if out_layout == "thk" else ((2, 4, 16), (64, 16 - short, 1))
    step.refuses("out", "overlap", out=step.out.as_strided(shape, strides))


@pytest.mark.parametrize(
    ("shape", "stride", "overlap"),
    [
        ((4, 2, 16), (32, 16, 1), False),
        ((4, 2, 16), (31, 16, 1), True),
        ((3, 2, 16), (48, 32, 1), False),  # rows of one dimension lie in the gaps of the other's
        ((4, 2, 16), (48, 96, 1), True),
        ((4, 2, 16), (16, 64, 1), False),
        ((4, 2, 16), (16, 63, 1), True),
        ((1, 2, 16), (0, 16, 1), False),
        ((4, 1, 16), (16, 3, 1), False),
        ((2, 3), (3, 2), False),
        ((3, 3), (4, 2), True),
    ],
)
def test_which_strides_give_every_element_a_place(shape: Any, stride: Any, overlap: bool) -> None:
    tensor = torch.zeros(1000).as_strided(shape, stride)
    if not overlap:
        check_distinct_elements("out", tensor)
        return
    with pytest.raises(ValueError, match=f"out: elements overlap, shape .* has strides .*{stride[0]}"):
        check_distinct_elements("out", tensor)


@pytest.mark.parametrize("layout", ["bf16", None, 128])
def test_insert_refuses_a_layout_of_another_type(layout: Any) -> None:
    cache, keys = torch.zeros(1, 128, 128, dtype=torch.bfloat16), torch.ones(1, 128, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=f"layout: must be a CacheLayout, is {type(layout).__name__}"):
        blockpick.insert(layout, cache, keys, torch.tensor([0]))
    assert not cache.any()

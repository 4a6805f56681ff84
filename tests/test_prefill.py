# SPDX-License-Identifier: Apache-2.0
"""prefill_pick against the oracle, on every executor: conformance, options, splitting, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conformance import CACHES, MANY_REQUESTS, PREFILLS, REQUESTS, SHORT_REQUESTS, SHORT_TOPK, check_prefill_plan

from blockpick import CacheLayout, Indexer, SparseTable
from blockpick.errors import StalePlanError, UnsupportedConfigError
from blockpick.testing.cases import SENTINEL
from blockpick.testing.prefill_cases import PrefillCase, build_prefill, run_prefill_case


@pytest.mark.parametrize("case", PREFILLS, ids=lambda c: c.name)
def test_conformance_of_every_target(any_executor, case):
    run_prefill_case(case, any_executor.indexer, any_executor.device)


@pytest.mark.parametrize("order,workspace_bytes", [("local_last", 1 << 26), ("score", 256 * 32 * 4)])
def test_plan_of_every_target(any_executor, order, workspace_bytes):
    """In one pass without the requests that need no scores; in many passes."""
    case = PrefillCase("plan", "e4m3fn", MANY_REQUESTS, topk=3, padding=5, order=order)
    check_prefill_plan(any_executor, replace(case, workspace_bytes=workspace_bytes))


NUMERIC = [
    PrefillCase(f"{dtype}-{rounding}-{numerics}-{data}", dtype, ((6, 1500), (3, 1)), num_heads=2, rounding=rounding,
                numerics=numerics, data=data)
    for dtype, rounding, numerics in (*((*cache, None) for cache in CACHES), ("e4m3fn", None, "strict"),
                                      ("nvfp4", "e4m3", "strict"))
    for data in ("normal", "special")
]  # fmt: skip


@pytest.mark.parametrize("case", NUMERIC, ids=lambda c: c.name)
def test_scores_match_float64(executor, case):
    run_prefill_case(case, executor.indexer, executor.device)


@pytest.mark.parametrize("dtype,rounding", CACHES)
def test_init_blocks_without_a_score(executor, dtype, rounding):
    """NaN, infinities and a forced block of nothing but NaN: init blocks come first all the same, each once."""
    case = PrefillCase("init", dtype, ((6, 1500), (3, 1), (2, 900)), num_heads=2, topk=5, init_blocks=2, local_blocks=1,
                       rounding=rounding, data="special")  # fmt: skip
    run_prefill_case(case, executor.indexer, executor.device)


OPTIONS = [
    {"topk": 5, "init_blocks": 2, "local_blocks": 2},
    {"topk": 40, "local_blocks": 0, "order": "ascending"},
    {"out_layout": "htk", "empty_row": "block_zero", "order": "ascending"},
    {"topk": 1, "local_blocks": 1, "order": "local_last"},
    {"page_padding": 64, "num_heads": 4},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o))
def test_options(executor, options):
    case = PrefillCase("options", "e4m3fn", ((4, 2300), (2, 0), (3, 640)), data="integer", padding=1)
    run_prefill_case(replace(case, **options), executor.indexer, executor.device)


def test_more_queries_than_tokens_give_empty_rows(executor):
    """Lengths below the number of queries: the first queries sit before the request's start (S < L - i)."""
    case = PrefillCase("short", "bf16", ((6, 0), (5, 300), (2, 0)), data="integer", empty_row="block_zero")
    batch = build_prefill(case).to(executor.device)
    indexer = executor.indexer(case.layout(), **case.options())
    lens = torch.tensor([2, 0, 2], dtype=torch.int32, device=executor.device)
    plan = indexer.plan_prefill(batch.cu_seqlens_q, lens, batch.block_table, num_tokens=case.num_tokens)
    indexer.prefill(plan, batch.q, batch.cache, batch.out)
    rows = batch.out[:, 0].cpu()
    assert rows[:, 0].tolist() == [0] * 13, "empty rows hold block 0 like rows of one block"
    assert rows[:, 1:].unique().tolist() == [-1]


def ids_of(executor, case, batch, pieces, **options):
    """Ids of a one-request prefill whose queries come in ``pieces`` calls."""
    out = torch.full_like(batch.out, SENTINEL)
    indexer = executor.indexer(case.layout(), **{**case.options(), **options})
    ((query_len, prefix),) = case.requests
    first = 0
    for piece in pieces:
        device = executor.device
        cu_seqlens = torch.tensor([0, piece], dtype=torch.int32, device=device)
        lens = torch.tensor([prefix + first + piece], dtype=torch.int32, device=device)
        plan = indexer.plan_prefill(cu_seqlens, lens, batch.block_table, num_tokens=piece)
        indexer.prefill(plan, batch.q[first : first + piece], batch.cache, out[first : first + piece])
        first += piece
    assert first == query_len
    return out


@pytest.mark.parametrize("dtype,rounding", CACHES)
def test_any_split_of_a_prompt_gives_the_same_ids(executor, dtype, rounding):
    data = "integer" if executor.backend == "interpreter" else "normal"  # numpy's sums depend on the shape
    case = PrefillCase("split", dtype, ((24, 1130),), num_heads=2, topk=7, rounding=rounding, data=data)
    batch = build_prefill(case).to(executor.device)
    whole = ids_of(executor, case, batch, [24])
    for pieces in ([1, 23], [7, 9, 8], [13, 11]):
        assert torch.equal(whole, ids_of(executor, case, batch, pieces)), pieces


def test_a_small_workspace_means_passes_and_nothing_else(executor):
    """The scores of a tile fit, those of the batch don't: several passes, the same ids."""
    columns = 256  # of the largest tile
    case = PrefillCase("passes", "e4m3fn", ((150, 260), (0, 3), (70, 500)), num_heads=4, data="integer", topk=4)
    tile = columns * 32 * 4
    indexer = run_prefill_case(replace(case, workspace_bytes=tile), executor.indexer, executor.device)
    assert indexer._prefill_plans[0].num_passes > 3
    with pytest.raises(UnsupportedConfigError, match=r"workspace_bytes=100 is less than one tile .* need \d+ bytes"):
        executor.indexer(case.layout(), **{**case.options(), "workspace_bytes": 100})


def test_rows_of_several_splits(executor):
    """More than 2048 blocks: every split leaves its best keys, the merge makes the ids."""
    case = PrefillCase("long", "e4m3fn", ((2, 2051 * 128), (3, 100)), data="integer", order="local_last")
    run_prefill_case(case, executor.indexer, executor.device)


def test_a_bound_on_the_lengths_makes_rows_shorter(executor):
    """``max_seq_len`` of the plan: less scratch a row, the same ids."""
    case = PrefillCase("bound", "bf16", ((5, 900), (3, 40)), data="integer", extra_width=60, topk=3)
    batch = build_prefill(case).to(executor.device)
    indexer = executor.indexer(case.layout(), **case.options())
    tensors = (batch.cu_seqlens_q, batch.seq_lens, batch.block_table)
    outs, strides = [], []
    for bound in (None, 905, 2000):
        out = torch.full_like(batch.out, SENTINEL)
        plan = indexer.plan_prefill(*tensors, num_tokens=8, max_seq_len=bound)
        indexer.prefill(plan, batch.q, batch.cache, out)
        outs.append(out)
        strides.append(plan.score_stride)
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
    assert strides == [96, 32, 32]


def test_decode_and_prefill_plans_of_a_slot_stay_apart(executor):
    """A mixed batch: decode requests and prefill requests planned on one slot, run in turn for several layers."""
    case = PrefillCase("mixed", "nvfp4", ((4, 2300), (1, 2200), (1, 900)), data="integer", rounding="exact")
    batch = build_prefill(case).to(executor.device)
    indexer = executor.indexer(case.layout(), **case.options())
    decode = indexer.plan_decode(batch.block_table[1:], batch.seq_lens[1:], query_len=1)
    cu_seqlens = batch.cu_seqlens_q[:2].contiguous()
    prefill = indexer.plan_prefill(cu_seqlens, batch.seq_lens[:1], batch.block_table[:1], num_tokens=4)
    whole = executor.indexer(case.layout(), **case.options())
    plan = whole.plan_prefill(batch.cu_seqlens_q, batch.seq_lens, batch.block_table, num_tokens=6)
    wanted = whole.prefill(plan, batch.q, batch.cache, torch.empty_like(batch.out))
    for _ in range(2):
        out = torch.full_like(batch.out, SENTINEL)
        indexer.decode(decode, batch.q[4:], batch.cache, out[4:])
        indexer.prefill(prefill, batch.q[:4], batch.cache, out[:4])
        assert torch.equal(out, wanted)


def test_case_29_every_token_has_its_own_number_of_blocks(executor):
    """One number of valid blocks for a whole batch can't express causal prefill: visible = floor(p / 128) + 1."""
    layout = CacheLayout("bf16")
    query_lens, prefixes = [1, 129, 1, 269], [0, 1000, 5, 127]
    cu_seqlens = torch.tensor([0, 1, 130, 131, 400], dtype=torch.int32)
    lens = torch.tensor([q + p for q, p in zip(query_lens, prefixes, strict=True)], dtype=torch.int32)
    pages = [-(-int(n) // 128) for n in lens]
    cache = layout.empty(sum(pages), "cpu").zero_()
    table = torch.zeros(4, max(pages), dtype=torch.int32)
    for b, count in enumerate(pages):
        table[b, :count] = torch.arange(sum(pages[:b]), sum(pages[: b + 1]))
    indexer = executor.indexer(layout, max_requests=4, max_seq_len=max(pages) * 128, max_prefill_tokens=400)
    device = executor.device
    out = torch.full((400, 1, 16), SENTINEL, dtype=torch.int32, device=device)
    plan = indexer.plan_prefill(cu_seqlens.to(device), lens.to(device), table.to(device), num_tokens=400)
    indexer.prefill(plan, torch.zeros(400, 1, 128, dtype=torch.bfloat16, device=device), cache.to(device), out)
    wanted = [p + i for n, p in zip(query_lens, prefixes, strict=True) for i in range(n)]
    assert (out[:, 0] >= 0).sum(1).tolist() == [min(p // 128 + 1, 16) for p in wanted]
    assert out[:, 0, 0].tolist() == [p // 128 for p in wanted], "the own block is forced and comes first"


@pytest.mark.parametrize("num_tokens", [1, 4, 5, 8, 12])
@pytest.mark.parametrize("way", ["executor", "reference"])
def test_fewer_tokens_than_queries(executor, way, num_tokens):
    """Queries from ``num_tokens`` on are no rows of q; the others keep their positions, so their ids are those of the
    whole batch.
    """
    case = PrefillCase("cut", "bf16", ((5, 2300), (0, 7), (4, 300), (4, 1000)), data="integer", topk=3)
    batch = build_prefill(case).to(executor.device if way == "executor" else "cpu")
    indexer = (
        executor.indexer(case.layout(), **case.options()) if way == "executor"
        else Indexer(case.layout(), device="cpu", backend="reference", **case.options())
    )  # fmt: skip
    metadata = (batch.cu_seqlens_q, batch.seq_lens, batch.block_table)
    wanted = indexer.prefill(
        indexer.plan_prefill(*metadata, num_tokens=13), batch.q, batch.cache, torch.full_like(batch.out, SENTINEL)
    )
    rows = num_tokens
    sparse = SparseTable(
        torch.arange(4 * case.width, dtype=torch.int32, device=batch.q.device).view(4, -1), 8,
        torch.full((rows, 24), SENTINEL, dtype=torch.int32, device=batch.q.device),
        torch.full((rows,), SENTINEL, dtype=torch.int32, device=batch.q.device),
    )  # fmt: skip
    out = torch.full_like(batch.out, SENTINEL)
    plan = indexer.plan_prefill(*metadata, num_tokens=rows)
    indexer.prefill(plan, batch.q[:rows], batch.cache, out[:rows], sparse_table=sparse)
    assert torch.equal(out[:rows], wanted[:rows])
    assert bool((out[rows:] == SENTINEL).all())
    positions = [2300 + i for i in range(5)] + [300 + i for i in range(4)] + [1000 + i for i in range(4)]
    tokens = [2 * 128 + p % 128 + 1 for p in positions[:rows]]
    assert sparse.context_lens.tolist() == tokens, "two full blocks, and the own one up to the query"


@pytest.mark.requires(ngpus=1)
@pytest.mark.parametrize("tokens", [65_536, 70_000])
def test_case_16_more_tokens_than_a_grid_dimension_holds(executor, tokens):
    """Tokens and rows beyond 65,535; with four heads 280,000 rows."""
    lengths = [700] * (tokens // 700) + [tokens % 700] * bool(tokens % 700)
    case = PrefillCase(
        "many", "e4m3fn", tuple((n, 300) for n in lengths), num_heads=4, data="integer", topk=4, seed=3
    )  # fmt: skip
    batch = build_prefill(replace(case, requests=case.requests[-2:])).to(executor.device)
    order = torch.tensor([0] * (len(lengths) - 1) + [1], device=executor.device)
    table, lens = batch.block_table[order], batch.seq_lens[order]
    options = {**case.options(), "max_seq_len": batch.block_table.shape[1] * 128}
    indexer = executor.indexer(case.layout(), **options)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int().to(executor.device)
    q = torch.cat([batch.q[:700].repeat(len(lengths) - 1, 1, 1), batch.q[700:]])
    out = torch.full((tokens, 4, 4), SENTINEL, dtype=torch.int32, device=executor.device)
    indexer.prefill(indexer.plan_prefill(cu_seqlens, lens, table, num_tokens=tokens), q, batch.cache, out)
    small = torch.empty_like(batch.out)
    plan = indexer.plan_prefill(batch.cu_seqlens_q, batch.seq_lens, batch.block_table, num_tokens=len(batch.q))
    indexer.prefill(plan, batch.q, batch.cache, small)
    wanted = torch.cat([small[:700].repeat(len(lengths) - 1, 1, 1), small[700:]])
    assert torch.equal(out, wanted)


# ---- refusals ----


def planned(**changes):
    """Arguments of a good plan_prefill, with changes."""
    good = {
        "cu_seqlens_q": torch.tensor([0, 3, 5], dtype=torch.int32), "seq_lens": torch.tensor([3, 5], dtype=torch.int32),
        "block_table": torch.zeros(2, 4, dtype=torch.int32), "num_tokens": 5,
    }  # fmt: skip
    return {**good, **changes}


def reference_indexer(**options):
    options = {"max_requests": 2, "max_seq_len": 512, "max_prefill_tokens": 8, **options}
    return Indexer(CacheLayout("bf16"), device="cpu", backend="reference", **options)


@pytest.mark.parametrize(
    "changes,error,message",
    [
        ({"cu_seqlens_q": torch.zeros(2, dtype=torch.int32)}, ValueError, "cu_seqlens_q: must have 3 entries"),
        ({"cu_seqlens_q": torch.zeros(3, dtype=torch.int64)}, TypeError, "cu_seqlens_q: .*int32"),
        ({"seq_lens": torch.zeros(3, dtype=torch.int32)}, ValueError, "seq_lens: must have 2 entries"),
        ({"num_tokens": 9}, ValueError, "num_tokens.*max_prefill_tokens=8"),
        ({"num_tokens": 0}, ValueError, "num_tokens"),
        ({"num_tokens": 2.0}, ValueError, "num_tokens"),
        ({"max_seq_len": 513}, ValueError, "max_seq_len.*512"),
        ({"slot": 1}, ValueError, "slot.*slots=1"),
        ({"block_table": torch.zeros(2, 5, dtype=torch.int32)}, ValueError, "block_table: must have 1..4 columns"),
    ],
)
def test_bad_plans_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        reference_indexer().plan_prefill(**planned(**changes))


def test_bad_prefills_are_refused():
    indexer = reference_indexer()
    plan = indexer.plan_prefill(**planned())
    cache = indexer.config.layout.empty(4, "cpu")
    q, out = torch.zeros(5, 1, 128, dtype=torch.bfloat16), torch.empty(5, 1, 16, dtype=torch.int32)
    with pytest.raises(ValueError, match="q: must have 5 rows"):
        indexer.prefill(plan, q[:4], cache, out[:4])
    with pytest.raises(ValueError, match="out: must have shape"):
        indexer.prefill(plan, q, cache, out[:4])
    with pytest.raises(TypeError, match=r"q: .*bfloat16"):
        indexer.prefill(plan, q.float(), cache, out)
    decode = indexer.plan_decode(planned()["block_table"], planned()["seq_lens"], query_len=1)
    with pytest.raises(TypeError, match="must be a PrefillPlan, is DecodePlan"):
        indexer.prefill(decode, q, cache, out)
    indexer.plan_prefill(**planned())
    with pytest.raises(StalePlanError, match="replaced by a later plan_prefill"):
        indexer.prefill(plan, q, cache, out)
    with pytest.raises(UnsupportedConfigError, match="pass max_prefill_tokens"):
        reference_indexer(max_prefill_tokens=0).plan_prefill(**planned())


@pytest.mark.parametrize("dtype", ["bf16", "e4m3fn", "nvfp4"])
def test_required_memory_is_what_is_allocated(executor, dtype):
    """Stated before anything is allocated, for maxima of several shapes."""
    for options in (
        {"max_requests": 3, "max_seq_len": 5000, "max_query_len": 2, "slots": 2},
        {"max_requests": 2, "max_seq_len": 300_000, "max_prefill_tokens": 300, "workspace_bytes": 1 << 22},
    ):
        layout = CacheLayout(dtype)
        with executor.active():
            stated = Indexer.required_memory(
                layout, device=executor.device, backend=executor.backend, arch=executor.arch, **options
            )
        indexer = executor.indexer(layout, **options)
        tensors = [t for slot in indexer._engine.buffers for t in slot.values()]
        tensors += [t for staging in indexer._staging for t in (staging.starts, staging._ring)]
        held = sum(t.numel() * t.element_size() for t in tensors)
        assert stated == indexer.memory()
        assert stated.total_bytes == held
        on_host = sum(staging._ring.numel() * 4 for staging in indexer._staging)
        assert (stated.host_bytes, stated.device_bytes) == (on_host, held - on_host)
        assert [name for name, _ in stated.items if f"{name} (host)" in str(stated)] == list(stated.host)
        assert bool(on_host) == ("max_prefill_tokens" in options)


@pytest.mark.parametrize("requests,topk", [(REQUESTS, 16), (SHORT_REQUESTS, SHORT_TOPK)])
def test_requests_of_the_conformance_cases_are_what_they_must_be(requests, topk):
    """Three requests with queries, more than topk blocks, a partial last block, queries that see different blocks."""
    assert sum(query_len > 0 for query_len, _ in requests) >= 3
    assert any((prefix + query_len) > topk * 128 and (prefix + query_len) % 128 for query_len, prefix in requests)
    assert any(prefix // 128 != (prefix + query_len - 1) // 128 for query_len, prefix in requests if query_len)

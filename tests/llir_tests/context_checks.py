# SPDX-License-Identifier: Apache-2.0
"""What each kernel of decode over ranks must do alone, against models in Python: every word that it pushes and none
beside them, words that come late over stale ones, and ranks that never come.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from executors import standin
from parallel.context_cases import TOTAL_HEADS, ContextCase

from blockpick import CacheLayout
from blockpick.ops.context_pick import CONTROL_WORDS, PUSH, WAIT, WORD_BYTES
from blockpick.ops.sparse_table import SparseTable
from blockpick.testing.reference import dequantise, select_blocks, sparse_row
from blockpick.testing.simulated import simulated_groups

LIMIT_S = 0.15
TICK_NS = 1_000_000  # by which every reading of the clock moves it: a limit is a number of looks, however slow they are
FLAG = 0  # word of a rank's own buffer
SENTINEL = -77
EPOCH_BITS, FORCED_BIT, VISIBLE = 32, 49, 1 << 48


@dataclass(frozen=True)
class Planned:
    """What launches need of a plan."""

    num_requests: int
    query_len: int = 1


class Late:
    """Words that arrive while a kernel waits: before each of its steps some of the rest, in random order, or those of the
    last row and rank last.
    """

    def __init__(self, words: torch.Tensor, final: torch.Tensor, seed: int, last_last: bool = False) -> None:
        self.words, self.final = words, final
        self.places = (words != final).nonzero()[:, 0].numpy()
        if not last_last:
            self.places = np.random.default_rng(seed).permutation(self.places)

    def __call__(self) -> None:
        now, self.places = np.split(self.places, [-(-len(self.places) // 4)])
        self.words[now] = self.final[now]


@contextmanager
def meanwhile(happens: Callable[[], None] | None = None) -> Iterator[None]:
    """What happens before each step of a launch, and a clock that moves by a tick at every reading."""
    device, now = standin(), itertools.count(step=TICK_NS)
    before = device.clock_ns
    device.beside, device.clock_ns = happens, lambda: next(now)
    try:
        yield
    finally:
        device.beside, device.clock_ns = None, before


class Team:
    """Simulated ranks whose plans are written by the test: one request for each position."""

    def __init__(
        self, machine: Any, size: int, heads: int, positions: Sequence[int], shard_pages: int = 0, **options: Any
    ) -> None:
        """``shard_pages``: tokens of the pages of a sharded cache; 0 of a replicated one."""
        self.machine, self.size, self.heads, self.positions = machine, size, heads, list(positions)
        self.step = shard_pages // 128 or size  # blocks of a page, each of which has neighbouring ranks
        layout = {"layout": CacheLayout("bf16", shard_pages or 128, size), "parallel": "sharded"}
        layout = layout if shard_pages else {"layout": CacheLayout("bf16"), "parallel": "context"}
        self.replicas = size * heads // TOTAL_HEADS
        self.plan, self.groups = Planned(len(positions)), simulated_groups(size, "cpu", LIMIT_S)
        self.options = {"topk": 16, "init_blocks": 0, "local_blocks": 1, "order": "score", **options}
        fits = {"max_requests": len(positions) + 1, "max_seq_len": -(-max(*positions, 2048) // 128 + 1) * 128}
        indexers = [
            machine.indexer(
                num_heads=heads, total_heads=TOTAL_HEADS, group=group, **layout, **fits, **self.options
            )
            for group in self.groups
        ]  # fmt: skip
        self.chains = [indexer._engine.context for indexer in indexers]
        self.own = [indexer._engine.context_buffers for indexer in indexers]
        self.words = indexers[0]._engine._exchange.tensors
        self.sizes, self.row_words = indexers[0]._engine.context_sizes, indexers[0]._engine.context_sizes.row_words
        for buffers in self.own:
            buffers["header"][1:3] = torch.tensor([self.plan.num_requests, self.plan.query_len])
            buffers["positions"][: len(positions)] = torch.tensor(self.positions)

    @contextmanager
    def running(self, happens: Callable[[], None] | None = None) -> Iterator[None]:
        """Kernels reach the words of all ranks."""
        with self.machine.sharing(self.words), meanwhile(happens):
            yield

    def first_block(self, rank: int) -> int:
        return rank * self.step // self.size

    def first_head(self, rank: int) -> int:
        return rank // self.replicas * self.heads

    def region(self, epoch: int, candidates: bool) -> int:
        """The word at which the queries or candidates of an epoch begin."""
        queries, parity = self.sizes.query_bytes // WORD_BYTES, epoch & 1
        if candidates:
            return CONTROL_WORDS + 2 * queries + parity * (self.sizes.candidate_bytes // WORD_BYTES)
        return CONTROL_WORDS + parity * queries

    def scores(self, seed: int) -> torch.Tensor:
        """Scores [request, head, block]: few values, so many ties, NaN and both zeros among them; of head 0 all differ."""
        generator = torch.Generator().manual_seed(seed)
        blocks = max(self.positions) // 128 + 1
        values = torch.randint(-9, 10, (len(self.positions), TOTAL_HEADS, blocks), generator=generator) / 4
        values[torch.rand(values.shape, generator=generator) < 0.1] = float("nan")
        values[torch.rand(values.shape, generator=generator) < 0.1] = -0.0
        values[:, 0] = torch.randn(values[:, 0].shape, generator=generator)
        return values

    def candidates(self, scores: torch.Tensor, request: int, head: int, rank: int, epoch: int) -> np.ndarray:
        """The 2 * topk words that a rank sends for a row; none for rows whose blocks all win in an order of ids."""
        own, topk = self.positions[request] // 128, self.options["topk"]
        if own < 0 or (self.options["order"] != "score" and own < topk):
            return np.zeros(0, np.int64)
        block = np.arange(self.first_block(rank), own + 1, self.step)
        value = scores[request, head, block].numpy() + np.float32(0)
        bits = value.view(np.uint32).astype(np.int64)
        ordered = np.where(bits >= 1 << 31, 0xFFFFFFFF - bits, bits + (1 << 31))
        ordered = np.where(np.isnan(value), 1, ordered)
        local, init = block > own - self.options["local_blocks"], block < self.options["init_blocks"]
        forced = np.where(local, 1, np.where(init, 2, 0))
        key = forced << FORCED_BIT | VISIBLE | np.where(forced > 0, 0, ordered) << 16 | 0xFFFF - block
        key = np.concatenate([np.sort(key)[::-1], np.zeros(topk, np.int64)])[:topk]
        words = np.stack([key >> 16 & 0xFFFFFFFF, (key >> 48 & 0xFFFF) << 16 | key & 0xFFFF], axis=1)
        return (words | epoch << EPOCH_BITS).reshape(-1)

    def receive(self, words: torch.Tensor, scores: torch.Tensor, owner: int, source: int, epoch: int) -> None:
        """Put what ``source`` sends to ``owner`` into the owner's words."""
        row = 2 * self.options["topk"]
        for request, mine in itertools.product(range(len(self.positions)), range(self.heads)):
            sent = self.candidates(scores, request, self.first_head(owner) + mine, source, epoch)
            place = self.region(epoch, True) + ((request * self.heads + mine) * self.size + source) * row
            words[place : place + len(sent)] = torch.from_numpy(sent)

    def fail_record(self, epoch: int, stage: int, peer: int) -> int:
        return epoch << 32 | stage << 16 | (peer + 1) << 8 | 1


# ---- decode_plan


def check_context_plan(machine: Any) -> None:
    """The work list of every rank for lengths of every kind: its blocks, and positions in which only they count."""
    for page_size, shards in (
        (256, 1),
        (128, 4),
        (256, 4),
    ):  # stored: whole blocks; 32 rows of each; 64 of every second
        check_plan_of_ranks(machine, page_size, shards)


def check_plan_of_ranks(machine: Any, page_size: int, shards: int) -> None:
    """Four ranks, of pages and shards of some size, against counting tokens one by one."""
    lens, width, size, query_len = [2500, 0, 129, -5, 128 * 4096, 70_001, 384, 34], 640, 4, 2
    table = torch.arange(len(lens) * width, dtype=torch.int32).view(len(lens), width).flip(1)
    tokens_held = width * page_size
    options = {"max_requests": len(lens), "max_query_len": query_len, "max_seq_len": tokens_held, "order": "local_last"}
    parallel, bpp = "context" if shards == 1 else "sharded", page_size // 128
    for group in simulated_groups(size, "cpu"):
        layout = CacheLayout("bf16", page_size, shards)
        indexer = machine.indexer(layout, num_heads=1, parallel=parallel, group=group, **options)
        if shards == 1:
            stored = np.arange(tokens_held) // 128 % size == group.rank
        else:
            stored = np.arange(tokens_held) % page_size // layout.page_rows == group.rank
        held = np.unique(np.nonzero(stored)[0] // 128)
        found = indexer._engine.context_buffers
        for name in ("positions", "local_positions", "offsets", "blocks"):
            found[name].fill_(SENTINEL)
        indexer.plan_decode(table, torch.tensor(lens, dtype=torch.int32), query_len=query_len)
        model = {name: [] for name in ("positions", "local_positions", "offsets", "blocks")}
        for row, length in zip(table.tolist(), lens, strict=True):
            tokens = max(length, 0)
            count = -(-min(tokens, tokens_held) // 128)
            model["offsets"].append(len(model["blocks"]))
            if count > 16:  # fewer all win, in an order that ids decide
                for block in held[held < count].tolist():
                    page = row[block // bpp]
                    model["blocks"].append(page * bpp + block % bpp if shards == 1 else page)
            for query in range(query_len):
                position = max(min(tokens - query_len + query, tokens_held - 1), -1)
                model["positions"].append(position)
                model["local_positions"].append(int(stored[: position + 1].sum()) - 1)
        model["offsets"].append(len(model["blocks"]))
        total, units = len(model["blocks"]), indexer._engine.context._units[query_len - 1]
        starts = model["offsets"][:-1]
        first = [max(r for r, start in enumerate(starts) if start <= unit * total // units) for unit in range(units)]
        assert found["header"][:3].tolist() == [total, len(lens), query_len]
        assert found["unit_request"][:units].tolist() == first
        for name, values in model.items():
            assert found[name][: len(values)].tolist() == values, name
            assert bool((found[name][len(values) :] == SENTINEL).all()), f"beyond {name}"


# ---- exchange_queries


def check_exchange(machine: Any) -> None:
    """Pushed words, queries that come late, over four calls; replicas; then ranks that fall silent."""
    for size, heads, watched in ((2, 2, (0, 1)), (8, 1, (0, 7))):
        team = Team(machine, size, heads, [127] * 3)
        for epoch in range(1, 5):
            check_exchange_call(team, epoch, watched)
    for withheld in (range(128), range(100, 128)):
        check_silence_in_exchange(Team(machine, 2, 2, [127]), withheld)


def check_exchange_call(team: Team, epoch: int, watched: Sequence[int]) -> None:
    """One call on all ranks; ``watched`` ones gather while the words of their peers still come."""
    q, (tokens, plan) = team_queries(team, epoch), (len(team.positions), team.plan)
    before = [words.clone() for words in team.words]
    shares = [q[:, team.first_head(rank) :][:, : team.heads].contiguous() for rank in range(team.size)]
    with team.running():
        for chain, share in zip(team.chains, shares, strict=True):
            chain.exchange(plan, share, PUSH)
    data = q.view(torch.int32).reshape(-1)
    place = team.region(epoch, False)
    for words, old in zip(team.words, before, strict=True):
        expected = old.clone()
        expected[place : place + len(data)] = (data.long() & 0xFFFFFFFF) | epoch << EPOCH_BITS
        assert torch.equal(words, expected), "pushed words"
    for rank in watched:
        words, buffers = team.words[rank], team.own[rank]
        final = words.clone()
        words.copy_(before[rank])
        buffers["queries"].fill_(-1)
        with team.running(Late(words, final, epoch, last_last=rank > 0)):
            team.chains[rank].exchange(plan, shares[rank], WAIT)
        assert torch.equal(words, final) and team.groups[rank].failed() == 0, "it waits for every word"
        assert torch.equal(buffers["queries"][: len(data)], data), "gathered queries"
        assert bool((buffers["queries"][len(data) :] == -1).all()), f"beyond {tokens} queries"
        assert buffers["epochs"].tolist() == [epoch, epoch]
    for buffers in team.own:
        buffers["epochs"][0] = epoch + 1


def team_queries(team: Team, seed: int) -> torch.Tensor:
    """Queries of all heads, every bit pattern as likely as any other."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**15), 2**15, (len(team.positions), TOTAL_HEADS, 128), generator=generator)
    return bits.to(torch.int16).view(torch.bfloat16)


def check_silence_in_exchange(team: Team, withheld: range) -> None:
    """Some of the words of rank 1 never come to rank 0: it says so, and from then on sends and waits for nothing."""
    q, words, epoch = team_queries(team, 3)[:, :2].contiguous(), team.words[0], 1
    with team.running():
        for chain in team.chains:
            chain.exchange(team.plan, q, PUSH)
        words[team.region(epoch, False) + 128 + np.array(withheld)] = 0
        team.chains[0].exchange(team.plan, q, WAIT)
        assert team.groups[0].failed() == team.fail_record(epoch, 1, 1) and words[FLAG] == 1
        team.groups[0].record.zero_()
        kept = [words.clone() for words in team.words]
        team.own[0]["epochs"][0] = 2
        team.chains[0].exchange(team.plan, q, PUSH | WAIT)
    assert all(torch.equal(*pair) for pair in zip(kept, team.words, strict=True)) and team.groups[0].failed() == 0


# ---- decode_score_shards


def part_score_checks(dtype: str, rounding: str | None = None, queries: int = 4) -> Callable[[Any], None]:
    """Scores of ranks that store 16, 32, 64 and 128 rows of a block; all columns and some; so few programs that each has
    many tiles.
    """
    options = {"sharded": True, "spare_requests": 0, "topk": 2, "rounding": rounding}
    cases = [
        (ContextCase("r64", dtype, lens=(2500, 0, 2304), query_len=queries, **options), 2, 1),
        (ContextCase("r16", dtype, lens=(2500, 2304), query_len=queries - 3, **options), 8, 6),
        (ContextCase("r32", dtype, lens=(1300, 5), query_len=queries - 2, **options), 4, 0),
        (
            ContextCase(
                "r128", dtype, lens=(2500, 2049), query_len=queries, page_size=256, shard_scorer=True, **options
            ),
            2,
            1,
        ),
    ]

    def check(machine: Any) -> None:
        for case, size, rank in cases:
            check_part_scores(replace(machine, compute_units=1), case, size, rank)

    return check


def check_part_scores(machine: Any, case: ContextCase, size: int, rank: int) -> None:
    """What one rank's scorer writes: of every listed block the maximum over the visible tokens that the rank stores, NaN
    where there is none; and nothing else.
    """
    group, options = simulated_groups(size, "cpu")[rank], case.rank_options(size)
    heads = max(TOTAL_HEADS // size, 1)
    indexer = machine.indexer(num_heads=heads, total_heads=TOTAL_HEADS, group=group, **options, **case.options)
    cache, table, lens, q = case.batch()
    plan, buffers = indexer.plan_decode(table, lens, query_len=case.query_len), indexer._engine.context_buffers
    words = q.contiguous().view(torch.int32).reshape(-1)
    buffers["queries"][: len(words)] = words
    buffers["scores"].fill_(3e38)
    indexer._engine.context.score(plan, case.rank_cache(rank, size))
    written, found = buffers["scores"].clone(), indexer.scores(plan)
    for word in (1, 2):  # the plan is for another batch
        buffers["header"][word] += 1
        buffers["scores"].fill_(3e38)
        indexer._engine.context.score(plan, case.rank_cache(rank, size))
        assert bool((buffers["scores"] == 3e38).all()), "scores of a plan for another batch"
        buffers["header"][word] -= 1
    buffers["scores"].copy_(written)
    expected = torch.full_like(found, 3e38)
    keys = dequantise(case.layout, cache, case.rounding or "exact")
    token = torch.arange(case.width * case.page_size)
    stored = token % case.page_size // options["layout"].page_rows == rank
    held = token[stored].div(128, rounding_mode="floor").unique()
    for b, length in enumerate(lens.tolist()):
        dots = torch.einsum(
            "thd,sd->ths", q.double()[b * case.query_len :][: case.query_len], keys[table[b]].flatten(0, 1)
        )
        for query, (place, block) in itertools.product(range(case.query_len), enumerate(held.tolist())):
            if block * 128 < length:
                seen = stored & (token // 128 == block) & (token <= length - case.query_len + query)
                best = dots[query][:, seen].amax(1) if bool(seen.any()) else torch.full((TOTAL_HEADS,), float("nan"))
                expected[b, query, :, place] = best.float()
    assert torch.equal(found.nan_to_num(1e38), expected.nan_to_num(1e38)), f"scores of {case}"
    rows = plan.num_requests * plan.query_len * TOTAL_HEADS
    stride = indexer._engine.context_sizes.score_stride
    beyond = buffers["scores"][: rows * stride].view(rows, stride)[:, found.shape[-1] :]
    assert bool((beyond == 3e38).all()) and bool((buffers["scores"][rows * stride :] == 3e38).all()), (
        "beyond the scores"
    )


# ---- push_candidates


def push_checks(topk: int) -> Callable[[Any], None]:
    """Words of all slots, rows and replicas, and none beside them; long rows, other plans, after a failure."""

    def check(machine: Any) -> None:
        long = 2 * 1100 * 128  # more own blocks than one step takes
        options = {"topk": topk, "init_blocks": 1, "local_blocks": 2}
        check_pushes(Team(machine, 2, 2, [2303, -1, 300, 2 * topk * 128 + 5], **options), range(2))
        check_pushes(Team(machine, 8, 4, [(8 * topk + 9) * 128 + 40], **options), (0, 5))
        check_pushes(Team(machine, 4, 1, [long, 2303], shard_pages=256, **options), (1, 2))
        check_pushes(Team(machine, 2, 2, [1300 * 128], shard_pages=128, topk=topk), (1,))
        check_pushes(Team(machine, 2, 2, [long, 128 * topk - 1, 128 * topk], topk=topk, order="local_last"), (1,))

    return check


def check_pushes(team: Team, senders: Sequence[int]) -> None:
    """Two calls, one after the other on every sender."""
    rows = len(team.positions) * TOTAL_HEADS
    expected = [words.clone() for words in team.words]
    for epoch in (1, 2):
        scores = team.scores(epoch)
        for rank in senders:
            own = team.own[rank]["scores"][: rows * team.sizes.score_stride].view(rows, -1)
            mine = scores.view(rows, -1)[:, team.first_block(rank) :: team.step]
            own[:, : mine.shape[1]] = mine
            team.own[rank]["epochs"][1] = epoch
            with team.running():
                team.chains[rank].push(team.plan, torch.device("cpu"))
            for owner, words in enumerate(expected):
                team.receive(words, scores, owner, rank, epoch)
            assert all(map(torch.equal, team.words, expected)), f"words that rank {rank} pushed in epoch {epoch}"
    header = team.own[senders[0]]["header"]
    with team.running():
        header[1] += 1
        team.own[senders[0]]["epochs"][1] = 3
        team.chains[senders[0]].push(team.plan, torch.device("cpu"))  # the plan is for another batch
        header[1] -= 1
        team.words[senders[0]][FLAG] = expected[senders[0]][FLAG] = 1
        team.chains[senders[0]].push(team.plan, torch.device("cpu"))
    assert all(map(torch.equal, team.words, expected)), "words pushed for another plan, or after a failure"


# ---- merge_ranks


def merge_checks(topk: int) -> Callable[[Any], None]:
    """Ids from candidates that come late, over three calls; orders; then ranks that fall silent."""

    def check(machine: Any) -> None:
        rows = [3 * 128 * topk, 2303, -1, 300, 128 * topk - 1, 128 * topk]
        options = {"topk": topk, "init_blocks": 1, "local_blocks": 2}
        check_merges(Team(machine, 2, 2, rows[:4], **options), 1)
        check_merges(Team(machine, 2, 2, rows, topk=topk, order="local_last"), 0)
        check_merges(Team(machine, 8, 1, [128 * 8 * topk, 1], topk=topk, order="ascending"), 5)
        check_shared_blocks(Team(machine, 4, 1, [3 * 128 * topk, 130], shard_pages=128, topk=topk, local_blocks=0), 2)
        check_shared_blocks(Team(machine, 2, 2, [4 * 128 * topk, 9], shard_pages=128, **options), 1)
        check_shared_blocks(Team(machine, 4, 1, [4 * 128 * topk, 300], shard_pages=256, **options), 3)
        for slots in (range(2 * topk), range(2 * topk - 1, 2 * topk)):
            check_silence_in_merge(Team(machine, 2, 2, [2 * 128 * topk, 77], topk=topk, order="local_last"), slots)

    return check


def merged(team: Team, rank: int) -> torch.Tensor:
    """Launch the merge; ids, whose rows beyond the batch are untouched."""
    tokens = len(team.positions)
    out = torch.full((tokens + 1, team.heads, team.options["topk"]), SENTINEL, dtype=torch.int32)
    team.chains[rank].merge(team.plan, out)
    assert bool((out[tokens] == SENTINEL).all()), "rows beyond the batch"
    return out[:tokens]


def merged_with_table(team: Team, rank: int) -> torch.Tensor:
    """Launch the merge with a sparse table; ids, to which the table fits. What lies beyond its rows is untouched."""
    tokens, topk = len(team.positions), team.options["topk"]
    out = torch.full((tokens, team.heads, topk), SENTINEL, dtype=torch.int32)
    attention = torch.arange(tokens * 2048, dtype=torch.int32).view(tokens, 2048) * 3 + 1
    table = torch.full((tokens * team.heads + 1, topk * 8), SENTINEL, dtype=torch.int32)
    lens = torch.full((len(table),), SENTINEL, dtype=torch.int32)
    team.chains[rank].merge(team.plan, out, SparseTable(attention, 16, table, lens))
    assert int(out.max()) < attention.shape[1], "ids of blocks that there are"
    for row, ids in enumerate(out.flatten(0, 1).tolist()):
        token = row // team.heads
        position = team.own[rank]["positions"][token] if ids[0] >= 0 else -1
        pages, held = sparse_row(ids, int(position), attention[token], 16)
        assert table[row].tolist() == pages and lens[row] == held, f"table of row {row}"
    assert table[-1].unique().tolist() == [SENTINEL] and lens[-1] == SENTINEL, "rows beyond the batch"
    return out


def wanted(team: Team, scores: torch.Tensor, rank: int) -> list[Any]:
    """Ids of a rank's heads, by the oracle."""
    names = ("topk", "init_blocks", "local_blocks", "order")
    options = [team.options[name] for name in names]
    heads = range(team.first_head(rank), team.first_head(rank) + team.heads)
    return [
        [select_blocks(scores[b, head], position, *options, "minus_one") for head in heads]
        for b, position in enumerate(team.positions)
    ]


def check_merges(team: Team, rank: int) -> None:
    """Three calls: in the third, words of the first lie where those that come late will be."""
    words, epochs = team.words[rank], team.own[rank]["epochs"]
    for epoch in (1, 2, 3):
        scores, final = team.scores(epoch), words.clone()
        for source in range(team.size):
            team.receive(final, scores, rank, source, epoch)
        epochs[1] = epoch
        with team.running(Late(words, final, epoch)):
            found = (merged if epoch == 2 else merged_with_table)(team, rank)
        assert found.tolist() == wanted(team, scores, rank), f"ids of epoch {epoch}"
        assert torch.equal(words, final) and team.groups[rank].failed() == 0, "it waits for every word"
        assert epochs.tolist() == [epoch + 1, epoch]
    epochs[1] = 0xFFFFFFFF
    team.own[rank]["positions"].fill_(-1)
    with team.running():
        assert merged(team, rank).unique().tolist() == [-1] and epochs[0] == 2, "after the last epoch"


def check_shared_blocks(team: Team, rank: int) -> None:
    """Ranks score parts of the same blocks: an id that several send counts once, by the best part; few ids are left over."""
    words, epochs = team.words[rank], team.own[rank]["epochs"]
    for epoch in (1, 2):
        parts = [team.scores(10 * epoch + source) for source in range(team.size)]
        final = words.clone()
        for source, part in enumerate(parts):
            team.receive(final, part, rank, source, epoch)
        epochs[1] = epoch
        with team.running(Late(words, final, epoch)):
            found = merged_with_table(team, rank)
        best = torch.stack(parts)
        holders = torch.arange(team.size) * team.step // team.size  # of every step-th block, from this one on
        blocks = torch.arange(best.shape[-1]) % team.step
        best[(holders[:, None] != blocks)[:, None, None].expand_as(best)] = float("nan")
        best = best.nan_to_num(-1e30, posinf=float("inf"), neginf=float("-inf")).amax(0)
        best[best == -1e30] = float("nan")
        assert found.tolist() == wanted(team, best, rank), f"ids of epoch {epoch}"


def check_silence_in_merge(team: Team, slots: range) -> None:
    """Some of the words of rank 1 never come: the rows are empty, and nothing is waited for any more."""
    words, epochs, scores, topk = team.words[0], team.own[0]["epochs"], team.scores(1), team.options["topk"]
    for source in range(2):
        team.receive(words, scores, 0, source, 1)
    words[team.region(1, True) + 2 * topk + np.array(slots)] = 0  # of the first row
    short = [0] + [-1] * (topk - 1)
    with team.running():
        epochs[1] = 1
        found = merged(team, 0)
        assert found[0, 0].unique().tolist() == [-1] and found[1].tolist() == [short] * 2
        assert team.groups[0].failed() == team.fail_record(1, 2, 1) and words[FLAG] == 1 and epochs[0] == 2
        team.groups[0].record.zero_()
        epochs[1] = 2
        assert (
            merged_with_table(team, 0)[0].unique().tolist() == [-1] and team.groups[0].failed() == 0 and epochs[0] == 3
        )

# SPDX-License-Identifier: Apache-2.0
"""What rank processes are asked to do."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from parallel.context_cases import SENTINEL, ContextCase, heads_of, replicated, turned
from parallel.ranks import Rank

import blockpick
from blockpick import Indexer, RankGroup


def place(context: Rank) -> dict[str, Any]:
    """Where a rank runs: sources in the interpreter, or release binaries on the machine's GPUs."""
    if not torch.cuda.is_available():
        return {"device": "cpu", "backend": "interpreter", "arch": context.kept.get("arch", "sm90")}
    device = f"cuda:{context.rank % torch.cuda.device_count()}"
    torch.cuda.set_device(device)
    return {"device": device, "backend": "aot", "arch": None}


def make_group(context: Rank, options: dict[str, Any] | None = None) -> str:
    """A group that stays; its explanation."""
    drop_group(context)
    context.kept["group"] = RankGroup(device=place(context)["device"], **(options or {}))
    return context.kept["group"].explain()


def drop_group(context: Rank) -> None:
    """Close the indexer's buffers and the group."""
    context.kept.pop("indexer", None)
    group = context.kept.pop("group", None)
    if group is not None:
        group.close()


def make_indexer(context: Rank, case: ContextCase) -> Indexer:
    """An indexer for the case over the kept group."""
    heads = heads_of(context.rank, context.size)
    return Indexer(
        case.layout, num_heads=heads.stop - heads.start, parallel="context", group=context.kept["group"],
        **place(context), **case.options,
    )  # fmt: skip


def decode(context: Rank, case: ContextCase, calls: int = 2) -> list[str]:
    """Decode a case several times; what is wrong."""
    where = place(context)
    device = where["device"]
    heads = heads_of(context.rank, context.size)
    expected = replicated(case, where["backend"], where["arch"], device)[:, heads]
    cache, table, lens, q = (tensor.to(device) for tensor in case.batch())
    indexer = make_indexer(context, case)
    plan = indexer.plan_decode(table, lens, query_len=case.query_len)
    problems = []
    for call in range(calls):
        shape = (len(q), heads.stop - heads.start, case.topk)
        out = torch.full(shape, SENTINEL, dtype=torch.int32, device=device)
        target = out if case.out_layout == "thk" else out.transpose(0, 1).contiguous()
        indexer.decode(plan, q[:, heads].contiguous(), cache, target)
        found = (target if case.out_layout == "thk" else target.transpose(0, 1)).cpu()
        if not torch.equal(found, expected):
            row = (found != expected).any(-1).nonzero()[0].tolist()
            problems.append(
                f"rank {context.rank} call {call}: row {row} is {found[tuple(row)].tolist()}, replicated decode picks "
                f"{expected[tuple(row)].tolist()}"
            )
    indexer.close()
    context.kept["group"].check()
    return problems


def pid(context: Rank) -> int:
    """The rank's process."""
    return os.getpid()


def open_files(context: Rank) -> int:
    """File descriptors that are open."""
    return len(os.listdir("/proc/self/fd"))


def sleep(context: Rank, seconds: float) -> None:
    """Be late."""
    time.sleep(seconds)


__all__ = ["blockpick", "decode", "drop_group", "make_group", "make_indexer", "open_files", "pid", "place", "sleep"]


BANK = ((2500, 2304, 641), (5, 0, 130), (2500, 1, 2559), (0, 0, 0))  # long, all short, mixed, nothing


def soak(context: Rank, case: ContextCase, calls: int, slow_rank: int) -> list[int]:
    """Decode changing batches, on a GPU by replaying one captured graph; the calls that gave a wrong id."""
    where, heads = place(context), heads_of(context.rank, context.size)
    device = where["device"]
    cache, table, lens, q = (tensor.to(device) for tensor in case.batch())
    queries = [turned(q, turn) for turn in range(len(BANK))]
    lengths = [torch.tensor(row, dtype=torch.int32, device=device) for row in BANK]
    alone = Indexer(case.layout, num_heads=q.shape[1], **where, **case.options)
    expected = []
    for turn in range(len(BANK)):
        out = torch.full((len(q), q.shape[1], case.topk), SENTINEL, dtype=torch.int32, device=device)
        plan = alone.plan_decode(table, lengths[turn], query_len=case.query_len)
        expected.append(alone.decode(plan, queries[turn], cache, out)[:, heads].contiguous())
    indexer = make_indexer(context, case)
    own, out = q[:, heads].contiguous(), torch.empty_like(expected[0])

    def plan_and_copy(turn: int) -> Any:
        lens.copy_(lengths[turn])
        own.copy_(queries[turn][:, heads])
        return indexer.plan_decode(table, lens, query_len=case.query_len)

    run = captured(lambda plan: indexer.decode(plan, own, cache, out), plan_and_copy(0))
    context.kept["group"].started()
    wrong = torch.zeros(calls, dtype=torch.bool, device=device)
    for call in range(calls):
        turn = call % len(BANK)
        plan = plan_and_copy(turn)
        out.fill_(SENTINEL)
        if context.rank == slow_rank and call % 7 == 0:
            be_slow(device)
        run(plan)
        wrong[call] = (out != expected[turn]).any()
    found = wrong.nonzero().flatten().tolist()
    context.kept["group"].check()
    indexer.close()
    return found


def captured(run: Any, plan: Any) -> Any:
    """``run`` as a graph's replay on a GPU, after one warm-up call; itself elsewhere."""
    run(plan)
    if not torch.cuda.is_available():
        return run
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(plan)
    return lambda _: graph.replay()


def be_slow(device: str) -> None:
    """Hold this rank up, on its device where it has one."""
    if device == "cpu":
        time.sleep(0.3)
    else:
        torch.cuda._sleep(2_000_000)

# SPDX-License-Identifier: Apache-2.0
"""What rank processes over the stand-in for AMD's runtime are asked to do: real loader, real hipIpc calls, compiled
kernels executed at LLVM-IR level.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch
from executors import IrExecutor, ir_executor, standin
from hip_standin.counts import counts
from parallel.context_cases import SENTINEL, ContextCase, heads_of
from parallel.ranks import Rank

import blockpick
from blockpick import RankGroup
from blockpick.parallel import group as group_module


def become(context: Rank, arch: str, order: str) -> tuple[str, ...]:
    """Use one AMD device from now on: its memory and its facts in groups of CPU tensors. Its kinds of handles."""
    from blockpick_rocm import RocmBackend

    executor = ir_executor(arch, order, seed=context.rank + 1)
    os.environ["BLOCKPICK_STANDIN_DEVICES"] = executor.devices
    standin()
    backend, own_facts = RocmBackend(), RankGroup._own_facts
    (info,) = backend.devices()

    def facts(group: RankGroup, asked: Any) -> Any:
        found = own_facts(group, asked)
        return dataclasses.replace(found, vendor=info.vendor, driver=info.driver, compute_units=info.compute_units)

    group_module._peer_memory = lambda _: backend.peer_memory(0)
    RankGroup._own_facts = facts
    context.kept["executor"] = executor
    return backend.peer_memory(0).kinds()


def make_group(context: Rank, options: dict[str, Any]) -> str:
    """A group that stays; its explanation."""
    drop_group(context)
    context.kept["group"] = RankGroup(device="cpu", **options)
    return context.kept["group"].explain()


def drop_group(context: Rank) -> list[int]:
    """Close the group; what the stand-in still holds."""
    context.kept.pop("indexer", None)
    group = context.kept.pop("group", None)
    if group is not None:
        group.close()
    return counts()


def make_indexer(context: Rank, case: ContextCase) -> Any:
    """An indexer over the kept group, on this rank's device."""
    executor: IrExecutor = context.kept["executor"]
    heads = heads_of(context.rank, context.size)
    return executor.indexer(
        case.layout, num_heads=heads.stop - heads.start, parallel="context", group=context.kept["group"], **case.options
    )


def decode(context: Rank, case: ContextCase, expected: torch.Tensor, calls: int) -> list[str]:
    """Decode several times; what is wrong, and the variants that ran."""
    cache, table, lens, q = case.batch()
    heads = heads_of(context.rank, context.size)
    indexer, own = make_indexer(context, case), q[:, heads].contiguous()
    plan = indexer.plan_decode(table, lens, query_len=case.query_len)
    buffers, problems = indexer._engine.context_buffers, []
    gathered = [buffers[name] for name in ("candidates", "gathered") if name in buffers]  # reached by addresses
    for call in range(calls):
        out = torch.full((len(q), heads.stop - heads.start, case.topk), SENTINEL, dtype=torch.int32)
        with context.kept["executor"].sharing(gathered):
            indexer.decode(plan, own, cache, out)
        if not torch.equal(out, expected[:, heads]):
            row = (out != expected[:, heads]).any(-1).nonzero()[0].tolist()
            problems.append(f"rank {context.rank} call {call}: row {row} is {out[tuple(row)].tolist()}")
    context.kept["group"].check()
    indexer.close()
    return problems


def alone(context: Rank, case: ContextCase) -> tuple[list[int], str]:
    """Decode without the other ranks; the ids that come out, and what the next call says."""
    cache, table, lens, q = case.batch()
    heads = heads_of(context.rank, context.size)
    indexer = context.kept["indexer"]
    plan = indexer.plan_decode(table, lens, query_len=case.query_len)
    out = torch.full((len(q), heads.stop - heads.start, case.topk), SENTINEL, dtype=torch.int32)
    indexer.decode(plan, q[:, heads].contiguous(), cache, out)
    try:
        context.kept["group"].check()
    except blockpick.PeerError as error:
        return out.unique().tolist(), str(error)
    return out.unique().tolist(), ""


def keep_indexer(context: Rank, case: ContextCase) -> None:
    """Make an indexer and keep it."""
    context.kept["indexer"] = make_indexer(context, case)


def hold(context: Rank) -> list[int]:
    """What the stand-in holds."""
    return counts()


def groups_come_and_go(context: Rank, times: int) -> list[list[int]]:
    """Open two buffers in groups made and dropped; what is held after each."""
    held = []
    for _ in range(times):
        with RankGroup(device="cpu", transport="peer") as group:
            buffers = [group.open_buffer(1), group.open_buffer(3 << 20)]
            assert [len(buffer.addresses) for buffer in buffers] == [context.size] * 2
        held.append(counts())
    return held

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
    device = f"cuda:{os.environ.get('BLOCKPICK_TEST_DEVICE') or context.rank % torch.cuda.device_count()}"
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
        num_heads=heads.stop - heads.start, group=context.kept["group"], **case.rank_options(context.size),
        **place(context), **case.options,
    )  # fmt: skip


def decode(context: Rank, case: ContextCase, calls: int = 2) -> list[str]:
    """Decode a case several times; what is wrong."""
    where = place(context)
    device = where["device"]
    heads = heads_of(context.rank, context.size)
    expected = replicated(case, where["backend"], where["arch"], device)[:, heads]
    cache, table, lens, q = (tensor.to(device) for tensor in case.batch())
    if case.sharded:
        cache = case.rank_cache(context.rank, context.size).to(device)
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


LAYERS = 2 if torch.cuda.is_available() else 1  # of one graph
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
    own, out = q[:, heads].contiguous(), torch.empty(LAYERS, *expected[0].shape, dtype=torch.int32, device=device)

    def plan_and_copy(turn: int) -> Any:
        lens.copy_(lengths[turn])
        own.copy_(queries[turn][:, heads])
        return indexer.plan_decode(table, lens, query_len=case.query_len)

    def layers(plan: Any) -> None:
        for layer in range(LAYERS):
            indexer.decode(plan, own, cache, out[layer])

    run = captured(layers, plan_and_copy(0))
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


# ---- failures


def prepare(context: Rank, case: ContextCase) -> None:
    """Keep an indexer, a plan and tensors of the case."""
    device, heads = place(context)["device"], heads_of(context.rank, context.size)
    cache, table, lens, q = (tensor.to(device) for tensor in case.batch())
    indexer = make_indexer(context, case)
    out = torch.full((len(q), heads.stop - heads.start, case.topk), SENTINEL, dtype=torch.int32, device=device)
    context.kept["indexer"] = indexer
    context.kept["batch"] = (table, lens, case.query_len)
    context.kept["tensors"] = (q[:, heads].contiguous(), cache, out)
    context.kept["plan"] = indexer.plan_decode(table, lens, query_len=case.query_len)


def stages(context: Rank) -> dict[str, Any]:
    """The launches of one layer by name, in order."""
    chain, plan = context.kept["indexer"]._engine.context, context.kept["plan"]
    q, cache, out = context.kept["tensors"]
    return {
        "exchange": lambda: chain.exchange(plan, q),
        "score": lambda: chain.score(plan, cache),
        "push": lambda: chain.push(plan, q.device),
        "merge": lambda: chain.merge(plan, out),
    }


def run_stages(context: Rank, until: str | None) -> None:
    """One layer, without the stage ``until`` and all after it."""
    for name, stage in stages(context).items():
        if name == until:
            break
        stage()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def replay_layers(context: Rank, layers: int) -> tuple[list[float], bool]:
    """Layers as a graph would replay them, whatever happens: seconds of each, and whether all rows ended up empty."""
    out, seconds = context.kept["tensors"][2], []
    for _ in range(layers):
        begin = time.monotonic()
        out.fill_(SENTINEL)
        run_stages(context, None)
        seconds.append(time.monotonic() - begin)
    return seconds, bool((out == -1).all())


def what_raises(context: Rank) -> list[tuple[str, str, int | None]]:
    """Error, message and peer of every call that must report a failed rank."""
    indexer, (table, lens, query_len) = context.kept["indexer"], context.kept["batch"]
    q, cache, out = context.kept["tensors"]

    def plan() -> None:
        context.kept["plan"] = indexer.plan_decode(table, lens, query_len=query_len)

    calls = (
        lambda: context.kept["group"].check(),
        plan,
        lambda: indexer.decode(context.kept["plan"], q, cache, out),
    )
    found = []
    for call in calls:
        try:
            call()
        except blockpick.PeerError as error:
            found.append((type(error).__name__, str(error), error.peer))
    return found


def fail_inside_decode(context: Rank) -> str:
    """Raise between two launches of a layer, as a driver error would."""

    def broken(*_: Any) -> None:
        raise RuntimeError("planted")

    context.kept["indexer"]._engine.context.push = broken
    q, cache, out = context.kept["tensors"]
    try:
        context.kept["indexer"].decode(context.kept["plan"], q, cache, out)
    except RuntimeError as error:
        return str(error)
    return "nothing"


def decode_once(context: Rank) -> float:
    """Seconds that one decode takes, the wait for its end included."""
    begin = time.monotonic()
    q, cache, out = context.kept["tensors"]
    context.kept["indexer"].decode(context.kept["plan"], q, cache, out)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.monotonic() - begin


def regroup(context: Rank, survivors: list[int], case: ContextCase) -> list[str]:
    """Drop the broken group, make one of the survivors, decode."""
    drop_group(context)
    process_group = torch.distributed.new_group(survivors, use_local_synchronization=True)
    place_before = context.rank, context.size
    context.rank, context.size = survivors.index(context.rank), len(survivors)
    context.kept["group"] = RankGroup(process_group, device=place(context)["device"])
    problems = decode(context, case, 1)
    drop_group(context)
    context.rank, context.size = place_before
    return problems


def open_with(context: Rank, change: str | None) -> str:
    """Open a buffer while rank 1 offers something else; the error, or nothing."""
    from blockpick.parallel import buffer as module

    group, export = context.kept["group"], module.PeerBuffer._export

    def changed(self: Any, server: Any) -> Any:
        data, path = export(self, server)
        return CHANGES[change](self, data), path

    if change is not None and context.rank == 1:
        module.PeerBuffer._export = changed
    try:
        opened = group.open_buffer(1)
    except blockpick.PeerError as error:
        return str(error)
    finally:
        module.PeerBuffer._export = export
    group.close_buffer(opened)
    return ""


def dangling(buffer: Any, data: bytes) -> bytes:
    """Free what was exported before anybody opens it."""
    if buffer._own.descriptor is not None:
        os.ftruncate(buffer._own.descriptor, 0)
    else:
        buffer._own.close()  # once more at the end, which the driver refuses
    return data


def repacked(data: bytes, at: int, value: bytes) -> bytes:
    """A handle with some bytes replaced and a right checksum."""
    import struct
    import zlib

    body = data[:at] + value + data[at + len(value) : -4]
    return body + struct.pack("<I", zlib.crc32(body))


CHANGES = {
    "truncated": lambda buffer, data: data[:-9],
    "empty": lambda buffer, data: b"",
    "oversized": lambda buffer, data: data + b"\0" * 400,
    "malformed": lambda buffer, data: b"XXXX" + data[4:],
    "damaged": lambda buffer, data: data[:20] + bytes([data[20] ^ 1]) + data[21:],
    "foreign token": lambda buffer, data: repacked(data, 20, b"\7" * 16),
    "foreign owner": lambda buffer, data: repacked(data, 8, (0).to_bytes(4, "little")),
    "other size": lambda buffer, data: repacked(data, 12, (4 << 20).to_bytes(8, "little")),
    "other kind": lambda buffer, data: repacked(data, 6, (2).to_bytes(2, "little")),
    "no bytes": lambda buffer, data: None,
    "dangling": dangling,
}


def different_indexers(context: Rank, options: list[dict[str, Any]]) -> str:
    """Make an indexer with this rank's options; the error."""
    try:
        Indexer(
            blockpick.CacheLayout("bf16"), num_heads=2, max_requests=2, max_seq_len=1024, parallel="context",
            group=context.kept["group"], **place(context), **options[context.rank % len(options)],
        ).close()  # fmt: skip
    except (blockpick.PeerError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fail_in_arguments(context: Rank) -> str:
    """Call decode with a wrong tensor on this rank only."""
    q, cache, out = context.kept["tensors"]
    try:
        context.kept["indexer"].decode(context.kept["plan"], q[:, :0], cache, out)
    except ValueError as error:
        return str(error)
    return "nothing"


def use_after_close(context: Rank) -> list[str]:
    """Calls after the group was closed; errors."""
    group, indexer = context.kept["group"], context.kept["indexer"]
    table, lens, query_len = context.kept["batch"]
    group.close()
    told = []
    for call in (group.check, lambda: indexer.plan_decode(table, lens, query_len=query_len)):
        try:
            call()
        except blockpick.PeerError as error:
            told.append(str(error))
    indexer.close()
    group.close()
    return told


def different_sizes(context: Rank) -> str:
    """Every rank asks for another size."""
    try:
        context.kept["group"].open_buffer((context.rank + 1) * (4 << 20))
    except blockpick.PeerError as error:
        return str(error)
    return ""


def group_error(context: Rank, options: list[dict[str, Any]]) -> str:
    """Make a group with this rank's options; the error."""
    try:
        make_group(context, options[context.rank % len(options)])
    except blockpick.BlockpickError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def many_groups(context: Rank, count: int, case: ContextCase) -> dict[str, list[int]]:
    """Make, use and drop groups; descriptors, mappings and device bytes in use at the start and at the end."""
    found: dict[str, list[int]] = {"descriptors": [], "mappings": [], "device_bytes": []}
    for number in range(count + 2):
        make_group(context)
        if number % 20 == 0:
            prepare(context, case)
            run_stages(context, None)
            context.kept["indexer"].close()
        drop_group(context)
        if number in (1, count + 1):  # the first group loads libraries
            found["descriptors"].append(open_files(context))
            with open("/proc/self/maps") as maps:
                found["mappings"].append(sum("blockpick" in line for line in maps))
            free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0
            found["device_bytes"].append(-free)
    return found


def sleep_and_wake(context: Rank, case: ContextCase) -> list[str]:
    """Release the peer memory and build it anew; ids before and after."""
    prepare(context, case)
    indexer, (q, cache, out) = context.kept["indexer"], context.kept["tensors"]
    before = indexer.decode(context.kept["plan"], q, cache, out).clone()
    indexer.sleep()
    problems = []
    table, lens, query_len = context.kept["batch"]
    for call in (
        lambda: indexer.decode(context.kept["plan"], q, cache, out),
        lambda: indexer.plan_decode(table, lens, query_len=query_len),
    ):
        try:
            call()
            problems.append("a sleeping indexer works")
        except blockpick.StalePlanError:
            pass
    indexer.wake()
    plan = indexer.plan_decode(table, lens, query_len=query_len)
    if not torch.equal(indexer.decode(plan, q, cache, torch.full_like(out, SENTINEL)), before):
        problems.append("other ids after waking")
    indexer.close()
    return problems


def subgroups(context: Rank) -> list[str]:
    """Groups over some of the ranks, then all, dropped and made again."""
    told = []
    for members in (context.size // 2, context.size, context.size // 2):
        process_group = torch.distributed.new_group(list(range(members)))
        if context.rank < members:
            where = place(context)["device"]
            with RankGroup(process_group, device=where) as group, group.buffer(1 << 20) as buffer:
                told.append(f"{group.size}: {len(buffer.addresses)}")
    return told


def kept(context: Rank) -> list[str]:
    """Names of what is kept."""
    return sorted(context.kept)


def group_in_capture(context: Rank) -> str:
    """Make a group while a graph is captured; the error."""
    torch.zeros(1, device=place(context)["device"])
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            RankGroup(device=place(context)["device"])
    except RuntimeError as error:
        return str(error)[: len("RankGroup: not allowed inside a graph capture")]
    return "nothing"


def open_twice(context: Rank) -> str:
    """Open the peer's allocation a second time, as another sub-buffer of it would."""
    from blockpick_cuda import peer as module

    group = context.kept["group"]
    buffer = group.open_buffer(1 << 20)
    payloads = group._gather(buffer._own.payload)
    other = payloads[1 - context.rank]
    again = group._memory.open("ipc", other, buffer.size, None)
    (entry,) = [entry for key, entry in module._mapped.entries.items() if key[2] == other]
    counted = entry[1]
    same = again.address == buffer.addresses[1 - context.rank]
    again.close()
    still = (group._memory._index, "ipc", other) in module._mapped.entries
    group.close_buffer(buffer)
    gone = not module._mapped.entries
    return (
        "mapped once, counted twice" if same and counted == 2 and still and gone else f"{same} {counted} {still} {gone}"
    )


def open_own(context: Rank) -> str:
    """Open the own allocation's handle in the process that exported it."""
    group = context.kept["group"]
    own = group._memory.allocate(2 << 20, "ipc")
    try:
        group._memory.open("ipc", own.payload, 2 << 20, None).close()
    except blockpick.DriverError as error:
        return f"DriverError: {str(error).split(':')[0]}"
    finally:
        own.close()
    return "opened"


def make_nccl_group(context: Rank) -> str:
    """A group over NCCL that uses its collectives."""
    drop_group(context)
    device = place(context)["device"]
    nccl = torch.distributed.new_group(backend="nccl")
    context.kept["group"] = RankGroup(nccl, device=device, transport="collective")
    return context.kept["group"].explain()


def started(context: Rank) -> None:
    """End start-up."""
    context.kept["group"].started()


def what_is_said(context: Rank) -> str:
    """Which limit ``explain`` names."""
    return "serving" if "(serving)" in context.kept["group"].explain() else "start-up"


def many_heads(context: Rank) -> list[str]:
    """Eight heads over two ranks, 64 blocks each: what a rank reads lies far behind the first head's."""
    where, generator = place(context), torch.Generator().manual_seed(9)
    layout, blocks = blockpick.CacheLayout("bf16"), 70
    cache = layout.empty(blocks, "cpu")
    keys = torch.randint(-2, 3, (blocks * 128, 128), generator=generator).bfloat16()
    blockpick.insert(layout, cache, keys, torch.arange(len(keys)), backend="reference")
    q = torch.randint(-2, 3, (1, 8, 128), generator=generator).bfloat16()[:, 4 * context.rank :][:, :4].contiguous()
    table, lens = torch.arange(blocks, dtype=torch.int32).view(1, -1), torch.tensor([len(keys)], dtype=torch.int32)
    cache, q, table, lens = (tensor.to(where["device"]) for tensor in (cache, q, table, lens))
    options: dict[str, Any] = {"num_heads": 4, "topk": 64, "max_requests": 1, "max_seq_len": len(keys)}
    alone = Indexer(layout, device=where["device"], backend="reference", **options)
    group = context.kept["group"]
    spread = Indexer(layout, parallel="context", group=group, total_heads=8, **where, **options)
    problems = []
    for call in range(2):
        found, expected = (torch.empty(1, 4, 64, dtype=torch.int32, device=q.device) for _ in range(2))
        alone.decode(alone.plan_decode(table, lens, query_len=1), q, cache, expected)
        spread.decode(spread.plan_decode(table, lens, query_len=1), q, cache, found)
        if not torch.equal(found, expected):
            problems.append(f"rank {context.rank} call {call}: {found.flatten().tolist()[:8]}...")
    spread.close()
    return problems

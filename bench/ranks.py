# SPDX-License-Identifier: Apache-2.0
"""``python bench/ranks.py --size 2``: context-parallel decode on several GPUs of one host, a process each.

Every rank times, in graphs of 16 layers that start together, the whole chain over each transport, the query exchange
alone, and the replicated op of its heads on the same GPU. Ids are compared with the replicated op's first.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from context_rows import TOTAL_HEADS, batch_of
from rows import POOL_BYTES, TOPK, filled_cache

import blockpick

LAYERS, REPLAYS = 16, 15


def together_us(start: Callable[[], object], calls: list[Callable[[], object]]) -> float:
    """Median us of one of ``calls`` in a graph; ``start`` is an exchange that lines the ranks up before each replay."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    samples = []
    for index in range(REPLAYS + 2):
        torch.distributed.barrier()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if index >= 2:
            samples.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(samples)


def measure(rank: int, size: int, cases: dict[str, Any], nccl: Any) -> list[dict[str, Any]]:
    """Rows of one rank."""
    heads, rows = max(TOTAL_HEADS // size, 1), []
    groups = {"peer": blockpick.RankGroup(device=f"cuda:{rank}", transport="peer")}
    groups["collective"] = blockpick.RankGroup(nccl, device=f"cuda:{rank}", transport="collective")
    for dtype, rounding in cases["caches"]:
        layout = blockpick.CacheLayout(dtype)
        torch.manual_seed(1)
        cache = filled_cache(layout, POOL_BYTES // layout.page_bytes)
        for query_len in cases["query_lens"]:
            for label, batch in cases["batches"].items():
                lens = [tokens for count, tokens in batch for _ in range(count)]
                torch.manual_seed(2)
                table, seq_lens, views = batch_of(cache, lens)
                q = torch.randn(len(lens) * query_len, TOTAL_HEADS, 128, device="cuda").to(layout.query_dtype)
                options: dict[str, Any] = {
                    "num_heads": heads, "max_query_len": query_len, "max_requests": len(lens), "order": "local_last",
                    "max_seq_len": max(lens), "nvfp4_rounding": None if rounding == "none" else rounding,
                    "device": f"cuda:{rank}",
                }  # fmt: skip
                calls = [views[turn % len(views)] for turn in range(LAYERS)]
                alone = blockpick.Indexer(layout, **options)
                plan = alone.plan_decode(table, seq_lens, query_len=query_len)
                row: dict[str, Any] = {"name": f"{dtype} {rounding} CP{size} L{query_len} {label}", "rank": rank}
                for transport, group in groups.items():
                    indexer = blockpick.Indexer(layout, parallel="context", group=group, **options)
                    first = indexer._engine.share.first_head(rank)
                    own = q[:, first : first + heads].contiguous()
                    out = torch.empty(len(q), heads, TOPK, dtype=torch.int32, device="cuda")
                    expected = alone.decode(plan, own, views[0], torch.empty_like(out))
                    spread = indexer.plan_decode(table, seq_lens, query_len=query_len)
                    indexer.decode(spread, own, views[0], out)
                    row[f"{transport}_exact"] = torch.equal(out, expected)
                    line_up = lambda i=indexer, p=spread, o=own, r=out: i.decode(p, o, views[0], r)  # noqa: E731
                    row[f"{transport}_us"] = together_us(
                        line_up, [lambda v=v, i=indexer, p=spread, o=own, r=out: i.decode(p, o, v, r) for v in calls]
                    )
                    if transport == "peer":
                        row["replicated_us"] = together_us(
                            line_up, [lambda v=v, o=own, r=expected: alone.decode(plan, o, v, r) for v in calls]
                        )
                        tiny = torch.ones_like(seq_lens)  # nothing to score: what is left is the chain's own cost
                        spread = indexer.plan_decode(table, tiny, query_len=query_len)
                        row["chain_without_work_us"] = together_us(
                            lambda: None,
                            [lambda i=indexer, p=spread, o=own, r=out: i.decode(p, o, views[0], r)] * LAYERS,
                        )
                    group.check()
                    indexer.close()
                rows.append(row)
        del cache
        torch.cuda.empty_cache()
    for group in groups.values():
        group.close()
    return rows


def work(rank: int, size: int, store: str, cases: dict[str, Any], pipe: Any) -> None:
    """One rank process."""
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    nccl = torch.distributed.new_group(backend="nccl")
    pipe.send(measure(rank, size, cases, nccl))
    torch.distributed.destroy_process_group()


def main() -> int:
    """Print a line a row: the slowest rank's times."""
    parser = argparse.ArgumentParser(prog="bench/ranks.py", description=__doc__)
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cases = tomllib.loads((Path(__file__).parent / "cases.toml").read_text())["context"]
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(args.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(rank, args.size, f"{folder}/store", cases, theirs))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        per_rank = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
    rows = []
    for entries in zip(*per_rank, strict=True):
        row = {key: max(entry[key] for entry in entries) for key in entries[0] if key.endswith("_us")}
        exact = all(entry[key] for entry in entries for key in entry if key.endswith("_exact"))
        rows.append({"name": entries[0]["name"], **row, "exact": exact, "ratio": row["peer_us"] / row["replicated_us"]})
        print(
            f"{rows[-1]['name']:44s} peer {row['peer_us']:8.1f} us  collective {row['collective_us']:8.1f} us  "
            f"replicated {row['replicated_us']:8.1f} us  {rows[-1]['ratio']:5.2f}x  chain without work "
            f"{row['chain_without_work_us']:5.1f} us  {'exact' if exact else 'WRONG'}", flush=True,
        )  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

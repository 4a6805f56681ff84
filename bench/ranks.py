# SPDX-License-Identifier: Apache-2.0
"""``python bench/ranks.py --size 2``: context-parallel decode on several GPUs of one host, a process each.

Every rank times, in graphs of 16 layers that start together, the whole chain over each transport, the query exchange
alone, and the replicated op of its heads on the same GPU. Ids are compared with the replicated op's first.
"""

from __future__ import annotations

import argparse
import functools
import itertools
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
from measure import captured
from rows import POOL_BYTES, TOPK, filled_cache

import blockpick
from blockpick.parallel.heads import HeadShare

LAYERS, REPLAYS = 16, 15


def together_us(start: Callable[[], object], calls: list[Callable[[], object]]) -> float:
    """Median us of one of ``calls`` in a graph; ``start`` is an exchange that lines the ranks up before each replay."""
    graph = captured(calls)
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


class RankCase:
    """One case on one rank: its share of the queries, the replicated op, and what it is to be compared with."""

    def __init__(self, rank: int, size: int, layout: blockpick.CacheLayout, cache: torch.Tensor, lens: list[int],
                 query_len: int, rounding: str) -> None:  # fmt: skip
        torch.manual_seed(2)  # the same batch on all ranks
        self.layout, self.query_len, self.heads = layout, query_len, max(TOTAL_HEADS // size, 1)
        self.table, self.seq_lens, self.views = batch_of(cache, lens)
        q = torch.randn(len(lens) * query_len, TOTAL_HEADS, 128, device="cuda").to(layout.query_dtype)
        first = HeadShare.of(size, self.heads, TOTAL_HEADS).first_head(rank)
        self.q = q[:, first : first + self.heads].contiguous()
        self.options: dict[str, Any] = {
            "num_heads": self.heads, "max_query_len": query_len, "max_requests": len(lens), "order": "local_last",
            "max_seq_len": max(lens), "nvfp4_rounding": None if rounding == "none" else rounding,
            "device": f"cuda:{rank}",
        }  # fmt: skip
        self.alone = blockpick.Indexer(layout, **self.options)
        self.expected = self.decode(self.alone, self.planned(self.alone), self.views[0])

    def planned(self, indexer: blockpick.Indexer, lens: torch.Tensor | None = None) -> blockpick.DecodePlan:
        """The indexer's plan of the batch, or of other lengths."""
        lens = self.seq_lens if lens is None else lens
        return indexer.plan_decode(self.table, lens, query_len=self.query_len)

    def decode(self, indexer: blockpick.Indexer, plan: blockpick.DecodePlan, cache: torch.Tensor) -> torch.Tensor:
        """One layer."""
        out = torch.empty(len(self.q), self.heads, TOPK, dtype=torch.int32, device="cuda")
        return indexer.decode(plan, self.q, cache, out)

    def layers(self, indexer: blockpick.Indexer, plan: blockpick.DecodePlan) -> list[Callable[[], object]]:
        """Calls of as many layers as a graph holds, over rotating views of the cache."""
        out = torch.empty_like(self.expected)
        views = [self.views[turn % len(self.views)] for turn in range(LAYERS)]
        return [functools.partial(indexer.decode, plan, self.q, view, out) for view in views]


def row_of(name: str, rank: int, case: RankCase, groups: dict[str, blockpick.RankGroup]) -> dict[str, Any]:
    """Times of one case on one rank over every transport."""
    row: dict[str, Any] = {"name": name, "rank": rank}
    for transport, group in groups.items():
        indexer = blockpick.Indexer(case.layout, parallel="context", group=group, **case.options)
        plan = case.planned(indexer)
        row[f"{transport}_exact"] = torch.equal(case.decode(indexer, plan, case.views[0]), case.expected)
        calls = case.layers(indexer, plan)
        row[f"{transport}_us"] = together_us(calls[0], calls)
        if transport == "peer":
            alone = case.layers(case.alone, case.planned(case.alone))
            row["replicated_us"] = together_us(calls[0], alone)
            nothing = case.planned(indexer, torch.ones_like(case.seq_lens))  # no block to score: the chain's own cost
            idle = case.layers(indexer, nothing)
            row["chain_without_work_us"] = together_us(idle[0], idle)
        group.check()
        indexer.close()
    return row


def measure(rank: int, size: int, cases: dict[str, Any], nccl: Any) -> list[dict[str, Any]]:
    """Rows of one rank."""
    groups = {
        "peer": blockpick.RankGroup(device=f"cuda:{rank}", transport="peer"),
        "collective": blockpick.RankGroup(nccl, device=f"cuda:{rank}", transport="collective"),
    }
    rows = []
    for dtype, rounding in cases["caches"]:
        layout = blockpick.CacheLayout(dtype)
        torch.manual_seed(1)
        cache = filled_cache(layout, POOL_BYTES // layout.page_bytes)
        for query_len, (label, batch) in itertools.product(cases["query_lens"], cases["batches"].items()):
            lens = [tokens for count, tokens in batch for _ in range(count)]
            case = RankCase(rank, size, layout, cache, lens, query_len, rounding)
            rows.append(row_of(f"{dtype} {rounding} CP{size} L{query_len} {label}", rank, case, groups))
        del cache, case
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

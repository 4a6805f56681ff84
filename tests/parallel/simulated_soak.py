# SPDX-License-Identifier: Apache-2.0
"""Many graph replays of simulated ranks on streams of one GPU."""

from __future__ import annotations

import random
from typing import Any

import torch
from parallel.context_cases import SENTINEL, TOTAL_HEADS, ContextCase, heads_of, turned
from parallel.tasks import BANK, LAYERS

from blockpick import Indexer
from blockpick.testing.simulated import simulated_groups


class StreamRank:
    """One rank with its own inputs, graph and stream."""

    def __init__(self, case: ContextCase, group: Any, bank: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]):
        self.heads = heads_of(group.rank, group.size)
        self.bank = [(lens, q[:, self.heads].contiguous(), ids[:, self.heads].contiguous()) for lens, q, ids in bank]
        self.stream, self.group = torch.cuda.Stream(), group
        self.cache, self.table, _, _ = (tensor.cuda() for tensor in case.batch())
        self.query_len = case.query_len
        self.indexer = Indexer(
            case.layout, num_heads=self.heads.stop - self.heads.start, device="cuda", parallel="context", group=group,
            **case.options,
        )  # fmt: skip
        self.lens, self.q = self.bank[0][0].clone(), self.bank[0][1].clone()
        self.out = torch.empty(LAYERS, *self.bank[0][2].shape, dtype=torch.int32, device="cuda")
        self.wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def prepare(self, turn: int) -> Any:
        """Copy the turn's batch and plan it."""
        lens, q, _ = self.bank[turn]
        self.lens.copy_(lens)
        self.q.copy_(q)
        self.out.fill_(SENTINEL)
        return self.indexer.plan_decode(self.table, self.lens, query_len=self.query_len)

    def capture(self) -> None:
        """A graph of several layers."""
        with torch.cuda.stream(self.stream):
            plan = self.prepare(0)
            self.graph = torch.cuda.CUDAGraph()
            self.graph.capture_begin()
            for layer in range(LAYERS):
                self.indexer.decode(plan, self.q, self.cache, self.out[layer])
            self.graph.capture_end()

    def warm_up(self) -> None:
        """Every torch kernel once: the first use loads it, for which the host waits until no kernel runs."""
        with torch.cuda.stream(self.stream):
            self.prepare(0)
            torch.cuda._sleep(1)
            self.wrong += (self.out != self.out).any()

    def step(self, turn: int, held_up: bool) -> None:
        """Replay the turn's batch and count it if it is wrong."""
        with torch.cuda.stream(self.stream):
            self.prepare(turn)
            if held_up:
                torch.cuda._sleep(400_000)
            self.graph.replay()
            self.wrong += (self.out != self.bank[turn][2]).any()


def soak_streams(case: ContextCase, size: int, replays: int) -> tuple[list[tuple[int, int]], list[int]]:
    """(rank, wrong replays) where there are any, and the records of failed waits of all ranks."""
    cache, table, _, q = (tensor.cuda() for tensor in case.batch())
    alone = Indexer(case.layout, num_heads=TOTAL_HEADS, device="cuda", **case.options)
    bank = []
    for turn, row in enumerate(BANK):
        lens, queries = torch.tensor(row, dtype=torch.int32, device="cuda"), turned(q, turn)
        out = torch.full((len(q), TOTAL_HEADS, case.topk), SENTINEL, dtype=torch.int32, device="cuda")
        plan = alone.plan_decode(table, lens, query_len=case.query_len)
        bank.append((lens, queries, alone.decode(plan, queries, cache, out)))
    ranks = [StreamRank(case, group, bank) for group in simulated_groups(size, "cuda")]
    for rank in ranks:
        rank.warm_up()
    torch.cuda.synchronize()
    for rank in ranks:
        rank.capture()
    torch.cuda.synchronize()
    random_numbers = random.Random(7)
    for replay in range(replays):
        slow = random_numbers.randrange(size) if replay % 5 == 0 else -1
        for number, rank in enumerate(ranks):
            rank.step(replay % len(BANK), number == slow)
        if replay % 500 == 0:
            torch.cuda.synchronize()  # the host must not run away
    torch.cuda.synchronize()
    wrong = [(number, int(rank.wrong)) for number, rank in enumerate(ranks) if int(rank.wrong)]
    return wrong, [rank.group.failed() for rank in ranks]

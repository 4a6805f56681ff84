# SPDX-License-Identifier: Apache-2.0
"""Timers and measured ceilings. A time is the median over replays of a graph that holds several launches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

REPLAYS = 11


def captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """A graph of ``calls``, each called once before."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def graph_us(calls: Sequence[Callable[[], object]], replays: int = REPLAYS) -> tuple[float, float]:
    """Median and 90th percentile, in us per call, of replaying a graph of ``calls``; callers rotate the data they
    read.
    """
    graph = captured(calls)
    samples = []
    for index in range(replays + 2):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        if index >= 2:
            samples.append(start.elapsed_time(stop) * 1e3 / len(calls))
    samples.sort()
    return statistics.median(samples), samples[int(0.9 * (len(samples) - 1))]


def host_us(call: Callable[[], object], calls: int = 50, samples: int = 40) -> float:
    """Median host time of ``call`` in us, queue never full."""
    times = []
    for _ in range(samples):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6


def ceilings() -> dict[str, float]:
    """Measured here: copy (read + write) and read-only stream in TB/s, bf16 matmul in TFLOP/s."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    words, copied = source.view(torch.int64), target.view(torch.int64)
    copy, _ = graph_us([lambda: torch.bitwise_not(words, out=copied)] * 4)  # a kernel: copy engines are slower
    read, _ = graph_us([lambda: words.sum()] * 4)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    matmul, _ = graph_us([lambda: a @ b] * 4)
    return {
        "copy_tb_s": 2 * source.numel() / copy / 1e6,
        "read_tb_s": source.numel() / read / 1e6,
        "bf16_matmul_tflop_s": 2 * 8192**3 / matmul / 1e6,
    }

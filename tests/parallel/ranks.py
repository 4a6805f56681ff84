# SPDX-License-Identifier: Apache-2.0
"""Rank processes for tests: each runs the tasks it is sent, all at once, and every wait of the test has a limit."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LIMIT_S = 300.0


@dataclass
class Rank:
    """What a task knows of the process it runs in; ``kept`` lives from task to task."""

    rank: int
    size: int
    kept: dict[str, Any]


class RankFailedError(AssertionError):
    """A task raised in a rank; the text is its traceback."""


def _serve(rank: int, size: int, store: str, pipe: Any) -> None:
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    context = Rank(rank, size, {})
    pipe.send(("ready", None))
    while True:
        task, arguments = pipe.recv()
        if task is None:
            break
        try:
            pipe.send(("done", task(context, *arguments)))
        except BaseException:
            pipe.send(("failed", traceback.format_exc()))
    torch.distributed.destroy_process_group()


class Ranks:
    """``size`` processes in a gloo group."""

    def __init__(self, size: int, environment: Callable[[int], dict[str, str]] = lambda _: {}) -> None:
        self.size = size
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            before = dict(os.environ)
            os.environ.update({"OMP_NUM_THREADS": "1", **environment(rank)})
            try:
                process = context.Process(target=_serve, args=(rank, size, f"{self._folder.name}/store", theirs))
                process.start()
            finally:
                os.environ.clear()
                os.environ.update(before)
            self._pipes.append(ours)
            self._processes.append(process)
        for rank in range(size):
            self._receive(rank, LIMIT_S)

    def _receive(self, rank: int, limit_s: float) -> Any:
        if not self._pipes[rank].poll(limit_s):
            raise RankFailedError(f"rank {rank} did not answer within {limit_s:g} s")
        try:
            kind, value = self._pipes[rank].recv()
        except EOFError:
            raise RankFailedError(f"rank {rank} is gone") from None
        if kind == "failed":
            raise RankFailedError(f"rank {rank}:\n{value}")
        return value

    def start(self, task: Callable[..., Any], *arguments: Any, ranks: Any = None) -> None:
        """Send a task to all ranks, or some."""
        for rank in range(self.size) if ranks is None else ranks:
            self._pipes[rank].send((task, arguments))

    def finish(self, ranks: Any = None, limit_s: float = LIMIT_S) -> list[Any]:
        """What the task gave on every rank."""
        end = time.monotonic() + limit_s
        found, failures = [], []
        for rank in range(self.size) if ranks is None else ranks:
            try:
                found.append(self._receive(rank, max(end - time.monotonic(), 0.01)))
            except RankFailedError as error:
                failures.append(str(error))
        if failures:
            raise RankFailedError("\n".join(failures))
        return found

    def run(self, task: Callable[..., Any], *arguments: Any, limit_s: float = LIMIT_S) -> list[Any]:
        """Run a task on all ranks."""
        self.start(task, *arguments)
        return self.finish(limit_s=limit_s)

    def kill(self, rank: int) -> None:
        """End a rank's process at once."""
        os.kill(self._processes[rank].pid, signal.SIGKILL)
        self._processes[rank].join()

    def close(self) -> None:
        """End all processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive():
                pipe.send((None, ()))
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

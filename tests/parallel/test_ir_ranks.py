# SPDX-License-Identifier: Apache-2.0
"""Decode over processes whose compiled AMD kernels are executed at LLVM-IR level and spin on one another's memory, which
they map through hipIpc handles.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from executors import GPU, ir_executor
from parallel import ir_tasks, tasks
from parallel.context_cases import ContextCase
from parallel.ranks import Ranks
from parallel.test_simulated import replicated_on

pytestmark = pytest.mark.skipif(GPU, reason="executed on machines without a GPU")
PEER = {"transport": "peer", "timeout_s": 60.0, "startup_timeout_s": 60.0}
CASE = ContextCase("ir-ranks", lens=(2310, 700, 5), query_len=1)
UNPROVEN = "transport collective: peer memory was never run on rocm hardware; ask for transport='peer'"


@pytest.fixture(scope="module", params=[("gfx942", "lockstep", 2), ("gfx950", "random", 4)], ids=lambda value: value[0])
def machine(request: pytest.FixtureRequest) -> Iterator[tuple[Ranks, Any]]:
    arch, order, size = request.param
    with Ranks(size) as ranks:
        assert ranks.run(ir_tasks.become, arch, order) == [("ipc",)] * size
        yield ranks, ir_executor(arch, "lockstep")


@pytest.fixture(scope="module")
def expected(machine: tuple[Ranks, Any]) -> torch.Tensor:
    """Ids of replicated decode on the same architecture."""
    return replicated_on(machine[1], CASE)


def test_ids_through_mapped_memory(machine: tuple[Ranks, Any], expected: torch.Tensor) -> None:
    """Three calls: both parities, and stale words in the place of those that are waited for."""
    ranks, _ = machine
    told = ranks.run(ir_tasks.make_group, PEER)
    assert all("transport peer through ipc handles: asked for" in text for text in told), told
    assert ranks.run(ir_tasks.decode, CASE, expected, 3) == [[]] * ranks.size
    assert ranks.run(ir_tasks.drop_group) == [[0, 0]] * ranks.size


def test_the_default_is_collective_until_hardware_has_run_it(
    machine: tuple[Ranks, Any], expected: torch.Tensor
) -> None:
    """By the facts of the stand-in's devices; candidates are gathered, and the ids are the same."""
    ranks, _ = machine
    told = ranks.run(ir_tasks.make_group, {})
    assert all(UNPROVEN in text and "HIP 7." in text and "shares ipc" in text for text in told), told
    assert ranks.run(ir_tasks.decode, CASE, expected, 1) == [[]] * ranks.size
    told = ranks.run(tasks.open_with, None)
    assert all("the group has no peer memory (transport collective)" in text for text in told), told
    assert ranks.run(ir_tasks.drop_group) == [[0, 0]] * ranks.size


@pytest.mark.parametrize("change", tasks.CHANGES)
def test_a_bad_handle_is_refused_on_all_ranks(machine: tuple[Ranks, Any], change: str) -> None:
    ranks, _ = machine
    if "group" not in ranks.run(tasks.kept)[0]:
        ranks.run(ir_tasks.make_group, PEER)
    held = ranks.run(ir_tasks.hold)
    told = ranks.run(tasks.open_with, change)
    assert all("peer buffer of 2097152 bytes: can't map" in text and "rank 1" in text for text in told), told
    if change == "dangling":
        assert all("hipErrorInvalidHandle" in text and "hipIpcOpenMemHandle" in text for text in told), told
    assert ranks.run(tasks.open_with, None) == [""] * ranks.size
    assert ranks.run(ir_tasks.hold) == held


def test_a_rank_that_does_not_come_is_named(machine: tuple[Ranks, Any]) -> None:
    ranks, _ = machine
    ranks.run(ir_tasks.make_group, {"transport": "peer", "timeout_s": 0.2, "startup_timeout_s": 0.2})
    ranks.run(ir_tasks.keep_indexer, CASE)
    ranks.start(ir_tasks.alone, CASE, ranks=[0])
    ids, text = ranks.finish(ranks=[0])[0]
    last = ranks.size - 1
    assert ids == [-1] and f"the query exchange of epoch 1 waited in vain for rank {last}" in text
    assert ranks.run(ir_tasks.drop_group) == [[0, 0]] * ranks.size


def test_groups_come_and_go_without_a_trace(machine: tuple[Ranks, Any]) -> None:
    ranks, _ = machine
    ranks.run(ir_tasks.drop_group)
    assert ranks.run(ir_tasks.groups_come_and_go, 5) == [[[0, 0]] * 5] * ranks.size

# SPDX-License-Identifier: Apache-2.0
"""Decode over ranks picks what replicated decode picks: processes that share memory and spin on each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from parallel import tasks
from parallel.context_cases import CASES, SHARDED, ContextCase
from parallel.ranks import Ranks


@pytest.fixture(scope="module")
def ranks(request) -> Iterator[Ranks]:
    with Ranks(request.param) as found:
        found.run(tasks.make_group)
        yield found


def cases_of(size: int) -> list[ContextCase]:
    """All cases; interpreted ranks share two cores, so of two every second, of four every fourth, of eight every eighth,
    the one with NaN and infinities among them.
    """
    cases = CASES + SHARDED
    return cases if torch.cuda.is_available() else CASES[::-size] + SHARDED[::-size]


BY_SIZE = [(size, case) for size in (2, 4, 8) for case in cases_of(size)]


@pytest.mark.parametrize("ranks,case", BY_SIZE, ids=str, indirect=["ranks"])
def test_ids_are_those_of_replicated_decode(ranks, case):
    """Both parities."""
    assert ranks.run(tasks.decode, case) == [[]] * ranks.size


@pytest.mark.parametrize("dtype,order", [("bf16", "score"), ("nvfp4", "local_last")])
@pytest.mark.parametrize("ranks", [2, 4, 8] if torch.cuda.is_available() else [2, 4], indirect=True)
def test_changing_batches_and_a_slow_rank(ranks, dtype, order):
    """All short and long batches in turn: rows without candidates, calls without work; on a GPU by graph replay."""
    ranks.run(tasks.make_group)  # every soak ends the start-up
    case = ContextCase(f"soak-{dtype}-{order}", dtype, lens=(2500, 2304, 2559), order=order)
    calls = (1000 if ranks.size < 8 else 250) if torch.cuda.is_available() else 5
    assert ranks.run(tasks.soak, case, calls, 1) == [[]] * ranks.size


@pytest.mark.skipif(torch.cuda.is_available(), reason="gloo gathers no device memory; test_collective_over_nccl does")
@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
@pytest.mark.parametrize("case", [CASES[0], CASES[8], CASES[-8], CASES[-5], SHARDED[1]], ids=str)
def test_collective_transport(ranks, case):
    """Queries and candidates over the process group: the same kernels, the same ids."""
    told = ranks.run(tasks.make_group, {"transport": "collective"})
    assert all("transport collective: asked for" in text for text in told)
    assert ranks.run(tasks.decode, case) == [[]] * ranks.size
    ranks.run(tasks.make_group)


@pytest.mark.parametrize("transport", ["peer"] if torch.cuda.is_available() else ["peer", "collective"])
def test_many_heads(transport):
    """More heads than MiniMax M3 has: candidates of a rank lie beyond the first 4 KiB of what is gathered."""
    with Ranks(2) as two:
        two.run(tasks.make_group, {"transport": transport})
        assert two.run(tasks.many_heads) == [[], []]


@pytest.mark.multigpu
@pytest.mark.requires(ngpus=2)
def test_collective_over_nccl():
    with Ranks(2) as ranks:
        ranks.run(tasks.make_nccl_group)
        for case in CASES:
            assert ranks.run(tasks.decode, case) == [[], []], case


@pytest.mark.gpu
@pytest.mark.requires(ngpus=1)
@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
@pytest.mark.parametrize("kind", ["ipc", "posix_fd"])
def test_every_kind_of_handle(ranks, kind):
    told = ranks.run(tasks.make_group, {"transport": "peer", "handle_kind": kind})
    assert all(f"through {kind} handles" in text for text in told)
    assert ranks.run(tasks.decode, CASES[0]) == [[]] * ranks.size

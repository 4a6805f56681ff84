# SPDX-License-Identifier: Apache-2.0
"""Faults that users of such indexers reported, of ranks and of the memory that they share."""

from __future__ import annotations

import pytest
import torch
from parallel import tasks
from parallel.context_cases import ContextCase
from parallel.ranks import Ranks
from parallel.test_simulated import check_phases, indexers_of, replicated_on

from blockpick import CacheLayout, insert
from blockpick.testing.simulated import decode_in_phases


@pytest.mark.parametrize("length", [1, 128, 129, 640])
@pytest.mark.parametrize("order", ["score", "local_last"])
def test_case_7_short_rows_on_four_ranks(one_executor, length, order):
    """Ranks with no, one or two blocks give the same rows, and none raises."""
    check_phases(one_executor, ContextCase("case-7", lens=(length,), query_len=1, order=order), 4)


def test_case_27_forced_blocks_survive_the_merge(one_executor):
    """The own block lies on rank 3 and scores -inf, the init block on rank 0: both are picked, once each."""
    layout, blocks = CacheLayout("bf16"), 100
    case = ContextCase("case-27", lens=(blocks * 128,), query_len=1, init_blocks=1)
    keys = torch.ones(blocks * 128, 128, dtype=torch.bfloat16)
    keys[-128:, 0] = float("-inf")
    keys[:128] = -5
    cache = layout.empty(blocks, "cpu")
    insert(layout, cache, keys, torch.arange(blocks * 128), backend="reference")
    cache, q = cache.to(one_executor.device), torch.ones(1, 4, 128, dtype=torch.bfloat16, device=one_executor.device)
    table = torch.arange(blocks, dtype=torch.int32, device=q.device).view(1, -1)
    lens = torch.tensor([blocks * 128], dtype=torch.int32, device=q.device)
    indexers = indexers_of(one_executor, case, 4)
    plans = [indexer.plan_decode(table, lens, query_len=1) for indexer in indexers]
    outs = [torch.empty(1, 1, 16, dtype=torch.int32, device=q.device) for _ in indexers]
    decode_in_phases(indexers, plans, [q[:, h : h + 1].contiguous() for h in range(4)], cache, outs)
    for out in outs:
        assert out.flatten().tolist() == [0, 99, *range(1, 15)]


@pytest.mark.parametrize("size", [2, 4])
def test_ties_across_ranks_take_the_lower_id(one_executor, size):
    """All keys equal: every rank's blocks tie with every other's."""
    case = ContextCase("ties", lens=(2500, 2400), query_len=1)
    expected = replicated_on(one_executor, case)
    check_phases(one_executor, case, size)
    assert expected.shape[0] == 2


def test_case_20_groups_over_some_ranks_are_built_within_a_minute():
    with Ranks(4) as ranks:
        told = ranks.run(tasks.subgroups, limit_s=60.0)
        assert told == [["2: 2", "4: 4", "2: 2"]] * 2 + [["4: 4"]] * 2


@pytest.mark.gpu
@pytest.mark.requires(ngpus=1)
def test_case_20_a_group_inside_a_capture_is_refused():
    with Ranks(2) as ranks:
        assert ranks.run(tasks.group_in_capture) == ["RankGroup: not allowed inside a graph capture"] * 2


@pytest.mark.gpu
@pytest.mark.requires(ngpus=1)
def test_case_18_torch_allocator_settings_do_not_matter():
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    with Ranks(2, lambda _: environment) as ranks:
        told = ranks.run(tasks.make_group, {"transport": "peer", "handle_kind": "ipc"})
        assert all("transport peer through ipc handles" in text for text in told)
        assert ranks.run(tasks.decode, ContextCase("case-18", lens=(2500,), query_len=1)) == [[], []]


@pytest.mark.gpu
@pytest.mark.requires(ngpus=1)
def test_case_19_an_allocation_opened_twice_is_mapped_once():
    with Ranks(2) as ranks:
        ranks.run(tasks.make_group, {"transport": "peer", "handle_kind": "ipc"})
        assert ranks.run(tasks.open_twice) == ["mapped once, counted twice"] * 2
        assert ranks.run(tasks.open_own) == ["DriverError: cuIpcOpenMemHandle failed"] * 2


@pytest.mark.multigpu
@pytest.mark.requires(ngpus=2)
def test_case_19_visible_devices_in_another_order_on_every_rank():
    """Rank 0 sees 0,1 and rank 1 sees 1,0: both use their first device, which are different ones."""
    with Ranks(
        2, lambda rank: {"CUDA_VISIBLE_DEVICES": "0,1" if rank == 0 else "1,0", "BLOCKPICK_TEST_DEVICE": "0"}
    ) as ranks:
        told = ranks.run(tasks.make_group, {"transport": "peer"})
        assert all("take turns" not in text for text in told)
        assert ranks.run(tasks.decode, ContextCase("case-19", lens=(2500,), query_len=1)) == [[], []]

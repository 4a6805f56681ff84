# SPDX-License-Identifier: Apache-2.0
"""Ranks that are late, raise, or die: the others say so in time, and memory goes back."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from parallel import tasks
from parallel.context_cases import ContextCase
from parallel.ranks import Ranks

LIMITS = (
    {"timeout_s": 2.0, "startup_timeout_s": 2.0}
    if torch.cuda.is_available()
    else {"timeout_s": 0.3, "startup_timeout_s": 0.3}
)
PATIENT = {"timeout_s": 60.0, "startup_timeout_s": 60.0}
CASE = ContextCase("failures", lens=(2500, 700), query_len=1)
SETTLED_S = 10.0 if torch.cuda.is_available() else 120.0  # a dead rank is reported; interpreted waits count polls
KILL_LIMIT_S = 5.0 if torch.cuda.is_available() else 0.5
STAGES = ["exchange", "score", "push", "merge"]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as found:
        yield found


def test_a_late_rank_is_named_and_all_layers_end(ranks):
    """One rank does not come: the first wait takes the limit, the waits of all other layers end at once."""
    ranks.run(tasks.make_group, LIMITS)
    ranks.run(tasks.prepare, CASE)
    layers = 57 if torch.cuda.is_available() else 4
    ranks.start(tasks.replay_layers, layers, ranks=[0])
    seconds, empty = ranks.finish(ranks=[0])[0]
    assert empty and seconds[0] > (1.0 if torch.cuda.is_available() else 0.1)
    assert sum(seconds[1:]) < (1.0 if torch.cuda.is_available() else 30.0)
    ranks.start(tasks.what_raises, ranks=[0])
    raised = ranks.finish(ranks=[0])[0]
    assert [kind for kind, _, _ in raised] == ["PeerError"] * 3
    for _, text, peer in raised:
        assert peer == 1 and "rank 0: the query exchange of epoch 1 waited in vain for rank 1" in text


def test_a_late_merge_names_its_stage(ranks):
    ranks.run(tasks.make_group, LIMITS)
    ranks.run(tasks.prepare, CASE)
    ranks.start(tasks.run_stages, "push", ranks=[1])
    ranks.start(tasks.run_stages, None, ranks=[0])
    ranks.finish()
    ranks.start(tasks.what_raises, ranks=[0])
    raised = ranks.finish(ranks=[0])[0]
    assert all("the candidate merge of epoch 1 waited in vain for rank 1" in text for _, text, _ in raised)


def test_an_exception_on_one_rank_ends_the_waits_of_the_others(ranks):
    ranks.run(tasks.make_group, PATIENT)
    ranks.run(tasks.prepare, CASE)
    ranks.start(tasks.decode_once, ranks=[0])
    ranks.start(tasks.fail_inside_decode, ranks=[1])
    seconds, told = ranks.finish()
    assert told == "planted" and seconds < 30.0
    raised = ranks.run(tasks.what_raises)
    assert all("rank 1 aborted: RuntimeError: planted" in text for rank in raised for _, text, _ in rank)
    assert [len(rank) for rank in raised] == [3, 3]


def test_a_wrong_argument_on_one_rank_ends_the_waits_of_the_others(ranks):
    ranks.run(tasks.make_group, PATIENT)
    ranks.run(tasks.prepare, CASE)
    ranks.start(tasks.decode_once, ranks=[0])
    ranks.start(tasks.fail_in_arguments, ranks=[1])
    seconds, told = ranks.finish()
    assert "q: " in told and seconds < 30.0
    raised = ranks.run(tasks.what_raises)
    assert all("rank 1 aborted: ValueError: q: " in text for rank in raised for _, text, _ in rank)


def test_the_serving_limit_holds_after_startup(ranks):
    """Before ``started`` a rank may be late for longer; after it no more, and a new buffer begins start-up again."""
    ranks.run(tasks.make_group, {**LIMITS, "startup_timeout_s": 60.0})
    ranks.run(tasks.prepare, CASE)
    ranks.start(tasks.decode_once, ranks=[0])
    time.sleep(2 * LIMITS["timeout_s"] + 1)
    ranks.start(tasks.decode_once, ranks=[1])
    ranks.finish()
    assert ranks.run(tasks.what_is_said) == ["start-up"] * 2
    ranks.run(tasks.started)
    assert ranks.run(tasks.what_is_said) == ["serving"] * 2
    ranks.start(tasks.replay_layers, 1, ranks=[0])
    ranks.finish(ranks=[0])
    ranks.start(tasks.what_raises, ranks=[0])
    assert all("waited in vain for rank 1" in text for _, text, _ in ranks.finish(ranks=[0])[0])


@pytest.mark.parametrize(
    "options,told",
    [
        ([{"init_blocks": 1}, {"init_blocks": 2}], "they must be the same"),
        ([{"order": "score"}, {"order": "local_last"}], "they must be the same"),
        ([{"max_requests": 2}, {"max_requests": 2, "topk": 8}], "they must be the same"),
    ],
)
def test_indexers_that_differ_are_refused_on_all_ranks(ranks, options, told):
    ranks.run(tasks.make_group, PATIENT)
    options = [{key: value for key, value in choice.items() if key != "max_requests"} for choice in options]
    found = ranks.run(tasks.different_indexers, options)
    assert all(told in text and "rank 1 has" in text for text in found), found
    assert ranks.run(tasks.decode, CASE) == [[], []]


def test_nothing_is_launched_after_the_group_is_closed(ranks):
    ranks.run(tasks.make_group, PATIENT)
    ranks.run(tasks.prepare, CASE)
    for told in ranks.run(tasks.use_after_close):
        assert len(told) == 2 and all("the group is closed" in text for text in told)


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_killed_at_any_stage(stage):
    """Two of four ranks survive, raise within ten seconds, and decode in a group of their own."""
    with Ranks(4) as ranks:
        ranks.run(tasks.make_group, {"timeout_s": KILL_LIMIT_S, "startup_timeout_s": KILL_LIMIT_S})
        ranks.run(tasks.prepare, CASE)
        ranks.start(tasks.run_stages, stage, ranks=[2, 3])
        ranks.start(tasks.run_stages, None, ranks=[0, 1])
        ranks.finish(ranks=[2, 3])
        begin = time.monotonic()
        ranks.kill(2)
        ranks.kill(3)
        ranks.finish(ranks=[0, 1])
        if stage == "merge":  # both had pushed all that the survivors needed: the next layer misses them
            ranks.start(tasks.run_stages, None, ranks=[0, 1])
            ranks.finish(ranks=[0, 1])
        ranks.start(tasks.what_raises, ranks=[0, 1])
        raised = ranks.finish(ranks=[0, 1])
        assert time.monotonic() - begin < SETTLED_S
        for rank in raised:
            assert [peer in (2, 3) for _, _, peer in rank] == [True] * 3
            assert all("whose process is gone" in text for _, text, _ in rank)
        ranks.start(tasks.regroup, [0, 1], CASE, ranks=[0, 1])
        assert ranks.finish(ranks=[0, 1]) == [[], []]


@pytest.mark.parametrize("change", tasks.CHANGES)
def test_a_bad_handle_is_refused_on_all_ranks(ranks, change):
    if "group" not in ranks.run(tasks.kept)[0]:
        ranks.run(tasks.make_group, PATIENT)
    told = ranks.run(tasks.open_with, change)
    assert all("peer buffer of 2097152 bytes: can't map" in text and "rank 1" in text for text in told), told
    assert ranks.run(tasks.open_with, None) == ["", ""]


def test_ranks_that_ask_for_different_things(ranks):
    told = ranks.run(tasks.group_error, [{"timeout_s": 1.0}, {"timeout_s": 2.0}])
    assert len(set(told)) == 1 and "ranks differ in asked" in told[0]
    ranks.run(tasks.make_group, PATIENT)
    sizes = ranks.run(tasks.different_sizes)
    assert all("the group agreed on" in text for text in sizes), sizes


def test_a_kind_that_nobody_has_is_refused_with_what_there_is(ranks):
    told = ranks.run(tasks.group_error, [{"transport": "peer", "handle_kind": "fabric"}])
    if not torch.cuda.is_available():
        assert all("handle_kind='fabric' can't be shared; possible here: posix_fd" in text for text in told)


def test_groups_come_and_go_without_a_trace(ranks):
    count = 100 if torch.cuda.is_available() else 20
    for found in ranks.run(tasks.many_groups, count, CASE):
        assert found["descriptors"][0] == found["descriptors"][1]
        assert found["mappings"] == [0, 0]
        assert found["device_bytes"][1] - found["device_bytes"][0] < 8 << 20


def test_sleeping_gives_the_memory_back(ranks):
    ranks.run(tasks.make_group, PATIENT)
    before = ranks.run(tasks.open_files)
    for _ in range(10 if torch.cuda.is_available() else 3):
        assert ranks.run(tasks.sleep_and_wake, CASE) == [[], []]
    assert ranks.run(tasks.open_files) == before

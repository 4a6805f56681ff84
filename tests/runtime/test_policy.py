# SPDX-License-Identifier: Apache-2.0
"""How the index cache is stored and decode is spread: one decision from facts that all ranks share."""

from __future__ import annotations

import itertools
import logging

import pytest
from parallel.context_cases import ContextCase
from parallel.test_simulated import indexers_of

from blockpick import CacheLayout, UnsupportedConfigError, policy
from blockpick.policy import RULES, decide_cache

M3 = {"indexer_kv_dtype": "nvfp4", "page_size": 128, "tp_size": 4}


@pytest.mark.parametrize("tp_size,bytes_per_token", [(2, 36), (4, 18), (8, 9)])
@pytest.mark.parametrize("page_size", [128, 256])
def test_sharding_stores_a_share_of_every_token(page_size, tp_size, bytes_per_token):
    decision = decide_cache(indexer_kv_dtype="nvfp4", page_size=page_size, tp_size=tp_size, indexer_cache_sharding=True)
    assert decision.layout == CacheLayout("nvfp4", page_size, tp_size) and decision.parallel == "sharded"
    assert decision.bytes_per_token == bytes_per_token == decision.layout.page_bytes // page_size
    assert f"sharded over {tp_size} ranks, {bytes_per_token} bytes a token" in decision.explain()


@pytest.mark.parametrize("name,dtype,size", [("bf16", "bf16", 256), ("fp8", "e4m3fn", 128), ("nvfp4", "nvfp4", 72)])
def test_nothing_asked_is_a_replicated_cache(name, dtype, size):
    decision = decide_cache(indexer_kv_dtype=name, page_size=256, tp_size=8, dcp_size=4)
    assert decision.options() == {"layout": CacheLayout(dtype, 256), "parallel": None, "shard_scorer": False}
    assert decision.bytes_per_token == size and "replicated" in decision.explain()


@pytest.mark.parametrize("tp_size", [2, 4, 8])
def test_both_asked_for_is_context_parallel_with_one_warning(tp_size, caplog):
    policy.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "blockpick"):
        decisions = [
            decide_cache(**{**M3, "tp_size": tp_size}, indexer_cache_sharding=True, indexer_decode_cp=True)
            for _ in range(3)
        ]
    assert len(set(decisions)) == 1 and decisions[0].parallel == "context" and decisions[0].layout.shards == 1
    (record,) = caplog.records
    assert "exclude each other" in record.message and "prefer='sharded'" in record.message
    caplog.clear()
    other = decide_cache(
        **{**M3, "tp_size": tp_size}, indexer_cache_sharding=True, indexer_decode_cp=True, prefer="sharded"
    )
    assert other.parallel == "sharded" and other.layout.shards == tp_size and not caplog.records


@pytest.mark.parametrize("asked", ["indexer_cache_sharding", "indexer_decode_cp"])
def test_what_can_not_be_shared_is_refused_or_left_alone(asked):
    alone = decide_cache(**{**M3, "tp_size": 1}, **{asked: True})
    assert (alone.parallel, alone.layout.shards) == (None, 1) and "nobody to share with" in alone.reason
    with pytest.raises(UnsupportedConfigError, match=r"dcp_size=2: decode context parallelism of the engine"):
        decide_cache(**M3, dcp_size=2, **{asked: True})
    for tp_size in (3, 16):
        with pytest.raises(
            UnsupportedConfigError, match=rf"tp_size={tp_size}, .*supported tensor-parallel sizes: 2, 4, 8"
        ):
            decide_cache(**{**M3, "tp_size": tp_size}, **{asked: True})


@pytest.mark.parametrize(
    "changes,error,message",
    [
        (
            {"indexer_kv_dtype": "int8"},
            UnsupportedConfigError,
            "indexer_kv_dtype='int8' is not supported; supported: bf16, fp8",
        ),
        ({"page_size": 64}, UnsupportedConfigError, "page_size=64 is not supported; supported: 128, 256"),
        ({"prefer": "both"}, UnsupportedConfigError, "prefer='both' is not supported; supported: context, sharded"),
        ({"tp_size": 0}, UnsupportedConfigError, "tp_size=0 is not supported"),
        ({"tp_size": True}, TypeError, "tp_size must be an int, is bool"),
        ({"dcp_size": 1.0}, TypeError, "dcp_size must be an int, is float"),
        ({"indexer_cache_sharding": "on"}, TypeError, "indexer_cache_sharding must be a bool, is str"),
        ({"shard_scorer": 1}, TypeError, "shard_scorer must be a bool, is int"),
    ],
)
def test_bad_requests_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        decide_cache(**{**M3, **changes})


def test_every_combination_of_facts_has_its_rule_and_every_rule_is_needed():
    facts = {
        "asked": ("nothing", "context", "sharded", "both"), "tp": (1, 2, 4, 8, "other"), "dcp": (1, "above 1"),
        "prefer": ("context", "sharded"),
    }  # fmt: skip
    used = set()
    for values in itertools.product(*facts.values()):
        known = dict(zip(facts, values, strict=True))
        used.add(next(n for n, rule in enumerate(RULES) if all(known[k] in v for k, v in rule.when.items())))
    assert used == set(range(len(RULES)))


def test_the_scorer_of_parts_can_be_asked_for_where_whole_blocks_are_stored(one_executor):
    """Pages of 256 over two ranks: the stock scorer by default, that of parts on request; explained either way."""
    for asked, words, op in (
        (False, "every second; scored by the kernel for whole blocks", "decode_score"),
        (True, "scored by the kernel for parts of blocks, where it is another (asked for)", "decode_score_shards"),
    ):
        decision = decide_cache(
            indexer_kv_dtype="bf16", page_size=256, tp_size=2, indexer_cache_sharding=True, shard_scorer=asked
        )
        case = ContextCase("policy", lens=(300,), query_len=1, page_size=256, sharded=True, shard_scorer=asked)
        assert case.rank_options(2) == decision.options()
        text = indexers_of(one_executor, case, 2)[1].explain()
        assert words in text and words in decision.explain()
        assert f"{op}: {op}__sm90__bf16" in text or one_executor.arch is None
    case = ContextCase("policy", lens=(300,), query_len=1, sharded=True)
    assert "a rank stores 32 of the 128 rows of a block" in indexers_of(one_executor, case, 4)[0].explain()

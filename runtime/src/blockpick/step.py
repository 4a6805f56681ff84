# SPDX-License-Identifier: Apache-2.0
"""Planning of an engine's step: a decode-first batch to one decode plan and one prefill plan."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from .checks import check_int
from .config import INT32_MAX, IndexerConfig, Memory
from .ops.sparse_table import SparseTable
from .plan import DecodePlan, PrefillPlan

STAGED_STEPS = 8  # copies that may be under way before planning has to wait for the oldest


@dataclass(frozen=True, eq=False)
class StepPlan:
    """A planned step: the first ``num_decode_tokens`` rows of q are decode's, ``num_prefill_tokens`` more prefill's.

    Attributes
    ----------
    decode : DecodePlan, optional
        Plan of the leading requests of one query length; None when there are none.
    prefill : PrefillPlan, optional
        Plan of all other requests; None when there are none.
    num_decodes, num_prefills : int
        Requests of each; those of padding without rows of q are of neither.
    num_decode_tokens, num_prefill_tokens : int
        Rows of q of each.
    """

    decode: DecodePlan | None
    prefill: PrefillPlan | None
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


@dataclass(frozen=True)
class StepSplit:
    """How a step's requests and rows of q are shared out; see :func:`split_step`.

    Attributes
    ----------
    decodes, query_len : int
        Leading requests that decode, and the queries of each.
    prefills, prefill_tokens : int
        Requests behind them that prefill, and their rows of q, padding included.
    """

    decodes: int
    query_len: int
    prefills: int
    prefill_tokens: int


def split_step(
    starts: list[int], config: IndexerConfig, num_tokens: int | None = None, max_seq_len: int | None = None
) -> StepSplit:
    """Decode requests are the leading ones with one length of at most ``max_query_len``; all others are prefill.

    Requests without queries that end a batch of decodes are padding. They are decoded as far as q has rows for them,
    ``query_len`` each (one each in a batch of nothing else), and dropped otherwise: ``num_tokens`` decides.

    Raises
    ------
    TypeError, ValueError
        Naming the argument: ``num_tokens`` must cover all queries and fit the indexer.
    """
    live = starts[-1]
    if num_tokens is not None:
        check_int("num_tokens", num_tokens, live, INT32_MAX, f"query_start_loc[-1] is {live}")
    if max_seq_len is not None:
        check_int("max_seq_len", max_seq_len, 1, config.max_seq_len, f"the indexer's max_seq_len={config.max_seq_len}")
    rows = live if num_tokens is None else num_tokens
    lengths = [end - begin for begin, end in itertools.pairwise(starts)]
    query_len = (lengths[0] if any(lengths) else 1) if lengths[0] <= config.max_query_len else 0
    count = next((b for b, length in enumerate(lengths) if length != query_len), len(lengths)) if query_len else 0
    if not any(lengths[count:]):
        most = config.max_requests * config.max_query_len + config.max_prefill_tokens
        check_int(
            "num_tokens", rows, 0, most, "rows of the largest step: max_requests, max_query_len, max_prefill_tokens"
        )
        return StepSplit(min(len(lengths), rows // query_len), query_len, 0, 0)
    first = starts[count]
    if config.max_prefill_tokens:
        most = first + config.max_prefill_tokens
        hint = f"{first} rows of decodes, max_prefill_tokens={config.max_prefill_tokens}"
        check_int("num_tokens", rows, first + 1, most, hint)
    return StepSplit(count, query_len, len(lengths) - count, rows - first)


def part_of(sparse: SparseTable | None, requests: slice, rows: slice) -> SparseTable | None:
    """The requests and rows (token, head) of a step's sparse table that one half writes, as views."""
    if sparse is None:
        return None
    return replace(
        sparse, attention_block_table=sparse.attention_block_table[requests], table=sparse.table[rows],
        context_lens=sparse.context_lens[rows],
    )  # fmt: skip


class StepStaging:
    """The query starts of one slot's prefill requests: a device buffer that never moves, filled from pinned memory.

    A copy is asynchronous. The pinned buffers are a ring, so that one is not overwritten while its copy is under way.
    """

    def __init__(self, config: IndexerConfig, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._ring = torch.empty(STAGED_STEPS, config.max_requests + 1, dtype=torch.int32, pin_memory=pinned)
        self._copied = [torch.cuda.Event() if pinned else None for _ in range(STAGED_STEPS)]
        self._steps = 0
        self.starts = torch.empty(config.max_requests + 1, dtype=torch.int32, device=device)

    @staticmethod
    def memory(config: IndexerConfig) -> Memory:
        """Bytes of all slots by purpose. An indexer for decode only has none."""
        if not config.max_prefill_tokens:
            return Memory(())
        starts = config.slots * (config.max_requests + 1) * 4
        return Memory((("step_starts", starts), ("step_starts ring", starts * STAGED_STEPS)), ("step_starts ring",))

    def stage(self, starts: list[int]) -> torch.Tensor:
        """``starts`` rebased to 0, on the device."""
        place = self._steps % STAGED_STEPS
        self._steps += 1
        copied = self._copied[place]
        if copied is not None and self._steps > STAGED_STEPS:
            copied.synchronize()  # of eight steps ago: done, unless the device is that far behind
        host = self._ring[place, : len(starts)]
        host.copy_(torch.tensor(starts, dtype=torch.int32) - starts[0])
        device = self.starts[: len(starts)]
        device.copy_(host, non_blocking=True)
        if copied is not None:
            copied.record()
        return device


def check_starts(query_start_loc: object, num_requests: int) -> list[int]:
    """The host's query starts as a list.

    Raises
    ------
    TypeError, ValueError
        Naming the argument: integers on the host (a tensor, an array, a list), ascending from 0 within int32.
    """
    if isinstance(query_start_loc, torch.Tensor):
        if query_start_loc.device.type != "cpu":
            raise ValueError(f"query_start_loc: must be on the host, is on {query_start_loc.device}")
        if query_start_loc.dtype not in (torch.int32, torch.int64) or query_start_loc.dim() != 1:
            raise TypeError(
                f"query_start_loc: must be int32 or int64 [B + 1], is {query_start_loc.dtype} "
                f"{list(query_start_loc.shape)}"
            )
        query_start_loc = query_start_loc.tolist()
    if isinstance(query_start_loc, (str, bytes)) or not isinstance(query_start_loc, Iterable):
        raise TypeError(f"query_start_loc: must be a tensor or a list, is {type(query_start_loc).__name__}")
    starts = [start_of(entry) for entry in query_start_loc]
    if len(starts) != num_requests + 1:
        raise ValueError(f"query_start_loc: must have {num_requests + 1} entries (block_table), has {len(starts)}")
    if starts[0] != 0 or any(end < begin for begin, end in itertools.pairwise(starts)):
        raise ValueError(f"query_start_loc: must ascend from 0, is {starts[:4]}...")
    if starts[-1] > INT32_MAX:
        raise ValueError(f"query_start_loc: must end at {INT32_MAX} at most, ends at {starts[-1]}")
    return starts


def start_of(entry: object) -> int:
    """An integer entry of ``query_start_loc``, numpy's included; a bool, a float or a text is none."""
    if not isinstance(entry, bool) and hasattr(entry, "__index__"):
        try:
            return operator.index(entry)
        except TypeError:  # an array of several numbers, numpy's bool
            pass
    raise TypeError(f"query_start_loc: entries must be integers, one is {entry!r} ({type(entry).__name__})")

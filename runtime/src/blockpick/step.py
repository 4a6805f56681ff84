# SPDX-License-Identifier: Apache-2.0
"""Planning of an engine's step: a decode-first batch to one decode plan and one prefill plan."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from .config import IndexerConfig
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
        Requests of each.
    num_decode_tokens, num_prefill_tokens : int
        Rows of q of each.
    """

    decode: DecodePlan | None
    prefill: PrefillPlan | None
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


def split_step(starts: list[int], max_query_len: int) -> tuple[int, int]:
    """Decode requests and their query length: the leading requests with one length of at most ``max_query_len``.

    Requests without queries that end the batch pad a captured decode batch and count as decodes if all before them do;
    a batch of nothing else is a decode batch of one query each. Other members of an irregular batch are prefill.
    """
    lengths = [end - begin for begin, end in itertools.pairwise(starts)]
    if not any(lengths):
        return len(lengths), 1
    query_len = lengths[0]
    if not 1 <= query_len <= max_query_len:
        return 0, 0
    count = next((b for b, length in enumerate(lengths) if length != query_len), len(lengths))
    return (count, query_len) if any(lengths[count:]) else (len(lengths), query_len)


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
    def memory(config: IndexerConfig) -> tuple[tuple[str, int], ...]:
        """Bytes of all slots by purpose; the pinned ones are the host's. An indexer for decode only has none."""
        if not config.max_prefill_tokens:
            return ()
        starts = config.slots * (config.max_requests + 1) * 4
        return ("step_starts", starts), ("step_starts (pinned host memory)", starts * STAGED_STEPS)

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
        Naming the argument: it must be on the host, and ascend from 0.
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
    if not isinstance(query_start_loc, (list, tuple)):
        raise TypeError(f"query_start_loc: must be a tensor or a list, is {type(query_start_loc).__name__}")
    starts = [int(start) for start in query_start_loc]
    if len(starts) != num_requests + 1:
        raise ValueError(f"query_start_loc: must have {num_requests + 1} entries (block_table), has {len(starts)}")
    if starts[0] != 0 or any(end < begin for begin, end in itertools.pairwise(starts)):
        raise ValueError(f"query_start_loc: must ascend from 0, is {starts[:4]}...")
    return starts

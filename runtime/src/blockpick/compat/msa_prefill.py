# SPDX-License-Identifier: Apache-2.0
"""MSA's prefill wrapper: requests with any number of queries, planned once per step and run once per layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..indexer import Indexer
from ..layout import BLOCK_TOKENS, CacheLayout
from ..plan import PrefillPlan
from . import msa_checks as checks

LAYOUT = CacheLayout("e4m3fn")
ONE_PASS_BYTES = 1 << 40  # no bound: prefill_scores holds the last pass only


class _Step:
    """What ``plan`` was given, and what its runs need."""

    def __init__(
        self, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, total_q: int,
        num_heads: int,
    ) -> None:  # fmt: skip
        self.cu_seqlens_q, self.seq_lens, self.block_table = cu_seqlens_q, seq_lens, block_table
        self.total_q, self.num_heads, self.max_pages = total_q, num_heads, block_table.shape[1]
        shape = (total_q, num_heads, checks.TOPK)
        self.topk_indices = torch.empty(shape, dtype=torch.int32, device=block_table.device)
        self._scores: torch.Tensor | None = None

    @property
    def scores(self) -> torch.Tensor:
        """float32 [total_q * H, max_pages], row = token * H + head; what ``_run_scores`` last wrote."""
        if self._scores is None:
            shape = (self.total_q * self.num_heads, self.max_pages)
            self._scores = torch.empty(shape, dtype=torch.float32, device=self.block_table.device)
        return self._scores

    @property
    def num_valid_pages(self) -> torch.Tensor:
        """int32 [total_q * H]: every row's pages up to its own, at least 1; 0 for padding."""
        token = torch.arange(self.total_q, dtype=torch.int32, device=self.block_table.device)
        ends = self.cu_seqlens_q[1:]
        request = torch.searchsorted(ends, token, right=True)  # requests without queries are passed over
        held = request.clamp(max=ends.shape[0] - 1)
        position = self.seq_lens[held] - (ends[held] - token)
        pages = (position.div(BLOCK_TOKENS, rounding_mode="floor") + 1).clamp(1, self.max_pages)
        return torch.where(request < ends.shape[0], pages, 0).int().repeat_interleave(self.num_heads)

    def plan_on(self, indexer: Indexer) -> PrefillPlan:
        """The step's plan on an indexer."""
        return indexer.plan_prefill(
            self.cu_seqlens_q, self.seq_lens, self.block_table, num_tokens=self.total_q,
            max_seq_len=self.max_pages * BLOCK_TOKENS,
        )  # fmt: skip


@dataclass
class _Planned:
    """An indexer and its current plan of a step."""

    indexer: Indexer
    plan: PrefillPlan

    @classmethod
    def of(cls, indexer: Indexer, step: _Step) -> _Planned:
        """Plan ``step`` on ``indexer``."""
        return cls(indexer, step.plan_on(indexer))


class BatchPrefillIndexerQ8KV8Wrapper:
    """Prefill over e4m3fn pages [pages, 128, 128].

    Query i of a request is at position ``seq_len - query_len + i``.

    Parameters
    ----------
    num_heads : {1, 2, 4}
        Index heads of this rank.
    backend, arch : str
        As in :class:`blockpick.Indexer`.
    prefill_numerics : {"strict", "fp8"}, optional
        As in :class:`blockpick.Indexer`. ``strict`` stays within the error that MSA's own tests allow; the default of
        an architecture (None) is faster and on Hopper less exact.

    Raises
    ------
    ValueError
        Worded as in MSA.
    """

    def __init__(
        self, *, num_heads: int = 1, backend: str = "auto", arch: str | None = None,
        prefill_numerics: str | None = "strict",
    ) -> None:  # fmt: skip
        self._num_heads = checks.check_num_heads(num_heads)
        self._backend, self._arch, self._numerics = backend, arch, prefill_numerics
        self._state: _Step | None = None
        self._picker: _Planned | None = None  # there is one where there is a state
        self._scorer: _Planned | None = None

    # ---- once per step ----

    def plan(
        self, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, *, total_q: int,
        max_seqlen_q: int, max_seqlen_k: int,
    ) -> None:  # fmt: skip
        """Plan a step, for all its layers, without a host synchronisation; outside a graph capture.

        Parameters
        ----------
        cu_seqlens_q : torch.Tensor
            int32 [B + 1], contiguous, ascending from 0. Tokens from its last entry on are padding, whose rows stay.
        seq_lens : torch.Tensor
            int32 [B], contiguous. Tokens of every request, its queries included.
        block_table : torch.Tensor
            int32 [B, W], W <= 8192, last stride 1. All three are kept, for :meth:`replan`.
        total_q : int
            Rows of q.
        max_seqlen_q, max_seqlen_k : int
            Bounds of the requests' queries and tokens that the host knows; ``max_seqlen_k`` sets the scores' width.

        Raises
        ------
        TypeError, ValueError
            Worded as in MSA.
        RuntimeError
            Inside a graph capture, or where blockpick has no kernels for the device.
        """
        checks.check_tensor(cu_seqlens_q, "cu_seqlens_q", torch.int32, None)
        checks.check_backend(cu_seqlens_q, "cu_seqlens_q", self._backend)
        checks.check_outside_capture(cu_seqlens_q.device, "plan()")
        total_q, max_seqlen_q, max_seqlen_k = int(total_q), int(max_seqlen_q), int(max_seqlen_k)
        bounds = (total_q, max_seqlen_q, max_seqlen_k)
        checks.check_prefill_metadata(cu_seqlens_q, seq_lens, block_table, bounds)
        pages = -(-max_seqlen_k // BLOCK_TOKENS)
        step = _Step(cu_seqlens_q, seq_lens, block_table[:, :pages], total_q, self._num_heads)
        indexer = self._picker.indexer if self._picker is not None else None
        if indexer is None or not _holds(indexer, step):
            indexer = self._state = self._picker = None  # frees what they hold
            indexer = self._open(step, _round_up, order="local_last", empty_row="block_zero")
        if self._scorer is not None and not _holds(self._scorer.indexer, step):
            self._scorer = None
        self._plan(step, indexer)

    def replan(self) -> None:
        """Plan the same tensors again, after their contents changed in place; outside a graph capture."""
        if self._state is None or self._picker is None:
            raise RuntimeError("plan() must be called before replan()")
        checks.check_outside_capture(self._state.block_table.device, "replan()")
        self._plan(self._state, self._picker.indexer)

    def _plan(self, step: _Step, indexer: Indexer) -> None:
        self._state, self._picker = step, _Planned.of(indexer, step)
        if self._scorer is not None:
            self._scorer = _Planned.of(self._scorer.indexer, step)

    def _open(self, step: _Step, size: Callable[[int], int], **options: object) -> Indexer:
        return checks.open_indexer(
            LAYOUT, num_heads=self._num_heads, max_requests=size(step.seq_lens.shape[0]),
            max_prefill_tokens=size(step.total_q), max_seq_len=size(step.max_pages) * BLOCK_TOKENS,
            prefill_numerics=self._numerics, device=step.block_table.device, backend=self._backend, arch=self._arch,
            **options,
        )  # fmt: skip

    # ---- once per layer ----

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Pick the pages of one layer. Allocates nothing, waits for nothing, may be captured.

        Parameters
        ----------
        q : torch.Tensor
            e4m3fn [total_q, H, 128], contiguous.
        k_cache : torch.Tensor
            The layer's index keys, e4m3fn [pages, 128, 128], dense inside a page, page stride a multiple of 16 bytes.
        out : torch.Tensor, optional
            int32 [total_q, H, 16], contiguous. By default a tensor of the plan that the next run overwrites.

        Returns
        -------
        torch.Tensor
            ``out``, or the plan's tensor.

        Raises
        ------
        TypeError, ValueError
            Worded as in MSA, before anything is launched.
        RuntimeError
            Before the first ``plan``.
        """
        state, picker = self._ready(q, k_cache)
        if out is None:
            out = state.topk_indices
        else:
            checks.check_output(out, state.total_q, self._num_heads, state.block_table.device)
        return picker.indexer.prefill(picker.plan, q, k_cache, out)

    def _ready(self, q: torch.Tensor, k_cache: torch.Tensor) -> tuple[_Step, _Planned]:
        """The step and what picks it, for one layer's tensors that fit it."""
        if self._state is None or self._picker is None:
            raise RuntimeError("plan() must be called before run()")
        state = self._state
        device = state.block_table.device
        checks.check_layer(q, k_cache, state.total_q, self._num_heads, LAYOUT, device, self._backend)
        return state, self._picker

    def _run_scores(self, q: torch.Tensor, k_cache: torch.Tensor) -> torch.Tensor:
        """Store the scores of one layer, of every page strictly below a query's own page; all else stays.

        The first call of a larger step makes an indexer of its own, which holds all scores, and can't be captured.
        """
        state, _ = self._ready(q, k_cache)
        if self._scorer is None:
            checks.check_outside_capture(state.block_table.device, "the first _run_scores()")
            options = {"order": "score", "topk": 1, "local_blocks": 0, "workspace_bytes": ONE_PASS_BYTES}
            self._scorer = _Planned.of(self._open(state, int, **options), state)
        scorer, plan = self._scorer.indexer, self._scorer.plan
        ids = torch.empty(state.total_q, self._num_heads, 1, dtype=torch.int32, device=q.device)
        scorer.prefill(plan, q, k_cache, ids)
        scores = scorer.prefill_scores(plan).flatten(0, 1)
        columns = torch.arange(state.max_pages, dtype=torch.int32, device=q.device)
        mask = columns < state.num_valid_pages[:, None] - 1
        state.scores.copy_(torch.where(mask, scores, state.scores))
        return state.scores


def _holds(indexer: Indexer, step: _Step) -> bool:
    """Whether an indexer is large enough for a step."""
    config = indexer.config
    fits = step.seq_lens.shape[0] <= config.max_requests and step.max_pages <= config.max_blocks
    return fits and step.total_q <= config.max_prefill_tokens and indexer.device == step.block_table.device


def _round_up(count: int) -> int:
    """The next power of two: a batch that grows step by step makes few indexers."""
    return 1 << (count - 1).bit_length()

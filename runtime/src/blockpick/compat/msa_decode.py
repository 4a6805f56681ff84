# SPDX-License-Identifier: Apache-2.0
"""MSA's decode wrappers: one batch shape each, planned once per step and run once per layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..indexer import Indexer
from ..layout import BLOCK_TOKENS, CacheLayout
from ..plan import DecodePlan
from . import msa_checks as checks

SLOTS = 8  # query slots of a request; fewer queries take the last ones
NVFP4_ROUNDING = "e4m3"  # of MSA's kernels; prefill sees the same keys through the gather


@dataclass(frozen=True)
class _Step:
    """What ``plan`` was given, and by whom it is served."""

    indexer: Indexer
    plan: DecodePlan
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    topk_indices: torch.Tensor

    @property
    def rows(self) -> int:
        """Rows of q."""
        return self.plan.num_requests * self.plan.query_len


class BatchDecodeIndexer:
    """Decode of one batch shape: metadata in ``plan``, one layer in each ``run``.

    Parameters
    ----------
    workspace_buffer : torch.Tensor, optional
        uint8 [n], n >= ``workspace_size(batch)``. Checked and left alone: an indexer has its own work lists.
    num_heads : {1, 2, 4}
        Index heads of this rank.
    use_cuda_graph : bool
        Whether ``plan`` copies metadata into the two buffers below, whose shapes then fix the batch.
    block_table_buffer, seq_lens_buffer : torch.Tensor, optional
        int32 [B, W] and [B], with ``use_cuda_graph`` only.
    score_buffer : torch.Tensor, optional
        Where :meth:`_run_scores` leaves the scores: float32 [n], n >= ``score_buffer_size(batch, pages)``, or as many
        bytes in uint8. Wrappers that don't run at the same time may share one. Own memory by default.
    backend, arch : str
        As in :class:`blockpick.Indexer`.

    Raises
    ------
    TypeError, ValueError
        Worded as in MSA.
    """

    _layout: CacheLayout
    _any_query_len = False

    def __init__(
        self, workspace_buffer: torch.Tensor | None = None, *, num_heads: int = 1, use_cuda_graph: bool = False,
        block_table_buffer: torch.Tensor | None = None, seq_lens_buffer: torch.Tensor | None = None,
        score_buffer: torch.Tensor | None = None, backend: str = "auto", arch: str | None = None,
    ) -> None:  # fmt: skip
        for name, buffer, dtypes in (
            ("workspace_buffer", workspace_buffer, (torch.uint8,)),
            ("score_buffer", score_buffer, (torch.float32, torch.uint8)),
        ):
            if buffer is not None:
                checks.check_scratch(buffer, name, dtypes)
                checks.check_backend(buffer, name, backend)
        self._fixed: tuple[torch.Tensor, torch.Tensor] | None = None
        if use_cuda_graph:
            if block_table_buffer is None or seq_lens_buffer is None:
                raise ValueError("CUDA Graph mode requires block_table_buffer and seq_lens_buffer")
            checks.check_decode_metadata(block_table_buffer, seq_lens_buffer, backend)
            self._fixed = (block_table_buffer, seq_lens_buffer)
        elif block_table_buffer is not None or seq_lens_buffer is not None:
            raise ValueError("block_table_buffer and seq_lens_buffer are only valid with use_cuda_graph=True")
        self._num_heads = checks.check_num_heads(num_heads)
        self._backend, self._arch = backend, arch
        self._workspace, self._score_buffer = workspace_buffer, score_buffer
        self._step: _Step | None = None
        self._scorer: Indexer | None = None  # scores short requests too; made by the first _run_scores
        self._score_plan: DecodePlan | None = None
        self._score_storage: torch.Tensor | None = None

    # ---- sizes ----

    @classmethod
    def workspace_size(cls, batch_size: int, *, num_heads: int = 1) -> int:
        """Bytes of a ``workspace_buffer`` for ``batch_size`` requests."""
        checks.check_num_heads(num_heads)
        return 4 * (checks.check_count(batch_size, "batch_size") + 1)

    @classmethod
    def score_buffer_size(cls, max_reqs: int, max_pages: int, *, num_heads: int = 1) -> int:
        """float32 elements of a ``score_buffer`` for ``max_reqs`` requests of ``max_pages`` table columns."""
        rows = checks.check_count(max_reqs, "max_reqs") * SLOTS * checks.check_num_heads(num_heads)
        return rows * checks.check_count(max_pages, "max_pages")

    # ---- once per step ----

    def plan(self, block_table: torch.Tensor, seq_lens: torch.Tensor, *, query_len: int = SLOTS) -> None:
        """Plan a step, for all its layers, without a host synchronisation.

        Call it outside a graph capture, before the capture and before every replay with other lengths. A batch that
        outgrows the earlier ones allocates; a graph captured before that must be captured anew. With
        ``use_cuda_graph`` the batch can't grow.

        Parameters
        ----------
        block_table : torch.Tensor
            int32 [B, W], W <= 8192, last stride 1. Entries past a request's last page may be garbage.
        seq_lens : torch.Tensor
            int32 [B]. Tokens of every request, its current queries included.
        query_len : int
            Queries of every request: 8, for the Q8KV4 wrapper 1..8. Query i is at position ``seq_len - query_len + i``.

        Raises
        ------
        TypeError, ValueError
            Worded as in MSA.
        RuntimeError
            Inside a graph capture, or where blockpick has no kernels for the device.
        """
        checks.check_decode_metadata(block_table, seq_lens, self._backend)
        self._check_query_len(query_len)
        device = block_table.device
        checks.check_outside_capture(device, "plan()")
        batch, width = block_table.shape
        self._check_buffers(batch, width, device)
        if self._fixed is not None:
            block_table, seq_lens = _copied(self._fixed, block_table, seq_lens)
        indexer, ids = (self._step.indexer, self._step.topk_indices) if self._step is not None else (None, None)
        if indexer is None or not _holds(indexer, device, batch, width, query_len):
            indexer = self._step = self._scorer = None  # frees what they hold
            indexer = self._open(device, batch, width, query_len, order="local_last", empty_row="block_zero")
        plan = indexer.plan_decode(block_table, seq_lens, query_len=query_len)
        if ids is None or ids.shape[0] != batch * query_len or ids.device != device:
            ids = torch.empty((batch * query_len, self._num_heads, checks.TOPK), dtype=torch.int32, device=device)
        self._step = _Step(indexer, plan, block_table, seq_lens, ids)
        if self._scorer is not None:
            self._score_plan = self._scorer.plan_decode(block_table, seq_lens, query_len=query_len)

    def _open(self, device: torch.device, batch: int, width: int, query_len: int, **options: object) -> Indexer:
        rounding = NVFP4_ROUNDING if self._layout.dtype == "nvfp4" else None
        return checks.open_indexer(
            self._layout, num_heads=self._num_heads, max_requests=batch, max_query_len=query_len,
            max_seq_len=width * BLOCK_TOKENS, nvfp4_rounding=rounding, device=device, backend=self._backend,
            arch=self._arch, **options,
        )  # fmt: skip

    def _check_query_len(self, query_len: int) -> None:
        whole = isinstance(query_len, int) and not isinstance(query_len, bool)
        if query_len != SLOTS and not (self._any_query_len and whole and 1 <= query_len <= SLOTS):
            supported = f"in [1, {SLOTS}]" if self._any_query_len else str(SLOTS)
            raise ValueError(f"{type(self).__name__} supports query_len {supported}, got {query_len!r}")

    def _check_buffers(self, batch: int, width: int, device: torch.device) -> None:
        """The caller's buffers are on the batch's device and hold its sizes."""
        required = self.workspace_size(batch, num_heads=self._num_heads)
        workspace, scores = self._workspace, self._score_buffer
        if workspace is not None and (workspace.device != device or workspace.numel() < required):
            raise ValueError(f"workspace_buffer must be on {device} with at least {required} bytes")
        required = self.score_buffer_size(batch, width, num_heads=self._num_heads)
        if scores is not None and (scores.device != device or scores.numel() * scores.element_size() < 4 * required):
            raise ValueError(f"score_buffer must be on {device} with at least {required} float32 elements")

    # ---- once per layer ----

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Pick the pages of one layer. Allocates nothing, waits for nothing, may be captured.

        Parameters
        ----------
        q : torch.Tensor
            e4m3fn [B * query_len, H, 128], contiguous, request-major.
        k_cache : torch.Tensor
            The layer's index keys: uint8 [pages, 128, 72] (Q8KV4) or e4m3fn [pages, 128, 128] (Q8KV8), dense inside a
            page, page stride a multiple of 16 bytes.
        out : torch.Tensor, optional
            int32 [B * query_len, H, 16], contiguous. By default a tensor of the wrapper that the next run overwrites.

        Returns
        -------
        torch.Tensor
            ``out``, or the wrapper's tensor.

        Raises
        ------
        TypeError, ValueError
            Worded as in MSA, before anything is launched.
        RuntimeError
            Before the first ``plan``.
        """
        step = self._ready(q, k_cache)
        if out is not None:
            checks.check_output(out, step.rows, self._num_heads, step.indexer.device)
        return step.indexer.decode(step.plan, q, k_cache, step.topk_indices if out is None else out)

    def _ready(self, q: torch.Tensor, k_cache: torch.Tensor) -> _Step:
        """The planned step, for one layer's tensors that fit it."""
        if self._step is None:
            raise RuntimeError("plan() must be called before run()")
        step = self._step
        device = step.indexer.device
        checks.check_layer(q, k_cache, step.rows, self._num_heads, self._layout, device, self._backend)
        return step

    # ---- scores ----

    @property
    def _topk_indices(self) -> torch.Tensor | None:
        """What :meth:`run` writes without ``out``. None before a plan."""
        return self._step.topk_indices if self._step is not None else None

    @property
    def _num_valid_pages(self) -> torch.Tensor | None:
        """int32 [B * query_len * H]: every row's pages up to its own, at least 1. None before a plan."""
        return self._valid_pages(self._step) if self._step is not None else None

    @property
    def _scores(self) -> torch.Tensor | None:
        """float32 [B, 8 * H, W], row = slot * H + head; what :meth:`_run_scores` last wrote. None before a plan."""
        return self._score_rows(self._step) if self._step is not None else None

    def _valid_pages(self, step: _Step) -> torch.Tensor:
        plan, lens = step.plan, step.seq_lens
        slots = torch.arange(-plan.query_len, 0, dtype=torch.int32, device=lens.device)
        pages = (lens[:, None] + slots).div(BLOCK_TOKENS, rounding_mode="floor") + 1
        return pages.clamp(1, plan.table_blocks).flatten().repeat_interleave(self._num_heads)

    def _score_rows(self, step: _Step) -> torch.Tensor:
        plan = step.plan
        shape = (plan.num_requests, SLOTS * self._num_heads, plan.table_blocks)
        if self._score_buffer is not None:
            size = shape[0] * shape[1] * shape[2] * 4 // self._score_buffer.element_size()
            return self._score_buffer[:size].view(torch.float32).view(shape)
        if self._score_storage is None or self._score_storage.shape != shape:
            self._score_storage = torch.empty(shape, dtype=torch.float32, device=step.indexer.device)
        return self._score_storage

    def _run_scores(self, q: torch.Tensor, k_cache: torch.Tensor) -> torch.Tensor:
        """Store the scores of one layer, of every page strictly below a query's own page; all else stays.

        The first call makes an indexer of its own and can't be captured.
        """
        step = self._ready(q, k_cache)
        scorer, plan = self._open_scorer(step)
        ids = torch.empty(step.rows, self._num_heads, 1, dtype=torch.int32, device=q.device)
        scorer.decode(plan, q, k_cache, ids)
        target = self._score_rows(step)
        own = self._valid_pages(step).view(plan.num_requests, plan.query_len, self._num_heads, 1) - 1
        columns = torch.arange(plan.table_blocks, dtype=torch.int32, device=q.device)
        rows = target.unflatten(1, (SLOTS, self._num_heads))[:, SLOTS - plan.query_len :]
        rows.copy_(torch.where(columns < own, scorer.scores(plan), rows))
        return target

    def _open_scorer(self, step: _Step) -> tuple[Indexer, DecodePlan]:
        """The indexer for scores and its plan of the step."""
        if self._scorer is None or self._score_plan is None:
            checks.check_outside_capture(step.indexer.device, "the first _run_scores()")
            config = step.indexer.config
            maxima = (config.max_requests, config.max_blocks, config.max_query_len)
            self._scorer = self._open(step.indexer.device, *maxima, order="score", topk=1, local_blocks=0)
            self._score_plan = self._scorer.plan_decode(
                step.block_table, step.seq_lens, query_len=step.plan.query_len
            )  # fmt: skip
        return self._scorer, self._score_plan


def _holds(indexer: Indexer, device: torch.device, batch: int, width: int, query_len: int) -> bool:
    """Whether an indexer is large enough for a decode batch."""
    config = indexer.config
    fits = batch <= config.max_requests and width <= config.max_blocks and query_len <= config.max_query_len
    return fits and indexer.device == device


def _copied(
    fixed: tuple[torch.Tensor, torch.Tensor], block_table: torch.Tensor, seq_lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The buffers that a captured graph reads, with a step's metadata in them."""
    pairs = tuple(zip(("block_table", "seq_lens"), (block_table, seq_lens), fixed, strict=True))
    for name, tensor, buffer in pairs:
        if tensor.shape != buffer.shape or tensor.device != buffer.device:
            raise ValueError(f"CUDA Graph mode fixes {name} shape and device")
    for _, tensor, buffer in pairs:
        if tensor.data_ptr() != buffer.data_ptr():
            buffer.copy_(tensor, non_blocking=True)
    return fixed


class BatchDecodeIndexerQ8KV8Wrapper(BatchDecodeIndexer):
    """Decode over e4m3fn pages [pages, 128, 128], eight queries a request; see the base class."""

    _layout = CacheLayout("e4m3fn")


class BatchDecodeIndexerQ8KV4Wrapper(BatchDecodeIndexer):
    """Decode over NVFP4 pages [pages, 128, 72], 1..8 queries a request; see the base class.

    Products code * scale are rounded to e4m3 as in MSA, on every architecture.
    """

    _layout = CacheLayout("nvfp4")
    _any_query_len = True

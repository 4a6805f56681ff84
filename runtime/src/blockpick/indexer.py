# SPDX-License-Identifier: Apache-2.0
"""The indexer: configuration at construction, metadata in ``plan_decode``, tensors in ``decode``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from . import handles
from .cache_check import CacheFault, check_cache
from .checks import check_int, check_not_capturing, resolve_device
from .config import IndexerConfig, Memory
from .dispatch import Choice
from .engines import Spread, make_engine
from .errors import StalePlanError, UnsupportedConfigError
from .layout import CacheLayout
from .ops.sparse_table import SparseTable
from .ops.torch_ops import call_decode, call_prefill
from .plan import DecodePlan, PrefillPlan
from .step import StepPlan, StepStaging, check_starts, part_of, split_step
from .step_checks import (
    attention_blocks,
    check_decode,
    check_prefill,
    check_slot,
    check_sparse_table,
    check_step,
    check_step_rows,
    check_table,
    check_tokens,
    prefill_blocks,
)

if TYPE_CHECKING:
    from .parallel.group import Group

MAX_ACCEPTED = 256


class Indexer:
    """Picks, per query and index head, the ``topk`` blocks of 128 tokens with the best scores.

    The score of a block is ``max over its visible tokens t of q . k[t]``, in fp32. Blocks are ordered by (class, score,
    lower id first): init blocks, then local blocks, then all others.

    Parameters
    ----------
    layout : CacheLayout
        Layout of the index-K cache.
    num_heads : {1, 2, 4}
        Index heads of this rank.
    topk : int
        Blocks to pick, 1..64.
    init_blocks, local_blocks : int
        First and last visible blocks that always win; together at most ``topk``.
    max_requests, max_query_len, max_seq_len : int
        Maxima that size every buffer: requests of a batch, queries of a request (1..8), tokens of a request.
    order : {"score", "ascending", "local_last"}
        Order of the ids of a row. ``local_last``: history by descending score, own block last; rows with at most
        ``topk`` blocks are 0..n-1.
    out_layout : {"thk", "htk"}
        Whether ``out`` is [T, H, topk] or [H, T, topk].
    empty_row : {"minus_one", "block_zero"}
        What a row without a visible block holds: all -1, or [0, -1, ...].
    nvfp4_rounding : {"exact", "e4m3"}, optional
        Whether code * scale is kept or rounded to e4m3; the architecture's default if None.
    max_prefill_tokens : int
        Queries of the largest prefill batch; 0 builds an indexer for decode only.
    workspace_bytes : int
        Bound on the scores of a prefill that are held at once, at least those of one tile of queries; longer batches
        are scored and selected in passes. Decode scores share it.
    prefill_numerics : {"fp8", "strict"}, optional
        How prefill multiplies e4m3 numbers (e4m3fn caches, NVFP4 rounded to e4m3): by the fp8 MMA, about twice as fast
        and on Hopper less exact (measured: up to 2e-3 of the sum of a dot product's absolute terms; 1% of rows pick
        another set than decode), or exactly as decode does, in f16. The architecture's default if None. Other keys are
        always multiplied strictly.
    topk_every, topk_offset : int
        Cross-layer sharing: sparse layer n reuses the last selection when ``max(n - topk_offset, 0) % topk_every`` is
        not 0; :meth:`picks` answers for a layer.
    parallel : {None, "context", "sharded"}
        ``context``: decode is spread over the ranks of ``group``; each scores its share of the blocks for the heads of
        all ranks, and gets the ids that it would have got alone. Ranks must then plan and decode the same batches in
        the same order. Prefill stays on each rank. ``sharded``: the same over a cache of which every rank stores one
        shard (``layout.shards`` ranks); decode only.
    group : RankGroup, optional
        The ranks.
    total_heads : int, optional
        Index heads of all ranks together; more ranks than heads hold replicas. Default: 4, or what the ranks hold.
    shard_scorer : bool
        With ``sharded``: take the scorer of parts of blocks also where every rank stores whole ones (pages of 256 over
        two ranks), which the scorer of whole blocks serves by default. Ids are the same.
    slots : int
        Batches that may be in flight at once (two streams, dual-batch overlap); each has its own buffers.
    device : torch.device or str
        Where everything lives.
    backend : {"auto", "aot", "jit", "interpreter", "reference"}
        ``auto``: release binaries on a GPU, the reference on the CPU. ``jit`` compiles the generated sources here.
        ``interpreter`` runs them on CPU tensors, those of ``arch``. ``reference`` is torch, on any device.
    allow_jit : bool
        Whether ``auto`` may compile a package's sources when it holds no binaries.
    arch : str, optional
        For ``interpreter``: whose sources to run (default: the first installed). For ``reference``: whose defaults
        hold.

    Raises
    ------
    UnsupportedConfigError, UnsupportedArchError, KernelNotInstalledError
        At construction, never later: what was asked, what is available, what to do.

    Notes
    -----
    The algorithm is the lightning indexer of MiniMax M3's sparse attention (MSA), decode with 1..8 queries a request.
    """

    def __init__(
        self, layout: CacheLayout, *, num_heads: int = 1, topk: int = 16, init_blocks: int = 0, local_blocks: int = 1,
        max_requests: int = 256, max_query_len: int = 1, max_seq_len: int = 1 << 20, order: str = "score",
        out_layout: str = "thk", empty_row: str = "minus_one", nvfp4_rounding: str | None = None, slots: int = 1,
        max_prefill_tokens: int = 0, workspace_bytes: int = 1 << 28, prefill_numerics: str | None = None,
        topk_every: int = 1, topk_offset: int = 0, parallel: str | None = None, group: Group | None = None,
        total_heads: int | None = None, shard_scorer: bool = False,
        device: torch.device | str = "cuda", backend: str = "auto", allow_jit: bool = False, arch: str | None = None,
    ) -> None:  # fmt: skip
        self.config = IndexerConfig(
            layout, num_heads, topk, init_blocks, local_blocks, max_requests, max_query_len, max_seq_len, order,
            out_layout, empty_row, nvfp4_rounding, slots, max_prefill_tokens, workspace_bytes,
            prefill_numerics, topk_every, topk_offset,
        )  # fmt: skip
        self.device = resolve_device(device)
        self._spread = Spread(parallel, group, total_heads, shard_scorer)
        self._engine, self.route, self._reason = make_engine(
            self.config, self.device, backend, allow_jit, arch, self._spread
        )
        self._engine.allocate()
        staged = self.config.slots if self.config.max_prefill_tokens else 0
        self._staging = [StepStaging(self.config, self.device) for _ in range(staged)]
        self._generations = [0] * self.config.slots
        self._plans: list[DecodePlan | None] = [None] * self.config.slots
        self._prefill_generations = [0] * self.config.slots
        self._prefill_plans: list[PrefillPlan | None] = [None] * self.config.slots
        self._accepted: dict[object, None] = {}  # facts of arguments that passed the checks
        self._decode_calls = self._prefill_calls = 0
        self._handles = handles.register(self, self.config.slots)

    @staticmethod
    def required_memory(
        layout: CacheLayout, *, device: torch.device | str = "cuda", backend: str = "auto", allow_jit: bool = False,
        arch: str | None = None, **options: Any,
    ) -> Memory:  # fmt: skip
        """Every byte that an indexer with these arguments would hold, by purpose, before anything is allocated.

        For an engine's memory profiling. Takes the constructor's arguments and raises what it would raise.
        """
        names = ("parallel", "group", "total_heads", "shard_scorer")
        spread = Spread(**{name: options.pop(name) for name in names if name in options})
        config = IndexerConfig(layout, **options)
        engine = make_engine(config, resolve_device(device), backend, allow_jit, arch, spread)[0]
        return engine.memory() + StepStaging.memory(config)

    # ---- what was decided ----

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The chosen variant of every role, with reasons and rejected alternatives."""
        return self._engine.choices

    @property
    def nvfp4_rounding(self) -> str:
        """The rounding of NVFP4 products that runs here: ``exact``, ``e4m3``, or ``none`` for other caches."""
        return self._engine.rounding

    @property
    def prefill_numerics(self) -> str:
        """How prefill multiplies here: ``fp8`` (the fp8 MMA) or ``strict``."""
        return self._engine.numerics

    def explain(self) -> str:
        """What runs and why, and every alternative with the reason against it."""
        lines = [f"route {self.route}: {self._reason}"]
        if self.config.layout.dtype == "nvfp4":
            asked = "asked for" if self.config.nvfp4_rounding else "the architecture's default"
            lines.append(f"nvfp4_rounding {self.nvfp4_rounding}: {asked}")
        if self.config.max_prefill_tokens:
            asked = "asked for" if self.config.prefill_numerics else "the default here"
            how = {"fp8": "the fp8 MMA, not as exact as decode", "strict": "as exact as decode"}[self.prefill_numerics]
            lines.append(f"prefill_numerics {self.prefill_numerics}: {asked}; {how}")
        lines += self._spread.explain(self.config)
        for choice in self.choices:
            lines.append(f"{choice.role}: {choice.variant.name} ({choice.reason})")
            lines += [f"  not {name}: {reason}" for name, reason in choice.rejected]
        return "\n".join(lines)

    def memory(self) -> Memory:
        """Every byte that this indexer holds, by purpose."""
        return self._engine.memory() + StepStaging.memory(self.config)

    def picks(self, layer: int) -> bool:
        """Whether sparse layer number ``layer`` (from 0) picks, or reuses the last selection (see ``topk_every``).

        A reusing layer's index cache needs no keys: its pages keep the layout but hold nothing that is read.
        """
        return self.config.picks(layer)

    def check_cache(
        self, cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor, limit: int = 100, *,
        shard: int | None = None,
    ) -> list[CacheFault]:  # fmt: skip
        """What in the cache of a layer that picks can't have been inserted; see
        :func:`blockpick.cache_check.check_cache`. The shard is by default this rank's.
        """
        shard = self._spread.shard if shard is None else shard
        return check_cache(self.config.layout, cache, block_table, seq_lens, limit, shard=shard)

    def stats(self) -> dict[str, Any]:
        """Route and call counts so far, kept on the host: no synchronisation."""
        return {
            "route": self.route,
            "plans": sum(self._generations),
            "decode_calls": self._decode_calls,
            "prefill_plans": sum(self._prefill_generations),
            "prefill_calls": self._prefill_calls,
        }

    def handle(self, slot: int = 0) -> int:
        """The number by which ``torch.ops.blockpick.decode_pick`` finds this indexer's slot and its current plan."""
        return self._handles[slot]

    def close(self) -> None:
        """Let go of what is shared with other ranks, on all of them together; an indexer without ranks has nothing."""
        self._engine.close()

    def sleep(self) -> None:
        """Give the memory that ranks share back, on all ranks together; plans end. An indexer without ranks has none.

        After :meth:`wake` the memory lies elsewhere: plan anew, and capture graphs anew.
        """
        self._plans = [None] * self.config.slots
        self._engine.close()

    def wake(self) -> None:
        """Build the shared memory anew after :meth:`sleep`, on all ranks together."""
        self._engine.reopen()

    # ---- once per step ----

    def plan_decode(
        self, block_table: torch.Tensor, seq_lens: torch.Tensor, *, query_len: int, slot: int = 0
    ) -> DecodePlan:
        """Plan a decode step: one work list for all layers, made on the device without a synchronisation.

        Parameters
        ----------
        block_table : torch.Tensor
            int32 [B, W], last stride 1, on the device. Page ids; entries past a request's last page may be garbage.
        seq_lens : torch.Tensor
            int32 [B], contiguous. Tokens of every request, the current queries included.
        query_len : int
            Queries of every request, 1..max_query_len; never inferred.
        slot : int
            Which of the indexer's slots to use; the slot's earlier plan becomes invalid.

        Returns
        -------
        DecodePlan
            Pass it to :meth:`decode`, once per layer.

        Raises
        ------
        TypeError, ValueError
            Naming the argument, before anything is launched.
        RuntimeError
            Inside a graph capture.
        """
        config = self.config
        with self._engine.telling():
            check_not_capturing(self.device, "plan_decode")
            check_slot(config, slot)
            check_int("query_len", query_len, 1, config.max_query_len, f"max_query_len={config.max_query_len}")
            check_table(config, self.device, block_table, seq_lens)
            return self._launch_decode_plan(block_table, seq_lens, query_len, slot)

    def _launch_decode_plan(
        self, block_table: torch.Tensor, seq_lens: torch.Tensor, query_len: int, slot: int
    ) -> DecodePlan:
        """:meth:`plan_decode` of checked arguments."""
        (num_requests, width), config = block_table.shape, self.config
        self._engine.plan_decode(slot, block_table, seq_lens, query_len)
        self._generations[slot] += 1
        plan = DecodePlan(slot, self._generations[slot], num_requests, query_len, width * config.layout.blocks_per_page)
        self._plans[slot] = plan
        return plan

    def plan_step(
        self, query_start_loc: torch.Tensor | Sequence[int], seq_lens: torch.Tensor, block_table: torch.Tensor, *,
        num_tokens: int | None = None, max_seq_len: int | None = None, slot: int = 0,
    ) -> StepPlan:  # fmt: skip
        """Plan an engine's step from decode-first metadata: uniform decodes, then everything else as prefill.

        The leading requests with one query length of at most ``max_query_len`` are decoded. Requests without queries
        that end a batch of decodes are padding: as many are decoded as ``num_tokens`` has rows for, so a step for a
        captured batch of B requests and L queries each is planned with ``num_tokens=B * L``, and one for rows of live
        queries only without it. The device buffers that a captured decode reads never move.

        Parameters
        ----------
        query_start_loc : torch.Tensor or sequence of int
            On the host, [B + 1] integers (a tensor, an array, a list), ascending from 0: where each request's queries
            begin.
        seq_lens : torch.Tensor
            int32 [B], contiguous, on the device; the queries included. Nothing is read back.
        block_table : torch.Tensor
            int32 [B, W], last stride 1, on the device.
        num_tokens : int, optional
            Rows of q, if more than ``query_start_loc[-1]``: the rest is padding.
        max_seq_len, slot
            As for :meth:`plan_prefill`.

        Returns
        -------
        StepPlan
            Pass it to :meth:`pick`, once per layer.

        Raises
        ------
        TypeError, ValueError
            Naming the argument, before anything is launched.
        UnsupportedConfigError
            When there are prefill requests and the indexer was built without ``max_prefill_tokens``.
        RuntimeError
            Inside a graph capture.
        """
        check_not_capturing(self.device, "plan_step")
        check_slot(self.config, slot)
        num_requests, _ = check_table(self.config, self.device, block_table, seq_lens)
        starts = check_starts(query_start_loc, num_requests)
        split = split_step(starts, self.config, num_tokens, max_seq_len)
        if split.prefills:
            self._check_prefills("plan_step")
        decodes, decode, prefill = split.decodes, None, None  # all is checked: from here on launches
        if decodes:
            decode = self._launch_decode_plan(block_table[:decodes], seq_lens[:decodes], split.query_len, slot)
        if split.prefills:
            staged = self._staging[slot].stage(starts[decodes:])
            prefill = self._launch_prefill_plan(
                staged, seq_lens[decodes:], block_table[decodes:], split.prefill_tokens, max_seq_len, slot
            )
        return StepPlan(decode, prefill, decodes, split.prefills, decodes * split.query_len, split.prefill_tokens)

    # ---- once per layer ----

    def pick(
        self, step: StepPlan, q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, *,
        sparse_table: SparseTable | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Write the picked block ids of one layer of a planned step: :meth:`decode`, then :meth:`prefill`.

        Both halves are checked before either is launched. Inside ``torch.compile`` the current plans of the step's slot
        are used, even where an eager call would refuse a stale step, and each half is checked when it runs.

        Parameters
        ----------
        step : StepPlan
            The slot's current step.
        q, cache, out
            As for :meth:`decode`, for all rows of the step; ``q`` may have further rows of padding if there is no
            prefill. They stay untouched.
        sparse_table : SparseTable, optional
            As in :meth:`decode`, over all requests of the step and all rows of q.

        Returns
        -------
        torch.Tensor
            ``out``.

        Raises
        ------
        TypeError, ValueError
            Naming the argument, before anything is launched.
        StalePlanError
            When the slot was planned again since.
        """
        if not isinstance(step, StepPlan):
            raise TypeError(f"step: must be a StepPlan, is {type(step).__name__}")
        compiling = torch.compiler.is_compiling()
        if compiling:
            check_step_rows(step, q)
        else:
            self._check_step(step, q, cache, out, sparse_table)
        split, heads = step.num_decode_tokens if step.prefill is not None else q.shape[0], self.config.num_heads
        tokens = 0 if self.config.out_layout == "thk" else 1
        if step.decode is not None:
            first = out.narrow(tokens, 0, split) if split < q.shape[0] else out
            table = part_of(sparse_table, slice(step.num_decodes), slice(split * heads))
            if compiling:
                self.decode(step.decode, q[:split], cache, first, allow_padding=True, sparse_table=table)
            else:
                self._launch_decode(step.decode, q[:split], cache, first, table)
        if step.prefill is not None:
            last = out.narrow(tokens, split, step.num_prefill_tokens)
            table = part_of(sparse_table, slice(step.num_decodes, None), slice(split * heads, None))
            if compiling:
                self.prefill(step.prefill, q[split:], cache, last, sparse_table=table)
            else:
                self._launch_prefill(step.prefill, q[split:], cache, last, table)
        return out

    def _check_step(
        self, step: StepPlan, q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, sparse_table: SparseTable | None
    ) -> None:
        """Both halves of a step are current, and the tensors are theirs."""
        decode, prefill = step.decode, step.prefill
        if decode is not None:
            self._check_current(decode)
        if prefill is not None:
            self._check_current_prefill(prefill)
        facts = (
            "step", step.num_decodes, step.num_prefills, step.num_decode_tokens, step.num_prefill_tokens,
            decode and decode.table_blocks, prefill and (prefill.blocks, prefill.max_seq_len), _facts(q), _facts(cache),
            _facts(out), _sparse_facts(sparse_table),
        )  # fmt: skip
        if facts not in self._accepted:
            check_step(self.config, self.device, step, q, cache, out, sparse_table)
            self._accept(facts)

    def decode(
        self, plan: DecodePlan, q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, *, allow_padding: bool = False,
        sparse_table: SparseTable | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Write the picked block ids of one layer. No allocation, no synchronisation, safe inside a graph capture.

        A captured decode reads the slot's buffers: before each replay, plan the slot for a batch of the captured shape
        (``num_requests`` and ``query_len``; pad with zero lengths), and keep the indexer alive. After a plan of another
        shape a replay emits empty rows. Inside ``torch.compile`` the slot's current plan is used, even where an eager
        call would refuse ``plan`` as stale.

        Parameters
        ----------
        plan : DecodePlan
            The slot's current plan.
        q : torch.Tensor
            [T, H, 128] index queries, bf16 for a bf16 cache, else e4m3fn; last stride 1, others multiples of 16 bytes.
            ``T = B * query_len``, request-major.
        cache : torch.Tensor
            The layer's index-K cache in the indexer's layout.
        out : torch.Tensor
            int32 [T, H, topk] (``thk``) or [H, T, topk] (``htk``), any strides with last stride 1. Receives
            ``min(topk, n)`` distinct block ids a row, then -1.
        allow_padding : bool
            Accept ``T > B * query_len``; the rows beyond stay untouched.
        sparse_table : SparseTable, optional
            Also write the picked blocks as the block table of an attention over pages of 16 tokens.

        Returns
        -------
        torch.Tensor
            ``out``.

        Raises
        ------
        TypeError, ValueError
            Naming the argument, before anything is launched.
        StalePlanError
            When the slot was planned again since.
        """
        if torch.compiler.is_compiling():
            call_decode(q, cache, out, self._handles[plan.slot], allow_padding, sparse_table)
            return out
        with self._engine.telling():
            self._check_decode(plan, q, cache, out, allow_padding, sparse_table)
            self._launch_decode(plan, q, cache, out, sparse_table)
        return out

    def _check_decode(
        self, plan: DecodePlan, q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, allow_padding: bool,
        sparse_table: SparseTable | None,
    ) -> None:  # fmt: skip
        """Raise unless :meth:`decode` may launch; what passed once is only compared."""
        if not isinstance(plan, DecodePlan):
            raise TypeError(f"plan: must be a DecodePlan, is {type(plan).__name__}")
        self._check_current(plan)
        facts = (
            plan.num_requests, plan.query_len, plan.table_blocks, allow_padding, _facts(q), _facts(cache), _facts(out),
            _sparse_facts(sparse_table),
        )  # fmt: skip
        if facts not in self._accepted:
            check_decode(self.config, self.device, plan, q, cache, out, allow_padding)
            if sparse_table is not None:
                blocks = attention_blocks(self.config, plan)
                check_sparse_table(self.config, self.device, sparse_table, plan.num_requests, q.shape[0], blocks)
            self._accept(facts)

    def _launch_decode(
        self,
        plan: DecodePlan,
        q: torch.Tensor,
        cache: torch.Tensor,
        out: torch.Tensor,
        sparse_table: SparseTable | None,
    ) -> None:
        """:meth:`decode` of checked arguments."""
        self._engine.decode(plan, q, cache, self._tokens_first(out), sparse_table)
        self._decode_calls += 1

    def _check_current(self, plan: DecodePlan) -> None:
        """Raise unless ``plan`` is its slot's current decode plan."""
        if plan not in self._plans:
            held = [current.generation if current else 0 for current in self._plans]
            raise StalePlanError(
                f"plan: generation {plan.generation} of slot {plan.slot}; this indexer's slots hold "
                f"{', '.join(f'generation {number} in slot {slot}' for slot, number in enumerate(held))}. "
                f"Plan again, or use another slot for a batch in flight (slots={self.config.slots})."
            )

    def _accept(self, facts: object) -> None:
        """Note facts of arguments that passed the checks."""
        if len(self._accepted) >= MAX_ACCEPTED:
            self._accepted.clear()
        self._accepted[facts] = None

    def scores(self, plan: DecodePlan) -> torch.Tensor:
        """Block scores of the slot's last decode, for tests and debugging.

        Returns
        -------
        torch.Tensor
            fp32 view [B, query_len, H, blocks]. Entries of invisible blocks, and of requests that needed no scores, are
            undefined.
        """
        return self._engine.scores(plan)

    # ---- prefill ----

    def plan_prefill(
        self, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, *, num_tokens: int,
        max_seq_len: int | None = None, slot: int = 0,
    ) -> PrefillPlan:  # fmt: skip
        """Plan a prefill step of requests with any number of queries, on the device without a synchronisation.

        Query i of a request sits at position ``seq_lens - query_len + i`` (bottom-right causal), as in decode.

        Parameters
        ----------
        cu_seqlens_q : torch.Tensor
            int32 [B + 1], contiguous, on the device, ascending from 0: where each request's queries begin.
        seq_lens : torch.Tensor
            int32 [B], contiguous. Tokens of every request, the queries included.
        block_table : torch.Tensor
            int32 [B, W], last stride 1, on the device; kept, and read by every layer's prefill.
        num_tokens : int
            Rows of q, 1..max_prefill_tokens. Tokens from ``cu_seqlens_q[-1]`` on are padding: their rows stay
            untouched.
        max_seq_len : int, optional
            An upper bound of ``seq_lens`` that the host knows; the tighter, the less scratch a row takes. Default: what
            the table can address. Positions beyond it are clamped as those beyond the table are.
        slot : int
            Which of the indexer's slots to use; the slot's earlier prefill plan becomes invalid, its decode plan stays.

        Returns
        -------
        PrefillPlan
            Pass it to :meth:`prefill`, once per layer.

        Raises
        ------
        TypeError, ValueError
            Naming the argument, before anything is launched.
        UnsupportedConfigError
            When the indexer was built without ``max_prefill_tokens``.
        RuntimeError
            Inside a graph capture.
        """
        check_not_capturing(self.device, "plan_prefill")
        config = self.config
        self._check_prefills("plan_prefill")
        check_slot(config, slot)
        num_requests, _ = check_table(config, self.device, block_table, seq_lens)
        check_tokens(config, self.device, cu_seqlens_q, num_requests, num_tokens, max_seq_len)
        return self._launch_prefill_plan(cu_seqlens_q, seq_lens, block_table, num_tokens, max_seq_len, slot)

    def _launch_prefill_plan(
        self, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, num_tokens: int,
        max_seq_len: int | None, slot: int,
    ) -> PrefillPlan:  # fmt: skip
        """:meth:`plan_prefill` of checked arguments."""
        num_requests, width = block_table.shape
        blocks = prefill_blocks(self.config, width, max_seq_len)
        stride, pass_tokens, num_passes = self._engine.prefill_geometry(blocks, num_tokens)
        self._prefill_generations[slot] += 1
        plan = PrefillPlan(
            slot, self._prefill_generations[slot], num_requests, num_tokens, cu_seqlens_q, block_table, blocks, stride,
            pass_tokens, num_passes, max_seq_len,
        )  # fmt: skip
        self._engine.plan_prefill(plan, cu_seqlens_q, seq_lens)
        self._prefill_plans[slot] = plan
        return plan

    def prefill(
        self, plan: PrefillPlan, q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, *,
        sparse_table: SparseTable | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Write the picked block ids of one layer for every query of a prefill batch.

        Inside ``torch.compile`` the slot's current prefill plan is used, even where an eager call would refuse ``plan``
        as stale.

        Parameters
        ----------
        plan : PrefillPlan
            The slot's current prefill plan.
        q : torch.Tensor
            [num_tokens, H, 128] index queries, as in :meth:`decode`.
        cache : torch.Tensor
            The layer's index-K cache in the indexer's layout; it holds the keys of the queries' own tokens too.
        out : torch.Tensor
            int32 [num_tokens, H, topk] (``thk``) or [H, num_tokens, topk] (``htk``), as in :meth:`decode`.
        sparse_table : SparseTable, optional
            As in :meth:`decode`.

        Returns
        -------
        torch.Tensor
            ``out``.

        Raises
        ------
        TypeError, ValueError
            Naming the argument, before anything is launched.
        StalePlanError
            When the slot was planned for prefill again since.
        """
        if torch.compiler.is_compiling():
            call_prefill(q, cache, out, self._handles[plan.slot], sparse_table)
            return out
        if not isinstance(plan, PrefillPlan):
            raise TypeError(f"plan: must be a PrefillPlan, is {type(plan).__name__}")
        self._check_current_prefill(plan)
        check_prefill(self.config, self.device, plan, q, cache, out)
        if sparse_table is not None:
            blocks = attention_blocks(self.config, plan)
            check_sparse_table(self.config, self.device, sparse_table, plan.num_requests, q.shape[0], blocks)
        self._launch_prefill(plan, q, cache, out, sparse_table)
        return out

    def _launch_prefill(
        self,
        plan: PrefillPlan,
        q: torch.Tensor,
        cache: torch.Tensor,
        out: torch.Tensor,
        sparse_table: SparseTable | None,
    ) -> None:
        """:meth:`prefill` of checked arguments."""
        self._engine.prefill(plan, q, cache, self._tokens_first(out), sparse_table)
        self._prefill_calls += 1

    def _check_current_prefill(self, plan: PrefillPlan) -> None:
        """Raise unless ``plan`` is its slot's current prefill plan."""
        if plan not in self._prefill_plans:
            raise StalePlanError(
                f"plan: generation {plan.generation} of slot {plan.slot} was replaced by a later plan_prefill; plan "
                f"again, or use another slot for a batch in flight (slots={self.config.slots})"
            )

    def prefill_scores(self, plan: PrefillPlan) -> torch.Tensor:
        """Block scores of the last pass of the slot's last prefill, for tests and debugging.

        Returns
        -------
        torch.Tensor
            fp32 copy [t, H, blocks] of the batch's last t tokens. Entries of invisible blocks, of padding, and of
            requests that needed no scores are undefined.
        """
        return self._engine.prefill_scores(plan)

    def _check_prefills(self, call: str) -> None:
        if not self.config.max_prefill_tokens:
            raise UnsupportedConfigError(f"{call}: this indexer was built for decode; pass max_prefill_tokens")

    def _tokens_first(self, out: torch.Tensor) -> torch.Tensor:
        return out if self.config.out_layout == "thk" else out.transpose(0, 1)


def _sparse_facts(sparse: SparseTable | None) -> object:
    if not isinstance(sparse, SparseTable):
        return sparse is None
    tensors = (sparse.attention_block_table, sparse.table, sparse.context_lens)
    return sparse.block_page_stride, *map(_facts, tensors)


def _facts(tensor: torch.Tensor) -> object:
    """All that the checks ask of a tensor; cheaper to compare than to check."""
    if not isinstance(tensor, torch.Tensor):
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16

# SPDX-License-Identifier: Apache-2.0
"""Rows of block scores to block ids: the last step of decode and of prefill."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..backend_api import Launch
from ..config import ORDERS, IndexerConfig
from ..dispatch import Choice, Need, select
from ..manifest import KernelPackage
from .sparse_table import NUMBERS, POINTERS

STRIDES = ("stride_out_t", "stride_out_h")
Bind = Callable[[Choice, Mapping[str, Any], tuple[str, ...]], Launch]  # (kernel, fixed arguments, names of the others)


@dataclass(frozen=True)
class Selection:
    """The chosen kernels: ``pick`` takes the best of a row or of one split of it, ``merge`` the best of all splits."""

    pick: Choice
    merge: Choice

    @classmethod
    def choose(cls, package: KernelPackage, config: IndexerConfig, route: str, many_rows: bool = False) -> Selection:
        """The smallest variants that hold ``config.topk``; for prefill's ``many_rows`` also those made for them.

        Raises
        ------
        KernelNotInstalledError
            When a role has none.
        """
        roles = ("select_rows", "select_blocks") if many_rows else ("select_blocks",)
        pick = select(package, roles, [Need("topk", config.topk, at_least=True)], route)
        merge = select(package, "merge_splits", [Need("topk", pick.variant.axes["topk"])], route)
        return cls(pick, merge)

    @property
    def split_blocks(self) -> int:
        """Blocks of one split; rows with more are merged."""
        return int(self.pick.variant.launch["split_blocks"])

    @property
    def keys_per_split(self) -> int:
        """Keys that every split of a long row leaves for the merge."""
        return int(self.pick.variant.axes["topk"])

    def num_splits(self, blocks: int) -> int:
        """Splits of a row of ``blocks`` blocks."""
        return -(-blocks // self.split_blocks)

    def grid(self, rows: int, num_splits: int) -> int:
        """Programs of ``pick`` for ``rows`` rows."""
        return -(-rows // int(self.pick.variant.launch["rows_per_block"])) * num_splits

    def bind(
        self, bind: Bind, config: IndexerConfig, buffers: Mapping[str, torch.Tensor], fixed: Mapping[str, Any],
        dynamic: tuple[str, ...],
    ) -> tuple[Launch, Launch, Launch, Launch]:  # fmt: skip
        """Launches of pick and merge over one slot's buffers, then of both with a sparse table.

        The caller names the numbers that come with every launch; in front of them come the output's strides. A sparse
        table's :data:`POINTERS` come behind ``out_ptr``, its :data:`NUMBERS` last.
        """
        rows = {
            "positions_ptr": buffers["positions"], "header_ptr": buffers["header"], "partial_ptr": buffers["partial"],
            "num_heads": config.num_heads, "topk": config.topk, "order": ORDERS.index(config.order),
            "empty_block_zero": int(config.empty_row == "block_zero"),
        }  # fmt: skip
        forced = {"init_blocks": config.init_blocks, "local_blocks": config.local_blocks}
        scores = {"scores_ptr": buffers["scores"]}
        plain = {name: value for name, value in fixed.items() if name != "stride_scores"}
        names = tuple(name for name in dynamic if name != "stride_scores")
        pick = {**rows, **forced, **scores, **fixed}
        merge = {**rows, "split_blocks": self.split_blocks, **plain}
        # without a table a stride of 0 says so, and no kernel looks where these pointers point
        nothing = {**dict.fromkeys(POINTERS, buffers["header"]), **dict.fromkeys(NUMBERS, 0)}
        return (
            bind(self.pick, pick | nothing, ("out_ptr", *STRIDES, *dynamic)),
            bind(self.merge, merge | nothing, ("out_ptr", *STRIDES, *names)),
            bind(self.pick, pick, ("out_ptr", *POINTERS, *STRIDES, *dynamic, *NUMBERS)),
            bind(self.merge, merge, ("out_ptr", *POINTERS, *STRIDES, *names, *NUMBERS)),
        )

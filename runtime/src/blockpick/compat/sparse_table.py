# SPDX-License-Identifier: Apache-2.0
"""The arguments of the ROCm fork's sparse table, for the runtime's emission."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..checks import check_int, check_last_stride, check_tensor
from ..ops.sparse_table import SparseTable

PAGES_PER_BLOCK = 8  # kernel pages of 16 tokens


@dataclass(frozen=True)
class SparseOutputs:
    """Where a call's tables go: all four arguments, checked. ``emission`` is what the kernel writes."""

    table_out: torch.Tensor
    context_lens_out: torch.Tensor
    emission: SparseTable

    @classmethod
    def of(
        cls, attention_block_table: torch.Tensor | None, sparse_block_table_out: torch.Tensor | None,
        sparse_context_lens_out: torch.Tensor | None, block_page_stride: int | None, *, requests: int, rows: int,
        topk: int, blocks: int, device: torch.device,
    ) -> SparseOutputs | None:  # fmt: skip
        """The arguments of one call; None when none is given.

        Raises
        ------
        TypeError, ValueError
            Naming the argument.
        """
        given = {
            "attention_block_table": attention_block_table, "sparse_block_table_out": sparse_block_table_out,
            "sparse_context_lens_out": sparse_context_lens_out, "block_page_stride": block_page_stride,
        }  # fmt: skip
        missing = [name for name, value in given.items() if value is None]
        if len(missing) == len(given):
            return None
        if (
            attention_block_table is None or sparse_block_table_out is None or sparse_context_lens_out is None
            or block_page_stride is None
        ):  # fmt: skip
            raise ValueError(f"{missing[0]}: missing; {', '.join(given)} must be provided together or not at all")
        width = topk * PAGES_PER_BLOCK
        for name, tensor, dims, shape in (
            ("attention_block_table", attention_block_table, 2, f"[{requests}, >= {blocks}]"),
            ("sparse_block_table_out", sparse_block_table_out, 2, f"[{rows}, {width}]"),
            ("sparse_context_lens_out", sparse_context_lens_out, 1, f"[{rows}]"),
        ):
            check_tensor(name, tensor, torch.int32, dims, device, shape)
            check_last_stride(name, tensor)
            want = (
                (requests, max(tensor.shape[-1], blocks)) if name == "attention_block_table" else (rows, width)[:dims]
            )
            if tuple(tensor.shape) != want:
                raise ValueError(f"{name}: must be {shape}, has shape {list(tensor.shape)}")
        check_int("block_page_stride", block_page_stride, PAGES_PER_BLOCK, 2 * PAGES_PER_BLOCK, "8 or 16")
        if block_page_stride % PAGES_PER_BLOCK:
            raise ValueError(f"block_page_stride: must be 8 or 16, is {block_page_stride}")
        # the kernel's rows lie behind one another; a wider table is written through one that does
        dense = sparse_block_table_out.contiguous()
        emission = SparseTable(attention_block_table, block_page_stride, dense, sparse_context_lens_out)
        return cls(sparse_block_table_out, sparse_context_lens_out, emission)

    def clear(self) -> None:
        """Write rows that hold nothing."""
        self.table_out.zero_()
        self.context_lens_out.zero_()

    def finish(self) -> None:
        """Bring what was emitted to where the caller wants it."""
        if self.emission.table is not self.table_out:
            self.table_out.copy_(self.emission.table)

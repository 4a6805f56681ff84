# SPDX-License-Identifier: Apache-2.0
"""torch.library registration: the picks and the inserts as ``torch.ops.blockpick.*``."""

from __future__ import annotations

from typing import Any

import torch

from ..layout import CacheLayout
from .fused_insert import qk_norm_rope_insert
from .insert import insert
from .sparse_table import SparseTable


@torch.library.custom_op("blockpick::decode_pick", mutates_args=("out", "table", "context_lens"))
def decode_pick(
    q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, handle: int, allow_padding: bool = False,
    attention_block_table: torch.Tensor | None = None, table: torch.Tensor | None = None,
    context_lens: torch.Tensor | None = None, block_page_stride: int = 0,
) -> None:  # fmt: skip
    """:meth:`blockpick.Indexer.decode` with the current plan of the slot that ``handle`` names; the last four are the
    fields of a :class:`blockpick.SparseTable`, all or none.
    """
    from ..handles import find_slot

    indexer, plan = find_slot(handle)
    sparse = sparse_table(attention_block_table, block_page_stride, table, context_lens)
    indexer.decode(plan, q, cache, out, allow_padding=allow_padding, sparse_table=sparse)


@decode_pick.register_fake
def _(
    q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, handle: int, allow_padding: bool = False,
    attention_block_table: torch.Tensor | None = None, table: torch.Tensor | None = None,
    context_lens: torch.Tensor | None = None, block_page_stride: int = 0,
) -> None:  # fmt: skip
    return None


@torch.library.custom_op("blockpick::prefill_pick", mutates_args=("out", "table", "context_lens"))
def prefill_pick(
    q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, handle: int,
    attention_block_table: torch.Tensor | None = None, table: torch.Tensor | None = None,
    context_lens: torch.Tensor | None = None, block_page_stride: int = 0,
) -> None:  # fmt: skip
    """:meth:`blockpick.Indexer.prefill` with the current prefill plan of the slot that ``handle`` names; the last four
    as of ``decode_pick``.
    """
    from ..handles import find_prefill

    indexer, plan = find_prefill(handle)
    sparse = sparse_table(attention_block_table, block_page_stride, table, context_lens)
    indexer.prefill(plan, q, cache, out, sparse_table=sparse)


@prefill_pick.register_fake
def _(
    q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, handle: int,
    attention_block_table: torch.Tensor | None = None, table: torch.Tensor | None = None,
    context_lens: torch.Tensor | None = None, block_page_stride: int = 0,
) -> None:  # fmt: skip
    return None


def sparse_table(
    attention_block_table: torch.Tensor | None, block_page_stride: int, table: torch.Tensor | None,
    context_lens: torch.Tensor | None,
) -> SparseTable | None:  # fmt: skip
    """An op's last four arguments as the indexer takes them.

    Raises
    ------
    ValueError
        When some are given and others are not.
    """
    if attention_block_table is not None and table is not None and context_lens is not None:
        return SparseTable(attention_block_table, block_page_stride, table, context_lens)
    given = {"attention_block_table": attention_block_table, "table": table, "context_lens": context_lens}
    missing = [name for name, tensor in given.items() if tensor is None]
    if len(missing) < len(given) or block_page_stride:
        raise ValueError(f"{missing[0]}: missing; {', '.join(given)} and block_page_stride come together or not at all")
    return None


def sparse_arguments(sparse: SparseTable | None) -> dict[str, Any]:
    """The same arguments from what the indexer takes, for calls inside ``torch.compile``.

    Raises
    ------
    TypeError
        When it is no :class:`blockpick.SparseTable`.
    """
    if sparse is None:
        return {}
    if not isinstance(sparse, SparseTable):
        raise TypeError(f"sparse_table: must be a SparseTable, is {type(sparse).__name__}")
    return {
        "attention_block_table": sparse.attention_block_table, "table": sparse.table,
        "context_lens": sparse.context_lens, "block_page_stride": sparse.block_page_stride,
    }  # fmt: skip


@torch.library.custom_op("blockpick::qk_norm_rope_insert", mutates_args=("cache", "q_out"))
def qk_norm_rope_insert_op(
    cache: torch.Tensor, qkv: torch.Tensor, q_out: torch.Tensor, slot_mapping: torch.Tensor, positions: torch.Tensor,
    cos_sin: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, q_column: int, k_column: int, eps: float,
    dtype: str, page_size: int, shards: int = 1, shard: int = 0, backend: str = "auto",
) -> None:  # fmt: skip
    """:func:`blockpick.qk_norm_rope_insert` with the layout's fields as plain values."""
    qk_norm_rope_insert(
        CacheLayout(dtype, page_size, shards), cache, qkv, q_out, slot_mapping, positions, cos_sin, q_weight, k_weight,
        q_column=q_column, k_column=k_column, eps=eps, shard=shard, backend=backend,
    )  # fmt: skip


@qk_norm_rope_insert_op.register_fake
def _(
    cache: torch.Tensor, qkv: torch.Tensor, q_out: torch.Tensor, slot_mapping: torch.Tensor, positions: torch.Tensor,
    cos_sin: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, q_column: int, k_column: int, eps: float,
    dtype: str, page_size: int, shards: int = 1, shard: int = 0, backend: str = "auto",
) -> None:  # fmt: skip
    return None


@torch.library.custom_op("blockpick::insert", mutates_args=("cache",))
def insert_op(
    index_k: torch.Tensor, slot_mapping: torch.Tensor, cache: torch.Tensor, dtype: str, page_size: int, shards: int = 1,
    shard: int = 0, backend: str = "auto",
) -> None:  # fmt: skip
    """:func:`blockpick.insert` with the layout's fields as plain values."""
    insert(CacheLayout(dtype, page_size, shards), cache, index_k, slot_mapping, shard=shard, backend=backend)


@insert_op.register_fake
def _(
    index_k: torch.Tensor, slot_mapping: torch.Tensor, cache: torch.Tensor, dtype: str, page_size: int, shards: int = 1,
    shard: int = 0, backend: str = "auto",
) -> None:  # fmt: skip
    return None

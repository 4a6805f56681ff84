# SPDX-License-Identifier: Apache-2.0
"""torch.library registration: the picks and the inserts as ``torch.ops.blockpick.*``."""

from __future__ import annotations

import torch

from ..handles import find_prefill, find_slot
from ..layout import CacheLayout
from .fused_insert import qk_norm_rope_insert
from .insert import insert
from .sparse_table import SparseTable


@torch.library.custom_op("blockpick::decode_pick", mutates_args=("out",))
def decode_pick(
    q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, handle: int, allow_padding: bool = False
) -> None:
    """:meth:`blockpick.Indexer.decode` with the current plan of the slot that ``handle`` names."""
    indexer, plan = find_slot(handle)
    indexer.decode(plan, q, cache, out, allow_padding=allow_padding)


@decode_pick.register_fake
def _(q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, handle: int, allow_padding: bool = False) -> None:
    return None


# ops of their own: torch 2.11 can't call an op whose written argument is optional and left away
@torch.library.custom_op("blockpick::decode_pick_sparse", mutates_args=("out", "table", "context_lens"))
def decode_pick_sparse(
    q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, handle: int, allow_padding: bool,
    attention_block_table: torch.Tensor, table: torch.Tensor, context_lens: torch.Tensor, block_page_stride: int,
) -> None:  # fmt: skip
    """``decode_pick`` with the fields of a :class:`blockpick.SparseTable`."""
    indexer, plan = find_slot(handle)
    sparse = SparseTable(attention_block_table, block_page_stride, table, context_lens)
    indexer.decode(plan, q, cache, out, allow_padding=allow_padding, sparse_table=sparse)


@decode_pick_sparse.register_fake
def _(
    q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, handle: int, allow_padding: bool,
    attention_block_table: torch.Tensor, table: torch.Tensor, context_lens: torch.Tensor, block_page_stride: int,
) -> None:  # fmt: skip
    return None


@torch.library.custom_op("blockpick::prefill_pick", mutates_args=("out",))
def prefill_pick(q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, handle: int) -> None:
    """:meth:`blockpick.Indexer.prefill` with the current prefill plan of the slot that ``handle`` names."""
    indexer, plan = find_prefill(handle)
    indexer.prefill(plan, q, cache, out)


@prefill_pick.register_fake
def _(q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, handle: int) -> None:
    return None


@torch.library.custom_op("blockpick::prefill_pick_sparse", mutates_args=("out", "table", "context_lens"))
def prefill_pick_sparse(
    q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, handle: int, attention_block_table: torch.Tensor,
    table: torch.Tensor, context_lens: torch.Tensor, block_page_stride: int,
) -> None:  # fmt: skip
    """``prefill_pick`` with the fields of a :class:`blockpick.SparseTable`."""
    indexer, plan = find_prefill(handle)
    sparse = SparseTable(attention_block_table, block_page_stride, table, context_lens)
    indexer.prefill(plan, q, cache, out, sparse_table=sparse)


@prefill_pick_sparse.register_fake
def _(
    q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, handle: int, attention_block_table: torch.Tensor,
    table: torch.Tensor, context_lens: torch.Tensor, block_page_stride: int,
) -> None:  # fmt: skip
    return None


def call_decode(
    q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, handle: int, padding: bool, sparse: SparseTable | None
) -> None:
    """The decode op that serves a call inside ``torch.compile``."""
    if sparse is None:
        torch.ops.blockpick.decode_pick(q, cache, out, handle, padding)
    else:
        torch.ops.blockpick.decode_pick_sparse(q, cache, out, handle, padding, *_fields(sparse))


def call_prefill(
    q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, handle: int, sparse: SparseTable | None
) -> None:
    """The prefill op that serves a call inside ``torch.compile``."""
    if sparse is None:
        torch.ops.blockpick.prefill_pick(q, cache, out, handle)
    else:
        torch.ops.blockpick.prefill_pick_sparse(q, cache, out, handle, *_fields(sparse))


def _fields(sparse: SparseTable) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    if not isinstance(sparse, SparseTable):
        raise TypeError(f"sparse_table: must be a SparseTable, is {type(sparse).__name__}")
    return sparse.attention_block_table, sparse.table, sparse.context_lens, sparse.block_page_stride


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

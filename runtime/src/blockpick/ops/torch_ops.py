# SPDX-License-Identifier: Apache-2.0
"""torch.library registration: the picks and the inserts as ``torch.ops.blockpick.*``."""

from __future__ import annotations

import torch

from ..layout import CacheLayout
from .fused_insert import qk_norm_rope_insert
from .insert import insert


@torch.library.custom_op("blockpick::decode_pick", mutates_args=("out",))
def decode_pick(
    q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, handle: int, allow_padding: bool = False
) -> None:
    """:meth:`blockpick.Indexer.decode` with the current plan of the slot that ``handle`` names."""
    from ..handles import find_slot

    indexer, plan = find_slot(handle)
    indexer.decode(plan, q, cache, out, allow_padding=allow_padding)


@decode_pick.register_fake
def _(q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, handle: int, allow_padding: bool = False) -> None:
    return None


@torch.library.custom_op("blockpick::prefill_pick", mutates_args=("out",))
def prefill_pick(q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, handle: int) -> None:
    """:meth:`blockpick.Indexer.prefill` with the current prefill plan of the slot that ``handle`` names."""
    from ..handles import find_prefill

    indexer, plan = find_prefill(handle)
    indexer.prefill(plan, q, cache, out)


@prefill_pick.register_fake
def _(q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, handle: int) -> None:
    return None


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

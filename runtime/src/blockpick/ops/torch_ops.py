# SPDX-License-Identifier: Apache-2.0
"""torch.library registration: ``torch.ops.blockpick.decode_pick`` and ``torch.ops.blockpick.insert``."""

from __future__ import annotations

import torch

from ..layout import CacheLayout
from .insert import insert


@torch.library.custom_op("blockpick::decode_pick", mutates_args=("out",))
def decode_pick(
    q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, handle: int, allow_padding: bool = False
) -> None:
    """:meth:`blockpick.Indexer.decode` with the current plan of the slot that ``handle`` names."""
    from ..indexer import find_slot

    indexer, plan = find_slot(handle)
    indexer.decode(plan, q, cache, out, allow_padding=allow_padding)


@decode_pick.register_fake
def _(q: torch.Tensor, cache: torch.Tensor, out: torch.Tensor, handle: int, allow_padding: bool = False) -> None:
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

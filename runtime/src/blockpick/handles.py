# SPDX-License-Identifier: Apache-2.0
"""Numbers by which ``torch.ops.blockpick`` finds an indexer's slot and its current plans."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

from .plan import DecodePlan, PrefillPlan

if TYPE_CHECKING:
    from .indexer import Indexer

_NUMBERS = itertools.count()
_SLOTS: dict[int, tuple[weakref.ref[Indexer], int]] = {}  # handle -> (indexer, slot)


def register(indexer: Indexer, slots: int) -> list[int]:
    """A handle for every slot, valid as long as the indexer lives."""
    found = [next(_NUMBERS) for _ in range(slots)]
    for slot, handle in enumerate(found):
        _SLOTS[handle] = (weakref.ref(indexer), slot)
        weakref.finalize(indexer, _SLOTS.pop, handle)
    return found


def find_prefill(handle: int) -> tuple[Indexer, PrefillPlan]:
    """The indexer and current prefill plan behind a handle.

    Raises
    ------
    ValueError
        When the handle is unknown, its indexer is gone, or its slot was never planned for prefill.
    """
    indexer, slot = find_indexer(handle)
    plan = indexer._prefill_plans[slot]
    if plan is None:
        raise ValueError(f"handle: slot {slot} of the indexer has no prefill plan; call plan_prefill first")
    return indexer, plan


def find_slot(handle: int) -> tuple[Indexer, DecodePlan]:
    """The indexer and current plan behind a handle.

    Raises
    ------
    ValueError
        When the handle is unknown, its indexer is gone, or its slot was never planned.
    """
    indexer, slot = find_indexer(handle)
    plan = indexer._plans[slot]
    if plan is None:
        raise ValueError(f"handle: slot {slot} of the indexer has no plan; call plan_decode first")
    return indexer, plan


def find_indexer(handle: int) -> tuple[Indexer, int]:
    """The live indexer and the slot behind a handle."""
    reference, slot = _SLOTS.get(handle, (None, 0))
    indexer = reference() if reference is not None else None
    if indexer is None:
        raise ValueError(f"handle: {handle} belongs to no live Indexer")
    return indexer, slot

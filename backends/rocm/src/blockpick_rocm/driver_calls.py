# SPDX-License-Identifier: Apache-2.0
"""Results of HIP calls."""

from __future__ import annotations

from typing import Any

from hip import hip

from blockpick.errors import DriverError


def check(result: tuple[Any, ...], call: str) -> Any:
    """The value of a HIP call, or :class:`DriverError`."""
    code, *values = result
    if code != hip.hipError_t.hipSuccess:
        raise DriverError(int(code), code.name, call)
    return values[0] if values else None

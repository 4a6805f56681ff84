# SPDX-License-Identifier: Apache-2.0
"""Results of driver calls."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver

from blockpick.errors import DriverError


def check(result: tuple[Any, ...], call: str) -> Any:
    """The value of a driver call, or :class:`DriverError`."""
    code, *values = result
    if code != driver.CUresult.CUDA_SUCCESS:
        raise DriverError(int(code), code.name, call)
    return values[0] if values else None

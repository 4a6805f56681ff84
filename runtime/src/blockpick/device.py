# SPDX-License-Identifier: Apache-2.0
"""Installed backends, and the architecture of a torch device."""

from __future__ import annotations

import functools
from importlib.metadata import entry_points
from typing import Any

import torch

from .backend_api import ENTRY_POINT_GROUP, BinaryLoader, DeviceInfo
from .errors import BlockpickError, UnsupportedArchError


@functools.cache
def installed_backends() -> dict[str, Any]:
    """Every installed backend by entry point name; importing one needs neither a driver nor a device."""
    return {point.name: point.load()() for point in entry_points(group=ENTRY_POINT_GROUP)}


def binary_loader(vendor: str) -> BinaryLoader | None:
    """The installed loader for ``vendor`` (``cuda`` or ``rocm``)."""
    for backend in installed_backends().values():
        if isinstance(backend, BinaryLoader) and backend.vendor == vendor:
            return backend
    return None


def torch_vendor() -> str:
    """The vendor whose devices this torch build calls ``cuda``."""
    return "rocm" if torch.version.hip else "cuda"


def describe(device: torch.device) -> DeviceInfo:
    """Driver facts of a GPU tensor's device.

    Raises
    ------
    UnsupportedArchError
        When the device is not a GPU, or the loader for its vendor is not installed.
    """
    if device.type != "cuda":
        raise UnsupportedArchError(f"device {device}: no architecture; kernels run on cuda (CUDA or ROCm) devices")
    vendor = torch_vendor()
    loader = binary_loader(vendor)
    if loader is None:
        raise UnsupportedArchError(
            f"device {device}: blockpick-{vendor} is not installed; installed backends: "
            f"{', '.join(sorted(installed_backends())) or 'none'}. Install blockpick-{vendor}."
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    return _described(vendor)[index]


@functools.cache
def _described(vendor: str) -> list[DeviceInfo]:
    loader = binary_loader(vendor)
    if loader is None:
        raise BlockpickError(f"no loader for {vendor}")
    return loader.devices()

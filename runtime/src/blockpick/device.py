# SPDX-License-Identifier: Apache-2.0
"""Installed backends, and the architecture of a torch device."""

from __future__ import annotations

import functools
import threading
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import entry_points
from typing import Any

import torch

from .backend_api import ENTRY_POINT_GROUP, BinaryLoader, DeviceInfo
from .errors import BlockpickError, UnsupportedArchError

_ALREADY_THERE = nullcontext()
_thread = threading.local()


@functools.cache
def _found() -> tuple[dict[str, Any], dict[str, str]]:
    backends, failures = {}, {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            backends[point.name] = point.load()()
        except ImportError as error:  # its vendor binding is missing: the other backends still serve
            failures[point.name] = str(error)
    return backends, failures


def installed_backends() -> dict[str, Any]:
    """Every installed backend by entry point name; importing one needs neither a driver nor a device."""
    return _found()[0]


def broken_backends() -> dict[str, str]:
    """Installed backends that could not be imported, with the reason."""
    return _found()[1]


def binary_loader(vendor: str) -> BinaryLoader | None:
    """The installed loader for ``vendor`` (``cuda`` or ``rocm``)."""
    for backend in installed_backends().values():
        if isinstance(backend, BinaryLoader) and backend.vendor == vendor:
            return backend
    return None


def current_stream(device: torch.device) -> int:
    """Handle of torch's current stream on a device; 0 on the CPU.

    This is the call that torch's own compiler makes at every launch: thirty times cheaper than building a Stream
    object.
    """
    return int(torch._C._cuda_getCurrentRawStream(device.index)) if device.type == "cuda" else 0


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device`` current where it is not: a launch on the default stream goes to the current device's.

    A new thread has no driver context although torch names a current device; the first call binds it.
    """
    if device.type != "cuda":
        return _ALREADY_THERE
    if not hasattr(_thread, "bound"):
        torch.cuda.set_device(torch.cuda.current_device())
        _thread.bound = True
    return _ALREADY_THERE if torch.cuda.current_device() == device.index else torch.cuda.device(device)


def torch_vendor() -> str:
    """The vendor whose devices this torch build calls ``cuda``."""
    return "rocm" if torch.version.hip else "cuda"


def describe(device: torch.device, asked: str = "") -> DeviceInfo:
    """Driver facts of a GPU tensor's device; ``asked`` opens the message of a refusal.

    Raises
    ------
    UnsupportedArchError
        When the device is not a GPU, or the loader for its vendor is not installed.
    """
    if device.type != "cuda":
        raise UnsupportedArchError(
            f"{asked}device {device}: no architecture; kernels run on cuda (CUDA or ROCm) devices"
        )
    vendor = torch_vendor()
    loader = binary_loader(vendor)
    if loader is None:
        broken = broken_backends()
        state = f"cannot be imported ({broken[vendor]})" if vendor in broken else "is not installed"
        raise UnsupportedArchError(
            f"{asked}device {device}: blockpick-{vendor} {state}; usable backends: "
            f"{', '.join(sorted(installed_backends())) or 'none'}. Install blockpick-{vendor} with its dependencies."
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    return _described(vendor)[index]


@functools.cache
def _described(vendor: str) -> list[DeviceInfo]:
    loader = binary_loader(vendor)
    if loader is None:
        raise BlockpickError(f"no loader for {vendor}")
    return loader.devices()

# SPDX-License-Identifier: Apache-2.0
"""Which engine runs a configuration on a device, by which route, and why."""

from __future__ import annotations

import torch

from .config import BACKENDS, IndexerConfig
from .device import binary_loader, describe, torch_vendor
from .dispatch import interpreted_arch, pick_route
from .errors import UnsupportedConfigError
from .manifest import installed_packages
from .ops.engine import Engine, KernelEngine


def make_engine(
    config: IndexerConfig, device: torch.device, backend: str, allow_jit: bool, arch: str | None
) -> tuple[Engine, str, str]:
    """The engine, not yet allocated, its route, and why."""
    if backend not in BACKENDS:
        raise UnsupportedConfigError(f"Indexer: backend={backend!r} is not supported; supported: {', '.join(BACKENDS)}")
    if backend == "reference" or (backend == "auto" and device.type == "cpu"):
        from .testing.engine import ReferenceEngine

        reason = (
            "asked for"
            if backend == "reference"
            else "CPU tensors; generated kernels need a GPU or backend='interpreter'"
        )
        return ReferenceEngine(config, device, default_rounding(device, arch)), "reference", reason
    if backend == "interpreter":
        if device.type != "cpu":
            raise UnsupportedConfigError(f"Indexer: backend='interpreter' runs on CPU tensors, device is {device}")
        chosen = interpreted_arch(arch)
        return (
            KernelEngine(config, device, None, chosen, "interpreter"),
            "interpreter",
            f"asked for, sources of {chosen}",
        )
    info = describe(device, f"Indexer: backend={backend!r}: ")
    route, reason = (backend, "asked for") if backend in ("aot", "jit") else pick_route(info, allow_jit)
    return KernelEngine(config, device, info, info.arch, route), route, f"{info.name} is {info.arch}; {reason}"


def default_rounding(device: torch.device, arch: str | None) -> str:
    """The NVFP4 rounding that kernels for ``arch`` or the device have by default; exact where neither is known."""
    packages = installed_packages()
    if arch is None and device.type == "cuda" and binary_loader(torch_vendor()) is not None:
        arch = describe(device).arch
    return packages[arch].nvfp4_rounding if arch in packages else "exact"

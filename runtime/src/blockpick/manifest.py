# SPDX-License-Identifier: Apache-2.0
"""Installed kernel packages: their manifests, binaries and sources.

A kernel package is a folder with ``manifest.json``. It is found through the entry point group ``blockpick.kernels`` (a
callable that returns the folder) or through ``BLOCKPICK_KERNEL_PATH``, folders separated like ``PATH``.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from .backend_api import Argument, KernelBinary, KernelSource
from .errors import ManifestError

SCHEMA = 1
ENTRY_POINT_GROUP = "blockpick.kernels"
PATH_VARIABLE = "BLOCKPICK_KERNEL_PATH"


@dataclass(frozen=True, eq=False)
class InstalledVariant:
    """One variant of one installed kernel package; compared by identity."""

    name: str
    op: str
    role: str
    arch: str
    vendor: str
    language: str
    preference: int
    axes: Mapping[str, Any]
    launch: Mapping[str, Any]
    resources: Mapping[str, Any]
    record: Mapping[str, Any]
    folder: Path

    def _read(self, key: str, digest: str) -> bytes:
        path = self.folder / str(self.record[key])
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ManifestError(f"{self.name}: cannot read {path}: {error}. Reinstall the kernel package.") from error
        found = hashlib.sha256(data).hexdigest()
        if found != self.record[digest]:
            raise ManifestError(
                f"{self.name}: {path.name} has sha256 {found[:16]}..., its manifest says "
                f"{self.record[digest][:16]}.... Reinstall the kernel package."
            )
        return data

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The kernel's arguments in order."""
        return tuple(Argument(arg["name"], arg["type"]) for arg in self.record["arguments"])

    def binary(self) -> KernelBinary:
        """The compiled kernel, checked against its digest."""
        record = self.record
        return KernelBinary(
            self.name, record["symbol"], self._read("file", "sha256"), self.arguments,
            record["num_warps"] * record["warp_size"], record["shared_bytes"], record["trailing_pointers"],
            record["pdl"],
        )  # fmt: skip

    def source(self) -> KernelSource:
        """The rendered source, checked against its digest."""
        record = self.record
        return KernelSource(
            self.name, record["symbol"], self.language, self._read("source", "source_sha256").decode(), self.arguments,
            {arg["name"]: arg["divisible"] for arg in record["arguments"] if "divisible" in arg},
            record["constexprs"], record["options"], record["warp_size"],
        )  # fmt: skip


@dataclass(frozen=True)
class KernelPackage:
    """One installed kernel package: all variants for one architecture."""

    arch: str
    vendor: str
    version: str
    nvfp4_rounding: str
    prefill_fp8: tuple[str, ...]
    folder: Path
    variants: tuple[InstalledVariant, ...]

    @property
    def has_binaries(self) -> bool:
        """Whether every variant was compiled, not only rendered."""
        return all(variant.record["file"] for variant in self.variants)


def read_package(folder: Path) -> KernelPackage:
    """Read the manifest in ``folder``.

    Raises
    ------
    ManifestError
        When the manifest is missing, not JSON, of another schema, or lacks a field.
    """
    path = folder / "manifest.json"
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ManifestError(f"cannot read {path}: {error}") from error
    if data.get("schema") != SCHEMA:
        raise ManifestError(
            f"{path}: schema {data.get('schema')}, this blockpick reads schema {SCHEMA}. "
            "Install kernel wheels of the same release."
        )
    try:
        arch, vendor = data["arch"], data["vendor"]
        variants = tuple(
            InstalledVariant(
                name, record["op"], record["role"], arch, vendor, record["language"], record["preference"],
                record["axes"], record["launch"], record["resources"], record, folder,
            )
            for name, record in sorted(data["variants"].items())
        )  # fmt: skip
        defaults = data["defaults"]
        return KernelPackage(
            arch, vendor, data["version"], defaults["nvfp4_rounding"], tuple(defaults["prefill_fp8"]), folder, variants
        )
    except (KeyError, TypeError) as error:
        raise ManifestError(f"{path}: malformed, {error!r} is missing or of a wrong kind") from error


@functools.cache
def installed_packages() -> dict[str, KernelPackage]:
    """Every installed kernel package by architecture; the path variable wins over entry points."""
    folders = [Path(point.load()()) for point in entry_points(group=ENTRY_POINT_GROUP)]
    for entry in os.environ.get(PATH_VARIABLE, "").split(os.pathsep):
        if entry:
            root = Path(entry)
            folders += (
                [root] if (root / "manifest.json").exists() else sorted(p.parent for p in root.glob("*/manifest.json"))
            )
    return {package.arch: package for package in map(read_package, folders)}

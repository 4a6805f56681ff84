# SPDX-License-Identifier: Apache-2.0
"""The manifest of one architecture's kernel package: what each variant is, needs and contains."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from . import __version__
from .axes import PACKAGE, Variant
from .compile import BINARY_SUFFIX, Job, make_job, resolve
from .expand import Matrix
from .render import Source, render, sha256

SCHEMA = 1
SCHEMA_FILE = PACKAGE / "manifest.schema.json"


def package_folder(root: Path, vendor: str, arch: str) -> Path:
    """Where the kernel package of ``arch`` is generated below the repository root."""
    return root / "backends" / vendor / "generated" / arch


def variant_record(matrix: Matrix, variant: Variant, job: Job, source: Source, compiled: Path | None) -> dict[str, Any]:
    """The manifest entry of one variant; without ``compiled`` the entry has a source and no binary."""
    op, target = matrix.ops[variant.op], matrix.targets[variant.target]
    numbers = op.tuned(target.name, dict(variant.axes))
    record: dict[str, Any] = {
        "op": op.name,
        "role": op.role,
        "language": op.language,
        "preference": op.preference,
        "axes": dict(variant.axes),
        "arguments": [dict(arg) for arg in op.args],
        "constexprs": job.constexprs,
        "options": job.options,
        "launch": {name: resolve(text, variant, op, target, numbers) for name, text in op.launch.items()},
        "pdl": target.facts["pdl"] and "PDL" in op.constexprs,
        "warp_size": target.warp_size,
        "source": f"sources/{source.name}",
        "source_sha256": sha256(source.text.encode()),
        "toolchain": job.toolchain if compiled else {},
        "symbol": job.symbol,
        "num_warps": job.options["num_warps"],
        "shared_bytes": 0,
        "trailing_pointers": 0,
        "file": None,
        "sha256": None,
        "resources": {},
    }
    if compiled is not None:
        facts = json.loads((compiled / "facts.json").read_text())
        kind = BINARY_SUFFIX[target.vendor]
        record |= {
            "symbol": facts["symbol"],
            "num_warps": facts["num_warps"],
            "shared_bytes": facts["shared_bytes"],
            "trailing_pointers": facts["trailing_pointers"],
            "file": f"binaries/{variant.name}.{kind}",
            "sha256": sha256((compiled / f"kernel.{kind}").read_bytes()),
            "resources": facts["resources"],
        }
    return record


def cached_binaries(matrix: Matrix, cache: Path) -> dict[str, Path]:
    """Cache folders of the variants whose present definition was compiled before, by name."""
    folders = {variant.name: cache / make_job(matrix, variant).key() for variant in matrix.variants}
    return {name: folder for name, folder in folders.items() if (folder / "facts.json").exists()}


def ir_folder(root: Path) -> Path:
    """Where the LLVM IR of AMD binaries is kept for the tests that execute it, named by the binary's sha256.

    It is no part of a package: a code object holds no IR, and no wheel needs it.
    """
    return root / "build" / "ir"


def write_packages(matrix: Matrix, root: Path, compiled: dict[str, Path]) -> list[Path]:
    """Write every architecture's package: sources, the binaries in ``compiled`` (by variant name), and the manifest."""
    written = []
    shutil.rmtree(ir_folder(root), ignore_errors=True)
    for target in matrix.targets.values():
        folder = package_folder(root, target.vendor, target.name)
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "sources").mkdir(parents=True)
        (folder / "binaries").mkdir()
        records = {}
        for variant in (v for v in matrix.variants if v.target == target.name):
            source = render(matrix, variant)
            (folder / "sources" / source.name).write_text(source.text)
            record = variant_record(matrix, variant, make_job(matrix, variant), source, compiled.get(variant.name))
            if record["file"]:
                kind = BINARY_SUFFIX[target.vendor]
                shutil.copyfile(compiled[variant.name] / f"kernel.{kind}", folder / record["file"])
                ir = compiled[variant.name] / "kernel.llir"
                if ir.exists():
                    ir_folder(root).mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(ir, ir_folder(root) / f"{record['sha256']}.ll")
            records[variant.name] = record
        manifest = {
            "schema": SCHEMA,
            "version": __version__,
            "arch": target.name,
            "vendor": target.vendor,
            "limits": dict(target.limits),
            "defaults": dict(target.defaults),
            "variants": records,
        }
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
        written.append(folder)
    return written

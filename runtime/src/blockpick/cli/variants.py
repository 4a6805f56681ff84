# SPDX-License-Identifier: Apache-2.0
"""List the installed kernel variants with their resource figures."""

from __future__ import annotations

import argparse
import fnmatch
from typing import Any

from rich.table import Table

from ..manifest import InstalledVariant, KernelPackage, installed_packages
from .output import NO_KERNELS, open_console, size_text, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``blockpick variants``."""
    parser.add_argument(
        "pattern", nargs="*", metavar="PATTERN",
        help="show variants whose name or language holds every PATTERN: a part of it, or a glob for the whole of it",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """List; 1 when nothing is installed or nothing matches."""
    packages = [package for _, package in sorted(installed_packages().items())]
    shown = {p.arch: [v for v in p.variants if matches(v, args.pattern)] for p in packages}
    count, installed = sum(map(len, shown.values())), sum(len(p.variants) for p in packages)
    if args.json:
        write_json({
            "installed": installed, "shown": count,
            "variants": [describe_variant(v) for chosen in shown.values() for v in chosen],
        })  # fmt: skip
        return 0 if count else 1
    console = open_console()
    if not packages:
        console.print(NO_KERNELS, markup=False)
        return 1
    for package in packages:
        if shown[package.arch]:
            console.print(variant_table(package, shown[package.arch]))
    console.print("axes: rN rows of a segment, cN query columns (heads x query_len), kN topk", style="dim")
    console.print(
        f"{count} of {installed} installed variants" + (f" match {' '.join(args.pattern)}" if args.pattern else ""),
        markup=False,
    )
    return 0 if count else 1


def matches(variant: InstalledVariant, patterns: list[str]) -> bool:
    """Whether every pattern is part of the variant's name or language, or globs one of them."""
    fields = (variant.name, variant.language)
    return all(any(p in field or fnmatch.fnmatchcase(field, p) for field in fields) for p in patterns)


def describe_variant(variant: InstalledVariant) -> dict[str, Any]:
    """One variant for a program; sizes in bytes, ``binary_bytes`` None where the file is missing."""
    resources = variant.resources
    path = variant.folder / variant.record["file"]
    return {
        "name": variant.name, "op": variant.op, "role": variant.role, "arch": variant.arch, "vendor": variant.vendor,
        "language": variant.language, "preference": variant.preference, "axes": dict(variant.axes),
        "registers": resources.get("registers"), "spills": resources.get("spills"),
        "shared_bytes": variant.record["shared_bytes"], "matrix_instructions": dict(resources.get("mma", {})),
        "matrix_shapes": list(resources.get("mma_shapes", [])), "num_warps": variant.record["num_warps"],
        "binary_bytes": path.stat().st_size if path.is_file() else None, "binary": str(path),
    }  # fmt: skip


def axes_text(variant: InstalledVariant) -> str:
    """The axes as the variant's name writes them."""
    return variant.name.partition(f"__{variant.arch}")[2].strip("_") or "-"


def variant_table(package: KernelPackage, variants: list[InstalledVariant]) -> Table:
    """The variants of one package, for people."""
    table = Table(
        title=f"{package.arch} ({package.vendor}), version {package.version}, NVFP4 rounding {package.nvfp4_rounding}",
        title_justify="left", title_style="bold", header_style="dim", box=None, padding=(0, 1, 0, 0), expand=True,
    )  # fmt: skip
    table.add_column("op", no_wrap=True)
    table.add_column("axes", ratio=1, overflow="fold")
    table.add_column("language")
    for heading in ("regs", "spills", "shared"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("matrix instr.", overflow="fold")
    table.add_column("binary", justify="right", no_wrap=True)
    for variant in variants:
        facts = describe_variant(variant)
        spills = facts["spills"]
        table.add_row(
            variant.op, axes_text(variant), variant.language,
            str(facts["registers"] if facts["registers"] is not None else "-"),
            f"[bold red]{spills}[/]" if spills else str(spills if spills is not None else "-"),
            size_text(facts["shared_bytes"]),
            ", ".join(f"{n} {name.removeprefix('v_mfma_')}" for name, n in facts["matrix_instructions"].items()) or "-",
            size_text(facts["binary_bytes"]) if facts["binary_bytes"] is not None else "[red]missing[/]",
        )  # fmt: skip
    return table

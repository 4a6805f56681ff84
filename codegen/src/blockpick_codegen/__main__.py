# SPDX-License-Identifier: Apache-2.0
"""``python -m blockpick_codegen list | render | compile | check``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from pathlib import Path

import jsonschema
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .axes import DefinitionError, Variant
from .compile import compile_all, make_job
from .expand import Matrix, load_matrix
from .inspect import failed_gates
from .manifest import SCHEMA_FILE, cached_binaries, package_folder, write_packages
from .render import check_seal

console = Console(stderr=True)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="blockpick_codegen", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, help_text in (
        ("list", "print the variants"),
        ("render", "write all sources and manifests, with the binaries that the cache holds"),
        ("compile", "compile and write sources, binaries and manifests"),
        ("check", "verify what was written: schema, digests, seals, completeness"),
    ):
        command = commands.add_parser(name, help=help_text)
        if name != "render":
            command.add_argument("filters", nargs="*", help="substrings or globs of variant names")
        command.add_argument("--root", type=Path, default=Path.cwd(), help="repository root (default: here)")
        if name in ("render", "compile"):
            command.add_argument("--cache", type=Path, help="content-addressed cache (default: ROOT/build/cache)")
        if name == "compile":
            command.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")
        if name == "list":
            command.add_argument("--table", action="store_true", help="counts per op and architecture, as Markdown")
    args = parser.parse_args(argv)
    try:
        matrix = load_matrix()
        chosen = matrix.matching(getattr(args, "filters", ()))
        cache = getattr(args, "cache", None) or args.root / "build" / "cache"
        if args.command == "list":
            print(count_table(matrix) if args.table else "\n".join(str(variant) for variant in chosen))
            return 0
        if args.command == "render":
            folders = write_packages(matrix, args.root, cached_binaries(matrix, cache))
            console.print(f"rendered {len(matrix.variants)} variants into {len(folders)} packages")
            return 0
        if args.command == "compile":
            return compile_packages(matrix, chosen, args.root, cache, args.jobs)
        return check_packages(matrix, args.root, chosen)
    except DefinitionError as error:
        console.print(f"[red]{error}")
        return 2


def count_table(matrix: Matrix) -> str:
    """Variants per op and architecture as a Markdown table."""
    counts = Counter((v.op, v.target) for v in matrix.variants)
    archs = list(matrix.targets)
    lines = ["| op | " + " | ".join(archs) + " |", "|---" * (len(archs) + 1) + "|"]
    lines += [f"| {op} | " + " | ".join(str(counts[op, arch]) for arch in archs) + " |" for op in matrix.ops]
    totals = [sum(n for (_, a), n in counts.items() if a == arch) for arch in archs]
    return "\n".join([*lines, "| total | " + " | ".join(map(str, totals)) + " |"])


def compile_packages(matrix: Matrix, chosen: tuple[Variant, ...], root: Path, cache: Path, jobs: int) -> int:
    """Compile ``chosen``, refuse binaries that fail a gate, write all packages; prints resource figures on failure."""
    work = [make_job(matrix, variant) for variant in chosen]
    columns = (
        TextColumn("compile"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(work))
        compiled = {
            job.name: folder
            for job, folder in compile_all(
                work, cache, jobs, lambda job: progress.update(task, advance=1, description=job.name)
            )
        }
    failures = Table("variant", "gate failed")
    for variant in chosen:
        facts = json.loads((compiled[variant.name] / "facts.json").read_text())
        for reason in failed_gates(
            matrix.ops[variant.op],
            matrix.targets[variant.target],
            str(dict(variant.axes).get("numerics", "strict")),
            facts,
        ):
            failures.add_row(variant.name, reason)
    if failures.row_count:
        console.print(failures)
        return 1
    write_packages(matrix, root, cached_binaries(matrix, cache) | compiled)
    console.print(f"compiled {len(chosen)} of {len(matrix.variants)} variants; every gate passed")
    return 0


def check_packages(matrix: Matrix, root: Path, chosen: tuple[Variant, ...]) -> int:
    """Check the written packages of every architecture in ``chosen`` against schema, digests, seals and definitions."""
    from .render import sha256

    schema = json.loads(SCHEMA_FILE.read_text())
    problems = []
    for arch in sorted({variant.target for variant in chosen}):
        folder = package_folder(root, matrix.targets[arch].vendor, arch)
        if not (folder / "manifest.json").exists():
            problems.append(f"{arch}: no manifest; run `python -m blockpick_codegen compile`")
            continue
        manifest = json.loads((folder / "manifest.json").read_text())
        problems += [
            f"{arch}: {error.message}" for error in jsonschema.Draft202012Validator(schema).iter_errors(manifest)
        ]
        expected = {v.name for v in matrix.variants if v.target == arch}
        if set(manifest["variants"]) != expected:
            problems.append(f"{arch}: variants differ from the definitions: {set(manifest['variants']) ^ expected}")
        for name, record in manifest["variants"].items():
            for key, digest in (("file", "sha256"), ("source", "source_sha256")):
                if record[key] and sha256((folder / record[key]).read_bytes()) != record[digest]:
                    problems.append(f"{name}: {record[key]} differs from its digest")
        for source in sorted((folder / "sources").iterdir()):
            try:
                check_seal(source.read_text())
            except DefinitionError as error:
                problems.append(f"{arch}/{source.name}: {error}")
    for problem in problems:
        console.print(f"[red]{problem}")
    if not problems:
        console.print("packages are whole: schema, digests and seals agree")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

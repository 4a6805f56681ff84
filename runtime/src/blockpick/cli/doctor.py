# SPDX-License-Identifier: Apache-2.0
"""Show devices, installed packages, and the kernels that a MiniMax M3 configuration gets here, and why.

Without a GPU it shows what every installed architecture would get.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .. import __version__
from ..backend_api import BinaryLoader, DeviceInfo, SourceCompiler, SourceInterpreter
from ..config import IndexerConfig
from ..device import binary_loader, installed_backends, torch_vendor
from ..dispatch import Choice, pick_route
from ..errors import BlockpickError, KernelNotInstalledError
from ..layout import CACHE_DTYPES, PAGE_SIZES, CacheLayout
from ..manifest import KernelPackage, installed_packages
from ..ops.decode_pick import select_decode
from ..ops.insert import select_insert
from ..parallel.heads import RANKS
from ..policy import decide_cache
from .output import NO_KERNELS, open_console, write_json

M3_HEADS = {1: 4, 2: 2, 4: 1}  # tensor-parallel size -> index heads of a rank
M3_OPTIONS: dict[str, Any] = {"topk": 16, "init_blocks": 0, "local_blocks": 1, "order": "local_last"}


@dataclass(frozen=True)
class Served:
    """One M3 configuration on one architecture: the chosen kernels, or why there are none."""

    arch: str
    tp_size: int
    config: IndexerConfig
    choices: tuple[Choice, ...]
    problem: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``blockpick doctor``."""
    parser.add_argument("-v", "--verbose", action="store_true", help="show rejected alternatives with their reasons")
    parser.add_argument(
        "--query-len",
        type=int,
        choices=range(1, 9),
        default=1,
        metavar="N",
        help="queries of a request, 1..8; default 1",
    )


def run(args: argparse.Namespace) -> int:
    """Look and show; 1 when a GPU is present and not served."""
    devices, problems = find_devices()
    packages = installed_packages()
    served_archs = [device.arch for device in devices if device.arch in packages]
    archs = list(dict.fromkeys(served_archs)) if devices else sorted(packages)
    served = [entry for arch in archs for entry in serve_m3(packages[arch], args.query_len)]
    for device in devices:
        problems += device_problems(device, served)
    facts = {
        "blockpick": __version__, "python": platform.python_version(), "torch": describe_torch(),
        "devices": [asdict(device) for device in devices], "backends": describe_backends(),
        "packages": [describe_package(packages[arch]) for arch in sorted(packages)],
        "m3": [describe_served(entry) for entry in served],
        "shared_cache": describe_shared_caches(), "gpu_present": bool(devices) or torch.cuda.is_available(),
        "problems": problems, "verdict": verdict(devices, packages, problems),
    }  # fmt: skip
    if args.json:
        write_json(facts)
    else:
        report(open_console(), facts, served, args.verbose)
    return 1 if problems else 0


def find_devices() -> tuple[list[DeviceInfo], list[str]]:
    """All devices of all loaders, and what went wrong on the way."""
    devices: list[DeviceInfo] = []
    problems: list[str] = []
    for name, backend in installed_backends().items():
        if isinstance(backend, BinaryLoader):
            try:
                devices += backend.devices()
            except BlockpickError as error:
                problems.append(f"backend {name}: {error}")
    if torch.cuda.is_available() and binary_loader(torch_vendor()) is None:
        vendor = torch_vendor()
        problems.append(f"torch sees a GPU, but blockpick-{vendor} is not installed. Install blockpick-{vendor}.")
    elif torch.cuda.is_available() and not any(device.vendor == torch_vendor() for device in devices):
        problems.append(f"torch sees a GPU, but blockpick-{torch_vendor()} finds none through the driver.")
    return devices, problems


def device_problems(device: DeviceInfo, served: list[Served]) -> list[str]:
    """Why a present device is not served; empty when it is."""
    label = f"{device.vendor}:{device.index} {device.name} ({device.arch})"
    problems = []
    if not torch.cuda.is_available() or torch_vendor() != device.vendor:
        build = describe_torch()["build"]
        problems.append(
            f"{label}: torch {torch.__version__} ({build}) can't use it. Install a torch build for {device.vendor}."
        )
    try:
        pick_route(device, allow_jit=False)
    except BlockpickError as error:
        problems.append(f"{label}: {error}")
    problems += [f"{label}: {entry.problem}" for entry in served if entry.arch == device.arch and entry.problem]
    return problems


def serve_m3(package: KernelPackage, query_len: int) -> list[Served]:
    """What every M3 configuration gets from one package."""
    entries = []
    for dtype in CACHE_DTYPES:
        for tp_size, num_heads in M3_HEADS.items():
            for page_size in PAGE_SIZES:
                config = IndexerConfig(
                    CacheLayout(dtype, page_size), num_heads=num_heads, max_query_len=query_len, **M3_OPTIONS
                )
                try:
                    entries.append(Served(package.arch, tp_size, config, m3_choices(package, config), ""))
                except KernelNotInstalledError as error:
                    entries.append(Served(package.arch, tp_size, config, (), str(error)))
    return entries


def m3_choices(package: KernelPackage, config: IndexerConfig) -> tuple[Choice, ...]:
    """The release binaries that one configuration gets, insert first."""
    return select_insert(package, config.layout, "aot"), *select_decode(package, config, "aot").choices


# ---- facts ----


def describe_torch() -> dict[str, Any]:
    """Version and build of torch, and what it sees."""
    build = (
        f"ROCm {torch.version.hip}"
        if torch.version.hip
        else f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else "CPU"
    )
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {"version": torch.__version__, "build": build, "devices": seen}


def describe_backends() -> list[dict[str, Any]]:
    """Installed backends and what each can do."""
    found = []
    for name, backend in sorted(installed_backends().items()):
        kinds = (("load", BinaryLoader), ("compile", SourceCompiler), ("interpret", SourceInterpreter))
        distribution = type(backend).__module__.partition(".")[0].replace("_", "-")
        try:
            release = version(distribution)
        except PackageNotFoundError:
            release = "unknown"
        abilities = [ability for ability, kind in kinds if isinstance(backend, kind)]
        found.append({"name": name, "distribution": distribution, "version": release, "abilities": abilities})
    return found


def describe_package(package: KernelPackage) -> dict[str, Any]:
    """One kernel package."""
    return {
        "arch": package.arch, "vendor": package.vendor, "version": package.version, "variants": len(package.variants),
        "languages": sorted({variant.language for variant in package.variants}),
        "nvfp4_rounding": package.nvfp4_rounding, "folder": str(package.folder),
    }  # fmt: skip


def describe_served(entry: Served) -> dict[str, Any]:
    """One M3 configuration for a program, with rejected alternatives."""
    layout = entry.config.layout
    return {
        "arch": entry.arch, "tp_size": entry.tp_size, "num_heads": entry.config.num_heads,
        "page_size": layout.page_size, "cache_dtype": layout.dtype, "query_len": entry.config.max_query_len,
        **M3_OPTIONS, "served": not entry.problem,
        "problem": entry.problem or None,
        "kernels": [
            {
                "role": c.role, "variant": c.variant.name, "route": c.route, "reason": c.reason,
                "rejected": [{"variant": name, "reason": reason} for name, reason in c.rejected],
            }
            for c in entry.choices
        ],
    }  # fmt: skip


def describe_shared_caches() -> list[dict[str, Any]]:
    """How the ranks of a node can share the index cache or the work on it, by what an operator asks for."""
    entries = []
    for asked in ("indexer_decode_cp", "indexer_cache_sharding"):
        for tp_size in RANKS:
            for page_size in PAGE_SIZES:
                decisions = {
                    dtype: decide_cache(
                        indexer_kv_dtype=dtype, page_size=page_size, tp_size=tp_size,
                        indexer_cache_sharding=asked == "indexer_cache_sharding",
                        indexer_decode_cp=asked == "indexer_decode_cp",
                    )
                    for dtype in CACHE_DTYPES
                }  # fmt: skip
                first = next(iter(decisions.values()))
                entries.append({
                    "tp_size": tp_size, "asked": asked, "page_size": page_size, "parallel": first.parallel,
                    "reason": first.reason, "rows_of_a_page": first.layout.page_rows,
                    "bytes_per_token": {dtype: decision.bytes_per_token for dtype, decision in decisions.items()},
                })  # fmt: skip
    return entries


def verdict(devices: list[DeviceInfo], packages: dict[str, KernelPackage], problems: list[str]) -> str:
    """One sentence for the whole machine."""
    if problems:
        return f"Not served: {len(problems)} problem{'s' if len(problems) > 1 else ''}, each with its reason."
    if devices:
        return f"Served: every M3 configuration has its kernels on {', '.join(sorted({d.arch for d in devices}))}."
    if not packages:
        return f"No GPU here. {NO_KERNELS}"
    interpreter = any(isinstance(backend, SourceInterpreter) for backend in installed_backends().values())
    can = (
        "backend='interpreter' or 'reference'"
        if interpreter and importlib.util.find_spec("triton")
        else "backend='reference'"
    )
    return f"No GPU here, which is fine: this is what each installed arch would get. CPU tensors run with {can}."


# ---- for people ----


def report(console: Console, facts: dict[str, Any], served: list[Served], verbose: bool) -> None:
    """Versions, devices, packages, M3 table, problems, verdict."""
    build = facts["torch"]
    console.print(
        f"[bold]blockpick {facts['blockpick']}[/]  Python {facts['python']}, "
        f"torch {build['version']} ({build['build']} build)"
    )
    for device in facts["devices"]:
        memory = f"{device['memory_bytes'] / (1 << 30):.0f} GiB"
        console.print(
            f"[dim]device  [/] {device['vendor']}:{device['index']} {device['name']} ({device['arch']}), "
            f"{device['compute_units']} compute units, {memory}, driver {device['driver']}"
        )
    if not facts["devices"]:
        console.print("[dim]device  [/] none that an installed backend can see")
    for backend in facts["backends"]:
        can = ", ".join(
            {"load": "loads binaries"}.get(ability, f"{ability}s sources") for ability in backend["abilities"]
        )
        console.print(f"[dim]backend [/] {backend['distribution']} {backend['version']}: {can}")
    for package in facts["packages"]:
        console.print(
            f"[dim]kernels [/] {package['arch']:<7}{package['version']}, {package['variants']} variants "
            f"({', '.join(package['languages'])}), NVFP4 {package['nvfp4_rounding']}, [dim]{package['folder']}[/]",
            no_wrap=True, overflow="ellipsis",
        )  # fmt: skip
    if served:
        console.print(m3_table(served))
        console.print(shared_table(facts["shared_cache"]))
    if verbose:
        report_rejected(console, served)
    for problem in facts["problems"]:
        console.print(f"problem  {problem}", style="red", markup=False)
    console.print(facts["verdict"], style="bold red" if facts["problems"] else "bold green", markup=False)


def m3_table(served: list[Served]) -> Table:
    """M3 configurations that get the same kernels share a row."""
    first = served[0].config
    title = f"MiniMax M3: topk 16, local 1, order local_last, query_len 1..{first.max_query_len} (-v: all kernels)"
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None, padding=(0, 1))
    for heading in ("arch", "cache", "TP (heads)", "page", "decode_score", "select_blocks"):
        table.add_column(heading)
    rows: dict[tuple[str, str, tuple[str, str]], list[Served]] = {}
    for entry in served:
        kernels = short_names(entry, "decode_score"), short_names(entry, "select_blocks")
        rows.setdefault((entry.arch, entry.config.layout.dtype, kernels), []).append(entry)
    previous = ""
    for (arch, dtype, kernels), entries in rows.items():
        sizes = ", ".join(f"{tp} ({heads})" for tp, heads in M3_HEADS.items() if any(e.tp_size == tp for e in entries))
        pages = ", ".join(map(str, sorted({e.config.layout.page_size for e in entries})))
        table.add_row(arch if arch != previous else "", dtype, sizes, pages, *kernels)
        previous = arch
    return table


def shared_table(entries: list[dict[str, Any]]) -> Table:
    """Bytes that one rank stores for a token of context, by what is asked for."""
    table = Table(
        title="Index cache over the ranks of a node: bytes a token and layer on each rank", title_justify="left",
        title_style="bold", header_style="dim", box=None, padding=(0, 1),
    )  # fmt: skip
    for heading in ("asked for", "TP", "page", "rows of a page", *CACHE_DTYPES):
        table.add_column(heading)
    previous = ""
    for entry in entries:
        asked = entry["asked"] if entry["asked"] != previous else ""
        numbers = [str(entry["bytes_per_token"][dtype]) for dtype in CACHE_DTYPES]
        table.add_row(asked, str(entry["tp_size"]), str(entry["page_size"]), str(entry["rows_of_a_page"]), *numbers)
        previous = entry["asked"]
    return table


def short_names(entry: Served, role: str) -> str:
    """Language and axes of the variants that serve a role, or that none does."""
    variants = [choice.variant for choice in entry.choices if choice.role == role]
    return ", ".join(f"{v.name.rpartition('__')[2]} ({v.language})" for v in variants) or "[red]none[/]"


def report_rejected(console: Console, served: list[Served]) -> None:
    """Every rejected alternative once per chosen variant."""
    seen = set()
    for entry in served:
        for choice in entry.choices:
            if choice.variant.name not in seen:
                seen.add(choice.variant.name)
                console.print(f"{choice.variant.name}: {choice.reason}", markup=False)
                for name, reason in choice.rejected:
                    console.print(f"  not {name}: {reason}", style="dim", markup=False)

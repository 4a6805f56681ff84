# SPDX-License-Identifier: Apache-2.0
"""Registers, spills, shared memory and matrix instructions of a binary, and the gates it must pass."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from .axes import Op, Target

CUDA_MMA = re.compile(r"\b((?:HGMMA|QGMMA|IGMMA|HMMA|QMMA|IMMA|UTCHMMA|UTCQMMA|UTCOMMA)[.\w]*)")
ROCM_MMA = re.compile(r"\b(v_mfma_\w+)")


def inspect_binary(binary: Path, assembly: Path, symbol: str) -> dict[str, Any]:
    """Resource figures of one cubin or hsaco."""
    return _inspect_cubin(binary, symbol) if binary.suffix == ".cubin" else _inspect_hsaco(assembly)


def _package_file(package: str, name: str) -> str:
    """Path of the executable ``name`` that an installed package carries."""
    for file in importlib.metadata.files(package) or []:
        if file.name == name:
            return str(file.locate())
    raise RuntimeError(f"{package} carries no {name}")


def _inspect_cubin(binary: Path, symbol: str) -> dict[str, Any]:
    usage = subprocess.run(
        [_package_file("triton", "cuobjdump"), "--dump-resource-usage", str(binary)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    found = re.search(rf"Function {re.escape(symbol)}:\s*(.*)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump reports no function {symbol}: {usage}")
    numbers = {key: int(value) for key, value in re.findall(r"([A-Z]+)(?:\[\d+\])?:(\d+)", found[1])}
    sass = subprocess.run(
        [_package_file("nvidia-cuda-nvdisasm", "nvdisasm"), "-c", str(binary)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return {
        "registers": numbers["REG"],
        "stack_bytes": numbers["STACK"],
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        "static_shared_bytes": numbers.get("SHARED", 0),
        "mma": dict(sorted(Counter(m.split(".")[0] for m in CUDA_MMA.findall(sass)).items())),
        "mma_shapes": sorted(set(CUDA_MMA.findall(sass))),
    }


def _inspect_hsaco(assembly: Path) -> dict[str, Any]:
    text = assembly.read_text()

    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s*(\d+)", text)
        if found is None:
            raise RuntimeError(f"{assembly.name}: no .{key} in the code object's metadata")
        return int(found[1])

    shapes = Counter(ROCM_MMA.findall(text))
    return {
        "registers": number("vgpr_count"),
        "scalar_registers": number("sgpr_count"),
        "stack_bytes": number("private_segment_fixed_size"),
        "spills": number("vgpr_spill_count") + number("sgpr_spill_count"),
        "static_shared_bytes": number("group_segment_fixed_size"),
        "mma": dict(sorted(shapes.items())),
        "mma_shapes": sorted(shapes),
    }


def failed_gates(op: Op, target: Target, numerics: str, facts: dict[str, Any]) -> list[str]:
    """Every reason why a binary must not ship."""
    resources = facts["resources"]
    failures = []
    if resources["spills"]:
        failures.append(f"{resources['spills']} spills")
    if resources["stack_bytes"]:
        failures.append(f"{resources['stack_bytes']} bytes of stack")
    shared = max(facts["shared_bytes"], resources["static_shared_bytes"])
    if shared > target.limits["shared_bytes"]:
        failures.append(f"{shared} bytes of shared memory, {target.name} has {target.limits['shared_bytes']}")
    if resources["registers"] > target.limits["registers_per_thread"]:
        failures.append(
            f"{resources['registers']} registers, {target.name} has {target.limits['registers_per_thread']}"
        )
    shapes = resources["mma_shapes"]
    promised = target.fp8_instructions if numerics == "fp8" else target.mma_instructions
    others = [shape for shape in shapes if not shape.startswith(promised)]
    if op.matrix and (others or not shapes):
        failures.append(f"{', '.join(others) or 'no MMA'}, not {' or '.join(promised)}")
    if facts["global_scratch_bytes"]:
        failures.append(f"{facts['global_scratch_bytes']} bytes of global scratch, which no loader provides")
    return failures

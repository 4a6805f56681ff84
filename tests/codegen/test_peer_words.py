# SPDX-License-Identifier: Apache-2.0
"""Kernels that exchange words with other ranks, looked up in the compiled code of every target: scope of the words, what
happens before a kernel waits for its producer and after it releases its dependent, and room for all programs that wait.
"""

from __future__ import annotations

import json
import re
import subprocess

import pytest
from support import ROOT

from blockpick_codegen.compile import compile_job, make_job
from blockpick_codegen.expand import load_matrix
from blockpick_codegen.inspect import _package_file
from blockpick_codegen.manifest import package_folder

MATRIX = load_matrix()
PUSHES, POLLS = {"exchange_queries", "push_candidates"}, {"exchange_queries", "merge_ranks"}
VARIANTS = [v for v in MATRIX.variants if MATRIX.ops[v.op].role in PUSHES | POLLS]


def disassembly(variant) -> str:
    """The machine code of a CUDA variant."""
    folder = compile_job(make_job(MATRIX, variant), ROOT / "build" / "cache")
    command = [_package_file("nvidia-cuda-nvdisasm", "nvdisasm"), "-c", str(folder / "kernel.cubin")]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def accesses(variant) -> tuple[list[str], list[str]]:
    """Stores and loads of 8 bytes or more in system scope."""
    if MATRIX.targets[variant.target].vendor == "cuda":
        text = disassembly(variant)
        return (
            re.findall(r"\bSTG?\.E\.(?:64|128)\.STRONG\.SYS\b", text),
            re.findall(r"\bLDG?\.E\.64\.STRONG\.SYS\b", text),
        )
    text = (compile_job(make_job(MATRIX, variant), ROOT / "build" / "cache") / "kernel.asm").read_text()
    return (
        re.findall(r"(?:global|flat)_store_dwordx[24] .*\bsc0 sc1\b", text),
        re.findall(r"(?:global|flat)_load_dwordx2 .*\bsc0 sc1\b", text),
    )


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_words_are_stored_and_polled_in_system_scope(variant):
    role = MATRIX.ops[variant.op].role
    stores, loads = accesses(variant)
    assert bool(stores) == (role in PUSHES), stores
    assert bool(loads) == (role in POLLS), loads


def test_a_kernel_without_peers_has_none():
    for name in ("decode_plan__sm90", "decode_plan__gfx942"):
        (variant,) = [v for v in MATRIX.variants if v.name == name]
        assert accesses(variant) == ([], [])


# every kernel of the chain on every target that has programmatic dependent launch, and one of each other op on one
LAUNCHED_EARLY = [v for v in VARIANTS if MATRIX.targets[v.target].facts["pdl"]]
LAUNCHED_EARLY += {
    v.op: v
    for v in MATRIX.variants
    if v.target == "sm90" and MATRIX.ops[v.op].role not in PUSHES | POLLS and "PDL" in MATRIX.ops[v.op].constexprs
}.values()
MEMORY = re.compile(
    r"\b(?:U?LDG|STG|LD|ST|LDGSTS|ATOMG?|REDG?|UTMA\w+|UBLKCP)\.?[\w.]* .*desc\[|\b(?:UTMALDG|UBLKCP|ATOMG|REDG)\b"
)


@pytest.mark.parametrize("variant", LAUNCHED_EARLY, ids=str)
def test_case_21_nothing_before_the_wait_and_nothing_after_the_release(variant):
    """A kernel touches global memory only after the kernels before it have ended (ACQBULK), and lets the next one start
    (PREEXIT) when it has nothing left to wait for, read or write.
    """
    code = [line for line in disassembly(variant).splitlines() if re.search(r"/\*[0-9a-f]{4,}\*/", line)]
    (wait,) = [number for number, line in enumerate(code) if "ACQBULK" in line]
    touching = [number for number, line in enumerate(code) if MEMORY.search(line)]
    assert touching and min(touching) > wait
    releases = [number for number, line in enumerate(code) if "PREEXIT" in line]
    assert len(releases) <= 1
    for release in releases:
        assert "EXIT" in code[release + 1] and max(touching) < release


# per compute unit: registers of all threads, bytes of shared memory
ROOM = {"cuda": (65536, 228 * 1024), "rocm": (4 * 512 * 64, 64 * 1024)}


@pytest.mark.parametrize("variant", [v for v in VARIANTS if MATRIX.ops[v.op].role in POLLS], ids=str)
def test_all_programs_that_wait_run_at_once(variant):
    """The grid is as many programs per compute unit as the launch facts say (one, of the exchange): all have room."""
    vendor = MATRIX.targets[variant.target].vendor
    folder = package_folder(ROOT, vendor, variant.target)
    record = json.loads((folder / "manifest.json").read_text())["variants"][str(variant)]
    programs = record["launch"].get("programs_per_cu", 1)
    threads = record["num_warps"] * record["warp_size"]
    shared = record["shared_bytes"] + record["resources"]["static_shared_bytes"]
    granule = 8  # of registers, in which they are handed out
    registers = -(-record["resources"]["registers"] // granule) * granule
    assert programs * threads * registers <= ROOM[vendor][0]
    assert programs * (shared + 1024) <= ROOM[vendor][1] and programs * threads <= 2048

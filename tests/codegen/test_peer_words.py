# SPDX-License-Identifier: Apache-2.0
"""Words that ranks exchange are stored and polled in system scope: looked up in the compiled code of every target."""

from __future__ import annotations

import re
import subprocess

import pytest
from support import ROOT

from blockpick_codegen.compile import compile_job, make_job
from blockpick_codegen.expand import load_matrix
from blockpick_codegen.inspect import _package_file

MATRIX = load_matrix()
PUSHES, POLLS = {"exchange_queries", "push_candidates"}, {"exchange_queries", "merge_ranks"}
VARIANTS = [v for v in MATRIX.variants if MATRIX.ops[v.op].role in PUSHES | POLLS]


def accesses(variant) -> tuple[list[str], list[str]]:
    """Stores and loads of 8 bytes or more in system scope."""
    folder = compile_job(make_job(MATRIX, variant), ROOT / "build" / "cache")
    if MATRIX.targets[variant.target].vendor == "cuda":
        tool = _package_file("nvidia-cuda-nvdisasm", "nvdisasm")
        command = [tool, "-c", str(folder / "kernel.cubin")]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return (
            re.findall(r"\bSTG?\.E\.(?:64|128)\.STRONG\.SYS\b", text),
            re.findall(r"\bLDG?\.E\.64\.STRONG\.SYS\b", text),
        )
    text = (folder / "kernel.asm").read_text()
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

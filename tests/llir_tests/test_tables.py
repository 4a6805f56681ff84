# SPDX-License-Identifier: Apache-2.0
"""The interpreter's tables hold nothing that no test of this folder names: an entry comes with its test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from llir.instructions import BUILDERS, UPDATES
from llir.intrinsics import ASSEMBLER, TABLE

TESTS = "\n".join(
    path.read_text() for path in Path(__file__).parent.glob("test_*.py") if path.name not in (Path(__file__).name, "test_mutations.py")
)  # fmt: skip


OVERLOAD = r"(\.(v\d+)?(i|f|bf|p)\d+)+$"
CALLS = {re.sub(OVERLOAD, "", name) for name in re.findall(r"@llvm\.([\w.{}]*[\w}])", TESTS)}
PATTERNS = [re.compile(re.sub(r"\\\{\w+\\\}", r"\\w+", re.escape(name))) for name in CALLS if re.search(r"\w\.", name)]


@pytest.mark.parametrize("name", sorted(TABLE))
def test_every_intrinsic_is_called_by_a_test(name: str) -> None:
    """By its name in a call, where what a test fills in stands for any word; or listed for a test that calls each."""
    called = name in CALLS or any(pattern.match(name) for pattern in PATTERNS)
    assert called or f'"{name.removeprefix("amdgcn.")}"' in TESTS, f"{name} has no test"


@pytest.mark.parametrize("text", sorted(ASSEMBLER))
def test_every_assembly_is_written_by_a_test(text: str) -> None:
    lines = text.rpartition(" ")[0].split("; ")
    assert re.search(r".*".join(re.escape(line) for line in lines), TESTS), f"{text} has no test"


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_every_instruction_is_named_by_a_test(name: str) -> None:
    written = rf"= (tail )?{name} |\b{name} (<|i\d|float|half|ptr|void|\{{|label)|[\"']{name}[\"']|^ *{name}\b.*, align"
    assert re.search(written, TESTS, re.M), f"{name} has no test"


@pytest.mark.parametrize("name", sorted(UPDATES))
def test_every_atomic_is_named_by_a_test(name: str) -> None:
    assert re.search(rf"atomicrmw {name}\b|\"{name}\"", TESTS), f"atomicrmw {name} has no test"

# SPDX-License-Identifier: Apache-2.0
"""Habits that a machine can check: licence headers, file sizes, pins."""

from __future__ import annotations

import re
import subprocess

from support import ROOT


def tracked():
    """Files in the repository; all below the root where git is not there."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split(
        "\n"
    )
    return [ROOT / name for name in listed if name and (ROOT / name).is_file()]


def test_every_python_file_carries_its_licence():
    for path in tracked():
        if path.suffix == ".py" and "golden" not in path.parts:
            assert path.read_text().startswith("# SPDX-License-Identifier: Apache-2.0\n"), path


def test_no_large_or_generated_files():
    for path in tracked():
        assert path.stat().st_size <= 500_000, path
        assert path.suffix not in {".cubin", ".hsaco", ".so", ".whl"}, path
        assert "generated" not in path.parts, path


def test_every_requirement_of_the_sessions_is_pinned():
    """Names in noxfile.py and in the distributions' dependencies have one exact version in constraints.txt."""
    pinned = set(re.findall(r"^([\w-]+)==[\w.]+$", (ROOT / "constraints.txt").read_text(), re.M))
    wanted = set()
    for path in ROOT.glob("*/pyproject.toml"):
        wanted |= set(
            re.findall(r'"([\w-]+)(?:[><=].*?)?"', path.read_text().split("dependencies = [")[1].split("]")[0])
        )
    for path in ROOT.glob("backends/*/pyproject.toml"):
        wanted |= set(
            re.findall(r'"([\w-]+)(?:[><=].*?)?"', path.read_text().split("dependencies = [")[1].split("]")[0])
        )
    wanted = {name for name in wanted if not name.startswith("blockpick") and name != "torch"}
    assert wanted <= pinned, wanted - pinned

# SPDX-License-Identifier: Apache-2.0
"""The stand-in for AMD's HIP runtime, through hip-python and ctypes; every scenario runs in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
DEVICES = {"no_devices": "", "devices": "gfx942,gfx950:8", "loader": "gfx942,gfx950"}
SCENARIOS = {
    "device": ("peers", "streams", "null_stream", "events", "mutual", "threads", "modules", "launches", "sticky",
               "interpreters", *DEVICES),
    "memory": ("memory", "registered", "virtual_memory", "ipc", "ipc_refused", "shared_fd", "leaks"),
}  # fmt: skip


@pytest.fixture(scope="session")
def rocm_path(tmp_path_factory):
    from hip_standin.build import build

    base = tmp_path_factory.getbasetemp()
    return build((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "hip-standin")


@pytest.mark.requires(tool="cc")
@pytest.mark.parametrize("group,name", [(group, name) for group, names in SCENARIOS.items() for name in names])
def test_scenario(group, name, rocm_path):
    names = DEVICES.get(name, "gfx942,gfx942")
    environment = {**os.environ, "ROCM_PATH": str(rocm_path), "BLOCKPICK_STANDIN_DEVICES": names,
                   "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}  # fmt: skip
    command = [sys.executable, "-m", f"hip_standin.{group}_scenarios", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.requires(tool="cc")
def test_builds_at_once_make_one_library(tmp_path):
    program = "import sys; from pathlib import Path; from build import build; print(build(Path(sys.argv[1])))"
    command = [sys.executable, "-c", program, str(tmp_path)]
    runs = [subprocess.Popen(command, cwd=TESTS / "hip_standin", stdout=subprocess.PIPE, text=True) for _ in "12"]
    (path,) = {run.communicate()[0].strip() for run in runs}
    assert list(tmp_path.iterdir()) == [Path(path)]
    assert [file.name for file in Path(path).rglob("*.so")] == ["libamdhip64.so"]


@pytest.mark.requires(tool="cc")
def test_failed_build_shows_the_compiler_output(tmp_path, monkeypatch):
    from hip_standin import build

    monkeypatch.setattr(build, "COMMAND", (*build.COMMAND, "-DhipInit=1"))
    with pytest.raises(RuntimeError, match=r"(?s)failed with status 1.*hipInit"):
        build.build(tmp_path)
    monkeypatch.setattr(build, "COMMAND", ("no-such-compiler",))
    with pytest.raises(RuntimeError, match="no-such-compiler is not on PATH"):
        build.build(tmp_path)
    assert list(tmp_path.iterdir()) == []

# SPDX-License-Identifier: Apache-2.0
"""Memory that processes share through HIP, over the stand-in; every scenario runs in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SCENARIOS = ("allocation", "current_device", "opened_twice", "bad_handles", "beside_a_kernel", "host_word")


@pytest.fixture(scope="module")
def rocm_path(tmp_path_factory):
    from hip_standin.build import build

    base = tmp_path_factory.getbasetemp()
    return build((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "hip-standin")


@pytest.mark.requires(tool="cc")
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name, rocm_path):
    environment = {**os.environ, "ROCM_PATH": str(rocm_path), "BLOCKPICK_STANDIN_DEVICES": "gfx942,gfx942",
                   "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}  # fmt: skip
    command = [sys.executable, "-m", "backends.rocm_peer_scenarios", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Exception ignored" not in done.stderr

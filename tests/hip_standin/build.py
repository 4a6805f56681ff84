# SPDX-License-Identifier: Apache-2.0
"""Build the stand-in for AMD's HIP runtime with the system C compiler."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent
COMMAND = ("cc", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread")


def build(folder: Path) -> Path:
    """Compile ``lib/libamdhip64.so`` below ``folder``, in a folder named after its sources and flags.

    Returns that folder, the value for ``ROCM_PATH``; at once if it is there already. Several processes may build at
    the same time: the folder appears whole or not at all.

    Raises
    ------
    RuntimeError
        When there is no compiler, or it fails; with its output.
    """
    files = sorted(path for path in SOURCES.iterdir() if path.suffix in (".c", ".h"))
    digest = hashlib.sha256("\0".join(COMMAND).encode())
    for path in files:
        digest.update(b"\0" + path.name.encode() + b"\0" + path.read_bytes())
    target = folder / digest.hexdigest()
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix="building-", dir=folder))
    try:
        _compile([path for path in files if path.suffix == ".c"], made / "lib" / "libamdhip64.so")
        made.chmod(0o755)
        os.rename(made, target)
    except OSError:
        if not target.exists():  # else another process was faster
            raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target


def _compile(sources: list[Path], library: Path) -> None:
    library.parent.mkdir()
    command = [*COMMAND, "-o", str(library), *map(str, sources)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise RuntimeError(f"no C compiler to build the HIP stand-in with: {COMMAND[0]} is not on PATH") from error
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed with status {done.returncode}:\n{done.stdout}{done.stderr}")

# SPDX-License-Identifier: Apache-2.0
"""What the commands share: output for people and for programs, and the sentence for a machine without kernels."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console

PLAIN_WIDTH = 100  # columns when stdout is not a terminal
NO_KERNELS = (
    "No kernel packages are installed. Install blockpick-kernels-<arch>, or in a checkout run `nox -s codegen build` "
    "and set BLOCKPICK_KERNEL_PATH to backends/cuda/generated:backends/rocm/generated."
)


def open_console() -> Console:
    """A console on stdout, as wide as the terminal or :data:`PLAIN_WIDTH`."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    return console


def write_json(data: dict[str, Any]) -> None:
    """Write ``data`` to stdout for a program."""
    json.dump(data, sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")


def size_text(size_bytes: int) -> str:
    """``size_bytes`` for people: B, KiB or MiB."""
    if size_bytes < 1 << 10:
        return f"{size_bytes} B"
    return f"{size_bytes / (1 << 10):.1f} KiB" if size_bytes < 1 << 20 else f"{size_bytes / (1 << 20):.1f} MiB"

# SPDX-License-Identifier: Apache-2.0
"""``python bench [--json FILE] [--filter TEXT]``: measured rows of decode, prefill, insert, host cost, on this GPU."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import torch
from agreement_rows import agreement_rows
from context_rows import context_rows
from measure import ceilings
from prefill_rows import prefill_rows
from rows import decode_rows, host_rows, insert_rows

import blockpick
from blockpick.device import describe

HERE = Path(__file__).parent


def header(measured: dict[str, float]) -> dict[str, Any]:
    """The conditions of a run."""
    info = describe(torch.device("cuda:0"))
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True).stdout
    return {
        "gpu": info.name, "arch": info.arch, "driver": info.driver, "torch": torch.__version__,
        "blockpick": blockpick.__version__, "commit": commit.strip() or "unknown",
        "timer": "graph replay, median of 11", "l2": "cold: pages rotate over a pool of several times the L2",
        "ceilings": measured,
    }  # fmt: skip


def main() -> int:
    """Print one aligned line a row; with ``--json`` also write header and rows."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--json", type=Path, help="write header and rows to this file")
    parser.add_argument("--filter", default="", help="only rows whose name contains this")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench: needs a GPU; this machine has none", file=sys.stderr)
        return 2
    cases = tomllib.loads((HERE / "cases.toml").read_text())
    head = header(ceilings())
    for key, value in head.items():
        print(f"# {key}: {value}")
    rows = []
    for generate in (decode_rows, prefill_rows, context_rows, agreement_rows, insert_rows, host_rows):
        for row in generate(cases, args.filter, head["ceilings"]):
            rows.append(row)
            print(row["line"], flush=True)
    if args.json:
        args.json.write_text(json.dumps({"header": head, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""The command line: ``blockpick demo | doctor | variants``. Importing :mod:`blockpick` does not import this."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import blockpick

from ..errors import BlockpickError
from . import demo, doctor, variants

COMMANDS = {"demo": demo, "doctor": doctor, "variants": variants}
EXIT_CODES = (
    "Exit code: 0 all is well, 1 the answer is no (the command says what), 2 it could not run (the message says why)."
)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; every command sets ``run``."""
    parser = argparse.ArgumentParser(
        prog="blockpick", description="The block indexer of MiniMax M3's sparse attention.", epilog=EXIT_CODES
    )
    parser.add_argument("--version", action="version", version=f"blockpick {blockpick.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        summary = (module.__doc__ or "").partition("\n")[0]
        command = commands.add_parser(name, help=summary, description=module.__doc__, epilog=EXIT_CODES)
        command.add_argument("--json", action="store_true", help="write one JSON object to stdout")
        module.add_arguments(command)
        command.set_defaults(run=module.run, command=command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments; those of the process if None.

    Returns
    -------
    int
        The exit code: 0 all is well, 1 the answer is no, 2 it could not run.

    Raises
    ------
    SystemExit
        With code 2 when argparse refuses the arguments.
    """
    args = build_parser().parse_args(argv)
    command: argparse.ArgumentParser = args.command
    try:
        return int(args.run(args))
    except argparse.ArgumentError as error:  # an argument that only the command could judge
        command.error(str(error))
    except BlockpickError as error:
        sys.stderr.write(f"{command.prog}: {error}\n")
        return 2

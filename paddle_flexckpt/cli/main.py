"""The command line: each module of this package adds commands. Tested in tests/cli/test_cli.py."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from paddle_flexckpt._version import __version__
from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.cli import checkpoints, patch, rehearse, statements
from paddle_flexckpt.cli.arguments import Outcome
from paddle_flexckpt.patching import PatchError

_COMMANDS = (checkpoints, rehearse, statements, patch)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(prog="flexckpt", description="Inspect and transform flexible checkpoints.")
    parser.add_argument("--version", action="version", version=f"flexckpt {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_command(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: The command line without the program's name; by default the process's own.

    Returns:
        0, or 1 with a message on stderr where the command failed, or where what it looked at is not sound. Wrong usage
        exits with 2, as argparse does.
    """
    options = build_parser().parse_args(arguments)
    try:
        result = options.run(options)
        outcome = result if isinstance(result, Outcome) else Outcome(result)
        print(outcome.text)
    except BrokenPipeError:
        # The reader has seen enough (`flexckpt explain ... | head`).
        sys.stderr.close()
        return 0
    except (CheckpointError, PatchError, OSError) as error:
        print(f"flexckpt {options.command}: {error}", file=sys.stderr)
        return 1
    return outcome.code

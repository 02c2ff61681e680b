"""The command line: each module of this package adds commands. Tested in tests/cli/test_cli.py."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from paddle_flexckpt._version import __version__

# Only the given command's module is imported: `flexckpt --version` needs no numpy.
_COMMANDS = {
    "checkpoints": ("inspect", "show", "digest", "diff", "verify", "repair", "export"),
    "convert": ("convert",),
    "overview": ("ls", "du"),
    "doctor": ("doctor",),
    "rehearse": ("rehearse",),
    "map": ("map",),
    "bench": ("bench",),
    "aoa": ("explain", "expand", "invert", "rules"),
    "patch": ("patch",),
    "completion": ("completion",),
}


def build_parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of all commands, or of the command in ``words``.

    Args:
        words: The command line without the program's name.
    """
    parser = argparse.ArgumentParser(
        prog="flexckpt",
        description="Inspect and transform flexible checkpoints.",
        epilog="exit status: 0 on success; 1 if the command failed, or found a problem or a difference; 2 for wrong "
        "usage; 130 after Ctrl-C. Example: flexckpt inspect run/step_00000100",
    )
    parser.add_argument("--version", action="version", version=f"flexckpt {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = [module for module, names in _COMMANDS.items() if words and words[0] in names]
    for module in () if list(words) == ["--version"] else chosen or _COMMANDS:
        importlib.import_module(f"paddle_flexckpt.cli.{module}").add_command(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: The command line without the program's name; by default the process's own.

    Returns:
        0, or 1 with a message on stderr if the command failed or found a problem; 130 after Ctrl-C. Wrong usage exits
        with 2, as argparse does.
    """
    words = sys.argv[1:] if arguments is None else arguments
    options = build_parser(words).parse_args(words)
    from paddle_flexckpt.catalog import CheckpointError
    from paddle_flexckpt.catalog.texts import printable_lines
    from paddle_flexckpt.cli.common import Outcome

    try:
        result = options.run(options)
        outcome = result if isinstance(result, Outcome) else Outcome(result)
        print(printable_lines(outcome.text))
    except BrokenPipeError:
        # The reader closed the pipe (`flexckpt explain ... | head`).
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        print(f"flexckpt {options.command}: interrupted", file=sys.stderr)
        return 130  # 128 + SIGINT, as shells have it
    except (CheckpointError, OSError, *getattr(options, "errors", ())) as error:
        print(printable_lines(f"flexckpt {options.command}: {error}"), file=sys.stderr)
        return 1
    return outcome.code

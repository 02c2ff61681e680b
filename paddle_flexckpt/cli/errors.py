"""The text of a command's error, which ends with the command that helps, and its page.

Tested in tests/cli/test_errors.py.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from paddle_flexckpt.catalog import AoaError, CheckpointError, CorruptCheckpointError, Problem, ValidationError
from paddle_flexckpt.catalog.texts import printable_lines
from paddle_flexckpt.cli.common import COMMAND, aoa_config, quoted, write_page
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.planning import meshes, strategy
from paddle_flexckpt.planning.strategy import Strategy, near_strategies
from paddle_flexckpt.tools.models import read_strategy

# Arguments that are checkpoints, and the options with their ids.
_CHECKPOINTS = {"source": "unique_id", "first": "first_id", "second": "second_id", "root": ""}
# The beginnings of errors about the text of a strategy: wrong usage, and their keys are no tensors.
_STRATEGY = (strategy.CONTEXT, meshes.CONTEXT)


def report(options: argparse.Namespace, error: Exception, words: Sequence[str]) -> int:
    """Print a command's error on standard error, and write its page if the command was to write one.

    Args:
        options: The command's arguments.
        error: Its error.
        words: The command line.

    Returns:
        The exit status: 2 for wrong usage, and otherwise 1.
    """
    status = 2 if str(error).startswith(_STRATEGY) else 1
    advice = advise(options, error)
    head = f"flexckpt {options.command}: "
    print(printable_lines(f"{head}{error}" + (f"\nsee `{advice}`" if advice else "")), file=sys.stderr)
    path = getattr(options, "html", None)
    if path is None:
        return status
    from paddle_flexckpt.pages.report_pages import refusal_page

    try:
        near = [(str(each), each.ranks, _line(words, str(each))) for each in _near(options, error)]
        content = refusal_page(options.command, error, advice, _line(words), near)
        print(head + write_page(path, content), file=sys.stderr)
    except ValidationError as second:
        if str(second) != str(error):
            print(printable_lines(f"{head}{second}"), file=sys.stderr)
    return status


def _near(options: argparse.Namespace, error: Exception) -> list[Strategy]:
    """Return strategies near the job's that the model can have, where the job's is one that it cannot have."""
    if not isinstance(error, ValidationError) or getattr(options, "to", None) is None or options.aoa == "-":
        return []

    from paddle_flexckpt.cli.rehearse import layout_from

    def fits(text: str) -> bool:
        try:
            layout_from(argparse.Namespace(**{**vars(options), "to": text}), aoa_config(options.aoa))
        except CheckpointError:
            return False
        return True

    try:
        asked = read_strategy(options.to)
    except ValidationError:
        return []
    if not isinstance(asked, Strategy) or fits(options.to):
        return []
    return near_strategies(asked, lambda each: fits(str(each)))


def _line(words: Sequence[str], strategy: str = "") -> str:
    """Return a command line, with another strategy if one is given."""
    found = list(words)
    for place, word in enumerate(found):
        if strategy and word.startswith("--to="):
            found[place] = f"--to={strategy}"
        elif strategy and place and found[place - 1] == "--to":
            found[place] = strategy
    return " ".join(["flexckpt", *map(quoted, found)])


def advise(options: argparse.Namespace, error: Exception) -> str:
    """Return the command that helps; empty where none does, or where the text names one."""
    if COMMAND.search(str(error)) or isinstance(error, OSError):
        return ""
    if str(error).startswith(_STRATEGY):
        return f"flexckpt {options.command} --help"
    if options.command == "patch":
        return "flexckpt patch --check"
    found = [(getattr(options, name, None), getattr(options, its_id, None)) for name, its_id in _CHECKPOINTS.items()]
    places = [(path, unique_id) for path, unique_id in found if path is not None]
    if isinstance(error, CorruptCheckpointError) and options.command != "verify":
        named = next((path for path, _ in places if path in str(error)), places[0][0] if places else None)
        return f"flexckpt verify {quoted(named)}" if named else ""
    if not isinstance(error, ValidationError):
        return ""
    above = next((_above(path) for path, unique_id in places if not _is_checkpoint(path, unique_id)), None)
    if above and above != getattr(options, "root", None):
        return f"flexckpt ls {quoted(above)}"
    about_keys = isinstance(error, AoaError) or any(isinstance(each, Problem) and each.key for each in error.problems)
    if places and about_keys:
        return f"flexckpt inspect {quoted(places[0][0])}"
    return f"flexckpt {options.command} --help"


def _is_checkpoint(path: str, unique_id: int | None) -> bool:
    """Return whether a local path is a checkpoint, with this id if one is given; true of URLs, which are not asked."""
    if "://" in path:
        return True
    try:
        directory = SourceDirectory(path)
        ids = directory.list_ids()
        return unique_id in ids if ids and unique_id is not None else bool(directory.origin())
    except ValidationError:
        return False
    except (CheckpointError, OSError):
        return True


def _above(path: str) -> str:
    """Return the directory itself, or the nearest one above that is there; empty if that is the root of all."""
    found = path
    while found and not os.path.isdir(found):
        found = os.path.dirname(found)
    return "" if found == os.sep else found or os.curdir

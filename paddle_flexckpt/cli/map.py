"""flexckpt map: the ranks that have, or would need, each part of each tensor. Tested in tests/cli/test_map.py."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from paddle_flexckpt.catalog import Problem, ValidationError
from paddle_flexckpt.catalog.texts import format_bytes, format_ranks, printable
from paddle_flexckpt.cli.common import add_checkpoint, add_html, aoa_config, table, written
from paddle_flexckpt.cli.rehearse import add_layout, layout_from
from paddle_flexckpt.pages.holder_pages import holders_page
from paddle_flexckpt.pages.pictures import holders_picture
from paddle_flexckpt.tools.holders import HoldersReport, Part, find_holders

# The most ranges of ranks, and files, in one line of the text; all are in the JSON.
_RANGES = 4


def add_command(commands: Any) -> None:
    """Add the parser of the command."""
    parser = commands.add_parser(
        "map",
        help="list the ranks that have each part of a tensor, and those that would need it under another layout",
        description="Lists the rank and file of each part of each tensor, and with --to also the ranks of another job "
        "that would need it. Only the manifest is read.",
        epilog="example: flexckpt map run/step_100 'layers.0.*' --to tp=4,pp=2",
    )
    add_checkpoint(parser)
    parser.add_argument("keys", metavar="KEY", nargs="*", help="a key, or a pattern with *; by default all keys")
    add_layout(parser, required=False)
    parser.add_argument("--json", action="store_true", help="print all as JSON")
    add_html(parser)
    parser.add_argument("--png", metavar="FILE", help="draw a picture too (needs the extra viz)")
    parser.add_argument(
        "--report",
        metavar="FILE",
        help="for --html and --png, seconds by rank: the report of a save as JSON, or a list of those of all ranks",
    )
    parser.set_defaults(run=_map)


def _map(options: argparse.Namespace) -> str:
    """Return a line for each part of each tensor, and a summary."""
    for name in ("aoa", "model", "cut", "weights"):
        if getattr(options, name) and options.to is None:
            raise ValidationError([f"--{name} describes the job that --to names. Remedy: give --to STRATEGY"])
    if options.report is not None and options.html is None and options.png is None:
        raise ValidationError(["--report is for a page or a picture. Remedy: give --html FILE or --png FILE"])
    seconds = seconds_of(options.report) if options.report is not None else {}
    config = None if options.aoa is None else aoa_config(options.aoa)
    layout, notes = (None, []) if options.to is None else layout_from(options, config)
    report = find_holders(options.source, options.keys, unique_id=options.unique_id, layout=layout, notes=notes)
    lines = [*_lines(report), *(f"note: {note}" for note in report.notes), report.summary()]
    if options.html is not None:
        lines.append(written(options.html, holders_page(report, seconds)))
    if options.png is not None:
        holders_picture(report, options.png, seconds)
        lines.append(f"wrote {options.png}")
    return report.to_json() if options.json else "\n".join(lines)


def seconds_of(path: str) -> dict[str, list[float]]:
    """Return seconds by phase and rank from the report of a save, or from the reports of all ranks.

    Raises:
        ValidationError: The file holds neither.
    """
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        if isinstance(found, list):
            phases = dict.fromkeys(name for each in found for name in each["seconds"])
            return {name: [float(each["seconds"].get(name, 0)) for each in found] for name in phases}
        return {str(name): [float(each) for each in values] for name, values in found["rank_seconds"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        expected = "a SaveReport as JSON, or a list of the reports of all ranks"
        problem = Problem("this is no report with seconds", file=path, expected=expected, got=repr(error))
        raise ValidationError([problem]) from error


def _lines(report: HoldersReport) -> list[str]:
    lines = []
    for key, tensor in report.tensors.items():
        lines.append(f"{printable(key)}: {tensor.dtype} {tensor.shape}")
        rows = [_columns("stored", part) for part in tensor.stored]
        rows += [_columns("needed", part) for part in tensor.needed]
        lines += [f"  {line}" for line in table(rows, right=(3,))]
    return lines


def _columns(what: str, part: Part) -> Sequence[str]:
    ranks = ("rank " if len(part.ranks) == 1 else "ranks ") + format_ranks(part.ranks, _RANGES)
    files = ", ".join(part.files[:_RANGES]) + (" ..." if len(part.files) > _RANGES else "")
    return what, part.where(), ranks, format_bytes(part.bytes), files

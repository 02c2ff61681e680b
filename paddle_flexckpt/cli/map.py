"""flexckpt map: which rank has which part of each tensor, and which would need it. Tested in tests/cli/test_map.py."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.cli.arguments import add_checkpoint, aoa_config, table
from paddle_flexckpt.cli.rehearse import add_layout, layout_from
from paddle_flexckpt.engine.holders import HoldersReport, Part, find_holders
from paddle_flexckpt.report import format_bytes, format_ranks

# Ranges of ranks, and files, in one line of the text; all are in the JSON.
_RANGES = 4


def add_command(commands: Any) -> None:
    """Add the parser of the command."""
    parser = commands.add_parser(
        "map",
        help="say which rank has which part of each tensor, and which would need it under another layout",
        description="Says which rank and file has which part of each tensor, and with --to also which rank of another "
        "job would need which. Only the manifest is read.",
        epilog="example: flexckpt map run/step_100 'layers.0.*' --to tp=4,pp=2",
    )
    add_checkpoint(parser)
    parser.add_argument("keys", metavar="KEY", nargs="*", help="a key, or a pattern with *; by default all keys")
    add_layout(parser, required=False)
    parser.add_argument("--json", action="store_true", help="print all as JSON")
    parser.set_defaults(run=_map)


def _map(options: argparse.Namespace) -> str:
    """Return for each tensor a line for each part, and one line for all."""
    for name in ("aoa", "model", "cut", "weights"):
        if getattr(options, name) and options.to is None:
            raise ValidationError([f"--{name} describes the job that --to names. Remedy: give --to STRATEGY"])
    config = None if options.aoa is None else aoa_config(options.aoa)
    layout, notes = (None, []) if options.to is None else layout_from(options, config)
    report = find_holders(options.source, options.keys, unique_id=options.unique_id, layout=layout, notes=notes)
    if options.json:
        return report.to_json()
    return "\n".join([*_lines(report), *(f"note: {note}" for note in report.notes), report.summary()])


def _lines(report: HoldersReport) -> list[str]:
    lines = []
    for key, tensor in report.tensors.items():
        lines.append(f"{key}: {tensor.dtype} {tensor.shape}")
        rows = [_columns("stored", part) for part in tensor.stored]
        rows += [_columns("needed", part) for part in tensor.needed]
        lines += [f"  {line}" for line in table(rows, right=(3,))]
    return lines


def _columns(what: str, part: Part) -> Sequence[str]:
    ranks = ("rank " if len(part.ranks) == 1 else "ranks ") + format_ranks(part.ranks, _RANGES)
    files = ", ".join(part.files[:_RANGES]) + (" ..." if len(part.files) > _RANGES else "")
    return what, part.where(), ranks, format_bytes(part.bytes), files

"""flexckpt explain, expand and invert: what AOA statements do, stand for, and how they are undone.

Tested in tests/cli/test_cli.py.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from paddle_flexckpt import aoa
from paddle_flexckpt.cli.arguments import add_aoa, aoa_config, catalog_of

_SOURCE = "directory or URL of a checkpoint of the statements' source"
_TARGET = "directory or URL of a checkpoint of the statements' destination"


def add_command(commands: Any) -> None:
    """Add the parsers of the three commands."""
    explain = commands.add_parser("explain", help="where each tensor comes from under AOA statements")
    expand = commands.add_parser("expand", help="AOA statements with ids, stars and fused layouts written out")
    invert = commands.add_parser("invert", help="the AOA statements that undo others, as JSON")
    for parser, run in ((explain, _explain), (expand, _expand), (invert, _invert)):
        add_aoa(parser)
        parser.set_defaults(run=run)
    for parser in (explain, expand):
        parser.add_argument("source", metavar="CHECKPOINT", help=_SOURCE)
        parser.add_argument("target", metavar="TARGET", nargs="?", help=f"{_TARGET}; by default what they make")
    explain.add_argument("--key", action="append", default=[], help="only this target; may be given several times")


def _explain(options: argparse.Namespace) -> str:
    """Return where each target comes from."""
    return aoa.explain(aoa_config(options.aoa), catalog_of(options.source), catalog_of(options.target), options.key)


def _expand(options: argparse.Namespace) -> str:
    """Return the simple statements that macros stand for."""
    source, target = catalog_of(options.source), catalog_of(options.target)
    lines: list[str] = []
    for expanded in aoa.expand_program(aoa_config(options.aoa), source, target):
        lines.append(f"# statement {expanded.number}: {expanded.text.strip()}")
        lines += [text.strip() for text in expanded.texts]
    return "\n".join(lines)


def _invert(options: argparse.Namespace) -> str:
    """Return the statements that undo others."""
    return json.dumps(aoa.invert(aoa_config(options.aoa)), indent=2, ensure_ascii=False)

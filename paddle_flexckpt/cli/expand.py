"""flexckpt expand: the simple statements that macros stand for."""

from __future__ import annotations

import argparse
from typing import Any

from paddle_flexckpt import aoa
from paddle_flexckpt.cli.arguments import add_aoa, aoa_config, catalog_of


def add_command(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("expand", help="AOA statements with ids, stars and fused layouts written out")
    parser.add_argument("source", metavar="CHECKPOINT", help="directory of the source checkpoint")
    parser.add_argument("target", metavar="TARGET", nargs="?", help="directory of a checkpoint of the destination")
    add_aoa(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> str:
    """Return the text to print."""
    target = None if options.target is None else catalog_of(options.target)
    lines: list[str] = []
    for expanded in aoa.expand_program(aoa_config(options.aoa), catalog_of(options.source), target):
        lines.append(f"# statement {expanded.number}: {expanded.text.strip()}")
        lines += [text.strip() for text in expanded.texts]
    return "\n".join(lines)

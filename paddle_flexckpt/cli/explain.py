"""flexckpt explain: where each target comes from."""

from __future__ import annotations

import argparse
from typing import Any

from paddle_flexckpt import aoa
from paddle_flexckpt.cli.arguments import add_aoa, aoa_config, catalog_of


def add_command(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("explain", help="where each tensor comes from under AOA statements")
    parser.add_argument("source", metavar="CHECKPOINT", help="directory or URL of the source checkpoint")
    parser.add_argument(
        "target",
        metavar="TARGET",
        nargs="?",
        help="directory or URL of a checkpoint of the destination's layout; by default what the statements make",
    )
    add_aoa(parser)
    parser.add_argument("--key", action="append", default=[], help="only this target; may be given several times")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> str:
    """Return the text to print."""
    target = None if options.target is None else catalog_of(options.target)
    return aoa.explain(aoa_config(options.aoa), catalog_of(options.source), target, options.key)

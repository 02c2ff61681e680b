"""flexckpt invert: the statements that undo others."""

from __future__ import annotations

import argparse
import json
from typing import Any

from paddle_flexckpt import aoa
from paddle_flexckpt.cli.arguments import add_aoa, aoa_config, catalog_of


def add_command(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("invert", help="the AOA statements that undo others, as JSON")
    add_aoa(parser)
    parser.add_argument(
        "--source", metavar="CHECKPOINT", help="directory or URL of a checkpoint of the statements' source"
    )
    parser.add_argument(
        "--target", metavar="CHECKPOINT", help="directory or URL of a checkpoint of the statements' destination"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> str:
    """Return the text to print."""
    source, target = (None if path is None else catalog_of(path) for path in (options.source, options.target))
    return json.dumps(aoa.invert(aoa_config(options.aoa), source, target), indent=2, ensure_ascii=False)

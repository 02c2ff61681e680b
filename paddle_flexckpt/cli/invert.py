"""flexckpt invert: the statements that undo others."""

from __future__ import annotations

import argparse
import json
from typing import Any

from paddle_flexckpt import aoa
from paddle_flexckpt.cli.arguments import add_aoa, aoa_config


def add_command(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("invert", help="the AOA statements that undo others, as JSON")
    add_aoa(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> str:
    """Return the text to print."""
    return json.dumps(aoa.invert(aoa_config(options.aoa)), indent=2, ensure_ascii=False)

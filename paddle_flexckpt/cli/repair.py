"""flexckpt repair: a lost manifest from the data files. Tested in tests/cli/test_verify.py."""

from __future__ import annotations

import argparse
from typing import Any

from paddle_flexckpt.cli.arguments import add_checkpoint
from paddle_flexckpt.engine.verification import repair_manifest


def add_command(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "repair",
        help="rebuild a lost manifest from the data files",
        description="Rebuilds a lost manifest from the headers of the data files. The checksums are computed anew: "
        "damage that happened before cannot be found afterwards.",
    )
    add_checkpoint(parser, required_id=True)
    parser.add_argument("--overwrite", action="store_true", help="replace the manifest that is there")
    parser.add_argument("--save-token", metavar="TOKEN", help="the save to take, where the files are of several")
    parser.add_argument("--fewer-files", action="store_true", help="some ranks had nothing to write, and have no file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> str:
    """Return the text to print."""
    report = repair_manifest(
        options.source,
        options.unique_id,
        overwrite=options.overwrite,
        save_token=options.save_token,
        fewer_files=options.fewer_files,
    )
    return report.summary()

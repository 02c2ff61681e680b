"""flexckpt export: a checkpoint as Hugging Face style safetensors files. Tested in tests/cli/test_cli.py."""

from __future__ import annotations

import argparse
from typing import Any

from paddle_flexckpt.cli.arguments import add_aoa, aoa_config
from paddle_flexckpt.engine.export import export_safetensors


def add_command(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("export", help="write whole tensors as safetensors files")
    parser.add_argument("source", metavar="CHECKPOINT", help="directory or URL of the checkpoint")
    parser.add_argument("output", metavar="OUTPUT", help="directory or URL to write to; nothing may be there")
    add_aoa(parser, required=False)
    parser.add_argument("--prefix", help="only keys that start with this and a dot, which are taken off")
    parser.add_argument("--states", action="store_true", help="write optimizer states too")
    parser.add_argument(
        "--max-file-bytes", type=int, default=5 << 30, help="largest size of one file, in bytes (default: 5 GiB)"
    )
    parser.add_argument(
        "--verify",
        choices=("read", "full", "off"),
        default="read",
        help="which bytes are compared with their checksums: blocks read whole (default), all, none",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> str:
    """Return the text to print."""
    report = export_safetensors(
        options.source,
        options.output,
        None if options.aoa is None else aoa_config(options.aoa),
        prefix=options.prefix,
        states=options.states,
        max_file_bytes=options.max_file_bytes,
        verify=options.verify,
    )
    return report.summary()

"""flexckpt verify, repair and export: read all of a checkpoint.

Tested in tests/cli/test_cli.py and tests/cli/test_verify.py.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from paddle_flexckpt.cli.arguments import Outcome, add_aoa, add_checkpoint, aoa_config
from paddle_flexckpt.engine.export import export_safetensors
from paddle_flexckpt.engine.verification import repair_manifest, verify_checkpoint


def add_command(commands: Any) -> None:
    """Add the parsers of the three commands."""
    verify = commands.add_parser("verify", help="read a whole checkpoint and list all that is damaged")
    add_checkpoint(verify)
    verify.add_argument("--json", action="store_true", help="print the report as JSON")

    repair = commands.add_parser(
        "repair",
        help="rebuild a lost manifest from the data files",
        description="Rebuilds a lost manifest from the headers of the data files. The checksums are computed anew: "
        "damage that happened before cannot be found afterwards.",
    )
    add_checkpoint(repair, required_id=True)
    repair.add_argument("--overwrite", action="store_true", help="replace the manifest that is there")
    repair.add_argument("--save-token", metavar="TOKEN", help="the save to take, where the files are of several")
    repair.add_argument("--fewer-files", action="store_true", help="some ranks had nothing to write, and have no file")

    export = commands.add_parser("export", help="write whole tensors as safetensors files")
    export.add_argument("source", metavar="CHECKPOINT", help="directory or URL of the checkpoint")
    export.add_argument("output", metavar="OUTPUT", help="directory or URL to write to; nothing may be there")
    add_aoa(export, required=False)
    export.add_argument("--prefix", help="only keys that start with this and a dot, which are taken off")
    export.add_argument("--states", action="store_true", help="write optimizer states too")
    export.add_argument(
        "--max-file-bytes", type=int, default=5 << 30, help="largest size of one file, in bytes (default: 5 GiB)"
    )
    export.add_argument(
        "--verify",
        choices=("read", "full", "off"),
        default="read",
        help="which bytes are compared with their checksums: blocks read whole (default), all, none",
    )
    for parser, run in ((verify, _verify), (repair, _repair), (export, _export)):
        parser.set_defaults(run=run)


def _verify(options: argparse.Namespace) -> Outcome:
    """Return one line for each problem and one for all; code 1 if there is a problem."""
    report = verify_checkpoint(options.source, options.unique_id)
    if options.json:
        text = json.dumps(report.as_dict(), indent=2, ensure_ascii=False, default=str)
    else:
        text = "\n".join([*(" ".join(str(problem).split()) for problem in report.problems), report.summary()])
    return Outcome(text, int(not report.ok))


def _repair(options: argparse.Namespace) -> str:
    chosen = {name: getattr(options, name) for name in ("overwrite", "save_token", "fewer_files")}
    return repair_manifest(options.source, options.unique_id, **chosen).summary()


def _export(options: argparse.Namespace) -> str:
    config = None if options.aoa is None else aoa_config(options.aoa)
    chosen = {name: getattr(options, name) for name in ("prefix", "states", "max_file_bytes", "verify")}
    return export_safetensors(options.source, options.output, config, **chosen).summary()

"""flexckpt verify: whether a checkpoint is as it was written."""

from __future__ import annotations

import argparse
import json
from typing import Any

from paddle_flexckpt.cli.arguments import Outcome, add_checkpoint
from paddle_flexckpt.engine.verification import verify_checkpoint


def add_command(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("verify", help="read a whole checkpoint and list all that is damaged")
    add_checkpoint(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> Outcome:
    """Return one line for each problem and one for all; code 1 if there is a problem."""
    report = verify_checkpoint(options.source, options.unique_id)
    code = 0 if report.ok else 1
    if options.json:
        return Outcome(json.dumps(report.as_dict(), indent=2, ensure_ascii=False, default=str), code)
    return Outcome("\n".join([*(_line(problem) for problem in report.problems), report.summary()]), code)


def _line(problem: object) -> str:
    return " ".join(str(problem).split())

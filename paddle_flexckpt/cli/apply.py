"""flexckpt apply: bring an engine's local copy of a model to a version of its weights.

Tested in tests/cli/test_apply.py.
"""

from __future__ import annotations

import argparse
from typing import Any

from paddle_flexckpt.cli.common import add_json
from paddle_flexckpt.rollout.local_copy import apply_version


def add_command(commands: Any) -> None:
    """Add the parser of the command."""
    parser = commands.add_parser(
        "apply",
        help="bring a local copy of a model to a version of its weights",
        description="Brings a local copy of a model to a version that fc.WeightPublisher, slime or miles has "
        "published: from the version that it has, by deltas, or from a full version. New files are complete before "
        "they replace old ones, so an interrupted call costs nothing. Other files than weights are copied "
        "where the copy has none.",
        epilog="example: flexckpt apply /shared/weights /local/model --version 12",
    )
    parser.add_argument("root", metavar="ROOT", help="directory or URL of the versions (weight_v000001, ...)")
    parser.add_argument("local", metavar="LOCAL", help="directory of the copy; it is made if it is not there")
    parser.add_argument("--version", type=int, metavar="N", help="the version; by default the newest")
    parser.add_argument("--base", metavar="DIR", help="the model of version 0, if deltas are based on that")
    parser.add_argument("--full", action="store_true", help="begin with a full version, whatever LOCAL has")
    add_json(parser)
    parser.set_defaults(run=_apply)


def _apply(options: argparse.Namespace) -> str:
    report = apply_version(options.root, options.local, options.version, base=options.base, full=options.full)
    return report.to_json() if options.json else report.summary()

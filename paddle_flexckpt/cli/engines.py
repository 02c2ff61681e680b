"""flexckpt apply and receive: give an engine's machine the weights of a trainer.

Tested in tests/cli/test_apply.py and tests/rollout/test_receiver.py.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from paddle_flexckpt.cli.common import add_json
from paddle_flexckpt.rollout.authenticated import SECRET, find_secret
from paddle_flexckpt.rollout.local_copy import apply_version
from paddle_flexckpt.rollout.receiver import PORT, Receiver
from paddle_flexckpt.rollout.segment import DIRECTORY


def add_command(commands: Any) -> None:
    """Add the parsers of these commands."""
    applying = commands.add_parser(
        "apply",
        help="bring a local copy of a model to a version of its weights",
        description="Brings a local copy of a model to a version that fc.WeightPublisher, slime or miles has "
        "published: from the version that it has, by deltas, or from a full version. New files are complete before "
        "they replace old ones, so an interrupted call costs nothing. Other files than weights are copied "
        "where the copy has none.",
        epilog="example: flexckpt apply /shared/weights /local/model --version 12",
    )
    applying.add_argument("root", metavar="ROOT", help="directory or URL of the versions (weight_v000001, ...)")
    applying.add_argument("local", metavar="LOCAL", help="directory of the copy; it is made if it is not there")
    applying.add_argument("--version", type=int, metavar="N", help="the version; by default the newest")
    applying.add_argument("--base", metavar="DIR", help="the model of version 0, if deltas are based on that")
    applying.add_argument("--full", action="store_true", help="begin with a full version, whatever LOCAL has")
    add_json(applying)
    applying.set_defaults(run=_apply)

    receiving = commands.add_parser(
        "receive",
        help="take the weights that a trainer on other machines pushes to an engine on this one",
        description="Writes what the ranks of a trainer push with fc.WeightChannel(receiver=...) into shared memory, "
        f"from which the engine of this machine loads it. {SECRET} is the secret, the same as on the trainer; at "
        "127.0.0.1 one is made. Data is not encrypted: listen on the cluster's own network. Runs until it is "
        "interrupted.",
        epilog=f"example: {SECRET}=... flexckpt receive --host 10.0.0.7",
    )
    receiving.add_argument("--host", default="127.0.0.1", help="the address to listen at (default: %(default)s)")
    receiving.add_argument("--port", type=int, default=PORT, help="its port (default: %(default)s)")
    receiving.add_argument(
        "--directory", default=DIRECTORY, help="of shared memory, which the engine sees too (default: %(default)s)"
    )
    receiving.set_defaults(run=_receive)


def _apply(options: argparse.Namespace) -> str:
    report = apply_version(options.root, options.local, options.version, base=options.base, full=options.full)
    return report.to_json() if options.json else report.summary()


def _receive(options: argparse.Namespace) -> str:
    secret = find_secret(f"{options.host}:{options.port}", makes=True)
    receiver = Receiver(options.host, options.port, secret, options.directory)
    print(f"receiving at {receiver.address} for {options.directory}", file=sys.stderr, flush=True)
    receiver.run()
    return ""

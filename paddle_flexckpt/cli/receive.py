"""flexckpt receive: take pushed weights on the machine of an engine.

Tested in tests/rollout/test_receiver.py.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from paddle_flexckpt.rollout.receiver import PORT, SECRET, Receiver
from paddle_flexckpt.rollout.segment import DIRECTORY


def add_command(commands: Any) -> None:
    """Add the parser of the command."""
    parser = commands.add_parser(
        "receive",
        help="take the weights that a trainer on other machines pushes to an engine on this one",
        description="Writes what the ranks of a trainer push with fc.WeightChannel(receiver=...) into shared memory, "
        f"from which the engine of this machine loads it. {SECRET} is the secret, the same as on the trainer. Data is "
        "not encrypted: listen on the cluster's own network. Runs until it is interrupted.",
        epilog=f"example: {SECRET}=... flexckpt receive --host 10.0.0.7",
    )
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at (default: %(default)s)")
    parser.add_argument("--port", type=int, default=PORT, help="its port (default: %(default)s)")
    parser.add_argument(
        "--directory", default=DIRECTORY, help="of shared memory, which the engine sees too (default: %(default)s)"
    )
    parser.set_defaults(run=_receive)


def _receive(options: argparse.Namespace) -> str:
    receiver = Receiver(options.host, options.port, os.environ.get(SECRET, "").encode(), options.directory)
    print(f"receiving at {receiver.address} for {options.directory}", file=sys.stderr, flush=True)
    receiver.run()
    return ""

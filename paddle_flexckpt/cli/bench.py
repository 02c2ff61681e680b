"""flexckpt bench: measure the speed of a medium, for rehearsals. Tested in tests/cli/test_bench.py."""

from __future__ import annotations

import argparse
from typing import Any

from paddle_flexckpt.cli.common import byte_count
from paddle_flexckpt.tools.probe import probe


def add_command(commands: Any) -> None:
    """Add the parser of the command."""
    parser = commands.add_parser(
        "bench",
        help="measure how fast a medium is written and read, and how long a small read takes",
        description="Writes scratch files to a directory by several threads, reads them, and removes them. `flexckpt "
        "rehearse --probe` reads a file with the output of --json.",
        epilog="example: flexckpt bench run --json > run.json; flexckpt rehearse run/step_9 --to tp=4 --probe run.json",
    )
    parser.add_argument("path", metavar="PATH", help="a directory, or the URL of one")
    parser.add_argument(
        "--bytes", type=byte_count, default=256 << 20, metavar="SIZE", help="bytes of all scratch files (256MiB)"
    )
    parser.add_argument(
        "--threads", type=int, default=4, metavar="N", help="threads that write and read at the same time (4)"
    )
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.set_defaults(run=_bench)


def _bench(options: argparse.Namespace) -> str:
    """Return one line, or JSON."""
    report = probe(options.path, options.bytes, options.threads)
    return report.to_json() if options.json else report.summary()

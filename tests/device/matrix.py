"""The matrix of strategies on devices: what each saves or holds, each other gets. ``python -m tests.device.matrix``."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from paddle_flexckpt.testing import World
from tests.distributed.matrix.strategies import BY_NAME
from tests.distributed.matrix.table import Matrix, run

MODEL = "untied"
NAMES = (
    *("dp2", "tp2", "tp2+sp", "pp2", "v1x2", "v2x2", "stage2x2", "stage3x2", "semi2"),
    *("tp4", "pp4", "v2x4", "stage3x4", "tp2xpp2", "tp2xv2x2", "tp2xv1x2", "dp2xpp2", "v2x2xpp2"),
)
#: Strategies that cannot be trained on the device, each with the reason; their states are given values instead.
UNTRAINED = {
    "semi2": "the CPU build of Paddle cuts distributed tensors by a CPU kernel, whatever their place",
    "semi4": "the CPU build of Paddle cuts distributed tensors by a CPU kernel, whatever their place",
}


def pairs() -> list[tuple[str, str]]:
    """All (saved under, loaded under)."""
    return [(saved, loaded) for saved in NAMES for loaded in NAMES]


def moves() -> list[tuple[str, str]]:
    """All (from, to) between live jobs of one world."""
    return [(source, target) for source, target in pairs() if BY_NAME[source].world == BY_NAME[target].world]


def sample(chosen: list[tuple[str, str]], count: int, largest: int, seed: int = 0) -> list[tuple[str, str]]:
    """A seeded part of the pairs up to a size of world."""
    fitting = [pair for pair in chosen if max(BY_NAME[name].world for name in pair) <= largest]
    return sorted(random.Random(seed).sample(fitting, count))


def main() -> int:
    """Run all pairs, through files and in memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--only", help="a strategy that either side of the pair has to be")
    args = parser.parse_args()
    worlds: dict[int, World] = {}
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        of_size = lambda size: worlds.setdefault(size, World(size, device="tests.device.ranks"))  # noqa: E731
        matrix = Matrix(of_size, Path(folder), UNTRAINED)
        try:
            wanted = {
                way: [pair for pair in chosen if args.only is None or args.only in pair]
                for way, chosen in (("files", pairs()), ("memory", moves()))
            }
            results = [result for way, chosen in wanted.items() for result in run(matrix, MODEL, way, chosen)]
            guarded = sum(each.guarded_calls for each in worlds.values())
        finally:
            for each in worlds.values():
                each.close()
    failed = [result for result in results if not result.ok]
    print(f"{len(results) - len(failed)} of {len(results)} pairs ok in {time.perf_counter() - begin:.0f} s")
    print(f"device: {guarded} guarded calls; a host touch or a use of freed memory fails its job")
    if args.json:
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=1), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

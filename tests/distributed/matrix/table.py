"""Runs pairs, through files and in memory, and prints the table: ``python -m tests.distributed.matrix.table``."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from paddle_flexckpt.testing import World
from tests.distributed.matrix.assembly import assemble, differing
from tests.distributed.matrix.strategies import BY_NAME, MODELS, flow_pairs, pairs

JOBS = "tests.distributed.matrix.jobs"
# Five steps of float32 training under another order of summation; about ten times what was measured.
LOSS_BOUND = 5e-6


@dataclass(frozen=True)
class Result:
    """One pair's outcome; ``way`` is through ``files``, those of ``nodes``, or in ``memory``."""

    model: str
    way: str
    saved: str
    loaded: str
    ok: bool
    seconds: float
    loss_difference: float
    problem: str = ""


class Matrix:
    """Saves every strategy once, loads it wherever asked.

    Args:
        world: The world of a number of ranks.
        folder: Where checkpoints and shards go.
        untrained: Strategies that cannot be trained in these worlds: their states are given values instead.
    """

    def __init__(self, world: Callable[[int], World], folder: Path, untrained: Collection[str] = ()) -> None:
        self._world = world
        self._folder = folder
        self._untrained = untrained
        self._saved: dict[tuple[str, str], tuple[dict[str, np.ndarray], list[float], int]] = {}

    def saved(self, model: str, name: str) -> tuple[dict[str, np.ndarray], list[float], int]:
        """What a strategy saved, as whole tensors, its uninterrupted losses, and the bytes in its files."""
        if (model, name) not in self._saved:
            folder = self._folder / model / name
            ranks = BY_NAME[name].world
            results = self._world(ranks).run(
                f"{JOBS}:save", strategy=name, model=model, folder=str(folder), trained=name not in self._untrained
            )
            self._saved[model, name] = assemble(folder / "saved", ranks), results[0]["losses"], results[0]["bytes"]
        return self._saved[model, name]

    def pair(self, model: str, saved: str, loaded: str) -> Result:
        """Loads what one strategy saved under another and compares."""
        begin = time.perf_counter()
        tensors, losses, _ = self.saved(model, saved)
        folder, ranks = self._folder / model / saved, BY_NAME[loaded].world
        results = self._world(ranks).run(
            f"{JOBS}:load",
            strategy=loaded,
            model=model,
            folder=str(folder),
            trained=saved not in self._untrained and loaded not in self._untrained,
        )
        wrong = differing(tensors, assemble(folder / f"loaded-{loaded}", ranks))
        return _judge(model, "files", saved, loaded, begin, wrong, results[0]["losses"], losses)

    def over_nodes(self, model: str, saved: str, loaded: str, nodes: list[int], lost: int | None = None) -> Result:
        """Saves to two nodes of two ranks, and loads under another strategy with other ranks on the nodes.

        Args:
            model: Name of the model.
            saved: The strategy that saves; ranks 0 and 1 are on node 0, ranks 2 and 3 on node 1.
            loaded: The strategy that loads.
            nodes: The node of each rank that loads.
            lost: The node whose directory is deleted in between; each file is saved on both nodes then.
        """
        begin = time.perf_counter()
        folder, ranks = self._folder / model / f"{saved}-nodes-{lost}", BY_NAME[saved].world
        there = {"model": model, "folder": str(folder)}
        copies = 1 if lost is None else 2
        results = self._world(ranks).run(
            f"{JOBS}:save", strategy=saved, nodes=[0, 0, 1, 1], node_copies=copies, **there
        )
        losses = results[0]["losses"]
        if lost is not None:
            shutil.rmtree(folder / f"node{lost}")
        results = self._world(BY_NAME[loaded].world).run(f"{JOBS}:load", strategy=loaded, nodes=nodes, **there)
        wrong = differing(assemble(folder / "saved", ranks), assemble(folder / f"loaded-{loaded}", len(nodes)))
        return _judge(model, "nodes", saved, loaded, begin, wrong, results[0]["losses"], losses)

    def after_a_loss(self, model: str, saved: str, loaded: str) -> Result:
        """Saves to two nodes in the background, and loads without the second one, whose ranks are new."""
        ranks = BY_NAME[loaded].world
        return self.over_nodes(model, saved, loaded, [2 * (2 * rank // ranks) for rank in range(ranks)], lost=1)

    def move(self, model: str, source: str, target: str) -> Result:
        """Moves a live job of one strategy into another of the same world and compares."""
        begin = time.perf_counter()
        losses = self.saved(model, source)[1]
        folder, ranks = self._folder / model / f"{source}-{target}", BY_NAME[source].world
        results = self._world(ranks).run(
            f"{JOBS}:reshard",
            source=source,
            target=target,
            model=model,
            folder=str(folder),
            trained=[source not in self._untrained, not {source, target} & {*self._untrained}],
        )
        live = assemble(folder / f"live-{source}", ranks)
        wrong = differing(live, assemble(folder / f"moved-{source}-{target}", ranks))
        return _judge(model, "memory", source, target, begin, wrong, results[0]["losses"], losses)


def _judge(
    model: str,
    way: str,
    saved: str,
    loaded: str,
    begin: float,
    wrong: list[str],
    after: list[float],
    losses: list[float],
) -> Result:
    """The outcome of a pair: what differs, and how far the losses are from those of the uninterrupted run."""
    expected = losses[len(losses) - len(after) :]
    distance = float(np.abs(np.subtract(after, expected)).max(initial=0.0))
    problem = f"{len(wrong)} tensors differ: {wrong[:5]}" if wrong else ""
    if not distance <= LOSS_BOUND:
        problem += f" losses {after} instead of {expected}"
    return Result(model, way, saved, loaded, not problem, time.perf_counter() - begin, distance, problem)


def _each_once(chosen: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Of each strategy that saves: itself, and another that loads, another one for each."""
    found = []
    for number, saved in enumerate(dict.fromkeys(pair[0] for pair in chosen)):
        others = [pair for pair in chosen if pair[0] == saved != pair[1]]
        found += [pair for pair in chosen if pair == (saved, saved)]
        found += others[number % len(others) :][:1] if others else []
    return found


def _in_short(error: Exception) -> str:
    """The lines of an error that name the errors of the ranks, without their tracebacks and logs."""
    lines = [line for line in str(error).splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return " / ".join(dict.fromkeys(lines))[:600] or f"{type(error).__name__}: {str(error)[:600]}"


def run(matrix: Matrix, model: str, way: str, chosen: Iterable[tuple[str, str]]) -> list[Result]:
    """Runs pairs, printing a line each."""
    ways = {"files": matrix.pair, "memory": matrix.move, "nodes": matrix.after_a_loss}
    results = []
    for saved, loaded in chosen:
        try:
            result = ways[way](model, saved, loaded)
        except Exception as error:  # a pair that breaks is a line of the table, and fails the run at its end
            result = Result(model, way, saved, loaded, False, 0.0, float("nan"), _in_short(error))
        results.append(result)
        print(
            f"{model:7s} {way:6s} {saved:>14s} -> {loaded:14s} {'ok' if result.ok else 'FAILED':6s} "
            f"{result.seconds:5.1f} s  |loss difference| {result.loss_difference:.1e} {result.problem}",
            flush=True,
        )
    return results


def main() -> int:
    """Runs all pairs of all models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--only", help="a strategy that either side of the pair has to be")
    parser.add_argument("--ways", nargs="+", choices=["files", "memory", "nodes"], default=["files", "memory", "nodes"])
    args = parser.parse_args()
    worlds: dict[int, World] = {}
    results: list[Result] = []
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        matrix = Matrix(lambda size: worlds.setdefault(size, World(size)), Path(folder))
        try:
            for model in MODELS:
                wanted = [p for p in pairs(model) if args.only is None or args.only in p]
                same_world = [p for p in wanted if BY_NAME[p[0]].world == BY_NAME[p[1]].world > 1]
                results += run(matrix, model, "files", wanted if "files" in args.ways else [])
                results += run(matrix, model, "memory", same_world if "memory" in args.ways else [])
                of_four = [p for p in wanted if BY_NAME[p[0]].world == 4 and BY_NAME[p[1]].world in (2, 4)]
                results += run(matrix, model, "nodes", _each_once(of_four) if "nodes" in args.ways else [])
            for model, *pair in flow_pairs() if "files" in args.ways else ():
                if args.only is None or args.only in pair:
                    results += run(matrix, model, "files", [(pair[0], pair[1])])
        finally:
            for each in worlds.values():
                each.close()
    failed = [result for result in results if not result.ok]
    print(f"{len(results) - len(failed)} of {len(results)} pairs ok in {time.perf_counter() - begin:.0f} s")
    if args.json:
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=1), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Random damage in numbers: ``python -m tests.damage.campaign --count 10000`` (``make test-damage``).

For each damage, a checkpoint in memory is verified and loaded whole, and then mended. Verification has to find it and
say where it is. A load with ``verify="full"`` or ``"read"`` has to raise, unless the damage is in bytes that no target
needs (headers of data files); whatever was loaded has to be what was saved, and where nothing was read yet, targets
have to be as they were. With ``--replicas 2`` every shard is in two files: then a load has to succeed as long as every
block is intact in one of them, and has to say that it has read replicas.
"""

from __future__ import annotations

import argparse
import functools
import logging
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError, ValidationError
from paddle_flexckpt.report import LoadReport, VerifyReport
from paddle_flexckpt.tools.verification import verify_checkpoint
from tests.damage.checkpoint import ID, Files, Loads, Saves, prepare
from tests.damage.kinds import ALL
from tests.damage.location import damaged, damaged_keys, may_load, why_not_located
from tests.ramdisk import memory_directory

# How everything is loaded: ranks, and what is verified.
LOADS = ((1, "read"), (1, "full"), (2, "full"))

# Any other exception reaches the caller as a plain CheckpointError.
NAMED_ERRORS = (CorruptCheckpointError, ValidationError)


@dataclass
class Totals:
    """What became of the damages.

    Attributes:
        made: Damages by kind.
        found: Those that verification noticed.
        located: Those of which it said where they are.
        refused: Those of which every load raised an error.
        harmless: Those after which everything was loaded as it was saved.
        replaced: Those of these in which replicas had to be read.
        failures: ``(seed, reason)``.
    """

    made: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    located: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    harmless: Counter[str] = field(default_factory=Counter)
    replaced: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)

    def add(self, other: Totals) -> None:
        for name in _COLUMNS:
            getattr(self, name).update(getattr(other, name))
        self.failures += other.failures

    def __str__(self) -> str:
        lines = [f"{'damage':<28}" + "".join(f"{name:>10}" for name in _COLUMNS)]
        for kind in [*ALL, None]:
            counts = [getattr(self, name) for name in _COLUMNS]
            numbers = [sum(each.values()) if kind is None else each[kind] for each in counts]
            lines.append(f"{kind or 'all':<28}" + "".join(f"{number:>10,}" for number in numbers))
        return "\n".join([*lines, f"{'failures':<28}{len(self.failures):>10,}"])


_COLUMNS = ("made", "found", "located", "refused", "harmless", "replaced")


def damage_of(seed: int, saves: Saves) -> tuple[str, Files]:
    """The kind of damage of a seed, and all files as they are then; at least one is not as it was."""
    kind = list(ALL)[seed % len(ALL)]
    random = np.random.default_rng(seed)
    while True:
        files: Files = dict(saves.files)
        ALL[kind](random, files, saves)
        if damaged(files, saves):
            return kind, files


def check(seed: int, saves: Saves, loads: Loads, totals: Totals) -> None:
    """Damages the checkpoint, looks at what is said about that, and mends it."""
    kind, files = damage_of(seed, saves)
    damage = damaged(files, saves)
    totals.made[kind] += 1
    saves.write({name: files[name] for name in damage})
    try:
        reasons = list(_faults(kind, damage, files, saves, loads, totals))
    finally:
        saves.write({name: saves.files[name] for name in damage})
    totals.failures += [(seed, f"{kind}: {reason}") for reason in reasons]


def _faults(
    kind: str, damage: dict[str, np.ndarray], files: Files, saves: Saves, loads: Loads, totals: Totals
) -> Iterator[str]:
    outcome: VerifyReport | Exception
    try:
        outcome = verify_checkpoint(saves.path, ID)
    except CheckpointError as error:
        outcome = error
    totals.found[kind] += isinstance(outcome, Exception) or not outcome.ok
    reason = why_not_located(outcome, damage, files, saves)
    totals.located[kind] += reason is None
    if reason is not None:
        yield f"verification: {reason}"
    harmless, keys = may_load(damage, files, saves), damaged_keys(damage, files, saves)
    if isinstance(outcome, VerifyReport) and outcome.recoverable != harmless:
        yield f"verification: recoverable is {outcome.recoverable}"
    results = []
    for world, verify in LOADS:
        result, wrong = loads.load(world, verify=verify)
        results.append(result)
        where = f"load on {world} ranks with verify={verify!r}"
        if wrong:
            yield f"{where}: {wrong} are neither what was saved nor what was there before; {result}"
        if not isinstance(result, LoadReport if harmless else NAMED_ERRORS):
            yield f"{where}: {'no ' if harmless else ''}error about the checkpoint was to be raised; got {result!r}"
        elif isinstance(result, CheckpointError) and str(saves.path) not in str(result):
            yield f"{where}: the error does not name what is damaged: {result}"
        elif isinstance(result, LoadReport) and not set(result.replicas_used) <= keys:
            yield f"{where}: {keys} are damaged; {result.replicas_used}"
    reports = [result for result in results if isinstance(result, LoadReport)]
    totals.refused[kind] += not reports
    totals.harmless[kind] += len(reports) == len(LOADS)
    totals.replaced[kind] += bool(reports and reports[0].replicas_used)
    if reports and reports[0].replicas_used:
        result, _ = loads.load(verify="read", use_replicas=False)
        if not isinstance(result, NAMED_ERRORS):
            yield f"replicas were read without permission: {result}"


def run_seeds(seeds: range, replicas: int = 1) -> Totals:
    """Checks the damages of some seeds, of a checkpoint that holds everything so many times."""
    logging.getLogger("paddle_flexckpt").setLevel(logging.ERROR)
    totals = Totals()
    with memory_directory() as root:
        saves = prepare(root, replicas=replicas, save_replicas=replicas > 1)
        loads = Loads(saves)
        for seed in seeds:
            check(seed, saves, loads, totals)
        # Mended, it is as it was: no damage was counted twice.
        assert verify_checkpoint(saves.path, ID).ok
    return totals


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.damage.campaign", description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=1000, help="number of damages (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first (default %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default %(default)s)")
    parser.add_argument("--replicas", type=int, default=1, help="files that each shard is in (default %(default)s)")
    parser.add_argument("--show", type=int, default=5, help="failures shown (default %(default)s)")
    options = parser.parse_args(arguments)
    start, totals, end = time.perf_counter(), Totals(), options.seed + options.count
    chunks = [range(low, min(low + 500, end)) for low in range(options.seed, end, 500)]
    if options.jobs == 1:
        for chunk in chunks:
            totals.add(run_seeds(chunk, options.replicas))
    else:
        with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
            run = functools.partial(run_seeds, replicas=options.replicas)
            for part in pool.imap_unordered(run, chunks):
                totals.add(part)
            # Leaving the block would end the workers with a signal, about which Paddle prints a page.
            pool.close()
            pool.join()
    print(totals)
    print(f"{'seconds':<28}{time.perf_counter() - start:>10.1f}")
    for seed, reason in sorted(totals.failures)[: options.show]:
        print(f"\nFAILURE, seed {seed}: {reason}")
    return 1 if totals.failures else 0


if __name__ == "__main__":
    sys.exit(main())

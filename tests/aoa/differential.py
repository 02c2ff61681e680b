"""Random AOA programs through the compiler and through the oracle: every element has to be the same, bit for bit.

    python -m tests.aoa.differential --count 100000 --seed 0 --jobs 2

Every program is planned for a random source layout and a random target layout and carried out on numpy arrays; one in
``--system-every`` goes through save, load and reshard of the library in a simulated world as well; and the invertible
ones are loaded in reverse, and have to give the source back. Beside each a program that assigns names again is undone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np

import paddle_flexckpt.aoa as aoa
from tests.aoa.evaluate import carry_out
from tests.aoa.layouts import Layout, catalog_of, random_layout
from tests.aoa.oracle import SCALAR_STATES, OracleError, Tensor, run_program, state_of
from tests.aoa.program_writer import Program
from tests.aoa.programs import make_program
from tests.aoa.reassigned import check_undone
from tests.aoa.whole_system import check_system, quiet
from tests.property.layouts import Shard

MAX_WORLD = 6


class Difference(AssertionError):
    """The library's result is not the oracle's."""


@dataclass
class Totals:
    """What was done."""

    programs: int = 0
    statements: int = 0
    targets: int = 0
    elements: int = 0
    moved: int = 0
    computed: int = 0
    kept: int = 0
    whole_system: int = 0
    inverted: int = 0
    undone: Counter = field(default_factory=Counter)
    kinds: Counter = field(default_factory=Counter)
    failures: list[tuple[int, str]] = field(default_factory=list)

    def add(self, other: Totals) -> None:
        for name, value in vars(other).items():
            if isinstance(value, list):
                getattr(self, name).extend(value)
            elif isinstance(value, Counter):
                getattr(self, name).update(value)
            else:
                setattr(self, name, getattr(self, name) + value)

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {count}" for kind, count in self.kinds.most_common())
        return (
            f"programs run       {self.programs}\n"
            f"statements         {self.statements} ({kinds})\n"
            f"target shards      {self.targets}\n"
            f"elements compared  {self.elements} ({self.moved} moved, {self.computed} computed, {self.kept} kept)\n"
            f"whole system       {self.whole_system} programs\n"
            f"inverted           {self.inverted} programs\n"
            f"assigned again     {dict(self.undone)}\n"
            f"differences        {len(self.failures)}"
        )


def raw(values: np.ndarray) -> np.ndarray:
    """uint8 ``[n, itemsize]``."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).reshape(values.size, values.dtype.itemsize)


def unequal(got: np.ndarray, expected: np.ndarray, strict: bool) -> np.ndarray:
    """Which elements differ; unless ``strict``, one NaN is as good as another."""
    wrong = (raw(got) != raw(expected)).any(axis=1) if got.dtype.itemsize > 1 else raw(got)[:, 0] != raw(expected)[:, 0]
    if wrong.any() and not strict and got.dtype.kind not in "biu":
        parts = [(got.real, expected.real), (got.imag, expected.imag)] if got.dtype.kind == "c" else [(got, expected)]
        same = np.ones(len(wrong), dtype=bool)
        for a, b in parts:
            a, b = a.reshape(-1), b.reshape(-1)
            same &= (raw(a) == raw(b)).all(axis=1) | (np.isnan(a.astype(np.float64)) & np.isnan(b.astype(np.float64)))
        wrong &= ~same
    return wrong


def opposite(values: np.ndarray) -> np.ndarray:
    """Values that differ from the given ones in every element."""
    if values.dtype == bool:
        return ~values
    return np.ascontiguousarray(values.view(np.uint8) ^ 255).view(values.dtype)


def source_tensors(program: Program) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {key: (str(each.array.dtype), each.array.shape) for key, each in program.source.items()}


def target_tensors(program: Program) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {key: (each.dtype, each.shape) for key, each in program.destination.items()}


def layouts_of(program: Program) -> tuple[Layout, Layout]:
    """Random layouts of source and target, from the program's own seed."""
    rng = Random(program.seed + 1)
    needed = [max([1, *(cut.parts for cut in cuts.values())]) for cuts in (program.source_cuts, program.target_cuts)]
    source, target = (rng.randint(least, max(least, MAX_WORLD)) for least in needed)
    return (
        random_layout(rng, source_tensors(program), program.source_cuts, source),
        random_layout(rng, target_tensors(program), program.target_cuts, target),
    )


def expected_shards(layout: Layout, results: Mapping[str, Tensor]) -> list[tuple[np.ndarray, np.ndarray]]:
    """What every shard has to hold, and where it keeps what it has."""
    found = []
    for shard in layout:
        value = results[shard.key]
        keep = np.zeros(shard.size, dtype=bool) if value.keep is None else shard.of(value.keep)
        found.append((shard.of(value.array), keep))
    return found


def compare(
    shard: Shard, got: np.ndarray, before: np.ndarray, expected: np.ndarray, keep: np.ndarray, strict: bool
) -> None:
    wrong = unequal(got, np.where(keep, before, expected), strict)
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise Difference(
            f"{int(wrong.sum())} of {shard.size} elements of {shard} differ, the first at {at} of its storage: "
            f"got {got.reshape(-1)[at]!r}, expected {'what it had' if keep[at] else repr(expected[at])}"
        )


def check_planned(program: Program, totals: Totals) -> None:
    """Compiles and plans a program, carries it out, and compares every element of every target shard.

    Raises:
        Difference: An element is wrong, or is not written exactly once, or too much is moved or computed.
    """
    results = run_program(program.texts, program.source, program.destination)
    source, target = layouts_of(program)
    catalogs = catalog_of(source), catalog_of(target)
    mapping = aoa.compile_program({"aoa_statements": program.texts}, source=catalogs[0], target=catalogs[1])
    expected = expected_shards(target, results)
    before = [opposite(each) for each, _ in expected]
    storages = [each.copy() for each in before]
    values = {key: each.array for key, each in program.source.items()}
    written, kept, moved = carry_out(mapping, (catalogs[0], source), (catalogs[1], target), values, storages)
    computed = scalars = 0
    for shard, storage, old, (value, keep), count, mask in zip(target, storages, before, expected, written, kept):
        compare(shard, storage, old, value, keep, program.moves_only)
        if (mask != keep).any() or (count != ~keep).any():
            raise Difference(f"{shard}: elements are written {count.tolist()} times, kept: {mask.tolist()}")
        totals.elements += shard.size
        totals.kept += int(keep.sum())
        computed += int((~keep).sum())
        # Scalars of several parameters are compared, which is no move.
        scalars += shard.size if state_of(shard.key) in SCALAR_STATES else 0
    computed -= moved
    if program.moves_only and computed > scalars:
        raise Difference(f"{computed} elements are computed that need only be moved")
    totals.targets += len(target)
    totals.moved += moved
    totals.computed += computed


def check_inverse(program: Program, totals: Totals) -> None:
    """Loads in reverse: what that makes of the program's results has to be the source, bit for bit.

    Raises:
        Difference: It is not.
    """
    results = run_program(program.texts, program.source, program.destination)
    source, target = layouts_of(program)
    catalogs = catalog_of(source), catalog_of(target)
    inverse = {"aoa_statements": program.texts, "aoa_config_reverse": True}
    mapping = aoa.compile_program(inverse, source=catalogs[1], target=catalogs[0])
    wanted = [shard.of(program.source[shard.key].array) for shard in source]
    storages = [opposite(each) for each in wanted]
    values = {key: each.array for key, each in results.items()}
    written, _, _ = carry_out(mapping, (catalogs[1], target), (catalogs[0], source), values, storages)
    for shard, storage, value, count in zip(source, storages, wanted, written):
        wrong = unequal(storage, value, strict=program.moves_only)
        if wrong.any() or (count != 1).any():
            raise Difference(f"{shard} is not given back by the inverse {inverse!r}: written {count.tolist()}")
    totals.inverted += 1


def check(program: Program, totals: Totals, whole_system: bool) -> None:
    """All that can be checked about one program."""
    check_planned(program, totals)
    if program.invertible:
        check_inverse(program, totals)
    if whole_system:
        source, target = layouts_of(program)
        results = run_program(program.texts, program.source, program.destination)
        values = {key: each.array for key, each in program.source.items()}
        expected = expected_shards(target, results)
        before = [opposite(each) for each, _ in expected]
        for shard, got, old, (value, keep) in check_system(program.texts, (source, values), (target, before), expected):
            compare(shard, got, old, value, keep, program.moves_only)
        totals.whole_system += 1
    totals.programs += 1
    totals.statements += program.statements
    totals.kinds.update(program.kinds)


def failure_of(program: Program, whole_system: bool) -> str | None:
    """Why a program fails, or None."""
    try:
        with warnings.catch_warnings(), quiet(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            check(program, Totals(), whole_system)
    except Exception as error:  # whatever it is, it is the finding
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} ({where.filename.rsplit('/', 1)[-1]}:{where.lineno}): {error}"
    return None


def is_valid(program: Program) -> bool:
    try:
        run_program(program.texts, program.source, program.destination)
    except (OracleError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return False
    return bool(program.destination)


def kind_of(reason: str) -> str:
    """A failure's reason without the numbers and names of its program."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "#", reason.partition("\n")[0])[:90]


def shrink(program: Program, whole_system: bool = False) -> Program:
    """A smaller program that fails too: without statements, destination keys and source keys that are not needed.

    One that fails only when it is inverted stays as it is: a part of it may have no inverse.
    """
    if program.invertible and failure_of(replace(program, invertible=False), whole_system) is None:
        return program

    def without(field_name: str, item: object) -> Program:
        old = getattr(program, field_name)
        if isinstance(old, list):
            return replace(program, **{field_name: [each for i, each in enumerate(old) if i != item]})
        return replace(program, **{field_name: {key: value for key, value in old.items() if key != item}})

    reason, smaller = kind_of(failure_of(program, whole_system) or ""), True
    while smaller:
        smaller = False
        for name in ("destination", "texts", "source"):
            items: Sequence = getattr(program, name)
            for item in reversed(range(len(items)) if isinstance(items, list) else list(items)):
                candidate = without(name, item)
                cuts = {
                    cut: {key: value for key, value in getattr(candidate, cut).items() if key in keys}
                    for cut, keys in (("source_cuts", candidate.source), ("target_cuts", candidate.destination))
                }
                candidate = replace(candidate, **cuts)
                if is_valid(candidate) and kind_of(failure_of(candidate, whole_system) or "") == reason:
                    program, smaller = candidate, True
    return program


def run_seeds(seeds: range, system_every: int, max_failures: int = 20) -> Totals:
    """Checks the programs of some seeds; every ``system_every``-th goes through the whole system."""
    totals = Totals()
    with warnings.catch_warnings(), quiet(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for seed in seeds:
            program = make_program(seed)
            whole = bool(system_every) and seed % system_every == 0
            try:
                check(program, totals, whole)
                totals.undone[check_undone(seed)] += 1
            except Exception as error:  # whatever it is, it is the finding
                reason = failure_of(program, whole) or error
                totals.failures.append((seed, f"{reason}\n{program.describe()}"))
                if len(totals.failures) >= max_failures:
                    break
    return totals


def _job(arguments: tuple[range, int, int]) -> Totals:
    return run_seeds(*arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.aoa.differential", description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=2000, help="number of programs (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first program (default %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default %(default)s)")
    parser.add_argument(
        "--system-every", type=int, default=100, help="one in so many goes through files too; 0: none (%(default)s)"
    )
    parser.add_argument("--show", type=int, default=3, help="failures shown in full (default %(default)s)")
    parser.add_argument("--shrink", action="store_true", help="shown failures are made smaller first")
    options = parser.parse_args(arguments)
    start, totals = time.perf_counter(), Totals()
    chunks = [
        (range(low, min(low + 500, options.seed + options.count)), options.system_every, 20)
        for low in range(options.seed, options.seed + options.count, 500)
    ]
    if options.jobs == 1:
        for chunk in chunks:
            totals.add(_job(chunk))
    else:
        with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
            for part in pool.imap_unordered(_job, chunks):
                totals.add(part)
            # Leaving the block would end the workers with a signal, about which Paddle prints a page.
            pool.close()
            pool.join()
    print(totals)
    print(f"seconds            {time.perf_counter() - start:.1f}")
    for seed, text in sorted(totals.failures)[: options.show]:
        if options.shrink:
            whole = bool(options.system_every) and seed % options.system_every == 0
            small = shrink(make_program(seed), whole)
            text = f"{failure_of(small, whole)}\n{small.describe()}"
        print(f"\nFAILURE: {text}")
    return 1 if totals.failures else 0


if __name__ == "__main__":
    sys.exit(main())

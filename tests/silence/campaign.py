"""The campaign against silence: ``python -m tests.silence.campaign --count 10000 --jobs 2`` (``make test-silence``).

Each run saves a random model under a random strategy and loads it under another, with or without one mistake of the
caller's. Each mistake says what may come of it: every target bit-equal to an oracle of whole arrays, or an error of the
library's own, with the same text on every rank and, where it promises that, with the targets untouched. Anything else
is a finding. Most runs are of simulated ranks (``mistakes``). One in four is a flow of one process with networks,
optimizers and schedules of Paddle's, or with files, links and positions in the data (``flow``).
One in twenty is of models and optimizers in kept-alive worlds of real ranks (``training``).
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.loading.merged import load_merged_state_dict
from paddle_flexckpt.loading.resharder import reshard_sharded_state_dict
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.property.layouts import Pick
from tests.ramdisk import memory_directory
from tests.silence.judge import Case, Finding, check_targets, contents, error_of, paint
from tests.silence.mistakes import MISTAKES, collect
from tests.silence.models import build, random_model, random_strategy
from tests.silence.totals import Totals

collect()
# One run in so many makes no mistake.
LEGAL_EVERY = 4
# A mistake that a model or a way has no place for is tried with others.
ATTEMPTS = 12
WAYS = ("files", "files", "files", "memory", "merged")


def mistake_of(seed: int) -> str | None:
    """The mistake of a seed; the seeds in between those without go through all in turn."""
    return None if seed % LEGAL_EVERY == 0 else list(MISTAKES)[(seed - seed // LEGAL_EVERY - 1) % len(MISTAKES)]


def case_of(seed: int, root: Path, ways: Sequence[str] = WAYS) -> tuple[str, Case]:
    """The run of a seed, with its mistake made, and the mistake's name."""
    name = mistake_of(seed)
    for attempt in range(ATTEMPTS):
        case = _legal(Pick.from_seed(seed * ATTEMPTS + attempt), root, ways)
        must = MISTAKES[name](case) if name else "equal"
        if name and must is not None:
            case.must = must
            return name, case
        if name is None:
            break
    return "none", _legal(Pick.from_seed(seed * ATTEMPTS), root, ways)


def _legal(pick: Pick, root: Path, ways: Sequence[str]) -> Case:
    """A run without a mistake."""
    model = random_model(pick)
    strategies = random_strategy(pick), random_strategy(pick)
    way = pick.choice(ways)
    if way == "memory" and strategies[0].world != strategies[1].world:
        strategies = (strategies[0],) * 2 if pick.integer(0, 1) else (strategies[1],) * 2
    if way == "merged":
        strategies = (strategies[0], type(strategies[0])(1, 1, 1, "whole", False, 0))
    source, target = build(model, strategies[0], "now"), build(model, strategies[1], None)
    saves = {"save_replicas": bool(pick.integer(0, 3) == 0), "step": pick.choice((None, 7))}
    loads = {"strict": pick.choice(("missing", "missing", True))}
    if way == "files" and pick.integer(0, 4) == 0:
        loads["verify"] = pick.choice(("read", "full"))
    return Case(
        pick, root, model, source, target, way, [{**saves} for _ in source.states], [{**loads} for _ in target.states]
    )


def _save(comm: Any, state: Any, options: dict[str, Any], path: Path) -> Any:
    return save_state_dict(state, options.pop("path", path), comm, **options)


def carry_out(case: Case) -> str:
    """Runs a case; returns "equal" or "error".

    Raises:
        Finding: It came to something else.
    """
    if case.before is not None:
        case.before()
    if case.way == "memory":
        return _reshard(case)
    state, options = case.source.states, case.save
    held = contents(state)
    save = case.save_call or (lambda comm, state, options: _save(comm, state, dict(options), case.path))
    outcomes = SimulatedWorld(len(state)).run_all(lambda c: save(c, state[c.position], options[c.position]))
    error = error_of(outcomes, lambda: contents(state) == held)
    faults = sorted(f"{key!r}: {p.fault}" for key, p in paint(_readable(state)).items() if p.fault)
    if error is not None:
        if not faults and case.must == "equal":
            raise Finding(f"refused to save: {str(error)[:400]}")
        return "error"
    if faults:
        raise Finding(f"saved, though {faults[:3]}")
    if case.after_save is not None:
        case.after_save()
    if case.way == "merged":
        return _merged(case)
    targets = case.target.states
    before = contents(targets)

    def load(comm: Any) -> Any:
        options = dict(case.load[comm.position])
        if case.call is not None:
            return case.call(comm, targets[comm.position], options)
        return load_state_dict(targets[comm.position], options.pop("path", case.path), comm, **options)

    outcomes = SimulatedWorld(len(targets)).run_all(load)
    return _judged(case, outcomes, before)


def _readable(states: Sequence[Any]) -> list[Any]:
    """What of a state the oracle can paint: tensors."""
    return [{k: w for k, w in state.items() if hasattr(getattr(w, "local_tensor", w), "dtype")} for state in states]


def _judged(case: Case, outcomes: Sequence[Any], before: list[dict[str, bytes]]) -> str:
    error = error_of(outcomes, lambda: contents(case.target.states) == before)
    if error is not None:
        if case.must == "equal":
            raise Finding(f"refused: {str(error)[:500]}")
        return "error"
    if case.must == "error":
        raise Finding("accepted without an error")
    try:
        check_targets(case, outcomes, before)
    except Finding:
        if case.instead is None:
            raise
        case.truth = case.instead
        check_targets(case, outcomes, before)
    return "equal"


def _reshard(case: Case) -> str:
    targets, before = case.target.states, contents(case.target.states)
    faults = sorted(f"{key!r}: {p.fault}" for key, p in paint(_readable(case.source.states)).items() if p.fault)

    def job(comm: Any) -> Any:
        options = {k: v for k, v in case.load[comm.position].items() if k != "verify"}
        if case.call is not None:
            return case.call(comm, targets[comm.position], options)
        return reshard_sharded_state_dict(case.source.states[comm.position], targets[comm.position], comm, **options)

    outcomes = SimulatedWorld(len(targets)).run_all(job)
    if faults:
        if error_of(outcomes, lambda: contents(targets) == before) is None:
            raise Finding(f"resharded, though {faults[:3]}")
        return "error"
    return _judged(case, outcomes, before)


def _merged(case: Case) -> str:
    options = {k: v for k, v in case.load[0].items() if k in ("unique_id", "aoa_config", "verify")}
    (targets,) = case.target.states
    try:
        merged = load_merged_state_dict(case.load[0].get("path", case.path), **options)
    except CheckpointError:
        if case.must == "equal":
            raise Finding(f"a merged load was refused: {sys.exc_info()[1]}") from None
        return "error"
    if case.must == "error":
        raise Finding("a merged load was accepted without an error")
    arrays = {key: tensor.numpy() for key, tensor in merged.items()}
    painted = paint((case.truth or case.source).states)
    if not case.made and set(arrays) != set(painted):
        raise Finding(f"keys of the merged load differ: {sorted(set(arrays) ^ set(painted))}")
    for key, array in arrays.items():
        if key in targets and hasattr(targets[key], "local_tensor"):
            target = targets[key].local_tensor
            if target.dtype.itemsize == array.dtype.itemsize and target.shape == array.shape:
                target[...] = array.view(target.dtype)
    case.target.states[0] = {key: weight for key, weight in targets.items() if key in arrays}
    check_targets(case, [None], [dict.fromkeys(arrays, b"nothing")])
    return "equal"


def run_seed(seed: int, root: Path, totals: Totals, ways: Sequence[str] = WAYS) -> None:
    """Runs one seed and counts what came of it."""
    name = "making the case"
    try:
        name, case = case_of(seed, root, ways)
        outcome = carry_out(case)
    except Finding as finding:
        totals.findings.append((seed, name, str(finding)))
    except Exception as error:  # of the campaign itself, or raw in a merged load
        last = traceback.extract_tb(error.__traceback__)[-1]
        totals.findings.append((seed, name, f"{error!r:.300} at {Path(last.filename).name}:{last.lineno}"))
    else:
        getattr(totals, outcome)[name] += 1


def run_seeds(seeds: Sequence[int]) -> Totals:
    """Runs seeds in simulated worlds."""
    logging.getLogger("paddle_flexckpt").setLevel(logging.CRITICAL)
    totals = Totals()
    with memory_directory() as root:
        for seed in seeds:
            directory = root / str(seed)
            directory.mkdir()
            run_seed(seed, directory, totals)
            shutil.rmtree(directory, ignore_errors=True)
    return totals


def _run_chunk(chunk: tuple[str, Sequence[int]]) -> Totals:
    kind, seeds = chunk
    if kind == "states":
        return run_seeds(seeds)
    from tests.silence.flow import run_flows

    return run_flows(seeds)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.silence.campaign", description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=1000, help="number of runs (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first (default %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default %(default)s)")
    parser.add_argument("--show", type=int, default=2, help="findings shown of each mistake (default %(default)s)")
    parser.add_argument("--only", choices=("states", "flows", "training"), help="one kind of runs only")
    options = parser.parse_args(arguments)
    start, totals = time.perf_counter(), Totals()
    count = options.count
    counts = {"flows": count // 4, "training": count // 20} if options.only is None else {options.only: count}
    counts = {"states": count - sum(counts.values()), **counts}
    begin, chunks = options.seed, []
    for kind in ("states", "flows"):
        end = begin + counts.get(kind, 0)
        chunks += [(kind, range(low, min(low + 200, end))) for low in range(begin, end, 200)]
        begin = end
    trained = counts.get("training", 0)
    if options.jobs == 1:
        for chunk in chunks:
            totals.add(_run_chunk(chunk))
    elif chunks:
        with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
            for part in pool.imap_unordered(_run_chunk, chunks):
                totals.add(part)
            # Leaving the block would end the workers with a signal, about which Paddle prints a page.
            pool.close()
            pool.join()
    if trained:
        from tests.silence.controller import run_training

        totals.add(run_training(options.seed, trained))
    print(totals)
    print(f"{'runs':<58}{totals.runs:>8,}")
    print(f"{'seconds':<58}{time.perf_counter() - start:>8.1f}")
    shown: Counter[str] = Counter()
    for seed, name, what in sorted(totals.findings):
        shown[name] += 1
        if shown[name] <= options.show:
            print(f"\nFINDING, seed {seed}, {name}: {what}")
    return 1 if totals.findings else 0


if __name__ == "__main__":
    sys.exit(main())

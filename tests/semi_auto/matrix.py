"""Every strategy of semi-automatic parallelism, and fleet's, saved and loaded into every other.

``python -m tests.semi_auto.matrix [--json FILE] [name ...]`` runs all pairs (or those among the names), prints a line
for each target, and ends with the number of pairs and of tensors that were compared.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import paddle

import paddle_flexckpt as fc
from tests.semi_auto import fleet_training
from tests.semi_auto.strategies import BY_NAME, STRATEGIES
from tests.semi_auto.training import STEPS, build, gather

JOBS = "tests.semi_auto.matrix"
SIZES = "uneven"
AFTER = (STEPS, STEPS + 1)
ALL = {**BY_NAME, **fleet_training.BY_NAME}
#: Sums over ranks round otherwise than sums in one process; measured over all pairs: 2.4e-7 (of about 2).
LOSS = 1e-6
#: Gradients of half precision are rounded before they are added up over ranks.
HALF_LOSS = 1e-2


def make(name):
    """Builds under a strategy of either kind. Collective."""
    if name in fleet_training.BY_NAME:
        return fleet_training.build(name, SIZES)
    # Paddle's cast of half precision gathers what the mesh does not divide, for which a CPU has no kernel.
    return build(name, "even" if BY_NAME[name].half else SIZES)


def everything(name, built):
    """All that a job holds, whole, or None where another side has to tell. Collective."""
    return None if name in fleet_training.BY_NAME else gather(built)


def state(built):
    """The whole state as a user describes it."""
    model = built.model.sharded_state_dict()
    return {**model, **built.optimizer.sharded_state_dict(model)}


def save(name, directory):
    """Trains under a strategy, saves, and goes on.

    Returns:
        The losses after the save. Beside the checkpoint lies ``wanted.npz``, all that was saved, gathered without the
        library; for fleet's strategies, of which there is no such oracle here, as one process loads it.
    """
    fc.install()
    built = make(name)
    fc.check(
        built.model, built.optimizer
    )  # before the first step; the training and all that is saved are as without it
    for i in range(STEPS):
        built.step(i)
    fc.save_state_dict(state(built), directory)
    wanted = everything(name, built)
    if wanted is None:
        wanted = as_arrays(directory)
    if paddle.distributed.get_rank() == 0:
        np.savez(Path(directory) / "wanted.npz", **wanted)
    return [built.step(i) for i in AFTER]


def as_arrays(directory):
    """A checkpoint as whole arrays."""
    single = build("single", SIZES)
    arrays = {key: np.zeros(weight.global_shape, "float32") for key, weight in state(single).items()}
    fc.load_state_dict(arrays, directory)
    return arrays


def load(name, directory, warm):
    """Loads a checkpoint into a strategy and goes on.

    Args:
        name: the strategy.
        directory: of the checkpoint.
        warm: whether the target has been trained before, on other data.

    Returns:
        ``differs``, the keys that are not bit for bit as they were saved; ``tensors``, how many were compared; and
        ``losses`` of the steps that follow.
    """
    fc.install()
    built = make(name)
    if warm:
        built.step(99)
    fc.load_state_dict(state(built), directory)
    wanted = dict(np.load(Path(directory) / "wanted.npz"))
    got = None
    if name in fleet_training.BY_NAME:
        # Read back in one process: what fleet's strategies hold is proved in tests/distributed.
        again = f"{directory}-{name}-again"
        fc.save_state_dict(state(built), again)
        got = as_arrays(again)
    elif warm or not built.strategy.fusion:
        # Before its first step tensor fusion has no buffers, from which the oracle could tell what the states are of.
        got = gather(built)
    differs = [] if got is None else sorted(k for k in {**got, **wanted} if not same(got.get(k), wanted.get(k)))
    losses = [built.step(i) for i in AFTER]
    return {"differs": differs, "tensors": 0 if got is None else len(wanted), "losses": losses}


def move(source, target):
    """Trains under one strategy and moves the live state into another one in the same processes.

    Returns:
        The keys that are not bit for bit what they were, and the losses of both in the steps that follow.
    """
    fc.install()
    here = make(source)
    for i in range(STEPS):
        here.step(i)
    there = make(target)
    fc.reshard_sharded_state_dict(state(here), state(there))
    wanted, got = gather(here), gather(there)
    differs = sorted(k for k in {**got, **wanted} if not same(got.get(k), wanted.get(k)))
    return differs, [there.step(i) for i in AFTER], [here.step(i) for i in AFTER]


def same(array, other):
    """Bit for bit."""
    there = array is not None and other is not None
    return there and array.shape == other.shape and array.tobytes() == other.tobytes()


def pairs(names):
    """``(source, target, warm)``: every second pair into a target that has been trained; fused ones both ways."""
    for i, source in enumerate(names):
        for j, target in enumerate(names):
            fused = getattr(ALL[target], "fusion", False)
            for warm in (False, True) if fused else ((i + j) % 2 == 1,):
                yield source, target, warm


def check(worlds, root, chosen, saved):
    """Saves what is needed once, loads every chosen pair and checks it.

    Args:
        worlds: gives the world of so many ranks.
        root: a directory.
        chosen: of :func:`pairs`.
        saved: the losses after each source's save, if it has been saved under the root; added to.

    Returns:
        ``(problems, tensors, largest difference of losses)``.
    """
    problems, tensors, largest = [], 0, 0.0
    for source, target, warm in chosen:
        directory = Path(root) / source
        if source not in saved:
            directory.mkdir()
            saved[source] = worlds(ALL[source].ranks).run(f"{JOBS}:save", name=source, directory=str(directory))[0]
        reports = worlds(ALL[target].ranks).run(f"{JOBS}:load", name=target, directory=str(directory), warm=warm)
        for report in reports:
            tensors += report["tensors"]
            difference = float(np.abs(np.array(report["losses"]) - saved[source]).max())
            largest = max(largest, difference)
            bound = HALF_LOSS if getattr(ALL[target], "half", False) else LOSS
            if report["differs"] or difference > bound or abs(report["losses"][0] - saved[source][0]) > LOSS:
                problems.append((source, target, warm, report["differs"], difference))
    return problems, tensors, largest


def main(arguments):
    """Runs the matrix; see the module."""
    from paddle_flexckpt.testing import World

    parser = argparse.ArgumentParser()
    parser.add_argument("--json")
    parser.add_argument("names", nargs="*", metavar="name")
    options = parser.parse_args(arguments)
    names = options.names or [s.name for s in STRATEGIES] + list(fleet_training.BY_NAME)
    chosen = sorted(pairs(names), key=lambda pair: names.index(pair[1]))
    worlds: dict[int, World] = {}
    saved: dict[str, list[float]] = {}

    def world(ranks):
        return worlds.setdefault(ranks, World(ranks))

    begun, problems, tensors, largest = time.monotonic(), [], 0, 0.0
    with tempfile.TemporaryDirectory() as root:
        try:
            for target in names:
                mine = [pair for pair in chosen if pair[1] == target]
                found, count, difference = check(world, root, mine, saved)
                problems, tensors, largest = problems + found, tensors + count, max(largest, difference)
                print(f"{target:28} {len(mine):3} loads, {len(found)} problems, {difference:.1e}", flush=True)
        finally:
            for one in worlds.values():
                one.close()
    print(
        f"{len(chosen)} loads of {len(names)} x {len(names)} pairs in {time.monotonic() - begun:.0f} s, {tensors} "
        f"tensors compared, {len(problems)} problems, losses within {largest:.1e}"
    )
    for problem in problems:
        print(*problem)
    if options.json:
        Path(options.json).write_text(json.dumps({"loads": len(chosen), "tensors": tensors, "problems": problems}))
    return len(problems)


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))

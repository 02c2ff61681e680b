"""The runs of the campaign in real processes: worlds of two and four ranks, kept alive, many runs in a call."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from paddle_flexckpt.testing import World
from paddle_flexckpt.testing.reports import WorldError
from tests.property.layouts import Pick
from tests.ramdisk import memory_directory
from tests.silence.totals import Totals

#: World, degree of the save and of the load.
PAIRS = ((2, 1, 2), (2, 2, 1), (2, 2, 2), (2, 1, 1), (4, 2, 4), (4, 4, 2), (4, 1, 4), (4, 2, 2))
PER_CALL = 26
#: Beside so many runs one more is trained with an overlap switch.
OVERLAP_EVERY = 10


def judged(results: list[dict[str, Any]], saved: int, world: int) -> str | None:
    """Why all ranks' results of one run are a finding, or None."""
    first = results[0]
    for step in ("save", "load"):
        errors = [result.get(step) for result in results]
        if not any(errors):
            continue
        if None in errors:
            return f"{step}: only some ranks raised: {errors}"[:500]
        texts = {tuple(error) for error in errors if error}
        if len(texts) > 1 and first["must"] != "error of each":
            return f"{step}: ranks say different things: {sorted(texts)}"[:500]
        kind, text = errors[0]  # type: ignore[misc]
        if step == "load" and kind == "ValidationError" and not all(result["untouched"] for result in results):
            return f"targets were touched before {text}"[:500]
        return f"refused: {text}"[:500] if first["must"] == "equal" else None
    if first["must"].startswith("error") and not (first["name"] == "a rank is a step behind" and saved == world):
        return "accepted without an error"
    for rank, result in enumerate(results):
        wrong = result["wrong"]
        if first["must"] == "either by rank" and rank == 1:
            wrong = [name for name in wrong if not name.endswith("_0")]
        if first["must"] == "states alone":
            wrong = [name for name in wrong if name.endswith("_0")]
        if wrong and not (first["name"] == "a rank is a step behind" and saved == world):
            return f"rank {rank}: {wrong[:4]} are wrong, untouched: {result['untouched']}"
    return None


def calls(seed: int, count: int) -> Iterator[tuple[list[int], tuple[int, int, int]]]:
    for number, low in enumerate(range(seed, seed + count, PER_CALL)):
        yield list(range(low, min(low + PER_CALL, seed + count))), PAIRS[number % len(PAIRS)]


def _answers(world: World, seeds: list[int], saved: int, loaded: int, totals: Totals) -> list[Any]:
    """Every rank's results; a run that ends the job is a finding, and the others are run again."""
    with memory_directory() as root:
        try:
            return world.run("tests.silence.training:runs", root=str(root), seeds=seeds, saved=saved, loaded=loaded)
        except WorldError as error:
            found = re.search(r"\[seed (\d+): (.*?)\] (.*)", str(error))
            if found is None:
                raise
    totals.findings.append((int(found[1]), f"training: {found[2]}, {world.size}: {saved} -> {loaded}", found[3][:500]))
    return _answers(world, [seed for seed in seeds if seed != int(found[1])], saved, loaded, totals)


def run_overlaps(seed: int, count: int, world: World) -> Totals:
    """Train with an overlap of Paddle's, and hand the last step's values out in two random ways; in a world of two."""
    from tests.distributed.test_overlaps import WAYS, leave, numbers

    totals, kinds, ways = Totals(), ("v1", "v2colors", "stage2"), [way for way in WAYS if way != "loaded"]
    truth = {kind: world.run(numbers, kind=kind)[0] for kind in kinds}
    for number in range(seed, seed + count):
        pick = Pick.from_seed(number)
        kind, first = pick.choice(kinds), pick.choice(ways)
        chosen = [first, pick.choice([way for way in ways if way != first])]  # each has a directory of its own
        with memory_directory() as root:
            outcomes = world.run(leave, kind=kind, directory=str(root), ways=chosen)
        digests, losses = truth[kind]
        for way, result in ((way, found[way]) for found in outcomes for way in found):
            wrong = [key for key, value in result["digests"].items() if digests[key] != value]
            if wrong or result["losses"] != losses:
                totals.findings.append((number, "overlap switches", f"{kind}, {way}: {wrong[:4]} are stale"))
                break
        else:
            totals.equal["overlap switches"] += 1
    return totals


def run_training(seed: int, count: int, world: Callable[[int], World] | None = None) -> Totals:
    """Runs seeds in worlds of real ranks.

    Args:
        seed: The first.
        count: How many.
        world: Gives the world of a size; by default worlds of its own.
    """
    totals, own = Totals(), {}

    def started(size: int) -> World:
        if size not in own:
            own[size] = World(size)
        return own[size]

    try:
        for seeds, (size, saved, loaded) in calls(seed, count):
            for results in zip(*_answers((world or started)(size), seeds, saved, loaded, totals)):
                name = f"training: {results[0]['name']}"
                reason = judged(list(results), saved, size)
                if reason is not None:
                    totals.findings.append((results[0]["seed"], f"{name}, {size}: {saved} -> {loaded}", reason))
                else:
                    failed = results[0]["save"] or results[0].get("load")
                    (totals.error if failed else totals.equal)[name] += 1
        overlaps = count // OVERLAP_EVERY
        if overlaps:
            totals.add(run_overlaps(seed + count, overlaps, (world or started)(2)))
    finally:
        for each in own.values():
            each.close()
    return totals

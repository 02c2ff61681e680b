"""Compare parameters that only Paddle's count of layers tells apart: those of one shape could be each other's.

Tested in tests/engine/test_raw_names.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from paddle_flexckpt.catalog import Problem
from paddle_flexckpt.engine.names import HINT, CompatibleNames, Source, Unresolved, bare, is_counted, split_raw

_MOST_PAIRS = 8


def find_guesses(targets: Sequence[Unresolved], source: Source, found: CompatibleNames) -> list[Problem]:
    """Return where a raw name alone decides which of several parameters of one shape a state belongs to.

    Args:
        targets: The targets of one rank that :func:`.find_compatible` looked for.
        source: The source's keys.
        found: What it found.
    """
    guessed = {target: key for target, key in found.by_raw_name.items() if is_counted(key)}
    if not guessed:
        return []
    decided = {key for target, key in found.names.items() if target not in found.by_raw_name}
    theirs = _shapes((key, shape) for key, shape in source.shapes.items() if key not in decided)
    open_targets = [each for each in targets if each.key not in found.names or each.key in found.by_raw_name]
    ours = _shapes((each.raw_name, each.shape) for each in open_targets)
    pairs: dict[tuple[str, ...], dict[str, tuple[Unresolved, str]]] = {}
    for target in targets:
        key = guessed.get(target.key)
        if key is None:
            continue
        there = _parameter(key)
        rivals = _alike(theirs, there)
        if len(rivals) > 1 or len(_alike(ours, _parameter(target.raw_name))) > 1:
            pairs.setdefault(tuple(rivals), {}).setdefault(there, (target, key))
    return [_problem(theirs[rivals[0]], rivals, pairs[rivals], source) for rivals in pairs]


def _shapes(states: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter that has states under counted names: that of its largest state."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in states:
        if is_counted(name):
            parameter = _parameter(name)
            shapes[parameter] = max(shapes.get(parameter, ()), shape, key=lambda each: (prod(each), each))
    return shapes


def _parameter(name: str) -> str:
    raw = split_raw(bare(name))
    return raw.parameter if raw else name


def _path(parameter: str) -> str:
    """Return what stands before a parameter's raw name, as in a nested state dict."""
    return ".".join(parameter.split(".")[:-2])


def _alike(shapes: Mapping[str, tuple[int, ...]], parameter: str) -> list[str]:
    """Return the parameters of one parameter's shape and path, itself among them."""
    path, shape = _path(parameter), shapes[parameter]
    return [each for each in shapes if shapes[each] == shape and _path(each) == path]


def _problem(
    shape: tuple[int, ...], rivals: Sequence[str], pairs: Mapping[str, tuple[Unresolved, str]], source: Source
) -> Problem:
    target, key = next(iter(pairs.values()))
    listed = [f"{_meant(target)!r} from {there!r}" for there, (target, _) in pairs.items()]
    listed += [f"nothing from {there!r}" for there in rivals if there not in pairs]
    more = f" and {len(listed) - _MOST_PAIRS} more" if len(listed) > _MOST_PAIRS else ""
    recorded = source.state_names.get(key)
    remedy = (
        "load with raw_names='trusted' if this process makes the same networks in the same order as the one that "
        f"saved; else {HINT}"
    )
    if recorded:
        remedy = "load the model's state in the same state dict: the source says whose states these are"
    return Problem(
        f"states are named after Paddle's count of layers, and several parameters have the shape {list(shape)}: "
        "nothing says whose they are",
        key=target.key,
        rank=target.rank,
        expected="a record of whose they are, or one parameter of the shape",
        got=", ".join(listed[:_MOST_PAIRS]) + more,
        remedy=remedy,
    )


def _meant(target: Unresolved) -> str:
    """Return the parameter whose state a target is, by the name that says most."""
    names = target.state_names or (target.key,) * bool(target.raw_names)
    return bare(names[0].rpartition(".")[0]) if names else _parameter(target.key)

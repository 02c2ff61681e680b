"""Find states whose parameter follows only from Paddle's count of layers, among parameters of one shape.

Tested in tests/transfer/test_raw_names.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from paddle_flexckpt.catalog import Problem
from paddle_flexckpt.transfer.names import HINT, CompatibleNames, Source, Unresolved, bare, is_counted, split_raw

_MOST_PAIRS = 8
# The path before a parameter's raw name, and its shape.
_Kind = tuple[str, tuple[int, ...]]


def find_guesses(targets: Sequence[Unresolved], source: Source, found: CompatibleNames) -> list[Problem]:
    """Return the problems of states whose raw name alone chooses between several parameters of one shape.

    Args:
        targets: The targets of one rank that :func:`.find_compatible` looked for.
        source: The source's keys.
        found: The result of the search.
    """
    guessed = {target: key for target, key in found.by_raw_name.items() if is_counted(key)}
    if not guessed:
        return []
    decided = {key for target, key in found.names.items() if target not in found.by_raw_name}
    theirs = _kinds((key, shape) for key, shape in source.shapes.items() if key not in decided)
    open_targets = [each for each in targets if each.key not in found.names or each.key in found.by_raw_name]
    ours = _kinds((each.raw_name, each.shape) for each in open_targets)
    alike, own_alike = _alike(theirs), _alike(ours)
    pairs: dict[_Kind, dict[str, tuple[Unresolved, str]]] = {}
    for target in targets:
        key = guessed.get(target.key)
        if key is None:
            continue
        there = _parameter(key)
        kind = theirs[there]
        if len(alike[kind]) > 1 or len(own_alike[ours[_parameter(target.raw_name)]]) > 1:
            pairs.setdefault(kind, {}).setdefault(there, (target, key))
    return [_problem(kind[1], alike[kind], pairs[kind], source) for kind in pairs]


def _kinds(states: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, _Kind]:
    """Return path and shape of each parameter that has states under counted names: the shape of its largest state."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in states:
        if is_counted(name):
            parameter = _parameter(name)
            shapes[parameter] = max(shapes.get(parameter, ()), shape, key=lambda each: (prod(each), each))
    # The path, as in a nested state dict, distinguishes parameters.
    return {parameter: (".".join(parameter.split(".")[:-2]), shape) for parameter, shape in shapes.items()}


def _alike(kinds: Mapping[str, _Kind]) -> dict[_Kind, list[str]]:
    """Return the parameters of each path and shape."""
    alike: dict[_Kind, list[str]] = {}
    for parameter, kind in kinds.items():
        alike.setdefault(kind, []).append(parameter)
    return alike


def _parameter(name: str) -> str:
    raw = split_raw(bare(name))
    return raw.parameter if raw else name


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
    """Return the parameter whose state a target is, by its best name."""
    names = target.state_names or (target.key,) * bool(target.raw_names)
    return bare(names[0].rpartition(".")[0]) if names else _parameter(target.key)

"""One problem for layers that a model has beyond those of its checkpoint, and one for shapes of all layers.

Tested in tests/transfer/test_resolution.py and tests/manager/test_whole_run.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice

from paddle_flexckpt.aoa.parser import quoted
from paddle_flexckpt.catalog import Problem
from paddle_flexckpt.catalog.layer_ranges import LayerRange, layer_ranges, numbered
from paddle_flexckpt.transfer.problems import NO_KEY

_REMEDY = (
    "make the model as it was when it was saved, with its number of layers; or, to leave these layers as they are, "
    "load with strict=False"
)

_OTHERS = ", after the statements for the other names are given: it would leave those as they are too"


def by_layers(problems: Sequence[Problem], targets: Iterable[str], source: Iterable[str]) -> list[Problem]:
    """Return the problems, with one in place of those of all tensors of layers that the source lacks.

    Args:
        problems: The problems of one rank's targets.
        targets: Keys of all its targets.
        source: Keys of the source.
    """
    lacking = {each.key: each for each in problems if each.key is not None and each.what.startswith(NO_KEY)}
    if not lacking:
        return [*problems]
    ours, theirs = _layers(targets), _layers(source)
    further: dict[str, tuple[str, int, str]] = {}
    for key in lacking:
        for stack, number, end in numbered(key):
            there, own = theirs.get(stack, set()), ours[stack]
            # A layer of the source that lies between this rank's, and is not among them, may have got another number.
            is_further = there and number > max(there) and not any(min(own) < each for each in there - own)
            if is_further:
                further[key] = stack, number, end
                break
    has_others = len(lacking) > len(further)
    return [
        *(
            _problem(each, lacking, ours[each.stack], theirs[each.stack], has_others)
            for each in layer_ranges(further.values())
        ),
        *(each for each in problems if each.key not in further),
    ]


def of_all_layers(problems: Sequence[Problem], source: Iterable[str]) -> list[Problem]:
    """Return the problems, with one in place of those of shapes that differ in a layer's number alone.

    Its key and statement have ``$LAYER_ID``. All layers of the source have it, as the statement would change them all.

    Args:
        problems: The problems of one rank's targets.
        source: Keys of the source.
    """
    numbers: dict[tuple[str, str], set[int]] = {}
    for stack, number, end in (each for key in source for each in islice(numbered(key), 1)):
        numbers.setdefault((stack, end), set()).add(number)
    alike: dict[object, list[tuple[Problem, int]]] = {}
    for position, each in enumerate(problems):
        found = next(numbered(each.key or ""), None) if each.code == "FC205" else None
        if found is None:
            alike[position] = [(each, 0)]
            continue
        stack, number, end = found
        key = f"{stack}$LAYER_ID.{end}"
        shared = replace(
            each, key=key, code="FC205", remedy=(each.remedy or "").replace(each.key or "", key), file=None
        )
        alike.setdefault(((stack, end), shared), []).append((each, number))
    merged: list[Problem] = []
    for kind, group in alike.items():
        is_all = isinstance(kind, tuple) and len(group) > 1 and {number for _, number in group} == numbers.get(kind[0])
        merged += [kind[1]] if isinstance(kind, tuple) and is_all else [each for each, _ in group]
    return merged


def _layers(keys: Iterable[str]) -> dict[str, set[int]]:
    """Return the numbers of layers of each stack."""
    found: dict[str, set[int]] = {}
    for key in keys:
        for stack, number, _ in numbered(key):
            found.setdefault(stack, set()).add(number)
    return found


def _problem(each: LayerRange, lacking: dict[str, Problem], own: set[int], there: set[int], others: bool) -> Problem:
    first, hint = lacking[each.keys[0]], ""
    if there - own:  # those of other ranks, or the same layers under other numbers
        hint = (
            "if these layers have other numbers in the source, give AOA statements such as 'NAME -> "
            f"{quoted(each.keys[0])}' with the names there, which states follow; or "
        )
    with_states = any(lacking[key].what != NO_KEY for key in each.keys)
    return replace(
        first,
        what=f"the source has no such layers{', nor their states' if with_states else ''}",
        expected=str(each),
        got=f"layers {min(there)} to {max(there)} of {each.stack}*",
        code="FC201",
        remedy=hint + _REMEDY + _OTHERS * others,
    )

"""One problem for layers that a model has beyond those of its checkpoint, in place of one for each of their tensors.

Tested in tests/transfer/test_resolution.py and tests/manager/test_whole_run.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

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

"""Problems of all optimizer states together: the source has another optimizer's, or none, or another size's.

Tested in tests/remedies/test_optimizers.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from paddle_flexckpt.catalog import Catalog, Problem
from paddle_flexckpt.catalog.errors import listed
from paddle_flexckpt.optimizer_states import ACCUMULATORS, MASTER, SCALARS, is_torch_state, split_state
from paddle_flexckpt.transfer.further_layers import by_layers
from paddle_flexckpt.transfer.names import MASTER_STATE, bare, split_raw
from paddle_flexckpt.transfer.problems import NO_KEY

_NO_KINDS = frozenset({MASTER, MASTER_STATE})
_POWERS = frozenset(f"{name}_0" for name in SCALARS)
_KINDS = frozenset(f"{name}_0" for name in ACCUMULATORS)


def summarised(problems: Mapping[int, Problem], missing: set[int], targets: Catalog, source: Catalog) -> list[Problem]:
    """Return one problem for all states that the source lacks, if it has none of their kinds; else fewer problems.

    Args:
        problems: The problem of each target that has one, by its row.
        missing: The rows of the targets that nothing fills.
        targets: This rank's targets.
        source: All source shards.
    """
    known = {*source.keys, *targets.keys}
    lacking = {row: state_of(targets.keys[row], known) for row in missing if row in problems}
    kinds = _other_kinds(targets, source, known)
    if kinds is not None and all(lacking.values()) and {*lacking.values()} - _NO_KINDS:
        kept = [problem for row, problem in problems.items() if row not in lacking]
        return [*kept, _whole(sorted(lacking), targets, *map(sorted, kinds))]
    return by_layers(_grouped(problems, targets, known), targets.keys, source.keys)


def states_of_another(targets: Catalog, source: Catalog) -> list[int]:
    """Return the rows of all states, masters included, where the source has another optimizer's states, or none."""
    known = {*source.keys, *targets.keys}
    if _other_kinds(targets, source, known) is None:
        return []
    return [row for row, key in enumerate(targets.keys) if state_of(key, known)]


def _other_kinds(targets: Catalog, source: Catalog, known: set[str]) -> tuple[set[str], set[str]] | None:
    """Return the kinds of states of both sides if they are of two optimizers, or the source has none; else None.

    Optimizers may share a kind, as AdamW and NAdam do: then each has kinds that the other lacks.
    """
    kinds = {state_of(key, known) for key in targets.keys}
    wanted = kinds - _NO_KINDS - {""}
    there = {state_of(key, known) for key in source.keys} - _NO_KINDS - {""}
    # A rank may have powers of beta alone, and an optimizer may be loaded by itself.
    are_two = not wanted & there or (wanted - there and (there - wanted) & _KINDS)
    if "" not in kinds or not wanted - _POWERS or not are_two or _has_others(source, targets.keys, known):
        return None
    return wanted, there


def state_of(key: str, known: set[str]) -> str:
    """Return the state of a key, such as ``moment1_0``; "" for a parameter."""
    raw = split_raw(bare(key))
    return split_state(key, known)[1] or (raw.state if raw else "")


def _has_others(source: Catalog, states: Sequence[str], known: set[str]) -> bool:
    """Return whether the source has states under names that are not Paddle's."""
    parameters = {split_state(key, known)[0] for key in states}
    return any(
        is_torch_state(key) or (not state_of(key, known) and key.rpartition(".")[0] in parameters)
        for key in source.keys
    )


def _whole(rows: Sequence[int], targets: Catalog, wanted: list[str], there: list[str]) -> Problem:
    keys = [targets.keys[row] for row in rows]
    remedy = (
        "give optimizer_states='ignore', and the optimizer as now: weights and schedule are loaded, and its states "
        "stay as they are; an optimizer that has not stepped begins with fresh states, so make a new one if this one "
        "has"
    )
    expected = f"{len(keys)} states of this optimizer, such as {listed(keys, 3)}"
    if there:
        return Problem(
            "the source's optimizer states are those of another optimizer",
            expected=f"{expected} (kinds: {', '.join(wanted)})",
            got=f"the kinds {', '.join(there)}",
            code="FC204",
            remedy=remedy,
        )
    return Problem(
        "the source has no optimizer states",
        expected=expected,
        got=f"none among its keys, as where weights alone were saved: {len(wanted)} kinds are missing",
        code="FC204",
        remedy=remedy,
    )


def _grouped(problems: Mapping[int, Problem], targets: Catalog, known: set[str]) -> list[Problem]:
    """Return the problems, with states that are missing or of another shape, as their parameters are, beside these."""
    rows = {targets.keys[row]: row for row, each in problems.items() if each.code == "FC205" or each.what == NO_KEY}
    states: dict[int, list[str]] = {}
    for key, row in rows.items():
        parameter, state = split_state(key, known)
        first = problems.get(rows.get(parameter, -1))
        if not state or first is None or first.what != problems[row].what:
            continue
        # A parameter that is missing has no states, or all of them have other names.
        if first.what == NO_KEY or first.expected == problems[row].expected:
            states.setdefault(rows[parameter], []).append(key)
    folded: Iterable[str] = [key for keys in states.values() for key in keys]
    left_out = {rows[key] for key in folded}
    found = []
    for row, problem in problems.items():
        if row in states:
            names = ", ".join(sorted(split_state(key, known)[1] for key in states[row]))
            link = "nor" if problem.what == NO_KEY else "and those of"
            problem = replace(problem, what=f"{problem.what}, {link} its states {names}")
        if row not in left_out:
            found.append(problem)
    return found

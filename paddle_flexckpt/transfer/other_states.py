"""Problems of all optimizer states together: the source has another optimizer's, or none, or another size's.

Tested in tests/remedies/test_optimizers.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from paddle_flexckpt.catalog import Catalog, Problem
from paddle_flexckpt.catalog.errors import listed
from paddle_flexckpt.optimizer_states import split_state
from paddle_flexckpt.transfer.further_layers import by_layers, of_all_layers
from paddle_flexckpt.transfer.problems import NO_KEY
from paddle_flexckpt.transfer.state_kinds import NO_KINDS, kinds_of_two, state_of


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
    kinds = kinds_of_two(targets, source, known)
    if kinds is not None and all(lacking.values()) and {*lacking.values()} - NO_KINDS:
        kept = [problem for row, problem in problems.items() if row not in lacking]
        return [*kept, _whole(sorted(lacking), targets, *map(sorted, kinds))]
    return of_all_layers(by_layers(_grouped(problems, targets, known), targets.keys, source.keys), source.keys)


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

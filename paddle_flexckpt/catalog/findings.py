"""Findings: what is wrong with a state. The ranks that plan its keys find it, and all ranks report the same.

Tested in tests/catalog/test_key_rows.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from paddle_flexckpt.catalog.errors import Problem, ValidationError
from paddle_flexckpt.catalog.table import Catalog
from paddle_flexckpt.catalog.validate import (
    MAX_ROWS,
    Coverage,
    ReplicaGroups,
    find_shard_problems,
    group_replicas,
    validate_coverage,
)


class Finding(NamedTuple):
    """One thing that is wrong.

    Attributes:
        stage: Findings are reported only if no earlier stage has any.
        kind: Number of the check that found it, within its stage. A report has at most ``MAX_ROWS`` findings of a kind.
        number: The row that it is about, of the catalog of all keys.
        text: The problem.
    """

    stage: int
    kind: int
    number: int
    text: str


class Inspection(NamedTuple):
    """The result of a rank's checks of the shards that it plans.

    Attributes:
        findings: What is wrong with them.
        groups: Their replica groups, if they could be found.
        coverage: Their coverage, if the shards are well-formed.
    """

    findings: list[Finding]
    groups: ReplicaGroups
    coverage: Coverage


def inspect(catalog: Catalog, number: np.ndarray, contradictions: Iterable[tuple[int, Problem]] = ()) -> Inspection:
    """Check by their descriptions that shards make whole tensors.

    Args:
        catalog: All shards of some keys.
        number: int64 ``[n]``, rising: the row that each shard would have in the catalog of all keys.
        contradictions: Contradictions between ranks, each with the row of all keys that it is about.
    """
    found = [Finding(0, 0, row, str(problem)) for row, problem in contradictions]
    for kind, problems in enumerate(find_shard_problems(catalog)):
        found += [Finding(1, kind, int(number[row]), str(problem)) for row, problem in problems]
    if found:
        return Inspection(found, ReplicaGroups(number[:0], np.zeros(1, dtype=np.int64)), Coverage())
    groups = group_replicas(catalog)
    coverage = validate_coverage(catalog, groups)
    first = dict(zip(catalog.key[::-1].tolist(), number[::-1].tolist())) if coverage.problems else {}
    by_name = {catalog.keys[key]: row for key, row in first.items()}
    found = [Finding(2, 0, by_name[problem.key or ""], str(problem)) for problem in coverage.problems]
    return Inspection(found, groups, coverage)


def raise_findings(findings: Iterable[Finding], context: str) -> None:
    """Raise the findings of all ranks, if there are any: the first of each kind, in the order of the rows.

    Raises:
        ValidationError: The same, however many ranks have looked for it.
    """
    texts: list[str] = []
    stage: int | None = None
    count: dict[int, int] = {}
    for each in sorted(findings):
        stage = each.stage if stage is None else stage
        count[each.kind] = count.get(each.kind, 0) + 1
        if each.stage == stage and count[each.kind] <= MAX_ROWS:
            texts.append(each.text)
    if texts:
        raise ValidationError(texts, context)

"""Sources, from which a transfer fills targets, and the task of one rank in a transfer.

Tested in tests/transfer/test_transfer.py and tests/transfer/test_files.py.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paddle_flexckpt.algebra import BoxMaps
from paddle_flexckpt.aoa import TensorMapping
from paddle_flexckpt.catalog import Catalog, Problem, ValidationError
from paddle_flexckpt.transfer.plan import FillPlan, plan_fill
from paddle_flexckpt.transfer.powers import Facts
from paddle_flexckpt.transfer.resolution import Resolution
from paddle_flexckpt.transfer.targets import Memory, Targets, Trial


@dataclass(frozen=True, eq=False)
class Task:
    """The targets of one rank, and their sources.

    Attributes:
        resolution: The source of each target.
        mapping: The mapping of the statements, or None.
        plan: The rows to fill.
    """

    resolution: Resolution
    mapping: TensorMapping | None
    plan: FillPlan

    @property
    def maps(self) -> BoxMaps | None:
        """Return the box maps of keys that statements make by moving elements, or None."""
        return None if self.mapping is None else self.mapping.maps

    @property
    def memory(self) -> Memory:
        """Return the memory of the targets."""
        return self.resolution.targets.memory

    def of_tied(self) -> Task:
        """Return the task that fills, in memory of its own, the rows that share memory and have different sources."""
        same, targets = self.resolution.same_memory, self.resolution.targets
        resolution = replace(self.resolution, targets=replace(targets, memory=Trial(targets)))
        rows = np.asarray(sorted({*same, *same.values()}), dtype=np.int64)
        return Task(resolution, self.mapping, plan_fill(resolution.catalog, rows, self.mapping))

    def refuse_differing(self) -> None:
        """Raise ValidationError if values of a task of tied rows differ, but for elements that a row keeps."""
        problems, catalog = [], self.resolution.targets.catalog
        for row, other in self.resolution.same_memory.items():
            one, two = (self.memory.open(each, each not in self.plan.kept).array for each in (other, row))
            for kept in self.plan.kept.get(row, ()):
                kept.scatter_into(two)[...] = kept.scatter_into(one)
            if one.tobytes() != two.tobytes():
                key, first = catalog.key_name(row), catalog.key_name(other)
                what = f"targets {first!r} and {key!r} are one tied parameter, but the source has two values"
                remedy = f"untie the parameters, or leave out one of the source's keys by the statement '{key} -> _'"
                problems.append(Problem(what, key, int(catalog.rank[row]), code="FC107", remedy=remedy))
        if problems:
            raise ValidationError(problems)

    def keys_of(self, rows: Iterable[int]) -> list[str]:
        """Return the targets' own keys of some rows of the plan, sorted."""
        catalog, band_of = self.resolution.targets.catalog, self.plan.band_of
        return sorted({catalog.key_name(row if band_of is None else int(band_of[row])) for row in rows})


class Source(Facts):
    """A source of targets. :class:`Transfer` calls :meth:`open`, ``prepare``, ``plan`` and ``move``.

    Attributes:
        path: Its path, or another name for it.
        unique_id: The checkpoint's id, or None.
        partial: A text about missing files, if a repair has rebuilt its manifest without them.
        catalog: All of its shards, or those that :meth:`want` chose; known when it is open.
        between_ranks: Whether ranks send each other elements: then each has to know the others' targets.
    """

    path: str
    unique_id: int | None = None
    partial = ""
    catalog: Catalog
    between_ranks = False

    def __init__(self) -> None:
        self.closing = contextlib.ExitStack()

    def open(self) -> dict[str, str]:
        """Open it; return the values that ranks compare: ``checkpoint`` identifies it."""
        return {}

    def want(self, targets: Targets) -> None:
        """Read the rows of all shards from which these targets may be filled; by default the source has all rows."""

    def complete(self) -> bool:
        """Read the rows of all shards; return whether some were not known before."""
        return False

    def used(self, task: Task) -> bytes:
        """Return this rank's message to :meth:`gather_used`: the keys that it uses."""
        return np.packbits(task.resolution.used(self.catalog, task.mapping)).tobytes()

    def gather_used(self, answers: Sequence[bytes]) -> tuple[Sequence[str], np.ndarray]:
        """Return all keys of the source, and bool for each: whether a rank uses it.

        There are no keys if every key of a model is used.

        Args:
            answers: Every rank's :meth:`used`.
        """
        bits = np.bitwise_or.reduce([np.frombuffer(each, dtype=np.uint8) for each in answers])
        return self.catalog.keys, np.unpackbits(bits, count=len(self.catalog.keys)).astype(bool)

    def prepare(self, task: Task) -> tuple[bytes, ...]:
        """Check that this rank can take part in a task, and return its message to the other ranks."""
        raise NotImplementedError

    def plan(self, task: Task, answers: Sequence[tuple[bytes, ...]]) -> None:
        """Plan the exchange between ranks; ``answers``: every rank's :meth:`prepare`, by field."""

    def again(self) -> Source:
        """Return the same source, open and without a plan, for another task before its own."""
        twin = copy.copy(self)
        twin.closing = contextlib.ExitStack()
        return twin

    def move(self, task: Task) -> dict[str, Any]:
        """Fill all rows of the plan; return fields of the report."""
        raise NotImplementedError

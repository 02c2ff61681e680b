"""Sources, from which a transfer fills targets, and the task of one rank in a transfer.

Tested in tests/transfer/test_transfer.py and tests/transfer/test_files.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_flexckpt.algebra import BoxMaps
from paddle_flexckpt.aoa import TensorMapping
from paddle_flexckpt.catalog import Catalog
from paddle_flexckpt.transfer.plan import FillPlan
from paddle_flexckpt.transfer.powers import Facts
from paddle_flexckpt.transfer.resolution import Resolution
from paddle_flexckpt.transfer.targets import Memory, Targets


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

    def move(self, task: Task) -> dict[str, Any]:
        """Fill all rows of the plan; return fields of the report."""
        raise NotImplementedError

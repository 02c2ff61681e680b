"""Sources: what a transfer fills targets from, and the task of one rank in it.

Tested in tests/engine/test_transfer.py and tests/engine/test_files.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paddle_flexckpt.algebra import BoxMaps
from paddle_flexckpt.aoa import TensorMapping
from paddle_flexckpt.catalog import Catalog
from paddle_flexckpt.catalog.wire import encode_catalog
from paddle_flexckpt.engine.plan import FillPlan
from paddle_flexckpt.engine.powers import Facts
from paddle_flexckpt.engine.resolution import Resolution
from paddle_flexckpt.engine.targets import Memory, Targets


@dataclass(frozen=True, eq=False)
class Task:
    """Say what one rank fills, and of what.

    Attributes:
        resolution: How each target is filled.
        mapping: What statements make, or None.
        plan: The rows to fill.
    """

    resolution: Resolution
    mapping: TensorMapping | None
    plan: FillPlan

    @property
    def maps(self) -> BoxMaps | None:
        """Return what keys are made of that statements define by moving elements, or None."""
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
    """Give what targets are filled from. :class:`Transfer` calls :meth:`open`, ``prepare``, ``plan`` and ``move``.

    Attributes:
        path: What to call it.
        unique_id: The checkpoint's id, or None.
        partial: What it lacks of its files, where a repair has rebuilt its manifest without them.
        catalog: All of its shards, or those that :meth:`want` chose; known when it is open.
        between_ranks: Whether ranks send each other what they need: each has to know what the others want.
        keeps_plans: Whether what was planned may serve again, by :meth:`keep` and :meth:`recall`.
    """

    path: str
    unique_id: int | None = None
    partial = ""
    catalog: Catalog
    between_ranks = False
    keeps_plans = False

    def __init__(self) -> None:
        self.closing = contextlib.ExitStack()

    def open(self) -> dict[str, str]:
        """Open it; return what ranks compare of it: ``checkpoint`` says which one it is."""
        return {}

    def want(self, targets: Targets) -> None:
        """Read the rows of all shards from which these targets may be filled; by default the source has all rows."""

    def complete(self) -> bool:
        """Know all shards; return whether it has not known them before."""
        return False

    def describe(self) -> bytes:
        """Return what a plan is made of that this rank knows of it: the same for a source with the same shards."""
        return encode_catalog(replace(self.catalog, files=()))

    def used(self, task: Task) -> bytes:
        """Return what :meth:`gather_used` has to know of each rank: what it fills something from."""
        return np.packbits(task.resolution.used(self.catalog, task.mapping)).tobytes()

    def gather_used(self, answers: Sequence[bytes]) -> tuple[Sequence[str], np.ndarray]:
        """Return all keys, and bool for each: whether a rank uses it; no keys where all of a model's are used.

        ``answers`` has what :meth:`used` gave on every rank.
        """
        bits = np.bitwise_or.reduce([np.frombuffer(each, dtype=np.uint8) for each in answers])
        return self.catalog.keys, np.unpackbits(bits, count=len(self.catalog.keys)).astype(bool)

    def prepare(self, task: Task) -> tuple[bytes, ...]:
        """Check that this rank can take part in a task, and return what the other ranks have to know of it."""
        raise NotImplementedError

    def plan(self, task: Task, answers: Sequence[tuple[bytes, ...]]) -> None:
        """Plan what ranks send each other; ``answers``: by field, what :meth:`prepare` gave on every rank."""

    def keep(self) -> Any:
        """Return what was planned, as :class:`KeptReads`, without anything of this checkpoint alone."""
        raise NotImplementedError

    def recall(self, task: Task, planned: Any) -> bytes:
        """Do what :meth:`prepare` does, but plan: take what :meth:`keep` gave for a source like this one.

        Return what the other ranks need to reach this one, if they send each other anything.
        """
        raise NotImplementedError

    def meet(self, addresses: list[bytes]) -> bool:
        """Take note of what :meth:`recall` gave on every rank; return whether the plan still holds."""
        return True

    def move(self, task: Task) -> dict[str, Any]:
        """Fill all rows of the plan; return what the report says of it, by field."""
        raise NotImplementedError

"""How one rank's targets are filled: the outcome of :mod:`paddle_flexckpt.engine.resolver`.

Tested in tests/engine/test_resolution.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from paddle_flexckpt.aoa import TensorMapping
from paddle_flexckpt.catalog import Catalog, Problem
from paddle_flexckpt.engine.codes import CODE_DTYPES
from paddle_flexckpt.engine.fused import FusedMismatch, mending_statements
from paddle_flexckpt.engine.names import raw_meanings
from paddle_flexckpt.engine.targets import Targets

MASTER_END = ".w_0"

# How a target is filled: from the source key of its own name, of a tied parameter's, or of one that Paddle gives it
# elsewhere; a master weight from its parameter or the other way round; as a statement says; not at all.
OWN, ALIAS, RAW_NAME, MASTER, STATEMENT, MISSING = "own", "alias", "raw name", "master", "statement", "missing"


class Resolved(NamedTuple):
    """Tell how one target is filled.

    Attributes:
        how: One of the words above.
        name: The key of the source, or of what statements make, that fills it; its own where nothing does.
        alias: The name under which it was found, if another than its own.
        cast: ``float32 -> bfloat16``, if values are cast.
        master: The source key, where parameter and master weight stand for each other.
        mismatch: That the source holds it in other parts: it is not filled until statements put them right.
        maybe_fused: The source key, if it may be fused, for all that the source says, and is not as the target is cut.
        problem: Why it cannot be filled.
        completion: The statement that makes it, of what the source says besides; it is not filled without that.
    """

    how: str
    name: str
    alias: str = ""
    cast: str = ""
    master: str = ""
    mismatch: FusedMismatch | None = None
    maybe_fused: str = ""
    problem: Problem | None = None
    completion: str = ""


@dataclass(frozen=True, eq=False)
class Resolution:
    """Tell how one rank's targets are filled.

    Attributes:
        targets: The targets.
        others: How they are filled, by row in rising order, but for those that the source's tensor of their name fills.
        filled: int64, the rows to fill.
        same_memory: For rows that share their memory with an earlier row but are made of something else: that earlier
            row. They are compared, not written.
    """

    targets: Targets
    others: dict[int, Resolved]
    filled: np.ndarray
    same_memory: dict[int, int]

    @cached_property
    def rows(self) -> tuple[Resolved, ...]:
        """Return how each target is filled."""
        return tuple(self.others.get(row) or Resolved(OWN, key) for row, key in enumerate(self.targets.catalog.keys))

    @cached_property
    def catalog(self) -> Catalog:
        """Return the targets, with every key under the name that the mapping or the source has for it."""
        names = list(self.targets.catalog.keys)
        for row, other in self.others.items():
            names[row] = other.name
        return replace(self.targets.catalog, keys=tuple(names))

    def by_key(self, column: str) -> dict[str, Any]:
        """Return a column by the targets' keys, without the rows in which it is empty."""
        number = Resolved._fields.index(column)
        keys = self.targets.catalog.keys
        return {keys[row]: other[number] for row, other in self.others.items() if other[number]}

    @property
    def missing(self) -> list[str]:
        """Return the keys that nothing fills."""
        return [self.targets.catalog.keys[row] for row, other in self.others.items() if other.how == MISSING]

    @property
    def may_be_codes(self) -> bool:
        """Return whether values are cast of a type that codes have: what the source has beside them tells."""
        return any(other.cast.partition(" ")[0] in CODE_DTYPES for other in self.others.values())

    @property
    def mismatches(self) -> list[FusedMismatch]:
        """Return what statements have to put right first."""
        return [other.mismatch for other in self.others.values() if other.mismatch is not None]

    def statements(self, source: Catalog) -> tuple[str, ...]:
        """Return the statements that put the parts of fused targets right, and that make what only facts tell."""
        completions = tuple(sorted(self.by_key("completion").values()))
        if not self.mismatches:
            return completions
        keys = {*source.keys, *(one.key for one in self.mismatches), *self.catalog.keys}
        return (*mending_statements(self.mismatches, keys), *completions)

    def raw_meanings(self) -> dict[str, list[str]]:
        """Return the parameters by the raw names of them that lead to keys of the source."""
        keys, known = self.targets.catalog.keys, self.targets.catalog.state_names
        columns = zip(keys, self.catalog.keys, self.targets.aliases, [known.get(key, ()) for key in keys])
        nothing = {row for row, other in self.others.items() if other.how in (STATEMENT, MISSING)}
        return raw_meanings([names for row, names in enumerate(columns) if row not in nothing])

    def used(self, source: Catalog, mapping: TensorMapping | None) -> np.ndarray:
        """Return bool per key of the source: whether this rank fills something from it."""
        index = {name: i for i, name in enumerate(source.keys)}
        used = np.zeros(len(source.keys), dtype=bool)
        masters = self.by_key("master")
        # All targets count, also those that share memory with one that is filled.
        names = {*self.catalog.keys, *masters}
        if mapping is not None:
            names = mapping.source_names(self.catalog.keys)
            # A parameter and its master weight say the same: where one of them serves, the other is not left over.
            names |= {*masters, *(name[: -len(MASTER_END)] for name in masters.values() if name.endswith(MASTER_END))}
        # A tied parameter that is loaded by two names has its states under one: the others in the source say the same.
        tied = (row for row, others in enumerate(self.targets.aliases) if others and row not in self.others)
        same = {name for row in tied for name in self.targets.aliases[row] if name[-1:].isdigit()}
        names |= {name for name in same if name.rpartition(".")[0] in names}
        used[[index[name] for name in names if name in index]] = True
        return used

    def report(self) -> dict[str, Any]:
        """Return what a LoadReport says of it."""
        return {
            "keys": len(self.filled),
            "missing": self.missing,
            "aliases": self.by_key("alias"),
            "cast": self.by_key("cast"),
            "masters": self.by_key("master"),
            "fused": {one.key: one.summary() for one in self.mismatches},
            "maybe_fused": sorted({*self.by_key("maybe_fused").values()}),
        }

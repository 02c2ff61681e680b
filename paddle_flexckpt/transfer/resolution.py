"""Resolution: the sources of one rank's targets, the result of :mod:`paddle_flexckpt.transfer.resolver`.

Tested in tests/transfer/test_resolution.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from paddle_flexckpt.aoa import TensorMapping
from paddle_flexckpt.catalog import Catalog, Problem
from paddle_flexckpt.transfer.codes import CODE_DTYPES
from paddle_flexckpt.transfer.fused import FusedMismatch, mending_statements
from paddle_flexckpt.transfer.names import raw_meanings
from paddle_flexckpt.transfer.targets import Targets

MASTER_END = ".w_0"

# The way a target is filled: from the source key of its own name, of a tied parameter's name, or of another name of
# Paddle's; a master weight from its parameter or the other way round; by a statement; not at all.
OWN, ALIAS, RAW_NAME, MASTER, STATEMENT, MISSING = "own", "alias", "raw name", "master", "statement", "missing"


class Resolved(NamedTuple):
    """The source of one target.

    Attributes:
        how: One of the words above.
        name: The key of the source, or of the mapping, that fills it; its own key if nothing does.
        alias: The name under which it was found, if it is another one.
        cast: ``float32 -> bfloat16``, if values are cast.
        master: The source key, if a master weight fills its parameter or the other way round.
        mismatch: The difference in fused parts: it is not filled until statements reorder them.
        maybe_fused: The source key, if it may be fused without a record of it, and is cut otherwise than the target.
        problem: Why it cannot be filled.
        completion: The statement that makes it from facts about the source; without that it is not filled.
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
    """The sources of one rank's targets.

    Attributes:
        targets: The targets.
        others: By row in rising order, all targets but those that the source's tensor of the same name fills.
        filled: int64, the rows to fill.
        same_memory: The earlier row by row, for rows with the same memory and another source: they are compared, not
            written.
    """

    targets: Targets
    others: dict[int, Resolved]
    filled: np.ndarray
    same_memory: dict[int, int]

    @cached_property
    def rows(self) -> tuple[Resolved, ...]:
        """Return the source of each target."""
        return tuple(self.others.get(row) or Resolved(OWN, key) for row, key in enumerate(self.targets.catalog.keys))

    @cached_property
    def catalog(self) -> Catalog:
        """Return the targets, with the mapping's or the source's name of every key."""
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
        """Return whether values of a type for codes are cast; keys beside them in the source decide."""
        return any(other.cast.partition(" ")[0] in CODE_DTYPES for other in self.others.values())

    @property
    def mismatches(self) -> list[FusedMismatch]:
        """Return the fused targets that statements have to reorder first."""
        return [other.mismatch for other in self.others.values() if other.mismatch is not None]

    def statements(self, source: Catalog) -> tuple[str, ...]:
        """Return the statements that reorder fused targets, and those from facts about the source."""
        completions = tuple(sorted(self.by_key("completion").values()))
        if not self.mismatches:
            return completions
        keys = {*source.keys, *(one.key for one in self.mismatches), *self.catalog.keys}
        return (*mending_statements(self.mismatches, keys), *completions)

    def raw_meanings(self) -> dict[str, list[str]]:
        """Return parameters by those of their raw names that lead to keys of the source."""
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
            # A parameter and its master weight have the same values: if one is used, the other is not left over.
            names |= {*masters, *(name[: -len(MASTER_END)] for name in masters.values() if name.endswith(MASTER_END))}
        # A tied parameter with two names has its states under one: those under the other are the same.
        tied = (row for row, others in enumerate(self.targets.aliases) if others and row not in self.others)
        same = {name for row in tied for name in self.targets.aliases[row] if name[-1:].isdigit()}
        names |= {name for name in same if name.rpartition(".")[0] in names}
        used[[index[name] for name in names if name in index]] = True
        return used

    def report(self) -> dict[str, Any]:
        """Return the fields of a LoadReport."""
        return {
            "keys": len(self.filled),
            "missing": self.missing,
            "aliases": self.by_key("alias"),
            "cast": self.by_key("cast"),
            "masters": self.by_key("master"),
            "fused": {one.key: one.summary() for one in self.mismatches},
            "maybe_fused": sorted({*self.by_key("maybe_fused").values()}),
        }

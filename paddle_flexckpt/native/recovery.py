"""Find what a load can still read of a damaged checkpoint: intact replicas of what is damaged.

Tested in tests/native/test_replica_reads.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from paddle_flexckpt.catalog import Problem
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.replicas import StoredReplicas

_MAX_NAMED = 3


@dataclass
class Damage:
    """Note what of the data files cannot be read.

    Attributes:
        files: Files that a load refuses as a whole, by number.
        blocks: Blocks of an item that have not their checksums, by row.
    """

    files: set[int] = field(default_factory=set)
    blocks: dict[int, set[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Concern:
    """Name the blocks that a problem is about.

    Attributes:
        rows: The items.
        blocks: Numbers of their blocks; None: all of them.
    """

    rows: list[int]
    blocks: range | None = None


class Recovery:
    """Find out, for every problem, whether replicas make up for it."""

    def __init__(self, manifest: Manifest, damage: Damage) -> None:
        self._manifest = manifest
        self._damage = damage
        self._replicas = StoredReplicas(manifest)

    def annotate(self, problem: Problem, concern: Concern) -> Problem | None:
        """Return the problem with the files that serve a load instead; None if there are not enough of them."""
        files: set[int] = set()
        for row in concern.rows:
            found = self._servers(row, concern.blocks)
            if found is None:
                return None
            files |= found
        names = [self._manifest.catalog.files[file] for file in sorted(files)]
        if not names:  # nothing to be read
            return problem
        listed = ", ".join(names[:_MAX_NAMED]) + (f" and {len(names) - _MAX_NAMED} more" * (len(names) > _MAX_NAMED))
        return replace(problem, remedy=f"{problem.remedy}; until then, a load reads the intact replica in {listed}")

    def _servers(self, row: int, blocks: range | None) -> set[int] | None:
        """Return the files from which a load can read blocks of an item that its own file does not give."""
        catalog, damage = self._manifest.catalog, self._damage
        others = [other for other in self._replicas.others(row) if int(catalog.file[other]) not in damage.files]
        for other in others:
            if other not in damage.blocks:
                return {int(catalog.file[other])}
        files = set()
        wanted: Iterable[int] = range(len(self._manifest.checksums.of_item(row))) if blocks is None else blocks
        for block in wanted:
            other = next((other for other in others if block not in damage.blocks[other]), -1)
            if other < 0:
                return None
            files.add(int(catalog.file[other]))
        return files

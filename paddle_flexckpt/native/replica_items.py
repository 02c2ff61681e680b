"""Find replicas in files: items with the same bytes, so that one can be read where another is damaged.

A save with ``save_replicas=True`` writes every rank's copies. Items count as replicas if they are the same shard and
the manifest has the same checksums for them: then any block of one can replace the block of the other.

Tested in tests/native/test_replica_reads.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from paddle_flexckpt.catalog import CorruptCheckpointError, ReplicaGroups, group_replicas
from paddle_flexckpt.catalog.errors import without_remedy
from paddle_flexckpt.media.backend import Backend
from paddle_flexckpt.native.data_file import other_whole
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.row_files import DamagedCopy

# The most substitutions reported of one key: a tensor that is cut among many ranks can have very many.
_MAX_REPORTED = 3


def remedy_of_copies(manifest: Manifest, file: str) -> str:
    """Return the remedy for a damaged data file that other nodes have copies of; empty if there are none."""
    nodes = manifest.nodes_of(file)
    remedy = (
        f"put a whole copy of {file}, of which the nodes {' and '.join(nodes)} have one each, in place of the damaged "
        "one, or load with storage='per_node', which reads the others"
    )
    return remedy if len(nodes) > 1 else ""


class StoredReplicas:
    """The groups of a checkpoint's items that have the same bytes."""

    def __init__(self, manifest: Manifest) -> None:
        """Compute nothing yet: replicas are needed only when something is damaged."""
        self._manifest = manifest
        self._groups: tuple[ReplicaGroups, np.ndarray] | None = None

    def others(self, item: int) -> list[int]:
        """Return the other items with the same bytes. Those of the next ranks come first, so that readers spread."""
        if self._manifest.foreign:  # without checksums nothing proves that they are equal
            return []
        if self._groups is None:
            groups = group_replicas(self._manifest.catalog)
            position = np.empty(len(groups.order), dtype=np.int64)
            position[groups.order] = np.arange(len(groups.order))
            self._groups = groups, position
        groups, position = self._groups
        at = int(position[item])
        group = int(np.searchsorted(groups.start, at, side="right")) - 1
        low, high = int(groups.start[group]), int(groups.start[group + 1])
        rows = [*groups.order[at + 1 : high].tolist(), *groups.order[low:at].tolist()]
        checksums = self._manifest.checksums
        own = checksums.of_item(item)
        return [row for row in rows if np.array_equal(checksums.of_item(row), own)]


class ReplicaChoice:
    """The choice of the replica that an item is read from, given the damage known so far.

    Attributes:
        damaged: Rows that are known to have damage.
    """

    def __init__(self, backend: Backend, manifest: Manifest, allowed: bool) -> None:
        """Choose no replica yet."""
        self._backend = backend
        self._manifest = manifest
        self._replicas = StoredReplicas(manifest)
        self._allowed = allowed
        self._serving: dict[int, int] = {}
        self.damaged: set[int] = set()
        self._reported: dict[str, dict[tuple[int, int], str]] = {}

    def serving(self, item: int) -> int:
        """Return the row that an item is read from."""
        return self._serving.get(item, item)

    def rows_serving(self, items: np.ndarray) -> np.ndarray:
        """Return the row that each of some items is read from."""
        if not self._serving:
            return items
        return np.asarray([self._serving.get(item, item) for item in items.tolist()], dtype=np.int64)

    def are_damaged(self, rows: np.ndarray) -> np.ndarray:
        """Return bool per row: whether damage in it is known."""
        if not self.damaged:
            return np.zeros(len(rows), dtype=bool)
        return np.isin(rows, list(self.damaged))

    def candidates(self, item: int) -> Iterator[int]:
        """Yield the rows to read an item from, best first."""
        first = self.serving(item)
        yield first
        if self._allowed:
            # The sort is stable. A copy that is damaged in one place may be undamaged in another, so it comes last.
            yield from sorted(self._replicas.others(first), key=lambda row: row in self.damaged)

    def serve(self, item: int, row: int, failures: list[tuple[int, Exception]]) -> None:
        """Note that a row serves for an item from now on, after other rows have been tried."""
        if not failures:
            return
        self._serving[item] = row
        reported = self._reported.setdefault(self._manifest.catalog.key_name(item), {})
        for other, error in failures:
            reported.setdefault((other, row), f"{self._describe(other, error)}; read from {self._where(row)} instead")

    def error(self, failures: list[tuple[int, Exception]], touched: bool) -> Exception:
        """Return the error when none of an item's rows tried can be read; ``touched``: targets may be changed."""
        if len(failures) == 1 and not isinstance(failures[0][1], DamagedCopy):
            return failures[0][1]
        text = "; nor can its replica be read: ".join(self._describe(row, error) for row, error in failures)
        state = " Targets are partly overwritten." if touched else ""
        name = self._manifest.catalog.file_name(failures[0][0]) or ""
        remedy = f"load another checkpoint{other_whole(self._backend, self._manifest)}"
        remedy = remedy_of_copies(self._manifest, name) or remedy
        return CorruptCheckpointError(f"{text}.{state} Remedy (FC305): {remedy}")

    def _where(self, row: int) -> str:
        """Return a row's file, key and rank."""
        catalog = self._manifest.catalog
        path = self._backend.where(catalog.file_name(row) or "")
        return f"file {path!r}, key {catalog.key_name(row)!r}, saved by rank {int(catalog.rank[row])}"

    def _describe(self, row: int, error: Exception) -> str:
        """Return the damage of a copy, without a remedy."""
        if isinstance(error, CorruptCheckpointError):
            return without_remedy(error)
        what = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return f"{self._where(row)}: {what}"

    @property
    def used(self) -> dict[str, str]:
        """Return, by key, the damaged copy and the file that served instead."""
        texts = {}
        for key, reported in sorted(self._reported.items()):
            lines = list(dict.fromkeys(reported.values()))
            more = [f"and {len(lines) - _MAX_REPORTED} more"] if len(lines) > _MAX_REPORTED else []
            texts[key] = "; ".join([*lines[:_MAX_REPORTED], *more])
        return texts

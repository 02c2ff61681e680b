"""Files that each rank reads for itself; of a manifest in partitions, a rank reads only the rows of its own keys.

The names of a rank's targets determine the partitions that it reads, and it keeps the rows of their keys alone. Keys
that no rank uses have to be known too. So each partition has one rank that is responsible for it, by its number, and
the others send that rank the keys that they use. No rank holds all names, unless it has to name one that is not its
own: see :meth:`DirectFiles.complete`.

Tested in tests/loading/test_direct_files.py.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paddle_flexckpt.catalog import EXTRA_STATE
from paddle_flexckpt.catalog.wire import join, split
from paddle_flexckpt.media.backend import Location, map_files
from paddle_flexckpt.media.opening import place_of
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.partitions import partition_of
from paddle_flexckpt.native.verdicts import Verdicts
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.transfer.files import Files
from paddle_flexckpt.transfer.names import MASTER_STATE, counted_names
from paddle_flexckpt.transfer.options import LoadOptions
from paddle_flexckpt.transfer.source import Task
from paddle_flexckpt.transfer.targets import Targets

_MASTER = f".{MASTER_STATE}"


class _Part(NamedTuple):
    """A rank's part of a partition.

    Attributes:
        rows: The rows of the keys that it may need.
        numbers: int64 per key of these rows, its number among all keys of the checkpoint.
        names: All keys of the partition, if this rank is responsible for it; else None.
    """

    rows: Manifest
    numbers: np.ndarray
    names: tuple[str, ...] | None


class DirectFiles(Files):
    """The files of a checkpoint, all of which this and the other ranks can read.

    Where its manifest has partitions, ``manifest`` and ``catalog`` have the rows of some keys. Keys of such a
    checkpoint are numbered in the order of its partitions; the manifest says how many each has.
    """

    def __init__(self, comm: Communicator, location: Location, options: LoadOptions, context: str, reason: str) -> None:
        """Take what describes the load, and why every rank reads for itself; :meth:`open` opens the checkpoint."""
        super().__init__(location, options, reason=reason)
        self._comm, self._asked, self._context = comm, options, context
        # The keys whose rows ``open`` reads. With statements, all (None): they apply to keys that no target has.
        self._first_keys = () if options.aoa_config is None else None
        self._shared: Manifest | None = None
        self._names: dict[int, tuple[str, ...]] = {}

    def want(self, targets: Targets) -> None:
        """Read the partitions of the keys that targets may be filled from, and those that are this rank's own."""
        if self.manifest.has_rows:
            return
        from paddle_flexckpt.native.partition_files import merge_rows  # most checkpoints have no partitions

        self._shared = self.manifest
        counts = [each.keys for each in self.manifest.partitions]
        self._first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        wanted = self._possible_names(targets)
        with self._reading():
            parts = self._read_parts(self._shared, wanted)
        rows = [part.rows for part in parts.values() if len(part.rows.catalog)]
        self._take(merge_rows(self._shared, rows), [part.numbers for part in parts.values()])
        self._names = {number: part.names for number, part in parts.items() if part.names is not None}
        known, counted = {*self.catalog.keys}, {*counted_names(targets.catalog)}
        for key, aliases in zip(targets.catalog.keys, targets.aliases):
            is_there = key in known or not known.isdisjoint(aliases if self._asked.tied_names else ())
            if key in counted or not is_there:
                # The key may exist under a name of another kind; and if it is missing, the error lists what is there.
                self.complete()
                return

    def _possible_names(self, targets: Targets) -> frozenset[str]:
        """Return the keys of a source that targets may be filled from, as far as their own names tell."""
        names = {*targets.catalog.keys}
        if self._asked.tied_names:
            names.update(*targets.aliases)
        if self._asked.master_weights != "exact":
            names |= {name + _MASTER for name in names}
        return frozenset(names)

    def _read_parts(self, manifest: Manifest, wanted: frozenset[str]) -> dict[int, _Part]:
        """Return this rank's part of each partition that it reads, in rising order of their numbers.

        If several reads fail, the error of the first is raised.
        """
        from paddle_flexckpt.native.partition_files import read_partition

        backend, count, first = self.directory.backend, len(manifest.partitions), self._first
        own = range(self._comm.position, count, self._comm.size)

        def read(number: int) -> _Part:
            all_rows = read_partition(backend, manifest, number)
            catalog = all_rows.catalog
            chosen = np.asarray([key in wanted for key in catalog.keys], dtype=bool)
            rows = np.flatnonzero(chosen[catalog.key])
            # In the order of the keys of these rows.
            kept, numbers = all_rows.take(rows), first[number] + np.unique(catalog.key[rows])
            return _Part(kept, numbers, catalog.keys if number in own else None)

        numbers = sorted({*own, *partition_of(sorted(wanted), count).tolist()})
        return dict(zip(numbers, map_files(backend, read, numbers)))

    def _take(self, manifest: Manifest, numbers: Sequence[np.ndarray]) -> None:
        self.manifest, self.catalog = manifest, manifest.catalog
        self._numbers = np.concatenate([*numbers, np.zeros(0, dtype=np.int64)])

    def complete(self) -> bool:
        """Read all rows, if there are others; return whether there are."""
        if self._shared is None or self.manifest.has_rows:
            return False
        from paddle_flexckpt.native.partition_files import read_rows

        with self._reading():
            manifest = read_rows(self.directory.backend, self._shared)
        self._take(manifest, [np.arange(len(manifest.catalog.keys))])
        return True

    def used(self, task: Task) -> bytes:
        """Return nothing where each rank sends the keys that it uses to the ranks responsible for them."""
        if self._shared is None:
            return super().used(task)
        self._used = self._numbers[task.resolution.used(self.catalog, task.mapping)]
        return b""

    def gather_used(self, answers: Sequence[bytes]) -> tuple[Sequence[str], np.ndarray]:
        """Gather which keys are used. Two collectives; if some are not used, one more, which sends all names."""
        if self._shared is None:
            return super().gather_used(answers)
        comm, context = self._comm, self._context
        _, _, used_by_rank = comm.trade(lambda: (None, b"", self._used_by_owner()), context)
        names = [name for number in sorted(self._names) for name in self._names[number]]

        def is_left() -> tuple[np.ndarray, bytes]:
            used = np.asarray([name.startswith(EXTRA_STATE) for name in names], dtype=bool)
            for places in used_by_rank.values():
                used[np.frombuffer(places, dtype="<u4")] = True
            return used, b"" if used.all() else b"+"

        used, answers = comm.together(is_left, context)
        if not any(answers):
            return (), used[:0]
        message = join((np.packbits(used).tobytes(), zlib.compress(json.dumps(names).encode(), 1)))
        _, answers = comm.together(lambda: (None, message), context)
        all_names: list[str] = []
        flags = []
        for bits, text in map(split, answers):
            names_of_rank = json.loads(zlib.decompress(text))
            all_names += names_of_rank
            flags.append(np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=len(names_of_rank)))
        return all_names, np.concatenate(flags).astype(bool)

    def prepare(self, task: Task) -> tuple[bytes, ...]:
        """Do what the base class does; return the place of the directory, and where blocks are noted that are verified.

        Both are empty if there is nobody to share them with.
        """
        super().prepare(task)
        checks = self.reader.checks
        if self._comm.size == 1 or checks is None:
            return b"", b""
        # Of the whole checkpoint, about, as others may read other partitions.
        keys, size = sum([each.keys for each in self.manifest.partitions]), self.manifest.checksums.block_bytes
        blocks = int(self.manifest.file_bytes.sum()) // size + max(keys, len(self.catalog))
        try:
            self._verdicts = checks.verdicts = Verdicts(blocks)
        except OSError:  # this rank compares all blocks that it needs
            return b"", b""
        self.closing.callback(self._verdicts.close)
        return place_of(self.directory.backend).encode(), self._verdicts.address

    def plan(self, task: Task, answers: Sequence[tuple[bytes, ...]]) -> None:
        """Share what is known of blocks with the ranks of this host that see the same directory."""
        places, addresses = answers
        own = places[self._comm.position]
        if own:
            self._verdicts.share([address for place, address in zip(places, addresses) if place == own])

    def _used_by_owner(self) -> dict[int, bytes]:
        """Return the keys that this rank uses, by position of the rank that is responsible for them.

        A key is its number among all keys of the responsible rank, whose partitions are counted one after the other.
        """
        first, size = self._first, self._comm.size
        counts = np.diff(first)
        turns = np.zeros((-(-len(counts) // size), size), dtype=np.int64)
        turns.ravel()[: len(counts)] = counts
        before = (np.cumsum(turns, axis=0) - turns).ravel()
        partition = np.searchsorted(first, self._used, side="right") - 1
        place = (before[partition] + self._used - first[partition]).astype("<u4")
        owner = partition % size
        return {each: place[owner == each].tobytes() for each in np.unique(owner).tolist()}

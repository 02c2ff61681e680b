"""The comparison of blocks with their checksums where they are in the page cache, before a part of them is used.

A file's page cache is the same for all ranks of a host, which share what they have found
(:mod:`paddle_flexckpt.native.verdicts`).

Tested in tests/native/test_verdicts.py and tests/native/test_reader_full.py.
"""

from __future__ import annotations

import numpy as np

from paddle_flexckpt.catalog import CorruptCheckpointError
from paddle_flexckpt.native.checksums import hash_block
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.row_files import RowFiles, give_back
from paddle_flexckpt.native.verdicts import Verdicts, fingerprints


class BlockChecks:
    """The blocks of a checkpoint's rows that are known to be as they were written.

    Attributes:
        verdicts: What ranks of this host know of blocks; None: this rank is alone.
    """

    verdicts: Verdicts | None = None

    def __init__(self, manifest: Manifest, files: RowFiles, damaged: set[int]) -> None:
        """Know nothing yet. Rows in which damage is found are added to ``damaged``."""
        self._manifest, self._files, self._damaged = manifest, files, damaged
        self._known = np.zeros(len(manifest.checksums.values), dtype=bool)

    def are_undamaged(
        self, rows: np.ndarray, begin: np.ndarray, end: np.ndarray, keeps_pages: bool = False
    ) -> np.ndarray:
        """Compare the blocks of byte ranges of rows, each block once; threads may call this at the same time.

        A row without checksums has no blocks. Return bool per range: whether all of its blocks are known to be
        undamaged. ``keeps_pages``: the caller copies out of the memory map next, and gives the pages back.
        """
        checksums, size = self._manifest.checksums, self._manifest.checksums.block_bytes
        first = checksums.first[rows]
        low, high = (np.minimum(first + each, checksums.first[rows + 1]) for each in (begin // size, -(-end // size)))
        count = np.maximum(high - low, 0)
        ends, of_range = np.cumsum(count), np.repeat(np.arange(len(rows)), count)
        numbers = low[of_range] + np.arange(len(of_range)) - (ends - count)[of_range]
        fine = np.ones(len(rows), dtype=bool)
        if not self._known[numbers].all():
            self._compare(np.unique(numbers[~self._known[numbers]]), keeps_pages)
            fine[of_range[~self._known[numbers]]] = False
        return fine

    def _compare(self, numbers: np.ndarray, keeps_pages: bool) -> None:
        """Compare blocks that are not known yet, by their numbers among the checksums.

        Those of a file that cannot be mapped stay unknown.
        """
        checksums, catalog, verdicts = self._manifest.checksums, self._manifest.catalog, self.verdicts
        rows = np.searchsorted(checksums.first, numbers, side="right") - 1
        position = (numbers - checksums.first[rows]) * checksums.block_bytes
        length = np.minimum(checksums.block_bytes, catalog.byte_length[rows] - position).tolist()
        offset, expected = catalog.byte_offset[rows] + position, checksums.values[numbers]
        files, of_row = np.unique(catalog.file[rows], return_inverse=True)
        # Another rank may have opened another file of the name.
        identity = np.asarray([self._identity(file) for file in files.tolist()], dtype=np.uint64)[of_row]
        prints = fingerprints(identity, offset, expected)
        columns = (*(column.tolist() for column in (numbers, rows, offset, expected)), length, prints)
        order = range(len(numbers)) if verdicts is None else verdicts.order(len(numbers))
        for number, row, begin, right, nbytes, fingerprint in ([column[i] for column in columns] for i in order):
            if verdicts is None or not verdicts.has(fingerprint):
                found = self._hash(row, begin, nbytes, keeps_pages)
                if found != right:
                    self._damaged |= set() if found is None else {row}
                    continue
                if verdicts is not None:
                    verdicts.note(fingerprint)
            with self._files.count.lock:
                self._files.count.bytes_verified += 0 if self._known[number] else nbytes
                self._known[number] = True

    def _identity(self, file: int) -> int:
        """Return a number of the open file that one in its place does not have; 0 if it cannot be opened."""
        try:
            return hash_block(repr(self._files.open(file).version).encode())
        except (CorruptCheckpointError, OSError):
            return 0

    def _hash(self, row: int, begin: int, nbytes: int, keeps_pages: bool) -> int | None:
        """Return the checksum of bytes of a row's file; None if it cannot be mapped."""
        mapped = self._files.map(row)
        if mapped is None:
            return None
        found = hash_block(memoryview(mapped)[begin : begin + nbytes])
        if not keeps_pages:
            give_back(mapped, begin, begin + nbytes)
        return found

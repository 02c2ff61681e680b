"""Read blocks of items, verified, from the first replica that is as it was written.

Where a file or a block turns out to be damaged, the same bytes are read from a replica in another file, if the
checkpoint has one. A block is read again whole, so that nothing of the damaged one stays in the target.
Tested in tests/native/test_reader_full.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

from paddle_flexckpt.catalog import CorruptCheckpointError
from paddle_flexckpt.media.backend import Backend, map_files
from paddle_flexckpt.native.checksums import HashThread, VerifyMode, hash_block
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.replicas import ReplicaChoice
from paddle_flexckpt.native.row_files import DamagedCopy, RowFiles

# Blocks that are hashed at once while as many are read: handing them to a thread costs about as much as hashing one.
HASHED_AT_ONCE = 8
# Groups of them that may wait for their hashes: reading gets no further ahead, and meets them while they are in cache.
HASHED_BEHIND = 2


class _Hashed(NamedTuple):
    """Hold blocks that are being hashed: their item, the row read, the number of the first, and their bytes."""

    item: int
    row: int
    first: int
    buffers: list[np.ndarray]
    hashes: Future[list[int]]


class BlockReader:
    """Choose for every read the replica that serves it, and compare whole blocks with their checksums.

    Attributes:
        files: Reads the rows' bytes.
        choice: Says which row serves an item.
        hashing_begun: Groups of blocks that have been read and given to the thread that hashes.
        hashing_done: Those of them that have been compared with their checksums.
    """

    def __init__(self, backend: Backend, manifest: Manifest, verify: VerifyMode, use_replicas: bool) -> None:
        """Open nothing yet; arguments as of :class:`FileReader`."""
        self.files = RowFiles(backend, manifest)
        self.choice = ReplicaChoice(backend, manifest, use_replicas)
        self.hashing_begun = self.hashing_done = 0
        self._backend, self._manifest, self._verify = backend, manifest, verify
        self._block_bytes = manifest.checksums.block_bytes
        self._byte_length = manifest.catalog.byte_length
        self._hashing = HashThread()
        # What has been read into targets and is being hashed, in order.
        self._hashed: deque[_Hashed] = deque()

    def close(self) -> None:
        """Close all files."""
        self._hashing.close()
        self.files.close()

    def check_files(self, items: np.ndarray) -> None:
        """Open the files of items; where one is not as it was, look for a replica. Errors of :meth:`resolve`."""
        items = np.unique(items)
        files = np.unique(self._manifest.catalog.file[items]).tolist()

        def is_usable(file: int) -> bool:
            try:
                self.files.open(file)
            except (CorruptCheckpointError, OSError):
                return False
            return True

        for file, usable in zip(files, map_files(self._backend, is_usable, files)):
            if not usable:
                for item in items[self._manifest.catalog.file[items] == file].tolist():
                    self.resolve(item)

    def resolve(self, item: int) -> int:
        """Return the row to read an item from: itself, or a replica where its file is not as it was.

        Raises:
            CorruptCheckpointError: No file is as it was.
            OSError: The only file cannot be opened.
        """
        row, failures = self.choice.serving(item), list[tuple[int, Exception]]()
        if self.files.is_open(row):
            return row
        for row in self.choice.candidates(item):
            try:
                self.files.open(int(self._manifest.catalog.file[row]))
            except (CorruptCheckpointError, OSError) as error:
                failures.append((row, error))
                continue
            self.choice.serve(item, row, failures)
            return row
        raise self.choice.error(failures, touched=False)

    def needs_whole_blocks(self, row: int) -> bool:
        """Return whether nothing of a row may be read unverified: with ``verify="full"``, or once it is damaged."""
        return self._verify == "full" or self.choice.is_damaged(row)

    def block_length(self, item: int, block: int) -> int:
        """Return the bytes of a block."""
        return min(self._block_bytes, int(self._byte_length[item]) - block * self._block_bytes)

    def read_unverified(self, item: int, position: int, buffer: np.ndarray) -> bool:
        """Fill a buffer from a part of a block, which cannot be verified.

        Returns:
            False where the block has to be read whole instead.
        """
        row, count = self.resolve(item), self.files.count
        if self.needs_whole_blocks(row):
            return False
        before = count.bytes_read
        try:
            self.files.read(row, position, buffer)
        except (DamagedCopy, OSError):
            count.bytes_extra += count.bytes_read - before
            self.choice.note_damage(row)
            return False
        return True

    def read_block(
        self, item: int, block: int, buffer: np.ndarray, failures: Sequence[tuple[int, Exception]] = ()
    ) -> None:
        """Fill a buffer with a block of an item or of a replica, the first that is as it was written.

        Args:
            item: The item.
            block: Number of the block.
            buffer: As long as the block.
            failures: Rows that have been tried, and what was wrong with them.

        Raises:
            CorruptCheckpointError: No copy is as it was written.
            OSError: The only copy cannot be read.
        """
        failures, count = list(failures), self.files.count
        tried = [row for row, _ in failures]
        for row in self.choice.candidates(item):
            if row in tried:
                continue
            before = count.bytes_read
            try:
                self.files.read(row, block * self._block_bytes, buffer)
                if self._verify != "off":
                    self._compare(row, block, len(buffer), hash_block(buffer))
            except (CorruptCheckpointError, DamagedCopy, OSError) as error:
                count.bytes_extra += count.bytes_read - before
                self.choice.note_damage(row)
                failures.append((row, error))
                continue
            self.choice.serve(item, row, failures)
            return
        raise self.choice.error(failures, touched=True)

    def read_blocks(self, item: int, first: int, buffer: np.ndarray) -> None:
        """Fill a buffer with full blocks of an item; each few of them are hashed while the next are read."""
        size, count = self._block_bytes, self.files.count
        buffers = [buffer[start : start + size] for start in range(0, len(buffer), size)]
        for start in range(0, len(buffers), HASHED_AT_ONCE):
            several = buffers[start : start + HASHED_AT_ONCE]
            row, before = self.resolve(item), count.bytes_read
            hashed = None
            if not self.choice.is_damaged(row):
                try:
                    for number, each in enumerate(several, first + start):
                        self.files.read(row, number * size, each)
                    hashed = _Hashed(item, row, first + start, several, self._hashing.hash(several))
                except (DamagedCopy, OSError):
                    count.bytes_extra += count.bytes_read - before
            self.wait_for_hashes(HASHED_BEHIND)
            if hashed is not None:
                self._hashed.append(hashed)
                self.hashing_begun += 1
                continue
            for number, each in enumerate(several, first + start):  # one by one, each with the replicas there are
                self.read_block(item, number, each)

    def wait_for_hashes(self, behind: int = 0) -> None:
        """Wait for blocks that are being hashed, and read damaged ones again.

        Args:
            behind: How many groups of them may still be.

        Raises:
            CorruptCheckpointError: A block does not have its checksum, and there is no replica.
        """
        while len(self._hashed) > behind:
            item, row, first, buffers, hashes = self._hashed.popleft()
            for number, (buffer, got) in enumerate(zip(buffers, hashes.result()), first):
                try:
                    self._compare(row, number, len(buffer), got)
                except DamagedCopy as error:
                    self.files.count.bytes_extra += len(buffer)
                    self.choice.note_damage(row)
                    self.read_block(item, number, buffer, [(row, error)])
            self.hashing_done += 1

    def _compare(self, row: int, block: int, length: int, got: int) -> None:
        """Compare the checksum of a whole block with what it should be."""
        position = block * self._block_bytes
        expected = self._manifest.checksums.of_block(row, block)
        if expected != got:
            raise DamagedCopy(
                f"bytes {position} to {position + length} of the shard (byte "
                f"{int(self._manifest.catalog.byte_offset[row]) + position} of the file) are damaged: expected "
                f"xxh3 {expected:016x}, got {got:016x}"
            )
        self.files.count.bytes_verified += length

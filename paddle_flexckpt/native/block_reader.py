"""Read verified blocks of items, and whatever is made of them, from the replica that is as it was written.

Where a file or a block turns out to be damaged, the same bytes are read from a replica in another file, if the
checkpoint has one. A block is read again whole, so that nothing of the damaged one stays in the target.

Many reads are made in portions: what neighbours in a file is one request, and the checksums of a portion are compared
as arrays. Where a portion cannot be read, its blocks are read one by one.

Tested in tests/native/test_reader.py and tests/native/test_replica_reads.py.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from paddle_flexckpt.catalog import Catalog, CorruptCheckpointError, ValidationError
from paddle_flexckpt.media.backend import Location, map_files
from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.native.checksums import HashThread, VerifyMode, hash_block, hash_blocks, verify_mode
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.replicas import ReplicaChoice
from paddle_flexckpt.native.row_files import DamagedCopy, RowFiles
from paddle_flexckpt.native.stretches import Stretches

# Blocks, or as many bytes, that are hashed at once while as many are read: handing them to a thread costs about as much
# as hashing one.
HASHED_AT_ONCE = 8
# Groups of them that may wait for their hashes: reading gets no further ahead, and meets them while they are in cache.
HASHED_BEHIND = 2
# Stretches that are read at once: as many buffers as the system takes in one request.
STRETCHES_AT_ONCE = 1024
# Blocks kept that were read whole for a part of them; bounds their memory to 16 MiB.
KEPT_BLOCKS = 16


class _Hashed(NamedTuple):
    """Hold whole blocks that are being hashed: which they are, the rows that were read, their bytes, their hashes."""

    blocks: Stretches
    rows: np.ndarray
    buffers: Sequence[memoryview]
    hashes: Future[list[int]]


@dataclass
class _KeptBlock:
    """Hold a verified block: its memory, as long as the longest block, its bytes, and those no target needed."""

    memory: np.ndarray
    length: int
    unused: int


class BlockReader:
    """Choose for every read the replica that serves it, and compare whole blocks with their checksums.

    Attributes:
        files: Reads the rows' bytes.
        choice: Says which row serves an item.
        hashing_begun: Groups of blocks that have been read and given to the thread that hashes.
        hashing_done: Those of them that have been compared with their checksums.
        count: What has been read.
    """

    def __init__(
        self, directory: Location, manifest: Manifest, verify: bool | VerifyMode = "read", use_replicas: bool = True
    ) -> None:
        """Open nothing yet; ``use_replicas`` says whether a replica in another file serves where one is damaged.

        Raises:
            ValidationError: There is no such mode (see :func:`verify_mode`), or there are no checksums for it.
        """
        backend, mode = open_backend(directory), verify_mode(verify)
        if manifest.foreign and mode == "full":
            raise ValidationError(
                f"{backend.path} is another program's checkpoint ({manifest.origin}), without checksums: "
                "verify='full' cannot be kept. Remedy: load it with another mode, and save it again"
            )
        self.files = RowFiles(backend, manifest)
        self.count = self.files.count
        self.choice = ReplicaChoice(backend, manifest, use_replicas)
        self.hashing_begun = self.hashing_done = 0
        self._backend, self._manifest = backend, manifest
        self._verify: VerifyMode = "off" if manifest.foreign else mode
        self._block_bytes = manifest.checksums.block_bytes
        self._byte_length = manifest.catalog.byte_length
        self._hashing = HashThread()
        # What has been read into targets and is being hashed, in order.
        self._hashed: deque[_Hashed] = deque()
        self._kept: OrderedDict[tuple[int, int], _KeptBlock] = OrderedDict()

    @property
    def catalog(self) -> Catalog:
        """Return the items."""
        return self._manifest.catalog

    def close(self) -> None:
        """Close all files."""
        self._hashing.close()
        self.files.close()
        self._kept.clear()

    def check_files(self, items: np.ndarray) -> None:
        """Open the files of items and check their size and save token, before any target is touched.

        Items of a file that is not as it was will be read from their replicas, if all of them have one.

        Raises:
            CorruptCheckpointError: A file is missing, of another size, or of another save.
        """
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

    @property
    def replicas_used(self) -> dict[str, str]:
        """Return what was damaged and which file served instead, by key."""
        return self.choice.used

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
        return self._verify == "full" or row in self.choice.damaged

    def block_length(self, item: int, block: int) -> int:
        """Return the bytes of a block."""
        return min(self._block_bytes, int(self._byte_length[item]) - block * self._block_bytes)

    def read_unverified(self, item: int, position: int, buffer: memoryview | np.ndarray) -> bool:
        """Fill a buffer from a part of a block, which cannot be verified; False: the block has to be read whole."""
        row = self.resolve(item)
        if self.needs_whole_blocks(row):
            return False
        before = self.count.bytes_read
        try:
            self.files.read(row, position, buffer)
        except (DamagedCopy, OSError):
            self.count.bytes_extra += self.count.bytes_read - before
            self.choice.damaged.add(row)
            return False
        return True

    def read_block(
        self, item: int, block: int, buffer: memoryview | np.ndarray, failures: Sequence[tuple[int, Exception]] = ()
    ) -> None:
        """Fill a buffer with a block of an item or of a replica, the first that is as it was written.

        Rows in ``failures`` have been tried.

        Raises:
            CorruptCheckpointError: No copy is as it was written.
            OSError: The only copy cannot be read.
        """
        failures = list(failures)
        tried = [row for row, _ in failures]
        for row in self.choice.candidates(item):
            if row in tried:
                continue
            before = self.count.bytes_read
            try:
                self.files.read(row, block * self._block_bytes, buffer)
                got = None if self._verify == "off" else hash_block(buffer)
                if got is not None and got != self._manifest.checksums.of_block(row, block):
                    raise self._damage(row, block, len(buffer), got)
            except (CorruptCheckpointError, DamagedCopy, OSError) as error:
                self.count.bytes_extra += self.count.bytes_read - before
                self.choice.damaged.add(row)
                failures.append((row, error))
                continue
            self.count.bytes_verified += 0 if got is None else len(buffer)
            self.choice.serve(item, row, failures)
            return
        raise self.choice.error(failures, touched=True)

    def keep_block(self, item: int, block: int, used: int) -> np.ndarray:
        """Return a verified block, valid until the next call; ``used`` says how many bytes of it will be."""
        kept = self._kept.pop((item, block), None)
        if kept is None:
            length = self.block_length(item, block)
            if len(self._kept) < KEPT_BLOCKS:
                memory = np.empty(self._block_bytes, dtype=np.uint8)
            else:
                memory = self._kept.popitem(last=False)[1].memory
            self.read_block(item, block, memory[:length])
            kept = _KeptBlock(memory, length, length)
            self.count.bytes_extra += length
        self._kept[item, block] = kept
        # What several targets want was needed once.
        needed = min(kept.unused, used)
        kept.unused -= needed
        self.count.bytes_extra -= needed
        return kept.memory[: kept.length]

    def fill(self, item: int, position: int, buffer: memoryview | np.ndarray) -> None:
        """Fill a buffer from byte ``position`` of an item, with bytes that are all of one block."""
        block, start = divmod(position, self._block_bytes)
        if len(buffer) == self.block_length(item, block):
            self.read_block(item, block, buffer)
        elif not self.read_unverified(item, position, buffer):
            buffer[:] = self.keep_block(item, block, len(buffer))[start : start + len(buffer)]

    def are_hashed_beside(self, blocks: int) -> bool:
        """Return whether so many blocks are worth being hashed in a thread while the next ones are read."""
        return self._verify != "off" and blocks > HASHED_AT_ONCE

    def read_stretches(self, stretches: Stretches) -> None:
        """Fill memory with stretches of items, in the order of the files; some may still be hashed afterwards.

        Raises:
            CorruptCheckpointError: No copy is as it was written.
            OSError: The only copy cannot be read.
        """
        parts = stretches.cut_at(self._block_bytes)
        catalog = self._manifest.catalog
        order = np.lexsort((catalog.byte_offset[parts.item] + parts.position, catalog.file[parts.item]))
        most = HASHED_AT_ONCE * self._block_bytes
        beside = int(parts.length.sum()) > most
        for portion in parts.take(order).portions(most, STRETCHES_AT_ONCE):
            self._read_portion(portion, beside)

    def _read_portion(self, parts: Stretches, beside: bool) -> None:
        """Fill memory with stretches that are each of one block; ``beside``: the thread hashes them."""
        rows = self.choice.rows_serving(parts.item)
        whole = self._are_whole(parts)
        quick = ~self.choice.are_damaged(rows)
        if self._verify == "full":
            quick &= whole
        if not quick.all():
            self._read_one_by_one(parts.take(~quick))
            parts, rows, whole = parts.take(quick), rows[quick], whole[quick]
        if not len(parts):
            return
        buffers, before = parts.buffers(), self.count.bytes_read
        try:
            self.files.read_neighbours(rows, parts.position, buffers)
        except (CorruptCheckpointError, DamagedCopy, OSError):
            self.count.bytes_extra += self.count.bytes_read - before
            self.wait_for_hashes(HASHED_BEHIND)
            self._read_one_by_one(parts)
            return
        if self._verify == "off":
            return
        if not whole.all():
            buffers = [buffers[i] for i in np.flatnonzero(whole).tolist()]
            parts, rows = parts.take(whole), rows[whole]
        if not beside:
            self._check(parts, rows, buffers, hash_blocks(buffers))
            return
        hashed = _Hashed(parts, rows, buffers, self._hashing.hash(buffers))
        self.wait_for_hashes(HASHED_BEHIND)
        self._hashed.append(hashed)
        self.hashing_begun += 1

    def _are_whole(self, parts: Stretches) -> np.ndarray:
        """Return bool per stretch: whether it is a whole block."""
        rest = self._byte_length[parts.item] - parts.position
        return (parts.position % self._block_bytes == 0) & (parts.length == np.minimum(self._block_bytes, rest))

    def _read_one_by_one(self, parts: Stretches) -> None:
        """Fill memory with stretches that are each of one block, each with the replicas there are."""
        for item, position, buffer in zip(parts.item.tolist(), parts.position.tolist(), parts.buffers()):
            self.fill(item, position, buffer)

    def wait_for_hashes(self, behind: int = 0) -> None:
        """Wait until at most ``behind`` groups of blocks are being hashed, and read damaged ones again.

        Raises:
            CorruptCheckpointError: A block does not have its checksum, and there is no replica.
        """
        while len(self._hashed) > behind:
            blocks, rows, buffers, hashes = self._hashed.popleft()
            self._check(blocks, rows, buffers, hashes.result())
            self.hashing_done += 1

    def _check(self, blocks: Stretches, rows: np.ndarray, buffers: Sequence[memoryview], got: list[int]) -> None:
        """Compare the checksums of whole blocks with what they should be, and read damaged ones again."""
        number = blocks.position // self._block_bytes
        expected = self._manifest.checksums.of_blocks(rows, number)
        wrong = np.flatnonzero(expected != np.asarray(got, dtype=np.uint64))
        self.count.bytes_verified += int(blocks.length.sum()) - int(blocks.length[wrong].sum())
        for i in wrong.tolist():
            row, block = int(rows[i]), int(number[i])
            error = self._damage(row, block, len(buffers[i]), got[i])
            self.count.bytes_extra += len(buffers[i])
            self.choice.damaged.add(row)
            self.read_block(int(blocks.item[i]), block, buffers[i], [(row, error)])

    def _damage(self, row: int, block: int, length: int, got: int) -> DamagedCopy:
        """Return what is wrong with a whole block whose checksum is another than it should be."""
        position = block * self._block_bytes
        return DamagedCopy(
            f"bytes {position} to {position + length} of the shard (byte "
            f"{int(self._manifest.catalog.byte_offset[row]) + position} of the file) are damaged: expected "
            f"xxh3 {self._manifest.checksums.of_block(row, block):016x}, got {got:016x}"
        )

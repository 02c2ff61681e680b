"""Read verified blocks of items, and values computed from them, from a replica that is undamaged.

Nothing is read out of a block before the whole block has been compared with its checksum. On a file system a block that
is needed in part is hashed in the page cache, once for all ranks of the host (:mod:`paddle_flexckpt.native.verdicts`);
from an object store it is fetched whole.

If a file or a block turns out to be damaged, the same bytes are read from a replica in another file, if the checkpoint
has one. The block is then read again as a whole, so that nothing of the damaged one stays in the target.

Many reads are made in portions, several at a time: neighbours in a file are one request, and the thread that has read a
portion hashes it while it is in cache, and compares its checksums as arrays. If a portion cannot be read, its blocks
are read one by one.

Tested in tests/native/test_reader.py and tests/native/test_replica_reads.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.media.backend import Location, map_files
from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.native.block_checks import BlockChecks
from paddle_flexckpt.native.checksums import VerifyMode, hash_block, hash_blocks, verify_mode
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.read_planner import ReadPlanner
from paddle_flexckpt.native.replica_items import ReplicaChoice
from paddle_flexckpt.native.row_files import DamagedCopy, RowFiles, Runs
from paddle_flexckpt.native.stretches import ADDRESSES, FIRST_ADDRESS, Stretches

# Blocks kept that were read as a whole though only a part was needed; their memory is at most 16 MiB.
KEPT_BLOCKS = 16


class Portions:
    """A division of stretches, each of one block, into portions, which one thread reads at once.

    Rows, checksums and places in files are looked up once for all of them.

    Attributes:
        parts: The stretches.
        rows: int64 per stretch, the row that serves.
        whole: bool per stretch: whether it is a whole block.
        hashed: bool per stretch: whether it is compared with its checksum when it has been read.
        expected: That checksum, per stretch.
        edges: The first stretch of each portion, and the number of stretches.
        runs: Where the stretches are in files.
    """

    def __init__(
        self,
        parts: Stretches,
        rows: np.ndarray,
        whole: np.ndarray,
        hashed: np.ndarray,
        expected: list[int],
        edges: list[int],
        runs: Runs,
    ) -> None:
        """Take the attributes."""
        self.parts, self.rows, self.whole, self.hashed = parts, rows, whole, hashed
        self.expected, self.edges, self.runs = expected, edges, runs
        self.count = len(edges) - 1
        begin = parts.address - FIRST_ADDRESS
        self._begin, self._end = begin.tolist(), (begin + parts.length).tolist()

    def buffers(self, first: int, last: int, address: int) -> list[memoryview]:
        """Return the memory of some stretches. Their addresses are relative to ``address``."""
        begin, end, memory = self._begin[first:last], self._end[first:last], ADDRESSES
        if address:
            return [memory[low + address : high + address] for low, high in zip(begin, end)]
        return [memory[low:high] for low, high in zip(begin, end)]


@dataclass
class _KeptBlock:
    """A verified block.

    Attributes:
        memory: A buffer as long as the longest block.
        length: The number of bytes of the block.
        unused: The number of these that no target has needed yet. ``bytes_extra`` counts them.
    """

    memory: np.ndarray
    length: int
    unused: int


class BlockReader(ReadPlanner):
    """A reader that chooses a replica for every read and compares whole blocks with their checksums.

    Attributes:
        catalog: The items.
        files: The reader of the rows' bytes.
        choice: The choice of the row that serves an item.
        count: What has been read.
        checks: The comparison of blocks that are needed in part, where they are in the page cache; None elsewhere.
    """

    def __init__(
        self, directory: Location, manifest: Manifest, verify: bool | VerifyMode = "read", use_replicas: bool = True
    ) -> None:
        """Open nothing yet; ``use_replicas``: whether a replica in another file replaces a damaged one."""
        backend, mode = open_backend(directory), verify_mode(verify)
        if manifest.foreign and mode == "full":
            raise ValidationError(
                f"{backend.path} is another program's checkpoint ({manifest.origin}), without checksums: "
                "verify='full' cannot be kept. Remedy (FC101): load it with another mode, and save it again"
            )
        self.catalog = manifest.catalog
        self._verify: VerifyMode = "off" if manifest.foreign else mode
        columns = self.catalog.file, self.catalog.byte_offset, self.catalog.byte_length
        # Blocks in the page cache are compared where they are. Others are fetched whole.
        fetches = self._verify == "full" or (self._verify == "read" and not backend.has_path)
        super().__init__(*columns, manifest.checksums.block_bytes, needs_blocks=fetches)
        self.files = RowFiles(backend, manifest)
        self.count = self.files.count
        self.choice = ReplicaChoice(backend, manifest, use_replicas)
        in_place = self._verify == "read" and not fetches
        self.checks = BlockChecks(manifest, self.files, self.choice.damaged) if in_place else None
        self._backend, self._manifest = backend, manifest
        # Values that are computed at reading have no checksums.
        self._has_checksums = np.diff(manifest.checksums.first) > 0
        self._kept: OrderedDict[tuple[int, int], _KeptBlock] = OrderedDict()

    def close(self) -> None:
        """Close all files."""
        self.files.close()
        self._kept.clear()

    def check_files(self, items: np.ndarray) -> None:
        """Open the files of items and check their size and save token, before any target is touched.

        Items of a file that has changed will be read from their replicas, if all of them have one.

        Raises:
            CorruptCheckpointError: A file is missing, of another size, or of another save.
        """
        items = np.unique(items)
        files = np.unique(self.catalog.file[items]).tolist()

        def is_usable(file: int) -> bool:
            try:
                self.files.open(file)
            except (CorruptCheckpointError, OSError):
                return False
            return True

        for file, usable in zip(files, map_files(self._backend, is_usable, files)):
            if not usable:
                for item in items[self.catalog.file[items] == file].tolist():
                    self.resolve(item)

    @property
    def damaged_files(self) -> list[str]:
        """Return the names of files in which damage has been found."""
        return sorted({self.catalog.file_name(row) or "" for row in self.choice.damaged})

    @property
    def replicas_used(self) -> dict[str, str]:
        """Return, by key, the damaged copy and the file that served instead."""
        return self.choice.used

    def resolve(self, item: int) -> int:
        """Return the row to read an item from: itself, or a replica if its file has changed.

        Raises:
            CorruptCheckpointError: All files have changed.
            OSError: The only file cannot be opened.
        """
        row, failures = self.choice.serving(item), list[tuple[int, Exception]]()
        if self.files.is_open(row):
            return row
        for row in self.choice.candidates(item):
            try:
                self.files.open(int(self.catalog.file[row]))
            except (CorruptCheckpointError, OSError) as error:
                failures.append((row, error))
                continue
            self.choice.serve(item, row, failures)
            return row
        raise self.choice.error(failures, touched=False)

    def may_read_parts(self, rows: np.ndarray, begin: np.ndarray, end: np.ndarray, mapped: bool = False) -> np.ndarray:
        """Return bool per byte range of a row: whether it may be read as it is. If not, its blocks are read whole.

        ``mapped``: it is copied out of a memory map next.
        """
        fine = ~self.choice.are_damaged(rows)
        if self.checks is not None:
            fine &= self.checks.are_undamaged(rows, begin, end, mapped)
        elif self._verify != "off":
            fine &= ~self._has_checksums[rows]
        return fine

    def may_read_part(self, row: int, begin: int, end: int, mapped: bool = False) -> bool:
        """Return whether a byte range of a row may be read as it is."""
        rows, first, last = (np.asarray([each], dtype=np.int64) for each in (row, begin, end))
        return bool(self.may_read_parts(rows, first, last, mapped)[0])

    def block_length(self, item: int, block: int) -> int:
        """Return the bytes of a block."""
        return min(self.block_bytes, int(self.byte_length[item]) - block * self.block_bytes)

    def read_part(self, item: int, position: int, buffer: memoryview | np.ndarray) -> bool:
        """Fill a buffer from a part of a block; False: the block has to be read whole."""
        row = self.resolve(item)
        if not self.may_read_part(row, position, position + len(buffer)):
            return False
        try:
            self.files.read(row, position, buffer)
        except (DamagedCopy, OSError):
            self.choice.damaged.add(row)
            return False
        return True

    def read_block(
        self, item: int, block: int, buffer: memoryview | np.ndarray, failures: Sequence[tuple[int, Exception]] = ()
    ) -> None:
        """Fill a buffer with a block of an item or of a replica, the first that is undamaged.

        Rows in ``failures`` have been tried.

        Raises:
            CorruptCheckpointError: All copies are damaged.
            OSError: The only copy cannot be read.
        """
        failures = list(failures)
        tried = [row for row, _ in failures]
        for row in self.choice.candidates(item):
            if row in tried:
                continue
            try:
                self.files.read(row, block * self.block_bytes, buffer)
                got = hash_block(buffer) if self._verify != "off" and self._has_checksums[row] else None
                if got is not None and got != self._manifest.checksums.of_block(row, block):
                    self.count.add(bytes_extra=len(buffer))
                    raise self._damage(row, block, len(buffer), got)
            except (CorruptCheckpointError, DamagedCopy, OSError) as error:
                self.choice.damaged.add(row)
                failures.append((row, error))
                continue
            self.count.add(bytes_verified=0 if got is None else len(buffer))
            self.choice.serve(item, row, failures)
            return
        raise self.choice.error(failures, touched=True)

    def keep_block(self, item: int, block: int, used: int) -> np.ndarray:
        """Return a verified block, valid until the next call; ``used`` is the number of its bytes that will be used."""
        kept = self._kept.pop((item, block), None)
        if kept is None:
            length = self.block_length(item, block)
            if len(self._kept) < KEPT_BLOCKS:
                memory = np.empty(self.block_bytes, dtype=np.uint8)
            else:
                memory = self._kept.popitem(last=False)[1].memory
            self.read_block(item, block, memory[:length])
            kept = _KeptBlock(memory, length, length)
            self.count.add(bytes_extra=length)
        self._kept[item, block] = kept
        # Bytes that several targets need count once.
        needed = min(kept.unused, used)
        kept.unused -= needed
        self.count.add(bytes_extra=-needed)
        return kept.memory[: kept.length]

    def fill(self, item: int, position: int, buffer: memoryview | np.ndarray) -> None:
        """Fill a buffer from byte ``position`` of an item, with bytes that are all of one block."""
        block, start = divmod(position, self.block_bytes)
        if len(buffer) == self.block_length(item, block):
            self.read_block(item, block, buffer)
        elif not self.read_part(item, position, buffer):
            buffer[:] = self.keep_block(item, block, len(buffer))[start : start + len(buffer)]

    def read_parts(self, parts: Stretches) -> None:
        """Read stretches that are each of one block, in the order of the files; several threads read."""
        portions = self.portions(parts)
        self.files.threads.each(lambda i: self.read_portion(portions, i), portions.count)

    def portions(self, parts: Stretches) -> Portions:
        """Return the portions of stretches that are each of one block."""
        rows = self.choice.rows_serving(parts.item)
        whole = self._are_whole(parts)
        hashed = whole & (self._verify != "off") & self._has_checksums[rows]
        expected = np.zeros(len(parts), dtype=object)
        number = parts.position[hashed] // self.block_bytes
        expected[hashed] = self._manifest.checksums.of_blocks(rows[hashed], number).tolist()
        edges, columns = self.divide(rows, parts)
        runs = Runs(*(column.tolist() for column in columns))
        return Portions(parts, rows, whole, hashed, expected.tolist(), edges, runs)

    def read_portion(self, portions: Portions, number: int, address: int = 0) -> None:
        """Fill memory with the stretches of a portion, and verify these. Threads may call this at the same time.

        The addresses of the stretches are relative to ``address``, which is that of the memory.

        Raises:
            CorruptCheckpointError: No copy is as it was written.
            OSError: The only copy cannot be read.
        """
        first, last = portions.edges[number : number + 2]
        buffers, rows = portions.buffers(first, last, address), portions.rows[first:last]
        quick = portions.whole[first:last]
        if not quick.all():
            part = ~quick
            begin = portions.parts.position[first:last][part]
            end = begin + portions.parts.length[first:last][part]
            quick = quick.copy()
            quick[part] = self.may_read_parts(rows[part], begin, end)
        if self.choice.damaged:  # rows that are known to be damaged are not read any more
            quick = quick & ~self.choice.are_damaged(rows)
        if not quick.all():
            self._read_one_by_one(portions, first, np.flatnonzero(~quick), buffers)
            left = np.flatnonzero(quick)
            for run in filter(len, np.split(left, np.flatnonzero(np.diff(left) != 1) + 1)):
                begin, end = int(run[0]), int(run[-1]) + 1
                self._read_some(portions, first + begin, first + end, buffers[begin:end])
            return
        self._read_some(portions, first, last, buffers)

    def _read_some(self, portions: Portions, first: int, last: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers with stretches in which no damage is known, and verify these."""
        try:
            self.files.read_runs(portions.runs, first, last, buffers)
        except (CorruptCheckpointError, DamagedCopy, OSError):
            self._read_one_by_one(portions, first, np.arange(last - first), buffers)
            return
        hashed = portions.hashed[first:last]
        if not hashed.any():
            return
        expected = portions.expected[first:last]
        if not hashed.all():
            members = np.flatnonzero(hashed).tolist()
            buffers, expected = [buffers[i] for i in members], [expected[i] for i in members]
        got = hash_blocks(buffers)
        if got == expected:
            self.count.add(bytes_verified=sum(map(len, buffers)))
        else:
            self._mend(portions, (first + np.flatnonzero(hashed)).tolist(), buffers, expected, got)

    def _mend(
        self,
        portions: Portions,
        numbers: Sequence[int],
        buffers: Sequence[memoryview],
        expected: Sequence[int],
        got: Sequence[int],
    ) -> None:
        """Read blocks again whose checksums differ."""
        with self.count.lock:
            for number, buffer, right, found in zip(numbers, buffers, expected, got):
                if found == right:
                    self.count.add(bytes_verified=len(buffer))
                    continue
                row, block = int(portions.rows[number]), int(portions.parts.position[number]) // self.block_bytes
                error = self._damage(row, block, len(buffer), found)
                self.count.add(bytes_extra=len(buffer))
                self.choice.damaged.add(row)
                self.read_block(int(portions.parts.item[number]), block, buffer, [(row, error)])

    def _are_whole(self, parts: Stretches) -> np.ndarray:
        """Return bool per stretch: whether it is a whole block."""
        rest = self.byte_length[parts.item] - parts.position
        return (parts.position % self.block_bytes == 0) & (parts.length == np.minimum(self.block_bytes, rest))

    def _read_one_by_one(
        self, portions: Portions, first: int, members: np.ndarray, buffers: Sequence[memoryview]
    ) -> None:
        """Fill buffers with the stretches after a first one, each from the replicas that exist."""
        item, position = portions.parts.item, portions.parts.position
        with self.count.lock:
            for i in members.tolist():
                self.fill(int(item[first + i]), int(position[first + i]), buffers[i])

    def _damage(self, row: int, block: int, length: int, got: int) -> DamagedCopy:
        """Return what is wrong with a whole block whose checksum differs."""
        position = block * self.block_bytes
        return DamagedCopy(
            f"bytes {position} to {position + length} of the shard (byte "
            f"{int(self.catalog.byte_offset[row]) + position} of the file) are damaged: expected "
            f"xxh3 {self._manifest.checksums.of_block(row, block):016x}, got {got:016x}"
        )

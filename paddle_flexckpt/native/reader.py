"""Read exactly the bytes that strided copies need, from files into memory, verified where whole blocks pass.

Where the file side of a copy is contiguous, it is read with ``pread`` block by block, straight into the target where
that is contiguous too. Short scattered runs (a column cut) are copied out of a memory map: one numpy call instead of a
system call per run.

With ``verify="full"`` no byte reaches a target unverified: a block of which only a part is needed is read whole, and
the part is copied out of it; the latest such blocks are kept, as the next run or the next target often goes on there.

Where a file or a block turns out to be damaged, the same bytes are read from a replica in another file, if the
checkpoint has one. A block is read again whole, so that nothing of the damaged one stays in the target.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from paddle_flexckpt.algebra import StridedCopy
from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError, dtype_of
from paddle_flexckpt.media.backend import Location, map_files
from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.native.checksums import HashThread, VerifyMode, hash_block, verify_mode
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.replicas import ReplicaChoice
from paddle_flexckpt.native.row_files import DamagedCopy, RowFiles
from paddle_flexckpt.native.wanted import wanted_bytes

# A run at least this long is worth a system call of its own (a pread costs about as much as copying 16 KiB).
MIN_PREAD_BYTES = 16 << 10
# Blocks that are hashed at once while as many are read: handing them to a thread costs about as much as hashing one.
HASHED_AT_ONCE = 8
# Groups of them that may wait for their hashes: reading gets no further ahead, and meets them while they are in cache.
HASHED_BEHIND = 2
# Blocks kept that were read whole for a part of them; bounds their memory to 16 MiB.
KEPT_BLOCKS = 16


class _Hashed(NamedTuple):
    """Hold blocks that are being hashed: their item, the row read, the number of the first, and their bytes."""

    item: int
    row: int
    first: int
    buffers: list[np.ndarray]
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
        self._staging = np.empty(self._block_bytes, dtype=np.uint8)
        self._kept: OrderedDict[tuple[int, int], _KeptBlock] = OrderedDict()

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

    def read_unverified(self, item: int, position: int, buffer: np.ndarray) -> bool:
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
        self, item: int, block: int, buffer: np.ndarray, failures: Sequence[tuple[int, Exception]] = ()
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
                if self._verify != "off":
                    self._compare(row, block, len(buffer), hash_block(buffer))
            except (CorruptCheckpointError, DamagedCopy, OSError) as error:
                self.count.bytes_extra += self.count.bytes_read - before
                self.choice.damaged.add(row)
                failures.append((row, error))
                continue
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

    def read_blocks(self, item: int, first: int, buffer: np.ndarray) -> None:
        """Fill a buffer with full blocks of an item; each few of them are hashed while the next are read."""
        size = self._block_bytes
        buffers = [buffer[start : start + size] for start in range(0, len(buffer), size)]
        for start in range(0, len(buffers), HASHED_AT_ONCE):
            several = buffers[start : start + HASHED_AT_ONCE]
            row, before = self.resolve(item), self.count.bytes_read
            hashed = None
            if row not in self.choice.damaged:
                try:
                    for number, each in enumerate(several, first + start):
                        self.files.read(row, number * size, each)
                    hashed = _Hashed(item, row, first + start, several, self._hashing.hash(several))
                except (DamagedCopy, OSError):
                    self.count.bytes_extra += self.count.bytes_read - before
            self.wait_for_hashes(HASHED_BEHIND)
            if hashed is not None:
                self._hashed.append(hashed)
                self.hashing_begun += 1
                continue
            for number, each in enumerate(several, first + start):  # one by one, each with the replicas there are
                self.read_block(item, number, each)

    def wait_for_hashes(self, behind: int = 0) -> None:
        """Wait until at most ``behind`` groups of blocks are being hashed, and read damaged ones again.

        Raises:
            CorruptCheckpointError: A block does not have its checksum, and there is no replica.
        """
        while len(self._hashed) > behind:
            item, row, first, buffers, hashes = self._hashed.popleft()
            for number, (buffer, got) in enumerate(zip(buffers, hashes.result()), first):
                try:
                    self._compare(row, number, len(buffer), got)
                except DamagedCopy as error:
                    self.count.bytes_extra += len(buffer)
                    self.choice.damaged.add(row)
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
        self.count.bytes_verified += length


class FileReader(BlockReader):
    """Read items of one checkpoint. Each file is opened when first needed and stays open until the reader closes."""

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def read_ahead(self, items: Iterable[int], copies: Iterable[StridedCopy]) -> None:
        """Say which copies :meth:`read` will be asked for, in this order; it does nothing but save time.

        Raises:
            CorruptCheckpointError: A file is not as it was, and there is no replica.
            OSError: A file cannot be opened.
        """
        if not self.files.reads_ahead:
            return
        rows, begins, ends = [], [], []
        for item, copy in zip(items, copies):
            if copy.size:
                row, itemsize = self.resolve(item), dtype_of(self._manifest.catalog.dtype_name(item)).numpy.itemsize
                whole = self.needs_whole_blocks(row)
                each = wanted_bytes(copy, itemsize, int(self._byte_length[item]), self._block_bytes, whole)
                rows.append(np.full(len(each[0]), row))
                begins.append(each[0])
                ends.append(each[1])
        if rows:
            self.files.read_ahead(np.concatenate(rows), np.concatenate(begins), np.concatenate(ends))

    def read(self, item: int, copy: StridedCopy, target: np.ndarray) -> None:
        """Carry out one strided copy from an item to memory.

        Blocks of large copies may still be hashed when this returns, and damage in them be found by a later call or by
        :meth:`wait_for_hashes`: a copy is as it was written when :attr:`hashing_done` has come up to what
        :attr:`hashing_begun` is now.

        Args:
            item: Row of the manifest's catalog.
            copy: What to copy; positions count elements from the item's start and from the target's start.
            target: The target's storage, 1-D and contiguous. If its dtype differs from the item's, values are cast.

        Raises:
            CorruptCheckpointError: A block does not have its checksum, or the file ends early.
            OSError: The file system failed.
        """
        if copy.size == 0:
            return
        row = self.resolve(item)
        dtype = dtype_of(self._manifest.catalog.dtype_name(item)).numpy
        outer = len(copy.extents) - copy.source_tail()
        run_bytes = math.prod(copy.extents[outer:]) * dtype.itemsize
        mapped = self.files.map(row) if outer else None
        # What has no memory map is remote: a request takes as long as some MiB of its answer.
        if outer and run_bytes < (self._block_bytes if mapped is None else MIN_PREAD_BYTES):
            if mapped is None or self.needs_whole_blocks(row):
                self._read_scattered(item, copy.simplified(), target, dtype)
            else:
                self.files.copy_mapped(mapped, row, copy, target, dtype)
            return
        run = copy.size * dtype.itemsize // run_bytes
        per_run = run_bytes // dtype.itemsize
        for i in range(run):
            for part in copy.part(i * per_run, (i + 1) * per_run) if run > 1 else (copy,):
                self._read_run(item, part.simplified(), target, dtype)

    def _read_run(self, item: int, copy: StridedCopy, target: np.ndarray, dtype: np.dtype) -> None:
        """Read a copy whose file side is one run, in steps that end where the item's blocks end."""
        block_bytes = self._block_bytes
        begin = copy.source_base * dtype.itemsize
        end = begin + copy.size * dtype.itemsize
        straight = copy.is_contiguous()[1] and target.dtype == dtype
        raw_target = target.view(np.uint8) if straight else None
        shift = copy.target_base * dtype.itemsize - begin
        position = begin
        while position < end:
            whole_blocks = 0 if position % block_bytes else (end - position) // block_bytes
            if raw_target is not None and self._verify != "off" and whole_blocks > HASHED_AT_ONCE:
                stop = position + whole_blocks * block_bytes
                self.read_blocks(item, position // block_bytes, raw_target[position + shift : stop + shift])
                position = stop
                continue
            stop = min(end, (position // block_bytes + 1) * block_bytes)
            if raw_target is not None:
                buffer = raw_target[position + shift : stop + shift]
            else:
                buffer = self._staging[: stop - position]
            self._fill(item, position, buffer)
            if raw_target is None:
                first = (position - begin) // dtype.itemsize
                values = buffer.view(dtype)
                for part in copy.part(first, first + len(values)):
                    count = part.size
                    part.scatter_into(target)[...] = values[:count].reshape(part.extents)
                    values = values[count:]
            position = stop

    def _fill(self, item: int, position: int, buffer: np.ndarray) -> None:
        """Fill a buffer from byte ``position`` of an item, with bytes that are all of one block."""
        block, start = divmod(position, self._block_bytes)
        if len(buffer) == self.block_length(item, block):
            self.read_block(item, block, buffer)
        elif not self.read_unverified(item, position, buffer):
            buffer[:] = self.keep_block(item, block, len(buffer))[start : start + len(buffer)]

    def _read_scattered(self, item: int, copy: StridedCopy, target: np.ndarray, dtype: np.dtype) -> None:
        """Copy scattered runs out of whole, verified blocks, one block after the other."""
        if not copy.is_ascending():
            inner = copy.size // copy.extents[0]
            for i in range(copy.extents[0]):
                for part in copy.part(i * inner, (i + 1) * inner):
                    self._read_scattered(item, part.simplified(), target, dtype)
            return
        per_block = self._block_bytes // dtype.itemsize
        begin = 0
        while begin < copy.size:
            (first,) = copy.part(begin, begin + 1)
            block = first.source_base // per_block
            end = copy.count_before((block + 1) * per_block)
            storage = self.keep_block(item, block, (end - begin) * dtype.itemsize).view(dtype)
            for part in copy.part(begin, end):
                inside = replace(part, source_base=part.source_base - block * per_block)
                part.scatter_into(target)[...] = inside.gather_from(storage)
            begin = end

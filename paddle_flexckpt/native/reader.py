"""Reading: exactly the bytes that strided copies need, from files into memory, verified where whole blocks pass.

Where the file side of a copy is contiguous, it is read with ``pread`` block by block, straight into the target where
that is contiguous too. Short scattered runs (a column cut) are copied out of a memory map: one numpy call instead of a
system call per run.

With ``verify="full"`` no byte reaches a target unverified: a block of which only a part is needed is read whole, and
the part is copied out of it; the latest such blocks are kept, as the next run or the next target often goes on there.

Where a file or a block turns out to be damaged, the same bytes are read from a replica in another file, if the
checkpoint has one: a block is read again whole, so that nothing of the damaged one stays in the target.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from paddle_flexckpt.algebra import StridedCopy
from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError, dtype_of
from paddle_flexckpt.media.backend import InputFile, Location, open_backend
from paddle_flexckpt.native.blocks import HashedBlocks, HashThread, KeptBlock, ReadCount
from paddle_flexckpt.native.checksums import VerifyMode, hash_block, verify_mode
from paddle_flexckpt.native.data_file import check_data_file
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.mapped import copy_mapped
from paddle_flexckpt.native.replicas import DamagedCopy, ReplicaChoice

# A run at least this long is worth a system call of its own (a pread costs about as much as copying 16 KiB).
MIN_PREAD_BYTES = 16 << 10
# Blocks kept that were read whole for a part of them; bounds their memory to 16 MiB.
KEPT_BLOCKS = 16
# Blocks that are hashed at once while as many are read: handing them to a thread costs about as much as hashing one.
HASHED_AT_ONCE = 8
# Groups of them that may wait for their hashes: reading gets no further ahead, and meets them while they are in cache.
HASHED_BEHIND = 2


class FileReader:
    """Reads items of one checkpoint. Opens each file when first needed and keeps it open until closed."""

    def __init__(
        self,
        directory: Location,
        manifest: Manifest,
        verify: bool | VerifyMode = "read",
        use_replicas: bool = True,
    ) -> None:
        """Opens nothing yet.

        Args:
            directory: Where the files are.
            manifest: What they hold.
            verify: Which bytes are compared with their checksums; see :func:`verify_mode`.
            use_replicas: Whether a replica in another file serves where one is damaged.

        Raises:
            ValidationError: There is no such mode, or there are no checksums for it.
        """
        self._backend = open_backend(directory)
        self._manifest = manifest
        self._verify = verify_mode(verify)
        if manifest.foreign:
            if self._verify == "full":
                raise ValidationError(
                    [
                        f"{self._backend.path} is another program's checkpoint ({manifest.origin}), without checksums: "
                        "verify='full' cannot be kept. Remedy: load it with another mode, and save it again"
                    ]
                )
            self._verify = "off"
        self._byte_length = manifest.catalog.byte_length
        self._files: dict[int, InputFile] = {}
        self._unusable: dict[int, CorruptCheckpointError | OSError] = {}
        self._choice = ReplicaChoice(self._backend, manifest, use_replicas)
        self._maps: dict[int, mmap.mmap | None] = {}
        self._staging = np.empty(manifest.checksums.block_bytes, dtype=np.uint8)
        self._kept: OrderedDict[tuple[int, int], KeptBlock] = OrderedDict()
        self._hashing = HashThread()
        # Items and blocks of theirs that have been read into targets and are being hashed, in order.
        self._hashed: deque[tuple[int, HashedBlocks]] = deque()
        self.begun = self.settled = 0
        self.count = ReadCount()

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all files."""
        self._hashing.close()
        for mapped in filter(None, self._maps.values()):
            # The traceback of an error holds views of the map: it is closed with the last of them.
            with contextlib.suppress(BufferError):
                mapped.close()
        for file in self._files.values():
            file.close()
        self._maps.clear()
        self._files.clear()
        self._kept.clear()

    def check_files(self, items: np.ndarray) -> None:
        """Opens the files of the given items and checks their size and save token, before any target is touched.

        Items of a file that is not as it was will be read from their replicas, if all of them have one.

        Raises:
            CorruptCheckpointError: A file is missing, of another size, or of another save.
        """
        items = np.unique(items)
        files = np.unique(self._manifest.catalog.file[items]).tolist()

        def is_usable(file: int) -> bool:
            try:
                self._open(file)
            except (CorruptCheckpointError, OSError):
                return False
            return True

        for file, usable in zip(files, self._backend.each(is_usable, files)):
            if not usable:
                for item in items[self._manifest.catalog.file[items] == file].tolist():
                    self._resolve(item)

    @property
    def replicas_used(self) -> dict[str, str]:
        """By key, what was damaged and which file served instead."""
        return self._choice.used

    def _open(self, file: int) -> InputFile:
        if file in self._unusable:
            raise self._unusable[file].with_traceback(None)  # which would grow with each raise
        if file not in self._files:
            name, size = self._manifest.catalog.files[file], int(self._manifest.file_bytes[file])
            try:
                self._files[file] = check_data_file(self._backend, self._manifest, name, size)
            except (CorruptCheckpointError, OSError) as error:
                self._unusable[file] = error
                raise
            self.count.files.add(name)
        return self._files[file]

    def _resolve(self, item: int) -> int:
        """The row to read an item from: itself, or a replica where its file is not as it was."""
        row, failures = self._choice.serving(item), list[tuple[int, Exception]]()
        if int(self._manifest.catalog.file[row]) in self._files:
            return row
        for row in self._choice.candidates(item):
            try:
                self._open(int(self._manifest.catalog.file[row]))
            except (CorruptCheckpointError, OSError) as error:
                failures.append((row, error))
                continue
            self._choice.serve(item, row, failures)
            return row
        raise self._choice.error(failures, touched=False)

    def _map(self, file: int) -> mmap.mmap | None:
        if file not in self._maps:
            self._maps[file] = self._open(file).memory_map()
        return self._maps[file]

    def _least_run_bytes(self, item: int) -> int:
        """A run of an item that is at least this long is worth a read of its own."""
        # What has no memory map is remote: a request takes as long as some MiB of its answer.
        is_mapped = self._map(int(self._manifest.catalog.file[item])) is not None
        return MIN_PREAD_BYTES if is_mapped else self._manifest.checksums.block_bytes

    def read(self, item: int, copy: StridedCopy, target: np.ndarray) -> None:
        """Carries out one strided copy from an item to memory.

        Blocks of large copies may still be hashed when this returns, and damage in them be found by a later call or by
        :meth:`settle`: a copy is as it was written when :attr:`settled` has come up to what :attr:`begun` is now.

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
        row = self._resolve(item)
        dtype = dtype_of(self._manifest.catalog.dtype_name(item)).numpy
        outer = len(copy.extents) - copy.source_tail()
        run_bytes = math.prod(copy.extents[outer:]) * dtype.itemsize
        if outer and run_bytes < self._least_run_bytes(row):
            if self._whole_blocks_only(row) or self._map(int(self._manifest.catalog.file[row])) is None:
                self._read_in_blocks(item, copy.simplified(), target, dtype)
            else:
                self._read_mapped(row, copy, target, dtype)
            return
        run = copy.size * dtype.itemsize // run_bytes
        per_run = run_bytes // dtype.itemsize
        for i in range(run):
            for part in copy.part(i * per_run, (i + 1) * per_run) if run > 1 else (copy,):
                self._read_contiguous(item, part.simplified(), target, dtype)

    def _read_contiguous(self, item: int, copy: StridedCopy, target: np.ndarray, dtype: np.dtype) -> None:
        """Reads a copy whose file side is one stretch, in steps that end where the item's blocks end."""
        block_bytes = self._manifest.checksums.block_bytes
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
                self._read_whole_blocks(item, position // block_bytes, raw_target[position + shift : stop + shift])
                position = stop
                continue
            stop = min(end, (position // block_bytes + 1) * block_bytes)
            if raw_target is not None:
                buffer = raw_target[position + shift : stop + shift]
            else:
                buffer = self._staging[: stop - position]
            self._fetch(item, position, buffer)
            if raw_target is None:
                first = (position - begin) // dtype.itemsize
                values = buffer.view(dtype)
                for part in copy.part(first, first + len(values)):
                    count = part.size
                    part.scatter_into(target)[...] = values[:count].reshape(part.extents)
                    values = values[count:]
            position = stop

    def _read_in_blocks(self, item: int, copy: StridedCopy, target: np.ndarray, dtype: np.dtype) -> None:
        """Copies scattered runs out of whole, verified blocks, one block after the other."""
        if not copy.is_ascending():
            inner = copy.size // copy.extents[0]
            for i in range(copy.extents[0]):
                for part in copy.part(i * inner, (i + 1) * inner):
                    self._read_in_blocks(item, part.simplified(), target, dtype)
            return
        per_block = self._manifest.checksums.block_bytes // dtype.itemsize
        begin = 0
        while begin < copy.size:
            (first,) = copy.part(begin, begin + 1)
            block = first.source_base // per_block
            end = copy.count_before((block + 1) * per_block)
            storage = self._whole_block(item, block, (end - begin) * dtype.itemsize).view(dtype)
            for part in copy.part(begin, end):
                inside = replace(part, source_base=part.source_base - block * per_block)
                part.scatter_into(target)[...] = inside.gather_from(storage)
            begin = end

    def _fetch(self, item: int, position: int, buffer: np.ndarray) -> None:
        """Fills a buffer from byte ``position`` of an item, verified as far as that was asked for.

        The bytes are all of one block.
        """
        block, start = divmod(position, self._manifest.checksums.block_bytes)
        if len(buffer) == self._block_length(item, block):
            self._read_block(item, block, buffer)
            return
        row, before = self._resolve(item), self.count.bytes_read
        if not self._whole_blocks_only(row):
            try:
                self._pread(row, position, buffer)
                return
            except (DamagedCopy, OSError):
                self.count.bytes_extra += self.count.bytes_read - before
                self._choice.note_damage(row)
        buffer[:] = self._whole_block(item, block, len(buffer))[start : start + len(buffer)]

    def _whole_blocks_only(self, row: int) -> bool:
        """Whether nothing of a row may be read unverified; where there is damage, it is believed block by block."""
        return self._verify == "full" or self._choice.is_damaged(row)

    def _read_block(
        self, item: int, block: int, buffer: np.ndarray, failures: Sequence[tuple[int, Exception]] = ()
    ) -> None:
        """Fills a buffer with a block of an item or of a replica, the first that is as it was written.

        Rows in ``failures`` have been tried.
        """
        failures = list(failures)
        tried = [row for row, _ in failures]
        for row in self._choice.candidates(item):
            if row in tried:
                continue
            before = self.count.bytes_read
            try:
                self._pread(row, block * self._manifest.checksums.block_bytes, buffer)
                if self._verify != "off":
                    self._compare(row, block, len(buffer), hash_block(buffer))
            except (CorruptCheckpointError, DamagedCopy, OSError) as error:
                self.count.bytes_extra += self.count.bytes_read - before
                self._choice.note_damage(row)
                failures.append((row, error))
                continue
            self._choice.serve(item, row, failures)
            return
        raise self._choice.error(failures, touched=True)

    def _read_whole_blocks(self, item: int, first: int, buffer: np.ndarray) -> None:
        """Fills a buffer with full blocks of an item; each few of them are hashed while the next are read."""
        size = self._manifest.checksums.block_bytes
        buffers = [buffer[start : start + size] for start in range(0, len(buffer), size)]
        for start in range(0, len(buffers), HASHED_AT_ONCE):
            several = buffers[start : start + HASHED_AT_ONCE]
            row, counted = self._resolve(item), self.count.bytes_read
            hashed = None
            if not self._choice.is_damaged(row):
                try:
                    for number, each in enumerate(several):
                        self._pread(row, (first + start + number) * size, each)
                    hashed = self._hashing.hash(row, first + start, several)
                except (DamagedCopy, OSError):
                    self.count.bytes_extra += self.count.bytes_read - counted
            self.settle(HASHED_BEHIND)
            if hashed is not None:
                self._hashed.append((item, hashed))
                self.begun += 1
                continue
            for number, each in enumerate(several):  # one by one, each with the replicas there are
                self._read_block(item, first + start + number, each)

    def settle(self, behind: int = 0) -> None:
        """Waits for blocks that are being hashed.

        Args:
            behind: How many groups of them may still be.

        Raises:
            CorruptCheckpointError: A block does not have its checksum, and there is no replica.
        """
        while len(self._hashed) > behind:
            self._compare_all(*self._hashed.popleft())
            self.settled += 1

    def _compare_all(self, item: int, hashed: HashedBlocks) -> None:
        """Compares blocks with their checksums; one that is damaged is read again, from a replica if there is one."""
        for number, (buffer, got) in enumerate(zip(hashed.buffers, hashed.hashes.result()), hashed.first):
            try:
                self._compare(hashed.row, number, len(buffer), got)
            except DamagedCopy as error:
                self.count.bytes_extra += len(buffer)
                self._choice.note_damage(hashed.row)
                self._read_block(item, number, buffer, [(hashed.row, error)])

    def _block_length(self, item: int, block: int) -> int:
        block_bytes = self._manifest.checksums.block_bytes
        return min(block_bytes, int(self._byte_length[item]) - block * block_bytes)

    def _whole_block(self, item: int, block: int, used: int) -> np.ndarray:
        """A verified block, valid until the next call; ``used`` says how many bytes of it will be."""
        kept = self._kept.pop((item, block), None)
        if kept is None:
            length = self._block_length(item, block)
            if len(self._kept) < KEPT_BLOCKS:
                memory = np.empty(self._manifest.checksums.block_bytes, dtype=np.uint8)
            else:
                memory = self._kept.popitem(last=False)[1].memory
            self._read_block(item, block, memory[:length])
            kept = KeptBlock(memory, length, length)
            self.count.bytes_extra += length
        self._kept[item, block] = kept
        # What several targets want was needed once.
        needed = min(kept.unused, used)
        kept.unused -= needed
        self.count.bytes_extra -= needed
        return kept.memory[: kept.length]

    def _pread(self, row: int, position: int, buffer: np.ndarray) -> None:
        """Fills a buffer from byte ``position`` of a row."""
        catalog = self._manifest.catalog
        file = self._open(int(catalog.file[row]))
        offset = int(catalog.byte_offset[row]) + position
        view = memoryview(buffer)
        while len(view):
            got = file.read_into(view, offset)
            self.count.reads += 1
            if got == 0:
                raise DamagedCopy(f"the file ends at byte {offset}")
            self.count.bytes_read += got
            offset += got
            view = view[got:]

    def _compare(self, row: int, block: int, length: int, got: int) -> None:
        """Compares the checksum of a whole block with what it should be."""
        checksums = self._manifest.checksums
        position = block * checksums.block_bytes
        expected = checksums.of_block(row, block)
        if expected != got:
            raise DamagedCopy(
                f"bytes {position} to {position + length} of the shard (byte "
                f"{int(self._manifest.catalog.byte_offset[row]) + position} of the file) are damaged: expected "
                f"xxh3 {expected:016x}, got {got:016x}"
            )
        self.count.bytes_verified += length

    def _read_mapped(self, row: int, copy: StridedCopy, target: np.ndarray, dtype: np.dtype) -> None:
        """Copies short scattered runs out of a memory map."""
        catalog = self._manifest.catalog
        mapped = self._map(int(catalog.file[row]))
        if mapped is None:
            raise ValueError(f"{self._choice.where(row)} cannot be mapped")
        begin, length = int(catalog.byte_offset[row]), int(self._byte_length[row])
        self.count.reads += copy_mapped(mapped, begin, length, copy, target, dtype)
        self.count.bytes_read += copy.size * dtype.itemsize

"""Read exactly the bytes that strided copies need, from files into memory, verified where whole blocks pass.

Where the file side of a copy is contiguous, it is read with ``pread`` block by block, straight into the target where
that is contiguous too. Short scattered runs (a column cut) are copied out of a memory map: one numpy call instead of a
system call per run.

With ``verify="full"`` no byte reaches a target unverified: a block of which only a part is needed is read whole, and
the part is copied out of it; the latest such blocks are kept, as the next run or the next target often goes on there.

Three classes, one upon the other: :class:`RowFiles` reads bytes, :class:`BlockReader` verifies blocks and chooses
replicas, :class:`FileReader` carries out copies.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, replace

import numpy as np

from paddle_flexckpt.algebra import StridedCopy
from paddle_flexckpt.catalog import ValidationError, dtype_of
from paddle_flexckpt.media.backend import Location
from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.native.block_reader import HASHED_AT_ONCE, BlockReader
from paddle_flexckpt.native.checksums import VerifyMode, verify_mode
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.row_files import ReadCount

# A run at least this long is worth a system call of its own (a pread costs about as much as copying 16 KiB).
MIN_PREAD_BYTES = 16 << 10
# Blocks kept that were read whole for a part of them; bounds their memory to 16 MiB.
KEPT_BLOCKS = 16


@dataclass
class _KeptBlock:
    """Hold a verified block: its memory, as long as the longest block, its bytes, and those no target needed."""

    memory: np.ndarray
    length: int
    unused: int


class FileReader:
    """Read items of one checkpoint. Each file is opened when first needed and stays open until the reader closes."""

    def __init__(
        self,
        directory: Location,
        manifest: Manifest,
        verify: bool | VerifyMode = "read",
        use_replicas: bool = True,
    ) -> None:
        """Open nothing yet.

        Args:
            directory: Where the files are.
            manifest: What they hold.
            verify: Which bytes are compared with their checksums; see :func:`verify_mode`.
            use_replicas: Whether a replica in another file serves where one is damaged.

        Raises:
            ValidationError: There is no such mode, or there are no checksums for it.
        """
        backend = open_backend(directory)
        self._manifest = manifest
        self._verify = verify_mode(verify)
        if manifest.foreign:
            if self._verify == "full":
                raise ValidationError(
                    [
                        f"{backend.path} is another program's checkpoint ({manifest.origin}), without checksums: "
                        "verify='full' cannot be kept. Remedy: load it with another mode, and save it again"
                    ]
                )
            self._verify = "off"
        self._blocks = BlockReader(backend, manifest, self._verify, use_replicas)
        self._files = self._blocks.files
        self._block_bytes = manifest.checksums.block_bytes
        self._staging = np.empty(self._block_bytes, dtype=np.uint8)
        self._kept: OrderedDict[tuple[int, int], _KeptBlock] = OrderedDict()

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        self._blocks.close()
        self._kept.clear()

    @property
    def count(self) -> ReadCount:
        """What has been read."""
        return self._files.count

    @property
    def replicas_used(self) -> dict[str, str]:
        """What was damaged and which file served instead, by key."""
        return self._blocks.choice.used

    @property
    def hashing_begun(self) -> int:
        """How many groups of blocks have been given to the thread that hashes."""
        return self._blocks.hashing_begun

    @property
    def hashing_done(self) -> int:
        """How many of these groups have been compared with their checksums."""
        return self._blocks.hashing_done

    def wait_for_hashes(self) -> None:
        """Wait for blocks that are being hashed.

        Raises:
            CorruptCheckpointError: A block does not have its checksum, and there is no replica.
        """
        self._blocks.wait_for_hashes()

    def check_files(self, items: np.ndarray) -> None:
        """Open the files of items and check their size and save token, before any target is touched.

        Items of a file that is not as it was will be read from their replicas, if all of them have one.

        Raises:
            CorruptCheckpointError: A file is missing, of another size, or of another save.
        """
        self._blocks.check_files(items)

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
        row = self._blocks.resolve(item)
        dtype = dtype_of(self._manifest.catalog.dtype_name(item)).numpy
        outer = len(copy.extents) - copy.source_tail()
        run_bytes = math.prod(copy.extents[outer:]) * dtype.itemsize
        mapped = self._files.map(row) if outer else None
        # What has no memory map is remote: a request takes as long as some MiB of its answer.
        if outer and run_bytes < (self._block_bytes if mapped is None else MIN_PREAD_BYTES):
            if mapped is None or self._blocks.needs_whole_blocks(row):
                self._read_scattered(item, copy.simplified(), target, dtype)
            else:
                self._files.copy_mapped(mapped, row, copy, target, dtype)
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
                self._blocks.read_blocks(item, position // block_bytes, raw_target[position + shift : stop + shift])
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
        if len(buffer) == self._blocks.block_length(item, block):
            self._blocks.read_block(item, block, buffer)
        elif not self._blocks.read_unverified(item, position, buffer):
            buffer[:] = self._keep_block(item, block, len(buffer))[start : start + len(buffer)]

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
            storage = self._keep_block(item, block, (end - begin) * dtype.itemsize).view(dtype)
            for part in copy.part(begin, end):
                inside = replace(part, source_base=part.source_base - block * per_block)
                part.scatter_into(target)[...] = inside.gather_from(storage)
            begin = end

    def _keep_block(self, item: int, block: int, used: int) -> np.ndarray:
        """Return a verified block, valid until the next call; ``used`` says how many bytes of it will be."""
        kept = self._kept.pop((item, block), None)
        if kept is None:
            length = self._blocks.block_length(item, block)
            if len(self._kept) < KEPT_BLOCKS:
                memory = np.empty(self._block_bytes, dtype=np.uint8)
            else:
                memory = self._kept.popitem(last=False)[1].memory
            self._blocks.read_block(item, block, memory[:length])
            kept = _KeptBlock(memory, length, length)
            self.count.bytes_extra += length
        self._kept[item, block] = kept
        # What several targets want was needed once.
        needed = min(kept.unused, used)
        kept.unused -= needed
        self.count.bytes_extra -= needed
        return kept.memory[: kept.length]

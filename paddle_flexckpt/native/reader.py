"""Read exactly the bytes that strided copies need, from files into memory, verified where whole blocks pass.

Where the file side of a copy is contiguous, it is read with ``pread`` block by block, straight into the target where
that is contiguous too. Short scattered runs (a column cut) are copied out of a memory map: one numpy call instead of a
system call per run.

With ``verify="full"`` no byte reaches a target unverified: a block of which only a part is needed is read whole, and
the part is copied out of it; the latest such blocks are kept, as the next run or the next target often goes on there.

Three classes, each on the one before: :class:`RowFiles` reads bytes, :class:`BlockReader` verifies blocks and chooses
replicas, :class:`FileReader` carries out copies.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from paddle_flexckpt.algebra import StridedCopy
from paddle_flexckpt.catalog import dtype_of
from paddle_flexckpt.native.block_reader import HASHED_AT_ONCE, BlockReader

# A run at least this long is worth a system call of its own (a pread costs about as much as copying 16 KiB).
MIN_PREAD_BYTES = 16 << 10


class FileReader(BlockReader):
    """Read items of one checkpoint. Each file is opened when first needed and stays open until the reader closes."""

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

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

"""Read exactly the bytes that strided copies need, from verified blocks of files into memory.

A block that is fetched whole for a part of it is cached for a while, as the next run or the next target often continues
there.

Many copies come in columns (:mod:`paddle_flexckpt.native.stretches`), and several threads carry them out; special ones
are read one by one.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np

from paddle_flexckpt.algebra import StridedCopy
from paddle_flexckpt.catalog import dtype_of
from paddle_flexckpt.catalog.dtypes import assign
from paddle_flexckpt.catalog.errors import OverflowingCastError
from paddle_flexckpt.media.backend import Location
from paddle_flexckpt.native.block_reader import BlockReader
from paddle_flexckpt.native.checksums import VerifyMode
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.read_planner import BLOCKS_AT_ONCE, NeededBlocks
from paddle_flexckpt.native.row_files import SpareMemory
from paddle_flexckpt.native.stretches import AlikeCopies, SpreadCopies, Stretches, reach
from paddle_flexckpt.progress import SILENT, Meter


class FileReader(BlockReader):
    """A reader of one checkpoint's items. A file is opened when it is first needed; of many, the latest stay open."""

    def __init__(
        self, directory: Location, manifest: Manifest, verify: bool | VerifyMode = "read", use_replicas: bool = True
    ) -> None:
        """Open nothing yet; arguments and errors as of :class:`BlockReader`."""
        super().__init__(directory, manifest, verify, use_replicas)
        self._staging = np.empty(self.block_bytes, dtype=np.uint8)
        self._meter = SILENT

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def tell(self, meter: Meter) -> None:
        """Report to a meter from now on how many of the bytes that targets need have been read."""
        self._meter = meter
        self.files.threads.after = self._tell if meter.is_heard else None

    def _tell(self) -> None:
        self._meter.reach(self.count.bytes_read - self.count.bytes_extra)

    def read_ahead(self, items: np.ndarray, begin: np.ndarray, end: np.ndarray) -> None:
        """Announce the byte ranges of items that will be read, in this order; this only saves time.

        Raises:
            CorruptCheckpointError: A file has changed.
            OSError: A file cannot be opened.
        """
        if self.needs_blocks:
            size = self.block_bytes
            begin, end = begin // size * size, np.minimum(-(-end // size) * size, self.byte_length[items])
        self.files.read_ahead(self.choice.rows_serving(items), begin, end)

    def read(self, item: int, copy: StridedCopy, target: np.ndarray) -> None:
        """Carry out one strided copy from an item to memory.

        Args:
            item: Row of the manifest's catalog.
            copy: What to copy; positions count elements from the item's start and from the target's start.
            target: The target's storage, 1-D and contiguous. If its dtype differs from the item's, values are cast.

        Raises:
            CorruptCheckpointError: A block differs from its checksum, or the file ends early.
            OSError: The file system failed.
            OverflowingCastError: Finite numbers are too large for the target's dtype.
        """
        if copy.size == 0:
            return
        try:
            self._read(item, copy.simplified(), target)
        except OverflowingCastError as error:
            raise error.of_key(self.catalog.key_name(item)) from None
        self._tell()

    def _read(self, item: int, copy: StridedCopy, target: np.ndarray) -> None:
        row = self.resolve(item)
        dtype = dtype_of(self.catalog.dtype_name(item)).numpy
        begin, length = copy.source_base * dtype.itemsize, copy.size * dtype.itemsize
        solid = target.dtype == dtype and copy.is_contiguous() == (True, True)
        if solid and begin // self.block_bytes == (begin + length - 1) // self.block_bytes:
            first = copy.target_base * dtype.itemsize
            self.fill(item, begin, target.view(np.uint8)[first : first + length])
            return
        form = replace(copy, source_base=0, target_base=0)
        address = target.ctypes.data + copy.target_base * target.itemsize
        one = AlikeCopies(form, dtype, *(np.asarray([each], dtype=np.int64) for each in (item, begin, address)))
        mapped = self.files.map(row) if one.outer else None
        if self.is_scattered(one, remote=mapped is None):
            usable = functools.partial(self.may_read_part, row, mapped=True)
            if mapped is None or not self.files.copy_mapped(mapped, row, copy, target, dtype, usable):
                self._read_scattered(item, copy, target, dtype)
        elif target.dtype == dtype and one.is_straight:
            low, high = reach(copy.extents, copy.target_strides)
            if copy.target_base + low < 0 or copy.target_base + high >= len(target):
                raise IndexError("a copy leaves its target")  # memory is written by its address
            self.read_runs(one)
        else:
            self._read_by_blocks(item, copy, target, one)

    def _read_by_blocks(self, item: int, copy: StridedCopy, target: np.ndarray, one: AlikeCopies) -> None:
        """Read runs that are not straight block by block, and copy each block's part."""
        done = 0
        for runs in one.runs():
            parts = runs.cut_at(self.block_bytes)
            for position, length in zip(parts.position.tolist(), parts.length.tolist()):
                buffer = self._staging[:length]
                self.fill(item, position, buffer)
                values = buffer.view(one.dtype)
                for part in copy.part(done, done + len(values)):
                    count = part.size
                    assign(part.scatter_into(target), values[:count].reshape(part.extents), item)
                    values = values[count:]
                done += length // one.dtype.itemsize

    def are_remote(self, copies: AlikeCopies) -> np.ndarray:
        """Return bool per copy: whether its file has no memory map."""
        rows = self.choice.rows_serving(copies.item)
        _, first, number = np.unique(self.catalog.file[rows], return_index=True, return_inverse=True)
        return np.asarray([self.files.map(row) is None for row in rows[first].tolist()], dtype=bool)[number]

    def copy_mapped(self, copies: AlikeCopies) -> AlikeCopies:
        """Carry out copies of short scattered runs out of memory maps; return those that need verified blocks."""
        catalog = self.catalog
        rows = self.choice.rows_serving(copies.item)
        file, offset = catalog.file[rows], catalog.byte_offset[rows] + copies.position
        first = copies.position + copies.low_bytes
        end = first + copies.reach_bytes
        left = self.choice.are_damaged(rows)
        for number in np.unique(file[~left]).tolist():
            members = np.flatnonzero(~left & (file == number))
            mapped = self.files.map(int(rows[members[0]]))
            if mapped is None:
                left[members] = True
                continue
            members = members[np.argsort(offset[members], kind="stable")]

            def usable(some: slice, members: np.ndarray = members) -> np.ndarray:
                chosen = members[some]
                return self.may_read_parts(rows[chosen], first[chosen], end[chosen], mapped=True)

            left[members] = ~self.files.copy_alike(mapped, offset[members], copies.take(members), usable)
        return copies.take(left)

    def copy_from_blocks(self, needed: NeededBlocks) -> None:
        """Read stretches inside blocks, and carry out copies from them; several threads do."""
        copies, first, number, blocks = needed
        # Bytes of a block that several copies need count once.
        used = np.bincount(number, minlength=len(blocks)) * copies.copy.size * copies.dtype.itemsize
        portions = self.portions(blocks)
        edges, places = portions.edges, blocks.address
        bounds = np.searchsorted(number, edges).tolist()
        spare = SpareMemory(BLOCKS_AT_ONCE * self.block_bytes)

        def work(i: int) -> None:
            some, members = slice(edges[i], edges[i + 1]), slice(bounds[i], bounds[i + 1])
            begin = places[number[members]] - places[edges[i]] + copies.position[members] - first[members]
            with spare.use() as memory:
                self.read_portion(portions, i, memory.ctypes.data - int(places[edges[i]]))
                copies.take(members).carry_out(memory, begin)
            self.count.add(bytes_extra=int(np.maximum(blocks.length[some] - used[some], 0).sum()))

        self.files.threads.each(work, portions.count)

    def read_across_blocks(self, copies: AlikeCopies, whole: bool) -> None:
        """Carry out copies that each span several blocks; ``whole``: the blocks are read whole, if copies ascend."""
        if not whole or not copies.copy.is_ascending() or self.files.reads_ahead:
            self.read_each(copies)
            return
        size, catalog = self.block_bytes, self.catalog
        spread, spare = SpreadCopies(copies, size), SpareMemory(BLOCKS_AT_ONCE * size)
        groups = spread.groups(BLOCKS_AT_ONCE)
        groups.sort(key=lambda group: (catalog.file[group.item], catalog.byte_offset[group.item], group.first))

        def work(number: int) -> None:
            group = groups[number]
            with spare.use() as memory:
                place = np.arange(group.last - group.first) * size
                position = place + group.first * size
                length = np.minimum(size, self.byte_length[group.item] - position)
                item = np.full(len(place), group.item)
                self.read_portion(self.portions(Stretches(item, position, length, place + memory.ctypes.data)), 0)
                extra = int(length.sum()) - spread.carry_out(group, memory)
            self.count.add(bytes_extra=max(extra, 0))

        self.files.threads.each(work, len(groups))

    def read_each(self, copies: AlikeCopies) -> None:
        """Carry out copies one by one."""
        itemsize = copies.dtype.itemsize
        for item, position, (target, base) in zip(copies.item.tolist(), copies.position.tolist(), copies.storages()):
            self.read(item, replace(copies.copy, source_base=position // itemsize, target_base=base), target)

    def _read_scattered(self, item: int, copy: StridedCopy, target: np.ndarray, dtype: np.dtype) -> None:
        """Copy scattered runs out of whole, verified blocks, one block after the other."""
        if not copy.is_ascending():
            inner = copy.size // copy.extents[0]
            for i in range(copy.extents[0]):
                for part in copy.part(i * inner, (i + 1) * inner):
                    self._read_scattered(item, part.simplified(), target, dtype)
            return
        per_block = self.block_bytes // dtype.itemsize
        begin = 0
        while begin < copy.size:
            (first,) = copy.part(begin, begin + 1)
            block = first.source_base // per_block
            end = copy.count_before((block + 1) * per_block)
            storage = self.keep_block(item, block, (end - begin) * dtype.itemsize).view(dtype)
            for part in copy.part(begin, end):
                inside = replace(part, source_base=part.source_base - block * per_block)
                assign(part.scatter_into(target), inside.gather_from(storage), item)
            begin = end

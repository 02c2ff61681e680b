"""Read exactly the bytes that strided copies need, from files into memory, verified where whole blocks pass.

If the file side of a copy is contiguous, it is read block by block, straight into the target if that is contiguous too.
Short scattered runs (a column cut) are copied out of a memory map: one numpy call instead of a system call per run.

With ``verify="full"`` no byte reaches a target unverified: a block of which only a part is needed is read whole, and
the part is copied out of it. The latest such blocks are cached, as the next run or the next target often continues
there.

Many copies come in columns (:mod:`paddle_flexckpt.native.stretches`), and several threads carry them out; special ones
are read one by one.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from paddle_flexckpt.algebra import StridedCopy
from paddle_flexckpt.catalog import dtype_of
from paddle_flexckpt.catalog.dtypes import assign
from paddle_flexckpt.catalog.errors import OverflowingCastError
from paddle_flexckpt.media.backend import Location
from paddle_flexckpt.native import row_files
from paddle_flexckpt.native.block_reader import BLOCKS_AT_ONCE, BlockReader
from paddle_flexckpt.native.checksums import VerifyMode
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.read_threads import SpareMemory
from paddle_flexckpt.native.spread_copies import SpreadCopies
from paddle_flexckpt.native.stretches import AlikeCopies, Stretches, reach
from paddle_flexckpt.progress import SILENT, Meter

# A run at least this long is worth a system call of its own (a pread costs about as much as copying 16 KiB).
MIN_PREAD_BYTES = 16 << 10


class FileReader(BlockReader):
    """A reader of one checkpoint's items. A file is opened when first needed and stays open until the reader closes."""

    def __init__(
        self, directory: Location, manifest: Manifest, verify: bool | VerifyMode = "read", use_replicas: bool = True
    ) -> None:
        """Open nothing yet; arguments and errors as of :class:`BlockReader`."""
        super().__init__(directory, manifest, verify, use_replicas)
        self._staging = np.empty(self._block_bytes, dtype=np.uint8)
        self._meter = SILENT

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a block that has a checksum."""
        return self._block_bytes

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
        if self._verify == "full":
            size = self._block_bytes
            begin, end = begin // size * size, np.minimum(-(-end // size) * size, self._byte_length[items])
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
            self._read(item, copy, target)
        except OverflowingCastError as error:
            raise error.of_key(self._manifest.catalog.key_name(item)) from None
        self._tell()

    def _read(self, item: int, copy: StridedCopy, target: np.ndarray) -> None:
        row = self.resolve(item)
        dtype = dtype_of(self._manifest.catalog.dtype_name(item)).numpy
        outer = len(copy.extents) - copy.source_tail()
        run_bytes = math.prod(copy.extents[outer:]) * dtype.itemsize
        mapped = self.files.map(row) if outer else None
        # A file without a memory map is remote: a request takes as long as some MiB of its answer.
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

    def read_alike(self, copies: AlikeCopies) -> None:
        """Carry out strided copies of one form, in the order of the files; as :meth:`read` does with each.

        Raises:
            CorruptCheckpointError: A block differs from its checksum, or a file ends early.
            OSError: The file system failed.
        """
        copy, tail = copies.copy, copies.copy.source_tail()
        run_bytes = math.prod(copy.extents[len(copy.extents) - tail :]) * copies.dtype.itemsize
        if tail == len(copy.extents):
            self._read_through_blocks(copies, whole=False)
            return
        if run_bytes < MIN_PREAD_BYTES:
            low, high = reach(copy.extents, copy.source_strides)
            if self._verify == "full":
                self._read_through_blocks(copies, whole=True)
            elif (high - low) * copies.dtype.itemsize > row_files.MAP_SPAN_BYTES:
                self._read_each(copies)
            else:
                self._read_through_blocks(self._read_mapped(copies), whole=True)
            return
        # A file without a memory map is remote: a request takes as long as some MiB of its answer.
        remote = self._are_remote(copies) & (run_bytes < self._block_bytes)
        self._read_through_blocks(copies.take(remote), whole=True)
        copies = copies.take(~remote)
        if tail == 1 and copy.target_strides[-1] == 1:
            for runs in copies.runs():
                self.read_stretches(runs)
        else:
            self._read_each(copies)

    def _are_remote(self, copies: AlikeCopies) -> np.ndarray:
        """Return bool per copy: whether its file has no memory map."""
        rows = self.choice.rows_serving(copies.item)
        _, first, number = np.unique(self._manifest.catalog.file[rows], return_index=True, return_inverse=True)
        return np.asarray([self.files.map(row) is None for row in rows[first].tolist()], dtype=bool)[number]

    def _read_mapped(self, copies: AlikeCopies) -> AlikeCopies:
        """Carry out copies of short scattered runs out of memory maps; return those that need verified blocks."""
        catalog = self._manifest.catalog
        rows = self.choice.rows_serving(copies.item)
        file, offset = catalog.file[rows], catalog.byte_offset[rows] + copies.position
        left = self.choice.are_damaged(rows)
        for number in np.unique(file[~left]).tolist():
            members = np.flatnonzero(~left & (file == number))
            mapped = self.files.map(int(rows[members[0]]))
            if mapped is None:
                left[members] = True
                continue
            members = members[np.argsort(offset[members], kind="stable")]
            self.files.copy_alike(mapped, offset[members], copies.take(members))
        return copies.take(left)

    def _read_through_blocks(self, copies: AlikeCopies, whole: bool) -> None:
        """Carry out copies out of blocks that are read, and verified, many at once.

        ``whole``: the blocks are read whole; else just the bytes of the copies, which are contiguous there.
        """
        size, itemsize = self._block_bytes, copies.dtype.itemsize
        low, high = (each * itemsize for each in reach(copies.copy.extents, copies.copy.source_strides))
        first, end = copies.position + low, copies.position + high + itemsize
        inside = first // size == (end - 1) // size
        if whole and copies.copy.is_ascending() and not self.files.reads_ahead:
            self._read_spread(copies.take(~inside))
        else:
            self._read_each(copies.take(~inside))
        copies, first, end = copies.take(inside), first[inside], end[inside]
        whole = whole or self._verify == "full"
        if whole:
            first = first // size * size
            end = np.minimum(first + size, self._byte_length[copies.item])
        catalog = self._manifest.catalog
        order = np.lexsort((catalog.byte_offset[copies.item] + first, catalog.file[copies.item]))
        copies, first, end = copies.take(order), first[order], end[order]
        new = np.ones(len(first), dtype=bool)
        new[1:] = (copies.item[1:] != copies.item[:-1]) | (first[1:] != first[:-1]) | (end[1:] != end[:-1])
        starts, number = np.flatnonzero(new), np.cumsum(new) - 1
        length = (end - first)[starts]
        places = np.cumsum(length) - length
        blocks = Stretches(copies.item[starts], first[starts], length, places)
        # Bytes of a block that several copies need count once.
        needed = np.bincount(number, minlength=len(starts)) * copies.copy.size * itemsize
        portions = self.divide(blocks)
        edges = portions.edges
        bounds = np.searchsorted(number, edges).tolist()
        spare = SpareMemory(BLOCKS_AT_ONCE * size)

        def work(i: int) -> None:
            some, members = slice(edges[i], edges[i + 1]), slice(bounds[i], bounds[i + 1])
            begin = places[number[members]] - places[edges[i]] + copies.position[members] - first[members]
            with spare.use() as memory:
                self.read_portion(portions, i, memory.ctypes.data - int(places[edges[i]]))
                copies.take(members).carry_out(memory, begin)
            self.count.add(bytes_extra=int(np.maximum(length[some] - needed[some], 0).sum()))

        self.files.threads.each(work, portions.count)

    def _read_spread(self, copies: AlikeCopies) -> None:
        """Carry out ascending copies that each span several blocks, which are read and verified."""
        size, catalog = self._block_bytes, self._manifest.catalog
        spread, spare = SpreadCopies(copies, size), SpareMemory(BLOCKS_AT_ONCE * size)
        groups = spread.groups(BLOCKS_AT_ONCE)
        groups.sort(key=lambda group: (catalog.file[group.item], catalog.byte_offset[group.item], group.first))

        def work(number: int) -> None:
            group = groups[number]
            with spare.use() as memory:
                place = np.arange(group.last - group.first) * size
                position = place + group.first * size
                length = np.minimum(size, self._byte_length[group.item] - position)
                item = np.full(len(place), group.item)
                self.read_portion(self.divide(Stretches(item, position, length, place + memory.ctypes.data)), 0)
                extra = int(length.sum()) - spread.carry_out(group, memory)
            self.count.add(bytes_extra=max(extra, 0))

        self.files.threads.each(work, len(groups))

    def _read_each(self, copies: AlikeCopies) -> None:
        """Carry out copies one by one."""
        itemsize = copies.dtype.itemsize
        for item, position, (target, base) in zip(copies.item.tolist(), copies.position.tolist(), copies.storages()):
            self.read(item, replace(copies.copy, source_base=position // itemsize, target_base=base), target)

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
            if raw_target is not None and whole_blocks > 1:
                stop = position + whole_blocks * block_bytes
                columns = (item, position, stop - position, raw_target.ctypes.data + position + shift)
                self.read_stretches(Stretches(*(np.asarray([value], dtype=np.int64) for value in columns)))
                position = stop
                continue
            stop = min(end, (position // block_bytes + 1) * block_bytes)
            if raw_target is not None:
                buffer = raw_target[position + shift : stop + shift]
            else:
                buffer = self._staging[: stop - position]
            self.fill(item, position, buffer)
            if raw_target is None:
                first = (position - begin) // dtype.itemsize
                values = buffer.view(dtype)
                for part in copy.part(first, first + len(values)):
                    count = part.size
                    assign(part.scatter_into(target), values[:count].reshape(part.extents), item)
                    values = values[count:]
            position = stop

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
                assign(part.scatter_into(target), inside.gather_from(storage), item)
            begin = end

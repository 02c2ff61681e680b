"""Saves that are staged in memory, and handed over to this rank's background writer.

A rank's share is copied to memory that its writer shares: at once, in waves, or in slices (``saving/sliced_saves.py``).

Tested in tests/device/test_slices.py, tests/background/test_slices.py and tests/background/test_ranks.py.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from paddle_flexckpt.background.pending import SaveHandle, SaveSlot
from paddle_flexckpt.background.protocol import WriteJob
from paddle_flexckpt.background.staging import LockPages, WrittenFile, map_data
from paddle_flexckpt.catalog import LostRankError, ValidationError
from paddle_flexckpt.memory.device_bytes import lock_pages
from paddle_flexckpt.memory.device_memory import DeviceMemory, current_device
from paddle_flexckpt.native.checksums import BLOCK_BYTES, Checksums, hash_block
from paddle_flexckpt.native.save_names import SaveNames
from paddle_flexckpt.report import SaveReport
from paddle_flexckpt.saving.save_plan import Share, Source, WriteMessages
from paddle_flexckpt.saving.shared_saves import SharedSave

if TYPE_CHECKING:
    from paddle_flexckpt.saving.sliced_saves import SlicedSave

logger = logging.getLogger("paddle_flexckpt")

# Slices end at multiples of this, which are between elements of any dtype.
_UNIT = 16
# In a save in slices, items of at most so many bytes, and at most a slice, are copied as a whole in the call. Running
# statistics, which every forward pass changes, are among them.
SMALL_BYTES = 64 << 10


class BackgroundSave(SharedSave):
    """One save that is staged in memory and handed over to this rank's background writer.

    The writers of all ranks carry it out as a group (``background/outcome.py``).
    """

    def __init__(self, slot: SaveSlot, written: WrittenFile | None, *arguments: Any) -> None:
        """Take room with the writer, a file with this rank's data or None, and :class:`SharedSave`'s arguments."""
        super().__init__(*arguments)
        self._written = written
        self._slot = slot
        self._addresses: tuple[str, ...] = ()
        self._staging: Staging | None = None
        # For a save in slices: its memory, the items' digests at the call, and the error of a slice.
        self._space: np.ndarray = np.empty(0, dtype=np.uint8)
        self._digests_at_call: np.ndarray = self._space
        self._small = min(SMALL_BYTES, self._options.slice_bytes or 0)
        self._failure: Exception | None = None

    def begin(self) -> tuple[SaveNames | None, bytes]:
        """Implement :meth:`SharedSave.begin`. The other writers need the address of this rank's writer."""
        names, _ = super().begin()
        return names, self._slot.address.encode()

    def agree(self, names: SaveNames, places: Sequence[bytes], messages: Sequence[bytes]) -> None:
        """Implement :meth:`SharedSave.agree`."""
        super().agree(names, places, messages)
        self._addresses = tuple(message.decode() for message in messages)

    def _job(self, share: Share) -> WriteJob:
        return WriteJob(
            path=self.directory.path,
            storage=self.directory.backend.reopen_token(),
            lock=None if self.lock is None else self.lock.handover()[0],
            names=self.names,
            items=share.items,
            rank=self._comm.rank,
            ranks=self._comm.ranks,
            coordinator=self._comm.ranks[self._coordinator_rank],
            step=share.step,
            timeout=self._slot.timeout,
            addresses=self._addresses,
        )

    def _open_staging(self, share: Share) -> Staging:
        """Allocate memory for this rank's data that the writer shares; nothing is copied yet."""
        self._space = self._slot.stage(self._job(share), _page_lock(share))
        # Memory that an earlier save had locked for a device may serve one whose tensors are all on the host.
        device = share.devices[0] if share.devices and self._slot.is_locked else None
        return Staging(share.sources(), self._space, device)

    def begin_slices(self, share: Share) -> np.ndarray:
        """Allocate memory for this rank's data, copy small items, and return a digest of each item as it is now."""
        self._staging = self._open_staging(share)
        self._staging.begin(share.sources(), self._small)
        self._digests_at_call = share.digests()
        digests: np.ndarray = self._digests_at_call["digest"]
        return digests

    def register(self, handle: SlicedSave) -> SlicedSave:
        """Register the handle of a save in slices with the writer, so that a dropped handle is noticed; return it."""
        self._slot.sliced = handle
        return handle

    def stage_slice(self, nbytes: int) -> bool:
        """Copy the next slice of this rank's data; return whether there is more. :meth:`write` raises its errors."""
        if self._staging is None or self._failure is not None:
            return False
        try:
            self._staging.advance(nbytes)
        except Exception as error:  # the other ranks are not waiting here: they learn of it in the next exchange
            self._failure = error
        return self._failure is None and not self._staging.is_done

    def write(self, share: Share, hashed: np.ndarray) -> WriteMessages:
        """Copy this rank's data, or what slices have left of it, to memory that the writer shares.

        Raises:
            ValidationError: It has changed since the first slice.
        """
        if self._failure is not None:
            raise self._failure
        lengths = share.items.byte_length
        ends = lengths.cumsum()
        spans = zip((ends - lengths)[hashed].tolist(), ends[hashed].tolist())
        descriptor = self._open_written(share)
        if self._written is not None and descriptor is not None:
            data = map_data(os.dup(descriptor), self._written.begin, int(lengths.sum()))
            self._slot.stage_file(self._job(share), descriptor, self._written.begin)
            checksums = [hash_block(data[start:stop]) for start, stop in blocks_of(spans)]
        elif self._options.staging_bytes is not None and lengths.sum() > self._options.staging_bytes:
            checksums = self._write_in_waves(share, self._options.staging_bytes, spans)
        else:
            checksums = (self._staging or self._open_staging(share)).finish(spans)
        if self._staging is not None:
            is_changed = self._digests_at_call != share.digests(self._space)
            changed = np.flatnonzero(is_changed & (lengths > self._small))
            if len(changed):
                rest = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
                raise ValidationError(
                    f"{share.items.key_name(changed[0])!r}{rest} changed while the save was staged in slices. "
                    "Remedy (FC506): call finish_staging() before optimizer.step(), or have finish_before(optimizer) "
                    "do so; where something else changes it, as the forward pass a buffer, save without slice_bytes"
                )
        sums = np.asarray(checksums, dtype=np.uint64)
        return WriteMessages(b"", Checksums.of_items(sums, np.where(hashed, lengths, 0)))

    def _open_written(self, share: Share) -> int | None:
        """Return a descriptor of the file that has this rank's data; None if there is none, or not any more."""
        if self._written is None or not self._written.has(share.items):
            return None
        try:
            return self._written.open()
        except OSError as error:  # the save that wrote it has failed since, and has removed it
            logger.warning(f"the state is copied once more for the save to {self.directory.path}: {error}")
            return None

    def _write_in_waves(self, share: Share, nbytes: int, hashed: Iterable[tuple[int, int]]) -> list[int]:
        """Have the writer write while this rank's data is copied, through so much memory; wait for the last copy.

        Returns the block checksums of ``hashed``, as :meth:`Staging.finish` does: a bucket has whole blocks.
        """
        job = self._job(share)
        lock, self.lock = self.lock, None
        waves = self._slot.stage_in_waves(job, nbytes, _page_lock(share), lock)
        staging, left = Staging(share.sources(), np.empty(0, dtype=np.uint8), None), job.data_bytes
        blocks, checksums, begin = blocks_of(hashed), [], 0
        block = next(blocks, None)
        while left:
            bucket = waves.bucket()
            count = staging.fill(bucket)
            while block is not None and block[0] < begin + count:
                checksums.append(hash_block(bucket[block[0] - begin : block[1] - begin]))
                block = next(blocks, None)
            waves.send(count)
            left -= count
            begin += count
        return checksums

    def hand_over(self, report: SaveReport, begin: float, handle: SaveHandle | None = None) -> SaveHandle:
        """Hand the save over, and the lock with it. From now on a failure is its outcome: ranks do not meet again."""
        lock, self.lock = self.lock, None
        return self._slot.hand_over(report, begin, lock, handle)

    def lose_rank(self, error: LostRankError) -> None:
        """Have the other ranks' writers end the save: their ranks may have handed over without noticing the loss."""
        self._slot.refuse(error)


def _page_lock(share: Share) -> LockPages | None:
    """Return a function that page-locks memory for the device of a share."""
    return functools.partial(lock_pages, device=share.devices[0]) if share.devices else None


def blocks_of(items: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the range of bytes, begin and end, of each block; ``items`` has the range of each item."""
    for begin, end in items:
        for start in range(begin, end, BLOCK_BYTES):
            yield start, min(start + BLOCK_BYTES, end)


class Staging:
    """A segment, and the items that are copied into it end to end.

    If the device can copy beside other work, the copy of a slice runs on a stream of its own and is complete when
    :meth:`finish` returns. Other copies are complete when the call that makes them returns.
    """

    def __init__(self, sources: Iterable[Source], space: np.ndarray, device: str | None) -> None:
        """Take the items, uint8 memory of their size, and the device that the memory is page-locked for, if any."""
        self._sources, self._space, self._device = iter(sources), space, device
        self._source: Source | None = None
        self._is_copied = False
        # Items of at most so many bytes have been copied already.
        self._small = -1
        self._position = 0
        self._stream: Any = None

    @property
    def is_done(self) -> bool:
        """Return whether all items are copied, or being copied."""
        return self._position == len(self._space)

    def begin(self, sources: Iterable[Source], small: int) -> None:
        """Copy the small items of the sources, given once more, before all others, and wait for them."""
        position, self._small = 0, small
        for memory, start, count in sources:
            if count <= small:
                _copy_bytes(memory, start, self._space[position : position + count], wait=True)
            position += count

    def advance(self, nbytes: int) -> None:
        """Begin to copy so many more bytes, or the rest; they may still be on their way when this returns."""
        with self._side_stream():
            self._copy(nbytes, wait=self._device is None)

    def finish(self, hashed: Iterable[tuple[int, int]] = ()) -> list[int]:
        """Copy the rest, and wait for all of it.

        Returns the block checksums of ``hashed``, which has the range of bytes in the memory, begin and end, of each
        item. Bytes that are copied now are hashed while they are in cache.
        """
        if self._stream is not None:
            self._stream.synchronize()
        checksums = []
        for start, stop in blocks_of(hashed):
            self._copy(stop - self._position, wait=True)
            checksums.append(hash_block(self._space[start:stop]))
        self._copy(len(self._space), wait=True)
        return checksums

    def fill(self, bucket: np.ndarray) -> int:
        """Copy as much as fits to other memory, items cut into whole blocks; return the bytes, 0 at the end."""
        return self._copy_to(bucket, BLOCK_BYTES, wait=True)

    def _copy(self, nbytes: int, wait: bool) -> None:
        target = self._space[self._position : self._position + nbytes]
        self._position += self._copy_to(target, _UNIT, wait)

    def _copy_to(self, space: np.ndarray, unit: int, wait: bool) -> int:
        position = 0
        while position < len(space):
            if self._source is None:
                self._source = next(self._sources, None)
                if self._source is None:
                    break
                self._is_copied = self._source[2] <= self._small
            memory, start, left = self._source
            count = min(left, len(space) - position)
            if count < left:
                count -= count % unit
                if not count:
                    break
            if not self._is_copied:
                _copy_bytes(memory, start, space[position : position + count], wait)
            position += count
            self._source = (memory, start + count, left - count) if count < left else None
        return position

    @contextlib.contextmanager
    def _side_stream(self) -> Iterator[None]:
        if self._device is None:
            yield
            return
        import paddle

        with current_device(self._device):
            if self._stream is None:
                self._stream = paddle.device.Stream(self._device)
            with paddle.device.stream_guard(self._stream):
                yield


def _copy_bytes(memory: np.ndarray | DeviceMemory, start: int, target: np.ndarray, wait: bool) -> None:
    if isinstance(memory, np.ndarray):
        target[...] = memory[start : start + len(target)]
    elif len(target):
        memory.read_into(start, target, wait)

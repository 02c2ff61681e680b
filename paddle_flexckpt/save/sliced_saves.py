"""Staging of asynchronous saves: a rank's share is copied to memory that its writer shares, at once or in slices.

Slices are copied between the micro-steps of a training step.

Tested in tests/device/test_slices.py and tests/background/test_slices.py.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Union

import numpy as np

from paddle_flexckpt.background import SaveHandle
from paddle_flexckpt.catalog import CheckpointError, LostRankError, ValidationError
from paddle_flexckpt.forks import close_in_forks
from paddle_flexckpt.memory.device_memory import DeviceMemory, current_device
from paddle_flexckpt.native.checksums import BLOCK_BYTES, hash_block
from paddle_flexckpt.observers import notify
from paddle_flexckpt.undo import Undo

# The place of an item's bytes, the first of them there, and their number; host memory is uint8.
Source = tuple[Union[np.ndarray, DeviceMemory], int, int]
# Slices end at multiples of this, which are between elements of any dtype.
_UNIT = 16


# In a save in slices, items of at most so many bytes, and at most a slice, are copied as a whole in the call. Running
# statistics, which every forward pass changes, are among them.
SMALL_BYTES = 64 << 10


def blocks_of(items: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield first bytes and last ones exclusive of the blocks of items, of which these are given too."""
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
        self._is_there = False
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

        Returns the block checksums of ``hashed``: of items, by their first bytes in the memory and last ones exclusive.
        Bytes that are copied now are hashed while they are in cache.
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
                self._is_there = self._source[2] <= self._small
            memory, start, left = self._source
            count = min(left, len(space) - position)
            if count < left:
                count -= count % unit
                if not count:
                    break
            if not self._is_there:
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


class OpenSave(NamedTuple):
    """A save that is agreed and planned, of which nothing is staged yet.

    Attributes:
        stage_slice: Stages the next slice of this rank's share; returns whether there is more.
        hand_over: Stages the rest and hands the save over; its arguments are the handle, and the seconds that the
            caller spent elsewhere since the save began.
        give_up: Undoes what has been begun, on all ranks, and raises CheckpointError.
    """

    stage_slice: Callable[[], bool]
    hand_over: Callable[[SaveHandle, float], None]
    give_up: Callable[[], None]


class SlicedSave(SaveHandle):
    """An asynchronous save that is staged in slices, then followed as any other.

    The checkpoint has the state at the call. Tensors of more than 64 KiB, or of more than a slice, must not change
    before :meth:`finish_staging` has returned.
    """

    def __init__(self, path: str, unique_id: int, save: OpenSave) -> None:
        """Args: path: the checkpoint's directory. unique_id: its id there. save: what is to be carried on."""
        super().__init__(path, unique_id)
        self._save: OpenSave | None = save
        self._left = time.perf_counter()
        self._elsewhere = 0.0
        self._hook = Undo()
        close_in_forks(self, SlicedSave._leave_to_owner)

    @property
    def is_staged(self) -> bool:
        """Return whether there is nothing more to stage: :meth:`finish_staging` or :meth:`give_up` was called."""
        return self._save is None

    def stage_next(self) -> bool:
        """Stage one more slice: at most ``slice_bytes``. Call it between micro-steps; ranks do not wait for each other.

        Returns:
            Whether there is more to stage.
        """
        save = self._come_back()
        try:
            return save.stage_slice()
        finally:
            self._left = time.perf_counter()

    def finish_staging(self) -> SlicedSave:
        """Stage the rest, wait until all of it is there, and hand the save over. Every rank calls this; one collective.

        Returns:
            The handle itself, which ``wait()`` and ``result()`` serve from now on.

        Raises:
            ValidationError: The state has changed meanwhile, or replicas differ that have to be equal.
            CheckpointError: A rank could not stage its share. Nothing is saved.
        """
        save, begin = self._close(), time.perf_counter()
        try:
            save.hand_over(self, self._elsewhere)
        except CheckpointError as error:
            self.seen = True
            self.finish(error)
            notify("save", self.path, time.perf_counter() - begin, error)
            raise
        return self

    def finish_before(self, optimizer: Any) -> Undo:
        """Have the next ``optimizer.step()`` call :meth:`finish_staging` first. The step is not changed otherwise.

        Returns:
            An object whose ``put_back()`` removes the hook before that. The end of the staging removes it too.
        """
        self._hook.put_back()
        step = optimizer.step

        def finish_and_step(*arguments: Any, **options: Any) -> Any:
            if self._save is not None:
                self.finish_staging()
            return step(*arguments, **options)

        self._hook.set(optimizer, "step", finish_and_step)
        return self._hook

    def give_up(self) -> None:
        """Cancel the save. Every rank calls this in place of :meth:`finish_staging`; one collective.

        If other ranks call :meth:`finish_staging`, that raises, and nothing is saved either.
        """
        save = self._close()
        self.seen = True
        self.finish(CheckpointError(f"the save of id {self.unique_id} to {self.path!r} was given up"))
        try:
            save.give_up()
        except LostRankError:
            raise
        except CheckpointError:  # so it is on all ranks, whichever of them stage the rest
            pass

    def wait(self, timeout: float | None = None) -> bool:
        """Wait as :meth:`SaveHandle.wait` does.

        Raises:
            ValidationError: Not all is staged, so that the save would never end.
        """
        if self._save is not None and timeout != 0:
            raise ValidationError(
                [f"the save of id {self.unique_id} to {self.path!r} is not staged. Remedy: call finish_staging() first"]
            )
        return super().wait(timeout)

    def _leave_to_owner(self) -> None:
        self._save = None

    def _close(self) -> OpenSave:
        save, self._save = self._come_back(), None
        self._hook.put_back()
        return save

    def _come_back(self) -> OpenSave:
        self._check_own()
        if self._save is None:
            raise ValidationError([f"the save of id {self.unique_id} to {self.path!r} is staged, or was given up"])
        self._elsewhere += time.perf_counter() - self._left
        return self._save

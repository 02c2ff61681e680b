"""Copy a rank's share of a save into memory that its writer shares: at once, or in slices between micro-steps.

Tested in tests/device/test_slices.py and tests/background/test_slices.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Union

import numpy as np

from paddle_flexckpt.live.device_memory import DeviceMemory, current_device
from paddle_flexckpt.native.checksums import BLOCK_BYTES, hash_block

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

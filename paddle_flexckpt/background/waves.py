"""Waves: a share that is larger than the memory for it goes to the writer through a few buckets, used again and again.

The training process fills a bucket and sends its size; the writer answers when it has written it. At the end the
training process sends whether all ranks succeeded: before that the writer does not publish its part.

Tested in tests/background/test_waves.py.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence

import numpy as np

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.forks import close_in_forks

# The writer holds the last arrays that it has requested: up to a batch of a data file, which is less than a bucket. So
# two buckets are being written while two are being filled.
BUCKETS = 4
LEAST_BYTES = 64 << 20
_NUMBER_BYTES = 8
_GO = 0
_FREE, _ERROR = b"\1", b"\0"


def buckets_of(space: np.ndarray) -> list[np.ndarray]:
    """Cut the memory into buckets of one size; the same in both processes."""
    return list(space[: len(space) // BUCKETS * BUCKETS].reshape(BUCKETS, -1))


class WaveSender:
    """The training process's end of the buckets: it fills them."""

    def __init__(self, space: np.ndarray) -> None:
        """Take the memory; :attr:`theirs` is the writer's end of the connection."""
        self._buckets = buckets_of(space)
        self._ours, self.theirs = (close_in_forks(end) for end in socket.socketpair())
        self._count = 0

    def bucket(self) -> np.ndarray:
        """Wait until the next bucket is free, and return it.

        Raises:
            CheckpointError: The writer failed, or has ended.
        """
        self.theirs.close()
        self._count += 1
        if self._count > BUCKETS:
            word = self._receive(1)
            if word != _FREE:
                self._raise(word)
        return self._buckets[(self._count - 1) % BUCKETS]

    def send(self, nbytes: int) -> None:
        """Send the number of bytes in the bucket; more than 0.

        Raises:
            CheckpointError: The writer failed, or has ended.
        """
        try:
            self._ours.sendall(nbytes.to_bytes(_NUMBER_BYTES, "little"))
        except OSError:
            self._raise(_FREE)

    def _raise(self, word: bytes) -> None:
        # An earlier message of the writer may still be waiting.
        while word == _FREE:
            word = self._receive(1)
        text = "the background writer has ended while a save was handed over"
        if word == _ERROR:
            text = b"".join(iter(lambda: self._receive(1 << 16), b"")).decode(errors="replace")
        raise CheckpointError(text)

    def _receive(self, nbytes: int) -> bytes:
        """Return the next message, or nothing at the end. A writer that ended with unread messages causes a reset."""
        try:
            return self._ours.recv(nbytes)
        except ConnectionError:
            return b""

    def go(self) -> None:
        """Send that all ranks succeeded. If the writer has ended meanwhile, others notice."""
        with contextlib.suppress(OSError):
            self._ours.sendall(_GO.to_bytes(_NUMBER_BYTES, "little"))

    def close(self) -> None:
        """Close the connection. Before :meth:`go` that makes the save fail."""
        self.theirs.close()
        self._ours.close()


class WaveReceiver:
    """The writer's end of the buckets: it reads items from them."""

    def __init__(self, connection: socket.socket, space: np.ndarray) -> None:
        """Take the writer's end of the connection, and the memory."""
        self._socket, self._buckets = connection, buckets_of(space)
        self._count = 0

    def items(self, lengths: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield the bytes of items of these lengths, as a data file's writer wants them.

        Raises:
            CheckpointError: The training process has ended, or another rank failed.
        """
        bucket = np.empty(0, dtype=np.uint8)
        for length in lengths:
            if not length:
                yield bucket[:0]
            while length:
                if not len(bucket):
                    bucket = self._next()
                piece, bucket = bucket[:length], bucket[length:]
                length -= len(piece)
                yield piece
        if self._receive() != _GO:
            raise CheckpointError("more data came for a save than was planned")

    def _next(self) -> np.ndarray:
        # The bucket before the last is written by now.
        if self._count > 1:
            with contextlib.suppress(OSError):  # if the other end has died, nothing more comes
                self._socket.sendall(_FREE)
        self._count += 1
        return self._buckets[(self._count - 1) % BUCKETS][: self._receive()]

    def _receive(self) -> int:
        data = b""
        with contextlib.suppress(ConnectionError):
            data = self._socket.recv(_NUMBER_BYTES, socket.MSG_WAITALL)
        if len(data) < _NUMBER_BYTES:
            raise CheckpointError("a save was not handed over to its end: a rank failed, or its process ended")
        return int.from_bytes(data, "little")

    def fail(self, error: BaseException) -> None:
        """Tell the training process why this rank cannot write."""
        with contextlib.suppress(OSError):  # the other end has died, or has sent the reason itself
            self._socket.sendall(_ERROR + str(error).encode())

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

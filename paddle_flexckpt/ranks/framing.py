"""Messages over sockets that do not block: a head, the lengths of the payloads, and the payloads. No pickle.

Tested in tests/ranks/test_host_channel.py and tests/ranks/test_writer_group.py.
"""

from __future__ import annotations

import copy
import socket
import struct
from collections.abc import Sequence

from paddle_flexckpt.catalog import CheckpointError

# Payloads below this are put together, so that they leave in one system call.
_JOIN_BYTES = 1 << 20
_HEAD = struct.Struct("<QQ")  # number of the exchange, number of payloads; after it the length of each


class Leaving:
    """Send a message, as much at a time as the connection takes."""

    def __init__(self, exchange: int, payloads: Sequence[bytes | memoryview]) -> None:
        lengths = [len(payload) for payload in payloads]
        head = _HEAD.pack(exchange, len(lengths)) + struct.pack(f"<{len(lengths)}Q", *lengths)
        parts = [head, *payloads]
        if sum(lengths) < _JOIN_BYTES:
            parts = [b"".join(parts)]
        self._parts = [memoryview(part) for part in reversed(parts) if len(part)]

    def again(self) -> Leaving:
        """Return the same message, with the same memory, for another connection; nothing of it has been sent yet."""
        other = copy.copy(self)
        other._parts = [*self._parts]
        return other

    @property
    def is_done(self) -> bool:
        """Return whether all has been sent."""
        return not self._parts

    def send(self, connection: socket.socket) -> None:
        """Send what the connection takes now."""
        part = self._parts.pop()
        sent = 0
        try:
            sent = connection.send(part)
        finally:
            if sent < len(part):
                self._parts.append(part[sent:])


class Arriving:
    """Receive a message: its head, the lengths of its payloads, and then these.

    Attributes:
        exchange: The number in its head; -1 until that has come.
        payloads: All of them, when it is done.
        is_done: Whether all has come.
    """

    def __init__(self, expected: tuple[int, int] | None = None) -> None:
        """Args: expected: number of the exchange and of payloads, where these are known."""
        self.exchange = -1
        self.payloads: list[memoryview] = []
        self.is_done = False
        self._expected = expected
        self._lengths: tuple[int, ...] | None = None
        self._expect(_HEAD.size + (0 if expected is None else 8 * expected[1]))

    def _expect(self, count: int) -> None:
        self._buffer, self._filled = memoryview(bytearray(count)), 0

    def receive(self, connection: socket.socket) -> None:
        """Take what the connection has now.

        Raises:
            EOFError: It has been closed.
            CheckpointError: Another message comes than was expected.
        """
        got = connection.recv_into(self._buffer[self._filled :])
        if got == 0:
            raise EOFError
        self._filled += got
        while self._filled == len(self._buffer) and not self.is_done:
            self._take()

    def _take(self) -> None:
        """Take a part that has come as a whole, and expect the next one."""
        if self.exchange < 0:
            self.exchange, count = _HEAD.unpack(self._buffer[: _HEAD.size])
            if self._expected is None:
                self._expect(8 * count)
                return
            if (self.exchange, count) != self._expected:
                raise CheckpointError(
                    f"ranks are out of step: expected exchange {self._expected[0]} with {self._expected[1]} payloads, "
                    f"got exchange {self.exchange} with {count}"
                )
            self._buffer = self._buffer[_HEAD.size :]
        if self._lengths is None:
            self._lengths = struct.unpack(f"<{len(self._buffer) // 8}Q", self._buffer)
            self._expect(sum(self._lengths))
            return
        begin = 0
        for length in self._lengths:
            self.payloads.append(self._buffer[begin : begin + length])
            begin += length
        self.is_done = True

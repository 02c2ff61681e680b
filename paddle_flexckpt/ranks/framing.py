"""Messages over non-blocking sockets: a header, which has the lengths of the payloads, and the payloads. No pickle.

Tested in tests/ranks/test_host_channel.py and tests/ranks/test_writer_group.py.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Sequence

# The parts of a message with fewer bytes of payload are joined, so that it leaves in one system call.
_JOIN_BYTES = 1 << 20
# More than the memory of any host: a header with such a length is invalid.
_MOST_BYTES = 1 << 40


def _head(count: int) -> struct.Struct:
    """Return the form of a header: number of the exchange, number of payloads, and the length of each."""
    return struct.Struct(f"<{2 + count}Q")


def encode(exchange: int, payloads: Sequence[bytes | memoryview]) -> list[memoryview]:
    """Return the parts of a message, large payloads without a copy."""
    lengths = [len(payload) for payload in payloads]
    parts = [_head(len(lengths)).pack(exchange, len(lengths), *lengths), *payloads]
    if sum(lengths) < _JOIN_BYTES:
        parts = [b"".join(parts)]
    return [memoryview(part) for part in parts if len(part)]


class SendQueue:
    """The messages that are to leave by one connection, sent as fast as it accepts them."""

    def __init__(self, message: Sequence[memoryview] = ()) -> None:
        """Args: message: the parts of the first message, if there is one already."""
        self._parts = deque(message)

    def add(self, message: Sequence[memoryview]) -> None:
        """Append a message, to leave after the others."""
        self._parts.extend(message)

    @property
    def is_done(self) -> bool:
        """Return whether all has been sent."""
        return not self._parts

    def send(self, connection: socket.socket) -> None:
        """Send as much as the connection accepts now."""
        sent = connection.send(self._parts[0])
        self._parts[0] = self._parts[0][sent:]
        if not self._parts[0]:
            self._parts.popleft()


class IncomingMessage:
    """A message that arrives by a connection.

    Attributes:
        exchange: The number of the exchange in its header; -1 until the header has arrived.
        payloads: Its payloads, once the message is complete.
    """

    def __init__(self, exchanges: Sequence[int], count: int) -> None:
        """Expect a message of one of some exchanges, with so many payloads."""
        self.exchange = -1
        self.payloads: list[memoryview] = []
        self._exchanges, self._count = exchanges, count
        self._left = self._head = memoryview(bytearray(_head(count).size))

    @property
    def is_done(self) -> bool:
        """Return whether the whole message has arrived."""
        return self.exchange >= 0 and not self._left

    def receive(self, connection: socket.socket) -> None:
        """Receive what the connection has now.

        Raises:
            EOFError: It has been closed.
            OSError: It is broken, or has another message than the expected one.
        """
        got = connection.recv_into(self._left)
        if got == 0:
            raise EOFError
        self._left = self._left[got:]
        if self.exchange < 0 and not self._left:
            self._begin(*_head(self._count).unpack(self._head))

    def _begin(self, exchange: int, count: int, *lengths: int) -> None:
        """Allocate memory for the payloads."""
        if exchange not in self._exchanges or count != self._count:
            raise OSError(
                f"ranks are out of step: expected exchange {self._exchanges[0]} with {self._count} payloads, got "
                f"exchange {exchange} with {count}"
            )
        if sum(lengths) > _MOST_BYTES:
            raise OSError(f"expected at most {_MOST_BYTES} bytes in a message, got {sum(lengths)}")
        self.exchange, self._left = exchange, memoryview(bytearray(sum(lengths)))
        begin = 0
        for length in lengths:
            self.payloads.append(self._left[begin : begin + length])
            begin += length

"""Carry a byte stream between two processes of one machine through memory that both have mapped.

The sender copies into slots and the receiver out of them, while they are in cache: that is twice as fast as a socket.
The socket between the two carries only the number of bytes in a slot, and back, that the slot is free; so either end
notices at once when the other has died.

Tested in tests/ranks/test_transport.py.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct

import numpy as np

SLOTS = 4
# The longest slot, and about the bytes of all slots of one rank together.
SLOT_BYTES, _ALL_BYTES = 512 << 10, 16 << 20
_LENGTH = struct.Struct("<I")


def receive_exactly(connection: socket.socket, view: memoryview) -> None:
    """Fill a buffer from a socket.

    Raises:
        EOFError: The other side has closed it.
        OSError: The connection broke, or timed out.
    """
    while len(view):
        got = connection.recv_into(view)
        if got == 0:
            raise EOFError("connection closed")
        view = view[got:]


class SharedSender:
    """A sender of bytes to a process of this machine."""

    def __init__(self, connection: socket.socket, ranks: int) -> None:
        """Allocate the memory and send its descriptor to a process of this machine; ``ranks``: members in all."""
        self._connection, self._slot, self._free = connection, 0, SLOTS
        size = max(64 << 10, min(SLOT_BYTES, _ALL_BYTES // (SLOTS * ranks)))
        descriptor = os.memfd_create("flexckpt-stream", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, SLOTS * size)
            self._memory = np.frombuffer(mmap.mmap(descriptor, SLOTS * size), dtype=np.uint8).reshape(SLOTS, size)
            socket.send_fds(connection, [_LENGTH.pack(size)], [descriptor])
        finally:
            os.close(descriptor)

    def send(self, data: np.ndarray) -> None:
        """Send a uint8 array.

        Raises:
            EOFError: The receiver has gone.
            OSError: Likewise, or it took nothing for too long.
        """
        for begin in range(0, len(data), self._memory.shape[1]):
            part = data[begin : begin + self._memory.shape[1]]
            self._wait_for(1)
            self._memory[self._slot, : len(part)] = part
            self._connection.sendall(_LENGTH.pack(len(part)))
            self._slot, self._free = (self._slot + 1) % SLOTS, self._free - 1

    def finish(self) -> None:
        """Wait until all has been received; errors as of :meth:`send`."""
        self._wait_for(SLOTS)

    def _wait_for(self, slots: int) -> None:
        while self._free < slots:
            freed = self._connection.recv(SLOTS)
            if not freed:
                raise EOFError("connection closed")
            self._free += len(freed)


class SharedReceiver:
    """A receiver of what a :class:`SharedSender` sends."""

    def __init__(self, connection: socket.socket) -> None:
        """Take the memory that the sender hands over."""
        self._connection, self._slot = connection, -1
        self._rest = np.empty(0, dtype=np.uint8)
        message, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, 1)
        if not descriptors:
            raise EOFError("connection closed")
        try:
            (size,) = _LENGTH.unpack(message)
            self._memory = np.frombuffer(mmap.mmap(descriptors[0], SLOTS * size), dtype=np.uint8).reshape(SLOTS, size)
        finally:
            os.close(descriptors[0])

    def receive(self, target: np.ndarray) -> None:
        """Fill a uint8 array.

        Raises:
            EOFError: The sender has gone.
            OSError: Likewise, or it sent nothing for too long.
        """
        length = memoryview(bytearray(_LENGTH.size))
        while len(target):
            if not len(self._rest):
                receive_exactly(self._connection, length)
                self._slot = (self._slot + 1) % SLOTS
                self._rest = self._memory[self._slot, : _LENGTH.unpack(length)[0]]
            count = min(len(target), len(self._rest))
            target[:count] = self._rest[:count]
            target, self._rest = target[count:], self._rest[count:]
            if not len(self._rest):
                self._connection.sendall(b"\0")

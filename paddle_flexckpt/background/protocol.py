"""Messages between the training process and its writer: JSON and descriptors over a Unix socket.

What is large, the data and its description, lies in shared memory. So messages have a few hundred bytes, a save is
handed over in one piece, and handing it over never waits for the writer.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from typing import Any

_HEAD_BYTES = 8
# A message's descriptors: a segment and a lock.
_MAX_DESCRIPTORS = 2
_MAX_MESSAGE_BYTES = 16 << 20


class Channel:
    """One end of the connection."""

    def __init__(self, connection: socket.socket) -> None:
        """Args: connection: a connected Unix stream socket, which is the channel's own from now on."""
        self._socket = connection

    def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Sends one message; the other end gets descriptors of its own for what the given ones stand for.

        Raises:
            ConnectionError: The other end is gone.
        """
        text = json.dumps(message).encode()
        data = memoryview(len(text).to_bytes(_HEAD_BYTES, "little") + text)
        # The kernel attaches the descriptors to the first byte.
        sent = socket.send_fds(self._socket, [data], list(descriptors)) if descriptors else 0
        self._socket.sendall(data[sent:])

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """The next message and its descriptors, or None at the end: the other end has closed, or its process ended.

        Raises:
            ValueError: What came is not a message, or this process cannot have more descriptors.
        """
        try:
            head, descriptors, flags, _ = socket.recv_fds(self._socket, _HEAD_BYTES, _MAX_DESCRIPTORS)
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
            if flags & socket.MSG_CTRUNC:
                raise ValueError("descriptors of a message were lost: too many open files")
            head += self._exactly(_HEAD_BYTES - len(head))
            length = int.from_bytes(head, "little")
            if length > _MAX_MESSAGE_BYTES:
                raise ValueError(f"a message of {length} bytes")
            message = json.loads(self._exactly(length))
        except (EOFError, ConnectionError):
            return None
        return message, descriptors

    def _exactly(self, count: int) -> bytes:
        parts = []
        while count:
            part = self._socket.recv(count)
            if not part:
                raise EOFError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def end(self) -> None:
        """Says that nothing more will be sent; what comes can still be received."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            # The other end has gone first.
            return

    def close(self) -> None:
        """Closes this process's end."""
        self._socket.close()

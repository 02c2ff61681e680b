"""Protocol: the messages between the training process and its writer.

Messages are JSON and descriptors over a Unix socket. Large objects are in shared memory: the data, and behind it the
job that describes it. So a message has a few hundred bytes, a save is handed over in one piece, and handing it over
never waits for the writer.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from paddle_flexckpt.catalog import Catalog
from paddle_flexckpt.catalog.wire import decode_catalog, encode_catalog, join, split
from paddle_flexckpt.forks import close_in_forks
from paddle_flexckpt.native.node_commit import NodeLayout
from paddle_flexckpt.native.save_names import SaveNames

_HEAD_BYTES = 8
# The most descriptors of a message: a segment, a lock, and the connection of waves or the file with the data.
_MAX_DESCRIPTORS = 3
_MAX_MESSAGE_BYTES = 16 << 20


@dataclass(frozen=True, eq=False)
class WriteJob:
    """One rank's share of one save, for its writer.

    Attributes:
        path: The checkpoint's directory, as the user gave it.
        storage: What opens the directory in another process.
        lock: The data by which the coordinator's writer takes the lock over, beside a descriptor; None on others.
        names: The names of the save's files.
        items: This rank's rows of the write plan, in the order of their byte offsets.
        coordinator: The one of ``ranks`` that commits.
        timeout: Seconds to wait for the other ranks.
        addresses: The address of the writer of each of ``ranks``, with its secret; empty for one rank alone.
        layout: The nodes of a save to nodes, whose data file the rank has written itself; None of another save.
        part: That rank's part of the manifest, encoded.
    """

    path: str
    storage: dict[str, Any]
    lock: dict[str, Any] | None
    names: SaveNames
    items: Catalog
    rank: int
    ranks: tuple[int, ...]
    coordinator: int
    step: int | None
    timeout: float
    addresses: tuple[str, ...] = ()
    layout: NodeLayout | None = None
    part: bytes = b""

    @property
    def context(self) -> str:
        """Return what is being done, for errors."""
        return f"cannot save to {self.path!r}" if self.layout is None else "cannot save to the nodes' directories"

    @property
    def data_bytes(self) -> int:
        """Return the bytes of the items."""
        return int(self.items.byte_length.sum())

    @property
    def is_coordinator(self) -> bool:
        """Return whether this rank commits."""
        return self.rank == self.coordinator

    @property
    def position(self) -> int:
        """Return the position of this rank."""
        return self.ranks.index(self.rank)

    @property
    def coordinator_position(self) -> int:
        """Return the position of the rank that commits."""
        return self.ranks.index(self.coordinator)

    def encode(self) -> bytes:
        """Encode the job for the writer."""
        head = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("items", "part")}
        head["names"] = asdict(self.names)
        head["layout"] = None if self.layout is None else asdict(self.layout)
        return join((json.dumps(head).encode(), encode_catalog(self.items), self.part))

    @classmethod
    def decode(cls, data: bytes) -> WriteJob:
        """Decode what :meth:`encode` returned."""
        text, items, part = split(data)
        head = json.loads(text)
        head["names"] = SaveNames(**head["names"])
        head["ranks"] = tuple(head["ranks"])
        head["addresses"] = tuple(head["addresses"])
        head["layout"] = None if head["layout"] is None else NodeLayout.from_dict(head["layout"])
        return cls(items=decode_catalog(items), part=bytes(part), **head)


class Channel:
    """One end of the connection between the training process and its writer.

    Attributes:
        connection: The socket.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Args: connection: a connected Unix stream socket, which this channel closes."""
        self.connection = close_in_forks(connection)

    def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send one message; the other end gets its own duplicates of the descriptors.

        Raises:
            ConnectionError: The other end is gone.
        """
        text = json.dumps(message).encode()
        data = memoryview(len(text).to_bytes(_HEAD_BYTES, "little") + text)
        # The kernel attaches the descriptors to the first byte.
        sent = socket.send_fds(self.connection, [data], list(descriptors)) if descriptors else 0
        self.connection.sendall(data[sent:])

    @property
    def has_room(self) -> bool:
        """Return whether a short message can be sent without waiting for the other end, which may be stopped."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.connection, selectors.EVENT_WRITE)
            return bool(selector.select(0))

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """Return the next message and its descriptors; None at the end: the other end has closed, or its process ended.

        Raises:
            ValueError: The data is not a message, or this process cannot have more descriptors.
        """
        try:
            head, descriptors, flags, _ = socket.recv_fds(self.connection, _HEAD_BYTES, _MAX_DESCRIPTORS)
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
        data = bytearray()
        while len(data) < count:
            received = self.connection.recv(count - len(data))
            if not received:
                raise EOFError
            data += received
        return bytes(data)

    def end(self) -> None:
        """Signal the end of this side; messages of the other side can still be received."""
        try:
            self.connection.shutdown(socket.SHUT_WR)
        except OSError:
            # The other end has closed first.
            return

    def close(self) -> None:
        """Close this process's end."""
        self.connection.close()

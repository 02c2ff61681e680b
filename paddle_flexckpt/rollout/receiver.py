"""The receiver of segments on an engine's machine, and a connection to it. ``flexckpt receive`` runs it.

A sender says what it is going to write. Frames follow, each a region of the segment and its bytes. The receiver answers
an empty frame with the number of bytes that it has written, and a second one, of the sender that leads, with the
segment's digest: from then on nobody opens it for writing.

Tested in tests/rollout/test_receiver.py.
"""

from __future__ import annotations

import math
import socket
import socketserver
import struct
import threading
from dataclasses import asdict
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.rollout.authenticated import SECRET, AuthenticatedConnection, refuse
from paddle_flexckpt.rollout.segment import DIRECTORY, ELEMENTS, Region, SegmentDirectory, SegmentNames

PORT = 29555
# The most axes of a region, and the most bytes of a frame.
MAX_AXES, MAX_FRAME = 64, 64 << 20
# A sender has to prove itself within so long; then it may wait for other ranks.
GREETING_SECONDS = 10.0
# The most connections that have proved nothing; others wait, and are not accepted before one of them ends.
MAX_STRANGERS = 64
# A receiver that takes or says nothing for so long counts as dead.
SILENCE_SECONDS = 600.0
# A host that went down sends nothing: the kernel asks it.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
# Size of an element (0: the end), number of axes, first byte.
_FRAME = struct.Struct("<BBQ")


class RemoteSink:
    """A segment on another machine as a destination: a connection to its receiver."""

    def __init__(self, address: str, secret: bytes, names: SegmentNames) -> None:
        """Connect to ``host:port``, and have the receiver open the segment; CheckpointError if it does not.

        Without a token, others of the channel are removed, and the connection ends.
        """
        self._address = address
        self.place, self._sent = "", 0
        host, _, port = address.rpartition(":")
        try:
            self._socket = socket.create_connection((host.strip("[]"), int(port)), SILENCE_SECONDS)
        except (OSError, ValueError) as error:
            raise self._error(error) from error
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._peer = AuthenticatedConnection(self._socket, secret, False, SILENCE_SECONDS)
            self._socket.settimeout(SILENCE_SECONDS)
            self._peer.send_object(asdict(names))
            reply = self._peer.read_object()
            self.place, self.path = str(reply["place"]), str(reply["path"])
        except (OSError, EOFError, ValueError, KeyError) as error:
            self.close()
            raise self._error(error) from error

    def _error(self, error: object) -> CheckpointError:
        if "Remedy (" in str(error):
            return CheckpointError(f"the receiver at {self._address}: {error}")
        return CheckpointError(
            f"the receiver at {self._address}: {error}. The engine serves the version it had. Remedy (FC951): start "
            f"`flexckpt receive` on the engine's machine, with the same {SECRET} as here, and push again"
        )

    def write(self, region: Region, values: np.ndarray) -> None:
        """Send values."""
        axes = len(region.extents)
        head = _FRAME.pack(region.itemsize, axes, region.base)
        numbers = struct.pack(f"<{2 * axes}q", *region.extents, *region.strides)
        try:
            for message in (head, numbers, memoryview(values.ravel().view(np.uint8))):
                self._peer.send(message)
        except OSError as error:
            try:
                self._peer.read_object()
            except (OSError, EOFError, ValueError) as said:  # why the receiver has closed it
                raise self._error(said if isinstance(said, ValueError) else error) from error
        self._sent += values.nbytes

    def _end(self, wanted: str) -> Any:
        try:
            self._peer.send(_FRAME.pack(0, 0, 0))
            return self._peer.read_object()[wanted]
        except (OSError, EOFError, ValueError, KeyError) as error:
            raise self._error(error) from error

    def finish(self) -> None:
        """Wait until everything has arrived."""
        written = self._end("written")
        if written != self._sent:
            raise self._error(f"{written} of {self._sent} bytes have arrived")

    def seal(self) -> str:
        """Have the segment opened for writing no more, and return its digest; all senders have finished."""
        return str(self._end("digest"))

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class Receiver:
    """A server that writes what senders send into segments, each connection in a thread."""

    def __init__(self, host: str, port: int, secret: bytes, directory: str = DIRECTORY) -> None:
        """Listen at a port, 0 for any; ``directory`` is the shared memory that the engine sees, too."""
        self._secret, self._directory = secret, directory
        self._channels: dict[str, SegmentDirectory] = {}
        self._lock, self._room = threading.Lock(), threading.Semaphore(MAX_STRANGERS)
        receiver = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                receiver._serve(self.request)

        class Server(socketserver.ThreadingTCPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            allow_reuse_address = daemon_threads = True
            request_queue_size = 1024

            def process_request(self, request: Any, client_address: Any) -> None:
                receiver._room.acquire()
                try:
                    super().process_request(request, client_address)
                except RuntimeError:  # no thread can be started
                    receiver._room.release()
                    raise

        self._server = Server((host, port), Handler)

    @property
    def address(self) -> str:
        """Return ``host:port``."""
        host, port = self._server.server_address[:2]
        return f"{host!s}:{port}"

    def run(self) -> None:
        """Serve until :meth:`close`."""
        self._server.serve_forever()

    def close(self) -> None:
        """Stop, and forget the segments; their files stay for the engine."""
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            peer = AuthenticatedConnection(connection, self._secret, True, GREETING_SECONDS)
        except (OSError, EOFError, ValueError) as error:
            refuse(connection, error, None, GREETING_SECONDS)
            return
        finally:
            self._room.release()
        try:
            connection.settimeout(None)
            self._take(connection, peer)
        except (EOFError, ConnectionError, TimeoutError):
            return  # the sender died, and says so itself if it lives
        except Exception as error:
            refuse(connection, error, peer, SILENCE_SECONDS)

    def _take(self, connection: socket.socket, peer: AuthenticatedConnection) -> None:
        """Write what one sender sends; whatever is raised, its segment, which will never be whole, is removed."""
        asked = peer.read_object()
        names = SegmentNames(**{**asked, "kept": tuple(asked["kept"])})
        if not all(each.isalnum() for each in (names.channel, names.token or "0", *names.kept)):
            raise ValueError("names that no sender gives")
        with self._lock:
            directory = self._channels.setdefault(names.channel, SegmentDirectory(self._directory))
            if names.token:
                memory = directory.open(names)
            else:
                directory.clear(names)
        try:
            peer.send_object({"place": directory.place, "path": directory.path(names.file(names.token))})
            if not names.token:
                return
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            peer.send_object({"written": _receive(peer, memory)})
            try:
                _receive(peer, memory[:0])
            except EOFError:
                return  # the sender has finished, and another one leads
            peer.send_object({"digest": directory.seal(names)})
        except BaseException:
            with self._lock:
                directory.drop(names)
            raise


def _receive(peer: AuthenticatedConnection, memory: np.ndarray) -> int:
    """Write frames until the last one; return the bytes."""
    written = 0
    while True:
        itemsize, axes, base = _FRAME.unpack(peer.read(_FRAME.size))
        if itemsize == 0:
            return written
        if itemsize not in ELEMENTS or axes > MAX_AXES:
            raise ValueError(f"a region of {axes} axes, with elements of {itemsize} bytes")
        numbers = struct.unpack(f"<{2 * axes}q", peer.read(16 * axes))
        extents = numbers[:axes]
        nbytes = itemsize * math.prod(extents)
        if min(numbers, default=0) < 0 or not 0 < nbytes <= min(MAX_FRAME, len(memory)):
            raise ValueError(f"a region of {extents} elements")
        place = Region(base, extents, numbers[axes:], itemsize).of(memory)
        # Nobody reads a segment before it is complete: bytes may arrive in their place before they are compared.
        values = place if place.flags.c_contiguous else np.empty(extents, place.dtype)
        peer.fill(memoryview(values.reshape(-1).view(np.uint8)))
        if values is not place:
            place[...] = values
        written += nbytes

"""The receiver of segments on an engine's machine, and a connection to it. ``flexckpt receive`` runs it.

A connection begins with a challenge: the receiver sends random bytes, and the sender answers with their digest by the
common secret and with what it is going to write. Frames follow, each a region of the segment and its bytes with a
digest. The receiver answers an empty frame with the number of bytes that it has written. There is no pickle, and data
is not encrypted.

Tested in tests/rollout/test_receiver.py.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import os
import socket
import socketserver
import struct
import threading
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import xxhash

from paddle_flexckpt.catalog import CheckpointError, ValidationError
from paddle_flexckpt.rollout.segment import DIRECTORY, ELEMENTS, Region, SegmentDirectory, SegmentNames

PROTOCOL = 1
PORT = 29555
SECRET = "FLEXCKPT_RECEIVE_SECRET"
# The most axes of a region, and the most bytes of a frame.
MAX_AXES, MAX_FRAME = 64, 64 << 20
# A sender has to introduce itself within so long; then it may wait for other ranks.
GREETING_SECONDS = 60.0
# A receiver that takes or says nothing for so long counts as dead.
SILENCE_SECONDS = 600.0
# A host that went down sends nothing: the kernel asks it.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
_LENGTH = struct.Struct("<I")
# Size of an element (0: the end), number of axes, first byte, digest of the bytes.
_FRAME = struct.Struct("<BBQ16s")


def _read(connection: socket.socket, nbytes: int) -> bytearray:
    """Return the next bytes; raises EOFError if the other side has closed the connection."""
    data = bytearray(nbytes)
    _fill(connection, memoryview(data))
    return data


def _fill(connection: socket.socket, left: memoryview) -> None:
    while left:
        got = connection.recv_into(left)
        if not got:
            raise EOFError("the connection was closed")
        left = left[got:]


def _send_text(connection: socket.socket, value: Mapping[str, Any]) -> None:
    text = json.dumps(value).encode()
    connection.sendall(_LENGTH.pack(len(text)) + text)


def _read_text(connection: socket.socket) -> dict[str, Any]:
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    if length > 1 << 20:
        raise ValueError(f"a message of {length} bytes")
    value = json.loads(_read(connection, length))
    if not isinstance(value, dict):
        raise ValueError("a message that is no object")
    return value


def _answer(secret: bytes, challenge: bytes) -> str:
    return hmac.new(secret, challenge, hashlib.sha256).hexdigest()


class RemoteSink:
    """A segment on another machine as a destination: a connection to its receiver."""

    def __init__(self, address: str, secret: bytes, names: SegmentNames) -> None:
        """Connect, and have the receiver open the segment.

        Args:
            address: ``host:port`` of the receiver.
            secret: The common secret.
            names: The segment; without a token, others of the channel are removed, and the connection ends.

        Raises:
            CheckpointError: The receiver cannot be reached, or refuses.
        """
        self._address = address
        self.place, self._sent = "", 0
        host, _, port = address.rpartition(":")
        try:
            self._connection = socket.create_connection((host.strip("[]"), int(port)), SILENCE_SECONDS)
        except (OSError, ValueError) as error:
            raise self._error(error) from error
        try:
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            answer = _answer(secret, bytes(_read(self._connection, 16)))
            _send_text(self._connection, {"protocol": PROTOCOL, "answer": answer, **asdict(names)})
            reply = self._reply()
            self.place, self.path = str(reply["place"]), str(reply["path"])
        except (OSError, EOFError, ValueError, KeyError) as error:
            self._connection.close()
            raise self._error(error) from error

    def _error(self, error: object) -> CheckpointError:
        if "Remedy (" in str(error):
            return CheckpointError(f"the receiver at {self._address}: {error}")
        return CheckpointError(
            f"the receiver at {self._address}: {error}. The engine serves the version it had. Remedy (FC951): start "
            f"`flexckpt receive` on the engine's machine, with the same {SECRET} as here, and push again"
        )

    def _reply(self) -> dict[str, Any]:
        reply = _read_text(self._connection)
        if "error" in reply:
            raise ValueError(reply["error"])
        return reply

    def write(self, region: Region, values: np.ndarray) -> None:
        """Send values."""
        axes = len(region.extents)
        data = memoryview(values.ravel().view(np.uint8))
        head = _FRAME.pack(region.itemsize, axes, region.base, xxhash.xxh3_128_digest(data))
        numbers = struct.pack(f"<{2 * axes}q", *region.extents, *region.strides)
        try:
            self._connection.sendall(head + numbers)
            self._connection.sendall(data)
        except OSError as error:
            raise self._error(self._refusal() or error) from error
        self._sent += data.nbytes

    def _refusal(self) -> str:
        """Return why the receiver has closed the connection, if it said so."""
        try:
            return str(_read_text(self._connection).get("error", ""))
        except (OSError, EOFError, ValueError):
            return ""

    def finish(self) -> None:
        """Wait until everything has arrived; close."""
        try:
            self._connection.sendall(_FRAME.pack(0, 0, 0, bytes(16)))
            written = self._reply().get("written")
            if written != self._sent:
                raise ValueError(f"{written} of {self._sent} bytes have arrived")
        except (OSError, EOFError, ValueError) as error:
            raise self._error(error) from error
        finally:
            self.close()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class Receiver:
    """A server that writes what senders send into segments, each connection in a thread."""

    def __init__(self, host: str, port: int, secret: bytes, directory: str = DIRECTORY) -> None:
        """Listen.

        Args:
            host: The address to listen at.
            port: Its port; 0: any.
            secret: The common secret; empty: at this machine's own address alone.
            directory: Of shared memory, which the engine sees too.

        Raises:
            ValidationError: There is no secret, and others could reach the address.
            OSError: The address is in use.
        """
        if not secret and host not in ("127.0.0.1", "::1", "localhost"):
            raise ValidationError(
                [f"a receiver at {host} needs a secret. Remedy (FC951): set {SECRET}, the same text as on the trainer"]
            )
        self._secret, self._directory = secret, directory
        self._channels: dict[str, SegmentDirectory] = {}
        self._lock = threading.Lock()
        receiver = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                receiver._serve(self.request)

        class Server(socketserver.ThreadingTCPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            allow_reuse_address = daemon_threads = True

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
        connection.settimeout(GREETING_SECONDS)
        directory, names = None, None
        try:
            directory, names = self._greet(connection)
            with self._lock:
                if names.token:
                    memory = directory.open(names)
                else:
                    directory.clear(names)
            _send_text(connection, {"place": directory.place, "path": directory.path(names.file(names.token))})
            if not names.token:
                return
            connection.settimeout(None)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            written = _receive(connection, memory)
            _send_text(connection, {"written": written})
        except (OSError, EOFError, ValueError, TypeError, KeyError, CheckpointError) as error:
            if directory is not None and names is not None:
                with self._lock:  # a part will never come: nobody can use the segment
                    directory.drop(names)
            if isinstance(error, (EOFError, ConnectionError, TimeoutError)):
                return  # the sender died, and says so itself if it lives
            try:
                _send_text(connection, {"error": str(error)})
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(1 << 16):
                    pass  # what was under way, so that the error arrives
            except OSError:
                return

    def _greet(self, connection: socket.socket) -> tuple[SegmentDirectory, SegmentNames]:
        challenge = os.urandom(16)
        connection.sendall(challenge)
        asked = _read_text(connection)
        if not hmac.compare_digest(_answer(self._secret, challenge), str(asked.pop("answer", ""))):
            raise ValueError("the secrets differ")
        if asked.pop("protocol", None) != PROTOCOL:
            raise ValueError("another version of the library sends")
        names = SegmentNames(**{**asked, "kept": tuple(asked["kept"])})
        if not all(each.isalnum() for each in (names.channel, names.token or "0", *names.kept)):
            raise ValueError("names that no sender gives")
        with self._lock:
            return self._channels.setdefault(names.channel, SegmentDirectory(self._directory)), names


def _receive(connection: socket.socket, memory: np.ndarray) -> int:
    """Write frames until the last one; return the bytes."""
    written = 0
    while True:
        itemsize, axes, base, digest = _FRAME.unpack(_read(connection, _FRAME.size))
        if itemsize == 0:
            return written
        if itemsize not in ELEMENTS or axes > MAX_AXES:
            raise ValueError(f"a region of {axes} axes, with elements of {itemsize} bytes")
        numbers = struct.unpack(f"<{2 * axes}q", _read(connection, 16 * axes))
        extents = numbers[:axes]
        nbytes = itemsize * math.prod(extents)
        if min(numbers, default=0) < 0 or not 0 < nbytes <= min(MAX_FRAME, len(memory)):
            raise ValueError(f"a region of {extents} elements")
        place = Region(base, extents, numbers[axes:], itemsize).of(memory)
        # Nobody reads a segment before it is complete: bytes may arrive in their place before they are compared.
        values = place if place.flags.c_contiguous else np.empty(extents, place.dtype)
        _fill(connection, memoryview(values.reshape(-1).view(np.uint8)))
        if xxhash.xxh3_128_digest(values) != digest:
            raise ValueError("bytes changed on their way")
        if values is not place:
            place[...] = values
        written += nbytes

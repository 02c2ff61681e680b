"""Frames on a local socket: a fixed struct, a JSON header, raw bytes.

Both the world's controller and the mesh of ranks use them. There is no pickle: a frame can carry numbers, text and
bytes, and nothing in it can make the reader run code.

A connection starts with a *hello* that carries a shared random token. It is compared in constant time, and until it has
been accepted no frame above :data:`HELLO_LIMIT` is read, so a stranger on the same machine can neither join nor exhaust
memory. Tested in tests/distributed/test_cpu_world.py.
"""

from __future__ import annotations

import hmac
import json
import socket
import struct
from typing import Any

Header = dict[str, Any]

#: Largest hello frame: a token, a rank and a process id fit many times over.
HELLO_LIMIT = 4096
#: Largest JSON header and payload of an accepted connection. A corrupted length must not become a huge allocation.
HEADER_LIMIT = 256 << 20
PAYLOAD_LIMIT = 16 << 30

_PREFIX = struct.Struct("<4sIQ")
_MAGIC = b"FxF1"


class FrameError(ConnectionError):
    """An error of a peer that sent something else than a frame of this protocol."""


def send_frame(sock: socket.socket, header: Header, payload: bytes | memoryview = b"") -> None:
    """Write one frame: a header that JSON can express, and the raw bytes that follow it."""
    text = json.dumps(header).encode()
    sock.sendall(_PREFIX.pack(_MAGIC, len(text), len(payload)) + text)
    if len(payload):
        sock.sendall(payload)


def recv_frame(sock: socket.socket, limit: int | None = None) -> tuple[Header, bytearray]:
    """Read the header and the payload of one frame, each of ``limit`` bytes at most (the module's limits when None).

    Raises:
        EOFError: the peer closed the connection between two frames.
        FrameError: the bytes are not a frame, the frame is too large, or the connection ended inside it.
    """
    prefix = _read(sock, _PREFIX.size, at_boundary=True)
    magic, header_size, payload_size = _PREFIX.unpack(prefix)
    if magic != _MAGIC:
        raise FrameError(f"not a frame: it starts with {bytes(magic)!r}")
    if header_size > (HEADER_LIMIT if limit is None else limit):
        raise FrameError(f"a header of {header_size} bytes is above the limit")
    if payload_size > (PAYLOAD_LIMIT if limit is None else limit):
        raise FrameError(f"a payload of {payload_size} bytes is above the limit")
    try:
        header = json.loads(_read(sock, header_size))
    except ValueError as error:
        raise FrameError(f"the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise FrameError(f"the header is not an object but {type(header).__name__}")
    return header, _read(sock, payload_size)


def send_hello(sock: socket.socket, token: str, **fields: Any) -> None:
    """Send the first frame of a connection: the shared token and the caller's identity."""
    send_frame(sock, {"token": token, **fields})


def accept_hello(sock: socket.socket, token: str, timeout: float = 10.0) -> Header:
    """Read the first frame of an incoming connection, check its token, and return the rest of it.

    Raises:
        FrameError: the caller does not know the token, or is silent.
    """
    sock.settimeout(timeout)
    try:
        header, _ = recv_frame(sock, HELLO_LIMIT)
    except (EOFError, socket.timeout) as error:
        raise FrameError("a connection without a hello") from error
    if not hmac.compare_digest(str(header.pop("token", "")).encode(), token.encode()):
        raise FrameError("a connection with a wrong token was refused")
    sock.settimeout(None)
    return header


def _read(sock: socket.socket, size: int, at_boundary: bool = False) -> bytearray:
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        count = sock.recv_into(view[done:])
        if count == 0:
            if at_boundary and done == 0:
                raise EOFError("the connection was closed")
            raise FrameError(f"the connection ended after {done} of {size} bytes")
        done += count
    return data

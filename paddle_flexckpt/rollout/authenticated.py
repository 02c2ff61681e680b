"""Connections whose sides have proved a common secret to each other, and whose bytes nobody can change.

The receiver greets with a mark and a nonce; the sender answers with a mark, a nonce and its proof; the receiver answers
with its own. A proof is an HMAC of both nonces. From then on each side adds what it sends to an HMAC by a key of this
connection and direction, and sends its value after each message: one that was changed, left out, repeated, or taken
from elsewhere is refused. Nothing is encrypted, and nothing of a stranger is parsed.

Tested in tests/rollout/test_receiver.py.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.media import removals

SECRET = "FLEXCKPT_RECEIVE_SECRET"
# The secret of a user's processes on one machine, made where none is given.
SECRET_FILE = "~/.flexckpt_receive_secret"
LEAST_BYTES = 16
# The mark of the protocol's version; version 1 had random bytes there.
_MARK = b"FXR\x02"
_NONCE, _TAG = 12, 32
_LENGTH = struct.Struct("<I")


def find_secret(address: str, makes: bool = False) -> bytes:
    """Return the secret for a receiver at ``host:port``: the environment's; for this machine, or that of a file.

    ``makes``: whether to make the file if it is not there. ValidationError: there is no secret, or it is too short.
    """
    secret, where = os.environ.get(SECRET, "").encode(), ""
    if not secret and address.rpartition(":")[0].strip("[]") in ("127.0.0.1", "::1", "localhost"):
        secret, where = _read_secret(os.path.expanduser(SECRET_FILE), makes), f"; {SECRET_FILE} cannot be used"
    if len(secret) < LEAST_BYTES:
        what = f"a receiver at {address} needs a secret of at least {LEAST_BYTES} bytes{where}"
        raise ValidationError([f"{what}. Remedy (FC951): set {SECRET}, the same text as on the trainer"])
    return secret


def _read_secret(path: str, makes: bool) -> bytes:
    """Return the contents of a file that only this user reads; nothing if there is no such file."""
    if makes:
        new = f"{path}.{secrets.token_hex(8)}"
        with contextlib.suppress(OSError):  # it is there, or cannot be made
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
            try:
                os.link(new, path)  # whole, or not at all
            finally:
                removals.remove(new)
    with contextlib.suppress(OSError), open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        state = os.fstat(file.fileno())
        return file.read() if state.st_uid == os.getuid() and not state.st_mode & 0o077 else b""
    return b""


def _receive(connection: socket.socket, left: memoryview, deadline: float | None = None) -> None:
    """Fill a buffer; EOFError if the other side has closed the connection, TimeoutError after the deadline."""
    while left:
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        got = connection.recv_into(left)
        if not got:
            raise EOFError("the connection was closed")
        left = left[got:]


def refuse(connection: socket.socket, error: Exception, peer: AuthenticatedConnection | None, seconds: float) -> None:
    """Say why a connection ends, a stranger of protocol 1 too, and wait until the other side has closed it."""
    with contextlib.suppress(OSError, EOFError):
        if peer is None:
            text = json.dumps({"error": str(error)}).encode()
            connection.sendall(_LENGTH.pack(len(text)) + text)
        else:
            peer.send_object({"error": str(error)})
        connection.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + seconds
        while True:  # what was under way, or the text would not arrive
            _receive(connection, memoryview(bytearray(1 << 16)), deadline)


class AuthenticatedConnection:
    """One side of a connection, after both have proved that they know the secret."""

    def __init__(self, connection: socket.socket, secret: bytes, receives: bool, seconds: float) -> None:
        """Prove this side, the receiver's or the sender's, and check the other one, which may take so many seconds.

        ValueError: it does not know the secret, or has another protocol; OSError, EOFError: it does not say.
        """
        self._socket, own, deadline = connection, _MARK + os.urandom(_NONCE), time.monotonic() + seconds

        def take(nbytes: int) -> bytes:
            data = bytearray(nbytes)
            _receive(connection, memoryview(data), deadline)
            return bytes(data)

        if receives:
            connection.sendall(own)
        other = take(len(own))
        if not other.startswith(_MARK):
            raise ValueError(f"another version of the library {'sends' if receives else 'receives'}")
        nonces = own + other if receives else other + own

        def derive(label: str) -> bytes:
            return hmac.digest(secret, label.encode() + nonces, "sha256")

        if not receives:
            connection.sendall(own + derive("sender"))
        if not hmac.compare_digest(take(_TAG), derive("sender" if receives else "receiver")):
            raise ValueError("the secrets differ")
        if receives:
            connection.sendall(derive("receiver"))
        labels = ("to sender", "to receiver") if receives else ("to receiver", "to sender")
        self._sent, self._got = (hmac.new(derive(label), digestmod="sha256") for label in labels)

    def send(self, data: bytes | memoryview) -> None:
        """Send a message."""
        self._sent.update(data)
        self._socket.sendall(data)
        self._socket.sendall(self._sent.digest())

    def fill(self, data: memoryview) -> None:
        """Read a message of a known length; ValueError if it, or one before, is not as the other side has sent it."""
        tag = bytearray(_TAG)
        _receive(self._socket, data)
        _receive(self._socket, memoryview(tag))
        self._got.update(data)
        if not hmac.compare_digest(tag, self._got.digest()):
            raise ValueError("bytes changed on their way")

    def read(self, nbytes: int) -> bytes:
        """Return a message, as :meth:`fill`."""
        data = bytearray(nbytes)
        self.fill(memoryview(data))
        return bytes(data)

    def send_object(self, value: Mapping[str, Any]) -> None:
        """Send a message of names and values."""
        text = json.dumps(value).encode()
        self.send(_LENGTH.pack(len(text)))
        self.send(text)

    def read_object(self) -> dict[str, Any]:
        """Return such a message; ValueError if it says that there was an error."""
        (length,) = _LENGTH.unpack(self.read(_LENGTH.size))
        if length > 1 << 20:
            raise ValueError(f"a message of {length} bytes")
        value = json.loads(self.read(length))
        if not isinstance(value, dict) or "error" in value:
            raise ValueError(value["error"] if isinstance(value, dict) else "a message that is no object")
        return value

"""Whether other processes are alive: each listens at a socket, which the kernel closes with it.

Tested in tests/ranks/test_presence.py and tests/background/test_killed_trainers.py.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Sequence

# A save that all ranks write at about the same time ends before the first check.
FIRST_LOOK_SECONDS, LOOK_SECONDS = 1.0, 3.0
# The longest time to check an address, and all of them in one check: the caller has other work to do.
_ANSWER_SECONDS = 0.5
# The connections that the kernel accepts for a busy process.
BACKLOG = 4096
SECRET_BYTES = 16


def own_host() -> str:
    """Return the interface at which other ranks reach this one, as named by the launcher."""
    return os.environ.get("PADDLE_CURRENT_ENDPOINT", "127.0.0.1:0").rpartition(":")[0]


def open_presence() -> socket.socket:
    """Return a socket that listens; a connection to it can be made as long as a process has it."""
    # A process that leaves connections in the backlog reveals no less than one that accepts them.
    return socket.create_server((own_host(), 0), backlog=BACKLOG)


def address_of(listener: socket.socket, secret: bytes = b"") -> str:
    """Return the address of a presence: "host:port". One that accepts greetings has "/secret" behind it."""
    host, port = listener.getsockname()[:2]
    return f"{host}:{port}/{secret.hex()}" if secret else f"{host}:{port}"


def split_address(address: str) -> tuple[tuple[str, int], bytes]:
    """Return host and port of a presence, and the secret that a greeting has to contain."""
    place, _, secret = address.partition("/")
    host, _, port = place.rpartition(":")
    return (host, int(port)), bytes.fromhex(secret)


class DeathWatch:
    """A watch that checks now and then which members of a group have died: their processes do not answer any more."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """Args: addresses: presences of the members, in the group's order."""
        self._addresses = addresses
        self._next = time.monotonic() + FIRST_LOOK_SECONDS
        self._last = -1

    def look(self, positions: Iterable[int]) -> list[int]:
        """Return those of some members that have died; none while it is not time for the next check.

        A process has died when its host refuses connections to it. A host that does not answer at all proves nothing:
        it may be down, or a firewall may block connections to it.
        """
        now = time.monotonic()
        if now < self._next:
            return []
        self._next = now + LOOK_SECONDS
        gone = []
        # A check begins where the one before has ended, which may have had time for a few addresses only.
        for position in sorted(positions, key=lambda each: (each <= self._last, each)):
            if time.monotonic() - now > _ANSWER_SECONDS:
                break
            self._last = position
            if _refuses(self._addresses[position]):
                gone.append(position)
        return sorted(gone)


def _refuses(address: str) -> bool:
    try:
        socket.create_connection(split_address(address)[0], timeout=_ANSWER_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False

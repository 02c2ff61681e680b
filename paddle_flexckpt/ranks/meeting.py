"""Connect ranks that know only each other's numbers by sockets.

With its address each rank puts a random token into the job's key-value store, by which a connection shows that it comes
from one who can read the store. Nobody waits for a rank that has gone: its presence is watched until it comes.

Tested in tests/ranks/test_host_channel.py.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import socket
import struct
import sys
import time
from collections.abc import Sequence
from typing import Any

from paddle_flexckpt.forks import close_in_forks
from paddle_flexckpt.ranks.lost_ranks import CONNECT_SECONDS, EVERY_RANK, KeyValueStore, presence_of
from paddle_flexckpt.ranks.presence import own_host

logger = logging.getLogger("paddle_flexckpt")

# A member says who it is at once; a stranger that says nothing is let go.
GREETING_SECONDS = 10.0
HELLO = struct.Struct("<16si")  # the token of the one that listens, the rank of the one that connects
# A rank that waits so long says for whom.
NOTICE_SECONDS = 60.0
# How often the store is asked for those who are not there: the shortest pause, and the longest, as one rank may be
# minutes late and the store belongs to all.
_PAUSES = (0.01, 1.0)
# The peers' connections are few; the rest is for strangers.
_BACKLOG = 128
# A host that went down says nothing. The kernel asks it after 30 seconds of silence, and gives up after 90. There is no
# limit for data that is not taken (TCP_USER_TIMEOUT): a rank that is busy may read nothing for long.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}


class Meeting:
    """Take one rank's part in a meeting. A context: what it opened, it closes, but the connections if all came.

    Attributes:
        targets: Connections, which do not block, to the ranks that this one was to connect to.
        sources: Connections, which do not block, from the ranks that were to connect to this one.
    """

    def __init__(self, store: KeyValueStore, name: str, rank: int, targets: set[int], sources: set[int]) -> None:
        """Prepare to connect to the ranks ``targets``, and to be connected to by ``sources``.

        ``name`` is the same on all ranks and no other meeting's.
        """
        self.targets: dict[int, socket.socket] = {}
        self.sources: dict[int, socket.socket] = {}
        self._store = store
        self._prefix = f"flexckpt/meeting/{name}"
        self._rank = rank
        self._wanted, self._expected = {*targets}, {*sources}
        self._token = secrets.token_bytes(16)
        self._callers: dict[socket.socket, tuple[bytearray, float]] = {}
        self._watched: dict[socket.socket, int] = {}
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Meeting:
        """Listen, and tell the others where."""
        try:
            self._waiting = self._open.enter_context(selectors.DefaultSelector())
            host = own_host()
            self._listener = self._open.enter_context(socket.create_server((host, 0), backlog=_BACKLOG))
            close_in_forks(self._listener)
            self._listener.setblocking(False)
            self._waiting.register(self._listener, selectors.EVENT_READ)
            port = self._listener.getsockname()[1]
            self._store.set(f"{self._prefix}/{self._rank}", f"{self._token.hex()} {host}:{port}")
            self._store.add(f"{self._prefix}/{self._rank}/there", 1)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop listening, and after an error all else too, and tell the others."""
        self._open.close()
        for open_socket in (*self._callers, *self._watched):
            open_socket.close()
        if error[0] is not None:
            for connection in (*self.targets.values(), *self.sources.values()):
                connection.close()
            # Those that this rank has not met would wait for it. If the store has gone, they find out themselves.
            with contextlib.suppress(Exception):
                self._store.add(f"{self._prefix}/failed", 1)

    @property
    def absent(self) -> list[int]:
        """Return the ranks that have not come."""
        return sorted(self._wanted | self._expected)

    def hold(self, patience: float) -> None:
        """Wait until all have come, at most so many seconds.

        Raises:
            EOFError: One has gone instead.
            TimeoutError: One has not come.
            ConnectionError: Another rank gave up.
        """
        pause, deadline = _PAUSES[0], time.monotonic() + patience
        notice = time.monotonic() + NOTICE_SECONDS
        while True:
            for rank in [rank for rank in self._wanted if self._store.add(f"{self._prefix}/{rank}/there", 0)]:
                self._connect(rank)
            if not self.absent:
                return
            if self._store.add(f"{self._prefix}/failed", 0):
                raise ConnectionError("another rank could not connect to all that it needs")
            if time.monotonic() > notice:
                say_waiting(self._rank, self.absent)
                notice = deadline
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {', '.join(map(str, self.absent))} has not come for {patience:g} s")
            if pause == _PAUSES[1]:
                # Not at once: what watches a rank takes a place in its backlog.
                self._watch()
            for key, _ in self._waiting.select(pause):
                self._hear(key.fileobj)
            now = time.monotonic()
            for caller in [caller for caller, (_, until) in self._callers.items() if now > until]:
                self._dismiss(caller)
            pause = min(2 * pause, _PAUSES[1])

    def _connect(self, rank: int) -> None:
        token, _, address = self._store.get(f"{self._prefix}/{rank}").decode().partition(" ")
        host, _, port = address.rpartition(":")
        try:
            connection = socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS)
            self.targets[rank] = close_in_forks(connection)
            connection.sendall(HELLO.pack(bytes.fromhex(token), self._rank))
        except OSError as error:
            raise ConnectionError(f"rank {rank} cannot be reached at {address}: {error}") from error
        prepare(connection)
        self._wanted.discard(rank)

    def _watch(self) -> None:
        """Connect to the presences of those that are absent: such a connection ends when the process does."""
        for rank in {*self.absent} - {*self._watched.values()}:
            presence = presence_of(self._store, rank)
            if presence is None:
                continue
            try:
                connection = socket.create_connection(presence, timeout=CONNECT_SECONDS)
            except OSError as error:
                raise EOFError(f"rank {rank} has gone: {error}") from error
            self._watched[close_in_forks(connection)] = rank
            self._waiting.register(connection, selectors.EVENT_READ)

    def _hear(self, speaker: Any) -> None:
        if speaker is self._listener:
            with contextlib.suppress(BlockingIOError, ConnectionAbortedError):  # it has left again
                caller, _ = self._listener.accept()
                caller.setblocking(False)
                self._callers[close_in_forks(caller)] = (bytearray(), time.monotonic() + GREETING_SECONDS)
                self._waiting.register(caller, selectors.EVENT_READ)
        elif speaker in self._watched:
            rank = self._watched[speaker]
            if rank in self.absent:
                raise EOFError(f"rank {rank} has gone")
            self._dismiss(speaker)
        else:
            self._greet(speaker)

    def _greet(self, caller: socket.socket) -> None:
        said = self._callers[caller][0]
        try:
            heard = caller.recv(HELLO.size - len(said))
        except BlockingIOError:
            return
        except OSError:
            heard = b""
        said += heard
        if heard and len(said) < HELLO.size:
            return
        rank = None
        if heard:
            token, rank = HELLO.unpack(said)
            rank = rank if secrets.compare_digest(token, self._token) else None
        if rank not in self._expected:
            self._dismiss(caller)
            return
        self._waiting.unregister(caller)
        del self._callers[caller]
        self._expected.discard(rank)
        self.sources[rank] = caller
        prepare(caller)

    def _dismiss(self, connection: socket.socket) -> None:
        self._waiting.unregister(connection)
        self._callers.pop(connection, None)
        self._watched.pop(connection, None)
        connection.close()


def say_waiting(rank: int, others: Sequence[int]) -> None:
    """Warn that a rank has waited for others for long."""
    names = f"{'rank' if len(others) == 1 else 'ranks'} {', '.join(map(str, others))}"
    logger.warning(f"rank {rank} has waited {NOTICE_SECONDS:g} s for {names} in a call of this library. {EVERY_RANK}")


def prepare(connection: socket.socket) -> None:
    """Have a connection not block, send at once, and end when the host at its other end has gone."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        if hasattr(socket, option):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

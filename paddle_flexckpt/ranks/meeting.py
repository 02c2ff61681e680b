"""Connect ranks that know only each other's numbers by sockets.

Beside its address each rank puts a secret into the job's key-value store. A connection that sends the secret comes from
a process that can read the store. No rank waits for a dead one: its presence is watched until it comes.

Tested in tests/ranks/test_host_channel.py.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from paddle_flexckpt.forks import close_in_forks
from paddle_flexckpt.ranks.group_listener import GroupListener, greet, prepare
from paddle_flexckpt.ranks.lost_ranks import CONNECT_SECONDS, EVERY_RANK, KeyValueStore, presence_of
from paddle_flexckpt.ranks.presence import SECRET_BYTES, address_of, own_host

logger = logging.getLogger("paddle_flexckpt")

# A rank that has waited for so long logs the ranks that it waits for.
NOTICE_SECONDS = 60.0
# How often the store is asked for absent ranks: the shortest pause, and the longest, as one may be minutes late.
_PAUSES = (0.01, 1.0)
# The peers' connections are few; the other places are for strangers.
_BACKLOG = 128
# The token of greetings between ranks, which no save has.
_MEETING = bytes(16)


class Meeting:
    """One rank's part in a meeting. Leaving its context closes what it opened, except the connections if all were made.

    Attributes:
        targets: Connections, which do not block, to the ranks that this one was to connect to.
        sources: Connections, which do not block, from the ranks that were to connect to this one.
    """

    def __init__(self, store: KeyValueStore, name: str, rank: int, targets: set[int], sources: set[int]) -> None:
        """Prepare to connect to the ranks ``targets``, and to be connected to by ``sources``.

        ``name`` is the same on all ranks, and unique to the meeting.
        """
        self.targets: dict[int, socket.socket] = {}
        self.sources: dict[int, socket.socket] = {}
        self._store = store
        self._prefix = f"flexckpt/meeting/{name}"
        self._rank = rank
        self._wanted, self._expected = {*targets}, {*sources}
        self._listener: GroupListener
        self._watched: dict[int, socket.socket] = {}
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Meeting:
        """Listen, and announce the address to the others."""
        try:
            server, secret = socket.create_server((own_host(), 0), backlog=_BACKLOG), secrets.token_bytes(SECRET_BYTES)
            self._listener = GroupListener(server, secret)
            self._open.callback(self._listener.close)
            self._store.set(f"{self._prefix}/{self._rank}", address_of(server, secret))
            self._store.add(f"{self._prefix}/{self._rank}/there", 1)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop listening; after an error close all else too, and inform the others."""
        self._open.close()
        if error[0] is not None:
            for connection in (*self.targets.values(), *self.sources.values()):
                connection.close()
            # Ranks that this one has not connected to would wait for it. Without the store, they find out themselves.
            with contextlib.suppress(Exception):
                self._store.add(f"{self._prefix}/failed", 1)

    @property
    def absent(self) -> list[int]:
        """Return the ranks that have not come."""
        return sorted(self._wanted | self._expected)

    def hold(self, patience: float) -> None:
        """Wait until all have come, at most so many seconds.

        Raises:
            EOFError: A rank has died instead.
            TimeoutError: A rank has not come.
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
                # Not at once: a connection to a presence takes a place in its backlog.
                self._watch()
            for rank in self._listener.select(pause):
                if rank in self.absent:
                    raise EOFError(f"rank {rank} has gone")
                self._listener.selector.unregister(self._watched[rank])  # it has come before it died
            for rank, connection in self._listener.take(_MEETING):
                if rank not in self._expected:
                    connection.close()
                    continue
                self._expected.discard(rank)
                self.sources[rank] = connection
                prepare(connection)
            pause = min(2 * pause, _PAUSES[1])

    def _connect(self, rank: int) -> None:
        address = self._store.get(f"{self._prefix}/{rank}").decode()
        try:
            self.targets[rank] = greet(address, _MEETING, self._rank, CONNECT_SECONDS)
        except OSError as error:
            raise ConnectionError(f"rank {rank} cannot be reached at {address.partition('/')[0]}: {error}") from error
        self._wanted.discard(rank)

    def _watch(self) -> None:
        """Connect to the presences of absent ranks: such a connection ends when the process does."""
        for rank in {*self.absent} - {*self._watched}:
            presence = presence_of(self._store, rank)
            if presence is None:
                continue
            try:
                connection = socket.create_connection(presence, timeout=CONNECT_SECONDS)
            except OSError as error:
                raise EOFError(f"rank {rank} has gone: {error}") from error
            self._watched[rank] = close_in_forks(self._open.enter_context(connection))
            self._listener.selector.register(connection, selectors.EVENT_READ, rank)


def say_waiting(rank: int, others: Sequence[int]) -> None:
    """Warn that a rank has waited for others for long."""
    names = f"{'rank' if len(others) == 1 else 'ranks'} {', '.join(map(str, others))}"
    logger.warning(f"rank {rank} has waited {NOTICE_SECONDS:g} s for {names} in a call of this library. {EVERY_RANK}")

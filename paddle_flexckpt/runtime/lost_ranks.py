"""Which ranks have gone, when an exchange between ranks fails.

A backend only says that something broke (gloo names a neighbour by its number in the group), and a socket only that its
other end has closed, maybe for the failure of a third. So every process has a *presence*: a listening socket, which the
kernel closes with the process, its address in the job's key-value store. A rank whose exchange fails says so in the
store, and looks whose presence does not answer. Ranks that had said so before they went are not lost: they have ended
because of the same failure.
"""

from __future__ import annotations

import functools
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

# Paddle's own client of the store waits for a host that has gone as long as TCP does: minutes.
STORE_SECONDS = 30.0
# A host that does not answer for so long is down or cut off.
CONNECT_SECONDS = 10.0
# How long the rank that keeps the store stays for the others to notice the failure.
FAREWELL_SECONDS = 60.0
# How long the others may take to notice the failure too: sockets that close tell them at once.
SPREAD_SECONDS = 5.0
_POLL_SECONDS = 0.1


class KeyValueStore(Protocol):
    """What is used of Paddle's TCPStore."""

    def add(self, key: str, value: int) -> int:
        """Adds to a counter, which starts at 0; returns what it is then."""

    def set(self, key: str, value: str) -> None:
        """Sets a value."""

    def get(self, key: str) -> bytes:
        """A value; waits until there is one."""


class Presence:
    """A socket that listens for as long as this process lives, or this object."""

    def __init__(self) -> None:
        """Opens it on the interface that the launcher gave this rank."""
        self._host = own_host()
        # Connections are never accepted: that they can be made is all that is asked. They stay in the backlog; a job
        # in which this is asked is about to end.
        self._listener = socket.create_server((self._host, 0), backlog=4096)
        self._announced: list[tuple[KeyValueStore, int]] = []

    @property
    def address(self) -> str:
        """What others need to look for it."""
        return f"{self._host}:{self._listener.getsockname()[1]}"

    def announce(self, store: KeyValueStore, rank: int) -> None:
        """See :func:`announce`."""
        if any(there is store and who == rank for there, who in self._announced):
            return
        store.set(f"flexckpt/presence/{rank}", self.address)
        store.add(f"flexckpt/present/{rank}", 1)
        self._announced.append((store, rank))

    def close(self) -> None:
        """Stop listening in this process."""
        self._listener.close()


def own_host() -> str:
    """Return the interface at which other ranks reach this one: the launcher named it."""
    return os.environ.get("PADDLE_CURRENT_ENDPOINT", "127.0.0.1:0").rpartition(":")[0]


@functools.cache
def own_presence() -> Presence:
    """This process's presence, for as long as it lives."""
    presence = Presence()
    os.register_at_fork(after_in_child=functools.partial(_leave, presence))
    return presence


def _leave(presence: Presence) -> None:
    """Close, in a fork, what would answer for this process when it has gone."""
    presence.close()
    own_presence.cache_clear()


def announce(store: KeyValueStore, rank: int) -> None:
    """Tell the others, once, where this rank can be looked for. It has to come before anything that can fail."""
    own_presence().announce(store, rank)


def presence_of(store: KeyValueStore, rank: int) -> tuple[str, int] | None:
    """Return host and port of a rank's presence; None if it has not begun: it is slow, or never to come."""
    if store.add(f"flexckpt/present/{rank}", 0) == 0:
        return None
    host, _, port = store.get(f"flexckpt/presence/{rank}").decode().rpartition(":")
    return host, int(port)


class Missing(NamedTuple):
    """Say why an exchange failed: which ranks have gone, and which live but take no part."""

    lost: list[int]
    silent: list[int]


def find_lost_ranks(store: KeyValueStore, group: str, ranks: Sequence[int], rank: int) -> list[int] | None:
    """Says that an exchange failed on this rank, and looks which others have gone.

    Args:
        store: The job's key-value store.
        group: A name of the ranks' group, the same on all of them and no other group's.
        ranks: Its members.
        rank: This rank.

    Returns:
        The ranks that have gone; None if the store has.
    """
    missing = find_missing_ranks(store, group, ranks, rank, ask_the_living=False)
    return None if missing is None else missing.lost


def find_missing_ranks(
    store: KeyValueStore, group: str, ranks: Sequence[int], rank: int, ask_the_living: bool = True
) -> Missing | None:
    """Do what :func:`find_lost_ranks` does; if none has gone, look which have not failed either.

    Args:
        store: The job's key-value store.
        group: A name of the ranks' group, the same on all of them and no other group's.
        ranks: Its members.
        rank: This rank.
        ask_the_living: Whether those that live are given time to say that the exchange failed on them too.
    """
    prefix = f"flexckpt/{group}"
    found: list[Missing] = []
    heard = [time.monotonic()]

    def look(others: Sequence[int], failures: int) -> Missing:
        lost, silent = [], []
        for other in others:
            heard[0] = time.monotonic()
            if store.add(f"{prefix}/{other}", 0) < failures:
                gone = _has_gone(store, other)
                # One that has gone may have said so and ended just now.
                if not gone:
                    silent.append(other)
                elif store.add(f"{prefix}/{other}", 0) < failures:
                    lost.append(other)
        return Missing(lost, silent)

    def ask() -> None:
        try:
            # Ranks that have failed equally often are at the same failure.
            failures = store.add(f"{prefix}/{rank}", 1)
            missing = look([other for other in ranks if other != rank], failures)
            # Few looks, as each leaves a connection in the backlog of those that live. Also for those that have gone a
            # second one may be needed: a process that ends closes its sockets one after the other.
            pause, end = _POLL_SECONDS, time.monotonic() + (SPREAD_SECONDS if ask_the_living else 0.0)
            while missing.silent and not missing.lost and time.monotonic() < end:
                time.sleep(pause)
                pause *= 2
                missing = look(missing.silent, failures)
            store.add(f"{prefix}/{rank}/done", 1)
            deadline = time.monotonic() + FAREWELL_SECONDS
            waiting = {*ranks} - {rank, *missing.lost} if rank == 0 else set()
            while waiting and time.monotonic() < deadline:
                waiting = {other for other in waiting if store.add(f"{prefix}/{other}/done", 0) < failures}
                heard[0] = time.monotonic()
                time.sleep(_POLL_SECONDS)
            found.append(missing)
        except Exception:  # whatever it is, the store cannot be asked: so the caller is told
            found.clear()

    # In a thread: the store's client cannot be told to give up.
    asking = threading.Thread(target=ask, name="flexckpt-lost-ranks", daemon=True)
    asking.start()
    while asking.is_alive() and time.monotonic() - heard[0] < STORE_SECONDS:
        asking.join(_POLL_SECONDS)
    return found[0] if found else None


def _has_gone(store: KeyValueStore, rank: int) -> bool:
    """Whether a rank's process or host does not answer."""
    presence = presence_of(store, rank)
    if presence is None:
        return False  # the backend's error says more
    try:
        socket.create_connection(presence, timeout=CONNECT_SECONDS).close()
    except OSError:
        return True
    return False


def describe_lost_ranks(lost: list[int] | None, error: Exception, silent: Sequence[int] = ()) -> str:
    """What to tell the user.

    Args:
        lost: Of :func:`find_lost_ranks`.
        error: The backend's error, where no rank is known to be lost.
        silent: Of :func:`find_missing_ranks`.
    """
    remedy = "Remedy: look into its log (killed? out of memory? host or network down?), and restart the job"
    if lost is None:
        return f"rank 0 is lost: the job's key-value store, which it keeps, does not answer. {remedy}"
    if lost:
        return f"rank {', '.join(map(str, lost))} is lost: it has gone, or does not answer. {remedy}"
    reason = (str(error).splitlines() or [""])[0]
    if silent:
        return (
            f"rank {', '.join(map(str, silent))} takes no part in an exchange between ranks, though it is alive: it "
            "hangs, was interrupted, or is in another call. Remedy: look into its log and at its stack, and restart "
            f"the job. What this rank saw: {type(error).__name__}: {reason}"
        )
    return f"an exchange between ranks failed, though all of them are alive: {type(error).__name__}: {reason}"


def default_store() -> Any:
    """The job's key-value store; None if the job was not started with one."""
    from paddle.distributed import collective

    return getattr(collective, "_default_store", None)

"""Which ranks have gone, when an exchange between ranks fails.

A backend only says that something broke (gloo names a neighbour by its number in the group, NCCL nobody). So every
process has a *presence*: a listening socket, which the kernel closes with the process, its address in the job's
key-value store. A rank whose exchange fails says so in the store, and looks whose presence does not answer. Ranks that
had said so before they went are not lost: they have ended because of the same failure.
"""

from __future__ import annotations

import functools
import os
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

# Paddle's own client of the store waits for a host that has gone as long as TCP does: minutes.
STORE_SECONDS = 30.0
# A host that does not answer for so long is down or cut off.
CONNECT_SECONDS = 10.0
# How long the rank that keeps the store stays for the others to notice the failure.
FAREWELL_SECONDS = 60.0
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
        self._host = os.environ.get("PADDLE_CURRENT_ENDPOINT", "127.0.0.1:0").rpartition(":")[0]
        # Connections are never accepted: that they can be made is all that is asked. They stay in the backlog; a job
        # in which this is asked is about to end.
        self._listener = socket.create_server((self._host, 0), backlog=4096)

    @property
    def address(self) -> str:
        """What others need to look for it."""
        return f"{self._host}:{self._listener.getsockname()[1]}"


@functools.cache
def own_presence() -> Presence:
    """This process's presence, for as long as it lives."""
    return Presence()


def announce(store: KeyValueStore, rank: int) -> None:
    """Tells the others where this rank can be looked for. It has to come before anything that can fail."""
    store.set(f"flexckpt/presence/{rank}", own_presence().address)
    store.add(f"flexckpt/present/{rank}", 1)


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
    prefix = f"flexckpt/{group}"
    lost: list[int] = []
    finished: list[bool] = []
    heard = [time.monotonic()]

    def ask() -> None:
        try:
            # Ranks that have failed equally often are at the same failure.
            failures = store.add(f"{prefix}/{rank}", 1)
            for other in ranks:
                heard[0] = time.monotonic()
                if other != rank and store.add(f"{prefix}/{other}", 0) < failures:
                    gone = _has_gone(store, other)
                    # It may have said so and ended just now.
                    if gone and store.add(f"{prefix}/{other}", 0) < failures:
                        lost.append(other)
            store.add(f"{prefix}/{rank}/done", 1)
            deadline = time.monotonic() + FAREWELL_SECONDS
            waiting = {*ranks} - {rank, *lost} if rank == 0 else set()
            while waiting and time.monotonic() < deadline:
                waiting = {other for other in waiting if store.add(f"{prefix}/{other}/done", 0) < failures}
                heard[0] = time.monotonic()
                time.sleep(_POLL_SECONDS)
            finished.append(True)
        except Exception:  # whatever it is, the store cannot be asked: so the caller is told
            finished.append(False)

    # In a thread: the store's client cannot be told to give up.
    asking = threading.Thread(target=ask, name="flexckpt-lost-ranks", daemon=True)
    asking.start()
    while asking.is_alive() and time.monotonic() - heard[0] < STORE_SECONDS:
        asking.join(_POLL_SECONDS)
    return lost if finished == [True] else None


def _has_gone(store: KeyValueStore, rank: int) -> bool:
    """Whether a rank's process or host does not answer."""
    if store.add(f"flexckpt/present/{rank}", 0) == 0:
        return False  # it has not begun: slow, or never to come; the backend's error says more
    host, _, port = store.get(f"flexckpt/presence/{rank}").decode().rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except OSError:
        return True
    return False


def describe_lost_ranks(lost: list[int] | None, error: Exception) -> str:
    """What to tell the user.

    Args:
        lost: Of :func:`find_lost_ranks`.
        error: The backend's error, where no rank is known to be lost.
    """
    remedy = "Remedy: look into its log (killed? out of memory? host or network down?), and restart the job"
    if lost is None:
        return f"rank 0 is lost: the job's key-value store, which it keeps, does not answer. {remedy}"
    if lost:
        return f"rank {', '.join(map(str, lost))} is lost: it has gone, or does not answer. {remedy}"
    reason = (str(error).splitlines() or [""])[0]
    return f"an exchange between ranks failed, though all of them are alive: {type(error).__name__}: {reason}"


def default_store() -> Any:
    """The job's key-value store; None if the job was not started with one."""
    from paddle.distributed import collective

    return getattr(collective, "_default_store", None)

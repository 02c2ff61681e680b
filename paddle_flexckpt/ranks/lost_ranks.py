"""Find out which ranks have died, when an exchange between ranks fails.

A backend only reports that something broke, and a socket only that its other end has closed, maybe because a third rank
failed. So every process has a *presence*: a listening socket, which the kernel closes with the process. A rank whose
exchange fails notes this in the job's key-value store, and checks whose presence does not answer. Ranks that had noted
a failure before they ended are not lost: they have ended because of the same failure.

Tested in tests/ranks/test_lost_ranks.py, tests/ranks/test_presence.py and tests/background/test_killed_trainers.py.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from paddle_flexckpt.catalog.texts import format_ranks

# The time before the first check of a wait, and between checks. A save in which no rank is late ends before the first.
FIRST_LOOK_SECONDS, LOOK_SECONDS = 1.0, 3.0
# The longest time to check one address, and also for all addresses in one check: the caller has other work to do.
_ANSWER_SECONDS = 0.5
# The connections that the kernel accepts for a busy process.
BACKLOG = 4096
SECRET_BYTES = 16


def own_host() -> str:
    """Return the interface at which other ranks reach this one, as named by the launcher."""
    return os.environ.get("PADDLE_CURRENT_ENDPOINT", "127.0.0.1:0").rpartition(":")[0]


def open_presence() -> socket.socket:
    """Return a socket that listens; a connection to it can be made as long as a process has it."""
    # Connections are never accepted: one in the backlog proves as well that the process lives.
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
    """A watch that checks from time to time which members of a group have died.

    A process counts as dead when its host refuses connections to it. A host that does not answer at all proves nothing:
    it may be down, or a firewall may block connections to it.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        """Args: addresses: presences of the members, in the group's order."""
        self._addresses = addresses
        self._next = time.monotonic() + FIRST_LOOK_SECONDS
        self._last = -1

    def look(self, positions: Iterable[int]) -> list[int]:
        """Return those of some members that have died; none while it is not time for the next check."""
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


# Paddle's own client of the store waits for a dead host as long as TCP does: minutes.
STORE_SECONDS = 30.0
# A host that does not answer for so long is down or cut off.
CONNECT_SECONDS = 10.0
# How long the rank that keeps the store stays for the others to notice the failure.
FAREWELL_SECONDS = 60.0
# How long the others may need to notice the failure too: closing sockets inform them at once. No rank's error waits
# longer for them.
SPREAD_SECONDS = 5.0
_POLL_SECONDS = 0.1
# The most common reason why a rank does not come.
EVERY_RANK = "Remedy (FC501): make this call on every rank of the group (is it inside `if rank == 0`?)"


class KeyValueStore(Protocol):
    """The part of Paddle's TCPStore that this package uses."""

    def add(self, key: str, value: int) -> int:
        """Add to a counter, which starts at 0; return its new value."""

    def set(self, key: str, value: str) -> None:
        """Set a value."""

    def get(self, key: str) -> bytes:
        """Return a value; wait until there is one."""


# The stores, and this process's numbers in them.
_announced: list[tuple[KeyValueStore, int]] = []


@functools.cache
def own_presence() -> str:
    """Return the address of this process's presence, which lasts as long as the process."""
    # The connections stay in the backlog, which may fill up; but a job in which presences are checked is about to end.
    listener = open_presence()
    os.register_at_fork(after_in_child=functools.partial(_leave, listener))
    return address_of(listener)


def _leave(listener: socket.socket) -> None:
    """Close, in a fork, the socket that would answer for this process after its death."""
    listener.close()
    own_presence.cache_clear()
    _announced.clear()


def announce(store: KeyValueStore, rank: int) -> None:
    """Announce, once, this rank's address to the others. This has to precede anything that can fail."""
    if not any(there is store and who == rank for there, who in _announced):
        store.set(f"flexckpt/presence/{rank}", own_presence())
        store.add(f"flexckpt/present/{rank}", 1)
        _announced.append((store, rank))


def presence_of(store: KeyValueStore, rank: int) -> tuple[str, int] | None:
    """Return host and port of a rank's presence; None if it has not announced itself yet, and may never do so."""
    if store.add(f"flexckpt/present/{rank}", 0) == 0:
        return None
    host, _, port = store.get(f"flexckpt/presence/{rank}").decode().rpartition(":")
    return host, int(port)


class Missing(NamedTuple):
    """The ranks that made an exchange fail.

    Attributes:
        lost: Ranks that have died.
        silent: Ranks that are alive but take no part.
        unknown: Ranks that have not announced their address: they have made no call yet, or died before their first.
    """

    lost: list[int]
    silent: list[int]
    unknown: list[int]


def find_missing_ranks(store: KeyValueStore, group: str, ranks: Sequence[int], rank: int) -> Missing | None:
    """Note that an exchange failed on this rank, and find out which others have died, or have not failed.

    If none has died, the living ones get time to note that the exchange failed on them too. Rank 0 keeps the
    store, so it stays a while for the others to ask it: here, and then, in a thread, when its interpreter exits.
    ``group`` names the ranks' group: the same on all of them, and unique to it.

    Returns:
        The missing ranks; None if the store cannot be reached.
    """
    prefix = f"flexckpt/{group}"
    found: list[Missing] = []
    last_reply = [time.monotonic()]

    def look(others: Sequence[int], failures: int) -> Missing:
        missing = Missing([], [], [])
        for other in others:
            last_reply[0] = time.monotonic()
            if store.add(f"{prefix}/{other}", 0) < failures:
                presence = presence_of(store, other)
                if presence is None:
                    missing.unknown.append(other)
                elif _answers(presence):
                    missing.silent.append(other)
                # A dead rank may have noted a failure and ended just now.
                elif store.add(f"{prefix}/{other}", 0) < failures:
                    missing.lost.append(other)
        return missing

    def ask() -> None:
        try:
            # A rank's counter is the number of exchanges that failed on it. If it is behind, the rank has not noted
            # this failure yet.
            failures = store.add(f"{prefix}/{rank}", 1)
            missing = look([other for other in ranks if other != rank], failures)
            # Few checks, as each leaves a connection in the backlog of those that live. A dead rank may need a second
            # one too: a process that ends closes its sockets one after the other.
            pause, end = _POLL_SECONDS, time.monotonic() + SPREAD_SECONDS
            while missing.silent and not missing.lost and time.monotonic() < end:
                time.sleep(pause)
                pause *= 2
                missing = look([*missing.silent, *missing.unknown], failures)
            store.add(f"{prefix}/{rank}/done", 1)
        except Exception:  # after any error the store cannot be used: the caller gets None
            return
        found.append(missing)
        if rank == 0:
            # A rank that has not announced itself is not waited for: it may have died before its first call.
            others = {*ranks} - {rank, *missing.lost, *missing.unknown}
            with contextlib.suppress(Exception):  # the outcome is known already
                _say_farewell(store, prefix, others, failures)

    # In a thread: the store's client cannot be interrupted.
    asking = threading.Thread(target=ask, name="flexckpt-lost-ranks", daemon=rank != 0)
    asking.start()
    while not found and asking.is_alive() and time.monotonic() - last_reply[0] < STORE_SECONDS:
        asking.join(_POLL_SECONDS)
    if found:
        asking.join(SPREAD_SECONDS)
    return found[0] if found else None


def _say_farewell(store: KeyValueStore, prefix: str, others: set[int], failures: int) -> None:
    """Stay until other ranks have read the store, or for a limited time."""
    deadline = time.monotonic() + FAREWELL_SECONDS
    while others and time.monotonic() < deadline:
        others = {other for other in others if store.add(f"{prefix}/{other}/done", 0) < failures}
        time.sleep(_POLL_SECONDS)


def _answers(presence: tuple[str, int]) -> bool:
    """Return whether a rank's process and host answer."""
    try:
        socket.create_connection(presence, timeout=CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def describe_lost_ranks(missing: Missing | None, error: Exception) -> str:
    """Return the text for the user about missing ranks; if none is known to be lost, about the backend's error."""
    remedy = (
        "Remedy (FC501): look into {its} log (killed? out of memory? host or network down? in a collective that timed "
        "out, as this call is inside `if rank == 0`?), and restart the job"
    )
    if missing is None:
        return (
            "rank 0 is lost: the job's key-value store, which it keeps, does not answer, so it is not known which "
            f"others have gone. {remedy.format(its='its')}"
        )
    if missing.lost:
        return _of(missing.lost, "{rank} {is} lost: {it} {has} gone, or {does} not answer. " + remedy)
    if missing.unknown:
        text = (
            "{rank} {is} missing: {it} {has} gone before {its} first call of this library, or {has} not come to it yet"
        )
        return _of(missing.unknown, f"{text}. {EVERY_RANK}; else {remedy.partition('): ')[2]}")
    reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if missing.silent:
        text = (
            "{rank} {takes} no part in an exchange between ranks, though {it} {is} alive: {it} {hangs}, {was} "
            "interrupted, or {is} in another call. " + EVERY_RANK + "; else look into {its} log and at {its} stack, "
            "and restart the job. What this rank saw: "
        )
        return _of(missing.silent, text) + reason
    return f"an exchange between ranks failed, though all of them are alive: {reason}"


_ONE = {
    "is": "is",
    "it": "it",
    "its": "its",
    "has": "has",
    "does": "does",
    "takes": "takes",
    "hangs": "hangs",
    "was": "was",
}
_SEVERAL = dict(zip(_ONE, ("are", "they", "their", "have", "do", "take", "hang", "were")))


def _of(ranks: Sequence[int], text: str) -> str:
    """Return a text about one rank, or several, with their numbers."""
    if len(ranks) == 1:
        return text.format(rank=f"rank {ranks[0]}", **_ONE)
    return text.format(rank=f"ranks {format_ranks(sorted(ranks))}", **_SEVERAL)

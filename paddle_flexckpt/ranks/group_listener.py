"""The listening socket of a writer process: shows that it lives, and lets the writers of other ranks find its saves.

Whoever connects and closes has seen that the process lives. Whoever wants more greets with the token of a save: as a
member of the group that makes it, or to learn the outcome. The process may still be busy with an earlier save, so
greeted connections wait until their save begins.

Tested in tests/ranks/test_writer_group.py.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from paddle_flexckpt.forks import close_in_forks
from paddle_flexckpt.ranks.framing import Arriving, Leaving
from paddle_flexckpt.ranks.lost_ranks import CONNECT_SECONDS
from paddle_flexckpt.ranks.meeting import GREETING_SECONDS, prepare

# Magic, token of the save, the sender's rank, and whether it only asks for the outcome.
_HELLO = struct.Struct("<8s16si?")
_MAGIC = b"flexckpt"
# The number of a message that is the last one to its receiver.
FAREWELL = (1 << 64) - 1
# Saves that are not being made: their outcomes, and those that wait for them to begin.
_MOST_SAVES = 16
_PAUSE_SECONDS = 0.1


@dataclass
class _Save:
    """Hold what is known of one save.

    Attributes:
        members: Ranks and connections that wait until the group takes them.
        askers: Connections that wait for the outcome.
        ring: A byte in it wakes the group, while there is one.
        outcome: What came of it, once it is over.
        loss: What members that come after that are told.
    """

    members: list[tuple[int, socket.socket]] = field(default_factory=list)
    askers: list[socket.socket] = field(default_factory=list)
    ring: socket.socket | None = None
    outcome: bytes | None = None
    loss: bytes = b""


@dataclass
class _Caller:
    """Hold a connection that has not greeted yet, or that is being answered."""

    until: float
    said: bytearray = field(default_factory=bytearray)
    answer: Leaving | None = None


class GroupListener:
    """Accept connections, in a thread, for as long as the process lives."""

    def __init__(self, listener: socket.socket) -> None:
        """Args: listener: a socket that listens; it belongs to this object from now on."""
        self._listener = close_in_forks(listener)
        self._listener.setblocking(False)
        self._rung, self._ring = map(close_in_forks, socket.socketpair())
        self._lock = threading.Lock()
        self._saves: OrderedDict[bytes, _Save] = OrderedDict()
        self._over: list[_Save] = []
        self._callers: dict[socket.socket, _Caller] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._rung, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="paddle_flexckpt-listener", daemon=True)
        self._thread.start()

    def begin(self, token: bytes, ring: socket.socket) -> None:
        """Take a save up: a byte in ``ring`` tells that members have come."""
        with self._lock:
            save = self._save(token)
            save.ring = ring
            if save.members:
                ring.send(b"!")

    def take(self, token: bytes) -> list[tuple[int, socket.socket]]:
        """Return ranks and connections of the members of a save that have come since the last call."""
        with self._lock:
            save = self._save(token)
            members, save.members = save.members, []
            return members

    def finish(self, token: bytes, outcome: bytes, loss: bytes) -> None:
        """End a save: whoever asks gets its outcome, and members that come too late get the text ``loss``."""
        with self._lock:
            save = self._save(token)
            save.ring, save.outcome, save.loss = None, outcome, loss
            self._over.append(save)
        self._ring.send(b"!")

    def close(self) -> None:
        """Stop listening, and close all connections that no group has taken."""
        self._ring.close()
        self._thread.join()

    def _save(self, token: bytes) -> _Save:
        if token not in self._saves:
            self._saves[token] = _Save()
            idle = [token for token, save in self._saves.items() if save.ring is None]
            for old in idle[:-_MOST_SAVES]:
                save = self._saves.pop(old)
                for connection in (*save.askers, *(connection for _, connection in save.members)):
                    connection.close()
                save.askers, save.members = [], []
        return self._saves[token]

    def _serve(self) -> None:
        with self._selector:
            while self._ring.fileno() >= 0:
                # They came one after the other, and have the same time each.
                first = next(iter(self._callers.values()), None)
                pause = None if first is None else max(0.0, first.until - time.monotonic())
                for key, _ in self._selector.select(pause):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._rung:
                        self._rung.recv(1)
                        self._tell_outcomes()
                    else:
                        self._serve_caller(key.fileobj)
                now = time.monotonic()
                while self._callers and next(iter(self._callers.values())).until <= now:
                    self._forget(next(iter(self._callers))).close()
        for connection in (self._listener, self._rung, *self._callers):
            connection.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # it has left again
        except OSError:  # too many open files, or no memory: it may pass
            time.sleep(_PAUSE_SECONDS)
            return
        connection.setblocking(False)
        self._attend(close_in_forks(connection), None)

    def _attend(self, connection: socket.socket, answer: Leaving | None) -> None:
        self._callers[connection] = _Caller(time.monotonic() + GREETING_SECONDS, answer=answer)
        self._selector.register(connection, selectors.EVENT_WRITE if answer else selectors.EVENT_READ)

    def _forget(self, connection: socket.socket) -> Any:
        self._selector.unregister(connection)
        del self._callers[connection]
        return connection

    def _serve_caller(self, connection: Any) -> None:
        caller = self._callers[connection]
        try:
            if caller.answer is not None:
                caller.answer.send(connection)
                is_over = caller.answer.is_done
            else:
                heard = connection.recv(_HELLO.size - len(caller.said))
                caller.said += heard
                is_over = not heard
        except BlockingIOError:
            return
        except OSError:
            is_over = True
        if is_over:
            self._forget(connection).close()
        elif len(caller.said) == _HELLO.size:
            self._greet(self._forget(connection), bytes(caller.said))

    def _greet(self, connection: socket.socket, hello: bytes) -> None:
        magic, token, rank, is_asking = _HELLO.unpack(hello)
        if magic != _MAGIC:
            connection.close()
            return
        with self._lock:
            save = self._save(token)
            if is_asking:
                save.askers.append(connection)
            else:
                save.members.append((rank, connection))
            if save.outcome is not None:
                self._over.append(save)
            elif save.ring is not None and not is_asking:
                with contextlib.suppress(OSError):  # it has not heard the earlier ones yet, or has ended
                    save.ring.send(b"!")
        self._tell_outcomes()

    def _tell_outcomes(self) -> None:
        """Answer those who wait for saves that are over."""
        with self._lock:
            waiting = []
            for save in self._over:  # twice, maybe
                waiting.append((save, save.askers, save.members))
                save.askers, save.members = [], []
            self._over = []
        for save, askers, members in waiting:
            for connection in askers:
                self._attend(connection, Leaving(FAREWELL, [save.outcome or b""]))
            for _, connection in members:
                if save.loss:
                    self._attend(connection, Leaving(FAREWELL, [save.loss]))
                else:
                    connection.close()


def greet(address: str, token: bytes, rank: int, is_asking: bool, timeout: float) -> socket.socket:
    """Connect to the writer of another rank, and say for which save.

    Raises:
        OSError: It has gone, or does not answer within ``timeout`` seconds.
    """
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=min(timeout, CONNECT_SECONDS))
    try:
        connection.sendall(_HELLO.pack(_MAGIC, token, rank, is_asking))
        prepare(connection)
    except BaseException:
        connection.close()
        raise
    return close_in_forks(connection)


def ask_outcome(address: str, token: bytes, rank: int, timeout: float) -> bytes | None:
    """Return the outcome of a save from the coordinator's writer; None if it has gone or does not tell it in time."""
    deadline, answer = time.monotonic() + timeout, Arriving()
    try:
        with greet(address, token, rank, True, timeout) as connection:
            while not answer.is_done:
                connection.settimeout(max(0.0, deadline - time.monotonic()))
                answer.receive(connection)
    except (OSError, EOFError):
        return None
    return bytes(answer.payloads[0])

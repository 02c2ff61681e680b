"""The listening socket of a writer process, at which other ranks' writers find it.

A process that connects and closes has verified that this one lives. Other processes send a greeting, with the secret of
this one's address and the token of a save: as a member of the group that makes it, or to learn its outcome. The kernel
accepts connections while the writer is busy, and the writer serves them when it waits.

Tested in tests/ranks/test_group_listener.py.
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import struct
import time
from collections import OrderedDict
from typing import Any

from paddle_flexckpt.forks import close_in_forks
from paddle_flexckpt.ranks.framing import IncomingMessage, encode
from paddle_flexckpt.ranks.lost_ranks import BACKLOG, CONNECT_SECONDS, SECRET_BYTES, split_address

# A connecting process sends its greeting at once; one that sends nothing is disconnected.
GREETING_SECONDS = 10.0
# Secret of the listener, token of the save, and the sender's position in its group; or a request for the outcome.
_HELLO = struct.Struct(f"<{SECRET_BYTES}s16si")
_ASKS = -1
# The exchange number of a message that is the last one for its receiver.
FAREWELL = (1 << 64) - 1
# The number of payloads of every message; most are empty.
PAYLOADS = 2
# The most saves of which something is remembered: outcomes, and connections that came before their save began.
_MOST_SAVES = 16
_PAUSE_SECONDS = 0.1
# After a save that has lost a member, others ask for its outcome at once. Its training process may end at once too.
_LINGER_SECONDS = 2.0
# An answer leaves at once, if it is not very long.
_ANSWER_SECONDS = 1.0
# A host that went down sends nothing. The kernel probes it after 30 seconds of silence, and gives up after 90. There is
# no limit for data that is not received (TCP_USER_TIMEOUT): a busy rank may read nothing for long.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}


class GroupListener:
    """A listener that serves those who connect to a process, while the process waits for something.

    Attributes:
        selector: The selector that the process waits on. Others may register sockets of theirs, with data.
    """

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        """Take a listening socket, which this object closes, and the secret of its address."""
        self._listener, self._secret = close_in_forks(listener), secret
        self._listener.setblocking(False)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self._listener, selectors.EVENT_READ)
        # Connections that have sent no greeting yet, with what has come of it, and the time at which they are dropped.
        self._ungreeted: dict[socket.socket, tuple[bytearray, float]] = {}
        # Positions and connections that have greeted, by token, and whether they only ask for the outcome.
        self._greeted: OrderedDict[tuple[bytes, bool], list[tuple[int, socket.socket]]] = OrderedDict()
        # By token, the outcome, and the text of the error for members that come too late.
        self._ended: OrderedDict[bytes, tuple[bytes, bytes]] = OrderedDict()
        self._lingers_until = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        """Wait at most so many seconds; return the data of ready sockets that others have registered, perhaps none."""
        if self._ungreeted:
            left = max(0.0, self._oldest[1] - time.monotonic())
            timeout = left if timeout is None else min(left, timeout)
        ready = []
        for key, _ in self.selector.select(timeout):
            if key.fileobj is self._listener:
                self._accept()
            elif key.data is None:
                self._read_greeting(key.fileobj)
            else:
                ready.append(key.data)
        while self._ungreeted and self._oldest[1] <= time.monotonic():
            self._forget(self._oldest[0]).close()
        return ready

    @property
    def _oldest(self) -> tuple[socket.socket, float]:
        """Return the ungreeted connection that came first, and the end of its time: all have the same time."""
        connection, (_, until) = next(iter(self._ungreeted.items()))
        return connection, until

    def serve(self) -> None:
        """Serve all that have connected and greeted by now, without waiting."""
        for _ in range(2):  # a connection is accepted first, and read in the next turn
            self.select(0)

    def await_readable(self, connection: socket.socket) -> None:
        """Wait until a connection of this process can be read."""
        self.selector.register(connection, selectors.EVENT_READ, connection)
        try:
            while not self.select():
                pass
        finally:
            self.selector.unregister(connection)

    def take(self, token: bytes) -> list[tuple[int, socket.socket]]:
        """Return positions and connections of a save's members that have come since the last call."""
        return self._greeted.pop((token, False), [])

    def end(self, token: bytes, outcome: bytes, late_error: str) -> None:
        """End a save. Requests for its outcome get ``outcome`` from now on.

        Members that come too late get the text ``late_error``; without one they are disconnected. Requests that have
        come by now are answered when this returns, as the process may be about to end.
        """
        self._ended.setdefault(token, (outcome, late_error.encode()))
        if late_error:
            self._lingers_until = time.monotonic() + _LINGER_SECONDS
        if len(self._ended) > _MOST_SAVES:
            self._ended.popitem(last=False)
        self._answer(token)
        self.serve()

    def linger(self) -> None:
        """Serve those who ask for the outcome, if a save has just lost a member: this process is about to end."""
        while (left := self._lingers_until - time.monotonic()) > 0:
            self.select(left)

    def close(self) -> None:
        """Close the listening socket, and the connections that nobody has used."""
        callers = [connection for several in self._greeted.values() for _, connection in several]
        self.selector.close()
        for each in (self._listener, *self._ungreeted, *callers):
            each.close()

    def _accept(self) -> None:
        for turn in range(BACKLOG):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue  # it has disconnected again
            except OSError:  # too many open files, or no memory: this may pass
                if turn == 0 and self._ungreeted:  # each has had a turn in which it could greet
                    self._forget(self._oldest[0]).close()
                elif turn == 0:
                    time.sleep(_PAUSE_SECONDS)
                return
            connection.setblocking(False)
            self._ungreeted[close_in_forks(connection)] = bytearray(), time.monotonic() + GREETING_SECONDS
            self.selector.register(connection, selectors.EVENT_READ)

    def _read_greeting(self, connection: Any) -> None:
        if connection not in self._ungreeted:
            return  # it has just been dropped for another
        hello, heard = self._ungreeted[connection][0], b""
        try:
            heard = connection.recv(_HELLO.size - len(hello))
        except BlockingIOError:
            return
        except OSError:
            pass  # it has disconnected
        hello += heard
        if heard and len(hello) < _HELLO.size:
            return
        self._forget(connection)
        secret, token, position = _HELLO.unpack(hello) if heard else (b"", b"", 0)
        if not secrets.compare_digest(secret, self._secret):
            connection.close()
            return
        self._greeted.setdefault((token, position == _ASKS), []).append((position, connection))
        if len(self._greeted) > 2 * _MOST_SAVES:
            for _, old in self._greeted.popitem(last=False)[1]:
                old.close()
        if token in self._ended:
            self._answer(token)

    def _forget(self, connection: socket.socket) -> socket.socket:
        self.selector.unregister(connection)
        del self._ungreeted[connection]
        return connection

    def _answer(self, token: bytes) -> None:
        outcome, late_error = self._ended[token]
        for _, asker in self._greeted.pop((token, True), []):
            _dismiss(asker, outcome)
        for _, member in self.take(token):
            if late_error:
                _dismiss(member, late_error)
            else:
                member.close()


def _dismiss(connection: socket.socket, text: bytes) -> None:
    with contextlib.suppress(OSError):  # it has disconnected, or receives nothing
        connection.settimeout(_ANSWER_SECONDS)
        for part in encode(FAREWELL, [text, b""]):
            connection.sendall(part)
    hang_up(connection)


def hang_up(connection: socket.socket) -> None:
    """Close a connection, after reading what has arrived: else the system would discard what has been sent."""
    with contextlib.suppress(OSError), connection:
        connection.setblocking(False)
        while connection.recv(1 << 20):
            pass


def greet(address: str, token: bytes, position: int, timeout: float) -> socket.socket:
    """Connect to the listener of another process, and send a greeting; return the connection, which does not block.

    Args:
        address: The listener's address, "host:port/secret".
        token: The token of a save, or of what else the two processes connect for.
        position: The place of this rank in the group; or that it only asks for the outcome of the save.
        timeout: Seconds to wait for the connection at most.

    Raises:
        OSError: It has died, or does not answer within ``timeout`` seconds.
    """
    host_and_port, secret = split_address(address)
    connection = close_in_forks(socket.create_connection(host_and_port, timeout=min(timeout, CONNECT_SECONDS)))
    try:
        connection.sendall(_HELLO.pack(secret, token, position))
        prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def ask_outcome(address: str, token: bytes, timeout: float) -> bytes | None:
    """Return the outcome of a save from another rank's writer; None if that has died or does not answer in time."""
    deadline, answer = time.monotonic() + timeout, IncomingMessage([FAREWELL], PAYLOADS)
    try:
        with greet(address, token, _ASKS, timeout) as connection:
            while not answer.is_done:
                connection.settimeout(max(0.0, deadline - time.monotonic()))
                answer.receive(connection)
    except (OSError, EOFError):
        return None
    return bytes(answer.payloads[0])


def prepare(connection: socket.socket) -> None:
    """Make a connection non-blocking, without delay, and closed if the host at its other end goes down."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        if hasattr(socket, option):  # not available on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

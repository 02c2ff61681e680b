"""Carry tensor data between ranks through host memory, as one byte stream per pair.

Both ends know from the plan how many bytes a stream has and what they mean, so only data is sent. Host sockets need no
device and no gloo point-to-point, which desynchronises gloo's collectives. Between devices data goes through the
backend's all-to-all instead (:mod:`~paddle_flexckpt.communication.device_exchange`).
"""

from __future__ import annotations

import contextlib
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import numpy as np

from paddle_flexckpt.catalog.errors import StoppedExchangeError
from paddle_flexckpt.forks import close_in_forks
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.ranks.group_listener import GREETING_SECONDS
from paddle_flexckpt.ranks.lost_ranks import CONNECT_SECONDS, own_host
from paddle_flexckpt.ranks.shared_stream import SharedReceiver, SharedSender, receive_exactly

# A peer that sends nothing for so long has died or hangs.
STALL_SECONDS = 600.0

# How long a rank waits for connections before it checks whether the others live; twice as long after each check.
FIRST_CHECK_SECONDS = 1.0

# The data that a rank sends in one round, by receiver, or receives, by sender. An exchange has one for each round.
Streams = Mapping[int, Iterator[np.ndarray]]

_HELLO = struct.Struct("<16si")  # the token of the listener, the rank that connects
_PLACE = struct.Struct("<HB")  # a port, and the length of the name on the machine


class Transport(ABC):
    """A connection that moves byte streams between the members of a group.

    One exchange is: 1. every member calls :meth:`address`, and they gather each other's; 2. every member calls
    :meth:`exchange` or :meth:`exchange_rounds` once; 3. :meth:`close`.
    """

    @abstractmethod
    def address(self) -> bytes:
        """Return the address by which the other members reach this one."""

    def exchange(self, addresses: list[bytes], outgoing: Streams, incoming: Streams) -> None:
        """Send and receive all streams in one round; arguments and errors as of :meth:`exchange_rounds`."""
        self.exchange_rounds(addresses, (set(outgoing), set(incoming)), (outgoing,), (incoming,))

    @abstractmethod
    def exchange_rounds(
        self,
        addresses: list[bytes],
        peers: tuple[Collection[int], Collection[int]],
        outgoing: Iterable[Streams],
        incoming: Iterable[Streams],
        stop: Callable[[], None] = lambda: None,
    ) -> None:
        """Send and receive streams, round by round.

        A rank sends all data of a round before any of the next. Its receivers have the same rounds, so that both ends
        of a pair know the order; a rank may have more rounds than another.

        Args:
            addresses: Every member's address, in the group's order.
            peers: The ranks that some round has a stream to, and those that some round has a stream from.
            outgoing: By round and receiving rank, contiguous uint8 arrays; each has been sent before the next is
                requested. Another thread requests them.
            incoming: By round and sending rank, writable contiguous uint8 arrays; each is full before the next is
                requested.
            stop: Called when the exchange has failed, as a round may wait for data that will not come.

        Raises:
            StoppedExchangeError: A peer went away or stalled.
            Exception: What one of the streams raised.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the resources of the transport."""


def open_transport(comm: Communicator) -> Transport:
    """Return a transport for tensor data between the members through host memory."""
    own: Callable[[], Transport] | None = getattr(comm, "open_transport", None)  # simulated ranks have their own
    return SocketTransport(comm.ranks, comm.position) if own is None else own()


class SocketTransport(Transport):
    """A transport through host sockets, and between ranks on one machine through shared memory.

    In step k of a round every rank sends to the rank k places after it and receives from the one k places before it. A
    thread sends while the caller receives. So no ring of sends can deadlock: of all unfinished streams, the one of the
    lowest round and step has both its ends ready.
    """

    def __init__(self, ranks: tuple[int, ...], position: int, stall_seconds: float = STALL_SECONDS) -> None:
        """Args: ranks: global ranks of the members. position: this rank's place. stall_seconds: the longest silence."""
        self._ranks = ranks
        self._position = position
        self._stall = stall_seconds
        self._token = secrets.token_bytes(16)
        self._listeners: list[socket.socket] = []
        self._arrived: dict[int, socket.socket] = {}
        self._shared: dict[int, SharedReceiver] = {}
        self._arrival = threading.Condition()
        self._failure: BaseException | None = None
        self._stop: Callable[[], None] = lambda: None
        close_in_forks(self)

    def address(self) -> bytes:
        """Return host, port, a name on this machine, and a token that tells members from strangers."""
        host, name, backlog = own_host(), b"", max(len(self._ranks), 16)
        self._listeners = [socket.create_server((host, 0), backlog=backlog)]
        if sys.platform == "linux":
            name = secrets.token_bytes(8)
            self._listeners.append(socket.socket(socket.AF_UNIX))
            self._listeners[1].bind(b"\0" + name)
            self._listeners[1].listen(backlog)
        port = self._listeners[0].getsockname()[1]
        return self._token + _PLACE.pack(port, len(name)) + name + _pack_host(host)

    def exchange_rounds(
        self,
        addresses: list[bytes],
        peers: tuple[Collection[int], Collection[int]],
        outgoing: Iterable[Streams],
        incoming: Iterable[Streams],
        stop: Callable[[], None] = lambda: None,
    ) -> None:
        """Implement :meth:`Transport.exchange_rounds`."""
        n, here = len(self._ranks), self._position
        receivers = [r for k in range(1, n) if (r := self._ranks[(here + k) % n]) in peers[0]]
        senders = [r for k in range(1, n) if (r := self._ranks[(here - k) % n]) in peers[1]]
        reach, self._stop = dict(zip(self._ranks, addresses)), stop
        threads = [threading.Thread(target=self._send_all, args=(receivers, reach, outgoing), daemon=True)]
        if senders:
            threads.append(
                threading.Thread(target=self._accept_all, args=({rank: reach[rank] for rank in senders},), daemon=True)
            )
        for thread in threads:
            thread.start()
        try:
            self._receive_all(senders, incoming)
        except BaseException as error:
            # The sender thread has to stop too, so that this rank's receivers learn that it failed.
            self._fail(error)
        if self._failure is not None:
            for connection in list(self._arrived.values()):
                _reset(connection)
        for thread in threads:
            thread.join()
        if self._failure is not None:
            if isinstance(self._failure, (OSError, EOFError)):
                raise StoppedExchangeError(
                    f"rank {self._ranks[here]}: exchange of tensor data failed: {self._failure}. "
                    "Targets are partly overwritten"
                ) from self._failure
            raise self._failure

    def close(self) -> None:
        """Close all sockets."""
        for open_socket in (*self._listeners, *self._arrived.values()):
            open_socket.close()

    def _fail(self, error: BaseException) -> None:
        with self._arrival:
            first = self._failure is None
            if first:
                self._failure = error
            self._arrival.notify_all()
            arrived = list(self._arrived.values())
        if first:
            self._stop()
        # Wakes the accepting and the receiving thread.
        for open_socket in (*arrived, *self._listeners):
            with contextlib.suppress(OSError):  # it may be closed, or never have been connected
                open_socket.shutdown(socket.SHUT_RDWR)

    def _send_all(self, receivers: list[int], reach: dict[int, bytes], outgoing: Iterable[Streams]) -> None:
        connections: dict[int, socket.socket] = {}
        shared: dict[int, SharedSender] = {}
        with contextlib.ExitStack() as stack:
            # Connect first, also after a failure: a rank that waits for this one then sees the connection end.
            for rank in receivers:
                try:
                    connections[rank] = stack.enter_context(self._connect(reach[rank]))
                    if connections[rank].family == socket.AF_UNIX:
                        shared[rank] = SharedSender(connections[rank], len(self._ranks))
                except Exception as error:  # passed to the caller's thread, which raises it
                    self._fail(error)
            # The error is stored before a connection closes: a peer answers by closing its own streams, which this rank
            # must not take for the cause.
            try:
                if self._failure is None:
                    for streams in outgoing:
                        for rank in receivers:
                            if rank in streams and self._failure is None:
                                self._send(connections[rank], shared.get(rank), streams[rank])
                        if self._failure is not None:  # the ``with`` closes the connections, which others notice
                            return
                    for sender in shared.values():
                        sender.finish()
            except Exception as error:  # passed to the caller's thread, which raises it
                self._fail(error)

    def _send(self, connection: socket.socket, shared: SharedSender | None, chunks: Iterator[np.ndarray]) -> None:
        for chunk in chunks:
            if shared is None:
                connection.sendall(memoryview(chunk))
            else:
                shared.send(chunk)
            if self._failure is not None:
                return

    def _connect(self, address: bytes) -> socket.socket:
        connection = close_in_forks(self._reach(*parse_address(address), self._stall))
        connection.sendall(_HELLO.pack(address[:16], self._ranks[self._position]))
        return connection

    def _reach(self, host: str, port: int, name: bytes, timeout: float) -> socket.socket:
        """Connect to a member, by a Unix socket if it is on this machine.

        A member whose host has the same name may be elsewhere: containers may each have a network of their own.
        """
        connection = self._reach_here(name, timeout) if name and host == own_host() else None
        return connection or socket.create_connection((host, port), timeout=timeout)

    @staticmethod
    def _reach_here(name: bytes, timeout: float) -> socket.socket | None:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout)
        try:
            connection.connect(b"\0" + name)
        except ConnectionRefusedError:
            connection.close()
            return None
        return connection

    def _accept_all(self, expected: dict[int, bytes]) -> None:
        try:
            if not self._listeners:
                raise OSError("address() was not called before exchange()")
            while expected and self._failure is None:
                connection = close_in_forks(self._accept(expected))
                rank = self._greet(connection)
                connection.settimeout(self._stall)
                if rank is None or rank not in expected:
                    connection.close()
                    continue
                del expected[rank]
                try:
                    shared = SharedReceiver(connection) if connection.family == socket.AF_UNIX else None
                except BaseException:
                    _reset(connection)
                    raise
                with self._arrival:
                    if self._failure is not None:
                        _reset(connection)
                        return
                    self._arrived[rank] = connection
                    if shared is not None:
                        self._shared[rank] = shared
                    self._arrival.notify_all()
        except Exception as error:  # passed to the caller's thread, which raises it
            self._fail(error)
        finally:
            if self._failure is not None:
                # Ranks that have connected and were not accepted get an error: a shutdown does not end their
                # connections on this machine.
                for listener in self._listeners:
                    listener.close()

    def _accept(self, expected: Mapping[int, bytes]) -> socket.socket:
        """Return the next connection, as long as the ranks that are to connect, given by address, live."""
        pause, end = FIRST_CHECK_SECONDS, time.monotonic() + self._stall
        with selectors.DefaultSelector() as waiting:
            for listener in self._listeners:
                waiting.register(listener, selectors.EVENT_READ, listener)
            while not (ready := waiting.select(min(pause, max(0.0, end - time.monotonic())))):
                if time.monotonic() >= end:
                    raise TimeoutError("timed out")
                gone = [rank for rank, address in expected.items() if self._is_gone(address)]
                # It may have connected, and finished, since.
                if gone and not (ready := waiting.select(0)):
                    raise EOFError(f"rank {', '.join(map(str, gone))} has gone")
                if ready:
                    break
                pause *= 2
        listener = ready[0][0].data
        listener.settimeout(self._stall)
        return listener.accept()[0]

    def _is_gone(self, address: bytes) -> bool:
        """Return whether nobody listens at a member's address; an answer that does not come proves nothing."""
        host, port, name = parse_address(address)
        try:
            connection = self._reach(host, port, name, min(CONNECT_SECONDS, self._stall))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
        connection.close()  # without a greeting: it is dropped at once
        return False

    def _greet(self, connection: socket.socket) -> int | None:
        """Return the rank that a connection identifies itself as, or None for a stranger."""
        hello = bytearray(_HELLO.size)
        # A silent stranger must not keep the members waiting.
        connection.settimeout(min(GREETING_SECONDS, self._stall / 10))
        try:
            receive_exactly(connection, memoryview(hello))
        except (EOFError, OSError):
            return None
        token, rank = _HELLO.unpack(hello)
        return rank if secrets.compare_digest(token, self._token) else None

    def _receive_all(self, senders: list[int], incoming: Iterable[Streams]) -> None:
        for streams in incoming:
            for rank in senders:
                if rank in streams:
                    self._receive(rank, streams[rank])
            if self._failure is not None:
                return

    def _receive(self, rank: int, buffers: Iterator[np.ndarray]) -> None:
        with self._arrival:
            arrived = self._arrival.wait_for(lambda: rank in self._arrived or self._failure is not None, self._stall)
            if self._failure is not None:
                return
            if not arrived:
                raise OSError(f"rank {rank} did not connect within {self._stall:.0f} s")
        connection, shared = self._arrived[rank], self._shared.get(rank)
        for buffer in buffers:
            try:
                if shared is None:
                    receive_exactly(connection, memoryview(buffer))
                else:
                    shared.receive(buffer)
            except EOFError as error:
                raise EOFError(f"rank {rank} stopped sending (it failed or died)") from error


def _reset(connection: socket.socket) -> None:
    """End a connection at once, so that its sender, who may wait for bytes to be read, gets an error."""
    # Without lingering, closing is a reset. An ordinary close would leave a sender whose window is full waiting.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def parse_address(address: bytes) -> tuple[str, int, bytes]:
    """Return the host and port in a rank's address, and its name on that machine; the token precedes them."""
    port, length = _PLACE.unpack_from(address, 16)
    begin = 16 + _PLACE.size
    return _unpack_host(address[begin + length :]), port, address[begin : begin + length]


def _pack_host(host: str) -> bytes:
    """Return a host in few bytes, as agreements contain addresses. An IPv4 address takes four, after a zero."""
    with contextlib.suppress(OSError):
        packed = socket.inet_pton(socket.AF_INET, host)
        return b"\0" + packed
    return host.encode()


def _unpack_host(packed: bytes) -> str:
    return socket.inet_ntop(socket.AF_INET, packed[1:]) if packed[:1] == b"\0" else packed.decode()

"""A socket mesh: every rank can send arrays to every other, and a send never blocks.

Not gloo: its point-to-point calls block until the peer has posted the matching call, and they advance, on the two
peers alone, the tag counter that its collectives use (U3), so the next collective hangs. Groups of three and more ranks
often fail to connect (U1), and sums of float16 are inf (U2). The mesh has none of these, and its order of summation is
fixed.

Each ordered pair of ranks has its own TCP connection on the loopback interface, so messages between two ranks never
overtake one another. Rank 0 draws a random token and publishes it in Paddle's TCPStore; a connection that does not
present it is refused.

A message is addressed by ``(epoch, source, channel)``. The epoch rises when fleet is reset: what a failed job left
unread can then never be taken for a message of the next one. Tested in tests/distributed/test_cpu_world.py.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from paddle_flexckpt.testing import frames

Epoch = tuple[int, int]
Payload = np.ndarray

_log = logging.getLogger(__name__)

_STORE_KEY = "paddle_flexckpt/cpu_world"


class MeshError(RuntimeError):
    """An error of a message that did not arrive: the peer is gone, the wait was too long, or the job was aborted."""


class Mesh:
    """The connections of one rank. Use it from one thread; it runs its own threads underneath.

    1. ``start(store, rank, size)`` publishes this rank's port and reads everybody's. Collective.
    2. ``send`` queues a message; ``recv`` waits for one; or ``post`` reserves a place in the order and ``take`` waits
       later.
    3. ``next_epoch`` drops what is unread. ``abort`` wakes the waiting thread with an error.
    4. ``close`` says goodbye to all peers, closes the sockets and ends the threads.

    ``recv`` waits ``timeout`` seconds before it raises; with None, for ever.
    """

    def __init__(self, timeout: float | None = 120.0) -> None:
        self.timeout = timeout
        self.rank = 0
        self.size = 1
        self.port = 0
        self.started = False
        self._news = threading.Condition()
        self._epoch: Epoch = (0, 0)
        self._inbox: dict[tuple[Epoch, int, str], dict[int, Payload]] = defaultdict(dict)
        self._arrived: dict[tuple[Epoch, int, str], int] = defaultdict(int)
        self._posted: dict[tuple[Epoch, int, str], int] = defaultdict(int)
        self._lost: dict[int, str] = {}
        self._abort: tuple[int, str] | None = None
        self._unsent: dict[int, int] = defaultdict(int)
        self._outbox: dict[int, queue.Queue[tuple[dict[str, Any], Payload] | None]] = {}
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self._closing = False

    def start(self, store: Any, rank: int, size: int) -> None:
        """Join the mesh through Paddle's TCPStore, which all ranks share; do nothing when it has been joined."""
        if self.started:
            return
        self.rank, self.size = rank, size
        # Every peer may connect before the first accept: a short backlog made connections fail at 8 ranks.
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=max(128, 2 * size))
        if rank == 0:
            store.set(f"{_STORE_KEY}/token", secrets.token_hex(32))
        self._token = store.get(f"{_STORE_KEY}/token").decode()
        self.port = self._listener.getsockname()[1]
        store.set(f"{_STORE_KEY}/{rank}", str(self.port))
        # The store's client socket is not safe to use from threads, so all ports are read here and now.
        self._ports = [int(store.get(f"{_STORE_KEY}/{peer}").decode()) for peer in range(size)]
        self.started = True
        self._spawn(self._accept, "accept")

    def send(self, peer: int, channel: str, array: Payload) -> None:
        """Send ``array`` to ``peer``, whether it waits for it or not. The array must not change afterwards.

        The message has left this process when the call returns: what comes next may be a collective of Paddle's own C++
        code, which waits for the peers without giving the interpreter to the thread that sends.

        Raises:
            MeshError: the connection to the peer is known to be broken.
        """
        with self._news:
            if peer in self._lost:
                raise MeshError(f"rank {self.rank} cannot send to rank {peer}: {self._lost[peer]}")
            header = {"epoch": self._epoch, "channel": channel, "dtype": array.dtype.str, "shape": array.shape}
            if peer == self.rank:
                self._deliver(self._epoch, peer, channel, array)
                return
        if peer not in self._outbox:
            self._outbox[peer] = queue.Queue()
            self._spawn(self._send_loop, f"to {peer}", peer)
        with self._news:
            self._unsent[peer] += 1
            self._outbox[peer].put((header, np.ascontiguousarray(array)))
            self._news.wait_for(lambda: not self._unsent[peer] or peer in self._lost or self._failure, self.timeout)

    def recv(self, peer: int, channel: str) -> Payload:
        """Wait for the next message of ``peer`` on ``channel``."""
        return self.wait_for(peer, channel, self.post(peer, channel))

    def post(self, peer: int, channel: str) -> int:
        """Reserve the next message of ``peer`` on ``channel``; its sequence number is for :meth:`wait_for`."""
        with self._news:
            key = (self._epoch, peer, channel)
            sequence = self._posted[key]
            self._posted[key] = sequence + 1
            return sequence

    def wait_for(self, peer: int, channel: str, sequence: int) -> Payload:
        """Wait for the message that ``sequence`` reserved. They may be waited for in any order."""
        return self._wait_for([(peer, sequence)], channel)[0]

    def recv_all(self, peers: Sequence[int], channel: str) -> list[Payload]:
        """Wait for the next message of each of ``peers`` on ``channel``, until one that is missing has left.

        Who waits for one after the other may wait for a peer that gave up because of another one that has left.
        """
        return self._wait_for([(peer, self.post(peer, channel)) for peer in peers], channel)

    def _wait_for(self, wanted: Sequence[tuple[int, int]], channel: str) -> list[Payload]:
        with self._news:
            boxes = [self._inbox[(self._epoch, peer, channel)] for peer, _ in wanted]

            def missing() -> list[int]:
                return [peer for (peer, sequence), box in zip(wanted, boxes) if sequence not in box]

            def decided() -> bool:
                left = missing()
                return not left or bool(self._failure) or any(peer in self._lost for peer in left)

            self._news.wait_for(decided, self.timeout)
            left = missing()
            if not left:
                return [box.pop(sequence) for (_, sequence), box in zip(wanted, boxes)]
            peer = next((peer for peer in left if peer in self._lost), left[0])
            where = f"rank {self.rank} waits for rank {peer} on channel {channel!r}"
            if self._failure:
                raise MeshError(f"{where}: {self._failure}")
            if peer in self._lost:
                raise MeshError(f"{where}: {self._lost[peer]}")
            raise MeshError(f"{where}: nothing came within {self.timeout} s")

    def is_here(self, peer: int, channel: str, sequence: int) -> bool:
        """Return whether :meth:`wait_for` would return at once."""
        with self._news:
            return sequence in self._inbox[(self._epoch, peer, channel)]

    def next_epoch(self, job: int | None = None) -> None:
        """Forget unread messages.

        All ranks must do this equally often between messages. ``job`` gives an absolute number instead: it brings ranks
        together again whose counts differ because a job ended half way on some of them.
        """
        with self._news:
            self._epoch = (self._epoch[0], self._epoch[1] + 1) if job is None else (job, 0)
            for table in (self._inbox, self._arrived, self._posted):
                for key in [key for key in table if key[0] < self._epoch]:
                    del table[key]  # type: ignore[attr-defined]

    def abort(self, reason: str, job: int | None = None) -> None:
        """Make the waiting ``recv``, and every later one of this job, raise. Callable from any thread.

        Args:
            reason: becomes a part of the error.
            job: the job to abort, the current one when None. It may be one that this rank has yet to begin.
        """
        with self._news:
            job = self._epoch[0] if job is None else job
            # The first reason is the cause of the others.
            if self._abort is None or self._abort[0] < job:
                self._abort = (job, reason)
            self._news.notify_all()

    @property
    def _failure(self) -> str:
        """Return why the current job was aborted; empty when it was not."""
        return self._abort[1] if self._abort is not None and self._abort[0] == self._epoch[0] else ""

    def close(self, farewell: float | None = 10.0) -> None:
        """End the threads, so that none of them runs into the teardown of the interpreter (seen as a SIGSEGV at exit).

        It waits ``farewell`` seconds for every peer's goodbye, so that rank 0 does not take the TCPStore away from
        peers that still talk to it; None leaves without a word, which is right after an error.
        """
        if not self.started or self._closing:
            return
        if farewell is not None and not self._failure:
            self.timeout = farewell
            try:
                for peer in range(self.size):
                    self.send(peer, "bye", np.empty(0, "uint8"))
                for peer in range(self.size):
                    self.recv(peer, "bye")
            except MeshError as error:
                # Nothing of ours is lost by a peer that leaves much earlier, or later.
                _log.debug("leaving without a goodbye: %s", error)
        self._closing = True
        for box in self._outbox.values():
            box.put(None)
        # shutdown() before close(): it is what wakes a thread that is blocked in accept() or recv().
        for sock in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):  # already disconnected by the peer
                sock.shutdown(socket.SHUT_RD)
        deadline = time.monotonic() + 2.0
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for sock in [self._listener, *self._sockets]:
            sock.close()

    # -- threads -------------------------------------------------------------------------------------------------------

    def _spawn(self, target: Any, name: str, *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name=f"mesh {name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._closing:
                    self.abort(f"the listening socket failed: {error}")
                return
            self._sockets.append(sock)
            self._spawn(self._recv_loop, "from a peer", sock)

    def _recv_loop(self, sock: socket.socket) -> None:
        try:
            peer = int(frames.accept_hello(sock, self._token)["rank"])
        except (OSError, KeyError, ValueError) as error:
            # A stranger, not a peer: refuse it and carry on. A peer that could not get in will miss, and say so.
            _log.warning("rank %d refused a connection: %s", self.rank, error)
            sock.close()
            return
        threading.current_thread().name = f"mesh from {peer}"
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                header, payload = frames.recv_frame(sock)
                array = np.frombuffer(payload, dtype=np.dtype(header["dtype"])).reshape(header["shape"])
                with self._news:
                    self._deliver((header["epoch"][0], header["epoch"][1]), peer, header["channel"], array)
        except EOFError:
            self._lose(peer, f"rank {peer} has left")
        except (OSError, KeyError, ValueError, TypeError) as error:
            self._lose(peer, f"the connection from rank {peer} broke: {error}")

    def _send_loop(self, peer: int) -> None:
        box = self._outbox[peer]
        try:
            sock = socket.create_connection(("127.0.0.1", self._ports[peer]))
            self._sockets.append(sock)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            frames.send_hello(sock, self._token, rank=self.rank)
            while (item := box.get()) is not None:
                header, array = item
                frames.send_frame(sock, header, array.reshape(-1).view("uint8").data)
                with self._news:
                    self._unsent[peer] -= 1
                    self._news.notify_all()
            sock.shutdown(socket.SHUT_WR)
        except OSError as error:
            self._lose(peer, f"the connection to rank {peer} broke: {error}")

    def _deliver(self, epoch: Epoch, peer: int, channel: str, array: Payload) -> None:
        """File a message; the caller holds the lock. One of the future is kept: its sender was reset before us."""
        if epoch < self._epoch:
            return
        key = (epoch, peer, channel)
        self._inbox[key][self._arrived[key]] = array
        self._arrived[key] += 1
        self._news.notify_all()

    def _lose(self, peer: int, reason: str) -> None:
        with self._news:
            self._lost.setdefault(peer, reason)
            self._news.notify_all()

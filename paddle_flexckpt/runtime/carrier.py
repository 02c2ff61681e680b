"""Carriers: tensor data between ranks, as one byte stream per pair.

Both ends know from the plan how many bytes a stream has and what they mean, so nothing but data is sent. Two carriers
have the same interface: host sockets, which need no device and no gloo point-to-point (it desynchronises gloo's
collectives), and the device backend's all-to-all.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import CheckpointError

# A peer that sends nothing for so long has died or hangs.
STALL_SECONDS = 600.0
# A member says who it is at once; a stranger that says nothing must not keep the members waiting.
GREETING_SECONDS = 10.0
_HELLO = struct.Struct("<16si")


class Carrier(ABC):
    """Moves byte streams between the members of a group.

    One exchange is: 1. every member calls :meth:`address` and they exchange the answers; 2. every member calls
    :meth:`exchange` once; 3. :meth:`close`.
    """

    @abstractmethod
    def address(self) -> bytes:
        """What the other members need in order to reach this one."""

    @abstractmethod
    def exchange(
        self,
        addresses: list[bytes],
        outgoing: Mapping[int, Iterator[np.ndarray]],
        incoming: Mapping[int, Iterator[np.ndarray]],
    ) -> None:
        """Sends and receives all streams.

        Args:
            addresses: Every member's address, in the group's order.
            outgoing: By receiving rank, contiguous uint8 arrays; each is used up before the next is asked for.
            incoming: By sending rank, writable contiguous uint8 arrays; each is full before the next is asked for.

        Raises:
            CheckpointError: A peer went away or stalled.
        """

    @abstractmethod
    def close(self) -> None:
        """Releases what the carrier holds."""


class SocketCarrier(Carrier):
    """Host sockets.

    In step k every rank sends to the rank k places after it and receives from the one k places before it; a thread
    sends while the caller receives. So every stream has its receiver ready, and no ring of sends can wait for itself.
    """

    def __init__(self, ranks: tuple[int, ...], position: int, stall_seconds: float = STALL_SECONDS) -> None:
        """Args: ranks: global ranks of the members. position: this rank's place. stall_seconds: patience."""
        self._ranks = ranks
        self._position = position
        self._stall = stall_seconds
        self._token = secrets.token_bytes(16)
        self._listener: socket.socket | None = None
        self._arrived: dict[int, socket.socket] = {}
        self._arrival = threading.Condition()
        self._failure: BaseException | None = None

    def address(self) -> bytes:
        """Host, port and a token that tells members from strangers."""
        # The endpoint that the launcher gave this rank names the interface that its peers can reach.
        host = os.environ.get("PADDLE_CURRENT_ENDPOINT", "127.0.0.1:0").rpartition(":")[0]
        self._listener = socket.create_server((host, 0), backlog=max(len(self._ranks), 16))
        port = self._listener.getsockname()[1]
        return self._token + struct.pack("<H", port) + host.encode()

    def exchange(
        self,
        addresses: list[bytes],
        outgoing: Mapping[int, Iterator[np.ndarray]],
        incoming: Mapping[int, Iterator[np.ndarray]],
    ) -> None:
        """See :meth:`Carrier.exchange`."""
        n, here = len(self._ranks), self._position
        receivers = [r for k in range(1, n) if (r := self._ranks[(here + k) % n]) in outgoing]
        senders = [r for k in range(1, n) if (r := self._ranks[(here - k) % n]) in incoming]
        reach = dict(zip(self._ranks, addresses))
        threads = [threading.Thread(target=self._send_all, args=(receivers, reach, outgoing), daemon=True)]
        if senders:
            threads.append(threading.Thread(target=self._accept_all, args=(set(senders),), daemon=True))
        for thread in threads:
            thread.start()
        try:
            for rank in senders:
                self._receive(rank, incoming[rank])
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
                raise CheckpointError(
                    f"rank {self._ranks[here]}: exchange of tensor data failed: {self._failure}. "
                    "Targets are partly overwritten"
                ) from self._failure
            raise self._failure

    def close(self) -> None:
        """Closes all sockets."""
        if self._listener is not None:
            self._listener.close()
        for connection in self._arrived.values():
            connection.close()

    def _fail(self, error: BaseException) -> None:
        with self._arrival:
            if self._failure is None:
                self._failure = error
            self._arrival.notify_all()
            arrived = list(self._arrived.values())
        # Wakes the accepting and the receiving thread.
        for open_socket in (*arrived, *([self._listener] if self._listener else [])):
            with contextlib.suppress(OSError):  # it may be closed, or never have had a connection
                open_socket.shutdown(socket.SHUT_RDWR)

    def _send_all(
        self, receivers: list[int], reach: dict[int, bytes], outgoing: Mapping[int, Iterator[np.ndarray]]
    ) -> None:
        for rank in receivers:
            try:
                with self._connect(reach[rank]) as connection:
                    # After a failure the remaining streams are opened and closed at once: their receivers see the end.
                    if self._failure is None:
                        for chunk in outgoing[rank]:
                            connection.sendall(memoryview(chunk))
                            if self._failure is not None:
                                break
            except Exception as error:  # handed to the caller's thread, which raises it
                self._fail(error)

    def _connect(self, address: bytes) -> socket.socket:
        token, port, host = address[:16], struct.unpack("<H", address[16:18])[0], address[18:].decode()
        connection = socket.create_connection((host, port), timeout=self._stall)
        connection.sendall(_HELLO.pack(token, self._ranks[self._position]))
        return connection

    def _accept_all(self, expected: set[int]) -> None:
        listener = self._listener
        try:
            if listener is None:
                raise OSError("address() was not called before exchange()")
            listener.settimeout(self._stall)
            while expected and self._failure is None:
                connection, _ = listener.accept()
                rank = self._greet(connection)
                connection.settimeout(self._stall)
                if rank is None or rank not in expected:
                    connection.close()
                    continue
                expected.discard(rank)
                with self._arrival:
                    if self._failure is not None:
                        _reset(connection)
                        return
                    self._arrived[rank] = connection
                    self._arrival.notify_all()
        except Exception as error:  # handed to the caller's thread, which raises it
            self._fail(error)

    def _greet(self, connection: socket.socket) -> int | None:
        """The rank that a connection says it is, or None for a stranger."""
        hello = bytearray(_HELLO.size)
        connection.settimeout(min(GREETING_SECONDS, self._stall / 10))
        try:
            _receive_exactly(connection, memoryview(hello))
        except (EOFError, OSError):
            return None
        token, rank = _HELLO.unpack(hello)
        return rank if secrets.compare_digest(token, self._token) else None

    def _receive(self, rank: int, buffers: Iterator[np.ndarray]) -> None:
        with self._arrival:
            arrived = self._arrival.wait_for(lambda: rank in self._arrived or self._failure is not None, self._stall)
            if self._failure is not None:
                return
            if not arrived:
                raise OSError(f"rank {rank} did not connect within {self._stall:.0f} s")
        connection = self._arrived[rank]
        for buffer in buffers:
            try:
                _receive_exactly(connection, memoryview(buffer))
            except EOFError as error:
                raise EOFError(f"rank {rank} stopped sending (it failed or died)") from error


def _reset(connection: socket.socket) -> None:
    """Ends a connection at once: its sender, who may wait for bytes to be read that nobody will read, gets an error."""
    # Without lingering, closing is a reset. An ordinary end leaves a sender whose window is full where it is.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _receive_exactly(connection: socket.socket, view: memoryview) -> None:
    while len(view):
        got = connection.recv_into(view)
        if got == 0:
            raise EOFError("connection closed")
        view = view[got:]


class CollectiveCarrier(Carrier):
    """The backend's all-to-all, in rounds of bounded size.

    On a device backend the bytes cross in device buffers of ``round_bytes`` per pair.
    """

    def __init__(self, group: Any, all_gather: Callable[[bytes], list[bytes]], round_bytes: int = 32 << 20) -> None:
        """Args: group: a Paddle group. all_gather: a byte collective over it. round_bytes: per rank and round."""
        self._group = group
        self._all_gather = all_gather
        self._quota = max(1, round_bytes // len(group.ranks))

    def address(self) -> bytes:
        """Nothing: the group is connected already."""
        return b""

    def exchange(
        self,
        addresses: list[bytes],
        outgoing: Mapping[int, Iterator[np.ndarray]],
        incoming: Mapping[int, Iterator[np.ndarray]],
    ) -> None:
        """See :meth:`Carrier.exchange`."""
        import paddle
        import paddle.distributed as dist

        ranks = [int(rank) for rank in self._group.ranks]
        sources = {rank: _ByteStream(stream) for rank, stream in outgoing.items()}
        sinks = {rank: _ByteStream(stream) for rank, stream in incoming.items()}
        failure: Exception | None = None
        while True:
            counts = [-1] * len(ranks)  # a rank that has failed says so in the next round: no collective is left out
            if failure is None:
                try:
                    packed = [sources[rank].pull(self._quota) if rank in sources else b"" for rank in ranks]
                    counts = [len(p) for p in packed]
                except Exception as error:
                    failure = error
            answers = self._all_gather(np.asarray(counts, dtype=np.int64).tobytes())
            sizes = np.frombuffer(b"".join(answers), dtype=np.int64).reshape(len(ranks), len(ranks))
            if failure is not None:
                raise failure
            if (sizes < 0).any():
                failed = [rank for rank, row in zip(ranks, sizes) if row[0] < 0]
                raise CheckpointError(f"exchange of tensor data: ranks {failed} failed. Targets are partly overwritten")
            if not sizes.any():
                # One more look makes every sink finish its last buffer.
                for sink in sinks.values():
                    sink.finish()
                return
            got = sizes[:, self._group.rank]
            # A zero-size tensor has no memory to hand to a backend, so one spare byte pads each side.
            send = paddle.to_tensor(np.frombuffer(b"".join(packed) + b"\0", dtype=np.uint8))[:-1]
            received = paddle.zeros([int(got.sum())], dtype="uint8")
            dist.alltoall_single(
                received, send, in_split_sizes=[len(p) for p in packed], out_split_sizes=got.tolist(), group=self._group
            )
            data, position = memoryview(received.numpy()), 0
            for rank, count in zip(ranks, got.tolist()):
                try:
                    if count and failure is None:
                        sinks[rank].push(data[position : position + count])
                except Exception as error:
                    failure = error
                position += count

    def close(self) -> None:
        """Nothing to release."""


class _ByteStream:
    """A stream of uint8 arrays, read or filled in portions of any size."""

    def __init__(self, chunks: Iterator[np.ndarray]) -> None:
        self._chunks = iter(chunks)
        self._rest = memoryview(b"")

    def _advance(self) -> bool:
        while not len(self._rest):
            chunk = next(self._chunks, None)
            if chunk is None:
                return False
            self._rest = memoryview(chunk)
        return True

    def pull(self, count: int) -> bytes:
        """The next ``count`` bytes, or as many as there are."""
        out = bytearray()
        while len(out) < count and self._advance():
            portion = self._rest[: count - len(out)]
            out += portion
            self._rest = self._rest[len(portion) :]
        return bytes(out)

    def push(self, data: memoryview) -> None:
        """Puts bytes into the stream's buffers."""
        while len(data):
            if not self._advance():
                raise CheckpointError("a peer sent more bytes than were planned")
            count = min(len(data), len(self._rest))
            self._rest[:count] = data[:count]
            self._rest, data = self._rest[count:], data[count:]

    def finish(self) -> None:
        """Lets the owner of the buffers process the last one.

        Raises:
            CheckpointError: Not all buffers have been filled.
        """
        if self._advance():
            raise CheckpointError("a peer sent fewer bytes than were planned")

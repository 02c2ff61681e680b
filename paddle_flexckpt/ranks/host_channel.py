"""Exchange bytes between all ranks of a group, without a device and without pickle.

On a device backend Paddle's own exchange of objects goes through device memory, which training may have used up, and
needs the device to be current. A channel needs neither (docs/design.md, "How ranks agree").

Payloads for all ranks reach them in ceil(log2 n) rounds (Bruck's dissemination): in round k a rank sends the 2 ** k
payloads that it knows, or as many as are missing, to the rank 2 ** k places before it, and gets as many from the rank 2
** k places after it. So a rank needs connections to few others, and a payload reaches each rank once.

Payloads for one rank go the same ways: in round k, those whose remaining distance has the bit 2 ** k. So a byte is
passed on at most ceil(log2 n) times, on average half as often.

The ranks meet once, before the first exchange: each puts its address and a secret into the job's key-value store. A
connection that sends the secret comes from a process that can read the store. No rank waits for a dead one: its
presence is watched until it comes.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from paddle_flexckpt.catalog import LostRankError
from paddle_flexckpt.forks import close_in_forks
from paddle_flexckpt.ranks.framing import IncomingMessage, SendQueue, encode
from paddle_flexckpt.ranks.group_listener import GroupListener, greet, prepare
from paddle_flexckpt.ranks.lost_ranks import (
    CONNECT_SECONDS,
    EVERY_RANK,
    SECRET_BYTES,
    KeyValueStore,
    Missing,
    address_of,
    describe_lost_ranks,
    find_missing_ranks,
    own_host,
    presence_of,
)

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
    """One rank's part in a meeting, in which the ranks of a group connect to each other.

    Leaving the context closes the listener, and after an error all connections.

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

    def wait_for_all(self, patience: float) -> None:
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
                unknown = [rank for rank in self.absent if presence_of(self._store, rank) is None]
                warn_of_waiting(self._rank, self.absent, unknown)
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


def warn_of_waiting(rank: int, others: Sequence[int], unknown: Sequence[int] = ()) -> None:
    """Warn that a rank has waited for others for long; the ``unknown`` may have died before their first call."""
    names = f"{'rank' if len(others) == 1 else 'ranks'} {', '.join(map(str, others))}"
    why = describe_lost_ranks(Missing([], [], [*unknown]), TimeoutError()) if unknown else EVERY_RANK
    logger.warning(f"rank {rank} has waited {NOTICE_SECONDS:g} s for {names} in a call of this library. {why}")


Result = TypeVar("Result")
# A rank may be busy for long before it takes part: it writes its file, or has not finished the work before the first
# save. Paddle's own groups wait as long.
PATIENCE_SECONDS = 1800.0


class HostChannel:
    """A connection of a group's ranks by host sockets.

    Attributes:
        ranks: Global ranks of the members, in the group's order.
        position: This rank's place in ``ranks``.
        messages: Number of messages sent so far.
        bytes_sent: Bytes of payload in them.
    """

    def __init__(
        self, store: KeyValueStore, name: str, ranks: Sequence[int], position: int, patience: float = PATIENCE_SECONDS
    ) -> None:
        """Prepare a channel; its members connect at the first exchange.

        ``name`` is the same on all members, and unique to the group. After ``patience`` seconds without a byte a rank
        counts as lost.
        """
        self.ranks = tuple(ranks)
        self.position = position
        self.messages = 0
        self.bytes_sent = 0
        self._store = store
        self._name = name
        self._patience = patience
        self._exchanges = 0
        # By distance: the member so many places before this one, to which it sends, and the one so many after it.
        self._targets: dict[int, socket.socket] = {}
        self._sources: dict[int, socket.socket] = {}
        self._has_met = False
        self._broken = ""
        self._lock = threading.Lock()
        close_in_forks(self, type(self).leave_to_parent)

    @property
    def rank(self) -> int:
        """Return this rank's global number."""
        return self.ranks[self.position]

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return every member's payload, in the group's order.

        Raises:
            LostRankError: A member has died or takes no part, now or in an earlier call.
        """
        return self._exchange(lambda: self._disseminate(payload))

    def all_to_all(self, note: bytes, payloads: Mapping[int, bytes]) -> tuple[dict[int, bytes], dict[int, bytes]]:
        """Send each member a payload of its own, and a note to all; as of ``Communicator.all_to_all``.

        Raises:
            LostRankError: As of :meth:`all_gather`.
        """
        return self._exchange(lambda: self._deliver(note, payloads))

    def _exchange(self, exchange: Callable[[], Result]) -> Result:
        with self._lock:
            if self._broken:
                raise LostRankError(
                    f"the channel between ranks {list(self.ranks)} is closed since an exchange failed: {self._broken}"
                )
            # The message stays so if an interruption, such as a signal, leaves no time for a better one.
            self._broken = "it was interrupted. Remedy (FC501): restart the job"
            try:
                if not self._has_met:
                    self._meet()
                gathered = exchange()
            except Exception as error:
                self._hang_up()
                missing = find_missing_ranks(self._store, self._name, self.ranks, self.rank)
                self._broken = describe_lost_ranks(missing, error)
                raise LostRankError(self._broken) from error
            except BaseException:
                self._hang_up()
                raise
            self._broken = ""
            return gathered

    def close(self) -> None:
        """Close the connections; the channel cannot be used any more."""
        self._broken = self._broken or "it was closed"
        self._hang_up()

    def leave_to_parent(self) -> None:
        """Close this process's copies of the connections, after a fork; the parent keeps its own."""
        self._lock = threading.Lock()  # a thread that does not exist here may hold the lock
        self._broken = "this process is a fork of the one that made it. Remedy (FC102): call it there"
        self._hang_up()

    def _hang_up(self) -> None:
        for connection in (*self._targets.values(), *self._sources.values()):
            connection.close()

    def _disseminate(self, payload: bytes) -> list[bytes]:
        size = len(self.ranks)
        self._exchanges += 1
        known: list[bytes | memoryview] = [payload]  # of this rank, and those after it
        distance = 1
        while distance < size:
            count = min(distance, size - distance)
            known += self._send_and_receive(distance, known[:count])
            distance *= 2
        return [bytes(known[(position - self.position) % size]) for position in range(size)]

    def _deliver(self, note: bytes, payloads: Mapping[int, bytes]) -> tuple[dict[int, bytes], dict[int, bytes]]:
        """Pass payloads for the rank d places away on in the rounds of d's bits; they arrive with the last of these."""
        size = len(self.ranks)
        self._exchanges += 1
        notes: dict[int, bytes] = {self.position: note} if note else {}
        # By remaining distance: the sender, and the payload.
        under_way: dict[int, list[tuple[int, bytes]]] = {}
        for position, payload in payloads.items():
            under_way[(self.position - position) % size] = [(self.position, payload)]
        distance = 1
        while distance < size:
            leaving = [(far, *each) for far in under_way if far & distance for each in under_way[far]]
            under_way = {far: each for far, each in under_way.items() if not far & distance}
            # A note needs no distance: every rank passes it on.
            sent = [_encode_letters(leaving), _encode_letters([(0, *each) for each in notes.items()])]
            letters, received = map(_decode_letters, self._send_and_receive(distance, sent))
            for far, source, payload in letters:
                under_way.setdefault(far - distance, []).append((source, payload))
            notes.update({source: payload for _, source, payload in received})
            distance *= 2
        return dict(sorted(notes.items())), dict(sorted(under_way.get(0, ())))

    def _send_and_receive(self, distance: int, payloads: Sequence[bytes | memoryview]) -> list[memoryview]:
        """Send payloads to one side and receive as many from the other, at the same time, to avoid a deadlock."""
        target, source = self._targets[distance], self._sources[distance]
        target_rank = self.ranks[(self.position - distance) % len(self.ranks)]
        source_rank = self.ranks[(self.position + distance) % len(self.ranks)]
        leaving = SendQueue(encode(self._exchanges, payloads))
        arriving = IncomingMessage([self._exchanges], len(payloads))
        self.messages += 1
        self.bytes_sent += sum(len(payload) for payload in payloads)
        with selectors.DefaultSelector() as waiting:
            # A target never sends anything: if it is readable it has closed the connection.
            waiting.register(target, selectors.EVENT_READ | selectors.EVENT_WRITE)
            waiting.register(source, selectors.EVENT_READ)
            while not (leaving.is_done and arriving.is_done):
                ready = waiting.select(min(NOTICE_SECONDS, self._patience))
                if not ready and self._patience > NOTICE_SECONDS:
                    warn_of_waiting(self.rank, [target_rank if arriving.is_done else source_rank])
                    ready = waiting.select(self._patience - NOTICE_SECONDS)
                if not ready and not arriving.is_done:
                    raise TimeoutError(f"rank {source_rank} has sent nothing for {self._patience:g} s")
                if not ready:
                    raise TimeoutError(f"rank {target_rank} has taken nothing for {self._patience:g} s")
                for key, events in ready:
                    if key.fileobj is source:
                        with _blaming(source_rank):
                            arriving.receive(source)
                        if arriving.is_done:
                            waiting.unregister(source)
                        continue
                    with _blaming(target_rank):
                        if events & selectors.EVENT_READ:
                            _expect_nothing(target)
                        if events & selectors.EVENT_WRITE:
                            leaving.send(target)
                    if leaving.is_done:
                        waiting.unregister(target)
        return arriving.payloads

    def _meet(self) -> None:
        """Connect to the members that this one sends to, and accept those that it receives from."""
        size = len(self.ranks)
        distances = [1 << k for k in range((size - 1).bit_length())]
        targets = {distance: self.ranks[(self.position - distance) % size] for distance in distances}
        sources = {distance: self.ranks[(self.position + distance) % size] for distance in distances}
        with Meeting(self._store, self._name, self.rank, {*targets.values()}, {*sources.values()}) as meeting:
            meeting.wait_for_all(self._patience)
        self._targets = {distance: meeting.targets[rank] for distance, rank in targets.items()}
        self._sources = {distance: meeting.sources[rank] for distance, rank in sources.items()}
        self._has_met = True


# The head of a letter: its remaining distance, the position of its sender, and the length of its payload.
_LETTER = np.dtype([("far", "<u4"), ("source", "<u4"), ("length", "<u8")])


def _encode_letters(letters: Sequence[tuple[int, int, bytes]]) -> bytes:
    heads = np.asarray([(far, source, len(payload)) for far, source, payload in letters], dtype=_LETTER)
    return b"".join([len(letters).to_bytes(8, "little"), heads.tobytes(), *(payload for _, _, payload in letters)])


def _decode_letters(message: memoryview) -> list[tuple[int, int, bytes]]:
    count = int.from_bytes(message[:8], "little")
    heads, letters, begin = np.frombuffer(message, _LETTER, count, 8), [], 8 + count * _LETTER.itemsize
    for far, source, length in heads.tolist():
        letters.append((far, source, bytes(message[begin : begin + length])))
        begin += length
    return letters


def _expect_nothing(connection: socket.socket) -> None:
    if not connection.recv(1):
        raise EOFError
    raise OSError("data came from a rank that only receives")


@contextlib.contextmanager
def _blaming(rank: int) -> Iterator[None]:
    """Add the rank at the other end to errors of a connection."""
    try:
        yield
    except BlockingIOError:
        pass  # the connection was not ready after all; the caller waits again
    except EOFError as error:
        raise EOFError(f"rank {rank} has closed its connection") from error
    except OSError as error:
        raise ConnectionError(f"the connection to rank {rank} broke: {error}") from error

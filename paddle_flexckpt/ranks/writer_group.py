"""The group of the writers that make one save: each member has a connection to the coordinator's writer, in a star.

A member sends its messages to the coordinator, and gets those for it. The coordinator waits for all, and answers all.
If a connection ends, the process at its other end has died. If the coordinator gives up on a member, all get the same
text. A member that loses the coordinator does not know the outcome of the save.
"""

from __future__ import annotations

import contextlib
import resource
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from paddle_flexckpt.catalog import LostRankError
from paddle_flexckpt.catalog.errors import Failure, combine
from paddle_flexckpt.catalog.wire import join, pack_by_position, split, unpack_by_position
from paddle_flexckpt.ranks.communicator import Communicator, encode_failure, raise_failures
from paddle_flexckpt.ranks.framing import IncomingMessage, SendQueue, encode
from paddle_flexckpt.ranks.group_listener import FAREWELL, PAYLOADS, GroupListener, greet, hang_up, prepare
from paddle_flexckpt.ranks.lost_ranks import FIRST_LOOK_SECONDS, DeathWatch

# The coordinator gives up at the timeout; the others learn of it a little later.
_GRACE_SECONDS = 2.0
# Open files besides a connection to each member.
_OTHER_FILES = 200
# The error text about a lost coordinator.
UNKNOWN_OUTCOME = (
    "its background writer has ended, or has not decided within {timeout:g} s: it is not known what became of the "
    "save. Remedy (FC404): look whether the checkpoint is there; a load or restore() takes it if it is"
)


class LostCoordinatorError(LostRankError):
    """An error of a lost coordinator: its writer died or is silent, so only the manifest shows the outcome."""


class _Link:
    """A connection between a member and the coordinator, with the messages that leave and arrive by it.

    Attributes:
        connection: The connection to the other end.
        position: The place of the other end in the group.
        moved: The time at which a byte has left or arrived last.
    """

    def __init__(self, connection: socket.socket, position: int) -> None:
        """Take the attributes."""
        self.connection, self.position, self.moved = connection, position, time.monotonic()
        self._leaving = SendQueue()
        self._arriving: IncomingMessage | None = None

    def enqueue(self, message: Sequence[memoryview]) -> None:
        """Append a message, to leave after the others."""
        self._leaving.add(message)

    def send(self) -> bool:
        """Send as much as the connection accepts now; return whether nothing is left to send."""
        try:
            while not self._leaving.is_done:
                self._leaving.send(self.connection)
                self.moved = time.monotonic()
        except BlockingIOError:
            return False
        except OSError:  # the other end receives nothing any more; its earlier messages can still be read
            self._leaving = SendQueue()
        return True

    def receive(self, exchange: int) -> IncomingMessage | None:
        """Return a message of an exchange, or the last message, once it has arrived as a whole; None before.

        Raises:
            EOFError: The other end has died.
            OSError: The connection broke, or another message came.
        """
        arriving = self._arriving = self._arriving or IncomingMessage([exchange, FAREWELL], PAYLOADS)
        with contextlib.suppress(BlockingIOError):
            arriving.receive(self.connection)
            self.moved = time.monotonic()
        if not arriving.is_done:
            return None
        self._arriving = None
        return arriving


class _Patience:
    """A wait of so many seconds, again and again as long as bytes move: a link that moves none in one is silent."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.renew()

    def renew(self) -> None:
        """Begin to wait, or begin again."""
        self._begin = time.monotonic()

    @property
    def left(self) -> float:
        """Return the seconds that are left."""
        return max(0.0, self._begin + self._seconds - time.monotonic())

    def is_silent(self, link: _Link | None) -> bool:
        """Return whether no byte has moved since the wait began; ``link`` is None if there is no connection."""
        return link is None or link.moved <= self._begin


class WriterGroup(Communicator):
    """A connection of the writers of all ranks for one save: notes go to all members, payloads to the coordinator."""

    def __init__(
        self,
        listener: GroupListener,
        addresses: Sequence[str],
        token: bytes,
        ranks: Sequence[int],
        position: int,
        coordinator: int,
        timeout: float,
    ) -> None:
        """Join the group: a member connects to the coordinator, or raises in its first exchange that it cannot."""
        super().__init__(tuple(ranks), position)
        self._listener, self._addresses, self._token = listener, addresses, token
        self._coordinator, self._timeout = coordinator, timeout
        self._exchanges = 0
        self._lost: LostRankError | None = None
        self._links: dict[int, _Link] = {}
        if position == coordinator:
            _allow_open_files(self.size + _OTHER_FILES)
        else:
            with contextlib.suppress(LostCoordinatorError):
                self._links[coordinator] = _Link(self._connect(), coordinator)

    @property
    def _leads(self) -> bool:
        return self.position == self._coordinator

    def close(self, outcome: bytes = b"") -> None:
        """Leave the group. The ``outcome`` is sent to all who ask this member for it."""
        self._listener.end(self._token, outcome, str(self._lost or ""))
        for link in self._links.values():
            hang_up(link.connection)
        self._links = {}
        self._lost = self._lost or LostRankError("this group of writers is closed")

    def lead(self, leader: int, work: Callable[[], object], context: str = "") -> None:
        """Run ``work`` on the coordinator, as the base class does; other members may have died by then."""
        if leader != self._coordinator:
            raise ValueError("the coordinator alone leads a group of writers")
        self._begin_exchange()
        error: Exception | None = None
        notes: dict[int, bytes] = {}
        if self._leads:
            try:
                work()
            except Exception as failure:
                error, notes = failure, {leader: encode_failure(failure, context)}
            self._answer(notes)
        else:
            # The coordinator works now. Members wait for it as long as for the shares of others.
            notes, _ = self._receive_answer()
        raise_failures(self.ranks, notes.items(), error)

    def check_awaited(self) -> None:
        """Raise LostRankError if a member has given up on this coordinator; it sends nothing else during a commit."""
        for link in self._links.values():
            with contextlib.suppress(OSError):  # it waits, or has died after its share
                if link.connection.recv(1):
                    raise LostRankError(UNKNOWN_OUTCOME.format(timeout=self._timeout))

    def abort(self, problem: str) -> LostRankError:
        """End the save on all members, wherever they are; return the error that their exchanges raise."""
        try:
            self._begin_exchange()
            text = f"[rank {self.rank}] {problem}"
            if self._leads:
                return self._give_up(text)
            self._links[self._coordinator].enqueue(encode(FAREWELL, [text.encode(), b""]))
            self._receive_answer()
        except LostRankError as error:
            return error
        raise RuntimeError("an exchange went on after its end")

    def _all_gather(self, payload: bytes) -> list[bytes]:
        notes, _ = self._all_to_all(payload, {})
        return [notes.get(position, b"") for position in range(self.size)]

    def _all_to_all(self, note: bytes, payloads: Mapping[int, bytes]) -> tuple[dict[int, bytes], dict[int, bytes]]:
        if not self._leads and not payloads.keys() <= {self._coordinator}:
            raise ValueError("members of a group of writers send to the coordinator alone")
        self._begin_exchange()
        # A payload of no bytes counts as none.
        own = note, payloads.get(self._coordinator, b"")
        if not self._leads:
            self._links[self._coordinator].enqueue(encode(self._exchanges, own))
            return self._receive_answer()
        messages = sorted([(self.position, own), *self._collect().items()])
        notes = {position: each for position, (each, _) in messages if each}
        self._answer(notes, payloads)
        return notes, {position: payload for position, (_, payload) in messages if payload}

    def _begin_exchange(self) -> None:
        if self._lost is not None:
            raise type(self._lost)(str(self._lost))
        self._exchanges += 1

    # -- the coordinator -----------------------------------------------------------------------------------------------

    def _collect(self) -> dict[int, tuple[bytes, bytes]]:
        """Return the message of each other member, by position."""
        messages: dict[int, tuple[bytes, bytes]] = {}
        others = {*range(self.size)} - {self.position}
        absent, watch = others - self._links.keys(), DeathWatch(self._addresses)
        try:
            for link in self._links.values():
                self._invite(link)
                self._listener.selector.register(link.connection, selectors.EVENT_READ, link)
            patience = _Patience(self._timeout)
            while len(messages) < len(others):
                self._admit(absent)
                left, dead = patience.left, watch.look(absent)
                if dead or not left:
                    # A member that had connected before is still admitted.
                    self._listener.serve()
                    self._admit(absent)
                dead = [position for position in dead if position in absent]
                if dead:
                    raise self._give_up(self._problems(dead, _gone()))
                ready = self._listener.select(min(left, FIRST_LOOK_SECONDS) if absent else left)
                if not ready and not left:
                    missing = sorted(others - messages.keys())
                    silent = [each for each in missing if patience.is_silent(self._links.get(each))]
                    if silent:
                        raise self._give_up(self._problems(silent, _slow(self._timeout)))
                    for link in self._links.values():
                        self._invite(link)
                    patience.renew()
                for link in ready:
                    try:
                        message = link.receive(self._exchanges)
                    except (OSError, EOFError) as error:
                        raise self._give_up(self._problems([link.position], _gone(error))) from error
                    if message is None:
                        continue
                    first, second = map(bytes, message.payloads)
                    if message.exchange == FAREWELL:
                        raise self._give_up(first.decode())
                    messages[link.position] = first, second
                    # If it dies now, it has done its share.
                    self._listener.selector.unregister(link.connection)
        finally:
            for position in self._links.keys() - messages.keys():
                self._listener.selector.unregister(self._links[position].connection)
        return messages

    def _admit(self, absent: set[int]) -> None:
        """Connect the members that have come; they are no longer absent."""
        for position, connection in self._listener.take(self._token):
            if position not in absent:
                connection.close()  # it is not absent, or has come already
                continue
            absent.discard(position)
            with contextlib.suppress(OSError):  # it has died, which is found out soon
                prepare(connection)
            self._links[position] = link = _Link(connection, position)
            self._invite(link)
            self._listener.selector.register(link.connection, selectors.EVENT_READ, link)

    def _invite(self, link: _Link) -> None:
        """Inform a member, by an empty message, that the coordinator waits in this exchange: its time begins anew."""
        link.enqueue(encode(self._exchanges, [b"", b""]))
        link.send()

    def _answer(self, notes: Mapping[int, bytes], payloads: Mapping[int, bytes] = MappingProxyType({})) -> None:
        """Send notes to all connected members, and payloads to some. They wait as long as for the shares of others."""
        self._send_to_all(self._exchanges, join(pack_by_position(notes)), self._timeout / 2, payloads)

    def _give_up(self, text: str) -> LostRankError:
        """Return the error that ends the save, after informing all others."""
        self._lost = LostRankError(text)
        self._send_to_all(FAREWELL, text.encode(), _GRACE_SECONDS)
        return self._lost

    def _send_to_all(
        self, exchange: int, note: bytes, seconds: float, payloads: Mapping[int, bytes] = MappingProxyType({})
    ) -> None:
        """Send a note to all connected members, and payloads to those that have one, by position.

        A member that takes no byte for so long, or twice that, is cut off.
        """
        message = encode(exchange, [note, b""])
        with selectors.DefaultSelector() as waiting:
            for link in self._links.values():
                own = payloads.get(link.position)
                link.enqueue(message if own is None else encode(exchange, [note, own]))
                if not link.send():
                    waiting.register(link.connection, selectors.EVENT_WRITE, link)
            patience = _Patience(seconds)
            while waiting.get_map():
                for key, _ in waiting.select(patience.left):
                    if key.data.send():
                        waiting.unregister(key.fileobj)
                if patience.left:
                    continue
                for key in [key for key in waiting.get_map().values() if patience.is_silent(key.data)]:
                    # This ends the connection for the other end too; it is read to its end later.
                    with contextlib.suppress(OSError):
                        key.data.connection.shutdown(socket.SHUT_RDWR)
                    waiting.unregister(key.fileobj)
                patience.renew()

    # -- a member ------------------------------------------------------------------------------------------------------

    def _connect(self) -> socket.socket:
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                left = max(FIRST_LOOK_SECONDS, deadline - time.monotonic())
                return greet(self._addresses[self._coordinator], self._token, self.position, left)
            except OSError as error:  # its process has ended; or its host does not answer, which may pass
                if isinstance(error, ConnectionError) or time.monotonic() >= deadline:
                    raise self._lose_coordinator() from error
            time.sleep(FIRST_LOOK_SECONDS)

    def _receive_answer(self) -> tuple[dict[int, bytes], dict[int, bytes]]:
        """Send the waiting messages; return the notes of this exchange and the coordinator's payload, by position."""
        link, selector = self._links[self._coordinator], self._listener.selector
        link.moved = time.monotonic()
        selector.register(link.connection, selectors.EVENT_READ | selectors.EVENT_WRITE, link)
        try:
            while True:
                # As long as bytes move, the coordinator is there: its own timeout begins with each of them.
                left = link.moved + self._timeout + _GRACE_SECONDS - time.monotonic()
                if not self._listener.select(left):
                    if left <= 0:
                        lost = self._lose_coordinator()
                        link.enqueue(encode(FAREWELL, [str(lost).encode(), b""]))
                        link.send()
                        time.sleep(_GRACE_SECONDS)  # a commit that had begun before is seen then
                        raise lost
                    continue
                if link.send():
                    selector.modify(link.connection, selectors.EVENT_READ, link)
                try:
                    message = link.receive(self._exchanges)
                except (OSError, EOFError) as error:
                    raise self._lose_coordinator() from error
                if message is None:
                    continue
                note, payload = map(bytes, message.payloads)
                if message.exchange == FAREWELL:
                    self._lost = LostRankError(note.decode())
                    raise self._lost
                if note:
                    return unpack_by_position(split(note)), {self._coordinator: payload} if payload else {}
        finally:
            selector.unregister(link.connection)

    def _lose_coordinator(self) -> LostCoordinatorError:
        problem = UNKNOWN_OUTCOME.format(timeout=self._timeout)
        self._lost = LostCoordinatorError(self._problems([self._coordinator], problem))
        return self._lost

    def _problems(self, positions: Sequence[int], problem: str) -> str:
        failure = Failure(LostRankError.__name__, (problem,))
        return "; ".join(combine([(self.ranks[position], failure) for position in positions]).problems)


def _gone(error: Exception | None = None) -> str:
    is_broken = isinstance(error, OSError) and not isinstance(error, ConnectionError)
    how = f"the connection to it broke ({error})" if is_broken else "its processes have ended"
    return (
        f"{how} before it had done its share of the save. Remedy (FC501): look into its log (killed? out of memory?), "
        "and save again"
    )


def _slow(timeout: float) -> str:
    return (
        f"has written nothing within {timeout:g} s after others had written: its processes have ended, or it is slower "
        "than that. Remedy (FC501): look into the log of that rank, or give the BackgroundWriter a longer timeout"
    )


def _allow_open_files(count: int) -> None:
    """Raise this process's limit for open files, as far as allowed, if it is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

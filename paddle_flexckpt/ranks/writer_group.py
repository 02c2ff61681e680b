"""The group of the writers that make one save: each member has a connection to the coordinator's writer, in a star.

A member sends what it has to tell, and gets what is for it. The coordinator waits for all, and tells all. A connection
that ends means that the process at its other end has died. If the coordinator gives a member up, all get the same
text. A member that loses the coordinator does not know what became of the save.
"""

from __future__ import annotations

import contextlib
import itertools
import resource
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from paddle_flexckpt.catalog import LostRankError
from paddle_flexckpt.catalog.errors import Failure, combine
from paddle_flexckpt.forks import close_in_forks
from paddle_flexckpt.ranks.communicator import Communicator, failed, raise_failures
from paddle_flexckpt.ranks.framing import Arriving, Leaving
from paddle_flexckpt.ranks.group_listener import FAREWELL, GroupListener, greet
from paddle_flexckpt.ranks.meeting import prepare
from paddle_flexckpt.ranks.presence import FIRST_LOOK_SECONDS, DeathWatch

# The coordinator gives up at the timeout; the others hear of that a little later.
_GRACE_SECONDS = 2.0
# Besides a connection to each member.
_OTHER_FILES = 200


class LostCoordinatorError(LostRankError):
    """Tell that the coordinator's writer has gone or is silent: whether the save is committed, its manifest tells."""


class _Link:
    """Connect a member and the coordinator: messages leave one after the other, and arrive so."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._leaving: deque[Leaving] = deque()
        self._arriving = Arriving()

    def say(self, exchange: int, payloads: Sequence[bytes]) -> None:
        """Have a message leave after the others."""
        self._leaving.append(Leaving(exchange, payloads))

    def send(self) -> bool:
        """Send what the connection takes now; return whether nothing is left to send."""
        try:
            while self._leaving:
                self._leaving[0].send(self.connection)
                if self._leaving[0].is_done:
                    self._leaving.popleft()
        except BlockingIOError:
            return False
        except OSError:  # nobody takes it; what the other end has said before can still be read
            self._leaving.clear()
        return True

    def receive(self, exchange: int) -> Arriving | None:
        """Return a message of an exchange once it has come as a whole.

        Raises:
            EOFError: The other end has gone.
            OSError: The connection broke.
        """
        arriving = self._arriving
        with contextlib.suppress(BlockingIOError):
            arriving.receive(self.connection)
        if not arriving.is_done:
            return None
        if arriving.exchange not in (exchange, FAREWELL):
            raise OSError(f"ranks are out of step: expected exchange {exchange}, got {arriving.exchange}")
        self._arriving = Arriving()
        return arriving

    def cut(self) -> None:
        """End the connection for the other end too; it is read to its end later."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        # What is not read would have the system discard what has been sent.
        with contextlib.suppress(OSError):
            while self.connection.recv(1 << 20):
                pass
        self.connection.close()


class WriterGroup(Communicator):
    """Connect the writers of all ranks for one save."""

    def __init__(
        self,
        listener: GroupListener | None,
        addresses: Sequence[str],
        token: bytes,
        ranks: Sequence[int],
        position: int,
        coordinator: int,
        timeout: float,
    ) -> None:
        """Join the group: a member connects to the coordinator.

        Args:
            listener: That of this process. The coordinator needs one.
            addresses: Where the members' processes listen, "host:port", in the group's order.
            token: That of the save, 16 bytes.
            ranks: Global ranks of the members, in the group's order.
            position: This rank's place among them.
            coordinator: The coordinator's place.
            timeout: Seconds to wait for others.

        A member that cannot reach the coordinator raises that in its first exchange.
        """
        super().__init__(tuple(ranks), position)
        self._addresses, self._token, self._coordinator, self._timeout = addresses, token, coordinator, timeout
        self._exchanges = 0
        self._lost: LostRankError | None = None
        self._links: dict[int, _Link] = {}
        self._listener = listener if position == coordinator else None
        if self._listener is not None:
            self._rung, self._ring = map(close_in_forks, socket.socketpair())
            self._rung.setblocking(False)
            self._ring.setblocking(False)
            _allow_open_files(self.size + _OTHER_FILES)
            self._listener.begin(token, self._ring)
        elif position == coordinator:
            raise ValueError("the coordinator of a group of writers needs a GroupListener")
        else:
            with contextlib.suppress(LostCoordinatorError):
                self._links[coordinator] = _Link(self._connect())

    def close(self, outcome: bytes = b"") -> None:
        """Leave the group. On the coordinator ``outcome`` is for all who ask what became of the save."""
        if self._listener is not None:
            self._listener.finish(self._token, outcome, str(self._lost or "").encode())
            self._rung.close()
            self._ring.close()
        for link in self._links.values():
            link.close()
        self._links, self._listener = {}, None
        self._lost = self._lost or LostRankError("this group of writers is closed")

    def lead(self, leader: int, work: Callable[[], object], context: str = "") -> None:
        """Take a step on the coordinator, as the base class does; members that were there may have gone by then."""
        if self.size == 1:
            return super().lead(leader, work, context)
        if leader != self._coordinator:
            raise ValueError("the coordinator alone leads a group of writers")
        self._begin_exchange()
        error: Exception | None = None
        if self._listener is None:
            (note,) = self._await(self._links[self._coordinator])
        else:
            try:
                work()
            except Exception as failure:
                error = failure
            note = memoryview(b"" if error is None else failed(error, context))
            for link in self._links.values():
                link.say(self._exchanges, [bytes(note)])
            self._send_all(_GRACE_SECONDS)
        raise_failures(self.ranks, [(leader, bytes(note))], error)

    def abort(self, problem: str) -> LostRankError:
        """End the save on all members, wherever they are; return the error that their exchanges raise."""
        try:
            self._begin_exchange()
            text = f"[rank {self.rank}] {problem}"
            if self._listener is not None:
                return self._give_up(text)
            link = self._links[self._coordinator]
            link.say(FAREWELL, [text.encode()])
            self._await(link)
        except LostRankError as error:
            return error
        raise RuntimeError("an exchange went on after its end")

    def _begin_exchange(self) -> None:
        if self._lost is not None:
            raise type(self._lost)(str(self._lost))
        self._exchanges += 1

    def _all_gather(self, payload: bytes) -> list[bytes]:
        return self._exchange(payload, {})[0]

    def _all_to_all(self, note: bytes, payloads: Mapping[int, bytes]) -> tuple[dict[int, bytes], dict[int, bytes]]:
        notes, received = self._exchange(note, payloads)
        return {position: each for position, each in enumerate(notes) if each}, received

    def _exchange(self, note: bytes, payloads: Mapping[int, bytes]) -> tuple[list[bytes], dict[int, bytes]]:
        """Return the notes of all, and what is for this member, by position in rising order."""
        self._begin_exchange()
        notes, received = (self._report if self._listener is None else self._collect)(note, payloads)
        return notes, dict(sorted(received.items()))

    # -- the coordinator -----------------------------------------------------------------------------------------------

    def _collect(self, note: bytes, payloads: Mapping[int, bytes]) -> tuple[list[bytes], dict[int, bytes]]:
        notes = [b""] * self.size
        notes[self.position] = note
        # By whom they are for, and by whom they are from.
        letters: dict[int, dict[int, bytes]] = {to: {self.position: payload} for to, payload in payloads.items()}
        for source, (receivers, told, *parts) in self._messages():
            notes[source] = bytes(told)
            for to, part in zip(np.frombuffer(receivers, dtype="<u4").tolist(), parts):
                letters.setdefault(to, {})[source] = bytes(part)
        # Most notes are the same: a note is sent once for all members in a row that have it.
        runs = [(len(list(same)), each) for each, same in itertools.groupby(notes)]
        counts, shared = _numbers([count for count, _ in runs]), [each for _, each in runs]
        for position, link in self._links.items():
            own = letters.get(position, {})
            link.say(self._exchanges, [counts, _numbers(own), *shared, *own.values()])
        self._send_all(self._timeout)
        return notes, letters.get(self.position, {})

    def _messages(self) -> Iterator[tuple[int, list[memoryview]]]:
        """Yield the position and the message of each other member.

        Raises:
            LostRankError: One has gone, or does not come; all others get that text.
        """
        deadline = time.monotonic() + self._timeout
        missing = {*range(self.size)} - {self.position}
        absent = {self.ranks[position]: position for position in sorted(missing - {*self._links})}
        watch = DeathWatch({rank: [self._addresses[position]] for rank, position in absent.items()})
        refused: dict[int, float] = {}
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._rung, selectors.EVENT_READ)
            for position in self._links:
                self._invite(waiting, position)
            while missing:
                left = deadline - time.monotonic()
                ready = waiting.select(max(0.0, min(left, FIRST_LOOK_SECONDS) if absent else left))
                for key, _ in ready:
                    position = key.data
                    if position is None:
                        for position in self._admit(absent):
                            self._invite(waiting, position)
                        continue
                    try:
                        message = self._links[position].receive(self._exchanges)
                    except (OSError, EOFError) as error:
                        raise self._give_up(self._problems({position: _gone(error)})) from error
                    if message is not None and message.exchange == FAREWELL:
                        raise self._give_up(bytes(message.payloads[0]).decode())
                    if message is not None:
                        # If it dies now, it has done its share.
                        waiting.unregister(key.fileobj)
                        missing.discard(position)
                        yield position, message.payloads
                now = time.monotonic()
                for rank in watch.look(absent):
                    refused.setdefault(rank, now)
                # One that has gone since it connected may not have been admitted yet.
                gone = [rank for rank, since in refused.items() if rank in absent and now - since > FIRST_LOOK_SECONDS]
                if gone:
                    raise self._give_up(self._problems({absent[rank]: _gone() for rank in gone}))
                if not ready and now >= deadline:
                    late = _slow("has written nothing", self._timeout)
                    raise self._give_up(self._problems(dict.fromkeys(sorted(missing), late)))

    def _admit(self, absent: dict[int, int]) -> Iterator[int]:
        """Connect the members that have come; yield their positions. They are no longer absent."""
        with contextlib.suppress(BlockingIOError):
            self._rung.recv(1024)
        for rank, connection in self._listener.take(self._token) if self._listener is not None else ():
            position = absent.pop(rank, None)
            if position is None:
                connection.close()  # a stranger
                continue
            with contextlib.suppress(OSError):  # it has gone, as it is found soon
                prepare(connection)
            self._links[position] = _Link(connection)
            yield position

    def _invite(self, waiting: selectors.BaseSelector, position: int) -> None:
        """Tell a member that the coordinator is there, and wait for its message."""
        link = self._links[position]
        link.say(self._exchanges, [])
        link.send()
        waiting.register(link.connection, selectors.EVENT_READ, position)

    def _send_all(self, patience: float) -> None:
        """Send what is to leave; a member that takes nothing for so long is cut off, and found to be lost later."""
        with selectors.DefaultSelector() as waiting:
            for link in self._links.values():
                if not link.send():
                    waiting.register(link.connection, selectors.EVENT_WRITE, link)
            while waiting.get_map():
                ready = waiting.select(patience)
                for key in [key for key, _ in ready] or [*waiting.get_map().values()]:
                    if not ready:
                        key.data.cut()
                    if key.data.send():
                        waiting.unregister(key.fileobj)

    def _problems(self, problems: Mapping[int, str]) -> str:
        return _lost_ranks([(self.ranks[position], problem) for position, problem in problems.items()])

    def _give_up(self, text: str) -> LostRankError:
        """Return the error that ends the save, after all others have been told."""
        self._lost = LostRankError(text)
        for link in self._links.values():
            link.say(FAREWELL, [str(self._lost).encode()])
        self._send_all(_GRACE_SECONDS)
        return self._lost

    # -- a member ------------------------------------------------------------------------------------------------------

    def _connect(self) -> socket.socket:
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                left = max(FIRST_LOOK_SECONDS, deadline - time.monotonic())
                return greet(self._addresses[self._coordinator], self._token, self.rank, False, left)
            except ConnectionError as error:
                raise self._lose_coordinator(_unknown(error)) from error
            except OSError as error:  # its host does not answer, which may pass
                if time.monotonic() >= deadline:
                    raise self._lose_coordinator(_slow("has not decided about the save", self._timeout)) from error
            time.sleep(FIRST_LOOK_SECONDS)

    def _report(self, note: bytes, payloads: Mapping[int, bytes]) -> tuple[list[bytes], dict[int, bytes]]:
        link = self._links[self._coordinator]
        others = {to: payload for to, payload in payloads.items() if to != self.position}
        link.say(self._exchanges, [_numbers(others), note, *others.values()])
        head, given, *rest = self._await(link)
        counts, sources = (np.frombuffer(each, dtype="<u4").tolist() for each in (head, given))
        notes = [each for count, same in zip(counts, rest) for each in [bytes(same)] * count]
        received = dict(zip(sources, map(bytes, rest[len(counts) :])))
        if self.position in payloads:
            received[self.position] = payloads[self.position]
        return notes, received

    def _await(self, link: _Link) -> list[memoryview]:
        """Send what is to leave, and return what the coordinator sends in this exchange."""
        patience = self._timeout + _GRACE_SECONDS
        deadline = time.monotonic() + patience
        with selectors.DefaultSelector() as waiting:
            waiting.register(link.connection, selectors.EVENT_READ | selectors.EVENT_WRITE)
            while True:
                ready = waiting.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise self._lose_coordinator(_slow("has not decided about the save", self._timeout))
                if ready[0][1] & selectors.EVENT_WRITE and link.send():
                    waiting.modify(link.connection, selectors.EVENT_READ)
                if not ready[0][1] & selectors.EVENT_READ:
                    continue
                try:
                    message = link.receive(self._exchanges)
                except (OSError, EOFError) as error:
                    raise self._lose_coordinator(_unknown(error)) from error
                if message is None:
                    continue
                if message.exchange == FAREWELL:
                    self._lost = LostRankError(bytes(message.payloads[0]).decode())
                    raise self._lost
                if message.payloads:
                    return message.payloads
                # The coordinator is there: its own patience begins now.
                deadline = time.monotonic() + patience

    def _lose_coordinator(self, problem: str) -> LostCoordinatorError:
        self._lost = LostCoordinatorError(self._problems({self._coordinator: problem}))
        return self._lost


def _numbers(values: Sequence[int] | Mapping[int, bytes]) -> bytes:
    return np.asarray([*values], dtype="<u4").tobytes()


def _lost_ranks(problems: Sequence[tuple[int, str]]) -> str:
    failures = [(rank, Failure(LostRankError.__name__, (problem,))) for rank, problem in problems]
    return "; ".join(combine(failures).problems)


def _gone(error: Exception | None = None) -> str:
    return (
        f"{_end(error)} before it had done its share of the save. Remedy: look into its log (killed? out of memory?), "
        "and save again"
    )


def _unknown(error: Exception) -> str:
    return (
        f"it is not known what became of the save: {_end(error)} before it had told the others. Remedy: look whether "
        "the checkpoint is there"
    )


def _end(error: Exception | None) -> str:
    is_broken = isinstance(error, OSError) and not isinstance(error, ConnectionError)
    return f"the connection to it broke ({error})" if is_broken else "its processes have ended"


def _slow(what: str, timeout: float) -> str:
    return (
        f"{what} within {timeout:g} s after others had written: its processes have ended, or it is slower than that. "
        "Remedy: look into the log of that rank, or give the BackgroundWriter a longer timeout"
    )


def _allow_open_files(count: int) -> None:
    """Raise the limit of this process for open files, as far as it may, if that is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

"""A writer's listening socket: whom it lets in, and what it tells those who ask."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from paddle_flexckpt.ranks import group_listener
from paddle_flexckpt.ranks.framing import IncomingMessage
from paddle_flexckpt.ranks.group_listener import GroupListener, ask_outcome, greet
from paddle_flexckpt.ranks.lost_ranks import address_of, open_presence, split_address

SECRET, TOKEN = bytes(range(100, 116)), bytes(range(16))
PATIENCE_SECONDS = 60.0


class Writer:
    """A writer process that is idle: a listener, and in :meth:`idle` a thread that serves it."""

    def __init__(self) -> None:
        self.socket = open_presence()
        self.address = address_of(self.socket, SECRET)
        self.listener = GroupListener(self.socket, SECRET)
        self._open = contextlib.ExitStack()

    @contextlib.contextmanager
    def idle(self) -> Iterator[None]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            waiting = threading.Thread(target=self.listener.await_readable, args=(theirs,))
            waiting.start()
            try:
                yield
            finally:
                ours.send(b"!")
                waiting.join(PATIENCE_SECONDS)
        assert not waiting.is_alive()

    def call(self, said: bytes) -> socket.socket:
        connection = self._open.enter_context(socket.create_connection(split_address(self.address)[0]))
        connection.settimeout(PATIENCE_SECONDS)
        connection.sendall(said)
        return connection

    def greet(self, token: bytes = TOKEN, place: int = 1, is_asking: bool = False) -> socket.socket:
        connection = self._open.enter_context(greet(self.address, token, -1 if is_asking else place, PATIENCE_SECONDS))
        connection.settimeout(PATIENCE_SECONDS)
        return connection

    def ask(self, token: bytes = TOKEN, timeout: float = PATIENCE_SECONDS) -> bytes | None:
        return ask_outcome(self.address, token, timeout)

    def close(self) -> None:
        self._open.close()
        self.listener.selector.close()
        self.socket.close()


@pytest.fixture
def writer() -> Iterator[Writer]:
    made = Writer()
    yield made
    made.close()


def heard(connection: socket.socket) -> bytes | None:
    """The text that comes last; None if there is none."""
    arriving = IncomingMessage([group_listener.FAREWELL], 2)
    try:
        while not arriving.is_done:
            arriving.receive(connection)
    except (EOFError, ConnectionResetError):
        return None
    return bytes(arriving.payloads[0])


def hello(secret: bytes = SECRET, token: bytes = TOKEN) -> bytes:
    return secret + token + (1).to_bytes(4, "little")


# -- who is let in -----------------------------------------------------------------------------------------------------


def test_an_address_has_the_secret_and_a_look_for_liveness_needs_none():
    with open_presence() as listener:
        host, port = listener.getsockname()
        assert split_address(address_of(listener)) == ((host, port), b"")
        assert split_address(address_of(listener, SECRET)) == ((host, port), SECRET)


@pytest.mark.parametrize(
    "said",
    [b"", b"flex", b"GET / HTTP/1.1\r\nHost: somebody else\r\n\r\n", hello(bytes(16)), hello(SECRET[:-1] + b"?")],
)
def test_strangers_are_let_go(writer, monkeypatch, said):
    """They say nothing, half of a greeting, something else, or that they are a member without knowing the secret."""
    monkeypatch.setattr(group_listener, "GREETING_SECONDS", 0.1)
    writer.listener.end(TOKEN, b"committed", "too late")
    with writer.idle():
        assert heard(writer.call(said)) is None
        assert heard(writer.call(hello())) == b"too late"
    assert not writer.listener._ungreeted and not writer.listener.take(TOKEN)
    assert len(writer.listener.selector.get_map()) == 1


def test_a_greeting_may_come_in_pieces_and_from_many_at_once(writer):
    pieces, others = writer.call(hello()[:20]), [writer.greet(place=place) for place in range(2, 200)]
    writer.listener.serve()
    assert [place for place, _ in writer.listener.take(TOKEN)] == list(range(2, 200))
    pieces.sendall(hello()[20:])
    writer.listener.serve()
    ((place, connection),) = writer.listener.take(TOKEN)
    assert place == 1 and connection.getpeername() == pieces.getsockname()
    assert others and not writer.listener.take(TOKEN)


@pytest.mark.parametrize("silent", [0, 3])
def test_the_listener_outlives_a_lack_of_files(writer, monkeypatch, silent):
    """The stranger that has been silent for longest makes room."""
    strangers = [writer.call(b"") for _ in range(silent)]
    writer.listener.serve()
    real, refusals = socket.socket.accept, [OSError(24, "Too many open files")]

    def accept(self: socket.socket) -> tuple[socket.socket, object]:
        if refusals:
            raise refusals.pop()
        return real(self)

    monkeypatch.setattr(socket.socket, "accept", accept)
    member = writer.greet()
    for each in strangers:
        each.sendall(b"flex")  # one that is let go has something to say just then
    for _ in range(3):
        writer.listener.select(0)
    assert not refusals
    assert [place for place, _ in writer.listener.take(TOKEN)] == [1] and member
    assert len(writer.listener._ungreeted) == max(0, silent - 1)
    if silent:
        assert heard(strangers[0]) is None


def test_one_turn_accepts_no_more_than_may_have_waited(writer, monkeypatch):
    """Somebody who connects without end does not keep the process from its work."""
    monkeypatch.setattr(group_listener, "BACKLOG", 5)
    for _ in range(8):
        writer.call(b"")
    writer.listener.select(0)
    assert len(writer.listener._ungreeted) == 5


# -- the outcome -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before the end", "unheard before the end", "after the end"])
@pytest.mark.parametrize("outcome", [b"", b"failed" * 500_000])
def test_those_who_ask_get_the_outcome(writer, when, outcome):
    """Who has asked before the end is answered with it: the process may end then."""
    if when == "after the end":
        writer.listener.end(TOKEN, outcome, "")
        with writer.idle():
            assert writer.ask() == outcome
        return
    asker, answers = writer.greet(is_asking=True), []
    if when == "before the end":
        writer.listener.serve()
    reading = threading.Thread(target=lambda: answers.append(heard(asker)))
    reading.start()
    writer.listener.end(TOKEN, outcome, "")
    reading.join(PATIENCE_SECONDS)
    assert answers == [outcome]


@pytest.mark.parametrize("loss", ["", "rank 3 has gone"])
def test_members_that_come_too_late_get_the_text_or_are_let_go(writer, loss):
    """One has sent its part already, which nobody reads."""
    member, late = writer.greet(place=1), writer.greet(place=2)
    member.sendall(bytes(100_000))
    writer.listener.end(TOKEN, b"failed", loss)
    assert heard(member) == heard(late) == (loss.encode() or None)


def test_the_outcome_does_not_change_when_it_is_set_again(writer):
    for outcome in (b"failed", b""):
        writer.listener.end(TOKEN, outcome, "")
    with writer.idle():
        assert writer.ask() == b"failed"


def test_who_takes_no_answer_keeps_nobody_waiting(writer, monkeypatch):
    monkeypatch.setattr(group_listener, "_ANSWER_SECONDS", 0.05)
    asker = writer.greet(is_asking=True)
    writer.listener.serve()
    writer.listener.end(TOKEN, bytes(64 << 20), "")
    with writer.idle():
        assert writer.ask(b"x" * 16, 0.01) is None
    assert heard(asker) is None


def test_who_asks_does_not_wait_for_ever(writer):
    assert writer.ask(timeout=0.1) is None
    writer.listener.serve()
    writer.socket.close()
    assert writer.ask() is None


def test_sixteen_saves_are_remembered(writer):
    """Also of those that never begin: who waits for the oldest of more is let go."""
    tokens = [bytes([number]) * 16 for number in range(20)]
    waiting = [writer.greet(token, is_asking=number % 2 == 0) for number, token in enumerate([*tokens, *tokens])]
    writer.listener.serve()
    assert len(writer.listener._greeted) == 20
    for token in tokens[:17]:
        writer.listener.end(token, token, "")
    with writer.idle():
        assert [writer.ask(token) for token in tokens[1:17]] == tokens[1:17]
        assert writer.ask(tokens[0], 0.01) is None
    more = [writer.greet(os.urandom(16), is_asking=number % 2 == 0) for number in range(40)]
    writer.listener.serve()
    assert len(writer.listener._greeted) == 2 * 16
    assert heard(more[0]) is heard(more[1]) is None and heard(waiting[18]) is heard(waiting[19]) is None

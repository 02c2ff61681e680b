"""Transports: the right bytes, or an error on every rank, soon, and nothing left behind."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.ranks import transport as transports
from paddle_flexckpt.ranks.transport import SocketTransport, _pack_host, _unpack_host, parse_address

STALL = 20.0
# More than the sockets on both ends of a connection hold: a sender has to wait for its receiver.
LARGE = 32 << 20


def stream_data(source: int, target: int, size: int) -> np.ndarray:
    return np.random.default_rng([source, target]).integers(0, 256, size, dtype=np.uint8)


class Members:
    """Threads that take part in one exchange, each with a transport of its own."""

    def __init__(self, ranks: tuple[int, ...], stall: float = STALL) -> None:
        self.ranks = ranks
        self.transports = [SocketTransport(ranks, position, stall) for position in range(len(ranks))]
        self.addresses = [transport.address() for transport in self.transports]
        self.outcomes: dict[int, BaseException | None] = {}
        self.seconds = 0.0

    def run(self, work: Callable[[int, SocketTransport], None], absent: tuple[int, ...] = ()) -> None:
        """Runs ``work(rank, transport)`` for all ranks but the absent ones; a transport is closed after all have ended.

        As in the library: what ended an exchange is agreed on by all ranks before transports are closed.
        """
        threads_before = set(threading.enumerate())

        def target(position: int) -> None:
            rank = self.ranks[position]
            try:
                work(rank, self.transports[position])
                self.outcomes[rank] = None
            except Exception as error:
                self.outcomes[rank] = error

        present = [p for p, rank in enumerate(self.ranks) if rank not in absent]
        threads = [threading.Thread(target=target, args=(position,), daemon=True) for position in present]
        begin = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        self.seconds = time.monotonic() - begin
        alive = [thread for thread in threading.enumerate() if thread not in threads_before]
        for transport in self.transports:
            transport.close()
        assert alive == [], "threads are left behind"
        assert len(self.outcomes) == len(present)

    def assert_all_failed(self, within: float) -> None:
        for rank, outcome in self.outcomes.items():
            assert isinstance(outcome, CheckpointError), (rank, outcome)
            assert f"rank {rank}: exchange of tensor data failed" in str(outcome)
        assert self.seconds < within


def chunks(data: np.ndarray, size: int) -> Iterator[np.ndarray]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def all_to_all(members: Members, size_of: Callable[[int, int], int | None]) -> dict[tuple[int, int], np.ndarray]:
    """Runs an exchange with a stream of ``size_of(source, target)`` bytes (None: no stream); what arrived."""
    arrived: dict[tuple[int, int], np.ndarray] = {}

    def work(rank: int, transport: SocketTransport) -> None:
        outgoing, incoming = {}, {}
        for other in members.ranks:
            if other == rank:
                continue
            if (size := size_of(rank, other)) is not None:
                outgoing[other] = chunks(stream_data(rank, other, size), 50_001)
            if (size := size_of(other, rank)) is not None:
                buffer = arrived[other, rank] = np.zeros(size, dtype=np.uint8)
                incoming[other] = chunks(buffer, 33_333)
        transport.exchange(members.addresses, outgoing, incoming)

    members.run(work)
    return arrived


@pytest.fixture(autouse=True, params=["memory", "network"])
def way(request, monkeypatch):
    """Between ranks of one machine, and of two."""
    if request.param == "network":
        monkeypatch.setattr(SocketTransport, "_reach_here", lambda *_: None)
    return request.param


def test_ranks_of_one_machine_share_memory(way):
    members = Members((0, 1))
    all_to_all(members, lambda source, target: 3 << 20)
    assert set(members.outcomes.values()) == {None}
    shared = [len(transport._shared) for transport in members.transports]
    assert shared == ([1, 1] if way == "memory" else [0, 0])


def test_a_rank_of_our_host_s_name_on_another_machine_is_reached_by_the_network():
    """Containers have networks of their own, and may have one name."""
    transport = SocketTransport((0, 1), 0, stall_seconds=1.0)
    assert transport._reach_here(b"flexckpt-nobody-has-this-name", 1.0) is None
    transport.close()


@pytest.mark.parametrize("ranks", [(0, 1), (3, 1, 7, 2), tuple(range(8))], ids=["two", "out of order", "eight"])
def test_everybody_gets_what_was_sent(ranks):
    members = Members(ranks)

    def size(source: int, target: int) -> int:
        return (source * 31 + target * 17) % 5 * 70_000 + source

    arrived = all_to_all(members, size)
    assert set(members.outcomes.values()) == {None}
    assert len(arrived) == len(ranks) * (len(ranks) - 1)
    for (source, target), data in arrived.items():
        assert (data == stream_data(source, target, size(source, target))).all()


def test_only_some_pairs_have_a_stream():
    members = Members((0, 1, 2, 3))
    arrived = all_to_all(members, lambda source, target: 1000 if (source, target) in ((0, 2), (2, 1)) else None)
    assert set(members.outcomes.values()) == {None}
    assert sorted(arrived) == [(0, 2), (2, 1)]
    assert all((data == stream_data(*pair, 1000)).all() for pair, data in arrived.items())


def test_streams_larger_than_the_sockets_buffers_do_not_wait_for_each_other():
    members = Members((0, 1, 2, 3))
    arrived = all_to_all(members, lambda source, target: LARGE // 4)
    assert set(members.outcomes.values()) == {None}
    assert all((data == stream_data(*pair, LARGE // 4)).all() for pair, data in arrived.items())


def test_a_member_without_any_stream_returns():
    members = Members((0, 1))
    members.run(lambda rank, transport: transport.exchange(members.addresses, {}, {}))
    assert set(members.outcomes.values()) == {None}


def connect(address: bytes) -> socket.socket:
    host, port, _ = parse_address(address)
    return socket.create_connection((host, port), timeout=STALL)


@pytest.mark.parametrize(
    "hello",
    [
        struct.pack("<16si", b"wrong token 1234", 0),
        b"GET / HTTP/1.1\r\n\r\n--",
        b"short",
        None,
        "closed",
    ],
    ids=["wrong token", "http", "too short", "silent", "closed at once"],
)
def test_strangers_are_ignored(hello):
    members = Members((0, 1, 2))
    with contextlib.ExitStack() as stack:
        for address in members.addresses:
            stranger = stack.enter_context(connect(address))
            if hello == "closed":
                stranger.close()
            elif hello is not None:
                stranger.sendall(hello)
        arrived = all_to_all(members, lambda source, target: 5000)
    assert set(members.outcomes.values()) == {None}, members.outcomes
    assert all((data == stream_data(*pair, 5000)).all() for pair, data in arrived.items())
    assert members.seconds < STALL


def test_a_member_that_is_not_expected_is_turned_away():
    members = Members((0, 1))
    with connect(members.addresses[1]) as stranger:
        stranger.sendall(struct.pack("<16si", members.addresses[1][:16], 5))
        arrived = all_to_all(members, lambda source, target: 5000)
        assert stranger.recv(1) == b""
    assert set(members.outcomes.values()) == {None}
    assert all((data == stream_data(*pair, 5000)).all() for pair, data in arrived.items())


def failing(data: np.ndarray, after: int) -> Iterator[np.ndarray]:
    yield data[:after]
    raise OSError(5, "the disk is on fire")


@pytest.mark.parametrize("size", [5000, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("count", [2, 4, 6])
@pytest.mark.parametrize("side", ["sending", "receiving"])
def test_a_member_that_fails_in_mid_stream_fails_all(size, count, side):
    ranks = tuple(range(count))
    members = Members(ranks, stall=120.0)
    buffers = {rank: np.zeros(size, dtype=np.uint8) for rank in ranks}

    def work(rank: int, transport: SocketTransport) -> None:
        others = [other for other in ranks if other != rank]
        data = np.zeros(size, dtype=np.uint8)
        outgoing = {other: chunks(data, 1 << 20) for other in others}
        incoming = {other: chunks(buffers[rank], 1 << 20) for other in others}
        if rank == 1:
            if side == "sending":
                outgoing = {other: failing(data, size // 2) for other in others}
            else:
                incoming = {other: failing(buffers[rank], size // 2) for other in others}
        transport.exchange(members.addresses, outgoing, incoming)

    members.run(work)
    # A receiver of small streams may have sent all it had before it failed: then only it knows, and agree() tells.
    if side == "receiving" and size < LARGE:
        assert isinstance(members.outcomes[1], CheckpointError)
        assert members.seconds < 60
    else:
        members.assert_all_failed(within=60)
    assert "the disk is on fire" in str(members.outcomes[1])


def test_the_cause_is_kept_before_the_connection_closes(monkeypatch):
    members = Members((0, 1))
    kept = []

    class Connection(socket.socket):
        def close(self) -> None:
            kept.append(str(members.transports[1]._failure))
            super().close()

    def work(rank: int, transport: SocketTransport) -> None:
        data = np.zeros(1000, dtype=np.uint8)
        outgoing = failing(data, 500) if rank == 1 else chunks(data, 100)
        if rank == 1:
            connect = transport._connect
            transport._connect = lambda address: Connection(fileno=connect(address).detach())
        transport.exchange(members.addresses, {1 - rank: outgoing}, {1 - rank: chunks(data.copy(), 100)})

    members.run(work)
    members.assert_all_failed(within=60)
    assert kept and "the disk is on fire" in kept[0]


def test_an_error_that_is_none_of_the_sockets_is_raised_as_it_is():
    members = Members((0, 1))

    def wrong() -> Iterator[np.ndarray]:
        yield np.zeros(10, dtype=np.uint8)
        raise ZeroDivisionError("mine")

    def work(rank: int, transport: SocketTransport) -> None:
        other = 1 - rank
        data = np.zeros(100, dtype=np.uint8)
        transport.exchange(members.addresses, {other: wrong() if rank else chunks(data, 10)}, {other: chunks(data, 10)})

    members.run(work)
    assert isinstance(members.outcomes[1], ZeroDivisionError)
    assert isinstance(members.outcomes[0], CheckpointError)
    assert "rank 0: exchange of tensor data failed" in str(members.outcomes[0])


@pytest.mark.parametrize("size", [5000, LARGE], ids=["small", "large"])
def test_a_member_that_never_comes_fails_all_after_the_patience(size):
    members = Members((0, 1, 2), stall=0.5)

    def work(rank: int, transport: SocketTransport) -> None:
        data, others = np.zeros(size, dtype=np.uint8), [other for other in (0, 1, 2) if other != rank]
        transport.exchange(
            members.addresses,
            {other: chunks(data, 1 << 20) for other in others},
            {other: chunks(np.zeros(size, dtype=np.uint8), 1 << 20) for other in others},
        )

    members.run(work, absent=(2,))
    members.assert_all_failed(within=60)


def test_a_member_that_is_gone_fails_all_at_once():
    members = Members((0, 1, 2), stall=120.0)
    members.transports[2].close()

    def work(rank: int, transport: SocketTransport) -> None:
        data, others = np.zeros(LARGE, dtype=np.uint8), [other for other in (0, 1, 2) if other != rank]
        transport.exchange(
            members.addresses,
            {other: chunks(data, 1 << 20) for other in others},
            {other: chunks(np.zeros(LARGE, dtype=np.uint8), 1 << 20) for other in others},
        )

    members.run(work, absent=(2,))
    members.assert_all_failed(within=60)


def test_a_member_that_goes_before_it_connects_is_noticed_long_before_the_patience_ends():
    members = Members((0, 1), stall=600.0)
    members.transports[1].close()  # all that is left of it: a rank sends to it nothing, and waits for it

    def work(rank: int, transport: SocketTransport) -> None:
        transport.exchange(members.addresses, {}, {1: chunks(np.zeros(10, dtype=np.uint8), 10)})

    members.run(work, absent=(1,))
    members.assert_all_failed(within=60)
    assert "rank 1 has gone" in str(members.outcomes[0])


def test_a_member_that_is_late_is_waited_for_although_it_is_looked_for(monkeypatch):
    monkeypatch.setattr(transports, "FIRST_CHECK_SECONDS", 0.01)
    members, looked = Members((0, 1), stall=60.0), threading.Semaphore(0)
    look = SocketTransport._is_gone

    def is_gone(self, address):
        found = look(self, address)
        looked.release()
        return found

    monkeypatch.setattr(SocketTransport, "_is_gone", is_gone)
    received = np.zeros(10, dtype=np.uint8)

    def work(rank: int, transport: SocketTransport) -> None:
        if rank == 1:
            for _ in range(3):
                assert looked.acquire(timeout=60)
        data = np.arange(10, dtype=np.uint8)
        # Each sends: what looks for the late one meets its listener, and is no member's connection.
        incoming = chunks(received, 10) if rank == 0 else chunks(np.zeros(10, dtype=np.uint8), 10)
        transport.exchange(members.addresses, {1 - rank: chunks(data, 10)}, {1 - rank: incoming})

    members.run(work)
    assert members.outcomes == {0: None, 1: None}
    assert received.tolist() == list(range(10))


def test_exchange_before_address_is_an_error():
    transport = SocketTransport((0, 1), 0, stall_seconds=1.0)
    with pytest.raises(CheckpointError, match="address\\(\\) was not called"):
        transport.exchange([b"", b""], {}, {1: iter(())})
    transport.close()


def test_rounds_go_in_order_and_a_rank_may_have_more_of_them_than_another():
    """A rank sends to all in each round, so that what it holds of a round can go: more than sockets hold altogether."""
    members, size = Members((0, 1, 2)), LARGE // 8
    counts = {0: 7, 1: 1, 2: 3}
    arrived: dict[tuple[int, int, int], np.ndarray] = {}
    order: dict[int, list[tuple[int, int]]] = {rank: [] for rank in members.ranks}

    def sending(rank: int, others: list[int]) -> Iterator[dict[int, Iterator[np.ndarray]]]:
        for number in range(counts[rank]):
            data = stream_data(rank, number, size)
            order[rank].append((number, len(order[rank])))
            yield {other: chunks(data, 1 << 20) for other in others}

    def receiving(rank: int, others: list[int]) -> Iterator[dict[int, Iterator[np.ndarray]]]:
        for number in range(max(counts[other] for other in others)):
            streams = {}
            for other in others:
                if number < counts[other]:
                    buffer = arrived[rank, other, number] = np.zeros(size, dtype=np.uint8)
                    streams[other] = chunks(buffer, 77_777)
            yield streams

    def work(rank: int, transport: SocketTransport) -> None:
        others = [other for other in members.ranks if other != rank]
        transport.exchange_rounds(members.addresses, (others, others), sending(rank, others), receiving(rank, others))

    members.run(work)
    assert set(members.outcomes.values()) == {None}
    assert len(arrived) == 2 * sum(counts.values())
    for (_, source, number), data in arrived.items():
        assert (data == stream_data(source, number, size)).all()


@pytest.mark.parametrize("side", ["sending", "receiving"])
def test_a_failure_in_a_later_round_stops_what_waits_for_rounds(side):
    members, stopped = Members((0, 1), stall=120.0), {0: threading.Event(), 1: threading.Event()}

    def rounds(rank: int, role: str) -> Iterator[dict[int, Iterator[np.ndarray]]]:
        data = np.zeros(1000, dtype=np.uint8)
        yield {1 - rank: chunks(data, 100)}
        if rank == 1 and role == side:
            raise OSError(5, "the disk is on fire")
        # The next round comes when something is read that never will be.
        assert stopped[rank].wait(60)
        raise RuntimeError("stopped")

    def work(rank: int, transport: SocketTransport) -> None:
        transport.exchange_rounds(
            members.addresses,
            ([1 - rank], [1 - rank]),
            rounds(rank, "sending"),
            rounds(rank, "receiving"),
            stopped[rank].set,
        )

    timer = threading.Timer(5, stopped[0].set)  # nobody tells rank 0: it is in no read
    timer.start()
    members.run(work)
    timer.cancel()
    assert isinstance(members.outcomes[1], CheckpointError)
    assert "the disk is on fire" in str(members.outcomes[1])
    assert isinstance(members.outcomes[0], (CheckpointError, RuntimeError))


@pytest.mark.parametrize(("host", "most"), [("10.123.145.167", 32), ("node-17.cluster.internal", 51), ("::1", 30)])
def test_an_address_is_short_and_is_read_back(host, most):
    packed = _pack_host(host)
    assert _unpack_host(packed) == host
    assert 16 + 3 + 8 + len(packed) <= most

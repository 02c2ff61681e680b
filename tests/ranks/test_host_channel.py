"""Host channels: every payload to every rank, or an error on every rank, soon, that says who is to blame."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_flexckpt.catalog import LostRankError
from paddle_flexckpt.ranks import group_listener, host_channel, lost_ranks
from paddle_flexckpt.ranks.host_channel import HostChannel
from paddle_flexckpt.ranks.lost_ranks import announce, split_address
from tests.remedies.following import advised

# More than the sockets at both ends of a connection hold: a sender has to wait for its receiver.
LARGE = 16 << 20
SIZES = [1, 2, 3, 4, 5, 7, 8]


class Store:
    """A key-value store in a file, for threads and processes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.write_text("{}")

    @contextlib.contextmanager
    def _values(self) -> Iterator[dict[str, Any]]:
        with self.path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            values = json.load(file)
            yield values
            file.seek(0)
            file.truncate()
            json.dump(values, file)

    def add(self, key: str, value: int) -> int:
        with self._values() as values:
            values[key] = values.get(key, 0) + value
            return values[key]

    def set(self, key: str, value: str) -> None:
        with self._values() as values:
            values[key] = value

    def get(self, key: str) -> bytes:
        with self._values() as values:
            return values[key].encode()


class Ranks:
    """Threads that are the ranks of a group, each with a channel of its own."""

    def __init__(self, store: Store, ranks: tuple[int, ...], name: str = "g", **options: Any) -> None:
        self.ranks = ranks
        self.channels = [HostChannel(store, name, ranks, position, **options) for position in range(len(ranks))]
        for rank in ranks:
            announce(store, rank)

    def lose_patience(self) -> None:
        """From now on a rank is given up soon."""
        for channel in self.channels:
            channel._patience = 0.5

    def run(self, work: Callable[[HostChannel], Any], absent: tuple[int, ...] = ()) -> dict[int, Any]:
        """``work(channel)`` on all ranks but the absent ones: its result, or its exception, by rank."""
        outcomes: dict[int, Any] = {}

        def target(channel: HostChannel) -> None:
            try:
                outcomes[channel.rank] = work(channel)
            except BaseException as error:
                outcomes[channel.rank] = error

        threads = [
            threading.Thread(target=target, args=(channel,), daemon=True)
            for channel in self.channels
            if channel.rank not in absent
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        assert not any(thread.is_alive() for thread in threads)
        return outcomes

    def close(self) -> None:
        for channel in self.channels:
            channel.close()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store.json")


@pytest.fixture
def ranks(store: Store) -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(members: int | tuple[int, ...], name: str = "g", **options: Any) -> Ranks:
        members = tuple(range(members)) if isinstance(members, int) else members
        made.append(Ranks(store, members, name, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is far away or slow."""
    monkeypatch.setattr(lost_ranks, "SPREAD_SECONDS", 1.5)
    monkeypatch.setattr(lost_ranks, "FAREWELL_SECONDS", 0.0)


def payload(rank: int, size: int) -> bytes:
    return np.random.default_rng(rank).bytes(size)


# -- the right bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_gets_every_payload_in_the_groups_order(ranks, size):
    def work(channel):
        return [channel.all_gather(payload(channel.rank, 1000 * channel.rank % 3001 + k)) for k in range(3)]

    outcomes = ranks(size).run(work)
    expected = [[payload(rank, 1000 * rank % 3001 + k) for rank in range(size)] for k in range(3)]
    assert outcomes == {rank: expected for rank in range(size)}


@pytest.mark.parametrize("members", [(3, 1, 7), (5, 2, 4, 9, 0)])
def test_a_groups_ranks_need_not_be_in_order(ranks, members):
    outcomes = ranks(members).run(lambda channel: channel.all_gather(b"%d" % channel.rank))
    assert outcomes == {rank: [b"%d" % other for other in members] for rank in members}


@pytest.mark.parametrize("size", SIZES)
def test_payloads_of_no_bytes(ranks, size):
    def work(channel):
        return [
            channel.all_gather(b""),
            channel.all_gather(b"x" if channel.rank == 0 else b""),
            channel.all_gather(b""),
        ]

    outcomes = ranks(size).run(work)
    nothing = [b""] * size
    assert outcomes == {rank: [nothing, [b"x", *nothing[1:]], nothing] for rank in range(size)}


@pytest.mark.parametrize("size", [2, 3, 5])
def test_payloads_larger_than_the_sockets_buffers_do_not_wait_for_each_other(ranks, size):
    outcomes = ranks(size).run(lambda channel: channel.all_gather(payload(channel.rank, LARGE + channel.rank)))
    expected = [payload(rank, LARGE + rank) for rank in range(size)]
    assert all(outcomes[rank] == expected for rank in range(size))


def test_one_rank_has_much_to_say_and_the_others_nothing(ranks):
    outcomes = ranks(3).run(lambda channel: channel.all_gather(payload(1, 200 << 20) if channel.rank == 1 else b""))
    expected = [b"", payload(1, 200 << 20), b""]
    assert all(outcomes[rank] == expected for rank in range(3))


def test_what_is_returned_is_bytes(ranks):
    outcomes = ranks(3).run(lambda channel: channel.all_gather(b"x"))
    assert {type(each) for gathered in outcomes.values() for each in gathered} == {bytes}


def test_groups_do_not_mix(ranks):
    world, pair = ranks(4, "world"), ranks((1, 3), "pair")

    def work(channel):
        said = []
        for k in range(20):
            said.append(channel.all_gather(b"world %d %d" % (channel.rank, k)))
            if channel.rank in pair.ranks:
                own = pair.channels[pair.ranks.index(channel.rank)]
                said.append(own.all_gather(b"pair %d %d" % (channel.rank, k)))
        return said

    outcomes = world.run(work)
    for rank in range(4):
        expected = []
        for k in range(20):
            expected.append([b"world %d %d" % (other, k) for other in range(4)])
            if rank in (1, 3):
                expected.append([b"pair %d %d" % (other, k) for other in (1, 3)])
        assert outcomes[rank] == expected


@pytest.mark.parametrize("size", SIZES)
def test_each_payload_leaves_and_reaches_a_rank_once_in_few_messages(ranks, size):
    group = ranks(size)
    group.run(lambda channel: [channel.all_gather(bytes(1000)) for _ in range(3)])
    assert [channel.bytes_sent for channel in group.channels] == [3 * 1000 * (size - 1)] * size
    assert [channel.messages for channel in group.channels] == [3 * math.ceil(math.log2(size))] * size


# -- to each its own ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [*SIZES, 13])
def test_every_rank_gets_what_is_for_it_and_all_notes(ranks, size):
    """Some say nothing to some, and the larger the rank the more it says; itself is among those it speaks to."""
    members = tuple(range(10, 10 + size))

    def word(source: int, target: int) -> bytes:
        return b"%d to %d," % (source, target) * (source * target % 5 * 3000)

    def work(channel: HostChannel) -> list[Any]:
        own = channel.position
        payloads = {target: word(own, target) for target in range(size) if (own + target) % 3}
        note = b"note of %d" % own if own % 3 == 1 else b""
        return [channel.all_to_all(note, payloads), channel.all_gather(b"%d" % own), channel.all_to_all(b"", {})]

    outcomes = ranks(members).run(work)
    notes = {source: b"note of %d" % source for source in range(1, size, 3)}
    for own, rank in enumerate(members):
        received = {source: word(source, own) for source in range(size) if (source + own) % 3}
        assert outcomes[rank] == [(notes, received), [b"%d" % source for source in range(size)], ({}, {})]
        assert [*outcomes[rank][0][1]] == sorted(received)


def test_what_is_for_one_rank_is_passed_on_by_few(ranks):
    group = ranks(8)
    group.run(lambda channel: channel.all_to_all(b"", {target: bytes(1000) for target in range(8)}))
    assert [channel.messages for channel in group.channels] == [3] * 8
    # Of 7 words 12 copies leave a rank, 1.5 for each on average; the others' too, and 16 bytes for each.
    assert [channel.bytes_sent for channel in group.channels] == [12 * 1016 + 3 * 2 * 8] * 8


def test_a_rank_that_dies_is_named_when_each_gets_its_own(ranks):
    group = ranks(4)
    group.run(lambda channel: channel.all_gather(b""))
    group.channels[2].close()
    outcomes = group.run(lambda channel: channel.all_to_all(b"", {0: b"x"}), absent=(2,))
    assert all(isinstance(outcomes[rank], LostRankError) for rank in (0, 1, 3))


# -- strangers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hello", [b"", b"short", b"GET / HTTP/1.1\r\n\r\n--", b"wrong secret 123" + bytes(16) + b"\1\0\0\0", "rank"]
)
def test_strangers_are_let_go(ranks, store, hello):
    group = ranks(2)
    with contextlib.ExitStack() as stack:
        calling = threading.Event()

        def stranger() -> None:
            while store.add("flexckpt/meeting/g/0/there", 0) == 0:
                calling.wait(0.01)
            place, secret = split_address(store.get("flexckpt/meeting/g/0").decode())
            own = stack.enter_context(socket.create_connection(place))
            # Who knows the secret, but is nobody who is waited for, is a stranger too.
            own.sendall(secret + bytes(16) + b"\5\0\0\0" if hello == "rank" else hello)
            calling.set()

        def work(channel):
            if channel.rank == 1:
                calling.wait(300)
            return channel.all_gather(b"%d" % channel.rank)

        thread = threading.Thread(target=stranger, daemon=True)
        thread.start()
        assert group.run(work) == {0: [b"0", b"1"], 1: [b"0", b"1"]}
        thread.join(300)
    assert calling.is_set()


def test_a_stranger_that_says_nothing_is_not_kept(store, monkeypatch):
    monkeypatch.setattr(group_listener, "GREETING_SECONDS", 0.0)
    with host_channel.Meeting(store, "g", 0, set(), {1}) as open_meeting:
        place, _ = split_address(store.get("flexckpt/meeting/g/0").decode())
        with socket.create_connection(place, timeout=300) as stranger:
            with pytest.raises(TimeoutError, match="rank 1 has not come for 1 s"):
                open_meeting.wait_for_all(1.0)
            assert stranger.recv(1) == b""


# -- ranks that are lost -----------------------------------------------------------------------------------------------


def rank_process(store: Store, size: int, rank: int, results: Any, victim: int, point: str) -> None:
    """One rank, of which one dies: before it meets the others, between exchanges, or in one."""
    announce(store, rank)
    channel = HostChannel(store, "g", tuple(range(size)), rank)
    if point != "meeting":
        channel.all_gather(b"first")
    if rank == victim:
        if point == "exchange":
            channel._send_and_receive = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            channel.all_gather(b"never")
        os.kill(os.getpid(), signal.SIGKILL)
    texts = []
    for _ in range(2):
        try:
            channel.all_gather(b"second")
        except LostRankError as error:
            texts.append(str(error))
    results.put((rank, texts))


@pytest.mark.parametrize("point", ["meeting", "between", "exchange"])
@pytest.mark.parametrize("size", [2, 4, 7])
def test_a_rank_that_dies_is_named_on_all_others_soon(store, size, point):
    victim = size - 2
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [
        context.Process(target=rank_process, args=(store, size, rank, results, victim, point)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    # Far below the patience.
    outcomes = [results.get(timeout=300) for _ in range(size - 1)]
    for process in processes:
        process.join(300)
    assert processes[victim].exitcode == -signal.SIGKILL
    lost = (
        f"rank {victim} is lost: it has gone, or does not answer. Remedy (FC501): look into its log (killed? out of "
        "memory? host or network down? in a collective that timed out, as this call is inside `if rank == 0`?), and "
        "restart the job"
    )
    for rank, texts in outcomes:
        assert texts == [
            lost,
            f"the channel between ranks {list(range(size))} is closed since an exchange failed: {lost}",
        ], rank
    assert {rank for rank, _ in outcomes} == {*range(size)} - {victim}


@pytest.mark.parametrize("where", ["has met", "comes", "has made no call"])
def test_a_rank_that_waits_for_long_says_for_whom(ranks, monkeypatch, where):
    """While it waits: the other rank comes when that has been said."""
    group, said = ranks(2), threading.Event()
    if where == "has made no call":
        monkeypatch.setattr(host_channel, "presence_of", lambda *_: None)
    if where == "has met":
        group.run(lambda channel: channel.all_gather(b""))
    monkeypatch.setattr(host_channel, "NOTICE_SECONDS", 0.0)
    monkeypatch.setattr(host_channel, "NOTICE_SECONDS", 0.0)
    monkeypatch.setattr(host_channel.logger, "warning", lambda text: (texts.append(text), said.set()))
    texts = []

    def work(channel):
        if channel.rank == 1:
            assert said.wait(60)
        return channel.all_gather(b"%d" % channel.rank)

    assert group.run(work) == {0: [b"0", b"1"], 1: [b"0", b"1"]}
    why = "rank 1 is missing: it has gone before its first call of this library, or has not come to it yet. "
    why = why if where == "has made no call" else ""
    assert texts[0].startswith(f"rank 0 has waited 0 s for rank 1 in a call of this library. {why}Remedy (FC501): ")
    assert ("killed?" in texts[0]) == bool(why)
    # The other rank has made the call. What a rank does alone: tests/distributed/rank_0_script.py.
    advised("ranks/lost_ranks.py", "make this call on every rank of the group (is it inside `if rank == 0`?)", texts[0])


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_a_rank_that_hangs_is_named_on_all_others_after_the_patience(ranks, size):
    group = ranks(size)
    group.run(lambda channel: channel.all_gather(b""))
    group.lose_patience()
    outcomes = group.run(lambda channel: channel.all_gather(b""), absent=(1,))
    assert {type(outcome) for outcome in outcomes.values()} == {LostRankError}
    for outcome in outcomes.values():
        assert str(outcome).startswith(
            "rank 1 takes no part in an exchange between ranks, though it is alive: it hangs"
        )
    assert any("TimeoutError: rank 1 has sent nothing for 0.5 s" in str(outcome) for outcome in outcomes.values())


def test_a_rank_that_reads_nothing_is_named(ranks):
    group = ranks(2)
    group.run(lambda channel: channel.all_gather(b""))
    group.lose_patience()
    # It has said what it had to, and then hangs.
    hanging = group.channels[1]
    outcomes = group.run(
        lambda channel: (
            channel.all_gather(bytes(LARGE))
            if channel is not hanging
            else channel._targets[1].sendall(b"\2" + bytes(7) + b"\1" + bytes(7) + bytes(8))
        )
    )
    assert "rank 0" not in str(outcomes[0])
    assert "TimeoutError: rank 1 has taken nothing for 0.5 s" in str(outcomes[0])


def test_a_rank_that_never_comes_is_named(ranks):
    group = ranks(3)
    group.lose_patience()
    outcomes = group.run(lambda channel: channel.all_gather(b""), absent=(2,))
    for rank in (0, 1):
        assert isinstance(outcomes[rank], LostRankError)
        assert str(outcomes[rank]).startswith("rank 2 takes no part")


def test_a_failed_channel_fails_the_others_and_says_so_for_ever(ranks):
    group = ranks(3)
    group.run(lambda channel: channel.all_gather(b""))

    def work(channel):
        if channel.rank == 2:
            channel.close()
        texts = []
        for _ in range(3):
            with pytest.raises(LostRankError) as failed:
                channel.all_gather(b"x")
            texts.append(str(failed.value))
        return texts

    outcomes = group.run(work)
    assert set(outcomes[2]) == {"the channel between ranks [0, 1, 2] is closed since an exchange failed: it was closed"}
    for rank in (0, 1):
        first, *later = outcomes[rank]
        assert first.startswith("rank 2 takes no part")
        assert set(later) == {f"the channel between ranks [0, 1, 2] is closed since an exchange failed: {first}"}


@pytest.mark.parametrize("point", ["_meet", "_disseminate", "_send_and_receive"])
def test_an_interrupt_leaves_the_channel_closed_and_not_out_of_step(ranks, point):
    group = ranks(3)
    if point != "_meet":
        group.run(lambda channel: channel.all_gather(b""))
    real = getattr(group.channels[1], point)

    def interrupted(*args: Any) -> None:
        real(*args)
        raise KeyboardInterrupt

    setattr(group.channels[1], point, interrupted)

    def work(channel):
        with contextlib.suppress(KeyboardInterrupt):
            channel.all_gather(b"x")
        return channel.all_gather(b"y")

    outcomes = group.run(work)
    assert "is closed since an exchange failed: it was interrupted. Remedy" in str(outcomes[1])
    # The others may have had the first exchange, but none has the second.
    for rank in (0, 2):
        assert isinstance(outcomes[rank], LostRankError)
        assert str(outcomes[rank]).startswith("rank 1 takes no part")


def test_control_c_while_a_rank_waits(store):
    context = multiprocessing.get_context("fork")
    said, go_on = context.Queue(), context.Event()

    def interrupted() -> None:
        # Who runs these tests in the background may have it ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        announce(store, 1)
        channel = HostChannel(store, "g", (0, 1), 1)
        channel.all_gather(b"")
        real = channel._send_and_receive
        channel._send_and_receive = lambda *args: (said.put("begins to wait"), real(*args))[1]
        try:
            channel.all_gather(b"x")
        except KeyboardInterrupt:
            said.put("interrupted")
        try:
            channel.all_gather(b"y")
        except LostRankError as error:
            said.put(str(error))
        go_on.wait(300)

    announce(store, 0)
    process = context.Process(target=interrupted)
    process.start()
    try:
        channel = HostChannel(store, "g", (0, 1), 0)
        channel.all_gather(b"")
        assert said.get(timeout=300) == "begins to wait"
        os.kill(process.pid, signal.SIGINT)
        assert said.get(timeout=300) == "interrupted"
        assert "is closed since an exchange failed: it was interrupted" in said.get(timeout=300)
        with pytest.raises(LostRankError, match="rank 1 takes no part .* rank 1 has closed its connection"):
            channel.all_gather(b"x")
    finally:
        go_on.set()
        process.join(300)


def test_ranks_out_of_step_are_told(ranks):
    group = ranks(2)
    group.run(lambda channel: channel.all_gather(b""))
    group.channels[0]._exchanges += 1
    outcomes = group.run(lambda channel: channel.all_gather(b"x"))
    assert all(isinstance(outcome, LostRankError) for outcome in outcomes.values())
    assert "ranks are out of step: expected exchange" in " ".join(map(str, outcomes.values()))


def test_a_store_that_has_gone_means_that_rank_0_has(ranks, store):
    group = ranks((0, 1))
    group.run(lambda channel: channel.all_gather(b""))
    group.lose_patience()
    store.path.unlink()
    outcomes = group.run(lambda channel: channel.all_gather(b""), absent=(0,))
    assert str(outcomes[1]).startswith("rank 0 is lost: the job's key-value store")


# -- forks -------------------------------------------------------------------------------------------------------------


def test_a_fork_neither_uses_nor_keeps_the_connections(ranks):
    group = ranks(2)
    group.run(lambda channel: channel.all_gather(b""))
    context = multiprocessing.get_context("fork")
    said, go_on = context.Queue(), context.Event()

    def child() -> None:
        try:
            group.channels[0].all_gather(b"from the fork")
        except LostRankError as error:
            said.put(str(error))
        go_on.wait(300)

    process = context.Process(target=child)
    process.start()
    try:
        assert "this process is a fork of the one that made it" in said.get(timeout=300)
        assert group.run(lambda channel: channel.all_gather(b"%d" % channel.rank)) == {0: [b"0", b"1"], 1: [b"0", b"1"]}
        # The fork lives on, and yet the connection ends with its owner's.
        group.channels[0].close()
        outcomes = group.run(lambda channel: channel.all_gather(b""), absent=(0,))
        assert "rank 0 has closed its connection" in str(outcomes[1])
    finally:
        go_on.set()
        process.join(300)


def test_a_fork_is_not_taken_for_a_rank_that_has_gone(store):
    """A data loader's worker outlives the rank that started it."""
    context = multiprocessing.get_context("fork")
    works, go_on = context.Event(), context.Event()

    def work() -> None:
        works.set()
        go_on.wait(300)

    def rank() -> None:
        announce(store, 7)
        context.Process(target=work).start()
        works.wait(300)
        os.kill(os.getpid(), signal.SIGKILL)

    announce(store, 1)
    process = context.Process(target=rank)
    process.start()
    process.join()  # with a time limit it would wait for a pipe that the worker has too
    try:
        assert lost_ranks.find_missing_ranks(store, "g", (1, 7), 1).lost == [7]
    finally:
        go_on.set()

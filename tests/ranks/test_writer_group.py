"""Writers of one save: all of them go on, or all get the same error; whoever has gone is noticed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from paddle_flexckpt.catalog import CheckpointError, LostRankError, ValidationError
from paddle_flexckpt.ranks import lost_ranks, writer_group
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.ranks.framing import SendQueue, encode
from paddle_flexckpt.ranks.group_listener import GroupListener, ask_outcome, greet
from paddle_flexckpt.ranks.lost_ranks import address_of, open_presence
from paddle_flexckpt.ranks.writer_group import LostCoordinatorError, WriterGroup

TOKEN = bytes(range(16))
PATIENCE_SECONDS = 60.0
GONE = "its processes have ended before it had done its share of the save. Remedy (FC501): look into its log"
UNKNOWN = "its background writer has ended, or has not decided within {:g} s: it is not known what became of the save"
FORK = multiprocessing.get_context("fork")


def in_threads(works: dict[int, Callable[[], Any]]) -> dict[int, Any]:
    """Do all at once; return what each has returned or raised."""
    outcomes: dict[int, Any] = {}

    def run(number: int, work: Callable[[], Any]) -> None:
        try:
            outcomes[number] = work()
        except BaseException as error:
            outcomes[number] = error

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in works.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    return outcomes


class Writers:
    """The processes that write for the ranks of a job: here each is a listening socket, and a thread while it works."""

    def __init__(self, ranks: Sequence[int], coordinator: int = 0) -> None:
        self.ranks, self.coordinator = tuple(ranks), coordinator
        self.sockets = [open_presence() for _ in ranks]
        self._secrets = [os.urandom(16) for _ in ranks]
        self.addresses = list(map(address_of, self.sockets, self._secrets))
        self._listeners: dict[int, GroupListener] = {}
        self._groups: list[WriterGroup] = []

    def listener(self, position: int) -> GroupListener:
        if position not in self._listeners:
            self._listeners[position] = GroupListener(self.sockets[position], self._secrets[position])
        return self._listeners[position]

    def join(self, position: int, token: bytes = TOKEN, timeout: float = PATIENCE_SECONDS) -> WriterGroup:
        arguments = self.addresses, token, self.ranks, position, self.coordinator, timeout
        self._groups.append(WriterGroup(self.listener(position), *arguments))
        return self._groups[-1]

    def run(self, work: Callable[[WriterGroup], Any], absent: Sequence[int] = (), **options: Any) -> dict[int, Any]:
        """Do the work on all members but the absent ones. The coordinator's process lives until all are done."""
        busy = {*range(len(self.ranks))} - {*absent}

        def member(position: int) -> Any:
            group = self.join(position, **options)
            try:
                return work(group)
            finally:
                group.close()
                busy.discard(position)
                # Nothing of the group is waited for any more.
                assert all(key.data is None for key in self.listener(position).selector.get_map().values())
                while position == self.coordinator and busy:
                    self.listener(position).select(0.01)

        return in_threads({position: lambda p=position: member(p) for position in sorted(busy)})

    def close(self) -> None:
        for listener in self._listeners.values():
            listener.selector.close()
        for each in self.sockets:
            each.close()


@pytest.fixture
def writers() -> Iterator[Callable[..., Writers]]:
    made: list[Writers] = []

    def make(ranks: int | Sequence[int], coordinator: int = 0) -> Writers:
        made.append(Writers(range(ranks) if isinstance(ranks, int) else ranks, coordinator))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is far away or slow."""
    for module in (lost_ranks, writer_group):
        monkeypatch.setattr(module, "FIRST_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(writer_group, "_GRACE_SECONDS", 0.1)


def only(outcomes: dict[int, Any], kind: type[Exception] = LostRankError) -> str:
    """The text that all have got."""
    assert {type(each) for each in outcomes.values()} == {kind}
    (text,) = {str(each) for each in outcomes.values()}
    return text


# -- the right bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "coordinator"), [((0,), 0), ((0, 1), 1), ((7, 2, 9, 4, 5), 2)])
def test_all_get_what_each_has_to_tell_in_the_groups_order(writers, ranks, coordinator):
    def work(group: WriterGroup) -> Any:
        own = [b"rank %d" % group.rank * turn for turn in range(3)]
        return [group.together(lambda told=told: (group.rank, told), "cannot save") for told in own]

    payloads = [[b"rank %d" % rank * turn for rank in ranks] for turn in range(3)]
    for position, turns in writers(ranks, coordinator).run(work).items():
        assert turns == [(ranks[position], each) for each in payloads]


def test_the_coordinator_gets_what_is_for_it_and_all_get_the_notes(writers):
    def work(group: WriterGroup) -> Any:
        def step() -> Any:
            note = b"" if group.position == 1 else b"note %d" % group.position
            return group.rank, note, {2: b"from %d" % group.position}

        if group.position != 2:
            with pytest.raises(ValueError, match="members of a group of writers send to the coordinator alone"):
                group.all_to_all(b"", {2: b"", 1: b""})
            group.collectives -= 1
        return group.trade(step, "cannot x"), group.trade(step, "cannot x"), group.collectives

    for own, (first, second, collectives) in writers(4, 2).run(work).items():
        parts = {source: b"from %d" % source for source in range(4)} if own == 2 else {}
        assert first == second == (own, {0: b"note 0", 2: b"note 2", 3: b"note 3"}, parts)
        assert (list(first[2]), collectives) == (sorted(parts), 2)


def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of payload of each message that leaves, of all members."""
    sizes: list[int] = []
    real = writer_group.encode

    def counting(exchange: int, payloads: Sequence[bytes]) -> Any:
        sizes.append(sum(map(len, payloads)))
        return real(exchange, payloads)

    monkeypatch.setattr(writer_group, "encode", counting)
    return sizes


def test_what_is_for_the_coordinator_alone_goes_there_and_nowhere_else(writers, monkeypatch):
    sizes, large = sent(monkeypatch), bytes(range(256)) * (100 << 12)

    def work(group: WriterGroup) -> Any:
        return group.trade(lambda: (None, b"", {0: large if group.position else bytes(5000)}))[2]

    outcomes = writers(3).run(work)
    assert outcomes[0] == {0: bytes(5000), 1: large, 2: large}
    assert outcomes[1] == outcomes[2] == {}
    large_ones = [size for size in sizes if size > 100]
    assert large_ones == [len(large)] * 2


def test_what_the_coordinator_has_for_some_members_goes_to_them_alone(writers, monkeypatch):
    sizes, large = sent(monkeypatch), bytes(range(256)) * (100 << 12)

    def work(group: WriterGroup) -> Any:
        payloads = {1: large, 3: b"small"} if group.position == 2 else {2: b"for the coordinator"}
        return group.trade(lambda: (None, b"note" if group.position == 2 else b"", payloads))[1:]

    got = {0: {}, 1: {2: large}, 2: dict.fromkeys((0, 1, 3), b"for the coordinator"), 3: {2: b"small"}}
    assert writers(4, 2).run(work) == {position: ({2: b"note"}, each) for position, each in got.items()}
    assert len([size for size in sizes if size > 100]) == 1


def test_a_large_answer_waits_for_who_reads_it(writers):
    large = os.urandom(16 << 20)
    outcomes = writers(3).run(lambda group: group.trade(lambda: (None, large if not group.position else b"", {}))[1])
    assert outcomes == {position: {0: large} for position in range(3)}


def test_an_answer_to_a_hundred_members_is_made_once(writers, monkeypatch):
    sizes = sent(monkeypatch)

    def work(group: WriterGroup) -> Any:
        with pytest.raises(CheckpointError, match=r"cannot write: \[rank 7\] ZeroDivisionError"):
            group.together(lambda: (None, b"%d" % (1 // (group.rank - 7))), "cannot write")
        return group.together(lambda: (None, b"%d" % group.rank))[1]

    payloads = [b"%d" % rank for rank in range(100)]
    assert writers(100).run(work) == dict.fromkeys(range(100), payloads)
    # In each exchange an invitation and a message of each, and the answer.
    assert len(sizes) == 2 * (99 + 99 + 1)


# -- errors of the work ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("culprit", [0, 2])
def test_an_error_of_the_work_is_everybodys_and_the_group_goes_on(writers, culprit):
    def work(group: WriterGroup) -> Any:
        def step() -> Any:
            if group.position == culprit:
                raise ValidationError(["bad"])
            return None, b"", {}

        texts = []
        for exchange in (lambda: group.trade(step, "cannot x"), lambda: group.together(lambda: step()[:2], "cannot x")):
            with pytest.raises(ValidationError) as caught:
                exchange()
            texts.append(str(caught.value))
        return texts, group.all_gather(b"!")

    for outcome in writers(3).run(work).values():
        assert outcome == ([f"cannot x: [rank {culprit}] bad"] * 2, [b"!"] * 3)


# -- steps of one member -----------------------------------------------------------------------------------------------


def test_the_coordinator_takes_a_step_for_all(writers):
    done: list[int] = []

    def fail() -> None:
        raise ValidationError(["full"])

    def work(group: WriterGroup) -> Any:
        group.all_gather(b"")  # all have come
        group.lead(2, lambda: done.append(group.position), "cannot commit")
        with pytest.raises(ValueError, match="the coordinator alone leads"):
            group.lead(1, lambda: None)
        with pytest.raises(ValidationError) as caught:
            group.lead(2, fail, "cannot commit")
        return str(caught.value), group.all_gather(b"x")

    outcomes = writers((3, 4, 6, 9), 2).run(work)
    assert done == [2]
    assert set(map(str, outcomes.values())) == {str(("cannot commit: [rank 6] full", [b"x"] * 4))}


@pytest.mark.parametrize("size", [1, 3])
def test_members_that_have_gone_do_not_keep_the_coordinator_from_its_step(writers, size):
    done, has_ended = [], threading.Event()

    def work(group: WriterGroup) -> Any:
        group.all_gather(b"")
        if group.position == 1:
            ends(group)
            return has_ended.set()
        if size > 1:
            has_ended.wait(PATIENCE_SECONDS)
        return group.lead(0, lambda: done.append("committed"))

    assert writers(size).run(work) == dict.fromkeys(range(size))
    assert done == ["committed"]


def test_members_whose_coordinator_dies_in_its_step_do_not_know_the_outcome(writers):
    def work(group: WriterGroup) -> Any:
        group.all_gather(b"")
        return group.lead(0, lambda: None) if group.position else ends(group)

    outcomes = writers(3).run(work)
    assert outcomes.pop(0) is None
    assert only(outcomes, LostCoordinatorError).startswith(f"[rank 0] {UNKNOWN.format(PATIENCE_SECONDS)}")


def test_members_wait_for_a_step_of_the_coordinator_as_long_as_for_a_share(writers):
    """It goes on with it, and they look for what it has made."""
    has_ended = threading.Event()

    def work(group: WriterGroup) -> Any:
        group.all_gather(b"")
        try:
            return group.lead(0, lambda: has_ended.wait(PATIENCE_SECONDS))
        finally:
            has_ended.set()

    outcomes = writers(2).run(work, timeout=0.3)
    assert outcomes.pop(0) is None
    assert only(outcomes, LostCoordinatorError).startswith(f"[rank 0] {UNKNOWN.format(0.3)}")


@pytest.mark.parametrize("who", [[0], [2], [0, 2, 3]])
def test_a_member_that_aborts_ends_the_save_on_all_with_its_text(writers, who):
    has_aborted = threading.Event()

    def work(group: WriterGroup) -> Any:
        if group.position == 1:
            has_aborted.wait(PATIENCE_SECONDS)  # it is busy meanwhile
        try:
            if group.position in who:
                raise group.abort("there is nothing to write")
            group.trade(lambda: (None, b"", {0: bytes(10 << 20)}))
        finally:
            has_aborted.set()

    assert only(writers(4).run(work)) in {f"[rank {position}] there is nothing to write" for position in who}


# -- lost members ------------------------------------------------------------------------------------------------------


def ends(group: WriterGroup) -> None:
    """End as a process does that is killed: the system closes its connections."""
    for link in group._links.values():
        link.connection.close()


def test_a_member_that_dies_before_it_sends_is_named_on_all_others_for_ever(writers):
    some, released = writers((3, 5, 8, 9)), threading.Event()

    def work(group: WriterGroup) -> Any:
        if group.rank == 8:
            return ends(group)
        if group.rank == 9:
            released.wait(PATIENCE_SECONDS)  # it comes to an exchange that is over
        try:
            with pytest.raises(LostRankError) as first:
                group.together(lambda: (None, b""), "cannot save")
        finally:
            released.set()
        with pytest.raises(LostRankError) as second:
            group.trade(lambda: (None, b"", {}), "cannot save")
        assert str(second.value) == str(first.value)
        raise first.value

    outcomes = some.run(work)
    assert outcomes.pop(2) is None
    assert only(outcomes).startswith(f"cannot save: [rank 8] {GONE}")


def killed_while_sending(member: Writers, position: int) -> None:
    group = member.join(position)
    real = SendQueue.send

    def send(self: SendQueue, connection: socket.socket) -> None:
        real(self, connection)
        os.kill(os.getpid(), signal.SIGKILL)

    SendQueue.send = send  # type: ignore[method-assign]
    group.trade(lambda: (None, b"", {0: bytes(100 << 20)}))


def test_a_process_that_is_killed_while_it_sends_is_named(writers):
    some = writers(4)
    process = FORK.Process(target=killed_while_sending, args=(some, 2))
    process.start()
    outcomes = some.run(lambda group: group.trade(lambda: (None, b"", {0: bytes(1 << 20)}), "cannot save"), absent=[2])
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert only(outcomes).startswith(f"cannot save: [rank 2] {GONE}")


def test_a_member_that_dies_after_it_has_sent_has_done_its_share(writers):
    has_ended = threading.Event()

    def work(group: WriterGroup) -> Any:
        if group.position == 2:
            link = group._links[0]
            link.enqueue(encode(1, [b"", b"part"]))
            assert link.send()
            ends(group)
            return has_ended.set()
        has_ended.wait(PATIENCE_SECONDS)
        received = group.trade(lambda: (None, b"", {}))[2]
        with pytest.raises(LostRankError) as lost:
            group.together(lambda: (None, b""), "cannot commit")
        return received, str(lost.value)

    outcomes = writers(4).run(work)
    texts = {outcomes[position][1] for position in (0, 1, 3)}
    assert [outcomes[position][0] for position in (0, 1, 3)] == [{2: b"part"}, {}, {}]
    assert len(texts) == 1 and texts.pop().startswith(f"cannot commit: [rank 2] {GONE}")


def test_a_member_whose_process_has_gone_before_it_came_is_named(writers):
    some = writers(4)
    some.sockets[3].close()
    some.sockets[1].close()
    outcomes = some.run(lambda group: group.together(lambda: (None, b""), "cannot save"), absent=[1, 3])
    assert only(outcomes).startswith(f"cannot save: [ranks 1, 3] {GONE}")


@pytest.mark.parametrize("is_connected", [False, True])
def test_a_member_that_lives_and_says_nothing_is_given_its_time(writers, is_connected):
    some = writers(3)
    if is_connected:
        some.join(2)
    outcomes = some.run(lambda group: group.together(lambda: (None, b""), "x"), absent=[2], timeout=0.5)
    assert only(outcomes).startswith(
        "x: [rank 2] has written nothing within 0.5 s after others had written: its processes have ended, or it is "
        "slower than that. Remedy (FC501): look into the log of that rank, or give the BackgroundWriter a longer "
        "timeout"
    )


def test_a_member_that_takes_nothing_is_left_behind(writers):
    stays, large = threading.Event(), bytes(64 << 20)

    def work(group: WriterGroup) -> Any:
        if group.position == 1:
            group._links[0].enqueue(encode(1, [b"", b""]))
            assert group._links[0].send()
            return stays.wait(PATIENCE_SECONDS)
        try:
            received = group.trade(lambda: (None, large, {}))[2]
            with pytest.raises(LostRankError) as lost:
                group.together(lambda: (None, b""))
            return received, str(lost.value)
        finally:
            stays.set()

    outcomes = writers(2).run(work, timeout=0.5)
    assert outcomes[0][0] == {} and outcomes[0][1].startswith(f"[rank 1] {GONE}")


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_member_that_comes_too_late_gets_the_text_of_all(writers, is_closed):
    some = writers(3)
    some.sockets[2].close()
    group = some.join(0)
    outcomes = in_threads({0: lambda: group.together(lambda: (None, b""), "x")})
    if is_closed:
        group.close(b"failed")
    late = some.join(1)
    serve = some.listener(0).serve if is_closed else group.close
    outcomes.update(in_threads({1: lambda: late.trade(lambda: (None, b"", {0: bytes(10 << 20)}), "x"), 2: serve}))
    assert outcomes.pop(2) is None
    assert only(outcomes).startswith(f"x: [rank 2] {GONE}")


# -- a lost coordinator ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["it has begun", "it answers", "it works"])
def test_members_whose_coordinator_is_killed_do_not_know_the_outcome(writers, point):
    some = writers(4)
    begun = FORK.Event()

    def coordinate() -> None:
        group = some.join(0)
        begun.set()
        if point == "it answers":
            group._send_to_all = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        if point != "it has begun":
            group.all_gather(b"")
        os.kill(os.getpid(), signal.SIGKILL)

    process = FORK.Process(target=coordinate)
    process.start()
    some.sockets[0].close()
    assert begun.wait(PATIENCE_SECONDS)

    def work(position: int) -> Any:
        with pytest.raises(LostCoordinatorError) as lost:
            group = some.join(position)
            try:
                for _ in range(2):
                    group.together(lambda: (None, b""), "cannot save")
            except LostCoordinatorError as error:
                with pytest.raises(LostCoordinatorError) as again:
                    group.together(lambda: (None, b""), "cannot save")
                assert str(again.value) == str(error)
                raise
        return str(lost.value).removeprefix("cannot save: ")

    texts = set(in_threads({position: lambda p=position: work(p) for position in (1, 2, 3)}).values())
    process.join()
    assert texts == {
        f"[rank 0] {UNKNOWN.format(PATIENCE_SECONDS)}. Remedy (FC404): look whether the checkpoint is there; a load or "
        "restore() takes it if it is"
    }


def test_a_coordinator_that_has_gone_is_noticed_at_the_start(writers):
    some = writers(2)
    some.sockets[0].close()
    group = some.join(1)
    for _ in range(2):
        with pytest.raises(LostCoordinatorError, match=r"^\[rank 0\] its background writer has ended"):
            group.all_gather(b"")


def test_a_coordinator_whose_host_does_not_answer_is_asked_again(writers, monkeypatch):
    some, calls = writers(2), []

    def unreachable(*args: Any) -> socket.socket:
        calls.append(args)
        if len(calls) == 3:
            return greet(*args)
        raise socket.timeout("timed out")

    monkeypatch.setattr(writer_group, "greet", unreachable)
    assert some.run(lambda group: group.all_gather(b"x")) == {0: [b"x"] * 2, 1: [b"x"] * 2}
    calls.clear()
    monkeypatch.setattr(writer_group, "greet", lambda *args: unreachable(*args[:0]))
    group = some.join(1, timeout=0.0)
    with pytest.raises(LostCoordinatorError, match=r"^\[rank 0\] .* has not decided within 0 s"):
        group.all_gather(b"")


def test_a_coordinator_that_does_not_come_is_given_its_time(writers):
    some = writers(2)
    group = some.join(1, timeout=0.3)
    with pytest.raises(LostCoordinatorError, match=r"x: \[rank 0\] .* has not decided within 0.3 s"):
        group.together(lambda: (None, b""), "x")


def test_the_members_patience_begins_when_the_coordinator_comes(writers, monkeypatch):
    monkeypatch.setattr(writer_group, "_GRACE_SECONDS", PATIENCE_SECONDS)
    some = writers(3)
    outcomes = some.run(lambda group: group.together(lambda: (None, b"")), absent=[2], timeout=0.3)
    assert only(outcomes).startswith("[rank 2] has written nothing within 0.3 s")


# -- who comes when ----------------------------------------------------------------------------------------------------


def test_members_may_come_before_the_coordinator_and_for_several_saves(writers):
    some, tokens = writers(3), (b"a" * 16, b"b" * 16)
    groups = {(token, position): some.join(position, token) for position in (1, 2, 0) for token in tokens}

    def work(position: int) -> Any:
        return [groups[token, position].all_gather(b"%d %s" % (position, token)) for token in tokens]

    expected = [[b"%d %s" % (position, token) for position in range(3)] for token in tokens]
    assert in_threads({position: lambda p=position: work(p) for position in range(3)}) == dict.fromkeys(
        range(3), expected
    )


def test_ranks_that_are_there_or_are_none_are_let_go(writers):
    some = writers(2)

    def work(group: WriterGroup) -> Any:
        first = group.all_gather(b"%d" % group.position)
        for place in (-2, 0, 1, 7) if group.position else ():
            with greet(some.addresses[0], TOKEN, place, 1.0) as connection:
                connection.settimeout(PATIENCE_SECONDS)
                assert connection.recv(1) == b""
        return first, group.all_gather(b"2")

    assert some.run(work) == dict.fromkeys(range(2), ([b"0", b"1"], [b"2"] * 2))


def test_a_member_that_waits_serves_those_that_ask_for_an_earlier_outcome(writers):
    """It has led that save; the coordinator of this one waits for the answer."""
    some, has_ended = writers(2), threading.Event()

    def work(group: WriterGroup) -> Any:
        if group.position == 1:
            some.listener(1).end(b"e" * 16, b"failed", "")
            has_ended.set()
            return group.all_gather(b"")
        has_ended.wait(PATIENCE_SECONDS)
        answer = ask_outcome(some.addresses[1], b"e" * 16, PATIENCE_SECONDS)
        group.all_gather(b"")
        return answer

    assert some.run(work)[0] == b"failed"


@pytest.mark.parametrize(("timeout", "nbytes"), [(0.0, 100_000), (PATIENCE_SECONDS, 1000)])
def test_what_has_been_sent_counts_when_the_coordinator_finds_it(writers, monkeypatch, timeout, nbytes):
    """Its time is over, as it was stopped meanwhile; or the first that it sees is that the members have gone."""
    some, parts = writers(3), {position: bytes([position]) * nbytes for position in (1, 2)}
    for position, part in parts.items():
        member = some.join(position)
        member._links[0].enqueue(encode(1, [b"", part]))
        assert member._links[0].send()
        if timeout:
            ends(member)
            some.sockets[position].close()
    monkeypatch.setattr(lost_ranks, "FIRST_LOOK_SECONDS", 0.0)
    assert some.join(0, timeout=timeout).all_to_all(b"", {})[1] == parts


def test_a_message_of_another_exchange_is_told(writers):
    some = writers(3)
    groups = {position: some.join(position) for position in (1, 2, 0)}
    groups[1]._exchanges = 5
    outcomes = in_threads({position: lambda p=position: groups[p].all_gather(b"") for position in groups})
    assert isinstance(outcomes.pop(1), LostRankError)
    text = only(outcomes)
    assert text.startswith(
        "[rank 1] the connection to it broke (ranks are out of step: expected exchange 1 with 2 payloads, got exchange "
        "6 with 2)"
    )


@pytest.mark.parametrize(
    ("head", "problem"),
    [
        ((1, 2, 1 << 63, 5), "expected at most 1099511627776 bytes in a message, got 9223372036854775813"),
        ((1, 1 << 60, 0, 0), "ranks are out of step: expected exchange 1 with 2 payloads, got exchange 1 with 1152921"),
    ],
)
def test_a_head_that_makes_no_sense_is_told(writers, head, problem):
    some = writers(3)
    groups = {position: some.join(position) for position in (1, 2, 0)}
    groups[1]._links[0].connection.sendall(struct.pack("<4Q", *head))
    outcomes = in_threads({position: lambda p=position: groups[p].all_gather(b"") for position in groups})
    assert only(outcomes).startswith(f"[rank 1] the connection to it broke ({problem}")


# -- the process -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("soft", "raised"), [(1024, [(4096, 4096)]), (2000, []), (-1, [])])
def test_the_limit_of_open_files_is_raised_where_members_are_many(writers, monkeypatch, soft, raised):
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(writer_group.resource, "getrlimit", lambda _: (soft, 4096))
    monkeypatch.setattr(writer_group.resource, "setrlimit", lambda _, limit: limits.append(limit))
    monkeypatch.setattr(writer_group, "_OTHER_FILES", 1500)
    writers(2).join(0)
    assert limits == raised


def test_a_group_that_is_closed_says_so(writers):
    some = writers(2)
    group = some.join(0)
    group.close()
    group.close()
    assert isinstance(group, Communicator)
    with pytest.raises(CheckpointError, match="this group of writers is closed"):
        group.together(lambda: (None, b""))

"""Which ranks are said to be lost, by a store and processes that are not there."""

from __future__ import annotations

import socket
import threading

import pytest

from paddle_flexckpt.ranks import lost_ranks
from paddle_flexckpt.ranks.lost_ranks import Missing, announce, describe_lost_ranks, find_missing_ranks


class Store:
    """A key-value store in memory; ``fails_after`` calls it is gone."""

    def __init__(self, fails_after: int | None = None) -> None:
        self.counts: dict[str, int] = {}
        self.values: dict[str, str] = {}
        self.left = fails_after
        self.lock = threading.Lock()

    def _called(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise RuntimeError("connection reset by peer")

    def add(self, key: str, value: int) -> int:
        with self.lock:
            self._called()
            self.counts[key] = self.counts.get(key, 0) + value
            return self.counts[key]

    def set(self, key: str, value: str) -> None:
        with self.lock:
            self._called()
            self.values[key] = value

    def get(self, key: str) -> bytes:
        with self.lock:
            self._called()
            return self.values[key].encode()


@pytest.fixture
def gone() -> str:
    """An address that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


def present(store: Store, rank: int, address: str) -> None:
    store.set(f"flexckpt/presence/{rank}", address)
    store.add(f"flexckpt/present/{rank}", 1)


def find_lost_ranks(store: Store, group: str, ranks: tuple[int, ...], rank: int) -> list[int] | None:
    missing = find_missing_ranks(store, group, ranks, rank)
    return None if missing is None else missing.lost


def test_a_rank_whose_process_has_gone_is_lost_and_one_that_is_busy_is_not(gone):
    store = Store()
    announce(store, 1)  # this process: it lives
    present(store, 2, gone)
    announce(store, 3)
    assert find_lost_ranks(store, "g", (1, 2, 3), 3) == [2]
    assert find_lost_ranks(store, "g", (1, 2, 3), 1) == [2]


def test_a_rank_that_ended_because_of_the_same_failure_is_not_lost(gone):
    store = Store()
    announce(store, 1)
    assert find_lost_ranks(store, "g", (1, 2), 1) == []
    present(store, 1, gone)  # rank 1 has said that it failed, and ended
    announce(store, 2)
    assert find_lost_ranks(store, "g", (1, 2), 2) == []
    # At a later failure it has not said so.
    assert find_lost_ranks(store, "g", (1, 2), 2) == [1]
    # Neither has it in another group.
    assert find_lost_ranks(store, "h", (1, 2), 2) == [1]


def test_the_rank_with_the_store_stays_until_the_others_know(gone, monkeypatch):
    store = Store()
    announce(store, 0)
    announce(store, 1)
    present(store, 2, gone)
    found = {}
    first = threading.Thread(target=lambda: found.update({0: find_lost_ranks(store, "g", (0, 1, 2), 0)}))
    first.start()
    while store.add("flexckpt/g/0/done", 0) == 0:
        pass
    assert first.is_alive()
    assert find_lost_ranks(store, "g", (0, 1, 2), 1) == [2]
    first.join(300)
    assert found == {0: [2]}
    monkeypatch.setattr(lost_ranks, "FAREWELL_SECONDS", 0.2)
    assert find_lost_ranks(store, "g", (0, 1, 2), 0) == [2]  # rank 1 is alive and says nothing: not for ever


@pytest.mark.parametrize("calls", range(7))
def test_a_store_that_has_gone_means_that_rank_0_has(gone, calls):
    store = Store()
    announce(store, 1)
    present(store, 2, gone)
    store.left = calls
    assert find_lost_ranks(store, "g", (1, 2), 1) == ([2] if calls >= 6 else None)


def test_a_store_that_does_not_answer_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(lost_ranks, "STORE_SECONDS", 0.2)
    store = Store()
    store.lock.acquire()
    assert find_lost_ranks(store, "g", (0, 1), 1) is None
    store.lock.release()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_never_came_is_neither_gone_nor_alive_and_nobody_stays_for_it(rank):
    before = set(threading.enumerate())
    store = Store()
    announce(store, rank)
    assert find_missing_ranks(store, "g", (rank, 2), rank) == ([], [], [2])
    assert "flexckpt-lost-ranks" not in {thread.name for thread in set(threading.enumerate()) - before}
    said = describe_lost_ranks(Missing([], [], [2]), RuntimeError("closed by peer"))
    assert said.startswith(
        "rank 2 is missing: it has gone before its first call of this library, or has not come to it"
    )
    assert "alive" not in said


def test_the_error_of_the_rank_with_the_store_does_not_wait_for_a_rank_that_is_busy(monkeypatch):
    monkeypatch.setattr(lost_ranks, "SPREAD_SECONDS", 0.1)
    store = Store()
    for rank in (0, 1):
        announce(store, rank)
    assert find_missing_ranks(store, "g", (0, 1), 0) == ([], [1], [])
    # But the process stays, for the time being, when its interpreter ends.
    (farewell,) = [thread for thread in threading.enumerate() if thread.name == "flexckpt-lost-ranks"]
    assert not farewell.daemon
    assert find_missing_ranks(store, "g", (0, 1), 1) == ([], [], [])
    farewell.join(300)
    assert not farewell.is_alive()


def test_a_rank_that_lives_and_does_not_fail_takes_no_part(monkeypatch):
    monkeypatch.setattr(lost_ranks, "SPREAD_SECONDS", 0.2)
    store = Store()
    for rank in (1, 2, 3):
        announce(store, rank)
    assert find_lost_ranks(store, "g", (1, 2, 3), 3) == []  # on this rank the exchange has failed
    assert find_missing_ranks(store, "g", (1, 2, 3), 1) == ([], [2], [])


def test_those_that_live_are_waited_for_until_they_have_failed_too(monkeypatch):
    monkeypatch.setattr(lost_ranks, "SPREAD_SECONDS", 60.0)
    store = Store()
    for rank in (1, 2):
        announce(store, rank)
    found = {}
    first = threading.Thread(target=lambda: found.update({1: find_missing_ranks(store, "g", (1, 2), 1)}))
    first.start()
    while store.add("flexckpt/g/1", 0) == 0:
        pass
    assert find_missing_ranks(store, "g", (1, 2), 2) == ([], [], [])
    first.join(300)
    assert found == {1: ([], [], [])}


def test_a_rank_that_still_closes_its_sockets_when_it_is_looked_for_is_lost(gone):
    store = Store()
    announce(store, 1)
    announce(store, 2)
    looks = []
    add = store.add

    def count(key: str, value: int) -> int:
        if key == "flexckpt/present/2":
            looks.append(key)
            if len(looks) == 2:
                store.set("flexckpt/presence/2", gone)
        return add(key, value)

    store.add = count
    assert find_missing_ranks(store, "g", (1, 2), 1) == ([2], [], [])
    assert len(looks) == 2


def test_a_rank_says_once_where_it_is():
    """So that a store that goes between two calls is met by an exchange, whose error says what it means."""
    store = Store()
    announce(store, 1)
    store.left = 0
    announce(store, 1)
    with pytest.raises(RuntimeError, match="connection reset by peer"):
        announce(store, 2)
    with pytest.raises(RuntimeError, match="connection reset by peer"):
        announce(store, 2)
    other = Store()
    announce(other, 1)
    assert other.counts == {"flexckpt/present/1": 1}


def test_what_is_said():
    error = RuntimeError("TIMEOUT self_rank = 0\nmore")
    assert describe_lost_ranks(None, error).startswith("rank 0 is lost: the job's key-value store")
    assert describe_lost_ranks(Missing([3, 5], [], []), error) == (
        "ranks 3, 5 are lost: they have gone, or do not answer. Remedy (FC501): look into their log (killed? out of "
        "memory? host or network down? in a collective that timed out, as this call is inside `if rank == 0`?), and "
        "restart the job"
    )
    assert describe_lost_ranks(Missing([], [], [2, 4]), error).startswith(
        "ranks 2, 4 are missing: they have gone before their first call of this library, or have not come to it yet. "
    )
    assert describe_lost_ranks(Missing([], [], []), error) == (
        "an exchange between ranks failed, though all of them are alive: RuntimeError: TIMEOUT self_rank = 0"
    )
    silent = describe_lost_ranks(Missing([], [4, 6], []), error)
    assert silent.startswith("ranks 4, 6 take no part in an exchange between ranks, though they are alive: they hang, ")
    assert silent.endswith("What this rank saw: RuntimeError: TIMEOUT self_rank = 0")
    assert describe_lost_ranks(Missing([3], [4], [5]), error).startswith("rank 3 is lost")

"""Rounds: rows are read ahead, few at a time, each once; whoever waits for rows learns of errors and of the end."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from paddle_flexckpt.catalog.errors import StoppedExchangeError
from paddle_flexckpt.communication.rounds import ROUNDS_HELD, HeldRows, Rounds, RowsReadAhead
from paddle_flexckpt.planning.exchange_plan import ExchangePlan
from paddle_flexckpt.planning.matching import Pieces


def pieces(*rows: tuple[int, int]) -> Pieces:
    """Pieces of four elements from source rows to target rows."""
    table = np.asarray(rows, dtype=np.int64).reshape(-1, 2)
    zero, one = np.zeros(len(table), dtype=np.int64), np.ones((len(table), 1), dtype=np.int64)
    return Pieces(table[:, 0], table[:, 1], 4 * one, zero, one, zero, one)


def test_no_more_rounds_are_read_than_may_be_held():
    read, may_read = [], threading.Semaphore(0)

    def load(number):
        read.append(number)
        may_read.release()
        return lambda row: np.full(4, number)

    rows = RowsReadAhead(10, load)
    assert not may_read.acquire(timeout=0.01)  # nobody has asked yet
    for number in range(10):
        assert rows.storages(number)(0)[0] == number
        for _ in range(2):
            # Nobody has gone on: at most the next one is read.
            assert len(read) <= number + ROUNDS_HELD
            rows.done(number)
    rows.close()
    assert read == list(range(10))


def test_what_reading_raises_both_users_get():
    def load(number):
        if number == 1:
            raise OSError(5, "broken")
        return lambda row: np.zeros(4)

    rows = RowsReadAhead(3, load)
    rows.storages(0)
    for _ in range(2):
        with pytest.raises(OSError, match="broken"):
            rows.storages(1)
    rows.storages(0)  # is still there
    rows.close()


def test_a_stop_wakes_whoever_waits_and_ends_the_thread():
    begun, go_on = threading.Event(), threading.Event()

    def load(number):
        begun.set()
        assert go_on.wait(30)
        return lambda row: np.zeros(4)

    before, outcome = threading.active_count(), []
    rows = RowsReadAhead(3, load)

    def wait():
        with pytest.raises(StoppedExchangeError):
            rows.storages(0)
        outcome.append("stopped")

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert begun.wait(30)
    rows.stop()
    waiting.join(30)
    assert outcome == ["stopped"]
    go_on.set()
    rows.close()
    assert threading.active_count() == before


def test_each_round_has_the_pieces_of_its_rows_in_their_order():
    plan = ExchangePlan(
        pieces((0, 0), (2, 1)), {1: pieces((2, 9), (0, 8), (2, 7))}, {3: pieces((5, 2), (4, 3))}, pieces()
    )
    rounds = Rounds(plan, np.asarray([0, 9, 1, 9, 0, 2]))
    assert (rounds.count, rounds.peers) == (2, ({1}, {3}))
    source = {row: np.arange(4, dtype=np.uint8) + 10 * row for row in (0, 2)}
    sent = [
        [(rank, [bytes(each) for each in stream]) for rank, stream in streams.items()]
        for streams in rounds.sending(HeldRows(source.__getitem__))
    ]
    assert sent == [
        [(1, [bytes([0, 1, 2, 3])])],
        [(1, [bytes([20, 21, 22, 23, 20, 21, 22, 23])])],
    ]
    target = {row: np.full(4, 99, dtype=np.uint8) for row in range(4)}
    received = []
    for streams in rounds.receiving(HeldRows(source.__getitem__), target.__getitem__, lambda row: np.dtype("uint8")):
        received.append(list(streams))
        for stream in streams.values():
            for buffer in stream:
                buffer[...] = 7
    assert received == [[3], [], [3]]
    assert [target[row].tolist() for row in range(4)] == [[0, 1, 2, 3], [20, 21, 22, 23], [7] * 4, [7] * 4]
    assert rounds.bytes_copied == 8

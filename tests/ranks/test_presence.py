"""Which ranks have gone: whom a look asks, and for how long."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest

from paddle_flexckpt.ranks import lost_ranks
from paddle_flexckpt.ranks.lost_ranks import DeathWatch, address_of, open_presence


class Clock:
    """The time, which passes while hosts do not answer."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(lost_ranks, "time", made)
    return made


def test_a_process_that_has_ended_has_gone(clock):
    with open_presence() as alive, open_presence() as ended:
        watch = DeathWatch([address_of(alive), address_of(ended), address_of(ended)])
        ended.close()
        assert watch.look({0, 1, 2}) == []  # it is not time yet
        clock.now += lost_ranks.FIRST_LOOK_SECONDS
        assert watch.look({0, 1, 2}) == [1, 2]
        clock.now += lost_ranks.LOOK_SECONDS
        assert watch.look({0, 2}) == [2]


def test_hosts_that_do_not_answer_keep_no_look_from_the_others(clock, monkeypatch):
    """A look asks for half a second; the next one goes on where it has ended."""
    asked = []

    def create_connection(place: tuple[str, int], timeout: float) -> Any:
        asked.append(place[1])
        if place[1] == 9:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")
        clock.now += timeout
        raise socket.timeout("timed out")

    monkeypatch.setattr(socket, "create_connection", create_connection)
    watch, gone = DeathWatch([f"host:{port}" for port in range(10)]), []
    while not gone:
        clock.now += lost_ranks.LOOK_SECONDS
        gone = watch.look({*range(10)})
        assert len(asked) < 20
    assert gone == [9] and asked[:10] == list(range(10))

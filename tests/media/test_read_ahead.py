"""Requests that bring announced ranges: joined, cut, several at a time, within a budget, and none left behind."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddle_flexckpt.media import read_ahead
from paddle_flexckpt.media.read_ahead import (
    LEAST_REQUEST,
    LONGEST_REQUEST,
    Budget,
    ReadAhead,
    Wanted,
    plan_for_readers,
    plan_requests,
)
from tests.property import examples

KIB, MIB = 1 << 10, 1 << 20
FILE_BYTES = 1 << 12


def wanted(*ranges: tuple[int, int, int]) -> Wanted:
    return Wanted(*np.asarray(ranges, dtype=np.int64).reshape(-1, 3).T)


def planned(*ranges: tuple[int, int, int], budget: Budget | None = None) -> list[tuple[int, int, int]]:
    requests = plan_requests(wanted(*ranges), budget or Budget())
    return list(zip(*(column.tolist() for column in requests[:3])))


# Planning


def test_neighbours_share_a_request_and_long_ranges_are_cut():
    assert planned((0, 100, 200), (0, 200, 300), (0, 300, 1000)) == [(0, 100, 1000)]
    long = 2 * LONGEST_REQUEST + 5
    assert planned((3, 7, 7 + long)) == [
        (3, 7, 7 + LONGEST_REQUEST),
        (3, 7 + LONGEST_REQUEST, 7 + 2 * LONGEST_REQUEST),
        (3, 7 + 2 * LONGEST_REQUEST, 7 + long),
    ]
    assert planned() == planned((0, 5, 5)) == []


def test_gaps_are_read_over_where_they_are_small_beside_what_is_wanted():
    def count(length: int, gap: int) -> tuple[int, int]:
        requests = plan_requests(wanted((0, 0, length), (0, length + gap, 2 * length + gap)))
        return len(requests.begin), requests.extra_bytes

    assert count(MIB, 256 * KIB) == (1, 256 * KIB)
    assert count(MIB, 256 * KIB + 1) == (2, 0)
    assert count(100 * KIB, 100 * KIB) == (1, 100 * KIB)
    assert count(100 * KIB, 100 * KIB + 1) == (2, 0)
    assert count(10, 16 * KIB) == (1, 16 * KIB)
    assert count(10, 16 * KIB + 1) == (2, 0)


def test_many_small_ranges_take_few_requests():
    """4,096 tensors of 16 KiB, every second of them wanted."""
    ranges = [(0, at * 32 * KIB, at * 32 * KIB + 16 * KIB) for at in range(4096)]
    requests = plan_requests(wanted(*ranges))
    assert len(requests.begin) == 4096 * 32 * KIB // LONGEST_REQUEST
    assert requests.extra_bytes == 4095 * 16 * KIB


def test_files_that_are_read_in_turns_are_joined_each():
    turns = [(file, at * KIB, (at + 1) * KIB) for at in range(100) for file in (0, 1)]
    assert planned(*turns) == [(0, 0, 100 * KIB), (1, 0, 100 * KIB)]


def test_what_is_wanted_at_a_time_fits_into_half_of_the_budget():
    """64 files in turns: 4 MiB of each would be four times the budget."""
    size = 64 * KIB
    turns = [(file, at * size, (at + 1) * size) for at in range(64) for file in range(64)]
    assert {end - begin for _, begin, end in planned(*turns)} == {512 * KIB}
    assert {end - begin for _, begin, end in planned(*turns, budget=Budget(bytes=MIB))} == {LEAST_REQUEST}
    # One after the other they fit.
    assert {end - begin for _, begin, end in planned(*sorted(turns))} == {LONGEST_REQUEST}
    assert {end - begin for _, begin, end in planned((0, 0, 1 << 30))} == {LONGEST_REQUEST}


def test_what_is_needed_first_is_asked_for_first():
    assert planned((0, 50 * MIB, 51 * MIB), (1, 0, 10), (0, 0, 10), (1, 20 * MIB, 21 * MIB)) == [
        (0, 50 * MIB, 51 * MIB), (1, 0, 10), (0, 0, 10), (1, 20 * MIB, 21 * MIB)
    ]  # fmt: skip


RANGES = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, FILE_BYTES - 1), st.integers(0, 300)).map(
        lambda each: (each[0], each[1], min(each[1] + each[2], FILE_BYTES))
    ),
    max_size=40,
)


def small_lengths(patch: pytest.MonkeyPatch) -> None:
    """Lengths that short files show."""
    for name, value in {"LONGEST_REQUEST": 512, "LEAST_REQUEST": 64, "GAP_BYTES": 100, "SMALL_GAP_BYTES": 10}.items():
        patch.setattr(read_ahead, name, value)


@settings(deadline=None)
@given(ranges=RANGES, ascending=st.booleans(), budget=st.integers(1, 5000))
def test_everything_that_is_wanted_is_asked_for(ranges, ascending, budget):
    ranges = sorted(ranges) if ascending else ranges
    with pytest.MonkeyPatch.context() as patch:
        small_lengths(patch)
        requests = plan_requests(wanted(*ranges), Budget(bytes=budget))
    asked, needed = np.zeros((2, 3, FILE_BYTES), dtype=bool)
    for file, begin, end in zip(*requests[:3]):
        assert 0 < end - begin <= 512
        asked[file, begin:end] = True
    for file, begin, end in ranges:
        needed[file, begin:end] = True
    assert asked[needed].all()
    total = int((requests.end - requests.begin).sum())
    assert requests.extra_bytes <= total
    if ascending:
        # Nothing is asked for twice, and what nobody wants is told.
        assert total == asked.sum() == needed.sum() + requests.extra_bytes


@settings(deadline=None)
@given(parts=st.lists(RANGES, max_size=5), budget=st.integers(1, 5000))
def test_several_readers_are_planned_as_each_alone(parts, budget):
    with pytest.MonkeyPatch.context() as patch:
        small_lengths(patch)
        alone = [plan_requests(wanted(*ranges), Budget(bytes=budget)) for ranges in parts]
        reader = np.repeat(np.arange(len(parts)), [len(ranges) for ranges in parts])
        everything = wanted(*(each for ranges in parts for each in ranges))
        together, whose = plan_for_readers(everything, reader, Budget(bytes=budget))
    for number, own in enumerate(alone):
        assert [column[whose == number].tolist() for column in together[:3]] == [each.tolist() for each in own[:3]]
    assert together.extra_bytes == sum(own.extra_bytes for own in alone)


# Bringing


class Source:
    """Files whose requests wait until they are let through; it knows which are under way.

    Attributes:
        most: The most requests, and bytes of them, that were under way at a time.
    """

    def __init__(self, waits: bool = False) -> None:
        self.files = np.random.default_rng(0).integers(0, 255, (3, FILE_BYTES), dtype=np.uint8)
        self.asked: list[tuple[int, int, int]] = []
        self.under_way: list[tuple[int, int, int]] = []
        self.most = [0, 0]
        self.fails: OSError | None = None
        self._changed = threading.Condition()
        self._open = not waits

    def read(self, file: int, begin: int, end: int, stop: threading.Event) -> bytes:
        with self._changed:
            self.asked.append((file, begin, end))
            self.under_way.append((file, begin, end))
            size = sum(end - begin for _, begin, end in self.under_way)
            self.most = [max(self.most[0], len(self.under_way)), max(self.most[1], size)]
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._open, 30)
            self.under_way.remove((file, begin, end))
            if self.fails is not None:
                raise self.fails
        return self.files[file, begin:end].tobytes()

    def wait_for(self, count: int) -> None:
        """Until so many requests are under way."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.under_way) == count, 30)

    def open(self) -> None:
        with self._changed:
            self._open = True
            self._changed.notify_all()


def read_all(ahead: ReadAhead, file: int, begin: int, end: int) -> bytes:
    """A range; nothing where it was not announced."""
    data = b""
    while begin + len(data) < end:
        buffer = bytearray(end - begin - len(data))
        count = ahead.read_into(file, memoryview(buffer), begin + len(data))
        if not count:
            return data
        data += buffer[:count]
    return data


def of(source: Source, *ranges: tuple[int, int, int], requests: int = 4, size: int = 1000) -> ReadAhead:
    with pytest.MonkeyPatch.context() as patch:
        small_lengths(patch)
        budget = Budget(requests, size)
        return ReadAhead(source.read, plan_requests(wanted(*ranges), budget), budget)


def no_threads() -> bool:
    return not [each for each in threading.enumerate() if each.name.startswith("flexckpt-ahead")]


@examples(60)
@given(ranges=RANGES, requests=st.integers(1, 5), size=st.integers(1, 3000), order=st.randoms(use_true_random=False))
def test_bytes_arrive_whatever_the_order_in_which_they_are_read(ranges, requests, size, order):
    source = Source()
    shuffled = list(ranges)
    if order.random() < 0.5:  # before there are threads: a draw may end the example
        order.shuffle(shuffled)
    with contextlib.closing(of(source, *ranges, requests=requests, size=size)) as ahead:
        for file, begin, end in shuffled:
            found = read_all(ahead, file, begin, end)
            assert found == source.files[file, begin : begin + len(found)].tobytes()
    assert source.most[0] <= requests
    assert source.most[1] <= max(size, 512) + (0 if shuffled == ranges else 512)
    assert no_threads()


def test_ranges_that_are_read_as_announced_are_each_asked_for_once():
    source = Source()
    ranges = [(file, at * 200, at * 200 + 190) for at in range(20) for file in (0, 1)]
    ahead = of(source, *ranges, size=1100)
    for file, begin, end in ranges:
        assert read_all(ahead, file, begin, end) == source.files[file, begin:end].tobytes()
    ahead.close()
    assert sorted(source.asked) == sorted(set(source.asked))
    assert len(source.asked) == 2 * -(-3990 // 256)


@pytest.mark.parametrize(("requests", "size", "under_way"), [(3, 10_000, 3), (16, 1100, 2), (16, 10, 1)])
def test_no_more_is_under_way_than_the_budget_allows(requests, size, under_way):
    source = Source(waits=True)
    ahead = of(source, (0, 0, 4000), requests=requests, size=size)
    source.wait_for(under_way)
    source.open()
    assert read_all(ahead, 0, 0, 4000) == source.files[0, :4000].tobytes()
    ahead.close()
    assert source.most[0] == under_way
    assert source.most[1] <= max(size, 512)


def test_bytes_that_have_arrived_count_until_they_are_read():
    source = Source()
    first, second, third = (0, 0, 512), (1, 0, 512), (2, 0, 512)
    with contextlib.closing(of(source, first, second, third, size=1024)) as ahead:
        for file, begin, _ in (first, second):
            assert read_all(ahead, file, begin, 1) == source.files[file, :1].tobytes()
        # Both have arrived. Sorted: requests under way at a time begin in any order.
        assert sorted(source.asked) == [first, second]
        assert read_all(ahead, 0, 1, 512) == source.files[0, 1:512].tobytes()
        assert read_all(ahead, 2, 0, 1) == source.files[2, :1].tobytes()
        assert sorted(source.asked) == [first, second, third]


def test_what_is_passed_over_makes_room():
    """Four ranges fill the budget and are never read; the others come nonetheless, in order."""
    source = Source()
    ranges = [(file, at * 1000, at * 1000 + 250) for file in (0, 1) for at in range(4)]
    ahead = of(source, *ranges, size=1000)
    for file, begin, end in ranges[4:]:
        assert read_all(ahead, file, begin, end) == source.files[file, begin:end].tobytes()
    # What was given up is not brought again.
    assert read_all(ahead, *ranges[0]) in (b"", source.files[0, :250].tobytes())
    ahead.close()
    assert len(source.asked) == 8


def test_an_error_comes_with_the_bytes_that_it_is_about():
    source = Source()
    source.fails = OSError("injected")
    ahead = of(source, (0, 0, 100), (0, 1000, 1100))
    for begin in (0, 1000):
        with pytest.raises(OSError, match="injected"):
            read_all(ahead, 0, begin, begin + 100)
        # Whoever asks again asks the medium.
        assert read_all(ahead, 0, begin, begin + 100) == b""
    ahead.close()


def test_a_file_that_has_become_shorter():
    source = Source()
    ahead = ReadAhead(lambda *_: b"abc", plan_requests(wanted((0, 0, 10))), Budget())
    buffer = bytearray(10)
    assert ahead.read_into(0, memoryview(buffer), 0) == 3
    assert ahead.read_into(0, memoryview(buffer), 3) == 0
    ahead.close()
    assert source.asked == []


def test_closing_waits_for_what_is_under_way_and_begins_nothing():
    source = Source(waits=True)
    stopped = threading.Event()
    begun = threading.Barrier(3, timeout=30)

    def read(file: int, begin: int, end: int, stop: threading.Event) -> bytes:
        begun.wait()
        # As a try that waits for the next one.
        stop.wait(30)
        stopped.set()
        return source.read(file, begin, end, stop)

    with pytest.MonkeyPatch.context() as patch:
        small_lengths(patch)
        ahead = ReadAhead(read, plan_requests(wanted((0, 0, 4000))), Budget(2, 4000))
    begun.wait()
    source.open()
    ahead.close()
    assert stopped.is_set()
    assert len(source.asked) == 2
    assert source.under_way == []
    assert no_threads()
    assert read_all(ahead, 0, 0, 10) == b""
    ahead.close()

"""Read ahead: fetch byte ranges that will be read soon, several at a time, within a budget.

A request for bytes of an object takes tens of milliseconds, whatever its length. So near neighbours share one, long
ranges are cut into several, and many are under way at the same time. Only announced ranges are fetched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# The longest request, and the shortest that long ones are cut down to where many files are read in turns.
LONGEST_REQUEST = 4 << 20
LEAST_REQUEST = 256 << 10
# Gaps up to this are fetched too, as they take less time than a request; but at most as many bytes of a file as are
# needed of it, apart from a small amount that is allowed in any case.
GAP_BYTES = 256 << 10
SMALL_GAP_BYTES = 16 << 10


@dataclass(frozen=True)
class Budget:
    """Limits of concurrent requests and of their bytes.

    Attributes:
        requests: The most requests under way.
        bytes: The most bytes that are requested and not read yet. One request is made whatever its size, and one more
            for bytes that are read out of turn.
    """

    requests: int = 16
    bytes: int = 64 << 20


class Wanted(NamedTuple):
    """Byte ranges in the order in which they will be read: the file's number, the first byte, the first one beyond."""

    file: np.ndarray
    begin: np.ndarray
    end: np.ndarray


class Requests(NamedTuple):
    """The requests that bring ranges, in the order of need, and how many of their bytes no range includes."""

    file: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    extra_bytes: int


def plan_requests(wanted: Wanted, budget: Budget = Budget()) -> Requests:
    """Join near neighbours of a file, and cut long ranges.

    Where the ranges alternate between many files, requests are shorter, to fit into half of the budget at a time.
    """
    return plan_for_readers(wanted, np.zeros(len(wanted.file), dtype=np.int64), budget)[0]


def plan_for_readers(wanted: Wanted, reader: np.ndarray, budget: Budget = Budget()) -> tuple[Requests, np.ndarray]:
    """Plan the requests of several readers at once, each as :func:`plan_requests` does its own.

    Ranges that are near each other in a file become stretches. The stretches are laid end to end on one line, which is
    cut into requests. The requests of a reader are halved until those that it holds at a time fit into half of its
    budget. A load has one reader; a rehearsal has one for each rank. ``reader``, int64 and rising, is that of each
    range; the second result is that of each request.
    """
    full = np.flatnonzero(wanted.end > wanted.begin)
    if not len(full):
        return Requests(*(np.empty(0, dtype=np.int64),) * 3, 0), np.empty(0, dtype=np.int64)
    length, reader = (wanted.end - wanted.begin)[full], np.asarray(reader)[full]
    order = np.lexsort((wanted.file[full], reader))
    # The bytes that have been read before a range is.
    turn, length = (np.cumsum(length) - length)[order], length[order]
    file, begin, end = (np.asarray(column)[full][order] for column in wanted)
    rises = (reader[1:] == reader[:-1]) & (file[1:] == file[:-1]) & (begin[1:] >= begin[:-1])
    # Runs of rising ranges, laid end to end, so that one sweep finds how far each has advanced.
    run = np.flatnonzero(np.concatenate(([True], ~rises)))
    reach = np.maximum.reduceat(end, run) - begin[run]
    away = (np.cumsum(reach) - reach - begin[run])[np.cumsum(np.concatenate(([0], ~rises)))]
    gap = (begin + away)[1:] - np.maximum.accumulate(end + away)[:-1]
    near = rises & (gap <= np.minimum(GAP_BYTES, np.maximum(length[:-1], SMALL_GAP_BYTES)))
    first = np.flatnonzero(np.concatenate(([True], ~near)))
    starts, lengths = begin[first], np.maximum.reduceat(end, first) - begin[first]
    # All stretches laid end to end: what lies on that line ascends.
    line = np.cumsum(lengths) - lengths
    stretch = np.cumsum(np.concatenate(([0], ~near)))
    shift = line[stretch] - starts[stretch]
    begins, reached = begin + shift, np.maximum.accumulate(end + shift)
    longest = np.full(int(reader[-1]) + 1, min(LONGEST_REQUEST, budget.bytes), dtype=np.int64)
    while True:
        step = longest[reader[first]]
        counts = -(-lengths // step)
        of = np.repeat(np.arange(len(first)), counts)
        at = line[of] + (np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)) * step[of]
        stop = np.minimum(at + step[of], line[of] + lengths[of])
        one, last = np.searchsorted(reached, at, side="right"), np.searchsorted(begins, stop, side="left") - 1
        need = turn[one] + np.maximum(0, at - begins[one])
        done = np.maximum(need, turn[last] + np.minimum(length[last], stop - begins[last]))
        who = reader[first][of]
        much = _most_at_a_time(need, done, stop - at, who, len(longest)) > budget.bytes // 2
        much &= longest > LEAST_REQUEST
        if not much.any():
            break
        longest[much] //= 2
    by_need = np.lexsort((need, who))
    at, stop = (each + (starts - line)[of] for each in (at, stop))
    extra = int(np.maximum(0, begins[1:] - reached[:-1]).sum())
    return Requests(file[first][of][by_need], at[by_need], stop[by_need], extra), who[by_need]


def _most_at_a_time(
    need: np.ndarray, done: np.ndarray, length: np.ndarray, reader: np.ndarray, readers: int
) -> np.ndarray:
    """Return int64 per reader: the most bytes held at any time.

    A request is held from the time when its first byte is needed to the time when its last byte is read.
    """
    times, change = np.concatenate((done, need)), np.concatenate((-length, length))
    # Leaving bytes make room for arriving ones at the same time.
    order = np.lexsort((times, np.concatenate((reader, reader))))
    # A reader's changes add up to 0, so the next one's begin at 0.
    held = np.cumsum(change[order])
    edges = np.flatnonzero(np.diff(reader, prepend=-1))
    most = np.zeros(readers, dtype=np.int64)
    most[reader[edges]] = np.maximum.reduceat(held, 2 * edges)
    return most


class _Request:
    """The bytes of one request, from the request until they have been read."""

    __slots__ = ("arrived", "begin", "end", "file", "future")

    def __init__(self, file: int, begin: int, end: int) -> None:
        self.file, self.begin, self.end = file, begin, end
        self.future: Future[bytes] | None = None
        self.arrived = False

    @property
    def length(self) -> int:
        """Return how many bytes it has."""
        return self.end - self.begin


# Reads bytes of a file, by its number, from one to another; makes no more tries once the event is set.
ReadBytes = Callable[[int, int, int, threading.Event], bytes]


class ReadAhead:
    """A reader of announced ranges: it requests them in order, as far ahead of its caller as the budget allows.

    A range that the caller reads before its turn is requested at once. Ranges that it skipped are
    dropped when their memory is needed.
    """

    def __init__(self, read: ReadBytes, requests: Requests, budget: Budget) -> None:
        """Begin."""
        self._read, self._budget = read, budget
        columns = (column.tolist() for column in requests[:3])
        # In the order of need; ranges that have been read or skipped are removed.
        self._waiting = dict.fromkeys(_Request(*each) for each in zip(*columns))
        self._of_file: dict[int, dict[_Request, None]] = {}
        for request in self._waiting:
            self._of_file.setdefault(request.file, {})[request] = None
        self._held: dict[_Request, None] = {}
        # Requests that have been read to their end, or skipped: they are dropped when their room is needed.
        self._passed: dict[_Request, None] = {}
        self._held_bytes = self._running = 0
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(budget.requests, thread_name_prefix="flexckpt-ahead")
        with self._lock:
            self._start_more()

    def read_into(self, file: int, buffer: memoryview, offset: int) -> int:
        """Fill the beginning of a buffer with announced bytes; return how many, 0 if they were not announced.

        Raises:
            OSError: The request failed for good.
        """
        request = self._find(file, offset)
        if request is None or request.future is None:
            return 0
        try:
            data = request.future.result()
        except BaseException:
            self._drop(request)
            raise
        start = offset - request.begin
        count = max(0, min(len(buffer), len(data) - start))
        buffer[:count] = memoryview(data)[start : start + count]
        if not count:  # the file has become shorter, which the caller finds out
            self._drop(request)
        elif start + count == request.length:
            with self._lock:
                self._passed[request] = None
                self._start_more()
        return count

    def _find(self, file: int, offset: int) -> _Request | None:
        """Return the request that has a byte, started; skipped ones of the file may then be dropped."""
        with self._lock:
            passed = []
            for request in self._of_file.get(file, ()):
                if request.begin <= offset < request.end:
                    break
                passed.append(request)
            else:
                return None
            self._passed.update(dict.fromkeys(each for each in passed if each in self._held))
            if request.future is None:
                self._make_room(request, [*self._passed, *self._held])
                self._start(request)
            self._start_more()
            return request

    def _drop(self, request: _Request) -> None:
        with self._lock:
            self._forget(request)
            self._start_more()

    def _forget(self, request: _Request) -> None:
        self._waiting.pop(request, None)
        self._of_file[request.file].pop(request, None)
        self._passed.pop(request, None)
        if request not in self._held or request.future is None:
            return
        del self._held[request]
        if request.future.cancel():
            self._running -= 1
        elif not request.arrived:
            # It is on its way, and counts until it arrives.
            return
        self._held_bytes -= request.length

    def _start_more(self) -> None:
        while self._waiting and self._running < self._budget.requests and not self._stop.is_set():
            request = next(iter(self._waiting))
            self._make_room(request, list(self._passed))
            if self._held and self._held_bytes + request.length > self._budget.bytes:
                return
            self._start(request)

    def _make_room(self, request: _Request, others: list[_Request]) -> None:
        """Drop arrived bytes of others, one by one, until a request fits into the budget."""
        for each in others:
            if self._held_bytes + request.length <= self._budget.bytes:
                return
            if each.arrived:
                self._forget(each)

    def _start(self, request: _Request) -> None:
        del self._waiting[request]
        self._held[request] = None
        self._held_bytes += request.length
        self._running += 1
        request.future = self._pool.submit(self._bring, request)

    def _bring(self, request: _Request) -> bytes:
        try:
            return self._read(request.file, request.begin, request.end, self._stop)
        finally:
            with self._lock:
                request.arrived = True
                self._running -= 1
                if request not in self._held:
                    self._held_bytes -= request.length
                self._start_more()

    def close(self) -> None:
        """Request nothing more, and wait for the requests that are under way."""
        self._stop.set()
        with self._lock:
            for request in [*self._waiting, *self._held]:
                self._forget(request)
        self._pool.shutdown(wait=True)

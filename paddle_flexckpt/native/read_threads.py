"""Read threads: the parts of a large read are carried out by the calling thread and a few more at the same time.

Reading, hashing and copying all release the interpreter's lock. A thread that hashes the data that it has just read
finds it in its processor's cache, which a separate thread for hashing would not.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

# Ranks of a host share its processors and its memory's bandwidth, which a few threads saturate.
MOST_THREADS = 4


class ReadThreads:
    """The threads of one reader. They are started when first needed and end when the reader closes."""

    def __init__(self, several: bool = True) -> None:
        """Start nothing yet. ``several``: whether there are more threads than the caller's, up to one a processor."""
        self._helpers = min(MOST_THREADS, _processors()) - 1 if several else 0
        self._executor: ThreadPoolExecutor | None = None
        # Called after each part, by the thread that has carried it out; its exception counts as that part's error.
        self.after: Callable[[], None] | None = None

    def each(self, work: Callable[[int], None], count: int) -> None:
        """Call a function with every number below ``count``, begun in this order; return when all calls have returned.

        After an error no more calls begin. The error of the lowest number is raised, so that it does not depend on the
        order of threads.
        """
        numbers, errors = iter(range(count)), dict[int, BaseException]()

        def go_on() -> None:
            number = -1
            try:
                for number in numbers:
                    work(number)
                    if self.after is not None:
                        self.after()
            except BaseException as error:
                deque(numbers, maxlen=0)
                errors[number] = error

        others: list[Future[None]] = []
        helpers = min(self._helpers, count - 1)
        if helpers > 0:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self._helpers, thread_name_prefix="flexckpt-read")
            others = [self._executor.submit(go_on) for _ in range(helpers)]
        go_on()
        wait(others)
        if errors:
            raise errors[min(errors)]

    def close(self) -> None:
        """Wait for the threads' end; a second call does nothing."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None


def _processors() -> int:
    """Return how many processors this process may use; all processors where the system does not report it."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class SpareMemory:
    """Buffers of one size for threads: as many as there are threads at work."""

    def __init__(self, nbytes: int) -> None:
        """Allocate no buffer yet."""
        self._nbytes = nbytes
        self._spare: list[np.ndarray] = []

    @contextlib.contextmanager
    def use(self) -> Iterator[np.ndarray]:
        """Keep a buffer for the time of a with statement: uint8, of any values."""
        try:
            memory = self._spare.pop()
        except IndexError:  # testing first would not be safe: another thread may take the last one
            memory = np.empty(self._nbytes, dtype=np.uint8)
        yield memory
        self._spare.append(memory)

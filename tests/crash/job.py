"""The ranks of a job as threads of which one runs at a time; a seed decides which is next.

With one thread running, the calls that ranks make have an order, and the same seed gives the same order again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from paddle_flexckpt.catalog import LostRankError
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.ranks.transport import Transport

# A rank that waits for so long waits for one that is stuck in something else than this job.
PATIENCE_SECONDS = 300.0


class Stopped(BaseException):
    """Signal that the process is dead. Not an Exception, so that nobody mistakes it for an error to be handled."""


class Interrupted(KeyboardInterrupt):
    """Signal the user's Ctrl-C, injected."""


class Job:
    """Hold some ranks and the order in which they run.

    Attributes:
        size: Number of ranks.
        running: The rank that runs now.
        hang: Whether a rank that waits for a dead one waits until it is killed itself, instead of seeing an error.
        slept: Seconds that ranks have slept, all together; nobody really does.
        writers: The background writer whose code a rank runs now, by rank; each is a process of its own.
    """

    def __init__(self, size: int, seed: int | None = None) -> None:
        """Args: size: number of ranks. seed: of the order; None changes ranks at collectives only."""
        self.size = size
        self.running = 0
        self.hang = False
        self.slept = 0.0
        self.writers: dict[int, int] = {}
        self._writers = 0
        self._random = Random(seed) if seed is not None else None
        self._changed = threading.Condition()
        self._ready = set(range(size))
        self._ended: set[int] = set()
        # Ranks that are in a collective, by that of their group, and those of them for which it has failed.
        self._gathering: dict[int, object] = {}
        self._failed: set[int] = set()
        # Those that have left a group, and what is known of what became of it.
        self._left: dict[object, set[int]] = {}
        self._told: dict[object, bytes] = {}
        # The rank that goes on when no other can.
        self._last: int | None = None
        self._rounds: dict[object, dict[int, bytes]] = {}
        self._threads: dict[int, int] = {}

    def run(self, function: Callable[[Communicator], Any]) -> list[Any]:
        """Call a function with each rank's communicator; return results, or what was raised, by rank."""
        outcomes: list[Any] = [None] * self.size

        def work(rank: int) -> None:
            comm = JobCommunicator(self, rank)
            try:
                self._begin(rank)
                outcomes[rank] = function(comm)
            except (Exception, Stopped, Interrupted) as error:  # the caller gets it as the rank's outcome
                outcomes[rank] = error
            finally:
                self._end(rank)

        if self.size == 1:
            work(0)
            return outcomes
        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes

    def turn(self) -> None:
        """Offer a place where another rank may go on instead of the one that runs."""
        rank = self._threads.get(threading.get_ident())
        # A thread that the library started goes with its rank.
        if self._random is None or rank is None or len(self._ready) == 1:
            return
        with self._changed:
            self._hand_over()
            self._wait(rank)

    def fail_others(self) -> None:
        """Let the ranks in a collective see it fail, whether all have come to it or not, and go on to their ends.

        Those that see collectives fail, by a limit of time for one, see all later ones fail. The rank that runs goes on
        after them, and does not know.
        """
        with self._changed:
            rank = self._last = self.running
            self._failed |= {*self._gathering}
            self._ready |= self._failed - self._ended
            while self._failed - self._ended:
                self._hand_over()
                self._wait(rank)
            self._last = None

    def rest(self, seconds: float) -> None:
        """Sleep: others go on meanwhile."""
        rank = self._threads.get(threading.get_ident())
        with self._changed:
            self.slept += seconds
            others = sorted(self._ready - {rank, self._last})
            if others:
                self.running = self._random.choice(others) if self._random else others[0]
                self._changed.notify_all()
                self._wait(rank)
            elif self.hang:
                raise Stopped("killed while it waited for a rank that is dead")

    def new_writer(self) -> int:
        """Return the number of a new background writer, from 1."""
        self._writers += 1
        return self._writers

    @contextlib.contextmanager
    def writing(self, rank: int, writer: int) -> Iterator[None]:
        """Mark a time in which a rank runs the code of a background writer."""
        self.writers[rank] = writer
        try:
            yield
        finally:
            del self.writers[rank]

    def gather(self, number: int, rank: int, payload: bytes, group: object = None) -> list[bytes]:
        """Do one collective of all ranks, or of their writers for one save; return every rank's payload."""
        with self._changed:
            answers = self._rounds.setdefault((group, number), {})
            if rank not in self._failed:
                answers[rank] = payload
                if len(answers) == self.size:
                    self._ready |= answers.keys() - self._ended
                elif not self._gone(group) - answers.keys():
                    self._await(rank, group)
            if rank in self._failed or len(answers) < self.size:
                if self.hang:
                    raise Stopped("killed while it waited for a rank that is dead")
                raise LostRankError(f"collective {number}: only ranks {sorted(answers)} take part")
            return [answers[other] for other in range(self.size)]

    def hear(self, group: object, number: int, rank: int, source: int) -> bytes | None:
        """Return what another rank's writer tells all; None if it ends before."""
        with self._changed:
            answers = self._rounds.setdefault((group, number), {})
            while source not in answers and source not in self._gone(group) and rank not in self._failed:
                self._await(rank, group)
            if source in answers and rank not in self._failed:
                return answers[source]
            if self.hang:
                raise Stopped("killed while it waited for a rank that is dead")
            return None

    def tell(self, group: object, number: int, rank: int, payload: bytes) -> None:
        """Tell the other ranks' writers, whether they are there or not."""
        with self._changed:
            self._rounds.setdefault((group, number), {})[rank] = payload
            self._wake(group)

    def leave(self, group: object, rank: int) -> None:
        """Take the writer of a rank from the group of a save: it is done, or dead."""
        with self._changed:
            self._left.setdefault(group, set()).add(rank)
            self._wake(group)

    def _gone(self, group: object) -> set[int]:
        return self._ended | self._left.get(group, set())

    def _wake(self, group: object) -> None:
        self._ready |= {rank for rank, other in self._gathering.items() if other == group} - self._ended

    def _await(self, rank: int, group: object) -> None:
        """Let others run until something has happened in a group."""
        self._ready.discard(rank)
        self._gathering[rank] = group
        self._hand_over()
        self._wait(rank)
        del self._gathering[rank]

    def _begin(self, rank: int) -> None:
        with self._changed:
            self._threads[threading.get_ident()] = rank
            self._wait(rank)

    def _end(self, rank: int) -> None:
        with self._changed:
            self._ended.add(rank)
            # Who waits for this one learns that it is gone.
            self._ready = set(range(self.size)) - self._ended
            self._hand_over()

    def _hand_over(self) -> None:
        if self._ready:
            choices = sorted(self._ready - {self._last}) or [self._last]
            self.running = self._random.choice(choices) if self._random else choices[0]
            self._changed.notify_all()

    def _wait(self, rank: int) -> None:
        if not self._changed.wait_for(lambda: self.running == rank, PATIENCE_SECONDS):
            raise TimeoutError(f"rank {rank} waits for rank {self.running}, which does not go on")


class JobCommunicator(Communicator):
    """Communicate for one rank.

    Attributes:
        job: The job that the rank is of.
    """

    def __init__(self, job: Job, rank: int) -> None:
        """Args: job: the job. rank: this rank."""
        super().__init__(tuple(range(job.size)), rank)
        self.job = job

    def _all_gather(self, payload: bytes) -> list[bytes]:
        return self.job.gather(self.collectives, self.position, payload)

    def open_transport(self) -> Transport:
        raise NotImplementedError("these jobs exchange no tensors")

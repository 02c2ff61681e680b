"""Simulate very many seeds: in processes of which none loses what the others have found, for hours.

A run that does not end, or that ends its process, is a violation like any other. What has been found is printed at
once; SIGINT and SIGTERM end a campaign after the runs that are under way, with the totals so far.

Tested in tests/simulation/test_campaign.py.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import hashlib
import multiprocessing
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any

from tests.simulated.cluster import Cluster, Outcome
from tests.simulated.drawing import draw
from tests.simulated.remembered import Memory, remembering
from tests.simulated.scenario import DAY, Case
from tests.simulated.scheduler import Scheduler
from tests.simulated.tasks import StuckError

# A run takes a second or two. In twice the time its process is ended, should the run not end for being told.
RUN_SECONDS = 60.0
# Paddle keeps a few hundred bytes of each tensor that is made, so processes are replaced.
RUNS_OF_A_PROCESS = 20_000
_TELL_SECONDS, _PROGRESS_SECONDS = 5.0, 600.0
_SHOWN, _SHOWN_CHARACTERS, _KEPT_CHARACTERS = 5, 600, 50_000
_FINGERPRINTS = 4
# Of each task's stack, in what is said of a run that does not end.
_FRAMES = 25
# One of so many seeds is simulated without a memory too.
REPEATED = 250
# So many processes that end at their first seed are no accident.
_MOST_FAILED = 5


@dataclass
class Totals:
    """Hold what many runs have shown; ``is_stopped`` tells that somebody has ended them."""

    runs: int = 0
    seconds: float = 0.0
    processor: float = 0.0
    commits: int = 0
    restores: int = 0
    readings: int = 0
    late_commits: int = 0
    repeated: int = 0
    is_stopped: bool = False
    kinds: Counter[int] = field(default_factory=Counter)
    struck: Counter[str] = field(default_factory=Counter)
    states: set[tuple[str, ...]] = field(default_factory=set)
    violated: list[tuple[int, str]] = field(default_factory=list)
    fingerprints: dict[int, str] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        """Count a run."""
        self.runs += 1
        self._keep({outcome.case.scenario.seed: outcome.fingerprint})
        self.seconds += outcome.seconds
        self.commits += outcome.commits
        self.restores += outcome.restores
        self.readings += outcome.readings
        self.late_commits += outcome.late_commits
        self.kinds[len(outcome.struck)] += 1
        self.struck.update(outcome.struck)
        self.states |= outcome.states
        if outcome.violations:
            self.violate(outcome.case.scenario.seed, str(outcome.violations[0]))

    def violate(self, seed: int, text: str) -> None:
        """Note a violation, and say so at once."""
        self.violated.append((seed, text[:_KEPT_CHARACTERS]))
        print(f"VIOLATION, seed {seed}: {text[:_KEPT_CHARACTERS]}", file=sys.stderr, flush=True)

    def merge(self, other: Totals) -> None:
        """Add another's counts."""
        for name in ("runs", "seconds", "processor", "commits", "restores", "readings", "late_commits", "repeated"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.kinds.update(other.kinds)
        self.struck.update(other.struck)
        self.states |= other.states
        self.violated += other.violated
        self._keep(other.fingerprints)

    def _keep(self, fingerprints: dict[int, str]) -> None:
        """Keep those of the first seeds."""
        self.fingerprints.update(fingerprints)
        while len(self.fingerprints) > _FINGERPRINTS:
            del self.fingerprints[max(self.fingerprints)]

    def fingerprint(self) -> str:
        """Return what the first seeds' stories have in common with another process's only if all are the same."""
        return hashlib.sha256(repr(sorted(self.fingerprints.items())).encode()).hexdigest()[:32]

    def summary(self) -> str:
        """Return what is printed in the end."""
        many = sum(count for kinds, count in self.kinds.items() if kinds >= 5)
        coordinator = {(state[0], state[1]) for state in self.states}
        each, struck = 1000 * self.processor / max(self.runs, 1), sum(self.struck.values())
        lines = [
            f"{self.runs} runs, {self.seconds / DAY:.0f} simulated days",
            f"{self.processor / 3600:.2f} hours of processor time ({each:.0f} ms each)",
            f"{self.commits} checkpoints committed, {self.restores} restores, {self.readings} readings by others",
            f"{self.repeated} runs simulated a second time, without what was remembered",
            f"{self.late_commits} commits without their files, by savers stopped after the last look at their lease",
            f"faults that struck: {struck} of {len(self.struck)} kinds; runs with 5 kinds or more: {many}",
            *(f"  {count:7d} {kind}" for kind, count in self.struck.most_common()),
            f"protocol states in which something struck: {len(self.states)}; by fault and phase of the coordinator: "
            f"{len(coordinator)}",
            f"fingerprint of the first stories: {self.fingerprint()}",
            f"violations: {len(self.violated)}",
            *(f"  seed {seed}: {text[:_SHOWN_CHARACTERS]}" for seed, text in sorted(self.violated)[:_SHOWN]),
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class Task:
    """Hold what all workers of a campaign are told.

    Attributes:
        until: When the last run may begin.
        stop: Whether the first violation ends the campaign.
        run_seconds: How long a run may take.
        repeated: One of so many seeds is simulated without a memory too.
        wanted: Which cases are simulated. None: all.
        cases: The case of a seed. None: as it is drawn.
    """

    end: int
    stride: int
    until: float
    stop: bool
    run_seconds: float
    repeated: int = REPEATED
    wanted: Callable[[Case], bool] | None = None
    cases: Callable[[int], Case] | None = None


class Campaign:
    """Hold workers, each with its share of the seeds, and what they have found."""

    def __init__(self, task: Task) -> None:
        self.totals = Totals()
        self.is_stopping = False
        self._task, self._failed = task, 0
        self._workers: dict[Connection, Worker] = {}
        # By share: its first seed that is not done.
        self._following: dict[int, int] = {}

    def run(self, first: int) -> Totals:
        """Simulate the seeds from the first one on."""
        told = time.monotonic()
        with interrupts(self.stop):
            for number in range(self._task.stride):
                self._begin(first + number)
            while self._workers:
                for connection in wait(list(self._workers), timeout=_PROGRESS_SECONDS):
                    assert isinstance(connection, Connection)
                    self._hear(connection)
                if time.monotonic() - told > _PROGRESS_SECONDS:
                    told = time.monotonic()
                    print(f"so far: {self._progress()}", flush=True)
        if self.is_stopping:
            print(f"stopped: {self._progress()}", flush=True)
        return self.totals

    def stop(self) -> None:
        """Begin no more runs."""
        self.is_stopping = self.totals.is_stopped = True
        for worker in self._workers.values():
            worker.process.terminate()

    def _progress(self) -> str:
        following = min(self._following.values())
        return f"{self.totals.runs} runs, {len(self.totals.violated)} violations; --first {following} goes on"

    def _begin(self, seed: int) -> None:
        self._following[seed % self._task.stride] = seed
        if seed < self._task.end and not self.is_stopping:
            worker = Worker(self._task, seed)
            self._workers[worker.connection] = worker

    def _hear(self, connection: Connection) -> None:
        worker = self._workers[connection]
        try:
            found, following, worker.is_done = connection.recv()
            self._following[following % self._task.stride] = following
            self.totals.merge(found)
            return
        except EOFError:
            del self._workers[connection]
        worker.process.join()
        status, seed = worker.process.exitcode, worker.current.value
        self._failed = self._failed + 1 if status and seed == worker.first else 0
        if self._failed == _MOST_FAILED:
            raise RuntimeError(f"{_MOST_FAILED} processes one after the other have ended at their first seed")
        if status:
            self.totals.violate(seed, f"the process ended with status {status} (what it said is above)")
        if not worker.is_done:
            self._begin(seed + self._task.stride)


class Worker:
    """Stand for a process that simulates seeds.

    Attributes:
        first: Its first seed.
        current: The seed that it simulates now.
        is_done: Whether no other one has to go on with its seeds.
    """

    def __init__(self, task: Task, seed: int) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe(duplex=False)
        self.current: Any = context.Value("q", seed, lock=False)
        self.first, self.is_done = seed, False
        self.process = context.Process(target=_work, args=(theirs, self.current, task, seed))
        self.process.start()
        theirs.close()


def _work(connection: Connection, current: Any, task: Task, first: int) -> None:
    gc.collect()
    gc.freeze()  # what was imported is not looked through again and again
    asked: list[bool] = []
    totals, begin, processor = Totals(), time.monotonic(), time.process_time()
    # A mistake in the library may be one of what is remembered.
    with interrupts(lambda: asked.append(True)), contextlib.nullcontext() if task.stop else remembering() as memory:
        for count, seed in enumerate(range(first, task.end, task.stride), 1):
            current.value = seed
            case = (task.cases or draw)(seed)
            if task.wanted is None or task.wanted(case):
                simulate_one(case, totals, task.run_seconds, memory, task.repeated)
            is_last = bool(asked) or (task.stop and bool(totals.violated)) or time.monotonic() > task.until
            if is_last or count >= RUNS_OF_A_PROCESS or time.monotonic() > begin + _TELL_SECONDS:
                totals.processor = time.process_time() - processor
                connection.send((totals, seed + task.stride, is_last))
                if is_last or count >= RUNS_OF_A_PROCESS:
                    return
                totals, begin, processor = Totals(), time.monotonic(), time.process_time()
        totals.processor = time.process_time() - processor
        connection.send((totals, task.end, True))


def simulate_one(
    case: Case,
    totals: Totals,
    run_seconds: float = RUN_SECONDS,
    memory: Memory | None = None,
    repeated: int = REPEATED,
) -> None:
    """Simulate a case.

    What is seen with a memory counts if it is seen without one too; of runs in which nothing is, some are repeated so.
    """
    seed, found = case.scenario.seed, _run(case, run_seconds)
    if memory is not None and isinstance(found, Outcome) and (found.violations or seed % repeated == 0):
        memory.is_on = False
        again = _run(case, run_seconds)
        memory.is_on = True
        totals.repeated += 1
        if isinstance(again, Outcome) and again.fingerprint != found.fingerprint:
            totals.violate(seed, f"with what is remembered it is another story: {found.violations}")
        found = again
    if isinstance(found, Outcome):
        totals.add(found)
    else:
        totals.runs += 1
        totals.violate(seed, found)


def _run(case: Case, run_seconds: float) -> Outcome | str:
    """Simulate a case; return what is wrong, if it does not end in so many seconds or raises something."""
    cluster = Cluster(case)
    verdicts: list[str] = []

    def end(_: int, frame: Any) -> None:
        scheduler = cluster.scheduler
        scheduler.switches = sys.maxsize  # more than it may make
        verdicts.append(f"the run has not ended within {run_seconds} s of real time: {stacks(scheduler, frame)}")
        raise StuckError(verdicts[0])

    before = signal.signal(signal.SIGALRM, end)
    faulthandler.dump_traceback_later(2 * run_seconds, exit=True, file=sys.__stderr__)
    signal.setitimer(signal.ITIMER_REAL, run_seconds)
    try:
        outcome = cluster.run()
        return verdicts[0] if verdicts else outcome
    except Exception:
        return verdicts[0] if verdicts else f"the simulation itself failed:\n{traceback.format_exc()}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


def stacks(scheduler: Scheduler, frame: FrameType) -> str:
    """Return in which frames all tasks are, while one of them, or none, runs in ``frame``."""
    found = {"" if scheduler.running is None else repr(scheduler.running): frame}
    tasks = [task for process in scheduler.processes for task in process.tasks if not task.ended]
    found.update({repr(task): task.greenlet.gr_frame for task in tasks if task.greenlet.gr_frame is not None})
    alike: dict[str, list[str]] = {}
    for name, each in found.items():
        alike.setdefault("".join(traceback.format_stack(each)[-_FRAMES:]), []).append(name)
    return f"at {scheduler.now:.3f} s\n" + "\n".join(f"{', '.join(names)}:\n{text}" for text, names in alike.items())


@contextlib.contextmanager
def interrupts(note: Callable[[], object]) -> Iterator[None]:
    """Have a function called at the first SIGINT, and at SIGTERM; a second SIGINT does what it always does."""
    numbers = signal.SIGINT, signal.SIGTERM
    before = {number: signal.getsignal(number) for number in numbers}

    def handle(*_: object) -> None:
        signal.signal(signal.SIGINT, before[signal.SIGINT])
        note()

    for number in numbers:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, before[number])


def run_seeds(
    first: int,
    count: int,
    jobs: int = 1,
    seconds: float | None = None,
    stop: bool = False,
    run_seconds: float = RUN_SECONDS,
    repeated: int = REPEATED,
    wanted: Callable[[Case], bool] | None = None,
    cases: Callable[[int], Case] | None = None,
) -> Totals:
    """Simulate seeds, in several processes; no more of them after some seconds, or after the first violation.

    Cases that are not wanted are passed over, and do not count as runs.
    """
    until = float("inf") if seconds is None else time.monotonic() + seconds
    return Campaign(Task(first + count, jobs, until, stop, run_seconds, repeated, wanted, cases)).run(first)

"""A simulated cluster: nodes, storage, jobs with an operator who starts them again, and readers; and one run of it.

Tested in tests/simulation/test_cluster.py.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from paddle_flexckpt.foreign.paddle_files import PADDLE_METADATA
from paddle_flexckpt.media.lease import LEASE_FILE
from paddle_flexckpt.native.save_names import save_of
from tests.simulated import older_checkpoint
from tests.simulated.caretaker import Caretaker
from tests.simulated.faults import Faults
from tests.simulated.invariants import Ledger, Violation
from tests.simulated.memory import ANCHOR, MemoryLedger
from tests.simulated.per_node import NodeLedger, NodeScript
from tests.simulated.person import Person
from tests.simulated.readers import Readers
from tests.simulated.scenario import HOUR, Case, Fault
from tests.simulated.scheduler import Node
from tests.simulated.story import Line, fingerprint
from tests.simulated.tasks import Process, StuckError
from tests.simulated.training import Script, Store
from tests.simulated.world import ROOT, World

# How long a job may take, once nothing fails any more, beyond its steps: patience of writers and ranks, and restarts.
_PATIENCE_SECONDS = 8 * HOUR
# How long processes may take to end when their work is done: writers that wait for ranks that have gone, slow readers.
_END_SECONDS = 24 * HOUR
_MOST_SWITCHES = 2_000_000
# An operator waits longer and longer with a job that ends at once.
_AT_ONCE_SECONDS, _LONGEST_PAUSE_SECONDS = 900.0, 3600.0
# Faults that delay neither a saver's thread that renews its lease, unless they strike at that, nor what it asks for.
_HARMLESS_TO_LEASES = ("kill_rank", "kill_writer", "kill_job", "terminate", "clock", "slow_call", "slow_network")
# What ends a start of a job by itself leaves the others this long, if they do not end.
_STRAGGLER_SECONDS = 2 * HOUR


class Job:
    """Run one job: the processes of its ranks, and its operator, who starts it again until all steps are done.

    Attributes:
        incarnation: How often it was started again.
        processes: Of its ranks.
        deaths: Ranks that were killed since it was started, and not by the operator.
        loses_writers: Whether a writer process was.
        others: Whether anything else happened to it: then nothing is expected of errors' texts.
    """

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster, self.number = cluster, number
        self.name = "ab"[number]
        self.steps = cluster.scenario.steps
        self.incarnation = -1
        self.processes: list[Process] = []
        self.scripts: list[Script] = []
        self.on_nodes: list[Node] = []
        self.deaths: set[int] = set()
        self.loses_writers = self.others = False
        self.is_done = False
        self._is_ending = False
        self._started, self._failures = 0.0, 0

    def location(self) -> Any:
        """Return where it saves."""
        return self.cluster.location()

    def start(self) -> None:
        """Start the job's processes."""
        cluster = self.cluster
        self.incarnation += 1
        self._started = cluster.scheduler.now
        size = cluster.scenario.world_size(self.incarnation)
        up = [node for node in cluster.nodes if node.is_up] or cluster.nodes
        self.on_nodes = up
        cluster.scheduler.note(f"starts job {self.name} with {size} ranks, start {self.incarnation}", cluster.operator)
        self.deaths, self.others, self._is_ending = set(), cluster.is_calm is False and bool(cluster.under_way), False
        self.processes, self.scripts, self.loses_writers = [], [], False
        for rank in range(size):
            node = up[rank * len(up) // size]
            environ = {"PADDLE_CURRENT_ENDPOINT": f"{node.name}:{6000 + rank}"}
            self.processes.append(Process(cluster.scheduler, node, f"{self.name}/rank {rank}", environ=environ))
        self.store = Store(cluster.scheduler, cluster.network, self.processes[0])
        for rank, process in enumerate(self.processes):
            script = (NodeScript if cluster.scenario.storage == "per_node" else Script)(self, rank, size)
            self.scripts.append(script)
            process.watchers.append(self._ended)
            process.start(script.run)

    def _ended(self, process: Process) -> None:
        if process not in self.processes:
            return
        scheduler, incarnation = self.cluster.scheduler, self.incarnation
        if process.status is not None and process.status < 0 and not self._is_ending:
            self.deaths.add(self.processes.index(process))
        if not any(each.alive for each in self.processes):
            scheduler.after(0.0, lambda: self._all_ended(incarnation))
            return
        delay = self.cluster.scenario.grace if process.status else _STRAGGLER_SECONDS
        scheduler.after(delay, lambda: self._end(incarnation))

    def _end(self, incarnation: int) -> None:
        """End what is left of the job, of which a rank has gone."""
        left = [process for process in self.processes if process.alive]
        if incarnation == self.incarnation and left:
            self._is_ending = True
            for process in left:
                process.kill()

    def _all_ended(self, incarnation: int) -> None:
        cluster = self.cluster
        if incarnation != self.incarnation or self.is_done:
            return
        is_all = len(cluster.jobs) == 1 and not self.loses_writers
        ended = {rank for rank, process in enumerate(self.processes) if (process.status or 0) >= 0}
        cluster.ledger.compare_errors(self.name, incarnation, None if self.others else self.deaths, ended, is_all)
        size = len(self.processes)
        if all((self.name, incarnation, rank) in cluster.ledger.finished_ranks for rank in range(size)):
            self.is_done = True
            cluster.scheduler.note(f"job {self.name} is done", cluster.operator)
        else:
            at_once = cluster.scheduler.now - self._started < _AT_ONCE_SECONDS
            self._failures = self._failures + 1 if at_once else 0
            pause = max(cluster.scenario.grace, 5.0) * 2.0 ** min(self._failures, 10)
            cluster.scheduler.after(min(pause, _LONGEST_PAUSE_SECONDS), lambda: self._start_again(incarnation))

    def _start_again(self, incarnation: int) -> None:
        if incarnation == self.incarnation and not self.is_done:
            are_up = [node.is_up for node in self.cluster.nodes]
            # Data of which there is no copy is out of reach while its node is down.
            habits = self.cluster.scenario.habits
            needs_all = self.cluster.scenario.storage == "per_node" and not {"copies", "parity"} & {*habits}
            if not any(are_up) or (needs_all and not all(are_up)):
                self.cluster.scheduler.after(60.0, lambda: self._start_again(incarnation))
                return
            self.start()

    def go_on(self, steps: int) -> None:
        """Do some steps more, of a job that is done."""
        self.steps += steps
        self.is_done = False
        self.start()


@dataclass
class Outcome:
    """Describe what a run showed.

    Attributes:
        seconds: Of the simulated world.
        struck: Faults that have struck, by kind.
        states: What ranks were doing when faults struck.
        fingerprint: Of the story.
    """

    case: Case
    violations: list[Violation]
    seconds: float
    commits: int
    restores: int
    readings: int
    late_commits: int
    struck: dict[str, int]
    states: set[tuple[str, ...]]
    story: list[Line] = field(repr=False, default_factory=list)

    @property
    def fingerprint(self) -> str:
        """Return what two runs have in common only if they are the same."""
        return fingerprint(self.story)


class Cluster:
    """Hold a world with nodes, storage, jobs and a schedule of faults.

    Attributes:
        disks: File systems that the faults of disks concern.
        store: The object store, if the scenario has one.
        under_way: Faults that were not at a single moment; while there are some, nothing is expected of errors' texts.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.scenario = case, case.scenario
        self.world = World(case.scenario, self._on_call)
        self.scheduler, self.network = self.world.scheduler, self.world.network
        self.nodes, self.disks, self.store = self.world.nodes, self.world.disks, self.world.store
        self.ledger = self._make_ledger()
        self.ledger.read, self.ledger.names = self.world.read, self.world.names
        self.world.on_change(self.ledger.appeared, self.ledger.changed)
        self.operator = Process(self.scheduler, Node(self.scheduler, "operator"), "operator")
        self.person = Person(self)
        self.caretaker, self.readers = Caretaker(self), Readers(self)
        if "upgrade" in self.scenario.habits:
            directory = f"{ROOT}/step_{older_checkpoint.STEP:08d}"
            self.world.put_tree(directory, older_checkpoint.files())
            self.ledger.begin_with(directory, older_checkpoint.STEP, older_checkpoint.VERSION)
        self.jobs = [Job(self, number) for number in range(self.scenario.jobs)]
        self.under_way: list[Fault] = []
        self.is_calm = False
        self.faults = Faults(self, case.faults)

    def _make_ledger(self) -> Ledger:
        arguments = self.scheduler, self.scenario
        if "memory" in self.scenario.habits:
            ledger = MemoryLedger(*arguments, ROOT)
            ledger.below = self.world.below
            return ledger
        if self.scenario.storage != "per_node":
            return Ledger(*arguments)
        on_nodes = NodeLedger(*arguments)
        on_nodes.directories = self.world.node_directories
        return on_nodes

    @property
    def faults_end(self) -> float:
        """Return when faults stop."""
        return self.scenario.seconds + HOUR

    def location(self) -> Any:
        """Return what the jobs save to."""
        return self.world.location()

    def _on_call(self, kind: str, where: str) -> float:
        return self.faults.on_call(kind, where)

    def note_fault(self, fault: Fault, where: str) -> None:
        """Take note that a fault strikes: of anything but a death alone nothing is expected of errors' texts."""
        if not fault.kind.startswith(_HARMLESS_TO_LEASES) or LEASE_FILE in where:
            self.ledger.trouble_leases(fault.seconds)
        if fault.kind == "kill_writer":
            for job in self.jobs:
                job.loses_writers = True
        elif fault.kind != "kill_rank":
            self.under_way.append(fault)
            for job in self.jobs:
                job.others = True

    # The run.

    def run(self) -> Outcome:
        """Simulate; return what came of it."""
        with self.world.installed(), _quiet():
            try:
                self._run()
            except StuckError as error:
                self.ledger.violate("progress once faults stop", str(error))
            finally:
                self.world.end()
        return Outcome(
            self.case,
            self.ledger.violations,
            self.scheduler.now,
            self.ledger.commits,
            self.ledger.restores,
            self.ledger.readings,
            self.ledger.late_commits,
            self.faults.struck,
            self.faults.states,
            self.scheduler.story,
        )

    def _run(self) -> None:
        scheduler, scenario = self.scheduler, self.scenario
        for job in self.jobs:
            scheduler.after(0.0, job.start)
        self.readers.begin()
        self._run_until(self.faults_end)
        self.is_calm = True
        scheduler.note("faults stop", self.operator)
        self.faults.calm()
        self.under_way.clear()
        if not self._run_until(scheduler.now + 2 * scenario.seconds + _PATIENCE_SECONDS):
            if not self.ledger.violations:
                self.ledger.violate("progress once faults stop", "a job has not ended in time")
            return
        self._wait_for_processes()
        # A last start of each job, undisturbed: its saves clean up.
        for job in self.jobs:
            job.go_on(scenario.save_every)
            if not self._run_until(scheduler.now + (job.steps + 1) * scenario.step_seconds + HOUR):
                self.ledger.violate("progress once faults stop", "a job that nothing disturbs has not ended in time")
                return
            if job.incarnation and job.deaths:
                self.ledger.violate("progress once faults stop", f"ranks {sorted(job.deaths)} have died undisturbed")
        self._wait_for_processes()
        self._check_end()

    def _run_until(self, when: float) -> bool:
        """Run until all jobs are done, or so far; return whether they are."""
        while self.scheduler.now < when and not self.ledger.violations:
            upcoming = self.scheduler.next_event
            if all(job.is_done for job in self.jobs) or upcoming is None:
                break
            hour = max(upcoming, self.scheduler.now) // HOUR + 1
            self.scheduler.run(until=min(hour * HOUR, when), steps=_MOST_SWITCHES)
            self._check_threads()
        return all(job.is_done for job in self.jobs)

    def _check_threads(self) -> None:
        for task, text in self.scheduler.thread_errors:
            self.ledger.violate("no thread ends with an error", f"{task.name} of {task.process.name}: {text}")
        self.scheduler.thread_errors.clear()
        for task, text in self.scheduler.main_errors:
            # A writer process ends with what storage says of the lock that it takes over; its training process tells.
            is_taken_over = isinstance(task.error, OSError) and task.process.parent is not None
            # A rank that does not reach Paddle's own store when it starts ends with what that says.
            is_store = isinstance(task.error, RuntimeError) and str(task.error).startswith("TCPStore: ")
            if not (is_taken_over or is_store):
                self.ledger.violate("errors are the library's own", f"{task.process.name}: {text}")
        self.scheduler.main_errors.clear()

    def _wait_for_processes(self) -> None:
        """Wait until all processes have ended, as they must when their work is done."""
        scheduler, deadline = self.scheduler, self.scheduler.now + _END_SECONDS
        while scheduler.now < deadline and self.left() and scheduler.next_event is not None:
            scheduler.run(until=min(scheduler.next_event + 60.0, deadline), steps=_MOST_SWITCHES)
        if self.left() and not self.ledger.violations:
            self.ledger.violate("processes are bounded", f"they have not ended: {self.left()}")

    def left(self) -> list[Process]:
        """Return the processes that live."""
        return [each for each in self.scheduler.processes if each.alive and each is not self.operator]

    # Ends.

    def lose_node(self, node: Node, down_seconds: float, loses_disk: bool = False) -> None:
        """Take power from a node: its processes are lost, and what it had not written to storage for good.

        With its disk goes all that it had written there; it comes back with another one.
        """
        if not node.is_up:
            return
        node.is_up = False
        self.world.lose_node(node)
        for process in [each for each in self.scheduler.processes if each.alive and each.node is node]:
            process.kill()
        if loses_disk and isinstance(self.ledger, NodeLedger):
            self.ledger.lose_disk(self.world.replace_disk(node))
        if isinstance(self.ledger, MemoryLedger):
            self.ledger.lose_memory(node.name)
        self.ledger.look_again(self.world.directories())
        self._bring_back(node, down_seconds)

    def drain_node(self, node: Node, seconds: float) -> None:
        """Take a node from its jobs for a while; it keeps its power, and what is in its memory."""
        if node.is_up:
            node.is_up = False
            self.network.forget(node)
            for process in [each for each in self.scheduler.processes if each.alive and each.node is node]:
                process.kill()
            self._bring_back(node, seconds)

    def _bring_back(self, node: Node, seconds: float) -> None:
        def up() -> None:
            node.is_up = True
            self.network.heal()

        self.scheduler.after(seconds, up)

    def lose_power(self) -> None:
        """Take power from all nodes; they are up again after a minute."""
        for process in [each for each in self.scheduler.processes if each.alive and each is not self.operator]:
            process.kill()
        for node in self.nodes:
            self.lose_node(node, 60.0)
        self.ledger.look_again(self.world.directories())

    def trouble_store(self, fault: Fault) -> None:
        """Have the object store misbehave for a while."""
        self.world.trouble_store(fault)

    def calm_store(self) -> None:
        """Have the object store behave."""
        self.world.calm_store()

    # The end.

    def _check_end(self) -> None:
        ledger = self.ledger
        if ledger.violations:
            return
        if isinstance(ledger, NodeLedger):
            ledger.check_left()
            return
        auditor = Process(self.scheduler, self.nodes[0], "auditor")
        auditor.start(self.readers.read_all)
        self.scheduler.run(until=self.scheduler.now + HOUR, steps=_MOST_SWITCHES)
        if auditor.alive or auditor.status != 0:
            ledger.violate("a committed checkpoint is whole", f"the last reading has not ended well: {auditor.status}")
        for directory in self.world.directories():
            if directory in ledger.disturbed or self.person.made(directory):
                continue
            known = ledger.committed.get(directory)
            kept = set(known.files) if known is not None else set()
            left = [name for name in self.world.names(directory) if f"{directory}/{name}" not in kept]
            left = [name for name in left if name != LEASE_FILE and (name != PADDLE_METADATA or not kept)]
            is_late = any(kind.startswith("stop") for kind in self.faults.struck)
            is_read = self.scenario.jobs > 1 or directory in ledger.read_meanwhile
            if self.scenario.storage == "shared" and (is_read or is_late):
                # What was replaced while it was read, maybe by another job's retention, is left to the next save. So is
                # the file of a rank that goes on later, and cannot know whether its save was committed and replaced.
                number = self._number(kept)
                left = [name for name in left if (save := save_of(name)) is None or save.number >= number]
            if self.scenario.jobs > 1 and "store_stale" in self.faults.struck:
                # A saver that does not see the files of another job's save cannot remove them. No next save is here.
                number = self._number(kept)
                left = [name for name in left if (save := save_of(name)) is None or save.number > number]
            if left:
                ledger.violate("clean-up is complete", f"{directory} still has {left}")
        if isinstance(ledger, MemoryLedger):
            ledger.check_memory_left(node.name for node in self.nodes)
        left = [name for name in self.world.names(ROOT) if not self.person.knows(name) and not self._goes_with(name)]
        if left:
            ledger.violate("clean-up is complete", f"the root still has {left}")

    def _number(self, paths: set[str]) -> int:
        """Return the number of the save of which these are the files."""
        saves = [save_of(path.rpartition("/")[2]) for path in paths]
        return max((save.number for save in saves if save is not None), default=0)

    def _goes_with(self, name: str) -> bool:
        """Return whether a page or report is of a step that is there, or that somebody has disturbed."""
        directory = f"{ROOT}/{name.partition('.')[0]}"
        known = directory in self.ledger.committed or directory in self.ledger.disturbed
        return (known and name.endswith((".html", ".report.json"))) or name == ANCHOR


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Let the library's log and its last words be silent: thousands of lines would hide what matters."""
    logger = logging.getLogger("paddle_flexckpt")
    before, logger.disabled = logger.disabled, True
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.disabled = before


def simulate(case: Case) -> Outcome:
    """Run a case."""
    return Cluster(case).run()

"""Faults at work: each strikes at its time, or at the call of a process that it waits for, and ends after its time.

Tested in tests/simulation/test_cluster.py.
"""

from __future__ import annotations

import errno
import functools
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.simulated.scenario import MOMENTS, Fault

if TYPE_CHECKING:
    from tests.simulated.scheduler import Node
    from tests.simulated.tasks import Process

# Files that are on no storage, which cannot fail.
_IN_MEMORY = ("memfd:", "/proc/")
_ON_NETWORK = frozenset(("send", "recv", "connect", "accept", "select"))


class Armed:
    """Hold a fault that waits for a call."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.is_after = fault.moment.startswith("after ")
        self.is_call = MOMENTS[fault.moment.removeprefix("after ")]
        self.left = fault.count
        # Of one that strikes after a call: the process that has made it.
        self.follows: Process | None = None


class Faults:
    """Let the faults of a schedule strike.

    Attributes:
        struck: How many of each kind have.
        states: What the ranks were doing when something struck: see :meth:`state`.
    """

    def __init__(self, cluster: Any, schedule: tuple[Fault, ...]) -> None:
        self._cluster = cluster
        self._armed: list[Armed] = []
        self._slowness = 0.0
        self.struck: dict[str, int] = {}
        self.states: set[tuple[str, ...]] = set()
        # What each process has called last.
        self.last: dict[Process, tuple[str, str]] = {}
        self._is_calm = False
        for number, fault in enumerate(schedule):
            cluster.scheduler.plan(fault.at, number, functools.partial(self._begin, fault))

    def _begin(self, fault: Fault) -> None:
        if self._is_calm:
            return
        if fault.moment:
            self._armed.append(Armed(fault))
        else:
            self._strike(fault, None)

    def calm(self) -> None:
        """End all faults; none begins any more."""
        self._is_calm = True
        self._armed.clear()
        cluster = self._cluster
        self._slowness = 0.0
        for disk in cluster.disks:
            disk.capacity, disk.read_only, disk.gone = None, False, None
        cluster.network.cut.clear()
        cluster.network.slowness = 1.0
        for node in cluster.nodes:
            node.is_up = True
            node.rate = 1.0
        cluster.network.heal()
        for process in cluster.scheduler.processes:
            process.resume()
        if cluster.store is not None:
            cluster.calm_store()

    # At calls.

    def on_call(self, kind: str, where: str) -> float:
        """Return by how many seconds a call of a process takes longer, or raise what it fails with.

        Raises:
            OSError: A fault has it fail.
        """
        process, more = self._cluster.scheduler.process, 0.0
        if self._armed:
            for armed in list(self._armed):
                # What another fault has ended makes calls too while its frames are left, and may have met this one.
                if armed in self._armed and self._meets(armed, process, kind, where):
                    self._armed.remove(armed)
                    self._strike(armed.fault, process, kind, where)
                    if armed.fault.kind == "slow_call":
                        # No longer than there are faults.
                        left = self._cluster.faults_end - self._cluster.scheduler.now
                        more += min(armed.fault.seconds, max(0.0, left))
        self.last[process] = kind, where
        return self._slowness + more if kind not in _ON_NETWORK else 0.0

    def _meets(self, armed: Armed, process: Process, kind: str, where: str) -> bool:
        if armed.follows is not None:
            return process is armed.follows and not (armed.fault.kind == "io_error" and where.startswith(_IN_MEMORY))
        if not armed.is_call(kind, where) or not self._is_target(armed.fault, process):
            return False
        if armed.fault.kind == "io_error" and where.startswith(_IN_MEMORY):
            return False
        armed.left -= 1
        if armed.left > 0:
            return False
        if armed.is_after:
            armed.follows = process
        return not armed.is_after

    def _is_target(self, fault: Fault, process: Process) -> bool:
        """Tell whether a fault waits for calls of a process: its target's; of other targets any rank's."""
        kind = fault.target.removeprefix("b/").partition(":")[0]
        if kind in ("rank", "writer"):
            return process in self._processes(fault.target)
        if kind == "reader":
            return process.name.startswith("reader")
        if kind == "node":
            return process.node is self._node(fault.target)
        return not process.name.startswith(("person", "auditor"))

    # What strikes.

    def _strike(self, fault: Fault, process: Process | None, kind: str = "", where: str = "") -> None:
        cluster = self._cluster
        self.struck[fault.kind] = self.struck.get(fault.kind, 0) + 1
        self.states.add(self.state(fault.kind))
        at = f", at a call of {process.name}: {kind} {where}" if process is not None else ""
        cluster.scheduler.note(f"FAULT: {fault}{at}", cluster.operator)
        cluster.note_fault(fault, where)
        handler: Callable[[Fault], None] = getattr(self, f"_{fault.kind}", self._trouble_disks)
        if fault.kind == "io_error":
            self._trouble(0.0)
            if process is not None and kind not in _ON_NETWORK:
                number = int(fault.amount) or errno.EIO
                raise OSError(number, os.strerror(number))
            return
        handler(fault)

    def state(self, kind: str) -> tuple[str, ...]:
        """Return where the coordinator is in its work, where the others are, and what strikes."""
        job = self._cluster.jobs[0]
        phases = [phase_of(*self.last.get(process, ("", ""))) for process in job.processes if process.alive]
        writers = [
            f"writer: {phase_of(*self.last.get(child, ('', '')))}"
            for child in self._cluster.scheduler.processes
            if child.alive and child.parent in job.processes
        ]
        first = phases[:1] or ["none"]
        return (kind, first[0], *sorted({*phases[1:], *writers}))

    def _job(self, target: str) -> Any:
        jobs = self._cluster.jobs
        return jobs[1] if target.startswith("b/") and len(jobs) > 1 else jobs[0]

    def _processes(self, target: str) -> list[Process]:
        """Return the live processes that a target stands for."""
        job, (kind, _, number) = self._job(target), target.removeprefix("b/").partition(":")
        if kind == "job":
            return [process for process in job.processes if process.alive]
        rank = int(number or 0)
        if rank >= len(job.processes):
            return []
        own = job.processes[rank]
        if kind == "writer":
            return [each for each in self._cluster.scheduler.processes if each.alive and each.parent is own]
        return [own] if own.alive else []

    def _node(self, target: str) -> Node:
        nodes = self._cluster.nodes
        return nodes[int(target.partition(":")[2] or 0) % len(nodes)]

    def _on(self, node: Node) -> list[Process]:
        operator = self._cluster.operator
        return [
            each
            for each in self._cluster.scheduler.processes
            if each.alive and each.node is node and each is not operator
        ]

    def _kill_rank(self, fault: Fault) -> None:
        for process in self._processes(fault.target):
            process.kill()

    _kill_writer = _kill_job = _kill_rank

    def _terminate_job(self, fault: Fault) -> None:
        for process in self._processes("b/job" if fault.target.startswith("b/") else "job"):
            process.signal(signal.SIGTERM)

    def _terminate_node(self, fault: Fault) -> None:
        for process in self._on(self._node(fault.target)):
            if any(process in job.processes for job in self._cluster.jobs):
                process.signal(signal.SIGTERM)

    def _kill_node(self, fault: Fault) -> None:
        self._cluster.lose_node(self._node(fault.target), down_seconds=fault.seconds or 60.0)

    def _lose_disk(self, fault: Fault) -> None:
        self._cluster.lose_node(self._node(fault.target), down_seconds=60.0, loses_disk=True)

    def _drain_node(self, fault: Fault) -> None:
        self._cluster.drain_node(self._node(fault.target), fault.seconds)

    def _begin_anew(self, fault: Fault) -> None:
        self._cluster.person.begin_anew()

    def _stop(self, processes: list[Process], seconds: float) -> None:
        for process in processes:
            process.stop()

        def go_on() -> None:
            for process in processes:
                process.resume()

        self._cluster.scheduler.after(seconds, go_on)

    def _stop_rank(self, fault: Fault) -> None:
        self._stop(self._processes(fault.target), fault.seconds)

    _stop_writer = _stop_job = _stop_rank

    def _stop_node(self, fault: Fault) -> None:
        self._stop(self._on(self._node(fault.target)), fault.seconds)

    def _slow_network(self, fault: Fault) -> None:
        network = self._cluster.network
        network.slowness = max(network.slowness, fault.amount / 150e-6)

        def end() -> None:
            network.slowness = 1.0

        self._cluster.scheduler.after(fault.seconds, end)

    def _partition(self, fault: Fault) -> None:
        network, nodes = self._cluster.network, self._cluster.nodes
        one, other = (nodes[int(each) % len(nodes)].name for each in fault.target.split(":")[1:3])
        pair = frozenset((one, other))
        if len(pair) < 2:
            return
        network.cut.add(pair)

        def end() -> None:
            network.cut.discard(pair)
            network.heal()

        self._cluster.scheduler.after(fault.seconds, end)

    def _clock_jump(self, fault: Fault) -> None:
        self._node(fault.target).offset += fault.amount

    def _clock_rate(self, fault: Fault) -> None:
        self._node(fault.target).rate = fault.amount

    def _slow_call(self, fault: Fault) -> None:
        """Do nothing more: the call that is struck takes longer, while all else in its process goes on."""

    def _trouble_disks(self, fault: Fault) -> None:
        disks = self._cluster.disks

        def change(begins: bool) -> None:
            for disk in disks:
                if fault.kind == "disk_full":
                    disk.capacity = disk.used + 2000 if begins else None
                elif fault.kind == "disk_read_only":
                    disk.read_only = begins
                elif fault.kind == "disk_gone":
                    disk.gone = errno.EIO if begins else None
                else:
                    self._slowness = fault.amount if begins else 0.0

        change(True)
        self._cluster.scheduler.after(fault.seconds, lambda: change(False))
        self._trouble(fault.seconds)

    def _trouble(self, seconds: float) -> None:
        ledger = self._cluster.ledger
        ledger.troubled_until = max(ledger.troubled_until, self._cluster.scheduler.now + seconds)

    def _store_fault(self, fault: Fault) -> None:
        self._cluster.trouble_store(fault)
        self._trouble(fault.seconds)

    _store_errors = _store_lost_answers = _store_stale = _store_slow = _store_fault

    def _power_loss(self, fault: Fault) -> None:
        self._cluster.lose_power()

    def _person(self, fault: Fault) -> None:
        self._cluster.person.act(fault.kind.partition("_")[2], int(fault.amount))

    def _care_damage(self, fault: Fault) -> None:
        self._cluster.caretaker.spoil(int(fault.amount))

    def _care_look(self, fault: Fault) -> None:
        self._cluster.caretaker.begin()

    _person_copies = _person_moves = _person_deletes = _person_restores = _person_damages = _person


def phase_of(kind: str, where: str) -> str:
    """Return what a process that makes a call is doing."""
    if not kind:
        return "training"
    if kind in _ON_NETWORK:
        return "between ranks"
    for part, phase in (
        (".removing", "removing"),
        (".saving", "marking"),
        (".safetensors", "data"),
        (".partition", "data"),
        (".part", "part"),
        (".failed", "failure"),
        (".lease", "lease"),
        (".manifest", "manifest"),
    ):
        if part in where:
            return f"{phase}: {kind}"
    return f"directory: {kind}"

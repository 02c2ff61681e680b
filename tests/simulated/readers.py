"""Processes of no job that read checkpoints of a simulated cluster: now and then, and all that there is in the end.

Tested in tests/simulation/test_cluster.py.
"""

from __future__ import annotations

from typing import Any

from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.native.directory import latest, list_checkpoints
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from tests.simulated.tasks import Process
from tests.simulated.training import shapes_of, shards, versions_in
from tests.simulated.world import ROOT


class Readers:
    """Start processes that load the latest checkpoint, or look at all."""

    def __init__(self, cluster: Any) -> None:
        self._cluster, self._scheduler, self._scenario = cluster, cluster.scheduler, cluster.scenario

    def begin(self) -> None:
        """Let each reader of the scenario begin, again and again."""
        for number in range(self._scenario.readers):
            self._schedule(number)

    def _schedule(self, number: int) -> None:
        self._scheduler.after(self._scenario.reader_seconds, lambda: self._start(number))

    def _start(self, number: int) -> None:
        cluster = self._cluster
        if all(job.is_done for job in cluster.jobs):
            return
        node = cluster.nodes[-1]
        if node.is_up:
            reader = Process(self._scheduler, node, f"reader {number}")
            cluster.ledger.readers.append(reader)
            reader.start(self._read)
        self._schedule(number)

    def _read(self) -> None:
        """Do as a reader: look which checkpoint is the latest, and load it."""
        ledger, since = self._cluster.ledger, self._scheduler.now
        floor = ledger.highest
        try:
            found = latest(self._cluster.location())
            ledger.looked(floor, found, since)
            if found is not None:
                self._load(found.path, found.step, since)
        except CheckpointError as error:
            self._scheduler.note(f"{type(error).__name__}: {str(error)[:200]}")

    def _load(self, path: str, step: int | None, since: float) -> None:
        ledger, state = self._cluster.ledger, shards(0, 1, 0, None, shapes_of(self._scenario.habits))
        directory = f"{ROOT}/{path.rpartition('/')[2]}"
        known, changes = ledger.committed.get(directory), ledger.manifests_of[directory]
        try:
            load_state_dict(state, path, SoloCommunicator(), unique_id=0, verify="full")
        except CorruptCheckpointError as error:
            # Savers know of no readers where there are no locks. What was replaced stays until the next change.
            is_kept = self._scenario.storage == "shared" and ledger.manifests_of[directory] < changes + 2
            is_kept = is_kept or (known is not None and ledger.committed.get(directory) is known)
            if is_kept and since > ledger.troubled_until and not ledger.disturbed:
                ledger.violate("a committed checkpoint is whole", f"a reader of {path}: {error}")
            return
        versions = versions_in(state, 0, 1, 0)
        attempt = ledger.attempts.get(next(iter(versions)))
        if len(versions) != 1 or attempt is None or attempt.step != step:
            ledger.violate(
                "no mixture of two saves", f"a reader of {path}, step {step}, got {attempt}, {sorted(versions)}"
            )
        self._scheduler.note(f"has read {attempt}")

    def read_all(self) -> None:
        """Look at all that is there."""
        cluster, ledger, scheduler = self._cluster, self._cluster.ledger, self._scheduler
        infos = {each.step: each for each in list_checkpoints(cluster.location()) if not cluster.person.made(each.path)}
        steps = sorted(each.attempt.step for each in ledger.committed.values())
        for step in steps:
            info = infos.get(step)
            if info is None or not info.complete:
                ledger.violate("a committed checkpoint is whole", f"step {step} is committed; listed is {info}")
                return
        # Every one has been read past the library when it was committed.
        for step in {*steps[-1:], *scheduler.random.sample(steps, min(1, len(steps)))}:
            self._load(infos[step].path, step, scheduler.now)
        found = latest(cluster.location())
        ledger.looked(None, found, scheduler.now)
        if not ledger.disturbed and (None if found is None else found.step) != ledger.highest:
            ledger.violate("latest() names a complete one", f"latest() says {found}; committed are {steps}")

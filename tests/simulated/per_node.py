"""Jobs that save to the disks of their nodes (``storage="per_node"``): what each rank runs, and what must hold then.

There is no manager: the script saves to one directory, with one id or with rising ones, and begins with the newest
checkpoint that its ranks can put together. In asynchronous saves, the writers copy and commit.

Tested in tests/simulation/test_cluster.py.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paddle_flexckpt.background.writer import BackgroundWriter
from paddle_flexckpt.catalog import CheckpointError, LostRankError, ValidationError
from paddle_flexckpt.foreign.paddle_files import PADDLE_METADATA
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.media.lease import LEASE_FILE
from paddle_flexckpt.saving.saver import save_state_dict
from tests.simulated.invariants import Ledger, is_unknown
from tests.simulated.parity import rebuild
from tests.simulated.stored import Committed
from tests.simulated.training import (
    PUBLISHED,
    UNKNOWN,
    ChannelCommunicator,
    Script,
    shards,
    versions_in,
)

if TYPE_CHECKING:
    from tests.simulated.scenario import Scenario
    from tests.simulated.scheduler import Scheduler
    from tests.simulated.tasks import Process

_MANIFEST = re.compile(r"(.*/(node\d+)/.*)/(\d+)\.manifest")
# What an error says of a checkpoint that is there.
_COMPLETE = re.compile(r"\(id \d+\) is complete, but")
# What one says where there is no checkpoint.
_NOTHING = re.compile(
    r"has no checkpoint|does not exist|is not a checkpoint: there is no|has an unfinished save|manifest has been lost"
)


class NodeScript(Script):
    """Do one rank's run from its start to its end."""

    def _run(self) -> None:
        scenario, job = self.scenario, self.job
        comm = self._meet()
        with contextlib.ExitStack() as stack:
            background: bool | BackgroundWriter = False
            if scenario.is_async:
                writer = BackgroundWriter(scenario.max_pending, timeout=scenario.timeout)
                background = stack.enter_context(writer)
            for step in range(self._restore_from_nodes(comm) + 1, job.steps + 1):
                job.cluster.scheduler.sleep(scenario.time_of(step))
                self._collect_handles()
                if step % scenario.save_every == 0:
                    self._save_to_nodes(comm, step, background)
            self.stage = "finish"
            if isinstance(background, BackgroundWriter):
                self._finish_saves(background)
            self.ledger.finished(self)
            self.stage = "close"
        self._collect_handles()

    def _finish_saves(self, writer: BackgroundWriter) -> None:
        from paddle_flexckpt.background.pending import raise_failures

        writer.wait()
        self._collect_handles()
        try:
            raise_failures(writer.take_failed())
        except CheckpointError as error:
            self._tolerate(error)
        self.ledger.check_memory(self, writer.staging_bytes)

    def _restore_from_nodes(self, comm: ChannelCommunicator) -> int:
        self.stage = "restore"
        state = shards(self.rank, self.size, self.layout, None, self.shapes)
        try:
            load_state_dict(state, self.job.location(), comm, storage="per_node")
        except ValidationError as error:
            if not _NOTHING.search(str(error)):
                raise
            self.ledger.found_nothing(self)
            return 0
        versions = versions_in(state, self.rank, self.size, self.layout)
        attempt = self.ledger.attempts.get(min(versions))
        step = 0 if attempt is None else attempt.step
        self.ledger.restored(self, step, versions, {})
        return int(step)

    def _save_to_nodes(self, comm: ChannelCommunicator, step: int, background: bool | BackgroundWriter) -> None:
        ledger, habits = self.ledger, self.scenario.habits
        self.stage = f"save {step}"
        self._tries[step] = self._tries.get(step, 0) + 1
        version = ledger.begin(self, step)
        state = shards(self.rank, self.size, self.layout, version, self.shapes)
        try:
            saved = save_state_dict(
                state,
                self.job.location(),
                comm,
                unique_id=None if "rising" in habits else 0,
                async_save=background,
                step=step,
                storage="per_node",
                **self._protection(),
            )
        except LostRankError:
            ledger.reported(version, self, UNKNOWN)
            raise
        except CheckpointError as error:
            text = str(error)
            self._tell(version, None if _COMPLETE.search(text) else text)
            self._tolerate(error)
        else:
            if background is False:
                ledger.reported(version, self, None)
            else:
                self._keep_handle(version, saved)

    def _protection(self) -> dict[str, Any]:
        """Return by what the data files of a node outlive it."""
        nodes, habits = len(self.job.on_nodes), self.scenario.habits
        if "parity" in habits and nodes > 1 and self.size % nodes == 0:
            return {"parity": min(nodes, 2 + self.scenario.seed % 2)}
        return {"node_copies": 2 if {"copies", "parity"} & {*habits} and nodes > 1 else 1}

    def _tell(self, version: int, error: str | None) -> None:
        self.ledger.reported(version, self, UNKNOWN if error is not None and PUBLISHED in error else error)


class NodeLedger(Ledger):
    """Know what was saved on which node. A checkpoint is there when the first node has published it.

    Attributes:
        directories: The root on each node.
        lost: By root, when its node has lost the disk. Of older saves other nodes have copies.
    """

    directories: tuple[str, ...] = ()

    def __init__(self, scheduler: Scheduler, scenario: Scenario) -> None:
        super().__init__(scheduler, scenario)
        self.lost: dict[str, float] = {}
        self._has_forked = False

    def lose_disk(self, directory: str) -> None:
        """Note that a node has lost its disk."""
        self.lost[directory] = self._scheduler.now
        for number, known in list(self.committed.items()):
            left = tuple(path for path in known.files if path.rpartition("/")[0] != directory)
            self.committed[number] = replace(known, files=left)
            if not left:  # a job on this node alone has no copies
                del self.committed[number]
        self._owners = {path: key for path, key in self._owners.items() if path.rpartition("/")[0] != directory}

    def reported(self, version: int, script: Script, error: str | None) -> None:
        """Note that a rank was told how its save has ended: done means that all nodes have published it."""
        super().reported(version, script, error)
        known = [each for each in self.committed.values() if each.attempt is self.attempts[version]]
        if error is None and known and not self.lost:
            places = sum(path.endswith(".manifest") for path in known[0].files)
            if places < len(script.job.on_nodes):
                self.violate(
                    "what was reported done is there", f"only {places} nodes have published {known[0].attempt}"
                )

    def found_nothing(self, script: Script) -> None:
        """Note that a rank was told that there is no checkpoint."""
        self._check_newest(script, -1.0, "nothing")

    def restored(
        self, script: Script, step: int, versions: set[int], skipped: dict[int, str], since: float = 0.0
    ) -> None:
        """Note that a rank has restored a step, and has values of these versions."""
        version = next(iter(versions), None)
        super().restored(script, step, versions, skipped, since)
        if version in self.attempts:
            attempt = self.attempts[version]
            self._check_newest(script, attempt.begun, str(attempt))

    def _check_newest(self, script: Script, begun: float, what: str) -> None:
        newer = [each.attempt for each in self.committed.values() if each.attempt.begun > begun]
        done = [attempt for attempt in newer if attempt.is_acknowledged]
        if len(script.job.on_nodes) < len(self.directories):
            # What is on the others may be newer. Then there are two histories, and their saves cannot be compared.
            self._has_forked = self._has_forked or bool(newer)
        elif done and not self._has_forked:
            self.violate("latest() goes back only after damage", f"{done[-1]} is done; a restore found {what}")

    def appeared(self, path: str, process: Process | None) -> None:
        """Note that a file is there under this name, whole."""
        match = _MANIFEST.fullmatch(path)
        if match is not None:
            self._publish(match[1], match[3])
        elif path in self._owners:
            self.changed(path, process, "replaced")

    def changed(self, path: str, process: Process | None, how: str) -> None:
        """Note that a file was written, cut, replaced or removed."""
        key = self._owners.get(path)
        if key is not None:
            known = self.committed[key]
            # Of two histories one ends where the nodes of both meet.
            if not (self._has_forked and len(self._tokens(key)) > 1):
                self.violate("a committed checkpoint is whole", f"{path} of {known.attempt} was {how}")
            self._forget(key)

    def _publish(self, directory: str, number: str) -> None:
        found = self._examine_nodes(directory, number)
        if isinstance(found, str):
            away = {each for each in self.directories if not self._is_up(each)}
            if not self._tokens(number, away) - self._tokens(number, {directory}):
                self.violate("a committed checkpoint is whole", f"id {number} was published in {directory}: {found}")
            return
        attempt, known = found.attempt, self.committed.get(number)
        self._scheduler.note(f"publishes {attempt}")
        for rank, outcome in attempt.outcomes.items():
            if outcome is not None and not is_unknown(outcome):
                self.violate(
                    "what was reported failed is not there", f"{attempt} is published; rank {rank} was told: {outcome}"
                )
        if known is not None and known.attempt is not attempt:
            if known.attempt.is_acknowledged and known.attempt.begun > attempt.begun:
                self.violate("a commit does not go back", f"{attempt} replaces {known.attempt}, which began later")
            self._forget(number)
            known = None
        self.commits += not attempt.is_committed
        attempt.is_committed = True
        files = dict.fromkeys((*(known.files if known is not None else ()), *found.files))
        self._remember(number, Committed(attempt, tuple(files), None))

    def _examine_nodes(self, directory: str, number: str) -> Committed | str:
        """Read a checkpoint by the manifest of one node; return it, or what is wrong with it."""
        manifest = self._decode(directory, f"{number}.manifest")
        if isinstance(manifest, str):
            return manifest
        content: dict[str, bytes] = {}
        lost: list[str] = []
        paths = [f"{directory}/{name}" for name in (f"{number}.manifest", *(each.file for each in manifest.partitions))]
        for place, names in manifest.nodes.items():
            (where,) = (each for each in self.directories if f"({each.split('/')[1]}:" in place)
            for name in names:
                data, size = self.read(f"{where}/{name}"), manifest.sizes.get(name)
                if data is None and where in self.lost:
                    lost.append(where)
                    continue
                if data is None or len(data) != (len(data) if size is None else size):
                    return f"{name} has {None if data is None else len(data)} bytes on {place}, not {size}"
                if content.setdefault(name, data) != data:
                    return f"{name} is another on {place}"
                paths.append(f"{where}/{name}")
        content = rebuild(manifest, content)
        missing = sorted({*manifest.catalog.files} - content.keys())
        if missing:
            return f"{missing[0]} is on no node"
        found = self._values(manifest, content)
        if isinstance(found, str):
            return found
        attempt, _ = found
        if any(attempt.begun > self.lost[where] for where in lost):
            return f"not all of {attempt} is on {lost[0]}, which lost its disk before"
        if attempt.step != manifest.step:
            return f"it has values of {attempt}"
        return Committed(attempt, tuple(paths), None)

    def _tokens(self, number: str, directories: Collection[str] | None = None) -> set[str]:
        """Return which saves of an id are in place on nodes. Who has a newer one need not keep files of the others."""
        among = self.directories if directories is None else directories
        read = [self._decode(directory, f"{number}.manifest") for directory in among]
        return {each.save_token for each in read if not isinstance(each, str)}

    def _is_up(self, directory: str) -> bool:
        """Tell whether processes run on the node of a root."""
        node = directory.split("/")[1]
        return any(process.alive and process.node.name == node for process in self._scheduler.processes)

    def _named_here(self, directory: str, name: str) -> list[str]:
        """Return what a manifest names in its own directory, and the manifest."""
        manifest = self._decode(directory, name)
        if isinstance(manifest, str):
            return []
        own = [names for place, names in manifest.nodes.items() if f"({directory.split('/')[1]}:" in place]
        return [f"{directory}/{each}" for each in (name, *(part.file for part in manifest.partitions), *sum(own, ()))]

    def look_again(self, directories: list[str]) -> None:
        """Check after a loss of power that what was reported done is there, and that what is there is whole."""
        before = self.committed
        self.committed, self._owners = {}, {}
        for directory in self.directories:
            for name in self.names(directory):
                if not name.endswith(".manifest"):
                    continue
                number = name.partition(".")[0]
                found = self._examine_nodes(directory, number)
                if isinstance(found, str):
                    known = before.get(number)
                    if known is not None and f"{directory}/{name}" in known.files and len(self._tokens(number)) < 2:
                        self.violate("a committed checkpoint is whole", f"{directory}/{name}, after power: {found}")
                    continue
                now = self.committed.get(number)
                if now is not None and now.attempt.begun > found.attempt.begun:
                    continue
                files = (*now.files, *found.files) if now is not None and now.attempt is found.attempt else found.files
                if now is not None:
                    self._forget(number)
                self._remember(number, Committed(found.attempt, tuple(dict.fromkeys(files)), None))
        for number, known in before.items():
            if not known.attempt.is_acknowledged:
                continue
            there = self.committed.get(number)
            lost = sorted({*known.files} - {*(there.files if there is not None else ())})
            if there is None or there.attempt.begun < known.attempt.begun or (there.attempt is known.attempt and lost):
                self.violate("what was reported done is there", f"{known.attempt} has lost {lost} with the power")

    def check_left(self) -> None:
        """Check that after the last save nothing is left but checkpoints.

        A node that was away may have one of its own, of an id that others have used again meanwhile.
        """
        kept = {path for each in self.committed.values() for path in each.files}
        for directory in self.directories:
            for name in filter(re.compile(r"\d+\.manifest").fullmatch, self.names(directory)):
                found = self._examine_nodes(directory, name.partition(".")[0])
                if isinstance(found, Committed):
                    kept.update(found.files)
                    manifest = self._decode(directory, name)
                    if not isinstance(manifest, str) and manifest.parity_files:  # it may have been rebuilt anywhere
                        kept.update(f"{each}/{file}" for each in self.directories for file in manifest.catalog.files)
                elif self.lost or len(self._tokens(name.partition(".")[0])) > 1:
                    # The other node's part may be gone, and its names may have been used again.
                    kept.update(self._named_here(directory, name))
        for directory in self.directories:
            left = [name for name in self.names(directory) if f"{directory}/{name}" not in kept]
            left = [name for name in left if name != LEASE_FILE and (name != PADDLE_METADATA or not kept)]
            if left:
                self.violate("clean-up is complete", f"{directory} still has {left}")

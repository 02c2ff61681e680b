"""The steps of a run in the memory of its nodes: their saves, their retention, and who holds them.

One rank of each node acts there: the one that has got the lock of the run's directory.

Tested in tests/manager/test_memory_tier.py and tests/manager/test_memory_states.py.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, cast

from paddle_flexckpt.background.pending import SaveHandle
from paddle_flexckpt.background.writer import BackgroundWriter
from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError, LostRankError
from paddle_flexckpt.catalog.texts import format_ranks
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.loading.node_files import find_checkpoint
from paddle_flexckpt.manager.anchor import SAVES_OF_A_START, find_void, start_of
from paddle_flexckpt.manager.manager_options import EVERY_STEP, ManagerOptions, StepOptions
from paddle_flexckpt.manager.memory_restore import restore_from_memory, time_of
from paddle_flexckpt.manager.memory_room import MemoryRoom, node_of
from paddle_flexckpt.manager.memory_tier import MemoryTier, copies_on, few_nodes, own_directory
from paddle_flexckpt.manager.pending_steps import PendingSteps
from paddle_flexckpt.manager.policies import SavePolicy, SaveSchedule, check_policies
from paddle_flexckpt.manager.removal import UNIQUE_ID, name_of
from paddle_flexckpt.manager.restore import Candidate, RestoreOptions, RestoreReport
from paddle_flexckpt.manager.restore_targets import RestoreTargets
from paddle_flexckpt.manager.step_directories import StepDirectories
from paddle_flexckpt.media.backend import Lock
from paddle_flexckpt.media.local import LocalBackend
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.saving.save_options import SaveOptions
from paddle_flexckpt.saving.saver import save_from_file
from paddle_flexckpt.tools.memory_runs import (
    note_root,
    numbers_in,
    publish_step,
    remove_run,
    remove_step,
    runs_of,
    steps_in,
)

logger = logging.getLogger("paddle_flexckpt")


class HeldError(CheckpointError):
    """An error of a run whose steps in memory another process holds, or are those of another root."""


class MemorySteps:
    """The steps of one run in the memory of the nodes, as every rank of a manager sees them.

    A manager without a tier has no steps here, and nothing is communicated for them.

    All methods communicate where their documentation does not say otherwise.

    Attributes:
        run: The run whose steps these are; "" where none is known.
        schedule: The decision to save a step here.
        pending: The saves that are under way.
    """

    def __init__(
        self, comm: Communicator, options: ManagerOptions, directories: StepDirectories, in_root: PendingSteps
    ) -> None:
        """Take the ranks, the manager's options, its root, and its saves to the root."""
        self._comm, self._directories, self._in_root = comm, directories, in_root
        self._exists, self._tier = options.memory is not None, options.memory or MemoryTier("/", EVERY_STEP)
        self._room = MemoryRoom(self._tier, options.max_pending)
        self.run = ""
        policies = check_policies("save_when", self._tier.save_when if self._exists else (), SavePolicy)
        self.schedule = SaveSchedule(comm, policies)
        self.pending = PendingSteps(comm)
        # Made by the first save, when there is known to be room.
        self._writer: BackgroundWriter | None = None
        # This manager's saves have numbers above this one; the coordinator knows it.
        self._number = 0
        # Of the run whose directory is held: its name, and the lock if this rank acts on its node.
        self._held, self._lock = "", Lock()
        self._acts, self._is_used, self._nodes = False, False, 0
        self._above = ""  # a warning for the first save after a restore
        self._noted: str | None = None  # the run that the anchor has been written for
        # The step that the run continues, until a later one is whole here, and what this manager had saved to the root
        # last before it was restored.
        self._restored: int | None = None
        self._is_from_here = False  # whether that step was restored from memory
        self._last_before: int | None = None
        self._told: set[str] = set()  # the warnings that were logged
        # The steps that are here and count; the start that saved each that is here, and what starts have in the root.
        self._found: list[int] = []
        self._starts: dict[int, int] = {}
        self._later: list[tuple[int, int]] = []
        # The newest steps here, in their order; and whether no others are here but those that are being saved.
        self._kept: list[int] = []
        self._is_tidy = False

    def directory(self, step: int) -> LocalBackend:
        """Return a step's directory on this rank's node; communicate nothing."""
        return self._run_directory().child(name_of(step))

    def _run_directory(self) -> LocalBackend:
        return LocalBackend(str(self._tier.path)).child(self.run)

    def find_steps(self, run: str | None, context: str) -> list[int]:
        """Return the steps of which any node has a manifest, the highest first. At most two collectives.

        Steps of before the run went back are not among them, and none are if they belong to another root.
        ``run`` is the run whose steps are wanted; None or "": the one that the root names.
        """
        if not self._exists:
            return []

        def look() -> tuple[None, bytes]:
            named, problem, later = self._directories.find_memory() if self._comm.position == 0 else ("", "", ())
            here = runs_of(own_directory(self._tier), self._directories.path)
            return None, json.dumps([run or named, "" if run else problem, later, here]).encode()

        _, answers = self._comm.together(look, context)
        told = [json.loads(answer) for answer in answers]
        (found, problem, later, _), self.run = told[0], told[0][0] or self.run
        self._later = [(start, step) for start, step in later]
        self._found = self._listed(context) if found else []
        self._warn_of_others({name for *_, here in told for name in here} - {found}, problem if self._found else "")
        return self._found

    def _warn_of_others(self, others: set[str], problem: str) -> None:
        """Log what is wrong with the anchor, and other runs of this root in memory, once each."""
        if problem:
            self._warn(problem)
        if others:
            self._warn(self._directories.anchor.explain_others(others, self.run))

    def _warn(self, text: str) -> None:
        """Log a warning once, on one rank."""
        if self._comm.position == 0 and text not in self._told:
            logger.warning(text)
        self._told.add(text)

    def _listed(self, context: str) -> list[int]:
        """Return the steps of the run that count. One collective."""

        def look() -> tuple[None, bytes]:
            directory = own_directory(self._tier, self.run)
            other = self._directories.anchor.other_root(self.run, directory)
            return None, json.dumps([other, *numbers_in(directory).items()]).encode()

        told = [json.loads(answer) for answer in self._comm.together(look, context)[1]]
        self._starts, others = {}, sorted({other for other, *_ in told} - {""})
        if others:
            self._warn(f"passed over: {self._directories.anchor.explain_other(self.run, others[0])}")
        for step, number in (each for _, *steps in told for each in steps if not others):
            self._starts[step] = max(number // SAVES_OF_A_START, self._starts.get(step, 0))
        void = find_void(self._starts, self._later)
        for step, saved in sorted(void.items()):
            if saved < step:  # else the root has the same step, saved later
                self._warn(
                    f"step {step} in the memory of the nodes is not used: it was saved before this run went back, and "
                    f"a later start has saved step {saved}"
                )
        return sorted(self._starts.keys() - void.keys(), reverse=True)

    def whole_steps(self, run: str | None, context: str) -> set[int]:
        """Return those of :meth:`find_steps` of which all data is there, on whatever nodes."""
        return {step for step in self.find_steps(run, context) if self._find_whole(step, context)}

    def _find_whole(self, step: int, context: str) -> str:
        """Return the token of a step's save of which all data is there; "" if there is none."""
        with contextlib.ExitStack() as locks, contextlib.suppress(CorruptCheckpointError):
            directory = SourceDirectory(self.directory(step))
            head = UNIQUE_ID, lambda: b"{}"
            found = find_checkpoint(self._comm, lambda: directory, *head, locks, context, rebuilds=False)
            if found.is_whole and start_of(found.manifest) >= self._starts[step]:
                return found.manifest.save_token
        return ""

    def add_candidates(
        self, candidates: Sequence[Candidate], steps: Sequence[int], asked: RestoreOptions, targets: RestoreTargets
    ) -> list[Candidate]:
        """Add those of the steps here that a restore asks for to the candidates in the root; communicate nothing.

        Of two with the same step, that in memory comes first.
        """
        newest = candidates[0].step if candidates else -1
        if asked.step == "latest":
            wanted = [step for step in steps if asked.fallback or step >= newest]
        else:
            wanted = [step for step in steps if step == asked.step or (asked.fallback and step < int(asked.step))]
        added = [
            Candidate(
                step,
                partial(restore_from_memory, self.directory(step), (step, self._starts[step]), self._comm, targets),
                True,
            )
            for step in wanted
        ]
        # The order by a metric stays as it is: it has no steps here.
        return sorted([*added, *candidates], key=lambda each: -each.step) if added else [*candidates]

    def note_restored(self, report: RestoreReport | None) -> str:
        """Note a restore, or that all is damaged; return the run of the step if it was here, else "".

        Nothing is communicated.
        """
        self._noted, self._above = None, ""
        if report is None:
            return ""
        above = [step for step in self._found if step > report.step]
        if above:
            self._above = (
                f"step {', '.join(map(str, above))} in the memory of the nodes is above step {report.step}, from which "
                "the run goes on: it is not used any more after the next save"
            )
        self.schedule.note(report.step, saved=False)
        self._is_used = self._is_used or report.tier == "memory"
        self._restored, self._last_before, self._is_tidy = report.step, self._in_root.last_saved, False
        self._is_from_here = report.tier == "memory"
        return self.run if report.tier == "memory" else ""

    def save_beside(
        self, asked: StepOptions, shards: Mapping[str, Any], run: str, where: Mapping[str, bool], context: str
    ) -> tuple[SaveHandle | None, CheckpointError | None]:
        """Find out which saves have ended, and begin that of a step if it is wanted here.

        Return its handle, and what has failed if the step is wanted in the root too, whose save does not depend on it.

        Raises:
            CheckpointError: As of :meth:`collect` and :meth:`save`.
        """
        if self._above:
            self._warn(self._above)
        try:
            self.collect(context, wait_for="all" if where["to_memory"] else None)
            return (self.save(asked, shards, run, context) if where["to_memory"] else None), None
        except CheckpointError as error:
            if isinstance(error, LostRankError) or not where["to_root"]:
                raise
            if self._comm.position == 0:
                logger.error(f"step {asked.step} could not be saved to memory, and is saved to the root: {error}")
            return None, error

    def save(self, asked: StepOptions, shards: Mapping[str, Any], run: str, context: str) -> SaveHandle:
        """Begin to save a step of a run. The coordinator notes the run in the root before the first save.

        Raises:
            CheckpointError: It cannot be saved, or another process holds the run; older steps are unchanged. Or an
                older step could not be removed; then the text says which one is whole.
        """
        step, self.run = asked.step, run or self.run
        if self._writer is None:
            self.check_room(lambda: shards, context)  # before the root names a run that may get no step here
        self._writer, self._is_used = self._writer or BackgroundWriter(), True
        if self._noted != run or self._held != self.run:

            def note() -> tuple[None, bytes]:
                name, start = self._directories.anchor.note_memory(run) if self._comm.position == 0 else ("", 0)
                # A node that was away may have the step of an earlier start: a later start's saves have higher numbers.
                self._number = start * SAVES_OF_A_START
                return None, name.encode()

            _, answers = self._comm.together(note, context)
            self.run, self._noted = answers[0].decode(), run
            self._hold(context)
        if not self._is_tidy:
            self._tidy(context)
        copies, parity = copies_on(self._tier, self._nodes)
        try:
            options = SaveOptions(
                unique_id=UNIQUE_ID,
                step=step,
                check_replicas=asked.check_replicas,
                storage="per_node",
                node_copies=copies,
                parity=parity,
                async_save=self._writer,
            )
            saved = cast(
                SaveHandle,
                save_from_file(shards, self.directory(step), self._comm, options, number=self._number),
            )
        except CheckpointError:
            self._is_tidy = False
            with contextlib.suppress(OSError):
                self.directory(step).remove_directory()
            raise
        self.schedule.note(step, saved=True)
        self.pending.add(step, saved)
        if asked.blocking:
            self.collect(context, wait_for="all")
        return saved

    def collect(self, context: str, wait_for: int | Literal["all"] | None = None) -> None:
        """Find out which saves have ended, as :meth:`PendingSteps.collect` does; remove older steps than whole ones.

        Nothing is communicated where no save is under way. An older step that is being read goes after a later save.
        """
        try:
            self.pending.collect(context, wait_for)
        except CheckpointError:
            self._is_tidy = False
            raise
        finally:
            whole = sorted(self.pending.drain_reports())
            for step in whole:  # those above it are of before the run went back
                self._restored = None
                self._kept = [*(each for each in self._kept if each < step), step][-self._tier.keep :]
        if whole:
            self._remove(f"step {whole[-1]} is whole in memory, but what need not be kept there could not be removed")

    def _tidy(self, context: str) -> None:
        """Remove what earlier starts and failed saves have left: a save needs its room.

        The newest ``keep`` steps stay, the whole ones first: the others may be whole again when a node comes back.
        Those above the one that the run continues count as older: it has left them. A whole step that stays is first
        published on all nodes that have prepared it, as others would lose it with the nodes that have published it.
        """
        whole: dict[int, str] = {}
        last = self._restored
        steps = sorted(self._listed(context), key=lambda step: (last is not None and step > last, -step))
        for step in steps:
            if sum(map(bool, whole.values())) < self._tier.keep:
                whole[step] = self._find_whole(step, context)
        self._kept = sorted(sorted(whole, key=lambda step: not whole[step])[: self._tier.keep])

        def publish() -> tuple[None, bytes]:
            for step in self._kept if self._acts else ():
                publish_step(self.directory(step), whole[step])
            return None, b""

        if self._kept:
            self._comm.together(publish, f"{context}: a step in memory could not be published on all nodes")
        self._remove(f"{context}: what need not be kept in memory could not be removed")
        self._is_tidy = True

    def _remove(self, context: str) -> None:
        """Remove the steps that are neither kept nor being saved. One collective."""

        def remove() -> tuple[None, bytes]:
            for step in steps_in(self._run_directory()) if self._acts else ():
                if step not in {*self._kept, *self.pending.steps}:
                    remove_step(self.directory(step))
            return None, b""

        self._comm.together(remove, context)

    def _hold(self, context: str) -> None:
        """Take the lock of the run's directory on each node. One collective."""
        self.release()

        def take() -> tuple[None, bytes]:
            directory = own_directory(self._tier, self.run)
            if other := self._directories.anchor.other_root(self.run, directory):
                return None, json.dumps([False, "", other]).encode()
            directory.make_directory(0o700)
            own_directory(self._tier, self.run)
            with contextlib.suppress(CheckpointError):  # another rank of this node has it, or another process
                self._lock, self._acts = directory.locks.take(), True
                note_root(directory, self._directories.path)
            return None, json.dumps([self._acts, node_of(self._tier.path), ""]).encode()

        _, answers = self._comm.together(take, context)
        told = [json.loads(answer) for answer in answers]
        others = sorted({other for *_, other in told} - {""})
        if others:
            self.release()
            raise HeldError(f"{context}: {self._directories.anchor.explain_other(self.run, others[0])}")
        served = {node for acts, node, _ in told if acts}
        unserved = [rank for rank, (_, node, _) in zip(self._comm.ranks, told) if node not in served]
        if unserved:
            self.release()
            raise HeldError(
                f"{context}: another process holds {self._run_directory().path} on the nodes of ranks "
                f"{format_ranks(unserved)}: an earlier start of this run that has not ended, or another manager. "
                "Remedy (FC507): end that process, and start again"
            )
        self._held, self._nodes, self._is_tidy = self.run, len(served), False
        if self._comm.position == 0 and (few := few_nodes(self._tier, self._nodes)):
            logger.warning(few)

    def check_room(self, describe: Callable[[], Mapping[str, Any]], context: str) -> None:
        """Check that the steps have room on each node, as :meth:`MemoryRoom.check` does."""
        if self._exists:
            self._room.check(describe, self._run_directory().path if self.run else "", self._comm, context)

    def close(self, context: str) -> None:
        """Remove the run's steps if the root has one that is at least as new; else leave them, with a warning.

        Steps in the root from before the run went back do not count.
        """
        if self._writer is not None:
            self._writer.close()
        if not self._is_used:
            return
        newest = max(self.find_steps(self.run, context), default=-1)
        own = {self._in_root.last_saved} - {self._last_before}
        if self._restored is not None and (not self._is_from_here or self._is_in_root(self._restored, context)):
            own.add(self._restored)

        def look() -> tuple[None, bytes]:
            saved = {*self._directories.steps()} & own - self._in_root.doubtful if self._comm.position == 0 else ()
            return None, str(max(saved, default=-1)).encode()

        _, answers = self._comm.together(look, context)
        if int(answers[0]) < newest:
            if self._comm.position == 0:
                logger.warning(
                    f"step {newest} is in the memory of the nodes alone, in {self._run_directory().path}: it stays "
                    "there. Remedy (FC507): restore() it, and save the step with save(), which writes to the root; "
                    "then close() frees the memory"
                )
            return
        if self._held != self.run:
            try:
                self._hold(context)
            except HeldError:
                return  # the run goes on elsewhere; this manager has only restored
        directory = self._run_directory()

        def remove() -> tuple[None, bytes]:
            if self._acts and remove_run(directory):
                with contextlib.suppress(OSError):  # it may be another's
                    LocalBackend(str(self._tier.path)).remove_directory()
            return None, b""

        self._comm.together(remove, context)

    def _is_in_root(self, step: int, context: str) -> bool:
        """Return whether the root has the same save of a step as the memory. One collective."""

        def look() -> tuple[None, bytes]:
            there = time_of(self._directories.directory(step)) if self._comm.position == 0 else None
            return None, json.dumps([time_of(self.directory(step)), there]).encode()

        _, answers = self._comm.together(look, context)
        told = [json.loads(answer) for answer in answers]
        return told[0][1] is not None and told[0][1] in [here for here, _ in told]

    def release(self) -> None:
        """Give back the lock of the run's directory; the steps stay, and saves go on. Communicate nothing."""
        self._lock.release()
        self._held, self._lock, self._acts = "", Lock(), False

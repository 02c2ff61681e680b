"""Mistakes in the protocols, each of which can be put into the library for the time of a run.

They are what a simulation is worth: one that does not find them says nothing when it finds nothing. Each replaces
functions of today's library by such as a plausible change might have left.

Four mistakes have no meaning since the names of a save's files have its token, and since a save has one decision, its
manifest. Ranks that discard each their own files, files that are believed by their names, and a removal by name of what
could not be written touch no other save's files. A second decision does not exist.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from paddle_flexckpt.undo import Undo
from tests.simulated.modules import library_modules
from tests.simulated.scenario import Case
from tests.simulation import wrong

_PACKAGE = "paddle_flexckpt"
# Gets what is right, and gives what takes its place.
Wrong = Callable[[Any], Any]


@dataclass(frozen=True)
class Mistake:
    """Describe a mistake.

    Attributes:
        name: Short, for the command line.
        what: What is wrong, and where it shows.
        changes: By "module:name" or "module:Class.name", what takes the place of what is there.
        world: Where it is looked for: ``cluster``, or ``store`` for savers that compete for an object store.
        can_show: Whether it can make a difference in a case; others are counted as tried, and not simulated. None: in
            every case.
    """

    name: str
    what: str
    changes: dict[str, Wrong]
    world: str = "cluster"
    can_show: Callable[[Case], bool] | None = None

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """Let the library have this mistake, for as long as the context lasts."""
        # A module that is imported later would keep what is wrong.
        library_modules()
        undo = Undo()
        try:
            for where, change in self.changes.items():
                module_name, _, path = where.partition(":")
                owner: Any = importlib.import_module(f"{_PACKAGE}.{module_name}")
                *classes, name = path.split(".")
                for each in classes:
                    owner = getattr(owner, each)
                # A KeyError here says that the library has changed, and the mistake has to follow.
                right = vars(owner)[name]
                if classes:
                    undo.set(owner, name, change(right))
                else:
                    wrong = change(right)
                    for package in (_PACKAGE, "tests"):  # who uses the library makes the mistake too
                        undo.replace_everywhere(name, right, wrong, package)
            yield
        finally:
            undo.put_back()


def _has(*kinds: str) -> Callable[[Case], bool]:
    """Return a function that tells whether a case has a fault of one of these kinds."""
    return lambda case: any(fault.kind.startswith(kinds) for fault in case.faults)


def _loses_memory(case: Case) -> bool:
    """Tell whether a node loses what it has not made durable on a file system."""
    return case.scenario.storage != "object" and _has("power_loss", "kill_node")(case)


def _has_pending_writers(case: Case) -> bool:
    return case.scenario.is_async and max(case.scenario.world_sizes) > 1


def _removes_what_is_read(case: Case) -> bool:
    """Tell whether a policy removes steps where readers hold locks."""
    return case.scenario.readers > 0 and bool(case.scenario.keep) and case.scenario.storage == "shared"


def _keeps_in_memory(case: Case) -> bool:
    return "memory" in case.scenario.habits


def _has_old_steps(case: Case) -> bool:
    """Tell whether a node that is away has all of a step, which the others may save again meanwhile."""
    scenario = case.scenario
    has_all = _keeps_in_memory(case) and scenario.nodes == 2 and "parity" not in scenario.habits
    return has_all and scenario.save_every > 1 and _has("drain_node")(case) and _has("kill_node")(case)


def _has_parity(case: Case) -> bool:
    """Tell whether parity has to rebuild a file, and there is that of other saves."""
    return {"parity", "rising"} <= {*case.scenario.habits} and _has("lose_disk")(case)


def _saves_to_nodes(case: Case) -> bool:
    return case.scenario.storage == "per_node"


MISTAKES = {
    mistake.name: mistake
    for mistake in (
        Mistake(
            "survivors-discard",
            "a rank that outlives another removes its files, though the coordinator may commit them",
            {"saving.shared_saves:SharedSave.lose_rank": wrong.survivors_discard},
        ),
        Mistake(
            "looked-before-the-lock",
            "whether a step is there is looked at before the right to save is taken",
            {"native.save_directory:SaveDirectory.choose_id": wrong.overwrites},
            can_show=lambda case: case.scenario.jobs > 1,
        ),
        Mistake(
            "commits-over-another",
            "a manifest is put in place without the condition that nobody else has put one there",
            {"media.s3:S3Medium.publish": wrong.publishes_whatever},
            "store",
        ),
        Mistake(
            "temporaries-stay",
            "manifests that dead saves were about to rename stay, and may be renamed late",
            {"native.cleaner:Cleaner.__init__": wrong.knows_no_temporaries},
            can_show=lambda case: case.scenario.storage == "leased" and case.scenario.jobs > 1,
        ),
        Mistake(
            "dead-save-first",
            "the files of a dead save go before the next save of its id is committed, though its commit may come late",
            {"media.lease:LeaseLocks.can_run_out": wrong.never_runs_out},
            "store",
        ),
        Mistake(
            "discards-committed",
            "a failed save removes its files without a look whether it was committed",
            {"native.save_directory:SaveDirectory.discard": wrong.discards_whatever},
        ),
        Mistake(
            "directory-not-synced", "entries are never made durable", {"media.local:LocalBackend.sync": wrong.nothing}
        ),
        Mistake(
            "data-not-synced",
            "data files are never made durable",
            {"media.local:LocalOutputFile.make_durable": wrong.data_is_not_durable},
        ),
        Mistake(
            "manifest-not-synced",
            "a manifest is renamed before its bytes are durable",
            {"media.local:LocalOutputFile.make_durable": wrong.manifest_is_not_durable},
        ),
        Mistake(
            "manifest-before-data",
            "the manifest is durable before the data that it names",
            {
                "media.local:LocalOutputFile.make_durable": wrong.data_is_not_durable,
                "native.save_directory:SaveDirectory.finish": wrong.sync_data_late,
            },
        ),
        Mistake(
            "fsync-again",
            "an fsync that failed is tried again, and believed",
            {"media.local:fsync": wrong.sync_again},
            can_show=lambda case: _loses_memory(case) and _has("io_error")(case),
        ),
        Mistake(
            "done-when-begun",
            "the handle of an asynchronous save is done when the writer has begun",
            {"background.writer:BackgroundWriter._on_begun": wrong.done_when_begun},
        ),
        Mistake(
            "follower-not-durable",
            "a rank that has lost the coordinator's writer and finds the manifest calls the save done, durable or not",
            {"background.outcome:look_for_manifest": wrong.is_not_made_durable},
            can_show=lambda case: _has_pending_writers(case) and _loses_memory(case),
        ),
        Mistake(
            "no-lock", "nobody takes the right to save", {"native.save_directory:SaveDirectory.lock": wrong.no_lock}
        ),
        Mistake(
            "lease-not-renewed",
            "a lease is taken once",
            {"media.lease:LeaseLock._renew": wrong.never_renewed},
            can_show=lambda case: case.scenario.storage in ("leased", "object"),
        ),
        Mistake(
            "lease-at-once",
            "a lease is taken over without waiting for it to run out",
            {"media.lease:LeaseLocks._obtain": wrong.taken_at_once},
            "store",
        ),
        Mistake(
            "lease-not-checked",
            "nobody looks before the commit whether the lease is still held",
            {"media.lease:LeaseLock.check": wrong.nothing, "media.lease:LeaseLock.ensure_held": wrong.nothing},
            "store",
        ),
        Mistake(
            "lease-checked-once",
            "the lease is looked at beside the last checks only, however long these take",
            {"media.lease:LeaseLock.ensure_held": wrong.nothing},
            "store",
        ),
        Mistake(
            "marker-first",
            "the marker goes before the manifest is in place",
            {"native.save_directory:SaveDirectory.publish": wrong.marker_goes_first},
        ),
        Mistake(
            "old-first",
            "what a save replaces goes before the save is committed",
            {"native.save_directory:SaveDirectory.open_save": wrong.old_goes_first},
        ),
        Mistake(
            "own-save-dead",
            "a save takes its own marker for that of a dead one",
            {"native.cleaner:Cleaner.remove_dead_saves": wrong.removes_live_saves},
        ),
        Mistake(
            "one-rank-trusted",
            "ranks go on when the coordinator's step went well",
            {"ranks.communicator:raise_failures": wrong.coordinators_outcome},
        ),
        Mistake(
            "followers-do-not-wait",
            "a writer calls the save done when its own part is",
            {"ranks.writer_group:WriterGroup.lead": wrong.followers_do_not_wait},
        ),
        Mistake(
            "dead-writer-failed",
            "the save of a writer that has died is a failure, committed or not",
            {"background.outcome:look_for_manifest": wrong.dead_are_failures},
        ),
        Mistake(
            "segment-reused",
            "memory is staged into before the writer has read it",
            {"background.staging:StagingPool.take": wrong.segment_is_free_at_once},
        ),
        Mistake(
            "newest-is-latest",
            "latest() gives the highest step, whole or not",
            {"native.directory:latest": wrong.newest_is_latest},
            can_show=_has("person", "care"),
        ),
        Mistake(
            "retention-counts-begun",
            "what is kept is counted with saves that are not committed",
            {
                "manager.step_directories:StepDirectories.records": wrong.counts_uncommitted,
                "manager.step_directories:StepDirectories.retain": wrong.nothing_is_busy,
            },
        ),
        Mistake(
            "retention-first",
            "what need not be kept goes before the new checkpoint is complete",
            {"manager.step_directories:StepDirectories.prepare": wrong.removes_before_saving},
        ),
        Mistake(
            "readers-not-asked",
            "what is being read is removed",
            {"media.local_locks:LocalLocks.claim": wrong.removes_read_ones},
            can_show=_removes_what_is_read,
        ),
        Mistake(
            "periodic-counts",
            "any earlier save counts as the one that a signal asks for",
            {"manager.policies:SaveSchedule.note": wrong.periodic_save_counts},
        ),
        Mistake(
            "restore-by-rank",
            "each rank restores what it can read itself, though the others may have read another step",
            {"manager.restore:restore_checkpoint": wrong.restores_alone},
        ),
        Mistake(
            "reader-holds-nothing",
            "a reader takes no lock on what it reads",
            {"native.directory:_lock_and_read": wrong.reads_without_a_lock},
            can_show=_removes_what_is_read,
        ),
        Mistake(
            "lock-not-adopted",
            "the right to save ends when the writer process has begun",
            {"media.local_locks:LocalLocks.adopt": wrong.lock_is_not_adopted},
        ),
        Mistake(
            "marker-before-files",
            "the marker of a dead save goes before its files",
            {"native.cleaner:Cleaner._remove": wrong.marker_goes_before_files},
        ),
        Mistake(
            "dead-saves-stay",
            "nobody looks for what dead saves have left",
            {"native.cleaner:find_begun": wrong.nothing_begun},
        ),
        Mistake(
            "commit-believed",
            "a commit that failed is reported as done",
            {"native.group_save:GroupSave._commit": wrong.commit_believed},
        ),
        Mistake(
            "nobody-times-out",
            "writers wait for a dead rank for ever",
            {
                "background.pending:SaveSlot.__init__": wrong.nobody_times_out,
                "ranks.lost_ranks:DeathWatch.look": wrong.nobody_has_gone,
            },
        ),
        Mistake(
            "neighbour-blamed",
            "a lost exchange is blamed on the rank at the other end of the connection",
            {"ranks.lost_ranks:find_missing_ranks": wrong.neighbour_is_blamed},
        ),
        Mistake(
            "rank-stops-alone",
            "a rank that got a signal stops, the others are not told",
            {"manager.policies:SaveSchedule.should_save": wrong.stops_alone},
        ),
        Mistake(
            "segment-lost",
            "memory of a save that is over is not used again",
            {"background.staging:StagingPool.give_back": wrong.nothing},
        ),
        Mistake(
            "retention-files-first",
            "a removal begins with the files that the manifest names",
            {"manager.step_directories:StepDirectories._remove": wrong.removes_files_first},
        ),
        Mistake(
            "removal-not-noted",
            "a removal that was interrupted is not carried through",
            {"media.backend:write_file": wrong.removal_is_not_noted},
        ),
        Mistake(
            "node-publishes-alone",
            "a node publishes its manifest before the others have prepared theirs",
            {"native.node_directory:NodeDirectory.prepare_save": wrong.publishes_alone},
            can_show=_saves_to_nodes,
        ),
        Mistake(
            "node-prepared-dead",
            "what a dead save had prepared goes, though a node that is away may have published it",
            {"saving.node_saves:_earlier_saves": wrong.prepared_is_dead},
            can_show=lambda case: _saves_to_nodes(case) and "copies" in case.scenario.habits,
        ),
        Mistake(
            "node-prepared-stays",
            "nobody publishes what a dead save had prepared, though another node has published it",
            {"native.node_directory:NodeDirectory.publish_prepared": wrong.nothing},
            can_show=_saves_to_nodes,
        ),
        Mistake(
            "node-published-discarded",
            "a save that one node could not publish is removed, though others have published it",
            {"native.node_commit:NodeCommit.discard": wrong.discards_published},
            can_show=_saves_to_nodes,
        ),
        Mistake(
            "node-survivors-discard",
            "a rank that outlives another removes its files, though nodes may have published them",
            {"native.node_commit:NodeCommit.lose_rank": wrong.survivors_discard},
            can_show=_saves_to_nodes,
        ),
        Mistake(
            "node-any-order",
            "of two saves of one id on different nodes, it is not known which is newer",
            {"loading.node_files:_read": wrong.any_order},
            can_show=_saves_to_nodes,
        ),
        Mistake(
            "node-publishes-replaced",
            "a node publishes what it had prepared, though others have replaced that save since",
            {"native.node_directory:NodeDirectory.numbers": wrong.all_as_new},
            can_show=lambda case: _saves_to_nodes(case) and case.scenario.overwrites,
        ),
        Mistake(
            "node-coordinator-first",
            "the coordinator's writer publishes a save to nodes before the others have prepared it",
            {"native.node_commit:NodeCommit._on_nodes": wrong.coordinators_writer_publishes_first},
            can_show=lambda case: _saves_to_nodes(case) and case.scenario.is_async,
        ),
        Mistake(
            "node-lost-coordinator",
            "a writer that has lost the coordinator's removes its files, though its node has published them",
            {"background.outcome:_end_after_loss": wrong.lost_coordinator_discards},
            can_show=lambda case: _saves_to_nodes(case) and case.scenario.is_async,
        ),
        Mistake(
            "node-own-manifest",
            "a writer that has lost another counts a save as done that its own node has published",
            {"background.outcome:_end_after_loss": wrong.own_node_decides},
            can_show=lambda case: _saves_to_nodes(case) and case.scenario.is_async,
        ),
        Mistake(
            "node-asks-nobody",
            "each writer that has lost the coordinator's decides by what it knows itself",
            {"background.outcome:_ask": wrong.nothing},
            can_show=lambda case: _saves_to_nodes(case) and case.scenario.is_async,
        ),
        Mistake(
            "parity-another-save",
            "a lost file is rebuilt from parity of another save",
            {"loading.rebuilding:exchange_files": wrong.parity_of_another_save},
            can_show=_has_parity,
        ),
        Mistake(
            "parity-believed",
            "a file that was rebuilt from parity, of another save even, is not compared with the manifest",
            {
                "loading.rebuilding:exchange_files": wrong.parity_of_another_save,
                "native.parity:write_rebuilt": wrong.rebuilt_is_believed,
            },
            can_show=_has_parity,
        ),
        Mistake(
            "root-is-everybodys",
            "a start saves to a root that another one holds, which lives",
            {
                "manager.identities:RunLock.hold": wrong.held_by_everybody,
                "manager.identities:identify_run": wrong.has_seen_all,
            },
            can_show=lambda case: case.scenario.jobs > 1,
        ),
        Mistake(
            "memory-old-first",
            "the steps in memory go before a newer one is whole there",
            {"manager.memory_steps:MemorySteps.save": wrong.old_steps_go_first},
            can_show=_keeps_in_memory,
        ),
        Mistake(
            "memory-old-node",
            "files in the memory of a node that was away are taken for those of a later save",
            {"native.node_directory:token_after": wrong.starts_are_not_counted},
            can_show=_has_old_steps,
        ),
        Mistake(
            "memory-nothing-void",
            "steps in memory that the run has gone back before are taken when their node comes back",
            {"manager.anchor:find_void": wrong.nothing_is_void},
            can_show=lambda case: _keeps_in_memory(case) and _has("drain_node")(case),
        ),
        Mistake(
            "memory-another-run",
            "steps of another run are taken from the memory of nodes",
            {"manager.memory_steps:MemorySteps.find_steps": wrong.any_run},
            can_show=lambda case: _keeps_in_memory(case) and _has("begin_anew")(case),
        ),
    )
}


def make(name: str) -> contextlib.AbstractContextManager[None]:
    """Let the library have a mistake, by its name, for as long as the context lasts."""
    return MISTAKES[name].made()

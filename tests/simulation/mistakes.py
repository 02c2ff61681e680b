"""Mistakes in the protocols, each of which can be put into the library for the time of a run.

They are what a simulation is worth: one that does not find them says nothing when it finds nothing. Each replaces
functions of today's library by such as a plausible change might have left.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.engine.step_record import StepRecord
from paddle_flexckpt.media.backend import SaveLock, write_file
from paddle_flexckpt.media.lease import LEASE_FILE
from paddle_flexckpt.native.directory import is_before, save_of
from paddle_flexckpt.testing.simulation.modules import library_modules
from paddle_flexckpt.undo import Undo

_PACKAGE = "paddle_flexckpt"
# Gets what is right, and gives what takes its place.
Wrong = Callable[[Any], Any]


@dataclass(frozen=True)
class Mistake:
    """A mistake.

    Attributes:
        name: Short, for the command line.
        what: What is wrong, and where it shows.
        changes: By "module:name" or "module:Class.name", what takes the place of what is there.
    """

    name: str
    what: str
    changes: dict[str, Wrong]

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """The library with this mistake, for as long as the context lasts."""
        # A module that is imported later would keep what is wrong.
        library_modules()
        undo = Undo()
        try:
            for where, wrong in self.changes.items():
                module_name, _, path = where.partition(":")
                owner: Any = importlib.import_module(f"{_PACKAGE}.{module_name}")
                *classes, name = path.split(".")
                for each in classes:
                    owner = getattr(owner, each)
                # A KeyError here says that the library has changed, and the mistake has to follow.
                right = vars(owner)[name]
                if classes:
                    undo.set(owner, name, wrong(right))
                else:
                    undo.replace_everywhere(name, right, wrong(right), _PACKAGE)
            yield
        finally:
            undo.put_back()


def nothing(right: Any) -> Any:
    """A function that does nothing."""
    return lambda *_, **__: None


# Durability.


def _data_is_not_durable(right: Any) -> Any:
    def make_durable(self: Any) -> None:
        if not self._path.endswith(".safetensors"):
            right(self)

    return make_durable


def _manifest_is_not_durable(right: Any) -> Any:
    def make_durable(self: Any) -> None:
        if ".manifest" not in self._path:
            right(self)

    return make_durable


def _sync_data_late(right: Any) -> Any:
    from paddle_flexckpt.media.local import sync_path

    def finish(self: Any, save: Any, being_read: bool = False, manifest: Any = None, names: Any = None) -> None:
        for name in manifest.catalog.files if manifest is not None and self.backend.has_path else ():
            with contextlib.suppress(FileNotFoundError):
                sync_path(self.backend.where(name))
        right(self, save, being_read, manifest, names)

    return finish


def _sync_again(right: Any) -> Any:
    def fsync(descriptor: int, path: str) -> None:
        try:
            right(descriptor, path)
        except OSError:
            # The kernel has told the error once; the pages count as clean now.
            right(descriptor, path)

    return fsync


def _done_when_begun(right: Any) -> Any:
    def on_begun(self: Any, number: int) -> None:
        right(self, number)
        save = self._saves[number]
        if save.report is not None:
            save.handle.finish(save.report)

    return on_begun


# The right to save.


def _no_lock(right: Any) -> Any:
    def lock(self: Any) -> SaveLock:
        self.backend.make_directory()
        return SaveLock()

    return lock


def _never_renewed(right: Any) -> Any:
    return lambda self: self._ended.wait()


def _taken_at_once(right: Any) -> Any:
    def obtain(self: Any, claim: Any) -> bool:
        if self._create(claim):
            return bool(self._is_alone(claim))
        write_file(self._backend, LEASE_FILE, claim.encode())
        return False

    return obtain


# Files and their removal.


def _survivors_discard(right: Any) -> Any:
    def lose_rank(self: Any, error: Any) -> None:
        self._is_removable = True
        self.discard()

    return lose_rank


def _discards_whatever(right: Any) -> Any:
    def discard(self: Any, save: Any, rank: int, partitions: Any = None) -> None:
        with contextlib.suppress(OSError):
            for name in (save.prepared_file(rank), save.data_file(rank), save.part_file(rank)):
                self.backend.remove(name)
            if not [*filter(save.owns, self.backend.names())]:
                self.remove_save_files([], save.marker_file)

    return discard


def _marker_goes_first(right: Any) -> Any:
    def publish(self: Any, save: Any, manifest: bytes, *checks: Any) -> Any:
        self.backend.remove(save.marker_file)
        self.backend.sync()
        return right(self, save, manifest, *checks)

    return publish


def _old_goes_first(right: Any) -> Any:
    def open_save(self: Any, *arguments: Any, **keywords: Any) -> Any:
        save = right(self, *arguments, **keywords)
        for name in self.backend.names():
            if is_before(save_of(name), save.unique_id, save.generation):
                self.backend.remove(name)
        return save

    return open_save


def _names_nothing(right: Any) -> Any:
    return lambda self, unique_id: set()


def _removes_live_saves(right: Any) -> Any:
    def remove(directory: Any, current: Any = None, *arguments: Any, **keywords: Any) -> Any:
        # Not with the lock alone: also a reader's clean-up, for which nobody has taken it.
        return right(directory, None, *arguments, **keywords)

    return remove


# Agreement.


def _coordinators_outcome(right: Any) -> Any:
    def raise_failures(ranks: Any, answers: Any, error: Any) -> None:
        right(ranks, [(position, answer) for position, answer in answers if position == 0], error)

    return raise_failures


def _followers_do_not_wait(right: Any) -> Any:
    def await_decision(self: Any, own: Any) -> Any:
        return None if own is None else right(self, own)

    return await_decision


def _decided_twice(right: Any) -> Any:
    def decide(self: Any, save: Any, coordinator: int, verdict: bytes) -> bytes:
        write_file(self.backend, save.decision_file(coordinator), verdict)
        return verdict

    return decide


def _silence_is_death(right: Any) -> Any:
    def refuses(address: str) -> bool:
        from paddle_flexckpt.background import presence

        host, _, port = address.rpartition(":")
        try:
            presence.socket.create_connection((host, int(port)), timeout=presence._ANSWER_SECONDS).close()
        except OSError:
            return True
        return False

    return refuses


def _dead_are_failures(right: Any) -> Any:
    """A writer that has died is a failure, whatever it had committed."""

    def agree_after_death(self: Any, error: CheckpointError) -> Any:
        from paddle_flexckpt.catalog.errors import Failure

        return self._give_up(Failure.of(error))

    return agree_after_death


def _publishes_what_is_prepared(right: Any) -> Any:
    def earlier_saves(known: Any) -> tuple[set[str], set[str]]:
        published, _ = right(known)
        return published | {token for each in known for token in each["prepared"]}, set()

    return earlier_saves


def _commits_one_node(right: Any) -> Any:
    def prepare_save(self: Any, save: Any, rank: int, manifest: Any, node: str) -> None:
        right(self, save, rank, manifest, node)
        lock = self.publish_save(save, rank)
        if lock is not None:
            lock.release()

    return prepare_save


# Memory that two processes share.


def _segment_is_free_at_once(right: Any) -> Any:
    def take(self: Any, nbytes: int) -> Any:
        segment = right(self, nbytes)
        with self._lock:
            self._free.append(segment)
        return segment

    return take


def _bucket_is_free_at_once(right: Any) -> Any:
    def bucket(self: Any) -> Any:
        self.theirs.close()
        self._count += 1
        return self._buckets[(self._count - 1) % len(self._buckets)]

    return bucket


# Reading.


def _newest_is_latest(right: Any) -> Any:
    def latest(path: Any) -> Any:
        from paddle_flexckpt.native.listing import list_checkpoints

        found = list_checkpoints(path)
        return found[-1] if found else None

    return latest


def _listed_once(right: Any) -> Any:
    known: dict[Any, list[int]] = {}

    def list_ids(self: Any) -> list[int]:
        if not known.get(self.path):
            known[self.path] = right(self)
        return known[self.path]

    return list_ids


def _any_save_is_rebuilt(right: Any) -> Any:
    return lambda files, save_token, context: save_token or files[-1].token


def _restores_by_rank(right: Any) -> Any:
    def restore_first(candidates: Any, skipped: Any, comm: Any, targets: Any, options: Any, context: str) -> Any:
        from paddle_flexckpt.native.listing import is_complete

        whole = [each for each in candidates if is_complete(each[1])]
        return right(whole or candidates, skipped, comm, targets, options, context)

    return restore_first


# The manager.


def _counts_uncommitted(right: Any) -> Any:
    def records(self: Any) -> Any:
        found, problems = right(self)
        known = {record.step for record in found}
        begun = [step for step in self._directories() if step not in known and step not in problems]
        newest = max((record.time for record in found), default=0.0)
        return found + [StepRecord(step, newest + 1) for step in begun], problems

    return records


def _removes_before_saving(right: Any) -> Any:
    def prepare(self: Any, step: int, replace: bool) -> None:
        right(self, step, replace)
        # To make room for the new one.
        records, _ = self.records()
        for record in sorted(records, key=lambda each: each.step)[:-1] or records:
            if record.step != step:
                self._remove(record.step)

    return prepare


def _removes_read_ones(right: Any) -> Any:
    from paddle_flexckpt.media.backend import Lock

    return lambda self, name: Lock()


def _periodic_save_counts(right: Any) -> Any:
    def note(self: Any, step: int, saved: bool) -> None:
        right(self, step, saved)
        self._saved_since_stop = self._saved_since_stop or saved

    return note


MISTAKES = {
    mistake.name: mistake
    for mistake in (
        Mistake(
            "survivors-discard",
            "a rank that outlives another removes its files, though the coordinator may commit them",
            {"live.shared_saves:SharedSave.lose_rank": _survivors_discard},
        ),
        Mistake(
            "discards-committed",
            "a failed save removes its files without a look whether it was committed",
            {"native.save_directory:SaveDirectory.discard": _discards_whatever},
        ),
        Mistake("directory-not-synced", "entries are never made durable", {"media.local:LocalBackend.sync": nothing}),
        Mistake(
            "data-not-synced",
            "data files are never made durable",
            {"media.local:LocalOutputFile.make_durable": _data_is_not_durable},
        ),
        Mistake(
            "manifest-not-synced",
            "a manifest is renamed before its bytes are durable",
            {"media.local:LocalOutputFile.make_durable": _manifest_is_not_durable},
        ),
        Mistake(
            "manifest-before-data",
            "the manifest is durable before the data that it names",
            {
                "media.local:LocalOutputFile.make_durable": _data_is_not_durable,
                "native.save_directory:SaveDirectory.finish": _sync_data_late,
            },
        ),
        Mistake("fsync-again", "an fsync that failed is tried again, and believed", {"media.local:fsync": _sync_again}),
        Mistake(
            "done-when-begun",
            "the handle of an asynchronous save is done when the writer has begun",
            {"background.writer:BackgroundWriter._on_begun": _done_when_begun},
        ),
        Mistake(
            "follower-not-durable",
            "a rank that sees the manifest calls the save done, durable or not",
            {"background.outcome:SaveOutcome._make_durable": nothing},
        ),
        Mistake("no-lock", "nobody takes the right to save", {"native.save_directory:SaveDirectory.lock": _no_lock}),
        Mistake("lease-not-renewed", "a lease is taken once", {"media.lease:LeaseLock._renew": _never_renewed}),
        Mistake(
            "lease-at-once",
            "a lease is taken over without waiting for it to run out",
            {"media.lease:LeaseLocks._obtain": _taken_at_once},
        ),
        Mistake(
            "lease-not-checked",
            "nobody looks before the commit whether the lease is still held",
            {"media.lease:LeaseLock.check": nothing, "media.lease:LeaseLock.recheck": nothing},
        ),
        Mistake(
            "lease-checked-once",
            "the lease is looked at beside the last checks only, however long these take",
            {"media.lease:LeaseLock.recheck": nothing},
        ),
        Mistake(
            "files-not-checked",
            "the coordinator commits without a last look at the files",
            {"native.save_directory:SaveDirectory.check_untouched": nothing},
        ),
        Mistake(
            "marker-first",
            "the marker goes before the manifest is in place",
            {"native.save_directory:SaveDirectory.publish": _marker_goes_first},
        ),
        Mistake(
            "old-first",
            "what a save replaces goes before the save is committed",
            {"native.save_directory:SaveDirectory.open_save": _old_goes_first},
        ),
        Mistake(
            "names-believed",
            "files go by their names, though a listing out of date has let a save take a checkpoint's names",
            {"native.save_directory:SaveDirectory.named_files": _names_nothing},
        ),
        Mistake(
            "own-save-dead",
            "a save takes its own marker for that of a dead one",
            {"native.dead_saves:remove_dead_saves": _removes_live_saves},
        ),
        Mistake(
            "one-rank-trusted",
            "ranks go on when the coordinator's step went well",
            {"live.communicator:_raise_failures": _coordinators_outcome},
        ),
        Mistake(
            "followers-do-not-wait",
            "a writer calls the save done when its own part is",
            {"background.outcome:SaveOutcome._await_decision": _followers_do_not_wait},
        ),
        Mistake(
            "decided-twice",
            "who commits and who gives up do not exclude each other",
            {"native.save_directory:SaveDirectory.decide": _decided_twice},
        ),
        Mistake(
            "silence-is-death",
            "a process whose host does not answer in time counts as dead",
            {"background.presence:_refuses": _silence_is_death},
        ),
        Mistake(
            "dead-writer-failed",
            "the save of a writer that has died is a failure, committed or not",
            {"background.outcome:SaveOutcome.agree_after_death": _dead_are_failures},
        ),
        Mistake(
            "node-publishes-alone",
            "a node publishes what it has prepared, before the others have",
            {"native.node_directory:NodeDirectory.prepare_save": _commits_one_node},
        ),
        Mistake(
            "prepared-is-published",
            "what a dead save had prepared is published, though no node had",
            {"live.node_saves:_earlier_saves": _publishes_what_is_prepared},
        ),
        Mistake(
            "segment-reused",
            "memory is staged into before the writer has read it",
            {"background.staging:StagingPool.take": _segment_is_free_at_once},
        ),
        Mistake(
            "bucket-reused",
            "a wave does not wait until the writer has written the bucket",
            {"background.waves:WaveSender.bucket": _bucket_is_free_at_once},
        ),
        Mistake(
            "newest-is-latest",
            "latest() gives the highest step, whole or not",
            {"native.listing:latest": _newest_is_latest},
        ),
        Mistake(
            "listed-once",
            "a reader lists a directory once, and keeps to that",
            {"native.directory:CheckpointDirectory.list_ids": _listed_once},
        ),
        Mistake(
            "repair-takes-any",
            "a repair takes the files of any save, where those of several are there",
            {"native.repair:_choose_save": _any_save_is_rebuilt},
        ),
        Mistake(
            "restore-by-rank",
            "each rank restores what it finds whole itself, not what was agreed on",
            {"manager.restore:restore_first": _restores_by_rank},
        ),
        Mistake(
            "retention-counts-begun",
            "what is kept is counted with saves that are not committed",
            {"manager.steps:StepDirectories.records": _counts_uncommitted},
        ),
        Mistake(
            "retention-first",
            "what need not be kept goes before the new checkpoint is complete",
            {"manager.steps:StepDirectories.prepare": _removes_before_saving},
        ),
        Mistake(
            "readers-not-asked",
            "what is being read is removed",
            {"media.local_locks:LocalLocks.claim": _removes_read_ones},
        ),
        Mistake(
            "periodic-counts",
            "any earlier save counts as the one that a signal asks for",
            {"manager.schedule:SaveSchedule.note": _periodic_save_counts},
        ),
    )
}


def make(name: str) -> contextlib.AbstractContextManager[None]:
    """The library with a mistake, by its name, for as long as the context lasts."""
    return MISTAKES[name].made()

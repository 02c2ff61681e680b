"""What takes the place of right functions in the mistakes of ``mistakes.py``: each gets what is right."""

from __future__ import annotations

import contextlib
import re
from typing import Any

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.catalog.errors import Failure
from paddle_flexckpt.foreign.paddle_files import open_to_save
from paddle_flexckpt.manager.anchor import SAVES_OF_A_START
from paddle_flexckpt.media.backend import Lock, SaveLock, write_file
from paddle_flexckpt.media.lease import LEASE_FILE
from paddle_flexckpt.media.local import LocalBackend
from paddle_flexckpt.native.save_names import rank_of, save_of
from paddle_flexckpt.tools.step_record import StepRecord


def nothing(right: Any) -> Any:
    """Return a function that does nothing."""
    return lambda *_, **__: None


# Durability.


def data_is_not_durable(right: Any) -> Any:
    def make_durable(self: Any) -> None:
        if not self._path.endswith(".safetensors"):
            right(self)

    return make_durable


def manifest_is_not_durable(right: Any) -> Any:
    def make_durable(self: Any) -> None:
        if ".manifest" not in self._path:
            right(self)

    return make_durable


def sync_data_late(right: Any) -> Any:
    from paddle_flexckpt.media.local import sync_path

    def finish(self: Any, save: Any, being_read: bool = False, manifest: Any = None, names: Any = None) -> None:
        for name in manifest.catalog.files if manifest is not None and self.backend.has_path else ():
            with contextlib.suppress(FileNotFoundError):
                sync_path(self.backend.where(name))
        right(self, save, being_read, manifest, names)

    return finish


def sync_again(right: Any) -> Any:
    def fsync(descriptor: int, path: str) -> None:
        try:
            right(descriptor, path)
        except OSError:
            # The kernel has told the error once; the pages count as clean now.
            right(descriptor, path)

    return fsync


def done_when_begun(right: Any) -> Any:
    def on_begun(self: Any, number: int) -> None:
        right(self, number)
        save = self._saves[number]
        if save.report is not None:
            save.handle.finish(save.report)

    return on_begun


# The right to save.


def no_lock(right: Any) -> Any:
    def lock(self: Any) -> SaveLock:
        self.backend.make_directory()
        return SaveLock()

    return lock


def never_renewed(right: Any) -> Any:
    return lambda self: self._ended.wait()


def taken_at_once(right: Any) -> Any:
    def obtain(self: Any, claim: Any) -> bool:
        if self._create(claim):
            return bool(self._is_alone(claim))
        write_file(self._backend, LEASE_FILE, claim.encode())
        return False

    return obtain


def lock_is_not_adopted(right: Any) -> Any:
    def adopt(self: Any, token: Any, descriptor: int | None) -> SaveLock:
        right(self, token, descriptor).release()
        return SaveLock()

    return adopt


# Files and their removal.


def survivors_discard(right: Any) -> Any:
    def lose_rank(self: Any, *error: Any) -> None:
        comm = self.comm if hasattr(self, "comm") else self._comm
        with contextlib.suppress(OSError):
            if not self.directory.is_committed(self.names):
                self.directory.backend.remove(self.names.data_file(comm.rank))

    return lose_rank


def overwrites(right: Any) -> Any:
    return lambda self, unique_id, names, overwrite=True: right(self, unique_id, names)


def publishes_whatever(right: Any) -> Any:
    return lambda self, name, data, replaced, before: self.put(name, data, before=before)


def discards_whatever(right: Any) -> Any:
    def discard(self: Any, save: Any, ranks: Any = (), partitions: int = 0) -> None:
        with contextlib.suppress(OSError, CheckpointError):
            self.cleaner.remove_save(save, map(save.data_file, ranks))

    return discard


def marker_goes_first(right: Any) -> Any:
    def publish(self: Any, save: Any, manifest: bytes, *checks: Any) -> Any:
        self.backend.remove(save.marker_file)
        self.backend.sync()
        return right(self, save, manifest, *checks)

    return publish


def old_goes_first(right: Any) -> Any:
    def open_save(self: Any, *arguments: Any, **keywords: Any) -> Any:
        save = right(self, *arguments, **keywords)
        for name in self.backend.names():
            other = save_of(name)
            if other is not None and other.unique_id == save.unique_id and other != save.save_id:
                self.backend.remove(name)
        return save

    return open_save


def removes_live_saves(right: Any) -> Any:
    def remove(self: Any, own: Any = None, *arguments: Any, **keywords: Any) -> Any:
        # Not with the lock alone: also a reader's clean-up, for which nobody has taken it.
        return right(self, None, *arguments, **keywords)

    return remove


def marker_goes_before_files(right: Any) -> Any:
    def remove(self: Any, useless: Any, dead: Any, names: Any) -> Any:
        for each in dead:
            self._backend.remove(each.marker)
        return right(self, useless, dead, names)

    return remove


def nothing_begun(right: Any) -> Any:
    return lambda *_, **__: iter(())


def never_runs_out(right: Any) -> Any:
    return property(lambda self: False)


def knows_no_temporaries(right: Any) -> Any:
    def __init__(self: Any, *arguments: Any) -> None:
        right(self, *arguments)
        self._temporary = re.compile(r"(?!)")

    return __init__


# Agreement.


def coordinators_outcome(right: Any) -> Any:
    def raise_failures(ranks: Any, answers: Any, error: Any) -> None:
        right(ranks, [(position, answer) for position, answer in answers if position == 0], error)

    return raise_failures


def followers_do_not_wait(right: Any) -> Any:
    def lead(self: Any, leader: int, work: Any, context: str = "") -> None:
        if self.position == leader:
            right(self, leader, work, context)

    return lead


def is_not_made_durable(right: Any) -> Any:
    def look(job: Any, directory: Any, how: str = "") -> Any:
        return None if directory.is_committed(job.names) else right(job, directory, how)

    return look


def dead_are_failures(right: Any) -> Any:
    """Count a save whose coordinator's writer has died as a failure, whatever it had committed."""
    return lambda job, directory, how="": Failure("CheckpointError", ("the background writer has ended",))


def commit_believed(right: Any) -> Any:
    def commit(self: Any, *arguments: Any) -> None:
        with contextlib.suppress(OSError, CheckpointError):
            right(self, *arguments)

    return commit


def nobody_times_out(right: Any) -> Any:
    def init(self: Any, pool: Any, launch: Any, timeout: float, address: str) -> None:
        right(self, pool, launch, 1e9, address)

    return init


def nobody_has_gone(right: Any) -> Any:
    return lambda *_: []


def neighbour_is_blamed(right: Any) -> Any:
    def find_missing_ranks(store: Any, group: str, ranks: Any, rank: int) -> Any:
        from paddle_flexckpt.ranks.lost_ranks import Missing

        found = right(store, group, ranks, rank)
        neighbour = ranks[(list(ranks).index(rank) + 1) % len(ranks)]
        return found and Missing([neighbour], [], [])

    return find_missing_ranks


def stops_alone(right: Any) -> Any:
    def should_save(self: Any, step: int, context: str) -> bool:
        before = self.should_stop
        wanted = bool(right(self, step, context))
        self.should_stop = before or self._signals.received
        return wanted

    return should_save


# Memory that two processes share.


def segment_is_free_at_once(right: Any) -> Any:
    def take(self: Any, nbytes: int) -> Any:
        segment = right(self, nbytes)
        with self._lock:
            self._free.append(segment)
        return segment

    return take


# Reading.


def restores_alone(right: Any) -> Any:
    def restore_checkpoint(steps: Any, step: Any, comm: Any, *arguments: Any) -> Any:
        from paddle_flexckpt.ranks.communicator import SoloCommunicator

        return right(steps, step, SoloCommunicator(comm.rank), *arguments)

    return restore_checkpoint


def reads_without_a_lock(right: Any) -> Any:
    return lambda directory, unique_id, keys: (Lock(), directory.read_committed(unique_id, keys))


def newest_is_latest(right: Any) -> Any:
    def latest(path: Any) -> Any:
        from paddle_flexckpt.native.directory import list_checkpoints

        found = list_checkpoints(path)
        return found[-1] if found else None

    return latest


# The manager.


def removes_files_first(right: Any) -> Any:
    def remove(self: Any, step: int) -> bool:
        directory = open_to_save(self.directory(step))
        with contextlib.suppress(CheckpointError, FileNotFoundError):
            for name in directory.read_manifest(0, ()).files:
                directory.backend.remove(name)
        return bool(right(self, step))

    return remove


def removal_is_not_noted(right: Any) -> Any:
    def write(backend: Any, name: str, *arguments: Any) -> None:
        if not name.endswith(".removing"):
            right(backend, name, *arguments)

    return write


def counts_uncommitted(right: Any) -> Any:
    def records(self: Any) -> Any:
        found, problems = right(self)
        known = {record.step for record in found}
        begun = [step for step in self._directories() if step not in known and step not in problems]
        newest = max((record.time for record in found), default=0.0)
        return found + [StepRecord(step, newest + 1) for step in begun], problems

    return records


def held_by_everybody(right: Any) -> Any:
    return lambda self: False


def has_seen_all(right: Any) -> Any:
    return lambda path, steps, known, *arguments: right(path, steps, known, *arguments[:-1], known)


def nothing_is_busy(right: Any) -> Any:
    return lambda self, policies, newest, busy, doubtful=(): right(self, policies, newest, (), doubtful)


def removes_before_saving(right: Any) -> Any:
    def prepare(self: Any, step: int, replace: bool) -> None:
        right(self, step, replace)
        # To make room for the new one.
        records, _ = self.records()
        for record in sorted(records, key=lambda each: each.step)[:-1] or records:
            if record.step != step:
                self._remove(record.step)

    return prepare


def removes_read_ones(right: Any) -> Any:
    return lambda self, name: Lock()


def periodic_save_counts(right: Any) -> Any:
    def note(self: Any, step: int, saved: bool) -> None:
        right(self, step, saved)
        self._saved_since_stop = self._saved_since_stop or saved

    return note


# Disks of nodes.


def publishes_alone(right: Any) -> Any:
    def prepare_save(self: Any, save: Any, rank: int, manifest: Any, node: str) -> None:
        right(self, save, rank, manifest, node)
        lock = self.publish_save(save, rank)
        if lock is not None:
            lock.release()

    return prepare_save


def prepared_is_dead(right: Any) -> Any:
    def earlier_saves(known: Any, node_names: Any) -> tuple[set[str], set[str]]:
        published, _ = right(known, node_names)
        return published, {token for each in known for token in each["prepared"]} - published

    return earlier_saves


def discards_published(right: Any) -> Any:
    def discard(self: Any) -> None:
        self._is_removable = True
        right(self)

    return discard


def any_order(right: Any) -> Any:
    def read(directory: Any, unique_id: int, held: Any) -> tuple[Any, dict[str, Any]]:
        manifest, about = right(directory, unique_id, held)
        if "save" in about:
            about["save"][0] = 0
        return manifest, about

    return read


def all_as_new(right: Any) -> Any:
    def numbers(self: Any) -> list[tuple[int, int, str]]:
        return [(unique_id, 0, token) for unique_id, _, token in right(self)]

    return numbers


def coordinators_writer_publishes_first(right: Any) -> Any:
    """Publish on the coordinator's node before the writers of the others have prepared."""

    def on_nodes(self: Any, step: Any, context: str) -> None:
        def prepare_and_publish() -> None:
            step()
            replaced = self.directory.publish_save(self.names, self._comm.rank)
            if replaced is not None:
                replaced.release()

        leads = getattr(self._comm, "_leads", False) and step.__name__ == "prepare"
        right(self, prepare_and_publish if leads else step, context)

    return on_nodes


def lost_coordinator_discards(right: Any) -> Any:
    def end_after_loss(job: Any, directory: Any, save: Any, error: Any) -> Any:
        save._is_removable = True
        save.discard()
        return right(job, directory, save, error)

    return end_after_loss


def own_node_decides(right: Any) -> Any:
    """Count a save as done that this node has published, whatever the others have."""

    def end_after_loss(job: Any, directory: Any, save: Any, error: Any) -> Any:
        failure = right(job, directory, save, error)
        return None if directory.is_committed(job.names) else failure

    return end_after_loss


def parity_of_another_save(right: Any) -> Any:
    def exchange(comm: Any, makings: Any, open_file: Any, context: str) -> None:
        def open_any(name: str) -> Any:
            names = open_file.__self__.names()
            others = [each for each in names if each.endswith(".parity") and rank_of(each) == rank_of(name)]
            return open_file(next((each for each in others if each != name and name in others), name))

        right(comm, makings, open_any, context)

    return exchange


def rebuilt_is_believed(right: Any) -> Any:
    @contextlib.contextmanager
    def write(backend: Any, manifest: Any, name: str) -> Any:
        with backend.create(name, "replace", manifest.sizes[name]) as file:
            yield lambda part: file.write(memoryview(part))
        backend.sync()

    return write


# Memory of nodes.


def old_steps_go_first(right: Any) -> Any:
    def save(self: Any, asked: Any, *arguments: Any) -> Any:
        from paddle_flexckpt.tools.memory_runs import remove_step, steps_in

        for step in steps_in(self._run_directory()) if self._acts else ():
            if step != asked.step:
                remove_step(self.directory(step))
        return right(self, asked, *arguments)

    return save


def starts_are_not_counted(right: Any) -> Any:
    return lambda number: right(number % SAVES_OF_A_START)


def nothing_is_void(right: Any) -> Any:
    return lambda starts, later: {}


def any_run(right: Any) -> Any:
    def find_steps(self: Any, run: Any, context: str) -> Any:
        names = LocalBackend(str(self._tier.path)).names("directories") if self._exists else ()
        return right(self, max(names, default=run), context)

    return find_steps

"""The root directory of a run: one directory for each step, its record, and the retention of steps."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, Union

from paddle_flexckpt.catalog import (
    CheckpointError,
    CorruptCheckpointError,
    UnreadableCheckpointError,
    ValidationError,
)
from paddle_flexckpt.catalog.errors import TakenError
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.foreign.paddle_files import open_to_save
from paddle_flexckpt.manager.anchor import ANCHOR, AnchorFile
from paddle_flexckpt.manager.identities import RunLock, identify_run, of_one_run
from paddle_flexckpt.manager.policies import KeepBest, KeepPolicy, best_first, steps_to_remove
from paddle_flexckpt.manager.removal import MANIFEST, UNIQUE_ID, Removal, interrupted, name_of, page_of, report_of
from paddle_flexckpt.manager.step_listing import StepListing
from paddle_flexckpt.media.backend import Backend, Location, map_files, write_file
from paddle_flexckpt.media.local import LocalBackend
from paddle_flexckpt.media.opening import open_destination, reopen
from paddle_flexckpt.native.directory import CheckpointInfo, LockedManifest, list_checkpoints
from paddle_flexckpt.native.manifest import read_save_token
from paddle_flexckpt.report import SaveReport
from paddle_flexckpt.tools.memory_runs import is_run
from paddle_flexckpt.tools.step_record import RECORD, StepRecord, read_record

logger = logging.getLogger("paddle_flexckpt")

Which = Union[int, Literal["latest", "best"]]
_UNREADABLE = "cannot be read"
_FULL = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT))
# A page, report or anchor that was not put in place.
_TEMPORARY = re.compile(r"(?:step_\d{8,}\.(?:html|report\.json)|run\.json)\.[0-9a-f]{32}\.tmp", re.ASCII)


@dataclass(frozen=True)
class _CachedStep:
    """Facts read of a step's checkpoint, cached until its save token changes."""

    token: str  # of its save: each save of a step has another
    record: StepRecord | None  # None if no manager saved it, or it is damaged
    problem: str = ""


class StepDirectories:
    """The step directories of a root, as the coordinator reads and changes them. One process uses it at a time.

    Attributes:
        path: The root.
        anchor: What it says of the memory of nodes.
        run: The run that saves here, whose steps alone retention removes; None until :meth:`begin_run`.
    """

    def __init__(self, root: Location) -> None:
        """Take the root directory; it need not exist."""
        backend = open_destination(root)
        # A relative root is made absolute: the program may change its working directory.
        self._root = reopen(backend.reopen_token()) if type(backend) is LocalBackend else backend
        self.path = self._root.path
        self._listing = StepListing(self._root)
        self._removal, self.anchor = Removal(self._root), AnchorFile(self._root)
        self._cache: dict[int, _CachedStep] = {}
        # Steps with a checkpoint whose directory has no leftovers of dead saves, until the next save of the step.
        self._cleaned: set[int] = set()
        # The steps that were here at the last restore, and those that this start has saved.
        self._seen: set[int] = set()
        self._lock = RunLock(self._root)
        self.run: str | None = None

    def directory(self, step: int) -> Backend:
        """Return the directory of a step, whether it exists or not."""
        return self._root.child(name_of(step))

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, damaged or not, in rising order; of a lost later one warn."""
        steps = self._listing.steps()
        self._listing.lost_above(steps, fails=False)
        return steps

    def checkpoints(self) -> list[CheckpointInfo]:
        """Return an entry for each step that has a checkpoint, in rising order of steps."""
        found = []
        for step in self.steps():
            directory = self.directory(step)
            try:
                infos = list_checkpoints(directory)
            except UnreadableCheckpointError as error:
                infos = [CheckpointInfo(directory.path, UNIQUE_ID, step, 0, 0, 0, complete=False, problem=str(error))]
            found += [info for info in infos if (info.path, info.unique_id) == (directory.path, UNIQUE_ID)]
        return found

    def records(self) -> tuple[list[StepRecord], dict[int, str]]:
        """Return the records of the checkpoints that a manager saved, and the problems of damaged ones by step.

        This reads the first bytes of all manifests, and the records of new checkpoints.
        """
        trusted = {step for step, each in self._cache.items() if not each.problem}
        known = self.look_at(self._listing.steps(trusted))
        if trusted - known.keys():
            known = self.look_at(self._listing.steps())  # a removed step may have been replaced by a new one meanwhile
        self._cache = known
        records = [each.record for each in known.values() if each.record is not None]
        return records, {step: each.problem for step, each in known.items() if each.problem}

    def run_of(self, step: int) -> str:
        """Return the identity of the run that saved a step, as last read; "" if it has not been read, or has none."""
        known = self._cache.get(step)
        return known.record.run if known is not None and known.record is not None else ""

    def look_at(self, steps: Sequence[int]) -> dict[int, _CachedStep]:
        """Return what is known of the checkpoints of these steps, read anew where one has been saved again."""

        def look(step: int) -> _CachedStep | None:
            try:
                return self._look(step)
            except FileNotFoundError:
                return None  # it has just been removed
            except OSError as error:
                return _CachedStep("", None, f"{_UNREADABLE}: {type(error).__name__}: {error}")

        found = zip(steps, map_files(self._root, look, steps))
        known = {step: each for step, each in found if each is not None}
        self._cache.update(known)
        return known

    def _look(self, step: int) -> _CachedStep:
        directory = self.directory(step)
        try:
            token = save_token_in(directory)
        except CorruptCheckpointError as error:
            return _CachedStep("", None, str(error))
        known = self._cache.get(step)
        if known is not None and known.token == token and not known.problem:
            return known
        try:
            with LockedManifest(SourceDirectory(directory), UNIQUE_ID, [RECORD]) as manifest:
                if manifest.partial:
                    raise CorruptCheckpointError(f"{directory.path} is partial: {manifest.partial}")
                record = read_record(directory, manifest)
                if record is not None and record.step != step:
                    raise CorruptCheckpointError(f"{directory.path} is the checkpoint of step {record.step}")
                return _CachedStep(manifest.save_token, record)
        except (CorruptCheckpointError, ValidationError) as error:
            if not SourceDirectory(directory).has_manifest(UNIQUE_ID):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), directory.where(MANIFEST)) from error
            if known is None or known.problem != str(error):
                logger.warning(f"the checkpoint of step {step} is damaged, and is left alone: {error}")
            return _CachedStep(token, None, str(error))

    def order(
        self, which: Which, best: KeepBest | None, fallback: bool, in_memory: Collection[int] = ()
    ) -> tuple[list[int], dict[int, str]]:
        """Return the steps to restore, in the order in which they are tried, and the problems of damaged ones.

        The first is ``which``, if it is not ``in_memory`` alone. With ``fallback`` come the next lower ones, for
        ``"best"`` the next best.

        Raises:
            ValidationError: There is no such checkpoint.
            CorruptCheckpointError: The best cannot be told, as one is damaged, and there may be no other.
        """
        steps, damaged = self._listing.steps(), dict[int, str]()
        self._seen |= {*steps}
        begun = self._listing.begun()
        if which == "latest":
            damaged = self._listing.lost_above({*steps, *in_memory}, fails=not (fallback and steps))
        if not steps and not in_memory:
            self._listing.check_no_checkpoint()
            raise ValidationError(
                [
                    f"there is no complete checkpoint in {self.path}{_unfinished(begun)}. Remedy (FC301): correct the "
                    "path; ask latest_step() first"
                ]
            )
        if which == "latest":
            order = steps[::-1]
            later = [each for each in begun if each > max(steps, default=-1)]
            if later:
                logger.warning(f"the steps in {self.path} are {steps}{_unfinished(later)}")
        elif which == "best":
            order, damaged = self.best(best, fallback)
            if not order and not damaged:
                raise ValidationError(
                    [f"no checkpoint in {self.path} has what {best} asks for; there are the steps {steps}"]
                )
        elif which in {*steps, *in_memory}:
            order = [step for step in reversed(steps) if step <= which and (fallback or step == which)]
        elif which in self._listing.lost():
            raise CorruptCheckpointError(self._listing.explain_lost(which))
        else:
            raise ValidationError(
                f"there is no complete checkpoint of step {which} in {self.path}; there are "
                f"{sorted({*steps, *in_memory})}{_unfinished(begun)}. Remedy (FC303): restore one of these"
            )
        if not fallback:
            return order[:1], damaged
        return of_one_run(self.path, order, _identities(self.look_at(order))), damaged

    def best(self, best: KeepBest | None, fallback: bool = False) -> tuple[list[int], dict[int, str]]:
        """Return steps by a metric, the best first, and the problems of damaged ones; errors as of :meth:`order`."""
        if best is None:
            raise ValidationError(
                [
                    "no metric says which checkpoint is the best. "
                    "Remedy (FC903): restore the step that best_step(metric=...) returns"
                ]
            )
        records, damaged = self.records()
        damaged |= {step: self._listing.explain_lost(step) for step in self._listing.lost()}
        if damaged and not fallback:
            raise CorruptCheckpointError(
                "the best checkpoint cannot be told, as some are damaged: "
                + "; ".join(f"step {step}: {why}" for step, why in damaged.items())
                + ". Remedy (FC903): name a step; or repair the damaged ones, or move them out of this directory"
            )
        return best_first(records, best.metric, best.mode), damaged

    def find_run(self, step: int, restored: Which | None, run: str = "") -> None:
        """Hold the root for the run that saves ``step`` first, now or later; errors as of :func:`identify_run`."""
        known = self._hold_for(step, restored, run)[0]
        if restored is None and not known:
            self._listing.tell_of_new_run()

    def _hold_for(self, step: int, restored: Which | None, run: str) -> tuple[dict[int, _CachedStep], str]:
        """Hold the root for the run that saves ``step``; return what is known of the steps there, and its identity."""
        if isinstance(self._root, LocalBackend):
            self._root.check_writable()
        try:
            self._lock.hold()
            known = self.look_at(self._listing.steps())
            if self._lock.is_a_mate_s:
                self._seen |= {*known}
            if restored is None and not known:
                self._listing.lost_above((), fails=True)  # they are not known to be of another run
                self._listing.check_no_checkpoint()
            return known, identify_run(self.path, known, _identities(known), step, restored, run, self._seen)
        except BaseException:
            self._lock.release()  # who is refused keeps nobody else away
            raise

    def release(self) -> None:
        """Give the root back, for the next start."""
        self._lock.release()

    def begin_run(self, step: int, restored: Which | None, run: str = "") -> str:
        """Begin to save the steps of a run; return its identity, as :func:`identify_run` does.

        Of higher steps of this run there is a warning: a later restore of the latest takes them.
        """
        known, run = self._hold_for(step, restored, run)
        self.run = run
        left = [str(each) for each in _identities(known) if each > step]
        if left:
            logger.warning(
                f"{self.path} has steps {', '.join(left[:9])} of this run above step {step}, from before it went back: "
                "a restore of the latest takes them, not this step. Remedy (FC903): move those steps to another "
                "directory; or continue in another root, with a manager of its own"
            )
        self.anchor.begin(found.token for each, found in known.items() if each > step and found.token)
        return run

    def find_memory(self) -> tuple[str, str, list[tuple[int, int]]]:
        """Return what the root says of the memory of nodes.

        Returns:
            The run whose steps are looked for there, or ""; what is wrong with the anchor; and starts, each with the
            lowest step in the root from the first on that it has saved. Without an anchor the run is that of the
            highest step that a manager has saved.
        """
        known, problem = self.anchor.read()
        steps = self._listing.steps() if problem or known.saves else []
        for step in reversed(steps) if problem else ():
            with contextlib.suppress(OSError):
                record = self._look(step).record
                if record is not None:
                    how = f"so steps in memory are looked for by the run of step {step}"
                    return record.run if is_run(record.run) else "", f"{self._root.where(ANCHOR)} {problem}, {how}", []
        since = []
        for start, first in known.saves:
            left = {token for noted, token in known.left if noted == start}
            own = (step for step in steps if step >= first and not (left and self._token(step) in left))
            since += [(start, step) for step in islice(own, 1)]
        return known.run, "", since

    def _token(self, step: int) -> str:
        with contextlib.suppress(OSError, CorruptCheckpointError):
            return save_token_in(self.directory(step))
        return ""

    def prepare(self, step: int, replace: bool) -> None:
        """Prepare a step's directory for a save.

        Raises:
            ValidationError: There is a checkpoint of this step, and ``replace`` is False.
            OSError: The rest of an interrupted removal could not be removed.
        """
        if self._lock.hold():  # it was lost meanwhile
            self._hold_for(step, "latest", self.run or "")
        self._cleaned.discard(step)
        self._seen.add(step)
        names = self._root.names()
        if step in interrupted(names):
            self._removal.finish(step)
        directory = self.directory(step)
        if open_to_save(directory).has_manifest(UNIQUE_ID):  # a listing may be out of date
            if not replace:
                raise ValidationError(
                    f"there is a checkpoint of step {step} in {directory.path}. Remedy (FC405): give another run its "
                    "own directory; or, to lose that checkpoint, overwrite=True replaces it as soon as the new one is "
                    "complete"
                )
            self._root.remove(page_of(step))  # the page of the old checkpoint
        if ANCHOR in names:
            self.anchor.note_save(step)

    def write_page(self, step: int, content: str) -> None:
        """Write or replace the page of a step."""
        self._write_beside(step, page_of(step), content)
        self._root.sync()

    def give_up(self, step: int, error: CheckpointError) -> None:
        """Remove the directory of a save that failed, if it is empty and not another save's. The error tells that."""
        if not isinstance(error, TakenError):
            with contextlib.suppress(OSError, CheckpointError):  # an empty directory does no harm
                self.directory(step).remove_directory()

    def retain(
        self, policies: Sequence[KeepPolicy], newest: int | None, busy: Collection[int], doubtful: Collection[int] = ()
    ) -> list[int]:
        """Remove the checkpoints that no policy keeps, and leftovers of dead saves and interrupted removals.

        A checkpoint is left alone if it is being read, was not saved by a manager, is damaged, or is ``busy``: being
        saved in the background. A power loss may undo busy saves, and ``doubtful`` checkpoints may be useless. So the
        policies are applied twice, with and without the busy and doubtful steps. A checkpoint is removed only if both
        results leave it out. Returned are the steps removed.

        Raises:
            CheckpointError: Something could not be removed; all that could be has been.
        """
        problems: list[str] = []

        def attempt(work: Callable[[int], bool], step: int) -> bool:
            try:
                return work(step)
            except OSError as error:
                problems.append(f"{type(error).__name__}: {error}")
                return False

        names = self._root.names()
        for name in filter(_TEMPORARY.fullmatch, names):
            with contextlib.suppress(OSError):  # it does no harm, and the next save tries again
                self._root.remove(name)
        for step in interrupted(names):
            attempt(self._removal.finish, step)
        directories = {*self._listing.directories()}
        self._cleaned &= directories
        for step in sorted(directories - self._cleaned):
            if step not in busy:
                attempt(self._removal.remove_dead_save, step)
        records, damaged = self.records()
        self._cleaned = {record.step for record in records} - {*busy}
        # For these no warning was logged, as they may be readable the next time.
        problems += [f"step {step} {why}" for step, why in damaged.items() if why.startswith(_UNREADABLE)]
        records = [record for record in records if record.run == self.run]
        complete = [record for record in records if record.step not in {*busy, *doubtful}]
        unneeded = {*steps_to_remove(records, policies, newest)}
        removable = [step for step in steps_to_remove(complete, policies, newest) if step in unneeded]
        removed = [step for step in removable if attempt(self._remove, step)]
        for step in removed:
            del self._cache[step]
        if problems:
            raise CheckpointError("; ".join(dict.fromkeys(problems)))
        return removed

    def _remove(self, step: int) -> bool:
        return self._removal.remove(step, self._cache[step].token)

    def write_report(self, step: int, report: SaveReport) -> None:
        """Write the report of a step's save beside its directory.

        Raises:
            OSError: It could not be written.
        """
        self._write_beside(step, report_of(step), f"{report.to_json()}\n")

    def _write_beside(self, step: int, name: str, content: str) -> None:
        """Write a file of a step; not if another job's manager has removed the step meanwhile."""
        for is_last in (False, True):
            try:
                write_file(self._root, name, content.encode(), "replace")
                break
            except FileNotFoundError:  # another job's manager took the temporary file for a dead one's and removed it
                if is_last:
                    raise
        if MANIFEST not in self.directory(step).names():
            self._root.remove(name)


def _identities(known: Mapping[int, _CachedStep]) -> dict[int, str | None]:
    return {step: each.record.run if each.record else None for step, each in known.items() if not each.problem}


def explain_full(error: CheckpointError, removed: Sequence[int], problem: str) -> str:
    """Return the text of an error of a full disk, after which some steps were removed, or there was a problem."""
    if removed:
        steps = ", ".join(f"step {step}" for step in removed)
        return f"{error}. To make room, steps that need not be kept were removed: {steps}. Remedy (FC402): save again"
    why = f"the removal of steps that need not be kept has failed: {problem}" if problem else "no step can go yet"
    return (
        f"{error}. A step that need not be kept is removed when the new checkpoint is complete, so there has to be "
        f"room for one more than is kept, and {why}. Remedy (FC402): make room; or, if more than one "
        "step is kept, keep fewer, and save twice: the first removes the others even if it fails"
    )


def _unfinished(steps: Sequence[int]) -> str:
    """Return what is said of steps whose save has begun and is not complete."""
    return f"; unfinished saves, which are running or died: {', '.join(map(str, steps))}" if steps else ""


def is_full(error: CheckpointError) -> bool:
    """Return whether a save has failed because the disk was full."""
    return any(text in str(error) for text in _FULL)


def save_token_in(directory: Backend, unique_id: int = UNIQUE_ID) -> str:
    """Return the save token of a checkpoint, by default a step's; errors of :func:`read_save_token`."""
    name = f"{unique_id}.manifest"
    with directory.open(name) as file:
        return read_save_token(file, directory.where(name))

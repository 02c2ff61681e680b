"""Saves that are not known to have ended, and the work after a save, the same on all ranks.

The work after a save consists of pages, reports and retention (the removal of checkpoints that no policy keeps).

Tested in tests/manager/test_pending_steps.py, tests/manager/test_step_pages.py, tests/manager/test_reports.py and
tests/manager/test_step_directories.py.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union

from paddle_flexckpt.background.pending import SaveHandle
from paddle_flexckpt.catalog import CheckpointError, NotDurableError
from paddle_flexckpt.manager.policies import KeepPolicy
from paddle_flexckpt.manager.removal import UNIQUE_ID
from paddle_flexckpt.manager.step_directories import StepDirectories
from paddle_flexckpt.pages.holder_pages import MOST_DRAWN, save_page
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.report import SaveReport
from paddle_flexckpt.saving.sliced_saves import SlicedSave
from paddle_flexckpt.tools.holders import find_holders

logger = logging.getLogger("paddle_flexckpt")

# The state of one save, a byte in the message of each rank. _RAISED: failed, and the handle has raised the error.
_RUNNING, _COMMITTED, _FAILED, _RAISED = range(4)
# Added if the checkpoint exists and could not be made durable.
_DOUBTFUL = 4
Saved = Union[SaveReport, SaveHandle]


class PendingSteps:
    """The saves in the background, the same on every rank. Only ``collect`` and ``finish_staging`` communicate.

    Attributes:
        doubtful: Steps whose checkpoint exists, and is damaged or could not be made durable. A save may replace it,
            and retention does not count it.
        last_saved: The step that was saved last and is known to be complete; None if this manager has saved none.
    """

    def __init__(
        self, comm: Communicator, give_up: Callable[[int, CheckpointError], object] = lambda step, error: None
    ) -> None:
        """Take the ranks that save, and a call for the step and error of a failed save, which the coordinator makes."""
        self._comm, self._give_up = comm, give_up
        self.doubtful: set[int] = set()
        self.last_saved: int | None = None
        self._saves: list[tuple[int, SaveHandle]] = []
        # By step, the reports of saves that have committed.
        self._reports: dict[int, SaveReport] = {}

    @property
    def has_reports(self) -> bool:
        """Return whether :meth:`drain_reports` would return any."""
        return bool(self._reports)

    def note_complete(self, step: int) -> None:
        """Note that a step's checkpoint is complete."""
        self.last_saved = step
        self.doubtful.discard(step)

    def drain_reports(self) -> dict[int, SaveReport]:
        """Return the reports, by step, of saves that :meth:`collect` has found committed since this was called."""
        reports, self._reports = self._reports, {}
        return reports

    @property
    def steps(self) -> set[int]:
        """Return the steps of these saves."""
        return {step for step, _ in self._saves}

    def add(self, step: int, handle: SaveHandle, optimizer: Any = None) -> None:
        """Add a save that has begun; if it is in slices, the next ``optimizer.step()`` first stages the rest."""
        if optimizer is not None and isinstance(handle, SlicedSave):
            handle.finish_before(optimizer)
        self._saves.append((step, handle))

    def stage_next(self) -> bool:
        """Stage a slice of the save that is being staged in slices; return whether there is more, False without one."""
        return any([save.stage_next() for save in self._unstaged()])

    def finish_staging(self) -> None:
        """Stage the rest of a save that is being staged in slices. One collective; none without such a save.

        :meth:`collect` does this too; a trainer calls it earlier, before the optimizer changes what is saved.

        Raises:
            CheckpointError: As of :meth:`SlicedSave.finish_staging`.
        """
        for save in self._unstaged():
            save.finish_staging()

    def leave(self, how: str) -> None:
        """Finish staging in a job of one rank; log the saves that are lost. ``how`` is the reason, for the log."""
        for step, save in self._saves:
            if not isinstance(save, SlicedSave) or save.is_staged:
                continue
            try:
                if self._comm.size > 1:
                    raise CheckpointError("the other ranks may be anywhere, and cannot be asked to finish it")
                save.finish_staging()
            except CheckpointError as error:
                logger.error(
                    f"the save of step {step} to {save.path!r} is lost: {how} before all of it was copied: {error}. "
                    "Remedy (FC506): save the step again; to have it finished, call wait() on every rank before what "
                    "may fail, or save without slice_bytes"
                )

    def _unstaged(self) -> list[SlicedSave]:
        return [handle for _, handle in self._saves if isinstance(handle, SlicedSave) and not handle.is_staged]

    def collect(self, context: str, wait_for: int | Literal["all"] | None = None) -> None:
        """Remove the saves that have ended on all ranks, after waiting for those of a step, or for all. Communicates.

        Saves that are not fully staged are staged first. Without any save, nothing is communicated.

        Raises:
            CheckpointError: A save has failed, and its error was not raised yet; the same on every rank, once.
        """
        if not self._saves:
            return
        for save in self._unstaged():
            try:
                save.finish_staging()
            except CheckpointError:
                save.seen = False  # raised below, like the failures of other saves

        def look() -> tuple[None, bytes]:
            for step, handle in self._saves:
                if wait_for in ("all", step):
                    handle.wait()
            return None, bytes(_state(handle) for _, handle in self._saves)

        _, answers = self._comm.together(look, context)
        states = [{each % _DOUBTFUL for each in column} for column in zip(*answers)]
        for (step, handle), on_ranks, column in zip(self._saves, states, zip(*answers)):
            if on_ranks == {_COMMITTED}:
                self._reports[step] = handle.result()
                self.note_complete(step)
            elif max(column) >= _DOUBTFUL:
                self.doubtful.add(step)
        failed = {step: handle for (step, handle), on_ranks in zip(self._saves, states) if _FAILED in on_ranks}
        self._saves = [save for save, each in zip(self._saves, states) if _RUNNING in each and _FAILED not in each]
        if failed:
            # It has ended on one rank, so it soon will on the others.
            try:
                self._comm.together(lambda: (None, self._raise(failed)), f"{context}: an earlier save failed")
            except NotDurableError:
                self.doubtful |= failed.keys()
                raise

    def _raise(self, failed: Mapping[int, SaveHandle]) -> bytes:
        errors = []
        for step, handle in failed.items():
            handle.wait()
            if handle.error is not None and self._comm.position == 0:
                self._give_up(step, handle.error)
            if handle.error is not None and not handle.seen:
                try:
                    handle.result()
                except CheckpointError as error:
                    errors.append(error)
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise CheckpointError("; ".join(map(str, errors)))
        return b""


def _state(handle: SaveHandle) -> int:
    if not handle.done():
        return _RUNNING
    if handle.error is None:
        return _COMMITTED
    return (_RAISED if handle.seen else _FAILED) + (_DOUBTFUL if isinstance(handle.error, NotDurableError) else 0)


class FollowUp:
    """The work after saves: pages, reports and retention. The coordinator does it; all ranks learn of errors."""

    def __init__(
        self,
        comm: Communicator,
        steps: StepDirectories,
        pending: PendingSteps,
        keep: Sequence[KeepPolicy],
        pages: bool,
        reports: bool,
    ) -> None:
        """Take the directories, the saves in the background, the policies, and whether pages and reports are wanted."""
        self._comm, self._steps, self._pending, self._keep = comm, steps, pending, keep
        self._wants_pages, self._wants_reports = pages, reports
        self._saves: dict[int, tuple[Saved, Mapping[str, float], float]] = {}

    @property
    def is_due(self) -> bool:
        """Return whether there is a page or a report to write."""
        return bool(self._saves) or (self._wants_reports and self._pending.has_reports)

    def add(self, step: int, saved: Saved, metrics: Mapping[str, float]) -> None:
        """Add a save that has ended, or one in the background that has begun."""
        if self._wants_pages:
            self._saves[step] = saved, dict(metrics), time.time()

    def run(self, succeeded: str, reports: Mapping[int, SaveReport] | None = None) -> None:
        """Write pages and reports, and apply retention. Communicates.

        Args:
            succeeded: The text about what has succeeded, for errors.
            reports: Reports, by step, besides those of saves in the background.
        """
        context, busy = f"in {self._steps.path!r}", self._pending.steps
        ended = {step: saved for step, saved in self._saves.items() if step not in busy}
        self._saves = {step: saved for step, saved in self._saves.items() if step in busy}
        if ended:
            self._comm.lead(0, lambda: self._write_pages(ended), f"{succeeded}, but not all pages {context}")
        written = {**self._pending.drain_reports(), **(reports or {})} if self._wants_reports else {}

        def retain() -> None:
            for step, report in written.items():
                self._steps.write_report(step, report)
            self.retain()

        what = "a report could not be written, or what need not be kept" if written else "what need not be kept"
        self._comm.lead(0, retain, f"{succeeded}, but {what} {context} could not be removed")

    def retain(self) -> None:
        """Apply retention; errors as of :meth:`StepDirectories.retain`. Only the coordinator does it."""
        pending = self._pending
        self._steps.retain(self._keep, pending.last_saved, pending.steps, pending.doubtful)

    def _write_pages(self, ended: Mapping[int, tuple[Saved, Mapping[str, float], float]]) -> None:
        """Write the pages of saves that have ended, except failed ones."""
        problems = []
        for step, (saved, metrics, begun) in ended.items():
            try:
                if isinstance(saved, SaveHandle):
                    if saved.error is not None:
                        continue
                    saved = saved.result(0)
                holders = find_holders(self._steps.directory(step), unique_id=UNIQUE_ID, largest=MOST_DRAWN)
                self._steps.write_page(step, save_page(saved, holders, step, metrics, begun))
            except (CheckpointError, OSError) as error:
                problems.append(f"the page of step {step} could not be written: {type(error).__name__}: {error}")
        if problems:
            raise CheckpointError("; ".join(problems))

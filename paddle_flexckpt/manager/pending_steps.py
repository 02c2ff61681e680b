"""Saves in the background that are not known to have ended, the same on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal

from paddle_flexckpt.background import SaveHandle
from paddle_flexckpt.catalog import CheckpointError, NotDurableError
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.report import SaveReport
from paddle_flexckpt.save.sliced_saves import SlicedSave

logger = logging.getLogger("paddle_flexckpt")

# The state of one save, a byte in the message of each rank. _TOLD: failed, and the handle has raised the error already.
_RUNNING, _ENDED, _FAILED, _TOLD = range(4)
# Added if the checkpoint exists and could not be made durable.
_DOUBTFUL = 4


class PendingSteps:
    """The saves in the background, the same on every rank. Only ``collect`` and ``finish_staging`` communicate.

    Attributes:
        doubtful: Steps whose checkpoint exists, and is damaged or could not be made durable. A save may replace it,
            and retention does not count it.
        newest: The step that was saved last and is known to be complete; None if this manager has saved none.
    """

    def __init__(self, comm: Communicator) -> None:
        """Take the ranks that save."""
        self._comm = comm
        self.doubtful: set[int] = set()
        self.newest: int | None = None
        self._saves: list[tuple[int, SaveHandle]] = []
        # By step, the reports of saves that have committed.
        self._reports: dict[int, SaveReport] = {}

    @property
    def has_reports(self) -> bool:
        """Return whether :meth:`take_reports` would return any."""
        return bool(self._reports)

    def note_complete(self, step: int) -> None:
        """Note that a step's checkpoint is complete."""
        self.newest = step
        self.doubtful.discard(step)

    def take_reports(self) -> dict[int, SaveReport]:
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
                    "Remedy: save the step again; to have it finished, call wait() on every rank before what may fail, "
                    "or save without slice_bytes"
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
        for (step, handle), seen, column in zip(self._saves, states, zip(*answers)):
            if seen == {_ENDED}:
                self._reports[step] = handle.result()
                self.note_complete(step)
            elif max(column) >= _DOUBTFUL:
                self.doubtful.add(step)
        failed = {step: handle for (step, handle), seen in zip(self._saves, states) if _FAILED in seen}
        self._saves = [save for save, seen in zip(self._saves, states) if _RUNNING in seen and _FAILED not in seen]
        if failed:
            # It has ended on one rank, so it soon will on the others.
            try:
                self._comm.together(lambda: (None, _raise([*failed.values()])), f"{context}: an earlier save failed")
            except NotDurableError:
                self.doubtful |= failed.keys()
                raise


def _state(handle: SaveHandle) -> int:
    if not handle.done():
        return _RUNNING
    if handle.error is None:
        return _ENDED
    return (_TOLD if handle.seen else _FAILED) + (_DOUBTFUL if isinstance(handle.error, NotDurableError) else 0)


def _raise(handles: Sequence[SaveHandle]) -> bytes:
    errors = []
    for handle in handles:
        handle.wait()
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

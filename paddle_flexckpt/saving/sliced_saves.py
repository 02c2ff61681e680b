"""Asynchronous saves in slices, which are copied between the micro-steps of a training step.

Tested in tests/device/test_slices.py and tests/background/test_slices.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from paddle_flexckpt.background.pending import SaveHandle
from paddle_flexckpt.catalog import CheckpointError, LostRankError, ValidationError
from paddle_flexckpt.forks import close_in_forks
from paddle_flexckpt.observers import notify
from paddle_flexckpt.saving.planners import RankMessages
from paddle_flexckpt.undo import Undo


class OpenSave(NamedTuple):
    """A save that is agreed and planned, of which nothing is staged yet.

    Attributes:
        stage_slice: Stages the next slice of this rank's share; returns whether there is more.
        hand_over: Stages the rest and hands the save over; its arguments are the handle, and the seconds that the
            caller spent elsewhere since the save began.
        give_up: Undoes what has been begun, on all ranks, and raises CheckpointError.
    """

    stage_slice: Callable[[], bool]
    hand_over: Callable[[SaveHandle, float], None]
    give_up: Callable[[], None]


class SlicedSave(SaveHandle):
    """An asynchronous save that is staged in slices, then followed as any other.

    The checkpoint has the state at the call. Tensors of more than 64 KiB, or of more than a slice, must not change
    before :meth:`finish_staging` has returned.
    """

    def __init__(self, path: str, unique_id: int, save: OpenSave) -> None:
        """Args: path: the checkpoint's directory. unique_id: its id there. save: what is to be carried on."""
        super().__init__(path, unique_id)
        self._save: OpenSave | None = save
        self._left = time.perf_counter()
        self._elsewhere = 0.0
        self._hook = Undo()
        close_in_forks(self, SlicedSave._leave_to_owner)

    @property
    def is_staged(self) -> bool:
        """Return whether there is nothing more to stage: :meth:`finish_staging` or :meth:`give_up` was called."""
        return self._save is None

    def stage_next(self) -> bool:
        """Stage one more slice: at most ``slice_bytes``. Call it between micro-steps; ranks do not wait for each other.

        Returns:
            Whether there is more to stage.
        """
        save = self._come_back()
        try:
            return save.stage_slice()
        finally:
            self._left = time.perf_counter()

    def finish_staging(self) -> SlicedSave:
        """Stage the rest, wait until all of it is there, and hand the save over. Every rank calls this; one collective.

        Returns:
            The handle itself, which ``wait()`` and ``result()`` serve from now on.

        Raises:
            ValidationError: The state has changed meanwhile, or replicas differ that have to be equal.
            CheckpointError: A rank could not stage its share. Nothing is saved.
        """
        save, begin = self._close(), time.perf_counter()
        try:
            save.hand_over(self, self._elsewhere)
        except CheckpointError as error:
            self.seen = True
            self.finish(error)
            notify("save", self.path, time.perf_counter() - begin, error)
            raise
        return self

    def finish_before(self, optimizer: Any) -> Undo:
        """Have the next ``optimizer.step()`` call :meth:`finish_staging` first. The step is not changed otherwise.

        Returns:
            An object whose ``put_back()`` removes the hook before that. The end of the staging removes it too.
        """
        self._hook.put_back()
        step = optimizer.step

        def finish_and_step(*arguments: Any, **options: Any) -> Any:
            if self._save is not None:
                self.finish_staging()
            return step(*arguments, **options)

        self._hook.set(optimizer, "step", finish_and_step)
        return self._hook

    def give_up(self) -> None:
        """Cancel the save. Every rank calls this in place of :meth:`finish_staging`; one collective.

        If other ranks call :meth:`finish_staging`, that raises, and nothing is saved either.
        """
        save = self._close()
        self.seen = True
        self.finish(CheckpointError(f"the save of id {self.unique_id} to {self.path!r} was given up"))
        try:
            save.give_up()
        except LostRankError:
            raise
        except CheckpointError:  # so it is on all ranks, whichever of them stage the rest
            pass

    def wait(self, timeout: float | None = None) -> bool:
        """Wait as :meth:`SaveHandle.wait` does.

        Raises:
            ValidationError: Not all is staged, so that the save would never end.
        """
        if self._save is not None and timeout != 0:
            raise ValidationError(
                [
                    f"the save of id {self.unique_id} to {self.path!r} is not staged. Remedy (FC102): call "
                    "finish_staging() first"
                ]
            )
        return super().wait(timeout)

    def _leave_to_owner(self) -> None:
        self._save = None

    def _close(self) -> OpenSave:
        save, self._save = self._come_back(), None
        self._hook.put_back()
        return save

    def _come_back(self) -> OpenSave:
        self._check_own()
        if self._save is None:
            raise ValidationError([f"the save of id {self.unique_id} to {self.path!r} is staged, or was given up"])
        self._elsewhere += time.perf_counter() - self._left
        return self._save


def refuse() -> RankMessages:
    """Raise the error of a save that is given up, in the step in which all ranks stage the rest of it."""
    raise CheckpointError(
        "give_up() was called in place of finish_staging(). Remedy (FC502): call the same of the two on every rank"
    )

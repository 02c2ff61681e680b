"""The saves of steps to the root, and what follows them.

Tested in tests/manager/test_manager.py and tests/manager/test_step_directories.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paddle_flexckpt.background.pending import SaveHandle
from paddle_flexckpt.catalog import CheckpointError, LostRankError, NotDurableError
from paddle_flexckpt.manager.manager_options import ManagerOptions, StepOptions
from paddle_flexckpt.manager.pending_steps import FollowUp, PendingSteps
from paddle_flexckpt.manager.removal import UNIQUE_ID
from paddle_flexckpt.manager.step_directories import StepDirectories, explain_full, is_full
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.report import SaveReport
from paddle_flexckpt.saving.save_options import SaveOptions
from paddle_flexckpt.saving.saver import save_from_file


class StorageSaves:
    """The saves of a manager to its root, the same on all ranks."""

    def __init__(
        self,
        comm: Communicator,
        options: ManagerOptions,
        steps: StepDirectories,
        pending: PendingSteps,
        follow_up: FollowUp,
    ) -> None:
        """Take the ranks, the manager's options, its directories, its pending saves, and the work after saves."""
        self._comm, self._options, self._steps = comm, options, steps
        self._pending, self._follow_up = pending, follow_up

    def write(
        self,
        asked: StepOptions,
        shards: Mapping[str, Any],
        replaces: bool,
        has_optimizer: bool,
        in_memory: SaveHandle | None,
    ) -> SaveReport | SaveHandle:
        """Write a step's checkpoint, or begin to; after a failure clean up.

        If the step is saved to memory too, a save in the background reads the file there (``in_memory``); only with
        ``async_save``, for which there is room.
        """
        own, background = self._options, not asked.blocking
        in_memory = in_memory if own.async_save else None
        try:
            options = SaveOptions(
                unique_id=UNIQUE_ID,
                overwrite=replaces,
                step=asked.step,
                save_replicas=asked.save_replicas,
                check_replicas=asked.check_replicas,
                async_save=(own.async_save or True) if background else False,
                # Without an optimizer it is unknown when the state begins to change.
                slice_bytes=own.slice_bytes if background and has_optimizer and in_memory is None else None,
                staging_bytes=own.staging_bytes if background else None,
            )
            written = None if in_memory is None else in_memory.written
            return save_from_file(shards, self._steps.directory(asked.step), self._comm, options, written)
        except CheckpointError as error:
            if isinstance(error, NotDurableError):
                self._pending.doubtful.add(asked.step)
            if self._comm.position == 0:
                self._steps.give_up(asked.step, error)
            if is_full(error) and own.keep and not isinstance(error, LostRankError):
                raise CheckpointError(explain_full(error, *self._make_room())) from None
            raise

    def _make_room(self) -> tuple[list[int], str]:
        """Remove what need not be kept; return the steps that are gone, and what failed. One collective.

        Retention usually follows a successful save, for which there might never be room without it.
        """

        def remove() -> tuple[None, bytes]:
            before: list[int] = []
            after, problem = before, ""
            if self._comm.position == 0:
                try:
                    before = after = self._steps.steps()
                    try:
                        self._follow_up.retain()
                    finally:
                        after = self._steps.steps()
                except (CheckpointError, OSError) as error:  # it must not hide the error of the save
                    problem = str(error)
            return None, json.dumps([sorted({*before} - {*after}), problem]).encode()

        _, answers = self._comm.together(remove, f"cannot make room in {self._steps.path!r}")
        removed, problem = json.loads(answers[0])
        return removed, problem

    def follow_up(
        self,
        step: int,
        saved: SaveReport | SaveHandle,
        metrics: Mapping[str, float],
        optimizer: Any,
        failed: CheckpointError | None,
    ) -> None:
        """Note a save that has ended, or one in the background that has begun, and follow it up.

        Raises:
            CheckpointError: A step that need not be kept could not be removed; or the save of the step to memory has
                ``failed``.
        """
        done = f"the checkpoint of step {step} is {'complete' if isinstance(saved, SaveReport) else 'on its way'}"
        if isinstance(saved, SaveHandle):
            self._pending.add(step, saved, optimizer)
        else:
            self._pending.note_complete(step)
        self._follow_up.add(step, saved, metrics)
        self._follow_up.run(done, {step: saved} if isinstance(saved, SaveReport) else {})
        if failed is not None:
            raise CheckpointError(f"{done}, but its save to memory failed: {failed}") from None

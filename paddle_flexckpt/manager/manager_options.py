"""Options of a manager, and of its saves.

Tested in tests/manager/test_manager.py and tests/loading/test_options.py.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from paddle_flexckpt.background.writer import BackgroundWriter
from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.manager.memory_tier import MemoryTier, compared
from paddle_flexckpt.manager.policies import KeepPolicy, SaveEvery, SavePolicy
from paddle_flexckpt.media.backend import Location
from paddle_flexckpt.saving.replica_policies import CheckReplicas, ReplicaPolicies
from paddle_flexckpt.saving.save_options import SaveOptions
from paddle_flexckpt.transfer.options import Options, rule

EVERY_STEP = SaveEvery(1)


@dataclass(frozen=True)
class ManagerOptions(Options):
    """The options of a manager.

    Attributes:
        root: The directory of the run, on storage that all ranks share.
        save_when: The policies of :meth:`should_save`: it returns True if any of them wants a save.
        keep: After a save, checkpoints that none of the policies keeps are removed (see
            :func:`~paddle_flexckpt.manager.policies.steps_to_remove`). Without policies none is removed.
        async_save: Whether saves run in the background, as in :func:`save_state_dict`.
        slice_bytes: As in :func:`save_state_dict`, for saves in the background that are given an optimizer. Call
            :meth:`stage_next` between micro-steps; the next ``optimizer.step()`` copies what is left first.
        staging_bytes: As in :func:`save_state_dict`, for saves in the background.
        pages: Whether the coordinator writes a page beside each step, ``{root}/step_{step:08d}.html``, once the
            checkpoint is complete: what each rank wrote, how long that took, and who saved what.
        preemption_signals: Signals that announce the end of this process. They are caught, until :meth:`close`:
            the loop saves at its next step and stops. The manager then has to be made in the main thread.
        reports: Whether the coordinator's report of each save is written beside the step's directory, as
            ``step_{step:08d}.report.json``. The report of a save in the background is written by the next
            :meth:`save`, :meth:`wait` or :meth:`close`. It is removed with the step.
        memory: A tier of steps in the memory of the nodes, between those in ``root``.
    """

    root: Location
    save_when: SavePolicy | Sequence[SavePolicy] = field(default=EVERY_STEP, metadata=rule(compared=repr))
    keep: KeepPolicy | Sequence[KeepPolicy] = field(default=(), metadata=rule(compared=repr))
    async_save: bool | BackgroundWriter = field(default=False, metadata=rule(compared=bool))
    slice_bytes: int | None = field(default=None, metadata=rule(compared=lambda value: value is not None))
    staging_bytes: int | None = None
    pages: bool = False
    preemption_signals: Iterable[int] = field(
        default=(signal.SIGTERM,), metadata=rule(compared=lambda value: sorted(map(int, value)))
    )
    reports: bool = False
    memory: MemoryTier | None = field(default=None, metadata=rule(compared=compared))

    @property
    def max_pending(self) -> int:
        """Return the most saves to the root in the background that may be pending; 0 without ``async_save``."""
        return self.async_save.max_pending if isinstance(self.async_save, BackgroundWriter) else int(self.async_save)

    def check(self) -> None:
        """Raise ValidationError if an option has a value that it cannot have."""
        super().check()
        if not isinstance(self.memory, (MemoryTier, type(None))):
            raise ValidationError([f"memory has to be a MemoryTier or None; got {self.memory!r}"])
        if not isinstance(self.async_save, (bool, BackgroundWriter)):
            raise ValidationError([f"async_save has to be a bool or a BackgroundWriter; got {self.async_save!r}"])
        SaveOptions(async_save=self.async_save, slice_bytes=self.slice_bytes, staging_bytes=self.staging_bytes).check()


@dataclass(frozen=True)
class StepOptions(Options):
    """The options of a manager's save.

    Attributes:
        step: Training step.
        rng: Whether the random number generators are saved.
        blocking: Whether the checkpoint exists when this returns; None: unless the manager has ``async_save``.
        overwrite: Whether a checkpoint of this step may be replaced; it stays until the new one is complete. It
            may be replaced in any case if a restore of this manager has skipped it for an older one, or if its
            save by this manager has raised NotDurableError.
        save_replicas: As in :func:`save_state_dict`.
        check_replicas: As in :func:`save_state_dict`.
    """

    step: int
    rng: bool = True
    blocking: bool | None = None
    overwrite: bool = False
    save_replicas: bool = False
    check_replicas: CheckReplicas = field(
        default=True, metadata=rule(compared=lambda value: ReplicaPolicies(value).agreed)
    )


class StepArguments(TypedDict, total=False):
    """The arguments of a manager's ``save`` besides ``step`` and ``blocking``, for type checkers."""

    model: Any
    optimizer: Any
    lr_scheduler: Any
    scaler: Any
    state: Mapping[str, Any] | None
    dataloader: Any
    data: Any
    extra: Mapping[str, Any] | None
    metrics: Mapping[str, Any] | None
    rng: bool
    overwrite: bool
    save_replicas: bool
    check_replicas: CheckReplicas

"""One call that saves the objects of a run, and one that loads them: model, optimizer, schedule, scaler, generators.

Tested in tests/manager/test_whole_run.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paddle_flexckpt.background.pending import SaveHandle
from paddle_flexckpt.catalog.short_reprs import ShortRepr
from paddle_flexckpt.catalog.wire import join
from paddle_flexckpt.communication.group_communicators import communicator_for
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.manager.restore import fill_run, hold_together
from paddle_flexckpt.manager.restore_targets import RestoreTargets, RunOptions
from paddle_flexckpt.manager.step_contents import (
    OWN_OBJECTS,
    RunObjects,
    check_same_values,
    digest_values,
    note_without_optimizer,
)
from paddle_flexckpt.media.backend import Location, reading
from paddle_flexckpt.media.opening import shown
from paddle_flexckpt.native.directory import LockedManifest
from paddle_flexckpt.report import LoadReport, SaveReport
from paddle_flexckpt.run_state.extra_state import ExtraStateReport
from paddle_flexckpt.saving.save_options import SaveOptions
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.transfer.agreement import check_heads
from paddle_flexckpt.transfer.options import GROUP, PATH, Storage, takes


@dataclass(frozen=True)
class RunSaveOptions(SaveOptions):
    """The options of a save of a run's objects: those of :func:`save_state_dict`, and these.

    Attributes:
        rng: Whether the random number generators are saved.
    """

    storage: Storage = field(default="shared", init=False)
    node_copies: int = field(default=1, init=False)
    parity: int | None = field(default=None, init=False)
    rng: bool = True


@dataclass(frozen=True)
class RunReport(ShortRepr):
    """The result of :func:`load` on this rank.

    Attributes:
        path: The directory.
        load: The report of the load into model, optimizer and ``state``.
        extra: The report of schedule, scaler, random numbers and the caller's own values.
    """

    path: str
    load: LoadReport
    extra: ExtraStateReport

    @property
    def step(self) -> int | None:
        """Return the training step that was saved; None if none was given."""
        return self.extra.step

    def summary(self) -> str:
        """Return one line."""
        text = self.load.summary()
        if self.extra.not_restored:
            text += f", not restored: {', '.join(sorted(self.extra.not_restored))}"
        return text


@takes(
    RunSaveOptions,
    **OWN_OBJECTS,
    path=PATH,
    process_group=GROUP,
    dataloader="every rank has its own position in the data",
    extra="saved like a replicated tensor, and compared like one",
)
def save(
    path: Location,
    *,
    model: Any = None,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    scaler: Any = None,
    state: Mapping[str, Any] | None = None,
    dataloader: Any = None,
    data: Any = None,
    extra: Mapping[str, Any] | None = None,
    process_group: Any = None,
    **options: Any,
) -> SaveReport | SaveHandle:
    """Save the objects of a run in one checkpoint. Every rank of the group calls this.

    ::

        fc.save("run/last", model=model, optimizer=optimizer, lr_scheduler=scheduler, step=step)
        step = fc.load("run/last", model=model, optimizer=optimizer, lr_scheduler=scheduler).step

    Each call takes the next free id, and older checkpoints stay. With ``unique_id=`` a checkpoint of that id is
    replaced once the new one is complete, and the report says so (``replaced``); ``overwrite=False`` refuses it.

    The model's and the optimizer's ``sharded_state_dict()`` give the shards, as in :meth:`CheckpointManager.save`,
    which is the call for a run with many checkpoints. :func:`save_state_dict` saves shards that you describe yourself.
    With a model, ``install()`` is in effect from then on.

    Args:
        path: The directory: a path, a URL, or what ``open_storage`` gives. It may hold several checkpoints, told apart
            by id.
        model: A ``paddle.nn.Layer``.
        optimizer: Wrapped as for the training.
        lr_scheduler: Saved with the run's extra state, as by :func:`collect_extra_state`; so are ``scaler``,
            ``dataloader`` and, with ``rng``, the random number generators. None: the optimizer's own scheduler, or
            its constant rate.
        scaler: A ``paddle.amp.GradScaler``.
        state: Shards or tensors besides, or instead of, those of model and optimizer.
        dataloader: This rank's position in the data: a portable value, or an object with ``state_dict()``.
        data: A sampler or stream of :mod:`paddle_flexckpt.data`: a position that other layouts continue.
        extra: Portable values, the same on every rank.
        process_group: The ranks that take part: None for all ranks of the job, ``"self"`` for this rank alone, or a
            group of ``paddle.distributed``.
        **options: Of :class:`~paddle_flexckpt.manager.whole_run.RunSaveOptions`.

    Returns:
        A report of the save; with ``async_save`` a handle, whose ``result()`` waits for the report.

    Raises:
        ValidationError: The objects cannot be saved; the same on every rank. Nothing was written.
        CheckpointError: As of :func:`save_state_dict`.
    """
    asked = RunSaveOptions(**options)
    comm = communicator_for(process_group)
    objects = RunObjects(model, optimizer, lr_scheduler, scaler, state, data)
    context = f"cannot save to {shown(path)}"

    def collect() -> tuple[dict[str, Any], bytes]:
        head = asked.encode("save", **objects.given())
        shards = {**objects.shards(), **objects.extra_state(asked.step, asked.rng, dataloader, extra)}
        return shards, join((head, digest_values(shards).encode()))

    shards, answers = comm.together(collect, context)
    (digests,) = check_heads(answers, context, comm.ranks)
    check_same_values(comm, shards, [each.decode() for each in digests], context)
    note_without_optimizer(objects, shards, shown(path), comm)
    return save_state_dict(shards, path, comm, **asked.keywords(SaveOptions))


@takes(RunOptions, **OWN_OBJECTS, path=PATH, process_group=GROUP)
def load(
    path: Location,
    *,
    model: Any = None,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    scaler: Any = None,
    state: Mapping[str, Any] | None = None,
    data: Any = None,
    process_group: Any = None,
    **options: Any,
) -> RunReport:
    """Load the objects of a run, in place, from a checkpoint that was saved under this or any other layout.

    ::

        report = fc.load("run/last", model=model, optimizer=optimizer, lr_scheduler=scheduler)
        first_step = report.step + 1
        report.load.bytes_read, report.extra.not_restored  # what was read, and what was not put back

    Args:
        path: The directory, as of :func:`load_state_dict`: of :func:`save`, of :func:`save_state_dict`, a step of a
            CheckpointManager, or of another program.
        model: A ``paddle.nn.Layer``, wrapped as for the training or not.
        optimizer: Wrapped as for the training. The states that only its first step creates are created. To load the
            model alone, give no optimizer and ``optimizer_states="ignore"``.
        lr_scheduler: None: the optimizer's own scheduler, or its constant rate.
        scaler: A scaler; its settings become the saved ones.
        state: Shards or tensors besides, or instead of, those of model and optimizer; they are filled.
        data: A sampler or stream of :mod:`paddle_flexckpt.data`; it continues at the saved position.
        process_group: The ranks that take part: None for all ranks of the job, ``"self"`` for this rank alone, or a
            group of ``paddle.distributed``.
        **options: Of :class:`~paddle_flexckpt.manager.restore.RunOptions`.

    Returns:
        The report: ``step`` is the training step, ``extra.more`` has the values of ``extra``, and
        ``extra.dataloader`` this rank's position in the data.

    Raises:
        ValidationError: The checkpoint does not fit; the same on every rank. Nothing was changed.
        CorruptCheckpointError: As of :func:`load_state_dict`; so is UnreadableCheckpointError.
    """
    asked = RunOptions(**options)
    comm = communicator_for(process_group)
    objects = RunObjects(model, optimizer, lr_scheduler, scaler, state, data)
    context = f"cannot load from {shown(path)}"

    def describe() -> tuple[tuple[RestoreTargets, SourceDirectory], bytes]:
        targets, directory = RestoreTargets.of(objects, asked.rng), SourceDirectory(path)
        return (targets, directory), asked.encode("load", **objects.given())

    (targets, directory), heads = comm.together(describe, context)
    check_heads(heads, context, comm.ranks)

    def hold() -> LockedManifest:
        with reading(directory.path):
            return LockedManifest(directory, asked.unique_id)

    held = hold_together(hold, lambda _: "", comm, context)
    load_report, extra = fill_run(path, held, comm, targets, asked, context)
    return RunReport(directory.path, load_report, extra)

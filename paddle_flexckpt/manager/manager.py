"""CheckpointManager: when to save, where, what to keep, and how to go on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from paddle_flexckpt.background.pending import SaveHandle
from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError, ValidationError
from paddle_flexckpt.catalog.dtypes import plain_integer
from paddle_flexckpt.catalog.wire import join
from paddle_flexckpt.communication.group_communicators import communicator_for
from paddle_flexckpt.manager.manager_options import ManagerOptions, StepArguments, StepOptions
from paddle_flexckpt.manager.memory_steps import MemorySteps
from paddle_flexckpt.manager.pending_steps import FollowUp, PendingSteps
from paddle_flexckpt.manager.policies import (
    KeepBest,
    KeepPolicy,
    Mode,
    SavePolicy,
    SaveSchedule,
    check_policies,
    warn_of_missing_metrics,
)
from paddle_flexckpt.manager.preemption import PreemptionSignals, check_signals
from paddle_flexckpt.manager.restore import RestoreOptions, RestoreReport, list_candidates, restore_first
from paddle_flexckpt.manager.restore_targets import RestoreTargets
from paddle_flexckpt.manager.step_contents import (
    OWN_OBJECTS,
    RunObjects,
    StepContents,
    agree_and_collect,
    check,
    check_metrics,
    check_step,
    note_without_optimizer,
)
from paddle_flexckpt.manager.step_directories import StepDirectories, Which
from paddle_flexckpt.manager.storage_saves import StorageSaves
from paddle_flexckpt.media.backend import Location
from paddle_flexckpt.native.directory import CheckpointInfo
from paddle_flexckpt.report import SaveReport
from paddle_flexckpt.transfer.agreement import check_same
from paddle_flexckpt.transfer.options import GROUP, encode_options, same_on_all_ranks, takes

if TYPE_CHECKING:
    from typing_extensions import Unpack


class CheckpointManager:
    """The checkpoints of a run: their saves, retention and restores, each in its directory ``{root}/step_{step:08d}``.

    ::

        keep = (KeepLatest(3), KeepEvery(1000))
        with CheckpointManager("run", save_when=SaveEvery(100), keep=keep) as manager:
            start = 0
            if manager.latest_step() is not None:
                start = manager.restore(model=model, optimizer=optimizer, lr_scheduler=scheduler).step
            for step in range(start + 1, steps + 1):
                train(step)
                if manager.should_save(step) or step == steps:
                    manager.save(step, model=model, optimizer=optimizer, lr_scheduler=scheduler)
                if manager.should_stop:  # a rank received a preemption signal, and the step is saved
                    break

    Every rank of the group makes a manager and calls the same methods with the same arguments. The constructor and all
    methods communicate, except where their documentation says otherwise. Errors are raised on every rank with the same
    text. A manager that is given a model calls ``fc.install()``.

    Attributes:
        path: The root; a relative path is made absolute.
    """

    @takes(ManagerOptions, **OWN_OBJECTS, process_group=GROUP)
    def __init__(
        self,
        root: Location,
        *,
        process_group: Any = None,
        model: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        scaler: Any = None,
        state: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Make no directory yet.

        Args:
            process_group: The ranks that take part, as in :func:`save_state_dict`.
            model: What :meth:`save` will be given; so are ``optimizer``, ``lr_scheduler``, ``scaler`` and ``state``.
                They are checked now, by :func:`check`, and not kept.
            **options: Like ``root``, of :class:`~paddle_flexckpt.manager.manager_options.ManagerOptions`.

        Raises:
            ValidationError: An argument is not usable, ranks differ in theirs, or the model cannot be saved.
        """
        self._asked = ManagerOptions(root, **options)
        self._comm = communicator_for(process_group)
        self._closed = False
        self._run: str | None = None  # what identifies the run, from the first save on
        self._is_checked = False  # whether the root is known to have no steps of another run
        self._continues: tuple[Which | None, str] = None, ""  # a step, and its run if it was in memory
        self._wanted: tuple[int, bool, bool] = (-1, True, False)  # a step; whether it is wanted in the root, in memory
        self._signals = PreemptionSignals(())
        objects = RunObjects(model, optimizer, lr_scheduler, scaler, state)
        context = "cannot make a CheckpointManager"
        try:
            _, heads = self._comm.together(lambda: (None, self._open_root(objects)), context)
            check_same(heads, context, self._comm.ranks)
            if any(each is not None for each in vars(objects).values()):
                check(model, optimizer, lr_scheduler, scaler, state, self._comm)
                self._memory.find_steps(self._run, context)  # their room counts as free
                self._memory.check_room(objects.describe, context)
        except CheckpointError:
            self._signals.close()
            raise

    def _open_root(self, objects: RunObjects) -> bytes:
        """Open the root and begin to catch signals; return this rank's message about its options."""
        asked = self._asked
        asked.check()
        self._steps = StepDirectories(asked.root)
        self.path = self._steps.path
        self._pending = PendingSteps(self._comm, self._steps.give_up)
        keep = self._keep = check_policies("keep", asked.keep, KeepPolicy)
        self._follow_up = FollowUp(self._comm, self._steps, self._pending, keep, asked.pages, asked.reports)
        self._saves = StorageSaves(self._comm, asked, self._steps, self._pending, self._follow_up)
        self._memory = MemorySteps(self._comm, asked, self._steps, self._pending)
        policies = check_policies("save_when", asked.save_when, SavePolicy)
        numbers = check_signals(asked.preemption_signals)
        self._signals = PreemptionSignals(numbers)
        self._schedule = SaveSchedule(self._comm, policies, self._signals)
        same = replace(asked, save_when=policies, keep=keep, preemption_signals=numbers)
        return same.encode("__init__", root=self.path, **objects.given())

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        else:
            # The other ranks may be anywhere in the program: a wait for them might never end. Background saves go on.
            if not self._closed:
                self._pending.leave(f"{kind.__name__} has ended the manager's block")
            self._end()

    def _end(self) -> None:
        self._closed = True
        self._signals.close(self.should_stop)
        self._memory.release()
        self._steps.release()

    @property
    def preempted(self) -> bool:
        """Return whether this rank, perhaps alone, has received a preemption signal; communicate nothing."""
        return self._signals.received

    @property
    def should_stop(self) -> bool:
        """Return whether a rank had got a preemption signal at the last :meth:`should_save`; communicate nothing."""
        return self._schedule.should_stop

    @same_on_all_ranks()
    def should_save(self, step: int) -> bool:
        """Return whether to save now: by a policy, or as a rank got a preemption signal and nothing was saved since.

        :meth:`save` then saves the step to the root, to the ``memory``, or to both, as their policies want. It is False
        for the step that was saved or restored last. One small collective; none with ``preemption_signals=()`` and
        policies that need no clock; one more if a policy of ``memory`` needs one, and in the first call, in which the
        coordinator takes the root, if it can be written to, and has no steps of another run.

        Args:
            step: The step that has just ended.

        Raises:
            CheckpointError: Ranks are at different steps, or the root is another run's or start's, or not writable.
        """
        self._check_open()
        step, context = plain_integer(step), f"cannot decide about saving in {self.path!r}"
        to_root = self._schedule.should_save(step, context)
        to_memory = self._memory.schedule.should_save(step, context)
        if self._run is None and not self._is_checked:
            self._comm.lead(0, lambda: self._steps.find_run(step, *self._continues), context)
            self._is_checked = True
        self._wanted = step, to_root, to_memory
        return to_root or to_memory

    @overload
    def save(self, step: int, *, blocking: Literal[True], **saved: Unpack[StepArguments]) -> SaveReport: ...

    @overload
    def save(self, step: int, *, blocking: Literal[False], **saved: Unpack[StepArguments]) -> SaveHandle: ...

    @overload
    def save(
        self, step: int, *, blocking: bool | None = ..., **saved: Unpack[StepArguments]
    ) -> SaveReport | SaveHandle: ...

    @takes(
        StepOptions,
        **OWN_OBJECTS,
        dataloader="every rank has its own position in the data",
        extra="saved like a replicated tensor, and compared like one",
        metrics="compared by a rule of their own, whose error names the metric",
    )
    def save(
        self,
        step: int,
        *,
        model: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        scaler: Any = None,
        state: Mapping[str, Any] | None = None,
        dataloader: Any = None,
        data: Any = None,
        extra: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> SaveReport | SaveHandle:
        """Save a step, and remove what need not be kept any longer.

        The step goes where :meth:`should_save` has wanted it; without a call of it for this step, to the root.

        Args:
            model: Its ``sharded_state_dict()`` is saved, and so is that of ``optimizer``.
            lr_scheduler: Saved with the run's extra state, as by :func:`collect_extra_state`; so are ``scaler``,
                ``dataloader`` and, with ``rng``, the random number generators. None: the optimizer's own scheduler, or
                its constant rate.
            state: Shards or tensors besides, or instead of, those of model and optimizer.
            data: A sampler or stream of :mod:`paddle_flexckpt.data`: a position that other layouts continue.
            extra: Portable values, the same on every rank.
            metrics: Numbers by which the best checkpoint is chosen, the same on every rank.
            **options: Like ``step``, of :class:`~paddle_flexckpt.manager.manager_options.StepOptions`.

        Returns:
            A SaveReport; without ``blocking`` a SaveHandle, with ``slice_bytes`` and an optimizer a SlicedSave. For a
            step that goes to the memory alone it is a SaveHandle, whose save is over if ``blocking`` is True.

        Raises:
            ValidationError: An argument is invalid, the step has a checkpoint already, or metrics differ between
                ranks; nothing was written.
            CheckpointError: A rank could not write: earlier checkpoints are unchanged. Or an earlier save in the
                background has failed; then this one has not begun. Or something old could not be removed, or the step
                could not be saved to memory too; then the text says whether the new checkpoint is complete or on its
                way.
        """
        given = StepOptions(step, **options)
        asked = replace(given, blocking=not self._asked.async_save if given.blocking is None else given.blocking)
        objects = RunObjects(model, optimizer, lr_scheduler, scaler, state, data)
        context = f"cannot save a step in {self.path!r}"
        to_memory = self._wanted[::2] == (asked.step, True)
        to_root, pending = not to_memory or self._wanted[1], self._pending.steps
        where = {"to_root": to_root, "to_memory": to_memory}
        self._pending.collect(context, wait_for=asked.step)
        replaces = asked.overwrite or asked.step in self._pending.doubtful
        prepare = partial(self._prepare, asked, objects, dataloader, extra, metrics, replaces, where)
        contents, answers = self._comm.together(prepare, context)
        self._run = contents.add_record(asked.step, answers, self._comm, context)
        note_without_optimizer(objects, contents.shards, f"step {asked.step} of {self.path}", self._comm)
        handle, failed = self._memory.save_beside(given, contents.shards, self._run, where, context)
        if handle is not None and not to_root:
            if pending != self._pending.steps:
                self._follow_up.run(f"step {asked.step} is {'in' if given.blocking else 'on its way to'} memory")
            return handle
        saved = self._saves.write(asked, contents.shards, replaces, objects.optimizer is not None, handle)
        self._schedule.note(asked.step, saved=True)
        self._saves.follow_up(asked.step, saved, contents.metrics, optimizer, failed)
        return saved

    def _prepare(
        self,
        asked: StepOptions,
        objects: RunObjects,
        dataloader: Any,
        extra: Mapping[str, Any] | None,
        metrics: Mapping[str, Any] | None,
        replaces: bool,
        where: Mapping[str, bool],
    ) -> tuple[StepContents, bytes]:
        """Return this rank's part of a step, and its message about it; the coordinator prepares the directory."""
        self._check_open()
        check_step(asked.step)
        head = asked.encode("save", **objects.given(), **where)
        shards, numbers, run = objects.shards(), check_metrics(metrics), self._run
        if run is None and self._comm.position == 0:
            run = self._steps.begin_run(asked.step, *self._continues)
        contents = StepContents(shards, numbers, run or "")
        contents.shards.update(objects.extra_state(asked.step, asked.rng, dataloader, extra))
        if self._comm.position == 0 and where["to_root"]:
            warn_of_missing_metrics(self._keep, numbers)
            self._steps.prepare(asked.step, replaces)
        return contents, join((head, contents.describe()))

    def stage_next(self) -> bool:
        """Copy at most ``slice_bytes`` of a save that is staged in slices; communicate nothing.

        Call it between micro-steps. It returns whether there is more to copy; without such a save, False.
        """
        return self._pending.stage_next()

    def wait(self) -> None:
        """Wait for the saves in the background, and remove what need not be kept any longer.

        Raises:
            CheckpointError: One of them has failed, or something old could not be removed.
        """
        self._check_open()
        if self._pending.steps or self._follow_up.is_due:
            self._pending.collect(f"cannot finish the saves in {self.path!r}", wait_for="all")
            self._follow_up.run("all saves in the background are complete")
        self._memory.collect(f"cannot finish the saves to memory of {self.path!r}", wait_for="all")

    def close(self) -> None:
        """Do the same as :meth:`wait`, and restore the previous signal handlers. A second call does nothing.

        The run's steps in memory are removed if the root has one that is as new; else they stay, with a warning.

        Raises:
            CheckpointError: As in :meth:`wait`; the manager is closed all the same.
        """
        if self._closed:
            return
        try:
            self.wait()
            self._memory.close(f"cannot remove the steps in memory of {self.path!r}")
        finally:
            self._end()

    @takes(RestoreOptions, **OWN_OBJECTS)
    def restore(
        self,
        step: Which = "latest",
        *,
        model: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        scaler: Any = None,
        state: Mapping[str, Any] | None = None,
        data: Any = None,
        **options: Any,
    ) -> RestoreReport:
        """Restore model, optimizer and the run's extra state of a step, in place.

        Args:
            model: As in :meth:`save`; so are ``optimizer``, ``lr_scheduler`` and ``scaler``. To restore the model
                alone, give no optimizer and ``optimizer_states="ignore"``.
            state: As in :meth:`save`; its tensors are written.
            data: As in :meth:`save`; it continues at the saved position.
            **options: Like ``step``, of :class:`~paddle_flexckpt.manager.restore.RestoreOptions`.

        Returns:
            The report, with the steps that were skipped and why.

        Raises:
            ValidationError: There is no such checkpoint, or it does not fit; nothing was changed.
            CorruptCheckpointError: It is damaged, or with ``fallback`` all are; targets may be partly overwritten.
            CheckpointError: A save in the background has failed; nothing was changed.
        """
        step = plain_integer(step)
        asked = RestoreOptions(step=step, **options)
        context = f"cannot restore a step from {self.path!r}"
        self._pending.collect(context, wait_for="all")
        self._memory.collect(context, wait_for="all")
        in_memory = [] if step == "best" else self._memory.find_steps(self._run, context)

        def prepare() -> tuple[RestoreTargets, bytes]:
            self._check_open()
            if step not in ("latest", "best"):
                check_step(step, ', "latest" or "best"')
            objects = RunObjects(model, optimizer, lr_scheduler, scaler, state, data)
            targets = RestoreTargets.of(objects, asked.rng)
            head = asked.encode("restore", **objects.given())
            if self._comm.position != 0:
                return targets, join((head, b"null"))
            order, damaged = self._steps.order(step, self._best(), asked.fallback, in_memory)
            return targets, join((head, json.dumps([order, list(damaged.items())]).encode()))

        targets, answers = self._comm.together(prepare, context)
        order, damaged = agree_and_collect(answers, context, self._comm.ranks)[0]
        candidates = list_candidates(order, self._steps, self._comm, targets)
        candidates = self._memory.add_candidates(candidates, in_memory, asked, targets)
        try:
            report, whole = restore_first(candidates, dict(damaged), self._comm, asked, context)
        except CorruptCheckpointError:
            # If training starts anew after this error, its steps belong to the same run: that of the latest step.
            self._run, self._continues, self._is_checked = None, ("latest", self._memory.note_restored(None)), False
            raise
        self._pending.doubtful |= report.skipped.keys() - whole
        self._schedule.note(report.step, saved=False)
        run = self._memory.note_restored(report) or self._steps.run_of(report.step)
        self._run, self._continues, self._is_checked = None, (report.step, run), False
        return report

    def all_steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in rising order; not those whose save has not committed.

        Steps in memory are among them if they are whole.
        """
        context = f"cannot look at the steps in memory of {self.path!r}"
        return sorted({*self._look(self._steps.steps), *self._memory.whole_steps(self._run, context)})

    def latest_step(self) -> int | None:
        """Return the highest of :meth:`all_steps`; None without one."""
        return max(self.all_steps(), default=None)

    @same_on_all_ranks()
    def best_step(self, metric: str | None = None, mode: Mode = "min") -> int | None:
        """Return the step whose checkpoint is the best by a metric; None if none has it.

        Args:
            metric: Its name; None: that of the manager's first KeepBest, and its mode.
            mode: Whether the smallest or the largest is the best.

        Raises:
            ValidationError: No metric is given, and there is no KeepBest.
            CorruptCheckpointError: The metrics of a checkpoint cannot be read.
        """
        head = encode_options(CheckpointManager.best_step, locals())
        order: list[int] = self._look(
            lambda: self._steps.best(self._best() if metric is None else KeepBest(1, metric, mode))[0], head
        )
        return order[0] if order else None

    def checkpoints(self) -> list[CheckpointInfo]:
        """Return an entry, as of :func:`list_checkpoints`, for each step in the root."""
        return [CheckpointInfo(**each) for each in self._look(lambda: [c.as_dict() for c in self._steps.checkpoints()])]

    def _best(self) -> KeepBest | None:
        return next((policy for policy in self._keep if isinstance(policy, KeepBest)), None)

    def _look(self, work: Callable[[], Any], head: bytes = b"{}") -> Any:
        """Return the coordinator's result of ``work`` on every rank; ``head`` has to be the same on all of them."""

        def look() -> tuple[None, bytes]:
            self._check_open()
            return None, join((head, json.dumps(work() if self._comm.position == 0 else None).encode()))

        context = f"cannot look at the checkpoints in {self.path!r}"
        return agree_and_collect(self._comm.together(look, context)[1], context, self._comm.ranks)[0]

    def _check_open(self) -> None:
        if self._closed:
            raise ValidationError(["this manager has been closed. Remedy (FC102): make another one"])

"""Restoring the checkpoint of one step, and the report of it.

Tested in tests/manager/test_manager.py and tests/manager/test_unreadable.py.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from paddle_flexckpt.catalog import (
    CheckpointError,
    CorruptCheckpointError,
    Problem,
    UnreadableCheckpointError,
    ValidationError,
)
from paddle_flexckpt.catalog.texts import dropped_warning
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.manager.removal import UNIQUE_ID
from paddle_flexckpt.manager.step_directories import Which, save_token_in
from paddle_flexckpt.media.backend import Backend, Location, reading
from paddle_flexckpt.native.directory import LockedManifest
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.report import LoadReport
from paddle_flexckpt.run_state.extra_state import (
    ExtraStateReport,
    check_data,
    has_constant_rate,
    has_extra_state,
    has_position,
    load_extra_state,
    restore_extra_state,
    schedule_left_out,
)
from paddle_flexckpt.run_state.schedules import ConstantRate
from paddle_flexckpt.transfer.names import is_state
from paddle_flexckpt.transfer.options import LoadOptions, Storage, Strict, rule

logger = logging.getLogger("paddle_flexckpt")

# The most tries to restore one step, if another process saves it again each time.
_TRIES = 3
_NO_OPTIMIZER = "the checkpoint is of a model and its optimizer, and no optimizer was given"
_GIVE_OPTIMIZER = "give optimizer=, as in the run that saved it; for the model alone give optimizer_states='ignore'"


@dataclass(frozen=True)
class RestoreReport:
    """The result of a restore on this rank.

    Attributes:
        step: The step that was restored.
        path: Its directory.
        load: The report of the load into model, optimizer and ``state``.
        extra: The report of schedule, scaler, random numbers and the caller's own values.
        skipped: Steps that come before this one in the order of the restore, and were skipped as they are damaged or
            unreadable, with the reason.
    """

    step: int
    path: str
    load: LoadReport
    extra: ExtraStateReport
    skipped: dict[int, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return all fields but the caller's own values and positions in the data, JSON-safe."""
        return {
            "step": self.step,
            "path": self.path,
            "load": self.load.as_dict(),
            "restored": self.extra.restored,
            "not_restored": self.extra.not_restored,
            "skipped": {str(step): why for step, why in self.skipped.items()},
        }

    def summary(self) -> str:
        """Return one line."""
        text = f"restored step {self.step}: {self.load.summary()}"
        if self.extra.not_restored:
            text += f", not restored: {', '.join(sorted(self.extra.not_restored))}"
        if self.skipped:
            text += f", damaged or unreadable and skipped: {', '.join(f'step {step}' for step in sorted(self.skipped))}"
        return text


@dataclass(frozen=True)
class RunOptions(LoadOptions):
    """The options of a load of a run's objects: those of a load, and these.

    Attributes:
        rng: Whether to restore the random number generators, where the layout is the same.
        schedule: ``"raise"``: it is an error if a schedule (or constant rate), a scaler or a position in the data was
            saved, and this run has none or another kind, unless the model alone is wanted. ``"ignore"``: this run's
            stays as it is, with a warning.
    """

    storage: Storage = field(default="shared", init=False)
    rng: bool = True
    schedule: Literal["raise", "ignore"] = field(default="raise", metadata=rule(choices=("raise", "ignore")))


@dataclass(frozen=True)
class RestoreOptions(RunOptions):
    """The options of a restore: those of a load of a run's objects, and these.

    Attributes:
        step: A step, ``"latest"``, or ``"best"`` by the manager's first KeepBest.
        fallback: Whether to go on to the next lower step (for ``"best"``, to the next best) if a checkpoint is damaged
            or cannot be read. Damage that only reading finds leaves targets partly overwritten; the next checkpoint
            overwrites all of them, and a target that it lacks is an error whatever ``strict`` is. Errors that are no
            damage (names, shapes, dtypes) are raised: an older checkpoint would have them too.
    """

    coordinator_rank: int = field(default=0, init=False)
    unique_id: int | None = field(default=UNIQUE_ID, init=False)
    step: Which = "latest"
    fallback: bool = False


@dataclass(frozen=True, eq=False)
class RestoreTargets:
    """The objects that a restore fills on this rank; schedule, scaler and data may be None."""

    shards: Mapping[str, Any]
    lr_scheduler: Any
    scaler: Any
    rng: bool
    has_optimizer: bool
    data: Any = None
    has_model: bool = False

    def check_complete(
        self, state: Mapping[str, Any] | None, saved: Collection[str], options: RunOptions
    ) -> tuple[None, bytes]:
        """Raise ValidationError where a part of the run would not be restored, and so start anew.

        Args:
            state: The checkpoint's extra state; None if it has none.
            saved: The checkpoint's keys.
            options: The options of the load.
        """
        check_data(self.data)
        given = {"lr_scheduler": self.lr_scheduler, "scaler": self.scaler, "data": self.data}
        if state is None:
            missing = [name for name, each in given.items() if each is not None and not isinstance(each, ConstantRate)]
            if missing:
                raise ValidationError(
                    f"the checkpoint has no state of {' and '.join(missing)}: it was saved without a run's extra "
                    "state. Remedy (FC904): give schedule='ignore', and set them to the step of the checkpoint yourself"
                )
            return None, b""
        if self.data is not None and not has_position(state):
            raise ValidationError(
                "the checkpoint has no position in the data: it was saved without data=. Remedy (FC904): give "
                "schedule='ignore', and set the sampler's position to the samples that the checkpoint's run has taken"
            )
        is_alone = not self.has_optimizer and options.optimizer_states == "ignore"
        model = "" if self.has_optimizer else "; for the model alone give optimizer_states='ignore'"
        left_out = schedule_left_out(state, self.lr_scheduler, self.scaler, self.data)
        problems = []
        is_constant = has_constant_rate(state)
        if self._lacks_optimizer(is_constant, saved) and not is_alone:
            problems.append(Problem(_NO_OPTIMIZER, code="FC203", remedy=_GIVE_OPTIMIZER))
            # Its rate comes with the optimizer.
            if self.lr_scheduler is None:
                left_out.pop("lr_scheduler", None)
        for name, why in left_out.items():
            if given[name] is None and is_alone:
                continue
            remedy = f"give {name}=, built as in the run that saved it"
            if name == "lr_scheduler" and is_constant:
                remedy = (
                    "make the optimizer with a constant rate, as in the run that saved it, and give no lr_scheduler"
                )
            problems.append(
                Problem(
                    f"{name} is saved and would not be restored: {why}",
                    code="FC904",
                    remedy=f"{remedy}; with schedule='ignore' this run's stays as it is, and the rate, scale or data "
                    f"starts over{model}",
                )
            )
        if problems:
            raise ValidationError(problems)
        return None, b""

    def _lacks_optimizer(self, is_constant: bool, saved: Collection[str]) -> bool:
        """Return whether an optimizer was saved, by its constant rate or its states, and this call does not get it."""
        if self.has_optimizer or is_constant:
            return not self.has_optimizer
        keys, own = {*saved}, {*self.shards}
        return any(is_state(key, keys) for key in saved) and not any(is_state(key, own | keys) for key in own)

    def restore(self, state: Mapping[str, Any]) -> ExtraStateReport:
        """Restore all but the shards from a checkpoint's extra state."""
        return restore_extra_state(state, self.lr_scheduler, self.scaler, self.rng, self.data)


class ReplacedError(CheckpointError):
    """An error of a restore during which another process saved the step again."""


class MisnamedError(ValidationError):
    """An error of a step's directory that has the intact checkpoint of another step."""


def restore_checkpoint(
    directory: Backend, step: int, comm: Communicator, targets: RestoreTargets, options: RestoreOptions
) -> RestoreReport:
    """Restore the checkpoint in a step's directory.

    Raises:
        UnreadableCheckpointError: It has been removed meanwhile.
        CheckpointError: As of :func:`fill_run`.
    """

    def refuse(manifest: Manifest) -> str:
        if manifest.partial and options.fallback:
            raise CorruptCheckpointError(f"{directory.path} is partial: {manifest.partial}")
        if manifest.step == step:
            return ""
        return (
            f"the checkpoint in {directory.path} is of step {manifest.step}: the directory has been renamed or "
            "copied. Remedy (FC903): give it its own name back, or load it with load_state_dict; fallback=True passes "
            "over it"
        )

    context = f"cannot restore step {step} from {directory.path!r}"
    load, extra = fill_run(directory, partial(_lock_manifest, directory), refuse, comm, targets, options, context)
    return RestoreReport(step, directory.path, load, extra)


def fill_run(
    location: Location,
    hold: Callable[[], LockedManifest],
    refuse: Callable[[Manifest], str],
    comm: Communicator,
    targets: RestoreTargets,
    options: RunOptions,
    context: str,
) -> tuple[LoadReport, ExtraStateReport]:
    """Fill a run's objects from one checkpoint. Its extra state is read first: it is small and changes no target.

    Args:
        location: The directory that has the checkpoint.
        hold: Reads the checkpoint's manifest on this rank, and locks it.
        refuse: Returns why this is not the checkpoint that was asked for; "" if it is.
        comm: The ranks that take part.
        targets: The objects of this rank.
        options: The options of the load; the id of the checkpoint is that of its manifest.
        context: The beginning of an error's text.

    Raises:
        ValidationError: The checkpoint does not fit; nothing was changed.
        MisnamedError: ``refuse`` gave a reason; likewise.
        CorruptCheckpointError: The checkpoint is damaged; targets may be partly overwritten.
        UnreadableCheckpointError: The storage does not allow reading it; likewise.
        ReplacedError: Another process has replaced it meanwhile; likewise.
    """
    backend = SourceDirectory(location).backend
    with _hold_together(hold, refuse, comm, context) as manifest:
        # Another program's checkpoint is asked for as the caller does: the id of its manifest is made up.
        unique_id = options.unique_id if manifest.foreign else manifest.unique_id
        try:
            splits = getattr(targets.data, "own_splits", ())
            state = load_extra_state(location, unique_id, comm, splits) if has_extra_state(manifest.catalog) else None
            if options.schedule == "raise":
                comm.together(lambda: targets.check_complete(state, manifest.catalog.keys, options), context)
            asked = {**options.keywords(LoadOptions), "unique_id": unique_id}
            load = load_state_dict(targets.shards, location, comm, **asked)
        except (CorruptCheckpointError, UnreadableCheckpointError, ValidationError) as error:
            # Without locks for readers, the files of a replaced checkpoint are removed at once. And two ranks may see
            # different checkpoints.
            _, found = comm.together(lambda: (None, b"yes" if _is_replaced(backend, manifest) else b""), context)
            if any(found):
                raise ReplacedError(_replaced(context)) from error
            raise

        def restore_extra() -> tuple[ExtraStateReport | None, bytes]:
            with reading(backend.path):
                if not manifest.foreign and save_token_in(backend, manifest.unique_id) != manifest.save_token:
                    return None, b"replaced"
            if state is None:
                return ExtraStateReport.of_none(), b""
            return targets.restore(state), b""

        extra, found = comm.together(restore_extra, context)
        if extra is None or any(found):
            raise ReplacedError(_replaced(context))
    asks = targets.has_model and options.strict is not False and not manifest.foreign
    if asks and load.dropped and comm.position == 0:
        logger.warning(dropped_warning(load.source, load.dropped))
    return load, extra


@contextlib.contextmanager
def _hold_together(
    hold: Callable[[], LockedManifest], refuse: Callable[[Manifest], str], comm: Communicator, context: str
) -> Iterator[Manifest]:
    """Hold the lock on the checkpoint, the same on all ranks; errors of :func:`fill_run`."""
    with contextlib.ExitStack() as stack:

        def begin() -> tuple[Manifest, bytes]:
            manifest = stack.enter_context(hold())
            problem = refuse(manifest)
            return manifest, f"!{problem}".encode() if problem else manifest.save_token.encode()

        manifest, tokens = comm.together(begin, context)
        misnamed = [each[1:].decode() for each in tokens if each[:1] == b"!"]
        if misnamed:
            raise MisnamedError(misnamed[:1], context)
        if len(set(tokens)) > 1:
            raise ReplacedError(_replaced(context))
        yield manifest


def _is_replaced(directory: Backend, manifest: Manifest) -> bool:
    """Return whether the checkpoint is known to be that of another save by now; of another program's it never is."""
    if manifest.foreign:
        return False
    with contextlib.suppress(OSError, CorruptCheckpointError):
        return save_token_in(directory, manifest.unique_id) != manifest.save_token
    return False


def _replaced(context: str) -> str:
    problem = "another process has replaced the checkpoint meanwhile: targets may come from both checkpoints"
    return f"{context}: {problem}. Remedy (FC401): restore again"


def _lock_manifest(directory: Backend) -> LockedManifest:
    checkpoint = SourceDirectory(directory)
    with reading(directory.path):
        try:
            return LockedManifest(checkpoint, UNIQUE_ID)
        except ValidationError as error:
            if UNIQUE_ID in checkpoint.list_ids():
                raise
            raise UnreadableCheckpointError(f"{directory.path} has been removed meanwhile: {error}") from error


def restore_first(
    candidates: Sequence[tuple[int, Backend]],
    skipped: Mapping[int, str],
    comm: Communicator,
    targets: RestoreTargets,
    options: RestoreOptions,
    context: str,
) -> tuple[RestoreReport, set[int]]:
    """Restore the first of some checkpoints, or with ``fallback`` the first that is whole and can be read.

    Return the report, and the skipped steps whose directory holds another step's intact checkpoint.

    ``skipped`` are steps that were ruled out before, with the reason.

    Raises:
        CheckpointError: As of :func:`restore_checkpoint`.
    """
    misnamed: set[int] = set()
    # After damage, or a replaced try, every target has to be overwritten.
    skipped, full = dict(skipped), replace(options, strict=_strict_after_damage(options.strict))
    for step, directory in candidates:
        try:
            for attempt in range(1, _TRIES + 1):
                chosen = full if skipped or attempt > 1 else options
                try:
                    report = restore_checkpoint(directory, step, comm, targets, chosen)
                    return replace(report, skipped=skipped), misnamed
                except ReplacedError:
                    if attempt == _TRIES:
                        raise
                    logger.info(f"another process has saved step {step} while it was restored: it is restored again")
        except (CorruptCheckpointError, UnreadableCheckpointError, MisnamedError) as error:
            if not options.fallback:
                raise
            if isinstance(error, MisnamedError):
                misnamed.add(step)
            if comm.position == 0:
                what = "is damaged" if isinstance(error, CorruptCheckpointError) else "cannot be read"
                logger.warning(f"step {step} {what}, and is skipped: {error}")
            skipped[step] = str(error)
    found = "; ".join(f"step {step}: {why}" for step, why in skipped.items())
    raise CorruptCheckpointError(f"{context}: all that could be restored is damaged or cannot be read: {found}")


def _strict_after_damage(strict: Strict) -> Strict:
    """Return ``strict`` for a fallback: a target that it lacks would keep values of the damaged checkpoint."""
    if strict is False:
        return "missing"
    return True if strict == "unexpected" else strict

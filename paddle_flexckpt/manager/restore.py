"""Restoring the checkpoint of one step, and the report of it.

Tested in tests/manager/test_manager.py and tests/manager/test_unreadable.py.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from paddle_flexckpt.catalog import (
    CheckpointError,
    CorruptCheckpointError,
    UnreadableCheckpointError,
    ValidationError,
)
from paddle_flexckpt.catalog.short_reprs import ShortRepr
from paddle_flexckpt.catalog.texts import dropped_warning
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.manager.removal import UNIQUE_ID
from paddle_flexckpt.manager.restore_targets import RestoreTargets, RunOptions
from paddle_flexckpt.manager.step_directories import StepDirectories, Which, save_token_in
from paddle_flexckpt.media.backend import Backend, Location, reading
from paddle_flexckpt.native.directory import LockedManifest
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.report import LoadReport
from paddle_flexckpt.run_state.extra_state import (
    ExtraStateReport,
    read_extra_state,
)
from paddle_flexckpt.transfer.options import LoadOptions, Storage, Strict
from paddle_flexckpt.transfer.resolution import left_behind

logger = logging.getLogger("paddle_flexckpt")

# The most tries to restore one step, if another process saves it again each time.
_TRIES = 3


@dataclass(frozen=True)
class RestoreReport(ShortRepr):
    """The result of a restore on this rank.

    Attributes:
        step: The step that was restored.
        path: Its directory.
        load: The report of the load into model, optimizer and ``state``.
        extra: The report of schedule, scaler, random numbers and the caller's own values.
        skipped: Steps that come before this one in the order of the restore, and were skipped as they are damaged or
            unreadable, with the reason.
        tier: ``"memory"`` if the step was read from the memory of nodes, and nothing from the root.
        nodes: Of a step in memory, the number of nodes that had it, and of those that had saved it.
        not_in_memory: Steps in memory that come before this one and were not taken: too many of their nodes are lost,
            or they are damaged, with ``fallback`` or where the root has the step; with the reason.
    """

    step: int
    path: str
    load: LoadReport
    extra: ExtraStateReport
    skipped: dict[int, str] = field(default_factory=dict)
    tier: Literal["storage", "memory"] = "storage"
    nodes: tuple[int, int] = (0, 0)
    not_in_memory: dict[int, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return all fields but the caller's own values and positions in the data, JSON-safe."""
        return {
            "step": self.step,
            "path": self.path,
            "load": self.load.as_dict(),
            "restored": self.extra.restored,
            "not_restored": self.extra.not_restored,
            "skipped": {str(step): why for step, why in self.skipped.items()},
            "tier": self.tier,
            "nodes": list(self.nodes),
            "not_in_memory": {str(step): why for step, why in self.not_in_memory.items()},
        }

    def summary(self) -> str:
        """Return one line."""
        where = " from the memory of {} of {} nodes; 0 bytes from storage".format(*self.nodes)
        text = f"restored step {self.step}{where if self.tier == 'memory' else ''}: {self.load.summary()}"
        if self.extra.not_restored:
            text += f", not restored: {', '.join(sorted(self.extra.not_restored))}"
        if self.skipped:
            text += f", damaged or unreadable and skipped: {', '.join(f'step {step}' for step in sorted(self.skipped))}"
        return text + "".join(f"; {why}" for _, why in sorted(self.not_in_memory.items()))


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


class ReplacedError(CheckpointError):
    """An error of a restore during which another process saved the step again."""


class MisnamedError(ValidationError):
    """An error of a step's directory that has the intact checkpoint of another step."""


def restore_checkpoint(
    steps: StepDirectories, step: int, comm: Communicator, targets: RestoreTargets, options: RestoreOptions
) -> RestoreReport:
    """Restore the checkpoint in a step's directory; the coordinator's ``steps`` know its run then.

    Raises:
        UnreadableCheckpointError: It has been removed meanwhile.
        CheckpointError: As of :func:`fill_run`.
    """
    directory = steps.directory(step)

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
    with hold_together(partial(_lock_manifest, directory), refuse, comm, context) as held:
        load, extra = fill_run(directory, contextlib.nullcontext(held), comm, targets, options, context)
        if comm.position == 0:
            steps.look_at([step])
    return RestoreReport(step, directory.path, load, extra)


class Held(NamedTuple):
    """A checkpoint that all ranks hold the lock on.

    Attributes:
        manifest: Its manifest, the same on all ranks.
        token: The save token of the manifest in this rank's directory; "" if there is none, or it has none.
        storage: The option of loads.
    """

    manifest: Manifest
    token: str
    storage: Storage = "shared"


def fill_run(
    location: Location,
    hold: contextlib.AbstractContextManager[Held],
    comm: Communicator,
    targets: RestoreTargets,
    options: RunOptions,
    context: str,
) -> tuple[LoadReport, ExtraStateReport]:
    """Fill a run's objects from one checkpoint. Its extra state is read first: it is small and changes no target.

    Args:
        location: The directory that has the checkpoint.
        hold: Holds the checkpoint, as of :func:`hold_together`.
        comm: The ranks that take part.
        targets: The objects of this rank.
        options: The options of the load; the id of the checkpoint is that of its manifest.
        context: The beginning of an error's text.

    Raises:
        ValidationError: The checkpoint does not fit; nothing was changed.
        CorruptCheckpointError: The checkpoint is damaged; targets may be partly overwritten.
        UnreadableCheckpointError: The storage does not allow reading it; likewise.
        ReplacedError: Another process has replaced it meanwhile; likewise.
    """
    backend = SourceDirectory(location).backend
    with hold as held:
        manifest = held.manifest
        # Another program's checkpoint is asked for as the caller does: the id of its manifest is made up.
        unique_id = options.unique_id if manifest.foreign else manifest.unique_id
        try:
            splits = getattr(targets.data, "own_splits", ())
            state = read_extra_state(manifest.catalog, location, comm, unique_id, splits, held.storage)
            if options.schedule == "raise":
                comm.together(lambda: targets.check_complete(state, manifest.catalog.keys, options), context)
            asked = {**options.keywords(LoadOptions), "unique_id": unique_id, "storage": held.storage}
            load = load_state_dict(targets.shards, location, comm, **asked)
        except (CorruptCheckpointError, UnreadableCheckpointError, ValidationError):
            # Without locks for readers, the files of a replaced checkpoint are removed at once. And two ranks may see
            # different checkpoints.
            _, found = comm.together(lambda: (None, b"yes" if _is_replaced(backend, held) else b""), context)
            if any(found):
                raise ReplacedError(_replaced(context)) from None
            raise

        def restore_extra() -> tuple[ExtraStateReport | None, bytes]:
            with reading(backend.path):
                if held.token and save_token_in(backend, manifest.unique_id) != held.token:
                    return None, b"replaced"
            if state is None:
                return ExtraStateReport.of_none(), b""
            return targets.restore(state), b""

        extra, found = comm.together(restore_extra, context)
        if extra is None or any(found):
            raise ReplacedError(_replaced(context))
    left = left_behind(load, options) if targets.has_model and not manifest.foreign else []
    if left and comm.position == 0:
        logger.warning(dropped_warning(load.source, left, bool(load.dropped)))
    return load, extra


@contextlib.contextmanager
def hold_together(
    hold: Callable[[], LockedManifest], refuse: Callable[[Manifest], str], comm: Communicator, context: str
) -> Iterator[Held]:
    """Hold the lock on a checkpoint that all ranks see.

    Args:
        hold: Reads the checkpoint's manifest on this rank, and locks it.
        refuse: Returns why this is not the checkpoint that was asked for; "" if it is.
        comm: The ranks that take part.
        context: The beginning of an error's text.

    Raises:
        MisnamedError: ``refuse`` gave a reason.
        ReplacedError: Ranks see different checkpoints.
    """
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
        yield Held(manifest, "" if manifest.foreign else manifest.save_token)


def token_now(directory: Backend, unique_id: int = UNIQUE_ID) -> str:
    """Return the save token of the manifest in a directory; "" if it cannot be read."""
    with contextlib.suppress(OSError, CorruptCheckpointError):
        return save_token_in(directory, unique_id)
    return ""


def _is_replaced(directory: Backend, held: Held) -> bool:
    """Return whether the checkpoint is known to be that of another save by now; of another program's it never is."""
    return bool(held.token) and token_now(directory, held.manifest.unique_id) not in ("", held.token)


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


class Candidate(NamedTuple):
    """A checkpoint that may be restored.

    Attributes:
        step: Its step.
        restore: Restores it with these options; errors as of :func:`restore_checkpoint`.
        in_memory: Whether it is in the memory of nodes. Then LostNodesError says that it is not whole.
    """

    step: int
    restore: Callable[[RestoreOptions], RestoreReport]
    in_memory: bool = False


def list_candidates(
    order: Sequence[int], steps: StepDirectories, comm: Communicator, targets: RestoreTargets
) -> list[Candidate]:
    """Return the checkpoints of some steps in the root."""
    return [Candidate(step, partial(restore_checkpoint, steps, step, comm, targets)) for step in order]


class LostNodesError(CheckpointError):
    """An error of a step in memory: too many of its nodes are lost."""


def restore_first(
    candidates: Sequence[Candidate],
    skipped: Mapping[int, str],
    comm: Communicator,
    options: RestoreOptions,
    context: str,
) -> tuple[RestoreReport, set[int]]:
    """Restore the first of some checkpoints, or with ``fallback`` the first that is whole and can be read.

    A step in memory that has lost its nodes is passed over in any case, and so is one that cannot be read there if the
    root has the step too. Return the report, and the skipped steps whose directory holds another step's intact
    checkpoint. ``skipped`` are steps that were ruled out before, with the reason.

    Raises:
        CheckpointError: As of :func:`restore_checkpoint`.
    """
    misnamed: set[int] = set()
    # After damage, or a replaced try, every target has to be overwritten.
    skipped, full = dict(skipped), replace(options, strict=_strict_after_damage(options.strict))
    in_memory: dict[int, str] = {}
    is_touched = bool(skipped)
    in_root = {each.step for each in candidates if not each.in_memory}
    for step, restore, is_in_memory in candidates:
        try:
            for attempt in range(1, _TRIES + 1):
                try:
                    report = restore(full if is_touched or attempt > 1 else options)
                    return replace(report, skipped=skipped, not_in_memory=in_memory), misnamed
                except ReplacedError:
                    if attempt == _TRIES:
                        raise
                    logger.info(f"another process has saved step {step} while it was restored: it is restored again")
        except (CorruptCheckpointError, UnreadableCheckpointError, MisnamedError, LostNodesError) as error:
            is_lost = isinstance(error, LostNodesError)
            if not (options.fallback or is_lost or (is_in_memory and step in in_root)):
                raise
            if isinstance(error, MisnamedError) and not is_in_memory:
                misnamed.add(step)
            if comm.position == 0:
                what = "is damaged" if isinstance(error, CorruptCheckpointError) else "cannot be read"
                logger.warning(str(error) if is_lost else f"step {step} {what}, and is skipped: {error}")
            (in_memory if is_in_memory else skipped)[step] = str(error)
            is_touched = is_touched or not is_lost
    found = "; ".join(f"step {step}: {why}" for step, why in [*in_memory.items(), *skipped.items()])
    raise CorruptCheckpointError(f"{context}: all that could be restored is damaged or cannot be read: {found}")


def _strict_after_damage(strict: Strict) -> Strict:
    """Return ``strict`` for a fallback: a target that it lacks would keep values of the damaged checkpoint."""
    if strict is False:
        return "missing"
    return True if strict == "unexpected" else strict

"""The checkpoints in a trainer's output directory: which are complete, which is the last, which to remove.

``{output_dir}/checkpoint-{step}/`` holds the trainer's own small files and, in ``flex_checkpoint/``, one checkpoint of
this library with the id 0. The file ``flex_checkpoint.json``, which is written first, marks such a directory; a
directory of the trainer's own format has no such file. The checkpoint exists when the manifest does, and that is
written last: an interrupted save or removal leaves a directory with the file and without the manifest.

A removal writes ``flex_checkpoint.removing`` first, and then removes the manifest, then the rest. So a checkpoint that
is partly removed is never taken for a complete one, and the next save or rotation finishes the removal.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError, ValidationError
from paddle_flexckpt.media.backend import exists, map_files
from paddle_flexckpt.media.full_disks import writing
from paddle_flexckpt.media.local import sync_path
from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.media.removals import leads_elsewhere, remove, removing
from paddle_flexckpt.native.directory import is_complete

logger = logging.getLogger("paddle_flexckpt")

SUBDIRECTORY = "flex_checkpoint"
UNIQUE_ID = 0
_MANIFEST = f"{UNIQUE_ID}.manifest"
_MARKER = "flex_checkpoint.json"
_REMOVING = "flex_checkpoint.removing"
_NAME = re.compile(r"checkpoint-(\d+)", re.ASCII)
# Another directory, because a run that starts anew in the same one would overwrite its checkpoints.
_NO_CHECKPOINT_REMEDY = "rebuild a lost manifest by `flexckpt repair`; or begin anew, with another --output_dir"


class TrainerDirectories:
    """The checkpoint directories of one run. Only the coordinator's process changes them."""

    def __init__(self, output_dir: str | os.PathLike[str]) -> None:
        """Take the trainer's output directory; it need not exist."""
        self.root = Path(output_dir)

    def directory(self, step: int) -> Path:
        """Return the directory of a step, whether it exists or not."""
        return self.root / f"checkpoint-{step}"

    def steps(self) -> list[int]:
        """Return the steps that have a directory, with a complete checkpoint or without, in rising order."""
        if not self.root.is_dir():
            return []
        matches = [_NAME.fullmatch(path.name) for path in self.root.iterdir() if path.is_dir()]
        return sorted(int(match[1]) for match in matches if match)

    def usable(self) -> list[int]:
        """Return the steps that can be resumed from, as far as their files show, in rising order."""
        return [step for step in self.steps() if is_usable(self.directory(step))]

    def last(self, below: int | None = None) -> str | None:
        """Return the directory of the highest step (below one) that can be resumed from; None if there is none."""
        steps = [step for step in self.usable() if below is None or step < below]
        return str(self.directory(steps[-1])) if steps else None

    def begin(self, step: int) -> None:
        """Make the directory of a save, and mark it as one of this library.

        Raises:
            CheckpointError: A checkpoint of this step is partly removed, and is still being read.
            OSError: The directory or the file could not be written.
        """
        directory = self.directory(step)
        if (directory / _REMOVING).exists() and not self._remove(step):
            raise CheckpointError(
                f"{directory} is being removed while it is read. Remedy (FC403): save again when that is over"
            )
        mark_directory(directory, step)

    def make_durable(self, step: int) -> None:
        """Make the small files of a directory durable, so that a checkpoint that survives a crash has them."""
        directory = self.directory(step)
        for path in (*(path for path in directory.iterdir() if path.is_file()), directory, self.root):
            sync_path(os.fspath(path))

    def rotate(self, limit: int | None, best: str | os.PathLike[str] | None, busy: Collection[int] = ()) -> list[int]:
        """Remove all but the newest checkpoints, and leftovers of interrupted saves and removals; return their steps.

        ``limit`` checkpoints stay (None or 0: all), the best one among them if its directory is known; and each that is
        read, has lost its manifest, or is ``busy``, which means being saved in the background.

        Raises:
            CheckpointError: Something could not be removed; all that could be has been.
        """
        steps = [step for step in self.steps() if step not in busy]
        whole = [step for step in steps if is_usable(self.directory(step))]
        doomed = [step for step in steps if step not in whole and _is_leftover(self.directory(step))]
        doomed += to_rotate(whole, limit, step_of(best))
        removed, problems = [], []
        for step in sorted(doomed):
            try:
                if self._remove(step):
                    removed.append(step)
            except OSError as error:
                problems.append(f"{type(error).__name__}: {error}")
        if problems:
            raise CheckpointError("; ".join(dict.fromkeys(problems)))
        return removed

    def _remove(self, step: int) -> bool:
        """Remove a directory, the checkpoint in it first; return whether that could be done now."""
        directory = self.directory(step)
        backend = open_backend(self.root).child(directory.name).child(SUBDIRECTORY)
        with removing(backend, _MANIFEST) as is_free:
            if not is_free and (exists(backend) or leads_elsewhere(backend)):
                return False  # it is being saved or read, or elsewhere
            if is_free and _MANIFEST in backend.names():
                (directory / _REMOVING).touch()
                open_backend(directory).sync()
                backend.remove(_MANIFEST)
                backend.sync()
                # These go before the file that keeps Paddle's own loader from reading them.
                map_files(backend, backend.remove, [name for name in backend.names() if name.endswith(".safetensors")])
        remove(directory, "tree")
        logger.info(f"removed {directory}")
        return True


def mark_directory(directory: Path, step: int) -> None:
    """Make a directory, and mark it as one of this library.

    Raises:
        ValidationError: A file has its name, or that of one above it.
        OSError: The file system refused.
    """
    open_backend(directory).make_directory()
    with writing(str(directory / _MARKER)):
        (directory / _MARKER).write_text(json.dumps({"version": 1, "step": step}) + "\n", encoding="utf-8")


def is_flex(directory: str | os.PathLike[str]) -> bool:
    """Return whether a checkpoint directory is of this library, complete or not."""
    path = Path(directory)
    return (path / _MARKER).exists() or (path / SUBDIRECTORY).is_dir()


def is_usable(directory: str | os.PathLike[str]) -> bool:
    """Return whether a checkpoint directory can be resumed from, judging by names and sizes of its files.

    A directory of the trainer's own formats counts as complete if it has the trainer's state.
    """
    path = Path(directory)
    if is_flex(path):
        return not (path / _REMOVING).exists() and is_complete(path / SUBDIRECTORY, UNIQUE_ID)
    return any((path / name).is_file() for name in ("trainer_state.json", "trainer_state.bin"))


def _is_leftover(directory: Path) -> bool:
    """Return whether a directory without a checkpoint is left over from a dead save or a removal."""
    if not is_flex(directory):
        return False
    if (directory / _REMOVING).exists():
        return True
    inside = directory / SUBDIRECTORY
    if not inside.is_dir():
        return True
    names = os.listdir(inside)
    if _MANIFEST in names:
        return False  # damaged; it is left for inspection
    if not any(name.endswith(".safetensors") for name in names) or any(name.endswith(".saving") for name in names):
        return True
    logger.warning(f"{inside} has data files and no manifest, and is left alone. `flexckpt repair` may rebuild it")
    return False


def to_rotate(steps: Sequence[int], limit: int | None, best: int | None) -> list[int]:
    """Return the steps to remove so that ``limit`` stay: the best one and the newest.

    With a limit of one and another best, two stay: the newest is never removed.
    """
    if limit is None or limit <= 0 or len(steps) <= limit:
        return []
    keep = {max(steps)}
    if best is not None and best in steps:
        keep.add(best)
    for step in sorted(steps, reverse=True):
        if len(keep) >= limit:
            break
        keep.add(step)
    return [step for step in sorted(steps) if step not in keep]


def step_of(directory: str | os.PathLike[str] | None) -> int | None:
    """Return the step in the name of a checkpoint's directory; None if it has another name."""
    match = None if directory is None else _NAME.fullmatch(Path(directory).name)
    return int(match[1]) if match else None


def latest_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """Return the directory of the highest step that can be resumed from; None if there is none.

    Leftovers of interrupted saves are ignored.
    """
    return TrainerDirectories(output_dir).last()


def choose_checkpoint(asked: str, directories: TrainerDirectories, fallback: bool) -> str:
    """Return the directory to resume from: the one asked for, or for "true" the latest that can be resumed from.

    With ``fallback``, the last complete one before it takes the place of one that is not complete.

    Raises:
        ValidationError: There is none.
        CorruptCheckpointError: It is not complete.
    """
    below = None
    if asked.lower() != "true":
        if not Path(asked).is_dir():
            raise ValidationError(
                [f"there is no directory {asked!r}. Remedy (FC301): correct --resume_from_checkpoint"]
            )
        if not is_flex(asked) or is_usable(asked):
            return asked
        directories, below = TrainerDirectories(Path(asked).parent), step_of(asked)
    last = directories.last(below)
    if below is not None and not fallback:
        remedy = (
            f"resume from {last}, or give --flex_fallback 1"
            if last
            else f"there is none before it: {_NO_CHECKPOINT_REMEDY}"
        )
        raise CorruptCheckpointError(
            f"{asked} is not complete: its save or its removal was interrupted, or files are missing. Remedy (FC303): "
            f"{remedy}"
        )
    if last is None:
        raise ValidationError(
            [f"there is no complete checkpoint in {directories.root}. Remedy (FC301): {_NO_CHECKPOINT_REMEDY}"]
        )
    return last

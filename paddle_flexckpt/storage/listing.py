"""Which checkpoints there are, and whether they are whole."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.storage.backend import Backend, Location, open_backend
from paddle_flexckpt.storage.directory import CheckpointDirectory
from paddle_flexckpt.storage.manifest import Origin


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint that has been committed.

    Attributes:
        path: Its directory.
        unique_id: Its id there.
        step: Training step, if it was recorded.
        world_size: Ranks that saved it; 0 where the manifest is damaged, and so below.
        keys: Tensors in it.
        total_bytes: Bytes of tensors in it.
        complete: Whether the manifest is readable and all its files are there, of their size and of the same save.
            Their bytes are not read: ``verify_checkpoint`` does that.
        problem: What is wrong, where it is not complete.
    """

    path: str
    unique_id: int
    step: int | None
    world_size: int
    keys: int
    total_bytes: int
    complete: bool
    problem: str = ""

    def as_dict(self) -> dict[str, Any]:
        """All fields, JSON-safe."""
        return asdict(self)


def list_checkpoints(path: Location) -> list[CheckpointInfo]:
    """The checkpoints in a directory and in the directories right below it.

    A save that is not finished is no checkpoint, and is not listed; neither are checkpoints of Paddle's own.

    Args:
        path: A checkpoint's directory, or one that holds several such directories; or their URL.

    Returns:
        By rising step, then id; those without a step first. None if there is no such directory.
    """
    backend = open_backend(path)
    found = _infos(backend)
    for infos in backend.each(lambda name: _infos(backend.child(name)), backend.directories()):
        found += infos
    return sorted(found, key=lambda info: (-1 if info.step is None else info.step, info.unique_id, info.path))


def latest(path: Location) -> CheckpointInfo | None:
    """The complete checkpoint of the highest step (without steps: of the highest id); None if there is none.

    Args:
        path: As for :func:`list_checkpoints`.
    """
    complete = [info for info in list_checkpoints(path) if info.complete]
    return complete[-1] if complete else None


def is_complete(path: Location, unique_id: int | None = None) -> bool:
    """Whether a checkpoint has been committed and all its files are there, of their size and of the same save.

    Args:
        path: The checkpoint's directory: a path, a URL, or what ``open_storage`` gives.
        unique_id: The checkpoint's id; None takes the highest.
    """
    directory = CheckpointDirectory(path)
    ids = directory.list_ids()
    chosen = unique_id if unique_id is not None else ids[-1] if ids else None
    return chosen in ids and _info(directory, chosen or 0).complete


def detect_format(path: Location) -> Origin:
    """Whose checkpoint a directory holds; :mod:`paddle_flexckpt.storage.formats` says how that is told.

    Args:
        path: The directory: a path, a URL, or what ``open_storage`` gives; or a safetensors file or index.

    Returns:
        ``"native"``, ``"paddle"``, ``"paddleformers"``, ``"unified_checkpoint"`` or ``"huggingface"``.

    Raises:
        ValidationError: There is no checkpoint, or there are several of different programs.
        CorruptCheckpointError: Safetensors files, whose headers tell whose they are, are damaged.
    """
    return CheckpointDirectory(path).origin()


def _infos(backend: Backend) -> list[CheckpointInfo]:
    directory = CheckpointDirectory(backend)
    return [_info(directory, unique_id) for unique_id in directory.list_ids()]


def _info(directory: CheckpointDirectory, unique_id: int) -> CheckpointInfo:
    try:
        manifest = directory.read_manifest(unique_id)
    except (CorruptCheckpointError, ValidationError) as error:
        return CheckpointInfo(directory.path, unique_id, None, 0, 0, 0, complete=False, problem=str(error))
    problem = ""
    try:
        directory.check_complete(manifest)
    except CorruptCheckpointError as error:
        problem = str(error)
    catalog = manifest.catalog
    return CheckpointInfo(
        path=directory.path,
        unique_id=unique_id,
        step=manifest.step,
        world_size=manifest.world_size,
        keys=len(np.unique(catalog.key)),
        total_bytes=int(catalog.byte_length.sum()),
        complete=not problem,
        problem=problem,
    )

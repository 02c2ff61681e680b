"""List checkpoints, and find out whether they are complete.

Tested in tests/native/test_cleaner.py and tests/manager/test_unreadable.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.media.backend import Backend, Location, map_files, reading
from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.native.directory import CheckpointDirectory


@dataclass(frozen=True)
class CheckpointInfo:
    """A summary of one committed checkpoint.

    Attributes:
        path: Its directory.
        unique_id: Its id there.
        step: Training step, if it was recorded.
        world_size: Ranks that saved it; 0 where the manifest is damaged, and so below.
        keys: Tensors in it.
        total_bytes: Bytes of tensors in it.
        complete: Whether the directory and the manifest are readable and all files are there, of their size and of the
            same save. Their bytes are not read: ``verify_checkpoint`` does that. One that a repair has rebuilt without
            some of its files is not complete.
        problem: What is wrong, where it is not complete.
    """

    path: str
    unique_id: int
    step: int | None = None
    world_size: int = 0
    keys: int = 0
    total_bytes: int = 0
    complete: bool = False
    problem: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return all fields, JSON-safe."""
        return asdict(self)


def list_checkpoints(path: Location) -> list[CheckpointInfo]:
    """List the checkpoints in a directory and in the directories right below it.

    An unfinished save is not a checkpoint and is not listed. Neither are checkpoints of Paddle's own.

    Args:
        path: A checkpoint's directory, or one that holds several such directories; or their URL.

    Returns:
        By rising step, then id; those without a step first. None if there is no such directory. A directory below that
        cannot be read counts as an incomplete checkpoint of id 0, whose ``problem`` says why.

    Raises:
        UnreadableCheckpointError: The directory itself cannot be read.
    """
    return _look(open_backend(path))[0]


def latest(path: Location) -> CheckpointInfo | None:
    """Return the complete checkpoint of the highest step (without steps: of the highest id); None if there is none.

    Args:
        path: As for :func:`list_checkpoints`.
    """
    backend = open_backend(path)
    while True:
        found, below = _look(backend)
        complete = [info for info in found if info.complete]
        if not _may_have_missed(backend, below):
            return complete[-1] if complete else None


def is_complete(path: Location, unique_id: int | None = None) -> bool:
    """Return whether a checkpoint has been committed and all its files exist, with their sizes and the same save token.

    Args:
        path: The checkpoint's directory: a path, a URL, or what ``open_storage`` gives.
        unique_id: The checkpoint's id; None takes the highest.
    """
    directory = CheckpointDirectory(path)
    with reading(directory.path):
        ids = directory.list_ids()
    chosen = unique_id if unique_id is not None else ids[-1] if ids else None
    info = _info(directory, chosen) if chosen is not None and chosen in ids else None
    return info is not None and info.complete


def _look(backend: Backend) -> tuple[list[CheckpointInfo], dict[str, bool]]:
    """Return the checkpoints in a directory and below, and the names of those below: whether they have one."""
    with reading(backend.path):
        found, below = _infos(backend), backend.names("directories")
    each = map_files(backend, lambda name: _infos_below(backend.child(name)), below)
    found += itertools.chain.from_iterable(each)
    found.sort(key=lambda info: (-1 if info.step is None else info.step, info.unique_id, info.path))
    return found, dict(zip(below, map(bool, each)))


def _may_have_missed(backend: Backend, below: Mapping[str, bool]) -> bool:
    """Return whether new checkpoints may have come below while others, which these replaced, were not seen.

    A directory without a checkpoint may have had one when it was listed.
    """
    empty = [name for name, has_one in below.items() if not has_one]
    if not empty:
        return False
    with reading(backend.path):
        if not below.keys() >= set(backend.names("directories")):
            return True
    return any(map_files(backend, lambda name: bool(_infos_below(backend.child(name))), empty))


def _infos(backend: Backend) -> list[CheckpointInfo]:
    directory = CheckpointDirectory(backend)
    infos = (_info(directory, unique_id) for unique_id in directory.list_ids())
    return [info for info in infos if info is not None]


def _infos_below(backend: Backend) -> list[CheckpointInfo]:
    try:
        return _infos(backend)
    except OSError as error:
        return [_broken(backend.path, 0, error)]


def _broken(path: str, unique_id: int, error: Exception) -> CheckpointInfo:
    problem = f"cannot be read: {type(error).__name__}: {error}" if isinstance(error, OSError) else str(error)
    return CheckpointInfo(path, unique_id, problem=problem)


def _info(directory: CheckpointDirectory, unique_id: int) -> CheckpointInfo | None:
    """Return what is known of an id; None if it has been removed meanwhile."""
    try:
        manifest = directory.read_committed(unique_id, ())
    except FileNotFoundError as error:
        return None if unique_id not in directory.list_ids() else _broken(directory.path, unique_id, error)
    except (CorruptCheckpointError, ValidationError, OSError) as error:
        return _broken(directory.path, unique_id, error)
    problem = f"partial: {manifest.partial}" if manifest.partial else ""
    try:
        directory.check_complete(manifest)
    except (CorruptCheckpointError, OSError) as error:
        problem = _broken("", 0, error).problem
        if directory.save_token(unique_id) != manifest.save_token:
            return _info(directory, unique_id)  # it has just been removed or replaced, and its files with it
    return CheckpointInfo(
        path=directory.path,
        unique_id=unique_id,
        step=manifest.step,
        world_size=manifest.world_size,
        keys=manifest.key_count,
        total_bytes=manifest.data_bytes,
        complete=not problem,
        problem=problem,
    )

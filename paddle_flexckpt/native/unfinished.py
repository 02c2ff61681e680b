"""Saves that have no manifest: they are running, or they died; or they were committed, and the manifest is lost.

Tested in tests/native/test_unfinished.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.media.backend import Backend, exists, map_files, reading
from paddle_flexckpt.media.removals import leads_elsewhere
from paddle_flexckpt.native.cleaner import find_begun
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.native.save_names import marked_by, save_of

if TYPE_CHECKING:
    from paddle_flexckpt.native.save_directory import SaveDirectory


@dataclass(frozen=True)
class UnfinishedSave:
    """A save that has begun and has no manifest.

    Attributes:
        path: Its directory.
        unique_id: The id that its checkpoint would have.
        files: The names of its files, the marker first.
        bytes: Bytes of these files.
        prepared: Whether its node has all of it: on another node it may be complete.
        running: Whether it is running; None if that was not asked, or cannot be known.
    """

    path: str
    unique_id: int
    files: list[str]
    bytes: int
    prepared: bool
    running: bool | None = None


@dataclass(frozen=True)
class LostManifest:
    """A manifest that is gone, of a checkpoint that was committed and whose data files are there.

    Attributes:
        path: The checkpoint's directory.
        unique_id: Its id.
    """

    path: str
    unique_id: int


@dataclass(frozen=True)
class CleanedDirectory:
    """The outcome of a clean-up in one directory.

    Attributes:
        path: The directory.
        removed: The names of the files that were removed.
        kept: Why the files of unfinished saves stay; "" if they do not.
        directory_removed: Whether nothing else was in the directory, so that it was removed too.
    """

    path: str
    removed: list[str]
    kept: str = ""
    directory_removed: bool = False


def walk(backend: Backend, depth: int = 2) -> Iterator[Backend]:
    """Yield a directory, and those so many levels below it; UnreadableCheckpointError if one cannot be read."""
    yield backend
    if depth:
        with reading(backend.path):
            below = backend.names("directories")
        for name in sorted(below):
            yield from walk(backend.child(name), depth - 1)


def unfinished_in(backend: Backend, ask: bool = False) -> list[UnfinishedSave]:
    """Return the unfinished saves in a directory; UnreadableCheckpointError if it cannot be read.

    With ``ask`` they tell whether they are running.
    """
    with reading(backend.path):
        return list(_unfinished_in(backend, ask))


def _unfinished_in(backend: Backend, ask: bool = False) -> Iterator[UnfinishedSave]:
    names = backend.names()
    begun_saves = list(filter(None, map(marked_by, names)))
    if not begun_saves:
        return
    # After the listing, so that a save in it has ended if the lock is free. Only the last one can have the lock.
    taken, last = backend.locks.is_taken() if ask else None, max(save.number for save in begun_saves)
    directory = CheckpointDirectory(backend)
    for begun in find_begun(directory, names):
        if directory.save_token(begun.save.unique_id) == begun.token:
            continue  # it has been committed since, or died before it had removed its marker
        files = [begun.marker, *sorted(name for name in names if save_of(name) == begun.save)]
        sizes = map_files(backend, lambda name: _size(backend, name), files)
        running = taken and begun.save.number == last
        yield UnfinishedSave(backend.path, begun.save.unique_id, files, sum(sizes), bool(begun.prepared), running)


def _size(backend: Backend, name: str) -> int:
    """Return a file's size; 0 if it has just been removed."""
    with contextlib.suppress(FileNotFoundError), backend.open(name) as file:
        return int(file.size)
    return 0


def clean_up(directory: SaveDirectory, remove_empty: bool = False) -> CleanedDirectory:
    """Remove the files of saves that died in a directory. Running saves, and checkpoints, are left alone.

    Nothing is removed where it cannot be known that a save has died. With ``remove_empty`` a directory that is empty
    afterwards is removed, as a manager does it: a save that begins meanwhile makes it again.
    """
    backend = directory.backend
    no_locks = CleanedDirectory(
        directory.path,
        [],
        "this storage has no locks, so a save that seems dead may be suspended right before its commit; the next "
        "save of the same id removes them, once it is complete",
    )
    if leads_elsewhere(backend):
        return CleanedDirectory(directory.path, [], "it is a link, and is left alone")
    if backend.locks.is_taken() is None:
        return no_locks
    try:
        lock = backend.locks.take()
    except FileNotFoundError:
        return CleanedDirectory(directory.path, [])
    except CheckpointError as error:
        return CleanedDirectory(directory.path, [], f"a save is running: {error}")
    try:
        if backend.locks.can_run_out:
            return no_locks  # on NFS a look at a directory without a lease does not tell
        removed = directory.cleaner.remove_dead_saves()
        directory.companion.remove_refusal()
        prepared = [each.unique_id for each in _unfinished_in(backend)]
    finally:
        lock.release()
    if remove_empty and removed:
        backend.remove_directory()
    kept = f"another node may have published id {prepared[0]}: its next save decides" if prepared else ""
    return CleanedDirectory(directory.path, removed, kept, remove_empty and not exists(backend))

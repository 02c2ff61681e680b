"""Read a directory of checkpoints: ids, manifests, data files, and the lock on a checkpoint that is being read.

The module also lists the checkpoints of many directories, and finds out whether they are complete.

A checkpoint exists when its manifest does. A reader holds a shared lock of the manifest while it reads. A process that
removes or replaces the checkpoint must take this lock exclusively first.

Tested in tests/native/test_directory.py, tests/native/test_cleaner.py and tests/manager/test_unreadable.py.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.catalog.dtypes import check_integer, plain_integer
from paddle_flexckpt.media.backend import Backend, Location, Lock, map_files, reading, run_beside
from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.native.data_file import check_data_file
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.save_names import MANIFEST, SaveNames, lost_ids, marked_by, rank_of, save_of

logger = logging.getLogger("paddle_flexckpt")


class CheckpointDirectory:
    """A directory of this library's checkpoints, each known by its id.

    Attributes:
        backend: Its files.
        path: What the caller calls it.
    """

    def __init__(self, location: Location) -> None:
        """Open nothing yet: the directory need not exist."""
        self.backend = open_backend(location)
        self.path = self.backend.path

    def list_ids(self, takes_last: bool = False) -> list[int]:
        """Return the ids of the checkpoints that have a manifest, in rising order.

        Raises:
            CorruptCheckpointError: The caller ``takes_last``, and there is a higher one whose manifest has been lost.
        """
        names = self.backend.names()
        ids = sorted(int(match[1]) for match in map(MANIFEST.fullmatch, names) if match)
        # A listing that is made while a save commits may show neither its manifest nor its marker.
        lost = [each for each in lost_ids(names, by_token=True) if takes_last and each > ids[-1]] if ids else []
        lost = [each for each in lost if not self.has_manifest(each)]
        if lost:
            raise CorruptCheckpointError(f"{lost_text(self.backend, lost, ids)}; or load an older one, by unique_id=ID")
        return ids

    def read_manifest(self, unique_id: int | None = None, keys: Sequence[str] | None = None) -> Manifest:
        """Read the manifest of a checkpoint; None takes the highest id.

        With ``keys`` it has the rows of these keys, and perhaps of others: only their partitions are read.

        Raises:
            ValidationError: There is no such checkpoint.
            CorruptCheckpointError: The manifest is damaged; or that of a higher id has been lost, and none was named.
        """
        ids = self.list_ids(takes_last=unique_id is None)
        if not ids or (unique_id is not None and unique_id not in ids):
            wanted = "" if unique_id is None else f" with id {unique_id}"
            raise ValidationError(f"{self.path} has no checkpoint{wanted}; complete ids here: {ids or 'none'}")
        return self.read_committed(ids[-1] if unique_id is None else unique_id, keys)

    def read_committed(self, unique_id: int, keys: Sequence[str] | None = None) -> Manifest:
        """Read the manifest of an id, as :meth:`read_manifest` does; FileNotFoundError if there is none."""
        name = f"{unique_id}.manifest"
        file = self.backend.where(name)
        data = self.backend.read(name)
        logger.debug("read %s: %d bytes", file, len(data))
        manifest = Manifest.decode(data, file)
        del data  # it may be large, and partitions are still to be read
        if manifest.unique_id != unique_id:
            raise CorruptCheckpointError(f"{file} is the manifest of id {manifest.unique_id}: it has been renamed")
        if not manifest.partitions:
            return manifest
        from paddle_flexckpt.native.partition_files import read_rows

        return read_rows(self.backend, manifest, keys)

    def save_token(self, unique_id: int) -> str | None:
        """Return the save token of the manifest in place; None if there is none, or none that can be read."""
        try:
            return self.read_committed(unique_id, ()).save_token
        except (OSError, CorruptCheckpointError, ValidationError):
            return None

    def is_committed(self, save: SaveNames) -> bool:
        """Return whether the manifest in place is that of this save."""
        try:
            return save.token.encode() in self.backend.read(f"{save.unique_id}.manifest")
        except FileNotFoundError:
            return False

    def sees(self, save: SaveNames) -> bool:
        """Return whether a save has been marked as begun in this directory, and has not ended."""
        return self.has_file(save.marker_file)

    def has_manifest(self, unique_id: int) -> bool:
        """Return whether there is a manifest of an id, complete or not, listed or not."""
        return self.has_file(f"{unique_id}.manifest")

    def has_file(self, name: str) -> bool:
        """Return whether there is a file, listed or not."""
        try:
            self.backend.open(name).close()
        except FileNotFoundError:
            return False
        except CorruptCheckpointError:
            pass  # some other object has its name
        return True

    def manifest_file(self, unique_id: int) -> str:
        """Return the path of a checkpoint's manifest, whether it is there or not."""
        return self.backend.where(f"{unique_id}.manifest")

    def data_files(self) -> list[tuple[int, int, str]]:
        """Return id, rank and name of all data files, committed or not, in the order of ids, ranks and saves."""
        named = [(save_of(name), name) for name in self.backend.names() if name.endswith(".safetensors")]
        found = [(save.unique_id, rank_of(name), save.number, name) for save, name in named if save is not None]
        return [(unique_id, rank, name) for unique_id, rank, _, name in sorted(found)]

    def files_of(self, manifest: Manifest) -> list[str]:
        """Return the names of a checkpoint's files except its manifest, and of the files that it has replaced.

        Files of a save that has not ended, whose marker is here, do not count.
        """
        names, named = self.backend.names(), manifest.files
        begun = {*map(marked_by, names)}
        saves = [(name, save) for name in names if (save := save_of(name)) is not None and save not in begun]
        return named + sorted({name for name, save in saves if save.unique_id == manifest.unique_id} - {*named})

    def check_complete(self, manifest: Manifest, names: Iterable[str] | None = None) -> None:
        """Check that data files of a checkpoint (None: all) exist, with their sizes and the same save token.

        All partitions of its manifest have to exist too, with their sizes.

        Raises:
            CorruptCheckpointError: A file does not.
        """
        sizes = manifest.sizes

        def check(name: str) -> None:
            check_data_file(self.backend, manifest, name, sizes[name]).close()

        files = [partial(check, name) for name in (sizes if names is None else names)]
        if manifest.partitions:
            from paddle_flexckpt.native.partition_files import check_partition

            files += [partial(check_partition, self.backend, each) for each in manifest.partitions]
        run_beside(self.backend, *files)

    def usable_files(self, manifest: Manifest) -> tuple[list[bool], dict[str, str]]:
        """Find out which data files of a checkpoint are here and unchanged.

        Returns:
            A flag for each file of the manifest; and by name, what is wrong with those that are here but not usable.
        """
        here, sizes = set(self.backend.names()), manifest.sizes

        def problem(name: str) -> str:
            try:
                check_data_file(self.backend, manifest, name, sizes[name]).close()
            except (CorruptCheckpointError, OSError) as error:
                return str(error) or repr(error)
            return ""

        names = [name for name in sizes if name in here]
        problems = dict(zip(names, map_files(self.backend, problem, names)))
        return [problems.get(name) == "" for name in sizes], {name: text for name, text in problems.items() if text}


def lost_text(backend: Backend, lost: Sequence[int], complete: Sequence[int] = ()) -> str:
    """Return the text about checkpoints of a directory whose manifests have been lost."""
    return (
        f"{backend.path} has the data files of a save (id {', '.join(map(str, lost))}), and neither its manifest nor "
        "the marker of an unfinished save: it was committed, and its manifest has been lost; complete ids here: "
        f"{list(complete) or 'none'}. Remedy (FC306): restore {backend.where(f'{lost[0]}.manifest')} from a copy, or "
        f"rebuild it: flexckpt repair {backend.path} --id {lost[0]}"
    )


def number_of(manifest: Manifest) -> int:
    """Return the number of a checkpoint's save: of two saves of an id, the newer has the higher number."""
    return max((save.number for save in map(save_of, manifest.catalog.files) if save), default=0)


class LockedManifest:
    """A checkpoint's manifest, and the lock on the checkpoint. Leaving the context releases the lock."""

    def __init__(
        self, directory: CheckpointDirectory, unique_id: int | None = None, keys: Sequence[str] | None = None
    ) -> None:
        """Take the lock, then read; arguments and errors as of :meth:`CheckpointDirectory.read_manifest`."""
        unique_id = plain_integer(unique_id)
        if unique_id is not None:
            check_integer("unique_id", unique_id)
        before: list[int] | None = None
        while True:
            ids = directory.list_ids(takes_last=unique_id is None)
            chosen = ids[-1] if ids and unique_id is None else unique_id
            try:
                if chosen is None or chosen not in ids:
                    # Another program's checkpoint, or none.
                    self._lock, self.manifest = Lock(), directory.read_manifest(unique_id, keys)
                else:
                    self._lock, self.manifest = _lock_and_read(directory, chosen, keys)
                if self.manifest.partial:
                    logger.warning("%s is partial: %s", directory.manifest_file(chosen or 0), self.manifest.partial)
                return
            except FileNotFoundError as error:
                # The checkpoint has just been removed, and perhaps saved again: another one may be the highest now.
                if before == ids:
                    file = directory.path if chosen is None else directory.manifest_file(chosen)
                    raise CorruptCheckpointError(
                        f"{file} is listed in its directory, and is not there: a link that leads nowhere, or a "
                        "directory that somebody keeps changing. Remedy (FC304): try again; if it stays so, restore "
                        "the file that the link leads to, or load another checkpoint by its id"
                    ) from error
                before = ids

    def __enter__(self) -> Manifest:
        return self.manifest

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()


def _lock_and_read(directory: CheckpointDirectory, unique_id: int, keys: Sequence[str] | None) -> tuple[Lock, Manifest]:
    lock = directory.backend.locks.share(f"{unique_id}.manifest")
    try:
        return lock, directory.read_committed(unique_id, keys)
    except BaseException:
        lock.release()
        raise


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
    backend = open_backend(path)
    while True:
        found, below = _look(backend)
        if not _may_have_missed(backend, below):
            return found


def latest(path: Location) -> CheckpointInfo | None:
    """Return the complete checkpoint of the highest step (without steps: of the highest id); None if there is none.

    Args:
        path: As for :func:`list_checkpoints`.
    """
    complete = [info for info in list_checkpoints(path) if info.complete]
    return complete[-1] if complete else None


def is_complete(path: Location, unique_id: int | None = None) -> bool:
    """Return whether a checkpoint has been committed and all its files exist, with their sizes and the same save token.

    Args:
        path: The checkpoint's directory: a path, a URL, or what ``open_storage`` gives.
        unique_id: The checkpoint's id; None takes the highest.
    """
    directory = CheckpointDirectory(path)
    with reading(directory.path):
        try:
            ids = directory.list_ids(takes_last=unique_id is None)
        except CorruptCheckpointError:
            return False
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

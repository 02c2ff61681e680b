"""Read a directory of checkpoints: ids, manifests, data files, and the lock on a checkpoint that is being read.

A checkpoint exists when its manifest does. A reader holds a shared lock of the manifest while it reads. A process that
removes or replaces the checkpoint must take this lock exclusively first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import partial

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.media.backend import Location, Lock, map_files, run_beside
from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.native.data_file import check_data_file
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.partition_files import check_partition, read_rows
from paddle_flexckpt.native.save_names import MANIFEST, SaveNames, marked_by, rank_of, save_of

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

    def list_ids(self) -> list[int]:
        """Return the ids of the checkpoints that have a manifest, in rising order."""
        return sorted(int(match[1]) for match in map(MANIFEST.fullmatch, self.backend.names()) if match)

    def read_manifest(self, unique_id: int | None = None, keys: Sequence[str] | None = None) -> Manifest:
        """Read the manifest of a checkpoint; None takes the highest id.

        With ``keys`` it has the rows of these keys, and perhaps of others: only their partitions are read.

        Raises:
            ValidationError: There is no such checkpoint.
            CorruptCheckpointError: The manifest is damaged.
        """
        ids = self.list_ids()
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
        partitions = [partial(check_partition, self.backend, each) for each in manifest.partitions]
        run_beside(self.backend, *files, *partitions)

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


def number_of(manifest: Manifest) -> int:
    """Return the number of a checkpoint's save: of two saves of an id, the newer has the higher number."""
    return max((save.number for save in map(save_of, manifest.catalog.files) if save), default=0)


class LockedManifest:
    """A checkpoint's manifest, and the lock on the checkpoint. Leaving the context releases the lock."""

    def __init__(
        self, directory: CheckpointDirectory, unique_id: int | None = None, keys: Sequence[str] | None = None
    ) -> None:
        """Take the lock, then read; arguments and errors as of :meth:`CheckpointDirectory.read_manifest`."""
        before: list[int] | None = None
        while True:
            ids = directory.list_ids()
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
                        f"{file} is listed in its directory, and is not there: a link that "
                        "leads nowhere, or a directory that somebody keeps changing. Remedy: try again; if it stays "
                        "so, restore the file that the link leads to, or load another checkpoint by its id"
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

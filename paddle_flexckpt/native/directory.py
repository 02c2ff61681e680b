"""Read a directory of checkpoints: ids, manifests, data files, and the lock that keeps a checkpoint while it is read.

A checkpoint exists when its manifest does. A reader shares the lock of the manifest for the time of its reading.
Removers and replacers must take this lock exclusively first.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.media.backend import Location, Lock, map_files, run_beside
from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.native.data_file import check_data_file
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.partition_files import check_partition, read_rows

logger = logging.getLogger("paddle_flexckpt")

# What makes a checkpoint exist.
MANIFEST = re.compile(r"(\d+)\.manifest", re.ASCII)
# What says that a save has begun: id, and generation (none: 0).
MARKER = re.compile(r"(\d+)(?:\.(\d+))?\.saving", re.ASCII)
# The other files of a save: rank (of a partition: its number), id, generation (none: 0), token (of messages, but for
# those of older versions), and kind.
OF_SAVE = re.compile(
    r"(\d+)_(\d+)(?:\.(\d+))?(?:\.(safetensors|partition|prepared(?:\.[0-9a-f]{32}\.tmp)?)"
    r"|(?:-([0-9a-f]{32}))?\.(?:decided|late|(?:part|failed)(?:\.[0-9a-f]{32}\.tmp)?))",
    re.ASCII,
)


@dataclass(frozen=True)
class SaveNames:
    """Name the files of one save.

    Attributes:
        unique_id: The checkpoint's id.
        generation: 0, or a number that no file of this id has yet.
        token: Random text that marks this save's files.
    """

    unique_id: int
    generation: int
    token: str

    def data_file(self, rank: int) -> str:
        """Return the name of a rank's data file."""
        return f"{rank}_{self._stem}.safetensors"

    def part_file(self, rank: int) -> str:
        """Return the name of a rank's part."""
        return f"{rank}_{self._message}.part"

    def partition_file(self, number: int) -> str:
        """Return the name of a partition of the manifest."""
        return f"{number}_{self._stem}.partition"

    def written_by(self, rank: int, names: Iterable[str]) -> list[str]:
        """Return what a rank may have written, and another save may write: its data file, and partitions by name."""
        return [self.data_file(rank), *filter(self.owns_partition, names)]

    def failure_file(self, rank: int) -> str:
        """Return the name of what a rank says if it cannot write."""
        return f"{rank}_{self._message}.failed"

    def decision_file(self, coordinator: int) -> str:
        """Return the name of what was decided about an asynchronous save; ``coordinator`` is the rank that commits."""
        return f"{coordinator}_{self._message}.decided"

    def late_file(self, rank: int) -> str:
        """Return the name of what a rank leaves that has come late: its data file is to go, and so are partitions."""
        return f"{rank}_{self._message}.late"

    def prepared_file(self, rank: int) -> str:
        """Return the name of a node's manifest that is not published yet; ``rank`` is that of its committer."""
        return f"{rank}_{self._stem}.prepared"

    @property
    def marker_file(self) -> str:
        """Return the name of the file that says that this save has begun."""
        return f"{self._stem}.saving"

    @property
    def _stem(self) -> str:
        # A save that replaces an id has a generation, as the old files still serve.
        return f"{self.unique_id}.{self.generation}" if self.generation else f"{self.unique_id}"

    @property
    def _message(self) -> str:
        # A rank of a dead save may speak when another save has the same id and generation.
        return f"{self._stem}-{self.token}"

    def owns(self, name: str) -> bool:
        """Return whether a file is of this save, by its name; not its manifest or marker."""
        return save_of(name) == (self.unique_id, self.generation)

    def owns_partition(self, name: str) -> bool:
        """Return whether a file is a partition of this save's manifest, by its name."""
        return name.endswith(".partition") and self.owns(name)


def save_of(name: str) -> tuple[int, int] | None:
    """Return id and generation of the save that a file is of; None for manifests, markers and others."""
    match = OF_SAVE.fullmatch(name)
    return (int(match[2]), int(match[3] or 0)) if match else None


def sent_by(name: str) -> tuple[int, SaveNames] | None:
    """Return the rank that a message is of, and its save; None for other files, and for messages of older versions."""
    match = OF_SAVE.fullmatch(name)
    return (int(match[1]), SaveNames(int(match[2]), int(match[3] or 0), match[5])) if match and match[5] else None


def marked_by(name: str) -> tuple[int, int] | None:
    """Return id and generation of the save that a marker is of; None for what is no marker."""
    match = MARKER.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else None


def lost_ids(names: Collection[str]) -> list[int]:
    """Return the ids whose data files are among the names of a directory, and whose manifest has been lost.

    As long as a save is not committed its marker is there, and what a failed save leaves has a marker or a message.
    """
    data = {save for save, name in zip(map(save_of, names), names) if save and name.endswith(".safetensors")}
    ended = (".safetensors", ".partition")
    begun = {save_of(name) for name in names if not name.endswith(ended)} | {*map(marked_by, names)}
    there = {int(match[1]) for match in map(MANIFEST.fullmatch, names) if match}
    return sorted({unique_id for unique_id, _ in data - begun} - there)


def is_before(save: tuple[int, int] | None, unique_id: int, generation: int) -> bool:
    """Return whether a save is of this id, and of an earlier generation."""
    return save is not None and save[0] == unique_id and save[1] < generation


class CheckpointDirectory:
    """Read one directory of this library's checkpoints, told apart by their ids.

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

        With ``keys`` it has the rows of these keys, and perhaps others': of its partitions only theirs are read.

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

    def has_manifest(self, unique_id: int) -> bool:
        """Return whether there is a manifest of an id, whole or not, listed or not."""
        try:
            self.backend.open(f"{unique_id}.manifest").close()
        except FileNotFoundError:
            return False
        except CorruptCheckpointError:
            pass  # whatever it is that has its name
        return True

    def manifest_file(self, unique_id: int) -> str:
        """Return the path of a checkpoint's manifest, whether it is there or not."""
        return self.backend.where(f"{unique_id}.manifest")

    def data_files(self) -> list[tuple[int, int, str]]:
        """Return id, rank and name of all data files, committed or not, in the order of ids, ranks and generations."""
        matches = [match for match in map(OF_SAVE.fullmatch, self.backend.names()) if match]
        found = [(int(m[2]), int(m[1]), int(m[3] or 0), m[0]) for m in matches if m[4] == "safetensors"]
        return [(unique_id, rank, name) for unique_id, rank, _, name in sorted(found)]

    def files_of(self, manifest: Manifest) -> list[str]:
        """Return the names of a checkpoint's files but its manifest, and of those that it has replaced."""
        named = manifest.files
        newest = generation_of(manifest)
        older = [name for name in self.backend.names() if is_before(save_of(name), manifest.unique_id, newest)]
        return named + sorted({*older, *self.repaired_partitions(manifest)} - set(named))

    def repaired_partitions(self, manifest: Manifest, names: Iterable[str] | None = None) -> list[str]:
        """Return the names of partitions of a checkpoint's save that its manifest does not name: a repair has not.

        ``names`` are the directory's, if they are known.
        """
        own, named = SaveNames(manifest.unique_id, generation_of(manifest), manifest.save_token), set(manifest.files)
        names = self.backend.names() if names is None else names
        return [name for name in names if own.owns_partition(name) and name not in named]

    def check_complete(self, manifest: Manifest, names: Iterable[str] | None = None) -> None:
        """Check that data files of a checkpoint (None: all) are there, of their size and of the same save.

        All partitions of its manifest have to be there too, of their size.

        Raises:
            CorruptCheckpointError: One is not.
        """
        sizes = manifest.sizes

        def check(name: str) -> None:
            check_data_file(self.backend, manifest, name, sizes[name]).close()

        files = [partial(check, name) for name in (sizes if names is None else names)]
        partitions = [partial(check_partition, self.backend, each) for each in manifest.partitions]
        run_beside(self.backend, *files, *partitions)

    def usable_files(self, manifest: Manifest) -> tuple[list[bool], dict[str, str]]:
        """Find out which data files of a checkpoint are here as they were written.

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


def generation_of(manifest: Manifest) -> int:
    """Return the generation of a checkpoint: of two saves of an id the one with the higher one is the newer."""
    return max((save[1] for save in map(save_of, manifest.catalog.files) if save), default=0)


class LockedManifest:
    """Keep a checkpoint while it is read: its manifest, and the lock, which leaving the context releases."""

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
                # It has just been removed, and perhaps saved again: another one may be the highest now.
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

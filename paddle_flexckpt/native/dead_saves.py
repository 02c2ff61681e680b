"""Find saves that died, by their markers, and remove what they left behind."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterator, Sequence

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.media.backend import map_files
from paddle_flexckpt.native.directory import MARKER, CheckpointDirectory, SaveNames, save_of
from paddle_flexckpt.native.save_directory import SaveDirectory


def find_saves(
    directory: CheckpointDirectory, names: Sequence[str] | None = None
) -> Iterator[tuple[str, SaveNames | None, int]]:
    """Yield each marker that says that a save has begun: its name, the save, and how many nodes it goes to.

    The save is None if it died before the marker was whole, so before any other file.
    """
    names = directory.backend.names() if names is None else names
    for marker in sorted(filter(MARKER.fullmatch, names)):
        try:
            said = json.loads(directory.backend.read(marker))
            save = SaveNames(int(said["unique_id"]), int(said["generation"]), str(said["token"]))
            nodes = int(said.get("nodes", 1))
        except FileNotFoundError:
            continue  # a rank of a save that has just failed has removed it, after that save's files
        except (ValueError, KeyError, TypeError, RecursionError):
            yield marker, None, 1
        else:
            yield marker, (save if save.marker_file == marker else None), nodes


def find_prepared(directory: CheckpointDirectory, save: SaveNames, names: Sequence[str] | None = None) -> list[str]:
    """Return the files that say that a save is complete here and perhaps published elsewhere; none if it is here."""
    names = directory.backend.names() if names is None else names
    names = [name for name in names if save.owns(name) and name.endswith(".prepared")]
    return [] if not names or directory.is_committed(save) else names


def remove_dead_saves(
    directory: SaveDirectory,
    current: SaveNames | None = None,
    aborted: Collection[str] = (),
    names: Sequence[str] | None = None,
) -> list[str]:
    """Remove what saves left behind that died: those whose marker is here. The caller has the lock.

    Files that no marker speaks of are left alone, whether a manifest names them or not: it may be the manifest that was
    lost. But a manifest that was not put in place, by a save or a repair, is of no use to anybody, nor are partitions
    that a repair did without. What is prepared stays: another node may have published its part of that save.

    ``current`` is the save that is being made, ``aborted`` has the tokens of prepared saves that no node has published.
    ``names`` are the directory's files as the caller has listed them since it has the lock; None lists them here.
    Returns the names of the files removed.
    """
    names = directory.backend.names() if names is None else names
    removed = directory.remove_temporaries(names)
    removed += _remove_repaired_partitions(directory, names)
    ours = "" if current is None else current.marker_file
    for marker, save, _ in find_saves(directory, [name for name in names if name != ours]):
        if save is None:
            directory.remove_save_files([], marker)
            removed.append(marker)
            continue
        if save.token not in aborted and find_prepared(directory, save, names):
            continue
        try:
            useless = directory.find_useless(save, names)
        except CorruptCheckpointError:
            continue  # whose files these are cannot be told
        # Whoever has taken the lease over meanwhile has a marker here too.
        directory.backend.locks.recheck()
        directory.remove_uploads(save)
        if directory.is_committed(save):
            directory.update_companion()  # it may have died before that
        directory.remove_save_files(useless, marker)
        removed += [*useless, marker]
    return removed


def _is_partition(name: str) -> bool:
    return name.endswith(".partition")


def _remove_repaired_partitions(directory: SaveDirectory, names: Sequence[str]) -> list[str]:
    """Remove partitions of manifests that repairs have replaced, and return their names."""

    def find(unique_id: int) -> list[str]:
        try:
            return directory.repaired_partitions(directory.read_committed(unique_id, ()), names)
        except (FileNotFoundError, CorruptCheckpointError, ValidationError):
            return []  # whose partitions these are cannot be told

    ids = sorted({save[0] for save in map(save_of, filter(_is_partition, names)) if save})
    removed = list(itertools.chain.from_iterable(map_files(directory.backend, find, ids)))
    map_files(directory.backend, directory.backend.remove, removed)
    return removed

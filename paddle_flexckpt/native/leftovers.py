"""Remove the files of saves that failed, died or have been replaced.

A marker says which files are of a save that has not ended. Other files stay, unless they are messages of dead saves, or
manifests or companion files that were never put in place.

Tested in tests/native/test_leftovers.py and tests/native/test_directory.py.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial

from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError, ValidationError
from paddle_flexckpt.media.backend import Location, map_files, run_beside, write_file
from paddle_flexckpt.native.companion import Companion
from paddle_flexckpt.native.data_file import TOKEN_WINDOW
from paddle_flexckpt.native.directory import (
    MARKER,
    CheckpointDirectory,
    SaveNames,
    generation_of,
    is_before,
    save_of,
    sent_by,
)
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.save_messages import MessageDirectory

logger = logging.getLogger("paddle_flexckpt")


class LeftoverDirectory(MessageDirectory):
    """Remove what saves have left in their directory."""

    def __init__(self, location: Location, companion: Companion) -> None:
        """Open nothing yet: the directory need not exist."""
        super().__init__(location, companion)
        self._temporary = re.compile(rf"(?:(\d+)\.manifest|{re.escape(companion.name)})\.[0-9a-f]{{32}}\.tmp", re.ASCII)

    def discard(self, save: SaveNames, ranks: Sequence[int], partitions: int = 0, is_removable: bool = True) -> None:
        """Remove the files of a save that cannot be committed any more, and its marker.

        The caller has the right to save, and none of the ``ranks`` that took part writes any more, nor any of so many
        ``partitions``. Nobody else may remove them: who is stopped before it does so would remove those of a later save
        that has the same names. If the right has been lost, or it is not ``is_removable``, as it may be committed,
        they are left to the next save, as :meth:`discard_late` does.
        """
        # What cannot be removed does no harm, and must not hide why the save failed: the marker stays with it.
        with contextlib.suppress(OSError):
            if self.is_committed(save):
                return
            with contextlib.suppress(CheckpointError):
                if is_removable and not self.is_taken(save):
                    # A listing may not show all of them yet.
                    written = [name for rank in ranks for name in (save.data_file(rank), save.part_file(rank))]
                    written += map(save.partition_file, range(partitions))
                    files = {*written, *filter(save.owns, self.backend.names())} - self.named_files(save.unique_id)
                    self.remove_uploads(save.owns)
                    self.remove_save_files(sorted(files), save.marker_file)
                    return
            for rank in () if self.sees(save) else ranks:
                self.discard_late(save, rank)

    def discard_late(self, save: SaveNames, rank: int, coordinator: int | None = None) -> None:
        """Leave no message of a rank without the right to save, if the save is over: its marker has gone.

        Nobody else would look for them. Another save may have the name of the data file by now, so a message says that
        it is to go: whoever has the right to save next looks whose it is (:func:`remove_dead_saves`). What was decided
        about the save has the name of its ``coordinator``.
        """
        # It does no harm if it stays, and must not hide why the save failed.
        with contextlib.suppress(OSError, CheckpointError):
            if self.sees(save) or self.is_committed(save):
                return
            self.backend.locks.forget_lost()
            if any(self.is_of(save, name) for name in save.written_by(rank, self.backend.names())):
                self.refuse_unfinished()
                write_file(self.backend, save.late_file(rank), b"", "overwrite")
            for name in (save.part_file(rank), save.decision_file(rank if coordinator is None else coordinator)):
                self.backend.remove(name)
            self.backend.sync()  # nobody would remove what a loss of power brought back

    def is_of(self, save: SaveNames, name: str) -> bool:
        """Return whether a data file is of a save, by its header; one that ends before it says so counts as well."""
        try:
            with self.backend.open(name) as file:
                head = file.read(0, TOKEN_WINDOW)
        except (FileNotFoundError, CorruptCheckpointError):
            return False
        return save.token.encode() in head or b"save_token" not in head

    def named_files(self, unique_id: int) -> set[str]:
        """Return the files that the manifest in place names; none if it is not there, or cannot be read.

        A save that has chosen its names by a listing that was out of date has those of a checkpoint.
        """
        try:
            return set(self.read_committed(unique_id, ()).files)
        except (FileNotFoundError, CorruptCheckpointError, ValidationError):
            return set()

    def find_useless(
        self, save: SaveNames, names: Iterable[str], being_read: bool = False, manifest: Manifest | None = None
    ) -> list[str]:
        """Return the files that a finished or dead save leaves without a use; its marker is not among them.

        What it has replaced is left to the next save of its id where that is being read. ``manifest`` is that of the
        save, if the caller has just committed it; None reads it, if it is the one in place.

        Raises:
            CorruptCheckpointError: It was committed, and the manifest is damaged.
        """
        committed = manifest is not None or self.is_committed(save)
        if committed:
            keep = set((manifest or self.read_committed(save.unique_id, ())).files)
        else:
            keep = self.named_files(save.unique_id)
        useless = []
        for name in names:
            other, temporary = save_of(name), self._temporary.fullmatch(name)
            unfinished = temporary is not None and temporary[1] in (None, str(save.unique_id))
            # What is older than a committed save of its id has been replaced by it.
            older = not being_read and is_before(other, save.unique_id, save.generation)
            if unfinished or ((save.owns(name) or (committed and older)) and name not in keep):
                useless.append(name)
        return useless

    def may_commit_late(self, save: SaveNames, current: SaveNames) -> bool:
        """Return whether a save that counts as dead may have its manifest put in place before the current one has.

        Its process may be stopped, or its request be on its way. Without its files the manifest would stand for
        nothing, in place of the one that is there now.
        """
        return self.backend.locks.can_run_out and is_before(
            (save.unique_id, save.generation), current.unique_id, current.generation
        )

    def may_be_read(self, save: SaveNames) -> bool:
        """Return whether a save may be a checkpoint that was replaced, and whose files readers keep by their locks.

        These stay for the next save, or the removal, of its id.
        """
        if self.backend.locks.can_run_out or not self.backend.has_path:
            return False
        try:
            newest = generation_of(self.read_committed(save.unique_id, ()))
        except (FileNotFoundError, CorruptCheckpointError, ValidationError):
            return False
        return save.generation < newest

    def remove_temporaries(self, names: Iterable[str]) -> list[str]:
        """Remove those of the files that are manifests or companions never put in place, and return their names."""
        names = sorted(filter(self._temporary.fullmatch, names))
        map_files(self.backend, self.backend.remove, names)
        return names

    def remove_uploads(self, wanted: Callable[[str], bool]) -> None:
        """Remove what dead saves had begun to send to a remote store: files with wanted names."""
        try:
            self.backend.remove_unfinished(wanted)
        except OSError as error:
            # Not every store lets everybody ask; nothing depends on it but its bill.
            logger.warning(f"what a dead save had begun to send could not be looked for: {error}")

    def remove_save_files(self, names: Sequence[str], marker: str, beside: Callable[[], object] = lambda: None) -> None:
        """Remove files of a save, and its marker once they are gone for good; ``beside`` is called with the latter."""
        map_files(self.backend, self.backend.remove, names)
        if names:
            self.backend.sync()
        self.remove_refusal(marker)
        run_beside(self.backend, partial(self.backend.remove, marker), beside)


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
    directory: LeftoverDirectory,
    current: SaveNames | None = None,
    aborted: Collection[str] = (),
    names: Sequence[str] | None = None,
) -> list[str]:
    """Remove what saves left behind that died: those whose marker is here, and messages. The caller has the lock.

    Other files that no marker speaks of are left alone, whether a manifest names them or not: it may be the manifest
    that was lost. But a manifest that was not put in place, by a save or a repair, is of no use to anybody, nor are
    partitions that a repair did without. What is prepared stays: another node may have published its part of that save.

    ``current`` is the save that is being made. What may still be committed, and is replaced by it, is left to
    :meth:`SaveDirectory.finish`. ``aborted`` has the tokens of prepared saves that no node has published.
    ``names`` are the directory's files as the caller has listed them since it has the lock; None lists them here.
    Returns the names of the files removed.
    """
    names = directory.backend.names() if names is None else names
    removed = directory.remove_temporaries(names)
    removed += _remove_repaired_partitions(directory, names)
    ours = "" if current is None else current.marker_file
    kept = set() if current is None else {current.token}
    for marker, save, _ in find_saves(directory, [name for name in names if name != ours]):
        if save is None:
            directory.remove_save_files([], marker)
            removed.append(marker)
            continue
        kept.add(save.token)
        if save.token not in aborted and find_prepared(directory, save, names):
            continue
        if current is not None and directory.may_commit_late(save, current):
            continue
        try:
            useless = directory.find_useless(save, names)
        except CorruptCheckpointError:
            continue  # whose files these are cannot be told
        # Whoever has taken the lease over meanwhile has a marker here too.
        directory.backend.locks.recheck()
        directory.remove_uploads(save.owns)
        if directory.is_committed(save):
            directory.update_companion()  # it may have died before that
        directory.remove_save_files(useless, marker)
        # Ranks of a dead save may live. One that has looked while the marker was there leaves its files to this.
        late = [name for name in directory.find_useless(save, directory.backend.names()) if save.owns(name)]
        if late:
            map_files(directory.backend, directory.backend.remove, late)
            directory.backend.sync()  # nobody would remove what a loss of power brought back
            directory.remove_refusal()
        removed += [*useless, marker, *late]
    return removed + _remove_late_files(directory, set(names).difference(removed), current, kept)


def _remove_late_files(
    directory: LeftoverDirectory, names: Iterable[str], current: SaveNames | None, kept: Collection[str]
) -> list[str]:
    """Remove messages of dead saves, and what ranks have written after their save had been cleaned up.

    ``kept`` has the tokens of saves whose messages stay. Returned are the names of the files removed.
    """
    found = {}
    for name in sorted(names):
        sent = sent_by(name)
        if sent is None or sent[1].token in kept:
            continue
        if current is not None and (current.owns(name) or directory.may_commit_late(sent[1], current)):
            continue
        if name.endswith(".late") and directory.may_be_read(sent[1]):
            continue
        found[name] = sent
    if not found:
        return []

    def remove(name: str) -> list[str]:
        rank, save = found[name]
        if not name.endswith(".late") or directory.is_committed(save):  # which may have come late, too
            return []
        removed = [each for each in save.written_by(rank, names) if directory.is_of(save, each)]
        map_files(directory.backend, directory.backend.remove, removed)
        return removed

    directory.backend.locks.recheck()
    late = list(itertools.chain.from_iterable(map_files(directory.backend, remove, found)))
    if late:
        directory.backend.sync()
    map_files(directory.backend, directory.backend.remove, found)
    directory.backend.sync()
    directory.remove_refusal()
    return [*late, *found]


def _is_partition(name: str) -> bool:
    return name.endswith(".partition")


def _remove_repaired_partitions(directory: LeftoverDirectory, names: Sequence[str]) -> list[str]:
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

"""Save into a directory of checkpoints: the id, the files of a save in their order, and the commit.

1. Take the save lock, and write a marker, by which the files of a dead save are recognised.
2. Write the data files, then the ranks' parts, and the partitions of a manifest of very many rows; each is durable at
   once. Where ranks write the partitions themselves there are no parts.
3. Make the directory's entries durable, then put the manifest in place, whole or not at all.
4. Bring the companion file, for another program's loader, up to date.
5. Remove the files that have been replaced, then the marker.

A crash at any point leaves the existing manifests, and the files that they name, unchanged. The next save
finds the marker and cleans up. The companion exists before the first data file, and names existing files only.

Tested in tests/native/test_directory.py and tests/native/test_partition_files.py.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from paddle_flexckpt.catalog import (
    Catalog,
    CheckpointError,
    CorruptCheckpointError,
    NotDurableError,
    ValidationError,
)
from paddle_flexckpt.catalog.dtypes import check_integer
from paddle_flexckpt.catalog.errors import TakenError, without_remedy
from paddle_flexckpt.media.backend import Location, Lock, SaveLock, publish, write_file
from paddle_flexckpt.media.opening import open_destination
from paddle_flexckpt.native.cleaner import Cleaner
from paddle_flexckpt.native.companion import Companion, CompanionFile
from paddle_flexckpt.native.data_file import write_data_file
from paddle_flexckpt.native.directory import CheckpointDirectory, lost_text, number_of
from paddle_flexckpt.native.manifest import Manifest, SaveInfo, merge_parts
from paddle_flexckpt.native.partitions import Partition, count_partitions
from paddle_flexckpt.native.save_names import MANIFEST, SaveNames, lost_ids, marked_by, new_token, save_of
from paddle_flexckpt.progress import SILENT, Meter

logger = logging.getLogger("paddle_flexckpt")


# Attempts to create and lock a directory. Another process may remove it in between, while it is still empty.
_TRIES = 10


class CleanUpError(CheckpointError):
    """An error of a clean-up: the checkpoint is complete, but files that it does not need could not be removed."""


class SaveDirectory(CheckpointDirectory):
    """A directory of checkpoints, for saving into it.

    Attributes:
        companion: The file for another program's loader.
        cleaner: The cleaner that removes what saves have left.
    """

    def __init__(self, location: Location, companion: Companion) -> None:
        """Open nothing yet: the directory need not exist. ValidationError if it has the name of a file."""
        super().__init__(open_destination(location))
        self.companion = CompanionFile(self, companion)
        self.cleaner = Cleaner(self, self.companion)

    def lock(self) -> SaveLock:
        """Take the save lock; create the directory.

        Raises:
            CheckpointError: Another save has it, or another process removes the directory again and again.
            ValidationError: The path is not a directory.
        """
        for _ in range(_TRIES):
            self.backend.make_directory()
            try:
                return self.backend.locks.take()
            except FileNotFoundError:
                # Another manager may have removed the directory, as an empty one, since it was created.
                if not self.backend.has_path:
                    raise
            except TakenError as error:
                holder = self._last_begun()
                raise TakenError.of(self.path, holder) if holder else error from None
        raise self._always_removed()

    def _last_begun(self) -> str:
        """Return the process whose save was the last to begin here and has not ended, by its marker; "" if none has."""
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            markers = [(save.number, name) for name in self.backend.names() if (save := marked_by(name)) is not None]
            who = json.loads(self.backend.read(max(markers)[1]))
            return f"process {who['pid']} on {who['host']}" if markers else ""
        return ""

    def _always_removed(self) -> CheckpointError:
        return CheckpointError(
            f"{self.path} was removed by another process each time a save was about to begin. Remedy (FC403): find out "
            "who removes it, and save again"
        )

    def begin_save(
        self, unique_id: int | None, world_size: int, overwrite: bool = True
    ) -> tuple[SaveLock, list[str], SaveNames]:
        """Take the save lock, and mark a save as begun, as :meth:`lock` and :meth:`open_save` do.

        Until the marker exists another manager may remove the directory, as an empty one. If the directory is created
        again, the lock is lost, and all is done again.

        Returns:
            The lock, the names of the files that were here before, and the names of the save.

        Raises:
            CheckpointError: As of :meth:`lock`.
            ValidationError: As of :meth:`open_save`.
        """
        for _ in range(_TRIES):
            lock = self.lock()
            try:
                before = self.backend.names()
                save = self.open_save(unique_id, world_size, before, overwrite)
                if self.backend.locks.is_here():
                    return lock, before, save
                self.backend.remove(save.marker_file)
            except BaseException as error:
                lock.release()
                if not isinstance(error, FileNotFoundError) or not self.backend.has_path:
                    raise
            else:
                lock.release()
        raise self._always_removed()

    def open_save(
        self,
        unique_id: int | None,
        world_size: int = 1,
        names: Sequence[str] | None = None,
        overwrite: bool = True,
    ) -> SaveNames:
        """Choose the names of a new save (id None: after the highest) and mark it as begun. The caller has the lock.

        ``names`` are those of the files that are here, if the caller has listed them. ``overwrite`` allows an id that
        has a checkpoint.

        Raises:
            ValidationError: The id is not a non-negative integer, or it has a checkpoint that must not, or cannot, be
                replaced.
        """
        names = self.backend.names() if names is None else names
        chosen = self.choose_id(unique_id, names, overwrite)
        save = SaveNames(chosen, new_token(names), f"{chosen}.manifest" in names)
        self.mark_save(save, world_size)
        return save

    def choose_id(self, unique_id: int | None, names: Sequence[str], overwrite: bool = True) -> int:
        """Return the id of a new save in a directory that has these files.

        Arguments and errors are those of :meth:`open_save`.
        """
        if unique_id is not None:
            check_integer("unique_id", unique_id)
        else:
            used = [int(match[1]) for match in map(MANIFEST.fullmatch, names) if match]
            used += [save.unique_id for name in names for save in (marked_by(name), save_of(name)) if save is not None]
            unique_id = max(used, default=-1) + 1
        is_there = f"{unique_id}.manifest" in names
        # A store's listing may be out of date. No other process commits here now.
        if not overwrite and (is_there or (not self.backend.has_path and self.has_manifest(unique_id))):
            raise ValidationError(
                [
                    f"{self.path} has a checkpoint with id {unique_id}, which overwrite=False keeps. Remedy (FC405): "
                    "save under another id; or, to lose that checkpoint, overwrite=True replaces it as soon as the new "
                    "one is complete"
                ]
            )
        if is_there and not self.backend.replaces:
            raise ValidationError(
                f"{self.path} has a checkpoint with id {unique_id}, and its file system cannot replace a manifest "
                "at once. Remedy (FC405): save under a new id (unique_id=None takes the next one)"
            )
        if unique_id in lost_ids(names, by_token=True):
            text = lost_text(self.backend, [unique_id])
            logger.warning(f"{text}, before this save of the same id is complete. The one after it removes those files")
        return unique_id

    def mark_save(self, save: SaveNames, world_size: int = 1, nodes: int = 1) -> None:
        """Mark a save as begun, of so many ranks, to so many nodes' directories. The caller has the lock."""
        who = {"unique_id": save.unique_id, "token": save.token, "host": socket.gethostname(), "pid": os.getpid()}
        marker = json.dumps({**who, "world_size": world_size, "nodes": nodes})
        try:
            write_file(self.backend, save.marker_file, marker.encode())
            # Before any file of the save.
            self.companion.refuse_unfinished()
            self.backend.sync()
        except OSError:
            with contextlib.suppress(OSError, CheckpointError):
                self.cleaner.remove_save(save)
            raise

    def write_data(
        self,
        save: SaveNames,
        items: Catalog,
        data: Iterable[np.ndarray],
        *,
        world_size: int,
        step: int | None = None,
        meter: Meter = SILENT,
    ) -> Manifest:
        """Write a rank's data file and return its part; ``meter`` counts the bytes that are written."""
        info = SaveInfo(save.token, save.unique_id, world_size, step)
        part = write_data_file(self.backend, items, data, info, meter)
        meter.finish()
        return part

    def write_partition(self, save: SaveNames, number: int, count: int, rows: Manifest) -> Partition:
        """Write all rows of some keys as a partition of the manifest, durably; return its description.

        Any rank may do so. ``number`` is what :func:`partition_of` returns for every key.
        """
        from paddle_flexckpt.native.partition_files import describe_partition, encode_partition

        data, name = encode_partition(rows, number, count), save.partition_file(number)
        write_file(self.backend, name, data, "new")
        return describe_partition(name, data, rows)

    def write_partitions(self, save: SaveNames, manifest: Manifest) -> Manifest:
        """Write the rows of a manifest in partitions, if there are too many for one file; return the final manifest."""
        count = count_partitions(len(manifest.catalog))
        if not count:
            return replace(manifest, partitions=())
        from paddle_flexckpt.native.partition_files import split_rows

        written = [self.write_partition(save, number, count, rows) for number, rows in split_rows(manifest, count)]
        return replace(manifest, partitions=tuple(written))

    def commit(self, save: SaveNames, parts: Sequence[Manifest], *checks: Callable[[], object]) -> Manifest:
        """Merge the parts of all ranks, in their order, into the manifest and make the checkpoint exist.

        Raises:
            CheckpointError: A data file is missing, or the directory is another one by now: nothing has changed.
            CleanUpError: The checkpoint is complete, but leftovers could not be removed.
            NotDurableError: The checkpoint is in place; a loss of power may undo it.
            OSError: The file system refused, before the commit.
        """
        manifest = self.write_partitions(save, merge_parts(parts))
        self.commit_manifest(save, manifest, False, *checks)
        return manifest

    def commit_manifest(
        self, save: SaveNames, manifest: Manifest, is_checked: bool = False, *more: Callable[[], object]
    ) -> None:
        """Make the checkpoint exist, when every file but the manifest is durable; errors as of :meth:`commit`.

        The files are checked once more right before: they have to exist, with their sizes and this save's token. With
        ``is_checked`` all ranks together have done so (:meth:`check_untouched`), and one listing is enough here.
        """
        listed: list[list[str]] = []

        def look() -> None:
            listed.append(self.backend.names())

        def check() -> None:
            left = manifest
            if is_checked:
                look()
                here = set(listed[0])
                # A network's file system may list a new file too late, so an unlisted file is looked up.
                sizes = {name: size for name, size in manifest.sizes.items() if name not in here}
                partitions = [each for each in manifest.partitions if each.file not in here]
                left = Manifest.of_partitions(manifest.info, sizes, partitions)
            self.check_untouched(left)

        # On an object store a listing runs at the same time as the checks. A later one would show the same.
        lists_now = self.backend.at_once > 1
        checks = [check, look] if lists_now and not is_checked else [check]
        replaced = self.publish(save, manifest.encode(), *checks, *more)
        try:
            self.finish(save, replaced is None, manifest, listed[0] if lists_now else None)
        finally:
            if replaced is not None:
                replaced.release()

    def check_untouched(self, manifest: Manifest) -> None:
        """Check that files of a save that is not committed yet exist, with their sizes and this save's token.

        Raises:
            CheckpointError: A file does not: nothing can be committed.
        """
        try:
            self.check_complete(manifest)
        except CorruptCheckpointError as error:
            raise CheckpointError(
                f"nothing was committed, as somebody else has changed the files of this save: {without_remedy(error)}. "
                "Remedy (FC403): find out who removes files there, and save again"
            ) from error

    def publish(self, save: SaveNames, manifest: bytes, *checks: Callable[[], object]) -> Lock | None:
        """Put the manifest of a save in place: from then on the checkpoint exists.

        The ``checks`` are called right before; if one raises, the manifest is not put in place. Returns the lock of the
        manifest that it has replaced; None if that is being read. Errors are those of :meth:`commit`.
        """
        name = f"{save.unique_id}.manifest"
        replaced = self.backend.locks.claim(name)
        try:
            publish(self.backend, name, manifest, *checks)
        except BaseException as error:
            if replaced is not None:
                replaced.release()
            known = self._error_near_commit(save, error) if isinstance(error, OSError) else None
            if known is not None:
                raise known from error
            raise
        return replaced

    def _error_near_commit(self, save: SaveNames, error: OSError) -> CheckpointError | None:
        """Return the error to raise when storage has failed near a commit; None if the save is not committed."""
        # A request without an answer may still be on its way.
        from paddle_flexckpt.media.retrying import is_unanswered

        is_known = not is_unanswered(error)
        try:
            if self.is_committed(save):
                return self.not_durable(save, error)
        except OSError:
            is_known = False
        if is_known:
            return None
        return CheckpointError(
            f"it is not known what became of the save to {self.path} (id {save.unique_id}): {error}. Remedy (FC404): "
            "look whether the checkpoint is there when the storage answers again"
        )

    def not_durable(self, save: SaveNames, error: OSError) -> CheckpointError:
        """Return the error to raise when storage has refused to make a committed save durable."""
        where = f"the checkpoint in {self.path} (id {save.unique_id}) is"
        if not self.backend.has_path:  # in a store a visible object is durable
            return CheckpointError(f"{where} complete, but its storage says that it failed: {error}")
        return NotDurableError(
            f"{where} in place, but may be undone by a loss of power, as its storage has failed: {error}. "
            "Remedy (FC404): look into the storage, and save again"
        )

    def finish(
        self,
        save: SaveNames,
        being_read: bool = False,
        manifest: Manifest | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        """Update the companion after a commit; remove files that the save does not need, and its marker.

        A replaced checkpoint stays while it is being read. ``manifest`` is the one that this caller has committed, and
        ``names`` are those of the files that are here, if it knows them. The lock is released right after.

        Raises:
            CleanUpError: Something could not be written or removed.
        """
        try:
            # Durable before any file that it named is removed.
            self.companion.update(manifest)
            names = self.backend.names() if names is None else names
            manifest = manifest or self.read_committed(save.unique_id, ())
            self.cleaner.remove_replaced(save, manifest, names, being_read)
        except (OSError, CheckpointError) as error:
            raise CleanUpError(
                f"the checkpoint in {self.path} (id {save.unique_id}) is complete, but {self.companion.name} could not "
                f"be written, or files that it does not need not be removed: {error}. Remedy (FC404): the next save "
                "here tries again"
            ) from error

    def discard(self, save: SaveNames, ranks: Sequence[int] = (), partitions: int = 0) -> None:
        """Remove the files of a save that has failed, and its marker.

        None of the ``ranks`` that took part writes any more, nor any of so many ``partitions``. If the save may be
        committed nonetheless, nothing is removed.
        """
        # A file that cannot be removed does no harm, and must not hide why the save failed: the marker stays with it.
        with contextlib.suppress(OSError, CheckpointError):
            if not self.is_committed(save):
                self.backend.locks.forget_lost()
                written = [*map(save.data_file, ranks), *map(save.partition_file, range(partitions))]
                self.cleaner.remove_save(save, written)

    def discard_late(self, save: SaveNames, ranks: Sequence[int], was_never_committed: bool = False) -> None:
        """Remove the files that ranks have written for a save that ended without a commit, and whose marker is gone.

        No other process would look for these files. Those of a replaced checkpoint that may still be read stay for the
        next save of its id. The caller may know that the save ``was_never_committed``.
        """
        with contextlib.suppress(OSError, CheckpointError):
            if not self.sees(save) and (was_never_committed or not self._may_be_read(save)):
                self.discard(save, ranks)

    def _may_be_read(self, save: SaveNames) -> bool:
        """Return whether a save that is over may be a replaced checkpoint that is still being read."""
        if not self.has_manifest(save.unique_id):
            return False
        if not self.backend.locks.protect_readers(f"{save.unique_id}.manifest"):
            return False
        return number_of(self.read_committed(save.unique_id, ())) > save.save_id.number

    def manifest_bytes(self, unique_id: int) -> bytes | None:
        """Return a manifest's bytes, complete or not; None if there is none."""
        try:
            return self.backend.read(f"{unique_id}.manifest")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except CorruptCheckpointError:
            return b""  # some other object has its name

    def write_manifest(self, manifest: Manifest, replaced: bytes | None = None) -> None:
        """Put a manifest in place, instead of ``replaced`` (:meth:`manifest_bytes`); change no data file.

        Raises:
            CheckpointError: A save is being made here; or one has been made, or the checkpoint removed, meanwhile.
            OSError: The file system refused; what was there before is still there.
        """
        changed = CheckpointError(
            f"{self.manifest_file(manifest.unique_id)} is not what it was before: somebody has saved, repaired or "
            "removed this checkpoint meanwhile. Nothing was written. Remedy (FC403): look at what is there now"
        )
        try:
            lock = self.backend.locks.take()
        except FileNotFoundError:
            raise changed from None
        with lock:
            if self.manifest_bytes(manifest.unique_id) != replaced:
                raise changed
            self.check_untouched(manifest)
            publish(self.backend, f"{manifest.unique_id}.manifest", manifest.encode())
            self.companion.update(manifest)

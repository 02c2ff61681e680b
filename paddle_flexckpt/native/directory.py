"""A directory of checkpoints: names, ids, and the commit.

A checkpoint exists when its manifest does. The order of a save is: the right to save; a marker, which tells the files
of a dead save from others; data files, each made durable; parts; directory entries made durable; the manifest, which
appears whole or not at all; the file for Paddle's own loader; what has been replaced goes; the marker is removed. A
crash at any point leaves the manifests that were there, and the files that they name, as they were; the next save finds
the marker and cleans up. Paddle's file is there before the first data file, and names files that are there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict
from typing import TypeVar

import numpy as np

from paddle_flexckpt.catalog import Catalog, CheckpointError, CorruptCheckpointError, ValidationError
from paddle_flexckpt.foreign.formats import find_foreign, open_destination, open_source
from paddle_flexckpt.foreign.paddle_checkpoint import paddle_ids
from paddle_flexckpt.foreign.paddle_metadata import PADDLE_METADATA, encode_metadata, is_ours, refusal
from paddle_flexckpt.media.backend import FileLock, Location, SaveLock
from paddle_flexckpt.native.data_file import DataFileWriter, check_data_file
from paddle_flexckpt.native.manifest import Manifest, Origin, merge_parts
from paddle_flexckpt.native.not_found import explain_missing
from paddle_flexckpt.native.save_names import MANIFEST, OF_RANK, SaveNames, save_of

logger = logging.getLogger("paddle_flexckpt")
Self = TypeVar("Self", bound="CheckpointDirectory")

# The marker of a save: id, and generation (none: 0).
_MARKER = re.compile(r"(\d+)(?:\.(\d+))?\.saving", re.ASCII)
_TEMPORARY = re.compile(rf"(?:(\d+)\.manifest|{re.escape(PADDLE_METADATA)})\.[0-9a-f]{{32}}\.tmp", re.ASCII)


def _is_before(save: tuple[int, int] | None, unique_id: int, generation: int) -> bool:
    """Whether a save is of this id, and of an earlier generation."""
    return save is not None and save[0] == unique_id and save[1] < generation


class CheckpointDirectory:
    """One directory that holds checkpoints, told apart by their ids.

    Attributes:
        backend: Its files.
        path: What the caller calls it.
    """

    def __init__(self, location: Location) -> None:
        """Args: location: the directory, which need not exist; or a safetensors file or index of another program's."""
        self.backend, self._file = open_source(location)
        self.path = self.backend.where(self._file) if self._file else self.backend.path

    @classmethod
    def to_save_in(cls: type[Self], location: Location) -> Self:
        """Return a directory that is to be saved to, whether it exists or not.

        Raises:
            ValidationError: The location is a file's, by its name.
        """
        return cls(open_destination(location))

    def list_ids(self) -> list[int]:
        """Ids of the checkpoints that have a manifest, in rising order."""
        if self._file:
            return []
        return sorted(int(match[1]) for match in map(MANIFEST.fullmatch, self.backend.names()) if match)

    def lock(self) -> SaveLock:
        """The right to save here; makes the directory.

        Raises:
            CheckpointError: Another save has it.
            ValidationError: The path is not a directory.
        """
        self.backend.prepare()
        return self.backend.lock()

    def open_save(self, unique_id: int | None, world_size: int = 1) -> SaveNames:
        """Chooses the id and names of a new save and marks it as begun. The caller has the lock.

        Args:
            unique_id: The id to write; None takes the one after the highest that any file here has.
            world_size: Ranks that take part.

        Raises:
            ValidationError: The id is not a non-negative integer, or the path is not a directory.
        """
        ticket = SaveNames(*self.choose_save(unique_id), os.urandom(16).hex())
        self.mark_save(ticket, world_size)
        return ticket

    def choose_save(self, unique_id: int | None) -> tuple[int, int]:
        """Return the id and generation of a new save; arguments and errors as of :meth:`open_save`."""
        if unique_id is not None and (not isinstance(unique_id, int) or isinstance(unique_id, bool) or unique_id < 0):
            raise ValidationError([f"unique_id must be None or an integer >= 0; got {unique_id!r}"])
        self.backend.prepare()
        used: dict[int, int] = {}
        names = self.backend.names()
        for name in names:
            manifest, marker = MANIFEST.fullmatch(name), _MARKER.fullmatch(name)
            save = (int(marker[1]), int(marker[2] or 0)) if marker else save_of(name)
            if manifest:
                used.setdefault(int(manifest[1]), 0)
            elif save:
                used[save[0]] = max(used.get(save[0], 0), save[1])
        if unique_id is None:
            unique_id = max(used, default=-1) + 1
        if f"{unique_id}.manifest" in names and not self.backend.replaces:
            raise ValidationError(
                [
                    f"{self.path} has a checkpoint with id {unique_id}, and its file system cannot replace a manifest "
                    "at once. Remedy: save under a new id (unique_id=None takes the next one)"
                ]
            )
        return unique_id, used[unique_id] + 1 if unique_id in used else 0

    def mark_save(self, ticket: SaveNames, world_size: int = 1, nodes: int = 1) -> None:
        """Mark a save as begun. The caller has the lock.

        Args:
            ticket: The save.
            world_size: Ranks that take part.
            nodes: Directories that it goes to.
        """
        who = {**asdict(ticket), "host": socket.gethostname(), "pid": os.getpid(), "world_size": world_size}
        who["nodes"] = nodes
        try:
            self.backend.write(ticket.marker_file, json.dumps(who).encode())
            if self.backend.has_path and PADDLE_METADATA not in self.backend.names():
                self.backend.write(PADDLE_METADATA, refusal("no save here has been completed"))
            # Before any file that they speak of.
            self.backend.sync()
        except OSError:
            with contextlib.suppress(OSError):
                self._remove([], ticket.marker_file)
            raise

    def sees(self, ticket: SaveNames) -> bool:
        """Return whether this is the directory in which a save has been marked as begun."""
        try:
            return ticket.token.encode() in self.backend.read(ticket.marker_file)
        except FileNotFoundError:
            return False

    def remove_dead_saves(self, current: SaveNames | None = None, aborted: Collection[str] = ()) -> list[str]:
        """Removes what saves left behind that died: those whose marker is here. The caller has the lock.

        Files that no marker speaks of are left alone, whether a manifest names them or not: it may be the manifest
        that was lost. But a manifest that was not put in place, by a save or a repair, is of no use to anybody. What
        is prepared stays: another node may have published its part of that save.

        Args:
            current: The save that is being made.
            aborted: Tokens of prepared saves that no node has published.

        Returns:
            Names of the files removed.
        """
        names = self.backend.names()
        removed = sorted(filter(_TEMPORARY.fullmatch, names))
        for name in removed:
            self.backend.remove(name)
        for marker in self.markers():
            ticket = self.ticket_of(marker)
            if current is not None and marker == current.marker_file:
                continue
            if ticket is not None and ticket.token not in aborted and self.prepared(ticket):
                continue
            try:
                doomed = self._doomed(ticket, names) if ticket is not None else []
            except CorruptCheckpointError:
                continue  # whose files these are cannot be told
            if ticket is not None:
                self._remove_unfinished(ticket)
                if self.is_committed(ticket):
                    self.tell_paddle()  # it may have died before that
            self._remove(doomed, marker)
            removed += [*doomed, marker]
        return removed

    def markers(self) -> list[str]:
        """Return the names of the files that say that a save has begun."""
        return sorted(filter(_MARKER.fullmatch, self.backend.names()))

    def prepared(self, ticket: SaveNames) -> list[str]:
        """Files that say that a save is complete on this node, and on others perhaps published; none if it is here."""
        names = [name for name in self.backend.names() if ticket.owns(name) and name.endswith(".prepared")]
        return [] if not names or self.is_committed(ticket) else names

    def _remove_unfinished(self, ticket: SaveNames) -> None:
        try:
            self.backend.remove_unfinished(ticket.owns)
        except OSError as error:
            # Not every store lets everybody ask; nothing depends on it but its bill.
            logger.warning(f"what a dead save had begun to send could not be looked for: {error}")

    def files_of(self, manifest: Manifest) -> list[str]:
        """Names of the data files of a checkpoint: those that it names, and older ones that it has replaced."""
        named = list(manifest.catalog.files)
        newest = max((save[1] for save in map(save_of, named) if save), default=0)
        older = [name for name in self.backend.names() if _is_before(save_of(name), manifest.unique_id, newest)]
        return named + sorted(set(older) - set(named))

    def _remove(self, doomed: Sequence[str], marker: str) -> None:
        """Removes files of a save, and its marker once they are gone for good."""
        self.backend.each(self.backend.remove, doomed)
        if doomed:
            self.backend.sync()
        self._remove_refusal(marker)
        self.backend.remove(marker)

    def tell_paddle(self, only: Manifest | None = None) -> None:
        """Brings the file for Paddle's own loader up to date; it is durable before anything that it named is removed.

        Args:
            only: The manifest of the only checkpoint here, if the caller has it.

        Raises:
            OSError: The file system refused; what the file said before is there still, or what it says now.
        """
        if not self.backend.has_path:
            return
        ids = self.list_ids()
        if not ids:
            self._remove_refusal()
            return
        if len(ids) > 1:
            data = refusal("it takes the files of one id for those of another where a directory has several")
        else:
            try:
                manifest = only or self.read_native(ids[0])
                data = refusal("its files are on several nodes") if manifest.nodes else encode_metadata(manifest)
            except (CorruptCheckpointError, ValidationError):
                data = refusal("its manifest is damaged")
        self._write_whole(PADDLE_METADATA, data)
        self.backend.sync()

    def _remove_refusal(self, marker: str = "") -> None:
        """Remove the file for Paddle's own loader where it has nothing to protect, but for a save that ends now."""
        names = self.backend.names()
        if PADDLE_METADATA not in names:
            return
        others = (name for name in names if name != marker)
        if any(MANIFEST.fullmatch(name) or _MARKER.fullmatch(name) or save_of(name) for name in others):
            return
        if is_ours(self.backend.read(PADDLE_METADATA)):
            self.backend.remove(PADDLE_METADATA)

    def ticket_of(self, marker: str) -> SaveNames | None:
        """The save that a marker speaks of; None if it died before the marker was whole, so before any other file."""
        try:
            said = json.loads(self.backend.read(marker))
            ticket = SaveNames(int(said["unique_id"]), int(said["generation"]), str(said["token"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        return ticket if ticket.marker_file == marker else None

    def _doomed(self, ticket: SaveNames, names: Iterable[str], being_read: bool = False) -> list[str]:
        """Files that a finished or dead save leaves without a use; its marker is not among them.

        Args:
            ticket: The save.
            names: Of the files that there are.
            being_read: Whether what it has replaced is being read: then that is left to the next save of its id.

        Raises:
            CorruptCheckpointError: It was committed, and the manifest is damaged.
        """
        keep: set[str] = set()
        committed = self.is_committed(ticket)
        if committed:
            keep = set(self.read_native(ticket.unique_id).catalog.files)
        doomed = []
        for name in names:
            save, temporary = save_of(name), _TEMPORARY.fullmatch(name)
            unfinished = temporary is not None and temporary[1] in (None, str(ticket.unique_id))
            # What is older than a committed save of its id has been replaced by it.
            older = not being_read and _is_before(save, ticket.unique_id, ticket.generation)
            if unfinished or ((ticket.owns(name) or (committed and older)) and name not in keep):
                doomed.append(name)
        return doomed

    def write_share(
        self,
        ticket: SaveNames,
        rank: int,
        items: Catalog,
        data: Iterable[np.ndarray],
        *,
        world_size: int,
        step: int | None = None,
    ) -> None:
        """Writes a rank's data file and then its part.

        Args:
            ticket: The save.
            rank: The rank.
            items: Its rows of the write plan.
            data: Their bytes, as for :meth:`DataFileWriter.write`.
            world_size: Ranks that take part.
            step: Training step, if known.

        Raises:
            OSError: The file system refused.
        """
        self.write_part(ticket, rank, self.write_data(ticket, items, data, world_size=world_size, step=step))

    def write_data(
        self,
        ticket: SaveNames,
        items: Catalog,
        data: Iterable[np.ndarray],
        *,
        world_size: int,
        step: int | None = None,
    ) -> Manifest:
        """Write a rank's data file and return its part; arguments and errors as of :meth:`write_share`."""
        writer = DataFileWriter(
            self.backend,
            items,
            save_token=ticket.token,
            unique_id=ticket.unique_id,
            world_size=world_size,
            step=step,
        )
        return writer.write(data)

    def write_part(self, ticket: SaveNames, rank: int, part: Manifest) -> None:
        """Writes a rank's part; its data file is durable already. The part appears whole: it is looked for."""
        self._write_whole(ticket.part_file(rank), part.encode())

    def write_failure(self, ticket: SaveNames, rank: int, error: bytes) -> None:
        """Writes why a rank cannot write, for the others; it appears whole. It replaces what the rank said before."""
        self._write_whole(ticket.failure_file(rank), error)

    def _write_whole(self, name: str, data: bytes) -> None:
        with self.backend.create(name, replace=True) as file:
            file.write(data)

    def progress(self, ticket: SaveNames, ranks: Sequence[int]) -> tuple[set[int], dict[int, bytes]]:
        """The ranks whose parts are here, and what those say that failed."""
        names = set(self.backend.names())
        written = {rank for rank in ranks if ticket.part_file(rank) in names}
        failed = {rank: ticket.failure_file(rank) for rank in ranks if ticket.failure_file(rank) in names}
        return written, {rank: self.backend.read(name) for rank, name in failed.items()}

    def commit(self, ticket: SaveNames, ranks: Sequence[int]) -> Manifest:
        """Merges the parts of all ranks into the manifest and makes the checkpoint exist.

        The data files are looked at once more right before: they have to be there, of their size and of this save.

        Raises:
            CheckpointError: A part or a data file is not there, or the directory is another one by now: nothing has
                changed. Or the checkpoint is complete, but leftovers could not be removed.
            OSError: The file system refused; :meth:`is_committed` tells whether that was before or after the commit.
        """

        def part(rank: int) -> Manifest:
            name = ticket.part_file(rank)
            try:
                return Manifest.decode(self.backend.read(name), self.backend.where(name))
            except FileNotFoundError as error:
                raise CheckpointError(
                    f"the part of rank {rank} is not visible at {self.backend.where(name)}. Remedy: save to storage "
                    "that all ranks share"
                ) from error

        manifest = merge_parts(self.backend.each(part, ranks))

        def check() -> None:
            try:
                self.check_complete(manifest)
            except CorruptCheckpointError as error:
                what = str(error).partition(" Remedy:")[0]
                raise CheckpointError(
                    f"nothing was committed, as somebody else has changed the files of this save: {what} Remedy: find "
                    "out who removes files there, and save again"
                ) from error

        replaced = self.publish(ticket, manifest.encode(), check)
        try:
            self.finish(ticket, replaced is None, manifest)
        finally:
            if replaced is not None:
                replaced.release()
        return manifest

    def publish(self, ticket: SaveNames, manifest: bytes, check: Callable[[], None] = lambda: None) -> FileLock | None:
        """Puts the manifest of a save in place: from then on the checkpoint exists.

        Args:
            ticket: The save.
            manifest: Its manifest.
            check: Called right before; what it raises keeps the manifest from its place.

        Returns:
            The lock of the manifest that it has replaced; None if that is being read.
        """
        name = f"{ticket.unique_id}.manifest"
        replaced = self.backend.claim(name)
        try:
            self.backend.publish(name, manifest, check)
        except BaseException:
            if replaced is not None:
                replaced.release()
            raise
        return replaced

    def finish(self, ticket: SaveNames, being_read: bool = False, manifest: Manifest | None = None) -> None:
        """Tells Paddle's own loader of a published save; removes what the save does not need, and its marker.

        Args:
            ticket: The save.
            being_read: Whether what it has replaced is being read, and so stays.
            manifest: What was published, if the caller has it.

        Raises:
            CheckpointError: Something could not be written or removed.
        """
        try:
            self.tell_paddle(manifest)
            doomed = self._doomed(ticket, self.backend.names(), being_read)
            self._remove(doomed, ticket.marker_file)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint in {self.path} (id {ticket.unique_id}) is complete, but {PADDLE_METADATA} could not "
                f"be written, or files that it does not need not be removed: {error}. Remedy: the next save here tries "
                "again"
            ) from error

    def write_manifest(self, manifest: Manifest) -> None:
        """Puts a manifest in place, instead of the one that is there if there is one; touches nothing else.

        Raises:
            CheckpointError: A save is being made here.
            OSError: The file system refused; what was there before is still there.
        """
        lock = self.lock()
        try:
            self.backend.publish(f"{manifest.unique_id}.manifest", manifest.encode())
            self.tell_paddle(manifest)
        finally:
            lock.release()

    def manifest_file(self, unique_id: int) -> str:
        """Path of a checkpoint's manifest, whether it is there or not."""
        return self.backend.where(f"{unique_id}.manifest")

    def data_files(self, unique_id: int) -> list[tuple[int, str]]:
        """Rank and name of all data files of an id, of every generation, in the order of ranks."""
        found = [
            (int(match[1]), int(match[3] or 0), match[0]) for match in self._data_files() if int(match[2]) == unique_id
        ]
        return [(rank, name) for rank, _, name in sorted(found)]

    def data_ids(self) -> set[int]:
        """Ids that data files have, committed or not."""
        return {int(match[2]) for match in self._data_files()}

    def _data_files(self) -> list[re.Match[str]]:
        matches = map(OF_RANK.fullmatch, self.backend.names())
        return [match for match in matches if match and match[4] == "safetensors"]

    def is_committed(self, ticket: SaveNames) -> bool:
        """Whether the manifest in place is that of this save."""
        try:
            return ticket.token.encode() in self.backend.read(f"{ticket.unique_id}.manifest")
        except FileNotFoundError:
            return False

    def discard(self, ticket: SaveNames, rank: int) -> None:
        """Remove what a rank wrote in a save that cannot be committed any more; the caller knows that.

        The marker goes with the last file of the save.
        """
        # What cannot be removed does no harm, and must not hide why the save failed: the marker stays with it.
        with contextlib.suppress(OSError):
            if self.is_committed(ticket):
                return
            for name in (ticket.prepared_file(rank), ticket.data_file(rank), ticket.part_file(rank)):
                self.backend.remove(name)
            if not any(map(ticket.owns, self.backend.names())):
                self._remove_unfinished(ticket)
                self._remove_refusal(ticket.marker_file)
                self.backend.remove(ticket.marker_file)

    def read_manifest(self, unique_id: int | None = None) -> Manifest:
        """Reads the manifest of a checkpoint, or makes one of what another program has written.

        Args:
            unique_id: Its id; None takes the highest.

        Raises:
            ValidationError: There is no such checkpoint; the text says what is there instead.
            CorruptCheckpointError: The manifest is damaged, or a file that it names is missing or of another size.
        """
        ids = self.list_ids()
        if not ids or (unique_id is not None and unique_id not in ids):
            # With a manifest there, only ids of Paddle's can be meant that it does not have.
            foreign = find_foreign(self.backend, self._file) if not ids or paddle_ids(self.backend) else None
            if foreign is not None and (unique_id is None or foreign.origin != "paddle" or unique_id in foreign.ids):
                return foreign.read(self.backend, unique_id)
            raise ValidationError([explain_missing(self.backend, ids, unique_id)])
        return self.read_native(ids[-1] if unique_id is None else unique_id)

    def origin(self) -> Origin:
        """Whose checkpoint is here.

        Raises:
            ValidationError: There is none, or there are several; the text says what is there instead.
            CorruptCheckpointError: Safetensors files, whose headers tell whose they are, are damaged.
        """
        if self.list_ids():
            return "native"
        foreign = find_foreign(self.backend, self._file)
        if foreign is None:
            raise ValidationError([explain_missing(self.backend, [], None)])
        return foreign.origin

    def read_native(self, unique_id: int) -> Manifest:
        """Reads the manifest of a checkpoint of this library's own; FileNotFoundError if there is none of this id."""
        name = f"{unique_id}.manifest"
        file = self.backend.where(name)
        manifest = Manifest.decode(self.backend.read(name), file)
        if manifest.unique_id != unique_id:
            raise CorruptCheckpointError(f"{file} is the manifest of id {manifest.unique_id}: it has been renamed")
        return manifest

    def save_token(self, unique_id: int) -> str | None:
        """The save token of the manifest that is in place; None if there is none, or none that can be read."""
        try:
            return self.read_native(unique_id).save_token
        except (OSError, CorruptCheckpointError, ValidationError):
            return None

    def check_complete(self, manifest: Manifest) -> None:
        """Checks that all data files of a checkpoint are there, of their size and of the same save.

        Raises:
            CorruptCheckpointError: One is not.
        """
        sizes = dict(zip(manifest.catalog.files, manifest.file_bytes.tolist()))
        self.backend.each(lambda name: check_data_file(self.backend, manifest, name, sizes[name]).close(), sizes)

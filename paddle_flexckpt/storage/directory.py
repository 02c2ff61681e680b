"""A directory of checkpoints: names, ids, and the commit.

A checkpoint exists when its manifest does. The order of a save is: data files, each made durable; parts; directory
entries made durable; manifest written under a temporary name, made durable, and renamed. A crash at any point leaves
the manifests that were there, and the files that they name, as they were.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError, ValidationError
from paddle_flexckpt.storage.data_file import write_all
from paddle_flexckpt.storage.file_names import open_inside
from paddle_flexckpt.storage.manifest import Manifest, merge_parts
from paddle_flexckpt.storage.paddle_checkpoint import paddle_ids, read_paddle_manifest

_MANIFEST = re.compile(r"(\d+)\.manifest")
_DATA = re.compile(r"\d+_(\d+)(?:\.(\d+))?\.safetensors")
_PART = re.compile(r"\d+_(\d+)(?:\.(\d+))?\.part")
_TEMPORARY = re.compile(r"(\d+)\.manifest\.[0-9a-f]+\.tmp")


def data_file_name(rank: int, unique_id: int, generation: int) -> str:
    """``{rank}_{id}.safetensors``; a save that replaces an id gets a generation, as the old files still serve."""
    return f"{rank}_{unique_id}{_suffix(generation)}.safetensors"


def _suffix(generation: int) -> str:
    return f".{generation}" if generation else ""


@dataclass(frozen=True)
class SaveTicket:
    """What one save calls its files.

    Attributes:
        unique_id: The checkpoint's id.
        generation: 0, or a number that no file of this id has yet.
        token: Random text that marks this save's files.
    """

    unique_id: int
    generation: int
    token: str

    def data_file(self, rank: int) -> str:
        """Name of a rank's data file."""
        return data_file_name(rank, self.unique_id, self.generation)

    def part_file(self, rank: int) -> str:
        """Name of a rank's part."""
        return f"{rank}_{self.unique_id}{_suffix(self.generation)}.part"

    @property
    def temporary(self) -> str:
        """Name of the manifest before it is committed."""
        return f"{self.unique_id}.manifest.{self.token}.tmp"


class CheckpointDirectory:
    """One directory that holds checkpoints, told apart by their ids."""

    def __init__(self, path: str) -> None:
        """Args: path: the directory; it need not exist."""
        self.path = os.fspath(path)

    def list_ids(self) -> list[int]:
        """Ids of the complete checkpoints, in rising order."""
        return sorted(int(match[1]) for match in map(_MANIFEST.fullmatch, self._names()) if match)

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def open_save(self, unique_id: int | None) -> SaveTicket:
        """Chooses the id and names of a new save and makes the directory.

        Args:
            unique_id: The id to write; None takes the one after the highest that any file here has.

        Raises:
            ValidationError: The id is not a non-negative integer, or the path is not a directory.
        """
        if unique_id is not None and (not isinstance(unique_id, int) or isinstance(unique_id, bool) or unique_id < 0):
            raise ValidationError([f"unique_id must be None or an integer >= 0; got {unique_id!r}"])
        try:
            os.makedirs(self.path, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ValidationError([f"{self.path} is not a directory, so no checkpoint can be saved there"]) from error
        used: dict[int, int] = {}
        for name in self._names():
            manifest, data = _MANIFEST.fullmatch(name), _DATA.fullmatch(name) or _PART.fullmatch(name)
            if manifest:
                used.setdefault(int(manifest[1]), 0)
            elif data:
                used[int(data[1])] = max(used.get(int(data[1]), 0), int(data[2] or 0))
        if unique_id is None:
            unique_id = max(used, default=-1) + 1
        generation = used[unique_id] + 1 if unique_id in used else 0
        return SaveTicket(unique_id, generation, os.urandom(16).hex())

    def write_part(self, ticket: SaveTicket, rank: int, part: Manifest) -> None:
        """Writes a rank's part; its data file is durable already."""
        self._write_durably(ticket.part_file(rank), part.encode())

    def commit(self, ticket: SaveTicket, ranks: Sequence[int]) -> Manifest:
        """Merges the parts of all ranks into the manifest and makes the checkpoint exist.

        Raises:
            CheckpointError: A part is not there.
            OSError: The file system refused; :meth:`is_committed` tells whether that was before or after the rename.
        """
        parts = []
        for rank in ranks:
            file = os.path.join(self.path, ticket.part_file(rank))
            try:
                with open(file, "rb") as stream:
                    parts.append(Manifest.decode(stream.read(), file))
            except FileNotFoundError as error:
                raise CheckpointError(
                    f"the part of rank {rank} is not visible at {file}. Remedy: save to storage that all ranks share"
                ) from error
        manifest = merge_parts(parts)
        self.sync()
        self._publish(manifest, ticket.temporary)
        self._remove_superseded(ticket, manifest)
        return manifest

    def _publish(self, manifest: Manifest, temporary: str) -> None:
        """Writes a manifest under a temporary name and gives it its own; durable at each step."""
        self._write_durably(temporary, manifest.encode())
        os.rename(os.path.join(self.path, temporary), self.manifest_file(manifest.unique_id))
        self.sync()

    def write_manifest(self, manifest: Manifest) -> None:
        """Puts a manifest in place, instead of the one that is there if there is one; touches nothing else.

        Raises:
            OSError: The file system refused; what was there before the rename is still there.
        """
        self.sync()
        temporary = f"{manifest.unique_id}.manifest.{os.urandom(16).hex()}.tmp"
        try:
            self._publish(manifest, temporary)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self.path, temporary))
            raise

    def manifest_file(self, unique_id: int) -> str:
        """Path of a checkpoint's manifest, whether it is there or not."""
        return os.path.join(self.path, f"{unique_id}.manifest")

    def data_files(self, unique_id: int) -> list[tuple[int, str]]:
        """Rank and name of all data files of an id, of every generation, in the order of ranks."""
        found = [
            (int(match[0].partition("_")[0]), int(match[2] or 0), match[0])
            for match in map(_DATA.fullmatch, self._names())
            if match and int(match[1]) == unique_id
        ]
        return [(rank, name) for rank, _, name in sorted(found)]

    def data_ids(self) -> set[int]:
        """Ids that data files have, committed or not."""
        return {int(match[1]) for match in map(_DATA.fullmatch, self._names()) if match}

    def _remove_superseded(self, ticket: SaveTicket, manifest: Manifest) -> None:
        """Removes this save's parts and what earlier saves of the same id left behind."""
        keep = set(manifest.catalog.files)
        for name in self._names():
            match = _DATA.fullmatch(name) or _PART.fullmatch(name) or _TEMPORARY.fullmatch(name)
            if match and int(match[1]) == ticket.unique_id and name not in keep:
                os.unlink(os.path.join(self.path, name))

    def is_committed(self, ticket: SaveTicket) -> bool:
        """Whether the manifest in place is that of this save."""
        try:
            with open(os.path.join(self.path, f"{ticket.unique_id}.manifest"), "rb") as stream:
                return ticket.token.encode() in stream.read()
        except FileNotFoundError:
            return False

    def discard(self, ticket: SaveTicket, rank: int) -> None:
        """Removes what a rank wrote in a save that failed; does nothing if the save was committed before it failed."""
        if self.is_committed(ticket):
            return
        for name in (ticket.data_file(rank), ticket.part_file(rank), ticket.temporary):
            # What cannot be removed does no harm, and must not hide why the save failed.
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self.path, name))

    def sync(self) -> None:
        """Makes the directory's entries durable."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _write_durably(self, name: str, data: bytes) -> None:
        descriptor = os.open(os.path.join(self.path, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            write_all(descriptor, memoryview(data))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def read_manifest(self, unique_id: int | None = None) -> Manifest:
        """Reads the manifest of a checkpoint, or makes one of the metadata of a checkpoint of Paddle's own.

        Args:
            unique_id: Its id; None takes the highest.

        Raises:
            ValidationError: There is no such checkpoint; the text says what is there instead.
            CorruptCheckpointError: The manifest is damaged, or a file that it names is missing or of another size.
        """
        ids = self.list_ids()
        if not ids or (unique_id is not None and unique_id not in ids):
            foreign = paddle_ids(self.path)
            if foreign and (unique_id is None or unique_id in foreign):
                return read_paddle_manifest(self.path, unique_id)
            raise ValidationError([self._what_is_wrong(ids, unique_id)])
        chosen = ids[-1] if unique_id is None else unique_id
        file = os.path.join(self.path, f"{chosen}.manifest")
        with os.fdopen(open_inside(self.path, f"{chosen}.manifest"), "rb") as stream:
            manifest = Manifest.decode(stream.read(), file)
        if manifest.unique_id != chosen:
            raise CorruptCheckpointError(f"{file} is the manifest of id {manifest.unique_id}: it has been renamed")
        return manifest

    def _what_is_wrong(self, ids: list[int], unique_id: int | None) -> str:
        if not os.path.exists(self.path):
            return f"{self.path} does not exist. Remedy: correct the path"
        if not os.path.isdir(self.path):
            return f"{self.path} is not a directory. Remedy: give the checkpoint's directory, not a file in it"
        names = self._names()
        begun = sorted({int(m[1]) for m in (_DATA.fullmatch(n) or _PART.fullmatch(n) for n in names) if m} - set(ids))
        wanted = begun if unique_id is None else [unique_id] if unique_id in begun else []
        if wanted:
            return (
                f"{self.path} has an unfinished save (id {', '.join(map(str, wanted))}): its manifest is missing, so "
                f"it was never committed; complete ids here: {ids or 'none'}. Remedy: load another checkpoint"
            )
        if ids:
            return f"{self.path} has no checkpoint with id {unique_id}; complete ids here: {ids}"
        if any(name.endswith(".metadata") for name in names):
            return (
                f"{self.path} is no checkpoint of Paddle's own save_state_dict that can be read: its .metadata files "
                f"have the ids {paddle_ids(self.path) or 'none'}. Remedy: give the path and id of a complete save"
            )
        return f"{self.path} is not a checkpoint: there is no *.manifest file in it. Remedy: correct the path"

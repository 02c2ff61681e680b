"""Companion files, which describe a directory of checkpoints to another program's loader: their makers' base class.

Tested in tests/saving/test_paddle_reads.py.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.media.backend import write_file
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.save_names import MANIFEST, is_message, marked_by, save_of


class Companion(ABC):
    """A companion file: it stands beside the manifests and describes the directory to another program's loader.

    Attributes:
        name: Its name.
        most_rows: The most shards that it supports: one process needs the rows of all of them, and seconds of time.
    """

    name: str
    most_rows: int

    @abstractmethod
    def refuse(self, reason: str) -> bytes:
        """Return a file that stops that loader with an error that says why."""

    @abstractmethod
    def encode(self, manifest: Manifest) -> bytes:
        """Return the file for the only checkpoint of a directory."""

    @abstractmethod
    def stored(self, data: bytes, file: str) -> dict[str, set[str]]:
        """Return the keys by data file in a file of that name, whose path is for errors.

        Raises:
            CorruptCheckpointError: It is damaged, or refuses.
        """

    @abstractmethod
    def is_ours(self, data: bytes) -> bool:
        """Return whether a file of that name was written by this library, if only in part."""


class CompanionFile:
    """The companion of one directory of checkpoints, kept up to date.

    Attributes:
        name: Its name.
    """

    def __init__(self, directory: CheckpointDirectory, companion: Companion) -> None:
        """Take the directory, which need not exist, and the maker of the file's content."""
        self.name = companion.name
        self._directory, self._backend, self._companion = directory, directory.backend, companion

    def update(self, only: Manifest | None = None) -> None:
        """Bring the file up to date, durably; ``only`` is the manifest of the only checkpoint, if known."""
        if not self._backend.has_path:
            return
        ids = self._directory.list_ids()
        if not ids:
            self.remove_refusal()
            return
        refuse = self._companion.refuse
        if len(ids) > 1:
            data = refuse("it takes the files of one id for those of another where a directory has several")
        else:
            try:
                data = self._encode(only or self._directory.read_committed(ids[0], ()))
            except (CorruptCheckpointError, ValidationError):
                data = refuse("its manifest is damaged")
        write_file(self._backend, self.name, data, "replace")
        self._backend.sync()

    def read(self) -> dict[str, set[str]]:
        """Return the keys by data file in the file; none if it does not exist, refuses or is damaged."""
        if not self._backend.has_path:
            return {}
        try:
            return self._companion.stored(self._backend.read(self.name), self._backend.where(self.name))
        except (FileNotFoundError, CorruptCheckpointError):
            return {}

    def _encode(self, manifest: Manifest) -> bytes:
        """Return the content for the only checkpoint, whose rows need not have been read."""
        companion = self._companion
        if manifest.partial:
            return companion.refuse("it is partial: a repair has rebuilt it without some of its files")
        if manifest.nodes:
            return companion.refuse("its files are on several nodes")
        if manifest.rows > companion.most_rows:
            return companion.refuse(f"it has more than {companion.most_rows} shards")
        return companion.encode(manifest if manifest.has_rows else self._directory.read_committed(manifest.unique_id))

    def refuse_unfinished(self) -> None:
        """Keep the other program's loader from files that no manifest names, if there is no such file yet."""
        if self._backend.has_path and self.name not in self._backend.names():
            with contextlib.suppress(FileExistsError):  # another process has just done more
                refusal = self._companion.refuse("no save here has been completed")
                write_file(self._backend, self.name, refusal, "new")

    def remove_refusal(self, marker: str = "") -> None:
        """Remove the file if it protects nothing but a save that ends now. The caller has the lock."""
        if not self._backend.has_path:
            return
        names = self._backend.names()
        if self.name not in names:
            return
        others = (name for name in names if name != marker)
        if any(MANIFEST.fullmatch(name) or marked_by(name) or save_of(name) or is_message(name) for name in others):
            return
        if self._companion.is_ours(self._backend.read(self.name)):
            self._backend.remove(self.name)

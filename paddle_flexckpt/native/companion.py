"""Tell another program's loader what a directory of checkpoints has: whoever makes such a file derives from this.

Tested in tests/live/test_paddle_reads.py.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.media.backend import Location, write_file
from paddle_flexckpt.native.directory import MANIFEST, MARKER, CheckpointDirectory, save_of
from paddle_flexckpt.native.manifest import Manifest


class Companion(ABC):
    """Make the file beside the manifests, of a name of its own, that tells another program's loader what is here.

    Attributes:
        name: Its name.
        most_rows: It refuses checkpoints of more shards: one process would need all of their rows, and seconds.
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
        """Return the keys by data file that a file of that name tells of, whose path is for errors.

        Raises:
            CorruptCheckpointError: It is damaged, or refuses.
        """

    @abstractmethod
    def is_ours(self, data: bytes) -> bool:
        """Return whether a file of that name has been written here, if only in part."""


class CompanionDirectory(CheckpointDirectory):
    """Keep the companion of one directory of checkpoints up to date.

    Attributes:
        companion: Makes the file for another program's loader.
    """

    def __init__(self, location: Location, companion: Companion) -> None:
        """Open nothing yet: the directory need not exist."""
        super().__init__(location)
        self.companion = companion

    def update_companion(self, only: Manifest | None = None) -> None:
        """Bring the companion up to date, durably; ``only`` is the manifest of the only checkpoint, if known."""
        if not self.backend.has_path:
            return
        ids = self.list_ids()
        if not ids:
            self.remove_refusal()
            return
        refuse = self.companion.refuse
        if len(ids) > 1:
            data = refuse("it takes the files of one id for those of another where a directory has several")
        else:
            try:
                data = self._companion_of(only or self.read_committed(ids[0], ()))
            except (CorruptCheckpointError, ValidationError):
                data = refuse("its manifest is damaged")
        write_file(self.backend, self.companion.name, data, "replace")
        self.backend.sync()

    def read_companion(self) -> dict[str, set[str]]:
        """Return the keys by data file that the companion tells of; none if it is not there, refuses or is damaged."""
        own = self.companion
        if not self.backend.has_path:
            return {}
        try:
            return own.stored(self.backend.read(own.name), self.backend.where(own.name))
        except (FileNotFoundError, CorruptCheckpointError):
            return {}

    def _companion_of(self, manifest: Manifest) -> bytes:
        """Return the companion of the only checkpoint, whose rows need not have been read."""
        if manifest.partial:
            return self.companion.refuse("it is partial: a repair has rebuilt it without some of its files")
        if manifest.nodes:
            return self.companion.refuse("its files are on several nodes")
        if manifest.rows > self.companion.most_rows:
            return self.companion.refuse(f"it has more than {self.companion.most_rows} shards")
        return self.companion.encode(manifest if manifest.has_rows else self.read_committed(manifest.unique_id))

    def refuse_unfinished(self) -> None:
        """Keep the other program's loader from files that no manifest names, if there is no companion yet."""
        own = self.companion
        if self.backend.has_path and own.name not in self.backend.names():
            with contextlib.suppress(FileExistsError):  # somebody has just done more
                write_file(self.backend, own.name, own.refuse("no save here has been completed"), "new")

    def remove_refusal(self, marker: str = "") -> None:
        """Remove the companion where it has nothing to protect but a save that ends now. The caller has the lock."""
        if not self.backend.has_path:
            return
        names, own = self.backend.names(), self.companion
        if own.name not in names:
            return
        others = (name for name in names if name != marker)
        if any(MANIFEST.fullmatch(name) or MARKER.fullmatch(name) or save_of(name) for name in others):
            return
        if own.is_ours(self.backend.read(own.name)):
            self.backend.remove(own.name)

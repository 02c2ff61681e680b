"""Reading locks: a checkpoint that is being read is not removed, nor are files that it needs when it is replaced.

A reader shares the lock of the manifest for the time of its reading. Who removes the checkpoint claims that lock first,
and who replaces it claims the old manifest's before the new one takes its place.
"""

from __future__ import annotations

from types import TracebackType

from paddle_flexckpt.catalog import CorruptCheckpointError
from paddle_flexckpt.media.backend import FileLock
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.native.manifest import Manifest


class LockedManifest:
    """A manifest, and the lock that keeps its checkpoint; leaving its context releases the lock.

    Attributes:
        manifest: As :meth:`CheckpointDirectory.read_manifest` gives it.
    """

    def __init__(self, directory: CheckpointDirectory, unique_id: int | None = None) -> None:
        """Takes the lock, then reads.

        Args:
            directory: Where it is.
            unique_id: Its id; None takes the highest.

        Raises:
            ValidationError: There is no such checkpoint.
            CorruptCheckpointError: The manifest is damaged.
        """
        before: list[int] | None = None
        while True:
            ids = directory.list_ids()
            chosen = ids[-1] if ids and unique_id is None else unique_id
            try:
                if chosen is None or chosen not in ids:
                    # Another program's checkpoint, or none.
                    self._lock, self.manifest = FileLock(), directory.read_manifest(unique_id)
                else:
                    self._lock, self.manifest = _hold(directory, chosen)
                return
            except FileNotFoundError as error:
                # It has just been removed, and perhaps saved again: another one may be the highest now.
                if before == ids:
                    file = directory.path if chosen is None else directory.manifest_file(chosen)
                    raise CorruptCheckpointError(
                        f"{file} is listed in its directory, and is not there: a link that "
                        "leads nowhere, or a directory that somebody keeps changing. Remedy: remove it, or try again"
                    ) from error
                before = ids

    def __enter__(self) -> Manifest:
        return self.manifest

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()


def _hold(directory: CheckpointDirectory, unique_id: int) -> tuple[FileLock, Manifest]:
    lock = directory.backend.hold(f"{unique_id}.manifest")
    try:
        return lock, directory.read_native(unique_id)
    except BaseException:
        lock.release()
        raise

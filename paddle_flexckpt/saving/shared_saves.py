"""Saves to a directory that all ranks share.

Tested in tests/distributed/test_save_load.py and tests/background/test_ranks.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from paddle_flexckpt.catalog import LostRankError, ValidationError
from paddle_flexckpt.media.backend import SaveLock
from paddle_flexckpt.native.group_save import GroupSave
from paddle_flexckpt.native.save_directory import SaveDirectory
from paddle_flexckpt.native.save_names import SaveNames
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.saving.save_options import SaveOptions
from paddle_flexckpt.saving.save_plan import Share, WriteMessages

if TYPE_CHECKING:
    from paddle_flexckpt.saving.partition_writers import PartitionWriter


class SharedSave:
    """One save to a directory that all ranks share. The coordinator commits it.

    Attributes:
        directory: The directory.
        names: The names of the save's files: the coordinator has them from :meth:`begin` on, all from :meth:`agree` on.
        lock: The coordinator's right to save here.
    """

    names: SaveNames

    def __init__(self, comm: Communicator, directory: SaveDirectory, options: SaveOptions, context: str) -> None:
        """Take the ranks, their directory, the options, and errors' context."""
        self.directory = directory
        self.lock: SaveLock | None = None
        self._comm, self._options, self._context = comm, options, context
        self._coordinator_rank = options.coordinator_rank
        # The files that the coordinator found here when it had the lock.
        self._before: list[str] = []
        self._is_committing = False
        self._partitions: PartitionWriter | None = None

    @property
    def is_coordinator(self) -> bool:
        """Return whether this rank commits."""
        return self._comm.position == self._coordinator_rank

    def begin(self) -> tuple[SaveNames | None, bytes]:
        """Lock the directory and mark the save as begun, on the coordinator; return its names there.

        The second result is this rank's message to the others.
        """
        if not self.is_coordinator:
            return None, b""
        self.lock, self._before, self.names = self.directory.begin_save(
            self._options.unique_id, self._comm.size, self._options.overwrite
        )
        return self.names, b""

    def agree(self, names: SaveNames, places: Sequence[bytes], messages: Sequence[bytes]) -> None:
        """Take what the ranks sent: the names of the save, their directories, and the results of :meth:`begin`.

        One collective if the directories are not known to be the same, so that each rank looks for the marker.

        Raises:
            ValidationError: A rank sees another directory.
        """
        if len(set(places)) > 1:
            self._comm.together(lambda: self._check_visible(names), "cannot save, and nothing was written")
        self.names = names

    def _check_visible(self, names: SaveNames) -> tuple[None, bytes]:
        if not self.directory.sees(names):
            marker = self.directory.backend.where(names.marker_file)
            raise ValidationError(
                f"{marker} is not there, with which the coordinator has begun the save: ranks do not share one "
                "directory. Remedy (FC504): give all ranks the same path of storage that they share; or save with "
                "storage='per_node', to a directory on each node"
            )
        return None, b""

    def write(self, share: Share, hashed: np.ndarray) -> WriteMessages:
        """Write this rank's data file.

        Returns block checksums at least of the items ``hashed``, bool ``[n]``; and messages to others: the rows, to
        those who write partitions, or the part, to the coordinator.
        """
        save = self._save = GroupSave(self._comm, self.directory, self.names, self._coordinator_rank)
        with share.data() as data:
            part = save.write(share.items, data, before=self._before, **share.write_arguments())
        if not share.partitions:
            return WriteMessages(b"", part.checksums, save.send(part))
        from paddle_flexckpt.saving.partition_writers import PartitionWriter

        self._partitions = PartitionWriter(self._comm, self.directory, self.names, share.partitions)
        payload, rows = self._partitions.send(part)
        return WriteMessages(payload, part.checksums, rows)

    def write_partitions(self, payloads: Sequence[bytes], received: Mapping[int, bytes]) -> dict[int, bytes]:
        """Write this rank's partitions, if ranks write them; return its message to the coordinator, by position.

        Args:
            payloads: The message of each rank's :meth:`write` to all.
            received: The messages of others' :meth:`write` to this one alone, by position.
        """
        if self._partitions is None:
            return {}
        return {self._coordinator_rank: self._partitions.write(payloads, received)}

    def commit(self, parts: Sequence[bytes], received: Mapping[int, bytes], described: Mapping[int, bytes]) -> None:
        """Make the checkpoint exist. One collective.

        Args:
            parts: The message of each rank's :meth:`write` to all.
            received: The messages of others' :meth:`write` to this rank alone.
            described: The message of each rank's :meth:`write_partitions` to the coordinator.

        Raises:
            CheckpointError: The coordinator could not commit.
        """
        # Only the coordinator knows whether it has committed.
        self._is_committing = True
        if self._partitions is None:
            self._save.commit(received, self._context)
        else:
            self._comm.lead(self._coordinator_rank, lambda: self._commit_partitions(described), self._context)

    def _commit_partitions(self, described: Mapping[int, bytes]) -> None:
        if self._partitions is not None:
            manifest = self._partitions.manifest([*described.values()])
            self.directory.commit_manifest(self.names, manifest, is_checked=True)

    def discard(self) -> None:
        """Remove what all ranks wrote, unless the save may exist. The coordinator, which has the lock, does this.

        If the commit failed because another save has the right to save by now, the marker is gone, and each rank has to
        remove its own files.
        """
        if self._is_committing:
            self.directory.discard_late(self.names, [self._comm.rank])
        elif self.is_coordinator and self.lock is not None:
            count = self._partitions.count if self._partitions else 0
            self.directory.discard(self.names, self._comm.ranks, count)

    def lose_rank(self, error: LostRankError) -> None:
        """Keep the files, as other ranks may still commit.

        If the save is over and was not committed, remove this rank's own files.
        """
        self.directory.discard_late(self.names, [self._comm.rank])

    def release(self) -> None:
        """Release the right to save here."""
        if self.lock is not None:
            self.lock.release()

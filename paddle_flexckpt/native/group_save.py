"""Write one save to a directory that a group of processes shares, and commit it: ranks, or their background writers.

Tested in tests/distributed/test_save_load.py and tests/background/test_ranks.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from paddle_flexckpt.catalog import Catalog, CheckpointError, NotDurableError
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.save_directory import CleanUpError, SaveDirectory
from paddle_flexckpt.native.save_names import SaveNames
from paddle_flexckpt.progress import SILENT, Meter
from paddle_flexckpt.ranks.communicator import Communicator

logger = logging.getLogger("paddle_flexckpt")


class GroupSave:
    """One save by a group. Every member makes the same calls, in the order of the methods.

    A member calls :meth:`write` in a step in which what it returns is sent; after that step :meth:`commit`. After an
    error that all have got from such a step, :meth:`discard` removes what was written.

    Attributes:
        directory: The directory.
        names: Names of the save's files.
    """

    def __init__(self, comm: Communicator, directory: SaveDirectory, names: SaveNames, coordinator: int) -> None:
        """Take the group, the directory, the names, and the position of the member that commits."""
        self.directory, self.names = directory, names
        self._comm, self._coordinator = comm, coordinator
        # The coordinator's own part is not sent.
        self._own: Manifest | None = None

    @property
    def is_coordinator(self) -> bool:
        """Return whether this member commits."""
        return self._comm.position == self._coordinator

    def write(
        self,
        items: Catalog,
        data: Iterable[np.ndarray],
        *,
        before: Sequence[str] | None = None,
        step: int | None = None,
        meter: Meter = SILENT,
    ) -> Manifest:
        """Write this member's data file, durably, and return its part of the manifest; arguments as of ``write_data``.

        ``before`` are the directory's files, if the coordinator has listed them since it has the save lock.
        """
        if self.is_coordinator:
            self.directory.cleaner.remove_dead_saves(self.names, names=before)
        size = self._comm.size
        return self.directory.write_data(self.names, items, data, world_size=size, step=step, meter=meter)

    def send(self, part: Manifest) -> dict[int, bytes]:
        """Return the messages to other members about this one's part, by position."""
        if self.is_coordinator:
            self._own = part
            return {}
        return {self._coordinator: part.encode()}

    def commit(self, received: Mapping[int, bytes], context: str = "", warnings: list[str] | None = None) -> None:
        """Make the checkpoint exist, of what others' :meth:`send` has ``received`` here by position. One collective.

        ``warnings`` collects errors after the commit that do not harm the checkpoint; None raises them.
        """
        self._comm.lead(self._coordinator, lambda: self._commit(received, warnings), context)

    def _commit(self, received: Mapping[int, bytes], warnings: list[str] | None) -> None:
        ranks = self._comm.ranks
        parts = {place: Manifest.decode(part, f"the part of rank {ranks[place]}") for place, part in received.items()}
        if self._own is not None:
            parts[self._coordinator] = self._own
        try:
            self.directory.commit(self.names, [part for _, part in sorted(parts.items())], self._comm.check_awaited)
        except (OSError, CheckpointError) as error:
            if warnings is None or not self._is_harmless(error):
                raise
            warnings.append(str(error))

    def _is_harmless(self, error: Exception) -> bool:
        """Return whether the checkpoint is in place, durably, in spite of an error near its commit."""
        if isinstance(error, NotDurableError):
            return False
        try:
            return isinstance(error, CleanUpError) or self.directory.is_committed(self.names)
        except OSError:
            return False

    def discard(self, partitions: int = 0) -> None:
        """Remove all that members wrote, and so many partitions; the coordinator does this.

        No member writes any more, and none can commit.
        """
        if self.is_coordinator:
            self.directory.discard(self.names, self._comm.ranks, partitions)

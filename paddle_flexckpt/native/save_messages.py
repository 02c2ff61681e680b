"""What the ranks of a save tell each other by files: parts, failures, and a decision that can be made once.

A save without collectives agrees by these alone: see ``background/outcome.py``.

Tested in tests/native/test_directory.py and tests/background/test_ranks.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from paddle_flexckpt.media.backend import write_file
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.names import SaveNames

# How often a step is tried that another process may undo: a decision is there, and gone when it is read; a directory is
# made, and gone when it is to be locked.
TRIES = 10


class SaveMessages:
    """Read and write the messages of a save in its directory."""

    def __init__(self, directory: CheckpointDirectory) -> None:
        """Take the directory, which need not exist."""
        self.backend, self._directory = directory.backend, directory
        # Files of the save that go with its end, whether they are listed or not.
        self.known: set[str] = set()

    def write_part(self, save: SaveNames, rank: int, part: Manifest) -> None:
        """Write a rank's part; its data file is durable already."""
        write_file(self.backend, save.part_file(rank), part.encode(), "replace")

    def write_failure(self, save: SaveNames, rank: int, error: bytes) -> None:
        """Write why a rank cannot write, for the others, in place of what the rank said before.

        Nothing if the save is over: nobody would read it, and a loss of power could bring it back after its removal.
        """
        name = save.failure_file(rank)
        if not self._directory.sees(save):
            return
        write_file(self.backend, name, error, "replace")
        # A rank that was stopped for long may come after all others have ended, and who cleans up has been there.
        with contextlib.suppress(OSError):
            if not self._directory.sees(save):
                self.backend.remove(name)
                self.backend.sync()  # nobody would remove what a loss of power brought back

    def decide(self, save: SaveNames, coordinator: int, verdict: bytes) -> bytes:
        """Decide about a save, once for all ranks; return what is decided: this verdict, or an earlier one.

        An earlier one that is still being written is returned as far as it is there. One that has been cleaned up since
        does not count: the caller looks whether the save is committed.
        """
        name = save.decision_file(coordinator)
        self.known.add(name)
        for left in reversed(range(TRIES)):
            try:
                write_file(self.backend, name, verdict, "new")
            except FileExistsError:
                try:
                    return self.backend.read(name)
                except FileNotFoundError:
                    if not left:
                        raise
            else:
                break
        return verdict

    def withdraw_decision(self, save: SaveNames, coordinator: int) -> None:
        """Remove what was decided about a save that had been committed before, and cleaned up."""
        # It does no harm where it cannot be removed.
        with contextlib.suppress(OSError):
            self.backend.remove(save.decision_file(coordinator))
            self.backend.sync()

    def progress(self, save: SaveNames, ranks: Sequence[int]) -> tuple[set[int], dict[int, bytes]]:
        """Return the ranks whose parts are here, and what those say that failed."""
        names = set(self.backend.names())
        written = {rank for rank in ranks if save.part_file(rank) in names}
        failed = {rank: save.failure_file(rank) for rank in ranks if save.failure_file(rank) in names}
        return written, {rank: self.backend.read(name) for rank, name in failed.items()}

"""Name the files of a save.

Tested in tests/native/test_directory.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# What makes a checkpoint exist.
MANIFEST = re.compile(r"(\d+)\.manifest", re.ASCII)
# What says that a save has begun: id, and generation (none: 0).
MARKER = re.compile(r"(\d+)(?:\.(\d+))?\.saving", re.ASCII)
# What each rank writes, and has not finished: rank, id, generation (none: 0), and what it is.
OF_RANK = re.compile(
    r"(\d+)_(\d+)(?:\.(\d+))?\.(safetensors|(?:part|failed|prepared)(?:\.[0-9a-f]{32}\.tmp)?)", re.ASCII
)


@dataclass(frozen=True)
class SaveNames:
    """Name the files of one save.

    Attributes:
        unique_id: The checkpoint's id.
        generation: 0, or a number that no file of this id has yet.
        token: Random text that marks this save's files.
    """

    unique_id: int
    generation: int
    token: str

    def data_file(self, rank: int) -> str:
        """Return the name of a rank's data file."""
        return f"{rank}_{self._stem}.safetensors"

    def part_file(self, rank: int) -> str:
        """Return the name of a rank's part."""
        return f"{rank}_{self._stem}.part"

    def failure_file(self, rank: int) -> str:
        """Return the name of what a rank says if it cannot write."""
        return f"{rank}_{self._stem}.failed"

    def prepared_file(self, rank: int) -> str:
        """Return the name of a node's manifest that is not published yet; ``rank`` is that of its committer."""
        return f"{rank}_{self._stem}.prepared"

    @property
    def marker_file(self) -> str:
        """Return the name of the file that says that this save has begun."""
        return f"{self._stem}.saving"

    @property
    def _stem(self) -> str:
        # A save that replaces an id has a generation, as the old files still serve.
        return f"{self.unique_id}.{self.generation}" if self.generation else f"{self.unique_id}"

    def owns(self, name: str) -> bool:
        """Return whether a file is a rank's of this save, by its name."""
        return save_of(name) == (self.unique_id, self.generation)


def save_of(name: str) -> tuple[int, int] | None:
    """Return id and generation of the save that a rank's file is of; None for other files."""
    match = OF_RANK.fullmatch(name)
    return (int(match[2]), int(match[3] or 0)) if match else None

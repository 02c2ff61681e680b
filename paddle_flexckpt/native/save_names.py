"""Names of the files in a directory of checkpoints.

Every file of a save, except the manifest, has the save's token in its name. So no two saves share a name, and a process
of a dead save cannot change a file of another one, whatever it writes and whenever.

Older versions had generations in place of tokens. Their checkpoints are read, replaced and removed like others.

Tested in tests/native/test_save_names.py.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

# The manifest, which makes a checkpoint exist.
MANIFEST = re.compile(r"(\d+)\.manifest", re.ASCII)
# Id, and token, or an older version's generation (none: 0).
_SAVE = r"(\d+)(?:-([0-9a-f]{32})|\.(\d+))?"
# The marker of a save that has begun.
_MARKER = re.compile(rf"{_SAVE}\.saving", re.ASCII)
# The other files of a save: rank (number, for a partition), save, and kind.
_OF_SAVE = re.compile(
    rf"(\d+)_{_SAVE}\.(partition|(?:safetensors|parity|prepared)(?:\.[0-9a-f]{{32}}\.tmp)?)", re.ASCII
)
# Messages between ranks of an older version, which nothing else uses.
_MESSAGE = re.compile(
    r"\d+_(\d+)(?:\.(\d+))?(?:-[0-9a-f]{32})?\.(?:decided|late|(?:part|failed)(?:\.[0-9a-f]{32}\.tmp)?)", re.ASCII
)
_NUMBER_DIGITS = 8
_MOST_SAVES = 16**_NUMBER_DIGITS - 1


class SaveId(NamedTuple):
    """The identity of a save, as the names of its files have it.

    Attributes:
        unique_id: The checkpoint's id.
        number: The save's number: a later save in the same directory has a higher one.
        token: Its save token; empty for a save of an older version.
    """

    unique_id: int
    number: int
    token: str = ""


@dataclass(frozen=True)
class SaveNames:
    """The names of one save's files.

    Attributes:
        unique_id: The checkpoint's id.
        token: 32 hexadecimal digits that no other save has. The first 8 are the save's number in its directory.
        replaces: Whether its id had a checkpoint when the save began.
    """

    unique_id: int
    token: str
    replaces: bool = False

    def data_file(self, rank: int) -> str:
        """Return the name of a rank's data file."""
        return f"{rank}_{self._stem}.safetensors"

    def partition_file(self, number: int) -> str:
        """Return the name of a partition of the manifest."""
        return f"{number}_{self._stem}.partition"

    def prepared_file(self, rank: int) -> str:
        """Return the name of a node's manifest that is not published yet; ``rank`` is that of its committer."""
        return f"{rank}_{self._stem}.prepared"

    def parity_file(self, rank: int) -> str:
        """Return the name of the parity file that a rank writes for others."""
        return f"{rank}_{self._stem}.parity"

    @property
    def marker_file(self) -> str:
        """Return the name of the file that marks this save as begun."""
        return f"{self._stem}.saving"

    @property
    def _stem(self) -> str:
        return f"{self.unique_id}-{self.token}"

    @property
    def save_id(self) -> SaveId:
        """Return the identity of this save."""
        return SaveId(self.unique_id, _number_of(self.token), self.token)

    def owns(self, name: str) -> bool:
        """Return whether a file belongs to this save; not its manifest or marker."""
        return save_of(name) == self.save_id


def new_token(names: Iterable[str]) -> str:
    """Return a token for a save in a directory that has these files.

    Its number is one more than that of any save there, of older versions too.
    """
    saves = [save for name in names for save in (save_of(name), marked_by(name)) if save is not None]
    return token_after(max((save.number for save in saves), default=0))


def token_after(number: int) -> str:
    """Return a token for a save that comes after one of this number."""
    return f"{min(number + 1, _MOST_SAVES):0{_NUMBER_DIGITS}x}{os.urandom(12).hex()}"


def _number_of(token: str) -> int:
    return int(token[:_NUMBER_DIGITS], 16)


def save_of(name: str) -> SaveId | None:
    """Return the save of a data file, parity file, partition or prepared manifest; None for other names."""
    match = _OF_SAVE.fullmatch(name)
    return _save(match[2], match[3], match[4]) if match else None


def marked_by(name: str) -> SaveId | None:
    """Return the save whose marker has this name; None if it is not a marker."""
    match = _MARKER.fullmatch(name)
    return _save(match[1], match[2], match[3]) if match else None


def _save(unique_id: str, token: str | None, generation: str | None) -> SaveId:
    return SaveId(int(unique_id), _number_of(token) if token else int(generation or 0), token or "")


def is_message(name: str) -> bool:
    """Return whether a file is a message between ranks of an older version."""
    return _MESSAGE.fullmatch(name) is not None


def rank_of(name: str) -> int:
    """Return the rank of a data file, or the number of a partition."""
    return int(name.partition("_")[0])


def parity_of(data_file: str) -> str:
    """Return the name of the parity file of the rank that has written a data file."""
    return f"{data_file.rpartition('.')[0]}.parity"


def lost_ids(names: Collection[str], by_token: bool = False) -> list[int]:
    """Return the ids whose data files are among the names of a directory, and whose manifest has been lost.

    As long as a save is not committed its marker is there, or a message of an older version. Such messages may have
    been removed, so only those of saves with tokens (``by_token``) are sure to have been committed.
    """
    data = {save for name in names if name.endswith(".safetensors") and (save := save_of(name)) is not None}
    data = {save for save in data if save.token or not by_token}
    messages = [match for match in map(_MESSAGE.fullmatch, names) if match]
    begun = {SaveId(int(each[1]), int(each[2] or 0)) for each in messages} | {*map(marked_by, names)}
    begun |= {save_of(name) for name in names if ".prepared" in name}
    there = {int(match[1]) for match in map(MANIFEST.fullmatch, names) if match}
    return sorted({save.unique_id for save in data - begun} - there)

"""Find files that a save has written. Their names have the save's token, which nobody knows before.

``0_3-2.safetensors`` stands here for rank 0's data file of the save of id 3 that has number 2 in its directory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.native.save_names import rank_of, save_of

_TOKEN = re.compile(r"-([0-9a-f]{8})[0-9a-f]{24}(?=\.)")


def short(text: str) -> str:
    """Return a name, or a text with names, with the numbers of saves in place of their tokens."""
    return _TOKEN.sub(lambda match: f"-{int(match[1], 16)}", text)


def short_names(where: Any) -> list[str]:
    """Return the short names of files, sorted: of a directory, of a storage, or of those with these names."""
    return sorted(map(short, names_in(where)))


def names_in(where: Any) -> list[str]:
    """Return the names of the files of a directory or storage; those that are given as they are."""
    if isinstance(where, (str, os.PathLike)):
        return os.listdir(where)
    return list(where.names() if hasattr(where, "names") else where)


def named(where: Any, name: str) -> str:
    """Return the name of the file that has this short name."""
    found = [each for each in names_in(where) if short(each) == name]
    assert len(found) == 1, f"{name} stands for {found} among {sorted(names_in(where))}"
    return found[0]


def data_file(where: Any, rank: int = 0, unique_id: int = 0) -> str:
    """Return the name of a rank's data file: of the manifest, if there is one, else of the newest save."""
    return file_of(where, "safetensors", rank, unique_id)


def partition_file(where: Any, number: int = 0, unique_id: int = 0) -> str:
    """Return the name of a partition of the manifest, as of :func:`data_file`."""
    return file_of(where, "partition", number, unique_id)


def file_of(where: Any, kind: str, rank: int, unique_id: int) -> str:
    """Return the name of a save's file of a kind; a partition's number is where other files have a rank."""
    for names in (_committed(where, unique_id), reversed(newest_last(names_in(where)))):
        for name in names:
            if name.endswith(f".{kind}") and (rank_of(name), save_of(name).unique_id) == (rank, unique_id):
                return name
    raise AssertionError(f"no {kind} of rank {rank} and id {unique_id} among {sorted(names_in(where))}")


def newest_last(names: Iterable[str]) -> list[str]:
    """Return those of saves' files, those of later saves after those of earlier ones."""
    found = [(save.number, name) for name in names if (save := save_of(name)) is not None]
    return [name for _, name in sorted(found)]


def _committed(where: Any, unique_id: int) -> list[str]:
    if not isinstance(where, (str, os.PathLike)) and not hasattr(where, "names"):
        return []
    try:
        return list(CheckpointDirectory(where).read_committed(unique_id, ()).files)
    except (OSError, CorruptCheckpointError, ValidationError):
        return []

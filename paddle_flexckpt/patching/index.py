"""The patches that come with this library: ``patches/index.json`` and one ``NAME.patch`` each."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paddle_flexckpt.patching.diff import FileDiff, parse_diff
from paddle_flexckpt.patching.errors import PatchError

FORMAT = 1


def sha256(content: bytes) -> str:
    """The checksum by which files are known here, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class PatchedFile:
    """A file that a patch changes.

    Attributes:
        path: Relative to the directory that the package is in.
        before: sha256 of the file as released.
        after: sha256 of it with this patch and no other.
    """

    path: str
    before: str
    after: str


@dataclass(frozen=True)
class Patch:
    """A patch and all that is known about it.

    Attributes:
        name: Its name, and that of its file without ``.patch``.
        package: The package as it is imported.
        distributions: The names under which it is installed.
        versions: The releases that have exactly these files.
        title: What it mends, in a line.
        symptom: What users see without it.
        mends: What it changes.
        test: The test that fails without it.
        files: The files that it changes.
        text: The unified diff.
    """

    name: str
    package: str
    distributions: tuple[str, ...]
    versions: tuple[str, ...]
    title: str
    symptom: str
    mends: str
    test: str
    files: tuple[PatchedFile, ...]
    text: bytes

    def diffs(self) -> dict[str, FileDiff]:
        """What it does to each file.

        Raises:
            PatchError: The diff is malformed, or is not about the files that the index names.
        """
        diffs = {diff.path: diff for diff in parse_diff(self.text, self.name)}
        named = {file.path for file in self.files}
        if set(diffs) != named:
            raise PatchError(
                f"patch {self.name!r} is not what the index says; expected changes of {sorted(named)}; "
                f"got {sorted(diffs)}"
            )
        return diffs

    def as_dict(self) -> dict[str, Any]:
        """The entry of the index: all but the diff."""
        return {
            "name": self.name,
            "package": self.package,
            "distributions": list(self.distributions),
            "versions": list(self.versions),
            "title": self.title,
            "symptom": self.symptom,
            "mends": self.mends,
            "test": self.test,
            "files": {file.path: {"before": file.before, "after": file.after} for file in self.files},
        }

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any], text: bytes) -> Patch:
        """The patch of an entry of the index.

        Raises:
            KeyError: Something is missing.
        """
        return cls(
            text=text,
            distributions=tuple(entry["distributions"]),
            versions=tuple(entry["versions"]),
            files=tuple(PatchedFile(path, file["before"], file["after"]) for path, file in entry["files"].items()),
            **{key: str(entry[key]) for key in ("name", "package", "title", "symptom", "mends", "test")},
        )


def patches_directory() -> Path:
    """Where the patches are: in the installed package, or beside it in the sources.

    Raises:
        PatchError: They are not there.
    """
    package = Path(__file__).resolve().parent.parent
    candidates = (package / "patches", package.parent / "patches")
    for candidate in candidates:
        if (candidate / "index.json").is_file():
            return candidate
    raise PatchError(f"the patches of this library are not installed; expected index.json in one of {candidates}")


def read_patches(directory: Path | None = None) -> dict[str, Patch]:
    """All patches by name, in the order of the index.

    Args:
        directory: Where ``index.json`` is; by default :func:`patches_directory`.

    Raises:
        PatchError: The index cannot be read, or a patch's file is missing.
    """
    directory = patches_directory() if directory is None else directory
    path = directory / "index.json"
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        if index["format"] != FORMAT:
            raise PatchError(f"{path} has another format; expected {FORMAT}; got {index['format']!r}")
        entries = {entry["name"]: entry for entry in index["patches"]}
        texts = {name: (directory / f"{name}.patch").read_bytes() for name in entries}
        return {name: Patch.from_dict(entry, texts[name]) for name, entry in entries.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PatchError(f"{path} cannot be read: {type(error).__name__}: {error}") from error

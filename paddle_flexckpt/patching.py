"""Mend installed packages: compare, try, apply and reverse the diffs in ``patches/``.

A patch fits exactly the released file that it was made from. It never searches for a place. Several patches may change
one file, which then is the released file with all of their edits. No record is kept of the patches that were applied:
without their edits the file has to be the released one, to the byte. If a command was killed between two files, the
same command finishes the change, and its opposite undoes it.

Needs the standard library alone, and imports no package that it mends.
Tested in tests/patching/test_patching.py and tests/patching/test_paddle.py.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")


class PatchError(RuntimeError):
    """An error of patches that cannot be read or do not fit. No file has been changed."""


class Edit(NamedTuple):
    """A replacement of the lines ``old`` by ``new``, after the first ``start`` lines of a file."""

    start: int
    old: list[bytes]
    new: list[bytes]


@dataclass(frozen=True)
class Patch:
    """One patch: its entry in ``index.json``, and the diff of ``NAME.patch``.

    Attributes:
        name: ``PACKAGE-VERSION-TOPIC``.
        package: The package as it is imported.
        versions: The releases that have exactly these files.
        title: What it mends, in a line.
        files: Path below the package's parent -> sha256 ``before`` (as released) and ``after`` (with this patch alone).
        edits: Path -> the changes of that file, from top to bottom.
    """

    name: str
    package: str
    versions: Sequence[str]
    title: str
    files: Mapping[str, Mapping[str, str]]
    edits: Mapping[str, Sequence[Edit]]


def sha256(content: bytes) -> str:
    """Return the checksum by which files are known here, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def patches_directory() -> Path:
    """Return where the patches are: in the installed package, or beside it in the sources."""
    package = Path(__file__).resolve().parent
    inside = package / "patches"
    return inside if (inside / "index.json").is_file() else package.parent / "patches"


def read_patches(directory: Path | None = None) -> dict[str, Patch]:
    """Return all patches by name, in the order of the index; by default those of :func:`patches_directory`.

    Raises:
        PatchError: The index or a patch cannot be read.
    """
    path = (directory or patches_directory()) / "index.json"
    try:
        patches = {}
        for entry in json.loads(path.read_text(encoding="utf-8"))["patches"]:
            edits = read_diff((path.parent / f"{entry['name']}.patch").read_bytes())
            known = {key: entry[key] for key in ("name", "package", "versions", "title", "files")}
            patches[entry["name"]] = Patch(**known, edits=edits)
        return patches
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PatchError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def read_diff(text: bytes) -> dict[str, list[Edit]]:
    """Return the edits of each file of a unified diff. :func:`edit_file` checks them by checksums."""
    files: dict[str, list[Edit]] = {}
    edits: list[Edit] = []
    at = old_left = new_left = 0
    for line in split_lines(text):
        if old_left or new_left:
            kind = line[:1]
            old_left, new_left = old_left - (kind != b"+"), new_left - (kind != b"-")
            if kind == b" ":
                at += 1
                continue
            if not edits or edits[-1].start + len(edits[-1].old) != at:
                edits.append(Edit(at, [], []))
            (edits[-1].old if kind == b"-" else edits[-1].new).append(line[1:])
            at += kind == b"-"
        elif line.startswith(b"+++ b/"):
            edits = files[line[6:].split(b"\t")[0].strip().decode()] = []
        elif hunk := _HUNK.match(line):
            at, old_left, new_left = (1 if number is None else int(number) for number in hunk.groups())
            # A hunk that only adds has the number of the line before it.
            at -= old_left != 0
    return files


def split_lines(content: bytes) -> list[bytes]:
    """Return the lines with their line feeds. Other line ends and form feeds are bytes like others."""
    return re.findall(rb"[^\n]*\n|[^\n]+", content)


def replace_lines(content: bytes, edits: Sequence[Edit]) -> bytes:
    """Return a file after edits, which are sorted. It is not checked that their old lines are there."""
    lines, at = split_lines(content), 0
    result: list[bytes] = []
    for edit in edits:
        result += lines[at : edit.start] + edit.new
        at = edit.start + len(edit.old)
    return b"".join([*result, *lines[at:]])


def edit_file(released: bytes, patches: Sequence[Patch], path: str) -> bytes:
    """Return a released file with patches in it.

    Raises:
        PatchError: Two patches change the same or adjoining lines, or one does not give what the index says.
    """
    for patch in patches:
        got = sha256(replace_lines(released, patch.edits.get(path, ())))
        if got != patch.files[path]["after"]:
            raise PatchError(
                f"patch {patch.name!r} is not the one of the index (file {path!r}); expected sha256 "
                f"{patch.files[path]['after']} after it; got {got}"
            )
    edits = sorted(edit for patch in patches for edit in patch.edits[path])
    for first, second in zip(edits, edits[1:]):
        if second.start <= first.start + len(first.old):
            names = ", ".join(patch.name for patch in patches)
            raise PatchError(f"two of {names} change the same lines (file {path!r}, line {second.start + 1})")
    return replace_lines(released, edits)


def find_patches(content: bytes, patches: Sequence[Patch], path: str) -> tuple[bytes, list[Patch]] | None:
    """Return the released file and the patches that are in it; None for a file that no release has."""
    groups: dict[str, list[Patch]] = {}
    for patch in patches:
        if path in patch.files:
            groups.setdefault(patch.files[path]["before"], []).append(patch)
    for before, group in groups.items():
        for number in range(len(group) + 1):
            for inside in itertools.combinations(group, number):
                edits = sorted(edit for patch in inside for edit in patch.edits.get(path, ()))
                released = replace_lines(content, _reversed(edits))
                if sha256(released) == before:
                    return released, list(inside)
    return None


def find_root(package: str, directory: Path | None = None) -> Path | None:
    """Return the directory that holds a package, as a rule ``site-packages``; None if it is not installed."""
    if directory is not None:
        return directory.resolve() if (directory / package / "__init__.py").is_file() else None
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).resolve().parent.parent


def plan_change(
    root: Path, patches: Sequence[Patch], chosen: Sequence[Patch], reverse: bool = False
) -> dict[Path, bytes]:
    """Return the new contents of the files that a change replaces. Nothing is written: this is the dry run.

    Args:
        root: The directory that holds the package.
        patches: All patches that may be in its files.
        chosen: The patches to apply. One that is applied already changes nothing.
        reverse: Revert them instead. One that is not applied changes nothing.

    Raises:
        PatchError: Files are not as released, or patches do not go together; it names all of them.
    """
    contents: dict[Path, bytes] = {}
    problems: list[str] = []
    for path in dict.fromkeys(path for patch in chosen for path in patch.files):
        file, mine = root / path, [patch for patch in chosen if path in patch.files]
        # The target of a link may be outside of the package.
        content = file.read_bytes() if file.is_file() and not file.is_symlink() else b""
        released, inside = find_patches(content, patches, path) or (b"", [])
        misfits = [patch for patch in mine if patch.files[path]["before"] != sha256(released)]
        problems += [
            f"{patch.name}: {file}: expected sha256 {patch.files[path]['before']}, as in {patch.package} "
            f"{' or '.join(patch.versions)}, with or without patches of this list; got "
            + (f"sha256 {sha256(content)}" if content else "no regular file")
            for patch in misfits
        ]
        if not misfits:
            others = [patch for patch in inside if patch not in mine]
            new = edit_file(released, others if reverse else [*others, *mine], path)
            contents.update({file: new} if new != content else {})
    if problems:
        raise PatchError("\n  ".join(["no file was changed", *problems]))
    return contents


def check_patch(root: Path | None, patches: Sequence[Patch], patch: Patch) -> tuple[str, str]:
    """Return the status of a patch and, unless it is applied or fits, the reason.

    The status is ``applied``, ``fits``, ``partly applied`` (a command was killed), ``does not fit`` or
    ``not installed``.
    """
    if root is None:
        return "not installed", ""
    try:
        missing = plan_change(root, patches, [patch])
        present = plan_change(root, patches, [patch], reverse=True)
    except PatchError as error:
        return "does not fit", str(error)
    if missing and present:
        return (
            "partly applied",
            f"{', '.join(map(str, missing))} lacks it. Remedy (FC901): apply it again, or revert it",
        )
    return ("fits" if missing else "applied"), ""


def write_files(contents: Mapping[Path, bytes]) -> None:
    """Replace each file atomically, with the permissions of the old one, and remove its compiled files.

    Raises:
        OSError: A file cannot be written. The same command finishes the change, and its opposite undoes it.
    """
    for file, content in contents.items():
        temporary = file.with_name(f".{file.name}.flexckpt.tmp")
        try:
            with open(temporary, "wb") as stream:
                stream.write(content)
                stream.flush()
                os.fchmod(stream.fileno(), file.stat().st_mode & 0o7777)
                os.fsync(stream.fileno())
            os.replace(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)
        # Python may take a compiled file for current: it compares whole seconds and sizes, or nothing.
        for compiled in Path(importlib.util.cache_from_source(str(file))).parent.glob(f"{file.stem}.*.pyc"):
            compiled.unlink(missing_ok=True)


def _reversed(edits: Sequence[Edit]) -> list[Edit]:
    shift, result = 0, []
    for edit in edits:
        result.append(Edit(edit.start + shift, edit.new, edit.old))
        shift += len(edit.new) - len(edit.old)
    return result

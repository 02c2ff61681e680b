"""Unified diffs, applied to exactly the bytes that they were made from.

``patch(1)`` and the libraries around it look for a place where a hunk fits, and settle for less context when they find
none. Here a hunk has its line number and its context, and both have to be right. What is left is small enough to be
read in one go, and it can do what those cannot: put several patches into one file, in any order, and take any of them
out again. For that every patch is a diff against the released file; patches whose changed lines do not touch compose.

Everything is bytes, and a line ends at a line feed: other line ends, encodings and form feeds pass unchanged.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from paddle_flexckpt.patching.errors import PatchError

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NO_NEWLINE = b"\\ No newline at end of file\n"


@dataclass(frozen=True)
class Edit:
    """Some lines of a file that give way to others.

    Attributes:
        start: Number of lines before it, in the file as released.
        old: The lines that are there, with their line ends.
        new: Those that take their place.
    """

    start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]

    @property
    def stop(self) -> int:
        """Number of lines up to its end."""
        return self.start + len(self.old)


@dataclass(frozen=True)
class FileDiff:
    """What one patch does to one file.

    Attributes:
        path: The file, relative to the directory that the package is in, with ``/``.
        edits: The changes, from top to bottom.
        context: Lines that have to be there, as edits that change nothing: a hunk's unchanged lines.
    """

    path: str
    edits: tuple[Edit, ...]
    context: tuple[Edit, ...]


def split_lines(content: bytes) -> list[bytes]:
    """The lines with their line feeds; only the last one may lack it."""
    lines = content.split(b"\n")
    return [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def parse_diff(text: bytes, name: str) -> tuple[FileDiff, ...]:
    """Reads a unified diff as made for ``patch -p1``; text before the first file is a comment.

    Args:
        text: The patch.
        name: Its name, for errors.

    Raises:
        PatchError: It is not a complete unified diff of existing files, or a path leads out of the package's directory.
    """
    lines, at = split_lines(text), 0
    files: list[FileDiff] = []
    while at < len(lines):
        if not lines[at].startswith(b"--- "):
            if files or lines[at].startswith((b"@@", b"+++")):
                raise PatchError(f"patch {name!r}, line {at + 1}: expected '--- a/PATH'; got {lines[at]!r}")
            at += 1
            continue
        old, new = _path(lines, at, b"--- a/", name), _path(lines, at + 1, b"+++ b/", name)
        if old != new:
            raise PatchError(
                f"patch {name!r}, line {at + 1}: renames {old!r} to {new!r}; files are changed in place only"
            )
        at, edits, context = _parse_hunks(lines, at + 2, name)
        if not edits:
            raise PatchError(f"patch {name!r}: nothing changes in {old!r}")
        files.append(FileDiff(old, tuple(edits), tuple(context)))
    if not files:
        raise PatchError(f"patch {name!r} changes no file")
    if len({file.path for file in files}) != len(files):
        raise PatchError(f"patch {name!r} names a file twice")
    return tuple(files)


def _path(lines: Sequence[bytes], at: int, prefix: bytes, name: str) -> str:
    line = lines[at] if at < len(lines) else b""
    if not line.startswith(prefix):
        raise PatchError(f"patch {name!r}, line {at + 1}: expected {prefix.decode()!r}...; got {line!r}")
    path = line[len(prefix) :].split(b"\t")[0].strip().decode("utf-8")
    if path.startswith("/") or "\\" in path or any(part in ("", ".", "..") for part in path.split("/")):
        raise PatchError(f"patch {name!r}, line {at + 1}: {path!r} is not a path inside a package")
    return path


def _parse_hunks(lines: Sequence[bytes], at: int, name: str) -> tuple[int, list[Edit], list[Edit]]:
    """The hunks of one file: the index of the line after them, the changes, and the context."""
    edits: list[Edit] = []
    context: list[Edit] = []
    shift = 0
    while at < len(lines) and lines[at].startswith(b"@@"):
        head = _HUNK.match(lines[at])
        if head is None:
            raise PatchError(f"patch {name!r}, line {at + 1}: not the head of a hunk: {lines[at]!r}")
        old_start, old_left, new_start, new_left = (1 if group is None else int(group) for group in head.groups())
        # A hunk that only adds has the number of the line before it.
        position, head_at = (old_start - 1 if old_left else old_start), at
        if (new_start - 1 if new_left else new_start) != position + shift:
            raise PatchError(f"patch {name!r}, line {at + 1}: the hunk's line numbers contradict those before it")
        shift += new_left - old_left
        if edits and position < max(edits[-1].stop, context[-1].stop if context else 0):
            raise PatchError(f"patch {name!r}, line {at + 1}: the hunk overlaps the one before it")
        at += 1
        old: list[bytes] = []
        new: list[bytes] = []
        while old_left or new_left:
            line = lines[at] if at < len(lines) else b""
            kind, body = line[:1], line[1:]
            at += 1
            if at < len(lines) and lines[at] == _NO_NEWLINE:
                body, at = body[:-1], at + 1
            if kind not in (b" ", b"-", b"+") or not line.endswith(b"\n"):
                raise PatchError(
                    f"patch {name!r}, line {at}: the hunk of line {head_at + 1} is not complete; got {line!r}"
                )
            old_left -= kind != b"+"
            new_left -= kind != b"-"
            if old_left < 0 or new_left < 0:
                raise PatchError(
                    f"patch {name!r}, line {at}: the hunk of line {head_at + 1} is longer than its head says"
                )
            if kind == b" ":
                position = _flush(edits, position, old, new)
                context.append(Edit(position, (body,), (body,)))
                position += 1
            else:
                (old if kind == b"-" else new).append(body)
        _flush(edits, position, old, new)
    return at, edits, context


def _flush(edits: list[Edit], position: int, old: list[bytes], new: list[bytes]) -> int:
    """Ends an edit that is being collected; the line after it."""
    if old or new:
        edits.append(Edit(position, tuple(old), tuple(new)))
    position += len(old)
    old.clear()
    new.clear()
    return position


def compose(original: bytes, diffs: Sequence[tuple[str, FileDiff]]) -> bytes:
    """The file with several patches in it.

    Args:
        original: The file as released.
        diffs: Names of patches and what each does to this file.

    Raises:
        PatchError: A patch was not made from these bytes, or two patches change the same or adjoining lines.
    """
    lines = split_lines(original)
    changes: list[tuple[str, Edit]] = []
    for name, diff in diffs:
        for edit in (*diff.context, *diff.edits):
            if tuple(lines[edit.start : edit.stop]) != edit.old:
                got = b"".join(lines[edit.start : edit.stop])
                raise PatchError(
                    f"patch {name!r} does not fit (file {diff.path!r}, line {edit.start + 1}); "
                    f"expected {b''.join(edit.old)!r}; got {got!r}"
                )
        changes += [(name, edit) for edit in diff.edits]
    changes.sort(key=lambda change: (change[1].start, change[1].stop))
    result: list[bytes] = []
    at, before = 0, None
    for name, edit in changes:
        # Adjoining edits of two patches would depend on their order, and each is the other's context.
        if edit.start < at or (before not in (None, name) and edit.start == at):
            where = f"file {diffs[0][1].path!r}, line {edit.start + 1}"
            raise PatchError(f"patches {before!r} and {name!r} change the same lines ({where})")
        result += [*lines[at : edit.start], *edit.new]
        at, before = edit.stop, name
    return b"".join([*result, *lines[at:]])


def format_diff(path: str, before: bytes, after: bytes) -> bytes:
    """The unified diff of one file, with three lines of context, as :func:`parse_diff` reads it."""
    old, new = split_lines(before), split_lines(after)
    lines: list[bytes] = []
    names = f"a/{path}".encode(), f"b/{path}".encode()
    for line in difflib.diff_bytes(difflib.unified_diff, old, new, *names):
        lines += [line] if line.endswith(b"\n") else [line + b"\n", _NO_NEWLINE]
    return b"".join(lines)

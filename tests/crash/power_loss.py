"""The disks that a loss of power may leave, from a recording of the calls before it.

The model is what POSIX promises and no more, as in the studies of ALICE (Pillai et al., "All File Systems Are Not
Created Equal", OSDI 2014) and CrashMonkey (Mohan et al., "Finding Crash-Consistency Bugs with Bounded Black-Box Crash
Testing", OSDI 2018):

* ``fsync`` of a file makes its bytes and its length durable, and nothing else; in particular not its name.
* ``fsync`` of a directory makes the names in it durable as they are then; not the directory's own name in its parent.
* Of the changes to the names of one directory since its last ``fsync`` (files and directories made, renamed, linked,
  removed) any may be lost, whatever becomes of the others: any subset takes place. Each change takes place whole or not
  at all: a rename gives the new name and takes the old one.
* Of the bytes written since a file's last ``fsync`` any may be lost: the file may be as it was, have its new length and
  zeros where its new bytes should be, end anywhere between, or have some of its new sectors of 512 bytes only.
* Changes to different files and directories are independent, in whatever order they were made.
* What is durable stays as it is: no disk lies about ``fsync``, no bytes rot.

A crash of one machine among several that share storage loses less than this: its unsent writes alone.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np

from tests.crash.file_system import Call

SECTOR = 512
Tree = dict[str, "bytes | None"]


@dataclass(eq=False)
class File:
    """Hold a file: its durable bytes, those that it has, and whether it was changed since it was made durable."""

    durable: bytes = b""
    written: bytes = b""
    changed: bool = False

    def write(self, offset: int, data: bytes) -> None:
        """Put bytes at a place; a gap before them is zeros."""
        content = self.written.ljust(offset, b"\0")
        self.written = content[:offset] + data + content[offset + len(data) :]
        self.changed = True

    def truncate(self, length: int) -> None:
        """Set another length."""
        self.written = self.written[:length].ljust(length, b"\0")
        self.changed = True

    def sync(self) -> None:
        """Make durable all that is written."""
        self.durable, self.changed = self.written, False

    def variants(self, random: Random) -> list[bytes]:
        """Return the contents after a loss of power; the durable one first, the written one second."""
        if not self.changed or self.durable == self.written:
            return [self.durable]
        old, new = self.durable, self.written
        wanted, there = (np.frombuffer(each, np.uint8) for each in (new, old[: len(new)].ljust(len(new), b"\0")))
        zeros = np.where(wanted == there, wanted, 0).astype(np.uint8).tobytes()
        cut = random.randrange(min(len(old), len(new)), max(len(old), len(new)) + 1)
        prefix = new[:cut] if len(new) > len(old) else old[:cut]
        scattered = bytearray(new)
        for begin in range(0, len(new), SECTOR):
            if random.random() < 0.5:
                end = min(begin + SECTOR, len(new))
                scattered[begin:end] = old[begin:end].ljust(end - begin, b"\0")
        return list(dict.fromkeys([old, new, zeros, prefix, bytes(scattered)]))


@dataclass(eq=False)
class Folder:
    """Hold a directory's durable names, and the changes since: each gives names something, or None, all at once."""

    durable: dict[str, File | Folder] = field(default_factory=dict)
    changes: list[dict[str, File | Folder | None]] = field(default_factory=list)

    def names(self, chosen: Sequence[bool] | None = None) -> dict[str, File | Folder]:
        """Return the names if the chosen changes take place; all of them by default."""
        names = dict(self.durable)
        for i, change in enumerate(self.changes):
            if chosen is None or chosen[i]:
                for name, content in change.items():
                    if content is None:
                        names.pop(name, None)
                    else:
                        names[name] = content
        return names

    def sync(self) -> None:
        """Make all names durable."""
        self.durable, self.changes = self.names(), []


class Disk:
    """Imitate a disk to which recorded calls are made again."""

    def __init__(self, tree: Tree) -> None:
        """Args: tree: what is durable at first."""
        self.root = Folder()
        self._open: dict[int, File | Folder] = {}
        for path, content in sorted(tree.items()):
            folder, name = self._place(path)
            folder.durable[name] = Folder() if content is None else File(content, content)

    def _place(self, path: str) -> tuple[Folder, str]:
        folder = self.root
        *above, name = path.split(os.sep)
        for part in above:
            below = folder.names()[part]
            assert isinstance(below, Folder), path
            folder = below
        return folder, name

    def _find(self, path: str) -> File | Folder:
        if path == os.curdir:
            return self.root
        folder, name = self._place(path)
        return folder.names()[name]

    def apply(self, call: Call) -> None:
        """Make one more call."""
        if call.refused or call.name in ("close", "flock", "unlock"):
            return
        if call.name == "open":
            if call.created:
                folder, name = self._place(call.path)
                folder.changes.append({name: File()})
            self._open[call.descriptor] = found = self._find(call.path)
            if call.truncated:
                found.truncate(0)
        elif call.name == "write":
            self._open[call.descriptor].write(call.offset, call.data)
        elif call.name == "fsync":
            self._open[call.descriptor].sync()
        elif call.name in ("truncate", "ftruncate"):
            found = self._find(call.path) if call.name == "truncate" else self._open[call.descriptor]
            found.truncate(call.offset)
        elif call.name == "mkdir":
            folder, name = self._place(call.path)
            folder.changes.append({name: Folder()})
        elif call.name in ("unlink", "rmdir"):
            folder, name = self._place(call.path)
            folder.changes.append({name: None})
        elif call.name in ("rename", "link"):
            folder, name = self._place(call.path)
            other, new = self._place(call.target)
            if folder is not other and call.name == "rename":
                raise NotImplementedError(f"{call}: renames between directories are not modelled")
            change = {new: folder.names()[name]}
            if call.name == "rename" and new != name:
                change[name] = None
            other.changes.append(change)
        else:
            raise NotImplementedError(f"{call} is not modelled")

    def tree(self) -> Tree:
        """Return all that is there if nothing is lost."""
        return self._walk(self.root, lambda folder: folder.names(), lambda file: file.written)

    def _walk(self, folder, names_of, content_of, above: str = "") -> Tree:
        tree: Tree = {}
        for name, found in names_of(folder).items():
            path = os.path.join(above, name)
            if isinstance(found, File):
                tree[path] = content_of(found)
            else:
                tree[path] = None
                tree.update(self._walk(found, names_of, content_of, path))
        return tree

    def _pending(self) -> tuple[list[Folder], list[File]]:
        """Return directories and files of which something may be lost, under any name they have or had."""
        folders, files, seen = [], [], set()

        def visit(folder: Folder) -> None:
            if folder.changes:
                folders.append(folder)
            contents = [*folder.durable.values(), *(c for change in folder.changes for c in change.values())]
            for content in contents:
                if content is None or id(content) in seen:
                    continue
                seen.add(id(content))
                if isinstance(content, Folder):
                    visit(content)
                elif content.changed:
                    files.append(content)

        visit(self.root)
        return folders, files

    def states(self, random: Random, limit: int) -> Iterator[Tree]:
        """Yield disks that a loss of power now may leave; all of them if they are no more than ``limit``.

        Otherwise the four corners (of the names none or all, of the bytes none or all) and a random sample.
        """
        folders, files = self._pending()
        variants = [file.variants(random) for file in files]
        changes = [len(folder.changes) for folder in folders]
        switches = sum(changes)
        count = 2**switches * math.prod(len(each) for each in variants)
        if count <= limit:
            choices = itertools.product(itertools.product((False, True), repeat=switches), itertools.product(*variants))
        else:
            choices = self._sample(random, limit, switches, variants)
        for flags, contents in choices:
            chosen, position = {}, 0
            for folder, length in zip(folders, changes):
                chosen[id(folder)] = flags[position : position + length]
                position += length
            content = {id(file): data for file, data in zip(files, contents)}
            yield self._walk(
                self.root,
                lambda folder, chosen=chosen: folder.names(chosen.get(id(folder))),
                lambda file, content=content: content.get(id(file), file.durable),
            )

    @staticmethod
    def _sample(
        random: Random, limit: int, switches: int, variants: list[list[bytes]]
    ) -> Iterator[tuple[tuple[bool, ...], tuple[bytes, ...]]]:
        for names in (False, True):
            for content in (0, 1):
                yield (names,) * switches, tuple(each[min(content, len(each) - 1)] for each in variants)
        for _ in range(limit - 4):
            flags = tuple(random.random() < 0.5 for _ in range(switches))
            yield flags, tuple(random.choice(each) for each in variants)

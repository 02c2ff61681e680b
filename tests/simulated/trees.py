"""Whole trees of files: put into a simulated file system, and taken out of it.

Tested in tests/simulation/test_files.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Union

from tests.simulated.files import FileSystem
from tests.simulated.inodes import Directory, File, Link

# What is at a path: a file's bytes, or None for a directory.
Tree = dict[str, Union[bytes, None]]


def fill(file_system: FileSystem, tree: Mapping[str, bytes | None]) -> None:
    """Make durable files and directories (None) at paths; those above are made too."""
    for path, data in sorted(tree.items()):
        *above, name = path.strip("/").split("/")
        directory = file_system.root
        for part in above if data is not None else [*above, name]:
            below = directory.entries.get(part) or file_system.make_directory(directory, part)
            assert isinstance(below, Directory), path
            directory.changes.clear()
            directory = below
        if data is not None:
            file = directory.entries.get(name) or file_system.create(directory, name)
            assert isinstance(file, File), path
            file_system.truncate(file, 0)
            file_system.write(file, 0, data)
            file.content.sync()
            directory.changes.clear()


def tree_of(file_system: FileSystem, durable: bool = False) -> Tree:
    """Return all files by path, without a slash before it; only what is durable for certain, if that is asked for."""
    found: Tree = {}

    def visit(directory: Directory, above: str) -> None:
        names = directory.durable() if durable else directory.entries
        for name, inode in sorted(names.items()):
            path = above + name
            if isinstance(inode, Directory):
                found[path] = None
                visit(inode, path + "/")
            elif isinstance(inode, File):
                found[path] = inode.content.durable() if durable else inode.content.read(0, inode.size)
            elif isinstance(inode, Link):
                found[path] = b"-> " + os.fsencode(inode.target)

    visit(file_system.root, "")
    return found

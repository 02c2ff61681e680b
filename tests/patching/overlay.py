"""A package that can be patched without touching the installed one: links to it, and copies of what is patched."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from paddle_flexckpt.patching import Package


def make_overlay(package: Package, paths: Iterable[str], target: Path) -> Package:
    """Makes a directory that, put into ``PYTHONPATH``, is imported from in place of the installed package.

    Args:
        package: The installed package.
        paths: Files to copy; everything else is linked.
        target: The directory to make.
    """
    target.mkdir(parents=True)
    for info in package.root.glob("*.dist-info"):
        os.symlink(info, target / info.name)
    copies = set(paths)
    directories = {parent.as_posix() for path in copies for parent in Path(path).parents} - {"."}
    for directory in sorted(directories | {package.name}):
        (target / directory).mkdir(parents=True, exist_ok=True)
        for entry in os.scandir(package.root / directory):
            path = f"{directory}/{entry.name}"
            if path in copies:
                shutil.copyfile(entry.path, target / path)
            elif path not in directories and entry.name != "__pycache__":
                os.symlink(entry.path, target / path)
    return Package(package.name, target, package.version)

"""Packages that can be patched without touching the installed ones: links to them, and copies of what is patched."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from paddle_flexckpt.patching import Patch, check_patch, find_root, plan_change, sha256, write_files

DISTRIBUTIONS = {
    "paddle": ("paddlepaddle", "paddlepaddle-gpu"),
    "paddlenlp": ("paddlenlp",),
    "paddleformers": ("paddleformers",),
}


def patches_for_installed(patches: Iterable[Patch]) -> list[Patch]:
    """The patches for the very releases that are installed."""
    versions: dict[str, str] = {}
    for package, names in DISTRIBUTIONS.items():
        for name in names:
            try:
                versions[package] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
    return [patch for patch in patches if versions.get(patch.package) in patch.versions]


def topic(patch: Patch) -> str:
    """Its name without the package and the version."""
    return patch.name.split("-", 2)[2]


def make_overlay(patches: Sequence[Patch], target: Path) -> Path:
    """Makes a directory that, put into ``PYTHONPATH``, is imported from in place of an installed package.

    Args:
        patches: Patches for one package: their files are copied, everything else is linked.
        target: The directory to make.
    """
    root = find_root(patches[0].package)
    assert root is not None
    target.mkdir(parents=True)
    for info in root.glob("*.dist-info"):
        os.symlink(info, target / info.name)
    copies = {path for patch in patches for path in patch.files}
    directories = {parent.as_posix() for path in copies for parent in Path(path).parents} - {"."}
    for directory in sorted(directories):
        (target / directory).mkdir(parents=True, exist_ok=True)
        for entry in os.scandir(root / directory):
            path = f"{directory}/{entry.name}"
            if path in copies:
                shutil.copyfile(entry.path, target / path)
            elif path not in directories and entry.name != "__pycache__":
                os.symlink(entry.path, target / path)
    return target


def assert_that_each_comes_and_goes(patches: Sequence[Patch], root: Path) -> None:
    """Each patch fits, gives the file of the index and is reverted to the byte; then all of them are applied."""
    released = {path: (root / path).read_bytes() for patch in patches for path in patch.files}
    for patch in patches:
        assert check_patch(root, patches, patch) == ("fits", "")
        write_files(plan_change(root, patches, [patch]))
        assert check_patch(root, patches, patch) == ("applied", "")
        for path, file in patch.files.items():
            content = (root / path).read_bytes()
            assert (sha256(released[path]), sha256(content)) == (file["before"], file["after"])
            compile(content, path, "exec")
        write_files(plan_change(root, patches, [patch], reverse=True))
        assert {path: (root / path).read_bytes() for path in released} == released
    write_files(plan_change(root, patches, patches))
    for patch in reversed(patches):
        write_files(plan_change(root, patches, [patch], reverse=True))
    assert {path: (root / path).read_bytes() for path in released} == released
    write_files(plan_change(root, patches, patches))

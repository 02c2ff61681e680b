"""Patches for installed packages: what there is, whether it fits, and how it gets in and out again.

A patch is for files with exactly known contents. Nothing is searched for and nothing is fitted: a file that differs by
one byte from the released one is refused. This package stands on the standard library alone, so that it works where
the package to be patched does not even import.
"""

from paddle_flexckpt.patching.changes import applied_patches, apply_patches, revert_patches
from paddle_flexckpt.patching.check import Finding, check_patches
from paddle_flexckpt.patching.diff import Edit, FileDiff, compose, format_diff, parse_diff
from paddle_flexckpt.patching.errors import PatchError
from paddle_flexckpt.patching.index import Patch, PatchedFile, patches_directory, read_patches
from paddle_flexckpt.patching.package import Package, locate_package

__all__ = [
    "Edit",
    "FileDiff",
    "Finding",
    "Package",
    "Patch",
    "PatchError",
    "PatchedFile",
    "applied_patches",
    "apply_patches",
    "check_patches",
    "compose",
    "format_diff",
    "locate_package",
    "parse_diff",
    "patches_directory",
    "read_patches",
    "revert_patches",
]

"""The steps of runs in the memory of a node: their directories, who holds them, and their removal.

A run's directory has the name of the run, a note of its root, and a directory for each step. The manager of one rank
of the node holds its lock.

Tested in tests/manager/test_memory_tier.py and tests/cli/test_memory_runs.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass

from paddle_flexckpt.catalog import CorruptCheckpointError
from paddle_flexckpt.catalog.errors import TakenError
from paddle_flexckpt.media.backend import Backend, exists, write_file
from paddle_flexckpt.media.removals import remove, removing
from paddle_flexckpt.native.manifest import read_save_token

NOTE = "memory.json"
_RUN = re.compile(r"[0-9a-f]{16}", re.ASCII)
_STEP = re.compile(r"step_(\d{8,})", re.ASCII)
_MANIFEST = "0.manifest"


@dataclass(frozen=True)
class MemoryRun:
    """The steps of a run in the memory of a node.

    Attributes:
        path: Their directory.
        root: The root of the run's manager.
        step: The newest of them; None if there is none.
        bytes: Bytes of all files.
        held: Whether a process holds them: a manager, or one that still writes a step.
    """

    path: str
    root: str
    step: int | None
    bytes: int
    held: bool


def is_run(name: object) -> bool:
    """Return whether this is the identity of a run."""
    return isinstance(name, str) and bool(_RUN.fullmatch(name))


def note_root(directory: Backend, root: str) -> None:
    """Write the note by which a run's directory is known as such."""
    write_file(directory, NOTE, json.dumps({"root": root}).encode(), "replace")


def read_root(directory: Backend) -> str | None:
    """Return the root that the note in a run's directory has; None if it has no note, and so is another directory."""
    try:
        return str(json.loads(directory.read(NOTE))["root"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def runs_of(tier: Backend, root: str) -> list[str]:
    """Return the names of the runs of a root that have a step in a directory of a memory tier."""
    runs = [(name, tier.child(name)) for name in filter(is_run, tier.names("directories"))]
    return [name for name, run in runs if read_root(run) == root and steps_in(run, whole=True)]


def steps_in(directory: Backend, whole: bool = False) -> list[int]:
    """Return the steps in a run's directory, in rising order; with ``whole`` those that have a manifest here."""
    names = [name for name in directory.names("directories") if _STEP.fullmatch(name)]
    if whole:
        names = [name for name in names if _MANIFEST in directory.child(name).names()]
    return sorted(int(name.partition("_")[2]) for name in names)


def numbers_in(directory: Backend) -> dict[int, int]:
    """Return the steps in a run's directory that have a manifest, with the number of the save; 0 if it is damaged."""
    found = dict.fromkeys(steps_in(directory, whole=True), 0)
    for step in found:
        manifest = directory.child(f"step_{step:08d}")
        with contextlib.suppress(CorruptCheckpointError, FileNotFoundError), manifest.open(_MANIFEST) as file:
            found[step] = int(read_save_token(file, manifest.where(_MANIFEST))[:8], 16)
    return found


def publish_step(directory: Backend, token: str) -> None:
    """Publish a save of a step that another node has published, if this one has prepared it, and has no newer one.

    Where it is still being written, the process that does so publishes it.
    """
    from paddle_flexckpt.foreign.paddle_files import open_to_save  # commands that list runs save nothing

    with contextlib.suppress(FileNotFoundError, TakenError), directory.locks.take():
        step = open_to_save(directory)
        if step.tokens().get(0, "") < token:
            step.publish_prepared({token})


def remove_step(directory: Backend) -> bool:
    """Remove a step's directory; return False if it is being written or read. The manifest goes first."""
    with removing(directory, _MANIFEST) as is_free:
        if is_free:
            directory.remove(_MANIFEST)
            remove(directory.path, "tree")
    return not exists(directory)


def remove_run(directory: Backend) -> bool:
    """Remove all steps of a run, and its directory; return whether nothing is left. The caller holds its lock."""
    left = [name for name in directory.names("directories") if not remove_step(directory.child(name))]
    if not left:
        for name in directory.names():  # a process may have died while it wrote the note
            if name.startswith(NOTE):
                directory.remove(name)
        directory.remove_directory()
    return not left


def remove_unheld(tier: Backend, run: MemoryRun) -> bool:
    """Remove a run of a tier's directory that no process holds; return whether that was done."""
    directory = tier.child(os.path.basename(run.path))
    with removing(directory) as is_free:
        return is_free and not run.held and remove_run(directory)


def bytes_in(path: str) -> int:
    """Return the bytes of all files below a directory."""
    total = 0
    for parent, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # it has just been removed
                total += os.stat(os.path.join(parent, name), follow_symlinks=False).st_size
    return total


def find_runs(tier: Backend) -> list[MemoryRun]:
    """Return the runs in a directory of a memory tier; none if it is another directory."""
    found = []
    for name in sorted(filter(is_run, tier.names("directories"))) if tier.has_path else ():
        run = tier.child(name)
        root = read_root(run)
        if root is not None:
            steps = [run.child(each) for each in run.names("directories") if _STEP.fullmatch(each)]
            held = any(each.locks.is_taken() for each in (run, *steps))
            newest = max(steps_in(run, whole=True), default=None)
            found.append(MemoryRun(run.path, root, newest, bytes_in(run.path), held))
    return found

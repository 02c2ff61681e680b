"""The removal of one checkpoint of a directory, by its id. Tested in tests/cli/test_clean_id.py."""

from __future__ import annotations

import contextlib

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.native.save_directory import SaveDirectory
from paddle_flexckpt.native.save_names import SaveNames


def remove_checkpoint(directory: SaveDirectory, unique_id: int) -> list[str]:
    """Remove the checkpoint of an id, and return the names of its files.

    Its save is marked as begun before the manifest goes. So an interrupted removal leaves what a dead save leaves, and
    the next save or `flexckpt clean` removes it.

    Raises:
        ValidationError: There is no such checkpoint.
        CheckpointError: It is being read, or a save is running in the directory; nothing was removed.
        CorruptCheckpointError: Its manifest is damaged, so it is not known which files are its own.
    """
    backend, name = directory.backend, f"{unique_id}.manifest"
    with contextlib.ExitStack() as stack:
        stack.enter_context(directory.lock())
        claim = backend.locks.claim(name)
        if claim is None:
            raise CheckpointError(f"{backend.where(name)} is being read. Remedy (FC403): wait until that is over")
        stack.enter_context(claim)
        manifest = directory.read_manifest(unique_id, ())
        files, save = directory.files_of(manifest), SaveNames(unique_id, manifest.save_token)
        there = {*backend.names()}.intersection((name, *files))
        directory.mark_save(save, manifest.world_size)
        backend.remove(name)
        backend.sync()
        directory.cleaner.remove_save(save, files)
        directory.companion.update()
    return sorted(there)

"""The removal of steps' checkpoints, and of leftovers of dead saves.

An interrupted removal is finished by the next manager. First a file of the root, ``step_{step:08d}.removing``, is
written with the names of the checkpoint's files. Then the manifest is removed, and with it the checkpoint; then the
files, the list of them, and last the directory. A step that has this list and no manifest is removed by the next
retention. Nothing else is ever removed: no checkpoint that is being saved or read, and no file of another origin.

Tested in tests/manager/test_step_directories.py.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Sequence

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.foreign.paddle_files import open_to_save
from paddle_flexckpt.media.backend import Backend, exists, map_files, write_file
from paddle_flexckpt.media.file_names import check_file_name
from paddle_flexckpt.media.removals import removing
from paddle_flexckpt.native.save_names import is_message, marked_by

logger = logging.getLogger("paddle_flexckpt")

UNIQUE_ID = 0
MANIFEST = f"{UNIQUE_ID}.manifest"
_REMOVING = re.compile(r"step_(\d{8,})\.removing", re.ASCII)


class Removal:
    """The removal of checkpoints from the directories of a root. One process uses it at a time."""

    def __init__(self, root: Backend) -> None:
        """Take the root directory."""
        self._root = root

    def _directory(self, step: int) -> Backend:
        return self._root.child(name_of(step))

    def remove(self, step: int, token: str) -> bool:
        """Remove the checkpoint of the save with this token; return whether that could be done now."""
        backend = self._directory(step)
        directory = open_to_save(backend)
        with removing(backend, MANIFEST) as is_free:
            if not is_free:
                return False
            try:
                manifest = directory.read_manifest(UNIQUE_ID, ())
            except (CorruptCheckpointError, ValidationError) as error:
                logger.warning(f"the checkpoint of step {step} is left alone: {error}")
                return False
            if manifest.save_token != token:
                return False  # another process has saved this step again
            directory.cleaner.remove_dead_saves()
            files = directory.files_of(manifest)
            write_file(self._root, _marker_of(step), json.dumps({"files": files}).encode())
            self._root.sync()
            backend.remove(MANIFEST)
            backend.sync()
            _remove_files(backend, files)
            self._end(step)
        backend.remove_directory()
        logger.info(f"removed the checkpoint of step {step}, {backend.path}")
        return True

    def finish(self, step: int) -> bool:
        """Finish an interrupted removal; return whether that could be done now."""
        backend = self._directory(step)
        # The listing of an object store may be out of date, so its directory is not looked for.
        if backend.has_path and not exists(backend):
            self._end(step)
            return True
        with removing(backend) as is_free:
            if not is_free:
                return False
            directory = open_to_save(backend)
            if directory.has_manifest(UNIQUE_ID):
                # The removal had removed no file yet, or the step has been saved again.
                self._root.remove(_marker_of(step))
                return True
            try:
                files = [check_file_name(name) for name in json.loads(self._root.read(_marker_of(step)))["files"]]
            except FileNotFoundError:
                return True  # another job's manager has just finished it
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                note = self._root.where(_marker_of(step))
                logger.warning(f"{note} cannot be understood, and is left alone: {error}")
                return False
            _remove_files(backend, files)
            # A power loss may have brought back files that had been removed.
            directory.cleaner.remove_dead_saves()
            directory.companion.remove_refusal()
            self._end(step)
        backend.remove_directory()
        return True

    def _end(self, step: int) -> None:
        """Remove the step's files in the root, the list of the removal last; the checkpoint's own files are removed.

        The caller holds the directory's lock, so the files are not those of a later save.
        """
        self._root.remove(page_of(step))
        self._root.remove(report_of(step))
        self._root.sync()
        self._root.remove(_marker_of(step))

    def remove_dead_save(self, step: int) -> bool:
        """Remove the leftovers of saves that died, and the directory if nothing else is in it.

        Files of unknown origin stay: their manifest may have been lost. Returns whether there were leftovers.
        """
        backend = self._directory(step)
        directory, names = open_to_save(backend), backend.names()
        begun = any(marked_by(name) or is_message(name) for name in names)
        # A save that lost its marker in a power loss may have left the refusal for Paddle's loader.
        refused = list(names) == [directory.companion.name]
        if not (begun or refused) and (names or backend.names("directories")):
            return False
        with removing(backend) as is_free:
            if not is_free:
                return False
            removed = directory.cleaner.remove_dead_saves()
            directory.companion.remove_refusal()
        backend.remove_directory()
        return bool(removed)


def interrupted(names: Iterable[str]) -> list[int]:
    """Return the steps whose removal has begun, by the files of the root."""
    return sorted(int(match[1]) for match in map(_REMOVING.fullmatch, names) if match)


def name_of(step: int) -> str:
    """Return the name of a step's directory."""
    return f"step_{step:08d}"


def page_of(step: int) -> str:
    """Return the name of a step's page, a file of the root."""
    return f"{name_of(step)}.html"


def _marker_of(step: int) -> str:
    return f"{name_of(step)}.removing"


def report_of(step: int) -> str:
    """Return the name of a step's report, a file of the root."""
    return f"{name_of(step)}.report.json"


def _remove_files(directory: Backend, files: Sequence[str]) -> None:
    """Remove data files durably."""
    map_files(directory, directory.remove, files)
    directory.sync()
    open_to_save(directory).companion.update()

"""The steps of a root, by the names of its directories and of their files.

Tested in tests/manager/test_step_directories.py and tests/manager/test_runs.py.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import re
from collections.abc import Collection, Sequence

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.manager.removal import MANIFEST, UNIQUE_ID, interrupted, name_of
from paddle_flexckpt.media.backend import Backend, map_files
from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.native.directory import CheckpointDirectory, lost_text
from paddle_flexckpt.native.save_names import lost_ids, marked_by

logger = logging.getLogger("paddle_flexckpt")

_STEP = re.compile(r"step_(\d{8,})", re.ASCII)
# Names that are so alike (`difflib.get_close_matches`) may be one name, misspelt.
_ALIKE = 0.75


class StepListing:
    """The step directories of a root, as they are listed."""

    def __init__(self, root: Backend) -> None:
        """Take the root directory; it need not exist."""
        self._root = root
        # The files of the directories that were found without a checkpoint by the last :meth:`steps`.
        self._without: dict[int, Sequence[str]] = {}

    def directories(self) -> list[int]:
        """Return the steps that have a directory, in rising order."""
        matches = [(name, _STEP.fullmatch(name)) for name in self._root.names("directories")]
        return sorted(int(match[1]) for name, match in matches if match and name_of(int(match[1])) == name)

    def steps(self, trusted: Collection[int] = ()) -> list[int]:
        """Return the steps that have a checkpoint, damaged or not, in rising order.

        The directories of ``trusted`` steps are not listed: a read finds out whether they have a checkpoint.
        """
        before: list[int] | None = None
        while True:
            steps = self.directories()
            unknown = [step for step in steps if step not in trusted]
            listed = zip(unknown, map_files(self._root, self._names, unknown))
            self._without = {step: names for step, names in listed if names is not None and MANIFEST not in names}
            found = [step for step in steps if step not in self._without]
            # A removed step may have been replaced by a new one since the listing: list again.
            if (steps and not self._without) or found == before:
                return found
            before = found

    def _names(self, step: int) -> Sequence[str] | None:
        with contextlib.suppress(OSError):
            return self._root.child(name_of(step)).names()
        return None  # a read raises the error

    def begun(self) -> list[int]:
        """Return the steps without a checkpoint, as of the last :meth:`steps`, whose save has begun."""
        return [step for step, names in self._without.items() if any(map(marked_by, names))]

    def lost(self) -> list[int]:
        """Return the steps without a checkpoint, as of the last :meth:`steps`, whose manifest has been lost.

        Only where there may be one are directories listed again: a save or a removal may have been under way.
        """
        lost = [step for step, names in self._without.items() if UNIQUE_ID in lost_ids(names, by_token=True)]
        return sorted({*filter(self._is_lost, lost)} - {*interrupted(self._root.names())}) if lost else []

    def _is_lost(self, step: int) -> bool:
        directory = CheckpointDirectory(self._root.child(name_of(step)))
        return UNIQUE_ID in lost_ids(directory.backend.names()) and not directory.has_manifest(UNIQUE_ID)

    def explain_lost(self, step: int) -> str:
        """Return the text about a step whose manifest has been lost."""
        return f"step {step}: {lost_text(self._root.child(name_of(step)), [UNIQUE_ID])}"

    def lost_above(self, steps: Collection[int], fails: bool) -> dict[int, str]:
        """Return the steps above all of ``steps`` whose manifest has been lost, each with its text; log a warning.

        Raises:
            CorruptCheckpointError: There is one, and ``fails`` is True.
        """
        found = {step: self.explain_lost(step) for step in self.lost() if step > max(steps, default=-1)}
        if found and fails:
            raise CorruptCheckpointError("; ".join(found.values()))
        for text in found.values():
            logger.warning(text)
        return found

    def check_no_checkpoint(self) -> None:
        """Raise ValidationError if the root itself is a checkpoint, such as a step of a run."""
        if CheckpointDirectory(self._root).list_ids():
            above = os.path.dirname(self._root.path)
            raise ValidationError(
                f"{self._root.path} is a checkpoint itself, not a directory of steps. Remedy (FC301): give the manager "
                f"the directory of the run, such as {above}; load a single checkpoint by fc.load"
            )

    def tell_of_new_run(self) -> None:
        """Log that a run begins in the root, and whether a directory beside it, with steps, has nearly its name."""
        above, name = os.path.split(self._root.path.rstrip("/"))
        beside = open_backend(above).names("directories") if self._root.has_path and above else []
        alike = difflib.get_close_matches(name, [each for each in beside if each != name], 3, _ALIKE)
        runs = [each for each in alike if StepListing(open_backend(os.path.join(above, each))).directories()]
        logger.info(f"a new run begins in {self._root.path}" + (f"; beside it, {runs[0]} has steps" if runs else ""))

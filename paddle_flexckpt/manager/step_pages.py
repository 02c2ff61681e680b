"""Pages beside the steps: the save's report and who saved what. Tested in tests/manager/test_step_pages.py."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Union

from paddle_flexckpt.background import SaveHandle
from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.engine.holders import find_holders
from paddle_flexckpt.manager.steps import UNIQUE_ID, StepDirectories
from paddle_flexckpt.pages.holders import MOST_DRAWN
from paddle_flexckpt.pages.saves import save_page
from paddle_flexckpt.report import SaveReport

_Saved = Union[SaveReport, SaveHandle]


class StepPages:
    """The saves that have no page yet, the same on every rank. The coordinator writes the pages."""

    def __init__(self, steps: StepDirectories, is_wanted: bool) -> None:
        """Take the directories, and whether pages are wanted at all."""
        self._steps, self._is_wanted = steps, is_wanted
        self._saves: dict[int, tuple[_Saved, Mapping[str, float]]] = {}

    def __len__(self) -> int:
        return len(self._saves)

    def add(self, step: int, saved: _Saved, metrics: Mapping[str, float]) -> None:
        """Add a save that has ended, or one in the background that has begun."""
        if self._is_wanted:
            self._saves[step] = saved, dict(metrics)

    def take(self, pending: Collection[int]) -> dict[int, tuple[_Saved, Mapping[str, float]]]:
        """Return the saves that have ended on all ranks, and forget them."""
        ended = {step: saved for step, saved in self._saves.items() if step not in pending}
        self._saves = {step: saved for step, saved in self._saves.items() if step in pending}
        return ended

    def write(self, ended: Mapping[int, tuple[_Saved, Mapping[str, float]]]) -> None:
        """Write the pages of saves that have ended, except failed ones.

        Raises:
            CheckpointError: A page could not be written; the others have been.
        """
        problems = []
        for step, (saved, metrics) in ended.items():
            try:
                if isinstance(saved, SaveHandle):
                    if saved.error is not None:
                        continue
                    saved = saved.result(0)
                holders = find_holders(self._steps.directory(step), unique_id=UNIQUE_ID, largest=MOST_DRAWN)
                self._steps.write_page(step, save_page(saved, holders, step, metrics))
            except (CheckpointError, OSError) as error:
                problems.append(f"the page of step {step} could not be written: {type(error).__name__}: {error}")
        if problems:
            raise CheckpointError("; ".join(problems))

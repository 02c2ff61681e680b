"""The work after a save: pages, reports, and the removal of what need not be kept.

Tested in tests/manager/test_step_pages.py, tests/manager/test_reports.py and tests/manager/test_step_directories.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Union

from paddle_flexckpt.background import SaveHandle
from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.manager.pending_steps import PendingSteps
from paddle_flexckpt.manager.policies import KeepPolicy
from paddle_flexckpt.manager.removal import UNIQUE_ID
from paddle_flexckpt.manager.step_directories import StepDirectories
from paddle_flexckpt.pages.holder_pages import MOST_DRAWN, save_page
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.report import SaveReport
from paddle_flexckpt.tools.holders import find_holders

Saved = Union[SaveReport, SaveHandle]


class FollowUp:
    """The saves that have no page or report yet, the same on every rank. The coordinator does the work."""

    def __init__(
        self,
        comm: Communicator,
        steps: StepDirectories,
        pending: PendingSteps,
        keep: Sequence[KeepPolicy],
        pages: bool,
        reports: bool,
    ) -> None:
        """Take the directories, the saves in the background, the policies, and whether pages and reports are wanted."""
        self._comm, self._steps, self._pending, self._keep = comm, steps, pending, keep
        self._wants_pages, self._wants_reports = pages, reports
        self._saves: dict[int, tuple[Saved, Mapping[str, float]]] = {}

    @property
    def is_due(self) -> bool:
        """Return whether there is a page or a report to write."""
        return bool(self._saves) or (self._wants_reports and self._pending.has_reports)

    def add(self, step: int, saved: Saved, metrics: Mapping[str, float]) -> None:
        """Add a save that has ended, or one in the background that has begun."""
        if self._wants_pages:
            self._saves[step] = saved, dict(metrics)

    def run(self, done: str, reports: Mapping[int, SaveReport] | None = None) -> None:
        """Write pages and reports, and apply retention. Communicates.

        Args:
            done: The text about what has succeeded, for errors.
            reports: Reports, by step, besides those of saves in the background.
        """
        context, busy = f"in {self._steps.path!r}", self._pending.steps
        ended = {step: saved for step, saved in self._saves.items() if step not in busy}
        self._saves = {step: saved for step, saved in self._saves.items() if step in busy}
        if ended:
            self._as_coordinator(lambda: self._write_pages(ended), f"{done}, but not all pages {context}")
        written = {**self._pending.take_reports(), **(reports or {})} if self._wants_reports else {}

        def retain() -> None:
            for step, report in written.items():
                self._steps.write_report(step, report)
            self.retain()

        what = "a report could not be written, or what need not be kept" if written else "what need not be kept"
        self._as_coordinator(retain, f"{done}, but {what} {context} could not be removed")

    def retain(self) -> None:
        """Remove what need not be kept; errors as of :meth:`StepDirectories.retain`. Only the coordinator does it."""
        pending = self._pending
        self._steps.retain(self._keep, pending.newest, pending.steps, pending.doubtful)

    def _as_coordinator(self, work: Callable[[], None], context: str) -> None:
        def step() -> tuple[None, bytes]:
            if self._comm.position == 0:
                work()
            return None, b""

        self._comm.together(step, context)

    def _write_pages(self, ended: Mapping[int, tuple[Saved, Mapping[str, float]]]) -> None:
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

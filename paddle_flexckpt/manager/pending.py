"""Track saves in the background that are not known to have ended, on all ranks alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from paddle_flexckpt.background import SaveHandle
from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.live.communicator import Communicator

# One byte for each save, in a message of each rank.
_RUNNING, _ENDED, _FAILED = range(3)


class PendingSteps:
    """Track the saves in the background. Every rank has the same ones: only :meth:`collect` communicates."""

    def __init__(self, comm: Communicator) -> None:
        """Take the ranks that save."""
        self._comm = comm
        self._saves: list[tuple[int, SaveHandle]] = []

    @property
    def steps(self) -> set[int]:
        """Return their steps."""
        return {step for step, _ in self._saves}

    def add(self, step: int, handle: SaveHandle) -> None:
        """Note a save that has begun."""
        self._saves.append((step, handle))

    def collect(self, context: str, wait_for: int | Literal["all"] | None = None) -> None:
        """Forget those that have ended on all ranks, after waiting for those of a step, or all.

        Without any, nothing is communicated.

        Raises:
            CheckpointError: One has failed that nobody was told of; the same on every rank, once.
        """
        if not self._saves:
            return

        def look() -> tuple[None, bytes]:
            for step, handle in self._saves:
                if wait_for in ("all", step):
                    handle.wait()
            return None, bytes(_state(handle) for _, handle in self._saves)

        _, answers = self._comm.together(look, context)
        states = [set(column) for column in zip(*answers)]
        failed = [handle for (_, handle), seen in zip(self._saves, states) if _FAILED in seen]
        self._saves = [save for save, seen in zip(self._saves, states) if _RUNNING in seen and _FAILED not in seen]
        if failed:
            # It has ended on one rank, so it soon will on the others.
            self._comm.together(lambda: (None, _raise(failed)), f"{context}: an earlier save failed")


def _state(handle: SaveHandle) -> int:
    if not handle.done():
        return _RUNNING
    return _FAILED if handle.error is not None and not handle.seen else _ENDED


def _raise(handles: Sequence[SaveHandle]) -> bytes:
    errors = []
    for handle in handles:
        handle.wait()
        if handle.error is not None and not handle.seen:
            try:
                handle.result()
            except CheckpointError as error:
                errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise CheckpointError("; ".join(map(str, errors)))
    return b""

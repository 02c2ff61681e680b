"""The memory of targets and scratch during a load."""

from __future__ import annotations

import numpy as np

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.execution.computation import Computation
from paddle_flexckpt.execution.work import Work
from paddle_flexckpt.runtime.state import LocalState
from paddle_flexckpt.runtime.targets import Wanted
from paddle_flexckpt.runtime.tensors import HostTensor


class TargetMemory:
    """The memory of a load's rows: staged copies go back when the last of them has arrived, scratch when it is used."""

    def __init__(self, state: LocalState, wanted: Wanted, work: Work, piece_targets: np.ndarray | None = None) -> None:
        """Opens nothing yet.

        Args:
            state: The targets.
            wanted: What to fill.
            work: The same, with scratch.
            piece_targets: int64, row of every planned piece, where :meth:`piece_done` will be called for each; without
                it, staged copies go back at the end only.
        """
        self._state = state
        self._wanted = wanted
        self._work = work
        self._left: np.ndarray | None = None
        if piece_targets is not None:
            parts = np.concatenate([piece_targets, np.asarray([tile.row for tile in work.tiles], dtype=np.int64)])
            self._left = np.bincount(parts, minlength=len(work.origin))
        self._open: dict[int, HostTensor] = {}
        self._compare: dict[int, np.ndarray] = {}
        self._computation = Computation(work, self.storage, self.piece_done)

    def storage(self, row: int) -> np.ndarray:
        """The 1-D memory of a row."""
        origin = int(self._work.origin[row])
        if origin < 0:
            return self._computation.scratch(row)
        if origin in self._wanted.same_memory:
            if row not in self._compare:
                first = HostTensor(self._state.tensor(origin)).array
                self._compare[row] = np.empty_like(first)
            return self._compare[row]
        if row not in self._open:
            self._open[row] = HostTensor(self._state.tensor(origin))
        return self._open[row].array

    def advance(self, row: int) -> None:
        """Computes every tile whose operands have arrived when all rows before the given one have been filled."""
        self._computation.advance(row)

    @property
    def peak_scratch_bytes(self) -> int:
        """The most scratch that was held at any time."""
        return self._computation.peak_scratch_bytes

    def piece_done(self, row: int) -> None:
        """Notes that a piece of a row has arrived."""
        if self._left is None:
            return
        self._left[row] -= 1
        if self._left[row] == 0 and row in self._open:
            self._open.pop(row).store()

    def finish(self) -> None:
        """Computes the last tiles, puts back what is still staged and compares tied targets.

        Raises:
            CheckpointError: Two source keys that go into one tied parameter differ in value.
        """
        self.advance(len(self._work.origin))
        for host in self._open.values():
            host.store()
        self._open.clear()
        for row, compare in self._compare.items():
            other = self._wanted.same_memory[int(self._work.origin[row])]
            stored = HostTensor(self._state.tensor(other)).array
            for copy in self._work.kept.get(row, ()):
                copy.scatter_into(compare)[...] = copy.scatter_into(stored)
            if stored.tobytes() != compare.tobytes():
                first, second = self._wanted.catalog.key_name(other), self._work.catalog.key_name(row)
                raise CheckpointError(
                    f"targets {first!r} and {second!r} are one tied parameter, but the source holds different values "
                    f"for them; the target has those of {first!r}. Remedy: untie the parameters, or leave one of the "
                    "keys out"
                )

"""The memory of targets and scratch during a load."""

from __future__ import annotations

import numpy as np

from paddle_flexckpt.catalog import CheckpointError, dtype_of
from paddle_flexckpt.engine.computation import Computation
from paddle_flexckpt.engine.copies import AnyStorage
from paddle_flexckpt.engine.plan import Work
from paddle_flexckpt.live.state import LocalState
from paddle_flexckpt.live.targets import Wanted
from paddle_flexckpt.live.tensors import HostTensor, device_of, dtype_name, element_count, open_storage


class TargetMemory:
    """Hold the memory of a load's rows.

    A strided host view is filled in a copy, and so is a device tensor that is read from files: such copies go back when
    the last of their pieces has arrived. A device tensor that is filled by a reshard is written in place. Scratch is
    freed when it is used up.
    """

    def __init__(self, state: LocalState, wanted: Wanted, work: Work, piece_targets: np.ndarray | None = None) -> None:
        """Open nothing yet.

        Args:
            state: The targets.
            wanted: What to fill.
            work: The same, with scratch.
            piece_targets: int64, row of every planned piece, where :meth:`piece_done` will be called for each; without
                it, copies go back at the end only, and device tensors are written in place.
        """
        self._state = state
        self._wanted = wanted
        self._work = work
        self._left: np.ndarray | None = None
        if piece_targets is not None:
            parts = np.concatenate([piece_targets, np.asarray([tile.row for tile in work.tiles], dtype=np.int64)])
            self._left = np.bincount(parts, minlength=len(work.origin))
        self._open: dict[int, HostTensor] = {}
        self._on_device: dict[int, AnyStorage] = {}
        self._compare: dict[int, np.ndarray] = {}
        # What was stored into tensors that others are compared with: so that nothing is copied back from a device.
        self._stored: dict[int, np.ndarray] = {}
        self._computation = Computation(work, self.storage, self.piece_done)

    def storage(self, row: int) -> AnyStorage:
        """Return the storage of a row, to be written."""
        if self._left is None and int(self._work.origin[row]) >= 0:
            origin = int(self._work.origin[row])
            tensor = self._state.tensor(origin)
            if origin not in self._wanted.same_memory and device_of(tensor) is not None:
                if row not in self._on_device:
                    self._on_device[row] = open_storage(tensor)
                return self._on_device[row]
        return self.host_storage(row)

    def host_storage(self, row: int) -> np.ndarray:
        """Return the 1-D host memory in which a row is filled."""
        origin = int(self._work.origin[row])
        if origin < 0:
            return self._computation.scratch(row)
        tensor = self._state.tensor(origin)
        if origin in self._wanted.same_memory:
            if row not in self._compare:
                self._compare[row] = np.empty(element_count(tensor), dtype=dtype_of(dtype_name(tensor)).numpy)
            return self._compare[row]
        if row not in self._open:
            # Every element is written, which the plan has proved; but statements may keep some of a target's own.
            self._open[row] = HostTensor(tensor, fresh=row not in self._work.kept)
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
            self._store(row)

    def _store(self, row: int) -> None:
        host = self._open.pop(row)
        host.store()
        origin = int(self._work.origin[row])
        if host.staged and origin in self._wanted.same_memory.values():
            self._stored[origin] = host.array

    def finish(self) -> None:
        """Computes the last tiles, puts back what is still staged and compares tied targets.

        Raises:
            CheckpointError: Two source keys that go into one tied parameter differ in value.
        """
        self.advance(len(self._work.origin))
        for row in list(self._open):
            self._store(row)
        for row, compare in self._compare.items():
            other = self._wanted.same_memory[int(self._work.origin[row])]
            stored = self._stored.get(other)
            if stored is None:
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

"""The memory of targets and scratch during a load, and the computation of what is not just moved."""

from __future__ import annotations

import math

import numpy as np

from paddle_flexckpt.catalog import CheckpointError, dtype_of
from paddle_flexckpt.runtime.state import LocalState
from paddle_flexckpt.runtime.targets import Wanted
from paddle_flexckpt.runtime.tensors import HostTensor
from paddle_flexckpt.runtime.work import Tile, Work


class TargetMemory:
    """The memory of a load's rows: staged copies go back when the last of them has arrived, scratch when it is used.

    Attributes:
        scratch_bytes: Bytes of scratch that are held.
        peak_scratch_bytes: The most that was held at any time.
    """

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
        self._scratch: dict[int, np.ndarray] = {}
        self._next_tile = 0
        self.scratch_bytes = self.peak_scratch_bytes = 0

    def storage(self, row: int) -> np.ndarray:
        """The 1-D memory of a row."""
        origin = int(self._work.origin[row])
        if origin < 0:
            return self._scratch_storage(row)
        if origin in self._wanted.same_memory:
            if row not in self._compare:
                first = HostTensor(self._state.tensor(origin)).array
                self._compare[row] = np.empty_like(first)
            return self._compare[row]
        if row not in self._open:
            self._open[row] = HostTensor(self._state.tensor(origin))
        return self._open[row].array

    def _scratch_storage(self, row: int) -> np.ndarray:
        if row not in self._scratch:
            catalog = self._work.catalog
            count = math.prod(catalog.shape[row].tolist())
            memory = self._scratch[row] = np.empty(count, dtype=dtype_of(catalog.dtype_name(row)).numpy)
            self.scratch_bytes += memory.nbytes
            self.peak_scratch_bytes = max(self.peak_scratch_bytes, self.scratch_bytes)
        return self._scratch[row]

    def advance(self, row: int) -> None:
        """Computes every tile whose operands have arrived when all rows before the given one have been filled."""
        tiles = self._work.tiles
        while self._next_tile < len(tiles) and tiles[self._next_tile].after < row:
            self._compute(tiles[self._next_tile])
            self._next_tile += 1

    def _compute(self, tile: Tile) -> None:
        operands = [self.storage(row).reshape(shape) for row, shape in zip(tile.operands, tile.shapes)]
        result = np.asarray(tile.step.run(tile.box, operands))
        if result.shape != tile.box.shape:
            key = self._work.catalog.key_name(tile.row)
            raise CheckpointError(
                f"the values computed for key {key!r} have shape {list(result.shape)}; expected "
                f"{list(tile.box.shape)} for {tile.box}. Targets are partly overwritten. Remedy: report this step, "
                f"{type(tile.step).__name__}, as a defect"
            )
        for dtype in tile.dtypes:
            result = result.astype(dtype, copy=False)
        tile.copy.scatter_into(self.storage(tile.row))[...] = result
        for row in tile.freed:
            memory = self._scratch.pop(row, None)
            self.scratch_bytes -= 0 if memory is None else memory.nbytes
        self.piece_done(tile.row)

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

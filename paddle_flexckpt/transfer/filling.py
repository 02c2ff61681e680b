"""Fill a plan's rows: open and store targets, hold scratch, and compute tiles when their operands are there.

Tested in tests/transfer/test_filling.py and tests/loading/test_aoa_tiles.py.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from functools import cached_property

import numpy as np

from paddle_flexckpt.catalog import Catalog, CheckpointError, dtype_of
from paddle_flexckpt.catalog.errors import OverflowingCastError
from paddle_flexckpt.native.stretches import ADDRESSES, FIRST_ADDRESS
from paddle_flexckpt.transfer.copies import AnyStorage, DeviceStorage, copy_values
from paddle_flexckpt.transfer.plan import FillPlan, Tile
from paddle_flexckpt.transfer.targets import Memory, OpenTarget


class Filling:
    """The memory of a plan's rows while they are filled.

    A strided host view is filled through a copy, which is stored when its last piece has arrived. A device tensor is
    written in place. Scratch is freed after its last use.

    Attributes:
        peak_scratch_bytes: The most scratch at any time.
    """

    def __init__(self, plan: FillPlan, memory: Memory, piece_targets: np.ndarray | None = None) -> None:
        """Open nothing yet.

        Args:
            plan: The plan.
            memory: The memory of the targets.
            piece_targets: int64, row of every planned piece, where :meth:`piece_done` will be called for each; without
                it, copies are stored only at the end.
        """
        self._plan, self._memory = plan, memory
        self._left: np.ndarray | None = None
        if piece_targets is not None:
            parts = np.concatenate([piece_targets, np.asarray([tile.row for tile in plan.tiles], dtype=np.int64)])
            self._left = np.bincount(parts)
        self._open: dict[int, OpenTarget] = {}
        self._scratch: dict[int, np.ndarray] = {}
        self._next_tile = 0
        self._scratch_bytes = self.peak_scratch_bytes = 0

    @cached_property
    def addresses(self) -> np.ndarray:
        """Return int64 per row: the address of a target that is filled in place, or -1."""
        addresses, known = np.full(len(self._plan.catalog), -1, dtype=np.int64), self._memory.addresses()
        if known is not None:
            addresses[: self._plan.targets] = known
        return addresses

    @property
    def catalog(self) -> Catalog:
        """Return the rows."""
        return self._plan.catalog

    def portions(self, rows: np.ndarray) -> Iterator[tuple[int, int]]:
        """Yield ranges of the rows of pieces, in the order of filling, without a tile in between."""
        after = [tile.after for tile in self._plan.tiles]
        due = np.searchsorted(after, self._plan.turn[rows])
        edges = np.flatnonzero(np.diff(due)) + 1
        yield from zip([0, *edges.tolist()], [*edges.tolist(), len(rows)])

    @cached_property
    def _devices(self) -> dict[int, DeviceStorage]:
        """Return the storages of the targets on devices, which are written in place."""
        if not self._memory.devices:
            return {}
        rows = np.flatnonzero(self.addresses[: self._plan.targets] < 0).tolist()
        found = {row: self._memory.on_device(row) for row in rows}
        return {row: storage for row, storage in found.items() if storage is not None}

    @cached_property
    def on_device(self) -> np.ndarray:
        """Return bool per row: whether it is a target on a device."""
        found = np.zeros(len(self._plan.catalog), dtype=bool)
        found[list(self._devices)] = True
        return found

    def device_storage(self, row: int) -> DeviceStorage:
        """Return the storage of a target on a device."""
        return self._devices[row]

    def storage(self, row: int) -> AnyStorage:
        """Return the storage of a row, for writing."""
        return self._devices[row] if row in self._devices else self.host_storage(row)

    def host_buffers(self, count: int, nbytes: int) -> contextlib.AbstractContextManager[list[np.ndarray]]:
        """Lend buffers through which devices are filled."""
        return self._memory.host_buffers(count, nbytes)

    def host_storage(self, row: int) -> np.ndarray:
        """Return the 1-D host memory through which a row is filled."""
        if not self._plan.is_target(row):
            return self._scratch_of(row)
        if self.addresses[row] >= 0:
            begin, dtype = int(self.addresses[row]) - FIRST_ADDRESS, dtype_of(self._plan.catalog.dtype_name(row)).numpy
            return np.ndarray(int(self._plan.size[row]), dtype, ADDRESSES, begin)
        if row not in self._open:
            # The plan writes every element, except those that statements keep.
            self._open[row] = self._memory.open(row, fresh=row not in self._plan.kept)
        return self._open[row].array

    def _scratch_of(self, row: int) -> np.ndarray:
        """Return the memory of a scratch row; it exists from the first call until its last tile is computed."""
        if row not in self._scratch:
            dtype = dtype_of(self._plan.catalog.dtype_name(row)).numpy
            memory = self._scratch[row] = np.empty(math.prod(self._plan.catalog.shape[row].tolist()), dtype)
            self._scratch_bytes += memory.nbytes
            self.peak_scratch_bytes = max(self.peak_scratch_bytes, self._scratch_bytes)
        return self._scratch[row]

    def advance(self, row: int) -> None:
        """Compute every tile whose operands are complete when all rows before this one are filled."""
        self.advance_to(int(self._plan.turn[row]))

    def advance_to(self, turn: int) -> None:
        """Compute every tile whose operands are complete when all rows of earlier turns are filled.

        Raises:
            CheckpointError: A step's result has another shape or dtype than it declared.
        """
        tiles = self._plan.tiles
        while self._next_tile < len(tiles) and tiles[self._next_tile].after < turn:
            self._compute(tiles[self._next_tile])
            self._next_tile += 1

    def _compute(self, tile: Tile) -> None:
        operands = [self._scratch_of(row).reshape(shape) for row, shape in zip(tile.operands, tile.shapes)]
        try:
            result = np.asarray(tile.step.run(tile.box, operands))
            self._check(tile, result)
            copy_values(tile.copy, result.reshape(-1), self.storage(tile.row), tile.row)
        except OverflowingCastError as error:
            raise error.of_key(self._plan.catalog.key_name(tile.row)) from None
        for row in tile.freed:
            self._scratch_bytes -= self._scratch.pop(row).nbytes
        self.piece_done(tile.row)

    def _check(self, tile: Tile, result: np.ndarray) -> None:
        """Raise CheckpointError if a step's result has another shape or dtype than it declared."""
        if result.shape != tile.box.shape or result.dtype != tile.dtype:
            key = self._plan.catalog.key_name(tile.row)
            raise CheckpointError(
                f"the values computed for key {key!r} are {result.dtype.name} {list(result.shape)}; expected "
                f"{tile.dtype.name} {list(tile.box.shape)} for {tile.box}. Targets are partly overwritten. "
                f"Remedy (FC603): report this step, {type(tile.step).__name__}, as a defect"
            )

    def piece_done(self, row: int) -> None:
        """Note that a piece of a row has arrived; a copy is stored with the last one."""
        if self._left is None:
            return
        self._left[row] -= 1
        if self._left[row] == 0 and row in self._open:
            self._open.pop(row).store()

    def pieces_done(self, rows: np.ndarray) -> None:
        """Note that pieces of targets that are filled in place have arrived."""
        if self._left is not None:
            np.subtract.at(self._left, rows, 1)

    def finish(self) -> None:
        """Compute the last tiles, and store the remaining copies."""
        self.advance_to(len(self._plan.order))
        for row in list(self._open):
            self._open.pop(row).store()

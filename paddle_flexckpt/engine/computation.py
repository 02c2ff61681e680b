"""Computation: the tiles of a work, computed when their operands have arrived, and the scratch that holds these."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from paddle_flexckpt.catalog import CheckpointError, dtype_of
from paddle_flexckpt.engine.copies import AnyStorage, write_values
from paddle_flexckpt.engine.plan import Tile, Work


class Computation:
    """The tiles and the scratch of a work.

    Attributes:
        scratch_bytes: Bytes of scratch that are held.
        peak_scratch_bytes: The most that was held at any time.
    """

    def __init__(self, work: Work, storage: Callable[[int], AnyStorage], done: Callable[[int], None]) -> None:
        """Computes nothing yet.

        Args:
            work: What is to be filled.
            storage: Gives the storage of any row; that of scratch rows is :meth:`scratch`.
            done: Is told the row of every tile that has been computed.
        """
        self._work = work
        self._storage = storage
        self._done = done
        self._scratch: dict[int, np.ndarray] = {}
        self._next = 0
        self.scratch_bytes = self.peak_scratch_bytes = 0

    def scratch(self, row: int) -> np.ndarray:
        """The 1-D memory of a scratch row, from when it is first asked for until its last tile is computed."""
        if row not in self._scratch:
            catalog = self._work.catalog
            count = math.prod(catalog.shape[row].tolist())
            memory = self._scratch[row] = np.empty(count, dtype=dtype_of(catalog.dtype_name(row)).numpy)
            self.scratch_bytes += memory.nbytes
            self.peak_scratch_bytes = max(self.peak_scratch_bytes, self.scratch_bytes)
        return self._scratch[row]

    def advance(self, row: int) -> None:
        """Computes every tile whose operands have arrived when all rows before the given one have been filled.

        Raises:
            CheckpointError: A step gave something else than it promised.
        """
        tiles = self._work.tiles
        while self._next < len(tiles) and tiles[self._next].after < row:
            self._compute(tiles[self._next])
            self._next += 1

    def _compute(self, tile: Tile) -> None:
        operands = [self.scratch(row).reshape(shape) for row, shape in zip(tile.operands, tile.shapes)]
        result = np.asarray(tile.step.run(tile.box, operands))
        if result.shape != tile.box.shape or result.dtype != tile.dtype:
            key = self._work.catalog.key_name(tile.row)
            raise CheckpointError(
                f"the values computed for key {key!r} are {result.dtype.name} {list(result.shape)}; expected "
                f"{tile.dtype.name} {list(tile.box.shape)} for {tile.box}. Targets are partly overwritten. Remedy: "
                f"report this step, {type(tile.step).__name__}, as a defect"
            )
        write_values(self._storage(tile.row), tile.copy, result)
        for row in tile.freed:
            memory = self._scratch.pop(row, None)
            self.scratch_bytes -= 0 if memory is None else memory.nbytes
        self._done(tile.row)

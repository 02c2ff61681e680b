"""PieceColumns: pieces that a reader gets in columns, because their targets are filled in place.

Tested in tests/transfer/test_piece_columns.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from paddle_flexckpt.algebra import StridedCopy, row_major_strides
from paddle_flexckpt.algebra.rows import all_axes, group_rows, sum_axes
from paddle_flexckpt.catalog import Catalog, dtype_of
from paddle_flexckpt.native.reader import FileReader
from paddle_flexckpt.native.stretches import AlikeCopies, Stretches
from paddle_flexckpt.planning.matching import Pieces


@dataclass(frozen=True, eq=False)
class PieceColumns:
    """Pieces, divided into those that are read in columns and the rest.

    Attributes:
        direct: bool per piece: whether it is in a column.
        stretches: Pieces in columns that are contiguous on both sides.
        alike: The other pieces in columns, by their form.
        rows: The numbers of the pieces of the stretches, and of each form.
    """

    direct: np.ndarray
    stretches: Stretches
    alike: Sequence[AlikeCopies]
    rows: Sequence[np.ndarray]

    @classmethod
    def of(cls, pieces: Pieces, source: Catalog, target: Catalog, addresses: np.ndarray) -> PieceColumns:
        """Divide pieces.

        Args:
            pieces: The pieces to read.
            source: The catalog of the files.
            target: The rows to fill.
            addresses: int64 per piece: where its target's memory is, or -1 where it has to be opened first.

        Raises:
            IndexError: A piece leaves its item or its target.
        """
        address, names = addresses, {name: i for i, name in enumerate(source.dtypes)}
        kind = source.dtype[pieces.source]
        same = kind == np.asarray([names.get(name, -1) for name in target.dtypes])[target.dtype[pieces.target]]
        direct = (address >= 0) & same & (pieces.size > 0)
        itemsize = source.itemsize[pieces.source]
        _check_inside(pieces.take(direct), source, target)
        position = pieces.source_base * itemsize
        address = address + pieces.target_base * itemsize
        plain = direct & are_contiguous(pieces.extents, pieces.source_strides)
        plain &= are_contiguous(pieces.extents, pieces.target_strides)
        columns = (pieces.source, position, pieces.size * itemsize, address)
        stretches = Stretches(*(column[plain] for column in columns))
        strided = np.flatnonzero(direct & ~plain)
        forms = alike_copies(pieces.take(strided), source, address[strided])
        alike, rows = [copies for copies, _ in forms], [strided[members] for _, members in forms]
        return cls(direct, stretches, alike, [np.flatnonzero(plain), *rows])

    def turns(self, pieces: Pieces, source: Catalog) -> Iterator[np.ndarray]:
        """Yield the numbers of the pieces in the order in which they are read: column by column, then the rest."""
        place = source.byte_offset[pieces.source] + pieces.source_base * source.itemsize[pieces.source]
        for rows in self.rows:
            yield rows[np.lexsort((place[rows], source.file[pieces.source[rows]]))]
        yield np.flatnonzero(~self.direct)

    @property
    def column(self) -> np.ndarray:
        """Return int64 per piece: the number of its column, in the order in which they are read; the rest come last."""
        found = np.full(len(self.direct), len(self.rows), dtype=np.int64)
        for number, rows in enumerate(self.rows):
            found[rows] = number
        return found

    def read(self, reader: FileReader) -> None:
        """Read the pieces in columns.

        Raises:
            CorruptCheckpointError: The files are damaged.
            OSError: The file system failed.
        """
        if len(self.stretches):
            reader.read_stretches(self.stretches)
        for copies in self.alike:
            reader.read_alike(copies)


def alike_copies(pieces: Pieces, source: Catalog, address: np.ndarray) -> list[tuple[AlikeCopies, np.ndarray]]:
    """Return pieces by their form, and the numbers of those of each; ``address``: of the first element of each."""
    kind, axes = source.dtype[pieces.source].astype(np.int64), pieces.extents.shape[1]
    position = pieces.source_base * source.itemsize[pieces.source]
    tables, found = (pieces.extents, pieces.source_strides, pieces.target_strides), []
    for form, members in group_forms([kind, *(column for table in tables for column in table.T)]):
        extents, from_strides, to_strides = (tuple(form[1 + part * axes : 1 + (part + 1) * axes]) for part in range(3))
        copy, dtype = StridedCopy(extents, 0, from_strides, 0, to_strides).simplified(), source.dtypes[form[0]]
        columns = pieces.source[members], position[members], address[members]
        found.append((AlikeCopies(copy, dtype_of(dtype).numpy, *columns), members))
    return found


def are_contiguous(extents: np.ndarray, strides: np.ndarray) -> np.ndarray:
    """Return bool per row: whether all axes together are one contiguous stretch."""
    return all_axes((extents == 1) | (strides == row_major_strides(extents)))


def group_forms(columns: Sequence[np.ndarray]) -> list[tuple[list[int], np.ndarray]]:
    """Return each distinct row of some columns with the numbers of its equal rows."""
    if not len(columns[0]):
        return []
    order, start = group_rows(columns[::-1], len(columns[0]))
    forms = np.stack([column[order[start[:-1]]] for column in columns], axis=1).tolist()
    return [*zip(forms, np.split(order, start[1:-1]))]


def _check_inside(pieces: Pieces, source: Catalog, target: Catalog) -> None:
    """Raise IndexError if a piece leaves its item or its target, as memory is written by address."""
    sides = (
        ("item", pieces.source_base, pieces.source_strides, source.size[pieces.source]),
        ("target", pieces.target_base, pieces.target_strides, target.size[pieces.target]),
    )
    for what, base, strides, size in sides:
        steps = (pieces.extents - 1) * strides
        first, last = base + sum_axes(np.minimum(steps, 0)), base + sum_axes(np.maximum(steps, 0))
        if ((first < 0) | (last >= size)).any():
            raise IndexError(f"a piece leaves its {what}")

"""Targets of a transfer: a table that is made once from a rank's state, with access to its memory.

Several targets of a rank may share memory: tied targets are filled once, others would overwrite each other.

Tested in tests/transfer/test_targets.py, tests/transfer/test_shared_targets.py, tests/memory/test_shared_memory.py and
tests/loading/test_policies.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np

from paddle_flexckpt.algebra import Box
from paddle_flexckpt.aoa import TensorMapping
from paddle_flexckpt.catalog import Catalog, Problem, ValidationError, dtype_of
from paddle_flexckpt.transfer.copies import DeviceStorage

# First and last byte address (exclusive), dtype, the part of the tensor in words, and strides unless row-major.
Place = tuple[tuple[int, int], str, str, tuple[int, ...]]


class OpenTarget(Protocol):
    """A target as host memory.

    Attributes:
        array: Its elements, 1-D, in row-major order.
        staged: Whether ``array`` is a copy.
    """

    array: np.ndarray
    staged: bool

    def store(self) -> None:
        """Store a copy's elements in the target."""


class Memory:
    """The memory of targets, by row; on the host, unless a subclass differs.

    Attributes:
        one_at_a_time: Whether files fill one target after the other, and call :meth:`filled` in between.
    """

    one_at_a_time = False

    @property
    def devices(self) -> list[str]:
        """Return the names of the targets' devices."""
        return []

    def open(self, row: int, fresh: bool) -> OpenTarget:
        """Open a target; ``fresh``: whether all of it will be written, so that a copy may drop its old values."""
        raise NotImplementedError

    def addresses(self) -> np.ndarray | None:
        """Return int64 per target: the address of a contiguous one on the host, which need not be opened; else -1.

        None: all have to be opened.
        """
        return None

    def on_device(self, row: int) -> DeviceStorage | None:
        """Return the storage of a target on a device, which is written in place; None for host memory."""
        return None

    @contextlib.contextmanager
    def host_buffers(self, count: int, nbytes: int) -> Iterator[list[np.ndarray]]:
        """Lend buffers of uint8, from which targets on devices are filled, during a with statement."""
        yield list(np.empty((count, nbytes), dtype=np.uint8))

    def overlap(self, one: int, other: int) -> bool:
        """Return whether two targets whose addresses overlap have an element in common, or may have one."""
        return False

    def beta(self, row: int, number: int) -> float | None:
        """Return the value of the optimizer's beta, 1 or 2, of which a target is a power; None if it is not known."""
        return None

    def wait(self) -> None:
        """Wait until devices have finished their work."""

    def filled(self, row: int) -> None:
        """Note that a target is filled, before the next one begins; called if ``one_at_a_time``."""

    def finish(self, untouched: Collection[str]) -> None:
        """Note the end of the transfer; ``untouched``: keys of targets that were not filled, or only partly."""


@dataclass
class OpenArray:
    """A new array as an open target."""

    array: np.ndarray
    staged: bool = False

    def store(self) -> None:
        """Do nothing: it is not a copy."""


class Trial(Memory):
    """Memory for some targets that is not theirs, by row in ``arrays``."""

    def __init__(self, targets: Targets) -> None:
        """Take the targets, whose own values only those rows begin with that are not filled whole."""
        self._targets, self.arrays = targets, dict[int, np.ndarray]()

    def open(self, row: int, fresh: bool) -> OpenTarget:
        """Open the memory of a row."""
        if row not in self.arrays:
            catalog, memory = self._targets.catalog, self._targets.memory
            empty = np.empty(int(catalog.size[row]), dtype_of(catalog.dtype_name(row)).numpy)
            self.arrays[row] = empty if fresh else memory.open(row, fresh=False).array.copy()
        return OpenArray(self.arrays[row])


@dataclass(frozen=True, eq=False)
class Targets:
    """The targets of one rank, a row each.

    Attributes:
        catalog: Names, shapes, dtypes, and orders of elements. No key has two rows, so a row is its key's number too.
        aliases: By row, other names of the same, tied parameter.
        raw_names: By row, raw names of an optimizer's state that has a structured name.
        spans: int64 ``[n, 2]``, first and last byte address (exclusive); equal for rows that share no memory.
        memory: Their memory.
        mapping: The compiled statements, if targets follow from the statements, not the other way round.
        bands: If some are filled in bands: target and box of each band of all targets. The rows of ``memory`` are
            then the bands.
        masters: Rows of masters under the names of their half-precision parameters, which are filled as masters.
        strides: Strides in bytes by row, of targets that are not contiguous in row-major order.
    """

    catalog: Catalog
    aliases: tuple[tuple[str, ...], ...]
    raw_names: tuple[tuple[str, ...], ...]
    spans: np.ndarray
    memory: Memory
    mapping: TensorMapping | None = None
    bands: tuple[tuple[int, Box], ...] = ()
    strides: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    masters: frozenset[int] = frozenset()

    @cached_property
    def self_overlapping(self) -> list[int]:
        """Return the rows whose own elements may share memory: a stride is shorter than the bytes of the inner axes."""
        found = []
        for row, strides in self.strides.items():
            reach = dtype_of(self.catalog.dtype_name(row)).itemsize
            shape = self.catalog.unpadded(row, self.catalog.shape)
            for stride, extent in sorted((abs(stride), extent) for stride, extent in zip(strides, shape) if extent > 1):
                if stride < reach:
                    found.append(row)
                    break
                reach += stride * (extent - 1)
        return found

    def place(self, row: int) -> Place | None:
        """Return the place of a target, equal for the same part in the same memory; None without elements."""
        begin, end = self.spans[row].tolist()
        if begin >= end:
            return None
        return (begin, end), self.catalog.dtype_name(row), self.catalog.describe(row), self.strides.get(row, ())


def share_memory(
    targets: Targets, names: Mapping[int, str], mapping: TensorMapping | None
) -> tuple[list[int], dict[int, int]]:
    """Return the rows to fill, and those only to compare with an earlier row of the same memory.

    ``names`` has the key of the source or the mapping by row to fill.

    Raises:
        ValidationError: Targets share memory without being the same part of a tensor, or elements of one do.
    """
    map_rows = {} if mapping is None else mapping.maps.rows_by_target

    def made_of(row: int) -> object:
        """Return a key that is equal for targets with the same values: the source's name, or part of the mapping."""
        name = names[row]
        if mapping is None or name not in mapping.tensors:
            return name
        own = map_rows.get(name, slice(0, 0))
        maps = mapping.maps.take(np.arange(own.start, own.stop))
        columns = (maps.source, maps.target_offset, maps.target_shape, maps.source_offset, maps.target_axis)
        moved = tuple(column.tobytes() for column in columns)
        return mapping.tensors[name], moved, tuple(mapping.regions.get(name, ()))

    rows = np.fromiter(names, dtype=np.int64, count=len(names))
    seen: dict[object, list[int]] = {}
    left_out, same_memory = set(), {}
    # Most targets have memory of their own, and need no check.
    for row in rows[_begin_together(targets.spans[rows])].tolist():
        earlier = seen.setdefault(targets.place(row), [])
        if any(made_of(row) == made_of(other) for other in earlier):
            left_out.add(row)  # the same memory and the same source: filled already
            continue
        if earlier:
            same_memory[row] = earlier[0]
        earlier.append(row)
    keep = [row for row in names if row not in left_out]
    _refuse_overlaps(targets, [row for row in keep if row not in same_memory])
    return keep, same_memory


def _begin_together(spans: np.ndarray) -> np.ndarray:
    """Return bool per span: whether it has elements, and another begins at the same address."""
    _, number, count = np.unique(spans[:, 0], return_inverse=True, return_counts=True)
    return (count[number] > 1) & (spans[:, 0] < spans[:, 1])


def _refuse_overlaps(targets: Targets, chosen: list[int]) -> None:
    """Raise ValidationError if elements of a target share memory, with each other or with another target's.

    ``chosen`` has one of the targets that are the same part of one memory.
    """
    rows = np.asarray(chosen, dtype=np.int64)
    rows = rows[targets.spans[rows, 0] < targets.spans[rows, 1]]
    begin, end = targets.spans[rows].T
    order = np.lexsort((end, begin))
    rows, begin, end = rows[order], begin[order], end[order]
    catalog, overlap = targets.catalog, targets.memory.overlap
    problems = [
        Problem(
            "elements of a target share memory, and one would overwrite another",
            key=catalog.key_name(row),
            rank=int(catalog.rank[row]),
            expected="memory for each element",
            got=f"steps of {list(targets.strides[row])} bytes, along axes of {catalog.unpadded(row, catalog.shape)}",
            code="FC107",
            remedy="load into a contiguous copy of it, and use that in its place",
        )
        for row in targets.self_overlapping
        if row in chosen
    ]
    # Most targets begin at or after the end of all earlier ones.
    for place in np.flatnonzero(begin[1:] < np.maximum.accumulate(end)[:-1]).tolist():
        row = int(rows[place + 1])
        earlier = np.flatnonzero(end[: place + 1] > begin[place + 1])[::-1]
        other = next((int(rows[i]) for i in earlier.tolist() if overlap(int(rows[i]), row)), None)
        if other is not None:
            problems.append(
                Problem(
                    "a target shares memory with another, and one would overwrite the other",
                    key=catalog.key_name(row),
                    rank=int(catalog.rank[row]),
                    expected="memory of its own",
                    got=f"memory of target {catalog.key_name(other)} {catalog.describe(other)}",
                    code="FC107",
                    remedy="load into a clone of one of the two, and use that in its place",
                )
            )
    if problems:
        raise ValidationError(problems)

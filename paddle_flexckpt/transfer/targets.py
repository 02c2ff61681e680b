"""Targets of a transfer: a table that is made once from a rank's state, with access to its memory.

Tested in tests/transfer/test_targets.py and tests/load/test_policies.py.
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
from paddle_flexckpt.catalog import Catalog, dtype_of
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
        """Open a target; ``fresh``: all of it will be written, so a copy need not have its old values."""
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
    def overlapping(self) -> list[int]:
        """Return the rows whose elements share memory, or may: an axis has a step shorter than the reach of others."""
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

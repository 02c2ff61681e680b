"""Targets and a source in numpy arrays, which note what is done with them. Neither files nor Paddle are needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import CatalogBuilder, Order
from paddle_flexckpt.planning.matching import ShardMatcher
from paddle_flexckpt.transfer.copies import copy_pieces
from paddle_flexckpt.transfer.files import plan_reads
from paddle_flexckpt.transfer.filling import Filling
from paddle_flexckpt.transfer.source import Source, Task
from paddle_flexckpt.transfer.targets import Memory, Targets

# What is in a copy whose values nobody needs.
RUBBISH = 77


class Open:
    """A target that is open; a staged one shows a copy of it."""

    def __init__(self, held: Held, row: int, fresh: bool) -> None:
        self._held, self._row, self.staged = held, row, row in held.staged
        own = held.arrays[row]
        self.array = (np.full(own.size, RUBBISH, own.dtype) if fresh else own.flatten()) if self.staged else own.ravel()
        held.events.append(("open", row, fresh))

    def store(self) -> None:
        self._held.events.append(("store", self._row))
        if self.staged:
            self._held.arrays[self._row][...] = self.array.reshape(self._held.arrays[self._row].shape)


class Held(Memory):
    """The memory of targets, by row.

    Attributes:
        arrays: The targets.
        staged: Rows that are filled in a copy.
        on_devices: Storages on a device, by row.
        known: Addresses of those that need not be opened, or None.
        events: What was done, in order.
    """

    known: np.ndarray | None = None

    def __init__(self, arrays: Iterable[np.ndarray], staged: Iterable[int] = (), on_devices: Mapping[int, Any] = {}):
        self.arrays, self.staged, self.on_devices = list(arrays), frozenset(staged), on_devices
        self.events: list[Any] = []

    @property
    def devices(self) -> list[str]:
        return ["held:0"] if self.on_devices else []

    def open(self, row: int, fresh: bool) -> Open:
        return Open(self, row, fresh)

    def addresses(self) -> np.ndarray | None:
        return self.known

    def on_device(self, row: int) -> Any:
        self.events.append(("on device", row))
        return self.on_devices.get(row)

    def wait(self) -> None:
        self.events.append("wait")

    def finish(self, untouched: Any) -> None:
        self.events.append(("finish", sorted(untouched)))


def targets_of(
    arrays: Mapping[str, np.ndarray],
    rank: int = 0,
    *,
    parts: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {},
    orders: Mapping[str, Order] = {},
    aliases: Mapping[str, tuple[str, ...]] = {},
    raw_names: Mapping[str, tuple[str, ...]] = {},
    staged: Iterable[int] = (),
) -> Targets:
    """One rank's targets: whole tensors, but for those whose global shape and offset ``parts`` has."""
    builder = CatalogBuilder(rank)
    for key, array in arrays.items():
        whole, offset = parts.get(key, (array.shape, (0,) * array.ndim))
        builder.add(key, array.dtype.name, whole, offset, array.shape, order=orders.get(key))
    starts = {key: array.__array_interface__["data"][0] for key, array in arrays.items()}
    return Targets(
        catalog=builder.build(),
        aliases=tuple(aliases.get(key, ()) for key in arrays),
        raw_names=tuple(raw_names.get(key, ()) for key in arrays),
        spans=np.asarray([[starts[key], starts[key] + array.nbytes] for key, array in arrays.items()]).reshape(-1, 2),
        memory=Held(arrays.values(), staged),
    )


class Shelf(Source):
    """Whole tensors as a source, the same on every rank.

    Attributes:
        events: The steps that were taken, in order.
        tasks: What each of them was given.
    """

    def __init__(
        self,
        values: Mapping[str, np.ndarray],
        *,
        between_ranks: bool = False,
        orders: Mapping[str, Order] = {},
        says: str = "the first",
        sends: tuple[bytes, ...] = (),
        also: Mapping[str, Any] = {},
    ) -> None:
        super().__init__()
        self.path, self.unique_id, self.between_ranks = "shelf", 7, between_ranks
        self._values, self._orders, self._says, self._sends, self._also = values, orders, says, sends, also
        self.events: list[Any] = []
        self.tasks: list[Task] = []
        self.closing.callback(self.events.append, "close")

    def open(self) -> dict[str, str]:
        self.events.append("open")
        builder = CatalogBuilder(0)
        for key, value in self._values.items():
            builder.add(key, value.dtype.name, value.shape, (0,) * value.ndim, value.shape, order=self._orders.get(key))
        self.catalog = builder.build()
        return {"shelf": self._says}

    def prepare(self, task: Task) -> tuple[bytes, ...]:
        self.tasks.append(task)
        self.events.append("prepare")
        self._reads = plan_reads(ShardMatcher(self.catalog), task.plan, task.mapping)
        return self._sends

    def plan(self, task: Task, answers: Any) -> None:
        self.tasks.append(task)
        self.events.append(("plan", answers))

    def move(self, task: Task) -> dict[str, Any]:
        self.tasks.append(task)
        self.events.append("move")
        values = [value.ravel() for value in self._values.values()]
        filling = Filling(task.plan, task.memory)
        bytes_needed = copy_pieces(self._reads.pieces, values.__getitem__, filling.storage)
        filling.finish()
        return {"bytes_needed": bytes_needed, "peak_scratch_bytes": filling.peak_scratch_bytes, **self._also}

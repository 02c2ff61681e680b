"""The plan of a save on one rank, the assignments that planners send it, and its share of the bytes.

Tested in tests/saving/test_saver.py, tests/saving/test_planners.py and tests/distributed/test_save_load.py.
"""

from __future__ import annotations

import contextlib
import json
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import numpy as np

from paddle_flexckpt.catalog import Catalog, Order, Problem, ReplicaGroups, dtype_of
from paddle_flexckpt.catalog.key_rows import KeyRows
from paddle_flexckpt.memory.device_memory import DeviceMemory
from paddle_flexckpt.memory.replica_digests import DIGEST, Digests
from paddle_flexckpt.memory.tensor_memory import device_of, host_bytes
from paddle_flexckpt.memory.tensors import HostTensor
from paddle_flexckpt.native.checksums import Checksums
from paddle_flexckpt.planning.replica_comparison import Comparison, Stretches
from paddle_flexckpt.planning.write_plan import Items, WritePlan
from paddle_flexckpt.progress import Meter, ProgressCallback
from paddle_flexckpt.saving.replica_checks import Replicas
from paddle_flexckpt.transfer.plan_cache import fingerprint

if TYPE_CHECKING:
    from paddle_flexckpt.memory.device_bytes import DeviceBytes

_HEAD = struct.Struct("<II")
_ITEM = np.dtype([("row", "<u4"), ("order", "<i2"), ("start", "<i8"), ("stop", "<i8")])
NO_ITEMS = Items(*np.zeros((3, 0), dtype=np.int64))
_LINE = np.dtype([("row", "<u4"), ("start", "<i8"), ("stop", "<i8")])
# A rank's report of a save: five counts (SavePlan.counts), and the seconds of planning and of writing.
_REPORT = np.dtype([("counts", "<i8", 5), ("seconds", "<f8", 2)])
# The most host tensors whose memory is looked up in one call.
_TENSORS_AT_ONCE = 1024
# The place of an item's bytes, the first of them there, and their number; host memory is uint8.
Source = tuple[Union[np.ndarray, DeviceMemory], int, int]


class RankAssignment(NamedTuple):
    """The rows that a planner assigns to one rank, counted in that rank's own catalog.

    Attributes:
        written: The rows that it writes, each with the number of its tensor's order, or -1.
        compared: The rows of which it sends digests to the planner, in the order in which the planner compares them.
        orders: The orders.
    """

    written: np.ndarray
    compared: np.ndarray
    orders: tuple[Order, ...]


def assign(rows: KeyRows, items: Items, lines: Stretches) -> dict[int, RankAssignment]:
    """Return a planner's assignments, by position of the rank; only for ranks that write or digest something."""
    catalog = rows.catalog
    written = np.zeros(len(items.row), dtype=_ITEM)
    written["row"], written["start"], written["stop"] = rows.row[items.row], items.start, items.stop
    written["order"] = catalog.key_order[catalog.key[items.row]] if len(catalog.key_order) else -1
    compared = np.zeros(len(lines.row), dtype=_LINE)
    compared["row"], compared["start"], compared["stop"] = rows.row[lines.row], lines.start, lines.stop
    places = np.unique(np.concatenate([rows.place[items.row], rows.place[lines.row]]))
    parts = []
    for table, place in ((written, rows.place[items.row]), (compared, rows.place[lines.row])):
        order = np.argsort(place, kind="stable")
        in_order, place = table[order], place[order]
        low, high = (np.searchsorted(place, places, side=side).tolist() for side in ("left", "right"))
        parts.append([in_order[begin:end] for begin, end in zip(low, high)])
    orders = catalog.orders if len(catalog.key_order) else ()
    return {place: RankAssignment(first, second, orders) for place, first, second in zip(places.tolist(), *parts)}


def encode_assignments(assignments: Mapping[int, RankAssignment], own: int) -> dict[int, bytes]:
    """Return this planner's messages for other ranks, by position; ``own`` is its own position."""
    tails = {
        each.orders: json.dumps([order.encode() for order in each.orders]).encode() for each in assignments.values()
    }
    return {
        place: b"".join(
            [
                _HEAD.pack(len(each.written), len(each.compared)),
                each.written.tobytes(),
                each.compared.tobytes(),
                tails[each.orders],
            ]
        )
        for place, each in assignments.items()
        if place != own
    }


def gather_assignments(
    messages: Mapping[int, bytes], assignments: Mapping[int, RankAssignment], own: int
) -> dict[int, RankAssignment]:
    """Return the assignments of this rank, by position of the planner.

    Args:
        messages: Messages of other planners for it, by position.
        assignments: The assignments that it makes itself as a planner, by position of a rank.
        own: Its position.
    """
    found = {planner: _decode_assignment(message) for planner, message in messages.items()}
    if own in assignments:
        found[own] = assignments[own]
    return dict(sorted(found.items()))


def _decode_assignment(message: bytes) -> RankAssignment:
    count, compared = _HEAD.unpack_from(message)
    items = np.frombuffer(message, _ITEM, count, _HEAD.size)
    begin = _HEAD.size + items.nbytes
    lines = np.frombuffer(message, _LINE, compared, begin)
    tail = message[begin + lines.nbytes :]
    return RankAssignment(items, lines, () if tail == b"[]" else tuple(map(Order.decode, json.loads(tail))))


def items_of(assignments: Mapping[int, RankAssignment], own: Catalog) -> tuple[Items, dict[str, Order]]:
    """Return the items that this rank is to write, and their orders, as far as any rank knows them.

    Args:
        assignments: This rank's, by position of the planner.
        own: This rank's own catalog.
    """
    orders = {
        own.keys[key]: each.orders[order]
        for each in assignments.values()
        if each.orders
        for key, order in zip(own.key[each.written["row"]].tolist(), each.written["order"].tolist())
        if order >= 0
    }
    table = np.concatenate([np.zeros(0, dtype=_ITEM), *(each.written for each in assignments.values())])
    return Items(*(table[name].astype(np.int64) for name in ("row", "start", "stop"))), orders


def lines_of(assignments: Mapping[int, RankAssignment]) -> dict[int, Stretches]:
    """Return the rows of which this rank sends digests to each planner, by the planner's position."""
    return {
        planner: Stretches(*(each.compared[name].astype(np.int64) for name in ("row", "start", "stop")))
        for planner, each in assignments.items()
        if len(each.compared)
    }


@dataclass(frozen=True, eq=False)
class SavePlan:
    """A plan of one rank's part in a save: what it writes, and which replicas it compares, also as a planner.

    It has no tensors and no names of files. It follows from the ranks' descriptions (and from ``differing``).

    Attributes:
        is_spread: Whether each key is planned by one rank alone.
        shards: The shards of the keys that this rank plans, of all ranks, without orders.
        groups: Their replica groups.
        differing: bool ``[number of groups]``, where replicas had to be compared first: whether they differ. Else None.
        first_row: Where every rank plans all keys: the row of :attr:`shards` that is the first of this rank's.
        turn: A number that chooses the two ranks that compare what is written; each save by this plan has another.
        all_items: The items of the shards that all ranks write.
        compared: The rows of the shards that this rank compares, as a planner, in this turn.
        by_device: Whether digests have to be those that devices can take, as some ranks have no other.
        file: The items that this rank writes, in the order of its file; rows are its state's.
        lines: By the position of the planner that compares them, the rows of this rank's state that it takes digests of
            in this turn.
        counts: This rank's part of the report: keys planned, items written, bytes written, bytes and shards owned.
        total_bytes: The bytes that all ranks write.
        partitions: The number of partitions in which ranks write the manifest, where planning is spread; else 0.
        fingerprint: That of the plan's inputs on all ranks, and of its turn; empty where no later save may use it.
        messages: The gathered messages for the destination. They are the same as long as the ranks' descriptions are.
    """

    is_spread: bool
    shards: KeyRows
    groups: ReplicaGroups
    differing: np.ndarray | None
    first_row: int | None
    turn: int
    all_items: Items
    compared: Comparison
    by_device: bool
    file: WritePlan
    lines: Mapping[int, Stretches]
    counts: tuple[int, ...]
    total_bytes: int
    partitions: int
    fingerprint: bytes = b""
    messages: Sequence[bytes] = ()

    @property
    def catalog(self) -> Catalog:
        """Return the shards of the keys that this rank plans, of all ranks."""
        return self.shards.catalog

    @property
    def nbytes(self) -> int:
        """Return the bytes that it takes, names included."""
        tables = (self.catalog, self.file.catalog)
        parts = (self.file, self.shards, self.groups, self.all_items, self.compared, *self.lines.values(), *tables)
        columns = [each for part in parts for each in vars(part).values() if isinstance(each, np.ndarray)]
        names = sum([sys.getsizeof(key) for table in tables for key in table.keys])
        return names + sum([column.nbytes for column in columns]) + sum(map(len, self.messages))

    def next_turn(self, replicas: Replicas) -> tuple[SavePlan, dict[int, RankAssignment]]:
        """Plan the comparison of the next save by this plan.

        Returns:
            The plan of that save, without this rank's lines; and the lines that this rank assigns as a planner.
        """
        if not self.fingerprint or not (self.is_spread or len(self.compared)):
            return self, {}
        compared = replicas.beside(self.all_items, self.turn + 1)
        plan = replace(self, fingerprint=fingerprint((self.fingerprint,)), turn=self.turn + 1, compared=compared)
        return plan, assign(self.shards, NO_ITEMS, compared)

    @property
    def all_lines(self) -> Stretches:
        """Return the lines of all planners, one planner's after the other's."""
        columns = [[getattr(lines, name) for lines in self.lines.values()] for name in ("row", "start", "stop")]
        return Stretches(*(np.concatenate([np.zeros(0, dtype=np.int64), *column]) for column in columns))

    @property
    def written_lines(self) -> Stretches:
        """Return the written items, as stretches of this rank's shards."""
        source, start = self.file.source, self.file.source_start
        return Stretches(source, start, start + self.file.catalog.size)

    def first_row_of(self, problem: Problem) -> int:
        """Return the first row of a problem's key and rank, numbered among the rows of all keys.

        By it the problems that several planners have found are sorted.
        """
        rows = self.catalog.rank == problem.rank
        rows &= self.catalog.key == self.catalog.keys.index(problem.key or "")
        return int(self.shards.number[np.argmax(rows)])

    def encode_report(self, plan_seconds: float, write_seconds: float) -> bytes:
        """Return this rank's message to all for the report, with the seconds of planning and of writing."""
        return np.asarray((self.counts, (plan_seconds, write_seconds)), dtype=_REPORT).tobytes()


def report_fields(reports: Sequence[bytes], own: SavePlan, writing: str) -> dict[str, Any]:
    """Return the fields of the save's report that follow from the messages of all ranks.

    Args:
        reports: The message of each rank (:meth:`SavePlan.encode_report`).
        own: This rank's plan.
        writing: The name of the second phase.
    """
    found = np.frombuffer(b"".join(reports), dtype=_REPORT)
    counts, (planned, written) = found["counts"], found["seconds"].T.tolist()
    keys, items, total, held, _ = counts.sum(axis=0).tolist()
    loads = counts[counts[:, 4] > 0, 2]
    return {
        "keys": keys,
        "items": items,
        "bytes_written": own.counts[2],
        "total_bytes": total,
        "held_bytes": held,
        "imbalance": float(loads.max() / loads.mean()) if total else 1.0,
        "rank_bytes": counts[:, 2].tolist(),
        "rank_seconds": {"plan": planned, writing: written},
    }


class WriteMessages(NamedTuple):
    """A rank's messages to others about what it has written, and the checksums of that.

    Attributes:
        payload: The message to all ranks.
        checksums: Block checksums, at least of the items that are compared.
        payloads: By position of a rank, the message to that rank alone.
    """

    payload: bytes
    checksums: Checksums
    payloads: Mapping[int, bytes] = {}


class Share:
    """One rank's share of a save.

    Attributes:
        items: Its items, all of one file.
        step: The training step to record, if known.
        devices: The devices that some of the tensors are on.
        partitions: The number of partitions in which ranks write the manifest, if they can communicate at the end; else
            0.
    """

    def __init__(
        self,
        plan: SavePlan,
        file: str,
        tensors: Sequence[Any],
        step: int | None,
        devices: Sequence[str],
        progress: ProgressCallback | None = None,
    ) -> None:
        """Take a rank's items of a plan, the name of its data file, its tensors, and the reporter of progress."""
        self._progress, self.partitions = progress, plan.partitions
        self.items = replace(plan.file.catalog, files=(file,))
        self.step, self.devices = step, devices
        self._tensors, self._rows = tensors, plan.file.source
        self._starts = plan.file.source_start * self.items.itemsize
        self._stops = self._starts + self.items.byte_length

    def write_arguments(self) -> dict[str, Any]:
        """Return keyword arguments for the writer of the data file: the step, and a meter that counts the items."""
        nbytes = int(self.items.byte_length.sum())
        return {"step": self.step, "meter": Meter(self._progress, "write", nbytes, len(self.items))}

    @contextlib.contextmanager
    def data(self) -> Iterator[Iterator[np.ndarray]]:
        """Give the items' bytes for the duration of a block: uint8 arrays, as ``write_data_file`` wants them.

        Only the written part of a device tensor crosses to the host, in steps of whole blocks, ahead of the caller. A
        strided host view is copied when it is requested.
        """
        if not self.devices:
            yield chain.from_iterable(self._data(None))
            return
        from paddle_flexckpt.memory.device_bytes import ALIGNMENT, DeviceBytes

        spans = (span for group in self._groups() for span in zip(*group) if device_of(span[0]) is not None)
        nbytes = int(self.items.byte_length.sum()) + ALIGNMENT * len(self.items)
        with DeviceBytes(spans, self.devices[0], nbytes) as crossing:
            yield chain.from_iterable(self._data(crossing))

    def _groups(self) -> Iterator[tuple[Sequence[Any], Sequence[int], Sequence[int]]]:
        """Yield the items' tensors, first bytes, and last ones exclusive, many items at a time."""
        for first in range(0, len(self._rows), _TENSORS_AT_ONCE):
            some = slice(first, first + _TENSORS_AT_ONCE)
            tensors = [self._tensors[row] for row in self._rows[some].tolist()]
            yield tensors, self._starts[some].tolist(), self._stops[some].tolist()

    def _data(self, crossing: DeviceBytes | None) -> Iterator[Iterable[np.ndarray]]:
        for group in self._groups():
            ready: list[np.ndarray] = []
            for tensor, start, stop, memory in zip(*group, host_bytes(*group, bool(self.devices))):
                if memory is not None:
                    ready.append(memory)
                    continue
                yield ready
                if crossing is not None and device_of(tensor) is not None:
                    yield crossing.read(stop - start)
                else:
                    yield [HostTensor(tensor).array.view(np.uint8)[start:stop]]
                ready = []
            yield ready

    def sources(self) -> Iterator[Source]:
        """Yield the place of each item's bytes: in host memory, which may be a copy, or on a device."""
        for group in self._groups():
            for tensor, start, stop, memory in zip(*group, host_bytes(*group, bool(self.devices))):
                if memory is not None:
                    yield memory, 0, stop - start
                elif device_of(tensor) is None:
                    yield HostTensor(tensor).array.view(np.uint8), start, stop - start
                else:
                    yield DeviceMemory(tensor), start, stop - start

    def digests(self, staged: np.ndarray | None = None) -> np.ndarray:
        """Return a digest of each item, to notice any change of its bytes.

        ``staged`` has the copies of all items: for an item in host memory, its copy is digested instead of its tensor.
        A device digests its own memory; Paddle's counter shows writes there that were undone again.
        """
        sizes, some = self.items.size, np.flatnonzero(self.items.size)
        tensors = [self._tensors[row] for row in self._rows.tolist()]
        on_device = np.asarray([bool(self.devices) and device_of(tensor) is not None for tensor in tensors], dtype=bool)
        starts = self._starts // self.items.itemsize
        if staged is not None:
            ends = self.items.byte_length.cumsum().tolist()
            for i in np.flatnonzero(~on_device).tolist():
                dtype = dtype_of(self.items.dtype_name(i)).numpy
                tensors[i] = staged[ends[i] - int(self.items.byte_length[i]) : ends[i]].view(dtype)
            starts = np.where(on_device, starts, 0)
        found = np.zeros(len(sizes), dtype=[("digest", "<u8"), ("writes", "<i8")])
        lines = Stretches(some, starts[some], (starts + sizes)[some])
        with Digests(dict(enumerate(tensors)), self.items, lines) as digests:
            found["digest"][some] = np.frombuffer(digests.encode(), DIGEST)["digest"]
        found["writes"][on_device] = [tensors[i].inplace_version for i in np.flatnonzero(on_device).tolist()]
        return found

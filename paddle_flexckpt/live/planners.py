"""Who plans which keys of a save, and what ranks and planners tell each other.

In a small job every rank plans all keys, and nobody has to be told. In a large one a key is planned by one rank, which
its name tells. It gets the key's rows from all ranks, and tells each what it is to write (docs/design.md, "How planning
is spread").
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from paddle_flexckpt.catalog import Catalog, ReplicaGroups
from paddle_flexckpt.catalog.findings import Finding, Layout, inspect, raise_findings
from paddle_flexckpt.catalog.key_rows import KeyRows, decode_rows, encode_rows
from paddle_flexckpt.catalog.wire import join, join_by_position, split, split_by_position
from paddle_flexckpt.live.communicator import Communicator
from paddle_flexckpt.live.dealing import Dealt, deal, take
from paddle_flexckpt.planning.comparison import Comparison
from paddle_flexckpt.planning.holder_sets import share_out
from paddle_flexckpt.planning.shared_lines import SPREAD_ROWS, SharedLines
from paddle_flexckpt.planning.write_plan import Items, every_replica, lay_lines

logger = logging.getLogger("paddle_flexckpt")

_SAID = struct.Struct("<QB?")
_COUNT = struct.Struct("<Q")


class Said(NamedTuple):
    """Hold what a rank tells all others of its shards.

    Attributes:
        rows: How many they are.
        policies: Bits of the policies of replicas that they have.
        any_device: Whether some are on a device.
        shards: All of them, if they are few (:func:`encode_rows`); else nothing.
    """

    rows: int
    policies: int
    any_device: bool
    shards: bytes

    def encode(self) -> bytes:
        """Return it as bytes."""
        return _SAID.pack(*self[:3]) + self.shards

    @classmethod
    def decode(cls, said: bytes) -> Said:
        """Return what :meth:`encode` made bytes of."""
        rows, policies, any_device = _SAID.unpack_from(said)
        return cls(rows, policies, any_device, said[_SAID.size :])


def describe_shards(
    comm: Communicator, catalog: Catalog, flags: np.ndarray, policies: np.ndarray, any_device: bool
) -> Said:
    """Return what a rank tells all others of its shards."""
    is_small = len(catalog) * comm.size <= SPREAD_ROWS or comm.size == 1
    own = np.zeros(len(catalog.keys), dtype=np.int64)
    shards = encode_rows(catalog, flags, own).get(0, b"") if is_small else b""
    return Said(len(catalog), int(np.bitwise_or.reduce(1 << policies.astype(np.int64))), any_device, shards)


def planner_of(keys: Sequence[str], count: int) -> np.ndarray:
    """Return int64 per key, which of so many ranks plans it."""
    return np.fromiter((xxhash.xxh3_64_intdigest(key.encode()) % count for key in keys), np.int64, len(keys))


def decode_findings(notes: Iterable[bytes]) -> list[Finding]:
    """Return what planners have told all ranks that is wrong."""
    return [Finding(*each) for note in notes for each in json.loads(note)]


def tell_planners(
    comm: Communicator,
    is_spread: bool,
    work: Callable[[], tuple[bytes, Mapping[int, bytes], Mapping[int, bytes]]],
    context: str,
) -> tuple[list[bytes], list[bytes], dict[int, bytes]]:
    """Take a step on every rank; tell all ranks one thing, and the planners another. One collective.

    Args:
        comm: The ranks.
        is_spread: Whether there are several planners; else every rank is told what is for this one itself.
        work: The step: returns what is for all; and by position what is for each planner, and what else is for a rank,
            nothing unless there are several planners.
        context: What is being done, for errors.

    Returns:
        What each rank said to all, what each said to this one as a planner, and what else, by position.
    """
    if is_spread:

        def to_each() -> tuple[None, bytes, dict[int, bytes]]:
            note, *payloads = work()
            return None, note, join_by_position(*payloads)

        _, notes, received = comm.trade(to_each, context)
        digests, others = split_by_position(received, 2)
        places = range(comm.size)
        return [notes.get(place, b"") for place in places], [digests.get(place, b"") for place in places], others

    def to_all() -> tuple[None, bytes]:
        note, payloads, _ = work()
        return None, join((note, payloads.get(comm.position, b"")))

    _, answers = comm.together(to_all, context)
    said = [split(answer) for answer in answers]
    return [each[0] for each in said], [each[1] for each in said], {}


class Planners:
    """Plan one save together. Every rank makes the same calls, in the order of the methods.

    Attributes:
        rows: The shards of the keys that this rank plans.
        groups: Their replica groups.
        overlaps: Pairs of rows that share elements and are no replicas; none where planning is spread.
        before: int64 ``[number of ranks]``, how many rows all ranks before each own.
        is_spread: Whether a key is planned by one rank alone.
        any_device: Whether any rank has shards on a device.
        items: What all ranks write of these keys; from :meth:`plan` on.
        item_count: How many items all ranks write of all keys; likewise.
        lines: What this rank compares, as a planner; likewise.
        comm: The ranks.
    """

    rows: KeyRows
    groups: ReplicaGroups
    overlaps: list[tuple[int, int]]
    items: Items
    item_count: int
    lines: Comparison

    def __init__(
        self, comm: Communicator, catalog: Catalog, flags: np.ndarray, said: Sequence[Said], context: str, alone: str
    ) -> None:
        """Take this rank's shards, and what all ranks said.

        Args:
            comm: The ranks.
            catalog: This rank's shards.
            flags: int64 ``[n]``, what planners have to know of each besides; bit 0: one rank has to write it whole.
            said: What all ranks said.
            context: What is being done, for errors.
            alone: Why every rank has to plan all keys, if there is a reason.
        """
        counts = np.asarray([each.rows for each in said], dtype=np.int64)
        self.comm, self._catalog, self._flags, self._context = comm, catalog, flags, context
        self.any_device = any(each.any_device for each in said)
        self._shards = {place: each.shards for place, each in enumerate(said) if each.rows}
        self.before = np.cumsum(counts) - counts
        self.is_spread = comm.size > 1 and not all(self._shards.values())
        if self.is_spread and alone:
            self._gather(alone)

    def _gather(self, reason: str) -> None:
        """Tell all ranks everything, after all. One collective."""
        self.is_spread = False
        logger.info(f"every rank plans all shards of this save: {reason}")
        own = np.zeros(len(self._catalog.keys), dtype=np.int64)
        work = lambda: (None, encode_rows(self._catalog, self._flags, own).get(0, b""))  # noqa: E731
        _, said = self.comm.together(work, self._context)
        self._shards = {place: each for place, each in enumerate(said) if each}

    def inspect(self) -> None:
        """Find the shards of the keys that this rank plans, and check them. Two collectives where planning is spread.

        Raises:
            ValidationError: Shards are malformed, disagree or leave holes; the same on every rank.
        """
        if self.is_spread:
            comm, catalog = self.comm, self._catalog
            own = lambda: encode_rows(catalog, self._flags, planner_of(catalog.keys, comm.size))  # noqa: E731
            _, _, received = comm.trade(lambda: (None, b"", own()), self._context)
            _, notes, self._asked = comm.trade(lambda: self._lay(received), self._context)
            raise_findings(decode_findings(notes.values()), self._context)
            if not notes:
                return
            self._gather("shards overlap, and are no replicas of each other")
        self._look(self._shards)
        raise_findings(self._layout.findings, self._context)
        self.overlaps = self._layout.coverage.overlaps

    def _look(self, shards: Mapping[int, bytes]) -> None:
        rows = self.rows = decode_rows(shards, self.comm.ranks, self.before)
        self._layout: Layout = inspect(rows.catalog, rows.number, rows.contradictions)
        self.groups, self.overlaps = self._layout.groups, []

    def _lay(self, shards: Mapping[int, bytes]) -> tuple[None, bytes, dict[int, bytes]]:
        self._look(shards)
        findings, overlaps = self._layout.findings, self._layout.coverage.overlaps
        if findings or overlaps:
            return None, json.dumps(findings).encode(), {}
        self._lines = lay_lines(self.rows.catalog, self.groups, self.rows.place, self._indivisible)
        self._shared = SharedLines(self._lines.sets, self._lines.amount)
        return None, b"", self._shared.ask()

    @property
    def _indivisible(self) -> np.ndarray:
        return self.rows.flags & 1 != 0

    def plan(self, groups: ReplicaGroups, save_replicas: bool, compared: Callable[[Items], Comparison]) -> Dealt:
        """Plan who writes what, and who compares what; return this rank's part. Two collectives where that is spread.

        Args:
            groups: What is written, where replicas may differ: :attr:`groups`, some of them narrowed.
            save_replicas: Write every replica.
            compared: Gives the lines that are compared of what is written.
        """
        comm, rows = self.comm, self.rows

        def dealt(items: Items) -> dict[int, bytes]:
            self.items, self.lines = items, compared(items)
            return deal(rows, items, self.lines)

        if self.is_spread:
            _, told, answers = comm.trade(lambda: (None, *SharedLines.answer(self._asked)), self._context)

            def work() -> tuple[None, bytes, dict[int, bytes]]:
                share, before = self._shared.share(told, answers, comm.size)
                items = self._lines.cut(share, before=before)
                messages = dealt(every_replica(rows.catalog, groups) if save_replicas else items)
                return None, _COUNT.pack(len(self.items.row)) if messages else b"", messages

            _, notes, messages = comm.trade(work, self._context)
            self.item_count = sum(_COUNT.unpack(note)[0] for note in notes.values())
        else:
            if save_replicas:
                items = every_replica(rows.catalog, groups)
            else:
                lines = lay_lines(rows.catalog, groups, rows.place, self._indivisible)
                items = lines.cut(share_out(lines.sets, lines.amount, comm.size))
            own = dealt(items).get(comm.position)
            self.item_count = len(items.row)
            messages = {} if own is None else {comm.position: own}
        return take(messages, self._catalog)

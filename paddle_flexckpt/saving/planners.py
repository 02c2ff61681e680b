"""The ranks that plan the keys of a save, and the messages between ranks and planners.

In a small job every rank plans all keys, and the plan needs no messages. In a large one a key is planned by one rank,
which follows from the key's name. That rank receives the key's rows from all ranks, and sends each the items that it is
to write (docs/design.md, "How planning is spread").
"""

from __future__ import annotations

import functools
import json
import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import xxhash

from paddle_flexckpt.catalog import Catalog, CheckpointError, Problem, ReplicaGroups, ValidationError
from paddle_flexckpt.catalog.findings import Finding, Inspection, inspect, raise_findings
from paddle_flexckpt.catalog.key_rows import KeyRows, decode_rows, encode_rows, rows_of
from paddle_flexckpt.catalog.wire import join, join_by_position, split, split_by_position
from paddle_flexckpt.media.full_disks import tell_total
from paddle_flexckpt.native.partitions import partitions_for
from paddle_flexckpt.planning.holder_sets import SPREAD_ROWS, SharedLines, share_out
from paddle_flexckpt.planning.replica_comparison import Comparison
from paddle_flexckpt.planning.write_plan import Items, every_replica, lay_lines, lay_out
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.saving.replica_checks import Replicas
from paddle_flexckpt.saving.save_plan import (
    RankAssignment,
    SavePlan,
    assign,
    encode_assignments,
    gather_assignments,
    items_of,
    lines_of,
)

logger = logging.getLogger("paddle_flexckpt")

_SUMMARY = struct.Struct("<QB?")
# The items that a planner has given out, and their bytes.
_COUNT = struct.Struct("<QQ")


class RankSummary(NamedTuple):
    """A rank's message to all others before a save is planned.

    Attributes:
        own: Fingerprint of its part of the plan's inputs.
        names: The save's names as JSON, from the rank that knows them.
        place: The place of its directory.
        message: The message of its destination to the destinations of the others.
        rows: The number of its shards.
        policies: Bits of the replica policies of its shards.
        any_device: Whether some shards are on a device.
        shards: All shards (:func:`encode_shards`), if they are few and there are other ranks; else nothing.
    """

    own: bytes
    names: bytes
    place: bytes
    message: bytes
    rows: int
    policies: int
    any_device: bool
    shards: bytes = b""

    def encode(self, head: bytes) -> bytes:
        """Return the summary as a message, behind a field in which ranks may not differ."""
        shards = _SUMMARY.pack(self.rows, self.policies, self.any_device) + self.shards
        return join((head, *self[:4], shards))

    @classmethod
    def decode(cls, own: bytes, names: bytes, place: bytes, message: bytes, shards: bytes) -> RankSummary:
        """Decode the fields of a message of :meth:`encode`."""
        rows, policies, any_device = _SUMMARY.unpack_from(shards)
        return cls(own, names, place, message, rows, policies, any_device, shards[_SUMMARY.size :])


def encode_shards(catalog: Catalog, flags: np.ndarray, size: int | None = None) -> bytes:
    """Return a rank's shards as a message to ranks that plan all keys.

    ``size`` is the number of ranks: the message is empty if there is one, or if planning is spread over so many. None:
    whatever their number.
    """
    if size is not None and (size == 1 or len(catalog) * size > SPREAD_ROWS):
        return b""
    return encode_rows(catalog, flags, np.zeros(len(catalog.keys), dtype=np.int64)).get(0, b"")


def planner_of(keys: Sequence[str], count: int) -> np.ndarray:
    """Return int64 per key, which of the ranks plans it."""
    return np.fromiter((xxhash.xxh3_64_intdigest(key.encode()) % count for key in keys), np.int64, len(keys))


def _raise_reported(notes: Mapping[int, bytes], context: str) -> None:
    """Raise the findings that planners have reported, if any. The text is as if one rank planned all keys."""
    raise_findings([Finding(*each) for note in notes.values() for each in json.loads(note)], context)


class Planners:
    """The planning of one save by all ranks. Every rank makes the same calls, in the order of the methods.

    Attributes:
        rows: The shards of the keys that this rank plans.
        groups: Their replica groups.
        overlaps: Pairs of rows that share elements and are no replicas; none where planning is spread.
        before: int64 ``[number of ranks]``, the number of rows that all ranks before each own.
        is_spread: Whether a key is planned by one rank alone.
        any_device: Whether any rank has shards on a device.
        comm: The ranks.
    """

    rows: KeyRows
    groups: ReplicaGroups
    overlaps: list[tuple[int, int]]

    def __init__(
        self,
        comm: Communicator,
        catalog: Catalog,
        flags: np.ndarray,
        summaries: Sequence[RankSummary],
        context: str,
        gather_reason: str,
    ) -> None:
        """Take this rank's shards, and the summaries of all ranks.

        Args:
            comm: The ranks.
            catalog: This rank's shards.
            flags: int64 ``[n]``, more about each shard for planners; bit 0: one rank has to write it whole.
            summaries: The summaries of all ranks.
            context: What is being done, for errors.
            gather_reason: Why every rank has to plan all keys, if there is a reason.
        """
        counts = np.asarray([each.rows for each in summaries], dtype=np.int64)
        self.comm, self._catalog, self._flags, self._context = comm, catalog, flags, context
        self.any_device = any(each.any_device for each in summaries)
        self._shards = {place: each.shards for place, each in enumerate(summaries) if each.rows}
        self.before = np.cumsum(counts) - counts
        self.is_spread = comm.size > 1 and not all(self._shards.values())
        if self.is_spread and gather_reason:
            self._gather(gather_reason)

    def _gather(self, reason: str) -> None:
        """Send all shards to all ranks after all. One collective."""
        self.is_spread = False
        logger.info(f"every rank plans all shards of this save: {reason}")
        _, shards = self.comm.together(lambda: (None, encode_shards(self._catalog, self._flags)), self._context)
        self._shards = {place: each for place, each in enumerate(shards) if each}

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
            _raise_reported(notes, self._context)
            if not notes:
                return
            self._gather("shards overlap, and are no replicas of each other")
        self._look(self._shards)
        raise_findings(self._layout.findings, self._context)
        self.overlaps = self._layout.coverage.overlaps

    def _look(self, shards: Mapping[int, bytes]) -> None:
        """Find the shards of the keys that this rank plans, in the messages of ranks, and inspect them."""
        comm = self.comm
        if comm.size == 1:
            self.rows = rows_of(self._catalog, self._flags)
        else:
            self.rows = decode_rows(shards, comm.ranks, self.before)
        self._layout: Inspection = inspect(self.rows.catalog, self.rows.number, self.rows.contradictions)
        self.groups, self.overlaps = self._layout.groups, []

    def _lay(self, shards: Mapping[int, bytes]) -> tuple[None, bytes, dict[int, bytes]]:
        """Find this rank's shards, and lay out the lines to divide; return what is wrong, and requests to others."""
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

    @property
    def first_row(self) -> int | None:
        """Return the index in :attr:`rows` of this rank's first row; None where planning is spread."""
        return None if self.is_spread else int(self.before[self.comm.position])

    def plan(self, replicas: Replicas, differing: np.ndarray | None, save_replicas: bool, turn: int) -> SavePlan:
        """Plan which rank writes and compares what. Two collectives where planning is spread.

        Args:
            replicas: The replicas of the shards.
            differing: The groups that differ, if this had to be known first.
            save_replicas: Write every replica.
            turn: The number that chooses the two ranks that compare what is written.
        """
        comm, rows, own, groups = self.comm, self.rows, self._catalog, replicas.narrowed(differing)
        if self.is_spread:
            _, totals, answers = comm.trade(lambda: (None, *SharedLines.answer(self._asked)), self._context)
            every = groups if save_replicas else None
            work = functools.partial(self._assign_to_others, totals, answers, every, replicas, turn)
            (items, compared, assignments), notes, received = comm.trade(work, self._context)
            count, total_bytes = map(sum, zip((0, 0), *(_COUNT.unpack(note) for note in notes.values())))
        else:
            items = every_replica(rows.catalog, groups) if save_replicas else self._share_out(groups)
            compared = replicas.beside(items, turn)
            assignments, received = assign(rows, items, compared), {}
            count, total_bytes = len(items.row), items.bytes_in(rows.catalog)
        mine = gather_assignments(received, assignments, comm.position)
        to_write, orders = items_of(mine, own)
        file = lay_out(own.with_orders(orders), np.asarray([comm.rank]), to_write, str)
        # Where all plan all keys, one rank reports their number.
        keys = len(rows.catalog.keys) if self.is_spread or comm.position == 0 else 0
        return SavePlan(
            is_spread=self.is_spread,
            shards=replace(rows, catalog=rows.catalog.with_orders({})),
            groups=self.groups,
            differing=differing,
            first_row=self.first_row,
            turn=turn,
            all_items=items,
            compared=compared,
            by_device=self.is_spread and self.any_device,
            file=file,
            lines=lines_of(mine),
            counts=(keys, len(file.source), file.total_bytes, int(own.byte_length.sum()), len(own)),
            total_bytes=total_bytes,
            partitions=partitions_for(count) if self.is_spread else 0,
        )

    def _share_out(self, groups: ReplicaGroups) -> Items:
        lines = lay_lines(self.rows.catalog, groups, self.rows.place, self._indivisible)
        return lines.cut(share_out(lines.sets, lines.amount, self.comm.size))

    def _assign_to_others(
        self,
        totals: Mapping[int, bytes],
        answers: Mapping[int, bytes],
        every: ReplicaGroups | None,
        replicas: Replicas,
        turn: int,
    ) -> tuple[tuple[Items, Comparison, dict[int, RankAssignment]], bytes, dict[int, bytes]]:
        share, before = self._shared.share(totals, answers, self.comm.size)
        items = self._lines.cut(share, before=before) if every is None else every_replica(self.rows.catalog, every)
        compared = replicas.beside(items, turn)
        assignments = assign(self.rows, items, compared)
        note = _COUNT.pack(len(items.row), items.bytes_in(self.rows.catalog)) if assignments else b""
        return (items, compared, assignments), note, encode_assignments(assignments, self.comm.position)


class RankMessages(NamedTuple):
    """One rank's messages after it has written its share.

    Attributes:
        payload: The message to all ranks.
        digests: By position of a planner, digests of the rows that it compares.
        others: By position of a rank, another message to it alone.
    """

    payload: bytes
    digests: Mapping[int, bytes]
    others: Mapping[int, bytes]


def exchange_written(
    comm: Communicator, is_spread: bool, work: Callable[[], RankMessages], context: str, total_bytes: int = 0
) -> tuple[list[bytes], list[bytes], dict[int, bytes]]:
    """Take a step on every rank, and exchange the messages about it. One collective.

    Args:
        comm: The ranks.
        is_spread: Whether there are several planners; if not, every rank compares all, and gets all digests.
        work: The step.
        context: What is being done, for errors.
        total_bytes: What all ranks write to one storage, if they do, for errors.

    Returns:
        Each rank's message to all; its digests for this rank; and other messages for this rank alone, by position.
    """

    def to_all() -> tuple[None, bytes, Mapping[int, bytes]]:
        payload, digests, others = work()
        return None, join((payload, digests.get(comm.position, b""))), others

    def to_each() -> tuple[None, bytes, dict[int, bytes]]:
        payload, *messages = work()
        return None, payload, join_by_position(*messages)

    try:
        _, found, received = comm.trade(to_each if is_spread else to_all, context)
    except CheckpointError as error:
        tell_total(error, total_bytes)
        raise
    if not is_spread:
        payloads, digests = zip(*map(split, found.values()))
        return list(payloads), list(digests), received
    of_planner, others = split_by_position(received, 2)
    places = range(comm.size)
    return [found.get(place, b"") for place in places], [of_planner.get(place, b"") for place in places], others


def compare_written(
    comm: Communicator,
    plan: SavePlan,
    replicas: Replicas,
    digests: Sequence[bytes],
    write_partitions: Callable[[], dict[int, bytes]],
    context: str,
) -> tuple[np.ndarray, SavePlan, dict[int, bytes]]:
    """Compare the replicas of a save, and plan the next comparison. One collective where planning is spread.

    Args:
        comm: The ranks.
        plan: The plan of the save.
        replicas: The replicas of the shards that this rank plans.
        digests: Each rank's digests for this rank.
        write_partitions: Writes this rank's partitions of the manifest, where planning is spread; returns its messages
            about them, by position.
        context: What is being done, for errors.

    Returns:
        Which groups of replicas differ, the plan in its next turn, and the messages about partitions for this rank.

    Raises:
        ValidationError: Replicas differ that have to be equal; the same on every rank.
    """

    def work() -> tuple[tuple[np.ndarray, SavePlan, dict[int, RankAssignment]], bytes, dict[int, bytes]]:
        try:
            differing = replicas.compare(plan.compared, digests)
            turned, assignments = plan.next_turn(replicas)
            described = write_partitions()
        except ValidationError as error:
            problems = [each for each in error.problems if isinstance(each, Problem)]
            if not problems:
                raise
            findings = [(0, 0, plan.first_row_of(each), str(each)) for each in problems]
            return (np.zeros(0, dtype=bool), plan, {}), json.dumps(findings).encode(), {}
        messages = join_by_position(encode_assignments(assignments, comm.position), described)
        return (differing, turned, assignments), b"", messages

    received, described = dict[int, bytes](), dict[int, bytes]()
    if plan.is_spread:
        (differing, turned, assignments), notes, messages = comm.trade(work, context)
        _raise_reported(notes, context)
        received, described = split_by_position(messages, 2)
    else:
        differing = replicas.compare(plan.compared, digests)
        differing = differing if plan.differing is None else differing | plan.differing
        turned, assignments = plan.next_turn(replicas)
    if turned is not plan:
        turned = replace(turned, lines=lines_of(gather_assignments(received, assignments, comm.position)))
    return differing, turned, described

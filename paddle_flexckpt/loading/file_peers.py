"""Files as a source that ranks read for each other: which rank reads what, and whether all read for themselves instead.

A stored shard is cut into sections, and a row of the exchange is a section that a rank reads. The choice of the reader
differs: where nodes share no storage, every rank that needs the section and sees it reads it; else one rank reads it
for all, so that storage is read once for the job. A rank reads its rows in rounds, each once, and verifies them before
anything of them is sent or copied.

Tested in tests/saving/test_nodes.py and tests/loading/test_cooperative.py.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from paddle_flexckpt.catalog import (
    Catalog,
    CorruptCheckpointError,
    ReplicaGroups,
    dtype_of,
    group_replicas,
    validate_coverage,
)
from paddle_flexckpt.catalog.errors import listed
from paddle_flexckpt.catalog.wire import join, split
from paddle_flexckpt.communication.rounds import HeldRows, Rounds, RowsReadAhead
from paddle_flexckpt.loading.node_files import Found
from paddle_flexckpt.loading.peers import Peers, plan_rank
from paddle_flexckpt.loading.relay import Relay
from paddle_flexckpt.media.backend import reading
from paddle_flexckpt.planning.exchange_plan import ExchangePlan
from paddle_flexckpt.planning.matching import Pieces, ShardMatcher
from paddle_flexckpt.planning.readers import (
    Sections,
    choose_readers,
    find_wanted,
    match_sections,
    number_rounds,
    reads_of_rows,
)
from paddle_flexckpt.planning.sights import Sight
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.ranks.lost_ranks import own_host
from paddle_flexckpt.transfer.announcing import announce_reads
from paddle_flexckpt.transfer.copies import Storage
from paddle_flexckpt.transfer.files import Files, reads_of
from paddle_flexckpt.transfer.options import LoadOptions
from paddle_flexckpt.transfer.source import Task

_MOST_KEYS = 5
# Ranks read together if for each byte that they need they would fetch at least so many.
_WORTH_IT = 2


class FilePeers(Peers):
    """The files of a checkpoint, of which each rank reads a part and receives the rest.

    Attributes:
        files: The checkpoint.
        comm_method: As of :class:`LoadReport`; known when the exchange is planned.
        comm_reason: As of :class:`LoadReport`; known when the exchange is planned.
    """

    comm_method = comm_reason = ""

    def __init__(
        self, comm: Communicator, files: Files, options: LoadOptions, context: str, found: Found | None = None
    ) -> None:
        """Take the checkpoint and what describes the load; ``found``: the files that each rank sees, by default all."""
        super().__init__(comm, context, offload=True)  # files are read into host memory
        self.files, self._options, self._found = files, options, found
        self.closing.callback(files.closing.close)
        if found is not None:
            self.relay = Relay(comm, self.closing)

    def open(self) -> dict[str, str]:
        """Open the checkpoint; return its description."""
        files = self.files
        description = {**files.open(), "reads": "together"}
        self.path, self.catalog, self.unique_id = files.path, files.catalog, files.unique_id
        self.partial = files.partial
        return description

    def again(self) -> FilePeers:
        """Return the same files with connections of their own."""
        twin = cast("FilePeers", super().again())
        twin.files = cast("Files", self.files.again())
        twin.closing.callback(twin.files.closing.close)
        twin.relay = None if self.relay is None else Relay(self._comm, twin.closing)
        return twin

    def settings(self) -> Mapping[str, Any]:
        """Return the configuration of the checkpoint's model."""
        return self.files.settings()

    def family(self) -> tuple[str, str]:
        """Return the family of the checkpoint's model, and the path of its configuration."""
        return self.files.family()

    def progress(self, key: str) -> tuple[float, tuple[float, ...]] | None:
        """Return the steps that a moment's optimizer has taken, and its betas."""
        return self.files.progress(key)

    def prepare(self, task: Task) -> tuple[bytes, ...]:
        """Return the message to the other ranks: that of Peers, whether this rank computes values, and its node."""
        return (*super().prepare(task), bytes([bool(task.plan.tiles)]), self._place.encode())

    @property
    def _place(self) -> str:
        return f"{own_host()}:{os.path.realpath(self.path)}" if self._found is not None else ""

    @functools.cached_property
    def _address(self) -> bytes:
        own = self._transport.address()
        return own if self.relay is None else join((own, self.relay.address()))

    def _set_addresses(self, addresses: Sequence[bytes]) -> None:
        if self.relay is not None:
            addresses, self.relay.addresses = map(list, zip(*map(split, addresses)))
        super()._set_addresses(addresses)

    def plan(self, task: Task, answers: Sequence[tuple[bytes, ...]]) -> None:
        """Choose the reader of each section, and plan the messages between ranks."""
        *known, computes, places = answers
        self._computes = any(map(any, computes))
        self._node = _by_rank(self._comm.ranks, places) if self._found is not None else None
        super().plan(task, known)

    def plan_own(self, targets: Catalog, task: Task) -> ExchangePlan | None:
        """Plan this rank's part of the exchange; if each rank reads for itself, plan its reads and return None."""
        comm, stored, manifest = self._comm, self.catalog, self.files.manifest
        groups, block_bytes = group_replicas(stored), manifest.checksums.block_bytes
        nobody = max(comm.ranks) + 1  # stands for a reader of sections that no rank can read
        matched = match_sections(stored, groups, targets, comm.size, block_bytes, task.maps, nobody)
        sections, _, alike, coverage, pieces = matched
        place = _places(comm.ranks)[targets.rank]
        wanted, nbytes = find_wanted(pieces, place, comm.size), sections.catalog.byte_length
        sight = None if self._found is None else self._found.sight(groups)
        self._choose(int(nbytes[wanted[0]].sum()), int(nbytes[np.unique(wanted[0])].sum()))
        if self.comm_method == "direct" and self._found is None:
            self.between_ranks = False
            self.files.prepare(task)
            return None
        together = self.comm_method == "cooperative"
        readers = choose_readers(wanted, nbytes, comm.size, together, sight, sections.group)
        self._take_rows(sections, readers, np.append(np.asarray(comm.ranks), nobody), groups, sight)
        if not together:  # a section may have several rows
            alike = group_replicas(self.rows)
            coverage = validate_coverage(self.rows, alike)
        plan = plan_rank(ShardMatcher(self.rows, alike, coverage), targets, task, comm.rank, self._node)
        if nobody in plan.incoming:
            lost = "; ".join(self._lost(np.unique(plan.incoming[nobody].source)))
            raise CorruptCheckpointError(
                f"no rank can read {lost}. Remedy (FC504): let a rank see these directories, or load another "
                "checkpoint; saves with node_copies=2 or parity survive the loss of a node"
            )
        self._open_files(plan)
        return plan

    def _choose(self, fetched: int, needed: int) -> None:
        """Choose by the options, and by the bytes that ranks would fetch alone, the same on every rank."""
        asked = self._options.reads
        self.comm_method, self.comm_reason = "cooperative", "asked for"
        if asked == "auto" and self._found is not None:
            self.comm_method, self.comm_reason = "direct", "auto: each rank reads what it sees of what it needs"
        elif asked == "auto" and self._computes:
            why = "values are computed, and an exchange would hold all that they are computed from"
            self.comm_method, self.comm_reason = "direct", f"auto: {why}"
        elif asked == "auto":
            self.comm_method = "cooperative" if fetched >= _WORTH_IT * needed else "direct"
            self.comm_reason = f"auto: alone, ranks would fetch {fetched} bytes of {needed}"
        elif asked == "direct":
            self.comm_method = "direct"

    def _take_rows(
        self,
        sections: Sections,
        readers: tuple[np.ndarray, np.ndarray],
        ranks: np.ndarray,
        groups: ReplicaGroups,
        sight: Sight | None,
    ) -> None:
        """Make the sections that ranks read the rows of the exchange; ``ranks``: by place, and last that of nobody."""
        section, place = readers
        self.rows = replace(sections.catalog.take(section), rank=ranks[place].astype(np.int32))
        self._start, group = sections.start[section], sections.group[section]
        self._item = groups.first[group]
        if sight is not None:  # one of each group that the reader sees
            seen = np.where(place < 0, -1, sight.rows(group, place))
            self._item = np.where(seen < 0, self._item, seen)
        self._round = number_rounds(place, self.rows.byte_length)

    def _open_files(self, plan: ExchangePlan) -> None:
        """Open the files that this rank is to read."""
        reader = self._reader = self.files.open_reader()
        used = [plan.local.source, *(pieces.source for pieces in plan.outgoing.values())]
        rows = np.unique(np.concatenate(used))
        self._read_bytes = int(self.rows.byte_length[rows].sum())
        with reading(self.path):
            reader.check_files(self._item[rows])

    @property
    def round_of_row(self) -> np.ndarray:
        """Return int64 per row, the round in which its reader reads and sends it."""
        return self._round

    def open_rows(self, rounds: Rounds) -> HeldRows:
        """Return the rows that this rank reads, round by round; a thread reads ahead."""
        meter = self._meter = self._options.meter("read", self._read_bytes)
        size, dtypes = self.rows.size, [dtype_of(name).numpy for name in self.rows.dtypes]

        def reads(number: int) -> Pieces:
            pieces = reads_of_rows(rounds.used(number))
            base = pieces.source_base + self._start[pieces.source]
            return replace(pieces, source=self._item[pieces.source], source_base=base)

        def read(number: int) -> Storage:
            there: dict[int, np.ndarray] = {}
            with reading(self.path):
                if number == 0 and self._reader.files.reads_ahead:
                    announce_reads(self._reader, [reads(each) for each in range(rounds.count)])
                pieces = reads(number)
                for item, row, copy in zip(pieces.source.tolist(), pieces.target.tolist(), pieces.copies()):
                    if row not in there:
                        there[row] = np.empty(size[row], dtype=dtypes[self.rows.dtype[row]])
                    self._reader.read(item, copy, there[row])
                    meter.add(copy.size * there[row].itemsize)
            return there.__getitem__

        return RowsReadAhead(rounds.count, read)

    def move(self, task: Task) -> dict[str, Any]:
        """Read, copy, send and receive."""
        method = {"comm_method": self.comm_method, "comm_reason": self.comm_reason}
        if not self.between_ranks:
            return {**self.files.move(task), **method}
        moved = super().move(task)
        self._meter.finish()
        reads = reads_of(self._reader)
        if self._found is not None:
            used = {self.catalog.key_name(row): row for row in self._found.damaged_rows(self._comm.position)}
            text = "{} is damaged in this rank's directory; read from another node's copy"
            reads["replicas_used"] |= {key: text.format(self.catalog.file_name(row)) for key, row in used.items()}
        return {**moved, "reads": self._reader.count.reads, **reads, **method}

    def _lost(self, rows: np.ndarray) -> list[str]:
        """Return the lost parts of some source rows, by file."""
        catalog, manifest = self.catalog, self.files.manifest
        items = np.unique(self._item[rows])
        wrong = {} if self._found is None else dict(self._found.wrong)
        for name, _ in () if self._found is None else set().union(*self._found.damaged.values()):
            wrong.setdefault(name, "the copies that ranks see are damaged")
        texts = []
        for file in np.unique(catalog.file[items]).tolist():
            name = catalog.files[file]
            keys = sorted({catalog.key_name(item) for item in items[catalog.file[items] == file].tolist()})
            not_rebuilt = "" if self._found is None else self._found.not_rebuilt.get(name, "")
            why = "; ".join(filter(None, [wrong.get(name, "no rank sees it"), not_rebuilt]))
            nodes = " and ".join(manifest.nodes_of(name)) or "storage that was shared"
            texts.append(
                f"{name!r} of id {manifest.unique_id} with shards of {listed(list(map(repr, keys)), _MOST_KEYS)}: "
                f"it is on node {nodes}, and {why}"
            )
        return texts


def _by_rank(ranks: Sequence[int], places: Sequence[bytes]) -> np.ndarray:
    """Return int64 by rank, the number of its place; the last entry is that of nobody."""
    node = np.full(max(ranks) + 2, -1, dtype=np.int64)
    number: dict[bytes, int] = {}
    node[np.asarray(ranks)] = [number.setdefault(place, len(number)) for place in places]
    return node


def _places(ranks: Sequence[int]) -> np.ndarray:
    """Return int64 by rank, its place in the group."""
    places = np.full(max(ranks) + 1, -1, dtype=np.int64)
    places[np.asarray(ranks)] = np.arange(len(ranks))
    return places

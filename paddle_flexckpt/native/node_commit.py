"""Copy and commit one save to the directories of nodes that share no storage: by the ranks, or by their writers.

Tested in tests/saving/test_nodes.py, tests/crash/test_nodes.py and tests/background/test_nodes.py.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paddle_flexckpt.catalog import CheckpointError, LostRankError
from paddle_flexckpt.media.backend import Lock
from paddle_flexckpt.native.file_exchange import Making, exchange_files
from paddle_flexckpt.native.manifest import Manifest, merge_parts
from paddle_flexckpt.native.node_directory import NodeDirectory
from paddle_flexckpt.native.parity import Block, Range, group_nodes, stripe_of, write_copy, write_parity
from paddle_flexckpt.native.save_directory import CleanUpError
from paddle_flexckpt.native.save_names import SaveNames
from paddle_flexckpt.progress import SILENT, Meter
from paddle_flexckpt.ranks.communicator import Communicator

logger = logging.getLogger("paddle_flexckpt")
# Precedes the reason why not all nodes have published a save.
SOME_PUBLISHED = "some nodes may have published the checkpoint, others could not"


@dataclass(frozen=True)
class NodeLayout:
    """The nodes of a save.

    Attributes:
        nodes: By node, the positions of its ranks, in rising order. The first of them commits there.
        names: By node, its name in manifests and errors.
        copies: The number of nodes that get each data file.
        parity: The number of nodes of a group, each of which has parity of the others' files; None: there is none.
    """

    nodes: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    copies: int = 1
    parity: int | None = None

    @functools.cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        """Return the number of each rank's node, and the rank's place there, by position."""
        return {
            position: (number, place)
            for number, members in enumerate(self.nodes)
            for place, position in enumerate(members)
        }

    def node_of(self, position: int) -> int:
        """Return the number of a rank's node."""
        return self._places[position][0]

    def holders(self, position: int) -> list[int]:
        """Return the nodes that get a rank's data file, its own first."""
        own = self.node_of(position)
        return [(own + copy) % len(self.nodes) for copy in range(self.copies)]

    def receivers(self, position: int) -> list[int]:
        """Return the positions of the ranks that write copies of a rank's data file on other nodes."""
        place = self._places[position][1]
        members = (self.nodes[node] for node in self.holders(position)[1:])
        return [each[place % len(each)] for each in members]

    def stripes(self) -> list[list[int]]:
        """Return the positions of ranks whose files protect each other by parity: the same place on each node."""
        groups = [] if self.parity is None else group_nodes(len(self.nodes), self.parity)
        return [list(members) for group in groups for members in zip(*(self.nodes[node] for node in group))]

    @property
    def unprotected(self) -> dict[str, list[str]]:
        """Return the hosts whose loss loses data in spite of copies or parity, with the names of their nodes."""
        host = [name.partition("(")[2].partition(":")[0] for name in self.names]
        count = len(self.nodes)
        if self.parity is not None:
            groups = [Counter(host[node] for node in group) for group in group_nodes(count, self.parity)]
            lost = {name for group in groups for name, several in group.items() if several > 1}
        else:
            held = [{host[(node + copy) % count] for copy in range(self.copies)} for node in range(count)]
            lost = {name for hosts in held for name in hosts if len(hosts) == 1 < self.copies}
        return {each: [name for name, of in zip(self.names, host) if of == each] for each in sorted(lost)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> NodeLayout:
        """Return the layout that ``dataclasses.asdict`` has described, after a way through JSON."""
        return cls(**{**fields, "nodes": tuple(map(tuple, fields["nodes"])), "names": tuple(fields["names"])})


class NodeCommit:
    """The copies and the commit of one save on all nodes.

    Every member makes the same calls: ranks of a job, or their background writers.

    Attributes:
        directory: The directory of this member's node.
        names: The names of the save's files, the same on every node.
        layout: The nodes.
        is_prepared: Whether all nodes have prepared the save, so that any may have published it.
        is_published: Whether all nodes have published it.
    """

    def __init__(
        self, comm: Communicator, directory: NodeDirectory, names: SaveNames, layout: NodeLayout, context: str = ""
    ) -> None:
        """Take the members, the node's directory, the save's names, the nodes, and the beginning of errors' texts."""
        self.directory, self.names, self.layout = directory, names, layout
        self._comm, self._context = comm, context
        self.is_prepared = self.is_published = False
        # Whether this member may remove files here: not while a node may have published this save.
        self._is_removable = True

    @property
    def is_committer(self) -> bool:
        """Return whether this member commits on its node."""
        return self.layout.nodes[self.layout.node_of(self._comm.position)][0] == self._comm.position

    def merge(self, parts: Sequence[bytes]) -> Manifest:
        """Return the manifest of all ranks' encoded parts, with the files that each node gets."""
        ranks, layout = self._comm.ranks, self.layout
        merged = merge_parts([Manifest.decode(part, f"the part of rank {rank}") for rank, part in zip(ranks, parts)])
        files: dict[str, list[str]] = {name: [] for name in layout.names}
        known = set(merged.catalog.files)
        for position, rank in enumerate(ranks):
            file = self.names.data_file(rank)
            for node in layout.holders(position) if file in known else ():
                files[layout.names[node]].append(file)
        for members in layout.stripes():
            stripe = stripe_of(merged, [ranks[position] for position in members])
            for member, position in enumerate(members):
                if stripe.parity(member).length:
                    parity = self.names.parity_file(ranks[position])
                    files[layout.names[layout.node_of(position)]].append(parity)
        return replace(merged, nodes={name: tuple(kept) for name, kept in files.items()})

    def gather(self, part: bytes, coordinator: int) -> Manifest:
        """Return the manifest of all members' encoded parts; without rows on a member that does not commit.

        The member at one position merges the parts, and sends the manifest to those that write it. Two collectives.
        """
        comm = self._comm
        _, _, parts = comm.trade(lambda: (None, b"", {coordinator: part}), self._context)

        def send() -> tuple[Manifest | None, bytes, dict[int, bytes]]:
            if comm.position != coordinator:
                return None, b"", {}
            merged = self.merge([parts[position] for position in range(comm.size)])
            sizes, data = Manifest.of_partitions(merged.info, merged.sizes, ()).encode(), merged.encode()
            return merged, sizes, {members[0]: data for members in self.layout.nodes}

        merged, notes, received = comm.trade(send, self._context)
        if merged is not None:
            return merged
        data = received.get(coordinator, notes[coordinator])
        return Manifest.decode(data, f"the manifest of rank {comm.ranks[coordinator]}")

    def run(
        self, manifest: Manifest, warnings: list[str] | None = None, meter: Callable[[str, int], Meter] | None = None
    ) -> None:
        """Copy files to other nodes, and commit on all: prepare, publish, finish. A collective after each.

        Copies and parity take one more, in which the members learn each other's addresses.

        Args:
            manifest: The manifest of all nodes.
            warnings: Collects errors after the commit that do not harm the checkpoint; None raises them.
            meter: Opens a meter of a phase, ``"write"`` or ``"commit"``, with the bytes that this member writes.

        Raises:
            CheckpointError: A node could not commit.
        """
        directory, context, rank, made = self.directory, self._context, self._comm.rank, 0
        open_meter = meter or (lambda phase, nbytes: SILENT)
        node = self.layout.names[self.layout.node_of(self._comm.position)]
        replaced: list[Lock | None] = []

        def prepare() -> None:
            directory.prepare_save(self.names, rank, manifest, node)

        def publish() -> None:
            replaced.append(directory.publish_save(self.names, rank))

        def finish() -> None:
            try:
                directory.finish(self.names, being_read=replaced[0] is None)
            except CleanUpError as error:
                if warnings is None:
                    raise
                warnings.append(str(error))

        if self.layout.copies > 1 or self.layout.parity is not None:
            makings = [*self._copies(manifest), *self._parity(manifest)]
            made = sum(block.length for making in makings if making.maker == rank for block in making.blocks)
            exchange_files(self._comm, makings, directory.backend.open, context, open_meter("write", made))
        open_meter("commit", made)
        self._is_removable = False
        try:
            self._on_nodes(prepare, context)
        except LostRankError:
            raise  # others may not have noticed, and publish
        except CheckpointError:
            self._is_removable = True
            raise
        self.is_prepared = True
        try:
            self._on_nodes(publish, f"{context}: {SOME_PUBLISHED}" if context else SOME_PUBLISHED)
            self.is_published = True
            self._on_nodes(finish, context)
        finally:
            for lock in filter(None, replaced):
                lock.release()

    def _on_nodes(self, step: Callable[[], None], context: str) -> None:
        """Take a step on the committers, and go on only if it went well on all of them. One collective."""

        def work() -> tuple[None, bytes]:
            if self.is_committer:
                step()
            return None, b""

        self._comm.together(work, context)

    def discard(self) -> None:
        """Remove what was written on this node, unless the save may exist. The node's committing member does this."""
        if self._is_removable and self.is_committer:
            self.directory.discard(self.names, self._comm.ranks)

    def lose_rank(self) -> None:
        """Keep the files, as others may still commit.

        If the save is over and was not committed, remove the files that this member has written.
        """
        comm, layout = self._comm, self.layout
        written = [
            rank for position, rank in enumerate(comm.ranks) if comm.position in (position, *layout.receivers(position))
        ]
        self.directory.discard_late(self.names, written)

    def _copies(self, manifest: Manifest) -> Iterator[Making]:
        """Yield the copies that this member sends or writes."""
        ranks, sizes = self._comm.ranks, manifest.sizes
        for position, rank in enumerate(ranks):
            name = self.names.data_file(rank)
            for other in self.layout.receivers(position) if name in sizes else ():
                if self._comm.position in (position, other):
                    whole = Block(sizes[name], (Range(name, 0, sizes[name]),))
                    output = write_copy(self.directory.backend, name, sizes[name])
                    yield Making(ranks[other], [whole], {name: rank}, output)

    def _parity(self, manifest: Manifest) -> Iterator[Making]:
        """Yield the parity files of this member's stripe."""
        for members in self.layout.stripes():
            if self._comm.position in members:
                ranks = [self._comm.ranks[position] for position in members]
                stripe = stripe_of(manifest, ranks)
                for member, rank in enumerate(ranks):
                    if (block := stripe.parity(member)).length:
                        output = write_parity(self.directory.backend, stripe, member)
                        yield Making(rank, [block], dict(zip(stripe.files, ranks)), output)

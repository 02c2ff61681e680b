"""Copy and commit one save to the directories of nodes that share no storage: by the ranks, or by their writers.

Tested in tests/saving/test_nodes.py, tests/crash/test_nodes.py and tests/background/test_nodes.py.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import CheckpointError, LostRankError
from paddle_flexckpt.media.backend import Backend, Lock
from paddle_flexckpt.native.manifest import Manifest, merge_parts
from paddle_flexckpt.native.node_directory import NodeDirectory
from paddle_flexckpt.native.save_directory import CleanUpError
from paddle_flexckpt.native.save_names import SaveNames
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.ranks.transport import open_transport

logger = logging.getLogger("paddle_flexckpt")
# Precedes the reason why not all nodes have published a save.
SOME_PUBLISHED = "some nodes may have published the checkpoint, others could not"
# The bytes of a file that are sent or written at a time.
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class NodeLayout:
    """The nodes of a save.

    Attributes:
        nodes: By node, the positions of its ranks, in rising order. The first of them commits there.
        names: By node, its name in manifests and errors.
        copies: The number of nodes that get each data file.
    """

    nodes: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    copies: int = 1

    def node_of(self, position: int) -> int:
        """Return the number of a rank's node."""
        return next(number for number, members in enumerate(self.nodes) if position in members)

    def holders(self, position: int) -> list[int]:
        """Return the nodes that get a rank's data file, its own first."""
        own = self.node_of(position)
        return [(own + copy) % len(self.nodes) for copy in range(self.copies)]

    def receivers(self, position: int) -> list[int]:
        """Return the positions of the ranks that write copies of a rank's data file on other nodes."""
        own, *others = self.holders(position)
        index = self.nodes[own].index(position)
        return [self.nodes[node][index % len(self.nodes[node])] for node in others]

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
    """

    def __init__(
        self, comm: Communicator, directory: NodeDirectory, names: SaveNames, layout: NodeLayout, context: str = ""
    ) -> None:
        """Take the members, the node's directory, the save's names, the nodes, and the beginning of errors' texts."""
        self.directory, self.names, self.layout = directory, names, layout
        self._comm, self._context = comm, context
        self.is_prepared = False
        # Whether this member may remove files here: not while a node may have published this save.
        self._is_removable = True

    @property
    def is_committer(self) -> bool:
        """Return whether this member commits on its node."""
        return self.layout.nodes[self.layout.node_of(self._comm.position)][0] == self._comm.position

    def merge(self, parts: Sequence[bytes]) -> Manifest:
        """Return the manifest of all ranks' encoded parts, with the data files that each node gets."""
        ranks, layout = self._comm.ranks, self.layout
        merged = merge_parts([Manifest.decode(part, f"the part of rank {rank}") for rank, part in zip(ranks, parts)])
        files: dict[str, list[str]] = {name: [] for name in layout.names}
        known = set(merged.catalog.files)
        for position, rank in enumerate(ranks):
            file = self.names.data_file(rank)
            for node in layout.holders(position) if file in known else ():
                files[layout.names[node]].append(file)
        return replace(merged, nodes={name: tuple(kept) for name, kept in files.items()})

    def run(self, manifest: Manifest, warnings: list[str] | None = None) -> None:
        """Copy files to other nodes, and commit on all: prepare, publish, finish. A collective after each.

        Copies take one more, in which the members learn each other's addresses. ``warnings`` collects errors after the
        commit that do not harm the checkpoint; None raises them.

        Raises:
            CheckpointError: A node could not commit.
        """
        directory, context, rank = self.directory, self._context, self._comm.rank
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

        if self.layout.copies > 1:
            self._copy_files(manifest)
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

    def _copy_files(self, manifest: Manifest) -> None:
        """Send this member's data file to other nodes, and write those of others here. Two collectives."""
        comm, here, backend, layout = self._comm, self._comm.position, self.directory.backend, self.layout
        sizes = dict(zip(manifest.catalog.files, manifest.file_bytes.tolist()))
        files = [self.names.data_file(rank) for rank in comm.ranks]

        def copy() -> tuple[None, bytes]:
            outgoing = {
                comm.ranks[other]: _read(backend, files[here])
                for other in layout.receivers(here)
                if files[here] in sizes
            }
            incoming = {
                comm.ranks[other]: _write(backend, files[other], sizes[files[other]])
                for other in range(comm.size)
                if files[other] in sizes and here in layout.receivers(other)
            }
            with contextlib.ExitStack() as files_under_way:
                for stream in (*outgoing.values(), *incoming.values()):
                    files_under_way.callback(stream.close)
                transport.exchange(addresses, outgoing, incoming)
            return None, b""

        transport = open_transport(comm)
        try:
            _, addresses = comm.together(lambda: (None, transport.address()), self._context)
            comm.together(copy, self._context)
        finally:
            transport.close()


def _read(backend: Backend, name: str) -> Generator[np.ndarray]:
    """Yield the bytes of a file. Each array is used before the next is requested."""
    with backend.open(name) as file:
        buffer = np.empty(min(_CHUNK_BYTES, file.size), dtype=np.uint8)
        for start in range(0, file.size, _CHUNK_BYTES):
            part = buffer[: file.size - start]
            if file.read_into(memoryview(part), start) != len(part):
                raise CheckpointError(f"{backend.where(name)} became shorter while it was copied to another node")
            yield part


def _write(backend: Backend, name: str, size: int) -> Generator[np.ndarray]:
    """Yield buffers to be filled with the bytes of a new file. Each is written when the next is requested."""
    buffer = np.empty(min(_CHUNK_BYTES, size), dtype=np.uint8)
    with backend.create(name, size=size) as file:
        for start in range(0, size, _CHUNK_BYTES):
            part = buffer[: size - start]
            yield part
            file.write(memoryview(part))

"""Saves to nodes that share no storage: who shares a directory with whom, one id for all, and the agreed commit."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from paddle_flexckpt.catalog import CheckpointError, LostRankError, ValidationError
from paddle_flexckpt.catalog.wire import join, split
from paddle_flexckpt.engine.agreement import check_same
from paddle_flexckpt.engine.copies import CHUNK_BYTES
from paddle_flexckpt.live.communicator import Communicator
from paddle_flexckpt.live.transport import Transport
from paddle_flexckpt.media.backend import Backend, write_file
from paddle_flexckpt.media.locks import Lock
from paddle_flexckpt.native.dead_saves import remove_dead_saves
from paddle_flexckpt.native.manifest import Manifest, merge_parts
from paddle_flexckpt.native.node_directory import NodeDirectory
from paddle_flexckpt.native.save_directory import SaveDirectory
from paddle_flexckpt.native.save_names import SaveNames

Storage = Literal["shared", "per_node"]

logger = logging.getLogger("paddle_flexckpt")
# By which ranks find out whether they see the same directory.
_TOKEN = re.compile(r"\d+\.[0-9a-f]{32}\.node", re.ASCII)


@dataclass(eq=False)
class NodeSave:
    """Carry out one save to the directories of several nodes.

    Attributes:
        comm: The ranks.
        directory: This rank's directory.
        context: What is being done, for errors.
        ticket: The save, the same on every rank.
        nodes: By node, the positions of its ranks, in rising order. The first of them commits there.
        names: By node, what manifests and errors call it.
        published: Tokens of earlier saves that a node has published.
        aborted: Tokens of earlier saves that were prepared, and that no node has published.
        copies: On how many nodes each data file is to be.
        may_exist: Whether a node may have published this save: then nothing of it may be removed.
    """

    comm: Communicator
    directory: NodeDirectory
    context: str
    ticket: SaveNames
    nodes: list[list[int]]
    names: list[str]
    published: set[str]
    aborted: set[str]
    copies: int = 1
    may_exist: bool = False

    @property
    def node(self) -> int:
        """Number of this rank's node."""
        return next(number for number, members in enumerate(self.nodes) if self.comm.position in members)

    @property
    def is_committer(self) -> bool:
        """Return whether this rank commits on its node."""
        return self.nodes[self.node][0] == self.comm.position

    def begin(self, copies: int) -> None:
        """Mark the save as begun on this rank's node.

        Args:
            copies: On how many nodes each data file is to be.

        Raises:
            ValidationError: There are fewer nodes than copies of each data file are wanted.
        """
        if not isinstance(copies, int) or isinstance(copies, bool) or not 1 <= copies <= len(self.nodes):
            raise ValidationError(
                [
                    f"node_copies has to be 1 to {len(self.nodes)}, the number of nodes ({', '.join(self.names)}); "
                    f"got {copies!r}. Remedy: lower it, or run on more nodes"
                ]
            )
        self.copies = copies
        if self.is_committer:
            self.directory.mark_save(self.ticket, self.comm.size, len(self.nodes))

    def clean_up(self) -> None:
        """Finish or remove what dead saves have left on this rank's node."""
        if not self.is_committer:
            return
        backend = self.directory.backend
        for name in filter(_TOKEN.fullmatch, backend.names()):
            backend.remove(name)
        self.directory.publish_prepared(self.published)
        remove_dead_saves(self.directory, self.ticket, self.aborted)
        left = sorted(set(self.directory.known_saves().prepared))
        if left:
            logger.warning(
                f"{backend.path} has files of {len(left)} earlier saves that died while they were committed: they stay "
                "until all of the nodes that took part save here again"
            )

    def commit(self, parts: Sequence[bytes], transport: Transport | None, addresses: list[bytes]) -> None:
        """Make the checkpoint exist, on all nodes.

        Args:
            parts: Of all ranks, encoded.
            transport: Carries copies of data files, if there are to be any.
            addresses: Of all ranks' transports.

        Raises:
            CheckpointError: A node could not commit; :attr:`may_exist` tells whether another may have.
        """
        decoded = [Manifest.decode(part, f"the part of rank {rank}") for rank, part in zip(self.comm.ranks, parts)]
        merged = merge_parts(decoded)
        sizes = dict(zip(merged.catalog.files, merged.file_bytes.tolist()))
        placed = [(position, node) for position in range(self.comm.size) for node in self._nodes_of(position)]
        files: dict[str, list[str]] = {name: [] for name in self.names}
        for position, node in placed:
            file = self.ticket.data_file(self.comm.ranks[position])
            if file in sizes:
                files[self.names[node]].append(file)
        manifest = replace(merged, nodes={name: tuple(held) for name, held in files.items()})
        comm, directory, context = self.comm, self.directory, self.context
        rank, name = comm.rank, self.names[self.node]
        replaced: list[Lock | None] = []

        def prepare() -> tuple[None, bytes]:
            if self.is_committer:
                directory.prepare_save(self.ticket, rank, manifest, name)
            return None, b""

        def publish() -> tuple[None, bytes]:
            if self.is_committer:
                replaced.append(directory.publish_save(self.ticket, rank))
            return None, b""

        def finish() -> tuple[None, bytes]:
            if self.is_committer:
                directory.finish(self.ticket, being_read=replaced[0] is None)
            return None, b""

        def copy_files() -> tuple[None, bytes]:
            if transport is not None:
                self._copy_files(sizes, transport, addresses)
            return None, b""

        if transport is not None:
            comm.together(copy_files, context)
        self.may_exist = True
        try:
            comm.together(prepare, context)
        except LostRankError:
            raise  # others may not have noticed, and publish
        except CheckpointError:
            self.may_exist = False
            raise
        try:
            comm.together(publish, f"{context}: some nodes have published the checkpoint, others could not")
            comm.together(finish, context)
        finally:
            for lock in filter(None, replaced):
                lock.release()

    def discard(self) -> None:
        """Remove what this rank wrote, unless the save may exist."""
        if self.may_exist:
            return
        for position in range(self.comm.size):
            if self.comm.position in self._receivers(position):
                _remove(self.directory.backend, self.ticket.data_file(self.comm.ranks[position]))
        self.directory.discard(self.ticket, self.comm.rank)

    def _nodes_of(self, position: int) -> list[int]:
        """Return the nodes that have a rank's data file, its own first."""
        own = next(number for number, members in enumerate(self.nodes) if position in members)
        return [(own + copy) % len(self.nodes) for copy in range(self.copies)]

    def _receivers(self, position: int) -> list[int]:
        """Return the positions of the ranks that write copies of a rank's data file on other nodes."""
        own, *others = self._nodes_of(position)
        index = self.nodes[own].index(position)
        return [self.nodes[node][index % len(self.nodes[node])] for node in others]

    def _copy_files(self, sizes: dict[str, int], transport: Transport, addresses: list[bytes]) -> None:
        """Send this rank's data file to other nodes, and write those of others here."""
        ranks, here, backend = self.comm.ranks, self.comm.position, self.directory.backend
        names = [self.ticket.data_file(rank) for rank in ranks]
        outgoing = {
            ranks[other]: _read(backend, names[here]) for other in self._receivers(here) if names[here] in sizes
        }
        incoming = {
            ranks[other]: _write(backend, names[other], sizes[names[other]])
            for other in range(self.comm.size)
            if names[other] in sizes and here in self._receivers(other)
        }
        transport.exchange(addresses, outgoing, incoming)


def check_storage(storage: Storage, copies: int = 1, in_background: bool = False) -> None:
    """Raise ValidationError if there is no such kind of storage, or it cannot be had with the other options."""
    if storage not in ("shared", "per_node"):
        raise ValidationError([f"storage has to be 'shared' or 'per_node'; got {storage!r}"])
    if storage == "per_node" and in_background:
        raise ValidationError(
            [
                "async_save does not work with storage='per_node': the writer processes of all ranks settle a save "
                "through one directory, which they have to share. Remedy: save with async_save=False"
            ]
        )
    if storage == "shared" and copies != 1:
        raise ValidationError([f"node_copies={copies!r} needs storage='per_node'"])


def check_visible(directory: SaveDirectory, ticket: SaveNames) -> tuple[None, bytes]:
    """Check that this rank sees the save that another has begun, as it has to with storage that all share.

    Raises:
        ValidationError: It does not.
    """
    if not directory.sees(ticket):
        marker = directory.backend.where(ticket.marker_file)
        raise ValidationError(
            [
                f"{marker} is not there, with which the coordinator has begun the save: ranks do not share one "
                "directory. Remedy: give all ranks the same path of storage that they share; or save with "
                "storage='per_node', to a directory on each node"
            ]
        )
    return None, b""


def meet_nodes(
    comm: Communicator,
    open_directory: Callable[[], NodeDirectory],
    unique_id: int | None,
    head: Callable[[], bytes],
    locks: contextlib.ExitStack,
    context: str,
) -> NodeSave:
    """Find out which ranks see the same directory, and agree on one id and the names of a save. Two collectives.

    Args:
        comm: The ranks.
        open_directory: Gives this rank's.
        unique_id: The id that is wanted; None takes the one after the highest that any node has.
        head: Gives what ranks have to agree about.
        locks: Takes the right to save, on the ranks that commit.
        context: What is being done, for errors.

    Raises:
        ValidationError: Ranks disagree, or the id cannot be used.
        CheckpointError: Another save is being made in one of the directories.
    """
    own = f"{comm.rank}.{os.urandom(16).hex()}.node"

    def show() -> tuple[None, bytes]:
        said, backend = head(), open_directory().backend
        backend.make_directory()
        locks.callback(_remove, backend, own)
        write_file(backend, own, b"")
        return None, join((said, own.encode()))

    def look() -> tuple[None, bytes]:
        committer = next((position for position, name in enumerate(tokens) if _is_there(backend, name)), None)
        if committer is None or committer > comm.position:
            raise CheckpointError(
                f"{backend.where(own)} is not there any more: another save is writing to {backend.path}. Remedy: wait "
                "until it has finished"
            )
        said: dict[str, object] = {"committer": committer}
        if committer == comm.position:
            lock = directory.lock()
            locks.callback(lock.release)
            known = directory.known_saves()
            said["place"] = f"{socket.gethostname()}:{backend.path}"
            said["save"] = [*directory.choose_save(unique_id), os.urandom(16).hex()]
            said["known"] = known._asdict()
        return None, json.dumps(said).encode()

    _, answers = comm.together(show, context)
    check_same([split(answer)[0] for answer in answers], context)
    tokens = [split(answer)[1].decode() for answer in answers]
    directory = open_directory()
    backend = directory.backend
    _, answers = comm.together(look, context)
    said = [json.loads(answer) for answer in answers]
    committers = sorted({each["committer"] for each in said})
    strays = [comm.ranks[position] for position in committers if said[position]["committer"] != position]
    if strays:
        raise CheckpointError(
            f"{context}: which ranks share a directory cannot be told, as not all that see the one of ranks {strays} "
            "see each other's files. Remedy: try again; if it stays so, the file system shows new files too late"
        )
    nodes = [[p for p in range(comm.size) if said[p]["committer"] == committer] for committer in committers]
    saves = [said[committer]["save"] for committer in committers]
    known = [said[committer]["known"] for committer in committers]
    chosen = max(save[0] for save in saves)
    generation = max(save[1] for save in saves if save[0] == chosen)
    published = {token for each in known for token in each["published"]}
    aborted = set()
    for token in {token for each in known for token in each["prepared"]} - published:
        of = [each["begun"][token] for each in known if token in each["begun"]]
        if len(of) == of[0]:  # all that took part are here
            aborted.add(token)
    return NodeSave(
        comm,
        directory,
        context,
        SaveNames(chosen, generation, saves[0][2]),
        nodes,
        [f"{number} ({said[committer]['place']})" for number, committer in enumerate(committers)],
        published,
        aborted,
    )


def _remove(backend: Backend, name: str) -> None:
    # It does no harm, and the next save removes it.
    with contextlib.suppress(OSError):
        backend.remove(name)


def _is_there(backend: Backend, name: str) -> bool:
    try:
        backend.open(name).close()
    except FileNotFoundError:
        return False
    return True


def _read(backend: Backend, name: str) -> Iterator[np.ndarray]:
    """Yield the bytes of a file; each array is used before the next is asked for."""
    with backend.open(name) as file:
        buffer = np.empty(min(CHUNK_BYTES, file.size), dtype=np.uint8)
        for start in range(0, file.size, CHUNK_BYTES):
            part = buffer[: file.size - start]
            if file.read_into(memoryview(part), start) != len(part):
                raise CheckpointError(f"{backend.where(name)} became shorter while it was copied to another node")
            yield part


def _write(backend: Backend, name: str, size: int) -> Iterator[np.ndarray]:
    """Yield buffers to be filled with the bytes of a new file; each is written when the next is asked for."""
    buffer = np.empty(min(CHUNK_BYTES, size), dtype=np.uint8)
    with backend.create(name, size=size) as file:
        for start in range(0, size, CHUNK_BYTES):
            part = buffer[: size - start]
            yield part
            file.write(memoryview(part))

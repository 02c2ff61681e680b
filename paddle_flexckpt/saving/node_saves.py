"""Saves to nodes that share no storage: which ranks share a directory, one id for all, and the agreed commit.

Tested in tests/saving/test_nodes.py and tests/crash/test_nodes.py.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import CheckpointError, LostRankError, ValidationError
from paddle_flexckpt.catalog.wire import join, split
from paddle_flexckpt.communication.group_communicators import open_transport
from paddle_flexckpt.communication.transport import Transport
from paddle_flexckpt.media.backend import Backend, Lock, write_file
from paddle_flexckpt.native.manifest import Manifest, merge_parts
from paddle_flexckpt.native.node_directory import NodeDirectory
from paddle_flexckpt.native.save_names import SaveNames
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.saving.save_options import SaveOptions
from paddle_flexckpt.saving.save_plan import Share, WriteMessages
from paddle_flexckpt.transfer.agreement import check_same
from paddle_flexckpt.transfer.copies import CHUNK_BYTES
from paddle_flexckpt.transfer.plan_cache import gather_full

logger = logging.getLogger("paddle_flexckpt")
# A file by which ranks find out whether they see the same directory.
_TOKEN = re.compile(r"\d+\.[0-9a-f]{32}\.node", re.ASCII)


@dataclass(eq=False)
class NodeSave:
    """One save to the directories of several nodes.

    Attributes:
        names: The names of the save's files, the same on every rank.
        nodes: By node, the positions of its ranks, in rising order. The first of them commits there.
        node_names: By node, its name in manifests and errors.
        published: Tokens of earlier saves that a node has published, and that no node has replaced.
        aborted: Tokens of earlier saves that were prepared, and that no node has published.
        copies: The number of nodes that get each data file.
    """

    comm: Communicator
    directory: NodeDirectory
    context: str
    names: SaveNames
    nodes: list[list[int]]
    node_names: list[str]
    published: set[str]
    aborted: set[str]
    copies: int
    # Whether this rank may remove files here: not while a node may have published this save.
    _is_removable: bool = False
    _transport: Transport | None = None
    _addresses: Sequence[bytes] = ()

    @property
    def node(self) -> int:
        """Number of this rank's node."""
        return next(number for number, members in enumerate(self.nodes) if self.comm.position in members)

    @property
    def is_committer(self) -> bool:
        """Return whether this rank commits on its node."""
        return self.nodes[self.node][0] == self.comm.position

    def begin(self) -> tuple[SaveNames, bytes]:
        """Mark the save as begun on this rank's node; return its names, and an address for copies if there are to be.

        Raises:
            ValidationError: There are fewer nodes than copies wanted of each data file.
        """
        copies = self.copies
        if not isinstance(copies, int) or isinstance(copies, bool) or not 1 <= copies <= len(self.nodes):
            raise ValidationError(
                f"node_copies has to be 1 to {len(self.nodes)}, the number of nodes "
                f"({', '.join(self.node_names)}); got {copies!r}. Remedy (FC504): lower it, or run on more nodes"
            )
        self._is_removable = True
        if self.is_committer:
            self.directory.mark_save(self.names, self.comm.size, len(self.nodes))
        if copies == 1:
            return self.names, b""
        self._transport = open_transport(self.comm)
        return self.names, self._transport.address()

    def agree(self, names: SaveNames, places: Sequence[bytes], messages: Sequence[bytes]) -> None:
        """Take the addresses for copies, which :meth:`begin` returned on every rank. Names and places are known."""
        self._addresses = messages

    def write(self, share: Share, hashed: np.ndarray) -> WriteMessages:
        """Write this rank's data file; return its part of the manifest, and the block checksums of all items."""
        self._clean_up()
        with share.data() as data:
            size, directory = self.comm.size, self.directory
            part = directory.write_data(self.names, share.items, data, world_size=size, **share.write_arguments())
        return WriteMessages(part.encode(), part.checksums)

    def write_partitions(self, payloads: Sequence[bytes], received: Mapping[int, bytes]) -> dict[int, bytes]:
        """Write none: those of a large manifest are written on each node, by :meth:`commit`."""
        return {}

    def _clean_up(self) -> None:
        """Finish or remove what dead saves have left on this rank's node."""
        if not self.is_committer:
            return
        backend = self.directory.backend
        for name in filter(_TOKEN.fullmatch, backend.names()):
            backend.remove(name)
        self.directory.publish_prepared(self.published)
        self.directory.cleaner.remove_dead_saves(self.names, self.aborted)
        left = sorted(set(self.directory.known_saves().prepared))
        if left:
            logger.warning(
                f"{backend.path} has files of {len(left)} earlier saves that died while they were committed: they stay "
                "until all of the nodes that took part save here again"
            )

    def commit(self, parts: Sequence[bytes], received: Mapping[int, bytes], described: Mapping[int, bytes]) -> None:
        """Commit on all nodes: prepare, publish, finish, with a collective after each.

        Raises:
            CheckpointError: A node could not commit.
        """
        comm, directory, context = self.comm, self.directory, self.context
        transport, rank = self._transport, comm.rank
        manifest = self._merge(parts)
        replaced: list[Lock | None] = []

        def prepare() -> None:
            directory.prepare_save(self.names, rank, manifest, self.node_names[self.node])

        def publish() -> None:
            replaced.append(directory.publish_save(self.names, rank))

        def finish() -> None:
            directory.finish(self.names, being_read=replaced[0] is None)

        def on_nodes(step: Callable[[], None], context: str = context) -> None:
            def work() -> tuple[None, bytes]:
                if self.is_committer:
                    step()
                return None, b""

            comm.together(work, context)

        if transport is not None:
            comm.together(lambda: self._copy_files(manifest, transport), context)
        self._is_removable = False
        try:
            on_nodes(prepare)
        except LostRankError:
            raise  # others may not have noticed, and publish
        except CheckpointError:
            self._is_removable = True
            raise
        try:
            on_nodes(publish, f"{context}: some nodes may have published the checkpoint, others could not")
            on_nodes(finish)
        finally:
            for lock in filter(None, replaced):
                lock.release()

    def _merge(self, parts: Sequence[bytes]) -> Manifest:
        """Return the manifest of all ranks' parts, with the data files that each node has."""
        ranks = self.comm.ranks
        merged = merge_parts([Manifest.decode(part, f"the part of rank {rank}") for rank, part in zip(ranks, parts)])
        files: dict[str, list[str]] = {name: [] for name in self.node_names}
        known = set(merged.catalog.files)
        for position, rank in enumerate(ranks):
            file = self.names.data_file(rank)
            for node in self._nodes_of(position) if file in known else ():
                files[self.node_names[node]].append(file)
        return replace(merged, nodes={name: tuple(kept) for name, kept in files.items()})

    def discard(self) -> None:
        """Remove what was written on this node, unless the save may exist. The node's committing rank does this."""
        if self._is_removable and self.is_committer:
            self.directory.discard(self.names, self.comm.ranks)

    def lose_rank(self, error: LostRankError) -> None:
        """Keep the files, as other ranks may still commit.

        If the save is over and was not committed, remove the files that this rank has written.
        """
        here = self.comm.position
        written = [
            rank for position, rank in enumerate(self.comm.ranks) if here in (position, *self._receivers(position))
        ]
        self.directory.discard_late(self.names, written)

    def release(self) -> None:
        """Close the transport."""
        if self._transport is not None:
            self._transport.close()

    def _nodes_of(self, position: int) -> list[int]:
        """Return the nodes that have a rank's data file, its own first."""
        own = next(number for number, members in enumerate(self.nodes) if position in members)
        return [(own + copy) % len(self.nodes) for copy in range(self.copies)]

    def _receivers(self, position: int) -> list[int]:
        """Return the positions of the ranks that write copies of a rank's data file on other nodes."""
        own, *others = self._nodes_of(position)
        index = self.nodes[own].index(position)
        return [self.nodes[node][index % len(self.nodes[node])] for node in others]

    def _copy_files(self, manifest: Manifest, transport: Transport) -> tuple[None, bytes]:
        """Send this rank's data file to other nodes, and write those of others here."""
        ranks, here, backend = self.comm.ranks, self.comm.position, self.directory.backend
        sizes = dict(zip(manifest.catalog.files, manifest.file_bytes.tolist()))
        files = [self.names.data_file(rank) for rank in ranks]
        outgoing = {
            ranks[other]: _read(backend, files[here]) for other in self._receivers(here) if files[here] in sizes
        }
        incoming = {
            ranks[other]: _write(backend, files[other], sizes[files[other]])
            for other in range(self.comm.size)
            if files[other] in sizes and here in self._receivers(other)
        }
        with contextlib.ExitStack() as files_under_way:
            for stream in (*outgoing.values(), *incoming.values()):
                files_under_way.callback(stream.close)
            transport.exchange(list(self._addresses), outgoing, incoming)
        return None, b""


def find_nodes(
    comm: Communicator,
    open_directory: Callable[[], NodeDirectory],
    options: SaveOptions,
    locks: contextlib.ExitStack,
    context: str,
) -> NodeSave:
    """Find out which ranks see the same directory, and agree on one id and the names of a save.

    Two collectives, and one more where a node has prepared a save that it has not published.

    ``locks`` takes the right to save, on the ranks that commit.

    Raises:
        ValidationError: Ranks disagree, or the id cannot be used.
        CheckpointError: Another save is being made in one of the directories.
    """
    own = f"{comm.rank}.{os.urandom(16).hex()}.node"

    def show() -> tuple[None, bytes]:
        head, backend = options.encode("save_state_dict"), open_directory().backend
        backend.make_directory()
        locks.callback(_remove, backend, own)
        write_file(backend, own, b"")
        return None, join((head, own.encode()))

    _, answers = comm.together(show, context)
    answers = gather_full(comm, answers, lambda: b"", context)  # others may save to a directory that all share
    check_same([split(answer)[0] for answer in answers], context, comm.ranks)
    tokens = [split(answer)[1].decode() for answer in answers]
    _, answers = comm.together(lambda: _look(comm, open_directory(), tokens, options, locks), context)
    seen = [json.loads(answer) for answer in answers]
    committers = sorted({each["committer"] for each in seen})
    strays = [comm.ranks[position] for position in committers if seen[position]["committer"] != position]
    if strays:
        raise CheckpointError(
            f"{context}: it is not known which ranks share a directory, as not all that see the one of ranks {strays} "
            "see each other's files. Remedy (FC504): try again; if it stays so, the file system shows new files too "
            "late"
        )
    saves = [seen[committer]["save"] for committer in committers]
    chosen = max(save[0] for save in saves)
    node_names = [f"{number} ({seen[committer]['place']})" for number, committer in enumerate(committers)]
    known = [seen[committer]["known"] for committer in committers]
    published, aborted = _earlier_saves(known, node_names)
    if any(each["prepared"] for each in known):
        published = _newest(comm, open_directory(), comm.position in committers, context)
    return NodeSave(
        comm=comm,
        directory=open_directory(),
        context=context,
        names=SaveNames(chosen, max(save[1] for save in saves if save[0] == chosen)),
        nodes=[[p for p in range(comm.size) if seen[p]["committer"] == committer] for committer in committers],
        node_names=node_names,
        published=published,
        aborted=aborted,
        copies=options.node_copies,
    )


def _look(
    comm: Communicator, directory: NodeDirectory, tokens: list[str], options: SaveOptions, locks: contextlib.ExitStack
) -> tuple[None, bytes]:
    """Find the first rank whose token is here; if it is this one, take the lock and choose a save for this node."""
    backend = directory.backend
    committer = next((position for position, token in enumerate(tokens) if _is_there(backend, token)), None)
    if committer is None or committer > comm.position:
        raise CheckpointError(
            f"{backend.where(tokens[comm.position])} is not there any more: another save is writing to {backend.path}. "
            "Remedy (FC403): wait until it has finished"
        )
    seen: dict[str, object] = {"committer": committer}
    if committer == comm.position:
        lock = directory.lock()
        locks.callback(lock.release)
        known = directory.known_saves()
        seen["place"] = f"{socket.gethostname()}:{backend.path}"
        seen["save"] = directory.choose_node_save(options.unique_id, options.overwrite)
        seen["known"] = known._asdict()
    return None, json.dumps(seen).encode()


def _earlier_saves(known: list[dict[str, Any]], node_names: Sequence[str]) -> tuple[set[str], set[str]]:
    """Return the tokens of earlier saves that a node has published, and of those that no node can publish any more."""
    published = {token for each in known for token in each["published"]}
    prepared = {token: names for each in known for token, names in each["prepared"].items()}
    here, aborted = Counter(map(_place, node_names)), set()
    for token in sorted(prepared.keys() - published):
        of = [each["begun"][token] for each in known if token in each["begun"]]
        # All nodes that took part are here. One may not know of that save: it has lost its disk, or has replaced it
        # since.
        places = Counter(map(_place, prepared[token]))
        if len(of) == of[0] or (places and places <= here):
            aborted.add(token)
    return published, aborted


def _newest(comm: Communicator, directory: NodeDirectory, is_committer: bool, context: str) -> set[str]:
    """Return the tokens of saves that are published on a node and replaced on none. One collective."""

    def show() -> tuple[None, bytes]:
        return None, json.dumps(directory.numbers() if is_committer else []).encode()

    _, answers = comm.together(show, context)
    found = [tuple(each) for answer in answers for each in json.loads(answer)]
    newest = {unique_id: number for unique_id, number, _ in sorted(found)}
    return {token for unique_id, number, token in found if number == newest[unique_id]}


def _place(node_name: str) -> str:
    """Return host and path of a node, whose number differs between jobs."""
    return node_name.partition(" ")[2]


def _remove(backend: Backend, name: str) -> None:
    # The file does no harm, and the next save removes it.
    with contextlib.suppress(OSError):
        backend.remove(name)


def _is_there(backend: Backend, name: str) -> bool:
    try:
        backend.open(name).close()
    except FileNotFoundError:
        return False
    return True


def _read(backend: Backend, name: str) -> Generator[np.ndarray]:
    """Yield the bytes of a file. Each array is used before the next is requested."""
    with backend.open(name) as file:
        buffer = np.empty(min(CHUNK_BYTES, file.size), dtype=np.uint8)
        for start in range(0, file.size, CHUNK_BYTES):
            part = buffer[: file.size - start]
            if file.read_into(memoryview(part), start) != len(part):
                raise CheckpointError(f"{backend.where(name)} became shorter while it was copied to another node")
            yield part


def _write(backend: Backend, name: str, size: int) -> Generator[np.ndarray]:
    """Yield buffers to be filled with the bytes of a new file. Each is written when the next is requested."""
    buffer = np.empty(min(CHUNK_BYTES, size), dtype=np.uint8)
    with backend.create(name, size=size) as file:
        for start in range(0, size, CHUNK_BYTES):
            part = buffer[: size - start]
            yield part
            file.write(memoryview(part))

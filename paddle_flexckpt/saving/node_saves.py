"""Saves to nodes that share no storage: which ranks share a directory, one id for all, and what each rank writes.

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
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from paddle_flexckpt.background.earlier_saves import await_earlier
from paddle_flexckpt.catalog import CheckpointError, LostRankError, ValidationError
from paddle_flexckpt.catalog.errors import listed
from paddle_flexckpt.catalog.wire import join, split
from paddle_flexckpt.media.backend import Backend, SaveLock, write_file
from paddle_flexckpt.native.node_commit import NodeCommit, NodeLayout
from paddle_flexckpt.native.node_directory import NodeDirectory
from paddle_flexckpt.native.parity import check_parity
from paddle_flexckpt.native.save_names import SaveNames
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.saving.save_options import SaveOptions
from paddle_flexckpt.saving.save_plan import Share, WriteMessages
from paddle_flexckpt.transfer.agreement import check_same
from paddle_flexckpt.transfer.plan_cache import gather_full

logger = logging.getLogger("paddle_flexckpt")
# The nodes whose hosts a warning has named.
_warned: set[tuple[str, ...]] = set()
# A file by which ranks find out whether they see the same directory.
_TOKEN = re.compile(r"\d+\.[0-9a-f]{32}\.node", re.ASCII)


class NodeSave:
    """One save to the directories of several nodes.

    Attributes:
        directory: The directory of this rank's node.
        names: The names of the save's files, the same on every rank.
        nodes: The copies and the commit on all nodes.
        locks: The right to save on this rank's node, on the rank that commits there; empty once it is handed over.
        published: Tokens of the saves that a node has published, and that no node has replaced.
        aborted: Tokens of the saves that were prepared, and that no node has published.
    """

    def __init__(
        self,
        comm: Communicator,
        nodes: NodeCommit,
        locks: list[SaveLock],
        published: Collection[str] = (),
        aborted: Collection[str] = (),
    ) -> None:
        """Take the ranks, and the attributes."""
        self.directory, self.names = nodes.directory, nodes.names
        self.nodes, self.locks = nodes, locks
        self.published, self.aborted = {*published}, {*aborted}
        self._comm = comm

    def begin(self) -> tuple[SaveNames, bytes]:
        """Mark the save as begun on this rank's node; return its names, and no message.

        Raises:
            ValidationError: There are fewer nodes than copies wanted of each data file, or parity cannot protect them.
        """
        layout = self.nodes.layout
        copies, count = layout.copies, len(layout.nodes)
        if not 1 <= copies <= count:
            raise ValidationError(
                f"node_copies has to be 1 to {count}, the number of nodes "
                f"({', '.join(layout.names)}); got {copies!r}. Remedy (FC504): lower it, or run on more nodes"
            )
        if layout.parity is not None:
            check_parity(layout.parity, layout.nodes, layout.names)
        if self._comm.position == 0:
            _warn_of_hosts(layout)
        if self.nodes.is_committer:
            self.directory.mark_save(self.names, self._comm.size, count)
        return self.names, b""

    def agree(self, names: SaveNames, places: Sequence[bytes], messages: Sequence[bytes]) -> None:
        """Take what the ranks sent. Names and places are known."""

    def write(self, share: Share, hashed: np.ndarray) -> WriteMessages:
        """Write this rank's data file; return its part of the manifest, and the block checksums of all items."""
        self._clean_up()
        with share.data() as data:
            size, directory = self._comm.size, self.directory
            part = directory.write_data(self.names, share.items, data, world_size=size, **share.write_arguments())
        return WriteMessages(part.encode(), part.checksums)

    def write_partitions(self, payloads: Sequence[bytes], received: Mapping[int, bytes]) -> dict[int, bytes]:
        """Write none: those of a large manifest are written on each node, by :meth:`commit`."""
        return {}

    def _clean_up(self) -> None:
        """Finish or remove what dead saves have left on this rank's node."""
        if not self.nodes.is_committer:
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
        """Copy and commit on all nodes; collectives and errors as of :meth:`NodeCommit.run`."""
        self.nodes.run(self.nodes.merge(parts))

    def discard(self) -> None:
        """Remove what was written on this node, unless the save may exist."""
        self.nodes.discard()

    def lose_rank(self, error: LostRankError) -> None:
        """Keep the files, as other ranks may still commit; see :meth:`NodeCommit.lose_rank`."""
        self.nodes.lose_rank()

    def release(self) -> None:
        """Release the right to save here."""
        _release(self.locks)


def find_nodes(
    comm: Communicator,
    open_directory: Callable[[], NodeDirectory],
    options: SaveOptions,
    stack: contextlib.ExitStack,
    context: str,
    number: int = 0,
) -> NodeSave:
    """Find out which ranks see the same directory, and agree on one id and the names of a save.

    Two collectives, and one more where a node has prepared a save that it has not published.

    The ranks that commit take the right to save, which the end of ``stack`` releases unless it was handed over. The
    save's number is higher than ``number``, as given on any of these ranks.

    Raises:
        ValidationError: Ranks disagree, or the id cannot be used.
        CheckpointError: Another save is being made in one of the directories.
    """
    own = f"{comm.rank}.{os.urandom(16).hex()}.node"
    locks: list[SaveLock] = []
    stack.callback(_release, locks)

    def show() -> tuple[None, bytes]:
        head, backend = options.encode("save_state_dict"), open_directory().backend
        await_earlier(backend.path)
        backend.make_directory()
        stack.callback(_remove, backend, own)
        write_file(backend, own, b"")
        return None, join((head, own.encode()))

    _, answers = comm.together(show, context)
    answers = gather_full(comm, answers, lambda: b"", context)  # others may save to a directory that all share
    check_same([split(answer)[0] for answer in answers], context, comm.ranks)
    tokens = [split(answer)[1].decode() for answer in answers]
    _, answers = comm.together(lambda: _look(comm, open_directory(), tokens, options, locks, number), context)
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
    nodes: dict[int, list[int]] = {committer: [] for committer in committers}
    for position, each in enumerate(seen):
        nodes[each["committer"]].append(position)
    layout = NodeLayout(tuple(map(tuple, nodes.values())), tuple(node_names), options.node_copies, options.parity)
    replaces = [chosen, True] in [save[::2] for save in saves]
    names = SaveNames(chosen, max(save[1] for save in saves if save[0] == chosen), replaces)
    commit = NodeCommit(comm, open_directory(), names, layout, context)
    return NodeSave(comm, commit, locks, published, aborted)


def _warn_of_hosts(layout: NodeLayout) -> None:
    """Warn, once in a process, that a host has several directories that protect each other alone."""
    unprotected = layout.unprotected
    what = f"{layout.copies} copies" if layout.parity is None else f"parity={layout.parity}"
    known = what, *unprotected  # each step of a run has directories of its own
    if not unprotected or known in _warned:
        return
    _warned.add(known)
    hosts = listed([f"host {host}" for host in unprotected])
    names = listed([name for several in unprotected.values() for name in several])
    logger.warning(
        f"a checkpoint with {what} does not survive the loss of a host: on {hosts}, directories protect each other "
        f"alone: {names}. Remedy (FC504): give all ranks of a host one directory, or run on more hosts"
    )


def _look(
    comm: Communicator,
    directory: NodeDirectory,
    tokens: list[str],
    options: SaveOptions,
    locks: list[SaveLock],
    number: int,
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
        locks.append(directory.lock())
        known = directory.known_saves()
        seen["place"] = f"{socket.gethostname()}:{backend.path}"
        seen["save"] = directory.choose_node_save(options.unique_id, options.overwrite, number)
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


def _release(locks: list[SaveLock]) -> None:
    while locks:
        locks.pop().release()


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

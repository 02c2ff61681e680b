"""Save to nodes that share no storage: each has its part of the data, and a manifest of all of it.

A save is *prepared* on a node when the data files of its ranks are durable and so is the manifest, under another name.
No node publishes its manifest before all nodes have prepared theirs. So the checkpoint exists, complete, as soon as one
node has published its manifest; and as every node's manifest has the whole catalog, any node can describe the
checkpoint. Files that the save replaces are removed when all nodes have published.

A node whose save died between these two steps cannot know whether another has published: its prepared save stays until
a later save finds out. A save that another node has replaced since is not published any more: that node has a newer
checkpoint of the id, and need not have the files of the older one.

Tested in tests/saving/test_nodes.py and tests/saving/test_node_states.py.
"""

from __future__ import annotations

import contextlib
import logging
from typing import NamedTuple

from paddle_flexckpt.catalog import CorruptCheckpointError
from paddle_flexckpt.media.backend import Lock
from paddle_flexckpt.native.cleaner import find_begun
from paddle_flexckpt.native.directory import number_of
from paddle_flexckpt.native.manifest import Manifest, read_save_token
from paddle_flexckpt.native.parity import read_stripe
from paddle_flexckpt.native.save_directory import SaveDirectory
from paddle_flexckpt.native.save_names import SaveNames, new_token, token_after

logger = logging.getLogger("paddle_flexckpt")


class NodeSaves(NamedTuple):
    """The saves that one node knows of.

    Attributes:
        published: Tokens of the saves that are checkpoints.
        begun: The number of nodes, by token, of the saves whose marker is here.
        prepared: The nodes' names, by token, of those begun saves that are prepared but not published here; none
            if they cannot be read.
    """

    published: list[str]
    begun: dict[str, int]
    prepared: dict[str, list[str]]


class NodeDirectory(SaveDirectory):
    """One node's directory of checkpoints, for saving into it."""

    def tokens(self) -> dict[int, str]:
        """Return the save tokens of the checkpoints whose manifest is here, by id; leave damaged manifests out."""
        found = {}
        for unique_id in self.list_ids():
            name = f"{unique_id}.manifest"
            with contextlib.suppress(FileNotFoundError, CorruptCheckpointError), self.backend.open(name) as file:
                found[unique_id] = read_save_token(file, self.backend.where(name))
        return found

    def choose_node_save(self, unique_id: int | None, overwrite: bool = True, number: int = 0) -> tuple[int, str, bool]:
        """Return the id of a new save, as :meth:`choose_id` does, and a token that is later than those known here.

        Its number is higher than ``number`` too. Return also whether the id has a checkpoint here.
        """
        names = self.backend.names()
        chosen, token = self.choose_id(unique_id, names, overwrite), max(new_token(names), token_after(number))
        # The manifest in place may have only files of other nodes.
        with contextlib.suppress(FileNotFoundError, CorruptCheckpointError):
            token = max(token, token_after(number_of(self.read_committed(chosen, ()))))
        return chosen, token, f"{chosen}.manifest" in names

    def numbers(self) -> list[tuple[int, int, str]]:
        """Return id, number and token of the saves of the checkpoints whose manifest is here and can be read."""
        found = []
        for unique_id in self.list_ids():
            with contextlib.suppress(FileNotFoundError, CorruptCheckpointError):
                manifest = self.read_committed(unique_id, ())
                found.append((unique_id, number_of(manifest), manifest.save_token))
        return found

    def known_saves(self) -> NodeSaves:
        """Return the saves that this node knows of."""
        begun: dict[str, int] = {}
        prepared: dict[str, list[str]] = {}
        for save in find_begun(self):
            begun[save.token] = save.nodes
            for name in save.prepared[:1]:
                prepared[save.token] = []
                with contextlib.suppress(CorruptCheckpointError):
                    manifest = Manifest.decode(self.backend.read(name), self.backend.where(name))
                    prepared[save.token] = list(manifest.nodes)
        return NodeSaves(list(self.tokens().values()), begun, prepared)

    def publish_prepared(self, published: set[str]) -> None:
        """Publish the saves prepared here that another node has published.

        The caller has the lock. None of the saves is one that a node has replaced since.
        """
        for begun in [each for each in find_begun(self) if each.token in published]:
            for name in begun.prepared[:1]:
                data, where = self.backend.read(name), self.backend.where(name)
                try:
                    if Manifest.decode(data, where).save_token != begun.token:
                        raise CorruptCheckpointError(f"{where} is of another save")
                except CorruptCheckpointError as error:
                    logger.warning(f"the save prepared here of id {begun.save.unique_id} stays unpublished: {error}")
                    continue
                replaced = self.publish(SaveNames(begun.save.unique_id, begun.token), data)
                if replaced is not None:
                    replaced.release()

    def prepare_save(self, save: SaveNames, rank: int, manifest: Manifest, node: str) -> None:
        """Make a save ready to be published: write the manifest of all nodes as the committer of this one.

        Raises:
            CorruptCheckpointError: A data file or parity file of this node has changed.
            OSError: The file system refused.
        """
        manifest = self.write_partitions(save, manifest)
        parity = [name for name in manifest.nodes[node] if name in manifest.parity_files]
        self.check_complete(manifest, [name for name in manifest.nodes[node] if name not in parity])
        for name in parity:
            read_stripe(self.backend, name, manifest)
        with self.backend.create(save.prepared_file(rank), "replace") as file:
            file.write(manifest.encode())
        self.backend.sync()

    def publish_save(self, save: SaveNames, rank: int) -> Lock | None:
        """Publish a save that :meth:`prepare_save` has prepared; return as :meth:`publish` does."""
        return self.publish(save, self.backend.read(save.prepared_file(rank)))

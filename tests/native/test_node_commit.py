"""The layout of nodes at the scale of large jobs, in steps that can be counted."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from paddle_flexckpt.catalog import CatalogBuilder
from paddle_flexckpt.loading.file_peers import _by_rank
from paddle_flexckpt.loading.node_files import _found
from paddle_flexckpt.native import manifest as manifest_module
from paddle_flexckpt.native.manifest import Manifest, SaveInfo
from paddle_flexckpt.native.node_commit import NodeCommit, NodeLayout
from paddle_flexckpt.native.parity import stripe_of
from paddle_flexckpt.native.save_names import SaveNames
from paddle_flexckpt.ranks.communicator import Communicator

RANKS, PER_NODE = 16_384, 8


class Comparisons:
    """The number of comparisons of :class:`Counted` and :class:`Place`."""

    count = 0


class Counted(int):
    """A position that counts how often it is compared."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        Comparisons.count += 1
        return int(self) == other


class Place(bytes):
    """A place that counts how often it is compared."""

    __hash__ = bytes.__hash__

    def __eq__(self, other: object) -> bool:
        Comparisons.count += 1
        return bytes(self) == other


@pytest.fixture(autouse=True)
def from_zero():
    Comparisons.count = 0


def layout(**options) -> NodeLayout:
    nodes = [tuple(map(Counted, range(first, first + PER_NODE))) for first in range(0, RANKS, PER_NODE)]
    return NodeLayout(tuple(nodes), tuple(f"{number} (h:/n)" for number in range(len(nodes))), **options)


def test_a_layout_of_many_ranks_takes_a_few_steps_for_each():
    nodes = layout(copies=3)
    for position in map(Counted, range(RANKS)):
        node = position // PER_NODE
        assert nodes.node_of(position) == node
        assert nodes.holders(position) == [(node + copy) % len(nodes.nodes) for copy in range(3)]
        assert len(nodes.receivers(position)) == 2
    assert Comparisons.count <= 20 * RANKS


def test_places_of_many_ranks_take_a_few_steps_for_each():
    places = [Place(b"node %d" % (rank // PER_NODE)) for rank in range(RANKS)]
    node = _by_rank(range(RANKS), places)
    assert len({*node[:-1].tolist()}) == RANKS // PER_NODE and node[-1] == -1
    assert all(node[rank] == node[rank - rank % PER_NODE] for rank in range(RANKS))
    assert Comparisons.count <= 20 * RANKS


def test_what_many_ranks_see_takes_memory_for_each_copy_of_a_shard():
    """Each sees the files of its node and of the next one. A table of ranks and shards would have 256 MiB."""
    names = SaveNames(0, "0000002a" + "ab" * 12)
    files = tuple(map(names.data_file, range(RANKS)))
    catalog = CatalogBuilder(0, files[0])
    for rank in range(RANKS):
        catalog.add(f"w{rank}", "float32", (4,), (0,), (4,))
    rows = replace(catalog.build(), files=files, file=np.arange(RANKS))
    manifest = Manifest.of_save(
        SaveInfo(names.token, 0, RANKS), rows, np.zeros(RANKS, np.uint64), dict.fromkeys(files, 100)
    )
    flags = []
    for node in range(RANKS // PER_NODE):
        bits = np.zeros(1 + RANKS, dtype=bool)
        bits[0] = True
        bits[1 + (np.arange(2 * PER_NODE) + node * PER_NODE) % RANKS] = node != 7  # this node has lost its files
        flags += [np.packbits(bits).tobytes()] * PER_NODE
    tracemalloc.start()
    found = _found(manifest, flags, [b"{}"] * RANKS)
    assert not found.lost.any() and not found.everywhere
    damaged = found.with_damage({0: frozenset([(files[0], 0)])})
    assert damaged.damaged_rows(0) == [0] and damaged.damaged_rows(1) == []
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < RANKS * RANKS / 16


def test_stripes_of_many_ranks_take_the_sizes_of_files_from_one_table(monkeypatch):
    names = SaveNames(0, "0000002a" + "ab" * 12)
    files = tuple(map(names.data_file, range(RANKS)))
    catalog = replace(CatalogBuilder(0, files[0]).build(), files=files)
    info = SaveInfo(names.token, 0, RANKS)
    manifest = Manifest.of_save(info, catalog, (), dict.fromkeys(files, 100))
    tables = []
    monkeypatch.setattr(manifest_module, "zip", lambda *each: tables.append(each) or zip(*each), raising=False)
    nodes = layout(parity=4)
    stripes = [stripe_of(manifest, members) for members in nodes.stripes()]
    assert sum(len(stripe.files) for stripe in stripes) == RANKS
    assert {size for stripe in stripes for size in stripe.sizes} == {100}
    assert len(tables) == 1


class Coordinator(Communicator):
    """One rank, to which all have sent their parts of the manifest; it counts the bytes that it sends."""

    sent = 0

    def __init__(self, parts: list[bytes]) -> None:
        super().__init__(tuple(range(len(parts))), 0)
        self.parts = [{}, dict(enumerate(parts))]

    def _all_gather(self, payload):
        raise NotImplementedError

    def _all_to_all(self, note, payloads):
        received = self.parts.pop()
        if not received:
            self.sent = len(note) * (self.size - 1) + sum(len(each) for to, each in payloads.items() if to)
        return {0: note} if note else {}, received


def test_the_manifest_of_a_thousand_ranks_goes_to_those_that_write_it():
    names, ranks = SaveNames(0, "0000002a" + "ab" * 12), 1024
    parts = []
    for rank in range(ranks):
        builder = CatalogBuilder(rank, names.data_file(rank))
        for number in range(20):
            builder.add(f"layers.{number}.weight", "float32", (ranks, 64), (rank, 0), (1, 64))
        sizes = {names.data_file(rank): 1 << 20}
        part = Manifest.of_save(SaveInfo(names.token, 0, ranks), builder.build(), np.zeros(20, np.uint64), sizes)
        parts.append(part.encode())
    members = tuple(tuple(range(first, first + PER_NODE)) for first in range(0, ranks, PER_NODE))
    nodes = NodeLayout(members, tuple(f"{number} (h:/n)" for number in range(len(members))))
    comm = Coordinator(parts)
    manifest = NodeCommit(comm, None, names, nodes).gather(parts[0], 0)
    assert len(manifest.catalog) == 20 * ranks and manifest.files == [*map(names.data_file, range(ranks))]
    to_all = sum(map(len, parts)) * (ranks - 1)
    assert comm.sent < to_all / 8

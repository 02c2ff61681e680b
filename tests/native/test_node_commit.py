"""The layout of nodes at the scale of large jobs, in steps that can be counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paddle_flexckpt.catalog import CatalogBuilder
from paddle_flexckpt.loading.file_peers import _by_rank
from paddle_flexckpt.native import manifest as manifest_module
from paddle_flexckpt.native.manifest import Manifest, SaveInfo
from paddle_flexckpt.native.node_commit import NodeLayout
from paddle_flexckpt.native.parity import stripe_of
from paddle_flexckpt.native.save_names import SaveNames

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

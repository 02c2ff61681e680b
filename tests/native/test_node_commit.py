"""The layout of nodes at the scale of large jobs, in steps that can be counted."""

from __future__ import annotations

import pytest

from paddle_flexckpt.loading.file_peers import _by_rank
from paddle_flexckpt.native.node_commit import NodeLayout

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

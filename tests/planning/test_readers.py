"""Readers: every section is read once, each rank reads its share, and what it wants itself as far as that allows."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_flexckpt.catalog import CatalogBuilder, concat, group_replicas
from paddle_flexckpt.planning import readers as module
from paddle_flexckpt.planning.readers import (
    choose_readers,
    cut_sections,
    number_rounds,
)
from paddle_flexckpt.planning.sights import Sight

MIB = 1 << 20


def catalog_of(rank, *shards):
    """Shards ``(key, global shape, offset, shape, flat)`` of one rank."""
    builder = CatalogBuilder(rank, f"{rank}_0.safetensors")
    for key, global_shape, offset, shape, flat in shards:
        builder.add(key, "float32", global_shape, offset, shape, flat)
    return builder.build()


def seen_by(sees):
    """What ranks see of sections, each a group of its own, by a table ``[ranks, sections]``."""
    section, view = np.nonzero(sees.T)
    return Sight(np.arange(len(sees)), section * len(sees) + view, section), np.arange(sees.shape[1])


def whole(key, *shape):
    return key, shape, (0,) * len(shape), shape, None


def test_sections_tile_the_stored_shards_in_whole_blocks():
    stored = concat(
        [
            catalog_of(0, whole("a", 1000, 1024), ("z", (8, MIB), (0, 0), (8, MIB), (0, 5 * MIB))),
            catalog_of(1, ("z", (8, MIB), (0, 0), (8, MIB), (5 * MIB, 8 * MIB)), whole("a", 1000, 1024)),
        ]
    )
    groups = group_replicas(stored)
    sections = cut_sections(stored, groups, 2, MIB)
    # One of the two replicas of "a", and both parts of "z".
    assert len(groups) == 3
    catalog, itemsize = sections.catalog, 4
    assert (sections.start * itemsize % MIB == 0).all()
    assert (catalog.byte_length <= module.MOST_SECTION_BYTES).all()
    for group in range(3):
        row = int(groups.first[group])
        of = np.flatnonzero(sections.group == group)
        size = catalog.size[of]
        assert (sections.start[of] == np.cumsum(size) - size).all()
        assert size.sum() == stored.size[row]
        assert (size[:-1] * itemsize % MIB == 0).all()
        base = max(int(stored.flat_start[row]), 0)
        assert (catalog.flat_start[of] == base + sections.start[of]).all()
        assert (catalog.byte_offset[of] == stored.byte_offset[row] + sections.start[of] * itemsize).all()


def test_what_is_smaller_than_a_block_stays_as_it_is():
    stored = catalog_of(0, whole("a", 3), whole("b"), whole("c", 0, 4))
    catalog = cut_sections(stored, group_replicas(stored), 4, MIB).catalog
    assert sorted(catalog.size.tolist()) == [0, 1, 3]
    assert not catalog.is_flattened.any()


def test_there_are_many_sections_for_each_rank_as_far_as_blocks_allow():
    stored = catalog_of(0, whole("a", 1 << 15, 1 << 15))
    for ranks, most in ((1, 8 * MIB), (8, 5 * MIB), (1000, MIB)):
        assert cut_sections(stored, group_replicas(stored), ranks, MIB).catalog.byte_length.max() == most


def wants(*sets):
    """Pairs for sections that are wanted by these places."""
    pairs = [(section, place) for section, places in enumerate(sets) for place in sorted(places)]
    section, place = zip(*pairs)
    return np.asarray(section), np.asarray(place)


def shares(readers, nbytes, ranks):
    return np.bincount(readers[1][readers[1] >= 0], nbytes[readers[0][readers[1] >= 0]], ranks)


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
@pytest.mark.parametrize("kind", ["all want all", "each wants its own", "one wants all", "groups", "uneven"])
def test_one_rank_reads_each_section_and_each_rank_its_share(kind, ranks):
    rng = np.random.default_rng(ranks)
    nbytes = rng.integers(1, 9, 120 * ranks) * MIB
    count = len(nbytes)
    sets = {
        "all want all": [range(ranks)] * count,
        "each wants its own": [[i * ranks // count] for i in range(count)],
        "one wants all": [[0]] * count,
        "groups": [range(i % 2, ranks, 2) for i in range(count)],
        "uneven": [[0] if i % 3 else range(ranks) for i in range(count)],
    }[kind]
    wanted = wants(*sets)
    readers = choose_readers(wanted, nbytes, ranks, True)
    assert (readers[0] == np.arange(count)).all()
    load = shares(readers, nbytes, ranks)
    assert load.sum() == nbytes.sum()
    assert load.max() / load.mean() <= 1.02
    if kind == "all want all" or (
        kind == "groups" and ranks % 2 == 0
    ):  # two groups of as many ranks want about as much
        assert sum(reader not in places for reader, places in zip(readers[1], sets)) <= count // 50


def test_a_rank_reads_what_it_alone_wants():
    wanted, nbytes = wants([0], [1], [1], [0]), np.full(4, MIB)
    assert choose_readers(wanted, nbytes, 2, True)[1].tolist() == [0, 1, 1, 0]


def test_what_nobody_wants_or_sees_has_no_reader():
    wanted, nbytes = wants([0, 1], [], [0], [1, 2]), np.full(4, MIB)
    sees = np.zeros((3, 4), dtype=bool)
    sees[0, 0] = sees[0, 1] = sees[0, 3] = True
    for together in (True, False):
        readers = choose_readers(wanted, nbytes, 3, together, *seen_by(sees))
        assert [each.tolist() for each in readers] == [[0, 1, 2, 3], [0, -1, -1, 0]]


def test_without_shared_storage_each_reads_what_it_wants_and_sees():
    wanted, nbytes = wants([0, 1, 2], [2, 3]), np.full(2, MIB)
    sees = np.asarray([[True, True], [True, True], [False, False], [False, False]])
    section, place = choose_readers(wanted, nbytes, 4, False, *seen_by(sees))
    assert list(zip(section.tolist(), place.tolist())) in ([(0, 0), (0, 1), (1, 0)], [(0, 0), (0, 1), (1, 1)])
    assert choose_readers(wanted, nbytes, 4, True, *seen_by(sees))[0].tolist() == [0, 1]


def test_rounds_are_numbered_for_each_reader_and_bounded():
    reader = np.asarray([1, 0, 1, 0, 1, 1])
    nbytes = np.asarray([5, 8, 4, 1, 7, 2]) * MIB
    assert number_rounds(reader, nbytes).tolist() == [0, 0, 0, 1, 1, 2]
    assert number_rounds(reader[:0], nbytes[:0]).tolist() == []
    rng = np.random.default_rng(0)
    reader, nbytes = rng.integers(0, 7, 1000), rng.integers(1, 8 * MIB, 1000)
    rounds = number_rounds(reader, nbytes)
    for rank in range(7):
        assert (np.diff(rounds[reader == rank]) >= 0).all()
        assert np.bincount(rounds[reader == rank], nbytes[reader == rank]).max() <= module.ROUND_BYTES + 8 * MIB


def test_a_hundred_thousand_sections_of_five_hundred_ranks_are_planned_in_seconds():
    ranks, count = 512, 100_000
    groups = np.arange(count) % 64
    section = np.repeat(np.arange(count), 8)
    place = (groups[:, None] * 8 + np.arange(8)).reshape(-1)
    readers = choose_readers((section, place), np.full(count, 8 * MIB), ranks, True)
    load = shares(readers, np.full(count, 8 * MIB), ranks)
    assert load.max() / load.mean() <= 1.02

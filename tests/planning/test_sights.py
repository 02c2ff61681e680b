"""Which ranks can read which replica groups: as a table of all ranks and rows says it."""

from __future__ import annotations

import numpy as np
import pytest

from paddle_flexckpt.catalog import CatalogBuilder, concat, group_replicas
from paddle_flexckpt.planning.sights import find_sight


def stored(rng, files):
    """Shards of some files, of which several are replicas of each other."""
    parts = []
    for rank in range(files):
        builder = CatalogBuilder(rank, f"{rank}_0.safetensors")
        for key in sorted(rng.choice(12, rng.integers(0, 6), replace=False).tolist()):
            builder.add(f"w{key}", "float32", (4,), (0,), (4,))
        parts.append(builder.build())
    return concat(parts)


@pytest.mark.parametrize("seed", range(20))
def test_a_sight_says_what_a_table_of_ranks_and_rows_says(seed):
    rng = np.random.default_rng(seed)
    files, views, ranks = int(rng.integers(1, 7)), int(rng.integers(1, 5)), int(rng.integers(5, 12))
    catalog = stored(rng, files)
    groups = group_replicas(catalog)
    view = np.append(np.arange(views), rng.integers(0, views, ranks - views))
    by_view = rng.random((views, files)) < 0.4
    numbers = [np.flatnonzero(each) for each in by_view]
    table = by_view[view][:, catalog.file]
    damaged = {}
    for each in range(views if len(catalog) else 0):
        damaged[each] = rng.choice(len(catalog), 2).tolist()
        table[np.ix_(view == each, damaged[each])] = False
    sight = find_sight(catalog, groups, view, numbers, damaged)

    readable = [[row for row in groups.order[start:stop]] for start, stop in zip(groups.start, groups.start[1:])]
    expected = [[min((r for r in rows if table[rank, r]), default=-1) for rank in range(ranks)] for rows in readable]
    group, place = (each.reshape(-1) for each in np.indices((len(groups), ranks)))
    assert sight.rows(group, place).reshape(len(groups), ranks).tolist() == expected
    assert sight.groups.tolist() == [number for number, rows in enumerate(expected) if max(rows) >= 0]
    asked = rng.permutation(len(groups))
    pairs = [(index, rank) for index, g in enumerate(asked) for rank in range(ranks) if expected[g][rank] >= 0]
    assert [*zip(*(each.tolist() for each in sight.readers(asked)))] == pairs

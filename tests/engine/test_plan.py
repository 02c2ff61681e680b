"""Works: how computed values are cut into tiles."""

from __future__ import annotations

from paddle_flexckpt.algebra import Box
from paddle_flexckpt.engine.plan import split_tiles


def test_tiles_follow_each_other_and_are_cut_at_powers_of_two():
    whole = Box((3, 5), (9, 20))
    tiles = list(split_tiles(whole, 100))
    assert [(t.offset, t.shape) for t in tiles] == [
        ((3, 5), (1, 20)), ((4, 5), (4, 20)), ((8, 5), (4, 20)),
    ]  # fmt: skip
    rows = list(split_tiles(whole, 16))
    assert [(t.offset, t.shape) for t in rows[:2]] == [((3, 5), (1, 11)), ((3, 16), (1, 9))]
    assert sum(t.size for t in rows) == whole.size
    assert list(split_tiles(whole, 180)) == [whole]
    assert list(split_tiles(Box((), ()), 1)) == [Box((), ())]
    assert len(list(split_tiles(whole, 1))) == 180

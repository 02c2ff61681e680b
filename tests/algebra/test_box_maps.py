"""Box maps as columns."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from paddle_flexckpt.algebra import BoxMaps


def example() -> BoxMaps:
    """``t[0:2, 0:3] = a[5:8, 1:3] ^T``, ``t[2, 0:3] = b[4:7]``."""
    return BoxMaps(
        ("t",),
        ("a", "b"),
        np.asarray([0, 0]),
        np.asarray([0, 1]),
        np.asarray([[0, 0], [2, 0]]),
        np.asarray([[2, 3], [1, 3]]),
        np.asarray([[5, 1], [0, 4]]),
        np.asarray([[1, 0], [-1, 1]]),
    )


def test_extents_along_the_axes_of_the_source():
    maps = example()
    assert (len(maps), maps.width) == (2, 2)
    assert maps.source_shape.tolist() == [[3, 2], [1, 3]]


def test_wider_maps_say_the_same_of_axes_further_right():
    maps = example().widened(4)
    assert maps.width == 4
    assert maps.target_offset.tolist() == [[0, 0, 0, 0], [0, 0, 2, 0]]
    assert maps.target_shape.tolist() == [[1, 1, 2, 3], [1, 1, 1, 3]]
    assert maps.source_offset.tolist() == [[0, 0, 5, 1], [0, 0, 0, 4]]
    assert maps.target_axis.tolist() == [[-1, -1, 3, 2], [-1, -1, -1, 3]]
    assert maps.source_shape.tolist() == [[1, 1, 3, 2], [1, 1, 1, 3]]
    assert maps.widened(3) is maps.widened(4) is maps
    assert example().widened(3).target_axis.tolist() == [[-1, 2, 1], [-1, -1, 2]]


def test_rows_are_found_by_the_name_of_their_target():
    maps = replace(example(), targets=("none", "one", "two", "last"), target=np.asarray([1, 2])).take(
        np.asarray([0, 1, 1])
    )
    rows = maps.rows_by_target
    assert rows == {"none": slice(0, 0), "one": slice(0, 1), "two": slice(1, 3), "last": slice(3, 3)}
    assert maps.rows_by_target is rows  # whoever asks for many names, one by one, has it made once


def test_some_of_the_maps_with_all_names():
    maps = example()
    for rows in (np.asarray([1]), np.asarray([False, True])):
        part = maps.take(rows)
        assert (len(part), part.targets, part.sources) == (1, ("t",), ("a", "b"))
        assert part.source_offset.tolist() == [[0, 4]]
    assert len(maps.take(np.zeros(2, dtype=bool)).source_shape) == 0

"""Memory that targets share: tied ones are filled once or compared, others are refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paddle_flexckpt.aoa import compile_program
from paddle_flexckpt.catalog import Problem
from paddle_flexckpt.transfer.targets import share_memory
from tests.transfer.samples import Part, catalog, refusal, targets, the_refusal

WHOLE = (2, 3)


def memory(count=1, extra=0):
    return np.zeros((count * 6 + extra,), dtype=np.float32)


def wanted(*arrays, names="abcdef"):
    return targets(*(Part(name, WHOLE, array=array) for name, array in zip(names, arrays)))


def test_targets_with_memory_of_their_own_are_all_filled():
    one, other = memory(2).reshape(2, 6)
    here = wanted(one, None, other, None)
    # Rows that are not to be filled are not looked at.
    assert share_memory(here, {0: "s", 1: "s", 2: "s", 3: "t"}, None) == ([0, 1, 2, 3], {})
    assert share_memory(here, {1: "s", 3: "s"}, None) == ([1, 3], {})
    assert share_memory(here, {}, None) == ([], {})
    assert here.memory.asked == []


def test_tied_targets_of_one_source_are_filled_once_and_others_are_compared_with_the_first():
    one, other = memory(), memory()
    here = wanted(other, one, one, one, one, other)
    assert share_memory(here, dict(enumerate("xstsux")), None) == ([0, 1, 2, 4], {2: 1, 4: 1})
    assert share_memory(here, {1: "s", 2: "s", 3: "t", 4: "t"}, None) == ([1, 3], {3: 1})
    assert here.memory.asked == []


@pytest.mark.parametrize(("one", "other", "shape", "alike"), [
    ("a -> x", "a -> y", (3, 3), True),
    ("a -> x", "b -> y", (3, 3), False),
    ("a^T -> x", "a^T -> y", (3, 3), True),
    ("a^T -> x", "a -> y", (3, 3), False),
    ("a, b -> x, axis=0", "a, b -> y, axis=0", (6, 3), True),
    ("a, b -> x, axis=0", "b, a -> y, axis=0", (6, 3), False),
    ('a -> x, slice="[0:2]"', 'a -> y, slice="[0:2]"', (2, 3), True),
    ('a -> x, slice="[0:2]"', 'a -> y, slice="[1:3]"', (2, 3), False),
    ("a -> x, scale=2.0", "a -> y, scale=2.0", (3, 3), False),
    ("_ -> x", "_ -> y", (3, 3), True),
    ("_ -> x, fill=0", "_ -> y, fill=0", (3, 3), False),
    ("_ -> x", "a -> y", (3, 3), False),
    ("a -> x", "", (3, 3), False),
    ("y -> x", "", (3, 3), False),
    ("a -> x", "y -> y", (3, 3), False),
])  # fmt: skip
def test_what_statements_make_is_compared_by_what_it_is_made_of(one, other, shape, alike):
    """What is computed counts as different: it is compared, which is right, if slow."""
    array = np.zeros(shape, np.float32)
    parts = (Part("more", (1,)), Part("x", shape, array=array), Part("y", shape, array=array))
    source = catalog(*(Part(key, (3, 3)) for key in "ab"), Part("y", shape))
    statements = ['b -> more, slice="[0:1, 0]"', *filter(None, (one, other))]
    mapping = compile_program(statements, source, catalog(*parts))
    expected = ([1], {}) if alike else ([1, 2], {2: 1})
    assert share_memory(targets(*parts), {1: "x", 2: "y"}, mapping) == expected


def test_what_statements_keep_is_alike_whether_moves_speak_of_it_or_not():
    array = np.zeros((2, 3), np.float32)
    parts = (Part("m", (2, 3)), Part("x", (2, 3), array=array), Part("y", (2, 3), array=array))
    mapping = compile_program(["a -> m", "_ -> x"], catalog(Part("a", (2, 3))), catalog(*parts[:2]))
    more = replace(
        mapping,
        tensors={**mapping.tensors, "y": mapping.tensors["x"]},
        regions={**mapping.regions, "y": mapping.regions["x"]},
    )
    assert share_memory(targets(*parts), {0: "m", 1: "x", 2: "y"}, more) == ([0, 1], {})


def told(key, rank, other, box="float32 [0:2, 0:3] of [2, 3]"):
    return Problem(
        "a target shares memory with another, and one would overwrite the other",
        key=key,
        rank=rank,
        expected="memory of its own",
        got=f"memory of target {other} {box}",
        remedy="load into a clone of one of the two, and use that in its place",
        code="FC107",
    )


def test_a_target_that_shares_a_part_of_its_memory_is_refused():
    base = memory(3)
    here = targets(
        Part("far", WHOLE, rank=5, array=base[12:].reshape(WHOLE)),
        Part("late", WHOLE, rank=5, array=base[5:11].reshape(WHOLE)),
        Part("early", WHOLE, rank=5, array=base[:6].reshape(WHOLE)),
    )
    assert refusal(share_memory, here, {0: "s", 1: "t", 2: "u"}, None) == [told("late", 5, "early")]
    # Of one source or of several, and only if both are to be filled.
    assert the_refusal(share_memory, here, {0: "s", 1: "s", 2: "s"}, None).key == "late"
    assert share_memory(here, {0: "s", 1: "t"}, None) == ([0, 1], {})


def test_targets_next_to_each_other_are_not_looked_at():
    base = memory(3)
    here = wanted(*(base[first : first + 6].reshape(WHOLE) for first in (6, 0, 12)))
    assert share_memory(here, dict(enumerate("stu")), None) == ([0, 1, 2], {})
    assert here.memory.asked == []


def test_addresses_in_between_are_allowed_where_no_element_is_shared():
    base = memory(2).reshape(2, 6)
    here = wanted(base[:, 3:], base[:, :3])
    assert share_memory(here, {0: "s", 1: "t"}, None) == ([0, 1], {})
    assert here.memory.asked == [(1, 0)]


def test_the_nearest_of_several_is_named_and_all_problems_are_listed():
    base = memory(4)
    whole = Part("whole", (4, 6), rank=2, array=base.reshape(4, 6))
    small = [Part(name, (3,), rank=2, array=base[3 * n : 3 * n + 3]) for n, name in enumerate("abc")]
    here = targets(small[1], whole, small[2], small[0])
    problems = refusal(share_memory, here, dict(enumerate("stuv")), None)
    # The whole begins where a does, and ends later.
    box = "float32 [0:4, 0:6] of [4, 6]"
    assert problems == [
        told("whole", 2, "a", "float32 [0:3] of [3]"), told("b", 2, "whole", box), told("c", 2, "whole", box)
    ]  # fmt: skip
    # b begins within the whole, which begins within a; and a ends before b begins, so that it is not asked for.
    assert here.memory.asked == [(3, 1), (1, 0), (1, 2)]
    lone = targets(
        Part("one", (9,), array=base[:9]), Part("two", (8,), array=base[1:9]), Part("x", (2,), array=base[5:7])
    )
    problems = refusal(share_memory, lone, dict(enumerate("stu")), None)
    assert [(problem.key, problem.got) for problem in problems] == [
        ("two", "memory of target one float32 [0:9] of [9]"),
        ("x", "memory of target two float32 [0:8] of [8]"),
    ]


def test_a_target_may_lie_far_behind_the_one_that_it_shares_memory_with():
    base = memory(3)
    columns = base.reshape(3, 6)
    here = wanted(columns[:, 1:3], columns[:, 3:5], columns[2, :2])
    problems = refusal(share_memory, here, dict(enumerate("stu")), None)
    assert [(problem.key, problem.got.split()[3]) for problem in problems] == [("c", "a")]
    assert here.memory.asked == [(0, 1), (1, 2), (0, 2)]


def test_one_memory_in_another_order_is_another_part():
    base = memory(2)[:9].reshape(3, 3)
    for other in (base.T, base[::-1], base[:, ::-1]):
        here = targets(Part("a", (3, 3), array=base), Part("b", (3, 3), array=other), Part("c", (3, 3), array=other))
        problem = the_refusal(share_memory, here, {0: "s", 1: "s", 2: "s"}, None)
        assert (problem.key, problem.remedy) == ("b", "load into a clone of one of the two, and use that in its place")
        # In the same order it is the same.
        assert share_memory(here, {1: "s", 2: "s"}, None) == ([1], {})
        assert share_memory(here, {1: "s", 2: "t"}, None) == ([1, 2], {2: 1})


@pytest.mark.parametrize(("shape", "strides", "fits"), [
    ((4, 3), (4, 4), False), ((4, 3), (0, 4), False), ((4, 3), (12, 0), False), ((4,), (2,), False),
    ((4, 3), (8, 4), False), ((4, 3), (-4, 16), True), ((3, 2, 2), (4, 12, 24), True), ((4, 3), (4, 12), False),
    ((1, 3), (0, 8), True), ((2, 2, 2), (16, -8, 40), True), ((2, 2, 2), (16, -8, 24), False),
])  # fmt: skip
def test_elements_of_a_target_have_memory_of_their_own(shape, strides, fits):
    base = memory(20)
    array = np.lib.stride_tricks.as_strided(base[60:], shape, strides)
    here = targets(Part("first", (1,)), Part("w", shape, rank=3, array=array))
    if fits:
        assert share_memory(here, {1: "s"}, None) == ([1], {})
        return
    assert the_refusal(share_memory, here, {1: "s"}, None) == Problem(
        "elements of a target share memory, and one would overwrite another",
        key="w",
        rank=3,
        expected="memory for each element",
        got=f"steps of {list(strides)} bytes, along axes of {shape}",
        remedy="load into a contiguous copy of it, and use that in its place",
        code="FC107",
    )
    # What is not filled is not looked at.
    assert share_memory(here, {0: "s"}, None) == ([0], {})

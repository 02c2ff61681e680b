"""One program of the statements of ranks that hold different parts of a model."""

from __future__ import annotations

import itertools
import random

import pytest

from paddle_flexckpt.aoa import AoaError
from paddle_flexckpt.aoa.union import united_statements
from tests.aoa.small import assert_equal, numbered, room, run

FIRST, LAST = "hf.embed -> embed", "hf.head -> head"


def experts(*numbers: int) -> list[str]:
    """What a rank with some of the experts says: it makes each, and joins gate and up of it."""
    return [
        text
        for e in numbers
        for text in (f"hf.{e}.g^T, hf.{e}.u^T -> e.{e}.gu, axis=1", f"e.{e}.gu^T -> e.{e}.gu", f"hf.{e}.d^T -> e.{e}.d")
    ]


def united(*programs: list[str]) -> list[str]:
    return united_statements(dict(enumerate(programs)))


def test_equal_lists_stay_as_they_are():
    twice = [FIRST, "a^T -> a", "a^T -> a", "x->y"]
    assert united(twice, list(twice), list(twice)) == twice
    assert united([], []) == []
    # Also what this library would not read, which is the load's error.
    assert united(["a -"], ["a -"]) == ["a -"]


def test_experts_of_all_ranks_stand_between_what_ranks_share():
    programs = [[FIRST, *experts(2 * r, 2 * r + 1), LAST] for r in range(3)]
    assert united(*programs) == [FIRST, *experts(0, 1, 2, 3, 4, 5), LAST]
    assert united(programs[2], programs[0]) == [FIRST, *experts(4, 5, 0, 1), LAST]


def test_stages_of_a_pipeline_follow_each_other():
    stages = [[FIRST, "hf.0^T -> l.0"], ["hf.1^T -> l.1"], [], ["hf.2^T -> l.2", LAST, FIRST]]
    # The last stage has the embedding too: it is tied.
    assert united(*stages) == ["hf.2^T -> l.2", LAST, FIRST, "hf.0^T -> l.0", "hf.1^T -> l.1"]
    assert united(*stages[:3]) == [FIRST, "hf.0^T -> l.0", "hf.1^T -> l.1"]


def test_blanks_and_comments_make_no_other_statement():
    assert united(["a->b,axis = 0", "c -> d"], ["a -> b, axis=0  # the same"], []) == ["a->b,axis = 0", "c -> d"]


def test_texts_with_several_statements_are_taken_apart():
    assert united(["a -> b\nc -> d"], ["c -> d", "e -> f"]) == ["a -> b", "c -> d", "e -> f"]


def test_what_one_rank_has_twice_stays_twice():
    assert united(["a -> b", "b^T -> b", "b^T -> b"], ["a -> b", "b^T -> b", "b^T -> b", "c -> d"]) == [
        "a -> b",
        "b^T -> b",
        "b^T -> b",
        "c -> d",
    ]


def test_patterns_of_different_layers_have_nothing_to_do_with_each_other():
    stages = [
        [f"hf.{i}.$EXPERT_ID^T -> l.{i}.e.$EXPERT_ID", f"l.{i}.e.* -> l.{i}.all, stack, axis=0"] for i in range(3)
    ]
    assert united(*stages) == [text for stage in stages for text in stage]


def test_a_pattern_beside_a_name_of_its_form_where_all_ranks_have_both():
    both = ["l.$L -> m.$L", "l.3^T -> m.3"]
    assert united(both, ["x -> y", *both]) == ["x -> y", *both]


def test_every_rank_may_make_a_part_of_what_all_of_them_join():
    join = "m.0,m.1 -> grouped, axis=0"
    programs = [[f"hf.{e}^T -> m.{e}", join] for e in range(2)]
    assert united(*programs) == ["hf.0^T -> m.0", "hf.1^T -> m.1", join]
    star = "m.* -> grouped, stack, axis=0"
    assert united(*([text, star] for text in ("a -> m.0", "b -> m.1"))) == ["a -> m.0", "b -> m.1", star]


def test_the_union_does_what_each_rank_means():
    """However experts are dealt out: the same arrays as of one rank that has all of them."""
    rng = random.Random(1)
    arrays = {f"hf.{e}.{x}": numbered(2, 3, start=100 * e + 10 * i) for e in range(4) for i, x in enumerate("gu")}
    arrays |= {f"hf.{e}.d": numbered(3, 2, start=1000 * e) for e in range(4)}
    target = {f"e.{e}.{x}": room(*shape) for e in range(4) for x, shape in (("gu", (4, 3)), ("d", (2, 3)))}
    join = ["e.0.d,e.1.d,e.2.d,e.3.d -> all, axis=0"]
    expected = run([*experts(0, 1, 2, 3), *join], arrays, {**target, "all": room(8, 3)})
    for _ in range(20):
        order = rng.sample(range(4), 4)
        cut = rng.randint(1, 3)
        programs = [[*experts(*order[:cut]), *join], [*experts(*order[cut:]), *join]]
        assert_equal(run(united(*programs), arrays, {**target, "all": room(8, 3)}), expected)


@pytest.mark.parametrize(
    ("programs", "words"),
    [
        (
            [["hf.a -> a"], ["hf.a^T -> a"]],
            "ranks 0 and 1 contradict each other about 'a': rank 0 has 'hf.a -> a', rank 1 has 'hf.a^T -> a'. Remedy",
        ),
        # Each rank joins its own experts into what ought to be one tensor.
        ([[FIRST, "e.0,e.1 -> w, axis=0"], [FIRST, "e.2,e.3 -> w, axis=0"]], "about 'w': rank 0 has 'e.0,e.1 -> w"),
        ([["a -> b"], ["a -> b", "b^T -> b"]], "rank 1 has 'a -> b', then 'b^T -> b'"),
        ([["l.$L -> m.$L"], ["l.3^T -> m.3"]], "about 'm.3': rank 0 has 'l.$L -> m.$L', rank 1 has 'l.3^T -> m.3'"),
        ([["a.$L.$E -> m.$L.$E"], ["b.7.$E -> m.7.$E"]], "about 'm.7.$E'"),
        ([["w -> e.*, axis=0"], ["v -> e.7"]], "about 'e.7'"),
        (
            [["a -> b", "c -> d"], ["c -> d", "a -> b"]],
            "rank 1 has 'a -> b' after a statement that an earlier rank has after it. Remedy",
        ),
        (
            [["t -> x"], ["a -> t"]],
            "rank 0 reads 't' in 't -> x', and rank 1 assigns 't', but no rank does both: which goes first is",
        ),
        ([["t.$L -> x.$L"], ["a -> t.0"]], "rank 0 reads 't.$L' in 't.$L -> x.$L', and rank 1 assigns 't.0'"),
        ([["t.0 -> x"], ["a.$L -> t.$L"]], "rank 0 reads 't.0' in 't.0 -> x', and rank 1 assigns 't.$L'"),
        # The star would not find what the other rank makes.
        ([["a -> m.0", "m.* -> x, stack, axis=0"], ["b -> m.1"]], "rank 0 reads 'm.*'"),
        ([["a -> b"], ["a -> c", "a -"]], "[rank 1] AOA statement 2, column 3"),
    ],
)
def test_ranks_that_contradict_each_other_are_told_by_rank_and_statement(programs, words):
    with pytest.raises(AoaError) as caught:
        united(*programs)
    assert words in str(caught.value)


def test_ranks_have_their_own_numbers():
    with pytest.raises(AoaError, match="ranks 4 and 6 contradict"):
        united_statements({4: ["a -> b"], 5: ["c -> d"], 6: ["a^T -> b"]})


def test_all_contradictions_are_told():
    with pytest.raises(AoaError) as caught:
        united(["a -> b", "c -> d"], ["a^T -> b", "c^T -> d"])
    assert len(caught.value.problems) == 2


def test_the_order_of_each_rank_is_kept_whatever_the_ranks():
    """Every rank's statements stand in the union in the order that they have there."""
    shared = [f"s.{i} -> t.{i}" for i in range(4)]
    own = [[f"r{r}.{i} -> u{r}.{i}" for i in range(3)] for r in range(3)]
    programs = []
    for r in range(3):
        program: list[str] = []
        for text, mine in itertools.zip_longest(shared[r:], own[r]):
            program += [each for each in (mine, text) if each is not None]
        programs.append(program)
    for order in itertools.permutations(programs):
        found = united(*order)
        assert len(found) == len(set(found)) == 13
        for program in order:
            places = [found.index(text) for text in program]
            assert places == sorted(places)

"""The texts that people read."""

from __future__ import annotations

import importlib
import operator
import pickle
import traceback

import pytest

import paddle_flexckpt as fc
from paddle_flexckpt.catalog import Problem, ValidationError
from paddle_flexckpt.catalog.errors import MAX_LISTED, listed


def test_a_problem_names_all_it_knows():
    problem = Problem(
        "bad", key="w", rank=0, file="0_0.safetensors", expected="[2]", got="[3]", remedy="cut it", code="FC101"
    )
    assert (
        str(problem) == "bad (key 'w', rank 0, file '0_0.safetensors'); expected [2]; got [3]. Remedy (FC101): cut it"
    )


def test_a_problem_names_nothing_that_it_does_not_know():
    assert str(Problem("bad")) == "bad"
    assert str(Problem("bad", expected=0, got=0)) == "bad; expected 0; got 0"
    assert str(Problem("bad", offset=0, end=8)) == "bad (byte 0)"


def test_one_problem_is_one_line():
    error = ValidationError([Problem("bad", key="w")], "loading")
    assert str(error) == "loading: bad (key 'w')"
    assert error.problems == [Problem("bad", key="w")]


def test_one_problem_needs_no_list():
    for problem in (Problem("bad", key="w"), "bad"):
        assert ValidationError(problem, "loading").problems == [problem]
        assert str(ValidationError(problem)) == str(ValidationError([problem]))


def test_problems_are_numbered_and_said_once():
    error = ValidationError([Problem("a"), "b", Problem("a")])
    assert str(error) == "2 problems\n  1. a\n  2. b"
    assert len(error.problems) == 3


def test_problems_of_several_ranks_are_one_line_with_their_ranks():
    """Not those that differ in anything else, and not those of no rank."""
    alike = [Problem("bad", key="w", rank=rank, file="f", remedy="mend it", code="FC101") for rank in (6, 0, 1, 2, 3)]
    others = [Problem("bad", key="v", rank=4), Problem("bad", key="v"), Problem("bad", key="w", rank=4)]
    error = ValidationError([*alike, *others])
    assert error.lines == [
        "bad (key 'w', ranks 0-3, 6, file 'f'). Remedy (FC101): mend it",
        "bad (key 'v', rank 4)",
        "bad (key 'v')",
        "bad (key 'w', rank 4)",
    ]
    assert str(error).startswith(f"4 problems\n  1. {error.lines[0]}\n")
    assert error.problems == [*alike, *others]
    assert str(ValidationError(alike[3:])) == "bad (key 'w', ranks 2-3, file 'f'). Remedy (FC101): mend it"


def test_a_long_list_ends_with_a_count():
    lines = str(ValidationError([f"p{i}" for i in range(MAX_LISTED)])).splitlines()
    assert lines == [f"{MAX_LISTED} problems", *(f"  {i + 1}. p{i}" for i in range(MAX_LISTED))]
    lines = str(ValidationError([f"p{i}" for i in range(MAX_LISTED + 5)])).splitlines()
    assert lines[0] == f"{MAX_LISTED + 5} problems"
    assert len(lines) == MAX_LISTED + 2
    assert lines[-1] == "  ... and 5 more"


def test_the_first_names_are_listed_and_the_others_counted():
    names = list("abcdefg")
    assert listed(names) == "a, b, c, d, e and 2 more"
    assert listed(names[:5]) == "a, b, c, d, e"
    assert listed(names[:6]) == "a, b, c, d, e and 1 more"
    assert listed(names, 2) == "a, b and 5 more"
    assert listed([]) == ""


def test_problems_with_a_common_remedy_have_one_line():
    def problem(key, rank=0, what="shapes differ", code="FC205", remedy="give 'KEY -> KEY', as KEYS"):
        remedy = remedy.replace("KEY ", f"{key} ").replace("KEY'", f"{key}'")
        return Problem(what, key, rank, expected="[2]", got=f"[{key}]", code=code, remedy=remedy)

    other, own, alone = problem("c.w", 0, "odd"), problem("e.w", remedy="load it"), problem("f.w", 0, "odd", "FC101")
    same = [problem("a.w", 1), problem("b.w", 3), problem("a.w", 2)]
    error = ValidationError([*same, other, problem("d.w"), own, alone, "of another rank"])
    assert len(error.problems) == 8
    assert error.lines == [
        "shapes differ (key 'a.w', ranks 1-2); expected [2]; got [a.w], and the like for 2 more keys: 'b.w' (rank 3: "
        "expected [2], got [b.w]), 'd.w' (rank 0: expected [2], got [d.w]). "
        "Remedy (FC205): give 'a.w -> a.w', as KEYS; likewise for the other keys",
        *map(str, (other, own, alone)),
        "of another rank",
    ]
    many = ValidationError([problem(f"{number}.w", remedy="load it") for number in range(50)])
    assert len(many.lines) == 1 and "49 more keys: '1.w' (expected [2], got [1.w]), " in str(many)
    assert "'20.w' (expected [2], got [20.w]) and 29 more. Remedy" in str(many)
    assert "likewise" not in str(many)


@pytest.mark.parametrize("name", [*sum(fc.SUBJECTS["Errors"].values(), ()), "aoa.AoaError"])
def test_a_traceback_names_an_error_as_users_catch_it(name):
    importlib.import_module("paddle_flexckpt.aoa")
    kind = operator.attrgetter(name)(fc)
    error = pickle.loads(pickle.dumps(kind("it failed")))
    assert type(error) is kind
    (line,) = traceback.format_exception_only(kind, error)
    assert line == f"paddle_flexckpt.{name}: it failed\n"

"""Failures: an error keeps its class and text on its way to another rank or process."""

from __future__ import annotations

import json

import pytest

from paddle_flexckpt.aoa import AoaError
from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError, Problem, UnsafePickleError, ValidationError
from paddle_flexckpt.catalog.errors import Failure, combine


@pytest.mark.parametrize(
    "error",
    [
        CheckpointError("it failed"),
        CorruptCheckpointError("damaged"),
        UnsafePickleError("os.system"),
        ValidationError(["one", Problem("two", key="w", rank=1)]),
        AoaError(["column 3"]),
    ],
)
def test_an_error_of_this_library_keeps_class_and_text(error):
    back = Failure.decode(Failure.of(error).encode()).error()
    assert (type(back), str(back)) == (type(error), str(error))


def test_another_error_becomes_a_checkpoint_error_that_names_its_class():
    assert Failure.of(KeyError("x")) == Failure("CheckpointError", ("KeyError: 'x'",))
    back = Failure.decode(Failure.of(OSError(28, "No space left on device")).encode()).error("cannot save")
    assert type(back) is CheckpointError
    assert str(back) == "cannot save: OSError: [Errno 28] No space left on device"


def test_a_class_that_others_do_not_know_travels_as_the_nearest_that_they_do():
    class OwnError(CorruptCheckpointError):
        pass

    class OwnProblem(ValidationError):
        pass

    assert Failure.of(OwnError("x")).kind == "CorruptCheckpointError"
    assert Failure.of(OwnProblem(["x", "y"])) == Failure("ValidationError", ("x", "y"))
    assert type(Failure("NoSuchError", ("x",)).error()) is CheckpointError


def test_other_entries_of_the_json_do_not_matter():
    text = json.dumps({"rank": 3, **Failure("ValidationError", ("x",)).as_dict()})
    assert Failure.from_dict(json.loads(text)) == Failure("ValidationError", ("x",))
    with pytest.raises(KeyError):
        Failure.from_dict({"rank": 3})


def test_the_failures_of_ranks_are_told_once_each_with_their_ranks():
    same, other = Failure("ValidationError", ("same",)), Failure("ValidationError", ("same", "other"))
    assert combine([(0, same), (4, other)]) == Failure("ValidationError", ("[ranks 0, 4] same", "[rank 4] other"))


def test_a_problem_that_each_rank_tells_of_itself_is_one():
    """Not of another rank, and not where anything else differs."""

    def told(of, expected="float32"):
        return str(Problem("dtypes differ", key="w", rank=of, file="0_0.safetensors", expected=expected))

    shared = "dtypes differ (key 'w', file '0_0.safetensors'); expected float32"
    for text, problem in (
        ([told(0)], f"[rank 0] {told(0)}"),
        ([told(0), told(1), told(2)], f"[ranks 0-2] {shared}"),
        ([told(5), told(5)], f"[ranks 0-1] {told(5)}"),
    ):
        assert combine([(r, Failure("ValidationError", (t,))) for r, t in enumerate(text)]).problems == (problem,)
    apart = [Failure("ValidationError", (told(0),)), Failure("ValidationError", (told(1, "int8"),))]
    assert combine([*enumerate(apart)]).problems == (f"[rank 0] {told(0)}", f"[rank 1] {told(1, 'int8')}")
    for rank, where in (({"rank": 0}, ""), ({"rank": 0, "file": "x"}, " (file 'x')")):
        both = [Failure("ValidationError", (str(Problem("bad", **{**rank, "rank": r})),)) for r in (0, 1)]
        assert combine([*enumerate(both)]).problems == (f"[ranks 0-1] bad{where}",)


@pytest.mark.parametrize(
    ("kinds", "combined"),
    [
        (["AoaError", "AoaError"], "AoaError"),
        (["AoaError", "ValidationError"], "ValidationError"),
        (["ValidationError", "CorruptCheckpointError"], "CorruptCheckpointError"),
        (["CorruptCheckpointError", "CheckpointError"], "CheckpointError"),
    ],
)
def test_kinds_are_combined(kinds, combined):
    found = combine([(rank, Failure(kind, ("x",))) for rank, kind in enumerate(kinds)])
    assert found == Failure(combined, ("[ranks 0-1] x",))


def test_an_error_is_told_with_what_was_being_done():
    for kind in ("CorruptCheckpointError", "ValidationError"):
        failure = Failure(kind, ("x",))
        assert (str(failure.error()), str(failure.error("cannot save"))) == ("x", "cannot save: x")
    assert str(Failure("CorruptCheckpointError", ("x", "y")).error("cannot save")) == "cannot save: x; y"
    assert Failure("ValidationError", ("x", "y")).error("cannot save").problems == ["x", "y"]


def test_culprits_come_before_those_who_were_left_waiting():
    waiting, culprit = Failure("StoppedExchangeError", ("refused",)), Failure("CorruptCheckpointError", ("damaged",))
    found = combine([(0, waiting), (1, culprit), (2, waiting)])
    assert found == Failure("CorruptCheckpointError", ("[rank 1] damaged", "[ranks 0, 2] refused"))


def test_a_remedy_of_all_stands_once():
    full = [(rank, Failure("CheckpointError", (f"file {rank} is full. Remedy (FC402): make room",))) for rank in (0, 1)]
    once = "[rank 0] file 0 is full; [rank 1] file 1 is full. Remedy (FC402): make room"
    assert str(combine(full).error()) == once
    other = (2, Failure("CheckpointError", ("it is broken. Remedy (FC406): mend it",)))
    assert str(combine([*full, other]).error()).count("Remedy (") == 3
    assert str(combine([*full, (2, Failure("CheckpointError", ("broken",)))]).error()).count("Remedy (") == 2

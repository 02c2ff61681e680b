"""Communicators: an error on one rank is the same error on every rank."""

from __future__ import annotations

import pytest

from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError, Problem, ValidationError
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.transfer.agreement import check_coordinator, check_same


def agree(errors: dict[int, Exception], size: int = 3, context: str = "cannot x", ranks=None) -> list:
    def job(comm):
        return comm.agree(errors.get(comm.position), f"payload {comm.position}".encode(), context)

    return SimulatedWorld(size).run_all(job, ranks)


def test_without_an_error_every_rank_gets_every_payload():
    assert agree({}) == [[b"payload 0", b"payload 1", b"payload 2"]] * 3


def test_the_text_is_the_same_on_every_rank_and_names_the_rank():
    outcomes = agree(
        {1: ValidationError([Problem("bad", key="w", rank=1, expected=1, got=2, remedy="mend it", code="FC101")])}
    )
    assert {type(outcome) for outcome in outcomes} == {ValidationError}
    assert {str(outcome) for outcome in outcomes} == {
        "cannot x: [rank 1] bad (key 'w', rank 1); expected 1; got 2. Remedy (FC101): mend it"
    }


def trade(errors: dict[int, Exception], size: int = 3) -> list:
    def job(comm):
        def work():
            if comm.position in errors:
                raise errors[comm.position]
            note = b"" if comm.position == 1 else b"note %d" % comm.position
            return comm.rank, note, {to: b"%d to %d" % (comm.position, to) for to in range(comm.position + 1)}

        return comm.trade(work, "cannot x"), comm.collectives

    return SimulatedWorld(size).run_all(job)


def test_each_gets_what_is_for_it_alone_in_one_collective():
    notes = {0: b"note 0", 2: b"note 2"}
    for own, (traded, collectives) in enumerate(trade({})):
        assert traded == (own, notes, {source: b"%d to %d" % (source, own) for source in range(own, 3)})
        assert collectives == 1
    assert trade({}, 1) == [((0, {0: b"note 0"}, {0: b"0 to 0"}), 1)]


def test_an_error_in_a_step_that_trades_is_everybodys():
    outcomes = trade({1: ValidationError(["bad"])})
    assert {(type(outcome), str(outcome)) for outcome in outcomes} == {(ValidationError, "cannot x: [rank 1] bad")}
    assert {str(outcome) for outcome in trade({0: MemoryError("full")}, 1)} == {"cannot x: [rank 0] MemoryError: full"}


def test_what_each_rank_has_found_of_its_own_is_one_problem_of_all():
    def found(rank):
        return ValidationError([Problem("bad", key="w", rank=rank, expected=1, remedy="mend it", code="FC101")])

    outcomes = agree({rank: found(rank) for rank in (0, 1, 2, 3, 6)}, 7)
    assert {str(outcome) for outcome in outcomes} == {
        "cannot x: [ranks 0-3, 6] bad (key 'w'); expected 1. Remedy (FC101): mend it"
    }
    # One rank that has seen the problems of several.
    seen = ValidationError([problem for rank in (0, 1, 2) for problem in found(rank).problems])
    assert {str(outcome) for outcome in agree({1: seen})} == {
        "cannot x: [rank 1] bad (key 'w', ranks 0-2); expected 1. Remedy (FC101): mend it"
    }


def test_global_ranks_are_named_not_positions():
    outcomes = agree({1: ValidationError(["bad"])}, 2, ranks=(4, 7))
    assert {str(outcome) for outcome in outcomes} == {"cannot x: [rank 7] bad"}


def test_a_problem_that_many_ranks_met_is_told_once():
    outcomes = agree({0: ValidationError(["same"]), 2: ValidationError(["same", "other"])})
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert outcomes[1].problems == ["[ranks 0, 2] same", "[rank 2] other"]


@pytest.mark.parametrize(
    ("errors", "kind"),
    [
        ([ValidationError(["a"]), ValidationError(["b"])], ValidationError),
        ([ValidationError(["a"]), CorruptCheckpointError("b")], CorruptCheckpointError),
        ([CheckpointError("a"), CorruptCheckpointError("b")], CheckpointError),
        ([OSError(5, "a"), ValidationError(["b"])], CheckpointError),
        ([KeyError("a"), MemoryError("b")], CheckpointError),
    ],
)
def test_kinds_are_combined(errors, kind):
    outcomes = agree(dict(enumerate(errors)))
    assert [type(outcome) for outcome in outcomes] == [kind] * 3
    (text,) = {str(outcome) for outcome in outcomes}
    assert text.startswith("cannot x: ")
    for words in ("[rank 0] ", "[rank 1] ", "a", "b"):
        assert words in text


def test_a_foreign_errors_type_is_in_the_text_and_its_cause_on_its_rank():
    error = OSError(28, "No space left on device")
    outcomes = agree({2: error})
    assert all("OSError: [Errno 28] No space left on device" in str(outcome) for outcome in outcomes)
    assert outcomes[2].__cause__ is error


def test_an_error_of_ours_is_no_cause_and_a_foreign_one_below_it_is():
    error = ValidationError("wrong")
    assert agree({2: error})[2].__cause__ is None
    error.__cause__ = cause = KeyError("a")
    (found,) = {outcome.__cause__ for outcome in agree({2: error})[2:]}
    assert found is cause


def test_together_goes_on_only_if_all_did_the_step():
    done = []

    def job(comm):
        def step():
            if comm.position == 1:
                raise ValueError("mine")
            return "result", b"p"

        result = comm.together(step, "cannot y")
        done.append(result)

    outcomes = SimulatedWorld(3).run_all(job)
    assert done == []
    assert {str(outcome) for outcome in outcomes} == {"cannot y: [rank 1] ValueError: mine"}


def test_together_returns_the_own_result_and_all_payloads():
    def job(comm):
        return comm.together(lambda: (comm.position * 10, bytes([comm.position])))

    assert SimulatedWorld(2).run(job) == [(0, [b"\0", b"\1"]), (10, [b"\0", b"\1"])]


def test_a_payload_that_looks_like_an_error_is_none():
    def job(comm):
        return comm.agree(None, b'-{"kind": "ValidationError", "problems": []}')

    assert SimulatedWorld(2).run(job) == [[b'-{"kind": "ValidationError", "problems": []}'] * 2] * 2


def test_collectives_are_counted_alone_too():
    solo = SoloCommunicator()
    assert solo.all_gather(b"x") == [b"x"]
    assert (solo.collectives, solo.rank, solo.size) == (1, 0, 1)
    with pytest.raises(ValidationError, match=r"^cannot z: \[rank 0\] bad$"):
        solo.agree(ValidationError(["bad"]), context="cannot z")


@pytest.mark.parametrize("coordinator", [-1, 1, 0.0, None, "0"])
def test_a_coordinator_outside_the_group_is_refused(coordinator):
    with pytest.raises(ValidationError, match="coordinator_rank counts within the process group, 0 to 0"):
        check_coordinator(SoloCommunicator(), coordinator)


def test_ranks_that_disagree_are_told():
    check_same([b'{"step": 1}'] * 3, "cannot save")
    with pytest.raises(ValidationError, match=r'cannot save: ranks disagree: \{"step": 1\}; \{"step": 2\}\. Remedy'):
        check_same([b'{"step": 2}', b'{"step": 1}', b'{"step": 2}'], "cannot save")

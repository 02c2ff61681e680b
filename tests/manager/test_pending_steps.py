"""Saves in the background: when they are forgotten, and who is told that one has failed."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("paddle")

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.manager.pending_steps import PendingSteps
from paddle_flexckpt.testing.simulated import SimulatedWorld


class Save:
    """A save in the background, as one rank sees it."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self.error: CheckpointError | None = None
        self.seen = False
        self.waited = False

    def end(self, error: str | None = None) -> Save:
        self.error = None if error is None else CheckpointError(error)
        self._over.set()
        return self

    def done(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        self.waited = True
        return self._over.wait(timeout)

    def result(self, timeout: float | None = None) -> None:
        assert self._over.wait(300)
        self.seen = True
        if self.error is not None:
            raise self.error


def run(*saves, **options) -> list:
    """Every rank's outcome of a collection and its pending steps afterwards; ``saves``: by step, the ranks' handles."""

    def job(comm):
        pending = PendingSteps(comm)
        for step, handles in saves:
            pending.add(step, handles[comm.position])
        seen = []
        for _ in range(2):
            try:
                pending.collect("cannot go on", **options)
                seen.append(None)
            except CheckpointError as error:
                seen.append(str(error))
            seen.append(sorted(pending.steps))
        return seen, comm.collectives

    outcomes = SimulatedWorld(len(saves[0][1]) if saves else 2).run(job)
    assert len({repr(outcome) for outcome in outcomes}) == 1
    return outcomes[0]


def test_without_any_nothing_is_communicated():
    assert run() == ([None, [], None, []], 0)


def test_one_that_runs_on_some_rank_stays():
    assert run((3, [Save().end(), Save()])) == ([None, [3], None, [3]], 2)


def test_one_that_has_ended_everywhere_is_forgotten():
    saves = (3, [Save().end(), Save().end()]), (4, [Save(), Save()])
    assert run(*saves) == ([None, [4], None, [4]], 2)


def test_a_failure_is_told_on_all_ranks_once_whoever_knows_of_it_first():
    slow = Save()
    threading.Timer(0.05, slow.end, ["disk full"]).start()
    seen, _ = run((3, [slow, Save().end("disk full")]), (4, [Save().end(), Save().end()]))
    assert seen == ["cannot go on: an earlier save failed: [ranks 0-1] disk full", [], None, []]


def test_failures_of_several_saves_are_told_together():
    seen, _ = run((3, [Save().end("first"), Save().end("first")]), (4, [Save().end("second"), Save().end("second")]))
    assert seen[0].count("first") == seen[0].count("second") == 1
    assert seen[1:] == [[], None, []]


def test_the_coordinator_alone_gives_up_the_directory_of_a_save_that_failed():
    given_up = []

    def job(comm):
        pending = PendingSteps(comm, lambda step, error: given_up.append((comm.position, step, str(error))))
        pending.add(3, Save().end("disk full"))
        pending.add(4, Save().end())
        with pytest.raises(CheckpointError, match="disk full"):
            pending.collect("cannot go on")

    SimulatedWorld(2).run(job)
    assert given_up == [(0, 3, "disk full")]


def test_a_failure_that_was_told_already_is_not_told_again():
    told = [Save().end("disk full"), Save().end("disk full")]
    for save in told:
        with pytest.raises(CheckpointError):
            save.result()
    assert run((3, told)) == ([None, [], None, []], 1)


@pytest.mark.parametrize(("wait_for", "waited"), [(None, []), (4, [4]), ("all", [3, 4])])
def test_waiting(wait_for, waited):
    saves = {step: [Save().end(), Save().end()] for step in (3, 4)}
    run(*saves.items(), wait_for=wait_for)
    assert [step for step in saves if all(save.waited for save in saves[step])] == waited
    assert [step for step in saves if any(save.waited for save in saves[step])] == waited

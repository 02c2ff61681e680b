"""Campaigns of simulated seeds lose nothing by a run that hangs, that ends its process, or by being stopped."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

pytest.importorskip("paddle")
pytest.importorskip("greenlet")

from tests.simulated import training
from tests.simulated.cluster import Cluster
from tests.simulated.scenario import Case, Scenario
from tests.simulation import campaign
from tests.simulation.campaign import run_seeds

BAD = 3
SEEDS = 6
MOST_SEEDS = 1_000_000
# Of real time; others of these runs take some 0.1 s.
SECONDS = 3.0


@pytest.fixture
def strike(monkeypatch) -> Callable[[Callable[[], object]], None]:
    """Have a function called by each rank of one seed."""

    def install(function: Callable[[], object]) -> None:
        begin = training.Script.run

        def run(self: training.Script) -> None:
            if self.job.cluster.scenario.seed == BAD:
                function()
            begin(self)

        monkeypatch.setattr(campaign, "draw", lambda seed: Case(Scenario(seed, (1,), steps=1)))
        monkeypatch.setattr(training.Script, "run", run)

    return install


def wait_for_ever() -> None:
    while True:
        time.sleep(0.01)


def refuse_to_end() -> None:
    while True:
        try:
            time.sleep(60.0)
        except Exception:
            continue


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_that_hangs_is_a_violation(strike, jobs, capfd) -> None:
    strike(wait_for_ever)
    totals = run_seeds(0, SEEDS, jobs, run_seconds=SECONDS)
    ((seed, text),) = totals.violated
    assert (totals.runs, seed) == (SEEDS, BAD)
    assert f"has not ended within {SECONDS} s" in text
    assert "<task MainThread of a/rank 0>" in text
    assert "in wait_for_ever" in text
    assert f"VIOLATION, seed {BAD}: " in capfd.readouterr().err


def test_a_run_that_does_not_let_itself_be_ended_costs_its_process_alone(strike, capfd) -> None:
    strike(refuse_to_end)
    totals = run_seeds(0, SEEDS, 2, run_seconds=SECONDS)
    ((seed, text),) = totals.violated
    assert seed == BAD
    assert "ended with status 1" in text
    assert "in refuse_to_end" in capfd.readouterr().err
    assert max(totals.fingerprints) > BAD


def test_a_process_that_dies_costs_its_run_alone(strike) -> None:
    strike(lambda: os.kill(os.getpid(), signal.SIGKILL))
    totals = run_seeds(0, SEEDS, 1)
    assert [seed for seed, _ in totals.violated] == [BAD]
    assert "ended with status -9" in totals.violated[0][1]
    assert set(totals.fingerprints) >= {BAD + 1, BAD + 2}


def test_processes_that_cannot_begin_end_the_campaign(monkeypatch, capfd) -> None:
    monkeypatch.setattr(campaign, "_work", lambda *_: os._exit(7))
    with pytest.raises(RuntimeError, match="5 processes"):
        run_seeds(0, MOST_SEEDS, 1)


def test_processes_are_replaced(strike, monkeypatch) -> None:
    monkeypatch.setattr(campaign, "RUNS_OF_A_PROCESS", 2)
    strike(lambda: None)
    assert run_seeds(0, SEEDS + 1, 2).runs == SEEDS + 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_campaign_that_is_stopped_has_its_totals(strike, number, capfd) -> None:
    told: list[bool] = []

    def tell_once() -> None:
        if not told:
            told.append(True)
            os.kill(os.getppid(), number)

    strike(tell_once)
    before = signal.getsignal(number)
    totals = run_seeds(BAD, MOST_SEEDS, 1)
    assert totals.is_stopped
    assert 1 <= totals.runs < MOST_SEEDS
    assert not totals.violated
    assert f"--first {BAD + totals.runs} goes on" in capfd.readouterr().out
    assert signal.getsignal(number) == before


def test_seeds_are_shared_out(strike) -> None:
    strike(lambda: None)
    alone, together = run_seeds(5, 4), run_seeds(5, 4, 2)
    assert alone.fingerprint() == together.fingerprint()
    assert (alone.runs, alone.commits, alone.states) == (together.runs, together.commits, together.states)


def test_some_seeds_are_simulated_twice_and_another_story_is_a_violation(strike, monkeypatch) -> None:
    strike(lambda: None)
    totals = run_seeds(0, SEEDS, 1, repeated=2)
    assert (totals.runs, totals.repeated, totals.violated) == (SEEDS, SEEDS // 2, [])
    calls: list[int] = []

    def cluster(case: Case) -> Cluster:
        """A step more in each second run."""
        calls.append(0)
        return Cluster(Case(Scenario(case.scenario.seed, (1,), steps=len(calls) % 2 + 1)))

    monkeypatch.setattr(campaign, "Cluster", cluster)
    found = run_seeds(0, 2, 1, repeated=1).violated
    assert [seed for seed, _ in found] == [0, 1]
    assert all("another story" in text for _, text in found)

"""Clusters whose nodes keep steps in memory: what is restored after losses, and what is left."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("paddle")
pytest.importorskip("greenlet")

from tests.simulated.cluster import Cluster, Outcome, simulate
from tests.simulated.memory import mount_of
from tests.simulated.scenario import Case, Fault, Scenario
from tests.simulation.mistakes import make

# While these ranks are at the fourth step; storage has the second.
AT = 3500.0


def case(*faults: Fault, seed: int = 4, ranks: int = 3, **options: Any) -> Case:
    chosen: dict[str, Any] = {
        **{"nodes": ranks, "steps": 6, "save_every": 2, "step_seconds": 1000.0, "grace": 30.0, "habits": ("memory",)},
        **options,
    }
    return Case(Scenario(seed, (ranks,), **chosen), faults)


def restored(outcome: Outcome) -> list[int]:
    """Return what starts have restored, in their order, until faults stop."""
    told = [text for _, _, text in outcome.story]
    steps = [text for text in told[: told.index("faults stop")] if text.startswith("has restored step")]
    return [int(text.rpartition(" ")[2]) for text in dict.fromkeys(steps)]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("storage", ["shared", "object"])
def test_undisturbed(storage, is_async) -> None:
    cluster = Cluster(case(storage=storage, is_async=is_async))
    outcome = cluster.run()
    assert not outcome.violations
    assert outcome.commits == 4
    told = {text for _, _, text in outcome.story}
    assert {f"is told that step {step} is in memory" for step in (1, 3, 5, 7)} <= told
    assert [cluster.world.below(f"/{mount_of(node.name)}/run") for node in cluster.nodes] == [[], [], []]


LOSSES: dict[str, tuple[tuple[Fault, ...], int]] = {
    "processes": ((Fault("kill_job", AT, "job"),), 3),
    "one node": ((Fault("kill_node", AT, "node:1", seconds=5000.0),), 3),
    "two nodes at once": (tuple(Fault("kill_node", AT, f"node:{node}") for node in (0, 2)), 2),
    "the power of all": ((Fault("power_loss", AT, "storage"),), 2),
    "one node, in a save to memory": ((Fault("kill_node", AT, "node:1", "data", 2, 60.0),), 3),
    "one node, when one has published": ((Fault("kill_node", AT, "node:1", "after manifest put in place"),), 4),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("protection", ["copies", "parity"])
def test_a_restart_takes_the_newest_step_that_is_whole(name, protection) -> None:
    faults, step = LOSSES[name]
    outcome = simulate(case(*faults, habits=("memory", protection)))
    assert not outcome.violations
    assert restored(outcome) == [step]


def test_a_node_is_lost_while_a_restore_runs() -> None:
    lost = Fault("kill_node", AT + 0.5, "node:2", "reading", 3, 60.0)
    outcome = simulate(case(Fault("kill_job", AT, "job"), lost))
    assert not outcome.violations
    assert outcome.struck == {"kill_job": 1, "kill_node": 1}
    assert restored(outcome)[-1] == 3


def test_a_node_that_comes_back_with_an_older_save_of_the_step() -> None:
    """The others have lost theirs, and have saved the step again."""
    faults = (
        Fault("drain_node", AT, "node:1", seconds=1700.0),
        Fault("kill_node", AT + 10.0, "node:0", seconds=60.0),
        Fault("kill_job", AT + 1710.0, "job"),
    )
    cases = [case(*faults, seed=seed, ranks=2) for seed in range(3)]
    for each in cases:
        outcome = simulate(each)
        assert not outcome.violations
        assert restored(outcome) == [2, 3]
    with make("memory-old-node"):
        found = [violation.invariant for each in cases for violation in simulate(each).violations[:1]]
    assert {*found} == {"a restore takes the newest step"}


def test_another_run_in_the_same_place() -> None:
    begun = Fault("begin_anew", AT, "storage")
    outcome = simulate(case(begun))
    assert not outcome.violations
    assert restored(outcome) == []
    with make("memory-another-run"):
        assert simulate(case(begun)).violations[0].invariant == "no mixture of two saves"


def test_a_step_that_goes_too_early_is_seen() -> None:
    with make("memory-old-first"):
        assert simulate(case()).violations[0].invariant == "the newest step stays"


def test_files_that_go_are_seen() -> None:
    cluster = Cluster(case())

    def remove() -> None:
        (run,) = cluster.world.below("/node0.memory/run")
        directory = f"/node0.memory/run/{run}/step_00000003"
        data = [name for name in cluster.world.names(directory) if name.endswith(".safetensors")]
        found = cluster.world._find(directory)
        assert found is not None
        cluster.world._mounts["node0.memory"].unlink(found, data[0])

    cluster.scheduler.after(AT, remove)
    assert cluster.run().violations[0].invariant == "a committed checkpoint is whole"

"""Whole clusters from seeds: new ones in each run, which repeat to the byte; and what the invariants see."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import threading
from dataclasses import replace

import pytest

pytest.importorskip("paddle")
pytest.importorskip("greenlet")

from paddle_flexckpt.media import lease, retrying
from paddle_flexckpt.native.verify import Verification
from paddle_flexckpt.tools import verification
from tests.saved import data_file, short
from tests.simulated.cluster import Cluster, simulate
from tests.simulated.drawing import draw
from tests.simulated.faults import phase_of
from tests.simulated.habits import HABITS
from tests.simulated.object_store import Fate
from tests.simulated.scenario import DAY, KINDS, MOMENTS, Case, Fault, Scenario
from tests.simulated.tasks import Process, StuckError
from tests.simulated.world import ROOT
from tests.simulation.mistakes import make
from tests.simulation.run import FOUND

# So long new seeds are tried; a few of them where nothing is said. The whole of it is `make test-simulation`.
SECONDS = os.environ.get("FLEXCKPT_SIMULATION_SECONDS")
TIMEOUT = 600.0


def run(*options: str) -> str:
    command = [sys.executable, "-W", "ignore", "-m", "tests.simulation.run", *options]
    environ = {**os.environ, "PYTHONHASHSEED": "0"}
    timeout = float(SECONDS or 0) + TIMEOUT
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environ, check=False)
    assert done.returncode == 0, f"{' '.join(options)}:\n{done.stdout}\n{done.stderr[-3000:]}"
    return done.stdout


def test_the_first_seeds() -> None:
    seeds = ("--seeds", "100") if SECONDS else ("--first", "46", "--seeds", "1")
    assert "violations: 0" in run(*seeds)


def test_new_seeds() -> None:
    base = random.SystemRandom().randrange(1 << 40)
    print(f"base seed: {base}")
    limit = ("--seeds", "1000000", "--seconds", SECONDS) if SECONDS else ("--seeds", "10")
    first = run("--first", str(base), *limit)
    print(first)
    again = run("--first", str(base), "--seeds", "4")
    fingerprints = [re.search(r"first stories: (\w+)", each)[1] for each in (first, again)]  # type: ignore[index]
    assert fingerprints[0] == fingerprints[1]


@pytest.mark.parametrize("case", sorted(FOUND.glob("*.json")), ids=lambda path: path.stem)
def test_what_was_found_stays_mended(case) -> None:
    assert not simulate(Case.from_json(case.read_text(encoding="utf-8"))).violations


@pytest.mark.parametrize("storage", ["shared", "leased", "object"])
@pytest.mark.parametrize("is_async", [False, True])
def test_undisturbed(storage, is_async) -> None:
    scenario = Scenario(5, (2, 3), nodes=2, storage=storage, is_async=is_async, keep=("latest:2",), steps=3)
    outcome = simulate(Case(scenario))
    assert not outcome.violations
    assert outcome.commits == 4  # one in a last start, of another world size
    assert outcome.restores == 3


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("habits", [(), ("rising",), ("copies",), ("copies", "partitions", "rising"), ("parity",)])
def test_nodes_with_disks_of_their_own(habits, is_async) -> None:
    scenario = Scenario(
        5, (2, 4 if "parity" in habits else 3), nodes=2, storage="per_node", is_async=is_async, steps=3, habits=habits
    )
    cluster = Cluster(Case(scenario))
    outcome = cluster.run()
    assert not outcome.violations
    assert (outcome.commits, outcome.restores) == (4, scenario.world_sizes[1])
    names = cluster.world.names("/node1/run")
    assert len([name for name in names if name.endswith(".manifest")]) == (4 if "rising" in habits else 1)
    # What ranks of the other node wrote.
    assert any(name.startswith("0_") and name.endswith(".safetensors") for name in names) == ("copies" in habits)
    assert any(name.endswith(".parity") for name in names) == ("parity" in habits)


def test_a_file_of_a_node_that_goes_is_seen() -> None:
    cluster = Cluster(Case(Scenario(7, nodes=2, storage="per_node", steps=2)))

    def remove() -> None:
        path = "/node1/run"
        cluster.world.remove_file(path, data_file(cluster.world.names(path), 1))

    cluster.scheduler.after(cluster.scenario.seconds - 100.0, remove)
    assert cluster.run().violations[0].invariant == "a committed checkpoint is whole"


@pytest.mark.parametrize("name", sorted(HABITS.keys() - {"copies", "memory", "parity", "rising"}))
def test_habits(name) -> None:
    storage, is_async = ("object" if name in ("gs", "parts") else "shared"), name in ("blocking", "waves")
    habits = ("large", name) if name == "waves" else (name,)
    scenario = Scenario(5, (2, 3), 2, storage, is_async, keep=("best:1", "latest:2"), steps=3, habits=habits)
    cluster = Cluster(Case(scenario))
    outcome = cluster.run()
    assert not outcome.violations
    assert outcome.commits >= (3 if name == "upgrade" else 4)
    names, root = cluster.world.names(ROOT), cluster.world.directories()
    assert len([each for each in names if each.endswith(".html")]) == (len(root) if name == "pages" else 0)
    assert len([each for each in names if each.endswith(".json")]) == (len(root) if name == "reports" else 0)
    partitions = [each for each in cluster.world.names(root[-1]) if each.endswith(".partition")]
    assert bool(partitions) == (name == "partitions")
    told = [text for _, _, text in outcome.story]
    assert ("has restored step 1" in told) == (name in ("best", "upgrade"))


def test_a_person_finds_damage_and_repairs() -> None:
    kinds, repaired = set(), 0
    for seed in range(8):
        habits = ("partitions",) if seed % 3 == 0 else ()
        scenario = Scenario(seed, keep=("latest:3",), steps=3, habits=habits)
        at = 2.5 * scenario.step_seconds
        outcome = simulate(Case(scenario, (Fault("care_damage", at, amount=seed), Fault("care_look", at + 1.0))))
        assert not outcome.violations
        told = [text for _, _, text in outcome.story]
        kinds |= {text.rpartition(": ")[2] for text in told if text.startswith("damage to")}
        repaired += any(text.startswith("has repaired") for text in told)
    assert len(kinds) == 7
    assert repaired == 3  # whose manifest was lost or changed


def test_a_verification_that_sees_nothing_is_seen(monkeypatch) -> None:
    monkeypatch.setattr(verification, "verify_files", lambda *_: Verification())
    scenario = Scenario(3, (1,), steps=2)
    at = 1.5 * scenario.step_seconds
    outcome = simulate(Case(scenario, (Fault("care_damage", at, amount=2), Fault("care_look", at + 1.0))))
    assert outcome.violations[0].invariant == "damage is found"


@pytest.mark.parametrize("moment", ["manifest begun", "manifest put in place", "after manifest put in place"])
def test_a_death_at_a_commit(moment) -> None:
    fault = Fault("kill_rank", 0.0, "rank:0", moment)
    outcome = simulate(Case(Scenario(6, keep=("latest:1",), steps=2), (fault,)))
    assert not outcome.violations
    assert outcome.struck == {"kill_rank": 1}
    assert [state[:2] for state in outcome.states] != []


@pytest.mark.parametrize("seeds", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_loss_by_survivors_is_seen(seeds) -> None:
    """A rank dies while a commit takes long; another must not remove what the coordinator is about to commit."""

    def case(seed: int, sends: int) -> Case:
        """Stop a rank at one of its messages; in which exchange that is depends on the seed."""
        faults = (
            Fault("slow_call", 999.0, "rank:0", "manifest put in place", seconds=20.0),
            Fault("stop_rank", 999.0, "rank:2", "send", sends, seconds=200.0),
            Fault("kill_rank", 1005.0, "rank:2"),
        )
        return Case(Scenario(seed, (3,), steps=1, step_seconds=1000.0, grace=300.0), faults)

    cases = [case(seed, sends) for seed in range(seeds) for sends in range(4, 9)]
    assert not any(simulate(each).violations for each in cases)
    with make("survivors-discard"):
        found = [found for each in cases for found in simulate(each).violations[:1]]
    assert {each.invariant for each in found} == {"a committed checkpoint is whole"}
    assert all("1_0-1.safetensors has None bytes" in short(each.text) for each in found)


@pytest.mark.parametrize("habits", [("copies",), ("parity",), ()])
def test_a_disk_that_a_node_loses_costs_what_has_no_copy(habits) -> None:
    scenario = Scenario(5, (3,), nodes=3, storage="per_node", steps=3, step_seconds=1000.0, grace=100.0, habits=habits)
    outcome = simulate(Case(scenario, (Fault("lose_disk", 2500.0, "node:1"),)))
    restored = {text for _, _, text in outcome.story if text.startswith("has restored step")}
    if habits:
        assert not outcome.violations
        assert restored == {"has restored step 2", "has restored step 3"}
    else:
        assert outcome.violations[0].invariant == "a committed checkpoint is whole"
        assert "is on no node" in outcome.violations[0].text


def test_a_file_that_goes_is_seen() -> None:
    cluster = Cluster(Case(Scenario(7, steps=2)))

    def remove() -> None:
        disk = cluster.world.disks[0]
        directory = cluster.world.directories()[0]
        above = cluster.world._find(directory)
        assert above is not None
        disk.unlink(above, data_file(above.entries))

    cluster.scheduler.after(cluster.scenario.seconds - 100.0, remove)
    assert cluster.run().violations[0].invariant == "a committed checkpoint is whole"


def test_a_story_repeats_in_one_process_too() -> None:
    case = draw(12)
    assert simulate(case).fingerprint == simulate(case).fingerprint
    other = replace(case, scenario=replace(case.scenario, seed=13))
    assert simulate(case).fingerprint != simulate(other).fingerprint


@pytest.mark.parametrize("seeds", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_a_fault_that_never_strikes_changes_nothing(seeds) -> None:
    """Or a case that is made shorter would be another one."""
    for seed in range(40, 40 + seeds):
        case = draw(seed)
        faults = [Fault("kill_rank", 7_000.0 * count, "rank:99", "fsync") for count in range(20)]
        more = replace(case, faults=tuple(sorted([*case.faults, *faults], key=lambda fault: fault.at)))
        assert simulate(more).fingerprint == simulate(case).fingerprint


CALLS = {
    "random": lambda: retrying.random.random(),
    "urandom": lambda: lease.os.urandom(16),
    "sleep": lambda: retrying.time.sleep(1.0),
    "getpid": lambda: lease.os.getpid(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_real_thread_that_was_left_running_changes_nothing(call) -> None:
    """One of an earlier test, say, which goes on to call the library while its modules are simulated."""
    scenario = Scenario(5, (2,), steps=2)
    expected = simulate(Case(scenario)).fingerprint
    cluster, refused = Cluster(Case(scenario)), []

    def interfere() -> None:
        try:
            refused.append(call())
        except StuckError as error:
            refused.append(str(error))

    def on_call(kind: str, where: str) -> float:
        if kind == "rename" and not refused:
            thread = threading.Thread(target=interfere, name="left")
            thread.start()
            thread.join()
        return real(kind, where)

    real = cluster.faults.on_call
    cluster.faults.on_call = on_call  # type: ignore[method-assign]
    assert cluster.run().fingerprint == expected
    assert refused == ["a simulated call from the real thread 'left', which something else has left running"]


def test_what_is_drawn() -> None:
    cases = [draw(seed) for seed in range(3000)]
    assert cases[5] == draw(5)
    assert all(Case.from_json(case.to_json()) == case for case in cases[:50])
    assert {fault.kind for case in cases for fault in case.faults} == {*KINDS}
    assert {fault.moment.removeprefix("after ") for case in cases for fault in case.faults} == {"", *MOMENTS}
    assert all(case.scenario.seconds == pytest.approx(DAY) for case in cases)
    assert max(max(case.scenario.world_sizes) for case in cases) >= 16
    assert {case.scenario.storage for case in cases} == {"shared", "leased", "object", "per_node"}
    assert {habit for case in cases for habit in case.scenario.habits} == {*HABITS}


def test_phases() -> None:
    assert phase_of("", "") == "training"
    assert phase_of("rename", "/shared/run/step_00000001/0.manifest") == "manifest: rename"
    assert phase_of("select", "") == "between ranks"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("who", ["writer", "both"])
def test_a_save_is_not_called_a_failure_while_its_manifest_is_on_its_way(who, ranks):
    """Who has sent it to a store dies, and the request is carried out a minute later."""
    if who == "both" and ranks == 1:
        pytest.skip("nobody is left who would be told")
    scenario = Scenario(1, (ranks,), storage="object", is_async=True, steps=3, step_seconds=300.0, on_error="continue")
    cluster, sent = Cluster(Case(replace(scenario, grace=20.0))), []

    def fate(operation: str, key: str, process: Process) -> Fate:
        if operation != "put" or not key.endswith("/0.manifest") or sent:
            return "done"
        sent.append(key)
        dying = [process, process.parent] if who == "both" else [process]
        cluster.scheduler.after(5.0, lambda: [each.kill() for each in dying])
        return "late"

    cluster.store.script = fate
    assert cluster.run().violations == []
    assert sent


@pytest.mark.parametrize("seconds", [120.0, 600.0])
@pytest.mark.parametrize("kills", [False, True])
def test_a_rank_whose_write_had_no_answer_is_told_what_all_are_told(seconds, kills):
    """Its data file is there, and the rank cannot reach the store for some time."""
    scenario = Scenario(seed=1, world_sizes=(2,), nodes=2, storage="object", is_async=True, steps=3)
    cluster = Cluster(Case(replace(scenario, step_seconds=1200.0, grace=20.0, on_error="continue")))
    scheduler, cut = cluster.scheduler, []

    def fate(operation: str, key: str, process: Process) -> Fate:
        if process.name.startswith("a/rank 1"):
            if operation == "put" and key.endswith(".safetensors") and not cut:
                cut.append(scheduler.now)
                if kills:
                    scheduler.after(1.0, process.kill)
                return "lost"
            if cut and scheduler.now < cut[0] + seconds:
                return "reset"
        return "done"

    assert cluster.store is not None
    cluster.store.script = fate
    outcome = cluster.run()
    assert cut
    assert not outcome.violations, "\n".join(map(str, outcome.violations))

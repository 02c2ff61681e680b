"""Steps in the memory of nodes: what a restart finds after nodes are lost, and what is left of them.

Ranks are threads, and each node is imitated by a directory.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("paddle")

import paddle_flexckpt as fc
from paddle_flexckpt.manager import KeepBest, KeepLatest, memory_steps, storage_saves
from paddle_flexckpt.manager.memory_tier import compared, stored_by
from paddle_flexckpt.manager.preemption import PreemptionSignals
from paddle_flexckpt.media.local import LocalBackend
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.tools.step_record import RECORD, StepRecord
from tests.manager.samples import files_of, listed, tree
from tests.native.samples import flip
from tests.remedies.following import advised, provoked

ROWS = 48
EVERY = 2


class Nodes:
    """A root on shared storage, and the memory of some nodes."""

    def __init__(self, path: Path) -> None:
        self.path, self.root = path, str(path / "root")

    def memory(self, node: int) -> str:
        return str(self.path / f"node{node}" / "shm")

    def lose(self, node: int) -> None:
        shutil.rmtree(self.path / f"node{node}", ignore_errors=True)

    def manager(self, comm, node, **options) -> fc.CheckpointManager:
        tier = {"save_when": fc.SaveEvery(EVERY), **options.pop("tier", {})}
        return fc.CheckpointManager(
            self.root,
            process_group=comm,
            memory=fc.MemoryTier(self.memory(node), **tier),
            **{"save_when": fc.SaveEvery(5 * EVERY), "preemption_signals": (), **options},
        )

    def run(self, places, job, **options):
        """What each rank returns or raises; ``places``: the node of each rank, by its number."""

        def on_rank(comm):
            return job(self.manager(comm, places[comm.position], **options), comm)

        return SimulatedWorld(len(places)).run_all(on_rank)

    def steps(self, node: int) -> list[str]:
        """The steps in a node's memory, with their runs replaced by letters, in the order of their age."""
        runs = sorted(Path(self.memory(node)).glob("*"), key=os.path.getctime)
        return [f"{'ab'[i]}/{step.name[-2:]}" for i, run in enumerate(runs) for step in sorted(run.glob("step_*"))]


@pytest.fixture
def nodes(tmp_path):
    return Nodes(tmp_path)


def shards(comm, step: int, strategy: str = "rows") -> dict[str, fc.ShardedWeight]:
    """A matrix cut by rows or by columns, and a vector that all ranks have; every value tells the step."""
    whole = np.arange(ROWS * ROWS, dtype="float32").reshape(ROWS, ROWS) + 10000 * step
    size, position = comm.size, comm.position
    low, high = ROWS * position // size, ROWS * (position + 1) // size
    part = whole[low:high].copy() if strategy == "rows" else whole[:, low:high].copy()
    offset = (low, 0) if strategy == "rows" else (0, low)
    return {
        "w": fc.ShardedWeight("w", part, part.shape, whole.shape, offset),
        "b": fc.ShardedWeight("b", whole[0].copy(), (ROWS,), (ROWS,), (0,)),
    }


def train(last: int, first: int = 1, **options):
    """A job that trains to a step and dies there, as by an error; the steps that were saved."""

    def job(manager, comm):
        saved = []
        try:
            with manager:
                for step in range(first, last + 1):
                    if manager.should_save(step):
                        manager.save(step, state=shards(comm, step), rng=False, metrics={"loss": step}, **options)
                        saved.append(step)
                manager.wait()
                raise InterruptedError
        except InterruptedError:
            return saved

    return job


def resume(strategy: str = "rows", step="latest", ends: bool = False, **options):
    """A job that restores; the report, after a look at every value."""

    def job(manager, comm):
        state = shards(comm, 0, strategy)
        report = manager.restore(step, state=state, **options)
        for key, shard in shards(comm, report.step, strategy).items():
            assert np.array_equal(state[key].local_tensor, shard.local_tensor), key
        if ends:
            manager.close()
        else:
            manager.__exit__(InterruptedError, None, None)
        return report

    return job


def files_in(path: Path) -> dict[str, int]:
    """All files below, and when they were written."""
    return {str(each): each.stat().st_mtime_ns for each in path.rglob("*") if each.is_file()}


def looking(manager, comm):
    found = manager.all_steps(), manager.latest_step()
    manager.__exit__(InterruptedError, None, None)
    return found


def one_of(outcomes):
    """What all ranks returned."""
    failed = [each for each in outcomes if isinstance(each, BaseException)]
    assert not failed, failed[0]
    return outcomes[0]


def one_error(outcomes, kind=fc.CheckpointError) -> str:
    assert {type(each) for each in outcomes} == {kind}, outcomes
    (text,) = {str(each) for each in outcomes}
    return text


FOUR = [0, 0, 1, 1, 2, 2, 3, 3]
TWO = [0, 1]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 8 ranks on 4 nodes that has died after step 13, and a copy of it."""
    nodes = Nodes(tmp_path_factory.mktemp("run") / "now")
    assert one_of(nodes.run(FOUR, train(13))) == [2, 4, 6, 8, 10, 12]
    shutil.copytree(nodes.path, nodes.path.parent / "copy")
    return nodes


@pytest.fixture
def saved(run):
    """The run as it was: step 10 is in the root, step 12 in memory."""
    shutil.rmtree(run.path)
    shutil.copytree(run.path.parent / "copy", run.path)
    return run


def test_steps_go_where_they_are_wanted(saved):
    assert [saved.steps(node) for node in range(4)] == [["a/12"]] * 4
    assert listed(saved.root) == ["run.json", "step_00000010"]
    run = json.loads(Path(saved.root, "run.json").read_text("utf-8"))["run"]
    assert os.listdir(saved.memory(0)) == [run]
    assert one_of(saved.run(FOUR, looking)) == ([10, 12], 12)


@pytest.mark.parametrize("lost", range(4))
@pytest.mark.parametrize("ranks", [8, 6, 16])
def test_a_restart_after_the_loss_of_a_node_reads_nothing_from_the_root(saved, monkeypatch, lost, ranks):
    """On as many ranks as before on a new node, on the nodes that are left, and on twice as many."""
    saved.lose(lost)
    left = [node for node in range(4) if node != lost]
    places = {8: FOUR, 6: [node for node in left for _ in range(2)], 16: [each for each in FOUR for _ in range(2)]}
    opened, right = set(), LocalBackend.open

    def watched(self, name):
        opened.add(os.path.join(self.path, name))
        return right(self, name)

    monkeypatch.setattr(LocalBackend, "open", watched)
    reports = saved.run(places[ranks], resume("columns"))
    report = one_of(reports)
    assert (report.step, report.tier, report.nodes, report.not_in_memory) == (12, "memory", (3, 4), {})
    assert report.summary().startswith("restored step 12 from the memory of 3 of 4 nodes; 0 bytes from storage: loaded")
    assert {path for path in opened if path.startswith(saved.root)} == {f"{saved.root}/run.json"}
    # All bytes came from files, each of one node's memory.
    assert sum(each.load.bytes_read for each in reports) >= 4 * ROWS * (ROWS + 1)
    assert report.as_dict()["nodes"] == [3, 4]


def test_a_run_goes_on_after_the_restart(saved):
    saved.lose(2)

    def go_on(manager, comm):
        state = shards(comm, 0)
        step = manager.restore(state=state).step
        return step, train(step + 8, step + 1)(manager, comm)

    assert one_of(saved.run(FOUR, go_on)) == (12, [14, 16, 18, 20])
    assert [saved.steps(node) for node in range(4)] == [["a/20"]] * 4, "the same run"
    assert listed(saved.root) == ["run.json", "step_00000010", "step_00000020"]
    report = one_of(saved.run(FOUR, resume()))
    assert (report.step, report.tier) == (20, "memory"), "of two that are as new, that in memory"


@pytest.mark.parametrize("lost", range(4))
def test_parity_in_place_of_copies(nodes, lost):
    """Each node has its own file, and a third of it more."""
    places = [0, 1, 2, 3]
    assert one_of(nodes.run(places, train(3), tier={"parity": 4})) == [2]
    for node in places:
        files = {path.suffix: path.stat().st_size for path in Path(nodes.memory(node)).glob("*/*/*")}
        assert files[".parity"] < files[".safetensors"] / 3 + 500, "and a header"
    nodes.lose(lost)
    assert one_of(nodes.run(places, looking, tier={"parity": 4})) == ([2], 2)
    report = one_of(nodes.run([place for place in places if place != lost], resume(), tier={"parity": 4}))
    assert (report.step, report.tier, report.nodes) == (2, "memory", (3, 4))


@pytest.fixture
def with_parity(nodes):
    """A run of 4 nodes whose step 10 is in the root, and step 12 in memory, which one node has lost."""
    one_of(nodes.run([0, 1, 2, 3], train(13), tier={"parity": 4}))
    nodes.lose(1)
    return nodes


def fill(monkeypatch, nodes) -> None:
    """No node's memory has room for another file."""
    create = LocalBackend.create

    def full(self, name, *args, **options):
        if "/shm/" in self.path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.where(name))
        return create(self, name, *args, **options)

    monkeypatch.setattr(LocalBackend, "create", full)


def test_looking_writes_nothing(with_parity, monkeypatch):
    before = files_in(with_parity.path)
    with monkeypatch.context() as patch:
        fill(patch, with_parity)
        assert one_of(with_parity.run([0, 1, 2, 3], looking, tier={"parity": 4})) == ([10, 12], 12)
    with_parity.lose(1)  # the empty directory, in which ranks look for what they share
    assert files_in(with_parity.path) == before
    with_parity.lose(2)
    assert one_of(with_parity.run([0, 1, 2, 3], looking, tier={"parity": 4})) == ([10], 10)


def test_a_rebuild_that_fails_is_the_loss_of_nodes(with_parity, monkeypatch, caplog):
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "paddle_flexckpt"):
        fill(patch, with_parity)
        report = one_of(with_parity.run([0, 2, 3], resume(), tier={"parity": 4}))
        assert (report.step, report.tier, list(report.not_in_memory)) == (10, "storage", [12])
        why = report.not_in_memory[12]
        assert "step 12 is not whole in memory: " in why and "cannot be rebuilt there: No space left on device" in why
        assert caplog.text.count(why) == 1
        text = one_error(with_parity.run([0, 2, 3], resume(step=12), tier={"parity": 4}), fc.CorruptCheckpointError)
        assert why in text
    report = one_of(with_parity.run([0, 2, 3], resume(), tier={"parity": 4}))
    assert (report.step, report.tier) == (12, "memory")


def test_a_file_that_was_rebuilt_from_a_damaged_one_is_the_loss_of_nodes(with_parity):
    (path,) = Path(with_parity.memory(0)).glob("*/step_*/*.parity")
    flip(path, path.stat().st_size // 2)
    report = one_of(with_parity.run([0, 2, 3], resume(), tier={"parity": 4}))
    assert (report.step, report.tier) == (10, "storage")
    assert "is not what was saved" in report.not_in_memory[12]


def test_damage_that_cannot_be_rebuilt_as_the_memory_is_full(nodes, monkeypatch):
    one_of(nodes.run([0, 1, 2, 3], train(13), tier={"parity": 4}))
    for path in Path(nodes.memory(2)).glob("*/step_*/*.safetensors"):
        flip(path, path.stat().st_size - 1)
    fill(monkeypatch, nodes)
    text = one_error(nodes.run([0, 1, 2, 3], resume(), tier={"parity": 4}), fc.CorruptCheckpointError)
    assert "cannot be rebuilt there: No space left on device" in text
    report = one_of(nodes.run([0, 1, 2, 3], resume(fallback=True), tier={"parity": 4}))
    assert (report.step, report.tier) == (10, "storage")


@pytest.mark.parametrize("tier", [{"copies": 2}, {"parity": 2}])
def test_a_job_that_is_left_with_one_node_goes_on(nodes, caplog, tier):
    one_of(nodes.run([0, 0, 1, 1], train(3), tier=tier))
    assert "the memory tier is for" not in caplog.text
    nodes.lose(1)

    def go_on(manager, comm):
        step = manager.restore(state=shards(comm, 0)).step
        return step, train(5, step + 1)(manager, comm)

    assert one_of(nodes.run([0, 0], go_on, tier=tier)) == (2, [4])
    told = (
        "the memory tier is for 2 nodes or more, and the job has 1: a step in memory has no more copies than that, and "
    )
    assert caplog.text.count(told + "does not survive the loss of the node") == 1
    report = one_of(nodes.run([0], resume(), tier=tier))
    assert (report.step, report.tier, report.nodes) == (4, "memory", (1, 1))


def test_a_run_without_a_name_gets_one_for_its_memory(nodes):
    """An old version has saved the step that it continues."""
    comm = SoloCommunicator()
    state = {"w": np.arange(5)}
    step = f"{nodes.root}/step_00000004"
    record = StepRecord(4, 1.0)
    extra = {key: value.numpy() for key, value in fc.collect_extra_state(step=4, rng=False).items()}
    fc.save_state_dict({**state, **extra, RECORD: record.encode()}, step, comm, step=4, unique_id=0)
    for expected in (6, 8):
        manager = nodes.manager(comm, 0, tier={"copies": 1})
        assert manager.restore(state=state).step == expected - 2
        assert manager.should_save(expected)
        manager.save(expected, state=state, rng=False, blocking=True)
        manager.__exit__(InterruptedError, None, None)
        assert nodes.steps(0) == [f"a/{expected:02d}"]


def test_without_enough_nodes_the_root_is_read_and_the_nodes_are_named(saved, caplog):
    saved.lose(1)
    saved.lose(2)
    assert one_of(saved.run(FOUR, looking)) == ([10], 10)
    with caplog.at_level(logging.WARNING, "paddle_flexckpt"):
        report = one_of(saved.run(FOUR, resume()))
    assert (report.step, report.tier, list(report.not_in_memory), report.skipped) == (10, "storage", [12], {})
    why = report.not_in_memory[12]
    assert "step 12 is not whole in memory, as 2 of 4 nodes have it; missing: 1 (" in why
    assert all(f":{saved.memory(node)}/" in why for node in (1, 2))
    assert not any(f":{saved.memory(node)}/" in why for node in (0, 3))
    assert why in report.summary() and caplog.text.count(why) == 1
    text = one_error(saved.run(FOUR, resume(step=12)), fc.CorruptCheckpointError)
    assert why in text, "asked for by its number"
    advised("manager/memory_restore.py", "or, if they are gone, restore() without a step, which takes the newest", why)


def test_one_that_comes_back_with_older_files_does_no_harm(saved):
    """Its step 12 is of another save: the others have made theirs without it."""
    kept = saved.path / "kept"
    os.rename(saved.path / "node3", kept)
    three = FOUR[:6]

    def again(manager, comm):
        manager.restore(10, state=shards(comm, 0))
        return train(13, 11)(manager, comm)

    assert one_of(saved.run(three, again)) == [12]
    os.rename(kept, saved.path / "node3")
    report = one_of(saved.run(FOUR, resume()))
    assert (report.step, report.nodes) == (12, (3, 3))
    saved.lose(0)
    report = one_of(saved.run(FOUR, resume()))
    assert (report.step, report.nodes, report.not_in_memory) == (12, (2, 3), {})
    saved.lose(1)
    report = one_of(saved.run(FOUR, resume()))
    assert (report.step, report.tier, list(report.not_in_memory)) == (10, "storage", [12])


def test_what_another_run_has_in_memory_is_never_taken(saved):
    shutil.rmtree(saved.root)
    assert one_of(saved.run(FOUR, looking)) == ([], None)
    one_error(saved.run(FOUR, resume()), fc.ValidationError)
    assert one_of(saved.run(FOUR, train(3))) == [2]
    assert [saved.steps(node) for node in range(4)] == [["a/12", "b/02"]] * 4
    report = one_of(saved.run(FOUR, resume()))
    assert (report.step, report.tier) == (2, "memory")


def test_a_run_that_begins_beside_an_old_one_has_memory_of_its_own(saved):
    """It did not call restore(); the root has no higher step of the old one yet."""
    shutil.rmtree(Path(saved.root) / "step_00000010")
    assert one_of(saved.run(FOUR, train(3))) == [2]
    assert (one_of(saved.run(FOUR, looking))) == ([2], 2)


def test_a_copy_of_a_root_neither_takes_nor_replaces_the_original_s_steps_in_memory(saved, caplog):
    original, before = saved.root, files_in(saved.path / "node0")
    saved.root = str(saved.path / "copy")
    shutil.copytree(original, saved.root)
    assert one_of(saved.run(FOUR, looking)) == ([10], 10)
    assert f"belong to {original}, and one of it and {saved.root} is a copy" in caplog.text

    def fork(manager, comm):
        manager.restore(state=shards(comm, 0))
        assert manager.should_save(12)
        with provoked("manager/anchor.py", "give this run a MemoryTier in another directory; to go on from") as caught:
            manager.save(12, state=shards(comm, 99), rng=False)
        manager.__exit__(InterruptedError, None, None)
        return str(caught.value)

    assert "is a copy of the other" in one_of(saved.run(FOUR, fork))
    assert files_in(saved.path / "node0") == before
    # The remedies: other memory for the copy; and the original goes on with its own.
    place, saved.path = saved.path, saved.path / "others"
    assert one_of(saved.run(FOUR, after(10, train(12, 11))))[0] == [12]
    saved.path, saved.root = place, original
    assert one_of(saved.run(FOUR, resume())).step == 12


def test_a_root_that_was_moved_has_its_steps_in_memory(nodes):
    one_of(nodes.run(TWO, train(4)))
    os.rename(nodes.root, nodes.path / "moved")
    nodes.root = str(nodes.path / "moved")
    assert one_of(nodes.run(TWO, looking)) == ([4], 4)


@pytest.mark.parametrize("content", ["{}", "no JSON", '{"run": "../../etc"}', '{"run": "0123456789abcdef"}'])
def test_an_anchor_of_nothing(saved, content, caplog):
    Path(saved.root, "run.json").write_text(content, "utf-8")
    is_another, looked = "0123" in content, one_of(saved.run(FOUR, looking))
    assert looked == (([10], 10) if is_another else ([10, 12], 12))
    assert ("run.json cannot be understood" in caplog.text) == (not is_another)
    assert ("which are passed over" in caplog.text) == is_another


def values_of(step: int, seed: int = 0):
    """A job that saves a step once more, with values of its own, and dies."""

    def job(manager, comm):
        manager.should_save(step)
        manager.save(step, state=shards(comm, seed), rng=False, blocking=True)
        manager.__exit__(InterruptedError, None, None)

    return job


def after(first, *jobs):
    """A job that restores this step, and then does another."""

    def job(manager, comm):
        manager.restore(first, state=shards(comm, 0))
        return [each(manager, comm) for each in jobs]

    return job


def seed_of(manager, comm):
    """The seed of the values of the latest step."""
    state = shards(comm, 0)
    report = manager.restore(state=state)
    manager.__exit__(InterruptedError, None, None)
    (seed,) = {int(shard.local_tensor.flat[0]) // 10000 for shard in state.values() if shard.key == "b"}
    assert np.array_equal(state["w"].local_tensor, shards(comm, seed)["w"].local_tensor)
    return report.step, report.tier, seed


@pytest.mark.parametrize("content", [None, "", "[]", '{"run": 5}'])
def test_without_its_anchor_a_run_is_known_by_the_root(nodes, caplog, content):
    """Its memory is found; and later saves still have higher numbers than those of earlier starts."""
    one_of(nodes.run(TWO, train(11)))
    one_of(nodes.run(TWO, after(10, values_of(12, 3))))
    shutil.copytree(nodes.path / "node1", nodes.path / "away")
    anchor = Path(nodes.root, "run.json")
    if content is None:
        anchor.unlink()
    else:
        anchor.write_text(content, "utf-8")
    with caplog.at_level(logging.WARNING, "paddle_flexckpt"):
        assert one_of(nodes.run(TWO, seed_of)) == (12, "memory", 3)
    (said,) = [text for text in caplog.messages if "run.json" in text]
    assert ("is not there" if content is None else "cannot be understood") in said
    assert "steps in memory are looked for by the run of step 10" in said
    nodes.lose(1)
    one_of(nodes.run([0], after(10, values_of(12, 4))))
    os.rename(nodes.path / "away", nodes.path / "node1")
    assert one_of(nodes.run(TWO, seed_of)) == (12, "memory", 4)


def test_memory_of_a_root_that_names_no_run_is_spoken_of(saved, caplog):
    run = json.loads(Path(saved.root, "run.json").read_text("utf-8"))["run"]
    shutil.rmtree(saved.root)
    saved.lose(0)
    with caplog.at_level(logging.WARNING, "paddle_flexckpt"):
        assert one_of(saved.run(FOUR, looking)) == ([], None)
    (said,) = [text for text in caplog.messages if "which are passed over" in text]
    assert f"the memory of the nodes has steps of other runs in {saved.root}, {run}, " in said
    advised("manager/anchor.py", "to go on with one, write its name to run.json", said)
    os.makedirs(saved.root)
    Path(saved.root, "run.json").write_text(json.dumps({"run": run}), "utf-8")
    caplog.clear()
    assert one_of(saved.run(FOUR, looking)) == ([12], 12)
    assert not caplog.messages


@pytest.mark.parametrize("starts", ["-1", str(1 << 26), "1e400", "true", '"x"'])
def test_a_count_that_is_none(nodes, caplog, starts):
    one_of(nodes.run(TWO, train(11)))
    anchor = Path(nodes.root, "run.json")
    run = json.loads(anchor.read_text("utf-8"))["run"]
    anchor.write_text(f'{{"run": "{run}", "starts": {starts}}}', "utf-8")
    assert one_of(
        nodes.run(
            TWO,
            after(
                10,
                values_of(12, 3),
            ),
        )
    ) == [None]
    assert "run.json cannot be understood" in caplog.text
    assert 0 < json.loads(anchor.read_text("utf-8"))["starts"] < 1 << 26


def test_damage_is_passed_over_if_asked(saved):
    for node in range(4):
        for path in Path(saved.memory(node)).glob("*/step_*/*.safetensors"):
            flip(path, path.stat().st_size - 1)
    text = one_error(saved.run(FOUR, resume()), fc.CorruptCheckpointError)
    assert "cannot restore" in text or "damaged" in text
    report = one_of(saved.run(FOUR, resume(fallback=True)))
    assert (report.step, report.tier, list(report.not_in_memory), report.skipped) == (10, "storage", [12], {})


@pytest.mark.parametrize("strategy", ["rows", "columns"])
@pytest.mark.parametrize("places", [FOUR, [0, 1, 2, 3], [0, 1, 2, 2, 3]], ids=len)
def test_damage_of_one_node_is_read_from_its_copies(saved, strategy, places):
    for path in Path(saved.memory(1)).glob("*/step_*/*.safetensors"):
        for byte in (1, 700, 1400):
            flip(path, path.stat().st_size - byte)
    report = one_of(saved.run(places, resume(strategy)))
    assert (report.step, report.tier) == (12, "memory")


@pytest.mark.parametrize("strategy", ["rows", "columns"])
def test_damage_in_memory_is_made_good_from_the_same_step_in_the_root(nodes, strategy):
    assert one_of(nodes.run(TWO, train(4), save_when=fc.SaveEvery(EVERY))) == [2, 4]
    for node in TWO:
        for path in Path(nodes.memory(node)).glob("*/step_*4/*.safetensors"):
            flip(path, path.stat().st_size - 1)
    report = one_of(nodes.run(TWO, resume(strategy)))
    assert (report.step, report.tier, list(report.not_in_memory)) == (4, "storage", [4])


def test_a_step_is_asked_for_by_its_number(saved):
    for step, tier in ((10, "storage"), (12, "memory")):
        report = one_of(saved.run(FOUR, resume(step=step)))
        assert (report.step, report.tier) == (step, tier)
    said = one_error(saved.run(FOUR, resume(step=8)), fc.ValidationError)
    assert "there is no complete checkpoint of step 8 in" in said and "; there are [10, 12]. Remedy" in said
    report = one_of(saved.run(FOUR, resume(step="best"), keep=KeepBest(1)))
    assert (report.step, report.tier) == (10, "storage"), "metrics are looked for in the root"
    shutil.rmtree(Path(saved.root, "step_00000010"))
    said = one_error(saved.run(FOUR, resume(step=10)), fc.ValidationError)
    assert "there is no complete checkpoint of step 10 in" in said and "; there are [12]. Remedy" in said


# -- what is kept ------------------------------------------------------------------------------------------------------


def test_the_old_step_stays_until_the_new_one_is_whole(nodes):
    def job(manager, comm):
        manager.should_save(2)
        manager.save(2, state=shards(comm, 2), rng=False, blocking=True)
        assert nodes.steps(comm.rank) == ["a/02"]
        manager.should_save(4)
        manager.save(4, state=shards(comm, 4), rng=False)
        during = nodes.steps(comm.rank)
        manager.wait()
        after = nodes.steps(comm.rank)
        manager.should_save(6)
        broken = shards(comm, 6)
        broken["w"].local_shape = (1, 1)
        with pytest.raises(fc.ValidationError):
            manager.save(6, state=broken, rng=False)
        manager.__exit__(InterruptedError, None, None)
        return during, after, nodes.steps(comm.rank)

    assert one_of(nodes.run(TWO, job)) == (["a/02", "a/04"], ["a/04"], ["a/04"])


def test_so_many_are_kept_and_those_of_before_a_rewind_go(nodes):
    assert one_of(nodes.run(TWO, train(9), tier={"keep": 2})) == [2, 4, 6, 8]
    assert nodes.steps(0) == ["a/06", "a/08"]

    def rewound(manager, comm):
        manager.restore(6, state=shards(comm, 0))
        return train(8, 7)(manager, comm)

    assert one_of(nodes.run(TWO, rewound)) == [8]
    assert nodes.steps(1) == ["a/08"]


@pytest.fixture
def before_saves(nodes, monkeypatch):
    """What a node's memory has when each save there begins."""
    found, save = [], memory_steps.save_from_file

    def watched(shards, directory, comm, *args, **options):
        if comm.position == 0:
            found.append(nodes.steps(0))
        return save(shards, directory, comm, *args, **options)

    monkeypatch.setattr(memory_steps, "save_from_file", watched)
    return found


def go_on(last, step="latest"):
    """A job that restores and trains on, and dies."""

    def job(manager, comm):
        first = manager.restore(step, state=shards(comm, 0)).step + 1
        return train(last, first)(manager, comm)

    return job


@pytest.mark.parametrize("keep", [1, 2])
def test_what_earlier_starts_have_left_goes_before_a_save_needs_its_room(nodes, before_saves, keep):
    """More steps than are kept now, and one whose save was not over."""
    one_of(nodes.run(TWO, train(7), tier={"keep": 3}))
    for node in TWO:
        (run,) = Path(nodes.memory(node)).iterdir()
        (run / "step_00000008").mkdir()
        (run / "step_00000008" / "1_0-0000000112345678123456781234567812345678.safetensors").touch()
    before_saves.clear()
    one_of(nodes.run(TWO, go_on(11), tier={"keep": keep}))
    kept = [f"a/{step:02d}" for step in (2, 4, 6, 8, 10)]
    assert before_saves == [kept[3 - keep : 3], kept[4 - keep : 4]]
    assert nodes.steps(0) == nodes.steps(1) == kept[-keep:]


def test_the_newest_whole_step_stays(nodes, before_saves):
    """One that is newer has lost its files on a node, and there is room for one."""
    one_of(nodes.run(TWO, train(5), tier={"keep": 2, "copies": 1}))
    (path,) = Path(nodes.memory(1)).glob("*/step_00000004")
    shutil.rmtree(path)
    before_saves.clear()
    one_of(nodes.run(TWO, go_on(5), tier={"copies": 1}))
    assert before_saves == [["a/02"]]
    assert nodes.steps(0) == nodes.steps(1) == ["a/04"]


def test_the_step_that_the_run_goes_back_to_stays_until_a_save_is_whole(nodes, before_saves):
    """Newer steps go before it, and it is as good as another once a save after it is whole."""
    one_of(nodes.run(TWO, train(7), tier={"keep": 3}))

    def go_back(manager, comm):
        report = manager.restore(4, state=shards(comm, 0))
        saved = train(6, 5)(manager, comm)
        return report.step, report.tier, saved

    before_saves.clear()
    assert one_of(nodes.run(TWO, go_back)) == (4, "memory", [6])
    assert before_saves == [["a/04"]]
    assert nodes.steps(0) == nodes.steps(1) == ["a/06"]


def test_a_step_that_the_run_went_back_to_does_not_outlive_later_ones(nodes, before_saves):
    """The save after these fails, so what is here is looked at again."""
    one_of(nodes.run(TWO, train(3)))

    def job(manager, comm):
        manager.restore(2, state=shards(comm, 0))
        manager.should_save(4)
        manager.save(4, state=shards(comm, 4), rng=False, blocking=True)
        manager.should_save(6)
        broken = shards(comm, 6)
        broken["w"].local_shape = (1, 1)
        with pytest.raises(fc.ValidationError):
            manager.save(6, state=broken, rng=False)
        manager.save(6, state=shards(comm, 6), rng=False)
        manager.__exit__(InterruptedError, None, None)

    before_saves.clear()
    one_of(nodes.run(TWO, job, tier={"keep": 1}))
    assert before_saves == [["a/02"], ["a/04"], ["a/04"]]


def test_a_step_that_may_be_whole_again_stays_if_there_is_room(nodes, before_saves):
    """A node is away that has a part of it."""
    one_of(nodes.run(TWO, train(11), tier={"copies": 1}))
    one_of(nodes.run(TWO, go_on(13), tier={"copies": 1}))
    before_saves.clear()
    os.rename(nodes.path / "node1", nodes.path / "away")
    one_of(nodes.run([0], go_on(13), tier={"copies": 1}))
    assert before_saves == [["a/12"]]


@pytest.mark.parametrize("in_background", [False, True])
def test_what_a_failed_save_has_left_goes_before_the_next_one(nodes, before_saves, monkeypatch, in_background):
    monkeypatch.setattr(LocalBackend, "remove_directory", lambda self: None)  # as if the process had died

    def job(manager, comm):
        manager.should_save(2)
        manager.save(2, state=shards(comm, 2), rng=False, blocking=True)
        manager.should_save(4)
        if in_background:
            handle = manager.save(4, state=shards(comm, 4), rng=False)
            handle.wait()
            comm.all_gather(b"")
            if comm.position == 0:
                for node in TWO:
                    (path,) = Path(nodes.memory(node)).glob("*/step_00000004")
                    (path / "0.manifest").unlink()
            handle._outcome, handle.seen = fc.CheckpointError("a node is lost"), False
        else:
            broken = shards(comm, 4)
            broken["w"].local_shape = (1, 1)
            with pytest.raises(fc.ValidationError):
                manager.save(4, state=broken, rng=False)
        manager.should_save(6)
        if in_background:
            with pytest.raises(fc.CheckpointError, match="a node is lost"):
                manager.save(6, state=shards(comm, 6), rng=False)
        manager.save(6, state=shards(comm, 6), rng=False, blocking=True)
        manager.__exit__(InterruptedError, None, None)

    one_of(nodes.run(TWO, job))
    assert before_saves == [[], ["a/02"], ["a/02"]]
    assert nodes.steps(0) == ["a/06"]


def test_a_step_that_is_being_read_goes_later(nodes):
    def job(manager, comm):
        for step in (2, 4, 6):
            manager.should_save(step)
            manager.save(step, state=shards(comm, step), rng=False, blocking=True)
            if step == 2 and comm.rank == 0:
                directory = LocalBackend(str(next(Path(nodes.memory(0)).glob("*/step_00000002"))))
                lock = directory.locks.share("0.manifest")
            if step == 4 and comm.rank == 0:
                assert nodes.steps(0) == ["a/02", "a/04"]
                lock.release()
        return nodes.steps(comm.rank)

    assert nodes.run(TWO, job) == [["a/06"], ["a/06"]]


def test_a_failed_save_is_raised_by_the_next_one(nodes, monkeypatch):
    def job(manager, comm):
        manager.should_save(2)
        handle = manager.save(2, state=shards(comm, 2), rng=False)
        handle.wait()
        # As if a writer had failed.
        handle._outcome, handle.seen = fc.CheckpointError("a node is lost"), False
        manager.should_save(4)
        with pytest.raises(fc.CheckpointError, match="a node is lost"):
            manager.save(4, state=shards(comm, 4), rng=False)
        manager.save(4, state=shards(comm, 4), rng=False, blocking=True)
        return nodes.steps(comm.rank)

    assert one_of(nodes.run(TWO, job)) == ["a/04"]


def test_close_removes_the_memory_if_the_root_has_it_all(saved):
    def to_the_end(manager, comm):
        manager.restore(state=shards(comm, 0))
        for step in range(13, 21):
            if manager.should_save(step):
                manager.save(step, state=shards(comm, step), rng=False)
        manager.close()

    one_of(saved.run(FOUR, to_the_end))
    assert [os.path.exists(saved.memory(node)) for node in range(4)] == [False] * 4
    assert one_of(saved.run(FOUR, looking)) == ([10, 20], 20)


def test_close_after_a_restore_alone_removes_what_the_root_has_too(nodes):
    one_of(nodes.run(TWO, train(10)))
    assert one_of(nodes.run(TWO, resume(ends=True))).tier == "memory"
    assert not os.path.exists(nodes.memory(0))


def test_close_leaves_what_has_the_number_of_an_older_branch_in_the_root(nodes, caplog):
    """The root's step 20 is of before the run went back, that in memory of since."""
    one_of(nodes.run(TWO, train(21)))
    one_of(nodes.run(TWO, after(10, values_of(20, 3)), save_when=fc.SaveEvery(15)))

    def closed(manager, comm):
        report = manager.restore(state=shards(comm, 0))
        manager.close()
        return report.step, report.tier

    with caplog.at_level(logging.WARNING, "paddle_flexckpt"):
        found = one_of(nodes.run(TWO, closed))
    assert found == (20, "memory")
    assert any("step 20 is in the memory of the nodes alone" in each for each in caplog.messages)
    assert nodes.steps(0) == ["a/20"]
    assert one_of(nodes.run(TWO, seed_of)) == (20, "memory", 3)

    def follow(manager, comm):
        state = shards(comm, 0)
        manager.save(manager.restore(state=state).step, state=state, rng=False, overwrite=True)
        manager.close()

    one_of(nodes.run(TWO, follow))
    assert nodes.steps(0) == []
    assert one_of(nodes.run(TWO, seed_of)) == (20, "storage", 3)


def test_close_leaves_what_a_run_that_goes_on_has_in_memory(nodes):
    """Another job, with a manager of the same root and tier, restores a step to look at it."""

    def job(manager, comm):
        for step in (2, 10):
            manager.should_save(step)
            manager.save(step, state=shards(comm, step), rng=False, blocking=True)
        other = nodes.manager(comm, TWO[comm.position])
        report = other.restore(state=shards(comm, 0))
        other.close()
        seen = nodes.steps(comm.rank)
        manager.close()
        return report.tier, seen

    assert one_of(nodes.run(TWO, job)) == ("memory", ["a/10"])
    assert not os.path.exists(nodes.memory(0))


def test_close_after_going_back_leaves_what_the_root_lacks(nodes, caplog):
    """The root has a higher step, from before."""

    def go_back(manager, comm):
        for step in (10, 20):
            manager.should_save(step)
            manager.save(step, state=shards(comm, step), rng=False, blocking=True)
        manager.restore(10, state=shards(comm, 0))
        for step in (12, 14):
            manager.should_save(step)
            manager.save(step, state=shards(comm, step), rng=False, blocking=True)
        manager.close()

    with caplog.at_level(logging.WARNING, "paddle_flexckpt"):
        one_of(nodes.run(TWO, go_back))
    assert any("step 14 is in the memory of the nodes alone" in each for each in caplog.messages)
    assert nodes.steps(0) == ["a/14"]


def test_ranks_may_be_in_other_directories(nodes, monkeypatch):
    """A tier is compared without its path, which a relative one would bring back."""
    agreed = []
    for place in (nodes.path, "/"):
        monkeypatch.chdir(place)
        agreed.append(compared(fc.MemoryTier(nodes.memory(0), fc.SaveEvery(2))))
    assert agreed[0] == agreed[1]


def test_close_leaves_what_the_root_lacks(saved, caplog):
    with caplog.at_level(logging.WARNING, "paddle_flexckpt"):
        one_of(saved.run(FOUR, resume(ends=True)))
    (text,) = [each for each in caplog.messages if "step 12 is in the memory of the nodes alone" in each]
    assert [saved.steps(node) for node in range(4)] == [["a/12"]] * 4
    advised("manager/memory_steps.py", "restore() it, and save the step with save(), which writes to the root", text)

    def follow(manager, comm):
        state = shards(comm, 0)
        manager.save(manager.restore(state=state).step, state=state, rng=False)
        manager.close()

    one_of(saved.run(FOUR, follow))
    assert not os.path.exists(saved.memory(0))
    report = one_of(saved.run(FOUR, resume()))
    assert (report.step, report.tier) == (12, "storage")


def test_a_run_is_held_by_one_manager(nodes):
    """The second is an earlier start, say, that hangs; its node has no rank that may remove steps."""

    def job(manager, comm):
        manager.should_save(2)
        manager.save(2, state=shards(comm, 2), rng=False, blocking=True)
        other = nodes.manager(comm, TWO[comm.position])
        other.restore(state=shards(comm, 0))
        other.should_save(4)
        try:
            with provoked("manager/memory_steps.py", "end that process, and start again") as held:
                other.save(4, state=shards(comm, 4), rng=False)
        finally:
            manager.__exit__(InterruptedError, None, None)
        comm.all_gather(b"")
        other.save(4, state=shards(comm, 4), rng=False, blocking=True)
        return str(held.value)

    assert "another process holds " in (text := one_of(nodes.run(TWO, job)))
    assert " on the nodes of ranks 0-1: " in text
    assert nodes.steps(0) == ["a/04"]


# -- going back, and starts without a tier -----------------------------------------------------------------------------


def without_tier(nodes, places, job, **options):
    """What each rank of a start without ``memory=`` returns."""

    def on_rank(comm):
        options_here = {"save_when": fc.SaveEvery(5 * EVERY), "preemption_signals": (), **options}
        return job(fc.CheckpointManager(nodes.root, process_group=comm, **options_here), comm)

    return SimulatedWorld(len(places)).run_all(on_rank)


def root_save(step: int, seed: int, first="latest"):
    """A job that goes on from a step, saves a step with values of its own to the root, and dies."""

    def job(manager, comm):
        manager.restore(first, state=shards(comm, 0))
        manager.save(step, state=shards(comm, seed), rng=False)
        manager.__exit__(InterruptedError, None, None)

    return job


@pytest.mark.parametrize("step", [11, 12])
def test_a_start_without_the_tier_makes_later_steps_in_memory_void(nodes, caplog, step):
    """It knows nothing of step 12 in memory, and saves this step or one below."""
    one_of(nodes.run(TWO, train(13)))
    one_of(without_tier(nodes, TWO, root_save(step, 3)))
    caplog.clear()
    assert one_of(nodes.run(TWO, looking)) == ([10, step], step)
    said = [text for text in caplog.messages if "in the memory of the nodes" in text]
    text = "step 12 in the memory of the nodes is not used: it was saved before this run went back, and a later start "
    # Where the root has step 12 itself, there is nothing to decide.
    assert said == ([f"{text}has saved step 11"] if step == 11 else [])
    assert one_of(nodes.run(TWO, seed_of)) == (step, "storage", 3)
    report = one_of(nodes.run(TWO, go_on(13)))
    assert report == ([12] if step == 11 else [])
    if step == 11:
        assert one_of(nodes.run(TWO, seed_of)) == (12, "memory", 12)


def test_a_save_that_did_not_commit_makes_nothing_void(nodes):
    one_of(nodes.run(TWO, train(13)))

    def fail(manager, comm):
        manager.restore(state=shards(comm, 0))
        broken = shards(comm, 11)
        broken["w"].local_shape = (1, 1)
        with pytest.raises(fc.ValidationError):
            manager.save(11, state=broken, rng=False)

    one_of(without_tier(nodes, TWO, fail))
    assert one_of(nodes.run(TWO, seed_of)) == (12, "memory", 12)


def test_a_save_after_going_back_that_did_not_commit_makes_nothing_void(nodes, caplog):
    """The root's step 20 is of before, as step 22 in memory is; a save that commits makes it void."""
    one_of(nodes.run(TWO, train(23), save_when=fc.SaveEvery(10)))

    def fail(manager, comm):
        manager.restore(10, state=shards(comm, 0))
        broken = shards(comm, 15)
        broken["w"].local_shape = (1, 1)
        with pytest.raises(fc.ValidationError):
            manager.save(15, state=broken, rng=False)
        manager.__exit__(InterruptedError, None, None)

    one_of(nodes.run(TWO, fail))
    caplog.clear()
    assert one_of(nodes.run(TWO, seed_of)) == (22, "memory", 22)
    assert not any("before this run went back" in each for each in caplog.messages)
    one_of(nodes.run(TWO, root_save(15, 3, first=10)))
    one_of(nodes.run(TWO, fail))
    caplog.clear()
    assert one_of(nodes.run(TWO, looking)) == ([10, 15, 20], 20)
    (said,) = [each for each in caplog.messages if "before this run went back" in each]
    assert "step 22 in the memory of the nodes is not used: " in said and "a later start has saved step 15" in said


def test_going_back_makes_higher_steps_in_memory_void(nodes, caplog):
    one_of(nodes.run(TWO, train(23), save_when=fc.SaveEvery(10)))
    assert nodes.steps(0) == ["a/22"]
    with caplog.at_level(logging.WARNING, "paddle_flexckpt"):
        one_of(nodes.run(TWO, root_save(15, 3, first=10)))
    (said,) = [text for text in caplog.messages if "in the memory of the nodes" in text]
    assert "step 22 in the memory of the nodes is above step 10, from which the run goes on" in said
    shutil.rmtree(Path(nodes.root) / "step_00000020")
    assert one_of(nodes.run(TWO, seed_of)) == (15, "storage", 3)


def test_a_manager_that_goes_back_makes_higher_steps_in_memory_void(nodes):
    def job(manager, comm):
        for step in (10, 12):
            manager.should_save(step)
            manager.save(step, state=shards(comm, step), rng=False, blocking=True)
        root_save(11, 3, first=10)(manager, comm)

    one_of(nodes.run(TWO, job))
    assert one_of(nodes.run(TWO, seed_of)) == (11, "storage", 3)


@pytest.mark.parametrize("where", ["memory", "root"])
def test_nodes_that_were_away_bring_no_higher_step_back(nodes, where):
    """The others have gone on without it, from the root."""
    one_of(nodes.run(TWO, train(13)))
    shutil.copytree(nodes.path / "node1", nodes.path / "away")
    nodes.lose(0)
    nodes.lose(1)
    tier = {"save_when": fc.SaveEvery(1)}
    one_of(nodes.run([0], after(10, values_of(11, 3)) if where == "memory" else root_save(12, 3), tier=tier))
    os.rename(nodes.path / "away", nodes.path / "node1")
    expected = (11, "memory", 3) if where == "memory" else (12, "storage", 3)
    assert one_of(nodes.run(TWO, seed_of, tier=tier)) == expected


def test_the_older_of_two_saves_of_a_step_is_not_taken_for_the_newer(nodes):
    """The newer one is lost with a node."""
    one_of(nodes.run(TWO, train(13)))
    shutil.copytree(nodes.path / "node1", nodes.path / "away")
    nodes.lose(0)
    nodes.lose(1)
    one_of(nodes.run(TWO, after(10, values_of(12, 3)), tier={"copies": 1}))
    nodes.lose(1)
    os.rename(nodes.path / "away", nodes.path / "node1")
    assert one_of(nodes.run(TWO, seed_of)) == (10, "storage", 10)
    assert one_of(nodes.run(TWO, looking)) == ([10], 10)
    report = one_of(nodes.run(TWO, resume()))
    assert "is of an earlier start" in report.not_in_memory[12]


def test_a_second_run_that_takes_the_memory_says_so(nodes, caplog):
    one_of(nodes.run(TWO, train(3)))
    with caplog.at_level(logging.WARNING, "paddle_flexckpt"):
        one_of(nodes.run(TWO, train(3)))
    (said,) = [text for text in caplog.messages if "whose steps in memory are not looked for" in text]
    advised("manager/anchor.py", "call restore() before the first save", said)
    one_of(nodes.run(TWO, train(3)))
    assert len({path.name for path in Path(nodes.memory(0)).iterdir()}) == 3


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("suffix", ["safetensors", "manifest"])
@pytest.mark.parametrize("keep", [1, 2])
def test_files_that_are_cut_short_are_lost(nodes, caplog, suffix, keep):
    """Without a good copy the next step is taken, in memory or in the root, and it is said why."""
    one_of(nodes.run(TWO, train(15), tier={"keep": keep}))
    for node in TWO:
        for path in Path(nodes.memory(node)).glob(f"*/step_00000014/*.{suffix}"):
            cut(path)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "paddle_flexckpt"):
        report = one_of(nodes.run(TWO, resume()))
    assert (report.step, report.tier) == ((12, "memory") if keep == 2 else (10, "storage"))
    assert list(report.not_in_memory) == [14] and report.not_in_memory[14] in caplog.text
    assert one_of(nodes.run(TWO, looking))[1] == report.step


# -- when --------------------------------------------------------------------------------------------------------------


def test_a_preemption_signal_saves_to_the_root(nodes, monkeypatch):
    def job(manager, comm):
        manager._schedule._signals._received = comm.rank == 1
        manager._schedule._needs_agreement = True
        assert manager.should_save(3) and manager.should_stop
        report = manager.save(3, state=shards(comm, 3), rng=False)
        manager.close()
        return type(report).__name__

    monkeypatch.setattr(PreemptionSignals, "received", property(lambda self: self._received))
    assert one_of(nodes.run(TWO, job)) == "SaveReport"
    assert listed(nodes.root) == ["step_00000003"]
    assert not os.path.exists(nodes.memory(0))


@pytest.mark.parametrize("how", ["at once", "in the background", "earlier"])
def test_the_root_is_saved_though_the_memory_fails(nodes, how):
    """The error comes when that is done, or on its way; on every rank."""
    tier = {} if how == "earlier" else {"limit": 100}

    def job(comm):
        with fc.BackgroundWriter() as writer:
            options = {"async_save": writer} if how == "in the background" else {}
            manager = nodes.manager(comm, comm.rank, tier=tier, **options)
            if how == "earlier":
                manager.should_save(8)
                handle = manager.save(8, state=shards(comm, 8), rng=False)
                handle.wait()
                handle._outcome, handle.seen = fc.CheckpointError("a node is lost"), False
            assert manager.should_save(10)
            with pytest.raises(fc.CheckpointError) as caught:
                manager.save(10, state=shards(comm, 10), rng=False)
            manager.wait()
            manager.__exit__(InterruptedError, None, None)
        return str(caught.value)

    text = one_of(SimulatedWorld(2).run_all(job))
    done = "on its way" if how == "in the background" else "complete"
    assert text.startswith(f"the checkpoint of step 10 is {done}, but its save to memory failed: ")
    assert ("a node is lost" if how == "earlier" else "too little room") in text
    report = one_of(nodes.run(TWO, resume(step=10)))
    assert (report.step, report.tier) == (10, "storage")


def test_both_fail(nodes, caplog):
    def job(manager, comm):
        manager.should_save(10)
        broken = shards(comm, 10)
        broken["w"].local_shape = (1, 1)
        manager.save(10, state=broken, rng=False)

    with caplog.at_level(logging.ERROR, "paddle_flexckpt"):
        text = one_error(nodes.run(TWO, job), fc.ValidationError)
    assert nodes.root in text
    (said,) = [each for each in caplog.messages if each.startswith("step 10 could not be saved to memory")]
    assert "the tensor has not the local shape" in said


def test_a_preemption_signal_saves_to_the_root_though_the_memory_fails(nodes, monkeypatch):
    def job(manager, comm):
        manager._schedule._signals._received = comm.rank == 1
        manager._schedule._needs_agreement = True
        assert manager.should_save(4) and manager.should_stop
        with pytest.raises(fc.CheckpointError, match="step 4 is complete, but its save to memory failed"):
            manager.save(4, state=shards(comm, 4), rng=False)
        manager.close()

    monkeypatch.setattr(PreemptionSignals, "received", property(lambda self: self._received))
    one_of(nodes.run(TWO, job, tier={"limit": 100}))
    assert listed(nodes.root)[-1] == "step_00000004"


@pytest.mark.parametrize("step", [2, 10])
def test_ranks_that_ask_for_other_places_get_an_error(nodes, step):
    """One has not called should_save: its step would go to the root."""

    def job(manager, comm):
        manager.should_save(1)
        if comm.rank == 0:
            manager.should_save(step)
        try:
            manager.save(step, state=shards(comm, step), rng=False)
        finally:
            manager.__exit__(InterruptedError, None, None)

    text = one_error(nodes.run(TWO, job), fc.ValidationError)
    assert "ranks disagree: rank 0: {" in text and '"to_memory": true}' in text


def test_a_step_that_nobody_has_asked_about_goes_to_the_root(nodes):
    def job(manager, comm):
        manager.save(2, state=shards(comm, 2), rng=False)
        manager.close()

    one_of(nodes.run(TWO, job))
    assert listed(nodes.root) == ["step_00000002"]


def test_retention_in_the_root_is_not_held_up(nodes):
    """A save in the background that a save to memory finds complete is followed up then."""
    comm = SoloCommunicator()
    with nodes.manager(comm, 0, keep=KeepLatest(1), async_save=True, tier={"copies": 1}) as manager:
        for step in (1, 2):
            handle = manager.save(step, state=shards(comm, step), rng=False)
        handle.wait()
        assert manager.should_save(4)
        manager.save(4, state=shards(comm, 4), rng=False)
        assert [each.step for each in manager.checkpoints()] == [2]


def test_a_step_for_both_is_copied_once(nodes):
    """The background save to the root reads the file in memory."""
    comm = SoloCommunicator()
    state = {"w": np.arange(1 << 20)}
    with fc.BackgroundWriter() as writer:
        options = {"save_when": fc.SaveEvery(2), "async_save": writer, "tier": {"copies": 1}}
        with nodes.manager(comm, 0, **options) as manager:
            assert manager.should_save(2)
            manager.save(2, state=state, rng=False)
            state["w"][...] = 7
            assert writer.staging_bytes <= 2 << 20
    assert not os.path.exists(nodes.memory(0))
    fc.CheckpointManager(nodes.root, process_group=comm, preemption_signals=()).restore(state=state)
    assert np.array_equal(state["w"], np.arange(1 << 20))


def test_collectives(tmp_path):
    """A step in memory: one for its contents, and four of a save to nodes in the background."""
    counts = {}

    def save(with_tier):
        comm = SoloCommunicator()
        memory = fc.MemoryTier(tmp_path / "shm", save_when=fc.SaveEvery(1), copies=1) if with_tier else None
        root = tmp_path / str(with_tier)
        manager = fc.CheckpointManager(root, process_group=comm, save_when=(), preemption_signals=(), memory=memory)
        for step in (1, 2, 3):
            before = comm.collectives
            manager.should_save(step)
            manager.save(step, state=shards(comm, step), rng=False)
            counts[with_tier, step] = comm.collectives - before
        manager.__exit__(InterruptedError, None, None)
        return root

    assert tree(save(False)) == sorted(files_of(1) + files_of(2) + files_of(3))
    assert tree(save(True)) == ["run.json"]
    assert [counts[False, step] for step in (1, 2, 3)] == [5 + 1, 5, 5]
    # The first: steps of another run, the anchor, the lock, two for what is there, and two for the room. The others:
    # what has become of the last, and its retention.
    assert [counts[True, step] for step in (1, 2, 3)] == [5 + 1 + 6, 5 + 2, 5 + 2]


# -- options and room --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"path": "s3://bucket/run"}, "path is a directory in the memory of a node; got 's3://bucket/run'"),
        ({"copies": 0}, "copies has to be an integer >= 1; got 0"),
        ({"parity": 1}, "parity has to be an integer >= 2; got 1"),
        ({"keep": True}, "keep has to be an integer >= 1; got True"),
        ({"limit": 0.5}, "limit has to be an integer >= 1; got 0.5"),
        ({"save_when": ()}, "save_when has no policy, so nothing is saved. Remedy (FC507): give SaveEvery(20), say"),
        ({"save_when": KeepLatest(1)}, "save_when has to be a SavePolicy or several; got KeepLatest"),
        (
            {"save_when": 5},
            "cannot make a MemoryTier: save_when has to be a SavePolicy or several; got 5. Remedy (FC101)",
        ),
    ],
)
def test_options_that_are_none(options, text):
    with pytest.raises(fc.ValidationError) as error:
        fc.MemoryTier(**{"path": "/dev/shm/run", "save_when": fc.SaveEvery(1), **options})
    assert text in str(error.value) and "Remedy (FC" in str(error.value)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
@pytest.mark.parametrize("below", ["", "run"])
def test_steps_that_others_could_have_put_there_are_refused(saved, mode, below):
    (run,) = Path(saved.memory(1)).iterdir()
    place = run if below else run.parent
    place.chmod(mode)
    for job in (resume(), go_on(14)):
        text = one_error(saved.run(FOUR, job), fc.ValidationError)
        assert f"could have put steps into {place}: its owner is user {os.geteuid()}, its mode {mode:o}" in text
    place.chmod(0o755)
    assert one_of(saved.run(FOUR, resume())).tier == "memory"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives directories away")
@pytest.mark.parametrize("place", ["tier", "run", "link"])
def test_steps_of_another_user_are_refused(saved, place):
    tier = Path(saved.memory(1))
    (run,) = tier.iterdir()
    if place == "link":
        tier.rename(tier.with_name("real"))
        tier.symlink_to("real")
    os.chown(run if place == "run" else tier, 12345, -1, follow_symlinks=False)
    before = saved.steps(0)
    for job in (resume(), go_on(14)):
        assert "could have put steps into" in one_error(saved.run(FOUR, job), fc.ValidationError)
    assert saved.steps(0) == before


def test_a_tier_may_be_a_directory_that_all_share(saved):
    for node in range(4):
        os.chmod(saved.memory(node), 0o1777)
    assert one_of(saved.run(FOUR, resume())).tier == "memory"


def test_nothing_is_saved_where_others_may_write(nodes):
    place = Path(nodes.memory(1))
    place.mkdir(parents=True)
    place.chmod(0o777)
    assert "could have put steps into" in one_error(nodes.run(TWO, train(2)), fc.ValidationError)
    assert os.listdir(place) == []


def test_a_tier_is_made_for_this_user_alone(nodes):
    assert one_of(nodes.run(TWO, train(2)))
    (run,) = Path(nodes.memory(0)).iterdir()
    assert [stat.S_IMODE(each.stat().st_mode) for each in (run, run.parent)] == [0o700, 0o700]


def test_ranks_agree_about_the_tier_but_not_about_its_path_and_limit(nodes):
    def of(**different):
        def make(comm):
            options = {"limit": 10 + comm.rank, **{name: values[comm.rank] for name, values in different.items()}}
            nodes.manager(comm, comm.rank, tier=options).close()

        return SimulatedWorld(2).run_all(make)

    assert of() == [None, None]
    assert "ranks disagree" in one_error(of(keep=[1, 2]), fc.ValidationError)
    assert "ranks disagree" in one_error(of(copies=[1, 2]), fc.ValidationError)
    assert "ranks disagree" in one_error(of(parity=[None, 2]), fc.ValidationError)
    with pytest.raises(fc.ValidationError, match="memory has to be a MemoryTier or None; got '/dev/shm'"):
        fc.CheckpointManager(nodes.root, memory="/dev/shm", preemption_signals=())


STEP_BYTES = 4 * ROWS * (ROWS + 1)


def test_the_limit_is_looked_at_before_the_first_save(nodes):
    """Two nodes of two ranks: each has its own half, and a copy of the other's."""

    def save(manager, comm):
        manager.should_save(2)
        manager.save(2, state=shards(comm, 2), rng=False)

    text = one_error(nodes.run([0, 0, 1, 1], save, tier={"limit": 2 * STEP_BYTES}), fc.ValidationError)
    assert f":{nodes.memory(0)} has too little room for steps in memory" in text
    assert f":{nodes.memory(1)} has too little room for steps in memory" in text
    assert "2 steps (keep=1, and the one that is being saved) of 9.4 KiB, with copies=2" in text
    assert "a limit of 18.4 KiB" in text and " free" in text
    advised("manager/memory_room.py", "raise the limit, or the size of the file system", text)
    assert not os.path.exists(f"{nodes.memory(0)}/x") and nodes.steps(0) == []
    assert not isinstance(nodes.run([0, 0, 1, 1], save, tier={"limit": 20 << 10})[0], Exception)


@pytest.mark.parametrize("pending", [1, 3])
def test_steps_that_background_saves_to_the_root_read_need_room_too(nodes, pending):
    """Their files stay in memory until they have been read, though the steps are removed."""
    comm = SoloCommunicator()
    state = {"w": np.zeros((1 << 20) - 9999, "u1")}

    def save(steps, **options):
        with nodes.manager(comm, 0, tier={"copies": 1, "limit": steps << 20}, **options) as manager:
            assert manager.should_save(2)
            manager.save(2, state=state, rng=False)

    with fc.BackgroundWriter(max_pending=pending) as writer:
        with pytest.raises(fc.CheckpointError) as caught:
            save(1 + pending, async_save=writer)
        said = f"{2 + pending} steps (keep=1, {pending} that background saves to the root read, and the one"
        assert said in str(caught.value)
        save(2 + pending, async_save=writer)
    with pytest.raises(fc.CheckpointError, match="3 steps"):
        save(2, async_save=True)


def test_a_background_save_for_which_no_room_was_asked_reads_no_file_in_memory(nodes, monkeypatch):
    given, save = [], storage_saves.save_from_file

    def watched(shards, directory, comm, options, written):
        given.append(written is not None)
        return save(shards, directory, comm, options, written)

    monkeypatch.setattr(storage_saves, "save_from_file", watched)
    for is_async in (False, True):
        with nodes.manager(SoloCommunicator(), 0, async_save=is_async, tier={"copies": 1}) as manager:
            step = 20 if is_async else 10
            assert manager.should_save(step)
            manager.save(step, state={"w": np.zeros(9)}, rng=False, blocking=False)
        shutil.rmtree(nodes.root)
    assert given == [False, True]


def test_a_start_without_room_leaves_no_run_to_warn_of(nodes, caplog):
    """The corrected start warned of the steps of the run before, which had none."""

    def save(manager, comm):
        with manager:
            manager.should_save(2)
            manager.save(2, state=shards(comm, 2), rng=False)

    assert "too little room" in one_error(nodes.run([0, 1], save, tier={"limit": 100}), fc.ValidationError)
    assert not os.path.exists(f"{nodes.root}/run.json")
    assert nodes.run([0, 1], save) == [None, None]
    assert "not looked for any more" not in caplog.text


def test_the_bytes_that_a_node_stores():
    tiers = [fc.MemoryTier("x", fc.SaveEvery(1), copies=copies) for copies in (1, 2, 3, 4)]
    assert [stored_by(tier, [1, 10, 100], 0) for tier in tiers] == [1, 101, 111, 111]
    parity = fc.MemoryTier("x", fc.SaveEvery(1), parity=4)
    assert stored_by(parity, [90, 91, 90, 90], 2) == 90 + 31
    assert stored_by(parity, [90, 91], 0) == 90 + 91
    assert stored_by(parity, [90], 0) == 90


def test_the_limit_is_looked_at_at_once_if_the_model_is_given(nodes, monkeypatch):
    def job(comm):
        return nodes.manager(comm, comm.rank, tier={"limit": 100}, state=shards(comm, 0))

    text = one_error(SimulatedWorld(2).run_all(job), fc.ValidationError)
    assert "cannot make a CheckpointManager" in text and "too little room" in text
    assert not os.path.exists(nodes.memory(0))


def test_what_the_run_has_there_counts_as_free(saved, monkeypatch):
    """A restart needs no more room than the run has had."""
    full = os.statvfs_result((4096, 4096, 10, 8, 8, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)

    def job(comm):
        manager = saved.manager(comm, FOUR[comm.position], state=shards(comm, 0))
        manager.__exit__(InterruptedError, None, None)

    assert SimulatedWorld(8).run_all(job) == [None] * 8
    shutil.rmtree(saved.root)
    assert "too little room" in one_error(SimulatedWorld(8).run_all(job), fc.ValidationError)

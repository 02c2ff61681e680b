"""A run has an identity: whoever starts below the steps of another run has to choose, who goes on with it has not."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys

import numpy as np
import paddle
import pytest

import paddle_flexckpt as fc
from paddle_flexckpt.cli.main import main
from paddle_flexckpt.manager import KeepBest, KeepLatest
from paddle_flexckpt.manager.identities import identify_run
from paddle_flexckpt.manager.step_directories import StepDirectories
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.tools.step_record import StepRecord
from tests.background.helpers import shards
from tests.manager.samples import data_of, directory_of, empty, manager_of, restore, save, tree, values, version_of
from tests.native.samples import flip
from tests.native.test_cleaner import begin
from tests.remedies.following import advised, provoked

# A file system that has no locks of directories.
WITHOUT_LOCKS = """
import errno, fcntl
def flock(descriptor, operation):
    raise OSError(errno.ENOLCK, "No locks available")
fcntl.flock = flock
"""


def record_of(root, step: int) -> StepRecord:
    return next(each for each in StepDirectories(root).records()[0] if each.step == step)


@pytest.fixture
def old(tmp_path):
    """A directory with the steps of a run that has ended."""
    manager = manager_of(tmp_path / "run")
    for step in (10, 1000, 2000):
        save(manager, step)
    manager.close()
    return tmp_path / "run"


@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"blocking": False}])
def test_a_fresh_run_below_another_ones_steps_is_refused_before_anything_is_written(old, options):
    before = tree(old)
    manager = manager_of(old, keep=KeepLatest(1))
    for step in (1, 20, 3000):
        with provoked("manager/identities.py", "give this run another directory, or move all") as caught:
            save(manager, step, 7, **options)
        said = f"{old!s} has steps of another run, which this run has not restored: 10, 1000, 2000. A root is for one"
        assert said in str(caught.value)
    assert tree(old) == before


@pytest.mark.parametrize("kind", ["model", "unnamed", "damaged", "memory"])
def test_a_fresh_run_is_refused_whatever_is_there(old, tmp_path, kind):
    if kind == "unnamed":
        shutil.rmtree(old)
        state = {"w": np.zeros(2)}
        fc.save_state_dict(state, directory_of(old, 10), SoloCommunicator(), unique_id=0, step=10)
    if kind == "damaged":
        for step in (1000, 2000):
            shutil.rmtree(directory_of(old, step))
        path = directory_of(old, 10) / "0.manifest"
        flip(path, path.stat().st_size - 1)
    memory = fc.MemoryTier(tmp_path / "shm", save_when=fc.SaveEvery(1), copies=1) if kind == "memory" else None
    manager, before = manager_of(old, keep=KeepLatest(1), memory=memory), tree(old)
    for _ in range(2):
        with pytest.raises(fc.ValidationError, match="has steps of another run, which this run has not restored: 10"):
            manager.save(5000, state={"other": np.zeros(3, "f4")} if kind == "model" else values(1), rng=False)
    assert tree(old) == before


def test_the_first_should_save_already_refuses(old):
    """Otherwise a run might train for 1,000 steps before it learns of it."""
    manager = manager_of(old, save_when=fc.SaveEvery(1000))
    for step in (1, 2):
        with pytest.raises(fc.ValidationError, match="has steps of another run, which this run has not restored: 10"):
            manager.should_save(step)
    restore(manager)
    assert not manager.should_save(2001)
    assert manager.should_save(3000)


def test_steps_that_come_from_another_run_later_are_neither_removed_nor_taken(old, tmp_path, caplog):
    """As when two runs begin at the same time."""
    manager = manager_of(tmp_path / "new", keep=KeepLatest(1))
    save(manager, 3000)
    for step in (10, 1000, 2000):
        shutil.move(directory_of(old, step), directory_of(tmp_path / "new", step))
    save(manager, 4000)
    assert manager.all_steps() == [10, 1000, 2000, 4000]
    path = data_of(tmp_path / "new", 4000)
    flip(path, path.read_bytes().index(values(4000)["w"].tobytes()))
    again = manager_of(tmp_path / "new")
    caplog.clear()
    with pytest.raises(fc.CorruptCheckpointError, match="all that could be restored is damaged"):
        restore(again, fallback=True)
    assert "passes over steps of other runs: 2000, 1000, 10" in caplog.text
    assert restore(again, 2000)[:2] == (2000, 2000)
    with pytest.raises(fc.ValidationError, match="has steps of another run, which this run has not restored: 4000"):
        again.should_save(2001)


def test_what_a_run_began_from_is_left_alone(tmp_path):
    state = {key: array.copy() for key, array in values(7).items()}
    fc.save_state_dict(state, directory_of(tmp_path, 7), SoloCommunicator(), unique_id=0, step=7)
    for steps in ((8, 9), (10, 11)):
        manager = manager_of(tmp_path, keep=KeepLatest(1))
        restore(manager, schedule="ignore")
        for step in steps:
            assert manager.should_save(step)
            save(manager, step)
        assert manager.all_steps() == [7, steps[-1]]


def test_a_fall_back_goes_on_below_a_damaged_step_of_a_run_that_began_from_another_state(tmp_path):
    state = {key: array.copy() for key, array in values(7).items()}
    fc.save_state_dict(state, directory_of(tmp_path, 7), SoloCommunicator(), unique_id=0, step=7)
    manager = manager_of(tmp_path)
    restore(manager, schedule="ignore")
    for step in (8, 9, 10):
        save(manager, step)
    path = directory_of(tmp_path, 10) / "0.manifest"
    flip(path, path.stat().st_size - 1)
    assert restore(manager_of(tmp_path), fallback=True)[:2] == (9, 9)
    for step in (8, 9):
        shutil.rmtree(directory_of(tmp_path, step))
    assert restore(manager_of(tmp_path), fallback=True, schedule="ignore")[:2] == (7, 7)


def test_steps_of_another_run_that_are_too_many_to_list_are_told_by_its_name():
    steps = range(1, 301)
    known = {step: "ab" if step % 2 else "cd" for step in steps}
    with pytest.raises(fc.ValidationError) as caught:
        identify_run("root", steps, known, 1, 1, "", steps)
    assert identify_run("root", steps, known, 301, 1, "", steps) == "ab", "those below are left alone"
    said = str(caught.value)
    assert ", 198, 200, ... 300 (all that flexckpt ls shows as of run cd). " in said and "202" not in said
    with pytest.raises(fc.ValidationError, match=r": 1, 2, 3\. "):
        identify_run("root", (1, 2, 3), {1: None, 3: "cd"}, 4, None, "", ())
    with pytest.raises(fc.ValidationError, match=r"\(all that flexckpt ls shows as of run -, ab, cd\)"):
        identify_run("root", steps, {**known, 300: None}, 301, None, "", ())


def test_the_ways_out_lose_nothing(old, tmp_path):
    manager = manager_of(old)
    with provoked("manager/identities.py", "to keep this state, give this run another directory, or move all"):
        save(manager, 20, 7)
    other = manager_of(tmp_path / "other")
    save(other, 20, 7)
    assert (restore(other)[:2], restore(manager_of(old))[:2]) == ((20, 7), (2000, 2000))
    with provoked("manager/identities.py", "instead of this state, call restore() before the training"):
        save(manager_of(old), 20, 7)
    assert restore(manager)[:2] == (2000, 2000)
    save(manager, 1500)
    for step in (10, 1000, 1500, 2000):
        (tmp_path / "moved").mkdir(exist_ok=True)
        shutil.move(directory_of(old, step), directory_of(tmp_path / "moved", step))
    fresh = manager_of(old)
    for step in (10, 20, 1000):
        save(fresh, step, 7)
    assert restore(fresh)[:2] == (1000, 7)
    assert restore(manager_of(tmp_path / "moved"))[:2] == (2000, 2000)


@pytest.mark.parametrize("how", ["latest", 1000, "best", "another manager", "fallback", "rolled back twice"])
def test_the_same_run_is_never_asked(tmp_path, how, caplog):
    manager = manager_of(tmp_path, keep=(KeepLatest(9), fc.manager.KeepBest(1, "loss")))
    for step in (10, 1000, 2000):
        save(manager, step, metrics={"loss": step})
    if how == "another manager":
        manager = manager_of(tmp_path)
        restore(manager, 1000)
        save(manager, 1100)
        manager = manager_of(tmp_path)
    if how == "fallback":
        data_of(tmp_path, 2000).unlink()
        manager = manager_of(tmp_path)
    step, _, _ = restore(manager, how if how in ("best", 1000) else "latest", fallback=how == "fallback")
    save(manager, step + 1)
    if how == "rolled back twice":
        restore(manager, 10)
        save(manager, 11)
    runs = {record_of(tmp_path, each).run for each in manager.all_steps() if how != "fallback" or each != 2000}
    assert len(runs) == 1 and len(runs.pop()) == 16


@pytest.mark.parametrize("which", [2000, "latest"])
def test_the_run_is_that_of_the_restored_step_whatever_becomes_of_it(old, which):
    run = record_of(old, 10).run
    manager = manager_of(old)
    assert restore(manager, which)[0] == 2000
    for step in (10, 1000, 2000):
        shutil.rmtree(directory_of(old, step))
    save(manager, 2001)
    assert record_of(old, 2001).run == run


def test_a_run_that_goes_back_learns_that_its_higher_steps_come_first(tmp_path, caplog):
    manager = manager_of(tmp_path / "run")
    for step in (10, 20, 30):
        save(manager, step)
    restore(manager, 10)
    caplog.clear()
    save(manager, 20, 7, overwrite=True)
    (warning,) = [each.message for each in caplog.records if each.levelno == logging.WARNING]
    assert "has steps 30 of this run above step 20, from before it went back" in warning
    advised("manager/step_directories.py", "move those steps to another directory; or continue in another", warning)
    assert restore(manager_of(tmp_path / "run"))[:2] == (30, 30)
    # Either way nothing is lost, and the run goes on where it was.
    restore(manager, 10)
    other = manager_of(tmp_path / "other")
    save(other, 20, 8)
    assert restore(manager_of(tmp_path / "other"))[:2] == (20, 8)
    (tmp_path / "moved").mkdir()
    shutil.move(directory_of(tmp_path / "run", 30), directory_of(tmp_path / "moved", 30))
    assert restore(manager_of(tmp_path / "run"))[:2] == (20, 7)
    assert restore(manager_of(tmp_path / "moved"))[:2] == (30, 30)


def test_a_run_that_begins_anew_as_all_it_has_saved_is_damaged(tmp_path):
    """The values of rank 1 are damaged, and the records in the files of rank 0 can be read."""

    def begin(comm):
        with manager_of(tmp_path, process_group=comm) as manager:
            for step in (10, 20):
                manager.save(step, state=shards(comm.position, 2, step), rng=False)

    def begin_anew(comm):
        with manager_of(tmp_path, process_group=comm) as manager:
            with pytest.raises(fc.CorruptCheckpointError, match="all that could be restored is damaged"):
                manager.restore(state=shards(comm.position, 2, 0), fallback=True)
            manager.save(5, state=shards(comm.position, 2, 5), rng=False)
        with manager_of(tmp_path, process_group=comm) as manager:
            return manager.restore(state=shards(comm.position, 2, 0), fallback=True).step

    SimulatedWorld(2).run(begin)
    for step in (10, 20):
        path = data_of(tmp_path, step, 1)
        flip(path, path.read_bytes().index(shards(1, 2, step)["w"].local_tensor.tobytes()))
    assert SimulatedWorld(2).run(begin_anew) == [5, 5]
    assert len({record_of(tmp_path, step).run for step in (5, 10, 20)}) == 1


def test_a_newer_step_with_a_lost_manifest_is_never_passed_over_without_a_word(tmp_path, caplog):
    """A repair can bring it back, until the end of the run that goes on without it."""
    with manager_of(tmp_path) as manager:
        save(manager, 2)
        save(manager, 3)
    content, data = (directory_of(tmp_path, 3) / "0.manifest").read_bytes(), data_of(tmp_path, 3)
    (directory_of(tmp_path, 3) / "0.manifest").unlink()
    manager = manager_of(tmp_path, keep=KeepBest(1, metric="loss"))
    repair = f"from a copy, or rebuild it: flexckpt repair {directory_of(tmp_path, 3)} --id 0"
    assert manager.latest_step() == 2
    assert repair in caplog.text
    for which in ("latest", "best", 3):
        with pytest.raises(fc.CheckpointError, match=re.escape(repair)):
            restore(manager, which)
    with pytest.raises(fc.ValidationError, match="FC903"):  # a run that has restored none of these steps
        manager_of(tmp_path).should_save(4)
    assert restore(manager_of(tmp_path), 2)[:2] == (2, 2)
    caplog.clear()
    step, version, report = restore(manager, fallback=True)
    assert (step, version, [*report.skipped]) == (2, 2, [3])
    assert repair in caplog.text
    caplog.clear()
    save(manager, 3, version=30)
    assert repair in caplog.text
    assert data.exists()
    assert (directory_of(tmp_path, 3) / "0.manifest").read_bytes() != content
    assert restore(manager_of(tmp_path))[:2] == (3, 30)


def test_a_run_whose_every_manifest_is_lost_does_not_begin_anew(tmp_path, caplog):
    with manager_of(tmp_path) as manager:
        save(manager, 3)
    (directory_of(tmp_path, 3) / "0.manifest").unlink()
    manager = manager_of(tmp_path)
    assert manager.latest_step() is None
    for call in (lambda: manager.should_save(1), lambda: save(manager, 1), lambda: restore(manager, fallback=True)):
        with pytest.raises(fc.CheckpointError, match="or rebuild it: flexckpt repair "):
            call()
    assert main(["repair", str(directory_of(tmp_path, 3)), "--id", "0"]) == 0
    assert restore(manager)[:2] == (3, 3)


def test_a_step_that_is_being_removed_has_no_lost_manifest(tmp_path, caplog):
    with manager_of(tmp_path) as manager:
        save(manager, 2)
        save(manager, 3)
    (tmp_path / "step_00000003.removing").write_text(json.dumps({"files": [data_of(tmp_path, 3).name]}))
    (directory_of(tmp_path, 3) / "0.manifest").unlink()
    assert restore(manager_of(tmp_path))[:2] == (2, 2)
    assert "lost" not in caplog.text


def test_a_root_that_is_a_checkpoint_itself_is_refused(old):
    """One level too deep, a run would save its steps inside a checkpoint."""
    step = old / "step_00000010"
    before = tree(old)
    manager = manager_of(step)
    for call in (lambda: manager.should_save(1), lambda: save(manager, 1), lambda: restore(manager)):
        with provoked("manager/step_listing.py", "give the manager the directory of the run") as caught:
            call()
        assert f"{step} is a checkpoint itself, not a directory of steps" in str(caught.value)
        assert f"such as {old}; load a single checkpoint by fc.load" in str(caught.value)
    assert tree(old) == before


def test_a_new_run_is_told_of_one_beside_it(old, caplog):
    (old.parent / "ran").mkdir()
    with caplog.at_level(logging.INFO, logger="paddle_flexckpt"):
        assert manager_of(old.parent / "run_").latest_step() is None
        manager_of(old.parent / "run_").should_save(1)
        manager_of(old.parent / "else").should_save(1)
    assert [each.message for each in caplog.records] == [
        f"a new run begins in {old.parent}/run_; beside it, run has steps",
        f"a new run begins in {old.parent}/else",
    ]


def test_steps_of_managers_that_recorded_no_run(tmp_path, monkeypatch):
    """A run that was begun by them goes on; a fresh one has to choose."""
    encode = StepRecord.encode
    with monkeypatch.context() as patch:
        patch.setattr(StepRecord, "encode", lambda self: encode(StepRecord(self.step, self.time, self.metrics)))
        old = manager_of(tmp_path)
        for step in (10, 20):
            save(old, step)
    assert record_of(tmp_path, 20).run == ""
    with pytest.raises(fc.ValidationError, match="has steps of another run, which this run has not restored: 10, 20"):
        save(manager_of(tmp_path), 15)
    manager = manager_of(tmp_path)
    restore(manager, 10)
    save(manager, 15)
    assert record_of(tmp_path, 15).run == ""


def test_ranks_agree_on_the_run(tmp_path):
    def work(comm):
        with manager_of(tmp_path / "run", process_group=comm) as manager:
            manager.save(5, state=values(5), rng=False)
        with manager_of(tmp_path / "run", process_group=comm) as manager:
            with pytest.raises(fc.ValidationError) as caught:
                manager.save(3, state=values(3), rng=False)
            manager.restore(state=empty())
            manager.save(4, state=values(4), rng=False)
        return str(caught.value)

    said = SimulatedWorld(2).run(work)
    assert len(set(said)) == 1 and "has steps of another run, which this run has not restored: 5" in said[0]
    assert record_of(tmp_path / "run", 4).run == record_of(tmp_path / "run", 5).run


def test_a_restore_tells_of_an_unfinished_save(tmp_path, caplog):
    """As a kill during a save leaves it."""
    manager = manager_of(tmp_path)
    save(manager, 2)
    begin(directory_of(tmp_path, 4), 0)
    assert restore(manager)[:2] == (2, 2)
    assert f"the steps in {tmp_path} are [2]; unfinished saves, which are running or died: 4" in caplog.text
    with provoked("manager/step_directories.py", "restore one of these") as caught:
        restore(manager, 4)
    assert "no complete checkpoint of step 4" in str(caught.value) and "running or died: 4" in str(caught.value)
    assert restore(manager, 2)[:2] == (2, 2)
    shutil.rmtree(directory_of(tmp_path, 2))
    with pytest.raises(fc.ValidationError, match="there is no complete checkpoint in .*; unfinished saves, .*: 4. "):
        restore(manager)


# -- links, and copies of steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dead", [False, True])
def test_a_step_that_is_a_link_is_left_alone(tmp_path, caplog, dead):
    """What it points to may be on another disk for good: a checkpoint, or what a save that died has left there."""
    root, disk = tmp_path / "run", tmp_path / "disk"
    manager = manager_of(root, keep=KeepLatest(1))
    save(manager, 1)
    disk.mkdir()
    shutil.move(directory_of(root, 1), disk / "kept")
    directory_of(root, 1).symlink_to(disk / "kept")
    if dead:
        (disk / "kept" / "0.manifest").unlink()
        (disk / "kept" / "0.saving").write_text("{}")
    before = tree(disk)
    with caplog.at_level(logging.WARNING, logger="paddle_flexckpt"):
        for step in (2, 3, 4):
            save(manager, step)
    assert tree(disk) == before
    said = [text for text in caplog.messages if "is a link to" in text]
    assert said == [f"{directory_of(root, 1)} is a link to {disk / 'kept'}: what is there is left alone, as others may "
                    "need it"]  # fmt: skip
    assert manager.all_steps() == ([4] if dead else [1, 4])


def test_a_copy_of_a_step_is_passed_over_and_never_replaced_unasked(tmp_path):
    manager = manager_of(tmp_path)
    save(manager, 1)
    shutil.copytree(directory_of(tmp_path, 1), directory_of(tmp_path, 9))
    with provoked("manager/restore.py", "fallback=True passes over it"):
        restore(manager)
    step, version, report = restore(manager, fallback=True)
    assert (step, version, list(report.skipped)) == (1, 1, [9])
    with pytest.raises(fc.ValidationError, match="there is a checkpoint of step 9"):
        save(manager, 9)  # it may be the only copy of step 1
    with provoked("manager/restore.py", "give it its own name back"):
        restore(manager)
    shutil.rmtree(directory_of(tmp_path, 1))
    shutil.move(directory_of(tmp_path, 9), directory_of(tmp_path, 1))
    assert restore(manager)[:2] == (1, 1)
    shutil.move(directory_of(tmp_path, 1), directory_of(tmp_path, 9))
    with provoked("manager/restore.py", "or load it with load_state_dict"):
        restore(manager)
    state = empty()
    fc.load_state_dict(state, directory_of(tmp_path, 9), SoloCommunicator())
    assert version_of(state) == 1


# -- blocks that end by an exception -----------------------------------------------------------------------------------

SLICED = """
import sys, numpy as np, paddle
import paddle_flexckpt as fc
from paddle_flexckpt.testing.simulated import SimulatedWorld
paddle.seed(3)
model = paddle.nn.Linear(64, 64)
optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
"""


def test_an_exception_after_a_save_in_slices_does_not_lose_it(tmp_path):
    code = (
        SLICED
        + """
try:
    with fc.CheckpointManager(sys.argv[1], async_save=True, slice_bytes=4096) as manager:
        manager.save(7, model=model, optimizer=optimizer)
        assert manager.stage_next()
        raise ZeroDivisionError("in the next micro-step")
except ZeroDivisionError:
    print(float(model.weight.sum()))
"""
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and "is lost" not in done.stderr, done.stderr
    saved = {"weight": np.zeros((64, 64), "float32")}
    fc.load_state_dict(saved, directory_of(tmp_path, 7), SoloCommunicator(), optimizer_states="ignore")
    assert float(saved["weight"].sum()) == pytest.approx(json.loads(done.stdout), rel=1e-5)


def network():
    fc.install()
    model = paddle.nn.Linear(64, 64)
    return model, paddle.optimizer.AdamW(parameters=model.parameters())


@pytest.mark.parametrize("why", ["ranks", "changed"])
def test_a_save_in_slices_that_cannot_be_finished_is_named(tmp_path, caplog, why):
    def work(comm):
        model, optimizer = network()
        with fc.BackgroundWriter(nice=0) as writer:
            try:
                with manager_of(tmp_path, process_group=comm, async_save=writer, slice_bytes=4096) as manager:
                    handle = manager.save(7, model=model, optimizer=optimizer, rng=False)
                    if why == "changed":
                        manager.stage_next()
                        model.weight.set_value(model.weight + 1)
                    raise ZeroDivisionError
            except ZeroDivisionError:
                if not handle.is_staged:
                    handle.give_up()

    with caplog.at_level(logging.ERROR, logger="paddle_flexckpt"):
        SimulatedWorld(2 if why == "ranks" else 1).run(work)
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    begin = f"the save of step 7 to {str(directory_of(tmp_path, 7))!r} is lost: ZeroDivisionError has ended the manager"
    assert said and all(text.startswith(begin) for text in said)
    assert manager_of(tmp_path).all_steps() == []
    advised("manager/pending_steps.py", "save the step again; to have it finished, call wait() on every rank", said[0])
    for way in ("again", "wait", "whole"):
        model, optimizer = network()
        with fc.BackgroundWriter(nice=0) as writer, contextlib.suppress(ZeroDivisionError):
            options = {"slice_bytes": 4096} if way == "wait" else {}
            with manager_of(tmp_path / way, async_save=writer, **options) as manager:
                manager.save(7, model=model, optimizer=optimizer, rng=False)
                if way == "wait":
                    manager.wait()
                model.weight.set_value(model.weight + 1)
                if way != "again":
                    raise ZeroDivisionError
        assert manager_of(tmp_path / way).all_steps() == [7]


STARTS = """
import sys
import numpy as np
import paddle_flexckpt as fc

root, restores = sys.argv[1:]
root = fc.open_storage(root, lease_seconds=1.0)
manager = fc.CheckpointManager(root, save_when=fc.SaveEvery(1), preemption_signals=())
state = {"w": np.zeros(2, np.float32)}
step = manager.restore(state=state, rng=False).step if restores == "yes" else 0
print("ready", flush=True)
for line in sys.stdin:
    step += 1
    try:
        if manager.should_save(step):
            manager.save(step, state=state, rng=False)
        print("saved", step, flush=True)
    except fc.CheckpointError as error:
        print(type(error).__name__, " ".join(str(error).split()), flush=True)
"""


class Start:
    """A start of a job, in a process of its own, which does a step each time that it is asked to."""

    def __init__(self, root, restores: str) -> None:
        command = [sys.executable, "-W", "ignore", "-c", STARTS, str(root), restores]
        self.process = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout.readline() == "ready\n"

    def step(self) -> str:
        print(file=self.process.stdin, flush=True)
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.parametrize("locks", [True, False])
@pytest.mark.parametrize("restores", ["no", "yes"])
def test_of_two_starts_at_once_one_saves_and_the_other_is_told_who(tmp_path, restores, locks, monkeypatch):
    """A job was submitted twice, or is started again while its earlier start still runs."""
    if not locks:
        (tmp_path / "sitecustomize.py").write_text(WITHOUT_LOCKS)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    root, begun = tmp_path / "run", 0 if restores == "no" else 3
    if begun:
        with manager_of(root) as manager:
            manager.save(begun, state={"w": np.zeros(2, np.float32)}, rng=False)
        root = root.rename(tmp_path / "copy")  # a copy, or what was moved, is free
    first, second = Start(root, restores), Start(root, restores)
    try:
        assert first.step() == f"saved {begun + 1}"
        for _ in range(2):
            said = second.step()
            assert said.startswith("TakenError") and f"process {first.process.pid} on {socket.gethostname()}" in said
            assert "has held it since" in said and "overwrite" not in said
            advised("manager/identities.py", "end one of the two; or give this run another directory", said)
        assert first.step() == f"saved {begun + 2}"
        first.kill()
        said = second.step()
        assert said.startswith("ValidationError") and f"not restored: {begun + 1}, {begun + 2}. " in said
        third = Start(root, "yes")
        assert third.step() == f"saved {begun + 3}"
        third.kill()
    finally:
        first.kill()
        second.kill()


def test_a_start_that_has_lost_its_root_looks_again_who_saves_there(tmp_path):
    """Another directory has its place, in which another start has saved meanwhile."""
    manager = manager_of(tmp_path / "run")
    save(manager, 1)
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    with manager_of(tmp_path / "other") as another:
        restore(another)
        save(another, 2)
    (tmp_path / "run").rename(tmp_path / "old")
    (tmp_path / "other").rename(tmp_path / "run")
    for _ in range(2):
        with pytest.raises(fc.ValidationError, match="has steps of another start, which this one has not restored: 2"):
            save(manager, 3)
    restore(manager)
    save(manager, 3)
    assert manager.all_steps() == [1, 2, 3]


def test_managers_of_one_process_are_one_start(tmp_path):
    first = manager_of(tmp_path / "run")
    save(first, 1)
    second = manager_of(tmp_path / "run")
    restore(second)
    save(second, 2)
    save(first, 3)
    save(second, 4)
    assert second.all_steps() == [1, 2, 3, 4]

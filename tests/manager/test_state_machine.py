"""A manager against a model of it in plain Python, through saves, crashes, damage, readers and restores in any order.

The writer process is stopped while a save in the background is handed over, so that it is not complete before the
machine says so. Clocks go where the machine wants, also back.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

pytest.importorskip("paddle")

import paddle_flexckpt as fc
from paddle_flexckpt.manager import step_contents as contents_module
from paddle_flexckpt.manager.policies import (
    KeepBest,
    KeepEvery,
    KeepInterval,
    KeepLatest,
    StepRecord,
    best_first,
    steps_to_remove,
)
from paddle_flexckpt.manager.step_directories import StepDirectories
from paddle_flexckpt.native.directory import CheckpointDirectory, LockedManifest
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from tests.manager.samples import directory_of, empty, listed, values
from tests.media.faults import FaultyFiles
from tests.native.samples import flip
from tests.property import examples

STEPS = st.integers(0, 5)
LOSSES = st.sampled_from([1.0, 2.0, 3.0, float("nan"), None])
KEEPS = st.sampled_from(
    [
        (),
        (KeepLatest(1),),
        (KeepLatest(2), KeepBest(1)),
        (KeepEvery(2), KeepBest(2, "loss", "max")),
        (KeepInterval(100), KeepBest(1)),
    ]
)
DAMAGES = st.sampled_from(["manifest", "missing", "flipped"])
# System calls of a save, and of the retention after it; more than there are.
CALLS = st.one_of(st.integers(0, 40), st.integers(40, 70))


def begin_run(self, step, restored, run) -> str:
    self.run, self._lock.hold = "run", bool  # all managers are one start
    return self.run


@dataclass(eq=False)
class Stored:
    """A checkpoint, as it ought to be."""

    version: int
    time: float
    loss: float | None
    damage: str | None = None

    @property
    def is_readable(self) -> bool:
        """Whether its record can be read."""
        return self.damage in (None, "flipped")


class Managed(RuleBasedStateMachine):
    """The rules; ``writer`` is given by the test."""

    writer: fc.BackgroundWriter

    def __init__(self) -> None:
        super().__init__()
        memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.root = tempfile.mkdtemp(prefix="flexckpt-", dir=memory)
        self.now = 1000.0
        self.versions = 0
        self.stored: dict[int, Stored] = {}
        self.pending: tuple[int, Stored, fc.SaveHandle] | None = None
        self.held: dict[int, tuple[Stored, LockedManifest]] = {}
        self.patch = pytest.MonkeyPatch()
        # Thousands of lines about damage would hide the one that fails.
        self.patch.setattr(logging.getLogger("paddle_flexckpt"), "disabled", True)
        self.patch.setattr(contents_module, "time", SimpleNamespace(time=lambda: self.now))
        # All processes are one run, though few of them begin with a restore.
        self.patch.setattr(StepDirectories, "begin_run", begin_run)

    @initialize(keep=KEEPS)
    def begin(self, keep) -> None:
        self.make(keep)

    def make(self, keep) -> None:
        """A new process begins: it knows nothing."""
        self.keep = keep
        self.manager = fc.CheckpointManager(
            self.root, keep=keep, process_group=SoloCommunicator(), async_save=self.writer, preemption_signals=()
        )
        self.known: set[Stored] = set()
        self.found_damaged: set[int] = set()
        self.uncollected = False
        # The step that was saved last and is known to be complete, and the one that was begun since.
        self.newest: int | None = None
        self.begun: int | None = None

    # -- the model -----------------------------------------------------------------------------------------------------

    def records(self) -> tuple[list[StepRecord], list[int]]:
        """What the manager knows, and the steps of which it cannot read it."""
        self.known |= {each for each in self.stored.values() if each.is_readable}
        records, unreadable = [], []
        for step, each in sorted(self.stored.items()):
            if each in self.known:
                records.append(StepRecord(step, each.time, {} if each.loss is None else {"loss": each.loss}))
            else:
                unreadable.append(step)
        return records, unreadable

    def doomed(self, newest: int | None) -> list[int]:
        """What a retention removes."""
        busy = self.pending[0] if self.pending else None
        records = self.records()[0]
        without = steps_to_remove([record for record in records if record.step != busy], self.keep, newest)
        return [
            step
            for step in steps_to_remove(records, self.keep, newest)
            if step in without
            and self.stored[step].damage != "manifest"
            and not (step in self.held and self.held[step][0] is self.stored[step])
        ]

    def retain(self, newest: int | None) -> None:
        for step in self.doomed(newest):
            del self.stored[step]

    def may_save(self, step: int, overwrite: bool) -> bool:
        return overwrite or step not in self.stored or step in self.found_damaged

    def new(self, loss: float | None, later: float) -> tuple[Stored, dict]:
        self.versions += 1
        self.now += later
        metrics = {} if loss is None else {"loss": loss}
        return Stored(self.versions, self.now, loss), {"state": values(self.versions), "metrics": metrics, "rng": False}

    def let_go(self) -> None:
        """The save in the background goes on, to its end."""
        if self.pending is not None:
            step, stored, handle = self.pending
            os.kill(self.writer.pid, signal.SIGCONT)
            assert handle.wait(300)
            assert handle.error is None
            self.pending = None
            self.stored[step] = stored

    def collect(self) -> None:
        """The manager looks whether the save in the background has ended."""
        if self.pending is None and self.begun is not None:
            self.newest, self.begun = self.begun, None

    def content(self, step: int, manager: fc.CheckpointManager) -> int | None:
        """The version that is restored; None if it is damaged."""
        state = empty()
        try:
            manager.restore(step, state=state)
        except fc.CorruptCheckpointError:
            return None
        version = int(state["b"][0]) // 1000
        assert all(np.array_equal(state[key], array) for key, array in values(version).items())
        return version

    # -- saving --------------------------------------------------------------------------------------------------------

    @rule(step=STEPS, loss=LOSSES, overwrite=st.booleans(), later=st.integers(-30, 120))
    def save(self, step, loss, overwrite, later) -> None:
        if self.pending and self.pending[0] == step:
            self.let_go()
        self.collect()
        stored, contents = self.new(loss, later)
        highest = max(self.stored, default=-1)
        if not self.may_save(step, overwrite):
            with pytest.raises(fc.ValidationError, match="there is a checkpoint of step"):
                self.manager.save(step, **contents, overwrite=overwrite, blocking=True)
        else:
            self.manager.save(step, **contents, overwrite=overwrite, blocking=True)
            self.stored[step] = stored
            self.found_damaged.discard(step)
            self.newest = step
            self.retain(step)
            assert step in self.stored
            assert highest < 0 or max(self.stored) >= highest
        self.uncollected = self.uncollected and self.pending is not None

    @rule(step=STEPS, loss=LOSSES, overwrite=st.booleans(), later=st.integers(-30, 120), at_once=st.booleans())
    def save_in_the_background(self, step, loss, overwrite, later, at_once) -> None:
        self.let_go()
        self.collect()
        stored, contents = self.new(loss, later)
        if not self.may_save(step, overwrite):
            with pytest.raises(fc.ValidationError, match="there is a checkpoint of step"):
                self.manager.save(step, **contents, overwrite=overwrite)
            self.uncollected = False
            return
        os.kill(self.writer.pid, signal.SIGSTOP)
        try:
            handle = self.manager.save(step, **contents, overwrite=overwrite)
        except BaseException:
            os.kill(self.writer.pid, signal.SIGCONT)
            raise
        self.pending = step, stored, handle
        self.begun = step
        self.uncollected = True
        self.retain(self.newest)
        if at_once:
            self.let_go()

    @rule()
    def complete(self) -> None:
        self.let_go()

    @rule()
    def wait(self) -> None:
        self.let_go()
        self.manager.wait()
        self.collect()
        if self.uncollected:
            self.retain(self.newest)
        self.uncollected = False

    @rule(keep=KEEPS)
    def close(self, keep) -> None:
        self.let_go()
        self.manager.close()
        self.collect()
        if self.uncollected:
            self.retain(self.newest)
        self.make(keep)

    # -- accidents -----------------------------------------------------------------------------------------------------

    @rule(keep=KEEPS)
    def kill(self, keep) -> None:
        self.make(keep)

    @rule(step=STEPS, loss=LOSSES, at=CALLS, power=st.booleans(), keep=KEEPS)
    def crash_in_a_save(self, step, loss, at, power, keep) -> None:
        if self.pending and self.pending[0] == step:
            self.let_go()
        stored, contents = self.new(loss, 1)
        before = dict(self.stored)
        with pytest.MonkeyPatch.context() as patch:
            files = FaultyFiles(patch, at, dead_after=True)
            try:
                self.manager.save(step, **contents, overwrite=True, blocking=True)
            except fc.CheckpointError as error:
                assert "injected" in str(error)
        if power:
            files.lose_power()
        # What the retention would have removed may be gone, and the step may be the old one or the new one.
        self.stored[step] = stored
        doomed = self.doomed(step)
        looking = fc.CheckpointManager(self.root, process_group=SoloCommunicator(), preemption_signals=())
        there = looking.all_steps()
        assert set(before) - set(doomed) <= set(there) <= {*before, step}
        if step in there:
            version = self.content(step, looking)
            if version != stored.version:
                self.stored[step] = before[step]
                assert version == (None if before[step].damage else before[step].version)
        else:
            del self.stored[step]
            assert step not in before
        for other in set(self.stored) - set(there):
            del self.stored[other]
        self.make(keep)

    @precondition(lambda self: any(each.damage is None for each in self.stored.values()))
    @rule(data=st.data(), kind=DAMAGES)
    def damage(self, data, kind) -> None:
        step = data.draw(st.sampled_from(sorted(s for s, each in self.stored.items() if each.damage is None)))
        directory = CheckpointDirectory(directory_of(self.root, step))
        file = directory_of(self.root, step) / directory.read_manifest(0).catalog.files[0]
        if kind == "manifest":
            manifest = directory_of(self.root, step) / "0.manifest"
            flip(manifest, manifest.stat().st_size - 1)
        elif kind == "missing":
            file.unlink()
        else:
            flip(file, file.read_bytes().index(values(self.stored[step].version)["w"].tobytes()))
        self.stored[step].damage = kind

    # -- reading -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: any(each.damage != "manifest" for each in self.stored.values()))
    @rule(data=st.data())
    def begin_to_read(self, data) -> None:
        step = data.draw(st.sampled_from(sorted(s for s, each in self.stored.items() if each.damage != "manifest")))
        if step not in self.held:
            held = LockedManifest(CheckpointDirectory(directory_of(self.root, step)), 0)
            self.held[step] = self.stored[step], held

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end_reading(self, data) -> None:
        stored, held = self.held.pop(data.draw(st.sampled_from(sorted(self.held))))
        with held as manifest:
            if stored.damage is None and stored in self.stored.values():
                step = next(s for s, each in self.stored.items() if each is stored)
                CheckpointDirectory(directory_of(self.root, step)).check_complete(manifest)

    @rule(which=st.one_of(st.just("latest"), st.just("best"), STEPS), fallback=st.booleans())
    def restore(self, which, fallback) -> None:
        self.let_go()
        self.collect()
        self.uncollected = False
        state = empty()
        expected, skipped = self.what_is_restored(which, fallback)
        if isinstance(expected, type):
            with pytest.raises(expected):
                self.manager.restore(which, state=state, fallback=fallback)
            return
        report = self.manager.restore(which, state=state, fallback=fallback)
        assert report.step == expected
        assert set(report.skipped) == skipped
        for key, array in values(self.stored[expected].version).items():
            assert np.array_equal(state[key], array)
        self.found_damaged |= skipped

    def what_is_restored(self, which, fallback) -> tuple[int | type[Exception], set[int]]:
        """The step, or the error; and the steps that are skipped."""
        if not self.stored:
            return fc.ValidationError, set()
        skipped: set[int] = set()
        if which == "best":
            best = next((policy for policy in self.keep if isinstance(policy, KeepBest)), None)
            if best is None:
                return fc.ValidationError, set()
            records, unreadable = self.records()
            if unreadable and not fallback:
                return fc.CorruptCheckpointError, set()
            skipped |= set(unreadable)
            order = best_first(records, best.metric, best.mode)
            if not order:
                return fc.CorruptCheckpointError if unreadable else fc.ValidationError, set()
        elif which == "latest":
            order = sorted(self.stored, reverse=True)
        elif which in self.stored:
            order = sorted((step for step in self.stored if step <= which), reverse=True)
        else:
            return fc.ValidationError, set()
        for step in order:
            if self.stored[step].damage is None:
                return step, skipped
            if not fallback:
                break
            skipped.add(step)
        return fc.CorruptCheckpointError, set()

    @rule()
    def list_all(self) -> None:
        expected = [(step, each.damage in (None, "flipped")) for step, each in sorted(self.stored.items())]
        infos = self.manager.checkpoints()
        assert [(int(info.path[-8:]), info.complete) for info in infos] == expected
        complete = [step for step, is_complete in expected if is_complete]
        assert self.manager.latest_step() == max(self.stored, default=None)
        latest = fc.latest(self.root)
        assert (latest and latest.step) == max(complete, default=None)

    @invariant()
    def what_is_there_is_what_ought_to_be(self) -> None:
        assert self.manager.all_steps() == sorted(self.stored)

    def teardown(self) -> None:
        self.patch.undo()
        try:
            self.let_go()
            for _, held in self.held.values():
                held.__exit__(None, None, None)
            StepDirectories(self.root).retain((), None, ())  # leftovers go
            assert listed(self.root) == sorted(directory_of("", step).name for step in self.stored)
            # Whose files those of a damaged manifest are cannot be told.
            whole = [step for step, each in self.stored.items() if each.damage != "manifest"]
            left = [name for step in whole for name in os.listdir(directory_of(self.root, step))]
            assert {os.path.splitext(name)[1] for name in left} <= {".manifest", ".safetensors", ".metadata"}
        finally:
            shutil.rmtree(self.root)


def test_the_manager_is_what_its_model_is():
    with fc.BackgroundWriter(nice=0) as writer:
        with tempfile.TemporaryDirectory() as path:
            # Its process is there from now on.
            fc.save_state_dict({"w": np.zeros(1)}, path, SoloCommunicator(), async_save=writer).result(60)
        machine = type("Machine", (Managed,), {"writer": writer})
        run_state_machine_as_test(machine, settings=examples(40))

"""Several ranks: what one of them finds out, all of them know."""

from __future__ import annotations

import re
import threading
import time

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle

import paddle_flexckpt as fc
from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.manager import KeepBest, KeepLatest, SaveEvery, SaveInterval
from paddle_flexckpt.manager.step_contents import check_same_metrics
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.manager.samples import data_of, directory_of, listed
from tests.native.samples import flip

ROWS = 12


def shards(comm, step: int) -> dict[str, fc.ShardedWeight]:
    """A tensor cut by rows, and a replicated one."""
    rows = ROWS // comm.size
    whole = np.arange(ROWS * 2, dtype="float32").reshape(ROWS, 2) + 1000 * step
    part = whole[comm.position * rows : (comm.position + 1) * rows].copy()
    return {
        "w": fc.ShardedWeight("w", part, part.shape, whole.shape, (comm.position * rows, 0)),
        "b": fc.ShardedWeight("b", whole[0].copy(), (2,), (2,), (0,)),
    }


def manager_of(comm, root, **options) -> fc.CheckpointManager:
    return fc.CheckpointManager(root, process_group=comm, preemption_signals=(), **options)


def resumed(comm, root, **options) -> fc.CheckpointManager:
    manager = manager_of(comm, root, **options)
    restore(manager, comm)
    return manager


def save(manager, comm, step: int, **options):
    return manager.save(step, state=shards(comm, step), rng=False, **options)


def restore(manager, comm, step="latest", **options) -> tuple[int, list[int]]:
    """The step, and those that were skipped."""
    state = shards(comm, 0)
    report = manager.restore(step, state=state, **options)
    for key, shard in shards(comm, report.step).items():
        assert (state[key].local_tensor == shard.local_tensor).all()
    return report.step, sorted(report.skipped)


def run(size, job):
    return SimulatedWorld(size).run(job)


def errors(size, job, kind=fc.ValidationError) -> str:
    """The error that all ranks raise, with the same text."""
    outcomes = SimulatedWorld(size).run_all(job)
    assert {type(outcome) for outcome in outcomes} == {kind}, outcomes
    assert len({str(outcome) for outcome in outcomes}) == 1
    return str(outcomes[0])


@pytest.fixture
def three(tmp_path):
    """Steps 1 to 3, saved by 3 ranks."""

    def job(comm):
        manager = manager_of(comm, tmp_path)
        for step in (1, 2, 3):
            save(manager, comm, step, metrics={"loss": abs(step - 2)})

    run(3, job)
    return tmp_path


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_saved_by_three_and_restored_by_any_number(three, size):
    def job(comm):
        manager = manager_of(comm, three, keep=KeepBest(1))
        found = [manager.all_steps(), manager.latest_step(), manager.best_step(), len(manager.checkpoints())]
        return [*found, restore(manager, comm), restore(manager, comm, "best"), restore(manager, comm, 1)]

    assert run(size, job) == [[[1, 2, 3], 3, 2, 3, (3, []), (2, []), (1, [])]] * size


def test_metrics_that_differ_are_an_error_that_names_the_ranks(tmp_path):
    def job(comm):
        save(manager_of(comm, tmp_path), comm, 1, metrics={"loss": 1.5 + (comm.rank == 2), "same": 3})

    text = errors(3, job)
    assert "metrics: 'loss' differs between ranks (ranks 0-1: 1.5; rank 2: 2.5). Remedy" in text
    assert "same" not in text
    assert listed(tmp_path) == []


def test_metrics_that_differ_on_many_ranks_are_a_short_error():
    with pytest.raises(ValidationError) as caught:
        check_same_metrics(range(4096), [{"loss": repr(rank / 2)} for rank in range(4096)], "cannot save")
    assert "rank 7: 3.5; and 4088 more)" in str(caught.value)


@pytest.mark.parametrize("manages", [True, False])
def test_values_that_differ_are_an_error_that_names_them(tmp_path, manages):
    def job(comm):
        extra = {"seed": 5 + comm.rank, "same": 3, "names": {"run": "x" * (90 + comm.rank)}}
        if manages:
            save(manager_of(comm, tmp_path), comm, 1, extra=extra)
        else:
            fc.save(tmp_path, state=shards(comm, 1), rng=False, extra=extra, process_group=comm)

    text = errors(2, job)
    assert "ranks disagree: rank 0: {" in text and "; rank 1: {" in text
    assert re.findall(r"extra.seed\W+(\d)", text) == ["5", "6"]
    assert len(re.findall(r"extra.names.run.{20,80}\.\.\. \(digest \w{8}\)", text)) == 2
    assert "extra.same" not in text and "lr_scheduler" not in text and "x" * 60 not in text
    assert "Remedy (FC502): call with the same arguments on every rank" in text
    assert listed(tmp_path) == []


def test_schedules_that_differ_are_named(tmp_path):
    def job(comm):
        scheduler = paddle.optimizer.lr.StepDecay(0.5, 3)
        for _ in range(comm.rank):
            scheduler.step()
        save(manager_of(comm, tmp_path), comm, 1, lr_scheduler=scheduler)

    assert re.findall(r'"(lr_scheduler.*?)": "(\d)"', errors(2, job)) == [
        ("lr_scheduler.state.last_epoch", "0"),
        ("lr_scheduler.state.last_epoch", "1"),
    ]


def test_metrics_that_one_rank_lacks(tmp_path):
    def job(comm):
        save(manager_of(comm, tmp_path), comm, 1, metrics={"loss": 1.5} if comm.rank else None)

    assert "(rank 0: none; rank 1: 1.5)" in errors(2, job)


def test_ranks_that_disagree_are_told_so(three):
    def save_another(comm):
        save(resumed(comm, three), comm, 4 + comm.rank)

    def restore_another(comm):
        restore(manager_of(comm, three), comm, 1 + comm.rank)

    def fall_back_alone(comm):
        restore(manager_of(comm, three), comm, fallback=comm.rank == 0)

    def ask_for_another(comm):
        resumed(comm, three, save_when=SaveInterval(1)).should_save(4 + comm.rank)

    def keep_otherwise(comm):
        manager_of(comm, three, keep=KeepLatest(1 + comm.rank))

    def watch_alone(comm):
        # The others would not take part in the collective of should_save.
        manager_of(comm, three, save_when=SaveInterval(1) if comm.rank else SaveEvery(1))

    for job in (save_another, restore_another, fall_back_alone, ask_for_another, keep_otherwise, watch_alone):
        assert "ranks disagree: " in errors(2, job), job
    assert listed(three) == [directory_of(three, step).name for step in (1, 2, 3)]


def test_what_one_rank_finds_wrong(three):
    def bad_state(comm):
        state = {"w": 3} if comm.rank == 1 else shards(comm, 4)
        resumed(comm, three).save(4, state=state)

    def there_already(comm):
        save(resumed(comm, three), comm, 3)

    def no_such_step(comm):
        restore(manager_of(comm, three), comm, 7)

    assert "[rank 1]" in errors(3, bad_state)
    assert "[rank 0] there is a checkpoint of step 3" in errors(3, there_already)
    assert "[rank 0] there is no complete checkpoint of step 7" in errors(3, no_such_step)


def test_damage_that_one_rank_reads_makes_all_fall_back(three):
    path = data_of(three, 3, 2)
    rows = np.arange(ROWS * 2, dtype="float32")[-ROWS * 2 // 3 :] + 3000
    flip(path, path.read_bytes().index(rows.tobytes()))
    outcomes = SimulatedWorld(3).run_all(lambda comm: restore(manager_of(comm, three), comm))
    assert {type(outcome) for outcome in outcomes} == {fc.CorruptCheckpointError}
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert run(3, lambda comm: restore(manager_of(comm, three), comm, fallback=True)) == [(2, [3])] * 3


def test_a_removal_that_fails_is_an_error_on_all_ranks(three, monkeypatch):
    def remove(self, step):
        raise OSError(5, "Input/output error", str(step))

    monkeypatch.setattr("paddle_flexckpt.manager.step_directories.StepDirectories._remove", remove)
    text = errors(2, lambda comm: save(resumed(comm, three, keep=KeepLatest(1)), comm, 4), fc.CheckpointError)
    assert "the checkpoint of step 4 is complete, but " in text
    assert "[rank 0] OSError: [Errno 5] Input/output error: '1'; OSError" in text
    monkeypatch.undo()
    assert run(2, lambda comm: restore(manager_of(comm, three), comm)) == [(4, [])] * 2


def test_the_coordinators_clock_decides(tmp_path, monkeypatch):
    clock, real = threading.local(), time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: getattr(clock, "now", None) or real())

    def job(comm):
        clock.now = 100.0
        manager = manager_of(comm, tmp_path, save_when=SaveInterval(10))
        answers = []
        for step, (first, others) in enumerate([(105.0, 150.0), (110.0, 101.0)]):
            clock.now = others if comm.rank else first
            answers.append(manager.should_save(step))
        return answers

    assert run(3, job) == [[False, True]] * 3


class Signals:
    """In place of handlers, which threads cannot have: rank 1 of 3 gets the signal before step 2."""

    def __init__(self, numbers):
        self.received, self.closed, self.is_active = False, False, bool(numbers)

    def close(self, stopped=False):
        self.closed = True


def test_a_signal_on_one_rank_stops_all_after_the_same_step(tmp_path, monkeypatch):
    monkeypatch.setattr("paddle_flexckpt.manager.manager.PreemptionSignals", Signals)

    def job(comm):
        seen = []
        with fc.CheckpointManager(
            tmp_path, process_group=comm, save_when=SaveEvery(10), preemption_signals=(15,)
        ) as manager:
            for step in range(1, 9):
                if (comm.rank, step) == (1, 2):
                    manager._signals.received = True
                before = comm.collectives
                wanted = manager.should_save(step)
                seen.append((step, wanted, comm.collectives - before))
                if wanted:
                    save(manager, comm, step)
                if manager.should_stop:
                    break
        assert manager._signals.closed
        return seen, manager.preempted

    expected = [(1, False, 2), (2, True, 1)]
    assert run(3, job) == [(expected, False), (expected, True), (expected, False)]
    assert run(2, lambda comm: restore(manager_of(comm, tmp_path), comm)) == [(2, [])] * 2

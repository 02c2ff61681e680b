"""The manager in the simulated world: at each of its calls something strikes, or another process does something."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("paddle")
pytest.importorskip("greenlet")

import paddle

from paddle_flexckpt.background.writer import BackgroundWriter
from paddle_flexckpt.catalog import (
    CheckpointError,
    CorruptCheckpointError,
    NotDurableError,
    UnreadableCheckpointError,
    ValidationError,
)
from paddle_flexckpt.foreign.paddle_files import PADDLE_METADATA
from paddle_flexckpt.manager import (
    CheckpointManager,
    KeepBest,
    KeepEvery,
    KeepInterval,
    KeepLatest,
    SaveEvery,
    SaveInterval,
)
from paddle_flexckpt.manager.identities import OWNER
from paddle_flexckpt.parallel.install import uninstall
from paddle_flexckpt.ranks.communicator import Communicator, SoloCommunicator
from paddle_flexckpt.saving.saver import save_state_dict
from tests.saved import data_file
from tests.simulated.training import versions_in
from tests.simulated.trees import fill, tree_of
from tests.simulation.ranks import (
    DEAD,
    ROOT,
    Ranks,
    Strike,
    fail,
    fail_with,
    is_unknown,
    kill,
    lose_power,
    some_of,
    stop,
)

SAVED = "saved"
KEEPS = {"pages": True, "reports": True}


def manager_of(comm: Communicator, **options: Any) -> CheckpointManager:
    return CheckpointManager(ROOT, process_group=comm, **{"preemption_signals": (), **options})


def save(world: Ranks, manager: CheckpointManager, comm: Communicator, step: int, **options: Any) -> Any:
    """Save a step, whose values are of a version of the same number."""
    state = world.state(comm.rank, comm.size, options.pop("version", step))
    return manager.save(step, state=state, rng=False, **options)


def restore(world: Ranks, manager: CheckpointManager, comm: Communicator, step: Any = "latest", **options: Any) -> Any:
    """Restore a step; return the report, and the one version of all values."""
    state = world.state(comm.rank, comm.size)
    report = manager.restore(step, state=state, rng=False, **options)
    (version,) = versions_in(state, comm.rank, comm.size, 0)
    return report, version


def go_on(world: Ranks, manager: CheckpointManager, comm: Communicator) -> None:
    """Restore the latest step, if there is one."""
    if manager.latest_step() is not None:
        restore(world, manager, comm)


def begin(world: Ranks, *steps: int, size: int = 1, **options: Any) -> None:
    """Have a run save some steps, and keep them."""

    def work(comm: Communicator) -> str:
        with manager_of(comm, **options) as manager:
            go_on(world, manager, comm)
            for step in steps:
                save(world, manager, comm, step, metrics={"loss": float(10 - step)})
        return SAVED

    assert world.job(work, size) == [SAVED] * size


def path_of(step: int) -> str:
    return f"{ROOT}/step_{step:08d}"


def in_root(world: Ranks) -> list[str]:
    """What there is directly in the root."""
    return sorted(
        name.removeprefix("run/") for name in tree_of(world.shared) if name.startswith("run/") and name.count("/") == 1
    )


def expected(*steps: int) -> list[str]:
    names = (f"step_{step:08d}" for step in steps)
    return sorted(f"{name}{end}" for name in names for end in ("", ".html", ".report.json"))


def assert_whole(world: Ranks) -> list[int]:
    """All steps that there are can be read, and have the values of one save; return them."""

    def look() -> list[int]:
        comm = SoloCommunicator()
        with manager_of(comm) as manager:
            steps = manager.all_steps()
            assert [(info.step, info.complete) for info in manager.checkpoints()] == [(step, True) for step in steps]
            for step in steps:
                report, version = restore(world, manager, comm, step, verify="full")
                assert (report.step, version % 100) == (step, step)
            return steps

    return list(world.alone(look, "reader"))


class Sweep:
    """A save, after which two steps go, again and again, each time struck at another of its calls."""

    def __init__(self, size: int = 1, is_async: bool = False) -> None:
        self.size, self.is_async = size, is_async
        self.ends: set[tuple[tuple[int, ...], str]] = set()

    def work(self, world: Ranks, comm: Communicator, step: int) -> str:
        writer: Any = BackgroundWriter(timeout=30.0) if self.is_async else False
        try:
            with manager_of(comm, keep=KeepLatest(2), async_save=writer, **KEEPS) as manager:
                restore(world, manager, comm)
                save(world, manager, comm, step)
        finally:
            if writer:
                writer.close()
        return SAVED

    def run(self, who: str, at: int | None, strike: Strike | None, seed: int) -> Ranks:
        world, where = Ranks(seed), (who, at)
        with world:
            begin(world, 1, 2, 3, size=self.size, **KEEPS)
            world.arm(who, at, strike)
            said = world.job(lambda comm: self.work(world, comm, 4), self.size)
            world.disarm()
            steps = assert_whole(world)
            texts = [str(each) for each in said if isinstance(each, CheckpointError)]
            assert set(steps) >= {3} and steps[-1] in (3, 4), where
            # Nothing goes before the new one is there; of what was there, what is not kept goes meanwhile, or for room.
            goes = self.is_async or any(os.strerror(errno.ENOSPC) in text for text in texts)
            assert 4 in steps or steps == [1, 2, 3] or (goes and steps == [2, 3]), where
            assert all(ROOT in text or "make a CheckpointManager: rank" in text for text in texts), (where, texts)
            is_complete = [text for text in texts if " is complete, but" in text or "are complete, but" in text]
            if SAVED in said or is_complete:
                assert 4 in steps, (where, said)
            if SAVED in said:
                assert not self.is_async or steps == [3, 4], where
            known = [text for text in texts if text not in is_complete and "step 4 is on its way, but" not in text]
            failed = [text for text in known if not is_unknown(text)]
            if failed and DEAD not in said:
                assert 4 not in steps, (where, said)
            self.ends.add((tuple(steps), SAVED if SAVED in said else "failed" if texts else "dead"))
            # The next save goes well; what should have gone is gone, and nothing else is there.
            assert world.job(lambda comm: self.work(world, comm, 5), self.size) == [SAVED] * self.size, where
            assert assert_whole(world) == ([4, 5] if 4 in steps else [3, 5]), where
            left = set(in_root(world)) ^ set(expected(*([4, 5] if 4 in steps else [3, 5])))
            # A page or report that could not be written, of a step that is there, is not written later.
            assert left <= {f"step_00000004{end}" for end in (".html", ".report.json")}, (where, left)
        return world

    def some(self, who: str, strike: Strike, part: int | None, seed: int) -> set[tuple[tuple[int, ...], str]]:
        """Strike at some of the calls, or at all; return how they ended."""
        count = len(self.run(who, None, strike, 0).calls)
        self.ends = set()
        for at in range(count) if part is None else some_of(count, part, seed):
            self.run(who, at, strike, at)
        return self.ends


STRIKES: dict[str, tuple[str, Strike]] = {
    "a call fails": ("rank 0", fail),
    "the disk is full": ("rank 0", fail_with(errno.ENOSPC)),
    "the coordinator is killed": ("rank 0", kill),
    "power is lost": ("rank 0", lose_power),
    "the coordinator is stopped": ("rank 0", stop(300.0)),
    "a call of another fails": ("rank 1", fail),
    "another is killed": ("rank 1", kill),
}
SWEEPS: dict[str, Callable[[], Sweep]] = {
    "one rank": Sweep,
    "two ranks": lambda: Sweep(2),
    "in the background": lambda: Sweep(2, is_async=True),
}
EACH = [(kind, name) for kind in SWEEPS for name in STRIKES if kind != "one rank" or "other" not in name]
# Steps that may be there, and what the ranks may have said.
ENDS = {
    *((steps, said) for steps in ((1, 2, 3), (2, 3)) for said in ("failed", "dead")),
    *((steps, said) for steps in ((1, 2, 3, 4), (2, 3, 4), (3, 4)) for said in (SAVED, "failed", "dead")),
    *((steps, "failed") for steps in ((1, 3, 4),)),
}


@pytest.mark.parametrize(("kind", "name"), EACH)
def test_a_save_and_its_removals_struck_at_some_of_their_calls(kind, name):
    assert SWEEPS[kind]().some(*STRIKES[name], 1, EACH.index((kind, name))) <= ENDS


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), EACH)
def test_a_save_and_its_removals_struck_at_many_of_their_calls(kind, name):
    assert SWEEPS[kind]().some(*STRIKES[name], 40, 1000) <= ENDS


@pytest.mark.parametrize("is_async", [False, True])
def test_a_step_that_is_not_durable_may_be_saved_again(is_async):
    """Its checkpoint is there, and the error says to save again: that needs no permission to overwrite."""

    def work(world: Ranks, comm: Communicator) -> str:
        with manager_of(comm, async_save=is_async) as manager:
            try:
                save(world, manager, comm, 1)
                manager.wait()
            except NotDurableError:
                save(world, manager, comm, 1)
                manager.wait()
                return "again"
        return SAVED

    said, calls = set(), 1000
    for at in range(1000):
        world = Ranks()
        world.shared.is_shared = False  # a disk of one node's own: there names have to be made durable
        with world:
            world.arm("rank 0's writer" if is_async else "rank 0", at, fail)
            (outcome,) = world.job(lambda comm, world=world: work(world, comm), 1)
            said.add(str(outcome))
            calls = len(world.calls)
            world.disarm()
            assert outcome not in (SAVED, "again") or assert_whole(world) == [1]
        if "again" in said or at >= calls:
            break
    assert "again" in said, said


# -- two processes -----------------------------------------------------------------------------------------------------


def saves_and_removes(world: Ranks) -> Any:
    comm = SoloCommunicator()
    with manager_of(comm, keep=KeepLatest(1)) as manager:
        restore(world, manager, comm)
        save(world, manager, comm, 4)
    return SAVED


def saves_again(world: Ranks) -> Any:
    comm = SoloCommunicator()
    with manager_of(comm) as manager:
        restore(world, manager, comm, 3)
        save(world, manager, comm, 3, version=103, overwrite=True, metrics={"loss": 7.0})
    return SAVED


def restores(world: Ranks) -> Any:
    comm = SoloCommunicator()
    with manager_of(comm, keep=KeepBest(1)) as manager:
        report, version = restore(world, manager, comm, fallback=True)
        assert version % 100 == report.step
        return report.step


def looks(world: Ranks) -> Any:
    comm = SoloCommunicator()
    with manager_of(comm, keep=KeepBest(1)) as manager:
        found = manager.checkpoints()
        assert all(info.complete for info in found), found
        best = manager.best_step()
        return best if best is not None else 0


def restores_the_best(world: Ranks) -> Any:
    comm = SoloCommunicator()
    with manager_of(comm, keep=KeepBest(1)) as manager:
        report, version = restore(world, manager, comm, "best")
        assert version % 100 == report.step
        return report.step


WORKS = {work.__name__: work for work in (saves_and_removes, saves_again, restores, looks, restores_the_best)}
# What may be refused, and how: the other is saving there, or has removed or replaced what was asked for.
REFUSALS = (
    "another save",
    "is the root of a run that goes on",
    "has steps of another start, which this one has not restored",
    "has been removed meanwhile",
    # It was empty, as it had just been made.
    "is another directory than when the save began",
    "No such file or directory: '/shared/run/step_00000004'",
    "has replaced the checkpoint meanwhile",
    "there is a checkpoint of step 4",
    "which overwrite=False keeps",
    "there is no complete checkpoint",
    "has what KeepBest(count=1, metric='loss', mode='min') asks for",
    "there is no complete checkpoint of step 3",
)
MEET = [(one, other) for one in WORKS for other in ("saves_and_removes", "saves_again")]


def meet(one: str, other: str, part: int, seed: int, where: str = "") -> set[str]:
    """Let a process do all of its work at some calls of another's, of those on a path; return what was refused."""
    refused: set[str] = set()

    def run(at: int | None) -> list[int]:
        world = Ranks(seed)
        with world:
            begin(world, 1, 2, 3)
            before = [*world.scheduler.processes]

            def strike(world: Ranks) -> float:
                world._process("other", 0).start(lambda: attempt(other))
                return 600.0

            def attempt(name: str) -> None:
                try:
                    WORKS[name](world)
                except CheckpointError as error:
                    known = [text for text in REFUSALS if text in str(error)]
                    assert known, (one, other, at, error)
                    refused.add(known[0])

            world.arm("rank 0", at, strike)
            world._process("rank 0", 0).start(lambda: attempt(one))
            world.finish()
            world.disarm()
            assert len(world.scheduler.processes) == len(before) + 1 + (at is not None)
            assert_whole(world)

            def last() -> list[int]:
                comm = SoloCommunicator()
                with manager_of(comm, keep=KeepLatest(1)) as manager:
                    restore(world, manager, comm)
                    save(world, manager, comm, 5)
                    return manager.all_steps()

            assert world.alone(last) == [5]
            assert in_root(world) == ["step_00000005"]
            return [number for number, call in enumerate(world.calls) if where in call[2]]

    places = run(None)
    for number in some_of(len(places), part, seed):
        run(places[number])
    return refused


@pytest.mark.parametrize(("one", "other"), MEET)
def test_another_process_at_some_calls(one, other):
    meet(one, other, 2, MEET.index((one, other)))


@pytest.mark.slow
@pytest.mark.parametrize(("one", "other"), MEET)
def test_another_process_at_many_calls(one, other):
    meet(one, other, 40, 1000)


def test_a_step_that_is_removed_while_metrics_are_read_is_not_called_damaged():
    assert meet("looks", "saves_and_removes", 12, 0, path_of(2)) == set()


@pytest.mark.parametrize("times", [2, 1000])
def test_a_directory_that_others_remove_while_it_is_made(times):
    """As another job's retention does with one that is empty."""
    world, left = Ranks(), [times]
    with world:
        begin(world, 1)
        called = world.system.on_call

        def on_call(kind: str, where: str) -> float:
            process = world.scheduler.process
            if process.name == "rank 0" and (kind, where) == ("fsync", ROOT) and left[0]:
                left[0] -= 1
                if "step_00000002" in in_root(world):
                    world._process("other", 0).start(lambda: world.os.rmdir(path_of(2)))
                    return 60.0
            return float(called(kind, where) or 0.0)

        world.system.on_call = on_call

        def work(comm: Communicator) -> Any:
            with manager_of(comm) as manager:
                restore(world, manager, comm)
                save(world, manager, comm, 2)
            return SAVED

        (said,) = world.job(work, 1)
        if times == 2:
            assert said == SAVED
            assert assert_whole(world) == [1, 2]
        else:
            assert "step_00000002 is not a directory, so nothing can be saved there" in str(said)
            assert in_root(world) == ["step_00000001"]


# -- what cannot be read, or understood --------------------------------------------------------------------------------


def refuse(world: Ranks, part: str, number: int = errno.EIO) -> Callable[[], None]:
    """Have all calls on some paths fail until the returned function is called."""
    called = world.system.on_call

    def on_call(kind: str, where: str) -> float:
        if part in f"{where}/" and kind not in ("close", "realpath"):
            raise OSError(number, "Input/output error")
        return float(called(kind, where) or 0.0)

    world.system.on_call = on_call

    def end() -> None:
        world.system.on_call = called

    return end


@pytest.mark.parametrize("part", ["step_00000003/", "step_00000003/0.manifest", "step_00000003/0_0"])
def test_a_step_that_cannot_be_read_is_passed_over_and_kept(part):
    world = Ranks()
    with world:
        begin(world, 1, 2, 3)
        end = refuse(world, part)

        def work(comm: Communicator) -> dict[int, str]:
            with manager_of(comm, keep=[KeepBest(1), KeepLatest(1)]) as manager:
                assert manager.all_steps() == [1, 2, 3]
                assert [info.complete for info in manager.checkpoints()] == [True, True, False]
                with pytest.raises(UnreadableCheckpointError, match="Input/output error"):
                    restore(world, manager, comm)
                report, version = restore(world, manager, comm, fallback=True)
                assert (report.step, version) == (2, 2)
                assert report.as_dict()["skipped"] == {"3": report.skipped[3]}
                assert report.summary().endswith("damaged or unreadable and skipped: step 3")
                with pytest.raises(CorruptCheckpointError, match="cannot be told, as some are damaged: step 3: cannot"):
                    manager.best_step()
                with pytest.raises(CorruptCheckpointError, match="cannot be told"):
                    restore(world, manager, comm, "best")
                assert restore(world, manager, comm, "best", fallback=True)[1] == 2
                with pytest.raises(CheckpointError, match="step 4 is complete, but .* step 3 cannot be read"):
                    save(world, manager, comm, 4, metrics={"loss": 1.0})
                assert manager.all_steps() == [3, 4], "the others went"
                return report.skipped

        (skipped,) = world.job(work, 1)
        assert "Input/output error" in skipped[3]
        end()
        assert assert_whole(world) == [3, 4]


def test_all_steps_are_damaged():
    world = Ranks()
    with world:
        begin(world, 1, 2)
        for step in (1, 2):
            fill(world.shared, {f"run/step_{step:08d}/0.manifest": b"rubbish"})

        def work(comm: Communicator) -> None:
            with manager_of(comm, keep=KeepLatest(1)) as manager:
                with pytest.raises(
                    CorruptCheckpointError, match="all that could be restored is damaged .*step 2: .*step 1"
                ):
                    restore(world, manager, comm, fallback=True, strict=False)
                with pytest.raises(ValidationError, match="there is a checkpoint of step 2"):
                    save(world, manager, comm, 2)
                save(world, manager, comm, 2, overwrite=True)
                assert restore(world, manager, comm, strict=False)[1] == 2
                save(world, manager, comm, 3)
                assert manager.all_steps() == [1, 3], "what is damaged is left alone"

        assert world.job(work) == [None, None]


def test_a_fallback_that_lacks_a_tensor_is_none():
    """What a damaged checkpoint has left in a target must not stay there."""
    world = Ranks()
    with world:
        begin(world, 1)

        def work(comm: Communicator) -> None:
            with manager_of(comm) as manager:
                restore(world, manager, comm)
                state = {**world.state(version=2), "more": np.ones(3)}
                manager.save(2, state=state, rng=False)
                tree = tree_of(world.shared)
                (path,) = (name for name in tree if "00000002/0_0-" in name)
                data = bytearray(tree[path])
                data[data.index(np.ones(3).tobytes()) + 7] ^= 1
                fill(world.shared, {path: bytes(data)})
                target = {**world.state(), "more": np.zeros(3)}
                for strict in (False, "unexpected", True):
                    with pytest.raises(ValidationError, match="more"):
                        manager.restore(state=target, rng=False, fallback=True, strict=strict, verify="full")

        assert world.job(work, 1) == [None]


def test_names_that_lead_astray():
    world = Ranks()
    with world:
        begin(world, 1, 2, 3)
        tree = tree_of(world.shared)
        moved = {name.replace("00003", "00007"): data for name, data in tree.items() if "00003" in name}
        fill(world.shared, {**moved, "run/step_4": None, "run/notes": b"mine"})

        def work(comm: Communicator) -> None:
            with manager_of(comm, keep=[KeepEvery(2), KeepInterval(1e6)]) as manager:
                with pytest.raises(ValidationError, match="is of step 3: the directory has been renamed"):
                    restore(world, manager, comm)
                with pytest.raises(
                    ValidationError, match=r"no complete checkpoint of step 5 .*; there are \[1, 2, 3, 7\]"
                ):
                    restore(world, manager, comm, 5)
                with pytest.raises(
                    ValidationError, match='step has to be an integer >= 0, "latest" or "best"; got \'3\''
                ):
                    restore(world, manager, comm, "3")
                with pytest.raises(ValidationError, match="Remedy .FC903.: restore the step that best_step"):
                    manager.best_step()
                restore(world, manager, comm, 2)
                save(world, manager, comm, 8)
                # The first by time is kept, multiples, the last; of what is not what its name says nobody knows.
                assert manager.all_steps() == [1, 2, 7, 8]

        assert world.job(work, 1) == [None]
        assert tree_of(world.shared)["run/notes"] == b"mine"
        assert "run/step_4" in tree_of(world.shared)


@pytest.mark.parametrize("content", [b"rubbish", b"{}", b'{"files": ["../notes"]}', b'{"files": [3]}'])
def test_a_note_of_a_removal_that_cannot_be_understood_removes_nothing(content, caplog):
    world = Ranks()
    with world:
        begin(world, 1, 2)
        name = "run/step_00000001"
        world.alone(lambda: world.os.unlink(f"/shared/{name}/0.manifest"))
        fill(world.shared, {f"{name}.removing": content, "run/notes": b"mine"})
        before = {path: data for path, data in tree_of(world.shared).items() if path.startswith((name, "run/notes"))}
        begin(world, 3)
        after = tree_of(world.shared)
        assert {path: after.get(path) for path in before} == before
        assert "cannot be understood, and is left alone" in caplog.text
        # One that can be is carried through.
        files = [data_file(path.rpartition("/")[2] for path in before)]
        fill(world.shared, {f"{name}.removing": json.dumps({"files": files}).encode()})
        begin(world, 4)
        assert in_root(world) == ["notes", "step_00000002", "step_00000003", "step_00000004"]


def test_what_others_left_in_the_root():
    """Directories without a checkpoint, what dead saves left there, and files on their way."""
    world = Ranks()
    with world:
        begin(world, 1)
        token = "0123456789abcdef" * 2
        fill(
            world.shared,
            {
                "run/step_00000007": None,
                "run/step_00000008/notes": b"mine",
                f"run/step_00000009/{PADDLE_METADATA}": dict(tree_of(world.shared))[
                    f"run/step_00000001/{PADDLE_METADATA}"
                ],
                f"run/step_00000001.html.{token}.tmp": b"half a page",
            },
        )

        def dead(world: Ranks) -> None:
            save_state_dict(world.state(version=6), path_of(6), SoloCommunicator(), unique_id=0)

        world.arm("dead", 40, kill)
        process = world._process("dead", 0)
        process.start(lambda: dead(world))
        world.finish()
        world.disarm()
        assert process.status == -9 and "step_00000006" in in_root(world)
        begin(world, 2)
        assert in_root(world) == ["step_00000001", "step_00000002", "step_00000008"]
        assert world.names(path_of(8)) == ["notes"]


def test_a_full_disk_says_what_can_be_done():
    world = Ranks()
    with world:
        begin(world, 1, 2)
        before = world.names()

        def work(comm: Communicator) -> None:
            with manager_of(comm, keep=KeepLatest(2)) as manager:
                restore(world, manager, comm)
                world.shared.capacity = world.shared.used + 500
                with pytest.raises(CheckpointError, match=r"No space left .*Remedy .FC402.: make room; or, if more"):
                    save(world, manager, comm, 3)
                comm.all_gather(b"")
                world.shared.capacity = None
                comm.all_gather(b"")
                assert [name for name in world.names() if name != OWNER] == before
                save(world, manager, comm, 3)
                assert manager.all_steps() == [2, 3]

        assert world.job(work) == [None, None]
        assert assert_whole(world) == [2, 3]


# -- arguments ---------------------------------------------------------------------------------------------------------

WRONG = [
    ({"keep": "latest"}, "keep has to be a KeepPolicy or several; got 'latest'"),
    ({"save_when": [SaveEvery(1), 3]}, "save_when has to be a SavePolicy or several; got 3"),
    ({"async_save": "yes"}, "async_save has to be a bool or a BackgroundWriter; got 'yes'"),
    ({"pages": 1}, "pages is True or False; got 1"),
    ({"reports": "all"}, "reports is True or False; got 'all'"),
    ({"slice_bytes": 5, "async_save": True}, "slice_bytes="),
    ({"preemption_signals": (signal.SIGTERM, signal.SIGKILL)}, "cannot be handled"),
    ({"state": {"w": object()}}, "w"),
    ({"optimizer": object(), "state": {}}, "an optimizer's state is named after the model's parameters"),
    ({"model": object()}, "model= has no sharded_state_dict(); got a object"),
]


@pytest.mark.parametrize(("wrong", "said"), WRONG)
def test_an_argument_of_one_rank_that_is_wrong_is_an_error_of_all(wrong, said):
    world = Ranks()
    with world:
        begin(world, 1, size=2)
        before = tree_of(world.shared)

        def work(comm: Communicator) -> None:
            handlers = {signal.SIGTERM: signal.SIG_DFL, **world.scheduler.process.handlers}
            right = {"state": world.state(comm.rank, comm.size)} if "state" in wrong else {}
            if "optimizer" in wrong or "model" in wrong:
                right = wrong
            try:
                manager_of(comm, **(wrong if comm.rank == 1 else right))
            finally:
                after = world.scheduler.process.handlers
                assert {number: after.get(number) or signal.SIG_DFL for number in handlers} == handlers

        texts = {str(each) for each in world.job(work)}
        assert len(texts) == 1
        text = texts.pop()
        assert said in text
        assert text.startswith(
            ("cannot make a CheckpointManager: [rank 1] ", "cannot save: [rank 1] ", "cannot save: [ranks 0-1] ")
        )
        assert tree_of(world.shared) == before


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: KeepLatest(0), "KeepLatest: count has to be an integer >= 1; got 0"),
        (lambda: KeepEvery(True), "KeepEvery: steps has to be an integer >= 1; got True"),
        (lambda: SaveInterval(-1.0), "SaveInterval: seconds has to be a positive number; got -1.0"),
        (lambda: KeepBest(1, mode="most"), "KeepBest: mode has to be 'min' or 'max'; got 'most'"),  # type: ignore[arg-type]
    ],
)
def test_a_policy_that_makes_no_sense_on_one_rank(make, said):
    """It fails before its rank calls the manager: the others learn that it has gone, and nothing was written."""
    world = Ranks()
    with world:

        def work(comm: Communicator) -> None:
            manager_of(comm, keep=make() if comm.rank == 1 else ())

        told = world.job(work)
        assert said in str(told[1])
        assert isinstance(told[0], CheckpointError)
        assert "rank 1 is lost" in str(told[0])
        assert in_root(world) == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"metrics": 3}, "metrics has to be a dict of names to numbers; got a int"),
        ({"metrics": {"loss": "low"}}, "metrics: 'loss' has the value 'low'"),
        ({"metrics": {"loss": 2.0}}, "metrics: 'loss' differs between ranks (rank 0: 1.0; rank 1: 2.0)"),
        ({"extra": [1]}, "extra has to be a dict of portable values; got a list"),
        ({"extra": {"step": 1}}, "extra: 'step' is not a free name"),
        ({"overwrite": True}, "overwrite"),
        ({"step": -1}, "step has to be an integer >= 0; got -1"),
        ({"state": None}, "there is nothing to do: give model=, state=, or both"),
    ],
)
def test_what_one_rank_cannot_save_nobody_saves(wrong, said):
    world = Ranks()
    with world:
        begin(world, 1, size=2)
        before = tree_of(world.shared)

        def work(comm: Communicator) -> Any:
            with manager_of(comm, keep=KeepLatest(1)) as manager:
                restore(world, manager, comm)
                state = world.state(comm.rank, comm.size, 2)
                options = {"step": 2, "state": state, "rng": False, "metrics": {"loss": 1.0}}
                try:
                    manager.save(**{**options, **(wrong if comm.rank == 1 else {})})
                except ValidationError as error:
                    found = tree_of(world.shared)
                    assert {name: found[name] for name in found if not name.endswith(OWNER)} == before
                    comm.all_gather(b"")
                    manager.save(**{**options, "extra": {"tokens": 17}})
                    report, version = restore(world, manager, comm)
                    assert (version, report.extra.values["tokens"] if hasattr(report.extra, "values") else 17) == (
                        2,
                        17,
                    )
                    return str(error)

        texts = set(world.job(work))
        assert len(texts) == 1
        text = texts.pop()
        assert said in text
        assert ROOT in text
        assert assert_whole(world) == [2]


# -- models, optimizers, slices ----------------------------------------------------------------------------------------


@pytest.fixture
def as_it_was():
    yield
    uninstall()


def trained(seed: int, steps: int) -> tuple[Any, Any, Any]:
    paddle.seed(seed)
    model = paddle.nn.Linear(40, 30)
    schedule = paddle.optimizer.lr.StepDecay(0.1, 2)
    optimizer = paddle.optimizer.AdamW(schedule, parameters=model.parameters())
    for number in range(steps):
        train(model, optimizer, number)
        schedule.step()
    return model, optimizer, schedule


def train(model: Any, optimizer: Any, number: int) -> None:
    (model(paddle.full([2, 40], 1.0 + number)) ** 2).mean().backward()
    optimizer.step()
    optimizer.clear_grad()


def weights(model: Any) -> bytes:
    return b"".join(each.numpy().tobytes() for each in model.parameters())


def test_a_model_is_saved_in_slices_while_it_trains(as_it_was):
    """What is restored is what there was at the call, not what the steps since have made of it."""
    world = Ranks()
    with world:

        def work(comm: Communicator) -> None:
            model, optimizer, schedule = trained(3, 2)
            given = {"model": model, "optimizer": optimizer, "lr_scheduler": schedule}
            plain = {**given, "rng": False}
            with BackgroundWriter(max_pending=2, timeout=30.0) as writer:
                options = {"async_save": writer, "slice_bytes": 4096, "keep": KeepLatest(1), **KEEPS}
                with manager_of(comm, **options, **given) as manager:
                    assert not manager.stage_next()
                    then = weights(model)
                    manager.save(1, **plain, extra={"tokens": 17})
                    assert manager.stage_next()
                    train(model, optimizer, 5)  # the optimizer stages what is left first
                    assert not manager.stage_next()
                    assert weights(model) != then
                    manager.wait()
                    report = manager.restore(**plain)
                    assert report.step == 1 and weights(model) == then and schedule.last_epoch == 2
                    # One that nobody stages is staged by the next call.
                    manager.save(2, **plain)
                    assert manager.restore(**plain).step == 2
                    with pytest.raises(ValidationError, match="state= has a name of the model's"):
                        manager.save(3, **plain, state={"weight": np.zeros(2)})
                    # A change without the optimizer is an error, of the next call.
                    manager.save(3, **plain)
                    model.weight.set_value(model.weight + 1)
                    with pytest.raises(CheckpointError, match="an earlier save failed: .* changed while"):
                        manager.wait()
                    assert manager.all_steps() == [2]

        assert world.job(work) == [None, None]
        assert in_root(world) == expected(2)


def test_failures_of_saves_in_the_background_are_told_together():
    world = Ranks()
    with world:
        begin(world, 1, size=2)

        def work(comm: Communicator) -> str:
            with BackgroundWriter(max_pending=3, timeout=30.0) as writer:
                manager = manager_of(comm, async_save=writer, keep=KeepLatest(1), **KEEPS)
                restore(world, manager, comm)
                handles = []
                for step in (2, 3, 4):
                    handles.append(save(world, manager, comm, step))
                    if step == 3:
                        for process in world.scheduler.processes:
                            if process.parent is world.scheduler.process and comm.rank == 1:
                                process.kill()
                        comm.all_gather(b"")
                with pytest.raises(CheckpointError) as caught:
                    manager.close()
                failed = [handle for handle in handles if handle.error is not None]
                assert all(handle.seen for handle in failed)
                assert all(str(handle.error)[:50] in str(caught.value) for handle in failed)
                manager.close()
                with pytest.raises(
                    ValidationError, match="this manager has been closed. Remedy .FC102.: make another one"
                ):
                    manager.all_steps()
                return str(caught.value)

        texts = set(world.job(work))
        assert len(texts) == 1
        text = texts.pop()
        gone = "[rank 1] its processes have ended before it had done its share of the save"
        assert text.count(gone) == 2 and "step_00000002" in text and "step_00000003" in text
        assert assert_whole(world) == [1, 4]


# -- signals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", ["default", "a function", "ignored"])
def test_a_signal_has_all_ranks_save_and_stop(before):
    world, called = Ranks(), []
    with world:
        processes: list[Any] = []

        def work(comm: Communicator) -> tuple[list[int], int]:
            handler = {"default": signal.SIG_DFL, "a function": lambda *_: called.append(comm.rank)}.get(
                before, signal.SIG_IGN
            )
            process = world.scheduler.process
            process.handlers[signal.SIGTERM] = handler
            if comm.rank == 1:
                processes.append(process)
            asked = []
            with manager_of(comm, save_when=SaveInterval(1e6), preemption_signals=(signal.SIGTERM,)) as manager:
                for step in range(1, 10):
                    world.scheduler.sleep(10.0)
                    if manager.should_save(step):
                        save(world, manager, comm, step)
                        asked.append(step)
                    if manager.should_stop:
                        break
                assert not manager.should_save(step), "it is saved"
                assert not manager.should_save(step + 1), "nothing more, once it is"
                assert manager.preempted == (comm.rank == 1)
            # After a preemption the default action stays off: a launcher sends the signal several times.
            assert (process.handlers[signal.SIGTERM] == handler) == (before != "default")
            return asked, step

        world.scheduler.after(34.0, lambda: processes[0].signal(signal.SIGTERM))
        assert world.job(work) == [([4], 4)] * 2
        assert assert_whole(world) == [4]
        assert called == ([1] if before == "a function" else [])


def test_managers_that_are_closed_in_another_order():
    """The handler of the one that was closed first does what the one before it did."""
    world, called = Ranks(), []
    with world:

        def work(comm: Communicator) -> None:
            process = world.scheduler.process
            for before, ends in ((lambda *_: called.append(1), False), (signal.SIG_IGN, False), (signal.SIG_DFL, True)):
                process.handlers[signal.SIGTERM] = before
                one, other = (manager_of(comm, preemption_signals=(signal.SIGTERM,)) for _ in range(2))
                one.close()
                process.signal(signal.SIGTERM)
                world.scheduler.sleep(1.0)
                assert (one.preempted, other.preempted) == (False, True)
                other.close()
                assert process.handlers[signal.SIGTERM] == before
                process.signal(signal.SIGTERM)
                world.scheduler.sleep(1.0)
                assert not ends, "the default ends the process"

        assert world.job(work, 1) == [DEAD]
        assert called == [1, 1]
        assert world.scheduler.processes[-1].status == -signal.SIGTERM


def test_a_manager_in_another_thread():
    world, said = Ranks(), []
    with world:

        def work() -> None:
            comm, process = SoloCommunicator(), world.scheduler.process
            first = manager_of(comm, preemption_signals=(signal.SIGTERM,))

            def other() -> None:
                with pytest.raises(ValidationError, match="signal handlers can be installed in the main thread only"):
                    manager_of(comm, preemption_signals=(signal.SIGTERM,))
                with manager_of(comm) as manager:
                    save(world, manager, comm, 1)
                first.close()  # its handler stays
                said.append(process.handlers[signal.SIGTERM])

            world.scheduler.join(world.scheduler.spawn(process, other))
            assert said == [first._signals._handle]
            with pytest.raises(ZeroDivisionError), manager_of(comm, preemption_signals=(signal.SIGTERM,)) as manager:
                raise ZeroDivisionError
            # What ends in the main thread takes back what had to stay.
            assert process.handlers[signal.SIGTERM] == signal.SIG_DFL
            with pytest.raises(ValidationError, match="has been closed"):
                manager.should_save(1)

        world.alone(work)
        assert assert_whole(world) == [1]

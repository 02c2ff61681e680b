"""Asynchronous saves in the simulated world, in which something strikes at each of their calls in turn."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("paddle")
pytest.importorskip("greenlet")

from paddle_flexckpt.background import process as process_module
from paddle_flexckpt.background.worker import lower_priority
from paddle_flexckpt.background.writer import BackgroundWriter
from paddle_flexckpt.catalog import CheckpointError, ValidationError
from paddle_flexckpt.foreign.paddle_files import PADDLE_METADATA
from paddle_flexckpt.ranks.communicator import Communicator, SoloCommunicator
from paddle_flexckpt.saving import background_saves
from paddle_flexckpt.saving.saver import save_state_dict
from tests.saved import short
from tests.simulated import training
from tests.simulated.network import End
from tests.simulated.tasks import Process
from tests.simulated.trees import fill, tree_of
from tests.simulation.ranks import (
    ROOT,
    Ranks,
    Strike,
    fail,
    fail_with,
    fill_the_disk,
    is_unknown,
    kill,
    kill_writer,
    some_of,
    stop,
)

# How long the ranks' writers wait for each other, and for how long one is stopped.
TIMEOUT, LONG = 30.0, 300.0
SAVED = "saved"
# How a save may end: the version that is there then, and what its ranks have said.
ENDS = {(1, "failed"), (2, SAVED), (1, "unknown"), (2, "unknown"), (1, "dead"), (2, "dead")}


def save(world: Ranks, comm: Communicator, version: int, **options: Any) -> str:
    save_state_dict(world.state(comm.rank, comm.size, version), ROOT, comm, unique_id=0, **options)
    return SAVED


def save_in_background(world: Ranks, comm: Communicator, version: int, **options: Any) -> str:
    """Save, and wait; the writer ends with it."""
    with BackgroundWriter(timeout=TIMEOUT) as writer:
        state = world.state(comm.rank, comm.size, version)
        handle = save_state_dict(state, ROOT, comm, unique_id=0, async_save=writer, **options)
        handle.result()
    return SAVED


def save_in_slices(world: Ranks, comm: Communicator, version: int) -> str:
    with BackgroundWriter(timeout=TIMEOUT) as writer:
        state = world.state(comm.rank, comm.size, version)
        handle = save_state_dict(state, ROOT, comm, unique_id=0, async_save=writer, slice_bytes=4096)
        while handle.stage_next():
            world.scheduler.sleep(1.0)
        handle.finish_staging().result()
    return SAVED


def complete(size: int) -> list[str]:
    """The files of a checkpoint."""
    return sorted(["0.manifest", PADDLE_METADATA, *(f"{rank}_0.safetensors" for rank in range(size))])


def plain(names: list[str]) -> list[str]:
    """Names without the tokens of saves."""
    return sorted(re.sub(r"-\d+\.", ".", short(name)) for name in names)


class Sweep:
    """One save over another, again and again, each time struck at another of its calls.

    Attributes:
        ends: What was there afterwards: the old version or the new, and what the ranks said.
    """

    def __init__(
        self,
        saves: Callable[..., str],
        size: int = 2,
        habits: tuple[str, ...] = (),
        power: bool = False,
        **options: Any,
    ) -> None:
        """Take what saves, by how many ranks, and whether the power goes once it is over."""
        self._saves, self._size, self._habits, self._options = saves, size, habits, options
        self._power = power
        self.ends: set[tuple[int, str]] = set()

    def count(self, who: str, strike: Strike) -> int:
        """How many calls there are to strike at."""
        return len(self.run(who, None, strike, 0).calls)

    def run(self, who: str, at: int | None, strike: Strike | None, seed: int) -> Ranks:
        world, size = Ranks(seed, habits=self._habits), self._size
        world.shared.is_shared = not self._power  # a disk of one node's own: names may be lost too
        with world:
            assert world.job(lambda comm: save(world, comm, 1), size) == [SAVED] * size
            world.arm(who, at, strike)
            said = world.job(lambda comm: self._saves(world, comm, 2, **self._options), size)
            world.disarm()
            world.shared.capacity = None
            if self._power:
                world.shared.lose_power(world.scheduler.random)
            self._check(world, said, seed, (who, at))
        return world

    def _check(self, world: Ranks, said: list[Any], seed: int, where: Any) -> None:
        found = world.version_at()
        errors = [str(each) for each in said if isinstance(each, CheckpointError)]
        failed = [text for text in errors if not is_unknown(text) and "is complete, but" not in text]
        assert found in (1, 2), where
        if SAVED in said:
            assert found == 2, (where, said)
        if failed:
            assert found == 1, (where, said)
        assert not (SAVED in said and failed), (where, said)
        # Each error says what was asked for, and where.
        assert all(ROOT in text for text in errors), (where, errors)
        kind = SAVED if SAVED in said else "failed" if failed else "unknown" if errors else "dead"
        self.ends.add((found, kind))
        # The next save goes well, and leaves nothing but its checkpoint.
        again = world.job(lambda comm: save_in_background(world, comm, 3), self._size)
        assert again == [SAVED] * self._size, where
        assert world.version_at() == 3, where
        assert plain(world.names()) == complete(self._size), where

    def some(self, who: str, strike: Strike, part: int | None, seed: int) -> set[tuple[int, str]]:
        """Strike at some of the calls, or at all; return how they ended."""
        count = self.count(who, strike)
        self.ends = set()
        for at in range(count) if part is None else some_of(count, part, seed):
            self.run(who, at, strike, at)
        return self.ends


STRIKES: dict[str, tuple[str, Strike]] = {
    "a call of a writer fails": ("writer", fail),
    "a call of a rank fails": ("rank 1", fail),
    "a call of the coordinator fails": ("rank 0", fail),
    "a writer is killed": ("writer", kill),
    "the coordinator's writer is killed": ("rank 0's writer", kill),
    "a rank is killed": ("rank 1", kill),
    "the coordinator is killed": ("rank 0", kill),
    "the writer of a rank dies meanwhile": ("rank 0", kill_writer),
    "a writer is stopped": ("writer", stop(LONG)),
    "a rank is stopped": ("rank 1", stop(LONG)),
    "the disk fills up": ("writer", fill_the_disk),
    "a quota": ("rank 1's writer", fail_with(errno.EDQUOT)),
}
SWEEPS: dict[str, Callable[[], Sweep]] = {
    "two ranks": lambda: Sweep(save_in_background),
    "one rank": lambda: Sweep(save_in_background, 1),
    "in slices": lambda: Sweep(save_in_slices),
    "in waves": lambda: Sweep(save_in_background, 1, ("large", "waves"), staging_bytes=4 << 20),
}
OF_SEVERAL = {"a call of a rank fails", "a rank is killed", "a rank is stopped", "a quota"}
EACH = [
    (kind, name)
    for kind in SWEEPS
    for name in STRIKES
    if kind not in ("one rank", "in waves") or name not in OF_SEVERAL
]


@pytest.mark.parametrize(("kind", "name"), EACH)
def test_a_save_that_is_struck_at_some_of_its_calls(kind, name):
    assert SWEEPS[kind]().some(*STRIKES[name], 1, EACH.index((kind, name))) <= ENDS


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), EACH)
def test_a_save_that_is_struck_at_each_of_its_calls(kind, name):
    ends = SWEEPS[kind]().some(*STRIKES[name], None, 0)
    assert ends <= ENDS
    # At the first calls nothing is saved yet; at the last ones all is.
    versions = {version for version, _ in ends}
    assert versions == ({1} if name == "a call of a rank fails" else versions)


LOSSES: dict[str, Callable[[], Sweep]] = {
    "in the background": lambda: Sweep(save_in_background, power=True),
    "in the background, one rank": lambda: Sweep(save_in_background, 1, power=True),
    "in the foreground": lambda: Sweep(save, power=True),
}


def lose_power_after(kind: str, fails: Callable[[str], bool], seeds: int) -> set[tuple[int, str]]:
    """Have calls of a save fail, one a run, and the power go once the save is over; return how the saves ended."""
    sweep, who = LOSSES[kind](), "rank 0's writer" if "background" in kind else "rank 0"
    for at, (_, call, _) in enumerate(sweep.run(who, None, fail, 0).calls):
        for seed in range(seeds) if fails(call) else ():
            sweep.run(who, at, fail, seed)
    return sweep.ends


@pytest.mark.parametrize("seeds", [4, pytest.param(6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", LOSSES)
def test_what_is_said_to_be_saved_outlives_a_failed_fsync_and_the_power(kind, seeds):
    ends = lose_power_after(kind, lambda call: call == "fsync", seeds)
    assert ends <= ENDS
    # The last fsync makes the commit durable: without it the new checkpoint may stay, or go.
    assert {(1, "unknown"), (2, "unknown")} <= ends or kind == "in the background"


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOSSES)
def test_what_is_said_to_be_saved_outlives_any_failed_call_and_the_power(kind):
    assert lose_power_after(kind, lambda call: True, 4) <= ENDS


def test_a_small_machine(monkeypatch):
    """There is no room for a copy of the state: the error says what to do, and that goes well."""
    monkeypatch.setitem(training.LARGE, "large", (90_003, 16))
    world = Ranks(habits=("large", "waves"))
    with world:
        world.job(lambda comm: save(world, comm, 1), 1)
        world.system.set_memory(world.nodes[0], 8 << 20)

        def work(comm: Communicator) -> bool:
            with BackgroundWriter(timeout=TIMEOUT) as writer:
                state = world.state(version=2)
                options = {"unique_id": 0, "async_save": writer}
                with pytest.raises(
                    CheckpointError, match=r"8.0 MiB are available. Remedy .FC505.: pass staging_bytes="
                ):
                    save_state_dict(state, ROOT, comm, **options)
                with pytest.raises(CheckpointError, match="8.0 MiB are available"):
                    writer.reserve(1 << 20)
                assert plain(world.names()) == complete(1), "nothing is left"
                assert (writer.pending, writer.staging_bytes) == (0, 0)
                report = save_state_dict(state, ROOT, comm, staging_bytes=4 << 20, **options).result()
                assert writer.staging_bytes < 8 << 20
                return report.bytes_written == sum(each.local_tensor.nbytes for each in state.values())

        assert world.job(work, 1) == [True]
        assert world.version_at() == 2


def test_memory_that_was_reserved_is_enough():
    world = Ranks()
    with world:

        def work(comm):
            with BackgroundWriter(max_pending=2, timeout=TIMEOUT) as writer:
                assert (writer.pid, writer.pending, writer.staging_bytes) == (None, 0, 0)
                writer.reserve(1 << 20)
                taken = writer.staging_bytes
                world.system.set_memory(world.nodes[0], 0)
                handles = [
                    save_state_dict(world.state(comm.rank, comm.size, version), ROOT, comm, async_save=writer)
                    for version in (1, 2)
                ]
                assert writer.wait(3600.0) and writer.pending == 0
                assert writer.staging_bytes == taken > 2 << 20
                return [handle.result().unique_id for handle in handles]

        assert world.job(work, 1) == [[0, 1]]
        assert [world.version_at(unique_id=number) for number in (0, 1)] == [1, 2]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_pending": 0}, "max_pending has to be an integer >= 1; got 0"),
        ({"nice": 20}, "nice has to be an integer from 0 to 19; got 20"),
        ({"io_class": "fast"}, "io_class has to be one of 'best-effort-low', 'idle', 'unchanged'; got 'fast'"),
        ({"timeout": -1.0}, "timeout has to be a number of seconds > 0; got -1.0"),
    ],
)
def test_a_writer_that_cannot_be_made_takes_nothing(wrong, said):
    world = Ranks()
    with world:

        def work(comm):
            process = world.scheduler.process
            before = [*process.exit_functions], [*process.kept], {*process.descriptors}
            with pytest.raises(ValidationError) as caught:
                BackgroundWriter(**wrong)
            assert before == ([*process.exit_functions], [*process.kept], {*process.descriptors})
            # Each is said, if there are several.
            with pytest.raises(ValidationError) as both:
                BackgroundWriter(**{"max_pending": 0, "timeout": -1.0, **wrong})
            assert all(each in str(both.value) for each in (said, "max_pending has", "timeout has"))
            return said in str(caught.value)

        assert world.job(work, 1) == [True]
        assert len(world.scheduler.processes) == 1


def test_a_writer_that_cannot_be_started(monkeypatch):
    world = Ranks()
    with world:
        world.job(lambda comm: save(world, comm, 1))
        before = world.names()

        def refuse(*arguments, **options):
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

        with monkeypatch.context() as patch:
            patch.setattr(process_module.subprocess, "Popen", refuse)

            def work(comm):
                with pytest.raises(CheckpointError, match="could not be started"):
                    save_in_background(world, comm, 2)
                taken = {*world.scheduler.process.descriptors}
                try:
                    save_in_background(world, comm, 2)
                finally:
                    assert {*world.scheduler.process.descriptors} == taken

            said = {str(each) for each in world.job(work)}
        assert len(said) == 1
        assert "the background writer could not be started: [Errno 11] Resource temporarily unavailable" in said.pop()
        assert world.names() == before and world.version_at() == 1
        assert world.job(lambda comm: save_in_background(world, comm, 2)) == [SAVED] * 2
        assert world.version_at() == 2


def writers_of(world: Ranks, process: Process) -> list[Process]:
    return [each for each in world.scheduler.processes if each.parent is process and each.alive]


def test_a_writer_that_dies_while_it_has_nothing_to_do_is_replaced(caplog):
    world = Ranks()
    with world:

        def work(comm):
            with BackgroundWriter(timeout=TIMEOUT) as writer:
                pids = []
                for version in (1, 2, 3):
                    state = world.state(comm.rank, comm.size, version)
                    save_state_dict(state, ROOT, comm, unique_id=0, async_save=writer).result()
                    pids.append(writer.pid)
                    if version == 1 or comm.rank == 1:
                        for each in writers_of(world, world.scheduler.process):
                            each.kill()
                    # It may not have been heard of yet.
                    world.scheduler.sleep(0.0 if version == 1 else 60.0)
                return len(set(pids))

        assert world.job(work) == [2, 3]
        assert world.version_at() == 3
    assert "was killed by signal 9 (Killed) while it had nothing to save; the next save starts another" in caplog.text


def test_a_failure_that_nobody_has_seen_is_raised_by_the_next_save_of_all_ranks():
    world = Ranks()
    with world:
        world.job(lambda comm: save(world, comm, 1))

        def work(comm):
            writer = BackgroundWriter(timeout=TIMEOUT)
            state = world.state(comm.rank, comm.size, 2)
            first = save_state_dict(state, ROOT, comm, unique_id=0, async_save=writer)
            if comm.rank == 1:
                for each in writers_of(world, world.scheduler.process):
                    each.kill()
            if comm.rank == 0:
                assert not first.done() and first.wait(3600.0)
            try:
                save(world, comm, 3)
            except CheckpointError as error:
                assert "the asynchronous save of id 0 to '/shared/run' failed" in str(error)
            else:
                raise RuntimeError("nobody was told")
            assert first.seen and isinstance(first.error, CheckpointError)
            found = save(world, comm, 3)
            writer.close()
            return found

        assert world.job(work) == [SAVED] * 2
        assert world.version_at() == 3


@pytest.mark.parametrize("what", ["a failure", "slices", "nothing"])
def test_what_is_lost_at_the_exit_is_told(what, capsys):
    world, made = Ranks(), []
    with world:

        def work() -> None:
            comm, state = SoloCommunicator(), world.state(version=1)
            options = {"slice_bytes": 4096} if what == "slices" else {}
            handle = save_state_dict(state, ROOT, comm, unique_id=0, async_save=True, **options)
            if what == "slices":
                made.append(handle)
                handle.stage_next()
            if what == "a failure":
                writers_of(world, world.scheduler.process)[0].kill()

        process = world._process("rank 0", 0)
        process.start(work)
        world.finish()
        told = capsys.readouterr().err
        if what == "nothing":
            assert (process.status, told) == (0, "") and world.version_at() == 1
        else:
            assert process.status == 1
            assert ("finish_staging() of its handle was not called" if what == "slices" else "signal 9") in told
            assert "0.manifest" not in world.names()
        world.job(lambda comm: save_in_background(world, comm, 2), 1)
        assert plain(world.names()) == complete(1)
        if what == "slices":  # or the collector would end it outside of its world
            world.alone(made[0]._leave_to_owner)


def test_another_process_cannot_use_a_writer_or_a_handle():
    """As after a fork, which has all that its parent has."""
    world, made = Ranks(), []
    with world:

        def parent() -> str:
            writer = BackgroundWriter(timeout=TIMEOUT)
            handle = save_state_dict(world.state(version=1), ROOT, SoloCommunicator(), unique_id=0, async_save=writer)
            made.extend([writer, handle])
            world.scheduler.sleep(100.0)
            writer.close()
            return str(handle.result().unique_id)

        def child() -> None:
            world.scheduler.sleep(50.0)
            writer, handle = made
            for use in (handle.done, handle.result, writer.wait, writer.close, lambda: writer.reserve(1)):
                with pytest.raises(CheckpointError, match=r"belongs to process \d+, of which this one is a fork"):
                    use()
            assert not writer.is_own
            writer._at_exit()  # which every exit of a fork calls, and which does nothing

        one, other = world._process("rank 0", 0), world._process("child", 0)
        task = one.start(parent)
        other.start(child)
        world.finish()
        assert (task.result, one.status, other.status) == ("0", 0, 0)
        assert world.version_at() == 1


@pytest.mark.parametrize("said", [bytes(8), (1 << 40).to_bytes(8, "little"), (2).to_bytes(8, "little") + b"{]"])
def test_a_writer_that_speaks_nonsense_is_ended(said):
    """Whatever it was, whoever waits for it is told, and the save is none."""
    world = Ranks()
    with world:
        world.job(lambda comm: save(world, comm, 1))

        def rave(world: Ranks) -> float:
            descriptors = world.scheduler.process.descriptors
            next(each for each in descriptors.values() if isinstance(each, End)).send(said)
            return 0.0

        world.arm("rank 1's writer", 3, rave)
        texts = {str(each) for each in world.job(lambda comm: save_in_background(world, comm, 2))}
        world.disarm()
        assert len(texts) == 1
        assert "[rank 1] its processes have ended before it had done its share of the save" in texts.pop()
        assert world.version_at() == 1
        assert world.job(lambda comm: save_in_background(world, comm, 3)) == [SAVED] * 2
        assert plain(world.names()) == complete(2)


REFUSALS = {
    "nothing": ("", 0, ""),
    "nice": ("", 0, "keeps its CPU priority: nice(10) was refused"),
    "once": ("autogroup", 1, ""),
    "for ever": ("autogroup", 1000, "session keeps its CPU priority: /proc/self/autogroup: [Errno 11]"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_a_priority_that_cannot_be_lowered_is_a_warning_of_one_report(what):
    """The library's own function, but for what it asks of the C library."""
    part, times, said = REFUSALS[what]
    world, left = Ranks(), [times]
    world.sizes[("background.worker", "lower_priority")] = lambda nice, io_class: lower_priority(nice, "unchanged")
    with world:
        proc = world.system.mounts_of(world.nodes[0]).file_system_at("/proc")
        if part:
            fill(proc, {"self/autogroup": b"/autogroup-1 nice 0\n"})

        def refuse(kind: str, where: str) -> float:
            if part and kind == "open" and part in where and left[0]:
                left[0] -= 1
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            return 0.0

        world.system.on_call = refuse
        nice = world.os.nice

        def work(comm: Communicator) -> list[list[str]]:
            with BackgroundWriter(timeout=TIMEOUT) as writer:
                states = (world.state(version=version) for version in (1, 2))
                return [save_state_dict(state, ROOT, comm, async_save=writer).result().warnings for state in states]

        if what == "nice":
            world.os.nice = lambda increment: (_ for _ in ()).throw(PermissionError(errno.EPERM, "not permitted"))
        try:
            ((first, second),) = world.job(work, 1)
        finally:
            world.os.nice = nice
        assert second == []
        assert (len(first), said in "".join(first)) == (bool(said), True)
        if what == "once":
            assert tree_of(proc)["self/autogroup"] == b"10"


def test_a_state_that_changes_between_its_slices_is_not_saved(monkeypatch):
    monkeypatch.setattr(background_saves, "SMALL_BYTES", 0)  # all here is small
    world = Ranks()
    with world:
        world.job(lambda comm: save(world, comm, 1))
        before = world.names()

        def work(comm):
            with BackgroundWriter(timeout=TIMEOUT) as writer:
                state = world.state(comm.rank, comm.size, 2)
                options = {"unique_id": 0, "async_save": writer, "slice_bytes": 4096}
                handle = save_state_dict(state, ROOT, comm, **options)
                with pytest.raises(ValidationError, match="is being staged in slices"):
                    save_state_dict(state, "/shared/other", comm, async_save=writer)
                if comm.rank == 1:
                    state["moment"].local_tensor[...] += 1
                handle.stage_next()
                with pytest.raises(ValidationError, match="'moment'.* changed while the save was staged in slices"):
                    handle.finish_staging()
                if comm.rank == 0:  # it removes what was begun
                    assert world.names() == before
                given_up = save_state_dict(state, ROOT, comm, **options)
                given_up.give_up()
                with pytest.raises(CheckpointError, match="was given up"):
                    given_up.result()
                state = world.state(comm.rank, comm.size, 3)
                return save_state_dict(state, ROOT, comm, **options).finish_staging().result().unique_id

        assert world.job(work) == [0, 0]
        assert world.version_at() == 3 and plain(world.names()) == complete(2)


def test_a_closed_writer():
    world = Ranks()
    with world:

        def work(comm):
            with BackgroundWriter(timeout=TIMEOUT) as writer:
                pass
            writer.close()
            with pytest.raises(
                ValidationError, match="this BackgroundWriter is closed. Remedy .FC102.: make another one"
            ):
                save_state_dict(world.state(version=1), ROOT, comm, async_save=writer)
            with pytest.raises(ZeroDivisionError), BackgroundWriter(timeout=TIMEOUT) as other:
                handle = save_state_dict(world.state(version=2), ROOT, comm, unique_id=0, async_save=other)
                raise ZeroDivisionError
            assert handle.done(), "an error of the script does not end its save"
            return handle.result().unique_id

        assert world.job(work, 1) == [0]
        assert world.version_at() == 2


@pytest.mark.parametrize("rank", range(2))
def test_a_writer_that_dies_before_it_is_given_its_share_fails_the_save_on_all(rank):
    """Other ranks know the one that was there when the save began."""
    world, said, is_killed = Ranks(nodes=2), {}, []
    with world:
        world.job(lambda comm: save(world, comm, 1))
        real = world.system.on_call

        def called(kind: str, where: str) -> float:
            if world.scheduler.process.name == f"rank {rank}" and not is_killed and where.endswith(".saving"):
                is_killed.append(kind)
                kill_writer(world)
            return real(kind, where)

        def work(comm: Communicator) -> None:
            writer = BackgroundWriter(timeout=300.0)
            try:
                state = world.state(comm.rank, comm.size, 2)
                handle = save_state_dict(state, ROOT, comm, unique_id=0, async_save=writer, coordinator_rank=rank)
                handle.wait()
                said[comm.rank] = str(handle.error)
            finally:
                with contextlib.suppress(CheckpointError):
                    writer.close()

        world.system.on_call = called
        world.job(work)
        world.system.on_call = real
        assert world.version_at() == 1
        assert said[0] == said[1]
        assert f"[rank {rank}] its" in said[0]
        assert world.job(lambda comm: save_in_background(world, comm, 3)) == [SAVED] * 2

"""The library's own saver, loader, manager, verification and repair on simulated file systems."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.foreign.paddle_files import PADDLE_METADATA, open_to_save
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.manager import CheckpointManager, KeepLatest
from paddle_flexckpt.media import local
from paddle_flexckpt.media.local import LocalBackend
from paddle_flexckpt.native.directory import latest, list_checkpoints
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.sharded_weight import ShardedWeight
from paddle_flexckpt.tools.verification import repair_manifest, verify_checkpoint
from tests.simulated.modules import process_state, simulated
from tests.simulated.processes import Processes
from tests.simulated.sockets import Sockets
from tests.simulated.tasks import Process
from tests.simulated.threads import Threads
from tests.simulated.trees import fill, tree_of
from tests.simulation.test_system import World

RUN = "/run/a"


def values(version: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(version)
    return {
        "version": np.full(3, version, dtype=np.int32),
        "blocks": generator.random((3 << 20) // 4 + 7, dtype=np.float32),
        "columns": generator.random((600, 300)),
        "none": np.zeros((0, 4), dtype=np.float32),
    }


def save(version: int, path: Any = RUN, **options: Any) -> Any:
    return save_state_dict(values(version), path, SoloCommunicator(), **options)


def load(path: Any = RUN, **options: Any) -> int:
    """The version of a checkpoint, every bit of which is as it was saved."""
    found = {key: np.full_like(whole, 99) for key, whole in values(0).items()}
    load_state_dict(found, path, SoloCommunicator(), strict=True, **options)
    version = int(found["version"][0])
    assert all(found[key].tobytes() == whole.tobytes() for key, whole in values(version).items())
    return version


def assert_durable(world: World) -> None:
    """Nothing that was reported can be lost; a marker that was removed may come back."""
    there, durable = tree_of(world.disks[0]), tree_of(world.disks[0], durable=True)
    assert {path: durable[path] for path in there} == there
    assert all(path.endswith(".saving") for path in durable.keys() - there.keys())


class Library(World):
    """A world in which the library's modules run."""

    def __enter__(self) -> Library:
        threads, processes, scheduler = Threads(self.scheduler), Processes(self.scheduler), self.scheduler
        sockets = Sockets(self.network)
        modules = {
            **self.system.modules,
            "threading": threads.threading,
            "queue": threads.queue,
            "socket": sockets.socket,
            "selectors": sockets.selectors,
            "time": processes.time,
            "secrets": processes.secrets,
            "random": processes.random,
            "subprocess": processes.subprocess,
            "signal": processes.signal,
            "atexit": processes.atexit,
        }
        names = {**threads.names, **processes.names, **self.system.names}
        self._context = simulated(scheduler, modules, names, threads.replacement, process_state(scheduler))
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


@pytest.fixture
def library() -> Iterator[Library]:
    with Library() as world:
        yield world


def leave_a_file(path: str, how: Callable[[], None], kept: dict[Any, Any] | None = None) -> None:
    """End, while a frame that only the collector of cycles finds has a file to remove; ``kept`` may hold it first."""

    def hold() -> Iterator[None]:
        try:
            yield
        finally:
            local.os.unlink(path)

    frame = hold()
    next(frame)
    cycle: list[Any] = [frame]
    cycle.append(cycle)
    if kept is not None:
        kept["frame"] = cycle
    how()


def collect() -> None:
    """Make so many objects that the collector, if it runs, has looked at all that there were."""
    for _ in range(200_000):
        [[]].append([])
    kept = [[number] for number in range(200_000)]
    assert len(kept) == 200_000


def write_file(path: str) -> None:
    with local.LocalOutputFile(path) as file:
        file.write(b"what others need")
        file.finish()


def test_what_a_dead_process_leaves_is_not_removed_by_others(library):
    def fail() -> None:
        raise OSError("as a test asks")

    library.run(lambda: write_file("/file"))
    for how in (lambda: library.os.kill(library.os.getpid(), 9), fail):
        with contextlib.suppress(OSError):
            library.run(lambda how=how: leave_a_file("/file", how))
        library.run(collect)
        assert "file" in tree_of(library.disks[0])


@pytest.mark.parametrize("is_kept", [False, True])
def test_what_one_world_leaves_is_not_removed_in_another_one_nor_in_the_real_one(tmp_path, is_kept):
    path = tmp_path / "file"
    path.write_bytes(b"real")

    def fail() -> None:
        raise OSError("as a test asks")

    with Library() as world:
        world.run(functools.partial(world.os.makedirs, str(tmp_path)))
        process = Process(world.scheduler, world.nodes[0], "p")
        process.start(functools.partial(leave_a_file, str(path), fail, process.state if is_kept else None))
        world.scheduler.run()
    with Library() as other:
        other.run(lambda: other.os.makedirs(str(tmp_path)))
        other.run(lambda: write_file(str(path)))
        del world, process
        other.run(collect)
        assert other.run(lambda: other.os.path.exists(path))
    gc.collect()
    assert path.exists()


def test_a_save_is_read_back_and_is_on_disk(library):
    def work() -> None:
        save(1, step=1)
        assert load(verify="full") == 1
        save(2, unique_id=0)
        assert load(verify="full") == 2, "overwritten"
        save(3)
        assert [each.unique_id for each in list_checkpoints(RUN)] == [0, 1] and latest(RUN).unique_id == 1
        assert load(unique_id=0) == 2 and load() == 3
        assert verify_checkpoint(RUN).ok

    library.run(work)
    assert_durable(library)
    assert not Path(RUN).exists()
    assert [task for task, _ in library.scheduler.thread_errors] == []


def test_a_directory_that_a_dead_process_has_made_is_made_durable(library):
    """Its entry is lost with the power, and all that is below it, though that was made durable."""

    def die() -> None:
        library.os.mkdir("/run")  # what a save calls that is killed right then

    library.run(die)
    library.run(lambda: save(1))
    assert_durable(library)
    library.run(lambda: save(2, "/run/b/c/d"))
    assert_durable(library)


@pytest.mark.parametrize("mode", ["new", "replace", "publish"])
def test_a_loss_of_power_does_not_bring_back_a_file_that_was_given_up(library, mode):
    """Where its save is over nobody would look for it again."""

    def give_up() -> None:
        backend = LocalBackend(RUN)
        backend.make_directory()
        with contextlib.suppress(KeyError), backend.create("x", mode) as file:
            file.write(b"own")
            backend.sync()  # as another file's commit does
            raise KeyError

    library.run(give_up)
    assert_durable(library)


def test_a_loss_of_power_does_not_bring_back_what_a_late_rank_has_removed(library):
    def work() -> None:
        directory = open_to_save(RUN)
        directory.backend.make_directory()
        ticket = directory.open_save(0)
        directory.backend.remove(ticket.marker_file)
        with directory.backend.create(ticket.data_file(0)) as file:
            file.write(b"torn")
        directory.backend.sync()
        directory.discard_late(ticket, [0])

    library.run(work)
    # What keeps Paddle's loader away may come back: it does no harm.
    durable = tree_of(library.disks[0], durable=True)
    assert not [path for path, data in durable.items() if data is not None and not path.endswith(PADDLE_METADATA)]


def test_both_worlds_read_each_others_checkpoints(library, tmp_path):
    library.run(lambda: save(1))
    for path, data in tree_of(library.disks[0]).items():
        if path.startswith("run/"):
            target = tmp_path / path
            target.mkdir(parents=True) if data is None else target.write_bytes(data)
    library.__exit__(None, None, None)
    try:
        assert load(tmp_path / "run/a", verify="full") == 1
        save(2, tmp_path / "real")
        real = {f"real/{name}": (tmp_path / "real" / name).read_bytes() for name in os.listdir(tmp_path / "real")}
    finally:
        library.__enter__()
    fill(library.disks[0], real)
    assert library.run(lambda: load("/real", verify="full")) == 2


def test_columns_are_read_from_a_map(library):
    """Runs too short for requests, which a memory map serves, and its pages are given back meanwhile."""

    def work() -> None:
        save(1)
        whole = values(1)["columns"]
        part = np.zeros((600, 100))
        target = ShardedWeight("columns", part, part.shape, whole.shape, (0, 100))
        report = load_state_dict({"columns": target}, RUN, SoloCommunicator(), verify=False)
        assert part.tobytes() == np.ascontiguousarray(whole[:, 100:200]).tobytes()
        assert report.bytes_read == part.nbytes
        assert load(verify="full") == 1

    library.run(work)


def test_a_lost_manifest_is_repaired(library):
    def work() -> None:
        save(1)
        library.os.unlink(f"{RUN}/0.manifest")
        repair_manifest(RUN, 0)
        assert verify_checkpoint(RUN).ok and load(verify="full") == 1

    library.run(work)


def test_a_manager_keeps_what_it_should(library):
    def work() -> None:
        with CheckpointManager(
            "/run", keep=KeepLatest(2), process_group=SoloCommunicator(), preemption_signals=()
        ) as run:
            for step in range(1, 5):
                run.save(step, state=values(step), rng=False)
            assert run.all_steps() == [3, 4]
            state = {key: np.zeros_like(value) for key, value in values(0).items()}
            assert run.restore(state=state).step == 4 and state["version"].tolist() == [4, 4, 4]

    library.run(work)
    assert sorted(path for path in tree_of(library.disks[0]) if path.count("/") == 1 and path[:3] == "run") == [
        "run/step_00000003",
        "run/step_00000004",
    ]


def test_an_asynchronous_save_by_a_writer_process(library):
    def work() -> None:
        handle = save(1, async_save=True)
        handle.result()
        assert load(verify="full") == 1
        save(2, async_save=True, unique_id=0).result()
        assert load(verify="full") == 2

    library.run(work)
    assert_durable(library)


def test_readers_keep_a_checkpoint_from_being_overwritten(library):
    """By ``flock``, which is the open file's."""
    world, order = library, []

    def read() -> None:
        world.scheduler.sleep(100)
        order.append(load())

    def write() -> None:
        save(1)
        world.scheduler.sleep(200)
        save(2, unique_id=0)
        order.append("saved")
        order.append(load())

    world.start(write)
    world.start(read)
    world.scheduler.run()
    assert order == [1, "saved", 2]


@pytest.mark.parametrize("locks", ["flock", "nfs", "none"])
def test_two_savers_of_one_directory(locks):
    """One is refused: by a lock, or where there are none by a lease."""
    with Library(
        nodes=2, on_call=lambda kind, where: 60.0 * (kind == "writev" and where.endswith(".safetensors"))
    ) as world:
        world.shared.locks = locks
        told = []

        def work() -> None:
            try:
                save(1, "/shared/run")
                told.append(None)
            except CheckpointError as error:
                told.append(str(error))

        for node in range(2):
            world.start(work, node)
        world.scheduler.run()
        refusals = [each for each in told if each is not None]
        assert len(told) == 2 and len(refusals) == 1 and "another" in refusals[0], told
        assert world.run(lambda: load("/shared/run", verify="full"), 1) == 1


def test_a_full_disk_is_an_error_and_the_old_checkpoint_stays(library):
    disk = library.disks[0]

    def work() -> None:
        save(1)
        before = tree_of(disk)
        disk.capacity = disk.used + (1 << 20)
        with pytest.raises(CheckpointError, match="No space left"):
            save(2, unique_id=0)
        disk.capacity = None
        assert tree_of(disk) == before and load(verify="full") == 1
        save(3, unique_id=0)
        assert load(verify="full") == 3

    library.run(work)


def test_a_seed_is_a_run():
    """Each call, when it was made, and what is on disk in the end."""

    def run(seed: int) -> tuple[list, dict]:
        told = []

        def note(kind: str, where: str) -> float:
            told.append((world.scheduler.now, world.scheduler.process.pid, kind, where))
            return 0.0

        world = Library(seed=seed, on_call=note)
        with world:
            world.run(lambda: (save(1), save(2, async_save=True).result(), load(unique_id=1)))
        return told, tree_of(world.disks[0])

    first, again, other = run(1), run(1), run(2)
    assert first == again and len(first[0]) > 100
    assert first[0] != other[0] and first[1] != other[1]


def calls_of_a_save(at: int | None, strike: Callable[[World], float], seed: int) -> tuple[int, World]:
    """A save over another one, at whose call number ``at`` something strikes; how many calls it made."""
    count = 0

    def on_call(kind: str, where: str) -> float:
        nonlocal count
        is_counted = world.scheduler.process.name == "saver"
        count += is_counted
        return strike(world) if is_counted and count - 1 == at else 0.0

    world = Library(seed=seed, on_call=on_call)
    with world:
        world.run(lambda: save(1))

        def work() -> None:
            try:
                save(2, unique_id=0)
            except CheckpointError as error:
                assert "Input/output error" in str(error)

        world.start(work, name="saver")
        world.scheduler.run()
        assert world.scheduler.thread_errors == []
    return count, world


def struck_anywhere(strike: Callable[[World], float], step: int, seed: int) -> set[int]:
    """The versions that are there after something struck at one of many calls of a save."""
    count, _ = calls_of_a_save(None, strike, 0)
    found = set()
    for at in range(seed % step, count, step):
        _, world = calls_of_a_save(at, strike, at)
        with world:
            found.add(world.run(lambda: load(verify="full")))
            world.run(lambda: save(3))
            assert world.run(lambda: (load(unique_id=0), load())) in ((1, 3), (2, 3))
            assert not [name for name in tree_of(world.disks[0]) if name.endswith((".tmp", ".saving"))]
    return found


def lose_power(world: World) -> float:
    for process in world.scheduler.processes:
        process.kill()
    world.disks[0].lose_power(world.scheduler.random)
    return 0.0


def fail(world: World) -> float:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_whenever_power_is_lost_the_old_or_the_new_is_there():
    assert struck_anywhere(lose_power, 7, Random(1).randrange(7)) == {1, 2}


def test_whichever_call_fails_the_old_or_the_new_is_there():
    assert struck_anywhere(fail, 9, Random(2).randrange(9)) == {1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("strike", [lose_power, fail])
def test_every_call_of_a_save(strike):
    for seed in range(3):
        assert struck_anywhere(strike, 1, seed) == {1, 2}

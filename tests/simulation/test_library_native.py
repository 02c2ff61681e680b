"""Damaged checkpoints on simulated disks: what a load, a verification and a repair make of them.

Two ranks have saved, over the host channel, so that some tensors are there twice. Whatever is damaged then, a load
gives the bits that were saved or an error that names the file, and a verification says beforehand which it will be.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from paddle_flexckpt.catalog import CheckpointError, ValidationError
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.native import partitions
from paddle_flexckpt.native.directory import latest, list_checkpoints
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.sharded_weight import ShardedWeight
from paddle_flexckpt.tools.verification import repair_manifest, verify_checkpoint
from tests.simulated.calls import LateError
from tests.simulated.training import ChannelCommunicator, Store
from tests.simulated.trees import Tree, fill, tree_of
from tests.simulation.test_library_files import Library

RUN = "/run/a"
RANKS = 2
BLOCK = 1 << 20
Work = Callable[[], Any]


def together(world: Library, work: Callable[[ChannelCommunicator], Any], nodes: bool = False) -> list[Any]:
    """What each rank of a job returns."""
    scheduler, name = world.scheduler, f"job {world.scheduler.now}"
    stores: list[Store] = []

    def rank(number: int) -> Any:
        world.os.environ["PADDLE_CURRENT_ENDPOINT"] = f"{scheduler.process.node.name}:{6000 + number}"
        return work(ChannelCommunicator(stores[0], name, RANKS, number))

    processes = [
        world.start(lambda number=number: rank(number), number if nodes else 0, f"rank {number}")
        for number in range(RANKS)
    ]
    stores.append(Store(scheduler, world.network, processes[0]))
    scheduler.run()
    assert [process.status for process in processes] == [0] * RANKS
    return [process.main.result for process in processes]


def whole(version: int) -> dict[str, np.ndarray]:
    """Tensors of several blocks; ``alone`` is in one file only."""
    generator = np.random.default_rng(version)
    return {
        "alone": generator.random(70_000),
        "rows": generator.random((700, 300)),
        "small": np.full(5, version, dtype=np.int32),
        "twice": generator.random((2 * BLOCK + 400) // 4, dtype=np.float32),
    }


def shards(version: int, rank: int) -> dict[str, ShardedWeight]:
    found, tensors = {}, whole(version)
    for key, tensor in tensors.items():
        first, count = (rank * 350, 350) if key == "rows" else (0, len(tensor))
        if key != "alone" or rank == 0:
            part, offset = tensor[first : first + count].copy(), (first,) + (0,) * (tensor.ndim - 1)
            found[key] = ShardedWeight(key, part, part.shape, tensor.shape, offset)
    return found


def save(comm: Any, version: int, path: Any = RUN, **options: Any) -> None:
    state = shards(version, comm.rank) if comm.size > 1 else whole(version)
    save_state_dict(state, path, comm, save_replicas=True, step=version, **options)


def load(path: Any = RUN, **options: Any) -> int:
    """The version, every bit of which is as it was saved; by one process."""
    found = {key: np.full_like(tensor, 77) for key, tensor in whole(0).items()}
    load_state_dict(found, path, SoloCommunicator(), **{"strict": True, "verify": "full", **options})
    version = int(found["small"][0])
    for key, tensor in whole(version).items():
        assert found[key].tobytes() == tensor.tobytes(), f"{key} is not of version {version}"
    return version


def make(in_partitions: bool = False, seed: int = 0) -> Tree:
    """The files of a checkpoint of two ranks."""
    with Library(seed=seed) as world, pytest.MonkeyPatch.context() as patch:
        if in_partitions:
            patch.setattr(partitions, "MOST_ROWS_IN_ONE_FILE", 2)
            patch.setattr(partitions, "ROWS_PER_PARTITION", 3)
        together(world, lambda comm: save(comm, 1))
        return tree_of(world.disks[0])


@pytest.fixture(scope="module")
def saved() -> Tree:
    return make()


@pytest.fixture(scope="module")
def partitioned() -> Tree:
    found = make(True)
    assert sum(path.endswith(".partition") for path in found) == 3
    return found


@pytest.fixture
def library() -> Iterator[Library]:
    with Library() as world:
        yield world


def holding(tree: Tree, on_call: Any = None) -> Library:
    world = Library(on_call=on_call)
    fill(world.disks[0], tree)
    return world


def data_files(tree: Tree) -> list[str]:
    return sorted(path for path in tree if path.endswith(".safetensors"))


def raised(work: Work) -> CheckpointError | None:
    """The error of the library that a function raises; others go on."""
    try:
        work()
    except CheckpointError as error:
        return error
    return None


def problems_of(path: str = RUN) -> tuple[Any, CheckpointError | None]:
    """What a verification reports, and what a load that verifies everything raises."""
    return verify_checkpoint(path), raised(load)


# Damage of a file's bytes.


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]


def damaged(data: bytes, dice: Random) -> tuple[str, bytes]:
    """Bytes that differ: what happened to a file."""
    at, length = dice.randrange(len(data)), dice.choice((1, 512, 3 * BLOCK // 2))
    zeros = bytes(len(data[at : at + length]))
    options = {
        f"a bit of byte {at}": flipped(data, at),
        f"cut at {at}": data[:at],
        "longer": data + b"x" * length,
        f"zeros from {at}": data[:at] + zeros + data[at + len(zeros) :],
        f"without bytes from {at}": data[:at] + data[at + length :],
        "a bit of the header": flipped(data, dice.randrange(min(3000, len(data)))),
        "a bit at the end": flipped(data, len(data) - 1),
        "empty": b"",
    }
    what = dice.choice([name for name, found in options.items() if found != data])
    return what, options[what]


def damage_of(tree: Tree, seed: int) -> tuple[str, Tree]:
    """One or two files of a checkpoint, damaged or missing."""
    dice, changed, told = Random(seed), dict(tree), []
    files = [path for path, data in tree.items() if data is not None and not path.endswith((".json", ".metadata"))]
    for path in dice.sample(sorted(files), dice.choice((1, 1, 2))):
        if dice.random() < 0.15:
            del changed[path]
            told.append(f"{path} is missing")
        else:
            what, changed[path] = damaged(tree[path] or b"", dice)
            told.append(f"{path}: {what}")
    return ", ".join(told), changed


def check_damage(tree: Tree, seeds: Any) -> set[str]:
    """Whatever is damaged, all that looks at it agrees; returns what loads came to."""
    outcomes = set()
    for seed in seeds:
        what, changed = damage_of(tree, seed)
        lost = sorted(path for path in tree if changed.get(path) != tree[path])
        with holding(changed) as world:
            if f"{RUN}/0.manifest"[1:] not in changed:
                assert isinstance(world.run(lambda: raised(load)), CheckpointError), what
                outcomes.add("no manifest")
                continue
            report, error = world.run(problems_of)
            named = [os.path.basename(path) for path in lost]
            assert not report.ok and report.problems, f"seed {seed}: {what}"
            text = " ".join(map(str, report.problems))
            assert any(name in text for name in named), f"seed {seed}: {what}: {text}"
            assert report.recoverable == (error is None), f"seed {seed}: {what}: {text}; but a load: {error}"
            if error is not None:
                assert any(name in str(error) for name in named), f"seed {seed}: {what}: {error}"
            outcomes.add("refused" if error is not None else "from replicas")
            (info,) = world.run(lambda: list_checkpoints(RUN))
            is_latest = world.run(lambda: latest(RUN)) is not None
            assert is_latest == info.complete, f"seed {seed}: {what}"
            # The next save goes well.
            world.run(lambda: save(SoloCommunicator(), 2, unique_id=None))
            assert world.run(load) == 2, f"seed {seed}: {what}"
            assert not [path for path in tree_of(world.disks[0]) if path.endswith((".tmp", ".saving"))], what
    return outcomes


def test_whatever_is_damaged_a_verification_says_what_a_load_can_read(saved):
    assert check_damage(saved, range(24)) >= {"refused", "from replicas"}


def test_whatever_of_partitions_is_damaged_a_verification_says_what_a_load_can_read(partitioned):
    assert check_damage(partitioned, range(100, 116)) >= {"refused"}


@pytest.mark.slow
@pytest.mark.parametrize("is_partitioned", [False, True])
def test_much_damage(saved, partitioned, is_partitioned):
    check_damage(partitioned if is_partitioned else saved, range(1000, 1600))


# Something fails while a checkpoint is read.


def struck(
    tree: Tree, work: Work, at: int | None, strike: Callable[[Library, str], float], kinds: frozenset[str] | None = None
) -> tuple[int, str, Library, Any]:
    """Do something at whose call number ``at`` something strikes.

    Returns:
        How many calls there were, which was struck, the world, and what came of it: an error or what was returned.
    """
    count, hit = 0, ""

    def on_call(kind: str, where: str) -> float:
        nonlocal count, hit
        if world.scheduler.process.name != "struck" or (kinds is not None and kind not in kinds):
            return 0.0
        count += 1
        if count - 1 != at:
            return 0.0
        hit = f"{kind} {where}"
        return strike(world, kind)

    world = holding(tree, on_call)
    came: list[Any] = []

    def attempt() -> None:
        before = len(world.scheduler.process.descriptors)
        try:
            came.append(work())
        except (CheckpointError, OSError) as error:
            error.__traceback__ = None
            came.append(error)
        assert len(world.scheduler.process.descriptors) == before, f"open after {hit}"

    with world:
        process = world.start(attempt, name="struck")
        world.scheduler.run()
        assert process.status == 0, hit
        assert world.scheduler.thread_errors == []
    assert came, f"it ended at {hit}"
    return count, hit, world, came[0]


def fail(world: Library, kind: str) -> float:
    # What close() says, the descriptor is closed.
    raise (LateError if kind == "close" else OSError)(errno.EIO, os.strerror(errno.EIO))


def shorten(world: Library, kind: str) -> float:
    """Somebody cuts the largest file short meanwhile."""
    disk = world.disks[0]
    entries = disk.root.entries["run"].entries["a"].entries  # type: ignore[attr-defined]
    file = max((entries[name] for name in entries if name.startswith("1_0")), key=lambda file: file.size)
    disk.truncate(file, file.size // 3)
    return 0.0


READS = frozenset({"open", "pread", "preadv", "fstat", "mmap"})


def check_reads(tree: Tree, work: Work, strike: Any, step: int, begin: int) -> set[str]:
    """A load gives right bits (its own check) or an error that names a file; nothing stays open."""
    count, _, _, came = struck(tree, work, None, strike)
    assert not isinstance(came, Exception), came
    outcomes = set()
    for at in range(begin % step, count, step):
        _, hit, world, came = struck(tree, work, at, strike)
        if isinstance(came, Exception):
            assert isinstance(came, CheckpointError), f"{hit}: {came!r}"
            assert RUN in str(came), f"{hit}: {came}"
        outcomes.add("refused" if isinstance(came, Exception) else "read")
        if strike is fail:
            with world:
                assert world.run(load) == 1, hit
    return outcomes


def read_whole() -> int:
    return load(verify="read")


@pytest.mark.parametrize("strike", [fail, shorten])
def test_whichever_call_of_a_load_fails_there_are_right_bits_or_an_error(saved, partitioned, strike):
    assert check_reads(saved, load, strike, 3, 1) == {"refused", "read"}
    assert check_reads(partitioned, read_whole, strike, 4, 2) == {"refused", "read"}


@pytest.mark.slow
@pytest.mark.parametrize("strike", [fail, shorten])
@pytest.mark.parametrize("work", [load, read_whole])
def test_every_call_of_a_load(saved, partitioned, strike, work):
    for tree in (saved, partitioned):
        check_reads(tree, work, strike, 1, 0)


def test_whichever_read_of_a_verification_fails_it_says_so(saved):
    def verify() -> Any:
        return verify_checkpoint(RUN)

    count, _, _, came = struck(saved, verify, None, fail, READS)
    assert came.ok
    said = set()
    for at in range(count):
        _, hit, world, came = struck(saved, verify, at, fail, READS)
        if isinstance(came, Exception):
            assert RUN in str(came), hit
        else:
            assert came.ok == ("/proc" in hit), f"{hit}: {came.problems}"
            said |= {problem.what.rpartition(" ")[2] for problem in came.problems}
        with world:
            assert world.run(verify).ok
    assert {"opened", "read"} <= said, said


def test_whichever_call_of_a_repair_fails_nothing_is_lost(saved):
    def repair() -> Any:
        return repair_manifest(RUN, 0, overwrite=True)

    count, _, _, _ = struck(saved, repair, None, fail)
    failed = 0
    for at in range(0, count, 2):
        _, hit, world, came = struck(saved, repair, at, fail)
        failed += isinstance(came, Exception)
        with world:
            assert world.run(load) == 1, hit
            world.run(repair)
            assert world.run(load) == 1 and world.run(lambda: verify_checkpoint(RUN)).ok, hit
            assert not [path for path in tree_of(world.disks[0]) if path.endswith((".tmp", ".saving"))], hit
    assert failed > 5


def test_whichever_call_of_a_listing_fails_a_checkpoint_is_not_called_complete_by_mistake(saved):
    """Nor is it passed over: it is complete, it is listed with its problem, or the listing fails."""
    for work in (lambda: list_checkpoints("/run"), lambda: list_checkpoints(RUN)):
        count, _, _, _ = struck(saved, work, None, fail)
        for at in range(count):
            _, hit, _, came = struck(saved, work, at, fail)
            if not isinstance(came, Exception):
                assert len(came) == 1, hit
                assert came[0].complete == (not came[0].problem), hit


# Repairs that are refused.


def renamed(tree: Tree, other: Tree) -> Tree:
    """Rank 1's file of another save in place of its own."""
    second = data_files(tree)[1]
    return {**tree, second: other[data_files(other)[1]]}


def test_a_repair_says_why_files_are_not_one_checkpoint(saved):
    other = make(seed=1)
    second = data_files(saved)[1]
    manifest = "run/a/0.manifest"
    token = Manifest.decode(saved[manifest] or b"", manifest).save_token
    bare = {path: data for path, data in saved.items() if path != manifest}
    mixed = renamed(bare, other)
    lone = {path: data for path, data in bare.items() if path != second}
    twice = {**bare, "run/a/1_0.9.safetensors": bare[second]}
    cases: list[tuple[Tree, dict[str, Any], str]] = [
        (saved, {}, "there is a manifest"),
        (bare, {"unique_id": 7}, r"there are no data files of this id; got ids \[0\]"),
        (bare, {"save_token": "f" * 32}, "there are no files of save"),
        (mixed, {}, "there are files of several saves"),
        (mixed, {"save_token": token}, "1_0|1 of 2|files"),
        (lone, {}, "file"),
        (lone, {"fewer_files": True}, "rows"),
        (twice, {}, "a rank has several files of one save"),
        ({**bare, second: (bare[second] or b"")[:-9]}, {}, "a file has another size than its header says"),
        ({**bare, second: flipped(bare[second] or b"", 8)}, {}, "the header is damaged"),
        ({**bare, second: b"short"}, {}, "the header is damaged"),
    ]
    for tree, options, text in cases:
        with holding(tree) as world:
            given = {"unique_id": 0, **options}
            error = world.run(lambda: raised(lambda: repair_manifest(RUN, **given)))  # noqa: B023
            assert isinstance(error, ValidationError), text
            assert re.search(f"cannot rebuild the manifest.*{text}", str(error), re.DOTALL), error
            assert tree_of(world.disks[0]) == {**tree, **{k: None for k in tree_of(world.disks[0]) if k not in tree}}
    # With its token, the save that is whole among others is found.
    with holding({**bare, "run/a/1_0.9.safetensors": other[data_files(other)[1]]}) as world:
        report = world.run(lambda: repair_manifest(RUN, 0, save_token=token))
        assert report.left_out == ["1_0.9.safetensors"] and world.run(load) == 1


def test_a_repair_of_damaged_headers_refuses_or_gives_what_was_saved(saved):
    """One bit anywhere in a header; what is in tensors a repair has no means to check."""
    names, dice, refused = data_files(saved), Random(5), 0
    for _ in range(60):
        name = dice.choice(names)
        data = saved[name] or b""
        at = dice.randrange(8 + int.from_bytes(data[:8], "little"))
        tree = {path: each for path, each in saved.items() if not path.endswith(".manifest")}
        with holding(
            {**tree, name: data[:at] + bytes([data[at] ^ (1 << dice.randrange(8))]) + data[at + 1 :]}
        ) as world:
            error = world.run(lambda: raised(lambda: repair_manifest(RUN, 0)))
            if error is None:
                assert world.run(load) == 1, f"byte {at} of {name}"
            else:
                refused += 1
                assert os.path.basename(name) in str(error), f"byte {at} of {name}: {error}"
    assert refused > 40


# Manifests that are wrong, with checksums that are right.


def test_a_manifest_that_was_made_wrong_is_refused_or_read_around(saved):
    """Each column changed in one place, and encoded anew: nothing but the library's own errors, and no wrong bits."""
    path, dice, refused = "run/a/0.manifest", Random(3), 0
    manifest = Manifest.decode(saved[path] or b"", path)
    names = [
        name for name in ("key", "rank", "file", "dtype", "byte_offset", "offset", "shape",
                          "global_shape", "ndim") if isinstance(getattr(manifest.catalog, name), np.ndarray)
    ]  # fmt: skip
    for number in range(70):
        name = names[number % len(names)]
        column = getattr(manifest.catalog, name).astype(np.int64)
        place = tuple(dice.randrange(extent) for extent in column.shape)
        column[place] = dice.choice((-1, 0, 1, 3, 9, 1 << 20, (1 << 40) + 1))
        forged = replace(manifest, catalog=replace(manifest.catalog, **{name: column}))
        try:
            data = forged.encode()
        except (ValueError, KeyError, IndexError, OverflowError):
            continue
        with holding({**saved, path: data}) as world:
            error = world.run(lambda: raised(load))
            assert error is None or RUN in str(error), f"{name}{place} = {column[place]}: {error}"
            refused += error is not None
            report = world.run(lambda: verify_checkpoint(RUN))
            assert error is None or not report.ok or name in ("key",), f"{name}{place} = {column[place]}: {error}"
    assert refused > 20

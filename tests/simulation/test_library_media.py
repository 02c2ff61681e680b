"""What moves bytes between tensors and media, in a simulated world: boxes of tensors, buffers, parts of files, URLs."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("s3fs")
pytest.importorskip("greenlet")

from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError, ValidationError
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.media import read_ahead
from paddle_flexckpt.media.local import OutputParts
from paddle_flexckpt.media.opening import is_remote, open_storage
from paddle_flexckpt.media.ring import BufferRing
from paddle_flexckpt.native import row_files
from paddle_flexckpt.native.directory import latest, list_checkpoints
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.sharded_weight import ShardedWeight
from tests.simulated.object_store import ServerError
from tests.simulated.trees import tree_of
from tests.simulation.store_world import store_world
from tests.simulation.test_library_files import Library

RUN = "/run/a"
URL = "s3://bucket/run"
SHAPES = {"cube": (24, 50, 400), "flat": (900, 700), "wide": (3, 400_000), "l0": (64, 9000), "l1": (64, 9000)}


def tensors() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(4)
    return {key: generator.random(shape, dtype=np.float32) for key, shape in SHAPES.items()}


def save(path: Any) -> None:
    save_state_dict(tensors(), path, SoloCommunicator())


def box(dice: Random, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """A box of a tensor: some axes whole, others a part."""
    found = []
    for extent in shape:
        begin = dice.choice((0, dice.randrange(extent)))
        found.append(slice(begin, dice.choice((extent, dice.randrange(begin, extent) + 1))))
    return tuple(found)


def read_boxes(dice: Random, path: Any, **options: Any) -> int:
    """Load a random box of some tensors, turned or of another type perhaps; how many bytes were read."""
    values, wanted, state, statements = tensors(), {}, {}, []
    for key in dice.sample(sorted(SHAPES.keys() - {"l1"}), dice.randrange(1, 4)):
        turn = len(SHAPES[key]) == 2 and dice.random() < 0.3
        whole = values[key].T if turn else values[key]
        if turn:
            statements.append(f"{key}^T -> {key}")
        cut = box(dice, whole.shape)
        if key == "l0":
            # Two of one form, which are read together.
            wanted["l1"], cuts = (values["l1"].T if turn else values["l1"])[cut], cut
            state["l1"] = target("l1", wanted["l1"].shape, whole.shape, cuts)
            if turn:
                statements.append("l1^T -> l1")
        wanted[key] = whole[cut]
        state[key] = target(key, wanted[key].shape, whole.shape, cut)
    config = {"aoa_config": {"aoa_statements": statements}} if statements else {}
    report = load_state_dict(state, path, SoloCommunicator(), **config, **options)
    for key, expected in wanted.items():
        assert np.array_equal(state[key].local_tensor, expected), (key, expected.shape)
    return report.bytes_read


def target(key: str, shape: Any, whole: Any, cut: tuple[slice, ...]) -> ShardedWeight:
    return ShardedWeight(key, np.full(shape, -1, dtype=np.float32), shape, whole, tuple(each.start for each in cut))


@pytest.fixture
def library() -> Iterator[Library]:
    with Library() as world:
        yield world


def test_any_box_is_read_from_simulated_files(library, monkeypatch):
    """By requests, from maps and through verified blocks; runs of a file far apart are not mapped together."""

    def work(seeds: range) -> None:
        for seed in seeds:
            dice = Random(seed)
            read_boxes(dice, RUN, verify=dice.choice(("full", "read", "off")))

    library.run(lambda: save(RUN))
    library.run(lambda: work(range(30)))
    monkeypatch.setattr(row_files, "MAP_SPAN_BYTES", 1 << 16)
    library.run(lambda: work(range(30, 45)))


@pytest.mark.parametrize("protocol", ["s3", "gs", "sftp"])
def test_any_box_is_read_from_a_simulated_store(protocol, monkeypatch):
    """Ahead, within budgets of which some are smaller than a block; and one request after the other."""
    monkeypatch.setattr(read_ahead, "LEAST_REQUEST", 1 << 16)
    url = f"{protocol}://bucket/run"
    with store_world(1) as world:
        world.call(lambda: save(url))
        for seed in range(10):
            dice = Random(seed)
            options = {
                "requests_at_once": dice.choice((1, 2, 8)),
                "bytes_at_once": dice.choice((1 << 18, 1 << 21, 64 << 20)),
            }

            def work(dice: Random = dice, options: dict[str, int] = options) -> None:
                read_boxes(dice, open_storage(url, **options), verify=dice.choice(("full", "read", "off")))

            world.call(work)


def test_boxes_are_read_while_a_store_fails(monkeypatch):
    """Whatever fails meanwhile, there are right bits, or an error that names the store; never a request without end."""
    monkeypatch.setattr(read_ahead, "LEAST_REQUEST", 1 << 16)
    seen = set()
    with store_world(2) as world:
        world.call(lambda: save(URL))
        for share in (0.1, 0.8):
            for seed in range(6):
                world.store.behave(shares={"refused": share / 2, "reset": share / 4, "cut": share / 4})

                def work(seed: int = seed) -> str:
                    try:
                        read_boxes(Random(seed), open_storage(URL, retries=2, bytes_at_once=1 << 19), verify="full")
                    except CheckpointError as error:
                        assert "s3://bucket/run" in str(error), error
                        return "refused"
                    return "read"

                seen.add((share, world.call(work)))
    assert {(0.1, "read"), (0.8, "refused")} <= seen, seen


def test_an_object_that_becomes_shorter_or_goes_while_it_is_read():
    with store_world(3) as world:
        world.call(lambda: save(URL))
        name = next(key for key in world.store.objects if key.endswith(".safetensors"))
        kept = world.store.objects[name]
        for what in ("shorter", "gone"):
            for after in (1, 2, 4, 8):
                left = [after]

                def script(operation: str, key: str, process: Any, left: list[int] = left, what: str = what) -> Any:
                    left[0] -= operation == "get" and key == name
                    if left[0] == 0:
                        if what == "gone":
                            world.store.objects.pop(name, None)
                        else:
                            world.store.objects[name] = kept._replace(data=kept.data[: len(kept.data) // 3])
                    return "done"

                def work() -> str:
                    try:
                        read_boxes(Random(7), open_storage(URL, requests_at_once=4), verify="full")
                    except CheckpointError as error:
                        assert ".safetensors" in str(error), error
                        return "refused"
                    return "read"

                world.store.script = script
                world.call(work)
                world.store.script = None
                world.store.objects[name] = kept


# The ring of buffers.


class Broken(Exception):
    pass


def run_ring(seed: int) -> tuple[str, list[int]]:
    """Items go through a few buffers by threads that take any time: what came of it, and what was taken."""
    dice = Random(seed)
    items, buffers = dice.randrange(0, 12), dice.randrange(1, 4)
    breaks = dice.choice((None, None, "fill", "finish", "caller"))
    at = dice.randrange(items + 1)
    with Library(seed=seed) as world:
        scheduler, given, taken, filled = world.scheduler, iter(range(items)), [], []
        memory = [np.zeros(1, dtype=np.int64) for _ in range(buffers)]
        in_use: set[int] = set()
        filling: list[int] = []

        def pause() -> None:
            scheduler.sleep(scheduler.random.choice((0.0, 0.1, 1.0)))

        def fill_one(buffer: np.ndarray) -> int | None:
            assert not filling, "two threads fill at a time"
            filling.append(1)
            pause()
            filling.clear()
            number = next(given, None)
            if number is None:
                return None
            if breaks == "fill" and number == at:
                raise Broken
            assert id(buffer) not in in_use
            in_use.add(id(buffer))
            filled.append((number, buffer))
            if finish is None:
                buffer[0] = number
            return number

        def finish_one(number: int) -> None:
            pause()
            if breaks == "finish" and number == at:
                raise Broken
            dict(filled)[number][0] = number

        finish = finish_one if dice.random() < 0.6 else None

        def work() -> str:
            with BufferRing(memory, fill_one, finish) as ring:
                try:
                    while (pair := ring.take()) is not None:
                        buffer, number = pair
                        assert buffer[0] == number
                        taken.append(number)
                        pause()
                        assert buffer[0] == number, "filled again before it was given back"
                        if breaks == "caller" and number == at:
                            return "left"
                        in_use.discard(id(buffer))
                        ring.give_back(buffer)
                    assert ring.take() is None
                except Broken:
                    with pytest.raises(Broken):
                        ring.take()
                    return "raised"
            return "ended"

        came = world.run(work)
        assert scheduler.thread_errors == []
    expected = at if at < items and breaks in ("fill", "finish") and (breaks == "fill" or finish) else None
    if expected is not None:
        assert came == "raised" and taken == list(range(expected)), (seed, came, taken)
    elif breaks == "caller" and at < items:
        assert came == "left" and taken == list(range(at + 1))
    else:
        assert came == "ended" and taken == list(range(items)), (seed, came, taken)
    return came, taken


def test_a_ring_gives_what_was_filled_in_order_whatever_its_threads_do():
    assert {run_ring(seed)[0] for seed in range(120)} == {"ended", "raised", "left"}


@pytest.mark.slow
def test_a_ring_for_long():
    for seed in range(1000, 6000):
        run_ring(seed)


# Parts of one file, of several processes.


@pytest.mark.parametrize("locks", ["flock", "nfs", "none"])
def test_processes_write_parts_of_one_file_in_turns(locks):
    """One of them is killed in its turn, which is the next one's then."""
    for seed in range(6):
        with Library(nodes=2, seed=seed) as world:
            world.shared.locks = locks
            in_turn: list[int] = []
            waited: list[bool] = []

            def write(number: int, world: Library = world, in_turn: list[int] = in_turn, waited: Any = waited) -> None:
                with OutputParts("/shared/file") as parts:
                    for place in range(number, 12, 3):
                        if not parts.take_turn(wait=False):
                            waited.append(True)
                            assert parts.take_turn(wait=True)
                        in_turn[:] = [each for each in in_turn if world.scheduler.processes[each].alive]
                        assert locks == "none" or not in_turn
                        in_turn.append(world.scheduler.processes.index(world.scheduler.process))
                        parts.write_at(bytes([place + 1]) * 5000, place * 5000)
                        world.scheduler.sleep(1.0)
                        in_turn.remove(world.scheduler.processes.index(world.scheduler.process))
                        parts.end_turn()
                    parts.make_durable()

            processes = [world.start(lambda number=number: write(number), name=f"w{number}") for number in range(3)]
            if seed % 2:
                world.scheduler.after(2.5, processes[seed % 3].kill)
            world.scheduler.run()
            world.run(lambda: [write(number) for number in range(3)])
            assert locks == "none" or waited
            data = tree_of(world.shared, durable=True)["file"]
            assert data == b"".join(bytes([place + 1]) * 5000 for place in range(12))


@pytest.mark.parametrize(("kind", "number"), [("pwrite", errno.ENOSPC), ("flock", errno.EIO), ("fsync", errno.EIO)])
def test_an_error_of_a_part_is_raised_and_nothing_stays_open(kind, number):
    def on_call(called: str, where: str) -> float:
        if called == kind and "file" in where:
            raise OSError(number, os.strerror(number))
        return 0.0

    def work() -> None:
        before = len(world.scheduler.process.descriptors)
        with pytest.raises(OSError, match=os.strerror(number)), OutputParts("/shared/file") as parts:
            parts.take_turn(wait=True)
            parts.write_at(b"x" * 100, 0)
            parts.make_durable()
        assert len(world.scheduler.process.descriptors) == before

    with Library(on_call=on_call) as world:
        world.run(work)


# Links, and what is no file.


def test_links_and_other_things_in_the_place_of_files(library):
    """A link inside a checkpoint is read, one out of it is not; nor is a directory."""
    os_ = library.os

    def work() -> None:
        save(RUN)
        (name,) = [name for name in os_.listdir(RUN) if name.endswith(".safetensors")]
        os_.rename(f"{RUN}/{name}", f"{RUN}/kept")
        os_.symlink("kept", f"{RUN}/{name}")
        read_boxes(Random(1), RUN)
        os_.unlink(f"{RUN}/{name}")
        os_.rename(f"{RUN}/kept", "/run/kept")
        for make, text in (
            (lambda: os_.symlink("/run/kept", f"{RUN}/{name}"), "is a link out of the checkpoint's directory"),
            (lambda: os_.mkdir(f"{RUN}/{name}"), "is not a regular file"),
        ):
            make()
            with pytest.raises(CorruptCheckpointError, match=text) as caught:
                read_boxes(Random(1), RUN)
            assert name in str(caught.value)
            (os_.rmdir if os_.path.isdir(f"{RUN}/{name}") and "link" not in text else os_.unlink)(f"{RUN}/{name}")
        assert [info.complete for info in list_checkpoints(RUN)] == [False] and latest("/run") is None

    library.run(work)


@pytest.mark.parametrize("locks", [True, False])
def test_saves_without_locks_are_up_to_the_caller(library, locks):
    """``lock=False``: nothing is locked, neither by savers nor by readers, and nobody is refused."""
    calls: list[str] = []
    library.system.on_call = lambda kind, where: calls.append(kind) or 0.0
    storage = lambda: open_storage(RUN, lock=locks)  # noqa: E731

    def work() -> None:
        save(storage())
        read_boxes(Random(2), storage())
        save_state_dict(tensors(), storage(), SoloCommunicator(), unique_id=0)
        save_state_dict(tensors(), storage(), SoloCommunicator(), async_save=True).result()
        assert [info.unique_id for info in list_checkpoints(storage())] == [0, 1]

    library.run(work)
    assert ("flock" in calls) == locks


# Other stores.


def test_the_memory_of_a_process_is_a_storage_of_its_own(library):
    import fsspec

    url = "memory://run/a"

    def work() -> None:
        fsspec.filesystem("memory").store.clear()
        for _ in range(2):
            save_state_dict(tensors(), url, SoloCommunicator(), unique_id=0)
        read_boxes(Random(3), url, verify="full")
        with pytest.raises(ValidationError, match="in the memory of this process"):
            save_state_dict(tensors(), url, SoloCommunicator(), async_save=True)
        names = sorted(name.rpartition("/")[2] for name in fsspec.filesystem("memory").find("/run/a"))
        assert "0.manifest" in names and len([name for name in names if name.endswith(".safetensors")]) == 1
        assert not [name for name in names if name.endswith((".saving", ".lease", ".tmp"))]
        fsspec.filesystem("memory").store.clear()

    library.run(work)


def test_what_cannot_be_opened_is_refused_before_any_request():
    secret = "w0rd-of-pass"
    cases: list[tuple[str, dict[str, Any], str]] = [
        (URL, {"retries": -1}, "retries has to be an integer of at least 0"),
        (URL, {"requests_at_once": True}, "requests_at_once has to be an integer of at least 1"),
        (URL, {"commit": "hope"}, "commit has to be one of"),
        (URL, {"lease_seconds": 0}, "lease_seconds has to be a number"),
        (URL, {"lease_seconds": "30"}, "lease_seconds has to be a number"),
        (f"s3://user:{secret}@bucket/run", {}, "takes no credentials from URLs"),
        ("s3:/bucket/run", {}, "has lost a slash"),
        ("zip::s3://bucket/x", {}, "chain of file systems"),
        ("file://relative", {}, "without an absolute path"),
        ("nosuch://host/run", {}, "knows no file system 'nosuch'"),
        ("/run/a", {"part_bytes": 9}, r"options \['part_bytes'\] are not known"),
    ]
    with store_world() as world:
        for url, options, text in cases:

            def work(url: str = url, options: dict[str, Any] = options, text: str = text) -> None:
                with pytest.raises(ValidationError, match=text) as caught:
                    save(open_storage(url, **options))
                assert secret not in str(caught.value)

            world.call(work)
        assert not world.store.counts, "a request was made"
        assert is_remote(URL) and not is_remote("/run/a") and not is_remote(open_storage("/run/a"))
        assert not is_remote("s3:/bucket/run") and not is_remote(7)
    for url in (7, b"/run/a"):
        with pytest.raises(ValidationError, match="path has to be a path or URL"):
            open_storage(url)  # type: ignore[arg-type]


def test_a_secret_is_in_no_error_whatever_fails():
    """Of the URL and of options; the store says it back in its error."""
    secret, token = "pa55/w0rd-x", "t0ken-of-options"
    url = f"sftp://me:{secret}@host/run?sig={token}"
    with store_world() as world:
        for operation in ("list", "head", "put", "begin upload", "part", "rename", "delete", "make directory"):

            def script(asked: str, key: str, process: Any, operation: str = operation) -> Any:
                if asked == operation:
                    raise ServerError(403, f"denied to {secret} by {token}")
                return "done"

            world.store.script = script
            told: list[str] = []

            def work(told: list[str] = told) -> None:
                try:
                    save(open_storage(url, retries=1, password=secret, secret_token=token))
                except Exception as error:
                    told.append(f"{error} {error!r}")

            world.call(work)
            assert all(secret not in text and token not in text for text in told), (operation, told)


@pytest.mark.parametrize("protocol", ["oss", "sftp"])
def test_a_directory_in_the_place_of_a_file_and_a_file_in_the_place_of_a_directory(protocol):
    with store_world() as world:
        store = world.store
        world.call(lambda: save(f"{protocol}://bucket/run"))
        name = next(key for key in store.objects if key.endswith(".safetensors"))
        kept = store.objects.pop(name)
        store.objects[f"{name}/inside"] = kept

        def load() -> None:
            with pytest.raises(CorruptCheckpointError, match="safetensors"):
                read_boxes(Random(1), f"{protocol}://bucket/run")

        world.call(load)
        store.objects["bucket/file"] = kept

        def into() -> None:
            with pytest.raises(ValidationError, match="is not a directory"):
                save(f"{protocol}://bucket/file")

        world.call(into)
        assert store.objects["bucket/file"] == kept

"""Power that goes: a seeded part of the disks that it may leave, and the model of what those are."""

from __future__ import annotations

import os
import re
from random import Random

import pytest

from paddle_flexckpt.background import outcome
from paddle_flexckpt.media import local
from paddle_flexckpt.media.local import LocalBackend, LocalOutputFile
from paddle_flexckpt.native import save_directory
from tests.crash import background, explore
from tests.crash.explore import losses, power_losses
from tests.crash.file_system import Fault, FileSystem
from tests.crash.harness import read_tree, write_tree
from tests.crash.job import Job
from tests.crash.power_loss import Disk
from tests.crash.scenarios import SCENARIOS, find


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.name)
def test_old_or_new_and_a_next_save(bench, scenario):
    found = losses(bench(scenario), seed=1, limit=4 if scenario.large else 8, count=2 if scenario.large else 3)
    assert not found.violations, "\n".join(found.violations)
    assert found.points >= 1


def test_a_checkpoint_that_was_reported_stays(bench):
    """Right after the save has returned all that may be lost is of no use to a reader."""
    bench = bench(find("fresh, 2 ranks"))
    count = 0
    for _, done, tree in power_losses(bench, None, 64):
        if done == 1:
            write_tree(bench.root, tree)
            assert bench.observe() == bench.scenario.states[1]
            count += 1
    assert count >= 1


def _no_data(monkeypatch):
    finish = LocalOutputFile.finish

    def finish_without_fsync(file):
        file._is_durable = not file._overwrites and not file._final.endswith(".saving")
        finish(file)

    monkeypatch.setattr(LocalOutputFile, "finish", finish_without_fsync)


def _no_directory(monkeypatch):
    monkeypatch.setattr(local, "sync_path", lambda path: None)


def _no_directory_above(monkeypatch):
    monkeypatch.setattr(LocalBackend, "make_directory", lambda self: os.makedirs(self.path, exist_ok=True))


def _directory_once(monkeypatch):
    """Make data files' names durable together with the manifest's."""
    publish = save_directory.publish

    def once(backend, name, data, *checks):
        with monkeypatch.context() as patch:
            calls = []
            sync = backend.sync
            patch.setattr(backend, "sync", lambda: calls.append(0) if not calls else sync())
            publish(backend, name, data, *checks)

    monkeypatch.setattr(save_directory, "publish", once)


def test_a_step_that_lost_its_marker_goes_with_the_next_save(bench):
    """Every state: of the first files of a step some come to the disk, with their bytes or with their length alone."""
    found = losses(bench(find("manager: first step, 2 ranks")), seed=1, limit=32)
    assert not found.violations, "\n".join(found.violations)
    assert found.points > 60


@pytest.mark.parametrize("is_careful", [True, False])
def test_who_finds_the_manifest_of_a_dead_coordinator_makes_it_durable(bench, monkeypatch, is_careful):
    """The coordinator's writer dies between the rename and the fsync: all others report a checkpoint, which stays."""

    def careless(job, directory, how="", real=outcome.look_for_manifest):
        directory.backend.sync = lambda: None
        return real(job, directory, how)

    bench = bench(find("asynchronous: overwrite, 2 ranks"))
    calls = bench.record().calls
    renamed = next(at for at, call in enumerate(calls) if (call.target or "").endswith(".manifest"))
    if not is_careful:
        for module in (outcome, background):
            monkeypatch.setattr(module, "look_for_manifest", careless)
    run = bench.act(Fault(renamed + 1, "writer"))
    assert run.struck.by_writer and not any(run.errors)
    disk, found = Disk(bench.before), []
    for call in run.calls:
        disk.apply(call)
    for tree in disk.states(Random(0), 64):
        write_tree(bench.root, tree)
        found.append(bench.observe())
    assert bench.scenario.states[1] in found
    assert (bench.scenario.states[0] not in found) == is_careful


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (_no_data, "is not whole: .*CorruptCheckpointError"),
        # The file that keeps Paddle's own loader away is lost, and a data file is not.
        (_no_directory, r"power lost .*Paddle takes \{'\d_0-\w+\.safetensors'.*\} for a Hugging Face directory"),
        (_no_directory_above, r"a reader finds \{\}; allowed are \[\{'runs/a/0': 1\}\]"),
        (_directory_once, "is not whole: .*is missing; the manifest names it"),
    ],
)
def test_a_save_without_its_precautions_is_found_out(bench, monkeypatch, fault, said):
    monkeypatch.setattr(explore, "ENOUGH", 1)
    bench = bench(find("fresh, 2 ranks"))
    fault(monkeypatch)
    found = losses(bench, limit=8)
    assert re.search(said, found.violations[0]), found.violations


class Recorded:
    """Hold a few calls on files, and the disks after a loss of power."""

    def __init__(self, root: str, tree: dict, work) -> None:
        write_tree(root, tree)
        with FileSystem(root, Job(1)) as files:
            work(root)
        self.disk = Disk(tree)
        for call in files.calls:
            self.disk.apply(call)
        assert self.disk.tree() == read_tree(root)

    def states(self) -> list[dict]:
        found = []
        for tree in self.disk.states(Random(0), 1000):
            if tree not in found:
                found.append(tree)
        return found


def write(path: str, data: bytes, *, sync: bool, flags: int = os.O_CREAT | os.O_EXCL) -> None:
    descriptor = os.open(path, os.O_WRONLY | flags)
    assert os.write(descriptor, data) == len(data)
    if sync:
        os.fsync(descriptor)
    os.close(descriptor)


def test_a_synced_file_without_its_name_may_be_lost(tmp_path):
    root = str(tmp_path / "r")
    states = Recorded(root, {}, lambda root: write(f"{root}/a", b"new", sync=True)).states()
    assert states == [{}, {"a": b"new"}]


def test_a_synced_name_may_be_of_an_empty_file_or_a_part(tmp_path):
    def work(root):
        write(f"{root}/a", bytes(range(256)) * 4, sync=False)
        local.sync_path(root)

    states = Recorded(str(tmp_path / "r"), {}, work).states()
    contents = [tree["a"] for tree in states]
    assert {b"", bytes(1024), bytes(range(256)) * 4} < set(contents)
    assert len(contents) >= 4
    assert any(0 < len(content) < 1024 for content in contents)


def test_a_rename_is_atomic_and_may_come_before_what_was_done_earlier(tmp_path):
    def work(root):
        write(f"{root}/a.tmp", b"new", sync=True, flags=os.O_CREAT)
        os.rename(f"{root}/a.tmp", f"{root}/a")
        os.unlink(f"{root}/b")

    states = Recorded(str(tmp_path / "r"), {"a": b"old", "b": b"b"}, work).states()
    old, new = ({"a": content} for content in (b"old", b"new"))
    b, left = {"b": b"b"}, {"a.tmp": b"new"}
    expected = [{**a, **x} for a in (old, new) for x in ({}, b)] + [{**old, **left, **x} for x in ({}, b)]
    assert sorted(map(sorted, map(dict.items, states))) == sorted(map(sorted, map(dict.items, expected)))


def test_all_is_kept_that_was_synced(tmp_path):
    def work(root):
        os.mkdir(f"{root}/d")
        local.sync_path(root)
        write(f"{root}/d/a", b"new", sync=True)
        local.sync_path(f"{root}/d")

    assert Recorded(str(tmp_path / "r"), {}, work).states() == [{"d": None, "d/a": b"new"}]


def test_a_directory_may_be_lost_with_all_that_was_synced_in_it(tmp_path):
    def work(root):
        os.mkdir(f"{root}/d")
        write(f"{root}/d/a", b"new", sync=True)
        local.sync_path(f"{root}/d")

    assert Recorded(str(tmp_path / "r"), {}, work).states() == [{}, {"d": None, "d/a": b"new"}]


def test_bytes_of_a_file_in_place_are_old_or_new_by_sector(tmp_path):
    old, new = b"o" * 2048, b"n" * 1024

    def work(root):
        write(f"{root}/a", new, sync=False, flags=0)

    contents = [tree["a"] for tree in Recorded(str(tmp_path / "r"), {"a": old}, work).states()]
    assert contents[0] == old
    assert new + old[1024:] in contents
    assert all(content[1024:] == old[1024:] or len(content) < 2048 for content in contents)

"""What dead saves leave behind, who may save, and what is said to exist."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest
from paddle_flexckpt.native.leftovers import remove_dead_saves

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.foreign.formats import open_to_save
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.native.listing import is_complete, latest, list_checkpoints
from tests.native.samples import items_of, values_of, whole
from tests.native.test_directory import names, save


def begin(path, unique_id=None, ranks=(0, 1), parts=()):
    """A save that dies: data files of some ranks, parts of some."""
    directory = open_to_save(path)
    ticket = directory.open_save(unique_id, len(ranks))
    for rank in ranks:
        shard = whole(f"w{rank}", "float32", (5,), rank)
        items = items_of([shard], ticket.data_file(rank))
        data = [values_of(shard, 9).view(np.uint8)]
        part = directory.write_data(ticket, items, data, world_size=len(ranks), step=7)
        if rank in parts:
            directory.write_part(ticket, rank, part)
    return ticket


def test_a_dead_save_of_a_new_id_is_removed_by_the_next_save_whatever_its_id(tmp_path):
    save(tmp_path, 0)
    before = names(tmp_path)
    dead = begin(tmp_path, 5, parts=(0,))
    open_to_save(tmp_path).write_failure(dead, 1, b"why")
    token = dead.token
    assert set(names(tmp_path)) - set(before) == {
        f"0_5-{token}.part", "0_5.safetensors", f"1_5-{token}.failed", "1_5.safetensors", "5.saving",
    }  # fmt: skip
    assert set(remove_dead_saves(open_to_save(tmp_path))) == set(names_of(dead)) | {dead.failure_file(1)}
    assert names(tmp_path) == before


def test_what_a_dead_save_was_about_to_say_goes_with_it(tmp_path):
    begin(tmp_path, 5)
    random = "0123456789abcdef" * 2
    halves = [f"0_5.part.{random}.tmp", f"1_5.failed.{random}.tmp", f"5.manifest.{random}.tmp"]
    others = [f"0_6.part.{random}.tmp", "0_5.part.tmp", f"0_5.safetensors.{random}.tmp"]
    for name in (*halves, *others):
        (tmp_path / name).write_bytes(b"half")
    remove_dead_saves(open_to_save(tmp_path))
    assert names(tmp_path) == sorted(others)


def test_a_marker_that_goes_between_the_listing_and_the_look_is_nobodys(tmp_path):
    """The ranks of a save that failed each remove their files, and the last one the marker, without the lock."""
    save(tmp_path, 0)
    before = names(tmp_path)
    listed = [*before, *names_of(begin(tmp_path, 5))]
    for name in set(names(tmp_path)) - set(before):
        os.remove(tmp_path / name)
    remove_dead_saves(open_to_save(tmp_path), names=listed)
    assert names(tmp_path) == before


def test_so_it_is_on_a_node(tmp_path, monkeypatch):
    save(tmp_path, 0)
    node = open_to_save(tmp_path)
    before = node.known_saves()
    monkeypatch.setattr(node.backend, "names", lambda: [*names(tmp_path), "5.saving"])
    assert node.known_saves() == before
    node.publish_prepared({before.published[0]})
    assert node.known_saves() == before


def test_a_failure_that_is_told_when_all_is_over_leaves_no_file(tmp_path):
    """A rank was stopped right before; meanwhile the next save has cleaned up."""
    dead = begin(tmp_path, 5)
    remove_dead_saves(open_to_save(tmp_path))
    before = names(tmp_path)
    assert before == []
    open_to_save(tmp_path).write_failure(dead, 1, b"why")
    assert names(tmp_path) == before


def names_of(ticket):
    return [ticket.part_file(0), "0_5.safetensors", "1_5.safetensors", ticket.marker_file]


def test_a_dead_replacement_leaves_what_it_was_to_replace(tmp_path):
    save(tmp_path, 3, seed=1)
    before = names(tmp_path)
    manifest = (tmp_path / "3.manifest").read_bytes()
    begin(tmp_path, 3, parts=(0, 1))
    (tmp_path / f"3.manifest.{5:032x}.tmp").write_bytes(b"half")
    remove_dead_saves(open_to_save(tmp_path))
    assert names(tmp_path) == before
    assert (tmp_path / "3.manifest").read_bytes() == manifest


def test_a_save_that_died_after_its_commit_is_kept_and_tidied(tmp_path):
    save(tmp_path, 3, seed=1)
    old = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    marker = begin(tmp_path, 3, parts=(0, 1))
    said = (tmp_path / marker.marker_file).read_bytes()
    parts = {name: (tmp_path / name).read_bytes() for name in names(tmp_path) if name.endswith(".part")}
    directory = open_to_save(tmp_path)
    directory.commit(marker, [0, 1])
    committed = names(tmp_path)
    # All that the commit removed is back: its removal was lost.
    for name, content in {**{n: c for n, c in old.items() if n != "3.manifest"}, **parts}.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / marker.marker_file).write_bytes(said)
    remove_dead_saves(directory)
    assert names(tmp_path) == committed
    assert directory.read_manifest(3).step == 7


def test_files_that_no_marker_speaks_of_are_left_alone(tmp_path):
    """They may be a checkpoint that has lost its manifest, which can be repaired."""
    save(tmp_path, 0)
    (tmp_path / "0.manifest").unlink()
    before = names(tmp_path)
    save(tmp_path)
    assert set(before) < set(names(tmp_path))
    assert remove_dead_saves(open_to_save(tmp_path)) == []


def test_a_marker_of_a_save_that_is_going_on_is_left_alone(tmp_path):
    ticket = begin(tmp_path, 2)
    before = names(tmp_path)
    assert remove_dead_saves(open_to_save(tmp_path), ticket) == []
    assert names(tmp_path) == before


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"unique_id": 9, "generation": 0, "token": "x"}'])
def test_a_marker_that_is_not_whole_means_that_nothing_else_was_written(tmp_path, content):
    save(tmp_path, 0)
    before = names(tmp_path)
    (tmp_path / "0.1.saving").write_bytes(content)
    assert remove_dead_saves(open_to_save(tmp_path)) == ["0.1.saving"]
    assert names(tmp_path) == before


def test_a_committed_save_with_a_damaged_manifest_is_not_touched(tmp_path):
    ticket = begin(tmp_path, 0, parts=(0, 1))
    said = (tmp_path / ticket.marker_file).read_bytes()
    open_to_save(tmp_path).commit(ticket, [0, 1])
    manifest = bytearray((tmp_path / "0.manifest").read_bytes())
    manifest[-1] ^= 1
    (tmp_path / "0.manifest").write_bytes(manifest)
    (tmp_path / ticket.marker_file).write_bytes(said)
    before = names(tmp_path)
    assert remove_dead_saves(open_to_save(tmp_path)) == []
    assert names(tmp_path) == before


def test_a_marker_says_who_saves(tmp_path):
    ticket = open_to_save(tmp_path).open_save(4, world_size=16)
    said = json.loads((tmp_path / "4.saving").read_bytes())
    assert (said["token"], said["pid"], said["world_size"]) == (ticket.token, os.getpid(), 16)
    assert said["host"]


def test_two_savers_of_one_directory(tmp_path):
    first = open_to_save(tmp_path / "d").lock()
    with pytest.raises(CheckpointError, match=r"another save is writing to .*/d\. Remedy: wait"):
        open_to_save(tmp_path / "d").lock()
    open_to_save(tmp_path / "other").lock().release()
    first.release()
    first.release()
    open_to_save(tmp_path / "d").lock().release()


def test_a_process_that_was_forked_meanwhile_does_not_keep_the_lock(tmp_path):
    lock = open_to_save(tmp_path).lock()
    wait, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go)
        os.read(wait, 1)
        os._exit(0)
    try:
        lock.release()
        open_to_save(tmp_path).lock().release()
    finally:
        os.close(go)
        os.waitpid(child, 0)
        os.close(wait)


def test_a_lock_that_is_handed_over_outlives_its_first_holder(tmp_path):
    directory = open_to_save(tmp_path)
    lock = directory.lock()
    description, descriptor = lock.handover()
    adopted = directory.backend.locks.adopt(description, os.dup(descriptor))
    lock.detach()
    with pytest.raises(CheckpointError, match="another save"):
        directory.lock()
    adopted.release()
    directory.lock().release()


def test_a_repair_waits_for_no_save(tmp_path):
    manifest = save(tmp_path, 0)
    directory = open_to_save(tmp_path)
    lock = directory.lock()
    with pytest.raises(CheckpointError, match="another save"):
        directory.write_manifest(manifest, directory.manifest_bytes(0))
    lock.release()
    directory.write_manifest(manifest, directory.manifest_bytes(0))


def test_the_list_of_checkpoints(tmp_path):
    assert list_checkpoints(tmp_path / "nowhere") == []
    assert latest(tmp_path) is None
    assert not is_complete(tmp_path)
    for step in (30, 4):
        ticket = begin(tmp_path / f"step_{step}", parts=(0, 1))
        open_to_save(tmp_path / f"step_{step}").commit(ticket, [0, 1])
    save(tmp_path, 2)
    begin(tmp_path / "unfinished")
    (tmp_path / "step_30" / "1_0.safetensors").unlink()
    found = list_checkpoints(tmp_path)
    assert [(os.path.basename(info.path), info.unique_id, info.step, info.complete) for info in found] == [
        (tmp_path.name, 2, None, True),
        ("step_30", 0, 7, False),
        ("step_4", 0, 7, True),
    ]
    assert (found[2].world_size, found[2].keys, found[2].total_bytes) == (2, 2, 40)
    assert "1_0.safetensors is missing" in found[1].problem
    newest = latest(tmp_path)
    assert newest is not None
    assert newest.path.endswith("step_4")
    assert is_complete(tmp_path)
    assert is_complete(tmp_path, 2)
    assert not is_complete(tmp_path, 0)
    assert not is_complete(tmp_path / "unfinished")
    assert not is_complete(tmp_path / "step_30")


@pytest.mark.parametrize("is_listed", [True, False])
def test_latest_looks_again_where_what_it_has_listed_has_gone(tmp_path, monkeypatch, is_listed):
    """A manager that keeps one checkpoint saves the next and removes this one, while somebody lists the root."""
    save(tmp_path / "step_1", 0)
    if is_listed:
        begin(tmp_path / "step_0")
    right, looks = CheckpointDirectory.list_ids, []

    def list_ids(self):
        looks.append(os.path.basename(self.path))
        if looks[-1] == "step_1":
            save(tmp_path / ("step_0" if is_listed else "step_2"), 0)
            shutil.rmtree(self.path, ignore_errors=True)
        return right(self)

    monkeypatch.setattr(CheckpointDirectory, "list_ids", list_ids)
    newest = latest(tmp_path)
    assert newest is not None
    assert newest.complete
    assert os.path.basename(newest.path) == ("step_0" if is_listed else "step_2")


def test_latest_looks_once_where_nothing_goes(tmp_path, monkeypatch):
    save(tmp_path / "step_1", 0)
    begin(tmp_path / "step_2")
    right, looks = CheckpointDirectory.read_committed, []
    monkeypatch.setattr(
        CheckpointDirectory,
        "read_committed",
        lambda self, *arguments: looks.append(self.path) or right(self, *arguments),
    )
    newest = latest(tmp_path)
    assert newest is not None
    assert newest.path.endswith("step_1")
    assert len(looks) == 1


def test_what_a_rank_of_a_dead_save_writes_meanwhile_is_removed_too(tmp_path, monkeypatch):
    """Its coordinator has died, and the rank has looked while the marker was there: it leaves its files to the next."""
    ticket = open_to_save(tmp_path).open_save(0)
    directory = open_to_save(tmp_path)
    remove = directory.backend.remove

    def write_and_remove(name):
        if name == ticket.marker_file:
            for late in (ticket.data_file(1), ticket.part_file(1)):
                (tmp_path / late).write_bytes(b"late")
        remove(name)

    monkeypatch.setattr(directory.backend, "remove", write_and_remove)
    removed = remove_dead_saves(directory)
    assert sorted(removed) == sorted([ticket.marker_file, ticket.data_file(1), ticket.part_file(1)])
    assert os.listdir(tmp_path) == []


def test_a_checkpoint_is_complete_only_with_its_own_files(tmp_path):
    save(tmp_path / "a", 0)
    save(tmp_path / "b", 0, seed=3)
    shutil.copy(tmp_path / "a" / "1_0.safetensors", tmp_path / "b" / "1_0.safetensors")
    (info,) = list_checkpoints(tmp_path / "b")
    assert not info.complete
    assert "belongs to another save" in info.problem
    (tmp_path / "a" / "0.manifest").write_bytes(b"no manifest")
    (info,) = list_checkpoints(tmp_path / "a")
    assert not info.complete
    assert "is damaged or not a safetensors file" in info.problem

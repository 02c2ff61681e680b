"""Saves without a manifest are listed; those that died are removed, and nothing else is."""

from __future__ import annotations

import errno
import fcntl
import os

import numpy as np
import pytest

from paddle_flexckpt.foreign.paddle_files import open_to_save
from paddle_flexckpt.media.opening import open_backend, open_storage
from paddle_flexckpt.native.save_names import SaveNames, token_after
from paddle_flexckpt.native.unfinished import clean_up, unfinished_in, walk
from tests.transfer.samples import save


def begin(path, unique_id=None):
    """Begin a save, write some bytes of it, and return its lock, names and directory."""
    directory = open_to_save(path)
    lock, _, names = directory.begin_save(unique_id, 1)
    with open(os.path.join(path, names.data_file(0)), "wb") as file:
        file.write(bytes(1000))
    return lock, names, directory


def listing(path):
    return sorted(os.listdir(path))


def test_a_running_save_is_listed_and_left_alone(tmp_path):
    lock, names, _ = begin(tmp_path)
    (found,) = unfinished_in(open_backend(tmp_path))
    assert (found.unique_id, found.files, found.prepared) == (0, [names.marker_file, names.data_file(0)], False)
    assert found.bytes == 1000 + os.path.getsize(tmp_path / names.marker_file)
    before = listing(tmp_path)
    cleaned = clean_up(open_to_save(tmp_path))
    assert cleaned.removed == []
    assert cleaned.kept.startswith("a save is running: ")
    assert listing(tmp_path) == before
    lock.release()


def test_a_dead_save_is_removed_and_checkpoints_stay(tmp_path):
    save(tmp_path, {"w": np.ones(3, np.float32)}, world=1)
    before = listing(tmp_path)
    lock, names, _ = begin(tmp_path)
    lock.release()  # as a process that dies
    assert [each.unique_id for each in unfinished_in(open_backend(tmp_path))] == [1]
    cleaned = clean_up(open_to_save(tmp_path))
    assert sorted(cleaned.removed) == sorted([names.marker_file, names.data_file(0)])
    assert cleaned.kept == ""
    assert listing(tmp_path) == before
    assert unfinished_in(open_backend(tmp_path)) == []


def test_two_levels_below(tmp_path):
    path = tmp_path / "checkpoint-20" / "flex_checkpoint"
    begin(path)[0].release()
    found = [save.path for each in walk(open_backend(tmp_path)) for save in unfinished_in(each)]
    assert found == [str(path)]


def test_without_a_lock_nothing_is_removed(tmp_path):
    """A running save could not be told from a dead one."""
    begin(tmp_path)[0].release()
    before = listing(tmp_path)
    cleaned = clean_up(open_to_save(open_storage(tmp_path, lock=False)))
    assert cleaned.removed == []
    assert cleaned.kept.startswith("this storage has no locks")
    assert listing(tmp_path) == before


@pytest.mark.parametrize("again", [False, True])
def test_where_the_lock_is_a_lease_nothing_is_removed(again):
    """Neither by the process of the save nor by another one, which has opened the directory anew."""
    pytest.importorskip("fsspec")
    path = f"memory://test_unfinished_lease_{again}"
    directory = open_to_save(path)
    lock, _, names = directory.begin_save(None, 1)
    lock.release()
    directory = open_to_save(path) if again else directory
    (found,) = unfinished_in(directory.backend, ask=True)
    assert (found.files, found.running) == ([names.marker_file], None)
    cleaned = clean_up(directory)
    assert cleaned.removed == []
    assert "the next save of the same id removes them" in cleaned.kept
    assert directory.backend.names() == [names.marker_file]


def test_where_the_file_system_has_no_locks_nothing_is_removed(tmp_path, monkeypatch):
    begin(tmp_path)[0].release()
    before = listing(tmp_path)

    def refuse(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    (found,) = unfinished_in(open_backend(tmp_path), ask=True)
    assert found.running is None
    assert clean_up(open_to_save(tmp_path)).kept.startswith("this storage has no locks")
    assert listing(tmp_path) == before


@pytest.mark.parametrize("ended", [False, True])
def test_where_a_directory_has_shared_locks_alone_nothing_is_removed(tmp_path, monkeypatch, ended):
    """NFS refuses an exclusive lock of a descriptor that only reads: saves take a lease, and looks succeed."""
    flock = fcntl.flock

    def refuse(descriptor, operation):
        if operation & fcntl.LOCK_EX:
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock, _, _ = begin(tmp_path)
    if ended:
        lock.release()  # or another save has taken the lease over, and ended
    else:
        (found,) = unfinished_in(open_backend(tmp_path), ask=True)
        assert found.running is None
    before = listing(tmp_path)
    cleaned = clean_up(open_to_save(tmp_path))
    assert (cleaned.removed, listing(tmp_path)) == ([], before)
    assert cleaned.kept.startswith("this storage has no locks")
    lock.release()


def test_a_running_save_is_told_from_one_that_died(tmp_path):
    begin(tmp_path)[0].release()
    (died,) = unfinished_in(open_backend(tmp_path), ask=True)
    assert died.running is False
    lock, names, directory = begin(tmp_path)
    directory.mark_save(died_names := SaveNames(5, token_after(0)))
    found = {each.files[0]: each.running for each in unfinished_in(open_backend(tmp_path), ask=True)}
    assert found == {names.marker_file: True, died_names.marker_file: False, died.files[0]: False}
    assert [each.running for each in unfinished_in(open_backend(tmp_path))] == [None] * 3
    lock.release()
    assert not any(each.running for each in unfinished_in(open_backend(tmp_path), ask=True))
    open_backend(tmp_path).locks.take().release()  # nothing keeps the lock


def test_an_emptied_directory_is_removed_where_asked(tmp_path):
    for name in ("kept", "empty", "other"):
        begin(tmp_path / name)[0].release()
    (tmp_path / "other" / "notes.txt").touch()
    os.symlink(tmp_path / "empty", tmp_path / "link")
    cleaned = [clean_up(open_to_save(tmp_path / name), name != "kept") for name in ("kept", "other", "link", "empty")]
    assert [(len(each.removed), each.directory_removed) for each in cleaned] == [
        (2, False),
        (2, False),
        (2, False),
        (0, False),
    ]
    assert listing(tmp_path) == ["empty", "kept", "link", "other"]
    begin(tmp_path / "empty")[0].release()
    assert clean_up(open_to_save(tmp_path / "empty"), True).directory_removed
    assert listing(tmp_path) == ["kept", "link", "other"]

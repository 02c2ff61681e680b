"""Directories of checkpoints: ids, names, the order of a commit, and what is said about what is not there."""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError, NotDurableError, ValidationError
from paddle_flexckpt.foreign.paddle_files import PADDLE_METADATA, open_to_save
from paddle_flexckpt.media import local, local_locks
from paddle_flexckpt.media.local import LocalBackend
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.native.save_directory import SaveDirectory
from tests.crash.file_system import FileSystem
from tests.crash.job import Job
from tests.native.samples import items_of, values_of, whole
from tests.saved import short, short_names


def save(path, unique_id=None, ranks=(0, 1), seed=0):
    """A save of one small tensor per rank, rank after rank."""
    directory = open_to_save(path)
    directory.backend.make_directory()
    ticket = directory.open_save(unique_id)
    parts = []
    for rank in ranks:
        shard = whole(f"w{rank}", "float32", (5,), rank)
        items, data = items_of([shard], ticket.data_file(rank)), [values_of(shard, seed + rank).view(np.uint8)]
        parts.append(directory.write_data(ticket, items, data, world_size=len(ranks)))
    return directory.commit(ticket, parts)


def names(path) -> list[str]:
    """Names of the files but for that for Paddle's own loader, which is there whenever a data file is."""
    return sorted(set(os.listdir(path)) - {PADDLE_METADATA})


def test_a_save_leaves_data_files_and_a_manifest(tmp_path):
    path = tmp_path / "deep" / "er"
    manifest = save(path)
    assert short_names(names(path)) == ["0.manifest", "0_0-1.safetensors", "1_0-1.safetensors"]
    again = CheckpointDirectory(path).read_manifest()
    assert again.save_token == manifest.save_token
    assert again.catalog.keys == ("w0", "w1")


def test_ids(tmp_path):
    directory = CheckpointDirectory(tmp_path)
    assert directory.list_ids() == []
    for unique_id in (None, None, 12, None, 4):
        save(tmp_path, unique_id)
    assert directory.list_ids() == [0, 1, 4, 12, 13]
    assert directory.read_manifest().unique_id == 13
    assert directory.read_manifest(4).unique_id == 4


def test_the_next_id_is_above_every_file_that_is_there(tmp_path):
    directory = open_to_save(tmp_path)
    for name, expected in (
        ("3_7.safetensors", 8), (f"0_9-{1:032x}.partition", 10), ("1_11.2.safetensors", 12),
        (f"15-{1:032x}.saving", 16), ("16.3.saving", 17), ("20.manifest", 21),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(b"")
        ticket = directory.open_save(None)
        assert ticket.unique_id == expected
        (tmp_path / ticket.marker_file).unlink()
    for name in ("x_99.safetensors", "99.manifest.tmp", "model-00099.safetensors", "99"):
        (tmp_path / name).write_bytes(b"")
    assert directory.open_save(None).unique_id == 21


def test_a_replaced_id_gets_names_of_its_own(tmp_path):
    for number in range(1, 4):
        ticket = open_to_save(tmp_path).open_save(5)
        assert ticket.save_id.number == number
        (tmp_path / ticket.marker_file).unlink()
        save(tmp_path, 5, seed=number)
        assert short_names(names(tmp_path)) == [f"0_5-{number}.safetensors", f"1_5-{number}.safetensors", "5.manifest"]


def test_tokens_differ(tmp_path):
    directory = open_to_save(tmp_path)
    tokens = {directory.open_save(0).token for _ in range(20)}
    assert len(tokens) == 20
    assert all(re.fullmatch("[0-9a-f]{32}", token) for token in tokens)


@pytest.mark.parametrize("unique_id", [-1, "0", 1.0, True])
def test_an_id_that_is_no_id_is_refused(tmp_path, unique_id):
    with pytest.raises(ValidationError, match="unique_id has to be an integer >= 0"):
        open_to_save(tmp_path).open_save(unique_id)
    assert names(tmp_path) == []


def test_a_file_in_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "f").write_bytes(b"")
    for path in (tmp_path / "f", tmp_path / "f" / "g"):
        with pytest.raises(ValidationError, match="is not a directory, so nothing can be saved there"):
            open_to_save(path).begin_save(None, 1)


@pytest.fixture
def step(tmp_path, monkeypatch) -> Path:
    """A step's directory, which another manager removes, since it is empty, whenever a save is about to lock it."""
    path, lock = tmp_path / "step", local_locks._flock

    def remove_and_lock(descriptor: int, *arguments: Any, **keywords: Any) -> None:
        path.rmdir()
        lock(descriptor, *arguments, **keywords)

    monkeypatch.setattr(local_locks, "_flock", remove_and_lock)
    return path


def test_a_directory_that_somebody_else_removes_meanwhile_is_made_again(step, monkeypatch):
    remove_and_lock = local_locks._flock

    def once(*arguments: Any, **keywords: Any) -> None:
        monkeypatch.undo()
        remove_and_lock(*arguments, **keywords)

    monkeypatch.setattr(local_locks, "_flock", once)
    # It is the one that is there that is locked.
    with open_to_save(step).lock(), pytest.raises(CheckpointError, match="another save is writing"):
        open_to_save(step).lock()


def test_a_directory_that_is_removed_again_and_again_is_an_error_that_says_so(step):
    with pytest.raises(CheckpointError, match=r"step was removed by another process each time .* Remedy .FC403.: "):
        open_to_save(step).lock()


def remove_after_lock(monkeypatch, times: int, then: Callable[[str], object] = lambda path: None) -> None:
    """Have somebody else remove the directory of a save, as a manager does with empty ones, when it is locked."""
    lock, left = SaveDirectory.lock, [times]

    def lock_and_lose(self: SaveDirectory) -> Any:
        taken = lock(self)
        if left[0]:
            left[0] -= 1
            shutil.rmtree(self.path)
            then(self.path)
        return taken

    monkeypatch.setattr(SaveDirectory, "lock", lock_and_lose)


def test_a_save_has_the_right_to_the_directory_that_is_there(tmp_path, monkeypatch):
    """Else others take it for dead, and remove its files."""
    remove_after_lock(monkeypatch, 2)
    right, _, save = open_to_save(tmp_path / "step").begin_save(None, 1)
    assert names(tmp_path / "step") == [save.marker_file]
    with right, pytest.raises(CheckpointError, match="another save is writing"):
        open_to_save(tmp_path / "step").lock()


def test_a_save_does_not_begin_where_another_one_has_come_meanwhile(tmp_path, monkeypatch):
    others: list[Any] = []

    def come(path: str) -> None:
        monkeypatch.undo()
        others.append(open_to_save(path).begin_save(None, 1))

    remove_after_lock(monkeypatch, 1, come)
    with pytest.raises(CheckpointError, match="another save is writing"):
        open_to_save(tmp_path / "step").begin_save(None, 1)
    assert names(tmp_path / "step") == [others[0][2].marker_file]
    others[0][0].release()


def test_a_save_that_loses_its_directory_each_time_says_so_and_has_no_right_left(tmp_path, monkeypatch):
    remove_after_lock(monkeypatch, 1000)
    with pytest.raises(CheckpointError, match=r"step was removed by another process each time .* Remedy .FC403.: "):
        open_to_save(tmp_path / "step").begin_save(None, 1)
    monkeypatch.undo()
    open_to_save(tmp_path / "step").lock().release()


@pytest.mark.parametrize("committed", [False, True])
def test_an_fsync_that_fails_says_whether_the_checkpoint_is_there(tmp_path, monkeypatch, committed):
    save(tmp_path)
    sync = local.sync_path

    def refuse(path: str) -> None:
        if ("1.manifest" in os.listdir(path)) == committed:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        sync(path)

    monkeypatch.setattr(local, "sync_path", refuse)
    if committed:
        with pytest.raises(
            NotDurableError, match=r"\(id 1\) is in place, but may be undone by a loss of power.*Remedy"
        ):
            save(tmp_path)
    else:
        with pytest.raises(OSError, match="Input/output error"):
            save(tmp_path)
    assert CheckpointDirectory(tmp_path).list_ids() == ([0, 1] if committed else [0])


def test_the_order_of_a_commit(tmp_path):
    save(tmp_path, 0, seed=5)
    with FileSystem(str(tmp_path), Job(1)) as files:
        save(tmp_path, 0)
    changes = [call for call in files.calls if call.name not in ("close", "flock", "unlock") and not call.refused]
    # What is there is opened to be read or locked.
    changes = [call for call in changes if call.name != "open" or call.created or call.path == "."]
    seen = [(call.name, re.sub(r"\.[0-9a-f]{32}\.", ".", short(call.target or call.path))) for call in changes]
    home = "."
    # the data files are durable before anything is said of them
    synced = [("fsync", f"{rank}_0-2.safetensors") for rank in (0, 1)]
    last = seen.index(synced[1])
    assert seen.index(synced[0]) < last
    assert seen[last + 1 : last + 9] == [
        ("open", home), ("fsync", home),  # the data files' names are durable
        ("open", "0.manifest.tmp"), ("write", "0.manifest.tmp"), ("fsync", "0.manifest.tmp"),
        ("rename", "0.manifest"),
        ("open", home), ("fsync", home),  # and so is the manifest's
    ]  # fmt: skip
    # the marker is durable before the first data file
    marker = [i for i, (_, name) in enumerate(seen) if name == "0-2.saving"]
    first = seen.index(("open", "0_0-2.safetensors"))
    assert [seen[i][0] for i in marker] == ["open", "write", "fsync", "unlink"]
    assert seen[marker[2] + 1 : first] == [("open", home), ("fsync", home)]
    # then Paddle's own loader is told, before the files go that it may have in mind
    told = f"{PADDLE_METADATA}.tmp"
    assert seen[last + 9 : last + 15] == [
        ("open", told), ("write", told), ("fsync", told), ("rename", PADDLE_METADATA), ("open", home), ("fsync", home)
    ]  # fmt: skip
    # only then go the old files, and for good before the marker goes
    rest = seen[last + 15 :]
    assert rest[-3:] == [("open", home), ("fsync", home), ("unlink", "0-2.saving")]
    assert sorted(call for call in rest[:-3] if call[0] == "unlink") == [
        ("unlink", "0_0-1.safetensors"), ("unlink", "1_0-1.safetensors"),
    ]  # fmt: skip


def test_nothing_is_removed_but_what_the_replaced_id_left(tmp_path):
    save(tmp_path, 1)
    others = ("notes.txt", "0_3.safetensors", "0_13.safetensors", "model.safetensors", "0_1.bin", "config.json")
    for name in others:
        (tmp_path / name).write_bytes(b"mine")
    first, second = save(tmp_path, 0), save(tmp_path, 1)
    assert names(tmp_path) == sorted([*others, "0.manifest", *first.files, "1.manifest", *second.files])


def test_leftovers_of_an_older_version_do_not_disturb(tmp_path):
    save(tmp_path, 0)
    for name in ("0_1.safetensors", "1_1.part", f"1.manifest.{7:032x}.tmp", "1_1.1.safetensors"):
        (tmp_path / name).write_bytes(b"half")
    directory = CheckpointDirectory(tmp_path)
    assert directory.list_ids() == [0]
    assert directory.read_manifest().unique_id == 0
    assert save(tmp_path).unique_id == 2
    assert "0_1.safetensors" in names(tmp_path), "no marker speaks of it"
    save(tmp_path, 1)
    files = [f"{rank}_{save_id}.safetensors" for rank in (0, 1) for save_id in ("0-1", "1-3", "2-2")]
    assert short_names(names(tmp_path)) == sorted(["0.manifest", "1.manifest", "2.manifest", *files])


def test_a_part_of_an_earlier_save_is_refused(tmp_path):
    directory = open_to_save(tmp_path)
    old = directory.open_save(0)
    (tmp_path / old.marker_file).unlink()
    new, parts = directory.open_save(0), []
    for rank, ticket in enumerate((old, new)):
        items = items_of([whole("w", "uint8", (1,), rank)], ticket.data_file(rank))
        parts.append(directory.write_data(ticket, items, [np.zeros(1, dtype=np.uint8)], world_size=2))
    with pytest.raises(ValidationError, match="different saves"):
        directory.commit(new, parts)
    assert directory.list_ids() == []


def test_discard_removes_all_ranks_files_and_keeps_a_committed_saves(tmp_path):
    directory = open_to_save(tmp_path)
    ticket = directory.open_save(0)
    for name in (ticket.data_file(0), ticket.data_file(1)):
        (tmp_path / name).write_bytes(b"")
    assert PADDLE_METADATA in os.listdir(tmp_path)
    directory.discard(ticket, [0, 1])
    assert os.listdir(tmp_path) == []

    (tmp_path / ticket.data_file(0)).write_bytes(b"data")
    (tmp_path / "0.manifest").write_bytes(b"..." + ticket.token.encode())
    directory.discard(ticket, [0])
    assert names(tmp_path) == ["0.manifest", ticket.data_file(0)]


def test_discard_removes_files_that_a_listing_does_not_show_yet(tmp_path, monkeypatch):
    directory = open_to_save(tmp_path)
    ticket = directory.open_save(0)
    for name in (ticket.data_file(1), ticket.partition_file(2)):
        (tmp_path / name).write_bytes(b"")
    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, "names", lambda self, *kind: [ticket.marker_file, PADDLE_METADATA])
        directory.discard(ticket, [0, 1], partitions=3)
    assert os.listdir(tmp_path) == []


def test_a_late_rank_that_loses_its_lease_while_it_removes_says_nothing(tmp_path, monkeypatch):
    """The failure that it is about to report must not be hidden."""
    late = open_to_save(tmp_path)
    ticket = late.open_save(0)
    (tmp_path / ticket.marker_file).unlink()

    def refuse(name: str) -> None:
        raise CheckpointError("somebody has taken the right to save over")

    monkeypatch.setattr(late.backend, "remove", refuse)
    late.discard_late(ticket, [0])


def test_a_marker_that_cannot_be_written_does_not_take_another_s_along(tmp_path, monkeypatch):
    directory = open_to_save(tmp_path)
    directory.open_save(0)
    before = names(tmp_path)

    def refuse() -> None:
        raise OSError(5, "Input/output error")

    late = open_to_save(tmp_path)
    monkeypatch.setattr(late.backend, "create", lambda *_: refuse())
    with pytest.raises(OSError, match="Input/output"):
        late.open_save(0)
    assert names(tmp_path) == before


def test_discard_lists_the_directory_once(tmp_path, monkeypatch):
    directory = open_to_save(tmp_path)
    ticket = directory.open_save(0)
    for name in (ticket.data_file(0), ticket.data_file(1), ticket.partition_file(0)):
        (tmp_path / name).write_bytes(b"")
    # The companion is looked for once more.
    listings, list_names = [], LocalBackend.names
    monkeypatch.setattr(LocalBackend, "names", lambda self, *kind: listings.append(1) or list_names(self, *kind))
    directory.discard(ticket, [0, 1])
    assert names(tmp_path) == []
    assert len(listings) == 2


def test_a_renamed_manifest_is_noticed(tmp_path):
    save(tmp_path, 3)
    (tmp_path / "3.manifest").rename(tmp_path / "8.manifest")
    with pytest.raises(CorruptCheckpointError, match=r"8\.manifest is the manifest of id 3"):
        CheckpointDirectory(tmp_path).read_manifest()


def test_the_process_of_the_other_save_is_named(tmp_path):
    lock, _, save = open_to_save(tmp_path).begin_save(None, 1)
    me = re.escape(f"another save is writing to {tmp_path} (process {os.getpid()} on {socket.gethostname()}). Remedy")
    with lock, pytest.raises(CheckpointError, match=me):
        open_to_save(tmp_path).lock()
    (tmp_path / save.marker_file).write_text("[]")
    with open_to_save(tmp_path).lock(), pytest.raises(CheckpointError, match=f"writing to {tmp_path}. Remedy"):
        open_to_save(tmp_path).lock()

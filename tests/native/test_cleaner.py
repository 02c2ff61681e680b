"""What saves leave behind, who removes it, and what stays; who may save, and what is said to exist."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil

import numpy as np
import pytest

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.foreign.paddle_files import PADDLE_METADATA, open_to_save
from paddle_flexckpt.media.lease import LeaseLocks
from paddle_flexckpt.media.local import LocalBackend
from paddle_flexckpt.native.directory import CheckpointDirectory, LockedManifest, is_complete, latest, list_checkpoints
from paddle_flexckpt.native.save_names import SaveNames, token_after
from tests.native.samples import items_of, values_of, whole
from tests.native.test_directory import names, save
from tests.saved import data_file, short_names

RANDOM = "0123456789abcdef" * 2


def begin(path, unique_id=None, ranks=(0, 1)) -> SaveNames:
    """A save that dies when some ranks have written their data files."""
    return begin_whole(path, unique_id, ranks)[0]


def begin_whole(path, unique_id=None, ranks=(0, 1)):
    """The names of a save that has written everything but its manifest, and its parts."""
    directory = open_to_save(path)
    directory.backend.make_directory()
    ticket = directory.open_save(unique_id, len(ranks))
    return ticket, [write(path, ticket, rank, len(ranks)) for rank in ranks]


def write(path, ticket: SaveNames, rank: int, world: int = 2):
    """What a rank writes for a save, whether it is over or not; returns its part."""
    shard = whole(f"w{rank}", "float32", (5,), rank)
    items = items_of([shard], ticket.data_file(rank))
    return open_to_save(path).write_data(ticket, items, [values_of(shard, 9).view(np.uint8)], world_size=world, step=7)


def remove_dead_saves(path, *arguments, **keywords) -> list[str]:
    return open_to_save(path).cleaner.remove_dead_saves(*arguments, **keywords)


def begin_older(path, unique_id: int = 5, generation: int = 0, token: str = RANDOM) -> list[str]:
    """A dead save of a version without tokens in names; returns its files, the marker last."""
    save_id = f"{unique_id}.{generation}" if generation else str(unique_id)
    content = {"unique_id": unique_id, "generation": generation, "token": token, "nodes": 1}
    left = [f"{rank}_{save_id}.safetensors" for rank in (0, 1)] + [f"0_{save_id}-{token}.part", f"{save_id}.saving"]
    for name in left:
        (path / name).write_bytes(json.dumps(content).encode())
    return left


@pytest.fixture
def leased(monkeypatch):
    """The right to save can run out, as it can where a lease stands for a lock."""
    monkeypatch.setattr(LeaseLocks, "can_run_out", True)


def test_a_dead_save_of_a_new_id_is_removed_by_the_next_save_whatever_its_id(tmp_path):
    save(tmp_path, 0)
    before = names(tmp_path)
    dead = begin(tmp_path, 5)
    left = {dead.data_file(0), dead.data_file(1), dead.marker_file}
    assert {*names(tmp_path)} - {*before} == left
    assert short_names(left) == ["0_5-2.safetensors", "1_5-2.safetensors", "5-2.saving"]
    assert {*remove_dead_saves(tmp_path)} == left
    assert names(tmp_path) == before
    begin(tmp_path, 5)
    last = save(tmp_path, 1)
    assert names(tmp_path) == sorted([*before, "1.manifest", *last.files])


def test_a_save_that_has_never_been_committed_leaves_an_empty_directory(tmp_path):
    begin(tmp_path, 5)
    assert PADDLE_METADATA in os.listdir(tmp_path), "it keeps Paddle's loader from what is not complete"
    remove_dead_saves(tmp_path)
    assert os.listdir(tmp_path) == []


def test_all_dead_saves_go_at_once(tmp_path):
    for unique_id in (5, 5, 6):
        begin(tmp_path, unique_id)
    begin_older(tmp_path, 5)
    begin_older(tmp_path, 5, 3)
    remove_dead_saves(tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("generation", [0, 2])
def test_a_dead_save_of_an_older_version_goes_and_what_it_was_to_replace_stays(tmp_path, generation):
    save(tmp_path, 5)
    before = names(tmp_path)
    left = begin_older(tmp_path, 5, generation)
    assert {*remove_dead_saves(tmp_path)} == {*left}
    assert names(tmp_path) == before


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"unique_id": 9, "generation": 7, "token": "x"}'])
@pytest.mark.parametrize("marker", ["0.1.saving", f"0-{2:032x}.saving"])
def test_the_name_of_a_marker_says_whose_it_is_whatever_is_in_it(tmp_path, marker, content):
    save(tmp_path, 0)
    before = names(tmp_path)
    stem = marker[: -len(".saving")]
    left = [f"0_{stem}.safetensors", f"3_{stem}.partition", marker]
    for name in left:
        (tmp_path / name).write_bytes(content)
    assert {*remove_dead_saves(tmp_path)} == {*left}
    assert names(tmp_path) == before


def test_manifests_and_companions_that_were_never_put_in_place_go_and_other_files_stay(tmp_path):
    begin(tmp_path, 5)
    halves = [f"5.manifest.{RANDOM}.tmp", f"8.manifest.{RANDOM}.tmp", f"{PADDLE_METADATA}.{RANDOM}.tmp"]
    messages = [f"0_5.part.{RANDOM}.tmp", f"1_5.2.failed.{RANDOM}.tmp", f"0_6-{RANDOM}.part.{RANDOM}.tmp"]
    others = ["0_5.part.tmp", f"0_5.safetensors.{RANDOM}.tmp", "5.manifest.tmp", f"5.manifest.{RANDOM}", "5.saving.tmp"]
    for name in (*halves, *messages, *others):
        (tmp_path / name).write_bytes(b"half")
    remove_dead_saves(tmp_path)
    assert names(tmp_path) == sorted(others)


@pytest.mark.parametrize("save_id", ["5", "5.2", f"5-{RANDOM}"])
def test_messages_of_older_versions_go_and_the_files_of_which_they_speak_stay(tmp_path, save_id):
    """No marker names these files, so their manifest may be lost."""
    messages = [f"0_{save_id}.late", f"1_{save_id}.part", f"0_{save_id}.decided", f"1_{save_id}.failed"]
    files = [f"0_{save_id}.safetensors", f"1_{save_id}.safetensors"]
    for name in (*messages, *files):
        (tmp_path / name).write_bytes(b"")
    assert sorted(remove_dead_saves(tmp_path)) == sorted(messages)
    assert names(tmp_path) == files


def test_a_marker_that_goes_between_the_listing_and_the_look_is_nobodys(tmp_path):
    """A rank of a save that has failed removes its files, and the last one the marker, without the lock."""
    save(tmp_path, 0)
    before = names(tmp_path)
    begin(tmp_path, 5)
    listed = names(tmp_path)
    for name in {*listed} - {*before}:
        os.remove(tmp_path / name)
    remove_dead_saves(tmp_path, names=listed)
    assert names(tmp_path) == before


def test_so_it_is_on_a_node(tmp_path, monkeypatch):
    save(tmp_path, 0)
    node = open_to_save(tmp_path)
    before = node.known_saves()
    gone = f"5-{token_after(1)}.saving"
    monkeypatch.setattr(node.backend, "names", lambda: [*names(tmp_path), gone])
    assert node.known_saves() == before
    node.publish_prepared({before.published[0]})
    assert node.known_saves() == before


def test_a_dead_replacement_leaves_what_it_was_to_replace(tmp_path):
    save(tmp_path, 3, seed=1)
    before = names(tmp_path)
    manifest = (tmp_path / "3.manifest").read_bytes()
    begin(tmp_path, 3)
    (tmp_path / f"3.manifest.{RANDOM}.tmp").write_bytes(b"half")
    remove_dead_saves(tmp_path)
    assert names(tmp_path) == before
    assert (tmp_path / "3.manifest").read_bytes() == manifest


def died_after_its_commit(path, unique_id: int) -> list[str]:
    """A save that has replaced a checkpoint, and died before it removed anything; returns what has to be left."""
    old = {name: (path / name).read_bytes() for name in names(path)}
    dead, parts = begin_whole(path, unique_id)
    left = {dead.marker_file: (path / dead.marker_file).read_bytes()}
    open_to_save(path).commit(dead, parts)
    committed = names(path)
    for name, content in {**old, **left}.items():
        if not (path / name).exists():
            (path / name).write_bytes(content)
    assert {dead.marker_file, *old} < {*names(path)}
    return committed


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("next_id", [None, 4, 3])
def test_a_save_that_died_after_its_commit_is_kept_and_tidied(tmp_path, next_id, older):
    save(tmp_path, 3, seed=1)
    if older:
        for rank in (0, 1):
            (tmp_path / f"{rank}_3.safetensors").write_bytes(b"of a checkpoint that an older version has replaced")
    committed = died_after_its_commit(tmp_path, 3)
    if next_id is None:
        remove_dead_saves(tmp_path)
        assert names(tmp_path) == committed
    elif next_id == 4:
        last = save(tmp_path, 4)
        assert names(tmp_path) == sorted([*committed, "4.manifest", *last.files])
    else:
        last = save(tmp_path, 3)
        assert names(tmp_path) == sorted(["3.manifest", *last.files])
        return
    directory = open_to_save(tmp_path)
    directory.check_complete(directory.read_manifest(3))
    assert directory.read_manifest(3).step == 7


def test_the_companion_tells_of_a_save_that_died_right_after_its_commit(tmp_path):
    save(tmp_path, 3, seed=1)
    died_after_its_commit(tmp_path, 3)
    told = (tmp_path / PADDLE_METADATA).read_bytes()
    (tmp_path / PADDLE_METADATA).write_bytes(b"of the checkpoint that was replaced")
    remove_dead_saves(tmp_path)
    assert (tmp_path / PADDLE_METADATA).read_bytes() == told


@pytest.mark.parametrize("older", [False, True])
def test_files_that_no_marker_speaks_of_stay_as_their_manifest_may_be_lost(tmp_path, older):
    if older:
        for name in ("0_0.safetensors", "1_0.safetensors", "0_0.partition"):
            (tmp_path / name).write_bytes(b"data")
    else:
        save(tmp_path, 0)
        (tmp_path / "0.manifest").unlink()
    before = names(tmp_path)
    save(tmp_path)
    assert {*before} < {*names(tmp_path)}
    assert remove_dead_saves(tmp_path) == []


def test_a_save_leaves_the_data_files_of_a_lost_manifest_of_its_id(tmp_path, caplog):
    """A repair may need them; the save says so. The one after it replaces a checkpoint, with all files of its id."""
    first = save(tmp_path, 0)
    (tmp_path / "0.manifest").unlink()
    last = save(tmp_path, 0)
    assert names(tmp_path) == sorted(["0.manifest", *first.files, *last.files])
    assert f"flexckpt repair {tmp_path} --id 0" in caplog.text and "its manifest has been lost" in caplog.text
    last = save(tmp_path, 0)
    assert names(tmp_path) == sorted(["0.manifest", *last.files])


def test_the_next_save_of_their_id_removes_what_no_repair_needs(tmp_path):
    for name in ("0_0.safetensors", "1_0.4.safetensors", "0_0.partition", "0_0.7.prepared"):
        (tmp_path / name).write_bytes(b"of a lost manifest")
    kept = [f"0_{other}.safetensors" for other in (1, "1.4", f"1-{RANDOM}", 10)]
    for name in kept:
        (tmp_path / name).write_bytes(b"of another one")
    last = save(tmp_path, 0)
    assert names(tmp_path) == sorted(["0.manifest", *last.files, *kept])


def test_a_save_that_is_going_on_is_left_alone(tmp_path):
    ticket = begin(tmp_path, 2)
    (tmp_path / ticket.partition_file(1)).write_bytes(b"rows")
    before = names(tmp_path)
    assert remove_dead_saves(tmp_path, ticket) == []
    assert names(tmp_path) == before


def test_a_committed_save_with_a_damaged_manifest_is_not_touched(tmp_path):
    ticket, parts = begin_whole(tmp_path, 0)
    said = (tmp_path / ticket.marker_file).read_bytes()
    open_to_save(tmp_path).commit(ticket, parts)
    manifest = bytearray((tmp_path / "0.manifest").read_bytes())
    manifest[-1] ^= 1
    (tmp_path / "0.manifest").write_bytes(manifest)
    (tmp_path / ticket.marker_file).write_bytes(said)
    before = names(tmp_path)
    assert remove_dead_saves(tmp_path) == []
    assert names(tmp_path) == before
    last = save(tmp_path, 0)
    assert names(tmp_path) == sorted(["0.manifest", *last.files])


def test_a_replaced_checkpoint_that_is_being_read_stays_until_the_next_save_of_its_id(tmp_path):
    save(tmp_path, 0)
    with LockedManifest(CheckpointDirectory(tmp_path), 0) as manifest:
        second = save(tmp_path, 0)
        assert names(tmp_path) == sorted(["0.manifest", *manifest.files, *second.files])
        other = save(tmp_path, 1)
        remove_dead_saves(tmp_path)
        CheckpointDirectory(tmp_path).check_complete(manifest)
    last = save(tmp_path, 0)
    assert names(tmp_path) == sorted(["0.manifest", *last.files, "1.manifest", *other.files])


def test_a_rank_that_comes_late_leaves_a_checkpoint_that_was_replaced_to_its_readers(tmp_path):
    """It was stopped in the commit of its save, and finds that over: another one is in place."""
    ticket, parts = begin_whole(tmp_path, 0)
    open_to_save(tmp_path).commit(ticket, parts)
    with LockedManifest(CheckpointDirectory(tmp_path), 0) as manifest:
        second = save(tmp_path, 0)
        open_to_save(tmp_path).discard_late(ticket, [1])
        CheckpointDirectory(tmp_path).check_complete(manifest)
    assert names(tmp_path) == sorted(["0.manifest", *manifest.files, *second.files])
    third = save(tmp_path, 0)
    assert names(tmp_path) == sorted(["0.manifest", *third.files])


def test_where_readers_have_no_locks_a_rank_that_comes_late_removes_its_file(tmp_path, monkeypatch):
    """Nobody knows whether the file is being read, and the next save would remove it at once."""
    ticket, parts = begin_whole(tmp_path, 0)
    late = (tmp_path / ticket.data_file(1)).read_bytes()
    open_to_save(tmp_path).commit(ticket, parts)
    second = save(tmp_path, 0)
    (tmp_path / ticket.data_file(1)).write_bytes(late)

    def flock(descriptor, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", flock)
        open_to_save(tmp_path).discard_late(ticket, [1])
    assert names(tmp_path) == sorted(["0.manifest", *second.files])


def test_what_is_prepared_stays_until_its_id_is_saved_or_its_save_is_aborted(tmp_path):
    for unique_id in (0, 1):
        dead = begin(tmp_path, unique_id)
        (tmp_path / dead.prepared_file(0)).write_bytes(b"prepared")
    before = names(tmp_path)
    assert remove_dead_saves(tmp_path) == []
    save(tmp_path, 2)
    assert {*before} < {*names(tmp_path)}
    last = save(tmp_path, 0)
    left = {name for name in before if "_1-" in name or name.startswith("1-")}
    assert {*names(tmp_path)} - {"2.manifest", *open_to_save(tmp_path).read_manifest(2).files} == {
        "0.manifest", *last.files, *left
    }  # fmt: skip
    assert {*remove_dead_saves(tmp_path, aborted=[dead.token])} == left


def test_where_the_right_to_save_can_run_out_dead_saves_go_when_the_own_one_is_in_place(tmp_path, leased):
    """One of them may be stopped right before its commit."""
    dead, other = begin(tmp_path, 0), begin(tmp_path, 7)
    (tmp_path / f"0.manifest.{RANDOM}.tmp").write_bytes(b"it would be put in place late")
    directory = open_to_save(tmp_path)
    ticket = directory.open_save(0)
    assert directory.cleaner.remove_dead_saves(ticket) == [f"0.manifest.{RANDOM}.tmp"]
    assert {dead.marker_file, dead.data_file(0), other.marker_file, other.data_file(0)} < {*names(tmp_path)}
    committed = directory.commit(ticket, [write(tmp_path, ticket, rank) for rank in (0, 1)])
    assert names(tmp_path) == sorted(["0.manifest", *committed.files])


def test_so_they_do_if_nobody_saves_in_place_of_them(tmp_path, leased):
    begin(tmp_path, 0)
    remove_dead_saves(tmp_path)
    assert os.listdir(tmp_path) == []


def test_nothing_goes_if_the_right_to_save_has_been_lost_since_the_listing(tmp_path, monkeypatch):
    begin(tmp_path, 0)
    directory = open_to_save(tmp_path)
    before = names(tmp_path)

    def lost() -> None:
        raise CheckpointError("somebody has taken the right to save over")

    monkeypatch.setattr(directory.backend.locks, "ensure_held", lost)
    with pytest.raises(CheckpointError, match="taken the right to save over"):
        directory.cleaner.remove_dead_saves()
    assert names(tmp_path) == before


@pytest.mark.parametrize("late", [False, True])
def test_files_go_before_their_marker_and_for_good(tmp_path, monkeypatch, late):
    """Else nobody would look for those that a crash has left."""
    dead = begin(tmp_path, 0)
    (tmp_path / dead.partition_file(0)).write_bytes(b"rows")
    directory = open_to_save(tmp_path)
    done = []
    for name in ("remove", "sync"):
        right = getattr(directory.backend, name)
        monkeypatch.setattr(
            directory.backend, name, lambda *args, right=right, name=name: (done.append((name, *args)), right(*args))[1]
        )
    if late:
        directory.discard(dead, [0, 1])
    else:
        directory.cleaner.remove_dead_saves()
    files = {("remove", dead.data_file(0)), ("remove", dead.data_file(1)), ("remove", dead.partition_file(0))}
    marker = done.index(("remove", dead.marker_file))
    assert files <= {*done[: done.index(("sync",))]} and done.index(("sync",)) < marker
    assert os.listdir(tmp_path) == []


def test_what_a_listing_does_not_show_yet_stays_with_the_marker_of_its_save(tmp_path):
    """A network's listing may be old. It shows the marker by the time that it shows the files, or nothing."""
    dead = begin(tmp_path, 0)
    listed = [name for name in os.listdir(tmp_path) if name != dead.marker_file]
    assert remove_dead_saves(tmp_path, names=listed) == []
    assert {dead.marker_file, dead.data_file(0)} < {*names(tmp_path)}
    remove_dead_saves(tmp_path)
    assert os.listdir(tmp_path) == []


def test_saves_that_do_not_list_each_other_do_each_other_no_harm(tmp_path):
    saves = []
    for _ in range(3):
        ticket = open_to_save(tmp_path).open_save(0, names=[])
        parts = [write(tmp_path, ticket, rank) for rank in (0, 1)]
        saves.append((ticket, parts))
    assert len({ticket.token for ticket, _ in saves}) == 3
    (first, _), (second, parts), (third, _) = saves
    open_to_save(tmp_path).discard(first, [0, 1])
    assert {second.data_file(0), third.data_file(0)} < {*names(tmp_path)}
    committed = open_to_save(tmp_path).commit(second, parts)
    assert names(tmp_path) == sorted(["0.manifest", *committed.files])
    open_to_save(tmp_path).discard(third, [0, 1])
    assert names(tmp_path) == sorted(["0.manifest", *committed.files])


def test_no_process_of_a_dead_save_harms_the_save_that_has_replaced_it(tmp_path):
    dead = begin(tmp_path, 0)
    last = save(tmp_path, 0)
    late = open_to_save(tmp_path)
    parts = [write(tmp_path, dead, rank) for rank in (0, 1)]
    late.discard_late(dead, [0])
    late.discard(dead, [1])
    assert names(tmp_path) == sorted(["0.manifest", *last.files])
    with pytest.raises(CheckpointError, match="nothing was committed"):
        late.commit(dead, parts)
    late.check_complete(late.read_manifest(0))
    assert late.read_manifest(0).save_token == last.save_token


def test_what_a_rank_of_a_dead_save_writes_meanwhile_is_removed_too(tmp_path, monkeypatch):
    """Its coordinator has died, and the rank has looked while the marker was there: it leaves its files to the next."""
    ticket = open_to_save(tmp_path).open_save(0)
    directory = open_to_save(tmp_path)
    remove = directory.backend.remove

    def write_and_remove(name):
        if name == ticket.marker_file:
            (tmp_path / ticket.data_file(1)).write_bytes(b"late")
        remove(name)

    monkeypatch.setattr(directory.backend, "remove", write_and_remove)
    removed = directory.cleaner.remove_dead_saves()
    assert sorted(removed) == sorted([ticket.marker_file, ticket.data_file(1)])
    assert os.listdir(tmp_path) == []


def test_unfinished_uploads_of_dead_saves_go_and_no_others(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(LocalBackend, "remove_unfinished", lambda self, wanted: asked.append(wanted), raising=False)
    remove_dead_saves(tmp_path)
    assert asked == []
    dead = begin(tmp_path, 0)
    older = begin_older(tmp_path, 5, 2)
    own = open_to_save(tmp_path).open_save(0)
    remove_dead_saves(tmp_path, own)
    (wanted,) = asked
    assert [wanted(name) for name in (dead.data_file(7), dead.partition_file(3), dead.prepared_file(0), older[0])] == (
        [True] * 4
    )
    others = [own.data_file(0), "0_5.safetensors", f"0_0-{RANDOM}.safetensors", "0.manifest", "model.safetensors"]
    assert [wanted(name) for name in others] == [False] * 5
    open_to_save(tmp_path).discard(own)
    assert [asked[-1](name) for name in (own.data_file(0), dead.data_file(0))] == [True, False]


def test_a_store_that_does_not_show_unfinished_uploads_is_a_warning(tmp_path, monkeypatch, caplog):
    def refuse(self, wanted):
        raise OSError(13, "Permission denied")

    monkeypatch.setattr(LocalBackend, "remove_unfinished", refuse, raising=False)
    begin(tmp_path, 0)
    remove_dead_saves(tmp_path)
    assert "could not be looked for" in caplog.text and os.listdir(tmp_path) == []


def test_partitions_that_a_repair_does_without_go_and_those_of_a_live_save_stay(tmp_path):
    manifest = save(tmp_path, 0)
    stem = manifest.files[0].partition("_")[2].removesuffix(".safetensors")
    (tmp_path / f"3_{stem}.partition").write_bytes(b"rows that are in the manifest now")
    stay = [f"3_0-{RANDOM}.partition", "3_0.partition", "3_0.2.partition", f"0_7-{RANDOM}.partition"]
    for name in stay:
        (tmp_path / name).write_bytes(b"of a manifest that may be lost")
    assert remove_dead_saves(tmp_path) == [f"3_{stem}.partition"]
    assert {*stay} < {*names(tmp_path)}


@pytest.mark.parametrize("is_there", ["marker", "manifest", "neither"])
def test_a_rank_that_comes_late_removes_its_own_files_if_its_save_is_over(tmp_path, is_there):
    ticket, parts = begin_whole(tmp_path, 0)
    if is_there == "manifest":
        open_to_save(tmp_path).commit(ticket, parts)
    elif is_there == "neither":
        (tmp_path / ticket.marker_file).unlink()
    before = names(tmp_path)
    open_to_save(tmp_path).discard_late(ticket, [0])
    assert names(tmp_path) == ([] if is_there == "neither" else before)


def test_a_late_rank_of_a_dead_first_save_leaves_the_companion_to_others(tmp_path):
    ticket = begin(tmp_path, 0)
    remove_dead_saves(tmp_path)
    other = begin(tmp_path, 1)
    write(tmp_path, ticket, 1)
    open_to_save(tmp_path).discard_late(ticket, [1])
    assert PADDLE_METADATA in os.listdir(tmp_path), "files are here that no manifest names"
    assert names(tmp_path) == sorted([other.marker_file, other.data_file(0), other.data_file(1)])


def test_a_removal_that_is_refused_says_that_the_checkpoint_is_complete(tmp_path, monkeypatch):
    save(tmp_path, 0)
    directory = open_to_save(tmp_path)

    def refuse(name):
        raise OSError(5, "Input/output error", name)

    monkeypatch.setattr(directory.backend, "remove", refuse)
    ticket = directory.open_save(0)
    parts = [write(tmp_path, ticket, rank) for rank in (0, 1)]
    with pytest.raises(
        CheckpointError, match=r"\(id 0\) is complete, but .* Remedy .FC404.: the next save here tries again"
    ):
        directory.commit(ticket, parts)
    assert directory.is_committed(ticket)
    last = save(tmp_path, 0)
    assert names(tmp_path) == sorted(["0.manifest", *last.files])


def test_a_marker_says_who_saves(tmp_path):
    ticket = open_to_save(tmp_path).open_save(4, world_size=16)
    said = json.loads((tmp_path / ticket.marker_file).read_bytes())
    assert (said["token"], said["pid"], said["world_size"]) == (ticket.token, os.getpid(), 16)
    assert said["host"]


def test_two_savers_of_one_directory(tmp_path):
    first = open_to_save(tmp_path / "d").lock()
    with pytest.raises(CheckpointError, match=r"another save is writing to .*/d\. Remedy .FC403.: wait"):
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
        open_to_save(tmp_path / f"step_{step}").commit(*begin_whole(tmp_path / f"step_{step}"))
    save(tmp_path, 2)
    begin(tmp_path / "unfinished")
    removed = tmp_path / "step_30" / data_file(tmp_path / "step_30", 1)
    removed.unlink()
    found = list_checkpoints(tmp_path)
    assert [(os.path.basename(info.path), info.unique_id, info.step, info.complete) for info in found] == [
        (tmp_path.name, 2, None, True),
        ("step_30", 0, 7, False),
        ("step_4", 0, 7, True),
    ]
    assert (found[2].world_size, found[2].keys, found[2].total_bytes) == (2, 2, 40)
    assert f"{removed.name} is missing" in found[1].problem
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


def test_a_checkpoint_is_complete_only_with_its_own_files(tmp_path):
    save(tmp_path / "a", 0)
    save(tmp_path / "b", 0, seed=3)
    a, b = tmp_path / "a", tmp_path / "b"
    shutil.copy(a / data_file(a, 1), b / data_file(b, 1))
    (info,) = list_checkpoints(tmp_path / "b")
    assert not info.complete
    assert "belongs to another save" in info.problem
    (tmp_path / "a" / "0.manifest").write_bytes(b"no manifest")
    (info,) = list_checkpoints(tmp_path / "a")
    assert not info.complete
    assert "is damaged or not a safetensors file" in info.problem

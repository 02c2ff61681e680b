"""Reading locks: what is being read is neither removed nor robbed of its files."""

from __future__ import annotations

import errno
import fcntl
import os
import threading

import numpy as np
import pytest

from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError, ValidationError
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.media import local_locks
from paddle_flexckpt.media.backend import publish
from paddle_flexckpt.media.local_locks import DirectoryLock
from paddle_flexckpt.media.opening import open_backend, open_storage
from paddle_flexckpt.native.directory import CheckpointDirectory, LockedManifest
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.tools import verification as verification_module
from paddle_flexckpt.tools.export import export_safetensors
from paddle_flexckpt.tools.verification import verify_checkpoint
from paddle_flexckpt.transfer import files as files_module
from tests.native.test_directory import names, save
from tests.saved import data_file

MANIFEST = "0.manifest"


@pytest.fixture
def backend(tmp_path):
    (tmp_path / MANIFEST).write_bytes(b"one")
    return open_backend(tmp_path)


def is_held(backend, name=MANIFEST) -> bool:
    claim = backend.locks.claim(name)
    if claim is not None:
        claim.release()
    return claim is None


def test_readers_share_and_keep_the_one_who_removes_out(backend):
    assert backend.locks.protect_readers(MANIFEST)
    first, second = backend.locks.share(MANIFEST), backend.locks.share(MANIFEST)
    assert is_held(backend) and backend.locks.protect_readers(MANIFEST)
    first.release()
    first.release()
    assert is_held(backend)
    second.release()
    assert not is_held(backend)


def test_there_is_one_claim_at_a_time(backend):
    with backend.locks.claim(MANIFEST):
        assert backend.locks.claim(MANIFEST) is None
    assert not is_held(backend)


def test_a_file_that_is_not_there(backend):
    assert not is_held(backend, "7.manifest")
    with pytest.raises(FileNotFoundError):
        backend.locks.share("7.manifest")


def test_a_link_out_of_the_directory_is_not_held(tmp_path, backend):
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / MANIFEST).symlink_to(tmp_path / MANIFEST)
    with pytest.raises(CorruptCheckpointError, match="is a link out of the checkpoint's directory"):
        open_backend(inside).locks.share(MANIFEST)


def test_a_read_only_manifest_is_claimed_as_well(tmp_path, backend):
    os.chmod(tmp_path / MANIFEST, 0o444)
    with backend.locks.share(MANIFEST):
        assert is_held(backend)
    assert not is_held(backend)


@pytest.mark.parametrize("fate", ["removed", "replaced", "left"])
def test_a_reader_waits_for_a_claim_and_looks_again(tmp_path, backend, monkeypatch, caplog, fate):
    waiting, real = threading.Event(), fcntl.flock

    def flock(descriptor, operation):
        if operation == fcntl.LOCK_SH:
            waiting.set()
        real(descriptor, operation)

    outcome = []

    def read():
        try:
            with backend.locks.share(MANIFEST):
                outcome.append((backend.read(MANIFEST), is_held(backend)))
        except FileNotFoundError as error:
            outcome.append(type(error))

    monkeypatch.setattr(fcntl, "flock", flock)
    claim = backend.locks.claim(MANIFEST)
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert waiting.wait(300)  # it has opened the file
    assert "is about to be replaced or removed by another process: waiting" in caplog.text
    assert outcome == []
    if fate == "removed":
        backend.remove(MANIFEST)
    elif fate == "replaced":
        publish(backend, MANIFEST, b"two")
    claim.release()
    reader.join(300)
    assert outcome == [{"removed": FileNotFoundError, "replaced": (b"two", True), "left": (b"one", True)}[fate]]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_locks_reading_goes_on_and_removal_too(backend, monkeypatch, number):
    def flock(descriptor, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with backend.locks.share(MANIFEST):
        assert not is_held(backend)
    assert not backend.locks.protect_readers(MANIFEST)


def test_locks_that_are_switched_off(tmp_path, backend):
    without = open_storage(tmp_path, lock=False)
    assert not without.locks.protect_readers(MANIFEST)
    with without.locks.share(MANIFEST):
        assert not is_held(backend)
    with backend.locks.share(MANIFEST):
        assert not is_held(without)


def test_an_error_of_the_medium_is_an_error(backend, monkeypatch):
    before = len(os.listdir("/proc/self/fd"))

    def flock(descriptor, operation):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", flock)
    for lock in (backend.locks.share, backend.locks.claim):
        with pytest.raises(OSError, match="Input/output error"):
            lock(MANIFEST)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("kind", ["share", "claim"])
def test_a_lock_goes_where_the_look_at_its_file_fails(backend, monkeypatch, kind):
    """Nobody else could take it until the process has ended."""

    def samestat(one, other):
        raise OSError(errno.EIO, "Input/output error")

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as context:
        context.setattr(local_locks.os.path, "samestat", samestat)
        with pytest.raises(OSError, match="Input/output error"):
            getattr(backend.locks, kind)(MANIFEST)
    assert not is_held(backend)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_manifest_is_read_under_the_lock(tmp_path):
    save(tmp_path, 3)
    save(tmp_path, 5)
    directory = CheckpointDirectory(tmp_path)
    with LockedManifest(directory) as manifest:
        assert manifest.unique_id == 5
        assert is_held(directory.backend, "5.manifest")
        assert not is_held(directory.backend, "3.manifest")
    assert not is_held(directory.backend, "5.manifest")


def test_a_manifest_that_cannot_be_read_is_not_kept(tmp_path):
    save(tmp_path, 3)
    (tmp_path / "3.manifest").write_bytes(b"rubbish")
    directory = CheckpointDirectory(tmp_path)
    with pytest.raises(CorruptCheckpointError):
        LockedManifest(directory, 3)
    assert not is_held(directory.backend, "3.manifest")
    with pytest.raises(ValidationError, match="no checkpoint with id 4"):
        LockedManifest(directory, 4)


def test_when_the_highest_is_removed_meanwhile_the_next_is_taken(tmp_path, monkeypatch):
    save(tmp_path, 3)
    save(tmp_path, 5)
    directory = CheckpointDirectory(tmp_path)
    hold = directory.backend.locks.share

    def late(name):
        for file in (name for name in directory.backend.names() if name == "5.manifest" or "_5-" in name):
            directory.backend.remove(file)
        return hold(name)

    monkeypatch.setattr(directory.backend.locks, "share", late)
    with LockedManifest(directory) as manifest:
        assert manifest.unique_id == 3
    directory.backend.remove("3.manifest")
    (tmp_path / "9.manifest").symlink_to(tmp_path / "nowhere")
    with pytest.raises(CorruptCheckpointError, match=r"9\.manifest is listed in its directory, and is not there"):
        LockedManifest(directory)


def test_load_export_and_verify_hold_what_they_read(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint"
    comm = SoloCommunicator()
    save_state_dict({"w": np.arange(12.0)}, path, comm)
    seen = []

    def watched(function):
        def call(*args, **kwargs):
            seen.append(is_held(open_backend(path)))
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(files_module, "read_pieces", watched(files_module.read_pieces))
    load_state_dict({"w": np.zeros(12)}, path, comm)
    load_state_dict({"w": np.zeros(12)}, path, comm, aoa_config={"aoa_statements": ["w -> w"]})
    assert seen == [True, True]
    monkeypatch.setattr(verification_module, "verify_files", watched(verification_module.verify_files))
    assert verify_checkpoint(path).ok
    assert seen == [True] * 3
    export_safetensors(path, tmp_path / "out")
    assert seen == [True] * 4  # it reads pieces as a load does
    assert not is_held(open_backend(path))


def test_a_replacement_leaves_its_readers_their_files(tmp_path):
    comm = SoloCommunicator()
    values = [np.full(6, version, dtype=np.float32) for version in range(3)]
    save_state_dict({"w": values[0]}, tmp_path, comm, unique_id=0)
    directory = CheckpointDirectory(tmp_path)
    with LockedManifest(directory, 0) as manifest:
        save_state_dict({"w": values[1]}, tmp_path, comm, unique_id=0)
        directory.check_complete(manifest)
    assert sorted(names(tmp_path)) == sorted(["0.manifest", *manifest.files, data_file(tmp_path)])
    found = {"w": np.zeros(6, dtype=np.float32)}
    load_state_dict(found, tmp_path, comm)
    assert (found["w"] == values[1]).all()
    # Nobody reads now.
    save_state_dict({"w": values[2]}, tmp_path, comm, unique_id=0)
    assert sorted(names(tmp_path)) == ["0.manifest", data_file(tmp_path)]


def test_a_look_at_the_save_lock_refuses_no_saver(backend, monkeypatch):
    """A saver that begins while others look, as `flexckpt ls` does, waits for the end of their look."""
    looking = os.open(backend.path, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    look, looks = DirectoryLock.is_taken, []

    def is_taken(path):
        looks.append(look(path))
        if len(looks) == 3:
            os.close(looking)
        return looks[-1]

    monkeypatch.setattr(DirectoryLock, "is_taken", is_taken)
    with backend.locks.take():
        assert looks == [False] * 3
        assert backend.locks.is_taken()
        with pytest.raises(CheckpointError, match="another save is writing"):
            backend.locks.take()
    assert not backend.locks.is_taken()


def test_a_look_leaves_no_lock_to_a_process_that_was_forked_meanwhile(backend, monkeypatch):
    flock, forked = fcntl.flock, []

    def lock(descriptor, operation):
        flock(descriptor, operation)
        if not forked:
            forked.append(os.dup(descriptor))  # as a fork does

    monkeypatch.setattr(fcntl, "flock", lock)
    assert not backend.locks.is_taken()
    backend.locks.take().release()
    os.close(*forked)


def test_a_look_that_never_ends_is_an_error(backend, monkeypatch):
    monkeypatch.setattr(local_locks, "_MOST_LOOKS", 3)
    looking = os.open(backend.path, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    with pytest.raises(CheckpointError, match="another save is writing"):
        backend.locks.take()
    os.close(looking)

"""Files of local and shared file systems: what is left of one that is begun and not finished."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from paddle_flexckpt.media import local
from paddle_flexckpt.media.backend import write_file
from paddle_flexckpt.media.local import LocalBackend, sync_path
from paddle_flexckpt.tools.verification import repair_manifest, verify_checkpoint
from tests.transfer.samples import save, values_of


@pytest.mark.parametrize("mode", ["new", "replace"])
def test_a_file_that_is_given_up_goes(tmp_path, mode):
    with pytest.raises(KeyError), LocalBackend(str(tmp_path)).create("x", mode) as file:
        file.write(b"own")
        raise KeyError
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mode", ["new", "replace"])
def test_a_file_that_cannot_be_made_durable_goes(tmp_path, monkeypatch, mode):
    def fail(descriptor, path):
        raise OSError(errno.EIO, "injected", path)

    monkeypatch.setattr(local, "fsync", fail)
    with pytest.raises(OSError, match="injected"), LocalBackend(str(tmp_path)).create("x", mode) as file:
        file.write(b"own")
    assert not list(tmp_path.iterdir())


def test_who_gives_a_file_up_leaves_that_of_another(tmp_path):
    """Whoever was stopped for long may find that its file was removed, and that a later save has the name."""
    backend = LocalBackend(str(tmp_path))
    with pytest.raises(KeyError), backend.create("x") as file:
        file.write(b"own")
        backend.remove("x")
        with backend.create("x") as other:
            other.write(b"of another")
        raise KeyError
    assert backend.read("x") == b"of another"


def without_durable_names(monkeypatch, number: int, kind=stat.S_ISDIR) -> list[int]:
    """Let fsync of directories (or of files) fail as file systems do that lack it; return the calls that failed."""
    real, failed = os.fsync, []

    def fsync(descriptor: int) -> None:
        if kind(os.fstat(descriptor).st_mode):
            failed.append(descriptor)
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(local, "_WARNED", set(), raising=False)
    return failed


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.ENOTSUP])
def test_a_file_system_that_cannot_sync_directories_is_told_once(tmp_path, monkeypatch, caplog, number):
    failed = without_durable_names(monkeypatch, number)
    root = tmp_path / "a" / "b"
    save(str(root), values_of({"w": ("float32", (4, 6))}), world=2)
    (root / "0.manifest").unlink()
    repair_manifest(root, 0)
    LocalBackend(str(root)).make_directory()
    with pytest.raises(KeyError), LocalBackend(str(root)).create("x") as file:
        file.write(b"given up")
        raise KeyError
    sync_path(str(root))
    assert len(failed) > 5
    assert verify_checkpoint(root).ok
    assert not (root / "x").exists()
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert os.strerror(number) in warning
    assert "after a loss of power, a checkpoint that was reported as saved may be gone" in warning
    assert repr(str(tmp_path)) in warning or repr(str(tmp_path.parent)) in warning


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.EIO, stat.S_ISDIR), (errno.EINVAL, stat.S_ISREG), (errno.ENOSYS, stat.S_ISREG)]
)
def test_other_errors_of_fsync_stay_errors(tmp_path, monkeypatch, caplog, number, kind):
    """A disk that fails, and a file's bytes that cannot be made durable."""
    without_durable_names(monkeypatch, number, kind)
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        write_file(LocalBackend(str(tmp_path)), "x", b"bytes", "replace")
        sync_path(str(tmp_path))
    assert caught.value.errno == number
    assert not caplog.records
    (tmp_path / "y").write_bytes(b"closed")
    if kind is stat.S_ISREG:
        with pytest.raises(OSError, match=os.strerror(number)):
            sync_path(str(tmp_path / "y"))

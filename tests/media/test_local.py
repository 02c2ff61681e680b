"""Files of local and shared file systems: what is left of one that is begun and not finished."""

from __future__ import annotations

import errno

import pytest

from paddle_flexckpt.media import local
from paddle_flexckpt.media.local import LocalBackend


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

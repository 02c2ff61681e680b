"""A missing checkpoint is explained: what the directory holds instead."""

from __future__ import annotations

import re

import pytest

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.cli.main import main
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.foreign.paddle_files import open_to_save
from paddle_flexckpt.native.directory import LockedManifest, is_complete
from paddle_flexckpt.native.save_names import lost_ids
from tests.native.test_directory import save
from tests.remedies.following import provoked


def why(path, unique_id=None) -> str:
    with pytest.raises(ValidationError) as caught:
        SourceDirectory(path).read_manifest(unique_id)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_what_is_there_instead_is_said(tmp_path):
    assert why(tmp_path / "nowhere").endswith("does not exist. Remedy (FC301): correct the path")
    for name in ("step_1", "step_2", "step_30", "step_300", "other"):
        (tmp_path / "run" / name).mkdir(parents=True)
    assert why(tmp_path / "run" / "step_3").endswith(f"; {tmp_path / 'run'} has step_2, step_30, step_300")
    assert why(tmp_path / "run" / "x").endswith(f"; {tmp_path / 'run'} has other, step_1, step_2")
    (tmp_path / "file").write_bytes(b"")
    assert "not a directory" in why(tmp_path / "file")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert why(empty)
    (empty / "0_0.metadata").write_bytes(b"")
    assert "Paddle" in why(empty) or "metadata" in why(empty)


@pytest.mark.parametrize("name", ["model.safetensors", "model.pdparams", "arrays.npz"])
def test_a_pointer_of_git_lfs_is_called_one(tmp_path, name):
    (tmp_path / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 12345\n")
    with pytest.raises(CorruptCheckpointError, match=rf"{name} is a pointer of Git LFS.*by `git lfs pull`"):
        SourceDirectory(tmp_path).read_manifest()


@pytest.mark.parametrize("trace", ["4.saving", "0_4.part", f"1_4-{'a' * 32}.failed", f"0_4-{'b' * 32}.late"])
def test_an_unfinished_save_is_called_unfinished(tmp_path, trace):
    (tmp_path / "0_4.safetensors").write_bytes(b"")
    (tmp_path / trace).write_bytes(b"")
    for unique_id in (None, 4):
        text = why(tmp_path, unique_id)
        assert "unfinished save (id 4)" in text
        assert "complete ids here: none" in text
        assert "repair" not in text
    save(tmp_path, 0)
    assert SourceDirectory(tmp_path).read_manifest().unique_id == 0
    assert "complete ids here: [0]" in why(tmp_path, 4)
    assert "no checkpoint with id 9; complete ids here: [0]" in why(tmp_path, 9)


def test_a_lost_manifest_is_told_from_a_save_that_was_never_committed(tmp_path):
    """And whoever follows the remedy has the checkpoint back."""
    path = tmp_path / "c"
    save(path, 3)
    save(path, 4)
    content = (path / "4.manifest").read_bytes()
    (path / "4.manifest").unlink()
    with provoked("native/directory.py", "from a copy, or rebuild it: flexckpt repair "):
        SourceDirectory(path).read_manifest(4)
    text = why(path, 4)
    assert "the data files of a save (id 4)" in text
    assert "it was committed, and its manifest has been lost; complete ids here: [3]" in text
    command = re.search(r"flexckpt (repair .* --id 4)", text)[1].split()
    assert main(command) == 0
    assert (path / "4.manifest").read_bytes() == content
    # A load of the highest id does not fall back to an older checkpoint without a word.
    (path / "4.manifest").unlink()
    for look in (lambda: SourceDirectory(path).read_manifest(), lambda: LockedManifest(SourceDirectory(path))):
        with pytest.raises(CorruptCheckpointError, match="its manifest has been lost") as caught:
            look()
        assert "Remedy (FC306): " in str(caught.value)
        assert f"flexckpt repair {path} --id 4; or load an older one, by unique_id=ID" in str(caught.value)
    assert not is_complete(path)
    with LockedManifest(SourceDirectory(path), 3) as manifest:
        assert manifest.unique_id == 3
    assert main(command) == 0
    # An older save of the id that died has a marker of its own.
    (path / "4.manifest").unlink()
    (path / "0_4.7.safetensors").write_bytes(b"")
    (path / "4.7.saving").write_bytes(b"")
    assert "it was committed" in why(path, 4)


def test_a_save_that_fails_leaves_nothing_that_looks_committed(tmp_path):
    path = tmp_path / "c"
    directory = open_to_save(path)
    with directory.lock():
        names = directory.open_save(0)
        (path / names.data_file(0)).write_bytes(b"begun")
        assert lost_ids(directory.backend.names()) == []
        directory.discard(names, [0])
        assert lost_ids(directory.backend.names()) == []


@pytest.mark.parametrize(
    ("name", "program", "remedy"),
    [
        ("manifest.ocdbt", "Orbax", "safetensors.flax.save_file"),
    ],
)
def test_formats_that_are_not_read_are_named(tmp_path, name, program, remedy):
    (tmp_path / name).write_bytes(b"")
    text = why(tmp_path)
    assert f"is a checkpoint of {program}, which is not read here. Remedy (FC701): " in text
    assert remedy in text

"""A missing checkpoint is explained: what the directory holds instead."""

from __future__ import annotations

import pytest

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.foreign.formats import SourceDirectory
from tests.native.test_directory import save


def why(path, unique_id=None) -> str:
    with pytest.raises(ValidationError) as caught:
        SourceDirectory(path).read_manifest(unique_id)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_what_is_there_instead_is_said(tmp_path):
    assert "does not exist" in why(tmp_path / "nowhere")
    (tmp_path / "file").write_bytes(b"")
    assert "not a directory" in why(tmp_path / "file")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert why(empty)
    (empty / "0_0.metadata").write_bytes(b"")
    assert "Paddle" in why(empty) or "metadata" in why(empty)


def test_an_unfinished_save_is_called_unfinished(tmp_path):
    (tmp_path / "0_4.safetensors").write_bytes(b"")
    for unique_id in (None, 4):
        text = why(tmp_path, unique_id)
        assert "unfinished save (id 4)" in text
        assert "complete ids here: none" in text
    save(tmp_path, 0)
    assert SourceDirectory(tmp_path).read_manifest().unique_id == 0
    assert "complete ids here: [0]" in why(tmp_path, 4)
    assert "no checkpoint with id 9; complete ids here: [0]" in why(tmp_path, 9)


@pytest.mark.parametrize(
    ("name", "program", "remedy"),
    [
        ("manifest.ocdbt", "Orbax", "safetensors.flax.save_file"),
    ],
)
def test_formats_that_are_not_read_are_named(tmp_path, name, program, remedy):
    (tmp_path / name).write_bytes(b"")
    text = why(tmp_path)
    assert f"is a checkpoint of {program}, which is not read here. Remedy: " in text
    assert remedy in text

"""The checkpoints in an output directory, without a trainer: what is whole, what is last, what goes."""

from __future__ import annotations

import errno
import os
import re

import numpy as np
import pytest

from paddle_flexckpt.catalog import CheckpointError, ValidationError
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.foreign.paddle_files import open_to_save
from paddle_flexckpt.native.directory import LockedManifest
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.trainer.directories import (
    TrainerDirectories,
    is_usable,
    latest_checkpoint,
    mark_directory,
    step_of,
    to_rotate,
)


def save(directories: TrainerDirectories, step: int) -> None:
    directories.begin(step)
    inside = directories.directory(step) / "flex_checkpoint"
    save_state_dict({"w": np.full(4, step, np.float32)}, inside, SoloCommunicator(), unique_id=0, step=step)
    directories.make_durable(step)


@pytest.fixture
def directories(tmp_path) -> TrainerDirectories:
    found = TrainerDirectories(tmp_path)
    for step in (10, 20, 100):
        save(found, step)
    return found


@pytest.mark.parametrize(
    ("steps", "limit", "best", "removed"),
    [
        ([1, 2, 3], None, None, []), ([1, 2, 3], 0, None, []), ([1, 2, 3], 3, None, []), ([1, 2, 3], 2, None, [1]),
        ([1, 2, 3], 2, 1, [2]), ([1, 2, 3], 1, 1, [2]), ([1, 2, 3], 1, None, [1, 2]), ([1, 2, 3], 2, 3, [1]),
        ([1, 2, 3], 2, 7, [1]), ([], 1, None, []), ([5], 1, None, []), ([1, 2, 3, 4], 3, 1, [2]),
    ],
)  # fmt: skip
def test_the_newest_and_the_best_stay(steps, limit, best, removed):
    assert to_rotate(steps, limit, best) == removed


def test_steps_are_numbers_and_the_last_is_the_highest(directories, tmp_path):
    assert directories.usable() == [10, 20, 100]
    assert latest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-100")
    assert step_of(tmp_path / "checkpoint-100") == 100
    assert step_of("elsewhere") is None
    assert latest_checkpoint(tmp_path / "nowhere") is None


def test_what_is_being_read_stays(directories):
    inside = SourceDirectory(directories.directory(10) / "flex_checkpoint")
    with LockedManifest(inside, 0):
        assert directories.rotate(1, None) == [20]
        assert directories.usable() == [10, 100]
    assert directories.rotate(1, None) == [10]


def test_what_is_being_saved_stays(directories):
    lock = open_to_save(directories.directory(10) / "flex_checkpoint").lock()
    assert directories.rotate(1, None) == [20]
    lock.release()
    assert directories.rotate(1, None, busy=[10]) == []
    assert directories.rotate(1, None) == [10]


def test_an_interrupted_removal_is_carried_through(directories, monkeypatch):
    def die(path):
        raise OSError("interrupted")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", die)
        with pytest.raises(CheckpointError, match="interrupted"):
            directories.rotate(2, None)
    assert (directories.directory(10) / "flex_checkpoint").exists()
    assert not is_usable(directories.directory(10))
    assert directories.usable() == [20, 100]
    assert directories.rotate(None, None) == [10]
    assert not directories.directory(10).exists()


def test_a_half_removed_step_is_saved_anew(directories):
    (directories.directory(20) / "flex_checkpoint.removing").touch()
    with (
        LockedManifest(SourceDirectory(directories.directory(20) / "flex_checkpoint"), 0),
        pytest.raises(CheckpointError, match="being removed while it is read"),
    ):
        directories.begin(20)
    assert directories.usable() == [10, 100]
    save(directories, 20)
    assert directories.usable() == [10, 20, 100]


def test_checkpoints_of_the_trainers_own_format_count(directories, tmp_path):
    other = directories.directory(5)
    other.mkdir()
    assert not is_usable(other)
    (other / "trainer_state.json").write_text("{}")
    assert directories.usable() == [5, 10, 20, 100]
    assert directories.rotate(3, None) == [5]
    os.makedirs(tmp_path / "checkpoint-7")
    assert directories.rotate(1, None) == [10, 20], "nobody knows what is in checkpoint-7"
    assert (tmp_path / "checkpoint-7").exists()


@pytest.mark.parametrize("place", ["file", "file/below", "dangling", "loop/below", "n" * 300])
def test_a_place_where_no_directory_can_be_made_is_told_with_a_remedy(tmp_path, place):
    (tmp_path / "file").write_text("")
    for name, other in (("dangling", "nowhere"), ("loop", "loop")):
        (tmp_path / name).symlink_to(other)
    with pytest.raises((ValidationError, OSError), match=r"Remedy \(FC406\)") as caught:
        mark_directory(tmp_path / place, 1)
    assert str(tmp_path / place.partition("/")[0]) in str(caught.value)


@pytest.mark.parametrize("call", ["os.mkdir", "pathlib.Path.write_text"])
def test_an_output_directory_that_cannot_be_written_to_is_told_with_a_remedy(tmp_path, monkeypatch, call):
    def refuse(path, *_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(call, refuse)
    with pytest.raises(OSError, match=rf"Permission denied: {re.escape(str(tmp_path))}.*Remedy \(FC406\)"):
        mark_directory(tmp_path / "checkpoint-1", 1)

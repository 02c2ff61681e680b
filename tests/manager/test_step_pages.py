"""Pages beside steps: there when the checkpoint is complete, of what it holds, and gone with it."""

from __future__ import annotations

import json
import shutil
import time

import pytest

pytest.importorskip("paddle")

from paddle_flexckpt.catalog import CheckpointError, ValidationError
from paddle_flexckpt.manager import KeepLatest
from paddle_flexckpt.manager.step_directories import StepDirectories
from tests.manager.samples import directory_of, files_of, manager_of, restore, save, tree
from tests.manager.test_background import fail
from tests.pages.samples import check


def page_of(root, step: int) -> str:
    return (root / f"step_{step:08d}.html").read_text(encoding="utf-8")


def test_a_step_has_a_page_as_long_as_it_is_kept(tmp_path):
    manager = manager_of(tmp_path, pages=True, keep=KeepLatest(1))
    report = save(manager, 1, metrics={"loss": 0.25})
    found = check(page_of(tmp_path, 1))
    assert [each for tag, each in found.texts if tag == "h1"] == ["Checkpoint of step 1"]
    assert report.summary() in found.text() and "0.25" in found.text()
    assert time.strftime("saved %Y-%m-%d") in " ".join(found.text().split())
    assert {"w", "b"} <= {each for tag, each in found.texts if tag == "th"}
    save(manager, 2)
    assert tree(tmp_path) == sorted([*files_of(2), "step_00000002.html"])
    assert manager.all_steps() == [2]


def test_without_being_asked_no_page_is_written_and_old_ones_go(tmp_path):
    first = manager_of(tmp_path, pages=True)
    save(first, 1)
    manager = manager_of(tmp_path, keep=KeepLatest(1))
    restore(manager)
    save(manager, 1, version=7, overwrite=True)  # the page was of the other one
    assert not (tmp_path / "step_00000001.html").exists()
    save(first, 2)
    restore(manager)
    save(manager, 3)
    assert tree(tmp_path) == files_of(3)


def test_an_interrupted_removal_takes_the_page_too(tmp_path):
    manager = manager_of(tmp_path, pages=True)
    save(manager, 1)
    save(manager, 2)
    directory = directory_of(tmp_path, 1)
    names = [path.name for path in directory.iterdir() if path.suffix == ".safetensors"]
    (tmp_path / "step_00000001.removing").write_text(json.dumps({"files": names}))
    (directory / "0.manifest").unlink()
    StepDirectories(str(tmp_path)).retain([], None, ())
    assert tree(tmp_path) == sorted([*files_of(2), "step_00000002.html"])


def test_a_save_in_the_background_has_its_page_when_it_is_complete(tmp_path, writer, stopped):
    manager = manager_of(tmp_path, async_save=writer, pages=True)
    with stopped():
        handle = save(manager, 1)
        assert not (tmp_path / "step_00000001.html").exists()
    report = handle.result(60)
    assert list(report.rank_seconds) == ["plan", "stage"]
    manager.wait()
    assert report.summary() in check(page_of(tmp_path, 1)).text()
    save(manager, 2)
    manager.close()
    assert (tmp_path / "step_00000002.html").exists()


def test_a_save_that_failed_has_no_page(tmp_path, writer, stopped):
    manager = manager_of(tmp_path, async_save=writer, pages=True)
    fail(tmp_path, stopped, manager, 1)
    with pytest.raises(CheckpointError):
        manager.wait()
    save(manager, 2, blocking=True)
    assert tree(tmp_path) == sorted([*files_of(2), "step_00000002.html"])


def test_a_page_that_cannot_be_written_is_told(tmp_path):
    manager = manager_of(tmp_path, pages=True)
    (tmp_path / "step_00000001.html").mkdir()
    with pytest.raises(CheckpointError, match=r"the checkpoint of step 1 is complete, but .* the page of step 1 could"):
        save(manager, 1)
    assert manager.all_steps() == [1]
    shutil.rmtree(tmp_path / "step_00000001.html")
    save(manager, 2)


def test_pages_is_a_bool(tmp_path):
    with pytest.raises(ValidationError, match="pages is True or False; got 'yes'"):
        manager_of(tmp_path, pages="yes")

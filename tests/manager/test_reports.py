"""Reports of saves, written beside the steps on request."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("paddle")
import paddle_flexckpt as fc
from paddle_flexckpt.manager import KeepLatest
from tests.manager.samples import directory_of, manager_of, restore, save


def reports(root):
    return sorted(path.name for path in root.glob("*.json"))


def report_of(root, step):
    return json.loads((root / f"step_{step:08d}.report.json").read_text())


def test_without_being_asked_for_there_is_none(tmp_path):
    with manager_of(tmp_path) as manager:
        save(manager, 1)
    assert reports(tmp_path) == []


def test_the_report_is_that_of_the_save_and_goes_with_the_step(tmp_path):
    with manager_of(tmp_path, reports=True, keep=KeepLatest(2)) as manager:
        for step in (1, 2, 3):
            report = save(manager, step)
            assert report_of(tmp_path, step) == json.loads(report.to_json())
        assert manager.all_steps() == [2, 3]
        assert reports(tmp_path) == ["step_00000002.report.json", "step_00000003.report.json"]
        assert report_of(tmp_path, 3)["schema"] == {"name": "save", "version": 1}
        report = save(manager, 3, version=7, overwrite=True)
        assert report_of(tmp_path, 3) == report.to_dict()
        assert restore(manager)[:2] == (3, 7)
    assert [info.step for info in fc.list_checkpoints(tmp_path)] == [2, 3]


@pytest.mark.parametrize("end", ["wait", "close", "save", "restore"])
def test_the_report_of_a_save_in_the_background_comes_with_its_end(tmp_path, end):
    manager = manager_of(tmp_path, reports=True, async_save=True)
    handle = save(manager, 1)
    expected = ["step_00000001.report.json"]
    if end == "save":
        handle.result()
        save(manager, 2, blocking=True)
        expected.append("step_00000002.report.json")
    elif end == "restore":
        assert restore(manager)[:2] == (1, 1)
        assert reports(tmp_path) == []
        manager.wait()
    else:
        getattr(manager, end)()
    assert reports(tmp_path) == expected
    assert report_of(tmp_path, 1) == handle.result().to_dict()
    manager.close()


def test_a_failed_save_leaves_none(tmp_path):
    with manager_of(tmp_path, reports=True) as manager:
        with pytest.raises(fc.ValidationError):
            manager.save(1, state={}, rng=False, metrics={"loss": "low"})
        assert reports(tmp_path) == []


def test_a_report_that_cannot_be_written_is_told_with_the_checkpoint_complete(tmp_path):
    with manager_of(tmp_path, reports=True) as manager:
        (tmp_path / "step_00000001.report.json").mkdir()
        with pytest.raises(fc.CheckpointError, match="the checkpoint of step 1 is complete, but a report could not be"):
            save(manager, 1)
        assert restore(manager)[:2] == (1, 1)
    assert fc.verify_checkpoint(directory_of(tmp_path, 1)).ok


def test_the_option_is_a_bool(tmp_path):
    with pytest.raises(fc.ValidationError, match="reports is True or False; got 'html'"):
        manager_of(tmp_path, reports="html")

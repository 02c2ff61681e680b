"""flexckpt clean --id and --step: one checkpoint is shown, and removed."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

pytest.importorskip("paddle")

import paddle_flexckpt as fc
from paddle_flexckpt.cli.main import main
from paddle_flexckpt.foreign.paddle_files import open_to_save
from paddle_flexckpt.native import id_removal
from paddle_flexckpt.native.directory import LockedManifest
from tests.remedies.following import advised


def save(path, *ids):
    for unique_id in ids:
        fc.save_state_dict({"w": np.full(9, unique_id, np.float32)}, path, unique_id=unique_id, step=unique_id * 10)


def run(capsys, *arguments, code=0):
    assert main([str(each) for each in arguments]) == code
    return capsys.readouterr().out.splitlines()


def loaded(path, **options):
    target = {"w": np.zeros(9, np.float32)}
    fc.load_state_dict(target, path, **options)
    return target["w"][0]


def test_one_id_is_shown_and_removed(tmp_path, capsys):
    save(tmp_path, 1, 2)
    other = sorted(name for name in os.listdir(tmp_path) if "_2-" in name or name.startswith("2."))
    shown = f"id 1 of {tmp_path}: step 10, 36 B, complete"
    assert run(capsys, "clean", tmp_path, "--id", 1) == [
        shown,
        f"`flexckpt clean {tmp_path} --id 1 --remove` removes it",
    ]
    assert loaded(tmp_path, unique_id=1) == 1
    assert run(capsys, "clean", tmp_path, "--id", 1, "--remove") == [shown, "2 files removed"]
    # Paddle's own loader has its file again, which it has not where there are several ids.
    assert sorted(set(os.listdir(tmp_path)) - {*other}) == ["flex-ckpt.auto_generated.metadata"]
    assert loaded(tmp_path) == 2
    assert run(capsys, "clean", tmp_path, "--step", 20) == [
        f"id 2 of {tmp_path}: step 20, 36 B, complete",
        f"it is the only complete checkpoint in {tmp_path} and below: after it none can be loaded",
        f"`flexckpt clean {tmp_path} --step 20 --remove --only` removes it",
    ]


def test_the_only_complete_one_stays_unless_that_is_said(tmp_path, capsys):
    save(tmp_path, 1, 2)
    (data,) = tmp_path.glob("0_2-*")
    data.unlink()
    text = "\n".join(run(capsys, "clean", tmp_path, "--id", 1, "--remove", code=1))
    assert "it is the only complete checkpoint" in text and "nothing was removed: add --only" in text
    assert loaded(tmp_path, unique_id=1) == 1
    # A damaged one is none.
    assert run(capsys, "clean", tmp_path, "--id", 2, "--remove")[1] == "1 files removed"
    report = json.loads("".join(run(capsys, "clean", tmp_path, "--id", 1, "--remove", "--only", "--json")))
    assert (report["chosen"]["unique_id"], len(report["removed"])) == (1, 2)
    assert os.listdir(tmp_path) == []


def test_a_step_of_a_manager_goes_with_its_directory_and_page(tmp_path, capsys):
    with fc.CheckpointManager(tmp_path, preemption_signals=(), pages=True, reports=True) as manager:
        for step in (3, 4):
            manager.save(step, state={"w": np.full(9, step, np.float32)})
        assert run(capsys, "clean", tmp_path, "--step", 3, "--remove")[1] == "4 files removed"
        assert manager.all_steps() == [4]
    assert not [name for name in os.listdir(tmp_path) if "00000003" in name]


def test_what_is_not_there_is_told_with_what_is(tmp_path, capsys):
    save(tmp_path, 1)
    assert main(["clean", str(tmp_path), "--id", "7"]) == 1
    text = capsys.readouterr().err
    assert f"{tmp_path} has no id 7; there are [1]" in text
    advised("cli/overview.py", "give one of these, or the directory of one, by --id", text)
    assert main(["clean", str(tmp_path), "--id", "1"]) == 0


def test_what_is_read_or_saved_to_stays(tmp_path, capsys):
    save(tmp_path, 1, 2)
    directory = open_to_save(tmp_path)
    with LockedManifest(directory, 1):
        assert main(["clean", str(tmp_path), "--id", "1", "--remove"]) == 1
        assert "is being read. Remedy (FC403): wait" in capsys.readouterr().err
    with directory.lock():
        assert main(["clean", str(tmp_path), "--id", "1", "--remove"]) == 1
        assert "another save is writing to" in capsys.readouterr().err
    assert [loaded(tmp_path, unique_id=each) for each in (1, 2)] == [1, 2]


@pytest.mark.parametrize("after", ["mark_save", "remove"])
def test_an_interrupted_removal_is_finished_by_the_next_save(tmp_path, monkeypatch, after):
    save(tmp_path, 1, 2)
    directory = open_to_save(tmp_path)

    def stop(*_):
        raise KeyboardInterrupt

    owner = directory.backend if after == "mark_save" else directory.cleaner
    monkeypatch.setattr(owner, "remove" if after == "mark_save" else "remove_save", stop)
    with pytest.raises(KeyboardInterrupt):
        id_removal.remove_checkpoint(directory, 1)
    assert [each.unique_id for each in fc.list_checkpoints(tmp_path)] == ([1, 2] if after == "mark_save" else [2])
    save(tmp_path, 3)
    assert len([name for name in os.listdir(tmp_path) if "_1-" in name]) == (1 if after == "mark_save" else 0)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".saving")]

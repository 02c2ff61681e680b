"""Commands that take a checkpoint, given the directory of a run: they take its highest complete step, and say so."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from paddle_flexckpt.cli.main import main
from paddle_flexckpt.media.local import LocalBackend
from paddle_flexckpt.native import directory
from paddle_flexckpt.tools import digests
from tests.saved import data_file
from tests.transfer.samples import save


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of three steps with different values, from whose parent commands are given."""
    for step in (9, 10, 11):
        save(tmp_path / "run" / f"step_{step:08d}", {"model.w": np.full((4, 4), step, np.float32)}, world=1, step=step)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def ran(capsys, *words: str, code: int = 0) -> tuple[str, list[str]]:
    """Return what a command prints, and the lines of its messages."""
    assert main(words) == code
    captured = capsys.readouterr()
    return captured.out, captured.err.splitlines()


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "run"],
        ["inspect", "run/"],
        ["inspect", "run", "--json"],
        ["show", "run", "model.w"],
        ["digest", "run"],
        ["rehearse", "run", "--to", "dp=2"],
        ["map", "run", "--json"],
        ["explain", "run", "--aoa", "model.w -> w"],
        ["expand", "run", "--aoa", "model.w -> w"],
        ["diff", "run", "run/step_00000011"],
    ],
    ids=" ".join,
)
def test_the_highest_step_is_taken(run, capsys, words):
    out, messages = ran(capsys, *words)
    place = words[1]
    assert messages == [f"flexckpt {words[0]}: {place} is a run; its highest complete step is taken, run/step_00000011"]
    at_step, _ = ran(capsys, words[0], "run/step_00000011", *words[2:])
    assert out == at_step
    if "--json" in words:
        assert json.loads(out)


def test_a_diff_takes_runs_on_both_sides(run, capsys):
    out, messages = ran(capsys, "diff", "run/step_00000009", "run", code=1)
    assert messages == ["flexckpt diff: run is a run; its highest complete step is taken, run/step_00000011"]
    assert "model.w" in out
    assert len(ran(capsys, "diff", "run", "run")[1]) == 2


@pytest.mark.parametrize("command", ["export", "convert"])
def test_a_run_is_written_as_its_highest_step(run, capsys, command):
    assert len(ran(capsys, command, "run", "out")[1]) == 1
    ran(capsys, "diff", "out", "run/step_00000011")


@pytest.mark.parametrize("words", [["digest", "run"], ["export", "run", "out"]])
def test_retention_goes_on_between_the_choice_and_the_lock(run, capsys, monkeypatch, words):
    """A step is chosen; then a later one is saved, and the chosen one removed."""
    look, later = directory._look, [12, 13]

    def slowly(backend):
        found = look(backend)
        if later:
            step = later.pop(0)
            save(run / f"step_{step:08d}", {"model.w": np.full((4, 4), step, np.float32)}, world=1, step=step)
            for each in run.iterdir():
                if not each.name.endswith(str(step)):
                    shutil.rmtree(each)
        return found

    monkeypatch.setattr(directory, "_look", slowly)
    _, messages = ran(capsys, *words)
    assert later == []
    assert messages == [f"flexckpt {words[0]}: run is a run; its highest complete step is taken, run/step_00000013"]


def test_the_chosen_step_is_kept_until_the_command_ends(run, capsys, monkeypatch):
    digest, claims, locks = digests.digest_checkpoint, [], LocalBackend("run/step_00000011").locks

    def held(*arguments, **options):
        claims.append(locks.claim("0.manifest"))
        return digest(*arguments, **options)

    monkeypatch.setattr(digests, "digest_checkpoint", held)
    ran(capsys, "digest", "run")
    assert claims == [None]
    assert locks.claim("0.manifest") is not None


def test_the_model_of_a_rehearsal_may_be_that_of_a_run(run, capsys):
    _, messages = ran(capsys, "rehearse", "run/step_00000009", "--to", "dp=2", "--model", "run")
    assert messages == ["flexckpt rehearse: run is a run; its highest complete step is taken, run/step_00000011"]


def test_a_step_that_is_not_complete_is_passed_over_and_named(run, capsys):
    (run / "step_00000011" / data_file(run / "step_00000011")).unlink()
    _, messages = ran(capsys, "inspect", "run")
    assert messages[0].endswith("taken, run/step_00000010")
    assert len(messages) == 2
    assert messages[1].startswith("flexckpt inspect: not complete: run/step_00000011: ")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["inspect", "run", "--id", "0"], "give the path of that directory"),  # an id is that of one directory
        (["inspect", "steps"], "give the path of that directory"),  # checkpoints that are no steps
        (["inspect", "nowhere"], "correct the path"),
        (["repair", "run", "--id", "0"], "correct the id"),
    ],
)
def test_other_directories_are_refused(run, capsys, words, error):
    save(run.parent / "steps" / "a", {"model.w": np.zeros(2, np.float32)}, world=1)
    _, messages = ran(capsys, *words, code=1)
    assert error in messages[0]


def test_a_checkpoint_of_another_program_is_no_run(run, capsys):
    np.savez(run / "weights.npz", w=np.zeros(2, np.float32))
    out, messages = ran(capsys, "inspect", "run")
    assert not messages
    assert "an npz archive of numpy" in out

"""The trainer in several processes: a part of the matrix of strategies, and a run that is killed."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("paddlenlp")

from paddle_flexckpt.trainer import latest_checkpoint
from tests.trainer.launching import launch
from tests.trainer.matrix import TOLERANCE, run_matrix


def test_what_one_strategy_saves_others_resume(tmp_path):
    rows = run_matrix(["llama tied", "llama fused", "qwen2_moe"], ["tp2", "pp2", "sharding2_v2"], tmp_path)
    assert len(rows) == 27
    assert [row for row in rows if not row["ok"]] == []
    assert min(row["tensors"] for row in rows) > 80


def test_what_is_gathered_in_the_next_forward_is_saved_as_it_will_be(tmp_path):
    flags = ["--save_steps", "3", "--max_grad_norm", "0"]
    whole = {"name": "whole", "model": "llama", "output_dir": str(tmp_path / "whole"), "flags": flags}
    expected = launch("sharding2_v2_overlap", [whole], tmp_path / "first")["whole"]["losses"]
    checkpoint = str(tmp_path / "whole" / "checkpoint-3")
    resume = {**whole, "output_dir": str(tmp_path / "again"), "resume": checkpoint}
    for strategy in ("sharding2_v2_overlap", "tp2"):
        losses = launch(strategy, [resume], tmp_path / strategy)["whole"]["losses"]
        assert sorted(losses) == ["4", "5", "6"]
        assert all(abs(losses[step] - expected[step]) <= TOLERANCE for step in losses)


@pytest.mark.slow
def test_group_sharded_stages_resume_each_other(tmp_path):
    rows = run_matrix(["llama"], ["tp2", "stage2", "stage3"], tmp_path)
    assert [row for row in rows if not row["ok"]] == []
    assert min(row["tensors"] for row in rows) > 80


def test_a_killed_run_resumes_under_another_strategy_from_the_last_complete_checkpoint(tmp_path):
    flags = ["--save_steps", "2", "--max_grad_norm", "0"]
    whole = {"name": "whole", "model": "llama", "output_dir": str(tmp_path / "whole"), "flags": flags}
    killed = {**whole, "name": "killed", "output_dir": str(tmp_path / "killed"), "kill_at": 5}
    # In processes of its own: generators go on from one training to the next.
    expected = launch("tp2", [whole], tmp_path / "first")["whole"]["losses"]
    with pytest.raises(RuntimeError, match="exit status"):
        launch("tp2", [killed], tmp_path / "second")
    assert latest_checkpoint(tmp_path / "killed") == str(tmp_path / "killed" / "checkpoint-4")
    os.makedirs(tmp_path / "killed/checkpoint-6/flex_checkpoint")  # as if it had come as far as the next save
    resume = {**killed, "name": "again", "kill_at": None, "resume": True}
    again = launch("sharding2", [resume], tmp_path / "third")["again"]["losses"]
    assert sorted(again) == ["5", "6"]
    assert all(abs(again[step] - expected[step]) <= TOLERANCE for step in again)
    assert latest_checkpoint(tmp_path / "killed") == str(tmp_path / "killed" / "checkpoint-6")

"""The library on Paddle's wheel as it is: nothing of the CPU world, a launcher and gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("paddle")
pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

ROOT = Path(__file__).resolve().parents[2]


def run(tmp_path, script: str) -> None:
    """Two ranks run a script that stands beside this file."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PADDLE_")}
    env.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    path = str(Path(__file__).with_name(script))
    command = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--host", "127.0.0.1"]
    command += ["--log_dir", str(tmp_path / "log"), path, str(tmp_path / "checkpoint")]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    logs = [(tmp_path / "log" / f"workerlog.{rank}").read_text() for rank in (0, 1)]
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *logs])
    for rank, log in enumerate(logs):
        assert f"rank {rank} is done" in log


def test_two_ranks(tmp_path):
    run(tmp_path, "plain_gloo_script.py")


def test_a_save_inside_if_rank_is_0_answers_no_collective_of_the_training(tmp_path):
    run(tmp_path, "rank_0_script.py")

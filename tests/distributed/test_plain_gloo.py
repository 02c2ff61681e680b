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


def test_two_ranks(tmp_path):
    env = {name: value for name, value in os.environ.items() if not name.startswith("PADDLE_")}
    env.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    script = str(Path(__file__).with_name("plain_gloo_script.py"))
    command = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--host", "127.0.0.1"]
    command += ["--log_dir", str(tmp_path / "log"), script, str(tmp_path / "checkpoint")]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    logs = [(tmp_path / "log" / f"workerlog.{rank}").read_text() for rank in (0, 1)]
    assert done.returncode == 0, "\n".join([done.stdout, done.stderr, *logs])
    for rank, log in enumerate(logs):
        assert f"rank {rank} is done" in log

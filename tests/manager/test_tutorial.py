"""The script of docs/tutorial_fleet.md, stopped by a signal and continued on another number of ranks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("paddle")
import paddle_flexckpt as fc
from tests.documents import code_block, shell_block

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]
SECONDS = 180


def start(directory: Path, ranks: int, steps: int) -> subprocess.Popen:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PADDLE_", "CUDA_"))}
    command = [sys.executable, "-m", "paddle.distributed.launch", "--host", "127.0.0.1", "--nproc_per_node", str(ranks)]
    command += ["--log_dir", f"log{ranks}", "train.py", str(steps)]
    env["PYTHONPATH"] = str(Path(__file__).parents[2])
    return subprocess.Popen(command, cwd=directory, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def log(directory: Path, ranks: int, rank: int) -> str:
    return (directory / f"log{ranks}" / f"workerlog.{rank}").read_text()


def test_a_run_that_a_signal_stopped_goes_on_with_the_next_step_on_one_rank(tmp_path):
    (tmp_path / "train.py").write_text(code_block("docs/tutorial_fleet.md", "# train.py"))
    first = start(tmp_path, 2, 10**9)
    try:
        until = time.monotonic() + SECONDS
        while not fc.list_checkpoints(tmp_path / "run"):
            assert first.poll() is None and time.monotonic() < until, log(tmp_path, 2, 0)
            time.sleep(0.05)
        first.send_signal(signal.SIGTERM)
        first.wait(SECONDS)
    finally:
        first.kill()
    (stopped,) = {re.findall(r"^stopped after step (\d+)$", log(tmp_path, 2, rank), re.M)[0] for rank in (0, 1)}
    last = fc.latest(tmp_path / "run")
    assert (last.step, last.world_size) == (int(stopped), 2)
    second = start(tmp_path, 1, last.step + 20)
    assert second.wait(SECONDS) == 0, log(tmp_path, 1, 0)
    assert f"begins at step {last.step + 1}\n" in log(tmp_path, 1, 0)
    assert re.search(r"^loss 0\.\d{4}$", log(tmp_path, 1, 0), re.M)
    assert len(fc.list_checkpoints(tmp_path / "run")) == 2
    assert fc.latest(tmp_path / "run").world_size == 1


@pytest.mark.slow
def test_the_commands_as_they_are_printed(tmp_path):
    """Those of the first block; the test above does what those of the second do, without half a minute of sleep."""
    (tmp_path / "train.py").write_text(code_block("docs/tutorial_fleet.md", "# train.py"))
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PADDLE_", "CUDA_"))}
    env["PYTHONPATH"] = str(Path(__file__).parents[2])
    env["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    printed = []
    for command in shell_block("docs/tutorial_fleet.md", "train.py 50 ").splitlines():
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=SECONDS
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        printed.append(done.stdout)
    assert "begins at step 41\n" in printed[1]
    assert [info.step for info in fc.list_checkpoints(tmp_path / "run")] == [80, 100]
    assert "step_00000080" in printed[2] and "step_00000100" in printed[2]

"""The commands of examples/paddlenlp/README.md, in the order of the page."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("paddlenlp")
from tests.documents import ROOT, every_block
from tests.trainer.launching import TIMEOUT
from tests.trainer.matrix import TOLERANCE

EXAMPLE = ROOT / "examples" / "paddlenlp"
LOSS = re.compile(r"loss: ([\d.]+), .*global_step: (\d+),")


def losses(log: str) -> dict[int, float]:
    """Return the losses that a trainer printed, by step."""
    return {int(step): float(loss) for loss, step in LOSS.findall(log)}


def run(commands: str, directory: Path) -> str:
    """Run commands of the page; return what they and rank 0 printed."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-ec", commands], cwd=directory, env={**os.environ, "PATH": path}, capture_output=True, text=True,
        timeout=TIMEOUT, check=False,
    )  # fmt: skip
    log = directory / "log" / "workerlog.0"
    printed = done.stdout + done.stderr + (log.read_text(encoding="utf-8") if log.exists() else "")
    assert done.returncode == 0, printed[-4000:]
    shutil.rmtree(directory / "log", ignore_errors=True)
    return printed


def test_the_page_s_commands_do_what_it_says(tmp_path):
    for script in EXAMPLE.glob("*.py"):
        shutil.copy(script, tmp_path)
    install, train, resume, inspect, export = every_block("examples/paddlenlp/README.md", "bash")
    options = install[install.index("COMMON=") :]
    first = losses(run(options + train, tmp_path))
    second = losses(run(options + resume, tmp_path))
    assert sorted(first) == list(range(5, 45, 5))
    assert sorted(second) == [25, 30, 35, 40], "the second command resumes at step 20"
    assert all(abs(second[step] - first[step]) <= TOLERANCE for step in second)
    assert "saved by 2 ranks (pipe 2), step 40" in run(inspect, tmp_path)
    written = os.listdir(tmp_path / "run/checkpoint-40/huggingface")
    assert sorted(written) == ["config.json", "generation_config.json", "model.safetensors"]
    assert "exported 39 tensors" in run(export, tmp_path)
    assert os.listdir(tmp_path / "hf")

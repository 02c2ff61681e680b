"""The commands of examples/semi_auto/README.md print the losses of one uninterrupted run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("paddle")
from tests.documents import shell_block

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "semi_auto" / "train.py"
_STEP = re.compile(r"^step +(\d+)  loss (\d\.\d+)$", re.MULTILINE)
#: Sums over ranks round otherwise: the last of six digits may differ.
ROUNDING = 2e-6


def run(directory, ranks, *options):
    """``{step: loss}`` of one command."""
    launcher = ["-m", "paddle.distributed.launch", "--nproc_per_node", str(ranks), "--log_dir", str(directory / "log")]
    command = [sys.executable, *(launcher if ranks > 1 else []), str(SCRIPT), *options]
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return {int(step): float(loss) for step, loss in _STEP.findall(done.stdout)}


def test_the_mesh_changes_and_the_losses_go_on(tmp_path):
    whole = run(tmp_path, 1, "--until", "6", "--checkpoints", "whole")
    first = run(tmp_path, 2, "--cpu", "--mesh", "2x1", "--stage", "1", "--until", "3", "--checkpoints", "parts")
    second = run(tmp_path, 1, "--until", "6", "--checkpoints", "parts")
    assert (list(whole), list(first), list(second)) == ([1, 2, 3, 4, 5, 6], [1, 2, 3], [4, 5, 6])
    assert {**first, **second} == pytest.approx(whole, abs=ROUNDING)


@pytest.mark.slow
def test_the_commands_as_they_are_printed(tmp_path):
    whole = run(tmp_path, 1, "--until", "24", "--checkpoints", "whole")
    shutil.copy(SCRIPT, tmp_path)
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment.update(
        PYTHONPATH=str(ROOT), PATH=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    )
    commands = "set -e\n" + shell_block("examples/semi_auto/README.md", "--nproc_per_node 4")
    done = subprocess.run(
        ["bash", "-c", commands], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = [(int(step), float(loss)) for step, loss in _STEP.findall(done.stdout)]
    assert [step for step, _ in found] == [*range(1, 25)]
    assert dict(found) == pytest.approx(whole, abs=ROUNDING)

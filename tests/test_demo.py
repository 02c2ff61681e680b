"""What `make demo` runs ends well, and prints what its page shows."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys

import pytest

pytest.importorskip("paddle")
pytest.importorskip("matplotlib")
from tests.documents import ROOT, shell_block, text_block

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]
DEMO = ROOT / "examples" / "tensor_parallel_lm"


def checks(text: str) -> list[str]:
    """Phases and checks in the order of the output, without times and without numbers that a run or a CPU changes.

    The program itself compares these numbers with their bounds.
    """
    lines = [re.sub(r"^\[ *[\d.]+ s\] ", "", line) for line in text.splitlines() if line.startswith("[")]
    lines = [re.sub(r"= [\d.e-]+ (?=over|\(bound)", "= N ", line) for line in lines]
    return [line for line in lines if re.match(r" +ok |\S", line) and "picture: " not in line]


@pytest.mark.slow
def test_the_demo_prints_what_its_page_shows(tmp_path):
    program, *words = shlex.split(shell_block("examples/tensor_parallel_lm/README.md", "python run.py"))
    assert (program, words) == ("python", ["run.py"])
    command = [sys.executable, str(DEMO / "run.py"), "--output", str(tmp_path / "out")]
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    expected = checks(text_block("examples/tensor_parallel_lm/README.md", "all checks passed"))
    assert len(expected) > 15
    assert checks(done.stdout) == expected
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")

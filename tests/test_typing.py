"""What a type checker says of the public functions, in a program of somebody else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import paddle_flexckpt

pytest.importorskip("mypy")
ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import paddle_flexckpt as fc

writer = fc.BackgroundWriter()
flag = bool(input())
reveal_type(fc.save_state_dict({}, "a"))
reveal_type(fc.save_state_dict({}, "a", async_save=False))
reveal_type(fc.save_state_dict({}, "a", async_save=True))
reveal_type(fc.save_state_dict({}, "a", async_save=writer))
reveal_type(fc.save_state_dict({}, "a", async_save=flag))
reveal_type(fc.verify_checkpoint("a"))
fc.save_state_dict({}, "a", async_save="yes")
"""


def test_a_save_returns_a_report_or_a_handle_as_async_save_says(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        str(ROOT / "pyproject.toml"),
        "--cache-dir",
        str(tmp_path),
    ]
    done = subprocess.run([*command, str(program)], cwd=ROOT, capture_output=True, text=True)
    lines = [line.partition(": ")[2] for line in done.stdout.splitlines() if "program.py" in line]
    found = [line.partition('Revealed type is "')[2].rstrip('"') for line in lines if "Revealed" in line]
    report, handle = "paddle_flexckpt.report.SaveReport", "paddle_flexckpt.background.pending.SaveHandle"
    assert found[:4] == [report, report, handle, handle]
    assert set(found[4].split(" | ")) == {report, handle}
    assert found[5] == "paddle_flexckpt.report.VerifyReport"
    assert any("No overload variant" in line for line in lines), done.stdout


def test_the_package_says_that_it_has_types():
    assert (Path(paddle_flexckpt.__file__).parent / "py.typed").is_file()

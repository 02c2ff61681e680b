"""Each diff of docs/extending.md is applied to a copy of the package, where a program proves that it works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents import ROOT, diff_block

pytest.importorskip("paddle")
pytestmark = pytest.mark.skipif(shutil.which("patch") is None, reason="patch(1) is not installed")

STORAGE = """
import fsspec
import numpy as np
import paddle_flexckpt as fc
from fsspec.implementations.memory import MemoryFileSystem

class Vault(MemoryFileSystem):
    protocol, store, pseudo_dirs = ("vault",), {}, [""]

    def _open(self, path, mode="rb", **keywords):
        assert mode in ("rb", "xb", "wb") and (mode == "rb" or not keywords.get("block_size")), "a file in chunks"
        return super()._open(path, mode=mode, **keywords)

fsspec.register_implementation("vault", Vault)
target = {"w": np.zeros(4, dtype=np.float32)}
for step in (1, 2):
    fc.save_state_dict({"w": np.arange(4, dtype=np.float32) * step}, "vault://safe/run", "self", unique_id=0)
fc.load_state_dict(target, "vault://safe/run", "self")
assert target["w"].tolist() == [0, 2, 4, 6]
assert any(name.endswith(".manifest") for name in Vault.store), Vault.store
try:
    fc.load_state_dict(target, "vault://me:secret@safe/run", "self")
except fc.ValidationError as error:
    assert "takes no credentials from URLs" in str(error)
else:
    raise AssertionError("a password was accepted")
"""

OPTION = """
import numpy as np
import paddle_flexckpt as fc
from paddle_flexckpt.testing.simulated import SimulatedWorld

def targets():
    return {"w": np.zeros(4, dtype=np.float32)}

fc.save_state_dict({"w": np.arange(4, dtype=np.float32)}, "there", "self", step=7)
assert fc.load_state_dict(targets(), "there", "self").step == 7
assert "expected_step" in fc.load_state_dict.__doc__
world, state = SimulatedWorld(2), targets()
reports = world.run(lambda comm: fc.load_state_dict(targets(), "there", comm, expected_step=7))
assert [report.step for report in reports] == [7, 7]
for steps, text in (((7, None), "ranks disagree"), ((8, 8), "is of step 7; expected_step=8")):
    errors = world.run_all(lambda comm: fc.load_state_dict(state, "there", comm, expected_step=steps[comm.rank]))
    assert all(isinstance(error, fc.ValidationError) and text in str(error) for error in errors), errors
assert not state["w"].any()
"""


def run_with(diff: str, program: str, directory: Path) -> None:
    """Run a program with a copy of the package that a diff has changed."""
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "paddle_flexckpt", directory / "paddle_flexckpt", ignore=skipped)
    subprocess.run(["patch", "-p1", "-s"], input=diff, text=True, cwd=directory, check=True)
    check = f"import paddle_flexckpt\nassert paddle_flexckpt.__file__.startswith({str(directory)!r})\n"
    path = os.pathsep.join((str(directory), str(ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", check + program],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_the_storage_saves_and_loads(tmp_path):
    pytest.importorskip("fsspec")
    run_with(diff_block("docs/extending.md", "VaultMedium"), STORAGE, tmp_path)


def test_the_option_is_agreed_and_reported(tmp_path):
    run_with(diff_block("docs/extending.md", "expected_step"), OPTION, tmp_path)

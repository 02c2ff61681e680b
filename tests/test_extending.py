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

FORMAT = """
import json
from pathlib import Path
import numpy as np
import paddle_flexckpt as fc
from paddle_flexckpt.foreign.formats import detect_format

values = np.arange(6, dtype=np.float32).reshape(2, 3)
Path("flat").mkdir()
values.tofile("flat/w.bin")
Path("flat/tensors.json").write_text(json.dumps({"w": ["float32", [2, 3], "w.bin"]}))
assert detect_format("flat") == "flat_files"
target = np.zeros((2, 2), dtype=np.float32)
fc.load_state_dict({"w": fc.ShardedWeight("w", target, (2, 2), (2, 3), (0, 1))}, "flat", "self")
assert (target == values[:, 1:]).all()
values[:1].tofile("flat/w.bin")
try:
    fc.load_state_dict({"w": values}, "flat", "self")
except fc.CorruptCheckpointError as error:
    assert "has 12 bytes; expected 24" in str(error)
else:
    raise AssertionError("a short file was loaded")
"""

OPTIMIZER = """
import paddle
import paddle_flexckpt as fc
from paddle_flexckpt.optimizer_states import STATES

class Trust(paddle.optimizer.Optimizer):
    def _create_accumulators(self, block, parameters):
        for parameter in parameters:
            self._add_accumulator("trust_ratio", parameter, fill_value=2.0, shape=[1])
            self._add_accumulator("trend", parameter, fill_value=3.0)

fc.install()
assert {"trust_ratio_0", "trend_0"} <= STATES
model = paddle.nn.Linear(2, 1)
optimizer = Trust(0.1, parameters=model.parameters())
# This rank has one of two elements of the bias: a number is not split as it is.
part = fc.ShardedWeight("bias", model.bias, (1,), (2,), (0,))
described = optimizer.sharded_state_dict({**model.sharded_state_dict(), "bias": part})
shapes = {key: each.global_shape for key, each in described.items()}
assert shapes["bias.trust_ratio_0"] == (1,) and shapes["bias.trend_0"] == (2,), shapes
# A plain state dict, whose names Paddle makes, loads into one of structured names.
fc.save_state_dict({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "plain", "self")
shards = model.sharded_state_dict()
states = optimizer.sharded_state_dict(shards)
for each in states.values():
    each.local_tensor.zero_()
report = fc.load_state_dict({**shards, **states}, "plain", "self")
assert states["weight.trust_ratio_0"].local_tensor.tolist() == [2.0] and "weight.trend_0" in report.aliases
assert states["weight.trend_0"].local_tensor.tolist() == [[3.0], [3.0]]
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


def test_the_format_is_detected_and_read(tmp_path):
    run_with(diff_block("docs/extending.md", "FLAT_FILES"), FORMAT, tmp_path)


def test_the_states_of_the_optimizer_are_known(tmp_path):
    run_with(diff_block("docs/extending.md", "trust_ratio"), OPTIMIZER, tmp_path)


def test_the_option_is_agreed_and_reported(tmp_path):
    run_with(diff_block("docs/extending.md", "expected_step"), OPTION, tmp_path)

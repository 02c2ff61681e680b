"""Zero copies: what a save, a load, a reshard or an export adds to the process's memory, whatever the state's size.

Measured is the peak of the resident set (VmHWM of /proc/self/status, which counts mapped files as well), set back
through /proc/self/clear_refs before each call, less the resident set just before it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ramdisk import memory_directory

pytest.importorskip("paddle")
pytestmark = pytest.mark.paddle
ROOT = Path(__file__).resolve().parents[2]
# An export holds a tensor at a time, and of a larger one a band.
TENSOR_MIB = 128
# All tensors together are more than any budget, and so is the one that is larger.
BUDGET_MIB = {
    "save": 64,
    "load": 64,
    "load, verified": 64,
    "load of columns": 64,
    "load of columns, verified": 64,
    "reshard": 64,
    "reshard to columns": 64,
    "export": 256,
    "export of one tensor": 256,
    "export of one tensor, transposed and scaled": 256,
}

SCRIPT = """
import gc, json, shutil, sys
import numpy as np
import paddle
import paddle_flexckpt as fc
from paddle_flexckpt.memory.tensors import HostTensor

path, count, tensor_mib, large_mib = sys.argv[1], *map(int, sys.argv[2:])
columns = 4096
rows = tensor_mib * 1024 * 1024 // 4 // columns


def status(name):
    with open("/proc/self/status") as stream:
        return next(int(line.split()[1]) for line in stream if line.startswith(name)) / 1024


def extra(work):
    gc.collect()
    with open("/proc/self/clear_refs", "w") as stream:
        stream.write("5")  # sets the peak back to what is resident now
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def tensors(first, width):
    # Every page is written, so that all of it is resident before anything is measured.
    made = {}
    for i in range(count):
        tensor = paddle.empty([rows, width])
        HostTensor(tensor).array[...] = first + i
        made[f"w{i}"] = tensor
    return made


def shards(made, offset):
    return {
        key: fc.ShardedWeight(key, tensor, tensor.shape, (rows, columns), (0, offset)) for key, tensor in made.items()
    }


result = {}
state = tensors(1, columns)
fc.save_state_dict({"warm": paddle.ones([4])}, path)
fc.load_state_dict({"warm": paddle.zeros([4])}, path)
result["save"] = extra(lambda: fc.save_state_dict(state, path, unique_id=1))
del state

target = tensors(-9, columns)
result["load"] = extra(lambda: fc.load_state_dict(target, path, unique_id=1))
assert all((HostTensor(tensor).array == 1 + i).all() for i, tensor in enumerate(target.values()))
result["load, verified"] = extra(lambda: fc.load_state_dict(target, path, unique_id=1, verify="full"))
# As large as what is resharded, so that nothing that was freed is there to be used again.
other = tensors(-9, columns // 2)
result["reshard to columns"] = extra(lambda: fc.reshard_sharded_state_dict(target, shards(other, columns // 2)))
assert all((HostTensor(tensor).array == 1 + i).all() for i, tensor in enumerate(other.values()))
halves = tensors(-9, columns // 2)
result["reshard"] = extra(lambda: fc.reshard_sharded_state_dict(other, halves))
del target, other, halves

# Runs of 12 KiB out of rows of 16 KiB: too short for a system call each, so they come out of a memory map.
width = 3072
cut = tensors(-9, width)
reports = []
result["load of columns"] = extra(
    lambda: reports.append(fc.load_state_dict(shards(cut, columns - width), path, unique_id=1))
)
assert all((HostTensor(tensor).array == 1 + i).all() for i, tensor in enumerate(cut.values()))
assert reports[0].bytes_read == count * rows * width * 4
assert reports[0].bytes_verified == count * rows * columns * 4
result["load of columns, verified"] = extra(
    lambda: fc.load_state_dict(shards(cut, columns - width), path, unique_id=1, verify="full")
)
del cut
result["export"] = extra(lambda: fc.export_safetensors(path, path + "/../export", unique_id=1))

for name in (path + "/../export", path):
    shutil.rmtree(name)
large = paddle.empty([large_mib * 256, 1024])
HostTensor(large).array[...] = 1
fc.save_state_dict({"large": large}, path)
del large
result["export of one tensor"] = extra(lambda: fc.export_safetensors(path, path + "/../export"))
shutil.rmtree(path + "/../export")
statements = {"aoa_statements": ["large^T -> large, scale=2.0"]}
result["export of one tensor, transposed and scaled"] = extra(
    lambda: fc.export_safetensors(path, path + "/../export", statements)
)
result["mib"] = count * rows * columns * 4 / 2**20
print(json.dumps(result))
"""


@pytest.mark.parametrize(("count", "large_mib"), [(3, 320), pytest.param(8, 600, marks=pytest.mark.slow)])
def test_each_call_stays_within_its_budget(count, large_mib):
    state_mib = count * TENSOR_MIB
    with memory_directory(2 * state_mib << 20) as path:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(path / "checkpoint"), *map(str, (count, TENSOR_MIB, large_mib))],
            cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    extra = json.loads(done.stdout.splitlines()[-1])
    print({name: f"{value:.1f} MiB" for name, value in extra.items()})
    assert extra.pop("mib") == state_mib
    assert set(extra) == set(BUDGET_MIB)
    for name, mib in extra.items():
        assert mib <= BUDGET_MIB[name], f"{name} took {mib:.0f} MiB beyond the {state_mib} MiB of the state"

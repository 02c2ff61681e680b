"""Zero copies: what a save or a load of 1 GiB adds to the process's memory.

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
STATE_MIB, BUDGET_MIB = 1024, 64

SCRIPT = """
import gc, json, sys
import numpy as np
import paddle
import paddle_flexckpt as fc
from paddle_flexckpt.live.tensors import HostTensor

path, mib = sys.argv[1], int(sys.argv[2])
count = 8
columns = 4096
rows = mib * 1024 * 1024 // 4 // count // columns


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
del target

# Runs of 12 KiB out of rows of 16 KiB: too short for a system call each, so they come out of a memory map.
width = 3072
cut = tensors(-9, width)
reports = []
result["load of columns"] = extra(
    lambda: reports.append(fc.load_state_dict(shards(cut, columns - width), path, unique_id=1))
)
assert all((HostTensor(tensor).array == 1 + i).all() for i, tensor in enumerate(cut.values()))
assert reports[0].bytes_read == count * rows * width * 4
assert reports[0].bytes_verified == 0
result["mib"] = count * rows * columns * 4 / 2**20
print(json.dumps(result))
"""


def test_a_save_and_two_loads_of_a_gibibyte_stay_within_the_budget():
    with memory_directory(STATE_MIB << 20) as path:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(path), str(STATE_MIB)],
            cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    extra = json.loads(done.stdout.splitlines()[-1])
    print({name: f"{value:.1f} MiB" for name, value in extra.items()})
    assert extra.pop("mib") == STATE_MIB
    assert set(extra) == {"save", "load", "load of columns"}
    for name, mib in extra.items():
        assert mib <= BUDGET_MIB, f"{name} took {mib:.0f} MiB beyond the {STATE_MIB} MiB of the state"

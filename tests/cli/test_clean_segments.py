"""flexckpt clean in shared memory: segments that engines have left go, and those that a process uses stay."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from paddle_flexckpt.cli.main import main
from paddle_flexckpt.rollout.segment import SegmentDirectory, SegmentNames
from tests.rollout.numpy_engine import model_directory, segment, weights, workers

FIRST, SECOND = "flexckpt-0123456789ab-aa.safetensors", "flexckpt-0123456789ab-bb.safetensors"


@pytest.fixture
def memory(tmp_path):
    """Two segments, and a file of somebody else."""
    path = tmp_path / "shm"
    path.mkdir()
    for seed, name in enumerate((FIRST, SECOND)):
        segment(path / name, weights(seed))
    segment(path / "model.safetensors", weights(2))
    return path


def clean(path, capsys, *options):
    assert main(["clean", str(path), *options]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_segment_that_an_engine_maps_stays(memory, tmp_path, capsys):
    _, (worker,) = workers(model_directory(tmp_path / "model", weights(0)), weights(0), 1)
    worker.stage("1", str(memory / FIRST))
    size = os.path.getsize(memory / FIRST)
    assert clean(memory, capsys) == [
        f"segment: {memory}/{FIRST}: {size} B; a process holds it",
        f"segment: {memory}/{SECOND}: {size} B; no process holds it",
        f"`flexckpt clean {memory} --remove` removes the memory that no process holds",
    ]
    for _ in range(2):
        lines = clean(memory, capsys, "--remove")
        assert lines[0].endswith("; a process holds it")
        assert sorted(os.listdir(memory)) == [FIRST, "model.safetensors"]
    worker.commit("1")
    worker.accept("1")
    clean(memory, capsys, "--remove")
    assert (memory / FIRST).exists()
    worker.stage("2", str(memory / FIRST))
    worker.discard()
    clean(memory, capsys, "--remove")
    assert (memory / FIRST).exists()
    worker.stage("2", segment(tmp_path / "2.safetensors", weights(1)))
    worker.commit("2")
    assert worker.accept("2")["released"]
    assert clean(memory, capsys, "--remove") == [f"segment: {memory}/{FIRST}: {size} B; removed"]
    assert os.listdir(memory) == ["model.safetensors"]


def test_a_segment_of_an_engine_that_was_killed_goes(memory, capsys):
    code = (
        "import sys; from paddle_flexckpt.rollout.mapped_tensors import MappedTensors; "
        "held = MappedTensors([sys.argv[1]], held=True); print('mapped', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(memory / FIRST)]
    engine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert engine.stdout is not None
    assert engine.stdout.readline() == b"mapped\n"
    clean(memory, capsys, "--remove")
    assert (memory / FIRST).exists()
    engine.kill()
    engine.communicate()
    clean(memory, capsys, "--remove")
    assert os.listdir(memory) == ["model.safetensors"]


def test_a_segment_that_a_trainer_writes_stays(memory, capsys):
    directory = SegmentDirectory(str(memory))
    names = SegmentNames("c", "dd", "", (), 64, False)
    directory.open(names)[:] = np.zeros(64, np.uint8)
    told = json.loads("\n".join(clean(memory, capsys, "--remove", "--json")))
    assert [(each["path"], each["held"]) for each in told["segments"]] == [
        (f"{memory}/{FIRST}", False),
        (f"{memory}/{SECOND}", False),
        (f"{memory}/flexckpt-c-dd.safetensors", True),
    ]
    assert told["freed"] == [f"{memory}/{FIRST}", f"{memory}/{SECOND}"]
    directory.forget()
    clean(memory, capsys, "--remove")
    assert os.listdir(memory) == ["model.safetensors"]

"""Loads of many small tensors: how many calls of Python functions and requests each of them costs."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from paddle_flexckpt.catalog import CheckpointError, ValidationError
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.loading.merged import load_merged_state_dict
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.sharded_weight import ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.tools.conversion import convert_checkpoint
from paddle_flexckpt.tools.verification import repair_manifest
from tests.ramdisk import memory_directory
from tests.saved import data_file

FEW, MANY = 512, 1024
SHAPE = (16, 16)


def calls_of(work: Any) -> int:
    """How often something calls a function of Python."""
    count = 0

    def note(_frame: Any, event: str, _value: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def shards(kind: str, count: int, columns: int) -> dict[str, ShardedWeight]:
    """Tensors of which a rank holds the last columns."""
    found = {}
    for i in range(count):
        values: Any = np.full((SHAPE[0], columns), i, np.float32) + np.arange(SHAPE[1] - columns, SHAPE[1])
        if kind == "paddle":
            paddle = pytest.importorskip("paddle")
            values = paddle.to_tensor(values.astype(np.float32), place=paddle.CPUPlace())
        else:
            values = values.astype(np.float32)
        name = f"layers.{i}.weight"
        found[name] = ShardedWeight(name, values, (SHAPE[0], columns), SHAPE, (0, SHAPE[1] - columns))
    return found


@pytest.mark.parametrize("kind", ["numpy", pytest.param("paddle", marks=pytest.mark.paddle)])
@pytest.mark.parametrize("verify", ["read", "full"])
@pytest.mark.parametrize(("columns", "most"), [(16, 10), (7, 15)], ids=["same layout", "cut"])
def test_a_tensor_more_costs_few_calls_and_no_request_of_its_own(kind, verify, columns, most):
    counts, reports = {}, {}
    for number in (FEW, MANY):
        with memory_directory() as path:
            saved = shards(kind, number, SHAPE[1])
            save_state_dict(saved, path, SoloCommunicator())
            target = {
                name: ShardedWeight(name, weight.local_tensor * 0, weight.local_shape, SHAPE, weight.global_offset)
                for name, weight in shards(kind, number, columns).items()
            }
            load_state_dict(target, path, SoloCommunicator(), verify=verify)  # what is looked up once

            def load(target=target, path=path, number=number):
                reports[number] = load_state_dict(target, path, SoloCommunicator(), verify=verify)

            counts[number] = calls_of(load)
            for name, weight in target.items():
                expected = np.asarray(saved[name].local_tensor)[:, SHAPE[1] - columns :]
                assert (np.asarray(weight.local_tensor) == expected).all()
    assert counts[FEW] > 0
    assert (counts[MANY] - counts[FEW]) / (MANY - FEW) <= most
    whole = 4 * SHAPE[0] * SHAPE[1] * MANY
    read = whole if verify == "full" or columns == SHAPE[1] else whole * columns // SHAPE[1]
    assert (reports[MANY].bytes_read, reports[MANY].bytes_needed) == (read, whole * columns // SHAPE[1])
    assert reports[MANY].bytes_verified == whole
    # A tensor is less than a block: all of them are one request, or one copy each out of a memory map.
    assert reports[MANY].reads == (MANY if verify == "read" and columns < SHAPE[1] else 1)


def test_an_array_that_may_not_be_written_is_refused_and_stays():
    with memory_directory() as path:
        save_state_dict({"w": np.ones(8, np.float32)}, path, SoloCommunicator())
        target = np.zeros(8, np.float32)
        target.flags.writeable = False
        with pytest.raises(CheckpointError, match="a target cannot be written to"):
            load_state_dict({"w": target}, path, SoloCommunicator())
        assert not target.any()


@pytest.mark.parametrize("options", [{}, {"comm_method": "cooperative"}, {"storage": "per_node"}])
def test_loads_of_a_checkpoint_that_was_rebuilt_without_a_file_say_so(tmp_path, caplog, options):
    path = tmp_path / "c"
    SimulatedWorld(2).run(lambda comm: save_state_dict({f"own.{comm.rank}": np.full(8, comm.rank, "f4")}, path, comm))
    (path / "0.manifest").unlink()
    lost = data_file(path, 1)
    (path / lost).unlink()
    partial = repair_manifest(path, 0, fewer_files=True).partial
    assert partial.endswith(f"has besides {lost}, 'own.1'")
    caplog.clear()

    def job(comm, keys, **more):
        target = {key: np.zeros(8, "f4") for key in keys}
        return load_state_dict(target, path, comm, **options, **more), target

    for report, target in SimulatedWorld(2).run(lambda comm: job(comm, ["own.0"])):
        assert report.partial == partial
        assert report.summary().endswith(f"; the checkpoint is partial: {partial}") or options
        assert (target["own.0"] == 0).all()
    assert f"is partial: {partial}" in caplog.text
    errors = SimulatedWorld(2).run_all(lambda comm: job(comm, ["own.0", "own.1"]))
    assert len({str(error) for error in errors}) == 1
    assert isinstance(errors[0], ValidationError)
    assert "the source has no such key (key 'own.1'" in str(errors[0])
    assert f"the checkpoint is partial: {partial}" in str(errors[0])
    ((report, _), _) = SimulatedWorld(2).run(lambda comm: job(comm, ["own.0", "own.1"], strict=False))
    assert (report.missing, report.partial) == (["own.1"], partial)
    for work in (lambda: load_merged_state_dict(path), lambda: convert_checkpoint(path, tmp_path / "out")):
        caplog.clear()
        work()
        assert f"is partial: {partial}" in caplog.text

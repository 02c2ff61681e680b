"""Saves: how many calls of Python functions a tensor takes, which is what a save of many small ones lasts."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import paddle_flexckpt as fc
from paddle_flexckpt.foreign.paddle_files import PADDLE_METADATA, open_to_save
from paddle_flexckpt.media.remote import FsspecBackend
from paddle_flexckpt.memory import state as live_state
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.saving import saver
from paddle_flexckpt.saving.save_options import SaveOptions
from paddle_flexckpt.saving.shared_saves import SharedSave
from paddle_flexckpt.sharded_weight import ShardedWeight
from paddle_flexckpt.transfer import transfer
from tests.native.samples import items_of, whole
from tests.ramdisk import memory_directory
from tests.saved import short_names

MOST_CALLS = 5


def tensor_of(kind: str, number: int) -> Any:
    values = np.full((8, 4), number, dtype=np.float32)
    if "paddle" in kind:
        paddle = pytest.importorskip("paddle")
        return paddle.to_tensor(values, place=paddle.CPUPlace())
    return values.astype(ml_dtypes.bfloat16) if "bfloat16" in kind else values


def state_of(kind: str, count: int) -> dict[str, Any]:
    state = {}
    for number in range(count):
        name, tensor = f"layers.{number}.weight", tensor_of(kind, number)
        if "flattened" in kind:
            tensor = tensor.reshape([-1])
            state[name] = ShardedWeight(name, tensor, (8, 4), (8, 4), (0, 0), True, slice(0, 32))
        elif "sharded" in kind:
            state[name] = ShardedWeight(name, tensor, (8, 4), (8, 4), (0, 0))
        else:
            state[name] = tensor
    return {"model": state}


def calls_of_a_save(state: dict[str, Any], path: Path) -> Counter[str]:
    """How often a save calls each Python function; generators count each time that they go on."""
    calls: Counter[str] = Counter()

    def count(frame: Any, event: str, _value: Any) -> None:
        if event == "call":
            calls[f"{frame.f_code.co_filename}:{frame.f_code.co_name}"] += 1

    sys.setprofile(count)
    try:
        fc.save_state_dict(state, path, SoloCommunicator())
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize(
    "kind",
    ["plain", "sharded", "bfloat16", "flattened sharded", "plain paddle", "sharded paddle", "flattened sharded paddle"],
)
def test_a_tensor_more_costs_a_few_calls(kind):
    with memory_directory() as path:
        fc.save_state_dict(state_of(kind, 2), path / "first", SoloCommunicator())  # what is imported late is by now
        few = calls_of_a_save(state_of(kind, 512), path / "few")
        many = calls_of_a_save(state_of(kind, 1024), path / "many")
    more = {name: count / 512 for name, count in (many - few).items()}
    assert sum(more.values()) <= MOST_CALLS, sorted(more.items(), key=lambda item: -item[1])[:10]


def test_a_save_and_a_load_describe_and_plan_without_the_garbage_collector(tmp_path, monkeypatch):
    seen = {}

    def spy(module, name):
        function = getattr(module, name)

        def call(*args, **kwargs):
            seen.setdefault(name, []).append(gc.isenabled())
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    spy(live_state, "_usual_rows")
    spy(saver, "Planners")
    spy(transfer, "plan_fill")
    tensors = {f"layers.{i}.weight": np.ones(4, np.float32) for i in range(9)}
    fc.save_state_dict(tensors, tmp_path / "made", SoloCommunicator())
    fc.load_state_dict(tensors, tmp_path / "made", SoloCommunicator())
    assert seen == {"_usual_rows": [False, False], "Planners": [False], "plan_fill": [False]}
    assert gc.isenabled()


@pytest.mark.parametrize("storage", ["shared", "per_node"])
def test_an_id_that_must_not_be_replaced_is_refused_before_anything_is_written(tmp_path, storage):
    comm, options = SoloCommunicator(), {"storage": storage, "overwrite": False}
    fc.save_state_dict({"w": np.ones(4)}, tmp_path, comm, unique_id=3, **options)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(fc.ValidationError, match="has a checkpoint with id 3, which overwrite=False keeps"):
        fc.save_state_dict({"w": np.zeros(4)}, tmp_path, comm, unique_id=3, **options)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert fc.save_state_dict({"w": np.zeros(4)}, tmp_path, comm, **options).unique_id == 4


def test_so_is_one_that_a_store_does_not_list_yet(tmp_path, monkeypatch):
    path, comm = f"memory://{tmp_path.name}", SoloCommunicator()
    fc.save_state_dict({"w": np.ones(4)}, path, comm, unique_id=0)
    monkeypatch.setattr(FsspecBackend, "names", lambda self, *kinds: [])
    with pytest.raises(fc.ValidationError, match="has a checkpoint with id 0, which overwrite=False keeps"):
        fc.save_state_dict({"w": np.zeros(4)}, path, comm, unique_id=0, overwrite=False)


def test_a_rank_that_loses_the_others_when_its_save_has_been_cleaned_up_leaves_nothing(tmp_path):
    """It was stopped before it wrote its data file, and the next start of the job has cleaned up."""
    directory, comm = open_to_save(tmp_path), SoloCommunicator()
    save = SharedSave(comm, directory, SaveOptions(), "cannot save")
    names, _ = save.begin()
    save.agree(names, [b""], [b""])
    save.release()
    with directory.lock():
        open_to_save(tmp_path).cleaner.remove_dead_saves()
    data = np.zeros(4, np.uint8)
    directory.write_data(names, items_of([whole("w", "uint8", (4,))], names.data_file(0)), [data], world_size=1)
    save.lose_rank(fc.LostRankError("rank 1 is lost"))
    assert os.listdir(tmp_path) == []
    fc.save_state_dict({"w": data}, tmp_path, comm)
    assert short_names(tmp_path) == ["0.manifest", "0_0-1.safetensors", PADDLE_METADATA]


def test_whether_an_id_may_be_replaced_is_true_or_false(tmp_path):
    with pytest.raises(fc.ValidationError, match="overwrite"):
        fc.save_state_dict({"w": np.ones(4)}, tmp_path, SoloCommunicator(), overwrite="no")
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_each_save_alone_to_one_path_do_not_replace_each_other(tmp_path):
    """As with ``process_group="self"``: each gets an id of its own."""
    for rank in (0, 1, 0):
        report = fc.save_state_dict({"w": np.full(4, rank, np.float32)}, tmp_path, SoloCommunicator(rank))
        assert not report.replaced
    found = {}
    for each in fc.list_checkpoints(tmp_path):
        target = {"w": np.zeros(4, np.float32)}
        fc.load_state_dict(target, tmp_path, SoloCommunicator(), unique_id=each.unique_id)
        found[each.unique_id] = target["w"][0]
    assert found == {0: 0, 1: 1, 2: 0}

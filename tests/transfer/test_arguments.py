"""Arguments that are integers or truth values: every public call refuses other types before it does anything."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re

import numpy as np
import pytest

pytest.importorskip("paddle")  # some of the public classes import it

import paddle_flexckpt as fc
from paddle_flexckpt.ranks.communicator import SoloCommunicator

STATE = {"w": np.arange(6, dtype=np.float32)}
WRONG = {"int": (1.5, "7", True), "bool": (1, "yes")}
ALONE = {"process_group": SoloCommunicator()}
SIZES = {"dataset": range(8), "batch_size": 2, "num_replicas": 1, "rank": 0}
RESHARD = {"src_sharded_state_dict": STATE, "dst_sharded_state_dict": STATE, **ALONE}
# What makes each call good, but for the argument in question; P stands for the path of a checkpoint.
GOOD = {
    "BackgroundWriter": {}, "BackgroundWriter.reserve": {},
    "CheckpointManager": {"root": "new", "preemption_signals": (), **ALONE},
    "CheckpointManager.restore": {"state": STATE}, "CheckpointManager.save": {"step": 2, "state": STATE},
    "CheckpointManager.should_save": {},
    "ElasticBatchSampler": SIZES, "ElasticBatchSampler.advance": {}, "ElasticBatchSampler.set_epoch": {},
    "ElasticStream": {"make": iter, "splits": 2, "num_replicas": 1, "rank": 0}, "ElasticStream.batches": {},
    "KeepBest": {"metric": "loss"}, "KeepEvery": {}, "KeepLatest": {},
    "MemoryTier": {"path": "memory", "save_when": fc.SaveEvery(1)}, "SaveEvery": {},
    "WeightChannel": {"url": "http://localhost:1", **ALONE},
    "WeightPublisher": {"root": "new", **ALONE}, "WeightPublisher.publish": {"model": STATE},
    "collect_extra_state": {}, "convert_checkpoint": {"path": "P", "output": "new"},
    "diff": {"first": "P", "second": "P"}, "digest": {"source": "P"},
    "export_safetensors": {"path": "P", "output": "new"}, "full_param": {"sharded_state_dict": STATE, **ALONE},
    "load": {"path": "P", "state": STATE, **ALONE}, "load_extra_state": {"path": "P", **ALONE},
    "load_merged_state_dict": {"path": "P"}, "load_state_dict": {"state_dict": STATE, "path": "P", **ALONE},
    "merge_sharded_state_dict": {"load_path": "P", "save_path": "new", **ALONE},
    "plan_reshard": RESHARD, "publish": {"model": STATE, "output": "new", **ALONE},
    "publish_fastdeploy": {"model": STATE, "output": "new", "step": 1, "degree": 1, "axes": {}, **ALONE},
    "rehearse": {"path": "P", "layout": "dp=1"}, "repair_manifest": {"path": "P", "unique_id": 0},
    "reshard_sharded_state_dict": RESHARD, "restore_extra_state": {"state": {}},
    "save": {"path": "P", "state": STATE, **ALONE}, "save_state_dict": {"state_dict": STATE, "path": "P", **ALONE},
    "verify_checkpoint": {"path": "P"},
}  # fmt: skip


# Calls of the library itself; a channel, which needs an engine; and descriptions, which are checked with their shards.
LEFT_OUT = {"FusedAxis", "SaveEvery.wants", "SaveHandle", "SaveInterval.wants", "ShardedWeight", "WeightChannel.push"}

# Options of Paddle's, most without effect.
UNUSED = ("num_workers", "offload", "safetensors")


def calls():
    for name in fc.__all__:
        call = getattr(fc, name)
        if inspect.isfunction(call):
            yield name, call
        elif inspect.isclass(call) and not issubclass(call, Exception):
            yield name, call.__init__
            yield from ((f"{name}.{each}", method) for each, method in inspect.getmembers(call, inspect.isfunction)
                        if each[0] != "_")  # fmt: skip


def cases():
    for name, call in calls():
        for each in inspect.signature(call).parameters.values():
            kind = str(each.annotation).removesuffix(" | None")
            if name not in LEFT_OUT and each.name not in UNUSED:
                yield from ((name, each.name, wrong) for wrong in WRONG.get(kind, ()))


@pytest.mark.parametrize(("name", "argument", "wrong"), [*cases()])
def test_another_type_is_refused(tmp_path, monkeypatch, name, argument, wrong):
    monkeypatch.chdir(tmp_path)
    fc.save("P", state=STATE, **ALONE)
    before = {each: each.is_file() and each.read_bytes() for each in tmp_path.rglob("*")}
    owner, _, method = name.partition(".")
    call = getattr(fc, owner)
    if method:
        call = getattr(call(**GOOD[owner]), method)
    if name == "WeightPublisher":  # which looks at its options with all ranks
        call = lambda **named: fc.WeightPublisher(**named).publish(STATE)  # noqa: E731
    with pytest.raises(fc.ValidationError, match=rf"{argument} .*got {re.escape(repr(wrong))}.*Remedy \(FC\d\d\d\): "):
        call(**{**GOOD[name], argument: wrong})
    assert {each: each.is_file() and each.read_bytes() for each in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(("name", "argument"), [
    (name, argument) for name, call in calls() if name not in LEFT_OUT
    for argument in ("coordinator_rank", "offload") if argument in inspect.signature(call).parameters
])  # fmt: skip
def test_none_is_the_default_where_paddles_calls_allow_it(tmp_path, monkeypatch, name, argument):
    monkeypatch.chdir(tmp_path)
    fc.save("P", state=STATE, **ALONE)
    owner, _, method = name.partition(".")
    call = getattr(fc, owner) if not method else getattr(getattr(fc, owner)(**GOOD[owner]), method)
    result = call(**{**GOOD[name], argument: None})
    list(result if name == "full_param" else ())


def test_integers_and_truth_values_of_numpy_are_taken():
    sampler = fc.ElasticBatchSampler(**{**SIZES, "batch_size": np.int64(2), "shuffle": np.bool_(True)})
    sampler.advance(np.int32(3))
    assert (sampler.position, type(sampler.batch_size), sampler.shuffle) == (6, int, True)
    with pytest.raises(TypeError, match=r"advance\(\) got an unexpected keyword argument 'steps'"):
        sampler.advance(steps=3)


def of_paddle():
    """Names that Paddle has too, each with what this library has and what Paddle has."""
    package = pytest.importorskip("paddle.distributed.flex_checkpoint", reason="Paddle 3.2")
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    modules = [importlib.import_module("paddle.distributed"), *(importlib.import_module(each.name) for each in found)]
    for name in sorted(fc._HOME):
        theirs = (getattr(module, name, None) for module in modules)
        yield from ((name, getattr(fc, name), each) for each in dict.fromkeys(theirs) if inspect.isroutine(each)
                    or inspect.isclass(each))  # fmt: skip


def test_arguments_have_the_places_that_they_have_in_paddle():
    """``is_sharded_state_dict`` takes any object; Paddle's name for its argument is another."""
    compared = set()
    for name, ours, theirs in of_paddle():
        ours, theirs = ([key for key, each in inspect.signature(call).parameters.items()
                         if each.kind is each.POSITIONAL_OR_KEYWORD] for call in (ours, theirs))  # fmt: skip
        assert name == "is_sharded_state_dict" or ours[: len(theirs)] == theirs, name
        compared.add(name)
    assert compared >= {"save_state_dict", "load_state_dict", "merge_sharded_state_dict", "full_param", "ShardedWeight"}

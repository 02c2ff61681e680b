"""Ranks agree on every option of every public call, or the call says why they need not."""

from __future__ import annotations

import dataclasses
import inspect

import numpy as np
import pytest

import paddle_flexckpt as fc
import paddle_flexckpt.manager.manager as manager_module
from paddle_flexckpt import run_state
from paddle_flexckpt.manager import KeepBest, KeepLatest, SaveEvery, SaveInterval
from paddle_flexckpt.run_state import collect_extra_state, load_extra_state
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.transfer.options import options_of

# gen_aoa_statements() collects what differs between ranks: that is what its group is for.
PUBLIC = {name: getattr(run_state, name) for name in run_state.__all__} | {
    # A manager has methods of these names.
    {"save": "fc.save", "load": "fc.load"}.get(name, name): getattr(fc, name)
    for name in fc._HOME
}
FUNCTIONS = [
    name
    for name, function in PUBLIC.items()
    if inspect.isfunction(function)
    and "process_group" in inspect.signature(function).parameters
    and name != "gen_aoa_statements"
]
METHODS = [
    name
    for name, method in vars(fc.CheckpointManager).items()
    if inspect.isfunction(method)
    and (name == "__init__" or not name.startswith("_"))
    and len(inspect.signature(method).parameters) > 1
]
CALLS = {name: PUBLIC[name] for name in FUNCTIONS} | {name: getattr(fc.CheckpointManager, name) for name in METHODS}
STATEMENTS = {"aoa_statements": ["w -> w"]}
# By option: what rank 0 and rank 1 say. A new option needs a line here, or a reason in its call's declaration.
VALUES = {
    "aoa_config": (None, STATEMENTS),
    "async_save": (False, True),
    "axes": ({}, {"w": 0}),
    "degree": (1, 2),
    "gpu_ids": (None, [3]),
    "skip_postfix_list": ([], ["moment1_0"]),
    "slice_bytes": (None, 4096),
    "staging_bytes": (None, 64 << 20),
    "blocking": (True, False),
    "check_replicas": (True, False),
    "comm_method": ("direct", "cooperative"),
    "coordinator_rank": (0, 1),
    "dtype": ("raise", "cast"),
    "fallback": (False, True),
    "schedule": ("raise", "ignore"),
    "fused": ("convert", "exact"),
    "keep": (KeepLatest(1), KeepLatest(2)),
    "memory": (None, fc.MemoryTier("memory", fc.SaveEvery(1))),
    "lr_scheduler": (None, "a schedule"),
    "master_weights": ("exact", "convert"),
    "max_file_bytes": (100, 200),
    "metric": ("loss", "accuracy"),
    "mode": ("min", "max"),
    "mw_name_compatibility": (True, False),
    "node_copies": (1, 2),
    "offload": (False, True),
    "optimizer_states": ("raise", "ignore"),
    "overwrite": (False, True),
    "preemption_signals": ((), (10,)),
    "pages": (False, True),
    "parity": (2, 3),
    "prefix": (None, "model"),
    "raw_names": ("recorded", "trusted"),
    "reports": (False, True),
    "rng": (False, True),
    "root": ("a", "b"),
    "safetensor_prefix": ("model", "other"),
    "save_replicas": (False, True),
    "save_when": (SaveEvery(1), SaveEvery(2)),
    "scaler": (None, "a scaler"),
    "step": (1, 2),
    "storage": ("shared", "per_node"),
    "strict": ("missing", False),
    "tied_names": (True, False),
    "unique_id": (0, 1),
    "use_replicas": (True, False),
    "verify": ("read", "full"),
}


def shards():
    return {"w": np.arange(8, dtype=np.float32)}


def manager_of(tmp_path, comm, **options):
    options = {"root": tmp_path, "preemption_signals": (), "save_when": SaveInterval(1), **options}
    return fc.CheckpointManager(process_group=comm, **options)


def call(name, tmp_path, comm, **options):
    """Makes a call that would go well, but for the options."""
    if name == "save_state_dict":
        if {"node_copies", "parity"} & options.keys():
            options["storage"] = "per_node"
        if "slice_bytes" in options or "staging_bytes" in options:
            # A writer is a process's, and these ranks are threads of one: with the same writer they would wait.
            with fc.BackgroundWriter() as writer:
                return fc.save_state_dict(shards(), tmp_path / "new", comm, async_save=writer, **options)
        return fc.save_state_dict(shards(), tmp_path / "new", comm, **options)
    if name in ("fc.save", "fc.load"):
        for key in ("lr_scheduler", "scaler"):
            if options.get(key) is not None:
                options[key] = Stateful()
        if name == "fc.load":
            return fc.load(tmp_path / "there", state=shards(), process_group=comm, **options)
        if "slice_bytes" in options or "staging_bytes" in options:
            with fc.BackgroundWriter() as writer:
                return fc.save(
                    tmp_path / "new", state=shards(), process_group=comm, **{"async_save": writer, **options}
                )
        return fc.save(tmp_path / "new", state=shards(), process_group=comm, **{"rng": False, **options})
    if name == "load_state_dict":
        return fc.load_state_dict(shards(), tmp_path / "there", comm, **options)
    if name == "publish":
        return fc.publish(shards(), tmp_path / "published", comm, **options)
    if name == "publish_fastdeploy":
        options = {"step": 1, "degree": 1, "axes": {}, **options}
        return fc.publish_fastdeploy(shards(), tmp_path / "snapshot", process_group=comm, **options)
    if name == "merge_sharded_state_dict":
        return fc.merge_sharded_state_dict(tmp_path / "there", tmp_path / "merged", process_group=comm, **options)
    if name == "full_param":
        return list(fc.full_param(shards(), process_group=comm, **options))
    if name == "load_extra_state":
        return load_extra_state(tmp_path / "there", process_group=comm, **options)
    if name in ("reshard_sharded_state_dict", "plan_reshard"):
        return getattr(fc, name)(shards(), shards(), comm, **options)
    if name == "_load_state_dict":
        source = fc.Metadata({"w": [fc.LocalTensorMetadata((0,), (8,), "float32", (8,))]}, {}, None)
        index = fc.LocalTensorIndex("w", (0,))
        source.storage_metadata = {index: "file"}
        held = {"file": shards()} if comm.rank == 0 else {}
        return fc._load_state_dict(shards(), held, [source], comm, **options)
    if name == "__init__":
        if "root" in options:
            options["root"] = tmp_path / options["root"]
        if "slice_bytes" in options or "staging_bytes" in options:
            options["async_save"] = True
        return manager_of(tmp_path, comm, **options).close()
    manager = manager_of(tmp_path / "managed", comm, keep=KeepBest(1, metric="loss"))
    if name in ("save", "should_save"):
        manager.restore(state=shards(), rng=False)
    if name == "save":
        options = {"rng": False, **options, "step": 10 + options.get("step", 0)}
        for key in ("lr_scheduler", "scaler"):  # every rank has one of its own
            if options.get(key) is not None:
                options[key] = Stateful()
        return manager.save(state=shards(), metrics={"loss": 1.0}, **options)
    if name == "restore":
        return manager.restore(state=shards(), **options)
    return getattr(manager, name)(**options)


class Signals:
    """Stands for handlers of signals."""

    received = is_active = False

    def close(self):
        """Does nothing."""


class Stateful:
    """Stands for a schedule or a scaler."""

    def state_dict(self):
        return {"value": 1}


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    root = tmp_path_factory.mktemp("options")
    (solo,) = SimulatedWorld(1).run(lambda comm: comm)
    fc.save_state_dict({**shards(), **collect_extra_state()}, root / "there", solo)
    fc.save_state_dict({**shards(), **collect_extra_state()}, root / "there", solo)
    manager = manager_of(root / "managed", solo)
    for step in (1, 2):
        manager.save(step, state=shards(), metrics={"loss": 1.0, "accuracy": 2.0})
    manager.close()
    return root


def test_every_public_call_declares_what_its_ranks_may_differ_in():
    assert {"save_state_dict", "load_state_dict", "reshard_sharded_state_dict", "_load_state_dict"} <= set(FUNCTIONS)
    assert {"__init__", "save", "restore", "should_save", "best_step"} <= set(METHODS)
    for name, function in CALLS.items():
        for field in dataclasses.fields(options_of(function)):
            if field.init:  # else the call gives it a value of its own
                assert field.name in inspect.signature(function).parameters, name
                assert field.name in options_of(function).compared() or len(field.metadata["may_differ"].split()) > 3, (
                    name
                )
        assert "The same on every rank, and compared: " in function.__doc__
        for option in options_of(function).compared():
            assert option in VALUES, f"{name}: {option} is neither declared a rank's own nor tried here"
            assert f"``{option}``" in function.__doc__


@pytest.mark.parametrize(
    ("name", "option"),
    [(name, option) for name, function in CALLS.items() for option in options_of(function).compared()],
)
def test_ranks_that_differ_in_an_option_are_told_which(there, monkeypatch, name, option):
    # Handlers belong to the main thread, which no simulated rank is.
    monkeypatch.setattr(manager_module, "PreemptionSignals", lambda signals: Signals())
    values = VALUES[option]
    outcomes = SimulatedWorld(2).run_all(lambda comm: call(name, there, comm, **{option: values[comm.rank]}))
    # What comes before is the rank's own directory, or that of its node.
    (text,) = {str(outcome).partition(": ")[2] for outcome in outcomes}
    if (name, option) == ("save_state_dict", "coordinator_rank"):
        # Both take themselves for it, and the second finds the directory locked before the ranks compare.
        assert "another save is writing" in text or "ranks disagree: " in text
        return
    assert all(isinstance(outcome, fc.ValidationError) for outcome in outcomes), outcomes
    assert "ranks disagree: " in text
    assert f'"{option}"' in text or (option == "unique_id" and "checkpoint" in text)
    assert "Remedy" in text


def test_ranks_that_load_different_checkpoints_are_told_which(there):
    for name in ("load_state_dict", "load_extra_state"):
        outcomes = SimulatedWorld(2).run_all(lambda comm, name=name: call(name, there, comm, unique_id=comm.rank))
        (text,) = {str(outcome) for outcome in outcomes}
        assert "ranks disagree" in text
        assert "id 0" in text
        assert "id 1" in text


@pytest.mark.parametrize("name", CALLS)
def test_an_option_that_is_mistyped_is_refused_by_the_calls_name_with_what_is_meant(name):
    call = CALLS[name]
    option = max(inspect.signature(call).parameters, key=len)
    wrong = option[:-2] + option[-1]
    with pytest.raises(TypeError) as error:
        call(**{wrong: None})
    expected = f"{call.__qualname__}() got an unexpected keyword argument {wrong!r}; did you mean {option!r}?"
    assert str(error.value) == expected
    with pytest.raises(TypeError, match=r"argument 'zzz'; the nearest are \w+(, \w+){,2}$"):
        call(zzz=1)

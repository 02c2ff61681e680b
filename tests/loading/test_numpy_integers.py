"""Whole numbers: integers of numpy are taken wherever one is asked for, and all else is refused before any write."""

from __future__ import annotations

import dataclasses

import numpy as np
import paddle
import pytest

import paddle_flexckpt as fc
from paddle_flexckpt.aoa.model_rules import model_rules
from paddle_flexckpt.background.writer import BackgroundWriter
from paddle_flexckpt.manager.policies import KeepEvery, KeepInterval, KeepLatest, SaveEvery, SaveInterval
from paddle_flexckpt.media.opening import open_storage
from paddle_flexckpt.native.data_file import encode_header
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.run_state.extra_state import collect_extra_state, load_extra_state, restore_extra_state
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.tools.conversion import convert_checkpoint
from paddle_flexckpt.transfer.options import Options

# Values that are no step.
WRONG = [5.0, 1.5, np.float64(5), True, np.bool_(True), "epoch3", "3", -1, paddle.to_tensor(5), [1]]
STATE = {"w": np.arange(6, dtype=np.float32)}


@pytest.mark.parametrize("number", [np.int64, np.uint8, np.int32])
def test_every_call_takes_them(tmp_path, number):
    comm, path = SoloCommunicator(), tmp_path / "saved"
    report = fc.save_state_dict(STATE, path, comm, unique_id=number(3), coordinator_rank=number(0))
    assert (report.unique_id, type(report.unique_id)) == (3, int)
    target = {"w": np.zeros(6, np.float32)}
    fc.load_state_dict(target, path, comm, unique_id=number(3), coordinator_rank=number(0))
    assert target["w"].tolist() == STATE["w"].tolist()
    assert fc.load_merged_state_dict(path, unique_id=number(3))["w"].tolist() == STATE["w"].tolist()
    fc.export_safetensors(path, tmp_path / "exported", unique_id=number(3), max_file_bytes=number(100))
    convert_checkpoint(path, tmp_path / "converted", unique_id=number(3), max_file_bytes=number(100))
    fc.merge_sharded_state_dict(path, tmp_path / "merged", process_group=comm, max_file_bytes=number(100))
    with pytest.raises(fc.ValidationError, match="unique_id has to be an integer >= 0; got np.float64"):
        fc.save_state_dict(STATE, path, comm, unique_id=np.float64(3))


def test_a_run_takes_them(tmp_path):
    manager = fc.CheckpointManager(
        tmp_path, save_when=SaveEvery(steps=np.int64(2)), keep=KeepLatest(np.int64(2)), preemption_signals=()
    )
    for step in np.arange(1, 7):
        if manager.should_save(step):
            manager.save(step, state=STATE, extra={"last": step})
    assert manager.all_steps() == [4, 6]
    target = {"w": np.zeros(6, np.float32)}
    report = manager.restore(np.int64(4), state=target)
    assert (report.step, type(report.step)) == (4, int)
    assert target["w"].tolist() == STATE["w"].tolist()
    assert not manager.should_save(np.int16(4))
    for wrong in (np.float64(7), np.bool_(True), np.int64(-1)):
        with pytest.raises(fc.ValidationError, match="step has to be an integer >= 0"):
            manager.save(wrong, state=STATE)


def test_settings_take_them(tmp_path):
    one = np.int64(1)
    assert type(KeepEvery(one).steps) is int
    assert (SaveInterval(one), KeepInterval(one)) == (SaveInterval(1), KeepInterval(1))
    assert BackgroundWriter(max_pending=np.int64(2), nice=np.int8(3), timeout=np.int64(60)).max_pending == 2
    open_storage("memory://numbers", retries=one, requests_at_once=np.int32(2))
    heads = {"num_heads": 4, "num_key_value_groups": 2}
    assert model_rules("llama", **{name: np.int64(value) for name, value in heads.items()}) == model_rules(
        "llama", **heads
    )
    fc.save_state_dict({**STATE, **collect_extra_state(step=np.int64(5))}, tmp_path, SoloCommunicator())
    step = restore_extra_state(load_extra_state(tmp_path, np.int64(0), SoloCommunicator())).step
    assert (step, type(step)) == (5, int)


def options_classes(cls=Options):
    for each in cls.__subclasses__():
        if each.__module__.startswith("paddle_flexckpt") and "." not in each.__qualname__:
            yield each
        yield from options_classes(each)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda each: type(each).__name__ + str(each)[:6])
@pytest.mark.parametrize("name", ["step", "unique_id"])
def test_a_save_refuses_what_is_no_number_and_keeps_the_checkpoint_that_it_would_replace(tmp_path, name, wrong):
    comm, path = SoloCommunicator(), tmp_path / "saved"
    fc.save(path, state=STATE, process_group=comm, step=1, unique_id=0)
    before = {each.name: each.read_bytes() for each in path.iterdir()}
    options = {"step": 2, "unique_id": 0, name: wrong}
    for save in (
        lambda: fc.save(path, state=STATE, process_group=comm, **options),
        lambda: fc.save(path, state=STATE, process_group=comm, async_save=True, **options),
        lambda: fc.save_state_dict(STATE, path, comm, **options),
        lambda: fc.save_state_dict(STATE, path, comm, async_save=True, **options),
        lambda: fc.save_state_dict(STATE, path, comm, storage="per_node", **options),
    ):
        with pytest.raises(fc.ValidationError, match=rf"{name} has to be an integer >= 0; got .*Remedy \(FC101\)"):
            save()
    assert {each.name: each.read_bytes() for each in path.iterdir()} == before
    assert fc.load(path, state={"w": np.zeros(6, np.float32)}, process_group=comm).step == 1


@pytest.mark.parametrize("wrong", WRONG, ids=lambda each: type(each).__name__ + str(each)[:6])
def test_extra_state_has_no_other_step(wrong):
    with pytest.raises(fc.ValidationError, match="step has to be an integer >= 0; got"):
        collect_extra_state(step=wrong)


def test_all_ranks_refuse_it(tmp_path):
    errors = SimulatedWorld(2).run_all(
        lambda comm: fc.save_state_dict(STATE, tmp_path / "new", comm, step=1.5 if comm.rank else 1)
    )
    assert {str(each) for each in errors} == {str(errors[0])}
    assert "[rank 1] step has to be an integer >= 0; got 1.5" in str(errors[0])
    assert not list((tmp_path / "new").glob("*"))


def test_every_option_of_a_type_that_is_checked_is_refused_by_name():
    classes = {each for each in options_classes() if each.__name__[0] != "_"}
    checked = 0
    for cls in classes:
        needed = {each.name: 0 for each in dataclasses.fields(cls) if each.default is dataclasses.MISSING and
                  each.default_factory is dataclasses.MISSING and each.init}  # fmt: skip
        for each in dataclasses.fields(cls):
            if not each.init or each.type not in ("int", "int | None", "bool", "bool | None"):
                continue
            for wrong in (1.5, "3", paddle.to_tensor(5), True if "int" in each.type else 1):
                with pytest.raises(fc.ValidationError, match=rf"^{each.name} (has to be an integer|is True)"):
                    cls(**{**needed, each.name: wrong}).check()
                checked += 1
    assert checked > 100


@pytest.mark.parametrize("field", ["step", "unique_id", "world_size"])
@pytest.mark.parametrize("wrong", [1.5, np.float64(5), "3", True])
def test_a_manifest_has_no_number_that_it_cannot_be_read_with(tmp_path, field, wrong):
    fc.save_state_dict(STATE, tmp_path, SoloCommunicator(), step=1)
    manifest = Manifest.decode((tmp_path / "0.manifest").read_bytes(), "0.manifest")
    with pytest.raises(ValueError, match=f"{field} of a manifest"):
        dataclasses.replace(manifest, **{field: wrong}).encode()
    with pytest.raises(ValueError, match=f"{field} of a manifest"):
        encode_header(manifest.catalog, dataclasses.replace(manifest.info, **{field: wrong}))

"""Integers of numpy, as argmax() or a loop over arange() gives them, wherever a number is asked for."""

from __future__ import annotations

import numpy as np
import pytest

import paddle_flexckpt as fc
from paddle_flexckpt.aoa.model_rules import model_rules
from paddle_flexckpt.background.writer import BackgroundWriter
from paddle_flexckpt.manager.policies import KeepEvery, KeepInterval, KeepLatest, SaveEvery, SaveInterval
from paddle_flexckpt.media.opening import open_storage
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.run_state.extra_state import collect_extra_state, load_extra_state, restore_extra_state
from paddle_flexckpt.tools.conversion import convert_checkpoint

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
    with pytest.raises(fc.ValidationError, match="unique_id must be None or an integer >= 0; got np.float64"):
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

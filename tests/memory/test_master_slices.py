"""Half-precision parameters that are described by their masters, as of stage 3 with offload."""

from __future__ import annotations

import numpy as np
import pytest

import paddle_flexckpt as fc
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.sharded_weight import MasterSlice

paddle = pytest.importorskip("paddle")
VALUES = np.linspace(-1, 1, 12, dtype=np.float32)


def sliced(tensor, half="bfloat16"):
    weight = MasterSlice("w", tensor, (3, 4), (3, 4), (0, 0), True, slice(0, 12))
    weight.half = getattr(paddle, half)
    return {"w": weight}


def plain(half="bfloat16"):
    return {"w": paddle.zeros([3, 4], half), "w.w_0": paddle.zeros([3, 4])}


def bits(tensor):
    return tensor.astype("float32").numpy().tobytes()


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_they_go_into_parameters_with_masters_and_back_with_all_defaults(move, half):
    source, target = sliced(paddle.to_tensor(VALUES), half), plain(half)
    move(source, target, strict=True)
    assert bits(target["w.w_0"]) == VALUES.tobytes()
    assert bits(target["w"]) == bits(paddle.to_tensor(VALUES).astype(half))
    back = paddle.zeros([12])
    report = move(target, sliced(back, half), strict=True)
    assert (bits(back), report.masters) == (VALUES.tobytes(), {"w": "w.w_0"})
    same = paddle.zeros([12])
    move(source, sliced(same, half), strict=True)
    assert bits(same) == VALUES.tobytes()
    # Of weights alone the master starts from the parameter, which is exact; what is no half needs its option.
    move({"w": target["w"]}, sliced(same, half))
    assert bits(same) == bits(target["w"])
    with pytest.raises(fc.ValidationError, match="dtypes differ"):
        move({"w": VALUES.astype("float64").reshape(3, 4)}, sliced(same, half))


def test_weights_alone_are_exported_as_the_parameter_is(tmp_path):
    fc.save_state_dict(sliced(paddle.to_tensor(VALUES)), tmp_path / "saved", SoloCommunicator())
    report = fc.export_safetensors(tmp_path / "saved", tmp_path / "out")
    assert (report.keys, report.left_out) == (1, 1)
    merged = fc.load_merged_state_dict(tmp_path / "saved")
    assert [str(merged[key].dtype) for key in ("w", "w.w_0")] == ["paddle.bfloat16", "paddle.float32"]


def test_a_reshard_that_is_repeated_rounds_the_values_of_that_time():
    memory, target, comm = paddle.to_tensor(VALUES), plain(), SoloCommunicator()
    source = sliced(memory)
    plan = fc.plan_reshard(source, target, comm)
    for factor in (1, 2):
        memory.set_value(paddle.to_tensor(VALUES * factor))
        plan.run()
        assert bits(target["w.w_0"]) == (VALUES * factor).tobytes()
        assert bits(target["w"]) == bits(paddle.to_tensor(VALUES * factor).astype("bfloat16"))
    # In place it stays as it is.
    fc.reshard_sharded_state_dict(source, source, comm)
    assert bits(memory) == (VALUES * 2).tobytes()

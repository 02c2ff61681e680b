"""Policies of a load: master weights and parameters from one another, and fused parameters under another degree."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import paddle_flexckpt as fc
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.remedies.following import provoked

BF16 = np.dtype(ml_dtypes.bfloat16)
VALUES = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def solo():
    return SimulatedWorld(1).run(lambda comm: comm)[0]


def save(path, **tensors):
    fc.save_state_dict({key.replace("__", "."): value for key, value in tensors.items()}, path, solo())


def test_masters_start_from_the_parameters_where_the_checkpoint_has_none(tmp_path):
    save(tmp_path, w=VALUES.astype(BF16))
    target = {"w": np.zeros((3, 4), BF16), "w.w_0": np.zeros((3, 4), np.float32)}
    with provoked("transfer/problems.py", "by which a master that is missing starts from its parameter") as caught:
        fc.load_state_dict(target, tmp_path, solo())
    assert "the source has no such key (key 'w.w_0'" in str(caught.value)
    assert "strict" not in str(caught.value), "a master that is left as it is undoes the load of its parameter"
    report = fc.load_state_dict(target, tmp_path, solo(), strict=True, master_weights="convert")
    assert report.masters == {"w.w_0": "w"}
    assert (target["w.w_0"] == VALUES.astype(BF16).astype(np.float32)).all()
    assert "1 between parameter and master weight" in report.summary()


def test_a_float32_parameter_comes_from_its_master(tmp_path):
    save(tmp_path, w=VALUES.astype(BF16), w__w_0=VALUES)
    target = {"w": np.zeros((3, 4), np.float32)}
    with provoked("transfer/resolver.py", "by which a float32 parameter comes from its master") as caught:
        fc.load_state_dict(target, tmp_path, solo())
    assert "dtypes differ" in str(caught.value)
    report = fc.load_state_dict(target, tmp_path, solo(), strict=True, master_weights="convert")
    assert report.masters == {"w": "w.w_0"}
    assert target["w"].tobytes() == VALUES.tobytes()  # exact, where a cast of the parameter would have lost bits


@pytest.mark.parametrize("statements", [None, ["w -> v"]])
@pytest.mark.parametrize("half", [BF16, np.dtype(np.float16)])
def test_single_precision_goes_into_halves_with_masters_as_the_errors_say(move, statements, half):
    """Their remedies lead there one after the other; masters start from what was saved, not from what is rounded."""
    name = "v" if statements else "w"
    source = {"w": VALUES, "w.moment1_0": VALUES + 1}
    target = {name: np.zeros((3, 4), half), f"{name}.w_0": np.zeros((3, 4), np.float32)}
    options = {"optimizer_states": "ignore"}
    options |= {} if statements is None else {"aoa_config": {"aoa_statements": statements}}
    with provoked("transfer/resolution.py", 'load with dtype="cast" to convert the values'):
        move(source, target, **options)
    options["dtype"] = "cast"
    with provoked("transfer/problems.py", 'load with master_weights="convert", by which a master') as caught:
        move(source, target, **options)
    assert "strict" not in str(caught.value)
    move(source, target, **options, master_weights="convert")
    assert target[f"{name}.w_0"].tobytes() == VALUES.tobytes()
    assert target[name].tobytes() == VALUES.astype(half).tobytes()


def test_what_the_checkpoint_has_is_not_converted(tmp_path):
    save(tmp_path, w=VALUES.astype(BF16), w__w_0=VALUES)
    target = {"w": np.zeros((3, 4), BF16), "w.w_0": np.zeros((3, 4), np.float32)}
    report = fc.load_state_dict(target, tmp_path, solo(), master_weights="convert")
    assert report.masters == {}
    assert target["w"].tobytes() == VALUES.astype(BF16).tobytes()
    assert target["w.w_0"].tobytes() == VALUES.tobytes()


def test_other_dtypes_are_still_refused(tmp_path):
    save(tmp_path, w=VALUES.astype(np.float64), w__w_0=VALUES)
    with pytest.raises(fc.ValidationError, match="dtypes differ"):
        fc.load_state_dict({"w": np.zeros((3, 4), np.float32)}, tmp_path, solo(), master_weights="convert")


def test_an_unknown_policy_is_refused(tmp_path):
    save(tmp_path, w=VALUES)
    with pytest.raises(fc.ValidationError, match="master_weights is 'exact' or 'convert'; got 'maybe'"):
        fc.load_state_dict({"w": VALUES.copy()}, tmp_path, solo(), master_weights="maybe")


def fused(comm, values):
    width = values.shape[1] // comm.size
    part = np.ascontiguousarray(values[:, comm.rank * width : (comm.rank + 1) * width])
    rule = fc.FusedAxis(axis=1, statement="fused_ffn")
    offset = (0, comm.rank * width)
    return {"gate_up": fc.ShardedWeight("gate_up", part, part.shape, values.shape, offset, fused=rule)}


@pytest.mark.parametrize("degree", [1, 4])
def test_a_fused_parameter_under_another_degree_can_be_refused_with_the_statement(tmp_path, degree):
    values = np.arange(24, dtype=np.float32).reshape(3, 8)
    SimulatedWorld(2).run(lambda comm: fc.save_state_dict(fused(comm, values), tmp_path, comm))

    def load(comm):
        target = fused(comm, np.full_like(values, -1))
        try:
            fc.load_state_dict(target, tmp_path, comm, fused="exact")
        finally:
            assert (target["gate_up"].local_tensor == -1).all()

    for outcome in SimulatedWorld(degree).run_all(load):
        assert isinstance(outcome, fc.ValidationError)
        assert '"gate_up -> gate_up, fused_ffn"' in str(outcome)
        assert f"expected parts of {8 // degree} along axis 1" in str(outcome)
        assert "got parts of [4]" in str(outcome)


def test_a_fused_parameter_under_its_own_degree_loads(tmp_path):
    values = np.arange(24, dtype=np.float32).reshape(3, 8)
    SimulatedWorld(2).run(lambda comm: fc.save_state_dict(fused(comm, values), tmp_path, comm))

    def load(comm):
        target = fused(comm, np.zeros_like(values))
        fc.load_state_dict(target, tmp_path, comm)
        wanted = fused(comm, values)["gate_up"].local_tensor
        return np.array_equal(target["gate_up"].local_tensor, wanted)

    assert SimulatedWorld(2).run(load) == [True, True]

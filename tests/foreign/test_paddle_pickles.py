"""State dicts that ``paddle.save`` has written: by byte ranges, under structured names, or refused by name."""

from __future__ import annotations

import logging
import pickle

import ml_dtypes
import numpy as np
import pytest

from paddle_flexckpt.catalog import CorruptCheckpointError, UnsafePickleError, ValidationError
from paddle_flexckpt.foreign.formats import SourceDirectory, detect_format
from paddle_flexckpt.tools.tensor_reader import TensorReader
from tests.attacks.opcodes import call, named, program, short

NAMES = "StructuredToParameterName@@"
W = np.arange(24, dtype=np.float32).reshape(4, 6)
HALF = np.arange(6).astype(ml_dtypes.bfloat16)
MODEL = {"fc.weight": W, "fc.bias": HALF, "other": np.asfortranarray(W.astype(np.float64))}
RAW = {"fc.weight": "linear_0.w_0", "fc.bias": "linear_0.b_0"}


class Tensor:
    """Pickles as Paddle's tensors do inside dicts and lists."""

    def __init__(self, name, array):
        self.name, self.array = name, array

    def __reduce__(self):
        return tuple, ((self.name, self.array),)


def write(path, protocol=4, name="model.pdparams"):
    state = {key: array.view(np.uint16) if array is HALF else array for key, array in MODEL.items()}
    (path / name).write_bytes(pickle.dumps({**state, NAMES: RAW}, protocol))
    return path


def write_optimizer(path):
    state = {
        "linear_0.w_0_moment1_0": W + 1,
        "linear_0.b_0_fp32_master_0_moment1_0": np.zeros(6, np.float32),
        "linear_0.b_0_beta1_pow_acc_0": np.ones(1, np.float32),
        "unknown_moment1_0": np.ones(2, np.float32),
        "master_weights": {"linear_0.b_0": Tensor("m", np.arange(6, dtype=np.float32))},
        "LR_Scheduler": {"last_epoch": 3, "last_lr": 0.1},
        NAMES: {},
    }
    (path / "model.pdopt").write_bytes(pickle.dumps(state, 4))
    return path


def contents(source):
    with TensorReader(source) as reader:
        return {key: reader.read(key) for key in reader.infos}


def check(got, expected):
    assert set(got) == set(expected)
    for key, array in expected.items():
        assert (got[key].dtype, got[key].shape) == (array.dtype, array.shape), key
        assert got[key].tobytes() == array.tobytes(), key


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_a_model_alone(tmp_path, protocol):
    write(tmp_path, protocol)
    for source in (tmp_path, tmp_path / "model.pdparams"):
        assert detect_format(source) == "paddle_pickle"
        check(contents(source), MODEL)


def test_states_have_structured_names_beside_their_model(tmp_path, caplog):
    write_optimizer(write(tmp_path))
    (tmp_path / "scheduler.pdparams").write_bytes(pickle.dumps({"last_epoch": 1}, 4))
    with caplog.at_level(logging.INFO, "paddle_flexckpt"):
        got = contents(tmp_path)
    states = {
        "fc.weight.moment1_0": W + 1,
        "fc.bias.moment1_0": np.zeros(6, np.float32),
        "fc.bias.beta1_pow_acc_0": np.ones(1, np.float32),
        "unknown_moment1_0": np.ones(2, np.float32),
        "fc.bias.w_0": np.arange(6, dtype=np.float32),
    }
    check(got, {**MODEL, **states})
    assert "left out, as they are no tensors: LR_Scheduler.last_epoch, LR_Scheduler.last_lr" in caplog.text
    alone = contents(tmp_path / "model.pdopt")
    assert {"linear_0.w_0_moment1_0", "master_weights.linear_0.b_0"} < set(alone)


def why(path, kind=ValidationError):
    with pytest.raises(kind) as caught:
        SourceDirectory(path).read_manifest()
    assert "Remedy (FC" in str(caught.value)
    return str(caught.value)


def test_what_has_no_byte_ranges_is_refused_by_name(tmp_path):
    write(tmp_path, protocol=2)
    assert "protocol 2. Remedy (FC701): in Paddle, paddle.save(paddle.load(old), new, protocol=4)" in why(tmp_path)
    state = {"w@@.0": W, "UnpackBigParamInfor@@": {"w": {"OriginShape": (4, 6), "slices": ["w@@.0"]}}}
    (tmp_path / "model.pdparams").write_bytes(pickle.dumps(state, 4))
    assert "paddle.save has cut" in why(tmp_path)
    (tmp_path / "model.pdparams").write_bytes(pickle.dumps({"a": 1}, 4))
    assert "has no tensors in it" in why(tmp_path)
    write(tmp_path, name="model_state.tp01.pdparams")
    assert "several .pdparams files: model.pdparams, model_state.tp01.pdparams" in why(tmp_path)
    assert "there is no such file" in why(tmp_path / "c.pdopt")


def test_two_entries_of_one_key(tmp_path):
    (tmp_path / "a.pdparams").write_bytes(pickle.dumps({"a": {"b": W}, "a.b": W}, 4))
    assert "two tensors under the key 'a.b'" in why(tmp_path, CorruptCheckpointError)
    write(tmp_path, name="a.pdparams")
    (tmp_path / "a.pdopt").write_bytes(pickle.dumps({"fc.weight": W}, 4))
    assert "two entries have the same key (key 'fc.weight'" in why(tmp_path)


def test_cut_short_anywhere_and_no_dict(tmp_path):
    file = write(tmp_path) / "model.pdparams"
    data = file.read_bytes()
    for length in range(0, len(data), 11):
        file.write_bytes(data[:length])
        assert "model.pdparams" in why(tmp_path, CorruptCheckpointError)
    file.write_bytes(pickle.dumps([1], 4))
    assert "no state dict that paddle.save writes" in why(tmp_path, CorruptCheckpointError)


@pytest.mark.parametrize("name", [("builtins", "eval"), ("os", "system"), ("builtins", "tuple")])
def test_nothing_is_called(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    body = b"}" + short("w") + call(named(*name), "open('canary', 'w')") + b"s"
    (tmp_path / "a.pdparams").write_bytes(program(body))
    why(tmp_path, UnsafePickleError)
    assert not (tmp_path / "canary").exists()


@pytest.mark.paddle
def test_what_paddle_itself_saves(tmp_path):
    paddle = pytest.importorskip("paddle")
    layer, half = paddle.nn.Linear(4, 6), paddle.nn.Linear(4, 6)
    half.to(dtype="bfloat16")
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=layer.parameters())
    layer(paddle.ones([2, 4])).sum().backward()
    optimizer.step()
    paddle.save(half.state_dict(), str(tmp_path / "half.pdparams"))
    for key, array in contents(tmp_path).items():
        assert array.dtype == ml_dtypes.bfloat16
        assert array.tobytes() == half.state_dict()[key].numpy().tobytes()
    (tmp_path / "half.pdparams").unlink()
    paddle.save(layer.state_dict(), str(tmp_path / "model.pdparams"))
    paddle.save(optimizer.state_dict(), str(tmp_path / "model.pdopt"))
    got = contents(tmp_path)
    expected = {}
    for key, tensor in layer.state_dict().items():
        expected[key] = tensor.numpy()
        for state in ("moment1_0", "moment2_0", "beta1_pow_acc_0", "beta2_pow_acc_0"):
            expected[f"{key}.{state}"] = optimizer.state_dict()[f"{tensor.name}_{state}"].numpy()
    check(got, expected)
    paddle.save({"nested": {"w": layer.weight, "list": [layer.bias]}}, str(tmp_path / "n.pdparams"))
    nested = contents(tmp_path / "n.pdparams")
    assert set(nested) == {"nested.w", "nested.list.0"}
    assert nested["nested.w"].tobytes() == got["weight"].tobytes()

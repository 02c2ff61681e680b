"""What has to hold on every supported release of Paddle (3.0 to 3.3), in one process and without the CPU world."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle
from paddle import nn

import paddle_flexckpt as fc
from paddle_flexckpt.parallel.install import _assignments, is_installed

pytestmark = [pytest.mark.compat, pytest.mark.paddle]

try:
    from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight as PaddleShardedWeight
except ImportError:
    PaddleShardedWeight = None
needs_in_tree = pytest.mark.skipif(
    PaddleShardedWeight is None, reason="this Paddle has no FlexCheckpoint of its own (it came with 3.2)"
)
DTYPES = ("float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8", "bool", "complex64")


def raw(tensor):
    return np.ascontiguousarray(tensor.numpy()).tobytes()


def numbers(shape, dtype="float32", seed=0):
    array = np.random.RandomState(seed).randint(-9, 9, shape).astype("float32")
    return paddle.to_tensor(array).astype(dtype)


class Model(nn.Layer):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(3, 4), nn.BatchNorm1D(4), nn.Linear(4, 2)

    def forward(self, x):
        return self.second(self.norm(self.first(x)))


def step(model, optimizer, seed):
    loss = (model(numbers([5, 3], seed=seed)) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    return float(loss)


@pytest.fixture
def installed():
    fc.install()
    yield
    fc.uninstall()


def test_install_and_uninstall():
    owners = [owner for owner, _ in _assignments()]
    before = [dict(vars(owner)) for owner in owners]
    fc.install()
    assert is_installed()
    assert all(old != dict(vars(owner)) for old, owner in zip(before, owners))
    fc.uninstall()
    assert [dict(vars(owner)) for owner in owners] == before


def test_every_public_name_is_there():
    for name in fc.__all__:
        assert getattr(fc, name) is not None


def test_layer_and_adamw(installed, tmp_path):
    def build():
        model = Model()
        return model, paddle.optimizer.AdamW(0.01, parameters=model.parameters(), weight_decay=0.1)

    def state_of(model, optimizer):
        shards = model.sharded_state_dict()
        return {**shards, **optimizer.sharded_state_dict(shards)}

    (model, optimizer), (other, fresh) = build(), build()
    for seed in range(2):
        step(model, optimizer, seed)
    state = state_of(model, optimizer)
    trained = [name for name, parameter in model.named_parameters() if not parameter.stop_gradient]
    kinds = ("moment1", "moment2", "beta1_pow_acc", "beta2_pow_acc")
    names = [f"{name}.{kind}_0" for name in trained for kind in kinds]
    assert len(trained) == 6
    assert sorted(state) == sorted([*trained, *names, "norm._mean", "norm._variance"])
    fc.save_state_dict(state, tmp_path)
    target = state_of(other, fresh)
    assert any(raw(target[key].local_tensor) != raw(state[key].local_tensor) for key in state)
    report = fc.load_state_dict(target, tmp_path, strict=True)
    assert report.bytes_read == report.bytes_needed == sum(len(raw(weight.local_tensor)) for weight in state.values())
    for key in state:
        assert raw(target[key].local_tensor) == raw(state[key].local_tensor), key
    for seed in (2, 3):
        assert step(other, fresh, seed) == step(model, optimizer, seed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_save_and_load(tmp_path, dtype):
    source = {"model": {"w": numbers([6, 5], dtype), "scalar": numbers([], dtype, 1)}, "empty": numbers([0, 2], dtype)}
    fc.save_state_dict(source, tmp_path)
    target = {
        "model": {"w": paddle.zeros([6, 5], dtype=dtype), "scalar": paddle.zeros([], dtype=dtype)},
        "empty": paddle.zeros([0, 2], dtype=dtype),
    }
    fc.load_state_dict(target, tmp_path, strict=True)
    assert raw(target["model"]["w"]) == raw(source["model"]["w"])
    assert raw(target["model"]["scalar"]) == raw(source["model"]["scalar"])
    # A part, flattened; and another part, a box of columns.
    flat = fc.ShardedWeight("model.w", paddle.zeros([11], dtype=dtype), (6, 5), (6, 5), (0, 0), True, slice(7, 18))
    box = fc.ShardedWeight("model.w", paddle.zeros([6, 2], dtype=dtype), (6, 2), (6, 5), (0, 3))
    for shard, wanted in ((flat, source["model"]["w"].flatten()[7:18]), (box, source["model"]["w"][:, 3:])):
        fc.load_state_dict({"model.w": shard}, tmp_path)
        assert raw(shard.local_tensor) == raw(wanted)
    merged = fc.load_merged_state_dict(tmp_path)
    assert raw(merged["model.w"]) == raw(source["model"]["w"])
    assert str(merged["model.w"].dtype) == f"paddle.{dtype}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reshard(dtype):
    source = {"w": numbers([6, 5], dtype)}
    target = {"w": fc.ShardedWeight("w", paddle.zeros([4, 2], dtype=dtype), (4, 2), (6, 5), (1, 2))}
    report = fc.reshard_sharded_state_dict(source, target)
    assert raw(target["w"].local_tensor) == raw(source["w"][1:5, 2:4])
    assert report.bytes_received == 0
    assert report.bytes_copied == 8 * (4 if dtype == "float32" else 2)


def test_strided_views(tmp_path):
    source, target = numbers([5, 6]), paddle.zeros([5, 8])
    view = target[:, 1:7]
    assert not view.is_contiguous()
    fc.save_state_dict({"w": source.T}, tmp_path)
    fc.load_state_dict({"w": view.T}, tmp_path)
    assert raw(target[:, 1:7]) == raw(source)
    assert float(target[:, 0].abs().sum() + target[:, 7].abs().sum()) == 0


def test_a_dtype_mismatch_is_an_error(tmp_path):
    fc.save_state_dict({"w": numbers([4])}, tmp_path)
    target = {"w": paddle.zeros([4], dtype="bfloat16")}
    with pytest.raises(fc.ValidationError, match="dtypes differ"):
        fc.load_state_dict(target, tmp_path)
    fc.load_state_dict(target, tmp_path, dtype="cast")
    assert raw(target["w"].astype("float32")) == raw(numbers([4]))


def test_a_tensor_without_memory_is_an_error(tmp_path):
    tensor = numbers([4])
    tensor._clear_data()
    with pytest.raises(fc.ValidationError, match="not initialised"):
        fc.save_state_dict({"w": tensor}, tmp_path)


@needs_in_tree
def test_paddles_shards_are_accepted(tmp_path):
    source = {"w": PaddleShardedWeight("w", numbers([6, 5]), (6, 5), (6, 5), (0, 0))}
    targets = [{"w": PaddleShardedWeight("w", paddle.zeros([6, 2]), (6, 2), (6, 5), (0, 3))} for _ in range(2)]
    assert fc.is_sharded_state_dict(source)
    fc.save_state_dict(source, tmp_path)
    fc.load_state_dict(targets[0], tmp_path)
    fc.reshard_sharded_state_dict(source, targets[1])
    for target in targets:
        assert raw(target["w"].local_tensor) == raw(numbers([6, 5])[:, 3:])


@needs_in_tree
def test_paddle_accepts_our_shards(tmp_path):
    """Saved and loaded by Paddle's own functions, by which a shard is read through its attributes alone."""
    from paddle.distributed import load_state_dict, save_state_dict

    def shards(tensor):
        return {"w": fc.ShardedWeight("w", tensor, (6, 5), (6, 5), (0, 0))}

    assert isinstance(shards(numbers([6, 5]))["w"], PaddleShardedWeight)
    save_state_dict(shards(numbers([6, 5])), str(tmp_path))
    target = shards(paddle.zeros([6, 5]))
    load_state_dict(target, str(tmp_path))
    assert raw(target["w"].local_tensor) == raw(numbers([6, 5]))

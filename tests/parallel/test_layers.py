"""Layers: rules, groups, buffers, tied names, and what users override."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle import nn

import paddle_flexckpt as fc
from paddle_flexckpt.sharded_weight import ShardedWeight

#: The third of four ranks. Paddle's group has more, but no more is asked of it.
GROUP = SimpleNamespace(rank=2, nranks=4)


def box(weight):
    return tuple(weight.local_shape), tuple(weight.global_shape), tuple(weight.global_offset)


class Cut(nn.Layer):
    """A user's layer: cut along its second axis over a group of its own; a bias and a scale on every rank."""

    def __init__(self):
        super().__init__()
        self.weight = self.create_parameter([3, 5])
        self.weight.is_distributed = True
        self.bias = self.create_parameter([3], is_bias=True)

    def _get_shard_rules(self):
        return {"weight": 1}

    def _get_shard_group(self):
        return GROUP


def test_everything_that_is_not_cut_is_replicated():
    layer = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Sequential(nn.Embedding(4, 2)))
    state = layer.sharded_state_dict()
    assert {key: box(weight) for key, weight in state.items()} == {
        "0.weight": ((2, 3), (2, 3), (0, 0)),
        "0.bias": ((3,), (3,), (0,)),
        "2.0.weight": ((4, 2), (4, 2), (0, 0)),
    }
    assert state["0.weight"].local_tensor is layer[0].weight  # live, not a copy
    assert [weight.key for weight in state.values()] == list(state)


def test_prefix():
    assert sorted(nn.Linear(2, 3).sharded_state_dict("model.")) == ["model.bias", "model.weight"]
    assert sorted(nn.Linear(2, 3).sharded_state_dict(structured_name_prefix="a.b.")) == ["a.b.bias", "a.b.weight"]


def test_a_users_rules_and_group():
    layer = nn.Layer()
    layer.inner = Cut()
    state = layer.sharded_state_dict()
    assert box(state["inner.weight"]) == ((3, 5), (3, 20), (0, 10))
    assert box(state["inner.bias"]) == ((3,), (3,), (0,))


def test_a_negative_axis_counts_from_the_end():
    layer = Cut()
    layer._get_shard_rules = lambda: {"weight": -2}
    assert box(layer.sharded_state_dict()["weight"]) == ((3, 5), (12, 5), (6, 0))


def test_a_layers_own_group_is_its_group():
    """The attribute that Paddle's parallel layers keep their mp_group in."""

    class WithGroup(nn.Layer):
        def __init__(self):
            super().__init__()
            self.model_parallel_group = SimpleNamespace(rank=1, nranks=2)
            self.weight = self.create_parameter([4, 4])

        def _get_shard_rules(self):
            return {"weight": 0}

    assert box(WithGroup().sharded_state_dict()["weight"]) == ((4, 4), (8, 4), (4, 0))


def test_a_cut_parameter_without_a_rule_is_an_error():
    layer = nn.Sequential(nn.Linear(2, 3))
    layer[0].weight.is_distributed = True
    with pytest.raises(ValueError, match=r"key '0.weight' is marked is_distributed.*Remedy.*_get_shard_rules\(\)"):
        layer.sharded_state_dict()


def test_a_rule_for_no_parameter_is_an_error():
    layer = Cut()
    layer._get_shard_rules = lambda: {"weight": 1, "wieght": 0}
    with pytest.raises(ValueError, match=r"'wieght'.*name no tensor.*'bias', 'weight'"):
        layer.sharded_state_dict()


def test_a_rule_for_an_absent_bias_is_none():
    layer = Cut()
    layer.bias = None
    layer._get_shard_rules = lambda: {"weight": 1, "bias": 0}
    assert sorted(layer.sharded_state_dict()) == ["weight"]


def test_an_axis_that_does_not_exist_is_an_error():
    layer = Cut()
    layer._get_shard_rules = lambda: {"weight": 2}
    with pytest.raises(ValueError, match=r"key 'weight': shard axis 2 is invalid for a tensor of shape \[3, 5\]"):
        layer.sharded_state_dict()


def test_without_a_group_the_error_names_fleet(monkeypatch):
    from paddle.distributed.fleet.base import topology

    monkeypatch.setattr(topology, "_HYBRID_PARALLEL_GROUP", None)
    layer = Cut()
    layer._get_shard_group = lambda: None
    weight = layer.sharded_state_dict()["weight"]  # one process cuts nothing
    assert weight.global_shape == weight.local_shape
    monkeypatch.setattr(paddle.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match=r"key 'weight' is split.*Remedy .FC503.: call fleet.init first"):
        layer.sharded_state_dict()


def test_buffers():
    layer = nn.Sequential(nn.BatchNorm1D(3))
    layer.register_buffer("kept", paddle.ones([2]))
    layer.register_buffer("passing", paddle.ones([2]), persistable=False)
    names = sorted(layer.sharded_state_dict())
    assert names == ["0._mean", "0._variance", "0.bias", "0.weight", "kept"]
    assert names == sorted(layer.state_dict())


def test_buffers_are_saved_and_loaded(tmp_path):
    source, target = nn.BatchNorm1D(3), nn.BatchNorm1D(3)
    source(paddle.to_tensor(np.random.RandomState(0).randn(8, 3).astype("float32")))
    assert not np.allclose(source._mean.numpy(), 0)
    fc.save_state_dict(source.sharded_state_dict(), tmp_path)
    fc.load_state_dict(target.sharded_state_dict(), tmp_path)
    assert (target._mean.numpy() == source._mean.numpy()).all()
    assert (target._variance.numpy() == source._variance.numpy()).all()


def test_a_layer_that_renames_in_state_dict_is_described_once():
    class Renaming(nn.Layer):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 3)

        def state_dict(self, *args, **kwargs):
            return {f"renamed.{key}": value for key, value in super().state_dict(*args, **kwargs).items()}

    assert sorted(Renaming().sharded_state_dict()) == ["inner.bias", "inner.weight"]


class Tied(nn.Layer):
    def __init__(self):
        super().__init__()
        self.z = nn.Embedding(6, 4)
        self.a = nn.Layer()
        self.a.weight = self.z.weight


def test_tied_parameters_have_all_their_names():
    state = Tied().sharded_state_dict()
    assert sorted(state) == ["a.weight", "z.weight"]
    assert state["a.weight"].aliases == ("z.weight",)
    assert state["z.weight"].aliases == ("a.weight",)


def test_tied_parameters_load_from_either_name(tmp_path):
    source = Tied()
    state = source.sharded_state_dict()
    for name in ("a.weight", "z.weight"):
        fc.save_state_dict({name: state[name]}, tmp_path / name)
        target = Tied()
        report = fc.load_state_dict(target.sharded_state_dict(), tmp_path / name, strict=True)
        assert (target.z.weight.numpy() == source.z.weight.numpy()).all()
        other = "z.weight" if name == "a.weight" else "a.weight"
        assert report.aliases == {other: name}
        assert report.bytes_read == 6 * 4 * 4  # once, for both
        with pytest.raises(fc.ValidationError, match=f"no such key .key '{other}'"):
            fc.load_state_dict(Tied().sharded_state_dict(), tmp_path / name, tied_names=False)


def test_a_users_own_sharded_state_dict_is_used(tmp_path):
    """Also one that returns Paddle's objects, where Paddle has them."""
    module = pytest.importorskip("paddle.distributed.flex_checkpoint.dcp.sharded_weight")

    class Own(nn.Layer):
        def __init__(self):
            super().__init__()
            self.weight = self.create_parameter([4, 2])

        def sharded_state_dict(self, structured_name_prefix=""):
            key = f"{structured_name_prefix}kernel"
            return {key: module.ShardedWeight(key, self.weight, (4, 2), (4, 2), (0, 0))}

    source, target = nn.Sequential(Own(), nn.Linear(2, 2)), nn.Sequential(Own(), nn.Linear(2, 2))
    state = source.sharded_state_dict()
    assert sorted(state) == ["0.kernel", "1.bias", "1.weight"]
    assert not isinstance(state["0.kernel"], ShardedWeight)
    optimizer = paddle.optimizer.AdamW(parameters=source.parameters())
    assert "0.kernel.moment1_0" in optimizer.sharded_state_dict(state)
    fc.save_state_dict(state, tmp_path)
    fc.load_state_dict(target.sharded_state_dict(), tmp_path, strict=True)
    for ours, theirs in zip(target.parameters(), source.parameters()):
        assert (ours.numpy() == theirs.numpy()).all()


def test_two_sub_layers_of_one_name_are_an_error():
    class Same(nn.Layer):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)

    layer = Same()
    layer._parameters["inner.weight"] = layer.create_parameter([1])
    with pytest.raises(ValueError, match=r"names that exist already: \['inner.weight'\]"):
        layer.sharded_state_dict()


def test_a_parameter_that_is_both_tied_and_cut_is_refused():
    class Cut(nn.Layer):
        def __init__(self, weight):
            super().__init__()
            self.weight = weight

        def _get_shard_rules(self):
            return {"weight": 0}

        def _get_shard_group(self):
            return SimpleNamespace(rank=1, nranks=2)

    model = nn.Layer()
    model.whole = nn.Linear(4, 4, bias_attr=False)
    model.part = Cut(model.whole.weight)
    with pytest.raises(ValueError, match=r"described in different ways: .*whole\.weight.*part\.weight.*Remedy"):
        model.sharded_state_dict()


class Reshaped(nn.Layer):
    """A layer that describes its parameter in another shape."""

    def __init__(self, view):
        super().__init__()
        self.weight = self.create_parameter([2, 3, 4])
        self.view = view

    def sharded_state_dict(self, structured_name_prefix=""):
        tensor = self.view(self.weight)
        key = f"{structured_name_prefix}weight"
        return {key: fc.ShardedWeight(key, tensor, tensor.shape, tensor.shape, [0] * len(tensor.shape))}


def test_a_view_of_a_parameter_has_its_name():
    model = nn.Sequential(Reshaped(lambda weight: weight.reshape([6, 4])))
    weight = model.sharded_state_dict()["0.weight"]
    assert weight.local_tensor.name == model[0].weight.name and weight.local_shape == (6, 4)
    optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
    assert optimizer.sharded_state_dict({"0.weight": weight})["0.weight.moment1_0"].local_shape == (6, 4)


@pytest.mark.parametrize("named", [True, False])
def test_a_copy_of_a_parameter_is_refused(named):
    def copy(weight):
        tensor = weight.clone().reshape([6, 4])
        if named:
            tensor.name = weight.name
        return tensor

    model = nn.Sequential(Reshaped(copy))
    with pytest.raises(
        ValueError, match=r"key '0.weight': .*Reshaped describes a copy .*Remedy .FC804.: .*shaped_view"
    ):
        model.sharded_state_dict()
    with pytest.raises(ValueError, match="describes a copy"):
        paddle.DataParallel(model[0]).sharded_state_dict()


def test_what_is_no_copy_of_a_parameter_is_the_layers_own_affair():
    model = nn.Sequential(Reshaped(lambda weight: weight.astype("float16")))
    assert model.sharded_state_dict()["0.weight"].local_tensor.dtype == paddle.float16


def test_lists_of_all_ranks_are_joined_by_key_in_their_order():
    """As the notes' utility: a key of several ranks has the shards of all, and what was given stays as it was."""
    given = [{"w": ["w0"], "a": ["a0", "a1"]}, {}, {"w": ["w1", "w2"], "b": ["b0"]}, {"w": ["w0"]}]
    merged = fc.merge_shard_info_list(given)
    assert merged == {"w": ["w0", "w1", "w2", "w0"], "a": ["a0", "a1"], "b": ["b0"]}
    assert list(merged) == ["w", "a", "b"]
    assert given == [{"w": ["w0"], "a": ["a0", "a1"]}, {}, {"w": ["w1", "w2"], "b": ["b0"]}, {"w": ["w0"]}]
    assert merged["a"] is not given[0]["a"]
    assert fc.merge_shard_info_list([]) == {}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_a_description_says_all_of_a_shard_but_its_values(dtype):
    shard = fc.ShardedWeight("a.w", paddle.zeros([2, 3], dtype), (2, 3), (8, 9), (4, 6))
    found = fc.build_shard_desc(shard)
    assert (found.key, found.dtype) == ("a.w", dtype)
    assert (found.local_shape, found.global_shape, found.global_offset) == ((2, 3), (8, 9), (4, 6))
    assert not hasattr(found, "local_tensor")

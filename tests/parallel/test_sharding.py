"""Sharded optimizers and parameters without other processes: ranges, names, and which method answers.

What Paddle's own objects do in real processes is in tests/distributed/test_sharding.py.
"""

from __future__ import annotations

import sys
import types

import numpy as np
import paddle
import pytest
from paddle import nn

import paddle_flexckpt as fc
from paddle_flexckpt.parallel.optimizers import OptimizerMixin, describe_states, keys_by_parameter_name
from paddle_flexckpt.parallel.sharding import MuonShardingMixin, _owned_range
from paddle_flexckpt.parallel.slices import buffer_context, parameter_name
from tests.remedies.following import provoked


class Group:
    def __init__(self, rank, nranks):
        self.rank, self.nranks = rank, nranks


class Columns(nn.Layer):
    """A weight of which tensor parallelism of degree 2 gives this rank the right half."""

    def __init__(self):
        super().__init__()
        self.weight = self.create_parameter([5, 7])
        self.model_parallel_group = Group(1, 2)

    def _get_shard_rules(self):
        return {"weight": 1}


class Wrapper:
    """What is looked at of GroupShardedStage3, and its slicing."""

    def __init__(self, layer, rank, nranks, padded):
        self._offload, self._rank = False, rank
        self._group = types.SimpleNamespace(ranks=list(range(nranks)))
        self._task_flow = types.SimpleNamespace(full_param={})
        each = padded // nranks
        self._param2buffer = {}

        def hook(layer, inputs):
            return self

        for sub in layer.sublayers(include_self=True):
            for parameter in sub._parameters.values():
                self._param2buffer[parameter.name] = [(i * each, (i + 1) * each) for i in range(nranks)]
                whole = np.zeros(padded, "float32")
                whole[: parameter.size] = parameter.numpy().reshape(-1)
                parameter.fw_storage = paddle.to_tensor(whole[rank * each : (rank + 1) * each])
                parameter.status = "part"
                parameter._clear_data()
            if sub._parameters:
                sub.register_forward_pre_hook(hook)

    def slices(self):
        """What Paddle sets on the optimizer is a method of the wrapper."""


def view(index, numel, padded, begin, end):
    return types.SimpleNamespace(
        _param=paddle.zeros([numel]), _index=index, _padded_size=padded, _param_begin=begin, _param_end=end
    )


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [
        (100, 164, (0, 50)),  # all of it, and its padding
        (100, 120, (0, 20)),  # the beginning
        (120, 140, (20, 40)),  # the middle
        (140, 164, (40, 50)),  # the end and padding
        (150, 164, (50, 50)),  # nothing but padding
        (164, 100, (50, 50)),  # Paddle's way to say that the parameter is in front of this rank's part
        (200, 164, (50, 50)),
    ],
)
def test_range_of_v2(begin, end, expected):
    found = _owned_range(view(100, 50, 64, begin, end))
    assert (found.start, found.stop) == expected


def test_parameter_name():
    assert parameter_name("slice@linear_0.w_0") == "linear_0.w_0"
    assert parameter_name("linear_0.w_0") == "linear_0.w_0"
    assert parameter_name("my slice@linear") == "my slice@linear"


@pytest.mark.parametrize(("rank", "expected"), [(0, (0, 12)), (1, (12, 24)), (2, (24, 35)), (3, (35, 35))])
def test_a_released_parameter_is_a_range_of_its_own_box(rank, expected):
    layer = Columns()
    values = layer.weight.numpy().reshape(-1)
    Wrapper(layer, rank, 4, 48)
    weight = layer.sharded_state_dict("a.")["a.weight"]
    assert (weight.flattened_range.start, weight.flattened_range.stop) == expected
    assert (weight.local_shape, weight.global_shape, weight.global_offset) == ((5, 7), (5, 14), (0, 7))
    assert weight.local_tensor.numpy().tobytes() == values[slice(*expected)].tobytes()
    assert weight.local_tensor.name == f"slice@{layer.weight.name}"
    if expected[0] < expected[1]:
        with paddle.no_grad():
            weight.local_tensor.fill_(5.0)
        assert layer.weight.fw_storage.numpy()[0] == 5.0  # it is the slice, not a copy


def test_a_released_parameter_keeps_the_rule_that_it_is_fused():
    class Fused(Columns):
        def _get_shard_rules(self):
            return {"weight": fc.FusedAxis(1, "fused_ffn")}

    layer = Fused()
    whole = layer.sharded_state_dict()["weight"].fused
    Wrapper(layer, 1, 4, 48)
    weight = layer.sharded_state_dict()["weight"]
    assert weight.is_flattened and weight.fused == whole == fc.FusedAxis(1, "fused_ffn")


def test_copies_of_a_released_parameter_are_dropped():
    layer = Columns()
    wrapper = Wrapper(layer, 0, 2, 48)
    waited = []
    task = types.SimpleNamespace(wait=lambda: waited.append(True))
    wrapper._task_flow.full_param[layer.weight.name] = (paddle.zeros([48]), task)
    paddle.zeros([5, 7])._share_buffer_to(layer.weight)
    layer.sharded_state_dict()
    assert waited and not wrapper._task_flow.full_param
    assert not layer.weight._is_initialized()


def test_a_gathered_parameter_is_its_own_memory():
    layer = Columns()
    Wrapper(layer, 0, 2, 48)
    layer.weight.fw_storage, layer.weight.status = None, "all"
    paddle.ones([5, 7])._share_buffer_to(layer.weight)
    weight = layer.sharded_state_dict()["weight"]
    assert weight.local_tensor is layer.weight and not weight.is_flattened


def test_a_slice_of_an_unknown_wrapper_is_refused():
    layer = Columns()
    Wrapper(layer, 0, 2, 48)
    layer._forward_pre_hooks.clear()
    with pytest.raises(ValueError, match="key 'weight': the parameter is sliced, but no stage-3"):
        layer.sharded_state_dict()


def test_states_of_slices_and_of_gathered_parameters():
    layer = Columns()
    wrapper = Wrapper(layer, 1, 2, 48)
    storage = layer.weight.fw_storage
    optimizer = paddle.optimizer.AdamW(0.1, parameters=layer.parameters())
    optimizer.update_slice = wrapper.slices
    released = optimizer.sharded_state_dict(layer.sharded_state_dict())
    assert sorted(released) == [f"weight.{s}_0" for s in ("beta1_pow_acc", "beta2_pow_acc", "moment1", "moment2")]
    moment = released["weight.moment1_0"]
    assert moment.flattened_range == slice(24, 35) and list(moment.local_tensor.shape) == [11]
    assert list(optimizer._accumulators["moment1"]) == [f"slice@{layer.weight.name}"]
    # Gathered: the range is not in the model's dict any more, but the wrapper knows it.
    layer.weight.fw_storage, layer.weight.status = None, "all"
    whole = paddle.concat([paddle.zeros([24]), storage])
    wrapper._task_flow.full_param[layer.weight.name] = (whole, None)
    whole._slice(0, 35)._share_buffer_to(layer.weight)
    model = layer.sharded_state_dict()
    assert not model["weight"].is_flattened
    gathered = optimizer.sharded_state_dict(model)
    assert gathered["weight.moment1_0"].flattened_range == slice(24, 35)
    other = paddle.optimizer.AdamW(0.1, parameters=layer.parameters())
    with provoked("parallel/slices.py", "use the optimizer that group_sharded_parallel() returned,") as caught:
        other.sharded_state_dict(model)
    assert "is gathered and AdamW does not know its slice" in str(caught.value)
    assert optimizer.sharded_state_dict(layer.sharded_state_dict()).keys() == released.keys()


def test_sliced_parameters_of_one_name_are_neither_tied_nor_each_others():
    tree = nn.Layer()
    for name in ("one", "other"):
        with paddle.utils.unique_name.guard():
            tree.add_sublayer(name, nn.Linear(5, 7, bias_attr=False))
    wrappers = [Wrapper(layer, 1, 2, 40) for layer in (tree.one, tree.other)]
    model = tree.sharded_state_dict()
    assert model["one.weight"].local_tensor.name == model["other.weight"].local_tensor.name
    assert [weight.aliases for weight in model.values()] == [(), ()]
    optimizer = paddle.optimizer.AdamW(0.1, parameters=tree.other.parameters())
    optimizer.update_slice = wrappers[1].slices
    states = optimizer.sharded_state_dict(model)
    assert {key.rpartition(".")[0] for key in states} == {"other.weight"}
    assert {weight.aliases for weight in states.values()} == {()}


def test_masters_that_no_step_looks_at_are_not_state():
    layer = nn.Linear(2, 3)
    optimizer = paddle.optimizer.AdamW(0.1, parameters=layer.parameters(), multi_precision=False)
    model = layer.sharded_state_dict()
    optimizer._master_weights[layer.weight.name] = paddle.zeros([2, 3])  # stage 3 does so
    assert not any(key.endswith("w_0") for key in optimizer.sharded_state_dict(model))
    optimizer._multi_precision = True
    assert any(key.endswith("w_0") for key in optimizer.sharded_state_dict(model))


@pytest.mark.parametrize(("begin", "stale"), [(0, True), (4, True), (8, False)])
def test_a_slice_of_mere_padding_has_no_master_that_could_be_stale(tmp_path, caplog, begin, stale):
    """As under V2: six elements and two of padding in a buffer, of which this rank steps four; weights are loaded."""
    layer = nn.Linear(2, 3, bias_attr=False).to(dtype="bfloat16")
    layer.weight.name = f"a weight of which a slice begins at {begin}"  # other tests' optimizers live on
    buffer = paddle.zeros([12], "bfloat16")
    with paddle.no_grad():
        buffer._slice(0, 6)._share_buffer_to(layer.weight)
        layer.weight.get_tensor()._set_dims([2, 3])
    part = paddle.base.framework.EagerParamBase(shape=[4], dtype="bfloat16", name=layer.weight.name)
    buffer._slice(begin, begin + 4)._share_buffer_to(part)
    optimizer = paddle.optimizer.AdamW(0.1, parameters=[part], multi_precision=True)
    optimizer._master_weights[part.name] = paddle.ones([4])
    state = layer.sharded_state_dict()
    fc.save_state_dict(state, tmp_path)
    with caplog.at_level("WARNING", logger="paddle_flexckpt"):
        fc.load_state_dict(state, tmp_path, optimizer_states="ignore")
    assert ("laid out otherwise" in caplog.text) == stale


def muon_sharding(layer, info=None, experts=frozenset()):
    """What is looked at of a MuonShardingOptimizer of which this rank owns every parameter, and the model's dict."""
    model = layer.sharded_state_dict()
    for weight in model.values():
        weight.expert_ranks = experts
    optimizer = types.SimpleNamespace(
        _inner_opt=paddle.optimizer.Momentum(0.1, parameters=layer.parameters()),
        _comm_buffer_list=[],
        _slice_params={},
        _rank2params_2d_by_color={1: {0: list(layer.parameters()), 1: []}},
        _color_to_group_info={1: info} if info else {},
    )
    return optimizer, model


def test_matrices_of_muon_are_those_of_this_rank_in_the_group_of_their_color():
    layer = nn.Linear(2, 3)
    layer.bias.stop_gradient = True
    group = types.SimpleNamespace(ranks=[4, 6])
    alone = {"group": types.SimpleNamespace(ranks=[4]), "world_size": 1, "rank": -1}
    for info, keys in (
        (None, ["weight.velocity_0"]),  # a color without a group: every rank steps on all of its parameters
        (alone, ["weight.velocity_0"]),
        ({"group": group, "world_size": 2, "rank": 0}, ["weight.velocity_0"]),
        ({"group": group, "world_size": 2, "rank": 1}, []),
        ({"group": group, "world_size": 2, "rank": -1}, []),  # not a member
    ):
        optimizer, model = muon_sharding(layer, info)
        assert sorted(MuonShardingMixin.sharded_state_dict(optimizer, model)) == keys


def test_muon_that_would_lose_states_is_refused(tmp_path):
    layer = nn.Linear(2, 3)
    optimizer, model = muon_sharding(layer)
    optimizer._slice_params["other"] = layer.bias
    with pytest.raises(ValueError, match="no buffer for 1 parameters that it slices, such as 'other'.*Remedy"):
        MuonShardingMixin.sharded_state_dict(optimizer, model)
    group = {"group": types.SimpleNamespace(ranks=[4, 6]), "world_size": 2, "rank": 0}
    optimizer, model = muon_sharding(layer, group, frozenset([4, 6]))
    with provoked(
        "parallel/experts.py", "use sharding V2 (split_param=True), and give the experts' parameters a"
    ) as caught:
        MuonShardingMixin.sharded_state_dict(optimizer, model)
    assert "2 parameters of experts, " in str(caught.value)
    assert "sharded among ranks of which each holds other" in str(caught.value)
    fc.save_state_dict(model, tmp_path)  # what was trained, without the optimizer
    target = np.zeros([2, 3], "float32")
    fc.load_state_dict({"weight": target}, tmp_path)
    assert target.tobytes() == layer.weight.numpy().tobytes()
    optimizer, model = muon_sharding(layer, group, frozenset([4, 5]))
    assert MuonShardingMixin.sharded_state_dict(optimizer, model)


def test_a_state_of_another_models_parameter():
    tree = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    optimizer = paddle.optimizer.AdamW(0.1, parameters=tree[0].parameters())
    optimizer._accumulators["moment1"] = {tree[1].weight.name: paddle.zeros([3, 2])}  # of an earlier list of parameters
    with provoked("parallel/optimizers.py", "pass the sharded_state_dict() of the model whose parameters the"):
        optimizer.sharded_state_dict(tree[0].sharded_state_dict())
    found = optimizer.sharded_state_dict(tree.sharded_state_dict())
    assert {"0.weight.moment1_0", "0.bias.moment1_0", "1.weight.moment1_0"} <= found.keys()


def test_only_owned_states():
    layer = nn.Linear(2, 3)
    optimizer = paddle.optimizer.AdamW(0.1, parameters=layer.parameters())
    model = layer.sharded_state_dict()
    optimizer.sharded_state_dict(model)
    owned = describe_states(
        optimizer, model, keys_by_parameter_name(model, layer.parameters()), owned={layer.bias.name}
    )
    assert {key.rpartition(".")[0] for key in owned} == {"bias"}


# -- which method answers ----------------------------------------------------------------------------------------------


def paddles_own(module="paddle.distributed.fleet"):
    def sharded_state_dict(model):
        return {}

    sharded_state_dict.__module__ = module
    return sharded_state_dict


def test_ours_comes_before_what_paddle_sets_and_goes_with_uninstall():
    layer = nn.Linear(2, 3)
    before, after = (paddle.optimizer.AdamW(0.1, parameters=layer.parameters()) for _ in range(2))
    before.sharded_state_dict = paddles_own()
    fc.uninstall()
    after.sharded_state_dict = paddles_own()
    fc.install()
    for optimizer in (before, after):
        assert len(optimizer.sharded_state_dict(layer.sharded_state_dict())) == 8
    fc.uninstall()
    assert before.sharded_state_dict({}) == after.sharded_state_dict({}) == {}
    del before.sharded_state_dict
    assert "sharded_state_dict" not in vars(before)


def test_a_users_own_comes_before_ours():
    optimizer = paddle.optimizer.AdamW(0.1, parameters=nn.Linear(2, 3).parameters())
    own = paddles_own("users.module")
    optimizer.sharded_state_dict = own
    assert optimizer.sharded_state_dict is own
    del optimizer.sharded_state_dict
    assert optimizer.sharded_state_dict.__func__ is OptimizerMixin.sharded_state_dict
    with pytest.raises(AttributeError):
        del optimizer.sharded_state_dict


def test_mix_precision_optimizer_asks_the_one_inside():
    from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionOptimizer

    layer = nn.Linear(2, 3)
    optimizer = MixPrecisionOptimizer(paddle.optimizer.AdamW(0.1, parameters=layer.parameters()))
    model = layer.sharded_state_dict()
    assert len(optimizer.sharded_state_dict(model)) == 8
    optimizer.update_slice = lambda: None  # what stage 3 sets
    optimizer._parameter_list = list(layer.parameters())
    assert len(optimizer.sharded_state_dict(model)) == 8


# -- init_optimizer_state ----------------------------------------------------------------------------------------------


def test_init_creates_all_states():
    layer = nn.Linear(2, 3)
    optimizer = paddle.optimizer.Momentum(0.1, parameters=layer.parameters())
    state = fc.init_optimizer_state(optimizer, layer.sharded_state_dict())
    assert sorted(state) == ["bias.velocity_0", "weight.velocity_0"]
    assert sorted(optimizer._accumulators["velocity"]) == sorted(p.name for p in layer.parameters())


@pytest.mark.parametrize(("rank", "expected"), [(0, (0, 12)), (2, (24, 35)), (3, (35, 35))])
def test_init_before_the_first_step_creates_the_states_of_slices(rank, expected):
    """In a fresh job: Paddle tells the optimizer of slices in the first step, by ``update_params_slice``."""
    layer = Columns()
    Wrapper(layer, rank, 4, 48)
    assert not layer.weight._is_initialized()
    name, size = layer.weight.name, layer.weight.fw_storage.shape[0]
    optimizer = paddle.optimizer.AdamW(0.1, parameters=layer.parameters())
    state = fc.init_optimizer_state(optimizer, layer.sharded_state_dict())
    moments = {key: state[key] for key in ("weight.moment1_0", "weight.moment2_0") if key in state}
    assert len(moments) == 2 if expected[0] < expected[1] else moments == {}
    for moment in moments.values():
        assert moment.is_flattened
        assert (moment.flattened_range.start, moment.flattened_range.stop) == expected
        assert (moment.local_shape, moment.global_shape, moment.global_offset) == ((5, 7), (5, 14), (0, 7))
        assert list(moment.local_tensor.shape) == [expected[1] - expected[0]]
    assert list(optimizer._accumulators["moment1"]) == [f"slice@{name}"]
    assert optimizer._accumulators["moment1"][f"slice@{name}"].shape == [size]
    assert not layer.weight._is_initialized(), "nothing is gathered"


def test_init_with_a_catalog_leaves_out_parameters_without_any_state(tmp_path):
    layer = nn.Linear(2, 3)
    optimizer = paddle.optimizer.AdamW(0.1, parameters=layer.parameters())
    model = layer.sharded_state_dict()
    every = fc.init_optimizer_state(optimizer, model)
    held = [key for key in every if key.startswith("weight.") and not key.endswith("moment2_0")]
    for catalog in (held, dict.fromkeys(held), types.SimpleNamespace(keys=held)):
        found = fc.init_optimizer_state(optimizer, model, catalog)
        # moment2 is looked for all the same, so that a load says that it is missing.
        assert sorted(found) == sorted(key for key in every if key.startswith("weight."))


def test_init_with_a_catalog_that_has_the_state_under_another_name():
    layer = nn.Sequential(nn.Linear(2, 2, bias_attr=False), nn.Linear(2, 2, bias_attr=False))
    layer[1].weight = layer[0].weight
    optimizer = paddle.optimizer.AdamW(0.1, parameters=layer.parameters())
    assert len(fc.init_optimizer_state(optimizer, layer.sharded_state_dict(), ["1.weight.moment1_0"])) == 4


def test_init_without_install():
    layer = nn.Linear(2, 3)
    optimizer = paddle.optimizer.AdamW(0.1, parameters=layer.parameters())
    model = layer.sharded_state_dict()
    fc.uninstall()
    assert len(fc.init_optimizer_state(optimizer, model)) == 8


OLD, NEW = "paddle.distributed.auto_parallel.fully_shard_fusion", "paddle.distributed.fsdp._fsdp_context"


@pytest.mark.parametrize(("where", "others"), [((NEW,), (OLD,)), ((OLD,), (NEW,)), ((OLD,), ()), ((NEW, OLD), ())])
def test_what_is_fused_is_found_where_this_paddle_keeps_it(monkeypatch, where, others):
    """Paddle after 3.3 has it in a module of its own; the old one may keep its name, and know of nothing."""
    context = object()
    monkeypatch.delitem(sys.modules, OLD, raising=False)
    for name in (*where, *others):
        found = context if name in where else None
        module = types.SimpleNamespace(get_fsdp_context=lambda found=found: found)
        monkeypatch.setitem(sys.modules, name, module)
    assert buffer_context() is context


def test_a_paddle_that_does_not_tell_what_is_fused_is_refused_where_there_are_dist_tensors(monkeypatch):
    monkeypatch.setitem(sys.modules, OLD, types.SimpleNamespace())
    with pytest.raises(RuntimeError, match="expected get_fsdp_context in one of .*_fsdp_context.* Remedy .FC808.: use"):
        buffer_context()
    assert buffer_context(has_dist_tensors=False) is None


def test_a_paddle_that_fuses_nothing_has_no_context(monkeypatch):
    monkeypatch.delitem(sys.modules, OLD, raising=False)
    assert buffer_context() is None

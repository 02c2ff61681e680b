"""Remedies about layers and optimizers that describe themselves, each provoked and followed in one process."""

from __future__ import annotations

from types import SimpleNamespace

import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.meta_parallel.meta_parallel_base import MetaParallelBase

import paddle_flexckpt as fc
from paddle_flexckpt.parallel.aoa_statements import gen_aoa_statements
from paddle_flexckpt.parallel.install import optimizer_sharded_state_dict
from paddle_flexckpt.parallel.slices import shaped_view
from paddle_flexckpt.run_state import collect_extra_state, load_extra_state, restore_extra_state
from tests.parallel.conftest import installed  # noqa: F401 - each test runs with the mixins
from tests.parallel.test_experts import OwnMoE, group, numbers
from tests.parallel.test_gen_aoa_statements import own
from tests.parallel.test_layers import Cut, Reshaped, box
from tests.parallel.test_wrappers import OfPaddle, make_model
from tests.remedies.following import provoked


def test_the_group_of_experts():
    class Overridden(OwnMoE):
        def _get_expert_group(self):
            return group(1, 2)

    layers = [kind(None, [1, 1]) for kind in (OwnMoE, OwnMoE, Overridden)]
    for layer in layers:
        del layer.moe_group
    with provoked("parallel/experts.py", "set moe_group (None for one rank), or override _get_expert_group()"):
        layers[0].sharded_state_dict()
    layers[0].moe_group, layers[1].moe_group = None, group(1, 2)
    assert [numbers(layer) for layer in layers] == [[0, 1], [2, 3], [2, 3]]


def test_the_list_of_experts():
    class Two(OwnMoE):
        def _get_expert_lists(self):
            return ("small",)

    def made(kind):
        layer = kind(group(1, 2), [])
        layer.small = nn.LayerList([nn.Linear(1, 1)])
        return layer

    with provoked("parallel/experts.py", "override _get_expert_lists()"):
        made(OwnMoE).sharded_state_dict()
    assert "small.1.weight" in made(Two).sharded_state_dict()


def test_the_number_of_experts():
    with provoked("parallel/experts.py", "change the number of experts or the degree of expert parallelism"):
        OwnMoE(group(1, 2), [1, 1], 3).sharded_state_dict()
    assert numbers(OwnMoE(group(1, 2), [1, 1], 4)) == [2, 3]
    assert numbers(OwnMoE(None, [1, 1, 1], 3)) == [0, 1, 2]
    with provoked("parallel/experts.py", "give every rank the same number of experts"):
        OwnMoE(group(1, 2), [1, 1, 1], 4).sharded_state_dict()
    with provoked("parallel/experts.py", "spread the experts evenly, in the order of the ranks"):
        OwnMoE(group(1, 2), [1, 0, 1, 0], 4).sharded_state_dict()
    assert numbers(OwnMoE(group(1, 2), [0, 0, 1, 1], 4)) == [2, 3]


def test_a_copy_of_a_parameter():
    with provoked("parallel/layers.py", "describe the parameter itself, or shaped_view() of paddle_flexckpt.parallel"):
        nn.Sequential(Reshaped(lambda weight: weight.clone().reshape([6, 4]))).sharded_state_dict()
    for view in (lambda weight: weight, lambda weight: shaped_view("weight", weight, (6, 4))):
        model = nn.Sequential(Reshaped(view))
        shard = model.sharded_state_dict()["0.weight"].local_tensor
        model[0].weight.set_value(model[0].weight + 1)
        assert shard.numpy().tobytes() == model[0].weight.numpy().tobytes()


def test_layers_that_share_a_parameter_have_one_rule():
    class Halved(nn.Layer):
        def __init__(self, weight=None):
            super().__init__()
            self.weight = self.create_parameter([4, 4]) if weight is None else weight

        def _get_shard_rules(self):
            return {"weight": 0}

        def _get_shard_group(self):
            return SimpleNamespace(rank=1, nranks=2)

    model = nn.Layer()
    model.part = Halved()
    model.whole = nn.Linear(4, 4, bias_attr=False)
    model.whole.weight = model.part.weight
    with provoked("parallel/layers.py", "give all layers that share it the same shard rule and group"):
        model.sharded_state_dict()
    model.whole = Halved(model.part.weight)
    state = model.sharded_state_dict()
    assert box(state["whole.weight"]) == box(state["part.weight"]) == ((4, 4), (8, 4), (4, 0))


def test_a_part_without_a_rule_has_one():
    layer = nn.Sequential(nn.Linear(3, 5))
    layer[0].weight.is_distributed = True
    with provoked(
        "parallel/layers.py", "give its layer a _get_shard_rules() that returns {name: axis}; for a class that"
    ):
        layer.sharded_state_dict()
    assert box(nn.Sequential(Cut()).sharded_state_dict()["0.weight"]) == ((3, 5), (3, 20), (0, 10))


def test_a_wrapper_with_state_or_without_a_model():
    class Scaled(MetaParallelBase):
        def __init__(self, model):
            super().__init__(model, None, None)
            self.scale = self.create_parameter([1])

    class Described(Scaled):
        def sharded_state_dict(self, structured_name_prefix=""):
            state = self._layers.sharded_state_dict(structured_name_prefix)
            return {**state, "scale": fc.ShardedWeight("scale", self.scale, (1,), (1,), (0,))}

    with provoked("parallel/layers.py", "move them into the model, or override sharded_state_dict()"):
        Scaled(make_model()).sharded_state_dict()
    assert "scale" in Described(make_model()).sharded_state_dict()
    model = make_model()
    model.scale = model.create_parameter([1])
    assert "scale" in MetaParallelBase(model, None, None).sharded_state_dict()
    wrapper = MetaParallelBase(model, None, None)
    wrapper._layers = None
    with provoked("sharded_weight.py", "call sharded_state_dict() of the model itself"):
        wrapper.sharded_state_dict()
    assert "scale" in model.sharded_state_dict()


def test_the_optimizer_inside_an_unknown_wrapper():
    model = make_model()
    optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
    shards = model.sharded_state_dict()
    expected = set(optimizer.sharded_state_dict(shards))
    with provoked("parallel/optimizers.py", "pass the optimizer inside the wrapper"):
        optimizer_sharded_state_dict(SimpleNamespace(mine=optimizer), shards)
    assert set(optimizer_sharded_state_dict(optimizer, shards)) == expected
    with provoked(
        "parallel/optimizers.py", "use a version of paddle_flexckpt that knows it; or, if it changes nothing"
    ):
        optimizer_sharded_state_dict(OfPaddle(optimizer), shards)
    assert set(optimizer_sharded_state_dict(OfPaddle(optimizer)._inner_opt, shards)) == expected


def test_the_state_of_lbfgs_is_extra_state(tmp_path):
    def made():
        model = nn.Linear(2, 2)
        return model, paddle.optimizer.LBFGS(0.1, max_iter=3, parameters=model.parameters())

    model, optimizer = made()

    def closure():
        optimizer.clear_grad()
        loss = (model(paddle.ones([1, 2])) ** 2).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with provoked("parallel/optimizers.py", "save the model without its optimizer, and collect_extra_state(lbfgs="):
        optimizer.sharded_state_dict(model.sharded_state_dict())
    fc.save_state_dict({**model.sharded_state_dict(), **collect_extra_state(lbfgs=optimizer.state_dict())}, tmp_path)
    _, other = made()
    with provoked("parallel/optimizers.py", "pass what the state_dict() of an LBFGS gave"):
        other.set_state_dict({"moment": 0})
    other.set_state_dict(restore_extra_state(load_extra_state(tmp_path)).more["lbfgs"])
    assert other.state["func_evals"] == optimizer.state["func_evals"]


@pytest.mark.parametrize("rule", ["method", "rules="])
def test_a_class_without_an_aoa_rule(rule):
    class Table(nn.Layer):
        def __init__(self):
            super().__init__()
            self.kernel = self.create_parameter([2, 3])

    with provoked("parallel/aoa_statements.py", "(or 'transpose', or a statement), or pass rules="):
        gen_aoa_statements(nn.Sequential(("table", Table())))
    if rule == "method":
        Table._get_aoa_rules = lambda self, direction: {"kernel": "transpose"}
    rules = {} if rule == "method" else {"rules": {Table: {"kernel": "transpose"}}}
    statements = gen_aoa_statements(nn.Sequential(("table", Table())), **rules)
    assert statements == ["table.kernel^T -> table.kernel"]


def test_a_parameter_that_a_checkpoint_has_no_name_for():
    model, names = own(weight=[2, 3], bias=[3]), {"weight": "x.weight"}
    rules = {nn.Layer: {"weight": "copy", "bias": "copy"}}
    with provoked("parallel/aoa_statements.py", "add one, or give the parameter the AOA rule 'absent'"):
        gen_aoa_statements(model, hf_names=names, rules=rules)
    named = gen_aoa_statements(model, hf_names={**names, "bias": "x.bias"}, rules=rules)
    assert named == ["x.weight -> weight", "x.bias -> bias"]
    rules[nn.Layer]["bias"] = "absent"
    assert gen_aoa_statements(model, hf_names=names, rules=rules) == ["x.weight -> weight", "_ -> bias"]

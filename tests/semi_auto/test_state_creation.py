"""States that are created before the first step: of parameter groups, and from an incomplete given state.

The jobs: jobs of test_state_creation.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle
import paddle.distributed as dist
from paddle.utils import unique_name

import paddle_flexckpt as fc
from paddle_flexckpt.parallel.semi_auto import DistModelMixin, _split
from paddle_flexckpt.parallel.state_creation import create_states
from tests.remedies.following import advised, provoked
from tests.semi_auto import training

pytestmark = pytest.mark.paddle

# -- what each rank runs -----------------------------------------------------------------------------------------------


def given_without_one(fully):
    """A semi-automatic optimizer that was given all states but one: the error, what is left, and what a second try has.

    Args:
        fully: Whether the model is under ``fully_shard`` without fusion; otherwise stage 1.

    Returns:
        The error; numbers of states created and of entries left after it; the number of states once all are given.
    """
    from paddle.distributed.fsdp import fully_shard

    fc.install()
    mesh = dist.ProcessMesh(list(range(dist.get_world_size())), dim_names=["dp"])
    dist.auto_parallel.set_mesh(mesh)

    def make():
        with paddle.utils.unique_name.guard():
            layer = paddle.nn.Linear(4, 6)
            dist.shard_layer(layer, mesh)
            if fully:
                fully_shard(layer, mesh=mesh, enable_tensor_fusion_and_overlap=False)
        inner = paddle.optimizer.AdamW(0.1, parameters=layer.parameters())
        return layer, inner if fully else dist.shard_optimizer(inner, dist.ShardingStage1("dp", mesh))

    with paddle.utils.unique_name.guard():
        _, optimizer = make()
        create_states(optimizer)
        state = optimizer.state_dict()
        given = {name: paddle.ones(tensor.shape) for name, tensor in state.items() if name != "LR_Scheduler"}
    layer, fresh = make()
    text = ""
    with paddle.utils.unique_name.guard():
        fresh.set_state_dict({name: t for name, t in given.items() if name != "linear_0.b_0.dist_moment2_0"})
        shards = layer.sharded_state_dict()
        try:
            fresh.sharded_state_dict(shards)
        except ValueError as error:
            text = str(error)
        inner = getattr(fresh, "_inner_opt", fresh)
        left = [sum(map(len, inner._accumulators.values())), len(inner._accumulators_holder)]
        fresh.set_state_dict(given)
        return [text, left, len(fresh.sharded_state_dict(shards))]


def frozen_in_between():
    """Tensor fusion whose states are asked for, and again after a parameter has been frozen and thawed.

    Returns:
        The error with the parameter frozen; whether the states are the same, under the same names, once it is thawed.
    """
    fc.install()
    built = training.build("dp2-fusion", "uneven")

    def ask():
        shards = built.optimizer.sharded_state_dict(built.model.sharded_state_dict())
        return {key: [str(shard.flattened_range), shard.local_tensor.data_ptr()] for key, shard in shards.items()}

    before, text = ask(), ""
    built.model.cube.weight.stop_gradient = True
    try:
        ask()
    except ValueError as error:
        text = str(error)
    built.model.cube.weight.stop_gradient = False
    return [text, ask() == before]


# -- what is asserted -------------------------------------------------------------------------------------------------


def build(kind="AdamW", groups=False, **named):
    """A network of two layers with its optimizer, of the same names every time."""
    with unique_name.guard():
        model = paddle.nn.Sequential(paddle.nn.Linear(3, 4), paddle.nn.Linear(4, 3))
        for i, parameter in enumerate(model.parameters()):
            parameter.set_value(np.random.RandomState(i).randn(*parameter.shape).astype("float32"))
        parameters = model.parameters()
        if groups:
            first, second = (layer.parameters() for layer in model)
            parameters = [{"params": first, "beta1": 0.8, "beta2": 0.99}, {"params": second, "beta1": 0.7}]
    return model, getattr(paddle.optimizer, kind)(0.1, parameters=parameters, **named)


def step(model, optimizer):
    (model(paddle.ones([2, 3])) ** 2).mean().backward()
    optimizer.step()
    optimizer.clear_grad()


def values(model, optimizer):
    states = {(name, p): t for name, tensors in optimizer._accumulators.items() for p, t in tensors.items()}
    states.update({("parameter", p.name): p for p in model.parameters()})
    return {key: tensor.numpy().tobytes() for key, tensor in states.items()}


@pytest.fixture
def installed():
    fc.install()
    yield
    fc.uninstall()


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "Adamax", "Lamb", "NAdam", "RAdam"])
def test_beta_powers_of_parameter_groups_begin_as_in_the_first_step(installed, kind):
    model, optimizer = build(kind, groups=True)
    other, asked = build(kind, groups=True)
    options = {name: vars(asked)[name] for name in ("_beta1", "_beta2", "_epsilon")}
    asked.sharded_state_dict(other.sharded_state_dict())
    assert {name: vars(asked)[name] for name in options} == options
    for _ in range(2):
        step(model, optimizer)
        step(other, asked)
    assert values(other, asked) == values(model, optimizer)


def test_momentum_of_parameter_groups_stays_as_it_is(installed):
    with unique_name.guard():
        model = paddle.nn.Linear(3, 3)
    groups = [{"params": [model.weight], "momentum": 0.5}, {"params": [model.bias], "momentum": 0.1}]
    optimizer = paddle.optimizer.Momentum(0.1, 0.9, parameters=groups)
    optimizer.sharded_state_dict(model.sharded_state_dict())
    assert optimizer._momentum == 0.9


@pytest.mark.parametrize(
    "lacking", ["linear_0.b_0_moment1_0", "linear_1.w_0_moment2_0", "linear_1.b_0_beta2_pow_acc_0"]
)
def test_a_given_state_that_lacks_one_is_an_error_and_can_be_given_again(installed, lacking, tmp_path):
    model, optimizer = build()
    with unique_name.guard():
        step(model, optimizer)
    given = optimizer.state_dict()
    other, fresh = build()
    with unique_name.guard():
        fresh.set_state_dict({name: tensor for name, tensor in given.items() if name != lacking})
        shards = other.sharded_state_dict()
        for _ in range(2):
            with provoked("parallel/state_creation.py", "give it the state of all trainable parameters,") as caught:
                fresh.sharded_state_dict(shards)
            assert re.search(rf"AdamW: what set_state_dict.* {lacking}\b.* has 15 entries", str(caught.value))
            assert not fresh._accumulators
            assert sorted(fresh._accumulators_holder) == sorted(set(given) - {lacking})
        fresh.set_state_dict(given)
        assert len(fresh.sharded_state_dict(shards)) == 16
    for accumulator, tensors in optimizer._accumulators.items():
        for name, tensor in tensors.items():
            assert np.array_equal(fresh._accumulators[accumulator][name].numpy(), tensor.numpy())
    # Or none is given, and sharded_state_dict() is loaded.
    fc.save_state_dict(optimizer.sharded_state_dict(model.sharded_state_dict()), tmp_path)
    loaded, without = build()
    fc.load_state_dict(without.sharded_state_dict(loaded.sharded_state_dict()), tmp_path, strict=True)
    states = (values(paddle.nn.Layer(), each) for each in (optimizer, without))
    assert next(states) == next(states)


@pytest.mark.multiprocess
@pytest.mark.parametrize("fully", [False, True])
def test_the_same_of_a_semi_automatic_optimizer(world2, fully):
    for text, left, whole in world2.run(given_without_one, fully=fully):
        assert text.startswith("AdamW: what set_state_dict() was given lacks a state that the first step needs")
        assert "linear_0.b_0.dist_moment2_0" in text
        assert left == [0, 7]
        assert whole == 8


@pytest.mark.multiprocess
def test_states_of_fused_parts_are_not_described_as_those_of_other_parts(world2):
    """A parameter that is frozen leaves the buffers, and all behind it stand elsewhere."""
    for rank, (text, same) in enumerate(world2.run(frozen_in_between)):
        assert text.startswith(f"rank {rank}: the first step fuses other parameters than those that states")
        advised("parallel/tensor_fusion.py", "set stop_gradient on parameters that are not trained, before", text)
        assert same


class Names(dict):
    """A table of which one counts how often it is looked into."""

    looks = 0

    def __contains__(self, name):
        self.looks += 1
        return super().__contains__(name)

    def __iter__(self):
        raise AssertionError("walked through for each state")


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("linear_1.w_0.dist_moment1_1", ("linear_1.w_0.dist", "moment1_0")),
        ("linear_1.w_0_moment1_0", ("linear_1.w_0", "moment1_0")),
        ("slice@linear_1.w_0.dist_fp32_master_0_beta1_pow_acc_0", ("linear_1.w_0.dist", "beta1_pow_acc_0")),
        ("linear_1.w_0.dist_fp32_master_2", ("linear_1.w_0.dist", "w_0")),
        ("scale_moment1_0", ("scale", "moment1_0")),
        ("scale_moment_moment1_0", ("scale_moment", "moment1_0")),  # the longest
    ],
)
def test_the_parameter_of_a_raw_state_is_looked_up(raw, expected):
    names = Names.fromkeys(["linear_1.w_0", "linear_1.w_0.dist", "scale", "scale_moment"], "")
    assert _split(raw, names, None) == expected
    assert names.looks <= raw.count("_")


def test_a_static_model_has_all_names_of_a_tied_parameter():
    """Dynamic mode has the states under the first of them."""
    names = {"embedding.weight": "w.dist", "decoder.weight": "w.dist", "bias": "b.dist"}
    weight, moment = paddle.ones([2, 3]), paddle.zeros([2, 3])
    state = {"decoder.weight": weight, "bias": paddle.ones([3]), "w.dist_moment1_0": moment}
    model = SimpleNamespace(
        _engine=SimpleNamespace(_mode="train", fused_ffn_qkv=None, _optimizer=None),
        _structured_to_parameter_name=names,
        _parameter_to_structured_name={raw: key for key, raw in names.items()},
        state_dict=lambda: state,
    )
    shards = DistModelMixin.sharded_state_dict(model)
    assert {key: list(shard.aliases) for key, shard in shards.items()} == {
        "decoder.weight": ["embedding.weight"],
        "embedding.weight": ["decoder.weight"],
        "bias": [],
        "decoder.weight.moment1_0": ["embedding.weight.moment1_0"],
    }
    assert shards["embedding.weight"].local_tensor is weight
    assert shards["decoder.weight.moment1_0"].local_tensor is moment

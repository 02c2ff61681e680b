"""Wrappers in one process: no prefix, no state lost, and a clear word where nothing can be described."""

from __future__ import annotations

from types import SimpleNamespace

import paddle
import pytest
from paddle import nn
from paddle.distributed.fleet.meta_optimizers.dygraph_optimizer.heter_parallel_optimizer import HeterParallelOptimizer
from paddle.distributed.fleet.meta_parallel.meta_parallel_base import MetaParallelBase
from paddle.distributed.fleet.utils.mix_precision_utils import MixPrecisionLayer, MixPrecisionOptimizer

import paddle_flexckpt as fc
from paddle_flexckpt.parallel.install import optimizer_sharded_state_dict

pytestmark = pytest.mark.compat


def make_model():
    model = nn.Sequential(("a", nn.Linear(2, 3)), ("norm", nn.BatchNorm1D(3)))
    model.a.bias.stop_gradient = True
    return model


def same(ours, wanted):
    assert list(ours) == list(wanted)
    assert all(ours[key].local_tensor is wanted[key].local_tensor for key in wanted)


WRAPPERS = {
    "DataParallel": lambda model: paddle.DataParallel(model),
    "MetaParallelBase": lambda model: MetaParallelBase(model, None, None),
    "MixPrecisionLayer": lambda model: MixPrecisionLayer(model, "bfloat16"),
    "all": lambda model: paddle.DataParallel(MixPrecisionLayer(MetaParallelBase(model, None, None), "bfloat16")),
    "inside": lambda model: MetaParallelBase(MixPrecisionLayer(model, "bfloat16"), None, None),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_state_is_that_of_the_model(wrap):
    model = make_model()
    wrapper = wrap(model)
    same(wrapper.sharded_state_dict(), model.sharded_state_dict())
    same(wrapper.sharded_state_dict("x."), model.sharded_state_dict("x."))
    # A wrapper somewhere inside a model adds nothing either.
    outer = nn.Sequential(("net", wrapper))
    same(outer.sharded_state_dict(), model.sharded_state_dict("net."))


@pytest.mark.skipif(not hasattr(nn.Layer, "full"), reason="Paddle 3.2")
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_whole_tensors_have_the_names_of_the_wrappers_state_dict(wrap, monkeypatch):
    monkeypatch.setattr("paddle.distributed.flex_checkpoint.dcp.full_param.full_param", fc.full_param)
    model = make_model()
    wrapper = wrap(model)
    whole = dict(wrapper.full())
    assert whole.keys() == wrapper.state_dict().keys()
    expected = model.a.weight.numpy()
    model.a.weight.set_value(paddle.zeros([2, 3]))
    wrapper.set_state_dict(whole)
    assert (model.a.weight.numpy() == expected).all()
    # Statements say the names.
    assert sorted(dict(wrapper.full(["a.weight -> x"]))) == sorted({*model.state_dict(), "x"} - {"a.weight"})


def test_a_wrapper_with_state_of_its_own_is_refused():
    class Scaled(MetaParallelBase):
        def __init__(self, model):
            super().__init__(model, None, None)
            self.scale = self.create_parameter([1])

    with pytest.raises(ValueError, match=r"Scaled has parameters or buffers besides.*\['scale'\] of its own.*Remedy"):
        Scaled(make_model()).sharded_state_dict()
    wrapper = MetaParallelBase(make_model(), None, None)
    wrapper.head = nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"\['weight', 'bias'\] of head"):
        wrapper.sharded_state_dict()


def test_a_wrapper_that_names_parts_of_its_model_is_not():
    model = make_model()
    wrapper = MetaParallelBase(model, None, None)
    wrapper.first = model.a
    same(wrapper.sharded_state_dict(), model.sharded_state_dict())


def test_a_wrapper_without_a_model_is_refused():
    wrapper = MetaParallelBase(make_model(), None, None)
    wrapper._layers = None
    with pytest.raises(ValueError, match=r"expected a wrapped model under one of _layers, _layer; got \[\].*Remedy"):
        wrapper.sharded_state_dict()


class Forwards:
    def __init__(self, optimizer):
        self._anything = optimizer

    def __getattr__(self, name):
        return getattr(self._anything, name)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda optimizer: optimizer,
        MixPrecisionOptimizer,
        lambda optimizer: HeterParallelOptimizer(optimizer, None),
        lambda optimizer: HeterParallelOptimizer(MixPrecisionOptimizer(optimizer), None),
        Forwards,
        lambda optimizer: SimpleNamespace(_inner_opt=SimpleNamespace(_optim=optimizer)),
    ],
    ids=["none", "MixPrecisionOptimizer", "HeterParallelOptimizer", "both", "forwards", "named"],
)
def test_optimizers(wrap):
    model = make_model()
    optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
    wrapper, shards = wrap(optimizer), model.sharded_state_dict()
    wanted = optimizer.sharded_state_dict(shards)
    same(optimizer_sharded_state_dict(wrapper, shards), wanted)
    if not isinstance(wrapper, SimpleNamespace):
        same(wrapper.sharded_state_dict(shards), wanted)


def test_an_unknown_wrapper_is_refused():
    model = make_model()
    optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
    for unknown in (SimpleNamespace(mine=optimizer), SimpleNamespace(optimizer=SimpleNamespace(mine=optimizer)), None):
        with pytest.raises(ValueError, match=r"is no optimizer that can be described: expected.*got a .*Remedy"):
            optimizer_sharded_state_dict(unknown, model.sharded_state_dict())
    circle = SimpleNamespace()
    circle.optimizer = circle
    with pytest.raises(ValueError, match="is no optimizer that can be described"):
        optimizer_sharded_state_dict(circle, model.sharded_state_dict())


class OfPaddle:
    """A wrapper of Paddle's that ``install()`` does not know: it describes what exists."""

    __module__ = "paddle.distributed.a_new_release"

    def __init__(self, optimizer):
        self._inner_opt = optimizer
        self._parameter_list = optimizer._parameter_list

    def sharded_state_dict(self, model):
        return {f"x.{name}": model["a.weight"] for name in self._inner_opt._accumulators}


OfPaddle.sharded_state_dict.__module__ = OfPaddle.__module__


class OfAUser(OfPaddle):
    def sharded_state_dict(self, model):
        return {}


@pytest.mark.parametrize("stepped", [False, True])
def test_a_class_of_paddle_with_a_method_of_its_own_is_refused(tmp_path, stepped):
    model = make_model()
    shards = model.sharded_state_dict()
    optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
    if stepped:  # its method would describe something, and the same method nothing in the job that resumes
        optimizer.sharded_state_dict(shards)
    text = r"a_new_release\.OfPaddle describes itself by a method of Paddle's own.*Remedy"
    for wrapper in (OfPaddle(optimizer), SimpleNamespace(_inner_opt=OfPaddle(optimizer))):
        for call in (optimizer_sharded_state_dict, fc.init_optimizer_state):
            with pytest.raises(ValueError, match=text):
                call(wrapper, shards)
        manager = fc.CheckpointManager(tmp_path)
        with pytest.raises(fc.CheckpointError, match="OfPaddle describes itself"):
            manager.save(1, model=model, optimizer=wrapper)
        assert manager.all_steps() == []
    assert optimizer_sharded_state_dict(OfAUser(optimizer), shards) == {}

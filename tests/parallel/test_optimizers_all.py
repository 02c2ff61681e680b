"""Every optimizer of Paddle: names, layouts and a continuation that is equal bit for bit."""

from __future__ import annotations

import gc

import numpy as np
import paddle
import pytest
from paddle import nn

import paddle_flexckpt as fc
from paddle_flexckpt.run_state import collect_extra_state, load_extra_state, restore_extra_state
from tests.remedies.following import advised

from .test_optimizers import Model, raw, states_of, step

pytestmark = pytest.mark.compat

POWERS = ("beta1_pow_acc", "beta2_pow_acc")
#: Arguments, and the accumulators that have one value per element of the parameter and that are one number.
OPTIMIZERS = {
    "Adam": ({}, ("moment1", "moment2"), POWERS),
    "AdamW": ({"weight_decay": 0.1}, ("moment1", "moment2"), POWERS),
    "Adamax": ({}, ("moment", "inf_norm"), POWERS[:1]),
    "Momentum": ({"use_nesterov": True}, ("velocity",), ()),
    "SGD": ({}, (), ()),
    "Lamb": ({}, ("moment1", "moment2"), POWERS),
    "Adagrad": ({"initial_accumulator_value": 0.1}, ("moment",), ()),
    "RMSProp": ({"momentum": 0.5, "centered": True}, ("momentum", "mean_square", "mean_grad"), ()),
    "Adadelta": ({}, ("_avg_squared_grad", "_avg_squared_update"), ()),
    # Their numbers are kept in tensors of the parameter's shape.
    "NAdam": ({}, ("momentum_decay_pow", "beta2_pow", "mu_product", "moment1", "moment2"), ()),
    "RAdam": ({}, ("beta1_pow", "beta2_pow", "rho", "moment1", "moment2"), ()),
    "ASGD": ({"batch_num": 3}, ("d", "y"), ("m",)),
    "Rprop": ({}, ("prevs", "learning_rates"), ()),
}
VARIANTS = [
    *((name, {}) for name in OPTIMIZERS),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {"amsgrad": True}),
    ("Momentum", {"use_nesterov": False, "weight_decay": 0.1}),
    ("RMSProp", {"momentum": 0.0, "centered": False}),
    *((name, {"name": "tuner"}) for name in OPTIMIZERS),
]
LEADING = {"y": 3}  # ASGD's history: one copy per batch


def build(kind, parameters, **kwargs):
    return getattr(paddle.optimizer, kind)(
        learning_rate=0.01, parameters=parameters, **{**OPTIMIZERS[kind][0], **kwargs}
    )


def expected_names(name, names, kwargs=()):
    _, per_element, numbers = OPTIMIZERS[name]
    extra = ("moment2_max",) if "amsgrad" in kwargs else ()
    return sorted(f"{key}.{state}_0" for key in names for state in (*per_element, *numbers, *extra))


def state_of(model, optimizer):
    shards = model.sharded_state_dict()
    return {**shards, **optimizer.sharded_state_dict(shards)}


def round_trip(tmp_path, make, wanted):
    """Two steps, a save, a load into a fresh pair, and one more step on both."""
    model, optimizer = make()
    for seed in range(2):
        step(model, optimizer, seed)
    state = state_of(model, optimizer)
    names = [key for key, _ in model.named_parameters()]
    assert sorted(set(state) - set(names)) == wanted
    fc.save_state_dict(state, tmp_path)
    other, fresh = make()
    target = state_of(other, fresh)
    report = fc.load_state_dict(target, tmp_path, strict=True)
    assert report.keys == len(state)
    assert [raw(t) for t in states_of(fresh).values()] == [raw(t) for t in states_of(optimizer).values()]
    assert step(other, fresh, 2) == step(model, optimizer, 2)
    assert [raw(p) for p in other.parameters()] == [raw(p) for p in model.parameters()]
    assert [raw(t) for t in states_of(fresh).values()] == [raw(t) for t in states_of(optimizer).values()]


@pytest.mark.parametrize(("name", "kwargs"), VARIANTS, ids=lambda value: str(value) if value else "plain")
def test_continuation(tmp_path, name, kwargs):
    def make():
        model = Model()
        return model, build(name, model.parameters(), **kwargs)

    names = [key for key, _ in Model().named_parameters()]
    round_trip(tmp_path, make, expected_names(name, names, kwargs))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_groups_and_frozen_parameters(tmp_path, name):
    def make():
        model = Model()
        model.first.weight.stop_gradient = True
        groups = [
            {"params": model.first.parameters(), "learning_rate": 0.5},
            {"params": model.second.parameters()},
        ]
        return model, build(name, groups)

    try:
        make()
    except TypeError as error:
        pytest.skip(f"no parameter groups: {error}")
    round_trip(tmp_path, make, expected_names(name, ["first.bias", "second.weight", "second.bias"]))


def halves(tensor, axis):
    return [paddle.to_tensor(part) for part in np.split(tensor.numpy(), 2, axis)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_of_cut_parameters(tmp_path, name):
    """Two halves of every parameter (the columns of a matrix), stepped alike, load into the whole ones.

    ``thin`` has one element on each rank: so have its numbers, which are not cut.
    """
    axes = {"wide": 1, "flat": 0, "thin": 0}
    shapes = {"wide": (3, 4), "flat": (6,), "thin": (2,)}
    random = np.random.RandomState(5)
    values = {key: random.randn(*shape).astype("float32") for key, shape in shapes.items()}
    gradients = [{key: random.randn(*shape).astype("float32") for key, shape in shapes.items()} for _ in range(3)]

    def trained(parts, steps):
        """A layer with the given values, stepped with gradients cut alike."""
        layer = nn.Layer()
        for key, value in parts(values).items():
            layer.add_parameter(key, layer.create_parameter(list(value.shape)))
            getattr(layer, key).set_value(value)
        optimizer = build(name, layer.parameters())
        for gradient in gradients[:steps]:
            sum((getattr(layer, key) * paddle.to_tensor(g)).sum() for key, g in parts(gradient).items()).backward()
            optimizer.step()
            optimizer.clear_grad()
        return layer, optimizer

    def part(rank):
        return lambda whole: {key: np.split(array, 2, axes[key])[rank] for key, array in whole.items()}

    state, both = {}, []
    for rank in (0, 1):
        layer, optimizer = trained(part(rank), 2)
        both.append((layer, optimizer))
        group = type("Group", (), {"nranks": 2, "rank": rank})
        shards = fc.build_sharded_state_dict(layer.state_dict(), axes, group=group)
        for key, weight in {**shards, **optimizer.sharded_state_dict(shards)}.items():
            state.setdefault(key, []).append(weight)
    numbers = OPTIMIZERS[name][2]
    for key, weights in state.items():
        parameter, accumulator = (*key.split(".", 1), "")[:2]
        accumulator = accumulator.removesuffix("_0")
        if accumulator in numbers:
            assert {w.global_shape for w in weights} == {(1,)}
            continue
        lead = (LEADING[accumulator],) if accumulator in LEADING else ()
        assert {w.global_shape for w in weights} == {lead + shapes[parameter]}
        axis = axes[parameter] + len(lead)
        assert [w.global_offset[axis] for w in weights] == [0, weights[0].local_shape[axis]]
    # Both ranks' shards in one process: the file does not know how many there were.
    merged = {}
    for key, weights in state.items():
        cut = weights[0].global_shape != weights[0].local_shape
        axis = next((i for i, (a, b) in enumerate(zip(weights[0].global_shape, weights[0].local_shape)) if a != b), 0)
        arrays = [weight.local_tensor.numpy() for weight in weights]
        merged[key] = paddle.to_tensor(np.concatenate(arrays, axis) if cut else arrays[0])
    fc.save_state_dict(merged, tmp_path)
    whole, fresh = trained(lambda values: {key: value * 0 for key, value in values.items()}, 0)
    fc.load_state_dict(state_of(whole, fresh), tmp_path, strict=True)
    if name != "Lamb":  # its step depends on the norm of the parameter, which tensor parallelism has to sum
        reference, by_reference = trained(lambda values: values, 2)
        ours, theirs = [
            [*states_of(o).values(), *m.parameters()] for m, o in ((whole, fresh), (reference, by_reference))
        ]
        for our, their in zip(ours, theirs):
            # Not bit for bit: where a row ends, the kernels go from vector instructions to single ones.
            np.testing.assert_allclose(our.numpy(), their.numpy(), rtol=1e-6)
    # And back: the whole checkpoint into the halves.
    for rank, (layer, optimizer) in enumerate(both):
        before = [raw(tensor) for tensor in states_of(optimizer).values()]
        for tensor in states_of(optimizer).values():
            tensor.set_value(paddle.zeros_like(tensor))
        group = type("Group", (), {"nranks": 2, "rank": rank})
        shards = fc.build_sharded_state_dict(layer.state_dict(), axes, group=group)
        fc.load_state_dict(optimizer.sharded_state_dict(shards), tmp_path)
        assert [raw(tensor) for tensor in states_of(optimizer).values()] == before


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_master_weights(tmp_path, name):
    """State only: the CPU has no half-precision kernels to step with."""

    def make(salt):
        paddle.set_default_dtype("bfloat16")
        try:
            model = Model()
        finally:
            paddle.set_default_dtype("float32")
        optimizer = build(name, model.parameters())
        optimizer._multi_precision = True  # some take it as an argument, all of them read this
        optimizer._master_weights = {}
        state = state_of(model, optimizer)
        random = np.random.RandomState(salt)
        for weight in state.values():
            bits = random.randint(0, 100, weight.local_tensor.shape)
            weight.local_tensor.set_value(paddle.to_tensor(bits).astype(weight.local_tensor.dtype))
        return model, optimizer, state

    model, optimizer, state = make(1)
    names = [key for key, _ in model.named_parameters()]
    masters = [f"{key}.w_0" for key in names]
    assert sorted(state) == sorted([*names, *masters, *expected_names(name, names)])
    for key in names:
        assert str(state[f"{key}.w_0"].local_tensor.dtype) == "paddle.float32"
        assert state[f"{key}.w_0"].global_shape == state[key].global_shape
    fc.save_state_dict(state, tmp_path)
    _, fresh, target = make(2)
    fc.load_state_dict(target, tmp_path, strict=True)
    assert [raw(t) for t in states_of(fresh).values()] == [raw(t) for t in states_of(optimizer).values()]
    ours, theirs = fresh._master_weights.values(), optimizer._master_weights.values()
    assert [raw(t) for t in ours] == [raw(t) for t in theirs]


@pytest.mark.parametrize("module", [paddle.optimizer, paddle.incubate.optimizer])
def test_lbfgs_goes_on_to_the_bit_from_extra_state(tmp_path, module):
    def run():
        with paddle.utils.unique_name.guard():
            paddle.seed(3)
            model = Model()
        return model, module.LBFGS(0.5, max_iter=3, history_size=4, parameters=model.parameters())

    def train(model, optimizer, steps):
        for number in steps:
            x = paddle.arange(12, dtype="float32").reshape([4, 3]).sin() * (1 + number / 50)

            def closure(x=x):
                optimizer.clear_grad()
                loss = ((model(x) - x.cos()) ** 2).mean()
                loss.backward()
                return loss

            optimizer.step(closure)
        return [raw(parameter) for parameter in model.parameters()]

    model, optimizer = run()
    with pytest.raises(ValueError, match=r"the state of LBFGS cannot be described as shards.*Remedy .FC805.: .*lbfgs="):
        optimizer.sharded_state_dict(model.sharded_state_dict())
    train(model, optimizer, range(3))
    assert len(optimizer.state["old_yk"]) > 1
    extra = collect_extra_state(lbfgs=optimizer.state_dict())
    fc.save_state_dict({**model.sharded_state_dict(), **extra}, tmp_path)
    expected = train(model, optimizer, range(3, 6))
    fresh, resumed = run()
    train(fresh, resumed, range(4))
    fc.load_state_dict(fresh.sharded_state_dict(), tmp_path)
    resumed.set_state_dict(restore_extra_state(load_extra_state(tmp_path)).more["lbfgs"])
    assert train(fresh, resumed, range(3, 6)) == expected
    with pytest.raises(ValueError, match=r"expected the one key 'state'; got \['moment'\]. Remedy"):
        resumed.set_state_dict({"moment": 0})


def test_model_average_goes_on_to_the_bit(tmp_path):
    def run():
        with paddle.utils.unique_name.guard():
            paddle.seed(3)
            model = Model()
        sgd = paddle.optimizer.SGD(0.1, parameters=model.parameters())
        average = paddle.incubate.ModelAverage(
            0.5, parameters=model.parameters(), min_average_window=2, max_average_window=3
        )
        return model, sgd, average

    def train(model, sgd, average, steps):
        for number in steps:
            (model(paddle.full([1, 3], float(number))) ** 2).mean().backward()
            sgd.step()
            average.step()
            sgd.clear_grad()
        with average.apply():
            averaged = [raw(parameter) for parameter in model.parameters()]
        return averaged, [raw(parameter) for parameter in model.parameters()]

    def state(model, _, average):
        shards = model.sharded_state_dict()
        return {**shards, **average.sharded_state_dict(shards)}

    first = run()
    train(*first, range(4))
    fc.save_state_dict(state(*first), tmp_path)
    expected = train(*first, range(4, 9))
    assert expected[0] != expected[1]
    fresh = run()
    found = state(*fresh)
    assert {"first.weight.sum_1_0", "second.bias.num_updates_0"} < set(found)
    fc.load_state_dict(found, tmp_path, strict=True)
    assert train(*fresh, range(4, 9)) == expected


@pytest.mark.parametrize("way", ["load", "reshard", "load, frozen"])
def test_masters_of_a_live_optimizer_do_not_undo_a_load_of_weights(tmp_path, way, caplog):
    def half():
        model = Model()
        for parameter in model.parameters():
            parameter.set_value(paddle.randn(parameter.shape))
        model.to(dtype="bfloat16")  # ``bfloat16()`` does nothing on processors that cannot compute with it
        optimizer = paddle.optimizer.AdamW(parameters=model.parameters(), multi_precision=True)
        optimizer.sharded_state_dict(model.sharded_state_dict())
        return model, optimizer

    def put(target):
        if way == "reshard":
            return fc.reshard_sharded_state_dict(saved.sharded_state_dict(), target)
        return fc.load_state_dict(target, tmp_path)

    with paddle.utils.unique_name.guard():
        saved, _ = half()
    fc.save_state_dict(saved.sharded_state_dict(), tmp_path)
    with paddle.utils.unique_name.guard():
        model, optimizer = half()
    weights = {parameter.name: parameter for parameter in model.parameters()}
    masters = optimizer._master_weights
    places = {name: master.data_ptr() for name, master in masters.items()}
    if way == "load, frozen":  # a program may spare the collector what it has made so far
        gc.freeze()
    put(model.sharded_state_dict())
    assert "laid out otherwise" not in caplog.text  # of another model with the same names
    assert len(masters) == len(weights) == 4
    for name, master in masters.items():
        assert raw(master) == raw(weights[name].astype("float32"))
        assert master.data_ptr() == places[name]
    # One that rounds to its parameter was loaded before, and is more exact.
    exact = next(iter(masters.values()))
    exact.copy_(exact * 1.0001, True)
    before = raw(exact)
    put(model.sharded_state_dict())
    assert raw(exact) == before
    # Of a slice nothing says here what it is of: sharded optimizers and stage 3 have such.
    masters[f"slice@{next(iter(masters))}"] = masters.pop(next(iter(masters))).flatten()[:2] + 1
    put(model.sharded_state_dict())
    assert "an optimizer has 1 that are laid out otherwise, such as 'slice@" in caplog.text
    advised(
        "memory/live_targets.py",
        "load weights before the first step, or give the optimizer's states too, with master_weights='convert'",
        caplog.text,
    )
    caplog.clear()
    # Its states too: the checkpoint has no masters.
    name, master = next((name, master) for name, master in masters.items() if name.startswith("slice@"))
    (key,) = (key for key, each in model.state_dict().items() if each.name == name.partition("@")[2])
    shape = tuple(weights[name.partition("@")[2]].shape)
    state = fc.ShardedWeight(f"{key}.w_0", master, shape, shape, (0,) * len(shape), True, slice(0, 2))
    options = {"master_weights": "convert"}
    target = {**model.sharded_state_dict(), f"{key}.w_0": state}
    if way == "reshard":
        fc.reshard_sharded_state_dict(saved.sharded_state_dict(), target, **options)
    else:
        fc.load_state_dict(target, tmp_path, **options)
    assert "laid out otherwise" not in caplog.text
    assert raw(master) == raw(weights[name.partition("@")[2]].astype("float32").flatten()[:2])
    # Before the first step there are none.
    model, optimizer = half()
    optimizer._master_weights.clear()
    put(model.sharded_state_dict())
    assert "laid out otherwise" not in caplog.text
    for parameter, expected in zip(model.parameters(), saved.parameters()):
        assert raw(parameter) == raw(expected)


def test_lookahead_goes_on_to_the_bit(tmp_path):
    def run():
        with paddle.utils.unique_name.guard():
            paddle.seed(3)
            model = Model()
        inner = paddle.optimizer.AdamW(0.1, parameters=model.parameters())
        return model, paddle.incubate.LookAhead(inner, alpha=0.5, k=3)

    def train(model, optimizer, steps):
        for number in steps:
            (model(paddle.full([1, 3], float(number))) ** 2).mean().backward()
            optimizer.step()
            optimizer.clear_grad()
        return [parameter.numpy().tobytes() for parameter in model.parameters()]

    def state(model, optimizer):
        shards = model.sharded_state_dict()
        return {**shards, **optimizer.sharded_state_dict(shards)}

    model, optimizer = run()
    train(model, optimizer, range(4))
    fc.save_state_dict(state(model, optimizer), tmp_path)
    expected = train(model, optimizer, range(4, 9))
    fresh = run()
    train(*fresh, range(1))
    found = state(*fresh)
    assert {"lookahead_step", "first.weight.slow_0", "first.weight.moment1_0"} < set(found)
    fc.load_state_dict(found, tmp_path, strict=True)
    assert train(*fresh, range(4, 9)) == expected
    # Asking before the first step changes nothing of it.
    asked, plain = run(), run()
    state(*asked)
    assert train(*asked, range(4)) == train(*plain, range(4))


def test_averages_and_merged_gradients_are_for_static_graphs():
    optimizer = paddle.optimizer.SGD(parameters=Model().parameters())
    for make, name in (
        (lambda: paddle.static.ExponentialMovingAverage(0.9), "ExponentialMovingAverage"),
        (lambda: paddle.incubate.optimizer.GradientMergeOptimizer(optimizer, 2), "GradientMergeOptimizer"),
    ):
        with pytest.raises(Exception, match=f"In dygraph.*don't support {name}"):
            make()


def test_parameters_may_be_described_by_paddle_s_own_class():
    theirs = pytest.importorskip("paddle.distributed.flex_checkpoint.dcp.sharded_weight").ShardedWeight
    layer = paddle.nn.Linear(4, 3)
    optimizer = paddle.optimizer.ASGD(0.1, batch_num=3, parameters=layer.parameters())
    model = {
        key: theirs(key, weight.local_tensor, weight.local_shape, weight.global_shape, weight.global_offset)
        for key, weight in layer.sharded_state_dict().items()
    }
    assert optimizer.sharded_state_dict(model)["weight.y_0"].global_shape == (3, 4, 3)

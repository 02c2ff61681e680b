"""AdamW: every state under its name, cut as its parameter, and nothing changed by asking."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from paddle import nn

import paddle_flexckpt as fc
from paddle_flexckpt.parallel.slices import shaped_view
from tests.remedies.following import provoked

STATES = ("beta1_pow_acc_0", "beta2_pow_acc_0", "moment1_0", "moment2_0")


def raw(tensor):
    return np.ascontiguousarray(tensor.numpy()).tobytes()


class Model(nn.Layer):
    """Parameters of two and one axes, and of one element."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 1)

    def forward(self, x):
        return self.second(nn.functional.gelu(self.first(x)))


def step(model, optimizer, seed=0):
    x = paddle.to_tensor(np.random.RandomState(seed).randn(5, 3).astype("float32"))
    loss = (model(x) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    return float(loss)


def adamw(model, **kwargs):
    return paddle.optimizer.AdamW(0.01, parameters=model.parameters(), weight_decay=0.1, **kwargs)


def states_of(optimizer):
    """Every tensor that an optimizer keeps, by accumulator and parameter; asked of Paddle."""
    found = {}
    for accumulator, tensors in optimizer._accumulators.items():
        for parameter, tensor in tensors.items():
            found[accumulator, parameter] = tensor
    return found


def names_of(model, states=STATES):
    return sorted(f"{name}.{state}" for name, _ in model.named_parameters() for state in states)


def round_trip(tmp_path, make, steps=2):
    """Trains, saves, loads into another model and a fresh optimizer, and trains both on: they have to stay equal."""
    model, optimizer = make()
    for seed in range(steps):
        step(model, optimizer, seed)
    shards = model.sharded_state_dict()
    state = {**shards, **optimizer.sharded_state_dict(shards)}
    fc.save_state_dict(state, tmp_path)
    other, fresh = make()
    shards = other.sharded_state_dict()
    target = {**shards, **fresh.sharded_state_dict(shards)}
    assert sorted(target) == sorted(state)
    assert any(raw(target[key].local_tensor) != raw(state[key].local_tensor) for key in state)
    fc.load_state_dict(target, tmp_path, strict=True)
    for key in state:
        assert raw(target[key].local_tensor) == raw(state[key].local_tensor), key
    ours, theirs = list(states_of(fresh).values()), list(states_of(optimizer).values())
    assert [raw(tensor) for tensor in ours] == [raw(tensor) for tensor in theirs]
    for seed in range(steps, steps + 3):
        assert step(other, fresh, seed) == step(model, optimizer, seed)
    for parameter, wanted in zip(other.parameters(), model.parameters()):
        assert raw(parameter) == raw(wanted)
    return sorted(state)


def make_plain(**kwargs):
    def make():
        model = Model()
        return model, adamw(model, **kwargs)

    return make


def test_names_are_those_of_paddle(tmp_path):
    names = round_trip(tmp_path, make_plain())
    assert names == sorted([*(name for name, _ in Model().named_parameters()), *names_of(Model())])


def test_states_are_cut_as_their_parameters():
    model = Model()
    optimizer = adamw(model)
    shards = model.sharded_state_dict()
    # The second of three parts along the second axis.
    key = "first.weight"
    shards[key] = fc.ShardedWeight(key, model.first.weight, (3, 4), (3, 12), (0, 4))
    state = optimizer.sharded_state_dict(shards)
    for name in ("moment1_0", "moment2_0"):
        weight = state[f"{key}.{name}"]
        assert (weight.local_shape, weight.global_shape, weight.global_offset) == ((3, 4), (3, 12), (0, 4))
    for name in ("beta1_pow_acc_0", "beta2_pow_acc_0"):
        weight = state[f"{key}.{name}"]
        assert (weight.local_shape, weight.global_shape, weight.global_offset) == ((1,), (1,), (0,))


def test_a_parameter_of_one_element_has_cut_moments_and_whole_powers():
    """``second.bias`` has one element, and so have its powers: only the name tells them apart."""
    model = Model()
    optimizer = adamw(model)
    shards = model.sharded_state_dict()
    shards["second.bias"] = fc.ShardedWeight("second.bias", model.second.bias, (1,), (4,), (2,))
    state = optimizer.sharded_state_dict(shards)
    assert state["second.bias.moment1_0"].global_offset == (2,)
    assert state["second.bias.beta1_pow_acc_0"].global_shape == (1,)


def test_asking_changes_nothing():
    model = Model()
    optimizer = adamw(model)
    for seed in range(2):
        step(model, optimizer, seed)
    x = paddle.to_tensor(np.random.RandomState(9).randn(5, 3).astype("float32"))
    (model(x) ** 2).mean().backward()

    def everything():
        tensors = {("parameter", p.name): p for p in model.parameters()}
        tensors.update({("gradient", p.name): p.grad for p in model.parameters()})
        tensors.update(states_of(optimizer))
        return {key: raw(tensor) for key, tensor in tensors.items()}

    before, state = everything(), optimizer.state_dict()
    shards = model.sharded_state_dict()
    optimizer.sharded_state_dict(shards)
    optimizer.sharded_state_dict(shards)
    assert everything() == before
    assert sorted(optimizer.state_dict()) == sorted(state)


def test_asking_a_fresh_optimizer_creates_its_states_and_nothing_else():
    model, twin = Model(), Model()
    twin.set_state_dict(model.state_dict())
    asked, untouched = adamw(model), adamw(twin)
    parameters = [raw(p) for p in model.parameters()]
    state = asked.sharded_state_dict(model.sharded_state_dict())
    assert sorted(state) == names_of(model)
    assert [raw(p) for p in model.parameters()] == parameters
    assert all(p.grad is None for p in model.parameters())
    assert float(state["first.weight.beta1_pow_acc_0"].local_tensor.item()) == pytest.approx(0.9)
    # The first step is the same as without the question.
    assert step(model, asked) == step(twin, untouched)
    assert [raw(p) for p in model.parameters()] == [raw(p) for p in twin.parameters()]
    assert [raw(t) for t in states_of(asked).values()] == [raw(t) for t in states_of(untouched).values()]


def test_amsgrad(tmp_path):
    try:
        make_plain(amsgrad=True)()
    except TypeError:
        pytest.skip("this Paddle's AdamW has no amsgrad")
    names = round_trip(tmp_path, make_plain(amsgrad=True))
    assert "first.weight.moment2_max_0" in names


def test_an_optimizer_with_a_name(tmp_path):
    names = round_trip(tmp_path, make_plain(name="tuner"))
    assert "first.weight.moment1_0" in names


def test_a_state_moves_between_optimizers_of_different_names(tmp_path):
    model = Model()
    optimizer = adamw(model, name="one")
    step(model, optimizer)
    fc.save_state_dict(optimizer.sharded_state_dict(model.sharded_state_dict()), tmp_path)
    fresh = adamw(model, name="another")
    fc.load_state_dict(fresh.sharded_state_dict(model.sharded_state_dict()), tmp_path, strict=True)
    assert [raw(t) for t in states_of(fresh).values()] == [raw(t) for t in states_of(optimizer).values()]


def test_parameter_groups(tmp_path):
    def make():
        model = Model()
        groups = [
            {"params": model.first.parameters(), "weight_decay": 0.0},
            {"params": model.second.parameters(), "learning_rate": 0.5},
        ]
        return model, paddle.optimizer.AdamW(0.01, parameters=groups, weight_decay=0.1)

    assert len(round_trip(tmp_path, make)) == 4 * 5


def test_frozen_parameters_have_no_states(tmp_path):
    def make():
        model = Model()
        model.first.weight.stop_gradient = True
        return model, adamw(model)

    names = round_trip(tmp_path, make)
    assert "first.weight" in names
    assert not [name for name in names if name.startswith("first.weight.")]


def test_a_parameter_that_was_frozen_later_keeps_its_states():
    model = Model()
    optimizer = adamw(model)
    step(model, optimizer)
    model.first.weight.stop_gradient = True
    assert sorted(optimizer.sharded_state_dict(model.sharded_state_dict())) == names_of(model)


class Tied(Model):
    """One weight under the names ``z.weight`` (registered first) and ``a.weight``."""

    def __init__(self):
        nn.Layer.__init__(self)
        self.z = nn.Linear(3, 3)
        self.a = nn.Layer()
        self.a.weight = self.z.weight
        self.second = nn.Linear(3, 1)

    def forward(self, x):
        return self.second(nn.functional.gelu(self.z(x)))


def make_tied():
    model = Tied()
    return model, adamw(model)


def test_tied_parameters_have_one_state_under_the_first_name(tmp_path):
    names = round_trip(tmp_path, make_tied)
    assert {"a.weight", "z.weight", "a.weight.moment1_0"} <= set(names)
    assert "z.weight.moment1_0" not in names


def test_a_tied_state_is_found_under_the_other_name(tmp_path):
    """A checkpoint whose model tied it under another first name."""
    model, optimizer = make_tied()
    step(model, optimizer)
    shards = model.sharded_state_dict()
    state = optimizer.sharded_state_dict(shards)
    renamed = {key.replace("a.weight.", "z.weight."): weight.local_tensor for key, weight in state.items()}
    fc.save_state_dict(renamed, tmp_path)
    other, fresh = make_tied()
    report = fc.load_state_dict(fresh.sharded_state_dict(other.sharded_state_dict()), tmp_path, strict=True)
    assert report.aliases == {f"a.weight.{name}": f"z.weight.{name}" for name in STATES}
    assert [raw(t) for t in states_of(fresh).values()] == [raw(t) for t in states_of(optimizer).values()]


def test_a_parameter_that_the_model_has_not_is_an_error():
    model, other = Model(), Model()
    optimizer = paddle.optimizer.AdamW(parameters=[*model.parameters(), *other.second.parameters()])
    with pytest.raises(
        ValueError, match=r"not in model_sharded_state_dict: \['linear_3.b_0', 'linear_3.w_0'\].*Remedy"
    ):
        optimizer.sharded_state_dict(model.sharded_state_dict())
    assert states_of(optimizer) == {}


def test_half_precision_states_of_master_weights_are_named_after_their_parameters():
    """No step: the CPU has no half-precision AdamW. tests/distributed steps with one that is lent to it."""
    paddle.set_default_dtype("bfloat16")
    try:
        model = Model()
    finally:
        paddle.set_default_dtype("float32")
    optimizer = adamw(model, multi_precision=True)
    state = optimizer.sharded_state_dict(model.sharded_state_dict())
    assert sorted(state) == names_of(model, (*STATES, "w_0"))
    for name, parameter in model.named_parameters():
        master = state[f"{name}.w_0"].local_tensor
        assert str(master.dtype) == "paddle.float32"
        assert (master.numpy() == parameter.astype("float32").numpy()).all()
        assert str(state[f"{name}.moment1_0"].local_tensor.dtype) == "paddle.float32"


def test_states_that_were_moved_to_other_memory(tmp_path):
    """PaddleNLP's offload_optim puts moments elsewhere, under other names: they are found by their parameter."""
    model = Model()
    optimizer = adamw(model)
    step(model, optimizer)
    before = {key: raw(tensor) for key, tensor in states_of(optimizer).items()}
    for accumulator, tensors in optimizer._accumulators.items():
        for parameter, tensor in tensors.items():
            if accumulator.startswith("moment"):
                tensors[parameter] = paddle.to_tensor(tensor.numpy())
    shards = model.sharded_state_dict()
    state = {**shards, **optimizer.sharded_state_dict(shards)}
    assert sorted(state) == sorted([*shards, *names_of(model)])
    fc.save_state_dict(state, tmp_path)
    for tensor in states_of(optimizer).values():
        tensor.set_value(paddle.full_like(tensor, -1))
    fc.load_state_dict(state, tmp_path, strict=True)
    assert {key: raw(tensor) for key, tensor in states_of(optimizer).items()} == before


# -- states of another shape with as many elements ---------------------------------------------------------------------

EXPERTS, ROWS, COLUMNS = 3, 4, 5


class Grouped(nn.Layer):
    """Experts in one parameter [E, H, I], described as [E * H, I]."""

    def __init__(self, experts=EXPERTS, dtype="float32"):
        super().__init__()
        self.weight = self.create_parameter([experts, ROWS, COLUMNS], dtype=dtype)

    def sharded_state_dict(self, structured_name_prefix=""):
        flat = shaped_view("experts", self.weight, [self.weight.shape[0] * ROWS, COLUMNS])
        key = f"{structured_name_prefix}weight"
        return {key: fc.ShardedWeight(key, flat, flat.shape, flat.shape, (0, 0))}


@pytest.mark.parametrize("experts", [EXPERTS, 1])  # of one expert it might be taken for a history of one gradient
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_of_grouped_experts_are_views_in_their_parameters_shape(tmp_path, experts, dtype):
    model = nn.Sequential(("experts", Grouped(experts, dtype)))
    optimizer = paddle.optimizer.AdamW(0.1, parameters=model.parameters(), multi_precision=True)
    shards = model.sharded_state_dict()
    states = optimizer.sharded_state_dict(shards)
    names = ["moment1_0", "moment2_0", *(["w_0"] if dtype == "bfloat16" else [])]
    for name in names:
        weight = states[f"experts.weight.{name}"]
        assert (
            weight.local_shape == weight.global_shape == (experts * ROWS, COLUMNS) == tuple(weight.local_tensor.shape)
        )
    state = {**shards, **states}
    fc.save_state_dict(state, tmp_path)
    live = [
        model[0].weight,
        *(optimizer._accumulators[n][k] for n in ("moment1", "moment2") for k in optimizer._accumulators[n]),
    ]
    live += optimizer._master_weights.values()
    assert len(live) == 1 + len(names)
    before = [tensor.numpy().tobytes() for tensor in live]
    with paddle.no_grad():
        for tensor in live:
            tensor.detach().fill_(7.0)
    assert fc.load_state_dict(state, tmp_path, strict=True).keys == len(state)
    assert [tensor.numpy().tobytes() for tensor in live] == before
    assert all(tensor.shape == [experts, ROWS, COLUMNS] for tensor in live)


def test_a_state_whose_elements_would_be_in_another_order_is_refused():
    model = nn.Linear(4, 6, bias_attr=False)
    optimizer = paddle.optimizer.AdamW(parameters=model.parameters())
    shards = model.sharded_state_dict()
    optimizer.sharded_state_dict(shards)
    moments = optimizer._accumulators["moment1"]
    for shape in ([6, 4], [2, 4, 3], [3, 2, 4], [23], [4, 6, 2]):
        moments[model.weight.name] = paddle.zeros(shape)
        with pytest.raises(ValueError, match=r"state 'weight.moment1_0' has shape .* expected \[4, 6\]"):
            optimizer.sharded_state_dict(shards)
    for shape in ([24], [2, 2, 6], [4, 1, 3, 2]):
        moments[model.weight.name] = paddle.zeros(shape)
        assert optimizer.sharded_state_dict(shards)["weight.moment1_0"].local_shape == (4, 6)
    moments[model.weight.name] = paddle.zeros([6, 2, 2]).transpose([1, 2, 0])
    with provoked("parallel/slices.py", "keep it contiguous, in place of a transposed") as caught:
        optimizer.sharded_state_dict(shards)
    assert "moment1_0' of shape [2, 2, 6] cannot be seen as" in str(caught.value)
    moments[model.weight.name] = moments[model.weight.name].contiguous()
    assert optimizer.sharded_state_dict(shards)["weight.moment1_0"].local_shape == (4, 6)


# -- several parameters of one name ------------------------------------------------------------------------------------


class TwoNetworks(nn.Layer):
    """Two networks, each made under a guard of its own, so that their parameters have the same names."""

    def __init__(self):
        super().__init__()
        for name in ("actor", "critic"):
            with paddle.utils.unique_name.guard():
                setattr(self, name, nn.Linear(2, 2))
        assert self.actor.weight.name == self.critic.weight.name


def of_its_own(network, scale, **kwargs):
    with paddle.utils.unique_name.guard():
        optimizer = paddle.optimizer.AdamW(0.1, parameters=network.parameters(), **kwargs)
    (scale * network(paddle.ones([1, 2]))).sum().backward()
    optimizer.step()
    return optimizer


def test_networks_of_the_same_names_have_their_own_states(tmp_path):
    networks = TwoNetworks()
    optimizers = {name: of_its_own(getattr(networks, name), i) for i, name in enumerate(("actor", "critic"), 1)}
    shards = networks.sharded_state_dict()
    state = dict(shards)
    for name, optimizer in optimizers.items():
        own = optimizer.sharded_state_dict(shards)
        assert {key.split(".")[0] for key in own} == {name}
        assert {alias for weight in own.values() for alias in weight.aliases} == set()
        state.update(own)
    fc.save_state_dict(state, tmp_path)
    with paddle.no_grad():
        for weight in state.values():
            weight.local_tensor.zero_()
    fc.load_state_dict(state, tmp_path, strict=True)
    for name, optimizer in optimizers.items():
        moment = optimizer._accumulators["moment1"][getattr(networks, name).weight.name]
        assert float(moment[0, 0]) == pytest.approx(0.1 * (1 + (name == "critic")))


@pytest.mark.parametrize("wrap", [lambda inner: inner, lambda inner: paddle.incubate.LookAhead(inner, k=2)])
def test_a_manager_saves_the_states_of_the_network_that_is_stepped(tmp_path, wrap):
    networks = TwoNetworks()
    optimizer = wrap(of_its_own(networks.critic, 1))
    with fc.CheckpointManager(tmp_path) as manager:
        manager.save(1, model=networks, optimizer=optimizer)
        (path,) = (info.path for info in fc.list_checkpoints(tmp_path))
    states = {key for key in fc.load_merged_state_dict(path) if key.endswith("_0")}
    assert {"critic.weight.moment1_0", "critic.bias.beta1_pow_acc_0"} <= states
    assert {key.split(".")[0] for key in states} == {"critic"}


def test_an_optimizer_of_another_network_of_the_same_names_is_refused():
    networks = TwoNetworks()
    optimizer = of_its_own(networks.critic, 1)
    with provoked("parallel/optimizers.py", "of the model whose parameters the optimizer was given") as caught:
        optimizer.sharded_state_dict(networks.actor.sharded_state_dict())
    assert "parameters that are not in model_sharded_state_dict: ['linear_0" in str(caught.value)
    states = optimizer.sharded_state_dict(networks.critic.sharded_state_dict())
    assert float(states["weight.moment1_0"].local_tensor[0, 0]) == pytest.approx(0.1)


def test_one_optimizer_for_two_parameters_of_one_name_is_refused():
    networks = TwoNetworks()
    optimizer = paddle.optimizer.AdamW(0.1, parameters=networks.parameters())
    with provoked(
        "parallel/optimizers.py", "make all networks of an optimizer under one unique_name.guard()"
    ) as caught:
        optimizer.sharded_state_dict(networks.sharded_state_dict())
    assert "two parameters of the optimizer have the name 'linear_0.w_0'" in str(caught.value)
    one_guard = nn.Layer()
    with paddle.utils.unique_name.guard():
        one_guard.actor, one_guard.critic = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = paddle.optimizer.AdamW(0.1, parameters=one_guard.parameters())
    (1 * one_guard.actor(paddle.ones([1, 2])) + 2 * one_guard.critic(paddle.ones([1, 2]))).sum().backward()
    optimizer.step()
    states = optimizer.sharded_state_dict(one_guard.sharded_state_dict())
    for i, name in enumerate(("actor", "critic"), 1):
        assert float(states[f"{name}.weight.moment1_0"].local_tensor[0, 0]) == pytest.approx(0.1 * i)
    # An optimizer for each: test_networks_of_the_same_names_have_their_own_states.


def test_masters_of_networks_of_the_same_names_are_renewed(tmp_path):
    networks = TwoNetworks().to(dtype="bfloat16")
    optimizers = []
    for network in (networks.actor, networks.critic):
        optimizers.append(paddle.optimizer.AdamW(0.1, parameters=network.parameters(), multi_precision=True))
        optimizers[-1].sharded_state_dict(network.sharded_state_dict())
    state = networks.sharded_state_dict()
    fc.save_state_dict({key: np.full(w.global_shape, 3, np.float32) for key, w in state.items()}, tmp_path)
    fc.load_state_dict(state, tmp_path, dtype="cast", optimizer_states="ignore")
    for optimizer in optimizers:
        assert {float(master.min()) for master in optimizer._master_weights.values()} == {3.0}

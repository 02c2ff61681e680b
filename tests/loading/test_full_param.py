"""``full_param``: whole tensors of a live, sharded state, in bounded memory, of one moment."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

import paddle_flexckpt as fc
from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.loading.full_param import full_param
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.aoa.small import run
from tests.transfer.samples import cut, values_of

KINDS = {
    "m.a": ("float32", (40, 6)),
    "m.b": ("bfloat16", (7, 5, 3)),
    "m.c": ("int64", (9,)),
    "m.d": ("bool", (16, 16)),
    "m.none": ("float32", (0, 4)),
    "m.one": ("float64", ()),
}
SWAP = {"aoa_statements": ["m.a^T -> m.t", "m.b -> m.b, dtype='float32'"]}


@pytest.fixture(scope="module")
def values():
    return values_of(KINDS)


def arrays(tensors):
    return {name: tensor.numpy() for name, tensor in tensors}


def check_equal(found, expected):
    assert list(found) == sorted(expected)
    for name, value in expected.items():
        got = found[name]
        assert got.shape == value.shape, name
        assert got.tobytes() == value.tobytes(), name


@pytest.mark.parametrize(("cuts", "replicas"), [(1, 1), (1, 3), (2, 1), (3, 2)])
@pytest.mark.parametrize("nbytes", [1, 2000, 8 << 30])
def test_every_rank_gets_whole_tensors_in_order(values, cuts, replicas, nbytes):
    world = SimulatedWorld(cuts * replicas)
    for found in world.run(
        lambda comm: arrays(
            full_param(cut(values, comm.rank % cuts, cuts), process_group=comm, memory_growth_threshold=nbytes)
        )
    ):
        check_equal(found, values)


def test_each_rank_gets_the_part_that_it_asks_for(values):
    """Paddle's function gives every part all tensors."""

    def part(comm):
        return arrays(full_param(cut(values, comm.rank, 2), process_group=comm, num_splits=4, shard_idx=comm.rank * 2))

    first, third = SimulatedWorld(2).run(part)
    assert (list(first), list(third)) == (["m.a"], ["m.d"])
    parts = [arrays(full_param(values, num_splits=4, shard_idx=i)) for i in range(4)]
    check_equal({name: value for each in parts for name, value in each.items()}, values)


def test_statements_make_them(values):
    found = SimulatedWorld(2).run(lambda comm: arrays(full_param(cut(values, comm.rank, 2), SWAP, comm)))[0]
    expected = {name: value for name, value in values.items() if name != "m.a"} | {"m.t": values["m.a"].T}
    check_equal(found, expected | {"m.b": values["m.b"].astype(np.float32)})


def test_a_step_meanwhile_is_an_error_and_no_mixture():
    """An optimizer's step leaves no trace in the counter of changes in place."""
    layer = paddle.nn.Linear(4, 4)
    optimizer = paddle.optimizer.AdamW(parameters=layer.parameters())
    state = dict(layer.state_dict())
    before = {name: tensor.numpy().copy() for name, tensor in state.items()}
    tensors = full_param(state, memory_growth_threshold=1)
    name, tensor = next(tensors)
    layer(paddle.ones([1, 4])).sum().backward()
    optimizer.step()
    assert np.array_equal(tensor.numpy(), before[name])
    with pytest.raises(ValidationError, match="changed since the call. Remedy .FC102.: take all tensors before"):
        next(tensors)
    check_equal(arrays(full_param(state)), {name: tensor.numpy() for name, tensor in state.items()})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_splits": 0}, "num_splits has to be an integer >= 1; got 0"),
        ({"num_splits": 2, "shard_idx": 2}, "shard_idx has to be below num_splits, 2; got 2"),
        ({"memory_growth_threshold": 1.5}, "memory_growth_threshold has to be an integer >= 1; got 1.5"),
        ({"aoa_config": {"aoa_statements": ["lost -> m.a"]}}, "lost"),
    ],
)
def test_what_does_not_fit_is_an_error_on_every_rank_at_the_call(values, options, words):
    def call(comm):
        with pytest.raises(ValidationError) as error:
            full_param(cut(values, comm.rank, 2), process_group=comm, **(options if comm.rank else {}))
        return str(error.value)

    first, second = SimulatedWorld(2).run(call)
    assert first == second
    assert words in first or "aoa_config" in first


def test_an_option_that_there_is_not_is_an_error(values):
    with pytest.raises(TypeError, match="splits"):
        full_param(values, splits=2)


CHANGES = {
    "a buffer in the forward pass": (lambda: paddle.nn.BatchNorm1D(4), lambda layer: layer(paddle.ones([3, 4]))),
    "an array": (lambda: np.zeros(70000, np.float32), lambda array: array.__setitem__(69999, 1)),
    "an element far behind": (
        lambda: paddle.nn.Embedding(4096, 64, sparse=True),
        lambda layer: (
            layer(paddle.to_tensor([4095])).sum().backward(),
            paddle.optimizer.SGD(1.0, parameters=layer.parameters()).step(),
        ),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_any_change_meanwhile_is_noticed(name):
    make, change = CHANGES[name]
    thing = make()
    state = {"z": thing} if isinstance(thing, np.ndarray) else {"z." + k: v for k, v in thing.state_dict().items()}
    tensors = full_param({"a": paddle.zeros([3]), **state}, memory_growth_threshold=1)
    assert next(tensors)[0] == "a"
    change(thing)
    with pytest.raises(ValidationError, match="changed since the call"):
        list(tensors)


@pytest.mark.parametrize("call", ["full_param", "load_merged_state_dict", "export_safetensors"])
@pytest.mark.parametrize(("statements", "made", "names"), [
    (["a -> t", "t^T -> t", "t -> b"], ["b"], ["a"]),
    (["a^T, c -> c, a", "a -> x", "c -> y"], ["x", "y"], ["a", "c"]),
    (["l.$L^T -> l.$L", "l.$L -> n.$L"], ["n.0", "n.1"], ["l.0", "l.1"]),
])  # fmt: skip
def test_what_names_that_are_assigned_again_were_made_of_comes_back(tmp_path, call, statements, made, names):
    """A reverse program without a destination: the statements alone tell the way back."""
    square = np.arange(9, dtype=np.float32).reshape(3, 3)
    turned = {name: square + i for i, name in enumerate(made)}
    config = {"aoa_statements": statements, "aoa_config_reverse": True}
    fc.save_state_dict(turned, tmp_path / "saved")
    if call == "full_param":
        found = arrays(full_param({name: paddle.to_tensor(array) for name, array in turned.items()}, config))
    elif call == "load_merged_state_dict":
        found = arrays(fc.load_merged_state_dict(tmp_path / "saved", aoa_config=config).items())
    else:
        fc.export_safetensors(tmp_path / "saved", tmp_path / "out", aoa_config=config)
        found = arrays(fc.load_merged_state_dict(tmp_path / "out").items())
    assert sorted(found) == names
    again = run(statements, found, {name: np.zeros_like(array) for name, array in turned.items()})
    assert all(again[name].tobytes() == array.tobytes() for name, array in turned.items())

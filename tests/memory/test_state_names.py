"""Plain states of optimizers: whose they are is recorded, compared, and refused where nobody knows it."""

from __future__ import annotations

import sys
import types

import numpy as np
import paddle
import pytest
from paddle import nn

import paddle_flexckpt as fc
from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.cli.main import main
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.loading.resharder import reshard_sharded_state_dict
from paddle_flexckpt.memory.state import flatten_state_dict, open_state
from paddle_flexckpt.memory.state_statements import plain_state_statements
from paddle_flexckpt.native import partitions
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.saving import planners
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.sharded_weight import ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.tools.conversion import convert_checkpoint
from tests.remedies.following import provoked


@pytest.fixture(autouse=True)
def installed():
    fc.install()
    yield
    fc.uninstall()


class Networks(nn.Layer):
    """An actor and a critic of one shape."""

    def __init__(self, order):
        super().__init__()
        for name in order:
            setattr(self, name, nn.Linear(2, 2))


def job(order=("actor", "critic"), seed=None):
    """What one process has: networks, made in an order of its own, and their optimizer, with moments of their own."""
    with paddle.utils.unique_name.guard():
        networks = Networks(order)
        optimizer = paddle.optimizer.AdamW(0.1, parameters=networks.parameters())
        shards = optimizer.sharded_state_dict(networks.sharded_state_dict())
    if seed is not None:
        random = np.random.RandomState(seed)
        for key in sorted(shards):
            tensor = shards[key].local_tensor
            tensor.set_value(paddle.to_tensor(random.rand(*tensor.shape).astype("float32")))
    return networks, optimizer


def sharded(networks, optimizer):
    shards = networks.sharded_state_dict()
    return {**shards, **optimizer.sharded_state_dict(shards)}


NESTINGS = {
    "two parts": lambda networks, optimizer: {"model": networks.state_dict(), "optimizer": optimizer.state_dict()},
    "one level": lambda networks, optimizer: {**networks.state_dict(), **optimizer.state_dict()},
    "other names": lambda networks, optimizer: {"nets": networks.state_dict(), "adam": {"all": optimizer.state_dict()}},
    "shards and plain states": lambda networks, optimizer: {
        **networks.sharded_state_dict(),
        **optimizer.state_dict(),
    },
}


def states_of(networks, optimizer):
    shards = optimizer.sharded_state_dict(networks.sharded_state_dict())
    return {key: weight.local_tensor.numpy().tolist() for key, weight in shards.items()}


# -- networks that are made in another order ---------------------------------------------------------------------------


@pytest.mark.parametrize("nesting", NESTINGS)
@pytest.mark.parametrize("order", [("actor", "critic"), ("critic", "actor"), ("more", "critic", "actor")])
def test_states_go_to_the_network_of_their_name(move, nesting, order):
    there, here = job(seed=3), job(order)
    move(NESTINGS[nesting](*there), NESTINGS[nesting](*here), strict=False)
    expected, found = states_of(*there), states_of(*here)
    assert {key: found[key] for key in expected} == expected


def test_fewer_networks_take_theirs(move):
    there, here = job(seed=3), job(("critic",))
    move(NESTINGS["two parts"](*there), NESTINGS["two parts"](*here), optimizer_states="ignore")
    expected = states_of(*there)
    assert states_of(*here) == {key: value for key, value in expected.items() if key.startswith("critic.")}


@pytest.mark.parametrize("nesting", ["two parts", "one level", "shards and plain states"])
@pytest.mark.parametrize("back", [False, True])
def test_plain_and_sharded_states_are_one_another_s(move, nesting, back):
    there, here = job(seed=3), job(("critic", "actor"))
    sides = (sharded, NESTINGS[nesting]) if back else (NESTINGS[nesting], sharded)
    move(sides[0](*there), sides[1](*here))
    assert states_of(*here) == states_of(*there)


def test_states_that_only_another_network_has_are_missing(move):
    there, here = job(("actor",), seed=3), job(("critic",))
    with pytest.raises(
        ValidationError, match="the one of its raw name is 'optimizer.actor.weight.moment1_0', as the"
    ) as caught:
        move({"optimizer": there[1].state_dict(), "model": there[0].state_dict()}, NESTINGS["two parts"](*here))
    assert "linear_0.w_0_moment1_0" in str(caught.value)
    assert not any(map(np.any, (value for key, value in states_of(*here).items() if "moment" in key)))


def test_the_record_survives_partitions_conversions_and_a_second_process(tmp_path, monkeypatch):
    monkeypatch.setattr(partitions, "MOST_ROWS_IN_ONE_FILE", 5)
    monkeypatch.setattr(partitions, "ROWS_PER_PARTITION", 6)
    there = job(seed=3)
    fc.save_state_dict(NESTINGS["two parts"](*there), tmp_path / "saved")
    assert CheckpointDirectory(tmp_path / "saved").read_manifest().partitions
    convert_checkpoint(tmp_path / "saved", tmp_path / "whole", format="native")
    convert_checkpoint(tmp_path / "saved", tmp_path / "cut", format="native", strategy="tp=2", cuts=[("*.weight", 0)])
    for name in ("saved", "whole", "cut"):
        here = job(("critic", "actor"))
        fc.load_state_dict(NESTINGS["two parts"](*here), tmp_path / name)
        assert states_of(*here) == states_of(*there), name


def test_nothing_is_recorded_of_structured_names(tmp_path):
    fc.save_state_dict(sharded(*job(seed=3)), tmp_path)
    assert CheckpointDirectory(tmp_path).read_manifest().catalog.state_names == {}
    assert b"state_names" not in (tmp_path / "0.manifest").read_bytes()


# -- where nothing is recorded -----------------------------------------------------------------------------------------


def unnamed(state):
    """The same values, which do not know their names: as an older version of this library saved them."""
    return {key: value.numpy() for key, value in flatten_state_dict(state)[0].items()}


@pytest.mark.parametrize("nesting", ["two parts", "one level"])
@pytest.mark.parametrize("kind", ["plain", "sharded", "optimizer alone"])
def test_what_no_record_tells_is_refused_and_may_be_trusted(move, nesting, kind):
    there, here = job(seed=3), job()
    source, target = unnamed(NESTINGS[nesting](*there)), NESTINGS[nesting](*here)
    if kind == "sharded":
        target = sharded(*here)
    elif kind == "optimizer alone":
        target = {key: value for key, value in flatten_state_dict(target)[0].items() if "linear_" in key}
    with provoked(
        "transfer/problems.py", "load with raw_names='trusted' if this process makes the same networks"
    ) as caught:
        move(source, target, optimizer_states="ignore")
    text = str(caught.value)
    for words in ("[2, 2]", "[2]", "from 'linear_0.w_0'", "from 'linear_1.w_0'", "from 'linear_1.b_0'"):
        assert words in text
    assert not any(map(np.any, (value for key, value in states_of(*here).items() if "moment" in key)))
    move(source, target, raw_names="trusted", optimizer_states="ignore")
    assert states_of(*here) == states_of(*there)


def test_what_no_record_tells_is_told_by_statements(move):
    """The other way: the process that saved knows the names, or one that makes its networks as that one did."""
    there, here = job(seed=3), job(("critic", "actor"))
    plain = NESTINGS["two parts"](*there)
    statements = plain_state_statements(there[0].sharded_state_dict(), plain)
    move(unnamed(plain), sharded(*here), aoa_config={"aoa_statements": statements})
    assert states_of(*here) == states_of(*there)


def test_an_optimizer_alone_is_told_to_bring_its_model(move):
    there, here = job(seed=3), job(("critic", "actor"))
    source = NESTINGS["two parts"](*there)
    with provoked("transfer/problems.py", "load the model's state in the same state dict"):
        move(source, {"optimizer": here[1].state_dict()}, optimizer_states="ignore")
    move(source, NESTINGS["two parts"](*here))
    assert states_of(*here) == states_of(*there)


def test_parameters_of_different_shapes_need_no_record(move):
    def one():
        with paddle.utils.unique_name.guard():
            layer = nn.Linear(2, 3)
            optimizer = paddle.optimizer.Momentum(0.1, parameters=layer.parameters())
            optimizer.sharded_state_dict(layer.sharded_state_dict())
        return layer, optimizer

    (_, there), (_, here) = one(), one()
    source = {key: np.full(value.shape, 5, np.float32) for key, value in there.state_dict().items()}
    move(source, here.state_dict())
    assert all((value.numpy() == 5).all() for value in here.state_dict().values())


@pytest.mark.parametrize("recorded", [True, False])
def test_calls_that_take_the_names_of_the_checkpoint_believe_them(tmp_path, capsys, recorded):
    there = job(seed=3)
    state = NESTINGS["one level"](*there)
    fc.save_state_dict(state if recorded else unnamed(state), tmp_path)
    assert fc.load_merged_state_dict(tmp_path).keys() == state.keys()
    # A rehearsal says what the load will say: what is recorded, the job knows too.
    assert main(["rehearse", str(tmp_path), "--to", "dp=2"]) == (0 if recorded else 1)
    assert ("nothing says whose they are" in capsys.readouterr().out) != recorded


# -- several parameters of one name ------------------------------------------------------------------------------------


def twins():
    """Two networks of the same names, and the states of the second one's optimizer."""
    (actor, _), (critic, optimizer) = job(("actor",), 1), job(("actor",), 2)
    return {"model": {"one": actor.state_dict(), "other": critic.state_dict()}, "optimizer": optimizer.state_dict()}


def test_states_of_several_parameters_of_one_name_are_refused(tmp_path):
    state = twins()
    with provoked("memory/state_names.py", "use optimizer.sharded_state_dict(model_state)") as caught:
        fc.save_state_dict(state, tmp_path)
    assert "as all have the name 'linear_0.w_0'" in str(caught.value)
    assert "['model.one.actor.weight', 'model.other.actor.weight']" in str(caught.value)
    fc.save_state_dict({"w": np.zeros(2)}, tmp_path / "else")
    with pytest.raises(ValidationError, match="cannot be told apart"):
        fc.load_state_dict(state, tmp_path / "else", strict=False)
    model = flatten_state_dict(state["model"])[0]
    with pytest.raises(ValidationError, match="cannot be told apart"):
        plain_state_statements(model, state["optimizer"])
    tree = nn.Layer()
    (tree.one, _), (tree.other, optimizer) = job(("actor",), 1), job(("actor",), 2)
    fc.save_state_dict(sharded(tree, optimizer), tmp_path)
    saved = {key.split(".")[0] for key in fc.load_merged_state_dict(tmp_path) if "moment" in key}
    assert saved == {"other"}


def test_what_paddle_load_gives_is_no_parameter(tmp_path):
    """A teacher's weights have the names of the parameters that were saved."""
    networks, optimizer = job(seed=3)
    paddle.save(networks.state_dict(), str(tmp_path / "teacher.pdparams"))
    teacher = paddle.load(str(tmp_path / "teacher.pdparams"))
    assert teacher["actor.weight"].name == networks.actor.weight.name
    state = {**NESTINGS["two parts"](networks, optimizer), "teacher": teacher}
    names = open_state(state, 0).catalog.state_names
    assert names["optimizer.linear_0.w_0_moment1_0"][0] == "optimizer.actor.weight.moment1_0"


# -- parts that look like wholes ---------------------------------------------------------------------------------------


class Columns(nn.Layer):
    """A weight of which tensor parallelism gives a rank some columns."""

    def __init__(self, rank, size):
        super().__init__()
        self.weight = self.create_parameter([2, 4 // size])
        self.model_parallel_group = types.SimpleNamespace(rank=rank, nranks=size, ranks=list(range(size)))

    def _get_shard_rules(self):
        return {"weight": 1}


def columns(rank, size, value):
    with paddle.utils.unique_name.guard():
        layer = Columns(rank, size)
        optimizer = paddle.optimizer.AdamW(0.1, parameters=layer.parameters())
        shards = sharded(layer, optimizer)
    for name in ("moment1_0", "moment2_0"):
        tensor = shards[f"weight.{name}"].local_tensor
        tensor.set_value(paddle.full(tensor.shape, value))
    return layer, optimizer


@pytest.mark.parametrize("values", [(0.0, 0.0), (1.0, 2.0)], ids=["equal", "different"])
@pytest.mark.parametrize("options", [{}, {"check_replicas": "first"}, {"check_replicas": False}])
def test_a_plain_state_of_a_part_is_refused_as_its_parameter_is(tmp_path, values, options):
    jobs = [columns(rank, 2, values[rank]) for rank in range(2)]  # names are counted for all threads together

    def saving(plain):
        def save(comm):
            layer, optimizer = jobs[comm.rank]
            states = optimizer.state_dict() if plain else optimizer.sharded_state_dict(layer.sharded_state_dict())
            save_state_dict({**layer.sharded_state_dict(), **states}, tmp_path, comm, **options)

        return save

    with provoked("memory/state_names.py", "use optimizer.sharded_state_dict(model_state)") as caught:
        SimulatedWorld(2).run(saving(plain=True))
    assert "'weight' is" in str(caught.value) and "moment1_0" in str(caught.value)
    assert "pow_acc" not in str(caught.value)
    assert not fc.list_checkpoints(tmp_path)
    SimulatedWorld(2).run(saving(plain=False))
    assert (
        fc.load_merged_state_dict(tmp_path)["weight.moment1_0"].numpy().tolist()
        == [[values[0]] * 2 + [values[1]] * 2] * 2
    )


def test_it_is_refused_as_a_target_and_in_memory(tmp_path):
    fc.save_state_dict({"w": np.zeros(2)}, tmp_path)
    layer, optimizer = columns(0, 2, 1.0)
    state = {**layer.sharded_state_dict(), **optimizer.state_dict()}
    for call in (
        lambda: load_state_dict(state, tmp_path, SimulatedWorld(1).run(lambda comm: comm)[0], strict=False),
        lambda: reshard_sharded_state_dict(state, state, SimulatedWorld(1).run(lambda comm: comm)[0]),
    ):
        with pytest.raises(ValidationError, match="a plain state is one rank's part of a whole"):
            call()


def test_a_plain_range_of_a_whole_parameter_is_refused():
    """As under sharding V2 and stage 3: the optimizer steps a range of the flattened parameter."""
    parameter = nn.Linear(2, 4, bias_attr=False).weight
    state = {"weight": parameter, f"{parameter.name}_moment1_0": paddle.zeros([3])}
    with pytest.raises(ValidationError, match=r"a plain state is one rank's part.*got shape \[3\]"):
        open_state(state, 0)
    for whole in ([2, 4], [8], [1], [5, 2, 4]):  # its shape, flat, one number, a history
        assert open_state({**state, f"{parameter.name}_moment1_0": paddle.zeros(whole)}, 0)


def test_a_state_of_one_rank_s_elements_is_a_part_though_it_is_one_number():
    weight = ShardedWeight("bias", nn.Linear(2, 1).bias, (1,), (4,), (2,))
    name = weight.local_tensor.name
    assert open_state({"bias": weight, f"{name}_beta1_pow_acc_0": paddle.ones([1])}, 0)
    with pytest.raises(ValidationError, match="a plain state is one rank's part"):
        open_state({"bias": weight, f"{name}_moment1_0": paddle.ones([1])}, 0)


@pytest.mark.parametrize("spread", [False, True])
def test_one_raw_name_of_two_stages_is_refused(tmp_path, monkeypatch, spread):
    """Stages of a pipeline count their own layers: equal values would be taken for replicas."""
    if spread:
        monkeypatch.setattr(planners, "SPREAD_ROWS", 0)

    jobs = [job((f"stage{rank}",)) for rank in range(2)]

    def save(comm):
        save_state_dict(NESTINGS["two parts"](*jobs[comm.rank]), tmp_path, comm)

    with provoked("catalog/table.py", "use optimizer.sharded_state_dict(model_state)") as caught:
        SimulatedWorld(2).run(save)
    for words in ("'optimizer.linear_0.w_0_moment1_0'", "stage0.weight.moment1_0", "stage1.weight.moment1_0"):
        assert words in str(caught.value)

    def save_shards(comm):
        save_state_dict(sharded(*jobs[comm.rank]), tmp_path, comm)

    SimulatedWorld(2).run(save_shards)
    assert {"stage0.weight.moment1_0", "stage1.weight.moment1_0"} <= fc.load_merged_state_dict(tmp_path).keys()


@pytest.mark.parametrize("axis", ["model", "pipe", "sharding", None])
def test_a_plain_state_without_its_parameter_is_refused_where_ranks_have_parts(monkeypatch, axis):
    class Topology:
        def __getattr__(self, name):
            return lambda: 2 if name == f"get_{axis}_parallel_world_size" else 1

    topology = sys.modules["paddle.distributed.fleet.base.topology"]
    monkeypatch.setattr(topology, "_HYBRID_PARALLEL_GROUP", Topology())
    networks, optimizer = job(seed=3)
    if axis is None:
        assert open_state(optimizer.state_dict(), 0)
        return
    with pytest.raises(ValidationError, match="a plain state without its parameter, in a job with"):
        open_state(optimizer.state_dict(), 0)
    assert open_state({**networks.state_dict(), **optimizer.state_dict()}, 0)

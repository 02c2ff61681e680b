"""One state under the names of two worlds: saved under one naming, loaded under the other, both ways."""

from __future__ import annotations

import re

import numpy as np
import paddle
import paddle.distributed as dist
import pytest
from paddle import nn

import paddle_flexckpt as fc
from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.loading.resharder import reshard_sharded_state_dict
from paddle_flexckpt.memory.state import flatten_state_dict
from paddle_flexckpt.memory.state_statements import plain_state_statements
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.run_state import collect_extra_state, load_extra_state, restore_extra_state
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.sharded_weight import FusedAxis, ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.transfer import names as engine_names
from paddle_flexckpt.transfer.names import ACCUMULATORS
from tests.ramdisk import memory_directory


def numbers(*names, start=1):
    return {name: np.full(2, start + i, np.float32) for i, name in enumerate(names)}


def zeros(*names):
    return {name: np.zeros(2, np.float32) for name in names}


def test_accumulators_are_those_of_paddle():
    found = set()
    for module in (paddle.optimizer, paddle.incubate.optimizer):
        for cls in vars(module).values():
            if isinstance(cls, type):
                found |= {v for k, v in vars(cls).items() if re.fullmatch(r"_\w+_str", k) and isinstance(v, str)}
                found |= {v for k, v in vars(cls).items() if re.fullmatch(r"_\w+_acc_max_str", k)}
    assert found <= set(ACCUMULATORS)
    assert {"moment1", "velocity", "_avg_squared_grad", "inf_norm", "y"} <= found, "there was something to compare"


# -- plain against plain -----------------------------------------------------------------------------------------------

DYNAMIC = ("model.a.weight", "optimizer.linear_0.w_0_moment1_0", "optimizer.master_weights.linear_0.w_0")
SEMI_AUTO = ("model.a.weight", "optimizer.linear_0.w_0.dist_moment1_1", "optimizer.master_weights.linear_0.w_0.dist")
STATIC = ("a.weight", "linear_0.w_0.dist_fp32_master_0_moment1_0", "linear_0.w_0.dist_fp32_master_0")


@pytest.mark.parametrize("there", [DYNAMIC, SEMI_AUTO, STATIC])
@pytest.mark.parametrize("here", [DYNAMIC, SEMI_AUTO, STATIC])
def test_plain_states_of_all_worlds(move, there, here):
    source, target = numbers(*there), zeros(*here)
    report = move(source, target, strict=True)
    assert [target[name][0] for name in here] == [1, 2, 3]
    assert report.aliases == {mine: theirs for mine, theirs in zip(here, there) if mine != theirs}
    assert (report.missing, report.unexpected, report.keys) == ([], [], 3)


@pytest.mark.parametrize(("there", "here"), [(DYNAMIC, STATIC), (STATIC, SEMI_AUTO)])
def test_switched_off_names_are_exact(move, there, here):
    target = zeros(*here)
    with pytest.raises(ValidationError, match="the source has no such key") as caught:
        move(numbers(*there), target, mw_name_compatibility=False)
    assert all(repr(name) in str(caught.value) for name in set(here) - set(there))
    assert not any(tensor.any() for tensor in target.values())
    source, more = {**numbers(*there), "w": np.ones(2)}, {"strict": False, "optimizer_states": "ignore"}
    report = move(source, {**target, "w": np.zeros(2)}, mw_name_compatibility=False, **more)
    assert set(report.missing) == set(here) - set(there)
    assert report.aliases == {}


def test_a16_an_unrelated_missing_key_does_not_take_the_mapping_of_the_one_before(move):
    # Paddle's loop keeps the last mapping: whichever missing key comes next is given that master weight.
    source = numbers("optimizer.linear_0.w_0_fp32_master_0")
    for keys in (("optimizer.master_weights.linear_0.w_0", "foo"), ("foo", "optimizer.master_weights.linear_0.w_0")):
        target = zeros(*keys)
        report = move(source, target, strict=False)
        assert report.missing == ["foo"]
        assert report.aliases == {"optimizer.master_weights.linear_0.w_0": "optimizer.linear_0.w_0_fp32_master_0"}
        assert target["foo"].tolist() == [0, 0]
        assert target["optimizer.master_weights.linear_0.w_0"].tolist() == [1, 1]


def test_the_own_name_comes_first(move):
    names = ("linear_0.w_0_moment1_1", "linear_0.w_0_moment1_0")
    target = zeros(*names)
    assert move(numbers(*names), target).aliases == {}
    assert [target[name][0] for name in names] == [1, 2]


def test_several_keys_that_may_be_meant_are_an_error(move):
    target = zeros("linear_0.w_0.dist_moment1_0")
    source = numbers("linear_0.w_0_moment1_0", "linear_0.w_0_moment1_1")
    for strict in ("missing", False):
        with pytest.raises(ValidationError, match="several that may be meant") as caught:
            move(source, target, strict=strict)
        for words in ("'linear_0.w_0.dist_moment1_0'", "rank 0", *source, "AOA statement"):
            assert words in str(caught.value)
    assert not target["linear_0.w_0.dist_moment1_0"].any()
    statement = "linear_0.w_0_moment1_1 -> linear_0.w_0.dist_moment1_0"
    move(source, target, aoa_config={"aoa_statements": [statement]})
    assert target["linear_0.w_0.dist_moment1_0"].tolist() == [2, 2]


def test_where_all_names_are_found_no_others_are_thought_of(move, monkeypatch):
    """A load of a hundred thousand keys pays for other names only if it needs one."""

    def unexpected(*_):
        raise RuntimeError("names are taken apart although each was found")

    monkeypatch.setattr(engine_names, "NameIndex", unexpected)
    monkeypatch.setattr(engine_names, "split_raw", unexpected)
    target = numbers("a.weight", "a.weight.moment1_0", start=5)
    report = move(numbers("a.weight", "a.weight.moment1_0"), target)
    assert report.aliases == {}
    assert target["a.weight.moment1_0"].tolist() == [2, 2]


def test_ambiguous_keys_that_nobody_asks_for_do_no_harm(move):
    source = numbers("w", "linear_0.w_0_moment1_0", "linear_0.w_0_moment1_1")
    assert move(source, zeros("w"), optimizer_states="ignore").unexpected == [
        "linear_0.w_0_moment1_0",
        "linear_0.w_0_moment1_1",
    ]


def test_a_key_that_a_target_has_by_its_own_name_is_not_given_away(move):
    # Two optimizers of one model here, one there.
    target = zeros("linear_0.w_0_moment1_0", "linear_0.w_0_moment1_1")
    with pytest.raises(ValidationError, match="is taken by target 'linear_0.w_0_moment1_0'"):
        move(numbers("linear_0.w_0_moment1_0"), target)
    report = move(numbers("linear_0.w_0_moment1_0"), target, strict=False)
    assert (report.missing, report.aliases) == (["linear_0.w_0_moment1_1"], {})
    assert target["linear_0.w_0_moment1_1"].tolist() == [0, 0]


def test_two_targets_do_not_share_a_key_unless_they_are_one_tensor(move):
    source = numbers("linear_0.w_0_moment1_0")
    names = ("linear_0.w_0_moment1_1", "linear_0.w_0_moment1_2")
    for strict in ("missing", False):
        target = zeros(*names)
        with pytest.raises(ValidationError, match="several targets would be filled from key") as caught:
            move(source, target, strict=strict)
        assert all(name in str(caught.value) for name in (*names, *source))
        assert not any(tensor.any() for tensor in target.values())
    one = np.zeros(2, np.float32)
    report = move(source, dict.fromkeys(names, one))
    assert one.tolist() == [1, 1]
    assert report.aliases == dict.fromkeys(names, "linear_0.w_0_moment1_0")
    own = np.zeros(2, np.float32)
    move(source, {"linear_0.w_0_moment1_0": own, "linear_0.w_0_moment1_1": own})
    assert own.tolist() == [1, 1]


def test_numbers_that_are_no_counters_stay_what_they_are(move):
    # A rule that took every number for a counter would fill one buffer from another.
    for there, here in (("scale_m_0", "scale_m_1"), ("linear_0.w_0", "linear_1.w_0"), ("x.moment1_0", "x.moment1_1"),
                        ("norm_0.w_1", "norm_0.w_2"), ("agent_velocity_0", "agent_velocity_1")):  # fmt: skip
        with pytest.raises(ValidationError, match="no such key"):
            move(numbers(there), zeros(here))


@pytest.mark.parametrize(("there", "here", "found"), [
    (("model.layers.0.w",), "layers.0.w", True),
    (("layers.0.w",), "model.layers.0.w", True),
    (("model.model.layers.0.w",), "model.layers.0.w", True),  # the model's own names begin so, there in a nested dict
    (("model.layers.0.w",), "model.model.layers.0.w", True),
    (("optimizer.model.w.moment1_0",), "model.w.moment1_0", True),
    (("_layers.a.w",), "a.w", True),  # named by a fleet wrapper of the model
    (("a.w",), "_layers.a.w", True),
    (("_layers.a.w.moment1_0",), "a.w.moment1_0", True),
    (("_layers.a.w",), "model.a.w", True),
    (("model._layers.a.w",), "model.a.w", True),
    (("model.a.w",), "_layers.a.w", True),
    (("optimizer.a.w.moment1_0",), "optimizer._layers.a.w.moment1_0", True),
    (("_layers.linear_0.w_0_moment1_0",), "linear_0.w_0.dist_moment1_0", True),
    (("optimizer._layers.w",), "model.w", False),
    (("_layers.w", "model.w"), "w", None),
    (("optimizer.w",), "model.w", False),
    (("ema.w",), "model.w", False),
    (("model.w", "optimizer.w"), "w", None),
])  # fmt: skip
def test_prefixes(move, there, here, found):
    target = zeros(here)
    if found:
        assert move(numbers(*there), target).aliases == {here: there[0]}
        assert target[here].tolist() == [1, 1]
        return
    with pytest.raises(ValidationError, match="no such key" if found is False else "several that may be meant"):
        move(numbers(*there), target)


def test_states_of_a_wrapped_parameter_are_not_left_behind(move):
    source = numbers("_layers.a.w", "_layers.a.w.moment1_0")
    with pytest.raises(ValidationError, match="no rank asks for 1 optimizer states"):
        move(source, zeros("a.w"))
    target = zeros("a.w", "a.w.moment1_0")
    assert move(source, target).aliases == {"a.w": "_layers.a.w", "a.w.moment1_0": "_layers.a.w.moment1_0"}
    turned = zeros("_layers.b", "_layers.b.moment1_0")
    move(source, turned, aoa_config=["a.w -> b"])
    assert turned["_layers.b.moment1_0"].tolist() == [2, 2]
    with pytest.raises(ValidationError, match="no such key"):
        move(source, zeros("a.w"), mw_name_compatibility=False)


def test_aliases_of_tied_parameters_are_found_with_other_prefixes(move):
    def tied():
        array = np.zeros(2, np.float32)
        return array, {"a": ShardedWeight("a", array, (2,), (2,), (0,), aliases=("b",))}

    array, target = tied()
    assert move(numbers("model.b"), target).aliases == {"a": "model.b"}
    assert array.tolist() == [1, 1]
    array, target = tied()
    with pytest.raises(ValidationError, match="no such key"):
        move(numbers("model.b"), target, tied_names=False)


def test_statements_come_first(move):
    # What a statement takes away is not looked for under another name.
    target = zeros("a", "b")
    report = move(numbers("a", "model.a", "b"), target, aoa_config={"aoa_statements": ["a -> _"]}, strict=False)
    assert report.missing == ["a"]
    assert target["a"].tolist() == [0, 0]
    target = zeros("a", "c")
    report = move(numbers("b", "model.c"), target, aoa_config={"aoa_statements": ["b -> a"]})
    assert report.aliases == {"c": "model.c"}
    assert [target["a"][0], target["c"][0]] == [1, 2]


def test_shapes_and_dtypes_are_checked_as_ever(move):
    with pytest.raises(ValidationError, match=r"global shapes differ .*'w'"):
        move({"model.w": np.zeros(3, np.float32)}, zeros("w"))
    with pytest.raises(ValidationError, match=r"dtypes differ .*'w'"):
        move({"model.w": np.zeros(2, np.float64)}, zeros("w"))


# -- plain against structured ------------------------------------------------------------------------------------------


class Model(nn.Layer):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 3)
        self.b = nn.Linear(3, 2)
        self.tied = nn.Linear(2, 3)
        self.tied.weight = self.a.weight


def build(seed=None, suffix="", half=True, first=0):
    """A model and its optimizer, with values of their own if there is a seed.

    Args:
        seed: Of the values.
        suffix: Of the parameters' names; semi-automatic parallel's is ``.dist``.
        half: Whether parameters are bfloat16, and have master weights.
        first: Number of layers that have been built before: they count.
    """
    with paddle.utils.unique_name.guard():
        for _ in range(first):
            nn.Linear(1, 1)
        model = Model()
        if half:
            model.to(dtype="bfloat16")
        for parameter in model.parameters():
            parameter.name += suffix
        optimizer = paddle.optimizer.AdamW(0.1, parameters=model.parameters(), multi_precision=half)
        states = sharded(model, optimizer)
    assert len(getattr(optimizer, "_master_weights", {})) == (5 if half else 0)
    if seed is not None:
        random = np.random.RandomState(seed)
        for weight in states.values():
            tensor = weight.local_tensor
            tensor.set_value(paddle.to_tensor(random.randn(*tensor.shape)).astype(tensor.dtype))
    return model, optimizer


def plain(model, optimizer):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def sharded(model, optimizer):
    shards = model.sharded_state_dict()
    return {**shards, **optimizer.sharded_state_dict(shards)}


def values(model, optimizer):
    return {k: np.asarray(w.local_tensor.astype("float32")) for k, w in sharded(model, optimizer).items()}


def check_equal(got, expected):
    assert got.keys() == expected.keys()
    assert [key for key in got if got[key].tobytes() != expected[key].tobytes()] == []


@pytest.fixture
def installed():
    fc.install()
    yield
    fc.uninstall()


@pytest.mark.parametrize("half", [True, False], ids=["masters", "float32"])
@pytest.mark.parametrize("suffixes", [(".dist", ""), ("", ".dist")], ids=["from_dist", "to_dist"])
@pytest.mark.parametrize("names", [(plain, sharded), (sharded, plain), (plain, plain)], ids=["to_s", "to_p", "p_to_p"])
def test_real_optimizers(installed, move, names, suffixes, half):
    there, here = build(3, suffixes[0], half), build(None, suffixes[1], half)
    source, target = names[0](*there), names[1](*here)
    report = move(source, target)
    check_equal(values(*here), values(*there))
    assert report.missing == []
    assert report.unexpected == []


def semi_auto(seed=None):
    """As :func:`build`, with DistTensors on a mesh of this one process, and Paddle's own optimizer for them."""
    mesh = dist.ProcessMesh([0], dim_names=["dp"])

    def cut(name, layer, mesh):
        for key, parameter in list(layer._parameters.items()):
            if not parameter.is_dist():
                layer.add_parameter(key, dist.shard_tensor(parameter, mesh, [dist.Replicate()]))

    with paddle.utils.unique_name.guard():
        model = Model()
        dist.shard_layer(model, mesh, cut)
        model.tied.weight = model.a.weight
        inner = paddle.optimizer.AdamW(0.1, parameters=model.parameters())
        optimizer = dist.shard_optimizer(inner, dist.ShardingStage1("dp", mesh))
        states = sharded(model, optimizer)
    if seed is not None:
        random = np.random.RandomState(seed)
        for weight in states.values():
            local = weight.local_tensor
            local.copy_(paddle.to_tensor(random.randn(*local.shape)).astype(local.dtype), True)
    return model, optimizer


@pytest.mark.parametrize("names", [(plain, sharded), (sharded, plain), (plain, plain), (sharded, sharded)])
@pytest.mark.parametrize("back", [False, True], ids=["from_semi_auto", "to_semi_auto"])
def test_real_dist_tensors(installed, move, names, back):
    there, here = (build(3, half=False), semi_auto()) if back else (semi_auto(3), build(half=False))
    assert any(name.endswith(".dist_moment1_0") for name in (here if back else there)[1].state_dict())
    report = move(names[0](*there), names[1](*here))
    check_equal(values(*here), values(*there))
    assert (report.missing, report.unexpected) == ([], [])


@pytest.mark.parametrize(("half", "name"), [(True, "_fp32_master_1_moment1_0"), (False, "_moment1_1")])
def test_a_counter_of_a_second_optimizer_does_not_matter(installed, move, half, name):
    there = build(3, half=half)
    model, _ = build(half=half)
    with paddle.utils.unique_name.guard():
        for _ in range(2):
            second = paddle.optimizer.AdamW(0.1, parameters=model.parameters(), multi_precision=half)
            second.sharded_state_dict(model.sharded_state_dict())
    assert any(each.endswith(name) for each in second.state_dict())
    move(plain(*there), plain(model, second))
    check_equal(values(model, second), values(*there))
    there = (model, second)
    here = build(half=half)
    move(plain(*there), sharded(*here))
    check_equal(values(*here), values(*there))


def test_an_optimizer_with_a_name(installed, move):
    with paddle.utils.unique_name.guard():
        model = Model()
        optimizer = paddle.optimizer.Momentum(0.1, parameters=model.parameters(), name="slow_one")
    shards = optimizer.sharded_state_dict(model.sharded_state_dict())
    assert shards["a.weight.velocity_0"].raw_names == ("linear_0.w_0_slow_one_velocity_0",)
    source = {name: tensor.numpy() + 5 for name, tensor in optimizer.state_dict().items()}
    move(source, shards, raw_names="trusted")
    assert all((weight.local_tensor.numpy() == 5).all() for weight in shards.values())
    # And where the model's names are there too, with an optimizer that has another name.
    with paddle.utils.unique_name.guard():
        there = Model()
        other = paddle.optimizer.Momentum(0.1, parameters=there.parameters(), name="fast")
    target = other.sharded_state_dict(there.sharded_state_dict())
    for weight in shards.values():
        weight.local_tensor.set_value(paddle.full(weight.local_shape, 7.0))
    move({**model.state_dict(), **optimizer.state_dict()}, {**there.sharded_state_dict(), **target})
    assert all((weight.local_tensor.numpy() == 7).all() for weight in target.values())


def test_raw_names_are_not_told_in_a_pipeline(installed, monkeypatch):
    from paddle.distributed.fleet.base import topology

    class Pipeline:
        def get_pipe_parallel_world_size(self):
            return 2

    monkeypatch.setattr(topology, "_HYBRID_PARALLEL_GROUP", Pipeline())
    model, optimizer = build(half=False)
    states = optimizer.sharded_state_dict(model.sharded_state_dict())
    assert {weight.raw_names for weight in states.values()} == {()}, "each stage counts its own layers"


def state(key, *raw_names):
    array = np.zeros(2, np.float32)
    return ShardedWeight(key, array, (2,), (2,), (0,), raw_names=raw_names)


@pytest.mark.parametrize("through", ["files", "memory"])
@pytest.mark.parametrize("kind", ["structured", "plain"])
def test_ranks_that_count_their_own_layers_are_refused(through, kind):
    # As with experts: the first layer of rank 1 is not that of rank 0, and its raw name is the same.
    source = numbers("linear_0.w_0_moment1_0", "linear_1.w_0_moment1_0", "expert.0", "expert.1")

    def job(comm):
        name = f"expert.{comm.rank}"
        target = {f"{name}.moment1_0": state(f"{name}.moment1_0", "linear_0.w_0_moment1_0")}
        if kind == "plain":
            parameter = paddle.zeros([2])
            parameter.name = "linear_0.w_0.dist"
            target = {"model": {name: parameter}, "optimizer.linear_0.w_0.dist_moment1_0": state("")}
        with pytest.raises(ValidationError, match="would mean different parameters on different ranks") as caught:
            if through == "memory":
                reshard_sharded_state_dict(source, target, comm, raw_names="trusted")
            else:
                load_state_dict(target, path, comm, raw_names="trusted")
        assert not list(target.values())[-1].local_tensor.any()
        return str(caught.value)

    with memory_directory() as path:
        save_state_dict(source, path, SimulatedWorld(1).run(lambda comm: comm)[0])
        texts = SimulatedWorld(2).run(job)
    assert texts[0] == texts[1]
    for words in ("'linear_0.w_0'", "['expert.0'] and ['expert.1']", "sharded_state_dict()", "plain_state_statements"):
        assert words in texts[0]


def test_raw_names_that_lead_to_some_states_only_are_not_believed(move):
    # There the first layer is a column_parallel_linear_0, and linear_0 is what is linear_1 here.
    source = numbers("column_parallel_linear_0.w_0_moment1_0", "linear_0.w_0_moment1_0")
    target = {"a.moment1_0": state("a.moment1_0", "linear_0.w_0_moment1_0"),
              "b.moment1_0": state("b.moment1_0", "linear_1.w_0_moment1_0")}  # fmt: skip
    for strict in ("missing", False):
        with pytest.raises(ValidationError, match="raw names count layers") as caught:
            move(source, target, strict=strict)
        for words in ("'b.moment1_0'", "'linear_1.w_0_moment1_0'", "'a.moment1_0'", "plain_state_statements()"):
            assert words in str(caught.value)
    assert not target["a.moment1_0"].local_tensor.any()


def test_a_fused_state_under_a_raw_name_is_not_put_right_but_refused(move):
    array = np.zeros((2, 4), np.float32)
    rule = FusedAxis(1, "fused_ffn")
    target = ShardedWeight(
        "up.moment1_0", array[:, :2], (2, 2), (2, 4), (0, 0), fused=rule, raw_names=("linear_0.w_0_moment1_0",)
    )
    source = {"linear_0.w_0_moment1_0": np.ones((2, 4), np.float32)}
    with pytest.raises(ValidationError, match="side by side") as caught:
        move(source, {"up.moment1_0": target})
    assert "load with the AOA statement" in str(caught.value)
    assert not array.any()


# -- statements --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["from_plain", "to_plain"])
def test_statements_for_raw_names_that_count_other_layers(installed, move, direction):
    there, here = build(3, first=2), build(suffix=".dist")
    if direction == "from_plain":
        source, target = plain(*there), sharded(*here)
        statements = plain_state_statements(there[0].sharded_state_dict(), source)
        assert "optimizer.linear_2.w_0_fp32_master_0_moment1_0 -> a.weight.moment1_0" in statements
        assert "optimizer.master_weights.linear_2.w_0 -> a.weight.w_0" in statements
        with pytest.raises(ValidationError, match="raw names count layers|plain_state_statements"):
            # linear_2.b_0 and others are there, but not what they are here; and arrays know no names.
            move(
                {k: v.astype("float32").numpy() for k, v in flatten_state_dict(source)[0].items()}, target, dtype="cast"
            )
        move(source, sharded(*here))
        check_equal(values(*here), values(*there))
    else:
        source, target = sharded(*there), plain(*here)
        statements = plain_state_statements(here[0].sharded_state_dict(), target, "to_plain")
        assert "a.weight.moment1_0 -> optimizer.linear_0.w_0.dist_fp32_master_0_moment1_0" in statements
    report = move(source, target, aoa_config={"aoa_statements": statements})
    check_equal(values(*here), values(*there))
    assert report.missing == []


def test_statements_of_both_sides_make_one_program(installed, move):
    there, here = build(3, first=2), build(suffix=".dist")
    source, target = plain(*there), plain(*here)
    statements = [
        *plain_state_statements(there[0].sharded_state_dict(), source),
        *plain_state_statements(here[0].sharded_state_dict(), target, "to_plain"),
    ]
    move(source, target, aoa_config={"aoa_statements": statements})
    check_equal(values(*here), values(*there))


def test_what_statements_cannot_be_made_for(installed):
    model, _ = build(half=False)
    shards = model.sharded_state_dict()
    scheduled = {"optimizer": {"LR_Scheduler": {"last_epoch": 3}}}
    assert plain_state_statements(shards, scheduled) == []
    assert plain_state_statements(shards, model.state_dict()) == []
    with pytest.raises(ValidationError, match=r"belongs to no parameter of the model .*'optimizer.linear_9.w_0_d_0'"):
        plain_state_statements(shards, {"optimizer.linear_9.w_0_d_0": np.zeros(1)})
    with pytest.raises(ValidationError, match="has the structured name 'b.bias.moment1_0' as well"):
        plain_state_statements(shards, numbers("linear_1.b_0_moment1_0", "linear_1.b_0_moment1_1"))
    with pytest.raises(ValidationError, match="'from_plain' or 'to_plain'; got 'from_hf'"):
        plain_state_statements(shards, {}, "from_hf")


# -- what else is in a plain state dict --------------------------------------------------------------------------------


def test_a_scheduler_in_a_plain_state_is_refused_alike_and_the_remedy_works(installed, tmp_path):
    def make(steps):
        model = Model()
        scheduler = paddle.optimizer.lr.StepDecay(0.5, 2)
        optimizer = paddle.optimizer.SGD(scheduler, parameters=model.parameters())
        for _ in range(steps):
            scheduler.step()
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, scheduler

    (source, there), (target, here) = make(3), make(0)
    texts = []
    for call in (
        lambda: fc.save_state_dict(source, tmp_path),
        lambda: fc.load_state_dict(target, tmp_path / "right"),
        lambda: fc.reshard_sharded_state_dict({**source, "optimizer": {}}, target),
    ):
        fc.save_state_dict({"model": source["model"]}, tmp_path / "right", unique_id=0)
        with pytest.raises(ValidationError) as caught:
            call()
        texts.append(str(caught.value).partition(": ")[2])
    assert len(set(texts)) == 1, texts
    assert texts[0].count("LR_Scheduler") == 2, "one problem, not one for each of its values; and the remedy"
    for state_dict in (source, target):
        state_dict["optimizer"].pop("LR_Scheduler")
    fc.save_state_dict({**source, **collect_extra_state(there)}, tmp_path / "all")
    fc.load_state_dict(target, tmp_path / "all")
    restore_extra_state(load_extra_state(tmp_path / "all"), here)
    assert here.state_dict() == there.state_dict() != make(0)[1].state_dict()
    assert all((target["model"][k].numpy() == v.numpy()).all() for k, v in source["model"].items())


def test_a_manager_passes_the_switch_on(tmp_path):
    with fc.CheckpointManager(tmp_path) as manager:
        manager.save(1, state=numbers("linear_0.w_0_moment1_0"))
        target = zeros("optimizer.linear_0.w_0.dist_moment1_0")
        with pytest.raises(ValidationError, match="no such key"):
            manager.restore(state=target, mw_name_compatibility=False)
        manager.restore(state=target)
    assert target["optimizer.linear_0.w_0.dist_moment1_0"].tolist() == [1, 1]


@pytest.mark.parametrize("both", [True, False])
def test_states_of_a_tied_parameter_may_be_there_under_both_names(tmp_path, both):
    values = np.arange(6, dtype=np.float32)
    saved = {name: values.copy() for name in ("embed", "head")}
    saved.update({f"{name}.moment1_0": values + 1 for name in ("embed", "head")})
    fc.save_state_dict(saved, tmp_path, SoloCommunicator())

    def weight(key, array, *aliases):
        return ShardedWeight(key, array, array.shape, array.shape, (0,), aliases=aliases)

    tied, moment = np.zeros(6, np.float32), np.zeros(6, np.float32)
    target = {"embed": weight("embed", tied), "embed.moment1_0": weight("embed.moment1_0", moment, "head.moment1_0")}
    if both:
        target["head"] = weight("head", tied)
    report = fc.load_state_dict(target, tmp_path, SoloCommunicator(), strict="missing")
    assert np.array_equal(tied, values)
    assert np.array_equal(moment, values + 1)
    assert report.unexpected == ([] if both else ["head", "head.moment1_0"])
    # What is of no target's other name is left over as before.
    del target["embed.moment1_0"]
    with pytest.raises(ValidationError, match="no rank asks for"):
        fc.load_state_dict(target, tmp_path, SoloCommunicator(), strict="missing")

"""AOA statements of live models: which method is asked, what ranks say together, and both forms of Paddle's protocol.

PaddleFleet is not installed anywhere here: its models are imitated by stubs with the same methods.
"""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("paddle")
from paddle import nn

import paddle_flexckpt as fc
from paddle_flexckpt.aoa import AoaError
from paddle_flexckpt.catalog import CheckpointError, ValidationError
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.trainer.model_rules import aoa_config_of, export_config_of, live

CONFIG = SimpleNamespace(name="configuration")
METHODS = ("gen_aoa_statements", "gen_inv_aoa_statements")


@pytest.fixture
def protocol(monkeypatch):
    """Paddle's develop branch gives every layer the methods; those of the base are no override."""

    def gen_aoa_statements(self, ctx, *, structured_name_prefix="", checkpoint_lookup_drop_segment=None):
        raise AssertionError("the base's own method was called")

    def gen_inv_aoa_statements(self, ctx, *, structured_name_prefix="", checkpoint_lookup_drop_segment=None):
        raise AssertionError("the base's own method was called")

    for method in (gen_aoa_statements, gen_inv_aoa_statements):
        monkeypatch.setattr(nn.Layer, method.__name__, method, raising=False)


@pytest.fixture(params=["with Paddle's protocol", "without"])
def any_paddle(request):
    if request.param != "without":
        request.getfixturevalue("protocol")


class Model(nn.Layer):
    config = CONFIG


class Modular(Model):
    """Says its statements by the methods of a whole model."""

    def gen_aoa_statements(self, config=None):
        return {"aoa_statements": [f"modular -> {config.name}"]}

    def gen_inv_aoa_statements(self, config=None):
        return {"aoa_statements": [f"{config.name} -> modular"]}


class HandWritten(Model):
    """By those of its class."""

    @classmethod
    def _gen_aoa_config(cls, config):
        return {"aoa_statements": [f"hand -> {config.name}"]}

    @classmethod
    def _gen_inv_aoa_config(cls, config):
        return {"aoa_statements": [f"{config.name} -> hand"]}


class Forward(Model):
    """Has no inverse."""

    shared = {"aoa_statements": ["hand -> w"]}

    @classmethod
    def _gen_aoa_config(cls, config):
        return cls.shared


class ForwardModular(Model):
    def gen_aoa_statements(self, config=None):
        return ["modular -> w"]


# -- which method ------------------------------------------------------------------------------------------------------


def test_this_library_gives_layers_no_such_method():
    before = {name: getattr(nn.Layer, name, None) for name in METHODS}
    fc.install()
    try:
        assert {name: getattr(nn.Layer, name, None) for name in METHODS} == before
    finally:
        fc.uninstall()


def test_hand_written_statements_of_the_class(any_paddle):
    assert aoa_config_of(HandWritten()) == {"aoa_statements": ["hand -> configuration"]}
    assert aoa_config_of(HandWritten(), "to_hf") == {"aoa_statements": ["configuration -> hand"]}


def test_hand_written_statements_of_the_instance_go_before_modular_ones(any_paddle):
    """PaddleFleet attaches those of the library's class to the model that its provider makes."""
    model = Modular()
    assert aoa_config_of(model) == {"aoa_statements": ["modular -> configuration"]}
    assert aoa_config_of(model, "to_hf") == {"aoa_statements": ["configuration -> modular"]}
    model._gen_aoa_config = HandWritten._gen_aoa_config
    model._gen_inv_aoa_config = HandWritten._gen_inv_aoa_config
    assert aoa_config_of(model) == {"aoa_statements": ["hand -> configuration"]}
    assert aoa_config_of(model, "to_hf") == {"aoa_statements": ["configuration -> hand"]}


def test_without_an_inverse_the_forward_statements_are_reversed(any_paddle):
    assert aoa_config_of(Forward(), "to_hf") == {"aoa_statements": ["hand -> w"], "aoa_config_reverse": True}
    assert Forward.shared == {"aoa_statements": ["hand -> w"]}  # which other calls get too
    assert aoa_config_of(ForwardModular(), "to_hf") == {"aoa_statements": ["modular -> w"], "aoa_config_reverse": True}
    # Hand-written ones without an inverse go before an inverse of the other kind, as in PaddleFleet.
    model = Modular()
    model._gen_aoa_config = Forward._gen_aoa_config
    assert aoa_config_of(model, "to_hf") == {"aoa_statements": ["hand -> w"], "aoa_config_reverse": True}


def test_statements_that_are_reversed_already_are_not_reversed_back():
    model = Model()
    model._gen_aoa_config = lambda config: {"aoa_statements": ["w -> hf"], "aoa_config_reverse": True}
    assert aoa_config_of(model) == {"aoa_statements": ["w -> hf"], "aoa_config_reverse": True}
    assert aoa_config_of(model, "to_hf") == {"aoa_statements": ["w -> hf"]}


def test_a_layer_that_overrides_nothing_is_an_error(any_paddle):
    with pytest.raises(
        ValidationError, match="does not say how Hugging Face's weights become its own.*Remedy .FC606.: pass"
    ):
        aoa_config_of(Model())
    with pytest.raises(ValidationError, match="direction is 'from_hf' or 'to_hf'; got 'back'"):
        aoa_config_of(Modular(), "back")


def test_the_configuration_that_the_method_gets():
    model = Modular()
    assert aoa_config_of(model, config=SimpleNamespace(name="given"))["aoa_statements"] == ["modular -> given"]
    model.config_to_save = SimpleNamespace(name="saved")
    assert aoa_config_of(model)["aoa_statements"] == ["modular -> configuration"]
    assert aoa_config_of(model, "to_hf")["aoa_statements"] == ["saved -> modular"]


@pytest.mark.parametrize("given", [None, {"aoa_statements": "a -> b"}, {"statements": []}, 7])
def test_what_is_no_configuration_is_an_error(given):
    model = Model()
    model._gen_aoa_config = lambda config: given
    with pytest.raises(AoaError, match="cannot tell the AOA statements of the model.*aoa_"):
        aoa_config_of(model)


def test_an_export_of_reversed_statements_is_one_of_their_inverse():
    model = Model()
    model._gen_aoa_config = lambda config: ["hf^T -> w", "gone -> _"]
    assert export_config_of(model) == {"aoa_statements": ["_ -> gone", "w^T -> hf"]}
    assert export_config_of(HandWritten()) == {"aoa_statements": ["configuration -> hand"]}


def test_a_pattern_that_matches_nothing_is_no_statement(tmp_path):
    """As in Paddle, and as libraries write them: one list for models with and without biases, or experts."""
    hf = {"hf.0.w": np.arange(6, dtype="float32").reshape(2, 3), "hf.one": np.ones(2, "float32")}
    fc.save_state_dict(hf, tmp_path, "self")
    model = Model()
    model._gen_aoa_config = lambda config: [
        "hf.$LAYER_ID.w^T -> l.$LAYER_ID.w  # of all",
        "hf.$LAYER_ID.bias -> l.$LAYER_ID.bias",
        "hf.$LAYER_ID.q, hf.$LAYER_ID.k -> l.$LAYER_ID.qk, axis=0 hf.one -> one",
        "hf.$LAYER_ID.gone -> l.$LAYER_ID.gone, optional",
    ]
    found = aoa_config_of(model)
    assert found["aoa_statements"] == [
        "hf.$LAYER_ID.w^T -> l.$LAYER_ID.w, optional  # of all",
        "hf.$LAYER_ID.bias -> l.$LAYER_ID.bias, optional",
        "hf.$LAYER_ID.q, hf.$LAYER_ID.k -> l.$LAYER_ID.qk, axis=0, optional",
        "hf.one -> one",
        "hf.$LAYER_ID.gone -> l.$LAYER_ID.gone, optional",
    ]
    target = {"l.0.w": np.zeros((3, 2), "float32"), "one": np.zeros(2, "float32")}
    fc.load_state_dict(target, tmp_path, "self", aoa_config=found)
    assert np.array_equal(target["l.0.w"], hf["hf.0.w"].T) and target["one"].all()
    # What a model lacks is still an error: of a target that nothing feeds, and of a name that is none.
    with pytest.raises(ValidationError, match=r"key 'l\.0\.bias'"):
        fc.load_state_dict({"l.0.bias": np.zeros(2, "float32")}, tmp_path, "self", aoa_config=found)
    model._gen_aoa_config = lambda config: ["hf.two -> one"]
    with pytest.raises(AoaError, match="'hf.two' is neither a source key nor assigned before"):
        fc.load_state_dict({"one": np.zeros(2, "float32")}, tmp_path, "self", aoa_config=aoa_config_of(model))


def test_an_export_that_lacks_shapes_is_an_error_before_there_is_a_checkpoint():
    model = Model()
    model._gen_aoa_config = lambda config: ["e.0,e.1 -> all, axis=0", "f.0,f.1 -> both, axis=0"]
    with pytest.raises(AoaError, match="take shapes from a destination, and an export has none: 2 of them.*_gen_inv"):
        export_config_of(model)
    model._gen_aoa_config = lambda config: ['e.0,e.1 -> all, axis=0, sizes="[2, 2]"']
    assert export_config_of(model) == {"aoa_statements": ['all -> e.0, e.1, axis=0, sizes="[2, 2]"']}
    model._gen_aoa_config = lambda config: ["hf -> router, dtype='float32'"]
    with pytest.raises(AoaError, match="AOA statement 1: has no exact inverse: 'hf' cannot be restored"):
        export_config_of(model)


# -- the protocol of single layers -------------------------------------------------------------------------------------


def context_module(monkeypatch, *fields: str) -> None:
    """Paddle's module, with a context of these fields."""
    module = ModuleType(live._CONTEXT_MODULE)
    module.AOAContext = dataclasses.make_dataclass("AOAContext", fields, frozen=True)
    monkeypatch.setitem(sys.modules, live._CONTEXT_MODULE, module)


FIVE = ("config", "model_name_prefix", "checkpoint_name_prefix", "checkpoint_name_mapping", "pp_to_single_mapping")
SEVEN = (*FIVE[:1], *FIVE[2:4], "dtype_cast_rules", *FIVE[4:], "model_name_prefix", "excluded_names")


class Leaf(nn.Layer):
    """A linear layer with the newer form."""

    def gen_aoa_statements(self, ctx, *, structured_name_prefix="", checkpoint_lookup_drop_segment=None):
        name = f"{structured_name_prefix}weight"
        name = ctx.pp_to_single_mapping.get(name, name)
        inside = name[len(ctx.model_name_prefix) :].replace(f".{checkpoint_lookup_drop_segment}", "")
        return [f"{ctx.checkpoint_name_prefix}{inside}^T -> {name}"]


class OlderLeaf(nn.Layer):
    """With the older one, whose context has more in it."""

    def gen_aoa_statements(self, ctx, *, structured_name_prefix="", aoa_name_scope=None):
        if f"{structured_name_prefix}weight" in ctx.excluded_names:
            return []
        assert ctx.dtype_cast_rules == {}
        return Leaf.gen_aoa_statements(self, ctx, structured_name_prefix=structured_name_prefix)


class Root(nn.Layer):
    """A model whose own method is that of a layer."""

    config = CONFIG

    def __init__(self, leaf=Leaf):
        super().__init__()
        self.layers = nn.LayerList([leaf(), leaf()])

    def gen_aoa_statements(self, ctx, *, structured_name_prefix="", **scope):
        found = []
        for i, layer in enumerate(self.layers):
            found += layer.gen_aoa_statements(ctx, structured_name_prefix=f"model.layers.{i}.")
        return found


@pytest.mark.parametrize(("fields", "leaf"), [(FIVE, Leaf), (SEVEN, OlderLeaf), (SEVEN, Leaf)])
def test_a_model_with_the_method_of_a_layer_gets_the_context_of_this_paddle(monkeypatch, protocol, fields, leaf):
    context_module(monkeypatch, *fields)
    expected = ["model.layers.0.weight^T -> model.layers.0.weight", "model.layers.1.weight^T -> model.layers.1.weight"]
    model = Root(leaf)
    assert aoa_config_of(model) == {"aoa_statements": expected}
    model.config = SimpleNamespace(aoa_checkpoint_name_prefix="hf", aoa_checkpoint_name_mapping=None)
    assert aoa_config_of(model)["aoa_statements"][0] == "hf.layers.0.weight^T -> model.layers.0.weight"


def test_names_of_a_pipeline_are_set_before_they_are_asked_for(monkeypatch):
    context_module(monkeypatch, *FIVE)

    class Pipeline(Root):
        _pipeline_name_mapping = None
        _pp_to_single_mapping = None

        def _set_pipeline_name_mapping(self):
            self._pp_to_single_mapping = {f"model.layers.{i}.weight": f"gpt.layers.{i + 7}.weight" for i in range(2)}

        def _model_name_prefix(self):
            return "gpt"

    assert aoa_config_of(Pipeline())["aoa_statements"][1] == "model.layers.8.weight^T -> gpt.layers.8.weight"


def test_a_context_that_is_not_known_is_an_error(monkeypatch):
    with pytest.raises(ValidationError, match="takes an AOAContext, which this version of Paddle does not have"):
        aoa_config_of(Root())
    context_module(monkeypatch, *FIVE, "tower")
    with pytest.raises(ValidationError, match="has fields that are not known; .*got tower"):
        aoa_config_of(Root())


# -- several ranks -----------------------------------------------------------------------------------------------------


class Rank(Model):
    """What a rank with a part of the model says."""

    def __init__(self, statements: Any, reverse: bool = False):
        super().__init__()
        self._statements, self._reverse = statements, reverse

    def gen_aoa_statements(self, config=None):
        if isinstance(self._statements, Exception):
            raise self._statements
        return {"aoa_statements": self._statements, "aoa_config_reverse": self._reverse}


def told(models: list[Any], direction: str = "from_hf") -> list[dict[str, Any]]:
    """What every rank gets."""
    world = SimulatedWorld(len(models))
    return world.run(lambda comm: aoa_config_of(models[comm.rank], direction, process_group=comm))


def test_experts_of_all_ranks_are_on_all_ranks():
    def says(*experts: int) -> Rank:
        own = [f"hf.{e}^T -> e.{e}" for e in experts]
        return Rank(["hf.embed -> embed", *own, "e.0,e.1,e.2,e.3 -> all, axis=0"])

    expected = ["hf.embed -> embed", *(f"hf.{e}^T -> e.{e}" for e in range(4)), "e.0,e.1,e.2,e.3 -> all, axis=0"]
    assert told([says(0, 1), says(2, 3)]) == [{"aoa_statements": expected}] * 2


def test_the_union_loads_what_every_rank_has(tmp_path):
    """Four experts on two ranks, each of which knows its own."""
    hf = {f"hf.{e}": np.arange(6, dtype="float32").reshape(2, 3) + 10 * e for e in range(4)}
    fc.save_state_dict(hf, tmp_path / "hf", "self")

    def load(comm: Any) -> dict[str, np.ndarray]:
        own = range(2 * comm.rank, 2 * comm.rank + 2)
        config = aoa_config_of(Rank([f"hf.{e}^T -> e.{e}" for e in own]), process_group=comm)
        target = {f"e.{e}": np.zeros((3, 2), "float32") for e in own}
        fc.load_state_dict(target, tmp_path / "hf", comm, aoa_config=config)
        return target

    for found in SimulatedWorld(2).run(load):
        assert all(found[key].tobytes() == hf[f"hf{key[1:]}"].T.copy().tobytes() for key in found)


def test_equal_lists_cost_two_collectives_and_others_three():
    def collectives(*programs: list[str]) -> set[int]:
        def count(comm: Any) -> int:
            before = comm.collectives
            aoa_config_of(Rank(programs[comm.rank]), process_group=comm)
            return comm.collectives - before

        return set(SimulatedWorld(len(programs)).run(count))

    assert collectives(["a -> b"], ["a -> b"]) == {2}
    assert collectives(["a -> b"], ["a -> b", "c -> d"]) == {3}


def raised(models: list[Any]) -> set[str]:
    """The errors of all ranks, which have to be the same."""

    def attempt(comm: Any) -> str:
        with pytest.raises(CheckpointError) as caught:
            aoa_config_of(models[comm.rank], process_group=comm)
        return f"{type(caught.value).__name__}: {caught.value}"

    return set(SimulatedWorld(len(models)).run(attempt))


def test_contradictions_are_the_same_error_on_all_ranks():
    (error,) = raised([Rank(["a -> w"]), Rank(["a -> w"]), Rank(["a^T -> w"])])
    assert "ranks 0 and 2 contradict each other about 'w': rank 0 has 'a -> w', rank 2 has 'a^T -> w'" in error


def test_models_that_say_it_by_different_methods_are_an_error_before_any_is_called():
    """Modular generation may be a collective: nobody waits in it for a rank that does not come."""
    called = []
    model = Model()
    model._gen_aoa_config = lambda config: called.append("hand")
    (error,) = raised([Rank(["a -> w"]), model])
    assert "different methods" in error
    assert "(rank 1); expected gen_aoa_statements, as on rank 0; got _gen_aoa_config. Remedy" in error
    assert called == []


def test_a_rank_whose_model_fails_is_named():
    (error,) = raised([Rank(["a -> w"]), Rank(KeyError("missing name"))])
    assert "[rank 1]" in error
    assert "missing name" in error
    (error,) = raised([Rank(["a -> w"]), Model()])
    assert "[rank 1]" in error
    assert "does not say how" in error


def test_directions_that_differ_are_an_error():
    (error,) = raised([Rank(["a -> w"]), Rank(["a -> w"], reverse=True)])
    assert "aoa_config_reverse of different values (rank 1); expected False, as on rank 0; got True" in error


def test_the_model_library_of_tables_is_asked_last(monkeypatch):
    class Tables(Model):
        @classmethod
        def _get_name_mappings(cls, config):
            raise AssertionError("hf_rules does that")

    monkeypatch.setattr(live, "hf_rules", lambda cls, config: {"to_hf": ["w -> table"], "from_hf": ["table -> w"]})
    assert aoa_config_of(Tables()) == {"aoa_statements": ["table -> w"]}
    assert aoa_config_of(Tables(), "to_hf") == {"aoa_statements": ["w -> table"]}

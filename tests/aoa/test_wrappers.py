"""``_layers.w``, as fleet's wrappers name a parameter, and ``w`` are one, in statements, sources and destinations."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from paddle_flexckpt.aoa import AoaError
from paddle_flexckpt.optimizer_states import unwrapped
from tests.aoa.small import assert_equal, compiled, numbered, room, run

A, B = numbered(4, 4), numbered(4, 4, start=50)
WAYS = list(itertools.product(("", "_layers.", "_layer._layers."), repeat=3))


@pytest.mark.parametrize(("name", "inside"), [
    ("_layers.a.w", "a.w"), ("_layer.a.w", "a.w"), ("_layers._layers.w", "w"), ("model._layers.w", "model.w"),
    ("optimizer._layers.w.moment1_0", "optimizer.w.moment1_0"), ("a._layers.w", "a._layers.w"), ("_layers", "_layers"),
    ("_layers_w", "_layers_w"), ("layers.0.w", "layers.0.w"), ("_layers.model.w", "model.w"),
])  # fmt: skip
def test_names_inside(name, inside):
    assert unwrapped(name) == inside


@pytest.mark.parametrize(("there", "here", "said"), WAYS)
def test_statements_name_parameters_with_or_without_wrappers(there, here, said):
    source = {f"{there}a.w": A, f"{there}a.w.moment1_0": B, f"{there}l.0.q": A, f"{there}l.1.q": B, f"{there}old": A}
    made = {"b.w": A.T, "b.w.moment1_0": B.T, "m.0.q": A.T, "m.1.q": B.T, "e": np.concatenate([A, B])}
    texts = [
        f"{said}a.w^T -> {said}t", f"{said}t -> {said}b.w", f"{said}l.$L.q^T -> {said}m.$L.q", f"{said}old -> _",
        f'{said}l.*.q -> "{said}e", axis=0',
    ]  # fmt: skip
    target = {f"{here}{key}": room(*array.shape) for key, array in made.items()}
    assert_equal(run(texts, source, target), {f"{here}{key}": array for key, array in made.items()})
    mapping = compiled(texts, source, target)
    assert mapping.removed == {f"{there}old"}
    assert set(mapping.tensors) >= set(target)
    assert set(mapping.maps.sources) <= set(source)


@pytest.mark.parametrize(("there", "here", "said"), WAYS)
def test_the_way_back(there, here, said):
    config = {"aoa_statements": [f"{said}a^T -> {said}b", f"{said}l.$L -> {said}m.$L"], "aoa_config_reverse": True}
    made = {f"{there}b": A, f"{there}m.0": B}
    found = run([], made, {f"{here}a": room(4, 4), f"{here}l.0": room(4, 4)}, config=config)
    assert_equal(found, {f"{here}a": A.T.copy(), f"{here}l.0": B})


@pytest.mark.parametrize("there", ["", "_layers."])
def test_without_a_destination_names_are_those_that_are_written(there):
    source = {f"{there}a": A, f"{there}l.0": A, f"{there}l.1": B, f"{there}rest": B, f"{there}a.moment1_0": B}
    mapping = compiled(["a^T -> _layers.b", "_layers.l.$L -> m.$L", "m.0 -> _layers.x.0.w"], source, None)
    assert mapping.outputs == tuple(
        sorted(["_layers.b", "_layers.b.moment1_0", "m.1", "_layers.x.0.w", f"{there}rest"])
    )


def test_keys_that_would_be_one_are_two():
    """Nobody can mean both by one name: then names are as they are written."""
    source = {"w": A, "_layers.w": B}
    found = run(["_layers.w^T -> x", "w -> y"], source, {"x": room(4, 4), "y": room(4, 4)})
    assert_equal(found, {"x": B.T.copy(), "y": A})
    with pytest.raises(AoaError, match="'_layers.v' is neither a source key"):
        run(["_layers.v -> x"], {**source, "v": A}, {"x": room(4, 4)})


def test_what_is_wrong_is_told_as_ever():
    with pytest.raises(AoaError, match="'none' is neither a source key nor assigned before"):
        run(["_layers.none -> _layers.x"], {"_layers.a": A}, {"x": room(4, 4)})
    with pytest.raises(AoaError, match="a comma, or '->', is missing before 'b'"):
        run(["_layers.a _layers.b -> x, axis=0"], {"_layers.a": A}, {"x": room(4, 4)})

"""Keys as ranges of layers, for people."""

from __future__ import annotations

from paddle_flexckpt.catalog.layer_ranges import grouped


def layers(numbers, *ends, stack="model.layers."):
    return [f"{stack}{number}.{end}" for number in numbers for end in ends]


def texts(keys):
    return grouped(keys)


def test_layers_with_the_same_tensors_are_one_range():
    keys = layers(range(4, 8), *(f"t{number}" for number in range(12)))
    assert texts(keys[::-1]) == ["layers 4 to 7 of model.layers.*, 12 tensors each, such as t0"]
    assert texts(layers([7], "a", "b")) == ["layer 7 of model.layers.*, 2 tensors: a, b"]
    assert texts(layers([0, 1], "bias")) == ["layers 0 to 1 of model.layers.*, 1 tensor each: bias"]
    assert texts(layers([0, 1], "w", "b", stack="")) == ["layers 0 to 1 of *, 2 tensors each: b, w"]


def test_layers_apart_or_of_other_tensors_are_several_ranges():
    keys = [*layers([1, 2, 5], "a", "b"), *layers([3, 10], "a", "c")]
    assert texts(keys) == [
        "layers 1 to 2 of model.layers.*, 2 tensors each: a, b",
        "layer 3 of model.layers.*, 2 tensors: a, c",
        "layer 5 of model.layers.*, 2 tensors: a, b",
        "layer 10 of model.layers.*, 2 tensors: a, c",
    ]


def test_other_keys_stand_as_they_are():
    keys = ["norm.w", "w_0", *layers([0, 1], "a"), "h.01.w", "h.1"]
    assert texts(keys) == ["layers 0 to 1 of model.layers.*, 1 tensor each: a", "h.01.w", "h.1", "norm.w", "w_0"]
    assert texts(["h.3.w"]) == ["h.3.w"]
    assert texts([]) == []
    # Experts are a part of their layers.
    experts = layers([0, 1], *(f"mlp.experts.{number}.{end}" for number in (2, 3) for end in ("up", "down")))
    assert texts(experts) == ["layers 0 to 1 of model.layers.*, 4 tensors each, such as mlp.experts.2.down"]

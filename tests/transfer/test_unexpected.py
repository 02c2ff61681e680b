"""Unexpected keys: what no rank asks for is listed, and is an error where it may not be left."""

from __future__ import annotations

import re

import numpy as np
import pytest

from paddle_flexckpt.aoa import TensorMapping
from paddle_flexckpt.catalog import CatalogBuilder, ValidationError
from paddle_flexckpt.transfer.options import LoadOptions
from paddle_flexckpt.transfer.resolution import check_unexpected, dropped_parameters
from tests.property.mappings import box_maps

CONTEXT = "cannot load"


def catalog_of_keys(*keys):
    builder = CatalogBuilder(0)
    for key in keys:
        builder.add(key, "float32", (1,), (0,), (1,))
    return builder.build()


def unexpected(keys, *ranks, removed=(), context=CONTEXT, **options):
    """What check_unexpected says of keys of which ranks use some."""
    source = catalog_of_keys(*keys)
    used = np.asarray([any(key in each for each in ranks) for key in source.keys], dtype=bool)
    mapping = TensorMapping(box_maps((), {}), {}, (), {}, removed=frozenset(removed)) if removed else None
    return check_unexpected(source.keys, used, mapping, LoadOptions(**options), context)


def test_what_some_rank_uses_is_expected():
    keys = [f"k{i}." for i in range(20)]
    assert unexpected(keys, keys[:3], keys[10:]) == keys[3:10]
    assert unexpected(keys, keys, []) == []
    assert unexpected([], [], []) == unexpected([], [], strict=True) == []


def test_extra_state_and_what_statements_remove_may_be_left():
    keys = ["a", "extra_state.common", "gone", "left", "extra_state"]
    assert unexpected(keys, ["a"], removed=["gone"], strict="missing") == ["extra_state", "left"]
    assert unexpected(keys, ["a", "left", "extra_state"], removed=["gone"], strict=True) == []


def test_all_keys_are_listed_where_none_may_be_left():
    for strict in (True, "unexpected"):
        with pytest.raises(ValidationError, match=rf"^{CONTEXT}: 2 problems") as caught:
            unexpected(["a", "b", "c"], ["b"], strict=strict)
        assert caught.value.problems == [
            f"no rank asks for key {key!r}, which the source has. Remedy (FC203): load it too, or allow it with "
            "strict='missing'"
            for key in "ac"
        ]
    for strict in (False, "missing"):
        assert unexpected(["a", "b", "c"], ["b"], strict=strict) == ["a", "c"]


def test_layers_that_nobody_asks_for_are_one_problem():
    layers = [f"h.{number}.{end}" for number in range(6) for end in ("w", "b", "w.moment1_0")]
    with pytest.raises(ValidationError) as caught:
        unexpected([*layers, "norm"], layers[:9], strict=True)
    assert caught.value.problems == [
        f"no rank asks for {keys}, which the source has. Remedy (FC203): load it too, or allow it with strict='missing'"
        for keys in ("layers 3 to 5 of h.*, 3 tensors each: b, w, w.moment1_0", "key 'norm'")
    ]


OPTIMIZER = (
    "Remedy (FC203): give the optimizer's too: before its first step it has states only after "
    "paddle_flexckpt.install(), or by optimizer_sharded_state_dict(); "
)
MASTERS = "to take float32 parameters from their masters, give master_weights='convert'; "
ALONE = "to load weights alone, or for an optimizer of another kind, which has no such states, "
ALONE += "give optimizer_states='ignore'"


def test_states_of_what_is_loaded_are_an_error_whatever_strict_says():
    keys = ["a", "a.moment1_0", "a.moment2_0", "a.beta1_pow_acc_0", "a.w_0", "b", "b.moment1_0"]
    for strict in (True, False, "missing", "unexpected"):
        with pytest.raises(ValidationError) as caught:
            unexpected(keys, ["a"], strict=strict)
        assert str(caught.value) == (
            f"{CONTEXT}: no rank asks for 4 optimizer states that the source has of parameters that are loaded, such "
            f"as 'a.beta1_pow_acc_0', 'a.moment1_0', 'a.moment2_0'. {OPTIMIZER}{ALONE}"
        )
    with pytest.raises(ValidationError) as caught:
        unexpected(["a", "a.w_0"], ["a"])
    assert str(caught.value).endswith(f"such as 'a.w_0'. {OPTIMIZER}{MASTERS}{ALONE}")


def test_states_are_left_where_that_is_asked_for():
    keys = ["a", "a.moment1_0", "b", "b.moment1_0"]
    assert unexpected(keys, ["a"], optimizer_states="ignore") == keys[1:]
    with pytest.raises(ValidationError) as caught:
        unexpected(keys, ["a"], optimizer_states="ignore", strict=True)
    assert [re.findall("'(b.*?)'", problem) for problem in caught.value.problems] == [["b"], ["b.moment1_0"]]


def test_states_of_what_is_not_loaded_are_no_error():
    assert unexpected(["a", "b", "b.moment1_0"], ["a"]) == ["b", "b.moment1_0"]
    # Another state is loaded, not the parameter.
    assert unexpected(["a", "a.moment1_0", "a.moment2_0"], ["a.moment2_0"]) == ["a", "a.moment1_0"]
    # Nothing is loaded, or extra state alone.
    assert unexpected(["a", "a.moment1_0"], []) == ["a", "a.moment1_0"]
    assert unexpected(["extra_state.common", "linear_0.w_0_moment1_0"], ["extra_state.common"]) == [
        "linear_0.w_0_moment1_0"
    ]
    # Numbers at the end make no state.
    assert unexpected(["a", "a_0", "layers.0", ""], ["a"]) == ["", "a_0", "layers.0"]


def test_states_under_raw_names_are_those_of_what_is_loaded_if_a_parameter_is():
    raw = ["linear_0.w_0_moment1_0", "linear_0.w_0_fp32_master_0"]
    with pytest.raises(ValidationError, match="2 optimizer states.*'linear_0.w_0_fp32.*', 'linear_0.w_0_mom"):
        unexpected(["a", *raw], ["a"])
    with pytest.raises(ValidationError, match="1 optimizer states"):
        unexpected(["a", *raw], ["a", raw[0]])
    # An optimizer that is loaded by itself, under either kind of names.
    assert unexpected([*raw, "a"], [raw[0]]) == ["a", raw[1]]
    assert unexpected([*raw, "a", "a.moment1_0"], ["a.moment1_0"]) == ["a", *raw[::-1]]


# -- sources -----------------------------------------------------------------------------------------------------------


def test_many_keys_are_gone_through_a_few_times():
    class Keys(list):
        times = 0

        def __iter__(self):
            self.times += 1
            return super().__iter__()

    keys = Keys([f"{number}.w" for number in range(50)] + [f"{number}.w.moment1_0" for number in range(50)])
    with pytest.raises(ValidationError, match="no rank asks for 50 optimizer states"):
        check_unexpected(keys, np.arange(100) < 50, None, LoadOptions(), CONTEXT)
    assert keys.times < 5


LAYERS = [
    f"model.layers.{i}.{leaf}" for i in range(3) for leaf in ("up.weight", "up.bias", "experts.0.w", "experts.1.w")
]


@pytest.mark.parametrize(
    ("left", "dropped"),
    [
        # Layers, experts and biases that the model does not have.
        ([key for key in LAYERS if ".2." in key], [key for key in LAYERS if ".2." in key]),
        ([key for key in LAYERS if "experts.1" in key], [key for key in LAYERS if "experts.1" in key]),
        ([key for key in LAYERS if "bias" in key], [key for key in LAYERS if "bias" in key]),
        # All of a kind; another model, a head and buffers beside; states, counters, and names without layers.
        ([key for key in LAYERS if "experts" in key], []),
        (["ema.layers.0.up.weight", "lm_head.weight", "model.layers.0.rope.inv_freq", "other"], []),
        (["model.layers.0.up.weight.moment1_0", "model.layers.0.up.weight.w_0", "model.layers.0.up.position_ids"], []),
        ([], []),
    ],
)
def test_parameters_of_layers_like_the_loaded_ones_are_dropped(left, dropped):
    keys = sorted({*LAYERS, *left, "model.norm.weight", "alone"})
    used = np.asarray([key not in left for key in keys], dtype=bool)
    assert dropped_parameters(sorted(left), keys, used) == sorted(dropped)

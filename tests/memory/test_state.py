"""States: nested dicts flattened, and each thing that cannot be a shard named."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.memory.state import flatten_state_dict, open_state, unflatten_state_dict
from paddle_flexckpt.sharded_weight import ShardedWeight


def array(*shape: int) -> np.ndarray:
    return np.zeros(shape, dtype=np.float32)


def sharded(tensor=None, local=(2, 3), whole=(4, 3), offset=(2, 0), flat=None) -> ShardedWeight:
    tensor = array(*local) if tensor is None else tensor
    return ShardedWeight("inner name", tensor, local, whole, offset, flat is not None, flat)


def test_nested_dicts_become_one_level():
    a, b, c = array(1), array(2), array(3)
    flat, _ = flatten_state_dict({"model": {"w": a, "block": {"0": b}}, "c": c})
    assert flat == {"model.w": a, "model.block.0": b, "c": c}
    assert flat["model.block.0"] is b


NESTED = st.recursive(
    st.integers(), lambda values: st.dictionaries(st.text("ab", max_size=2), values, min_size=1, max_size=3)
)


@given(st.dictionaries(st.text("ab", max_size=2), NESTED, max_size=4))
def test_flattened_and_nested_again(nested):
    flat, mapping = flatten_state_dict(nested)
    assert unflatten_state_dict(flat, mapping) == nested
    assert flat.keys() == mapping.keys()
    assert all(".".join(names) == key for key, names in mapping.items())


def test_the_mapping_tells_dots_of_names_from_dots_between_them():
    nested = {"a.b": {"c": 1}, "a": {"b.d": [2], "e": None}}
    flat, mapping = flatten_state_dict(nested)
    assert flat == {"a.b.c": 1, "a.b.d": [2], "a.e": None}
    assert mapping == {"a.b.c": ("a.b", "c"), "a.b.d": ("a", "b.d"), "a.e": ("a", "e")}
    assert unflatten_state_dict({"a.b.d": 5}, mapping) == {"a": {"b.d": 5}}, "other keys of the mapping are not used"


@pytest.mark.parametrize("nested", [{"a": {1: 2}}, {2: {}}, {"a": {"b": 1}, "a.b": 1}, [1]])
def test_what_cannot_be_flattened(nested):
    with pytest.raises(ValidationError, match="names that are strings|have the same name|has to be a dict"):
        flatten_state_dict(nested)


@pytest.mark.parametrize(("mapping", "words"), [
    ({"b": ("b",)}, "no names for a key of the flat state dict .*'a'"),
    ({"a": "ab", "b": ("b",)}, "a tuple of names for each key .*'a'.*got 'ab'"),
    ({"a": (), "b": ("b",)}, "a tuple of names for each key .*'a'"),
    ({"a": ("a", 1), "b": ("b",)}, "a tuple of names for each key .*'a'"),
    ({"a": ("x",), "b": ("x",)}, "has the names of key 'a' again .*'b'"),
    ({"a": ("x",), "b": ("x", "y")}, "into the value of key 'a' .*'b'"),
    ({"b": ("x",), "a": ("x", "y", "z")}, "into the value of key 'b' .*'a'"),
])  # fmt: skip
def test_a_mapping_that_does_not_fit(mapping, words):
    with pytest.raises(ValidationError, match=words):
        unflatten_state_dict({"a": 1, "b": 2}, mapping)


def test_flat_dicts_are_those_of_paddle():
    utils = pytest.importorskip("paddle.distributed.flex_checkpoint.dcp.utils")
    paddle = pytest.importorskip("paddle")
    nested = {"model": {"a.w": paddle.zeros([1]), "b": {"c": paddle.zeros([2])}}, "d": paddle.zeros([3])}
    flat, mapping = flatten_state_dict(nested)
    theirs, names = utils.flatten_state_dict(nested)
    assert mapping == names
    assert list(flat) == list(theirs)
    assert all(flat[key] is theirs[key] for key in flat)
    again, expected = unflatten_state_dict(flat, mapping), utils.unflatten_state_dict(theirs, names)
    assert again.keys() == expected.keys()
    assert again["model"]["b"]["c"] is expected["model"]["b"]["c"] is nested["model"]["b"]["c"]


def test_the_dicts_name_of_a_shard_counts():
    state = open_state({"outer": {"name": sharded()}}, rank=3)
    assert state.catalog.keys == ("outer.name",)
    assert state.catalog.rank.tolist() == [3]


def test_a_state_is_described_row_by_row():
    tensors = {"plain": array(5, 6), "cut": sharded(), "flat": sharded(array(4), flat=slice(1, 5))}
    state = open_state(tensors, rank=1, file="vfile_1")
    catalog = state.catalog
    assert [catalog.describe(row) for row in range(3)] == [
        "float32 [0:5, 0:6] of [5, 6]",
        "float32 [2:4, 0:3] of [4, 3]",
        "float32 [2:4, 0:3] of [4, 3], flattened range [1, 5)",
    ]
    assert catalog.files == ("vfile_1",)
    assert state.tensors[0] is tensors["plain"]
    assert state.tensors[1] is tensors["cut"].local_tensor


def test_an_empty_state_is_a_state():
    state = open_state({}, rank=0)
    assert (len(state.catalog), state.weights) == (0, [])


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ([1], ["has to be a dict", "list"]),
        ({1: array(1)}, ["names that are strings", "got 1"]),
        ({"a.b": array(1), "a": {"b": array(1)}}, ["same name", "'a.b'"]),
        ({"lr": 0.1}, ["tensors and ShardedWeights only", "'lr'", "rank 7", "0.1 (float)", "Remedy"]),
        ({"none": None}, ["tensors and ShardedWeights only", "None"]),
        ({"slice@a.w_0": array(3)}, ["one rank's range", "'slice@a.w_0'", "rank 7", "dist_model.sharded_state_dict()"]),
        (
            {"opt": {"slice@a.w_0_moment1_0": array(3)}},
            ["one rank's range", "'opt.slice@a.w_0_moment1_0'", "shape [3]"],
        ),
        ({"w": sharded([1, 2])}, ["local_tensor of a ShardedWeight has to be a tensor", "got list"]),
        ({"w": sharded(local=(2, 3), whole=(4,))}, ["differ in length", "(4,), (2, 0), (2, 3)"]),
        ({"w": sharded(array(3, 2))}, ["not the local shape", "expected (2, 3)", "got (3, 2)"]),
        ({"w": sharded(array(4), flat=slice(0, 3))}, ["as many elements as its flattened_range", "expected 3; got 4"]),
        ({"w": sharded(array(8)[::2], flat=slice(0, 4))}, ["flattened shard has to be contiguous"]),
        ({"w": sharded(array(4), flat=slice(0, None))}, ["flattened_range with start and stop"]),
        ({"w": sharded(array(2), flat=slice(0, 4, 2))}, ["flattened_range with start and stop"]),
        ({"w": ShardedWeight("w", array(2), (2, 3), (4, 3), (0, 0), True, None)}, ["flattened_range with start"]),
        ({"w": np.zeros(3, dtype=">f4")}, ["dtype", "not supported"]),
        ({"w": np.zeros(3, dtype="U3")}, ["dtype", "not supported"]),
        ({"w": sharded(array(2), flat=slice(-2, 0))}, ["negative flattened range"]),
    ],
)
def test_what_is_wrong_is_named(state, words):
    with pytest.raises(ValidationError) as caught:
        open_state(state, rank=7)
    for word in words:
        assert word in str(caught.value)


def test_a_name_with_slice_that_is_described_or_has_it_elsewhere_is_a_name():
    state = {"slice@w": sharded(array(4), flat=slice(1, 5)), "my slice@w": array(2), "slice": array(1)}
    assert open_state(state, rank=0).catalog.keys == tuple(state)


def test_all_problems_are_listed():
    with pytest.raises(ValidationError) as caught:
        open_state({"good": array(1), "lr": 0.1, "w": sharded(array(3, 2)), "name": "x"}, rank=0)
    assert len(caught.value.problems) == 3
    assert "3 problems" in str(caught.value)
    assert "'good'" not in str(caught.value)


@pytest.mark.paddle
class TestPaddle:
    @pytest.fixture(autouse=True)
    def _paddle(self):
        self.paddle = pytest.importorskip("paddle")

    def test_a_tensor_and_a_parameter_are_replicated_shards(self):
        state = {"t": self.paddle.zeros([2, 3], "bfloat16"), "p": self.paddle.create_parameter([4], "float32")}
        catalog = open_state(state, 0).catalog
        assert [catalog.describe(row) for row in range(2)] == [
            "bfloat16 [0:2, 0:3] of [2, 3]", "float32 [0:4] of [4]",
        ]  # fmt: skip

    def test_a_tensor_without_memory_is_named(self):
        tensor = self.paddle.ones([3])
        tensor._clear_data()
        with pytest.raises(ValidationError, match="'t'.*no memory|not initialised.*'t'"):
            open_state({"t": ShardedWeight("t", tensor, (3,), (3,), (0,))}, 0)

    def test_a_plain_tensor_marked_is_distributed_is_refused(self):
        tensor = self.paddle.ones([3])
        tensor.is_distributed = True
        with pytest.raises(ValidationError, match="marked is_distributed.*sharded_state_dict"):
            open_state({"t": tensor}, 0)
        assert len(open_state({"t": ShardedWeight("t", tensor, (3,), (6,), (3,))}, 0).catalog) == 1

    def test_paddles_own_sharded_weight_is_taken(self):
        module = pytest.importorskip("paddle.distributed.flex_checkpoint.dcp.sharded_weight")
        theirs = module.ShardedWeight("w", self.paddle.ones([2, 3]), (2, 3), (4, 3), (2, 0))
        assert open_state({"w": theirs}, 0).catalog.describe(0) == "float32 [2:4, 0:3] of [4, 3]"

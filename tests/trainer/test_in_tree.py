"""Paddle's own functions replaced by those of this library: who calls them, what they write, how ids are chosen."""

from __future__ import annotations

import importlib
import inspect
import pickle
import sys
import types

import numpy as np
import paddle
import paddle.distributed as dist
import pytest

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.foreign.paddle_files import PADDLE_METADATA
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.trainer import in_tree, is_in_tree_replaced, replace_in_tree, restore_in_tree
from tests.saved import data_file

NAMES = ("save_state_dict", "load_state_dict", "load_merged_state_dict")
pytestmark = pytest.mark.skipif(not hasattr(dist, "load_merged_state_dict"), reason="Paddle before 3.2 has not all")


@pytest.fixture(autouse=True)
def put_back():
    yield
    restore_in_tree()
    assert not is_in_tree_replaced()


def state(start: int = 0) -> dict[str, paddle.Tensor]:
    return {
        "a": paddle.arange(start, start + 6, dtype="float32").reshape([2, 3]),
        "b": paddle.full([4], start, dtype="int64"),
    }


def zeros() -> dict[str, paddle.Tensor]:
    return {name: paddle.zeros_like(tensor) for name, tensor in state().items()}


def test_every_module_that_has_a_function_gets_the_other_one_and_back(monkeypatch):
    before = {name: getattr(dist, name) for name in NAMES}
    user = types.ModuleType("a_user_of_paddle")
    user.load_state_dict = dist.load_state_dict
    monkeypatch.setitem(sys.modules, user.__name__, user)
    home = sys.modules[before["save_state_dict"].__module__]
    replace_in_tree()
    replace_in_tree()
    assert is_in_tree_replaced()
    for name in NAMES:
        now = getattr(dist, name)
        assert now is not before[name]
    assert user.load_state_dict is dist.load_state_dict
    assert home.save_state_dict is dist.save_state_dict
    restore_in_tree()
    assert {name: getattr(dist, name) for name in NAMES} == before
    assert user.load_state_dict is before["load_state_dict"]
    assert home.save_state_dict is before["save_state_dict"]


# Read, not run: PaddlePaddle/Paddle, python/paddle/distributed/flex_checkpoint/dcp, of September 2026.
# save_state_dict.py at 02049922, full_param.py at 02dea0c7, load_state_dict.py at 4c2a278d; of the latest of that there
# is the branch of the change that brought load_transform (Lmywl/Paddle at 650886f3). num_workers is of change 79786,
# whose place among the arguments was not seen.
_LOAD = "state_dict path process_group coordinator_rank unique_id offload mw_name_compatibility aoa_config safetensors"
_MERGED = "prefix unique_id offload aoa_config safetensors"
DEVELOP = {
    "save_state_dict": "state_dict path process_group coordinator_rank unique_id async_save safetensors save_replicas",
    "load_state_dict": f"{_LOAD} worker_groups comm_method load_transform num_workers",
    "load_merged_state_dict": f"path {_MERGED}",
    "merge_sharded_state_dict": f"load_path save_path {_MERGED} safetensor_prefix skip_postfix_list process_group",
    "full_param": "sharded_state_dict aoa_config",
}
# What develop's full_param takes as **kwargs.
OF_FULL = {"process_group", "h_group", "v_group", "num_splits", "shard_idx", "memory_growth_threshold"}


@pytest.mark.parametrize("name", [*NAMES, "merge_sharded_state_dict", "full_param"])
def test_the_keywords_are_those_of_the_installed_paddle_and_of_the_next(name):
    """A new Paddle is noticed here."""
    theirs = inspect.signature(in_tree.in_tree_function(name)).parameters
    ours = inspect.signature(getattr(in_tree, name)).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    theirs = {key: () if each.default == [] else each.default for key, each in theirs.items()}  # which they share
    assert theirs == {key: ours[key].default for key in theirs}
    assert {*DEVELOP[name].split()} == ours.keys() - {"kwargs"}
    own = {"full_param": "whole_tensors", "merge_sharded_state_dict": "merge"}.get(name, name[: -len("_state_dict")])
    there = list(inspect.signature(getattr(in_tree, own)).parameters)
    assert there[: len(ours.keys() - {"kwargs"})] == [key for key in ours if key != "kwargs"]
    assert name != "full_param" or {*there} >= OF_FULL


class Halves:
    """Makes one tensor of two."""

    def logical_metadata(self):
        return {"joined": types.SimpleNamespace(global_shape=(4, 3), dtype="float32")}

    def source_keys(self, logical_key):
        return ["a", "b"]

    def apply(self, logical_key, source_tensors, output_dtype):
        return (source_tensors["a"].tile([2, 1]) + source_tensors["b"].astype("float32").reshape([4, 1])).astype(
            output_dtype
        )


def test_what_develop_takes_is_served(tmp_path):
    """As PaddleFleet calls it, whose groups may be None."""
    replace_in_tree()
    dist.save_state_dict(state(3), str(tmp_path))
    target = zeros()
    dist.load_state_dict(target, str(tmp_path), num_workers=8, worker_groups=[None], load_transform=None)
    assert np.array_equal(target["a"].numpy(), state(3)["a"].numpy())
    turned = paddle.zeros([3, 4])
    dist.load_state_dict(
        {"turned": turned}, str(tmp_path), aoa_config={"aoa_statements": ["joined^T -> turned"]}, offload=True,
        safetensors=True, process_group=None, comm_method="parallel_broadcast", worker_groups=[None, None, None],
        load_transform=Halves(),
    )  # fmt: skip
    assert np.array_equal(turned.numpy(), (np.tile(state(3)["a"].numpy(), (2, 1)) + 3).T)
    with pytest.raises(ValidationError, match="load_transform has to have the methods"):
        dist.load_state_dict(zeros(), str(tmp_path), load_transform=type("Transform", (), {})())


def test_a_checkpoint_is_merged(tmp_path):
    replace_in_tree()
    dist.save_state_dict(state(), str(tmp_path / "in"))
    merged = importlib.import_module("paddle.distributed.flex_checkpoint.dcp.load_state_dict").merge_sharded_state_dict
    assert merged(str(tmp_path / "in"), str(tmp_path / "out"), skip_postfix_list=["a"]) is None
    found = dist.load_merged_state_dict(str(tmp_path / "out"))
    assert {name: tensor.tolist() for name, tensor in found.items()} == {"b": [0, 0, 0, 0]}


def test_whole_tensors_of_a_layer_are_ours():
    layer = paddle.nn.Linear(3, 2)
    statements = {"aoa_statements": ["weight^T -> turned"]}
    replace_in_tree()
    found = dict(layer.full(aoa_config=statements, num_splits=2, shard_idx=1))
    assert list(found) == ["turned"]
    assert np.array_equal(found["turned"].numpy(), layer.weight.numpy().T)


def test_what_is_saved_is_native_and_comes_back(tmp_path):
    replace_in_tree()
    assert dist.save_state_dict(state(), str(tmp_path)) is None
    assert {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")} == {
        "0.manifest",
        PADDLE_METADATA,
        data_file(tmp_path),
    }
    target = zeros()
    assert dist.load_state_dict(target, str(tmp_path)) is None
    merged = dist.load_merged_state_dict(str(tmp_path))
    for name, tensor in state().items():
        assert np.array_equal(target[name].numpy(), tensor.numpy())
        assert np.array_equal(merged[name].numpy(), tensor.numpy())
    with pytest.raises(ValidationError, match="no such key"):
        dist.load_state_dict({"c": paddle.zeros([1])}, str(tmp_path))


def test_the_metadata_file_has_shapes_and_dtypes(tmp_path):
    replace_in_tree()
    dist.save_state_dict(state(), str(tmp_path))
    shards = paddle.load(str(tmp_path / PADDLE_METADATA)).state_dict_metadata
    assert {name: (each[0].global_shape, each[0].local_shape, each[0].dtype) for name, each in shards.items()} == {
        "a": ((2, 3), (2, 3), "float32"),
        "b": ((4,), (4,), "int64"),
    }


def test_readers_that_want_shapes_alone_may_stop_before_the_files(tmp_path):
    """As develop's ``load_state_dict_metadata`` does: it ends the pickle where the next field's name is pushed.

    It asks for frames after protocol 4, and takes a pickle of an older one as it lies.
    """
    replace_in_tree()
    dist.save_state_dict(state(), str(tmp_path))
    data = (tmp_path / PADDLE_METADATA).read_bytes()
    assert (data[0], data[1] < 4) == (0x80, True)
    name = b"storage_metadata"
    cut = data.index(b"\x8c" + bytes([len(name)]) + name)
    assert b"\x8c" + bytes([19]) + b"state_dict_metadata" in data[:cut]
    found = pickle.loads(data[:cut] + pickle.STOP)  # what this test has written
    assert found == paddle.load(str(tmp_path / PADDLE_METADATA)).state_dict_metadata


def test_without_an_id_the_highest_is_replaced(tmp_path):
    replace_in_tree()
    dist.save_state_dict(state(1), str(tmp_path), unique_id=3)
    dist.save_state_dict(state(2), str(tmp_path))
    assert SourceDirectory(tmp_path).list_ids() == [3]
    assert [path.name for path in tmp_path.glob("*.metadata")] == [PADDLE_METADATA]
    target = zeros()
    dist.load_state_dict(target, str(tmp_path))
    assert target["b"].tolist() == [2, 2, 2, 2]


def test_what_paddle_saved_is_loaded(tmp_path):
    try:
        dist.save_state_dict(state(5), str(tmp_path))
    except RuntimeError as error:  # it may want a group that one process has not
        pytest.skip(str(error))
    assert not SourceDirectory(tmp_path).list_ids()
    replace_in_tree()
    target = zeros()
    dist.load_state_dict(target, str(tmp_path))
    assert np.array_equal(target["a"].numpy(), state(5)["a"].numpy())


def test_options_that_paddle_lacks_are_set_for_all_calls(tmp_path):
    replace_in_tree()
    dist.save_state_dict(state(2), str(tmp_path))
    halves = {name: tensor.astype("float16") for name, tensor in zeros().items() if name == "a"}
    with pytest.raises(ValidationError) as error:
        dist.load_state_dict(halves, str(tmp_path))
    assert str(error.value).endswith(
        "paddle.distributed.load_state_dict does not take dtype=...: set it for all calls with "
        "paddle_flexckpt.trainer.replace_in_tree(dtype=...)"
    )
    replace_in_tree(dtype="cast")
    dist.load_state_dict(halves, str(tmp_path))
    assert halves["a"].tolist() == state(2)["a"].tolist()
    wrong = {**halves, "c": paddle.full([1], 7.0)}
    with pytest.raises(ValidationError, match="does not take strict=") as error:
        dist.load_state_dict(wrong, str(tmp_path))
    replace_in_tree(strict=False)
    halves["a"].zero_()
    dist.load_state_dict(wrong, str(tmp_path))  # dtype stays what it was
    assert (wrong["a"].tolist(), wrong["c"].tolist()) == (state(2)["a"].tolist(), [7.0])
    restore_in_tree()
    replace_in_tree()
    with pytest.raises(ValidationError, match="dtypes differ"):
        dist.load_state_dict(halves, str(tmp_path))


@pytest.mark.parametrize(("options", "kind", "words"), [
    ({"dtyp": "cast"}, TypeError, "no option 'dtyp'; it sets check_replicas, strict, dtype"),
    ({"offload": True}, TypeError, "no option 'offload'"),
    ({"dtype": "casts"}, ValidationError, "dtype is 'raise' or 'cast'; got 'casts'"),
    ({"check_replicas": "nearly"}, ValidationError, "check_replicas has"),
])  # fmt: skip
def test_options_are_looked_at_before_anything_is_replaced(options, kind, words):
    with pytest.raises(kind, match=words):
        replace_in_tree(**options)
    assert not is_in_tree_replaced()


def test_replicas_that_differ_as_paddle_saves_them(tmp_path, monkeypatch):
    """Paddle's own tests draw weights on each rank."""
    monkeypatch.setattr(in_tree, "communicator_for", lambda comm: comm)
    monkeypatch.setattr(in_tree, "_is_there", lambda path: False)
    path = str(tmp_path)

    def job(comm):
        try:
            in_tree.save_state_dict({"w": np.full(3, comm.rank, np.float32)}, path, comm, unique_id=1)
        except ValidationError as error:
            return str(error)
        return None

    said = SimulatedWorld(2).run(job)
    assert len(set(said)) == 1
    assert "replace_in_tree(check_replicas=...)" in said[0]
    replace_in_tree(check_replicas="first")
    assert SimulatedWorld(2).run(job) == [None, None]
    assert dist.load_merged_state_dict(path)["w"].tolist() == [0, 0, 0]


def test_patterns_without_a_match_and_unknown_keys_are_warned_of_by_name(tmp_path, caplog):
    """Lists of statements that Paddle's libraries have for several models."""
    replace_in_tree()
    dist.save_state_dict({"l.0.w": paddle.ones([2, 3]), "b": paddle.ones([1])}, str(tmp_path))
    config = {
        "aoa_statements": [
            "l.$L.w^T -> m.$L.w",
            "e.$L.w -> m.$L.e",
            "gone.$L -> _",
            "b.$L -> c.$L, optional",
            "b -> b",
        ],
        "aoa_config_revers": True,
    }
    target = {"m.0.w": paddle.zeros([3, 2]), "b": paddle.zeros([1])}
    before = {"l.0.w": paddle.zeros([2, 3]), "b": paddle.zeros([1])}
    dist.save_state_dict({"m.0.w": paddle.full([3, 2], 2.0), "b": paddle.ones([1])}, str(tmp_path / "back"))
    for load in (
        lambda: dist.load_state_dict(target, str(tmp_path), aoa_config=config),
        lambda: dist.load_merged_state_dict(str(tmp_path), aoa_config={"aoa_config": config}),
        lambda: dict(in_tree.full_param({"l.0.w": paddle.ones([2, 3]), "b": paddle.ones([1])}, config)),
        lambda: dist.load_state_dict(before, str(tmp_path / "back"), aoa_config={**config, "aoa_config_reverse": True}),
    ):
        caplog.clear()
        load()
        said = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        assert sum("unknown keys ['aoa_config_revers'], which are ignored" in text for text in said) == 1
        assert any("AOA statement 2 is left out" in text and "e.$L.w -> m.$L.e" in text for text in said), said
        assert any("AOA statement 3 is left out" in text for text in said)
        assert not any("statement 1 " in text or "statement 4 " in text for text in said)
    assert (float(target["m.0.w"].sum()), float(before["l.0.w"].sum())) == (6, 12)


def test_literal_names_and_other_mistakes_stay_errors(tmp_path):
    replace_in_tree()
    dist.save_state_dict(state(), str(tmp_path))
    for statements in (["aa -> a"], ["a -> b, axis"], ["a.$L -> b"], 5):
        with pytest.raises(ValidationError):
            dist.load_state_dict(zeros(), str(tmp_path), aoa_config={"aoa_statements": statements})


def test_a_load_tells_which_keys_are_missing_and_unexpected(tmp_path, caplog):
    caplog.set_level("INFO", logger="paddle_flexckpt")
    replace_in_tree(strict=False)
    saved = {f"l.{i}.w": paddle.ones([1]) for i in range(4)}
    dist.save_state_dict({**saved, "x": paddle.ones([1]), "a": paddle.ones([1])}, str(tmp_path))
    dist.load_state_dict({"a": paddle.zeros([1]), **{f"m.{i}.w": paddle.zeros([1]) for i in range(3)}}, str(tmp_path))
    (text,) = [each.getMessage() for each in caplog.records if each.getMessage().startswith("loaded")]
    assert "loaded 1 tensor " in text
    assert ", 3 missing (m.#.w x 3), 5 unexpected (l.#.w x 4, x)" in text

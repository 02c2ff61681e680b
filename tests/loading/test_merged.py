"""A distributed checkpoint as whole tensors: in one process, and in files that all ranks write."""

from __future__ import annotations

import dataclasses
import inspect
import json
import pickle

import numpy as np
import pytest

from paddle_flexckpt.aoa import compile_program
from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.catalog.dtypes import dtype_of
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.loading.merged import load_merged_state_dict, merge_sharded_state_dict
from paddle_flexckpt.memory.tensors import HostTensor
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.sharded_weight import ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.transfer.options import WholeOptions
from tests.foreign.writers import metadata_pickle
from tests.ramdisk import memory_directory
from tests.remedies.following import provoked
from tests.saved import data_file

paddle = pytest.importorskip("paddle")
pytestmark = pytest.mark.paddle

TENSORS = {
    "model.w": ("bfloat16", (6, 4)), "model.b": ("float32", (4,)), "model.none": ("float32", (0, 3)),
    "opt.step": ("int64", ()), "modelling": ("float8_e4m3fn", (6,)),
}  # fmt: skip


def values(key: str) -> np.ndarray:
    dtype, shape = TENSORS[key]
    dtype = dtype_of(dtype).numpy
    raw = np.random.default_rng(len(key)).integers(0, 256, int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return raw.view(dtype).reshape(shape)


@pytest.fixture
def path():
    def job(comm):
        state = {}
        for key in TENSORS:
            full = values(key)
            if full.ndim and len(full) == 6:
                part = full[3 * comm.position : 3 * comm.position + 3].copy()
                offset = (3 * comm.position,) + (0,) * (full.ndim - 1)
                state[key] = ShardedWeight(key, part, part.shape, full.shape, offset)
            else:
                state[key] = full
        save_state_dict(state, directory, comm)

    with memory_directory() as directory:
        SimulatedWorld(2).run(job)
        yield directory


def test_whole_tensors_on_the_cpu_sorted_by_name(path):
    merged = load_merged_state_dict(path)
    assert list(merged) == sorted(TENSORS)
    for key, tensor in merged.items():
        dtype, shape = TENSORS[key]
        assert (str(tensor.dtype), tuple(tensor.shape)) == (f"paddle.{dtype}", shape)
        assert tensor.place.is_cpu_place()
        assert HostTensor(tensor).array.tobytes() == values(key).tobytes()


def test_a_prefix_chooses_keys_and_is_taken_off(path):
    assert list(load_merged_state_dict(path, prefix="model")) == ["b", "none", "w"]
    with pytest.raises(
        ValidationError, match=r"no key starts with 'nothing\.'.*such as .*Remedy .FC201.: correct prefix"
    ):
        load_merged_state_dict(path, prefix="nothing")


def test_an_id_is_chosen(path):
    SimulatedWorld(1).run(lambda comm: save_state_dict({"x": np.ones(2, dtype=np.float32)}, path, comm))
    assert list(load_merged_state_dict(path)) == ["x"]
    assert list(load_merged_state_dict(path, unique_id=0)) == sorted(TENSORS)


def test_options_are_those_of_the_dataclass(path):
    parameters = inspect.signature(load_merged_state_dict).parameters
    assert list(parameters) == [
        "path", "prefix", "unique_id", "offload", "aoa_config", "safetensors", "progress", "verify", "use_replicas",
    ]  # fmt: skip
    assert parameters["verify"].kind is inspect.Parameter.KEYWORD_ONLY
    for option in dataclasses.fields(WholeOptions):
        assert f"    {option.name}: " in inspect.getdoc(load_merged_state_dict)
    with pytest.raises(ValidationError, match="verify has to be 'read', 'full' or 'off'.*got 'never'"):
        load_merged_state_dict(path, verify="never")
    compiled = compile_program(["model.b -> x"], SourceDirectory(path).read_manifest().catalog, None)
    with pytest.raises(ValidationError, match="aoa_config has to be a dict with 'aoa_statements'; got a TensorMapping"):
        load_merged_state_dict(path, aoa_config=compiled)


def test_what_nothing_feeds_is_warned_of_once(tmp_path, caplog):
    state = {key: np.ones((2, 2), np.float32) for key in ("a", "b", "a.moment1_0")}
    SimulatedWorld(1).run(lambda comm: save_state_dict(state, tmp_path, comm))
    merged = load_merged_state_dict(tmp_path, aoa_config={"aoa_statements": ["a, b -> t, axis=0"]})
    assert {key: tensor.shape for key, tensor in merged.items()} == {"t": [4, 2]}
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("nothing feeds 1 keys such as 't.moment1_0' (AOA statement 1")


def test_what_is_wrong_is_an_error(path):
    with pytest.raises(ValidationError, match="does not exist"):
        load_merged_state_dict(path / "nowhere")
    (path / data_file(path, 1)).unlink()
    with pytest.raises(CorruptCheckpointError, match=r"1_0-\w+\.safetensors is missing"):
        load_merged_state_dict(path)


@pytest.mark.parametrize("aoa", [None, {"aoa_statements": ["w -> v"]}], ids=["plain", "aoa"])
def test_no_memory_is_taken_for_a_shape_that_is_only_declared(tmp_path, aoa):
    row = {"key": "w", "dtype": "float32", "shape": (1 << 44,), "offset": (0,), "local": (2,)}
    (tmp_path / "0.metadata").write_bytes(metadata_pickle({"0_0.distcp": [row, {**row, "key": "b", "shape": (2,)}]}))
    (tmp_path / "0_0.distcp").write_bytes(pickle.dumps({"w": np.ones(2, np.float32), "b": np.ones(2, np.float32)}))
    with provoked(
        "loading/merged.py", "load another checkpoint, or leave this key out by the AOA statement '"
    ) as caught:
        load_merged_state_dict(tmp_path, aoa_config=aoa)
    assert str(caught.value).endswith("'w -> _'")
    assert "the checkpoint does not hold all of a tensor (key 'w'); expected 17592186044416 elements; got 2" in str(
        caught.value
    )
    # What is there can be had.
    tensors = load_merged_state_dict(tmp_path, aoa_config={"aoa_statements": ["w -> _"]})
    assert {name: tensor.numpy().tolist() for name, tensor in tensors.items()} == {"b": [1, 1]}


def merge(path, out, ranks=3, **options):
    return SimulatedWorld(ranks).run(lambda comm: merge_sharded_state_dict(path, out, process_group=comm, **options))


def read_merged(out, prefix="model"):
    index = out / f"{prefix}.safetensors.index.json"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {f"{prefix}.safetensors"}
    assert {name.name for name in out.iterdir()} == files | ({index.name} if index.exists() else set())
    return {
        key: HostTensor(value).array.reshape(value.shape)
        for name in files
        for key, value in load_merged_state_dict(out / name).items()
    }


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_all_ranks_write_whole_tensors_of_every_dtype(path, tmp_path, ranks):
    """Paddle's function raises KeyError for integers and booleans."""
    out = tmp_path / "out"
    reports = merge(path, out, ranks)
    found = read_merged(out)
    assert sorted(found) == sorted(TENSORS)
    for key, (_, shape) in TENSORS.items():
        assert (found[key].shape, found[key].tobytes()) == (shape, values(key).tobytes())
    assert sum(report.bytes_written for report in reports) == reports[0].total_bytes


def test_names_of_files_ends_of_keys_a_prefix_and_statements(tmp_path):
    """Paddle's function fails for any prefix, and statements have no effect."""
    state = {f"m.{key}": np.full((4, 2), i, np.float32) for i, key in enumerate(("a", "b", "a.moment1_0", "a.w_0"))}
    SimulatedWorld(1).run(lambda comm: save_state_dict({**state, "other": state["m.a"]}, tmp_path / "in", comm))
    options = {"safetensor_prefix": "merged", "skip_postfix_list": [".moment1_0"], "prefix": "m"}
    statements = {"aoa_statements": ["m.b^T -> m.turned"]}
    reports = merge(tmp_path / "in", tmp_path / "out", 2, aoa_config=statements, **options)
    found = read_merged(tmp_path / "out", "merged")
    assert sorted(found) == ["a", "a.w_0", "turned"]
    assert np.array_equal(found["turned"], state["m.b"].T)
    assert reports[0].left_out == 1


def test_a_merge_that_fails_leaves_nothing_behind(path, tmp_path):
    out = tmp_path / "out"
    (path / data_file(path, 1)).unlink()
    with pytest.raises(CorruptCheckpointError, match=r"1_0-\w+\.safetensors is missing"):
        merge(path, out)
    assert not out.exists()
    with pytest.raises(ValidationError, match="does not exist"):
        merge(path / "nowhere", out)
    with pytest.raises(ValidationError, match="skip_postfix_list has to be a list of ends of keys; got 'moment'"):
        merge(path, out, skip_postfix_list="moment")
    with pytest.raises(ValidationError, match="safetensor_prefix has to be the start of a file's name; got 'a/b'"):
        merge(path, out, safetensor_prefix="a/b")
    assert not out.exists()

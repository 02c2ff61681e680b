"""Paddle's own loader on directories of this library: what was saved, bit for bit, or an error that says why not."""

from __future__ import annotations

import os

import ml_dtypes
import numpy as np
import pytest

from paddle_flexckpt.catalog import Catalog, UnsafePickleError
from paddle_flexckpt.catalog.metadata import LocalTensorIndex
from paddle_flexckpt.foreign.paddle_files import open_to_save
from paddle_flexckpt.foreign.pickle_reader import load_pickle
from paddle_flexckpt.manager import CheckpointManager, KeepLatest
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.sharded_weight import FusedAxis, ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.tools.verification import repair_manifest
from tests.manager.samples import listed
from tests.native.samples import store, whole
from tests.property.layouts import Shard

paddle = pytest.importorskip("paddle")
loader = pytest.importorskip("paddle.distributed.flex_checkpoint.dcp.load_state_dict")
pytestmark = pytest.mark.paddle

PADDLE_METADATA = "flex-ckpt.auto_generated.metadata"


@pytest.fixture(autouse=True)
def forget():
    """What Paddle keeps of a load, also of one that failed, is not to be the next one's."""
    yield
    loader._metadata_manager.clear()
    loader.PATH_TO_CHECKPOINT_FILES.clear()


def values(version: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(version)

    def bits(dtype, shape):
        raw = generator.integers(0, 256, int(np.prod(shape)) * np.dtype(dtype).itemsize, dtype=np.uint8)
        return raw.view(dtype).reshape(shape)

    return {
        "rows": bits(ml_dtypes.bfloat16, (7, 3)),
        "columns": bits(np.float32, (3, 8)),
        "flat": bits(np.float32, (5, 4)),
        "flat bias": bits(np.float64, (9,)),
        "replicated": bits(np.float32, (700, 500)),
        "step": np.asarray(version, dtype=np.float32),
    }


def shards(version: int, rank: int, size: int) -> dict[str, ShardedWeight]:
    found = {}
    for key, value in values(version).items():
        if key.startswith("flat"):
            begin, end = (value.size * each // size for each in (rank, rank + 1))
            part = value.reshape(-1)[begin:end].copy()
            offset = (0,) * value.ndim
            found[key] = ShardedWeight(key, part, value.shape, value.shape, offset, True, slice(begin, end))
        elif key in ("rows", "columns"):
            axis = key == "columns"
            begin, end = (value.shape[axis] * each // size for each in (rank, rank + 1))
            part = np.ascontiguousarray(value[:, begin:end] if axis else value[begin:end])
            found[key] = ShardedWeight(key, part, part.shape, value.shape, (0, begin) if axis else (begin, 0))
        else:
            found[key] = ShardedWeight(key, value, value.shape, value.shape, (0,) * value.ndim)
    return found


def save(path, version: int, size: int = 3, unique_id: int | None = 0, **options) -> None:
    SimulatedWorld(size).run(
        lambda comm: save_state_dict(shards(version, comm.position, size), path, comm, unique_id=unique_id, **options)
    )


def raw(tensor) -> bytes:
    return np.ascontiguousarray(tensor.numpy()).tobytes()


def read(path, **options) -> int:
    """The version that Paddle reads, both ways that it has in one process; nothing is left in the directory."""
    before = sorted(os.listdir(path))
    merged = paddle.distributed.load_merged_state_dict(str(path), safetensors=True, **options)
    version = int(merged["step"])
    expected = values(version)
    state = {key: paddle.zeros(value.shape, dtype=value.dtype.name) for key, value in expected.items()}
    paddle.distributed.load_state_dict(state, str(path), safetensors=True, **options)
    for found in (merged, state):
        assert {key: raw(tensor) for key, tensor in found.items()} == {
            key: value.tobytes() for key, value in expected.items()
        }
        assert {key: tuple(tensor.shape) for key, tensor in found.items()} == {
            key: value.shape for key, value in expected.items()
        }
    assert sorted(os.listdir(path)) == before
    return version


def why_not(path, **options) -> str:
    """What Paddle's error says; it is the same whole or merged."""
    loader._metadata_manager.clear()
    before = sorted(os.listdir(path))
    with pytest.raises((ModuleNotFoundError, AssertionError)) as merged:
        paddle.distributed.load_merged_state_dict(str(path), safetensors=True, **options)
    loader._metadata_manager.clear()
    with pytest.raises(merged.type) as caught:
        paddle.distributed.load_state_dict({"rows": paddle.zeros([7, 3])}, str(path), safetensors=True, **options)
    assert sorted(os.listdir(path)) == before
    assert "paddle_flexckpt" in str(merged.value)
    return str(merged.value) if str(caught.value) == str(merged.value) else f"{merged.value} {caught.value}"


@pytest.mark.parametrize("options", [{}, {"save_replicas": True}], ids=["once", "replicas"])
def test_what_was_saved_is_read(tmp_path, options):
    save(tmp_path, 1, **options)
    assert read(tmp_path) == 1


def test_every_element_type(tmp_path):
    names = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "complex64", "float8_e4m3fn", "float8_e5m2"]
    stored = store(tmp_path, [whole(name, name, (3, 2)) for name in names])
    open_to_save(tmp_path).write_manifest(stored.manifest)
    merged = paddle.distributed.load_merged_state_dict(str(tmp_path), safetensors=True)
    assert {key: raw(tensor) for key, tensor in merged.items()} == {
        shard.key: value.tobytes() for shard, value in zip(stored.shards, stored.values)
    }


def test_any_id_that_has_been_replaced(tmp_path):
    save(tmp_path, 1, unique_id=13)
    assert read(tmp_path) == read(tmp_path, unique_id=13) == 1
    for version in (2, 3):
        save(tmp_path, version, size=version, unique_id=13)
        assert read(tmp_path) == version


def test_a_url_of_the_local_file_system(tmp_path):
    save(f"file://{tmp_path}", 4)
    assert read(tmp_path) == 4


def test_several_ids_are_refused_until_one_is_alone(tmp_path):
    for version in (0, 1):
        save(tmp_path, version, unique_id=None)
    for options in ({}, {"unique_id": 0}, {"unique_id": 1}):
        assert "several" in why_not(tmp_path, **options)
    os.unlink(tmp_path / "0.manifest")
    repair_manifest(tmp_path, 1, overwrite=True)
    assert read(tmp_path) == 1


def test_what_is_not_committed_is_refused(tmp_path):
    directory = open_to_save(tmp_path)
    ticket = directory.open_save(0)
    (tmp_path / ticket.data_file(0)).write_bytes(b"")
    assert "no save here has been completed" in why_not(tmp_path)
    directory.discard(ticket, [0])
    assert os.listdir(tmp_path) == []


def test_without_safetensors_paddle_fails(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(ValueError, match="can not parse the file"):
        paddle.distributed.load_state_dict({"rows": paddle.zeros([7, 3])}, str(tmp_path))


def test_a_removed_step_leaves_nothing(tmp_path):
    manager = CheckpointManager(tmp_path, keep=[KeepLatest(1)], process_group="self")
    for step in (1, 2):
        manager.save(step, state={"w": paddle.full([2], step)}, rng=False)
    assert listed(tmp_path) == ["step_00000002"]
    merged = paddle.distributed.load_merged_state_dict(str(tmp_path / "step_00000002"), safetensors=True)
    assert merged["w"].tolist() == [2.0, 2.0]


OVER = np.arange(12.0).reshape(4, 3)
REFUSED = {
    "an empty tensor": ({"w": np.zeros((0, 3), np.float32)}, {}, "a tensor without elements"),
    "complex128": ({"w": np.zeros(3, np.complex128)}, {}, "tensors of complex128"),
    "its name": ({"__metadata__": np.zeros(3, np.float32)}, {}, "a tensor called __metadata__"),
    "overlap": (
        {"w": OVER},
        {"w": ShardedWeight("w", OVER[1:3].copy(), (2, 3), (4, 3), (1, 0))},
        "shards of one tensor overlap",
    ),
    "fused": (
        {"w": ShardedWeight("w", OVER[:, :2].copy(), (4, 2), (4, 4), (0, 0), fused=FusedAxis(1, "fused_ffn"))},
        {"w": ShardedWeight("w", OVER[:, :2].copy(), (4, 2), (4, 4), (0, 2), fused=FusedAxis(1, "fused_ffn"))},
        "fused parameters, which lie in another order",
    ),
    "inside a row": (
        {"w": ShardedWeight("w", OVER.reshape(-1)[:2].copy(), (4, 3), (4, 3), (0, 0), True, slice(0, 2))},
        {"w": ShardedWeight("w", OVER.reshape(-1)[2:].copy(), (4, 3), (4, 3), (0, 0), True, slice(2, 12))},
        "cross rows meet ranges inside a row",
    ),
    "three axes": (
        {"w": ShardedWeight("w", np.zeros(5), (2, 2, 3), (2, 2, 3), (0, 0, 0), True, slice(0, 5))},
        {"w": ShardedWeight("w", np.zeros(7), (2, 2, 3), (2, 2, 3), (0, 0, 0), True, slice(5, 12))},
        "three or more axes begins or ends inside a row",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_paddle_would_read_wrong_is_refused(tmp_path, name):
    *states, reason = REFUSED[name]
    SimulatedWorld(2).run(lambda comm: save_state_dict(states[comm.position], tmp_path, comm))
    keys = dict.fromkeys(key for state in states for key in state)
    state = {key: paddle.zeros([3]) for key in keys}
    with pytest.raises(AssertionError, match=reason):
        paddle.distributed.load_state_dict(state, str(tmp_path), safetensors=True)
    # Which keys there are can be told nevertheless.
    assert paddle.load(str(tmp_path / PADDLE_METADATA)).state_dict_metadata.keys() == keys.keys()


def test_several_shards_of_a_tensor_in_one_file_are_refused(tmp_path):
    from paddle_flexckpt.foreign.paddle_files import PaddleMetadata

    pieces = [Shard("w", "float32", (4, 3), (row, 0), (2, 3), None, 0) for row in (0, 2)]
    metadata = load_pickle(PaddleMetadata().encode(store(tmp_path, pieces).manifest), "m")
    assert all("several shards of one tensor" in file for file in metadata.storage_metadata.values())


def test_the_file_is_plain_data_and_small(tmp_path):
    """No class but the three of Paddle's is named in it, and 10,000 tensors take a megabyte or two."""
    from paddle_flexckpt.foreign.paddle_files import PaddleMetadata

    save(tmp_path, 1)
    content = (tmp_path / PADDLE_METADATA).read_bytes()
    metadata = load_pickle(content, PADDLE_METADATA)
    ours, theirs = vars(metadata), vars(paddle.load(str(tmp_path / PADDLE_METADATA)))
    assert str(ours) == str(theirs)
    assert {type(index) for index in metadata.storage_metadata} == {LocalTensorIndex}
    catalog: Catalog = CheckpointDirectory(tmp_path).read_manifest().catalog
    assert len(metadata.storage_metadata) == len(catalog)
    (tmp_path / "many").mkdir()
    many = store(tmp_path / "many", [whole(f"layers.{i}.w", "float32", (4, i % 7 + 1)) for i in range(10_000)])
    assert len(PaddleMetadata().encode(many.manifest)) < 2_500_000


def test_a_refusal_is_no_data(tmp_path):
    open_to_save(tmp_path).open_save(0)
    with pytest.raises(UnsafePickleError):
        load_pickle((tmp_path / PADDLE_METADATA).read_bytes(), PADDLE_METADATA)

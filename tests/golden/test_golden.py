"""Checkpoints of every released version of the format load, for ever, bit for bit."""

from __future__ import annotations

import hashlib
import json
import os
import shutil

import numpy as np
import pytest

from paddle_flexckpt.foreign.paddle_files import PADDLE_METADATA, open_to_save
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.native.directory import CheckpointDirectory, list_checkpoints
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.sharded_weight import ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.tools.verification import repair_manifest, verify_checkpoint
from paddle_flexckpt.tools.whole_tensors import iterate_tensors
from tests.golden.make import DTYPES_AND_SHAPES, FUSED, HERE, PARTITIONED, SHARDED, fused, fused_parts, value_of
from tests.saved import data_file

VERSIONS = ["v1"]
CHECKPOINTS = {"sharded": (4, None, 2), "replaced": (0, 2, 2), "replicas": (0, 9, 2), "dtypes": (0, None, 1)}


def tensors_of(name: str):
    return DTYPES_AND_SHAPES if name == "dtypes" else SHARDED


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_tensor_is_what_it_was(version, name):
    directory = CheckpointDirectory(HERE / version / name)
    manifest = directory.read_manifest()
    assert (manifest.unique_id, manifest.step, manifest.world_size) == CHECKPOINTS[name]
    digests = json.loads((HERE / version / "expected.json").read_text())
    found = dict(iterate_tensors(directory.backend, manifest, verify="full"))
    assert found.keys() == tensors_of(name).keys()
    for key, array in found.items():
        dtype, shape = tensors_of(name)[key]
        assert array.shape == shape
        assert array.tobytes() == value_of(key, dtype, shape).tobytes()
        assert hashlib.sha256(array.tobytes()).hexdigest() == digests[key]
    report = verify_checkpoint(directory.backend)
    assert report.ok, report.problems
    assert report.bytes_verified == report.total_bytes > 0


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["sharded", "replaced", "replicas"])
def test_another_layout(version, name):
    """Three ranks, cut by rows where the save cut by columns, and the other way round."""
    cuts = {"model.embed.weight": 1, "model.out.weight": 0}

    def job(comm):
        state = {}
        for key, (dtype, shape) in SHARDED.items():
            axis = cuts.get(key)
            box, offset = list(shape), [0] * len(shape)
            if axis is not None:
                box[axis] = shape[axis] // 3 + (comm.position < shape[axis] % 3)
                offset[axis] = comm.position * (shape[axis] // 3) + min(comm.position, shape[axis] % 3)
            part = value_of(key, dtype, shape)[tuple(slice(o, o + n) for o, n in zip(offset, box))]
            target = np.zeros(box, dtype=part.dtype)
            state[key] = (ShardedWeight("", target, tuple(box), shape, tuple(offset)), part)
        load_state_dict({key: shard for key, (shard, _) in state.items()}, HERE / version / name, comm, strict=True)
        return all(shard.local_tensor.tobytes() == part.tobytes() for shard, part in state.values())

    assert SimulatedWorld(3).run(job) == [True] * 3


@pytest.mark.parametrize("version", VERSIONS)
def test_the_list(version):
    found = {os.path.basename(info.path): info for info in list_checkpoints(HERE / version)}
    expected = {**CHECKPOINTS, "extra_state": (0, 3, 1)}
    assert {name: (i.unique_id, i.step, i.world_size) for name, i in found.items()} == expected
    assert all(info.complete for info in found.values())


@pytest.mark.parametrize("version", VERSIONS)
def test_a_lost_manifest_is_rebuilt(version, tmp_path):
    source = HERE / version / "sharded"
    for file in source.iterdir():
        if file.suffix != ".manifest":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    repair_manifest(tmp_path, 4)
    assert verify_checkpoint(tmp_path).ok
    again, was = (CheckpointDirectory(path).read_manifest(4) for path in (tmp_path, source))
    assert again.checksums.values.tolist() == was.checksums.values.tolist()
    assert again.save_token == was.save_token


OLD_NAMES = ["v1/sharded", "v1/replaced", "v1/replicas", "v1/dtypes", "v2/fused", "v3/partitioned"]


@pytest.fixture(params=OLD_NAMES)
def old(request, tmp_path):
    """A copy of a checkpoint whose files have names without tokens."""
    return shutil.copytree(HERE / request.param, tmp_path / "old")


def test_checkpoints_with_names_of_older_versions_are_replaced_and_leave_nothing(old):
    (unique_id,) = CheckpointDirectory(old).list_ids()
    state = {"w": np.arange(4.0)}
    save_state_dict(state, old, SoloCommunicator(), unique_id=unique_id)
    assert len(os.listdir(old)) == 3 and data_file(old, 0, unique_id) in os.listdir(old)
    found = {"w": np.zeros(4)}
    load_state_dict(found, old, SoloCommunicator())
    assert found["w"].tolist() == [0, 1, 2, 3]


def test_they_stay_whole_when_saves_of_their_id_die_or_others_are_made(old):
    before = sorted(os.listdir(old))
    (unique_id,) = CheckpointDirectory(old).list_ids()
    for name in (f"0_{unique_id}.9.safetensors", f"0_{unique_id}.9-{'a' * 32}.part", f"{unique_id}.9.saving"):
        (old / name).write_bytes(b"of a dead save of an older version")
    dead = open_to_save(old).open_save(unique_id)
    (old / dead.data_file(0)).write_bytes(b"half")
    other = save_state_dict({"w": np.arange(4.0)}, old, SoloCommunicator())
    new = {data_file(old, 0, other.unique_id), f"{other.unique_id}.manifest", PADDLE_METADATA}
    assert other.unique_id == unique_id + 1 and sorted({*os.listdir(old)} - new) == before
    assert all(info.complete for info in list_checkpoints(old))
    assert verify_checkpoint(old, unique_id).ok


def test_a_late_rank_of_a_save_with_an_older_manifest_in_place_removes_its_files(old):
    before = sorted(os.listdir(old))
    (unique_id,) = CheckpointDirectory(old).list_ids()
    directory = open_to_save(old)
    dead = directory.open_save(unique_id)
    directory.cleaner.remove_dead_saves()
    (old / dead.data_file(1)).write_bytes(b"late")
    directory.discard_late(dead, [1])
    assert sorted({*os.listdir(old)} - {PADDLE_METADATA}) == before


@pytest.mark.parametrize("version", VERSIONS)
def test_extra_state(version):
    paddle = pytest.importorskip("paddle")
    from paddle_flexckpt.run_state import load_extra_state, restore_extra_state

    scheduler = paddle.optimizer.lr.StepDecay(0.5, step_size=2, gamma=0.25)
    state = load_extra_state(HERE / version / "extra_state")
    report = restore_extra_state(state, scheduler, rng=False)
    assert (report.step, report.dataloader) == (3, {"epoch": 1, "seen": [4, 5]})
    assert report.more["ema"].tolist() == [0, 1, 2]
    assert (report.more["tokens"], report.more["note"]) == (10**12, "é")
    assert (scheduler.last_epoch, scheduler.last_lr) == (3, 0.125)
    assert report.not_restored == {}
    assert sorted(report.restored) == ["dataloader", "lr_scheduler"]


def test_fused_parameters_of_version_2():
    """Version 2 says in how many parts a tensor lies: whole it is in natural order, and shards are of any degree."""
    directory = CheckpointDirectory(HERE / "v2" / "fused")
    manifest = directory.read_manifest()
    assert (manifest.format_version, manifest.step, manifest.world_size) == ("2", 5, 2)
    assert verify_checkpoint(directory.backend).ok
    for key, array in iterate_tensors(directory.backend, manifest, verify="full"):
        assert array.tobytes() == value_of(key, *FUSED[key]).tobytes(), key

    def load(comm):
        state = fused(comm.position, comm.size)
        for weight in state.values():
            weight.local_tensor[...] = 0
        load_state_dict(state, directory.backend, comm, strict=True)
        return {key: weight.local_tensor.tobytes() for key, weight in state.items()}

    for degree in (1, 2):
        for rank, found in enumerate(SimulatedWorld(degree).run(load)):
            assert found == {key: fused_parts(key, degree)[rank].tobytes() for key in FUSED}


def test_a_manifest_in_partitions():
    directory = CheckpointDirectory(HERE / "v3" / "partitioned")
    manifest = directory.read_manifest()
    assert (manifest.format_version, manifest.step, manifest.world_size, len(manifest.partitions)) == ("3", 2, 2, 5)
    found = dict(iterate_tensors(directory.backend, manifest, names=sorted(PARTITIONED), verify="full"))
    assert {key: array.tobytes() for key, array in found.items()} == {
        key: value_of(key, *what).tobytes() for key, what in PARTITIONED.items()
    }
    for key in PARTITIONED:
        one = directory.read_manifest(keys=[key])
        assert key in one.catalog.keys and len(one.catalog) < manifest.rows
    report = verify_checkpoint(directory.backend)
    assert report.ok, report.problems
    assert [info.complete for info in list_checkpoints(HERE / "v3")] == [True]

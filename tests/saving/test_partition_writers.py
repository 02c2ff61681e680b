"""Manifests of spread saves: each rank writes partitions, and nobody has all rows."""

from __future__ import annotations

import os
import threading
from collections import defaultdict

import numpy as np
import pytest

from paddle_flexckpt.catalog import Catalog, CheckpointError, ValidationError
from paddle_flexckpt.catalog.dtypes import DTYPES
from paddle_flexckpt.foreign.paddle_files import PaddleMetadata
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.media.local import LocalBackend
from paddle_flexckpt.native import partitions
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.native.partitions import partition_of
from paddle_flexckpt.native.save_directory import SaveDirectory
from paddle_flexckpt.saving import partition_writers, planners
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.sharded_weight import FusedAxis, ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.tools.verification import repair_manifest, verify_checkpoint
from tests.saved import data_file, named, short, short_names

# Agree; rows to planners, lines to their owners, and back; items; write; what was compared; commit.
COLLECTIVES = 8


@pytest.fixture(autouse=True)
def spread(monkeypatch):
    monkeypatch.setattr(planners, "SPREAD_ROWS", -1)
    monkeypatch.setattr(partitions, "ROWS_PER_PARTITION", 8)


def state_of(rank: int, world: int, tensors: int = 12, salt: float = 0) -> dict:
    """Cuts of some tensors, of which two ranks each have a replica, others of one rank, and extra state."""
    cuts, state = max(1, world // 2), {}
    for i in range(tensors):
        values = np.arange(4 * (3 + i % 5), dtype=np.float32).reshape(4, -1) + 100 * i + rank % cuts + salt
        cut = rank % cuts * 4
        weight = ShardedWeight(f"layers.{i}.weight", values, values.shape, (4 * cuts, 3 + i % 5), (cut, 0))
        if i == 1:
            weight.fused = FusedAxis(0, parts=2, statement="fused_ffn")
        state[weight.key] = weight
    flat = np.arange(5, dtype=np.int64) + 5 * (rank % cuts) + int(salt)
    state["flat"] = ShardedWeight(
        "flat", flat, (5 * cuts,), (5 * cuts,), (0,), True, slice(5 * (rank % cuts), 5 * (rank % cuts) + 5)
    )
    state[f"own.{rank}"] = np.full((2, 2, 2 + rank), rank + salt, dtype=np.float64)
    state["none"] = np.zeros((0, 3), dtype=np.float32)
    return state


def save_all(path, world, **options):
    states = [state_of(rank, world, options.pop("tensors", 12) if not rank else 12) for rank in range(world)]

    def job(comm):
        return save_state_dict(states[comm.position], path, comm, **options), comm.collectives

    return SimulatedWorld(world).run(job)


def check_values(path, world, unique_id=None, salt=0):
    """Every rank's state as it was saved, bit for bit."""

    def job(comm):
        expected, target = state_of(comm.rank, world, salt=salt), state_of(comm.rank, world, salt=7 + salt)
        load_state_dict(target, path, comm, unique_id=unique_id, verify="full")
        for key, value in expected.items():
            one, other = (getattr(each, "local_tensor", each) for each in (value, target[key]))
            assert one.tobytes() == other.tobytes(), key

    SimulatedWorld(world).run(job)


def rows_of(path):
    """All rows of a checkpoint, with checksums and orders, in an order of their own."""
    manifest = CheckpointDirectory(path).read_manifest()
    catalog, found = manifest.catalog, []
    others = [
        name for name in Catalog.COLUMNS if name not in ("key", "dtype", "file", "global_shape", "offset", "shape")
    ]
    for row in range(len(catalog)):
        boxes = [catalog.unpadded(row, column) for column in (catalog.global_shape, catalog.offset, catalog.shape)]
        order = catalog.order(int(catalog.key[row]))
        found.append(
            (
                catalog.key_name(row), catalog.dtype_name(row), short(catalog.file_name(row)), *map(tuple, boxes),
                *(int(getattr(catalog, name)[row]) for name in others),
                tuple(manifest.checksums.of_item(row).tolist()), order and order.describe(),
            )
        )  # fmt: skip
    return sorted(found, key=repr), {short(name): size for name, size in manifest.sizes.items()}


def files(path):
    return sorted(os.listdir(path))


@pytest.mark.parametrize(("world", "per_partition"), [(6, 8), (6, 1000), (3, 1), (8, 20)])
def test_the_rows_are_those_that_the_coordinator_would_have_written(world, per_partition, tmp_path, monkeypatch):
    monkeypatch.setattr(partitions, "ROWS_PER_PARTITION", per_partition)
    found = save_all(tmp_path / "several", world)
    assert {collectives for _, collectives in found} == {COLLECTIVES}
    monkeypatch.setattr(planners, "partitions_for", lambda count: 0)
    save_all(tmp_path / "one", world)
    several, one = (CheckpointDirectory(tmp_path / name).read_manifest(keys=()) for name in ("several", "one"))
    assert (several.format_version, one.format_version) == ("3", "2")
    assert len(several.partitions) == -(-one.rows // per_partition)
    assert (several.rows, several.key_count, several.data_bytes) == (one.rows, one.key_count, one.data_bytes)
    assert (several.step, several.world_size, several.unique_id) == (one.step, one.world_size, one.unique_id)
    assert short_names(several.catalog.files) == short_names(one.catalog.files)
    assert rows_of(tmp_path / "several") == rows_of(tmp_path / "one")
    assert set(files(tmp_path / "several")) == {*several.files, "0.manifest", PaddleMetadata.name}
    check_values(tmp_path / "several", world)
    assert verify_checkpoint(tmp_path / "several").ok


def watched(monkeypatch):
    """By rank: which files it creates, reads and opens."""
    done = defaultdict(list)
    place = {}

    for name in ("create", "read", "open", "remove", "names"):
        original = getattr(LocalBackend, name)

        def call(self, *arguments, name=name, original=original, **options):
            done[place.get(threading.get_ident())].append((name, *arguments[:1]))
            return original(self, *arguments, **options)

        monkeypatch.setattr(LocalBackend, name, call)
    return done, place


def saved_watched(path, world, monkeypatch, states, **options):
    with monkeypatch.context() as patch:
        done, place = watched(patch)
        received = defaultdict(list)

        def job(comm):
            place[threading.get_ident()] = comm.position
            exchange = comm._all_to_all

            def counted(note, payloads):
                notes, own = exchange(note, payloads)
                received[comm.position].append({source: len(each) for source, each in own.items()})
                return notes, own

            comm._all_to_all = counted
            return save_state_dict(states[comm.position], path, comm, **options)

        SimulatedWorld(world).run(job)
    return done, received


def test_each_rank_writes_its_own_partitions_and_the_coordinator_reads_no_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(PaddleMetadata, "most_rows", 0)
    world, found, described = 4, {}, []
    manifest = partition_writers.PartitionWriter.manifest

    def counted(self, told):
        described.append(sum(map(len, told)))
        return manifest(self, told)

    monkeypatch.setattr(partition_writers.PartitionWriter, "manifest", counted)
    for tensors in (40, 160):
        monkeypatch.setattr(partitions, "ROWS_PER_PARTITION", tensors // 4)
        states = [state_of(rank, world, tensors) for rank in range(world)]
        done, received = saved_watched(tmp_path / str(tensors), world, monkeypatch, states)
        count = len(CheckpointDirectory(tmp_path / str(tensors)).read_manifest(keys=()).partitions)
        assert count > 2 * world
        for rank in range(world):
            created = {each[1] for each in done[rank] if each[0] == "create" and each[1].endswith("partition")}
            assert {*map(short, created)} == {f"{number}_0-1.partition" for number in range(rank, count, world)}
            assert not [each for each in done[rank] if each[-1].endswith(".part")]
            # A data file of another rank is looked at; nobody opens all.
            opened = [each[1] for each in done[rank] if each[0] == "open" and each[1].endswith("safetensors")]
            assert list(map(short, opened)) == [f"{(rank - 1) % world}_0-1.safetensors"]
        assert not [each for each in done[0] if each[0] in ("read", "open") and each[1].endswith("partition")]
        rows = [sum(received[rank][-2].values()) for rank in range(world)]
        # The coordinator is told of rows what any other is: a fourth of them.
        assert rows[0] < 1.6 * max(rows[1:])
        # And of each partition 52 bytes, however many rows it has.
        found[tensors] = count, described.pop()
        assert found[tensors][1] <= 52 * count
    assert len(set(found.values())) == 1


def test_operations_of_the_coordinator_do_not_grow_with_the_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(PaddleMetadata, "most_rows", 0)
    monkeypatch.setattr(partitions, "ROWS_PER_PARTITION", 1000)
    counts = []
    for world in (4, 16):
        states = [state_of(rank, world) for rank in range(world)]
        done, _ = saved_watched(tmp_path / str(world), world, monkeypatch, states)
        counts.append(len(done[0]))
        assert {len(done[rank]) for rank in range(1, world)} == {2}
    assert counts[0] == counts[1]


def test_keys_are_where_readers_look_for_them(tmp_path):
    save_all(tmp_path, 5)
    manifest = CheckpointDirectory(tmp_path).read_manifest(keys=())
    for key in ("flat", "own.3", "layers.1.weight", "none"):
        found = CheckpointDirectory(tmp_path).read_manifest(keys=[key])
        assert 0 < len(found.catalog) < manifest.rows
        assert key in found.catalog.keys
        number = int(partition_of([key], len(manifest.partitions))[0])
        assert len(found.catalog) == manifest.partitions[number].rows


def test_a_kept_plan_writes_partitions_again(tmp_path):
    world, states = 4, [state_of(rank, 4) for rank in range(4)]

    def job(comm):
        for step in range(3):
            for value in states[comm.rank].values():
                getattr(value, "local_tensor", value)[...] += 1
            before = comm.collectives
            save_state_dict(states[comm.rank], tmp_path, comm, unique_id=step)
            assert comm.collectives - before == (COLLECTIVES - 4 if step else COLLECTIVES)

    SimulatedWorld(world).run(job)
    for step in range(3):
        assert CheckpointDirectory(tmp_path).read_manifest(step, keys=()).partitions
        check_values(tmp_path, world, step, salt=1 + step)


def test_an_overwritten_id_has_its_own_partitions_alone(tmp_path, monkeypatch):
    save_all(tmp_path, 4)
    old = CheckpointDirectory(tmp_path).read_manifest(keys=()).files
    monkeypatch.setattr(partitions, "ROWS_PER_PARTITION", 5)
    save_all(tmp_path, 4, unique_id=0)
    new = CheckpointDirectory(tmp_path).read_manifest(keys=()).files
    assert not set(old) & set(new)
    assert set(files(tmp_path)) == {*new, "0.manifest", PaddleMetadata.name}
    check_values(tmp_path, 4)


def failing(monkeypatch, suffix, number):
    create = LocalBackend.create

    def fail(self, name, *arguments, **options):
        if name.startswith(f"{number}_") and name.endswith(suffix):
            raise OSError(122, "quota exceeded", name)
        return create(self, name, *arguments, **options)

    monkeypatch.setattr(LocalBackend, "create", fail)


@pytest.mark.parametrize("overwrites", [False, True])
def test_a_rank_that_cannot_write_its_partition_is_everybodys_error(overwrites, tmp_path, monkeypatch):
    world = 4
    if overwrites:
        save_all(tmp_path, world)
    before = files(tmp_path)
    states = [state_of(rank, world, salt=3) for rank in range(world)]

    def job(comm):
        with pytest.raises(CheckpointError) as found:
            save_state_dict(states[comm.position], tmp_path, comm, unique_id=0)
        return str(found.value)

    with monkeypatch.context() as patch:
        failing(patch, ".partition", 3)
        texts = SimulatedWorld(world).run(job)
    assert len(set(texts)) == 1
    assert "rank 3" in texts[0] and "quota exceeded" in texts[0] and "cannot save to" in texts[0]
    assert files(tmp_path) == before
    if overwrites:
        check_values(tmp_path, world)
    save_all(tmp_path, world, unique_id=0)
    check_values(tmp_path, world)


def test_replicas_that_differ_leave_no_partition(tmp_path):
    states = [state_of(rank, 4) for rank in range(4)]
    states[3]["layers.5.weight"].local_tensor[...] += 1

    def job(comm):
        with pytest.raises(ValidationError, match="replicas of one shard differ"):
            save_state_dict(states[comm.position], tmp_path, comm, check_replicas="all")

    SimulatedWorld(4).run(job)
    assert files(tmp_path) == []


@pytest.mark.parametrize("victim", ["2_0-1.safetensors", "1_0-1.partition"])
def test_a_file_that_somebody_removes_is_missed_before_the_commit(victim, tmp_path, monkeypatch):
    world, states = 4, [state_of(rank, 4) for rank in range(4)]
    commit = SaveDirectory.commit_manifest

    def removed(self, *arguments, **options):
        os.remove(tmp_path / named(tmp_path, victim))
        return commit(self, *arguments, **options)

    monkeypatch.setattr(SaveDirectory, "commit_manifest", removed)

    def job(comm):
        with pytest.raises(CheckpointError) as found:
            save_state_dict(states[comm.position], tmp_path, comm)
        return str(found.value)

    texts = SimulatedWorld(world).run(job)
    assert len(set(texts)) == 1
    assert "nothing was committed, as somebody else has changed the files of this save" in texts[0]
    assert victim in short(texts[0]) and "missing" in texts[0]
    assert "0.manifest" not in files(tmp_path)
    monkeypatch.undo()
    save_all(tmp_path, world)
    assert len(CheckpointDirectory(tmp_path).list_ids()) == 1


def test_a_data_file_that_somebody_cuts_is_found_out(tmp_path, monkeypatch):
    world, states = 4, [state_of(rank, 4) for rank in range(4)]
    write = partition_writers.PartitionWriter.write

    def cut(self, *arguments):
        if self._comm.position == 2:
            os.truncate(tmp_path / data_file(tmp_path, 1), 100)
        return write(self, *arguments)

    monkeypatch.setattr(partition_writers.PartitionWriter, "write", cut)

    def job(comm):
        with pytest.raises(CheckpointError, match=r"1_0-\w+\.safetensors has 100 bytes; expected \d+") as found:
            save_state_dict(states[comm.position], tmp_path, comm)
        return str(found.value)

    assert len(set(SimulatedWorld(world).run(job))) == 1
    assert files(tmp_path) == []


def test_rows_that_get_lost_on_the_way_are_missed(tmp_path, monkeypatch):
    world, states = 4, [state_of(rank, 4) for rank in range(4)]
    encode = partition_writers.encode_part

    def forget(part, count):
        messages = encode(part, count)
        if short_names(part.catalog.files) == ["3_0-1.safetensors"]:
            messages.popitem()
        return messages

    monkeypatch.setattr(partition_writers, "encode_part", forget)

    def job(comm):
        with pytest.raises(CheckpointError, match=r"partitions of the manifest have \d+ rows .*; ranks wrote \d+"):
            save_state_dict(states[comm.position], tmp_path, comm)

    SimulatedWorld(world).run(job)
    assert "0.manifest" not in files(tmp_path)


def test_the_manifest_is_repaired_from_data_files(tmp_path):
    save_all(tmp_path, 4)
    before = rows_of(tmp_path)
    os.remove(tmp_path / "0.manifest")
    for name in files(tmp_path):
        if name.endswith(".partition"):
            os.remove(tmp_path / name)
    repair_manifest(tmp_path, 0)
    # What headers do not say is which orders are the natural ones.
    bare = [[row[:-1] for row in rows] for rows in (before[0], rows_of(tmp_path)[0])]
    assert bare[0] == bare[1]
    assert rows_of(tmp_path)[1] == before[1]
    check_values(tmp_path, 4)


def test_groups_of_other_ranks_write_partitions_too(tmp_path):
    ranks = (3, 7, 10)
    states = [state_of(place, 3) for place in range(3)]
    SimulatedWorld(3).run(lambda comm: save_state_dict(states[comm.position], tmp_path, comm), ranks)
    manifest = CheckpointDirectory(tmp_path).read_manifest()
    assert manifest.partitions
    assert {*manifest.catalog.rank.tolist()} == {3, 7, 10}
    target = {"own.1": np.zeros((2, 2, 3))}
    SimulatedWorld(1).run(lambda comm: load_state_dict(target, tmp_path, comm))
    assert (target["own.1"] == 1).all()


def test_ranks_write_partitions_to_an_object_store(monkeypatch):
    fsspec = pytest.importorskip("fsspec")
    url, world = "memory://flexckpt-partitions/run", 4
    monkeypatch.setattr(partitions, "ROWS_PER_PARTITION", 4)
    try:
        for unique_id in (0, 1):
            save_all(url, world, unique_id=unique_id)
        directory = CheckpointDirectory(url)
        several = directory.read_manifest(1, keys=())
        assert len(several.partitions) > world
        assert set(directory.backend.names()) == {
            *several.files, *directory.read_manifest(0, keys=()).files, "0.manifest", "1.manifest"
        }  # fmt: skip
        check_values(url, world, 1)
    finally:
        fsspec.filesystem("memory").store.clear()


def test_messages_of_rows_keep_every_column():
    part, count = random_part(np.random.default_rng(3)), 5
    messages = partition_writers.encode_part(part, count)
    assert sorted(messages) == sorted(set(partition_of(part.catalog.keys, count).tolist()))
    for number, message in messages.items():
        rows = partition_writers.decode_parts({0: message}, (4,), np.zeros(1, np.int64), part.info, "{}_0".format)
        mine = part.take(np.flatnonzero(partition_of(part.catalog.keys, count)[part.catalog.key] == number))
        assert rows.catalog.keys == mine.catalog.keys
        for name in Catalog.COLUMNS:
            if name not in ("dtype", "file"):
                assert getattr(rows.catalog, name).tolist() == getattr(mine.catalog, name).tolist(), name
        names = [[each.dtype_name(i) for i in range(len(each))] for each in (rows.catalog, mine.catalog)]
        assert names[0] == names[1]
        assert rows.checksums.values.tolist() == mine.checksums.values.tolist()
        assert rows.checksums.first.tolist() == mine.checksums.first.tolist()


def random_part(generator):
    """A part with long and short items, of all dtypes, in one file beyond 4 GiB; its rows by key."""
    from paddle_flexckpt.catalog import CatalogBuilder
    from paddle_flexckpt.native.manifest import Manifest, SaveInfo

    builder, offset = CatalogBuilder(4, "4_0"), 1 << 33
    for i, dtype in enumerate(DTYPES):
        shape = (int(generator.integers(1, 9)), 1 + int(generator.integers(1 << 20)))
        for half in range(2):
            builder.add(
                f"layers.{i}.weight", dtype, (2 * shape[0], shape[1]), (half * shape[0], 0), shape, None, offset
            )
            offset += shape[0] * shape[1] * 8
    builder.add("flat", "float32", (3, 50), (0, 0), (3, 50), (7, 120), offset, None)
    catalog = builder.build()
    blocks = int((-(-catalog.byte_length // (1 << 20))).sum())
    sums = generator.integers(0, 1 << 63, blocks).astype(np.uint64)
    return Manifest.of_save(SaveInfo("t" * 32, 0, 5, 3), catalog, sums, {"4_0": offset + 1000})

"""Manifests in partitions: what is written, what is read of them, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from safetensors import numpy as safetensors_numpy

from paddle_flexckpt.catalog import (
    Catalog,
    CatalogBuilder,
    CheckpointError,
    CorruptCheckpointError,
    Order,
    ValidationError,
)
from paddle_flexckpt.cli.main import main
from paddle_flexckpt.foreign.paddle_files import PaddleMetadata, open_to_save
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.media.backend import Backend
from paddle_flexckpt.media.local import LocalBackend
from paddle_flexckpt.native import manifest as manifest_module
from paddle_flexckpt.native import partitions as partitions_module
from paddle_flexckpt.native.directory import CheckpointDirectory, list_checkpoints
from paddle_flexckpt.native.manifest import Manifest, SaveInfo
from paddle_flexckpt.native.partition_files import encode_partition, split_rows
from paddle_flexckpt.native.partitions import count_partitions, partition_of
from paddle_flexckpt.native.save_names import rank_of
from paddle_flexckpt.planning.write_plan import plan_write
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.tools.tensor_reader import TensorReader
from paddle_flexckpt.tools.verification import repair_manifest, verify_checkpoint
from paddle_flexckpt.tools.whole_tensors import iterate_tensors
from tests.native.samples import TOKEN, flip, store, whole
from tests.saved import data_file, partition_file, short, short_names
from tests.transfer.samples import cut, save, values_of

KINDS = {
    **{f"layers.{i}.weight": ("float32", (6, 3 + i)) for i in range(20)},
    **{f"extra_state.rng.rank{i}": ("uint8", (5,)) for i in range(4)},
    "名前": ("bfloat16", (7,)),
}
WORLD = 2


@pytest.fixture
def small(monkeypatch):
    """Every manifest is large."""
    monkeypatch.setattr(partitions_module, "MOST_ROWS_IN_ONE_FILE", 10)
    monkeypatch.setattr(partitions_module, "ROWS_PER_PARTITION", 8)


@pytest.fixture
def saved(tmp_path, small):
    values = values_of(KINDS)
    save(tmp_path / "c", values, WORLD, step=5)
    return tmp_path / "c", values


def partition_names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir() if each.suffix == ".partition")


def rows_of(catalog: Catalog) -> list[tuple]:
    files = [short(name) for name in catalog.files]
    names = [[table[i] for i in column] for table, column in
             ((catalog.keys, catalog.key), (catalog.dtypes, catalog.dtype), (files, catalog.file))]  # fmt: skip
    others = [name for name in Catalog.COLUMNS if name not in ("key", "dtype", "file")]
    return sorted(zip(*names, *(map(tuple, np.atleast_2d(getattr(catalog, n).T).T.tolist()) for n in others)))


def bytes_of(shard) -> bytes:
    return getattr(shard, "local_tensor", shard).tobytes()


def opened(monkeypatch) -> list[str]:
    """The names of the files that are read whole from now on."""
    names: list[str] = []
    for kind in (Backend, LocalBackend):
        if "read" in kind.__dict__:
            read = kind.__dict__["read"]
            monkeypatch.setattr(kind, "read", lambda self, name, read=read: names.append(name) or read(self, name))
    return names


def test_the_number_of_partitions():
    assert count_partitions(partitions_module.MOST_ROWS_IN_ONE_FILE) == 0
    assert count_partitions(100_001) == 25
    assert count_partitions(4096 * 1000 + 1) == 1001


def test_the_partition_of_a_key_is_its_hash_and_extra_state_stays_together():
    keys = ["w", "ü", "extra_state.common", "extra_state.rng.rank7"]
    expected = [xxhash.xxh3_64_intdigest(text.encode()) % 11 for text in ("w", "ü", "extra_state.", "extra_state.")]
    assert partition_of(keys, 11).tolist() == expected


def test_a_large_save_has_the_rows_that_it_has_in_one_file(tmp_path, saved, monkeypatch):
    path, values = saved
    monkeypatch.undo()
    save(tmp_path / "one", values, WORLD, step=5)
    assert partition_names(tmp_path / "one") == []
    one, several = (CheckpointDirectory(each).read_manifest() for each in (tmp_path / "one", path))
    assert (one.format_version, several.format_version) == ("1", "3")
    assert len(several.partitions) == -(-len(one.catalog) // 8) > 2
    assert partition_names(path) == sorted(each.file for each in several.partitions)
    assert rows_of(one.catalog) == rows_of(several.catalog)
    for row in range(len(one.catalog)):
        key = one.catalog.key_name(row), one.catalog.rank[row]
        (other,) = (i for i in range(len(one.catalog)) if (several.catalog.key_name(i), several.catalog.rank[i]) == key)
        assert one.checksums.of_item(row).tolist() == several.checksums.of_item(other).tolist()
    assert (one.rows, one.key_count, one.data_bytes) == (several.rows, several.key_count, several.data_bytes)
    head = CheckpointDirectory(path).read_manifest(keys=())
    assert len(head.catalog) == 0 and (head.rows, head.key_count, head.data_bytes) == (
        one.rows, one.key_count, one.data_bytes,
    )  # fmt: skip


def test_tensors_without_elements_are_where_they_were_written(tmp_path, small):
    """Several have one place in the file, and partitions have them in another order than the file's header."""
    values = values_of(KINDS | {f"none{i}": ("uint8", (0, 2 + i)) for i in range(6)})
    values["none2"] = np.zeros((0, 2), dtype=np.uint8)
    save(tmp_path / "c", dict(sorted(values.items(), reverse=True)), WORLD)
    assert not verify_checkpoint(tmp_path / "c").problems
    flip(tmp_path / "c" / data_file(tmp_path / "c"), 8)
    (problem,) = verify_checkpoint(tmp_path / "c").problems
    assert problem.what == "the header is damaged"


def test_a_tensor_is_read_by_the_manifest_and_one_partition(saved, monkeypatch):
    path, values = saved
    names = opened(monkeypatch)
    manifest = CheckpointDirectory(path).read_manifest(keys=["名前"])
    number = int(partition_of(["名前"], len(manifest.partitions))[0])
    assert short_names(names) == ["0.manifest", f"{number}_0-1.partition"]
    assert "名前" in manifest.catalog.keys and len(manifest.catalog) < manifest.rows
    ((_, array),) = iterate_tensors(path, manifest, names=["名前"], verify="full")
    assert array.tobytes() == values["名前"].tobytes()


def test_what_needs_no_rows_reads_no_partition(saved, monkeypatch):
    path, values = saved
    names = opened(monkeypatch)
    (info,) = list_checkpoints(path)
    assert (info.complete, info.keys, info.step) == (True, len(values), 5)
    assert info.total_bytes == sum(value.nbytes for value in values.values())
    assert {name for name in names if name.endswith(".partition")} == set()


@pytest.mark.parametrize("world", [1, 3])
def test_another_layout_loads_it_bit_for_bit(saved, world):
    path, values = saved
    blank = {key: np.zeros_like(value) for key, value in values.items()}
    states = [cut(blank, position, world) for position in range(world)]
    SimulatedWorld(world).run(lambda comm: load_state_dict(states[comm.position], path, comm, verify="full"))
    expected = [cut(values, position, world) for position in range(world)]
    for mine, right in zip(states, expected):
        assert {key: bytes_of(each) for key, each in mine.items()} == {key: bytes_of(right[key]) for key in right}
    assert verify_checkpoint(path).ok


def test_a_save_of_the_same_id_removes_the_partitions_of_the_one_before(saved):
    path, values = saved
    before = partition_names(path)
    save(path, values, WORLD, unique_id=0)
    manifest = CheckpointDirectory(path).read_manifest()
    assert partition_names(path) == sorted(each.file for each in manifest.partitions)
    assert not set(before) & set(partition_names(path))


def test_partitions_of_a_dead_save_are_removed_by_the_next(saved):
    path, _ = saved
    before = sorted(each.name for each in path.iterdir())
    directory = open_to_save(path)
    dead = directory.open_save(None, WORLD)
    rows = replace(directory.read_committed(0), save_token=dead.token)
    assert [each.file for each in directory.write_partitions(dead, rows).partitions]
    assert set(partition_names(path)) - set(before)
    open_to_save(path).cleaner.remove_dead_saves()
    assert sorted(each.name for each in path.iterdir()) == before


def test_partitions_of_a_save_that_fails_are_removed_by_the_next(tmp_path, small, monkeypatch):
    def fail(self, name):
        raise OSError(5, "Input/output error", name)

    path = tmp_path / "c"
    save(path, {"w": np.zeros(3, dtype=np.float32)}, WORLD)
    before = sorted(each.name for each in path.iterdir())
    monkeypatch.setattr(Manifest, "encode", lambda self, encode=Manifest.encode: (
        fail(self, "0.manifest") if self.partitions else encode(self)))  # fmt: skip
    state = values_of(KINDS)
    outcomes = SimulatedWorld(WORLD).run_all(lambda comm: save_state_dict(cut(state, comm.position, WORLD), path, comm))
    assert all(isinstance(each, CheckpointError) and "Input/output error" in str(each) for each in outcomes)
    assert len({str(each) for each in outcomes}) == 1
    assert partition_names(path)
    assert CheckpointDirectory(path).list_ids() == [0]
    open_to_save(path).cleaner.remove_dead_saves()
    assert sorted(each.name for each in path.iterdir()) == before


def test_ranks_that_give_a_save_up_remove_its_partitions(saved):
    path, _ = saved
    before = sorted(each.name for each in path.iterdir())
    directory = open_to_save(path)
    names = directory.open_save(None, WORLD)
    directory.write_partitions(names, replace(directory.read_committed(0), save_token=names.token))
    directory.discard(names, range(WORLD))
    assert sorted(each.name for each in path.iterdir()) == before


def test_a_repair_makes_one_file_of_it_and_the_next_save_removes_the_partitions(saved):
    path, _ = saved
    was = CheckpointDirectory(path).read_manifest()
    (path / was.partitions[1].file).unlink()
    repair_manifest(path, 0, overwrite=True)
    manifest = CheckpointDirectory(path).read_manifest()
    assert manifest.format_version == "1" and rows_of(manifest.catalog) == rows_of(was.catalog)
    assert verify_checkpoint(path).ok
    assert set(CheckpointDirectory(path).files_of(manifest)) >= set(partition_names(path))
    others = sorted(set(each.name for each in path.iterdir()) - set(partition_names(path)))
    open_to_save(path).cleaner.remove_dead_saves()
    assert sorted(each.name for each in path.iterdir()) == others
    assert verify_checkpoint(path).ok


def damage(path: Path, kind: str) -> tuple[str, str, str]:
    """Damages a partition; returns its name, and what has to be said of expectation and find."""
    manifest = CheckpointDirectory(path).read_manifest(keys=())
    first, second = manifest.partitions[:2]
    file = path / first.file
    expected = f"expected {first.nbytes} bytes with xxh3 {first.digest:032x}"
    if kind == "missing":
        file.unlink()
        return first.file, "expected a partition", "got no such file"
    if kind == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
        return first.file, expected, f"got {first.nbytes - 1} bytes"
    if kind == "swapped":
        file.write_bytes((path / second.file).read_bytes())
        return first.file, expected, f"got {second.nbytes} bytes with xxh3 {second.digest:032x}"
    if kind == "flipped":
        flip(file, first.nbytes // 2)
        return first.file, expected, f"got {first.nbytes} bytes with xxh3"
    assert kind == "of another save"
    save(path.parent / "other", {key: value for key, value in values_of(KINDS).items()}, WORLD, step=6)
    other = path.parent / "other"
    shutil.copy(other / partition_file(other, rank_of(first.file)), file)
    return first.file, expected, "got "


@pytest.mark.parametrize("kind", ["missing", "truncated", "swapped", "flipped", "of another save"])
def test_a_damaged_partition_is_named_on_every_rank(saved, kind):
    path, values = saved
    file, expected, got = damage(path, kind)
    outcomes = SimulatedWorld(2).run_all(lambda comm: load_state_dict(cut(values, comm.position, 2), path, comm))
    assert all(isinstance(each, CorruptCheckpointError) for each in outcomes)
    assert len({str(each) for each in outcomes}) == 1
    assert all(text in str(outcomes[0]) for text in (str(path / file), expected, got, "Remedy (FC306): "))
    report = verify_checkpoint(path)
    assert not report.ok and {problem.file for problem in report.problems} == {str(path / file)}
    assert "repair_manifest" in report.problems[0].remedy
    (info,) = list_checkpoints(path)
    assert info.complete == (kind in ("flipped", "of another save") or info.problem == "")


def test_every_flipped_bit_of_a_partition_is_refused(saved):
    path, _ = saved
    manifest = CheckpointDirectory(path).read_manifest(keys=())
    file = path / manifest.partitions[0].file
    key = next(key for key in KINDS if partition_of([key], len(manifest.partitions))[0] == 0)
    for byte in range(manifest.partitions[0].nbytes):
        flip(file, byte, byte % 8)
        with pytest.raises(CorruptCheckpointError, match=partition_file(path)):
            CheckpointDirectory(path).read_manifest(keys=[key])
        flip(file, byte, byte % 8)


def test_readers_of_earlier_versions_refuse_it_as_newer(saved, monkeypatch):
    path, _ = saved
    monkeypatch.setattr(manifest_module, "FORMAT_VERSIONS", ("1", "2"))
    with pytest.raises(ValidationError, match="has format version '3'; .* Remedy .FC307.: update paddle-flexckpt"):
        CheckpointDirectory(path).read_manifest()


def test_rows_that_readers_would_not_find_are_not_written(tmp_path):
    stored = store(tmp_path, [whole(f"w{i}", "float32", (3,), i % 2) for i in range(8)])
    whole_rows = stored.manifest
    for number, rows in split_rows(whole_rows, 3):
        with pytest.raises(ValueError, match="not of partition"):
            encode_partition(rows, (number + 1) % 3, 3)
    (_, rows), *_ = split_rows(whole_rows, 1)
    wrong = replace(rows, catalog=replace(rows.catalog, file=1 - rows.catalog.file))
    with pytest.raises(ValueError, match="not in the data file of their rank"):
        encode_partition(wrong, 0, 1)


def test_any_rank_writes_a_partition_and_the_coordinator_commits_their_list(tmp_path):
    """What a save does whose ranks share the rows of the manifest."""
    directory = open_to_save(tmp_path)
    names = directory.open_save(None, 2)
    info = SaveInfo(names.token, names.unique_id, 2, 9)
    stored = store(tmp_path, [whole(f"w{i}", "float32", (3,), i % 2) for i in (0, 2, 4, 1, 3)],
                   save_token=names.token, unique_id=names.unique_id, world_size=2, step=9)  # fmt: skip
    written = [
        open_to_save(tmp_path).write_partition(names, number, 4, rows)
        for number, rows in split_rows(stored.manifest, 4)
    ]
    directory.commit_manifest(names, Manifest.of_partitions(info, stored.manifest.sizes, written))
    manifest = CheckpointDirectory(tmp_path).read_manifest()
    assert rows_of(manifest.catalog) == rows_of(stored.manifest.catalog)
    assert (manifest.save_token, manifest.step, manifest.world_size) == (TOKEN and names.token, 9, 2)
    found = dict(iterate_tensors(tmp_path, manifest, verify="full"))
    assert [found[s.key].tobytes() for s in stored.shards] == [v.tobytes() for v in stored.values]
    assert [each.name for each in tmp_path.iterdir() if each.suffix in (".saving", ".part")] == []


def test_the_companion_refuses_what_it_would_take_too_long_to_tell_of(saved, monkeypatch):
    path, _ = saved
    assert b"more than" not in (path / PaddleMetadata.name).read_bytes()
    names = opened(monkeypatch)
    monkeypatch.setattr(PaddleMetadata, "most_rows", 10)
    open_to_save(path).companion.update()
    assert b"it has more than 10 shards" in (path / PaddleMetadata.name).read_bytes()
    assert not [name for name in names if name.endswith(".partition")]


def test_the_command_line_shows_a_key_of_one_partition(saved, capsys, monkeypatch):
    """A second one would have the degrees of the run."""
    path, _ = saved
    names = opened(monkeypatch)
    assert main(["inspect", str(path), "--key", "名前"]) == 0
    assert "名前" in capsys.readouterr().out
    assert len([name for name in names if name.endswith(".partition")]) == 2


def partitions_of(path: Path, *keys: str) -> list[str]:
    count = len(CheckpointDirectory(path).read_manifest(keys=()).partitions)
    return [partition_file(path, number) for number in sorted(set(partition_of(keys, count).tolist()))]


def test_a_reader_opens_the_partitions_of_the_keys_that_it_reads_once(saved, monkeypatch):
    path, values = saved
    wanted = partitions_of(path, "名前")
    key = next(key for key in values if partitions_of(path, key) != wanted)
    then = partitions_of(path, key)
    names = opened(monkeypatch)
    with TensorReader(path) as reader:
        assert names == ["0.manifest"]
        for index in (0, slice(2, 5), ...):
            assert reader.read("名前", index).tobytes() == values["名前"][index].tobytes()
        assert names == ["0.manifest", *wanted]
        del names[:]
        assert reader.read(key).tobytes() == values[key].tobytes()
        assert names == then
        with pytest.raises(
            ValidationError, match=f"there is no such key.*{len(values)} keys, such as .*'layers.3.weight'"
        ):
            reader.read("layers.3.weigth")
        assert set(reader.infos) == set(values)
    with pytest.raises(ValueError, match="is closed"):
        reader.read(key)


def test_a_closed_reader_opens_no_partition(saved, monkeypatch):
    with TensorReader(saved[0]) as reader:
        pass
    names = opened(monkeypatch)
    for ask in (lambda: reader.infos, lambda: "名前" in reader):
        with pytest.raises(ValueError, match="is closed"):
            ask()
    assert names == []


def test_a_reader_with_statements_knows_all_keys(saved):
    path, values = saved
    with TensorReader(path, aoa_config={"aoa_statements": ["layers.3.weight^T -> turned"]}) as reader:
        assert reader.read("turned").tobytes() == values["layers.3.weight"].T.tobytes()
        assert "layers.3.weight" not in reader and "名前" in reader


def test_a_reader_names_the_damaged_partition_when_it_needs_it(saved):
    path, values = saved
    (damaged,) = partitions_of(path, "名前")
    flip(path / damaged, 1000)
    key = next(key for key in values if partitions_of(path, key) != [damaged])
    with TensorReader(path) as reader:
        assert reader.read(key).tobytes() == values[key].tobytes()
        with pytest.raises(CorruptCheckpointError, match=damaged):
            reader.read("名前")
        with pytest.raises(CorruptCheckpointError, match=damaged):
            reader.infos  # noqa: B018


def test_the_command_line_shows_a_tensor_by_its_partition(saved, capsys, monkeypatch):
    path, _ = saved
    expected = partitions_of(path, "名前")
    names = opened(monkeypatch)
    assert main(["show", str(path), "名前"]) == 0
    assert "名前: bfloat16 [7]" in capsys.readouterr().out
    assert [name for name in names if name.endswith(".partition")] == expected


FUSED = {"block.w": Order(2, 1, "fused_ffn"), "block.w.moment1_0": None, "other.b": None}


@pytest.mark.parametrize("key", FUSED)
def test_a_reader_puts_fused_tensors_of_several_partitions_into_natural_order(tmp_path, monkeypatch, key):
    """A state follows its parameter, in whatever partition that is, as where all rows are in one file."""
    values = {name: np.arange(24, dtype=np.float32).reshape(2, 12) + i for i, name in enumerate(FUSED)}
    builder, found = CatalogBuilder(0), []
    for name, value in values.items():
        builder.add(name, "float32", value.shape, (0, 0), value.shape, order=FUSED[name])
    for kind, most in (("one", 10), ("several", 0)):
        monkeypatch.setattr(partitions_module, "MOST_ROWS_IN_ONE_FILE", most)
        monkeypatch.setattr(partitions_module, "ROWS_PER_PARTITION", 1)
        directory = open_to_save(tmp_path / kind)
        lock = directory.lock()
        names = directory.open_save(None)
        items = plan_write(builder.build(), names.data_file).catalog
        data = (values[items.key_name(row)].ravel().view(np.uint8) for row in range(len(items)))
        directory.commit(names, [directory.write_data(names, items, data, world_size=1)])
        lock.release()
        files = opened(monkeypatch)
        with TensorReader(tmp_path / kind) as reader:
            found.append(reader.read(key).tobytes())
    assert len(partition_names(tmp_path / "several")) == 3
    assert len(set(partition_of(list(FUSED)[:2], 3).tolist())) == 2
    # What neither is fused nor a state of what is does not need the others.
    assert (len({name for name in files if name.endswith(".partition")}) == 1) == (key == "other.b")
    assert found[0] == found[1]
    assert (found[0] == values[key].tobytes()) == (key == "other.b")


def resealed(path: Path, change) -> None:
    """Writes the manifest again with other columns and a digest that is right."""
    file = path / "0.manifest"
    info, arrays = manifest_module.read_container(file.read_bytes(), "m")
    del info["digest"]
    arrays = {name: array.copy() for name, array in arrays.items()}
    change(arrays)
    info["digest"] = manifest_module._digest(arrays, info)
    file.write_bytes(safetensors_numpy.save(arrays, metadata=info))


def _names(arrays, names: list[str]) -> None:
    arrays["partitions.files"] = np.frombuffer(json.dumps(names).encode(), dtype=np.uint8)


ATTACKS = {
    "more partitions than columns": lambda a: _names(a, [f"{i}_0.partition" for i in range(1000)]),
    "no partition": lambda a: _names(a, []),
    "a number of partitions": lambda a: a.update({"partitions.files": np.frombuffer(b"1000000000", dtype=np.uint8)}),
    "a path": lambda a: _names(
        a, ["../0_0.partition"] + [f"{i}_0.partition" for i in range(1, len(a["partitions.rows"]))]
    ),
    "one file twice": lambda a: _names(a, ["0_0.partition"] * len(a["partitions.rows"])),
    "a column too short": lambda a: a.update({"partitions.digest": a["partitions.digest"][:-1]}),
    "negative sizes": lambda a: a.update({"partitions.nbytes": -np.ones_like(a["partitions.nbytes"], dtype=np.int64)}),
    "no column": lambda a: a.pop("partitions.rows"),
    "no partitions at all": lambda a: [a.pop(name) for name in list(a) if name.startswith("partitions.")],
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_manifest_that_lies_about_its_partitions(saved, attack):
    path, _ = saved
    resealed(path, ATTACKS[attack])
    with pytest.raises(CorruptCheckpointError, match=r"0\.manifest is not a usable manifest"):
        CheckpointDirectory(path).read_manifest()


@pytest.mark.parametrize("column", ["rows", "keys"])
def test_a_partition_that_has_not_what_the_manifest_says(saved, column):
    path, _ = saved
    resealed(path, lambda a: a.update({f"partitions.{column}": a[f"partitions.{column}"].astype(np.int64) + 10**9}))
    with pytest.raises(CorruptCheckpointError, match=r"0_0-\w+\.partition is not a usable partition.*Remedy"):
        CheckpointDirectory(path).read_manifest()


def test_a_partition_of_another_number_with_the_right_digest(saved):
    path, _ = saved

    def swap(arrays):
        for name in ("nbytes", "rows", "keys", "data_bytes", "digest"):
            column = arrays[f"partitions.{name}"]
            arrays[f"partitions.{name}"] = np.concatenate([column[1:2], column[:1], column[2:]])

    first, second = (path / partition_file(path, i) for i in (0, 1))
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)
    resealed(path, swap)
    with pytest.raises(CorruptCheckpointError, match=rf"{first.name} is not a usable partition.*expected .*got "):
        CheckpointDirectory(path).read_manifest()

"""repair_manifest: a lost manifest from the data files, or a refusal that says what is in the way."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from paddle_flexckpt.catalog import Catalog, ValidationError
from paddle_flexckpt.foreign.paddle_files import PADDLE_METADATA
from paddle_flexckpt.media.local import LocalBackend
from paddle_flexckpt.native import partitions as partitions_module
from paddle_flexckpt.native.data_file import DataFileHeader, write_data_file
from paddle_flexckpt.native.directory import CheckpointDirectory, is_complete, latest, list_checkpoints
from paddle_flexckpt.native.manifest import Manifest, SaveInfo
from paddle_flexckpt.native.partition_files import read_partition
from paddle_flexckpt.native.save_names import rank_of, token_after
from paddle_flexckpt.tools.tensor_reader import TensorReader
from paddle_flexckpt.tools.verification import repair_manifest, verify_checkpoint
from tests.native.samples import Stored, flip, items_of, store, values_of, whole
from tests.native.test_verify import change, checkpoint, shards_of_two_ranks
from tests.property.layouts import Shard
from tests.remedies.following import provoked
from tests.transfer.samples import save
from tests.transfer.samples import values_of as values_by_key


def rows(catalog: Catalog) -> list[tuple]:
    """The rows with names instead of indices."""
    columns = [getattr(catalog, name).tolist() for name in Catalog.COLUMNS if name not in ("key", "dtype", "file")]
    names = (catalog.key_name, catalog.dtype_name, catalog.file_name)
    return [(*(name(r) for name in names), *(column[r] for column in columns)) for r in range(len(catalog))]


def same(a: Manifest, b: Manifest) -> bool:
    return (
        rows(a.catalog) == rows(b.catalog)
        and a.checksums.values.tolist() == b.checksums.values.tolist()
        and dict(zip(a.catalog.files, a.file_bytes.tolist())) == dict(zip(b.catalog.files, b.file_bytes.tolist()))
        and (a.save_token, a.unique_id, a.world_size, a.step) == (b.save_token, b.unique_id, b.world_size, b.step)
    )


def lost(path, shards: list[Shard] | None = None, **header) -> Stored:
    """A checkpoint without its manifest."""
    return store(path, shards_of_two_ranks() if shards is None else shards, **{"world_size": 2, **header})


def refused(path, unique_id: int = 0, **options) -> str:
    before = {name: (path / name).read_bytes() for name in os.listdir(path)}
    with pytest.raises(ValidationError) as caught:
        repair_manifest(path, unique_id, **options)
    assert {name: (path / name).read_bytes() for name in os.listdir(path)} == before
    return str(caught.value)


@pytest.mark.parametrize("step", [None, 12])
def test_the_manifest_is_as_it_was(tmp_path, step):
    shards = [*shards_of_two_ranks(), whole("__metadata__", "bool", (3,), 1), whole("big", "uint8", (3 << 20,), 1)]
    stored = lost(tmp_path, shards, unique_id=5, step=step)
    report = repair_manifest(tmp_path, 5)
    assert same(CheckpointDirectory(str(tmp_path)).read_manifest(5), stored.manifest)
    assert verify_checkpoint(tmp_path).ok
    assert report.files == list(stored.manifest.catalog.files)
    assert (report.step, report.save_token, report.left_out) == (step, stored.manifest.save_token, [])
    assert (report.keys, report.items) == (8, 11)
    assert report.bytes_read == sum(values.nbytes for values in stored.values)
    assert sorted(os.listdir(tmp_path)) == ["0_5.safetensors", "1_5.safetensors", "5.manifest", PADDLE_METADATA]


def test_the_report_says_what_the_checksums_cannot_tell(tmp_path):
    stored = lost(tmp_path)
    flip(stored.file(), stored.file().stat().st_size - 1)
    report = repair_manifest(tmp_path, 0)
    assert "damage that happened before this repair cannot be found" in report.summary()
    assert verify_checkpoint(tmp_path).ok
    assert json.loads(json.dumps(report.as_dict()))["unique_id"] == 0
    flip(stored.file(), stored.file().stat().st_size - 1)
    assert len(verify_checkpoint(tmp_path).problems) == 1


def test_a_manifest_that_is_there_is_replaced_only_when_asked(tmp_path):
    stored = checkpoint(tmp_path, block_bytes=None, world_size=2)
    manifest = tmp_path / "0.manifest"
    text = refused(tmp_path)
    assert f"there is a manifest of save {stored.manifest.save_token}, and it can be read" in text
    assert str(manifest) in text
    flip(manifest, manifest.stat().st_size - 1)
    with provoked("native/manifest.py", "rebuild it with repair_manifest(overwrite=True)"):
        CheckpointDirectory(str(tmp_path)).read_manifest()
    change(manifest, 200, 255)
    assert "there is a manifest (file " in refused(tmp_path)
    with provoked("native/repair.py", "overwrite=True replaces it"):
        repair_manifest(tmp_path, 0)
    with provoked("tools/verification.py", "or rebuild it with repair_manifest(path, unique_id, overwrite=True)"):
        raise ValidationError(verify_checkpoint(tmp_path).problems)
    assert not verify_checkpoint(tmp_path).ok
    repair_manifest(tmp_path, 0, overwrite=True)
    assert verify_checkpoint(tmp_path).ok
    assert same(CheckpointDirectory(str(tmp_path)).read_manifest(0), stored.manifest)


def test_shards_that_do_not_cover_their_tensors_are_refused(tmp_path):
    stored = lost(tmp_path)
    stored.file(1).unlink()
    text = refused(tmp_path)
    assert "not as many data files as ranks" in text
    assert "expected 2; got 1: 0_0.safetensors" in text
    text = refused(tmp_path, fewer_files=True)
    assert "no rank holds" in text
    assert "'w'" in text
    assert "'m'" in text
    assert "'c'" not in text, "nothing is left that tells of it: that is why the number of files counts"


def test_fewer_files_than_ranks_have_to_be_allowed(tmp_path):
    lost(tmp_path, [whole("a", "uint8", (4,))], world_size=3)
    assert "fewer_files=True" in refused(tmp_path)
    report = repair_manifest(tmp_path, 0, fewer_files=True)
    assert (report.files, report.partial) == (["0_0.safetensors"], "rebuilt from the data files of 1 of 3 ranks")
    (problem,) = verify_checkpoint(tmp_path).problems
    assert (problem.what, problem.got) == ("the checkpoint is partial", report.partial)


# -- A manifest that can be read, and the companion, are evidence ------------------------------------------------------

KINDS = {"w": ("float32", (4, 6)), "a": ("float32", (30,)), "b": ("bfloat16", (9,)), "m": ("float32", (2, 3, 4))}


def saved(path: Path, world: int = 2, kinds=KINDS, **options) -> Path:
    save(str(path), values_by_key(kinds), world=world, step=7, **options)
    return path


def files_with(path: Path, key: str) -> list[Path]:
    catalog = CheckpointDirectory(str(path)).read_manifest().catalog
    return [path / catalog.file_name(row) for row in np.flatnonzero(catalog.key == catalog.keys.index(key)).tolist()]


@pytest.mark.parametrize("partitions", [False, True])
@pytest.mark.parametrize("row", [0, 2, 6])
def test_damage_that_the_manifest_shows_is_not_made_whole(tmp_path, monkeypatch, partitions, row):
    if partitions:
        monkeypatch.setattr(partitions_module, "MOST_ROWS_IN_ONE_FILE", 3)
        monkeypatch.setattr(partitions_module, "ROWS_PER_PARTITION", 3)
    saved(tmp_path)
    catalog = CheckpointDirectory(str(tmp_path)).read_manifest().catalog
    row = min(row, len(catalog) - 1)
    path, begin = tmp_path / (catalog.file_name(row) or ""), int(catalog.byte_offset[row])
    flip(path, begin + 3)
    for options in ({"overwrite": True}, {"overwrite": True, "fewer_files": True}):
        text = refused(tmp_path, **options)
        assert (
            f"bytes 0 to {catalog.byte_length[row]} of the shard are damaged (key {catalog.key_name(row)!r}, " in text
        )
        assert f"rank {catalog.rank[row]}, file {str(path)!r}, byte {begin}); expected xxh3 " in text
        assert "overwrite" not in text
    assert not verify_checkpoint(tmp_path).ok
    flip(path, begin + 3)
    assert repair_manifest(tmp_path, 0, overwrite=True).partial == ""
    assert verify_checkpoint(tmp_path).ok


def test_each_damaged_block_is_named(tmp_path):
    stored = checkpoint(tmp_path, [whole("big", "uint8", (100,))], 16)
    begin = int(stored.manifest.catalog.byte_offset[0])
    flip(stored.file(), begin + 20)
    flip(stored.file(), begin + 99)
    text = refused(tmp_path, overwrite=True)
    assert (
        f"bytes 16 to 32 of the shard are damaged (key 'big', rank 0, file {str(stored.file())!r}, byte {begin + 16}"
        in text
    )
    assert (
        f"bytes 96 to 100 of the shard are damaged (key 'big', rank 0, file {str(stored.file())!r}, byte {begin + 96}"
        in text
    )


def test_partitions_that_can_be_read_are_compared(tmp_path, monkeypatch):
    """Of the rows of a lost partition nobody knows the checksums; those of the others are evidence still."""
    monkeypatch.setattr(partitions_module, "MOST_ROWS_IN_ONE_FILE", 3)
    monkeypatch.setattr(partitions_module, "ROWS_PER_PARTITION", 2)
    saved(tmp_path)
    was = CheckpointDirectory(str(tmp_path)).read_manifest()
    lost_rows = read_partition(LocalBackend(str(tmp_path)), was, 1)
    (tmp_path / was.partitions[1].file).unlink()
    assert {*lost_rows.catalog.keys} < {*was.catalog.keys}
    row = next(r for r in range(len(was.catalog)) if was.catalog.key_name(r) not in lost_rows.catalog.keys)
    place = tmp_path / (was.catalog.file_name(row) or ""), int(was.catalog.byte_offset[row])
    flip(*place)
    assert "there is a manifest (file " in refused(tmp_path)
    assert "bytes 0 to " in refused(tmp_path, overwrite=True)
    flip(*place)
    with provoked("native/partition_files.py", "rebuild the manifest with repair_manifest(overwrite=True)"):
        CheckpointDirectory(str(tmp_path)).read_manifest()
    repair_manifest(tmp_path, 0, overwrite=True)
    assert verify_checkpoint(tmp_path).ok
    # A data file that the rest of the manifest names is not passed over.
    saved(tmp_path, unique_id=0)
    was = CheckpointDirectory(str(tmp_path)).read_manifest()
    (tmp_path / was.partitions[0].file).unlink()
    (tmp_path / was.catalog.files[1]).unlink()
    text = refused(tmp_path, overwrite=True, fewer_files=True)
    assert f"a file that the manifest names is missing (rank 1, file {str(tmp_path / was.catalog.files[1])!r})" in text


def test_a_file_that_the_manifest_names_is_missed(tmp_path):
    saved(tmp_path)
    path = files_with(tmp_path, "b")[0]
    rank = int(path.name[0])
    path.unlink()
    for options in ({"overwrite": True}, {"overwrite": True, "fewer_files": True}):
        assert f"a file that the manifest names is missing (rank {rank}, file {str(path)!r})" in refused(
            tmp_path, **options
        )


def test_a_step_that_the_manifest_has_otherwise_is_refused(tmp_path):
    """One file alone agrees with itself whatever step its header has."""
    stored = checkpoint(tmp_path, [whole("a", "uint8", (4,))], block_bytes=None, step=12)
    data = stored.file().read_bytes()
    stored.file().write_bytes(data.replace(b'"step":"12"', b'"step":"13"'))
    assert stored.file().read_bytes() != data
    text = refused(tmp_path, overwrite=True)
    assert "the headers are not as the manifest" in text
    assert "step=12" in text
    assert "step=13" in text


def test_a_lost_file_is_told_by_the_companion_and_marks_what_is_made(tmp_path):
    path = saved(tmp_path / "c", save_replicas=False)
    files = [files_with(path, key)[0] for key in ("a", "b")]
    assert files[0] != files[1], "each rank alone has a tensor"
    alone = [{key for key in KINDS if set(files_with(path, key)) == {file}} for file in files]
    lost_file, content, kept = files[1], files[1].read_bytes(), files[0].name
    (key,) = alone[1]
    for other in "wm":  # of which the other rank has a part
        assert len(files_with(path, other)) == 2
    manifest = path / "0.manifest"
    manifest.unlink()
    lost_file.unlink()
    text = refused(path)
    named = f"{PADDLE_METADATA} has besides {lost_file.name}, {key!r}"
    assert f"expected 2; got 1: {kept}; {named}" in text
    assert "fewer_files=True does without them, and marks the checkpoint as partial" in text
    # Tensors of which a part is here would be filled in part alone.
    assert "no rank holds" in refused(path, fewer_files=True)
    assert "every rank" not in refused(path, fewer_files=True)
    lost_file.write_bytes(content)
    repair_manifest(path, 0)
    assert verify_checkpoint(path).ok


def only_whole(path: Path) -> tuple[Path, str]:
    """A save of tensors that one rank each has, of which a file is lost, and the manifest; the file, and its key."""
    saved(path, kinds={"a": ("float32", (30,)), "b": ("float32", (30,))})
    file = files_with(path, "b")[0]
    assert file != files_with(path, "a")[0]
    (path / "0.manifest").unlink()
    return file, "b"


def test_what_is_made_without_a_lost_file_says_so(tmp_path, caplog):
    path = tmp_path / "c"
    file, key = only_whole(path)
    content = file.read_bytes()
    file.unlink()
    with provoked("native/repair.py", "fewer_files=True does without them, and marks the checkpoint as partial"):
        repair_manifest(path, 0)
    report = repair_manifest(path, 0, fewer_files=True)
    partial = f"rebuilt from the data files of 1 of 2 ranks; {PADDLE_METADATA} has besides {file.name}, {key!r}"
    assert report.partial == partial
    assert partial in report.summary()
    # On its face: in lists, for those who look for the latest, in verifications, to whoever reads it.
    (info,) = list_checkpoints(path)
    assert (info.complete, info.problem) == (False, f"partial: {partial}")
    assert latest(path) is None
    assert not is_complete(path)
    with provoked("tools/verification.py", "repair it again with overwrite=True"):
        raise ValidationError(verify_checkpoint(path).problems)
    caplog.clear()
    with TensorReader(path) as reader:
        assert "a" in reader
        assert "b" not in reader
    assert f"0.manifest is partial: {partial}" in caplog.text
    assert b"it is partial" in (path / PADDLE_METADATA).read_bytes(), "Paddle's own loader refuses it"
    # Again, without the companion that told of it.
    assert "expected 2; got 1" in refused(path, overwrite=True)
    # With the file the same save is whole again.
    file.write_bytes(content)
    assert repair_manifest(path, 0, overwrite=True).partial == ""
    assert verify_checkpoint(path).ok
    assert latest(path) is not None
    assert b"it is partial" not in (path / PADDLE_METADATA).read_bytes()


def test_ranks_without_data_are_known_from_the_companion(tmp_path):
    saved(tmp_path, world=3, kinds={"a": ("float32", (1,))})
    (file,) = [path.name for path in tmp_path.glob("*.safetensors")]
    for lost_manifest in (True, False):
        if lost_manifest:
            (tmp_path / "0.manifest").unlink()
        report = repair_manifest(tmp_path, 0, overwrite=True)
        assert (report.files, report.partial) == ([file], "")
    assert verify_checkpoint(tmp_path).ok
    (tmp_path / PADDLE_METADATA).unlink()
    (tmp_path / "0.manifest").unlink()
    assert "fewer_files=True" in refused(tmp_path)


@pytest.mark.parametrize("content", [b"", b"no pickle", None, "older"])
def test_a_companion_that_tells_nothing_of_this_save_proves_nothing(tmp_path, content):
    path = tmp_path / "c"
    file, _ = only_whole(path)
    file.unlink()
    companion = path / PADDLE_METADATA
    if content is None:
        companion.unlink()
    elif content == "older":  # of files of another save, all of which are here
        (here,) = path.glob("*.safetensors")
        here.rename(here.with_name(f"{rank_of(here.name)}_0-{token_after(9)}.safetensors"))
    else:
        companion.write_bytes(content)
    assert "besides" not in refused(path)
    assert repair_manifest(path, 0, fewer_files=True).partial == "rebuilt from the data files of 1 of 2 ranks"


def test_a_companion_without_file_names_tells_of_keys(tmp_path):
    """It refuses what Paddle would read wrong: an element type that it does not know."""
    shards = [whole("a", "complex128", (3,), 0), whole("b", "complex128", (3,), 1)]
    stored = checkpoint(tmp_path, shards, None, world_size=2)
    (tmp_path / "0.manifest").unlink()
    stored.file(1).unlink()
    assert f"{PADDLE_METADATA} has besides 'b'" in refused(tmp_path)
    assert repair_manifest(tmp_path, 0, fewer_files=True).partial.endswith(f"{PADDLE_METADATA} has besides 'b'")


def second_save(path, token: str) -> list[str]:
    """Data files of another save of id 0, as an interrupted replacement leaves them."""
    names = []
    for rank in (0, 1):
        shards = [shard for shard in shards_of_two_ranks() if shard.rank == rank]
        names.append(f"{rank}_0-{token}.safetensors")
        items = items_of(shards, names[-1])
        data = (255 - values_of(shard, 99).view(np.uint8) for shard in shards)
        write_data_file(str(path), items, data, SaveInfo(token, 0, 2, 9))
    return names


def test_only_files_of_one_save_are_taken(tmp_path):
    stored = lost(tmp_path)
    names = second_save(tmp_path, "f" * 32)
    text = refused(tmp_path)
    assert "files of several saves" in text
    assert f"{'f' * 32} (step 9): {', '.join(names)}" in text
    with provoked("native/repair.py", "choose one by its save_token"):
        repair_manifest(tmp_path, 0)
    assert "no files of save 'abc'" in refused(tmp_path, save_token="abc")
    report = repair_manifest(tmp_path, 0, save_token="f" * 32)
    assert (report.files, report.left_out, report.step) == (names, list(stored.manifest.catalog.files), 9)
    assert verify_checkpoint(tmp_path).ok
    report = repair_manifest(tmp_path, 0, save_token=stored.manifest.save_token, overwrite=True)
    assert report.left_out == names
    assert same(CheckpointDirectory(str(tmp_path)).read_manifest(0), stored.manifest)


def test_a_chosen_save_is_repaired_beside_ruins_of_another(tmp_path):
    stored = lost(tmp_path)
    names = second_save(tmp_path, "f" * 32)
    os.truncate(tmp_path / names[1], 100)
    os.truncate(tmp_path / names[0], 5)
    assert "the header is damaged" in refused(tmp_path)
    with provoked("native/repair.py", "if it belongs to another save, choose this one by its save_token"):
        repair_manifest(tmp_path, 0)
    assert repair_manifest(tmp_path, 0, save_token=stored.manifest.save_token).left_out == names


def test_a_copy_of_a_file_is_refused(tmp_path):
    stored = lost(tmp_path)
    (tmp_path / "1_0.1.safetensors").write_bytes(stored.file(1).read_bytes())
    assert "a rank has several files of one save" in refused(tmp_path)
    with provoked("native/repair.py", "remove the copy"):
        repair_manifest(tmp_path, 0)
    (tmp_path / "1_0.1.safetensors").unlink()
    repair_manifest(tmp_path, 0)
    assert same(CheckpointDirectory(str(tmp_path)).read_manifest(0), stored.manifest)


def test_a_file_under_another_id_is_refused(tmp_path):
    stored = lost(tmp_path)
    for index in (0, 1):
        stored.file(index).rename(tmp_path / f"{index}_8.safetensors")
    assert "a file has another unique_id" in refused(tmp_path, 8)
    assert "there are no data files of this id; got ids [8]" in refused(tmp_path, 0)


def test_a_file_of_another_size_is_refused(tmp_path):
    stored = lost(tmp_path)
    size = stored.file(1).stat().st_size
    os.truncate(stored.file(1), size - 3)
    text = refused(tmp_path)
    assert f"expected {size} bytes; got {size - 3} bytes" in text
    assert str(stored.file(1)) in text


def test_no_change_of_a_header_makes_another_checkpoint(tmp_path):
    stored = lost(tmp_path)
    path = stored.file(1)
    original = path.read_bytes()
    header = 8 + int.from_bytes(original[:8], "little")
    generator = np.random.default_rng(8)
    accepted = 0
    for trial in range(2000):
        byte = int(generator.integers(header))
        new = original[byte] ^ (1 << int(generator.integers(8))) if trial % 2 else int(generator.integers(256))
        change(path, byte, new)
        try:
            repair_manifest(tmp_path, 0)
        except ValidationError:
            assert new != original[byte]
        else:
            accepted += 1
            found = CheckpointDirectory(str(tmp_path)).read_manifest(0)
            (tmp_path / "0.manifest").unlink()
            assert same(found, stored.manifest), (byte, new)
        change(path, byte, original[byte])
    assert accepted < 30, "only those that changed nothing"
    repair_manifest(tmp_path, 0)
    assert same(CheckpointDirectory(str(tmp_path)).read_manifest(0), stored.manifest)


@pytest.mark.parametrize("text", [
    b"{}", b"[]", b"null", b'{"__metadata__":{}}', b'{"__metadata__":{"shards":"[]"}}',
    b'{"__metadata__":{"shards":1}}', b'{"__metadata__":[]}', b'{"__metadata__":{"shards":"{\\"a\\":1}"}}',
    b'{"a":1,"a":2}', b'{"__metadata__":{"step":1.5}}',
    b'{"__metadata__":{"shards":"{}","step":3}}', b"[" * 100000, b'{"a":NaN}', b"\xff", b"",
])  # fmt: skip
def test_texts_that_are_no_header_are_refused(text):
    with pytest.raises(ValueError, match=r".") as caught:
        DataFileHeader.decode(len(text).to_bytes(8, "little") + text)
    assert not isinstance(caught.value, ValidationError)


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    lost(tmp_path)

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", fail)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(OSError, match="No space left"):
        repair_manifest(tmp_path, 0)
    assert sorted(os.listdir(tmp_path)) == before

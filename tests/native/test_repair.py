"""repair_manifest: a lost manifest from the data files, or a refusal that says what is in the way."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from paddle_flexckpt.catalog import Catalog, ValidationError
from paddle_flexckpt.engine.verification import repair_manifest, verify_checkpoint
from paddle_flexckpt.foreign.paddle_metadata import PADDLE_METADATA
from paddle_flexckpt.native.data_file import write_data_file
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.native.header import DataFileHeader
from paddle_flexckpt.native.manifest import Manifest, SaveInfo
from tests.native.samples import Stored, flip, items_of, store, values_of, whole
from tests.native.test_verify import change, checkpoint, shards_of_two_ranks
from tests.property.layouts import Shard


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
    assert "there is a manifest" in text
    assert str(manifest) in text
    assert "overwrite=True" in text
    change(manifest, 200, 255)
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
    assert repair_manifest(tmp_path, 0, fewer_files=True).files == ["0_0.safetensors"]
    assert verify_checkpoint(tmp_path).ok


def second_save(path, token: str, generation: int = 1) -> list[str]:
    """Data files of another save of id 0, as an interrupted replacement leaves them."""
    names = []
    for rank in (0, 1):
        shards = [shard for shard in shards_of_two_ranks() if shard.rank == rank]
        names.append(f"{rank}_0.{generation}.safetensors")
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
    assert "save_token" in refused(tmp_path)
    assert repair_manifest(tmp_path, 0, save_token=stored.manifest.save_token).left_out == names


def test_a_copy_of_a_file_is_refused(tmp_path):
    stored = lost(tmp_path)
    (tmp_path / "1_0.1.safetensors").write_bytes(stored.file(1).read_bytes())
    assert "a rank has several files of one save" in refused(tmp_path)


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

"""Verification and repair: what their reports say, whatever the checkpoint is.

That every damage is found is tested in tests/native/test_verify.py and tests/native/test_repair.py.
"""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from paddle_flexckpt.catalog import CorruptCheckpointError, Problem, ValidationError, validate_shards
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.foreign.paddle_files import open_to_save
from paddle_flexckpt.report import RepairReport, VerifyReport
from paddle_flexckpt.tools import verification
from paddle_flexckpt.tools.verification import repair_manifest, verify_checkpoint
from tests.native.samples import TOKEN, flip, store, whole
from tests.property.layouts import Shard


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Every call takes two and a half seconds."""
    times = iter([10.0, 12.5])
    monkeypatch.setattr(verification, "time", SimpleNamespace(perf_counter=lambda: next(times)))


SECONDS = {"total": 2.5}
TWO_RANKS = [
    Shard("w", "float32", (6, 5), (0, 0), (3, 5), None, 0), whole("none", "uint8", (0, 3)),
    Shard("w", "float32", (6, 5), (3, 0), (3, 5), None, 1), whole("d", "int64", (4,), 1),
]  # fmt: skip


def checkpoint(path, shards=TWO_RANKS, block_bytes=16, **header):
    stored = store(path, shards, block_bytes, world_size=1 + max(shard.rank for shard in shards), **header)
    open_to_save(str(path)).write_manifest(stored.manifest)
    return stored


def sound(stored, unique_id=0):
    total = sum(values.nbytes for values in stored.values)
    return VerifyReport(
        path=str(stored.directory), unique_id=unique_id, files=2, keys=3, items=4, total_bytes=total,
        bytes_read=int(stored.manifest.file_bytes.sum()), bytes_verified=total, problems=[], recoverable=True,
        seconds=SECONDS, has_checksums=True,
    )  # fmt: skip


def test_all_of_a_sound_checkpoint_is_reported(tmp_path):
    stored = checkpoint(tmp_path)
    assert verify_checkpoint(tmp_path) == sound(stored)


@pytest.mark.parametrize("unique_id", [None, 0, 3])
def test_the_highest_id_is_verified_unless_another_is_given(tmp_path, unique_id):
    stored = {each: checkpoint(tmp_path, unique_id=each) for each in (0, 1, 3)}
    chosen = 3 if unique_id is None else unique_id
    assert verify_checkpoint(tmp_path, unique_id) == sound(stored[chosen], chosen)


def test_an_id_that_is_not_there_is_refused(tmp_path):
    checkpoint(tmp_path)
    with pytest.raises(ValidationError, match="no checkpoint with id 1; complete ids here: .0."):
        verify_checkpoint(tmp_path, 1)


@pytest.mark.parametrize("unique_id", [None, 0, 3])
def test_a_damaged_manifest_is_the_one_problem(tmp_path, unique_id):
    for each in (0, 1, 3):
        checkpoint(tmp_path, unique_id=each)
        flip(tmp_path / f"{each}.manifest", 60)
    chosen = 3 if unique_id is None else unique_id
    with pytest.raises(CorruptCheckpointError) as caught:
        SourceDirectory(tmp_path).read_manifest(chosen)
    remedy = "restore the file from a copy, or rebuild it with repair_manifest(path, unique_id, overwrite=True)"
    what = str(caught.value).partition(". Remedy (FC")[0]
    assert what.count(f"{chosen}.manifest") == 1 and "Remedy" not in what
    problem = Problem(
        f"the manifest is damaged: {what}", file=str(tmp_path / f"{chosen}.manifest"), remedy=remedy, code="FC306"
    )
    assert verify_checkpoint(tmp_path, unique_id) == VerifyReport(
        str(tmp_path), chosen, problems=[problem], seconds=SECONDS
    )


def weights(path):
    path.mkdir(exist_ok=True)
    file = path / "model.safetensors"
    safetensors_numpy.save_file({"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.int8)}, file)
    return file


def test_of_another_programs_only_what_it_says_of_itself_is_looked_at(tmp_path):
    weights(tmp_path)
    assert verify_checkpoint(tmp_path) == VerifyReport(
        str(tmp_path), 0, files=1, keys=2, items=2, total_bytes=28, recoverable=True, seconds=SECONDS,
        has_checksums=False,
    )  # fmt: skip


@pytest.mark.parametrize("unique_id", [None, 0])
def test_damage_of_another_programs_is_told_in_its_own_words(tmp_path, unique_id):
    flip(weights(tmp_path), 10, 7)
    with pytest.raises(CorruptCheckpointError) as caught:
        SourceDirectory(tmp_path).read_manifest()
    assert verify_checkpoint(tmp_path, unique_id) == VerifyReport(
        str(tmp_path), 0, problems=[Problem(str(caught.value))], seconds=SECONDS, has_checksums=False
    )


def test_damage_of_another_programs_beside_a_checkpoint_is_told_by_its_id(tmp_path):
    checkpoint(tmp_path)
    (tmp_path / "5.metadata").write_bytes(b"no pickle")
    with pytest.raises(CorruptCheckpointError) as caught:
        SourceDirectory(tmp_path).read_manifest(5)
    assert verify_checkpoint(tmp_path, 5) == VerifyReport(
        str(tmp_path), 5, problems=[Problem(str(caught.value))], seconds=SECONDS, has_checksums=False
    )


# -- what the manifest itself says -------------------------------------------------------------------------------------


def test_holes_are_problems_beside_the_files(tmp_path, monkeypatch):
    stored = checkpoint(tmp_path, [Shard("w", "uint8", (8, 4), (0, 0), (5, 4), None, 0), whole("v", "uint8", (40,))])
    report = verify_checkpoint(tmp_path)
    assert (len(report.problems), report.recoverable, report.bytes_verified) == (1, False, 60)
    flip(stored.file(), int(stored.manifest.catalog.byte_offset[1]))
    monkeypatch.setattr(verification, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    damaged, hole = verify_checkpoint(tmp_path).problems
    assert (damaged.key, hole) == ("v", report.problems[0])


def test_malformed_shards_are_told_instead_of_what_they_cover(tmp_path, monkeypatch):
    """Its second shard leaves its tensor, and nothing holds the rest."""
    stored = checkpoint(tmp_path, [Shard("w", "uint8", (8,), (0,), (3,), None, 0), whole("v", "uint8", (4,))])
    offset = stored.manifest.catalog.offset.copy()
    offset[0] = 6
    catalog = replace(stored.manifest.catalog, offset=offset)
    expected = validate_shards(catalog)
    assert len(expected) == 1
    monkeypatch.setattr(verification, "LockedManifest", lambda *_: _Held(replace(stored.manifest, catalog=catalog)))
    report = verify_checkpoint(tmp_path)
    assert report.problems[-1:] == expected
    assert not report.recoverable
    assert not any("no rank holds" in problem.what for problem in report.problems)


class _Held:
    """A manifest that is held without a lock."""

    def __init__(self, manifest):
        self.manifest = manifest

    def __enter__(self):
        return self.manifest

    def __exit__(self, *exc_info):
        pass


# -- manifests of other saves ------------------------------------------------------------------------------------------


def of_ranks(count):
    return [Shard("w", "uint8", (8 * count,), (8 * r,), (8,), None, r) for r in range(count)]


def doubts(path):
    remedy = "restore the manifest that belongs to the data files"
    return [problem for problem in verify_checkpoint(path).problems if problem.remedy == remedy]


def test_a_manifest_of_another_save_is_named(tmp_path):
    """No byte is as it says, and the files tell of other saves; three of them are named."""
    stored = checkpoint(tmp_path, of_ranks(5))
    for rank, token in enumerate(("c", "a", "d", "b", "a")):
        data = stored.file(rank).read_bytes().replace(TOKEN.encode(), token.encode() * 32)
        stored.file(rank).write_bytes(data[:-8] + bytes(255 - value for value in data[-8:]))
    (doubt,) = doubts(tmp_path)
    assert doubt == Problem(
        "no data file is of the save that this manifest belongs to", file=str(tmp_path / "0.manifest"),
        expected=" or ".join(token * 32 for token in "abc"), got=TOKEN,
        remedy="restore the manifest that belongs to the data files",
    code="FC304")  # fmt: skip


def test_a_file_of_another_save_is_no_doubt_of_the_manifest(tmp_path):
    stored = checkpoint(tmp_path, of_ranks(2))
    data = stored.file(1).read_bytes().replace(TOKEN.encode(), b"a" * 32)
    stored.file(1).write_bytes(data[:-8] + bytes(255 - value for value in data[-8:]))
    assert doubts(tmp_path) == []


def rename(stored, rank, new):
    os.rename(stored.file(rank), stored.directory / new)


def test_a_manifest_whose_files_have_other_names_is_named(tmp_path):
    stored = checkpoint(tmp_path, of_ranks(5))
    for rank in range(5):
        rename(stored, rank, f"{rank}_0.1.safetensors")
    # Those of another id have nothing to do with it.
    (tmp_path / "0_7.safetensors").write_bytes(b"")
    (doubt,) = doubts(tmp_path)
    assert doubt == Problem(
        "the files that this manifest names are missing, and others of its id are there",
        file=str(tmp_path / "0.manifest"),
        expected="0_0.safetensors, 1_0.safetensors, 2_0.safetensors",
        got="0_0.1.safetensors, 1_0.1.safetensors, 2_0.1.safetensors",
        remedy="restore the manifest that belongs to the data files",
        code="FC304",
    )


@pytest.mark.parametrize(
    "renamed", [{0: "0_0.1.safetensors"}, {0: "0_7.safetensors", 1: "1_7.safetensors"}], ids=["one", "all"]
)
def test_files_that_are_missing_are_no_doubt_of_the_manifest(tmp_path, renamed):
    """One of them is there, or no others of its id are."""
    stored = checkpoint(tmp_path, of_ranks(2))
    for rank, new in renamed.items():
        rename(stored, rank, new)
    assert doubts(tmp_path) == []


def test_others_of_its_id_beside_its_own_files_are_no_doubt(tmp_path):
    stored = checkpoint(tmp_path, of_ranks(2))
    (tmp_path / "0_0.1.safetensors").write_bytes(stored.file(0).read_bytes())
    assert verify_checkpoint(tmp_path).ok


# -- repair ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [None, 12])
def test_all_of_a_repair_is_reported(tmp_path, step):
    stored = store(tmp_path, TWO_RANKS, world_size=2, unique_id=4, step=step)
    assert repair_manifest(tmp_path, 4) == RepairReport(
        path=str(tmp_path), unique_id=4, save_token=TOKEN, step=step, files=["0_4.safetensors", "1_4.safetensors"],
        left_out=[], keys=3, items=4, bytes_read=sum(values.nbytes for values in stored.values), seconds=SECONDS,
    )  # fmt: skip
    assert SourceDirectory(tmp_path).read_manifest(4).save_token == TOKEN


def test_each_option_of_a_repair_has_its_effect(tmp_path, monkeypatch):
    """Two saves of one id, each without the file of one of its ranks."""
    store(tmp_path, [whole("w", "uint8", (4,))], world_size=2)
    other = tmp_path / "other"
    other.mkdir()
    theirs = store(other, [whole("v", "uint8", (8,))], save_token="f" * 32, world_size=2)
    os.rename(theirs.file(), tmp_path / "0_0.1.safetensors")
    monkeypatch.setattr(verification, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    with pytest.raises(ValidationError, match="files of several saves"):
        repair_manifest(tmp_path, 0, fewer_files=True)
    with pytest.raises(ValidationError, match="not as many data files as ranks"):
        repair_manifest(tmp_path, 0, save_token=TOKEN)
    report = repair_manifest(tmp_path, 0, save_token=TOKEN, fewer_files=True)
    assert (report.files, report.left_out, report.bytes_read) == (["0_0.safetensors"], ["0_0.1.safetensors"], 4)
    with pytest.raises(ValidationError, match="there is a manifest"):
        repair_manifest(tmp_path, 0, save_token="f" * 32, fewer_files=True)
    report = repair_manifest(tmp_path, 0, save_token="f" * 32, fewer_files=True, overwrite=True)
    assert (report.files, report.left_out, report.save_token) == (["0_0.1.safetensors"], ["0_0.safetensors"], "f" * 32)

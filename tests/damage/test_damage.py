"""A part of the campaign of random damage, and what the campaign itself has to notice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paddle_flexckpt.catalog import Problem
from paddle_flexckpt.native.checksums import BLOCK_BYTES
from paddle_flexckpt.tools.verification import verify_checkpoint
from paddle_flexckpt.transfer import files
from tests.damage import campaign
from tests.damage.checkpoint import ID, Loads, prepare
from tests.damage.kinds import ALL
from tests.damage.location import damaged, may_load, why_not_located
from tests.ramdisk import memory_directory

PER_KIND_WITH_REPLICAS = 2


@pytest.fixture(scope="module")
def saves():
    with memory_directory() as root:
        yield prepare(root)


@pytest.mark.parametrize("per_kind", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_every_random_damage_is_found_and_located_and_never_loaded(per_kind):
    totals = campaign.run_seeds(range(per_kind * len(ALL)))
    assert totals.failures == []
    everything = dict.fromkeys(ALL, per_kind)
    assert totals.made == totals.found == totals.located == everything
    assert {kind: totals.refused[kind] + totals.harmless[kind] for kind in ALL} == everything
    # Only headers of data files are needed by nobody who has the manifest.
    assert {kind for kind in ALL if totals.harmless[kind]} <= {
        "bit in a header", "bit in a header's length", "bytes in a header", "neighbours in a header",
        "zeroed sectors", "lost writes", "shifted", "parts exchanged", "several at once",
    }  # fmt: skip
    for kind in ("bit in data", "truncated", "file of another save", "file missing", "manifest of another save"):
        assert totals.refused[kind] == per_kind


def test_with_replicas_every_random_damage_that_leaves_a_copy_is_recovered():
    totals = campaign.run_seeds(range(PER_KIND_WITH_REPLICAS * len(ALL)), replicas=2)
    assert totals.failures == []
    everything = dict.fromkeys(ALL, PER_KIND_WITH_REPLICAS)
    assert totals.made == totals.found == totals.located == everything
    for kind in ("bit in data", "bytes in data", "ranks swapped", "rank duplicated", "header of another save"):
        assert totals.harmless[kind] == PER_KIND_WITH_REPLICAS
    assert sum(totals.replaced.values()) > 5
    assert totals.refused["several at once"] + totals.refused["file missing"] > 0


def test_what_does_not_belong_to_the_checkpoint_is_no_damage(saves):
    names = {f"0_{ID}.7.safetensors": b"stale", f"1_{ID}.part": b"", f"{ID}.manifest.0f.tmp": b"half", "notes": b"x"}
    before = sorted(path.name for path in saves.path.iterdir())
    saves.write(names)
    try:
        assert verify_checkpoint(saves.path, ID).ok
        result, wrong = Loads(saves).load(verify="full")
        assert wrong == []
        assert result.bytes_verified == result.bytes_read == result.bytes_needed
    finally:
        saves.write(dict.fromkeys(names))
    assert sorted(path.name for path in saves.path.iterdir()) == before


def _verification_with(change):
    """A verification whose problems are changed."""

    def verify(path, unique_id):
        report = verify_checkpoint(path, unique_id)
        return replace(report, problems=change(report.problems))

    return verify


@pytest.mark.parametrize(
    "change",
    [
        lambda problems: [],
        lambda problems: [replace(p, key="bias") if p.key else p for p in problems],
        lambda problems: [replace(p, rank=9) if p.key else p for p in problems],
        lambda problems: [replace(p, file=f"{p.file}x") for p in problems],
        lambda problems: [replace(p, offset=p.offset + BLOCK_BYTES, end=p.end + BLOCK_BYTES) for p in problems],
        lambda problems: [replace(p, offset=0, end=1 << 30) for p in problems],
        lambda problems: [*problems, Problem("another one", file="elsewhere")],
    ],
    ids=["none", "key", "rank", "file", "place", "everywhere", "too many"],
)  # fmt: skip
def test_a_verification_that_says_something_else_is_a_failure(saves, monkeypatch, change):
    monkeypatch.setattr(campaign, "verify_checkpoint", _verification_with(change))
    first, totals = list(ALL).index("bit in data"), campaign.Totals()
    # One that is not in the tensor that the change above blames.
    seed = next(s for s in range(first, 50 * len(ALL), len(ALL)) if _damaged_key(s, saves) == "matrix")
    campaign.check(seed, saves, Loads(saves), totals)
    assert sum(totals.located.values()) == 0
    assert len(totals.failures) == 1
    assert "verification: " in totals.failures[0][1]


def _damaged_key(seed, saves):
    _, files = campaign.damage_of(seed, saves)
    ((name, (position, *_)),) = damaged(files, saves).items()
    catalog = saves.manifest.catalog
    begin, end = catalog.byte_offset, catalog.byte_offset + catalog.byte_length
    mine = catalog.file == catalog.files.index(name)
    return catalog.key_name(int(np.flatnonzero(mine & (begin <= position) & (position < end))[0]))


def test_a_load_that_does_not_verify_is_a_failure(saves, monkeypatch):
    reader = files.FileReader
    monkeypatch.setattr(files, "FileReader", lambda directory, manifest, *_: reader(directory, manifest, "off"))
    totals = campaign.Totals()
    campaign.check(list(ALL).index("bit in data"), saves, Loads(saves), totals)
    assert sum(totals.located.values()) == 1
    assert len(totals.failures) == 2 * len(campaign.LOADS)
    assert "neither what was saved nor what was there before" in totals.failures[0][1]


def test_an_error_that_is_not_about_the_checkpoint_is_a_failure(saves, monkeypatch):
    def broken(*_):
        raise TypeError("something else")

    monkeypatch.setattr(files, "FileReader", broken)
    totals = campaign.Totals()
    campaign.check(list(ALL).index("bit in data"), saves, Loads(saves), totals)
    assert len(totals.failures) == len(campaign.LOADS)
    assert "something else" in totals.failures[0][1]


def test_bytes_that_no_target_needs_are_those_of_headers_behind_the_token(saves):
    name = saves.data_names[1]
    content = saves.files[name]

    def with_byte(at):
        return {**saves.files, name: content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]}

    token, start = content.index(saves.manifest.save_token.encode()), saves.data_start(name)
    for at, harmless in ((0, True), (token, False), (start - 1, True), (start, False), (len(content) - 1, False)):
        files = with_byte(at)
        damage = damaged(files, saves)
        assert {key: value.tolist() for key, value in damage.items()} == {name: [at]}
        assert may_load(damage, files, saves) == harmless
        saves.write({name: files[name]})
        try:
            report = verify_checkpoint(saves.path, ID)
            assert why_not_located(report, damage, files, saves) is None
            result, wrong = Loads(saves).load(verify="full")
        finally:
            saves.write({name: content})
        assert wrong == []
        assert isinstance(result, Exception) != harmless
    assert np.array_equal(damaged({**saves.files, name: None}, saves)[name], np.arange(len(content)))

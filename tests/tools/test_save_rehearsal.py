"""A rehearsal of a save says exactly what saves count, and fails with their words."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from paddle_flexckpt.background.writer import BackgroundWriter
from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.foreign.formats import SourceDirectory
from paddle_flexckpt.media.local import LocalOutputFile
from paddle_flexckpt.native import checksums
from paddle_flexckpt.native import data_file as data_file_module
from paddle_flexckpt.planning.layouts import Layout, Model, ModelTensor
from paddle_flexckpt.planning.strategy import parse_strategy
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.tools import save_rehearsal
from paddle_flexckpt.tools.save_rehearsal import rehearse_save
from tests.saved import data_file
from tests.tools.rehearsed import state_of
from tests.tools.test_rehearsal import layout

TEXTS = [
    "dp=1",
    "dp=3",
    "tp=4",
    "tp=2,dp=2",
    "pp=2",
    "sharding=v1:2",
    "sharding=v2:3",
    "tp=2,dp=2,sharding=v2:2",
    "sharding=stage2:2",
    "sharding=stage3:2",
]


@pytest.fixture
def counted(monkeypatch):
    """Counts calls that write each data file, and bytes that all ranks hash."""
    writes, hashed, lock = Counter(), [0], threading.Lock()
    write_many, hash_block = LocalOutputFile.write_many, checksums.hash_block

    def write(self, parts):
        with lock:
            writes[Path(self._path).name] += 1
        write_many(self, parts)

    def note(block):
        with lock:
            hashed[0] += memoryview(block).nbytes
        return hash_block(block)

    monkeypatch.setattr(LocalOutputFile, "write_many", write)
    for module in (checksums, data_file_module):
        monkeypatch.setattr(module, "hash_block", note)
    return writes, hashed


def save(path, target: Layout, **options):
    """Saves a job; returns the reports of its ranks."""

    def job(comm):
        return save_state_dict(state_of(target.catalog(comm.position)), str(path), comm, **options)

    return SimulatedWorld(target.strategy.ranks).run(job)


def turn_of(path) -> int:
    """The number that said which two ranks compare a replica."""
    return int(SourceDirectory(str(path)).read_manifest(None).save_token[-8:], 16)


def check(path, target: Layout, counted, **options):
    writes, hashed = counted
    reports = save(path, target, **options)
    report = rehearse_save(target, turn=turn_of(path), **options)
    assert report.error == ""
    for name in ("keys", "items", "total_bytes", "held_bytes", "imbalance"):
        assert {getattr(each, name) for each in reports} == {getattr(report, name)}
    assert report.ranks["bytes_written"] == [each.bytes_written for each in reports]
    files = sorted(name for name in writes if name.endswith(".safetensors"))
    assert report.files == len(files)
    assert report.ranks["writes"] == [writes[data_file(path, rank)] for rank in range(len(reports))]
    assert sum(report.ranks["hashed_bytes"]) == hashed[0]
    assert sum(report.ranks["items"]) == report.items
    return report


@pytest.mark.parametrize("text", TEXTS)
def test_counts_are_those_of_a_save(tmp_path, counted, text):
    check(tmp_path, layout(text), counted)


@pytest.mark.parametrize("options", [{"save_replicas": True}, {"check_replicas": "all"}])
def test_counts_are_those_of_a_save_with_other_replicas(tmp_path, counted, options):
    report = check(tmp_path, layout("tp=2,dp=3", states=()), counted, **options)
    assert (report.total_bytes == report.held_bytes) == ("save_replicas" in options)


def test_many_small_items_go_together(tmp_path, counted):
    tensors = tuple(ModelTensor(f"w{n}", (3, n % 7 + 1)) for n in range(2500))
    report = check(tmp_path, Layout(Model(tensors, states=()), parse_strategy("dp=2")), counted)
    assert max(report.ranks["writes"]) > 1


def test_a_copy_takes_the_memory_that_is_said(tmp_path):
    target = layout("dp=1", scale=4)
    report = rehearse_save(target)
    with BackgroundWriter() as writer:
        save_state_dict(state_of(target.catalog(0)), str(tmp_path), SoloCommunicator(), async_save=writer).result()
        assert report.ranks["staging_bytes"][0] == pytest.approx(writer.staging_bytes, rel=0.05)


def test_what_is_not_counted_is_said(monkeypatch):
    monkeypatch.setattr(save_rehearsal, "SPREAD_ROWS", 100)
    notes = rehearse_save(layout("tp=2"), notes=["first"]).notes
    assert notes[0] == "first"
    assert "beyond 100 shards" in notes[1]
    with pytest.raises(ValidationError, match="'equal' or 'all'; got False"):
        rehearse_save(layout("tp=2"), check_replicas=False)


def test_seconds_are_those_of_the_slowest_rank():
    report = rehearse_save(layout("pp=2"), bytes_per_second=1e6)
    assert report.seconds == {"write": report.ranks["bytes_written"][report.worst] / 1e6}


def test_errors_are_those_of_a_save(tmp_path, monkeypatch):
    target = layout("tp=2")
    whole = Layout.catalogs

    def torn(self, ranks):
        catalog = whole(self, ranks)
        first = np.flatnonzero(catalog.rank == 1)[:1]
        return catalog.take(~np.isin(np.arange(len(catalog)), first))

    monkeypatch.setattr(Layout, "catalogs", torn)
    report = rehearse_save(target)
    with pytest.raises(ValidationError) as raised:
        save(tmp_path, target)
    assert "embedding" in report.error
    assert str(raised.value).partition(": ")[2] == report.error.partition(": ")[2]

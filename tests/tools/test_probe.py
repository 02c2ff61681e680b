"""A probe writes and reads what it says, leaves nothing, and fails loudly. Nothing here is timed."""

from __future__ import annotations

import itertools
import json
import threading

import pytest

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.media.local import LocalBackend, LocalInputFile, LocalOutputFile
from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.tools import probe as module
from paddle_flexckpt.tools.probe import ProbeReport, probe, read_probe

MIB = 1 << 20


@pytest.fixture
def counted(monkeypatch):
    """Counts bytes that are written and read, by file."""
    written, read, lock = {}, {}, threading.Lock()
    write_many, read_into = LocalOutputFile.write_many, LocalInputFile.read_into

    def write(self, parts):
        with lock:
            written[self._path] = written.get(self._path, 0) + sum(len(part) for part in parts)
        write_many(self, parts)

    def note(self, buffer, offset):
        got = read_into(self, buffer, offset)
        with lock:
            read[self._path] = read.get(self._path, 0) + got
        return got

    monkeypatch.setattr(LocalOutputFile, "write_many", write)
    monkeypatch.setattr(LocalInputFile, "read_into", note)
    return written, read


@pytest.mark.parametrize(("nbytes", "threads"), [(MIB, 1), (10 * MIB, 2), (9 * MIB + 1, 3)])
def test_all_is_written_and_read_and_removed(tmp_path, counted, nbytes, threads):
    report = probe(str(tmp_path), nbytes, threads)
    written, read = counted
    each = -(-nbytes // threads)
    assert sorted(written.values()) == [each] * threads
    small = 64 * 4096
    assert sorted(read.values()) == sorted([each + 2 * small, *[each + small] * (threads - 1)])
    assert (report.nbytes, report.threads) == (each * threads, threads)
    assert list(tmp_path.iterdir()) == []
    assert min(report.write_bytes_per_second, report.read_bytes_per_second) > 0
    assert min(report.latency_seconds, report.request_seconds) > 0


def test_rates_are_bytes_over_seconds(tmp_path, monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(module.time, "perf_counter", lambda: float(next(ticks)))
    report = probe(str(tmp_path), MIB, 1)
    assert (report.write_bytes_per_second, report.read_bytes_per_second) == (MIB, MIB)
    assert report.latency_seconds == 1.0
    assert report.request_seconds == (2 * 64 + 1) / 64
    assert "1 threads write 1.00 MiB/s" in report.summary() or "1.0 MiB/s" in report.summary()


def test_a_failure_leaves_nothing(tmp_path, monkeypatch):
    def fail(self, buffer, offset):
        raise OSError("the medium is gone")

    monkeypatch.setattr(LocalInputFile, "read_into", fail)
    with pytest.raises(OSError, match="the medium is gone"):
        probe(str(tmp_path), MIB, 2)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_ends_early_is_an_error(tmp_path, monkeypatch):
    create = LocalBackend.create

    def shorter(self, name, mode="new", size=None):
        file = create(self, name, mode, size)
        file.write = lambda data: LocalOutputFile.write(file, memoryview(data)[:100])
        return file

    monkeypatch.setattr(LocalBackend, "create", shorter)
    with pytest.raises(OSError, match="ends early"):
        probe(str(tmp_path), MIB, 1)


def test_any_medium_is_measured():
    pytest.importorskip("fsspec")
    backend = open_backend("memory://probed/here")
    report = probe(backend, MIB, 2)
    assert report.nbytes == MIB
    assert backend.names() == []


@pytest.mark.parametrize(("nbytes", "threads"), [(1, 1), (MIB, 0), (MIB, 1000)])
def test_numbers_that_make_no_sense(tmp_path, nbytes, threads):
    with pytest.raises(ValidationError, match="1048576 bytes or more, and 1 to 256 threads"):
        probe(str(tmp_path), nbytes, threads)


def test_a_directory_that_is_not_there_is_not_made(tmp_path):
    with pytest.raises(ValidationError, match="no directory"):
        probe(str(tmp_path / "absent"))
    assert list(tmp_path.iterdir()) == []


def test_what_was_found_can_be_kept(tmp_path):
    report = ProbeReport("here", MIB, 2, 1e9, 2e9, 1e-4, 1e-5)
    path = tmp_path / "found.json"
    path.write_text(json.dumps(report.as_dict()))
    assert read_probe(path) == report
    for text, words in (
        ("{", "cannot read a probe"),
        ("[]", "cannot read a probe"),
        ('{"path": "here"}', "KeyError"),
        (json.dumps({**report.as_dict(), "threads": 0}), "positive numbers"),
        (json.dumps({**report.as_dict(), "threads": "2"}), "positive numbers"),
    ):
        path.write_text(text)
        with pytest.raises(ValidationError, match=words):
            read_probe(path)

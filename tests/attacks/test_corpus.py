"""What the search has kept is read again, and the search itself: it finds, keeps, and makes small."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError
from paddle_flexckpt.native.safetensors_header import header_bytes
from tests.attacks import fuzz, targets
from tests.attacks.targets import SPARE_BYTES, TARGETS, Target, outcome

MOST_FILES, MOST_BYTES = 150, 8192


@pytest.mark.parametrize("name", TARGETS)
def test_the_corpus_is_read_as_it_should_be(name):
    target, corpus = TARGETS[name], fuzz.corpus_of(TARGETS[name])
    refused = [outcome(target, data) for data in corpus]
    assert any(isinstance(error, CheckpointError) for error in refused)
    assert 0 < len(corpus) <= MOST_FILES
    assert max(map(len, corpus)) <= MOST_BYTES
    assert outcome(target, target.seeds()[0]) is None
    # It reaches what the good files do not: otherwise it would be of no use.
    seeds = frozenset().union(*(fuzz.edges_of(target, data) for data in target.seeds()))
    reached = frozenset().union(*(fuzz.edges_of(target, data) for data in corpus))
    assert len(reached - seeds) > 20


def _target(read) -> Target:
    return Target("toy", read, lambda: [b"seed"], (b"word",))


def test_what_a_target_may_not_do_is_a_failure(monkeypatch):
    def declared(data):
        np.zeros(int.from_bytes(data[:4], "little"), dtype=np.uint8)

    assert outcome(_target(declared), (SPARE_BYTES // 2).to_bytes(4, "little")) is None
    failure = fuzz.failure_of(_target(declared), (2 * SPARE_BYTES).to_bytes(4, "little"))
    assert "bytes of memory for 4 bytes" in failure
    # As much as twice the input is allowed on top.
    assert outcome(_target(declared), (2 * SPARE_BYTES).to_bytes(4, "little") + bytes(SPARE_BYTES)) is None

    def other_error(data):
        raise KeyError("w")

    assert fuzz.failure_of(_target(other_error), b"") == "KeyError: 'w'"

    def long_error(data):
        raise CorruptCheckpointError("a" * 30_000)

    assert "an error of 30000 characters" in fuzz.failure_of(_target(long_error), b"")

    def endless(data):
        while True:
            pass

    monkeypatch.setattr(fuzz, "HANG_SECONDS", 0.2)
    assert fuzz.failure_of(_target(endless), b"") == "Hang: no end after 0.2 s"
    assert fuzz.failure_of(_target(lambda data: None), b"") is None
    ticks = iter(range(0, 100, 9))
    monkeypatch.setattr(targets, "time", SimpleNamespace(process_time=lambda: next(ticks)))
    assert "9 s for 0 bytes" in fuzz.failure_of(_target(lambda data: None), b"")


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A reader with a fault four steps deep, of which only lines that are reached tell."""
    source = tmp_path / "paddle_flexckpt" / "native" / "toy.py"
    source.parent.mkdir(parents=True)
    source.write_text(
        "def read(data, refuse):\n"
        "    if data[:1] != b'D':\n"
        "        raise refuse('the first byte is not as it should be')\n"
        "    if data[1:2] != b'E':\n"
        "        raise refuse('the second byte is not as it should be')\n"
        "    if data[2:3] != b'E':\n"
        "        raise refuse('the third byte is not as it should be')\n"
        "    if data[3:4] == b'P':\n"
        "        raise KeyError('a fault')\n"
        "    return 0\n"
    )
    names: dict = {}
    exec(compile(source.read_text(), str(source), "exec"), names)
    monkeypatch.setattr(fuzz, "CORPUS", tmp_path / "corpus")
    target = Target(
        "toy", lambda data: names["read"](data, CorruptCheckpointError), lambda: [b"...."], (b"P", b"E", b"D")
    )
    return target


def test_the_search_follows_what_it_reaches_and_makes_it_small(toy):
    search = fuzz.Search(toy, seed=3)
    search.run(seconds=60, most_runs=100_000)
    ((data, reason),) = search.failures
    assert reason == "KeyError: 'a fault'"
    assert data == b"DEEP"
    kept = fuzz.corpus_of(toy)
    assert {b"D", b"DE", b"DEE", b"DEEP"} <= set(kept)
    # Another search begins with what was kept, and meets the failure at once.
    again = fuzz.Search(toy, seed=4)
    assert again.failures == [(b"DEEP", reason)]


def test_distilling_keeps_what_reaches_something_and_what_fails(toy):
    for data in (b"D", b"D!", b"DE", b"DE!", b"DEE", b"DEEP", b"!!"):
        fuzz.keep(toy, data)
    fuzz.distil(toy)
    kept = set(fuzz.corpus_of(toy))
    assert kept >= {b"DEEP"}
    assert len(kept & {b"D", b"D!"}) == len(kept & {b"DE", b"DE!"}) == 1
    assert b"!!" not in kept


def test_targets_read_what_they_say(tmp_path):
    """Each target refuses its first seed when a byte of it is cut off: it is that file that is read."""
    for target in TARGETS.values():
        data = target.seeds()[0]
        assert outcome(target, data) is None
        assert outcome(target, data[:-1]) is not None or target.name == "data_file"
    with pytest.raises(CorruptCheckpointError):
        header_bytes(b"", 0, "f")
    slow = replace(TARGETS["pickle"], read=lambda data: None)
    assert outcome(slow, b"") is None

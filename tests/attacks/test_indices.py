"""Indices of safetensors files, and files under them, made to do harm."""

from __future__ import annotations

import json
import os
import time
import tracemalloc

import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError
from paddle_flexckpt.foreign.formats import SourceDirectory, detect_format
from paddle_flexckpt.foreign.huggingface import MAX_INDEX_BYTES
from tests.attacks.test_files import HEADERS, NAMES

INDEX = "model.safetensors.index.json"
FILE = "model-00001-of-00001.safetensors"
GOOD = b'{"w": "%s"}' % FILE.encode()

INDICES = {
    "empty": (b"", "where one of"),
    "no JSON": (b"\x80\x04.", "where one of"),
    "a list": (b"[]", "where one of"),
    "a map that is a list": (b'{"weight_map": []}', "where one of"),
    "a map that is a text": (b'{"weight_map": "w"}', "where one of"),
    "a file that is a number": (b'{"weight_map": {"w": 1}}', "where a text stands"),
    "a file that is a list": (b'{"weight_map": {"w": ["a"]}}', "where a text stands"),
    "the same tensor twice": (b'{"weight_map": {"w": "a", "w": "b"}}', "'w' stands in it twice"),
    "two maps": (b'{"weight_map": %s, "weight_map": {}}' % GOOD, "'weight_map' stands in it twice"),
    "two objects": (b'{"weight_map": %s} {}' % GOOD, "more than one JSON value"),
    "cut short": (b'{"weight_map": {"w": "a"', "where one of"),
    "deep lists": (b'{"metadata": ' + b"[" * 200_000, "is not an index"),
    "deep objects": (b'{"a":' * 200_000, "is not an index"),
    "long number": (b'{"metadata": {"total_size": ' + b"9" * 1_000_000 + b"}}", "is not an index"),
    "long name": (b'{"weight_map": {"' + b"w" * 100_000 + b'": "a"}}', "too long"),
    "long file": (b'{"weight_map": {"w": "' + b"a" * 100_000 + b'"}}', "too long"),
    "long setting": (b'{"metadata": "' + b"a" * 100_000 + b'"}', "is not an index"),
    "no UTF-8": (b'{"weight_map": {"\xff": "a"}}', "is not an index"),
    "no map": (b'{"metadata": {}}', "has no weight_map"),
}


def read(path):
    """Time and memory stay in proportion, and nothing but a named error comes out."""
    size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    tracemalloc.start()
    begin = time.process_time()
    try:
        detect_format(path)
        return SourceDirectory(path).read_manifest()
    finally:
        memory, seconds = tracemalloc.get_traced_memory()[1], time.process_time() - begin
        tracemalloc.stop()
        assert memory < (1 << 20) + 2 * size
        assert seconds < 5


@pytest.fixture
def good(tmp_path):
    (tmp_path / INDEX).write_bytes(b'{"weight_map": %s}' % GOOD)
    (tmp_path / FILE).write_bytes(safetensors_numpy.save({"w": np.zeros(4, np.float32)}))
    return tmp_path


@pytest.mark.parametrize("name", INDICES)
@pytest.mark.parametrize("stem", ["model", "optimizer"])
def test_indices_are_refused(good, name, stem):
    data, what = INDICES[name]
    if stem == "optimizer" and name == "no map":
        return  # that of optimizer states may have none
    (good / f"{stem}.safetensors.index.json").write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=rf"{stem}\.safetensors\.index\.json") as caught:
        read(good)
    assert what in str(caught.value)
    assert "Remedy (FC" in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", NAMES)
def test_files_of_an_index_stay_in_its_directory(good, name):
    (good / INDEX).write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(CorruptCheckpointError, match=r"leaves the checkpoint's directory|is not an index"):
        read(good)


def test_links_lead_nowhere_else(good, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    for name in (FILE, INDEX):
        os.rename(good / name, outside / name)
        os.symlink(outside / name, good / name)
        with pytest.raises(CorruptCheckpointError, match=f"{name} is a link out of the checkpoint's directory"):
            read(good)
        os.unlink(good / name)
        os.rename(outside / name, good / name)
    read(good)


def test_pipes_are_no_files(good):
    for name in (FILE, INDEX):
        os.rename(good / name, good / "kept")
        os.mkfifo(good / name)
        with pytest.raises(CorruptCheckpointError, match="is not a regular file"):
            read(good)
        os.unlink(good / name)
        os.rename(good / "kept", good / name)


@pytest.mark.parametrize("name", HEADERS)
def test_headers_are_refused(good, name):
    (good / FILE).write_bytes(HEADERS[name][0])
    with pytest.raises(CorruptCheckpointError, match=f"{FILE} is damaged"):
        read(good)
    # And as states of one rank of a unified checkpoint.
    (good / FILE).write_bytes(safetensors_numpy.save({"w": np.zeros(4, np.float32)}))
    (good / "optimizer.tp00.safetensors").write_bytes(HEADERS[name][0])
    with pytest.raises(CorruptCheckpointError, match=r"optimizer\.tp00\.safetensors is damaged"):
        read(good)


def test_an_index_that_is_too_large(good):
    with open(good / INDEX, "r+b") as file:
        file.truncate(MAX_INDEX_BYTES + 1)
    with pytest.raises(CorruptCheckpointError, match=rf"an index has no more than {MAX_INDEX_BYTES}"):
        read(good)


def test_two_files_under_one_name_of_the_index(good):
    """The index has a tensor once; the files have it twice."""
    (good / "other.safetensors").write_bytes(safetensors_numpy.save({"v": np.ones(2), "w": np.ones(4, np.float32)}))
    (good / INDEX).write_text(json.dumps({"weight_map": {"w": FILE, "v": "other.safetensors"}}))
    with pytest.raises(CorruptCheckpointError, match="has a tensor that the index has elsewhere"):
        read(good)


@pytest.mark.parametrize("place", ["tp99999999999999999999", "tp00_shard123456789", "pp9999", "tp00_tp01"])
def test_places_of_ranks_that_are_none(good, place):
    """Nothing is made of a number in a file's name."""
    (good / f"optimizer.{place}.safetensors").write_bytes(
        safetensors_numpy.save({"w/moment1_0": np.zeros(4, np.float32)})
    )
    with pytest.raises(CheckpointError):
        read(good)


def test_an_axis_that_nobody_has(good):
    """A whole that is only declared costs nothing."""
    empty = {"w": {"dtype": "F32", "shape": [1 << 59, 0], "data_offsets": [0, 0]}}
    text = json.dumps(empty).encode()
    (good / FILE).write_bytes(len(text).to_bytes(8, "little") + text)
    (good / "optimizer.tp00.safetensors").write_bytes(
        safetensors_numpy.save({"w/moment1_0": np.zeros((3, 1), np.float32)})
    )
    with pytest.raises(CheckpointError, match="does not fit its parameter"):
        read(good)

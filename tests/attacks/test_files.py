"""safetensors headers, manifests and file names made to do harm."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError
from paddle_flexckpt.foreign.paddle_checkpoint import read_paddle_manifest
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.reader import FileReader
from paddle_flexckpt.native.safetensors_header import header_bytes, parse_header
from tests.foreign.writers import metadata_pickle
from tests.native.samples import store, whole

ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


def container(header, data: bytes = b"\0" * 16) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(**changes):
    return {"w": {**ENTRY, **changes}}


HEADERS = {
    "empty file": (b"", "its header has 0 bytes"),
    "giant header": (((1 << 64) - 1).to_bytes(8, "little") + b"{}", "its header has 18446744073709551615 bytes"),
    "header longer than the file": ((100).to_bytes(8, "little") + b"{}", "the file has 10"),
    "no JSON": (container(b"\x80\x04."), "not a JSON object"),
    "not UTF-8": (container(b'{"\xff": 1}'), "can't decode byte 0xff"),
    "a list": (container(b"[]"), "not a JSON object"),
    "deep lists": (container(b'{"a":' + b"[" * 200_000 + b"}"), "its header is not that of a safetensors file"),
    "deep objects": (container(b'{"a":' * 200_000 + b"}"), "its header is not that of a safetensors file"),
    "padded with tabs": (container(json.dumps(entry()).encode() + b" \t"), "padded with spaces"),
    "space in front": (container(b" " + json.dumps(entry()).encode()), "padded with spaces"),
    "long number": (container(b'{"w": ' + b"9" * 1_000_000 + b"}"), "a number of 16384 digits"),
    "duplicate tensor": (
        container(b'{"w": %s, "w": %s}' % ((json.dumps(ENTRY).encode(),) * 2)),
        "'w' stands in it twice",
    ),
    "duplicate field": (container(b'{"w": {"dtype": "F32", "dtype": "U8"}}'), "'dtype' stands in it twice"),
    "duplicate metadata": (container(b'{"__metadata__": {}, "__metadata__": {}}'), "stands in it twice"),
    "metadata of numbers": (container({"__metadata__": {"a": 1}, **entry()}), "where a text stands"),
    "endless metadata": (
        container({"__metadata__": dict.fromkeys(map(str, range(5000)), ""), **entry()}),
        "more than 4096 texts",
    ),
    "offsets beyond the file": (container(entry(shape=[2, 3], data_offsets=[0, 24])), "its tensors end at byte"),
    "offsets before the data": (container(entry(data_offsets=[-16, 0])), "offsets that are not two positions"),
    "offsets reversed": (container(entry(data_offsets=[16, 0])), "has -16 bytes; expected 16"),
    "offsets overlap": (container({**entry(), "v": {**ENTRY, "data_offsets": [8, 24]}}, b"\0" * 24), "begins at byte"),
    "offsets the same": (container({**entry(), "v": ENTRY}), "begins at byte"),
    "offsets with a gap": (container(entry(data_offsets=[8, 24]), b"\0" * 24), "begins at byte"),
    "offsets of text": (container(entry(data_offsets=["0", "16"])), "not two positions"),
    "three offsets": (container(entry(data_offsets=[0, 16, 32])), "not two positions"),
    "bytes left over": (container(entry(), b"\0" * 17), "its tensors end at byte"),
    "negative shape": (container(entry(shape=[-2, -2])), "not a list of extents"),
    "huge shape": (container(entry(shape=[1 << 59, 1 << 59])), "has 16 bytes; expected"),
    "overflowing shape": (container(entry(shape=[1 << 32, 1 << 32, 4])), "has 16 bytes; expected"),
    "extent beyond all files": (container(entry(shape=[1 << 62])), "not a list of extents"),
    "fractional shape": (container(entry(shape=[2.0, 2])), "2.0 where only whole numbers stand"),
    "long extent": (container(entry(shape=[int("9" * 40)])), "a number of 40 digits"),
    "not a number": (container(entry(shape=[float("nan"), 2])), "NaN where only whole numbers stand"),
    "long entry": (container(entry(shape=[1] * 20_000)), "its header is not that of"),
    "bytes in an entry": (container(b'{"w": {"dtype": "\xff", "shape": [], "data_offsets": [0, 0]}}'), "surrogates"),
    "two objects": (container(b'{"__metadata__": {}} {}'), "more than one JSON value"),
    "no end of a text": (container(b'{"w\\"}'), "a text without an end"),
    "no comma": (container(b'{"__metadata__": {} "w": {}}'), "where one of ',}' stands"),
    "control character": (container(b'{"w\x01": {}}'), "a text without an end"),
    "boolean shape": (container(entry(shape=[True, 4])), "not a list of extents"),
    "many axes": (container(entry(shape=[1] * 1000)), "not a list of extents"),
    "unknown type": (container(entry(dtype="F" * 1000)), "unknown element type"),
    "list as a type": (container(entry(dtype=["F32"])), "unknown element type"),
    "further fields": (container({"w": {**ENTRY, "x": 1}}), "not dtype, shape and data_offsets"),
    "no entry": (container({"w": None}), "not dtype, shape and data_offsets"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_are_refused(tmp_path, name):
    data, what = HEADERS[name]

    def parse():
        length = header_bytes(data[:8], len(data), "the file")
        return parse_header(data[8 : 8 + length], len(data), "the file")

    tracemalloc.start()
    begin = time.process_time()
    try:
        with pytest.raises(CorruptCheckpointError, match="the file is damaged") as caught:
            parse()
        memory, seconds = tracemalloc.get_traced_memory()[1], time.process_time() - begin
    finally:
        tracemalloc.stop()
    text = str(caught.value)
    assert what in text
    assert len(text) < 6000
    assert memory < (1 << 20) + 2 * len(data)
    assert seconds < 5
    # As a data file of Paddle's own, and as a manifest.
    row = {"key": "w", "dtype": "float32", "shape": (2, 2), "offset": (0, 0), "local": (2, 2)}
    (tmp_path / "0.metadata").write_bytes(metadata_pickle({"0_0.safetensors": [row]}))
    (tmp_path / "0_0.safetensors").write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="0_0.safetensors is damaged"):
        read_paddle_manifest(tmp_path)
    with pytest.raises(CorruptCheckpointError, match="the manifest is damaged"):
        Manifest.decode(data, "the manifest")


@pytest.fixture
def stored(tmp_path):
    return store(tmp_path, [whole("w", "float32", (4, 4)), whole("v", "int64", (3,))])


NAMES = ["../a", "..", ".", "", "/etc/passwd", "a/b", "a\\b", "a\0b", "a\nb", "\ud800", "a" * 300, "~/../../a/b"]


@pytest.mark.parametrize("name", NAMES)
def test_file_names_stay_in_the_directory(stored, name):
    manifest = replace(stored.manifest, catalog=replace(stored.manifest.catalog, files=(name,)))
    if name != "\ud800":  # which no manifest can hold
        with pytest.raises(CorruptCheckpointError, match="leaves the checkpoint's directory"):
            Manifest.decode(manifest.encode(), "0.manifest")
    refused = pytest.raises(CorruptCheckpointError, match="leaves the checkpoint's directory")
    with FileReader(str(stored.directory), manifest) as reader, refused:
        reader.check_files(np.arange(2))


def test_links_lead_nowhere_else(stored, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside") / "secret"
    file = stored.file()
    os.rename(file, outside)

    def open_it():
        with FileReader(str(stored.directory), stored.manifest) as reader:
            reader.check_files(np.arange(2))

    os.symlink(outside, file)
    with pytest.raises(CorruptCheckpointError, match="is a link out of the checkpoint's directory") as caught:
        open_it()
    assert str(file) in str(caught.value)
    os.unlink(file)
    os.symlink(os.path.relpath(outside, stored.directory), file)
    with pytest.raises(CorruptCheckpointError, match="is a link out of"):
        open_it()
    os.unlink(file)
    # By way of a link that stays inside.
    os.symlink(outside, stored.directory / "hop")
    os.symlink("hop", file)
    with pytest.raises(CorruptCheckpointError, match="is a link out of"):
        open_it()
    os.unlink(file)
    os.symlink(file.name, file)
    with pytest.raises((CorruptCheckpointError, OSError)):
        open_it()
    os.unlink(file)
    # A link to another file of the directory is none of these.
    os.rename(outside, stored.directory / "elsewhere")
    os.symlink("elsewhere", file)
    open_it()


def test_pipes_and_directories_are_no_files(stored):
    for make in (os.mkfifo, os.mkdir):
        file = stored.file()
        if file.exists() and not file.is_dir():
            file.unlink()
        make(file)
        refused = pytest.raises(CorruptCheckpointError, match="is not a regular file")
        with FileReader(str(stored.directory), stored.manifest) as reader, refused:
            reader.check_files(np.arange(2))


def test_manifests_that_are_links_out_are_refused(stored, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside") / "0.manifest"
    outside.write_bytes(stored.manifest.encode())
    os.symlink(outside, stored.directory / "0.manifest")
    with pytest.raises(CorruptCheckpointError, match=r"0\.manifest is a link out of"):
        CheckpointDirectory(str(stored.directory)).read_manifest()


COLUMNS = {
    "key": [0, 9],
    "dtype": [-1, 0],
    "file": [0, 1],
    "byte_offset": [1 << 40, 0],
    "shape": [[1 << 40, 1 << 40], [1, 3]],
    "offset": [[-1, 0], [0, 0]],
    "global_shape": [[4, 4], [1, -3]],
    "ndim": [2, 3],
    "flat_stop": [0, 1 << 60],
}


@pytest.mark.parametrize("size", [0, -1, (1 << 26) + 1, 1 << 63, 1 << 80])
def test_blocks_are_of_a_size_that_there_is_memory_for(stored, size):
    manifest = replace(stored.manifest, checksums=replace(stored.manifest.checksums, block_bytes=size))
    with pytest.raises(CorruptCheckpointError, match=f"blocks of {size} bytes"):
        Manifest.decode(manifest.encode(), "0.manifest")


@pytest.mark.parametrize("column", COLUMNS)
def test_columns_stay_in_their_tables_and_files(stored, column):
    """A manifest whose own checksum is right: whoever makes a malicious one computes it."""
    catalog = stored.manifest.catalog
    values = np.asarray(COLUMNS[column], dtype=getattr(catalog, column).dtype)
    changes = {column: values}
    if column == "flat_stop":
        changes["flat_start"] = np.asarray([0, 0])
    data = replace(stored.manifest, catalog=replace(catalog, **changes)).encode()
    with pytest.raises(CheckpointError, match=r"0\.manifest is not a usable manifest"):
        Manifest.decode(data, "0.manifest")

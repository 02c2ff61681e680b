"""Checkpoints of torch.distributed.checkpoint: what torch has written, read without torch; lies and code refused.

``data/torch_dcp`` is of torch 2.13.0. With ``FLEXCKPT_TORCH_PYTHON`` (an interpreter that has torch) another one is
written, and read as that one is.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from paddle_flexckpt.catalog import CorruptCheckpointError, UnsafePickleError, ValidationError, dtype_of
from paddle_flexckpt.foreign.formats import SourceDirectory, detect_format
from paddle_flexckpt.foreign.pickle_reader import load_pickle
from paddle_flexckpt.foreign.torch_archive import DCP_METADATA, DCP_TENSOR
from paddle_flexckpt.tools.tensor_reader import TensorReader
from tests.attacks.opcodes import call, named, named_by_line, program, short
from tests.foreign import make_torch_dcp
from tests.foreign.layouts import load_into_three_layouts

DATA = Path(__file__).parent / "data" / "torch_dcp"
ARRAYS = {key: array.astype(dtype_of(dtype).numpy) for key, (array, dtype, _) in make_torch_dcp.EXPECTED.items()}


def write(path):
    """A copy of what torch has written, as other tests of formats name it."""
    shutil.copytree(DATA, path, dirs_exist_ok=True)
    return path


def check(path):
    assert detect_format(path) == "torch_dcp"
    with TensorReader(path) as reader:
        assert set(reader.infos) == set(ARRAYS)
        for key, array in ARRAYS.items():
            got = reader.read(key)
            assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes()), key
        np.testing.assert_array_equal(reader.read("model.rows", slice(2, 4)), ARRAYS["model.rows"][2:4])
    if isinstance(path, Path):  # from an object store more is read at once, in fewer requests
        assert load_into_three_layouts(path, ARRAYS) <= 1.05


def test_what_torch_has_written(caplog):
    with caplog.at_level(logging.INFO, "paddle_flexckpt"):
        check(DATA)
    assert "left out, as they are no tensors: epoch, names" in caplog.text
    assert "torch" not in sys.modules
    manifest = SourceDirectory(DATA).read_manifest()
    assert set(manifest.catalog.files) == {"__0_0.distcp", "__1_0.distcp"}
    assert manifest.catalog.rank.tolist() == [
        int(manifest.catalog.file_name(row)[2]) for row in range(len(manifest.catalog))
    ]
    assert manifest.world_size == 2


def test_what_torch_writes_now(tmp_path):
    python = os.environ.get("FLEXCKPT_TORCH_PYTHON")
    if not python:
        pytest.skip("FLEXCKPT_TORCH_PYTHON names no interpreter with torch")
    subprocess.run([python, make_torch_dcp.__file__, str(tmp_path / "new")], check=True, timeout=300)
    check(tmp_path / "new")


def test_on_an_object_store():
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.put(str(DATA) + "/", "/torch_dcp/", recursive=True)
    try:
        check("memory://torch_dcp")
    finally:
        memory.rm("/torch_dcp", recursive=True)


def why(path, kind=CorruptCheckpointError):
    with pytest.raises(kind) as caught:
        SourceDirectory(path).read_manifest()
    assert "Remedy (FC" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "__1_0.distcp"])
def test_cut_short_or_missing(tmp_path, name):
    file = write(tmp_path / "c") / name
    data = file.read_bytes()
    for length in range(0, len(data), 97):
        file.write_bytes(data[:length])
        assert name in why(tmp_path / "c")
    file.unlink()
    if name != ".metadata":
        assert f"{name} is missing; the metadata names it" in why(tmp_path / "c")


def change(path, name, old, new, count=-1):
    file = path / name
    data = file.read_bytes()
    assert old in data and len(old) == len(new)
    file.write_bytes(data.replace(old, new, count))
    return path


def test_what_the_metadata_says_is_compared_with_the_archives(tmp_path):
    write(tmp_path)
    change(tmp_path, ".metadata", b"\x8c\x07float16", b"\x8c\x07float32")
    assert "a chunk is not what the metadata says: expected float32 [7], got float16 [7]" in why(tmp_path)
    change(
        write(tmp_path),
        "__1_0.distcp",
        b"HalfStorage\nq\x02X\x01\x00\x00\x000",
        b"HalfStorage\nq\x02X\x01\x00\x00\x001",
    )
    assert "the elements (data/1) are missing or compressed" in why(tmp_path)
    # Strides that lead out of the storage.
    begin = b"K\x03K\x04\x86q\x06K\x01K\x03\x86"
    change(tmp_path, "__1_0.distcp", b"HalfStorage\nq\x02X\x01\x00\x00\x001", b"HalfStorage\nq\x02X\x01\x00\x00\x000")
    change(tmp_path, "__1_0.distcp", begin, begin[:-2] + b"\x09\x86")
    assert "a storage of 48 bytes, of which 120 are needed, has 48" in why(tmp_path)
    write(tmp_path)
    # Another tensor's chunk in the place of this one.
    metadata = load_pickle((DATA / ".metadata").read_bytes(), "f", DCP_METADATA)
    places = {index.fqn: place for index, place in metadata.storage_data.items()}
    assert places["model.half"].length == places["model.scalar"].length
    file = write(tmp_path) / places["model.half"].relative_path
    data = bytearray(file.read_bytes())
    begin, other = (places[key].offset for key in ("model.half", "model.scalar"))
    length = places["model.half"].length
    data[begin : begin + length] = data[other : other + length]
    file.write_bytes(bytes(data))
    assert "key 'model.half'" in why(tmp_path)


def metadata_pickle(**changes):
    """A pickle of ``.metadata`` for one tensor ``w`` of four float32, with some of its operations replaced."""
    parts = {
        "file": short("__0_0.distcp"),
        "offset": b"K\x00",
        "length": b"M\x00\x04",
        "sizes": b"K\x04\x85",
        "dtype": named("torch", "float32"),
        "extra": b"",
        "place": b"",
        "fields": b"",
        **changes,
    }
    module = "torch.distributed.checkpoint.metadata"
    size = lambda value: named("torch", "Size") + value + b"\x85R"  # noqa: E731
    layout = call(named("torch.serialization", "_get_layout"), "torch.strided")
    form = named(module, "_MEM_FORMAT_ENCODING") + b"K\x00\x85R"
    properties = named(module, "TensorProperties") + b")\x81(" + parts["dtype"] + layout + b"\x89" + form + b"\x89tb"
    chunk = named(module, "ChunkStorageMetadata") + b")\x81}(" + short("offsets") + size(b"K\x00\x85")
    chunk += short("sizes") + size(parts["sizes"]) + b"ub"
    entry = named(module, "TensorStorageMetadata") + b")\x81}(" + short("properties") + properties
    entry += short("size") + size(b"K\x04\x85") + short("chunks") + b"]" + chunk + b"aub"
    index = named(module, "MetadataIndex") + b")\x81}(" + short("fqn") + short("w")
    index += short("offset") + size(b"K\x00\x85") + b"ub"
    place = named("torch.distributed.checkpoint.filesystem", "_StorageInfo") + b")\x81}(" + short("relative_path")
    place += parts["file"] + short("offset") + parts["offset"] + short("length") + parts["length"] + parts["place"]
    body = named(module, "Metadata") + b")\x81}(" + short("state_dict_metadata") + b"}(" + short("w") + entry
    body += parts["extra"] + b"u" + short("storage_data") + b"}" + index + place + b"ubs" + parts["fields"] + b"ub"
    return program(body)


def test_places_that_lie(tmp_path):
    def said(**changes):
        (tmp_path / ".metadata").write_bytes(metadata_pickle(**changes))
        return why(tmp_path, (CorruptCheckpointError, ValidationError))

    assert "__0_0.distcp is missing" in said()
    (tmp_path / "__0_0.distcp").write_bytes(bytes(1024))
    assert "does not end as a zip archive" in said()
    assert "the file has 1024 bytes" in said(offset=b"K\x01")
    assert "the file has 1024 bytes" in said(length=b"\x8a\x07" + b"\x7f" * 7)
    assert "length is not of its type" in said(length=b"J\xff\xff\xff\xff")
    for name in ("../__0_0.distcp", "/etc/passwd", "a/b", ".", ""):
        assert "leaves the checkpoint's directory" in said(file=short(name))
    assert "is missing" in said(file=short("nowhere"))
    (tmp_path / "link").symlink_to("/etc/passwd")
    assert "is a link out of the checkpoint's directory" in said(file=short("link"))
    assert "an element type is not supported (key 'w'" in said(dtype=named("torch", "float8_e8m0fnu"))
    transformed = short("transform_descriptors") + b"]" + short("zstd") + b"a"
    assert "chunks have been transformed (zstd)" in said(place=transformed)
    reformulated = short("mcore_data") + b"}" + short("w") + b"}s"
    assert "Megatron-Core has stored w in another shape" in said(fields=reformulated)
    assert "dict referred to" in said(fields=short("planner_data") + b"}\x94h\x00h\x00")


def tensor_pickle(name=b"FloatStorage", rebuild=b"_rebuild_tensor_v2", size=b"K\x04\x85", stride=b"K\x01\x85"):
    storage = b"(" + short("storage") + b"ctorch\n" + name + b"\n" + short("0") + short("cpu") + b"K\x04tQ"
    hooks = named_by_line("collections", "OrderedDict") + b")R"
    return program(b"ctorch._utils\n" + rebuild + b"\n(" + storage + b"K\x00" + size + stride + b"\x89" + hooks + b"tR")


def test_no_name_but_those_of_the_two_formats_is_known():
    assert load_pickle(tensor_pickle(), "f", DCP_TENSOR).size == (4,)
    for changes in (
        {"rebuild": b"_rebuild_sparse_tensor"},
        {"rebuild": b"_load_from_bytes"},
        {"name": b"load"},
        {"stride": b")"},
        {"size": b"J\xff\xff\xff\xff\x85"},
        {"size": b"]"},
    ):
        with pytest.raises(UnsafePickleError):
            load_pickle(tensor_pickle(**changes), "f", DCP_TENSOR)
    for module, name in (
        ("os", "system"),
        ("torch", "load"),
        ("torch.storage", "_load_from_bytes"),
        ("torch.hub", "load"),
        ("torch", "Size.__init__"),
        ("torch.serialization", "_get_layout.__globals__"),
        ("torch.distributed.checkpoint.metadata", "os"),
        ("builtins", "getattr"),
        ("functools", "partial"),
    ):
        for vocabulary in (DCP_METADATA, DCP_TENSOR):
            with pytest.raises(UnsafePickleError, match="is not among those of plain data"):
                load_pickle(program(call(named(module, name), "a")), "f", vocabulary)
    with pytest.raises(UnsafePickleError, match="BINPERSID"):
        load_pickle(program(short("x") + b"Q"), "f", DCP_METADATA)
    with pytest.raises(UnsafePickleError, match="is not among those"):
        load_pickle((DATA / ".metadata").read_bytes())


def test_a_checkpoint_with_code_in_it_is_not_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "c")
    (path / ".metadata").write_bytes(program(call(named("os", "system"), "touch canary")))
    assert "'os.system'" in why(path, UnsafePickleError)
    write(path)
    # In the pickle of an item, whose length stays.
    attack = b"cposix\nsystem\n(X\x05\0\0\0touchtR.".ljust(33, b"0")
    for file in ("__0_0.distcp", "__1_0.distcp"):
        change(path, file, b"ctorch._utils\n_rebuild_tensor_v2\n", attack, 1)
    assert "'posix.system'" in why(path, UnsafePickleError)
    assert not (tmp_path / "canary").exists()


def test_archives_with_compressed_or_too_long_members(tmp_path):
    """No member is unpacked, and no pickle read that is longer than one of a tensor."""
    path = write(tmp_path)
    data = bytearray((path / "__0_0.distcp").read_bytes())
    entry = data.index(b"PK\1\2")
    while entry >= 0:
        data[entry + 10 : entry + 12] = b"\x08\x00"
        entry = data.find(b"PK\1\2", entry + 1)
    (path / "__0_0.distcp").write_bytes(bytes(data))
    assert "compressed" in why(path)

"""Hugging Face directories: one file, an index, a path to either; and what does not fit."""

from __future__ import annotations

import json
import os
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from paddle_flexckpt.algebra import StridedCopy
from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.cli.main import main
from paddle_flexckpt.foreign.formats import SourceDirectory, detect_format
from paddle_flexckpt.foreign.huggingface import read_tensor_index
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.media.local import LocalBackend
from paddle_flexckpt.media.opening import open_storage
from paddle_flexckpt.native import row_files
from paddle_flexckpt.native.reader import FileReader
from paddle_flexckpt.native.safetensors_header import parse_header
from paddle_flexckpt.ranks.communicator import SoloCommunicator
from paddle_flexckpt.tools.comparison import diff
from paddle_flexckpt.tools.conversion import convert_checkpoint
from paddle_flexckpt.tools.export import export_safetensors
from paddle_flexckpt.tools.verification import verify_checkpoint
from tests.native.samples import store, whole

W = np.arange(24, dtype=np.float32).reshape(6, 4)
B = np.arange(6).astype(ml_dtypes.bfloat16)
S = np.asarray(7, dtype=np.int64)
TENSORS = {"model.w": W, "model.b": B, "s": S}
FILES = {"model-00001-of-00002.safetensors": ["model.w"], "model-00002-of-00002.safetensors": ["model.b", "s"]}
INDEX = "model.safetensors.index.json"


def write_file(path, names=tuple(TENSORS), **info):
    path.write_bytes(safetensors_numpy.save({name: TENSORS[name] for name in names}, {"format": "pt", **info}))


def write_index(path, index=INDEX, **changes):
    for file, names in FILES.items():
        write_file(path / file, names)
    weight_map = {name: file for file, names in FILES.items() for name in names}
    (path / index).write_text(json.dumps({"metadata": {"total_size": 116.0}, "weight_map": weight_map, **changes}))
    return path


def native(path):
    manifest = store(path, [whole("w", "float32", (4, 4))]).manifest
    (path / f"{manifest.unique_id}.manifest").write_bytes(manifest.encode())


def contents(path):
    """All tensors, read whole."""
    directory = SourceDirectory(path)
    manifest = directory.read_manifest()
    catalog = manifest.catalog
    found = {}
    with FileReader(directory.backend, manifest) as reader:
        for row in range(len(catalog)):
            array = TENSORS.get(catalog.key_name(row), W)
            size = int(catalog.size[row])
            target = np.empty(size, dtype=array.dtype)
            reader.read(row, StridedCopy((size,), 0, (1,), 0, (1,)), target)
            assert catalog.dtype_name(row) == str(array.dtype)
            found[catalog.key_name(row)] = target.reshape(catalog.unpadded(row, catalog.shape)).tobytes()
    assert reader.count.bytes_verified == 0
    return found


EXPECTED = {name: array.tobytes() for name, array in TENSORS.items()}


def test_a_single_file(tmp_path):
    write_file(tmp_path / "model.safetensors")
    write_file(tmp_path / "consolidated.safetensors")  # as beside some models; it is the same in other names
    (tmp_path / "flex-ckpt.auto_generated.metadata").write_bytes(b"what Paddle leaves in such directories")
    assert detect_format(tmp_path) == "huggingface"
    assert contents(tmp_path) == EXPECTED


def test_the_only_file_under_any_name(tmp_path):
    write_file(tmp_path / "adapter_model.safetensors")
    assert contents(tmp_path) == EXPECTED


@pytest.mark.parametrize("index", [INDEX, "diffusion_pytorch_model.safetensors.index.json"])
def test_files_under_an_index(tmp_path, index):
    write_index(tmp_path, index)
    write_file(tmp_path / "consolidated.safetensors")
    assert detect_format(tmp_path) == "huggingface"
    assert contents(tmp_path) == EXPECTED
    catalog = SourceDirectory(tmp_path).read_manifest().catalog
    assert {catalog.key_name(row): catalog.file_name(row) for row in range(3)} == {
        "model.w": "model-00001-of-00002.safetensors",
        "model.b": "model-00002-of-00002.safetensors",
        "s": "model-00002-of-00002.safetensors",
    }
    assert catalog.unpadded(0, catalog.global_shape) == (6, 4)


def test_the_path_of_a_file_or_index_chooses_it(tmp_path):
    write_index(tmp_path)
    write_file(tmp_path / "model.safetensors", ["s"])
    with pytest.raises(
        ValidationError, match=rf"several sets.*{INDEX}, model\.safetensors\. Remedy .FC301.: give the path"
    ):
        detect_format(tmp_path)
    assert contents(tmp_path / INDEX) == EXPECTED
    assert contents(str(tmp_path / "model.safetensors")) == {"s": S.tobytes()}
    with pytest.raises(CorruptCheckpointError, match=r"other\.safetensors is missing"):
        contents(tmp_path / "other.safetensors")
    assert verify_checkpoint(tmp_path / INDEX).path == str(tmp_path / INDEX)


def test_the_path_of_a_file_in_the_working_directory(tmp_path, monkeypatch):
    write_file(tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    assert contents("model.safetensors") == EXPECTED


@pytest.mark.parametrize(
    "names", [["a-00001-of-00002.safetensors", "b.safetensors"], ["x.safetensors.index.json", INDEX]]
)
def test_several_sets_are_refused(tmp_path, names):
    for name in names:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValidationError, match="has several sets of safetensors files: .*Remedy"):
        SourceDirectory(tmp_path).read_manifest()


def test_files_without_an_index_are_read_together(tmp_path):
    for name, tensor in zip("cab", TENSORS):
        write_file(tmp_path / f"{name}.safetensors", [tensor])
    assert detect_format(tmp_path) == "huggingface"
    assert contents(tmp_path) == EXPECTED
    # What two of them have is a choice, which is the caller's; so is what another program has written.
    write_file(tmp_path / "d.safetensors", ["s"])
    with pytest.raises(
        ValidationError, match=r"several sets .*\(s in b\.safetensors and d\.safetensors\)\. Remedy .FC301.: give"
    ):
        detect_format(tmp_path)
    assert contents(tmp_path / "d.safetensors") == {"s": S.tobytes()}
    (tmp_path / "d.safetensors").unlink()
    (tmp_path / "e.safetensors").write_bytes(safetensors_numpy.save({"t": S}, {"format": "np"}))
    with pytest.raises(ValidationError, match=r"safetensors of several programs\. Remedy"):
        detect_format(tmp_path)


def in_cache(path, write):
    """A directory as it lies in a cache of Hugging Face's: a snapshot of links to what is stored once."""
    blobs, snapshot = path / "models--a--b" / "blobs", path / "models--a--b" / "snapshots" / "0f3a"
    for each in (blobs, snapshot / "unet"):
        each.mkdir(parents=True)
    write(blobs)
    for number, file in enumerate(sorted(blobs.iterdir())):
        os.rename(file, blobs / f"{number:064x}")
        os.symlink(f"../../blobs/{number:064x}", snapshot / file.name)
        os.symlink(f"../../../blobs/{number:064x}", snapshot / "unet" / file.name)
    return snapshot


@pytest.mark.parametrize("inside", [".", "unet"])
@pytest.mark.parametrize("write", [write_index, lambda path: write_file(path / "model.safetensors")])
def test_a_snapshot_in_the_cache_is_read_as_it_is(tmp_path, write, inside):
    snapshot = in_cache(tmp_path, write) / inside
    assert contents(snapshot) == EXPECTED
    os.symlink(snapshot, tmp_path / "link")
    assert contents(tmp_path / "link") == EXPECTED
    assert convert_checkpoint(snapshot, tmp_path / "native").keys == len(EXPECTED)
    # Only there, and nowhere else.
    for place in (snapshot.parent / "refs", tmp_path / "elsewhere"):
        place.mkdir()
        shutil.copy(snapshot / next(iter(os.listdir(snapshot))), place / "secret")
        name = next(name for name in os.listdir(snapshot) if name.endswith(".safetensors"))
        (snapshot / name).unlink()
        os.symlink(place / "secret", snapshot / name)
        with pytest.raises(CorruptCheckpointError, match="is a link out of the checkpoint's directory"):
            contents(snapshot)


def test_numbered_files_need_their_index(tmp_path):
    write_index(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(CorruptCheckpointError, match="without their index"):
        SourceDirectory(tmp_path).read_manifest()


def test_there_is_no_id(tmp_path):
    write_file(tmp_path / "model.safetensors")
    assert SourceDirectory(tmp_path).read_manifest(0).unique_id == 0
    with pytest.raises(ValidationError, match="is a Hugging Face directory, which has no ids"):
        SourceDirectory(tmp_path).read_manifest(1)


def test_a_manifest_comes_first(tmp_path):
    native(tmp_path)
    write_file(tmp_path / "model.safetensors")
    assert detect_format(tmp_path) == "native"
    assert SourceDirectory(tmp_path).read_manifest().origin == "native"
    assert contents(tmp_path / "model.safetensors") == EXPECTED


def test_a_save_without_a_manifest_is_not_taken_for_one(tmp_path):
    write_file(tmp_path / "0_0.safetensors")
    with pytest.raises(ValidationError, match="its manifest has been lost"):
        detect_format(tmp_path)


def test_a_missing_file_is_named(tmp_path):
    write_index(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        CorruptCheckpointError, match=rf"model-00002-of-00002\.safetensors is missing; .*{INDEX} names it"
    ):
        detect_format(tmp_path)
    report = verify_checkpoint(tmp_path)
    assert not report.ok
    assert "model-00002-of-00002.safetensors is missing" in str(report.problems[0])


def test_an_index_that_lacks_a_tensor_and_files_below_its_directory(tmp_path):
    write_index(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    found = read_tensor_index(LocalBackend(str(tmp_path)), INDEX).files

    def given(files: dict[str, str]) -> None:
        (tmp_path / INDEX).write_text(json.dumps({**index, "weight_map": files}))

    given({tensor: f"./{file}" for tensor, file in found.items()})
    assert read_tensor_index(LocalBackend(str(tmp_path)), INDEX).files == found
    detect_format(tmp_path)
    given({tensor: f"below/{file}" for tensor, file in found.items()})
    with pytest.raises(CorruptCheckpointError, match=f"in .*{INDEX}: file name 'below/.*is in one below it"):
        detect_format(tmp_path)
    first = min(found)
    given({tensor: file for tensor, file in found.items() if tensor != first})
    with pytest.raises(CorruptCheckpointError, match=rf"the index lacks \(key '{first}', file '[^']*'\)$"):
        detect_format(tmp_path)


def test_files_of_another_save_are_found(tmp_path):
    write_index(tmp_path)
    write_file(tmp_path / "model-00001-of-00002.safetensors", ["model.w", "s"])
    with pytest.raises(CorruptCheckpointError, match="the index has elsewhere.*key 's'"):
        detect_format(tmp_path)
    write_file(tmp_path / "model-00001-of-00002.safetensors", [])
    with pytest.raises(CorruptCheckpointError, match="lacks a tensor that the index has in it.*'model.w'"):
        detect_format(tmp_path)


def test_a_truncated_file_is_found_when_it_is_opened(tmp_path):
    write_file(tmp_path / "model.safetensors")
    manifest = SourceDirectory(tmp_path).read_manifest()
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.truncate(100)
    with (
        FileReader(str(tmp_path), manifest) as reader,
        pytest.raises(CorruptCheckpointError, match="truncated"),
    ):
        reader.check_files(np.arange(1))
    with pytest.raises(CorruptCheckpointError, match="is damaged or not a safetensors file"):
        detect_format(tmp_path)


def test_a_file_that_is_replaced_between_two_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(row_files, "MOST_OPEN", 1)
    write_index(tmp_path)
    manifest = SourceDirectory(tmp_path).read_manifest()
    first = tmp_path / manifest.catalog.files[0]
    with FileReader(str(tmp_path), manifest) as reader:
        reader.check_files(np.arange(len(manifest.catalog)))  # the last file is open now
        shutil.copy(first, tmp_path / "copy")
        (tmp_path / "copy").replace(first)
        with pytest.raises(CorruptCheckpointError, match=f"{first.name} has changed since it was first opened"):
            reader.files.open(0)


def test_sixteen_bits_without_a_sign(tmp_path):
    """numpy has no bfloat16: Paddle's is uint16 there, and a file that came by way of numpy says so."""
    array = np.arange(4, dtype=np.uint16)
    for info, dtype in (({"format": "np"}, "bfloat16"), ({"format": "pt"}, "uint16"), (None, "uint16")):
        (tmp_path / "model.safetensors").write_bytes(safetensors_numpy.save({"w": array}, info))
        assert SourceDirectory(tmp_path).read_manifest().catalog.dtypes == (dtype,)
    assert detect_format(tmp_path) == "huggingface"
    (tmp_path / "model.safetensors").write_bytes(safetensors_numpy.save({"w": array}, {"format": "np"}))
    assert detect_format(tmp_path) == "unified_checkpoint"


def test_no_checksums_are_compared(tmp_path):
    write_index(tmp_path)
    report = verify_checkpoint(tmp_path)
    assert (report.ok, report.bytes_verified, report.has_checksums, report.keys) == (True, 0, False, 3)
    directory = SourceDirectory(tmp_path)
    with pytest.raises(ValidationError, match="another program.s checkpoint .huggingface., without checksums"):
        FileReader(directory.backend, directory.read_manifest(), "full")


def test_export_reads_them(tmp_path):
    (tmp_path / "source").mkdir()
    write_index(tmp_path / "source")
    report = export_safetensors(tmp_path / "source", tmp_path / "out", ["model.w^T -> w"])
    assert (report.keys, report.bytes_verified) == (3, 0)
    got = safetensors_numpy.load_file(tmp_path / "out" / "model.safetensors")
    np.testing.assert_array_equal(got["w"], W.T)
    # And what it has written is such a directory.
    assert detect_format(tmp_path / "out") == "huggingface"


def test_commands(tmp_path, capsys):
    write_index(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "a Hugging Face directory, without checksums" in out
    assert "model-00002-of-00002" not in out
    assert main(["verify", str(tmp_path)]) == 0
    assert "have no checksums and were not read" in capsys.readouterr().out
    assert main(["explain", str(tmp_path), "--aoa", json.dumps({"aoa_statements": ["model.w^T -> w"]})]) == 0
    assert "model.w" in capsys.readouterr().out
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    assert main(["verify", str(tmp_path)]) == 1
    assert "model-00001-of-00002.safetensors is missing" in capsys.readouterr().out


def test_from_a_url(tmp_path):
    fsspec = pytest.importorskip("fsspec")
    write_index(tmp_path)
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path) + "/", "/huggingface/", recursive=True)
    try:
        assert contents("memory://huggingface") == EXPECTED
        assert contents(open_storage("memory://huggingface")) == EXPECTED
        assert contents(f"memory://huggingface/{INDEX}") == EXPECTED
        assert detect_format("memory://huggingface") == "huggingface"
    finally:
        memory.rm("/huggingface", recursive=True)


@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin"])
def test_pickles_of_tensors_are_not_read(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(
        ValidationError, match=rf"but {name}\. Remedy .FC301.: have their writer save safetensors files"
    ):
        detect_format(tmp_path)


def test_a_directory_above_a_checkpoint(tmp_path):
    (tmp_path / "flex_checkpoint").mkdir()
    native(tmp_path / "flex_checkpoint")
    with pytest.raises(
        ValidationError, match=r"but in flex_checkpoint\. Remedy .FC301.: give the path of that directory"
    ):
        detect_format(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        safetensors_numpy.save_file({"w": np.ones(3, np.float32)}, tmp_path / name / "model.safetensors")
    with pytest.raises(ValidationError, match=r"but in flex_checkpoint\. Remedy"):
        detect_format(tmp_path)  # this library's come first
    shutil.rmtree(tmp_path / "flex_checkpoint")
    with pytest.raises(ValidationError, match=r"but in a, b\. Remedy .FC301.: give the path of that directory"):
        detect_format(tmp_path)
    shutil.rmtree(tmp_path / "a")
    shutil.rmtree(tmp_path / "b")
    with pytest.raises(ValidationError, match="Remedy .FC301.: correct the path"):
        detect_format(tmp_path)


def write_bytes(path, **codes: str) -> None:
    """A file with tensors of two elements of a byte each, of these element types."""
    path.mkdir(parents=True)
    entries = {
        name: {"dtype": code, "shape": [2], "data_offsets": [2 * i, 2 * i + 2]}
        for i, (name, code) in enumerate(codes.items())
    }
    header = json.dumps(entries).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(range(2 * len(codes))))


def codes_in(file) -> dict[str, str]:
    data = file.read_bytes()
    return {
        n: t.code
        for n, t in parse_header(data[8 : 8 + int.from_bytes(data[:8], "little")], len(data), "").tensors.items()
    }


KEPT = {"scale": "F8_E8M0", "four": "F8_E4M3FNUZ", "five": "F8_E5M2FNUZ", "w": "F8_E4M3", "u": "U8"}


def test_element_types_of_files_alone_are_kept_and_are_bytes_elsewhere(tmp_path):
    hf, native = tmp_path / "hf", tmp_path / "native"
    write_bytes(hf, **KEPT)
    convert_checkpoint(hf, native, strategy="tp=2", cuts=[("*", 0)])
    convert_checkpoint(native, tmp_path / "back", format="huggingface", aoa_config=["u -> v"])
    export_safetensors(native, tmp_path / "export")
    for name in ("back", "export"):
        found = codes_in(tmp_path / name / "model.safetensors")
        assert {"u" if key == "v" else key: code for key, code in found.items()} == KEPT
    assert diff(hf, tmp_path / "export").equal
    write_bytes(tmp_path / "other", **{**KEPT, "scale": "U8"})
    assert diff(hf, tmp_path / "other").unlike.keys() == {"scale"}
    with pytest.raises(ValidationError, match="torch's format lacks this dtype.*float8_e8m0fnu"):
        convert_checkpoint(hf, tmp_path / "torch", format="torch_dcp")
    for source in (hf, native):
        target = {"scale": np.zeros(2, np.uint8)}
        load_state_dict(target, source, SoloCommunicator(), strict=False)
        assert target["scale"].tolist() == [0, 1]
        for dtype in ("float32", "int16", "uint16"):
            with pytest.raises(ValidationError, match="FC20[68]"):
                load_state_dict({"scale": np.zeros(2, dtype)}, source, SoloCommunicator(), strict=False, dtype="cast")
    for text in ('w -> w, dtype="float8_e8m0fnu"', 'scale -> scale, dtype="bfloat16"', "scale -> scale, scale=2"):
        with pytest.raises(ValidationError):
            convert_checkpoint(hf, tmp_path / "cast", aoa_config=[text])


@pytest.mark.parametrize("code", ["F4", "F6_E2M3", "F6_E3M2", "F8_E3M4", "U4"])
def test_an_element_type_that_is_not_supported_is_no_damage(tmp_path, code):
    write_bytes(tmp_path / "hf", w=code)
    with pytest.raises(ValidationError, match=f"'w' has the element type {code}, which is not supported.*FC701"):
        SourceDirectory(tmp_path / "hf").read_manifest()
    write_bytes(tmp_path / "damaged", w="F3\x12")
    with pytest.raises(CorruptCheckpointError, match="unknown element type"):
        SourceDirectory(tmp_path / "damaged").read_manifest()

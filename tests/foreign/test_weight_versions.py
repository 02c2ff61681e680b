"""Versions of weights are read as any other checkpoint, chains resolved; broken ones are refused by name."""

from __future__ import annotations

import json
import os
import re
import shutil

import numpy as np
import pytest

pytest.importorskip("zstandard")

import paddle_flexckpt as fc
from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.cli.main import main
from paddle_flexckpt.foreign import resolved_weights
from paddle_flexckpt.foreign.formats import detect_format
from paddle_flexckpt.foreign.resolved_weights import resolve_version
from paddle_flexckpt.media.opening import open_storage
from paddle_flexckpt.testing.simulated import SimulatedWorld
from paddle_flexckpt.tools.conversion import convert_checkpoint
from paddle_flexckpt.tools.tensor_reader import TensorReader
from tests.remedies.following import provoked
from tests.rollout import reference
from tests.rollout.streams import KINDS, bytes_of, first, publish, publish_stream
from tests.transfer.samples import cut

COUNT = 6


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    """Versions 1 to 6, of which 1 and 5 are full, in two files each; and their bytes."""
    root = tmp_path_factory.mktemp("versions")
    return root, publish_stream(root, COUNT, full_every=4, ranks=2)


@pytest.fixture
def copied(stream, tmp_path):
    shutil.copytree(stream[0], tmp_path / "v")
    return tmp_path / "v"


def at(root, number):
    return root / f"weight_v{number:06d}"


def load(path, ranks=1):
    found = [{key: np.zeros_like(value) for key, value in first().items()} for _ in range(ranks)]
    SimulatedWorld(ranks).run(lambda comm: fc.load_state_dict(found[comm.rank], path, comm))
    return [bytes_of(each) for each in found]


@pytest.mark.parametrize("number", range(1, COUNT + 1))
def test_a_version_is_loaded(stream, monkeypatch, number):
    """By its path, by a relative one, and by what ``open_storage`` gives."""
    root, history = stream
    assert load(at(root, number), 2) == [history[number]] * 2
    assert load(open_storage(at(root, number))) == [history[number]]
    monkeypatch.chdir(at(root, number))
    assert load(".") == [history[number]]
    assert detect_format(at(root, number)) == "huggingface"
    with TensorReader(at(root, number)) as reader:
        assert {name: reader.read(name).tobytes() for name in reader.infos} == history[number]


def test_parts_of_tensors_are_read(stream, monkeypatch):
    """In small parts, of which several threads may read at a time; a tensor is made once for each of its readers."""
    root, history = stream
    monkeypatch.setattr(resolved_weights, "CHUNK_BYTES", 64)
    monkeypatch.setattr("paddle_flexckpt.foreign.weight_deltas.CHUNK_BYTES", 64)
    resolved = resolve_version(at(root, 4))
    made = []
    monkeypatch.setattr(resolved, "_kept", lambda name, kept=resolved._kept: (made.append(name), kept(name))[1])
    for name in resolved.names():
        if not name.endswith(".safetensors"):
            continue
        with resolved.open(name) as file:
            whole = file.read(0, file.size)
            again = b"".join(file.read(begin, 37) for begin in range(0, file.size, 37))
            assert again == whole
            assert file.read(file.size - 3, 10) == whole[-3:]
    assert set(made) <= set(KINDS)

    def parts(values, rank):
        return {key: getattr(part, "local_tensor", part) for key, part in cut(values, rank, 3).items()}

    def job(comm):
        state = cut({key: np.zeros_like(value) for key, value in first().items()}, comm.rank, 3)
        fc.load_state_dict(state, at(root, 4), comm)
        found = {key: getattr(part, "local_tensor", part).tobytes() for key, part in state.items()}
        whole = {key: np.frombuffer(history[4][key], v.dtype).reshape(v.shape) for key, v in first().items()}
        return found == bytes_of(parts(whole, comm.rank))

    assert all(SimulatedWorld(3).run(job))


def test_tensors_that_no_delta_touches_are_read_by_their_ranges(tmp_path, monkeypatch):
    values = {"a": np.zeros(1000, np.float32), "b": np.ones(1000, np.float32)}
    publish(tmp_path, values)
    values["a"] = values["a"] + 1
    publish(tmp_path, values)
    made = []
    tensor = resolved_weights.ResolvedWeights.tensor
    monkeypatch.setattr(
        resolved_weights.ResolvedWeights, "tensor", lambda self, name: (made.append(name), tensor(self, name))[1]
    )
    found = {"b": np.zeros(1000, np.float32)}
    SimulatedWorld(1).run(lambda comm: fc.load_state_dict(found, at(tmp_path, 2), comm))
    assert (found["b"] == 1).all()
    assert made == []


def test_other_tools_read_a_version(stream, tmp_path, capsys):
    root, history = stream
    convert_checkpoint(at(root, 6), tmp_path / "converted", format="huggingface")
    assert reference.tensors_of(tmp_path / "converted") == history[6]
    assert main(["inspect", str(at(root, 3))]) == 0
    assert "m.a" in capsys.readouterr().out
    assert main(["diff", str(at(root, 6)), str(tmp_path / "converted")]) == 0


def test_verify_compares_all_tensors(copied, stream, capsys):
    for number in (1, 4):
        report = fc.verify_checkpoint(at(copied, number))
        assert report.ok
        assert report.has_checksums
        assert report.bytes_verified == report.bytes_read == report.total_bytes > 0
    for path in at(copied, 1).glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    assert main(["verify", str(at(copied, 1))]) == 1
    assert re.search("weight_v000001 cannot be used: key '.*: the checksum is .*FC308", capsys.readouterr().out)


def test_verify_compares_what_deltas_touch_where_a_full_version_has_no_checksums(copied, stream, capsys):
    """Version 4 is three deltas on version 1."""
    change_index(copied, 1, checksum_format=None, checksums=None)
    changed = {
        key
        for older, newer in ((1, 2), (2, 3), (3, 4))
        for key in stream[1][1]
        if stream[1][older][key] != stream[1][newer][key]
    }
    report = fc.verify_checkpoint(at(copied, 4))
    assert report.ok
    assert report.bytes_verified == report.bytes_read == sum(len(stream[1][4][key]) for key in changed) > 0
    assert not report.has_checksums
    assert main(["verify", str(at(copied, 4))]) == 0
    assert re.search(r"as written; the rest has no checksums and was not read", capsys.readouterr().out)
    change_frame(copied, 4)
    report = fc.verify_checkpoint(at(copied, 4))
    assert len(report.problems) == 1
    assert re.search("weight_v000004 cannot be used: key '.*FC308", str(report.problems[0]))
    assert main(["verify", str(at(copied, 4))]) == 1
    assert fc.verify_checkpoint(at(copied, 1)).bytes_verified == 0


def test_it_does_not_change(stream):
    resolved = resolve_version(at(stream[0], 3))
    for call in (lambda: resolved.create("a"), lambda: resolved.remove("a"), resolved.make_directory, resolved.sync):
        with pytest.raises(ValidationError, match="weight_v000003 is a version of weights, which does not change"):
            call()


def change_index(root, number, **settings):
    path = at(root, number) / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"] = {k: v for k, v in {**index["metadata"], **settings}.items() if v is not None}
    path.write_text(json.dumps(index))


@pytest.mark.parametrize("metadata", [None, [], "x", 3, {}, {"version": "000002"}])
@pytest.mark.parametrize("changes", [True, False])
def test_frames_are_never_taken_for_tensors(tmp_path, metadata, changes):
    """Whatever has become of the metadata of a delta's index."""
    publish(tmp_path, {"a": np.zeros(3, np.float32)})
    publish(tmp_path, {"a": np.full(3, changes, np.float32)})
    path = at(tmp_path, 2) / "model.safetensors.index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "metadata": metadata}))
    with pytest.raises(CorruptCheckpointError, match="weight_v000002 cannot be used"):
        resolve_version(at(tmp_path, 2))
    os.rename(at(tmp_path, 2), tmp_path / "alone")
    if changes:
        with pytest.raises((CorruptCheckpointError, ValidationError), match="metadata that is no object|has a delta"):
            load(tmp_path / "alone")


@pytest.mark.parametrize("checksums", [None, {}, [], {"m.a": 1}])
def test_checksums_of_a_full_version_are_all_there_or_none(copied, checksums):
    change_index(copied, 1, checksums=checksums)
    with pytest.raises(CorruptCheckpointError, match="weight_v000001 cannot be used: its checksums"):
        load(at(copied, 4))


def change_checksum(root, number):
    path = next(path for path in sorted(at(root, number).glob("*.safetensors")))
    places, sums, data = reference.read_file(path)
    name = sorted(places)[0]
    path.write_bytes(data.replace(sums[name].encode(), b"f" * len(sums[name])))


def change_frame(root, number):
    path = next(iter(sorted(at(root, number).glob("*.safetensors"))))
    data = bytearray(path.read_bytes())
    data[-2] ^= 0x55
    path.write_bytes(data)


DAMAGE = {
    "missing": (lambda root: shutil.rmtree(at(root, 2)), 2, "it is missing, or was not finished"),
    "no index": (
        lambda root: (at(root, 3) / "model.safetensors.index.json").unlink(),
        *(3, "it is missing, or was not finished"),
    ),
    "full missing": (lambda root: shutil.rmtree(at(root, 1)), 1, "it is missing, or was not finished"),
    "base": (
        lambda root: change_index(root, 3, base_version="000001"),
        3,
        "its base_version is '000001'; expected '000002'",
    ),
    "version": (lambda root: change_index(root, 2, version="000003"), 2, "its version is '000003'"),
    "number": (lambda root: change_index(root, 2, version=2), 2, "its version is 2; expected '000002'"),
    "compression": (lambda root: change_index(root, 2, compression_format="lz4"), 2, "its compression_format is 'lz4'"),
    "encoding": (lambda root: change_index(root, 2, delta_encoding="add"), 2, "its encoding 'add'"),
    "form": (lambda root: change_index(root, 2, checksum_format=None), 2, "the format None of its checksums"),
    "file": (lambda root: next(at(root, 2).glob("*.safetensors")).unlink(), 2, "is missing; "),
    "checksum": (lambda root: change_checksum(root, 4), 4, "the checksum is .*; expected f"),
    "frame": (lambda root: change_frame(root, 4), 4, "(its frame|the checksum)"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_broken_chain_is_refused_and_a_full_version_named(copied, stream, name):
    damage, number, text = DAMAGE[name]
    damage(copied)
    with pytest.raises(CorruptCheckpointError) as raised:
        load(at(copied, 4))
    assert f"weight_v{number:06d} cannot be used: " in str(raised.value)
    assert re.search(text, str(raised.value))
    assert str(raised.value).endswith(
        "Remedy (FC308): take the full version weight_v000005 (`flexckpt apply` with --version 5 --full), or publish a "
        "full version (`publish(model, full=True)`)"
    )
    assert load(at(copied, 6)) == [stream[1][6]]


def test_without_a_full_version_the_remedy_is_to_publish_one(copied):
    shutil.rmtree(at(copied, 1))
    shutil.rmtree(at(copied, 5))
    with provoked("foreign/weight_versions.py", "publish a full version (`publish", CorruptCheckpointError):
        load(at(copied, 4))
    assert publish(copied, first(), full=True)[0].version == COUNT + 1
    assert load(at(copied, COUNT + 1)) == [bytes_of(first())]


def test_a_delta_away_from_its_base_is_no_checkpoint(copied, tmp_path):
    """Its frames are never taken for tensors."""
    os.rename(at(copied, 3), tmp_path / "alone")
    for path in (tmp_path / "alone", tmp_path / "alone" / "model.safetensors.index.json"):
        with pytest.raises(ValidationError, match=r"has a delta of weights.*Remedy \(FC301\)"):
            load(path)


def test_a_delta_of_an_unknown_tensor_is_refused(tmp_path):
    publish(tmp_path, {"a": np.zeros(3, np.float32)})
    reference.write_delta(tmp_path, 2, {"b": b"1"}, {"b": b"2"}, "xor", "adler32")
    with pytest.raises(CorruptCheckpointError, match="weight_v000002 cannot be used: there is no tensor 'b' to change"):
        resolve_version(at(tmp_path, 2))

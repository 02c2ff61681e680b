"""``WeightPublisher``: versions in the shared format, by all ranks, whole or not there; what comes next, what stays."""

from __future__ import annotations

import json
import os
import re
import struct
import sys

import numpy as np
import pytest

pytest.importorskip("zstandard")
import zstandard

import paddle_flexckpt as fc
from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError, ValidationError
from paddle_flexckpt.foreign import huggingface
from paddle_flexckpt.loading import delta_files, publishing
from paddle_flexckpt.loading.weight_publisher import WeightPublisher
from paddle_flexckpt.media.opening import open_storage
from paddle_flexckpt.rollout.local_copy import apply_version
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.remedies.following import provoked
from tests.rollout import reference
from tests.rollout.streams import bytes_of, first, publish, publish_stream, step
from tests.transfer.samples import cut


def contents(directory) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def versions(root) -> list[int]:
    return sorted(int(name.removeprefix("weight_v")) for name in os.listdir(root))


def test_a_delta_has_the_bytes_of_the_format(tmp_path):
    """By hand: one of two ranks has a change; index, header, frame and checksum to the last byte."""
    old = {"a": np.arange(6, dtype=np.float32), "b": np.zeros((2, 2), np.float32)}
    new = {"a": old["a"], "b": np.asarray([[0, 0], [0, 1]], np.float32)}
    for values in (old, new):
        publish(tmp_path, values, ranks=2, encoding="overwrite", checksum="adler32")
    found = contents(tmp_path / "weight_v000002")
    index = found.pop("model.safetensors.index.json")
    made = json.loads(index)["metadata"]["version_id"]
    assert re.fullmatch("[0-9a-f]{16}", made)
    assert index.replace(made.encode(), b"ID") == (
        b'{"metadata": {"version": "000002", "base_version": "000001", "delta_encoding": "overwrite", '
        b'"compression_format": "zstd", "checksum_format": "adler32", "version_id": "ID"}, '
        b'"weight_map": {"b": "model-00000-of-00001.safetensors"}}'
    )
    delta = struct.pack("<I", 2) + struct.pack("<2I", 14, 15) + b"\x80\x3f"  # 1.0 is 0000803f
    frame = zstandard.ZstdCompressor(level=1).compress(delta)
    # All bytes and 1: 0x80 + 0x3f + 1 = 0xc0; and the sum of these sums: 16 + 2 * 0x80 + 0x3f = 0x14f.
    header = b'{"__metadata__":{"b":"014f00c0"},"b":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}'
    header %= len(frame), len(frame)
    header += b" " * (-len(header) % 8)
    assert found == {"model-00000-of-00001.safetensors": struct.pack("<Q", len(header)) + header + frame}
    assert zstandard.frame_content_size(frame) == len(delta)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("checksum", ["xxh3-128", "adler32", "blake3"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_format_s_receiver_takes_a_chain(tmp_path, monkeypatch, encoding, checksum, ranks):
    """Of full and delta versions, from any number of ranks, which receive what they compare in small batches."""
    if checksum == "blake3":
        pytest.importorskip("blake3")
    monkeypatch.setattr(publishing, "BATCH_BYTES", 100)
    monkeypatch.setattr(delta_files, "SPOOL_BYTES", 64)
    options = {"full_every": 5, "encoding": encoding, "checksum": checksum}
    history = publish_stream(tmp_path / "v", 6, ranks=ranks, **options)
    for number in range(1, 7):
        reference.pull(tmp_path / "follows", None, tmp_path / "v", number)
        assert reference.tensors_of(tmp_path / "follows") == history[number]
        reference.pull(tmp_path / f"late{number}", None, tmp_path / "v", number)
        assert reference.tensors_of(tmp_path / f"late{number}") == history[number]
    indices = [json.loads((tmp_path / "v" / f"weight_v{n:06d}" / reference.INDEX).read_text()) for n in range(1, 7)]
    assert [n for n, index in enumerate(indices, 1) if "base_version" not in index["metadata"]] == [1, 6]


def test_files_are_numbered_by_the_ranks_that_have_changes(tmp_path):
    values = {f"w{i}": np.full((4, 4), i, np.float32) for i in range(4)}
    publish(tmp_path, values, ranks=4)
    for name in ("w1", "w3"):
        values[name] = values[name] + 1
    reports = publish(tmp_path, values, ranks=4)
    files = ["model-00000-of-00002.safetensors", "model-00001-of-00002.safetensors"]
    assert sorted(os.listdir(tmp_path / "weight_v000002")) == [*files, "model.safetensors.index.json"]
    assert all((r.files, r.keys, r.version, r.base_version) == (files, 2, 2, 1) for r in reports)
    assert sum(report.bytes_written for report in reports) == reports[0].total_bytes > 0
    assert [report.bytes_written > 0 for report in reports] == [False, True, False, True]
    # Nothing has changed: an index alone.
    assert publish(tmp_path, values, ranks=4)[0].files == []
    assert os.listdir(tmp_path / "weight_v000003") == ["model.safetensors.index.json"]
    reference.pull(tmp_path / "local", None, tmp_path, 3)
    assert reference.tensors_of(tmp_path / "local") == bytes_of(values)


def test_names_are_those_of_statements_and_prefix(tmp_path):
    values = {"m.a": np.arange(12, dtype=np.float32).reshape(3, 4), "m.b": np.ones(3, np.float32)}
    options = {"aoa_config": {"aoa_statements": ["m.a^T -> n.a", "m.b -> n.b"]}, "prefix": "n"}
    publish(tmp_path, values, 2, **options)
    values["m.a"] = values["m.a"] * 2
    publish(tmp_path, values, 2, config={"layers": 1}, **options)
    target = {"a": np.zeros((4, 3), np.float32), "b": np.zeros(3, np.float32)}
    SimulatedWorld(1).run(lambda comm: fc.load_state_dict(target, tmp_path / "weight_v000002", comm))
    assert (target["a"] == values["m.a"].T).all()
    assert (target["b"] == 1).all()


def test_a_full_version_is_what_publish_writes(tmp_path):
    """But for an id, which is another one for each version, and checksums in the index."""
    values, ids = first(), set()
    publish(tmp_path / "v", values, 3, config={"layers": 2})
    SimulatedWorld(3).run(
        lambda comm: fc.publish(cut(values, comm.rank, 3), tmp_path / "p", comm, config={"layers": 2})
    )
    published = contents(tmp_path / "v" / "weight_v000001")
    for path in sorted((tmp_path / "p").iterdir()):
        data = published.pop(path.name)
        if path.suffix == ".safetensors":
            _, metadata, data = reference.read_file(tmp_path / "v" / "weight_v000001" / path.name)
            made = metadata["version_id"]
            ids.add(made)
            end = 8 + struct.unpack("<Q", data[:8])[0]
            text = data[8:end].replace(f',"version_id":"{made}"'.encode(), b"").rstrip()
            text += b" " * (-len(text) % 8)
            data = struct.pack("<Q", len(text)) + text + data[end:]
        if path.suffix == ".json" and path.name != "config.json":
            index = json.loads(data)
            assert index["metadata"].pop("version_id") == made
            assert index["metadata"].pop("checksum_format") == "xxh3-128"
            assert index["metadata"].pop("checksums") == {
                name: reference.checksum("xxh3-128", each) for name, each in bytes_of(values).items()
            }
            assert index == json.loads(path.read_bytes())
            continue
        assert data == path.read_bytes()
    assert published == {}
    publish(tmp_path / "v", values, full=True)
    second = tmp_path / "v" / "weight_v000002" / "model-00001-of-00001.safetensors"
    ids.add(reference.read_file(second)[1]["version_id"])
    assert len(ids) == 2


def test_a_new_publisher_goes_on(tmp_path):
    """With what is whole on disk: its number, its bytes, and the place in the chain."""
    rng, values = np.random.default_rng(1), first()
    reports = []
    for number in range(7):  # each with a publisher of its own, under another layout
        reports += publish(tmp_path, values, 1 + number % 3, full_every=3)[:1]
        values = step(values, rng)
    assert [(report.version, report.base_version) for report in reports] == [
        *((1, None), (2, 1), (3, 2), (4, None), (5, 4), (6, 5), (7, None))
    ]
    assert publish(tmp_path, values, full=True, full_every=3)[0].base_version is None


def test_what_was_not_finished_is_removed_and_its_number_used_again(tmp_path):
    history = publish_stream(tmp_path, 2)
    for number in (3, 4):
        left = tmp_path / f"weight_v{number:06d}"
        left.mkdir()
        (left / "model-00000-of-00002.safetensors").write_bytes(b"half")
        (left / "model.safetensors.index.json.tmp").write_bytes(b"half")
    (tmp_path / "notes").mkdir()
    values = step(first(), np.random.default_rng(5), 6)
    assert publish(tmp_path, values)[0].version == 3
    assert sorted(os.listdir(tmp_path)) == ["notes", *(f"weight_v{n:06d}" for n in (1, 2, 3))]
    apply_version(tmp_path, tmp_path / "local", 2)
    assert reference.tensors_of(tmp_path / "local") == history[2]
    apply_version(tmp_path, tmp_path / "local", 3)
    assert reference.tensors_of(tmp_path / "local") == bytes_of(values)


def test_a_chain_that_was_cut_by_hand_begins_anew(tmp_path, caplog):
    publish_stream(tmp_path, 3)
    (tmp_path / "weight_v000002" / "model.safetensors.index.json").unlink()
    assert publish(tmp_path, first())[0].base_version is None
    assert "the next version of weights is a full one: " in caplog.text
    assert "weight_v000002 cannot be used: it is missing, or was not finished. Remedy (FC308)" in caplog.text


@pytest.mark.parametrize(
    ("keep", "oldest"),
    [(None, 1), (1, 7), (2, 7), (3, 4), (5, 4), (6, 1), (99, 1)],
)
def test_old_versions_go_when_no_newer_one_needs_them(tmp_path, keep, oldest):
    """Full are 1, 4 and 7."""
    history = publish_stream(tmp_path / "v", 8, full_every=3, keep=keep)
    assert versions(tmp_path / "v") == [*range(oldest, 9)]
    for number in range(oldest, 9):
        apply_version(tmp_path / "v", tmp_path / "local", number)
        assert reference.tensors_of(tmp_path / "local") == history[number]


@pytest.mark.parametrize("at", range(1, 8))
def test_a_receiver_of_any_version_gets_the_newest_after_a_removal(tmp_path, at):
    history = publish_stream(tmp_path / "v", at, full_every=3, keep=1)
    apply_version(tmp_path / "v", tmp_path / "local", at)
    rng, values = np.random.default_rng(0), first()
    for number in range(1, 9):  # the same stream
        if number > at:
            publish(tmp_path / "v", values, full_every=3, keep=1)
            history.append(bytes_of(values))
        values = step(values, rng)
    apply_version(tmp_path / "v", tmp_path / "local")
    assert reference.tensors_of(tmp_path / "local") == history[8]


def test_other_tensors_need_a_full_version(tmp_path):
    publish(tmp_path, {"a": np.zeros(3, np.float32), "b": np.zeros(3, np.float32)})
    for other, key in [({"a": np.zeros(3, np.float32)}, "b"), ({"a": np.zeros(4, np.float32), "b": np.zeros(3)}, "a")]:
        with provoked("loading/delta_files.py", "publish a full version (`publish", ValidationError) as raised:
            publish(tmp_path, other)
        assert f"weight_v000001 has other tensors (key '{key}')" in str(raised.value)
        assert versions(tmp_path) == [1]
    assert publish(tmp_path, {"c": np.zeros(3, np.float32)}, full=True)[0].version == 2
    assert publish(tmp_path, {"c": np.ones(3, np.float32)})[0].base_version == 2


def test_a_rank_reads_the_headers_of_the_files_with_its_tensors(tmp_path, monkeypatch):
    """Four ranks, and four versions with four files each: of each a rank reads one."""
    values = {f"w{i}": np.full(64, i, np.int32) for i in range(8)}
    for _ in range(4):
        publish(tmp_path, values, ranks=4)
        values = {name: value + 1 for name, value in values.items()}
    read = []
    find = huggingface.read_tensor_file
    monkeypatch.setattr(huggingface, "read_tensor_file", lambda at, *a: (read.append(a), find(at, *a))[1])
    assert [report.base_version for report in publish(tmp_path, values, ranks=4)] == [4] * 4
    assert len(read) == 16 + 4 * 4, "the coordinator looks through the chain once"


def test_damage_in_the_version_before_is_an_error_on_every_rank(tmp_path):
    publish_stream(tmp_path, 1)
    values = step(first(), np.random.default_rng(3), 7)
    publish(tmp_path, values)
    path = next((tmp_path / "weight_v000002").glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        CorruptCheckpointError, match=r"weight_v000002 cannot be used: key .*take the full version weight_v000001"
    ):
        publish(tmp_path, values, 2)
    assert versions(tmp_path) == [1, 2]
    assert publish(tmp_path, values, 2, full=True)[0].version == 3


def test_options_are_checked_and_compared(tmp_path):
    for options, text in [
        ({"encoding": "xorr"}, "encoding is 'xor' or 'overwrite'; got 'xorr'"),
        ({"checksum": "md5"}, "checksum is"),
        ({"full_every": 0}, "full_every has to be an integer >= 1"),
        ({"keep": 0}, "keep has to be an integer >= 1"),
    ]:
        with pytest.raises(ValidationError, match=text):
            publish(tmp_path / "v", first(), **options)
    for options in [{"encoding": ("xor", "overwrite")}, {"keep": (1, 2)}, {"full_every": (2, 3)}]:
        ((name, values),) = options.items()

        def job(comm, name=name, values=values):
            publisher = WeightPublisher(tmp_path / "v", process_group=comm, **{name: values[comm.rank]})
            publisher.publish(cut(first(), comm.rank, 2))

        with pytest.raises(ValidationError, match=rf"ranks disagree: .*{name}"):
            SimulatedWorld(2).run(job)
    with pytest.raises(TypeError, match="did you mean 'checksum'"):
        WeightPublisher(tmp_path, checksums="adler32")
    assert not (tmp_path / "v").exists() or not os.listdir(tmp_path / "v")


def test_ranks_have_to_agree_on_full(tmp_path):
    def job(comm):
        WeightPublisher(tmp_path / "v", process_group=comm).publish(first(), full=bool(comm.rank))

    with pytest.raises(ValidationError, match="ranks disagree: .*full"):
        SimulatedWorld(2).run(job)


def test_a_tensor_with_more_bytes_than_positions_needs_the_other_encoding(tmp_path, monkeypatch):
    publish(tmp_path, first(), encoding="overwrite")
    monkeypatch.setattr(delta_files, "MOST_BYTES", 1600)
    with provoked("loading/delta_files.py", "encoding='xor'", ValidationError):
        publish(tmp_path, first(), encoding="overwrite")
    assert publish(tmp_path, first(), encoding="xor")[0].version == 2


def test_a_second_publisher_is_refused(tmp_path):
    publish(tmp_path, first())
    with open_storage(tmp_path).locks.take(), pytest.raises(CheckpointError, match=r"another save is writing.*FC403"):
        publish(tmp_path, first())
    assert publish(tmp_path, first())[0].version == 2


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ValidationError, match=r"need zstandard, which is not installed. Remedy \(FC901\): pip install"):
        publish(tmp_path / "v", first())
    assert not (tmp_path / "v").exists()
    assert publish(tmp_path / "v", first(), full_every=1)[0].version == 1


def test_a_model_that_is_no_longer_whole_leaves_nothing(tmp_path):
    publish(tmp_path, first())
    values = {**first(), "m.a": np.zeros((24, 40), np.float32)}
    with pytest.raises(ValidationError):
        publish(tmp_path, values, 2)
    assert versions(tmp_path) == [1]


def test_one_per_cent_of_the_elements_take_at_most_4_bytes_each(tmp_path):
    import ml_dtypes

    rng = np.random.default_rng(0)
    values = {"w": (rng.standard_normal((512, 1024)) / 50).astype(ml_dtypes.bfloat16)}
    publish(tmp_path, values)
    changed = rng.choice(512 * 1024, 512 * 1024 // 100, replace=False)
    values["w"].reshape(-1).view(np.uint16)[changed] ^= rng.integers(1, 16, len(changed), dtype=np.uint16)
    report = publish(tmp_path, values)[0]
    assert report.total_bytes <= 4 * len(changed)


def test_versions_on_an_object_store(tmp_path):
    pytest.importorskip("fsspec")
    url = f"memory://{tmp_path.name}"
    history = publish_stream(url, 5, full_every=3, keep=1)
    apply_version(url, tmp_path / "local")
    assert reference.tensors_of(tmp_path / "local") == history[5]
    assert sorted(json.loads((tmp_path / "local" / ".weight_sync" / "state.json").read_text())) == [
        "full",
        "marks",
        "version",
        "weights",
    ]
    assert open_storage(url).names("directories") == ["weight_v000004", "weight_v000005"]

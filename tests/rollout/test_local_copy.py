"""``flexckpt apply``: a local copy follows versions, whoever wrote them and whoever changed the copy before."""

from __future__ import annotations

import fcntl
import json
import os
import shutil

import numpy as np
import pytest

pytest.importorskip("zstandard")

from paddle_flexckpt.catalog import CorruptCheckpointError, ValidationError
from paddle_flexckpt.media.local import LocalBackend
from paddle_flexckpt.rollout import local_copy
from paddle_flexckpt.rollout.local_copy import apply_version
from tests.remedies.following import provoked
from tests.rollout import reference
from tests.rollout.streams import bytes_of, first, publish, publish_stream, step

ENCODINGS, CHECKSUMS = ("xor", "overwrite"), ("xxh3-128", "adler32", "blake3")
COUNT = 5


def state(local):
    return json.loads((local / ".weight_sync" / "state.json").read_text())["version"]


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    """Versions 1 to 5 of one full and four deltas."""
    root = tmp_path_factory.mktemp("versions")
    return root, publish_stream(root, COUNT, ranks=2)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("checksum", CHECKSUMS)
def test_deltas_of_the_format_s_writer_are_applied(tmp_path, encoding, checksum):
    """One by one, several at once, and from the engine's own model."""
    if checksum == "blake3":
        pytest.importorskip("blake3")
    rng, values = np.random.default_rng(0), first()
    publish(tmp_path / "base", values, full_every=1)
    base, history = tmp_path / "base" / "weight_v000001", [bytes_of(values)]
    for number in range(1, COUNT + 1):
        values = step(values, rng)
        history.append(bytes_of(values))
        reference.write_delta(tmp_path / "v", number, history[-2], history[-1], encoding, checksum)
        apply_version(tmp_path / "v", tmp_path / "follows", number, base=base)
        assert reference.tensors_of(tmp_path / "follows") == history[number]
        report = apply_version(tmp_path / "v", tmp_path / f"late{number}", base=base)
        assert reference.tensors_of(tmp_path / f"late{number}") == history[number]
        assert (report.full_version, report.before, report.version) == (0, None, number)
    report = apply_version(tmp_path / "v", tmp_path / "late1")
    assert (report.full_version, report.before) == (None, 1)
    assert reference.tensors_of(tmp_path / "late1") == history[COUNT]
    apply_version(tmp_path / "v", tmp_path / "late1", 0, base=base)
    assert reference.tensors_of(tmp_path / "late1") == history[0]
    with pytest.raises(CorruptCheckpointError, match=r"weight_v000000 cannot be used: it is the model with which"):
        apply_version(tmp_path / "v", tmp_path / "new")


def test_a_copy_goes_to_and_fro_between_receivers(tmp_path, stream):
    root, history = stream
    for number in range(1, COUNT + 1):
        if number % 2:
            apply_version(root, tmp_path / "local", number)
        else:
            reference.pull(tmp_path / "local", None, root, number)
        assert reference.tensors_of(tmp_path / "local") == history[number]
        assert state(tmp_path / "local") == f"{number:06d}"


def test_only_what_changes_is_written(tmp_path, stream):
    root, _history = stream
    apply_version(root, tmp_path, 4)
    (tmp_path / "tokenizer.json").write_text("{}")
    before = {path.name: path.stat().st_ino for path in tmp_path.iterdir() if path.is_file()}
    report = apply_version(root, tmp_path)
    after = {path.name: path.stat().st_ino for path in tmp_path.iterdir() if path.is_file()}
    assert sorted(name for name in before if before[name] != after[name]) == sorted(report.files)
    assert len(report.files) < 2
    assert report.tensors == len(json.loads((root / "weight_v000005" / reference.INDEX).read_text())["weight_map"])
    assert sorted(os.listdir(tmp_path / ".weight_sync")) == ["lock", "next", "state.json"]
    assert os.listdir(tmp_path / ".weight_sync" / "next") == []
    again = apply_version(root, tmp_path)
    assert (again.files, again.before, again.version) == ([], 5, 5)


def test_back_to_an_older_version_and_on(tmp_path, stream):
    root, history = stream
    for number in (5, 2, 3, 1, 5):
        apply_version(root, tmp_path, number)
        assert reference.tensors_of(tmp_path) == history[number]


def test_weights_in_other_files_go(tmp_path):
    publish(tmp_path / "v", first(), ranks=3)
    publish(tmp_path / "v", first(), full=True)
    apply_version(tmp_path / "v", tmp_path / "local", 1)
    (tmp_path / "local" / "config.json").write_text("{}")
    assert len(os.listdir(tmp_path / "local")) == 6
    apply_version(tmp_path / "v", tmp_path / "local", 2)
    names = [".weight_sync", "config.json", "model-00001-of-00001.safetensors", reference.INDEX]
    assert sorted(os.listdir(tmp_path / "local")) == names


def test_a_model_that_is_no_copy_is_left_alone(tmp_path, stream):
    root, history = stream
    local = tmp_path / "local"
    shutil.copytree(root / "weight_v000001", local)
    (local / "model-00001-of-00002.safetensors").write_bytes(b"precious")
    with provoked("rollout/local_copy.py", "give another directory, or --full to replace its weights"):
        apply_version(root, local)
    assert (local / "model-00001-of-00002.safetensors").read_bytes() == b"precious"
    assert not (local / ".weight_sync").exists()
    for place, full in ((tmp_path / "another", False), (local, True)):
        apply_version(root, place, full=full)
        assert reference.tensors_of(place) == history[COUNT]


def test_a_call_that_failed_does_not_make_a_model_a_copy(tmp_path, stream):
    local = tmp_path / "local"
    shutil.copytree(stream[0] / "weight_v000001", local)
    before = {path.name: path.read_bytes() for path in local.iterdir()}
    with pytest.raises(ValidationError, match="has no version of weights"):
        apply_version(tmp_path / "none", local, full=True)
    with pytest.raises(ValidationError, match="is no copy of versions of weights"):
        apply_version(stream[0], local)
    assert {path.name: path.read_bytes() for path in local.iterdir() if path.is_file()} == before


def test_other_files_than_weights_are_copied_where_there_are_none(tmp_path):
    for layers in (1, 2):
        publish(tmp_path / "v", first(), full=True, config={"layers": layers})
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "config.json").write_text('{"layers": 9}')
    for local, layers in ((mine, 9), (tmp_path / "new", 1)):
        for number, base in ((1, None), (2, None), (0, tmp_path / "v" / "weight_v000002")):
            report = apply_version(tmp_path / "v", local, number, base=base)
            assert json.loads((local / "config.json").read_text()) == {"layers": layers}
            assert ("config.json" in report.files) == (local != mine and number == 1)


def test_a_version_of_the_same_number_of_another_run_is_no_base(tmp_path):
    """Deltas of it touch other tensors than those that differ, so that no checksum would tell."""
    values = first()
    publish(tmp_path / "v", values)
    publish(tmp_path / "v", {**values, "m.c": values["m.c"] + 1})
    apply_version(tmp_path / "v", tmp_path / "local")
    shutil.rmtree(tmp_path / "v")
    other = {**values, "m.b": values["m.b"] + 1}
    for changed in (values["m.c"], values["m.c"] + 1, values["m.c"] + 2):
        publish(tmp_path / "v", {**other, "m.c": changed})
    report = apply_version(tmp_path / "v", tmp_path / "local")
    assert (report.before, report.full_version, report.version) == (None, 1, 3)
    assert reference.tensors_of(tmp_path / "local") == bytes_of({**other, "m.c": values["m.c"] + 2})


def test_versions_of_another_run_that_differ_far_from_the_ends_of_files_are_no_base(tmp_path):
    """Nor are those of one that has the number of the copy's full version no more, or not as a full one."""
    values = {name: np.zeros(100_000, np.float32) for name in "abc"}
    for full in (False, True):
        local = tmp_path / f"local{full}"
        for run in (0.0, 7.0):
            shutil.rmtree(tmp_path / "v", ignore_errors=True)
            values["b"][:] = run
            for count in range(2 + int(run > 0)):
                values["a"][5] = count
                publish(tmp_path / "v", values, full=full and run > 0 and count == 1, keep=1)
            before = apply_version(tmp_path / "v", local).before
        assert before is None
        assert reference.tensors_of(local) == bytes_of(values)


def test_another_run_s_deltas_on_the_engine_s_model_are_no_base(tmp_path):
    other = {name: np.zeros_like(value) for name, value in first().items()}
    start, changed = bytes_of(first()), bytes_of(other)
    publish(tmp_path / "base", first())
    publish(tmp_path / "base", other, full=True)
    base = tmp_path / "base" / "weight_v000001"
    for names in (["m.a"], ["m.b"]):
        shutil.rmtree(tmp_path / "v", ignore_errors=True)
        one = {**start, **{name: changed[name] for name in names}}
        reference.write_delta(tmp_path / "v", 1, start, one, "xor", "adler32")
        reference.write_delta(tmp_path / "v", 2, one, {**one, "m.c": changed["m.c"]}, "xor", "adler32")
        apply_version(tmp_path / "v", tmp_path / "local", 1 if names == ["m.a"] else 2, base=base)
    assert reference.tensors_of(tmp_path / "local") == {**one, "m.c": changed["m.c"]}
    for model in (base, tmp_path / "base" / "weight_v000002"):  # another version 0
        apply_version(tmp_path / "v", tmp_path / "local", 0, base=model)
        assert reference.tensors_of(tmp_path / "local") == reference.tensors_of(model)


def test_a_copy_that_was_changed_is_an_error_and_the_remedy_helps(tmp_path):
    values = first()
    publish(tmp_path / "v", values)
    publish(tmp_path / "v", {**values, "m.a": values["m.a"] + 1})
    local = tmp_path / "local"
    apply_version(tmp_path / "v", local, 1)
    (path,) = local.glob("*.safetensors")
    places, _, data = reference.read_file(path)
    changed = bytearray(data)
    changed[places["m.a"][0]] ^= 1
    written = path.stat().st_mtime_ns
    path.write_bytes(changed)
    os.utime(path, ns=(written, written))
    with provoked("foreign/weight_versions.py", "take the full version weight_v", CorruptCheckpointError) as raised:
        apply_version(tmp_path / "v", local, 2)
    assert "take the full version weight_v000001 (`flexckpt apply` with --version 1 --full)" in str(raised.value)
    assert path.read_bytes() == changed
    assert state(local) == "000001"
    apply_version(tmp_path / "v", local, 1, full=True)
    assert path.read_bytes() == data
    apply_version(tmp_path / "v", local, 2)
    assert reference.tensors_of(local) == bytes_of({**values, "m.a": values["m.a"] + 1})


def flip(directory, name):
    """Change one byte of a tensor."""
    for path in directory.glob("*.safetensors"):
        places, _, data = reference.read_file(path)
        if name in places:
            at = places[name][0]
            path.write_bytes(data[:at] + bytes([data[at] ^ 64]) + data[at + 1 :])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("checksum", ["xxh3-128", "adler32"])
def test_a_damaged_full_version_is_refused(tmp_path, ranks, checksum):
    """Alone, below deltas that touch other tensors, and as the version before of the next delta."""
    for number in range(3):
        publish(tmp_path / "v", {**first(), "m.c": first()["m.c"] + number}, ranks, checksum=checksum)
    assert apply_version(tmp_path / "v", tmp_path / "early", 1).unverified == 0
    flip(tmp_path / "v" / "weight_v000001", "m.a")
    for number in (1, 3):
        with pytest.raises(CorruptCheckpointError, match=r"weight_v000001 cannot be used: key 'm.a': the checksum is"):
            apply_version(tmp_path / "v", tmp_path / "late", number)
    assert not list((tmp_path / "late").glob("*.safetensors"))
    with pytest.raises(CorruptCheckpointError, match="weight_v000001 cannot be used: key 'm.a'"):
        publish(tmp_path / "v", first(), ranks, checksum=checksum)


def test_what_has_no_checksums_is_counted(tmp_path):
    old = bytes_of(first())
    new = {**old, "m.c": b"7" * len(old["m.c"])}
    tensors = {name: ("U8", (len(data),), data) for name, data in old.items()}
    (tmp_path / "v" / "weight_v000001").mkdir(parents=True)
    reference.write_file(tmp_path / "v" / "weight_v000001" / "model.safetensors", tensors, {})
    reference.write_delta(tmp_path / "v", 2, old, new, "xor", "adler32")
    report = apply_version(tmp_path / "v", tmp_path / "local")
    assert report.unverified == len(old) - 1
    assert report.summary().endswith(f"; {len(old) - 1} tensors have no checksums")
    assert reference.tensors_of(tmp_path / "local") == new


@pytest.mark.parametrize("version", [None, 3])
@pytest.mark.parametrize("after", range(8))
def test_versions_that_are_removed_meanwhile(tmp_path, monkeypatch, version, after):
    """At any file that is opened: the newest is taken, and one that was asked for is an error."""
    history = publish_stream(tmp_path / "v", 4, full_every=3, ranks=2)
    shutil.move(tmp_path / "v" / "weight_v000004", tmp_path / "next")
    opened, open_file = [], LocalBackend.open

    def opening(self, name):
        opened.append(name)
        if len(opened) == after + 1:
            shutil.move(tmp_path / "next", tmp_path / "v" / "weight_v000004")
            for number in (3, 2, 1):
                shutil.rmtree(tmp_path / "v" / f"weight_v{number:06d}")
        return open_file(self, name)

    monkeypatch.setattr(LocalBackend, "open", opening)
    if version is None:
        assert apply_version(tmp_path / "v", tmp_path / "local").version == 4
        assert reference.tensors_of(tmp_path / "local") == history[4]
        return
    with pytest.raises(CorruptCheckpointError, match="take the full version weight_v000004"):
        apply_version(tmp_path / "v", tmp_path / "local", version)
    assert not list((tmp_path / "local").glob("*.safetensors"))


def shorten(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [os.remove, shorten, lambda path: path.write_bytes(path.read_bytes())])
@pytest.mark.parametrize("number", [4, 5])
@pytest.mark.parametrize("is_recorded", [True, False])
def test_files_of_a_copy_that_were_changed_are_an_error(tmp_path, stream, damage, number, is_recorded):
    """Where another receiver has made the record, which has no sizes and times, the files have to be whole."""
    root, history = stream
    apply_version(root, tmp_path, 4)
    if not is_recorded:
        (tmp_path / ".weight_sync" / "state.json").write_text('{"version": "000004"}')
    damage(next(tmp_path.glob("*.safetensors")))
    if is_recorded or damage in (os.remove, shorten):
        with provoked(
            "rollout/local_copy.py", "give --full, which replaces its weights", CorruptCheckpointError
        ) as raised:
            apply_version(root, tmp_path, number)
        assert f"{tmp_path} is not version 4 any more: " in str(raised.value)
        apply_version(root, tmp_path, number, full=True)
    assert apply_version(root, tmp_path, number).version == number
    assert reference.tensors_of(tmp_path) == history[number]


@pytest.mark.parametrize("text", ["{", '{"version": "x"}', "[]", '{"other": 1}'])
def test_a_record_that_cannot_be_read_is_named(tmp_path, stream, text):
    root, history = stream
    apply_version(root, tmp_path, 4)
    record = tmp_path / ".weight_sync" / "state.json"
    record.write_text(text)
    with provoked("rollout/local_copy.py", "remove it, and give --full", CorruptCheckpointError):
        apply_version(root, tmp_path, 5)
    record.unlink()
    apply_version(root, tmp_path, 5, full=True)
    assert reference.tensors_of(tmp_path) == history[5]


def interrupted(root, local, number, monkeypatch):
    """Apply a version, but for the last steps: some files are renamed, and the record is not."""
    with monkeypatch.context() as patch:
        calls = []

        def rename(source, target):
            if f"{local_copy.NEXT}/" in source:
                if calls:
                    raise KeyboardInterrupt
                calls.append(target)
            os.replace(source, target)

        patch.setattr(local_copy.os, "rename", rename)
        with pytest.raises(KeyboardInterrupt):
            apply_version(root, local, number, full=True)


def test_other_receivers_refuse_a_copy_in_between_and_the_next_call_finishes_it(tmp_path, stream, monkeypatch):
    root, history = stream
    apply_version(root, tmp_path, 2)
    interrupted(root, tmp_path, 4, monkeypatch)
    assert state(tmp_path) == "unfinished"
    with pytest.raises(ValueError, match="unfinished"):
        reference.pull(tmp_path, None, root, 5)
    apply_version(root, tmp_path, 5)
    assert reference.tensors_of(tmp_path) == history[5]


def test_what_another_receiver_has_done_since_is_not_undone(tmp_path, stream, monkeypatch):
    root, history = stream
    apply_version(root, tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr(local_copy._LocalCopy, "finish", lambda self: None)
        apply_version(root, tmp_path, 3)  # complete beside the copy
    reference.pull(tmp_path, None, root, 4)
    apply_version(root, tmp_path, 5)
    assert reference.tensors_of(tmp_path) == history[5]


def test_calls_for_one_copy_wait_for_each_other(tmp_path, stream):
    _root, _history = stream
    copy = local_copy._LocalCopy(str(tmp_path), False, None)
    with copy.lock(), open(tmp_path / ".weight_sync" / "lock") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_there_is_nothing_to_apply(tmp_path):
    with pytest.raises(ValidationError, match=r"has no version of weights. Remedy \(FC301\)"):
        apply_version(tmp_path / "none", tmp_path / "local")
    with pytest.raises(CorruptCheckpointError, match="weight_v000003 cannot be used: it is missing"):
        apply_version(LocalBackend(str(tmp_path / "none")), tmp_path / "local", 3)

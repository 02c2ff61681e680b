"""The backend of fsspec: which locations it takes, what it hides, and stores that fail."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import socket
import ssl
import subprocess
import sys
import traceback

import numpy as np
import pytest

pytest.importorskip("fsspec")

import fsspec

from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError, ValidationError
from paddle_flexckpt.foreign.paddle_files import open_to_save
from paddle_flexckpt.media import lease, retrying
from paddle_flexckpt.media.backend import exists, fill, publish, write_file
from paddle_flexckpt.media.file_names import Secrets, redacted
from paddle_flexckpt.media.local import LocalBackend
from paddle_flexckpt.media.medium import Medium
from paddle_flexckpt.media.opening import open_backend, open_storage, reopen
from paddle_flexckpt.media.read_ahead import Budget
from paddle_flexckpt.media.remote import FsspecBackend
from paddle_flexckpt.media.remote_files import RemoteInputFile, Windows
from paddle_flexckpt.native.directory import is_complete, latest, list_checkpoints
from paddle_flexckpt.tools.export import export_safetensors
from paddle_flexckpt.tools.verification import repair_manifest, verify_checkpoint
from tests.media.stores import KINDS, Disk
from tests.native.test_directory import save as save_native
from tests.native.two_ranks import load, save
from tests.remedies.following import provoked
from tests.saved import short_names

MIB = 1 << 20


class Clock:
    """Time that passes only while somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def clock_gettime(self, clock: int) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Nobody waits for real: neither between tries nor for leases."""
    running = Clock()
    for module in (retrying, lease):
        monkeypatch.setattr(module, "time", running)
    return running


@pytest.fixture(params=KINDS)
def kind(request, monkeypatch):
    """A kind of store; its disk is empty."""
    monkeypatch.setattr(KINDS[request.param], "disk", Disk())
    return request.param


@pytest.fixture
def store(monkeypatch):
    """An object store, empty, and its disk."""
    monkeypatch.setattr(KINDS["put"], "disk", Disk())
    return open_storage("teststore://d/run", commit="put")


def disk_of(backend) -> Disk:
    return backend._medium.file_system.disk


def location(kind: str, **options):
    """A directory on a store of a kind; only of an object store has to be told what it is."""
    return open_storage(f"test{'store' if kind == 'put' else kind}://d/run", **{"commit": kind, **options})


# Locations


def test_paths_never_need_fsspec(tmp_path):
    program = f"""
import sys
import numpy as np
from paddle_flexckpt.foreign.paddle_files import open_to_save
from paddle_flexckpt.native.save_names import SaveNames
from paddle_flexckpt.native.directory import list_checkpoints
from paddle_flexckpt.cli.main import main
open_to_save({str(tmp_path / "d")!r}).lock().release()
assert list_checkpoints({str(tmp_path)!r}) == []
main(["inspect", {str(tmp_path)!r}])
assert not {{"fsspec", "s3fs"}} & set(sys.modules), sorted(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("scheme", ["file://", "local://", "FILE://"])
def test_urls_of_local_files_are_paths(tmp_path, scheme):
    backend = open_backend(f"{scheme}{tmp_path}")
    assert isinstance(backend, LocalBackend)
    assert backend.path == str(tmp_path)


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("file://host/a", "without an absolute path"),
        ("simplecache::s3://bucket/a", "chain of file systems"),
        ("s3:/bucket/a", "lost a slash, as in pathlib"),
        ("nosuchprotocol://a", "knows no file system 'nosuchprotocol'"),
    ],
)
def test_urls_that_are_not_taken(url, error):
    with pytest.raises(ValidationError, match=error):
        open_backend(url).names()


def test_names_with_colons_are_paths(tmp_path):
    for name in ("a:b", "a::b", "x://y"):
        assert isinstance(open_backend(tmp_path / name), LocalBackend)
        assert isinstance(open_backend(f"{tmp_path}/{name}"), LocalBackend)


@pytest.mark.parametrize("missing", ["fsspec", "s3fs"])
def test_a_package_that_is_missing_is_named_with_the_command(monkeypatch, missing):
    for name in [name for name in sys.modules if name.partition(".")[0] in ("s3fs", missing)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    if missing == "s3fs":
        for name in ("s3", "s3a"):
            monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, name, raising=False)
    with pytest.raises(ValidationError, match=r"Remedy .FC901.: pip install 'paddle-flexckpt\[remote\]'"):
        open_backend("s3://bucket/a").names()


@pytest.mark.parametrize(
    "options",
    [
        {"retries": -1}, {"retries": True}, {"part_bytes": 5 * MIB - 1}, {"bytes_at_once": (256 << 10) - 1},
        {"commit": "move"}, {"lease_seconds": 0}, {"lease_seconds": "30"},
    ],
)  # fmt: skip
def test_options_out_of_range(options):
    with pytest.raises(ValidationError, match=next(iter(options))):
        open_storage("memory://a", **options)


def test_options_of_paths():
    with pytest.raises(ValidationError, match=r"\['key'\] are not known for /a; there are: lease_seconds, lock"):
        open_storage("/a", key="x")
    with pytest.raises(ValidationError, match="lease_seconds"):
        open_storage("/a", lease_seconds=-1)


# Secrets


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/a", "s3://bucket/a"),
        ("sftp://user:pass/w@rd@host:22/a", "sftp://user:***@host:22/a"),
        ("sftp://user@host:22/a@b", "sftp://user@host:22/a@b"),
        ("abfs://container@account/a", "abfs://container@account/a"),
        ("s3://AKIA:abc/def+g@bucket/a", "s3://AKIA:***@bucket/a"),
        ("https://host/a?X-Signature=abc", "https://host/a?***"),
        ("/a:b@c?d", "/a:b@c?d"),
    ],
)
def test_what_of_a_url_is_shown(url, shown):
    assert redacted(url) == shown


def test_credentials_in_an_s3_url_are_refused_unseen():
    with pytest.raises(ValidationError, match=r"takes no credentials") as caught:
        open_backend("s3://AKIA:topsecret@bucket/a")
    assert "topsecret" not in str(caught.value)


def test_secrets_show_up_nowhere(monkeypatch, caplog):
    """Not in errors, nor in what they are caused by, nor in files, nor in logs."""
    caplog.set_level(logging.DEBUG, "paddle_flexckpt")
    monkeypatch.setattr(KINDS["put"], "disk", Disk())
    backend = open_storage(
        "teststore://user:p4ssw0rd@d/run", commit="put", retries=1, secret="s3cr3t", nested={"token": ["t0k3n"]}
    )
    secrets = ("p4ssw0rd", "s3cr3t", "t0k3n")

    def fate(number, operation, path):
        return OSError(errno.EIO, f"no way to {path} with p4ssw0rd, s3cr3t, t0k3n")

    disk = disk_of(backend)
    disk.fate = lambda *call: fate(*call) if call[1] == "put" else None
    with pytest.raises(OSError, match=r"no way to .* with \*\*\*, \*\*\*, \*\*\*") as caught:
        write_file(backend, "x", b"")
    told = "".join(traceback.format_exception(caught.type, caught.value, caught.tb))
    disk.fate = None
    ticket = open_to_save(backend).open_save(None)
    held = backend.locks.take()
    files = b"".join(disk.files.values())
    with pytest.raises(CheckpointError) as busy:
        raise backend.locks._busy(None)
    held.release()
    shown = [told, files.decode(), backend.path, backend.where("x"), str(backend), str(busy.value), caplog.text]
    for secret in secrets:
        assert not [text for text in shown if secret in text]
    assert ticket.marker_file in backend.names()
    # They are for the process that opens it again.
    assert all(secret in json.dumps(backend.reopen_token()) for secret in secrets)


def test_options_that_another_process_cannot_have():
    backend = open_storage("teststore://d", commit="put", session=object(), secret="s3cr3t")
    with pytest.raises(ValidationError, match=r"the option 'session' of teststore://d cannot be passed.*an? object"):
        backend.reopen_token()


# Memory


@pytest.fixture
def memory(request):
    url = f"memory://flexckpt-tests/{request.node.name}"
    yield url
    fsspec.filesystem("memory").store.clear()


def test_a_whole_life_in_memory(memory, tmp_path):
    root = open_backend(memory)
    assert (root.names(), root.names("directories"), exists(root)) == ([], [], False)
    assert list_checkpoints(memory) == []
    with pytest.raises(ValidationError, match=f"{memory} does not exist"):
        verify_checkpoint(memory)
    first = save_native(f"{memory}/a", 0, seed=1)
    save_native(f"{memory}/a", 0, seed=2)
    save_native(f"{memory}/b/", 5)
    assert sorted(root.names("directories")) == ["a", "b"]
    assert short_names(root.child("a")) == ["0.manifest", "0_0-2.safetensors", "1_0-2.safetensors"]
    assert [(info.path, info.unique_id) for info in list_checkpoints(memory)] == [
        (f"{memory}/a", 0),
        (f"{memory}/b", 5),
    ]
    assert is_complete(f"{memory}/b", 5)
    report = verify_checkpoint(f"{memory}/a")
    assert report.ok
    assert report.bytes_verified == report.total_bytes > 0
    export_safetensors(f"{memory}/a", f"{memory}/out")
    export_safetensors(f"{memory}/a", tmp_path / "out")
    assert root.child("out").read("model.safetensors") == (tmp_path / "out" / "model.safetensors").read_bytes()
    with pytest.raises(ValidationError, match="is not empty"):
        export_safetensors(f"{memory}/a", f"{memory}/out")
    root.child("a").remove("0.manifest")
    repaired = repair_manifest(f"{memory}/a", 0)
    assert repaired.save_token != first.save_token
    assert latest(f"{memory}/a").unique_id == 0
    for name in root.child("b").names():
        root.child("b").remove(name)
    root.child("b").remove("never.there")
    root.child("b").remove_directory()
    assert sorted(root.names("directories")) == ["a", "out"]


def test_memory_is_not_for_other_processes(memory):
    with pytest.raises(ValidationError, match="in the memory of this process.*Remedy .FC406.: save synchronously"):
        open_backend(memory).reopen_token()


def test_a_store_is_described_for_another_process(store):
    again = reopen(json.loads(json.dumps(store.reopen_token())))
    write_file(store, "x", b"1")
    assert isinstance(again, FsspecBackend)
    assert again.read("x") == b"1"


def test_what_others_write_is_seen(store):
    """Also by one that has listed the directory before, and keeps listings."""
    other = reopen(store.reopen_token())
    assert store.names() == []
    write_file(other, "x", b"12")
    assert store.names() == ["x"]
    write_file(other, "x", b"1")
    with store.open("x") as opened:
        assert opened.size == 1
    other.remove("x")
    assert store.names() == []


@pytest.mark.parametrize("name", ["../x", "a/b", "", "..", "a\0b"])
def test_names_that_lead_elsewhere(store, name):
    with pytest.raises(CorruptCheckpointError, match="leaves the checkpoint's directory"):
        store.open(name)
    with pytest.raises(CorruptCheckpointError, match="leaves the checkpoint's directory"):
        store.read(name)


def test_a_directory_is_not_a_file(store):
    write_file(store.child("x"), "y", b"1")
    with pytest.raises(CorruptCheckpointError, match="is not a regular file"):
        store.open("x")
    with pytest.raises(ValidationError, match="is not a directory"):
        store.child("x").child("y").make_directory()


# Reading


def reads_of(store, size: int, offsets, length: int = MIB):
    """Reads pieces of a file; gives the ranges that were asked of the store."""
    data = np.random.default_rng(0).integers(0, 255, size, dtype=np.uint8).tobytes()
    write_file(store, "x", data)
    asked = []
    medium = store._medium
    real = medium.read
    medium.read = lambda path, begin, end: asked.append((begin, end)) or real(path, begin, end)
    buffer = bytearray(length)
    with store.open("x") as opened:
        for offset in offsets:
            count = fill(opened, memoryview(buffer), offset)
            assert buffer[:count] == data[offset : offset + length]
    del medium.read
    return asked


def test_reads_that_follow_each_other_share_requests(store):
    asked = reads_of(store, 64 * MIB, range(0, 64 * MIB, MIB))
    # 1, 2, 4 and then 8 MiB at a time.
    assert len(asked) == 11
    assert sum(end - begin for begin, end in asked) == 64 * MIB
    assert max(end - begin for begin, end in asked) == 8 * MIB


def test_a_file_is_not_read_on_further_than_it_has_been_read(store):
    for blocks in (1, 2, 3, 4, 7, 8, 15, 16, 23):
        asked = reads_of(store, 40 * MIB, range(0, blocks * MIB, MIB))
        assert sum(end - begin for begin, end in asked) < 2 * blocks * MIB


def test_scattered_reads_get_what_they_ask_for(store):
    offsets = [40 * MIB, 3 * MIB, 20 * MIB, 10 * MIB]
    assert reads_of(store, 64 * MIB, offsets, 1000) == [(offset, offset + 1000) for offset in offsets]


def test_small_gaps_are_read_over(store):
    offsets = range(0, 32 * MIB, MIB + 1000)
    assert len(reads_of(store, 64 * MIB, offsets)) <= 8


def test_windows_are_bounded_together(store):
    windows = Windows(3 * MIB)
    medium = store._medium
    for number in range(5):
        write_file(store, str(number), bytes([number]) * (8 * MIB))
    files = [RemoteInputFile(medium, str(number), windows) for number in range(5)]
    buffer = memoryview(bytearray(MIB))
    for offset in range(0, 8 * MIB, MIB):
        for number, file in enumerate(files):
            assert fill(file, buffer, offset) == MIB
            assert set(buffer[:5]) == set(buffer[-5:]) == {number}
            assert windows._bytes <= max(3 * MIB, 8 * MIB * (len(windows._windows) == 1))
            assert windows._bytes == sum(len(data) for _, data in windows._windows.values())
    for file in files:
        file.close()
    assert windows._bytes == 0


def test_the_end_of_a_file(store):
    write_file(store, "x", b"0123456789")
    with store.open("x") as opened:
        assert opened.read(8, 100) == b"89"
        assert opened.read(10, 5) == b""
        assert opened.read(3, 0) == b""
    write_file(store, "empty", b"")
    with store.open("empty") as opened:
        assert (opened.size, opened.read(0, 5)) == (0, b"")
    assert store.read("empty") == b""
    with pytest.raises(FileNotFoundError):
        store.open("nothing")


# Writing


def test_short_files_are_put_and_long_ones_sent_in_parts(kind):
    backend = location(kind, part_bytes=5 * MIB)
    disk = disk_of(backend)
    data = bytes(range(256)) * (4096 * 17)
    with backend.create("long") as file:
        for begin in range(0, len(data), MIB):
            file.write(memoryview(data)[begin : begin + MIB])
    with backend.create("short") as file:
        file.write(data[: 5 * MIB])
    assert disk.count("part", "long") == 4
    assert disk.count("put", "short") == 1
    assert disk.files["d/run/long"] == data
    assert disk.files["d/run/short"] == data[: 5 * MIB]


@pytest.mark.parametrize("fails", ["part", "put"])
def test_a_file_that_fails_leaves_nothing(kind, fails):
    backend = location(kind, part_bytes=5 * MIB, retries=0)
    disk = disk_of(backend)
    disk.fate = lambda number, operation, path: (
        OSError("injected") if operation == fails and disk.count(fails) == 2 else None
    )
    length = 11 * MIB if fails == "part" else MIB
    for number in range(2 if fails == "put" else 1):
        try:
            with backend.create(f"x{number}") as file:
                file.write(bytes(length))
        except OSError as error:
            assert error.filename == f"{backend.path}/x{number}"
    disk.fate = None
    assert sorted(disk.files) == ([] if fails == "part" else ["d/run/x0"])


def test_a_file_that_is_cut_short_on_its_way_is_found_out(store, monkeypatch):
    store = open_storage(f"{store.path}", commit="put", part_bytes=5 * MIB)
    disk = disk_of(store)

    def shorten(number, operation, path):
        if operation == "info" and path in disk.files:
            disk.files[path] = disk.files[path][:-1]

    disk.fate = shorten
    text = f"{6 * MIB} bytes were written, and {6 * MIB - 1} are there"
    with pytest.raises(OSError, match=text), store.create("x") as file:
        file.write(bytes(6 * MIB))


def test_who_fails_to_create_a_file_leaves_that_of_another(store):
    """An object of this name may be of a save that came later: of the two, one was stopped for long."""
    store = open_storage(f"{store.path}", commit="put", retries=0)
    disk = disk_of(store)

    def another_is_faster(number, operation, path):
        if operation == "put":
            disk.files[path] = b"of another"
            return OSError("injected")

    disk.fate = another_is_faster
    with pytest.raises(OSError, match="injected"), store.create("x") as file:
        file.write(b"own")
    assert disk.files == {"d/run/x": b"of another"}


def test_an_exception_leaves_what_was_to_be_replaced(kind):
    backend = location(kind, part_bytes=5 * MIB)
    disk = disk_of(backend)
    with backend.create("x", "replace") as file:
        file.write(b"old")
    with pytest.raises(KeyError), backend.create("x", "replace") as file:
        file.write(bytes(12 * MIB))
        raise KeyError
    assert disk.files == {"d/run/x": b"old"}


def test_files_are_created_once(kind):
    backend = location(kind)
    with backend.create("x") as file:
        file.write(b"1")
    with pytest.raises(FileExistsError), backend.create("x") as file:
        file.write(b"2")
    assert backend.read("x") == b"1"


def test_publishing_is_one_step(kind):
    """Whatever fails, readers see the old file or the new one, and nothing else is left."""
    for at in range(20):
        KINDS[kind].disk = Disk()
        backend = location(kind, retries=0)
        disk = disk_of(backend)
        if backend.replaces:
            publish(backend, "m", b"old" * 100)
        bad = len(disk.calls) + at
        disk.fate = lambda number, operation, path, bad=bad: OSError("injected") if number == bad else None
        try:
            publish(backend, "m", b"new" * 100)
        except OSError:
            left = {path: data for path, data in disk.files.items() if path != "d/run/m"}
            assert left == {}
            assert disk.files.get("d/run/m") in ((b"old" * 100, b"new" * 100) if backend.replaces else (None,))
        else:
            assert disk.files == {"d/run/m": b"new" * 100}
            break
    assert at == {"put": 1, "replace": 3, "rename": 4}[kind]


def test_nothing_is_published_without_the_right_to(kind):
    backend = location(kind)
    lock = backend.locks.take()
    write_file(backend, ".lease", lease.Claim("other", "elsewhere", 7, 0, 30.0).encode())
    with pytest.raises(CheckpointError, match="process 7 on elsewhere has taken over"):
        publish(backend, "0.manifest", b"late")
    assert backend.names() == []
    lock.release()
    assert exists(backend)
    backend.remove(".lease")
    assert not exists(backend)
    publish(backend, "0.manifest", b"x")


def test_what_cannot_be_replaced_at_once_is_refused(monkeypatch):
    monkeypatch.setattr(KINDS["rename"], "disk", Disk())
    backend = open_storage("testrename://d/run")
    assert not backend.replaces
    save_native(backend, 0)
    before = dict(disk_of(backend).files)
    with provoked("native/save_directory.py", "save under a new id (unique_id=None takes the next one)"):
        open_to_save(backend).open_save(0)
    with pytest.raises(FileExistsError, match="cannot replace a file at once"):
        publish(backend, "0.manifest", b"other")
    assert disk_of(backend).files == before
    save_native(backend, None)
    assert [info.unique_id for info in list_checkpoints(backend)] == [0, 1]


def test_nothing_is_saved_where_files_are_not_known_to_appear_at_once(monkeypatch):
    """It can be read all the same."""
    monkeypatch.setattr(KINDS["put"], "disk", Disk())
    save_native(open_storage("teststore://d/run", commit="put"), 0)
    unknown = open_storage("teststore://d/run")
    assert verify_checkpoint(unknown).ok
    with pytest.raises(ValidationError, match=r"not known how 'teststore' replaces a file.*commit='put'"):
        open_to_save(unknown).lock()
    with pytest.raises(ValidationError, match="not known how"):
        publish(unknown, "0.manifest", b"")
    # A renaming of its own is trusted to be atomic, not to replace.
    assert not open_storage("testreplace://d/run").replaces


# Retries


TRANSIENT = [
    TimeoutError(),
    asyncio.TimeoutError(),
    socket.timeout(),
    ConnectionResetError(errno.ECONNRESET, "reset"),
    BrokenPipeError(),
    OSError(errno.ETIMEDOUT, "x"),
    OSError(errno.EBUSY, "x"),
]
FINAL = [
    FileNotFoundError(),
    PermissionError(),
    OSError(errno.ENOSPC, "full"),
    ValueError("x"),
    ssl.SSLCertVerificationError("x"),
    KeyError("x"),
]


class Answered(Exception):
    """An error with a server's answer in it, as botocore's."""

    def __init__(self, status: int, code: str = "x") -> None:
        super().__init__(f"{status} {code}")
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


class ClientConnectionError(Exception):
    """As aiohttp's, which need not be there."""


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("error", TRANSIENT, ids=repr)
def test_errors_that_pass(error):
    assert retrying.is_transient(error)


@pytest.mark.parametrize("error", FINAL, ids=repr)
def test_errors_that_stay(error):
    assert not retrying.is_transient(error)


def test_errors_with_a_status():
    assert [s for s in range(300, 600) if retrying.is_transient(Answered(s))] == [
        408, 409, 425, 429, 500, 502, 503, 504
    ]  # fmt: skip
    assert retrying.is_transient(Answered(400, "RequestTimeout"))
    assert retrying.is_transient(caused_by(OSError(errno.EIO, "x"), Answered(503)))
    assert not retrying.is_transient(caused_by(PermissionError(), Answered(403)))
    assert retrying.is_transient(caused_by(PermissionError(), Answered(403, "SlowDown")))
    assert retrying.is_transient(caused_by(OSError(errno.EIO, "x"), ClientConnectionError()))
    wrong_certificate = caused_by(ClientConnectionError(), ssl.SSLCertVerificationError("x"))
    assert not retrying.is_transient(wrong_certificate)


def test_an_error_that_passes_is_waited_for(store, clock):
    disk = disk_of(store)
    disk.fate = lambda number, operation, path: ConnectionResetError(104, "reset") if disk.count("put") < 5 else None
    write_file(store, "x", b"1")
    assert disk.count("put") == 5
    assert disk.files["d/run/x"] == b"1"
    # Exponential, each shortened by up to a half at random.
    assert all(0.5 * 2**i * 0.5 <= pause <= 0.5 * 2**i for i, pause in enumerate(clock.pauses))
    assert len(clock.pauses) == 4


def test_pauses_have_a_bound_and_differ():
    assert all(10 <= retrying.pause_seconds(20) <= 20 for _ in range(100))
    assert len({retrying.pause_seconds(3) for _ in range(10)}) > 5


def test_the_last_error_is_told_with_its_attempts_and_file(store, clock):
    disk = disk_of(store)
    disk.fate = lambda number, operation, path: ConnectionResetError(104, f"reset {disk.count('put')}")
    with pytest.raises(ConnectionResetError, match=r"reset 6 \(6 attempts in \d+\.\d s\)") as caught:
        write_file(store, "x", b"1")
    assert caught.value.filename == "teststore://d/run/x"
    assert len(clock.pauses) == 5


def test_an_error_that_stays_is_raised_at_once(store, clock):
    disk = disk_of(store)
    disk.fate = lambda number, operation, path: PermissionError("no")
    with pytest.raises(PermissionError, match="no"):
        write_file(store, "x", b"1")
    with pytest.raises(PermissionError):
        store.names()
    disk.fate = lambda number, operation, path: RuntimeError("a package's own kind of error")
    with pytest.raises(OSError, match="RuntimeError: a package's own kind of error"):
        store.read("x")
    assert clock.pauses == []


def test_an_empty_directory_stays_where_removing_it_would_remove_what_comes_meanwhile():
    """pyarrow's delete_dir, which is what fsspec's HDFS calls, is recursive."""

    class ArrowFSWrapper(fsspec.AbstractFileSystem):
        def ls(self, path, detail=True, **keywords):
            return []

        def rmdir(self, path):
            raise AssertionError("what has come meanwhile is gone")

    url = "hdfs://host/run"
    Medium(ArrowFSWrapper(), False, "/run", url, 0, Budget(1), Secrets(url, {})).remove_directory()


def test_a_right_that_has_run_out_is_told_as_it_is_and_at_once(clock):
    """The renewal of a lease may have failed with what would be tried again, had the store answered so."""
    lost = caused_by(CheckpointError("somebody has taken over"), ConnectionResetError(104, "reset"))
    fates = [lost]

    def ask() -> None:
        raise fates.pop(0)

    retrier = retrying.Retrier(5, Secrets("s3://d/run", {}))
    with pytest.raises(CheckpointError, match="^somebody has taken over$"):
        retrier("s3://d/run/x", ask)
    assert clock.pauses == []
    # An earlier try may have been carried out: then it is not known what has become of the request.
    fates[:] = [ConnectionResetError(104, "reset"), lost]
    with pytest.raises(OSError, match="somebody has taken over") as caught:
        retrier("s3://d/run/x", ask)
    assert retrying.is_unanswered(caught.value)
    assert len(clock.pauses) == 1


def test_the_number_of_tries_can_be_chosen(store, clock):
    backend = open_storage(store.path, commit="put", retries=0)
    disk_of(backend).fate = lambda number, operation, path: TimeoutError()
    with pytest.raises(TimeoutError):
        backend.names()
    assert clock.pauses == []


def test_everything_may_be_lost_once(kind, clock):
    """Each request fails once, half of them after they were carried out."""
    backend = location(kind)
    disk = disk_of(backend)
    failed: set[tuple[str, str]] = set()

    def fate(number, operation, path):
        # Renaming, and what goes through a stream, is not sent again.
        if (operation, path) in failed or operation in ("mv", "part"):
            return None
        failed.add((operation, path))
        error = TimeoutError("injected")
        return (error,) if len(failed) % 2 else error

    disk.fate = fate
    for unique_id in (0, 1):
        save_native(backend, unique_id)
    disk.fate = None
    assert len(failed) > 15
    assert [info.complete for info in list_checkpoints(backend)] == [True, True]
    assert len(disk.files) == 6


# Crashes


@pytest.mark.parametrize(
    ("kind", "new_id"),
    [("put", True), ("put", False), ("replace", False), ("rename", True)],
    ids=["put, new id", "put, replaced id", "replace, replaced id", "rename, new id"],
    indirect=["kind"],
)
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", ["one call fails", "all fail from then on"])
def test_old_or_new_never_half(kind, new_id, fault, every):
    unique_id = None if new_id else 0
    fixed = {"retries": 0}

    def fresh():
        KINDS[kind].disk = Disk()
        backend = location(kind, **fixed)
        save(backend, 1, 0)
        return backend, disk_of(backend)

    backend, disk = fresh()
    first = len(disk.calls)
    save(backend, 2, unique_id)
    count = len(disk.calls) - first
    assert count >= 19
    seen = set()
    for at in sorted({*range(0, count, every), *range(count - 6, count)}):  # the commit is among the last six
        backend, disk = fresh()
        before, first = dict(disk.files), len(disk.calls)

        def fate(number, operation, path, at=at, first=first):
            hit = number - first == at or (fault != "one call fails" and number - first > at)
            return OSError(errno.EIO, "injected") if hit else None

        disk.fate = fate
        outcomes = save(backend, 2, unique_id)
        disk.fate = None
        where = f"call {at}: {disk.calls[first + at]}"
        failed = {isinstance(outcome, BaseException) for outcome in outcomes}
        assert len(failed) == 1, where
        assert all("injected" in str(outcome) for outcome in outcomes if isinstance(outcome, BaseException)), where
        version = load(backend)
        seen.add((version, *failed))
        if new_id:
            assert load(backend, 0) == 1, where
        if fault == "one call fails" and version == 1 and "rm" not in where:
            left = {name for name in disk.files if ".lease" not in name} - set(before)
            # Once all have written, what is there is left to the next save.
            assert not left or sum(name.endswith(".safetensors") for name in left) == 2, (where, left)
            assert set(before) <= set(disk.files), where
        outcomes = save(backend, 3, unique_id)
        assert not any(isinstance(outcome, BaseException) for outcome in outcomes), (where, outcomes)
        assert load(backend) == 3, where
        assert not [name for name in disk.files if name.endswith((".tmp", ".part", ".saving", ".lease"))], where
    # A lease that cannot be given back fails nothing.
    assert seen >= {(1, True), (2, True), (2, False)}

"""Leases: who may save where there are no locks."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
import time
from dataclasses import asdict

import pytest

from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError
from paddle_flexckpt.foreign.paddle_files import PADDLE_METADATA, open_to_save
from paddle_flexckpt.media import lease
from paddle_flexckpt.media.backend import publish
from paddle_flexckpt.media.lease import Claim, Conditions, LeaseLock, LeaseLocks
from paddle_flexckpt.media.local import LocalBackend
from paddle_flexckpt.media.local_locks import DirectoryLock
from paddle_flexckpt.native.directory import is_complete
from paddle_flexckpt.native.save_directory import SaveDirectory
from tests.native.two_ranks import RANKS, load, save
from tests.saved import short_names

PATIENCE = 300


class Clock:
    """Time that passes only while somebody waits; then something may happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self.meanwhile = lambda: None

    def monotonic(self) -> float:
        return self.now

    def clock_gettime(self, clock: int) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.meanwhile()


@pytest.fixture
def clock(monkeypatch):
    running = Clock()
    monkeypatch.setattr(lease, "time", running)
    return running


@pytest.fixture(autouse=True)
def no_flock(monkeypatch):
    """A file system without locks."""
    refuse_locks(monkeypatch, errno.EBADF)


def refuse_locks(monkeypatch, number: int) -> None:
    def refuse(descriptor, operation):
        raise OSError(number, "injected")

    monkeypatch.setattr(fcntl, "flock", refuse)


class Watched(LocalBackend):
    """A directory that tells when a lease is renewed, and can refuse it."""

    def __init__(self, *arguments, **keywords) -> None:
        super().__init__(*arguments, **keywords)
        self.renewed = threading.Condition()
        self.renewals = 0
        self.error: Exception | None = None

    def create(self, name, mode="new", size=None):
        if mode == "overwrite":
            with self.renewed:
                self.renewals += 1
                self.renewed.notify_all()
                if self.error:
                    raise self.error
        return super().create(name, mode, size)

    def wait(self, renewals: int) -> None:
        with self.renewed:
            assert self.renewed.wait_for(lambda: self.renewals >= renewals, PATIENCE)


def put(path, token="dead", counter=0, seconds=30.0) -> Claim:
    claim = Claim(token, "elsewhere", 77, counter, seconds)
    (path / ".lease").write_bytes(claim.encode())
    return claim


def said(path) -> dict:
    """What the lease says; a look that falls into a renewal sees a part of it."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        claim = Claim.decode((path / ".lease").read_bytes())
        if claim is not None:
            return asdict(claim)
    raise AssertionError("the lease is never whole")


@pytest.mark.parametrize("number", [errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP], ids=errno.errorcode.get)
def test_a_directory_without_locks_gets_a_lease(tmp_path, monkeypatch, number):
    """NFS refuses locks of directories with EBADF."""
    refuse_locks(monkeypatch, number)
    lock = open_to_save(tmp_path).lock()
    assert isinstance(lock, LeaseLock)
    assert said(tmp_path)["seconds"] == 30
    # Nobody who looks at the files of the directory sees it.
    assert LocalBackend(str(tmp_path)).names() == []
    lock.release()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_free_lease_is_not_looked_for(tmp_path):
    """Whoever creates it first has it; another one looks only when it is refused."""
    looked = []

    class Counting(LocalBackend):
        def read(self, name):
            looked.append(name)
            return super().read(name)

    backend = Counting(str(tmp_path), lease_seconds=PATIENCE)
    lock = backend.locks.take()
    assert looked == []
    # What it may have forgotten when it is released it asks, unless it has just been asked.
    backend.locks.check_before_release()
    lock.release()
    assert looked == [".lease"]
    backend.locks.take().release()
    assert looked == [".lease"] * 2
    assert list(tmp_path.iterdir()) == []


def test_what_was_confirmed_long_ago_is_asked_again(tmp_path, clock):
    """A process that was stopped between its commit and the release of its lease."""
    backend = LocalBackend(str(tmp_path), lease_seconds=PATIENCE)
    lock = backend.locks.take()
    backend.locks.check_before_release()
    clock.now += PATIENCE
    put(tmp_path, token="other")
    lock.release()
    assert said(tmp_path)["token"] == "other"


def test_a_lease_that_cannot_be_confirmed_fails_nothing(tmp_path, monkeypatch):
    backend = LocalBackend(str(tmp_path), lease_seconds=PATIENCE)
    lock = backend.locks.take()

    def fail(self, name):
        raise OSError(errno.EIO, "injected")

    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, "read", fail)
        backend.locks.check_before_release()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_lease_of_another_is_not_given_back(tmp_path):
    backend = LocalBackend(str(tmp_path), lease_seconds=PATIENCE)
    lock = backend.locks.take()
    put(tmp_path, token="other")
    backend.locks.check_before_release()
    lock.release()
    assert said(tmp_path)["token"] == "other"


def test_other_errors_of_locks_are_errors(tmp_path, monkeypatch):
    refuse_locks(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="injected"):
        LocalBackend(str(tmp_path)).locks.take()
    with pytest.raises(OSError, match="injected"):
        DirectoryLock.take(str(tmp_path))


def test_saves_work_and_leave_no_lease(tmp_path):
    for version in (1, 2):
        assert not any(isinstance(outcome, BaseException) for outcome in save(tmp_path, version, 0))
    assert load(tmp_path) == 2
    assert short_names(tmp_path) == [
        "0.manifest", "0_0-2.safetensors", "1_0-2.safetensors", PADDLE_METADATA
    ]  # fmt: skip


def test_a_lease_is_renewed_while_it_is_held(tmp_path):
    backend = Watched(str(tmp_path), lease_seconds=0.6)
    lock = backend.locks.take()
    backend.wait(3)
    before = said(tmp_path)["counter"]
    assert before >= 2
    lock.check()
    lock.release()
    after = backend.renewals
    assert not lock._thread.is_alive()
    assert backend.renewals == after


def test_a_lease_that_changes_belongs_to_somebody(tmp_path, clock):
    other = put(tmp_path)

    def renew() -> None:
        # Shortly before its time is over.
        if clock.now > 29:
            put(tmp_path, counter=other.counter + 1)

    clock.meanwhile = renew
    with pytest.raises(CheckpointError, match=r"another save is writing to .* \(process 77 on elsewhere\)\. Remedy"):
        LocalBackend(str(tmp_path)).locks.take()
    assert clock.now < 31
    assert said(tmp_path)["token"] == "dead"


@pytest.mark.parametrize("theirs", [30.0, 300.0])
def test_a_lease_that_stays_the_same_belongs_to_nobody(tmp_path, clock, caplog, theirs):
    """After its own time, if that is longer than the watcher's."""
    put(tmp_path, seconds=theirs)
    lock = LocalBackend(str(tmp_path)).locks.take()
    assert theirs <= clock.now <= theirs + 5
    assert said(tmp_path)["token"] != "dead"
    assert "a lease of process 77 on elsewhere has run out" in caplog.text
    lock.release()
    assert not (tmp_path / ".lease").exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"token": "x"}'])
def test_a_lease_that_says_nothing_runs_out_too(tmp_path, clock, content):
    """Its holder died while it wrote it."""
    (tmp_path / ".lease").write_bytes(content)
    LocalBackend(str(tmp_path)).locks.take().release()
    assert 30 <= clock.now <= 35


def test_a_lease_that_is_given_back_meanwhile_is_free(tmp_path, clock):
    put(tmp_path)
    clock.meanwhile = (tmp_path / ".lease").unlink
    lock = LocalBackend(str(tmp_path)).locks.take()
    assert clock.now <= 1
    clock.meanwhile = lambda: None
    lock.release()


def test_of_two_that_take_over_one_gives_way(tmp_path, clock):
    """Both have seen it run out, and both write; the first finds the second's claim after a while."""
    put(tmp_path)
    mine = []

    def meanwhile() -> None:
        if (tmp_path / ".lease").exists() and said(tmp_path)["token"] != "dead" and not mine:
            mine.append(said(tmp_path)["token"])
            put(tmp_path, token="other")

    clock.meanwhile = meanwhile
    with pytest.raises(CheckpointError, match="another save is writing"):
        LocalBackend(str(tmp_path)).locks.take()
    assert mine
    assert said(tmp_path)["token"] == "other"


def test_a_medium_that_creates_twice_waits_before_it_counts(tmp_path, clock):
    def other() -> None:
        put(tmp_path, token="other")

    clock.meanwhile = other
    with pytest.raises(CheckpointError, match="another save is writing"):
        LeaseLocks(LocalBackend(str(tmp_path)), 30.0, Conditions(lambda: False)).take()
    assert clock.now == 3.0


def test_who_was_stopped_for_long_does_not_commit(tmp_path, clock):
    """Somebody else has the right to save by then, and has cleaned up."""
    backend = LocalBackend(str(tmp_path))
    lock = backend.locks.take()
    put(tmp_path, token="other")
    with pytest.raises(CheckpointError, match="stopped for so long that process 77 on elsewhere has taken over"):
        publish(backend, "0.manifest", b"late")
    assert not (tmp_path / "0.manifest").exists()
    lock.release()
    assert said(tmp_path)["token"] == "other"
    # A lease that is gone is taken too: the other has come and gone.
    lock = LocalBackend(str(tmp_path / "x"))
    (tmp_path / "x").mkdir()
    held = lock.locks.take()
    (tmp_path / "x" / ".lease").unlink()
    with pytest.raises(CheckpointError, match="somebody has taken over"):
        held.check()
    held.release()


def test_a_save_whose_lease_is_taken_fails_on_every_rank(tmp_path, monkeypatch):
    save(tmp_path, 1, 0)
    real = SaveDirectory.write_data

    def write_data(self, ticket, items, *arguments, **keywords):
        part = real(self, ticket, items, *arguments, **keywords)
        if 0 in items.rank:
            put(tmp_path, token="other")
        return part

    monkeypatch.setattr(SaveDirectory, "write_data", write_data)
    outcomes = save(tmp_path, 2, 0)
    assert all("has taken over the right to save" in str(outcome) for outcome in outcomes)
    assert load(tmp_path) == 1
    assert is_complete(tmp_path)


def test_a_lease_that_ran_out_before_it_was_adopted_is_not_believed(tmp_path, clock):
    """A writer was stopped, and its training process has died: somebody else has the right by now."""
    lock = LocalBackend(str(tmp_path)).locks.take()
    token, _ = lock.handover()
    lock.detach()
    clock.now += 60
    put(tmp_path, token="other")
    late = LocalBackend(str(tmp_path))
    adopted = late.locks.adopt(token, None)
    with pytest.raises(CheckpointError, match="process 77 on elsewhere has taken over"):
        late.locks.ensure_held()
    adopted.release()
    assert said(tmp_path)["token"] == "other"


def test_the_time_that_a_machine_is_suspended_counts(tmp_path, clock, monkeypatch):
    """The monotonic clock of Linux stands still meanwhile."""
    backend = LocalBackend(str(tmp_path))
    lock = backend.locks.take()
    put(tmp_path, token="other")
    backend.locks.ensure_held()  # its lease is young
    monkeypatch.setattr(clock, "monotonic", lambda: 0.0)
    clock.now += 3600
    with pytest.raises(CheckpointError, match="has taken over"):
        backend.locks.ensure_held()
    lock.release()


def test_a_commit_that_comes_after_that_of_another_save_fails(tmp_path, monkeypatch):
    """A saver is stopped right before it renames its manifest; the next one has removed the file meanwhile."""
    real, done = os.rename, []

    def rename(source, target):
        if os.path.basename(target) == "0.manifest" and not done:
            done.append(target)
            (tmp_path / ".lease").unlink()  # it has run out
            assert [report.unique_id for report in save(tmp_path, 2, 0)] == [0] * RANKS
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    outcomes = save(tmp_path, 1, 0)
    assert all("has taken over the right to save" in str(outcome) for outcome in outcomes)
    assert load(tmp_path) == 2
    assert is_complete(tmp_path)
    assert short_names(tmp_path) == [
        "0.manifest",
        *(f"{rank}_0-2.safetensors" for rank in range(RANKS)),
        PADDLE_METADATA,
    ]


def test_a_renewal_that_fails_fails_the_save(tmp_path):
    backend = Watched(str(tmp_path), lease_seconds=0.6)
    backend.error = OSError(errno.EIO, "injected")
    lock = backend.locks.take()
    backend.wait(1)
    lock._thread.join(PATIENCE)
    with pytest.raises(CheckpointError, match=r"could not be kept: .*injected.*Remedy .FC403.: save again"):
        publish(backend, "0.manifest", b"x")
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_lease_that_cannot_be_given_back_fails_nothing(tmp_path, monkeypatch, caplog):
    lock = LocalBackend(str(tmp_path)).locks.take()

    def fail(self, name):
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(LocalBackend, "remove", fail)
    lock.release()
    assert "the next save waits until it runs out: [Errno 5] injected" in caplog.text


def test_a_lease_is_handed_over(tmp_path, clock):
    """The adopter renews it from then on, under the same token."""
    first = Watched(str(tmp_path), lease_seconds=0.06)
    lock = first.locks.take()
    description, descriptor = lock.handover()
    assert descriptor is None
    second = Watched(str(tmp_path), lease_seconds=0.06)
    adopted = second.locks.adopt(json.loads(json.dumps(description)), None)
    lock.detach()
    assert not lock._thread.is_alive()
    second.wait(2)
    token = said(tmp_path)["token"]
    assert token == description["claim"]["token"]
    adopted.check()
    publish(second, "0.manifest", b"x")
    lock.release()
    assert said(tmp_path)["token"] == token
    adopted.release()
    assert [file.name for file in tmp_path.iterdir()] == ["0.manifest"]


def test_a_half_written_lease_is_looked_at_again(tmp_path, clock):
    """Another process of the same save may be renewing it."""
    backend = LocalBackend(str(tmp_path))
    lock = backend.locks.take()
    whole = (tmp_path / ".lease").read_bytes()
    (tmp_path / ".lease").write_bytes(whole[:10])
    clock.meanwhile = lambda: (tmp_path / ".lease").write_bytes(whole)
    lock.check()
    assert clock.now > 0
    lock.release()


def test_a_lease_that_this_process_renews_slowly_is_not_taken_for_another_s(tmp_path, monkeypatch):
    """A slow medium shows the file half written, for longer than a look is repeated."""
    monkeypatch.setattr(lease, "_READS", 1)
    backend = LocalBackend(str(tmp_path))
    lock = LeaseLocks(backend, 0.06).take()
    begun, goes_on, write = threading.Event(), threading.Event(), lease.write_file

    def slowly(where, name, data, *mode):
        (tmp_path / name).write_bytes(b"")
        begun.set()
        assert goes_on.wait(PATIENCE)
        write(where, name, data, *mode)

    monkeypatch.setattr(lease, "write_file", slowly)
    assert begun.wait(PATIENCE)
    outcomes: list[object] = []

    def check() -> None:
        try:
            outcomes.append(lock.check())
        except CheckpointError as error:
            outcomes.append(error)

    checking = threading.Thread(target=check, daemon=True)
    checking.start()
    checking.join(0.5)  # it fails at once, or waits
    goes_on.set()
    checking.join(PATIENCE)
    lock.release()
    # The renewal took longer than the lease lasts, so it may say that: not that somebody has it.
    assert len(outcomes) == 1 and "has taken over" not in str(outcomes[0])


@pytest.mark.parametrize("times", [1, 1000])
def test_a_lease_that_is_written_while_it_is_read_is_read_again(tmp_path, monkeypatch, times):
    """Its holder renews it in place: a reader that had seen its size finds less."""
    read, left = LocalBackend.read, [times]

    def shorter(backend, name):
        if name == lease.LEASE_FILE and left[0]:
            left[0] -= 1
            raise CorruptCheckpointError(f"{name} became shorter while it was read")
        return read(backend, name)

    monkeypatch.setattr(LocalBackend, "read", shorter)
    if times == 1:
        assert lease._read(LocalBackend(str(tmp_path))) is None
    else:
        with pytest.raises(CorruptCheckpointError, match="became shorter"):
            lease._read(LocalBackend(str(tmp_path)))

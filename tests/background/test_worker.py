"""The writer process itself, without a BackgroundWriter: what it says, and what it does when the storage fails."""

from __future__ import annotations

import errno
import functools
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paddle_flexckpt import progress
from paddle_flexckpt.background import worker
from paddle_flexckpt.background.outcome import Outcome, save_together
from paddle_flexckpt.background.protocol import Channel, WriteJob
from paddle_flexckpt.background.staging import Segment
from paddle_flexckpt.foreign.paddle_files import open_to_save
from paddle_flexckpt.media.local import LocalBackend
from paddle_flexckpt.native import data_file
from paddle_flexckpt.ranks.group_listener import GroupListener
from paddle_flexckpt.ranks.lost_ranks import open_presence
from tests.background.helpers import PATIENCE_SECONDS, load, state
from tests.native.samples import items_of, whole

ROOT = Path(__file__).resolve().parents[2]


def job_of(path, version=1, rank=0, ranks=(0,), timeout=5.0, backend=None):
    """A rank's job, its directory, and its data."""
    directory = open_to_save(backend or str(path))
    os.makedirs(path, exist_ok=True)
    ticket = directory.open_save(None, len(ranks))
    arrays = state(version)
    items = items_of([whole(key, str(a.dtype), a.shape, rank) for key, a in arrays.items()], ticket.data_file(rank))
    data = b"".join(arrays[items.key_name(row)].tobytes() for row in range(len(items)))
    storage = LocalBackend(str(path)).reopen_token()
    job = WriteJob(str(path), storage, None, ticket, items, rank, tuple(ranks), min(ranks), 7, timeout)
    return job, directory, data


def test_a_job_survives_its_way(tmp_path):
    job, _, _ = job_of(tmp_path, rank=3, ranks=(3, 5))
    back = WriteJob.decode(job.encode())
    assert {**vars(back), "items": None} == {**vars(job), "items": None}
    for name, column in job.items.to_arrays().items():
        assert (back.items.to_arrays()[name] == column).all(), name


def carry_out(job, directory, data, tell=None) -> Outcome:
    """What a writer does of the job of a rank that is alone."""
    with open_presence() as presence:
        listener = GroupListener(presence, bytes(16))
        write = functools.partial(worker.write_share, job, data, None, tell)
        return save_together(job, directory, worker.join_group(job, listener), write)


def serve(code, jobs):
    """What a writer process says about jobs, one after the other, and its exit status."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(theirs.fileno())], cwd=ROOT, pass_fds=(theirs.fileno(),)
        )
    ours.sendall(bytes(16))
    channel = Channel(ours)
    segment = Segment.create(0)
    said, progress = [], []
    for number, (job, data) in enumerate(jobs):
        text = job.encode()
        segment.grow(len(data) + len(text))
        segment.put_job(0, data)
        segment.put_job(len(data), text)
        descriptors = {"segment": segment.descriptor} if number == 0 else {}
        message = {"save": number, "segment": 0, "data_bytes": len(data), "job_bytes": len(text), "refusal": ""}
        channel.send({**message, "descriptors": list(descriptors)}, list(descriptors.values()))
        assert channel.receive()[0] == {"save": number, "begun": True}
        while "progress" in (answer := channel.receive()[0]):
            progress.append(answer)
        said.append(answer)
    channel.end()
    status = process.wait(PATIENCE_SECONDS)
    channel.close()
    segment.close()
    for number, (job, data) in enumerate(jobs):
        told = [each["progress"] for each in progress if each["save"] == number]
        assert told[0]["phase"] == "write"
        if said[number]["failure"] is None:
            assert (told[-1]["phase"], told[-1]["bytes_done"], told[-1]["items_done"]) == (
                "commit", len(data), len(job.items),
            )  # fmt: skip
    return said, status


def test_the_first_outcome_says_which_priority_was_refused(tmp_path):
    code = """
import platform, socket, sys
platform.machine = lambda: "abacus"
from paddle_flexckpt.background.worker import main
main(int(sys.argv[1]), 1, "idle", socket.create_server(("127.0.0.1", 0)).detach())
assert not {"paddle", "torch"} & set(sys.modules)
"""
    (first, second), status = serve(code, [job_of(tmp_path / str(i), i)[::2] for i in (1, 2)])
    assert status == 0
    assert first["warnings"] == [
        "the background writer keeps its I/O priority: 'idle' was refused (not known how on abacus)"
    ]
    assert second["warnings"] == []
    assert (first["failure"], second["failure"], first["save"], second["save"]) == (None, None, 0, 1)
    assert [load(tmp_path / str(i)) for i in (1, 2)] == [1, 2]


def test_a_priority_that_the_kernel_refuses_is_told(monkeypatch):
    def refuse(_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "nice", refuse)
    monkeypatch.setattr(worker, "_IOPRIO", {"idle": 7 << 13})  # no such class
    assert worker.lower_priority(10, "idle") == [
        "the background writer keeps its CPU priority: nice(10) was refused ([Errno 1] Operation not permitted)",
        "the background writer keeps its I/O priority: 'idle' was refused (Invalid argument)",
    ]


@pytest.mark.parametrize("refusals", [0, 3, 1000])
def test_the_writers_session_gets_its_priority_when_it_is_its_turn(monkeypatch, refusals):
    written = []

    def write(path, text, encoding):
        written.append((str(path), text))
        if len(written) <= refusals:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "getsid", lambda _: os.getpid())
    monkeypatch.setattr(os, "nice", lambda _: None)
    monkeypatch.setattr(os, "getpriority", lambda *_: 12)
    monkeypatch.setattr(worker.Path, "write_text", write)
    monkeypatch.setattr(worker.time, "sleep", lambda _: None)
    said = worker.lower_priority(10, "unchanged")
    assert written == [("/proc/self/autogroup", "12")] * min(refusals + 1, 20)
    assert len(said) == (refusals == 1000)
    if said:
        assert "session keeps its CPU priority: /proc/self/autogroup: [Errno 11]" in said[0]


def test_leftovers_that_cannot_be_removed_are_a_warning_on_a_checkpoint_that_is_there(tmp_path):
    class Sticky(LocalBackend):
        def remove(self, name):
            raise OSError(errno.EPERM, "sticky", name)

    job, directory, data = job_of(tmp_path, backend=Sticky(str(tmp_path)))
    outcome = carry_out(job, directory, np.frombuffer(data, dtype=np.uint8))
    assert outcome.failure is None
    (warning,) = outcome.warnings
    assert "is complete, but " in warning
    assert "files that it does not need not be removed: [Errno 1] sticky" in warning
    assert load(tmp_path) == 1


def test_a_training_process_that_is_stopped_does_not_hold_its_writer_up(tmp_path, monkeypatch):
    """It reads nothing of what the writer tells it, so that more than its socket takes would wait for ever."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    job, directory, _ = job_of(tmp_path)
    count, nbytes = 600, 4096  # of such steps as 64 MiB are
    shards = [whole(f"k{number:03d}", "uint8", (nbytes,), 0) for number in range(count)]
    job = replace(job, items=items_of(shards, job.names.data_file(0)))
    monkeypatch.setattr(progress, "MOST_STEP_BYTES", nbytes)
    monkeypatch.setattr(data_file, "BATCH_BYTES", nbytes)
    channel, outcome = Channel(theirs), []
    tell = functools.partial(worker._send_progress, channel, 0)
    data = np.zeros(count * nbytes, dtype=np.uint8)
    saving = threading.Thread(target=lambda: outcome.append(carry_out(job, directory, data, tell)), daemon=True)
    saving.start()
    saving.join(PATIENCE_SECONDS)
    assert outcome[0].failure is None
    with ours, theirs:
        assert Channel(ours).receive()[0]["progress"]["bytes_total"] == count * nbytes

"""Ranks of which one is killed or stopped: processes of their own, without Paddle's collectives."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from paddle_flexckpt.background import process
from paddle_flexckpt.background.writer import BackgroundWriter
from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.native import data_file
from paddle_flexckpt.ranks import lost_ranks
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.ranks.host_channel import HostChannel
from paddle_flexckpt.ranks.lost_ranks import announce
from paddle_flexckpt.ranks.transport import SocketTransport, Transport
from paddle_flexckpt.saving import save_options
from paddle_flexckpt.saving.saver import save_state_dict
from tests.background.helpers import PATIENCE_SECONDS, SOLO, await_end, shards
from tests.background.kill_jobs import MIB, STOPPED_SECONDS, Job
from tests.background.moments import Count, tell_commit


class Store:
    """A job's key-value store, as files of a directory: no process keeps it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _file(self, key: str) -> Path:
        return self._path / key.replace("/", "+")

    def add(self, key: str, value: int) -> int:
        """Add to a counter; return what it is then."""
        with open(self._file(key), "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            count = int(file.read() or b"0") + value
            file.truncate(0)
            file.write(b"%d" % count)
        return count

    def set(self, key: str, value: str) -> None:
        """Set a value."""
        temporary = self._file(f"{key}.{os.getpid()}")
        temporary.write_text(value, encoding="utf-8")
        temporary.rename(self._file(key))

    def get(self, key: str) -> bytes:
        """Return a value; wait until there is one."""
        while not self._file(key).exists():
            os.sched_yield()
        return self._file(key).read_bytes()


class Ranks(Communicator):
    """Ranks that talk through the library's channel between hosts."""

    def __init__(self, size: int, rank: int, store: Store, patience: float) -> None:
        super().__init__(tuple(range(size)), rank)
        announce(store, rank)
        self._channel, self._patience = HostChannel(store, "all", self.ranks, rank, patience), patience

    def _all_gather(self, payload: bytes) -> list[bytes]:
        return self._channel.all_gather(payload)

    def _all_to_all(self, note: bytes, payloads: Mapping[int, bytes]) -> tuple[dict[int, bytes], dict[int, bytes]]:
        return self._channel.all_to_all(note, payloads)

    def open_transport(self) -> Transport:
        """Return a transport for copies of files that waits as long as the ranks do."""
        return SocketTransport(self.ranks, self.position, self._patience)


class Told:
    """A trainer's end of its connection to the harness."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def __call__(self, what: Any) -> None:
        """Tell the harness, and go on when it says so."""
        self._connection.sendall(json.dumps(what).encode() + b"\n")
        self._connection.recv(1)


def _train(job: Job, rank: int, path: Path, tell: Told, gate: str) -> None:
    """Save as one rank; tell the harness the writer's process id, and then the outcome."""
    is_victim, commits = rank == job.victim and job.moment == "call", rank == job.coordinator and job.moment != "call"
    if not job.is_killed:
        lost_ranks.SPREAD_SECONDS = STOPPED_SECONDS
    save_options.LEAST_BYTES, data_file.BATCH_BYTES = MIB, MIB // 2
    boot = "from paddle_flexckpt.native import data_file\nfrom tests.background.moments import Count, tell_commit\n"
    boot += f"data_file.BATCH_BYTES = {MIB // 2}\n"
    if is_victim and job.kind == "writer":
        boot += f"count = Count('writer', {job.at}, {job.is_killed})\n"
    if commits:
        boot += f"tell_commit({job.moment!r}, {gate!r})\n"
    process._BOOT = process._BOOT.replace("main(**options)", f"{boot}main(**options)")
    writer, pid = BackgroundWriter(nice=0, timeout=job.patience), None
    if job.is_async:
        save_state_dict(shards(0, 1, 0), path / f"first{rank}", SOLO, unique_id=9, async_save=writer).result()
        pid = writer.pid
    options = {"unique_id": 0, "coordinator_rank": job.coordinator, **job.options}
    if job.is_async:
        options["async_save"] = writer
    state = shards(rank, job.ranks, 2, job.rows)
    comm = Ranks(job.ranks, rank, Store(path / "store"), job.patience)
    tell(pid)
    if commits and not job.is_async:
        tell_commit(job.moment, gate)
    count = Count("trainer", job.at if is_victim and job.kind == "trainer" else 0, job.is_killed)
    try:
        handle = save_state_dict(state, job.place(path, rank), comm, **options)
        if job.mode == "slices":
            while handle.stage_next():
                pass
            handle.finish_staging()
        if job.is_async:
            handle.result()
        text = "done"
    except CheckpointError as error:
        text = str(error)
    count.end()
    tell(text)  # until all have told: a writer lives longer than its save
    with writer:
        pass


class Trainer:
    """One rank: its trainer, forked, and the trainer's writer.

    Attributes:
        pids: Their process ids, by kind.
    """

    def __init__(self, job: Job, rank: int, path: Path, gate: str) -> None:
        self._ours, theirs = socket.socketpair()
        self.pids = {"trainer": os.fork()}
        if not self.pids["trainer"]:
            try:
                self._ours.close()
                _train(job, rank, path, Told(theirs), gate)
            finally:
                os._exit(0)
        theirs.close()
        self._stream = self._ours.makefile()
        self._writer: int | None = None

    def fileno(self) -> int:
        """Return the descriptor at which something is to be read when the trainer tells something, or has gone."""
        return self._ours.fileno()

    def hear_of_writer(self) -> None:
        """Take the process id of the writer."""
        pid = self.hear()
        if pid is not None:
            self.pids["writer"] = pid
            self._writer = os.pidfd_open(pid)

    def hear(self) -> Any:
        """Return what the trainer tells; ``killed`` if it has gone."""
        ready = wait([self], PATIENCE_SECONDS)
        assert ready, "a trainer does not end"
        line = self._stream.readline()
        return json.loads(line) if line else "killed"

    def let_go_on(self) -> None:
        """Say that it may go on, if it is there."""
        with contextlib.suppress(BrokenPipeError):
            self._ours.send(b"\0", socket.MSG_NOSIGNAL)

    def join(self) -> None:
        """Wait until both processes have ended."""
        os.waitpid(self.pids["trainer"], 0)
        if self._writer is not None:
            await_end(self._writer)
        self._stream.close()
        self._ours.close()

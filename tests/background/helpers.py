"""States that tell their version, and what stops, kills and awaits processes."""

from __future__ import annotations

import contextlib
import ctypes
import fnmatch
import os
import resource
import signal
import socket
import struct
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any

import numpy as np

from paddle_flexckpt.background.writer import BackgroundWriter
from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.ranks.communicator import Communicator, SoloCommunicator
from paddle_flexckpt.ranks.transport import Transport
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.sharded_weight import ShardedWeight

PATIENCE_SECONDS = 300.0
ELEMENTS = 1000
SOLO = SoloCommunicator()


def state(version: int, elements: int = ELEMENTS) -> dict[str, np.ndarray]:
    """A state of one rank."""
    return {"w": np.arange(elements, dtype=np.float32) + version, "b": np.full(3, version, dtype=np.int64)}


def save(path: Any, version: int, writer: Any = False, elements: int = ELEMENTS, **arguments: Any) -> Any:
    """One rank saves a version."""
    return save_state_dict(state(version, elements), path, SOLO, async_save=writer, **arguments)


def load(path: Any, unique_id: int | None = None, elements: int = ELEMENTS) -> int:
    """The version that a checkpoint of one rank holds, whole."""
    found = state(-77, elements)
    load_state_dict(found, path, SOLO, unique_id=unique_id)
    version = int(found["b"][0])
    for key, value in state(version, elements).items():
        assert (found[key] == value).all()
    return version


def shards(position: int, size: int, version: int, rows: int = 4) -> dict[str, ShardedWeight]:
    """One of several ranks' shards: a tensor cut by rows, and a replicated one."""
    whole = np.arange(size * rows * 5, dtype=np.float32).reshape(size * rows, 5) + version
    part = whole[position * rows : (position + 1) * rows].copy()
    replica = np.full(7, version, dtype=np.int64)
    return {
        "w": ShardedWeight("w", part, part.shape, whole.shape, (position * rows, 0)),
        "b": ShardedWeight("b", replica, replica.shape, replica.shape, (0,)),
    }


def load_shards(path: Any, size: int, unique_id: int | None = None, rows: int = 4) -> int:
    """The version that a checkpoint of several ranks holds, whole; read by one."""
    found = {"w": np.zeros((size * rows, 5), dtype=np.float32), "b": np.zeros(7, dtype=np.int64)}
    load_state_dict(found, path, SOLO, unique_id=unique_id)
    version = int(found["b"][0])
    assert (found["b"] == version).all()
    assert (found["w"] == np.arange(size * rows * 5, dtype=np.float32).reshape(size * rows, 5) + version).all()
    return version


class PairCommunicator(Communicator):
    """Two ranks, each a process, that talk over a socket."""

    def __init__(self, position: int, connection: socket.socket) -> None:
        super().__init__((0, 1), position)
        self._socket = connection

    def _all_gather(self, payload: bytes) -> list[bytes]:
        self._socket.sendall(len(payload).to_bytes(8, "little") + payload)
        other = self._exactly(int.from_bytes(self._exactly(8), "little"))
        return [payload, other] if self.position == 0 else [other, payload]

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self._socket.recv(count - len(data))
            assert more, "the other rank has gone"
            data += more
        return data

    def open_transport(self) -> Transport:
        raise NotImplementedError


class Writers:
    """Makes writers, and ends them."""

    def __init__(self) -> None:
        self._made: list[BackgroundWriter] = []

    def __call__(self, **arguments: Any) -> BackgroundWriter:
        """A writer whose process runs."""
        writer = BackgroundWriter(**{"nice": 0, **arguments})
        self._made.append(writer)
        with writer.open_slot():
            pass
        return writer

    def end(self) -> None:
        """Ends all of them; errors that no test has looked at are not to reach the exit status of the tests."""
        for writer in self._made:
            if writer.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(writer.pid, signal.SIGCONT)
            with contextlib.suppress(CheckpointError):
                writer.close()


@contextlib.contextmanager
def stopped(writer: BackgroundWriter) -> Iterator[int]:
    """The writer's process does nothing meanwhile."""
    pid = writer.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def kill(pid: int) -> None:
    """Kills a process, and waits until it is dead."""
    descriptor = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    await_end(descriptor)


def await_end(pidfd: int) -> None:
    """Waits until a process has ended; closes the descriptor."""
    try:
        ready = wait([pidfd], PATIENCE_SECONDS)
        assert ready, "the process goes on"
    finally:
        os.close(pidfd)


def too_large(path: object, size: str) -> str:
    """The text of an error about a limit on files; ``size``: that of the whole file."""
    return (
        f"[Errno 27] File too large: {path} has {size}. Remedy (FC402): raise the limit on the size of a file "
        "(`ulimit -f`), and call again"
    )


def limit_file_size(writer: BackgroundWriter, nbytes: int) -> None:
    """From now on the writer's files cannot be larger: each further byte is an error, as on a full disk."""
    assert writer.pid is not None
    _, hard = resource.prlimit(writer.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, (nbytes, hard))


class Watch:
    """Tells when something happens to the files of a directory, through inotify."""

    MODIFY = 0x2

    def __init__(self, path: Any, mask: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.inotify_init1(os.O_CLOEXEC)
        assert libc.inotify_add_watch(self._descriptor, os.fsencode(path), mask) >= 0, os.strerror(ctypes.get_errno())

    def wait_for(self, name: str) -> None:
        """Waits until it has happened to a file of that name, a shell's pattern."""
        while True:
            ready = wait([self._descriptor], PATIENCE_SECONDS)
            assert ready, f"nothing happens to {name}"
            events = os.read(self._descriptor, 65536)
            while events:
                _, _, _, length = struct.unpack_from("iIII", events)
                if fnmatch.fnmatch(events[16 : 16 + length].rstrip(b"\0").decode(), name):
                    return
                events = events[16 + length :]

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

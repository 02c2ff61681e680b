"""The writer process: takes saves from its training process, one after the other, and carries them out.

It does not import Paddle. It ends when the training process has closed the connection, or has ended, and all saves that
were handed over before are over.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from paddle_flexckpt.background.outcome import commit_on_nodes, save_together
from paddle_flexckpt.background.protocol import Channel, WriteJob
from paddle_flexckpt.background.staging import Segment, WaveReceiver, map_data
from paddle_flexckpt.foreign.paddle_files import open_to_save
from paddle_flexckpt.media.opening import reopen
from paddle_flexckpt.native.group_save import GroupSave
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.progress import Meter, Progress, ProgressCallback
from paddle_flexckpt.ranks.group_listener import GroupListener
from paddle_flexckpt.ranks.lost_ranks import SECRET_BYTES
from paddle_flexckpt.ranks.writer_group import WriterGroup

# ioprio_set has no function in libc; its number is the kernel's, by machine.
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "ppc64le": 273, "s390x": 282, "loongarch64": 30, "riscv64": 30}
_THIS_PROCESS = 1
_AUTOGROUP = "/proc/self/autogroup"
_TURNS = 20
# Class in the upper bits, level (7 is the lowest) in the lower.
_IOPRIO = {"best-effort-low": (2 << 13) | 7, "idle": 3 << 13}


def main(descriptor: int, nice: int, io_class: str, presence: int) -> None:
    """Serve one training process.

    ``descriptor`` is a connected socket, ``presence`` one that listens, at which other writers reach this one. The
    secret that they have to know comes first through the connection.
    """
    connection = socket.socket(fileno=descriptor)
    secret = connection.recv(SECRET_BYTES, socket.MSG_WAITALL)
    listener, channel = GroupListener(socket.socket(fileno=presence), secret), Channel(connection)
    warnings = lower_priority(nice, io_class)
    segments: dict[int, Segment] = {}
    for message, descriptors in _messages(channel, listener):
        given = dict(zip(message["descriptors"], descriptors))
        number = message["segment"]
        if "segment" in given:
            segments[number] = Segment(number, given["segment"])
        segment, data_bytes = segments[number], message["data_bytes"]
        segment.attach(data_bytes + message["job_bytes"])
        job = WriteJob.decode(segment.view(data_bytes, data_bytes + message["job_bytes"]).tobytes())
        directory = open_to_save(reopen(job.storage))
        lock = None if job.lock is None else directory.backend.locks.adopt(job.lock, given.get("lock"))
        _send(channel, {"save": message["save"], "begun": True})
        data = segment.view(0, data_bytes)
        if "source" in given:
            data = map_data(given["source"], message["source_begin"], job.data_bytes)
        waves = WaveReceiver(socket.socket(fileno=given["waves"]), data) if "waves" in given else None
        progress = functools.partial(_send_progress, channel, message["save"])
        write = functools.partial(write_share, job, data, waves, progress)
        group, refusal = join_group(job, listener), message["refusal"]
        try:
            if job.layout is None:
                outcome = save_together(job, directory, group, write, refusal)
            else:
                outcome = commit_on_nodes(job, job.layout, directory, group, refusal, progress)
        finally:
            if lock is not None:
                lock.release()
        outcome.warnings += warnings
        warnings = []
        # The file of a save to nodes may be gone by now, and its pages are memory as long as they are mapped.
        del data, waves, write
        _send(channel, {"save": message["save"], **asdict(outcome)})
    listener.linger()


def _messages(channel: Channel, listener: GroupListener) -> Iterator[tuple[dict[str, Any], list[int]]]:
    """Yield the messages of the training process, to their end; serve other writers while waiting."""
    while True:
        listener.await_readable(channel.connection)
        received = channel.receive()
        if received is None:
            return
        yield received


def _send(channel: Channel, message: dict[str, Any]) -> None:
    # If the training process has ended, the saves that it handed over are still carried out.
    with contextlib.suppress(ConnectionError):
        channel.send(message)


def _send_progress(channel: Channel, number: int, progress: Progress) -> None:
    # A training process that is stopped reads nothing, and the save must not depend on it.
    if channel.has_room:
        _send(channel, {"save": number, "progress": asdict(progress)})


def join_group(job: WriteJob, listener: GroupListener) -> WriterGroup:
    """Return the group of the writers that make a save; the others reach this one at ``listener``."""
    token = bytes.fromhex(job.names.token)
    return WriterGroup(listener, job.addresses, token, job.ranks, job.position, job.coordinator_position, job.timeout)


def write_share(
    job: WriteJob,
    data: np.ndarray,
    waves: WaveReceiver | None,
    progress: ProgressCallback | None,
    save: GroupSave,
) -> Manifest:
    """Write one rank's data file, and return its part of the manifest.

    Args:
        job: The rank's share.
        data: The items' bytes, uint8, end to end; or the buckets of ``waves``.
        waves: The receiver of the data, if it comes in waves.
        progress: Gets the progress.
        save: The save.

    Raises:
        CheckpointError: The share was not handed over completely.
        OSError: The file system refused.
    """
    try:
        stops = job.items.byte_length.cumsum().tolist()
        items: Iterator[np.ndarray] = (data[start:stop] for start, stop in zip([0, *stops], stops))
        if waves is not None:
            items = waves.items(job.items.byte_length.tolist())
        part = save.write(
            job.items, items, step=job.step, meter=Meter(progress, "write", job.data_bytes, len(job.items))
        )
        done = job.data_bytes, len(job.items)
        Meter(progress, "commit", *done, *done)
        return part
    except Exception as error:
        if waves is not None:
            waves.fail(error)
        raise
    finally:
        if waves is not None:
            waves.close()


def lower_priority(nice: int, io_class: str) -> list[str]:
    """Lower this process's priorities for the processor and for storage; return what failed and why."""
    refused = []
    try:
        os.nice(nice)
    except OSError as error:
        refused.append(f"the background writer keeps its CPU priority: nice({nice}) was refused ({error})")
    if nice and os.getsid(0) == os.getpid():
        try:
            _lower_session(os.getpriority(os.PRIO_PROCESS, 0))
        except OSError as error:
            refused.append(f"the background writer's session keeps its CPU priority: {_AUTOGROUP}: {error}")
    if io_class in _IOPRIO:
        number, problem = _IOPRIO_SET.get(platform.machine()), ""
        libc = ctypes.CDLL(None, use_errno=True)
        if number is None:
            problem = f"not known how on {platform.machine()}"
        elif libc.syscall(number, _THIS_PROCESS, 0, _IOPRIO[io_class]) != 0:
            problem = os.strerror(ctypes.get_errno())
        if problem:
            refused.append(f"the background writer keeps its I/O priority: {io_class!r} was refused ({problem})")
    return refused


def _lower_session(nice: int) -> None:
    """Lower the priority of this session: kernels with autogroups share the processor among sessions first.

    Within a session of its own, the writer's nice value would count for nothing.
    """
    for turn in range(_TURNS):
        try:
            Path(_AUTOGROUP).write_text(str(nice), encoding="ascii")
            return
        except FileNotFoundError:
            return  # a kernel without them
        except BlockingIOError:  # only one process of the machine may do this in a tenth of a second
            if turn == _TURNS - 1:
                raise
            time.sleep(0.1)

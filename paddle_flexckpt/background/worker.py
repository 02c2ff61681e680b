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

from paddle_flexckpt.background.outcome import SaveOutcome
from paddle_flexckpt.background.protocol import Channel, WriteJob
from paddle_flexckpt.background.staging import Segment
from paddle_flexckpt.background.waves import WaveReceiver
from paddle_flexckpt.catalog.errors import Failure
from paddle_flexckpt.foreign.formats import open_to_save
from paddle_flexckpt.media.opening import reopen
from paddle_flexckpt.media.retrying import is_unanswered
from paddle_flexckpt.native.save_directory import SaveDirectory
from paddle_flexckpt.progress import Meter, Progress, ProgressCallback
from paddle_flexckpt.ranks.presence import answer

# ioprio_set has no function in libc; its number is the kernel's, by machine.
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "ppc64le": 273, "s390x": 282, "loongarch64": 30, "riscv64": 30}
_THIS_PROCESS = 1
_AUTOGROUP = "/proc/self/autogroup"
_TURNS = 20
# Class in the upper bits, level (7 is the lowest) in the lower.
_IOPRIO = {"best-effort-low": (2 << 13) | 7, "idle": 3 << 13}


def main(descriptor: int, nice: int, io_class: str, presence: int) -> None:
    """Serve one training process.

    ``descriptor`` is a connected socket, ``presence`` one that listens for as long as this process lives.
    """
    answer(socket.socket(fileno=presence))
    channel = Channel(socket.socket(fileno=descriptor))
    warnings = lower_priority(nice, io_class)
    segments: dict[int, Segment] = {}
    while (received := channel.receive()) is not None:
        message, descriptors = received
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
        waves = WaveReceiver(socket.socket(fileno=given["waves"]), data) if "waves" in given else None
        try:
            outcome = carry_out(job, directory, data, waves, functools.partial(_tell, channel, message["save"]))
        finally:
            if lock is not None:
                lock.release()
        outcome["warnings"] += warnings
        warnings = []
        _send(channel, {"save": message["save"], **outcome})


def _send(channel: Channel, message: dict[str, Any]) -> None:
    # If the training process has ended, what it handed over is carried out all the same.
    with contextlib.suppress(ConnectionError):
        channel.send(message)


def _tell(channel: Channel, number: int, progress: Progress) -> None:
    # A training process that is stopped reads nothing, and the save does not depend on it.
    if channel.has_room:
        _send(channel, {"save": number, "progress": asdict(progress)})


def carry_out(
    job: WriteJob,
    directory: SaveDirectory,
    data: np.ndarray,
    waves: WaveReceiver | None = None,
    tell: ProgressCallback | None = None,
) -> dict[str, Any]:
    """Carry out one rank's share of one save; ``data`` has the items' bytes, uint8, end to end, or in ``waves``.

    ``tell`` gets how far it is. Return ``failure`` (None if the save is committed), ``seconds`` by phase, and
    ``warnings``.
    """
    begin = time.perf_counter()
    own = None
    outcome = SaveOutcome(job, directory)
    try:
        if job.is_coordinator:
            directory.cleaner.remove_dead_saves(job.names)
        stops = job.items.byte_length.cumsum().tolist()
        items: Iterator[np.ndarray] = (data[start:stop] for start, stop in zip([0, *stops], stops))
        if waves is not None:
            items = waves.items(job.items.byte_length.tolist())
        meter = Meter(tell, "write", job.data_bytes, len(job.items))
        size, step = len(job.ranks), job.step
        directory.write_share(job.names, job.rank, job.items, items, world_size=size, step=step, meter=meter)
        Meter(tell, "commit", job.data_bytes, len(job.items)).finish()
    except Exception as error:  # every rank gets it as the outcome of the save
        own = Failure.of(error)
        outcome.is_unanswered = isinstance(error, OSError) and is_unanswered(error)
        if waves is not None:
            waves.fail(error)
    if waves is not None:
        waves.close()
    written = time.perf_counter()
    failure = outcome.agree(own)
    return {
        "failure": failure and failure.as_dict(),
        "seconds": {"write": written - begin, "commit": time.perf_counter() - written},
        "warnings": outcome.warnings,
    }


def lower_priority(nice: int, io_class: str) -> list[str]:
    """Lower this process's priorities for the processor and for storage; return what could not be done and why."""
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

    Raises:
        OSError: It was refused.
    """
    for turn in range(_TURNS):
        try:
            Path(_AUTOGROUP).write_text(str(nice), encoding="ascii")
            return
        except FileNotFoundError:
            return  # a kernel without them
        except BlockingIOError:  # one process of the machine in a tenth of a second may do so
            if turn == _TURNS - 1:
                raise
            time.sleep(0.1)

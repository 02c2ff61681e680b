"""The writer process: takes saves from its training process, one after the other, and carries them out.

It does not import Paddle. It ends when the training process has closed the connection, or has ended, and all saves that
were handed over before are settled.
"""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

import numpy as np

from paddle_flexckpt.background.job import WriteJob
from paddle_flexckpt.background.presence import answer
from paddle_flexckpt.background.priority import lower_priority
from paddle_flexckpt.background.protocol import Channel
from paddle_flexckpt.background.settlement import Settlement
from paddle_flexckpt.background.staging import Segment
from paddle_flexckpt.catalog.failures import Failure
from paddle_flexckpt.foreign.formats import open_to_save
from paddle_flexckpt.media.backend import open_described
from paddle_flexckpt.native.dead_saves import remove_dead_saves
from paddle_flexckpt.native.save_directory import SaveDirectory


def main(descriptor: int, nice: int, io_class: str, presence: int) -> None:
    """Serves one training process.

    Args:
        descriptor: A connected socket.
        nice: See :func:`~paddle_flexckpt.background.priority.lower_priority`.
        io_class: Likewise.
        presence: A socket that listens for as long as this process lives.
    """
    answer(socket.socket(fileno=presence))
    channel = Channel(socket.socket(fileno=descriptor))
    warnings = lower_priority(nice, io_class)
    segments: dict[int, Segment] = {}
    while (received := channel.receive()) is not None:
        message, descriptors = received
        names = dict(zip(message["descriptors"], descriptors))
        number = message["segment"]
        if "segment" in names:
            segments[number] = Segment(number, names["segment"])
        segment, data_bytes = segments[number], message["data_bytes"]
        segment.attach(data_bytes + message["job_bytes"])
        job = WriteJob.decode(segment.view(data_bytes, data_bytes + message["job_bytes"]).tobytes())
        directory = open_to_save(open_described(job.storage))
        lock = None if job.lock is None else directory.backend.adopt_lock(job.lock, names.get("lock"))
        _tell(channel, {"save": message["save"], "begun": True})
        try:
            outcome = carry_out(job, directory, segment.view(0, data_bytes))
        finally:
            if lock is not None:
                lock.release()
        outcome["warnings"] += warnings
        warnings = []
        _tell(channel, {"save": message["save"], **outcome})


def _tell(channel: Channel, message: dict[str, Any]) -> None:
    # If the training process has ended, what it handed over is carried out all the same.
    with contextlib.suppress(ConnectionError):
        channel.send(message)


def carry_out(job: WriteJob, directory: SaveDirectory, data: np.ndarray) -> dict[str, Any]:
    """Carries out one rank's part of one save.

    Args:
        job: The part.
        directory: The checkpoint's directory.
        data: uint8, the items' bytes, end to end.

    Returns:
        ``failure`` (None if the save is committed), ``seconds`` by phase, and ``warnings``.
    """
    begin = time.perf_counter()
    own = None
    settlement = Settlement(job, directory)
    try:
        if job.is_coordinator:
            remove_dead_saves(directory, job.ticket)
        stops = job.items.byte_length.cumsum().tolist()
        items = (data[start:stop] for start, stop in zip([0, *stops], stops))
        directory.write_share(job.ticket, job.rank, job.items, items, world_size=len(job.ranks), step=job.step)
    except Exception as error:  # every rank gets it as the outcome of the save
        own = Failure.of(error)
    written = time.perf_counter()
    failure = settlement.settle(own)
    return {
        "failure": failure and failure.as_dict(),
        "seconds": {"write": written - begin, "commit": time.perf_counter() - written},
        "warnings": settlement.warnings,
    }

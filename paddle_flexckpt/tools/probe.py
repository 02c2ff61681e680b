"""Measure a medium: how fast several threads write and read scratch files there, and how long a small read takes.

Tested in tests/tools/test_probe.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.catalog.texts import format_bytes
from paddle_flexckpt.media.backend import Backend, Location, fill
from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.report import Report

# Bytes of one call that writes or reads, about those of a portion of a load.
_CHUNK_BYTES = 4 << 20
# Number and bytes of small reads: enough for a median, and little for the medium.
_SMALL_READS, _SMALL_BYTES = 64, 4096
LEAST_BYTES = 1 << 20


@dataclass(frozen=True)
class ProbeReport(Report):
    """The speed of a medium.

    Attributes:
        path: Where the scratch files were.
        nbytes: Their bytes, all together.
        threads: Number of threads that wrote and read, a file each.
        write_bytes_per_second: The speed of all threads, until all bytes were durable.
        read_bytes_per_second: The speed of all threads. Before, the system was asked to drop the files from its cache.
        latency_seconds: The median time of small reads, one after the other.
        request_seconds: The mean time of small reads while all threads read: their seconds over their reads.
    """

    path: str
    nbytes: int
    threads: int
    write_bytes_per_second: float
    read_bytes_per_second: float
    latency_seconds: float
    request_seconds: float

    def summary(self) -> str:
        """Return one line for people."""
        rates = (self.write_bytes_per_second, self.read_bytes_per_second)
        write, read = (format_bytes(int(rate)) for rate in rates)
        return (
            f"{self.path}: {self.threads} threads write {write}/s and read {read}/s ({format_bytes(self.nbytes)}); a "
            f"small read takes {self.latency_seconds * 1e6:.0f} us alone, and {self.request_seconds * 1e6:.0f} us "
            "beside others"
        )


def probe(location: Location, nbytes: int = 256 << 20, threads: int = 4) -> ProbeReport:
    """Measure a medium with scratch files in a directory, which are removed.

    Args:
        location: The directory, which has to be there: a path, a URL, or what ``open_storage`` gives.
        nbytes: Bytes to write and read, all threads together.
        threads: How many threads write and read at the same time.

    Raises:
        ValidationError: There is no such directory, or a number makes no sense.
        OSError: The medium failed.
    """
    backend = open_backend(location)
    if nbytes < LEAST_BYTES or not 1 <= threads <= 256:
        raise ValidationError(
            [f"a probe takes {LEAST_BYTES} bytes or more, and 1 to 256 threads; got {nbytes} and {threads}"]
        )
    if backend.has_path and not os.path.isdir(backend.path):
        raise ValidationError([f"there is no directory {backend.path!r} to probe. Remedy (FC301): make it first"])
    mark, each = os.urandom(8).hex(), -(-nbytes // threads)
    files = [f"flexckpt-probe.{mark}.{number}" for number in range(threads)]
    with contextlib.ExitStack() as stack:
        for name in files:
            stack.callback(backend.remove, name)
        pool = stack.enter_context(ThreadPoolExecutor(threads, thread_name_prefix="flexckpt-probe"))

        def timed(work: Callable[[str], object]) -> float:
            begin = time.perf_counter()
            for done in [pool.submit(work, name) for name in files]:
                done.result()
            return time.perf_counter() - begin

        # Incompressible; the first bytes differ between threads.
        data = np.random.default_rng().integers(0, 256, min(each, _CHUNK_BYTES), dtype=np.uint8)
        write = timed(lambda name: _write(backend, name, each, data))
        _forget(backend, files)
        read = timed(lambda name: _read(backend, name, each))
        _forget(backend, files)
        latency = statistics.median(_small_reads(backend, files[0], each))
        _forget(backend, files)
        begin = time.perf_counter()
        busy = [len(done) for done in pool.map(lambda name: _small_reads(backend, name, each), files)]
        request = (time.perf_counter() - begin) / sum(busy)
    written = each * threads
    return ProbeReport(backend.path, written, threads, written / write, written / read, latency, request)


def read_probe(path: str | Path) -> ProbeReport:
    """Return the report in a file with the output of ``flexckpt bench --json``.

    Raises:
        ValidationError: The file is something else.
    """
    try:
        content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        report = ProbeReport(**{each.name: content[each.name] for each in fields(ProbeReport)})
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = "Remedy (FC101): write it with `flexckpt bench DIRECTORY --json`"
        raise ValidationError([f"cannot read a probe from {str(path)!r}: {error!r}. {remedy}"]) from error
    numbers = [getattr(report, each.name) for each in fields(ProbeReport) if each.name != "path"]
    if not all(isinstance(number, (int, float)) and number > 0 for number in numbers):
        raise ValidationError([f"a probe has positive numbers; {str(path)!r} has {numbers}"])
    return report


def _write(backend: Backend, name: str, nbytes: int, data: np.ndarray) -> None:
    with backend.create(name, size=nbytes) as file:
        for begin in range(0, nbytes, len(data)):
            file.write(memoryview(data)[: nbytes - begin])


def _read(backend: Backend, name: str, nbytes: int) -> None:
    buffer = memoryview(np.empty(min(nbytes, _CHUNK_BYTES), dtype=np.uint8))
    with backend.open(name) as file:
        for begin in range(0, nbytes, len(buffer)):
            wanted = min(len(buffer), nbytes - begin)
            if fill(file, buffer[:wanted], begin) < wanted:
                raise OSError(f"{backend.where(name)} ends early")


def _small_reads(backend: Backend, name: str, nbytes: int) -> list[float]:
    """Return the seconds of small reads, from the end of a file to its beginning, so that no read-ahead helps."""
    buffer, seconds = memoryview(bytearray(min(_SMALL_BYTES, nbytes))), []
    with backend.open(name) as file:
        for place in range(_SMALL_READS, 0, -1):
            offset = (nbytes - len(buffer)) * place // _SMALL_READS
            begin = time.perf_counter()
            fill(file, buffer, offset)
            seconds.append(time.perf_counter() - begin)
    return seconds


def _forget(backend: Backend, files: list[str]) -> None:
    """Ask the system to drop files from its cache, so that the medium is read and not memory."""
    if not backend.has_path or not hasattr(os, "posix_fadvise"):
        return
    for name in files:
        descriptor = os.open(backend.where(name), os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)

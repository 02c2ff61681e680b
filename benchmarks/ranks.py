"""Ranks that take orders: processes, in whatever environment, that save and load in turns as one process tells them.

The subjects of a comparison live in groups of processes (this library and Paddle's own in one, torch in another).
One process orders them about over loopback, so that only one of them works at a time. A rank answers with the times of
its monotonic clock, which all processes of a machine share: an action takes from the first rank's begin to the last
one's end. numpy is all that this module needs.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import random_tensors, versions

ROOT = Path(__file__).resolve().parents[1]
SECONDS_TO_START = 300
STATEMENT = "model.layers.$LAYER_ID.mlp.weight^T -> layers.$LAYER_ID.weight"


@dataclass(frozen=True)
class State:
    """Describe the tensors of a model: ``tensors`` of them, all of one shape."""

    tensors: int
    shape: tuple[int, int]
    dtype: str = "float32"


@dataclass(frozen=True)
class Part:
    """Hold what one rank has of each tensor: a box, or a flattened range of all of it."""

    offset: tuple[int, int]
    shape: tuple[int, int]
    flat: tuple[int, int] | None = None

    def of(self, tensor: np.ndarray) -> np.ndarray:
        """Copy this part out of a whole tensor."""
        if self.flat is not None:
            return tensor.ravel()[slice(*self.flat)].copy()
        return np.ascontiguousarray(
            tensor[tuple(slice(at, at + extent) for at, extent in zip(self.offset, self.shape))]
        )


def part(layout: str, shape: tuple[int, int], rank: int, size: int) -> Part:
    """Return a rank's part of a tensor.

    ``rows`` and ``columns`` are cuts along the axes; one rank has the second half of the columns. ``flat``: sharding
    V2, where ranges end in the middle of rows. ``transposed``: the columns of the transposed tensor.
    """
    rows, columns = shape
    if layout == "rows":
        return Part((rows * rank // size, 0), (rows // size, columns))
    if layout == "flat":
        cuts = [0, *(rows * columns * i // size + 13 for i in range(1, size)), rows * columns]
        return Part((0, 0), shape, (cuts[rank], cuts[rank + 1]))
    if layout == "transposed":
        return Part((0, rows * rank // size), (columns, rows // size))
    if size == 1:
        return Part((0, columns // 2), (rows, columns // 2))
    return Part((0, columns * rank // size), (rows, columns // size))


def local_tensors(state: State, layout: str, rank: int, size: int) -> Iterator[tuple[str, np.ndarray, Part]]:
    """Make a rank's parts of all tensors, one after the other, under the names that they have in this layout."""
    own = part(layout, state.shape, rank, size)
    for i, (name, tensor) in enumerate(random_tensors(state.tensors, state.shape, state.dtype)):
        if layout == "transposed":
            name, tensor = f"layers.{i}.weight", tensor.T
        yield name, own.of(tensor), own


# -- the rank's side ---------------------------------------------------------------------------------------------------


class Process:
    """Tell what a rank's environment has."""

    def versions(self) -> dict[str, str]:
        return versions()


def serve(address: tuple[str, int], key: bytes, rank: int, subjects: Mapping[str, Any]) -> None:
    """Carry out orders (subject, method, arguments) until None comes, or whoever gives them is gone."""
    subjects = {**subjects, "process": Process()}
    with contextlib.suppress(EOFError), Client(tuple(address), authkey=key) as link:
        link.send(rank)
        while (order := link.recv()) is not None:
            subject, method, arguments = order
            try:
                begin = time.perf_counter()
                value = getattr(subjects[subject], method)(**arguments)
                link.send((begin, time.perf_counter(), value))
            except BaseException:
                link.send(traceback.format_exc())
                raise


# -- the side that gives orders ----------------------------------------------------------------------------------------


class Ranks:
    """Hold connections to all ranks of one group of processes; what ``ends`` holds ends the processes."""

    def __init__(self, links: Mapping[int, Connection], ends: contextlib.ExitStack) -> None:
        self.size, self._links, self._ends = len(links), links, ends

    def order(self, subject: str, method: str, /, **arguments: Any) -> tuple[float, list[Any]]:
        """Have all ranks call a method of a subject; return the seconds it took, and what they returned.

        Raises:
            RuntimeError: A rank raised; with its traceback.
        """
        for link in self._links.values():
            link.send((subject, method, arguments))
        answers: dict[int, Any] = {}
        while len(answers) < self.size:
            # Whichever answers first: where one raises, the others may wait for it for ever.
            for link in wait([link for rank, link in self._links.items() if rank not in answers]):
                rank = next(rank for rank, own in self._links.items() if own is link)
                answers[rank] = link.recv()
                if isinstance(answers[rank], str):
                    raise RuntimeError(f"{subject}.{method} failed on rank {rank} of {self.size}:\n{answers[rank]}")
        begins, ends, values = zip(*(answers[rank] for rank in sorted(answers)))
        return max(ends) - min(begins), list(values)

    def close(self) -> None:
        """Let the ranks end."""
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.send(None)
            link.close()
        self._ends.close()


def paddle_ranks(size: int) -> Ranks:
    """Start ranks of this environment under ``paddle.distributed.launch``, in the CPU world."""

    def start(address: tuple[str, int], key: bytes, ends: contextlib.ExitStack) -> None:
        thread = threading.Thread(target=run_world, args=(size, address, key.hex()))
        ends.callback(thread.join)
        thread.start()

    return _started(size, start)


def run_world(size: int, address: Sequence[Any], key: str) -> None:
    """Run a world of ranks that take orders, to its end."""
    from paddle_flexckpt.testing import World

    # What a rank raises has come over its own connection.
    with World(size, timeout=24 * 3600, grace=1) as world, contextlib.suppress(RuntimeError):
        world.run("benchmarks.paddle_ranks:job", address=address, key=key)


def earlier_ranks(checkout: Path, size: int) -> Ranks:
    """Start ranks as :func:`paddle_ranks` does, with the package and the benchmarks of another checkout.

    The benchmarks of the checkout come along, because they import modules of the package by their names of that time.
    """

    def start(address: tuple[str, int], key: bytes, ends: contextlib.ExitStack) -> None:
        # A worker imports from the folder that its package lies in: so the package lies beside these benchmarks.
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="bench-earlier-")))
        for name in ("paddle_flexckpt", "benchmarks"):
            shutil.copytree(checkout / name, folder / name)
        words = json.dumps([size, address, key.hex()])
        code = f"import json; from benchmarks.ranks import run_world; run_world(*json.loads({words!r}))"
        ends.callback(_end, subprocess.Popen([sys.executable, "-c", code], cwd=folder))

    return _started(size, start)


def peer_ranks(python: Path, kind: str, size: int) -> Ranks:
    """Start ranks of ``benchmarks/peer_ranks.py`` with the interpreter of another environment.

    Args:
        python: The interpreter.
        kind: ``torch`` (its DCP, and safetensors), or ``orbax``: one process with ``size`` devices.
        size: Number of ranks.
    """

    def start(address: tuple[str, int], key: bytes, ends: contextlib.ExitStack) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        if kind == "orbax":
            environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={size}"
            environment["JAX_PLATFORMS"] = "cpu"
        meeting = ends.enter_context(tempfile.TemporaryDirectory(prefix="bench-meeting-"))
        for rank in range(1 if kind == "orbax" else size):
            words = [f"{address[0]}:{address[1]}", key.hex(), kind, str(rank), str(size), f"{meeting}/store"]
            process = subprocess.Popen([python, "-m", "benchmarks.peer_ranks", *words], env=environment, cwd=ROOT)
            ends.callback(_end, process)

    return _started(1 if kind == "orbax" else size, start)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _started(size: int, start: Callable[[tuple[str, int], bytes, contextlib.ExitStack], None]) -> Ranks:
    """Start ranks, and wait until all have connected."""
    key = secrets.token_bytes(32)
    with contextlib.ExitStack() as ends, Listener(("127.0.0.1", 0), backlog=size, authkey=key) as listener:
        # It has no public way to wait for so long only: a process that dies before it connects would be waited for.
        listener._listener._socket.settimeout(SECONDS_TO_START)
        start(listener.address, key, ends)
        links = {}
        for _ in range(size):
            link = listener.accept()
            links[link.recv()] = link
        return Ranks(links, ends.pop_all())

"""Real processes that publish a model together, some of which are killed at any of their calls.

    python -m tests.crash.publishing --seed 1 --count 500 [--ranks 2 4]

Each rank is a process of its own, made by fork. The victims are one, several or all of them; each is killed (SIGKILL)
before or in one of its calls that change a file or wait for other ranks, at a number that is drawn. Where that number
is beyond its last call, nobody is killed.
"""

from __future__ import annotations

import sys

# The process starts in a fraction of the time without it, forks sooner, and arrays of numpy are enough.
if __name__ == "__main__":
    sys.modules["paddle"] = None  # type: ignore[assignment]

import argparse
import json
import os
import random
import selectors
import shutil
import signal
import socket
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np

from paddle_flexckpt.catalog import CheckpointError, CorruptCheckpointError, LostRankError, ValidationError
from paddle_flexckpt.loading import live_model, publishing
from paddle_flexckpt.loading.publishing import publish
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.sharded_weight import ShardedWeight
from paddle_flexckpt.tools.tensor_reader import TensorReader

#: A rank that does not end: something waits for what will not come.
SECONDS = 60
_LENGTH = struct.Struct("<q")
#: What a rank does between two of which it may be killed; of the last, in the middle of it.
CALLS = ("open", "write", "writev", "fsync", "rename", "unlink", "mkdir", "rmdir")
TENSORS = {"a": (64, 96), "b": (8, 40), "c": (48,), "d": (32, 8, 4), "e": (128, 64), "f": (16, 16)}


class Violation(AssertionError):
    """Signal that a reader finds no model, or a rank does not end, or the next call fails otherwise than documented."""


class Sockets(Communicator):
    """Connect ranks that have a socket for each other, which ends with its process."""

    def __init__(self, position: int, links: dict[int, socket.socket]) -> None:
        super().__init__(tuple(range(len(links) + 1)), position)
        self._links = links
        for link in links.values():
            link.setblocking(False)

    def _all_gather(self, payload: bytes) -> list[bytes]:
        sent = dict.fromkeys(self._links, _LENGTH.pack(len(payload)) + payload)
        got: dict[int, bytes] = dict.fromkeys(self._links, b"")
        with selectors.DefaultSelector() as waiting:
            for rank, link in self._links.items():
                waiting.register(link, selectors.EVENT_READ | selectors.EVENT_WRITE, rank)
            while waiting.get_map():
                ready = waiting.select(SECONDS)
                if not ready:
                    raise LostRankError(f"ranks say nothing: {sorted(key.data for key in waiting.get_map().values())}")
                for key, events in ready:
                    rank, link = key.data, self._links[key.data]
                    try:
                        if events & selectors.EVENT_WRITE and sent[rank]:
                            sent[rank] = sent[rank][link.send(sent[rank]) :]
                        if events & selectors.EVENT_READ:
                            got[rank] += self._receive(link, got[rank])
                    except OSError as error:
                        raise LostRankError(f"rank {rank} has gone") from error
                    full = len(got[rank]) >= 8 and len(got[rank]) == 8 + _LENGTH.unpack(got[rank][:8])[0]
                    if full and not sent[rank]:
                        waiting.unregister(link)
                    elif not sent[rank]:
                        waiting.modify(link, selectors.EVENT_READ, rank)
                    elif full:
                        waiting.modify(link, selectors.EVENT_WRITE, rank)
        return [payload if rank == self.rank else got[rank][8:] for rank in self.ranks]

    def _receive(self, link: socket.socket, got: bytes) -> bytes:
        """Return what has come of this message; nothing of the next one is taken."""
        missing = 8 - len(got) if len(got) < 8 else 8 + _LENGTH.unpack(got[:8])[0] - len(got)
        part = link.recv(missing)
        if not part:
            raise ConnectionResetError
        return part


@dataclass(frozen=True)
class Job:
    """Say what is published, and who is killed.

    Attributes:
        ranks: How many.
        victims: By rank, the number of the call in which it is killed.
        exchanged: Whether ranks send each other all that is written, or write what they have.
        max_file_bytes: As of ``publish``.
        single: Whether the model is one tensor, and so one file.
    """

    ranks: int
    victims: dict[int, int]
    exchanged: bool
    max_file_bytes: int
    single: bool

    @property
    def values(self) -> dict[str, np.ndarray]:
        """Return the model."""
        random_bytes = np.random.default_rng(self.ranks)
        names = ["a"] if self.single else list(TENSORS)
        return {name: random_bytes.standard_normal(TENSORS[name]).astype(np.float32) for name in names}

    def state(self, rank: int) -> dict[str, ShardedWeight]:
        """Return a rank's rows of each tensor."""
        found = {}
        for name, value in self.values.items():
            low, high = (value.shape[0] * each // self.ranks for each in (rank, rank + 1))
            rest = (0,) * (value.ndim - 1)
            rows = value[low:high].copy()
            found[name] = ShardedWeight(name, rows, rows.shape, value.shape, (low, *rest))
        return found


def draw(seed: int, ranks: tuple[int, ...] = (2, 4)) -> Iterator[Job]:
    """Yield jobs for ever."""
    rng = random.Random(seed)
    while True:
        size = rng.choice(ranks)
        count = rng.choice((1, 1, size, rng.randint(1, size)))
        exchanged, single = rng.random() < 0.4, rng.random() < 0.2
        # About as many calls as there are: rank 0 has more, and a single file needs fewer.
        most = (30, 16) if single else (45, 26)
        victims = {rank: rng.randint(1, most[rank > 0]) for rank in rng.sample(range(size), count)}
        yield Job(size, victims, exchanged, rng.choice((1 << 30, 9000)), single)


def run(job: Job, output: Path) -> list[str]:
    """Publish by as many processes; return how each ended: ``done``, ``killed``, or the error."""
    links: list[dict[int, socket.socket]] = [{} for _ in range(job.ranks)]
    for low in range(job.ranks):
        for high in range(low + 1, job.ranks):
            links[low][high], links[high][low] = socket.socketpair()
    children = [_fork(job, rank, links, output) for rank in range(job.ranks)]
    for own in links:
        for link in own.values():
            link.close()
    outcomes = []
    try:
        for _, told in children:
            text = b""
            with open(told, "rb") as pipe, selectors.DefaultSelector() as waiting:
                waiting.register(pipe, selectors.EVENT_READ)
                while waiting.select(SECONDS):
                    part = os.read(pipe.fileno(), 1 << 16)
                    text += part
                    if not part:
                        break
                else:
                    raise Violation(f"{job}: a rank does not end")
            outcomes.append(text.decode() or "killed")
    finally:
        for pid, _ in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return outcomes


def _fork(job: Job, rank: int, links: list[dict[int, socket.socket]], output: Path) -> tuple[int, int]:
    told, tell = os.pipe()
    pid = os.fork()
    if pid:
        os.close(tell)
        return pid, told
    try:
        for other, own in enumerate(links):
            if other != rank:
                for link in own.values():
                    link.close()
        os.write(tell, _publish(job, Sockets(rank, links[rank]), output).encode())
    finally:
        os._exit(0)


def _publish(job: Job, comm: Communicator, output: Path) -> str:
    left = [job.victims.get(comm.rank, 0)]

    def dying(function: Callable, halves: bool = False) -> Callable:
        def call(*arguments, **options):
            left[0] -= 1
            if left[0] == 0:
                if halves:  # it has written some of it
                    function(arguments[0], arguments[1][: len(arguments[1]) // 2], *arguments[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    patches = {name: dying(getattr(os, name)) for name in CALLS} | {"pwrite": dying(os.pwrite, halves=True)}
    gather = Sockets._all_gather
    with mock.patch.multiple(os, **patches), mock.patch.object(Sockets, "_all_gather", dying(gather)):
        if job.exchanged:
            live_model.RUN_BYTES, live_model.FEW_RUNS = 1 << 40, -1
            publishing.BATCH_BYTES = 16 << 10
        try:
            publish(job.state(comm.rank), output, comm, max_file_bytes=job.max_file_bytes, config={"layers": 2})
        except CheckpointError as error:
            return f"{type(error).__name__}: {error}"
    return "done"


def check(job: Job, root: Path) -> str:
    """Carry out a job, read what is there, and publish once more; return what was found.

    Raises:
        Violation: It is neither the whole model nor none, or the next call does not do what it should.
    """
    output = root / "out"
    outcomes = run(job, output)
    unexpected = [each for each in outcomes if not each.startswith(("done", "killed", "LostRankError", "CheckpointE"))]
    if unexpected:
        raise Violation(f"{job}: {outcomes}")
    there = _read(job, output)
    if not there and "done" in outcomes:
        raise Violation(f"{job}: a rank says that it is done, and there is no model: {outcomes}")
    used = output.exists() and bool(os.listdir(output))
    again = run(_unharmed(job), output)
    if used:
        expected = "is not empty. Remedy (FC405): give another output"
        if not all(each.startswith("ValidationError") and expected in each for each in again):
            raise Violation(f"{job}: publishing to what is not empty: {again}")
        if _read(job, output) != there:
            raise Violation(f"{job}: a call that was refused has changed what is there")
        shutil.rmtree(output)
        again = run(_unharmed(job), output)
    if set(again) != {"done"} or not _read(job, output):
        raise Violation(f"{job}: the next call: {again}")
    shutil.rmtree(output)
    killed = "killed" if "killed" in outcomes else "not killed"
    return f"{killed}, {'the model' if there else 'something' if used else 'nothing'}"


def _unharmed(job: Job) -> Job:
    return Job(job.ranks, {}, job.exchanged, job.max_file_bytes, job.single)


def _read(job: Job, output: Path) -> bool:
    """Return whether a reader finds the model; if it finds any, it is the whole."""
    names = os.listdir(output) if output.exists() else []
    marks = {"model.safetensors.index.json", "model.safetensors"} & set(names)
    try:
        with TensorReader(output) as reader:
            found = {name: reader.read(name) for name in reader.infos}
    except (ValidationError, CorruptCheckpointError) as error:
        # Hugging Face's libraries look for these two names; this library's readers for more.
        if marks:
            raise Violation(f"{job}: {sorted(names)}: {error}") from error
        return False
    if {name: value.tobytes() for name, value in found.items()} != {k: v.tobytes() for k, v in job.values.items()}:
        raise Violation(f"{job}: half a model: {sorted(names)}")
    if "model.safetensors.index.json" in marks:
        index = json.loads((output / "model.safetensors.index.json").read_text())
        if not set(index["weight_map"].values()) <= set(names):
            raise Violation(f"{job}: the index names what is not there")
    if "config.json" not in names:
        raise Violation(f"{job}: a model without its configuration")
    return True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=500, help="jobs (default %(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args(argv)
    found: Counter[str] = Counter()
    jobs = draw(options.seed, tuple(options.ranks))
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as root:
        for _ in range(options.count):
            found[check(next(jobs), Path(root))] += 1
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())

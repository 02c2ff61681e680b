"""Saves of which one process is killed or stopped at a random call: a trainer, or a writer.

    python -m tests.background.kills [--seed SEED] [--count COUNT]

Each rank is a process that saves over a checkpoint of version 1, with a writer of its own. After each job a
reader finds the old checkpoint or the new one, ranks that live agree, and the next save leaves nothing of this one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from paddle_flexckpt.background import BackgroundWriter, process
from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.foreign.paddle_metadata import PADDLE_METADATA
from paddle_flexckpt.live.saver import save_state_dict
from tests.background.helpers import PATIENCE_SECONDS, SOLO, await_end, load_shards, shards
from tests.crash.publishing import Sockets
from tests.saved import short_names

# About as many calls as each process makes of the package's functions, from where :func:`act_at` begins to count.
CALLS = {"trainer": 1100, "writer": 1300}
BEGINNINGS = {"trainer": "save_state_dict", "writer": "open_to_save"}
UNKNOWN = "it is not known what became of the save"


@dataclass(frozen=True)
class Job:
    """What happens: the ``victim``, of a kind of process of one rank, is killed or stopped at a call.

    ``mode`` is how the ranks save: ``async``, ``slices``, or ``sync``. ``killed`` is whether the victim is killed, or
    stopped until all others have come to their ends.
    """

    ranks: int
    coordinator: int
    victim: int
    kind: str
    at: int
    killed: bool
    mode: str = "async"


def draw(seed: int) -> Iterator[Job]:
    """Yield jobs for ever."""
    rng = random.Random(seed)
    while True:
        ranks = rng.choice((2, 4))
        mode = rng.choice(("async", "async", "slices", "sync"))
        kind = "trainer" if mode == "sync" else rng.choice(("trainer", "writer", "writer"))
        # A trainer that is stopped holds its job's collectives up: no matter of a save.
        killed = kind == "trainer" or rng.random() < 0.7
        # More of the early ones: the writer of a rank that does not commit makes a fifth of them.
        at = 1 + int(CALLS[kind] * rng.random() ** 2)
        yield Job(ranks, rng.randrange(ranks), rng.randrange(ranks), kind, at, killed, mode)


def act_at(kind: str, at: int, killed: bool) -> None:
    """Kill or stop this process at a call of the main thread."""
    count, number = [-1], signal.SIGKILL if killed else signal.SIGSTOP

    def called(frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or "paddle_flexckpt" not in frame.f_code.co_filename:
            return
        if count[0] < 0 and frame.f_code.co_name != BEGINNINGS[kind]:
            return
        count[0] += 1
        if count[0] == at:
            sys.setprofile(None)
            os.kill(os.getpid(), number)

    sys.setprofile(called)


def _train(job: Job, rank: int, links: list[dict[int, socket.socket]], path: str, told: socket.socket) -> None:
    """Save as one rank; tell the writer's process id, then the outcome; go when the harness says so."""
    is_victim = rank == job.victim
    if is_victim and job.kind == "writer":
        boot = f"""
sys.modules["paddle"] = None  # importing it takes a second
from tests.background.kills import act_at
act_at("writer", {job.at}, {job.killed})
"""
        process._BOOT = process._BOOT.replace("main(**options)", f"{boot}main(**options)")
    writer = BackgroundWriter(nice=0, timeout=PATIENCE_SECONDS if job.killed else 1.0)
    with writer.open_slot():
        told.sendall(f"{writer.pid}\n".encode())
    if is_victim and job.kind == "trainer":
        act_at("trainer", job.at, job.killed)
    try:
        options: dict[str, Any] = {"unique_id": 0, "coordinator_rank": job.coordinator}
        if job.mode != "sync":
            options.update(async_save=writer, slice_bytes=32 if job.mode == "slices" else None)
        handle = save_state_dict(shards(rank, job.ranks, 2), path, Sockets(rank, links[rank]), **options)
        if job.mode == "slices":
            handle.finish_staging()
        if job.mode != "sync":
            handle.result()
        text = "done"
    except CheckpointError as error:
        text = str(error)
    sys.setprofile(None)
    told.sendall(f"{text}\n".encode())
    told.recv(1)  # until all have told: a writer lives longer than its save
    with writer:
        pass


def _run(job: Job, path: str) -> list[str]:
    """Return how each rank's save ended: ``done``, the error, or ``killed``."""
    links: list[dict[int, socket.socket]] = [{} for _ in range(job.ranks)]
    for low in range(job.ranks):
        for high in range(low + 1, job.ranks):
            links[low][high], links[high][low] = socket.socketpair()
    pipes, pids, writers = [], [], []
    for rank in range(job.ranks):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if not pid:
            try:
                for each in (
                    ours,
                    *pipes,
                    *(link for own in links[:rank] + links[rank + 1 :] for link in own.values()),
                ):
                    each.close()
                _train(job, rank, links, path, theirs)
            finally:
                os._exit(0)
        theirs.close()
        ours.settimeout(PATIENCE_SECONDS)
        pipes.append(ours)
        pids.append(pid)
    for own in links:
        for link in own.values():
            link.close()
    streams = [pipe.makefile() for pipe in pipes]
    for stream in streams:
        writers.append(os.pidfd_open(int(stream.readline())))
    order = sorted(range(job.ranks), key=lambda rank: rank == job.victim)
    outcomes = dict.fromkeys(order, "")
    for rank in order:
        if rank == job.victim and not job.killed:
            signal.pidfd_send_signal(writers[rank], signal.SIGCONT)
        outcomes[rank] = streams[rank].readline().strip() or "killed"
    for pipe, stream in zip(pipes, streams):
        stream.close()
        pipe.close()
    for pid, writer in zip(pids, writers):
        os.waitpid(pid, 0)
        await_end(writer)
    return [outcomes[rank] for rank in range(job.ranks)]


def check(job: Job, path: Path) -> str:
    """Carry a job out; return what was found. An AssertionError tells what must not be."""
    save_state_dict(shards(0, 1, 1, rows=4 * job.ranks), path, SOLO)
    outcomes = _run(job, str(path))
    version = load_shards(path, job.ranks, 0)
    lived = [text for text in outcomes if text != "killed"]
    where = f"{job}: version {version}, {outcomes}"
    assert all(text.startswith(("done", "cannot save to")) for text in lived), where
    if "done" in lived:
        assert version == 2, where
    if version == 2 and job.mode != "sync":  # whoever does not say so does not know it
        assert all(text == "done" or UNKNOWN in text for text in lived), where
    if job.killed and job.mode != "sync":
        assert len({text == "done" for text in lived}) <= 1, where
        # Of a rank that dies before all have handed over, collectives tell one thing and writers another.
        assert job.kind == "trainer" or len(set(lived)) == 1, where
    save_state_dict(shards(0, 1, 3, rows=4 * job.ranks), path, SOLO)
    data = [f"{rank}_0-2.safetensors" for rank in range(job.ranks)] if version == 2 else ["0_0-1.safetensors"]
    left = [name for name in short_names(path) if not name.startswith("0_1-")]
    assert left == sorted([*data, "0.manifest", "1.manifest", PADDLE_METADATA]), f"{where}, left: {left}"
    assert load_shards(path, job.ranks) == 3, where
    return f"{job.mode}: {job.kind} {'killed' if job.killed else 'stopped'}, {'new' if version == 2 else 'old'}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200, help="jobs (default %(default)s)")
    options = parser.parse_args(arguments)
    found: Counter[str] = Counter()
    jobs = draw(options.seed)
    for _ in range(options.count):
        with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as path:
            found[check(next(jobs), Path(path))] += 1
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())

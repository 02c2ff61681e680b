"""Saves of which one process is killed or stopped at a random moment: a trainer, or a writer.

    python -m tests.background.kills [--seed SEED] [--first NUMBER] [--count COUNT] [--record]

Each rank is a process that saves over a checkpoint of version 1, with a writer of its own if the save is asynchronous.
The victim, of the rank that commits or of another, is killed or stopped at one of its calls, or right before or after
the commit. A stopped process goes on when all others have come to their ends, or after the next save. After each job a
reader finds the old checkpoint or the new one, ranks that live agree, and the next save leaves nothing that no manifest
names.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable
from itertools import islice
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np

from paddle_flexckpt.catalog import CheckpointError
from paddle_flexckpt.foreign.paddle_files import PADDLE_METADATA
from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.saving.saver import save_state_dict
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.background.helpers import SOLO, load_shards, shards
from tests.background.kill_jobs import Job, draw
from tests.background.killed_ranks import Trainer
from tests.campaigns import recording
from tests.ramdisk import memory_directory

UNKNOWN = "it is not known what became of the save"
# What ranks say of one that is stopped, and it of those that have ended meanwhile.
SILENT = (
    "take no part in an exchange between ranks",
    "takes no part in an exchange between ranks",
    "an exchange between ranks failed, though all of them are alive",
)
LATE = "has written nothing within"


def _state(pid: int) -> str:
    """Return the letter by which the system tells what a process does; ``X`` if it is not there."""
    try:
        return re.findall(r"\) (.)", Path(f"/proc/{pid}/stat").read_text(encoding="utf-8"))[-1]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def _strike(pid: int, is_killed: bool) -> None:
    """Kill or stop a process; return when it is dead or stopped."""
    os.kill(pid, signal.SIGKILL if is_killed else signal.SIGSTOP)
    while _state(pid) not in ("ZX" if is_killed else "TZX"):
        os.sched_yield()


def _guard(listener: socket.socket, pid: int, is_killed: bool) -> None:
    """Strike the victim when the process that commits asks for it; the end of the connection is the answer."""
    try:
        connection, _ = listener.accept()
    except OSError:  # shut down: nobody has come so far
        return
    with connection:
        _strike(pid, is_killed)


def _run(job: Job, path: Path, meanwhile: Callable[[], None]) -> tuple[list[str], bool]:
    """Return how each rank's save ended: ``done``, the error, or ``killed``; and whether the victim was struck.

    ``meanwhile`` is called when all others have come to their ends.
    """
    (path / "store").mkdir()
    gate = f"flexckpt-kills-{os.urandom(8).hex()}"
    trainers = [Trainer(job, rank, path, gate) for rank in range(job.ranks)]
    for trainer in trainers:
        trainer.hear_of_writer()
    victim = trainers[job.victim]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("\0" + gate)
        listener.listen()
        guard = threading.Thread(target=_guard, args=(listener, victim.pids[job.kind], job.is_killed))
        guard.start()
        for trainer in trainers:
            trainer.let_go_on()
        outcomes = {rank: trainer.hear() for rank, trainer in enumerate(trainers) if trainer is not victim}
        meanwhile()
        # It may come late to its moment.
        is_struck, pid = False, victim.pids[job.kind]
        while not job.is_killed and not wait([victim], 0.02):
            if _state(pid) == "T":
                is_struck = True
                os.kill(pid, signal.SIGCONT)
        outcomes[job.victim] = victim.hear()
        is_struck |= _state(pid) in "TZX"
        listener.shutdown(socket.SHUT_RDWR)
        guard.join()
    for trainer in trainers:
        trainer.let_go_on()
    for trainer in trainers:
        trainer.join()
    return [outcomes[rank] for rank in range(job.ranks)], is_struck


def _save(job: Job, path: Path, version: int, unique_id: int | None) -> None:
    """Save whole, without a victim."""
    if not job.on_nodes:
        save_state_dict(shards(0, 1, version, job.ranks * job.rows), job.place(path, 0), SOLO, unique_id=unique_id)
        return

    def save(comm: Communicator) -> None:
        state = shards(comm.position, job.ranks, version, job.rows)
        save_state_dict(state, job.place(path, comm.position), comm, unique_id=unique_id, **job.options)

    SimulatedWorld(job.ranks).run(save)


def _load(job: Job, path: Path, unique_id: int) -> int:
    """Return the version of a checkpoint, which is whole."""
    if not job.on_nodes:
        return load_shards(job.place(path, 0), job.ranks, unique_id, job.rows)

    def load(comm: Communicator) -> int:
        found = shards(comm.position, job.ranks, -77, job.rows)
        load_state_dict(found, job.place(path, comm.position), comm, unique_id=unique_id, storage="per_node")
        version = int(found["b"].local_tensor[0])
        for key, shard in shards(comm.position, job.ranks, version, job.rows).items():
            assert np.array_equal(found[key].local_tensor, shard.local_tensor), f"{key!r} is a mixture"
        return version

    (version,) = set(SimulatedWorld(job.ranks).run(load))
    return version


def _nameless(job: Job, path: Path) -> list[str]:
    """Return the files that no manifest names."""
    left = []
    for rank, place in enumerate([job.place(path, rank) for rank in range(job.ranks if job.on_nodes else 1)]):
        directory, known = CheckpointDirectory(place), {PADDLE_METADATA}
        for unique_id in directory.list_ids():
            manifest = directory.read_committed(unique_id)
            own = [files for node, files in manifest.nodes.items() if node.startswith(f"{rank} (")]
            known |= {f"{unique_id}.manifest", *(own[0] if job.on_nodes else manifest.files)}
        assert known - {PADDLE_METADATA} <= set(os.listdir(place)), "a file of a manifest is missing"
        left += [f"{place.name}/{name}" for name in set(os.listdir(place)) - known]
    return left


def check(job: Job, path: Path) -> str:
    """Carry a job out; return what was found. An AssertionError tells what must not be."""
    versions: list[int] = []
    next_id = 0 if job.is_same_id else None

    def save_next() -> None:
        versions.append(_load(job, path, 0))
        while True:
            try:
                return _save(job, path, 3, next_id)
            except CheckpointError as error:
                if not job.is_late or "another save is writing" not in str(error):  # a writer waits for the victim's
                    raise

    _save(job, path, 1, None)
    outcomes: list[str] = []
    try:
        outcomes, is_struck = _run(job, path, save_next if job.is_late else lambda: None)
        if not job.is_late:
            save_next()
        (version,) = versions
        assert version in (1, 2), f"version {version}"
        _check_outcomes(job, version, outcomes, is_struck)
        if job.is_late and job.is_same_id:
            # A rank that comes late to an id that was saved again leaves its file: it may be of a checkpoint that is
            # read still. The next save of the id removes it.
            assert all(re.match(rf"all/{job.victim}_0-00000002", name) for name in _nameless(job, path)), "other files"
            _save(job, path, 3, 0)
        left = _nameless(job, path)
        assert not left, f"what no manifest names: {left}"
        assert _load(job, path, 0 if job.is_same_id else 1) == 3, "the next save is not there"
        assert job.is_same_id or _load(job, path, 0) == version, "the next save has changed this one"
    except (AssertionError, CheckpointError) as error:
        raise AssertionError(f"{error}\n{job}: {outcomes}") from error
    role = "commits" if job.victim == job.coordinator else "other"
    how = "killed" if job.is_killed else "stopped"
    found = ("new" if version == 2 else "old") if is_struck else "not struck"
    return f"{job.mode}, {job.kind}, {role}, {how}, {job.moment}: {found}"


def _check_outcomes(job: Job, version: int, outcomes: list[str], is_struck: bool) -> None:
    """Check what the ranks that live were told: where a process was killed, the same."""
    lived = [text for text in outcomes if text != "killed"]
    failures = {text for text in lived if text != "done"}
    assert all(text.startswith("cannot save to") for text in failures), "an error does not say what failed"
    assert version == 2 or "done" not in lived, "what was reported done is not there"
    if version == 2 and job.is_async:  # no exchange can fail after the commit, but a writer may not know of it
        assert all(UNKNOWN in text for text in failures), "an error says that a save failed which is there"
    if not job.is_killed:
        # Each rank says what it saw. The writers say one thing, or that they do not know.
        written = {text for text in failures if LATE in text}
        forms = (*SILENT, UNKNOWN, LATE) if job.is_async else SILENT
        assert all(any(form in text for form in forms) for text in failures), "an error of another kind"
        assert len(written) <= 1, "more than one text"
        assert not written or (version == 1 and "done" not in lived), "done, and not done"
        return
    assert is_struck or failures == set(), "a save failed without a reason"
    if job.kind == "writer":
        assert len(set(lived)) == 1, "more than one text"
        return
    lost = {text for text in failures if f"rank {job.victim} is lost: it has gone" in text}
    if job.is_async:
        # Of a trainer that dies before all have handed over, the ranks tell one thing and the writers another.
        forms = ["its processes have ended before"] + ["a save was not handed over to its end"] * (job.mode == "waves")
        # A rank that has lost the victim while it hands over waves ends its own part too.
        form = re.compile(rf"\[ranks? ([\d, -]+)\] (?:{'|'.join(forms)})")
        ended = {text for text in failures if any(job.victim in numbers(each) for each in form.findall(text))}
        # If it is the coordinator's, its writer goes with it, and the other writers cannot know.
        unknown = {text for text in failures if UNKNOWN in text and job.victim == job.coordinator}
        assert failures == lost | ended | unknown, "an error of another kind"
        assert max(map(len, (lost, ended, unknown))) <= 1, "more than one text"
        assert len({text == "done" for text in lived}) == 1, "done, and not done"
        return
    # One who dies in an exchange may have told some of the others, which go on to the next: it says less of nodes.
    if job.on_nodes:
        lost = {text.replace(": some nodes may have published the checkpoint, others could not", "") for text in lost}
    assert len(lost) <= 1 and (failures == lost or job.on_nodes), "more than one text"


def numbers(ranks: str) -> set[int]:
    """The ranks of a text such as ``0-2, 5``."""
    ends = [list(map(int, each.split("-"))) for each in ranks.split(", ")]
    return {rank for each in ends for rank in range(each[0], each[-1] + 1)}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first job (default %(default)s)")
    parser.add_argument("--count", type=int, default=200, help="jobs (default %(default)s)")
    parser.add_argument("--record", action="store_true", help="add the totals to tests/campaigns.json")
    options = parser.parse_args(arguments)
    logging.getLogger("paddle_flexckpt").setLevel(logging.ERROR)
    found: Counter[str] = Counter()
    jobs = islice(draw(options.seed), options.first, options.first + options.count)
    with recording("tests.background.kills", options.record):
        for number, job in enumerate(jobs, options.first):
            with memory_directory() as path:
                try:
                    found[check(job, path)] += 1
                except AssertionError as error:
                    found["violations"] += 1
                    print(f"job {number}: {error}", file=sys.stderr)
        print(json.dumps(dict(sorted(found.items())), indent=1))
    return 1 if found["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())

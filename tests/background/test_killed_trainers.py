"""Training processes that are killed: what was handed over is committed whole, or it is not there."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paddle_flexckpt.media.opening import open_backend
from paddle_flexckpt.native.directory import CheckpointDirectory
from paddle_flexckpt.saving.saver import save_state_dict
from tests.background.helpers import SOLO, await_end, load_shards, shards
from tests.saved import short_names

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
sys.modules["paddle"] = None  # importing it takes a second
from tests.background.trainer_script import main
main(*eval(sys.argv[1]))
"""
pytestmark = pytest.mark.multiprocess


class Trainer:
    """One rank, in a process of its own, and its writer."""

    def __init__(self, path, position, connection, when, timeout=60):
        descriptor = -1 if connection is None else connection.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, repr((str(path), position, descriptor, when, timeout))],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            pass_fds=() if connection is None else (descriptor,),
        )  # fmt: skip
        self.writer = int(self._process.stdout.readline())
        self._pidfd = os.pidfd_open(self.writer)

    def run(self):
        """Lets it save and die."""
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def await_death(self):
        self._process.communicate(timeout=300)
        assert self._process.returncode == -signal.SIGKILL

    def let_the_writer_go_on(self):
        os.kill(self.writer, signal.SIGCONT)

    def await_the_writer(self):
        await_end(self._pidfd)


def run_and_kill(path, deaths):
    """Ranks that die before or after they have handed their share over; then their writers come to their ends."""
    ends = [None] if len(deaths) == 1 else list(socket.socketpair())
    # That a rank has died is noticed: nobody waits for it so long.
    trainers = [Trainer(path, position, end, when, 1000) for position, (end, when) in enumerate(zip(ends, deaths))]
    for end in filter(None, ends):
        end.close()
    for trainer in trainers:
        trainer.run()
    for trainer in trainers:
        trainer.await_death()
    for trainer in trainers:
        trainer.let_the_writer_go_on()
    for trainer in trainers:
        trainer.await_the_writer()


def prepare(path, size):
    """A checkpoint of as many ranks, of version 1."""
    whole = shards(0, 1, 1, rows=4 * size)
    save_state_dict(whole, path, SOLO)
    assert load_shards(path, size) == 1
    return set(os.listdir(path))


@pytest.mark.parametrize("deaths", [["after"], ["after", "after"]])
def test_what_all_ranks_have_handed_over_is_committed(tmp_path, deaths):
    prepare(tmp_path, len(deaths))
    run_and_kill(tmp_path, deaths)
    assert CheckpointDirectory(tmp_path).list_ids() == [0, 1]
    assert load_shards(tmp_path, len(deaths), 1) == 2
    assert not [name for name in os.listdir(tmp_path) if name.endswith((".saving", ".tmp"))]
    open_backend(tmp_path).locks.take().release()


@pytest.mark.parametrize("deaths", [["before"], ["before", "before"], ["after", "before"], ["before", "after"]])
def test_what_a_rank_has_not_handed_over_is_not_there_and_goes_with_the_next_save(tmp_path, deaths):
    size = len(deaths)
    before = prepare(tmp_path, size)
    run_and_kill(tmp_path, deaths)
    assert CheckpointDirectory(tmp_path).list_ids() == [0]
    assert load_shards(tmp_path, size) == 1
    assert "1-2.saving" in short_names(tmp_path)
    save_state_dict(shards(0, 1, 3, rows=4 * size), tmp_path, SOLO)
    assert short_names({*os.listdir(tmp_path)} - before) == ["0_2-3.safetensors", "2.manifest"]
    assert load_shards(tmp_path, size) == 3


def test_the_writer_keeps_nothing_of_its_trainer_open(tmp_path):
    """Whoever reads a trainer's output to its end does not wait for the writer."""
    trainer = Trainer(tmp_path, 0, None, "after")
    trainer.run()
    # communicate() returns when all holders of the pipe are gone; the writer is stopped and cannot be one of them.
    trainer.await_death()
    trainer.let_the_writer_go_on()
    trainer.await_the_writer()
    assert load_shards(tmp_path, 1) == 2

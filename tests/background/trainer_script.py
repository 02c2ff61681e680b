"""A rank of a job that is killed around an asynchronous save: run by test_killed_trainers in processes of their own."""

from __future__ import annotations

import os
import signal
import socket
import sys

from paddle_flexckpt.background.pending import SaveSlot
from paddle_flexckpt.background.writer import BackgroundWriter
from paddle_flexckpt.saving.saver import save_state_dict
from tests.background.helpers import SOLO, PairCommunicator, shards


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(path: str, position: int, descriptor: int, when: str, timeout: float) -> None:
    """Saves and dies.

    Args:
        path: The directory.
        position: The rank.
        descriptor: Of a socket to the other rank; -1: there is none.
        when: ``"before"`` or ``"after"`` the save is handed over.
        timeout: Seconds that the ranks' writers wait for each other.
    """
    comm = SOLO if descriptor < 0 else PairCommunicator(position, socket.socket(fileno=descriptor))
    writer = BackgroundWriter(timeout=timeout)
    with writer.open_slot():
        print(writer.pid, flush=True)
    sys.stdin.readline()
    # Whatever is saved is saved after this process is dead.
    os.kill(writer.pid, signal.SIGSTOP)
    if when == "before":
        SaveSlot.hand_over = die
    save_state_dict(shards(position, comm.size, 2), path, comm, async_save=writer)
    die()

"""Moments of a save at which a process is killed or stopped. A writer imports this, so it imports no Paddle.

A process strikes itself at one of its calls of the package's functions. Right before and right after the commit, the
process that commits asks the harness to strike the victim, and goes on when that is done.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from types import FrameType
from typing import Any

# From the first call of a save to its end. A writer makes another save before, so that it has imported everything.
BEGINNINGS = {"trainer": ("save_state_dict", 1), "writer": ("open_to_save", 2)}


class Count:
    """The number of calls that the main thread has made of the package's functions since the save began.

    Attributes:
        calls: The number; negative before the beginning.
    """

    def __init__(self, kind: str, at: int = 0, is_killed: bool = True) -> None:
        """Count from now on; strike this process at call ``at``, if there is one."""
        self.calls = -1
        self._at, self._number = at, signal.SIGKILL if is_killed else signal.SIGSTOP
        self._beginning, self._missing = BEGINNINGS[kind]
        self._is_over = False
        sys.setprofile(self._called)

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return") or "paddle_flexckpt" not in frame.f_code.co_filename:
            return
        name = frame.f_code.co_name
        if event == "return":
            # A writer's save ends when the trainer has been told of the outcome, if it is there to be told.
            self._is_over |= self.calls >= 0 and name == "save_together"
            if self._is_over and name == "_send":
                self.end()
            return
        if self.calls < 0 and name == self._beginning:
            self._missing -= 1
        if self._missing:
            return
        self.calls += 1
        if self.calls == self._at > 0:
            sys.setprofile(None)
            os.kill(os.getpid(), self._number)

    def end(self) -> None:
        """Count no more."""
        sys.setprofile(None)


def tell_commit(moment: str, gate: str) -> None:
    """Have this process tell the harness of a moment, before or after its commit of id 0, and await the answer."""
    rename = os.rename

    def renamed(source: Any, target: Any, **options: Any) -> None:
        is_commit = os.path.basename(os.fspath(target)) == "0.manifest"
        if is_commit and moment == "before":
            _ask(gate)
        rename(source, target, **options)
        if is_commit and moment == "after":
            _ask(gate)

    os.rename = renamed


def _ask(gate: str) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect("\0" + gate)
        connection.recv(1)

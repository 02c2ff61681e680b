"""Runs: which run saves to a root, by one start at a time, and which of the steps there are another's.

Tested in tests/manager/test_runs.py.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from paddle_flexckpt.catalog import CheckpointError, Problem, ValidationError
from paddle_flexckpt.catalog.errors import TakenError
from paddle_flexckpt.media.backend import Backend, SaveLock, write_file
from paddle_flexckpt.media.lease import TIMES_OF_A_RUN

logger = logging.getLogger("paddle_flexckpt")

# The steps of another run that an error names.
_MOST_NAMED = 100
# The record of the process that holds a root.
OWNER = ".owner"
_PROCESS = secrets.token_hex(8)  # of it and its forks

# By step, the identity of the run that saved it; None if no manager saved it. Damaged steps are left out.
Identities = Mapping[int, "str | None"]


class RunLock:
    """The save lock of a root, which one start of a run holds from its first decision to its end.

    A start is a process: an earlier manager of this process, which nobody may have closed, keeps no other one away.
    """

    def __init__(self, root: Backend) -> None:
        """Take the root directory; hold nothing yet."""
        self._root = root
        self._lock: SaveLock | None = None

    @property
    def is_a_mate_s(self) -> bool:
        """Return whether another manager of this process holds the lock."""
        return self._lock is None

    def hold(self) -> bool:
        """Take the lock, or make sure that it is still held: then return False. TakenError if a live start has it."""
        locks = self._root.locks
        if self._lock is not None:
            with contextlib.suppress(CheckpointError):  # another start may have it by now
                locks.ensure_held()
                if locks.is_here():
                    return False
            self.release()
        self._root.make_directory()
        own = {"process": _PROCESS, "host": socket.gethostname(), "pid": os.getpid()}
        if own.items() <= self._owner().items():
            return True
        try:
            self._lock = locks.take(TIMES_OF_A_RUN)
        except TakenError:
            owner = {"host": "another host", "pid": "?", "since": "?", **self._owner()}
            raise TakenError(
                f"{self._root.path} is the root of a run that goes on: process {owner['pid']} on {owner['host']} has "
                f"held it since {owner['since']}. Remedy (FC903): end one of the two; or give this run another "
                "directory"
            ) from None
        owner = {**own, "since": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(time.time()))}
        write_file(self._root, OWNER, json.dumps(owner).encode())
        return True

    def _owner(self) -> dict[str, Any]:
        """Return what the last process that took the lock has written."""
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
            return dict(json.loads(self._root.read(OWNER)))
        return {}

    def release(self) -> None:
        """Give the lock back, if it is held."""
        lock, self._lock = self._lock, None
        if lock is not None:
            with contextlib.suppress(OSError, CheckpointError):  # it is not this start's any more, or does no harm
                self._root.locks.ensure_held()
                self._root.remove(OWNER)
            lock.release()


def identify_run(
    path: str,
    steps: Collection[int],
    known: Identities,
    step: int,
    restored: int | Literal["latest", "best"] | None,
    run: str,
    seen: Collection[int],
) -> str:
    """Return the identity of the run that saves ``step`` first; ValidationError if ``steps`` has another's.

    It is ``run`` (known if the step ``restored`` was in memory), or that of the step ``restored``, or of the highest
    step that has one if that is ``"latest"``, damaged or gone; else a new one. Without a restore no step is its own.
    Steps of others below ``step`` do no harm to a run that has restored, and may be what it began from. It has ``seen``
    those that were there when it restored, and those that it has saved: all others are another start's.
    """
    if restored is None:
        others, run = [*steps], secrets.token_hex(8)
    else:
        named = [its for each, its in known.items() if its is not None]
        its = known[restored] if isinstance(restored, int) and restored in known else [None, *named][-1]
        run = run or (secrets.token_hex(8) if its is None else its)
        foreign = {each for each, its in known.items() if its != run and each != restored and each >= step}
        others = [each for each in known if each in foreign or each not in seen]
    if others:
        is_start = restored is not None and not foreign
        whose = "another start, which this one has" if is_start else "another run, which this run has"
        listed = ", ".join(map(str, others[:_MOST_NAMED]))
        if len(others) > _MOST_NAMED:
            names = ", ".join(sorted({known.get(each) or "-" for each in others}))
            listed += f", ... {others[-1]} (all that flexckpt ls shows as of run {names})"
        raise ValidationError(
            Problem(
                f"{path} has steps of {whose} not restored: {listed}. A root is for one run",
                code="FC903",
                remedy="to keep this state, give this run another directory, or move all of those steps to another "
                "directory; to go on from one of those steps instead of this state, call restore() before the training",
            )
        )
    return run


def of_one_run(path: str, order: Sequence[int], known: Identities) -> list[int]:
    """Return the steps of a fall-back's order that are of the run of the first one.

    If that does not tell its run, it is the run of all others that have one; where these are of several, none of them
    is taken.
    """
    runs = {*known.values()} - {None} or {*known.values()}
    run = known[order[0]] if order and order[0] in known else next(iter(runs)) if len(runs) == 1 else ""
    taken = [step for step in order if known.get(step, run) == run or step == order[0]]
    if len(taken) < len(order):
        passed = ", ".join(str(step) for step in order if step not in taken)
        logger.warning(f"a fall-back from step {order[0]} in {path} passes over steps of other runs: {passed}")
    return taken

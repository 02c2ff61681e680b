"""The room for steps in the memory of nodes: what they need there, and what there is.

Tested in tests/manager/test_memory_tier.py.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paddle_flexckpt.catalog import Problem, ValidationError
from paddle_flexckpt.catalog.texts import format_bytes
from paddle_flexckpt.manager.memory_tier import MemoryTier, stored_by
from paddle_flexckpt.media.local import LocalBackend
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.saving.planned_bytes import plan_bytes
from paddle_flexckpt.tools.memory_runs import bytes_in


@dataclass(frozen=True)
class MemoryRoom:
    """The room that a tier's steps need on each node.

    Attributes:
        tier: The tier.
        read: The most steps that saves to the root in the background may still read there when these are removed.
    """

    tier: MemoryTier
    read: int = 0

    def check(
        self, describe: Callable[[], Mapping[str, Any]], run_directory: str, comm: Communicator, context: str
    ) -> None:
        """Check that the steps have room, and a directory that can be written to. Two collectives; five in a large job.

        Bytes of the run that are there already, in ``run_directory``, count as free; "" if there are none.

        Raises:
            ValidationError: There is too little, or no such directory, on a node; the same on every rank.
        """
        written, path = plan_bytes(describe, comm, context), self.tier.path

        def look() -> tuple[None, bytes]:
            LocalBackend(str(path)).check_writable()
            system = os.statvfs(_existing(path))
            taken = bytes_in(run_directory) if run_directory else 0
            mine = written, self.tier.limit, system.f_bavail * system.f_frsize, taken
            return None, json.dumps([node_of(path), f"{socket.gethostname()}:{path}", *mine]).encode()

        _, answers = comm.together(look, context)
        told = [json.loads(answer) for answer in answers]
        first = {each[0]: each for each in reversed(told)}
        shares = dict.fromkeys((each[0] for each in told), 0)
        for node, _, nbytes, *_ in told:
            shares[node] += nbytes
        problems: list[Problem] = []
        for number, node in enumerate(shares):
            _, name, _, limit, free, taken = first[node]
            problems += self._problem(name, stored_by(self.tier, [*shares.values()], number), limit, free + taken)
        if problems:
            raise ValidationError(problems, context)

    def _problem(self, name: str, nbytes: int, limit: int | None, free: int) -> list[Problem]:
        """Return what is wrong with a node's room for steps of so many bytes."""
        tier, steps = self.tier, self.tier.keep + 1 + self.read
        if steps * nbytes <= min(free, free if limit is None else limit):
            return []
        bound = "no limit" if limit is None else f"a limit of {format_bytes(limit)}"
        which = f"keep={tier.keep}" + (f", {self.read} that background saves to the root read" if self.read else "")
        protection = f"parity={tier.parity}" if tier.parity else f"copies={tier.copies}"
        return [
            Problem(
                f"the node {name} has too little room for steps in memory",
                expected=f"{format_bytes(steps * nbytes)}: {steps} steps ({which}, and the one that is being saved) of "
                f"{format_bytes(nbytes)}, with {protection}",
                got=f"{bound}, {format_bytes(free)} free",
                code="FC507",
                remedy="raise the limit, or the size of the file system (mount -o remount,size=...); or lower copies; "
                "`flexckpt clean` finds the memory of earlier runs",
            )
        ]


def _existing(path: str | os.PathLike[str]) -> str:
    """Return a directory, or the lowest above it that exists."""
    found = os.path.realpath(path)
    while not os.path.isdir(found):
        found = os.path.dirname(found)
    return found


def node_of(path: str | os.PathLike[str]) -> str:
    """Return a text that is the same for two processes only if this is the same directory for both."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            host = file.read().strip()
    except OSError:
        host = socket.gethostname()
    return f"{host}:{os.stat(_existing(path)).st_dev}:{os.path.realpath(path)}"

"""A person who copies, moves, deletes, restores and damages directories of checkpoints, as no program would.

Tested in tests/simulation/test_cluster.py.
"""

from __future__ import annotations

import contextlib
from typing import Any

from tests.simulated.memory import MemoryLedger
from tests.simulated.world import ROOT


class Person:
    """Act on the directories of steps, past all locks. The ledger expects nothing of these any more."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._backups: dict[str, dict[str, bytes]] = {}
        self._count = 0

    def act(self, what: str, number: int) -> None:
        """Do one of "copies", "moves", "deletes", "restores", "damages" with one directory, as far as storage lets."""
        with contextlib.suppress(OSError):
            self._act(what, number)

    def _act(self, what: str, number: int) -> None:
        world, ledger = self._cluster.world, self._cluster.ledger
        if what == "restores" and self._backups:
            directory = sorted(self._backups)[number % len(self._backups)]
            if directory not in world.directories():
                ledger.disturb(directory)
                world.put_tree(directory, self._backups[directory])
            return
        directories = world.directories()
        if not directories:
            return
        directory = directories[number % len(directories)]
        tree = world.tree(directory)
        if what in ("copies", "restores"):
            self._backups[directory] = tree
            world.put_tree(f"{directory}{self._suffix('copy')}", tree)
            return
        self._backups.setdefault(directory, tree)
        ledger.disturb(directory)
        if what == "damages":
            files = sorted(name for name in tree if name.endswith(".safetensors"))
            for name in files[number % max(len(files), 1) :][:1]:
                world.remove_file(directory, name)
            return
        if what == "moves":
            world.put_tree(f"{directory}{self._suffix('moved')}", tree)
        world.remove_tree(directory)

    def begin_anew(self) -> None:
        """End all that runs and remove all that is on storage, for another run in its place."""
        world, ledger = self._cluster.world, self._cluster.ledger
        if not isinstance(ledger, MemoryLedger):
            return
        for process in self._cluster.left():
            process.kill()
        ledger.begin_anew()
        for directory in world.directories():
            world.remove_tree(directory)
        for name in world.names(ROOT):
            world.remove_file(ROOT, name)

    def _suffix(self, what: str) -> str:
        self._count += 1
        return f" {what} {self._count}"

    def knows(self, name: str) -> bool:
        """Tell whether a file or directory of the root is the person's."""
        return " copy " in name or " moved " in name

    made = knows

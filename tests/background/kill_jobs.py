"""Jobs of :mod:`tests.background.kills`: how ranks save, and which process is killed or stopped at which moment."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.background.helpers import PATIENCE_SECONDS

MIB = 1 << 20
# About as many calls as a process makes in a save of 2 ranks and of 4: of the rank that commits, and of another.
CALLS = {
    ("sync", "trainer"): {2: (2350, 950), 4: (3500, 1000)},
    ("async", "trainer"): {2: (980, 890), 4: (1020, 940)},
    ("async", "writer"): {2: (1670, 290), 4: (2910, 310)},
    ("slices", "trainer"): {2: (1150, 1050), 4: (1180, 1110)},
    ("slices", "writer"): {2: (1670, 290), 4: (2930, 310)},
    ("waves", "trainer"): {2: (1010, 920), 4: (1050, 970)},
    ("waves", "writer"): {2: (1790, 400), 4: (2990, 420)},
    ("nodes", "trainer"): {2: (4900, 4900), 4: (6250, 6300)},
    ("copies", "trainer"): {2: (5300, 5300), 4: (7000, 7000)},
}
MODES = ("sync", "async", "slices", "waves", "nodes", "copies")
# The others wait so long for a process that is stopped.
STOPPED_SECONDS = 1.0


@dataclass(frozen=True)
class Job:
    """What happens: the ``victim``, a process of one rank, is killed, or stopped until all others have ended.

    Attributes:
        ranks: How many.
        mode: How they save: ``sync``, ``async``, in ``slices`` or ``waves``; to ``nodes``, and there with ``copies``.
        coordinator: The rank that commits; where all do, the one whose commit ``moment`` is about.
        victim: The rank of the victim.
        kind: Which of its processes is the victim: ``trainer`` or ``writer``.
        moment: At a ``call`` of the victim, or right ``before`` or ``after`` the commit.
        at: The number of the call.
        is_killed: Whether the victim is killed.
        is_same_id: Whether the next save has the id of this one.
        is_late: Whether a victim that is stopped goes on only after the next save.
    """

    ranks: int
    mode: str
    coordinator: int
    victim: int
    kind: str
    moment: str
    at: int
    is_killed: bool
    is_same_id: bool
    is_late: bool

    @property
    def is_async(self) -> bool:
        """Whether writers save."""
        return self.mode in ("async", "slices", "waves")

    @property
    def on_nodes(self) -> bool:
        """Whether each rank has a directory of its own."""
        return self.mode in ("nodes", "copies")

    @property
    def rows(self) -> int:
        """A rank's rows of 20 bytes: more than a slice, and in waves more than there is memory for."""
        return {"waves": 6 * MIB // 20, "slices": 600}.get(self.mode, 4)

    @property
    def options(self) -> dict[str, Any]:
        """The options of the save."""
        return {
            "slices": {"slice_bytes": 4096},
            "waves": {"staging_bytes": 4 * MIB},
            "nodes": {"storage": "per_node"},
            "copies": {"storage": "per_node", "node_copies": 2},
        }.get(self.mode, {})

    def place(self, path: Path, rank: int) -> Path:
        """Return the directory of a rank."""
        return path / (f"node{rank}" if self.on_nodes else "all")

    @property
    def patience(self) -> float:
        """Seconds that processes wait for each other."""
        return PATIENCE_SECONDS if self.is_killed else STOPPED_SECONDS


def draw(seed: int) -> Iterator[Job]:
    """Yield jobs for ever."""
    rng = random.Random(seed)
    while True:
        ranks, mode = rng.choice((2, 4)), rng.choice(MODES)
        coordinator = rng.randrange(ranks)
        # One of two victims is of the rank that commits.
        victim = rng.choice((coordinator, rng.choice([rank for rank in range(ranks) if rank != coordinator])))
        kind = "trainer" if (mode, "writer") not in CALLS else rng.choice(("trainer", "writer"))
        moment = rng.choice(("call", "call", "before", "after"))
        at = rng.randint(1, CALLS[mode, kind][ranks][victim != coordinator])
        is_killed = rng.random() < 0.6
        # Where the victim has the right to save, the next save waits for it.
        is_late = not is_killed and victim != coordinator and mode not in ("nodes", "copies") and rng.random() < 0.6
        yield Job(ranks, mode, coordinator, victim, kind, moment, at, is_killed, rng.random() < 0.7, is_late)

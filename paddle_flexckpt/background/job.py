"""Jobs: all that a writer has to know about one rank's part of one save."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any

from paddle_flexckpt.catalog import Catalog
from paddle_flexckpt.catalog.wire import decode_catalog, encode_catalog, join, split
from paddle_flexckpt.native.save_names import SaveNames


@dataclass(frozen=True, eq=False)
class WriteJob:
    """One rank's part of one save.

    Attributes:
        path: The checkpoint's directory, as the user gave it.
        storage: What opens it in another process.
        lock: What the coordinator's writer needs, beside a descriptor, to take the lock over; None on other ranks.
        ticket: What the save calls its files.
        items: This rank's rows of the write plan, in the order of their byte offsets.
        rank: This rank.
        ranks: All ranks of the save.
        coordinator: The one of them that commits.
        step: Training step, if known.
        timeout: Seconds to wait for the other ranks.
        presences: For each of ``ranks`` the addresses at which its processes answer; empty where there are none.
    """

    path: str
    storage: dict[str, Any]
    lock: dict[str, Any] | None
    ticket: SaveNames
    items: Catalog
    rank: int
    ranks: tuple[int, ...]
    coordinator: int
    step: int | None
    timeout: float
    presences: tuple[tuple[str, ...], ...] = ()

    @property
    def context(self) -> str:
        """What is being done, for errors."""
        return f"cannot save to {self.path!r}"

    @property
    def place(self) -> str:
        """The directory, the same for every way to write its path."""
        return place_of(self.path)

    @property
    def data_bytes(self) -> int:
        """Bytes of the items."""
        return int(self.items.byte_length.sum())

    @property
    def is_coordinator(self) -> bool:
        """Whether this rank commits."""
        return self.rank == self.coordinator

    def encode(self) -> bytes:
        """As bytes, for the writer."""
        head = {
            "path": self.path,
            "storage": self.storage,
            "lock": self.lock,
            "ticket": asdict(self.ticket),
            "rank": self.rank,
            "ranks": self.ranks,
            "coordinator": self.coordinator,
            "step": self.step,
            "timeout": self.timeout,
            "presences": self.presences,
        }
        return join((json.dumps(head).encode(), encode_catalog(self.items)))

    @classmethod
    def decode(cls, data: bytes) -> WriteJob:
        """The job that :meth:`encode` made the bytes of."""
        text, items = split(data)
        head = json.loads(text)
        head["ticket"] = SaveNames(**head["ticket"])
        head["ranks"] = tuple(head["ranks"])
        head["presences"] = tuple(map(tuple, head["presences"]))
        return cls(items=decode_catalog(items), **head)


def place_of(path: str) -> str:
    """A directory, the same for every way to write its path."""
    return path.rstrip("/") if "://" in path else os.path.realpath(path)

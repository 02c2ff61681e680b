"""Models whose tensors publishing writes: their sources, and the parts that ranks write from their own memory.

Tested in tests/load/test_publishing.py.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from paddle_flexckpt.algebra import BoxMaps
from paddle_flexckpt.catalog import Catalog
from paddle_flexckpt.load.owned_pieces import OwnedPieces, find_owned_pieces, no_pieces
from paddle_flexckpt.load.peers import ReshardOptions
from paddle_flexckpt.load.resharder import GatheredState
from paddle_flexckpt.memory.device_memory import devices_of, wait_for_devices
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.transfer.copies import AnyStorage
from paddle_flexckpt.transfer.targets import Targets


class ModelState(ABC):
    """The source of a model's tensors: by default one that is in no rank's memory, and has nothing to compare.

    Attributes:
        catalog: The shards of all sources.
        said: What ranks told each other when it was described.
        is_compared: Whether replicas have been compared already; the same on every rank.
    """

    catalog: Catalog
    said: list[tuple[bytes, ...]]
    is_compared = True

    def describe(self) -> tuple[bytes, ...]:
        """Return the message by which the other ranks compare it."""
        return ()

    def compare(self, *answers: Sequence[bytes]) -> None:  # noqa: B027
        """Compare what :meth:`describe` returned on every rank, by field; errors are the same on every rank."""

    def owned_pieces(self, targets: Catalog, maps: BoxMaps | None, machine: np.ndarray) -> OwnedPieces:
        """Return the pieces that ranks write from their own memory, as of :func:`find_owned_pieces`."""
        return no_pieces(targets)

    def storage(self, row: int) -> AnyStorage:
        """Return this rank's memory of a row of the catalog."""
        raise RuntimeError("tensors in files are in no rank's memory")

    @abstractmethod
    def fill(self, describe: Callable[[], Targets]) -> int:
        """Fill targets of all ranks; return the bytes that this rank lacked. Errors are the same on every rank."""


class LiveModel(ModelState):
    """A model's tensors in the memory of all ranks."""

    def __init__(
        self,
        comm: Communicator,
        describe: Callable[[], Mapping[str, Any]],
        said: Callable[[], tuple[bytes, ...]],
        context: str,
        options: ReshardOptions,
    ) -> None:
        """Describe the model on all ranks. One collective; arguments and errors as of :class:`GatheredState`."""
        self._rank, self._options = comm.rank, options
        self._state = GatheredState(comm, describe, said, context)
        self.is_compared = not (self._state.checked.groups.count > 1).any()
        self._peers = self._state.peers(options, self._state.checked if self.is_compared else None)
        wait_for_devices(devices_of(self._peers.owned.values()))
        self.catalog, self.said = self._state.catalog, self._state.said
        self._storage = functools.cache(self._peers.storage)

    def describe(self) -> tuple[bytes, ...]:
        """Return the digests of this rank's replicas, and how they are to be compared."""
        return self._peers.describe_replicas()

    def compare(self, *answers: Sequence[bytes]) -> None:
        """Compare the replicas; errors as of :meth:`MemoryPeers.compare_replicas`."""
        self._peers.compare_replicas(*answers)

    def storage(self, row: int) -> AnyStorage:
        """Implement :meth:`ModelState.storage`."""
        return self._storage(row)

    def owned_pieces(self, targets: Catalog, maps: BoxMaps | None, machine: np.ndarray) -> OwnedPieces:
        """Implement :meth:`ModelState.owned_pieces`."""
        return find_owned_pieces(self._peers.matcher(), targets, maps, machine, self._rank)

    def fill(self, describe: Callable[[], Targets]) -> int:
        """Implement :meth:`ModelState.fill`."""
        return self._state.fill(describe, self._options, "publish", self._peers.readable).bytes_received

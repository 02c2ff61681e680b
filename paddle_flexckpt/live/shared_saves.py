"""Saves to a directory that all ranks share: written by the ranks themselves, or by their background writers.

Tested in tests/distributed/test_save_load.py and tests/background/test_ranks.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from paddle_flexckpt.background import SaveHandle, SaveSlot, WriteJob, announce_failure
from paddle_flexckpt.catalog import Catalog, LostRankError, ValidationError
from paddle_flexckpt.engine.copies import DEVICE_CHUNK_BYTES
from paddle_flexckpt.live.communicator import Communicator
from paddle_flexckpt.live.lost_ranks import own_presence
from paddle_flexckpt.live.tensor_memory import host_bytes
from paddle_flexckpt.live.tensors import open_storage
from paddle_flexckpt.media.backend import SaveLock
from paddle_flexckpt.native.directory import SaveNames
from paddle_flexckpt.native.save_directory import SaveDirectory, remove_dead_saves
from paddle_flexckpt.planning import WritePlan
from paddle_flexckpt.report import SaveReport

# Host tensors whose memory is looked up in one call.
_TENSORS_AT_ONCE = 1024


class Share:
    """Hold what one rank writes of a save.

    Attributes:
        items: Its rows of the write plan.
        step: Training step to record, if known.
    """

    def __init__(self, plan: WritePlan, rank: int, held: Mapping[int, Any], step: int | None, any_device: bool) -> None:
        """Take a rank's share of a plan.

        ``held`` has its tensors by row of the planned catalog; ``any_device`` says whether some are on a device.
        """
        mine = np.flatnonzero(plan.catalog.rank == rank)
        self.items: Catalog = plan.catalog.take(mine)
        self.step, self._any_device = step, any_device
        self._held, self._rows, self._starts = held, plan.source[mine], plan.source_start[mine]

    def data(self) -> Iterator[np.ndarray]:
        """Return the items' bytes: uint8 arrays, which the caller lets go as soon as it has used them.

        What is written of a device tensor, and no more, crosses to the host in steps of whole blocks; a strided host
        view is copied when it is asked for.
        """
        return chain.from_iterable(self._data())

    def _data(self) -> Iterator[Sequence[np.ndarray]]:
        itemsize = self.items.itemsize
        starts, stops = self._starts * itemsize, self._starts * itemsize + self.items.byte_length
        for first in range(0, len(starts), _TENSORS_AT_ONCE):
            some = slice(first, first + _TENSORS_AT_ONCE)
            tensors = [self._held[row] for row in self._rows[some].tolist()]
            ready: list[np.ndarray] = []
            spans = starts[some].tolist(), stops[some].tolist()
            memories = host_bytes(tensors, *spans, self._any_device)
            for tensor, memory, start, stop in zip(tensors, memories, *spans):
                if memory is not None:
                    ready.append(memory)
                    continue
                yield ready
                yield from _staged(tensor, start, stop)
                ready = []
            yield ready


def _staged(tensor: Any, start: int, stop: int) -> Iterator[Sequence[np.ndarray]]:
    """Yield bytes of a tensor that the host cannot use in its place, copied step by step."""
    storage = open_storage(tensor)
    if isinstance(storage, np.ndarray):
        yield [storage.view(np.uint8)[start:stop]]
        return
    width = storage.dtype.itemsize
    step = DEVICE_CHUNK_BYTES // width * width
    for begin in range(start, stop, step) if stop > start else (start,):
        yield [storage.read_range(begin // width, min(begin + step, stop) // width).view(np.uint8)]


class SharedSave:
    """Carry out one save to a directory that all ranks share; the coordinator commits.

    Attributes:
        directory: The directory.
        names: What the save calls its files: from :meth:`begin` on for the coordinator, from :meth:`agree` on for all.
        lock: The coordinator's right to save here.
    """

    names: SaveNames

    def __init__(
        self, comm: Communicator, directory: SaveDirectory, coordinator_rank: int, unique_id: int | None, context: str
    ) -> None:
        """Take the ranks, their directory, the coordinator's position, the id that is wanted, and errors' context."""
        self.directory = directory
        self.lock: SaveLock | None = None
        self._comm, self._coordinator_rank, self._unique_id, self._context = comm, coordinator_rank, unique_id, context
        # Whether there is something here that this rank may remove: not from the commit on.
        self._is_removable = False

    @property
    def is_coordinator(self) -> bool:
        """Return whether this rank commits."""
        return self._comm.position == self._coordinator_rank

    def begin(self) -> tuple[SaveNames | None, bytes]:
        """Lock the directory and mark the save as begun, on the coordinator; return its names there.

        The second result is what the other ranks have to know of this one.
        """
        if not self.is_coordinator:
            return None, b""
        self.lock = self.directory.lock()
        self.names = self.directory.open_save(self._unique_id, self._comm.size)
        self._is_removable = True
        return self.names, b""

    def agree(self, names: SaveNames, places: Sequence[bytes], messages: Sequence[bytes]) -> None:
        """Take what the ranks know: the names of the save, their directories, and what :meth:`begin` returned.

        One collective if the directories are not known to be the same, so that each rank looks for the marker.

        Raises:
            ValidationError: A rank sees another directory.
        """
        if len(set(places)) > 1:
            self._comm.together(lambda: self._check_visible(names), "cannot save, and nothing was written")
        self.names, self._is_removable = names, True

    def _check_visible(self, names: SaveNames) -> tuple[None, bytes]:
        if not self.directory.sees(names):
            marker = self.directory.backend.where(names.marker_file)
            raise ValidationError(
                f"{marker} is not there, with which the coordinator has begun the save: ranks do not share one "
                "directory. Remedy: give all ranks the same path of storage that they share; or save with "
                "storage='per_node', to a directory on each node"
            )
        return None, b""

    def write(self, share: Share) -> bytes:
        """Write this rank's data file and part; return what the commit needs of it."""
        if self.is_coordinator:
            remove_dead_saves(self.directory, self.names)
        self.directory.write_share(
            self.names, self._comm.rank, share.items, share.data(), world_size=self._comm.size, step=share.step
        )
        return b""

    def commit(self, parts: Sequence[bytes]) -> None:
        """Make the checkpoint exist. One collective.

        Raises:
            CheckpointError: The coordinator could not commit.
        """
        self._is_removable = False  # the coordinator alone knows whether it has committed
        self._comm.together(self._commit, self._context)

    def _commit(self) -> tuple[None, bytes]:
        if self.is_coordinator:
            self.directory.commit(self.names, self._comm.ranks)
        return None, b""

    def discard(self) -> None:
        """Remove what this rank wrote, unless the save may exist; the marker goes with the last file."""
        if self._is_removable:
            self.directory.discard(self.names, self._comm.rank)

    def lose_rank(self, error: LostRankError) -> None:
        """Leave everything as it is: nobody knows how far the others are."""

    def release(self) -> None:
        """Give back the right to save here."""
        if self.lock is not None:
            self.lock.release()


class BackgroundSave(SharedSave):
    """Stage one save in memory, and hand it over to this rank's background writer."""

    def __init__(self, slot: SaveSlot, *arguments: Any) -> None:
        """Take room with the writer, and the arguments of :class:`SharedSave`."""
        super().__init__(*arguments)
        self._slot = slot
        self._presences: tuple[tuple[str, ...], ...] = ()

    def begin(self) -> tuple[SaveNames | None, bytes]:
        """Implement :meth:`SharedSave.begin`. At the addresses the others' writers see whether this rank is alive."""
        names, _ = super().begin()
        address = "" if self._comm.size == 1 else self._slot.address
        return names, json.dumps([own_presence(), address] if address else []).encode()

    def agree(self, names: SaveNames, places: Sequence[bytes], messages: Sequence[bytes]) -> None:
        """Implement :meth:`SharedSave.agree`."""
        super().agree(names, places, messages)
        self._presences = tuple(tuple(json.loads(message)) for message in messages)

    def write(self, share: Share) -> bytes:
        """Copy this rank's data to where the writer finds it."""
        job = WriteJob(
            path=self.directory.path,
            storage=self.directory.backend.reopen_token(),
            lock=None if self.lock is None else self.lock.handover()[0],
            names=self.names,
            items=share.items,
            rank=self._comm.rank,
            ranks=self._comm.ranks,
            coordinator=self._comm.ranks[self._coordinator_rank],
            step=share.step,
            timeout=self._slot.timeout,
            presences=self._presences,
        )
        space, end = self._slot.stage(job), 0
        for data in share.data():
            begin, end = end, end + data.nbytes
            space[begin:end] = data
        return b""

    def hand_over(self, report: SaveReport, begin: float) -> SaveHandle:
        """Hand the save over, and the lock with it. What goes wrong now is its outcome: the ranks do not meet again."""
        lock, self.lock = self.lock, None
        return self._slot.hand_over(report, begin, lock)

    def lose_rank(self, error: LostRankError) -> None:
        """Tell the other ranks' writers: those ranks may not have noticed, and have handed their shares over."""
        coordinator = self._comm.ranks[self._coordinator_rank]
        announce_failure(self.directory, self.names, self._comm.rank, coordinator, error)

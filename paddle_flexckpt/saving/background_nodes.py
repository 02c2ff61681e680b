"""Saves to nodes whose data files the ranks write, and which their background writers copy and commit.

A rank writes its data file in the call, straight into its node's directory: on a tmpfs that is one pass over the bytes.

Tested in tests/background/test_nodes.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paddle_flexckpt.background.pending import SaveHandle, SaveSlot
from paddle_flexckpt.background.protocol import WriteJob
from paddle_flexckpt.background.staging import WrittenFile
from paddle_flexckpt.catalog import LostRankError
from paddle_flexckpt.native.manifest import Manifest
from paddle_flexckpt.native.save_names import SaveNames
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.report import SaveReport
from paddle_flexckpt.saving.node_saves import NodeSave
from paddle_flexckpt.saving.save_plan import Share, WriteMessages


class BackgroundNodeSave(NodeSave):
    """One save to nodes that is handed over to this rank's background writer when the data files are written."""

    def __init__(self, slot: SaveSlot, comm: Communicator, save: NodeSave, coordinator: int) -> None:
        """Take room with the writer, the ranks, the save, and the position of the coordinator."""
        super().__init__(comm, save.nodes, save.locks, save.published, save.aborted)
        self._slot, self._coordinator = slot, comm.ranks[coordinator]
        self._addresses: tuple[str, ...] = ()
        self._written: WrittenFile | None = None

    def begin(self) -> tuple[SaveNames, bytes]:
        """Implement :meth:`NodeSave.begin`. The other writers need the address of this rank's writer."""
        names, _ = super().begin()
        return names, self._slot.address.encode()

    def agree(self, names: SaveNames, places: Sequence[bytes], messages: Sequence[bytes]) -> None:
        """Take the addresses of the writers."""
        self._addresses = tuple(message.decode() for message in messages)

    def write(self, share: Share, hashed: np.ndarray) -> WriteMessages:
        """Write this rank's data file; the writers exchange the parts of the manifest."""
        written = super().write(share, hashed)
        job = WriteJob(
            path=self.directory.path,
            storage=self.directory.backend.reopen_token(),
            lock=self.locks[0].handover()[0] if self.locks else None,
            names=self.names,
            items=share.items,
            rank=self._comm.rank,
            ranks=self._comm.ranks,
            coordinator=self._coordinator,
            step=share.step,
            timeout=self._slot.timeout,
            addresses=self._addresses,
            layout=self.nodes.layout,
            part=written.payload,
        )
        self._slot.stage_written(job)
        if len(share.items):
            part = Manifest.decode(written.payload, "this rank's part")
            begin = int(part.catalog.byte_offset[0] - share.items.byte_offset[0])
            self._written = WrittenFile(self.directory.backend.where(share.items.files[0]), begin, share.items)
        return WriteMessages(b"", written.checksums)

    def hand_over(self, report: SaveReport, begin: float, handle: SaveHandle | None = None) -> SaveHandle:
        """Hand the save over, and the lock with it. From now on a failure is its outcome: ranks do not meet again."""
        handed_over = self._slot.hand_over(report, begin, self.locks.pop() if self.locks else None, handle)
        handed_over.written = self._written
        return handed_over

    def lose_rank(self, error: LostRankError) -> None:
        """Have the other ranks' writers end the save: their ranks may have handed over without noticing the loss."""
        self._slot.refuse(error)

"""Blocks that are known to be as they were written, in a table that the ranks of a host share.

A rank that needs a part of a block compares the whole block with its checksum first. The ranks of a host see the same
page cache, so one comparison serves them all: each notes the blocks that it has found undamaged, and begins with
others than its neighbours. No rank waits for another. A block that is not in the table is compared again.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np

# Slots for each block, and the slots in a row that one may take. If all are taken, it is not noted.
_SLOTS, _TRIES = 4, 8
_TOKEN_BYTES = 16
# Large and odd: products of different offsets differ.
_FACTOR = np.uint64(0xC2B2AE3D27D4EB4F)


class Verdicts:
    """Fingerprints of undamaged blocks, in memory without a name that other processes of the host can map.

    Attributes:
        address: The process, descriptor and token by which others find the memory.
        position: This rank's number among the ranks that share it.
        sharers: The number of these ranks.
    """

    position, sharers = 0, 1

    def __init__(self, blocks: int) -> None:
        """Make an empty table for about so many blocks; OSError: the process has too many files open, say."""
        self._descriptor = os.memfd_create("flexckpt-verdicts", os.MFD_CLOEXEC)
        try:
            token = os.urandom(_TOKEN_BYTES)
            os.ftruncate(self._descriptor, _TOKEN_BYTES + 8 * (_SLOTS * blocks + 1))
            os.pwrite(self._descriptor, token, 0)
            self._map(self._descriptor)
        except OSError:
            self.close()
            raise
        self.address = b"%d %d " % (os.getpid(), self._descriptor) + token

    def close(self) -> None:
        """Close the descriptor. The memory goes with its last map."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _map(self, descriptor: int) -> None:
        self._slots = memoryview(mmap.mmap(descriptor, 0))[_TOKEN_BYTES:].cast("Q")

    def share(self, addresses: Sequence[bytes]) -> None:
        """Use the first of some tables, of which one is this one. Stay alone if it cannot be opened."""
        process, number, token = addresses[0].split(b" ", 2)
        try:
            descriptor = os.open(f"/proc/{int(process)}/fd/{int(number)}", os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # it is in another container, say
            return
        try:
            if os.pread(descriptor, _TOKEN_BYTES, 0) != token:
                return
            self._map(descriptor)
        except OSError:
            return
        finally:
            os.close(descriptor)
        self.position, self.sharers = addresses.index(self.address), len(addresses)

    def has(self, fingerprint: int) -> bool:
        """Return whether a block is known to be undamaged."""
        return self._slots[self._find(fingerprint)] == fingerprint

    def note(self, fingerprint: int) -> None:
        """Note that a block is undamaged."""
        slot = self._find(fingerprint)
        if not self._slots[slot]:
            self._slots[slot] = fingerprint

    def _find(self, fingerprint: int) -> int:
        """Return the slot of a block, else the free one for it, else the last of its slots."""
        slots, slot = self._slots, fingerprint % len(self._slots)
        for _ in range(_TRIES):
            if slots[slot] in (0, fingerprint):
                break
            slot = (slot + 1) % len(slots)
        return slot

    def order(self, count: int) -> list[int]:
        """Return the order in which this rank compares blocks: its own share, then the others from the end back.

        So two ranks that compare the same blocks meet once.
        """
        first, last = (count * part // self.sharers for part in (self.position, self.position + 1))
        return [*range(first, last), *range(first - 1, -1, -1), *range(count - 1, last - 1, -1)]


def fingerprints(file: np.ndarray, offset: np.ndarray, checksum: np.ndarray) -> list[int]:
    """Return a number for each block, never 0, which in all likelihood no other block has.

    Args:
        file: uint64 per block, a digest of the identity of its file.
        offset: int64 per block, its first byte there.
        checksum: uint64 per block.
    """
    own = checksum ^ file ^ offset.astype(np.uint64) * _FACTOR
    return (own | np.uint64(1)).tolist()

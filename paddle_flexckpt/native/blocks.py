"""Blocks between files and memory: counted, kept, and hashed in a thread beside the one that reads or writes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from paddle_flexckpt.native.checksums import hash_block


@dataclass
class ReadCount:
    """What has been read.

    Attributes:
        bytes_read: Bytes of tensors copied out of files.
        bytes_verified: Bytes of these that were compared with their checksum (whole blocks).
        bytes_extra: Bytes of these that no target needed: the rest of blocks that were read whole to be verified, and
            what was read of damaged blocks before a replica served instead.
        reads: Number of ``pread`` calls and mapped copies.
        files: Names of the files opened.
    """

    bytes_read: int = 0
    bytes_verified: int = 0
    bytes_extra: int = 0
    reads: int = 0
    files: set[str] = field(default_factory=set)


@dataclass
class KeptBlock:
    """A whole, verified block.

    Attributes:
        memory: uint8, as long as the longest block.
        length: Bytes of the block.
        unused: Bytes of it that no target has needed so far.
    """

    memory: np.ndarray
    length: int
    unused: int


@dataclass(frozen=True, eq=False)
class HashedBlocks:
    """Blocks that are being hashed.

    Attributes:
        row: The row that they are of.
        first: Number of the first of them.
        buffers: Their bytes.
        hashes: Their checksums, when they are there.
    """

    row: int
    first: int
    buffers: Sequence[np.ndarray]
    hashes: Future[list[int]]


class HashThread:
    """One thread that hashes, so that reading and writing need not wait for it; all three let other threads run."""

    def __init__(self) -> None:
        """Starts nothing yet."""
        self._executor: ThreadPoolExecutor | None = None

    def hash(self, row: int, first: int, buffers: Sequence[np.ndarray]) -> HashedBlocks:
        """Hashes blocks, which have to stay as they are until that is done."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="flexckpt-hash")
        hashes = self._executor.submit(lambda: [hash_block(buffer) for buffer in buffers])
        return HashedBlocks(row, first, buffers, hashes)

    def close(self) -> None:
        """Waits for what is being hashed."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

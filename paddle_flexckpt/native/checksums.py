"""Block checksums: xxh3-64 of every MiB of every stored item.

A block is small enough to stay in a core's cache between being hashed and being written or used, and large enough that
its 8 bytes of checksum cost nothing: 1 TiB of data has 8 MiB of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
import xxhash

from paddle_flexckpt.catalog import ValidationError

BLOCK_BYTES = 1 << 20
ALGORITHM = "xxh3_64"

VerifyMode = Literal["read", "full", "off"]


def verify_mode(value: bool | str) -> VerifyMode:
    """Return the mode that an argument ``verify`` means.

    Args:
        value: ``"read"`` or True: every block of which anything is needed is compared with its checksum, if it has one.
            ``"full"``: blocks are fetched whole for that, and a checkpoint without checksums is refused. ``"off"`` or
            False: none are compared.

    Raises:
        ValidationError: It is another value.
    """
    if value is True or value == "read":
        return "read"
    if value is False or value == "off":
        return "off"
    if value == "full":
        return "full"
    raise ValidationError(
        f"verify has to be 'read', 'full' or 'off' (True and False: 'read' and 'off'); got {value!r}. "
        "Remedy (FC101): give one"
    )


# Returns the checksum of one block, which has to be contiguous. Not wrapped, as a block may be small.
hash_block: Callable[[np.ndarray | memoryview | bytes], int] = xxhash.xxh3_64_intdigest


def hash_blocks(blocks: Iterable[np.ndarray | memoryview | bytes]) -> list[int]:
    """Return the checksums of blocks, each of which has to be contiguous."""
    return list(map(hash_block, blocks))


class HashThread:
    """A thread that hashes while others read and write: all three release the interpreter's lock."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._executor: ThreadPoolExecutor | None = None

    def hash(self, blocks: Sequence[np.ndarray | memoryview]) -> Future[list[int]]:
        """Hash blocks, which must not change until that is done."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="flexckpt-hash")
        return self._executor.submit(hash_blocks, blocks)

    def close(self) -> None:
        """Wait for the current hashing to end."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None


@dataclass(frozen=True, eq=False)
class Checksums:
    """The checksums of a catalog's items, in row order.

    Attributes:
        values: uint64 ``[total blocks]``.
        first: int64 ``[n + 1]``, position in ``values`` of each item's first block.
        block_bytes: Bytes per block; an item's last block may be shorter.
    """

    values: np.ndarray
    first: np.ndarray
    block_bytes: int = BLOCK_BYTES

    @classmethod
    def of_items(cls, values: np.ndarray, byte_length: np.ndarray, block_bytes: int = BLOCK_BYTES) -> Checksums:
        """Attach checksum values to items of the given lengths (bytes).

        Raises:
            ValueError: There are not exactly as many values as blocks.
        """
        first = np.concatenate([[0], np.cumsum(-(-byte_length // block_bytes))]).astype(np.int64)
        if first[-1] != len(values):
            raise ValueError(f"{len(values)} checksums for {first[-1]} blocks")
        return cls(np.asarray(values, dtype=np.uint64), first, block_bytes)

    @classmethod
    def none(cls, items: int) -> Checksums:
        """Make no checksums, for so many items of files that have none."""
        return cls(np.zeros(0, dtype=np.uint64), np.zeros(items + 1, dtype=np.int64))

    def take(self, items: np.ndarray) -> Checksums:
        """Return the checksums of some items, by their numbers, in this order."""
        first, count = self.first[items], self.first[items + 1] - self.first[items]
        start = np.concatenate([[0], np.cumsum(count)]).astype(np.int64)
        return Checksums(
            self.values[np.repeat(first - start[:-1], count) + np.arange(start[-1])], start, self.block_bytes
        )

    def of_item(self, item: int) -> np.ndarray:
        """Return the checksums of all blocks of one item, uint64."""
        return self.values[self.first[item] : self.first[item + 1]]

    def of_block(self, item: int, block: int) -> int:
        """Return the checksum of one block of one item."""
        return int(self.values[self.first[item] + block])

    def of_blocks(self, items: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """Return the checksum of one block of each of some items, uint64."""
        return self.values[self.first[items] + blocks]

"""What a simulated file holds: its bytes, and those of them that a loss of power may take.

What may be lost is the model of tests/crash/power_loss.py. Unsynced writes are kept as what they overwrote, so that a
file which is written from its beginning to its end, as nearly all are, costs its bytes once.

Tested in tests/simulation/test_files.py.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

SECTOR = 512
# Address space for a file that is mapped, of which pages are taken when they are touched: a map stays where it is while
# the file grows, as the maps of several processes do.
REGION_BYTES = 1 << 30
_MAP_NORESERVE = 0x4000


class Unsynced:
    """Describe a write, or a change of length, that is not durable.

    Attributes:
        offset: Where it begins.
        end: Where it ends.
        before: The bytes that it overwrote, or cut off; shorter than the write where the file ended.
        size: The length of the file before.
        writer: Who made it: a node, where a file system has several.
        cuts: Whether it made the file shorter.
        is_synced: Whether it is durable, and stays here because an older one is not.
        is_doomed: Whether an fsync of it has failed: no later one makes it durable.
    """

    __slots__ = ("before", "cuts", "end", "is_doomed", "is_synced", "offset", "size", "writer")

    def __init__(self, offset: int, end: int, before: bytes, size: int, writer: Any, cuts: bool = False) -> None:
        self.offset, self.end, self.before, self.size, self.writer, self.cuts = offset, end, before, size, writer, cuts
        self.is_synced = self.is_doomed = False


class Content:
    """Hold the bytes of a file.

    Attributes:
        size: How many there are. The last of them may be a hole: zeros that take no memory.
        unsynced: Writes that are not durable, the oldest first.
        region: The memory of a file that was mapped.
    """

    __slots__ = ("_data", "_is_tracked", "region", "size", "unsynced")

    def __init__(self, data: bytes = b"", is_tracked: bool = True) -> None:
        """Args: data: what is there, and durable. is_tracked: whether to keep what may be lost."""
        self._data: bytearray | memoryview = bytearray(data)
        self.size = len(data)
        self.unsynced: list[Unsynced] = []
        self.region: mmap.mmap | None = None
        self._is_tracked = is_tracked

    @property
    def used(self) -> int:
        """Return how many bytes take space."""
        return self.size if self.region is not None else len(self._data)

    def read(self, offset: int, count: int) -> bytes:
        """Return the bytes from a place; fewer where the file ends."""
        count = min(count, self.size - offset)
        if count <= 0:
            return b""
        found = bytes(self._data[offset : offset + count])
        return found if len(found) == count else found.ljust(count, b"\0")

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill a buffer from a place; how many bytes there were."""
        count = min(len(buffer), self.size - offset)
        if count <= 0:
            return 0
        there = max(0, min(count, len(self._data) - offset))
        buffer[:there] = self._data[offset : offset + there]
        if there < count:
            buffer[there:count] = bytes(count - there)
        return count

    def growth(self, end: int) -> int:
        """Return how much more space it takes if something is written up to a place."""
        return max(0, end - self.used)

    def write(self, offset: int, data: Any, writer: Any = None) -> None:
        """Put bytes at a place; a gap before them is a hole."""
        end = offset + len(data)
        if self._is_tracked:
            before = self.read(offset, end - offset)
            last = self.unsynced[-1] if self.unsynced else None
            if last is None or before or not self._continues(last, offset, writer):
                self.unsynced.append(Unsynced(offset, end, before, self.size, writer))
            else:
                last.end = end
        self._put(offset, data)
        self.size = max(self.size, end)

    def _continues(self, last: Unsynced, offset: int, writer: Any) -> bool:
        return (
            last.end == offset
            and last.writer is writer
            and not (last.cuts or last.is_synced or last.is_doomed)
            and self.size == offset
        )

    def _put(self, offset: int, data: Any) -> None:
        if not isinstance(self._data, bytearray):
            self._check_room(offset + len(data))
        elif offset > len(self._data):
            self._data += bytes(offset - len(self._data))
        self._data[offset : offset + len(data)] = data

    def truncate(self, length: int, writer: Any = None) -> None:
        """Set another length."""
        if length == self.size:
            return
        if self._is_tracked:
            before = self.read(length, self.size - length)
            offset, end = min(length, self.size), max(length, self.size)
            self.unsynced.append(Unsynced(offset, end, before, self.size, writer, cuts=length < self.size))
        self._cut(length)

    def _cut(self, length: int) -> None:
        if isinstance(self._data, bytearray):
            del self._data[length:]
        else:
            self._check_room(length)
            if length < self.size:
                self._data[length : self.size] = bytes(self.size - length)
        self.size = length

    def replace(self, data: bytes) -> None:
        """Replace all bytes, also in maps; what may be lost is as it was."""
        self._cut(min(self.size, len(data)))
        self._put(0, data)
        self.size = len(data)

    def map(self) -> memoryview:
        """Return the memory of the file, which stays where it is."""
        if self.region is None:
            data, flags = self._data, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            self._check_room(self.size)
            # Shared memory: a program that gives its pages back (MADV_DONTNEED) finds them again.
            self.region = mmap.mmap(-1, REGION_BYTES, flags=flags)
            self._data = memoryview(self.region)
            self._data[: len(data)] = data
        return memoryview(self._data)

    @staticmethod
    def _check_room(length: int) -> None:
        if length > REGION_BYTES:
            raise NotImplementedError(f"a simulated file that is mapped has at most {REGION_BYTES} bytes, not {length}")

    # What is durable.

    @property
    def is_dirty(self) -> bool:
        """Tell whether a loss of power may take something."""
        return bool(self.unsynced)

    def sync(self, writer: Any = None) -> None:
        """Make durable all that was written; by one writer, if that is given."""
        if not self.unsynced:
            return
        for each in self.unsynced:
            if not each.is_doomed and (writer is None or each.writer is writer):
                each.is_synced = True
        self._forget_synced()

    def _forget_synced(self) -> None:
        # What is synced has to be known as long as something older is not.
        if all(each.is_synced for each in self.unsynced):
            self.unsynced.clear()

    def fail_to_sync(self, random: Random, writer: Any = None) -> None:
        """Leave what an fsync that fails leaves: pages that count as clean, and are not on the disk.

        Whether a reader still finds them depends on the kernel's memory. No later fsync writes them.
        """
        doomed = [each for each in self.unsynced if not each.is_synced and (writer is None or each.writer is writer)]
        for each in doomed:
            each.is_doomed = True
        if doomed and random.random() < 0.5:
            self.replace(self._without(lambda each: each.is_doomed))
            self.unsynced = [each for each in self.unsynced if not each.is_doomed]
            self._forget_synced()

    def durable(self) -> bytes:
        """Return what is durable for certain."""
        return self._without(lambda each: not each.is_synced) if self.unsynced else self.read(0, self.size)

    def lose(self, random: Random, writer: Any = None) -> None:
        """Lose some of what is not durable; of one writer, if that is given."""
        if not self.unsynced:
            return

        def may_go(each: Unsynced) -> bool:
            return not each.is_synced and (writer is None or each.writer is writer)

        lost = variant(self._without(may_go), self.read(0, self.size), random)
        self.unsynced = [] if writer is None else [each for each in self.unsynced if not may_go(each)]
        self.replace(lost)
        self._forget_synced()

    def _without(self, is_lost: Callable[[Unsynced], bool]) -> bytes:
        """Return the bytes without some writes.

        They are undone from the last one on, but for what others have overwritten since.
        """
        data, kept = bytearray(self.read(0, self.size)), [(0, 0)]
        for each in reversed(self.unsynced):
            if not is_lost(each):
                if each.cuts:
                    break  # where another has cut the file since, all before is as it is
                kept.append((each.offset, each.end))
                continue
            size = max(each.size, *(end for _, end in kept))
            before = [(each.offset, each.before.ljust(each.end - each.offset, b"\0"))]
            for begin, end in kept[1:]:
                before = [part for whole in before for part in _around(*whole, begin, end)]
            if size > len(data):
                data += bytes(size - len(data))
            for offset, part in before:
                data[offset : offset + len(part)] = part
            del data[size:]
        return bytes(data)


def _around(offset: int, data: bytes, begin: int, end: int) -> list[tuple[int, bytes]]:
    """Return what of some bytes lies outside of a stretch, with its places."""
    parts = [(offset, data[: max(0, begin - offset)]), (max(offset, end), data[max(0, end - offset) :])]
    return [part for part in parts if part[1]]


def variant(old: bytes, new: bytes, random: Random) -> bytes:
    """Return what a loss of power leaves of a file: the old bytes are durable, the new ones are not."""
    if old == new:
        return old
    kind = random.randrange(5)
    if kind < 2:
        return (old, new)[kind]
    if kind == 2:
        cut = random.randrange(min(len(old), len(new)), max(len(old), len(new)) + 1)
        return new[:cut] if len(new) > len(old) else old[:cut]
    wanted, there = (np.frombuffer(each, np.uint8) for each in (new, old[: len(new)].ljust(len(new), b"\0")))
    if kind == 3:
        return np.where(wanted == there, wanted, 0).astype(np.uint8).tobytes()
    sectors = -(-len(new) // SECTOR)
    chosen = np.array([random.random() < 0.5 for _ in range(sectors)], dtype=bool)
    return np.where(np.repeat(chosen, SECTOR)[: len(new)], there, wanted).astype(np.uint8).tobytes()

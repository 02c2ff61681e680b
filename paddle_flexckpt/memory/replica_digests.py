"""Take digests of replicas: in the host's memory, beside a write, or on the device that has them.

The digest of a stretch is its block checksum, or a hash of these if it has several blocks. The
file that a rank writes needs those anyway, so no byte is hashed twice; a thread hashes meanwhile what another rank
writes.

A device digests its own memory: sums of 32-bit words, each multiplied by a random odd 64-bit number, modulo 2**64
(multilinear hashing; Lemire and Kaser, "Strongly universal string hashing is fast", 2014). Two different rows of words
have the same sum with a probability of at most 2**-32.

Tested in tests/saving/test_replica_checks.py and tests/device/test_device_memory.py.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import xxhash

from paddle_flexckpt.catalog import Catalog
from paddle_flexckpt.memory.device_memory import DeviceMemory, current_device, on_host
from paddle_flexckpt.memory.tensor_memory import device_of, host_bytes, host_memory
from paddle_flexckpt.memory.tensors import open_storage
from paddle_flexckpt.native.checksums import BLOCK_BYTES, Checksums, HashThread, hash_blocks
from paddle_flexckpt.planning.replica_comparison import Stretches

# Words of one sum. One sum of 8 bytes crosses to the host for each 256 KiB: 0.003 % of the data.
ROW_WORDS = 1 << 16
# Rows for which a strided view is gathered at once: 4 MiB of device memory.
_ROWS_AT_ONCE = 16
DIGEST = np.dtype([("of_device", "u1"), ("digest", "<u8")])


class Digests:
    """The digests of stretches of one rank's shards. Hashing that can run beside a write begins at once.

    A context manager: leaving it waits for the thread.

    Attributes:
        written: bool, for each item that this rank writes: whether :meth:`encode` wants its block checksums.
    """

    def __init__(
        self,
        held: Mapping[int, Any],
        catalog: Catalog,
        lines: Stretches,
        on_device: bool | None = None,
        items: Stretches | None = None,
    ) -> None:
        """Begin to hash."""
        self._lines, self._tensors = lines, [held[row] for row in lines.row.tolist()]
        width = catalog.itemsize[lines.row]
        lengths = (lines.stop - lines.start) * width
        memories = host_bytes(self._tensors, (lines.start * width).tolist(), (lines.stop * width).tolist())
        by_sums = [
            memory is None and _is_summed(tensor) if on_device is None else on_device
            for tensor, memory in zip(self._tensors, memories)
        ]
        self._found = np.zeros(len(lines), dtype=DIGEST)
        self._found["of_device"] = by_sums
        number = {} if items is None else {stretch: i for i, stretch in enumerate(_stretches(items))}
        item = np.fromiter((number.get(stretch, -1) for stretch in _stretches(lines)), np.int64, len(lines))
        is_written = (item >= 0) & ~self._by_sums
        self._written, self._item = np.flatnonzero(is_written), item[is_written]
        self.written = np.zeros(0 if items is None else len(items), dtype=bool)
        self.written[self._item] = True
        read = np.flatnonzero(~is_written & ~self._by_sums)
        in_place = np.fromiter((memories[line] is not None for line in read), dtype=bool, count=len(read))
        self._elsewhere, self._in_place = read[~in_place], read[in_place]
        self._lengths = lengths[self._in_place]
        blocks = [
            memory[start : start + BLOCK_BYTES]
            for memory in (memories[line] for line in self._in_place)
            if memory is not None
            for start in range(0, len(memory), BLOCK_BYTES)
        ]
        self._thread = HashThread()
        self._hashing = self._thread.hash(blocks) if blocks else None

    def __enter__(self) -> Digests:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.close()

    @property
    def _by_sums(self) -> np.ndarray:
        return self._found["of_device"] != 0

    def encode(self, written: Checksums | np.ndarray | None = None) -> bytes:
        """Return the digests of the lines, for the other ranks.

        ``written`` has the block checksums of this rank's items, at least of those of :attr:`written`; or a digest of
        each item.
        """
        lines, digest = self._lines, self._found["digest"]
        factors: dict[str, Any] = {}
        for line in np.flatnonzero(self._by_sums).tolist():
            span = int(lines.start[line]), int(lines.stop[line])
            digest[line] = _sums_digest(open_storage(self._tensors[line]), factors, *span)
        for line in self._elsewhere.tolist():
            blocks = _blocks(self._tensors[line], int(lines.start[line]), int(lines.stop[line]))
            digest[line] = _of_blocks(np.asarray(hash_blocks(blocks), dtype=np.uint64))
        if isinstance(written, Checksums):
            digest[self._written] = _of_items(written, self._item)
        elif written is not None:
            digest[self._written] = written[self._item]
        if self._hashing is not None:
            hashed = np.asarray(self._hashing.result(), dtype=np.uint64)
            checksums = Checksums.of_items(hashed, self._lengths)
            digest[self._in_place] = _of_items(checksums, np.arange(len(self._lengths)))
        return self._found.tobytes()


def _stretches(lines: Stretches) -> Iterator[tuple[int, int, int]]:
    return zip(lines.row.tolist(), lines.start.tolist(), lines.stop.tolist())


def _of_items(checksums: Checksums, items: np.ndarray) -> np.ndarray:
    """Return the digests of items that have elements, uint64."""
    first, end = checksums.first[items], checksums.first[items + 1]
    digest = checksums.values[first]
    for number in np.flatnonzero(end - first > 1).tolist():
        digest[number] = _of_blocks(checksums.values[first[number] : end[number]])
    return digest


def _of_blocks(checksums: np.ndarray) -> int:
    return int(checksums[0]) if len(checksums) == 1 else xxhash.xxh3_64_intdigest(checksums)


def _is_summed(tensor: Any) -> bool:
    return device_of(tensor) is not None and DeviceMemory(tensor).has_views


def _blocks(tensor: Any, start: int, stop: int) -> Iterator[np.ndarray]:
    """Yield the bytes of some elements block by block, where they are not in place."""
    storage = open_storage(tensor)
    step = BLOCK_BYTES // storage.dtype.itemsize
    for begin in range(start, stop, step):
        end = min(begin + step, stop)
        values = storage[begin:end] if isinstance(storage, np.ndarray) else storage.read_range(begin, end)
        yield values.view(np.uint8)


@functools.cache
def _factors() -> np.ndarray:
    """Return int64 ``[ROW_WORDS]``, odd; the same in every process."""
    random = np.random.Generator(np.random.PCG64(0x666C6578)).integers(0, 1 << 64, ROW_WORDS, dtype=np.uint64)
    return (random | np.uint64(1)).view(np.int64)


def _sums_digest(storage: Any, factors: dict[str, Any], start: int, stop: int) -> int:
    """Return a digest of some elements that a device can compute; of a device tensor only the sums cross to the host.

    ``factors`` has the factors on each device that has them already, by its name. New ones are added.
    """
    if isinstance(storage, DeviceMemory):
        summed = storage.has_views
        sums = _device_sums(storage, factors, start, stop) if summed else _host_sums(storage.read_range(start, stop))
    else:
        sums = _host_sums(storage[start:stop])
    return xxhash.xxh3_64_intdigest(np.concatenate([part.view(np.uint8) for part in sums]))


def _host_sums(array: np.ndarray) -> list[np.ndarray]:
    data = array.view(np.uint8)
    words = data[: len(data) // 4 * 4].view("<i4")
    sums = []
    for start in range(0, len(words), ROW_WORDS):
        values = words[start : start + ROW_WORDS].astype(np.int64)
        sums.append((values * _factors()[: len(values)]).sum(keepdims=True))
    return [*sums, data[len(words) * 4 :]]


def _device_sums(memory: DeviceMemory, known: dict[str, Any], begin: int, end: int) -> list[np.ndarray]:
    import paddle

    itemsize = memory.dtype.itemsize
    count = (end - begin) * itemsize // 4  # words
    sums = []
    with paddle.no_grad(), current_device(memory.device):
        if memory.device not in known:
            known[memory.device] = on_host(_factors())._copy_to(memory.place, True)
        factors = known[memory.device]
        for start in range(0, count, ROW_WORDS * _ROWS_AT_ONCE):
            stop = min(start + ROW_WORDS * _ROWS_AT_ONCE, count)
            words = memory.words(begin + start * 4 // itemsize, begin + stop * 4 // itemsize)
            for first in range(0, stop - start, ROW_WORDS):
                row = words[first : first + ROW_WORDS].astype("int64")
                sums.append((row * factors[: row.shape[0]]).sum().reshape([1]))
        values = host_memory(paddle.concat(sums)._copy_to(paddle.CPUPlace(), True)) if sums else np.zeros(0, np.int64)
    return [values, memory.read_range(begin + count * 4 // itemsize, end)]

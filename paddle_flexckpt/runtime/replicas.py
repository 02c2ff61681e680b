"""Compare replicas: ranks that should hold the same shard, and may not.

That happens when ranks have run out of step, or when two different tensors (the experts of two ranks) go by one name.
Saving one replica, or a part of each, would then lose something without a word. So every rank takes a digest of the
replicated shards that it holds, which costs a few percent of copying them, and the ranks compare.

A device digests its own memory, so that replicas do not cross to the host a second time: sums of 32-bit words, each
multiplied by a random odd 64-bit number, modulo 2**64 (multilinear hashing; Lemire and Kaser, "Strongly universal
string hashing is fast", 2014). Two different rows of words have the same sum with a probability of at most 2**-32.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from paddle_flexckpt.catalog import Catalog, Problem, ReplicaGroups, ValidationError
from paddle_flexckpt.execution.transfer import pack_copy
from paddle_flexckpt.runtime.communicator import Communicator
from paddle_flexckpt.runtime.device_memory import DeviceMemory, current_device, on_host
from paddle_flexckpt.runtime.tensors import host_memory, open_storage

MAX_LISTED = 50
# Words of one sum. One sum of 8 bytes crosses to the host for each 256 KiB: 0.003 % of the data.
ROW_WORDS = 1 << 16
# Rows for which a strided view is gathered at once: 4 MiB of device memory.
_ROWS_AT_ONCE = 16
_DIGEST = np.dtype([("row", "<i8"), ("of_device", "u1"), ("digest", "<u8")])


def replica_digests(held: Mapping[int, Any], groups: ReplicaGroups, on_device: bool | None = None) -> bytes:
    """Return digests of this rank's replicated shards, for the other ranks.

    Args:
        held: This rank's tensors by row of the catalog.
        groups: The catalog's replica groups.
        on_device: Which digest to take: the one that devices can compute (True), or that of bytes on the host (False);
            by default the one of each tensor's place.
    """
    count = np.zeros(len(groups.order), dtype=np.int64)
    count[groups.order] = np.repeat(groups.count, groups.count)
    digests: list[tuple[int, bool, int]] = []
    factors: dict[str, Any] = {}
    for row, tensor in held.items():
        if count[row] < 2:
            continue
        storage = open_storage(tensor)
        by_sums = isinstance(storage, DeviceMemory) and storage.has_views if on_device is None else on_device
        digests.append((row, by_sums, _sums_digest(storage, factors) if by_sums else _bytes_digest(storage)))
    return np.asarray(digests, dtype=_DIGEST).tobytes()


def check_replicas_equal(
    comm: Communicator,
    answers: Sequence[bytes],
    held: Mapping[int, Any],
    catalog: Catalog,
    groups: ReplicaGroups,
    context: str,
) -> None:
    """Compare the digests of all ranks.

    Only where one replica of a shard is on a device and another on the host is one more collective needed: the ranks
    take the digest that both can.

    Args:
        comm: The ranks.
        answers: What :func:`replica_digests` gave on every rank; empty where replicas are not compared.
        held: This rank's tensors by row of the catalog.
        catalog: The shards of all ranks.
        groups: Its replica groups.
        context: What is being done, for the error.

    Raises:
        ValidationError: Replicas differ; the same on every rank.
    """
    digests = np.concatenate([np.frombuffer(answer, dtype=_DIGEST) for answer in answers])
    first = np.zeros(len(catalog), dtype=np.int64)
    first[groups.order] = np.repeat(groups.first, groups.count)
    of_device = np.zeros((2, len(catalog)), dtype=bool)
    of_device[digests["of_device"], first[digests["row"]]] = True
    mixed = (of_device[0] & of_device[1])[first]
    if mixed.any():
        mine = {row: tensor for row, tensor in held.items() if mixed[row]}
        _, again = comm.together(lambda: (None, replica_digests(mine, groups, on_device=True)), context)
        digests = np.concatenate([digests, *(np.frombuffer(answer, dtype=_DIGEST) for answer in again)])
    digest = np.zeros(len(catalog), dtype=np.uint64)
    digest[digests["row"]] = digests["digest"]
    problems = [
        Problem(
            "replicas of one shard differ",
            key=catalog.key_name(row),
            rank=int(catalog.rank[row]),
            expected=f"the values of {catalog.describe(row)} on rank {catalog.rank[first[row]]}",
            got="others",
            remedy="give different tensors (such as the experts of different ranks) different names, or bring the "
            "ranks in step; if one rank's values will do (such as unsynchronised running statistics), pass "
            "check_replicas=False",
        )
        for row in np.flatnonzero(digest != digest[first])[:MAX_LISTED].tolist()
    ]
    if problems:
        raise ValidationError(problems, context)


def _bytes_digest(storage: Any) -> int:
    if isinstance(storage, np.ndarray):
        return xxhash.xxh3_64_intdigest(storage.view(np.uint8))
    hasher = xxhash.xxh3_64()
    for part in pack_copy(storage.whole(), storage):
        hasher.update(part)
    return hasher.intdigest()


@functools.cache
def _factors() -> np.ndarray:
    """Return int64 ``[ROW_WORDS]``, odd; the same in every process."""
    random = np.random.Generator(np.random.PCG64(0x666C6578)).integers(0, 1 << 64, ROW_WORDS, dtype=np.uint64)
    return (random | np.uint64(1)).view(np.int64)


def _sums_digest(storage: Any, factors: dict[str, Any]) -> int:
    """Return the digest that a device can take; of a device tensor only the sums cross to the host.

    Args:
        storage: What to digest.
        factors: The factors on each device that has them already, by its name; is added to.
    """
    if isinstance(storage, DeviceMemory):
        sums = _device_sums(storage, factors) if storage.has_views else _host_sums(storage.read_range(0, storage.size))
    else:
        sums = _host_sums(storage)
    return xxhash.xxh3_64_intdigest(np.concatenate([part.view(np.uint8) for part in sums]))


def _host_sums(array: np.ndarray) -> list[np.ndarray]:
    data = array.view(np.uint8)
    words = data[: len(data) // 4 * 4].view("<i4")
    sums = []
    for start in range(0, len(words), ROW_WORDS):
        values = words[start : start + ROW_WORDS].astype(np.int64)
        sums.append((values * _factors()[: len(values)]).sum(keepdims=True))
    return [*sums, data[len(words) * 4 :]]


def _device_sums(memory: DeviceMemory, known: dict[str, Any]) -> list[np.ndarray]:
    import paddle

    itemsize = memory.dtype.itemsize
    count = memory.size * itemsize // 4  # words
    sums = []
    with paddle.no_grad(), current_device(memory.device):
        if memory.device not in known:
            known[memory.device] = on_host(_factors())._copy_to(memory.place, True)
        factors = known[memory.device]
        for start in range(0, count, ROW_WORDS * _ROWS_AT_ONCE):
            stop = min(start + ROW_WORDS * _ROWS_AT_ONCE, count)
            words = memory.contiguous_range(start * 4 // itemsize, stop * 4 // itemsize)
            if words.data_ptr() % 4:
                words = words.clone()  # a device reads words at multiples of their width only
            words = words.view("int32").reshape([-1])
            for first in range(0, stop - start, ROW_WORDS):
                row = words[first : first + ROW_WORDS].astype("int64")
                sums.append((row * factors[: row.shape[0]]).sum().reshape([1]))
        values = host_memory(paddle.concat(sums)._copy_to(paddle.CPUPlace(), True)) if sums else np.zeros(0, np.int64)
    return [values, memory.read_range(count * 4 // itemsize, memory.size)]

"""Compare replicas: ranks that should hold the same shard, and may not.

That happens when ranks have run out of step, or when two different tensors (the experts of two ranks) go by one name.
Saving one replica, or a part of each, would then lose something without a word. So every rank takes a digest of the
replicated shards that it holds, which costs a few percent of copying them, and the ranks compare.

A device digests its own memory: sums of 32-bit words, each multiplied by a random odd 64-bit number, modulo 2**64
(multilinear hashing; Lemire and Kaser, "Strongly universal string hashing is fast", 2014). Two different rows of words
have the same sum with a probability of at most 2**-32.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from paddle_flexckpt.catalog import Catalog, Problem, ReplicaGroups, ValidationError, dtype_of
from paddle_flexckpt.engine.copies import pack_copy
from paddle_flexckpt.live.communicator import Communicator
from paddle_flexckpt.live.device_memory import DeviceMemory, current_device, on_host
from paddle_flexckpt.live.save_options import CLOSE, EQUAL, FIRST
from paddle_flexckpt.live.tensor_memory import host_bytes, host_memory
from paddle_flexckpt.live.tensors import open_storage

logger = logging.getLogger("paddle_flexckpt")

MAX_LISTED = 50
# Of all replicas that have to be close and differ, so much is compared element by element.
MEASURED_BYTES = 64 << 20
# Keys that this process has warned of.
_warned: set[str] = set()
# Words of one sum. One sum of 8 bytes crosses to the host for each 256 KiB: 0.003 % of the data.
ROW_WORDS = 1 << 16
# Rows for which a strided view is gathered at once: 4 MiB of device memory.
_ROWS_AT_ONCE = 16
_DIGEST = np.dtype([("row", "<i8"), ("of_device", "u1"), ("digest", "<u8")])


def replica_digests(
    held: Mapping[int, Any],
    catalog: Catalog,
    groups: ReplicaGroups,
    rows: Collection[int] | None = None,
    on_device: bool | None = None,
) -> bytes:
    """Return digests of this rank's replicated shards, for the other ranks.

    ``held`` has this rank's tensors by row of the catalog, whose groups these are; ``rows`` are those to take, all by
    default. ``on_device`` asks for the digest that devices can compute (True) or that of bytes on the host (False); by
    default each tensor has the one of its place.
    """
    replicated = (groups.count > 1)[groups.of_row]
    digests: list[tuple[int, bool, int]] = []
    lengths = catalog.byte_length
    factors: dict[str, Any] = {}
    mine = [row for row in held if replicated[row] and (rows is None or row in rows)]
    tensors = [held[row] for row in mine]
    nothing: list[np.ndarray | None] = [None] * len(mine)
    in_place = nothing if on_device else host_bytes(tensors, [0] * len(mine), lengths[mine].tolist())
    for row, tensor, memory in zip(mine, tensors, in_place):
        if memory is not None:
            digests.append((row, False, xxhash.xxh3_64_intdigest(memory)))
            continue
        storage = open_storage(tensor)
        by_sums = isinstance(storage, DeviceMemory) and storage.has_views if on_device is None else on_device
        digests.append((row, by_sums, _sums_digest(storage, factors) if by_sums else _bytes_digest(storage)))
    return np.asarray(digests, dtype=_DIGEST).tobytes()


class Replicas:
    """Handle the replicas of one call: what is asked of them, how they compare, and which rank's values count.

    Attributes:
        compares: Whether they are compared.
        comes_first: Whether a save has to compare before it plans: what differs is then written by one rank alone.
    """

    def __init__(
        self,
        comm: Communicator,
        held: Mapping[int, Any],
        catalog: Catalog,
        groups: ReplicaGroups,
        policies: np.ndarray,
        compares: bool,
        context: str,
        save_replicas: bool = False,
    ) -> None:
        """Take the shards of all ranks, and this rank's tensors by row of their catalog.

        ``policies`` has the policy of each row, uint8 ``[n]`` (:mod:`~paddle_flexckpt.live.save_options`).
        ``save_replicas``: each replica is to stand in for the others later, which those that differ cannot.
        """
        self._comm, self._held, self._catalog, self._groups = comm, held, catalog, groups
        self._context, self.compares = context, compares or save_replicas
        self._policy = np.maximum.reduceat(policies[groups.order], groups.start[:-1]) if len(groups) else policies
        self._policy = np.where(groups.count > 1, self._policy, EQUAL)
        tolerant = self._policy != EQUAL if save_replicas else self._policy == CLOSE
        self.comes_first = self.compares and bool(tolerant.any())

    def compare(self, answers: Sequence[bytes]) -> np.ndarray:
        """Compare the :func:`replica_digests` of all ranks; return the groups whose replicas differ, bool ``[g]``.

        Only where one replica of a shard is on a device and another on the host is one more collective needed: the
        ranks take the digest that both can.

        Raises:
            ValidationError: Replicas differ that have to be equal; the same on every rank.
        """
        catalog, groups = self._catalog, self._groups
        digests = np.concatenate([np.frombuffer(answer, dtype=_DIGEST) for answer in answers])
        first = groups.first[groups.of_row]
        of_device = np.zeros((2, len(catalog)), dtype=bool)
        of_device[digests["of_device"], first[digests["row"]]] = True
        mixed = (of_device[0] & of_device[1])[first]
        if mixed.any():
            mine = set(np.flatnonzero(mixed).tolist())
            _, again = self._comm.together(
                lambda: (None, replica_digests(self._held, catalog, groups, mine, on_device=True)), self._context
            )
            digests = np.concatenate([digests, *(np.frombuffer(answer, dtype=_DIGEST) for answer in again)])
        digest = np.zeros(len(catalog), dtype=np.uint64)
        digest[digests["row"]] = digests["digest"]
        differs = digest != digest[first]
        problems = [
            Problem(
                "replicas of one shard differ",
                key=catalog.key_name(row),
                rank=int(catalog.rank[row]),
                expected=f"the values of {catalog.describe(row)} on rank {catalog.rank[first[row]]}",
                got="others",
                remedy=_drift() + "give different tensors (such as the experts of different ranks) different names, or "
                "bring the ranks in step; if one rank's values will do, pass check_replicas="
                f"{{{catalog.key_name(row)!r}: 'first'}}, or 'close' to be told how far apart they are",
            )
            for row in np.flatnonzero(differs & (self._policy == EQUAL)[groups.of_row])[:MAX_LISTED].tolist()
        ]
        if problems:
            raise ValidationError(problems, self._context)
        differing = np.zeros(len(groups), dtype=bool)
        differing[groups.of_row[differs]] = True
        return differing

    def narrowed(self, differing: np.ndarray | None = None) -> ReplicaGroups:
        """Return the groups as they may be read: where replicas may differ, the one replica that counts is left.

        ``differing`` is of :meth:`compare`; None: not known yet, so that all that may differ do.
        """
        rows = self._counting
        return self._groups.without_others(rows if differing is None else rows[differing[self._groups.of_row[rows]]])

    @functools.cached_property
    def _counting(self) -> np.ndarray:
        """Return one row of each group whose replicas may differ, all of a layer of one rank where one holds them all.

        That is the rank which holds the most of the layer's groups, among several the lowest; of a group that it does
        not hold, the next by the same rule.
        """
        catalog, groups = self._catalog, self._groups
        rows = groups.order[np.repeat(self._policy != EQUAL, groups.count)]
        if not len(rows):
            return rows
        keys = frozenset(catalog.keys)
        number: dict[str, int] = {}
        layer_of_key = [number.setdefault(_layer_of(key, keys), len(number)) for key in catalog.keys]
        layer = np.asarray(layer_of_key, dtype=np.int64)[catalog.key[rows]]
        rank, group = catalog.rank[rows].astype(np.int64), groups.of_row[rows]
        found = []
        while len(rows):
            code, holder, count = np.unique(layer * (rank.max() + 1) + rank, return_inverse=True, return_counts=True)
            best = np.lexsort((code, -count, code // (rank.max() + 1)))  # by layer; then the rank that holds the most
            _, first = np.unique(code[best] // (rank.max() + 1), return_index=True)
            chosen = np.isin(holder.reshape(-1), best[first])
            found.append(rows[chosen])
            rest = ~np.isin(group, group[chosen])
            rows, layer, rank, group = rows[rest], layer[rest], rank[rest], group[rest]
        return np.concatenate(found)

    def report(self, differing: np.ndarray, warns: bool) -> dict[str, str]:
        """Return what became of each key whose replicas need not be equal; where it is asked for, measure how far.

        Two collectives where replicas differ that have to be close, else none. ``warns``: this rank warns of keys that
        have to be close and differ, of each once in a process.
        """
        rows = self._counting
        counting = dict(zip(self._groups.of_row[rows].tolist(), rows.tolist()))
        close = [group for group in counting if differing[group] and self._policy[group] == CLOSE]
        measured = self._measure([counting[group] for group in close]) if close else []
        told: dict[str, str] = {}
        warnings: dict[str, str] = {}
        for group, (difference, whole) in sorted(zip(close, measured), key=lambda each: _nan_last(each[1][0])):
            size = f"by at {'most' if whole else 'least'} {difference:.3g}"
            warnings[self._catalog.key_name(counting[group])] = f"differ {size}; {self._whose(counting[group])}"
        for group in np.flatnonzero(self._policy == FIRST).tolist() if self.compares else ():
            key = self._catalog.key_name(self._groups.first[group])
            if differing[group]:
                told[key] = f"differ; {self._whose(counting[group])}"
            else:
                told.setdefault(key, "equal")
        new = [key for key in warnings if key not in _warned]
        if warns and new:
            _warned.update(new)
            logger.warning(
                f"{self._context.removeprefix('cannot ')}: replicas of {len(warnings)} tensor(s) differ: "
                + "; ".join(f"{key!r}: {warnings[key]}" for key in new[:3])
                + ". Ranks that drift apart by rounding are no fault of a checkpoint; ranks out of step, or different "
                "tensors under one name, are"
            )
        return {**told, **warnings}

    def _whose(self, row: int) -> str:
        return f"rank {self._catalog.rank[row]}'s values count"

    def _measure(self, rows: list[int]) -> list[tuple[float, bool]]:
        """Return by how much the replicas of some groups differ at most, and whether all elements were compared.

        ``rows`` has the row of each group that counts. Its rank tells the others its values, MEASURED_BYTES at most.
        """
        catalog, groups, room = self._catalog, self._groups, MEASURED_BYTES
        size, dtypes = catalog.size, [dtype_of(catalog.dtype_name(row)).numpy for row in rows]
        counts = {}
        for i in sorted(range(len(rows)), key=lambda i: int(size[rows[i]]) * dtypes[i].itemsize):
            counts[i] = min(int(size[rows[i]]), room // dtypes[i].itemsize)
            room -= counts[i] * dtypes[i].itemsize

        def tell() -> tuple[None, bytes]:
            mine = (_values(self._held[row], counts[i]) for i, row in enumerate(rows) if row in self._held)
            return None, b"".join(values.tobytes() for values in mine)

        _, told = self._comm.together(tell, self._context)
        rest = {rank: memoryview(values) for rank, values in zip(self._comm.ranks, told)}

        def compare() -> tuple[None, bytes]:
            found = []
            for i, row in enumerate(rows):
                rank = int(catalog.rank[row])
                values = np.frombuffer(rest[rank], dtypes[i], counts[i])
                rest[rank] = rest[rank][values.nbytes :]
                members = groups.order[groups.of_row[groups.order] == groups.of_row[row]].tolist()
                others = (member for member in members if member != row and member in self._held)
                own = (_values(self._held[member], counts[i]) for member in others)
                found.append(max((_difference(each, values) for each in own), default=0.0, key=_nan_last))
            return None, np.asarray(found).tobytes()

        _, answers = self._comm.together(compare, self._context)
        differences = np.max([np.frombuffer(answer) for answer in answers], axis=0)  # NaN where one is
        return [(float(differences[i]), counts[i] == size[row]) for i, row in enumerate(rows)]


def _layer_of(key: str, keys: Collection[str]) -> str:
    """Return the prefix of a tensor's name, and for a state of a parameter that of the parameter's."""
    layer = key.rpartition(".")[0]
    while layer in keys:
        layer = layer.rpartition(".")[0]
    return layer


def _values(tensor: Any, count: int) -> np.ndarray:
    """Return a tensor's first elements in row-major order, on the host."""
    storage = open_storage(tensor)
    return storage[:count] if isinstance(storage, np.ndarray) else storage.read_range(0, count)


def _difference(values: np.ndarray, others: np.ndarray) -> float:
    """Return the largest absolute difference; NaN where one of two elements is none and they are not the same bits."""
    bits = [each.view(np.uint8).reshape(-1, each.dtype.itemsize) for each in (values, others)]
    differ = np.flatnonzero((bits[0] != bits[1]).any(axis=1))
    if not len(differ):
        return 0.0
    wide = np.complex128 if values.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        return float(np.abs(values[differ].astype(wide) - others[differ].astype(wide)).max())


def _nan_last(number: float) -> tuple[bool, float]:
    return number != number, number


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

    ``factors`` has the factors on each device that has them already, by its name; it is added to.
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


def _drift() -> str:
    """Return what else may be done where Paddle itself lets replicas drift, as a beginning of a remedy."""
    topology = sys.modules.get("paddle.distributed.fleet.base.topology")
    hcg = getattr(topology, "_HYBRID_PARALLEL_GROUP", None)
    if hcg is None or hcg.get_data_parallel_world_size() == 1 or hcg.get_sharding_parallel_world_size() == 1:
        return ""
    return (
        "with sharding V2 (split_param=True) beside data parallelism Paddle does not keep ranks equal, from the first "
        "step on: shard over all of these ranks (dp_degree=1), or use V1. Otherwise "
    )

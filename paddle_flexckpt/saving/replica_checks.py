"""Compare replicas: ranks that should hold the same shard may hold different values.

That happens when ranks have run out of step, or when two different tensors (the experts of two ranks) have one name.
Saving one replica, or a part of each, would then silently lose data. So ranks take digests
(:mod:`~paddle_flexckpt.memory.replica_digests`) and compare them.
:mod:`~paddle_flexckpt.planning.replica_comparison` chooses what to compare: a save compares what it writes, on two
ranks; where any replica may be read, all of them are compared.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from paddle_flexckpt.catalog import EXTRA_STATE, Catalog, Problem, ReplicaGroups, ValidationError, dtype_of
from paddle_flexckpt.catalog.table import extra_state_differs
from paddle_flexckpt.memory.replica_digests import DIGEST, Digests
from paddle_flexckpt.memory.tensors import open_storage
from paddle_flexckpt.planning.replica_comparison import Comparison, compare_samples, compare_whole, compare_written
from paddle_flexckpt.planning.write_plan import Items
from paddle_flexckpt.ranks.communicator import Communicator
from paddle_flexckpt.saving.replica_policies import CLOSE, EQUAL, FIRST
from paddle_flexckpt.saving.replica_remedies import About, about_keys, drift_remedy

logger = logging.getLogger("paddle_flexckpt")

# Of all replicas that have to be close and differ, so many bytes are compared element by element.
MEASURED_BYTES = 64 << 20
# Replicas that have to be close may differ by this part of the largest value, or by two steps of a dtype that has fewer
# bits. Gradients that are summed in another order, in bfloat16, move them 0.008 apart in 1000 steps of Adam; different
# tensors under one name are about 1 apart. Values that are not floating point have to be equal.
CLOSE_PART = 1 / 16
# Keys that this process has warned of.
_warned: set[str] = set()


class Replicas:
    """The replicas of one call: what is compared of them, whether they differ, and which rank's values count.

    Attributes:
        compares: Whether they are compared.
        held: This rank's tensors by row.
        comes_first: Whether a save has to compare before it plans; one rank alone then writes replicas that differ.
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

        ``policies`` has the policy of each row, uint8 ``[n]`` (:mod:`~paddle_flexckpt.saving.replica_policies`).
        ``save_replicas``: each replica is to serve in place of the others later, so none may differ.
        """
        self._comm, self.held, self._catalog, self._groups = comm, held, catalog, groups
        self._context, self.compares = context, compares or save_replicas
        self._policy = np.maximum.reduceat(policies[groups.order], groups.start[:-1]) if len(groups) else policies
        self._policy = np.where(groups.count > 1, self._policy, EQUAL)
        self._may_differ = self._policy >= CLOSE
        self._looks_at_all = self._policy != EQUAL if not save_replicas else np.ones(len(groups), dtype=bool)
        tolerant = self._may_differ if save_replicas else self._policy == CLOSE
        self.comes_first = self.compares and bool(tolerant.any())

    def first(self) -> Comparison:
        """Plan the comparison before a save is planned: all replicas that may differ."""
        return compare_whole(self._catalog, self._groups, self._may_differ)

    def beside(self, items: Items, turn: int) -> Comparison:
        """Plan the comparison that runs beside the writes. It has the replicas that :meth:`first` leaves out.

        Of most replicas it has the written bytes, of some all bytes. ``items`` are the written items; ``turn`` is a
        number that all ranks agree on, another one for each save.
        """
        rest = np.full(len(self._groups), self.compares) & ~(self._may_differ & self.comes_first)
        all_of, part_of = rest & self._looks_at_all, rest & ~self._looks_at_all
        written = compare_written(items, self._catalog, self._groups, part_of, turn)
        samples = compare_samples(self._catalog, self._groups, part_of, turn)
        whole = compare_whole(self._catalog, self._groups, all_of)
        return written.concat(samples).concat(whole)

    def take(self, comparison: Comparison, on_device: bool | None = None) -> bytes:
        """Return the digests of this rank's lines, taken by themselves. A save takes digests while it writes."""
        with Digests(
            self.held, self._catalog, comparison.of_rank(self._catalog, self._comm.rank), on_device
        ) as digests:
            return digests.encode()

    def compare(self, comparison: Comparison, answers: Sequence[bytes]) -> np.ndarray:
        """Compare the digests of all ranks; return the groups whose replicas differ, bool ``[g]``.

        If one replica of a shard is on a device and another on the host, one more collective is needed: the ranks take
        a digest that both can compute.

        Raises:
            ValidationError: Replicas differ that have to be equal; the same on every rank.
        """
        groups = self._groups
        found = self._by_line(comparison, answers)
        of_device, first = found["of_device"] != 0, comparison.first
        is_mixed = np.zeros(len(comparison), dtype=bool)
        is_mixed[first[of_device != of_device[first]]] = True
        is_mixed = is_mixed[first]
        if is_mixed.any():
            again = comparison.take(is_mixed)
            _, answers = self._comm.together(lambda: (None, self.take(again, on_device=True)), self._context)
            found[is_mixed] = self._by_line(again, answers)
        lines = np.flatnonzero(found["digest"] != found["digest"][first])
        group = groups.of_row[comparison.row[lines]]
        # A replica may differ in several stretches.
        wrong = lines[~self._may_differ[group]]
        if len(wrong):
            _, once = np.unique(comparison.row[wrong], return_index=True)
            raise ValidationError(self._problems(comparison, wrong[once]), self._context)
        differing = np.zeros(len(groups), dtype=bool)
        differing[group] = True
        return differing

    def _by_line(self, comparison: Comparison, answers: Sequence[bytes]) -> np.ndarray:
        """Return the digests of all lines, from each rank's encoded digests of its own."""
        found = np.zeros(len(comparison), dtype=DIGEST)
        answer = dict(zip(self._comm.ranks, answers))
        in_order = np.argsort(self._catalog.rank[comparison.row], kind="stable")
        found[in_order] = np.frombuffer(b"".join(answer[rank] for rank in sorted(answer)), dtype=DIGEST)
        return found

    def _problems(self, comparison: Comparison, lines: np.ndarray) -> list[Problem]:
        found = about_keys(
            {line: self._catalog.key_name(comparison.row[line]) for line in lines.tolist()}, self._catalog.keys
        )
        return [self._problem(comparison, line, found[line]) for line in found]

    def _problem(self, comparison: Comparison, line: int, about: About) -> Problem:
        catalog, row, other = self._catalog, comparison.row[line], comparison.row[comparison.first[line]]
        key, start, stop = catalog.key_name(row), comparison.start[line], comparison.stop[line]
        part = "" if stop - start == catalog.size[row] else f", elements {start} to {stop - 1} of it,"
        drift = drift_remedy([int(catalog.rank[row]), int(catalog.rank[other])])
        where: dict[str, Any] = {
            "key": key,
            "rank": int(catalog.rank[row]),
            "expected": f"the values of {catalog.describe(row)}{part} on rank {catalog.rank[other]}",
            "got": "others",
        }
        if key.startswith(EXTRA_STATE):
            return extra_state_differs(**where)
        if about.is_state and not drift:
            return Problem(
                "ranks differ in the optimizer's states",
                **where,
                code="FC106",
                remedy="average the gradients over all ranks that hold the parameter, as fleet and "
                "paddle.DataParallel do, and begin again from a checkpoint that was saved before they differed; to go "
                f"on from one rank's states, pass check_replicas={{{key!r}: 'first'}}",
            )
        return Problem(
            f"replicas of one shard differ{'' if drift else about.states}",
            **where,
            code="FC106",
            remedy=drift
            if drift
            else f"{about.remedies}; only if they are one tensor and one rank's values will do, pass "
            f"check_replicas={about.policy(key)}, or 'close' to be told how far apart they are",
        )

    def _too_far(self, row: int, part: float, bound: float, about: About) -> Problem:
        catalog = self._catalog
        drift = drift_remedy(self._holders(row))
        key = catalog.key_name(row)
        return Problem(
            f"replicas of one shard are not close{'' if drift else about.states}",
            key=key,
            expected=f"differences of at most {bound:.3g} of the largest value, in {catalog.dtype_name(row)}, from "
            f"{catalog.describe(row)} on rank {catalog.rank[row]}",
            got=f"{part:.3g} of it",
            code="FC106",
            remedy=drift
            if drift
            else f"{about.remedies}; only if they are one tensor and one rank's values will do, pass "
            f"check_replicas={about.policy(key)}",
        )

    def _holders(self, row: int) -> list[int]:
        """Return the ranks that hold a replica of a row's shard."""
        group = int(self._groups.of_row[row])
        begin, end = self._groups.start[group : group + 2]
        return sorted(map(int, self._catalog.rank[self._groups.order[begin:end]]))

    def narrowed(self, differing: np.ndarray | None = None) -> ReplicaGroups:
        """Return the groups as they may be read: where replicas may differ, only the replica that counts is left.

        ``differing`` is the result of :meth:`compare`; None: not known yet, so all that may differ count as differing.
        """
        rows = self._counting
        return self._groups.narrowed_to(rows if differing is None else rows[differing[self._groups.of_row[rows]]])

    @functools.cached_property
    def _counting(self) -> np.ndarray:
        """Return one row of each group whose replicas may differ: one rank's for a whole layer, if it holds all of it.

        The rank is the one that holds the most of the layer's groups, the lowest if there are several. For a group that
        it does not hold, the next rank by the same rule counts.
        """
        catalog, groups = self._catalog, self._groups
        rows = groups.order[np.repeat(self._may_differ, groups.count)]
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
        """Return the result for each key whose replicas need not be equal; measure the distance where it is needed.

        Two collectives where replicas differ that have to be close, else none. ``warns``: this rank warns of keys that
        have to be close and differ, of each once in a process.

        Raises:
            ValidationError: Replicas that have to be close are not; the same on every rank.
        """
        rows = self._counting
        counting = dict(zip(self._groups.of_row[rows].tolist(), rows.tolist()))
        close = [group for group in counting if differing[group] and self._policy[group] == CLOSE]
        measured = self._measure([counting[group] for group in close]) if close else []
        texts: dict[str, str] = {}
        warnings: dict[str, str] = {}
        bounds = [_bound(self._catalog.dtype_name(counting[group])) for group in close]
        parts = {counting[group]: (each.part, bound) for group, each, bound in zip(close, measured, bounds)}
        far = {row: self._catalog.key_name(row) for row, (part, bound) in parts.items() if not part <= bound}
        if far:
            problems = [
                self._too_far(row, *parts[row], about) for row, about in about_keys(far, self._catalog.keys).items()
            ]
            raise ValidationError(problems, self._context)
        for group, (difference, _, whole) in sorted(zip(close, measured), key=lambda each: each[1]):
            size = f"by at {'most' if whole else 'least'} {difference:.3g}"
            warnings[self._catalog.key_name(counting[group])] = f"differ {size}; {self._whose(counting[group])}"
        for group in np.flatnonzero(self._policy == FIRST).tolist() if self.compares else ():
            key = self._catalog.key_name(self._groups.first[group])
            if differing[group]:
                texts[key] = f"differ; {self._whose(counting[group])}"
            else:
                texts.setdefault(key, "equal")
        new = [key for key in warnings if key not in _warned]
        if warns and new:
            _warned.update(new)
            logger.warning(
                f"{self._context.removeprefix('cannot ')}: replicas of {len(warnings)} tensor(s) differ: "
                + "; ".join(f"{key!r}: {warnings[key]}" for key in new[:3])
                + ". Ranks that drift apart by rounding are no fault of a checkpoint; ranks out of step, or different "
                "tensors under one name, are"
            )
        return {**texts, **warnings}

    def _whose(self, row: int) -> str:
        return f"rank {self._catalog.rank[row]}'s values count"

    def _measure(self, rows: list[int]) -> list[_Distance]:
        """Return the distance of the replicas of some groups.

        ``rows`` has the row of each group that counts. Its rank sends the others its values, MEASURED_BYTES at most.
        """
        catalog, groups, room = self._catalog, self._groups, MEASURED_BYTES
        size, dtypes = catalog.size, [dtype_of(catalog.dtype_name(row)).numpy for row in rows]
        counts: dict[int, int] = {}
        for i in sorted(range(len(rows)), key=lambda i: int(size[rows[i]]) * dtypes[i].itemsize):
            # Every group gets an even share of the bytes that are left.
            share = room // (len(rows) - len(counts)) // dtypes[i].itemsize
            counts[i] = min(int(size[rows[i]]), max(share, 1))
            room -= counts[i] * dtypes[i].itemsize

        def send() -> tuple[None, bytes]:
            mine = (_values(self.held[row], counts[i]) for i, row in enumerate(rows) if row in self.held)
            return None, b"".join(values.tobytes() for values in mine)

        _, gathered = self._comm.together(send, self._context)
        rest = {rank: memoryview(values) for rank, values in zip(self._comm.ranks, gathered)}

        def compare() -> tuple[None, bytes]:
            found = []
            for i, row in enumerate(rows):
                rank = int(catalog.rank[row])
                values = np.frombuffer(rest[rank], dtypes[i], counts[i])
                rest[rank] = rest[rank][values.nbytes :]
                members = groups.order[groups.of_row[groups.order] == groups.of_row[row]].tolist()
                others = (member for member in members if member != row and member in self.held)
                own = (_values(self.held[member], counts[i]) for member in others)
                found.append(np.max([(0.0, 0.0), *(_difference(each, values) for each in own)], axis=0))
            return None, np.asarray(found).tobytes()

        _, answers = self._comm.together(compare, self._context)
        # NaN where one is.
        found = np.max([np.frombuffer(answer).reshape(-1, 2) for answer in answers], axis=0).tolist()
        return [_Distance(difference, part, counts[i] == size[rows[i]]) for i, (difference, part) in enumerate(found)]


class _Distance(NamedTuple):
    """The distance of replicas.

    Attributes:
        difference: The largest difference of two elements.
        part: The same as a part of the largest value.
        whole: Whether all elements were compared.
    """

    difference: float
    part: float
    whole: bool


def _bound(dtype: str) -> float:
    """Return the part of the largest value by which replicas that have to be close may differ."""
    kind = np.zeros(0, dtype_of(dtype).numpy).real.dtype
    try:
        return max(CLOSE_PART, 2 * float(ml_dtypes.finfo(kind).eps))
    except ValueError:
        return 0.0


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


def _difference(values: np.ndarray, others: np.ndarray) -> tuple[float, float]:
    """Return the largest absolute difference, and that as a part of the largest finite value.

    Both are NaN if one of two elements is NaN and their bits differ.
    """
    bits = [each.view(np.uint8).reshape(-1, each.dtype.itemsize) for each in (values, others)]
    differ = np.flatnonzero((bits[0] != bits[1]).any(axis=1))
    if not len(differ):
        return 0.0, 0.0
    wide = np.complex128 if values.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        difference = float(np.abs(values[differ].astype(wide) - others[differ].astype(wide)).max())
        largest = max(float(np.abs(each[np.isfinite(each)].astype(wide)).max(initial=0.0)) for each in (values, others))
    return difference, difference / largest if largest else difference

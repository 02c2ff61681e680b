"""Sets of ranks that own the same shards, and the bytes of these that each rank writes or reads.

The shards of one set lie end to end, on its *line*. The line is cut where each rank of the set has its share. Sets of
few ranks come first: a load that only one rank can take is counted before loads that can be shifted.

Tested in tests/planning/test_holder_sets.py.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import xxhash

from paddle_flexckpt.catalog import ReplicaGroups

# The first number of sets in a search for sets with no rank in common.
_WINDOW = 256
# The most rounds of sharing out, and stretches of sets in the rounds after the first. One round is enough for most
# jobs; with axes that cross, some 10 make loads even.
_ROUNDS, _STEPS = 64, 4096
# The most rows of all ranks for which every rank plans all keys: some 8 MiB to receive, and 0.1 s to plan.
SPREAD_ROWS = 1 << 17
# Bytes on the line, bytes of the set's ranks.
_ENTRY = struct.Struct("<QI")
# Sets of more ranks are compressed: mostly their ranks are at equal distances. A digest is their name, as hosts may
# compress differently.
_PLAIN_RANKS = 16
_DIGEST_BYTES = 16


@dataclass(frozen=True, eq=False)
class HolderSets:
    """The sets of ranks that own shards, in the order in which their lines are shared out.

    Attributes:
        members: int64, the ranks of all sets, those of a set in rising order.
        start: int64 ``[s + 1]``, set ``i`` is ``members[start[i]:start[i + 1]]``.
    """

    members: np.ndarray
    start: np.ndarray

    def __len__(self) -> int:
        return len(self.start) - 1

    @property
    def count(self) -> np.ndarray:
        """Return int64 ``[s]``, ranks in each set."""
        return np.diff(self.start)


def find_sets(groups: ReplicaGroups, holder: np.ndarray) -> tuple[HolderSets, np.ndarray]:
    """Return the sets of ranks that own replica groups, and the set of each group, int64 ``[g]``.

    Args:
        groups: The replica groups.
        holder: int64 per row, the place of its rank, which rises with the rank.
    """
    count = groups.count
    if not len(groups):
        return HolderSets(np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64)), np.zeros(0, dtype=np.int64)
    of_member = holder[groups.order]
    first, last = of_member[groups.start[:-1]], of_member[groups.start[1:] - 1]
    # Sort sets so that those of one kind are neighbours. Such sets (the ranks along one axis of a mesh) have no rank in
    # common. The hash of a set is the sum of a random-looking number per rank; sets of equal hashes are compared.
    order = np.lexsort((np.add.reduceat(_mixed(of_member), groups.start[:-1]), first, last - first, count))
    width = count[order]
    start = np.append(0, np.cumsum(width))
    members = of_member[np.arange(start[-1]) + np.repeat(groups.start[:-1][order] - start[:-1], width)]
    same_width = np.append(False, width[1:] == width[:-1])
    before = np.maximum(np.arange(len(members)) - np.repeat(width, width), 0)
    is_new = ~(same_width & np.logical_and.reduceat(members == members[before], start[:-1]))
    of_group = np.empty(len(groups), dtype=np.int64)
    of_group[order] = np.cumsum(is_new) - 1
    return HolderSets(members[np.repeat(is_new, width)], np.append(0, np.cumsum(width[is_new]))), of_group


def _mixed(holder: np.ndarray) -> np.ndarray:
    mixed = holder.astype(np.uint64) + np.uint64(1)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return mixed


def share_out(sets: HolderSets, amount: np.ndarray, world: int) -> np.ndarray:
    """Return how much of each set's line each of its members gets, int64 like ``sets.members``.

    One round makes the loads level if sets contain each other or have no rank in common. If sets cross, later sets
    change the loads on which earlier shares were based. So the shares are computed again, round by round.

    Args:
        sets: The sets, by places below ``world``.
        amount: int64 ``[s]``, bytes on each line.
        world: Number of ranks.
    """
    load, share = np.zeros(world, dtype=np.int64), np.zeros(len(sets.members), dtype=np.int64)
    stretches = _find_stretches(sets)
    for _ in range(min(_ROUNDS, 1 + _STEPS // max(len(stretches), 1))):
        for begin, stop in stretches:
            some = slice(int(sets.start[begin]), int(sets.start[stop]))
            places = sets.members[some].reshape(stop - begin, -1)
            others = load[places] - share[some].reshape(places.shape)
            poured = pour(others, amount[begin:stop])
            load[places], share[some] = others + poured, poured.reshape(-1)
        if 100 * int(load.max(initial=0)) <= 101 * least_peak(sets, amount, load):
            break
    return share


def _find_stretches(sets: HolderSets) -> list[tuple[int, int]]:
    """Return first and last (exclusive) of stretches of sets with no rank in common, which do not affect each other."""
    count, begin, window, found = sets.count, 0, _WINDOW, []
    while begin < len(sets):
        stop = int(np.searchsorted(count, count[begin], side="right"))
        width, stop = int(count[begin]), min(begin + window, stop)
        places = sets.members[sets.start[begin] : sets.start[stop]]
        order = np.argsort(places, kind="stable")
        rank = places[order]
        again = order[1:][rank[1:] == rank[:-1]] // width
        alone = max(int(again.min(initial=stop - begin)), 1)
        found.append((begin, begin + alone))
        begin, window = begin + alone, max(4 * alone, _WINDOW)
    return found


def least_peak(sets: HolderSets, amount: np.ndarray, load: np.ndarray) -> int:
    """Return a lower bound of the highest load, however the lines are shared out.

    Of any k ranks, one gets at least a k-th of what they alone own. The bound is that of the k most loaded ranks, for
    each k; it is the highest load itself where loads cannot be made more even.

    Args:
        sets: The sets.
        amount: int64 ``[s]``, bytes on each line.
        load: int64 per rank, its bytes.
    """
    if not len(sets):
        return 0
    order = np.argsort(-load, kind="stable")
    place, inside = np.empty_like(order), np.zeros(len(load), dtype=np.int64)
    place[order] = np.arange(len(load))
    np.add.at(inside, np.maximum.reduceat(place[sets.members], sets.start[:-1]), amount)
    return int((-(-np.cumsum(inside) // np.arange(1, len(load) + 1))).max())


def pour(load: np.ndarray, amount: np.ndarray) -> np.ndarray:
    """Divide each amount among the k loads of its row, so that the highest sum is as low as possible; int64 ``[n, k]``.

    Args:
        load: int64 ``[n, k]``.
        amount: int64 ``[n]``; each row of the result sums to its amount.
    """
    order = np.argsort(load, axis=1, kind="stable")
    level = np.take_along_axis(load, order, axis=1)
    below = np.arange(1, level.shape[1] + 1)
    filled = np.cumsum(level, axis=1)
    # The amount that raises the k lowest to the level of the (k+1)-th.
    used = level[:, 1:] * below[:-1] - filled[:, :-1]
    k = (used < amount[:, None]).sum(axis=1) + 1
    total = filled[np.arange(len(level)), k - 1] + amount
    target = (total // k)[:, None] + (below <= (total % k)[:, None])
    poured = np.where(below <= k[:, None], np.maximum(target - level, 0), 0)
    share = np.empty_like(poured)
    np.put_along_axis(share, order, poured, axis=1)
    return share


def _encoded(sets: HolderSets) -> list[bytes]:
    """Return each set as bytes, which begin with its name."""
    steps = np.diff(sets.members, prepend=0)
    steps[sets.start[:-1]] = sets.members[sets.start[:-1]]
    data, edges = steps.astype("<i4").tobytes(), (sets.start * 4).tolist()
    plain = [data[begin:end] for begin, end in zip(edges, edges[1:])]
    return [
        b"\0" + each if len(each) <= 4 * _PLAIN_RANKS else b"\1" + xxhash.xxh3_128_digest(each) + zlib.compress(each)
        for each in plain
    ]


def _name_of(encoded: bytes) -> bytes:
    return encoded[: 1 + _DIGEST_BYTES] if encoded[0] else encoded


def _decoded(encoded: bytes) -> np.ndarray:
    steps = zlib.decompress(encoded[1 + _DIGEST_BYTES :]) if encoded[0] else encoded[1:]
    return np.cumsum(np.frombuffer(steps, dtype="<i4"), dtype=np.int64)


def _entries(message: bytes) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position < len(message):
        amount, length = _ENTRY.unpack_from(message, position)
        position += _ENTRY.size + length
        yield amount, message[position - length : position]


def _entry(amount: int, encoded: bytes) -> bytes:
    return _ENTRY.pack(amount, len(encoded)) + encoded


class SharedLines:
    """The lines of all planners together: each planner makes the same calls, with messages in between."""

    def __init__(self, sets: HolderSets, amount: np.ndarray) -> None:
        """Take a planner's own sets, by places, and its bytes on the line of each."""
        self._sets, self._amount, self._encoded = sets, amount.tolist(), _encoded(sets)
        self._names = [*map(_name_of, self._encoded)]
        place = [xxhash.xxh3_64_intdigest(each) for each in self._names]
        width = sets.count.tolist()
        self._owner = [
            int(sets.members[begin + digest % count]) for begin, digest, count in zip(sets.start.tolist(), place, width)
        ]

    def ask(self) -> dict[int, bytes]:
        """Return this planner's messages to the owners of the sets, by place."""
        messages: dict[int, list[bytes]] = {}
        for owner, amount, encoded in zip(self._owner, self._amount, self._encoded):
            messages.setdefault(owner, []).append(_entry(amount, encoded))
        return {owner: b"".join(each) for owner, each in messages.items()}

    @staticmethod
    def answer(asked: Mapping[int, bytes]) -> tuple[bytes, dict[int, bytes]]:
        """Add up, as an owner, the planners' bytes; return the message to all ranks and those to each planner.

        ``asked``: :meth:`ask` of planners by place, in rising order.
        """
        total: dict[bytes, int] = {}
        sets: dict[bytes, bytes] = {}
        answers = {}
        for place, message in asked.items():
            before = []
            for amount, encoded in _entries(message):
                name = _name_of(encoded)
                before.append(total.get(name, 0))
                total[name] = before[-1] + amount
                sets.setdefault(name, encoded)
            answers[place] = np.asarray(before, dtype="<i8").tobytes()
        return b"".join(_entry(total[name], encoded) for name, encoded in sets.items()), answers

    def share(
        self, totals: Mapping[int, bytes], answers: Mapping[int, bytes], world: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the share of each member of this planner's sets, and the bytes before its shards on each line.

        Args:
            totals: The owners' messages to all ranks, by place.
            answers: The owners' messages to this one.
            world: Number of ranks.
        """
        table = [entry for message in totals.values() for entry in _entries(message)]
        members = [_decoded(encoded) for _, encoded in table]
        names = [_name_of(encoded) for _, encoded in table]
        kinds = [(len(each), int(each[-1] - each[0]), int(each[0]), name) for each, name in zip(members, names)]
        order = sorted(range(len(table)), key=kinds.__getitem__)
        start = np.cumsum([0, *(len(members[each]) for each in order)])
        sets = HolderSets(np.concatenate([np.zeros(0, dtype=np.int64), *(members[each] for each in order)]), start)
        share = share_out(sets, np.asarray([table[each][0] for each in order], dtype=np.int64), world)
        position = {names[each]: number for number, each in enumerate(order)}
        own = np.asarray([position[name] for name in self._names], dtype=np.int64)
        count = self._sets.count
        within = np.arange(len(self._sets.members)) - np.repeat(self._sets.start[:-1], count)
        before = {place: iter(np.frombuffer(each, dtype="<i8").tolist()) for place, each in answers.items()}
        return (
            share[np.repeat(start[own], count) + within],
            np.asarray([next(before[owner]) for owner in self._owner], dtype=np.int64),
        )

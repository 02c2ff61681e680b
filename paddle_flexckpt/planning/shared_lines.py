"""Lines of several planners: each lays the shards that it plans on the lines, one after another planner's.

One rank of each set, its *owner*, adds up the bytes of all planners on the set's line. It sends each planner the bytes
before its own, and all ranks the total. With the totals, every rank computes the same shares of all lines.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping

import numpy as np
import xxhash

from paddle_flexckpt.planning.holder_sets import HolderSets, share_out

# The most rows of all ranks for which every rank plans all keys: some 8 MiB to receive, and 0.1 s to plan.
SPREAD_ROWS = 1 << 17
# Bytes on the line, bytes of the set's ranks.
_ENTRY = struct.Struct("<QI")
# Sets of more ranks are compressed: mostly their ranks are at equal distances. A digest is their name, as hosts may
# compress differently.
_PLAIN_RANKS = 16
_DIGEST_BYTES = 16


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
        self, told: Mapping[int, bytes], answers: Mapping[int, bytes], world: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the share of each member of this planner's sets, and the bytes before its shards on each line.

        Args:
            told: The owners' messages to all ranks, by place.
            answers: The owners' messages to this one.
            world: Number of ranks.
        """
        table = [entry for message in told.values() for entry in _entries(message)]
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

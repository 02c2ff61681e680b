"""What a loss of power leaves, of a log of writes and flushes.

A disk keeps what it has when it answers a flush. Of later writes it keeps any, in no order; of one of them perhaps some
blocks of 4,096 bytes only, each whole or not at all. (btrfs counts on that: it is not mounted if some sectors of 512
bytes of its superblock are of one write and some of the next.) A write with FUA is a write and a flush here: loop
devices know no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from tests.filesystems.block_file import Entry, Part

BLOCK = 4096


@dataclass(frozen=True)
class State:
    """One disk.

    Attributes:
        cut: The power goes after so many entries of the log.
        durable: So many of them are on the disk, all up to the last flush.
        kept: Of the others, the parts that have come to the disk.
    """

    cut: int
    durable: int
    kept: tuple[Part, ...] = ()

    def describe(self, log: Sequence[Entry], around: int = 12) -> str:
        """The state, and the log before the cut."""
        kept = {number: (begin, end) for number, begin, end in self.kept}
        lines = [f"power lost after entry {self.cut} of {len(log)}; durable: the first {self.durable}"]
        for number in range(max(0, min(self.durable, self.cut - around)), self.cut):
            fate = ""
            if number >= self.durable and log[number].kind == "write":
                begin, end = kept.get(number, (0, 0))
                whole = end - begin == log[number].length
                fate = "kept" if whole else f"kept bytes {begin} to {end}" if end else "LOST"
            lines.append(f"  {number:5} {log[number]} {fate}".rstrip())
        return "\n".join(lines)


def choose(log: Sequence[Entry], random: Random, limit: int) -> list[State]:
    """States, each disk once, in the order of the log.

    All prefixes that end at a flush, or as many of them as are half of ``limit``, evenly; the others have parts of what
    was not flushed.
    """
    intervals = list(_intervals(log))
    # Before the next write, and before the next flush: what was reported by then must be there without those writes.
    prefixes = [State(cut, begin) for begin, end, writes in intervals for cut in (*writes[:1], end)]
    prefixes = list({_digest(state, log): state for state in prefixes}.values())
    room = max(limit // 2, 1)
    if len(prefixes) > room:
        prefixes = [prefixes[i * len(prefixes) // room] for i in range(room)]
    seen = {_digest(state, log): state for state in prefixes}
    tails = [interval for interval in intervals if interval[2]]
    for _ in range(20 * limit if tails else 0):
        if len(seen) >= limit:
            break
        state = _sample(log, random, *random.choice(tails))
        seen.setdefault(_digest(state, log), state)
    return sorted(seen.values(), key=lambda state: (state.durable, state.cut, state.kept))


def _intervals(log: Sequence[Entry]) -> Iterator[tuple[int, int, list[int]]]:
    """Begin, end and writes of what is between two flushes; flushes of nothing are none."""
    begin, writes = 0, []
    for number, entry in enumerate(log):
        if entry.kind == "write":
            writes.append(number)
        elif entry.kind == "flush" and writes:
            yield begin, number, writes
            begin, writes = number + 1, []
    yield begin, len(log), writes


def _sample(log: Sequence[Entry], random: Random, begin: int, end: int, writes: list[int]) -> State:
    count = random.randint(1, len(writes))
    cut = writes[count] if count < len(writes) else end
    some = writes[:count]
    way = random.randrange(5)
    if way == 0:
        lost = {random.choice(some)}
    elif way == 1:
        lost = set(some) - {random.choice(some)}
    elif way == 2:
        lost = set()
    else:
        chance = random.random()
        lost = {number for number in some if random.random() < chance}
    kept = {number: (0, log[number].length) for number in some if number not in lost}
    torn = [number for number in kept if _edges(log[number])]
    if torn and random.random() < 0.3:
        number = random.choice(torn)
        place, length = random.choice(_edges(log[number])), log[number].length
        kept[number] = random.choice([(0, place), (place, length)])
    return State(cut, begin, tuple((number, *part) for number, part in kept.items()))


def _edges(entry: Entry) -> range:
    """Where a write may be torn: the edges of blocks in it, from its beginning."""
    return range(BLOCK - entry.offset % BLOCK, entry.length, BLOCK)


def _digest(state: State, log: Sequence[Entry]) -> tuple[object, ...]:
    """Two states with the same one are the same disk at the same time."""
    blocks: dict[int, tuple[int, int]] = {}
    for number, begin, end in state.kept:
        entry = log[number]
        for place in (begin, *(edge for edge in _edges(entry) if begin < edge < end)):
            blocks[entry.offset + place] = (entry.digest, place)
    marks = sum(entry.kind == "mark" for entry in log[: state.cut])
    return state.durable, marks, frozenset(blocks.items())

"""A search for bytes that readers choke on, led by the lines that they reach: ``make fuzz``.

Inputs that reach something new are made small and kept in ``tests/attacks/corpus``, one directory per target; every
one of them is read again by ``tests/attacks/test_corpus.py``. An input that fails (see :mod:`tests.attacks.targets`)
is made small and kept there too, and the search ends with 1.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import random
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from paddle_flexckpt.catalog import CheckpointError
from tests.attacks.targets import TARGETS, Target, outcome

CORPUS = Path(__file__).parent / "corpus"
MOST_BYTES = 4096
# What is looked at: the readers, and what they are made of.
PARTS = tuple(f"/paddle_flexckpt/{room}/" for room in ("media", "native", "foreign", "catalog"))
HANG_SECONDS = 20
MEMORY_BYTES = 4 << 30
# One input in so many is looked at for the memory that it takes, as is every one that reaches something new.
MEMORY_EVERY = 4
Edges = frozenset


def corpus_of(target: Target) -> list[bytes]:
    """What has been kept for a target."""
    return [path.read_bytes() for path in sorted((CORPUS / target.name).glob("*")) if path.is_file()]


def keep(target: Target, data: bytes) -> Path:
    """Puts an input into the corpus."""
    path = CORPUS / target.name / hashlib.sha256(data).hexdigest()[:16]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


class Hang(BaseException):
    """An input is being read for too long; not an Exception, which a reader might take for an error of its own."""


@contextmanager
def _deadline() -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise Hang(f"no end after {HANG_SECONDS} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, HANG_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def edges_of(target: Target, data: bytes) -> Edges:
    """The steps from line to line that reading an input takes."""
    edges: set[tuple[str, int, int]] = set()

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if not any(part in file for part in PARTS):
            return None
        last = frame.f_code.co_firstlineno

        def step(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal last
            if event == "line":
                edges.add((file, last, frame.f_lineno))
                last = frame.f_lineno
            return step

        return step

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        target.read(data)
    except CheckpointError:
        pass
    finally:
        sys.settrace(before)
    return frozenset(edges)


def failure_of(target: Target, data: bytes) -> str | None:
    """What is wrong with how an input is read, or None."""
    try:
        with _deadline():
            outcome(target, data)
    except (Exception, Hang) as error:  # whatever it is, it is the finding
        return f"{type(error).__name__}: {str(error)[:500]}"
    return None


def smaller(data: bytes, is_good: Callable[[bytes], bool], seconds: float = 3) -> bytes:
    """A smaller input of which something still holds, as far as it is found in the time."""
    end = time.monotonic() + seconds
    step = max(1, len(data) // 2)
    while step and time.monotonic() < end:
        at = 0
        while at < len(data) and time.monotonic() < end:
            candidate = data[:at] + data[at + step :]
            if is_good(candidate):
                data = candidate
            else:
                at += step
        step //= 2
    return data


class Search:
    """The search of one target."""

    def __init__(self, target: Target, seed: int) -> None:
        """Args: target: what reads. seed: of the changes."""
        self.target = target
        self._random = random.Random(seed)
        self._inputs: list[bytes] = []
        self.edges: set[Any] = set()
        self.runs = 0
        self.kept = 0
        self.failures: list[tuple[bytes, str]] = []
        for data in (*target.seeds(), *corpus_of(target)):
            self.look_at(data, save=False)

    def run(self, seconds: float, most_runs: int | None = None) -> None:
        """Looks at changed inputs for some time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and (most_runs is None or self.runs < most_runs):
            data = self._changed()
            self.look_at(data)
            if self.failures:
                return

    def look_at(self, data: bytes, save: bool = True) -> None:
        """Reads one input, and keeps it if it reaches something new or fails."""
        self.runs += 1
        try:
            with _deadline():
                edges = edges_of(self.target, data)
            is_new = not edges <= self.edges
            reason = failure_of(self.target, data) if is_new or self.runs % MEMORY_EVERY == 0 else None
        except (Exception, Hang) as error:  # whatever it is, it is the finding
            edges, is_new, reason = frozenset(), False, f"{type(error).__name__}: {str(error)[:500]}"
        if reason is not None:
            kind = reason.partition(":")[0]
            data = smaller(data, lambda each: (failure_of(self.target, each) or "").startswith(kind + ":"))
            self.failures.append((data, failure_of(self.target, data) or reason))
            keep(self.target, data)
            return
        if not is_new:
            return
        if save:
            news = edges - self.edges
            data = smaller(data, lambda each: self._reaches(each, news))
            edges = edges_of(self.target, data)
            keep(self.target, data)
            self.kept += 1
        self.edges |= edges
        self._inputs.append(data)

    def _reaches(self, data: bytes, edges: Edges) -> bool:
        try:
            return edges <= edges_of(self.target, data)
        except Exception:  # another finding, which is not looked for now
            return False

    def _changed(self) -> bytes:
        choice, count = self._random, len(self._inputs)
        # The latest inputs lead to the next ones.
        data = self._inputs[max(choice.randrange(count), choice.randrange(count))]
        if not self.target.has_length or choice.random() < 0.2:
            return self._several_changes(data)[:MOST_BYTES]
        # The text and what follows it, with the length that the text has then.
        end = min(8 + int.from_bytes(data[:8], "little"), len(data))
        text, rest = data[8:end], data[end:]
        if choice.random() < 0.8:
            text = self._several_changes(text.rstrip(b" "))
            text += b" " * (-len(text) % choice.choice((1, 8)))
        else:
            rest = self._several_changes(rest)
        return (len(text).to_bytes(8, "little") + text + rest)[:MOST_BYTES]

    def _several_changes(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self._random.choice((1, 1, 2, 3, 5, 8))):
            self._change(changed)
        return bytes(changed)

    def _change(self, data: bytearray) -> None:
        choice = self._random
        at = choice.randrange(len(data) + 1)
        length = min(len(data) - at, int(choice.paretovariate(1)))
        kind = choice.randrange(10)
        word = choice.choice(self.target.words)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << choice.randrange(8)
        elif kind == 1:
            data[at : at + length] = choice.randbytes(length) if hasattr(choice, "randbytes") else bytes(length)
        elif kind in (2, 3):
            data[at:at] = word
        elif kind == 4:
            data[at : at + len(word)] = word
        elif kind == 5:
            del data[at : at + length]
        elif kind == 6:
            data[at:at] = data[at : at + length] * choice.choice((1, 1, 2, 8, 100))
        elif kind == 7 and len(data) >= 2:
            other = choice.choice(self._inputs)
            begin = choice.randrange(len(other) + 1)
            data[at : at + choice.randrange(64)] = other[begin : begin + choice.randrange(64)]
        elif kind == 8:
            # A number in a text.
            digits = [i for i, byte in enumerate(data) if 48 <= byte < 58]
            if digits:
                i = choice.choice(digits)
                data[i : i + 1] = str(choice.choice((0, 1, 2, 7, 16, 255, 1 << 31, 1 << 62, 1 << 64))).encode()
        else:
            size = choice.choice((1, 2, 4, 8))
            value = choice.choice((0, 1, 2, (1 << (8 * size - 1)) - 1, 1 << (8 * size - 1), (1 << 8 * size) - 1))
            data[at : at + size] = value.to_bytes(size, "little")


def distilled(target: Target, inputs: list[bytes]) -> list[bytes]:
    """A few of the inputs that reach what all of them reach."""
    reached = {data: edges_of(target, data) for data in inputs}
    wanted = frozenset().union(*reached.values()) if reached else frozenset()
    chosen: list[bytes] = []
    while wanted:
        best = max(reached, key=lambda data: (len(reached[data] & wanted), -len(data), data))
        chosen.append(best)
        wanted -= reached[best]
    return chosen


def distil(target: Target) -> int:
    """Removes from the corpus what reaches nothing that the rest and the seeds do not; returns how many are left."""
    seen = frozenset().union(*(edges_of(target, data) for data in target.seeds()))
    good = [data for data in corpus_of(target) if failure_of(target, data) is None]
    chosen = set(distilled(target, [data for data in good if not edges_of(target, data) <= seen]))
    for path in (CORPUS / target.name).glob("*"):
        if path.read_bytes() in good and path.read_bytes() not in chosen:
            path.unlink()
    return len(corpus_of(target))


def _job(arguments: tuple[str, float, int]) -> tuple[str, int, int, int, list[tuple[bytes, str]]]:
    name, seconds, seed = arguments
    if threading.current_thread() is threading.main_thread():
        # What asks for more than that is stopped, and found.
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    search = Search(TARGETS[name], seed)
    if not search.failures:
        search.run(seconds)
    return name, search.runs, search.kept, len(search.edges), search.failures


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.attacks.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60, help="for all targets together (default %(default)s)")
    parser.add_argument("--target", choices=sorted(TARGETS), action="append", help="all by default")
    parser.add_argument("--seed", type=int, default=None, help="of the changes; by default another one every time")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default %(default)s)")
    parser.add_argument("--distil", action="store_true", help="at the end, remove what the corpus does not need")
    options = parser.parse_args(arguments)
    names = options.target or list(TARGETS)
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    print(f"seed {seed}")
    each = options.seconds * options.jobs / len(names)
    failed = False
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=1) as pool:
        for name, runs, kept, edges, failures in pool.imap_unordered(_job, [(name, each, seed) for name in names]):
            print(f"{name:<20} {runs:>9,} inputs, {kept:>4} kept, {edges:>5} steps reached, {len(failures)} failures")
            for data, reason in failures:
                failed = True
                print(f"FAILURE in {name}: {reason}\n  {data[:200]!r}\n  kept as {keep(TARGETS[name], data)}")
        pool.close()
        pool.join()
    if options.distil:
        for name in names:
            print(f"{name:<20} {distil(TARGETS[name]):>4} inputs in the corpus")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

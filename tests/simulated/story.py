"""The story of a run: a line for what was worth one, with its time and process, for people and for comparison.

Tested in tests/simulation/test_shrink.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

Line = tuple[float, str, str]


def clock(seconds: float) -> str:
    """Return a time of the simulated world, to the millisecond."""
    minutes, rest = divmod(seconds, 60.0)
    hours, minutes = divmod(int(minutes), 60)
    return f"{hours:3d}:{minutes:02d}:{rest:06.3f}"


def timeline(lines: Iterable[Line]) -> str:
    """Return the lines one below the other; of a process that says several things at a time the name once."""
    found, before = [], ("", "")
    for when, who, text in lines:
        shown = clock(when), who
        same = shown == before
        found.append(f"{'' if same else shown[0]:>13}  {'' if same else who:<16} {text}".rstrip())
        before = shown
    return "\n".join(found)


def fingerprint(lines: Sequence[Line]) -> str:
    """Return what two runs have in common only if they are the same."""
    digest = hashlib.sha256()
    for when, who, text in lines:
        digest.update(f"{when!r}\t{who}\t{text}\n".encode())
    return digest.hexdigest()

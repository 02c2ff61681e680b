"""Keep plans of one group of ranks, so that a layout that comes again need not be gathered, checked and planned again.

A plan is a function of what all ranks described. Each rank finds a kept plan by a fingerprint of its own description.
It is used if all ranks have found one that was made of the same descriptions, which a short message of each tells.
So a change of a layout is noticed whichever rank it is on, and nothing is known by an address or an identity.

Tested in tests/live/test_kept_plans.py and tests/live/test_kept_loads.py.
"""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import xxhash

from paddle_flexckpt.catalog.wire import join, split
from paddle_flexckpt.engine.agreement import BRIEF_SAVE, Ranks, check_calls, is_brief
from paddle_flexckpt.native.names import SaveNames

# Plans of one group, and the bytes that all of them may have.
MOST_PLANS = 4
MOST_BYTES = 64 << 20
_BRIEF = struct.Struct("<2s16s8sQ16s")
_NO_TOKEN = bytes(16).hex()


def fingerprint(parts: Iterable[bytes]) -> bytes:
    """Return 16 bytes that are the same only for the same parts."""
    return xxhash.xxh3_128_digest(join(parts))


@dataclass(frozen=True, eq=False)
class KeptPlan:
    """Hold a plan of all ranks, as one of them needs it.

    Attributes:
        origin: Fingerprint of what it was made of: of the fingerprints of all ranks' descriptions.
        plan: The plan. It has no tensors.
        messages: What else the ranks told each other with their descriptions, the same as long as these are.
    """

    origin: bytes
    plan: Any
    messages: Sequence[bytes]


class BriefMessage(NamedTuple):
    """Say in 63 bytes that a rank that saves has kept a plan for what it was called with.

    Attributes:
        call: Which call that is (:mod:`~paddle_flexckpt.engine.agreement`).
        agreed: 16 bytes, the same on every rank that has the same plan and options.
        place: 8 bytes, for the place of a save's directory.
        names: The names of a save, on the ranks that know them.
    """

    call: bytes
    agreed: bytes
    place: bytes
    names: SaveNames

    @classmethod
    def of_save(cls, agreed: bytes, place: bytes, names: SaveNames | None) -> BriefMessage | None:
        """Return the message of a rank that saves; None if the names have no room in it."""
        names = names or SaveNames(0, _NO_TOKEN)
        has_room = names.unique_id < 1 << 64 and len(names.token) == len(_NO_TOKEN)
        return cls(BRIEF_SAVE, agreed, xxhash.xxh3_64_digest(place), names) if has_room else None

    def encode(self) -> bytes:
        """Return it as a message of one field."""
        names = self.names
        token = bytes.fromhex(names.token)
        return join([_BRIEF.pack(self.call, self.agreed, self.place, names.unique_id, token)])

    @classmethod
    def decode(cls, message: bytes) -> BriefMessage | None:
        """Return what a message says; None if it is none of these."""
        if len(message) != 8 + _BRIEF.size or message[8:10] != BRIEF_SAVE:
            return None
        call, agreed, place, unique_id, token = _BRIEF.unpack_from(message, 8)
        return cls(call, agreed, place, SaveNames(unique_id, token.hex()))


class KeptPlans:
    """Hold the plans of one group that were used last. Threads may share it."""

    def __init__(self) -> None:
        """Hold none yet."""
        self._lock = threading.Lock()
        self._plans: OrderedDict[bytes, tuple[KeptPlan, int]] = OrderedDict()

    def find(self, own: bytes) -> KeptPlan | None:
        """Return the plan that was kept for a fingerprint of this rank's description."""
        with self._lock:
            if own not in self._plans:
                return None
            self._plans.move_to_end(own)
            return self._plans[own][0]

    def keep(self, own: bytes, kept: KeptPlan, nbytes: int) -> None:
        """Keep a plan of so many bytes for a fingerprint of this rank's description, unless it is too large."""
        with self._lock:
            self._plans.pop(own, None)
            if nbytes > MOST_BYTES:
                return
            self._plans[own] = kept, nbytes
            while len(self._plans) > MOST_PLANS or sum([size for _, size in self._plans.values()]) > MOST_BYTES:
                self._plans.popitem(last=False)


def in_full(comm: Ranks, answers: list[bytes], mine: Callable[[], bytes], context: str) -> list[bytes]:
    """Return what all ranks have to say, after some were brief. One collective if some were.

    Args:
        comm: The ranks.
        answers: What each of them said first.
        mine: Gives what this one has to say, if it was brief.
        context: What is being done, for the error.

    Raises:
        ValidationError: Ranks are in different calls; the others wait for nothing then.
    """
    brief = [*map(is_brief, answers)]
    if not any(brief):
        return answers
    check_calls([split(answer)[0] if answer else b"" for answer in answers], context, comm.ranks)
    _, later = comm.together(lambda: (None, mine() if brief[comm.position] else b""), context)
    return [said or answer for said, answer in zip(later, answers)]

"""The cache of a group's plans: a layout that recurs is not gathered, checked and planned again.

A plan is a function of the arguments of all ranks. Each rank looks its own arguments up by their fingerprint. The
cached plan is used if all ranks have found plans with the same fingerprint, which they compare by a short message. So a
change of the layout on any rank is noticed. Addresses and identities of objects play no part.

Tested in tests/saving/test_plan_cache.py.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import xxhash

from paddle_flexckpt.catalog.wire import join, split
from paddle_flexckpt.transfer.agreement import Ranks, check_calls, is_brief

# The most plans of one group, and the most bytes of all of them.
MOST_PLANS = 4
MOST_BYTES = 64 << 20
# The part of a short message that is the same on all ranks, after the length of its only field: 2 bytes for the call,
# and a fingerprint of the plan and of the options to compare.
_AGREED = slice(8, 8 + 2 + 16)


class Plan(Protocol):
    """One rank's part of a plan of all ranks. It has no tensors."""

    @property
    def fingerprint(self) -> bytes:
        """Fingerprint of the arguments of all ranks."""

    @property
    def nbytes(self) -> int:
        """About how many bytes the plan takes."""


class Call(Protocol):
    """One rank's part of a call of all ranks, whose plan may be cached."""

    def describe(self) -> bytes:
        """Check this rank's arguments; return their fingerprint, or an empty one if the plan cannot be cached."""

    def short_message(self, plan: Any) -> bytes:
        """Return this rank's short message about a cached plan; empty if it does not use the plan."""

    def full_message(self) -> bytes:
        """Return this rank's full message."""


def fingerprint(parts: Iterable[bytes]) -> bytes:
    """Return 16 bytes that are the same only for the same parts."""
    return xxhash.xxh3_128_digest(join(parts))


def encode_short(call: bytes, agreed: bytes, more: bytes) -> bytes:
    """Return a short message: the call, the fingerprint that has to be equal on all ranks, and further data."""
    return join((call + agreed + more,))


class PlanCache:
    """A group's plans, as a cache of the last used ones. Threads may share it."""

    def __init__(self) -> None:
        """Begin empty."""
        self._lock = threading.Lock()
        self._plans: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()

    def find(self, key: bytes) -> Any:
        """Return the cached plan for a fingerprint of this rank's arguments, or None."""
        with self._lock:
            if key not in self._plans:
                return None
            self._plans.move_to_end(key)
            return self._plans[key][0]

    def put(self, key: bytes, plan: Plan) -> None:
        """Cache a plan for a fingerprint of this rank's arguments, unless it is too large."""
        if self.find(key) is plan:
            return
        nbytes = plan.nbytes
        with self._lock:
            self._plans.pop(key, None)
            if nbytes > MOST_BYTES:
                return
            self._plans[key] = plan, nbytes
            while len(self._plans) > MOST_PLANS or sum([size for _, size in self._plans.values()]) > MOST_BYTES:
                self._plans.popitem(last=False)


def find_common_plan(comm: Ranks, plans: PlanCache, call: Call, context: str) -> tuple[Any, list[bytes]]:
    """Take the first step of a call on all ranks: one collective, and one more if only some have a cached plan.

    Args:
        comm: The ranks.
        plans: This rank's cached plans.
        call: Its call.
        context: The context of errors.

    Returns:
        The plan, if all ranks have cached the same one, and the further data of their short messages; else None and
        all full messages.

    Raises:
        CheckpointError: A rank's arguments are wrong, or ranks are in different calls.
    """
    plan, answers = comm.together(functools.partial(_first_message, plans, call), context)
    if plan is not None and len({answer[_AGREED] for answer in answers}) == 1:
        return plan, [answer[_AGREED.stop :] for answer in answers]
    return None, gather_full(comm, answers, call.full_message, context)


def _first_message(plans: PlanCache, call: Call) -> tuple[Any, bytes]:
    key = call.describe()
    plan = plans.find(key) if key else None
    message = b"" if plan is None else call.short_message(plan)
    return (plan, message) if message else (None, call.full_message())


def gather_full(comm: Ranks, answers: list[bytes], mine: Callable[[], bytes], context: str) -> list[bytes]:
    """Return the full messages of all ranks. One collective if some messages were short.

    Args:
        comm: The ranks.
        answers: The first message of each.
        mine: Returns this rank's full message, if its first one was short.
        context: The context of the error.

    Raises:
        ValidationError: Ranks are in different calls; no rank is left waiting.
    """
    was_short = [*map(is_brief, answers)]
    if not any(was_short):
        return answers
    check_calls([split(answer)[0] if answer else b"" for answer in answers], context, comm.ranks)
    _, later = comm.together(lambda: (None, mine() if was_short[comm.position] else b""), context)
    return [full or answer for full, answer in zip(later, answers)]

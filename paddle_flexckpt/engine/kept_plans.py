"""Keep plans of one group of ranks, so that a layout that comes again need not be gathered, checked and planned again.

A plan is a function of what all ranks are called with. Each rank finds a kept plan by a fingerprint of its own part of
that. The plan is used if all ranks have found one that was made of the same, which a short message of each tells. So a
change of a layout is noticed whichever rank it is on, and nothing is known by an address or an identity.

Tested in tests/live/test_kept_plans.py and tests/live/test_kept_loads.py.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import xxhash

from paddle_flexckpt.catalog.wire import join, split
from paddle_flexckpt.engine.agreement import Ranks, check_calls, is_brief

# Plans of one group, and the bytes that all of them may have.
MOST_PLANS = 4
MOST_BYTES = 64 << 20
# The part of a brief message that is the same on all ranks, behind the length of its only field: 2 bytes for the call,
# and a fingerprint of the plan and of what else ranks have to agree about.
_AGREED = slice(8, 8 + 2 + 16)


class Plan(Protocol):
    """Stand for a plan of all ranks, as one of them needs it. It has no tensors."""

    @property
    def origin(self) -> bytes:
        """Fingerprint of what it was made of, on all ranks."""

    @property
    def nbytes(self) -> int:
        """About how many bytes it takes."""


class Call(Protocol):
    """Stand for a call of all ranks, of which a plan may have been kept."""

    def describe(self) -> bytes:
        """Look at what this rank is called with; return a fingerprint, or nothing where no plan can be kept for it."""

    def in_brief(self, plan: Any) -> bytes:
        """Return what this rank tells first if all may have kept this plan (:func:`brief`); nothing if it will not."""

    def in_full(self) -> bytes:
        """Return what this rank tells first otherwise."""


def fingerprint(parts: Iterable[bytes]) -> bytes:
    """Return 16 bytes that are the same only for the same parts."""
    return xxhash.xxh3_128_digest(join(parts))


def brief(call: bytes, agreed: bytes, more: bytes) -> bytes:
    """Return the message of a rank that has kept a plan: which call that is, what all have to agree about, and more."""
    return join((call + agreed + more,))


class KeptPlans:
    """Hold the plans of one group that were used last. Threads may share it."""

    def __init__(self) -> None:
        """Hold none yet."""
        self._lock = threading.Lock()
        self._plans: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()

    def find(self, own: bytes) -> Any:
        """Return the plan that was kept for a fingerprint of this rank's part of a call, or None."""
        with self._lock:
            if own not in self._plans:
                return None
            self._plans.move_to_end(own)
            return self._plans[own][0]

    def keep(self, own: bytes, plan: Plan) -> None:
        """Keep a plan for a fingerprint of this rank's part of a call, unless it is too large."""
        if self.find(own) is plan:
            return
        nbytes = plan.nbytes
        with self._lock:
            self._plans.pop(own, None)
            if nbytes > MOST_BYTES:
                return
            self._plans[own] = plan, nbytes
            while len(self._plans) > MOST_PLANS or sum([size for _, size in self._plans.values()]) > MOST_BYTES:
                self._plans.popitem(last=False)


def recall(comm: Ranks, plans: KeptPlans, call: Call, context: str) -> tuple[Any, list[bytes]]:
    """Take the first step of a call on all ranks. One collective; one more where only some have kept a plan.

    Args:
        comm: The ranks.
        plans: Those that this rank has kept.
        call: What it is called with.
        context: What is being done, for errors.

    Returns:
        The plan, if all ranks have kept the same one, and what else each told in brief; else None, and what each told
        in full.

    Raises:
        CheckpointError: A rank could not look at what it is called with, or ranks are in different calls.
    """
    plan, answers = comm.together(functools.partial(_tell, plans, call), context)
    if plan is not None and len({answer[_AGREED] for answer in answers}) == 1:
        return plan, [answer[_AGREED.stop :] for answer in answers]
    return None, in_full(comm, answers, call.in_full, context)


def _tell(plans: KeptPlans, call: Call) -> tuple[Any, bytes]:
    own = call.describe()
    plan = plans.find(own) if own else None
    message = b"" if plan is None else call.in_brief(plan)
    return (plan, message) if message else (None, call.in_full())


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
    was_brief = [*map(is_brief, answers)]
    if not any(was_brief):
        return answers
    check_calls([split(answer)[0] if answer else b"" for answer in answers], context, comm.ranks)
    _, later = comm.together(lambda: (None, mine() if was_brief[comm.position] else b""), context)
    return [said or answer for said, answer in zip(later, answers)]

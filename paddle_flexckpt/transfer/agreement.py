"""Agreement of ranks: one rank's error is raised on all, and calls in which ranks differ are refused.

Tested in tests/transfer/test_agreement.py, tests/communication/test_group_communicators.py
and tests/loading/test_options.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from paddle_flexckpt.catalog import ValidationError
from paddle_flexckpt.catalog.texts import format_ranks
from paddle_flexckpt.catalog.wire import split

Result = TypeVar("Result")
# The most views that an error lists.
_MOST = 8
# A message may begin with this in place of a call's options: they are the same as in the earlier call.
BRIEF_SAVE, BRIEF_RUN, BRIEF_PUSH = b"\0s", b"\0r", b"\0p"
_BRIEF = {
    BRIEF_SAVE: "save_state_dict",
    BRIEF_RUN: "ReshardPlan.run",
    BRIEF_PUSH: "WeightChannel.push",
}


class Ranks(Protocol):
    """The ranks that take part in a call, such as :class:`~paddle_flexckpt.ranks.communicator.Communicator`."""

    ranks: tuple[int, ...]
    position: int

    @property
    def rank(self) -> int:
        """Return this rank's global number."""

    @property
    def size(self) -> int:
        """Return the number of members."""

    def together(self, work: Callable[[], tuple[Result, bytes]], context: str = "") -> tuple[Result, list[bytes]]:
        """Take a step on every member; raise on all if it failed on one."""


class Solo:
    """A single process as :class:`Ranks`: its errors are raised unchanged."""

    ranks: tuple[int, ...] = (0,)
    position = rank = 0
    size = 1

    def together(self, work: Callable[[], tuple[Result, bytes]], context: str = "") -> tuple[Result, list[bytes]]:
        """Take a step."""
        result, payload = work()
        return result, [payload]


def is_brief(answer: bytes) -> bool:
    """Return whether a message has the short form, without a call's options."""
    return answer[8:10] in _BRIEF


def check_coordinator(comm: Ranks, coordinator_rank: int) -> None:
    """Raise ValidationError if the coordinator is not a member of the group."""
    if not isinstance(coordinator_rank, int) or not 0 <= coordinator_rank < comm.size:
        raise ValidationError(
            f"coordinator_rank counts within the process group, 0 to {comm.size - 1}; got {coordinator_rank!r}. "
            "Remedy (FC101): give one of these"
        )


def check_same(heads: Sequence[bytes], context: str, ranks: Sequence[int] | None = None) -> None:
    """Raise ValidationError, the same on every rank, if ranks disagree about a call.

    Args:
        heads: Every rank's view, as JSON. The member ``context`` of an object is not compared: ranks may reach one
            checkpoint by different paths. The error has the first rank's.
        context: The context of the error, if heads have none.
        ranks: Numbers of the ranks, for the error; by default it has the views alone.
    """
    if len(set(heads)) != 1:
        views = _objects(heads)
        if views and len({json.dumps({**each, "context": ""}, sort_keys=True) for each in views}) == 1:
            return
        if views:
            context = views[0].get("context", context)
        check_calls(heads, context, ranks)
        views_of: dict[str, list[int]] = {}
        for rank, view in zip(range(len(heads)) if ranks is None else ranks, _differences(heads)):
            views_of.setdefault(view, []).append(rank)
        # Without numbers of ranks, the views may be those of other things than ranks.
        seen = "; ".join(sorted(views_of)) if ranks is None else by_rank(views_of)
        remedy = (
            "Remedy (FC502): call with the same arguments on every rank; if the checkpoint differs, a save has just "
            "ended: give unique_id"
        )
        raise ValidationError([f"ranks disagree: {seen}. {remedy}"], context)


def check_calls(heads: Sequence[bytes], context: str, ranks: Sequence[int] | None = None) -> None:
    """Raise ValidationError if ranks are not in the same call; arguments as in :func:`check_same`."""
    met: dict[str, list[int]] = {}
    for rank, head in zip(range(len(heads)) if ranks is None else ranks, heads):
        met.setdefault(_call_of(head), []).append(rank)
    if len(met) > 1:
        remedy = "Remedy (FC502): make the same calls in the same order on every rank"
        raise ValidationError([f"ranks do not make the same call: {by_rank(met)}. {remedy}"], context)


def by_rank(ranks: Mapping[str, Sequence[int]]) -> str:
    """Return texts with the ranks that have each; of many the first ones."""
    texts = [f"rank{'s' * (len(those) > 1)} {format_ranks(those)}: {text}" for text, those in ranks.items()]
    more = [f"and {len(texts) - _MOST} more"] if len(texts) > _MOST else []
    return "; ".join([*texts[:_MOST], *more])


def _call_of(head: bytes) -> str:
    """Return the public call that a rank is in, from the first field of its message."""
    if head[:2] in _BRIEF:
        return _BRIEF[head[:2]]
    try:
        views = json.loads(head)
        return str(views["call"])
    except (ValueError, KeyError, TypeError):
        return "a later step of a call"


def _objects(heads: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return every rank's view if all are JSON objects; else an empty list."""
    try:
        views = [json.loads(head) for head in heads]
    except ValueError:
        return []
    return views if all(isinstance(each, dict) for each in views) else []


def _differences(heads: Sequence[bytes]) -> list[str]:
    """Return every rank's view: of JSON objects only the members in which they differ."""
    views = _objects(heads)
    if not views:
        return [head.decode() for head in heads]
    absent = object()
    names = dict.fromkeys(name for each in views for name in each)
    differ = [name for name in names if any(each.get(name, absent) != views[0].get(name, absent) for each in views)]
    return [json.dumps({name: each[name] for name in differ if name in each}) for each in views]


def check_heads(answers: list[bytes], context: str, ranks: Sequence[int] | None = None) -> list[tuple[bytes, ...]]:
    """Check that the first field of all ranks' messages is the same, and return the others, field by field.

    Args:
        answers: The messages.
        context: The context of the error.
        ranks: Numbers of the ranks; by default they are counted.

    Raises:
        ValidationError: Ranks disagree; the same on every rank.
    """
    messages = [split(answer) for answer in answers]
    # The first check: ranks that disagree may not even be in the same step.
    check_same([message[0] if message else b"" for message in messages], context, ranks)
    return list(zip(*(message[1:] for message in messages)))

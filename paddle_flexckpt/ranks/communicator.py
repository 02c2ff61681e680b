"""Communicators: messages between ranks, and how an error on one becomes an error on all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from paddle_flexckpt.catalog import CheckpointError, LostRankError, ValidationError
from paddle_flexckpt.catalog.errors import Failure, combine
from paddle_flexckpt.catalog.wire import join, pack_by_position, split, unpack_by_position

Result = TypeVar("Result")


class Communicator(ABC):
    """A connection of the ranks that take part in one call.

    An exchange sends data: :meth:`all_gather` and :meth:`all_to_all`. A step does some work first, and an error on one
    member is raised on all of them: :meth:`together` (then everybody's payload goes to everybody), :meth:`trade` (then
    payloads go to single members) and :meth:`lead` (one member works). :meth:`agree` is the end of a step.

    Attributes:
        ranks: Global ranks of the members, in the group's order.
        position: This rank's place in ``ranks``.
        collectives: Number of collectives so far.
        refusal: Why this rank cannot take part; its first step reports it to all others.
        plans: Plans of earlier calls for these ranks, for later calls.
    """

    refusal: ValidationError | None = None

    def __init__(self, ranks: tuple[int, ...], position: int) -> None:
        self.ranks = ranks
        self.position = position
        self.collectives = 0
        self.plans: object | None = None

    @property
    def rank(self) -> int:
        """Return this rank's global number."""
        return self.ranks[self.position]

    @property
    def size(self) -> int:
        """Return the number of members."""
        return len(self.ranks)

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Return every member's payload, in the group's order."""
        self.collectives += 1
        return self._all_gather(payload) if self.size > 1 else [payload]

    @abstractmethod
    def _all_gather(self, payload: bytes) -> list[bytes]: ...

    def all_to_all(self, note: bytes, payloads: Mapping[int, bytes]) -> tuple[dict[int, bytes], dict[int, bytes]]:
        """Send each member a payload of its own, and a note to all.

        Args:
            note: For all members; mostly empty.
            payloads: The payloads for others and this member itself, by position.

        Returns:
            The notes of the members that have one, and the payloads for this member, both by position in rising order.
        """
        self.collectives += 1
        if self.size == 1:
            return ({self.position: note} if note else {}), dict(payloads)
        return self._all_to_all(note, payloads)

    def _all_to_all(self, note: bytes, payloads: Mapping[int, bytes]) -> tuple[dict[int, bytes], dict[int, bytes]]:
        """Implement :meth:`all_to_all` by gathering everything: some members can only send everything to everybody."""
        gathered = [split(each) for each in self._all_gather(join((note, *pack_by_position(payloads))))]
        own = [unpack_by_position(parts[1:]).get(self.position) for parts in gathered]
        return _present(parts[0] or None for parts in gathered), _present(own)

    def together(self, work: Callable[[], tuple[Result, bytes]], context: str = "") -> tuple[Result, list[bytes]]:
        """Take a step on every member and go on only if it went well on all of them.

        Args:
            work: The step; returns its result for this rank, and a payload for the others.
            context: What is being done, for the error.

        Returns:
            This rank's result, and every member's payload in the group's order.

        Raises:
            CheckpointError: The step failed somewhere; the same error on every member.
        """
        try:
            if self.refusal is not None:
                raise self.refusal
            result, payload = work()
        except Exception as error:
            self.agree(error, context=context)
            raise  # not reached: agree() raises on every member
        return result, self.agree(None, payload, context)

    def lead(self, leader: int, work: Callable[[], object], context: str = "") -> None:
        """Run ``work`` on the member at one position; go on only if it succeeds.

        Raises:
            CheckpointError: The step failed; the same error on every member.
        """
        self.together(lambda: (work() if self.position == leader else None, b""), context)

    def check_awaited(self) -> None:  # noqa: B027
        """Raise LostRankError, in the work of :meth:`lead`, if another member is known to have given up on this one."""

    def agree(self, error: Exception | None, payload: bytes = b"", context: str = "") -> list[bytes]:
        """Exchange outcomes: return every member's payload, or raise the same error on every member.

        ``error`` is this rank's error, if there is one.

        Raises:
            CheckpointError: A rank has failed; all ranks' problems are in the text, with their rank.
            LostRankError: A rank has died; the same error on every other rank.
        """
        payload = b"+" + payload if error is None else encode_failure(error, context)
        gathered = _exchange(lambda: self.all_gather(payload), error, context)
        raise_failures(self.ranks, enumerate(gathered), error)
        return [answer[1:] for answer in gathered]

    def trade(
        self, work: Callable[[], tuple[Result, bytes, Mapping[int, bytes]]], context: str = ""
    ) -> tuple[Result, dict[int, bytes], dict[int, bytes]]:
        """Take a step on every member, as :meth:`together` does, after which members send payloads to single members.

        Args:
            work: The step; returns its result for this rank, a note for all, and the payloads for members by position.
            context: What is being done, for the error.

        Returns:
            This rank's result, the notes of those that have one, and the payloads for this rank, by position.

        Raises:
            CheckpointError: The step failed somewhere; the same error on every member.
        """
        failure: Exception | None = None
        payloads: Mapping[int, bytes] = {}
        try:
            result, note, payloads = work()
            note = b"+" + note if note else b""
        except Exception as error:
            failure, note = error, encode_failure(error, context)
        notes, received = _exchange(lambda: self.all_to_all(note, payloads), failure, context)
        raise_failures(self.ranks, notes.items(), failure)
        return result, {position: each[1:] for position, each in notes.items()}, received


def _exchange(collective: Callable[[], Result], error: Exception | None, context: str) -> Result:
    try:
        return collective()
    except LostRankError as lost:
        # This rank's own error, if there is one, becomes the cause.
        raise type(lost)(f"{context}: {lost}" if context else str(lost)) from error or lost.__cause__


def raise_failures(ranks: Sequence[int], answers: Iterable[tuple[int, bytes]], error: Exception | None) -> None:
    """Raise the same error on every member if one of those that answered, by position, has failed."""
    failures = [(ranks[each], split(answer[1:])) for each, answer in answers if answer[:1] == b"-"]
    if failures:
        combined = combine([(rank, Failure.decode(failure)) for rank, (_, failure) in failures])
        # Ranks may have been called with different paths; the text has that of the first one that failed.
        cause: BaseException | None = error
        while isinstance(cause, CheckpointError):  # the text has it; others show a place
            cause = cause.__cause__
        raise combined.error(failures[0][1][0].decode()) from cause


def encode_failure(error: Exception, context: str) -> bytes:
    """Return the answer of a member that has failed, for :func:`raise_failures`."""
    return b"-" + join((context.encode(), Failure.of(error).encode()))


def _present(values: Iterable[bytes | None]) -> dict[int, bytes]:
    return {position: value for position, value in enumerate(values) if value is not None}


class SoloCommunicator(Communicator):
    """A rank alone: a process without a distributed environment, or a rank that saves for itself."""

    def __init__(self, rank: int = 0) -> None:
        """Args: rank: the rank's global number."""
        super().__init__((rank,), 0)

    def _all_gather(self, payload: bytes) -> list[bytes]:
        return [payload]

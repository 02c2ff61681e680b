"""Communicators: the little that ranks must tell each other, and how an error on one becomes an error on all.

What ranks tell each other goes through host channels (docs/design.md, "How ranks agree"). Paddle's groups belong to the
training: a call that one rank makes alone must not answer a collective that the others make there. A device's backend
would take it all through device memory.
"""

from __future__ import annotations

import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from paddle_flexckpt.catalog import LostRankError, ValidationError
from paddle_flexckpt.catalog.errors import Failure, combine
from paddle_flexckpt.catalog.wire import join, pack_by_position, split, unpack_by_position
from paddle_flexckpt.engine.kept_plans import KeptPlans
from paddle_flexckpt.live.host_channel import HostChannel
from paddle_flexckpt.live.lost_ranks import announce, default_store, describe_lost_ranks
from paddle_flexckpt.live.transport import SocketTransport, Transport
from paddle_flexckpt.overlaps import finish_steps

Result = TypeVar("Result")
# Backends of Paddle whose collectives work on device memory.
DEVICE_BACKENDS = frozenset(("nccl", "bkcl", "xccl", "flagcx"))


class Communicator(ABC):
    """Connect the ranks that take part in one call.

    Attributes:
        ranks: Global ranks of the members, in the group's order.
        position: This rank's place in ``ranks``.
        collectives: Number of collectives so far.
        kept: Plans for layouts that come again.
        refusal: Why this rank cannot do what it was asked for; its first step tells all others.
    """

    refusal: ValidationError | None = None

    def __init__(self, ranks: tuple[int, ...], position: int) -> None:
        self.ranks = ranks
        self.position = position
        self.collectives = 0
        self.kept = KeptPlans()

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
        """Give each member what is for it alone, and a note to all.

        Args:
            note: For all members; mostly empty.
            payloads: What is for others and this member itself, by position.

        Returns:
            The notes of the members that have one, and what is for this member, both by position in rising order.
        """
        self.collectives += 1
        if self.size == 1:
            return ({self.position: note} if note else {}), dict(payloads)
        return self._all_to_all(note, payloads)

    def _all_to_all(self, note: bytes, payloads: Mapping[int, bytes]) -> tuple[dict[int, bytes], dict[int, bytes]]:
        """Do so where members can only say everything to everybody, as with gloo."""
        said = [split(each) for each in self._all_gather(join((note, *pack_by_position(payloads))))]
        own = [unpack_by_position(parts[1:]).get(self.position) for parts in said]
        return _present(parts[0] or None for parts in said), _present(own)

    def open_transport(self) -> Transport:
        """Return a transport for tensor data between the members through host memory."""
        return SocketTransport(self.ranks, self.position)

    @property
    def device_group(self) -> Any:
        """Return Paddle's group of the members if its collectives work on device memory, or None."""
        return None

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

    def agree(self, error: Exception | None, payload: bytes = b"", context: str = "") -> list[bytes]:
        """Exchange outcomes: return every member's payload, or raise the same error on every member.

        ``error`` is what went wrong on this rank, if anything did.

        Raises:
            CheckpointError: Something went wrong somewhere; all ranks' problems are in the text, with their rank.
            LostRankError: A rank has gone; the same on every rank that has not.
        """
        payload = b"+" + payload if error is None else _failed(error, context)
        gathered = _exchange(lambda: self.all_gather(payload), error, context)
        _raise_failures(self.ranks, enumerate(gathered), error)
        return [answer[1:] for answer in gathered]

    def trade(
        self, work: Callable[[], tuple[Result, bytes, Mapping[int, bytes]]], context: str = ""
    ) -> tuple[Result, dict[int, bytes], dict[int, bytes]]:
        """Take a step as in :meth:`together`, in which members have something to say to each alone.

        Args:
            work: The step; returns its result for this rank, a note for all, and what is for each member by position.
            context: What is being done, for the error.

        Returns:
            This rank's result, the notes of those that have one, and what is for this rank, by position.

        Raises:
            CheckpointError: The step failed somewhere; the same error on every member.
        """
        failure: Exception | None = None
        payloads: Mapping[int, bytes] = {}
        try:
            result, note, payloads = work()
            note = b"+" + note if note else b""
        except Exception as error:
            failure, note = error, _failed(error, context)
        notes, received = _exchange(lambda: self.all_to_all(note, payloads), failure, context)
        _raise_failures(self.ranks, notes.items(), failure)
        return result, {position: each[1:] for position, each in notes.items()}, received


def _exchange(collective: Callable[[], Result], error: Exception | None, context: str) -> Result:
    try:
        return collective()
    except LostRankError as lost:
        # This rank's own error, if there is one, is the context of that.
        raise LostRankError(f"{context}: {lost}" if context else str(lost)) from error or lost.__cause__


def _raise_failures(ranks: Sequence[int], answers: Iterable[tuple[int, bytes]], error: Exception | None) -> None:
    """Raise the same error on every member if one of those that answered, by position, has failed."""
    failures = [(ranks[each], split(answer[1:])) for each, answer in answers if answer[:1] == b"-"]
    if failures:
        combined = combine([(rank, Failure.decode(failure)) for rank, (_, failure) in failures])
        # Ranks may have been called with different paths; the text is that of the first one that failed.
        raise combined.error(failures[0][1][0].decode()) from error


def _failed(error: Exception, context: str) -> bytes:
    return b"-" + join((context.encode(), Failure.of(error).encode()))


def _present(values: Iterable[bytes | None]) -> dict[int, bytes]:
    return {position: value for position, value in enumerate(values) if value is not None}


class SoloCommunicator(Communicator):
    """Stand for one rank alone: a process without a distributed environment, or a rank that saves for itself."""

    def __init__(self, rank: int = 0) -> None:
        """Args: rank: the rank's global number."""
        super().__init__((rank,), 0)

    def _all_gather(self, payload: bytes) -> list[bytes]:
        return [payload]


class PaddleCommunicator(Communicator):
    """Connect the members of a Paddle process group."""

    def __init__(self, group: Any) -> None:
        """Args: group: a paddle.distributed Group that this rank is in."""
        import paddle.distributed as dist

        # Not from group.rank: Paddle gives -1 for a group of one, member or not.
        ranks, rank = tuple(int(rank) for rank in group.ranks), int(dist.get_rank())
        if rank not in ranks:
            raise ValidationError([f"rank {rank} is not a member of the process group of ranks {list(ranks)}"])
        super().__init__(ranks, ranks.index(rank))
        self._group = group
        self._channel: HostChannel
        store = default_store()
        if store is not None:
            try:
                announce(store, rank)
            except Exception as error:
                raise LostRankError(describe_lost_ranks(None, error)) from error
        if self.size > 1:
            if store is None:
                raise ValidationError(
                    f"ranks {list(ranks)} cannot agree on anything: the job has no key-value store through which their "
                    "hosts could meet. Remedy: start it with paddle.distributed.launch, and call "
                    "paddle.distributed.init_parallel_env() or fleet.init() first"
                )
            self._channel = open_channel(group, ranks, self.position)

    def _all_gather(self, payload: bytes) -> list[bytes]:
        return self._channel.all_gather(payload)

    def _all_to_all(self, note: bytes, payloads: Mapping[int, bytes]) -> tuple[dict[int, bytes], dict[int, bytes]]:
        return self._channel.all_to_all(note, payloads)

    @property
    def device_group(self) -> Any:
        """Implement :attr:`Communicator.device_group`."""
        return self._group if _backend(self._group) in DEVICE_BACKENDS else None


def _backend(group: Any) -> str:
    return str(getattr(group, "backend", "") or "").lower()


def _global_group() -> Any:
    from paddle.distributed.communication.group import _get_global_group

    return _get_global_group()


def open_channel(group: Any, ranks: tuple[int, ...], position: int) -> HostChannel:
    """Return the channel of a group, whose members meet once and stay connected as long as they live."""
    return _host_channel(int(group.id), ranks, position)


@functools.cache
def _host_channel(group_id: int, ranks: tuple[int, ...], position: int) -> HostChannel:
    name = hashlib.sha256(repr((group_id, ranks)).encode()).hexdigest()[:16]
    return HostChannel(default_store(), name, ranks, position)


@functools.cache
def _kept_plans(ranks: tuple[int, ...]) -> KeptPlans:
    """Return the plans of the calls that these ranks make together: a communicator lasts for one call."""
    return KeptPlans()


def communicator_for(process_group: Any = None) -> Communicator:
    """Return the communicator of a call. What the ranks' last training step has left under way is finished.

    Args:
        process_group: None for all ranks of the job (or the one process there is), ``"self"`` for this rank alone, a
            Paddle group, or a Communicator. Anything else is refused in the first step, on all ranks of the job: they
            are waited for by this one, as it cannot know which it was to be called with.
    """
    if isinstance(process_group, Communicator):
        finish_steps(process_group.ranks)
        return process_group
    import paddle.distributed as dist

    is_known = process_group is None or process_group == "self" or hasattr(process_group, "ranks")
    if not dist.is_initialized():
        comm: Communicator = SoloCommunicator()
    elif process_group == "self":
        comm = SoloCommunicator(int(dist.get_rank()))
    else:
        comm = PaddleCommunicator(process_group if is_known and process_group is not None else _global_group())
    comm.kept = _kept_plans(comm.ranks)
    if not is_known:
        comm.refusal = ValidationError(
            "process_group has to be a group of paddle.distributed, 'self' or None; got "
            f"{process_group!r} ({type(process_group).__name__})"
        )
    finish_steps(comm.ranks)
    return comm

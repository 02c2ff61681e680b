"""Exchange pieces between the devices of several ranks, in rounds of the backend's all-to-all.

Both ends of a message know its pieces from the plan, so a message is the pieces' elements, each piece at a multiple of
16 bytes. Messages are cut into rounds of bounded size. All sizes follow from what every rank sends to every other, so
the ranks agree once, before the first round. A rank on which something fails takes part in the remaining rounds, with
whatever its buffers hold, and says so in the agreement that follows: no other rank is left waiting in a collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paddle_flexckpt.algebra import StridedCopy, row_major_strides
from paddle_flexckpt.catalog import Catalog, dtype_of
from paddle_flexckpt.execution.transfer import AnyStorage, Storage, copy_values
from paddle_flexckpt.planning import ExchangePlan, Pieces
from paddle_flexckpt.runtime.device_memory import DeviceMemory, current_device

# Bytes of one round, to send and to receive. With the values of one piece, gathered on their way, three times that is
# all the device memory that an exchange takes: less than 64 MiB, at any size of the state.
ROUND_BYTES = 16 << 20
# Every piece and every round starts at a multiple of this: the widest element, and what devices like to read at.
ALIGNMENT = 16


@dataclass(frozen=True, eq=False)
class Message:
    """The pieces that go from one rank to another.

    Attributes:
        pieces: In the order in which both ranks have them.
        itemsize: int64 ``[n]``, bytes of one element of each.
        begin: int64 ``[n]``, where each starts in the message, in bytes.
        nbytes: Length of the message, a multiple of ``ALIGNMENT``.
    """

    pieces: Pieces
    itemsize: np.ndarray
    begin: np.ndarray
    nbytes: int

    @classmethod
    def of(cls, pieces: Pieces, source: Catalog) -> Message:
        """Lay pieces out, one after the other."""
        itemsize = source.itemsize[pieces.source].astype(np.int64)
        length = -(-pieces.size * itemsize // ALIGNMENT) * ALIGNMENT
        return cls(pieces, itemsize, np.cumsum(length) - length, int(length.sum()))

    def parts(self, begin: int, end: int) -> list[tuple[int, int, int, int]]:
        """Return the parts of pieces in a stretch of the message.

        Args:
            begin: First byte of the stretch, a multiple of ``ALIGNMENT``.
            end: Its end, likewise.

        Returns:
            ``(piece, first element, end element, byte of the stretch)`` for each.
        """
        size = self.pieces.size
        first = int(np.searchsorted(self.begin, begin, side="right")) - 1
        found = []
        for piece in range(max(first, 0), int(np.searchsorted(self.begin, end, side="left"))):
            at, width = int(self.begin[piece]), int(self.itemsize[piece])
            start = max(0, begin - at) // width
            stop = min(int(size[piece]), (end - at) // width)
            if stop > start:
                found.append((piece, start, stop, at + start * width - begin))
        return found


@dataclass(frozen=True, eq=False)
class Rounds:
    """How messages are cut, the same on every rank.

    Attributes:
        count: Number of rounds.
        quota: By pair of (sender's, receiver's) position in the group, the most bytes of a round.
    """

    count: int
    quota: Mapping[tuple[int, int], int]

    @classmethod
    def of(cls, traffic: Sequence[Mapping[int, int]], round_bytes: int) -> Rounds:
        """Cut messages so that no rank sends or receives more than a round's bytes in a round.

        A rank's room is shared by those that it has to do with, not by all ranks.

        Args:
            traffic: For every position, the bytes that it sends to others, by their position.
            round_bytes: The most that a rank sends, and the most that it receives, in one round.
        """
        senders = np.zeros(len(traffic), dtype=np.int64)
        for sent in traffic:
            for receiver in sent:
                senders[receiver] += 1
        quota, count = {}, 0
        for sender, sent in enumerate(traffic):
            for receiver, nbytes in sent.items():
                share = round_bytes // max(len(sent), int(senders[receiver])) // ALIGNMENT * ALIGNMENT
                quota[sender, receiver] = max(ALIGNMENT, share)
                count = max(count, -(-nbytes // quota[sender, receiver]))
        return cls(count, quota)


class _Side:
    """The messages that one rank sends, or those that it receives, round by round."""

    def __init__(self, messages: Mapping[int, Message], quota: Mapping[int, int], here: int, size: int) -> None:
        self._messages, self._quota, self._here, self._size = messages, quota, here, size
        self.room = ALIGNMENT + sum(min(quota[position], message.nbytes) for position, message in messages.items())

    def sizes(self, number: int) -> list[int]:
        """Return the bytes of a round, by position in the group."""
        sizes = [0] * self._size
        for position, message in self._messages.items():
            quota = self._quota[position]
            sizes[position] = min(max(message.nbytes - number * quota, 0), quota)
        # One unit goes to this rank itself, so that no rank has nothing to send: a tensor without elements has no
        # memory to hand to a backend, and a slice without elements is not contiguous, which backends refuse.
        sizes[self._here] = ALIGNMENT
        return sizes

    def parts(self, number: int) -> Iterator[tuple[Pieces, int, int, int, int]]:
        """Yield what a round has: pieces, number of the piece, first element, end element, byte of the round."""
        offset = 0
        for position, nbytes in enumerate(self.sizes(number)):
            if position != self._here and nbytes:
                message, begin = self._messages[position], number * self._quota[position]
                for piece, start, stop, at in message.parts(begin, begin + nbytes):
                    yield message.pieces, piece, start, stop, offset + at
            offset += nbytes


class DeviceExchange:
    """One rank's part of an exchange between devices.

    1. Every rank makes one, and tells the others its :attr:`traffic`.
    2. Every rank calls :meth:`run` with all that.
    """

    def __init__(self, group: Any, plan: ExchangePlan, source: Catalog) -> None:
        """Lay out the messages.

        Args:
            group: The Paddle group of the ranks, of a backend that works on device memory.
            plan: This rank's part of the plan.
            source: The source catalog of all ranks.
        """
        self._group = group
        self._source = source
        position = {int(rank): position for position, rank in enumerate(group.ranks)}
        self._outgoing = {position[rank]: Message.of(p, source) for rank, p in plan.outgoing.items() if len(p)}
        self._incoming = {position[rank]: Message.of(p, source) for rank, p in plan.incoming.items() if len(p)}

    @property
    def traffic(self) -> dict[int, int]:
        """What the other ranks have to know: bytes to be sent, by position in the group."""
        return {position: message.nbytes for position, message in self._outgoing.items()}

    def run(self, traffic: Sequence[Mapping[int, int]], here: int, source: Storage, target: Storage) -> None:
        """Carry out the exchange.

        Args:
            traffic: Every rank's :attr:`traffic`, by position in the group.
            here: This rank's position.
            source: Gives the storage of a source row.
            target: Gives the storage of a target row, to be written.

        Raises:
            Exception: What failed on this rank: after the last round, or at once where it is the collective itself.
        """
        import paddle
        import paddle.distributed as dist

        rounds = Rounds.of(traffic, ROUND_BYTES)
        outgoing = _Side(self._outgoing, {p: rounds.quota[here, p] for p in self._outgoing}, here, len(traffic))
        incoming = _Side(self._incoming, {p: rounds.quota[p, here] for p in self._incoming}, here, len(traffic))
        failure: Exception | None = None
        with paddle.no_grad(), current_device(_group_device()):
            send, receive = (paddle.empty([side.room], dtype="uint8") for side in (outgoing, incoming))
            for number in range(rounds.count):
                if failure is None:
                    try:
                        self._pack(outgoing, number, source, send)
                    except Exception as error:  # raised after the last round
                        failure = error
                sizes = outgoing.sizes(number), incoming.sizes(number)
                dist.alltoall_single(
                    receive._slice(0, sum(sizes[1])),
                    send._slice(0, sum(sizes[0])),
                    in_split_sizes=sizes[0],
                    out_split_sizes=sizes[1],
                    group=self._group,
                )
                if failure is None:
                    try:
                        self._unpack(incoming, number, receive, target)
                    except Exception as error:  # raised after the last round
                        failure = error
        if failure is not None:
            raise failure

    def _pack(self, side: _Side, number: int, source: Storage, buffer: Any) -> None:
        """Gather what is sent in a round."""
        views: dict[np.dtype, DeviceMemory] = {}
        for pieces, piece, start, stop, at in side.parts(number):
            storage = source(int(pieces.source[piece]))
            view = _view_as(storage.dtype, buffer, views)
            position = at // storage.dtype.itemsize
            for part in _range_of(pieces.copy(piece), storage, 0, start, stop):
                copy_values(replace(part, target_base=position, target_strides=_units(part.extents)), storage, view)
                position += part.size

    def _unpack(self, side: _Side, number: int, buffer: Any, target: Storage) -> None:
        """Put what was received in a round where it belongs."""
        views: dict[np.dtype, DeviceMemory] = {}
        for pieces, piece, start, stop, at in side.parts(number):
            dtype = dtype_of(self._source.dtype_name(int(pieces.source[piece]))).numpy
            view, storage = _view_as(dtype, buffer, views), target(int(pieces.target[piece]))
            position = at // dtype.itemsize
            for part in _range_of(pieces.copy(piece), storage, 1, start, stop):
                copy_values(replace(part, source_base=position, source_strides=_units(part.extents)), view, storage)
                position += part.size


def _range_of(copy: StridedCopy, storage: AnyStorage, side: int, start: int, stop: int) -> Iterable[StridedCopy]:
    """Return the copies of the elements ``[start, stop)`` of a copy, in a form that the storage can carry out."""
    copy = copy if isinstance(storage, np.ndarray) else storage.along_axes(copy, side)
    return copy.part(start, stop) if stop - start < copy.size else (copy,)


def _view_as(dtype: np.dtype, buffer: Any, views: dict[np.dtype, DeviceMemory]) -> DeviceMemory:
    if dtype not in views:
        views[dtype] = DeviceMemory(buffer, dtype)
    return views[dtype]


def _units(extents: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(row_major_strides(np.asarray([extents], dtype=np.int64))[0].tolist()) if extents else ()


def _group_device() -> str:
    """Return the device on which this rank's collectives work."""
    import paddle

    device = paddle.get_device()
    if device != "cpu":
        return device
    environment = paddle.distributed.ParallelEnv()
    return f"{environment.device_type}:{environment.device_id}"

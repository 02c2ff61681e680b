"""Exchange pieces between the devices of several ranks, in rounds of the backend's all-to-all.

A message is the elements of its pieces, each piece at a multiple of 16 bytes. Messages are split into rounds of bounded
size. All sizes follow from what every rank sends to every other, so the ranks agree once, before the first round.
A rank on which something fails takes part in the remaining rounds, with whatever its buffers hold, and says so in the
agreement that follows: no other rank is left waiting in a collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paddle_flexckpt.algebra import StridedCopy, strides_of_shape
from paddle_flexckpt.catalog import Catalog, dtype_of
from paddle_flexckpt.memory.device_memory import DeviceMemory, current_device
from paddle_flexckpt.planning.exchange_plan import ExchangePlan
from paddle_flexckpt.planning.matching import Pieces
from paddle_flexckpt.transfer.copies import AnyStorage, Storage, copy_values

# Bytes to send and to receive in one round. With the values of one piece, gathered on the way, an exchange uses three
# times that of device memory: less than 64 MiB, whatever the size of the state.
ROUND_BYTES = 16 << 20
# Every piece and every round starts at a multiple of this: the widest element, and an alignment that devices prefer.
ALIGNMENT = 16


@dataclass(frozen=True, eq=False)
class Message:
    """The layout of the pieces that go from one rank to another.

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
        """Return the parts of pieces in a stretch of the message: ``(piece, first element, end element, byte there)``.

        ``begin`` and ``end`` are multiples of ``ALIGNMENT``.
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
class Traffic:
    """The messages between all ranks, in columns. They are the same on every rank.

    Attributes:
        sender: int64 ``[n]``, position of the sender in the group.
        receiver: int64 ``[n]``, position of the receiver.
        nbytes: int64 ``[n]``, bytes of the message.
    """

    sender: np.ndarray
    receiver: np.ndarray
    nbytes: np.ndarray

    @classmethod
    def of(cls, sent: Sequence[bytes]) -> Traffic:
        """Collect the :attr:`DeviceExchange.sent` of all ranks."""
        rows = [np.frombuffer(each, dtype=np.int64).reshape(-1, 2) for each in sent]
        sender = np.repeat(np.arange(len(rows)), [len(each) for each in rows])
        receiver, nbytes = np.concatenate(rows).T
        return cls(sender, receiver, nbytes)

    def quotas(self, round_bytes: int) -> np.ndarray:
        """Return int64 ``[n]``, the bytes of each message that go in one round.

        No rank sends or receives more than ``round_bytes`` in a round (or ``ALIGNMENT`` for each peer, if that is
        more). A rank divides its bytes among the peers that it exchanges with, not among all ranks.
        """
        busiest = np.maximum(
            np.bincount(self.sender, minlength=1)[self.sender], np.bincount(self.receiver, minlength=1)[self.receiver]
        )
        return np.maximum(round_bytes // np.maximum(busiest, 1) // ALIGNMENT * ALIGNMENT, ALIGNMENT)


class _Side:
    """The messages between devices that one rank sends, or those that it receives, cut into rounds of bounded size.

    (Between hosts, ``rounds.Rounds`` cuts by the rows that a rank has at a time.)
    """

    def __init__(self, messages: Mapping[int, Message], quota: Mapping[int, int], here: int, size: int) -> None:
        self._messages, self._quota, self._here, self._size = messages, quota, here, size

    def sizes(self, number: int) -> list[int]:
        """Return the bytes of a round, by position in the group."""
        sizes = [0] * self._size
        for position, message in self._messages.items():
            quota = self._quota[position]
            sizes[position] = min(max(message.nbytes - number * quota, 0), quota)
        # Every rank sends ALIGNMENT bytes to itself, as backends refuse empty tensors: these have no memory, and empty
        # slices are not contiguous.
        sizes[self._here] = ALIGNMENT
        return sizes

    def parts(self, number: int) -> Iterator[tuple[Pieces, int, int, int, int]]:
        """Yield the parts of a round: pieces, number of the piece, first element, end element, byte of the round."""
        offset = 0
        for position, nbytes in enumerate(self.sizes(number)):
            if position != self._here and nbytes:
                message, begin = self._messages[position], number * self._quota[position]
                for piece, start, stop, at in message.parts(begin, begin + nbytes):
                    yield message.pieces, piece, start, stop, offset + at
            offset += nbytes


class DeviceExchange:
    """One rank's part in an exchange between devices.

    1. Every rank makes one, which allocates all device memory that its buffers need, and the ranks gather each other's
       :attr:`sent`.
    2. Every rank calls :meth:`run` with what was gathered.

    Attributes:
        sent: An int64 table for the other ranks: positions in the group, and the bytes that this rank sends there.
    """

    def __init__(self, group: Any, plan: ExchangePlan, source: Catalog) -> None:
        """Lay out the messages of this rank's part of a plan; the group's backend works on device memory."""
        self._group = group
        self._source = source
        position = {int(rank): position for position, rank in enumerate(group.ranks)}
        self._outgoing = {position[rank]: Message.of(p, source) for rank, p in plan.outgoing.items() if len(p)}
        self._incoming = {position[rank]: Message.of(p, source) for rank, p in plan.incoming.items() if len(p)}
        table = [(position, message.nbytes) for position, message in self._outgoing.items()]
        self.sent = np.asarray(table, dtype=np.int64).tobytes()
        self._device = _group_device()
        with current_device(self._device):
            self._buffers = [_buffer(messages) for messages in (self._outgoing, self._incoming)]

    def run(self, traffic: Traffic, here: int, source: Storage, target: Storage) -> None:
        """Carry out the exchange of this rank, at position ``here``, in the traffic of all ranks.

        Raises:
            Exception: This rank's own failure: after the last round, or at once if a collective failed.
        """
        import paddle
        import paddle.distributed as dist

        quotas = traffic.quotas(ROUND_BYTES)
        rounds = int((-(-traffic.nbytes // quotas)).max(initial=0))
        sent, received = traffic.sender == here, traffic.receiver == here
        size = len(self._group.ranks)
        outgoing = _Side(self._outgoing, dict(zip(traffic.receiver[sent].tolist(), quotas[sent].tolist())), here, size)
        incoming = _Side(
            self._incoming, dict(zip(traffic.sender[received].tolist(), quotas[received].tolist())), here, size
        )
        failure: Exception | None = None
        send, receive = self._buffers
        with paddle.no_grad(), current_device(self._device):
            for number in range(rounds):
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
            # The buffers must not be freed while a stream, maybe the backend's, still uses them.
            paddle.device.synchronize(self._device)
        if failure is not None:
            raise failure

    def _pack(self, side: _Side, number: int, source: Storage, buffer: Any) -> None:
        """Gather what this rank sends in a round."""
        views: dict[np.dtype, DeviceMemory] = {}
        for pieces, piece, start, stop, at in side.parts(number):
            storage = source(int(pieces.source[piece]))
            view = _view_as(storage.dtype, buffer, views)
            position = at // storage.dtype.itemsize
            for part in _range_of(pieces.copy(piece), storage, 0, start, stop):
                copy_values(
                    replace(part, target_base=position, target_strides=strides_of_shape(part.extents)), storage, view
                )
                position += part.size

    def _unpack(self, side: _Side, number: int, buffer: Any, target: Storage) -> None:
        """Put what this rank has received in a round into place."""
        views: dict[np.dtype, DeviceMemory] = {}
        for pieces, piece, start, stop, at in side.parts(number):
            dtype = dtype_of(self._source.dtype_name(int(pieces.source[piece]))).numpy
            view, storage = _view_as(dtype, buffer, views), target(int(pieces.target[piece]))
            position = at // dtype.itemsize
            for part in _range_of(pieces.copy(piece), storage, 1, start, stop):
                copy_values(
                    replace(part, source_base=position, source_strides=strides_of_shape(part.extents)),
                    view,
                    storage,
                    int(pieces.target[piece]),
                )
                position += part.size


def _range_of(copy: StridedCopy, storage: AnyStorage, side: int, start: int, stop: int) -> Iterable[StridedCopy]:
    """Return the copies of the elements ``[start, stop)`` of a copy, in a form that the storage can carry out."""
    copy = copy if isinstance(storage, np.ndarray) else storage.along_axes(copy, side)
    return copy.part(start, stop) if stop - start < copy.size else (copy,)


def _view_as(dtype: np.dtype, buffer: Any, views: dict[np.dtype, DeviceMemory]) -> DeviceMemory:
    if dtype not in views:
        views[dtype] = DeviceMemory(buffer, dtype)
    return views[dtype]


def _buffer(messages: Mapping[int, Message]) -> Any:
    """Return device memory for the largest round that these messages can have (see :meth:`Traffic.quotas`)."""
    import paddle

    most = max(ROUND_BYTES, ALIGNMENT * len(messages))
    return paddle.empty([min(most, sum(message.nbytes for message in messages.values())) + ALIGNMENT], dtype="uint8")


def _group_device() -> str:
    """Return the device of this rank's collectives, whatever the current device is."""
    import paddle

    environment = paddle.distributed.ParallelEnv()
    # Paddle names the type of custom devices only.
    kind = environment.device_type or ("gpu" if paddle.is_compiled_with_cuda() else "xpu")
    return f"{kind}:{environment.device_id}"

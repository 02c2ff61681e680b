"""A process group over the mesh, with all that Paddle's Python code asks of one, and its arrays.

``ProcessGroupGloo`` raises NotImplemented for every ``*_on_calc_stream``, for reduce_scatter, all_to_all and the
partial calls; its groups of three and more ranks fail to connect (U1); its float16 sums are inf (U2); its send and recv
desynchronise its collectives (U3). This one implements them all over :class:`~.mesh.Mesh`. Reductions run in rank order
and are deterministic.

A collective has finished when its call returns, whatever ``sync_op`` says; only a receive with ``sync_op=False`` is
finished by ``wait()``, since two ranks may each post a receive before they send.
Tested in tests/distributed/test_process_group.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import paddle
from paddle.base import core
from paddle.distributed import collective

from paddle_flexckpt.catalog import LostRankError
from paddle_flexckpt.catalog.wire import join, pack_by_position, split, unpack_by_position
from paddle_flexckpt.communication.group_communicators import default_store
from paddle_flexckpt.ranks.lost_ranks import describe_lost_ranks, find_missing_ranks
from paddle_flexckpt.testing.cpu_world.mesh import Mesh

Op = core.ReduceOp

# numpy has no bfloat16: Paddle hands its bits out as uint16, and takes uint16 back as bfloat16.
HALF = (paddle.float16, paddle.bfloat16)
Array = np.ndarray


def to_array(tensor: Any) -> np.ndarray:
    """Return a contiguous copy of a tensor's values (bfloat16 as its uint16 bits)."""
    with paddle.no_grad():
        tensor = tensor.detach()
        return np.array((tensor if tensor.is_contiguous() else tensor.contiguous()).numpy())


def copy_into(target: Any, source: Any) -> None:
    """Copy ``source`` into ``target`` in place: writes go through views and into fused buffers.

    ``set_value`` and ``assign`` would give the target a new storage and so cut it off from the buffer that it is a part
    of.
    """
    with paddle.no_grad():
        if list(source.shape) != list(target.shape):
            source = source.reshape(target.shape)
        (target if target.stop_gradient else target.detach()).copy_(source, True)


def put_array(target: Any, array: np.ndarray) -> None:
    """Copy an array of a tensor of the same dtype (see :func:`to_array`) into ``target``, in place."""
    with paddle.no_grad():
        source = paddle.to_tensor(np.ascontiguousarray(array), place=paddle.CPUPlace())
        if source.dtype != target.dtype:
            same_size = source.element_size() == target.element_size()
            source = source.view(target.dtype) if same_size else source.astype(target.dtype)
    copy_into(target, source)


def reduce_arrays(arrays: Sequence[np.ndarray], dtype: Any, op: Any) -> Any:
    """Reduce one array per rank, in the order given.

    Half precision is accumulated in float32 and rounded once (gloo's own float16 sum is inf: U2). The result is a
    tensor of ``dtype``.

    Raises:
        ValueError: an operation that is not one of SUM, AVG, MAX, MIN, PRODUCT.
    """
    total = _accumulator(arrays[0], dtype)
    for array in arrays[1:]:
        total = _fold(total, _accumulator(array, dtype), op)
    if op == Op.AVG:
        total = (total / len(arrays)).astype(total.dtype)
    return paddle.to_tensor(total, place=paddle.CPUPlace()).astype(dtype)


def _accumulator(array: np.ndarray, dtype: Any) -> np.ndarray:
    if dtype not in HALF:
        return array
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def _fold(total: np.ndarray, array: np.ndarray, op: Any) -> np.ndarray:
    if op in (Op.SUM, Op.AVG):
        return np.logical_or(total, array) if total.dtype == bool else total + array
    if op == Op.MAX:
        return np.maximum(total, array)
    if op == Op.MIN:
        return np.minimum(total, array)
    if op == Op.PRODUCT:
        return total * array
    raise ValueError(f"the CPU world cannot reduce with {op}")


class Done:
    """The task of an operation that has finished."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def synchronize(self, *_: Any) -> None:
        return None


DONE = Done()


class Receive(Done):
    """A posted receive from a global rank: ``wait()`` calls ``store``, which writes it into the tensor."""

    def __init__(self, mesh: Mesh, peer: int, channel: str, store: Callable[[Array], None]) -> None:
        self._mesh, self._peer, self._channel, self._store = mesh, peer, channel, store
        self._sequence = mesh.post(peer, channel)
        self._done = False

    def wait(self, *_: Any) -> bool:
        if not self._done:
            self._store(self._mesh.wait_for(self._peer, self._channel, self._sequence))
            self._done = True
        return True

    def is_completed(self) -> bool:
        return self._done or self._mesh.is_here(self._peer, self._channel, self._sequence)


class MeshProcessGroup:
    """A process group over the mesh. Ranks in the arguments are ranks in the group, as in Paddle's own groups.

    ``gid`` is Paddle's id of the group; 0 is the world.
    """

    def __init__(self, mesh: Mesh, rank: int, size: int, gid: int) -> None:
        self._mesh, self._rank, self._size, self._gid = mesh, rank, size, gid
        self._ranks: list[int] | None = list(range(size)) if gid == 0 else None
        self._coalesced: list[Receive] | None = None

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return "MESH"

    @property
    def ranks(self) -> list[int]:
        """Return the global ranks of the members. Paddle registers the group right after its constructor."""
        if self._ranks is None:
            group = collective._get_group_map().get(self._gid)
            if group is None or group.process_group is not self:
                raise RuntimeError(f"process group {self._gid} is not registered with paddle.distributed any more")
            self._ranks = list(group.ranks)
        return self._ranks

    # -- messages within the group -------------------------------------------------------------------------------------

    def _send(self, dst: int, kind: str, array: Array) -> None:
        self._mesh.send(self.ranks[dst], f"{kind}/{self._gid}", array)

    def _recv(self, src: int, kind: str) -> Array:
        return self._mesh.recv(self.ranks[src], f"{kind}/{self._gid}")

    def exchange(self, kind: str, arrays: Sequence[Array]) -> list[Array]:
        """Send ``arrays[i]`` to member i; return what each member sent to this one, in rank order."""
        for dst, array in enumerate(arrays):
            self._send(dst, kind, array)
        return self._mesh.recv_all(self.ranks, f"{kind}/{self._gid}")

    # -- collectives ---------------------------------------------------------------------------------------------------

    def barrier(self, *_: Any) -> Done:
        self.exchange("barrier", [np.empty(0, "uint8")] * self._size)
        return DONE

    def all_reduce(self, tensor: Any, op: Any = Op.SUM, sync_op: bool = True) -> Done:
        arrays = self.exchange("all_reduce", [to_array(tensor)] * self._size)
        copy_into(tensor, reduce_arrays(arrays, tensor.dtype, op))
        return DONE

    def reduce(self, tensor: Any, dst: int, op: Any = Op.SUM, sync_op: bool = True) -> Done:
        self._send(dst, "reduce", to_array(tensor))
        if self._rank == dst:
            arrays = [self._recv(src, "reduce") for src in range(self._size)]
            copy_into(tensor, reduce_arrays(arrays, tensor.dtype, op))
        return DONE

    def broadcast(self, tensor: Any, src: int, sync_op: bool = True) -> Done:
        if self._rank == src:
            array = to_array(tensor)
            for dst in range(self._size):
                if dst != src:
                    self._send(dst, "broadcast", array)
        else:
            put_array(tensor, self._recv(src, "broadcast"))
        return DONE

    def all_gather(self, out: Any, tensor: Any, sync_op: bool | None = None) -> Done:
        """Gather tensors. Arguments: ``(list, tensor, sync_op)`` or, in the old order, ``(tensor, big tensor)``."""
        if not isinstance(out, (list, tuple)):
            return self.all_gather_into_tensor(*((tensor, out) if sync_op is None else (out, tensor)))
        for target, array in zip(out, self.exchange("all_gather", [to_array(tensor)] * self._size)):
            put_array(target, array)
        return DONE

    def all_gather_into_tensor(self, out: Any, tensor: Any, sync_op: bool = True) -> Done:
        arrays = self.exchange("all_gather", [to_array(tensor).reshape(-1)] * self._size)
        put_array(out, np.concatenate(arrays).reshape(out.shape))
        return DONE

    def all_gather_partial(self, out: Any, tensor: Any, parts: int, index: int, sync_op: bool = True) -> Done:
        part = np.split(to_array(tensor).reshape(-1), parts)[index]
        arrays = self.exchange("all_gather", [part] * self._size)
        put_array(out, np.concatenate(arrays).reshape(out.shape))
        return DONE

    def reduce_scatter(self, out: Any, tensors: Any, op: Any = Op.SUM, sync_op: bool = True) -> Done:
        if not isinstance(tensors, (list, tuple)):
            return self.reduce_scatter_tensor(out, tensors, op)
        return self._reduce_scatter(out, [to_array(tensor) for tensor in tensors], op)

    def reduce_scatter_tensor(self, out: Any, tensor: Any, op: Any = Op.SUM, sync_op: bool = True) -> Done:
        return self._reduce_scatter(out, np.split(to_array(tensor).reshape(-1), self._size), op)

    def _reduce_scatter(self, out: Any, parts: Sequence[Array], op: Any) -> Done:
        copy_into(out, reduce_arrays(self.exchange("reduce_scatter", parts), out.dtype, op))
        return DONE

    def gather(self, tensor: Any, out: Any, dst: int, sync_op: bool = True, use_calc_stream: bool = False) -> Done:
        self._send(dst, "gather", to_array(tensor))
        if self._rank == dst:
            for src, target in enumerate(out):
                put_array(target, self._recv(src, "gather"))
        return DONE

    def scatter(self, out: Any, tensors: Any, src: int, sync_op: bool = True) -> Done:
        if not isinstance(tensors, (list, tuple)):
            return self.scatter_tensor(out, tensors, src)
        return self._scatter(out, [to_array(tensor) for tensor in tensors] if self._rank == src else [], src)

    def scatter_tensor(self, out: Any, tensor: Any, src: int, sync_op: bool = True) -> Done:
        return self._scatter(out, np.split(to_array(tensor), self._size) if self._rank == src else [], src)

    def _scatter(self, out: Any, parts: Sequence[Array], src: int) -> Done:
        for dst, part in enumerate(parts):
            self._send(dst, "scatter", part)
        put_array(out, self._recv(src, "scatter"))
        return DONE

    def all_to_all(self, out: Any, tensors: Any, sync_op: bool = True) -> Done:
        if not isinstance(out, (list, tuple)):
            return self.all_to_all_tensor(out, tensors)
        for target, array in zip(out, self.exchange("all_to_all", [to_array(t) for t in tensors])):
            put_array(target, array)
        return DONE

    def all_to_all_single(
        self, out: Any, tensor: Any, out_sizes: Any = None, in_sizes: Any = None, sync_op: bool = True
    ) -> Done:
        array = to_array(tensor)
        parts = np.split(array, np.cumsum(in_sizes)[:-1]) if in_sizes else np.split(array, self._size)
        put_array(out, np.concatenate(self.exchange("all_to_all", parts), 0))
        return DONE

    def all_to_all_tensor(self, out: Any, tensor: Any, sync_op: bool = True) -> Done:
        return self.all_to_all_single(out, tensor)

    # -- point to point ------------------------------------------------------------------------------------------------

    def send(self, tensor: Any, dst: int, sync_op: bool = True) -> Done:
        self._send(dst, "p2p", to_array(tensor))
        return DONE

    def send_partial(self, tensor: Any, dst: int, parts: int, index: int, sync_op: bool = True) -> Done:
        self._send(dst, "p2p", np.split(to_array(tensor).reshape(-1), parts)[index])
        return DONE

    def recv(self, tensor: Any, src: int, sync_op: bool = True) -> Done:
        return self._receive(src, sync_op, lambda array: put_array(tensor, array))

    def recv_partial(self, tensor: Any, src: int, parts: int, index: int, sync_op: bool = True) -> Done:
        def store(part: Array) -> None:
            whole = to_array(tensor).reshape(-1)
            np.split(whole, parts)[index][...] = part
            put_array(tensor, whole.reshape(tensor.shape))

        return self._receive(src, sync_op, store)

    def _receive(self, src: int, sync_op: bool, store: Callable[[Array], None]) -> Done:
        task = Receive(self._mesh, self.ranks[src], f"p2p/{self._gid}", store)
        if self._coalesced is not None:
            # As between ncclGroupStart and ncclGroupEnd: all calls run at once, and none may wait for another one.
            self._coalesced.append(task)
        elif sync_op:
            task.wait()
        return task

    def _start_coalescing(self) -> None:
        self._coalesced = []

    def _end_coalescing(self, *_: Any) -> None:
        tasks, self._coalesced = self._coalesced or [], None
        for task in tasks:
            task.wait()

    # -- old names, and what has no meaning here -----------------------------------------------------------------------

    allreduce = all_reduce

    def alltoall(self, out: Any, tensor: Any, *_: Any) -> Done:
        """Exchange tensors. The binding names its arguments ``(in, out)``; its caller, MoE, passes ``(out, in)``."""
        return self.all_to_all(out, tensor)

    def alltoall_single(self, tensor: Any, out: Any, in_sizes: Any, out_sizes: Any, *_: Any) -> Done:
        return self.all_to_all_single(out, tensor, out_sizes, in_sizes)

    def eager_connect(self, *_: Any, **__: Any) -> None:
        return None

    eager_connect_ring_exchange = shutdown = restart = eager_connect

    # There is no stream on a CPU: the calc-stream form of an operation is the operation.
    all_reduce_on_calc_stream = all_reduce
    reduce_on_calc_stream = reduce
    broadcast_on_calc_stream = broadcast
    all_gather_into_tensor_on_calc_stream = all_gather_into_tensor
    all_gather_partial_on_calc_stream = all_gather_partial
    reduce_scatter_on_calc_stream = reduce_scatter
    reduce_scatter_tensor_on_calc_stream = reduce_scatter_tensor
    scatter_on_calc_stream = scatter
    scatter_tensor_on_calc_stream = scatter_tensor
    all_to_all_on_calc_stream = all_to_all
    all_to_all_single_on_calc_stream = all_to_all_single
    all_to_all_tensor_on_calc_stream = all_to_all_tensor
    send_on_calc_stream = send
    send_partial_on_calc_stream = send_partial
    recv_on_calc_stream = recv
    recv_partial_on_calc_stream = recv_partial

    def all_gather_on_calc_stream(self, out: Any, tensor: Any) -> Done:
        return self.all_gather(out, tensor, True)


def empty_like(tensor: Any, count: int) -> list[Any]:
    """Return ``count`` tensors to gather into."""
    return [paddle.empty(tensor.shape, dtype=tensor.dtype) for _ in range(count)]


class MeshChannel:
    """A channel over the mesh for the library's own messages, beside the group's collectives."""

    def __init__(self, group: Any, ranks: Sequence[int], position: int) -> None:
        self._group, self._ranks, self._position = group, ranks, position

    def all_gather(self, payload: bytes) -> list[bytes]:
        return self._exchange([payload] * len(self._ranks))

    def all_to_all(self, note: bytes, payloads: Mapping[int, bytes]) -> tuple[dict[int, bytes], dict[int, bytes]]:
        messages = [
            pack_by_position({each: payloads[each]} if each in payloads else {}) for each in range(len(self._ranks))
        ]
        gathered = [split(each) for each in self._exchange([join((note, *message)) for message in messages])]
        notes = {position: parts[0] for position, parts in enumerate(gathered) if parts[0]}
        own = {position: unpack_by_position(parts[1:]).get(self._position) for position, parts in enumerate(gathered)}
        return notes, {position: payload for position, payload in own.items() if payload is not None}

    def _exchange(self, payloads: Sequence[bytes]) -> list[bytes]:
        try:
            arrays = [np.frombuffer(payload, dtype=np.uint8) for payload in payloads]
            return [array.tobytes() for array in self._group.process_group.exchange("paddle_flexckpt", arrays)]
        except Exception as error:
            name, rank = f"mesh/{self._group.id}", self._ranks[self._position]
            missing = find_missing_ranks(default_store(), name, self._ranks, rank)
            raise LostRankError(describe_lost_ranks(missing, error)) from error

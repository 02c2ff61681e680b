"""What the jobs share: a network of all tensor-parallel layers, and its oracle, which knows nothing of the library.

The oracle: every tensor has a global value that follows from its name, and a table says by hand which axis is cut.
"""

from __future__ import annotations

import json
import os
import zlib

import numpy as np
import paddle
import paddle.distributed as dist
import paddle.nn as nn
import paddle.nn.functional as F
from paddle.distributed import fleet
from paddle.distributed.fleet.utils import sequence_parallel_utils as sequence

import paddle_flexckpt as fc
from paddle_flexckpt.communication.group_communicators import communicator_for
from paddle_flexckpt.testing import cpu_world

# Extents that the degrees 1, 2 and 4 divide, and no two alike, so that a wrong axis shows.
VOCABULARY, HIDDEN, INNER = 24, 12, 20
LENGTH, BATCH = 8, 2

KINDS = ("emb", "col", "row", "cseq", "rseq")
AXES = {
    "emb.weight": 0,
    "col.weight": 1,
    "col.bias": 0,
    "row.weight": 0,
    "cseq.weight": 1,
    "cseq.bias": 0,
    "rseq.weight": 0,
}
SHAPES = {
    "emb.weight": (VOCABULARY, HIDDEN),
    "col.weight": (HIDDEN, INNER),
    "col.bias": (INNER,),
    "row.weight": (INNER, HIDDEN),
    "row.bias": (HIDDEN,),
    "cseq.weight": (HIDDEN, INNER),
    "cseq.bias": (INNER,),
    "rseq.weight": (INNER, HIDDEN),
    "rseq.bias": (HIDDEN,),
}


def init_tensor_parallel(degree):
    """Tensor parallelism of a degree; the rest of the world holds replicas of it."""
    return cpu_world.init_fleet(dp=dist.get_world_size() // degree, mp=degree)


def place_in(hcg):
    """``(place, degree)`` of this rank in tensor parallelism."""
    degree = hcg.get_model_parallel_world_size()
    return dist.get_rank() % degree, degree


def whole(name, salt=""):
    """The global value of a tensor."""
    generator = np.random.RandomState(zlib.crc32((name + salt).encode()) % 2**31)
    return (generator.randn(*SHAPES[name]) * 0.3).astype("float32")


def cut(array, axis, place, degree):
    """A rank's part of a global array; ``axis`` None: every rank has all of it."""
    return array if axis is None else np.split(array, degree, axis)[place]


def expected(name, place, degree, salt=""):
    return cut(whole(name, salt), AXES.get(name), place, degree)


def wanted_names(kinds, bias):
    return sorted(n for n in SHAPES if n.split(".")[0] in kinds and (bias or not n.endswith(".bias")))


class Net(nn.Layer):
    """The given kinds of layers, one after the other. With degree 1 the sequence-parallel ones are plain linears.

    Paddle refuses to build those for one rank; a plain linear is what a user has there.
    """

    def __init__(self, kinds, bias, degree, salt="", place=0):
        super().__init__()
        self.kinds, self.degree, self.place = kinds, degree, place
        parallel = fleet.meta_parallel
        if "emb" in kinds:
            self.emb = parallel.VocabParallelEmbedding(VOCABULARY, HIDDEN)
        if "col" in kinds:
            self.col = parallel.ColumnParallelLinear(HIDDEN, INNER, has_bias=bias, gather_output=True)
        if "row" in kinds:
            self.row = parallel.RowParallelLinear(INNER, HIDDEN, has_bias=bias, input_is_parallel=False)
        bias_attr = None if bias else False
        if "cseq" in kinds and degree > 1:
            self.cseq = sequence.ColumnSequenceParallelLinear(HIDDEN, INNER, has_bias=bias, gather_output=False)
        elif "cseq" in kinds:
            self.cseq = nn.Linear(HIDDEN, INNER, bias_attr=bias_attr)
        if "rseq" in kinds and degree > 1:
            self.rseq = sequence.RowSequenceParallelLinear(INNER, HIDDEN, has_bias=bias, input_is_parallel=True)
        elif "rseq" in kinds:
            self.rseq = nn.Linear(INNER, HIDDEN, bias_attr=bias_attr)
        self.fill(salt)

    def fill(self, salt):
        for name, parameter in self.named_parameters():
            value = paddle.to_tensor(expected(name, self.place, self.degree, salt))
            parameter.set_value(value.astype(parameter.dtype))

    def forward(self, x):
        if "emb" in self.kinds:
            x = self.emb(x)
        if "col" in self.kinds:
            x = self.col(x)
        if "row" in self.kinds:
            x = self.row(F.gelu(x) if "col" in self.kinds else x)
        if self.degree == 1:
            if "cseq" in self.kinds:
                x = self.cseq(x)
            if "rseq" in self.kinds:
                x = self.rseq(F.gelu(x) if "cseq" in self.kinds else x)
            return x
        if "cseq" in self.kinds:
            x = self.cseq(sequence.ScatterOp.apply(x))
        elif "rseq" in self.kinds:
            x = paddle.split(x, self.degree, axis=-1)[self.place]
        if "rseq" in self.kinds:
            x = sequence.GatherOp.apply(self.rseq(F.gelu(x) if "cseq" in self.kinds else x))
        elif "cseq" in self.kinds:
            parts = []
            dist.all_gather(parts, x, group=fleet.get_hybrid_communicate_group().get_model_parallel_group())
            x = paddle.concat(parts, axis=-1)
        return x


def inputs_of(kinds, step=0):
    """An input ``[length, batch, ...]`` (the sequence axis first, as sequence parallelism wants it)."""
    generator = np.random.RandomState(step)
    if "emb" in kinds:
        return paddle.to_tensor(generator.randint(0, VOCABULARY, (LENGTH, BATCH)))
    width = HIDDEN if kinds[0] in ("col", "cseq") else INNER
    return paddle.to_tensor(generator.randn(LENGTH, BATCH, width).astype("float32"))


def train(net, optimizer, steps):
    """Trains on the batches of the given steps; every replica sees the same ones. Returns the losses."""
    losses = []
    for step in steps:
        loss = (net(inputs_of(net.kinds, step)) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        losses.append(float(loss))
    return losses


def hook_sequence_parallel(net):
    """What a user of sequence parallelism has to do: gradients of what is replicated are summed over the group."""
    if net.degree > 1:
        sequence.register_sequence_parallel_allreduce_hooks(net, 1, False)


def same_bytes(tensor, array):
    return raw(tensor) == np.ascontiguousarray(array).tobytes()


def raw(tensor):
    """The bytes of a tensor of any dtype (numpy has no bfloat16: its bits come as uint16)."""
    return np.ascontiguousarray(tensor.numpy()).tobytes()


def snapshot(state):
    """The bytes of every tensor of a (sharded) state dict."""
    return {key: raw(getattr(value, "local_tensor", value)) for key, value in state.items()}


def stored_bytes(directory):
    """Bytes of tensor data in the data files, counted from their safetensors headers by hand."""
    total = 0
    for name in sorted(os.listdir(directory)):
        if name.endswith(".safetensors"):
            with open(os.path.join(directory, name), "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            data = sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header.values())
            assert os.path.getsize(os.path.join(directory, name)) == 8 + length + data
            total += data
    return total


def local_bytes(state):
    return sum(len(data) for data in snapshot(state).values())


def outcome(call):
    """``[type of the error, its text]`` of a call, or None; never lets a CheckpointError through."""
    try:
        call()
    except fc.CheckpointError as error:
        return [type(error).__name__, str(error)]
    return None


# -- tensors of every dtype, cut in every way --------------------------------------------------------------------------

ITEMSIZE = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
#: Every dtype once, with one to four axes; and what has no axis, no element, or one element.
ZOO = {f"of.{dtype}": (dtype, ((5, 7), (3, 4, 5), (11,), (4, 3, 2, 5))[i % 4]) for i, dtype in enumerate(ITEMSIZE)}
ZOO.update({"scalar": ("float32", ()), "empty": ("float32", (0, 3)), "one": ("bfloat16", (1,))})
LAYOUTS = ("whole", "rows", "columns", "reversed", "flat", "flat rows")


def zoo_value(name, salt=""):
    """A tensor's global value: an array of opaque items, so that no dtype's arithmetic comes in between."""
    dtype, shape = ZOO[name]
    seed = zlib.crc32((name + salt).encode()) % 2**31
    high = 2 if dtype == "bool" else 256
    data = np.random.RandomState(seed).randint(0, high, int(np.prod(shape)) * ITEMSIZE[dtype]).astype("uint8")
    return np.frombuffer(data.tobytes(), f"V{ITEMSIZE[dtype]}").reshape(shape)


def as_tensor(array, dtype):
    """A Paddle tensor of an array of opaque items."""
    if array.size == 0:
        return paddle.empty(list(array.shape), dtype=dtype)
    data = np.frombuffer(array.tobytes(), "uint8").copy()
    return paddle.to_tensor(data).view(dtype).reshape(list(array.shape)).clone()


def part_of(layout, shape, rank, size):
    """A rank's part of a tensor: ``(offset, box, flat range or None)``, or None for nothing. Parts differ in size."""
    whole_part = ((0,) * len(shape), tuple(shape), None)
    if layout == "whole" or not shape or 0 in shape:
        return whole_part
    if layout == "flat":
        start, stop = bounds(int(np.prod(shape)), rank, size)
        return (0,) * len(shape), tuple(shape), (start, stop)
    if layout == "flat rows":
        # Every rank has the second part of the flattened box of its rows, and its neighbour has the first.
        half = rank // 2, max(size // 2, 1)
        box = part_of("rows", shape, *half)
        if box is None:
            return None
        return box[0], box[1], bounds(int(np.prod(box[1])), rank % 2, min(size, 2))
    axis = len(shape) - 1 if layout == "columns" else 0
    start, stop = bounds(shape[axis], size - 1 - rank if layout == "reversed" else rank, size)
    if start == stop:
        return None
    offset, box = [0] * len(shape), list(shape)
    offset[axis], box[axis] = start, stop - start
    return tuple(offset), tuple(box), None


def bounds(extent, rank, size):
    return extent * rank * rank // size**2, extent * (rank + 1) ** 2 // size**2


def take(array, part):
    offset, box, flat = part
    cutout = array[tuple(slice(o, o + n) for o, n in zip(offset, box))]
    return cutout if flat is None else cutout.reshape(-1)[flat[0] : flat[1]]


def zoo_state(layout, rank, size, salt="", make=fc.ShardedWeight, names=None):
    """A rank's part of the zoo as shards."""
    state = {}
    for name in ZOO if names is None else names:
        dtype, shape = ZOO[name]
        part = part_of(layout, shape, rank, size)
        if part is None:
            continue
        offset, box, flat = part
        tensor = as_tensor(take(zoo_value(name, salt), part), dtype)
        state[name] = make(name, tensor, box, shape, offset, flat is not None, slice(*flat) if flat else None)
    return state


def zoo_wrong(state, layout, rank, size, salt=""):
    """Keys whose tensors are not the oracle's part."""
    wrong = []
    for name, weight in state.items():
        wanted = take(zoo_value(name, salt), part_of(layout, ZOO[name][1], rank, size))
        if raw(weight.local_tensor) != wanted.tobytes() or str(weight.local_tensor.dtype) != f"paddle.{ZOO[name][0]}":
            wrong.append(name)
    return wrong


def telling(state, names=None):
    """Those of the keys (all by default) whose parts have so many random bits that two of them cannot be equal."""
    names = state if names is None else names
    return sorted(n for n in names if n != "of.bool" and len(raw(state[n].local_tensor)) >= 4)


def zoo_bytes():
    """Bytes of the whole zoo."""
    return sum(zoo_value(name).nbytes for name in ZOO)


def lacked_bytes(source, target, rank, size, target_size=None):
    """Bytes that a rank's target needs and its own source does not hold, counted element by element."""
    total = 0
    for name, (_, shape) in ZOO.items():
        masks = []
        for layout in (target, source):
            mask = np.zeros(shape, bool)
            part = part_of(layout, shape, rank, size)
            if part is not None:
                offset, box, flat = part
                inner = np.zeros(int(np.prod(box)), bool)
                inner[slice(*flat) if flat else slice(None)] = True
                mask[tuple(slice(o, o + n) for o, n in zip(offset, box))] = inner.reshape(box)
            masks.append(mask)
        total += int((masks[0] & ~masks[1]).sum()) * zoo_value(name).itemsize
    return total


def here():
    return dist.get_rank(), dist.get_world_size()


def counted(group):
    """A communicator of a group, and a function that says how many exchanges its channel was asked for since."""
    comm = communicator_for(group)
    calls = []
    exchange = comm._channel._exchange

    def counting(*args):
        calls.append(1)
        return exchange(*args)

    comm._channel._exchange = counting

    def done():
        del comm._channel._exchange
        return len(calls)

    return comm, done


def pair(values, axis=0):
    """``values`` cut in two along an axis, this rank's half as a shard named "w"."""
    array = np.asarray(values, "float32")
    rank, size = here()
    part = np.split(array, size, axis)[rank]
    offset = [0] * array.ndim
    offset[axis] = part.shape[axis] * rank
    return {"w": fc.ShardedWeight("w", paddle.to_tensor(part), part.shape, array.shape, offset)}


def full(shape, value=0.0):
    return {"w": paddle.full(shape, value)}

"""The rehearsal world: its collectives, its training against one process, and how it fails.

The jobs: jobs of test_cpu_world.

A training job trains for three steps, in parallel and in one process, and returns for its rank
``[largest difference of a loss, largest difference of a parameter]``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import zlib
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("paddle")
import paddle
import paddle.distributed as dist
import paddle.nn as nn
import paddle.nn.functional as F
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer, SharedLayerDesc

from paddle_flexckpt.testing import World, WorldError, cpu_world, frames
from tests.documents import docstring_block

pytestmark = [pytest.mark.multiprocess, pytest.mark.paddle]

# -- what each rank runs -----------------------------------------------------------------------------------------------

STEPS = 3


def rng(seed):
    return np.random.RandomState(seed)


def weight(name, shape):
    """The same values for the same name, on every rank and in the reference."""
    return (rng(zlib.crc32(name.encode()) % 2**31).randn(*shape) * 0.3).astype("float32")


def difference(first, second):
    return max(float(np.abs(np.asarray(a, "float64") - np.asarray(b, "float64")).max()) for a, b in zip(first, second))


def compare(parallel, reference):
    """Both arguments are ``(losses, {name: array})``."""
    losses, params = parallel
    return [difference(losses, reference[0]), difference(params.values(), [reference[1][name] for name in params])]


# -- collectives and the world itself ----------------------------------------------------------------------------------


def collectives(dtype):
    """Checks every collective against numpy; returns the names of those that are wrong."""
    rank, size = dist.get_rank(), dist.get_world_size()
    wrong = []

    def tensor(values):
        return paddle.to_tensor(np.asarray(values, "float32")).astype(dtype)

    def check(name, got, wanted):
        if not np.array_equal(got.astype("float32").numpy(), np.asarray(wanted, "float32")):
            wrong.append(name)

    mine = np.arange(2 * size) + 10 * rank
    everyone = [np.arange(2 * size) + 10 * r for r in range(size)]
    for name, op, fold in (
        ("sum", dist.ReduceOp.SUM, np.sum),
        ("max", dist.ReduceOp.MAX, np.max),
        ("min", dist.ReduceOp.MIN, np.min),
        ("prod", dist.ReduceOp.PROD, np.prod),
        ("avg", dist.ReduceOp.AVG, np.mean),
    ):
        x = tensor(mine % 4)
        dist.all_reduce(x, op)
        check(f"all_reduce {name}", x, fold(np.stack(everyone) % 4, axis=0))
    x = tensor(mine)
    dist.reduce(x, 1)
    check("reduce", x, np.sum(everyone, axis=0) if rank == 1 else mine)
    x = tensor(mine)
    dist.broadcast(x, 1)
    check("broadcast", x, everyone[1])
    parts: list = []
    dist.all_gather(parts, tensor(mine))
    check("all_gather", paddle.concat(parts), np.concatenate(everyone))
    out = tensor(np.zeros(2))
    dist.reduce_scatter(out, [tensor(p) for p in np.split(mine, size)])
    check("reduce_scatter", out, np.sum(everyone, axis=0)[2 * rank : 2 * rank + 2])
    outs = [tensor(np.zeros(2)) for _ in range(size)]
    dist.alltoall(outs, [tensor(p) for p in np.split(mine, size)])
    check("alltoall", paddle.concat(outs), np.concatenate([e[2 * rank : 2 * rank + 2] for e in everyone]))
    out = tensor(np.zeros(2 * size))
    dist.alltoall_single(out, tensor(mine))
    check("alltoall_single", out, np.concatenate([e[2 * rank : 2 * rank + 2] for e in everyone]))
    out = tensor(np.zeros(2))
    dist.scatter(out, [tensor(p) for p in np.split(mine, size)] if rank == 1 else None, src=1)
    check("scatter", out, everyone[1][2 * rank : 2 * rank + 2])
    gathered = [tensor(np.zeros(2 * size)) for _ in range(size)] if rank == 0 else None
    dist.gather(tensor(mine), gathered, dst=0)
    if rank == 0:
        check("gather", paddle.concat(gathered), np.concatenate(everyone))
    # Every rank posts its receives before it sends, and waits for them in the other order.
    left, right = (rank - 1) % size, (rank + 1) % size
    first, second = tensor(np.zeros(2 * size)), tensor(np.zeros(2 * size))
    tasks = [dist.irecv(first, left), dist.irecv(second, left)]
    dist.send(tensor(mine), right)
    dist.send(tensor(mine + 1), right)
    for task in reversed(tasks):
        task.wait()
    check("irecv", paddle.concat([first, second]), np.concatenate([everyone[left], everyone[left] + 1]))
    ops = [dist.P2POp(dist.irecv, first, left), dist.P2POp(dist.isend, tensor(mine), right)]
    for task in dist.batch_isend_irecv(ops):
        task.wait()
    check("batch_isend_irecv", first, everyone[left])
    # A view of a larger buffer is written through, and a non-contiguous tensor is read right.
    buffer = tensor(np.zeros(4))
    dist.broadcast(buffer._slice(1, 3) if rank else tensor([7, 8]), 0)
    check("view", buffer, [0, 7, 8, 0] if rank else [0, 0, 0, 0])
    pair = dist.new_group([0, size - 1])
    x = tensor([rank + 1])
    if rank in (0, size - 1):
        dist.all_reduce(x, group=pair)
    check("subgroup", x, [size + 1 if rank in (0, size - 1) else rank + 1])
    objects: list = []
    dist.all_gather_object(objects, {"rank": rank})
    if objects != [{"rank": r} for r in range(size)]:
        wrong.append("all_gather_object")
    return wrong


def echo(**kwargs):
    return {"rank": dist.get_rank(), "array": np.arange(3), "kwargs": kwargs, "pid": os.getpid()}


def raise_on(rank):
    if dist.get_rank() == rank:
        raise KeyError(f"only rank {rank} fails")
    dist.barrier()


def hang_on(rank):
    if dist.get_rank() == rank:
        threading.Event().wait()
    dist.barrier()


def die_on(rank):
    if dist.get_rank() == rank:
        os._exit(3)
    dist.barrier()


def die_on_while_others_hang(rank):
    dist.barrier()  # all have come here
    if dist.get_rank() == rank:
        os._exit(3)
    threading.Event().wait()


def leave_unread():
    """Rank 1 sends what nobody receives, and makes a group more than the others before it fails."""
    if dist.get_rank() == 1:
        dist.send(paddle.full([2], 99.0), 0)
        dist.collective._new_ring_id()
        raise ValueError("half way")


def receive_fresh():
    if dist.get_rank() == 1:
        dist.send(paddle.full([2], 5.0), 0)
    elif dist.get_rank() == 0:
        x = paddle.zeros([2])
        dist.recv(x, 1)
        return [float(x[0]), dist.new_group(list(range(dist.get_world_size()))).id]
    return [5.0, dist.new_group(list(range(dist.get_world_size()))).id]


def patched():
    """What is patched while installed, after uninstall, and after another install."""
    from paddle import _C_ops
    from paddle.base import core

    def state():
        return [hasattr(core, "nccl_version"), _C_ops.c_split.__module__.endswith("kernels"), total()]

    def total():
        x = paddle.ones([])
        dist.all_reduce(x)
        return float(x)

    before = state()
    cpu_world.install()  # a second time does nothing
    cpu_world.uninstall()
    between = state()
    cpu_world.install(timeout=None, close_at_exit=False)
    return [before, between, state()]


def stock_checkpoint(path):
    """Paddle's own save and load, with a shard that moves between ranks (U6)."""
    from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight

    rank, size = dist.get_rank(), dist.get_world_size()
    mine = ShardedWeight("w", paddle.full([2], float(rank)), (2,), (2 * size,), (2 * rank,))
    dist.save_state_dict({"w": mine}, path)
    dist.barrier()
    whole = paddle.full([2 * size], -1.0)
    with cpu_world.tensor_cuda_stays():
        dist.load_state_dict({"w": ShardedWeight("w", whole, (2 * size,), (2 * size,), (0,))}, path)
    return whole.numpy()


def environment(name):
    return os.environ.get(name)


def as_the_docstring(code):
    """Degrees of the hybrid group that the package's example makes."""
    names = {}
    exec(code, names)
    return [names["hcg"].get_model_parallel_world_size(), names["hcg"].get_pipe_parallel_world_size()]


def degrees(layouts):
    """Initialises fleet once per layout and returns what it reports each time."""
    out = []
    for layout in layouts:
        hcg = cpu_world.init_fleet(**layout)
        layer = nn.Linear(2, 2)
        out.append(
            [
                hcg.get_data_parallel_world_size(),
                hcg.get_model_parallel_world_size(),
                hcg.get_pipe_parallel_world_size(),
                hcg.get_sharding_parallel_world_size(),
                layer.weight.name,
            ]
        )
    return out


# -- tensor parallelism ------------------------------------------------------------------------------------------------


class TensorNet(nn.Layer):
    V, H, I = 16, 8, 16
    AXES = {"emb.weight": 0, "fc1.weight": 1, "fc1.bias": 0, "fc2.weight": 0, "out.weight": 1}

    def __init__(self, hcg, gather):
        super().__init__()
        self.parallel = hcg is not None
        if self.parallel:
            self.emb = fleet.meta_parallel.VocabParallelEmbedding(self.V, self.H)
            self.fc1 = fleet.meta_parallel.ColumnParallelLinear(self.H, self.I, has_bias=True, gather_output=gather)
            self.fc2 = fleet.meta_parallel.RowParallelLinear(
                self.I, self.H, has_bias=True, input_is_parallel=not gather
            )
            self.out = fleet.meta_parallel.ColumnParallelLinear(self.H, self.V, has_bias=False, gather_output=False)
            self.ce = fleet.meta_parallel.ParallelCrossEntropy()
        else:
            self.emb = nn.Embedding(self.V, self.H)
            self.fc1, self.fc2 = nn.Linear(self.H, self.I), nn.Linear(self.I, self.H)
            self.out = nn.Linear(self.H, self.V, bias_attr=False)
        full = {"emb.weight": (self.V, self.H), "fc1.weight": (self.H, self.I), "fc1.bias": (self.I,)}
        full |= {"fc2.weight": (self.I, self.H), "fc2.bias": (self.H,), "out.weight": (self.H, self.V)}
        fill(self, full, self.AXES if self.parallel else {}, hcg)

    def forward(self, x, y):
        h = self.emb(x)
        h = h + self.fc2(F.relu(self.fc1(h)))
        if self.parallel:
            return self.ce(self.out(h), y.unsqueeze(-1)).mean()
        return F.cross_entropy(self.out(h), y.unsqueeze(-1), reduction="none").mean()


def fill(layer, shapes, axes, hcg):
    for name, param in layer.named_parameters():
        param.set_value(part(name, weight(name, shapes[name]), axes, hcg))


def part(name, array, axes, hcg):
    if name not in axes:
        return array
    return np.split(array, hcg.get_model_parallel_world_size(), axes[name])[hcg.get_model_parallel_rank()]


def tensor_parallel(gather):
    hcg = cpu_world.init_fleet(mp=dist.get_world_size())
    results = []
    for parallel in (True, False):
        model = TensorNet(hcg if parallel else None, gather)
        opt = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
        step, base = model, model
        if parallel:
            step, opt = fleet.distributed_model(model), fleet.distributed_optimizer(opt)
        losses = []
        for n in range(STEPS):
            x, y = (paddle.to_tensor(rng(n + s).randint(0, model.V, (4, 5))) for s in (0, 9))
            loss = step(x, y)
            loss.backward()
            opt.step()
            opt.clear_grad()
            losses.append(float(loss))
        params = {name: p.numpy() for name, p in base.named_parameters()}
        if not parallel:
            params = {name: part(name, array, TensorNet.AXES, hcg) for name, array in params.items()}
        results.append((losses, params))
    return compare(*results)


class SequenceNet(nn.Layer):
    H, I = 8, 16
    AXES = {"fc1.weight": 1, "fc1.bias": 0, "fc2.weight": 0}

    def __init__(self, hcg):
        from paddle.distributed.fleet.utils import sequence_parallel_utils as sp

        super().__init__()
        self.sp = sp if hcg is not None else None
        self.ln = nn.LayerNorm(self.H)
        if self.sp:
            self.fc1 = sp.ColumnSequenceParallelLinear(self.H, self.I, has_bias=True, gather_output=False)
            self.fc2 = sp.RowSequenceParallelLinear(self.I, self.H, has_bias=True, input_is_parallel=True)
            for param in (self.ln.weight, self.ln.bias, self.fc2.bias):
                sp.mark_as_sequence_parallel_parameter(param)
        else:
            self.fc1, self.fc2 = nn.Linear(self.H, self.I), nn.Linear(self.I, self.H)
        full = {"ln.weight": (self.H,), "ln.bias": (self.H,), "fc1.weight": (self.H, self.I), "fc1.bias": (self.I,)}
        full |= {"fc2.weight": (self.I, self.H), "fc2.bias": (self.H,)}
        fill(self, full, self.AXES if self.sp else {}, hcg)

    def forward(self, x):
        if self.sp:
            x = self.sp.ScatterOp.apply(x)
        x = x + self.fc2(F.gelu(self.fc1(self.ln(x))))
        if self.sp:
            x = self.sp.GatherOp.apply(x)
        return (x * x).mean()


def sequence_parallel():
    hcg = cpu_world.init_fleet(mp=dist.get_world_size())
    results = []
    for parallel in (True, False):
        model = SequenceNet(hcg if parallel else None)
        opt = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
        step = model
        if parallel:
            model.sp.register_sequence_parallel_allreduce_hooks(model, 1, False)
            step, opt = fleet.distributed_model(model), fleet.distributed_optimizer(opt)
        losses = []
        for n in range(STEPS):
            x = paddle.to_tensor(rng(n).randn(8, 2, model.H).astype("float32"))
            x.stop_gradient = False
            loss = step(x)
            loss.backward()
            opt.step()
            opt.clear_grad()
            losses.append(float(loss))
        params = {name: p.numpy() for name, p in model.named_parameters()}
        if not parallel:
            params = {name: part(name, array, SequenceNet.AXES, hcg) for name, array in params.items()}
        results.append((losses, params))
    return compare(*results)


# -- sharding, group sharding, data parallelism: the batch is split, the model is not ----------------------------------


class Mlp(nn.Layer):
    """Odd sizes: with them a parameter of sharding V2 straddles ranks."""

    SHAPES = {
        "fc1.weight": (5, 77), "fc1.bias": (77,), "fc2.weight": (77, 3), "fc2.bias": (3,), "fc3.weight": (3, 1),
        "fc3.bias": (1,),
    }  # fmt: skip

    def __init__(self, dtype="float32"):
        super().__init__()
        paddle.set_default_dtype(dtype)
        self.fc1, self.fc2, self.fc3 = nn.Linear(5, 77), nn.Linear(77, 3), nn.Linear(3, 1)
        paddle.set_default_dtype("float32")
        for name, param in self.named_parameters():
            param.set_value(paddle.to_tensor(weight(name, self.SHAPES[name])).astype(param.dtype))
        self.half = dtype != "float32"

    def forward(self, x):
        if not self.half:
            return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))
        for layer in (self.fc1, self.fc2, self.fc3):  # there is no half-precision matmul on a CPU
            x = F.relu(x) if layer is not self.fc1 else x
            x = paddle.matmul(x, layer.weight.astype("float32")) + layer.bias.astype("float32")
        return x


def train_mlp(step, params, opt, replicated):
    """Trains on this rank's part of the batch, or on all of it; returns losses and parameters."""
    rank, size = dist.get_rank(), dist.get_world_size()
    losses = []
    for n in range(STEPS):
        x, y = rng(n).randn(4 * size, 5).astype("float32"), rng(n + 5).randn(4 * size, 1).astype("float32")
        if replicated:
            x, y = x[4 * rank : 4 * rank + 4], y[4 * rank : 4 * rank + 4]
        loss = ((step(paddle.to_tensor(x)) - paddle.to_tensor(y)) ** 2).mean()
        loss.backward()
        opt.step()
        opt.clear_grad()
        losses.append(mean_over_world(loss) if replicated else float(loss))
    return losses, params


def mean_over_world(loss):
    loss = loss.detach().astype("float32")
    dist.all_reduce(loss, dist.ReduceOp.AVG)
    return loss.item()  # of shape [] or, from a pipeline, [1]


def values(model):
    return {name: param.astype("float32").numpy() for name, param in model.named_parameters()}


def adamw(model, clip, half=False):
    grad_clip = nn.ClipGradByGlobalNorm(0.1) if clip else None
    return paddle.optimizer.AdamW(0.01, parameters=model.parameters(), grad_clip=grad_clip, multi_precision=half)


def reference_mlp(clip=False, dtype="float32"):
    model = Mlp(dtype)
    losses, _ = train_mlp(model, None, adamw(model, clip, dtype != "float32"), False)
    return losses, values(model)


def sharding(split, clip=False, dtype="float32"):
    cpu_world.init_fleet(sharding=dist.get_world_size(), split_param=split)
    model = Mlp(dtype)
    opt = fleet.distributed_optimizer(adamw(model, clip, dtype != "float32"))
    losses, _ = train_mlp(fleet.distributed_model(model), None, opt, True)
    return compare((losses, values(model)), reference_mlp(clip, dtype))


def group_sharded(level, clip=False):
    from paddle.distributed.sharding import group_sharded_parallel

    base = Mlp()
    model, opt, _ = group_sharded_parallel(base, adamw(base, clip), level, segment_size=64)
    losses, _ = train_mlp(model, None, opt, True)
    # Stage 3 must really have sliced something, or this proves nothing.
    sliced = sum(getattr(p, "status", None) == "part" for p in base.parameters())
    if level == "p_g_os":
        model.get_all_parameters()
    return [*compare((losses, values(base)), reference_mlp(clip)), sliced]


def data_parallel():
    base = Mlp()
    model = paddle.DataParallel(base)
    opt = adamw(base, False)
    losses, _ = train_mlp(model, None, opt, True)
    out = compare((losses, values(base)), reference_mlp())
    # Without synchronisation the gradients of the replicas differ; the next synchronised pass averages the sums.
    rank = dist.get_rank()
    with model.no_sync():
        model(paddle.full([1, 5], float(rank + 1))).sum().backward()
    alone: list = []
    dist.all_gather_object(alone, base.fc1.weight.grad.numpy())
    model(paddle.zeros([1, 5])).sum().backward()
    both: list = []
    dist.all_gather_object(both, base.fc1.weight.grad.numpy())
    return [*out, bool(np.abs(alone[0] - alone[1]).max() > 0), difference(both[:1], both[1:2])]


def gradient_accumulation():
    """Two passes before one step: DataParallel against one process, and sharding V2's cleared gradients (U5)."""
    size, rank = dist.get_world_size(), dist.get_rank()
    results = []
    for parallel in (True, False):
        base = Mlp()
        model = paddle.DataParallel(base) if parallel else base
        opt = adamw(base, False)
        losses = []
        for n in range(4):
            x = rng(n).randn(4 * size, 5).astype("float32")
            x = x[4 * rank : 4 * rank + 4] if parallel else x
            loss = (model(paddle.to_tensor(x)) ** 2).mean()
            loss.backward()
            losses.append(mean_over_world(loss) if parallel else float(loss))
            if n % 2:
                opt.step()
                opt.clear_grad()
        results.append((losses, values(base)))
    return compare(*results)


# -- pipelines and products --------------------------------------------------------------------------------------------

V, H = 16, 10
BLOCK_AXES = {"fc1.weight": 1, "fc1.bias": 0, "fc2.weight": 0, "embedding.weight": 0}
BLOCK_SHAPES = {
    "embedding.weight": (V, H), "ln.weight": (H,), "ln.bias": (H,), "fc1.weight": (H, 2 * H), "fc1.bias": (2 * H,),
    "fc2.weight": (2 * H, H), "fc2.bias": (H,),
}  # fmt: skip


class Embedding(nn.Layer):
    def __init__(self, tensor_parallel=False):
        super().__init__()
        kind = fleet.meta_parallel.VocabParallelEmbedding if tensor_parallel else nn.Embedding
        self.embedding = kind(V, H)

    @property
    def embedding_weight(self):
        return self.embedding.weight

    def forward(self, x):
        return self.embedding(x)


class Block(nn.Layer):
    def __init__(self, tensor_parallel=False):
        super().__init__()
        self.ln = nn.LayerNorm(H)
        if tensor_parallel:
            self.fc1 = fleet.meta_parallel.ColumnParallelLinear(H, 2 * H, has_bias=True, gather_output=False)
            self.fc2 = fleet.meta_parallel.RowParallelLinear(2 * H, H, has_bias=True, input_is_parallel=True)
        else:
            self.fc1, self.fc2 = nn.Linear(H, 2 * H), nn.Linear(2 * H, H)

    def forward(self, x):
        return x + self.fc2(F.relu(self.fc1(self.ln(x))))


class Loss(nn.Layer):
    def forward(self, logits, y):
        return F.cross_entropy(logits, y.unsqueeze(-1), reduction="none").mean()


class Plain(nn.Layer):
    """The pipeline's model in one process."""

    def __init__(self, layers):
        super().__init__()
        self.emb = Embedding()
        self.blocks = nn.LayerList([Block() for _ in range(layers)])

    def forward(self, x, y):
        h = self.emb(x)
        for block in self.blocks:
            h = block(h)
        return Loss()(paddle.matmul(h, self.emb.embedding_weight, transpose_y=True), y)


def canonical(name, offset=0):
    """``"3.fc1.weight"`` of a pipeline, a chunk of a pipeline, or the plain model; and ``"fc1.weight"``."""
    leaf = ".".join(name.split(".")[-2:])
    if leaf == "embedding.weight":
        return leaf, leaf
    return f"{sum(int(p) for p in name.split('.') if p.isdigit()) + offset}.{leaf}", leaf


def head(tensor_parallel, hcg):
    from paddle.distributed.fleet.layers.mpu import mp_ops

    def forward(layer, x):
        if not tensor_parallel:
            return paddle.matmul(x, layer.embedding_weight, transpose_y=True)
        group = hcg.get_model_parallel_group()
        x = mp_ops._c_identity(x, group=group)
        return mp_ops._c_concat(paddle.matmul(x, layer.embedding_weight, transpose_y=True), group=group)

    return forward


def fill_pipeline(model, axes, hcg, offset=0):
    for name, param in model.named_parameters():
        full, leaf = canonical(name, offset)
        array = weight(full, BLOCK_SHAPES[leaf])
        param.set_value(part(leaf, np.ones_like(array) if leaf == "ln.weight" else array, axes, hcg))


def pipeline(layout, layers=4, chunks=1):
    """A pipeline with tied embeddings, possibly times other kinds of parallelism."""
    hcg = cpu_world.init_fleet(**layout, accumulate_steps=4, micro_batch_size=2)
    mp = layout.get("mp", 1) > 1
    axes = BLOCK_AXES if mp else {}
    tied = {"shared_weight_attr": "embedding_weight", "tensor_parallel": mp}
    descs = [SharedLayerDesc("emb", Embedding, **tied), *(LayerDesc(Block, mp) for _ in range(layers))]
    descs.append(SharedLayerDesc("emb", Embedding, forward_func=head(mp, hcg), **tied))
    interleaved = {"num_virtual_pipeline_stages": chunks, "seg_method": "layer:Block"} if chunks > 1 else {}
    base = PipelineLayer(descs, num_stages=layout["pp"], loss_fn=Loss(), topology=hcg.topology(), **interleaved)
    fill_pipeline(base, axes, hcg)
    opt = fleet.distributed_optimizer(paddle.optimizer.AdamW(0.01, parameters=base.parameters()))
    model = fleet.distributed_model(base)
    replicas = layout.get("dp", 1) * layout.get("sharding", 1)
    replica = hcg.get_data_parallel_rank() * layout.get("sharding", 1) + hcg.get_sharding_parallel_rank()

    plain = Plain(layers)
    fill_pipeline(plain, {}, hcg, offset=1)
    plain_opt = paddle.optimizer.AdamW(0.01, parameters=plain.parameters())
    losses, wanted = [], []
    for n in range(STEPS):
        x, y = (rng(n + s).randint(0, V, (8 * replicas, 5)) for s in (0, 9))
        mine = slice(8 * replica, 8 * replica + 8)
        loss = model.train_batch([paddle.to_tensor(x[mine]), paddle.to_tensor(y[mine])], opt)
        losses.append(mean_over_world(loss))
        loss = plain(paddle.to_tensor(x), paddle.to_tensor(y))
        loss.backward()
        plain_opt.step()
        plain_opt.clear_grad()
        wanted.append(float(loss))
    truth = {}
    for name, param in plain.named_parameters():
        full, leaf = canonical(name, 1)
        truth[full] = part(leaf, param.numpy(), axes, hcg)
    params = {canonical(name)[0]: param.numpy() for name, param in base.named_parameters()}
    return compare((losses, params), (wanted, truth))


# -- mixture of experts ------------------------------------------------------------------------------------------------


class Expert(nn.Layer):
    def __init__(self, number):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)
        for name, param in self.named_parameters():
            param.set_value(weight(f"expert{number}.{name}", tuple(param.shape)))

    def forward(self, x):
        return self.b(F.relu(self.a(x)))


class MoeNet(nn.Layer):
    LOCAL = 2

    def __init__(self, group, gate):
        from paddle.incubate.distributed.models.moe import MoELayer

        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        mine = range(rank * self.LOCAL, (rank + 1) * self.LOCAL) if group else range(size * self.LOCAL)
        self.inp = nn.Linear(8, 8)
        experts = nn.LayerList([Expert(number) for number in mine])
        self.moe = MoELayer(
            d_model=8,
            experts=experts,
            gate={"type": gate, "top_k": 1 if gate == "switch" else 2},
            moe_group=group,
            mp_group=None,
        )
        for name, param in [*self.inp.named_parameters(), *self.moe.gate.named_parameters()]:
            param.set_value(weight(f"{name}{tuple(param.shape)}", tuple(param.shape)))

    def forward(self, x):
        return self.moe(self.inp(x))


def expert_parallel(gate="naive"):
    rank, size = dist.get_rank(), dist.get_world_size()
    cpu_world.init_fleet(dp=size)
    group = dist.new_group(list(range(size)))
    results = []
    for parallel in (True, False):
        model = MoeNet(group if parallel else None, gate)
        opt = paddle.optimizer.AdamW(0.01, parameters=model.parameters())
        losses = []
        for n in range(STEPS):
            x = rng(n).randn(2 * size, 4, 8).astype("float32")
            y = model(paddle.to_tensor(x[2 * rank : 2 * rank + 2] if parallel else x))
            loss = (y * y).mean()
            loss.backward()
            for name, param in model.named_parameters():
                if parallel and param.grad is not None:
                    with paddle.no_grad():
                        if "experts" not in name:
                            dist.all_reduce(param.grad)
                        param.grad.scale_(1.0 / size)
            opt.step()
            opt.clear_grad()
            losses.append(mean_over_world(loss) if parallel else float(loss))
        params = values(model)
        if parallel:
            params = {expert_name(name, rank * MoeNet.LOCAL): array for name, array in params.items()}
        results.append((losses, params))
    return compare(*results) if gate == "naive" else [bool(np.isfinite(results[0][0]).all())]


def expert_name(name, first):
    before, found, after = name.partition("experts.")
    if not found:
        return name
    number, _, rest = after.partition(".")
    return f"{before}experts.{int(number) + first}.{rest}"


# -- what is asserted -------------------------------------------------------------------------------------------------

JOBS = "tests.distributed.test_cpu_world"
#: Of losses and parameters after three AdamW steps in float32; measured differences are below 4e-7.
TOLERANCE = 2e-5


def agree(world, job, tolerance=TOLERANCE, **kwargs):
    """Runs a training job and checks what each rank reports about it; returns what is left of the reports."""
    reports = world.run(f"{JOBS}:{job}", **kwargs)
    for rank, (loss, param, *_) in enumerate(reports):
        assert loss <= tolerance, f"rank {rank}: losses differ by {loss}"
        assert param <= tolerance, f"rank {rank}: parameters differ by {param}"
    return [report[2:] for report in reports]


# -- collectives -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("size", [2, 4])
def test_every_collective_is_exact(world, size, dtype):
    assert world(size).run(f"{JOBS}:collectives", dtype=dtype) == [[]] * size


# -- training equals one process ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallel(world, size, gather):
    agree(world(size), "tensor_parallel", gather=gather)


@pytest.mark.parametrize("size", [2, 4])
def test_sequence_parallel(world, size):
    agree(world(size), "sequence_parallel")


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_sharding(world, size, split, clip):
    agree(world(size), "sharding", split=split, clip=clip)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("split", [False, True])
def test_sharding_in_half_precision(world2, split, dtype):
    agree(world2, "sharding", tolerance=2e-2, split=split, dtype=dtype)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("level", ["os", "os_g", "p_g_os"])
def test_group_sharded(world2, level, clip):
    for (sliced,) in agree(world2, "group_sharded", level=level, clip=clip):
        assert sliced == (3 if level == "p_g_os" else 0)  # fc1.weight, fc1.bias and fc2.weight: above 64 elements


@pytest.mark.parametrize("size", [2, 4])
def test_data_parallel(world, size):
    for differed_alone, difference_after in agree(world(size), "data_parallel"):
        assert differed_alone
        assert difference_after == 0


def test_gradient_accumulation(world2):
    agree(world2, "gradient_accumulation")


def test_pipeline_of_two(world2):
    agree(world2, "pipeline", layout={"pp": 2})


@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 4},
        {"pp": 2, "mp": 2},
        {"pp": 2, "dp": 2},
        {"pp": 2, "sharding": 2},
        {"pp": 2, "sharding": 2, "split_param": True},
    ],
    ids=str,
)
def test_pipeline_of_four_ranks(world4, layout):
    agree(world4, "pipeline", layout=layout)


def test_interleaved_pipeline(world4):
    agree(world4, "pipeline", layout={"pp": 4}, layers=8, chunks=2)


def test_expert_parallel(world2):
    agree(world2, "expert_parallel")


@pytest.mark.parametrize("gate", ["gshard", "switch"])
def test_random_gates_run(world2, gate):
    # They draw random numbers, so there is nothing to compare with.
    assert world2.run(f"{JOBS}:expert_parallel", gate=gate) == [[True]] * 2


# -- the world ---------------------------------------------------------------------------------------------------------


def test_fleet_takes_other_degrees_in_one_world(world4):
    layouts = [{"mp": 4}, {"dp": 4}, {"mp": 2, "sharding": 2}, {"pp": 2, "dp": 2}, {"sharding": 4}]
    reports = world4.run(f"{JOBS}:degrees", layouts=layouts)
    wanted = [[layout.get(axis, 1) for axis in ("dp", "mp", "pp", "sharding")] for layout in layouts]
    for report in reports:
        assert [entry[:4] for entry in report] == wanted
        # Parameter names start over in every job, not in every fleet.init.
        assert [entry[4] for entry in report] == [f"linear_{n}.w_0" for n in range(len(layouts))]


def test_the_example_of_the_docstring(world4):
    code = docstring_block("paddle_flexckpt/testing/cpu_world/__init__.py", "init_fleet")
    assert world4.run(f"{JOBS}:as_the_docstring", code=code) == [[2, 2]] * 4


def test_wrong_degrees_are_refused(world2):
    with pytest.raises(WorldError, match="is not the world size 2"):
        world2.run(f"{JOBS}:degrees", layouts=[{"mp": 4}])


def test_results_come_in_rank_order_and_as_json(world4):
    reports = world4.run(f"{JOBS}:echo", a=[1, None], b={"c": "d"})
    assert [report["rank"] for report in reports] == [0, 1, 2, 3]
    assert reports[0]["array"] == [0, 1, 2]
    assert reports[0]["kwargs"] == {"a": [1, None], "b": {"c": "d"}}


def test_a_function_object_is_a_job_too(world2):

    assert [report["rank"] for report in world2.run(echo)] == [0, 1]


def test_what_cannot_be_sent_is_refused(world2):
    with pytest.raises(ValueError, match="top-level function"):
        world2.run(lambda: None)
    with pytest.raises(ValueError, match="must be JSON"):
        world2.run(f"{JOBS}:echo", a=object())
    with pytest.raises(ValueError, match="at least 1 rank"):
        World(0)


def test_a_failure_on_one_rank_is_told_and_the_world_lives_on(world4):
    before = world4.run(f"{JOBS}:echo")
    with pytest.raises(WorldError, match="on rank 2 first") as caught:
        world4.run(f"{JOBS}:raise_on", rank=2)
    assert "KeyError: 'only rank 2 fails'" in caught.value.failures[2]
    assert "in raise_on" in caught.value.failures[2]
    # The others were waiting for rank 2 and were told, rather than left to wait.
    for rank in (0, 1, 3):
        assert "the job was aborted: rank 2 failed" in caught.value.failures[rank]
    assert world4.run(f"{JOBS}:echo") == before  # the same processes


def test_what_a_failed_job_left_behind_does_not_reach_the_next(world2):
    with pytest.raises(WorldError, match="half way"):
        world2.run(f"{JOBS}:leave_unread")
    (value, first_id), (_, second_id) = world2.run(f"{JOBS}:receive_fresh")
    assert value == 5.0
    assert first_id == second_id


def test_a_hanging_rank_is_dumped_and_the_next_job_works(tmp_path):
    with World(2, env={"REHEARSAL": "yes"}, log_dir=tmp_path / "logs") as world:
        with pytest.raises(WorldError, match=r"hang_on did not finish within 2 s") as caught:
            world.run(f"{JOBS}:hang_on", rank=1, time_limit=2)
        assert not world.alive
        assert "in hang_on" in caught.value.stacks[1]
        assert "in barrier" in caught.value.stacks[0]
        reports = world.run(f"{JOBS}:echo")
        assert [report["rank"] for report in reports] == [0, 1]
        assert world.starts == 2
        assert world.run(f"{JOBS}:environment", name="REHEARSAL") == ["yes", "yes"]
        # A rank that ends without a word takes the world with it.
        with pytest.raises(WorldError) as caught:
            world.run(f"{JOBS}:die_on", rank=0)
        assert "the process ended" in caught.value.failures[0]
        # The launcher ends the other one, which may not have come to its own error by then.
        assert any(words in caught.value.failures[1] for words in ("rank 0", "the process ended"))
        assert not world.alive
        assert not any(alive(report["pid"]) for report in reports)
    # The logs of every start stay where the caller wanted them.
    assert [(tmp_path / "logs" / f"start{n}" / "workerlog.1").exists() for n in (1, 2)] == [True, True]
    with pytest.raises(ValueError, match="has been closed"):
        world.run(f"{JOBS}:echo")


def test_the_launcher_ends_a_rank_that_hangs_when_another_has_died_and_its_stack_is_known():
    with World(2, grace=100) as world:
        with pytest.raises(WorldError) as caught:
            world.run(f"{JOBS}:die_on_while_others_hang", rank=0)
        assert "the process ended" in caught.value.failures[1]
        assert "in die_on_while_others_hang" in caught.value.stacks[1]


def test_a_world_that_cannot_start_says_why():
    message = "did not start: the launcher ended with code"
    with World(2, env={"PYTHONHOME": "/nowhere"}) as world, pytest.raises(WorldError, match=message):
        world.run(f"{JOBS}:echo")


def test_uninstall_takes_every_patch_back(world2):
    installed, uninstalled, again = world2.run(f"{JOBS}:patched")[0]
    assert installed == again == [True, True, 2.0]
    assert uninstalled == [False, False, 2.0]  # a group made before goes on working


def test_stock_checkpoint_moves_shards(world2, tmp_path):
    pytest.importorskip("paddle", "3.3", reason="save_state_dict of older releases takes no ShardedWeight")
    assert world2.run(f"{JOBS}:stock_checkpoint", path=str(tmp_path)) == [[0, 0, 1, 1]] * 2


def launch(tmp_path, text, size=2):
    """Runs a script under the launcher, as a user would, without a World."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(text))
    command = [sys.executable, "-m", "paddle.distributed.launch", "--nproc_per_node", str(size)]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PADDLE_", "CUDA_"))}
    root = str(Path(__file__).parents[2])
    command += ["--host", "127.0.0.1", "--log_dir", str(tmp_path / "log"), str(script)]
    done = subprocess.run(command, env={**env, "PYTHONPATH": root}, capture_output=True, text=True, timeout=300)
    logs = [(tmp_path / "log" / f"workerlog.{rank}").read_text() for rank in range(size)]
    return done.returncode, logs


def test_a_script_of_its_own_ends_clean(tmp_path):
    code, logs = launch(
        tmp_path,
        """
        import sys
        import paddle
        from paddle_flexckpt.testing import cpu_world
        cpu_world.install()
        hcg = cpu_world.init_fleet(mp=2)
        x = paddle.ones([2])
        paddle.distributed.all_reduce(x, group=hcg.get_model_parallel_group())
        print("sum", x.tolist())
        """,
    )
    assert code == 0, logs
    assert all("sum [2.0, 2.0]" in log for log in logs)


def test_a_script_that_fails_ends_the_others(tmp_path):
    code, logs = launch(
        tmp_path,
        """
        import paddle
        from paddle_flexckpt.testing import cpu_world
        cpu_world.install(timeout=300)
        cpu_world.init_fleet(dp=2)
        paddle.distributed.barrier()
        if paddle.distributed.get_rank() == 1:
            raise ValueError("on purpose")
        paddle.distributed.barrier()
        """,
    )
    assert code != 0
    assert "on purpose" in logs[1]
    assert "rank 1 has left" in logs[0]


# -- the mesh, without Paddle's store ----------------------------------------------------------------------------------


class Store:
    """What the mesh uses of a TCPStore: get() waits for the key, and returns bytes."""

    def __init__(self):
        self.values, self.news = {}, threading.Condition()

    def set(self, key, value):
        with self.news:
            self.values[key] = value.encode()
            self.news.notify_all()

    def get(self, key):
        with self.news:
            assert self.news.wait_for(lambda: key in self.values, 300), key
            return self.values[key]


@pytest.fixture
def pair():
    from paddle_flexckpt.testing.cpu_world import Mesh

    store, meshes = Store(), [Mesh(timeout=300), Mesh(timeout=300)]
    threads = [threading.Thread(target=mesh.start, args=(store, rank, 2)) for rank, mesh in enumerate(meshes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield meshes
    for mesh in meshes:
        mesh.close(None)


@pytest.mark.parametrize("array", [np.arange(6).reshape(2, 3), np.float32(3), np.empty((0, 4)), np.array([True])])
def test_mesh_carries_any_array(pair, array):
    array = np.asarray(array)
    pair[0].send(1, "x", array)
    got = pair[1].recv(0, "x")
    assert got.dtype == array.dtype
    assert got.shape == array.shape
    assert np.array_equal(got, array)
    assert got.flags.writeable or got.size == 0


@pytest.mark.parametrize("hello", [{"token": "guess", "rank": 0}, {"rank": 0}, "GET / HTTP/1.1\r\n\r\n"], ids=str)
def test_mesh_refuses_strangers(pair, hello):
    with socket.create_connection(("127.0.0.1", pair[1].port)) as stranger:
        if isinstance(hello, dict):
            frames.send_frame(stranger, hello)
        else:
            stranger.sendall(hello.encode())
        # Closed by the mesh: an end, or a reset where it left a part of the hello unread.
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    pair[0].send(1, "x", np.ones(2))
    assert pair[1].recv(0, "x").tolist() == [1, 1]


def test_mesh_says_what_it_missed(pair):
    from paddle_flexckpt.testing.cpu_world import MeshError

    pair[1].timeout = 0.01
    with pytest.raises(MeshError, match=r"rank 1 waits for rank 0 on channel 'x': nothing came within 0\.01 s"):
        pair[1].recv(0, "x")
    pair[1].timeout = 300
    pair[0].send(1, "y", np.ones(1))
    assert pair[1].recv(0, "y").tolist() == [1]
    pair[0].close(None)
    with pytest.raises(MeshError, match="rank 0 has left"):
        pair[1].recv(0, "x")


def test_mesh_does_not_wait_for_a_peer_when_another_one_has_left(pair):
    """Rank 0 has noticed before, in another collective, and sends nothing more: nobody would ever tell rank 1."""
    from paddle_flexckpt.testing.cpu_world import MeshError

    pair[1]._lose(2, "rank 2 has left")
    with pytest.raises(MeshError, match="rank 1 waits for rank 2 on channel 'x': rank 2 has left"):
        pair[1].recv_all([0, 1, 2], "x")


def test_mesh_abort_is_for_one_job(pair):
    from paddle_flexckpt.testing.cpu_world import MeshError

    pair[1].next_epoch(5)
    pair[1].abort("cause", 6)  # comes before this rank has begun job 6
    pair[1].abort("consequence", 6)
    pair[0].next_epoch(5)
    pair[0].send(1, "x", np.ones(1))
    pair[1].recv(0, "x")
    pair[1].next_epoch(6)
    pair[1].next_epoch()  # another fleet within the job
    with pytest.raises(MeshError, match="cause"):
        pair[1].recv(0, "x")
    for mesh in pair:
        mesh.next_epoch(7)
    pair[0].send(1, "x", np.zeros(1))
    assert pair[1].recv(0, "x").tolist() == [0]


def test_frames_refuse_what_is_too_large():
    here, there = socket.socketpair()
    with here, there:
        frames.send_frame(here, {"token": "x" * frames.HELLO_LIMIT})
        with pytest.raises(frames.FrameError, match="above the limit"):
            frames.accept_hello(there, "x")


def test_workers_end_with_their_controller(tmp_path):
    """A killed test run leaves no processes: its workers see the connection close."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from paddle_flexckpt.testing import World\n"
        f"world = World(2, log_dir=sys.argv[2])\nprint([r['pid'] for r in world.run('{JOBS}:echo')], flush=True)\n"
        "sys.stdin.read()\n"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    command = [sys.executable, "-c", script, root, str(tmp_path / "logs")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as controller:
        pids = [int(pid) for pid in controller.stdout.readline().strip("[]\n").split(",")]
        files = [os.pidfd_open(pid) for pid in pids]
        controller.send_signal(signal.SIGKILL)
    for file in files:
        assert wait_for_end(file, 20), "a worker outlived its controller"
        os.close(file)


def wait_for_end(pidfd, seconds):
    """Whether the process of a pidfd ends within so many seconds."""
    return bool(wait([pidfd], seconds))


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"

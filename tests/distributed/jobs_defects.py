"""Jobs of test_defects: what Paddle's own FlexCheckpoint gets wrong between ranks."""

from __future__ import annotations

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from tests.distributed import jobs_common as common


def flattened(directory, shape, ranks):
    """A tensor flattened over some ranks, loaded whole and flattened over all; resharded likewise (A5)."""
    group = dist.new_group(list(range(ranks)))
    rank, size = dist.get_rank(), dist.get_world_size()
    array = np.arange(int(np.prod(shape)), dtype="float32").reshape(shape)

    def cut(number, filled):
        start, stop = array.size * rank // number, array.size * (rank + 1) // number
        part = array.reshape(-1)[start:stop]
        tensor = paddle.to_tensor(part) if filled else paddle.full([stop - start], -1.0)
        return {"w": fc.ShardedWeight("w", tensor, shape, shape, [0] * len(shape), True, slice(start, stop))}, part

    if rank < ranks:
        fc.save_state_dict(cut(ranks, True)[0], directory, group)
    dist.barrier()
    target, part = cut(size, False)
    fc.load_state_dict(target, directory)
    right = common.same_bytes(target["w"].local_tensor, part)
    if rank < ranks:
        whole = {"w": paddle.full(list(shape), -1.0)}
        fc.reshard_sharded_state_dict(cut(ranks, True)[0], whole, group)
        right = right and common.same_bytes(whole["w"], array)
    return right


def dist_parameter():
    """sharded_state_dict() of a semi-automatic layer (A6): shape and offset of this rank's shard."""
    fc.install()
    layer = paddle.nn.Linear(4, 2)
    mesh = dist.ProcessMesh([0, 1], dim_names=["x"])
    layer.weight = dist.shard_tensor(layer.weight, mesh, [dist.Shard(0)])
    weight = layer.sharded_state_dict()["weight"]
    return [list(weight.local_shape), list(weight.global_offset)]


def without_cuda(directory):
    """Save, load and reshard where every call of ``Tensor.cuda`` is an error (B19)."""
    rank = dist.get_rank()
    array = np.arange(24, dtype="float32").reshape(4, 6)

    def refuse(*args, **kwargs):
        raise AssertionError("Tensor.cuda() was called")

    native = paddle.Tensor.cuda
    paddle.Tensor.cuda = refuse
    try:
        source = {"w": fc.ShardedWeight("w", paddle.to_tensor(array[2 * rank :][:2]), (2, 6), (4, 6), (2 * rank, 0))}
        targets = [{"w": fc.ShardedWeight("w", paddle.zeros([4, 3]), (4, 3), (4, 6), (0, 3 * rank))} for _ in range(2)]
        fc.save_state_dict(source, directory)
        fc.load_state_dict(targets[0], directory)
        fc.reshard_sharded_state_dict(source, targets[1])
    finally:
        paddle.Tensor.cuda = native
    return [common.same_bytes(target["w"].local_tensor, array[:, 3 * rank :][:, :3]) for target in targets]


def replicas_that_disagree(directory):
    """The same key on every rank, all of it, with other values: experts under one name, replicas out of step (U8)."""
    state = {"w": paddle.full([3 << 8, 1 << 10], float(dist.get_rank()))}
    target = {"w": paddle.full([3 << 8, 1 << 10], -1.0)}
    errors = [common.outcome(lambda: fc.save_state_dict(state, directory))]
    errors.append(common.outcome(lambda: fc.reshard_sharded_state_dict(state, target)))
    return errors

"""Two ranks on the unpatched wheel: save, load and reshard over Paddle's own gloo. Started by test_plain_gloo."""

import sys

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc

dist.init_parallel_env()
assert "paddle_flexckpt.testing" not in sys.modules  # nothing is lent to Paddle here
rank, directory = dist.get_rank(), sys.argv[1]
w, b = np.arange(1 << 14, dtype="float32").reshape(128, 128), np.arange(5, dtype="int64")


def rows():
    return fc.ShardedWeight("w", paddle.to_tensor(w[64 * rank :][:64]), (64, 128), (128, 128), (64 * rank, 0))


def columns():
    return fc.ShardedWeight("w", paddle.zeros([128, 64]), (128, 64), (128, 128), (0, 64 * rank))


def check(state):
    assert (state["w"].local_tensor.numpy() == w[:, 64 * rank :][:, :64]).all()
    assert (state["b"].numpy() == b).all()


source = {"w": rows(), "b": paddle.to_tensor(b)}
for attempt in range(3):  # what one call leaves behind must not hinder the next
    fc.save_state_dict(source, directory)
    loaded = {"w": columns(), "b": paddle.zeros([5], dtype="int64")}
    assert fc.load_state_dict(loaded, directory).unique_id == attempt
    check(loaded)
    moved = {"w": columns(), "b": paddle.zeros([5], dtype="int64")}
    report = fc.reshard_sharded_state_dict(source, moved)
    check(moved)
    assert report.bytes_received == 64 * 64 * 4
    try:
        fc.load_state_dict({"lost": paddle.zeros([1])} if rank else loaded, directory)
        raise SystemExit("a missing key was not an error")
    except fc.ValidationError as error:
        assert "[rank 1] the source has no such key" in str(error)
total = paddle.ones([1])
dist.all_reduce(total)  # the group's own collectives are still in step
assert int(total.item()) == 2
print(f"rank {rank} is done", flush=True)

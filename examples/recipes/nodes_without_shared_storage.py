"""Nodes without shared storage: each has a directory of its own, and one of them is lost.

Each rank imitates a node. python -m paddle.distributed.launch --nproc_per_node 2 nodes_without_shared_storage.py
"""

import shutil
import sys

import paddle
import paddle.distributed as dist
from paddle.distributed import fleet

import paddle_flexckpt as fc
from paddle_flexckpt.testing import cpu_world

if dist.ParallelEnv().world_size < 2:
    sys.exit(f"Start it with the launcher, on that many ranks:\n{__doc__}")
if not paddle.device.is_compiled_with_cuda():
    cpu_world.install()
fc.install()
strategy = fleet.DistributedStrategy()
strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": dist.ParallelEnv().world_size}
strategy.tensor_parallel_configs = {"tensor_init_seed": 1}
fleet.init(is_collective=True, strategy=strategy)
rank = dist.get_rank()

model = fleet.meta_parallel.ColumnParallelLinear(8, 32, has_bias=True, gather_output=True)
optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
shards = model.sharded_state_dict()
state = {**shards, **optimizer.sharded_state_dict(shards)}


def train(step):
    loss = ((model(paddle.full([4, 8], 0.1 * step)) - 1) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    if rank == 0:
        print(f"step {step}: loss {float(loss):.4f}")


directory = f"runs/node{rank}/checkpoint"  # a real node would say "/local/checkpoint"
train(1)
fc.save_state_dict(state, directory, storage="per_node", node_copies=2)
train(2)
dist.barrier()
if rank == 1:
    shutil.rmtree("runs/node1")  # the node is replaced by an empty one
dist.barrier()
report = fc.load_state_dict(state, directory, storage="per_node")
if rank == 0:
    print(f"loaded {report.keys} tensors without node1")
train(2)

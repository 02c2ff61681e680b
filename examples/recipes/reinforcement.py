"""Reinforcement learning: a policy trains under tensor parallelism, and whole copies of it generate.

python -m paddle.distributed.launch --nproc_per_node 2 reinforcement.py
"""

import sys

import paddle
import paddle.distributed as dist
from paddle.distributed import fleet

import paddle_flexckpt as fc
from paddle_flexckpt.testing import cpu_world

UPDATES, SAMPLES, ACTIONS, GOOD = 4, 64, 8, 5

if dist.ParallelEnv().world_size < 2:
    sys.exit(f"Start it with the launcher, on that many ranks:\n{__doc__}")
if not paddle.device.is_compiled_with_cuda():
    cpu_world.install()
fc.install()
strategy = fleet.DistributedStrategy()
strategy.hybrid_configs = {"mp_degree": dist.ParallelEnv().world_size}
strategy.tensor_parallel_configs = {"tensor_init_seed": 1}
fleet.init(is_collective=True, strategy=strategy)
rank = dist.get_rank()

policy = fleet.meta_parallel.ColumnParallelLinear(4, ACTIONS, has_bias=True, gather_output=True)
optimizer = paddle.optimizer.AdamW(0.2, parameters=policy.parameters())
generator = paddle.nn.Linear(4, ACTIONS)  # whole, on every rank: this is where an inference engine stands

target = {f"actor.{key}": tensor for key, tensor in generator.state_dict().items()}
names = {"aoa_statements": ["weight -> actor.weight", "bias -> actor.bias"]}
plan = fc.plan_reshard(policy.sharded_state_dict(), target, aoa_config=names)  # once

paddle.seed(7 + rank)  # each rank generates samples of its own
prompt = paddle.ones([SAMPLES, 4])
for update in range(1, UPDATES + 1):
    report = plan.run()  # the new weights, in memory
    with paddle.no_grad():
        chances = paddle.nn.functional.softmax(generator(prompt))
        actions = paddle.multinomial(chances, 1)
    gathered = []
    dist.all_gather(gathered, actions)
    actions = paddle.concat(gathered).flatten()
    reward = (actions == GOOD).astype("float32")
    chosen = paddle.nn.functional.cross_entropy(policy(paddle.ones([len(actions), 4])), actions, reduction="none")
    loss = ((reward - reward.mean()) * chosen).mean()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    if rank == 0:
        print(f"update {update}: reward {float(reward.mean()):.2f}, {report.bytes_received} bytes received")

"""A cluster takes the machines away: SIGTERM saves the step, and the next run goes on with the following one.

python -m paddle.distributed.launch --nproc_per_node 2 preemption.py 2    # rank 1 gets the signal during step 2
python -m paddle.distributed.launch --nproc_per_node 1 preemption.py
"""

import os
import signal
import sys

import paddle
import paddle.distributed as dist
from paddle.distributed import fleet

from paddle_flexckpt import CheckpointManager, KeepLatest, SaveEvery
from paddle_flexckpt.testing import cpu_world

TAKEN_AWAY = int(sys.argv[1]) if len(sys.argv) > 1 else None
STEPS = 4

if not paddle.device.is_compiled_with_cuda():
    cpu_world.install()
strategy = fleet.DistributedStrategy()
strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": dist.ParallelEnv().world_size}
strategy.tensor_parallel_configs = {"tensor_init_seed": 1}
fleet.init(is_collective=True, strategy=strategy)
rank = dist.ParallelEnv().rank
model = fleet.meta_parallel.ColumnParallelLinear(8, 32, has_bias=True, gather_output=True)
optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())

with CheckpointManager("runs/preemption", save_when=SaveEvery(100), keep=KeepLatest(2)) as manager:
    start = 0
    if manager.latest_step() is not None:
        start = manager.restore(model=model, optimizer=optimizer, fallback=True).step
    for step in range(start + 1, STEPS + 1):
        loss = ((model(paddle.full([4, 8], 0.1 * step)) - 1) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        if rank == 0:
            print(f"step {step}: loss {float(loss):.4f}")
        if step == TAKEN_AWAY and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)  # the cluster does this
        if manager.should_save(step) or step == STEPS:  # True on all ranks once one has the signal
            manager.save(step, model=model, optimizer=optimizer)
        if manager.should_stop:
            break
if rank == 0:
    print(f"stopped after step {step}" if manager.should_stop else "done")

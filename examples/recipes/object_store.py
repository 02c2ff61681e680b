"""Checkpoints in an object store: any URL that fsspec knows is a path.

python -m paddle.distributed.launch --nproc_per_node 1 object_store.py                  # in this process's memory
python -m paddle.distributed.launch --nproc_per_node 2 object_store.py s3://bucket/run
"""

import sys

import paddle
import paddle.distributed as dist

from paddle_flexckpt import CheckpointManager, KeepLatest, SaveEvery, list_checkpoints

URL = sys.argv[1] if len(sys.argv) > 1 else "memory://recipe/run"

if dist.ParallelEnv().world_size > 1:
    dist.init_parallel_env()
paddle.seed(1)
model = paddle.nn.Linear(8, 8)
schedule = paddle.optimizer.lr.StepDecay(1e-2, step_size=2)
optimizer = paddle.optimizer.AdamW(schedule, parameters=model.parameters())
everything = {"model": model, "optimizer": optimizer, "lr_scheduler": schedule}


def train(step):
    loss = ((model(paddle.full([4, 8], 0.1 * step)) - 1) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    schedule.step()
    if dist.ParallelEnv().rank == 0:
        print(f"step {step}: loss {float(loss):.4f}")


with CheckpointManager(URL, save_when=SaveEvery(2), keep=KeepLatest(2)) as manager:
    for step in range(1, 6):
        train(step)
        if manager.should_save(step):
            manager.save(step, **everything)
    restored = manager.restore(**everything).step
    steps = [info.step for info in list_checkpoints(URL)]
    if dist.ParallelEnv().rank == 0:
        print(f"steps {steps} are there, restored step {restored}")
    train(restored + 1)

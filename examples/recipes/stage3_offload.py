"""Group-sharded stage 3, whose optimizer states and master copies lie in host memory (offload).

python -m paddle.distributed.launch --nproc_per_node 2 stage3_offload.py p_g_os    # stage 3
python -m paddle.distributed.launch --nproc_per_node 2 stage3_offload.py os_g      # stage 2 goes on
"""

import sys

import paddle
import paddle.distributed as dist
from paddle.distributed.sharding import group_sharded_parallel

import paddle_flexckpt as fc
from paddle_flexckpt.testing import cpu_world

if dist.ParallelEnv().world_size < 2 or len(sys.argv) < 2:
    sys.exit(f"Start it with the launcher, on that many ranks:\n{__doc__}")
LEVEL = sys.argv[1]
WIDTH, BATCH, STEPS, SAVE_AFTER = 16, 8, 4, 2

if not paddle.device.is_compiled_with_cuda():
    cpu_world.install()
dist.init_parallel_env()
ranks, rank = dist.get_world_size(), dist.get_rank()
paddle.seed(1)
model = paddle.nn.Sequential(paddle.nn.Linear(WIDTH, 64), paddle.nn.GELU(), paddle.nn.Linear(64, WIDTH))
optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
# Parameters with more than segment_size elements are cut; the default is 2 ** 20.
model, optimizer, _ = group_sharded_parallel(model, optimizer, LEVEL, offload=LEVEL == "p_g_os", segment_size=64)

start = 0
if fc.list_checkpoints("runs/stage3_offload"):
    start = fc.load("runs/stage3_offload", model=model, optimizer=optimizer).step

rows = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
for step in range(start + 1, STEPS + 1):
    batch = paddle.cos(paddle.arange(BATCH * WIDTH, dtype="float32") * step).reshape([BATCH, WIDTH])[rows]
    loss = ((model(batch) - batch.flip(1)) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    total = loss.detach()
    dist.all_reduce(total)
    if rank == 0:
        print(f"step {step}: loss {float(total) / ranks:.4f}")
    if step == SAVE_AFTER and not start:
        fc.save("runs/stage3_offload", model=model, optimizer=optimizer, step=step)

"""Semi-automatic parallel: the mesh that the network is cut over may be another one after a load.

python -m paddle.distributed.launch --nproc_per_node 4 semi_automatic.py 2 2
python -m paddle.distributed.launch --nproc_per_node 2 semi_automatic.py 1 2
"""

import sys

import numpy as np
import paddle
import paddle.distributed as dist

import paddle_flexckpt as fc
from paddle_flexckpt.testing import cpu_world

DATA, TENSOR = (int(argument) for argument in (*sys.argv[1:], 0, 0)[:2])
if dist.ParallelEnv().world_size != DATA * TENSOR:
    sys.exit(f"Start it with the launcher, on that many ranks:\n{__doc__}")
STEPS, SAVE_AFTER = 4, 2

if not paddle.device.is_compiled_with_cuda():
    cpu_world.install()
dist.init_parallel_env()
mesh = dist.ProcessMesh(np.arange(DATA * TENSOR).reshape([DATA, TENSOR]), dim_names=["dp", "mp"])
dist.auto_parallel.set_mesh(mesh)
paddle.seed(1)


class Model(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.up = paddle.nn.Linear(16, 64)
        self.down = paddle.nn.Linear(64, 16)

    def forward(self, x):
        return self.down(paddle.nn.functional.gelu(self.up(x)))


model = Model()
optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())
plan = {"up": dist.ColWiseParallel(), "down": dist.RowWiseParallel()}
config = {"dp_config": {"sharding_level": 1}, "mp_config": {"parallelize_plan": plan}}
model, optimizer = dist.parallelize(model, optimizer, mesh, config=config)

start = 0
if fc.list_checkpoints("runs/semi_automatic"):
    start = fc.load("runs/semi_automatic", model=model, optimizer=optimizer).step

for step in range(start + 1, STEPS + 1):
    x = paddle.sin(paddle.arange(8 * 16, dtype="float32") * step).reshape([8, 16])
    x = dist.shard_tensor(x, mesh, [dist.Shard(0), dist.Replicate()])
    loss = ((model(x) - x) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    value = float(loss)  # on every rank: this communicates
    if dist.get_rank() == 0:
        print(f"step {step}: loss {value:.4f}")
    if step == SAVE_AFTER and not start:
        fc.save("runs/semi_automatic", model=model, optimizer=optimizer, step=step)

"""Experts spread over the ranks (MoELayer), loaded where each rank has another number of them.

python -m paddle.distributed.launch --nproc_per_node 2 experts.py    # two experts on each rank
python -m paddle.distributed.launch --nproc_per_node 1 experts.py    # all four on one
"""

import paddle
import paddle.distributed as dist
from paddle.distributed import fleet
from paddle.incubate.distributed.models.moe import MoELayer

import paddle_flexckpt as fc
from paddle_flexckpt.testing import cpu_world

EXPERTS, WIDTH, BATCH, STEPS, SAVE_AFTER = 4, 8, 8, 4, 2

if not paddle.device.is_compiled_with_cuda():
    cpu_world.install()
ranks, rank = dist.ParallelEnv().world_size, dist.ParallelEnv().rank
strategy = fleet.DistributedStrategy()
strategy.hybrid_configs = {"dp_degree": ranks}
fleet.init(is_collective=True, strategy=strategy)
# The ranks of data parallelism have different experts, and copies of everything else.
group = fleet.get_hybrid_communicate_group().get_data_parallel_group() if ranks > 1 else None


class Expert(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.up, self.down = paddle.nn.Linear(WIDTH, 16), paddle.nn.Linear(16, WIDTH)

    def forward(self, x):
        return self.down(paddle.nn.functional.gelu(self.up(x)))


paddle.seed(1)
first = paddle.nn.Linear(WIDTH, WIDTH)
experts = [Expert() for _ in range(EXPERTS)]  # the same on every rank
own = experts[rank * EXPERTS // ranks : (rank + 1) * EXPERTS // ranks]
gate = {"type": "naive", "top_k": 2}
moe = MoELayer(WIDTH, paddle.nn.LayerList(own), gate=gate, moe_group=group, mp_group=None)
model = paddle.nn.Sequential(first, moe)
optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters())

start = 0
if fc.list_checkpoints("runs/experts"):
    start = fc.load("runs/experts", model=model, optimizer=optimizer).step

rows = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
for step in range(start + 1, STEPS + 1):
    batch = paddle.cos(paddle.arange(BATCH * WIDTH, dtype="float32") * step).reshape([BATCH, 1, WIDTH])[rows]
    loss = ((model(batch) - batch.flip(2)) ** 2).mean()
    loss.backward()
    total = loss.detach() / ranks
    if ranks > 1:
        dist.all_reduce(total)
        with paddle.no_grad():
            for name, parameter in model.named_parameters():
                if ".experts." not in name:  # copies; the backward pass has summed the gradients of experts
                    dist.all_reduce(parameter.grad)
                parameter.grad.scale_(1 / ranks)
    optimizer.step()
    optimizer.clear_grad()
    if rank == 0:
        print(f"step {step}: loss {float(total):.4f}, {len(own)} of {EXPERTS} experts")
    if step == SAVE_AFTER and not start:
        fc.save("runs/experts", model=model, optimizer=optimizer, step=step)

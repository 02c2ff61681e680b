"""Tensor parallelism x sharding V2: gradients are accumulated, and on a GPU bfloat16 parameters have float32 masters.

python -m paddle.distributed.launch --nproc_per_node 4 tensor_parallel_sharding.py 2 2
python -m paddle.distributed.launch --nproc_per_node 2 tensor_parallel_sharding.py 1 2
"""

import sys

import paddle
import paddle.distributed as dist
from paddle.distributed import fleet

import paddle_flexckpt as fc
from paddle_flexckpt.testing import cpu_world

TENSOR, SHARDING = (int(argument) for argument in (*sys.argv[1:], 0, 0)[:2])
if dist.ParallelEnv().world_size != TENSOR * SHARDING:
    sys.exit(f"Start it with the launcher, on that many ranks:\n{__doc__}")
BATCH, MICRO_BATCH, STEPS, SAVE_AFTER = 16, 4, 4, 2

has_gpu = paddle.device.is_compiled_with_cuda()
if not has_gpu:
    cpu_world.install()
strategy = fleet.DistributedStrategy()
strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": TENSOR, "sharding_degree": SHARDING}
strategy.hybrid_configs["sharding_configs"].split_param = True  # V2: a parameter may be cut between ranks
strategy.tensor_parallel_configs = {"tensor_init_seed": 1}  # the seed of tensor-parallel layers
fleet.init(is_collective=True, strategy=strategy)
paddle.seed(1)  # the seed of all other layers


class Model(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        parallel = fleet.meta_parallel
        self.words = parallel.VocabParallelEmbedding(32, 16)
        self.up = parallel.ColumnParallelLinear(16, 64, has_bias=True, gather_output=False)
        self.down = parallel.RowParallelLinear(64, 16, has_bias=True, input_is_parallel=True)
        self.head = paddle.nn.Linear(16, 32)

    def forward(self, tokens):
        return self.head(self.down(paddle.nn.functional.gelu(self.up(self.words(tokens)))))


model = Model()
optimizer = paddle.optimizer.AdamW(1e-2, parameters=model.parameters(), multi_precision=True)
if has_gpu:
    model, optimizer = paddle.amp.decorate(models=model, optimizers=optimizer, level="O2", dtype="bfloat16")
if TENSOR * SHARDING > 1:  # Paddle takes a job of one rank for a pipeline
    model, optimizer = fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)

start = 0
if fc.list_checkpoints("runs/tensor_parallel_sharding"):
    start = fc.load("runs/tensor_parallel_sharding", model=model, optimizer=optimizer).step

own = BATCH // SHARDING  # rows of a batch for each rank of sharding
first = own * fleet.get_hybrid_communicate_group().get_sharding_parallel_rank()
for step in range(start + 1, STEPS + 1):
    batch = (paddle.arange(BATCH * 2).reshape([BATCH, 2]) * step * 7 + step) % 32
    total = paddle.zeros([])
    for row in range(first, first + own, MICRO_BATCH):
        tokens, labels = batch[row : row + MICRO_BATCH].unbind(1)
        loss = paddle.nn.functional.cross_entropy(model(tokens).astype("float32"), labels) * MICRO_BATCH / own
        loss.backward()  # adds to the gradients of the micro-batches before
        total += loss.detach()
    optimizer.step()
    optimizer.clear_grad()
    if dist.get_world_size() > 1:
        dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"step {step}: loss {float(total) / dist.get_world_size():.4f}")
    if step == SAVE_AFTER and not start:
        fc.save("runs/tensor_parallel_sharding", model=model, optimizer=optimizer, step=step)

"""A pipeline whose first and last stage share the embedding (SharedLayerDesc).

python -m paddle.distributed.launch --nproc_per_node 2 tied_pipeline.py    # two stages
python -m paddle.distributed.launch --nproc_per_node 1 tied_pipeline.py    # the whole model in one process
"""

import paddle
import paddle.distributed as dist
from paddle.distributed import fleet
from paddle.distributed.fleet.meta_parallel import LayerDesc, PipelineLayer, SharedLayerDesc

import paddle_flexckpt as fc
from paddle_flexckpt.testing import cpu_world

STAGES = dist.ParallelEnv().world_size
WORDS, WIDTH, BATCH, MICRO_BATCH, STEPS, SAVE_AFTER = 32, 16, 8, 2, 4, 2

if not paddle.device.is_compiled_with_cuda():
    cpu_world.install()
strategy = fleet.DistributedStrategy()
strategy.hybrid_configs = {"dp_degree": 1, "pp_degree": STAGES}
strategy.pipeline_configs = {"micro_batch_size": MICRO_BATCH, "accumulate_steps": BATCH // MICRO_BATCH}
fleet.init(is_collective=True, strategy=strategy)
paddle.seed(1)


class Block(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.up, self.down = paddle.nn.Linear(WIDTH, 64), paddle.nn.Linear(64, WIDTH)

    def forward(self, x):
        return x + self.down(paddle.nn.functional.gelu(self.up(x)))


def head(embedding, x):
    return paddle.matmul(x, embedding.weight, transpose_y=True)


layers = [
    SharedLayerDesc("words", paddle.nn.Embedding, None, "weight", WORDS, WIDTH),
    *(LayerDesc(Block) for _ in range(4)),
    SharedLayerDesc("words", paddle.nn.Embedding, head, "weight", WORDS, WIDTH),
]
loss_of = paddle.nn.CrossEntropyLoss()
model = PipelineLayer(
    layers, topology=fleet.get_hybrid_communicate_group().topology(), loss_fn=loss_of, seg_method="layer:Block"
)
optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters())
model, optimizer = fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)

start = 0
if fc.list_checkpoints("runs/tied_pipeline"):
    start = fc.load("runs/tied_pipeline", model=model, optimizer=optimizer).step

for step in range(start + 1, STEPS + 1):
    batch = (paddle.arange(BATCH * 2).reshape([BATCH, 2]) * step * 7 + step) % WORDS
    tokens, labels = batch.split(2, axis=1)
    if STAGES > 1:
        loss = model.train_batch([tokens, labels], optimizer)
    else:
        loss = loss_of(model(tokens), labels)
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
    if dist.ParallelEnv().rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")
    if step == SAVE_AFTER and not start:
        fc.save("runs/tied_pipeline", model=model, optimizer=optimizer, step=step)

"""Hugging Face there and back: a tensor-parallel model is published, and loads what Hugging Face's library reads.

python -m paddle.distributed.launch --nproc_per_node 2 hugging_face.py
"""

import paddle
import paddle.distributed as dist
from paddle.distributed import fleet
from safetensors.numpy import load_file

import paddle_flexckpt as fc
from paddle_flexckpt.testing import cpu_world

if not paddle.device.is_compiled_with_cuda():
    cpu_world.install()
fc.install()
strategy = fleet.DistributedStrategy()
strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": dist.ParallelEnv().world_size}
fleet.init(is_collective=True, strategy=strategy)
rank, parallel = dist.get_rank(), fleet.meta_parallel


class Layer(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.up = parallel.ColumnParallelLinear(8, 32, has_bias=False, gather_output=False)
        self.down = parallel.RowParallelLinear(32, 8, has_bias=False, input_is_parallel=True)


model = paddle.nn.LayerDict({"words": parallel.VocabParallelEmbedding(16, 8), "layers": paddle.nn.LayerList([Layer()])})
before = fc.digest(model.sharded_state_dict())

# Hugging Face's linear layers are transposed. fc.model_rules("llama", direction="to_hf") has such a list for a family.
to_hf = [
    "words.weight -> model.embed_tokens.weight",
    "layers.$LAYER_ID.up.weight^T -> model.layers.$LAYER_ID.mlp.up_proj.weight",
    "layers.$LAYER_ID.down.weight^T -> model.layers.$LAYER_ID.mlp.down_proj.weight",
]
report = fc.publish(model, "runs/published", aoa_config={"aoa_statements": to_hf}, config={"model_type": "example"})
if rank == 0:
    shapes = {}
    for name in report.files:
        shapes.update({key: array.shape for key, array in load_file(f"runs/published/{name}").items()})
    for key in sorted(shapes):
        print(key, shapes[key])

from_hf = [
    "model.embed_tokens.weight -> words.weight",
    "model.layers.$LAYER_ID.mlp.up_proj.weight^T -> layers.$LAYER_ID.up.weight",
    "model.layers.$LAYER_ID.mlp.down_proj.weight^T -> layers.$LAYER_ID.down.weight",
]
for parameter in model.parameters():
    parameter.set_value(paddle.zeros_like(parameter))
fc.load_state_dict(model.sharded_state_dict(), "runs/published", aoa_config={"aoa_statements": from_hf})
after = fc.digest(model.sharded_state_dict())
if rank == 0:
    print("loaded back, the same:", after == before)

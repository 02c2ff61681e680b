"""Write a checkpoint by the real Megatron-Core, on two ranks: ``python make_megatron.py DIRECTORY [SHARDING]``.

It runs in an interpreter that has torch and megatron-core, and imports nothing of this repository.
``tests/foreign/data/megatron`` is what it wrote with megatron-core 0.16.1. Weights and their places are those of two
ranks of tensor parallelism. The states of the optimizer are imitated: they have the keys and shapes that the
distributed optimizer gives them, which itself needs CUDA; what writes them is Megatron-Core's own.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings

import numpy as np

RANKS = 2


def _numbers(*shape: int, start: int = 0) -> np.ndarray:
    return (np.arange(np.prod(shape, dtype=int)) + start).astype(np.float32).reshape(shape)


# By Megatron's key: numbers, element type, and the axis along which ranks have parts. Layers are an axis in front.
WEIGHTS = {
    "embedding.word_embeddings.weight": (_numbers(8, 4), "bfloat16", 0),
    "decoder.layers.mlp.linear_fc1.weight": (_numbers(2, 6, 4, start=5), "bfloat16", 1),
    "decoder.layers.mlp.linear_fc2.weight": (_numbers(2, 4, 6, start=9), "bfloat16", 2),
    "decoder.final_layernorm.weight": (_numbers(4), "bfloat16", None),
}
STATES = {"exp_avg": "moment1_0", "exp_avg_sq": "moment2_0", "param": "w_0"}
LAYERED = "decoder.layers."


def _write(rank: int, directory: str, sharding: str, store: str) -> None:
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    warnings.simplefilter("ignore")
    # Its writer waits for the GPU before it takes the tensors; there is none.
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)

    def sharded(key: str, array: np.ndarray, dtype: str, axis: int | None):
        """Yield what a rank has of a tensor: for stacked layers a part for each of them."""
        whole = torch.from_numpy(array.copy()).to(getattr(torch, dtype))
        layers = array.shape[0] if ".layers." in key else None
        for layer in range(layers or 1):
            part = whole if layers is None else whole[layer]
            front = () if layers is None else ((0, layer, layers),)
            if axis is not None:
                inner = axis - (layers is not None)
                part = part.chunk(RANKS, inner)[rank]
                front = (*front, (axis, rank, RANKS))
            yield ShardedTensor.from_rank_offsets(
                key,
                part.contiguous(),
                *front,
                replica_id=rank if axis is None else 0,
                prepend_axis_num=0 if layers is None else 1,
            )

    model: dict = {}
    optimizer: dict = {}
    for key, (array, dtype, axis) in WEIGHTS.items():
        model[key] = list(sharded(key, array, dtype, axis))
        for number, state in enumerate(STATES):
            values = array + 100 * (number + 1)
            optimizer[f"{state}.{key}"] = list(sharded(f"optimizer.state.{state}.{key}", values, "float32", axis))
    if sharding == "dp_reshardable":
        key = (
            "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg"
        )
        optimizer = {"flat": ShardedTensor.from_rank_offsets(key, torch.arange(8.0), (0, rank, RANKS))}
    state = {
        "model": model,
        "optimizer": optimizer,
        "rng": ShardedObject("rng_state", [{"seed": rank}], (RANKS,), (rank,)),
        "iteration": 7,
        "args": {"hidden_size": 4},
    }
    dist_checkpointing.save(state, directory)
    dist.destroy_process_group()


def main(directory: str, sharding: str = "fully_reshardable") -> None:
    """Write the checkpoint."""
    import torch.multiprocessing

    os.makedirs(directory, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        torch.multiprocessing.spawn(_write, (directory, sharding, os.path.join(place, "store")), nprocs=RANKS)


if __name__ == "__main__":
    main(*sys.argv[1:])

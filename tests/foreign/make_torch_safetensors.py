"""Write a checkpoint by torch's real HuggingFaceStorageWriter, on two ranks: ``python make_torch_safetensors.py DIR``.

It runs in an interpreter that has torch and safetensors, and imports nothing of this repository but its neighbour.
``tests/foreign/data/torch_safetensors`` is what it wrote with torch 2.13.0.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from make_torch_dcp import EXPECTED, RANKS

# What safetensors' writer in DCP takes: whole tensors and parts, in row-major order.
KEYS = ("model.rows", "model.columns", "model.half", "optimizer.step")


def _write(rank: int, directory: str, store: str) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    state = {}
    for key in KEYS:
        array, dtype, axis = EXPECTED[key]
        tensor = torch.from_numpy(array.copy()).to(getattr(torch, dtype))
        state[key] = tensor if axis is None else distribute_tensor(tensor, mesh, [Shard(axis)])
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(directory, save_distributed=True))
    dist.destroy_process_group()


def main(directory: str) -> None:
    """Write the checkpoint."""
    import torch.multiprocessing

    with tempfile.TemporaryDirectory() as place:
        torch.multiprocessing.spawn(_write, (directory, os.path.join(place, "store")), nprocs=RANKS)


if __name__ == "__main__":
    main(sys.argv[1])

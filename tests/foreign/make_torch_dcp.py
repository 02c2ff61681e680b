"""Write a checkpoint by the real torch.distributed.checkpoint, on two ranks: ``python make_torch_dcp.py DIRECTORY``.

It runs in an interpreter that has torch, and imports nothing of this repository. ``tests/foreign/data/torch_dcp`` is
what it wrote with torch 2.13.0; to write that anew, remove the directory and give it as the argument.
``EXPECTED`` is what is in the checkpoint, in numpy.
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


# By key: numbers that every element type has, the type's name, and the axis along which ranks have parts.
EXPECTED = {
    "model.rows": (_numbers(5, 6), "float32", 0),
    "model.columns": (_numbers(4, 6, start=3), "bfloat16", 1),
    "model.transposed": (np.ascontiguousarray(_numbers(4, 3).T), "float32", None),
    "model.half": (_numbers(7), "float16", None),
    "model.eighth": (_numbers(4), "float8_e4m3fn", None),
    "model.scalar": (np.array(3.0, np.float32), "float64", None),
    "model.none": (_numbers(0, 3), "float32", None),
    "optimizer.step": (np.array(5, np.int64), "int64", None),
}
OTHERS = {"epoch": 7, "names": ["a", "b"]}


def _write(rank: int, directory: str, store: str) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.tensor import Shard, distribute_tensor
    except ImportError:  # before torch 2.5
        from torch.distributed._tensor import Shard, distribute_tensor
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    state: dict = {**OTHERS, "model": {}, "optimizer": {}}
    for key, (array, dtype, axis) in EXPECTED.items():
        tensor = torch.from_numpy(array.copy()).to(getattr(torch, dtype))
        if key == "model.transposed":
            tensor = tensor.t().contiguous().t()
        if axis is not None:
            tensor = distribute_tensor(tensor, mesh, [Shard(axis)])
        part, _, name = key.partition(".")
        state[part][name] = tensor
    dcp.save(state, checkpoint_id=directory)
    dist.destroy_process_group()


def main(directory: str) -> None:
    """Write the checkpoint."""
    import torch.multiprocessing

    with tempfile.TemporaryDirectory() as place:
        torch.multiprocessing.spawn(_write, (directory, os.path.join(place, "store")), nprocs=RANKS)


if __name__ == "__main__":
    main(sys.argv[1])

"""Write checkpoints by the real torch.distributed.checkpoint in four ranks: ``python make_torch_layouts.py DIR KIND``.

It runs in an interpreter that has torch, and imports nothing of this repository. Beside ``checkpoint`` it writes
``expected.json``: element type, shape and bytes of each tensor, which torch itself has put together.

``sharded_tensor`` is state dicts of ``ShardedTensor`` (torch.distributed._shard), with uneven shards; ``meshes`` is
DTensors, unevenly cut along one and two axes of a mesh; ``fsdp`` is a model and its optimizer after a step, under
``fully_shard`` (FSDP2) over tensor parallelism. ``tests/foreign/data`` has the first two, as torch 2.13.0 wrote them.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
import warnings

RANKS = 4


def _whole(shape, dtype: str, start: int = 0):
    import torch

    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float32) + start).remainder(97).reshape(shape).to(getattr(torch, dtype))


# By key: shape, element type, and the boxes (first element, shape) that each rank has.
_ROWS = [[((0, 0), (1, 6))], [((1, 0), (2, 6))], [((3, 0), (3, 6))], [((6, 0), (4, 6))]]
_BLOCKS = [[((0, 0), (2, 3))], [((0, 3), (2, 4))], [((2, 0), (3, 3))], [((2, 3), (3, 4))]]
_SEVERAL = [[((0,), (4,)), ((9,), (4,))], [], [((4,), (5,))], []]
SHARDED = {
    "model.rows": ((10, 6), "float32", _ROWS),
    "model.blocks": ((5, 7), "bfloat16", _BLOCKS),
    "model.several": ((13,), "float16", _SEVERAL),
    "optim.state.rows.exp_avg": ((10, 6), "float64", _ROWS),
}
# By key: shape, element type, and what each axis of the 2 x 2 mesh does: cut along an axis, or nothing.
MESHES = {
    "model.both": ((5, 7), "float32", (0, 1)),
    "model.crossed": ((5, 7), "bfloat16", (1, 0)),
    "model.twice": ((7, 3), "float32", (0, 0)),
    "model.first": ((3, 5), "float16", (1, None)),
    "model.second": ((3, 5), "int32", (None, 0)),
    "model.cube": ((3, 5, 2), "float32", (1, 2)),
    "model.replicated": ((3,), "float64", (None, None)),
}
# Cut along their first axis by all ranks: the last has less, or nothing.
LINES = {"line.uneven": ((10, 3), "float32"), "line.nothing": ((5,), "bfloat16"), "line.one": ((1, 4), "float32")}


def sharded_tensor_state(rank: int) -> tuple[dict, dict]:
    """Return a state dict of ShardedTensors, and the whole tensors."""
    from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

    state, wholes = {}, {}
    for number, (key, (shape, dtype, boxes)) in enumerate(SHARDED.items()):
        wholes[key] = whole = _whole(shape, dtype, number)
        shards = []
        for offset, size in boxes[rank]:
            part = whole[tuple(slice(begin, begin + extent) for begin, extent in zip(offset, size))]
            shards.append(Shard.from_tensor_and_offsets(part.clone(), list(offset), rank))
        state[key] = init_from_local_shards(shards, *shape)
    return state, wholes


def meshes_state(rank: int) -> tuple[dict, dict]:
    """Return a state dict of DTensors, and the whole tensors."""
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    except ImportError:  # before torch 2.5
        from torch.distributed._tensor import Replicate, Shard, distribute_tensor

    square, line = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), init_device_mesh("cpu", (RANKS,))
    state, wholes = {}, {}
    for number, (key, (shape, dtype, axes)) in enumerate(MESHES.items()):
        wholes[key] = _whole(shape, dtype, number)
        placements = [Replicate() if axis is None else Shard(axis) for axis in axes]
        state[key] = distribute_tensor(wholes[key].clone(), square, placements)
    for key, (shape, dtype) in LINES.items():
        wholes[key] = _whole(shape, dtype)
        state[key] = distribute_tensor(wholes[key].clone(), line, [Shard(0)])
    return state, wholes


def fsdp_state(rank: int) -> tuple[dict, dict]:
    """Return the state dict of a model and its optimizer after a step, and the whole tensors."""
    import torch
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    # Divisible by the ranks of tensor parallelism, not by those of FSDP too.
    model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.ReLU(), torch.nn.Linear(6, 7), torch.nn.LayerNorm(7))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    torch.manual_seed(rank // 2)
    model(torch.randn(3, 5)).square().sum().backward()
    optimizer.step()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    wholes = {}
    found = {f"model.{key}": each for key, each in of_model.items()}
    for key, states in of_optimizer["state"].items():
        found |= {f"optim.state.{key}.{name}": each for name, each in states.items()}
    for key, each in found.items():
        wholes[key] = each.full_tensor() if isinstance(each, DTensor) else each
    return {"model": of_model, "optim": of_optimizer}, wholes


def fsdp1_state(rank: int) -> tuple[dict, dict]:
    """Return what the first FSDP calls a sharded state dict of a model and its optimizer, and the whole tensors."""
    import torch
    from torch.distributed._shard.sharded_tensor import ShardedTensor
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
    from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType

    torch.manual_seed(1)
    layers = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.ReLU(), torch.nn.Linear(6, 7))
    model = Fsdp(layers, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    torch.manual_seed(rank)
    model(torch.randn(3, 5)).square().sum().backward()
    optimizer.step()
    kind = StateDictType.SHARDED_STATE_DICT
    with Fsdp.state_dict_type(model, kind, ShardedStateDictConfig(), ShardedOptimStateDictConfig()):
        of_model, of_optimizer = dict(model.state_dict()), Fsdp.optim_state_dict(model, optimizer)
    found = {f"model.{key}": each for key, each in of_model.items()}
    for key, states in of_optimizer["state"].items():
        found.update({f"optim.state.{key}.{name}": each for name, each in states.items()})
    wholes = {}
    for key, each in sorted(found.items()):
        wholes[key] = each
        if isinstance(each, ShardedTensor):
            # Not by FULL_STATE_DICT: without a GPU, torch 2.13 has exp_avg_sq in the place of exp_avg there.
            wholes[key] = torch.empty(each.size()) if not rank else None
            each.gather(0, wholes[key])
    if not any(isinstance(each, ShardedTensor) for each in found.values()):
        raise SystemExit("no ShardedTensor")
    return {"model": of_model, "optim": of_optimizer}, wholes


def written(tensors: dict) -> dict:
    """Return what JSON takes: element type, shape and bytes of each tensor."""
    found = {}
    for key, tensor in tensors.items():
        flat = tensor.detach().contiguous().reshape(-1)
        data = ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size()) if flat.numel() else b""
        found[key] = {"dtype": str(tensor.dtype)[6:], "shape": list(tensor.shape), "data": data.hex()}
    return found


def _write(rank: int, directory: str, kind: str, store: str) -> None:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    states = {"sharded_tensor": sharded_tensor_state, "meshes": meshes_state, "fsdp": fsdp_state, "fsdp1": fsdp1_state}
    state, wholes = states[kind](rank)
    dcp.save(state, checkpoint_id=os.path.join(directory, "checkpoint"))
    if not rank:
        with open(os.path.join(directory, "expected.json"), "w") as file:
            json.dump(written(wholes), file, indent=1)
    dist.barrier()
    dist.destroy_process_group()


def main(directory: str, kind: str) -> None:
    """Write the checkpoint."""
    import torch.multiprocessing

    os.makedirs(directory, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        torch.multiprocessing.spawn(_write, (directory, kind, os.path.join(place, "store")), nprocs=RANKS)


if __name__ == "__main__":
    main(*sys.argv[1:])

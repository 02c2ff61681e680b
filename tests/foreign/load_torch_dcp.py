"""Load a checkpoint by the real torch.distributed.checkpoint: ``python load_torch_dcp.py DIRECTORY EXPECTED``.

It runs in an interpreter that has torch, and imports nothing of this repository. ``EXPECTED`` is JSON with element
type, shape and bytes of each tensor. They are loaded whole, by torch's converter into a file of ``torch.save``, into
DTensors of one and two ranks along each axis, and on four ranks into DTensors of a mesh of two axes and into
ShardedTensors of unequal rows. Any difference ends it with an error.

``python load_torch_dcp.py NAME ...`` with names of element types prints those that this torch reads back itself.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import pickle
import sys
import tempfile
import warnings


def _tensors(path: str) -> dict:
    import torch

    with open(path) as file:
        said = json.load(file)
    tensors = {}
    for key, each in said.items():
        data, dtype = bytearray.fromhex(each["data"]), getattr(torch, each["dtype"])
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        tensors[key] = flat.reshape(each["shape"])
    return tensors


def _bytes(tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return ctypes.string_at(flat.data_ptr(), flat.numel() * flat.itemsize) if flat.numel() else b""


def _compare(kind: str, found: dict, expected: dict) -> None:
    if found.keys() != expected.keys():
        raise SystemExit(f"{kind}: {sorted(found)}")
    for key, tensor in expected.items():
        got = found[key]
        if (got.dtype, got.shape) != (tensor.dtype, tensor.shape) or _bytes(got) != _bytes(tensor):
            raise SystemExit(f"{kind}: {key}: {tensor}, got {got}")


def _load_ranks(rank: int, ranks: int, directory: str, path: str, store: str) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.tensor import DTensor, Shard
    except ImportError:  # before torch 2.5
        from torch.distributed._tensor import DTensor, Shard
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    mesh, expected = init_device_mesh("cpu", (ranks,)), _tensors(path)
    for turn in range(3):
        parts, state = {}, {}
        for key, whole in expected.items():
            if not whole.dim():
                parts[key], state[key] = whole, torch.empty_like(whole)
                continue
            axis = turn % whole.dim()
            chunks = torch.chunk(whole, ranks, axis)
            part = chunks[rank] if rank < len(chunks) else whole.narrow(axis, 0, 0)
            parts[key] = part.contiguous()
            state[key] = DTensor.from_local(
                torch.empty_like(parts[key]), mesh, [Shard(axis)], run_check=False, shape=whole.shape,
                stride=whole.stride(),
            )  # fmt: skip
        dcp.load(state, checkpoint_id=directory)
        local = {key: each.to_local() if isinstance(each, DTensor) else each for key, each in state.items()}
        _compare(f"rank {rank} of {ranks}", local, parts)
    dist.destroy_process_group()


def _load_layouts(rank: int, directory: str, path: str, store: str) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed._shard import sharded_tensor
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.tensor import DTensor, Replicate, Shard
    except ImportError:  # before torch 2.5
        from torch.distributed._tensor import DTensor, Replicate, Shard
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    mesh, expected = init_device_mesh("cpu", (2, 2)), _tensors(path)
    expected = {key: whole for key, whole in expected.items() if whole.dim()}
    parts, state, rows, shards = {}, {}, {}, {}
    for key, whole in expected.items():
        part, axes = whole, range(min(2, whole.dim()))
        for axis in axes:
            # A vector is whole along the first axis of the mesh.
            number = rank % 2 if axis or whole.dim() == 1 else rank // 2
            chunks = torch.chunk(part, 2, axis)
            part = chunks[number] if number < len(chunks) else part.narrow(axis, 0, 0)
        parts[key] = part.contiguous()
        placements = [Shard(0), Shard(1)] if whole.dim() > 1 else [Replicate(), Shard(0)]
        state[key] = DTensor.from_local(
            torch.empty_like(parts[key]), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
        # No rows for the first rank, one for the second, and the rest, unequally, for the others.
        count = whole.shape[0]
        begin, end = ([0, 0, min(1, count), count // 3 + 1, count] * 2)[rank : rank + 2]
        rows[key] = whole[begin : max(begin, end)].contiguous()
        empty, offset = torch.empty_like(rows[key]), [begin, *[0] * (whole.dim() - 1)]
        local = [sharded_tensor.Shard.from_tensor_and_offsets(empty, offset, rank)] if empty.numel() else []
        shards[key] = (
            sharded_tensor.init_from_local_shards(local, *whole.shape) if whole.numel() else torch.empty_like(whole)
        )
    dcp.load(state, checkpoint_id=directory)
    _compare(f"mesh, rank {rank}", {key: each.to_local() for key, each in state.items()}, parts)
    dcp.load(shards, checkpoint_id=directory)
    found = {
        key: each.local_shards()[0].tensor if rows[key].numel() else rows[key]
        for key, each in shards.items()
    }  # fmt: skip
    _compare(f"ShardedTensor, rank {rank}", found, rows)
    dist.destroy_process_group()


def main(directory: str, path: str) -> None:
    """Load the checkpoint in every way, and say how many tensors were compared."""
    import torch
    import torch.distributed.checkpoint as dcp
    import torch.multiprocessing
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    warnings.simplefilter("ignore")
    expected = _tensors(path)
    # Nested as a program may have it: torch joins the names by dots.
    state: dict = {}
    for key, tensor in expected.items():
        first, _, rest = key.partition(".")
        if rest and first not in expected:
            state.setdefault(first, {})[rest] = torch.empty_like(tensor)
        else:
            state[key] = torch.empty_like(tensor)
    dcp.load(state, checkpoint_id=directory)
    found = {}
    for key, value in state.items():
        inner = {f"{key}.{rest}": each for rest, each in value.items()} if isinstance(value, dict) else {key: value}
        found.update(inner)
    _compare("whole", found, expected)
    print(f"whole:{len(expected)}")
    with tempfile.TemporaryDirectory() as place:
        file = os.path.join(place, "file.pt")
        dcp_to_torch_save(directory, file)
        _compare("file", torch.load(file, weights_only=True), expected)
        print(f"file:{len(expected)}")
        for ranks in (1, 2):
            store = os.path.join(place, f"store{ranks}")
            torch.multiprocessing.spawn(_load_ranks, (ranks, directory, path, store), nprocs=ranks)
            print(f"{ranks}:{len(expected)}")
        torch.multiprocessing.spawn(_load_layouts, (directory, path, os.path.join(place, "layouts")), nprocs=4)
        print(f"layouts:{len(expected)}")


def known(names: list[str]) -> list[str]:
    """Return the element types that torch saves and loads: torch 2.4 has uint16, and does neither."""
    import torch

    found = []
    for name in names:
        file = io.BytesIO()
        try:
            torch.save(torch.zeros(1, dtype=torch.uint8).to(getattr(torch, name)), file)
            file.seek(0)
            torch.load(file, weights_only=True)
        except (KeyError, pickle.UnpicklingError):
            continue
        found.append(name)
    return found


if __name__ == "__main__":
    if os.path.exists(sys.argv[1]):
        main(*sys.argv[1:])
    else:
        print(*known(sys.argv[1:]))

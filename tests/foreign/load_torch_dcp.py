"""Load a checkpoint by the real torch.distributed.checkpoint: ``python load_torch_dcp.py DIRECTORY EXPECTED``.

It runs in an interpreter that has torch, and imports nothing of this repository. ``EXPECTED`` is JSON with element
type, shape and bytes of each tensor. They are loaded whole, by torch's converter into a file of ``torch.save``, and
into DTensors of one and two ranks along each axis. Any difference ends it with an error.
"""

from __future__ import annotations

import ctypes
import json
import os
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
    from torch.distributed.tensor import DTensor, Shard

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


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Jobs of test_reshard: every change of placements against slices cut by hand."""

from __future__ import annotations

import itertools

import numpy as np
import paddle
import paddle.distributed as dist

PLACEMENTS = {"R": dist.Replicate(), "S0": dist.Shard(0), "S1": dist.Shard(1), "P": dist.Partial()}


def every_reshard(dtype, shape, mesh):
    """Reshards from all placements to all but partial ones; returns the names of those that came out wrong."""
    processes = np.arange(np.prod(mesh)).reshape(mesh)
    process_mesh = dist.ProcessMesh(processes, dim_names=["x", "y"][: len(mesh)])
    place = [int(index[0]) for index in np.nonzero(processes == dist.get_rank())]
    values = (np.arange(np.prod(shape)).reshape(shape) % 13).astype("float32")
    wrong = []
    for before in combinations("R S0 S1 P".split(), len(mesh)):
        for after in combinations("R S0 S1".split(), len(mesh)):
            source, factor = distributed(values, dtype, process_mesh, place, before)
            moved = dist.reshard(source, process_mesh, [PLACEMENTS[name] for name in after])
            wanted = cut(values * factor, mesh, place, after)
            got = array(moved)
            if str(moved.dtype) != f"paddle.{dtype}" or got.shape != wanted.shape or not np.array_equal(got, wanted):
                wrong.append(f"{before} -> {after}: {got.tolist()}, not {wanted.tolist()}")
    return wrong


def combinations(names, axes):
    """Placements for every axis of the mesh, no axis of a tensor cut twice."""
    every = itertools.product(names, repeat=axes)
    return [some for some in every if all(some.count(cut) < 2 for cut in ("S0", "S1"))]


def distributed(values, dtype, mesh, place, placements):
    """A tensor of these placements, and what its values are multiplied with (partial ones add up)."""
    named = [PLACEMENTS[name] for name in placements]
    if "P" not in placements:
        return dist.shard_tensor(paddle.to_tensor(values).astype(dtype), mesh, named), 1
    part = cut(values, mesh.shape, place, placements)
    factor = 1
    for axis, name in enumerate(placements):
        if name == "P":
            part = part * (place[axis] + 1)
            factor *= mesh.shape[axis] * (mesh.shape[axis] + 1) // 2
    local = paddle.to_tensor(part).astype(dtype)
    return paddle.Tensor(
        local, dims=list(values.shape), process_mesh=mesh, placements=named, place=paddle.CPUPlace()
    ), factor


def cut(values, mesh, place, placements):
    """A rank's part: the quotient rounded up for each, the last ones get what is left."""
    for axis, name in enumerate(placements):
        if name.startswith("S"):
            dimension = int(name[1:])
            share = -(-values.shape[dimension] // mesh[axis])
            values = np.take(values, range(values.shape[dimension])[share * place[axis] :][:share], dimension)
    return values


def array(tensor):
    """A tensor's local values."""
    local = tensor._local_value()
    return local.astype("float32").numpy() if local._is_initialized() else np.zeros(tensor._local_shape, "float32")

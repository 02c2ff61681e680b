"""DistTensors (semi-automatic parallel): which part of the whole this rank holds, by the tensor's placements.

Nothing is communicated: where a rank's part lies follows from its place in the mesh, axis by axis. Tested in
tests/memory/test_dist_tensor.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Two mesh axes that split the same tensor axis come back as a bare Placement without accessors: only its text says
# which of them splits first.
_ORDER = re.compile(r"shard_order=(\d+)")
_SPLIT_FACTOR = re.compile(r"split_factor=(\d+)")


@dataclass(frozen=True, eq=False)
class LocalPart:
    """A rank's part of a DistTensor; if the rank has none, an empty tensor of shape ``[0]`` without a place."""

    tensor: Any  # the local value: dense, and with the memory and the name of the DistTensor
    shape: tuple[int, ...] | None
    offset: tuple[int, ...] | None  # the part's first element in the whole tensor


def is_dist_tensor(value: Any) -> bool:
    """Return whether a value is a DistTensor."""
    is_dist = getattr(value, "is_dist", None)
    return bool(callable(is_dist) and is_dist())


def compute_local_shape_and_global_offset(
    global_shape: Sequence[int], process_mesh: Any, placements: Sequence[Any], rank: int | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]] | tuple[None, None]:
    """Return shape and place of a rank's part of a tensor.

    Args:
        global_shape: Shape of the whole tensor.
        process_mesh: The ProcessMesh that it is spread over.
        placements: One placement per mesh axis; several may split the same tensor axis.
        rank: The rank; this one by default.

    Returns:
        Local shape and global offset, where an extent of the shape may be 0; ``(None, None)`` for a rank outside of the
        mesh.

    Raises:
        ValueError: A placement is partial, re-arranges elements (``split_factor``), or splits an axis that the tensor
            does not have; or their number is not that of the mesh's axes.
    """
    if rank is None:
        import paddle

        rank = paddle.distributed.get_rank()
    mesh_shape = [int(n) for n in process_mesh.shape]
    splits = _splits([int(n) for n in global_shape], len(mesh_shape), placements)
    ranks = list(process_mesh.process_ids)
    if rank not in ranks:
        return None, None
    # No numpy: an array of the ranks would be made for every tensor of a state.
    place, coordinate = ranks.index(rank), [0] * len(mesh_shape)
    for axis in reversed(range(len(mesh_shape))):
        place, coordinate[axis] = divmod(place, mesh_shape[axis])
    from paddle_flexckpt.algebra.boxes import nested_piece  # most states have no DistTensor

    pieces = [
        nested_piece(int(extent), [(mesh_shape[axis], coordinate[axis]) for axis in axes])
        for extent, axes in zip(global_shape, splits)
    ]
    return tuple(size for _, size in pieces), tuple(offset for offset, _ in pieces)


def local_part(key: str, tensor: Any) -> LocalPart:
    """Return this rank's part of a DistTensor; ``key`` is for errors.

    Raises:
        ValueError: Its placements cannot be described, or its local value is not what they say.
    """
    try:
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.process_mesh, tensor.placements)
    except ValueError as error:
        raise ValueError(f"key {key!r}: {error}") from error
    if shape is None or offset is None or (0 in shape and 0 not in tensor.shape):
        import paddle

        nothing = paddle.empty([0], dtype=tensor.dtype)
        nothing.name = tensor.name
        return LocalPart(nothing, None, None)
    local = tensor._local_value()
    got = tuple(int(n) for n in local.shape)
    if got != shape and local._is_initialized():
        raise ValueError(
            f"key {key!r}: the local value of the DistTensor has shape {list(got)}; expected {list(shape)}, the part "
            f"of {list(tensor.shape)} under {tensor.placements} on {tensor.process_mesh}. Remedy (FC105): if Paddle "
            "gives a buffer wrong placements (fused tensors), pass a ShardedWeight with the local value and its place"
        )
    local.name = tensor.name  # each look at the local value makes another name
    return LocalPart(local, shape, offset)


def _splits(global_shape: list[int], mesh_ndim: int, placements: Sequence[Any]) -> list[list[int]]:
    """Return for each axis of the tensor the mesh axes that split it, the outermost split first."""
    # dist.shard_layer() gives one Replicate per axis of the tensor, whatever the number of mesh axes.
    if any(not placement.is_replicated() for placement in placements[mesh_ndim:]):
        raise ValueError(f"{len(placements)} placements {list(placements)} for a mesh of {mesh_ndim} axes")
    ndim = len(global_shape)
    splits: list[list[tuple[int, int]]] = [[] for _ in global_shape]
    # Fewer placements than mesh axes: the tensor is replicated over the others.
    for axis, placement in enumerate(placements[:mesh_ndim]):
        if placement.is_partial():
            raise ValueError(
                f"the tensor is Partial over mesh axis {axis} ({placements}): each rank holds a term of a sum, not a "
                "part of the tensor. Remedy (FC802): save what dist.reshard() makes of it with Replicate or Shard; a "
                "target of a load has to be placed so itself"
            )
        if not placement.is_shard():
            continue
        text = str(placement)
        factor = _SPLIT_FACTOR.search(text)
        if factor is not None and int(factor[1]) > 1:
            raise ValueError(
                f"the tensor's elements are re-arranged over mesh axis {axis} ({text}): a rank's part is no box. "
                "Remedy (FC802): save what dist.reshard() makes of it with a plain Shard or Replicate; a target of a "
                "load has to be placed so itself"
            )
        split = [i for i in range(ndim) if placement.is_shard(i) or placement.is_shard(i - ndim)]
        if len(split) != 1:
            raise ValueError(f"{text} over mesh axis {axis} splits no axis of a tensor of shape {global_shape}")
        order = _ORDER.search(text)
        splits[split[0]].append((0 if order is None else int(order[1]), axis))
    return [[axis for _, axis in sorted(axes)] for axes in splits]

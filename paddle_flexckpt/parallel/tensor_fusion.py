"""Dynamic tensor fusion of semi-automatic sharding stage 1: the part of each parameter that a rank updates.

Paddle lays the parameters one behind the other into buffers (each padded, a new buffer after 256 MB) and splits every
buffer into equal parts, one per rank of the mesh axis "dp". A rank has optimizer states for its part only, and they are
one-dimensional: a part of the flattened parameter. The buffers are made in the first step, but can be predicted, so
that states can be created and loaded before any step. Tested in tests/semi_auto/test_states.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

# The attribute of an optimizer with the ranges that its states were created for, until its first step.
_PREDICTED = "_flexckpt_predicted_ranges"


@dataclass(frozen=True)
class BufferPiece:
    """The part of one parameter that one rank updates: a range, never empty, of its flattened local value."""

    parameter: Any  # the live one; whole on every rank of the axis "dp"
    buffer: int  # the number of its buffer
    flat_range: slice


def uses_tensor_fusion(optimizer: Any) -> bool:
    """Return whether a semi-automatic optimizer steps on buffers."""
    return bool(getattr(optimizer, "enable_tensor_fusion", False))


def has_buffers(optimizer: Any) -> bool:
    """Return whether the buffers exist: they do after the first step."""
    return uses_tensor_fusion(optimizer) and not optimizer.do_tensor_fusion_once


def buffer_pieces(optimizer: Any, parameters: Iterable[Any]) -> list[BufferPiece]:
    """Return the pieces that this rank updates, in the order of the buffers.

    Before the buffers exist they follow from ``parameters``: those that the first step will update, in its order.

    Raises:
        ValueError: There is no global mesh with an axis "dp", or this rank is not on it.
    """
    if has_buffers(optimizer):
        group = optimizer._sharding_group
        buffers = [
            (int(storage._numel()), [(view["param"], int(view["index"])) for view in views.values()])
            for storage, views in zip(optimizer.param_storage, optimizer.fuse_param_view)
        ]
        return _pieces_of_rank(buffers, max(int(group.rank), 0), int(group.nranks))
    place, degree = _place_on_mesh()
    return _pieces_of_rank(_buffers(optimizer, list(parameters), degree), place, degree)


def _pieces_of_rank(buffers: list[tuple[int, list[tuple[Any, int]]]], place: int, degree: int) -> list[BufferPiece]:
    """Return this rank's part of each buffer; ``buffers`` has sizes, and parameters with their begins."""
    pieces = []
    for number, (size, members) in enumerate(buffers):
        first = size // degree * place
        for parameter, index in members:
            start = max(first - index, 0)
            stop = min(first + size // degree - index, int(parameter._numel()))
            if start < stop:
                pieces.append(BufferPiece(parameter, number, slice(start, stop)))
    return pieces


def _buffers(optimizer: Any, parameters: list[Any], degree: int) -> list[tuple[int, list[tuple[Any, int]]]]:
    """Return the buffers that the first step will make."""
    from paddle.base import core
    from paddle.distributed.fleet.utils.tensor_fusion_helper import align, alignment, get_current_device_type

    if not parameters:
        return []
    megabytes = optimizer._strategy.sharding.comm_buffer_size_MB
    limit = (256 if megabytes < 0 else megabytes) * 1024 * 1024
    local = [parameter._local_value() for parameter in parameters]
    groups = core.eager_assign_group_by_size(local, [False] * len(local), [limit, limit])
    buffers = []
    for indices in groups:
        size, members = 0, []
        for i in indices:
            parameter = parameters[i]
            unit = alignment[get_current_device_type()] // align[parameter.dtype] * degree
            members.append((parameter, size))
            size += -(-prod(parameter._local_shape) // unit) * unit
        buffers.append((size, members))
    return buffers


def _place_on_mesh() -> tuple[int, int]:
    """Return this rank's place on the axis "dp" of the global mesh, and the size of the axis."""
    import paddle.distributed as dist
    from paddle.distributed.auto_parallel.sharding import get_mesh_comm_list

    mesh = dist.auto_parallel.get_mesh()
    if mesh is None or "dp" not in mesh.dim_names:
        axes = "no global mesh" if mesh is None else f"axes {mesh.dim_names}"
        raise ValueError(
            f"tensor fusion shards over the axis 'dp' of the global mesh; got {axes}. Remedy (FC802): "
            "paddle.distributed.auto_parallel.set_mesh() with a mesh that has the axis 'dp'"
        )
    rank = dist.get_rank()
    for group in get_mesh_comm_list(mesh, "dp"):
        ranks = sorted(int(member) for member in group)
        if rank in ranks:
            return ranks.index(rank), len(ranks)
    raise ValueError(
        f"rank {rank} is not on the global mesh of ranks {mesh.process_ids}, so it steps no fused buffer. "
        "Remedy (FC502): ask only the ranks of the mesh for the optimizer's state"
    )


def remember_prediction(optimizer: Any, pieces: Iterable[BufferPiece], parameters: list[Any]) -> None:
    """Store, until the first step, the ranges that states are created for.

    Raises:
        ValueError: Before the first step, states were created for other ranges; nothing is stored then.
    """
    if optimizer._accumulators and not has_buffers(optimizer):
        _check_prediction(optimizer, parameters)
    ranges = {piece.parameter.name: piece.flat_range for piece in pieces}
    setattr(optimizer, _PREDICTED, ranges)


class TensorFusionMixin:
    """A semi-automatic optimizer that can fuse tensors."""

    def _tensor_fusion(self: Any, params_grads: list[Any]) -> Any:
        """Do as Paddle does, after checking that existing states are those of the buffers to be made."""
        if self.do_tensor_fusion_once and self._accumulators:
            _check_prediction(self, [parameter for parameter, _ in params_grads])
        return self._paddle__tensor_fusion(params_grads)


def _check_prediction(optimizer: Any, parameters: list[Any]) -> None:
    """Compare the ranges of the states with those that the first step is about to fuse."""
    import paddle.distributed as dist

    predicted = getattr(optimizer, _PREDICTED, None)
    if predicted is None:
        raise ValueError(
            f"rank {dist.get_rank()}: the optimizer has states of whole parameters, made before tensor fusion was "
            "enabled; expected states of fused parts. Remedy (FC806): enable tensor fusion before the optimizer is "
            "asked for its state"
        )
    actual = {piece.parameter.name: piece.flat_range for piece in buffer_pieces(optimizer, parameters)}
    if actual == predicted:
        return
    name = next(n for n in (*predicted, *actual) if predicted.get(n) != actual.get(n))
    trained = {parameter.name for parameter in parameters}
    without = sorted(p.name for p in trainable_parameters(optimizer._param_groups) if p.name not in trained)
    raise ValueError(
        f"rank {dist.get_rank()}: the first step fuses other parameters than those that states were created for: "
        f"expected elements {predicted.get(name)} of {name!r}, got {actual.get(name)}; without a gradient: "
        f"{without[:10]}. Remedy (FC806): set stop_gradient on parameters that are not trained, before the state is "
        "asked for"
    )


def parameters_in(entries: Iterable[Any] | None) -> Iterator[Any]:
    """Return the parameters in an optimizer's list of parameters, or of parameter groups."""
    for entry in entries or ():
        yield from entry["params"] if isinstance(entry, dict) else (entry,)


def trainable_parameters(entries: Iterable[Any]) -> list[Any]:
    """Return the parameters that a first step updates on this rank, if every trainable one has a gradient.

    Parameters on meshes of other ranks (other pipeline stages) have no data here, and get no states here.
    """
    import paddle.distributed as dist

    rank = dist.get_rank()
    return [
        parameter
        for parameter in parameters_in(entries)
        if not parameter.stop_gradient and not (parameter.is_dist() and rank not in parameter.process_mesh.process_ids)
    ]

"""Orders of the elements of live shards: those that shards and their rules define, and those of parameters' states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paddle_flexckpt.aoa.states import split_state
from paddle_flexckpt.catalog import CUT, NATURAL, Catalog, Order, Problem
from paddle_flexckpt.dist_tensor import is_dist_tensor
from paddle_flexckpt.sharded_weight import FusedAxis


def order_of(key: str, weight: Any, rank: int) -> Order | Problem | None:
    """Return the order of a tensor's elements that one of its shards defines; None if it defines none."""
    fused = getattr(weight, "fused", None)
    shape, whole = tuple(weight.local_shape), tuple(weight.global_shape)
    natural = getattr(weight, "dist_tensor", None) is not None or is_dist_tensor(weight.local_tensor)
    if fused is None:
        return NATURAL if natural or shape == whole else CUT
    if not -len(whole) <= fused.axis < len(whole):
        return Problem("a FusedAxis has an axis that the tensor has not", key, rank, None, f"{len(whole)} axes", fused)
    axis = fused.axis % len(whole)
    parts = fused.parts
    if parts is None and not natural and shape[axis] == 0:
        return None
    if parts is None:
        parts = 1 if natural else whole[axis] // shape[axis]
        fits = natural or parts * shape[axis] == whole[axis]
    else:
        fits = parts >= 1 and whole[axis] % parts == 0
    if not fits:
        return Problem(
            "the parts of a fused parameter have to be equal",
            key,
            rank,
            expected=f"equal parts of {whole[axis]} along axis {axis}",
            got=f"{fused.parts} parts" if fused.parts is not None else f"a shard of {shape[axis]}",
            remedy="correct the FusedAxis, or the shard's shape",
        )
    return Order(parts, axis, fused.statement)


def with_orders_of_states(
    keys: Sequence[str],
    orders: Sequence[Order | None],
    global_shapes: Sequence[tuple[int, ...]],
    shapes: Sequence[tuple[int, ...]],
) -> list[Order | None]:
    """Return the order of each row. A state that is sharded and has no rule of its own has its parameter's order."""
    found = list(orders)
    cut = [row for row, order in enumerate(orders) if order is CUT and keys[row][-1:].isdigit()]
    if not cut:
        return found
    rows = {key: row for row, key in enumerate(keys)}
    for row in cut:
        base, state = split_state(keys[row], rows)
        parameter = rows.get(base) if state else None
        order = None if parameter is None else orders[parameter]
        if parameter is None or order is None or global_shapes[row] != global_shapes[parameter]:
            continue
        if order.axis is None or shapes[row][order.axis] == shapes[parameter][order.axis]:
            found[row] = order
    return found


def indivisible_rows(catalog: Catalog, rules: Sequence[FusedAxis | None]) -> np.ndarray:
    """Return bool per row: whether a save has to write this shard whole, not split among its replicas.

    A shard is split along its first axis of more than one element. Where that is the axis of a fused parameter, the
    pieces would look like parts of a higher degree of tensor parallelism to versions that know no orders.
    """
    whole, flattened = np.zeros(len(catalog), dtype=bool), catalog.is_flattened
    for row, fused in enumerate(rules):
        if fused is None or flattened[row]:
            continue
        ndim = int(catalog.ndim[row])
        shape = catalog.shape[row, catalog.width - ndim :]
        whole[row] = ndim > 0 and fused.axis % ndim == int(np.argmax(shape > 1))
    return whole

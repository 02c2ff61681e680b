"""Orders of fused parameters, as the shards of a live state say them.

A load compares them with the source's (:mod:`~paddle_flexckpt.engine.fused`).

Tested in tests/live/test_fused_degrees.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from paddle_flexckpt.aoa.sides import split_state
from paddle_flexckpt.catalog import CUT, NATURAL, Catalog, Order, Problem
from paddle_flexckpt.dist_tensor import is_dist_tensor
from paddle_flexckpt.sharded_weight import FusedAxis


def order_of(key: str, weight: Any, rank: int) -> Order | Problem | None:
    """Return the order of a tensor's elements, as one of its shards says; None where it says nothing.

    Args:
        key: The tensor's name.
        weight: The shard.
        rank: Whose it is.
    """
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


def with_orders_of_states(described: Mapping[str, tuple[Any, Order | None]]) -> dict[str, Order | None]:
    """Return the order by key: a state that has no rule of its own, and is cut, lies like its parameter.

    Args:
        described: Shards, and what each says by itself, by key.
    """
    keys, orders = set(described), {key: order for key, (_, order) in described.items()}
    for key in [key for key, order in orders.items() if order is CUT]:
        base, state = split_state(key, keys)
        if not state or base not in described:
            continue
        (weight, _), (parameter, order) = described[key], described[base]
        if order is None or tuple(weight.global_shape) != tuple(parameter.global_shape):
            continue
        if order.axis is None or weight.local_shape[order.axis] == parameter.local_shape[order.axis]:
            orders[key] = order
    return orders


def indivisible_rows(catalog: Catalog, rules: Iterable[FusedAxis | None]) -> np.ndarray:
    """Return bool per row: whether a save has to write this shard whole, not split among its replicas.

    A shard is split along its first axis of more than one element. Where that is the axis of a fused parameter, the
    pieces would look like parts of a higher degree of tensor parallelism to versions that know no orders.

    Args:
        catalog: One rank's shards.
        rules: Their rules, by row.
    """
    whole, flattened = np.zeros(len(catalog), dtype=bool), catalog.is_flattened
    for row, fused in enumerate(rules):
        if fused is None or flattened[row]:
            continue
        ndim = int(catalog.ndim[row])
        shape = catalog.shape[row, catalog.width - ndim :]
        whole[row] = ndim > 0 and fused.axis % ndim == int(np.argmax(shape > 1))
    return whole

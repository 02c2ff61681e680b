"""Refuse targets that share memory with sources or with each other: one would overwrite the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from paddle_flexckpt.catalog import Catalog, Problem, ValidationError, dtype_of
from paddle_flexckpt.live.state import LocalState
from paddle_flexckpt.live.tensors import address_range, dtype_name, is_contiguous


@dataclass(frozen=True)
class _Span:
    """Hold the memory of one shard: addresses ``[begin, end)``, what it is, and which target it is (None: a source)."""

    begin: int
    end: int
    identity: str
    target: int | None


def refuse_shared_memory(source: Catalog, held: Mapping[int, Any], state: LocalState) -> None:
    """Raise unless no target shares memory with a source, unless both are the very same shard.

    Args:
        source: The source catalog.
        held: This rank's source tensors by row of that catalog.
        state: This rank's targets.

    Raises:
        ValidationError: A target would overwrite a source that is still being read.
    """
    spans = _spans(source, held.items(), is_target=False)
    spans += _spans(state.catalog, ((row, state.tensor(row)) for row in range(len(state.weights))), is_target=True)
    spans.sort(key=lambda span: (span.begin, span.end))
    problems = []
    reaching: list[_Span] = []
    for span in spans:
        reaching = [other for other in reaching if other.end > span.begin]
        for other in reaching:
            if (span.target is None) == (other.target is None):
                continue
            if (span.begin, span.end, span.identity) == (other.begin, other.end, other.identity):
                continue
            target, origin = (span, other) if span.target is not None else (other, span)
            row = target.target or 0
            problems.append(
                Problem(
                    "a target shares memory with a source that it would overwrite",
                    key=state.catalog.key_name(row),
                    rank=int(state.catalog.rank[row]),
                    expected="memory of its own",
                    got=f"memory of source {origin.identity}",
                    remedy="clone one of the two",
                )
            )
        reaching.append(span)
    if problems:
        raise ValidationError(problems)


def _spans(catalog: Catalog, tensors: Any, is_target: bool) -> list[_Span]:
    spans = []
    for row, tensor in tensors:
        addresses = address_range(tensor)
        if addresses is not None:
            identity = f"{catalog.key_name(row)} {catalog.describe(row)}"
            spans.append(_Span(*addresses, identity, row if is_target else None))
    return spans


# Steps that numpy may take to find out whether two strided tensors have an element in common.
_MAX_WORK = 100_000


def refuse_targets_in_one_memory(state: LocalState, spans: Mapping[int, tuple[int, int]]) -> None:
    """Raise if a target shares memory with another that is not the very same part of a tensor.

    Args:
        state: This rank's targets.
        spans: By row, first and last address (exclusive) of a target; of targets that are the same part of the same
            memory, one.

    Raises:
        ValidationError: One of two targets would overwrite the other.
    """
    rows = np.fromiter(spans, dtype=np.int64, count=len(spans))
    begin, end = np.asarray(list(spans.values()), dtype=np.int64).reshape(-1, 2).T
    order = np.lexsort((end, begin))
    rows, begin, end = rows[order], begin[order], end[order]
    problems = []
    # Most targets begin where all earlier ones have ended.
    for place in np.flatnonzero(begin[1:] < np.maximum.accumulate(end)[:-1]).tolist():
        row = int(rows[place + 1])
        earlier = np.flatnonzero(end[: place + 1] > begin[place + 1])[::-1]
        other = next((int(rows[i]) for i in earlier.tolist() if _have_common_elements(state, int(rows[i]), row)), None)
        if other is not None:
            catalog = state.catalog
            problems.append(
                Problem(
                    "a target shares memory with another, and one would overwrite the other",
                    key=catalog.key_name(row),
                    rank=int(catalog.rank[row]),
                    expected="memory of its own",
                    got=f"memory of target {catalog.key_name(other)} {catalog.describe(other)}",
                    remedy="clone one of the two, or load them in two calls",
                )
            )
    if problems:
        raise ValidationError(problems)


def _have_common_elements(state: LocalState, one: int, other: int) -> bool:
    """Return whether two tensors whose addresses overlap have an element in common; True where that is hard to tell."""
    tensors = state.tensor(one), state.tensor(other)
    if all(map(is_contiguous, tensors)):
        return True
    shares_memory: Any = np.shares_memory  # whose stub knows no number for max_work
    try:
        return bool(shares_memory(*map(_as_array, tensors), max_work=_MAX_WORK))
    except np.exceptions.TooHardError:
        return True


class _Addresses:
    """Show the addresses of a tensor, for numpy, which does not read them."""

    def __init__(self, tensor: Any) -> None:
        size = dtype_of(dtype_name(tensor)).itemsize
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "typestr": f"|V{size}",
            "strides": tuple(int(stride) * size for stride in tensor.strides),
            "data": (int(tensor.data_ptr()), False),
        }


def _as_array(tensor: Any) -> np.ndarray:
    return tensor if isinstance(tensor, np.ndarray) else np.asarray(_Addresses(tensor))

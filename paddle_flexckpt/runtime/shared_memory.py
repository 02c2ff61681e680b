"""Shared memory between targets and sources: a target that overwrites what is still being read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paddle_flexckpt.catalog import Catalog, Problem, ValidationError
from paddle_flexckpt.runtime.state import LocalState
from paddle_flexckpt.runtime.tensors import address_range


@dataclass(frozen=True)
class _Span:
    """The memory of one shard: addresses ``[begin, end)``, what it is, and which target it is (None: a source)."""

    begin: int
    end: int
    identity: str
    target: int | None


def refuse_shared_memory(source: Catalog, held: Mapping[int, Any], state: LocalState) -> None:
    """Checks that no target shares memory with a source, unless both are the very same shard.

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

"""Refuse targets that share memory with sources: they would overwrite what is still to be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paddle_flexckpt.catalog import Catalog, Problem, ValidationError
from paddle_flexckpt.engine.targets import Targets
from paddle_flexckpt.live.tensor_memory import address_range


@dataclass(frozen=True)
class _Span:
    """Hold the memory of one shard: addresses ``[begin, end)``, what it is, and which target it is (None: a source)."""

    begin: int
    end: int
    identity: str
    target: int | None


def refuse_shared_memory(source: Catalog, held: Mapping[int, Any], targets: Targets, names: Sequence[str]) -> None:
    """Check that no target shares memory with a source, unless both are the very same shard.

    ``names`` has the targets' names, so that only those look like a source shard that may be it.

    Raises:
        ValidationError: A target would overwrite a source that is still being read.
    """
    spans = [
        _Span(*addresses, f"{source.key_name(row)} {source.describe(row)}", None)
        for row, tensor in held.items()
        if (addresses := address_range(tensor)) is not None
    ]
    spans += [
        _Span(*place[0], f"{names[row]} {place[2]}", row)
        for row, place in enumerate(targets.places)
        if place is not None
    ]
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
                    key=names[row],
                    rank=int(targets.catalog.rank[row]),
                    expected="memory of its own",
                    got=f"memory of source {origin.identity}",
                    remedy="clone one of the two",
                )
            )
        reaching.append(span)
    if problems:
        raise ValidationError(problems)

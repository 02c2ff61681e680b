"""Orders of a whole tensor's elements, where tensor-parallel ranks hold several parameters side by side.

Where q, k and v (gate and up) are one parameter, each of N tensor-parallel ranks holds its share of all of them. Then
the order of the whole tensor's elements is another permutation for every N; with N = 1 it is the *natural order*.
Tested in tests/catalog/test_orders.py and tests/memory/test_orders.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from paddle_flexckpt.catalog.errors import Problem

# More than any job has tensor-parallel ranks: a bound for damaged files.
_MAX_PARTS = 1 << 16


@dataclass(frozen=True)
class Order:
    """The order of a whole tensor's elements along one axis.

    Attributes:
        parts: Number of tensor-parallel parts that lie one after the other, each with its share of what is fused (q, k
            and v; gate and up). 1: natural order. None: the tensor is cut, and it is not known whether it is fused.
        axis: The axis, not negative; None where nothing is known to be fused.
        statement: Tags and attributes of the AOA statement that changes the number of parts, if one is known.
    """

    parts: int | None
    axis: int | None = None
    statement: str | None = None

    @property
    def is_permuted(self) -> bool:
        """Return whether the elements are known not to be in natural order."""
        return self.parts is not None and self.parts > 1

    @property
    def tags(self) -> str | None:
        """Return the statement, with its axis where that is not 1; None if none is known."""
        if self.statement is None or self.axis == 1 or re.search(r"\baxis\s*=", self.statement):
            return self.statement
        return f"{self.statement}, axis={self.axis}"

    def describe(self) -> str:
        """Return a text such as ``fused_ffn along axis 1, 2 parts``."""
        if self.axis is None:
            return "natural order" if self.parts == 1 else "cut, and without a rule"
        parts = "natural order" if self.parts == 1 else f"{self.parts} parts"
        return f"{self.statement or 'fused, by no known statement'}, along axis {self.axis}, {parts}"

    def encode(self) -> list[Any]:
        """Return a value for JSON."""
        return [self.parts, self.axis, self.statement]

    @classmethod
    def decode(cls, value: Any) -> Order:
        """Return the order that :meth:`encode` encoded.

        Raises:
            ValueError: The value is not an order.
        """
        parts, axis, statement = value if isinstance(value, list) and len(value) == 3 else (0, 0, 0)
        if parts is not None and not (type(parts) is int and 1 <= parts <= _MAX_PARTS):
            raise ValueError(f"an order of {parts!r} parts")
        if axis is not None and not (type(axis) is int and 0 <= axis < 1 << 15 and parts is not None):
            raise ValueError(f"an order along axis {axis!r} in {parts!r} parts")
        if not (statement is None or (isinstance(statement, str) and axis is not None)):
            raise ValueError(f"an order by the statement {statement!r}")
        return cls(parts, axis, statement)


NATURAL = Order(1)
# Of a tensor that is cut, and of which it is not known whether it is fused.
CUT = Order(None)


def common_order(key: str, first: Order, second: Order) -> Order | Problem:
    """Return the order from two descriptions of one tensor, or the problem that they contradict each other."""
    if first == second:
        return first
    if first.axis is None and second.axis is None:
        return CUT
    fused, other = (first, second) if first.axis is not None else (second, first)
    if other == NATURAL and not fused.is_permuted:
        return fused
    return Problem(
        "ranks disagree about how a fused parameter is cut",
        key=key,
        expected=fused.describe(),
        got=other.describe(),
        code="FC207",
        remedy="give its shards the same FusedAxis on every rank",
    )

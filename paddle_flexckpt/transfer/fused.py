"""Fused parameters whose order differs between source and targets, and the statements that reorder them.

Every tensor-parallel rank holds its parts of q, k and v (gate and up) side by side, so the order of the whole tensor's
elements is another permutation for every degree. Each side records its order
(:class:`~paddle_flexckpt.catalog.Order`), with a :class:`FusedAxis` or without one; the AOA statement
``"key -> key, {fused.statement}"`` moves the parts. A load adds it for keys whose orders differ and that no statement
of the user names. ``fused_qkv`` and ``fused_ffn`` are in
:mod:`paddle_flexckpt.aoa.macros`.

Tested in tests/transfer/test_fused.py, tests/memory/test_orders.py and tests/loading/test_fused_degrees.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from paddle_flexckpt import aoa
from paddle_flexckpt.catalog import Catalog, Order, Problem


@dataclass(frozen=True)
class FusedMismatch:
    """A fused target of which the source has another number of parts.

    Attributes:
        key: The target.
        rank: Its rank.
        found: The source key.
        axis: The fused axis; not negative.
        extent: Extent of the whole tensor along it.
        there: Number of parts in the source; None: parts of different sizes.
        here: Number of parts in the target.
        statement: Tags and attributes of the statement, the axis among them; None where none is known.
        assumed: Whether the source does not record the number of parts: then its shards are taken for parts.
    """

    key: str
    rank: int
    found: str
    axis: int
    extent: int
    there: int | None
    here: int
    statement: str | None
    assumed: bool = False

    def summary(self) -> str:
        """Return a text for the report: ``2 parts -> 4 parts``."""
        there = "parts of several sizes" if self.there is None else f"{self.there} parts"
        return f"{there} -> {self.here} parts"

    def problem(self, other_name: bool = False) -> Problem:
        """Return the problem of a target that may not be reordered; statements do not cover one of another name."""
        remedy = (
            "no AOA statement is known for this parameter: load it under the degree of the save, or take it as it is "
            f'stored, by the AOA statement "{aoa.fused_statement(self.found, self.key, "", ())}"'
        )
        if self.statement is not None:
            text = aoa.fused_statement(self.found, self.key, self.statement, ())
            convert = "" if other_name else 'fused="convert", or with '
            remedy = f'load with {convert}the AOA statement "{text}"'
        return Problem(
            "the parts of a fused parameter lie side by side on every rank, so another cut would permute them",
            key=self.key,
            rank=self.rank,
            expected=f"parts of {self.extent // self.here} along axis {self.axis}, as here",
            got="parts of several sizes" if self.there is None else f"parts of [{self.extent // self.there}]",
            code="FC207",
            remedy=remedy,
        )


def find_mismatch(target: Catalog, row: int, source: Catalog, source_key: int) -> FusedMismatch | Problem | None:
    """Return the difference between the orders of a target and the source, or the problem if it is not known."""
    here, there = target.order(int(target.key[row])), source.order(source_key)
    rule = next((order for order in (here, there) if order is not None and order.axis is not None), None)
    ndim = int(target.ndim[row])
    if rule is None or rule.axis is None or here is None:
        return None
    axis, column = rule.axis, target.width - ndim + rule.axis
    extent, size = int(target.global_shape[row, column]), int(target.shape[row, column])
    # Shards without elements are not evidence of the cut.
    rows = (source.key == source_key) & (source.size > 0)
    cuts = set(source.shape[rows, source.width - ndim + axis].tolist())
    if size == 0 or not cuts:
        return None
    key, rank, found = target.key_name(row), int(target.rank[row]), source.keys[source_key]
    assumed = there is None and cuts not in ({extent}, {size})
    if there is None:
        # Written before orders were recorded: equal cuts are taken for equal orders.
        if cuts == {size}:
            return None
        parts = extent // max(cuts) if len(cuts) == 1 else None
    elif there.parts is not None or cuts == {extent}:
        parts = there.parts or 1
    else:
        return _no_rule_there(key, rank, found, rule, f"parts of {sorted(cuts)} along axis {axis}")
    if here.parts is None and size != extent:
        return Problem(
            "a parameter is fused in the source, and here its shards have no rule that says how they lie",
            key,
            rank,
            expected=f"a FusedAxis here too, or a whole tensor; in the source it is {rule.describe()}",
            got=f"parts of {size} along axis {axis}",
            code="FC207",
            remedy=f"mark it: FusedAxis({axis}, {rule.statement!r}) if every rank holds its part of all that is fused, "
            f"FusedAxis({axis}, {rule.statement!r}, parts=1) if the whole is in natural order",
        )
    wanted = here.parts or 1
    if parts == wanted:
        return None
    if there is not None and there.axis is not None and here.axis is not None and not _may_be_one_rule(here, there):
        return Problem(
            "source and target say different things about a fused parameter",
            key,
            rank,
            expected=here.describe(),
            got=there.describe(),
            code="FC207",
            remedy="correct the FusedAxis of one of them",
        )
    if rule.statement is None and there is not None and there.axis is not None:
        rule = there
    return FusedMismatch(key, rank, found, axis, extent, parts, wanted, rule.tags, assumed)


def _no_rule_there(key: str, rank: int, found: str, rule: Order, got: str) -> Problem:
    """Return the problem of a target that is fused by a rule, where the source's shards have none."""
    as_it_is, by_parts = (aoa.fused_statement(found, key, tags, ()) for tags in ("", rule.statement or "fused_ffn"))
    return Problem(
        "a parameter is fused here, and the source has its shards without a rule that says how they lie",
        key,
        rank,
        expected=f"a FusedAxis at the save, or whole tensors; here it is {rule.describe()}",
        got=got,
        code="FC207",
        remedy=f'mark it where it is saved; or give an AOA statement: "{by_parts}" takes every shard for a part, '
        f'"{as_it_is}" takes the elements as they are',
    )


def _may_be_one_rule(one: Order, other: Order) -> bool:
    """Return whether two rules may be the same: along one axis, and with the same statement if both have one."""
    stated = [
        {part for part in re.split(r"\s*,\s*", re.sub(r"\s*=\s*", "=", order.statement).strip()) if "axis=" not in part}
        for order in (one, other)
        if order.statement is not None
    ]
    return one.axis == other.axis and all(each == stated[0] for each in stated)


def mending_statements(others: Iterable[FusedMismatch], keys: Collection[str]) -> tuple[str, ...]:
    """Return the statements that reorder fused parameters, each once, sorted.

    They are about parameters, whose states follow; states that are not targets do not matter. States and parameters
    differ by the keys of both sides.
    """
    known = [(other.found, other.key, other.statement) for other in others if other.statement is not None]
    return tuple(sorted({aoa.fused_statement(found, key, statement, keys) for found, key, statement in known}))

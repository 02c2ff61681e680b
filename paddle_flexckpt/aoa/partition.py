"""Find the tensor-parallel parts of fused parameters. Tested in tests/planning/test_box_map_matching.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paddle_flexckpt.aoa.operations import Value
from paddle_flexckpt.aoa.parser import Statement
from paddle_flexckpt.aoa.rule import Rule
from paddle_flexckpt.aoa.sides import Side
from paddle_flexckpt.aoa.statement_errors import StatementError

_KEEPS_AXES = frozenset({"permute", "dtype", "src_dtype", "dst_dtype", "scale", "optional", "states", "axis"})


def source_parts(rule: Rule, value: Value, side: Side) -> int:
    """Return the number of parts, of equal size, of the tensor on the left; it has to be a single key."""
    variable = rule.statement.left[0]
    structure = value.structure
    axis = _axis(rule.statement, len(structure.shape))
    if variable.transposed:
        axis = len(structure.shape) - 1 - axis
    whole = len(structure) == 1 and structure.fragments.leaf[0] == 0 and not structure.nodes
    if whole:
        info = structure.inputs[0]
        axes = structure.fragments.value_axis[0].tolist()
        leaf_axis = axes.index(axis) - (len(axes) - len(info.shape)) if axis in axes else -1
        whole = leaf_axis >= 0 and info.shape[leaf_axis] == structure.shape[axis]
    if not whole:
        raise StatementError(
            f"cannot tell in how many tensor-parallel parts {variable.name!r} is cut, as it is put together from parts "
            "of tensors. Remedy: apply the fused layout to the source key itself",
            variable.column,
        )
    return _even(*side.parts(value.inputs[0], leaf_axis), value.inputs[0])


def target_parts(
    rule: Rule, ids: Mapping[str, int], name: str, ndim: int, side: Side | None, following: Sequence[Rule]
) -> int:
    """Return the number of parts of the tensor ``name`` on the right; without a destination it is in one.

    If the right name is not a key of the destination, the later statements are followed through renames, transposes and
    casts to the key that it becomes.
    """
    if side is None:
        return 1
    axis = _axis(rule.statement, ndim)
    template = rule.right[0].text
    for position in range(-1, len(following)):
        if position >= 0:
            later = following[position]
            if not any(left.text in (template, name) for left in later.left):
                continue
            axis = _followed(rule, later, axis, ndim, name)
            order = later.placeholders
            if not all(placeholder in ids for placeholder in order):
                break
            name = later.right[0].formatter(order)(tuple(ids[placeholder] for placeholder in order))
            template = later.right[0].text
        if name in side.states:
            return _even(*side.parts(name, axis), name)
    return 1


def _followed(rule: Rule, later: Rule, axis: int, ndim: int, name: str) -> int:
    """Return the axis after a later statement."""
    statement = later.statement
    simple = len(statement.left) == len(statement.right) == 1 and later.fused is None
    if not simple or any(attribute.key not in _KEEPS_AXES for attribute in statement.attributes):
        raise StatementError(
            f"cannot tell in how many tensor-parallel parts {name!r} is cut, as the statement {statement.place.text!r} "
            "makes something else of it. Remedy: apply the fused layout last, to the destination key itself",
            rule.statement.right[0].column,
        )
    if statement.left[0].transposed:
        axis = ndim - 1 - axis
    permute = statement.get("permute")
    if permute is not None:
        axes = list(permute.value) or list(range(ndim - 1, -1, -1))
        axis = [a % ndim for a in axes].index(axis)
    return axis


def _axis(statement: Statement, ndim: int) -> int:
    attribute = statement.get("axis")
    axis = 1 if attribute is None else int(attribute.value)
    if not -ndim <= axis < ndim:
        raise StatementError(
            f"axis {axis} is out of range for {ndim} axes. Remedy: give axis= (a fused layout takes 1 by default)",
            0 if attribute is None else attribute.column,
        )
    return axis % ndim


def _even(parts: int, equal: bool, key: str) -> int:
    if not equal:
        raise StatementError(
            f"{key!r} is cut into {parts} or more parts of different sizes; fused layouts need equal ones"
        )
    return parts

"""Carry out one statement on values, in the order of its attributes. Tested in tests/aoa/test_oracle.py."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from paddle_flexckpt.aoa import steps, structure_ops
from paddle_flexckpt.aoa.element_maps import TensorInfo
from paddle_flexckpt.aoa.parser import Attribute, Statement
from paddle_flexckpt.aoa.statements import StatementError
from paddle_flexckpt.aoa.structure import Derived, Structure, StructureError

Shape = tuple[int, ...]
Result = TypeVar("Result")
_TAG_JOINERS = frozenset({"copy", "stack", "unstack", "sum", "average", "lora_merge", "dequant"})
MODIFIERS = frozenset({"permute", "reshape", "slice", "pad", "resize", "repeat", "dtype", "dst_dtype", "scale"})
_SHAPE_MODIFIERS = frozenset({"permute", "reshape", "slice", "pad", "resize", "repeat"})
# Attributes that need others beside them.
_PARTNERS = {
    "block": ("repeat", "dequant"),
    "sizes": ("axis",),
    "weights": ("sum",),
    "src_dtype": ("dst_dtype",),
    "dst_dtype": ("src_dtype",),
    "num_heads": (),
    "num_key_value_groups": (),
}


class Value(NamedTuple):
    """The value of a name: a structure, and for each of its slots the source key, or the slot of another value."""

    structure: Structure
    inputs: tuple[Any, ...]


class Operations:
    """Operations on values, memoised by structure."""

    def __init__(self) -> None:
        self._memo: dict[tuple[Any, ...], Any] = {}

    def once(self, key: tuple[Any, ...], make: Callable[[], Result]) -> Result:
        """Return the result of ``make``, which is called once for each key."""
        if key not in self._memo:
            self._memo[key] = make()
        found: Result = self._memo[key]
        return found

    def apply(self, function: Callable[..., Derived], values: Sequence[Value], *arguments: Any) -> Value:
        """Apply a function of structures to values."""
        structures = tuple(value.structure for value in values)
        operand = structures if function in _OF_MANY else structures[0]
        derived = self.once((function, arguments, structures), lambda: function(operand, *arguments))
        inputs = concatenated(values)
        if derived.slots == tuple(range(len(inputs))):
            return Value(derived.structure, inputs)
        return Value(derived.structure, tuple(inputs[slot] for slot in derived.slots))


def concatenated(values: Sequence[Value]) -> tuple[Any, ...]:
    """Return the inputs of all values, in order."""
    return values[0].inputs if len(values) == 1 else tuple(x for value in values for x in value.inputs)


def carry_out(
    statement: Statement, left: Sequence[Value], shapes: Sequence[Shape | None], operations: Operations
) -> list[Value]:
    """Carry out a statement without macros: return the values of its right variables for those of the left.

    ``shapes`` has the shape of every right variable in the destination, where known (for ``"auto"``).
    """
    _check_partners(statement)
    count = len(statement.right)
    joiner = joiner_of(statement, len(left), count)
    values, later = list(left), statement.attributes
    if joiner is not None:
        position = statement.attributes.index(joiner)
        for attribute in statement.attributes[:position]:
            values = [_modified(statement, attribute, value, None, operations) for value in values]
        values = _guard(joiner, lambda: _join(statement, joiner, values, shapes, operations))
        later = statement.attributes[position + 1 :]
    for attribute in later:
        values = [_modified(statement, attribute, v, shape, operations) for v, shape in zip(values, shapes)]
    return values


def _guard(attribute: Attribute, action: Callable[[], Any]) -> Any:
    try:
        return action()
    except StructureError as error:
        raise StatementError(str(error), attribute.column) from error


def _check_partners(statement: Statement) -> None:
    fill = statement.get("fill")
    if fill is not None and not statement.has("pad") and not statement.has("resize"):
        raise StatementError("fill means nothing here: it goes with pad, resize or '_ -> B'", fill.column)
    for attribute in statement.attributes:
        partners = _PARTNERS.get(attribute.key)
        if partners is not None and not any(statement.has(partner) for partner in partners):
            beside = " or ".join(partners) or "a fused layout (fused_qkv, fused_qkv_old)"
            raise StatementError(f"{attribute.key} means nothing here: it goes with {beside}", attribute.column)


def joiner_of(statement: Statement, left: int, right: int) -> Attribute | None:
    """Return the attribute that joins or cuts left variables into right ones; None: they correspond one to one."""
    tags = [attribute for attribute in statement.attributes if attribute.key in _TAG_JOINERS]
    if len(tags) > 1:
        raise StatementError(f"{tags[0].key} and {tags[1].key} exclude each other", tags[1].column)
    if tags:
        return tags[0]
    axis = statement.get("axis")
    if left == right and (left == 1 or axis is None):
        return None
    if left > 1 and right > 1:
        raise StatementError(
            f"{left} names cannot become {right}. Remedy (FC603): join them into one first and cut that, or give as "
            "many names on both sides and no axis",
            statement.right[0].column,
        )
    if axis is None:
        what = "join" if left > 1 else "cut"
        raise StatementError(f"axis= is needed to {what}, or a tag such as copy, stack, sum", statement.right[0].column)
    return axis


def _join(
    statement: Statement, joiner: Attribute, values: list[Value], shapes: Sequence[Shape | None], operations: Operations
) -> list[Value]:
    kind, count = joiner.key, len(statement.right)
    many_to_one = {"stack": None, "sum": None, "average": None, "lora_merge": 3, "dequant": 2}
    if kind in many_to_one:
        needed = many_to_one[kind]
        if count != 1 or (needed is not None and len(values) != needed):
            raise StructureError(
                f"{kind} takes {needed or 'any number of'} names on the left and 1 on the right; got {len(values)} and "
                f"{count}"
            )
    elif len(values) != 1 and not (kind == "axis" and count == 1):
        raise StructureError(f"{kind} takes 1 name on the left; got {len(values)}")
    if kind == "copy":
        return [values[0]] * count
    if kind == "stack":
        return [operations.apply(structure_ops.stack, values, _axis(statement, joiner))]
    if kind == "unstack":
        return _unstack(values[0], _axis(statement, joiner), count, operations)
    if kind == "axis":
        axis = _axis(statement, joiner)
        if count == 1:
            _check_sizes(statement, values, axis)
            return [operations.apply(structure_ops.join, values, axis)]
        return _cut(statement, values[0], axis, shapes, operations)
    return [_computed(_value_step(statement, joiner, len(values)), values, operations)]


def _axis(statement: Statement, joiner: Attribute) -> int:
    axis = statement.get("axis")
    if axis is None:
        raise StructureError(f"{joiner.key} needs axis=")
    return int(axis.value)


def _place(axis: int, shape: Shape) -> int:
    if not -len(shape) <= axis < len(shape):
        raise StructureError(f"axis {axis} is out of range for shape {list(shape)}")
    return axis % len(shape)


def _value_step(statement: Statement, joiner: Attribute, count: int) -> Any:
    """Return the step of a tag that computes values."""
    if joiner.key == "average":
        return steps.Average(count)
    if joiner.key == "lora_merge":
        scale = statement.get("scale")
        return steps.LoraMerge(1.0 if scale is None else float(scale.value))
    if joiner.key == "sum":
        weights = statement.get("weights")
        if weights is None:
            return steps.WeightedSum((1.0,) * count)
        if len(weights.value) != count:
            raise StructureError(f"weights has {len(weights.value)} numbers for {count} names")
        return steps.WeightedSum(tuple(map(float, weights.value)))
    block = statement.get("block")
    if joiner.value == "fp8":
        if block is None or not isinstance(block.value, tuple):
            raise StructureError('dequant="fp8" needs block="[rows, columns]"')
        return steps.DequantFp8(block.value)
    if joiner.value == "mxfp4":
        return steps.DequantMxfp4()
    raise StructureError(f'dequant is "fp8" or "mxfp4"; got {joiner.value!r}')


def _computed(step: Any, values: Sequence[Value], operations: Operations) -> Value:
    return operations.apply(_computed_by, values, step)


def _computed_by(structures: Sequence[Structure], step: Any) -> Derived:
    return structure_ops.computed(step, None, structures)


_OF_MANY = frozenset({structure_ops.join, structure_ops.stack, _computed_by})


def _unstack(value: Value, axis: int, count: int, operations: Operations) -> list[Value]:
    shape = value.structure.shape
    place = _place(axis, shape)
    if shape[place] != count:
        raise StructureError(f"axis {axis} of {list(shape)} has extent {shape[place]}; got {count} names for it")
    return [operations.apply(structure_ops.index, [value], place, i) for i in range(count)]


def _cut(
    statement: Statement, value: Value, axis: int, shapes: Sequence[Shape | None], operations: Operations
) -> list[Value]:
    shape = value.structure.shape
    place = _place(axis, shape)
    sizes = _sizes(statement, shape, place, shapes)
    values, start = [], 0
    for size in sizes:
        values.append(operations.apply(structure_ops.cut, [value], place, start, start + size))
        start += size
    return values


def _check_sizes(statement: Statement, values: Sequence[Value], axis: int) -> None:
    """Check the extents of what is joined against ``sizes``."""
    attribute = statement.get("sizes")
    if attribute is None or attribute.value == "auto":
        return
    found = [value.structure.shape[_place(axis, value.structure.shape)] for value in values]
    expected = [found[0]] * len(found) if attribute.value == "equal" else list(attribute.value)
    if len(expected) != len(found) or any(e not in (-1, f) for e, f in zip(expected, found)):
        raise StructureError(f"sizes says {attribute.value}; the extents along axis {axis} are {found}")


def _sizes(statement: Statement, shape: Shape, axis: int, shapes: Sequence[Shape | None]) -> list[int]:
    count, total = len(statement.right), shape[axis]
    attribute = statement.get("sizes")
    if attribute is None or attribute.value == "equal":
        if total % count:
            raise StructureError(
                f"axis {axis} of {list(shape)} has extent {total}, which {count} equal parts do not divide. "
                'Remedy (FC603): give sizes="[..]"'
            )
        return [total // count] * count
    if attribute.value == "auto":
        position = next(i for i, a in enumerate(statement.attributes) if a.key == "axis")
        late = [a.key for a in statement.attributes[position:] if a.key in _SHAPE_MODIFIERS]
        if late:
            raise StructureError(f'sizes="auto" cannot be combined with {late[0]}')
        sizes = [-1 if s is None or len(s) != len(shape) else s[axis] for s in shapes]
        if sizes.count(-1) > 1:
            raise StructureError(
                'sizes="auto" takes the extents from the destination, which has fewer of these keys than it takes. '
                'Remedy (FC605): give sizes="[..]" or sizes="equal" (on the join that is inverted, if this is an '
                "inverse)"
            )
    else:
        sizes = list(attribute.value)
    if len(sizes) != count or sizes.count(-1) > 1 or any(size < -1 for size in sizes):
        raise StructureError(f"sizes has to give {count} extents, of which one may be -1; got {sizes}")
    if -1 in sizes:
        sizes[sizes.index(-1)] = total - sum(size for size in sizes if size >= 0)
    if sum(sizes) != total or min(sizes) < 0:
        raise StructureError(f"sizes {sizes} do not add up to extent {total} of axis {axis} of {list(shape)}")
    return sizes


def _modified(
    statement: Statement, attribute: Attribute, value: Value, shape: Shape | None, operations: Operations
) -> Value:
    """Return the value after one attribute that acts on single variables; others leave it as it is."""
    if attribute.key not in MODIFIERS or (attribute.key == "scale" and statement.has("lora_merge")):
        return value
    modified: Value = _guard(attribute, lambda: _modify(statement, attribute, value, shape, operations))
    return modified


def _modify(
    statement: Statement, attribute: Attribute, value: Value, shape: Shape | None, operations: Operations
) -> Value:
    structure, given, key = value.structure, attribute.value, attribute.key
    if key in ("reshape", "resize") and given == "auto":
        if shape is None:
            raise StructureError(f'{key}="auto" takes the shape of a destination key, and there is none of that name')
        given = shape
    if key == "permute":
        axes = given or tuple(range(len(structure.shape) - 1, -1, -1))
        return operations.apply(structure_ops.permute, [value], axes)
    if key == "reshape":
        more = statement.attributes[statement.attributes.index(attribute) + 1 :]
        is_last = not any(other.key in _SHAPE_MODIFIERS for other in more)
        if is_last and given == structure.shape and shape is not None and _is_merged(shape, given):
            given = shape  # "auto" marks the split axes: the source has them, and the destination has them merged
        return operations.apply(structure_ops.reshape, [value], given)
    if key == "slice":
        return operations.apply(structure_ops.slice_, [value], _slices(str(given)))
    if key == "pad":
        before, after = tuple(a for a, _ in given), tuple(b for _, b in given)
        fill = fill_of(statement)
        if fill is None:
            raise StructureError('pad needs fill=, a number or "keep"')
        return operations.apply(structure_ops.pad, [value], before, after, fill)
    if key == "resize":
        return operations.apply(structure_ops.resize, [value], given, fill_of(statement))
    if key == "repeat":
        axis, block = statement.get("axis"), statement.get("block")
        if axis is None:
            raise StructureError("repeat needs axis=")
        return operations.apply(
            structure_ops.repeat, [value], axis.value, given, None if block is None else block.value
        )
    if key == "scale":
        return _computed(steps.Scale(float(given)), [value], operations)
    if key == "dst_dtype":
        source = statement.get("src_dtype")
        if source is not None and source.value != structure.dtype:
            raise StructureError(
                f"src_dtype is {source.value!r}, but the value is of {structure.dtype}. Remedy (FC603): correct it, or "
                f'write dtype="{given}", which takes any dtype'
            )
    return operations.apply(structure_ops.cast, [value], given)


def _is_merged(shape: Shape, split: Shape) -> bool:
    """Return whether a shape is another one with neighbouring axes merged."""
    merged, ends = (set(itertools.accumulate(each, operator.mul)) for each in (shape, split))
    return len(shape) < len(split) and 0 not in split and merged <= ends and math.prod(shape) == math.prod(split)


def _slices(text: str) -> tuple[int | tuple[int | None, int | None], ...]:
    """Parse ``"[0:3, :, 2]"`` to one (start, stop) or number per axis."""
    inner = text.strip()
    if not (inner.startswith("[") and inner.endswith("]")):
        raise StructureError(f'slice has to be like "[0:100, :, 3]"; got {text!r}')
    items: list[int | tuple[int | None, int | None]] = []
    for item in inner[1:-1].split(","):
        try:
            bounds = [int(bound) if bound.strip() else None for bound in item.split(":")]
        except ValueError:
            bounds = []
        if len(bounds) == 1 and bounds[0] is not None:
            items.append(bounds[0])
        elif len(bounds) == 2:
            items.append((bounds[0], bounds[1]))
        else:
            raise StructureError(f'slice has to be like "[0:100, :, 3]"; got {item.strip()!r} in {text!r}')
    return tuple(items)


def fill_of(statement: Statement) -> Any:
    """Return the statement's ``fill``: a number, ``structure_ops.KEEP``, or None."""
    attribute = statement.get("fill")
    if attribute is None:
        return None
    text = str(attribute.value)
    if text == "keep":
        return structure_ops.KEEP
    try:
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    except ValueError as error:
        raise StructureError(f'fill is a number or "keep"; got {text!r}') from error


def filled(statement: Statement, info: TensorInfo) -> Value:
    """Return the value of ``_ -> B``: a constant, or what the destination has."""
    fill = fill_of(statement)
    if fill is None or fill == structure_ops.KEEP:
        return Value(structure_ops.keep(info).structure, ())
    return Value(structure_ops.constant(info, fill).structure, ())

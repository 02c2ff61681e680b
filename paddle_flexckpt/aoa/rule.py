"""Rules: statements with placeholders, to be carried out for all ids; and the parts of a rule's fused parameters.

Tested in tests/aoa/test_compile_scale.py and tests/planning/test_box_map_matching.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from paddle_flexckpt.aoa.macros import check_head_sizes, expand, expand_arrays, expand_stars, fused_tag
from paddle_flexckpt.aoa.operations import Operations, Shape, Value, carry_out, concatenated
from paddle_flexckpt.aoa.parser import Statement, parse
from paddle_flexckpt.aoa.placeholders import OFFSET, Placeholder, Template, name_hint, parse_name
from paddle_flexckpt.aoa.sides import Side
from paddle_flexckpt.aoa.statements import Place, StatementError
from paddle_flexckpt.aoa.structure import Structure
from paddle_flexckpt.optimizer_states import PARAMETER, STATES

NOTHING = "_"
Ids = tuple[int, ...]
_KEEPS_AXES = frozenset({"permute", "dtype", "src_dtype", "dst_dtype", "scale", "optional", "states", "axis"})


@dataclass(frozen=True, eq=False)
class Rule:
    """One statement of the program.

    Attributes:
        place: Where the user wrote it.
        statement: The statement, arrays written out.
        left: Its left names, without states.
        right: Its right names, likewise.
        placeholders: All placeholders, sorted.
        states: The states that it assigns; None: the parameter and all of its states.
        source_state: The state that is read, where a rename turns a parameter into a state, or the other way round;
            None: the state that is assigned.
        is_lenient: Whether a pattern that matches nothing is no error.
    """

    place: Place
    statement: Statement
    left: tuple[Template, ...]
    right: tuple[Template, ...]
    placeholders: tuple[str, ...]
    states: tuple[str, ...] | None
    source_state: str | None = None
    is_lenient: bool = False

    @cached_property
    def is_optional(self) -> bool:
        """Return whether the statement is left out where a left name does not exist."""
        return self.statement.has("optional") or (self.is_lenient and bool(self.placeholders))

    @cached_property
    def asks_shapes(self) -> bool:
        """Return whether an attribute takes the destination's shapes, or may, as a reshape does."""
        return any(attribute.value == "auto" or attribute.key == "reshape" for attribute in self.statement.attributes)

    @cached_property
    def is_plain(self) -> bool:
        """Return whether it depends on its left names' values alone, and is not about single states."""
        special = self.states is not None or self.fused or self.has_stars or self.asks_shapes or self.is_optional
        return not special and NOTHING not in (self.left[0].text, self.right[0].text)

    @cached_property
    def has_stars(self) -> bool:
        """Return whether names have stars, so that it depends on the existing keys."""
        return any(template.has_star for template in (*self.left, *self.right))

    @cached_property
    def fused(self) -> str | None:
        """Return its fused layout, if it has one that depends on the number of tensor-parallel parts."""
        tag = fused_tag(self.statement)
        return tag if tag in ("fused_ffn", "fused_qkv_old") else None

    def expanded(self, parts: tuple[int, int]) -> tuple[Statement, ...]:
        """Return the simple statements that it expands to, with their placeholders."""
        if fused_tag(self.statement) is None and not any(variable.transposed for variable in self.statement.left):
            return (self.statement,)  # not parsed again: thousands of rules may have hundreds of names each
        return tuple(statement for text in expand(self.statement, *parts) for statement in parse(text))

    def evaluate(
        self, parts: tuple[int, int], left: Sequence[Value], shapes: tuple[Shape | None, ...], operations: Operations
    ) -> list[Value]:
        """Return values of the right names for the left ones; computed once per combination of structures."""
        key = (self, parts, shapes, *(value.structure for value in left))
        results = operations.once(key, lambda: self._compute(parts, left, shapes, operations))
        inputs = concatenated(left)
        return [Value(s, inputs if slots is None else tuple([inputs[i] for i in slots])) for s, slots in results]

    def _compute(
        self, parts: tuple[int, int], left: Sequence[Value], shapes: tuple[Shape | None, ...], operations: Operations
    ) -> list[tuple[Structure, tuple[int, ...] | None]]:
        """Return the right names' structures, and which of all left inputs each has; None: these, in order."""
        check_head_sizes(self.statement, [value.structure.shape for value in left])
        names: dict[str, Value] = {}
        first = 0
        for variable, value in zip(self.statement.left, left):
            count = len(value.inputs)
            names[variable.name] = Value(value.structure, tuple(range(first, first + count)))
            first += count
        known = {variable.name: shape for variable, shape in zip(self.statement.right, shapes)}
        for simple in operations.once((self, parts), lambda: self.expanded(parts)):
            try:
                values = carry_out(
                    simple,
                    [names[variable.name] for variable in simple.left],
                    [known.get(variable.name) for variable in simple.right],
                    operations,
                )
            except StatementError as error:
                if simple.place.text != self.statement.place.text:
                    raise ExpandedError(str(error), simple.place.text) from error
                raise
            names.update(zip((variable.name for variable in simple.right), values))
        found = [names[variable.name] for variable in self.statement.right]
        return [(value.structure, None if value.inputs == tuple(range(first)) else value.inputs) for value in found]


class Origin(NamedTuple):
    """The statement that assigned a name."""

    rule: Rule
    ids: Ids

    def __str__(self) -> str:
        place = self.rule.place
        text = instantiate(place.text, dict(zip(self.rule.placeholders, self.ids)))
        return f"AOA statement {place.number}: {text.strip()}"


class ExpandedError(StatementError):
    """An error in a statement that a macro made; ``text`` is that statement."""

    def __init__(self, message: str, text: str) -> None:
        super().__init__(message)
        self.text = text


def make_rule(
    statement: Statement,
    states: Collection[str] = STATES,
    is_parameter: Callable[[Template], bool] = lambda _: False,
    sides: Sequence[Side] = (),
) -> Rule:
    """Make a rule of a parsed statement.

    Args:
        statement: The statement.
        states: Last components of names that may be those of states.
        is_parameter: Returns whether a name that ends like a state, such as ``block.w_0``, is a parameter's.
        sides: The source and, if there is one, the destination.
    """
    place = statement.place
    if any(variable.items for variable in (*statement.left, *statement.right)):
        (statement,) = parse(expand_arrays(statement), place.number)
    left = [parse_name(variable.name, variable.column) for variable in statement.left]
    right = [parse_name(variable.name, variable.column) for variable in statement.right]
    for side, templates in (("left", left), ("right", right)):
        if NOTHING in (t.text for t in templates) and len(statement.left) + len(statement.right) > 2:
            raise StatementError(f"'_' stands alone on the {side}")
    if left[0].text == right[0].text == NOTHING:
        raise StatementError("'_ -> _' means nothing")
    placeholders = tuple(sorted({name for template in (*left, *right) for name in template.placeholders}))
    for template, variable in zip(right, statement.right):
        lacking = [name for name in placeholders if name not in template.placeholders]
        if lacking and template.text != NOTHING:
            hint = name_hint(template.text)
            small = f". Remedy (FC603): correct the name{hint}" if "capitals" in hint else ""
            raise StatementError(
                f"{template.text!r} lacks ${lacking[0]}: it would be assigned once for every id{small}",
                variable.column,
            )
    right = [_offset(template) for template in right]
    if _is_rename(statement):
        ends = _ends(left[0], right[0], states, is_parameter, sides)
        if ends is not None:
            left, right = ([_base(t, state)] for t, state in ((left[0], ends[0]), (right[0], ends[1])))
            return Rule(place, statement, tuple(left), tuple(right), placeholders, (ends[1],), ends[0])
    own, left, right = _states(statement, left, right, states, is_parameter)
    return Rule(place, statement, tuple(left), tuple(right), placeholders, own)


def _offset(template: Template) -> Template:
    """Return a template for the right side, where $LAYER_ID_OFFSET is the id less 1."""
    parts = tuple(
        Placeholder(part.name, (*part.terms, ("-", 1)))
        if isinstance(part, Placeholder) and part.name == OFFSET
        else part
        for part in template.parts
    )
    return Template(template.text, parts, template.placeholders)


def _states(
    statement: Statement,
    left: list[Template],
    right: list[Template],
    states: Collection[str],
    is_parameter: Callable[[Template], bool],
) -> tuple[tuple[str, ...] | None, list[Template], list[Template]]:
    """Return the states that a statement names, in ``states=`` or as the last component of all its names."""
    attribute = statement.get("states")
    if attribute is not None:
        names = [name.strip() for name in str(attribute.value).split(",") if name.strip()]
        if not names:
            raise StatementError('states needs names, such as "moment1_0, w_0" or "model"', attribute.column)
        return tuple(PARAMETER if name == "model" else name for name in names), left, right
    tails = {t.text: t.text.rpartition(".")[2] for t in (*left, *right) if t.text != NOTHING}
    named = {name: tail for name, tail in tails.items() if tail in states and tail != name}
    if not named or any(is_parameter(template) for template in (*left, *right) if template.text in named):
        return None, left, right
    if len(named) < len(tails) or len(set(named.values())) > 1:
        raise StatementError(
            f"{next(iter(named))!r} is a state, and the other names are no states of that kind: a statement is about "
            "parameters and what belongs to them, or about one kind of state. Remedy (FC604): name the same state "
            "everywhere, or the parameters alone"
        )
    state = next(iter(named.values()))
    return (state,), [_base(template, state) for template in left], [_base(template, state) for template in right]


def _is_rename(statement: Statement) -> bool:
    """Return whether a statement only renames one tensor."""
    (*more_left, left), (*more_right, right) = statement.left, statement.right
    more = more_left or more_right or statement.attributes or left.transposed or right.transposed
    return not more and NOTHING not in (left.name, right.name)


def _ends(
    left: Template,
    right: Template,
    states: Collection[str],
    is_parameter: Callable[[Template], bool],
    sides: Sequence[Side],
) -> tuple[str, str] | None:
    """Return which state each name of a rename stands for, if exactly one of the names is a state.

    A plain ``optimizer.state_dict()`` has such other names: its states are not named as states.
    """
    tails = [template.text.rpartition(".")[2] for template in (left, right)]
    looks = [tail in states and tail != t.text for tail, t in zip(tails, (left, right))]
    parameters = [look and is_parameter(t) for look, t in zip(looks, (left, right))]
    named = [look and not parameter for look, parameter in zip(looks, parameters)]
    if named[0] == named[1]:
        return None
    (state, tail), other = ((left, tails[0]), right) if named[0] else ((right, tails[1]), left)
    has_states = any(any(side.states.get(other.text, ())) for side in sides)  # the name of PARAMETER is empty
    is_state = any(tail in side.states.get(state.text[: -len(tail) - 1], ()) for side in sides)
    # linear_0.w_0 -> x.w_0: two parameters, unless x.w_0 is known as a state.
    if has_states or (any(parameters) and not is_state):
        return None
    return (tails[0], PARAMETER) if named[0] else (PARAMETER, tails[1])


def _base(template: Template, state: str) -> Template:
    if template.text == NOTHING or state == PARAMETER:
        return template
    length = len(state) + 1
    parts = (*template.parts[:-1], str(template.parts[-1])[:-length])
    return Template(template.text[:-length], tuple(part for part in parts if part != ""), template.placeholders)


_TEXT_PLACEHOLDER = re.compile(
    r"\\?\$(?:\{([^}]*)\}|(LAYER_ID_OFFSET|LAYER_ID|EXPERT_ID|[A-Z][A-Z0-9]*(?:_[A-Z][A-Z0-9]*)*))"
)


def instantiate(text: str, ids: Mapping[str, int]) -> str:
    """Return a statement with ids in place of its placeholders."""
    arrow = text.find("->")

    def number(found: re.Match[str]) -> str:
        ((part,),) = [[p for p in _parts(found.group().lstrip("\\")) if isinstance(p, Placeholder)]]
        if part.name not in ids:
            return found.group()
        value = part.value(ids[part.name])
        return str(value - 1 if part.name == OFFSET and found.start() > arrow >= 0 else value)

    return _TEXT_PLACEHOLDER.sub(number, text)


@lru_cache(maxsize=1024)
def _parts(text: str) -> tuple[str | Placeholder, ...]:
    return parse_name(text).parts


def without_stars(rule: Rule, ids: Mapping[str, int], keys: Callable[[str, bool], Sequence[str]]) -> Rule:
    """Return the rule for one combination of ids, with keys in place of stars."""
    (statement,) = parse(instantiate(rule.statement.place.text, ids))
    (statement,) = parse(expand_stars(statement, keys))
    return replace(make_rule(statement, rule.states or ()), place=rule.place)


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
            "of tensors. Remedy (FC603): apply the fused layout to the source key itself",
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
            "makes something else of it. Remedy (FC603): apply the fused layout last, to the destination key itself",
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
            f"axis {axis} is out of range for {ndim} axes. Remedy (FC603): give axis= (a fused layout takes 1 by "
            "default)",
            0 if attribute is None else attribute.column,
        )
    return axis % ndim


def _even(parts: int, equal: bool, key: str) -> int:
    if not equal:
        raise StatementError(
            f"{key!r} is cut into {parts} or more parts of different sizes; fused layouts need equal ones"
        )
    return parts

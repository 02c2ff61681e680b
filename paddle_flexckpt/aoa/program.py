"""Carry out rules one after the other: names become values. Tested in tests/aoa/test_differential.py."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from paddle_flexckpt.aoa.element_maps import TensorInfo
from paddle_flexckpt.aoa.operations import Operations, Shape, Value, filled
from paddle_flexckpt.aoa.parser import Statement
from paddle_flexckpt.aoa.placeholders import KeyIndex, Template, name_hint, parse_name
from paddle_flexckpt.aoa.rule import (
    NOTHING,
    ExpandedError,
    Ids,
    Origin,
    Rule,
    instantiate,
    make_rule,
    source_parts,
    target_parts,
    without_stars,
)
from paddle_flexckpt.aoa.sides import NotFed, Side, StateView
from paddle_flexckpt.aoa.statements import AoaError, Place, StatementError, describe_problem
from paddle_flexckpt.aoa.structure import Structure, StructureError
from paddle_flexckpt.aoa.structure_ops import source as source_structure
from paddle_flexckpt.optimizer_states import PARAMETER, STATES, state_key

logger = logging.getLogger("paddle_flexckpt")
# The most problems to list.
MAX_PROBLEMS = 100


class _Assignment(NamedTuple):
    """The values of a rule's right names; ``state`` is None for a parameter with all its states."""

    names: Sequence[str]
    values: Sequence[Value]
    origin: Origin
    state: str | None


class Program:
    """The values of names, while rules are carried out and after.

    Attributes:
        source: The source.
        target: The destination, or None.
        values: Values of parameters with all their states, by name; inputs are names of source parameters.
        state_values: Values by state and name, from statements about that state alone; inputs are source keys.
        origins: The statement that assigned a name (for a state: its whole key).
        removed: Source names that are declared unused.
        read: Names that a statement has read since they were assigned.
        trace: None, or the rules that were carried out, in order, without stars, with their ids and the numbers of
            tensor-parallel parts on both sides.
    """

    def __init__(self, source: Side, target: Side | None, is_lenient: bool = False) -> None:
        """Start with the source keys alone; ``is_lenient`` as of :class:`Statements`."""
        self._is_lenient = is_lenient
        self.source = source
        self.target = target
        self._sides = (source,) if target is None else (source, target)
        self.operations = Operations()
        self.values: dict[str, Value] = {}
        self.state_values: dict[str, dict[str, Value]] = {}
        self.origins: dict[str, Origin] = {}
        self.removed: set[str] = set()
        self.states = StateView(source, self.removed)
        self.read: set[str] = set()
        self.trace: dict[tuple[Rule, Ids, tuple[int, int]], None] | None = None
        # Names whose statement failed. Statements that read them are left out, so that one mistake is one problem.
        self._failed: set[str] = set()
        # By name, the states that its value does not determine: a statement assigned the state alone for an operand.
        self._undetermined: dict[str, frozenset[str]] = {}
        # Left and right names of the statement that is being carried out.
        self._assigned_from: list[tuple[Sequence[str], Sequence[str]]] = []
        # By identity, as hashing shapes takes longer: a side has one object for equal shapes and dtypes.
        self._sources: dict[int, Structure] = {}
        self._index = KeyIndex(source.states)
        self._target_index: KeyIndex | None = None
        self._side_indices: list[KeyIndex] | None = None
        self._problems: list[str] = []
        self.rules: list[Rule] = []
        self._position = 0

    def run(self, statements: Sequence[Statement]) -> None:
        """Carry out statements.

        Raises:
            AoaError: Some do not fit the tensors; problems that follow from others are not listed.
        """
        kinds = {id(kinds): kinds for side in self._sides for kinds in side.states.values()}.values()
        states = {*STATES, *(state for kind in kinds for state in kind if state)}
        for statement in statements:
            try:
                rule = make_rule(statement, states, self._is_parameter, self._sides)
                self.rules.append(replace(rule, is_lenient=True) if self._is_lenient else rule)
            except StatementError as error:
                self._note(error, statement.place)
        self._raise()
        for position, rule in enumerate(self.rules):
            self._position = position
            try:
                self._run_rule(rule)
            except StatementError as error:
                self._note(error, rule.place)
        self._raise()

    def assign(self, name: str, state: str | None, value: Value, origin: Origin | None) -> None:
        """Give a parameter with all its states, or one ``state``, a value that no statement made."""
        table = self.values if state is None else self.state_values.setdefault(state, {})
        table[name] = value
        if origin is not None:
            self.origins[name if state is None else state_key(name, state)] = origin
        self._index.add([name], parse_name(name))

    def forget(self, names: Sequence[str]) -> None:
        """Leave the destination's keys of these names, or patterns, without a value."""
        for template in map(parse_name, names):
            for ids in self._destination_index().bindings(template):
                name = template.formatter(template.placeholders)(ids)
                self.values.pop(name, None)
                self.removed.add(name)

    def check_determined(self, name: str, state: str) -> None:
        """Raise NotFed if a statement assigned this state alone for an operand of ``name``."""
        if state in self._undetermined.get(name, ()):
            what = state or "the parameter"
            raise NotFed(
                f"a statement before made {what} alone of a name that it reads. Remedy (FC604): give the statement "
                f"about {what} last, with the name of the target on its right"
            )

    def _note_undetermined(self) -> None:
        """Note which states do not follow from the names that a statement has assigned."""
        undetermined = {}
        for left, right in self._assigned_from:
            states = {state for state, table in self.state_values.items() if any(name in table for name in left)}
            undetermined.update(
                dict.fromkeys(right, frozenset(states.union(*(self._undetermined.get(name, ()) for name in left))))
            )
        self._undetermined.update(undetermined)

    def _is_parameter(self, template: Template) -> bool:
        """Return whether a parameter of one of the sides has that name."""
        if template.text == NOTHING:
            return False
        return bool(self._index.bindings(template) or self._destination_index().bindings(template))

    def _raise(self) -> None:
        if self._problems:
            raise AoaError(self._problems)

    def _note(self, error: StatementError, place: Place, expansion: Sequence[str] = ()) -> None:
        if len(self._problems) < MAX_PROBLEMS:
            texts = [*expansion, error.text] if isinstance(error, ExpandedError) else list(expansion)
            self._problems.append(describe_problem(str(error), place.at(error.column), texts))

    def _run_rule(self, rule: Rule) -> None:
        """Carry a rule out for all ids: all left names are read before any right name is assigned."""
        before = len(self._problems)
        bindings = self.bindings(rule)
        self._assigned_from = []
        left = [template.formatter(rule.placeholders) for template in rule.left]
        right = [template.formatter(rule.placeholders) for template in rule.right]
        if rule.is_plain and not self._failed and self.trace is None and self._run_plain(rule, bindings):
            return
        assigned: list[_Assignment] = []
        for ids in bindings:
            try:
                if rule.has_stars:
                    assigned += self._star_assignments(rule, ids)
                else:
                    names = [format_name(ids) for format_name in left], [format_name(ids) for format_name in right]
                    assigned += self._assignments(rule, Origin(rule, ids), *names)
            except StatementError as error:
                lost = [format_name(ids) for format_name in right]
                self._failed.update(lost)
                # Later statements that read these names are left out.
                for name, template in zip(lost, rule.right):
                    self._index.add([name], template)
                # The other instances of a rule have the same problem as its first one.
                if len(self._problems) == before:
                    text = instantiate(rule.place.text, dict(zip(rule.placeholders, ids)))
                    self._note(error, rule.place, [text])
        if rule.states is None and (self.state_values or self._undetermined):
            self._note_undetermined()
        self._commit(rule, assigned)
        is_left_out = not bindings or not (assigned or rule.right[0].text == NOTHING or self._problems)
        if is_left_out and rule.is_lenient and not rule.statement.has("optional"):
            logger.warning(
                f"AOA statement {rule.place.number} is left out, as nothing matches its pattern: "
                f"{rule.place.text.strip()}. Paddle's own functions leave such statements out; "
                "paddle_flexckpt.load_state_dict refuses them"
            )

    def _run_plain(self, rule: Rule, bindings: Sequence[Ids]) -> bool:
        """Carry out a rule that is the same for all ids, column by column, as most rules are."""
        try:
            left = [list(map(template.formatter(rule.placeholders), bindings)) for template in rule.left]
            right = [list(map(template.formatter(rule.placeholders), bindings)) for template in rule.right]
            found = [list(map(self._parameter_value, column)) for column in left]
            if any(None in column for column in found):
                return False
            columns: list[list[Value]] = [[] for _ in right]
            no_shapes: tuple[None, ...] = (None,) * len(right)
            for values in zip(*found):
                for column, value in zip(columns, rule.evaluate((1, 1), values, no_shapes, self.operations)):
                    column.append(value)
        except StatementError:
            return False
        if self.state_values or self._undetermined:
            self._assigned_from = list(zip(zip(*left), zip(*right)))
            self._note_undetermined()
        for names in left:
            self.read.update(names)
        origins = [Origin(rule, ids) for ids in bindings]
        for template, names, values in zip(rule.right, right, columns):
            self.values.update(zip(names, values))
            self.origins.update(zip(names, origins))
            self.read.difference_update(names)
            self.removed.difference_update(names)
            self._index.add(names, template)
        return True

    def _commit(self, rule: Rule, assigned: list[_Assignment]) -> None:
        for names, values, origin, state in assigned:
            if state is None:
                for name, value in zip(names, values):
                    self.values[name] = value
                    self.origins[name] = origin
                self.read.difference_update(names)
                self.removed.difference_update(names)
            else:
                table = self.state_values.setdefault(state, {})
                for name, value in zip(names, values):
                    table[name] = value
                    self.origins[state_key(name, state)] = origin
        if not assigned:
            return
        if rule.has_stars:
            for assignment in assigned:
                for name in assignment.names:
                    self._index.add([name], parse_name(name))
            return
        for template, column in zip(rule.right, zip(*(assignment.names for assignment in assigned))):
            self._index.add(column, template)

    def _star_assignments(self, rule: Rule, ids: Ids) -> list[_Assignment]:
        numbers = dict(zip(rule.placeholders, ids))
        try:
            concrete = without_stars(rule, numbers, self.star_keys)
        except StatementError:
            if rule.is_optional:
                return []
            raise
        names = [t.text for t in concrete.left], [t.text for t in concrete.right]
        try:
            return self._assignments(concrete, Origin(rule, ids), *names)
        except StatementError as error:
            self._failed.update(names[1])
            raise ExpandedError(str(error), concrete.statement.place.text) from error

    def star_keys(self, name: str, is_left: bool) -> list[str]:
        """Return the keys of a name with stars."""
        if is_left:
            return self._index.star(name)
        if self.target is None:
            raise StatementError(f"{name!r} stands for destination keys, and no destination is given")
        return self._destination_index().star(name)

    def _destination_index(self) -> KeyIndex:
        if self._target_index is None:
            self._target_index = KeyIndex(self.target.states if self.target is not None else ())
        return self._target_index

    def bindings(self, rule: Rule) -> list[Ids]:
        """Return the combinations of ids for which the rule is carried out."""
        if not rule.placeholders:
            return [()]
        by_target = rule.left[0].text == NOTHING
        if by_target and self.target is None:
            raise StatementError("the ids of '_ -> name' come from a destination, and none is given")
        index = self._destination_index() if by_target else self._index
        templates = [t for t in (rule.right if by_target else rule.left) if t.placeholders]
        found: list[dict[str, int]] = [{}]
        for template in templates:
            if found and all(name in found[0] for name in template.placeholders):
                continue
            found = [
                {**known, **dict(zip(template.placeholders, ids))}
                for known in found
                for ids in index.bindings(template, known)
            ]
            if not found:
                if rule.is_optional:
                    return []
                side = "destination key" if by_target else "source key or variable"
                raise StatementError(
                    f"no {side} matches {template.text!r}; there are, for example, {index.keys_like(template.text)}. "
                    f"Remedy (FC601): correct the pattern{self._or_optional(rule.right)}{name_hint(template.text)}"
                )
        lacking = [name for name in rule.placeholders if found and name not in found[0]]
        if lacking:
            raise StatementError(f"nothing on the left says which values ${lacking[0]} takes")
        return sorted(tuple(ids[name] for name in rule.placeholders) for ids in found)

    def _assignments(self, rule: Rule, origin: Origin, left: list[str], right: list[str]) -> list[_Assignment]:
        """Return what a rule assigns for one combination of ids."""
        if self._failed and not self._failed.isdisjoint(left):
            self._failed.update(right)
            return []
        states: tuple[str | None, ...] = (None,) if rule.states is None else rule.states
        found = [(state, self._evaluated(rule, origin.ids, left, right, state)) for state in states]
        if any(values is not None for _, values in found):
            self._assigned_from.append((left, right))
        return [_Assignment(right, values, origin, state) for state, values in found if values is not None]

    def _evaluated(
        self, rule: Rule, ids: Ids, left: list[str], right: list[str], state: str | None
    ) -> Sequence[Value] | None:
        """Return values of the right names, or None where there is nothing to assign."""
        if left[0] == NOTHING:
            self._note_traced(rule, ids, (1, 1))
            return self._fill(rule, right[0], state)
        known = []
        for name in left:
            if rule.source_state is not None:
                value = self._value_as(name, rule.source_state)
            else:
                value = self._value_of(name, state, not rule.statement.has("states"))
            if value is None:
                if rule.is_optional:
                    return None
                raise StatementError(self._unknown(name, state, right))
            known.append(value)
        if state is None or rule.source_state == PARAMETER:
            self.read.update(left)
        if right[0] == NOTHING:
            self._note_traced(rule, ids, (1, 1))
            self.removed.update(left if state is None else [state_key(left[0], state)])
            return None
        parts = (1, 1) if rule.fused is None else self._parts(rule, ids, known, right)
        self._note_traced(rule, ids, parts)
        return rule.evaluate(parts, known, self._shapes(rule, right, state), self.operations)

    def _note_traced(self, rule: Rule, ids: Ids, parts: tuple[int, int]) -> None:
        if self.trace is not None:
            self.trace[rule, ids if rule.placeholders else (), parts] = None

    def _value_of(self, name: str, state: str | None, by_key: bool) -> Value | None:
        """Return the value of a name as a parameter or a state; ``by_key``: the statement names the state itself."""
        if state is not None:
            value = self.state_values.get(state, {}).get(name)
            if value is not None:
                return value
            info = self.source.states.get(name, {}).get(state)
            if info is not None and (by_key or name not in self.values):
                return Value(self.source_structure(info), (state_key(name, state),))
            if name not in self.values:
                return None
            try:
                return self.states.value(self.values[name], state)
            except NotFed:
                return None
        return self._parameter_value(name)

    def _value_as(self, name: str, state: str) -> Value | None:
        """Return the value of a name as a state; for PARAMETER, as a parameter."""
        value = self._value_of(name, state, True) if state != PARAMETER else self.state_values.get(state, {}).get(name)
        return value if value is not None else self._parameter_value(state_key(name, state))

    def _parameter_value(self, name: str) -> Value | None:
        """Return the value of a name as a parameter: the last one assigned, else the source key."""
        value = self.values.get(name)
        if value is None and name in self.source.states:
            value = Value(self.source_structure(self.source.base_info(name)), (name,))
        return value

    def source_structure(self, info: TensorInfo) -> Structure:
        """Return the structure of a tensor as it is; one for all of the same shape and dtype."""
        structure = self._sources.get(id(info))
        if structure is None:
            structure = self._sources[id(info)] = source_structure(info).structure
        return structure

    def _parts(self, rule: Rule, ids: Ids, left: list[Value], right: list[str]) -> tuple[int, int]:
        """Return the numbers of tensor-parallel parts of the fused tensors on the left and on the right."""
        numbers = dict(zip(rule.placeholders, ids))
        ndim = len(left[0].structure.shape)
        following = self.rules[self._position + 1 :]
        return (
            source_parts(rule, left[0], self.source) if len(left) == 1 else 1,
            target_parts(rule, numbers, right[0], ndim, self.target, following) if len(right) == 1 else 1,
        )

    def _or_optional(self, right: Sequence[Template]) -> str:
        """Return the remedy to make a statement optional; "" where a target might then get the source's own tensor."""
        if self._side_indices is None:
            self._side_indices = [KeyIndex(side.states) for side in self._sides]
        names = [template for template in right if template.text != NOTHING]
        is_there = any(index.bindings(template) for index in self._side_indices for template in names)
        return "" if is_there else ", or add the tag 'optional'"

    def _unknown(self, name: str, state: str | None, right: Sequence[str]) -> str:
        what = state_key(name, state) if state else name
        return (
            f"{what!r} is neither a source key nor assigned before; there are, for example, "
            f"{self._index.keys_like(name)}. Remedy (FC601): correct the "
            f"name{self._or_optional(list(map(parse_name, right)))}{name_hint(name)}"
        )

    def _shapes(self, rule: Rule, right: list[str], state: str | None) -> tuple[Shape | None, ...]:
        if not rule.asks_shapes:
            return (None,) * len(right)
        states = {} if self.target is None else self.target.states
        if state:
            return tuple(states[name][state].shape if state in states.get(name, ()) else None for name in right)
        return tuple(self.target.base_info(n).shape if self.target is not None and n in states else None for n in right)

    def _fill(self, rule: Rule, name: str, state: str | None) -> list[Value] | None:
        """Return the value of ``_ -> name``, or None where there is no such destination key."""
        states = {} if self.target is None else self.target.states.get(name, {})
        if not states or (state is not None and state not in states):
            if rule.statement.has("fill") and not rule.is_optional:
                key = state_key(name, state or "")
                lacks = (
                    f"shape and dtype of {key!r} come from a destination, and none is given"
                    if self.target is None
                    else f"the destination has no key {key!r} to fill"
                )
                remedy = "leave the statement out" if self.target is None else "correct the name"
                raise StatementError(
                    f"{lacks}. Remedy (FC601): {remedy}, or add the tag 'optional'", rule.statement.right[0].column
                )
            return None
        info = states[state] if state is not None else self.target.base_info(name)  # type: ignore[union-attr]
        try:
            return [filled(rule.statement, info)]
        except StructureError as error:
            raise StatementError(str(error)) from error

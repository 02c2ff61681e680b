"""States: what the moves of a parameter mean for its master weight, its moments and its scalars.

Tested in tests/aoa/test_language.py.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from paddle_flexckpt.aoa.mapping import TensorInfo
from paddle_flexckpt.aoa.operations import Value
from paddle_flexckpt.aoa.sides import MASTER, PARAMETER, Side, state_key
from paddle_flexckpt.aoa.steps import Constant
from paddle_flexckpt.aoa.structure import Structure, StructureError
from paddle_flexckpt.aoa.structure_values import keep, uncast, with_inputs


class NotFed(ValueError):
    """A state of a target that nothing feeds; the text says why."""


class StateView:
    """Values of states, made from values of parameters."""

    def __init__(self, source: Side, removed: Collection[str]) -> None:
        """Take the source, and the source keys that statements declare unused, as they become known."""
        self._source = source
        self._removed = removed
        self._memo: dict[tuple[Structure, str, tuple[TensorInfo, ...]], Structure] = {}

    def value(self, value: Value, state: str, parameters_too: bool = False) -> Value:
        """Return a state's value, its inputs being source keys.

        Raises:
            NotFed: A source parameter lacks the state, or the state has no meaning after the parameter's steps.
        """
        if state == PARAMETER:
            return self._parameter(value)
        has_steps = any(node.operands for node in value.structure.nodes)
        if has_steps and state != MASTER:
            raise NotFed(
                f"the parameter is computed element by element, which says nothing about its {state}. Remedy: add a "
                f'statement for {state}, such as one with states="{state}"'
            )
        keys, infos = [], []
        for base in value.inputs:
            states = self._source.states[base]
            found = state if state in states or not (parameters_too or has_steps) else PARAMETER
            if found not in states:
                raise NotFed(f"the source has no key {state_key(base, state)!r}")
            keys.append(state_key(base, found))
            if keys[-1] in self._removed and found != PARAMETER:
                raise NotFed(f"a statement removes the source key {keys[-1]!r}")
            infos.append(states[found])
        return Value(self._structure(value.structure, state, tuple(infos)), tuple(keys))

    def _parameter(self, value: Value) -> Value:
        """Return the parameter as it is, once it is known to be there."""
        for base in value.inputs:
            if PARAMETER not in self._source.states[base]:
                raise NotFed(f"the source has no key {base!r}")
        return value

    def _structure(self, structure: Structure, state: str, infos: tuple[TensorInfo, ...]) -> Structure:
        key = (structure, state, infos)
        found = self._memo.get(key)
        if found is None:
            try:
                found = with_inputs(structure, infos)
            except StructureError as error:
                raise NotFed(str(error)) from error
            self._memo[key] = found if state == MASTER else _without_fill(found)
        return self._memo[key]


def _without_fill(structure: Structure) -> Structure:
    """Make new elements of a moment 0, whatever those of the parameter are."""
    nodes = tuple(
        replace(node, step=Constant(0, node.step.dtype)) if isinstance(node.step, Constant) else node
        for node in structure.nodes
    )
    return replace(structure, nodes=nodes)


def of_constants(structure: Structure, state: str, info: TensorInfo) -> Structure:
    """Return a state of a parameter that is made of constants and of what the target has.

    A state of another shape (a scalar) keeps what it has.
    """
    if state == PARAMETER:
        return structure
    if info.shape != structure.shape:
        return keep(info).structure
    nodes = []
    for node in structure.nodes:
        step = node.step
        if isinstance(step, Constant):
            step = Constant(step.fill if state == MASTER else 0, info.dtype)
        elif step is not None:
            raise NotFed("the parameter is computed from constants alone")
        nodes.append(replace(node, step=step, info=TensorInfo(node.info.shape, info.dtype)))
    return replace(structure, dtype=info.dtype, nodes=tuple(nodes), fragments=uncast(structure.fragments), chains=((),))

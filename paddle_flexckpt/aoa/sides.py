"""One side of a program: its keys, their parameters and states, how they are cut, and their values.

Tested in tests/aoa/test_language.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

import numpy as np

from paddle_flexckpt.aoa.element_maps import TensorInfo
from paddle_flexckpt.aoa.operations import Value
from paddle_flexckpt.aoa.steps import Constant
from paddle_flexckpt.aoa.structure import Structure, StructureError
from paddle_flexckpt.aoa.structure_values import keep, uncast, with_inputs
from paddle_flexckpt.catalog import Catalog
from paddle_flexckpt.optimizer_states import MASTER, PARAMETER, split_state, state_key


class Side:
    """The tensors of a source or a destination."""

    def __init__(self, catalog: Catalog, other_keys: Iterable[str] = ()) -> None:
        """Read a catalog."""
        self._catalog = catalog
        numbers, rows = np.unique(catalog.key, return_index=True)
        infos = _infos(catalog, rows)
        self.infos: dict[str, TensorInfo] = {catalog.keys[n]: info for n, info in zip(numbers.tolist(), infos)}
        # State names by parameter; PARAMETER among them if the parameter itself is there. Parameters without states, of
        # equal shape and dtype, share one dict, which is never changed.
        self.states: dict[str, dict[str, TensorInfo]] = {}
        alone = {id(info): {PARAMETER: info} for info in infos}
        everything: set[str] = set()
        for key, info in self.infos.items():
            if key[-1:].isdigit():
                everything = everything or {*self.infos, *other_keys}
                base, state = split_state(key, everything)
                if state:
                    self.states[base] = {**self.states.get(base, {}), state: info}
                    continue
            self.states[key] = {PARAMETER: info, **self.states[key]} if key in self.states else alone[id(info)]
        self._cuts: dict[int, dict[str, tuple[int, bool]]] = {}
        self._numbers: dict[str, int] | None = None

    def split(self, key: str) -> tuple[str, str]:
        """Return a key of this side as (parameter, state)."""
        base, _, state = key.rpartition(".")
        return (base, state) if state in self.states.get(base, ()) else (key, PARAMETER)

    def base_info(self, base: str) -> TensorInfo:
        """Return shape and dtype of a parameter; without it, of its first state that is no scalar."""
        states = self.states[base]
        info = states.get(PARAMETER)
        if info is not None:
            return info
        size = {state: int(np.prod(info.shape)) for state, info in states.items()}
        return states[min(states, key=lambda state: (-size[state], state != MASTER, state))]

    def parts(self, base: str, axis: int) -> tuple[int, bool]:
        """Return the number of parts of a parameter along an axis, and whether these are equal.

        The number follows from the recorded order of its elements, or, without one, from the cuts of the shards. A
        flattened shard counts as its box: sharding a state further is no cut.

        Args:
            base: A parameter of this side, or the key of a state.
            axis: Not negative.
        """
        ndim = len((self.base_info(base) if base in self.states else self.infos[base]).shape)
        padded = self._catalog.width - ndim + axis
        if padded not in self._cuts:
            self._cuts[padded] = self._count_cuts(padded)
        cuts = self._cuts[padded]
        if base not in self.states:
            return self._ordered(base, axis) or cuts.get(base, (1, True))
        for state in (PARAMETER, *sorted(self.states[base])):
            info = self.states[base].get(state)
            if info is not None and len(info.shape) == ndim and int(np.prod(info.shape)) > 1:
                key = state_key(base, state)
                return self._ordered(key, axis) or cuts.get(key, (1, True))
        return 1, True

    def _ordered(self, key: str, axis: int) -> tuple[int, bool] | None:
        """Return the parts in a key's order, if it has one."""
        if self._numbers is None:
            self._numbers = {name: number for number, name in enumerate(self._catalog.keys)}
        order = self._catalog.order(self._numbers[key])
        known = order is not None and order.parts is not None and order.axis in (None, axis)
        return (order.parts, True) if known else None  # type: ignore[union-attr,return-value]

    def _count_cuts(self, axis: int) -> dict[str, tuple[int, bool]]:
        catalog = self._catalog
        filled = np.flatnonzero((catalog.shape > 0).all(axis=1))  # a shard without elements is no part
        order = filled[np.argsort(catalog.key[filled], kind="stable")]
        if not len(order):
            return {}
        keys, start = np.unique(catalog.key[order], return_index=True)
        offset, extent = catalog.offset[order, axis], catalog.shape[order, axis]
        total = catalog.global_shape[order[start], axis]
        smallest, largest = np.minimum.reduceat(extent, start), np.maximum.reduceat(extent, start)
        # The number follows from the extents, so one rank's shards suffice.
        aligned = np.logical_and.reduceat(offset % np.maximum(extent, 1) == 0, start)
        equal = (smallest == largest) & (total % largest == 0) & aligned
        # Uneven parts are counted only for the message.
        count = -(-total // largest)
        return {
            catalog.keys[key]: (number, even)
            for key, number, even in zip(keys.tolist(), count.tolist(), equal.tolist())
        }


def _infos(catalog: Catalog, rows: np.ndarray) -> list[TensorInfo]:
    """Return shape and dtype of some rows; one object for all that are equal."""
    if not len(rows):
        return []
    columns = np.column_stack([catalog.dtype[rows], catalog.ndim[rows], catalog.global_shape[rows]]).astype(np.int64)
    shared: dict[bytes, TensorInfo] = {}
    infos = []
    # Bytes of rows are compared faster than Python's objects.
    for row, code in zip(rows.tolist(), np.ascontiguousarray(columns).view(f"V{8 * columns.shape[1]}")[:, 0].tolist()):
        info = shared.get(code)
        if info is None:
            shape = catalog.unpadded(row, catalog.global_shape)
            info = shared[code] = TensorInfo(shape, catalog.dtype_name(row))
        infos.append(info)
    return infos


class NotFed(ValueError):
    """An error of a target's state that nothing feeds; the text has the reason."""


class StateView:
    """A view of parameters' values as values of their states."""

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
                f"the parameter is computed element by element, which says nothing about its {state}. Remedy (FC604): "
                f'add a statement for {state}, such as one with states="{state}"'
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
    """Return the structure of a moment, whose new elements are 0 whatever the parameter's are."""
    nodes = tuple(
        replace(node, step=Constant(0, node.step.dtype)) if isinstance(node.step, Constant) else node
        for node in structure.nodes
    )
    return replace(structure, nodes=nodes)


def of_constants(structure: Structure, state: str, info: TensorInfo) -> Structure:
    """Return a state of a parameter that is made of constants and of the target's own values.

    A state of another shape (a scalar) keeps its value.
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

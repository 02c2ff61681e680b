"""Reverse a program for ``aoa_config_reverse``: the columns of its box maps are swapped.

The program is carried out from the destination to the source of a load, on names and shapes alone. Each fragment of a
value then maps a box of a destination tensor to a box of a source tensor. Swapped, these are the fragments of the
destination tensor. They have to cover all its elements without a computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paddle_flexckpt.algebra.box_maps import NO_AXIS
from paddle_flexckpt.aoa.casts import COMPLEX, is_exact, simplify_chain
from paddle_flexckpt.aoa.element_maps import TensorInfo
from paddle_flexckpt.aoa.operations import Value
from paddle_flexckpt.aoa.program import Program
from paddle_flexckpt.aoa.statements import NOT_EXACT, AoaError, describe_problem
from paddle_flexckpt.aoa.structure import Fragments, Structure, assembled
from paddle_flexckpt.aoa.structure_values import keep
from paddle_flexckpt.optimizer_states import PARAMETER, state_key

# The most cells of the grid of all edges of a tensor's boxes; more would take minutes.
MAX_CELLS = 1 << 22


class _Lost(ValueError):
    pass


class _Use(NamedTuple):
    """A use of a tensor: input ``slot`` of the value of the tensor ``name``, whose shape and dtype are ``info``."""

    structure: Structure
    slot: int
    name: str
    info: TensorInfo


class Reversal:
    """The reversal of a program that was carried out from the destination."""

    def __init__(self, forward: Program, back: Program) -> None:
        """Take a program carried out from the destination, and one without statements, to which values are assigned."""
        self._forward = forward
        self._back = back
        self._memo: dict[tuple[object, ...], tuple[Structure, tuple[int, ...]]] = {}
        self._problems: list[str] = []

    def run(self) -> None:
        """Assign a value to every tensor of the destination that statements mention.

        Raises:
            AoaError: Some cannot be restored exactly.
        """
        forward, back = self._forward, self._back
        for state, table in forward.state_values.items():
            # Statements about these states alone made the source's keys of these names.
            back.removed.update(state_key(name, state) for name in table)
        self._reverse(None, forward.values)
        for state, table in forward.state_values.items():
            self._reverse(state, table)
        for name in forward.removed:
            self._keep(name)
        if self._problems:
            raise AoaError(self._problems)

    def _reverse(self, state: str | None, values: dict[str, Value]) -> None:
        forward, back = self._forward, self._back
        uses: dict[str, list[_Use]] = {}
        for name, value in values.items():
            states = back.source.states.get(name, {})
            if state is None and states:
                info = back.source.base_info(name)
            elif state is not None and state in states:
                info = states[state]
            else:
                info = None
            key = name if state is None else state_key(name, state)
            if not value.inputs and info is not None:
                back.removed.add(key)
            if info is not None and info.shape != value.structure.shape:
                self._problems.append(
                    f"{forward.origins[key]} gives {key!r} the shape {list(value.structure.shape)}; expected "
                    f"{list(info.shape)}, as in the source of this reverse load. Remedy (FC605): correct the statement"
                )
                continue
            for slot, used in enumerate(value.inputs):
                found = uses.setdefault(used, [])
                if info is not None:
                    found.append(_Use(value.structure, slot, key, info))
        for used, found in uses.items():
            if state is None and used not in values and used in back.source.states:
                continue  # the source has it under its own name
            self._give(used, state, found)
        for name in values:
            if state is None and name not in uses and name in forward.source.states:
                back.removed.add(name)  # the source has another tensor of this name

    def _give(self, used: str, state: str | None, uses: list[_Use]) -> None:
        forward, back = self._forward, self._back
        base, own = (used, None) if state is None else forward.source.split(used)
        info = forward.source.base_info(used) if state is None else forward.source.infos[used]
        origin = next((forward.origins[use.name] for use in uses), None)
        try:
            structure, slots = self._structure(info, uses)
        except _Lost as error:
            if used not in forward.removed:
                self._note_lost(used, state, str(error), bool(uses))
            return
        value = Value(structure, tuple(uses[slot].name for slot in slots))
        back.assign(base, own, value, origin)

    def _note_lost(self, used: str, state: str | None, why: str, is_there: bool) -> None:
        forward = self._forward
        table = forward.values if state is None else forward.state_values[state]
        readers = (state_key(name, state or PARAMETER) for name, value in table.items() if used in value.inputs)
        origin = forward.origins[next(readers)]
        # The result of an optional statement need not be in the source.
        if is_there or not origin.rule.is_optional:
            message = f"has no exact inverse: {used!r} cannot be restored, as {why}"
            self._problems.append(describe_problem(message, origin.rule.place, (), NOT_EXACT))

    def _keep(self, name: str) -> None:
        """Let the destination keep its values of a tensor that was removed."""
        forward, back = self._forward, self._back
        if name in forward.source.states and name not in back.values:
            back.assign(name, None, Value(keep(forward.source.base_info(name)).structure, ()), None)
        elif name in forward.source.infos and name not in forward.source.states:
            base, state = forward.source.split(name)
            back.assign(base, state, Value(keep(forward.source.infos[name]).structure, ()), None)

    def _structure(self, info: TensorInfo, uses: list[_Use]) -> tuple[Structure, tuple[int, ...]]:
        """Return the structure of a tensor over the tensors that were made of it, and which of these it needs."""
        key = (info, *((use.structure, use.slot, use.info) for use in uses))
        if key not in self._memo:
            self._memo[key] = _swapped(info, uses)
        return self._memo[key]


def _swapped(info: TensorInfo, uses: Sequence[_Use]) -> tuple[Structure, tuple[int, ...]]:
    if not uses:
        raise _Lost("the source of this reverse load has no tensor that it was used for")
    parts = [_seen_from(use.structure, use.slot, number, info) for number, use in enumerate(uses)]
    # Exact copies first, then those with the most of the tensor.
    exact = [is_exact(info.dtype, use.structure.dtype) and is_exact(info.dtype, use.info.dtype) for use in uses]
    size = [int(part.extent.prod(axis=1).sum()) for part in parts]
    order = sorted(range(len(uses)), key=lambda number: (not exact[number], -size[number], number))
    width = max(part.width for part in parts)
    shown = Fragments.concat([parts[number].of_width(width) for number in order])
    fragments = _once_each(info, shown, uses)
    chains: list[tuple[str, ...]] = []
    for use in uses:
        if use.info.dtype in COMPLEX and info.dtype not in (*COMPLEX, "bool"):
            raise _Lost(f"a cast of {use.info.dtype} to {info.dtype} would drop the imaginary parts")
        chains.append(simplify_chain(use.info.dtype, (info.dtype,)))
    derived = assembled(info.shape, info.dtype, tuple(use.info for use in uses), fragments, chains, ())
    return derived.structure, derived.slots


def _seen_from(structure: Structure, slot: int, number: int, info: TensorInfo) -> Fragments:
    """Return the fragments of one input, with the columns of the value and of the input swapped."""
    fragments = structure.fragments.take(structure.fragments.leaf == slot)
    rank, ndim, count = len(structure.shape), len(info.shape), len(fragments)
    first = fragments.width - ndim
    axes = fragments.value_axis[:, first:]
    extent = np.where(
        axes >= 0, np.take_along_axis(fragments.extent, np.maximum(axes, 0), axis=1) if rank else 1, 1
    ).reshape(count, ndim)
    runs = np.full((count, rank), NO_AXIS, dtype=np.int64)
    for axis in range(ndim):
        rows = np.flatnonzero(axes[:, axis] >= 0)
        runs[rows, axes[rows, axis]] = axis
    chain = leaf = np.full(count, number, dtype=np.int64)
    return Fragments(fragments.leaf_offset[:, first:], extent, leaf, fragments.offset, runs, chain)


def _once_each(info: TensorInfo, shown: Fragments, uses: Sequence[_Use]) -> Fragments:
    """Return fragments with each element of a tensor exactly once: its first occurrence."""
    shape = np.asarray(info.shape, dtype=np.int64)
    if not shape.all():
        return shown.take(np.zeros(0, dtype=np.int64))
    names = sorted({use.name for use in uses})[:3]
    if not len(shown):
        raise _Lost(f"it is only computed with, to make {names}")
    ends = shown.offset + shown.extent
    whole = np.flatnonzero((shown.extent == shape).all(axis=1))
    if len(whole) and whole[0] == 0:
        return shown.take(whole[:1])
    edges = [np.unique([0, n, *shown.offset[:, a].tolist(), *ends[:, a].tolist()]) for a, n in enumerate(info.shape)]
    cells = tuple(len(edge) - 1 for edge in edges)
    if np.prod(np.asarray(cells, dtype=np.float64)) > MAX_CELLS:
        raise _Lost(f"it is scattered over more than {MAX_CELLS:,} boxes")
    low = np.stack([np.searchsorted(edge, shown.offset[:, a]) for a, edge in enumerate(edges)], axis=1).tolist()
    high = np.stack([np.searchsorted(edge, ends[:, a]) for a, edge in enumerate(edges)], axis=1).tolist()
    owner = np.full(cells, -1, dtype=np.int64)
    overlaps = False
    for row, (start, stop) in enumerate(zip(low, high)):
        part = owner[tuple(map(slice, start, stop))]
        overlaps = overlaps or bool((part >= 0).any())
        part[part < 0] = row
    if (owner < 0).any():
        index = np.argwhere(owner < 0)[0].tolist()
        box = ", ".join(f"{edge[i]}:{edge[i + 1]}" for edge, i in zip(edges, index))
        raise _Lost(f"its elements [{box}] are not in {names} of the source, or only computed with")
    if not overlaps:
        return shown
    found = np.argwhere(owner >= 0)
    offset = np.stack([edge[found[:, a]] for a, edge in enumerate(edges)], axis=1)
    stop = np.stack([edge[found[:, a] + 1] for a, edge in enumerate(edges)], axis=1)
    parts = shown.take(owner[owner >= 0])
    return parts.clipped(offset, stop)

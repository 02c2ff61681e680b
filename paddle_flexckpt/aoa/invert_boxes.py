"""The inverse of a program from its box maps, where its statements cannot be inverted one by one.

``a -> b, slice="[0:2]"`` and ``a -> c, slice="[2:4]"`` have no inverse each, and one together. Every source tensor is
cut into a grid at all edges of the boxes that were taken from it; each cell is found in some target, cut out there,
turned into the source's axes, and the cells are joined again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paddle_flexckpt.aoa.casts import COMPLEX, is_exact
from paddle_flexckpt.aoa.compile import compile_program
from paddle_flexckpt.aoa.lexer import quoted
from paddle_flexckpt.aoa.sides import PARAMETER, Side
from paddle_flexckpt.catalog import Catalog

# Statements per source tensor; a grid of more cells is no program that anybody wants to see.
MAX_CELLS = 4096


class NoInverse(ValueError):
    """A source tensor is not wholly in the destination."""


@dataclass(frozen=True)
class _Taken:
    """A box of a source key that is somewhere in a target; columns without padding.

    Attributes:
        target: The target key.
        offset: First element in the source.
        shape: Extents along the source's axes.
        target_offset: First element in the target.
        target_axis: For every axis of the source, the target's that runs along it, or -1.
    """

    target: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    target_offset: tuple[int, ...]
    target_axis: tuple[int, ...]


def inverse_of_boxes(statements: Sequence[str], source: Catalog, target: Catalog) -> list[str]:
    """Statements that make every source parameter from the targets.

    Args:
        statements: The program.
        source: Its source.
        target: Its destination.

    Raises:
        NoInverse: Some elements of a source tensor are in no target, or only rounded.
        AoaError: The statements do not fit.
    """
    mapping = compile_program(list(statements), source, target)
    here, there = Side(source, target.keys), Side(target, source.keys)
    maps = mapping.maps
    taken: dict[str, list[_Taken]] = {}
    for row in range(len(maps)):
        key, name = maps.sources[maps.source[row]], maps.targets[maps.target[row]]
        if PARAMETER not in here.states.get(key, {}) or PARAMETER not in there.states.get(name, {}):
            continue
        before, after = here.infos[key], there.infos[name]
        if not is_exact(before.dtype, after.dtype) or (after.dtype in COMPLEX) != (before.dtype in COMPLEX):
            continue
        first, rank = maps.width - len(before.shape), len(after.shape)
        axes = maps.target_axis[row, first:]
        taken.setdefault(key, []).append(
            _Taken(
                name,
                tuple(maps.source_offset[row, first:].tolist()),
                tuple(maps.source_shape[row, first:].tolist()),
                tuple(maps.target_offset[row, maps.width - rank :].tolist()),
                tuple(np.where(axes >= 0, axes - (maps.width - rank), -1).tolist()),
            )
        )
    cuts: list[str] = []
    joins: list[str] = []
    for key, states in here.states.items():
        if PARAMETER not in states:
            continue
        untouched = key in there.states and key not in mapping.tensors and key not in mapping.unfed
        if not untouched:
            _add_statements(key, taken.get(key, []), here, there, cuts, joins)
    return cuts + joins


def _add_statements(
    key: str, taken: Sequence[_Taken], here: Side, there: Side, cuts: list[str], joins: list[str]
) -> None:
    info = here.infos[key]
    edges = [
        sorted({0, extent, *(edge for box in taken for edge in (box.offset[a], box.offset[a] + box.shape[a]))})
        for a, extent in enumerate(info.shape)
    ]
    counts = [len(edge) - 1 for edge in edges]
    if int(np.prod(counts)) > MAX_CELLS:
        raise NoInverse(f"{key!r} is scattered over more than {MAX_CELLS} boxes")
    names: dict[tuple[int, ...], str] = {}
    for index in itertools.product(*map(range, counts)):
        offset = tuple(edge[i] for edge, i in zip(edges, index))
        shape = tuple(edge[i + 1] - edge[i] for edge, i in zip(edges, index))
        holder = next((box for box in taken if _contains(box, offset, shape)), None)
        if holder is None:
            raise NoInverse(f"no destination key has elements {_text(offset, shape)} of {key!r} exactly")
        names[index] = f"{key}_cell{len(names)}"
        cuts.append(_cut(names[index], holder, offset, shape, info.dtype, there))
    for axis in range(len(counts) - 1, -1, -1):
        rows: dict[tuple[int, ...], list[str]] = {}
        for index, name in names.items():
            rows.setdefault(index[:axis], []).append(name)
        names = {}
        for index, members in rows.items():
            if axis and len(members) == 1:
                names[index] = members[0]
                continue
            names[index] = f"{key}_row{axis}_{len(names)}" if axis else key
            attribute = f", axis={axis}" if len(members) > 1 else ""
            joins.append(f"{', '.join(map(quoted, members))} -> {quoted(names[index])}{attribute}")
    if not counts:
        joins.append(f"{quoted(names[()])} -> {quoted(key)}")


def _contains(box: _Taken, offset: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return all(
        first <= o and o + s <= first + extent for first, extent, o, s in zip(box.offset, box.shape, offset, shape)
    )


def _text(offset: Sequence[int], shape: Sequence[int]) -> str:
    return "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(offset, shape)) + "]"


def _cut(name: str, holder: _Taken, offset: tuple[int, ...], shape: tuple[int, ...], dtype: str, there: Side) -> str:
    """The statement that cuts a cell out of the target that holds it."""
    rank = len(there.infos[holder.target].shape)
    start, extent = list(holder.target_offset), [1] * rank
    for axis, place in enumerate(holder.target_axis):
        if place >= 0:
            start[place] += offset[axis] - holder.offset[axis]
            extent[place] = shape[axis]
    used = [place for place in holder.target_axis if place >= 0]
    order = [*(place for place in range(rank) if place not in used), *used]
    attributes = [f'slice="{_text(start, extent)}"'] if rank else []
    if order != list(range(rank)):
        attributes.append(f'permute="{order}"')
    if tuple(extent[place] for place in order) != shape:
        attributes.append(f'reshape="{list(shape)}"')
    if there.infos[holder.target].dtype != dtype:
        attributes.append(f'dtype="{dtype}"')
    return ", ".join([f"{quoted(holder.target)} -> {quoted(name)}", *attributes])

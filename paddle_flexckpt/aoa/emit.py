"""From the values of a program's names to box maps, each structure once for all targets.

Tested in tests/aoa/test_compile_errors.py and tests/aoa/test_compile_scale.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paddle_flexckpt.algebra.box_maps import NO_AXIS, BoxMaps
from paddle_flexckpt.aoa.casts import COMPLEX, FLOATS, simplify_chain
from paddle_flexckpt.aoa.element_maps import Node, Region, TensorInfo, TensorMapping
from paddle_flexckpt.aoa.operations import Value
from paddle_flexckpt.aoa.program import Program
from paddle_flexckpt.aoa.rule import Origin
from paddle_flexckpt.aoa.sides import NotFed, of_constants
from paddle_flexckpt.aoa.statements import AoaError
from paddle_flexckpt.aoa.steps import Convert, Same
from paddle_flexckpt.aoa.structure import Fragments, Structure, StructureNode
from paddle_flexckpt.aoa.structure_ops import computed, source
from paddle_flexckpt.aoa.structure_values import coalesced
from paddle_flexckpt.catalog import dtype_of
from paddle_flexckpt.optimizer_states import MASTER, PARAMETER, state_key

_HALVES = frozenset({"float16", "bfloat16"})
_ROUNDED_TWICE = frozenset({"bfloat16", "float8_e4m3fn", "float8_e5m2"})


class _Provenance(Mapping[str, str]):
    """Texts by key, each written when it is first asked for."""

    def __init__(self, origins: dict[str, Origin | str]) -> None:
        self._origins = origins

    def __getitem__(self, key: str) -> str:
        return str(self._origins[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._origins)

    def __len__(self) -> int:
        return len(self._origins)


class Compilation:
    """The compilation of a program that was carried out: each target key gets the value of its name."""

    def __init__(self, program: Program, master_weights: str) -> None:
        """Take the program, and the ``master_weights`` of :func:`~paddle_flexckpt.aoa.compile.compile_program`."""
        self._program = program
        self._converts = master_weights == "convert"
        self._emitter = Emitter()
        self._problems: list[str] = []
        self._unfed: dict[str, str] = {}
        self._masters: dict[str, str] = {}
        self._origins: dict[str, Origin | str] = {}

    def run(self) -> TensorMapping:
        """Return where every element of every target comes from.

        Raises:
            AoaError: A value does not have the shape of its target.
        """
        outputs: tuple[str, ...] = ()
        if self._program.target is None:
            outputs = self._derive()
        else:
            for base, states in self._program.target.states.items():
                for state, info in states.items():
                    self._feed(base, state, info)
        if self._problems:
            raise AoaError(self._problems)
        emitter = self._emitter
        removed = {
            state_key(name, state)
            for name in self._program.removed
            for state in self._program.source.states.get(name, ())
        } | {name for name in self._program.removed if name in self._program.source.infos}
        return TensorMapping(
            emitter.maps(),
            emitter.regions,
            tuple(emitter.nodes),
            emitter.tensors,
            frozenset(removed),
            frozenset(self._unfed),
            self._masters,
            outputs,
            _Provenance({**self._origins, **self._unfed}),
            _unread(self._program),
        )

    def _feed(self, base: str, state: str, info: TensorInfo) -> None:
        """Emit one target key if the program assigns or removes it."""
        program, key = self._program, state_key(base, state)
        own = program.state_values.get(state, {}).get(base)
        value = program.values.get(base)
        if own is None and value is None:
            if base in program.removed or key in program.removed:
                self._unfed[key] = "a statement removes the source key of that name"
            return
        origin = program.origins.get(key if own is not None else base)
        try:
            found = own if own is not None else self._state_value(value, base, state, info)  # type: ignore[arg-type]
        except NotFed as error:
            self._unfed[key] = f"{origin}: {error}"
            return
        if found is None:
            return
        if found.structure.shape != info.shape:
            # As torch's linear layers are, and a statement did not say so.
            is_turned = found.structure.shape[::-1] == info.shape and "," not in str(origin)
            way = "leave out ^T" if "^T" in str(origin) else "write ^T after the name on its left"
            turn = f": {way}" if is_turned else ""
            self._problems.append(
                f"{origin} gives {key!r} the shape {list(found.structure.shape)}; expected "
                f"{list(info.shape)}, as in the destination. Remedy (FC603): correct the statement{turn}"
            )
            return
        if origin is not None:
            self._origins[key] = origin
        self._emitter.add(key, found, info.dtype)

    def _state_value(self, value: Value, base: str, state: str, info: TensorInfo) -> Value | None:
        """Return a target state's value from its parameter's; inputs are source keys."""
        program = self._program
        program.check_determined(base, state)
        if not value.inputs:
            return Value(of_constants(value.structure, state, info), ())
        if state == PARAMETER:
            found = program.states.value(value, state)
            if self._converts and info.dtype == "float32" and self._halves_with_masters(value):
                self._masters[base] = state_key(value.inputs[0], MASTER)
                return program.states.value(value, MASTER)
            return found
        if int(np.prod(info.shape)) == 1 and (
            info.shape != value.structure.shape or any(self._is_scalar(name, state) for name in value.inputs)
        ):
            return self._scalar(value, base, state)
        try:
            return program.states.value(value, state)
        except NotFed:
            if state != MASTER or not self._converts:
                raise
        self._masters[state_key(base, state)] = value.inputs[0]
        return program.states.value(value, state, parameters_too=True)

    def _is_scalar(self, base: str, state: str) -> bool:
        """Return whether a source state is one number for its whole parameter."""
        source = self._program.source
        info = source.states[base].get(state)
        return info is not None and int(np.prod(info.shape)) == 1 and info.shape != source.base_info(base).shape

    def _halves_with_masters(self, value: Value) -> bool:
        states = self._program.source.states
        return all(i.dtype in _HALVES for i in value.structure.inputs) and all(
            MASTER in states[base] for base in value.inputs
        )

    def _scalar(self, value: Value, base: str, state: str) -> Value:
        """Return a scalar state, which follows its parameter; those of joined parameters have to be equal."""
        states = self._program.source.states
        keys = [state_key(name, state) for name in dict.fromkeys(value.inputs) if state in states[name]]
        keys = [key for key in keys if key not in self._program.removed]
        if not keys:
            raise NotFed(f"the source has no key {state_key(value.inputs[0], state)!r}")
        infos = {self._program.source.infos[key] for key in keys}
        if len(infos) > 1:
            raise NotFed(f"{keys} differ in shape or dtype: {sorted(map(str, infos))}")
        structure = self._program.source_structure(infos.pop())
        if len(keys) == 1:
            return Value(structure, (keys[0],))
        return Value(computed(Same(tuple(keys)), None, [structure] * len(keys)).structure, tuple(keys))

    def _derive(self) -> tuple[str, ...]:
        """Return the outputs where there is no destination."""
        program, outputs = self._program, []
        names = [name for name in program.values if name not in program.read or self._assigns_itself(name)]
        names += [n for n in program.source.states if n not in program.values and n not in program.read]
        for name in names:
            if name in program.removed:
                continue
            value = program.values.get(name)
            if value is None:
                for state, info in program.source.states[name].items():
                    key = state_key(name, state)
                    if key not in program.removed:
                        self._emitter.add(key, Value(program.source_structure(info), (key,)), info.dtype)
                        outputs.append(key)
                continue
            outputs += self._derive_states(name, value)
        for state, table in program.state_values.items():
            for name, value in table.items():
                key = state_key(name, state)
                if key not in outputs:
                    self._emitter.add(key, value, value.structure.dtype)
                    self._origins[key] = program.origins[key]
                    outputs.append(key)
        return tuple(sorted(outputs))

    def _assigns_itself(self, name: str) -> bool:
        """Return whether a statement assigns a name its own source tensor, unchanged.

        ``a -> a`` means that a stays an output, whatever else is made of it.
        """
        value, source = self._program.values[name], self._program.source
        return name in source.states and value == Value(self._program.source_structure(source.base_info(name)), (name,))

    def _derive_states(self, name: str, value: Value) -> list[str]:
        program, outputs = self._program, []
        states: dict[str, None] = {}
        for base in value.inputs:
            states.update(dict.fromkeys(program.source.states[base]))
        for state in states:
            key = state_key(name, state)
            if name in program.state_values.get(state, {}):
                continue
            scalar = all(self._is_scalar(base, state) for base in value.inputs if state in program.source.states[base])
            try:
                program.check_determined(name, state)
                found = self._scalar(value, name, state) if scalar else program.states.value(value, state)
            except NotFed as error:
                self._unfed[key] = f"{program.origins[name]}: {error}"
                continue
            self._emitter.add(key, found, found.structure.dtype)
            self._origins[key] = program.origins[name]
            outputs.append(key)
        return outputs


@dataclass(frozen=True, eq=False)
class _Lowered:
    """A structure as rows of box maps (leaf is the input slot), and its regions that are not moved."""

    moves: Fragments
    ndim: int
    leaf_ndim: int
    others: Fragments
    nodes: tuple[StructureNode, ...]


class Emitter:
    """A collector of targets that makes the columns of their box maps."""

    def __init__(self) -> None:
        self.tensors: dict[str, TensorInfo] = {}
        self.regions: dict[str, tuple[Region, ...]] = {}
        self.nodes: list[Node] = []
        self._lowered: dict[tuple[Structure, str], _Lowered] = {}
        self._groups: dict[_Lowered, list[tuple[int, tuple[str, ...]]]] = {}
        self._targets: list[str] = []

    def add(self, name: str, value: Value, dtype: str) -> None:
        """Add a target."""
        structure = value.structure
        self.tensors[name] = structure.info
        lowered = self._lowered.get((structure, dtype))
        if lowered is None:
            lowered = self._lowered[structure, dtype] = _lower(structure, dtype)
        self._targets.append(name)
        self._groups.setdefault(lowered, []).append((len(self._targets) - 1, value.inputs))
        if len(lowered.others):
            self._add_regions(name, lowered, value.inputs)

    def _add_regions(self, name: str, lowered: _Lowered, keys: tuple[str, ...]) -> None:
        numbers: dict[int, int | None] = {}
        regions = []
        others = lowered.others
        for row in range(len(others)):
            place = -1 - int(others.leaf[row])
            node = lowered.nodes[place]
            if place not in numbers:
                numbers[place] = None if node.step is None else self._add_node(name, node, keys)
            rank = len(node.info.shape)
            first = others.width - rank
            regions.append(
                Region(
                    tuple(others.offset[row].tolist()),
                    tuple(others.extent[row].tolist()),
                    numbers[place],
                    tuple(others.leaf_offset[row, first:].tolist()) if node.step is not None else (),
                    tuple(others.value_axis[row, first:].tolist()) if node.step is not None else (),
                )
            )
        self.regions[name] = tuple(regions)

    def _add_node(self, name: str, node: StructureNode, keys: tuple[str, ...]) -> int:
        operands = []
        for operand in node.operands:
            operands.append(f"{name} <operand {len(self._targets)}>")
            self.add(operands[-1], Value(operand, keys), operand.dtype)
        if node.step is None:
            raise ValueError("a node that keeps what the target has cannot be computed")
        self.nodes.append(Node(node.step, node.info, tuple(operands)))
        return len(self.nodes) - 1

    def maps(self) -> BoxMaps:
        """Return the box maps of all targets added so far."""
        width = max([1, *(max(low.ndim, low.leaf_ndim) for low in self._groups)])
        sources: dict[str, int] = {}
        columns: list[tuple[np.ndarray, ...]] = []
        for lowered, members in self._groups.items():
            moves, count = lowered.moves, len(members)
            if not len(moves):
                continue
            slots = np.asarray(
                [[sources.setdefault(key, len(sources)) for key in keys] for _, keys in members], dtype=np.int64
            ).reshape(count, -1)
            extra = width - lowered.ndim
            axes = np.where(moves.value_axis >= 0, moves.value_axis + extra, NO_AXIS)
            tiled = (
                _padded(moves.offset, width, 0),
                _padded(moves.extent, width, 1),
                _padded(moves.leaf_offset, width, 0),
                _padded(axes, width, NO_AXIS),
            )
            columns.append(
                (
                    np.repeat(np.asarray([number for number, _ in members], dtype=np.int64), len(moves)),
                    slots[:, moves.leaf].reshape(-1),
                    *(np.tile(column, (count, 1)) for column in tiled),
                )
            )
        if not columns:
            none, table = np.zeros(0, dtype=np.int64), np.zeros((0, width), dtype=np.int64)
            return BoxMaps(tuple(self._targets), (), none, none, table, table, table, table)
        target, source_number, offset, shape, origin, axes = (np.concatenate(parts) for parts in zip(*columns))
        order = np.argsort(target, kind="stable")
        return BoxMaps(
            tuple(self._targets),
            tuple(sources),
            target[order],
            source_number[order],
            offset[order],
            shape[order],
            origin[order],
            axes[order],
        )


def _padded(column: np.ndarray, width: int, fill: int) -> np.ndarray:
    return np.pad(column, ((0, 0), (width - column.shape[1], 0)), constant_values=fill)


def _lower(structure: Structure, dtype: str) -> _Lowered:
    """Return a structure as moves, each with at most one cast that numpy makes, and nodes for all other elements."""
    fragments = structure.fragments
    for axis in range(len(structure.shape) - 1, -1, -1):
        if len(fragments) > 1:
            fragments = coalesced(fragments, axis)
    leaf = fragments.leaf.copy()
    nodes = list(structure.nodes)
    for old, number in sorted({*zip(fragments.leaf.tolist(), fragments.chain.tolist())}):
        if old < 0 and nodes[-1 - old].step is None:
            continue
        held = structure.leaf_info(old)
        chain = simplify_chain(held.dtype, (*structure.chains[number], dtype))
        if len(chain) < 2 and _is_plain((held.dtype, *chain)[0], (held.dtype, *chain)[-1]):
            continue
        operand = _leaf_alone(structure, old)
        nodes.append(StructureNode(Convert(chain), TensorInfo(held.shape, chain[-1]), (operand,)))
        # The node is the last one: its leaf number is -1 - (len(nodes) - 1).
        leaf[(fragments.leaf == old) & (fragments.chain == number)] = -len(nodes)
    fragments = replace(fragments, leaf=leaf)
    moved = leaf >= 0
    return _Lowered(fragments.take(moved), len(structure.shape), fragments.width, fragments.take(~moved), tuple(nodes))


def _is_plain(before: str, after: str) -> bool:
    """Return whether numpy's assignment is the cast of :func:`~paddle_flexckpt.aoa.casts.converted`."""
    if before == after:
        return True
    if before in COMPLEX or after in COMPLEX or after == "bool":
        return False
    if before in FLOATS:
        return after in FLOATS and not (before == "float64" and after in _ROUNDED_TWICE)
    return after not in FLOATS or (after not in _ROUNDED_TWICE and dtype_of(before).itemsize < 4)


def _leaf_alone(structure: Structure, leaf: int) -> Structure:
    """Return the whole of a leaf as a structure over the same inputs."""
    info = structure.leaf_info(leaf)
    alone = source(info).structure
    shown = replace(alone.fragments, leaf=np.full(1, leaf if leaf >= 0 else -1, dtype=np.int64))
    nodes: Sequence[StructureNode] = () if leaf >= 0 else (structure.nodes[-1 - leaf],)
    return Structure(info.shape, info.dtype, structure.inputs, shown, alone.chains, tuple(nodes))


def _unread(program: Program) -> dict[str, str]:
    """Return a name of each statement whose names no destination has and no later statement reads; with its text.

    The statements of a model's whole family are often used for a part of it, so one name that is used is enough.
    """
    if program.target is None:
        return {}
    found: dict[int, tuple[str, Origin]] = {}
    used: set[int] = set()
    tables: list[tuple[str | None, dict[str, Value]]] = [(None, program.values), *program.state_values.items()]
    for state, table in tables:
        for name in table:
            key = name if state is None else state_key(name, state)
            origin = program.origins.get(key)
            if origin is not None:
                number = origin.rule.place.number
                found.setdefault(number, (key, origin))
                if name in program.read or name in program.target.states or key in program.target.infos:
                    used.add(number)
    return {key: str(origin) for number, (key, origin) in sorted(found.items()) if number not in used}

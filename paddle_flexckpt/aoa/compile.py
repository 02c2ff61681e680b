"""compile_program: from a configuration and two catalogs to a mapping. Tested in tests/aoa/test_compile_errors.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from paddle_flexckpt.aoa.config import AoaConfig, Statements, read_config
from paddle_flexckpt.aoa.element_maps import TensorInfo, TensorMapping
from paddle_flexckpt.aoa.emit import Emitter
from paddle_flexckpt.aoa.invert import inverse_texts, overwritten_names
from paddle_flexckpt.aoa.operations import Value
from paddle_flexckpt.aoa.parser import Statement, parse_program
from paddle_flexckpt.aoa.program import Program
from paddle_flexckpt.aoa.reverse import Reversal
from paddle_flexckpt.aoa.rule import Origin
from paddle_flexckpt.aoa.sides import NotFed, Side, of_constants
from paddle_flexckpt.aoa.statement_errors import AoaError
from paddle_flexckpt.aoa.states import PARAMETER, state_key
from paddle_flexckpt.aoa.steps import Same
from paddle_flexckpt.aoa.structure_ops import computed
from paddle_flexckpt.aoa.wrappers import go_inside
from paddle_flexckpt.catalog import Catalog
from paddle_flexckpt.catalog.collector import without_collector
from paddle_flexckpt.optimizer_states import MASTER

_HALVES = frozenset({"float16", "bfloat16"})


def compile_program(
    aoa_config: AoaConfig | Statements,
    source: Catalog,
    target: Catalog | None,
    *,
    master_weights: Literal["exact", "convert"] = "exact",
    completion: Sequence[str] = (),
) -> TensorMapping:
    """Compile AOA statements for a source and a destination.

    Args:
        aoa_config: The statements; see ``docs/aoa.md``.
        source: All source shards.
        target: All target shards, of all ranks; None derives the outputs: what the statements assign and do not use
            up, and the source keys that they do not mention.
        master_weights: With ``"convert"``, a master weight that the source lacks starts from its parameter, and a
            float32 parameter comes from the master weight of a half-precision source.
        completion: Statements that follow those of the configuration, and are never inverted.

    Returns:
        Where every element of every target comes from.

    Raises:
        AoaError: The statements are malformed or do not fit the tensors; all problems are listed.
    """
    with without_collector():
        inside = go_inside(read_config(aoa_config), completion, source, target)
        if inside is None:
            return _Compilation(run_program(aoa_config, source, target, completion), master_weights).run()
        program = run_program(inside.config, inside.source, inside.target, inside.completion)
        return inside.outside(_Compilation(program, master_weights).run())


def run_program(
    aoa_config: AoaConfig | Statements,
    source: Catalog,
    target: Catalog | None,
    completion: Sequence[str] = (),
    traced: bool = False,
) -> Program:
    """Carry out the statements on names and shapes.

    Args:
        aoa_config: The statements.
        source: All source shards.
        target: All target shards, or None.
        completion: Statements that follow, as in :func:`compile_program`.
        traced: Whether :attr:`Program.trace` is kept.

    Raises:
        AoaError: They are malformed or do not fit the tensors.
    """
    config = read_config(aoa_config)
    statements = parse_program(config.statements)
    following = parse_program(completion, len(config.statements) + 1)
    here = Side(source, set() if target is None else target.keys)
    there = None if target is None else Side(target, source.keys)
    program = Program(here, there, config.is_lenient)
    if traced:
        program.trace = {}
    lost: list[str] = []
    if config.reverse:
        forward = None if there is None else _carried_out(statements, Program(there, here, config.is_lenient))
        if forward is not None:
            Reversal(forward, program).run()
            statements = []
        else:
            lost = overwritten_names(statements)
            statements = parse_program(inverse_texts(statements, exact=False))
    program.run([*statements, *following])
    program.forget(lost)
    return program


def _carried_out(statements: Sequence[Statement], program: Program) -> Program | None:
    """Return the program after its statements; None where tensors that they read are missing.

    A reverse load may want only a part of these tensors. Then the inverse is made from the statements alone, and
    anything that they leave open is an error.
    """
    try:
        program.run(statements)
    except AoaError:
        return None
    return program


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


class _Compilation:
    def __init__(self, program: Program, master_weights: str) -> None:
        self._program = program
        self._converts = master_weights == "convert"
        self._emitter = Emitter()
        self._problems: list[str] = []
        self._unfed: dict[str, str] = {}
        self._masters: dict[str, str] = {}
        self._origins: dict[str, Origin | str] = {}

    def run(self) -> TensorMapping:
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
            self._problems.append(
                f"{origin} gives {key!r} the shape {list(found.structure.shape)}; expected "
                f"{list(info.shape)}, as in the destination. Remedy: correct the statement"
            )
            return
        if origin is not None:
            self._origins[key] = origin
        self._emitter.add(key, found, info.dtype)

    def _state_value(self, value: Value, base: str, state: str, info: TensorInfo) -> Value | None:
        """Return a target state's value from its parameter's; inputs are source keys."""
        program = self._program
        program.check_follows(base, state)
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
        names = [name for name in program.values if name not in program.read or self._is_source_s_own(name)]
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

    def _is_source_s_own(self, name: str) -> bool:
        """Return whether a statement assigns a name its own source key, unchanged.

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
                program.check_follows(name, state)
                found = self._scalar(value, name, state) if scalar else program.states.value(value, state)
            except NotFed as error:
                self._unfed[key] = f"{program.origins[name]}: {error}"
                continue
            self._emitter.add(key, found, found.structure.dtype)
            self._origins[key] = program.origins[name]
            outputs.append(key)
        return outputs

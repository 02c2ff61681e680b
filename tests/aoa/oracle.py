"""What an AOA program means, on whole numpy arrays: written from docs/aoa.md alone, and from nothing of the compiler.

It accepts what :mod:`tests.aoa.programs` makes and trusts it: a wrong program raises :class:`OracleError` or any error
of numpy's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.aoa.oracle_steps import (
    MASTER,
    Skipped,
    Tensor,
    dequantized_fp8,
    dequantized_mxfp4,
    join_fused,
    lora_merged,
    split_fused,
    summed,
    treat,
)
from tests.aoa.oracle_text import (
    DOLLAR,
    NOTHING,
    TAGS,
    OracleError,
    Statement,
    combinations,
    parse,
    starred,
    substitute,
    unrolled,
)

SCALAR_STATES = ("beta1_pow_acc_0", "beta2_pow_acc_0")
STATES = ("moment1_0", "moment2_0", "velocity_0", "w_0", *SCALAR_STATES)

# What turns left variables into right ones.
TURNS = {*TAGS - {"optional"}, "axis", "sizes", "dequant"}


@dataclass(frozen=True, eq=False)
class Source:
    """A source key: its whole array, and into how many tensor-parallel parts it is cut."""

    array: np.ndarray
    parts: int = 1


@dataclass(frozen=True)
class Target:
    """A destination key: shape, dtype by name, number of tensor-parallel parts."""

    shape: tuple[int, ...]
    dtype: str
    parts: int = 1


@dataclass(frozen=True)
class Operation:
    """A statement about certain names, none of them a pattern.

    Attributes:
        left: Names.
        transposed: For every left name whether it has ``^T``.
        right: Names.
        statement: Its attributes.
        left_parts: Tensor-parallel parts of every left name that is a source key; 1 for others.
        right_parts: Likewise of the right names that are destination keys.
    """

    left: tuple[str, ...]
    transposed: tuple[bool, ...]
    right: tuple[str, ...]
    statement: Statement
    left_parts: tuple[int, ...]
    right_parts: tuple[int, ...]


class Oracle:
    """Runs statements on whole arrays."""

    def __init__(self, source: Mapping[str, Source], destination: Mapping[str, Target]) -> None:
        """Args: source, destination: by key. The destination may grow while statements are run."""
        self.source, self.destination = source, destination
        self.variables: dict[str, Tensor | None] = {key: Tensor(each.array) for key, each in source.items()}
        self.assigned: set[str] = set()
        self.removed: set[str] = set()
        self.operations: list[Operation] = []

    # Statements to operations.

    def run(self, text: str) -> list[Operation]:
        """Runs the statements of a text in the world of parameters; they are kept for the worlds of states."""
        done = []
        for statement in parse(text):
            for operation in self.expand(statement):
                if self.of_world(operation, "model"):
                    self.carry_out(operation, "model", self.variables, self.assigned)
                self.operations.append(operation)
                done.append(operation)
        return done

    def expand(self, statement: Statement) -> list[Operation]:
        optional = bool(statement.get("optional"))
        left = [name for each in statement.left for name in unrolled(each)]
        right = [name for each in statement.right for name in unrolled(each)]
        patterns = [[each.pattern for each in side] for side in (left, right)]
        combos = combinations(*patterns, list(self.variables), list(self.destination))
        operations = []
        for ids in combos:
            names, flags = [], []
            for each in left:
                for name in starred(substitute(each.pattern, ids, on_right=False), self.variables):
                    names.append(name.replace(DOLLAR, "$"))
                    flags.append(each.transposed)
            rights = [
                name.replace(DOLLAR, "$")
                for each in right
                for name in starred(substitute(each.pattern, ids, on_right=True), self.destination)
            ]
            if not names or any(name not in self.variables for name in names if name != NOTHING):
                if optional:
                    continue
                raise OracleError(f"{names or patterns[0]}: no such name")
            operations.append(
                Operation(
                    tuple(names),
                    tuple(flags),
                    tuple(rights),
                    statement,
                    tuple(
                        self.source[name].parts if name in self.source and name not in self.assigned else 1
                        for name in names
                    ),
                    tuple(self.destination[name].parts if name in self.destination else 1 for name in rights),
                )
            )
        if not operations and not optional:
            raise OracleError(f"{patterns}: nothing matches")
        return operations

    # Operations to values.

    @staticmethod
    def of_world(operation: Operation, world: str) -> bool:
        """Whether an operation has a say about the parameters ("model") or about a state."""
        states = operation.statement.get("states")
        if states is not None:
            return world in [each.strip() for each in states.split(",")]
        return world == "model" or not any(state_of(name) for name in (*operation.left, *operation.right))

    def carry_out(self, operation: Operation, world: str, variables: dict, assigned: set[str]) -> None:
        """Runs one operation: reads all left names, then assigns the right ones."""
        if operation.right == (NOTHING,):
            self.removed.update(operation.left)
            return
        try:
            values = self.values(operation, world, variables)
        except Skipped:
            values = [None] * len(operation.right)
        for name, value in zip(operation.right, values):
            variables[name] = value
            assigned.add(name)

    def values(self, operation: Operation, world: str, variables: dict) -> list[Tensor | None]:
        statement = operation.statement
        if operation.left == (NOTHING,):
            return [self.out_of_nothing(name, statement.get("fill"), world) for name in operation.right]
        left = [variables.get(name) for name in operation.left]
        if any(value is None for value in left):
            raise Skipped  # a state that this parameter does not have
        if world in SCALAR_STATES:
            if len({value.array.tobytes() for value in left}) != 1:
                raise OracleError(f"scalars differ: {operation.left}")
            return [left[0]] * len(operation.right)
        left = [value.moved(np.transpose) if flag else value for value, flag in zip(left, operation.transposed)]

        attributes, singles = list(statement.attributes), len(left) == len(operation.right) == 1
        keys = [key for key, _ in attributes]
        turns = TURNS - {"axis"} if singles else TURNS
        turn = next((i for i, key in enumerate(keys) if key in turns), None)
        if turn is None:
            if len(left) != len(operation.right):
                raise OracleError(f"{operation.left} -> {operation.right}: by what?")
            before, after, middle = attributes, [], left
        else:
            before, after = attributes[:turn], attributes[turn:]
        if "lora_merge" in keys:
            before, after = ([(k, v) for k, v in each if k != "scale"] for each in (before, after))
        # fill belongs to pad and resize wherever it stands, and so do axis and block to repeat.
        extra = [(k, v) for k, v in attributes if k in ("fill", "axis", "block")]
        shapes = [self.destination[name].shape if name in self.destination else None for name in operation.right]
        if turn is None:
            return [treat(value, attributes, shape, world) for value, shape in zip(left, shapes)]
        middle = [treat(value, [*extra, *before], None, world) for value in left]
        made = self.turned(operation, dict(attributes), middle, world)
        if len(made) != len(operation.right):
            raise OracleError(f"{operation}: {len(made)} values for {len(operation.right)} names")
        return [treat(value, [*extra, *after], shape, world) for value, shape in zip(made, shapes)]

    def out_of_nothing(self, name: str, fill: Any, world: str) -> Tensor | None:
        target = self.destination.get(name if world == "model" else f"{name}.{world}")
        if target is None:
            return None
        if fill is None:
            return Tensor(np.zeros(target.shape, np.dtype(target.dtype)), np.ones(target.shape, dtype=bool))
        return Tensor(np.full(target.shape, np.asarray(fill).astype(np.dtype(target.dtype))))

    def turned(self, operation: Operation, values: dict, left: list[Tensor], world: str) -> list[Tensor]:
        """Left variables turned into right ones."""
        count = len(operation.right)
        arrays = [value.array for value in left]

        def all_moved(move: Callable[[list[np.ndarray]], list[np.ndarray]]) -> list[Tensor]:
            if all(value.keep is None for value in left):
                return [Tensor(array) for array in move(arrays)]
            keeps = [np.zeros(v.array.shape, dtype=bool) if v.keep is None else v.keep for v in left]
            return [Tensor(array, keep) for array, keep in zip(move(arrays), move(keeps))]

        steps = {"sum", "average", "lora_merge", "dequant"} & set(values)
        if steps:
            if world not in ("model", MASTER):
                raise Skipped
            if any(value.keep is not None for value in left):
                raise OracleError("an operand that is kept")
            return [Tensor(self.computed(steps.pop(), values, arrays))]
        if "copy" in values:
            return left * count
        fused = next((key for key in values if key.startswith("fused_")), None)
        if fused:
            axis = values.get("axis", 1)
            weights = [1, 1]
            from_parts, to_parts = operation.left_parts[0], operation.right_parts[0]
            if fused != "fused_ffn":
                weights = [values["num_heads"], values["num_key_value_groups"], values["num_key_value_groups"]]
            if fused == "fused_qkv":
                from_parts = to_parts = weights[1]

            def move(each: list[np.ndarray]) -> list[np.ndarray]:
                components = split_fused(each[0], axis, from_parts, weights) if len(each) == 1 else each
                return [join_fused(components, axis, to_parts)] if count == 1 else components

            return all_moved(move)
        axis = values["axis"]
        if "stack" in values:
            return all_moved(lambda each: [np.stack(each, axis)])
        if "unstack" in values:
            return all_moved(lambda each: list(np.moveaxis(each[0], axis, 0)))
        if count == 1:
            if len({(a.dtype, *np.delete(a.shape, axis)) for a in arrays}) != 1:
                raise OracleError(f"{operation.left} cannot be joined")
            return all_moved(lambda each: [np.concatenate(each, axis)])
        if len(left) != 1:
            raise OracleError(f"{operation.left} -> {operation.right} along an axis")
        sizes = values.get("sizes")
        if sizes == "auto":
            sizes = [self.destination[name].shape[axis] for name in operation.right]
        elif sizes is not None:
            sizes = json.loads(sizes)
            sizes = [arrays[0].shape[axis] - sum(sizes) - 1 if size == -1 else size for size in sizes]
        if sizes is None:
            return all_moved(lambda each: np.split(each[0], count, axis))
        if sum(sizes) != arrays[0].shape[axis]:
            raise OracleError(f"sizes {sizes} of {arrays[0].shape}")
        return all_moved(lambda each: np.split(each[0], np.cumsum(sizes)[:-1], axis))

    @staticmethod
    def computed(step: str, values: dict, arrays: list[np.ndarray]) -> np.ndarray:
        if step == "sum":
            return summed(arrays, json.loads(values["weights"]) if "weights" in values else None)
        if step == "average":
            return summed(arrays, None, len(arrays))
        if step == "lora_merge":
            return lora_merged(*arrays, values.get("scale", 1.0))
        if values["dequant"] == "fp8":
            return dequantized_fp8(*arrays, json.loads(values["block"]))
        return dequantized_mxfp4(*arrays)

    # Results.

    def world(self, state: str) -> tuple[dict[str, Tensor | None], set[str]]:
        """Every variable's state, and the names that were assigned."""
        suffix = f".{state}"
        variables: dict[str, Tensor | None] = {
            key[: -len(suffix)]: Tensor(each.array) for key, each in self.source.items() if key.endswith(suffix)
        }
        assigned: set[str] = set()
        explicit: dict[str, Tensor | None] = {}
        for operation in self.operations:
            if self.of_world(operation, state):
                self.carry_out(operation, state, variables, assigned)
                if operation.statement.get("states") is not None:
                    explicit.update({name: variables[name] for name in operation.right if name != NOTHING})
                # What a statement says about this state alone goes before what follows from its parameter.
                variables.update(explicit)
        return variables, assigned

    def states(self, state: str) -> dict[str, Tensor]:
        """The states that follow from the statements, by name of parameter."""
        variables, assigned = self.world(state)
        return {name: value for name, value in variables.items() if name in assigned and value is not None}

    def results(self) -> dict[str, Tensor]:
        """The whole array of every destination key."""
        worlds: dict[str, tuple[dict[str, Tensor | None], set[str]]] = {}
        found = {}
        for key in self.destination:
            state = state_of(key)
            value: Tensor | None = None
            if key in self.assigned:
                value = self.variables[key]
            elif state is not None and state not in worlds:
                worlds[state] = self.world(state)
            if key not in self.assigned:
                parameter = key[: -len(state) - 1] if state else key
                if state and parameter in worlds[state][1]:
                    value = worlds[state][0][parameter]
                elif key in self.source and parameter not in self.removed and key not in self.removed:
                    value = Tensor(self.source[key].array)
            if value is None:
                raise OracleError(f"nothing feeds {key}")
            target = self.destination[key]
            if (value.array.shape, value.array.dtype) != (target.shape, np.dtype(target.dtype)):
                raise OracleError(f"{key} is {value.array.dtype}{value.array.shape}, not {target}")
            found[key] = value
        return found


def state_of(name: str) -> str | None:
    """The kind of state that a name stands for, if it is one."""
    parameter, _, last = name.rpartition(".")
    return last if parameter and last in STATES else None


def run_program(
    texts: Sequence[str], source: Mapping[str, Source], destination: Mapping[str, Target]
) -> dict[str, Tensor]:
    """What a program makes of whole arrays.

    Args:
        texts: Texts of statements.
        source: Source keys.
        destination: Destination keys.

    Returns:
        The whole value of every destination key.

    Raises:
        OracleError: The program is not a valid one, as far as the oracle can tell.
    """
    oracle = Oracle(source, destination)
    for text in texts:
        oracle.run(text)
    return oracle.results()

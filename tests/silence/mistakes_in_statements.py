"""Mistakes in AOA statements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from paddle_flexckpt.sharded_weight import ShardedWeight
from tests.silence.judge import Case
from tests.silence.mistakes import mistake
from tests.silence.models import (
    State,
    build,
    random_strategy,
    sentinel,
)


def _statement_key(case: Case) -> str | None:
    """A plain parameter of two axes that some rank asks for, without states in the way."""
    keys = [p.key for p in case.model.parameters if len(p.shape) == 2 and not p.statement]
    return case.pick.choice(keys) if keys and case.way != "merged" else None


def _stated(case: Case, texts: list[str]) -> None:
    for each in case.load:
        each["aoa_config"] = {"aoa_statements": texts}
        each["strict"] = False if each.get("strict") is False else "missing"


def _only(case: Case, key: str, shape: tuple[int, ...], target: str | None = None) -> str:
    """Every rank asks for one whole tensor."""
    dtype = case.model.tensors()[key][2]
    name = target or key
    for rank in range(len(case.target.states)):
        case.target.states[rank] = {name: ShardedWeight(name, sentinel(shape, dtype), shape, shape, (0,) * len(shape))}
    return name


def _aoa(name: str, explain: Callable[[Case, str, tuple[int, int]], str | None]) -> None:
    @mistake(f"AOA: {name}")
    def _(case: Case) -> str | None:
        # Without an optimizer on both sides: nothing is left unasked.
        if case.model.optimizer:
            case.model = replace(case.model, optimizer=False)
            strategy = random_strategy(case.pick, len(case.source.states))
            case.source = build(case.model, strategy, "now")
            empty: list[State] = [{} for _ in range(len(case.save) - len(case.source.states))]
            case.source.states += empty
        key = _statement_key(case)
        return None if key is None else explain(case, key, case.model.tensors()[key][1])  # type: ignore[arg-type]


def _typo(case: Case, key: str, shape: tuple[int, int]) -> str:
    _only(case, key, shape[::-1])
    _stated(case, [f"{key}x^T -> {key}"])
    return "error"


def _typo_in_target(case: Case, key: str, shape: tuple[int, int]) -> str:
    name = _only(case, key, shape, f"{key}.new")
    _stated(case, [f"{key} -> {name}x"])
    return "error"


def _transpose(case: Case, key: str, shape: tuple[int, int]) -> str:
    case.made[_only(case, key, shape[::-1])] = lambda painted: painted[key].whole.T
    _stated(case, [f"{key}^T -> {key}"])
    return "equal"


def _transpose_forgotten(case: Case, key: str, shape: tuple[int, int]) -> str:
    case.made[_only(case, key, shape[::-1], "renamed")] = lambda painted: painted[key].whole
    _stated(case, [f"{key} -> renamed"])
    return "equal" if shape[0] == shape[1] else "error"


def _backwards(case: Case, key: str, shape: tuple[int, int]) -> str:
    _only(case, key, shape, "renamed")
    _stated(case, [f"renamed -> {key}"])
    return "error"


def _cut(case: Case, key: str, shape: tuple[int, int], axis: int, order: str) -> str | None:
    if shape[0] < 2 or shape[1] < 2:
        return None
    dtype, first = case.model.tensors()[key][2], shape[0] // 2
    parts = {"one": (first, shape[1]), "two": (shape[0] - first, shape[1])}
    for rank in range(len(case.target.states)):
        case.target.states[rank] = {n: ShardedWeight(n, sentinel(s, dtype), s, s, (0, 0)) for n, s in parts.items()}
    extents = (first, shape[0] - first)
    _stated(case, [f'{key} -> {order}, axis={axis}, sizes="[{extents[0]}, {extents[1]}]"'])
    names = order.split(", ")
    if axis == 0:
        case.made[names[0]] = lambda painted: painted[key].whole[:first]
        case.made[names[1]] = lambda painted: painted[key].whole[first:]
    same = names == ["one", "two"] or extents[0] == extents[1]
    return "error" if axis or not same else "equal"


def _joined(case: Case, key: str, shape: tuple[int, int]) -> str:
    double = (2 * shape[0], shape[1])
    case.made[_only(case, key, double, "both")] = lambda painted: np.concatenate([painted[key].whole] * 2)
    _stated(case, [f"{key}, {key} -> both, axis=0"])
    return "equal"


def _made_twice(case: Case, key: str, shape: tuple[int, int]) -> str:
    """The later statement counts in Paddle's language; nothing else may come out."""
    case.made[_only(case, key, shape, "renamed")] = lambda painted: painted[key].whole
    _stated(case, [f"{key} -> renamed", f"{key} -> renamed"])
    return "either"


def _no_language(case: Case, key: str, shape: tuple[int, int]) -> str:
    _only(case, key, shape)
    _stated(case, [case.pick.choice((f"{key} => {key}", f"{key} -> ", "-> x", f"{key} -> {key}, axis", f"{key}",
                                     f"{key} -> {key}, dtype=float33", f"{key} -> {key}, unknown=1"))])  # fmt: skip
    return "error"


_aoa("right", _transpose)
_aoa("a source that is not there", _typo)
_aoa("a target that is not there", _typo_in_target)
_aoa("a transpose forgotten", _transpose_forgotten)
_aoa("source and target swapped", _backwards)
_aoa("a cut", lambda case, key, shape: _cut(case, key, shape, 0, "one, two"))
_aoa("a cut in the wrong order", lambda case, key, shape: _cut(case, key, shape, 0, "two, one"))
_aoa("a cut along the wrong axis", lambda case, key, shape: _cut(case, key, shape, 1, "one, two"))
_aoa("a source joined to itself", _joined)
_aoa("a target made twice", _made_twice)
_aoa("no statement", _no_language)

"""Callers' mistakes, each with what may come of it.

A mistake changes a :class:`~tests.silence.judge.Case` and returns "equal" (the mistake is none in the end: every target
has to be bit-equal to what the oracle says), "error" (it has to be noticed), "either", or None where the case has
nothing to make it with. What a mistake makes of the *source* needs no verdict: where the shards that ranks really pass
are no whole tensors, or replicas differ, the oracle sees that, and then the save or reshard has to fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Optional

import numpy as np

from paddle_flexckpt.runtime.loader import load_state_dict
from paddle_flexckpt.runtime.resharder import reshard_sharded_state_dict
from paddle_flexckpt.runtime.saver import save_state_dict
from paddle_flexckpt.sharded_weight import ShardedWeight
from paddle_flexckpt.testing.simulated import SimulatedWorld
from tests.silence.judge import Case
from tests.silence.models import (
    HALF,
    MASTER,
    SINGLE,
    Model,
    Side,
    State,
    build,
    random_model,
    random_strategy,
    sentinel,
)

Mistake = Callable[[Case], Optional[str]]
MISTAKES: dict[str, Mistake] = {}


def mistake(name: str) -> Callable[[Mistake], Mistake]:
    def register(function: Mistake) -> Mistake:
        MISTAKES[name] = function
        return function

    return register


def some_key(case: Case, state: State) -> str | None:
    keys = sorted(state)
    return case.pick.choice(keys) if keys else None


def some_rank(case: Case, states: list[State]) -> int:
    return case.pick.integer(0, len(states) - 1)


def another(case: Case, states: list[State]) -> tuple[int, int] | None:
    """Two different ranks."""
    if len(states) < 2:
        return None
    first = some_rank(case, states)
    return first, (first + case.pick.integer(1, len(states) - 1)) % len(states)


def copied(weight: ShardedWeight, **changes: Any) -> ShardedWeight:
    """A shard with other attributes."""
    values = {name: getattr(weight, name) for name in
              ("key", "local_tensor", "local_shape", "global_shape", "global_offset", "is_flattened", "flattened_range",
               "aliases", "fused")}  # fmt: skip
    return ShardedWeight(**{**values, **changes})


# -- sources: what ranks pass is painted, and decides ----------------------------------------------------------------


@mistake("a rank passes another rank's shards")
def _other_shards(case: Case) -> str | None:
    pair = another(case, case.source.states)
    if pair is None:
        return None
    case.source.states[pair[0]] = dict(case.source.states[pair[1]])
    return "either"


@mistake("a rank passes another rank's values")
def _other_values(case: Case) -> str | None:
    pair = another(case, case.source.states)
    if pair is None:
        return None
    mine, theirs = (case.source.states[rank] for rank in pair)
    for key, weight in mine.items():
        if key in theirs and theirs[key].local_tensor.shape == weight.local_tensor.shape:
            mine[key] = copied(weight, local_tensor=theirs[key].local_tensor.copy())
    return "either"


@mistake("a rank leaves a tensor out")
def _left_out(case: Case) -> str | None:
    state = case.source.states[some_rank(case, case.source.states)]
    key = some_key(case, state)
    if key is None:
        return None
    del state[key]
    if not any(key in other for other in case.source.states):
        return _gone(case, key)
    return "either"


def _gone(case: Case, *keys: str) -> str:
    """Keys that nobody saves any more: their targets are missing, unless a tied name or a parameter serves."""
    asked = any(key in state for key in keys for state in case.target.states)
    return "either" if case.way == "merged" or not asked else "error"


@mistake("a rank names a tensor otherwise")
def _other_name(case: Case) -> str | None:
    state = case.source.states[some_rank(case, case.source.states)]
    key = some_key(case, state)
    if key is None:
        return None
    state[f"{key}_"] = copied(state.pop(key), key=f"{key}_")
    return "either"


@mistake("a rank is in the wrong place")
def _other_offset(case: Case) -> str | None:
    state = case.source.states[some_rank(case, case.source.states)]
    keys = [key for key, weight in state.items() if any(g > 1 for g in weight.global_shape)]
    if not keys:
        return None
    key = case.pick.choice(sorted(keys))
    offset = list(state[key].global_offset)
    axis = case.pick.integer(0, len(offset) - 1)
    offset[axis] += case.pick.choice((-1, 1, 2, state[key].local_shape[axis]))
    state[key] = copied(state[key], global_offset=offset)
    return "either"


@mistake("a rank's flattened range is shifted")
def _other_range(case: Case) -> str | None:
    state = case.source.states[some_rank(case, case.source.states)]
    keys = sorted(key for key, weight in state.items() if weight.is_flattened)
    if not keys:
        return None
    key, step = case.pick.choice(keys), case.pick.choice((-2, -1, 1, 2))
    flat = state[key].flattened_range
    state[key] = copied(state[key], flattened_range=slice(flat.start + step, flat.stop + step))
    return "either"


@mistake("a flattened range keeps its padding")
def _padding(case: Case) -> str | None:
    state = case.source.states[some_rank(case, case.source.states)]
    keys = sorted(key for key, weight in state.items() if weight.is_flattened)
    if not keys:
        return None
    key = case.pick.choice(keys)
    padded = np.concatenate([state[key].local_tensor, np.zeros(2, state[key].local_tensor.dtype)])
    flat = state[key].flattened_range
    changes = {"flattened_range": slice(flat.start, flat.stop + 2)} if case.pick.integer(0, 1) else {}
    state[key] = copied(state[key], local_tensor=padded, **changes)
    return "error" if not changes else "either"


@mistake("one element of a replica differs")
def _drifted(case: Case) -> str | None:
    state = case.source.states[some_rank(case, case.source.states)]
    keys = sorted(key for key, weight in state.items() if weight.local_tensor.size)
    if not keys:
        return None
    tensor = state[case.pick.choice(keys)].local_tensor
    flat = tensor.reshape(-1)
    flat[case.pick.integer(0, flat.size - 1)] += flat.dtype.type(1)
    return "either"


@mistake("a rank is a step behind")
def _behind(case: Case) -> str | None:
    for weight in case.source.states[some_rank(case, case.source.states)].values():
        weight.local_tensor[...] = weight.local_tensor + weight.local_tensor.dtype.type(1)
    return "either"


@mistake("a rank saves another dtype")
def _other_dtype(case: Case) -> str | None:
    state = case.source.states[some_rank(case, case.source.states)]
    key = some_key(case, state)
    if key is None:
        return None
    state[key] = copied(state[key], local_tensor=state[key].local_tensor.astype(np.float64))
    alone = sum(key in other for other in case.source.states) == 1
    return "error" if alone and case.way != "merged" and _asked(case, key) else "either"


def _asked(case: Case, key: str) -> bool:
    return any(key in state for state in case.target.states)


@mistake("a rank describes another global shape")
def _other_shape(case: Case) -> str | None:
    state = case.source.states[some_rank(case, case.source.states)]
    key = some_key(case, state)
    if key is None:
        return None
    shape = list(state[key].global_shape)
    shape[case.pick.integer(0, len(shape) - 1)] += 1
    state[key] = copied(state[key], global_shape=shape)
    return "either"


@mistake("a value is no tensor")
def _no_tensor(case: Case) -> str | None:
    side = case.pick.choice((case.source, case.target)) if case.way != "merged" else case.source
    state = side.states[some_rank(case, side.states)]
    state["step"] = case.pick.choice((7, None, "text", [1.0], 0.5))
    return "error"


@mistake("plain state_dict() under tensor parallelism, at the save")
def _plain_source(case: Case) -> str | None:
    for state in case.source.states:
        for key, weight in state.items():
            state[key] = weight.local_tensor
    case.source.parts.clear()
    return "either"


@mistake("plain state_dict() under tensor parallelism, at the load")
def _plain_target(case: Case) -> str | None:
    if case.way == "merged":
        return None
    changed = False
    for state in case.target.states:
        for key, weight in state.items():
            changed = changed or weight.local_tensor.shape != weight.global_shape
            state[key] = weight.local_tensor
    for key in case.target.parts:
        case.target.parts[key] = 1
    if any(parts > 1 for parts in case.source.parts.values()):
        return "either"
    return "error" if changed else "equal"


@mistake("only some of the ranks take part")
def _some_ranks(case: Case) -> str | None:
    count = len(case.source.states)
    if count < 2 or case.way == "memory":
        return None
    del case.source.states[case.pick.integer(1, count - 1) :]
    del case.save[len(case.source.states) :]
    return _lost_keys(case)


def _lost_keys(case: Case) -> str:
    saved = {key for state in case.source.states for key in state}
    asked = {key for state in case.target.states for key in state}
    return "error" if asked - saved and case.way != "merged" else "either"


# -- options ---------------------------------------------------------------------------------------------------------


def _differ(case: Case, options: list[dict[str, Any]], name: str, *values: Any) -> str | None:
    if len(options) < 2 or case.way == "merged":
        return None
    for each in options:
        each[name] = values[0]
    options[case.pick.integer(0, len(options) - 1)][name] = values[1]
    return "error"


def _saves(name: str, *values: Any) -> None:
    @mistake(f"ranks differ in {name} at the save")
    def _(case: Case) -> str | None:
        return None if case.way == "memory" else _differ(case, case.save, name, *values)


def _loads(name: str, *values: Any, files_only: bool = False) -> None:
    @mistake(f"ranks differ in {name} at the load")
    def _(case: Case) -> str | None:
        return None if case.way == "memory" and files_only else _differ(case, case.load, name, *values)


_saves("unique_id", 3, 4)
_saves("step", 10, 11)
_saves("save_replicas", True, False)
_saves("check_replicas", True, False)
_saves("coordinator_rank", 0, 1)
_loads("strict", "missing", True)
_loads("dtype", "raise", "cast")
_loads("fused", "convert", "exact")
_loads("tied_names", True, False)
_loads("master_weights", "exact", "convert")
_loads("mw_name_compatibility", True, False)
_loads("coordinator_rank", 0, 1)
_loads("aoa_config", None, ["a -> b"])


@mistake("ranks differ in the path at the save")
def _save_path(case: Case) -> str | None:
    return None if case.way == "memory" else _differ(case, case.save, "path", case.path, case.root / "elsewhere")


@mistake("ranks differ in the path at the load")
def _load_path(case: Case) -> str | None:
    _second_save(case, "elsewhere", "other")
    return None if case.way == "memory" else _differ(case, case.load, "path", case.path, case.root / "elsewhere")


@mistake("ranks differ in verify and use_replicas at the load")
def _verify(case: Case) -> str | None:
    if case.way != "files":
        return None
    for each in case.load:
        each.update(
            verify=case.pick.choice((True, False, "read", "full", "off")), use_replicas=case.pick.choice((0, 1)) == 1
        )
    return "equal"


@mistake("an unknown value of an option")
def _unknown(case: Case) -> str | None:
    if case.way == "merged":
        return None
    name, wrong = case.pick.choice((("strict", "all"), ("dtype", "float32"), ("fused", True), ("master_weights", "on"),
                                    ("coordinator_rank", 99), ("mw_name_compatibility", "yes")))  # fmt: skip
    for each in case.load:
        each[name] = wrong
    return "error"


@mistake("an unknown value of unique_id")
def _unknown_id(case: Case) -> str | None:
    if case.way == "memory":
        return None
    wrong = case.pick.choice((-1, "0", 1.5, case.root))
    for each in case.load if case.pick.integer(0, 1) or case.way == "merged" else case.save:
        each["unique_id"] = wrong
    return "error"


# -- swapped arguments -------------------------------------------------------------------------------------------------


@mistake("path and state swapped at the load")
def _swapped_load(case: Case) -> str | None:
    if case.way != "files":
        return None
    case.call = lambda comm, state, options: load_state_dict(case.path, state, comm)  # type: ignore[arg-type]
    return "error"


@mistake("path and state swapped at the save")
def _swapped_save(case: Case) -> str | None:
    if case.way == "memory":
        return None
    case.save_call = lambda comm, state, options: save_state_dict(case.path, state, comm)  # type: ignore[arg-type]
    return "error"


@mistake("source and target swapped in a reshard")
def _swapped_reshard(case: Case) -> str | None:
    if case.way != "memory":
        return None
    first, second = case.source, case.target
    # Nobody can know: what was to be filled is taken for the source, whatever it holds.
    for state in second.states:
        for weight in state.values():
            weight.local_tensor[...] = 1
    case.source, case.target = second, first
    return "either"


@mistake("path and id swapped at the load")
def _id_for_path(case: Case) -> str | None:
    if case.way == "memory":
        return None
    for each in case.load:
        each.update(path=0, unique_id=str(case.path))
    return "error"


@mistake("a path that is none")
def _no_path(case: Case) -> str | None:
    if case.way == "memory":
        return None
    options = case.pick.choice((case.load, case.save)) if case.way == "files" else case.load
    wrong = case.pick.choice((None, b"checkpoint", 3, "", case.root / "no" / "such"))
    if options is case.save and wrong == case.root / "no" / "such":
        wrong = None
    for each in options:
        each["path"] = wrong
    return "error"


@mistake("a path that is none on one rank")
def _no_path_here(case: Case) -> str | None:
    if case.way != "files":
        return None
    options = case.pick.choice((case.load, case.save))
    if len(options) < 2:
        return None
    options[case.pick.integer(0, len(options) - 1)]["path"] = case.pick.choice((None, b"checkpoint", 3))
    return "error"


# -- the wrong checkpoint ----------------------------------------------------------------------------------------------


def _saved(side: Side, path: Any, **options: Any) -> None:
    SimulatedWorld(len(side.states)).run(lambda c: save_state_dict(side.states[c.position], path, c, **options))


def _second_save(case: Case, name: str, salt: str, unique_id: int | None = None, model: Model | None = None) -> Side:
    """Another checkpoint of the same model, or of another, once the first is there."""
    side = build(model or case.model, random_strategy(case.pick), salt)
    case.after_save = lambda: _saved(side, case.root / name, unique_id=unique_id)
    return side


@mistake("the path of another run of the same model")
def _other_run(case: Case) -> str | None:
    if case.way == "memory":
        return None
    case.truth = _second_save(case, "elsewhere", "other")
    for each in case.load:
        each["path"] = case.root / "elsewhere"
    return "equal"  # nobody can know: it is that run's state


@mistake("the checkpoint was overwritten meanwhile")
def _overwritten(case: Case) -> str | None:
    if case.way == "memory":
        return None
    for each in case.save:
        each["unique_id"] = 0
    case.truth = _second_save(case, "checkpoint", "later", unique_id=0)
    return "equal"


@mistake("a later checkpoint is in the directory")
def _later(case: Case) -> str | None:
    if case.way == "memory":
        return None
    case.truth = _second_save(case, "checkpoint", "later")
    return "equal"


@mistake("an earlier id is asked for by one rank")
def _earlier_id(case: Case) -> str | None:
    if case.way != "files" or len(case.load) < 2:
        return None
    _second_save(case, "checkpoint", "later")
    return _differ(case, case.load, "unique_id", 1, 0)


@mistake("an id that is not there")
def _no_id(case: Case) -> str | None:
    if case.way == "memory":
        return None
    for each in case.load:
        each["unique_id"] = 17
    return "error"


@mistake("a save that fails over an earlier checkpoint")
def _failed_over(case: Case) -> str | None:
    if case.way == "memory":
        return None
    earlier = build(case.model, random_strategy(case.pick), "earlier")
    case.before = lambda: _saved(earlier, case.path, unique_id=0)

    def save(comm: Any, state: State, options: dict[str, Any]) -> None:
        save_state_dict(state, case.path, comm, unique_id=0)
        broken = {**state, "broken": 3 if comm.position == 0 else np.zeros(2)}
        try:
            save_state_dict(broken, case.path, comm, unique_id=0)
        except ValueError:
            return
        raise AssertionError("a state with a number in it was saved")

    case.save_call = save
    return "equal"


@mistake("another model's checkpoint")
def _other_model(case: Case) -> str | None:
    if case.way != "files":
        return None
    other = random_model(case.pick)
    if other.tensors() == case.model.tensors():
        return None
    case.truth = _second_save(case, "elsewhere", "other", model=other)
    for each in case.load:
        each["path"] = case.root / "elsewhere"
    asked = {key for state in case.target.states for key in state}
    there = other.tensors()
    same = asked <= set(there) and all(
        there[key][1:] == case.model.tensors()[key][1:]
        and there[key][0].statement == case.model.tensors()[key][0].statement
        for key in asked
    )
    case.model = other
    return "either" if same else "error"


# -- targets ---------------------------------------------------------------------------------------------------------


@mistake("a wrong prefix of all keys")
def _prefix(case: Case) -> str | None:
    if case.way == "merged":
        return None
    prefix = case.pick.choice(("model.", "net.", "_layers.", "optimizer."))
    for rank, state in enumerate(case.target.states):
        case.target.states[rank] = {prefix + key: copied(w, key=prefix + key, aliases=()) for key, w in state.items()}
        case.meant.update({prefix + key: key for key in state})
    case.target.parts.update({prefix + key: parts for key, parts in case.target.parts.items()})
    return "either" if any(case.target.states) else None


@mistake("a wrong prefix with strict=False")
def _lenient_prefix(case: Case) -> str | None:
    outcome = _prefix(case)
    if outcome is None:
        return None
    case.meant = dict.fromkeys(case.meant)
    for each in case.load:
        each["strict"] = False
        each["mw_name_compatibility"] = False
    return "either"


@mistake("another dtype of a target")
def _target_dtype(case: Case) -> str | None:
    if case.way == "merged":
        return None
    key = case.pick.choice(sorted(case.model.tensors()))
    cast = case.pick.integer(0, 1) == 1
    held = case.model.tensors()[key][2]
    dtype = case.pick.choice([d for d in (SINGLE, HALF, np.dtype(np.float64)) if d != held])
    found = False
    for state in case.target.states:
        if key in state:
            found = True
            state[key] = copied(state[key], local_tensor=sentinel(state[key].local_tensor.shape, dtype))
    for each in case.load:
        each["dtype"] = "cast" if cast else "raise"
    return ("either" if cast else "error") if found else None


@mistake("another size of the model")
def _size(case: Case) -> str | None:
    if case.way == "merged":
        return None
    parameters = list(case.model.parameters)
    place = case.pick.integer(0, len(parameters) - 1)
    shape = list(parameters[place].shape)
    shape[0] += case.pick.choice((1, 2, -1)) if shape[0] > 1 else 1
    parameters[place] = replace(parameters[place], shape=tuple(shape))
    other = replace(case.model, parameters=tuple(parameters))
    strategy = random_strategy(case.pick, len(case.target.states))
    case.target = build(other, strategy, None)
    del case.load[len(case.target.states) :]
    if case.way == "memory":
        case.target.states += [{} for _ in range(len(case.source.states) - len(case.target.states))]
        case.load += [dict(case.load[0]) for _ in range(len(case.source.states) - len(case.load))]
    for each in case.load:
        each["strict"] = case.pick.choice((False, "missing")) if each is case.load[0] else case.load[0]["strict"]
    return "error"


@mistake("a transposed target")
def _transposed(case: Case) -> str | None:
    if case.way == "merged":
        return None
    keys = sorted(k for k, (p, shape, _) in case.model.tensors().items() if len(shape) == 2 and not p.statement)
    if not keys:
        return None
    key = case.pick.choice(keys)
    shape, dtype = case.model.tensors()[key][1:]
    for state in case.target.states:
        state[key] = ShardedWeight(key, sentinel(shape[::-1], dtype), shape[::-1], shape[::-1], (0, 0))
    return "equal" if shape[0] == shape[1] else "error"


@mistake("a target that no checkpoint has")
def _more(case: Case) -> str | None:
    if case.way == "merged":
        return None
    rank, strict = some_rank(case, case.target.states), case.pick.choice((True, False, "missing", "unexpected"))
    case.target.states[rank]["new.bias"] = ShardedWeight("new.bias", sentinel((3,), SINGLE), (3,), (3,), (0,))
    case.meant["new.bias"] = None
    for each in case.load:
        each["strict"] = strict
    return "error" if strict in (True, "missing") else "either"


@mistake("keys that no rank asks for")
def _fewer(case: Case) -> str | None:
    if case.way == "merged":
        return None
    parameter = case.pick.choice(case.model.parameters)
    gone = [key for key, (owner, _, _) in case.model.tensors().items() if owner is parameter]
    strict = case.pick.choice((True, False, "missing", "unexpected"))
    for state in case.target.states:
        for key in gone:
            state.pop(key, None)
    for each in case.load:
        each["strict"] = strict
    return "error" if strict in (True, "unexpected") else "either"


@mistake("the optimizer is missing from the targets")
def _no_optimizer(case: Case) -> str | None:
    if case.way == "merged" or not case.model.optimizer:
        return None
    parameters = {parameter.key for parameter in case.model.parameters}
    for rank, state in enumerate(case.target.states):
        case.target.states[rank] = {key: weight for key, weight in state.items() if key in parameters}
    for each in case.load:
        each["strict"] = "missing"
    return "error" if any(case.target.states) else None


@mistake("the optimizer is missing from the save")
def _no_optimizer_saved(case: Case) -> str | None:
    if not case.model.optimizer:
        return None
    parameters = {parameter.key for parameter in case.model.parameters}
    for rank, state in enumerate(case.source.states):
        case.source.states[rank] = {key: weight for key, weight in state.items() if key in parameters}
    return "either" if case.way == "merged" else "error"


@mistake("a rank forgets some of its targets")
def _forgets(case: Case) -> str | None:
    if case.way == "merged":
        return None
    state = case.target.states[some_rank(case, case.target.states)]
    key = some_key(case, state)
    if key is None:
        return None
    del state[key]
    return "either"


@mistake("a rank asks for another rank's targets")
def _other_targets(case: Case) -> str | None:
    pair = another(case, case.target.states)
    if pair is None or case.way == "merged":
        return None
    first, second = case.target.states[pair[0]], case.target.states[pair[1]]
    case.target.states[pair[0]] = {k: copied(w, local_tensor=w.local_tensor.copy()) for k, w in second.items()}
    return "either" if first else "equal"


@mistake("two targets in one memory")
def _one_memory(case: Case) -> str | None:
    if case.way == "merged":
        return None
    for state in case.target.states:
        moments = sorted(key for key in state if key.endswith("moment1_0") and state[key].local_tensor.size)
        if moments:
            twin = moments[0].replace("moment1_0", "moment2_0")
            if twin in state and state[twin].local_tensor.shape == state[moments[0]].local_tensor.shape:
                state[twin] = copied(state[twin], local_tensor=state[moments[0]].local_tensor)
                return "error"
    return None


@mistake("a target that cannot be written")
def _read_only(case: Case) -> str | None:
    if case.way == "merged":
        return None
    state = case.target.states[some_rank(case, case.target.states)]
    keys = sorted(key for key, weight in state.items() if weight.local_tensor.size)
    if not keys:
        return None
    state[case.pick.choice(keys)].local_tensor.flags.writeable = False
    return "error"


@mistake("source and target in one memory")
def _same_memory(case: Case) -> str | None:
    if case.way != "memory":
        return None
    for source, target in zip(case.source.states, case.target.states):
        for key, weight in sorted(target.items()):
            mine = source.get(key)
            if mine is None or not mine.local_tensor.size or mine.local_tensor.shape != weight.local_tensor.shape:
                continue
            target[key] = copied(weight, local_tensor=mine.local_tensor)
            places = [(w.global_offset, w.local_shape, w.flattened_range) for w in (mine, weight)]
            return "equal" if places[0] == places[1] and case.source.parts == case.target.parts else "either"
    return None


@mistake("loaded twice")
def _twice(case: Case) -> str | None:
    if case.way != "files":
        return None

    def call(comm: Any, state: State, options: dict[str, Any]) -> Any:
        load_state_dict(state, case.path, comm, **options)
        return load_state_dict(state, case.path, comm, **options)

    case.call = call
    return "equal"


# -- fused parameters --------------------------------------------------------------------------------------------------


def _unmarked(side: Side, ranks: Any) -> bool:
    found = False
    for rank in ranks:
        for weight in side.states[rank].values():
            found = found or weight.fused is not None
            weight.fused = None
    return found


@mistake("a fused parameter not marked at the load")
def _unmarked_target(case: Case) -> str | None:
    if case.way == "merged":
        return None
    return "either" if _unmarked(case.target, range(len(case.target.states))) else None


@mistake("a fused parameter not marked at the save")
def _unmarked_source(case: Case) -> str | None:
    return "either" if _unmarked(case.source, range(len(case.source.states))) else None


@mistake("a fused parameter not marked on one rank")
def _unmarked_rank(case: Case) -> str | None:
    side = case.pick.choice((case.source, case.target)) if case.way != "merged" else case.source
    return "either" if _unmarked(side, [some_rank(case, side.states)]) else None


@mistake("a fused parameter with another statement")
def _other_statement(case: Case) -> str | None:
    changed = False
    for state in case.target.states:
        for weight in state.values():
            if weight.fused is not None and weight.fused.statement == "fused_ffn":
                other = "fused_qkv_old, num_heads=4, num_key_value_groups=2"
                weight.fused, changed = replace(weight.fused, statement=other), True
    return "either" if changed and case.way != "merged" else None


@mistake("fused=exact under another degree")
def _exact(case: Case) -> str | None:
    if case.way == "merged":
        return None
    for each in case.load:
        each["fused"] = "exact"
    return "either"


# -- master weights and tied names ------------------------------------------------------------------------------------


@mistake("master weights on at the load only")
def _masters_on(case: Case) -> str | None:
    masters = sorted(k for k in case.model.tensors() if k.endswith(MASTER))
    if case.way == "merged" or not masters:
        return None
    convert = case.pick.integer(0, 1) == 1
    for state in case.source.states:
        for key in masters:
            state.pop(key, None)
    for key in masters:
        case.meant[key] = key[: -len(MASTER) - 1]
    for each in case.load:
        each["master_weights"] = "convert" if convert else "exact"
    asked = any(key in state for key in masters for state in case.target.states)
    return ("either" if convert else "error") if asked else None


@mistake("half precision loaded as float32")
def _to_single(case: Case) -> str | None:
    halves = sorted(p.key for p in case.model.parameters if p.dtype == HALF)
    if case.way == "merged" or not halves:
        return None
    masters = case.model.optimizer and case.model.masters
    convert = case.pick.integer(0, 1) == 1
    for state in case.target.states:
        for key in halves:
            if key in state:
                state[key] = copied(state[key], local_tensor=sentinel(state[key].local_tensor.shape, SINGLE))
            state.pop(f"{key}.{MASTER}", None)
    if masters and convert:
        case.meant.update({key: f"{key}.{MASTER}" for key in halves})
    for each in case.load:
        each.update(master_weights="convert" if convert else "exact", strict="missing")
    asked = any(key in state for key in halves for state in case.target.states)
    return ("either" if convert and masters else "error") if asked else None


@mistake("a tied parameter under its other name")
def _tied(case: Case) -> str | None:
    parameter = case.model.parameters[0]
    if case.way == "merged" or parameter.tied is None:
        return None
    names = case.pick.integer(0, 1) == 1
    for rank, state in enumerate(case.source.states):
        case.source.states[rank] = {
            (parameter.tied + key[len(parameter.key) :] if key.startswith(parameter.key) else key): weight
            for key, weight in state.items()
        }
    for key in list(case.model.tensors()):
        if key.startswith(parameter.key):
            case.meant[key] = parameter.tied + key[len(parameter.key) :]
    for each in case.load:
        each["tied_names"] = names
    return "either" if names else "error"


# -- AOA ---------------------------------------------------------------------------------------------------------------


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


@mistake("a reshard into another strategy, then back")
def _there_and_back(case: Case) -> str | None:
    if case.way != "memory":
        return None

    def call(comm: Any, state: State, options: dict[str, Any]) -> Any:
        mine = case.source.states[comm.position]
        there = {
            k: copied(w, local_tensor=sentinel(w.local_tensor.shape, w.local_tensor.dtype)) for k, w in mine.items()
        }
        reshard_sharded_state_dict(mine, state, comm, **options)
        reshard_sharded_state_dict(state, there, comm, **options)
        for each in state.values():
            each.local_tensor[...] = sentinel(each.local_tensor.shape, each.local_tensor.dtype)
        return reshard_sharded_state_dict(there, state, comm, **options)

    case.call = call
    return "equal"

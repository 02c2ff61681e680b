"""Mistakes in what is to be filled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from paddle_flexckpt.loading.loader import load_state_dict
from paddle_flexckpt.loading.resharder import reshard_sharded_state_dict
from paddle_flexckpt.sharded_weight import ShardedWeight
from tests.silence.judge import Case
from tests.silence.mistakes import another, copied, mistake, some_key, some_rank
from tests.silence.models import (
    HALF,
    MASTER,
    SINGLE,
    Side,
    State,
    build,
    random_strategy,
    sentinel,
)

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


@mistake("weights alone, explicitly")
def _weights_alone(case: Case) -> str | None:
    outcome = _no_optimizer(case)
    for each in case.load:
        each["optimizer_states"] = "ignore"
    return outcome and "equal"


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
    if case.way == "merged":
        case.source.parts.clear()  # nobody says that it is fused: it comes in the order of the ranks
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

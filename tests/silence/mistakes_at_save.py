"""Mistakes in what ranks save: the shards are painted, and that decides."""

from __future__ import annotations

import numpy as np

from tests.silence.judge import Case
from tests.silence.mistakes import another, copied, mistake, some_key, some_rank


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
    for options in case.save if case.way != "memory" else ():
        options["check_replicas"] = "all"  # by default a copy that is not what is saved is compared in part
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
    alone = sum(key in other for other in case.source.states) == 1
    if alone and case.way == "merged":
        return None  # it is no mistake: the dtype that was saved is what a merged load gives
    state[key] = copied(state[key], local_tensor=state[key].local_tensor.astype(np.float64))
    return "error" if alone and _asked(case, key) else "either"


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
    case.source.parts = dict.fromkeys(case.source.parts, 1)  # a whole tensor without a rule is in natural order
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
